//! What the workloads share in which files are made by the files job.

use std::path::Path;
use std::process::Command;

use ubtrfs_testkit::{KernelMount, command};

use super::{Context, JobRun, run_job};
use crate::child;
use crate::contest::{Contestant, Series};
use crate::error::{Error, Result};
use crate::jobs::EngineCounts;
use crate::report::{Cell, Table};

/// What the kernel mounts an image with besides. It gives freed space back by default, as the loop
/// device can: work that ours does only on request.
const KERNEL_OPTIONS: &str = "nodiscard";

/// The kernel's mount options, with those of the job.
pub(super) fn kernel_options(options: &str) -> String {
    if options.is_empty() {
        KERNEL_OPTIONS.to_owned()
    } else {
        format!("{KERNEL_OPTIONS},{options}")
    }
}

/// Takes the kernel's image; all of it a hole at first. As long as ours.
const IMAGE_BYTES: u64 = 8 << 30;

pub(super) const COLUMNS: [(&str, &str); 12] = [
    ("who", "who"),
    ("files", "files"),
    ("create_s", "create s"),
    ("commit_s", "commit s"),
    ("total_s", "all s"),
    ("files_per_s_before_commit", "files/s before"),
    ("files_per_s", "files/s"),
    ("times_ours", "× ours"),
    ("cpu_s", "CPU s"),
    ("peak_bytes", "peak MiB"),
    ("commits", "commits"),
    ("blocks_read", "blocks read"),
];

/// The engine makes files in a new image, as `arguments` ask.
pub(super) fn ours<'a>(
    context: &'a Context<'_>,
    name: &str,
    count: u64,
    arguments: &'a [&'a str],
) -> Contestant<'a, JobRun> {
    Contestant::new(name, move || made_and_checked(context, count, arguments))
}

/// The job that makes files in a new image called `image`.
///
/// # Errors
/// If what was there cannot be removed.
pub(super) fn fill(context: &Context<'_>, count: u64, arguments: &[&str]) -> Result<Command> {
    let image = context.scratch.absent("image")?;
    let mut job = context.job("files");
    job.arg(image).arg(count.to_string()).args(arguments);
    Ok(job)
}

/// The same loop on the kernel's mount of a new image.
pub(super) fn kernel<'a>(
    context: &'a Context<'_>,
    count: u64,
    mount_options: &'a str,
    arguments: &'a [&'a str],
) -> Contestant<'a, JobRun> {
    Contestant::new("kernel", move || {
        let image = context.scratch.blank("image", IMAGE_BYTES)?;
        child::run(command("mkfs.btrfs").arg("--quiet").arg(&image))?;
        mounted(&image, mount_options, |path| {
            let mut job = context.job("files");
            job.arg(path).arg(count.to_string()).arg("--system").args(arguments);
            run_job(&mut job)
        })
    })
}

/// Runs `work` where the kernel has mounted `image`.
///
/// # Errors
/// If it cannot be mounted; as `work`.
pub(super) fn mounted<T>(
    image: &Path,
    options: &str,
    work: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    let mount = KernelMount::mount(&[image.to_owned()], &kernel_options(options), false)
        .map_err(|what| Error::Input { what })?;
    let done = work(mount.path());
    mount.unmount();
    done
}

/// Runs [`fill`]. A wrong image is no result: each is checked, after its time was taken, by a checker
/// that shares nothing with the engine.
///
/// # Errors
/// If it is damaged or lacks files.
pub(super) fn made_and_checked(
    context: &Context<'_>,
    count: u64,
    arguments: &[&str],
) -> Result<JobRun> {
    let made = run_job(&mut fill(context, count, arguments)?)?;
    context.check("image", files(&made))?;
    context.scratch.absent("image")?;
    Ok(made)
}

/// Seconds with the commit.
pub(super) fn total_s(run: &JobRun) -> f64 {
    run.outcome.wall_s("create") + run.outcome.wall_s("commit")
}

pub(super) fn files(run: &JobRun) -> u64 {
    run.outcome.all("create").map(|timing| timing.count).sum()
}

/// Files a second, with the commit.
pub(super) fn rate(run: &JobRun) -> f64 {
    files(run) as f64 / total_s(run)
}

/// Files a second, before the last commit.
pub(super) fn rate_before_commit(run: &JobRun) -> f64 {
    files(run) as f64 / run.outcome.wall_s("create")
}

/// A row for each contestant; the first is ours.
pub(super) fn push(table: &mut Table, series: &[Series<JobRun>]) {
    let Some(ours) = series.first() else { return };
    for one in series {
        let engine = one.rounds.first().and_then(|run| run.outcome.engine.as_ref());
        let count = |of: fn(&EngineCounts) -> u64| {
            engine.map_or(Cell::Missing, |engine| Cell::Count(of(engine)))
        };
        let peak = one.rounds.iter().map(|run| run.usage.peak_bytes).max().unwrap_or(0);
        table.push(vec![
            Cell::text(&one.name),
            Cell::Count(one.rounds.first().map_or(0, files)),
            Cell::Seconds(one.median(|run| run.outcome.wall_s("create"))),
            Cell::Seconds(one.median(|run| run.outcome.wall_s("commit"))),
            Cell::Seconds(one.median(total_s)),
            Cell::Count(one.median(rate_before_commit).round() as u64),
            Cell::Count(one.median(rate).round() as u64),
            Cell::Ratio(one.median(total_s) / ours.median(total_s)),
            Cell::Seconds(one.median(|run| run.usage.cpu.as_secs_f64())),
            Cell::Bytes(peak),
            count(|engine| engine.commits),
            count(|engine| engine.blocks_read),
        ]);
    }
}

/// How often as fast as the kernel `ours` is.
pub(super) fn times_kernel(ours: &Series<JobRun>, series: &[Series<JobRun>]) -> Option<f64> {
    let kernel = series.iter().find(|one| one.name == "kernel")?;
    Some(kernel.median(total_s) / ours.median(total_s))
}
