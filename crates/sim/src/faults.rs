//! Devices that fail: the filesystem stops with the first cause and goes on being read; what opens
//! again is the last durable state, or the one whose superblock had just been written.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use ubtrfs_engine::{Error, Reservation};
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::{Effect, Fault, Image, Request, SimDevice};
use ubtrfs_testkit::model::{Id, Model};

use crate::compare::{self, Differs};
use crate::judge::{self, Outside};
use crate::op::Op;
use crate::report::Report;
use crate::world::{self, Outcome, World};

/// One commit's operations, with what each made, from the state that they began in.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) base: Image,
    pub(crate) model: Model,
    pub(crate) operations: Vec<(Op, Option<Id>)>,
    /// What had no name, and was still there.
    pub(crate) orphans: BTreeSet<Id>,
}

/// Repeats a window's operations and its commit on a device of which one request fails.
///
/// # Errors
/// What was wrong.
pub(crate) fn repeat(
    window: &Window,
    outside: &Outside,
    prng: &mut Prng,
    report: &mut Report,
) -> Differs {
    let device = SimDevice::of_image(window.base.clone());
    let mut world = World::open(device, window.model.clone(), prng.next_u64())?;
    let request = if prng.chance(1, 4) { Request::Flush } else { Request::Write };
    let after = match request {
        Request::Flush => prng.below(2),
        // Most windows have a few dozen.
        _ => {
            let most = 1 << prng.below(7);
            prng.below(most)
        }
    };
    let effect = match prng.below(3) {
        0 => Effect::Tear { sectors: prng.index(64) },
        _ => Effect::Fail,
    };
    let fault = Fault { request, after, effect, stays: prng.chance(1, 2) };
    world.device.plan(fault);
    let what = format!("{fault:?}");
    run_until_stopped(&mut world, window).map_err(|why| format!("{what}: {why}"))?;
    report.faults += 1;
    // Either the commit failed, or the fault never came or struck data alone.
    let next = world.model.clone();
    let next_durable = world::durable(&next);
    if let Err(error) = world.fs.commit() {
        stays_aborted(&world, &error).map_err(|why| format!("{what}: {why}"))?;
        report.aborted += 1;
    }
    compare::all(&world.fs, &next).map_err(|why| format!("{what}: while open: {why}"))?;
    let device = Arc::new(SimDevice::of_image(world.device.image()));
    let fs = world::open(&device, 1).map_err(|why| format!("{what}: {why}"))?;
    let generation = fs.superblock().generation.get();
    let durable = if generation > first_generation(&world) {
        world.commits.get(&generation).map_or_else(|| vec![next_durable], Clone::clone)
    } else {
        vec![window.model.clone()]
    };
    let mut last = Ok(());
    for model in &durable {
        last = compare::all(&fs, model);
        if last.is_ok() {
            break;
        }
    }
    last.map_err(|why| format!("{what}: opened again: {why}"))?;
    judge::is_clean(&device.image()).map_err(|why| format!("{what}: {why}"))?;
    if prng.chance(1, 20) {
        outside.check(&device.image());
    }
    Ok(())
}

/// The generation of the state that the window began in.
fn first_generation(world: &World) -> u64 {
    world.promised.first().map_or(0, |(_, generation)| *generation)
}

/// Does what was done in the window, until the device fails.
fn run_until_stopped(world: &mut World, window: &Window) -> Differs {
    let mut numbers: HashMap<Id, Id> = HashMap::new();
    let mut roots: HashMap<u64, u64> = HashMap::new();
    for (op, made) in &window.operations {
        // What had no name when the window began goes when the filesystem is opened again.
        if op.mentions().iter().any(|id| window.orphans.contains(id)) {
            continue;
        }
        let op = op.translated(|id| {
            let root = roots.get(&id.root).copied().unwrap_or(id.root);
            numbers.get(&id).copied().unwrap_or(Id { root, ..id })
        });
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
            Outcome::DeviceFailed => return Ok(()),
        }
    }
    Ok(())
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
