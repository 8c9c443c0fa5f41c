//! Power cuts while a filesystem is opened that the kernel left with a log, with inodes without a
//! name, or with a free space tree that is not up to date.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, RenameFlags};
use ubtrfs_ondisk::features::CompatRo;
use ubtrfs_sim::{OpeningConfig, OpeningReport, change_compat_ro, judge_opening};
use ubtrfs_testkit::crash::{BlockSet, Image};
use ubtrfs_testkit::snapshot::Timestamp;
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Oracle, Prng, oracle, run};

const LEN_BYTES: u64 = 130 << 20;

fn has_judges() -> bool {
    oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs, Oracle::BtrfsProgs])
}

/// A filesystem that the kernel has mounted.
struct Stage {
    _directory: tempfile::TempDir,
    images: Vec<PathBuf>,
    mount: Option<KernelMount>,
    /// Stay open until the power goes.
    open: Vec<File>,
}

impl Stage {
    fn new(mkfs: &str, mount: &str, devices: usize) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = |number| directory.path().join(format!("image-{number}"));
        let images: Vec<PathBuf> = (0..devices).map(image).collect();
        MkfsBtrfs::new().options(mkfs).size_bytes(LEN_BYTES).make_on(&images);
        let options = format!("subvolid=5,commit=300,{mount}");
        let mount = KernelMount::mount(&images, options.trim_end_matches(','), false).unwrap();
        Self { _directory: directory, images, mount: Some(mount), open: Vec::new() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.mount.as_ref().unwrap().path().join(name)
    }

    fn commit(&self) {
        self.btrfs(&["filesystem", "sync"], "");
    }

    fn btrfs(&self, words: &[&str], name: &str) {
        let path = self.at(name);
        run("btrfs", words.iter().map(std::ffi::OsStr::new).chain([path.as_os_str()]));
    }

    fn write(&self, name: &str, offset: u64, len: usize) {
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(false).open(self.at(name)).unwrap();
        file.write_all_at(&Prng::new(offset + 1).text(len), offset).unwrap();
    }

    fn sync(&self, name: &str) {
        File::open(self.at(name)).unwrap().sync_all().unwrap();
    }

    fn tree(&self) {
        for dir in ["a", "a/b", "c"] {
            fs::create_dir(self.at(dir)).unwrap();
        }
        self.write("a/small", 0, 1000);
        self.write("a/large", 0, 400_000);
        self.write("a/b/file", 0, 50_000);
        fs::hard_link(self.at("a/large"), self.at("c/link")).unwrap();
    }

    /// The power goes: what lies on the devices now.
    fn cut(mut self) -> (Vec<Image>, Timestamp) {
        // The kernel may be writing by itself: a power cut is one moment.
        let read = || -> Vec<Image> { self.images.iter().map(|at| Image::read_from(at)).collect() };
        let mut all = BlockSet::default();
        all.insert_range(0, usize::try_from(LEN_BYTES).unwrap());
        let mut images = read();
        loop {
            let again = read();
            if images.iter().zip(&again).all(|(one, two)| one.is_same_in(two, &all)) {
                break;
            }
            images = again;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let sec = i64::try_from(now.as_secs()).unwrap();
        self.open.clear();
        self.mount.take().unwrap().unmount();
        (images, Timestamp { sec, nsec: now.subsec_nanos() })
    }
}

/// Cuts the opening of what the kernel left. Some of the states are shown to the kernel, too.
fn judge(name: &str, (images, left_at): (Vec<Image>, Timestamp)) -> OpeningReport {
    let config = OpeningConfig { seed: 1, left_at, chosen: 6, mount_one_in: 12 };
    let report = judge_opening(&images, &config).unwrap_or_else(|why| panic!("{name}: {why}"));
    println!("{name}: {report:?}");
    assert!(report.states > 100 && report.opened >= 8, "{report:?}");
    assert!(report.opened_before > 0 && report.opened_before < report.opened, "{report:?}");
    report
}

fn tmpfile(stage: &mut Stage, dir: &str) {
    let flags = OFlags::TMPFILE | OFlags::RDWR;
    let mode = Mode::from_raw_mode(0o600);
    let file = File::from(rustix::fs::open(stage.at(dir), flags, mode).unwrap());
    file.write_all_at(&[7; 20_000], 0).unwrap();
    stage.open.push(file);
}

/// Files that are new, overwritten, cut, renamed, exchanged and removed, and fsynced.
fn logged_work(stage: &mut Stage) {
    stage.write("a/new", 0, 150_000);
    stage.sync("a/new");
    stage.write("a/large", 100_000, 30_000);
    let large = File::options().write(true).open(stage.at("a/large")).unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&large, punch, 200_704, 65_536).unwrap();
    large.sync_all().unwrap();
    fs::remove_file(stage.at("a/small")).unwrap();
    stage.write("a/small", 0, 20_000);
    stage.sync("a/small");
    let (one, two) = (stage.at("a/small"), stage.at("a/large"));
    rustix::fs::renameat_with(CWD, &one, CWD, &two, RenameFlags::EXCHANGE).unwrap();
    stage.sync("a/small");
    fs::create_dir(stage.at("c/d")).unwrap();
    for number in 0..20 {
        stage.write(&format!("c/d/{number}"), 0, 10 + number * 300);
    }
    stage.sync("c/d");
}

fn log_of(mkfs: &str, mount: &str, devices: usize) -> OpeningReport {
    let mut stage = Stage::new(mkfs, mount, devices);
    stage.tree();
    stage.commit();
    logged_work(&mut stage);
    let report = judge(&format!("{mkfs} {mount}"), stage.cut());
    assert!(report.had_log && report.commits > 0, "{report:?}");
    report
}

#[test]
fn replay_of_a_log_cut_at_any_write_shows_what_it_gives() {
    if has_judges() {
        let report = log_of("", "", 1);
        assert!(report.mounted > 0, "{report:?}");
        log_of("--mixed", "compress=zstd", 1);
    }
}

#[test]
fn replay_of_a_log_on_two_devices_cut_at_any_write_shows_what_it_gives() {
    if has_judges() {
        log_of("-d raid1 -m raid1", "", 2);
    }
}

/// Names move between subvolumes that both have a log; one has a snapshot; inodes without a name are
/// to go, and the free space tree is to be made anew after the replay.
#[test]
fn replay_of_logs_beside_a_stale_free_space_tree_cut_at_any_write_shows_what_it_gives() {
    if !has_judges() {
        return;
    }
    let mut stage = Stage::new("-R free-space-tree", "", 1);
    stage.tree();
    for name in ["one", "two"] {
        stage.btrfs(&["subvolume", "create"], name);
        stage.write(&format!("{name}/file"), 0, 90_000);
        tmpfile(&mut stage, name);
    }
    let (source, target) = (stage.at("one"), stage.at("snapshot"));
    let words = ["subvolume", "snapshot"].map(Path::new);
    run("btrfs", words.into_iter().chain([&*source, &*target]).map(Path::as_os_str));
    stage.commit();
    stage.write("one/file", 5000, 10_000);
    stage.write("two/new", 0, 100_000);
    fs::rename(stage.at("two/file"), stage.at("two/renamed")).unwrap();
    for name in ["one/file", "two/new", "two/renamed"] {
        stage.sync(name);
    }
    let (mut images, left_at) = stage.cut();
    change_compat_ro(&mut images, CompatRo::FREE_SPACE_TREE_VALID, CompatRo(0));
    let report = judge("stale", (images, left_at));
    assert!(report.had_log && report.was_stale && report.orphans >= 2, "{report:?}");
    assert!(report.commits >= 2, "{report:?}");
}

/// A tree that is no longer right, and one without any use: whoever changed the filesystem did not
/// know it.
#[test]
fn rebuild_of_a_free_space_tree_cut_at_any_write_leaves_a_right_one() {
    if !has_judges() {
        return;
    }
    let mut stage = Stage::new("-R free-space-tree", "", 1);
    stage.tree();
    tmpfile(&mut stage, "a");
    stage.commit();
    let before = stage.cut();
    // An old Linux that does not know the tree: Linux of today with the bits out of its sight.
    let tree = CompatRo::FREE_SPACE_TREE;
    let (mut images, _) = before;
    change_compat_ro(
        &mut images,
        CompatRo(tree.0 | CompatRo::FREE_SPACE_TREE_VALID.0),
        CompatRo(0),
    );
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = directory.path().join("image");
    images[0].write_to(&image);
    let options = "subvolid=5,commit=300,nospace_cache";
    let mount = KernelMount::mount(std::slice::from_ref(&image), options, false).unwrap();
    let stage =
        Stage { _directory: directory, images: vec![image], mount: Some(mount), open: Vec::new() };
    for number in 0..30 {
        stage.write(&format!("a/more {number}"), 0, 5000 + number * 1000);
    }
    fs::remove_file(stage.at("a/b/file")).unwrap();
    stage.commit();
    let (mut images, left_at) = stage.cut();
    change_compat_ro(&mut images, CompatRo(0), tree);
    let report = judge("left behind", (images, left_at));
    assert!(report.was_stale && !report.had_log && report.commits > 0, "{report:?}");
}
