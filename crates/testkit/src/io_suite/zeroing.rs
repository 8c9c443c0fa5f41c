//! Zeroing that knows the page cache.

use std::sync::atomic::{AtomicBool, Ordering};

use ubtrfs_iomap::{BATCH_RUNS_MAX, CacheAblation, CacheOptions, FileOffset, FileRange, Reach};

use super::{DataFile, Harness, contents};
use crate::iomap_model::{at, range};
use crate::prng::Prng;

/// A mapped store behind the end of the file is in a dirty block over unwritten space. Zeroing on extension that
/// takes unwritten space for zeros makes the bytes a part of the file.
///
/// # Panics
/// If it is not so.
pub fn mapped_store_beyond_end_then_extension_reads_zeros<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    for zero_without_batch in [false, true] {
        let ablation = CacheAblation { zero_without_batch, ..CacheAblation::default() };
        let mut harness = make(CacheOptions { ablation, ..CacheOptions::default() });
        let inode = harness.create();
        let file = harness.open(&inode);
        file.allocate(at(0), 1024, Reach::Extends).unwrap();
        file.write(at(0), &[1; 1024]).unwrap();
        let map = range(0, 4096);
        file.store(map, at(3072), &[2; 1024]).unwrap();
        let mut seen = [0; 1024];
        file.load(map, at(3072), &mut seen).unwrap();
        assert_eq!(seen, [2; 1024]);
        file.write(at(32768), &[3; 4096]).unwrap();
        let mut expected = vec![0; 36864];
        expected[..1024].fill(1);
        expected[32768..].fill(3);
        assert!(contents(&file) == expected);
        file.fsync().unwrap();
        assert!(contents(&file) == expected);
        harness.reclaim();
        assert!(contents(&file) == expected);
        drop(file);
        harness.reopen();
        assert!(contents(&harness.open(&inode)) == expected);
    }
}

/// The same where the block is written back, with its tail zeroed, and stored to again, before the file grows.
///
/// # Panics
/// If it is not so.
pub fn mapped_store_beyond_end_after_writeback_then_extension_reads_zeros<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let mut harness = make(CacheOptions::default());
    let inode = harness.create();
    let file = harness.open(&inode);
    file.write(at(0), &[1; 1000]).unwrap();
    let map = range(0, harness.block_bytes());
    for _ in 0..3 {
        file.store(map, at(1000), &[2; 3096]).unwrap();
        file.fsync().unwrap();
    }
    file.store(map, at(1000), &[2; 3096]).unwrap();
    file.truncate(at(5000)).unwrap();
    let mut expected = vec![0; 5000];
    expected[..1000].fill(1);
    assert!(contents(&file) == expected);
    file.fsync().unwrap();
    drop(file);
    harness.reopen();
    assert!(contents(&harness.open(&inode)) == expected);
}

/// The race as it was found: fallocate 32 KiB, write 4 KiB, truncate to 2 KiB, against writeback and reclaim in a loop. The number
/// of rounds is [`Harness::RACE_ROUNDS`], or UBTRFS_RACE_ROUNDS.
///
/// # Panics
/// If a byte is stale or lost.
pub fn truncate_against_flush_and_reclaim_leaves_no_stale_bytes<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let asked = std::env::var("UBTRFS_RACE_ROUNDS").ok().and_then(|count| count.parse().ok());
    let rounds = asked.unwrap_or(H::RACE_ROUNDS);
    let harness = make(CacheOptions::default());
    let inode = harness.create();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = harness.open(&inode);
            while !stop.load(Ordering::Relaxed) {
                file.flush(FileRange::from(FileOffset::ZERO));
                harness.reclaim();
            }
        });
        let file = harness.open(&inode);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 0..rounds {
                file.allocate(at(0), 32768, Reach::Stays).unwrap();
                file.write(at(0), &[1; 4096]).unwrap();
                file.truncate(at(2048)).unwrap();
                file.truncate(at(6000)).unwrap();
                let bytes = contents(&file);
                assert!(bytes[..2048].iter().all(|byte| *byte == 1), "lost, round {round}");
                assert!(bytes[2048..].iter().all(|byte| *byte == 0), "stale, round {round}");
                file.truncate(at(0)).unwrap();
            }
        }));
        stop.store(true, Ordering::Relaxed);
        result.unwrap();
    });
}

/// Experiment 5 in small: a block is written, and the file cut to one byte less than its end.
///
/// # Panics
/// If it is not so.
pub fn write_and_truncate_by_turns_keeps_all_but_the_cut_bytes<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    const ROUNDS: u64 = 300;
    for zero_without_batch in [false, true] {
        let ablation = CacheAblation { zero_without_batch, ..CacheAblation::default() };
        let mut harness = make(CacheOptions { ablation, ..CacheOptions::default() });
        let block = harness.block_bytes();
        let inode = harness.create();
        let file = harness.open(&inode);
        let bytes = vec![7; usize::try_from(block).expect("a block fits into memory")];
        for round in 0..ROUNDS {
            file.write(at(round * block), &bytes).unwrap();
            file.truncate(at((round + 1) * block - 1)).unwrap();
        }
        let mut expected = vec![7; usize::try_from(ROUNDS * block - 1).expect("fits")];
        let cut = bytes.len();
        expected.iter_mut().skip(cut - 1).step_by(cut).for_each(|byte| *byte = 0);
        assert!(contents(&file) == expected);
        file.fsync().unwrap();
        drop(file);
        harness.reopen();
        assert!(contents(&harness.open(&inode)) == expected);
    }
}

/// More dirty runs than a batch holds, over unwritten space and holes: the mapping is trimmed to the batch, and the next one begins
/// there.
///
/// # Panics
/// If it is not so.
pub fn zero_range_over_more_dirty_runs_than_a_batch_holds_zeroes_all<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let mut random = Prng::of_test(5);
    for is_flushed in [false, true] {
        let mut harness = make(CacheOptions::default());
        let block = harness.block_bytes();
        let inode = harness.create();
        let file = harness.open(&inode);
        let runs = u64::try_from(BATCH_RUNS_MAX).expect("few") * 3 + 5;
        file.allocate(at(0), runs * block, Reach::Stays).unwrap();
        let bytes = vec![9; usize::try_from(block).expect("a block fits into memory")];
        for run in 0..runs {
            file.write(at(run * 2 * block), &bytes).unwrap();
            if is_flushed && random.chance(1, 4) {
                file.flush(range(run * 2 * block, (run * 2 + 1) * block));
            }
        }
        file.zero_range(at(100), runs * 2 * block).unwrap();
        let bytes = contents(&file);
        assert!(bytes[..100].iter().all(|byte| *byte == 9));
        assert!(bytes[100..].iter().all(|byte| *byte == 0));
        file.fsync().unwrap();
        drop(file);
        harness.reopen();
        assert!(contents(&harness.open(&inode)) == bytes);
    }
}

/// A terabyte of hole stays one.
///
/// # Panics
/// If it is not so.
pub fn zero_range_over_hole_makes_no_data<H: Harness>(make: impl Fn(CacheOptions) -> H) {
    let harness = make(CacheOptions::default());
    let file = harness.open(&harness.create());
    file.truncate(at(1 << 40)).unwrap();
    file.zero_range(at(10), 1 << 39).unwrap();
    file.fsync().unwrap();
    assert!(file.seek_data(at(0)).is_err());
}
