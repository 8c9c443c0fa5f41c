//! What is answered, and told beside, in an order that a kernel makes seldom; and on a medium that fails.

#[path = "support/fake.rs"]
mod fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fake::{
    CREATE, DELETE, FALLOCATE, FORGET, Fake, GETATTR, INVAL_ENTRY, INVAL_INODE, IOCTL, LOOKUP,
    LSEEK, MKDIR, READ, READDIR, READLINK, ROOT_NODE, SETATTR, STORE, Served, WRITE, ioctl, number,
};
use ubtrfs_engine::{
    InodeId, MkfsOptions, NewInode, RenameMode, Reservation, SetAttributes, SnapshotOptions, mkfs,
};
use ubtrfs_fuse::{Changed, ServeOptions, Syncs};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_rt::Runtime;
use ubtrfs_volume::{Device, MemDevice};

const EPERM: i32 = 1;
const EIO: i32 = 5;
const EEXIST: i32 = 17;
const ENOSPC: i32 = 28;
const ENOSYS: i32 = 38;
const ESTALE: i32 = 116;

/// In memory; what is written fails where it is told to.
#[derive(Debug)]
struct Medium {
    inner: MemDevice,
    /// Data, of which here all else but the filler's letters is none.
    fails_data: AtomicBool,
    fails_all: AtomicBool,
}

/// Data that is written begins so.
const DATA: &[u8] = &[b'd'; 64];

impl Medium {
    fn new() -> Arc<Self> {
        let inner = MemDevice::new(256 << 20);
        let medium = Arc::new(Self {
            inner,
            fails_data: AtomicBool::new(false),
            fails_all: AtomicBool::new(false),
        });
        let device: Arc<dyn Device> = Arc::<Self>::clone(&medium);
        mkfs(vec![device], &MkfsOptions::default(), &ubtrfs_rt::Arc::new(Runtime::system()))
            .unwrap();
        medium
    }

    fn check(&self, bytes: &[u8]) -> std::io::Result<()> {
        let is_data = self.fails_data.load(Ordering::SeqCst) && bytes.starts_with(DATA);
        match is_data || self.fails_all.load(Ordering::SeqCst) {
            true => Err(std::io::Error::other("made to fail")),
            false => Ok(()),
        }
    }
}

impl Device for Medium {
    ubtrfs_testkit::device_passes_on!(inner: name, len_bytes, read_at, flush, discard, resize, is_read_only);

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> std::io::Result<()> {
        self.check(buf)?;
        self.inner.write_at(at, buf)
    }
}

fn served(medium: &Arc<Medium>, syncs: Syncs) -> Served {
    Served::new(Arc::<Medium>::clone(medium), ServeOptions { syncs, ..ServeOptions::default() })
}

fn made(served: &Served, name: &[u8]) -> InodeId {
    let fs = &served.fs;
    let new = NewInode::new(0o100_644, fs.runtime().clock.now());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    handle.create(fs.default_subvolume().unwrap(), name, &new).unwrap()
}

fn node_of(fake: &Fake, name: &[u8]) -> u64 {
    found_in(fake, ROOT_NODE, name)[0]
}

/// The node of a name in a directory, and the number of its inode.
fn found_in(fake: &Fake, node: u64, name: &[u8]) -> [u64; 2] {
    let answered = fake.done(LOOKUP, node, &[name, b"\0"].concat()).unwrap();
    [0, 40].map(|at| number(&answered, at))
}

/// What READ and WRITE begin with.
fn place(at: u64, len: usize, flags: u32) -> Vec<u8> {
    let mut body = [0, at].map(u64::to_ne_bytes).concat();
    let words = [u32::try_from(len).unwrap(), 0, 0, 0, flags, 0];
    body.extend(words.map(u32::to_ne_bytes).concat());
    body
}

fn write(fake: &Fake, node: u64, bytes: &[u8]) -> fake::Answered {
    write_at(fake, node, 0, bytes, 0)
}

fn write_at(fake: &Fake, node: u64, at: u64, bytes: &[u8], flags: u32) -> fake::Answered {
    fake.done(WRITE, node, &[&place(at, bytes.len(), flags), bytes].concat())
}

fn make_directory(fake: &Fake, name: &[u8]) -> fake::Answered {
    let mode = [0o755_u32, 0].map(u32::to_ne_bytes).concat();
    fake.done(MKDIR, ROOT_NODE, &[&mode, name, b"\0"].concat())
}

/// The kernel had not heard of the node when it was told that its attributes were old, and believed them ever after.
#[test]
fn attributes_that_were_on_their_way_during_a_change_are_asked_for_again() {
    let served = served(&Medium::new(), Syncs::Asked);
    let id = made(&served, b"file");
    let fake = &served.fake;
    let lookup = fake.ask_and_hold(LOOKUP, ROOT_NODE, b"file\0");
    fake.wait_on_its_way(lookup);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            served.server.change(Changed::Names, || {
                let mode = Some(0o600);
                let mut handle = served.fs.begin(Reservation::items(3)).unwrap();
                handle.set_attributes(id, &SetAttributes { mode, ..SetAttributes::default() })
            })
        });
        fake.wait_told("too early", |told| told.code == INVAL_INODE && !told.is_known);
        fake.let_through(lookup);
        let answered = fake.answer(lookup).unwrap();
        let node = u64::from_ne_bytes(answered[..8].try_into().unwrap());
        fake.wait_told("told again", |told| {
            told.code == INVAL_INODE && told.node == node && told.is_known
        });
    });
}

/// Told only to look again, the kernel would not say to who watches a file that it is gone.
#[test]
fn name_that_is_removed_beside_the_kernel_is_told_as_removed() {
    let served = served(&Medium::new(), Syncs::Asked);
    let (fake, fs) = (&served.fake, &served.fs);
    let top = fs.default_subvolume().unwrap();
    let names: [&[u8]; 3] = [b"gone", b"replaced", b"moved"];
    let nodes = names.map(|name| {
        made(&served, name);
        node_of(fake, name)
    });
    served.server.change(Changed::Names, || {
        fs.unlink(top, b"gone").unwrap();
        fs.rename(top, b"moved", top, b"replaced", RenameMode::Replace).unwrap();
    });
    let told = |name: &[u8]| fake.told_of(ROOT_NODE, name);
    assert_eq!(told(b"gone"), [(DELETE, nodes[0])]);
    // Something else has the name; and what had it is not gone.
    assert!(!told(b"replaced").is_empty() && !told(b"moved").is_empty());
    for (code, _) in told(b"replaced").into_iter().chain(told(b"moved")) {
        assert_eq!(code, INVAL_ENTRY);
    }
}

/// RELEASE was sent for each file that was made, as long as nobody had opened one.
#[test]
fn one_open_is_refused_before_the_mount_is_there_of_a_file_that_is_found_once() {
    const GETXATTR: u32 = 22;
    const FORGET: u32 = 2;
    const STATX: u32 = 52;
    let served = served(&Medium::new(), Syncs::Asked);
    let fake = &served.fake;
    let opened = fake.opened();
    let [opened] = &opened[..] else { panic!("{opened:?}") };
    assert_eq!((&opened.open, &opened.flush), (&Err(ENOSYS), &Err(ENOSYS)));
    // Neither the name nor what it has may be kept: its time is over at once.
    let word = |bytes: &[u8], at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
    let (found, attributes) = (opened.found.as_ref().unwrap(), opened.attributes.as_ref().unwrap());
    assert_eq!([16, 24, 32].map(|at| word(found, at)), [0; 3]);
    assert_eq!(word(attributes, 0), 0);
    assert_eq!(found[40..], attributes[16..]);
    // Its node is no inode's, and its name random.
    assert!(![0, ROOT_NODE].contains(&opened.node));
    assert!(opened.name.len() > 32, "{}", opened.name);
    let name = opened.name.as_bytes();
    assert_eq!(node_of(fake, name), 0);
    let top = served.fs.default_subvolume().unwrap();
    assert!(served.fs.read_dir(top, 0).unwrap().next().is_none());
    // What is refused so is asked of no other file any more.
    for operation in [GETXATTR, STATX, READ, WRITE] {
        let answered = fake.done(operation, opened.node, &[0; 64]);
        assert!(answered.is_err() && answered != Err(ENOSYS), "{operation}: {answered:?}");
    }
    fake.ask(FORGET, opened.node, &1_u64.to_ne_bytes());
    made(&served, b"file");
    assert_ne!(node_of(fake, b"file"), opened.node);
    served.server.change(Changed::Anything, || ());
    assert!(!fake.has_told(|told| told.node == opened.node));
}

#[test]
fn no_file_is_opened_where_opening_is_not_refused() {
    let options = ServeOptions { naive: true, ..ServeOptions::default() };
    let served = Served::new(Medium::new(), options);
    assert!(served.fake.opened().is_empty());
}

/// It was answered that all was well, as the file was open and would tell of that at its next fsync.
#[test]
fn write_whose_data_is_lost_fails_on_a_synchronous_mount() {
    let medium = Medium::new();
    let served = served(&medium, Syncs::All);
    made(&served, b"file");
    let node = node_of(&served.fake, b"file");
    assert!(write(&served.fake, node, &[b'd'; 100_000]).is_ok());
    medium.fails_data.store(true, Ordering::SeqCst);
    assert_eq!(write(&served.fake, node, &[b'd'; 100_000]), Err(EIO));
    medium.fails_data.store(false, Ordering::SeqCst);
    assert!(write(&served.fake, node, &[b'd'; 100_000]).is_ok());
}

/// It was made, and answered with the error of a file that somebody else had written: the kernel took it for missing ever after.
#[test]
fn name_that_is_made_is_not_answered_with_what_was_lost_of_another_file() {
    let medium = Medium::new();
    let served = served(&medium, Syncs::Names);
    let id = made(&served, b"file");
    let file = served.fs.open_data(id).unwrap();
    file.write(FileOffset::new(0), &[b'd'; 100_000]).unwrap();
    medium.fails_data.store(true, Ordering::SeqCst);
    drop(file);
    // Whoever asks for all is told so.
    let _ = served.fs.flush_files();
    let file = served.fs.open_data(id).unwrap();
    file.write(FileOffset::new(0), &[b'd'; 100_000]).unwrap();
    drop(file);
    assert!(make_directory(&served.fake, b"made").is_ok());
    assert!(served.fs.flush_files().is_err());
}

/// What was changed and could not be made durable is there all the same, and the kernel is to ask again.
#[test]
fn name_that_is_made_and_not_durable_is_asked_for_again() {
    let medium = Medium::new();
    let served = served(&medium, Syncs::Names);
    medium.fails_all.store(true, Ordering::SeqCst);
    let answered = make_directory(&served.fake, b"made");
    assert!(answered.is_err(), "{answered:?}");
    served.fake.wait_told("told", |told| told.code == INVAL_ENTRY && told.name == b"made");
}

/// What was put late into the kernel's memory, when the write was answered, stayed there over what others had written by then; and what was
/// appended went to where the kernel believed the file to end.
#[test]
fn page_that_is_cleared_too_late_is_forgotten() {
    // With `-o sync` the write is not durable when its thread waits, so nobody answers for it.
    for syncs in [Syncs::Asked, Syncs::All] {
        page_is_cleared_too_late(syncs);
    }
}

fn has_thread(name: &str) -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.into_iter().any(|found| found.trim() == name)
}

fn page_is_cleared_too_late(syncs: Syncs) {
    const O_APPEND: u32 = 0o2000;
    /// All within the page.
    const WRITES_MAX: usize = 20;
    let served = served(&Medium::new(), syncs);
    let id = made(&served, b"file");
    let fake = &served.fake;
    let node = node_of(fake, b"file");
    let size = || served.fs.inode(id).unwrap().size_bytes;
    let is_forgotten =
        |told: &fake::Told| told.code == INVAL_INODE && told.node == node && told.at == 1000;
    write(fake, node, &[b'd'; 1000]).unwrap();
    // Nothing is cleared of what was never read.
    fake.hold_stores(true);
    write_at(fake, node, 1100, b"x", 0).unwrap();
    let cut = served.fs.open_data(id).unwrap();
    cut.truncate(FileOffset::new(1000)).unwrap();
    fake.done(READ, node, &place(0, 4096, 0)).unwrap();
    write_at(fake, node, 1500, b"x", 0).unwrap();
    assert!(!fake.has_told(is_forgotten));
    // The request's own thread waited, and its answer was sent by who watches that.
    assert!(syncs == Syncs::All || has_thread("ubtrfs-overdue"));
    write_at(fake, node, 4096, b"appended", O_APPEND).unwrap();
    assert_eq!(size(), 1501 + 8);
    // Of another file, while one waits.
    let other = made(&served, b"other");
    let other_node = node_of(fake, b"other");
    write(fake, other_node, &[b'd'; 1000]).unwrap();
    fake.done(READ, other_node, &place(0, 4096, 0)).unwrap();
    write_at(fake, other_node, 1500, b"x", 0).unwrap();
    assert_eq!(served.fs.inode(other).unwrap().size_bytes, 1501);
    fake.hold_stores(false);
    fake.wait_told("forgotten", |told| told.code == INVAL_INODE && told.node == other_node);
    fake.wait_told("forgotten", is_forgotten);
    assert!(fake.has_told(|told| told.code == STORE && told.at == 1000));
    // What is in time is not forgotten. Beside much else a write may not be, and another one follows it.
    let is_in_time = |_| {
        let end = size();
        fake.done(READ, node, &place(0, 4096, 0)).unwrap();
        write_at(fake, node, end + 100, b"x", 0).unwrap();
        assert_eq!(size(), end + 101);
        let is_told =
            |code| fake.has_told(|told| told.code == code && told.node == node && told.at == end);
        is_told(STORE) && !is_told(INVAL_INODE)
    };
    assert!((0..WRITES_MAX).any(is_in_time));
}

/// A command that panicked counted as one under way for ever: what was appended went to where the file ended, wherever the kernel had it go.
#[test]
fn change_that_panics_is_over() {
    const O_APPEND: u32 = 0o2000;
    let served = served(&Medium::new(), Syncs::Asked);
    let id = made(&served, b"file");
    let node = node_of(&served.fake, b"file");
    write(&served.fake, node, b"old").unwrap();
    let change = || served.server.change(Changed::Anything, || panic!("as wanted"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(change)).is_err());
    write_at(&served.fake, node, 4096, b"appended", O_APPEND).unwrap();
    assert_eq!(served.fs.inode(id).unwrap().size_bytes, 4096 + 8);
}

/// The kernel heard nothing of what a command had done before it panicked: it had an append go to where the file had ended, over what the
/// command had put there.
#[test]
fn change_that_panics_is_told_of_as_far_as_it_was_done() {
    const O_APPEND: u32 = 0o2000;
    let served = served(&Medium::new(), Syncs::Asked);
    let id = made(&served, b"file");
    let node = node_of(&served.fake, b"file");
    write(&served.fake, node, b"old").unwrap();
    let change = || {
        let file = served.fs.open_data(id).unwrap();
        file.truncate(FileOffset::new(5000)).unwrap();
        made(&served, b"new");
        panic!("as wanted")
    };
    let change = || served.server.change(Changed::Anything, change);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(change)).is_err());
    assert_eq!(served.fake.told_of(ROOT_NODE, b"new"), [(INVAL_ENTRY, 0)]);
    assert!(
        served.fake.has_told(|told| told.code == STORE && told.node == node && told.at == 4999)
    );
    write_at(&served.fake, node, 3, b"appended", O_APPEND).unwrap();
    assert_eq!(served.fs.inode(id).unwrap().size_bytes, 5008);
    let read = served.fake.done(READ, node, &place(5000, 100, 0)).unwrap();
    assert_eq!(read, b"appended");
}

/// One thread's error ended the whole mount, which the others could have served on.
#[test]
fn thread_that_fails_leaves_the_others_serving_and_the_last_one_ends_the_connection() {
    let served = served(&Medium::new(), Syncs::Asked);
    let fake = &served.fake;
    let look = || fake.ask_and_hold(GETATTR, ROOT_NODE, &[0; 16]);
    fake.fail_ways(0..=0);
    let mut held = Vec::new();
    while !fake.has_failed(0) {
        let unique = look();
        fake.wait_on_its_way_or_failed(unique, 0);
        held.push(unique);
    }
    for unique in held {
        fake.let_through(unique);
        fake.answer(unique).unwrap();
    }
    for _ in 0..100 {
        fake.done(GETATTR, ROOT_NODE, &[0; 16]).unwrap();
    }
    assert!(!fake.is_aborted());
    fake.fail_ways(0..=usize::MAX);
    fake.wait_aborted();
}

/// Before Linux 5.13 the kernel looks at nothing of such a request, and anybody could change the flags of another's file.
#[test]
fn flags_are_set_by_owner_and_root_where_the_kernel_does_not_look_at_that() {
    const SET_FLAGS: u32 = 0x4008_6602;
    const SET_XFLAGS: u32 = 0x401c_5820;
    const IMMUTABLE: u32 = 0x10;
    const NODUMP: u32 = 0x40;
    // Immutable, append-only, and not to be dumped, by that of xfs.
    const X: [u32; 3] = [0x8, 0x10, 0x80];
    const OWNER: u32 = 1000;
    const OTHER: u32 = 1001;
    for minor in [31, 33, 34, 39] {
        let device: Arc<dyn Device> = Medium::new();
        let served = Served::to_kernel(minor, device, ServeOptions::default());
        let id = made(&served, b"file");
        let owned = SetAttributes { uid: Some(OWNER), ..SetAttributes::default() };
        let mut handle = served.fs.begin(Reservation::items(3)).unwrap();
        handle.set_attributes(id, &owned).unwrap();
        drop(handle);
        let node = node_of(&served.fake, b"file");
        let set = |uid, command, bits: u32| {
            let len = if command == SET_FLAGS { 8 } else { 28 };
            let mut argument = bits.to_ne_bytes().to_vec();
            argument.resize(len, 0);
            let before = served.fs.inode(id).unwrap().flags;
            let answered = served.fake.done_as(uid, IOCTL, node, &ioctl(command, &argument));
            let after = served.fs.inode(id).unwrap().flags;
            assert!(answered.is_ok() || before == after, "{before:#x}, {after:#x}");
            answered.map(drop)
        };
        let refused = if minor < 34 { Err(EPERM) } else { Ok(()) };
        for (uid, command, bits, expected) in [
            (OTHER, SET_FLAGS, NODUMP, refused),
            (OTHER, SET_XFLAGS, X[2], refused),
            (OWNER, SET_FLAGS, NODUMP, Ok(())),
            (OWNER, SET_FLAGS, NODUMP | IMMUTABLE, refused),
            (OWNER, SET_XFLAGS, X[1], refused),
            (0, SET_XFLAGS, X[0], Ok(())),
            (OWNER, SET_XFLAGS, X[0] | X[2], Ok(())),
            (OWNER, SET_FLAGS, 0, refused),
            (0, SET_FLAGS, 0, Ok(())),
            (0, SET_FLAGS, NODUMP, Ok(())),
        ] {
            assert_eq!(set(uid, command, bits), expected, "{minor}: {uid} {command:#x} {bits:#x}");
        }
    }
}

/// The names that are told of the top from a place on, and the place behind them.
fn listed_by(fake: &Fake, pid: u32, at: u64) -> (Vec<Vec<u8>>, u64) {
    let answered = fake.done_by(pid, READDIR, ROOT_NODE, &place(at, 1000, 0)).unwrap();
    let (mut names, mut next, mut rest) = (Vec::new(), at, &answered[..]);
    while !rest.is_empty() {
        next = number(rest, 8);
        let len = usize::try_from(u32::from_ne_bytes(rest[16..20].try_into().unwrap())).unwrap();
        names.push(rest[24..24 + len].to_vec());
        rest = &rest[(24 + len).next_multiple_of(8)..];
    }
    (names, next)
}

/// The names from a place to the end.
fn rest_listed_by(fake: &Fake, pid: u32, mut at: u64) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        let (names, next) = listed_by(fake, pid, at);
        if names.is_empty() {
            return all;
        }
        all.extend(names);
        at = next;
    }
}

/// A thread that had read a part of another's listing was told no name that is newer than that, in any listing of which it was not the
/// one to begin.
#[test]
fn listing_by_several_threads_has_what_was_there_when_it_began() {
    let served = served(&Medium::new(), Syncs::Asked);
    let fake = &served.fake;
    for count in 0..200 {
        made(&served, format!("file {count}").as_bytes());
    }
    let (_, first) = listed_by(fake, 1, 0);
    let (names, second) = listed_by(fake, 2, first);
    assert!(!names.is_empty());
    let rest = rest_listed_by(fake, 1, second);
    assert!(rest.contains(&b"file 199".to_vec()));
    made(&served, b"new");
    let (_, first) = listed_by(fake, 1, 0);
    assert!(rest_listed_by(fake, 2, first).contains(&b"new".to_vec()));
}

/// What was told of some of it stayed in the kernel's memory.
#[test]
fn zeroing_that_fails_has_the_kernel_forget_what_it_read() {
    const ZERO_RANGE: u32 = 0x10;
    let served = served(&Medium::new(), Syncs::Asked);
    made(&served, b"file");
    let fake = &served.fake;
    let node = node_of(fake, b"file");
    write(fake, node, &[b'd'; 100_000]).unwrap();
    fake.done(READ, node, &place(0, 100_000, 0)).unwrap();
    // More than there is space for.
    let mut body = [0, 1000, 1 << 30].map(u64::to_ne_bytes).concat();
    body.extend([ZERO_RANGE, 0].map(u32::to_ne_bytes).concat());
    assert_eq!(fake.done(FALLOCATE, node, &body), Err(ENOSPC));
    fake.wait_told("forgotten", |told| {
        // Of attributes alone the offset is negative.
        told.code == INVAL_INODE && told.node == node && told.at <= i64::MAX as u64
    });
}

/// A truncation that fails may have changed what the kernel has.
#[test]
fn truncation_that_fails_has_the_kernel_forget_what_it_read() {
    const SIZE: u32 = 1 << 3;
    let medium = Medium::new();
    let served = served(&medium, Syncs::Asked);
    made(&served, b"file");
    let fake = &served.fake;
    let node = node_of(fake, b"file");
    write(fake, node, &[b'd'; 100_000]).unwrap();
    fake.done(READ, node, &place(0, 100_000, 0)).unwrap();
    served.fs.flush_files().unwrap();
    medium.fails_all.store(true, Ordering::SeqCst);
    served.fs.commit().unwrap_err();
    let mut body = [SIZE, 0].map(u32::to_ne_bytes).concat();
    body.extend([0, 50_000].map(u64::to_ne_bytes).concat());
    body.resize(88, 0);
    fake.done(SETATTR, node, &body).unwrap_err();
    fake.wait_told("forgotten", |told| {
        told.code == INVAL_INODE && told.node == node && told.at <= i64::MAX as u64
    });
}

/// What LSEEK has, to look for a hole from the first byte on.
fn hole_from_begin() -> Vec<u8> {
    const SEEK_HOLE: u32 = 4;
    [[0, 0].map(u64::to_ne_bytes).concat(), [SEEK_HOLE, 0].map(u32::to_ne_bytes).concat()].concat()
}

/// To look for holes is as cheap as it was where the kernel can have nothing that is not here.
#[test]
fn kernel_is_asked_for_what_it_has_over_holes_that_it_may_have_read() {
    const LEN: u64 = 1 << 20;
    let served = served(&Medium::new(), Syncs::Asked);
    made(&served, b"file");
    let fake = &served.fake;
    let node = node_of(fake, b"file");
    write(fake, node, &[b'd'; 8192]).unwrap();
    write_at(fake, node, LEN - 1, b"x", 0).unwrap();
    let seek_hole = || number(&fake.done(LSEEK, node, &hole_from_begin()).unwrap(), 0);
    let is_asked = || fake.has_told(|told| told.code == INVAL_INODE && told.at <= i64::MAX as u64);
    assert_eq!(seek_hole(), 8192);
    // Nor does it have anything behind what it read.
    fake.done(READ, node, &place(0, 8192, 0)).unwrap();
    assert_eq!(seek_hole(), 8192);
    assert!(!is_asked());
    fake.done(READ, node, &place(8192, 4096, 0)).unwrap();
    assert_eq!(seek_hole(), 8192);
    assert!(is_asked() && fake.has_told(|told| told.at == 8192));
}

/// The kernel may wait for others, which the threads are to answer that serve it.
#[test]
fn searches_that_wait_for_the_kernel_keep_no_thread() {
    let served = served(&Medium::new(), Syncs::Asked);
    let fake = &served.fake;
    let nodes: Vec<u64> = (0..8)
        .map(|number| {
            let name = format!("file {number}");
            made(&served, name.as_bytes());
            let node = node_of(fake, name.as_bytes());
            write_at(fake, node, 100_000, b"x", 0).unwrap();
            fake.done(READ, node, &place(0, 8192, 0)).unwrap();
            node
        })
        .collect();
    fake.hold_pages(true);
    let searches: Vec<u64> =
        nodes.iter().map(|node| fake.ask(LSEEK, *node, &hole_from_begin())).collect();
    let begun = Instant::now();
    assert_eq!(node_of(fake, b"file 0"), nodes[0]);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    fake.hold_pages(false);
    for search in searches {
        assert_eq!(number(&fake.answer(search).unwrap(), 0), 0);
    }
}

/// What IOCTL has, to make a subvolume read-only.
fn read_only_ioctl() -> Vec<u8> {
    const SET_FLAGS: u32 = 0x4008_941a;
    const READ_ONLY: u64 = 2;
    let [zero, flags] = [0, READ_ONLY].map(u64::to_ne_bytes);
    let words = |words: [u32; 2]| words.map(u32::to_ne_bytes).concat();
    [&zero[..], &words([0, SET_FLAGS]), &zero, &words([8, 0]), &flags].concat()
}

/// Subvolumes that are made read-only while the kernel has not written what it holds: all but one were refused after a second, and each kept a
/// thread.
#[test]
fn ioctls_that_wait_for_the_kernel_keep_no_thread_and_none_is_refused() {
    let served = served(&Medium::new(), Syncs::Asked);
    let (fake, fs) = (&served.fake, &served.fs);
    let top = fs.default_subvolume().unwrap();
    let subvolumes: Vec<(InodeId, u64)> = (0..8)
        .map(|number| {
            let name = format!("sub {number}");
            let new = |mode| NewInode::new(mode, fs.runtime().clock.now());
            let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
            let id = handle.create_subvolume(top, name.as_bytes(), &new(0o040_755)).unwrap();
            drop(handle);
            let mut handle = fs.begin(Reservation::create(0)).unwrap();
            handle.create(id, b"file", &new(0o100_644)).unwrap();
            drop(handle);
            let node = node_of(fake, name.as_bytes());
            found_in(fake, node, b"file");
            (id, node)
        })
        .collect();
    fake.hold_pages(true);
    let changes: Vec<u64> =
        subvolumes.iter().map(|(_, node)| fake.ask(IOCTL, *node, &read_only_ioctl())).collect();
    made(&served, b"other");
    node_of(fake, b"other");
    assert!(changes.iter().all(|change| !fake.is_answered(*change)));
    // Longer than any request by a ring would wait.
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!subvolumes.iter().any(|(id, _)| fs.subvolume(id.root).unwrap().read_only));
    // The end waits for those that are at it.
    let (fake, fs) = (Arc::clone(fake), fs.clone());
    fake.hold_pages(false);
    drop(served);
    for (change, (id, _)) in changes.into_iter().zip(subvolumes) {
        assert!(fs.subvolume(id.root).unwrap().read_only);
        assert!(fake.answer(change).is_ok());
    }
}

/// Each ended the thread that had sent it, and the mount when none was left.
#[test]
fn answers_that_the_kernel_refuses_end_their_requests_only() {
    let served = served(&Medium::new(), Syncs::Asked);
    let fake = &served.fake;
    let fs = &served.fs;
    let new = NewInode::new(0o120_777, fs.runtime().clock.now());
    let top = fs.default_subvolume().unwrap();
    fs.begin(Reservation::create(0)).unwrap().symlink(top, b"link", b"target", &new).unwrap();
    let node = node_of(fake, b"link");
    for _ in 0..8 {
        assert_eq!(fake.answer(fake.ask_and_refuse(READLINK, node, b"")), Err(EIO));
    }
    assert_eq!(fake.done(READLINK, node, b""), Ok(b"target".to_vec()));
    assert_eq!(node_of(fake, b"link"), node);
}

/// The kernel does not know yet what a command made, and makes the file that it is to open: only who asks for a new one hears that there is one.
#[test]
fn file_that_a_command_has_just_made_is_looked_up_anew_by_who_opens_or_makes_it() {
    const WRITE_ONLY_NEW: [u32; 2] = [0o101, 0o301];
    let served = served(&Medium::new(), Syncs::Asked);
    made(&served, b"file");
    let create = |flags: u32| {
        let front = [flags, 0o100_644, 0o022, 0].map(u32::to_ne_bytes).concat();
        served.fake.done(CREATE, ROOT_NODE, &[&front[..], b"file\0"].concat())
    };
    assert_eq!(WRITE_ONLY_NEW.map(create), [Err(ESTALE), Err(EEXIST)]);
}

/// Linux's kernel took them for one directory, which it moved to wherever it was looked at last.
#[test]
fn directories_in_place_of_subvolumes_are_told_apart() {
    let served = served(&Medium::new(), Syncs::Asked);
    let (fake, fs) = (&served.fake, &served.fs);
    let top = fs.default_subvolume().unwrap();
    let names: [&[u8]; 2] = [b"one", b"two"];
    for name in names {
        let new = NewInode::new(0o040_755, fs.runtime().clock.now());
        let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
        handle.create_subvolume(top, name, &new).unwrap();
    }
    fs.snapshot(top.root, top, b"snapshot", &SnapshotOptions { read_only: false }).unwrap();
    let snapshot = node_of(fake, b"snapshot");
    let [[one, number_of_one], [two, number_of_two]] =
        names.map(|name| found_in(fake, snapshot, name));
    assert_ne!(one, two);
    assert_eq!(number_of_one, number_of_two);
    // One is known yet when the other is forgotten.
    for (forgotten, kept) in [(one, Some(two)), (two, None)] {
        fake.ask(FORGET, forgotten, &1_u64.to_ne_bytes());
        let begun = Instant::now();
        while fake.done(GETATTR, forgotten, &[0; 16]) != Err(ESTALE) {
            assert!(begun.elapsed().as_secs() < 20, "it is kept");
        }
        assert!(kept.is_none_or(|kept| fake.done(GETATTR, kept, &[0; 16]).is_ok()));
    }
}
