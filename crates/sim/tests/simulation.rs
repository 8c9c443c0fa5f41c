//! Runs of the simulator that are quick enough for each change; `make sim` makes more.

use ubtrfs_sim::{Config, Report, run};
use ubtrfs_testkit::oracle::{Oracle, available};

/// Operations with failing devices, comparisons and checks, without power cuts.
const OPERATIONS: Config = Config {
    seed: 0,
    operations: 1500,
    commit_one_in: 50,
    crash_states: 0,
    check_one_in: 1,
    mount_one_in: 0,
    fault_one_in: 4,
    nested_one_in: 3,
};

/// Operations with power cuts.
const CUTS: Config = Config {
    seed: 0,
    operations: 700,
    commit_one_in: 35,
    crash_states: 28,
    check_one_in: 150,
    mount_one_in: 80,
    fault_one_in: 4,
    nested_one_in: 3,
};

/// Runs what a configuration says with so many seeds, from one on.
fn runs(config: Config, seeds: std::ops::Range<u64>) -> Report {
    let mut sum = Report::default();
    for seed in seeds {
        sum += run(&Config { seed, ..config }).unwrap_or_else(|failure| panic!("{failure}"));
    }
    println!("{sum}");
    sum
}

fn many_operations(seeds: std::ops::Range<u64>) {
    let report = runs(OPERATIONS, seeds);
    let operations = report.operation_count();
    assert!(operations >= 21_000, "{report}");
    let done: u64 = report.operations.values().map(|count| count.done).sum();
    assert!(done * 2 > operations, "most are refused: {report}");
    // Some filesystems are full again and again.
    assert!(report.no_space_count() > 0 && report.no_space_count() * 10 < operations, "{report}");
    assert!(report.emptied > 0, "{report}");
    assert!(report.own_commits >= report.own_judged && report.own_judged > 50, "{report}");
    for name in ["write", "truncate", "clone range", "dedupe range", "copy range", "snapshot"] {
        assert!(report.operations[name].done >= 50, "{name}: {report}");
    }
    assert!(report.operations["grow device"].done > 0, "{report}");
    let faults = report.fault_sum();
    assert!(faults.struck > 40 && faults.aborted > 20 && faults.unnoticed > 2, "{report}");
}

fn many_cuts(seeds: std::ops::Range<u64>) {
    let report = runs(CUTS, seeds);
    assert!(report.operation_count() >= 4500, "{report}");
    assert!(report.opened_state_count() >= 2500, "{report}");
    assert!(report.crash_state_count() > 8 * report.opened_state_count(), "{report}");
    assert!(report.new_states > 100 && report.went_on > 20, "{report}");
    // Together with the other half.
    let judges = [Oracle::KernelBtrfs, Oracle::BtrfsProgs];
    if judges.into_iter().all(|judge| available(judge).is_ok()) {
        assert!(report.mounted >= 15 && report.checked >= 30, "{report}");
    }
}

// In halves, so that two cores share the work.

#[test]
fn many_operations_agree_with_the_model() {
    many_operations(101..115);
}

#[test]
fn many_other_operations_agree_with_the_model() {
    many_operations(201..215);
}

#[test]
fn cuts_at_any_write_leave_the_last_durable_state() {
    many_cuts(301..308);
}

#[test]
fn other_cuts_at_any_write_leave_the_last_durable_state() {
    many_cuts(401..408);
}

#[test]
fn run_of_a_seed_twice_does_the_same() {
    let config = Config { seed: 7, operations: 400, mount_one_in: 0, check_one_in: 0, ..CUTS };
    let (first, second) = (run(&config).unwrap(), run(&config).unwrap());
    assert_eq!(first, second);
    assert_ne!(first, run(&Config { seed: 8, ..config }).unwrap());
}
