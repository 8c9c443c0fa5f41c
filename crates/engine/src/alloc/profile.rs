//! Which profile new space has, where a class has groups of several.
//!
//! A conversion that was not finished, a device that was away for a time, or an old mkfs leave groups that keep fewer copies than their
//! user asked for. Linux allocates from those of the most redundant profile that the devices are enough for, makes new chunks of that one,
//! and leaves the others alone; so does this. Source: the order of profiles and their least numbers of devices, as Linux has them.

use ubtrfs_ondisk::block_group::BlockGroupFlags;

use super::{Allocator, Class, State};

/// From the one that is taken first, with how many devices it needs.
const PROFILES: [(BlockGroupFlags, usize); 8] = [
    (BlockGroupFlags::RAID1C4, 4),
    (BlockGroupFlags::RAID6, 3),
    (BlockGroupFlags::RAID1C3, 3),
    (BlockGroupFlags::RAID5, 2),
    (BlockGroupFlags::RAID10, 2),
    (BlockGroupFlags::RAID1, 2),
    (BlockGroupFlags::DUP, 1),
    (BlockGroupFlags::RAID0, 1),
];

impl State {
    /// Notes which groups are spare, and what is free in the others. To be called when there are groups that there were not, or a profile
    /// may be gone.
    pub(super) fn note_profiles(&mut self) {
        let device_count = self.devices.len();
        for class in [Class::Data, Class::Metadata, Class::System] {
            let is_of_class = |flags: BlockGroupFlags| Allocator::class_of_group(flags) == class;
            let flags = self.groups.values().map(|group| group.flags);
            let has = flags
                .filter(|flags| is_of_class(*flags))
                .fold(BlockGroupFlags::default(), |has, flags| has | flags.profile());
            let target = PROFILES
                .iter()
                .find(|(profile, least)| has.contains(*profile) && *least <= device_count)
                .map_or(BlockGroupFlags::default(), |(profile, _)| *profile);
            let mut free_bytes = 0;
            for group in self.groups.values_mut().filter(|group| is_of_class(group.flags)) {
                // Without copies any place is as good.
                group.is_spare = target.0 != 0 && group.flags.profile() != target;
                free_bytes += group.loaded_free_bytes();
            }
            self.spaces[class.index()].loaded_free_bytes = free_bytes;
        }
    }

    /// Flags of a group of `class` that is allocated from, if there is one.
    pub(super) fn flags_of(&self, class: Class) -> Option<BlockGroupFlags> {
        let groups = self.groups.values().rev().filter(|group| !group.is_spare);
        groups.map(|group| group.flags).find(|flags| Allocator::class_of_group(*flags) == class)
    }
}

#[cfg(test)]
mod tests {
    use ubtrfs_ondisk::{DeviceId, FileOffset};
    use ubtrfs_rt::{Arc, Runtime, Time};
    use ubtrfs_testkit::crash::SimArray;
    use ubtrfs_volume::{Device, Volume, VolumeOptions};

    use super::*;
    use crate::{Filesystem, MkfsOptions, NewInode, OpenOptions, Reservation, mkfs};

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

    /// New data and trees came to whatever group had room, and new chunks were as the last one: on a mirrored filesystem with groups left of
    /// a conversion, or of a time when a device was away, they had one copy.
    #[test]
    fn what_is_new_on_a_mirrored_filesystem_has_two_copies_whatever_groups_are_left_over() {
        let array = SimArray::new(&[1 << 30; 2]);
        let mirrored = Some(BlockGroupFlags::RAID1);
        let options = MkfsOptions {
            data_profile: mirrored,
            metadata_profile: mirrored,
            ..MkfsOptions::default()
        };
        drop(mkfs(array.devices(), &options, &Arc::new(Runtime::simulated(1))).unwrap());
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
        let new = NewInode::new(0o100_644, Time::default());
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        let id = handle.create(fs.top_level(), b"file", &new).unwrap();
        drop(handle);
        let before = spare_count();
        assert!(before >= 2, "{before} groups of one copy");
        let bytes: Vec<u8> = (0..FILE_BYTES).map(|at| (at / 4096 % 251) as u8).collect();
        for (number, part) in bytes.chunks(1 << 20).enumerate() {
            fs.write(id, FileOffset(number as u64 * (1 << 20)), part).unwrap();
        }
        for number in 0..3000 {
            let mut handle = fs.begin(Reservation::create(0)).unwrap();
            handle.create(fs.top_level(), format!("file {number}").as_bytes(), &new).unwrap();
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
        let read_only = VolumeOptions { read_only: true, ..VolumeOptions::default() };
        let volume = Volume::open(array.devices(), &read_only).unwrap();
        let report = ubtrfs_check::check(&volume, &ubtrfs_check::CheckOptions::default()).unwrap();
        let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
        assert!(report.is_clean(), "{errors:#?}");
    }
}
