//! What any filesystem passes, over the one in memory.

use std::sync::atomic::Ordering;

use ubtrfs_testkit::io_suite::{MemoryHarness, RandomRun, little_memory, random_run, seeds};

ubtrfs_testkit::io_suite_tests!(MemoryHarness::new);

/// Mappings end in the middle of what is asked for.
#[test]
fn random_operations_with_short_mappings_same_as_arrays() {
    for seed in seeds::<MemoryHarness>() {
        let harness = MemoryHarness::with_cut_mappings(little_memory(4096), 1 + seed % 5);
        random_run(harness, &RandomRun::new(seed, 1500));
    }
}

/// Who makes a file longer does a part of the work himself.
#[test]
fn random_operations_with_writers_beside_same_as_arrays() {
    let mut straight_count = 0;
    for seed in seeds::<MemoryHarness>() {
        let harness = MemoryHarness::with_writers_beside(little_memory(4096));
        let model = harness.model();
        random_run(harness, &RandomRun::new(seed, 1500));
        straight_count += model.straight_count.load(Ordering::Relaxed);
    }
    assert!(straight_count > 0, "nothing of it was written so");
}
