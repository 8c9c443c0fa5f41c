//! Power cuts: whatever arrived, the filesystem opens, is clean, and shows the last durable state.

use std::sync::Arc;

use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::{CrashKind, CrashPlan, CrashState, Recording, SimDevice};
use ubtrfs_testkit::model::Model;

use crate::compare::{self, Differs};
use crate::config::Config;
use crate::generate::Generator;
use crate::judge::{self, Outside};
use crate::op::Op;
use crate::report::Report;
use crate::world::{self, Outcome, World};

/// On one state in so many the engine goes on, with so many operations and a commit.
const GO_ON_ONE_IN: u64 = 40;
const GO_ON_OPERATIONS: usize = 12;

/// Looks at states that cuts may leave since the world's recording began.
///
/// # Errors
/// What was wrong with which state.
pub(crate) fn judge_all(
    world: &World,
    config: &Config,
    outside: &Outside,
    prng: &mut Prng,
    report: &mut Report,
) -> Differs {
    let recording = world.device.recording();
    let plan = plan(&recording, config.crash_states);
    for (number, state) in recording.states(plan, Prng::new(prng.next_u64())).enumerate() {
        let what = format!("crash state {number} ({:?} cut after {})", state.kind, state.cut_after);
        judge(world, state, config, outside, prng, report)
            .map_err(|why| format!("{what}: {why}"))?;
    }
    Ok(())
}

/// About as many states as wanted, half of them after writes.
fn plan(recording: &Recording, wanted: usize) -> CrashPlan {
    let writes = recording.event_count() - recording.flush_count();
    let prefix_one_in = (2 * writes).div_ceil(wanted.max(1)).max(1);
    CrashPlan {
        prefix_one_in: u64::try_from(prefix_one_in).expect("a count fits"),
        torn_per_window: (wanted / 2).div_ceil(recording.flush_count().max(1)),
    }
}

fn judge(
    world: &World,
    state: CrashState,
    config: &Config,
    outside: &Outside,
    prng: &mut Prng,
    report: &mut Report,
) -> Differs {
    let CrashState { image, cut_after, kind } = state;
    let device = Arc::new(SimDevice::of_image(image.clone()));
    let fs = world::open(&device, config.seed)?;
    let generation = fs.superblock().generation.get();
    let promised = world.promised.iter().rev().find(|(events, _)| *events <= cut_after);
    let (_, promised) = promised.ok_or("nothing was promised")?;
    if generation < *promised {
        return Err(format!("shows commit {generation}, and {promised} was promised"));
    }
    let candidates = world
        .commits
        .get(&generation)
        .ok_or_else(|| format!("shows commit {generation}, which nobody made"))?;
    let model = shown(candidates, |model| compare::all(&fs, model))?;
    judge::is_clean(&image)?;
    match kind {
        CrashKind::Prefix => report.cut_states += 1,
        CrashKind::Torn => report.torn_states += 1,
    }
    report.new_states += u64::from(generation > *promised);
    drop(fs);
    let sampled = |one_in: u64, prng: &mut Prng| one_in > 0 && prng.chance(1, one_in);
    if sampled(config.mount_one_in, prng) && outside.mount(&image, model) {
        report.mounted += 1;
        report.checked += 1;
    }
    if sampled(config.check_one_in, prng) && outside.check(&image) {
        report.checked += 1;
    }
    if prng.chance(1, GO_ON_ONE_IN) {
        go_on(SimDevice::of_image(image), model.clone(), prng, outside)?;
        report.went_on += 1;
    }
    Ok(())
}

/// The candidate that is shown.
fn shown(candidates: &[Model], compare: impl Fn(&Model) -> Differs) -> Differs<&Model> {
    let mut last = Err("no candidate".to_owned());
    for model in candidates {
        last = compare(model).map(|()| model);
        if last.is_ok() {
            break;
        }
    }
    last
}

/// The engine works on what the cut left, and commits.
fn go_on(device: SimDevice, model: Model, prng: &mut Prng, outside: &Outside) -> Differs {
    let mut world = World::open(device, model, prng.next_u64())?;
    let mut generator = Generator::new(Prng::new(prng.next_u64()), u64::MAX);
    let mut is_full = false;
    for _ in 0..GO_ON_OPERATIONS {
        let op = generator.next(&world.model, is_full);
        is_full = world.step(&op)? == Outcome::NoSpace;
    }
    world.step(&Op::Commit)?;
    compare::all(&world.fs, &world.model)?;
    world.reopen()?;
    compare::all(&world.fs, &world.model)?;
    judge::is_clean(&world.device.image())?;
    if prng.chance(1, 4) {
        outside.check(&world.device.image());
    }
    Ok(())
}
