//! Images that the kernel wrote, with each option, read by the engine and found equal to what the
//! kernel shows of them.

mod common;

use ubtrfs_engine::Notice;
use ubtrfs_testkit::corpus::kernel_images;
use ubtrfs_testkit::{Compare, Oracle, oracle};

#[test]
fn every_kernel_image_reads_as_the_kernel_shows_it() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for image in kernel_images() {
        let fs = common::open(&image.devices);
        let has_log = fs.notices().contains(&Notice::LogNotReplayed);
        assert_eq!(has_log, image.snapshot_without_log.is_some(), "{}", image.name);
        let kernel = image.snapshot_without_log.as_ref().unwrap_or(&image.snapshot);
        let ours = common::snapshot(&fs, fs.top_level());
        let differences = kernel.differences(&ours, &Compare::same_filesystem());
        assert!(differences.is_empty(), "{}: kernel | engine\n{differences}", image.name);
        check_subvolumes(&fs);
    }
}

/// What the list of subvolumes says agrees with the paths that lead to them.
fn check_subvolumes(fs: &ubtrfs_engine::Filesystem) {
    let usage = fs.usage().unwrap();
    let used: u64 = usage.spaces.iter().map(|space| space.used_bytes).sum();
    assert_eq!(used, usage.used_bytes);
    let default = fs.default_subvolume().unwrap();
    let mut found_default = false;
    for info in fs.subvolumes().unwrap() {
        found_default |= info.id == default.root;
        if info.deleted {
            continue;
        }
        let path = info.path.expect("a subvolume that is not deleted has a path");
        let root = fs.resolve(fs.top_level(), &path).unwrap();
        assert_eq!((root.root, root.inode.0), (info.id, 256));
        assert_eq!(fs.path_of(root).unwrap(), path);
        assert!(!info.uuid.is_nil());
    }
    assert!(found_default);
}
