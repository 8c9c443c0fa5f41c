//! Zeroing that knows the page cache.

use std::sync::atomic::{AtomicU64, Ordering};

use ubtrfs_iomap::{BATCH_RUNS_MAX, CacheAblation, CacheOptions, FileOffset, FileRange, Reach};

use super::counts::{Count, Running, asked, count};
use super::model::index;
use super::random::random_by_number;
use super::{DataFile, Done, Harness, Look, contents, judge_files};
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
        judge_files(&mut harness, &[inode]);
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
    judge_files(&mut harness, &[inode]);
}

/// What a file was cut off lies behind its end on the medium, where a crash kept the zeros in memory from getting there. When the file
/// grew over it and the filesystem crashed once more, it came back as a part of the file.
///
/// # Panics
/// If it is not so.
pub fn bytes_cut_off_before_a_crash_stay_away_when_the_file_grows<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    for is_dirty in [false, true] {
        let mut harness = make(CacheOptions::default());
        let inode = harness.create();
        let file = harness.open(&inode);
        file.write(at(0), &[7; 8192]).unwrap();
        file.fsync().unwrap();
        file.truncate(at(5000)).unwrap();
        harness.commit();
        drop(file);
        if harness.crash() == Done::NotSupported {
            return;
        }
        let file = harness.open(&inode);
        assert!(contents(&file) == [7; 5000]);
        if is_dirty {
            file.write(at(4096), &[7; 10]).unwrap();
        }
        file.truncate(at(20_000)).unwrap();
        harness.commit();
        let shown = contents(&file);
        drop(file);
        harness.crash();
        let found = contents(&harness.open(&inode));
        for bytes in [shown, found] {
            assert!(bytes[..4096] == [7; 4096], "the block was written to: {is_dirty}");
            assert!(bytes[5000..].iter().all(|byte| *byte == 0), "{} bytes", bytes.len());
        }
        judge_files(&mut harness, &[inode]);
    }
}

/// A file that ends further on by writeback of what lies behind, or by a hole over what would have said where it ends: what it was cut off
/// before, in a block that is dirty still, does not come back with a crash.
///
/// # Panics
/// If it does.
pub fn bytes_cut_off_stay_away_when_blocks_behind_come_first<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    for punches in [false, true] {
        let mut harness = make(CacheOptions::default());
        let block = harness.block_bytes();
        let inode = harness.create();
        let file = harness.open(&inode);
        let bytes = vec![7; usize::try_from(block).expect("a block fits into memory")];
        file.write(at(0), &bytes).unwrap();
        file.fsync().unwrap();
        file.truncate(at(1000)).unwrap();
        file.write(at(4 * block), &bytes).unwrap();
        if punches {
            file.punch_hole(at(4 * block), block).unwrap();
        } else {
            file.flush(range(4 * block, 5 * block)).unwrap();
        }
        harness.commit();
        drop(file);
        if harness.crash() == Done::NotSupported {
            return;
        }
        let found = contents(&harness.open(&inode));
        assert!(found[..1000].iter().all(|byte| *byte == 7));
        let behind = &found[1000..bytes.len().min(found.len())];
        assert!(behind.iter().all(|byte| *byte == 0), "by a hole: {punches}");
        judge_files(&mut harness, &[inode]);
    }
}

/// A block that is on its way as the file is cut within it comes to the medium as it was, without anything that says so, where nobody waits
/// for it: its zeros are in memory only. The file grew again, over it or into another block, and with the next commit and a crash what
/// was cut off was back.
///
/// # Panics
/// If it is.
pub fn bytes_cut_off_on_their_way_stay_away_when_the_file_grows<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    const ROUNDS: u64 = 12;
    const LEN: u64 = 1 << 20;
    let _running = Running::new();
    let mut harness = make(CacheOptions::default());
    let mut met = 0;
    harness.yield_in_data_writes(true);
    for round in 0..ROUNDS {
        let inode = harness.create();
        let file = harness.open(&inode);
        // That of a write in several parts: all of them are on their way.
        file.write(at(0), &vec![7; index(LEN)]).unwrap();
        let last = range(LEN - 4096, LEN);
        let cut = LEN - 4000;
        let is_over = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let other = harness.open(&inode);
                other.flush(FileRange::from(FileOffset::ZERO)).unwrap();
                is_over.store(1, Ordering::SeqCst);
            });
            wait_until(|| file.is_on_its_way(last) || is_over.load(Ordering::SeqCst) > 0);
            met += u64::from(file.is_on_its_way(last));
            file.truncate(at(cut)).unwrap();
            match round % 4 {
                0 => file.truncate(at(LEN - 1000)).unwrap(),
                1 => file.truncate(at(LEN + 5000)).unwrap(),
                2 => assert_eq!(file.append(&[8; 1000]).unwrap(), (at(cut), 1000)),
                _ => {
                    file.append(&[8; 100_000]).unwrap();
                    file.flush(range(LEN, LEN + 100_000)).unwrap();
                }
            }
        });
        let shown = contents(&file);
        assert!(shown[index(cut)..].iter().all(|byte| *byte != 7), "round {round}, in memory");
        harness.commit();
        drop(file);
        if harness.crash() == Done::NotSupported {
            return;
        }
        let found = contents(&harness.open(&inode));
        let stale = (found.len().min(index(cut))..found.len()).find(|at| found[*at] == 7);
        assert!(stale.is_none(), "round {round}: stale at {stale:?}, cut at {cut}");
    }
    assert!(met > 0 || !H::IS_IMAGE, "the block was never on its way");
}

/// Turns that a round of the race waits at most between the beginning of a writeback and its truncation, as a power of two: mostly
/// few, as the first moments of a writeback are among them on any machine.
const RACE_TURNS_POWER: u64 = 14;
/// Of so many rounds some must have met writeback half way.
const LONG_RACE_ROUNDS: u64 = 50_000;

/// Turns after which who waits for another thread lets others run.
const SPIN_TURNS: u64 = 10_000;

fn wait_until(is_so: impl Fn() -> bool) {
    let mut turns = 0;
    while !is_so() {
        turns += 1;
        if turns > SPIN_TURNS {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Whoever waits for a thread that has ended, well or not, waits no longer.
struct Released<'a>([&'a AtomicU64; 2]);

impl Drop for Released<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|turn| turn.store(u64::MAX, Ordering::SeqCst));
    }
}

fn check_race(bytes: &[u8], what: &str) {
    assert_eq!(bytes.len(), 6000, "{what}");
    assert!(bytes[..2048].iter().all(|byte| *byte == 1), "lost, {what}");
    assert!(bytes[2048..].iter().all(|byte| *byte == 0), "stale, {what}");
}

/// The race as it was found: fallocate 32 KiB, write 4 KiB, truncate to 2 KiB, against writeback and reclaim, which begin in each round
/// some moment before the truncation. The number of rounds is [`Harness::RACE_ROUNDS`], or UBTRFS_RACE_ROUNDS. In half of them writeback
/// must have written something, and in a quarter (in memory: in one of a thousand, where there are many) it must have begun with the block, and not ended, when that
/// was about to be zeroed: else the two did not meet. Every other round waits for just that; and every other reads what is on the medium,
/// too, as memory may be right where that is not.
///
/// # Panics
/// If a byte is stale or lost, or nothing raced.
pub fn truncate_against_flush_and_reclaim_leaves_no_stale_bytes<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    const END: u64 = u64::MAX;
    let _running = Running::new();
    let rounds = asked("UBTRFS_RACE_ROUNDS").unwrap_or(H::RACE_ROUNDS);
    let mut harness = make(CacheOptions::default());
    let inode = harness.create();
    // The round that is to be written back, the one that is, and the one that was.
    let [wanted, begun, ended] = [0; 3].map(AtomicU64::new);
    let (mut flushed, mut met) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = harness.open(&inode);
            let _released = Released([&begun, &ended]);
            let mut done = 0;
            while done != END {
                wait_until(|| wanted.load(Ordering::SeqCst) != done);
                let round = wanted.load(Ordering::SeqCst);
                begun.store(round, Ordering::SeqCst);
                file.flush(FileRange::from(FileOffset::ZERO)).unwrap();
                harness.reclaim();
                ended.store(round, Ordering::SeqCst);
                done = round;
            }
        });
        let file = harness.open(&inode);
        let block = range(0, 4096);
        let mut random = random_by_number(rounds);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 1..=rounds {
                let reach = if round.is_multiple_of(3) { Reach::Extends } else { Reach::Stays };
                file.allocate(at(0), 32768, reach).unwrap();
                file.write(at(0), &[1; 4096]).unwrap();
                let written_bytes = file.written_back_bytes();
                let waits = random.chance(1, 2);
                harness.yield_in_data_writes(waits);
                wanted.store(round, Ordering::SeqCst);
                wait_until(|| begun.load(Ordering::SeqCst) >= round);
                if waits {
                    let is_over = || ended.load(Ordering::SeqCst) >= round;
                    wait_until(|| file.is_on_its_way(block) || is_over());
                } else {
                    let power = random.below(RACE_TURNS_POWER);
                    for _ in 0..random.below(1 << power) {
                        std::hint::spin_loop();
                    }
                }
                met += u64::from(file.is_on_its_way(block));
                file.truncate(at(2048)).unwrap();
                file.truncate(at(6000)).unwrap();
                check_race(&contents(&file), &format!("round {round}"));
                if random.chance(1, 2) {
                    // What memory had as it should be is not believed: the medium is asked, when nothing is dirty.
                    wait_until(|| ended.load(Ordering::SeqCst) >= round);
                    file.flush(FileRange::from(FileOffset::ZERO)).unwrap();
                    harness.reclaim();
                    assert_eq!(file.cached_bytes(), 0, "round {round}");
                    check_race(&contents(&file), &format!("round {round}, read again"));
                }
                flushed += u64::from(file.written_back_bytes() > written_bytes);
                if round < rounds {
                    file.truncate(at(0)).unwrap();
                }
            }
        }));
        wanted.store(END, Ordering::SeqCst);
        result.unwrap();
    });
    println!(
        "{rounds} rounds, in {flushed} of them writeback, in {met} not done before the truncation"
    );
    count(Count::RaceRounds, rounds);
    count(Count::RaceFlushes, flushed);
    count(Count::RacesMet, met);
    assert!(flushed >= rounds / 2, "writeback in {flushed} of {rounds} rounds");
    // Of few rounds, beside other tests on few processors, there may be none in memory, where writeback takes no time.
    let least = match (H::IS_IMAGE, rounds >= LONG_RACE_ROUNDS) {
        (true, _) => rounds / 4,
        (false, true) => rounds / 1000,
        (false, false) => 0,
    };
    assert!(met >= least, "writeback was under way in {met} of {rounds} rounds");
    judge_files(&mut harness, &[inode]);
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
        judge_files(&mut harness, &[inode]);
    }
}

/// More dirty runs than a batch holds, over unwritten space and holes: the mapping is trimmed to the batch, and the next one begins
/// there. Nothing is written back for it.
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
                file.flush(range(run * 2 * block, (run * 2 + 1) * block)).unwrap();
            }
        }
        let written_bytes = file.written_back_bytes();
        file.zero_range(at(100), runs * 2 * block).unwrap();
        assert_eq!(file.written_back_bytes(), written_bytes, "it wrote back what it was to zero");
        let bytes = contents(&file);
        assert!(bytes[..100].iter().all(|byte| *byte == 9));
        assert!(bytes[100..].iter().all(|byte| *byte == 0));
        file.fsync().unwrap();
        drop(file);
        harness.reopen();
        assert!(contents(&harness.open(&inode)) == bytes);
        judge_files(&mut harness, &[inode]);
    }
}

/// A terabyte of hole stays one.
///
/// # Panics
/// If it is not so.
pub fn zero_range_over_hole_makes_no_data<H: Harness>(make: impl Fn(CacheOptions) -> H) {
    let mut harness = make(CacheOptions::default());
    let inode = harness.create();
    let file = harness.open(&inode);
    file.truncate(at(1 << 40)).unwrap();
    file.zero_range(at(10), 1 << 39).unwrap();
    file.fsync().unwrap();
    assert!(file.seek_data(at(0)).is_err());
    // Too long to be read as a whole.
    drop(file);
    harness.reopen();
    harness.judge(&[], Look::Full);
}
