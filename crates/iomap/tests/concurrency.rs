//! Threads at the same files, with writeback, reclaim and relocation between them.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{BLOCK, MemoryFs, Random, at, contents, new_file, range};
use ubtrfs_iomap::{AddressSpace, CacheOptions, FiemapSync, FileRange, OpenFile, PageCache};

fn little_memory() -> CacheOptions {
    CacheOptions {
        cached_bytes_max: 16 * BLOCK,
        dirty_bytes_max: 8 * BLOCK,
        dirty_bytes_background: 4 * BLOCK,
        folio_bytes_max: 4 * BLOCK,
        writeback_bytes_max: 4 * BLOCK,
        ..CacheOptions::default()
    }
}

/// Runs `work` in threads, and `trouble` in one more until they are done.
fn beside(threads: u64, work: impl Fn(u64) + Sync, trouble: impl Fn(u64) + Sync) {
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (work, done) = (&work, &done);
                scope.spawn(move || {
                    let result =
                        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(thread)));
                    done.fetch_add(1, Ordering::SeqCst);
                    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                })
            })
            .collect();
        let (trouble, done) = (&trouble, &done);
        scope.spawn(move || {
            let mut round = 0;
            while done.load(Ordering::SeqCst) < threads {
                trouble(round);
                round += 1;
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
    });
}

fn disturb(fs: &MemoryFs, space: &AddressSpace<MemoryFs>, cache: &PageCache, round: u64) {
    match round % 3 {
        0 => _ = cache.background_pass(round * 10_000),
        1 => space.flush(FileRange::from(at(0))),
        _ => fs.relocate(space.inode()),
    }
}

/// Each write fills a range with one value, with ends inside of blocks; a read finds one value only.
#[test]
fn reads_and_writes_are_atomic_to_each_other() {
    let fs = MemoryFs::new();
    fs.cut_mappings(3);
    let cache = PageCache::new(little_memory());
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let file = space.open();
    // More than fits into memory, so that each read misses somewhere.
    let (start, len) = (BLOCK / 2, 24 * 4096);
    file.write(at(start), &vec![1; len]).unwrap();
    let work = |thread: u64| {
        // One open file for two threads, and one for each other.
        let own = space.open();
        let file: &OpenFile<MemoryFs> = if thread < 2 { &file } else { &own };
        for round in 0..400 {
            if thread.is_multiple_of(2) {
                let value = u8::try_from((thread * 400 + round) % 255 + 1).unwrap();
                assert_eq!(file.write(at(start), &vec![value; len]), Ok(len));
            } else {
                let mut bytes = vec![0; len];
                assert_eq!(file.read(at(start), &mut bytes), Ok(len));
                assert!(bytes.iter().all(|byte| *byte == bytes[0] && *byte != 0), "torn");
            }
        }
    };
    beside(4, work, |round| disturb(&fs, &space, &cache, round));
    file.fsync().unwrap();
    assert_eq!(fs.reserved_blocks(), 0);
}

#[test]
fn appends_of_threads_are_all_there_and_whole() {
    const RECORD: usize = 1000;
    const RECORDS: usize = 300;
    let fs = MemoryFs::new();
    let cache = PageCache::new(little_memory());
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let work = |thread: u64| {
        let file = space.open();
        for _ in 0..RECORDS {
            let record = vec![u8::try_from(thread + 1).unwrap(); RECORD];
            let (offset, len) = file.append(&record).unwrap();
            assert_eq!(len, RECORD);
            assert_eq!(offset.bytes() % 1000, 0);
        }
    };
    beside(3, work, |round| disturb(&fs, &space, &cache, round));
    let bytes = contents(&space.open());
    assert_eq!(bytes.len(), 3 * RECORDS * RECORD);
    let mut counts = [0; 4];
    for record in bytes.chunks(RECORD) {
        assert!(record.iter().all(|byte| *byte == record[0]), "torn");
        counts[usize::from(record[0])] += 1;
    }
    assert_eq!(counts, [0, RECORDS, RECORDS, RECORDS]);
}

/// A byte is what its offset says, or zero; never what lay there before a truncation, nor garbage from a place
/// given up.
#[test]
fn reads_beside_truncation_and_holes_see_bytes_or_zeros() {
    const SIZE: u64 = 24 * BLOCK;
    let expected =
        |offset: u64, generation: u8| u8::try_from(offset % 100).unwrap() * 2 + 2 - generation % 2;
    let fs = MemoryFs::new();
    fs.cut_mappings(5);
    let cache = PageCache::new(little_memory());
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let work = |thread: u64| {
        let file = space.open();
        let mut random = Random(thread);
        for round in 0..500_u64 {
            if thread == 0 {
                let generation = u8::try_from(round % 2).unwrap();
                let start = random.below(SIZE);
                let end = (start + random.below(8 * BLOCK)).min(SIZE);
                let bytes: Vec<u8> =
                    (start..end).map(|offset| expected(offset, generation)).collect();
                match round % 5 {
                    0 => file.truncate(at(start)).unwrap(),
                    1 => file.punch_hole(at(start), end - start).unwrap(),
                    2 => file.zero_range(at(start), end - start).unwrap(),
                    _ => _ = file.write(at(start), &bytes).unwrap(),
                }
                if round % 7 == 0 {
                    file.truncate(at(SIZE)).unwrap();
                }
            } else {
                let start = random.below(SIZE);
                let mut bytes = vec![0; usize::try_from(random.below(6 * BLOCK)).unwrap()];
                let len = if random.chance(3) {
                    let (start, len) = (start / BLOCK * BLOCK, bytes.len() / 4096 * 4096);
                    let len = file.direct_read(at(start), &mut bytes[..len]).unwrap();
                    check(&bytes[..len], start, expected);
                    0
                } else {
                    file.read(at(start), &mut bytes).unwrap()
                };
                check(&bytes[..len], start, expected);
                if let Ok(data) = file.seek_data(at(start)) {
                    assert!(data >= at(start));
                }
                file.fiemap(range(0, SIZE), 100, FiemapSync::AsIs).unwrap();
            }
        }
    };
    beside(3, work, |round| disturb(&fs, &space, &cache, round));
    let file = space.open();
    let before = contents(&file);
    file.fsync().unwrap();
    assert!(contents(&file) == before);
    let stored = fs.stored(space.inode(), file.size().bytes());
    assert!(stored[..before.len()] == before);
    assert_eq!(fs.reserved_blocks(), 0);
}

fn check(bytes: &[u8], start: u64, expected: impl Fn(u64, u8) -> u8) {
    for (offset, byte) in (start..).zip(bytes) {
        let is_right = [0, expected(offset, 0), expected(offset, 1)].contains(byte);
        assert!(is_right, "{byte} at {offset}");
    }
}

/// Several files in one small cache, each in one thread: the budget is shared, the data is not.
#[test]
fn files_that_share_a_small_cache_keep_their_bytes() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(little_memory());
    let work = |thread: u64| {
        let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
        let file = space.open();
        let mut random = Random(thread);
        let mut model = vec![0; 64 * 4096];
        for _ in 0..600 {
            let start = random.below(60 * BLOCK);
            let len = usize::try_from(random.below(3 * BLOCK)).unwrap();
            let from = usize::try_from(start).unwrap();
            let value = u8::try_from(random.below(256)).unwrap();
            assert_eq!(file.write(at(start), &vec![value; len]), Ok(len));
            model[from..from + len].fill(value);
            let start = usize::try_from(random.below(60 * BLOCK)).unwrap();
            let mut bytes = vec![0; 5000];
            let count = file.read(at(u64::try_from(start).unwrap()), &mut bytes).unwrap();
            assert!(bytes[..count] == model[start..start + count]);
        }
        let bytes = contents(&file);
        assert!(bytes == model[..bytes.len()]);
    };
    let most = AtomicU64::new(0);
    beside(3, work, |round| {
        cache.background_pass(round * 1000);
        most.fetch_max(cache.cached_bytes(), Ordering::Relaxed);
    });
    // Each of three calls may hold what it needs itself beyond the budget.
    let most = most.load(Ordering::Relaxed);
    assert!(most <= 16 * BLOCK + 3 * 16 * BLOCK, "{most} bytes in memory");
}

/// What an fsync promised is stored, whatever other threads do.
#[test]
fn fsync_beside_writers_stores_what_was_written_before() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = space.open();
            let mut value = 0_u8;
            while !stop.load(Ordering::Relaxed) {
                value = value.wrapping_add(1);
                file.write(at(0), &[value; 8192]).unwrap();
            }
        });
        let file = space.open();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 0..300_u64 {
                let value = u8::try_from(round % 256).unwrap();
                file.write(at((round + 2) * BLOCK), &[value; 4096]).unwrap();
                file.fsync().unwrap();
                let stored = fs.stored(space.inode(), (round + 3) * BLOCK);
                assert!(stored[stored.len() - 4096..].iter().all(|byte| *byte == value));
                let first = stored[..8192].iter().all(|byte| *byte == stored[0]);
                assert!(first, "a write was stored in part");
            }
        }));
        stop.store(true, Ordering::Relaxed);
        result.unwrap();
    });
}

/// A block is written again while its older version is on its way. The fsync behind that waits, and then brings the new version
/// down, too.
#[test]
fn fsync_of_a_block_whose_older_version_is_on_its_way_stores_the_new_one() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 4096]).unwrap();
    let is_on_its_way = Arc::new(AtomicBool::new(false));
    let is_written_again = Arc::new(AtomicBool::new(false));
    let (on_its_way, written_again) = (Arc::clone(&is_on_its_way), Arc::clone(&is_written_again));
    fs.before_mapping(move || {
        if !on_its_way.swap(true, Ordering::SeqCst) {
            while !written_again.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            // Long enough for the fsync to get here, most often.
            for _ in 0..1000 {
                std::thread::yield_now();
            }
        }
    });
    std::thread::scope(|scope| {
        scope.spawn(|| space.flush(FileRange::from(at(0))));
        while !is_on_its_way.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        file.write(at(0), &[2; 4096]).unwrap();
        is_written_again.store(true, Ordering::SeqCst);
        file.fsync().unwrap();
        assert!(fs.stored(space.inode(), 4096) == vec![2; 4096]);
    });
}

/// Truncation, too, waits for what is on its way beyond the new end: else the filesystem would map it after it dropped the
/// range.
#[test]
fn truncate_waits_for_what_is_on_its_way() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 8192]).unwrap();
    let (begun, weak) = (Arc::new(AtomicBool::new(false)), Arc::downgrade(&space));
    let has_begun = Arc::clone(&begun);
    fs.before_mapping(move || {
        has_begun.store(true, Ordering::SeqCst);
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        assert_eq!(weak.upgrade().unwrap().size(), at(8192), "cut while a write was on its way");
    });
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| space.flush(FileRange::from(at(0))));
        while !begun.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        file.truncate(at(4096)).unwrap();
        flush.join().unwrap();
    });
    assert_eq!(fs.used_blocks(), 1);
    file.truncate(at(8192)).unwrap();
    assert!(contents(&file)[4096..].iter().all(|byte| *byte == 0));
}
