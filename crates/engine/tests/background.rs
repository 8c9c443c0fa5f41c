//! What goes on beside the users of a filesystem: commits by time, the freeing of deleted
//! subvolumes; and one commit for many who ask at once.

mod common;

use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::open_for_writing;
use ubtrfs_engine::{
    BackgroundOptions, Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, Reservation, mkfs,
};
use ubtrfs_iomap::FileOffset;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{Oracle, assert_checks_clean, oracle};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Window};

fn make(image: &Path, runtime: Runtime) -> Filesystem {
    let mode = OpenMode::CreateNew { len_bytes: 256 << 20 };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, mode, Window::Whole).unwrap());
    let runtime = Arc::new(runtime);
    let volume = mkfs(vec![device], &MkfsOptions::default(), &runtime).unwrap();
    Filesystem::open(volume, OpenOptions { runtime, ..OpenOptions::default() }).unwrap()
}

fn create(fs: &Filesystem, dir: InodeId, name: &str) -> InodeId {
    let new = NewInode::new(0o100_644, Time::default());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    handle.create(dir, name.as_bytes(), &new).unwrap()
}

fn make_subvolume(fs: &Filesystem, name: &str, files: usize) -> InodeId {
    let new = NewInode::new(0o755, Time::default());
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    let root = handle.create_subvolume(fs.top_level(), name.as_bytes(), &new).unwrap();
    drop(handle);
    for number in 0..files {
        create(fs, root, &format!("file {number}"));
    }
    root
}

/// Waits for what a thread does soon; the limit is only for a test that fails.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}: not in a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn often() -> BackgroundOptions {
    BackgroundOptions { commit_every: Duration::from_millis(20), ..BackgroundOptions::default() }
}

fn judge(image: &Path) {
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(image);
    }
}

/// The thread that writes back what files have in memory is there, and does so without a commit, or a writer that has to wait.
#[test]
fn background_writes_back_what_is_dirty_of_open_files() {
    const LEN: usize = 12 << 20;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image, Runtime::system());
    let id = create(&fs, fs.top_level(), "file");
    let file = fs.open_data(id).unwrap();
    let write = |from: usize| {
        for at in (from..from + LEN).step_by(1 << 20) {
            file.write(FileOffset::new(at as u64), &vec![7; 1 << 20]).unwrap();
        }
    };
    write(0);
    // Less than writers may have dirty, and more than the background lets be.
    assert_eq!(fs.unstored_bytes(id), LEN as u64, "nobody is there to write back");
    let commit_every = Duration::from_secs(3600);
    let options = BackgroundOptions { commit_every, ..BackgroundOptions::default() };
    let commits = || fs.superblock().generation.get();
    let before = commits();
    let background = fs.run_in_background(options).unwrap();
    write(LEN);
    wait_until("little is dirty", || fs.unstored_bytes(id) <= 8 << 20);
    assert_eq!(commits(), before);
    background.stop().unwrap();
    drop((file, fs));
    judge(&image);
}

#[test]
fn background_commits_what_nobody_commits_and_frees_deleted_subvolumes() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image, Runtime::system());
    make_subvolume(&fs, "doomed", 6000);
    fs.commit().unwrap();
    let full_bytes = fs.usage().unwrap().used_bytes;
    let background = fs.run_in_background(often()).unwrap();
    create(&fs, fs.top_level(), "kept");
    let before = fs.superblock().generation.get();
    create(&fs, fs.top_level(), "and this");
    wait_until("a commit by time", || fs.superblock().generation.get() > before);
    fs.delete_subvolume(fs.top_level(), b"doomed").unwrap();
    wait_until("the space of the subvolume", || {
        fs.usage().unwrap().used_bytes + (1 << 20) < full_bytes
    });
    background.stop().unwrap();
    // What was durable by then is all of it: nothing is committed here.
    drop(fs);
    judge(&image);
    let fs = open_for_writing(&image);
    assert!(fs.lookup(fs.top_level(), b"kept").is_ok());
    assert!(fs.lookup(fs.top_level(), b"doomed").is_err());
    assert_eq!(fs.clean_deleted_subvolumes().unwrap(), 0);
}

/// A commit by time in the middle of what is to be done all at once would tear it.
#[test]
fn background_leaves_alone_who_holds_commits() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image, Runtime::system());
    fs.commit().unwrap();
    let background = fs.run_in_background(often()).unwrap();
    for round in 0..5 {
        let held = fs.hold_commits();
        let before = fs.superblock().generation.get();
        for number in 0..20 {
            create(&fs, fs.top_level(), &format!("file {round} {number}"));
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(fs.superblock().generation.get(), before);
        drop(held);
        wait_until("a commit afterwards", || fs.superblock().generation.get() > before);
    }
    background.stop().unwrap();
    drop(fs);
    judge(&image);
}

/// A simulated run has no threads: it says itself when time has passed.
#[test]
fn background_without_threads_works_step_by_step() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image, Runtime::simulated(5));
    make_subvolume(&fs, "doomed", 300);
    let background = fs.run_in_background(often()).unwrap();
    fs.delete_subvolume(fs.top_level(), b"doomed").unwrap();
    let before = fs.superblock().generation.get();
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(fs.superblock().generation.get(), before, "a thread ran");
    fs.background_step(&often()).unwrap();
    assert!(fs.superblock().generation.get() > before);
    assert_eq!(fs.clean_deleted_subvolumes().unwrap(), 0);
    background.stop().unwrap();
    drop(fs);
    judge(&image);
}

#[test]
fn many_who_commit_at_once_share_a_commit() {
    const THREADS: usize = 8;
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"), Runtime::system());
    fs.commit().unwrap();
    let before = fs.superblock().generation.get();
    let new = NewInode::new(0o100_644, Time::default());
    let mut open = fs.begin(Reservation::create(0)).unwrap();
    open.create(fs.top_level(), b"open", &new).unwrap();
    let barrier = Barrier::new(THREADS + 1);
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (fs, barrier) = (&fs, &barrier);
            scope.spawn(move || {
                create(fs, fs.top_level(), &format!("file {number}"));
                barrier.wait();
                fs.commit().unwrap();
                assert!(fs.superblock().generation.get() > before, "it is durable");
            });
        }
        barrier.wait();
        drop(open);
    });
    assert_eq!(fs.superblock().generation.get(), before + 1);
}
