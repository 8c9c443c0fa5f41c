//! Caches of many groups, made by hand: Linux makes none of groups as small as these.

use ubtrfs_iomap::{FileOffset, Reach};
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::file_extent::{Compression, FileExtent, RegularExtent};
use ubtrfs_ondisk::inode::{InodeItem, flags};
use ubtrfs_ondisk::key::DiskKey;
use ubtrfs_ondisk::misc::{FreeSpaceHeader, OnDisk};
use ubtrfs_ondisk::{Generation, InodeNo, Key, KeyType, LogicalAddr, ObjectId, RootId};
use ubtrfs_rt::{Arc, Runtime, Time};
use ubtrfs_testkit::crash::SimDevice;
use ubtrfs_testkit::{Oracle, assert_checks_clean, oracle};
use ubtrfs_volume::{Device, Volume, VolumeOptions};
use zerocopy::IntoBytes;

use super::super::{Allocator, Class, DataPromise};
use crate::{DataFile, Filesystem, MkfsOptions, NewInode, OpenOptions, Reservation, mkfs};

const NODESIZE_BYTES: u64 = 4096;
const GROUP_BYTES: u64 = 1 << 20;
const CACHE_BYTES: u64 = 64 << 10;

fn open(device: &Arc<SimDevice>) -> Filesystem {
    let devices = vec![Arc::clone(device) as Arc<dyn Device>];
    let volume = Volume::open(devices, &VolumeOptions::default()).unwrap();
    let runtime = Arc::new(Runtime::simulated(1));
    Filesystem::open(volume, OpenOptions { runtime, ..OpenOptions::default() }).unwrap()
}

fn alloc(fs: &Filesystem) -> &Allocator {
    &fs.inner.core.alloc
}

fn create(fs: &Filesystem, name: &str) -> DataFile {
    let new = NewInode::new(0o100_644, Time::default());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    let id = handle.create(fs.top_level(), name.as_bytes(), &new).unwrap();
    drop(handle);
    fs.open_data(id).unwrap()
}

fn data_groups(fs: &Filesystem) -> Vec<LogicalAddr> {
    let state = alloc(fs).state();
    let groups = state.groups.values();
    let data = groups.filter(|group| Allocator::class_of_group(group.flags) == Class::Data);
    data.map(|group| group.start).collect()
}

/// A cache of `group` in so many file extents, with a space of its own for the first if it `has_data`.
fn put_cache(fs: &Filesystem, number: u64, group: LogicalAddr, extents: u64, has_data: bool) {
    let mut handle = fs.begin(Reservation::items(extents + 2)).unwrap();
    let generation = handle.txn.generation();
    let inode = InodeNo(ObjectId::FIRST_FREE.0 + number);
    let key = |ty, offset| Key::new(inode.object_id(), ty, offset);
    let item = InodeItem {
        generation: generation.0.into(),
        transid: generation.0.into(),
        size: (extents * CACHE_BYTES).into(),
        nlink: 1.into(),
        mode: 0o100_600.into(),
        flags: (flags::NODATASUM | flags::NODATACOW | flags::NOCOMPRESS | flags::PREALLOC).into(),
        ..InodeItem::default()
    };
    let root = RootId::ROOT_TREE;
    handle.txn.insert(root, key(KeyType::INODE_ITEM, 0), item.as_bytes()).unwrap();
    for at in (0..extents).map(|extent| extent * CACHE_BYTES) {
        let mut extent = RegularExtent {
            generation,
            ram_bytes: CACHE_BYTES,
            compression: Compression::None,
            disk_bytenr: LogicalAddr(0),
            disk_num_bytes: 0,
            offset: 0,
            num_bytes: CACHE_BYTES,
        };
        if has_data && at == 0 {
            let roots = &fs.inner.core.roots;
            let promise = DataPromise::None;
            let found = alloc(fs).allocate_data(roots, CACHE_BYTES, CACHE_BYTES, promise);
            (extent.disk_bytenr, extent.disk_num_bytes) = found.unwrap();
            let (start, len) = (extent.disk_bytenr, extent.disk_num_bytes);
            alloc(fs).add_data(start, len, root, inode, at).unwrap();
        }
        let mut bytes = Vec::new();
        FileExtent::Regular(extent).write(&mut bytes);
        handle.txn.insert(root, key(KeyType::EXTENT_DATA, at), &bytes).unwrap();
    }
    let header = FreeSpaceHeader {
        location: DiskKey::new(key(KeyType::INODE_ITEM, 0)),
        generation: generation.0.into(),
        ..FreeSpaceHeader::default()
    };
    let key = Key::new(ObjectId::FREE_SPACE, KeyType::FREE_SPACE_HEADER, group.0);
    handle.txn.insert(root, key, header.as_bytes()).unwrap();
}

/// The groups that have headers, and the inodes of caches with their generations.
fn caches(fs: &Filesystem) -> (Vec<LogicalAddr>, Vec<(u64, Generation)>) {
    let (mut headers, mut inodes) = (Vec::new(), Vec::new());
    let mut cursor = fs.inner.core.roots.root_tree.cursor();
    cursor.seek(&Key::MIN).unwrap();
    while let Some((key, data)) = cursor.current().unwrap() {
        if key.objectid == ObjectId::FREE_SPACE {
            headers.push(LogicalAddr(key.offset));
        } else if key.objectid >= ObjectId::FIRST_FREE && key.ty == KeyType::INODE_ITEM {
            let generation = InodeItem::peek(data).unwrap().generation.get();
            inodes.push((key.objectid.0, Generation(generation)));
        }
        cursor.next().unwrap();
    }
    (headers, inodes)
}

/// A filesystem without free space tree, with so many small groups of data of which three quarters are taken by
/// files `f0`, `f1`... of one each; and each has a cache.
fn made(count: usize, extents: u64, has_data: bool) -> Arc<SimDevice> {
    let device = Arc::new(SimDevice::new((count as u64 * GROUP_BYTES) + (1 << 30)));
    let options = MkfsOptions {
        nodesize_bytes: u32::try_from(NODESIZE_BYTES).unwrap(),
        metadata_profile: Some(BlockGroupFlags::default()),
        free_space_tree: false,
        block_group_tree: false,
        ..MkfsOptions::default()
    };
    let runtime = Arc::new(Runtime::simulated(1));
    drop(mkfs(vec![Arc::clone(&device) as Arc<dyn Device>], &options, &runtime).unwrap());
    let fs = open(&device);
    let handle = fs.begin(Reservation::items(4)).unwrap();
    let roots = &fs.inner.core.roots;
    alloc(&fs).load_devices(roots).unwrap();
    while alloc(&fs).load_free_space(roots, Class::Data).unwrap() {}
    let first = data_groups(&fs).len();
    while data_groups(&fs).len() < first + count {
        assert!(alloc(&fs).add_chunk(BlockGroupFlags::DATA, GROUP_BYTES).unwrap());
    }
    drop(handle);
    let groups = data_groups(&fs);
    // Theirs lie in the first.
    for (number, group) in (0..).zip(&groups[first..]) {
        put_cache(&fs, number, *group, extents, has_data);
    }
    take_all(&fs, "", GROUP_BYTES / 4 * 3);
    fs.sync().unwrap();
    drop(fs);
    // That changed the groups, so who made them made their caches none.
    let fs = open(&device);
    for (number, _) in caches(&fs).1 {
        let mut handle = fs.begin(Reservation::items(1)).unwrap();
        let key = Key::new(ObjectId(number), KeyType::INODE_ITEM, 0);
        let believe = |item: &mut [u8]| InodeItem::peek_mut(item).unwrap().generation = 1.into();
        handle.txn.update(RootId::ROOT_TREE, key, believe).unwrap();
    }
    fs.commit().unwrap();
    drop(fs);
    device
}

/// Preallocates files of so many bytes until no loaded group has as much. Returns how many.
fn take_all(fs: &Filesystem, suffix: &str, len_bytes: u64) -> u64 {
    let has_more = || {
        let state = alloc(fs).state();
        let mut groups = state.groups.values().filter(|group| {
            !group.is_spare && Allocator::class_of_group(group.flags) == Class::Data
        });
        groups.any(|group| {
            let mut ranges = group.free.iter().flat_map(|free| free.ranges());
            ranges.any(|(start, end)| end - start >= len_bytes)
        })
    };
    let mut count = 0;
    while has_more() {
        let file = create(fs, &format!("f{count}{suffix}"));
        file.allocate(FileOffset::ZERO, len_bytes, Reach::Extends).unwrap();
        count += 1;
    }
    count
}

/// A commit had 96 blocks for what it copies besides the trees of space: those of thousands of caches, whose groups
/// were changed for the first time, are more.
#[test]
fn what_a_commit_copies_for_caches_of_many_groups_is_kept_back() {
    const COUNT: usize = 1500;
    let device = made(COUNT, 10, false);
    let fs = open(&device);
    // Loaded, so that each group is seen to have room.
    let handle = fs.begin(Reservation::items(0)).unwrap();
    while alloc(&fs).load_free_space(&fs.inner.core.roots, Class::Data).unwrap() {}
    drop(handle);
    let taken = take_all(&fs, " more", GROUP_BYTES / 4);
    assert!(taken >= COUNT as u64 - 2, "{taken}");
    let core = &fs.inner.core;
    let handle = fs.begin(Reservation::items(0)).unwrap();
    let (kept_bytes, blocks_before) = {
        let state = core.alloc.state();
        let promised = state.reserved_bytes + state.held_back_bytes;
        (state.kept_bytes(NODESIZE_BYTES) - promised, state.allocated_blocks)
    };
    // As the commit does, which has nothing else for it.
    while core.alloc.settle(&core.roots, handle.txn.generation()).unwrap() {}
    let copied_bytes = (core.alloc.state().allocated_blocks - blocks_before) * NODESIZE_BYTES;
    println!("{copied_bytes} bytes copied, {kept_bytes} kept");
    assert!(copied_bytes <= kept_bytes, "{copied_bytes} bytes copied, {kept_bytes} kept");
    drop(handle);
    fs.commit().unwrap();
    drop(fs);
    let (headers, inodes) = caches(&open(&device));
    assert_eq!((headers.len(), inodes.len()), (COUNT, COUNT));
    let believed = inodes.iter().filter(|(_, generation)| generation.0 != 0).count();
    assert!(believed <= 2, "{believed}");
}

/// The cache of a group that was removed stayed, with its space.
#[test]
fn cache_of_a_group_that_is_removed_goes_with_it() {
    let device = made(24, 3, true);
    let fs = open(&device);
    drop(fs.begin(Reservation::items(0)).unwrap());
    let groups = data_groups(&fs);
    assert_eq!(caches(&fs).0.len(), 24);
    let used_before = fs.superblock().bytes_used.get();
    let names: Vec<Vec<u8>> =
        fs.read_dir(fs.top_level(), 0).unwrap().map(|entry| entry.unwrap().name).collect();
    // Not the last, which are in the last groups.
    for name in &names[names.len() - 20..names.len() - 4] {
        fs.unlink(fs.top_level(), name).unwrap();
    }
    fs.commit().unwrap();
    for number in 0..2 {
        create(&fs, &format!("small {number}"));
        fs.commit().unwrap();
    }
    let left = data_groups(&fs);
    let gone: Vec<LogicalAddr> =
        groups.iter().filter(|group| !left.contains(group)).copied().collect();
    assert!(gone.len() >= 6, "{gone:?} went");
    let (headers, inodes) = caches(&fs);
    assert!(headers.iter().all(|group| left.contains(group)), "{headers:?} of {left:?}");
    assert_eq!((headers.len(), inodes.len()), (24 - gone.len(), 24 - gone.len()));
    let used = fs.superblock().bytes_used.get();
    let freed = 16 * GROUP_BYTES / 4 * 3 + gone.len() as u64 * CACHE_BYTES;
    let change = used_before - used;
    assert!(change.abs_diff(freed) < CACHE_BYTES, "{change} bytes freed, not {freed}");
    drop(fs);
    let devices: Vec<Arc<dyn Device>> = vec![Arc::new(SimDevice::of_image(device.image()))];
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(devices, &options).unwrap();
    let report = ubtrfs_check::check(&volume, &ubtrfs_check::CheckOptions::default()).unwrap();
    let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
    assert!(report.is_clean(), "{errors:#?}");
    if oracle::require(Oracle::BtrfsProgs) {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = directory.path().join("image");
        device.write_image(&image);
        assert_checks_clean(&image);
    }
}

/// A damaged header of a cache kept its group from being removed or changed, and with it each commit.
#[test]
fn damaged_header_of_a_cache_does_not_keep_its_group() {
    let device = made(24, 3, true);
    let fs = open(&device);
    drop(fs.begin(Reservation::items(0)).unwrap());
    let groups = data_groups(&fs);
    let mut handle = fs.begin(Reservation::items(48)).unwrap();
    let root = RootId::ROOT_TREE;
    for group in caches(&fs).0 {
        let header = Key::new(ObjectId::FREE_SPACE, KeyType::FREE_SPACE_HEADER, group.0);
        handle.txn.remove(root, header).unwrap();
        handle.txn.insert(root, header, &[1, 2, 3]).unwrap();
    }
    drop(handle);
    let names: Vec<Vec<u8>> =
        fs.read_dir(fs.top_level(), 0).unwrap().map(|entry| entry.unwrap().name).collect();
    for name in &names[names.len() - 20..names.len() - 4] {
        fs.unlink(fs.top_level(), name).unwrap();
    }
    fs.commit().unwrap();
    for number in 0..2 {
        create(&fs, &format!("small {number}"));
        fs.commit().unwrap();
    }
    let left = data_groups(&fs);
    let gone = groups.iter().filter(|group| !left.contains(group)).count();
    assert!(gone >= 6, "{gone} went");
    assert_eq!(caches(&fs).0.len(), 24 - gone);
    drop(fs);
    drop(open(&device));
}
