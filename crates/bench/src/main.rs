//! `ubtrfs-bench`: the benchmarks as a command of their own.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use ubtrfs_bench::{Options, Workload, floor, jobs, run};

/// Time ubtrfs beside the kernel's btrfs, mkfs.btrfs and other FUSE filesystems, in one run.
#[derive(Parser)]
#[command(name = "ubtrfs-bench", version)]
struct Args {
    /// What to run [default: all]: cost, import, readback, memory, growth, create, fsmark, snapshot,
    /// flat, check, seek, zeroing, sequential, mount
    #[arg(value_name = "WORKLOAD")]
    workloads: Vec<String>,
    /// Who competes besides ubtrfs: kernel (with mkfs.btrfs and FUSE filesystems) or none
    #[arg(long, value_name = "WHO", default_value = "kernel", value_parser = ["kernel", "none"])]
    vs: String,
    /// Share of the source tree and of the items, above 0 and up to 1
    #[arg(long, value_name = "F", default_value = "1", value_parser = scale)]
    scale: f64,
    /// Rounds in which each contestant does the job
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Directory or tarball to import [default: Debian's newest linux-source]
    #[arg(long, value_name = "PATH")]
    source: Option<PathBuf>,
    /// Where images are made [default: /dev/shm]
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// The ubtrfs command [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    ubtrfs: Option<PathBuf>,
    /// Write all figures to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write all figures and pictures of them to FILE as one page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

fn scale(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(scale) if scale > 0.0 && scale <= 1.0 => Ok(scale),
        _ => Err("expected a number above 0 and up to 1".to_owned()),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let done = match arguments.split_first() {
        Some((first, job)) if first == "job" => jobs::main(job).map_err(|error| error.to_string()),
        Some((first, floor)) if first == "floor" => {
            floor::main(floor).map_err(|error| error.to_string())
        }
        _ => bench(Args::parse()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ubtrfs-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn bench(args: Args) -> Result<(), String> {
    let this = std::env::current_exe().map_err(|error| format!("this program's path: {error}"))?;
    let workloads = if args.workloads.is_empty() {
        Workload::ALL.to_vec()
    } else {
        let find = |name: &String| Workload::named(name).ok_or_else(|| unknown(name));
        args.workloads.iter().map(find).collect::<Result<_, _>>()?
    };
    let options = Options {
        round_count: args.rounds.into(),
        scale: args.scale,
        source: args.source,
        scratch: args.scratch,
        ubtrfs: args.ubtrfs.unwrap_or_else(|| this.with_file_name("ubtrfs")),
        floor: vec![this.clone().into(), "floor".into()],
        job: vec![this.into(), "job".into()],
        with_kernel: args.vs == "kernel",
    };
    let report = run(&workloads, &options, |table| println!("{table}"))
        .map_err(|error| error.to_string())?;
    println!("{report}");
    let write = |path: PathBuf, text: String| {
        std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
    };
    let json = args.json.map(|path| write(path, format!("{:#}\n", report.to_json())));
    let html = args.html.map(|path| write(path, report.to_html()));
    let all = [report.ended_by.map(Err), json, html];
    all.into_iter().flatten().collect()
}

fn unknown(name: &str) -> String {
    let known: Vec<String> = Workload::ALL
        .iter()
        .map(|workload| format!("  {:<9} {}", workload.name(), workload.about()))
        .collect();
    format!("{name}: no such workload; there are\n{}", known.join("\n"))
}
