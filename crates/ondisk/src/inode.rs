//! Inodes and the references that name them.

use zerocopy::little_endian::{U16, U32, U64};

use crate::misc::{Timespec, on_disk};

on_disk!(
    /// `struct btrfs_inode_item`. Key: (inode, INODE_ITEM, 0).
    InodeItem [160] {
        /// Generation in which the inode was made; what NFS and FUSE call its generation.
        generation: U64,
        /// Transaction of the last change.
        transid: U64,
        /// Size in bytes.
        size: U64,
        /// Bytes that its extents take: holes out, preallocation in, inline data by length.
        nbytes: U64,
        /// Allocation hint, 0.
        block_group: U64,
        /// Names; 1 for a directory.
        nlink: U32,
        /// Owner.
        uid: U32,
        /// Group.
        gid: U32,
        /// Type and permissions, as `st_mode`.
        mode: U32,
        /// Device number of a device node: `(major << 20) | minor` (`old_encode` is not used).
        rdev: U64,
        /// [`flags`].
        flags: U64,
        /// Change counter for NFS.
        sequence: U64,
        /// Reserved.
        reserved: [U64; 4],
        /// Last access.
        atime: Timespec,
        /// Last change of the inode.
        ctime: Timespec,
        /// Last change of the content.
        mtime: Timespec,
        /// Birth.
        otime: Timespec,
    }
);

/// Bits of [`InodeItem::flags`]: `BTRFS_INODE_*`.
pub mod flags {
    /// Data has no checksums.
    pub const NODATASUM: u64 = 1 << 0;
    /// Data is written in place.
    pub const NODATACOW: u64 = 1 << 1;
    /// Not read-write.
    pub const READONLY: u64 = 1 << 2;
    /// Data is not compressed.
    pub const NOCOMPRESS: u64 = 1 << 3;
    /// Has preallocated extents.
    pub const PREALLOC: u64 = 1 << 4;
    /// Written at once.
    pub const SYNC: u64 = 1 << 5;
    /// Cannot change.
    pub const IMMUTABLE: u64 = 1 << 6;
    /// Only grows.
    pub const APPEND: u64 = 1 << 7;
    /// Not dumped.
    pub const NODUMP: u64 = 1 << 8;
    /// Access times are not kept.
    pub const NOATIME: u64 = 1 << 9;
    /// Directory changes are written at once.
    pub const DIRSYNC: u64 = 1 << 10;
    /// Data is compressed.
    pub const COMPRESS: u64 = 1 << 11;
    /// Set in the inode of a root item.
    pub const ROOT_ITEM_INIT: u64 = 1 << 31;
    /// fs-verity, in the upper (read-only compatible) half.
    pub const RO_VERITY: u64 = 1 << 32;
}

on_disk!(
    /// `struct btrfs_inode_ref`, the name behind it. Key: (inode, INODE_REF, parent directory).
    /// An item may hold several.
    InodeRef [10] {
        /// Index in the directory.
        index: U64,
        /// Bytes of the name.
        name_len: U16,
    }
);

on_disk!(
    /// `struct btrfs_inode_extref`, the name behind it. Key: (inode, INODE_EXTREF, hash).
    InodeExtref [18] {
        /// The parent directory.
        parent_objectid: U64,
        /// Index in the directory.
        index: U64,
        /// Bytes of the name.
        name_len: U16,
    }
);
