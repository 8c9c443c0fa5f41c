//! A small budget holds by itself, whatever else the options say and whatever is read and written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::{BLOCK, MemoryFs, at, new_file};
use ubtrfs_iomap::{AddressSpace, CacheOptions, FileRange, PageCache};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const BUDGET: u64 = 512 * KIB;

/// What one call has beyond the budget at most: its own step.
const STEP: u64 = BUDGET / 4;

/// A cache that was told its budget and nothing else, and the most that was ever in it when the filesystem was called.
fn small_cache(fs: &Arc<MemoryFs>, keeps_clean: bool) -> (Arc<PageCache>, Arc<AtomicU64>) {
    // Reads straight into the reader's buffer would need no memory.
    let cache = PageCache::new(CacheOptions {
        cached_bytes_max: BUDGET,
        straight_bytes_min: u64::MAX,
        straight_write_bytes_min: u64::MAX,
        keeps_clean,
        ..CacheOptions::default()
    });
    let most = Arc::new(AtomicU64::new(0));
    let note = {
        let (cache, most) = (Arc::clone(&cache), Arc::clone(&most));
        move || _ = most.fetch_max(cache.cached_bytes(), Ordering::Relaxed)
    };
    fs.after_map(note.clone());
    fs.before_mapping(note);
    (cache, most)
}

/// One read took what it read into memory in one piece of 4 MiB, whatever the budget, and nothing made that less afterwards.
#[test]
fn one_long_read_or_write_stays_within_a_small_budget() {
    for keeps_clean in [true, false] {
        let fs = MemoryFs::new();
        let (cache, most) = small_cache(&fs, keeps_clean);
        let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
        let file = space.open();
        let look = || {
            let most = most.fetch_max(cache.cached_bytes(), Ordering::Relaxed);
            most.max(cache.cached_bytes())
        };
        let bytes: Vec<u8> = (0..8 * MIB).map(|place| (place / 1000 % 251) as u8).collect();
        assert_eq!(file.write(at(0), &bytes), Ok(bytes.len()));
        assert!(look() <= BUDGET, "{} bytes while 8 MiB are written", look());
        file.fsync().unwrap();
        let mut buffer = vec![0; 4 << 20];
        assert_eq!(file.read(at(0), &mut buffer), Ok(4 << 20));
        assert!(buffer == bytes[..4 << 20]);
        assert!(look() <= BUDGET, "{} bytes after a read of 4 MiB", look());
        // What is read ahead is of the budget, too.
        let file = space.open();
        for place in (0..8 * MIB).step_by(64 << 10) {
            file.read(at(place), &mut buffer[..64 << 10]).unwrap();
        }
        assert!(look() <= BUDGET, "{} bytes while all is read", look());
    }
}

/// Each thread may be beyond the budget by one step of its own, no further, also where several are at one file.
#[test]
fn threads_that_read_and_write_stay_near_a_small_budget() {
    const THREADS: u64 = 4;
    let fs = MemoryFs::new();
    let (cache, most) = small_cache(&fs, true);
    let new = || AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let (shared, others) = (new(), [new(), new()]);
    shared.open().write(at(0), &vec![1; 4 << 20]).unwrap();
    shared.open().fsync().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (shared, others) = (&shared, &others);
            scope.spawn(move || {
                let mut buffer = vec![3; 1 << 20];
                for round in 0..40 {
                    let place = at((thread + round) * 7 % 12 * 256 * KIB);
                    match thread {
                        0 | 1 => _ = shared.open().read(place, &mut buffer).unwrap(),
                        2 => _ = shared.open().write(place, &buffer).unwrap(),
                        _ => {
                            _ = others[usize::from(round % 2 == 0)]
                                .open()
                                .write(place, &buffer)
                                .unwrap()
                        }
                    }
                }
            });
        }
    });
    let most = most.load(Ordering::Relaxed);
    assert!(most <= BUDGET + THREADS * STEP, "{most} bytes in memory");
    assert!(cache.cached_bytes() <= BUDGET + THREADS * STEP);
    for space in others.iter().chain([&shared]) {
        space.flush(FileRange::from(at(0))).unwrap();
    }
    assert_eq!((cache.dirty_bytes(), fs.reserved_blocks()), (0, 0));
}

/// Options that are a part of the budget are no more than that, and leave one block room.
#[test]
fn options_are_cut_to_the_budget() {
    let cache =
        PageCache::new(CacheOptions { cached_bytes_max: BUDGET, ..CacheOptions::default() });
    assert_eq!(cache.options().readahead_bytes_max, BUDGET / 2);
    assert_eq!(cache.options().writeback_bytes_max, BUDGET / 2);
    let options = CacheOptions { readahead_bytes_max: BLOCK, ..CacheOptions::default() };
    let cache = PageCache::new(options);
    assert_eq!(cache.options().readahead_bytes_max, BLOCK);
    assert_eq!(cache.options().writeback_bytes_max, CacheOptions::default().writeback_bytes_max);
}

/// Memory held the version on its way beside the one that was written meanwhile, and nobody counted it.
#[test]
fn version_on_its_way_counts_as_cached_until_it_has_arrived() {
    const FOLIO: u64 = 16 * BLOCK;
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &vec![1; 2 * 16 * 4096]).unwrap();
    assert_eq!(space.cache().cached_bytes(), 2 * FOLIO);
    let (weak, armed) = (Arc::downgrade(&space), AtomicBool::new(true));
    fs.before_mapping(move || {
        if armed.swap(false, Ordering::Relaxed) {
            let space = weak.upgrade().unwrap();
            let file = space.open();
            file.write(at(100), &[2; 10]).unwrap();
            assert_eq!(space.cache().cached_bytes(), 3 * FOLIO);
            // It is a copy already.
            file.write(at(BLOCK), &[2; 10]).unwrap();
            assert_eq!(space.cache().cached_bytes(), 3 * FOLIO);
            file.write(at(FOLIO), &[2; 4096]).unwrap();
            assert_eq!(space.cache().cached_bytes(), 4 * FOLIO);
        }
    });
    file.fsync().unwrap();
    assert_eq!(space.cache().cached_bytes(), 2 * FOLIO);
    file.fsync().unwrap();
    assert_eq!(space.cache().cached_bytes(), 2 * FOLIO);
    space.cache().shrink_clean(u64::MAX);
    assert_eq!(space.cache().cached_bytes(), 0);
}

/// What several read at once was beyond the budget until they had it, and drove nothing out before.
#[test]
fn what_is_being_read_counts_as_cached() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &vec![1; 8 * 4096]).unwrap();
    file.fsync().unwrap();
    let cache = Arc::clone(space.cache());
    for fails in [false, true] {
        cache.shrink_clean(u64::MAX);
        let seen = Arc::new(AtomicU64::new(0));
        let note = {
            let (cache, seen) = (Arc::clone(&cache), Arc::clone(&seen));
            move || _ = seen.fetch_max(cache.cached_bytes(), Ordering::Relaxed)
        };
        fs.after_map(note);
        if fails {
            fs.reads_left.store(0, Ordering::Relaxed);
        }
        assert_eq!(file.read(at(0), &mut vec![0; 8 * 4096]).is_err(), fails);
        assert_eq!(seen.load(Ordering::Relaxed), 8 * BLOCK);
        assert_eq!(cache.cached_bytes(), if fails { 0 } else { 8 * BLOCK });
    }
}

/// Folios of one block were left all over the slabs, for which what was read behind them had no room: it came from the allocator, and
/// nobody counted what lay between.
#[test]
fn memory_is_bounded_though_what_stays_of_it_lies_scattered() {
    const LIMIT: u64 = 16 * MIB;
    let fs = MemoryFs::new();
    let cache = PageCache::new(CacheOptions {
        cached_bytes_max: LIMIT,
        straight_bytes_min: u64::MAX,
        straight_write_bytes_min: u64::MAX,
        readahead_bytes_max: 0,
        ..CacheOptions::default()
    });
    let new = || AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let (small, long) = (new(), new());
    for space in [&small, &long] {
        let file = space.open();
        let bytes = vec![7; index(LIMIT)];
        file.write(at(0), &bytes).unwrap();
        file.fsync().unwrap();
    }
    let file = small.open();
    let mut buffer = vec![0; 1 << 20];
    // By one block each.
    for block in (0..LIMIT / BLOCK).rev() {
        file.read(at(block * BLOCK), &mut buffer[..1]).unwrap();
    }
    let other = long.open();
    for turn in 0..32 {
        // Each sixteenth of them stays in use.
        for block in (0..LIMIT / BLOCK).step_by(16) {
            file.read(at(block * BLOCK), &mut buffer[..1]).unwrap();
        }
        assert_eq!(other.read(at(turn * MIB / 2), &mut buffer[..512 << 10]), Ok(512 << 10));
        assert!(buffer[..512 << 10].iter().all(|byte| *byte == 7));
        let (cached_bytes, memory_bytes) = (cache.cached_bytes(), cache.memory_bytes());
        assert!(cached_bytes <= LIMIT && memory_bytes <= LIMIT + LIMIT / 8, "{memory_bytes}");
        assert!(memory_bytes >= cached_bytes);
    }
    drop((file, other, small, long));
    assert_eq!(cache.cached_bytes(), 0);
    // What is kept of it where no folio is.
    assert!((1..=2 * MIB).contains(&cache.memory_bytes()), "{}", cache.memory_bytes());
}

fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}
