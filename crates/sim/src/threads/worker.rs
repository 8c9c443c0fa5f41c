//! A thread that works: in its own subvolume beside a model, and in the shared one.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use ubtrfs_engine::{Error, NewInode, RenameMode, Reservation};
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::model::Model;

use super::moment::{PROGRESS, pair_name};
use super::{DIRECTORIES, Stage, TOKENS, inode_in};
use crate::compare::Differs;
use crate::generate::Generator;
use crate::op::Op;
use crate::world::{Outcome, World};

/// Operations that are proposed for each that stays in the worker's own subvolume.
const PROPOSALS_MAX: usize = 10_000;
/// One step in so many is followed by a commit.
const COMMIT_ONE_IN: u64 = 30;

/// What a worker did, and when.
pub(super) struct Log {
    pub(super) steps: Vec<Step>,
    /// When it said how far it is, after each step.
    pub(super) marks: Vec<Span>,
    pub(super) pairs: Vec<Pair>,
    /// Operations that engine and model refused.
    pub(super) refused: u64,
    /// Tokens that it moved, and that were not where it looked.
    pub(super) moved: (u64, u64),
    /// Its subvolumes, of all times.
    own: BTreeSet<u64>,
}

impl Log {
    /// Whether a subvolume is the worker's.
    pub(super) fn owns(&self, root: u64) -> bool {
        self.own.contains(&root)
    }
}

/// An operation, and the model after it.
pub(super) struct Step {
    pub(super) op: Op,
    pub(super) after: Model,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) began: u64,
    pub(super) ended: u64,
}

/// Two files that were made under one handle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    /// How far the worker was.
    pub(super) done: u64,
    pub(super) began: u64,
    pub(super) ended: u64,
}

pub(super) struct Worker<'a> {
    stage: &'a Stage,
    number: usize,
    world: World,
    generator: Generator,
    prng: Prng,
    log: Log,
}

impl<'a> Worker<'a> {
    pub(super) fn new(stage: &'a Stage, number: usize) -> Self {
        let seed = stage.seed.wrapping_add(u64::try_from(number + 1).expect("a count fits") << 32);
        let mut prng = Prng::new(seed);
        let shape = Rc::new(stage.shape.clone());
        let generator = Generator::new(Prng::new(prng.next_u64()), u64::MAX, &shape);
        let (array, fs, model) = (stage.array.clone(), stage.fs.clone(), stage.base.clone());
        let log = Log {
            steps: Vec::new(),
            marks: Vec::new(),
            pairs: Vec::new(),
            refused: 0,
            moved: (0, 0),
            own: BTreeSet::from([stage.own[number]]),
        };
        let world = World::unrecorded(array, fs, model, shape, seed);
        Self { stage, number, world, generator, prng, log }
    }

    pub(super) fn work(mut self, operations: u64) -> Differs<Log> {
        for done in 1..=operations {
            if !self.stage.is_at_work() {
                break;
            }
            self.stage.keep_pace();
            self.step()?;
            self.mark(done).map_err(|error| format!("step {done} told: {error}"))?;
            if self.prng.chance(1, 2) {
                self.pair(done).map_err(|error| format!("pair of step {done}: {error}"))?;
            }
            if self.prng.chance(1, 2) {
                self.move_token().map_err(|error| format!("token: {error}"))?;
            }
            if self.prng.chance(1, COMMIT_ONE_IN) {
                self.stage.commit()?;
            }
            self.stage.done.fetch_add(1, Ordering::SeqCst);
        }
        Ok(self.log)
    }

    /// An operation in the worker's own subvolumes.
    fn step(&mut self) -> Differs {
        let op = self.propose()?;
        match self.world.step(&op)? {
            Outcome::Done(effect) => self.log.own.extend(effect.made.map(|made| made.root)),
            Outcome::Refused => self.log.refused += 1,
            other => return Err(format!("{other:?}: {op:?}")),
        }
        self.log.steps.push(Step { op, after: self.world.model.clone() });
        Ok(())
    }

    fn propose(&mut self) -> Differs<Op> {
        for _ in 0..PROPOSALS_MAX {
            let op = self.generator.next(&self.world.model, false);
            let is_of_all = matches!(
                op,
                Op::CleanDeleted { .. }
                    | Op::SetDefaultSubvolume { .. }
                    | Op::GrowDevice { .. }
                    | Op::Commit
                    | Op::Reopen
            );
            let ids = op.mentions();
            if !is_of_all && !ids.is_empty() && ids.iter().all(|id| self.log.owns(id.root)) {
                return Ok(op);
            }
        }
        Err("no operation is the worker's own".to_owned())
    }

    /// Says in two files, under one handle, how far it is.
    fn mark(&mut self, done: u64) -> Result<(), Error> {
        let began = self.stage.now();
        let shared = &self.stage.shared;
        let mut handle = self.stage.fs.begin(Reservation::items(8))?;
        for file in shared.progress[self.number] {
            handle.set_xattr(inode_in(shared.root, file), PROGRESS, &done.to_le_bytes())?;
        }
        drop(handle);
        self.log.marks.push(Span { began, ended: self.stage.now() });
        Ok(())
    }

    /// Makes two files under one handle.
    fn pair(&mut self, done: u64) -> Result<(), Error> {
        let began = self.stage.now();
        let shared = &self.stage.shared;
        let name = pair_name(self.number, done);
        let new = NewInode::new(0o100_644, self.stage.fs.runtime().clock.now());
        let two = Reservation::create(0).and(Reservation::create(0));
        let mut handle = self.stage.fs.begin(two)?;
        for directory in &shared.directories[..2] {
            handle.create(inode_in(shared.root, *directory), name.as_bytes(), &new)?;
        }
        drop(handle);
        self.log.pairs.push(Pair { done, began, ended: self.stage.now() });
        Ok(())
    }

    /// Moves a token that others may move at the same time.
    fn move_token(&mut self) -> Result<(), Error> {
        let shared = &self.stage.shared;
        let name = format!("token {}", self.prng.index(TOKENS));
        let from = self.prng.index(DIRECTORIES);
        let to = (from + 1 + self.prng.index(DIRECTORIES - 1)) % DIRECTORIES;
        let [from, to] = [from, to].map(|place| inode_in(shared.root, shared.directories[place]));
        let (name, mode) = (name.as_bytes(), RenameMode::NoReplace);
        match self.stage.fs.rename(from, name, to, name, mode) {
            Ok(()) => self.log.moved.0 += 1,
            Err(Error::NotFound { .. }) => self.log.moved.1 += 1,
            Err(error) => return Err(error),
        }
        Ok(())
    }
}
