//! What the kernel wrote, with each option, has no damage, and the report does not depend on the
//! number of threads.

mod common;

use ubtrfs_check::{CheckOptions, check};
use ubtrfs_testkit::corpus::kernel_images;
use ubtrfs_testkit::{Oracle, oracle};

#[test]
fn every_kernel_image_is_clean() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let mut failures = Vec::new();
    for image in kernel_images() {
        let report = common::check_all(&common::open(&image.devices));
        if !report.is_clean() {
            failures.push(format!("{}:\n{}", image.name, common::lines(&report)));
        }
        println!("{}: {:?}\n{}", image.name, report.statistics, common::lines(&report));
        assert_eq!(
            report.notes().any(|note| note.kind() == "log-present"),
            image.snapshot_without_log.is_some()
        );
        assert!(report.statistics.inode_count >= 3, "{}", image.name);
        let inline = CheckOptions { data: true, ..CheckOptions::default() };
        assert_eq!(check(&common::open(&image.devices), &inline).unwrap(), report);
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}
