//! Files open through memory, with power cuts: runs quick enough for each change; `make sim` makes more.

use ubtrfs_sim::{OpenFilesConfig, OpenFilesReport, run_open_files};
use ubtrfs_testkit::oracle::{Oracle, available};

const CUTS: OpenFilesConfig = OpenFilesConfig {
    seed: 0,
    operations: 250,
    window_one_in: 12,
    crash_states: 14,
    check_one_in: 60,
    mount_one_in: 90,
    fault_one_in: 3,
    go_on_one_in: 25,
    nested_one_in: 3,
};

/// Runs with so many seeds, from one on.
fn runs(config: OpenFilesConfig, seeds: std::ops::Range<u64>) -> OpenFilesReport {
    let mut sum = OpenFilesReport::default();
    for seed in seeds {
        let config = OpenFilesConfig { seed, ..config };
        sum += run_open_files(&config).unwrap_or_else(|failure| panic!("{failure}"));
    }
    println!("{sum}");
    sum
}

fn cuts(seeds: std::ops::Range<u64>) {
    let report = runs(CUTS, seeds);
    for name in [
        "write",
        "write through",
        "append",
        "direct write",
        "mapped store",
        "msync",
        "fsync",
        "truncate",
        "zero range",
        "punch hole",
        "allocate",
        "allocate zeroed",
        "clone range",
        "snapshot",
        "delete snapshot",
        "sync",
        "commit",
        "flush range",
        "write back due",
        "drop clean data",
        "reopen",
    ] {
        assert!(report.done(name) > 0, "{name}: {report}");
    }
    assert!(report.crash_state_count() > 4 * report.opened_state_count(), "{report}");
    assert!(report.opened_state_count() > 500 && report.windows > 40, "{report}");
    assert!(report.fsyncs > 20 && report.own_commits > 0 && report.converted > 0, "{report}");
    assert!(report.between > 0 && report.mixed > 0 && report.torn_blocks > 0, "{report}");
    assert!(report.snapshot_files > 0 && report.held_files > 0, "{report}");
    assert!(report.went_on > 0 && report.cut_again > 0, "{report}");
    assert!(report.struck > 0 && report.stopped > 0 && report.told > 0, "{report}");
    let judges = [Oracle::KernelBtrfs, Oracle::BtrfsProgs];
    if judges.into_iter().all(|judge| available(judge).is_ok()) {
        assert!(report.mounted > 0 && report.checked > 0, "{report}");
    }
}

// In halves, so that two cores share the work.

#[test]
fn cuts_while_files_are_open_show_what_was_promised_or_came_after() {
    cuts(1..9);
}

#[test]
fn other_cuts_while_files_are_open_show_what_was_promised_or_came_after() {
    cuts(201..209);
}

#[test]
fn run_of_a_seed_twice_with_files_open_does_the_same() {
    let config = OpenFilesConfig { seed: 7, operations: 80, ..CUTS };
    let config = OpenFilesConfig { check_one_in: 0, mount_one_in: 0, ..config };
    let (first, second) = (run_open_files(&config).unwrap(), run_open_files(&config).unwrap());
    assert_eq!(first, second);
    assert_ne!(first, run_open_files(&OpenFilesConfig { seed: 8, ..config }).unwrap());
}

/// Seeds that found something.
const FOUND: OpenFilesConfig = OpenFilesConfig {
    operations: 300,
    crash_states: 20,
    check_one_in: 100,
    mount_one_in: 150,
    go_on_one_in: 20,
    ..CUTS
};

/// While the device failed, a sync promised all although where a file ends could not be recorded.
#[test]
fn sync_that_cannot_record_where_a_file_ends_says_so() {
    runs(FOUND, 1375..1376);
}

/// A commit that merged and split the same leaves by turns until there was no metadata left, and stopped the filesystem.
#[test]
fn commit_whose_leaves_are_merged_and_split_settles() {
    runs(FOUND, 873..874);
}

/// A writer waited for writeback that needed a commit, which failed: the write was done, as its data was in memory, and the simulator took that for
/// the promise of a commit.
#[test]
fn commit_that_fails_while_a_writer_waits_for_writeback_is_no_promise() {
    runs(FOUND, 7..8);
}

/// To look whether the filesystem takes more, the simulator opened a handle, for which a large transaction
/// was committed: the promise was taken down for a moment before that commit.
#[test]
fn look_whether_the_filesystem_stopped_commits_nothing() {
    runs(FOUND, 31..32);
}
