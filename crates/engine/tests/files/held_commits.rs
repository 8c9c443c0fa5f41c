//! Files while commits are held: a transaction does not grow beyond a limit then.

use std::path::Path;
use std::sync::Arc;

use crate::common::full::{create, make, open, read};
use crate::common::judge;
use ubtrfs_engine::{Error, Filesystem, OpenOptions};
use ubtrfs_iomap::{FileOffset, Reach};
use ubtrfs_volume::{FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// One of little memory, so that the limit is soon met.
fn open_small(image: &Path) -> Filesystem {
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    let options = OpenOptions { cache_bytes: 1 << 20, ..OpenOptions::default() };
    Filesystem::open(volume, options).unwrap()
}

/// Makes files until the transaction is as large as it may be.
fn fill_transaction(fs: &Filesystem) {
    let mut number = 0;
    let refused = loop {
        match create(fs, &format!("another {number}"), 0) {
            Ok(_) => number += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, Error::Limit { .. }), "{refused}");
}

/// Writeback that met the limit threw the data away.
#[test]
fn writeback_while_commits_are_held_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open_small(&image);
    let file = create(&fs, "file", 0).unwrap();
    file.write(FileOffset::new(0), &[7; 100_000]).unwrap();
    let held = fs.hold_commits();
    fill_transaction(&fs);
    fs.write_back_due(u64::MAX);
    let flushed = fs.flush_files();
    assert!(matches!(flushed, Err(Error::Limit { .. })), "{flushed:?}");
    assert!(matches!(file.fsync(), Err(Error::Limit { .. })));
    // What could not be written back is not taken, however much memory there is; it once was, without end.
    let refused = file.write(FileOffset::new(100_000), &[8; 100_000]);
    assert!(matches!(refused, Err(Error::Limit { .. })), "{refused:?}");
    drop(held);
    file.fsync().unwrap();
    let id = file.id();
    drop((file, fs));
    judge(&image);
    assert!(read(&open(&image), id) == [7; 100_000]);
}

/// A file whose dirty blocks ZERO_RANGE drops, and then fails: with the last of them would go what is to say where the file ends, and nobody
/// would ask once it is closed.
#[test]
fn zero_range_while_commits_are_held_leaves_the_end_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open_small(&image);
    let file = create(&fs, "file", 0).unwrap();
    let id = file.id();
    file.write(FileOffset::new(0), &[7; 8192]).unwrap();
    let held = fs.hold_commits();
    fill_transaction(&fs);
    let refused = file.allocate_zeroed(FileOffset::new(0), 8192, Reach::Stays);
    assert!(matches!(refused, Err(Error::Limit { .. })), "{refused:?}");
    drop((file, held));
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
    assert!(read(&open(&image), id) == [7; 8192]);
}
