//! How full a filesystem is.

use ubtrfs_ondisk::block_group::{BlockGroupFlags, BlockGroupItem};
use ubtrfs_ondisk::features::CompatRo;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Key, KeyType, ObjectId, RootId};

use crate::error::Result;
use crate::filesystem::Filesystem;

/// The space of one type and profile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpaceUsage {
    /// Type and profile.
    pub flags: BlockGroupFlags,
    /// Bytes of its block groups, a copy counted once.
    pub total_bytes: u64,
    /// Bytes of extents in them.
    pub used_bytes: u64,
    /// Bytes that a byte of it takes on the devices.
    pub copies: u64,
}

/// How full a filesystem is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Usage {
    /// Bytes of all devices.
    pub device_bytes: u64,
    /// Bytes of the devices that chunks take, copies included.
    pub allocated_bytes: u64,
    /// Bytes of all extents, a copy counted once.
    pub used_bytes: u64,
    /// Bytes of data that still fit, about, as `btrfs filesystem usage` has it: where data has several profiles, a
    /// further byte takes as much of the devices as those there do on average. What is left of the devices
    /// counts down to the last chunk that fits; btrfs-progs drops it below 16 MiB, and takes the kernel's reserve
    /// off a filesystem of mixed groups.
    pub free_bytes: u64,
    /// Each type and profile, data first.
    pub spaces: Vec<SpaceUsage>,
}

impl Filesystem {
    /// How full the filesystem is.
    ///
    /// # Errors
    /// Damaged items, or the device's error.
    pub fn usage(&self) -> Result<Usage> {
        let groups_in = if self.compat_ro().contains(CompatRo::BLOCK_GROUP_TREE) {
            RootId::BLOCK_GROUP_TREE
        } else {
            RootId::EXTENT_TREE
        };
        let tree = self.tree(groups_in)?;
        let mut spaces: Vec<SpaceUsage> = Vec::new();
        for chunk in self.volume().chunks() {
            let key = Key::new(ObjectId(chunk.start.0), KeyType::BLOCK_GROUP_ITEM, chunk.len_bytes);
            let Some(item) = tree.lookup(&key)? else { continue };
            let item = BlockGroupItem::peek(&item).map_err(|error| error.in_root(groups_in))?;
            let flags = BlockGroupFlags(item.flags.get());
            let copies = self.volume().mirror_count(chunk.start)? as u64;
            let space = match spaces.iter_mut().find(|space| space.flags == flags) {
                Some(space) => space,
                None => {
                    spaces.push(SpaceUsage { flags, total_bytes: 0, used_bytes: 0, copies });
                    let last = spaces.len() - 1;
                    &mut spaces[last]
                }
            };
            space.total_bytes = space.total_bytes.saturating_add(chunk.len_bytes);
            space.used_bytes = space.used_bytes.saturating_add(item.used.get());
        }
        spaces.sort_by_key(|space| (space.flags.ty(), space.flags));
        let superblock = self.superblock();
        let device_bytes = superblock.total_bytes.get();
        let sum =
            |value: fn(&SpaceUsage) -> u64| spaces.iter().map(value).fold(0, u64::saturating_add);
        let allocated_bytes = sum(|space| space.total_bytes.saturating_mul(space.copies));
        Ok(Usage {
            device_bytes,
            allocated_bytes,
            used_bytes: superblock.bytes_used.get(),
            free_bytes: free_bytes(&spaces, device_bytes.saturating_sub(allocated_bytes)),
            spaces,
        })
    }
}

fn free_bytes(spaces: &[SpaceUsage], unallocated_bytes: u64) -> u64 {
    // What was read may be anything.
    let (mut total, mut raw, mut raw_free) = (0_u128, 0_u128, u128::from(unallocated_bytes));
    for space in spaces.iter().filter(|space| space.flags.contains(BlockGroupFlags::DATA)) {
        let copies = u128::from(space.copies);
        let free = space.total_bytes.saturating_sub(space.used_bytes);
        total = total.saturating_add(space.total_bytes.into());
        raw = raw.saturating_add(u128::from(space.total_bytes).saturating_mul(copies));
        raw_free = raw_free.saturating_add(u128::from(free).saturating_mul(copies));
    }
    let free = raw_free.saturating_mul(total).checked_div(raw).unwrap_or(raw_free);
    u64::try_from(free).unwrap_or(u64::MAX)
}
