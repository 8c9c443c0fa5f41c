//! Subvolumes that become read-only while somebody who was let through before is still changing a file of them.

use std::time::Duration;

use crate::common::full::{make, open, read};
use crate::common::judge;
use ubtrfs_engine::{
    DataFile, Error, Filesystem, InodeId, NewInode, Reservation, SetAttributes, SnapshotOptions,
};
use ubtrfs_iomap::{FiemapSync, FileOffset, FileRange};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::Time;

const BLOCK: u64 = 4096;

fn at(bytes: u64) -> FileOffset {
    FileOffset::new(bytes)
}

/// A file in a subvolume of its own.
fn create_in_subvolume(fs: &Filesystem, bits: u64) -> (InodeId, DataFile) {
    let new = NewInode::new(0o40_755, Time::default());
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    let top = handle.create_subvolume(fs.top_level(), b"sub", &new).unwrap();
    drop(handle);
    let new = NewInode::new(0o100_644, Time::default());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    let id = handle.create(top, b"file", &new).unwrap();
    let attributes = SetAttributes { flags: Some(bits), ..SetAttributes::default() };
    handle.set_attributes(id, &attributes).unwrap();
    drop(handle);
    (top, fs.open_data(id).unwrap())
}

/// What was taken behind inline data before its subvolume became read-only: writeback moved the inline data to an extent, found the
/// subvolume read-only once that was done, and the whole filesystem was aborted.
#[test]
fn inline_data_moves_though_its_subvolume_became_read_only() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open(&image);
    let (_, file) = create_in_subvolume(&fs, flags::COMPRESS);
    let id = file.id();
    // One whole block, which is inline as it shrinks: what comes behind it leaves it clean.
    file.write(at(0), &[1; BLOCK as usize]).unwrap();
    file.fsync().unwrap();
    let extents = file.fiemap(FileRange::from(FileOffset::ZERO), 10, FiemapSync::AsIs).unwrap();
    assert!(extents[0].flags.is_inline, "{extents:?}");
    // A writer who had been let through when the subvolume became read-only.
    let late = file.space().open();
    fs.set_subvolume_read_only(id.root, true).unwrap();
    late.write(at(BLOCK), &[2; BLOCK as usize]).unwrap();
    fs.sync().unwrap();
    let expected = [[1; BLOCK as usize], [2; BLOCK as usize]].concat();
    assert!(read(&fs, id) == expected);
    drop((late, file, fs));
    let fs = open(&image);
    assert!(read(&fs, id) == expected);
    drop(fs);
    judge(&image);
}

/// A truncation that was let through, and then refused as the subvolume had become read-only, had noted its time: as long as the file was
/// in memory each fsync and sync of it failed, and no snapshot of the subvolume could be made.
#[test]
fn change_that_is_refused_as_its_subvolume_became_read_only_keeps_nobody_from_syncing() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open(&image);
    let (top, file) = create_in_subvolume(&fs, 0);
    file.write(at(0), &[1; 2 * BLOCK as usize]).unwrap();
    fs.sync().unwrap();
    let handle = fs.begin(Reservation::create(0)).unwrap();
    std::thread::scope(|scope| {
        // Waits until it has the only handle; nobody gets another one until then.
        let read_only = scope.spawn(|| fs.set_subvolume_read_only(top.root, true));
        std::thread::sleep(Duration::from_millis(300));
        // Is let through, and waits for a handle.
        let truncated = scope.spawn(|| file.truncate(at(BLOCK)));
        std::thread::sleep(Duration::from_millis(300));
        drop(handle);
        read_only.join().unwrap().unwrap();
        let truncated = truncated.join().unwrap();
        assert!(matches!(truncated, Err(Error::ReadOnly { .. })), "{truncated:?}");
    });
    assert_eq!(file.size(), at(2 * BLOCK));
    fs.sync().unwrap();
    file.fsync().unwrap();
    let options = SnapshotOptions { read_only: true };
    fs.snapshot(top.root, fs.top_level(), b"snapshot", &options).unwrap();
    drop((file, fs));
    judge(&image);
}
