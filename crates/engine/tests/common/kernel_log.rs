//! Logs that the kernel writes, and what the kernel and the engine make of them.
//!
//! A copy of the image, taken right after an fsync while it is mounted, is what a power cut would
//! leave.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::open_for_writing;
use ubtrfs_engine::{Filesystem, InodeId, MappingKind, NewInode, Notice, Reservation};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_rt::Time;
use ubtrfs_testkit::snapshot::Timestamp;
use ubtrfs_testkit::{
    CheckMode, Compare, KernelMount, MkfsBtrfs, Oracle, Prng, TreeSnapshot, btrfs_check, command,
    oracle, run,
};

pub fn has_judges() -> bool {
    oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs, Oracle::BtrfsProgs])
}

pub fn sync(path: &Path) {
    File::open(path).unwrap().sync_all().unwrap();
}

pub fn copy(image: &Path, to: &Path) {
    run("cp", ["--sparse=always".as_ref(), image.as_os_str(), to.as_os_str()]);
}

/// What loses a name in the replay gets the time of the replay, unless the log's item comes after: on
/// each side as the order of steps has it. Such times are not compared, all others are.
pub fn forget_times_of_replay(ours: &mut TreeSnapshot, theirs: &mut TreeSnapshot, cut: Duration) {
    let cut = (i64::try_from(cut.as_secs()).unwrap(), cut.subsec_nanos());
    for (path, ours) in &mut ours.entries {
        let Some(theirs) = theirs.entries.get_mut(path) else { continue };
        let is_late = |ctime: Option<Timestamp>| ctime.is_some_and(|at| (at.sec, at.nsec) > cut);
        if is_late(ours.ctime) || is_late(theirs.ctime) {
            (ours.ctime, theirs.ctime) = (None, None);
        }
    }
}

/// `btrfs check` finds nothing; or, in an image of layouts that its lowmem mode objects to when the
/// kernel writes them (inline data before other extents without NO_HOLES; extended references over
/// a leaf's border), what it finds in the kernel's image, too.
pub fn assert_as_clean(ours: &Path, kernels: &Path) {
    for mode in CheckMode::ALL {
        let outcome = btrfs_check(ours, mode);
        if outcome.is_clean {
            continue;
        }
        let errors = |transcript: &str| -> Vec<String> {
            transcript.lines().filter(|line| line.contains("ERROR")).map(str::to_owned).collect()
        };
        let expected = btrfs_check(kernels, mode);
        assert_eq!(mode, CheckMode::Lowmem, "{}", outcome.transcript);
        assert!(!expected.is_clean, "{}", outcome.transcript);
        assert_eq!(errors(&outcome.transcript), errors(&expected.transcript));
    }
}

/// Of each inode that has a name its flags, and of a file its extents: where each begins in the file,
/// how long it is, and where that lies.
fn facts(fs: &Filesystem) -> BTreeMap<InodeId, (u64, Vec<String>)> {
    let mut facts = BTreeMap::new();
    let mut left = vec![fs.top_level()];
    while let Some(id) = left.pop() {
        if id.is_stand_in() {
            continue;
        }
        let inode = fs.inode(id).unwrap();
        let mut extents = Vec::new();
        if inode.is_dir() {
            left.extend(fs.read_dir(id, 0).unwrap().map(|entry| entry.unwrap().target));
        } else if inode.mode & 0o170_000 == 0o100_000 {
            let mappings = fs.file_extents(id, FileOffset(0)).unwrap().map(Result::unwrap);
            extents.extend(mappings.filter(|mapping| mapping.kind != MappingKind::Hole).map(
                |at| {
                    let place = (at.disk_bytenr, at.disk_num_bytes, at.extent_offset);
                    format!(
                        "{} {} {:?} {place:?} {:?}",
                        at.offset, at.len_bytes, at.kind, at.compression
                    )
                },
            ));
        }
        facts.insert(id, (inode.flags, extents));
    }
    facts
}

/// What the kernel shows after a power cut at this moment, and the engine; returns whether there
/// was a log.
pub fn compare(image: &Path, when: &str) -> bool {
    compare_changed(image, when, |_| ())
}

/// As [`compare`], with a change made to both images first.
pub fn compare_changed(image: &Path, when: &str, change: fn(&Path)) -> bool {
    let (for_kernel, for_engine) = (image.with_extension("kernel"), image.with_extension("engine"));
    // The kernel may be writing by itself: a power cut is one moment, so two copies must agree.
    loop {
        copy(image, &for_kernel);
        copy(image, &for_engine);
        let same = command("cmp").arg("-s").arg(&for_kernel).arg(&for_engine).status();
        if same.unwrap().success() {
            break;
        }
    }
    change(&for_kernel);
    change(&for_engine);
    let cut = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let had_log = super::open(&[&for_engine]).notices().contains(&Notice::LogNotReplayed);

    // Reading a link would change what its next name shows.
    let mount = KernelMount::read_write(&for_kernel, "subvolid=5,noatime");
    let mut theirs = TreeSnapshot::of_directory(mount.path());
    mount.unmount();

    let fs = super::open(&[&for_kernel]);
    let kernels_facts = facts(&fs);
    drop(fs);

    let fs = open_for_writing(&for_engine);
    assert!(fs.notices().is_empty());
    // Numbers of inodes that the log brought were given out again right after the replay.
    let new = NewInode::new(0o100_644, Time::default());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    handle.create_unlinked(fs.top_level(), &new).unwrap();
    drop(handle);
    drop(fs);
    println!("{when}");
    assert_as_clean(&for_engine, &for_kernel);
    let fs = super::open(&[&for_engine]);
    assert!(fs.notices().is_empty());
    let mut ours = super::snapshot(&fs, fs.top_level());
    let our_facts = facts(&fs);
    drop(fs);
    forget_times_of_replay(&mut ours, &mut theirs, cut);
    theirs.assert_same(&ours, &Compare::same_filesystem());
    for (id, theirs) in &kernels_facts {
        assert_eq!(our_facts.get(id), Some(theirs), "{id}");
    }
    // It can be changed by both after that.
    let fs = open_for_writing(&for_engine);
    fs.begin(Reservation::create(0)).unwrap().create(fs.top_level(), b"new one", &new).unwrap();
    fs.commit().unwrap();
    drop(fs);
    let mount = KernelMount::read_write(&for_engine, "subvolid=5");
    fs::remove_file(mount.path().join("new one")).unwrap();
    mount.unmount();
    assert_as_clean(&for_engine, &for_kernel);
    fs::remove_file(&for_kernel).unwrap();
    fs::remove_file(&for_engine).unwrap();
    had_log
}

pub struct Stage {
    _directory: tempfile::TempDir,
    pub image: PathBuf,
    mount: Option<KernelMount>,
    /// Files that stay open until the image has been copied.
    pub open: RefCell<Vec<File>>,
}

impl Stage {
    pub fn new(mkfs: &str, mount: &str) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = directory.path().join("image");
        MkfsBtrfs::new().options(mkfs).size_bytes(300 << 20).make(&image);
        let options = format!("subvolid=5,commit=300,{mount}");
        let mount = KernelMount::read_write(&image, options.trim_end_matches(','));
        Self { _directory: directory, image, mount: Some(mount), open: RefCell::default() }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.mount.as_ref().unwrap().path().join(name)
    }

    pub fn commit(&self) {
        run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), self.at("").as_os_str()]);
    }

    pub fn done(mut self) {
        self.open.take();
        self.mount.take().unwrap().unmount();
    }
}

/// One case: what is committed first, and what is done and fsynced then.
pub struct Case {
    pub name: &'static str,
    pub before: fn(&Stage),
    pub after: fn(&Stage),
}

pub fn write(stage: &Stage, name: &str, len: usize) {
    fs::write(stage.at(name), Prng::new(len as u64).text(len)).unwrap();
}

pub fn pwrite(stage: &Stage, name: &str, offset: u64, len: usize) {
    let file = File::options().write(true).open(stage.at(name)).unwrap();
    file.write_all_at(&Prng::new(offset).bytes(len), offset).unwrap();
}

pub fn xattr(stage: &Stage, name: &str, attribute: &str, value: Option<&[u8]>) {
    use rustix::fs::{XattrFlags, removexattr, setxattr};
    match value {
        Some(value) => {
            setxattr(stage.at(name), attribute, value, XattrFlags::empty()).unwrap();
        }
        None => removexattr(stage.at(name), attribute).unwrap(),
    }
}

pub fn fallocate(stage: &Stage, name: &str, flags: rustix::fs::FallocateFlags, at: u64, len: u64) {
    let file = File::options().write(true).open(stage.at(name)).unwrap();
    rustix::fs::fallocate(&file, flags, at, len).unwrap();
}

pub fn tree(stage: &Stage) {
    for dir in ["a", "a/b", "c"] {
        fs::create_dir(stage.at(dir)).unwrap();
    }
    write(stage, "a/small", 1000);
    write(stage, "a/large", 700_000);
    write(stage, "a/b/file", 50_000);
    fs::hard_link(stage.at("a/large"), stage.at("c/link")).unwrap();
    xattr(stage, "a/large", "user.one", Some(b"1"));
    xattr(stage, "a/large", "user.two", Some(b"2"));
}
