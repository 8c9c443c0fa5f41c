//! Devices that fail: the filesystem stops with the first cause, or the operation fails and all
//! else goes on; what opens again is the last durable state, or the one whose superblock had just
//! been written. Nothing that was damaged is taken for what it is not.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::time::Duration;

use ubtrfs_engine::{Error, Filesystem, Reservation};
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::{CrashPlan, Effect, Fault, Image, Request, SimArray, Strike};
use ubtrfs_testkit::model::{Id, Model};

use crate::compare::{self, Differs, Wrong};
use crate::config::{Shape, has_copies};
use crate::judge::{self, Outside};
use crate::op::Op;
use crate::report::{Faults, Report};
use crate::world::{self, Committed, Lenience, Outcome, World, not_open};

/// One commit's operations, with what each made, from the state that they began in.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) base: Vec<Image>,
    pub(crate) model: Model,
    pub(crate) operations: Vec<(Op, Option<Id>)>,
    /// How many writes and flushes there were.
    pub(crate) requests: (usize, usize),
    /// What had no name, and was still there.
    pub(crate) orphans: BTreeSet<Id>,
}

/// What goes wrong in a repetition.
#[derive(Clone, Copy, Debug)]
struct Plan {
    name: &'static str,
    fault: Fault,
    /// It may come as soon as the filesystem is opened.
    is_at_open: bool,
}

impl Plan {
    fn new(window: &Window, prng: &mut Prng) -> Self {
        let device_count = window.base.len();
        let (writes, flushes) = window.requests;
        let (name, request, effect) = match prng.below(12) {
            0..=1 => ("write fails", Request::Write, Effect::Fail),
            2..=3 => ("write torn", Request::Write, Effect::Tear { sectors: prng.index(64) }),
            4 => ("flush fails", Request::Flush, Effect::Fail),
            5..=6 => ("read fails", Request::Read, Effect::Fail),
            7..=8 => ("read damaged", Request::Read, Effect::Corrupt { byte: prng.index(1 << 16) }),
            9..=10 => {
                ("write damaged", Request::Write, Effect::Corrupt { byte: prng.index(1 << 16) })
            }
            _ => {
                let request = [Request::Read, Request::Write, Request::Flush][prng.index(3)];
                ("delay", request, Effect::Delay(Duration::from_micros(prng.below(300))))
            }
        };
        let below = |prng: &mut Prng, count: usize| {
            prng.below(u64::try_from(count.max(1)).expect("a count fits"))
        };
        let after = match request {
            // The last ones are those of superblocks.
            Request::Write if prng.chance(1, 3) => {
                let last = writes.saturating_sub(1 + prng.index(4 * device_count));
                u64::try_from(last).expect("a count fits")
            }
            Request::Write => below(prng, writes),
            Request::Flush => below(prng, flushes),
            // Most windows have a few dozen.
            Request::Read => {
                let most = 1 << prng.below(7);
                prng.below(most)
            }
        };
        let stays = name != "write damaged" && prng.chance(1, 2);
        let is_on_one = device_count > 1 && prng.chance(1, 2);
        let device = is_on_one.then(|| prng.index(device_count));
        let fault = Fault { device, request, after, effect, stays };
        Self { name, fault, is_at_open: request == Request::Read && prng.chance(1, 3) }
    }

    fn is_damage(&self) -> bool {
        matches!(self.fault.effect, Effect::Corrupt { .. })
    }

    /// What may then be seen of it in what the filesystem says.
    fn lenience(&self) -> Lenience {
        match (self.is_damage(), self.fault.request) {
            (true, Request::Write) => Lenience::Damage,
            (true, _) => Lenience::UnprotectedBytes,
            (false, _) => Lenience::Nothing,
        }
    }

    /// Whether nobody may notice what struck: a delay; or a single request of which there is
    /// another copy to be read.
    fn must_go_unnoticed(&self, shape: &Shape, strikes: &[Strike]) -> bool {
        let (metadata, data) = shape.profiles();
        let has_copies = has_copies(metadata) && has_copies(data);
        match self.fault.effect {
            Effect::Delay(_) => true,
            _ if self.fault.request != Request::Read || self.fault.stays => false,
            _ => has_copies && !strikes.iter().any(Strike::is_of_superblock),
        }
    }
}

/// Repeats a window's operations and its commit on devices of which one request fails.
///
/// # Errors
/// What was wrong.
pub(crate) fn repeat(
    window: &Window,
    shape: &Rc<Shape>,
    outside: &Outside,
    prng: &mut Prng,
    report: &mut Report,
) -> Differs {
    let plan = Plan::new(window, prng);
    let mut count = Faults { runs: 1, ..Faults::default() };
    judge(window, shape, &plan, outside, prng, &mut count)
        .map_err(|why| format!("{plan:?}: {why}"))?;
    *report.faults.entry(plan.name).or_default() += count;
    Ok(())
}

fn judge(
    window: &Window,
    shape: &Rc<Shape>,
    plan: &Plan,
    outside: &Outside,
    prng: &mut Prng,
    count: &mut Faults,
) -> Differs {
    let array = SimArray::of_images(window.base.clone());
    if plan.is_at_open {
        array.plan(plan.fault);
    }
    let fs = match world::open(&array, shape, prng.next_u64()) {
        Ok(fs) => fs,
        Err(error) => return refused(window, shape, plan, &array, &error, count),
    };
    let mut world = World::with(array, fs, window.model.clone(), Rc::clone(shape), 0);
    world.lenience = plan.lenience();
    if !plan.is_at_open {
        world.array.plan(plan.fault);
    }
    let end = run_until_stopped(&mut world, window)?;
    count.inside += end.inside;
    let next = world.model.clone();
    world.array.suspend_faults(false);
    let committed = world.fs.commit();
    world.array.suspend_faults(true);
    let strikes = world.array.strikes();
    count.struck += u64::from(!strikes.is_empty());
    if let Err(error) = &committed {
        stays_aborted(&world, error)?;
        count.aborted += 1;
    }
    let must_abort = |strike: &Strike| {
        let fails = matches!(strike.effect, Effect::Fail | Effect::Tear { .. });
        let is_of_superblock = strike.request == Request::Write && strike.is_of_superblock();
        fails && (strike.request == Request::Flush || is_of_superblock)
    };
    if committed.is_ok() && strikes.iter().any(must_abort) {
        return Err(format!("it goes on after {strikes:?}"));
    }
    if committed.is_ok() && end.failed == 0 {
        count.unnoticed += u64::from(!strikes.is_empty());
    } else if plan.must_go_unnoticed(shape, &strikes) {
        return Err(format!("{} operations failed, {committed:?}, {strikes:?}", end.failed));
    }
    if !end.is_stopped {
        let lenience = world.lenience;
        compare::all_but(&world.fs, &next, |wrong| lenience.allows(wrong))
            .map_err(|wrong| format!("while open: {}", String::from(wrong)))?;
    }
    let images = world.array.images();
    if plan.name == "write damaged" {
        return after_damage(&world, &next, &images, &strikes);
    }
    after_failure(&world, window, &next, &images)?;
    if committed.is_err() {
        // The power goes, too: what no flush made durable may be lost.
        let plan = CrashPlan { prefix_one_in: u64::MAX, parts_per_window: 1, mixed_per_window: 1 };
        let states = world.array.recording().states(plan, Prng::new(prng.next_u64()));
        for state in states.filter(|state| state.cut_after >= world.last_promise()) {
            count.cut += 1;
            after_failure(&world, window, &next, &state.images)
                .map_err(|why| format!("{:?} cut after {}: {why}", state.kind, state.cut_after))?;
        }
    }
    if prng.chance(1, 20) {
        outside.check(&images);
    }
    Ok(())
}

/// What did not open has an error that says why, and opens when the fault is over.
fn refused(
    window: &Window,
    shape: &Rc<Shape>,
    plan: &Plan,
    array: &SimArray,
    error: &Error,
    count: &mut Faults,
) -> Differs {
    let strikes = array.strikes();
    count.struck += 1;
    if strikes.is_empty() || plan.must_go_unnoticed(shape, &strikes) {
        return Err(format!("{} with {strikes:?}", not_open(error)));
    }
    if !matches!(error, Error::Volume(_) | Error::Corrupt(_)) {
        return Err(format!("not the device's error: {error}"));
    }
    array.forget_faults();
    let fs = world::open(array, shape, 1).map_err(|error| not_open(&error))?;
    Ok(compare::all(&fs, &window.model)?)
}

/// What opens again is the state of the last commit that was durable.
fn after_failure(world: &World, window: &Window, next: &Model, images: &[Image]) -> Differs {
    let array = SimArray::of_images(images.to_vec());
    let fs = world::open(&array, world.shape(), 1).map_err(|error| not_open(&error))?;
    let generation = fs.superblock().generation.get();
    let promised = world.promised_at(usize::MAX);
    if generation < promised {
        return Err(format!("shows commit {generation}, and {promised} was promised"));
    }
    let of_next = Committed::of(next);
    let of_window = Committed::of(&window.model);
    let committed = match generation > world.promised_at(0) {
        true => world.commits.get(&generation).unwrap_or(&of_next),
        false => &of_window,
    };
    let shown = committed.shown(&fs, world.lenience);
    shown.map_err(|why| format!("opened again: {why}"))?;
    judge::is_clean(&array)
}

/// Of what was damaged on its way to the device, nothing is shown for what it is not; where there
/// are other copies, all is shown.
fn after_damage(world: &World, next: &Model, images: &[Image], strikes: &[Strike]) -> Differs {
    let array = SimArray::of_images(images.to_vec());
    let (metadata, data) = world.shape().profiles();
    let is_of_superblock = strikes.iter().any(Strike::is_of_superblock);
    let is_safe = |profile| has_copies(profile) && !is_of_superblock;
    let fs = match world::open(&array, world.shape(), 1) {
        Ok(fs) => fs,
        Err(Error::Volume(_) | Error::Corrupt(_)) if !is_safe(metadata) => return Ok(()),
        Err(error) => return Err(not_open(&error)),
    };
    let model = shown_commit(world, next, &fs)?;
    let may_be = |wrong: &Wrong| match wrong {
        Wrong::Other(_) => false,
        Wrong::UnprotectedBytes(_) => true,
        Wrong::Unreadable(_) => !(is_safe(metadata) && is_safe(data)),
    };
    let mut wrong = Err("no state".to_owned());
    for model in &model.models {
        wrong = compare::all_but(&fs, model, may_be).map_err(String::from);
        if wrong.is_ok() {
            break;
        }
    }
    // The checker, which knows nothing of the engine, must see what the engine could not read.
    let unreadable = match wrong {
        Ok(0) => false,
        Ok(_) => model.models.iter().any(|model| {
            compare::all_but(&fs, model, |wrong| matches!(wrong, Wrong::UnprotectedBytes(_)))
                .is_err()
        }),
        Err(why) if model.inside.is_none() => return Err(format!("opened again: {why}")),
        Err(_) => false,
    };
    match unreadable && judge::is_clean(&array).is_ok() {
        true => Err("the checker finds nothing where the engine cannot read".to_owned()),
        false => Ok(()),
    }
}

fn shown_commit(world: &World, next: &Model, fs: &Filesystem) -> Differs<Committed> {
    let generation = fs.superblock().generation.get();
    Ok(match world.commits.get(&generation) {
        Some(committed) => committed.clone(),
        None => Committed::of(next),
    })
}

/// How a window's operations went.
#[derive(Clone, Copy, Default)]
struct End {
    /// Operations that failed for the device's sake.
    failed: u64,
    /// Of these, those that left a part of what they do.
    inside: u64,
    /// The last of them stopped the filesystem.
    is_stopped: bool,
}

/// Does what was done in the window, until the filesystem takes no more.
fn run_until_stopped(world: &mut World, window: &Window) -> Differs<End> {
    let mut numbers: HashMap<Id, Id> = HashMap::new();
    let mut roots: HashMap<u64, u64> = HashMap::new();
    let mut end = End::default();
    for (op, made) in &window.operations {
        // What had no name when the window began goes when the filesystem is opened again.
        if op.mentions().iter().any(|id| window.orphans.contains(id)) {
            continue;
        }
        let op = op.translated(|id| {
            let root = roots.get(&id.root).copied().unwrap_or(id.root);
            numbers.get(&id).copied().unwrap_or(Id { root, ..id })
        });
        let before = world.model.clone();
        match world.step(&op)? {
            Outcome::Done(effect) => {
                if let (Some(made), Some(id)) = (made, effect.made) {
                    numbers.insert(*made, id);
                    // A subvolume's inodes keep their numbers, and it gets another.
                    roots.insert(made.root, id.root);
                }
            }
            // What is made of it later is refused by both.
            Outcome::Refused | Outcome::NoSpace => {}
            Outcome::DeviceFailed => {
                end.failed += 1;
                end.inside += u64::from(world.model != before);
            }
            Outcome::Stopped => return Ok(End { failed: end.failed + 1, is_stopped: true, ..end }),
        }
    }
    Ok(end)
}

/// Every later change is refused with the first cause.
fn stays_aborted(world: &World, error: &Error) -> Differs {
    let Error::Aborted { first_cause, .. } = error else {
        return Err(format!("a failed commit says {error}"));
    };
    let first_cause = first_cause.to_string();
    for result in [world.fs.commit(), world.fs.begin(Reservation::items(1)).map(drop)] {
        match result {
            Err(Error::Aborted { first_cause: again, .. }) if again.to_string() == first_cause => {}
            other => return Err(format!("{other:?} after the failure {first_cause}")),
        }
    }
    Ok(())
}
