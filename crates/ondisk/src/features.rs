//! Feature bits of the superblock.

macro_rules! bits {
    ($(#[$doc:meta])* $name:ident { $($(#[$bit_doc:meta])* $bit:ident = $value:expr;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
        pub struct $name(pub u64);

        impl $name {
            $($(#[$bit_doc])* pub const $bit: Self = Self($value);)*

            /// Each bit with its name, least first.
            pub const NAMES: &[(Self, &str)] = &[$((Self::$bit, stringify!($bit)),)*];

            /// Whether all bits of `other` are set.
            #[inline]
            pub fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// Sets the bits of `other`.
            pub fn insert(&mut self, other: Self) {
                self.0 |= other.0;
            }

            /// The bits that are not in `known`.
            pub fn without(self, known: Self) -> Self {
                Self(self.0 & !known.0)
            }

            /// Whether no bit is set.
            pub fn is_empty(self) -> bool {
                self.0 == 0
            }
        }

        impl std::ops::BitOr for $name {
            type Output = Self;
            fn bitor(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut rest = self.0;
                let mut first = true;
                for (bit, name) in Self::NAMES {
                    if self.contains(*bit) {
                        rest &= !bit.0;
                        if !std::mem::take(&mut first) {
                            f.write_str("|")?;
                        }
                        f.write_str(name)?;
                    }
                }
                if rest != 0 || first {
                    if !first {
                        f.write_str("|")?;
                    }
                    write!(f, "{rest:#x}")?;
                }
                Ok(())
            }
        }
    };
}

bits!(
    /// Features that a reader must know.
    Incompat {
        /// Back references of both kinds.
        MIXED_BACKREF = 1 << 0;
        /// A default subvolume other than the top level.
        DEFAULT_SUBVOL = 1 << 1;
        /// Block groups of data and metadata together.
        MIXED_GROUPS = 1 << 2;
        /// LZO was used.
        COMPRESS_LZO = 1 << 3;
        /// zstd was used.
        COMPRESS_ZSTD = 1 << 4;
        /// Nodes larger than a page.
        BIG_METADATA = 1 << 5;
        /// Extended inode references.
        EXTENDED_IREF = 1 << 6;
        /// RAID5 or RAID6 profiles.
        RAID56 = 1 << 7;
        /// Metadata items without a key in the extent tree.
        SKINNY_METADATA = 1 << 8;
        /// Holes have no file extents.
        NO_HOLES = 1 << 9;
        /// `metadata_uuid` differs from `fsid`.
        METADATA_UUID = 1 << 10;
        /// RAID1 on three or four devices.
        RAID1C34 = 1 << 11;
        /// Zoned devices.
        ZONED = 1 << 12;
        /// The second extent tree (experimental).
        EXTENT_TREE_V2 = 1 << 13;
        /// The raid stripe tree.
        RAID_STRIPE_TREE = 1 << 14;
        /// Simple quotas.
        SIMPLE_QUOTA = 1 << 16;
    }
);

bits!(
    /// Features that a writer must know.
    CompatRo {
        /// The free space tree exists.
        FREE_SPACE_TREE = 1 << 0;
        /// The free space tree is right.
        FREE_SPACE_TREE_VALID = 1 << 1;
        /// fs-verity files exist.
        VERITY = 1 << 2;
        /// Block group items have their own tree.
        BLOCK_GROUP_TREE = 1 << 3;
    }
);
