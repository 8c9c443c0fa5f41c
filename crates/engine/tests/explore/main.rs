//! Calls of a whole filesystem beside each other, in orders of their threads that an explorer of interleavings chooses: `make explore`.
#![cfg(ubtrfs_explore)]

mod by_number;
mod calls;
mod case;
mod names;
mod state;
mod world;

use std::sync::{Arc, Mutex};

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};

use self::calls::{BESIDE, CHANGES, Call};
use self::case::{Case, Device};
use self::world::{SHAPES, Shape, Start};

/// Orders of the threads, of each case, chosen in each of two ways. `UBTRFS_EXPLORE_RUNS` asks for more.
fn runs() -> usize {
    let wanted = std::env::var("UBTRFS_EXPLORE_RUNS").ok();
    wanted.map_or(1, |count| count.parse().expect("UBTRFS_EXPLORE_RUNS is a number"))
}

/// The engine's calls reach deeper than the explorer's threads usually can.
fn config() -> Config {
    let mut config = Config::new();
    config.stack_size = 4 << 20;
    config
}

/// What is made there, where locks are those of the explorer.
fn made<T: Send + 'static>(make: impl Fn() -> T + Send + Sync + 'static) -> T {
    let made = Arc::new(Mutex::new(None));
    let put = Arc::clone(&made);
    let run = move || *put.lock().unwrap() = Some(make());
    Runner::new(RandomScheduler::new(1), config()).run(run);
    made.lock().unwrap().take().unwrap()
}

/// Tries so many orders at random, and as many with forced switches.
fn explore(runs: usize, run: impl Fn() + Send + Sync + 'static) {
    let run = Arc::new(run);
    let same = Arc::clone(&run);
    Runner::new(RandomScheduler::new(runs), config()).run(move || run());
    // Its first run has no switch but where a thread waits.
    Runner::new(PctScheduler::new(3, runs + 1), config()).run(move || same());
}

/// As many threads take cases as there are processors.
fn each<T: Copy + Sync>(cases: Vec<T>, explore: impl Fn(T) + Sync) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let take = || {
        while let Some(case) = cases.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            explore(*case);
        }
    };
    std::thread::scope(|scope| {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        (0..count).for_each(|_| _ = scope.spawn(take));
    });
    println!("{} cases", cases.len());
}

/// Threads that wait for each other, or spin, have no name of a case.
struct ToldOfPanic(String);

impl Drop for ToldOfPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("in the case {}", self.0);
        }
    }
}

fn explore_each(calls: Vec<[(&'static str, Call); 2]>, beside: Option<Call>, device: Device) {
    let starts: Vec<Start> = SHAPES.iter().map(Shape::start).collect();
    let cases = starts.iter().flat_map(|start| calls.iter().map(move |calls| (start, *calls)));
    each(cases.collect(), |(start, calls)| {
        let start = start.clone();
        made(move || Case::new(&start, calls, beside)).explore(device);
    });
}

fn any_two_changes() -> Vec<[(&'static str, Call); 2]> {
    let with = |index: usize| CHANGES[index..].iter().map(move |other| [CHANGES[index], *other]);
    (0..CHANGES.len()).flat_map(with).collect()
}

/// A file that went was read as zeros by who had it open, when a part of it had been removed.
#[test]
fn change_is_whole_whatever_is_done_beside() {
    let pairs = CHANGES.iter().flat_map(|one| BESIDE.iter().map(move |beside| [*one, *beside]));
    explore_each(pairs.collect(), None, Device::Works);
}

/// Who looked a name up while another file took it over could find that there was none.
#[test]
fn any_two_changes_are_one_after_the_other() {
    explore_each(any_two_changes(), Some(BESIDE[0].1), Device::Works);
}

#[test]
fn what_is_lost_of_two_changes_is_told() {
    explore_each(any_two_changes(), Some(BESIDE[0].1), Device::Fails);
}
