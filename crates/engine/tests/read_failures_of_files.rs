//! Operations on what files hold and on the filesystem itself, each with each of its reads failing: then it has been done in
//! whole steps or the transaction is aborted, and it can be done again.

mod common;

use std::sync::Arc;

use common::simulated::{State, check, made, open, path};
use ubtrfs_engine::{Error, Filesystem, SnapshotOptions};
use ubtrfs_iomap::{FileOffset as Offset, Reach};
use ubtrfs_ondisk::{DeviceId, FileOffset, RootId};
use ubtrfs_testkit::crash::{Effect, Fault, Image, Request, SimArray, SimDevice};

const FILES: u64 = 80;
const SUB: RootId = RootId(256);
const SNAPSHOT: RootId = RootId(257);

struct Operation {
    name: &'static str,
    /// The file that it changes in steps, some of which may have been done where it fails.
    file: Option<&'static str>,
    /// Reads that it makes at least.
    reads_min: u64,
    run: fn(&Filesystem) -> Result<(), Error>,
}

const fn of(
    name: &'static str,
    file: &'static str,
    run: fn(&Filesystem) -> Result<(), Error>,
) -> Operation {
    Operation { name, file: Some(file), reads_min: 3, run }
}

const fn whole(name: &'static str, run: fn(&Filesystem) -> Result<(), Error>) -> Operation {
    Operation { name, file: None, reads_min: 1, run }
}

/// A file of 9000 bytes, one of 90 that are inline, and others like them.
const LARGE: &str = "dir/33";
const SMALL: &str = "dir/77";
const ANOTHER: &str = "snap/dir/27";

const OPERATIONS: [Operation; 24] = [
    of("part of a block written through memory", LARGE, |fs| {
        let file = fs.open_data(path(fs, LARGE)?)?;
        file.write(Offset::new(100), &[1; 50])?;
        file.write(Offset::new(8190), &[1; 50])?;
        file.fsync()
    }),
    of("part of inline data written through memory", SMALL, |fs| {
        let file = fs.open_data(path(fs, SMALL)?)?;
        file.write(Offset::new(10), &[1; 50])?;
        file.fsync()
    }),
    of("inline data appended to through memory", SMALL, |fs| {
        let file = fs.open_data(path(fs, SMALL)?)?;
        file.append(&[1; 9000])?;
        file.fsync()
    }),
    of("a direct write", LARGE, |fs| {
        let file = fs.open_data(path(fs, LARGE)?)?;
        file.direct_write(Offset::new(4096), &[1; 4096])?;
        file.fsync()
    }),
    of("an open file cut off", LARGE, |fs| {
        let file = fs.open_data(path(fs, LARGE)?)?;
        file.truncate(Offset::new(5000))?;
        file.fsync()
    }),
    of("a write", LARGE, |fs| fs.write(path(fs, LARGE)?, FileOffset(4090), &[1; 10])),
    of("a write to inline data", SMALL, |fs| {
        fs.write(path(fs, SMALL)?, FileOffset(4090), &[1; 10])
    }),
    of("a file cut off", LARGE, |fs| fs.truncate(path(fs, LARGE)?, 5000)),
    of("an inline file extended", SMALL, |fs| fs.truncate(path(fs, SMALL)?, 20_000)),
    of("an inline file cut off", SMALL, |fs| fs.truncate(path(fs, SMALL)?, 20)),
    of("a clone", LARGE, |fs| {
        let (source, target) = (path(fs, ANOTHER)?, path(fs, LARGE)?);
        fs.clone_range(source, FileOffset(4096)..FileOffset(8192), target, FileOffset(0))
    }),
    of("a clone of inline data", SMALL, |fs| {
        let (source, target) = (path(fs, "snap/dir/11")?, path(fs, SMALL)?);
        fs.clone_range(source, FileOffset(0)..FileOffset(90), target, FileOffset(0))
    }),
    of("a clone over inline data of an open file", SMALL, |fs| {
        let (source, target) = (path(fs, ANOTHER)?, path(fs, SMALL)?);
        let file = fs.open_data(target)?;
        fs.clone_range(source, FileOffset(0)..FileOffset(8192), target, FileOffset(0))?;
        file.fsync()
    }),
    of("deduplication", LARGE, |fs| {
        let (source, target) = (path(fs, ANOTHER)?, path(fs, LARGE)?);
        let range = FileOffset(0)..FileOffset(9000);
        assert!(fs.dedupe_range(source, range, target, FileOffset(0))?);
        Ok(())
    }),
    of("a copy that shares", LARGE, |fs| {
        let (source, target) = (path(fs, ANOTHER)?, path(fs, LARGE)?);
        let range = FileOffset(100)..FileOffset(8500);
        fs.copy_range(source, range, target, FileOffset(4196)).map(drop)
    }),
    of("a copy of bytes", LARGE, |fs| {
        let (source, target) = (path(fs, ANOTHER)?, path(fs, LARGE)?);
        fs.copy_range(source, FileOffset(100)..FileOffset(8500), target, FileOffset(4000)).map(drop)
    }),
    of("a hole", LARGE, |fs| {
        let file = fs.open_data(path(fs, LARGE)?)?;
        file.punch_hole(Offset::new(1000), 7000)?;
        file.fsync()
    }),
    of("zeros", LARGE, |fs| {
        let file = fs.open_data(path(fs, LARGE)?)?;
        file.zero_range(Offset::new(1000), 7000)?;
        file.fsync()
    }),
    of("preallocation", SMALL, |fs| {
        let file = fs.open_data(path(fs, SMALL)?)?;
        file.allocate(Offset::ZERO, 50_000, Reach::Extends)?;
        file.fsync()
    }),
    of("unsharing", ANOTHER, |fs| {
        let file = fs.open_data(path(fs, ANOTHER)?)?;
        file.unshare(Offset::ZERO, 9000)?;
        file.fsync()
    }),
    whole("a subvolume made read-only", |fs| fs.set_subvolume_read_only(SUB, true)),
    whole("the default subvolume", |fs| fs.set_default_subvolume(SNAPSHOT)),
    whole("a label", |fs| fs.set_label(b"another")),
    whole("a longer device", |fs| fs.grow_device(DeviceId(1), 300 << 20)),
];

fn read_fault(after: u64) -> Fault {
    Fault { device: None, request: Request::Read, after, effect: Effect::Fail, stays: false }
}

fn on(image: &Image) -> (SimArray, Arc<SimDevice>) {
    let array = SimArray::of_images(vec![image.clone()]);
    let device = Arc::new(array.device(0));
    (array, device)
}

#[test]
fn change_of_a_file_whose_nth_read_fails_is_done_in_whole_steps_or_aborts() {
    let image = made(FILES);
    for Operation { name, file, reads_min, run } in OPERATIONS {
        let (_, device) = on(&image);
        let fs = open(&device);
        let before = State::of(&fs, file);
        run(&fs).unwrap();
        fs.commit().unwrap();
        let after = State::of(&fs, file);
        drop(fs);
        let mut nth = 0;
        loop {
            let (array, device) = on(&image);
            let fs = open(&device);
            device.plan(read_fault(nth));
            let result = run(&fs);
            device.forget_faults();
            let what = format!("{name}, read {nth}: {result:?}");
            if array.strikes().is_empty() {
                result.unwrap();
                break;
            }
            nth += 1;
            assert!(nth < 300, "{what}");
            // What is only looked for ahead may be missed.
            let is_aborted = match fs.commit() {
                Ok(()) => false,
                Err(Error::Aborted { .. }) => true,
                Err(error) => panic!("{what}; {error}"),
            };
            assert!(!(is_aborted && result.is_ok()), "{what}");
            let (_, copy) = on(&device.image());
            check(&copy, &what);
            let now = State::of(&open(&copy), file);
            match (is_aborted, result.is_ok()) {
                (true, _) => assert!(now.is_same(&before), "{what}"),
                (false, true) => assert!(now.is_same(&after), "{what}"),
                (false, false) => now.assert_between(&before, &after, file, &what),
            }
            // It can be done again, by the same session if that goes on.
            let fs = if is_aborted { open(&copy) } else { fs };
            let device = if is_aborted { copy } else { device };
            run(&fs).unwrap_or_else(|error| panic!("{what}, again: {error}"));
            fs.commit().unwrap();
            drop(fs);
            assert!(State::of(&open(&device), file).bytes == after.bytes, "{what}");
            check(&device, &format!("{what}, again"));
        }
        println!("{name}: {nth} reads");
        assert!(nth >= reads_min, "{name}: {nth} reads");
    }
}

#[test]
fn clean_up_of_a_deleted_subvolume_whose_nth_read_fails_goes_on_from_there() {
    let (_, device) = on(&made(FILES));
    let fs = open(&device);
    let top = fs.top_level();
    fs.snapshot(SUB, top, b"another", &SnapshotOptions { read_only: true }).unwrap();
    fs.commit().unwrap();
    fs.delete_subvolume(top, b"snap").unwrap();
    fs.delete_subvolume(top, b"sub").unwrap();
    fs.commit().unwrap();
    let expected = State::of(&fs, None);
    drop(fs);
    let image = device.image();
    let mut nth = 0;
    loop {
        let (array, device) = on(&image);
        let fs = open(&device);
        device.plan(read_fault(nth));
        let result = fs.clean_deleted_subvolumes();
        device.forget_faults();
        let what = format!("read {nth}: {result:?}");
        if array.strikes().is_empty() {
            assert_eq!(result.unwrap(), 2);
            break;
        }
        assert!(result.is_err(), "{what}");
        nth += 1;
        match fs.commit() {
            Ok(()) | Err(Error::Aborted { .. }) => {}
            Err(error) => panic!("{what}; {error}"),
        }
        drop(fs);
        check(&device, &what);
        let fs = open(&device);
        assert!(State::of(&fs, None).is_same(&expected), "{what}");
        fs.clean_deleted_subvolumes().unwrap();
        fs.commit().unwrap();
        assert!(fs.subvolumes().unwrap().iter().all(|sub| !sub.deleted));
        assert!(State::of(&fs, None).is_same(&expected), "{what}");
        drop(fs);
        check(&device, &what);
    }
    assert!(nth > 10, "{nth} reads");
}
