//! Fuzzers' findings and broken filesystems, from the tests of btrfs-progs: each is checked without
//! a panic, a hang or unbounded memory, and found clean or damaged as `btrfs check` finds it, but
//! for those in the table, each with its reason.

mod common;

use std::path::Path;
use std::sync::Arc;

use ubtrfs_check::CheckOptions;
use ubtrfs_testkit::{
    CheckMode, Ending, Limits, Oracle, btrfs_check, collections, oracle, run_limited,
};
use ubtrfs_volume::{FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// Names the image to the process that checks it.
const IMAGE: &str = "UBTRFS_TEST_IMAGE";
const LIMITS: Limits = Limits { seconds: 60, memory_bytes: 1 << 30 };

/// Where the two differ: the image, whether it is clean by ours, and why.
const DIFFERENT: &[(&str, bool, &str)] = &[
    ("tests/fsck-tests/012-leaf-corruption/good.img.xz", true, STALE),
    ("tests/fsck-tests/029-valid-orphan-item/orphan_inode.img.xz", true, STALE),
    ("tests/fsck-tests/036-rescan-not-kicked-in/no_rescan_kicked_in.img", true, STALE),
    (
        "tests/fsck-tests/032-corrupted-qgroup/qgroup_corrupted.img",
        true,
        "the counts of quota groups are not judged here, and a note says so",
    ),
    (
        "tests/fsck-tests/061-out-of-order-inline-backref/btrfs_image.img.xz",
        false,
        "inline references out of order: btrfs check finds that since 6.5, the kernel refuses it",
    ),
    ("tests/misc-tests/034-metadata-uuid/disk1.raw.xz", false, INTERRUPTED),
    ("tests/misc-tests/034-metadata-uuid/disk2.raw.xz", false, MISSING),
    ("tests/misc-tests/034-metadata-uuid/disk3.raw.xz", false, MISSING),
    ("tests/misc-tests/034-metadata-uuid/disk4.raw.xz", false, INTERRUPTED),
    ("tests/misc-tests/034-metadata-uuid/disk5.raw.xz", false, MISSING),
    ("tests/misc-tests/034-metadata-uuid/disk6.raw.xz", false, INTERRUPTED),
    ("tests/misc-tests/034-metadata-uuid/disk7.raw.xz", false, MISSING),
    ("tests/misc-tests/034-metadata-uuid/disk8.raw.xz", false, INTERRUPTED),
];
const STALE: &str =
    "btrfs check only says that the free space cache is stale, and exits with 0: a note here";
const MISSING: &str = "one of two devices alone: a volume is not opened without the other";
const INTERRUPTED: &str = "a change of the uuid that was interrupted: a volume does not open that";

#[test]
fn collected_images_are_judged_as_btrfs_check_judges_them() {
    if !oracle::require_all(&[Oracle::ImageCollections, Oracle::BtrfsProgs]) {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let mut failures = Vec::new();
    let mut clean_count = 0;
    for image in collections::images() {
        let arguments = ["--exact", "checker_of_one_image", "--nocapture"];
        let environment = [(IMAGE, image.path.as_os_str())];
        let (ending, said) = run_limited(program.as_os_str(), arguments, &environment, LIMITS);
        if ending != Ending::Exited(0) {
            failures.push(format!("{}: {ending:?}\n{said}", image.origin));
            continue;
        }
        let ours = said.contains("CLEAN");
        let theirs = btrfs_check(&image.path, CheckMode::Original);
        let listed = DIFFERENT.iter().find(|(origin, ..)| *origin == image.origin);
        let is_as_listed = match listed {
            Some((_, clean, _)) => ours == *clean && theirs.is_clean != *clean,
            None => ours == theirs.is_clean,
        };
        if !is_as_listed {
            let (origin, theirs) = (&image.origin, &theirs.transcript);
            failures.push(format!("== {origin}: {listed:?}\nours: {said}\ntheirs: {theirs}"));
        }
        clean_count += usize::from(ours);
    }
    // It would also agree on all if both took everything for damaged.
    assert!(clean_count > 20, "{clean_count}");
    assert!(failures.is_empty(), "{} images\n{}", failures.len(), failures.join("\n"));
}

/// The other process: checks one image.
#[test]
fn checker_of_one_image() {
    let Some(image) = std::env::var_os(IMAGE) else { return };
    match report(Path::new(&image)) {
        Ok(report) if report.is_clean() => println!("CLEAN\n{}", common::lines(&report)),
        Ok(report) => println!("DAMAGED\n{}", common::lines(&report)),
        Err(why) => println!("REFUSED {why}"),
    }
}

fn report(image: &Path) -> Result<ubtrfs_check::Report, String> {
    let device = FileDevice::open(image, OpenMode::ReadOnly, Window::Whole)
        .map_err(|error| error.to_string())?;
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume =
        Volume::open(vec![Arc::new(device)], &options).map_err(|error| error.to_string())?;
    common::check_twice(&volume, &CheckOptions::default()).map_err(|error| error.to_string())
}
