//! A run from its seed to its report.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::Image;
use ubtrfs_testkit::model::{Id, New, TOP_LEVEL};

use crate::compare::{self, Differs};
use crate::config::{Config, Shape};
use crate::cuts;
use crate::faults::{self, Window};
use crate::generate::Generator;
use crate::judge::{self, Outside};
use crate::op::{Data, Effect, Op};
use crate::report::Report;
use crate::superblocks;
use crate::world::{Outcome, World, durable};

/// Everything is compared after so many operations at the latest.
const COMPARE_EVERY: u64 = 500;
/// After there was no space, so many operations remove at most.
const REMOVALS_WHEN_FULL: u64 = 20;
/// Commits of a run without crash states that are passed to `btrfs check`: one in so many.
const CHECK_COMMIT_ONE_IN: u64 = 200;

/// Operations that empty a filesystem, at most.
const CLEARING_STEPS_MAX: u64 = 5000;
/// What is made again in an emptied filesystem, at most.
const REFILL_FILES: u64 = 8;
const REFILL_BYTES: usize = 64 << 10;

/// What went wrong, and how to see it again.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The run.
    pub config: Config,
    /// The operation after which it was seen, counted from 0.
    pub operation: u64,
    /// What was seen.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}, operation {}: {}", self.config.seed, self.operation, self.what)?;
        write!(f, "again: {}", self.config.command())
    }
}

impl std::error::Error for Failure {}

/// Runs what the configuration says.
///
/// # Errors
/// The first thing that went wrong, panics included.
pub fn run(config: &Config) -> Result<Report, Failure> {
    let mut operation = 0;
    let result = catch_unwind(AssertUnwindSafe(|| {
        Run::new(*config).and_then(|run| run.all(&mut operation))
    }));
    let what = match result {
        Ok(Ok(report)) => return Ok(report),
        Ok(Err(what)) => what,
        Err(panic) => words_of(&*panic),
    };
    Err(Failure { config: *config, operation, what })
}

/// What a panic said.
pub(crate) fn words_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "a panic".to_owned())
}

struct Run {
    config: Config,
    world: World,
    generator: Generator,
    prng: Prng,
    outside: Outside,
    report: Report,
    window: Window,
    /// What may be done before something is removed again.
    removals: u64,
}

impl Run {
    fn new(config: Config) -> Differs<Self> {
        let mut prng = Prng::new(config.seed);
        let shape = Rc::new(config.shape());
        let world = World::make(Rc::clone(&shape), config.seed);
        let generator = Generator::new(Prng::new(prng.next_u64()), config.commit_one_in, &shape);
        compare::all(&world.fs, &world.model)?;
        let window = window(&world);
        Ok(Self {
            config,
            world,
            generator,
            prng,
            outside: Outside::new(),
            report: report_of(&shape),
            window,
            removals: 0,
        })
    }

    fn all(mut self, operation: &mut u64) -> Differs<Report> {
        while *operation < self.config.operations {
            let op = self.generator.next(&self.world.model, self.removals > 0);
            self.removals = self.removals.saturating_sub(1);
            self.one(&op)?;
            *operation += 1;
            if operation.is_multiple_of(COMPARE_EVERY) {
                self.compare_all()?;
            }
        }
        self.one(&Op::Commit)?;
        if self.world.shape().is_tight {
            self.empty()?;
        }
        self.one(&Op::Reopen)?;
        self.world.finish_deletions()?;
        self.one(&Op::Commit)?;
        self.compare_all()?;
        let images = self.world.array.images();
        self.report.digest = images.iter().map(Image::digest).fold(0, u64::wrapping_add);
        self.report.checked += u64::from(self.outside.check(&images));
        Ok(self.report)
    }

    /// Removes all that there is, for which a full filesystem must have room, and fills a file.
    fn empty(&mut self) -> Differs {
        for _ in 0..CLEARING_STEPS_MAX {
            let Some(op) = self.generator.clearing(&self.world.model) else { break };
            self.one(&op)?;
        }
        if let Some(op) = self.generator.clearing(&self.world.model) {
            return Err(format!("it cannot be emptied: {op:?}"));
        }
        self.world.finish_deletions()?;
        // What was freed can be used after the commit.
        self.one(&Op::Commit)?;
        self.one(&Op::Reopen)?;
        let usage = self.world.fs.usage().map_err(|error| error.to_string())?;
        let data = usage.spaces.iter().filter(|space| space.flags.contains(BlockGroupFlags::DATA));
        let data_bytes: u64 = data.map(|space| space.used_bytes).sum();
        if data_bytes > 0 {
            return Err(format!("{data_bytes} bytes of data are in use, and there is no file"));
        }
        // Reserves leave little of a small filesystem, and where there ever was a snapshot at times
        // nothing: how much fits is not judged, only that it is right.
        let new = self.generator.new_file();
        self.report.refilled += u64::from(refill(&mut self.world, &new)? == REFILL_FILES);
        self.report.emptied += 1;
        Ok(())
    }

    fn compare_all(&mut self) -> Differs {
        self.report.compared += 1;
        Ok(compare::all(&self.world.fs, &self.world.model)?)
    }

    fn one(&mut self, op: &Op) -> Differs {
        let own = self.world.commits.len();
        let before = self.world.model.clone();
        let outcome = self.world.step(op)?;
        let count = self.report.operations.entry(op.name()).or_default();
        match outcome {
            Outcome::Done(effect) => {
                count.done += 1;
                self.window.operations.push((op.clone(), effect.made));
            }
            Outcome::Refused => count.refused += 1,
            Outcome::NoSpace => {
                count.no_space += 1;
                count.no_space_inside += u64::from(self.world.model != before);
                if op.is_removal() {
                    return Err(format!("no space to remove or commit: {op:?}"));
                }
                // It is tried again in repetitions: there may be room for a part of it.
                self.window.operations.push((op.clone(), None));
                self.removals = 1 + self.prng.below(REMOVALS_WHEN_FULL);
            }
            Outcome::DeviceFailed | Outcome::Stopped => {
                return Err(format!("the device failed, unasked: {op:?}"));
            }
        }
        if matches!(op, Op::Commit | Op::Reopen) {
            return self.committed(*op == Op::Reopen);
        }
        let own = self.world.commits.len() - own;
        if own > 0 {
            self.report.own_commits += u64::try_from(own).expect("a count fits");
            self.judge_own_commit().map_err(|why| format!("after a commit of its own: {why}"))?;
        }
        Ok(())
    }

    /// What lies on the devices after the engine committed by itself, in the middle of an operation
    /// or before it: what was written since must not have touched it. The last of several is seen.
    /// There is one in a few commits that are asked for, so that all of them can be looked at.
    fn judge_own_commit(&mut self) -> Differs {
        self.report.own_judged += 1;
        judge::are_clean(&self.world.array.images())
    }

    fn committed(&mut self, reopen: bool) -> Differs {
        self.report.commits += 1;
        judge::are_clean(&self.world.array.images())?;
        superblocks::are_right(&self.world)?;
        if self.config.crash_states > 0 {
            cuts::judge_all(
                &self.world,
                &self.config,
                &self.outside,
                &mut self.prng,
                &mut self.report,
            )?;
        } else if self.config.check_one_in > 0 && self.prng.chance(1, CHECK_COMMIT_ONE_IN) {
            self.report.checked += u64::from(self.outside.check(&self.world.array.images()));
        }
        self.window.requests = self.world.array.recording().request_counts();
        let one_in = self.config.fault_one_in;
        if one_in > 0 && self.prng.chance(1, one_in) {
            let shape = Rc::clone(self.world.shape());
            faults::repeat(&self.window, &shape, &self.outside, &mut self.prng, &mut self.report)?;
        }
        if reopen {
            self.world.reopen()?;
            self.compare_all()?;
        }
        self.world.begin_recording();
        self.window = window(&self.world);
        Ok(())
    }
}

/// Makes files until there is no space, or enough; returns how many have all their data.
fn refill(world: &mut World, new: &New) -> Differs<u64> {
    for number in 0..REFILL_FILES {
        let dir = Id::root_of(TOP_LEVEL);
        let op = Op::Create { dir, name: format!("new {number}").into_bytes(), new: *new };
        let id = match world.step(&op)? {
            Outcome::Done(Effect { made: Some(id), .. }) => id,
            Outcome::NoSpace => return Ok(number),
            other => return Err(format!("{other:?}: {op:?}")),
        };
        let data = Data { offset: 0, len: REFILL_BYTES, seed: number, repeats: false };
        match world.step(&Op::Write { id, data })? {
            Outcome::Done(_) => {}
            Outcome::NoSpace => return Ok(number),
            other => return Err(format!("{other:?}: writing into what was made")),
        }
    }
    Ok(REFILL_FILES)
}

fn report_of(shape: &Shape) -> Report {
    let (metadata, data) = shape.profile_names();
    Report {
        runs: 1,
        shapes: BTreeMap::from([((shape.lens_bytes.len(), metadata, data), 1)]),
        tight_runs: u64::from(shape.is_tight),
        ..Report::default()
    }
}

fn window(world: &World) -> Window {
    let nameless = world.model.nodes().filter(|(_, node)| node.nlink == 0);
    Window {
        base: world.array.images(),
        model: durable(&world.model),
        operations: Vec::new(),
        requests: (0, 0),
        orphans: nameless.map(|(id, _)| id).collect(),
    }
}
