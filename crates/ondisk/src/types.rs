//! The quantities of the format, each its own type so that one cannot stand in for another.

use std::fmt;

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

quantity!(
    /// An address in the filesystem's logical space, in bytes. Only the chunk map turns it into
    /// device offsets.
    LogicalAddr
);
quantity!(
    /// A byte offset on one device.
    PhysicalAddr
);
quantity!(
    /// A byte offset in a file.
    FileOffset
);
quantity!(
    /// The number of a transaction.
    Generation
);
quantity!(
    /// The first field of a key, whatever it names.
    ObjectId
);
quantity!(
    /// The object id of a tree.
    RootId
);
quantity!(
    /// The number of an inode in its subvolume.
    InodeNo
);
quantity!(
    /// The number of a device in its filesystem.
    DeviceId
);

impl LogicalAddr {
    /// The address `bytes` further on, or `None` past the end of the address space.
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }
}

impl PhysicalAddr {
    /// The address `bytes` further on, or `None` past the end of the address space.
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }
}

impl FileOffset {
    /// The offset `bytes` further on, or `None` past the end of the address space.
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }
}

/// Quota groups number their level above this bit, so that no subvolume's number reaches it.
const QGROUP_LEVEL_SHIFT: u32 = 48;

impl RootId {
    /// The tree of tree roots.
    pub const ROOT_TREE: Self = Self(1);
    /// Extents and their back references.
    pub const EXTENT_TREE: Self = Self(2);
    /// Chunks and devices.
    pub const CHUNK_TREE: Self = Self(3);
    /// Device extents.
    pub const DEV_TREE: Self = Self(4);
    /// The top-level subvolume.
    pub const FS_TREE: Self = Self(5);
    /// Checksums of file data.
    pub const CSUM_TREE: Self = Self(7);
    /// Quota groups.
    pub const QUOTA_TREE: Self = Self(8);
    /// Subvolumes by uuid.
    pub const UUID_TREE: Self = Self(9);
    /// Free space.
    pub const FREE_SPACE_TREE: Self = Self(10);
    /// Block group items, where the feature moves them out of the extent tree.
    pub const BLOCK_GROUP_TREE: Self = Self(11);
    /// Stripes of the raid stripe tree feature.
    pub const RAID_STRIPE_TREE: Self = Self(12);
    /// Log trees.
    pub const TREE_LOG: Self = Self(-6_i64 as u64);
    /// Relocation copies of trees.
    pub const TREE_RELOC: Self = Self(-8_i64 as u64);
    /// Relocation of data.
    pub const DATA_RELOC_TREE: Self = Self(-9_i64 as u64);

    /// Whether the tree holds files: the top-level subvolume or one that a user made.
    pub fn is_subvolume(self) -> bool {
        self == Self::FS_TREE || (ObjectId::FIRST_FREE.0..1 << QGROUP_LEVEL_SHIFT).contains(&self.0)
    }

    /// Whether the tree holds file items: a subvolume, or the data relocation tree.
    pub fn holds_files(self) -> bool {
        self.is_subvolume() || self == Self::DATA_RELOC_TREE
    }

    /// The same number as an object id of the root tree's keys.
    pub fn object_id(self) -> ObjectId {
        ObjectId(self.0)
    }
}

impl ObjectId {
    /// Inode of the free inode number cache that Linux before 5.11 could keep.
    pub const FREE_INO: Self = Self(-12_i64 as u64);
    /// Holder of the items of devices in the chunk tree.
    pub const DEV_ITEMS: Self = Self(1);
    /// The directory in the root tree that names the default subvolume.
    pub const ROOT_TREE_DIR: Self = Self(6);
    /// Device statistics, in the device tree.
    pub const DEV_STATS: Self = Self(0);
    /// State of a running balance.
    pub const BALANCE: Self = Self(-4_i64 as u64);
    /// Holder of orphan items.
    pub const ORPHAN: Self = Self(-5_i64 as u64);
    /// Holder of data checksums.
    pub const EXTENT_CSUM: Self = Self(-10_i64 as u64);
    /// Free space cache (v1) headers.
    pub const FREE_SPACE: Self = Self(-11_i64 as u64);
    /// The first that a user's inode or subvolume may have.
    pub const FIRST_FREE: Self = Self(256);
    /// The last that a user's inode or subvolume may have.
    pub const LAST_FREE: Self = Self(-256_i64 as u64);
    /// Holder of chunk items.
    pub const FIRST_CHUNK_TREE: Self = Self(256);
}

impl InodeNo {
    /// The root directory of a subvolume.
    pub const SUBVOLUME_ROOT: Self = Self(256);
    /// The stand-in directory where a snapshot holds a nested subvolume's place.
    pub const EMPTY_SUBVOL_DIR: Self = Self(2);

    /// The same number as an object id of a subvolume's keys.
    pub fn object_id(self) -> ObjectId {
        ObjectId(self.0)
    }
}

/// A universally unique identifier, its bytes in the order in which they are stored and printed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// All zeros, which the format uses for "none".
    pub const NIL: Self = Self([0; 16]);

    /// Whether this is [`Uuid::NIL`].
    pub fn is_nil(self) -> bool {
        self == Self::NIL
    }

    /// Reads the usual text form, with or without hyphens.
    pub fn parse(text: &str) -> Option<Self> {
        let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
        if digits.len() != 32 {
            return None;
        }
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).ok()?;
            if !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return None;
            }
            *byte = u8::from_str_radix(pair, 16).ok()?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
