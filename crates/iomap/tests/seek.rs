//! Seek and fiemap while data goes from memory to the medium.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{BLOCK, Failure, MemoryFs, at, new_file, range};
use ubtrfs_iomap::{
    CacheOptions, Error, FiemapFlags, FiemapSync, FileOffset, FileRange, OpenFile, Reach,
};

fn walk(file: &OpenFile<MemoryFs>) -> Vec<FileRange> {
    let mut found = Vec::new();
    let mut from = FileOffset::ZERO;
    while let Ok(start) = file.seek_data(from) {
        from = file.seek_hole(start).unwrap();
        found.push(FileRange::new(start, from));
    }
    found
}

/// Experiment 1 in small: data in every other block. Each step of the walk continues from the last one, and asks the filesystem
/// at most once.
#[test]
fn walk_of_sparse_file_finds_each_extent_in_constant_steps() {
    const EXTENTS: u64 = 2000;
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    for extent in 0..EXTENTS {
        file.write(at(extent * 2 * BLOCK), &[1; 4096]).unwrap();
    }
    let expected: Vec<FileRange> =
        (0..EXTENTS).map(|extent| range(extent * 2 * BLOCK, (extent * 2 + 1) * BLOCK)).collect();
    let maps_before = fs.map_count.load(Ordering::Relaxed);
    assert_eq!(walk(&file), expected);
    assert!(file.state_search_count() <= 2, "{} searches", file.state_search_count());
    // The file has not a single mapping yet, so one serves for all.
    assert_eq!(fs.map_count.load(Ordering::Relaxed) - maps_before, 1);
    file.fsync().unwrap();
    let maps_before = fs.map_count.load(Ordering::Relaxed);
    assert_eq!(walk(&file), expected);
    assert!(fs.map_count.load(Ordering::Relaxed) - maps_before <= 2 * EXTENTS + 1);
}

/// In the middle of writeback the data is neither dirty nor mapped. It is data all the same.
#[test]
fn seek_and_fiemap_during_writeback_see_ordered_data() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(2 * BLOCK), &[1; 8192]).unwrap();
    let (weak, seen) = (Arc::downgrade(&space), Arc::new(AtomicU64::new(0)));
    let counter = Arc::clone(&seen);
    fs.before_mapping(move || {
        let file = weak.upgrade().unwrap().open();
        assert_eq!(walk(&file), [range(2 * BLOCK, 4 * BLOCK)]);
        let extents = file.fiemap(range(0, 1 << 30), 10, FiemapSync::AsIs).unwrap();
        let flags = FiemapFlags { is_delalloc: true, is_last: true, ..FiemapFlags::default() };
        assert_eq!(extents.len(), 1);
        assert_eq!((extents[0].range, extents[0].flags), (range(2 * BLOCK, 4 * BLOCK), flags));
        counter.fetch_add(1, Ordering::Relaxed);
    });
    file.fsync().unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), 1);
}

/// Between the look at the mapping (a hole) and the look at the states (delalloc), all of it is written: neither shows the data.
#[test]
fn seek_while_data_goes_from_states_to_mapping_sees_it() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(2 * BLOCK), &[1; 4096]).unwrap();
    let (weak, armed) = (Arc::downgrade(&space), AtomicBool::new(true));
    fs.after_map(move || {
        if let Some(space) = weak.upgrade()
            && armed.swap(false, Ordering::Relaxed)
        {
            space.flush(FileRange::from(at(0)));
        }
    });
    assert_eq!(file.seek_data(at(0)), Ok(at(2 * BLOCK)));
}

#[test]
fn fiemap_names_each_kind_of_extent() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 8192]).unwrap();
    file.fsync().unwrap();
    file.allocate(at(4 * BLOCK), 4 * BLOCK, Reach::Stays).unwrap();
    file.write(at(5 * BLOCK), &[1; 4096]).unwrap();
    file.write(at(9 * BLOCK), &[1; 100]).unwrap();
    let all = FileRange::from(at(0));
    let extents = file.fiemap(all, 100, FiemapSync::AsIs).unwrap();
    let none = FiemapFlags::default();
    let unwritten = FiemapFlags { is_unwritten: true, ..none };
    let delalloc = FiemapFlags { is_delalloc: true, ..none };
    let first = extents[1].address.unwrap();
    let list: Vec<_> =
        extents.iter().map(|extent| (extent.range, extent.address, extent.flags)).collect();
    let expected = [
        (range(0, 2 * BLOCK), extents[0].address, none),
        (range(4 * BLOCK, 5 * BLOCK), Some(first), unwritten),
        (range(5 * BLOCK, 6 * BLOCK), None, delalloc),
        (range(6 * BLOCK, 8 * BLOCK), Some(first + 2 * BLOCK), unwritten),
        (range(9 * BLOCK, 10 * BLOCK), None, FiemapFlags { is_last: true, ..delalloc }),
    ];
    assert_eq!(list, expected);
    // Cut, the last one shown is not the file's last, and it is whole.
    let two = file.fiemap(all, 2, FiemapSync::AsIs).unwrap();
    assert_eq!(two, extents[..2]);
    let part = file.fiemap(range(7 * BLOCK, 8 * BLOCK), 9, FiemapSync::AsIs).unwrap();
    assert_eq!(part.len(), 1);
    assert!(!part[0].flags.is_last);
    let synced = file.fiemap(all, 100, FiemapSync::WriteBack).unwrap();
    assert!(synced.iter().all(|extent| !extent.flags.is_delalloc && extent.address.is_some()));
}

#[test]
fn inline_and_shared_extents_are_named_and_unshared() {
    let fs = MemoryFs::new();
    fs.inline_bytes_max.store(2048, Ordering::Relaxed);
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), b"small").unwrap();
    file.fsync().unwrap();
    let all = FileRange::from(at(0));
    let flags = |file: &OpenFile<MemoryFs>| {
        let extents = file.fiemap(all, 9, FiemapSync::WriteBack).unwrap();
        extents.iter().map(|extent| extent.flags).collect::<Vec<_>>()
    };
    let last = FiemapFlags { is_last: true, ..FiemapFlags::default() };
    assert_eq!(flags(&file), [FiemapFlags { is_inline: true, ..last }]);
    file.write(at(0), &[5; 20480]).unwrap();
    file.fsync().unwrap();
    assert_eq!(flags(&file), [last]);
    let copy = new_file(&fs, CacheOptions::default());
    fs.share(space.inode(), copy.inode());
    assert_eq!(flags(&file), [FiemapFlags { is_shared: true, ..last }]);
    file.unshare(at(0), 20480).unwrap();
    assert_eq!(flags(&file), [last]);
    assert!(common::contents(&file) == vec![5; 20480]);
    assert_eq!(fs.used_blocks(), 10);
}

#[test]
fn seek_outside_of_the_file_is_no_data() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    let no_data = |offset| Err(Failure::Request(Error::NoData { offset }));
    for offset in [at(0), at(5), FileOffset::MAX, at(u64::MAX)] {
        assert_eq!(file.seek_data(offset), no_data(offset));
        assert_eq!(file.seek_hole(offset), no_data(offset));
    }
    file.truncate(FileOffset::MAX).unwrap();
    assert_eq!(file.seek_hole(at(5)), Ok(at(5)));
    assert_eq!(file.seek_data(at(5)), no_data(at(5)));
    file.write(at((1 << 62) + 1), &[1]).unwrap();
    assert_eq!(file.seek_data(at(5)), Ok(at(1 << 62)));
    assert_eq!(file.seek_hole(at(1 << 62)), Ok(at((1 << 62) + BLOCK)));
}
