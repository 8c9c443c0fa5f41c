//! What any filesystem passes, over the one in memory.

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
