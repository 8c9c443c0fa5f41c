//! Two calls beside each other, and what must be so then.

use std::sync::Arc;

use super::calls::{Call, Failure};
use super::state::{self, State};
use super::world::{self, Opened, Start, World};
use super::{ToldOfPanic, explore, runs};

pub struct Case {
    start: Start,
    name: String,
    calls: [Call; 2],
    /// What changes nothing.
    beside: Option<Call>,
    /// What may be in the end.
    ends: Vec<State>,
    /// What may be seen before that, and in the end.
    moments: Vec<State>,
}

/// What the device does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Device {
    Works,
    /// A write fails, or all do from one on.
    Fails,
}

/// When what is found was stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stored {
    Now,
    /// Or before, as it was when the case began.
    AtAnyTime,
}

impl Case {
    pub fn new(start: &Start, [one, other]: [(&str, Call); 2], beside: Option<Call>) -> Self {
        let after = |calls: &[Call]| {
            let world = World::open(start);
            calls.iter().for_each(|call| _ = call(&world));
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

    pub fn explore(self, device: Device) {
        let _told = ToldOfPanic(self.name.clone());
        explore(runs(), move || self.run(device));
    }

    fn run(&self, device: Device) {
        let world = Arc::new(World::open(&self.start));
        if device == Device::Fails {
            world.plan_fault();
        }
        let mut threads = Vec::new();
        for call in self.calls.into_iter().chain(self.beside) {
            let world = Arc::clone(&world);
            threads.push(shuttle::thread::spawn(move || call(&world)));
        }
        let seen = State::of_one(&world.fs);
        let results = threads.into_iter().map(|thread| thread.join().unwrap());
        let errors: Vec<_> = results.filter_map(Result::err).collect();
        match device {
            Device::Works => {
                // Of what is written to a file that goes meanwhile there may be a part.
                let is_gone = world.fs.inode(world.one).is_err();
                let may_be = |failure: &Failure| {
                    failure.is_refusal() || is_gone && matches!(failure, Failure::Short)
                };
                assert!(errors.iter().all(may_be), "{}: {errors:?}", self.name);
                self.judge(&world, seen.as_ref());
            }
            Device::Fails => {
                self.judge_failed(&world, errors.iter().any(|failure| !failure.is_refusal()));
            }
        }
    }

    fn judge(&self, world: &World, seen: Option<&Vec<u8>>) {
        let name = &self.name;
        let was = self.moments.iter().any(|moment| moment.one.as_ref() == seen);
        assert!(was, "{name}: {:?} was seen", state::shown(seen));
        let end = State::of(&world.fs);
        self.assert_end(&end, "in the end");
        self.judge_cut(world);
        if world.fsync_one() {
            let cut = Opened::of_image(world.cut_now(), self.start.compression);
            let found = State::of_one(&cut.fs);
            assert!(found == end.one, "{name}: {:?} behind fsync", state::shown(found.as_ref()));
        }
        world.fs.sync().unwrap();
        assert_eq!(State::of(&world.fs), end, "{name}: after it was written back");
        let image = world.cut_now();
        world::check(&image, name);
        let again = Opened::of_image(image, self.start.compression);
        assert_eq!(State::of(&again.fs), end, "{name}: opened again");
    }

    /// A write failed: what is lost of what was written somebody was told, or is told by the sync that is to store it, and nothing else is there.
    fn judge_failed(&self, world: &World, is_told: bool) {
        let is_told = world.fs.sync().is_err() || is_told;
        let again = Opened::of_image(world.image(), self.start.compression);
        let found = State::of(&again.fs);
        if is_told {
            self.judge_part(&found, Stored::AtAnyTime, "behind a failure");
        } else {
            self.assert_end(&found, "though nobody was told of a failure");
        }
        world::check(&again.close(), &self.name);
    }

    fn assert_end(&self, found: &State, what: &str) {
        let is_end = self.ends.iter().any(|end| end.has_same_files(found));
        assert!(is_end, "{}: {found:?} {what}, not {:?}", self.name, self.ends);
        self.judge_part(found, Stored::Now, what);
    }

    /// A power cut at some moment leaves a filesystem that is whole, and of the files what they were.
    fn judge_cut(&self, world: &World) {
        let image = world.cut();
        world::check(&image, &self.name);
        let cut = Opened::of_image(image, self.start.compression);
        self.judge_part(&State::of(&cut.fs), Stored::AtAnyTime, "behind a power cut");
        world::check(&cut.close(), &self.name);
    }

    /// Of a call that nobody waited for there may be a part: each byte is what it was at some moment, or zero where the file did not reach at
    /// some moment. There are the files that there were at some moment.
    fn judge_part(&self, found: &State, stored: Stored, what: &str) {
        // What was in memory only may be lost.
        let before = self.start.stored.iter().filter(|_| stored == Stored::AtAnyTime);
        let moments = || self.moments.iter().chain(before.clone());
        let had = |moment: &State| moment.names() == found.names();
        let name = &self.name;
        assert!(moments().any(had), "{name}: {found:?} {what}");
        for (number, file) in found.all_files() {
            let mut is_so = vec![false; file.len()];
            for (_, was) in
                moments().flat_map(State::all_files).filter(|(other, _)| *other == number)
            {
                let padded = was.iter().chain(std::iter::repeat(&0));
                for ((is_so, byte), was) in is_so.iter_mut().zip(file).zip(padded) {
                    *is_so |= byte == was;
                }
            }
            let is_all = is_so.iter().all(|is_so| *is_so);
            assert!(is_all, "{name}: file {number} {what}: {:?}", state::shown(Some(file)));
        }
    }
}
