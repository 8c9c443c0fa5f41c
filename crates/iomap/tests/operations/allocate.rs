//! Space for files before their data comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{BLOCK, Failure, MemoryFs, at, contents, new_file};
use ubtrfs_iomap::{AddressSpace, CacheAblation, CacheOptions, FileRange, PageCache, Reach};

#[test]
fn allocate_without_space_fails_and_leaves_size_and_data() {
    let fs = MemoryFs::with_capacity(4);
    let file = new_file(&fs, CacheOptions::default()).open();
    file.write(at(0), &[1; 5000]).unwrap();
    assert_eq!(file.allocate(at(0), 5 * BLOCK, Reach::Extends), Err(Failure::NoSpace));
    assert_eq!(file.size(), at(5000));
    assert!(contents(&file) == vec![1; 5000]);
    // What is dirty does not need space twice.
    file.truncate(at(5000)).unwrap();
    assert_eq!(file.allocate(at(0), 4 * BLOCK, Reach::Extends), Ok(()));
    assert_eq!(file.write(at(0), &[2; 4 * 4096]), Err(Failure::NoSpace));
    file.fsync().unwrap();
    assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (4, 0));
}

/// Blocks that are on their way while space is allocated round them keep their data.
#[test]
fn allocate_during_writeback_keeps_what_is_on_its_way() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(2 * BLOCK), &[1; 8192]).unwrap();
    let (weak, armed) = (Arc::downgrade(&space), AtomicBool::new(true));
    fs.before_mapping(move || {
        if armed.swap(false, Ordering::Relaxed) {
            let file = weak.upgrade().unwrap().open();
            file.allocate(at(0), 8 * BLOCK, Reach::Stays).unwrap();
        }
    });
    file.fsync().unwrap();
    assert!(contents(&file)[8192..] == vec![1; 8192]);
    assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (8, 0));
}

/// Each dirty block over unwritten space was brought to the device before it became unwritten again: a range of 128 MiB took fourteen times
/// as long as to zero it in memory.
#[test]
fn allocate_zeroed_over_unwritten_space_and_holes_writes_nothing() {
    let writes = |zero_without_batch| {
        let fs = MemoryFs::new();
        let ablation = CacheAblation { zero_without_batch, ..CacheAblation::default() };
        let space = new_file(&fs, CacheOptions { ablation, ..CacheOptions::default() });
        let file = space.open();
        space.inode().note_space(&space);
        file.allocate(at(0), 100 * BLOCK, Reach::Stays).unwrap();
        for run in 0..100 {
            file.write(at(run * 2 * BLOCK), &[9; 4096]).unwrap();
        }
        file.allocate_zeroed(at(0), 200 * BLOCK, Reach::Stays).unwrap();
        let write_count = fs.write_count.load(Ordering::Relaxed);
        assert_eq!(file.size(), at(199 * BLOCK));
        assert!(contents(&file).iter().all(|byte| *byte == 0));
        assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (200, 0));
        assert!(file.seek_data(at(0)).is_err());
        // Nothing dirty is left that would say so.
        assert_eq!(MemoryFs::stored_size(space.inode()), 199 * BLOCK);
        write_count
    };
    assert_eq!(writes(false), 1, "the block that says where the file ends");
    assert!(writes(true) >= 100, "the ablation shows what it was like before");
}

/// What is dirty over data is written back first: where that cannot be it is as it was, and the file ends where it did, though nothing be dirty
/// that would say so.
#[test]
fn allocate_zeroed_that_fails_leaves_what_was_written_over_data_and_the_end() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 4096]).unwrap();
    file.fsync().unwrap();
    file.write(at(0), &[2; 4096]).unwrap();
    file.write(at(2 * BLOCK), &[3; 2 * 4096]).unwrap();
    let all = |bytes: [u8; 4]| bytes.map(|byte| vec![byte; 4096]).concat();
    let zero = || file.allocate_zeroed(at(0), 8 * BLOCK, Reach::Extends);
    fs.is_held.store(true, Ordering::Relaxed);
    assert_eq!(zero(), Err(Failure::NotNow));
    assert!(contents(&file) == all([2, 0, 3, 3]));
    // The block in which the file ends goes first.
    fs.is_held.store(false, Ordering::Relaxed);
    let holding = Arc::downgrade(&fs);
    fs.before_mapping(move || {
        holding.upgrade().unwrap().is_held.store(true, Ordering::Relaxed);
    });
    assert_eq!(zero(), Err(Failure::NotNow));
    assert!(contents(&file) == all([2, 0, 0, 3]));
    assert_eq!(MemoryFs::stored_size(space.inode()), 4 * BLOCK);
    fs.before_mapping(|| {});
    fs.is_held.store(false, Ordering::Relaxed);
    file.fsync().unwrap();
    assert_eq!(fs.reserved_blocks(), 0);
    let cache = PageCache::new(CacheOptions::default());
    let inode = Arc::clone(space.inode());
    let again = AddressSpace::new(Arc::clone(&fs), inode, at(4 * BLOCK), cache).open();
    assert!(contents(&again) == all([2, 0, 0, 3]));
}

/// Between the mapping, which says unwritten, and the drop the block is written back: then it is not zeros because the mapping was, but is made so.
#[test]
fn allocate_zeroed_while_block_is_written_back_zeroes_it() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.allocate(at(0), 4 * BLOCK, Reach::Stays).unwrap();
    file.write(at(0), &[1; 8192]).unwrap();
    let (weak, armed) = (Arc::downgrade(&space), AtomicBool::new(true));
    fs.after_map(move || {
        if let Some(space) = weak.upgrade()
            && armed.swap(false, Ordering::Relaxed)
        {
            space.flush(FileRange::from(at(0))).unwrap();
        }
    });
    file.allocate_zeroed(at(0), 4 * BLOCK, Reach::Stays).unwrap();
    assert!(fs.write_count.load(Ordering::Relaxed) > 0);
    assert!(contents(&file) == vec![0; 8192]);
    assert!(file.seek_data(at(0)).is_err());
    file.fsync().unwrap();
    assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (4, 0));
}
