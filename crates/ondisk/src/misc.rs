//! What all on-disk structs share, and the small ones: timestamps, devices, statistics, quotas.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::{Corruption, Reason, Result};
use crate::key::DiskKey;

/// A struct that lies on the medium byte for byte.
pub trait OnDisk: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned + Sized {
    /// Looks at the first bytes of `bytes` as this struct.
    ///
    /// # Errors
    /// `Truncated` when there are fewer bytes than the struct takes.
    #[inline]
    fn peek(bytes: &[u8]) -> Result<&Self> {
        match Self::ref_from_prefix(bytes) {
            Ok((value, _)) => Ok(value),
            Err(_) => Err(truncated(bytes.len(), size_of::<Self>())),
        }
    }

    /// As [`OnDisk::peek`], with the bytes that follow the struct.
    ///
    /// # Errors
    /// `Truncated` when there are fewer bytes than the struct takes.
    #[inline]
    fn split(bytes: &[u8]) -> Result<(&Self, &[u8])> {
        Self::ref_from_prefix(bytes).map_err(|_| truncated(bytes.len(), size_of::<Self>()))
    }

    /// As [`OnDisk::peek`], to change the struct in place.
    ///
    /// # Errors
    /// `Truncated` when there are fewer bytes than the struct takes.
    #[inline]
    fn peek_mut(bytes: &mut [u8]) -> Result<&mut Self> {
        let have = bytes.len();
        match Self::mut_from_prefix(bytes) {
            Ok((value, _)) => Ok(value),
            Err(_) => Err(truncated(have, size_of::<Self>())),
        }
    }
}

impl<T: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned + Sized> OnDisk for T {}

#[cold]
pub(crate) fn truncated(have: usize, expect: usize) -> Box<Corruption> {
    Corruption::new(Reason::Truncated)
        .have(format!("{have} bytes"))
        .expect(format!("{expect} bytes"))
}

/// Declares an on-disk struct and asserts its size.
macro_rules! on_disk {
    ($(#[$doc:meta])* $name:ident [$bytes:literal] { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, PartialEq, Eq, Debug, zerocopy::FromBytes, zerocopy::IntoBytes,
            zerocopy::Immutable, zerocopy::KnownLayout, zerocopy::Unaligned,
        )]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $ty,)*
        }
        const _: () = assert!(size_of::<$name>() == $bytes);

        impl Default for $name {
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        }
    };
}
pub(crate) use on_disk;

on_disk!(
    /// `struct btrfs_timespec`.
    Timespec [12] {
        /// Seconds since 1970, signed.
        sec: zerocopy::little_endian::I64,
        /// Nanoseconds, below 10⁹.
        nsec: U32,
    }
);

impl Timespec {
    /// A time of seconds and nanoseconds since 1970.
    pub fn new(sec: i64, nsec: u32) -> Self {
        Self { sec: sec.into(), nsec: nsec.into() }
    }
}

on_disk!(
    /// `struct btrfs_dev_item`: a device of the filesystem.
    DevItem [98] {
        /// The device's number.
        devid: U64,
        /// Its size in bytes.
        total_bytes: U64,
        /// Bytes of it in device extents.
        bytes_used: U64,
        /// Optimal alignment of I/O.
        io_align: U32,
        /// Optimal width of I/O.
        io_width: U32,
        /// Least I/O.
        sector_size: U32,
        /// Reserved.
        ty: U64,
        /// Generation of the last change.
        generation: U64,
        /// First byte that may be allocated; 0 for the default.
        start_offset: U64,
        /// Group for allocation (unused).
        dev_group: U32,
        /// Unused.
        seek_speed: u8,
        /// Unused.
        bandwidth: u8,
        /// The device's own uuid.
        uuid: [u8; 16],
        /// The filesystem that it belongs to.
        fsid: [u8; 16],
    }
);

on_disk!(
    /// `struct btrfs_dev_extent`: a range of a device that a chunk uses. Key: (device, DEV_EXTENT,
    /// physical offset).
    DevExtent [48] {
        /// Always the chunk tree's object id, 3.
        chunk_tree: U64,
        /// Always 256.
        chunk_objectid: U64,
        /// Logical address of the chunk.
        chunk_offset: U64,
        /// Length on the device, in bytes.
        length: U64,
        /// The chunk tree's uuid.
        chunk_tree_uuid: [u8; 16],
    }
);

on_disk!(
    /// `struct btrfs_dev_stats_item`: error counts of a device. Key: (0, PERSISTENT_ITEM, device).
    DevStatsItem [40] {
        /// Writes, reads, flushes, corruptions and generations that failed.
        values: [U64; 5],
    }
);

on_disk!(
    /// `struct btrfs_dev_replace_item`. Key: (0, DEV_REPLACE, 0).
    DevReplaceItem [72] {
        /// The device replaced.
        src_devid: U64,
        /// Start of what is being copied.
        cursor_left: U64,
        /// End of what is being copied.
        cursor_right: U64,
        /// Whether the source is still read.
        cont_reading_from_srcdev_mode: U64,
        /// State of the replacement.
        replace_state: U64,
        /// When it began.
        time_started: U64,
        /// When it ended.
        time_stopped: U64,
        /// Failed writes.
        num_write_errors: U64,
        /// Failed reads.
        num_uncorrectable_read_errors: U64,
    }
);

on_disk!(
    /// `struct btrfs_disk_balance_args`: the filters of a balance for one type of block group.
    BalanceArgs [136] {
        /// Profiles to take.
        profiles: U64,
        /// Usage filter, or its two limits of 32 bits.
        usage: U64,
        /// Device filter.
        devid: U64,
        /// Physical range, first byte.
        pstart: U64,
        /// Physical range, end.
        pend: U64,
        /// Logical range, first byte.
        vstart: U64,
        /// Logical range, end.
        vend: U64,
        /// Profile to convert to.
        target: U64,
        /// Which filters apply.
        flags: U64,
        /// Most block groups, or its two limits of 32 bits.
        limit: U64,
        /// Fewest stripes.
        stripes_min: U32,
        /// Most stripes.
        stripes_max: U32,
        /// Reserved.
        unused: [U64; 6],
    }
);

on_disk!(
    /// `struct btrfs_balance_item`. Key: (BALANCE, TEMPORARY_ITEM, 0).
    BalanceItem [448] {
        /// Which types are balanced.
        flags: U64,
        /// Filters for data.
        data: BalanceArgs,
        /// Filters for metadata.
        meta: BalanceArgs,
        /// Filters for system.
        sys: BalanceArgs,
        /// Reserved.
        unused: [U64; 4],
    }
);

on_disk!(
    /// `struct btrfs_qgroup_status_item`. Key: (0, QGROUP_STATUS, 0).
    QgroupStatusItem [32] {
        /// Version, 1.
        version: U64,
        /// Generation of the last change.
        generation: U64,
        /// On, rescan, inconsistent.
        flags: U64,
        /// Progress of a rescan.
        rescan: U64,
    }
);

on_disk!(
    /// `struct btrfs_qgroup_info_item`. Key: (0, QGROUP_INFO, qgroup).
    QgroupInfoItem [40] {
        /// Generation of the last change.
        generation: U64,
        /// Bytes referenced.
        rfer: U64,
        /// Bytes referenced, compressed.
        rfer_cmpr: U64,
        /// Bytes exclusive.
        excl: U64,
        /// Bytes exclusive, compressed.
        excl_cmpr: U64,
    }
);

on_disk!(
    /// `struct btrfs_qgroup_limit_item`. Key: (0, QGROUP_LIMIT, qgroup).
    QgroupLimitItem [40] {
        /// Which limits apply.
        flags: U64,
        /// Most bytes referenced.
        max_rfer: U64,
        /// Most bytes exclusive.
        max_excl: U64,
        /// Reserved bytes referenced.
        rsv_rfer: U64,
        /// Reserved bytes exclusive.
        rsv_excl: U64,
    }
);

on_disk!(
    /// `struct btrfs_verity_descriptor_item`. Key: (inode, VERITY_DESC_ITEM, 0).
    VerityDescriptorItem [25] {
        /// Length of the descriptor that follows at offset 1.
        size: U64,
        /// Reserved.
        reserved: [U64; 2],
        /// Always 0.
        encryption: u8,
    }
);

on_disk!(
    /// `struct btrfs_stripe_extent`'s unit: where one stripe lies (raid stripe tree).
    RaidStride [16] {
        /// The device.
        devid: U64,
        /// The offset on it.
        physical: U64,
    }
);

on_disk!(
    /// `struct btrfs_free_space_header` of the v1 cache. Key: (FREE_SPACE, 0, block group).
    FreeSpaceHeader [41] {
        /// The cache inode's key.
        location: DiskKey,
        /// Generation in which the cache was written.
        generation: U64,
        /// Entries in it.
        num_entries: U64,
        /// Bitmaps in it.
        num_bitmaps: U64,
    }
);
