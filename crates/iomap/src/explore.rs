//! Threads in any order: what is shared without a lock of its own, and who wakes whom, under an explorer of interleavings.
//! `make explore` runs these; a failure prints the schedule that replays it.

mod file;
mod io;
mod moments;

use std::sync::Weak;

use shuttle::thread;
use ubtrfs_rt::{Arc, AtomicU64, Condvar, Mutex, Ordering, check_orders};

use crate::extent_state::{
    CachedState, Conversion, CountQuery, ExtentStates, IntervalLock, LockMode, StateBits, Want,
};
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::{CacheOptions, CachedFile, DirtyOrder, PageCache, ServiceEnd};

fn spawn_all<const N: usize>(work: [Box<dyn FnOnce() + Send>; N]) {
    for thread in work.map(thread::spawn) {
        thread.join().expect("no thread panics");
    }
}

fn range(start: u64, end: u64) -> FileRange {
    FileRange::new(FileOffset::new(start), FileOffset::new(end))
}

const WANT: Want = Want::Any(StateBits::DELALLOC);
const UNIVERSE: usize = 64;

/// Which bytes are delalloc.
type Model = [bool; UNIVERSE];

fn first_run(model: &Model, from: usize) -> Option<FileRange> {
    let start = (from..UNIVERSE).find(|at| model[*at])?;
    let end = (start..UNIVERSE).find(|at| !model[*at]).unwrap_or(UNIVERSE);
    Some(range(start as u64, end as u64))
}

/// What becomes delalloc, or is so no more.
type Step = (u64, u64, bool);

/// A file's states, which change in steps that are known beforehand, and one hint for all who look.
struct Shared {
    states: ExtentStates,
    hint: CachedState,
    models: Vec<Model>,
    steps: &'static [Step],
    begun: AtomicU64,
    done: AtomicU64,
}

/// Merging with both neighbours, splitting, removing a record whose place another takes, removing all.
const STEPS: [Step; 7] = [
    (16, 24, true),
    (26, 28, false),
    (40, 48, false),
    (2, 4, true),
    (58, 60, false),
    (0, 64, false),
    (44, 46, true),
];
const AT_FIRST: [(u64, u64); 4] = [(8, 16), (24, 32), (40, 48), (56, 64)];

/// Of so many records that they fill several leaves: leaves become empty and are given up, others take their place, are split, and all go
/// at once and come again.
const STEPS_OF_LEAVES: [Step; 8] = [
    (16, 34, false),
    (20, 21, true),
    (22, 23, true),
    (24, 25, true),
    (1, 2, true),
    (0, 64, false),
    (30, 31, true),
    (40, 41, true),
];

/// Each other byte of the first 56.
fn many_at_first() -> Vec<(u64, u64)> {
    (0..28).map(|number| (2 * number, 2 * number + 1)).collect()
}

impl Shared {
    fn new(at_first: &[(u64, u64)], steps: &'static [Step]) -> Self {
        let states = ExtentStates::new();
        let mut model = [false; UNIVERSE];
        let set = |model: &mut Model, start: u64, end: u64, is_set: bool| {
            model[start as usize..end as usize].fill(is_set);
        };
        for (start, end) in at_first.iter().copied() {
            states.set(range(start, end), StateBits::DELALLOC);
            set(&mut model, start, end, true);
        }
        let mut models = vec![model];
        for (start, end, is_set) in steps.iter().copied() {
            set(&mut model, start, end, is_set);
            models.push(model);
        }
        let (begun, done) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { states, hint: CachedState::new(), models, steps, begun, done }
    }

    fn change(&self) {
        for (start, end, is_set) in self.steps.iter().copied() {
            self.begun.fetch_add(1, Ordering::SeqCst);
            let (set, clear) = match is_set {
                true => (StateBits::DELALLOC, StateBits::NONE),
                false => (StateBits::NONE, StateBits::DELALLOC),
            };
            self.states.convert(range(start, end), Conversion { set, clear });
            self.done.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// What is found was so at some moment of the search.
    fn look(&self, places: [usize; 4]) {
        for from in places {
            let within = range(from as u64, UNIVERSE as u64);
            let first = self.done.load(Ordering::SeqCst) as usize;
            let query = CountQuery::first_run(within, WANT);
            let found = self.states.count_range(query, Some(&self.hint)).map(|found| found.run());
            let last = self.begun.load(Ordering::SeqCst) as usize;
            let moments = &self.models[first..=last];
            assert!(
                moments.iter().any(|model| first_run(model, from) == found),
                "{found:?} from {from} in no state from {first} to {last}"
            );
        }
    }
}

#[test]
fn hint_that_threads_share_while_states_change_decides_no_answer() {
    check_orders(|| {
        let shared = Arc::new(Shared::new(&AT_FIRST, &STEPS));
        let [a, b, c] = std::array::from_fn(|_| Arc::clone(&shared));
        spawn_all([
            Box::new(move || a.change()),
            Box::new(move || b.look([0, 20, 45, 57])),
            Box::new(move || c.look([50, 30, 10, 0])),
        ]);
    });
}

#[test]
fn hint_that_threads_share_while_leaves_go_and_come_decides_no_answer() {
    check_orders(|| {
        let shared = Arc::new(Shared::new(&many_at_first(), &STEPS_OF_LEAVES));
        let [a, b, c] = std::array::from_fn(|_| Arc::clone(&shared));
        spawn_all([
            Box::new(move || a.change()),
            Box::new(move || b.look([18, 20, 22, 40])),
            Box::new(move || c.look([33, 30, 24, 0])),
        ]);
    });
}

#[test]
fn interval_lock_excludes_and_nobody_waits_for_ever() {
    check_orders(|| {
        let lock = Arc::new(IntervalLock::new());
        // Who is in each byte: readers, or a thousand for a writer.
        let inside: Arc<Vec<AtomicU64>> = Arc::new((0..4).map(|_| AtomicU64::new(0)).collect());
        let turn = |start: usize, end: usize, mode: LockMode| {
            let (lock, inside) = (Arc::clone(&lock), Arc::clone(&inside));
            Box::new(move || {
                for _ in 0..2 {
                    let held = lock.lock(range(start as u64, end as u64), mode);
                    let weight = if mode == LockMode::Exclusive { 1000 } else { 1 };
                    for byte in &inside[start..end] {
                        let before = byte.fetch_add(weight, Ordering::SeqCst);
                        let is_allowed = before == 0 || weight == 1 && before < 1000;
                        assert!(is_allowed, "{before} are inside");
                    }
                    for byte in &inside[start..end] {
                        byte.fetch_sub(weight, Ordering::SeqCst);
                    }
                    drop(held);
                }
            }) as Box<dyn FnOnce() + Send>
        };
        spawn_all([
            turn(0, 2, LockMode::Exclusive),
            turn(1, 4, LockMode::Exclusive),
            turn(0, 4, LockMode::Shared),
            turn(1, 3, LockMode::Shared),
        ]);
    });
}

const LIMIT_BYTES: u64 = 4096;

/// A file that has so much dirty, and was read ahead so often.
#[derive(Default)]
struct File {
    cache: Option<Arc<PageCache>>,
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Default)]
struct Counts {
    dirty_bytes: u64,
    reads: u64,
}

impl CachedFile for File {
    fn reclaim(&self, _: u64) -> u64 {
        0
    }

    fn write_back_some(&self, bytes_max: u64) -> u64 {
        let mut counts = self.counts.lock();
        let bytes = counts.dirty_bytes.min(bytes_max);
        counts.dirty_bytes -= bytes;
        if let Some(cache) = &self.cache {
            cache.subtract_dirty(bytes);
        }
        self.changed.notify_all();
        bytes
    }

    fn read_ahead(&self, _: FileRange) {
        self.counts.lock().reads += 1;
        self.changed.notify_all();
    }

    fn is_still_dirty(&self, _: DirtyOrder, _: bool) -> bool {
        self.counts.lock().dirty_bytes > 0
    }
}

impl File {
    fn wait(&self, until: impl Fn(&Counts) -> bool) {
        let mut counts = self.counts.lock();
        while !until(&counts) {
            self.changed.wait(&mut counts);
        }
    }
}

/// Here a wait ends by a wake-up alone: one that is missed is a deadlock.
#[test]
fn readahead_service_is_woken_for_each_request_and_for_its_end() {
    check_orders(|| {
        let cache = PageCache::new(CacheOptions::default());
        let end = Arc::new(ServiceEnd::default());
        let serve = || {
            let (cache, end) = (Arc::clone(&cache), Arc::clone(&end));
            thread::spawn(move || cache.serve_readahead(&end))
        };
        let servers = [serve(), serve()];
        let file = Arc::new(File::default());
        for at in 0..3 {
            let weak: Weak<File> = Arc::downgrade(&file);
            cache.ask_readahead(weak, range(at, at + 1), &Arc::default());
        }
        file.wait(|counts| counts.reads == 3);
        cache.end_services(&end);
        for server in servers {
            server.join().expect("a server ends");
        }
    });
}

#[test]
fn writeback_service_is_woken_when_too_much_is_dirty_and_for_its_end() {
    check_orders(|| {
        let cache = PageCache::new(CacheOptions {
            dirty_bytes_background: LIMIT_BYTES,
            ..CacheOptions::default()
        });
        let end = Arc::new(ServiceEnd::default());
        let (its, its_end) = (Arc::clone(&cache), Arc::clone(&end));
        let server = thread::spawn(move || its.serve_writeback(&its_end, || 0));
        let file = Arc::new(File { cache: Some(Arc::clone(&cache)), ..File::default() });
        for _ in 0..2 {
            let mut counts = file.counts.lock();
            counts.dirty_bytes += 2 * LIMIT_BYTES;
            let listed = cache.list_dirty(Arc::clone(&file) as Arc<dyn CachedFile>);
            cache.add_dirty(2 * LIMIT_BYTES);
            drop(counts);
            file.wait(|counts| counts.dirty_bytes <= LIMIT_BYTES);
            let _ = cache.unlist_dirty(listed);
        }
        cache.end_services(&end);
        server.join().expect("the server ends");
        cache.forget_dirty();
    });
}

/// A file whose writeback ends only when the writer has gone on.
struct Held {
    cache: Arc<PageCache>,
    states: Mutex<HeldStates>,
    changed: Condvar,
}

#[derive(Default)]
struct HeldStates {
    has_begun: bool,
    goes_on: bool,
}

impl Held {
    fn wait(&self, until: impl Fn(&HeldStates) -> bool) {
        let mut states = self.states.lock();
        while !until(&states) {
            self.changed.wait(&mut states);
        }
    }

    fn note(&self, change: impl Fn(&mut HeldStates)) {
        change(&mut self.states.lock());
        self.changed.notify_all();
    }
}

impl CachedFile for Held {
    fn reclaim(&self, _: u64) -> u64 {
        0
    }

    fn write_back_some(&self, _: u64) -> u64 {
        self.note(|states| states.has_begun = true);
        self.cache.subtract_dirty(2 * LIMIT_BYTES);
        self.wait(|states| states.goes_on);
        2 * LIMIT_BYTES
    }

    fn read_ahead(&self, _: FileRange) {}

    fn is_still_dirty(&self, _: DirtyOrder, _: bool) -> bool {
        false
    }
}

/// What is on its way to the medium is not dirty any more. Writers that were woken only when it had arrived stood still for the time of one
/// writeback, and then had a processor for themselves: 4 % of what it takes to write a long compressed file.
#[test]
fn writer_that_waits_goes_on_when_a_writeback_has_begun() {
    check_orders(|| {
        let cache = PageCache::new(CacheOptions {
            dirty_bytes_max: LIMIT_BYTES,
            dirty_bytes_background: LIMIT_BYTES,
            ..CacheOptions::default()
        });
        let end = Arc::new(ServiceEnd::default());
        let file = Arc::new(Held {
            cache: Arc::clone(&cache),
            states: Mutex::default(),
            changed: Condvar::new(),
        });
        cache.list_dirty(Arc::clone(&file) as Arc<dyn CachedFile>);
        cache.add_dirty(2 * LIMIT_BYTES);
        let (its, its_end) = (Arc::clone(&cache), Arc::clone(&end));
        let server = thread::spawn(move || its.serve_writeback(&its_end, || 0));
        file.wait(|states| states.has_begun);
        cache.throttle();
        file.note(|states| states.goes_on = true);
        cache.end_services(&end);
        server.join().expect("the server ends");
    });
}
