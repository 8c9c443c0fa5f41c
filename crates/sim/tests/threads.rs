//! Several threads at one filesystem, with snapshots and power cuts: see `ubtrfs_sim::run_threads`.

use ubtrfs_sim::{ThreadsConfig, ThreadsReport, run_threads};

#[test]
fn moments_of_several_threads_are_moments() {
    let mut sum = ThreadsReport::default();
    for seed in 1..=6 {
        let config = ThreadsConfig { seed, workers: 3, operations: 80, crash_states: 25 };
        sum += run_threads(&config).unwrap_or_else(|why| panic!("{why}"));
    }
    println!("{sum}");
    assert!(sum.operations == 6 * 3 * 80 && sum.refused * 2 < sum.operations, "{sum}");
    assert!(sum.snapshots >= 30 && sum.deleted > 0 && sum.commits >= 60, "{sum}");
    assert!(sum.states.1 >= 40 && sum.moved.0 > 50, "{sum}");
}
