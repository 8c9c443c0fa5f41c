//! Which profile new space has, where a class has groups of several.
//!
//! A conversion that ended or was interrupted half way, a device that was away for a time, or an old mkfs leave groups that keep fewer
//! copies than their user asked for. Linux allocates from those of the most redundant profile, makes new chunks of that one, and leaves the
//! others alone; where a conversion is to go on, of the profile that it converts to. So does this, but that with devices missing everything
//! is used that is there. Source: what Linux was seen to do, in the tests; of profiles that no test has, the copies that they keep.

use std::collections::BTreeSet;

use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::misc::{BalanceArgs, BalanceItem, OnDisk};
use ubtrfs_ondisk::{Key, KeyType, LogicalAddr, ObjectId, RootId};

use super::block_group::BlockGroup;
use super::{Allocator, Class, State};
use crate::btree::Roots;
use crate::error::Result;

/// From the one that is taken first; a filesystem with RAID5 or RAID6 is not opened.
const PROFILES: [BlockGroupFlags; 6] = [
    BlockGroupFlags::RAID1C4,
    BlockGroupFlags::RAID1C3,
    BlockGroupFlags::RAID10,
    BlockGroupFlags::RAID1,
    BlockGroupFlags::DUP,
    BlockGroupFlags::RAID0,
];

/// BTRFS_BALANCE_ARGS_CONVERT: `target` says to what.
const CONVERTS: u64 = 1 << 8;

/// What is known of how a class is to be stored.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Profile {
    /// What a conversion that is to go on converts to.
    conversion: Option<BlockGroupFlags>,
    /// That of new groups, where there are groups.
    target: BlockGroupFlags,
}

impl Allocator {
    /// Learns of a conversion that was interrupted, of which Linux keeps an item.
    ///
    /// # Errors
    /// A damaged block or item.
    pub(super) fn load_profiles(&self, roots: &Roots) -> Result<()> {
        let key = Key::new(ObjectId::BALANCE, KeyType::TEMPORARY_ITEM, 0);
        let bytes = roots.tree(RootId::ROOT_TREE)?.lookup(&key)?;
        let item = bytes.as_deref().map(BalanceItem::peek).transpose()?;
        let target_of = |class| {
            let item = item?;
            let (ty, args): (_, &BalanceArgs) = match class {
                Class::Data => (BlockGroupFlags::DATA, &item.data),
                Class::Metadata => (BlockGroupFlags::METADATA, &item.meta),
                Class::System => (BlockGroupFlags::SYSTEM, &item.sys),
            };
            let converts =
                BlockGroupFlags(item.flags.get()).contains(ty) && args.flags.get() & CONVERTS != 0;
            converts.then(|| BlockGroupFlags(args.target.get()).profile())
        };
        let mut state = self.state();
        for class in Class::ALL {
            state.profiles[class.index()].conversion = target_of(class);
        }
        Ok(())
    }

    /// Reads the items of spare groups that were not read: those that are empty go with the next commit, and leave the devices room.
    ///
    /// # Errors
    /// Of damage none; a device's error.
    pub(super) fn read_spare(&self, roots: &Roots) -> Result<()> {
        let mut from = LogicalAddr(0);
        loop {
            let unread = {
                let state = self.state();
                let mut groups = state.groups.range(from..).map(|(_, group)| group);
                let found = groups.find(|group| group.is_spare && group.used_bytes.is_none());
                found.map(|group| (group.start, group.end()))
            };
            let Some((start, end)) = unread else { return Ok(()) };
            // One that is damaged stays.
            match self.read_group(roots, start) {
                Err(fault) if !fault.is_damage() => return Err(fault),
                _ => from = end,
            }
        }
    }
}

impl State {
    /// Notes which groups are spare, and what is free in the others. To be called when there are groups that there were not, or a profile
    /// may be gone.
    pub(super) fn note_profiles(&mut self) {
        for class in Class::ALL {
            let of_class = |group: &BlockGroup| Allocator::class_of_group(group.flags) == class;
            let groups = self.groups.values().filter(|group| of_class(group));
            let has: BTreeSet<u64> = groups.map(|group| group.flags.profile().0).collect();
            let is_there = |profile: &BlockGroupFlags| has.contains(&profile.0);
            let profile = &mut self.profiles[class.index()];
            let most_redundant = || PROFILES.into_iter().find(is_there);
            let target = profile.conversion.filter(is_there).or_else(most_redundant);
            profile.target = target.unwrap_or_default();
            // Where new groups are single, Linux uses all.
            let has_spare = profile.target != BlockGroupFlags::default() && !self.is_degraded;
            let target = profile.target;
            let mut free_bytes = 0;
            for group in self.groups.values_mut().filter(|group| of_class(group)) {
                group.is_spare = has_spare && group.flags.profile() != target;
                free_bytes += group.loaded_free_bytes();
            }
            self.spaces[class.index()].loaded_free_bytes = free_bytes;
        }
    }

    /// Flags of new groups of `class`, if it has groups.
    pub(super) fn flags_of(&self, class: Class) -> Option<BlockGroupFlags> {
        let mut flags = self.groups.values().rev().map(|group| group.flags);
        let of_class = flags.find(|flags| Allocator::class_of_group(*flags) == class)?;
        Some(of_class.ty() | self.profiles[class.index()].target)
    }

    /// The first group that is empty, and that nothing is allocated from: it can go.
    pub(super) fn empty_spare(&self) -> Option<LogicalAddr> {
        let mut groups = self.groups.values();
        let found = groups.find(|group| {
            group.is_spare
                && group.is_empty()
                && Allocator::class_of_group(group.flags) != Class::System
        });
        found.map(|group| group.start)
    }
}

#[cfg(test)]
mod tests {
    use ubtrfs_ondisk::{DeviceId, FileOffset};
    use ubtrfs_rt::{Arc, Runtime, Time};
    use ubtrfs_testkit::crash::SimArray;
    use ubtrfs_volume::{Device, Volume, VolumeOptions};

    use super::*;
    use crate::{Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, Reservation, mkfs};

    const SINGLE: BlockGroupFlags = BlockGroupFlags(0);
    const FILE_BYTES: usize = 40 << 20;

    fn open(devices: Vec<Arc<dyn Device>>, options: &VolumeOptions) -> Filesystem {
        let volume = Volume::open(devices, options).unwrap();
        let options = OpenOptions {
            runtime: Arc::new(Runtime::simulated(1)),
            read_only: options.read_only,
            ..OpenOptions::default()
        };
        Filesystem::open(volume, options).unwrap()
    }

    /// Two devices that mirror each other.
    fn mirrored(len_bytes: u64) -> SimArray {
        let array = SimArray::new(&[len_bytes; 2]);
        let profile = Some(BlockGroupFlags::RAID1);
        let options = MkfsOptions {
            data_profile: profile,
            metadata_profile: profile,
            ..MkfsOptions::default()
        };
        drop(mkfs(array.devices(), &options, &Arc::new(Runtime::simulated(1))).unwrap());
        array
    }

    fn create(fs: &Filesystem, name: &str) -> InodeId {
        let new = NewInode::new(0o100_644, Time::default());
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        handle.create(fs.top_level(), name.as_bytes(), &new).unwrap()
    }

    fn assert_clean(array: &SimArray) {
        let read_only = VolumeOptions { read_only: true, ..VolumeOptions::default() };
        let volume = Volume::open(array.devices(), &read_only).unwrap();
        let report = ubtrfs_check::check(&volume, &ubtrfs_check::CheckOptions::default()).unwrap();
        let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
        assert!(report.is_clean(), "{errors:#?}");
    }

    /// New data and trees came to whatever group had room, and new chunks were as the last one: on a mirrored filesystem with groups left of
    /// a conversion, or of a time when a device was away, they had one copy.
    #[test]
    fn what_is_new_on_a_mirrored_filesystem_has_two_copies_whatever_groups_are_left_over() {
        let array = mirrored(1 << 30);
        let fs = open(array.devices(), &VolumeOptions::default());
        let core = &fs.inner.core;
        let handle = fs.begin(Reservation::items(4)).unwrap();
        core.alloc.load_devices(&core.roots).unwrap();
        for ty in [BlockGroupFlags::DATA, BlockGroupFlags::METADATA] {
            for _ in 0..2 {
                assert!(core.alloc.add_chunk(ty | SINGLE, 16 << 20).unwrap());
            }
        }
        drop(handle);
        fs.commit().unwrap();
        drop(fs);

        let fs = open(array.devices(), &VolumeOptions::default());
        let spare_count = || {
            let state = fs.inner.core.alloc.state();
            state.groups.values().filter(|group| group.flags.profile() == SINGLE).count()
        };
        let id = create(&fs, "file");
        let before = spare_count();
        assert!(before >= 2, "{before} groups of one copy");
        let bytes: Vec<u8> = (0..FILE_BYTES).map(|at| (at / 4096 % 251) as u8).collect();
        for (number, part) in bytes.chunks(1 << 20).enumerate() {
            fs.write(id, FileOffset(number as u64 * (1 << 20)), part).unwrap();
        }
        for number in 0..3000 {
            create(&fs, &format!("file {number}"));
        }
        fs.sync().unwrap();
        assert!(spare_count() <= before, "made more of them");
        drop(fs);

        // Either device has all of it.
        for lost in [DeviceId(1), DeviceId(2)] {
            let mut devices = array.devices();
            devices.remove(lost.0 as usize - 1);
            let options =
                VolumeOptions { read_only: true, degraded: true, ..VolumeOptions::default() };
            let fs = open(devices, &options);
            let mut found = vec![0; FILE_BYTES];
            assert_eq!(fs.read(id, FileOffset(0), &mut found).unwrap(), FILE_BYTES);
            assert!(found == bytes, "without {lost}");
            let top = fs.top_level();
            for number in 0..3000 {
                fs.lookup(top, format!("file {number}").as_bytes()).unwrap();
            }
        }
        assert_clean(&array);
    }

    /// Those that nothing was allocated from were not looked at, and, had they been, would not have gone while others had less free: what had
    /// room for two copies had none for anything.
    #[test]
    fn groups_left_over_that_are_empty_give_their_room_to_others() {
        let array = mirrored(400 << 20);
        let fs = open(array.devices(), &VolumeOptions::default());
        let core = &fs.inner.core;
        let handle = fs.begin(Reservation::items(4)).unwrap();
        core.alloc.load_devices(&core.roots).unwrap();
        while core.alloc.add_chunk(BlockGroupFlags::DATA | SINGLE, 32 << 20).unwrap() {}
        drop(handle);
        // Without a commit that could remove them: as the last one of others has left them.
        core.alloc.state().is_degraded = true;
        core.alloc.state().note_profiles();
        fs.commit().unwrap();
        drop(fs);
        let fs = open(array.devices(), &VolumeOptions::default());
        let id = create(&fs, "file");
        for number in 0..150 {
            fs.write(id, FileOffset(number << 20), &[number as u8; 1 << 20]).unwrap();
        }
        fs.sync().unwrap();
        let state = fs.inner.core.alloc.state();
        let flags: Vec<_> = state.groups.values().map(|group| group.flags.profile()).collect();
        assert!(flags.iter().all(|profile| *profile == BlockGroupFlags::RAID1), "{flags:?}");
        drop(state);
        drop(fs);
        assert_clean(&array);
    }
}
