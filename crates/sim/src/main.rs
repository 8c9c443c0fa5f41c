//! `ubtrfs-sim`: runs of the simulator, one seed after the other, until they are done or one fails.

use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;

use clap::Parser;
use ubtrfs_sim::{Config, Failure, Report, run};

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
    /// States after power cuts for each commit, about; 0 for none
    #[arg(long, value_name = "K", default_value = "10")]
    crash_states: usize,
    /// One crash state in so many is passed to `btrfs check`; 0 for none
    #[arg(long, value_name = "N", default_value = "100")]
    check_one_in: u64,
    /// One crash state in so many is mounted by the kernel as well; 0 for none
    #[arg(long, value_name = "N", default_value = "0")]
    mount_one_in: u64,
    /// One commit in so many is repeated on a device that fails; 0 for none
    #[arg(long, value_name = "N", default_value = "2")]
    fault_one_in: u64,
    /// Threads, each with runs of its own
    #[arg(long, value_name = "N", default_value = "1")]
    threads: usize,
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
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let begin = Instant::now();
    let (report, failure) = run_all(&args);
    println!("{report}");
    println!("{:.0} s", begin.elapsed().as_secs_f64());
    match failure {
        None => ExitCode::SUCCESS,
        Some(failure) => {
            eprintln!("ubtrfs-sim: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Hands the seeds out to the threads; stops at the first failure.
fn run_all(args: &Args) -> (Report, Option<Failure>) {
    let seeds = Mutex::new(args.seed..args.seed.saturating_add(args.runs));
    let done = Mutex::new((Report::default(), None));
    std::thread::scope(|scope| {
        for _ in 0..args.threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = lock(&seeds).next();
                    let Some(seed) = seed.filter(|_| lock(&done).1.is_none()) else { break };
                    match run(&args.config(seed)) {
                        Ok(report) => lock(&done).0 += report,
                        Err(failure) => _ = lock(&done).1.get_or_insert(failure),
                    }
                }
            });
        }
    });
    done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
