//! Extents and their back references.

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::error::{Corruption, Reason, Result};
use crate::hash::extent_data_ref_hash;
use crate::key::{DiskKey, Key, KeyType};
use crate::misc::{OnDisk, on_disk};
use crate::types::{InodeNo, LogicalAddr, ObjectId, RootId};

on_disk!(
    /// `struct btrfs_extent_item`. Keys: (logical address, EXTENT_ITEM, length) and, for a tree
    /// block with SKINNY_METADATA, (logical address, METADATA_ITEM, level).
    ExtentItem [24] {
        /// References, inline and keyed.
        refs: U64,
        /// Generation in which it was allocated.
        generation: U64,
        /// [`flags`].
        flags: U64,
    }
);

/// Bits of [`ExtentItem::flags`].
pub mod flags {
    /// File data.
    pub const DATA: u64 = 1 << 0;
    /// A tree block.
    pub const TREE_BLOCK: u64 = 1 << 1;
    /// The block's children and extents are referenced by its address, not by its owner.
    pub const FULL_BACKREF: u64 = 1 << 8;
}

on_disk!(
    /// `struct btrfs_tree_block_info`, behind the extent item of a tree block without
    /// SKINNY_METADATA.
    TreeBlockInfo [18] {
        /// The block's first key.
        key: DiskKey,
        /// Its level.
        level: u8,
    }
);

on_disk!(
    /// `struct btrfs_extent_data_ref`: a reference from a file of a subvolume.
    ExtentDataRef [28] {
        /// The subvolume.
        root: U64,
        /// The inode.
        objectid: U64,
        /// File offset minus offset in the extent.
        offset: U64,
        /// File extents that refer so.
        count: U32,
    }
);

on_disk!(
    /// `struct btrfs_shared_data_ref`: a reference from the file extents of one leaf.
    SharedDataRef [4] {
        /// File extents of the leaf that refer.
        count: U32,
    }
);

on_disk!(
    /// `struct btrfs_extent_inline_ref`, without what its type adds.
    ExtentInlineRef [9] {
        /// A key type.
        ty: u8,
        /// Root, parent block or owner; for EXTENT_DATA_REF the struct begins here instead.
        offset: U64,
    }
);

/// A back reference, inline or keyed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum BackRef {
    /// A tree block in a tree.
    TreeBlock {
        /// The tree.
        root: RootId,
    },
    /// A tree block below a block that is shared.
    SharedBlock {
        /// The parent block.
        parent: LogicalAddr,
    },
    /// Data in a file.
    ExtentData {
        /// The subvolume.
        root: RootId,
        /// The inode.
        inode: InodeNo,
        /// File offset minus offset in the extent (may wrap below zero).
        offset: u64,
        /// File extents that refer so.
        count: u32,
    },
    /// Data in the file extents of a leaf that is shared.
    SharedData {
        /// The leaf.
        parent: LogicalAddr,
        /// File extents that refer so.
        count: u32,
    },
    /// Who allocated a data extent (simple quota). Counts as no reference.
    Owner {
        /// The subvolume.
        root: RootId,
    },
}

impl BackRef {
    /// The key type of the reference.
    pub fn key_type(&self) -> KeyType {
        match self {
            Self::TreeBlock { .. } => KeyType::TREE_BLOCK_REF,
            Self::SharedBlock { .. } => KeyType::SHARED_BLOCK_REF,
            Self::ExtentData { .. } => KeyType::EXTENT_DATA_REF,
            Self::SharedData { .. } => KeyType::SHARED_DATA_REF,
            Self::Owner { .. } => KeyType::EXTENT_OWNER_REF,
        }
    }

    /// The offset of its key when keyed (before any probe for a collision), and the value that
    /// orders it, descending, among inline ones of its type.
    pub fn key_offset(&self) -> u64 {
        match *self {
            Self::TreeBlock { root } | Self::Owner { root } => root.0,
            Self::SharedBlock { parent } | Self::SharedData { parent, .. } => parent.0,
            Self::ExtentData { root, inode, offset, .. } => {
                extent_data_ref_hash(root, inode, offset)
            }
        }
    }

    /// How many references it stands for.
    pub fn count(&self) -> u64 {
        match *self {
            Self::TreeBlock { .. } | Self::SharedBlock { .. } => 1,
            Self::ExtentData { count, .. } | Self::SharedData { count, .. } => u64::from(count),
            Self::Owner { .. } => 0,
        }
    }

    /// Bytes that it takes inline.
    pub fn inline_len_bytes(&self) -> usize {
        match self {
            Self::TreeBlock { .. } | Self::SharedBlock { .. } | Self::Owner { .. } => 9,
            Self::ExtentData { .. } => 1 + size_of::<ExtentDataRef>(),
            Self::SharedData { .. } => 9 + size_of::<SharedDataRef>(),
        }
    }

    /// Appends the inline form.
    pub fn write_inline(&self, out: &mut Vec<u8>) {
        out.push(self.key_type().0);
        match *self {
            Self::TreeBlock { root } | Self::Owner { root } => {
                out.extend_from_slice(&root.0.to_le_bytes());
            }
            Self::SharedBlock { parent } => out.extend_from_slice(&parent.0.to_le_bytes()),
            Self::ExtentData { root, inode, offset, count } => {
                out.extend_from_slice(&root.0.to_le_bytes());
                out.extend_from_slice(&inode.0.to_le_bytes());
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(&count.to_le_bytes());
            }
            Self::SharedData { parent, count } => {
                out.extend_from_slice(&parent.0.to_le_bytes());
                out.extend_from_slice(&count.to_le_bytes());
            }
        }
    }

    /// Splits the first inline reference off `bytes`.
    ///
    /// # Errors
    /// `Truncated`, or `BadValue` for a type that cannot be inline.
    pub fn split_inline(bytes: &[u8]) -> Result<(Self, &[u8])> {
        let (head, behind_head) = ExtentInlineRef::split(bytes)?;
        let offset = head.offset.get();
        Ok(match KeyType(head.ty) {
            KeyType::TREE_BLOCK_REF => (Self::TreeBlock { root: RootId(offset) }, behind_head),
            KeyType::EXTENT_OWNER_REF => (Self::Owner { root: RootId(offset) }, behind_head),
            KeyType::SHARED_BLOCK_REF => {
                (Self::SharedBlock { parent: LogicalAddr(offset) }, behind_head)
            }
            KeyType::EXTENT_DATA_REF => {
                let (data_ref, rest) = ExtentDataRef::split(&bytes[1..])?;
                (Self::from_data_ref(data_ref), rest)
            }
            KeyType::SHARED_DATA_REF => {
                let (shared, rest) = SharedDataRef::split(behind_head)?;
                let parent = LogicalAddr(offset);
                (Self::SharedData { parent, count: shared.count.get() }, rest)
            }
            other => {
                return Err(Corruption::new(Reason::BadValue)
                    .have(format!("inline reference of type {other}"))
                    .expect("a reference type"));
            }
        })
    }

    /// The key of the reference as an item of its own, for the extent at `bytenr`. An
    /// EXTENT_DATA_REF whose key is taken by another goes to the next free offset.
    pub fn key(&self, bytenr: LogicalAddr) -> Key {
        Key::new(ObjectId(bytenr.0), self.key_type(), self.key_offset())
    }

    /// Appends the data of the reference as an item of its own.
    pub fn write_keyed(&self, out: &mut Vec<u8>) {
        match *self {
            Self::TreeBlock { .. } | Self::SharedBlock { .. } | Self::Owner { .. } => {}
            Self::ExtentData { root, inode, offset, count } => {
                let data_ref = ExtentDataRef {
                    root: root.0.into(),
                    objectid: inode.0.into(),
                    offset: offset.into(),
                    count: count.into(),
                };
                out.extend_from_slice(data_ref.as_bytes());
            }
            Self::SharedData { count, .. } => {
                out.extend_from_slice(SharedDataRef { count: count.into() }.as_bytes());
            }
        }
    }

    /// Reads a reference that is an item of its own.
    ///
    /// # Errors
    /// `Truncated`, or `BadKey` for a key that is no reference.
    pub fn parse_keyed(key: Key, bytes: &[u8]) -> Result<Self> {
        Ok(match key.ty {
            KeyType::TREE_BLOCK_REF => Self::TreeBlock { root: RootId(key.offset) },
            KeyType::EXTENT_OWNER_REF => Self::Owner { root: RootId(key.offset) },
            KeyType::SHARED_BLOCK_REF => Self::SharedBlock { parent: LogicalAddr(key.offset) },
            KeyType::EXTENT_DATA_REF => Self::from_data_ref(ExtentDataRef::peek(bytes)?),
            KeyType::SHARED_DATA_REF => {
                let shared = SharedDataRef::peek(bytes)?;
                Self::SharedData { parent: LogicalAddr(key.offset), count: shared.count.get() }
            }
            _ => return Err(Corruption::new(Reason::BadKey).have(key).expect("a reference")),
        })
    }

    /// The order of inline references in an item: types ascending, within a type
    /// [`BackRef::key_offset`] descending.
    pub fn inline_cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key_type()
            .cmp(&other.key_type())
            .then_with(|| other.key_offset().cmp(&self.key_offset()))
    }

    /// The reference of a keyed EXTENT_DATA_REF item, or the body of an inline one.
    pub fn from_data_ref(data_ref: &ExtentDataRef) -> Self {
        Self::ExtentData {
            root: RootId(data_ref.root.get()),
            inode: InodeNo(data_ref.objectid.get()),
            offset: data_ref.offset.get(),
            count: data_ref.count.get(),
        }
    }
}

/// Walks the inline references behind an extent item (and tree block info, where there is one).
#[derive(Clone, Copy, Debug)]
pub struct InlineRefs<'a> {
    rest: &'a [u8],
}

impl<'a> InlineRefs<'a> {
    /// The references in `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The references of an extent or metadata item's bytes.
    ///
    /// # Errors
    /// `Truncated` when the fixed part does not fit.
    pub fn of_item(ty: KeyType, bytes: &'a [u8]) -> Result<Self> {
        let (item, mut rest) = ExtentItem::split(bytes)?;
        if ty == KeyType::EXTENT_ITEM && item.flags.get() & flags::TREE_BLOCK != 0 {
            rest = TreeBlockInfo::split(rest)?.1;
        }
        Ok(Self { rest })
    }
}

impl Iterator for InlineRefs<'_> {
    type Item = Result<BackRef>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        match BackRef::split_inline(self.rest) {
            Ok((back_ref, rest)) => {
                self.rest = rest;
                Some(Ok(back_ref))
            }
            Err(error) => {
                self.rest = &[];
                Some(Err(error))
            }
        }
    }
}
