//! Power cuts while files are open: whatever arrived, the filesystem opens and is clean, each file
//! shows what it may, and a snapshot what it was made of.

use std::rc::Rc;

use ubtrfs_engine::{Filesystem, InodeId};
use ubtrfs_testkit::crash::{CrashState, Image, SimArray};
use ubtrfs_testkit::{Compare, Prng};

use super::Context;
use super::op::{FileOp, Generator, Op};
use super::shape::Kind;
use super::stage::{Outcome, Snapshot, Stage, read_closed, read_opened, snapshot_name};
use crate::compare::Differs;
use crate::judge::{self, Ahead};
use crate::known::{Known, Opened};
use crate::world::{newest_generation, not_open};
use crate::{cuts, view};

/// Operations after a cut.
const OPERATIONS: u64 = 8;
/// Of the states that cuts of cuts leave so many times fewer are opened.
const NESTED_FACTOR: u64 = 4;
/// States that differ in what is read, of each write.
const NEW_PER_EVENT: u64 = 3;
/// A state that is the same as an opened one is opened so many times more rarely.
const KNOWN_FACTOR: u64 = 10;

/// How many cuts there were before the one that is judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Depth {
    First,
    AfterACut,
}

/// Looks at states that cuts may leave since the recording began.
///
/// # Errors
/// What was wrong with which state.
pub(super) fn judge_window(stage: &Stage, context: &mut Context<'_>, depth: Depth) -> Differs {
    let recording = stage.array.recording();
    let events = u64::try_from(recording.event_count().max(1)).expect("a count fits");
    let wanted = match depth {
        Depth::First => context.config.crash_states,
        Depth::AfterACut => context.config.crash_states.div_ceil(NESTED_FACTOR),
    };
    let plan = cuts::plan(recording.request_counts().0);
    let states = recording.states(plan, Prng::new(context.prng.next_u64()));
    let mut known = Known::default();
    context.report.windows += 1;
    for (number, state) in states.enumerate() {
        let cuts = context.report.cuts.entry(state.kind).or_default();
        cuts.states += 1;
        let promises = u64::try_from(stage.promise_count(state.cut_after)).expect("a count fits");
        let is_known = known.has(&state.images, promises);
        let count = events * NEW_PER_EVENT * if is_known { KNOWN_FACTOR } else { 1 };
        if !context.prng.chance(wanted.min(count), count) {
            continue;
        }
        cuts.opened += 1;
        let what = format!("crash state {number} ({:?} cut after {})", state.kind, state.cut_after);
        let opened = judge_state(stage, state, context, depth, promises)
            .map_err(|why| format!("{what}: {why}"))?;
        if !is_known {
            known.note(opened);
        }
    }
    Ok(())
}

/// Looks at one state.
///
/// # Errors
/// What was wrong.
pub(super) fn judge_state(
    stage: &Stage,
    state: CrashState,
    context: &mut Context<'_>,
    depth: Depth,
    promises: u64,
) -> Differs<Opened> {
    let CrashState { images, cut_after, .. } = state;
    let (generation, promised) = (newest_generation(&images), stage.promised_at(cut_after));
    if generation < promised {
        return Err(format!("shows commit {generation}, and {promised} was promised"));
    }
    let array = SimArray::of_images(images.clone());
    array.note_reads();
    judge::is_clean_but_for(&array, &stage.ahead)?;
    let fs = stage.shape.open(&array, context.prng.next_u64()).map_err(|error| not_open(&error))?;
    let contents = judge_files(stage, &fs, cut_after, context)?;
    let snapshots = judge_snapshots(stage, &fs, cut_after, context)?;
    if array.event_count() > 0 {
        judge::is_clean_but_for(&array, &stage.ahead)
            .map_err(|why| format!("once opened: {why}"))?;
    }
    let opened = Opened { reads: array.take_reads(), images, generation: promises };
    ask_others(stage, &fs, &opened.images, context)?;
    let goes_on = context.sampled(context.config.go_on_one_in);
    if depth == Depth::First && goes_on {
        let ahead = Ahead::all(&opened.images);
        let after = stage.after_cut(array, fs, cut_after, &contents, &snapshots, ahead);
        go_on(after, context).map_err(|why| format!("gone on with: {why}"))?;
    }
    Ok(opened)
}

/// What each file shows, which it may.
fn judge_files(
    stage: &Stage,
    fs: &Filesystem,
    cut_after: usize,
    context: &mut Context<'_>,
) -> Differs<Vec<Rc<[u8]>>> {
    let mut contents: Vec<Rc<[u8]>> = Vec::new();
    for (number, file) in stage.files.iter().enumerate() {
        let read = if context.prng.chance(1, 2) { read_opened } else { read_closed };
        let what = |why: String| format!("file {number} ({:?}): {why}", file.kind);
        let bytes = read(fs, file.id).map_err(what)?;
        let shown = file.history.judge(&bytes, cut_after).map_err(what)?;
        let report = &mut context.report;
        report.between += u64::from(shown.is_between);
        report.mixed += u64::from(shown.is_mixed);
        report.torn_blocks += shown.torn_blocks;
        contents.push(bytes.into());
    }
    Ok(contents)
}

/// The snapshots that there are, each of which shows what it was made of.
fn judge_snapshots(
    stage: &Stage,
    fs: &Filesystem,
    cut_after: usize,
    context: &mut Context<'_>,
) -> Differs<Vec<Snapshot>> {
    let infos = fs.subvolumes().map_err(|error| error.to_string())?;
    let mut there = Vec::new();
    for snapshot in &stage.snapshots {
        let name = snapshot_name(snapshot.number);
        let is_it = |path: &Vec<u8>| path.as_slice() == name.as_bytes();
        let info = infos.iter().find(|info| !info.deleted && info.path.as_ref().is_some_and(is_it));
        let Some(info) = info else {
            match snapshot.must_be_there(cut_after) {
                true => return Err(format!("{name} is not there")),
                false => continue,
            }
        };
        for (number, (file, expect)) in stage.files.iter().zip(&snapshot.contents).enumerate() {
            let what = |why: String| format!("file {number} ({:?}) in {name}: {why}", file.kind);
            let bytes = read_closed(fs, InodeId { root: info.id, inode: file.id.inode });
            let bytes = bytes.map_err(what)?;
            if bytes != **expect {
                let first = bytes.iter().zip(&**expect).position(|(have, expect)| have != expect);
                let lens = (bytes.len(), expect.len());
                return Err(what(format!("is another than it was: {lens:?} bytes, at {first:?}")));
            }
            context.report.snapshot_files += 1;
        }
        there.push(snapshot.clone());
    }
    Ok(there)
}

/// Has the kernel and `btrfs check` look at some states.
fn ask_others(
    stage: &Stage,
    fs: &Filesystem,
    images: &[Image],
    context: &mut Context<'_>,
) -> Differs {
    // Of what is written in place the kernel may read the other copy.
    let can_be_compared = !stage.shape.has_loose_copies();
    if context.sampled(context.config.mount_one_in) && can_be_compared {
        let ours = view::of(fs)?;
        if let Some(theirs) = context.outside.seen_by_kernel(images) {
            let differences = theirs.differences(&ours, &Compare::same_filesystem());
            if !differences.is_empty() {
                return Err(format!("the kernel | the engine: {differences}"));
            }
            context.report.mounted += 1;
        }
    }
    if context.sampled(context.config.check_one_in) && context.outside.check(images) {
        context.report.checked += 1;
    }
    Ok(())
}

/// The engine works on what a cut left, and all of that may be cut, too.
fn go_on(mut stage: Stage, context: &mut Context<'_>) -> Differs {
    context.report.went_on += 1;
    if stage.shape.has_data_copies() {
        // Copies may be different where nothing says which is right, until it is written again.
        for file in 0..stage.files.len() {
            if stage.files[file].kind == Kind::InPlace {
                let op = Op::File { file, op: FileOp::Rewrite };
                stage.step(&op, &mut context.report)?;
            }
        }
    }
    let mut generator = Generator::new(Prng::new(context.prng.next_u64()));
    for _ in 0..context.prng.below(OPERATIONS) {
        let op = stage.with_scene(|scene| generator.next(scene));
        stage.step(&op, &mut context.report)?;
    }
    let file = context.prng.index(stage.files.len());
    let op = Op::File { file, op: FileOp::Fsync };
    let outcome = stage.step(&op, &mut context.report)?;
    if outcome != Outcome::Done {
        return Err(format!("{outcome:?}: {op:?}"));
    }
    if context.sampled(context.config.nested_one_in) {
        context.report.cut_again += 1;
        judge_window(&stage, context, Depth::AfterACut)
            .map_err(|why| format!("cut again: {why}"))?;
    }
    stage.step(&Op::Reopen, &mut context.report)?;
    judge::is_clean_but_for(&stage.array, &stage.ahead)
}
