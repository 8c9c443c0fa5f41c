//! The figures of `statfs`, as Linux reckons them from what a filesystem has on its devices.
//!
//! Sources: the manual of btrfs (`btrfs filesystem usage`, `df`), and what a mount says
//! (`tests/statfs.rs` compares).

use ubtrfs_ondisk::RootId;
use ubtrfs_ondisk::block::LEVEL_COUNT_MAX;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::features::CompatRo;

use super::usage::SpaceUsage;
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;

/// Units in which chunks are laid on devices.
const STRIPE_BYTES: u64 = 64 << 10;
/// Nothing is allocated in front of this.
const DEVICE_START_BYTES: u64 = 1 << 20;
/// The largest global reserve.
const GLOBAL_RESERVE_BYTES_MAX: u64 = 512 << 20;
/// Items that removing a name changes, as Linux reckons.
const UNLINK_ITEMS: u64 = 6;
/// Metadata that must be free besides the global reserve for data to count as available, where no chunk can be
/// made for more, as Linux reckons.
const METADATA_LEFT_BYTES_MIN: u64 = 4 << 20;
const NAME_BYTES_MAX: u32 = 255;

/// What `statfs` says of a filesystem.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatFs {
    /// Bytes of a block: the sector.
    pub block_bytes: u64,
    /// Blocks of all devices, divided by the copies of data.
    pub blocks: u64,
    /// Of them, those in which nothing lies; the global reserve counts as used.
    pub blocks_free: u64,
    /// Blocks of data that can be written yet.
    pub blocks_available: u64,
    /// Longest name of a file, in bytes.
    pub name_bytes_max: u32,
    /// What tells filesystems, and subvolumes, apart.
    pub fsid: [u32; 2],
}

impl Filesystem {
    /// The figures of `statfs` for the subvolume `root`, as of the last commit or flush. There is no
    /// limit to the number of inodes, which Linux shows as 0.
    ///
    /// # Errors
    /// Damaged items, or the device's error.
    pub fn statfs(&self, root: RootId) -> Result<StatFs> {
        let usage = self.usage()?;
        let block_bytes = self.sectorsize_bytes();
        let data = |space: &&SpaceUsage| space.flags.contains(BlockGroupFlags::DATA);
        let (mut free_data_bytes, mut free_metadata_bytes, mut used_bytes) = (0_u64, 0_u64, 0_u64);
        for space in &usage.spaces {
            used_bytes = used_bytes.saturating_add(space.used_bytes.saturating_mul(space.copies));
            let free = space.total_bytes.saturating_sub(space.used_bytes);
            let free = free.saturating_mul(space.copies);
            if data(&space) {
                free_data_bytes = free_data_bytes.saturating_add(free);
            } else if space.flags.contains(BlockGroupFlags::METADATA) {
                free_metadata_bytes = free_metadata_bytes.saturating_add(free);
            }
        }
        let data_flags = usage.spaces.iter().filter(data).max_by_key(|space| space.flags);
        let copies = data_flags.map_or(1, |space| space.copies.max(1));
        let profile = data_flags.map_or(BlockGroupFlags::default(), |space| space.flags);
        let blocks = usage.device_bytes / copies / block_bytes;
        let reserve_bytes = self.global_reserve_bytes()?;
        let unallocated_bytes = self.unallocated_chunk_bytes(profile);
        let mut available_bytes =
            (free_data_bytes / copies).saturating_add(unallocated_bytes / copies);
        let metadata =
            |space: &&SpaceUsage| !data(space) && space.flags.contains(BlockGroupFlags::METADATA);
        // Data that no file extent could be entered for does not fit, whatever is free of it.
        if let Some(space) = usage.spaces.iter().find(metadata) {
            let is_full = self.unallocated_chunk_bytes(space.flags) == 0;
            let kept_bytes = reserve_bytes.saturating_add(METADATA_LEFT_BYTES_MIN);
            if is_full && free_metadata_bytes < kept_bytes {
                available_bytes = 0;
            }
        }
        Ok(StatFs {
            block_bytes,
            blocks,
            blocks_free: blocks
                .saturating_sub(used_bytes / copies / block_bytes)
                .saturating_sub(reserve_bytes / block_bytes),
            blocks_available: available_bytes / block_bytes,
            name_bytes_max: NAME_BYTES_MAX,
            fsid: self.statfs_id(root),
        })
    }

    /// Bytes that Linux keeps back for what must not fail: the trees that each commit edits, and no
    /// less than a few operations need.
    fn global_reserve_bytes(&self) -> Result<u64> {
        let roots = &self.inner.core.roots;
        let mut bytes = roots.root_tree.read().bytes_used;
        let mut items = 1;
        let mut trees = vec![RootId::EXTENT_TREE, RootId::CSUM_TREE];
        let compat_ro = self.compat_ro();
        let has_free_space_tree = compat_ro.contains(CompatRo::FREE_SPACE_TREE);
        if has_free_space_tree {
            trees.push(RootId::FREE_SPACE_TREE);
        }
        if compat_ro.contains(CompatRo::BLOCK_GROUP_TREE) {
            trees.push(RootId::BLOCK_GROUP_TREE);
        }
        for root in trees {
            match roots.tree(root) {
                Ok(tree) => {
                    bytes = bytes.saturating_add(tree.read().bytes_used);
                    items += 1;
                }
                Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        // Two blocks of each level an item; a delayed reference edits the free space tree too.
        let item_bytes = self.nodesize_bytes() * 2 * LEVEL_COUNT_MAX as u64;
        let trees_of_ref = if has_free_space_tree { 2 } else { 1 };
        let least = (items + UNLINK_ITEMS + UNLINK_ITEMS * trees_of_ref) * item_bytes;
        Ok(bytes.max(least).min(GLOBAL_RESERVE_BYTES_MAX))
    }

    /// Bytes of the devices, copies counted, that chunks of a profile could yet take.
    fn unallocated_chunk_bytes(&self, profile: BlockGroupFlags) -> u64 {
        let items = self.volume().device_items();
        let mut free: Vec<u64> = items
            .iter()
            .map(|item| item.total_bytes.get().saturating_sub(item.bytes_used.get()))
            .map(|bytes| bytes / STRIPE_BYTES * STRIPE_BYTES)
            .collect();
        let layout = Layout::of(profile, free.len());
        free.retain(|bytes| *bytes > DEVICE_START_BYTES + layout.stripe_bytes_min);
        free.iter_mut().for_each(|bytes| *bytes -= DEVICE_START_BYTES);
        free.sort_unstable_by(|a, b| b.cmp(a));
        let mut sum = 0_u64;
        while let Some(least) = free.last().copied() {
            if free.len() < layout.devices_min {
                break;
            }
            let stripes = layout.stripes.min(free.len());
            if least >= layout.stripe_bytes_min {
                sum = sum.saturating_add(least.saturating_mul(stripes as u64));
                let from = free.len() - stripes;
                free[from..].iter_mut().for_each(|bytes| *bytes = bytes.saturating_sub(least));
            }
            free.pop();
        }
        sum
    }

    fn statfs_id(&self, root: RootId) -> [u32; 2] {
        let fsid = self.superblock().fsid;
        let word = |at: usize| {
            let bytes = fsid.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
            u32::from_be_bytes(bytes.unwrap_or_default())
        };
        let half = |value: u64| u32::try_from(value & u64::from(u32::MAX)).unwrap_or(0);
        [word(0) ^ word(8) ^ half(root.0 >> 32), word(4) ^ word(12) ^ half(root.0)]
    }
}

/// How chunks of a profile lie on devices.
struct Layout {
    devices_min: usize,
    /// Devices that a chunk lies on.
    stripes: usize,
    stripe_bytes_min: u64,
}

impl Layout {
    fn of(profile: BlockGroupFlags, device_count: usize) -> Self {
        let has = |flags| profile.contains(flags);
        let (devices_min, stripes) = if has(BlockGroupFlags::RAID0) {
            (1, device_count)
        } else if has(BlockGroupFlags::RAID1) {
            (2, 2)
        } else if has(BlockGroupFlags::RAID10) {
            (2, 4)
        } else if has(BlockGroupFlags::RAID1C3) {
            (3, 3)
        } else if has(BlockGroupFlags::RAID1C4) {
            (4, 4)
        } else {
            (1, 1)
        };
        let stripes_on_one = if has(BlockGroupFlags::DUP) { 2 } else { 1 };
        Self { devices_min, stripes, stripe_bytes_min: stripes_on_one * STRIPE_BYTES }
    }
}
