//! Tree roots and the references that name subvolumes.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use crate::error::Result;
use crate::inode::InodeItem;
use crate::key::DiskKey;
use crate::misc::{OnDisk, Timespec, on_disk, truncated};
use crate::types::InodeNo;

on_disk!(
    /// `struct btrfs_root_item`. Key: (tree, ROOT_ITEM, 0 or the transaction that snapshotted it).
    RootItem [439] {
        /// An inode, of which a subvolume uses little.
        inode: InodeItem,
        /// Generation of the root block.
        generation: U64,
        /// The root directory's inode: 256 for a subvolume, else 0.
        root_dirid: U64,
        /// The root block.
        bytenr: U64,
        /// Unused.
        byte_limit: U64,
        /// Bytes of blocks in the tree.
        bytes_used: U64,
        /// Transaction of the last snapshot of it.
        last_snapshot: U64,
        /// [`flags`].
        flags: U64,
        /// References: 1, or 0 once deleted.
        refs: U32,
        /// How far a deletion has come.
        drop_progress: DiskKey,
        /// The level of that.
        drop_level: u8,
        /// The root block's level.
        level: u8,
        /// Equal to `generation` where the fields behind are right.
        generation_v2: U64,
        /// The subvolume's uuid.
        uuid: [u8; 16],
        /// The uuid of what it is a snapshot of.
        parent_uuid: [u8; 16],
        /// The uuid of what it was received from.
        received_uuid: [u8; 16],
        /// Transaction of the last change inside.
        ctransid: U64,
        /// Transaction of its making.
        otransid: U64,
        /// Transaction of its sending, at the sender.
        stransid: U64,
        /// Transaction of its receiving.
        rtransid: U64,
        /// Time of the last change inside.
        ctime: Timespec,
        /// Time of its making.
        otime: Timespec,
        /// Time of its sending.
        stime: Timespec,
        /// Time of its receiving.
        rtime: Timespec,
        /// Reserved.
        reserved: [U64; 8],
    }
);

/// Bytes of a root item before `generation_v2`: what filesystems of before Linux 3.6 hold.
pub const ROOT_ITEM_V1_BYTES: usize = 239;

/// Bits of [`RootItem::flags`].
pub mod flags {
    /// The subvolume is read-only.
    pub const RDONLY: u64 = 1 << 0;
    /// The subvolume is deleted.
    pub const DEAD: u64 = 1 << 48;
}

impl RootItem {
    /// Reads a ROOT_ITEM of either length. The later fields are zero where they are missing or
    /// were left stale by a kernel that did not know them.
    ///
    /// # Errors
    /// `Truncated` when shorter than the old form.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() < ROOT_ITEM_V1_BYTES {
            return Err(truncated(bytes.len(), ROOT_ITEM_V1_BYTES));
        }
        let mut item = Self::new_zeroed();
        let len = bytes.len().min(size_of::<Self>());
        item.as_mut_bytes()[..len].copy_from_slice(&bytes[..len]);
        if item.generation != item.generation_v2 {
            item.as_mut_bytes()[ROOT_ITEM_V1_BYTES..].fill(0);
        }
        Ok(item)
    }
}

on_disk!(
    /// `struct btrfs_root_ref`, the name behind it. Keys: (parent tree, ROOT_REF, child tree) and
    /// (child tree, ROOT_BACKREF, parent tree).
    RootRef [18] {
        /// The directory in the parent.
        dirid: U64,
        /// The index in that directory.
        sequence: U64,
        /// Bytes of the name.
        name_len: U16,
    }
);

impl RootRef {
    /// Appends a reference: the directory in the parent, the index there, and the name.
    ///
    /// # Panics
    /// When the name is longer than 65,535 bytes, which no item can hold.
    pub fn write(out: &mut Vec<u8>, dir: InodeNo, index: u64, name: &[u8]) {
        let root_ref = Self {
            dirid: dir.0.into(),
            sequence: index.into(),
            name_len: u16::try_from(name.len()).expect("a name fits its item").into(),
        };
        out.extend_from_slice(root_ref.as_bytes());
        out.extend_from_slice(name);
    }

    /// The reference and the name behind it.
    ///
    /// # Errors
    /// `Truncated` when the name reaches past the item.
    pub fn parse(bytes: &[u8]) -> Result<(&Self, &[u8])> {
        let (root_ref, rest) = Self::split(bytes)?;
        let name_len = usize::from(root_ref.name_len.get());
        let name = rest.get(..name_len).ok_or_else(|| truncated(rest.len(), name_len))?;
        Ok((root_ref, name))
    }
}
