//! Devices that fail, space that ends, requests that cannot be met.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::{BLOCK, Failure, MemoryFs, at, contents, new_file, range};
use ubtrfs_iomap::{AddressSpace, CacheOptions, FileRange, PageCache, Reach};

/// Two files; the device fails in the middle of writing the first one back.
#[test]
fn writeback_that_fails_is_reported_once_to_each_open_file() {
    let fs = MemoryFs::new();
    let cache =
        PageCache::new(CacheOptions { writeback_bytes_max: BLOCK, ..CacheOptions::default() });
    let new = || AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let (space, other) = (new(), new());
    let (file, same, other) = (space.open(), space.open(), other.open());
    file.write(at(0), &[1; 4 * 4096]).unwrap();
    file.fsync().unwrap();
    other.write(at(0), &[3; 4096]).unwrap();
    file.write(at(0), &[2; 4 * 4096]).unwrap();
    fs.writes_left.store(2, Ordering::Relaxed);
    space.flush(FileRange::from(at(0))).unwrap();
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    // Nobody was told yet. Who asks first, or was open then, is told; who comes later is not.
    assert_eq!(file.fsync(), Err(Failure::Io));
    assert_eq!(file.fsync(), Ok(()));
    let later = space.open();
    assert_eq!(later.fsync(), Ok(()));
    assert_eq!(same.fsync(), Err(Failure::Io));
    assert_eq!(same.fsync(), Ok(()));
    assert_eq!(other.fsync(), Ok(()));
    assert!(contents(&other) == vec![3; 4096]);
    // Memory does not show what the medium does not hold.
    let mut expected = vec![2; 2 * 4096];
    expected.resize(4 * 4096, 1);
    assert!(contents(&file) == expected);
    assert!(fs.stored(space.inode(), 4 * BLOCK) == expected);
    assert_eq!((fs.reserved_blocks(), cache.dirty_bytes()), (0, 0));
    file.write(at(0), &[4; 4 * 4096]).unwrap();
    file.fsync().unwrap();
    assert!(fs.stored(space.inode(), 4 * BLOCK) == vec![4; 4 * 4096]);
}

/// What was stored through a map is lost with an error of msync, once, and of the next fsync of who else has the file open.
#[test]
fn msync_that_fails_says_so_once() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let (file, same) = (space.open(), space.open());
    file.write(at(0), &[1; 4 * 4096]).unwrap();
    file.fsync().unwrap();
    same.fsync().unwrap();
    let map = file.map(at(0), 4 * BLOCK).unwrap();
    map.store(at(BLOCK), &[2; 4096]).unwrap();
    let stored = range(BLOCK, 2 * BLOCK);
    fs.writes_left.store(0, Ordering::Relaxed);
    assert_eq!(map.msync(stored), Err(Failure::Io));
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(map.msync(stored), Ok(()));
    assert_eq!(file.fsync(), Ok(()));
    assert_eq!(same.fsync(), Err(Failure::Io));
    assert_eq!(same.fsync(), Ok(()));
    // Memory does not show what the medium does not hold; what is stored then arrives.
    assert!(contents(&file) == vec![1; 4 * 4096]);
    map.store(at(BLOCK), &[3; 4096]).unwrap();
    map.msync(stored).unwrap();
    assert!(fs.stored(space.inode(), 2 * BLOCK)[4096..] == [3; 4096]);
    assert!(contents(&file)[4096..8192] == [3; 4096]);
}

/// What is written again while its older version is on its way is not lost when that fails.
#[test]
fn write_during_writeback_that_fails_stays() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 8192]).unwrap();
    let weak = Arc::downgrade(&space);
    let armed = std::sync::atomic::AtomicBool::new(true);
    let device = Arc::downgrade(&fs);
    fs.after_map(|| {});
    fs.before_mapping(move || {
        if armed.swap(false, Ordering::Relaxed) {
            let space = weak.upgrade().unwrap();
            space.open().write(at(100), &[2; 200]).unwrap();
            // This one arrives; the next one does not.
            device.upgrade().unwrap().writes_left.store(0, Ordering::Relaxed);
        }
    });
    file.fsync().unwrap();
    assert_eq!(space.states().delalloc_new_bytes(), 0, "the first version has its space");
    assert_eq!(file.fsync(), Err(Failure::Io));
    assert_eq!(space.states().delalloc_new_bytes(), 0);
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    let mut expected = vec![1; 8192];
    assert!(contents(&file) == expected, "the second version is lost, the first one stays");
    file.write(at(100), &[2; 200]).unwrap();
    file.fsync().unwrap();
    expected[100..300].fill(2);
    assert!(contents(&file) == expected);
    assert!(fs.stored(space.inode(), 8192) == expected);
}

/// What became dirty again while its older version was on its way, and is lost, takes its space still when it is stored.
#[test]
fn space_of_what_was_written_beside_a_run_that_fails_counts() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 4096]).unwrap();
    file.write(at(2 * BLOCK), &[1; 2 * 4096]).unwrap();
    let weak = Arc::downgrade(&space);
    let armed = std::sync::atomic::AtomicBool::new(true);
    let device = Arc::downgrade(&fs);
    fs.before_mapping(move || {
        if armed.swap(false, Ordering::Relaxed) {
            // The first run is about to arrive, and the second one will not.
            weak.upgrade().unwrap().open().write(at(3 * BLOCK + 100), &[2; 200]).unwrap();
            device.upgrade().unwrap().writes_left.store(0, Ordering::Relaxed);
        }
    });
    assert_eq!(space.states().delalloc_new_bytes(), 3 * BLOCK);
    space.cache().shrink_dirty(3 * BLOCK);
    assert_eq!(space.states().delalloc_new_bytes(), BLOCK);
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(file.fsync(), Err(Failure::Io));
    assert_eq!(space.states().delalloc_new_bytes(), 0);
    assert_eq!(MemoryFs::allocated_blocks(space.inode()), [0, 3]);
}

/// Of a run that is lost in part, what is stored has its space: what becomes dirty again there takes no more. It was counted as new until it was
/// written the next time.
#[test]
fn space_of_what_is_stored_of_a_lost_run_counts_once() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 2 * 4096]).unwrap();
    let weak = Arc::downgrade(&space);
    fs.before_mapping(move || {
        weak.upgrade().unwrap().open().write(at(100), &[2; 200]).unwrap();
    });
    fs.blocks_before_failure.store(1, Ordering::Relaxed);
    fs.writes_left.store(0, Ordering::Relaxed);
    space.cache().shrink_dirty(2 * BLOCK);
    assert_eq!(MemoryFs::allocated_blocks(space.inode()), [0]);
    assert_eq!(space.states().delalloc_new_bytes(), 0);
    assert!(space.is_dirty());
    fs.before_mapping(|| {});
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(file.fsync(), Err(Failure::Io));
    let expected = [vec![1; 100], vec![2; 200], vec![1; 4096 - 300], vec![0; 4096]].concat();
    assert!(contents(&file) == expected);
}

/// Between the look at the mapping and the write, what was on its way arrives, and is no hole any more.
#[test]
fn space_of_a_block_that_arrives_meanwhile_counts_once() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 4096]).unwrap();
    let weak = Arc::downgrade(&space);
    let armed = std::sync::atomic::AtomicBool::new(true);
    fs.after_map(move || {
        if armed.swap(false, Ordering::Relaxed) {
            weak.upgrade().unwrap().flush(FileRange::new(at(0), at(BLOCK))).unwrap();
        }
    });
    file.write(at(0), &[2; 8192]).unwrap();
    assert_eq!(MemoryFs::allocated_blocks(space.inode()), [0]);
    assert_eq!(space.states().delalloc_new_bytes(), BLOCK);
    assert!(contents(&file) == [2; 8192]);
    file.fsync().unwrap();
    assert_eq!(fs.reserved_blocks(), 0);
}

/// Runs are given to the filesystem together. Where one fails, the others are not lost with it; nor is what is written to one
/// of those that wait behind it.
#[test]
fn one_run_that_fails_among_many_loses_nothing_but_itself() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    for block in 0..8 {
        file.write(at(block * 2 * BLOCK), &[1; 4096]).unwrap();
    }
    let (weak, armed) = (Arc::downgrade(&space), std::sync::atomic::AtomicBool::new(true));
    fs.before_mapping(move || {
        if armed.swap(false, Ordering::Relaxed) {
            let file = weak.upgrade().unwrap().open();
            file.write(at(12 * BLOCK + 50), &[2; 100]).unwrap();
        }
    });
    fs.writes_before_failure.store(2, Ordering::Relaxed);
    assert_eq!(file.fsync(), Err(Failure::Io));
    assert_eq!(file.fsync(), Ok(()));
    let mut expected = vec![0; 15 * 4096];
    for block in [0, 1, 3, 4, 5, 6, 7] {
        expected[block * 8192..block * 8192 + 4096].fill(1);
    }
    expected[12 * 4096 + 50..12 * 4096 + 150].fill(2);
    assert!(contents(&file) == expected);
    assert!(fs.stored(space.inode(), 15 * BLOCK) == expected);
    assert_eq!((fs.reserved_blocks(), fs.used_blocks()), (0, 7));
}

/// An fsync that waits for runs that another thread gave to the filesystem writes them itself where that thread's were abandoned.
#[test]
fn fsync_of_runs_that_another_thread_abandons_writes_them() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    for block in 0..3 {
        file.write(at(block * 2 * BLOCK), &[1; 4096]).unwrap();
    }
    let begun = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let has_begun = Arc::clone(&begun);
    fs.before_mapping(move || {
        has_begun.store(true, Ordering::SeqCst);
        for _ in 0..1000 {
            std::thread::yield_now();
        }
    });
    fs.writes_before_failure.store(1, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| space.flush(FileRange::from(at(0))).unwrap());
        while !begun.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        assert_eq!(file.fsync(), Err(Failure::Io));
        let stored = fs.stored(space.inode(), 5 * BLOCK);
        assert!(stored[4 * 4096..] == vec![1; 4096], "the last run is not stored");
        flush.join().unwrap();
    });
}

#[test]
fn read_that_fails_says_so_and_can_be_made_again() {
    let fs = MemoryFs::new();
    let options = CacheOptions { keeps_clean: false, ..CacheOptions::default() };
    let file = new_file(&fs, options).open();
    file.write(at(0), &[1; 3 * 4096]).unwrap();
    file.fsync().unwrap();
    fs.reads_left.store(0, Ordering::Relaxed);
    assert_eq!(file.read(at(0), &mut [0; 100]), Err(Failure::Io));
    assert_eq!(file.direct_read(at(0), &mut [0; 4096]), Err(Failure::Io));
    assert_eq!(file.map(at(0), BLOCK).unwrap().fault_for_read(at(10)), Err(Failure::Io));
    // A write of a part of a block needs the rest; a write of a whole block does not.
    assert_eq!(file.write(at(10), &[2; 20]), Err(Failure::Io));
    assert_eq!(file.write(at(4096), &[2; 4096]), Ok(4096));
    // The first of these blocks is written, for the rest of the second one the device is needed.
    assert_eq!(file.write(at(4096), &[3; 5000]), Err(Failure::Io));
    assert_eq!(file.truncate(at(100)), Err(Failure::Io));
    assert_eq!(file.size(), at(3 * BLOCK));
    fs.reads_left.store(u64::MAX, Ordering::Relaxed);
    let mut expected = vec![1; 3 * 4096];
    expected[4096..8192].fill(2);
    assert!(contents(&file) == expected);
    file.fsync().unwrap();
    assert_eq!(fs.reserved_blocks(), 0);
}

/// Whole blocks beside one that cannot be read are read, whether they were wanted together with it, or it was only to be read
/// ahead.
#[test]
fn read_beside_a_block_that_cannot_be_read_gives_what_can() {
    for (keeps_clean, straight_bytes_min) in [(true, u64::MAX), (false, u64::MAX), (false, BLOCK)] {
        let fs = MemoryFs::new();
        let options = CacheOptions { keeps_clean, straight_bytes_min, ..CacheOptions::default() };
        let space = new_file(&fs, options);
        let file = space.open();
        file.write(at(0), &[1; 64 * 4096]).unwrap();
        file.fsync().unwrap();
        space.cache().shrink_clean(u64::MAX);
        for block in [7, 8, 20] {
            fs.spoil(space.inode(), block);
        }
        let mut buffer = vec![0; 64 * 4096];
        let mut read = |place: u64, len: usize| file.read(at(place), &mut buffer[..len]);
        // With those behind it read ahead.
        assert_eq!(read(0, 4096), Ok(4096));
        assert_eq!(read(BLOCK, 4 * 4096), Ok(4 * 4096));
        assert_eq!(read(5 * BLOCK + 10, 4 * 4096), Ok(2 * 4096 - 10));
        for bad in [7 * BLOCK, 8 * BLOCK + 1] {
            assert_eq!(read(bad, 4096), Err(Failure::Io));
        }
        assert_eq!(read(9 * BLOCK, 60 * 4096), Ok(11 * 4096));
        assert_eq!(read(21 * BLOCK, 60 * 4096), Ok(43 * 4096));
        assert!(buffer[..43 * 4096].iter().all(|byte| *byte == 1));
        assert_eq!(file.read_whole(at(9 * BLOCK), &mut buffer[..60 * 4096]), Err(Failure::Io));
        assert_eq!(file.read_whole(at(21 * BLOCK), &mut buffer[..60 * 4096]), Ok(43 * 4096));
        // A load has no short answer.
        let mapped = file.map(at(0), 64 * BLOCK).unwrap();
        assert_eq!(mapped.load(at(5 * BLOCK), &mut buffer[..4 * 4096]), Err(Failure::Io));
        assert_eq!(mapped.load(at(5 * BLOCK), &mut buffer[..2 * 4096]), Ok(()));
    }
}

/// It went on from there once, as if that had been one read, without the range locked in between: what another wrote meanwhile was seen in
/// part.
#[test]
fn whole_read_that_met_an_error_is_not_gone_on_with() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 16 * 4096]).unwrap();
    file.fsync().unwrap();
    space.cache().shrink_clean(u64::MAX);
    // With others, then alone.
    fs.spoil_for(space.inode(), 7, 2);
    let mut buffer = vec![0; 16 * 4096];
    assert_eq!(file.read_whole(at(0), &mut buffer), Err(Failure::Io));
    assert_eq!(file.read_whole(at(0), &mut buffer), Ok(16 * 4096));
    assert!(buffer == [1; 16 * 4096]);
}

#[test]
fn write_without_space_is_short_then_refused_and_space_comes_back() {
    let fs = MemoryFs::with_capacity(10);
    fs.cut_mappings(1);
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    // Into unwritten space of three blocks, where mappings are cut; then there is a hole, for which there is no space.
    file.allocate(at(0), 3 * BLOCK, Reach::Stays).unwrap();
    assert_eq!(file.write(at(0), &[1; 20 * 4096]), Ok(3 * 4096));
    assert_eq!(file.size(), at(3 * BLOCK));
    assert_eq!(file.write(at(3 * BLOCK), &[1; 20 * 4096]), Err(Failure::NoSpace));
    assert_eq!(fs.reserved_blocks(), 3);
    // What is dirty already needs no more space.
    assert_eq!(file.write(at(5), &[2; 4096]), Ok(4096));
    file.truncate(at(0)).unwrap();
    assert_eq!((fs.reserved_blocks(), fs.used_blocks()), (0, 0));
    assert_eq!(file.write(at(0), &[3; 10 * 4096]), Ok(10 * 4096));
    assert_eq!(file.direct_write(at(10 * BLOCK), &[3; 4096]), Err(Failure::NoSpace));
    assert_eq!(file.size(), at(10 * BLOCK));
    let map = file.map(at(0), 1 << 20).unwrap();
    map.store(at(0), &[4; 100]).unwrap();
    file.truncate(at(11 * BLOCK)).unwrap();
    assert_eq!(map.fault_for_write(at(10 * BLOCK)), Err(Failure::NoSpace));
}

/// What had no space as a whole was refused whole.
#[test]
fn direct_write_without_space_for_all_is_short_then_refused() {
    let fs = MemoryFs::with_capacity(10);
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    let bytes: Vec<u8> = (1..=20).flat_map(|block| [block; 4096]).collect();
    assert_eq!(file.write(at(0), &[9; 100]), Ok(100));
    assert_eq!(file.direct_write(at(BLOCK), &bytes), Ok(9 * 4096));
    assert_eq!(file.size(), at(10 * BLOCK));
    assert_eq!(file.direct_write(at(10 * BLOCK), &bytes[9 * 4096..]), Err(Failure::NoSpace));
    assert_eq!(file.size(), at(10 * BLOCK));
    file.fsync().unwrap();
    let mut expected = [[9; 100].as_slice(), &[0; 3996]].concat();
    expected.extend_from_slice(&bytes[..9 * 4096]);
    assert!(contents(&file) == expected);
    assert!(fs.stored(space.inode(), 10 * BLOCK) == expected);
    assert_eq!((fs.reserved_blocks(), MemoryFs::stored_size(space.inode())), (0, 10 * BLOCK));
    // In the file the size stays, and so does what was there behind the front.
    file.punch_hole(at(2 * BLOCK), 3 * BLOCK).unwrap();
    assert_eq!(file.direct_write(at(0), &bytes[10 * 4096..]), Ok(3 * 4096));
    assert_eq!(file.size(), at(10 * BLOCK));
    expected[..3 * 4096].copy_from_slice(&bytes[10 * 4096..13 * 4096]);
    expected[3 * 4096..5 * 4096].fill(0);
    assert!(contents(&file) == expected);
}

/// Writeback was refused for the moment, and the data thrown away as if the device had failed.
#[test]
fn writeback_that_cannot_be_at_the_moment_keeps_the_data() {
    let fs = MemoryFs::new();
    let options = CacheOptions { dirty_bytes_max: 8 * BLOCK, ..CacheOptions::default() };
    let cache = PageCache::new(options);
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let file = space.open();
    file.write(at(0), &[1; 4 * 4096]).unwrap();
    file.fsync().unwrap();
    fs.is_held.store(true, Ordering::Relaxed);
    // More than may be dirty: who writes is not kept from it for ever.
    for block in 0..32 {
        file.write(at(block * 2 * BLOCK), &[2; 4096]).unwrap();
    }
    cache.background_pass(u64::MAX);
    assert_eq!(cache.shrink_dirty(u64::MAX), 0);
    assert_eq!(file.fsync(), Err(Failure::NotNow));
    assert_eq!(file.direct_read(at(0), &mut [0; 4096]), Err(Failure::NotNow));
    assert_eq!(file.direct_write(at(0), &[3; 4096]), Err(Failure::NotNow));
    assert_eq!(space.change_flushed(FileRange::from(at(0)), || Ok(())), Err(Failure::NotNow));
    assert_eq!(cache.dirty_bytes(), 32 * BLOCK);
    let mut expected = vec![0; 63 * 4096];
    expected[..4 * 4096].fill(1);
    for block in 0..32 {
        expected[block * 2 * 4096..][..4096].fill(2);
    }
    assert!(contents(&file) == expected);
    fs.is_held.store(false, Ordering::Relaxed);
    // Nothing was lost, so nobody is told that something was.
    assert_eq!(file.fsync(), Ok(()));
    assert_eq!((cache.dirty_bytes(), fs.reserved_blocks()), (0, 0));
    assert!(fs.stored(space.inode(), 63 * BLOCK) == expected);
}

/// On a full filesystem a file could not be cut off within a block that lay on the medium, though blocks that were to go had space.
#[test]
fn truncation_without_space_for_its_last_block_takes_that_of_one_that_goes() {
    let fs = MemoryFs::with_capacity(3);
    let file = new_file(&fs, CacheOptions::default()).open();
    file.write(at(0), &[1; 4096]).unwrap();
    file.fsync().unwrap();
    file.write(at(4096), &[2; 2 * 4096]).unwrap();
    assert_eq!(file.write(at(3 * 4096), &[3; 4096]), Err(Failure::NoSpace));
    file.truncate(at(100)).unwrap();
    file.fsync().unwrap();
    assert_eq!(contents(&file), vec![1; 100]);
    assert_eq!(fs.reserved_blocks(), 0);
}

/// A cut that failed made the medium end again where memory does, although the block in which the file had ended there could not be
/// written: its zeros were lost with the next failure, and what an earlier cut had taken off was a part of the file again (seed 32 of
/// `random_operations_same_as_arrays`, of the filesystem in memory: the engine brings that block first by itself).
#[test]
fn cut_that_fails_brings_nothing_back_that_was_cut_off_before() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    space.inode().note_space(&space);
    let file = space.open();
    file.write(at(0), &[1; 8 * 4096]).unwrap();
    file.fsync().unwrap();
    fs.writes_left.store(0, Ordering::Relaxed);
    file.truncate(at(2 * BLOCK + 500)).unwrap();
    file.write(at(6 * BLOCK), &[2; 4096]).unwrap();
    assert_eq!(file.truncate(at(4 * BLOCK + 500)), Err(Failure::Io));
    assert_eq!(file.fsync(), Err(Failure::Io));
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    let mut expected = vec![1; 2 * 4096 + 500];
    expected.resize(7 * 4096, 0);
    assert!(contents(&file) == expected);
    file.fsync().unwrap();
    assert!(fs.stored(space.inode(), 7 * BLOCK) == expected);
}
