//! Memory: how much, who gives way, what is read ahead and written back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::{BLOCK, Failure, MemoryFs, at, contents, new_file};
use ubtrfs_iomap::extent_state::{LockMode, StateBits, Want};
use ubtrfs_iomap::{AddressSpace, CacheOptions, FileRange, OpenFile, PageCache};
use ubtrfs_testkit::Prng;

const MIB: u64 = 1 << 20;

#[test]
fn memory_stays_within_the_budget_while_much_is_written_and_read() {
    let fs = MemoryFs::new();
    let options = CacheOptions {
        cached_bytes_max: 2 * MIB,
        dirty_bytes_max: MIB,
        writeback_bytes_max: MIB / 2,
        readahead_bytes_max: MIB / 4,
        ..CacheOptions::default()
    };
    let cache = PageCache::new(options);
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let file = space.open();
    let mut chunk = vec![0; 100_000];
    let mut most = 0;
    for round in 0..300_u64 {
        chunk.fill(u8::try_from(round % 251).unwrap());
        file.write(at(round * 100_000), &chunk).unwrap();
        assert!(cache.dirty_bytes() <= MIB);
        most = most.max(cache.cached_bytes());
    }
    for round in 0..300_u64 {
        assert_eq!(file.read(at(round * 100_000), &mut chunk), Ok(100_000));
        assert!(chunk.iter().all(|byte| u64::from(*byte) == round % 251));
        most = most.max(cache.cached_bytes());
    }
    assert!(most <= 2 * MIB + MIB / 2, "{most} bytes in memory");
    assert!(most >= MIB);
}

/// Writers in threads, at one file and at several, on a slow device: nobody gets far ahead of writeback, also where all that is dirty is
/// being written by somebody else already.
#[test]
fn writers_in_threads_wait_while_too_much_is_dirty() {
    const LIMIT: u64 = 64 * BLOCK;
    for is_one_file in [true, false] {
        let fs = MemoryFs::new();
        let options = CacheOptions {
            dirty_bytes_max: LIMIT,
            writeback_bytes_max: 16 * BLOCK,
            ..CacheOptions::default()
        };
        let cache = PageCache::new(options);
        let new = || AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
        let spaces: Vec<_> = (0..3).map(|_| new()).collect();
        let most = Arc::new(AtomicU64::new(0));
        let (cache_there, most_there) = (Arc::clone(&cache), Arc::clone(&most));
        fs.before_mapping(move || {
            for _ in 0..50 {
                most_there.fetch_max(cache_there.dirty_bytes(), Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let space = &spaces[if is_one_file { 0 } else { thread }];
                scope.spawn(move || {
                    let file = space.open();
                    for round in 0..200 {
                        let block = u64::try_from(thread).unwrap() * 1000 + round * 4;
                        file.write(at(block * BLOCK), &[1; 4 * 4096]).unwrap();
                    }
                });
            }
        });
        // Each writer sees the limit after what it wrote.
        let most = most.load(Ordering::Relaxed);
        assert!((LIMIT / 2..=LIMIT + 3 * 4 * BLOCK).contains(&most), "{most} bytes dirty");
        spaces.iter().for_each(|space| space.flush(FileRange::from(at(0))).unwrap());
        assert_eq!((cache.dirty_bytes(), fs.reserved_blocks()), (0, 0));
    }
}

/// Files that came and went leave nothing behind in the cache, whether or not a pass ever runs.
#[test]
fn files_that_are_closed_are_forgotten() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(CacheOptions::default());
    let mut weak = Vec::new();
    for _ in 0..100 {
        let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
        space.open().write(at(0), &[1; 5000]).unwrap();
        space.open().fsync().unwrap();
        weak.push(Arc::downgrade(&space));
    }
    assert!(weak.iter().all(|space| space.upgrade().is_none()));
    assert_eq!(cache.cached_bytes(), 0);
}

#[test]
fn range_replaced_by_the_filesystem_shows_the_new_bytes() {
    let fs = MemoryFs::new();
    let (from, to) =
        (new_file(&fs, CacheOptions::default()), new_file(&fs, CacheOptions::default()));
    let (source, target) = (from.open(), to.open());
    source.write(at(0), &[1; 8192]).unwrap();
    source.fsync().unwrap();
    target.write(at(0), &[2; 5000]).unwrap();
    to.replace_range(crate::common::range(0, 8192), at(8192), || {
        fs.share(from.inode(), to.inode());
        Ok(())
    })
    .unwrap();
    assert!(contents(&target) == vec![1; 8192]);
    assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (2, 0));
    target.write(at(0), &[3]).unwrap();
    target.fsync().unwrap();
    assert!(contents(&source) == vec![1; 8192]);
}

/// Folios that were used lately stay, others go first.
#[test]
fn reclaim_takes_folios_that_were_not_used_lately() {
    let fs = MemoryFs::new();
    let options = CacheOptions {
        cached_bytes_max: 32 * BLOCK,
        folio_bytes_max: BLOCK,
        readahead_bytes_max: 0,
        ..CacheOptions::default()
    };
    let cache = PageCache::new(options);
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), cache);
    let file = space.open();
    file.write(at(0), &vec![1; 256 * 4096]).unwrap();
    file.fsync().unwrap();
    let read = |block: u64| file.read(at(block * BLOCK), &mut [0; 4096]).unwrap();
    read(0);
    let mut misses = 0;
    for block in 40..240 {
        read(block);
        let before = fs.read_count.load(Ordering::Relaxed);
        read(0);
        misses += fs.read_count.load(Ordering::Relaxed) - before;
    }
    assert!(misses <= 20, "{misses} of 200");
}

/// A file gives memory back by steps, and the steps together are one round: once they came round to what the first of them had passed
/// over, and took it before another file was asked.
#[test]
fn what_was_used_lately_stays_as_long_as_another_file_has_what_was_not() {
    const FOLIO: u64 = 64 * 1024;
    let fs = MemoryFs::new();
    let options =
        CacheOptions { folio_bytes_max: FOLIO, readahead_bytes_max: 0, ..CacheOptions::default() };
    let cache = PageCache::new(options);
    let new_file = || {
        let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
        let file = space.open();
        file.write(at(0), &vec![1; 8 << 20]).unwrap();
        file.fsync().unwrap();
        (space, file)
    };
    let files = [new_file(), new_file()];
    let use_every_other = || {
        for (_, file) in &files {
            for folio in (1..8 * MIB / FOLIO).step_by(2) {
                file.read(at(folio * FOLIO), &mut [0; 4096]).unwrap();
            }
        }
    };
    assert_eq!(cache.shrink_clean(1), FOLIO, "in a second round: both files were used lately");
    use_every_other();
    fs.read_count.store(0, Ordering::Relaxed);
    // Each file has 4 MiB that was not used, or a folio less.
    assert_eq!(cache.shrink_clean(5 * MIB), 5 * MIB);
    use_every_other();
    assert_eq!(fs.read_count.load(Ordering::Relaxed), 0);
}

#[test]
fn sequential_reads_are_read_ahead_and_random_ones_are_not() {
    let fs = MemoryFs::new();
    let space =
        new_file(&fs, CacheOptions { cached_bytes_max: 4 * MIB, ..CacheOptions::default() });
    let file = space.open();
    file.write(at(0), &vec![1; 8 << 20]).unwrap();
    file.fsync().unwrap();
    let reads = || fs.read_count.swap(0, Ordering::Relaxed);
    reads();
    let sequential = space.open();
    for block in 0..1024 {
        sequential.read(at(block * BLOCK), &mut [0; 4096]).unwrap();
    }
    let with_readahead = reads();
    assert!(with_readahead <= 16, "{with_readahead} requests for 1024 blocks in order");
    let every_other = space.open();
    for block in 512..1024 {
        every_other.read(at(block * 2 * BLOCK), &mut [0; 4096]).unwrap();
    }
    let with_gaps = reads();
    assert!(with_gaps <= 16, "{with_gaps} requests for 512 blocks with gaps between");
    let space = new_file(&fs, CacheOptions::default());
    let random_file = space.open();
    random_file.write(at(0), &vec![1; 8 << 20]).unwrap();
    random_file.fsync().unwrap();
    assert_eq!(reads(), 0);
    let other = AddressSpace::new(
        Arc::clone(&fs),
        Arc::clone(space.inode()),
        at(8 * MIB),
        PageCache::new(CacheOptions::default()),
    );
    let (file, mut random) = (other.open(), Prng::new(3));
    for _ in 0..100 {
        file.read(at((random.below(1000) + 1) * 2 * BLOCK), &mut [0; 4096]).unwrap();
    }
    assert!(reads() >= 90);
}

/// Memory of folios that went is used again, and shows nothing of what it held: neither beside what is written, nor where nothing was.
#[test]
fn memory_that_is_used_again_shows_nothing_of_before() {
    const FOLIO: usize = 1 << 16;
    let fs = MemoryFs::new();
    let before = new_file(&fs, CacheOptions::default()).open();
    let cache = before.space().cache();
    // Full folios; behind one a block, which gets a folio that is not filled yet, and in that another block in part.
    let (first, whole, cut) = (0..FOLIO, 0..2 * FOLIO, 0..FOLIO - 100);
    let block = FOLIO..FOLIO + 4096;
    let in_block = FOLIO + 4096 * 2 + 100..FOLIO + 4096 * 2 + 200;
    for written in [vec![whole], vec![first, block, in_block], vec![cut]] {
        // Spare, when they are dropped.
        before.write(at(0), &vec![7; 4 * FOLIO]).unwrap();
        before.fsync().unwrap();
        cache.shrink_clean(u64::MAX);
        assert_eq!(cache.cached_bytes(), 0);
        let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(cache));
        let file = space.open();
        file.truncate(at(2 * FOLIO as u64)).unwrap();
        let mut all = vec![0; 2 * FOLIO];
        for part in &written {
            all[part.clone()].fill(1);
            file.write(at(part.start as u64), &vec![1; part.len()]).unwrap();
        }
        assert!(contents(&file) == all, "{written:?}");
        file.fsync().unwrap();
        assert!(contents(&file) == all, "{written:?}, on the medium");
    }
}

/// A read that fails says so, whether memory takes part or not, and the next one gets the bytes.
#[test]
fn straight_read_that_fails_loses_nothing() {
    let fs = MemoryFs::new();
    let options = CacheOptions { keeps_clean: false, ..CacheOptions::default() };
    let file = new_file(&fs, options).open();
    file.write(at(0), &vec![5; 1 << 20]).unwrap();
    file.fsync().unwrap();
    let mut buffer = vec![0; 1 << 19];
    fs.reads_left.store(0, Ordering::Relaxed);
    assert_eq!(file.read(at(0), &mut buffer), Err(Failure::Io));
    fs.reads_left.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(file.read(at(0), &mut buffer), Ok(1 << 19));
    assert!(buffer.iter().all(|byte| *byte == 5));
}

/// A long sequential write comes down as few large runs, whatever the sizes of the writes.
#[test]
fn writeback_gives_the_filesystem_long_runs() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    for round in 0..1000 {
        file.write(at(round * 10_000), &[1; 10_000]).unwrap();
    }
    file.fsync().unwrap();
    assert_eq!(fs.write_count.load(Ordering::Relaxed), 1);
    assert!(contents(&file) == vec![1; 10_000_000]);
}

/// Short runs come down together, so that they can be placed and written together.
#[test]
fn writeback_gives_the_filesystem_many_short_runs_at_once() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    for block in 0..1000 {
        file.write(at(block * 2 * BLOCK), &[1; 4096]).unwrap();
    }
    file.fsync().unwrap();
    assert_eq!(fs.write_count.load(Ordering::Relaxed), 1000);
    assert_eq!(fs.write_back_count.load(Ordering::Relaxed), 4);
}

#[test]
fn background_pass_writes_what_is_old_and_what_is_too_much() {
    let fs = MemoryFs::new();
    let options = CacheOptions {
        dirty_bytes_background: 10 * BLOCK,
        dirty_age_max_ms: 30_000,
        ..CacheOptions::default()
    };
    let cache = PageCache::new(options);
    let new = || AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let (old, young, large) = (new(), new(), new());
    assert_eq!(cache.background_pass(1000), None);
    old.open().write(at(0), &[1; 4096]).unwrap();
    assert_eq!(cache.background_pass(20_000), Some(31_000));
    young.open().write(at(0), &[1; 4096]).unwrap();
    assert_eq!(cache.background_pass(30_999), Some(31_000));
    assert_eq!(cache.dirty_bytes(), 2 * BLOCK);
    assert_eq!(cache.background_pass(31_000), Some(50_000));
    assert_eq!(cache.dirty_bytes(), BLOCK);
    large.open().write(at(0), &vec![1; 20 * 4096]).unwrap();
    // The oldest first, until no more than the limit is dirty.
    assert_eq!(cache.background_pass(31_001), None);
    assert_eq!(cache.dirty_bytes(), 0);
    old.open().write(at(0), &[2; 4096]).unwrap();
    old.flush(FileRange::from(at(0))).unwrap();
    assert_eq!(cache.dirty_bytes(), 0);
}

/// While a read brings in blocks ahead of what was asked for, one of them is written, written back and reclaimed. What the read
/// brings then is old. With data overwritten in place, mappings do not tell.
#[test]
fn read_ahead_of_a_block_that_is_written_meanwhile_is_void() {
    for is_in_place in [0, 1] {
        let fs = MemoryFs::new();
        fs.is_in_place.store(is_in_place, Ordering::Relaxed);
        let options = CacheOptions {
            cached_bytes_max: 40 * BLOCK,
            folio_bytes_max: BLOCK,
            ..CacheOptions::default()
        };
        let cache = PageCache::new(options);
        let new =
            |size| AddressSpace::new(Arc::clone(&fs), Arc::default(), at(size), Arc::clone(&cache));
        let (space, other) = (new(0), new(256 * BLOCK));
        let file = space.open();
        file.write(at(0), &vec![1; 8 * 4096]).unwrap();
        file.fsync().unwrap();
        let weak = Arc::downgrade(&space);
        // All clean folios of the file go.
        other.open().read(at(0), &mut vec![0; 256 * 4096]).unwrap();
        fs.after_next_read(move || {
            let space = weak.upgrade().unwrap();
            space.open().write(at(3 * BLOCK), &[2; 4096]).unwrap();
            space.flush(FileRange::from(at(0))).unwrap();
            other.open().read(at(0), &mut vec![0; 256 * 4096]).unwrap();
        });
        // Begins at the start of the file, so it counts as sequential.
        let mut bytes = [0; 100];
        let before = fs.bytes_read.load(Ordering::Relaxed);
        space.open().read(at(0), &mut bytes).unwrap();
        assert_eq!(bytes, [1; 100]);
        assert!(
            fs.bytes_read.load(Ordering::Relaxed) - before >= 8 * BLOCK,
            "it reads ahead to the block that is written"
        );
        space.open().read(at(3 * BLOCK), &mut bytes).unwrap();
        assert_eq!(bytes, [2; 100]);
    }
}

/// Balance moves data between the look at the mapping and the read, and the old place is given to others.
#[test]
fn read_of_data_that_moves_meanwhile_reads_it_where_it_went() {
    for straight_bytes_min in [BLOCK, u64::MAX] {
        read_of_data_that_moves(straight_bytes_min);
    }
}

fn read_of_data_that_moves(straight_bytes_min: u64) {
    let fs = MemoryFs::new();
    let options =
        CacheOptions { keeps_clean: false, straight_bytes_min, ..CacheOptions::default() };
    let space = new_file(&fs, options);
    let file = space.open();
    file.write(at(0), &vec![1; 8 * 4096]).unwrap();
    file.fsync().unwrap();
    for is_direct in [false, true] {
        let (armed, weak) = (AtomicBool::new(true), Arc::downgrade(&fs));
        let inode = Arc::clone(space.inode());
        fs.after_map(move || {
            if armed.swap(false, Ordering::Relaxed) {
                weak.upgrade().unwrap().relocate(&inode);
            }
        });
        let mut bytes = vec![0; 8 * 4096];
        if is_direct {
            file.direct_read(at(0), &mut bytes).unwrap();
        } else {
            file.read(at(0), &mut bytes).unwrap();
        }
        assert!(bytes == vec![1; 8 * 4096]);
    }
}

/// A read ahead brings in blocks of a range that is being punched, or written past the cache, after the range was dropped from
/// memory and before the filesystem changed it.
#[test]
fn read_ahead_into_a_range_being_punched_leaves_nothing_stale() {
    for is_punch in [true, false] {
        let fs = MemoryFs::new();
        let options = CacheOptions {
            cached_bytes_max: 40 * BLOCK,
            folio_bytes_max: BLOCK,
            ..CacheOptions::default()
        };
        let cache = PageCache::new(options);
        let new =
            |size| AddressSpace::new(Arc::clone(&fs), Arc::default(), at(size), Arc::clone(&cache));
        let (space, other) = (new(0), new(256 * BLOCK));
        let file = space.open();
        file.write(at(0), &vec![1; 8 * 4096]).unwrap();
        file.fsync().unwrap();
        // All clean folios of the file go, so that the first block must be read.
        other.open().read(at(0), &mut vec![0; 256 * 4096]).unwrap();
        let weak = Arc::downgrade(&space);
        let reader = Arc::clone(&fs);
        fs.before_change(move || {
            // Sequential from the start of the file, so blocks of the range come with it.
            let mut bytes = [0; 100];
            let before = reader.bytes_read.load(Ordering::Relaxed);
            weak.upgrade().unwrap().open().read(at(0), &mut bytes).unwrap();
            assert_eq!(bytes, [1; 100]);
            assert!(
                reader.bytes_read.load(Ordering::Relaxed) - before >= 8 * BLOCK,
                "it reads ahead into the range"
            );
        });
        if is_punch {
            file.punch_hole(at(4 * BLOCK), 4 * BLOCK).unwrap();
        } else {
            file.direct_write(at(4 * BLOCK), &vec![0; 4 * 4096]).unwrap();
        }
        let mut expected = vec![1; 8 * 4096];
        expected[4 * 4096..].fill(0);
        assert!(contents(&file) == expected);
    }
}

/// What a reservation asks for is what is written, of as many files as it takes, and not whole files.
#[test]
fn shrink_dirty_writes_as_much_as_is_asked_for() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(CacheOptions::default());
    let new = || AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let (first, second, third) = (new(), new(), new());
    for space in [&first, &second, &third] {
        let file = space.open();
        for run in 0..10 {
            file.write(at(run * 20 * BLOCK), &vec![1; 10 * 4096]).unwrap();
        }
    }
    assert_eq!(cache.dirty_bytes(), 300 * BLOCK);
    assert_eq!(cache.shrink_dirty(155 * BLOCK), 155 * BLOCK);
    assert_eq!(cache.dirty_bytes(), 145 * BLOCK);
    assert_eq!(fs.used_blocks(), 155);
    let written = |space: &AddressSpace<MemoryFs>| MemoryFs::stored_blocks(space.inode()).len();
    assert_eq!((written(&first), written(&second), written(&third)), (100, 55, 0));
    // A part of a block is a block.
    assert_eq!(cache.shrink_dirty(1), BLOCK);
    assert_eq!(cache.shrink_dirty(0), 0);
    assert_eq!(cache.shrink_dirty(u64::MAX), 144 * BLOCK);
    assert_eq!((cache.dirty_bytes(), fs.reserved_blocks()), (0, 0));
}

/// Over FUSE the kernel keeps what is clean.
#[test]
fn clean_folios_go_at_once_where_somebody_else_keeps_them() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(CacheOptions { keeps_clean: false, ..CacheOptions::default() });
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let file = space.open();
    file.write(at(0), &vec![1; 100_000]).unwrap();
    assert!(cache.cached_bytes() >= 100_000);
    file.fsync().unwrap();
    assert_eq!(cache.cached_bytes(), 0);
    assert!(contents(&file) == vec![1; 100_000]);
    assert_eq!(cache.cached_bytes(), 0);
    // Nothing is read that would be dropped again.
    fs.read_count.store(0, Ordering::Relaxed);
    for block in 0..20 {
        file.read(at(block * BLOCK), &mut [0; 4096]).unwrap();
    }
    assert_eq!(fs.read_count.load(Ordering::Relaxed), 20);
    assert_eq!(
        fs.bytes_read.load(Ordering::Relaxed),
        100_000_u64.next_multiple_of(BLOCK) + 20 * BLOCK
    );
}

/// A file that nobody has open any more, but that is dirty, is still written.
#[test]
fn dirty_file_is_kept_until_it_is_written() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(CacheOptions::default());
    let inode = Arc::default();
    let space = AddressSpace::new(Arc::clone(&fs), Arc::clone(&inode), at(0), Arc::clone(&cache));
    space.open().write(at(0), &[5; 4096]).unwrap();
    drop(space);
    cache.background_pass(u64::MAX);
    assert!(fs.stored(&inode, 4096) == vec![5; 4096]);
    assert_eq!((cache.dirty_bytes(), cache.cached_bytes()), (0, 0));
}

/// A filesystem that is dropped without a sync: what keeps dirty files alive refers to it in a circle.
#[test]
fn dirty_files_that_are_forgotten_are_dropped() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(CacheOptions::default());
    let new = || AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let spaces = [new(), new()];
    spaces.iter().for_each(|space| _ = space.open().write(at(0), &[1; 5000]).unwrap());
    let weak = spaces.each_ref().map(Arc::downgrade);
    drop(spaces);
    assert!(weak.iter().all(|space| space.upgrade().is_some()));
    cache.forget_dirty();
    assert!(weak.iter().all(|space| space.upgrade().is_none()));
    assert_eq!(cache.cached_bytes(), 0);
    let weak = (Arc::downgrade(&cache), Arc::downgrade(&fs));
    drop((cache, fs));
    assert!(weak.0.upgrade().is_none() && weak.1.upgrade().is_none());
}

/// Defragmentation, say: what is dirty in the range is written first, and read from the new place then.
#[test]
fn range_moved_by_the_filesystem_keeps_what_was_dirty() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(CacheOptions::default());
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let file = space.open();
    file.write(at(0), &[1; 8 * 4096]).unwrap();
    file.fsync().unwrap();
    file.write(at(BLOCK + 100), &[2; 5000]).unwrap();
    file.write(at(6 * BLOCK), &[3; 100]).unwrap();
    let before = contents(&file);
    let moved = space.change_flushed(crate::common::range(BLOCK + 7, 3 * BLOCK - 5), || {
        let stored = fs.stored(space.inode(), 3 * BLOCK);
        assert!(stored == before[..3 * 4096]);
        assert!(
            space
                .states()
                .try_lock(crate::common::range(BLOCK, BLOCK + 1), LockMode::Shared)
                .is_none()
        );
        fs.relocate(space.inode());
        Ok(7)
    });
    assert_eq!(moved, Ok(7));
    // What is dirty elsewhere stays so.
    assert_eq!(cache.dirty_bytes(), BLOCK);
    assert!(contents(&file) == before);
    let failed: Result<(), Failure> =
        space.change_flushed(crate::common::range(0, 8 * BLOCK), || Err(Failure::NoSpace));
    assert_eq!(failed, Err(Failure::NoSpace));
    assert!(contents(&file) == before);
    assert_eq!((cache.dirty_bytes(), fs.reserved_blocks()), (0, 0));
}

/// As long as somebody went on writing to a file that had been dirty for long, a pass over what is due did not come to its end.
#[test]
fn background_pass_ends_though_somebody_goes_on_writing() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(CacheOptions { dirty_age_max_ms: 1000, ..CacheOptions::default() });
    let new = || AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let (space, other) = (new(), new());
    space.open().write(at(0), &[1; 4096]).unwrap();
    other.open().write(at(0), &[2; 4096]).unwrap();
    let (busy, next) = (Arc::downgrade(&space), AtomicU64::new(1));
    fs.before_mapping(move || {
        let block = next.fetch_add(1, Ordering::Relaxed);
        assert!(block < 1000, "the pass does not end");
        let file = busy.upgrade().unwrap().open();
        file.write(at(block * 2 * BLOCK), &[3; 4096]).unwrap();
    });
    assert_eq!(cache.background_pass(0), Some(1000));
    // What was written meanwhile has not been dirty for long.
    assert_eq!(cache.background_pass(5000), Some(6000));
    assert!(other.open().fsync().is_ok() && cache.dirty_bytes() >= BLOCK);
    assert!(fs.stored(other.inode(), BLOCK) == [2; 4096]);
    fs.before_mapping(|| {});
    assert_eq!(cache.background_pass(6000), None);
    assert_eq!((cache.dirty_bytes(), fs.reserved_blocks()), (0, 0));
}

/// Each step of a pass began at the beginning of the file: as long as somebody dirtied blocks there over and over, those behind them were not
/// written, however long they had been dirty, and then counted as dirty since that pass. Nor may it be so the other way round, of who appends.
#[test]
fn block_in_the_way_of_others_that_become_dirty_again_and_again_is_written_when_it_is_old() {
    const LOW: u64 = 16 * BLOCK;
    for appends in [false, true] {
        let fs = MemoryFs::new();
        let cache = PageCache::new(CacheOptions {
            dirty_age_max_ms: 1000,
            writeback_bytes_max: 4 * BLOCK,
            ..CacheOptions::default()
        });
        let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
        let file = space.open();
        let old = if appends { 0 } else { 1 << 30 };
        let others = move |file: &OpenFile<MemoryFs>| match appends {
            true => _ = file.append(&[2; 8 * BLOCK as usize]).unwrap(),
            false => _ = file.write(at(0), &[2; LOW as usize]).unwrap(),
        };
        others(&file);
        let busy = Arc::downgrade(&space);
        fs.before_mapping(move || others(&busy.upgrade().unwrap().open()));
        cache.background_pass(0);
        cache.background_pass(2000);
        file.write(at(old), &[1; 4096]).unwrap();
        for now_ms in [4000, 6000] {
            cache.background_pass(now_ms);
        }
        let block = FileRange::with_len(at(old), BLOCK);
        let is_dirty = space.states().test(block, Want::All(StateBits::DELALLOC));
        assert!(!is_dirty, "dirty for four times as long as may be, appends: {appends}");
        fs.before_mapping(|| {});
        file.fsync().unwrap();
        assert_eq!((cache.dirty_bytes(), fs.reserved_blocks()), (0, 0));
    }
}

/// With a clock that began long ago, the first pass of a thread that began late took all that was dirty for old: a file that
/// had been written a moment before was flushed.
#[test]
fn file_dirty_before_first_pass_is_not_old_at_it() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(CacheOptions { dirty_age_max_ms: 1000, ..CacheOptions::default() });
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    space.open().write(at(0), &[1; 4096]).unwrap();
    assert_eq!(cache.background_pass(1_000_000), Some(1_001_000));
    assert_eq!(cache.background_pass(1_000_999), Some(1_001_000));
    assert_eq!(cache.dirty_bytes(), BLOCK);
    assert_eq!(cache.background_pass(1_001_000), None);
    assert_eq!(cache.dirty_bytes(), 0);
}

/// What is read first, to be dirty then, was driven out of memory by what was read behind it, for ever, where the range was longer than
/// memory: the long run of the random operations did not end.
#[test]
fn unsharing_more_than_memory_holds_ends() {
    let fs = MemoryFs::new();
    let options = CacheOptions {
        cached_bytes_max: 4 * BLOCK,
        dirty_bytes_max: 2 * BLOCK,
        dirty_bytes_background: BLOCK,
        folio_bytes_max: BLOCK,
        ..CacheOptions::default()
    };
    let space = new_file(&fs, options);
    let file = space.open();
    let bytes: Vec<u8> = (0..64 * 4096_u32).map(|place| (place / 100 % 251) as u8).collect();
    file.write(at(0), &bytes).unwrap();
    file.fsync().unwrap();
    let copy = new_file(&fs, CacheOptions::default());
    fs.share(space.inode(), copy.inode());
    file.unshare(at(0), 64 * BLOCK).unwrap();
    file.fsync().unwrap();
    assert!(contents(&file) == bytes);
    assert!(fs.stored(space.inode(), 64 * BLOCK) == bytes);
    assert_eq!(fs.reserved_blocks(), 0);
}

#[test]
fn block_that_was_faulted_for_reading_is_loaded_from_memory() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    file.write(at(0), &[1; 3 * 4096]).unwrap();
    file.fsync().unwrap();
    let cache = Arc::clone(file.space().cache());
    cache.shrink_clean(u64::MAX);
    let map = file.map(at(0), 4 * BLOCK).unwrap();
    map.fault_for_read(at(BLOCK + 5)).unwrap();
    map.fault_for_read(at(BLOCK + 6)).unwrap();
    assert_eq!(cache.cached_bytes(), BLOCK);
    fs.reads_left.store(0, Ordering::Relaxed);
    let mut bytes = [0; 4096];
    map.load(at(BLOCK), &mut bytes).unwrap();
    assert_eq!(bytes, [1; 4096]);
    assert_eq!(map.load(at(0), &mut bytes), Err(Failure::Io));
    assert!(map.fault_for_read(at(3 * BLOCK)).is_err(), "beyond the end");
}

/// Whoever appends as fast as the device writes kept a flush, and with it an fsync of another file and each commit, waiting for as long as he went on.
#[test]
fn flush_ends_though_somebody_goes_on_appending() {
    const APPENDS_MAX: u64 = 1000;
    let fs = MemoryFs::new();
    let options = CacheOptions { writeback_bytes_max: BLOCK, ..CacheOptions::default() };
    let space = new_file(&fs, options);
    let file = space.open();
    for block in 0..4 {
        file.write(at(block * BLOCK), &[1; 4096]).unwrap();
    }
    let (weak, appended) = (Arc::downgrade(&space), Arc::new(AtomicU64::new(0)));
    let count = Arc::clone(&appended);
    fs.before_mapping(move || {
        if count.fetch_add(1, Ordering::Relaxed) < APPENDS_MAX
            && let Some(space) = weak.upgrade()
        {
            let end = space.size();
            space.open().write(end, &[2; 4096]).unwrap();
        }
    });
    space.flush(FileRange::from(at(0))).unwrap();
    assert_eq!(appended.load(Ordering::Relaxed), 4, "blocks written by the flush");
    file.fsync().unwrap();
    assert_eq!(appended.load(Ordering::Relaxed), 8);
    fs.before_mapping(|| {});
    file.fsync().unwrap();
    assert_eq!(file.size(), at(12 * BLOCK));
    assert!(contents(&file)[4 * 4096..].iter().all(|byte| *byte == 2));
}
