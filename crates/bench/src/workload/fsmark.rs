//! A million empty files by two threads, as `fs_mark -S 0 -L 5 -n 100000 -s 0 -k` makes them.

use super::{Context, JobRun, delayed_refs, making, verdict, verdict_at_least};
use crate::contest::{Series, alternate};
use crate::error::Result;
use crate::jobs::RefTimes;
use crate::report::{Cell, Table};

/// Of a thread in a loop.
const FILES: u64 = 100_000;
const TIMES_KERNEL_MIN: f64 = 2.0;
const RATE_BEFORE_COMMIT_MIN: f64 = 300_000.0;
const RATE_MIN: f64 = 200_000.0;
const REF_MEAN_NS_MAX: f64 = 1000.0;

const TWO: [&str; 6] = ["--threads", "2", "--loops", "5", "--name-bytes", "40"];
const TWO_SEARCHING: [&str; 7] =
    ["--threads", "2", "--loops", "5", "--name-bytes", "40", "--without-form-cache"];
const TWO_LARGE_CACHE: [&str; 8] =
    ["--threads", "2", "--loops", "5", "--name-bytes", "40", "--cache-mib", "1024"];
const ONE_LARGE_CACHE: [&str; 6] = ["--loops", "10", "--name-bytes", "40", "--cache-mib", "1024"];
const LARGE_CACHE: &str = "ubtrfs, cache 1 GiB";

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let count = context.scaled(FILES);
    let mut contestants = vec![
        making::ours(context, "ubtrfs", count, &TWO),
        making::ours(context, "ubtrfs, form not cached", count, &TWO_SEARCHING),
        making::ours(context, LARGE_CACHE, count, &TWO_LARGE_CACHE),
        making::ours(context, "ubtrfs, cache 1 GiB, one thread", count, &ONE_LARGE_CACHE),
    ];
    if context.kernel().is_ok() {
        contestants.push(making::kernel(context, count, "", &TWO));
    }
    let series = alternate(contestants, context.options.round_count)?;
    Ok(vec![
        rates(context, count, &series),
        summary(&series),
        delayed_refs::histogram("fsmark", &series),
    ])
}

fn rates(context: &Context<'_>, count: u64, series: &[Series<JobRun>]) -> Table {
    let title = format!(
        "fsmark: {count} empty files a thread a loop, 5 loops, 2 threads with a directory each, no \
         sync, on {}, {} rounds",
        context.scratch.kind(),
        context.options.round_count,
    );
    let mut table = Table::new("fsmark", title, &making::COLUMNS);
    making::push(&mut table, series);
    for ours in series.iter().filter(|one| one.name == "ubtrfs" || one.name == LARGE_CACHE) {
        let mut verdicts = Vec::new();
        if let Some(times) = making::times_kernel(ours, series) {
            let what = format!("{} against the kernel, commit included", ours.name);
            verdicts.push(verdict_at_least(&what, times, TIMES_KERNEL_MIN, "times as fast"));
        }
        if context.options.scale >= 1.0 {
            for (what, rate, goal) in [
                (
                    "before the last commit",
                    making::rate_before_commit as fn(&JobRun) -> f64,
                    RATE_BEFORE_COMMIT_MIN,
                ),
                ("with the last commit", making::rate, RATE_MIN),
            ] {
                let what = format!("{} {what}", ours.name);
                verdicts.push(verdict_at_least(&what, ours.median(rate), goal, "files/s"));
            }
        }
        table.note(verdicts.join(" "));
    }
    if let Err(missing) = context.kernel() {
        table.note(format!("The kernel's row is missing: {missing}."));
    }
    table.note(
        "Names of 40 bytes. Ours in process; the kernel's by openat and close on a mount, then \
         syncfs. Two copies of metadata for both. The time of kernel threads is not in its CPU s.",
    );
    table
}

fn summary(series: &[Series<JobRun>]) -> Table {
    let mut table = Table::new(
        "delayed_refs",
        "fsmark: one run of an extent's delayed references, and searches for the form of free space",
        &[
            ("who", "who"),
            ("runs", "runs"),
            ("mean_ns", "mean ns"),
            ("median_ns", "median ns"),
            ("p90_ns", "p90 ns"),
            ("p99_ns", "p99 ns"),
            ("form_searches", "searches"),
        ],
    );
    for one in series {
        if one.rounds.iter().any(|run| run.outcome.engine.is_none()) {
            continue;
        }
        let of = |value: fn(&RefTimes) -> f64| one.median(|run| refs(run).map_or(f64::NAN, value));
        let searches = one.median(|run| {
            let engine = run.outcome.engine.as_ref();
            engine.map_or(f64::NAN, |engine| engine.free_space_form_searches as f64)
        });
        table.push(vec![
            Cell::text(&one.name),
            Cell::Count(of(|times| times.count as f64) as u64),
            Cell::Nanos(of(|times| times.mean_ns)),
            Cell::Nanos(of(|times| times.median_ns as f64)),
            Cell::Nanos(of(|times| times.p90_ns as f64)),
            Cell::Nanos(of(|times| times.p99_ns as f64)),
            Cell::Count(searches as u64),
        ]);
    }
    let mean = series[0].median(|run| refs(run).map_or(f64::NAN, |times| times.mean_ns));
    table.note(verdict("mean of a run", mean, REF_MEAN_NS_MAX, "ns"));
    table
}

fn refs(run: &JobRun) -> Option<&RefTimes> {
    run.outcome.engine.as_ref().map(|engine| &engine.delayed_refs)
}
