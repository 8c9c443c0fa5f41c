//! Calls of one file beside each other: each sees all of what another did, or nothing.

use std::sync::{Arc, Mutex};

use shuttle::thread;

use super::file::{
    BLOCK, DIRECT_ENDS_EARLY, DIRECT_REFUSED, Moving, PUNCH_REFUSED, SIZE_REFUSED, Space,
    clone_into, contents, forget, new_file, stored,
};
use super::range;
use crate::address_space::{OpenFile, Reach};
use crate::offset::FileOffset;
use crate::page_cache::{CacheAblation, CacheOptions, CachedFile};

type Call = fn(&OpenFile<Moving>);

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

/// What changes a file of [`SIZE`] bytes, each by bytes of its own.
const CHANGES: [(&str, Call); 23] = [
    ("write inside", |file| _ = file.write(at(100), &[2; 500]).unwrap()),
    ("write over the end", |file| _ = file.write(at(600), &[3; 700]).unwrap()),
    ("write behind the end", |file| _ = file.write(at(1100), &[4; 30]).unwrap()),
    ("append", |file| _ = file.append(&[5; 600]).unwrap()),
    ("write at the end or nothing", |file| _ = file.write_behind(at(SIZE), &[6; 9]).unwrap()),
    ("direct write inside", |file| _ = file.direct_write(at(0), &[7; 512]).unwrap()),
    ("direct write over the end", |file| _ = file.direct_write(at(512), &[8; 1024]).unwrap()),
    ("direct write behind the end", |file| _ = file.direct_write(at(1536), &[9; 512]).unwrap()),
    ("direct write that fails", |file| {
        assert!(file.direct_write(DIRECT_REFUSED.start, &[12; 1024]).is_err());
    }),
    ("direct write that ends early", |file| {
        assert_eq!(file.direct_write(DIRECT_ENDS_EARLY.start, &[13; 1024]), Ok(512));
    }),
    ("punch that fails", |file| {
        assert!(file.punch_hole(PUNCH_REFUSED.start, BLOCK).is_err());
    }),
    ("cut to nothing", |file| file.truncate(at(0)).unwrap()),
    ("cut inside", |file| file.truncate(at(300)).unwrap()),
    ("cut that fails", |file| assert!(file.truncate(at(SIZE_REFUSED)).is_err())),
    ("cut in the last block", |file| file.truncate(at(700)).unwrap()),
    ("make longer", |file| file.truncate(at(1300)).unwrap()),
    ("punch", |file| file.punch_hole(at(400), 300).unwrap()),
    ("punch a block", |file| file.punch_hole(at(0), 512).unwrap()),
    ("zero", |file| file.zero_range(at(50), 600).unwrap()),
    ("allocate zeros", |file| file.allocate_zeroed(at(200), 1500, Reach::Extends).unwrap()),
    ("allocate", |file| file.allocate(at(512), 1000, Reach::Extends).unwrap()),
    ("store behind the end", |file| {
        // It may have been cut: then there is no such block.
        let _ = file.map(at(0), 4096).unwrap().store(at(1000), &[11; 24]);
    }),
    ("clone", |file| clone_into(file.space(), range(512, 1536), 10)),
];

/// A file whose second block is short, as it is found on the medium.
const SIZE: u64 = 750;

/// What changes nothing that anybody may see.
const BESIDE: [(&str, Call); 5] = [
    ("read ahead", |file| file.space().read_ahead_of(range(0, 1024)).unwrap()),
    ("fsync", |file| _ = file.fsync()),
    ("write back and forget", |file| {
        file.space().write_back_some(u64::MAX);
        forget(file.space());
    }),
    ("unshare", |file| file.unshare(at(0), 600).unwrap()),
    ("fault", |file| drop(file.map(at(0), 4096).unwrap().fault_for_write(at(600)))),
];

/// How memory is used, and whether data is written over data.
type Options = (CacheOptions, bool);

fn options() -> [Options; 4] {
    let ablation = CacheAblation { without_slabs: true, ..CacheAblation::default() };
    let usual = CacheOptions { ablation, ..CacheOptions::default() };
    [
        (CacheOptions { keeps_clean: false, ..usual.clone() }, false),
        (CacheOptions { straight_bytes_min: BLOCK, ..usual.clone() }, false),
        (usual.clone(), true),
        (usual, false),
    ]
}

fn new((cache, is_in_place): &Options) -> Arc<Space> {
    new_file(cache.clone(), *is_in_place, &[1; SIZE as usize])
}

/// What the file has after calls, one after the other, of which each changes the file.
fn after(options: &Options, calls: &[Call]) -> Vec<u8> {
    let file = new(options).open();
    calls.iter().for_each(|call| call(&file));
    let bytes = contents(&file);
    // A cache has what is dirty, and that has its cache.
    file.space().cache().forget_dirty();
    bytes
}

/// Bytes, and how many of each.
fn shown(bytes: &[u8]) -> Vec<(u8, usize)> {
    bytes.chunk_by(|one, other| one == other).map(|run| (run[0], run.len())).collect()
}

/// Calls beside each other.
struct Case {
    options: Options,
    name: String,
    calls: Vec<Call>,
    /// What a reader may see, besides what the file has in the end.
    moments: Vec<Vec<u8>>,
    /// What the file may have in the end.
    ends: Vec<Vec<u8>>,
}

impl Case {
    /// Two changes, and somebody who reads ahead.
    fn of_two(options: &Options, [one, other]: [(&str, Call); 2]) -> Self {
        let after = |calls: &[Call]| after(options, calls);
        Self {
            options: options.clone(),
            name: format!("{} and {}", one.0, other.0),
            calls: vec![one.1, other.1, BESIDE[0].1],
            moments: vec![after(&[]), after(&[one.1]), after(&[other.1])],
            ends: vec![after(&[one.1, other.1]), after(&[other.1, one.1])],
        }
    }

    /// A change, and what changes nothing.
    fn beside(options: &Options, one: (&str, Call), beside: (&str, Call)) -> Self {
        Self {
            options: options.clone(),
            name: format!("{} beside {}", one.0, beside.0),
            calls: vec![one.1, beside.1],
            moments: vec![after(options, &[])],
            ends: vec![after(options, &[one.1])],
        }
    }

    fn run(&self) {
        let name = &self.name;
        let space = new(&self.options);
        let mut threads = Vec::new();
        for call in self.calls.iter().copied() {
            let file = space.open();
            threads.push(thread::spawn(move || call(&file)));
        }
        let seen = contents(&space.open());
        for thread in threads {
            thread.join().unwrap();
        }
        let may_see = self.moments.contains(&seen) || self.ends.contains(&seen);
        assert!(may_see, "{name}: {:?} was seen", shown(&seen));
        let file = space.open();
        let end = contents(&file);
        assert!(self.ends.contains(&end), "{name}: {:?} in the end", shown(&end));
        // What was lost by a call that failed is told, once.
        let _ = file.fsync();
        file.fsync().unwrap();
        assert!(stored(&space) == end, "{name}: {:?} is stored", shown(&stored(&space)));
        forget(&space);
        assert!(contents(&file) == end, "{name}: after it was forgotten");
    }

    fn explore(self) {
        let case = Arc::new(self);
        let same = Arc::clone(&case);
        shuttle::check_random(move || case.run(), RUNS);
        shuttle::check_pct(move || same.run(), RUNS, 3);
    }
}

/// What is made there, where locks are those of the explorer.
fn made<T: Send + 'static>(make: impl Fn() -> T + Send + Sync + 'static) -> T {
    let made = Arc::new(Mutex::new(None));
    let put = Arc::clone(&made);
    shuttle::check_random(move || *put.lock().unwrap() = Some(make()), 1);
    made.lock().unwrap().take().unwrap()
}

/// The file's end was moved behind the moment when memory forgot what was there, by a direct write and by a clone: who read ahead between
/// them found the new bytes on the device, and zeroed those behind the old end. Reads then gave zeros, and a write beside them brought the
/// zeros to the medium.
#[test]
fn change_is_seen_whatever_is_done_beside() {
    for options in options() {
        for one in CHANGES {
            for beside in BESIDE {
                let options = options.clone();
                made(move || Case::beside(&options, one, beside)).explore();
            }
        }
    }
}

#[test]
fn any_two_changes_are_seen_one_after_the_other() {
    for options in options() {
        for (index, one) in CHANGES.into_iter().enumerate() {
            for other in CHANGES.into_iter().skip(index) {
                let options = options.clone();
                made(move || Case::of_two(&options, [one, other])).explore();
            }
        }
    }
}

/// Orders of the threads, of each case, chosen in each of two ways.
const RUNS: usize = 100;
