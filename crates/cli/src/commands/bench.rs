//! `ubtrfs bench`: the benchmarks, which are a program of their own that brings what it compares with.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::failure::{Exit, Failure, Result};

const PROGRAM: &str = "ubtrfs-bench";

/// Time ubtrfs beside the kernel's btrfs, mkfs.btrfs and other FUSE filesystems
///
/// Runs `ubtrfs-bench`, which lies beside this program or in a directory of PATH, with the same
/// arguments; `ubtrfs-bench --help` lists all workloads and options.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs bench seek zeroing --rounds 1
  ubtrfs bench all --scale 0.1 --html figures.html"
)]
pub struct Args {
    /// Workloads and options of `ubtrfs-bench`; `all` is every workload
    #[arg(value_name = "WORKLOAD|OPTION", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// Becomes that program.
pub fn run(args: &Args) -> Result<Exit> {
    let beside = std::env::current_exe().ok().map(|ours| ours.with_file_name(PROGRAM));
    let program = beside.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from(PROGRAM));
    // Without a workload it runs them all.
    let words = args.words.iter().filter(|word| word.as_os_str() != "all");
    let error = Command::new(&program).args(words).exec();
    let what = format!("cannot be run: {error}");
    Err(Failure::new(Exit::Unsupported, PROGRAM, what).advice(
        "It is built with `cargo build --release -p ubtrfs-bench` and belongs beside ubtrfs.",
    ))
}
