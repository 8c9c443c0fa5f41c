//! Block groups of data and device extents are read when they are wanted, and what is damaged of
//! them keeps only its own group from being used.
//!
//! The groups are small and made by hand, and each is full of many extents, so that their items lie
//! in leaves of their own.

use ubtrfs_iomap::Reach;
use ubtrfs_ondisk::block_group::{BlockGroupFlags, BlockGroupItem};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{FileOffset, Generation, Key, KeyType, LogicalAddr, ObjectId, RootId};
use ubtrfs_rt::{Arc, Runtime, Time};
use ubtrfs_testkit::crash::SimDevice;
use ubtrfs_testkit::{KernelMount, Oracle, assert_checks_clean, oracle};
use ubtrfs_volume::{Device, Volume, VolumeOptions};

use super::chunk::DeviceSpace;
use super::{Allocator, Class};
use crate::{
    Error, Filesystem, InodeId, MappingKind, MkfsOptions, NewInode, OpenOptions, Reservation, mkfs,
};

const GROUP_BYTES: u64 = 8 << 20;
const EXTENT_BYTES: u64 = 128 << 10;
/// Changes of extents that a small commit runs.
const RUNS_MAX: u64 = 64;
const EXTENTS_A_GROUP: u64 = GROUP_BYTES / EXTENT_BYTES;

fn open(device: &Arc<SimDevice>) -> Filesystem {
    let devices = vec![Arc::clone(device) as Arc<dyn Device>];
    let volume = Volume::open(devices, &VolumeOptions::default()).unwrap();
    let runtime = Arc::new(Runtime::simulated(1));
    Filesystem::open(volume, OpenOptions { runtime, ..OpenOptions::default() }).unwrap()
}

fn create(fs: &Filesystem, name: &str) -> InodeId {
    let new = NewInode::new(0o100_644, Time::default());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    handle.create(fs.top_level(), name.as_bytes(), &new).unwrap()
}

fn alloc(fs: &Filesystem) -> &Allocator {
    &fs.inner.core.alloc
}

/// The groups of data: where they begin, and whether their items were read.
fn data_groups(fs: &Filesystem) -> Vec<(LogicalAddr, bool)> {
    let state = alloc(fs).state();
    let groups = state.groups.values();
    let data = groups.filter(|group| Allocator::class_of_group(group.flags) == Class::Data);
    data.map(|group| (group.start, group.used_bytes.is_some())).collect()
}

fn read_count(fs: &Filesystem) -> usize {
    data_groups(fs).iter().filter(|(_, is_read)| *is_read).count()
}

/// The group that a file's first extent lies in.
fn group_of(fs: &Filesystem, id: InodeId) -> LogicalAddr {
    let mut mappings = fs.file_extents(id, FileOffset(0)).unwrap();
    let first = mappings.find_map(|mapping| {
        let mapping = mapping.unwrap();
        (mapping.kind != MappingKind::Hole).then_some(mapping)
    });
    let disk = first.unwrap().disk_bytenr;
    let groups = data_groups(fs);
    groups.iter().map(|(start, _)| *start).rfind(|start| *start <= disk).unwrap()
}

/// A filesystem with at least so many groups of data: as many files `f0`, `f1`... of one group's size
/// each, preallocated, and `spare` extents free at the end of the last. No more than that is left on a
/// device that is `is_full`.
fn made(groups: u64, spare: u64, is_full: bool) -> Arc<SimDevice> {
    let len_bytes = if is_full { groups * GROUP_BYTES + (80 << 20) } else { 1 << 30 };
    let device = Arc::new(SimDevice::new(len_bytes));
    let options = MkfsOptions {
        nodesize_bytes: 4096,
        metadata_profile: Some(BlockGroupFlags::default()),
        // Their items lie between those of extents.
        block_group_tree: false,
        ..MkfsOptions::default()
    };
    let runtime = Arc::new(Runtime::simulated(1));
    let devices = vec![Arc::clone(&device) as Arc<dyn Device>];
    drop(mkfs(devices, &options, &runtime).unwrap());
    let fs = open(&device);
    let roots = &fs.inner.core.roots;
    let handle = fs.begin(Reservation::items(4)).unwrap();
    alloc(&fs).load_devices(roots).unwrap();
    if is_full {
        // Metadata has its share, so that data cannot take it.
        assert!(alloc(&fs).add_chunk(BlockGroupFlags::METADATA, 32 << 20).unwrap());
        while alloc(&fs).add_chunk(BlockGroupFlags::DATA, GROUP_BYTES).unwrap() {}
    } else {
        while (data_groups(&fs).len() as u64) < groups {
            assert!(alloc(&fs).add_chunk(BlockGroupFlags::DATA, GROUP_BYTES).unwrap());
        }
    }
    while alloc(&fs).load_free_space(roots, Class::Data).unwrap() {}
    drop(handle);
    let free = || alloc(&fs).state().spaces[Class::Data.index()].loaded_free_bytes;
    for number in 0.. {
        let id = create(&fs, &format!("f{number}"));
        let file = fs.open_data(id).unwrap();
        for at in 0..EXTENTS_A_GROUP {
            if free() < (spare + 1) * EXTENT_BYTES {
                fs.sync().unwrap();
                return device;
            }
            // Apart, so that none is merged with the next.
            let offset = ubtrfs_iomap::FileOffset::new(at * 2 * EXTENT_BYTES);
            file.allocate(offset, EXTENT_BYTES, Reach::Extends).unwrap();
        }
    }
    unreachable!()
}

/// Both checkers find nothing, and the kernel can mount it and write to it.
fn judge(device: &SimDevice) {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = directory.path().join("image");
    device.write_image(&image);
    let volume = Volume::open(
        vec![Arc::new(SimDevice::of_image(device.image()))],
        &VolumeOptions { read_only: true, ..VolumeOptions::default() },
    );
    let report = ubtrfs_check::check(&volume.unwrap(), &ubtrfs_check::CheckOptions::default());
    let report = report.unwrap();
    let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
    assert!(report.is_clean(), "{errors:#?}");
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
    if oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        let mount = KernelMount::read_write(&image, "");
        std::fs::write(mount.path().join("of the kernel"), [1; 10_000]).unwrap();
        mount.unmount();
        if oracle::require(Oracle::BtrfsProgs) {
            assert_checks_clean(&image);
        }
    }
}

/// Frees the first extent of a file.
fn punch(fs: &Filesystem, name: &str) -> InodeId {
    let id = fs.lookup(fs.top_level(), name.as_bytes()).unwrap();
    fs.open_data(id).unwrap().punch_hole(ubtrfs_iomap::FileOffset::new(0), EXTENT_BYTES).unwrap();
    id
}

/// An item of a group was looked up for each chunk before the first change, each in another leaf.
#[test]
fn small_change_reads_no_group_of_data_and_no_device_extents() {
    let reads_with = |groups| {
        let device = made(groups, 2, false);
        let fs = open(&device);
        let before = fs.blocks_read();
        let id = create(&fs, "small");
        fs.write(id, FileOffset(0), b"inline").unwrap();
        fs.commit().unwrap();
        let reads = fs.blocks_read() - before;
        let state = data_groups(&fs);
        assert!(state.len() as u64 >= groups);
        assert_eq!(read_count(&fs), 0, "{state:?}");
        assert!(!alloc(&fs).state().devices.values().any(DeviceSpace::is_read));
        drop(fs);
        judge(&device);
        reads
    };
    let (few, many) = (reads_with(4), reads_with(40));
    // A level more of the trees at the most.
    assert!(many <= few + 4, "{few} blocks with 4 groups, {many} with 40");
}

#[test]
fn write_of_data_reads_the_groups_that_it_goes_through() {
    let device = made(40, 2, false);
    let fs = open(&device);
    let freed = punch(&fs, "f3");
    let freed = group_of(&fs, freed);
    fs.commit().unwrap();
    assert_eq!(read_count(&fs), 1);
    drop(fs);
    let fs = open(&device);
    let before = fs.blocks_read();
    let id = create(&fs, "new");
    fs.write(id, FileOffset(0), &[7; 60_000]).unwrap();
    fs.sync().unwrap();
    assert!(group_of(&fs, id) <= freed, "the first that has room");
    let groups = data_groups(&fs);
    let read = groups.iter().take_while(|(_, is_read)| *is_read).count();
    assert_eq!(read_count(&fs), read, "{groups:?}");
    assert_eq!(groups[read - 1].0, group_of(&fs, id), "none behind that");
    let blocks = fs.blocks_read() - before;
    assert!(blocks < 60, "{blocks} blocks read");
    drop(fs);
    judge(&device);
}

#[test]
fn frees_in_groups_that_were_not_read_are_counted_and_emptied_groups_go() {
    let device = made(24, 2, false);
    let fs = open(&device);
    let used_before = fs.superblock().bytes_used.get();
    fs.unlink(fs.top_level(), b"f9").unwrap();
    fs.commit().unwrap();
    let read = read_count(&fs);
    assert!((1..=2).contains(&read), "{read} groups read for one file");
    let used = fs.superblock().bytes_used.get();
    let change = used_before - used;
    assert!(change.abs_diff(GROUP_BYTES) < 1 << 20, "{change} bytes freed");
    drop(fs);
    judge(&device);
    // The sum of the groups, once they are all read, is what was counted without.
    let fs = open(&device);
    let handle = fs.begin(Reservation::items(0)).unwrap();
    assert_eq!(alloc(&fs).totals().0, used);
    for (start, _) in data_groups(&fs) {
        alloc(&fs).read_group(&fs.inner.core.roots, start).unwrap();
    }
    assert_eq!(alloc(&fs).totals().0, used);
    drop(handle);
    drop(fs);
    let fs = open(&device);
    create(&fs, "small");
    let count = data_groups(&fs).len();
    for number in 10..16 {
        fs.unlink(fs.top_level(), format!("f{number}").as_bytes()).unwrap();
    }
    fs.commit().unwrap();
    assert_eq!(data_groups(&fs).len(), count, "the last superblock still reaches them");
    create(&fs, "and another");
    fs.commit().unwrap();
    let left = data_groups(&fs).len();
    // One stays for each that goes, and two are shared with neighbours.
    assert!(left + 2 <= count, "{left} of {count} groups");
    drop(fs);
    judge(&device);
}

#[test]
fn groups_that_threads_load_at_once_are_loaded_once() {
    let device = made(6, 40, false);
    let fs = open(&device);
    let ids: Vec<InodeId> = (0..4).map(|number| create(&fs, &format!("new{number}"))).collect();
    std::thread::scope(|scope| {
        for (id, byte) in ids.iter().zip(1..) {
            let fs = &fs;
            scope.spawn(move || {
                for at in 0..8 {
                    fs.write(*id, FileOffset(at * 65_536), &[byte; 65_536]).unwrap();
                }
                fs.commit().unwrap();
            });
        }
    });
    for (id, byte) in ids.iter().zip(1_u8..) {
        let mut bytes = vec![0; 8 << 16];
        assert_eq!(fs.read(*id, FileOffset(0), &mut bytes).unwrap(), bytes.len());
        assert!(bytes.iter().all(|found| *found == byte));
    }
    drop(fs);
    judge(&device);
}

/// Changes the item of a group, or removes it, and makes that durable.
fn damage_group(
    device: &Arc<SimDevice>,
    start: LogicalAddr,
    change: Option<fn(&mut BlockGroupItem)>,
) {
    let fs = open(device);
    let handle = fs.begin(Reservation::items(4)).unwrap();
    let roots = &fs.inner.core.roots;
    let len_bytes = alloc(&fs).state().groups[&start].len_bytes;
    let key = Key::new(ObjectId(start.0), KeyType::BLOCK_GROUP_ITEM, len_bytes);
    let tree = alloc(&fs).group_items_tree(roots).unwrap();
    let mut editor = alloc(&fs).edit(roots, &tree, handle.txn.generation());
    match change {
        None => editor.remove(&key).unwrap(),
        Some(change) => {
            editor.update(&key, |item| change(BlockGroupItem::peek_mut(item).unwrap())).unwrap()
        }
    }
    drop(editor);
    drop(handle);
    fs.commit().unwrap();
    assert_eq!(read_count(&fs), 0);
}

#[test]
fn damaged_item_of_a_group_is_an_error_for_who_wants_the_group() {
    let changes: [Option<fn(&mut BlockGroupItem)>; 2] =
        [None, Some(|item| item.flags = (item.flags.get() | BlockGroupFlags::DUP.0).into())];
    for change in changes {
        let device = made(8, 2, false);
        let fs = open(&device);
        // Room in the damaged one, and in another behind it.
        let damaged = group_of(&fs, punch(&fs, "f2"));
        let whole = group_of(&fs, punch(&fs, "f4"));
        fs.commit().unwrap();
        drop(fs);
        damage_group(&device, damaged, change);

        let fs = open(&device);
        let id = create(&fs, "new");
        fs.write(id, FileOffset(0), &[7; 60_000]).unwrap();
        fs.sync().unwrap();
        assert_eq!(group_of(&fs, id), whole);
        fs.unlink(fs.top_level(), b"f6").unwrap();
        fs.commit().unwrap();
        let generation = fs.superblock().generation.get();
        // Half of it lies in the damaged group.
        fs.unlink(fs.top_level(), b"f2").unwrap();
        let Err(Error::Aborted { first_cause, .. }) = fs.commit() else { panic!("committed") };
        assert!(matches!(*first_cause, Error::Corrupt(_)), "{first_cause}");
        assert!(first_cause.to_string().contains("block group"), "{first_cause}");
        drop(fs);

        let fs = open(&device);
        assert_eq!(fs.superblock().generation.get(), generation);
        assert!(fs.lookup(fs.top_level(), b"f2").is_ok(), "nothing durable is lost");
        assert!(fs.lookup(fs.top_level(), b"f6").is_err());
        let id = fs.lookup(fs.top_level(), b"new").unwrap();
        fs.write(id, FileOffset(0), &[8; 60_000]).unwrap();
        fs.sync().unwrap();
    }
}

#[test]
fn damaged_group_is_named_where_there_is_no_other_space() {
    let device = made(4, 0, true);
    let fs = open(&device);
    let damaged = group_of(&fs, punch(&fs, "f1"));
    fs.commit().unwrap();
    drop(fs);
    // Whole it takes what no other has room for.
    let whole = open(&device);
    let id = create(&whole, "new");
    whole.write(id, FileOffset(0), &[7; 60_000]).unwrap();
    drop(whole);
    damage_group(&device, damaged, None);
    let fs = open(&device);
    let id = create(&fs, "new");
    fs.commit().unwrap();
    let error = fs.write(id, FileOffset(0), &[7; 60_000]).unwrap_err();
    assert!(matches!(error, Error::Corrupt(_)), "{error}");
    assert!(error.to_string().contains("block group"), "{error}");
    // What needs no data goes on.
    fs.write(id, FileOffset(0), b"inline").unwrap();
    fs.commit().unwrap();
}

#[test]
fn damaged_device_tree_is_an_error_for_who_makes_a_chunk() {
    let device = made(4, 2, false);
    let fs = open(&device);
    let handle = fs.begin(Reservation::items(4)).unwrap();
    let roots = &fs.inner.core.roots;
    let tree = roots.tree(RootId::DEV_TREE).unwrap();
    let generation: Generation = handle.txn.generation();
    let mut editor = alloc(&fs).edit(roots, &tree, generation);
    let (key, bytes) =
        editor.at_or_after(&Key::new(ObjectId(1), KeyType::DEV_EXTENT, 0)).unwrap().unwrap();
    // A second one in the first.
    let inner = Key::new(key.objectid, key.ty, key.offset + 65_536);
    editor.insert(inner, bytes.len(), |to| to.copy_from_slice(&bytes)).unwrap();
    drop(editor);
    drop(handle);
    fs.commit().unwrap();
    drop(fs);

    let fs = open(&device);
    let id = create(&fs, "new");
    fs.write(id, FileOffset(0), &[7; 60_000]).unwrap();
    fs.sync().unwrap();
    let error = fs.open_data(id).unwrap().allocate(
        ubtrfs_iomap::FileOffset::new(0),
        20 << 20,
        Reach::Extends,
    );
    let is_damage = |error: &Error| error.to_string().contains("DEV_EXTENT");
    assert!(error.as_ref().is_err_and(is_damage), "{error:?}");
    assert!(fs.shrink_to_fit().as_ref().is_err_and(is_damage));
    fs.unlink(fs.top_level(), b"f1").unwrap();
    fs.commit().unwrap();
    assert!(fs.lookup(fs.top_level(), b"f1").is_err());
}

/// The commit took old extents out of the extent tree before it put new ones in. So the leaf that lost what the commit freed
/// was merged with its neighbour, full to the brim, and split again by what came behind: two blocks given back and two taken,
/// which did the same to the same leaves, until there was no metadata left.
#[test]
fn commit_where_new_extents_just_fill_a_leaf_settles() {
    for (count, free_space_tree) in (40..110).flat_map(|count| [(count, false), (count, true)]) {
        let device = Arc::new(SimDevice::new(160 << 20));
        let options = MkfsOptions {
            nodesize_bytes: 4096,
            metadata_profile: Some(BlockGroupFlags::default()),
            free_space_tree,
            block_group_tree: false,
            ..MkfsOptions::default()
        };
        let runtime = Arc::new(Runtime::simulated(1));
        let devices = vec![Arc::clone(&device) as Arc<dyn Device>];
        drop(mkfs(devices, &options, &runtime).unwrap());
        let fs = open(&device);
        let file = fs.open_data(create(&fs, "file")).unwrap();
        // Apart, so that each is an extent.
        let place = |number: u64| ubtrfs_iomap::FileOffset::new(number * 8192);
        for number in 0..count {
            file.allocate(place(number), 4096, Reach::Extends).unwrap();
        }
        fs.sync().unwrap();
        // The first leaf holds the blocks of metadata, and ever less of what lies behind them.
        for number in 0..count {
            file.punch_hole(place(number), 4096).unwrap();
            let before = alloc(&fs).ref_times().len();
            let result = fs.sync();
            let runs = alloc(&fs).ref_times().len() - before;
            let what = format!("{number} of {count} punched, {runs} runs: {result:?}");
            assert!(result.is_ok() && runs <= RUNS_MAX, "{what}");
        }
    }
}
