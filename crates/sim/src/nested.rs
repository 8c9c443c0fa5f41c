//! What comes after a power cut: the engine opens what is there, mends it, goes on with what was
//! begun, works, and commits; and the power is cut in the middle of that, too.

use std::collections::BTreeSet;
use std::rc::Rc;

use ubtrfs_ondisk::features::CompatRo;
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::{Image, SimArray};
use ubtrfs_testkit::model::{Id, Model};

use crate::compare::{self, Differs};
use crate::config::Config;
use crate::cuts;
use crate::generate::Generator;
use crate::judge::{self, Outside};
use crate::op::{Op, to_engine};
use crate::report::Report;
use crate::superblocks;
use crate::trees::Remembered;
use crate::world::{Outcome, World, durable};

/// Operations after a cut.
const OPERATIONS: usize = 12;
/// The same where all of it is cut again, at most.
const NESTED_OPERATIONS_MAX: usize = 4;
/// One free space tree in so many is left behind before the filesystem is opened.
const STALE_ONE_IN: u64 = 4;
/// Of the states that cuts of cuts leave so many times fewer are cut again, or opened by chance.
const NESTED_FACTOR: u64 = 4;

/// The engine works on what the cut left, finishes what was begun, and commits.
pub(crate) fn go_on(
    world: &World,
    images: &[Image],
    model: Model,
    outside: &Outside,
    prng: &mut Prng,
    report: &mut Report,
) -> Differs {
    let array = SimArray::of_images(images.to_vec());
    let mut world = World::open(array, model, Rc::clone(world.shape()), prng.next_u64())?;
    let changed = first_changes(&mut world)?;
    work(&mut world, OPERATIONS, prng)?;
    if prng.chance(1, 2) {
        world.finish_deletions()?;
    }
    world.step(&Op::Commit)?;
    orphans_are_gone(&world, &changed)?;
    compare::all(&world.fs, &world.model)?;
    world.reopen()?;
    compare::all(&world.fs, &world.model)?;
    judge::is_clean(&world.array)?;
    if prng.chance(1, 10) && outside.check(&world.array.images()) {
        report.checked += 1;
    }
    Ok(())
}

/// As [`go_on`], where everything that is written from the opening to the commit may be cut, too.
pub(crate) fn cut_again(
    world: &World,
    images: &[Image],
    model: Model,
    config: &Config,
    outside: &Outside,
    prng: &mut Prng,
    report: &mut Report,
) -> Differs {
    let shape = Rc::clone(world.shape());
    let (mut images, mut model) = (images.to_vec(), model);
    let options = &shape.options;
    // With a block group tree, nobody can write who does not know the other.
    let can_be_stale = options.free_space_tree && !options.block_group_tree;
    let is_stale = can_be_stale && prng.chance(1, STALE_ONE_IN);
    if is_stale {
        let world = World::open(SimArray::of_images(images), model, shape.clone(), prng.next_u64());
        (images, model) = leave_free_space_tree_behind(world?, prng)?;
    }
    let seed = prng.next_u64();
    let array = SimArray::of_images(images);
    // A full filesystem has no room for another tree, and is opened without.
    let may_stay_stale = shape.is_tight;
    let mut world = World::open_recorded(array, model, shape, seed)?;
    if !may_stay_stale && superblocks::has_stale_free_space_tree(&world.array.images()) {
        return Err("the free space tree is not made anew".to_owned());
    }
    let before = Remembered::of(world.fs.volume())?;
    let nested = &mut report.nested;
    nested.all += 1;
    nested.with_orphans += u64::from(!before.orphans.is_empty());
    nested.half_deleted += u64::from(!before.deleted.is_empty());
    nested.stale += u64::from(is_stale);
    let changed = first_changes(&mut world)?;
    if prng.chance(1, 2) {
        let count = prng.index(NESTED_OPERATIONS_MAX);
        work(&mut world, count, prng)?;
    }
    if prng.chance(2, 3) {
        world.finish_deletions()?;
    }
    world.step(&Op::Commit)?;
    orphans_are_gone(&world, &changed)?;
    judge::is_clean(&world.array)?;
    superblocks::are_right(&world)?;
    let nested_one_in = config.nested_one_in * NESTED_FACTOR;
    let crash_states = (config.crash_states / NESTED_FACTOR).max(1);
    let config = Config { nested_one_in, crash_states, ..*config };
    // Those of cuts that are nested deeper are counted there.
    let own = |report: &Report| report.opened_state_count() - report.nested.opened;
    let before = own(report);
    cuts::judge_all(&world, &config, outside, prng, report)?;
    report.nested.opened += own(report) - before;
    Ok(())
}

/// Lets a writer that knows no free space tree change the filesystem.
fn leave_free_space_tree_behind(mut world: World, prng: &mut Prng) -> Differs<(Vec<Image>, Model)> {
    let valid = CompatRo::FREE_SPACE_TREE_VALID;
    let tree = CompatRo::FREE_SPACE_TREE;
    world.step(&Op::Commit)?;
    let mut images = world.array.images();
    superblocks::change_compat_ro(&mut images, tree | valid, CompatRo(0));
    let (model, shape) = (durable(&world.model), Rc::clone(world.shape()));
    let mut world = World::open(SimArray::of_images(images), model, shape, prng.next_u64())?;
    work(&mut world, OPERATIONS, prng)?;
    world.step(&Op::Commit)?;
    let mut images = world.array.images();
    superblocks::change_compat_ro(&mut images, CompatRo(0), tree);
    Ok((images, durable(&world.model)))
}

fn work(world: &mut World, operations: usize, prng: &mut Prng) -> Differs {
    let mut generator = Generator::new(Prng::new(prng.next_u64()), u64::MAX, world.shape());
    let mut is_full = false;
    for _ in 0..operations {
        let op = generator.next(&world.model, is_full);
        is_full = world.step(&op)? == Outcome::NoSpace;
    }
    Ok(())
}

/// Changes something in each subvolume that can be changed: what had no name in it goes with that.
/// Returns which were.
fn first_changes(world: &mut World) -> Differs<BTreeSet<u64>> {
    let roots: Vec<u64> = world.model.subvolumes().keys().copied().collect();
    let mut changed = BTreeSet::new();
    for root in roots {
        let (name, value) = (b"user.first".to_vec(), b"change".to_vec());
        let op = Op::SetXattr { id: Id::root_of(root), name, value };
        if matches!(world.step(&op)?, Outcome::Done(_)) {
            changed.insert(root);
        }
    }
    Ok(changed)
}

/// In subvolumes that were changed since the opening, and committed, no orphan item is left but of
/// what this session took the name of.
fn orphans_are_gone(world: &World, changed: &BTreeSet<u64>) -> Differs {
    if world.shape().is_tight {
        // There may be no room yet.
        return Ok(());
    }
    let now = Remembered::of(world.fs.volume())?;
    for (root, orphans) in now.orphans.iter().filter(|(root, _)| changed.contains(*root)) {
        let is_old = |inode: &&u64| {
            let id = Id { root: *root, inode: **inode };
            world.model.node(id).is_none_or(|node| node.nlink > 0)
        };
        if let Some(inode) = orphans.iter().find(is_old) {
            let id = to_engine(Id { root: *root, inode: *inode });
            return Err(format!("{id} is remembered as without a name, after the first change"));
        }
    }
    Ok(())
}
