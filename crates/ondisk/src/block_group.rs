//! Block groups: a chunk as the allocator sees it.

use std::fmt;

use zerocopy::little_endian::U64;

use crate::misc::on_disk;

/// Type and profile of a chunk or block group: `BTRFS_BLOCK_GROUP_*`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct BlockGroupFlags(pub u64);

impl BlockGroupFlags {
    /// Holds data.
    pub const DATA: Self = Self(1 << 0);
    /// Holds the chunk tree.
    pub const SYSTEM: Self = Self(1 << 1);
    /// Holds the other trees.
    pub const METADATA: Self = Self(1 << 2);
    /// Striped, no copies.
    pub const RAID0: Self = Self(1 << 3);
    /// Two copies on two devices.
    pub const RAID1: Self = Self(1 << 4);
    /// Two copies on one device.
    pub const DUP: Self = Self(1 << 5);
    /// Striped pairs.
    pub const RAID10: Self = Self(1 << 6);
    /// One parity.
    pub const RAID5: Self = Self(1 << 7);
    /// Two parities.
    pub const RAID6: Self = Self(1 << 8);
    /// Three copies.
    pub const RAID1C3: Self = Self(1 << 9);
    /// Four copies.
    pub const RAID1C4: Self = Self(1 << 10);
    /// The bits that say what is held.
    pub const TYPE_MASK: Self = Self(0x7);
    /// The bits that say how it is laid out; none set is SINGLE.
    pub const PROFILE_MASK: Self = Self(0x7f8);

    /// Whether all bits of `other` are set.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether any bit of `other` is set.
    pub fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// The type bits alone.
    pub fn ty(self) -> Self {
        Self(self.0 & Self::TYPE_MASK.0)
    }

    /// The profile bits alone.
    pub fn profile(self) -> Self {
        Self(self.0 & Self::PROFILE_MASK.0)
    }

    /// The profile's name as `btrfs filesystem df` prints it, or `None` for a mix of bits that is
    /// no profile.
    pub fn profile_name(self) -> Option<&'static str> {
        Some(match self.profile() {
            Self(0) => "single",
            Self::RAID0 => "RAID0",
            Self::RAID1 => "RAID1",
            Self::DUP => "DUP",
            Self::RAID10 => "RAID10",
            Self::RAID5 => "RAID5",
            Self::RAID6 => "RAID6",
            Self::RAID1C3 => "RAID1C3",
            Self::RAID1C4 => "RAID1C4",
            _ => return None,
        })
    }

    /// The types' names as `btrfs filesystem df` prints them.
    pub fn type_name(self) -> &'static str {
        match self.ty() {
            Self::DATA => "Data",
            Self::SYSTEM => "System",
            Self::METADATA => "Metadata",
            Self(5) => "Data+Metadata",
            _ => "unknown",
        }
    }
}

impl std::ops::BitOr for BlockGroupFlags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for BlockGroupFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for BlockGroupFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.profile_name() {
            Some(profile) => write!(f, "{},{profile}", self.type_name()),
            None => write!(f, "{},{:#x}", self.type_name(), self.profile().0),
        }
    }
}

on_disk!(
    /// `struct btrfs_block_group_item`. Key: (logical address, BLOCK_GROUP_ITEM, length).
    BlockGroupItem [24] {
        /// Bytes of extents in it.
        used: U64,
        /// Always 256.
        chunk_objectid: U64,
        /// Type and profile.
        flags: U64,
    }
);
