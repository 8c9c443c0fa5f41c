//! Each operation and its commit with each of their writes, and each flush, failing: the caller is told, nothing half done is
//! ever on the medium, and where a tree's block or a superblock could not be written the filesystem takes no more changes.

mod common;

use std::sync::Arc;

use common::simulated::{
    State, check, made, made_with_copies, new, open, path, try_open, with_file,
};
use ubtrfs_engine::{
    Error, Filesystem, PreparedData, RenameMode, Reservation, SetAttributes, SnapshotOptions,
};
use ubtrfs_iomap::{FileOffset as Offset, Reach};
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::{DeviceId, FileOffset, RootId};
use ubtrfs_testkit::crash::{Effect, Fault, Image, Request, SimArray, SimDevice, Strike};
use ubtrfs_testkit::{Compare, Oracle, assert_checks_clean, oracle};

const FILES: u64 = 30;
const SUB: RootId = RootId(256);
const SNAPSHOT: RootId = RootId(257);

/// Files of 9000 bytes, and one of 90 that are inline.
const LARGE: &str = "dir/27";
const SMALL: &str = "dir/7";
const ANOTHER: &str = "snap/dir/21";

struct Operation {
    name: &'static str,
    /// The file that it changes in steps, some of which may have been done where it fails.
    file: Option<&'static str>,
    run: fn(&Filesystem) -> Result<(), Error>,
}

const fn of(
    name: &'static str,
    file: &'static str,
    run: fn(&Filesystem) -> Result<(), Error>,
) -> Operation {
    Operation { name, file: Some(file), run }
}

const fn whole(name: &'static str, run: fn(&Filesystem) -> Result<(), Error>) -> Operation {
    Operation { name, file: None, run }
}

const OPERATIONS: [Operation; 30] = [
    whole("create", |fs| {
        let dir = path(fs, "dir")?;
        fs.begin(Reservation::create(1))?.create(dir, b"new", &new(0o100_644)).map(drop)
    }),
    whole("mkdir in a snapshot", |fs| {
        let dir = path(fs, "snap/dir")?;
        fs.begin(Reservation::create(1))?.create(dir, b"new", &new(0o040_755)).map(drop)
    }),
    whole("link", |fs| {
        let (dir, id) = (path(fs, "dir")?, path(fs, "10")?);
        fs.begin(Reservation::create(1))?.link(dir, b"new", id)
    }),
    whole("unlink of an inline file", |fs| fs.unlink(path(fs, "sub/dir")?, b"7")),
    whole("unlink", |fs| fs.unlink(path(fs, "dir")?, b"27")),
    whole("rename", |fs| {
        let (from, to) = (path(fs, "snap")?, path(fs, "snap/dir")?);
        fs.rename(from, b"14", to, b"new", RenameMode::Replace)
    }),
    whole("rename over another", |fs| {
        let (from, to) = (path(fs, "snap")?, path(fs, "snap/dir")?);
        fs.rename(from, b"12", to, b"15", RenameMode::Replace)
    }),
    whole("exchange", |fs| {
        let (from, to) = (fs.top_level(), path(fs, "dir")?);
        fs.rename(from, b"20", to, b"21", RenameMode::Exchange)
    }),
    whole("symlink", |fs| {
        let dir = path(fs, "dir")?;
        let mut handle = fs.begin(Reservation::create(1))?;
        handle.symlink(dir, b"new", b"target", &new(0o777)).map(drop)
    }),
    whole("set_xattr", |fs| {
        let id = path(fs, "snap/dir/7")?;
        fs.begin(Reservation::items(4))?.set_xattr(id, b"user.other", &[1; 900])
    }),
    whole("set_attributes", |fs| {
        let id = path(fs, "dir/7")?;
        let attributes = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
        fs.begin(Reservation::items(4))?.set_attributes(id, &attributes)
    }),
    of("append", "empty", |fs| {
        let data = PreparedData::new(vec![9; 20_000], &fs.write_options(None));
        let mut appender = fs.appender(path(fs, "empty")?, 0)?;
        appender.push(FileOffset(0), data)?;
        appender.finish()
    }),
    of("write", LARGE, |fs| fs.write(path(fs, LARGE)?, FileOffset(4090), &[1; 10])),
    of("write of inline data", SMALL, |fs| fs.write(path(fs, SMALL)?, FileOffset(9), &[1; 9])),
    of("write through memory", LARGE, |fs| {
        let file = fs.open_data(path(fs, LARGE)?)?;
        file.write(Offset::new(100), &[1; 50])?;
        file.write(Offset::new(8190), &[1; 9000])?;
        file.fsync()
    }),
    of("direct write", LARGE, |fs| {
        let file = fs.open_data(path(fs, LARGE)?)?;
        file.direct_write(Offset::new(4096), &[1; 4096])?;
        file.fsync()
    }),
    of("truncate", LARGE, |fs| fs.truncate(path(fs, LARGE)?, 5000)),
    of("truncate of an open file", LARGE, |fs| {
        let file = fs.open_data(path(fs, LARGE)?)?;
        file.truncate(Offset::new(5000))?;
        file.fsync()
    }),
    of("punch_hole", LARGE, |fs| {
        let file = fs.open_data(path(fs, LARGE)?)?;
        file.punch_hole(Offset::new(1000), 7000)?;
        file.fsync()
    }),
    of("allocate", SMALL, |fs| {
        let file = fs.open_data(path(fs, SMALL)?)?;
        file.allocate(Offset::ZERO, 50_000, Reach::Extends)?;
        file.fsync()
    }),
    of("clone_range", LARGE, |fs| {
        let (source, target) = (path(fs, ANOTHER)?, path(fs, LARGE)?);
        fs.clone_range(source, FileOffset(4096)..FileOffset(8192), target, FileOffset(0))
    }),
    of("dedupe_range", LARGE, |fs| {
        let (source, target) = (path(fs, ANOTHER)?, path(fs, LARGE)?);
        let range = FileOffset(0)..FileOffset(9000);
        fs.dedupe_range(source, range, target, FileOffset(0)).map(drop)
    }),
    of("copy_range", LARGE, |fs| {
        let (source, target) = (path(fs, ANOTHER)?, path(fs, LARGE)?);
        let range = FileOffset(100)..FileOffset(8500);
        fs.copy_range(source, range, target, FileOffset(4196)).map(drop)
    }),
    whole("create_subvolume", |fs| {
        let dir = path(fs, "dir")?;
        let mut handle = fs.begin(Reservation::create_subvolume())?;
        handle.create_subvolume(dir, b"new", &new(0o040_755)).map(drop)
    }),
    whole("snapshot", |fs| {
        let dir = path(fs, "dir")?;
        let options = SnapshotOptions { read_only: true };
        // Blocks that changed are written before the commit.
        fs.begin(Reservation::create(1))?.create(path(fs, "sub")?, b"new", &new(0o100_644))?;
        fs.snapshot(SUB, dir, b"new", &options).map(drop)
    }),
    whole("delete_subvolume", |fs| {
        fs.delete_subvolume(fs.top_level(), b"snap")?;
        fs.clean_deleted_subvolumes().map(drop)
    }),
    whole("set_subvolume_read_only", |fs| fs.set_subvolume_read_only(SUB, true)),
    whole("set_default_subvolume", |fs| fs.set_default_subvolume(SNAPSHOT)),
    whole("grow_device", |fs| fs.grow_device(DeviceId(1), 300 << 20)),
    whole("shrink_to_fit", |fs| fs.shrink_to_fit().map(drop)),
];

fn on(image: &Image) -> (SimArray, Arc<SimDevice>) {
    let array = SimArray::of_images(vec![image.clone()]);
    let device = Arc::new(array.device(0));
    (array, device)
}

/// Whether a request was for data of files, and not for what the filesystem itself consists of.
fn is_of_data(fs: &Filesystem, strike: &Strike) -> bool {
    strike.request == Request::Write
        && !strike.is_of_superblock()
        && fs.volume().chunks().iter().any(|chunk| {
            let start = chunk.stripes[0].offset.0;
            chunk.flags.contains(BlockGroupFlags::DATA)
                && (start..start + chunk.len_bytes).contains(&strike.at)
        })
}

/// It is aborted for one reason, and is read on.
fn assert_aborted(fs: &Filesystem, what: &str) {
    let cause = |error: Error| match error {
        Error::Aborted { first_cause, .. } => first_cause.to_string(),
        error => panic!("{what}; {error}"),
    };
    let first = cause(fs.begin(Reservation::items(1)).unwrap_err());
    assert_eq!(first, cause(fs.commit().unwrap_err()), "{what}");
    assert_eq!(first, cause(fs.truncate(path(fs, "sub/0").unwrap(), 1).unwrap_err()), "{what}");
    let mut bytes = [0; 90];
    fs.read(path(fs, "sub/2").unwrap(), FileOffset(0), &mut bytes).unwrap();
    assert_eq!(bytes, [b'2'; 90]);
    assert!(fs.read_dir(path(fs, "sub/dir").unwrap(), 0).unwrap().count() > 10, "{what}");
}

/// One operation on an image, with each of its requests of a kind failing, alone or with all that come after it; returns how many
/// there are.
fn fail_each(image: &Image, operation: &Operation, request: Request, stays: bool) -> u64 {
    let Operation { name, file, run } = *operation;
    let (_, device) = on(image);
    let fs = open(&device);
    let before = State::of(&fs, file);
    run(&fs).unwrap();
    fs.commit().unwrap();
    let after = State::of(&fs, file);
    drop(fs);
    for nth in 0.. {
        let (array, device) = on(image);
        let fs = open(&device);
        device.plan(Fault { device: None, request, after: nth, effect: Effect::Fail, stays });
        let ran = run(&fs);
        let did = ran.is_ok();
        let result = ran.and_then(|()| fs.commit());
        device.forget_faults();
        let what = format!("{name}, {request:?} {nth}, stays {stays}: {result:?}");
        let strikes = array.strikes();
        let Some(first) = strikes.first() else {
            result.unwrap();
            return nth;
        };
        let must_abort = !is_of_data(&fs, first);
        // Data that could not be written may have been written anew.
        assert!(result.is_err() || !must_abort, "{what}");
        assert!(nth < 200, "{what}");
        let is_aborted = matches!(fs.begin(Reservation::items(1)), Err(Error::Aborted { .. }));
        assert!(is_aborted || !must_abort, "{what}: {strikes:?}");
        if is_aborted {
            assert_aborted(&fs, &what);
            if did {
                // What was done and could not be committed is still shown.
                let tree = State::of(&fs, file).tree;
                tree.assert_same(&after.tree, &Compare::same_filesystem());
            }
        } else {
            fs.commit().unwrap_or_else(|error| panic!("{what}; {error}"));
        }
        drop(fs);
        check(&device, &what);
        let fs = try_open(&device).unwrap_or_else(|error| panic!("{what}; {error}"));
        let now = State::of(&fs, file);
        if result.is_ok() {
            assert!(now.is_same(&after), "{what}");
        } else if is_aborted {
            assert!(now.is_same(&before) || now.is_same(&after), "{what}");
        } else {
            now.assert_between(&before, &after, file, &what);
        }
        if nth == name.len() as u64 % 12 && !stays && oracle::require(Oracle::BtrfsProgs) {
            with_file(&device, assert_checks_clean);
        }
        // And it goes on from there.
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        handle.create(path(&fs, "dir").unwrap(), b"later", &new(0o100_644)).unwrap();
        drop(handle);
        fs.commit().unwrap_or_else(|error| panic!("{what}; {error}"));
        drop(fs);
        check(&device, &what);
    }
    unreachable!()
}

#[test]
fn operation_whose_nth_write_fails_is_there_whole_or_not_at_all() {
    let image = made(FILES);
    for operation in &OPERATIONS {
        for stays in [false, true] {
            let writes = fail_each(&image, operation, Request::Write, stays);
            println!("{}: {writes} writes", operation.name);
            // Two superblocks, the root tree at least.
            assert!(writes >= 3, "{}: {writes} writes", operation.name);
        }
    }
}

#[test]
fn operation_whose_nth_flush_fails_is_there_whole_or_not_at_all() {
    let image = made(FILES);
    for operation in &OPERATIONS {
        for stays in [false, true] {
            let flushes = fail_each(&image, operation, Request::Flush, stays);
            assert!(flushes >= 2, "{}: {flushes} flushes", operation.name);
        }
    }
}

/// One copy of a block is not what was promised: that the other was written is no success.
#[test]
fn operation_whose_nth_write_of_one_copy_fails_is_there_whole_or_not_at_all() {
    let image = made_with_copies(FILES);
    for name in ["create", "unlink", "write through memory", "snapshot"] {
        let operation = OPERATIONS.iter().find(|operation| operation.name == name).unwrap();
        let writes = fail_each(&image, operation, Request::Write, false);
        assert!(writes >= 10, "{name}: {writes} writes");
    }
}

/// What a clean-up did not bring to the medium is done by the next.
#[test]
fn clean_up_of_a_deleted_subvolume_whose_nth_request_fails_goes_on_from_there() {
    let (_, device) = on(&made(FILES));
    let fs = open(&device);
    fs.delete_subvolume(fs.top_level(), b"snap").unwrap();
    fs.commit().unwrap();
    drop(fs);
    let operation =
        whole("clean-up", |fs| fs.clean_deleted_subvolumes().map(|count| assert_eq!(count, 1)));
    for request in [Request::Write, Request::Flush] {
        for stays in [false, true] {
            let requests = fail_each(&device.image(), &operation, request, stays);
            assert!(requests >= 2, "{requests}");
        }
    }
}
