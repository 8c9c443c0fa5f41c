//! Who needs what is dirty on the medium, and whose data is lost on the way there, is told at once, and so is the next fsync.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::{Failure, MemoryFs, at, contents, new_file};
use ubtrfs_iomap::{CacheOptions, FiemapSync, FileRange, OpenFile};

/// A file of four blocks on the medium, the first two of them dirty, on a device that fails from now on.
fn file_about_to_lose(fs: &Arc<MemoryFs>) -> OpenFile<MemoryFs> {
    let file = new_file(fs, CacheOptions::default()).open();
    file.write(at(0), &[1; 4 * 4096]).unwrap();
    file.fsync().unwrap();
    file.write(at(0), &[2; 2 * 4096]).unwrap();
    fs.writes_left.store(0, Ordering::Relaxed);
    file
}

/// The flush before a direct read lost the data that it was to bring to the device, and the read gave what was there before, as if nothing had
/// happened.
#[test]
fn direct_read_whose_flush_loses_data_fails_and_fsync_is_told_too() {
    let fs = MemoryFs::new();
    let file = file_about_to_lose(&fs);
    let mut buffer = [9; 4096];
    assert_eq!(file.direct_read(at(0), &mut buffer), Err(Failure::Io));
    assert_eq!(buffer, [9; 4096]);
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    // What is lost is lost: the next read gives what the medium has.
    assert_eq!(file.direct_read(at(0), &mut buffer), Ok(4096));
    assert_eq!(buffer, [1; 4096]);
    assert_eq!(file.fsync(), Err(Failure::Io));
    assert_eq!(file.fsync(), Ok(()));
}

#[test]
fn fiemap_whose_flush_loses_data_fails_and_fsync_is_told_too() {
    let fs = MemoryFs::new();
    let file = file_about_to_lose(&fs);
    let all = FileRange::from(at(0));
    assert_eq!(file.fiemap(all, 10, FiemapSync::WriteBack), Err(Failure::Io));
    assert!(file.fiemap(all, 10, FiemapSync::WriteBack).is_ok(), "nothing is lost now");
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(file.fsync(), Err(Failure::Io));
    assert_eq!(file.fsync(), Ok(()));
}

/// As in Linux since 6.6: what the flush loses lies where the new bytes go.
#[test]
fn direct_write_whose_flush_loses_data_writes_and_fsync_is_told() {
    let fs = MemoryFs::new();
    let file = file_about_to_lose(&fs);
    // Only that of what is dirty.
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    fs.writes_before_failure.store(0, Ordering::Relaxed);
    assert_eq!(file.direct_write(at(0), &[3; 4 * 4096]), Ok(4 * 4096));
    assert!(contents(&file) == vec![3; 4 * 4096]);
    assert_eq!(file.fsync(), Err(Failure::Io));
    assert_eq!(file.fsync(), Ok(()));
}

/// It said that all was written, where Linux gives the error of writing it. What stays dirty is written.
#[test]
fn direct_write_of_parts_of_blocks_that_are_lost_fails_and_fsync_is_told_too() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    file.write(at(0), &[1; 4 * 4096]).unwrap();
    file.fsync().unwrap();
    fs.writes_left.store(0, Ordering::Relaxed);
    assert_eq!(file.direct_write(at(100), &[2; 4096]), Err(Failure::Io));
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(file.direct_write(at(3 * 4096), &[3; 100]), Ok(100));
    assert_eq!(contents(&file)[..3 * 4096], [1; 3 * 4096]);
    assert_eq!(file.fsync(), Err(Failure::Io));
    assert_eq!(file.fsync(), Ok(()));
    fs.is_held.store(true, Ordering::Relaxed);
    assert_eq!(file.direct_write(at(100), &[4; 4096]), Ok(4096));
    fs.is_held.store(false, Ordering::Relaxed);
    file.fsync().unwrap();
    assert_eq!(contents(&file)[100..100 + 4096], [4; 4096]);
}

/// Who writes more than may be dirty has written back some of it by the time that all is written.
#[test]
fn direct_write_of_parts_of_blocks_tells_what_it_lost_while_it_wrote() {
    let fs = MemoryFs::new();
    let options = CacheOptions {
        dirty_bytes_max: 2 * 4096,
        dirty_bytes_background: 4096,
        ..CacheOptions::default()
    };
    let file = new_file(&fs, options).open();
    fs.writes_left.store(0, Ordering::Relaxed);
    assert_eq!(file.direct_write(at(100), &[2; 40_000]), Err(Failure::Io));
    assert_eq!(file.fsync(), Err(Failure::Io));
}

/// What was lost before a call is not its to tell.
#[test]
fn direct_read_after_data_was_lost_by_others_reads_what_is_there() {
    let fs = MemoryFs::new();
    let file = file_about_to_lose(&fs);
    file.space().flush(FileRange::from(at(0))).unwrap();
    let mut buffer = [9; 4096];
    assert_eq!(file.direct_read(at(0), &mut buffer), Ok(4096));
    assert_eq!(buffer, [1; 4096]);
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(file.fsync(), Err(Failure::Io));
}
