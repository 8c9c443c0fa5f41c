//! `ubtrfs check`: whether a filesystem is as the format asks.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Map, json};
use ubtrfs_check::{CheckOptions, Finding, Phase, Progress, Report, Severity, Value};
use ubtrfs_rt::Runtime;
use ubtrfs_volume::OpenMode;

use crate::failure::{Exit, Failure, Result};
use crate::image::VolumeArgs;
use crate::output::Output;
use crate::output::json;
use crate::progress::Meter;
use crate::size;

/// Check a filesystem for damage
///
/// Reads all tree blocks and compares what they say of each other: structure, references, names, link
/// counts, sizes, free space, block groups, chunks, devices. With --data, file data is read, too, and
/// every copy of everything compared with its checksums. Nothing is written. The exit code is 1 if
/// there is damage; notes are of what Linux tolerates or puts right by itself.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs check disk.img
  ubtrfs check --memory 64M disk.img
  ubtrfs check --data --json disk.img | jq '.findings[].kind'"
)]
pub struct Args {
    /// The image or device
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    #[command(flatten)]
    volume: VolumeArgs,
    /// Read file data and all copies, too
    #[arg(long)]
    data: bool,
    /// Print at most N findings
    #[arg(long, value_name = "N", default_value_t = 1000)]
    max_findings: usize,
    /// Memory for tables; what is more lies in a temporary file
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = size::parse)]
    memory: u64,
    /// Say nothing where there is no damage
    #[arg(short, long)]
    quiet: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Checks.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let volume = args.volume.open(&args.image, OpenMode::ReadOnly)?;
    let meter = Meter::new("check");
    let advance = |now: Progress| {
        let part = match now.phase {
            Phase::Roots => "roots",
            Phase::Extents => "extents",
            Phase::Files => "files",
            Phase::Comparing => "comparing",
            _ => "data",
        };
        meter.advance(part, now.done_bytes, now.total_bytes);
    };
    let options = CheckOptions {
        data: args.data,
        executor: Runtime::system().executor,
        finding_count_max: args.max_findings,
        memory_bytes_max: args.memory,
        progress: Some(&advance),
    };
    let report = ubtrfs_check::check(&volume, &options);
    drop(meter);
    let report = report.map_err(|error| match error {
        ubtrfs_check::Error::Volume(error) => {
            Failure::volume("checking", &error).at_path(&args.image)
        }
        error => Failure::new(Exit::Io, "checking", error).at_path(&args.image),
    })?;
    if args.json {
        json::document(out, &JsonReport::new(&report))?;
    } else if !(args.quiet && report.is_clean()) {
        print(&report, out)?;
    }
    Ok(if report.is_clean() { Exit::Done } else { Exit::No })
}

fn print(report: &Report, out: &mut Output) -> Result<()> {
    for finding in &report.findings {
        out.line(&format!("{}: {finding}", severity(finding)))?;
    }
    if report.left_out_count > 0 {
        out.line(&format!("... and {} more", report.left_out_count))?;
    }
    let statistics = &report.statistics;
    out.line(&format!(
        "{} ({}), {}, {}, {} ({})",
        count(statistics.block_count, "tree block"),
        size::binary(statistics.block_bytes),
        count(statistics.subvolume_count, "subvolume"),
        count(statistics.inode_count, "inode"),
        count(statistics.data_extent_count, "data extent"),
        size::binary(statistics.data_extent_bytes),
    ))?;
    let notes = match report.note_count {
        0 => String::new(),
        notes => format!(", {}", count(notes, "note")),
    };
    out.line(&match report.error_count {
        0 => format!("no damage found{notes}"),
        errors => format!("damage found: {}{notes}", count(errors, "error")),
    })
}

fn count(number: u64, of: &str) -> String {
    format!("{number} {of}{}", if number == 1 { "" } else { "s" })
}

fn severity(finding: &Finding) -> &'static str {
    match finding.severity() {
        Severity::Error => "error",
        Severity::Note => "note",
    }
}

#[derive(Serialize)]
struct JsonReport {
    clean: bool,
    errors: u64,
    notes: u64,
    findings: Vec<JsonFinding>,
    left_out: u64,
    tree_blocks: u64,
    tree_bytes: u64,
    subvolumes: u64,
    inodes: u64,
    data_extents: u64,
    data_bytes: u64,
    data_bytes_read: u64,
}

#[derive(Serialize)]
struct JsonFinding {
    kind: &'static str,
    severity: &'static str,
    text: String,
    #[serde(flatten)]
    fields: Map<String, serde_json::Value>,
}

impl JsonReport {
    fn new(report: &Report) -> Self {
        let statistics = &report.statistics;
        Self {
            clean: report.is_clean(),
            errors: report.error_count,
            notes: report.note_count,
            findings: report.findings.iter().map(JsonFinding::new).collect(),
            left_out: report.left_out_count,
            tree_blocks: statistics.block_count,
            tree_bytes: statistics.block_bytes,
            subvolumes: statistics.subvolume_count,
            inodes: statistics.inode_count,
            data_extents: statistics.data_extent_count,
            data_bytes: statistics.data_extent_bytes,
            data_bytes_read: statistics.data_read_bytes,
        }
    }
}

impl JsonFinding {
    fn new(finding: &Finding) -> Self {
        let field = |(name, value): (&str, Value)| {
            let value = match value {
                Value::Number(number) => json!(number),
                Value::Text(text) => json!(text),
                Value::None => serde_json::Value::Null,
            };
            (name.to_owned(), value)
        };
        Self {
            kind: finding.kind(),
            severity: severity(finding),
            text: finding.to_string(),
            fields: finding.fields().into_iter().map(field).collect(),
        }
    }
}
