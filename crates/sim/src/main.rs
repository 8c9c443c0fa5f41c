//! `ubtrfs-sim`: runs of the simulator, one seed after the other, until they are done or some fail.

mod verdict;

use std::fmt::Display;
use std::ops::AddAssign;
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use clap::Parser;
use ubtrfs_sim::{
    Config, OpenFilesConfig, ThreadsConfig, ThreadsReport, run, run_open_files, run_threads,
};

use crate::verdict::{AtLeast, Covered};

/// After so many failures no further run is begun.
const FAILURES_MAX: usize = 10;

/// Random operations on the engine beside a model, with power cuts and failing devices.
#[derive(Parser)]
#[command(name = "ubtrfs-sim", version)]
struct Args {
    /// The first seed
    #[arg(long, value_name = "N", default_value = "1")]
    seed: u64,
    /// How many seeds, each a run of its own
    #[arg(long, value_name = "N", default_value = "1")]
    runs: u64,
    /// Operations of each run
    #[arg(long, value_name = "M", default_value = "1000")]
    operations: u64,
    /// One operation in so many is a commit
    #[arg(long, value_name = "N", default_value = "40")]
    commit_one_in: u64,
    /// States after power cuts that are opened for each commit by chance, about, besides those that
    /// differ in what is read; 0 for no cuts
    #[arg(long, value_name = "K", default_value = "10")]
    crash_states: u64,
    /// One opened crash state in so many is passed to `btrfs check`; 0 for none
    #[arg(long, value_name = "N", default_value = "100")]
    check_one_in: u64,
    /// One opened crash state in so many is mounted by the kernel as well; 0 for none
    #[arg(long, value_name = "N", default_value = "0")]
    mount_one_in: u64,
    /// One commit in so many is repeated on a device that fails; 0 for none
    #[arg(long, value_name = "N", default_value = "2")]
    fault_one_in: u64,
    /// Of the crash states on which the engine goes on, in one of so many that is cut as well: the
    /// opening, a few operations, the commit; 0 for none
    #[arg(long, value_name = "N", default_value = "3")]
    nested_one_in: u64,
    /// Seconds between lines of progress; 0 for none
    #[arg(long, value_name = "N", default_value = "30")]
    progress: u64,
    /// Runs of so many threads that work at one filesystem, instead; 0 for none. Of the options above
    /// the seeds, operations and crash states say what they do
    #[arg(long, value_name = "N", default_value = "0")]
    workers: usize,
    /// Runs with files open through memory, instead. Of the options above all say what they do but that
    /// for workers; a commit is here a look at the crash states since the last
    #[arg(long, conflicts_with = "workers")]
    open_files: bool,
    /// With --open-files: on one opened crash state in so many the engine goes on; 0 for none
    #[arg(long, value_name = "N", default_value = "40")]
    go_on_one_in: u64,
    /// Threads, each with runs of its own
    #[arg(long, value_name = "N", default_value = "1")]
    threads: usize,
    #[command(flatten)]
    at_least: AtLeast,
}

impl Args {
    fn config(&self, seed: u64) -> Config {
        Config {
            seed,
            operations: self.operations,
            commit_one_in: self.commit_one_in.max(1),
            crash_states: self.crash_states,
            check_one_in: self.check_one_in,
            mount_one_in: self.mount_one_in,
            fault_one_in: self.fault_one_in,
            nested_one_in: self.nested_one_in,
        }
    }

    fn open_files_config(&self, seed: u64) -> OpenFilesConfig {
        OpenFilesConfig {
            seed,
            operations: self.operations,
            window_one_in: self.commit_one_in.max(1),
            crash_states: self.crash_states,
            check_one_in: self.check_one_in,
            mount_one_in: self.mount_one_in,
            fault_one_in: self.fault_one_in,
            go_on_one_in: self.go_on_one_in,
            nested_one_in: self.nested_one_in,
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    // Told before hours of work that cannot reach the numbers.
    if let Err(why) = args.at_least.require_judges() {
        eprintln!("ubtrfs-sim: {why}");
        return ExitCode::FAILURE;
    }
    let begin = Instant::now();
    let (covered, failed) = if args.workers > 0 {
        let (report, failed) = run_workers(&args);
        println!("{report}");
        (Covered::from(&report), failed)
    } else if args.open_files {
        let run_one = |seed| run_open_files(&args.open_files_config(seed));
        let (report, failed) = run_all(&args, run_one, |report| report.line());
        println!("{report}");
        (Covered::from(&report), failed)
    } else {
        let run_one = |seed| run(&args.config(seed));
        let (report, failed) = run_all(&args, run_one, |report| report.line());
        println!("{report}");
        (Covered::from(&report), failed)
    };
    println!("{failed} runs failed; {:.0} s", begin.elapsed().as_secs_f64());
    let missed = args.at_least.missed(&covered);
    for what in &missed {
        eprintln!("ubtrfs-sim: too little was covered: {what}");
    }
    if failed == 0 && missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs of several threads each, one after the other; and how many failed.
fn run_workers(args: &Args) -> (ThreadsReport, usize) {
    let (mut sum, mut failures) = (ThreadsReport::default(), 0);
    for seed in args.seed..args.seed.saturating_add(args.runs) {
        let (workers, operations) = (args.workers, args.operations);
        let config = ThreadsConfig { seed, workers, operations, crash_states: args.crash_states };
        match run_threads(&config) {
            Ok(report) => sum += report,
            Err(why) => {
                eprintln!("ubtrfs-sim: {why}");
                failures += 1;
            }
        }
        if failures >= FAILURES_MAX {
            break;
        }
    }
    (sum, failures)
}

/// Hands the seeds out to the threads; stops after some failures, which it tells as they come and once
/// more in the end. Returns how many there were.
fn run_all<R: AddAssign + Default + Send, F: Display + Send>(
    args: &Args,
    run_one: impl Fn(u64) -> Result<R, F> + Sync,
    line: impl Fn(&R) -> String + Sync,
) -> (R, usize) {
    let seeds = Mutex::new(args.seed..args.seed.saturating_add(args.runs));
    let done = Mutex::new((R::default(), Vec::new(), Instant::now()));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.threads.max(1) {
            scope.spawn(|| {
                loop {
                    let is_over = lock(&done).1.len() >= FAILURES_MAX;
                    let Some(seed) = lock(&seeds).next().filter(|_| !is_over) else { break };
                    let result = run_one(seed);
                    let (sum, failures, told) = &mut *lock(&done);
                    match result {
                        Ok(report) => *sum += report,
                        Err(failure) => {
                            eprintln!("ubtrfs-sim: {failure}");
                            failures.push(failure);
                        }
                    }
                    if args.progress > 0 && told.elapsed().as_secs() >= args.progress {
                        eprintln!("{:.0} s: {}", begin.elapsed().as_secs_f64(), line(sum));
                        *told = Instant::now();
                    }
                }
            });
        }
    });
    let (sum, failures, _) = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    for failure in &failures {
        eprintln!("ubtrfs-sim: {failure}");
    }
    (sum, failures.len())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
