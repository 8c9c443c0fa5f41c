//! Open files on devices that fail: who has a file open of which data is lost is told so once by an
//! fsync, and nothing is lost that was promised.

use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::{CrashKind, CrashPlan, CrashState, Effect, Fault, Request, SimArray};

use super::Context;
use super::judge::{Depth, judge_state};
use super::op::{FileOp, Generator, Op};
use super::stage::{Outcome, Stage};
use crate::compare::Differs;
use crate::judge::Ahead;
use crate::world::not_open;

/// Operations on a device that is to fail.
const OPERATIONS: u64 = 16;
/// Writes that go well before one fails, at most.
const WRITES_BEFORE_MAX: u64 = 60;
/// ... where it is one of data.
const DATA_WRITES_BEFORE_MAX: u64 = 4;
/// More than files have.
const FLUSHED_BYTES: u64 = 1 << 20;
/// States after a power cut that follows a failure.
const CUTS: usize = 4;

/// Works on what is there, on devices of which a write or flush fails; all that is there is durable.
///
/// # Errors
/// What was wrong.
pub(super) fn repeat(stage: &Stage, context: &mut Context<'_>) -> Differs {
    let array = SimArray::of_images(stage.array.images());
    let seed = context.prng.next_u64();
    let fs = stage.shape.open(&array, seed).map_err(|error| not_open(&error))?;
    let there: Vec<_> = stage.snapshots_there().cloned().collect();
    let contents = stage.contents();
    let mut stage = stage.after_cut(array, fs, usize::MAX, &contents, &there, Vec::new());
    let plan = Plan::new(&mut context.prng, &stage);
    stage.may_fail = true;
    context.report.faults += 1;
    work(&mut stage, &plan, context).map_err(|why| format!("{plan:?}: {why}"))?;
    stage.array.forget_faults();
    context.report.struck += u64::from(!stage.array.strikes().is_empty());
    after_failure(&mut stage, context).map_err(|why| format!("after {plan:?}: {why}"))
}

/// What goes wrong, and when.
#[derive(Clone, Copy, Debug)]
struct Plan {
    fault: Fault,
    /// Before the operation of this number; else from the beginning on.
    before: u64,
    /// It strikes what is dirty of this file as that goes to the medium, no commit.
    is_of_data: Option<usize>,
}

impl Plan {
    fn new(prng: &mut Prng, stage: &Stage) -> Self {
        let device_count = stage.shape.shape.lens_bytes.len();
        let is_of_data = prng.chance(2, 3).then(|| prng.index(stage.files.len()));
        let (request, effect) = match prng.below(5) {
            0 if is_of_data.is_none() => (Request::Flush, Effect::Fail),
            0..=2 => (Request::Write, Effect::Fail),
            _ => (Request::Write, Effect::Tear { sectors: prng.index(16) }),
        };
        let most = match request {
            _ if is_of_data.is_some() => DATA_WRITES_BEFORE_MAX,
            Request::Flush => 4,
            _ => WRITES_BEFORE_MAX,
        };
        let device = (device_count > 1 && prng.chance(1, 2)).then(|| prng.index(device_count));
        let stays = prng.chance(1, if is_of_data.is_some() { 2 } else { 4 });
        let fault = Fault { device, request, after: prng.below(most), effect, stays };
        let before = if is_of_data.is_some() { prng.below(OPERATIONS) } else { 0 };
        Self { fault, before, is_of_data }
    }
}

/// Works until the filesystem takes no more, then asks each file what was lost.
fn work(stage: &mut Stage, plan: &Plan, context: &mut Context<'_>) -> Differs {
    let mut generator = Generator::of_open(Prng::new(context.prng.next_u64()));
    for number in 0..OPERATIONS {
        if number == plan.before {
            let is_over = begin_failing(stage, plan, &mut generator, context)?;
            if is_over {
                return Ok(());
            }
        }
        let op = stage.with_scene(|scene| generator.next(scene));
        if step(stage, &op, context)? == Outcome::Stopped {
            context.report.stopped += 1;
            return Ok(());
        }
    }
    for file in 0..stage.files.len() {
        let op = Op::File { file, op: FileOp::Fsync };
        let outcome = step(stage, &op, context)?;
        let strikes = stage.array.strikes().len();
        let again = match outcome {
            Outcome::Stopped => Outcome::Stopped,
            _ => step(stage, &op, context)?,
        };
        if again == Outcome::Stopped {
            context.report.stopped += 1;
            return Ok(());
        }
        if again == Outcome::Failed && stage.array.strikes().len() == strikes {
            return Err(format!("file {file}: told of the same failure twice"));
        }
        context.report.told += u64::from(outcome == Outcome::Failed && again == Outcome::Done);
    }
    Ok(())
}

/// Plans the fault, behind something dirty, which it strikes on its way to the medium. Returns whether the
/// filesystem takes no more.
fn begin_failing(
    stage: &mut Stage,
    plan: &Plan,
    generator: &mut Generator,
    context: &mut Context<'_>,
) -> Differs<bool> {
    let Some(file) = plan.is_of_data else {
        stage.array.plan(plan.fault);
        return Ok(false);
    };
    let op = stage.with_scene(|scene| generator.write(file, scene));
    step(stage, &op, context)?;
    stage.array.plan(plan.fault);
    let flush = FileOp::Flush { range: 0..FLUSHED_BYTES };
    let all = [Op::FlushFiles, Op::WriteBackDue, Op::File { file, op: flush }];
    let outcome = step(stage, &all[context.prng.index(all.len())], context)?;
    if plan.fault.stays {
        // Who tries again once meets it again; commits are to go well.
        stage.array.forget_faults();
    }
    context.report.stopped += u64::from(outcome == Outcome::Stopped);
    Ok(outcome == Outcome::Stopped)
}

/// Does an operation; who makes a file durable must hear of what was lost of it.
fn step(stage: &mut Stage, op: &Op, context: &mut Context<'_>) -> Differs<Outcome> {
    let outcome = stage.step(op, &mut context.report)?;
    if let Op::File { file, op: FileOp::Fsync | FileOp::Msync { .. } } = op {
        let file = &mut stage.files[*file];
        if outcome == Outcome::Done && file.is_lost {
            return Err(format!("data was lost, and nobody was told: {op:?}"));
        }
        file.is_lost = false;
    }
    Ok(outcome)
}

/// What opens again, with or without the power going, too, shows what was promised.
fn after_failure(stage: &mut Stage, context: &mut Context<'_>) -> Differs {
    let images = stage.array.images();
    stage.ahead = Ahead::all(&images);
    let cut_after = stage.array.event_count();
    let whole = CrashState { images, cut_after, kind: CrashKind::Prefix };
    let plan = CrashPlan { prefix_one_in: u64::MAX, parts_per_window: 2, mixed_per_window: 1 };
    let prng = Prng::new(context.prng.next_u64());
    let states: Vec<_> = stage.array.recording().states(plan, prng).collect();
    // The last ones are those of the failure.
    let last = states.into_iter().rev().take(CUTS);
    for state in [whole].into_iter().chain(last) {
        let what = format!("{:?} cut after {}", state.kind, state.cut_after);
        judge_state(stage, state, context, Depth::AfterACut, 0)
            .map_err(|why| format!("{what}: {why}"))?;
    }
    Ok(())
}
