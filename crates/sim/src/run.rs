//! A run from its seed to its report.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ubtrfs_testkit::Prng;

use crate::compare::{self, Differs};
use crate::config::Config;
use crate::cuts;
use crate::faults::{self, Window};
use crate::generate::Generator;
use crate::judge::{self, Outside};
use crate::op::Op;
use crate::report::Report;
use crate::world::{Outcome, World, durable};

/// Everything is compared after so many operations at the latest.
const COMPARE_EVERY: u64 = 500;
/// After there was no space, so many operations remove.
const REMOVALS_WHEN_FULL: u32 = 20;
/// Commits of a run without crash states that are passed to `btrfs check`: one in so many.
const CHECK_COMMIT_ONE_IN: u64 = 200;

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
        Err(panic) => panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| "a panic".to_owned()),
    };
    Err(Failure { config: *config, operation, what })
}

struct Run {
    config: Config,
    world: World,
    generator: Generator,
    prng: Prng,
    outside: Outside,
    report: Report,
    window: Window,
    removals: u32,
}

impl Run {
    fn new(config: Config) -> Differs<Self> {
        let mut prng = Prng::new(config.seed);
        let world = World::make(&config);
        let generator = Generator::new(Prng::new(prng.next_u64()), config.commit_one_in);
        compare::all(&world.fs, &world.model)?;
        let window = window(&world);
        Ok(Self {
            config,
            world,
            generator,
            prng,
            outside: Outside::new(),
            report: Report { runs: 1, ..Report::default() },
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
        self.one(&Op::Reopen)?;
        self.compare_all()?;
        self.outside.check(&self.world.device.image());
        Ok(self.report)
    }

    fn compare_all(&mut self) -> Differs {
        self.report.compared += 1;
        compare::all(&self.world.fs, &self.world.model)
    }

    fn one(&mut self, op: &Op) -> Differs {
        let own = self.world.commits.len();
        let outcome = self.world.step(op)?;
        let count = self.report.operations.entry(name(op)).or_default();
        match outcome {
            Outcome::Done(effect) => {
                count.0 += 1;
                self.window.operations.push((op.clone(), effect.made));
            }
            Outcome::Refused => count.1 += 1,
            Outcome::NoSpace => {
                self.report.no_space += 1;
                if op.is_removal() {
                    return Err(format!("no space to remove or commit: {op:?}"));
                }
                self.removals = REMOVALS_WHEN_FULL;
            }
            Outcome::DeviceFailed => return Err(format!("the device failed, unasked: {op:?}")),
        }
        if matches!(op, Op::Commit | Op::Reopen) {
            return self.committed(*op == Op::Reopen);
        }
        let own = self.world.commits.len() - own;
        self.report.own_commits += u64::try_from(own).expect("a count fits");
        Ok(())
    }

    fn committed(&mut self, reopen: bool) -> Differs {
        self.report.commits += 1;
        judge::is_clean(&self.world.device.image())?;
        if self.config.crash_states > 0 {
            cuts::judge_all(
                &self.world,
                &self.config,
                &self.outside,
                &mut self.prng,
                &mut self.report,
            )?;
        } else if self.config.check_one_in > 0 && self.prng.chance(1, CHECK_COMMIT_ONE_IN) {
            self.report.checked += u64::from(self.outside.check(&self.world.device.image()));
        }
        let one_in = self.config.fault_one_in;
        if one_in > 0 && self.prng.chance(1, one_in) {
            faults::repeat(&self.window, &self.outside, &mut self.prng, &mut self.report)?;
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

fn window(world: &World) -> Window {
    let nameless = world.model.nodes().filter(|(_, node)| node.nlink == 0);
    Window {
        base: world.device.image(),
        model: durable(&world.model),
        operations: Vec::new(),
        orphans: nameless.map(|(id, _)| id).collect(),
    }
}

fn name(op: &Op) -> &'static str {
    match op {
        Op::Create { .. } => "create",
        Op::Symlink { .. } => "symlink",
        Op::Link { .. } => "link",
        Op::CreateUnlinked { .. } => "create without a name",
        Op::Unlink { .. } => "unlink",
        Op::Rmdir { .. } => "rmdir",
        Op::Rename { .. } => "rename",
        Op::Evict { .. } => "evict",
        Op::SetAttributes { .. } => "set attributes",
        Op::SetXattr { .. } => "set xattr",
        Op::RemoveXattr { .. } => "remove xattr",
        Op::Append { .. } => "append",
        Op::CreateSubvolume { .. } => "create subvolume",
        Op::Snapshot { .. } => "snapshot",
        Op::SetReadOnly { .. } => "set read-only",
        Op::DeleteSubvolume { .. } => "delete subvolume",
        Op::CleanDeleted { .. } => "clean deleted",
        Op::SetDefaultSubvolume { .. } => "set default subvolume",
        Op::Commit => "commit",
        Op::Reopen => "reopen",
    }
}
