//! The bound on memory: it is kept, and makes no difference to what is found. That no test's image
//! is judged otherwise with hardly any memory is what `common::check_twice` sees to.

mod common;

use std::fs;
use std::path::Path;

use common::image::{Base, Image};
use ubtrfs_check::{CheckOptions, Error, check};
use ubtrfs_ondisk::extent::ExtentItem;
use ubtrfs_ondisk::inode::InodeItem;
use ubtrfs_ondisk::{KeyType, RootId};
use ubtrfs_rt::Executor;
use ubtrfs_testkit::{Ending, Limits, Oracle, oracle, run_limited};

/// An image with damage in every third inode and every third data extent.
fn damaged() -> Image {
    let image = Image::of(Base::Single);
    let inodes = image.items(RootId::FS_TREE);
    for place in inodes.iter().filter(|it| it.key.ty == KeyType::INODE_ITEM).step_by(3) {
        image.edit::<InodeItem>(place, |item| item.nbytes += 4096);
    }
    let extents = image.items(RootId::EXTENT_TREE);
    for place in extents.iter().filter(|it| it.key.ty == KeyType::EXTENT_ITEM).step_by(3) {
        image.edit::<ExtentItem>(place, |item| item.refs += 1);
    }
    let names = image.items(RootId::FS_TREE);
    let names = names.iter().filter(|it| it.key.ty == KeyType::DIR_INDEX && it.slot > 0);
    // From behind, so that slots stay right.
    for place in names.step_by(5).collect::<Vec<_>>().into_iter().rev() {
        image.remove(place);
    }
    image
}

#[test]
fn limits_are_kept_and_the_report_is_the_same() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = damaged();
    let volume = image.open(None);
    let wide = CheckOptions { data: true, finding_count_max: 100_000, ..CheckOptions::default() };
    let expect = check(&volume, &wide).unwrap();
    assert!(expect.error_count > 50, "{}", expect.error_count);
    assert_eq!(expect.statistics.spilled_bytes, 0);
    for memory_bytes_max in [12 << 10, 16 << 10, 24_000, 32 << 10, 48 << 10] {
        for executor in [Executor::Inline, Executor::Threads(3)] {
            let options = CheckOptions { memory_bytes_max, executor, ..wide };
            let mut report = check(&volume, &options).unwrap();
            let statistics = &mut report.statistics;
            assert!(statistics.table_bytes_peak <= memory_bytes_max, "{statistics:?}");
            assert!(statistics.spilled_bytes > 0, "{memory_bytes_max}: {statistics:?}");
            statistics.table_bytes_peak = expect.statistics.table_bytes_peak;
            statistics.spilled_bytes = 0;
            assert_eq!(report, expect, "{memory_bytes_max}");
        }
    }
}

/// Names the image to the process that checks it.
const IMAGE: &str = "UBTRFS_TEST_IMAGE";

/// The other process: checks an image with room for all tables, and with hardly any.
#[test]
fn checker_of_one_image() {
    let Some(path) = std::env::var_os(IMAGE) else { return };
    let volume = common::open(&[Path::new(&path)]);
    assert!(check(&volume, &CheckOptions::default()).unwrap().is_clean());
    let tiny = CheckOptions { memory_bytes_max: common::TINY_BYTES, ..CheckOptions::default() };
    match check(&volume, &tiny) {
        Ok(report) => println!("SPILLED {}", report.statistics.spilled_bytes),
        Err(Error::Spill(error)) => println!("NO FILE {error}"),
        Err(error) => panic!("{error}"),
    }
}

fn check_with_temporary_files_in(image: &Path, directory: &Path) -> String {
    let program = std::env::current_exe().unwrap();
    let arguments = ["--exact", "checker_of_one_image", "--nocapture"];
    let environment = [(IMAGE, image.as_os_str()), ("TMPDIR", directory.as_os_str())];
    let limits = Limits { seconds: 60, memory_bytes: 1 << 30 };
    let (ending, said) = run_limited(program.as_os_str(), arguments, &environment, limits);
    assert_eq!(ending, Ending::Exited(0), "{said}");
    said
}

/// No report is better than a wrong one; and whoever has the memory needs no file.
#[test]
fn temporary_file_that_cannot_be_made_is_an_error_where_it_is_needed() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    Image::single().save(&path);
    let said = check_with_temporary_files_in(&path, &directory.path().join("nowhere"));
    assert!(said.contains("NO FILE"), "{said}");
    let temporary = directory.path().join("temporary");
    fs::create_dir(&temporary).unwrap();
    let said = check_with_temporary_files_in(&path, &temporary);
    assert!(said.contains("SPILLED"), "{said}");
    // It never had a name for longer than it took to take that away.
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
}
