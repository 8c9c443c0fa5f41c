//! The cost model: what single operations of the engine take, in process.

use super::Context;
use crate::child;
use crate::contest::median;
use crate::error::{Error, Result};
use crate::jobs::Timing;
use crate::report::{Cell, Table};

const TREE_ITEMS: f64 = 1_000_000.0;
const FILES: f64 = 200_000.0;

/// Nanoseconds that the design promises.
const GOALS: &[(&str, f64)] = &[
    ("search", 300.0),
    ("next", 10.0),
    ("insert in order", 400.0),
    ("insert at random", 400.0),
    ("create empty", 3000.0),
];

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let scale = context.options.scale;
    let mut rounds: Vec<Vec<Timing>> = Vec::new();
    for _ in 0..context.options.round_count {
        let mut round = Vec::new();
        for (job, count) in [("tree", TREE_ITEMS * scale), ("create", FILES * scale)] {
            let image = context.scratch.absent("image")?;
            let mut command = context.job(job);
            command.arg(&image).arg(format!("{count:.0}"));
            let (_, text) = child::run_for_text(&mut command)?;
            let timings: Vec<Timing> = serde_json::from_str(&text)
                .map_err(|error| Error::Input { what: format!("job {job}: {error}") })?;
            round.extend(timings);
        }
        rounds.push(round);
    }
    context.scratch.absent("image")?;
    let mut table = Table::new(
        "cost",
        format!(
            "cost: one thread in process; a bare system call takes {:.0} ns here; {} rounds",
            context.syscall_ns, context.options.round_count
        ),
        &[
            ("what", "what"),
            ("count", "count"),
            ("ns", "ns each"),
            ("goal_ns", "goal"),
            ("verdict", ""),
        ],
    );
    for (index, timing) in rounds[0].iter().enumerate() {
        let ns = median(rounds.iter().map(|round| round[index].each_ns()).collect());
        let goal = GOALS.iter().find(|(what, _)| *what == timing.what).map(|(_, goal)| *goal);
        let verdict = goal.map_or("", |goal| if ns <= goal { "met" } else { "NOT met" });
        table.push(vec![
            Cell::text(&timing.what),
            Cell::Count(timing.count),
            Cell::Nanos(ns),
            goal.map_or(Cell::Missing, Cell::Nanos),
            Cell::text(verdict),
        ]);
    }
    Ok(vec![table])
}
