//! Several threads at one filesystem, on simulated devices.
//!
//! Workers run seeded operations, each in a subvolume of its own beside a model of its own; after
//! each, a worker says how far it is in two files of a subvolume that all share, under one handle.
//! There they also make pairs of files under one handle, and move tokens about that all of them
//! want. Meanwhile others commit, take and delete snapshots of the shared subvolume, and free what
//! deleted subvolumes hold.
//!
//! What is seen at one moment, in a snapshot or after a power cut, must be one moment's
//! ([`moment`]). The threads are real, so that a seed determines what is done, but not in which
//! order.

mod moment;
mod worker;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::AddAssign;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use ubtrfs_engine::{Filesystem, InodeId, SnapshotOptions};
use ubtrfs_ondisk::{InodeNo, RootId};
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::{CrashPlan, CrashState, SimArray};
use ubtrfs_testkit::model::{Id, Model, New, TOP_LEVEL};
use ubtrfs_testkit::snapshot::Timestamp;

use self::moment::{Moment, Seen};
use self::worker::{Log, Worker};
use crate::compare::{self, Differs};
use crate::config::Shape;
use crate::judge::{self, Outside};
use crate::op::Op;
use crate::run::words_of;
use crate::world::{self, Outcome, World, durable, not_open};

/// Files that workers move between the directories.
const TOKENS: usize = 6;
/// Directories of the shared subvolume.
const DIRECTORIES: usize = 3;
/// Room that each device has, so that nobody wants for space.
const SPARE_BYTES: u64 = 400 << 20;
/// A commit and a snapshot come after so many operations of all workers.
const COMMIT_EVERY: u64 = 12;
const SNAPSHOT_EVERY: u64 = 20;
/// Snapshots that are kept.
const SNAPSHOTS_MAX: usize = 4;
/// References that a step of the freeing drops, about.
const STEP_REFS: usize = 30;
/// Of each window between flushes, so many parts and mixtures are made.
const PARTS_PER_WINDOW: usize = 8;
/// About so many prefixes are made.
const PREFIXES: usize = 300;
/// One opened state in so many is passed to `btrfs check`.
const CHECK_ONE_IN: u64 = 40;

/// What a run does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ThreadsConfig {
    /// Determines the operations.
    pub seed: u64,
    /// Threads that work, beside those that commit, take snapshots and free.
    pub workers: usize,
    /// Operations of each.
    pub operations: u64,
    /// States after power cuts that are opened, about.
    pub crash_states: u64,
}

/// What was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ThreadsReport {
    /// Runs.
    pub runs: u64,
    /// Operations of all workers.
    pub operations: u64,
    /// Of these, those that engine and model refused.
    pub refused: u64,
    /// Tokens that were moved, and those that another worker had moved before.
    pub moved: (u64, u64),
    /// Commits.
    pub commits: u64,
    /// Snapshots taken, and found to show one moment.
    pub snapshots: u64,
    /// Of these, those that were deleted, having shown the same to their end.
    pub deleted: u64,
    /// States that power cuts leave, and those of them that were opened, compared and checked.
    pub states: (u64, u64),
    /// States that `btrfs check` found clean.
    pub checked: u64,
}

impl AddAssign for ThreadsReport {
    fn add_assign(&mut self, other: Self) {
        self.runs += other.runs;
        self.operations += other.operations;
        self.refused += other.refused;
        self.moved = (self.moved.0 + other.moved.0, self.moved.1 + other.moved.1);
        self.commits += other.commits;
        self.snapshots += other.snapshots;
        self.deleted += other.deleted;
        self.states = (self.states.0 + other.states.0, self.states.1 + other.states.1);
        self.checked += other.checked;
    }
}

impl fmt::Display for ThreadsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} runs of several threads: {} operations, {} of them refused by both; {} tokens moved, \
             {} not there any more; {} commits; {} snapshots, {} of them deleted; {} crash states, {} \
             opened, compared and checked; {} found clean by btrfs check",
            self.runs,
            self.operations,
            self.refused,
            self.moved.0,
            self.moved.1,
            self.commits,
            self.snapshots,
            self.deleted,
            self.states.0,
            self.states.1,
            self.checked
        )
    }
}

/// Runs what the configuration says.
///
/// # Errors
/// The first thing that went wrong, panics included. Another run may not show it.
pub fn run_threads(config: &ThreadsConfig) -> Result<ThreadsReport, String> {
    let result = catch_unwind(AssertUnwindSafe(|| all(config)));
    let result = result.unwrap_or_else(|panic| Err(words_of(&*panic)));
    result.map_err(|why| format!("{config:?}: {why}"))
}

/// What all threads share.
struct Stage {
    fs: Filesystem,
    array: SimArray,
    shared: Shared,
    shape: Shape,
    /// What is there before the threads begin.
    base: Model,
    /// The subvolume of each worker.
    own: Vec<u64>,
    seed: u64,
    /// Time, as it passes.
    clock: AtomicU64,
    /// Operations that all workers have done.
    done: AtomicU64,
    /// How many they had done at the last commit, and at the last snapshot.
    paces: [AtomicU64; 2],
    /// Workers that are at work.
    working: AtomicU64,
    /// Somebody found something wrong.
    is_over: AtomicBool,
    promises: Mutex<Vec<Promise>>,
    snapshots: Mutex<Vec<Snapshot>>,
}

/// The shared subvolume: files and directories in it.
#[derive(Clone, Debug)]
struct Shared {
    root: u64,
    /// Of each worker, the two files that say how far it is.
    progress: Vec<[u64; 2]>,
    directories: Vec<u64>,
    tokens: Vec<u64>,
}

/// A commit that was promised.
#[derive(Clone, Copy, Debug)]
struct Promise {
    /// When it was asked for.
    began: u64,
    /// Writes and flushes by when it was durable.
    events: usize,
    generation: u64,
}

/// A snapshot of the shared subvolume.
#[derive(Clone, Debug)]
struct Snapshot {
    root: u64,
    began: u64,
    ended: u64,
    /// What it shows, where it was looked at in time.
    moment: Option<Moment>,
    is_deleted: bool,
}

impl Stage {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    fn is_at_work(&self) -> bool {
        self.working.load(Ordering::SeqCst) > 0 && !self.is_over.load(Ordering::SeqCst)
    }

    /// Waits until the workers have done so many operations; `false` when they are at their end.
    fn wait_until(&self, target: u64) -> bool {
        while self.done.load(Ordering::SeqCst) < target {
            if !self.is_at_work() {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Does something again and again, each time after so many operations.
    fn at_each(&self, pace: &AtomicU64, every: u64, mut what: impl FnMut() -> Differs) -> Differs {
        while self.wait_until(pace.load(Ordering::SeqCst) + every) {
            what()?;
            pace.store(self.done.load(Ordering::SeqCst), Ordering::SeqCst);
        }
        Ok(())
    }

    /// Keeps a worker from running away from who commits and who takes snapshots.
    fn keep_pace(&self) {
        for (pace, every) in self.paces.iter().zip([COMMIT_EVERY, SNAPSHOT_EVERY]) {
            let is_ahead =
                || self.done.load(Ordering::SeqCst) >= pace.load(Ordering::SeqCst) + 2 * every;
            while is_ahead() && !self.is_over.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        }
    }

    fn commit(&self) -> Differs {
        let began = self.now();
        self.fs.commit().map_err(|error| format!("commit: {error}"))?;
        let (events, generation) =
            (self.array.event_count(), self.fs.superblock().generation.get());
        lock(&self.promises).push(Promise { began, events, generation });
        Ok(())
    }

    fn commits(&self) -> Differs {
        self.at_each(&self.paces[0], COMMIT_EVERY, || self.commit())
    }

    fn frees(&self) -> Differs {
        self.at_each(&AtomicU64::new(0), 1, || {
            let step = self.fs.clean_deleted_step(STEP_REFS);
            step.map(drop).map_err(|error| format!("freeing: {error}"))
        })
    }

    fn snapshots(&self) -> Differs {
        let mut number = 0;
        self.at_each(&self.paces[1], SNAPSHOT_EVERY, || {
            number += 1;
            self.snapshot(number)?;
            match number.checked_sub(SNAPSHOTS_MAX) {
                Some(old @ 1..) => self.delete_snapshot(old),
                _ => Ok(()),
            }
        })
    }

    fn snapshot(&self, number: usize) -> Differs {
        let name = format!("snapshot {number}");
        let options = SnapshotOptions { read_only: number.is_multiple_of(2) };
        let source = RootId(self.shared.root);
        let began = self.now();
        let made = self.fs.snapshot(source, self.fs.top_level(), name.as_bytes(), &options);
        let root = made.map_err(|error| format!("snapshot: {error}"))?.root.0;
        let ended = self.now();
        let moment = Moment::of(&self.fs, root, &self.shared)
            .map_err(|why| format!("in a snapshot just taken: {why}"))?;
        let moment = Some(moment);
        lock(&self.snapshots).push(Snapshot { root, began, ended, moment, is_deleted: false });
        Ok(())
    }

    /// It shows to its end what it showed at first.
    fn delete_snapshot(&self, number: usize) -> Differs {
        let old = lock(&self.snapshots)[number - 1].clone();
        let moment = Moment::of(&self.fs, old.root, &self.shared)?;
        if Some(&moment) != old.moment.as_ref() {
            return Err(format!("a snapshot changed: {moment:?} of {old:?}"));
        }
        let name = format!("snapshot {number}");
        self.fs
            .delete_subvolume(self.fs.top_level(), name.as_bytes())
            .map_err(|error| format!("deleting {name}: {error}"))?;
        lock(&self.snapshots)[number - 1].is_deleted = true;
        Ok(())
    }

    /// Does what a thread is there for, and ends the run where something went wrong.
    fn run<T>(&self, what: impl FnOnce() -> Differs<T>) -> Differs<T> {
        let result = catch_unwind(AssertUnwindSafe(what));
        let result = result.unwrap_or_else(|panic| Err(words_of(&*panic)));
        if result.is_err() {
            self.is_over.store(true, Ordering::SeqCst);
        }
        result
    }
}

fn all(config: &ThreadsConfig) -> Differs<ThreadsReport> {
    let stage = set_up(config)?;
    let logs = work(&stage, config)?;
    stage.commit()?;
    let mut report = ThreadsReport { runs: 1, ..ThreadsReport::default() };
    for log in &logs {
        report.operations += u64::try_from(log.steps.len()).expect("a count fits");
        report.refused += log.refused;
        report.moved.0 += log.moved.0;
        report.moved.1 += log.moved.1;
    }
    report.commits = u64::try_from(lock(&stage.promises).len()).expect("a count fits");
    let snapshots = lock(&stage.snapshots).clone();
    report.snapshots = u64::try_from(snapshots.len()).expect("a count fits");
    for snapshot in &snapshots {
        report.deleted += u64::from(snapshot.is_deleted);
        let Some(moment) = &snapshot.moment else { continue };
        let seen = Seen { not_before: snapshot.began, not_after: snapshot.ended };
        moment.is_one(&logs, &seen).map_err(|why| format!("{snapshot:?}: {why}"))?;
    }
    shows_the_end(&stage, &stage.fs, &logs).map_err(|why| format!("while open: {why}"))?;
    judge::is_clean(&stage.array)?;
    let outside = Outside::new();
    report.checked += u64::from(outside.check(&stage.array.images()));
    let again = SimArray::of_images(stage.array.images());
    let fs = world::open(&again, &stage.shape, config.seed).map_err(|error| not_open(&error))?;
    shows_the_end(&stage, &fs, &logs).map_err(|why| format!("opened again: {why}"))?;
    drop(fs);
    cut(&stage, config, &logs, &snapshots, &outside, &mut report)?;
    Ok(report)
}

/// Makes the filesystem, and what is there before the threads begin.
fn set_up(config: &ThreadsConfig) -> Differs<Stage> {
    let mut shape = Shape::of_seed(config.seed);
    let len_bytes = shape.options.device_bytes_min() + SPARE_BYTES;
    shape
        .lens_bytes
        .iter_mut()
        .for_each(|len| *len = (*len).max(len_bytes.next_multiple_of(1 << 20)));
    (shape.is_tight, shape.grows_when_full) = (false, false);
    let mut world = World::make(Rc::new(shape.clone()), config.seed);
    let mut make = |dir: Id, name: String, mode: u32| -> Differs<Id> {
        let (name, new) = (name.into_bytes(), new_inode(mode));
        let op = match dir == Id::root_of(TOP_LEVEL) {
            true => Op::CreateSubvolume { dir, name, new },
            false => Op::Create { dir, name, new },
        };
        match world.step(&op)? {
            Outcome::Done(effect) => effect.made.ok_or_else(|| format!("nothing made: {op:?}")),
            other => Err(format!("{other:?}: {op:?}")),
        }
    };
    let top = Id::root_of(TOP_LEVEL);
    let shared = make(top, "shared".to_owned(), 0o040_755)?;
    let mut own = Vec::new();
    let mut progress = Vec::new();
    for worker in 0..config.workers {
        own.push(make(top, format!("of worker {worker}"), 0o040_755)?.root);
        let mut file = |which| make(shared, format!("{which} of {worker}"), 0o100_644);
        progress.push([file("progress")?.inode, file("twin")?.inode]);
    }
    let mut directories = Vec::new();
    for number in 0..DIRECTORIES {
        directories.push(make(shared, format!("directory {number}"), 0o040_755)?.inode);
    }
    let mut tokens = Vec::new();
    for number in 0..TOKENS {
        let dir = Id { root: shared.root, inode: directories[number % DIRECTORIES] };
        tokens.push(make(dir, format!("token {number}"), 0o100_644)?.inode);
    }
    world.step(&Op::Commit)?;
    world.begin_recording();
    let promise = Promise { began: 0, events: 0, generation: world.generation() };
    Ok(Stage {
        shared: Shared { root: shared.root, progress, directories, tokens },
        array: world.array.clone(),
        base: world.model.clone(),
        fs: world.fs,
        shape,
        seed: config.seed,
        clock: AtomicU64::new(1),
        done: AtomicU64::new(0),
        paces: Default::default(),
        working: AtomicU64::new(u64::try_from(config.workers).expect("a count fits")),
        is_over: AtomicBool::new(false),
        promises: Mutex::new(vec![promise]),
        snapshots: Mutex::default(),
        own,
    })
}

fn new_inode(mode: u32) -> New {
    let time = Timestamp { sec: 1_600_000_000, nsec: 0 };
    New { mode, uid: 0, gid: 0, rdev: 0, atime: time, mtime: time, ctime: time, otime: time }
}

/// Lets all threads go, and waits for them.
fn work(stage: &Stage, config: &ThreadsConfig) -> Differs<Vec<Log>> {
    std::thread::scope(|scope| {
        let others: [fn(&Stage) -> Differs; 3] =
            [|stage| stage.commits(), |stage| stage.snapshots(), |stage| stage.frees()];
        let others = others.map(|other| scope.spawn(move || stage.run(|| other(stage))));
        let workers: Vec<_> = (0..config.workers)
            .map(|number| {
                scope.spawn(move || {
                    let result = stage.run(|| Worker::new(stage, number).work(config.operations));
                    stage.working.fetch_sub(1, Ordering::SeqCst);
                    result.map_err(|why| format!("worker {number}: {why}"))
                })
            })
            .collect();
        let ended = |panic: Box<dyn std::any::Any + Send>| Err(words_of(&*panic));
        let logs: Vec<Differs<Log>> =
            workers.into_iter().map(|worker| worker.join().unwrap_or_else(ended)).collect();
        for other in others {
            other.join().unwrap_or_else(|panic| Err(words_of(&*panic)))?;
        }
        logs.into_iter().collect()
    })
}

/// Everything that was done is there.
fn shows_the_end(stage: &Stage, fs: &Filesystem, logs: &[Log]) -> Differs {
    let is_open = std::ptr::eq(fs, &raw const stage.fs);
    for log in logs {
        let last = log.steps.last().map_or(&stage.base, |step| &step.after);
        let model = if is_open { last.clone() } else { durable(last) };
        compare::part(fs, &model, |root| log.owns(root))?;
    }
    let moment = Moment::of(fs, stage.shared.root, &stage.shared)?;
    let ends = logs.iter().map(|log| u64::try_from(log.marks.len()).expect("a count fits"));
    if moment.progress != ends.collect::<Vec<_>>() {
        return Err(format!("not all is there: {:?}", moment.progress));
    }
    moment.is_one(logs, &Seen { not_before: 0, not_after: u64::MAX })
}

/// Power cuts of all of it.
fn cut(
    stage: &Stage,
    config: &ThreadsConfig,
    logs: &[Log],
    snapshots: &[Snapshot],
    outside: &Outside,
    report: &mut ThreadsReport,
) -> Differs {
    let recording = stage.array.recording();
    let (writes, flushes) = recording.request_counts();
    let plan = CrashPlan {
        prefix_one_in: u64::try_from(writes.div_ceil(PREFIXES).max(1)).expect("a count fits"),
        parts_per_window: PARTS_PER_WINDOW,
        mixed_per_window: PARTS_PER_WINDOW,
    };
    let count = writes.min(PREFIXES) + flushes * 2 * PARTS_PER_WINDOW;
    let count = u64::try_from(count).expect("a count fits").max(1);
    let mut prng = Prng::new(config.seed ^ 0x7468_7265);
    let states = recording.states(plan, Prng::new(prng.next_u64()));
    for (number, state) in states.enumerate() {
        report.states.0 += 1;
        if !prng.chance(config.crash_states.min(count), count) {
            continue;
        }
        report.states.1 += 1;
        let what = format!("crash state {number} ({:?} cut after {})", state.kind, state.cut_after);
        if prng.chance(1, CHECK_ONE_IN) {
            report.checked += u64::from(outside.check(&state.images));
        }
        judge(stage, state, logs, snapshots).map_err(|why| format!("{what}: {why}"))?;
    }
    Ok(())
}

fn judge(stage: &Stage, state: CrashState, logs: &[Log], snapshots: &[Snapshot]) -> Differs {
    let promises = lock(&stage.promises);
    let promise = promises.iter().rfind(|promise| promise.events <= state.cut_after);
    let promise = *promise.ok_or("nothing was promised")?;
    drop(promises);
    let generation = world::newest_generation(&state.images);
    if generation < promise.generation {
        return Err(format!("shows commit {generation}, and {} was promised", promise.generation));
    }
    let array = SimArray::of_images(state.images);
    judge::is_clean(&array)?;
    let fs = world::open(&array, &stage.shape, stage.seed).map_err(|error| not_open(&error))?;
    let moment = Moment::of(&fs, stage.shared.root, &stage.shared)?;
    moment.is_one(logs, &Seen { not_before: promise.began, not_after: u64::MAX })?;
    for (log, done) in logs.iter().zip(&moment.progress) {
        log.is_shown(&fs, &stage.base, *done)
            .map_err(|why| format!("after {done} steps: {why}"))?;
    }
    let of_root: BTreeMap<u64, &Snapshot> =
        snapshots.iter().map(|snapshot| (snapshot.root, snapshot)).collect();
    for info in fs.subvolumes().map_err(|error| error.to_string())? {
        let Some(snapshot) = of_root.get(&info.id.0).filter(|_| !info.deleted) else { continue };
        let shown = Moment::of(&fs, snapshot.root, &stage.shared)?;
        if Some(&shown) != snapshot.moment.as_ref() {
            return Err(format!("a snapshot changed: {shown:?} of {snapshot:?}"));
        }
    }
    Ok(())
}

impl Log {
    /// Whether a filesystem shows the worker's subvolume after so many operations that it has told:
    /// the next may be in it, or a part of that.
    fn is_shown(&self, fs: &Filesystem, base: &Model, done: u64) -> Differs {
        let done = usize::try_from(done).expect("a count fits");
        let before = match done {
            0 => base,
            _ => &self.steps.get(done - 1).ok_or("further than it came")?.after,
        };
        let next = self.steps.get(done);
        let inside = next.into_iter().flat_map(|step| step.op.inside(before));
        let candidates =
            [before.clone()].into_iter().chain(next.map(|step| step.after.clone())).chain(inside);
        let mut why = String::new();
        for candidate in candidates {
            let candidate = durable(&candidate);
            match compare::part(fs, &candidate, |root| self.owns(root)) {
                Ok(()) => return Ok(()),
                Err(wrong) if why.is_empty() => why = wrong.into(),
                Err(_) => {}
            }
        }
        Err(format!("{why}; nor after {:?}", next.map(|step| &step.op)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An inode of the shared subvolume, or of a snapshot of it.
fn inode_in(root: u64, inode: u64) -> InodeId {
    InodeId { root: RootId(root), inode: InodeNo(inode) }
}
