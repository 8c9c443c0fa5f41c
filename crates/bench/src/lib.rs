//! Benchmarks: what users run, and what the cost model promises, timed beside the kernel and
//! `mkfs.btrfs` in one run.
//!
//! A [`Workload`] makes one or more [`Table`](report::Table)s. Each measured job is a process of
//! its own, so that its peak memory and processor time are its own too; contestants take turns,
//! and the ratio of their medians is what counts: the time itself depends on the machine and on
//! who else uses it.

pub mod chart;
mod child;
mod contest;
mod device;
mod error;
pub mod floor;
mod html;
pub mod jobs;
mod machine;
mod mount;
mod peer;
pub mod report;
mod scratch;
mod source;
mod workload;

pub use error::{Error, Result};
pub use workload::{Options, Workload, run};
