//! Benchmarks: what users run, and what the cost model promises, timed beside the kernel and
//! `mkfs.btrfs` in one run.
//!
//! A [`Workload`] makes one or more [`Table`](report::Table)s. Each measured job is a process of
//! its own, so that its peak memory and processor time are its own too; contestants take turns,
//! and the ratio of their medians is what counts: the time itself depends on the machine and on
//! who else uses it.

mod child;
mod contest;
mod error;
pub mod jobs;
mod machine;
pub mod report;
mod scratch;
mod source;
mod workload;

pub use error::{Error, Result};
pub use workload::{Options, Workload, run};
