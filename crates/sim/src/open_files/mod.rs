//! Files that are open through memory, and power cuts.
//!
//! Beside each file stands all that it was after each operation ([`history`]). The engine's page
//! cache, delayed allocation and writeback decide what of that reaches the devices, and when; a
//! promise, an fsync or a sync, says from when on nothing older may be seen. After each operation the
//! file is what it must be; in each state that a cut leaves it is something that it was since the
//! promise, block by block, and nothing else ever: bytes say who wrote them ([`fill`]).
//!
//! Everything runs in one thread, so that a seed determines all of it. Threads at one file are not
//! covered.

mod faults;
mod fill;
mod held;
mod history;
mod judge;
mod op;
mod report;
mod shape;
mod stage;

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::Image;

use self::judge::Depth;
use self::op::{Generator, Op};
pub use self::report::OpenFilesReport;
use self::shape::FilesShape;
use self::stage::Stage;
use crate::compare::Differs;
use crate::judge::{Outside, is_clean};
use crate::run::words_of;

/// What a run does. All else follows from the seed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenFilesConfig {
    /// Determines everything.
    pub seed: u64,
    /// Operations.
    pub operations: u64,
    /// After one operation in so many the states are looked at that cuts since the last time may leave.
    pub window_one_in: u64,
    /// States that are opened then, about. 0 for none.
    pub crash_states: u64,
    /// One opened state in so many is passed to `btrfs check`. 0 for none.
    pub check_one_in: u64,
    /// One opened state in so many is mounted by the kernel. 0 for none.
    pub mount_one_in: u64,
    /// After one window in so many the engine works on devices that fail. 0 for never.
    pub fault_one_in: u64,
    /// On one opened state in so many the engine goes on. 0 for none.
    pub go_on_one_in: u64,
    /// Of these, in one of so many what follows is cut as well. 0 for none.
    pub nested_one_in: u64,
}

impl OpenFilesConfig {
    /// The command that repeats a run.
    pub fn command(&self) -> String {
        format!(
            "cargo run --release -p ubtrfs-sim -- --open-files --seed {} --operations {} \
             --commit-one-in {} --crash-states {} --check-one-in {} --mount-one-in {} \
             --fault-one-in {} --go-on-one-in {} --nested-one-in {}",
            self.seed,
            self.operations,
            self.window_one_in,
            self.crash_states,
            self.check_one_in,
            self.mount_one_in,
            self.fault_one_in,
            self.go_on_one_in,
            self.nested_one_in
        )
    }
}

/// What went wrong, and how to see it again.
#[derive(Clone, Debug)]
pub struct OpenFilesFailure {
    /// The run.
    pub config: OpenFilesConfig,
    /// The operation after which it was seen, counted from 1.
    pub operation: u64,
    /// What was seen.
    pub what: String,
}

impl fmt::Display for OpenFilesFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}, operation {}: {}", self.config.seed, self.operation, self.what)?;
        write!(f, "again: {}", self.config.command())
    }
}

impl std::error::Error for OpenFilesFailure {}

/// What all judges of a run share.
struct Context<'a> {
    config: &'a OpenFilesConfig,
    outside: &'a Outside,
    prng: Prng,
    report: OpenFilesReport,
}

impl Context<'_> {
    /// Whether this is one of so many; never of none.
    fn sampled(&mut self, one_in: u64) -> bool {
        one_in > 0 && self.prng.chance(1, one_in)
    }
}

/// Runs what the configuration says.
///
/// # Errors
/// The first thing that went wrong, panics included.
pub fn run_open_files(config: &OpenFilesConfig) -> Result<OpenFilesReport, OpenFilesFailure> {
    let mut operation = 0;
    let result = catch_unwind(AssertUnwindSafe(|| all(config, &mut operation)));
    let result = result.unwrap_or_else(|panic| Err(words_of(&*panic)));
    result.map_err(|what| OpenFilesFailure { config: *config, operation, what })
}

fn all(config: &OpenFilesConfig, operation: &mut u64) -> Differs<OpenFilesReport> {
    let mut prng = Prng::new(config.seed);
    let shape = Rc::new(FilesShape::of_seed(config.seed));
    let mut stage = Stage::make(&shape, config.seed)?;
    let mut generator = Generator::new(Prng::new(prng.next_u64()));
    let (metadata, data) = shape.shape.profile_names();
    let shapes = BTreeMap::from([((shape.shape.lens_bytes.len(), metadata, data), 1)]);
    let report = OpenFilesReport { runs: 1, shapes, ..OpenFilesReport::default() };
    let outside = Outside::new();
    let mut context = Context { config, outside: &outside, prng, report };
    while *operation < config.operations {
        *operation += 1;
        let op = stage.with_scene(|scene| generator.next(scene));
        stage.step(&op, &mut context.report)?;
        if context.sampled(config.window_one_in) {
            end_window(&mut stage, &mut context)?;
        }
    }
    stage.step(&Op::Sync, &mut context.report)?;
    end_window(&mut stage, &mut context)?;
    stage.step(&Op::Reopen, &mut context.report)?;
    is_clean(&stage.array)?;
    let images = stage.array.images();
    context.report.digest = images.iter().map(Image::digest).fold(0, u64::wrapping_add);
    context.report.checked += u64::from(outside.check(&images));
    Ok(context.report)
}

/// Looks at what cuts may leave of the operations since the last time.
fn end_window(stage: &mut Stage, context: &mut Context<'_>) -> Differs {
    let fails = context.sampled(context.config.fault_one_in) && !stage.shape.has_loose_copies();
    if fails {
        stage.step(&Op::Sync, &mut context.report)?;
    }
    if context.config.crash_states > 0 {
        judge::judge_window(stage, context, Depth::First)?;
    }
    if fails {
        faults::repeat(stage, context)?;
    }
    stage.begin_recording();
    Ok(())
}
