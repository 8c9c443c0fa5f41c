//! What the tests of a process did, so that a long run shows that it was one.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ubtrfs_iomap::CacheOptions;

use super::Harness;
use super::concurrency::COUNTING_THREADS;
use super::random::first_seed;

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Count {
    /// Operations on files in random runs.
    Operations,
    /// Crashes, after each of which every block was compared with what it had been.
    Crashes,
    /// Blocks that a device had not made durable when its power went, and lost.
    BlocksLost,
    /// Writes of data that a device failed.
    FailuresInjected,
    /// Failures that a caller was told.
    FailuresTold,
    /// Files that the kernel read of our images.
    KernelViews,
    /// States after a crash that the kernel opened, as the engine did.
    KernelReplays,
    /// Checks of images by our checker.
    Checks,
    /// Rounds of the stale-data race.
    RaceRounds,
    /// Those in which writeback wrote.
    RaceFlushes,
    /// Those in which the block was on its way to the medium when the file was cut.
    RacesMet,
    /// Rounds of each thread of the tests that have several.
    ConcurrentRounds,
}

const KINDS: [Count; 12] = [
    Count::Operations,
    Count::Crashes,
    Count::BlocksLost,
    Count::FailuresInjected,
    Count::FailuresTold,
    Count::KernelViews,
    Count::KernelReplays,
    Count::Checks,
    Count::RaceRounds,
    Count::RaceFlushes,
    Count::RacesMet,
    Count::ConcurrentRounds,
];

static COUNTS: [AtomicU64; KINDS.len()] = [const { AtomicU64::new(0) }; KINDS.len()];
static RUNNING: AtomicU64 = AtomicU64::new(0);

/// A test that counts runs as long as this lives.
#[derive(Debug)]
pub struct Running(());

impl Running {
    /// From now on.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "it counts")]
    pub fn new() -> Self {
        RUNNING.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// So many more were done.
pub fn count(kind: Count, more: u64) {
    COUNTS[kind as usize].fetch_add(more, Ordering::SeqCst);
}

/// How many were done.
pub fn counted(kind: Count) -> u64 {
    COUNTS[kind as usize].load(Ordering::SeqCst)
}

/// A number that the environment asks for.
pub(super) fn asked(variable: &str) -> Option<u64> {
    match std::env::var(variable) {
        Ok(text) => {
            Some(text.parse().unwrap_or_else(|_| panic!("{variable} is no number: {text:?}")))
        }
        Err(std::env::VarError::NotPresent) => None,
        Err(error) => panic!("{variable}: {error}"),
    }
}

/// Of the states of all tests that are judged, so many are to go to those who take long, beside those that must:
/// UBTRFS_IOMAP_JUDGED_ONE_IN.
///
/// # Panics
/// If what the environment asks for is no number above 0.
#[must_use]
pub fn judged_one_in() -> u64 {
    asked_above_0("UBTRFS_IOMAP_JUDGED_ONE_IN").unwrap_or(16)
}

/// Of the crashes of all tests so many are also to be opened, their logs replayed, by the kernel: UBTRFS_IOMAP_REPLAYED_ONE_IN.
///
/// # Panics
/// If what the environment asks for is no number above 0.
#[must_use]
pub fn replayed_one_in() -> u64 {
    asked_above_0("UBTRFS_IOMAP_REPLAYED_ONE_IN").unwrap_or(400)
}

fn asked_above_0(variable: &str) -> Option<u64> {
    let asked = asked(variable);
    assert!(asked != Some(0), "{variable} is 0");
    asked
}

/// Says what all tests of this process did, once they are done, and fails where UBTRFS_IOMAP_OPERATIONS_MIN asks for more. Tests
/// are begun in the order of their names, so this one's comes last.
///
/// # Panics
/// If less was done than was asked for.
pub fn zz_counts_of_all_tests_are_what_was_asked_for<H: Harness>(_: impl Fn(CacheOptions) -> H) {
    // Those begun at the same moment count themselves first.
    std::thread::sleep(Duration::from_secs(1));
    while RUNNING.load(Ordering::SeqCst) > 0 {
        std::thread::sleep(Duration::from_millis(100));
    }
    let said: Vec<String> =
        KINDS.iter().map(|kind| format!("{kind:?} {}", counted(*kind))).collect();
    // Not by println, whose text is kept back when a test passes.
    let (first, said) = (first_seed(), said.join(", "));
    let _ = writeln!(std::io::stderr(), "COUNTS, of random runs from seed {first} on: {said}");
    let Some(min) = asked("UBTRFS_IOMAP_OPERATIONS_MIN") else { return };
    // About half of what chance makes of so many steps.
    let mut least = vec![
        (Count::Operations, min),
        (Count::Crashes, min / 120),
        (Count::FailuresInjected, min / 100),
        (Count::FailuresTold, min / 100),
        (Count::RaceFlushes, counted(Count::RaceRounds) / 2),
        (Count::RacesMet, counted(Count::RaceRounds) / 1000),
    ];
    if let Some(rounds) = asked("UBTRFS_IOMAP_CONCURRENT_ROUNDS") {
        least.push((Count::ConcurrentRounds, rounds * COUNTING_THREADS));
    }
    if let Some(rounds) = asked("UBTRFS_RACE_ROUNDS") {
        least.push((Count::RaceRounds, rounds * H::RACES));
    }
    if H::IS_IMAGE {
        least.push((Count::Checks, min / 60));
        // Of each run its end is judged; where all is, each reopening, but for three of four that a failing device forced.
        least.push((Count::KernelViews, min / if judged_one_in() == 1 { 24 } else { 1000 }));
        least.push((Count::BlocksLost, min / 120));
        least.push((Count::KernelReplays, min / 120 / replayed_one_in()));
    }
    for (kind, least) in least {
        let done = counted(kind);
        assert!(done >= least, "{kind:?}: {done}, but {least} were asked for");
    }
}
