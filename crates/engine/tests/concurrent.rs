//! Who comes between: two threads, a commit, a full filesystem, an earlier session. Each test is a
//! counterexample that was one once.

mod common;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use common::open_for_writing;
use ubtrfs_engine::{
    Error, Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, PreparedData, Reservation,
    SnapshotOptions, mkfs,
};
use ubtrfs_ondisk::{FileOffset, PhysicalAddr};
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{Oracle, assert_checks_clean, oracle};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Window};

const RW: SnapshotOptions = SnapshotOptions { read_only: false };

fn make(directory: &Path, len_bytes: u64, nodesize_bytes: u32) -> (PathBuf, Filesystem) {
    let image = directory.join("image");
    let mode = OpenMode::CreateNew { len_bytes };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&image, mode, Window::Whole).unwrap());
    let options = MkfsOptions { nodesize_bytes, ..MkfsOptions::default() };
    let volume = mkfs(vec![device], &options, &Arc::new(Runtime::system())).unwrap();
    (image, Filesystem::open(volume, OpenOptions::default()).unwrap())
}

fn file_mode() -> NewInode {
    NewInode::new(0o100_644, Time::default())
}

fn create(fs: &Filesystem, dir: InodeId, name: &[u8]) -> InodeId {
    fs.begin(Reservation::create(0)).unwrap().create(dir, name, &file_mode()).unwrap()
}

fn subvolume(fs: &Filesystem, name: &[u8]) -> InodeId {
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    handle.create_subvolume(fs.top_level(), name, &NewInode::new(0o755, Time::default())).unwrap()
}

/// Commits, and lets `btrfs check` look at what came out.
fn commit_and_judge(fs: Filesystem, image: &Path) {
    fs.commit().unwrap();
    drop(fs);
    judge(image);
}

fn judge(image: &Path) {
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(image);
    }
}

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// `begin` cleans the orphans of a subvolume that was first looked at, and evicts them: under the
/// data lock that the caller holds. An orphan whose number has the same lock is waited for forever.
#[test]
fn first_write_with_an_old_orphan_of_the_same_lock_returns() {
    let directory = temporary();
    let (image, fs) = make(directory.path(), 256 << 20, 16_384);
    let file = create(&fs, fs.top_level(), b"file");
    for at in 0..64 {
        create(&fs, fs.top_level(), format!("other {at}").as_bytes());
    }
    let gone = fs.unlink_deferred(fs.top_level(), b"other 63").unwrap().unwrap();
    assert_eq!(gone.inode.0 - file.inode.0, 64);
    fs.commit().unwrap();
    drop(fs);
    let fs = open_for_writing(&image);
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        fs.write(file, FileOffset(0), b"bytes").unwrap();
        sender.send(()).unwrap();
    });
    receiver.recv_timeout(Duration::from_secs(20)).expect("the write returns");
}

/// The file's subvolume became read-only between the check and the placing: only the inode's update
/// noticed, after the extents were entered, and aborted the filesystem.
#[test]
fn appender_of_a_subvolume_that_became_read_only_aborts_nothing() {
    let directory = temporary();
    let (image, fs) = make(directory.path(), 256 << 20, 16_384);
    let top = subvolume(&fs, b"sub");
    let file = create(&fs, top, b"file");
    let mut appender = fs.appender(file, 0).unwrap();
    let data = PreparedData::new(vec![7; 64 << 10], &fs.write_options(None));
    appender.push(FileOffset(0), data).unwrap();
    fs.set_subvolume_read_only(top.root, true).unwrap();
    let error = appender.finish().unwrap_err();
    assert!(matches!(error, Error::ReadOnly { .. }), "{error}");
    create(&fs, fs.top_level(), b"another");
    commit_and_judge(fs, &image);
}

#[test]
fn appender_of_a_file_that_was_removed_aborts_nothing() {
    let directory = temporary();
    let (image, fs) = make(directory.path(), 256 << 20, 16_384);
    let file = create(&fs, fs.top_level(), b"file");
    let mut appender = fs.appender(file, 0).unwrap();
    let data = PreparedData::new(vec![7; 64 << 10], &fs.write_options(None));
    appender.push(FileOffset(0), data).unwrap();
    fs.unlink(fs.top_level(), b"file").unwrap();
    let error = appender.finish().unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    create(&fs, fs.top_level(), b"another");
    commit_and_judge(fs, &image);
}

#[test]
fn appender_of_a_subvolume_that_was_deleted_aborts_nothing() {
    let directory = temporary();
    let (image, fs) = make(directory.path(), 256 << 20, 16_384);
    let top = subvolume(&fs, b"sub");
    let file = create(&fs, top, b"file");
    let mut appender = fs.appender(file, 0).unwrap();
    let data = PreparedData::new(vec![7; 64 << 10], &fs.write_options(None));
    appender.push(FileOffset(0), data).unwrap();
    fs.delete_subvolume(fs.top_level(), b"sub").unwrap();
    let error = appender.finish().unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    create(&fs, fs.top_level(), b"another");
    commit_and_judge(fs, &image);
}

/// Whoever removes an empty subvolume looked first and deleted then: what a command had made in between went with it.
#[test]
fn empty_subvolume_is_deleted_or_has_what_was_made_in_it() {
    const ROUNDS: u32 = 200;
    let directory = temporary();
    let (image, fs) = make(directory.path(), 256 << 20, 16_384);
    let top = fs.top_level();
    let sub = subvolume(&fs, b"holds one");
    create(&fs, sub, b"file");
    let refused = fs.delete_empty_subvolume(top, b"holds one");
    assert!(matches!(refused, Err(Error::NotEmpty { .. })), "{refused:?}");
    assert_eq!(fs.lookup(top, b"holds one").unwrap(), sub);
    create(&fs, sub, b"another");
    assert_eq!(fs.read_dir(sub, 0).unwrap().count(), 2);
    assert!(matches!(fs.delete_empty_subvolume(sub, b"file"), Err(Error::InvalidArgument { .. })));
    let (mut kept, mut gone) = (0, 0);
    for round in 0..ROUNDS {
        let sub = subvolume(&fs, b"sub");
        let started = Barrier::new(2);
        let (made, deleted) = std::thread::scope(|scope| {
            let made = scope.spawn(|| {
                // Half of them begin before.
                let handle = (round % 2 == 0).then(|| fs.begin(Reservation::items(200)).unwrap());
                started.wait();
                let mut handle = match handle {
                    Some(handle) => handle,
                    None => fs.begin(Reservation::items(200))?,
                };
                for number in 0..round % 16 {
                    handle.create(top, format!("{round} {number}").as_bytes(), &file_mode())?;
                }
                handle.create(sub, b"file", &file_mode())
            });
            started.wait();
            let deleted = fs.delete_empty_subvolume(top, b"sub");
            (made.join().unwrap(), deleted)
        });
        match (made, deleted) {
            (Ok(id), Err(Error::NotEmpty { .. })) => {
                assert_eq!(fs.lookup(sub, b"file").unwrap(), id, "{round}");
                fs.delete_subvolume(top, b"sub").unwrap();
                kept += 1;
            }
            (Err(Error::NotFound { .. }), Ok(root)) => {
                assert_eq!(root, sub.root);
                gone += 1;
            }
            other => panic!("{round}: {other:?}"),
        }
    }
    assert!(kept > 0, "{gone} gone");
    let sub = subvolume(&fs, b"last");
    assert_eq!(fs.delete_empty_subvolume(top, b"last").unwrap(), sub.root);
    let made = fs.begin(Reservation::items(200)).unwrap().create(sub, b"file", &file_mode());
    assert!(matches!(made, Err(Error::NotFound { .. })), "{made:?}");
    commit_and_judge(fs, &image);
}

/// A device that takes its time to read.
#[derive(Debug)]
struct SlowDevice {
    inner: FileDevice,
    is_slow: AtomicBool,
}

impl Device for SlowDevice {
    ubtrfs_testkit::device_passes_on!(inner: name, len_bytes, write_at, flush, discard, resize, is_read_only);

    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> std::io::Result<()> {
        if self.is_slow.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(3));
        }
        self.inner.read_at(at, buf)
    }
}

/// Two trees that share a block copy it at once: each counts the other's reference, both leave the
/// block to the other, and what lies below keeps references by the address of a block that is gone.
#[test]
fn two_trees_that_copy_a_shared_block_at_once_keep_the_counts() {
    let directory = temporary();
    let image = directory.path().join("image");
    let mode = OpenMode::CreateNew { len_bytes: 512 << 20 };
    let device = Arc::new(SlowDevice {
        inner: FileDevice::open(&image, mode, Window::Whole).unwrap(),
        is_slow: AtomicBool::new(false),
    });
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let volume = mkfs(vec![device.clone()], &options, &Arc::new(Runtime::system())).unwrap();
    // Few blocks stay in memory.
    let options = OpenOptions { cache_bytes: 64 << 10, ..OpenOptions::default() };
    let fs = Filesystem::open(volume, options).unwrap();
    let sub = subvolume(&fs, b"sub");
    let data = PreparedData::new(vec![7; 4096], &fs.write_options(None));
    let mut ids = Vec::new();
    for at in 0..400 {
        let id = create(&fs, sub, at.to_string().as_bytes());
        let mut appender = fs.appender(id, 0).unwrap();
        appender.push(FileOffset(0), data.clone()).unwrap();
        appender.finish().unwrap();
        ids.push(id.inode);
    }
    fs.commit().unwrap();
    let snapshot = fs.snapshot(sub.root, fs.top_level(), b"snapshot", &RW).unwrap();
    fs.commit().unwrap();
    for round in 0..10 {
        let barrier = Barrier::new(2);
        device.is_slow.store(true, Ordering::Relaxed);
        std::thread::scope(|scope| {
            for root in [sub.root, snapshot.root] {
                let id = InodeId { root, inode: ids[round * 37] };
                let (fs, barrier) = (&fs, &barrier);
                scope.spawn(move || {
                    let mut handle = fs.begin(Reservation::items(4)).unwrap();
                    barrier.wait();
                    handle.set_xattr(id, b"user.a", b"1").unwrap();
                });
            }
        });
        device.is_slow.store(false, Ordering::Relaxed);
        fs.commit().unwrap();
    }
    drop(fs);
    judge(&image);
}

/// Space that was freed needs a commit to be used again, which a write did not make.
#[test]
fn data_freed_in_this_transaction_is_no_want_of_space() {
    let directory = temporary();
    let (_, fs) = make(directory.path(), 256 << 20, 16_384);
    let file = create(&fs, fs.top_level(), b"file");
    let mut at = 0;
    while fs.write(file, FileOffset(at), &vec![7; 1 << 20]).is_ok() {
        at += 1 << 20;
    }
    fs.commit().unwrap();
    fs.unlink(fs.top_level(), b"file").unwrap();
    let file = create(&fs, fs.top_level(), b"file");
    fs.write(file, FileOffset(0), &vec![7; 1 << 20]).unwrap();
}

fn fill_metadata(fs: &Filesystem) {
    let dir = fs.top_level();
    for at in 0_u64.. {
        let Ok(mut handle) = fs.begin(Reservation::create(1)) else { break };
        let name = format!("{at:0>200}");
        let id = handle.create(dir, name.as_bytes(), &file_mode()).unwrap();
        handle.set_xattr(id, b"user.x", &[7; 3000]).unwrap();
    }
    fs.commit().unwrap();
}

/// Deleting snapshots is how a full filesystem is emptied.
#[test]
fn subvolume_of_a_full_filesystem_can_be_deleted() {
    let directory = temporary();
    let (image, fs) = make(directory.path(), 128 << 20, 16_384);
    let sub = subvolume(&fs, b"sub");
    for at in 0..1000 {
        let mut handle = fs.begin(Reservation::create(1)).unwrap();
        let id = handle.create(sub, format!("{at}").as_bytes(), &file_mode()).unwrap();
        handle.set_xattr(id, b"user.x", &[7; 3000]).unwrap();
    }
    fs.commit().unwrap();
    fill_metadata(&fs);
    let name = format!("{:0>200}", 0);
    fs.unlink_deferred(fs.top_level(), name.as_bytes()).expect("unlinking may use the reserve");
    fs.delete_subvolume(fs.top_level(), b"sub").expect("so may this");
    fs.clean_deleted_subvolumes().unwrap();
    commit_and_judge(fs, &image);
}

#[test]
fn file_of_a_full_filesystem_can_be_truncated() {
    let directory = temporary();
    let (image, fs) = make(directory.path(), 128 << 20, 16_384);
    let file = create(&fs, fs.top_level(), b"file");
    fs.write(file, FileOffset(0), &vec![7; 1 << 20]).unwrap();
    fs.commit().unwrap();
    fill_metadata(&fs);
    fs.truncate(file, 0).expect("truncating may use the reserve");
    commit_and_judge(fs, &image);
}

/// A metadata group that the reservation for making the free space tree anew had to add was entered
/// twice: by that, and by the commit.
#[test]
fn stale_free_space_tree_of_a_nearly_full_filesystem_is_made_anew() {
    let directory = temporary();
    let image = directory.path().join("image");
    let mode = OpenMode::CreateNew { len_bytes: 40 << 20 };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&image, mode, Window::Whole).unwrap());
    let options = MkfsOptions { block_group_tree: false, ..MkfsOptions::default() };
    drop(mkfs(vec![device], &options, &Arc::new(Runtime::system())).unwrap());
    common::forget_valid(&image);
    let fs = open_for_writing(&image);
    create(&fs, fs.top_level(), b"file");
    fs.commit().unwrap();
    drop(fs);
    judge(&image);
}

/// Both looked before either removed: the second aborted the filesystem.
#[test]
fn two_who_remove_one_attribute_abort_nothing() {
    let directory = temporary();
    let (image, fs) = make(directory.path(), 256 << 20, 16_384);
    let file = create(&fs, fs.top_level(), b"file");
    for round in 0..3000 {
        fs.begin(Reservation::items(4)).unwrap().set_xattr(file, b"user.a", b"1").unwrap();
        let barrier = Barrier::new(2);
        let wins: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let (fs, barrier) = (&fs, &barrier);
                    scope.spawn(move || {
                        barrier.wait();
                        let mut handle = fs.begin(Reservation::items(4)).unwrap();
                        match handle.remove_xattr(file, b"user.a") {
                            Ok(()) => 1,
                            Err(Error::NotFound { .. }) => 0,
                            Err(error) => panic!("round {round}: {error}"),
                        }
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(wins, 1, "round {round}");
    }
    commit_and_judge(fs, &image);
}

/// Remembers each primary superblock, and copies the image when one with a log is written.
#[derive(Debug)]
struct Watch {
    inner: FileDevice,
    image: PathBuf,
    written: std::sync::Mutex<Vec<(u64, u64)>>,
}

impl Device for Watch {
    ubtrfs_testkit::device_passes_on!(inner: name, len_bytes, read_at, flush, discard, resize, is_read_only);

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> std::io::Result<()> {
        use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
        self.inner.write_at(at, buf)?;
        if at == SUPERBLOCK_OFFSETS[0] && buf.len() == SUPERBLOCK_BYTES {
            let superblock = Superblock::parse(buf, at).unwrap();
            let mut written = self.written.lock().unwrap();
            let log_root = superblock.log_root.get();
            if log_root != 0 && written.iter().all(|(_, log_root)| *log_root == 0) {
                std::fs::copy(&self.image, self.image.with_extension("cut"))?;
            }
            written.push((superblock.generation.get(), log_root));
        }
        Ok(())
    }
}

/// After the replay, and before the superblock forgot the log, old orphans were cleaned, which
/// commits: that superblock named a log of a generation that is past, in space that is free.
#[test]
fn no_commit_of_a_replay_names_the_log() {
    use std::io::Write;
    use std::os::unix::fs::FileExt;
    use ubtrfs_testkit::{KernelMount, MkfsBtrfs, run};
    use ubtrfs_volume::{Volume, VolumeOptions};
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs]) {
        return;
    }
    let directory = temporary();
    let image = directory.path().join("image");
    MkfsBtrfs::new().size_bytes(300 << 20).make(&image);
    let mount = KernelMount::read_write(&image, "subvolid=5,commit=300");
    let sync = || run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
    let big = std::fs::File::create(mount.path().join("big")).unwrap();
    for at in 0..4000 {
        big.write_all_at(&[7; 4096], at * 8192).unwrap();
    }
    std::fs::write(mount.path().join("small"), b"").unwrap();
    sync();
    std::fs::remove_file(mount.path().join("big")).unwrap();
    sync();
    let mut small = std::fs::File::options().write(true).open(mount.path().join("small")).unwrap();
    small.write_all(b"bytes").unwrap();
    small.sync_all().unwrap();
    let copy = directory.path().join("copy");
    run("cp", ["--sparse=always".as_ref(), image.as_os_str(), copy.as_os_str()]);
    drop((big, small));
    mount.unmount();
    let device = Arc::new(Watch {
        inner: FileDevice::open(&copy, OpenMode::ReadWrite, Window::Whole).unwrap(),
        image: copy.clone(),
        written: std::sync::Mutex::default(),
    });
    let volume = Volume::open(vec![device.clone()], &VolumeOptions::default()).unwrap();
    assert!(volume.superblock().log_root.get() != 0, "there is a log");
    let opened = volume.superblock().generation.get();
    let options = OpenOptions { cache_bytes: 256 << 10, ..OpenOptions::default() };
    drop(Filesystem::open(volume, options).unwrap());
    let written = device.written.lock().unwrap().clone();
    println!("generations and logs: {written:?}");
    // The one that was found is written once more, as it is.
    let of_commits = written.iter().filter(|(generation, _)| *generation > opened);
    assert!(of_commits.clone().count() > 1, "{written:?}");
    if of_commits.clone().any(|(_, log_root)| *log_root != 0) {
        // A power cut right after it.
        let cut = copy.with_extension("cut");
        let cut = FileDevice::open(&cut, OpenMode::ReadWrite, Window::Whole).unwrap();
        let volume = Volume::open(vec![Arc::new(cut)], &VolumeOptions::default()).unwrap();
        let reopened = Filesystem::open(volume, OpenOptions::default());
        panic!("a superblock named the log; opened after a cut: {:?}", reopened.map(drop));
    }
}

/// The commit's share counts extents, not their references: those of one block that is cloned again
/// and again become items that nothing was kept back for.
#[test]
fn one_block_cloned_many_times_on_a_nearly_full_filesystem_commits() {
    let directory = temporary();
    let (image, fs) = make(directory.path(), 64 << 20, 4096);
    let source = create(&fs, fs.top_level(), b"source");
    let target = create(&fs, fs.top_level(), b"target");
    fs.write(source, FileOffset(0), &[7; 4096]).unwrap();
    fs.commit().unwrap();
    fill_metadata(&fs);
    for at in 0..2400 {
        let name = format!("{at:0>200}");
        fs.unlink(fs.top_level(), name.as_bytes()).unwrap();
    }
    fs.commit().unwrap();
    let mut count = 0_u64;
    let block = FileOffset(0)..FileOffset(4096);
    let begun = std::time::Instant::now();
    while count < 30_000 {
        if count.is_multiple_of(20_000) {
            println!("{count} clones: {:?}", begun.elapsed());
        }
        match fs.clone_range(source, block.clone(), target, FileOffset(count * 4096)) {
            Ok(()) => count += 1,
            Err(Error::NoSpace { .. }) => break,
            Err(error) => panic!("after {count} clones: {error}"),
        }
    }
    println!("{count} clones: {:?}", begun.elapsed());
    // What 2400 files left is some 9 MB; a clone takes two items, of less than 200 bytes together.
    assert!(count >= 1000, "{count} clones");
    let begun = std::time::Instant::now();
    fs.commit().unwrap();
    println!("committed: {:?}", begun.elapsed());
    drop(fs);
    judge(&image);
}

/// A device that stops at a write or a flush until it is told to go on.
#[derive(Debug)]
struct Stopping {
    inner: FileDevice,
    stop: std::sync::Mutex<Option<Stop>>,
}

/// Behind how many writes and flushes, whom to tell, and who says that it goes on.
#[derive(Debug)]
struct Stop {
    behind: usize,
    events: mpsc::Sender<Event>,
    go_on: mpsc::Receiver<()>,
}

#[derive(Debug, PartialEq, Eq)]
enum Event {
    Stopped,
    Committed,
    Read,
    Changed,
}

impl Stopping {
    fn pass(&self) {
        let mut armed = self.stop.lock().unwrap();
        let is_here = armed.as_mut().is_some_and(|stop| {
            let is_here = stop.behind == 0;
            stop.behind = stop.behind.saturating_sub(1);
            is_here
        });
        let stop = if is_here { armed.take() } else { None };
        drop(armed);
        if let Some(stop) = stop {
            stop.events.send(Event::Stopped).unwrap();
            // A test that failed says nothing, and has dropped the sender.
            let _ = stop.go_on.recv();
        }
    }
}

impl Device for Stopping {
    ubtrfs_testkit::device_passes_on!(inner: name, len_bytes, read_at, discard, resize, is_read_only);

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> std::io::Result<()> {
        self.pass();
        self.inner.write_at(at, buf)
    }
    fn write_vectored_at(&self, at: PhysicalAddr, bufs: &[&[u8]]) -> std::io::Result<()> {
        self.pass();
        self.inner.write_vectored_at(at, bufs)
    }
    fn flush(&self) -> std::io::Result<()> {
        self.pass();
        self.inner.flush()
    }
}

/// A file that holds its name again and again.
fn make_named(fs: &Filesystem, name: &str) {
    let id = create(fs, fs.top_level(), name.as_bytes());
    fs.write(id, FileOffset(0), name.repeat(1000).as_bytes()).unwrap();
}

fn assert_named(fs: &Filesystem, name: &str) {
    let id = fs.lookup(fs.top_level(), name.as_bytes()).unwrap();
    let expect = name.repeat(1000).into_bytes();
    assert_eq!(fs.inode(id).unwrap().size_bytes, expect.len() as u64, "{name}");
    let mut bytes = vec![0; expect.len()];
    assert_eq!(fs.read(id, FileOffset(0), &mut bytes).unwrap(), expect.len(), "{name}");
    assert!(bytes == expect, "{name}");
}

/// Each write and each flush of a commit is held in turn. Who reads meanwhile sees the last commit and the one being made; who
/// changes something waits, and changes the next one.
#[test]
fn commit_that_is_held_keeps_no_reader_waiting() {
    const LIMIT: Duration = Duration::from_secs(60);
    let directory = temporary();
    let image = directory.path().join("image");
    let mode = OpenMode::CreateNew { len_bytes: 256 << 20 };
    let device = Arc::new(Stopping {
        inner: FileDevice::open(&image, mode, Window::Whole).unwrap(),
        stop: std::sync::Mutex::default(),
    });
    let options = MkfsOptions::default();
    let volume = mkfs(vec![device.clone()], &options, &Arc::new(Runtime::system())).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    make_named(&fs, "before");
    fs.commit().unwrap();
    let mut names = vec!["before".to_owned()];
    let mut stop_count = 0;
    for behind in 0_usize.. {
        let running = format!("running {behind}");
        make_named(&fs, &running);
        names.push(running);
        let (events, happened) = mpsc::channel();
        let (go_on, told) = mpsc::channel();
        let stop = Stop { behind, events: events.clone(), go_on: told };
        *device.stop.lock().unwrap() = Some(stop);
        let committer = std::thread::spawn({
            let (fs, events) = (fs.clone(), events.clone());
            move || {
                fs.commit().unwrap();
                events.send(Event::Committed).unwrap();
            }
        });
        if happened.recv_timeout(LIMIT).expect("it stops or is done") == Event::Committed {
            device.stop.lock().unwrap().take();
            committer.join().unwrap();
            break;
        }
        stop_count += 1;
        let next = format!("next {behind}");
        let writer = std::thread::spawn({
            let (fs, events, next) = (fs.clone(), events.clone(), next.clone());
            move || {
                make_named(&fs, &next);
                events.send(Event::Changed).unwrap();
            }
        });
        let reader = std::thread::spawn({
            let (fs, names, next) = (fs.clone(), names.clone(), next.clone());
            move || {
                for name in &names {
                    assert_named(&fs, name);
                }
                let found = fs.lookup(fs.top_level(), next.as_bytes());
                assert!(matches!(found, Err(Error::NotFound { .. })), "{found:?}");
                events.send(Event::Read).unwrap();
            }
        });
        // First of all: nothing else is done before the commit goes on.
        assert_eq!(happened.recv_timeout(LIMIT), Ok(Event::Read), "request {behind}");
        go_on.send(()).unwrap();
        let others = [(); 2].map(|()| happened.recv_timeout(LIMIT).expect("both are done"));
        assert!(others.contains(&Event::Committed) && others.contains(&Event::Changed));
        for thread in [committer, writer, reader] {
            thread.join().unwrap();
        }
        assert_named(&fs, &next);
        names.push(next);
    }
    // Blocks, a flush, superblocks, a flush.
    assert!(stop_count >= 4, "{stop_count} requests");
    drop((fs, device));
    judge(&image);
    let fs = open_for_writing(&image);
    for name in &names {
        assert_named(&fs, name);
    }
}

/// A file's old data is given to another file at once; who reads the old one meanwhile sees the
/// other's, whose checksums fit.
#[test]
fn reader_sees_only_what_was_in_the_file() {
    let directory = temporary();
    let (_, fs) = make(directory.path(), 512 << 20, 16_384);
    let one = create(&fs, fs.top_level(), b"one");
    let two = create(&fs, fs.top_level(), b"two");
    let len = 256 << 10;
    fs.write(one, FileOffset(0), &vec![1; len]).unwrap();
    fs.write(two, FileOffset(0), &vec![2; len]).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (fs, stop) = (&fs, &stop);
        scope.spawn(move || {
            for _ in 0..600 {
                fs.write(one, FileOffset(0), &vec![1; len]).unwrap();
                fs.write(two, FileOffset(0), &vec![2; len]).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        let mut reads = 0;
        let mut errors = 0;
        let (mut foreign, mut zeros) = (0, 0);
        let mut last = String::new();
        while !stop.load(Ordering::Relaxed) {
            let mut buf = vec![0; len];
            match fs.read(one, FileOffset(0), &mut buf) {
                Ok(_) if buf.contains(&2) => foreign += 1,
                Ok(_) if buf.contains(&0) => zeros += 1,
                Ok(_) => {}
                Err(error) => {
                    errors += 1;
                    last = error.to_string();
                }
            }
            reads += 1;
        }
        assert!(
            foreign + zeros + errors == 0,
            "of {reads}: {foreign} foreign, {zeros} zeros, {errors} errors: {last}"
        );
    });
}

/// The size that a snapshot's flush entered was the one at its end: what was appended beside it was in memory only, and the snapshot had zeros
/// there, which the file never had.
#[test]
fn snapshot_beside_who_appends_has_no_bytes_that_nobody_wrote() {
    let directory = temporary();
    let (image, fs) = make(directory.path(), 1 << 30, 16384);
    let sub = subvolume(&fs, b"sub");
    let file = fs.open_data(create(&fs, sub, b"file")).unwrap();
    let (is_done, mut appended) = (AtomicBool::new(false), 0);
    std::thread::scope(|scope| {
        let appends = scope.spawn(|| {
            for _ in 0..20_000 {
                file.append(&[0xAA; 4096]).unwrap();
                if is_done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for number in 0..20 {
            let name = format!("snapshot {number}");
            while file.size().bytes() < (number + 1) * 65536 && !appends.is_finished() {
                std::thread::yield_now();
            }
            let made = fs.snapshot(sub.root, fs.top_level(), name.as_bytes(), &RW).unwrap();
            let id = fs.lookup(made, b"file").unwrap();
            let len = usize::try_from(fs.inode(id).unwrap().size_bytes).unwrap();
            let mut bytes = vec![0; len];
            assert_eq!(fs.read(id, FileOffset(0), &mut bytes).unwrap(), len);
            let wrong = bytes.iter().position(|byte| *byte != 0xAA);
            assert_eq!(wrong, None, "{name}, {len} bytes");
            appended = appended.max(len);
        }
        is_done.store(true, Ordering::Relaxed);
    });
    assert!(appended >= 20 * 65536, "{appended}");
    drop(file);
    commit_and_judge(fs, &image);
}
