//! Calls of one file beside each other: who reads sees all of what a call did, or nothing, and each place as it was at some moment.

use std::sync::{Arc, Mutex};

use shuttle::thread;

use super::file::{
    BLOCK, DIRECT_ENDS_EARLY, DIRECT_REFUSED, Moving, PUNCH_REFUSED, SIZE_REFUSED, Space,
    clone_into, contents, forget, new_file, stored,
};
use super::moments::{Moment, State, follow, look_at_places};
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
    (CUT_THAT_FAILS, |file| assert!(file.truncate(at(SIZE_REFUSED)).is_err())),
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

const CUT_THAT_FAILS: &str = "cut that fails";

/// Of a file whose second block is short.
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

/// What a file is like.
#[derive(Clone)]
struct Options {
    cache: CacheOptions,
    /// Data is written over data.
    is_in_place: bool,
    /// It is in memory at first, and nowhere else; otherwise on the medium, and nowhere else.
    is_dirty: bool,
}

fn options() -> [Options; 5] {
    let ablation = CacheAblation { without_slabs: true, ..CacheAblation::default() };
    let cache = CacheOptions { ablation, ..CacheOptions::default() };
    let usual = Options { cache: cache.clone(), is_in_place: false, is_dirty: false };
    [
        Options { cache: CacheOptions { keeps_clean: false, ..cache.clone() }, ..usual.clone() },
        Options { cache: CacheOptions { straight_bytes_min: BLOCK, ..cache }, ..usual.clone() },
        Options { is_in_place: true, ..usual.clone() },
        Options { is_dirty: true, ..usual.clone() },
        usual,
    ]
}

fn new(options: &Options) -> Arc<Space> {
    let space = new_file(options.cache.clone(), options.is_in_place, &[1; SIZE as usize]);
    if !options.is_dirty {
        space.open().fsync().unwrap();
        forget(&space);
    }
    space
}

/// What the file is after calls, one after the other.
fn after(options: &Options, calls: &[Call]) -> State {
    let file = new(options).open();
    calls.iter().for_each(|call| call(&file));
    let state = State::of(&file);
    // A cache has what is dirty, and that has its cache.
    file.space().cache().forget_dirty();
    state
}

/// Bytes, and how many of each.
fn shown(bytes: &[u8]) -> Vec<(u8, usize)> {
    bytes.chunk_by(|one, other| one == other).map(|run| (run[0], run.len())).collect()
}

/// What somebody looks at who changes nothing.
#[derive(Clone, Copy)]
enum Look {
    Bytes,
    Places,
}

/// Calls beside each other.
struct Case {
    options: Options,
    name: String,
    calls: Vec<Call>,
    /// What the file is before them, between them and after them.
    moments: Vec<Moment>,
}

impl Case {
    /// Two calls, and what changes nothing.
    fn new(options: &Options, [one, other]: [(&str, Call); 2], beside: Option<Call>) -> Self {
        let moment = |done: &[usize]| {
            let calls: Vec<_> = done.iter().map(|call| [one.1, other.1][*call]).collect();
            Moment { done: done.to_vec(), state: after(options, &calls) }
        };
        Self {
            options: options.clone(),
            name: format!("{} and {}", one.0, other.0),
            calls: [one.1, other.1].into_iter().chain(beside).collect(),
            moments: vec![
                moment(&[]),
                moment(&[0]),
                moment(&[1]),
                moment(&[0, 1]),
                moment(&[1, 0]),
            ],
        }
    }

    fn is_end(&self, is_so: impl Fn(&State) -> bool) -> bool {
        self.moments.iter().any(|moment| moment.done.len() == 2 && is_so(&moment.state))
    }

    fn run(&self, look: Look) {
        let name = &self.name;
        let space = new(&self.options);
        let mut threads = Vec::new();
        for call in self.calls.iter().copied() {
            let file = space.open();
            threads.push(thread::spawn(move || call(&file)));
        }
        match look {
            Look::Bytes => {
                let seen = [(); 2].map(|()| contents(&space.open()));
                let runs = seen.each_ref().map(|bytes| shown(bytes));
                assert!(follow(&seen, &self.moments), "{name}: {runs:?} were seen");
            }
            Look::Places => look_at_places(&space.open(), name, &self.moments),
        }
        for thread in threads {
            thread.join().unwrap();
        }
        let file = space.open();
        let end = State::of(&file);
        assert!(self.is_end(|state| *state == end), "{name}: {end:?} in the end");
        // What was lost by a call that failed is told, once.
        let _ = file.fsync();
        file.fsync().unwrap();
        assert!(stored(&space) == end.bytes, "{name}: {:?} is stored", shown(&stored(&space)));
        forget(&space);
        assert!(State::of(&file) == end, "{name}: after it was forgotten");
    }

    fn explore(self) {
        let case = Arc::new(self);
        for look in [Look::Bytes, Look::Places] {
            // For who does not wait for it, as seeks do not, the file ends there until it has failed.
            if matches!(look, Look::Places) && case.name.contains(CUT_THAT_FAILS) {
                continue;
            }
            let [one, other] = [(); 2].map(|()| Arc::clone(&case));
            shuttle::check_random(move || one.run(look), RUNS);
            shuttle::check_pct(move || other.run(look), RUNS, 3);
        }
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
                made(move || Case::new(&options, [one, beside], None)).explore();
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
                let read_ahead = Some(BESIDE[0].1);
                made(move || Case::new(&options, [one, other], read_ahead)).explore();
            }
        }
    }
}

/// Orders of the threads, of each case and each look at it, chosen in each of two ways.
const RUNS: usize = 50;
