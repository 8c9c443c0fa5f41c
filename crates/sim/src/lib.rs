//! Random operations on the engine, on a simulated device, beside a model of a filesystem.
//!
//! After each operation, model and engine agree. After each power cut that the device can suffer,
//! the filesystem opens, is clean, and shows the last durable state. When the device fails, the
//! filesystem stops with the first cause, and the last durable state is intact. A seed determines
//! all of a run: what failed, fails again. Runs with several threads are apart, as their seed
//! determines less.
//!
//! The crate is for tests: what goes wrong in a run comes out as a [`Failure`] with the command
//! that repeats it.
#![forbid(unsafe_code)]

mod compare;
mod config;
mod cuts;
mod faults;
mod generate;
mod judge;
mod known;
mod nested;
mod op;
mod open_files;
mod opening;
mod report;
mod run;
mod superblocks;
mod threads;
mod trees;
mod view;
mod world;

pub use config::Config;
pub use op::{Data, Effect, How, Last, Op};
pub use open_files::{OpenFilesConfig, OpenFilesFailure, OpenFilesReport, run_open_files};
pub use opening::{OpeningConfig, OpeningReport, judge_opening};
pub use report::{Count, Cuts, Faults, Nested, Report};
pub use run::{Failure, run};
pub use superblocks::change_compat_ro;
pub use threads::{ThreadsConfig, ThreadsReport, run_threads};
