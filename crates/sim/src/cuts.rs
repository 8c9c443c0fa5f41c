//! Power cuts: whatever arrived, the filesystem opens, is clean, and shows the last durable state.
//!
//! A commit leaves thousands of states, which differ in blocks that nobody reads yet. A state is
//! only opened where it differs from all that were opened in a block that was read ([`Known`]), or
//! where chance wants it, which keeps the argument honest.

use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::{CrashPlan, CrashState, SimArray};

use crate::compare::Differs;
use crate::config::Config;
use crate::judge::{self, Outside};
use crate::known::{Known, Opened};
use crate::nested;
use crate::report::Report;
use crate::world::{self, Lenience, World, not_open};

/// On one opened state in so many the engine goes on.
const GO_ON_ONE_IN: u64 = 40;
/// States of each window in which chance says of each sector whether it arrived.
const MIXED_PER_WINDOW: usize = 4;
/// Of a commit of so many writes every prefix is made, and of a window of half as many every part;
/// of longer ones about as many.
const ALL_STATES_MAX: usize = 400;

/// Looks at the states that cuts may leave since the world's recording began.
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
    let recording = world.array.recording();
    let plan = plan(recording.request_counts().0);
    let states = recording.clone().states(plan, Prng::new(prng.next_u64()));
    // About as many as wanted, whatever they are.
    let count = u64::try_from(6 * recording.event_count().max(1)).expect("a count fits");
    let mut known = Known::default();
    for (number, state) in states.enumerate() {
        let cuts = report.cuts.entry(state.kind).or_default();
        cuts.states += 1;
        let shown = known.generation_of(&state.images);
        let is_right = shown.is_some_and(|shown| shown >= world.promised_at(state.cut_after));
        if is_right && !prng.chance(config.crash_states, count) {
            continue;
        }
        cuts.opened += 1;
        let what = format!("crash state {number} ({:?} cut after {})", state.kind, state.cut_after);
        let seen = judge(world, state, config, outside, prng, report)
            .map_err(|why| format!("{what}: {why}"))?;
        if shown.is_none() {
            known.note(seen);
        }
    }
    Ok(())
}

/// Every state of a recording of so many writes, if they are not too many.
pub(crate) fn plan(writes: usize) -> CrashPlan {
    CrashPlan {
        prefix_one_in: u64::try_from(writes.div_ceil(ALL_STATES_MAX).max(1)).expect("a count fits"),
        parts_per_window: 2 * ALL_STATES_MAX,
        mixed_per_window: MIXED_PER_WINDOW,
    }
}

fn judge(
    world: &World,
    state: CrashState,
    config: &Config,
    outside: &Outside,
    prng: &mut Prng,
    report: &mut Report,
) -> Differs<Opened> {
    let CrashState { images, cut_after, .. } = state;
    let generation = world::newest_generation(&images);
    let promised = world.promised_at(cut_after);
    if generation < promised {
        return Err(format!("shows commit {generation}, and {promised} was promised"));
    }
    let array = SimArray::of_images(images.clone());
    array.note_reads();
    judge::is_clean_but_for(&array, &world.ahead)?;
    let fs = world::open(&array, world.shape(), config.seed).map_err(|error| not_open(&error))?;
    let committed = world
        .commits
        .get(&generation)
        .ok_or_else(|| format!("shows commit {generation}, which nobody made"))?;
    let model = committed.shown(&fs, Lenience::Nothing)?;
    if array.event_count() > 0 {
        // What the opening itself made durable.
        judge::is_clean_but_for(&array, &world.ahead)
            .map_err(|why| format!("once opened: {why}"))?;
    }
    report.new_states += u64::from(generation > promised);
    report.inside_states += u64::from(!committed.models.contains(&model));
    drop(fs);
    let opened = Opened { reads: array.take_reads(), images, generation };
    let images = &opened.images;
    let sampled = |one_in: u64, prng: &mut Prng| one_in > 0 && prng.chance(1, one_in);
    if sampled(config.mount_one_in, prng) && outside.mount(images, &model) {
        report.mounted += 1;
        report.checked += 1;
    }
    if sampled(config.check_one_in, prng) && outside.check(images) {
        report.checked += 1;
    }
    if prng.chance(1, GO_ON_ONE_IN) {
        report.went_on += 1;
        if sampled(config.nested_one_in, prng) {
            nested::cut_again(world, images, model, config, outside, prng, report)
                .map_err(|why| format!("cut again: {why}"))?;
        } else {
            nested::go_on(world, images, model, outside, prng, report)
                .map_err(|why| format!("gone on with: {why}"))?;
        }
    }
    Ok(opened)
}
