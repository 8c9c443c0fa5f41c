//! Filesystems that others left with work to be done at their opening: a log to be replayed, a free
//! space tree to be made anew, inodes without a name, deleted subvolumes. The power is cut at each
//! write of the opening, of the first changes and of the freeing.
//!
//! Whatever arrived: the filesystem opens, is clean, and shows what it would have shown without the
//! cut. Up to the commit of the first changes that is what the whole opening gives, also of a state
//! that still has its log.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ubtrfs_engine::{Error, Filesystem, InodeId, NewInode, OpenOptions, Reservation};
use ubtrfs_ondisk::InodeNo;
use ubtrfs_rt::{Clock, Executor, Identifiers, Runtime, Time};
use ubtrfs_testkit::crash::{CrashState, Image, SimArray};
use ubtrfs_testkit::snapshot::Timestamp;
use ubtrfs_testkit::{Compare, Prng, TreeSnapshot};
use ubtrfs_volume::{Volume, VolumeOptions};

use crate::compare::Differs;
use crate::cuts;
use crate::judge::{self, Outside};
use crate::known::{Known, Opened};
use crate::superblocks;
use crate::trees::Remembered;
use crate::view;
use crate::world::{newest_generation, not_open};

/// What the first changes call what they make.
const FIRST_CHANGE: &[u8] = b"first change";
/// References that a step of the freeing drops, about, and steps that none has.
const STEP_REFS: usize = 20;
const STEPS_MAX: usize = 100_000;
/// On one opened state in so many the first changes are made again.
const GO_ON_ONE_IN: u64 = 6;

/// How an opening is judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpeningConfig {
    /// Determines which states are sampled.
    pub seed: u64,
    /// The moment at which the filesystem was left, by the clock of who left it: later changes of
    /// inodes are of whoever mended it, and their times are not compared.
    pub left_at: Timestamp,
    /// Of the opened states, about so many that chance wants, besides those that differ in what is
    /// read.
    pub chosen: u64,
    /// One opened state in so many is mounted by the kernel, and passed to `btrfs check` then.
    pub mount_one_in: u64,
}

/// What was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpeningReport {
    /// There was a log.
    pub had_log: bool,
    /// The free space tree was not up to date.
    pub was_stale: bool,
    /// Inodes that had no name.
    pub orphans: usize,
    /// Subvolumes whose deletion was to be gone on with.
    pub deleted: usize,
    /// Commits that the opening made by itself.
    pub commits: u64,
    /// Writes, from the opening to the end of the freeing.
    pub writes: usize,
    /// States that cuts leave.
    pub states: u64,
    /// Of these, those that were opened, compared and checked.
    pub opened: u64,
    /// Of these, those that showed the filesystem before the opening's first commit.
    pub opened_before: u64,
    /// States on which the engine went on with the first changes.
    pub went_on: u64,
    /// States that the kernel mounted, showing the same.
    pub mounted: u64,
}

/// Opens a filesystem for writing, changes something in each subvolume, frees what deleted ones
/// hold; and cuts all of that.
///
/// # Errors
/// What was wrong with which state.
pub fn judge_opening(images: &[Image], config: &OpeningConfig) -> Result<OpeningReport, String> {
    let whole = Whole::record(images, config)?;
    let outside = Outside::new();
    let mut prng = Prng::new(config.seed);
    let recording = whole.array.recording();
    let mut report = OpeningReport { writes: recording.request_counts().0, ..whole.report };
    let plan = cuts::plan(report.writes);
    let count = u64::try_from(6 * recording.event_count().max(1)).expect("a count fits");
    let mut known = Known::default();
    for (number, state) in recording.states(plan, Prng::new(prng.next_u64())).enumerate() {
        report.states += 1;
        let shown = known.generation_of(&state.images);
        let is_right = shown.is_some_and(|shown| shown >= whole.promised_at(state.cut_after));
        if is_right && !prng.chance(config.chosen, count) {
            continue;
        }
        report.opened += 1;
        let what = format!("crash state {number} ({:?} cut after {})", state.kind, state.cut_after);
        let seen = whole
            .judge(state, config, &outside, &mut prng, &mut report)
            .map_err(|why| format!("{what}: {why}"))?;
        if shown.is_none() {
            known.note(seen);
        }
    }
    Ok(report)
}

/// The opening and what follows it, without a cut.
struct Whole {
    array: SimArray,
    /// How many writes and flushes had been recorded when a commit was promised.
    promised: Vec<(usize, u64)>,
    /// Commits up to that of the opening, and what they show once opened.
    opened: (RangeInclusive<u64>, TreeSnapshot),
    /// The commit of the first changes, and what it and later ones show.
    changed: (u64, TreeSnapshot),
    report: OpeningReport,
}

impl Whole {
    fn record(images: &[Image], config: &OpeningConfig) -> Differs<Self> {
        let before = remembered(images)?;
        let array = SimArray::of_images(images.to_vec());
        let first = newest_generation(images);
        let mut report = OpeningReport {
            had_log: superblocks::newest(images).is_some_and(|one| one.log_root.get() != 0),
            was_stale: superblocks::has_stale_free_space_tree(images),
            ..OpeningReport::default()
        };
        let fs = open(&array, config)?;
        let generation = |fs: &Filesystem| fs.superblock().generation.get();
        let opened = generation(&fs);
        let mut promised = vec![(0, first), (array.event_count(), opened)];
        report.commits = opened - first;
        let shown = view::of(&fs)?;
        report.orphans = before.orphans.values().map(BTreeSet::len).sum();
        report.deleted = before.deleted.len();
        first_changes(&fs).map_err(|error| error.to_string())?;
        let changed = generation(&fs);
        promised.push((array.event_count(), changed));
        let after = Remembered::of(fs.volume())?;
        if !after.orphans.is_empty() {
            return Err(format!("without a name after the first changes: {:?}", after.orphans));
        }
        let shown_changed = view::of(&fs)?;
        for step in 0.. {
            let more = fs.clean_deleted_step(STEP_REFS).map_err(|error| error.to_string())?;
            fs.commit().map_err(|error| error.to_string())?;
            promised.push((array.event_count(), generation(&fs)));
            if !more {
                break;
            }
            if step == STEPS_MAX {
                return Err("the dropping of deleted subvolumes does not end".to_owned());
            }
        }
        let left = Remembered::of(fs.volume())?;
        if left != Remembered::default() {
            return Err(format!("in the end there are {left:?}"));
        }
        drop(fs);
        judge::is_clean(&array)?;
        let opened = (first..=opened, shown);
        Ok(Self { array, promised, opened, changed: (changed, shown_changed), report })
    }

    fn promised_at(&self, events: usize) -> u64 {
        let promised = self.promised.iter().rev().find(|(at, _)| *at <= events);
        promised.map_or(0, |(_, generation)| *generation)
    }

    /// What a commit may show; one that came in between, either.
    fn shown(&self, generation: u64) -> Vec<&TreeSnapshot> {
        let (opened, changed) = (&self.opened, &self.changed);
        match generation {
            one if opened.0.contains(&one) => vec![&opened.1],
            one if one >= changed.0 => vec![&changed.1],
            _ => vec![&opened.1, &changed.1],
        }
    }

    fn judge(
        &self,
        state: CrashState,
        config: &OpeningConfig,
        outside: &Outside,
        prng: &mut Prng,
        report: &mut OpeningReport,
    ) -> Differs<Opened> {
        let CrashState { images, cut_after, .. } = state;
        let generation = newest_generation(&images);
        let promised = self.promised_at(cut_after);
        if generation < promised {
            return Err(format!("shows commit {generation}, and {promised} was promised"));
        }
        report.opened_before += u64::from(generation == *self.opened.0.start());
        let array = SimArray::of_images(images.clone());
        array.note_reads();
        judge::is_clean(&array).map_err(|why| format!("as it is: {why}"))?;
        let fs = open(&array, config)?;
        let shown = view::of(&fs)?;
        let differs = |wanted: &TreeSnapshot| {
            let differences = wanted.differences(&shown, &Compare::same_filesystem());
            (!differences.is_empty()).then(|| differences.to_string())
        };
        let wanted = self.shown(generation);
        let wrong: Vec<String> = wanted.iter().filter_map(|one| differs(one)).collect();
        if wrong.len() == wanted.len() {
            return Err(format!("of commit {generation}, with | without a cut: {wrong:?}"));
        }
        judge::is_clean(&array).map_err(|why| format!("once opened: {why}"))?;
        if prng.chance(1, GO_ON_ONE_IN) {
            report.went_on += 1;
            first_changes(&fs).map_err(|error| format!("gone on with: {error}"))?;
            judge::is_clean(&array).map_err(|why| format!("gone on with: {why}"))?;
        }
        drop(fs);
        let reads = array.take_reads();
        if config.mount_one_in > 0 && prng.chance(1, config.mount_one_in) {
            let seen = outside.seen_by_kernel(&images);
            if let Some(seen) = seen {
                same_but_for_late_times(seen, shown, config.left_at)?;
                report.mounted += 1;
            }
        }
        Ok(Opened { images, reads, generation })
    }
}

/// What loses a name in a replay gets the time of the replay, unless the log says it later: on each
/// side as the order of steps has it.
fn same_but_for_late_times(
    mut theirs: TreeSnapshot,
    mut ours: TreeSnapshot,
    left_at: Timestamp,
) -> Differs {
    let is_late = |ctime: Option<Timestamp>| ctime.is_some_and(|at| at > left_at);
    for (path, ours) in &mut ours.entries {
        let Some(theirs) = theirs.entries.get_mut(path) else { continue };
        if is_late(ours.ctime) || is_late(theirs.ctime) {
            (ours.ctime, theirs.ctime) = (None, None);
        }
    }
    let differences = theirs.differences(&ours, &Compare::same_filesystem());
    match differences.is_empty() {
        true => Ok(()),
        false => Err(format!("the kernel | the engine: {differences}")),
    }
}

/// What is to be gone on with before anything is opened for writing.
fn remembered(images: &[Image]) -> Differs<Remembered> {
    let array = SimArray::of_images(images.to_vec());
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(array.devices(), &options).map_err(|error| error.to_string())?;
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let fs = Filesystem::open(volume, options).map_err(|error| not_open(&error))?;
    view::of(&fs)?;
    match array.event_count() {
        0 => Remembered::of(fs.volume()),
        _ => Err("it was opened read-only, and written".to_owned()),
    }
}

fn open(array: &SimArray, config: &OpeningConfig) -> Differs<Filesystem> {
    let volume = Volume::open(array.devices(), &VolumeOptions::default());
    let volume = volume.map_err(|error| error.to_string())?;
    // A day later, so that what the engine changes can be told from what was there.
    let now = Time { sec: config.left_at.sec + 86_400, nsec: 0 };
    let runtime = Runtime {
        executor: Executor::Inline,
        clock: Clock::Fixed(now),
        identifiers: Identifiers::Seeded(AtomicU64::new(config.seed)),
    };
    let options = OpenOptions { runtime: Arc::new(runtime), ..OpenOptions::default() };
    Filesystem::open(volume, options).map_err(|error| not_open(&error))
}

/// Makes a file in each subvolume that can be changed, and commits.
fn first_changes(fs: &Filesystem) -> Result<(), Error> {
    let new = NewInode::new(0o100_644, fs.runtime().clock.now());
    for info in fs.subvolumes()?.iter().filter(|info| !info.deleted && !info.read_only) {
        let top = InodeId { root: info.id, inode: InodeNo(256) };
        match fs.begin(Reservation::create(0))?.create(top, FIRST_CHANGE, &new) {
            Ok(_) | Err(Error::Exists { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    // What had no name goes as the next change begins.
    drop(fs.begin(Reservation::items(0))?);
    fs.commit()
}
