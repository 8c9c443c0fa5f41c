//! The cost model: what single operations of the engine take, in process.

use super::{Context, run_job};
use crate::contest::median;
use crate::error::Result;
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
            round.extend(run_job(&mut command)?.outcome.timings);
            // The tree job leaves items that no filesystem has.
            if job == "create" {
                context.check("image", 2 * count as u64)?;
            }
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
            ("wall_ns", "ns each"),
            ("cpu_ns", "CPU ns each"),
            ("goal_ns", "goal"),
            ("verdict", ""),
        ],
    );
    for (index, timing) in rounds[0].iter().enumerate() {
        let over = |each: fn(&Timing) -> f64| {
            median(rounds.iter().map(|round| each(&round[index])).collect())
        };
        let (wall, cpu) = (over(Timing::wall_each_ns), over(Timing::cpu_each_ns));
        let goal = GOALS.iter().find(|(what, _)| *what == timing.what).map(|(_, goal)| *goal);
        let verdict = goal.map_or("", |goal| if cpu <= goal { "met" } else { "NOT met" });
        table.push(vec![
            Cell::text(&timing.what),
            Cell::Count(timing.count),
            Cell::Nanos(wall),
            Cell::Nanos(cpu),
            goal.map_or(Cell::Missing, Cell::Nanos),
            Cell::text(verdict),
        ]);
    }
    table.note(
        "Everything with a cache of 1 GiB, which holds the whole tree. Goals are compared with processor time, of all threads: time that went by depends on who \
         else uses the machine.",
    );
    Ok(vec![table])
}
