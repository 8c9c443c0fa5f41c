//! Files that are written in place of what they were, and not synced: after a crash there is the old or the new, whoever commits between.

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::full::{create, make, open, open_failing, open_with, read};
use ubtrfs_engine::{
    BackgroundOptions, DataFile, Error, Filesystem, InodeId, NewInode, OpenOptions, RenameMode,
    Reservation, SnapshotOptions,
};
use ubtrfs_iomap::{FiemapSync, FileOffset, FileRange};
use ubtrfs_rt::Time;

const OLD: &[u8] = &[1; 600_000];
const NEW: &[u8] = &[2; 500_000];
const START: FileOffset = FileOffset::ZERO;

type Commit = fn(&Filesystem, &DataFile);

/// Commits of which nobody that writes the file knows.
const COMMITS: [(&str, Commit); 3] = [
    ("commit", |fs, _| fs.commit().unwrap()),
    ("by time", |fs, _| {
        let options = BackgroundOptions {
            commit_every: Duration::from_secs(30),
            ..BackgroundOptions::default()
        };
        fs.background_step(&options).unwrap();
    }),
    ("fsync of another", |_, other| {
        other.write(START, b"x").unwrap();
        other.fsync().unwrap();
    }),
];

/// What the image holds now, as a crash of the process would leave it.
fn after_crash(image: &Path, name: &[u8]) -> Vec<u8> {
    let copy = image.with_extension("copy");
    std::fs::copy(image, &copy).unwrap();
    let fs = open(&copy);
    let id = fs.lookup(fs.top_level(), name).unwrap();
    read(&fs, id)
}

fn synced(fs: &Filesystem, name: &str) -> DataFile {
    let file = create(fs, name, 0).unwrap();
    file.write(START, OLD).unwrap();
    file.fsync().unwrap();
    file
}

/// The file was empty, as long as its data was in memory only: for half a minute.
#[test]
fn file_that_takes_the_name_of_another_has_its_contents_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    for (what, commit) in COMMITS {
        for mode in [RenameMode::Replace, RenameMode::Whiteout] {
            let fs = open(&image);
            let name = format!("{what} {mode:?}");
            let [new, other] = ["new", "other"].map(|word| format!("{word} {name}"));
            let (top, other) = (fs.top_level(), create(&fs, &other, 0).unwrap());
            drop(synced(&fs, &name));
            create(&fs, &new, 0).unwrap().write(START, NEW).unwrap();
            fs.rename(top, new.as_bytes(), top, name.as_bytes(), mode).unwrap();
            commit(&fs, &other);
            assert!(after_crash(&image, name.as_bytes()) == NEW, "{name}");
        }
    }
}

/// As `> file` does it.
#[test]
fn file_that_was_cut_to_nothing_has_its_new_contents_with_the_next_commit() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    for (what, commit) in COMMITS {
        let fs = open(&image);
        let other = create(&fs, &format!("other, {what}"), 0).unwrap();
        let file = synced(&fs, what);
        file.truncate(START).unwrap();
        file.write(START, NEW).unwrap();
        commit(&fs, &other);
        assert!(after_crash(&image, what.as_bytes()) == NEW, "{what}");
        // What goes on being written, too.
        file.write(FileOffset::new(NEW.len() as u64), OLD).unwrap();
        drop(file);
        commit(&fs, &other);
        assert!(after_crash(&image, what.as_bytes()) == [NEW, OLD].concat(), "{what}");
    }
}

/// Nothing is written for files that are only new, or only changed: that is for who syncs them.
#[test]
fn files_that_replace_nothing_wait_for_their_writeback() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let fs = open(&image);
    let (top, changed) = (fs.top_level(), synced(&fs, "changed"));
    changed.write(START, NEW).unwrap();
    let new = create(&fs, "new", 0).unwrap();
    new.write(START, NEW).unwrap();
    fs.rename(top, b"new", top, b"newer", RenameMode::Replace).unwrap();
    drop(create(&fs, "empty", 0).unwrap());
    fs.rename(top, b"newer", top, b"empty", RenameMode::Replace).unwrap();
    fs.commit().unwrap();
    assert_eq!(fs.unstored_bytes(new.id()), 503_808, "still dirty");
    assert!(after_crash(&image, b"changed") == OLD);
}

/// What found no room before the commit finds it behind it, and not only before the next one: between the two the file was empty on the medium,
/// and what it had been gone.
#[test]
fn new_contents_that_find_no_room_before_a_commit_are_stored_behind_it() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let options = OpenOptions { cache_bytes: 4 << 20, ..OpenOptions::default() };
    let fs = open_with(&image, options);
    let file = synced(&fs, "cut");
    let held = fs.hold_commits();
    file.truncate(START).unwrap();
    file.write(START, NEW).unwrap();
    // Until the transaction takes no more.
    let refused = (0..1_000_000).find_map(|made| create(&fs, &format!("filler {made}"), 0).err());
    assert!(matches!(refused, Some(Error::Limit { .. })), "{refused:?}");
    assert!(fs.unstored_bytes(file.id()) > 0);
    fs.commit().unwrap();
    drop(held);
    assert!(after_crash(&image, b"cut") == NEW);
}

fn in_snapshot(fs: &Filesystem, sub: InodeId, name: &str) -> Vec<u8> {
    let options = SnapshotOptions { read_only: true };
    let made = fs.snapshot(sub.root, fs.top_level(), name.as_bytes(), &options).unwrap();
    read(fs, fs.lookup(made, b"file").unwrap())
}

/// Waits until a thread of this process sleeps, and goes on sleeping: it waits for what has been stopped.
fn wait_until_asleep(thread: rustix::thread::Pid) {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    let mut asleep_count = 0;
    while asleep_count < 100 {
        std::thread::sleep(Duration::from_millis(1));
        let stat = std::fs::read_to_string(&path).unwrap();
        // Behind the name, which is in parentheses.
        let is_asleep = stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'));
        asleep_count = if is_asleep { asleep_count + 1 } else { 0 };
    }
}

/// A file that was cut while somebody flushed it, and is written anew, was said to end where it ends in memory by then: after a crash it had
/// zeros there, for data that was not on the medium.
#[test]
fn file_that_was_cut_while_it_was_flushed_has_no_bytes_after_a_crash_that_nobody_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let (fs, faults) = open_failing(&image);
    let first_block = FileRange::new(START, FileOffset::new(4096));
    let file = synced(&fs, "file");
    file.write(START, &OLD[..4096]).unwrap();
    faults.stalls.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        // Brings one block to the device, which is all that is dirty. Who syncs the file waits for it, as he has nothing to write himself.
        scope.spawn(|| file.fiemap(first_block, 1, FiemapSync::WriteBack).unwrap());
        while !faults.is_stalled.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let (tell, told) = std::sync::mpsc::channel();
        let file = &file;
        let sync = scope.spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            file.fsync().unwrap();
        });
        wait_until_asleep(told.recv().unwrap());
        assert!(!sync.is_finished());
        file.truncate(first_block.end).unwrap();
        file.write(first_block.end, NEW).unwrap();
        faults.stalls.store(false, Ordering::Relaxed);
        sync.join().unwrap();
    });
    assert!(fs.unstored_bytes(file.id()) > 0, "the new contents went with it");
    assert!(after_crash(&image, b"file") == OLD[..4096]);
    file.fsync().unwrap();
    assert!(after_crash(&image, b"file") == [&OLD[..4096], NEW].concat());
    drop(file);
    drop(fs);
    common::judge(&image);
}

/// As the test before, in snapshots, with whatever order threads come to.
#[test]
fn snapshot_beside_who_writes_anew_has_no_bytes_that_nobody_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 1 << 30);
    let fs = open(&image);
    let (top, new) = (fs.top_level(), NewInode::new(0o755, Time::default()));
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    let sub = handle.create_subvolume(top, b"sub", &new).unwrap();
    let id = handle.create(sub, b"file", &NewInode::new(0o100_644, Time::default())).unwrap();
    drop(handle);
    let file = fs.open_data(id).unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // At least once: where the thread came late there was nothing in the file at the end.
        scope.spawn(|| {
            loop {
                for bytes in [OLD, NEW] {
                    file.truncate(START).unwrap();
                    file.write(START, bytes).unwrap();
                }
                if is_done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for number in 0..200 {
            let name = format!("snapshot {number}");
            let bytes = in_snapshot(&fs, sub, &name);
            let zero = bytes.iter().position(|byte| *byte == 0);
            assert_eq!(zero, None, "{name}, {} bytes", bytes.len());
        }
        is_done.store(true, Ordering::Relaxed);
    });
    // How many of them had something is chance; the last one has all.
    assert!(in_snapshot(&fs, sub, "last") == NEW);
    drop(file);
    fs.sync().unwrap();
    drop(fs);
    common::judge(&image);
}
