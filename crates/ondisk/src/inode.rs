//! Inodes and the references that name them.

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::error::Result;
use crate::misc::{OnDisk, Timespec, on_disk, truncated};
use crate::types::InodeNo;

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
    /// All of the lower half that Linux knows; others forbid reading the inode.
    pub const KNOWN: u64 = 0xfff | ROOT_ITEM_INIT;
    /// Set in the inode of a root item.
    pub const ROOT_ITEM_INIT: u64 = 1 << 31;
    /// fs-verity, in the upper (read-only compatible) half.
    pub const RO_VERITY: u64 = 1 << 32;
    /// All of the upper half that Linux knows; others forbid reading the inode where the filesystem is
    /// mounted for writing.
    pub const KNOWN_RO: u64 = RO_VERITY;
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

/// One name of an INODE_REF item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RefName<'a> {
    /// Index in the directory; the directory is the key's offset.
    pub index: u64,
    /// The name.
    pub name: &'a [u8],
}

impl RefName<'_> {
    /// Bytes that it takes in its item.
    pub fn len_bytes(&self) -> usize {
        size_of::<InodeRef>() + self.name.len()
    }

    /// Appends its bytes.
    ///
    /// # Panics
    /// When the name is longer than 65,535 bytes, which no item can hold.
    pub fn write(&self, out: &mut Vec<u8>) {
        let name_len = u16::try_from(self.name.len()).expect("a name fits its item");
        let fixed = InodeRef { index: self.index.into(), name_len: name_len.into() };
        out.extend_from_slice(fixed.as_bytes());
        out.extend_from_slice(self.name);
    }
}

/// One name of an INODE_EXTREF item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExtrefName<'a> {
    /// The directory.
    pub parent: InodeNo,
    /// Index in the directory.
    pub index: u64,
    /// The name.
    pub name: &'a [u8],
}

impl ExtrefName<'_> {
    /// Bytes that it takes in its item.
    pub fn len_bytes(&self) -> usize {
        size_of::<InodeExtref>() + self.name.len()
    }

    /// Appends its bytes.
    ///
    /// # Panics
    /// When the name is longer than 65,535 bytes, which no item can hold.
    pub fn write(&self, out: &mut Vec<u8>) {
        let name_len = u16::try_from(self.name.len()).expect("a name fits its item");
        let fixed = InodeExtref {
            parent_objectid: self.parent.0.into(),
            index: self.index.into(),
            name_len: name_len.into(),
        };
        out.extend_from_slice(fixed.as_bytes());
        out.extend_from_slice(self.name);
    }
}

/// Appends one name of an INODE_REF item.
///
/// # Panics
/// When the name is longer than 65,535 bytes, which no item can hold.
pub fn write_ref(out: &mut Vec<u8>, index: u64, name: &[u8]) {
    RefName { index, name }.write(out);
}

/// Appends one name of an INODE_EXTREF item.
///
/// # Panics
/// When the name is longer than 65,535 bytes, which no item can hold.
pub fn write_extref(out: &mut Vec<u8>, parent: InodeNo, index: u64, name: &[u8]) {
    ExtrefName { parent, index, name }.write(out);
}

fn split_name(rest: &[u8], name_len: U16) -> Result<(&[u8], &[u8])> {
    let name_len = usize::from(name_len.get());
    rest.split_at_checked(name_len).ok_or_else(|| truncated(rest.len(), name_len))
}

/// Walks the names of an INODE_REF item. An error ends the walk.
#[derive(Clone, Copy, Debug)]
pub struct InodeRefs<'a> {
    rest: &'a [u8],
}

impl<'a> InodeRefs<'a> {
    /// The names in an item's bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    fn split(bytes: &'a [u8]) -> Result<(RefName<'a>, &'a [u8])> {
        let (fixed, rest) = InodeRef::split(bytes)?;
        let (name, rest) = split_name(rest, fixed.name_len)?;
        Ok((RefName { index: fixed.index.get(), name }, rest))
    }
}

impl<'a> Iterator for InodeRefs<'a> {
    type Item = Result<RefName<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let (name, rest) = match Self::split(self.rest) {
            Ok((name, rest)) => (Ok(name), rest),
            Err(error) => (Err(error), &[][..]),
        };
        self.rest = rest;
        Some(name)
    }
}

/// Walks the names of an INODE_EXTREF item. An error ends the walk.
#[derive(Clone, Copy, Debug)]
pub struct InodeExtrefs<'a> {
    rest: &'a [u8],
}

impl<'a> InodeExtrefs<'a> {
    /// The names in an item's bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    fn split(bytes: &'a [u8]) -> Result<(ExtrefName<'a>, &'a [u8])> {
        let (fixed, rest) = InodeExtref::split(bytes)?;
        let (name, rest) = split_name(rest, fixed.name_len)?;
        let parent = InodeNo(fixed.parent_objectid.get());
        Ok((ExtrefName { parent, index: fixed.index.get(), name }, rest))
    }
}

impl<'a> Iterator for InodeExtrefs<'a> {
    type Item = Result<ExtrefName<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let (name, rest) = match Self::split(self.rest) {
            Ok((name, rest)) => (Ok(name), rest),
            Err(error) => (Err(error), &[][..]),
        };
        self.rest = rest;
        Some(name)
    }
}
