//! Extent states with nodes of the size that they have outside of unit tests, and with real threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{MemoryFs, at, contents, new_file};
use ubtrfs_iomap::extent_state::{CachedState, CountQuery, ExtentStates, StateBits, Want};
use ubtrfs_iomap::{CacheOptions, FileOffset, FileRange};

const BLOCK: u64 = 4096;
const DELALLOC: Want = Want::All(StateBits::DELALLOC);

fn blocks(start: u64, end: u64) -> FileRange {
    FileRange::new(FileOffset::new(start * BLOCK), FileOffset::new(end * BLOCK))
}

/// A linear congruential sequence (Knuth's MMIX constants), the high bits.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Random sets and clears of long and short ranges over a tree of three levels, beside a map of blocks.
#[test]
fn random_changes_of_a_large_tree_same_as_map_of_blocks() {
    for seed in 0..4 {
        println!("seed {seed}");
        let mut random = Random(seed);
        let states = ExtentStates::new();
        let hint = CachedState::new();
        let mut model: BTreeMap<u64, ()> = BTreeMap::new();
        const UNIVERSE: u64 = 1 << 15;
        for step in 0..40_000_u64 {
            let start = random.below(UNIVERSE);
            let len = if random.below(400) == 0 { random.below(4000) } else { 1 + random.below(2) };
            let end = (start + len).min(UNIVERSE);
            // Grows first, shrinks then.
            let sets = random.below(10) < if step < 25_000 { 8 } else { 3 };
            if sets {
                let before = model.range(start..end).count();
                model.extend((start..end).map(|block| (block, ())));
                let added = (end - start) - u64::try_from(before).unwrap();
                assert_eq!(states.set(blocks(start, end), StateBits::DELALLOC), added * BLOCK);
            } else {
                let gone: Vec<u64> = model.range(start..end).map(|(block, ())| *block).collect();
                gone.iter().for_each(|block| _ = model.remove(block));
                let removed = u64::try_from(gone.len()).unwrap() * BLOCK;
                assert_eq!(states.clear(blocks(start, end), StateBits::DELALLOC), removed);
            }
            let from = random.below(UNIVERSE);
            let query = CountQuery::first_run(blocks(from, UNIVERSE), DELALLOC);
            let found = states.count_range(query, Some(&hint));
            let first = model.range(from..).next().map(|(block, ())| *block);
            assert_eq!(found.map(|found| found.start.bytes()), first.map(|block| block * BLOCK));
            if let (Some(found), Some(first)) = (found, first) {
                let end = found.run().end.bytes() / BLOCK;
                assert!((first..end).all(|block| model.contains_key(&block)));
                assert!(!model.contains_key(&end));
            }
        }
        let mut runs = 0;
        let mut last = None;
        for block in model.keys() {
            runs += usize::from(last != Some(*block));
            last = Some(block + 1);
        }
        assert_eq!(states.record_count(), runs);
    }
}

/// Two threads walk a file with one handle's hint while a third sets and clears ranges that lie between those
/// that both must find.
#[test]
fn walks_that_share_a_hint_while_ranges_change_find_all_that_stays() {
    let states = ExtentStates::new();
    const RANGES: u64 = 3000;
    for range in 0..RANGES {
        states.set(blocks(range * 4, range * 4 + 1), StateBits::DELALLOC);
    }
    let hint = CachedState::new();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changer = scope.spawn(|| {
            let mut random = Random(7);
            while !stop.load(Ordering::Relaxed) {
                let at = random.below(RANGES) * 4 + 2;
                states.set(blocks(at, at + 1), StateBits::DELALLOC | StateBits::DEFRAG);
                let at = random.below(RANGES) * 4 + 2;
                states.clear(blocks(at, at + 1), StateBits::DELALLOC | StateBits::DEFRAG);
            }
        });
        let walkers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..5 {
                        walk(&states, &hint, RANGES);
                    }
                })
            })
            .collect();
        let results: Vec<_> = walkers.into_iter().map(|walker| walker.join()).collect();
        stop.store(true, Ordering::Relaxed);
        changer.join().unwrap();
        results.into_iter().for_each(|result| result.unwrap());
    });
}

fn walk(states: &ExtentStates, hint: &CachedState, ranges: u64) {
    let end = blocks(0, ranges * 4).end;
    let mut at = FileOffset::ZERO;
    let mut stayed = 0;
    while let Some(found) =
        states.count_range(CountQuery::first_run(FileRange::new(at, end), DELALLOC), Some(hint))
    {
        let block = found.start.bytes() / BLOCK;
        assert_eq!(found.len_bytes, BLOCK);
        match block % 4 {
            0 => {
                assert_eq!(block / 4, stayed, "one was passed over");
                stayed += 1;
            }
            2 => {}
            _ => panic!("block {block} never had a state"),
        }
        at = found.run().end;
    }
    assert_eq!(stayed, ranges);
}

/// A run went across the start of a range that an extent must not be merged across, as nobody looked at that.
#[test]
fn writeback_begins_a_run_at_each_boundary() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    let runs = || {
        let calls = fs.write_back_count.swap(0, Ordering::Relaxed);
        (calls, fs.write_count.swap(0, Ordering::Relaxed))
    };
    file.write(at(0), &vec![1; 16 * 4096]).unwrap();
    for block in [0, 3, 4, 9] {
        space.states().set(blocks(block, block + 1), StateBits::BOUNDARY);
    }
    // What touches is one range, with one start.
    file.fsync().unwrap();
    assert_eq!(runs(), (1, 3));
    // Whose boundaries these are clears them; until then they hold.
    file.write(at(2 * BLOCK), &vec![2; 8 * 4096]).unwrap();
    file.fsync().unwrap();
    assert_eq!(runs(), (1, 3));
    space.states().clear(blocks(0, 16), StateBits::BOUNDARY);
    file.write(at(0), &vec![3; 16 * 4096]).unwrap();
    file.fsync().unwrap();
    assert_eq!(runs(), (1, 1));
    assert!(contents(&file) == vec![3; 16 * 4096]);
    assert_eq!(space.states().record_count(), 0);
}

/// Marks of blocks that are dropped said something of what is no more.
#[test]
fn blocks_that_are_dropped_lose_their_marks() {
    let space = new_file(&MemoryFs::new(), CacheOptions::default());
    let file = space.open();
    file.write(at(0), &vec![1; 8 * 4096]).unwrap();
    space.states().set(blocks(1, 2), StateBits::BOUNDARY);
    space.states().set(blocks(3, 6), StateBits::DEFRAG);
    file.truncate(at(4 * BLOCK)).unwrap();
    file.fsync().unwrap();
    let left = [(blocks(1, 2), StateBits::BOUNDARY), (blocks(3, 4), StateBits::DEFRAG)];
    assert_eq!(space.states().records(blocks(0, 16)), left);
    file.punch_hole(at(0), 4 * BLOCK).unwrap();
    assert_eq!(space.states().record_count(), 0);
}
