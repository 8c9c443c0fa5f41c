//! An image checked on all cores, beside `btrfs check`.

use ubtrfs_testkit::command;

use super::{CONTEST_COLUMNS, Context, making, push_contest, run_job};
use crate::child;
use crate::contest::{Contestant, alternate};
use crate::error::Result;
use crate::report::Table;

/// Metadata and seconds of the goal.
const GOAL_BYTES: f64 = 1.8e9;
const GOAL_S: f64 = 1.0;

/// What is in the image: files at full scale, and their shape.
const IMAGES: [(&str, u64, &[&str]); 2] = [
    ("empty files", 1_000_000, &["--per-directory", "1000", "--one-copy"]),
    ("inline files", 700_000, &["--bytes", "2000", "--per-directory", "1000", "--one-copy"]),
];

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let title = format!(
        "check: metadata of many files, without data, on {}, {} rounds",
        context.scratch.kind(),
        context.options.round_count,
    );
    let mut table = Table::new("check", title, &CONTEST_COLUMNS);
    for (name, files, arguments) in IMAGES {
        let count = context.scaled(files);
        run_job(&mut making::fill(context, count, arguments)?)?;
        let image = context.scratch.path("image");
        let mut bytes = 0;
        let mut contestants = vec![Contestant::new("ubtrfs_check", || {
            let run = run_job(context.job("check").arg(&image).arg(count.to_string()))?;
            bytes = run.outcome.checked.map_or(0, |checked| checked.block_bytes);
            Ok(run.usage)
        })];
        if context.btrfs_progs().is_ok() {
            contestants.push(Contestant::new("btrfs check", || {
                child::run(command("btrfs").args(["check", "--readonly"]).arg(&image))
            }));
        }
        let series = alternate(contestants, context.options.round_count)?;
        push_contest(&mut table, &format!("{count} {name}"), &series);
        let seconds = series[0].wall_s();
        let goal_s = GOAL_S * bytes as f64 / GOAL_BYTES;
        let met = if seconds <= goal_s { "met" } else { "NOT met" };
        table.note(format!(
            "Goal, {name}: ≤ {GOAL_S} s for 1.8 GB of metadata, so ≤ {goal_s:.3} s for the {:.1} MB \
             here; measured {seconds:.3} s, {:.2} GB/s: {met}.",
            bytes as f64 / 1e6,
            bytes as f64 / seconds / 1e9,
        ));
    }
    context.scratch.absent("image")?;
    if let Err(missing) = context.btrfs_progs() {
        table.note(format!("The rows of btrfs check are missing: {missing}."));
    }
    table.note("Both find the images clean. Metadata once, on all cores; btrfs check uses one.");
    Ok(vec![table])
}
