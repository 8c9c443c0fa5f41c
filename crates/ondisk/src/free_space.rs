//! The free space tree.

use zerocopy::little_endian::U32;

use crate::misc::on_disk;

on_disk!(
    /// `struct btrfs_free_space_info`. Key: (block group, FREE_SPACE_INFO, length).
    FreeSpaceInfo [8] {
        /// Free extents of the group, whatever the form.
        extent_count: U32,
        /// [`USING_BITMAPS`].
        flags: U32,
    }
);

/// Flag of [`FreeSpaceInfo`]: the group's free space lies in bitmaps.
pub const USING_BITMAPS: u32 = 1 << 0;

/// Bytes of a bitmap item; the last of a group may be shorter.
pub const BITMAP_BYTES: u64 = 256;

/// Bits, one a sector, of a whole bitmap item.
pub const BITMAP_BITS: u64 = BITMAP_BYTES * 8;
