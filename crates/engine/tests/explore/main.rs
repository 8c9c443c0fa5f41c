//! Calls of a whole filesystem beside each other, in orders of their threads that an explorer of interleavings chooses: `make explore`.
#![cfg(ubtrfs_explore)]

mod calls;
mod state;
mod world;

use std::sync::{Arc, Mutex};

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};

use self::calls::{BESIDE, CHANGES, Call};
use self::state::State;
use self::world::{Opened, SHAPES, Shape, Start, World};

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

/// Two calls beside each other, and somebody who changes nothing.
struct Case {
    start: Start,
    name: String,
    calls: [Call; 2],
    beside: Option<Call>,
    /// What may be in the end.
    ends: Vec<State>,
    /// What may be seen before that, and in the end.
    moments: Vec<State>,
}

impl Case {
    fn new(start: &Start, [one, other]: [(&str, Call); 2], beside: Option<Call>) -> Self {
        let after = |calls: &[Call]| {
            let world = World::open(start);
            calls.iter().for_each(|call| call(&world));
            State::of(&world.fs)
        };
        let ends = vec![after(&[one.1, other.1]), after(&[other.1, one.1])];
        let before = [after(&[]), after(&[one.1]), after(&[other.1])];
        let moments = before.into_iter().chain(ends.iter().cloned()).collect();
        Self {
            start: start.clone(),
            name: format!("{}: {} and {}", start.name, one.0, other.0),
            calls: [one.1, other.1],
            beside,
            ends,
            moments,
        }
    }

    fn run(&self) {
        let name = &self.name;
        let world = Arc::new(World::open(&self.start));
        let mut threads = Vec::new();
        for call in self.calls.into_iter().chain(self.beside) {
            let world = Arc::clone(&world);
            threads.push(shuttle::thread::spawn(move || call(&world)));
        }
        let seen = State::of_one(&world.fs);
        let was = self.moments.iter().any(|moment| moment.one == seen);
        assert!(was, "{name}: {:?} was seen", state::shown(seen.as_deref()));
        for thread in threads {
            thread.join().unwrap();
        }
        let end = State::of(&world.fs);
        let is_end = self.ends.iter().any(|other| other.has_same_files(&end));
        assert!(is_end, "{name}: {end:?} in the end, not {:?}", self.ends);
        if let Some(files) = &end.snapshot {
            self.judge_part(files.each_ref().map(Option::as_ref), "in the snapshot");
        }
        self.judge_cut(&world);
        if world.fsync_one() {
            let cut = Opened::of_image(world.image(), self.start.compression);
            let found = State::of_one(&cut.fs);
            assert!(found == end.one, "{name}: {:?} behind fsync", state::shown(found.as_deref()));
        }
        world.fs.sync().unwrap();
        assert_eq!(State::of(&world.fs), end, "{name}: after it was written back");
        let image = world.image();
        world::check(&image, name);
        let again = Opened::of_image(image, self.start.compression);
        assert_eq!(State::of(&again.fs), end, "{name}: opened again");
    }

    /// A power cut at some moment leaves a filesystem that is whole, and of the files what they were.
    fn judge_cut(&self, world: &World) {
        let cut = Opened::of_image(world.cut(), self.start.compression);
        let found = State::of(&cut.fs);
        self.judge_part(found.files(), "behind a power cut");
        if let Some(files) = &found.snapshot {
            self.judge_part(
                files.each_ref().map(Option::as_ref),
                "in the snapshot, behind a power cut",
            );
        }
        world::check(&cut.close(), &self.name);
    }

    /// Of a call that nobody waited for there may be a part: each byte is what it was at some moment, or zero.
    fn judge_part(&self, files: [Option<&Vec<u8>>; 2], what: &str) {
        for (number, file) in files.into_iter().enumerate() {
            let Some(file) = file else { continue };
            let mut before = self.moments.iter().flat_map(|moment| {
                let snapshot = moment.snapshot.iter().map(|files| files[number].as_ref());
                snapshot.chain([moment.files()[number]]).flatten()
            });
            let mut is_so: Vec<_> = file.iter().map(|byte| *byte == 0).collect();
            while !is_so.iter().all(|is_so| *is_so) {
                let Some(was) = before.next() else {
                    panic!("{}: file {number} {what}: {:?}", self.name, state::shown(Some(file)));
                };
                for ((is_so, byte), was) in is_so.iter_mut().zip(file).zip(was) {
                    *is_so |= byte == was;
                }
            }
        }
    }

    fn explore(self) {
        let case = Arc::new(self);
        let same = Arc::clone(&case);
        Runner::new(RandomScheduler::new(runs()), config()).run(move || case.run());
        Runner::new(PctScheduler::new(3, runs()), config()).run(move || same.run());
    }
}

/// As many threads take cases as there are processors.
fn explore_each(calls: Vec<[(&'static str, Call); 2]>, beside: Option<Call>) {
    let starts: Vec<Start> = SHAPES.iter().map(Shape::start).collect();
    let cases: Vec<_> =
        starts.iter().flat_map(|start| calls.iter().map(move |calls| (start, *calls))).collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let take = || {
        while let Some((start, calls)) =
            cases.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
        {
            let (start, calls) = ((*start).clone(), *calls);
            made(move || Case::new(&start, calls, beside)).explore();
        }
    };
    std::thread::scope(|scope| {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        (0..count).for_each(|_| _ = scope.spawn(take));
    });
    println!("{} cases", cases.len());
}

/// A file that went was read as zeros by who had it open, when a part of it had been removed.
#[test]
fn change_is_whole_whatever_is_done_beside() {
    let pairs = CHANGES.iter().flat_map(|one| BESIDE.iter().map(move |beside| [*one, *beside]));
    explore_each(pairs.collect(), None);
}

/// Who looked a name up while another file took it over could find that there was none.
#[test]
fn any_two_changes_are_one_after_the_other() {
    let with = |index: usize| CHANGES.iter().skip(index).map(move |other| [CHANGES[index], *other]);
    explore_each((0..CHANGES.len()).flat_map(with).collect(), Some(BESIDE[0].1));
}
