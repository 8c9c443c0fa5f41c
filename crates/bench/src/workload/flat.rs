//! Whether making a file costs the same where there are many.

use super::{Context, JobRun, making};
use crate::contest::median;
use crate::error::Result;
use crate::report::{Cell, Table};

const SIZES: [u64; 3] = [10_000, 100_000, 1_000_000];
/// Time a file stays within this factor.
const GROWTH_MAX: f64 = 1.3;
/// Small sizes are made more often a round, as one is over in a moment.
const REPEAT_MAX: u64 = 10;

const SHAPES: [(&str, &[&str]); 3] = [
    ("1000 a directory", &["--per-directory", "1000"]),
    ("one directory", &[]),
    ("one directory, cache 1 GiB", &["--cache-mib", "1024"]),
];

pub(super) fn run(context: &Context<'_>) -> Result<Vec<Table>> {
    let mut table = Table::new(
        "flat",
        format!(
            "flat: making empty files in a new image, commit included, one thread, on {}, {} rounds",
            context.scratch.kind(),
            context.options.round_count,
        ),
        &[
            ("shape", "shape"),
            ("files", "files"),
            ("us_per_file", "µs a file"),
            ("cpu_us_per_file", "CPU µs a file"),
            ("times_first", "× the first"),
            ("commits", "commits"),
        ],
    );
    for (name, arguments) in SHAPES {
        let mut runs: Vec<Vec<JobRun>> = vec![Vec::new(); SIZES.len()];
        for _ in 0..context.options.round_count {
            for (size, runs) in SIZES.into_iter().zip(&mut runs) {
                for _ in 0..(SIZES[SIZES.len() - 1] / size).min(REPEAT_MAX) {
                    let count = context.scaled(size);
                    runs.push(making::made_and_checked(context, count, arguments)?);
                }
            }
        }
        let (mut walls, mut cpus) = (Vec::new(), Vec::new());
        for runs in &runs {
            let over = |value: fn(&JobRun) -> f64| median(runs.iter().map(value).collect());
            let wall = over(|run| making::total_s(run) * 1e6 / making::files(run) as f64);
            let cpu = over(cpu_us_per_file);
            walls.push(wall);
            cpus.push(cpu);
            let commits = runs.first().and_then(|run| Some(run.outcome.engine.as_ref()?.commits));
            table.push(vec![
                Cell::text(name),
                Cell::Count(runs.first().map_or(0, making::files)),
                Cell::Ratio(wall),
                Cell::Ratio(cpu),
                Cell::Ratio(wall / walls[0]),
                commits.map_or(Cell::Missing, Cell::Count),
            ]);
        }
        let growth = walls[walls.len() - 1] / walls[0];
        let cpu_growth = cpus[cpus.len() - 1] / cpus[0];
        let met = if growth <= GROWTH_MAX { "met" } else { "NOT met" };
        table.note(format!(
            "Goal, {name}: time a file at the largest size ≤ {GROWTH_MAX} × that at the smallest; \
             measured {growth:.2}: {met} (CPU time: {cpu_growth:.2})."
        ));
    }
    Ok(vec![table])
}

fn cpu_us_per_file(run: &JobRun) -> f64 {
    let timings = run.outcome.all("create").chain(run.outcome.all("commit"));
    timings.map(|timing| timing.cpu_ns as f64 / 1e3).sum::<f64>() / making::files(run) as f64
}
