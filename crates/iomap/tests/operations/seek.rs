//! Seek and fiemap while data goes from memory to the medium.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::{BLOCK, MemoryFs, at, new_file, range, walk};
use ubtrfs_iomap::{CacheOptions, FiemapFlags, FiemapSync, FileRange, OpenFile};

/// Experiment 1 in small: data in every other block. Each step of the walk continues from the last one, and the filesystem is asked for
/// each mapping once, and for many at a time.
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
    let counts = || [&fs.map_count, &fs.ask_ahead_count].map(|count| count.load(Ordering::Relaxed));
    let [told_before, asked_before] = counts();
    assert_eq!(walk(&file), expected);
    let [told, asked] = counts();
    assert!(told - told_before <= 2 * EXTENTS + 1, "{} mappings", told - told_before);
    // As many as may be, but for the first few questions.
    assert!(asked - asked_before <= EXTENTS / 50, "asked {} times", asked - asked_before);
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
            space.flush(FileRange::from(at(0))).unwrap();
        }
    });
    assert_eq!(file.seek_data(at(0)), Ok(at(2 * BLOCK)));
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
    assert!(crate::common::contents(&file) == vec![5; 20480]);
    assert_eq!(fs.used_blocks(), 10);
}
