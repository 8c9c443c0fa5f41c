//! Power cuts: whatever arrived, the filesystem opens, is clean, and shows the last durable state.
//!
//! A commit leaves thousands of states, which differ in blocks that nobody reads yet. What opening,
//! comparing and checking did with one state they do with another that is the same in every block
//! they read: so a state is only opened where it differs from all that were opened in such a block,
//! or where chance wants it, which keeps the argument honest.

use std::rc::Rc;

use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::{BlockSet, CrashPlan, CrashState, Image, SimArray};
use ubtrfs_testkit::model::Model;

use crate::compare::{self, Differs};
use crate::config::Config;
use crate::generate::Generator;
use crate::judge::{self, Outside};
use crate::op::Op;
use crate::report::Report;
use crate::world::{self, Lenience, Outcome, World, not_open};

/// On one opened state in so many the engine goes on, with so many operations and a commit.
const GO_ON_ONE_IN: u64 = 40;
const GO_ON_OPERATIONS: usize = 12;
/// States of each window in which chance says of each sector whether it arrived.
const MIXED_PER_WINDOW: usize = 4;
/// Of a commit of so many writes every prefix is made, and of a window of half as many every part;
/// of longer ones about as many.
const ALL_STATES_MAX: usize = 400;
/// Opened states that others are held against.
const OPENED_KEPT_MAX: usize = 8;

/// A state that was opened, and found right.
struct Opened {
    images: Vec<Image>,
    /// Blocks that were read by who opened, compared and checked it.
    reads: Vec<BlockSet>,
    generation: u64,
}

impl Opened {
    fn is_same(&self, images: &[Image]) -> bool {
        let mut both = self.images.iter().zip(images).zip(&self.reads);
        both.all(|((ours, theirs), reads)| ours.is_same_in(theirs, reads))
    }
}

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
    let writes = recording.request_counts().0;
    let plan = CrashPlan {
        prefix_one_in: u64::try_from(writes.div_ceil(ALL_STATES_MAX).max(1)).expect("a count fits"),
        parts_per_window: 2 * ALL_STATES_MAX,
        mixed_per_window: MIXED_PER_WINDOW,
    };
    let states = recording.clone().states(plan, Prng::new(prng.next_u64()));
    // About as many as wanted, whatever they are.
    let count = u64::try_from(6 * recording.event_count().max(1)).expect("a count fits");
    let mut opened: Vec<Opened> = Vec::new();
    for (number, state) in states.enumerate() {
        let cuts = report.cuts.entry(state.kind).or_default();
        cuts.states += 1;
        let promised = world.promised_at(state.cut_after);
        let known = opened.iter().find(|known| known.is_same(&state.images));
        let is_right = known.is_some_and(|known| known.generation >= promised);
        if is_right && !prng.chance(config.crash_states, count) {
            continue;
        }
        cuts.opened += 1;
        let what = format!("crash state {number} ({:?} cut after {})", state.kind, state.cut_after);
        let is_new = known.is_none();
        let seen = judge(world, state, config, outside, prng, report)
            .map_err(|why| format!("{what}: {why}"))?;
        if is_new && opened.len() < OPENED_KEPT_MAX {
            opened.push(seen);
        }
    }
    Ok(())
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
    let array = SimArray::of_images(images.clone());
    array.note_reads();
    let fs = world::open(&array, world.shape(), config.seed).map_err(|error| not_open(&error))?;
    let generation = fs.superblock().generation.get();
    let promised = world.promised_at(cut_after);
    if generation < promised {
        return Err(format!("shows commit {generation}, and {promised} was promised"));
    }
    let committed = world
        .commits
        .get(&generation)
        .ok_or_else(|| format!("shows commit {generation}, which nobody made"))?;
    let model = committed.shown(&fs, Lenience::Nothing)?;
    judge::is_clean(&array)?;
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
        go_on(world, images, model, prng, outside, report)?;
    }
    Ok(opened)
}

/// The engine works on what the cut left, finishes what was begun, and commits.
fn go_on(
    world: &World,
    images: &[Image],
    model: Model,
    prng: &mut Prng,
    outside: &Outside,
    report: &mut Report,
) -> Differs {
    let array = SimArray::of_images(images.to_vec());
    let mut world = World::open(array, model, Rc::clone(world.shape()), prng.next_u64())?;
    let mut generator = Generator::new(Prng::new(prng.next_u64()), u64::MAX, world.shape());
    let mut is_full = false;
    for _ in 0..GO_ON_OPERATIONS {
        let op = generator.next(&world.model, is_full);
        is_full = world.step(&op)? == Outcome::NoSpace;
    }
    if prng.chance(1, 2) {
        world.finish_deletions()?;
    }
    world.step(&Op::Commit)?;
    compare::all(&world.fs, &world.model)?;
    world.reopen()?;
    compare::all(&world.fs, &world.model)?;
    judge::is_clean(&world.array)?;
    if prng.chance(1, 10) && outside.check(&world.array.images()) {
        report.checked += 1;
    }
    report.went_on += 1;
    Ok(())
}
