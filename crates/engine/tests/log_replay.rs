//! Logs that the kernel wrote, replayed by the engine and by the kernel: both see the same then, and
//! `btrfs check` finds nothing.
//!
//! A copy of the image, taken right after an fsync while it is mounted, is what a power cut would
//! leave.

mod common;

use std::cell::RefCell;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use common::open_for_writing;
use ubtrfs_engine::{NewInode, Notice, Reservation};
use ubtrfs_rt::Time;
use ubtrfs_testkit::snapshot::Timestamp;
use ubtrfs_testkit::{
    CheckMode, Compare, KernelMount, MkfsBtrfs, Oracle, Prng, TreeSnapshot, btrfs_check, oracle,
    run,
};

fn has_judges() -> bool {
    oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs, Oracle::BtrfsProgs])
}

fn sync(path: &Path) {
    File::open(path).unwrap().sync_all().unwrap();
}

fn copy(image: &Path, to: &Path) {
    run("cp", ["--sparse=always".as_ref(), image.as_os_str(), to.as_os_str()]);
}

/// What loses a name in the replay gets the time of the replay, unless the log's item comes after: on
/// each side as the order of steps has it. Such times are not compared, all others are.
fn forget_times_of_replay(ours: &mut TreeSnapshot, theirs: &mut TreeSnapshot, cut: Duration) {
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
fn assert_as_clean(ours: &Path, kernels: &Path) {
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

/// What the kernel shows after a power cut at this moment, and the engine; returns whether there
/// was a log.
fn compare(image: &Path, when: &str) -> bool {
    compare_changed(image, when, |_| ())
}

/// As [`compare`], with a change made to both images first.
fn compare_changed(image: &Path, when: &str, change: fn(&Path)) -> bool {
    let (for_kernel, for_engine) = (image.with_extension("kernel"), image.with_extension("engine"));
    // The kernel may be writing by itself: a power cut is one moment, so two copies must agree.
    loop {
        copy(image, &for_kernel);
        copy(image, &for_engine);
        let same = Command::new("cmp").arg("-s").arg(&for_kernel).arg(&for_engine).status();
        if same.unwrap().success() {
            break;
        }
    }
    change(&for_kernel);
    change(&for_engine);
    let cut = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let had_log = common::open(&[&for_engine]).notices().contains(&Notice::LogNotReplayed);

    let mount = KernelMount::read_write(&for_kernel, "subvolid=5");
    let mut theirs = TreeSnapshot::of_directory(mount.path());
    mount.unmount();

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
    let fs = common::open(&[&for_engine]);
    assert!(fs.notices().is_empty());
    let mut ours = common::snapshot(&fs, fs.top_level());
    drop(fs);
    forget_times_of_replay(&mut ours, &mut theirs, cut);
    theirs.assert_same(&ours, &Compare::same_filesystem());
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

struct Stage {
    _directory: tempfile::TempDir,
    image: PathBuf,
    mount: Option<KernelMount>,
    /// Files that stay open until the image has been copied.
    open: RefCell<Vec<File>>,
}

impl Stage {
    fn new(mkfs: &str, mount: &str) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = directory.path().join("image");
        MkfsBtrfs::new().options(mkfs).size_bytes(300 << 20).make(&image);
        let options = format!("subvolid=5,commit=300,{mount}");
        let mount = KernelMount::read_write(&image, options.trim_end_matches(','));
        Self { _directory: directory, image, mount: Some(mount), open: RefCell::default() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.mount.as_ref().unwrap().path().join(name)
    }

    fn commit(&self) {
        run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), self.at("").as_os_str()]);
    }

    fn done(mut self) {
        self.open.take();
        self.mount.take().unwrap().unmount();
    }
}

/// One case: what is committed first, and what is done and fsynced then.
struct Case {
    name: &'static str,
    before: fn(&Stage),
    after: fn(&Stage),
}

fn write(stage: &Stage, name: &str, len: usize) {
    fs::write(stage.at(name), Prng::new(len as u64).text(len)).unwrap();
}

fn pwrite(stage: &Stage, name: &str, offset: u64, len: usize) {
    let file = File::options().write(true).open(stage.at(name)).unwrap();
    file.write_all_at(&Prng::new(offset).bytes(len), offset).unwrap();
}

fn xattr(stage: &Stage, name: &str, attribute: &str, value: Option<&[u8]>) {
    use rustix::fs::{XattrFlags, removexattr, setxattr};
    match value {
        Some(value) => {
            setxattr(stage.at(name), attribute, value, XattrFlags::empty()).unwrap();
        }
        None => removexattr(stage.at(name), attribute).unwrap(),
    }
}

fn fallocate(stage: &Stage, name: &str, flags: rustix::fs::FallocateFlags, at: u64, len: u64) {
    let file = File::options().write(true).open(stage.at(name)).unwrap();
    rustix::fs::fallocate(&file, flags, at, len).unwrap();
}

fn tree(stage: &Stage) {
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

fn cases() -> Vec<Case> {
    use rustix::fs::FallocateFlags as Flags;
    let case = |name, after| Case { name, before: tree, after };
    vec![
        case("a new file", |s| {
            write(s, "a/new", 200_000);
            sync(&s.at("a/new"));
        }),
        case("a new inline file in a new directory", |s| {
            fs::create_dir(s.at("a/new dir")).unwrap();
            write(s, "a/new dir/file", 100);
            sync(&s.at("a/new dir/file"));
        }),
        case("a new directory with files", |s| {
            fs::create_dir(s.at("d")).unwrap();
            for at in 0..40 {
                write(s, &format!("d/{at}"), 10 + at * 300);
            }
            sync(&s.at("d"));
        }),
        case("an overwritten and a longer file", |s| {
            pwrite(s, "a/large", 100_000, 30_000);
            pwrite(s, "a/large", 800_000, 5000);
            sync(&s.at("a/large"));
        }),
        case("the same file fsynced twice", |s| {
            pwrite(s, "a/large", 100_000, 30_000);
            sync(&s.at("a/large"));
            pwrite(s, "a/large", 110_000, 100);
            sync(&s.at("a/large"));
        }),
        case("a truncated file", |s| {
            File::options().write(true).open(s.at("a/large")).unwrap().set_len(12_345).unwrap();
            sync(&s.at("a/large"));
        }),
        case("a truncated and extended file", |s| {
            let file = File::options().write(true).open(s.at("a/large")).unwrap();
            file.set_len(12_345).unwrap();
            file.set_len(900_000).unwrap();
            sync(&s.at("a/large"));
        }),
        case("a punched hole and preallocation", |s| {
            fallocate(s, "a/large", Flags::PUNCH_HOLE | Flags::KEEP_SIZE, 65_536, 200_000);
            fallocate(s, "a/b/file", Flags::KEEP_SIZE, 0, 500_000);
            pwrite(s, "a/b/file", 200_000, 8192);
            sync(&s.at("a/large"));
            sync(&s.at("a/b/file"));
        }),
        case("attributes set, replaced and removed", |s| {
            xattr(s, "a/large", "user.one", None);
            xattr(s, "a/large", "user.two", Some(b"another"));
            xattr(s, "a/large", "user.three", Some(b"3"));
            sync(&s.at("a/large"));
        }),
        case("a renamed file", |s| {
            fs::rename(s.at("a/large"), s.at("a/b/moved")).unwrap();
            sync(&s.at("a/b/moved"));
        }),
        case("a file renamed over another", |s| {
            write(s, "a/new", 30_000);
            fs::rename(s.at("a/new"), s.at("a/small")).unwrap();
            sync(&s.at("a/small"));
        }),
        case("a removed name of two", |s| {
            fs::remove_file(s.at("c/link")).unwrap();
            sync(&s.at("a/large"));
        }),
        case("a removed file, its directory fsynced", |s| {
            fs::remove_file(s.at("a/small")).unwrap();
            sync(&s.at("a"));
        }),
        case("a removed name, its directory fsynced", |s| {
            fs::remove_file(s.at("c/link")).unwrap();
            sync(&s.at("c"));
        }),
        case("a name given to another file", |s| {
            fs::remove_file(s.at("a/small")).unwrap();
            write(s, "a/small", 20_000);
            sync(&s.at("a/small"));
        }),
        case("many links", |s| {
            for at in 0..300 {
                fs::hard_link(s.at("a/small"), s.at(&format!("c/a link of a long name {at}")))
                    .unwrap();
            }
            sync(&s.at("a/small"));
        }),
        case("names exchanged", |s| {
            let (a, b) = (s.at("a/small"), s.at("a/large"));
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(rustix::fs::CWD, &a, rustix::fs::CWD, &b, flags).unwrap();
            sync(&a);
        }),
        case("a directory moved", |s| {
            fs::rename(s.at("a/b"), s.at("c/b")).unwrap();
            pwrite(s, "c/b/file", 0, 10);
            sync(&s.at("c/b/file"));
        }),
        case("a directory moved and fsynced", |s| {
            fs::rename(s.at("a/b"), s.at("c/b")).unwrap();
            sync(&s.at("c/b"));
        }),
        case("a symbolic link", |s| {
            std::os::unix::fs::symlink("../a/large", s.at("c/symlink")).unwrap();
            sync(&s.at("c"));
        }),
        case("a clone", |s| {
            run(
                "cp",
                [
                    "--reflink=always".as_ref(),
                    s.at("a/large").as_os_str(),
                    s.at("c/clone").as_os_str(),
                ],
            );
            sync(&s.at("c/clone"));
        }),
        case("a file without a name", |s| {
            let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
            let mode = rustix::fs::Mode::from_raw_mode(0o600);
            let file = File::from(rustix::fs::open(s.at("a"), flags, mode).unwrap());
            file.write_all_at(&[7; 20_000], 0).unwrap();
            file.sync_all().unwrap();
            write(s, "a/new", 5);
            sync(&s.at("a/new"));
            s.open.borrow_mut().push(file);
        }),
        Case {
            name: "files of two subvolumes",
            before: |s| {
                tree(s);
                for name in ["one", "two"] {
                    run("btrfs", ["subvolume".as_ref(), "create".as_ref(), s.at(name).as_os_str()]);
                    write(s, &format!("{name}/file"), 90_000);
                }
            },
            after: |s| {
                pwrite(s, "one/file", 5000, 10_000);
                write(s, "two/new", 300_000);
                fs::rename(s.at("two/file"), s.at("two/renamed")).unwrap();
                for name in ["one/file", "two/new", "two/renamed"] {
                    sync(&s.at(name));
                }
            },
        },
        Case {
            name: "a file of a subvolume with snapshots",
            before: |s| {
                tree(s);
                run(
                    "btrfs",
                    [
                        "subvolume".as_ref(),
                        "snapshot".as_ref(),
                        s.at("").as_os_str(),
                        s.at("snapshot").as_os_str(),
                    ],
                );
            },
            after: |s| {
                pwrite(s, "a/large", 5000, 10_000);
                sync(&s.at("a/large"));
                pwrite(s, "snapshot/a/large", 9000, 10_000);
                fs::remove_file(s.at("snapshot/a/small")).unwrap();
                sync(&s.at("snapshot/a/large"));
                sync(&s.at("snapshot/a"));
            },
        },
    ]
}

/// Cases in which the kernel commits instead of writing a log, which it does by itself: what is
/// shown is that the engine needs none.
const COMMITTED: [&str; 2] = ["a renamed file", "a directory moved and fsynced"];

#[test]
fn logs_of_the_kernel_are_replayed_as_the_kernel_does() {
    if !has_judges() {
        return;
    }
    let only = std::env::var("UBTRFS_CASE").ok();
    let mut logged = std::collections::BTreeSet::new();
    for (mkfs, mount) in [("", ""), ("-O ^no-holes", ""), ("--mixed", "compress=zstd")] {
        for case in cases() {
            if only.as_ref().is_some_and(|only| only != case.name) {
                continue;
            }
            let stage = Stage::new(mkfs, mount);
            (case.before)(&stage);
            stage.commit();
            (case.after)(&stage);
            let had_log = compare(&stage.image, &format!("{} ({mkfs}; {mount})", case.name));
            stage.done();
            println!("{} ({mkfs}; {mount}): log {had_log}", case.name);
            if had_log {
                logged.insert(case.name);
            }
        }
    }
    // In the others there is something to be replayed.
    if only.is_none() {
        let names = cases().into_iter().map(|case| case.name);
        let others: Vec<_> = names.filter(|name| !logged.contains(name)).collect();
        assert_eq!(others, COMMITTED);
    }
}

/// It was refused: the tree was to be made anew first, and that commits.
#[test]
fn logs_beside_a_stale_free_space_tree_are_replayed_as_the_kernel_does() {
    if !has_judges() {
        return;
    }
    for case in cases().into_iter().take(8) {
        let stage = Stage::new("-R free-space-tree", "");
        (case.before)(&stage);
        stage.commit();
        (case.after)(&stage);
        assert!(compare_changed(&stage.image, case.name, common::forget_valid), "{}", case.name);
        stage.done();
    }
}

/// Random work on few names, with fsyncs of files and directories; after some of them the power
/// is cut.
#[test]
fn logs_of_random_work_are_replayed_as_the_kernel_does() {
    if !has_judges() {
        return;
    }
    let mut random = Prng::of_test(81);
    println!("seed {}", random.seed());
    let (mut cuts, mut logs) = (0, 0);
    for options in ["", "-O ^no-holes"] {
        let stage = Stage::new(options, "");
        for number in 0..4 {
            fs::create_dir(stage.at(&format!("d{number}"))).unwrap();
        }
        let mut journal = Vec::new();
        for round in 0..450 {
            let path = |random: &mut Prng| {
                let dir = ["", "d0/", "d1/", "d2/d3/", "d2/"][random.index(5)];
                format!("{dir}f{}", random.below(5))
            };
            let (a, b) = (path(&mut random), path(&mut random));
            let (from, to) = (stage.at(&a), stage.at(&b));
            let did = match random.below(16) {
                0..3 => fs::write(&from, random.text(300)).map(|()| format!("write {a}")),
                3..5 => {
                    let (at, len) = (random.below(300_000), random.index(50_000));
                    File::options().write(true).create(true).truncate(false).open(&from).and_then(
                        |file| {
                            file.write_all_at(&random.bytes(len), at)?;
                            Ok(format!("write {a} {at} {len}"))
                        },
                    )
                }
                5 => File::options().write(true).open(&from).and_then(|file| {
                    let len = random.below(200_000);
                    file.set_len(len).map(|()| format!("truncate {a} {len}"))
                }),
                6 => fs::hard_link(&from, &to).map(|()| format!("link {a} {b}")),
                7..9 => fs::rename(&from, &to).map(|()| format!("rename {a} {b}")),
                9 => fs::remove_file(&from).map(|()| format!("unlink {a}")),
                10 => {
                    let dir = stage.at("d2/d3");
                    fs::create_dir(&dir)
                        .or_else(|_| fs::rename(&dir, stage.at("d1/d3")))
                        .or_else(|_| fs::rename(stage.at("d1/d3"), &dir))
                        .map(|()| "directory d3".to_owned())
                }
                11 if random.chance(1, 3) => {
                    stage.commit();
                    Ok("commit".to_owned())
                }
                _ => {
                    let what = match random.below(3) {
                        0 => ["", "d0", "d1", "d2"][random.index(4)].to_owned(),
                        _ => a,
                    };
                    File::open(stage.at(&what))
                        .and_then(|file| file.sync_all())
                        .map(|()| format!("fsync {what}"))
                }
            };
            let Ok(did) = did else { continue };
            let is_fsync = did.starts_with("fsync");
            journal.push(format!("{round}: {did}"));
            if is_fsync && random.chance(1, 3) {
                let from = journal.iter().rposition(|line| line.ends_with("commit")).unwrap_or(0);
                let when = journal[from..].join("\n");
                cuts += 1;
                logs += u32::from(compare(&stage.image, &when));
            }
        }
        stage.done();
    }
    println!("{cuts} cuts, {logs} with a log");
    assert!(logs > 12, "{logs} of {cuts} images had a log");
}
