//! Keys: (object id, type, offset), ordered in that order.

use std::fmt;

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::types::{ObjectId, Uuid};

/// The middle field of a key: what kind of item it names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct KeyType(pub u8);

macro_rules! key_types {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        impl KeyType {
            $($(#[$doc])* pub const $name: Self = Self($value);)*

            /// The uapi name without its `BTRFS_` and `_KEY`, where the number is known. Two
            /// numbers carry several meanings: 248 and 249 are told apart by object id.
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

key_types! {
    /// An inode.
    INODE_ITEM = 1;
    /// A name of an inode, by parent directory.
    INODE_REF = 12;
    /// A name of an inode, by hash of parent and name.
    INODE_EXTREF = 13;
    /// An extended attribute.
    XATTR_ITEM = 24;
    /// fs-verity descriptor.
    VERITY_DESC_ITEM = 36;
    /// fs-verity Merkle tree.
    VERITY_MERKLE_ITEM = 37;
    /// An inode or root to delete at the next open.
    ORPHAN_ITEM = 48;
    /// A logged range of directory name hashes.
    DIR_LOG_ITEM = 60;
    /// A logged range of directory indexes.
    DIR_LOG_INDEX = 72;
    /// A directory entry by name hash.
    DIR_ITEM = 84;
    /// A directory entry by index.
    DIR_INDEX = 96;
    /// A file extent.
    EXTENT_DATA = 108;
    /// Checksums of data.
    EXTENT_CSUM = 128;
    /// A tree's root.
    ROOT_ITEM = 132;
    /// The name of a subvolume, by parent.
    ROOT_BACKREF = 144;
    /// The name of a subvolume, by child.
    ROOT_REF = 156;
    /// An extent, offset its length.
    EXTENT_ITEM = 168;
    /// A tree block, offset its level.
    METADATA_ITEM = 169;
    /// The owner of a data extent (simple quota).
    EXTENT_OWNER_REF = 172;
    /// A tree block's reference, by root.
    TREE_BLOCK_REF = 176;
    /// A data extent's reference, by hash of root, inode and offset.
    EXTENT_DATA_REF = 178;
    /// A tree block's reference, by parent block.
    SHARED_BLOCK_REF = 182;
    /// A data extent's reference, by parent block.
    SHARED_DATA_REF = 184;
    /// A block group.
    BLOCK_GROUP_ITEM = 192;
    /// Form of a block group's free space.
    FREE_SPACE_INFO = 198;
    /// A free extent.
    FREE_SPACE_EXTENT = 199;
    /// A bitmap of free sectors.
    FREE_SPACE_BITMAP = 200;
    /// An extent of a device.
    DEV_EXTENT = 204;
    /// A device.
    DEV_ITEM = 216;
    /// A chunk.
    CHUNK_ITEM = 228;
    /// A raid stripe.
    RAID_STRIPE = 230;
    /// Quota status.
    QGROUP_STATUS = 240;
    /// Quota usage.
    QGROUP_INFO = 242;
    /// Quota limits.
    QGROUP_LIMIT = 244;
    /// Quota group membership.
    QGROUP_RELATION = 246;
    /// State of a balance.
    TEMPORARY_ITEM = 248;
    /// Device statistics.
    PERSISTENT_ITEM = 249;
    /// State of a device replacement.
    DEV_REPLACE = 250;
    /// Subvolume by uuid.
    UUID_KEY_SUBVOL = 251;
    /// Subvolume by received uuid.
    UUID_KEY_RECEIVED_SUBVOL = 252;
    /// A string for debugging.
    STRING_ITEM = 253;
}

impl KeyType {
    /// The v1 free space header uses type 0.
    pub const FREE_SPACE_HEADER: Self = Self(0);
    /// The greatest.
    pub const MAX: Self = Self(u8::MAX);
}

impl fmt::Debug for KeyType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "UNKNOWN.{}", self.0),
        }
    }
}

impl fmt::Display for KeyType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A key, in the order of the trees: by object id, then type, then offset.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Key {
    /// What the item belongs to.
    pub objectid: ObjectId,
    /// What kind of item it is.
    pub ty: KeyType,
    /// Its place among those of one kind; the meaning depends on the kind.
    pub offset: u64,
}

impl Key {
    /// The least key.
    pub const MIN: Self = Self::new(ObjectId(0), KeyType(0), 0);
    /// The greatest key.
    pub const MAX: Self = Self::new(ObjectId(u64::MAX), KeyType::MAX, u64::MAX);

    /// A key of its three fields.
    pub const fn new(objectid: ObjectId, ty: KeyType, offset: u64) -> Self {
        Self { objectid, ty, offset }
    }

    /// The key of `uuid` in the uuid tree: its halves, little-endian, around `ty`.
    pub fn of_uuid(uuid: Uuid, ty: KeyType) -> Self {
        let value = u128::from_le_bytes(uuid.0);
        let low = u64::try_from(value & u128::from(u64::MAX)).expect("masked to 64 bits");
        let high = u64::try_from(value >> 64).expect("64 bits are left");
        Self::new(ObjectId(low), ty, high)
    }

    /// The key that follows this one, or `None` after the greatest.
    pub fn successor(self) -> Option<Self> {
        if let Some(offset) = self.offset.checked_add(1) {
            return Some(Self { offset, ..self });
        }
        if let Some(ty) = self.ty.0.checked_add(1) {
            return Some(Self { ty: KeyType(ty), offset: 0, ..self });
        }
        let objectid = ObjectId(self.objectid.0.checked_add(1)?);
        Some(Self { objectid, ty: KeyType(0), offset: 0 })
    }

    /// The key that precedes this one, or `None` before the least.
    pub fn predecessor(self) -> Option<Self> {
        if let Some(offset) = self.offset.checked_sub(1) {
            return Some(Self { offset, ..self });
        }
        if let Some(ty) = self.ty.0.checked_sub(1) {
            return Some(Self { ty: KeyType(ty), offset: u64::MAX, ..self });
        }
        let objectid = ObjectId(self.objectid.0.checked_sub(1)?);
        Some(Self { objectid, ty: KeyType::MAX, offset: u64::MAX })
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({} {} {})", self.objectid, self.ty, self.offset)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// `struct btrfs_disk_key`.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Debug,
    Default,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct DiskKey {
    /// What the item belongs to.
    pub objectid: U64,
    /// What kind of item it is.
    pub ty: u8,
    /// Its place among those of one kind.
    pub offset: U64,
}
const _: () = assert!(size_of::<DiskKey>() == 17);

impl DiskKey {
    /// The key in memory form.
    #[inline]
    pub fn key(&self) -> Key {
        Key::new(ObjectId(self.objectid.get()), KeyType(self.ty), self.offset.get())
    }

    /// The disk form of `key`.
    #[inline]
    pub fn new(key: Key) -> Self {
        Self { objectid: U64::new(key.objectid.0), ty: key.ty.0, offset: U64::new(key.offset) }
    }
}
