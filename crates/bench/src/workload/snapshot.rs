//! Snapshots of a large subvolume.

use std::cell::Cell as Counter;

use super::{Context, JobRun, making, run_job, verdict};
use crate::contest::{Contestant, Series, alternate};
use crate::error::Result;
use crate::report::{Cell, Table};

const FILES: u64 = 1_000_000;
const SNAPSHOTS: u64 = 20;
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
    let snapshots = SNAPSHOTS.to_string();
    let mut contestants = vec![Contestant::new("ubtrfs", || {
        run_job(context.job("snapshot").arg(&image).arg(&snapshots).args(["--tag", &tag()]))
    })];
    if context.kernel().is_ok() {
        contestants.push(Contestant::new("kernel", || {
            making::mounted(&image, "subvolid=5", |path| {
                let mut job = context.job("snapshot");
                run_job(job.arg(path).arg(&snapshots).args(["--system", "--tag", &tag()]))
            })
        }));
    }
    let series = alternate(contestants, context.options.round_count)?;
    run_job(context.job("check").arg(&image).arg(count.to_string()))?;
    context.scratch.absent("image")?;

    let title = format!(
        "snapshot: a subvolume of {count} files, {SNAPSHOTS} snapshots a round, a file made in it \
         before each, on {}, {} rounds",
        context.scratch.kind(),
        context.options.round_count,
    );
    let columns = [
        ("who", "who"),
        ("what", "what"),
        ("count", "count"),
        ("median_ms", "median ms"),
        ("max_ms", "max ms"),
    ];
    let mut table = Table::new("snapshot", title, &columns);
    for one in &series {
        for what in ["snapshot", "commit", "snapshot and commit"] {
            let times = times_ms(one, what);
            if times.is_empty() {
                continue;
            }
            table.push(vec![
                Cell::text(&one.name),
                Cell::text(what),
                Cell::Count(times.len() as u64),
                Cell::Ratio(crate::contest::median(times.clone())),
                Cell::Ratio(times.into_iter().fold(0.0, f64::max)),
            ]);
        }
    }
    let median = crate::contest::median(times_ms(&series[0], "snapshot"));
    table.note(verdict("a snapshot beside the commit", median, GOAL_MS, "ms"));
    if let Err(missing) = context.kernel() {
        table.note(format!("The kernel's row is missing: {missing}."));
    }
    table.note(
        "Each round opens, or mounts, the same image anew, so that its first snapshot reads from it. \
         The kernel's ioctl commits, so its time has the commit in it.",
    );
    Ok(vec![table])
}

fn times_ms(series: &Series<JobRun>, what: &str) -> Vec<f64> {
    let runs = series.rounds.iter();
    runs.flat_map(|run| run.outcome.all(what).map(|timing| timing.wall_each_ns() / 1e6)).collect()
}
