//! `ubtrfs inspect delayed-refs`: how long runs of delayed references took, in a benchmark or at a mount.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::failure::{Exit, Failure, Result};
use crate::live::{self, Live};
use crate::mounts;
use crate::output::json::Array;
use crate::output::table::{Align, Table};
use crate::output::{Output, quote};

/// Show how long runs of delayed references took: at a mount, or in a run of the benchmarks
///
/// FILE is the directory where a filesystem is mounted, or what `ubtrfs-bench --json FILE` wrote, with
/// the workloads create or fsmark. A delayed
/// reference is a change to the extent tree that waits for the commit; the references of one extent
/// are run together, and each such run is timed.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs inspect delayed-refs /mnt
  ubtrfs inspect delayed-refs bench.json"
)]
pub struct Args {
    /// The mount, or the benchmark's figures
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print JSON: an array with one object a row
    #[arg(long)]
    json: bool,
}

/// What the benchmark's table is called.
const TABLE: &str = "delayed_ref_histogram";
/// Bytes of a report that are read at most.
const REPORT_BYTES_MAX: u64 = 64 << 20;
/// Columns of the longest bar.
const BAR_CHARS_MAX: u64 = 40;

/// Runs that took up to so long, and longer than the row before.
#[derive(Serialize, Deserialize)]
struct Row {
    workload: String,
    who: String,
    up_to_ns: u64,
    runs: u64,
}

/// Shows.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let rows = args.rows()?;
    if args.json {
        let mut array = Array::begin(out)?;
        rows.iter().try_for_each(|row| array.element(out, row))?;
        array.end(out)?;
        return Ok(Exit::Done);
    }
    let of_one = rows.chunk_by(|a, b| (&a.workload, &a.who) == (&b.workload, &b.who));
    for (index, rows) in of_one.enumerate() {
        if index > 0 {
            out.text("\n")?;
        }
        print(rows, out)?;
    }
    Ok(Exit::Done)
}

impl Args {
    fn rows(&self) -> Result<Vec<Row>> {
        if let Some(live) = live::served() {
            return Ok(rows_of(&live));
        }
        if let Some(mounted) = mounts::on(&self.file) {
            return Err(Failure::at_mount(mounted));
        }
        let failed =
            |what: &str, error: &std::io::Error| Failure::io(what, error).at_path(&self.file);
        let none = |why: String| {
            Failure::new(Exit::Io, "reading the figures", why)
                .at_path(&self.file)
                .advice("`ubtrfs-bench fsmark --json FILE` writes such a file.")
        };
        let file = File::open(&self.file).map_err(|error| failed("opening", &error))?;
        let mut bytes = Vec::new();
        file.take(REPORT_BYTES_MAX)
            .read_to_end(&mut bytes)
            .map_err(|error| failed("reading", &error))?;
        let mut report: Value = serde_json::from_slice(&bytes)
            .map_err(|error| none(format!("it is no JSON: {error}")))?;
        let mut rows = Vec::new();
        let tables = report.get_mut("tables").and_then(Value::as_array_mut);
        for table in tables.into_iter().flatten() {
            if table.get("name").is_none_or(|name| name != TABLE) {
                continue;
            }
            let found = table.get_mut("rows").map(Value::take).unwrap_or_default();
            let more: Vec<Row> =
                serde_json::from_value(found).map_err(|error| none(error.to_string()))?;
            rows.extend(more);
        }
        if rows.is_empty() {
            return Err(none("there are no times of delayed references in it".to_owned()));
        }
        Ok(rows)
    }
}

/// Since it was mounted.
fn rows_of(live: &Live) -> Vec<Row> {
    let times = live.filesystem.delayed_ref_times();
    let row = |(up_to_ns, runs): &(u64, u64)| Row {
        workload: "mount".to_owned(),
        who: live.directory.display().to_string(),
        up_to_ns: *up_to_ns,
        runs: *runs,
    };
    times.buckets.iter().map(row).collect()
}

/// One histogram.
fn print(rows: &[Row], out: &mut Output) -> Result<()> {
    let Some(first) = rows.first() else { return Ok(()) };
    let all = rows.iter().map(|row| row.runs).fold(0, u64::saturating_add);
    let most = rows.iter().map(|row| row.runs).max().unwrap_or(0).max(1);
    let heading = format!("{}, {}: {all} runs", first.workload, first.who);
    out.line(&quote::for_message(heading.as_bytes()))?;
    let mut table = Table::new(&[Align::Right, Align::Right, Align::Right, Align::Left], "  ");
    table.row(["Up to ns", "Runs", "So far", ""]);
    let mut so_far: u64 = 0;
    for row in rows {
        so_far = so_far.saturating_add(row.runs);
        let percent = so_far as f64 * 100.0 / all.max(1) as f64;
        let bar = u128::from(row.runs) * u128::from(BAR_CHARS_MAX) / u128::from(most);
        let bar = "#".repeat(usize::try_from(bar).unwrap_or(0));
        table.row([row.up_to_ns.to_string(), row.runs.to_string(), format!("{percent:.2}%"), bar]);
    }
    table.lines().try_for_each(|line| out.line(line.trim_end()))
}
