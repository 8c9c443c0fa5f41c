//! How long runs of delayed references took, as the engine counted them in a workload.

use std::collections::BTreeMap;

use super::JobRun;
use crate::contest::Series;
use crate::report::{Cell, Table};

/// The histogram of each contestant of ours over all rounds. `ubtrfs inspect delayed-refs` finds it in
/// a report by this table's name and columns.
pub(super) fn histogram(workload: &str, series: &[Series<JobRun>]) -> Table {
    let mut table = Table::new(
        "delayed_ref_histogram",
        format!("{workload}: how long runs of an extent's delayed references took, all rounds"),
        &[
            ("workload", "workload"),
            ("who", "who"),
            ("up_to_ns", "up to ns"),
            ("runs", "runs"),
            ("share_so_far", "share so far"),
        ],
    );
    for one in series {
        let mut buckets: BTreeMap<u64, u64> = BTreeMap::new();
        let engines = one.rounds.iter().filter_map(|run| run.outcome.engine.as_ref());
        for (up_to_ns, runs) in engines.flat_map(|engine| &engine.delayed_refs.buckets) {
            *buckets.entry(*up_to_ns).or_default() += runs;
        }
        let all: u64 = buckets.values().sum();
        let mut so_far = 0;
        for (up_to_ns, runs) in buckets {
            so_far += runs;
            table.push(vec![
                Cell::text(workload),
                Cell::text(&one.name),
                Cell::Count(up_to_ns),
                Cell::Count(runs),
                Cell::Ratio(so_far as f64 / all.max(1) as f64),
            ]);
        }
    }
    table
}
