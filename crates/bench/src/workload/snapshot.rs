//! Snapshots of a large subvolume.

use std::cell::Cell as Counter;

use super::{Context, JobRun, making, run_job, verdict};
use crate::contest::{Contestant, Series, alternate};
use crate::error::Result;
use crate::report::{Cell, Table};

const FILES: u64 = 1_000_000;
/// Snapshots a round, and files made before each: one, and some forty MiB of blocks that are still to
/// be written when the snapshot is made.
const KINDS: [(u64, u64); 2] = [(20, 1), (5, 100_000)];
const GOAL_MS: f64 = 10.0;
const SHAPE: [&str; 3] = ["--subvolume", "--per-directory", "1000"];

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let count = context.scaled(FILES);
    run_job(&mut making::fill(context, count, &SHAPE)?)?;
    let image = context.scratch.path("image");
    let run = Counter::new(0);
    let tag = || {
        run.set(run.get() + 1);
        format!("s{}", run.get())
    };
    let title = format!(
        "snapshot: a subvolume of {count} files, files made in it before each snapshot, on {}, {} \
         rounds",
        context.scratch.kind(),
        context.options.round_count,
    );
    let columns = [
        ("who", "who"),
        ("what", "what"),
        ("before", "made before"),
        ("count", "count"),
        ("median_ms", "median ms"),
        ("max_ms", "max ms"),
    ];
    let mut table = Table::new("snapshot", title, &columns);
    for (snapshots, files) in KINDS {
        let files = if files > 1 { context.scaled(files) } else { files };
        let (snapshots, dirty) = (snapshots.to_string(), files.to_string());
        let arguments = || ["--dirty".to_owned(), dirty.clone(), "--tag".to_owned(), tag()];
        let mut contestants = vec![Contestant::new("ubtrfs", || {
            run_job(context.job("snapshot").arg(&image).arg(&snapshots).args(arguments()))
        })];
        if context.kernel().is_ok() {
            contestants.push(Contestant::new("kernel", || {
                making::mounted(&image, "subvolid=5", |path| {
                    let mut job = context.job("snapshot");
                    run_job(job.arg(path).arg(&snapshots).arg("--system").args(arguments()))
                })
            }));
        }
        let series = alternate(contestants, context.options.round_count)?;
        context.check("image", count)?;
        push(&mut table, &series, files);
        let median = crate::contest::median(times_ms(&series[0], "snapshot"));
        let what = format!("a snapshot beside the commit, files made before: {files}");
        table.note(verdict(&what, median, GOAL_MS, "ms"));
    }
    context.scratch.absent("image")?;
    if let Err(missing) = context.kernel() {
        table.note(format!("The kernel's row is missing: {missing}."));
    }
    table.note(
        "Each round opens, or mounts, the same image anew, so that its first snapshot reads from it. \
         The kernel's ioctl commits, so its time has the commit in it.",
    );
    Ok(vec![table])
}

fn push(table: &mut Table, series: &[Series<JobRun>], files: u64) {
    for one in series {
        for what in ["snapshot", "commit", "snapshot and commit"] {
            let times = times_ms(one, what);
            if times.is_empty() {
                continue;
            }
            table.push(vec![
                Cell::text(&one.name),
                Cell::text(what),
                Cell::Count(files),
                Cell::Count(times.len() as u64),
                Cell::Ratio(crate::contest::median(times.clone())),
                Cell::Ratio(times.into_iter().fold(0.0, f64::max)),
            ]);
        }
    }
}

fn times_ms(series: &Series<JobRun>, what: &str) -> Vec<f64> {
    let runs = series.rounds.iter();
    runs.flat_map(|run| run.outcome.all(what).map(|timing| timing.wall_each_ns() / 1e6)).collect()
}
