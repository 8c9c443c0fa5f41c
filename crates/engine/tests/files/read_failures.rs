//! Each operation with each of its reads failing: it then changes nothing, or the transaction is aborted. A subvolume was once
//! entered and committed half made, when the look for what it inherits failed after its first change.

use std::sync::Arc;

use crate::common::simulated::{check, empty, made, new, open, path};
use crate::common::snapshot;
use ubtrfs_engine::{
    Error, Filesystem, MkfsOptions, PreparedData, RenameMode, Reservation, SetAttributes,
    SnapshotOptions,
};
use ubtrfs_iomap::{FileOffset as Offset, Reach};
use ubtrfs_ondisk::{FileOffset, RootId};
use ubtrfs_testkit::Compare;
use ubtrfs_testkit::crash::{Effect, Fault, Image, Request, SimArray, SimDevice};

const FILES: u64 = 300;

/// Files of many small extents, some preallocated, whose holes have items; the file ends inside of a leaf of its own.
fn made_of_extents() -> Image {
    let options =
        MkfsOptions { no_holes: false, block_group_tree: false, ..MkfsOptions::default() };
    let (device, fs) = empty(&options);
    let top = fs.top_level();
    for name in [b"a", b"b"] {
        let mut handle = fs.begin(Reservation::create(1)).unwrap();
        let id = handle.create(top, name, &new(0o100_644)).unwrap();
        drop(handle);
        let file = fs.open_data(id).unwrap();
        file.allocate(Offset::ZERO, BLOCKS * BLOCK, Reach::Extends).unwrap();
        for at in (0..BLOCKS).step_by(2) {
            file.write(Offset::new(at * BLOCK), &[1; BLOCK as usize]).unwrap();
            if at % 64 == 0 {
                file.fsync().unwrap();
            }
        }
    }
    fs.sync().unwrap();
    drop(fs);
    device.image()
}

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 400;
/// Blocks that are written: preallocated ones far apart, so that each lies in another leaf, and one behind the end.
fn written(first: u64) -> impl Iterator<Item = u64> {
    (first..BLOCKS).step_by(64).chain([BLOCKS + 20])
}

fn write_back(fs: &Filesystem, first: u64, byte: u8) -> Result<(), Error> {
    for name in [&b"a"[..], b"b"] {
        let file = fs.open_data(fs.lookup(fs.top_level(), name)?)?;
        for at in written(first) {
            file.write(Offset::new(at * BLOCK + 9), &[byte; 2000])?;
        }
    }
    fs.sync()
}

/// What was not written when reads fail is written when it is asked for again, or the transaction is aborted; nothing is entered half.
#[test]
fn writeback_whose_nth_read_fails_can_be_repeated() {
    let image = made_of_extents();
    for first in (1..64).step_by(2) {
        for stays in [false, true] {
            let mut nth = 0;
            while fails(&image, first, nth, stays) {
                nth += 1;
            }
            assert!(nth > 10, "{nth}");
        }
    }
}

/// Whether there was such a read.
fn fails(image: &Image, first: u64, nth: u64, stays: bool) -> bool {
    let array = SimArray::of_images(vec![image.clone()]);
    let device = Arc::new(array.device(0));
    let fs = open(&device);
    let request = Request::Read;
    device.plan(Fault { device: None, request, after: nth, effect: Effect::Fail, stays });
    let result = write_back(&fs, first, 7);
    let is_over = array.strikes().is_empty();
    device.forget_faults();
    if is_over {
        result.unwrap();
        return false;
    }
    let what = format!("from block {first}, read {nth}: {result:?}");
    let again = write_back(&fs, first, 8);
    drop(fs);
    check(&device, &what);
    match again {
        Err(Error::Aborted { .. }) => return true,
        other => other.unwrap_or_else(|error| panic!("{what}: {error}")),
    }
    let fs = open(&device);
    for name in [&b"a"[..], b"b"] {
        let id = fs.lookup(fs.top_level(), name).unwrap();
        let mut bytes = vec![0; 2000];
        for at in written(first) {
            fs.read(id, FileOffset(at * BLOCK + 9), &mut bytes).unwrap();
            assert!(bytes == [8; 2000], "{what}: block {at}");
        }
    }
    true
}

/// An operation under one handle, or of one transaction, that succeeds where no read fails.
type Operation = fn(&Filesystem) -> Result<(), Error>;

const OPERATIONS: [(&str, Operation); 17] = [
    ("create", |fs| {
        let dir = path(fs, "dir")?;
        fs.begin(Reservation::create(1))?.create(dir, b"new", &new(0o100_644)).map(drop)
    }),
    ("mkdir in a snapshot", |fs| {
        let dir = path(fs, "snap/dir")?;
        fs.begin(Reservation::create(1))?.create(dir, b"new", &new(0o040_755)).map(drop)
    }),
    ("symlink", |fs| {
        let dir = path(fs, "dir")?;
        let mut handle = fs.begin(Reservation::create(1))?;
        handle.symlink(dir, b"new", b"target", &new(0o777)).map(drop)
    }),
    ("create_unlinked", |fs| {
        let dir = path(fs, "dir")?;
        let mut handle = fs.begin(Reservation::create(1))?;
        let id = handle.create_unlinked(dir, &new(0o100_644))?;
        handle.link(dir, b"new", id)
    }),
    ("link", |fs| {
        let (dir, id) = (path(fs, "dir")?, path(fs, "100")?);
        fs.begin(Reservation::create(1))?.link(dir, b"new", id)
    }),
    ("unlink", |fs| fs.unlink_deferred(path(fs, "sub/dir")?, b"99").map(drop)),
    ("rmdir", |fs| match fs.rmdir_deferred(path(fs, "sub")?, b"dir") {
        Err(Error::NotEmpty { .. }) => Ok(()),
        other => other.map(drop),
    }),
    ("rename over another", |fs| {
        let (from, to) = (path(fs, "snap")?, path(fs, "snap/dir")?);
        fs.rename_deferred(from, b"150", to, b"151", RenameMode::Replace).map(drop)
    }),
    ("exchange", |fs| {
        let (from, to) = (fs.top_level(), path(fs, "dir")?);
        fs.rename_deferred(from, b"200", to, b"201", RenameMode::Exchange).map(drop)
    }),
    ("whiteout", |fs| {
        let (from, to) = (fs.top_level(), path(fs, "dir")?);
        fs.rename_deferred(from, b"202", to, b"new", RenameMode::Whiteout).map(drop)
    }),
    ("set_xattr", |fs| {
        let id = path(fs, "snap/dir/77")?;
        fs.begin(Reservation::items(4))?.set_xattr(id, b"user.other", &[1; 900])
    }),
    ("remove_xattr", |fs| {
        let id = path(fs, "dir/77")?;
        fs.begin(Reservation::items(4))?.remove_xattr(id, b"user.name")
    }),
    ("set_attributes", |fs| {
        let id = path(fs, "snap/dir/33")?;
        let attributes = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
        fs.begin(Reservation::items(4))?.set_attributes(id, &attributes)
    }),
    ("create_subvolume", |fs| {
        let dir = path(fs, "dir")?;
        let mut handle = fs.begin(Reservation::create_subvolume())?;
        handle.create_subvolume(dir, b"new", &new(0o040_755)).map(drop)
    }),
    ("snapshot", |fs| {
        let dir = path(fs, "dir")?;
        let options = SnapshotOptions { read_only: true };
        fs.snapshot(RootId(256), dir, b"new", &options).map(drop)
    }),
    ("delete_subvolume", |fs| fs.delete_subvolume(fs.top_level(), b"snap").map(drop)),
    ("write_file", |fs| {
        let dir = path(fs, "snap/dir")?;
        let mut handle = fs.begin(Reservation::create(1).and(Reservation::extents(4)))?;
        let id = handle.create(dir, b"new", &new(0o100_644))?;
        let data = PreparedData::new(vec![9; 20_000], &fs.write_options(None));
        handle.write_file(id, vec![(FileOffset(0), data)], 20_000)
    }),
];

#[test]
fn operation_whose_nth_read_fails_changes_nothing_or_aborts() {
    let image = made(FILES);
    let device = Arc::new(SimDevice::of_image(image.clone()));
    let before = {
        let fs = open(&device);
        snapshot(&fs, fs.top_level())
    };
    for (name, operation) in OPERATIONS {
        let mut failures = 0;
        for nth in 0.. {
            let device = Arc::new(SimDevice::of_image(image.clone()));
            let fs = open(&device);
            let request = Request::Read;
            device.plan(Fault {
                device: None,
                request,
                after: nth,
                effect: Effect::Fail,
                stays: false,
            });
            let result = operation(&fs);
            device.forget_faults();
            let Err(error) = result else { break };
            failures += 1;
            assert!(nth < 200, "{name}: {error}");
            match fs.commit() {
                Err(Error::Aborted { .. }) => continue,
                Err(error) => panic!("{name}, read {nth}: {error}"),
                Ok(()) => {}
            }
            if name == "write_file" {
                // Two operations under one handle: the first may be there, and nothing of the second.
                let size = path(&fs, "snap/dir/new").map(|id| fs.inode(id).unwrap().size_bytes);
                assert!(
                    matches!(size, Err(Error::NotFound { .. }) | Ok(0)),
                    "read {nth}: {size:?}"
                );
                continue;
            }
            drop(fs);
            let fs = open(&device);
            println!("{name}, read {nth}: {error}");
            snapshot(&fs, fs.top_level()).assert_same(&before, &Compare::same_filesystem());
            drop(fs);
            check(&device, &format!("{name}, read {nth}"));
        }
        assert!(failures > 2, "{name}: {failures} reads");
    }
}
