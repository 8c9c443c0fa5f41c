//! A filesystem mounted and used as any other; then `btrfs check` and the kernel's own mount say the same of its image.

#[path = "support/mounted.rs"]
mod mounted;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use mounted::{Mounted, open};
use ubtrfs_engine::{NewInode, Reservation, SnapshotOptions};
use ubtrfs_fuse::ServeOptions;
use ubtrfs_iomap::FileOffset;
use ubtrfs_testkit::{Compare, KernelMount, Oracle, Prng, oracle, oracle::FUSE_RINGS_SWITCH};

/// The kernel's time of a file may be older than that of day by so much.
const CLOCK_TICK: Duration = Duration::from_millis(20);
/// For so long something may take to come.
const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn files_directories_and_links_same_as_the_kernel_shows_them() {
    let Some(mut mounted) = Mounted::new() else { return };
    let path = |name: &str| mounted.path(name);
    fs::create_dir(path("dir")).unwrap();
    fs::write(path("dir/short"), b"short").unwrap();
    let long: Vec<u8> = (0..3_000_000_u32).map(|at| (at / 7) as u8).collect();
    fs::write(path("dir/long"), &long).unwrap();
    assert!(fs::read(path("dir/long")).unwrap() == long);
    fs::hard_link(path("dir/short"), path("other name")).unwrap();
    symlink("dir/long", path("link")).unwrap();
    assert_eq!(fs::metadata(path("link")).unwrap().len(), 3_000_000);
    assert_eq!(fs::metadata(path("other name")).unwrap().nlink(), 2);
    fs::rename(path("dir/long"), path("moved")).unwrap();
    assert_eq!(fs::metadata(path("link")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    fs::create_dir(path("gone")).unwrap();
    fs::write(path("gone/file"), b"1").unwrap();
    assert_eq!(
        fs::remove_dir(path("gone")).unwrap_err().kind(),
        std::io::ErrorKind::DirectoryNotEmpty
    );
    fs::remove_dir_all(path("gone")).unwrap();
    fs::set_permissions(path("moved"), fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::chown(path("moved"), Some(1000), Some(100)).unwrap();
    File::options().write(true).open(path("moved")).unwrap().set_len(1_000_001).unwrap();
    let moved = fs::metadata(path("moved")).unwrap();
    assert_eq!((moved.mode(), moved.uid(), moved.gid()), (0o100_640, 1000, 100));
    assert_eq!(moved.len(), 1_000_001);
    let status = Command::new("mknod").arg(path("null")).args(["c", "1", "3"]).status().unwrap();
    assert!(status.success());
    assert_eq!(fs::metadata(path("null")).unwrap().rdev(), 0x103);
    mounted.judge();
    mounted.mount();
    assert!(fs::read(mounted.path("moved")).unwrap() == long[..1_000_001]);
    mounted.judge();
}

/// The kernel's switch for FUSE over io_uring, on until it is dropped.
struct RingsOn {
    before: String,
}

impl RingsOn {
    fn new() -> Option<Self> {
        if !oracle::require(Oracle::FuseRings) {
            return None;
        }
        let before = fs::read_to_string(FUSE_RINGS_SWITCH).unwrap();
        fs::write(FUSE_RINGS_SWITCH, "1").unwrap();
        Some(Self { before })
    }
}

impl Drop for RingsOn {
    fn drop(&mut self) {
        let _ = fs::write(FUSE_RINGS_SWITCH, self.before.trim());
    }
}

/// With more, the server takes no rings.
const RING_PROCESSORS_MAX: usize = 64;

fn possible_processors() -> usize {
    let list = fs::read_to_string("/sys/devices/system/cpu/possible").unwrap();
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        last.parse::<usize>().unwrap() - first.parse::<usize>().unwrap() + 1
    };
    list.trim().split(',').map(count).sum()
}

fn ring_threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "ubtrfs-ring").count()
}

/// Requests of all lengths, from several threads at once, by io_uring; long ones are answered beside others.
#[test]
fn requests_by_io_uring_are_answered_as_those_of_the_device() {
    let Some(mut mounted) = Mounted::new() else { return };
    mounted.unmount();
    let processors = possible_processors();
    if processors > RING_PROCESSORS_MAX {
        // As the oracles do.
        let is_required = std::env::var("UBTRFS_REQUIRE_ORACLES").is_ok_and(|value| value == "1");
        let why = format!("no FUSE over io_uring with {processors} processors");
        assert!(!is_required, "{why}");
        let _ = writeln!(std::io::stderr(), "SKIPPED: by io_uring: {why}");
        return;
    }
    let Some(_switch) = RingsOn::new() else { return };
    mounted.serve_options.uses_rings = true;
    mounted.mount();
    // The first request is answered when all queues are registered.
    fs::create_dir(mounted.path("dir")).unwrap();
    assert!(ring_threads() > 0);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let mounted = &mounted;
            scope.spawn(move || {
                let mut random = Prng::new(thread);
                for at in 0..60 {
                    let name = format!("dir/{thread} {at}");
                    let bytes = random.bytes(random.clone().index(200_000));
                    fs::write(mounted.path(&name), &bytes).unwrap();
                    let file = File::open(mounted.path(&name)).unwrap();
                    if at % 7 == 0 {
                        file.sync_all().unwrap();
                    }
                    assert!(fs::read(mounted.path(&name)).unwrap() == bytes);
                    match at % 5 {
                        0 => fs::remove_file(mounted.path(&name)).unwrap(),
                        1 => {
                            fs::rename(mounted.path(&name), mounted.path(&format!("{name} moved")))
                                .unwrap()
                        }
                        2 => symlink(&name, mounted.path(&format!("{name} link"))).unwrap(),
                        _ => {}
                    }
                }
            });
        }
    });
    let long = Prng::new(9).bytes(5 << 20);
    fs::write(mounted.path("long"), &long).unwrap();
    let written = File::open(mounted.path("long")).unwrap();
    rustix::fs::fadvise(&written, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    assert!(fs::read(mounted.path("long")).unwrap() == long);
    drop(written);
    let missing = fs::read(mounted.path("missing")).unwrap_err();
    assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
    assert_eq!(fs::read_dir(mounted.path("dir")).unwrap().count(), 4 * 60);
    mounted.judge();
    assert_eq!(ring_threads(), 0);
    // Switched on, and not asked for.
    mounted.serve_options.uses_rings = false;
    mounted.mount();
    assert!(fs::read(mounted.path("long")).unwrap() == long);
    assert_eq!(ring_threads(), 0);
    mounted.unmount();
}

#[test]
fn removed_file_stays_for_who_has_it_open_and_goes_then() {
    let Some(mut mounted) = Mounted::new() else { return };
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(mounted.path("file"))
        .unwrap();
    file.write_all(&[7; 200_000]).unwrap();
    fs::remove_file(mounted.path("file")).unwrap();
    file.write_all(&[8; 10]).unwrap();
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len(), 200_010);
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    // One that never had a name.
    let nameless = File::options()
        .write(true)
        .read(true)
        .custom_flags(rustix::fs::OFlags::TMPFILE.bits() as i32)
        .open(&mounted.directory)
        .unwrap();
    nameless.write_all_at(b"kept", 0).unwrap();
    let by_fd = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&nameless));
    rustix::fs::linkat(
        rustix::fs::CWD,
        by_fd.as_str(),
        rustix::fs::CWD,
        mounted.path("named"),
        rustix::fs::AtFlags::SYMLINK_FOLLOW,
    )
    .unwrap();
    let orphans = |image: &Path| {
        let command = ["inspect-internal", "dump-tree", "-t", "fs"];
        let output = Command::new("btrfs").args(command).arg(image).output().unwrap();
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stdout).matches("ORPHAN_ITEM").count()
    };
    drop((file, nameless));
    assert_eq!(fs::read(mounted.path("named")).unwrap(), b"kept");
    mounted.judge();
    assert_eq!(orphans(&mounted.image), 0);
}

#[test]
fn listing_of_a_changing_directory_tells_each_name_that_stays_once() {
    const COUNT: usize = 5000;
    let Some(mut mounted) = Mounted::new() else { return };
    fs::create_dir(mounted.path("dir")).unwrap();
    for at in 0..COUNT {
        File::create(mounted.path(&format!("dir/{at}"))).unwrap();
    }
    let (mut seen, mut removed) = (BTreeSet::new(), BTreeSet::new());
    for (at, entry) in fs::read_dir(mounted.path("dir")).unwrap().enumerate() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let inode = std::os::unix::fs::DirEntryExt::ino(&entry);
        match fs::metadata(entry.path()) {
            Ok(about) => assert_eq!(about.ino(), inode),
            // Listed before it was removed.
            Err(_) => assert!(removed.contains(&name), "{name}"),
        }
        assert!(seen.insert(name));
        if at % 10 == 0 && at < COUNT {
            let name = (COUNT - 1 - at).to_string();
            let _ = fs::remove_file(mounted.path(&format!("dir/{name}")));
            removed.insert(name);
            File::create(mounted.path(&format!("dir/new {at}"))).unwrap();
        }
    }
    for name in (0..COUNT).map(|at| at.to_string()).filter(|name| !removed.contains(name)) {
        assert!(seen.contains(&name), "{name}");
    }
    // What was made meanwhile is not listed, and what was removed ahead neither.
    assert!(removed.len() >= COUNT / 12);
    mounted.judge();
}

#[test]
fn holes_preallocation_and_shared_ranges_same_as_the_kernel_shows_them() {
    let Some(mut mounted) = Mounted::new() else { return };
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(mounted.path("sparse"))
        .unwrap();
    file.write_all_at(&[1; 8192], 1 << 20).unwrap();
    file.write_all_at(&[2; 100], 5 << 20).unwrap();
    let seek = |whence: SeekFrom, at: u64| {
        use rustix::fs::SeekFrom as Seek;
        let place =
            if matches!(whence, SeekFrom::Start(_)) { Seek::Data(at) } else { Seek::Hole(at) };
        rustix::fs::seek(&file, place)
    };
    let (data, hole) = (SeekFrom::Start(0), SeekFrom::End(0));
    assert_eq!(seek(data, 0), Ok(1 << 20));
    assert_eq!(seek(hole, 1 << 20), Ok((1 << 20) + 8192));
    assert_eq!(seek(data, (5 << 20) + 4096), Err(rustix::io::Errno::NXIO));
    let fallocate = |mode: &[&str], offset: u64, len: u64| {
        let status = Command::new("fallocate")
            .args(mode)
            .args(["-o", &offset.to_string(), "-l", &len.to_string()])
            .arg(mounted.path("sparse"))
            .status();
        assert!(status.unwrap().success(), "{mode:?}");
    };
    fallocate(&[], 6 << 20, 100_000);
    fallocate(&["-n"], 7 << 20, 100_000);
    fallocate(&["-p"], (1 << 20) + 4096, 4096);
    fallocate(&["-z"], 5 << 20, 50);
    let mut bytes = [9; 100];
    file.read_exact_at(&mut bytes, 5 << 20).unwrap();
    assert_eq!((bytes[49], bytes[50]), (0, 2));
    assert_eq!(file.metadata().unwrap().len(), (6 << 20) + 100_000);
    fs::write(mounted.path("source"), vec![5; 1 << 20]).unwrap();
    // copy_file_range, which shares.
    let status = Command::new("cp")
        .args(["--reflink=auto", "--sparse=never"])
        .args([mounted.path("source"), mounted.path("copy")])
        .status();
    assert!(status.unwrap().success());
    assert!(fs::read(mounted.path("copy")).unwrap() == vec![5; 1 << 20]);
    const COPY_FILE_RANGE: u32 = 47;
    let (server, _) = mounted.server.as_ref().unwrap();
    assert!(server.request_counts().contains_key(&COPY_FILE_RANGE));
    drop(file);
    mounted.judge();
    let kernel = KernelMount::read_only(&mounted.image, "");
    let extents = Command::new("filefrag").arg("-v").arg(kernel.path().join("copy")).output();
    let extents = String::from_utf8_lossy(&extents.unwrap().stdout).into_owned();
    assert!(extents.contains("shared"), "{extents}");
}

/// Each row on a new file and on a new directory, here and on a mount of the kernel's: what is refused, the flags after each step, and the
/// property.
#[test]
fn flags_of_compression_are_taken_as_the_kernel_takes_them() {
    let Some(mounted) = Mounted::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    ubtrfs_testkit::MkfsBtrfs::new().size_bytes(256 << 20).make(&image);
    let kernel = KernelMount::read_write(&image, "");
    const ROWS: [&str; 14] = [
        "chattr +c; chattr +i; chattr -ic",
        "chattr +i; chattr +c; chattr -i",
        "chattr +c; chattr -c",
        "chattr +m; chattr -m",
        "chattr +c; chattr +m",
        "chattr +cm",
        "chattr +C; chattr +c; chattr +m",
        "chattr +c; chattr +C",
        "chattr +m; chattr +C",
        "chattr +C; setfattr -n btrfs.compression -v zstd",
        "setfattr -n btrfs.compression -v lzo; chattr -c; chattr +c",
        "setfattr -n btrfs.compression -v none; chattr +c",
        "setfattr -n btrfs.compression -v zlib; chattr =m",
        "chattr +C; chattr -C; chattr +c",
    ];
    let by = |top: &Path, kind: &str, number: usize, row: &str| {
        let path = top.join(format!("{kind} {number}"));
        match kind {
            "file" => fs::write(&path, b"").unwrap(),
            _ => fs::create_dir(&path).unwrap(),
        }
        let script =
            row.replace(';', &format!(" \"$0\"; echo $?; {SHOW};")) + " \"$0\"; echo $?; " + SHOW;
        let output = Command::new("sh").args(["-c", &script]).arg(&path).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    const SHOW: &str = "lsattr -d \"$0\" | cut -d' ' -f1; getfattr -n btrfs.compression --only-values \"$0\" 2>/dev/null; echo";
    for (number, row) in ROWS.into_iter().enumerate() {
        for kind in ["file", "directory"] {
            let theirs = by(kernel.path(), kind, number, row);
            assert!(theirs.lines().count() >= 3, "{theirs}");
            let ours = by(&mounted.path(""), kind, number, row);
            assert_eq!(ours, theirs, "{kind}: {row} (ours | the kernel's)");
        }
    }
    // Linux names its default here, or nothing, whatever other flag is changed; what was chosen stays as long as the flags of compression do.
    for (number, method) in ["zstd", "none"].into_iter().enumerate() {
        let row = format!("setfattr -n btrfs.compression -v {method}; chattr +i; chattr -i");
        let said = by(&mounted.path(""), "file", ROWS.len() + number, &row);
        assert!(said.trim_end().ends_with(method), "{said}");
    }
}

#[test]
fn xattrs_lists_and_flags_same_as_the_kernel_shows_them() {
    let Some(mut mounted) = Mounted::new() else { return };
    fs::create_dir(mounted.path("dir")).unwrap();
    fs::write(mounted.path("dir/file"), b"1").unwrap();
    let run = |program: &str, args: &[&str], name: &str| {
        let output = Command::new(program).args(args).arg(mounted.path(name)).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.success(), text + &String::from_utf8_lossy(&output.stderr))
    };
    let done = |program: &str, args: &[&str], name: &str| {
        let (ok, text) = run(program, args, name);
        assert!(ok, "{program} {args:?}: {text}");
        text
    };
    done("setfattr", &["-n", "user.one", "-v", "value"], "dir/file");
    assert!(done("getfattr", &["-d"], "dir/file").contains("user.one=\"value\""));
    done("setfattr", &["-n", "user.two", "-v", "2"], "dir/file");
    done("setfattr", &["-x", "user.one"], "dir/file");
    assert!(!run("getfattr", &["-n", "user.one"], "dir/file").0);
    done("setfacl", &["-m", "u:1000:r-x,d:u:1001:rwx"], "dir");
    fs::write(mounted.path("dir/inherits"), b"2").unwrap();
    assert!(done("getfacl", &["-pn"], "dir/inherits").contains("user:1001:rwx"));
    done("chattr", &["+A"], "dir/file");
    assert!(done("lsattr", &[], "dir/file").contains('A'));
    done("chattr", &["+i"], "dir/inherits");
    assert!(fs::write(mounted.path("dir/inherits"), b"3").is_err());
    done("chattr", &["-i"], "dir/inherits");
    // Who writes to it takes its rights.
    fs::set_permissions(mounted.path("dir/file"), fs::Permissions::from_mode(0o4755)).unwrap();
    done("setcap", &["cap_net_raw=ep"], "dir/inherits");
    fs::write(mounted.path("dir/inherits"), b"4").unwrap();
    assert!(!run("getfattr", &["-n", "security.capability"], "dir/inherits").0);
    // Others than root, by writing and by allocating; what the kernel knew of the mode it knows no more.
    for (name, command) in [("a", "echo 5 >"), ("b", "fallocate -l 100000")] {
        let path = mounted.path(name);
        fs::write(&path, b"#!/bin/sh\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
        let script = format!("{command} {}", path.display());
        let who = ["--reuid", "1000", "--regid", "1000", "--clear-groups", "sh", "-c", &script];
        assert!(Command::new("setpriv").args(who).status().unwrap().success(), "{command}");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o777, "{command}");
    }
    // An owner outside of its group gives it a list.
    let path = mounted.path("c");
    fs::write(&path, b"").unwrap();
    std::os::unix::fs::chown(&path, Some(1000), Some(7)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o2755)).unwrap();
    let status = Command::new("setpriv")
        .args(["--reuid", "1000", "--regid", "1000", "--clear-groups"])
        .args(["setfacl", "-m", "u:1001:r"])
        .arg(&path)
        .status();
    assert!(status.unwrap().success());
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7000, 0);
    std::os::unix::fs::chown(mounted.path("dir/file"), Some(1), None).unwrap();
    assert_eq!(fs::metadata(mounted.path("dir/file")).unwrap().mode() & 0o7777, 0o755);
    mounted.judge();
}

/// A subvolume and its snapshot count their inodes from the same number: nothing that walks the mount may take one for the other.
#[test]
fn subvolumes_have_numbers_of_their_own() {
    let Some(mut mounted) = Mounted::new() else { return };
    mounted.unmount();
    {
        let fs = open(&mounted.image);
        let top = fs.top_level();
        let new = ubtrfs_engine::NewInode::new(0o040_755, fs.runtime().clock.now());
        let mut handle = fs.begin(ubtrfs_engine::Reservation::create_subvolume()).unwrap();
        let sub = handle.create_subvolume(top, b"sub", &new).unwrap();
        drop(handle);
        let reservation = ubtrfs_engine::Reservation::create(0);
        fs.begin(reservation).unwrap().create(sub, b"in it", &new).unwrap();
        let options = SnapshotOptions { read_only: true };
        fs.snapshot(sub.root, top, b"snap", &options).unwrap();
        fs.commit().unwrap();
    }
    mounted.mount();
    let ino = |name: &str| fs::metadata(mounted.path(name)).unwrap().ino();
    let names = ["", "sub", "snap", "sub/in it", "snap/in it"];
    let numbers: BTreeSet<u64> = names.iter().map(|name| ino(name)).collect();
    assert_eq!(numbers.len(), names.len());
    let find = Command::new("find").arg(&mounted.directory).output().unwrap();
    assert!(find.status.success() && find.stderr.is_empty());
    assert_eq!(String::from_utf8_lossy(&find.stdout).lines().count(), names.len());
    assert!(fs::write(mounted.path("snap/new"), b"").is_err());
    // An empty subvolume is removed as a directory is.
    assert!(fs::remove_dir(mounted.path("sub")).is_err());
    fs::remove_dir(mounted.path("sub/in it")).unwrap();
    fs::remove_dir(mounted.path("sub")).unwrap();
    // The kernel's mount has another device for each subvolume, and the same numbers in each.
    mounted.judge_by(&Compare { inodes: false, subvolumes: false, ..Compare::same_filesystem() });
}

/// What is not on the medium yet takes space all the same, or tools take a file for one hole; and who changes an inode after it was
/// written has the last word on its times.
#[test]
fn attributes_of_what_is_not_written_back_yet() {
    let Some(mut mounted) = Mounted::new() else { return };
    let path = mounted.path("file");
    let file = File::create_new(&path).unwrap();
    file.write_all_at(&[1; 100_000], 0).unwrap();
    assert_eq!(file.metadata().unwrap().blocks(), 102_400 / 512);
    std::thread::sleep(std::time::Duration::from_millis(20));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let changed = (file.metadata().unwrap().ctime(), file.metadata().unwrap().ctime_nsec());
    file.sync_all().unwrap();
    assert_eq!(file.metadata().unwrap().blocks(), 102_400 / 512);
    drop(file);
    mounted.unmount();
    mounted.mount();
    let about = fs::metadata(mounted.path("file")).unwrap();
    assert_eq!((about.ctime(), about.ctime_nsec()), changed);
    assert!((about.mtime(), about.mtime_nsec()) < changed);
    assert_eq!(about.blocks(), 102_400 / 512);
    mounted.judge();
}

/// A dirty file was told to be asked for each time, so that a `stat` of what `tar` has just written was a request each.
#[test]
fn attributes_of_what_is_not_written_back_yet_are_asked_for_once() {
    const GETATTR: u32 = 3;
    let Some(mounted) = Mounted::new() else { return };
    let asked = || {
        let (server, _) = mounted.server.as_ref().unwrap();
        server.request_counts().get(&GETATTR).copied().unwrap_or(0)
    };
    let blocks = |name: &str| fs::metadata(mounted.path(name)).unwrap().blocks();
    let names: Vec<String> = (0..20).map(|at| format!("file {at}")).collect();
    for name in &names {
        fs::write(mounted.path(name), [b'd'; 8192]).unwrap();
    }
    for name in &names {
        assert_eq!(blocks(name), 16, "{name}");
    }
    let before = asked();
    for name in names.iter().cycle().take(100) {
        assert_eq!(blocks(name), 16, "{name}");
    }
    assert_eq!(asked(), before);

    // Data in memory over data on the medium counts once.
    File::open(mounted.path("file 0")).unwrap().sync_all().unwrap();
    let file = File::options().write(true).open(mounted.path("file 0")).unwrap();
    file.write_all_at(&[b'e'; 8192], 0).unwrap();
    assert_eq!(blocks("file 0"), 16);
    File::open(&mounted.directory).unwrap().sync_all().unwrap();
    assert_eq!(blocks("file 0"), 16);
}

/// What a second walk, and each file that is opened, would ask for if the kernel was told of less, or asked one by one.
#[test]
fn requests_that_the_kernel_can_be_spared_are_not_made() {
    const LOOKUP: u32 = 1;
    const WRITE: u32 = 16;
    const FLUSH: u32 = 25;
    const OPENDIR: u32 = 27;
    const READDIRPLUS: u32 = 44;
    const FILE_COUNT: usize = 100;
    let Some(mut mounted) = Mounted::new() else { return };
    fs::create_dir(mounted.path("dir")).unwrap();
    for number in 0..FILE_COUNT {
        fs::write(mounted.path(&format!("dir/{number}")), b"some").unwrap();
    }
    mounted.unmount();
    mounted.mount();
    let count = |operation| {
        let (server, _) = mounted.server.as_ref().unwrap();
        server.request_counts().get(&operation).copied().unwrap_or(0)
    };
    let walk = || {
        let entries = fs::read_dir(mounted.path("dir")).unwrap();
        let bytes = entries.map(|entry| {
            let path = entry.unwrap().path();
            assert_eq!(fs::metadata(&path).unwrap().len(), 4);
            fs::read(path).unwrap().len()
        });
        assert_eq!(bytes.sum::<usize>(), 4 * FILE_COUNT);
    };
    walk();
    assert!(count(READDIRPLUS) >= 1);
    // The kernel lists a directory with attributes at first, and then as it has seen that they are wanted.
    let looked_up = count(LOOKUP);
    assert!(looked_up < FILE_COUNT as u64 / 2, "{looked_up}");
    let asked = || [LOOKUP, OPENDIR, FLUSH].map(count);
    let before = asked();
    walk();
    assert_eq!(asked(), before);
    let mut file = File::create_new(mounted.path("long")).unwrap();
    // In memory by then: the kernel ends a request where it meets memory that is not there.
    let bytes = vec![7; 1 << 20];
    for _ in 0..8 {
        file.write_all(&bytes).unwrap();
    }
    drop(file);
    let written = count(WRITE);
    assert!((8..=16).contains(&written), "{written}");
    mounted.judge();
}

/// When a file was made says STATX, which has a time of its own beside that of the last change.
#[test]
fn time_of_making_same_as_the_inode_has_it() {
    let Some(mut mounted) = Mounted::new() else { return };
    let path = mounted.path("file");
    let before = SystemTime::now();
    fs::write(&path, b"one").unwrap();
    let made = fs::metadata(&path).unwrap().created().expect("STATX tells of it");
    assert!(before - CLOCK_TICK <= made && made <= SystemTime::now());
    std::thread::sleep(CLOCK_TICK);
    fs::write(&path, b"two").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let about = fs::metadata(&path).unwrap();
    assert_eq!(about.created().unwrap(), made);
    assert!(about.modified().unwrap() > made);
    mounted.unmount();
    let fs = open(&mounted.image);
    let id = fs.lookup(fs.default_subvolume().unwrap(), b"file").unwrap();
    let otime = fs.inode(id).unwrap().otime;
    let since_1970 = made.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!((otime.sec, otime.nsec), (since_1970.as_secs() as i64, since_1970.subsec_nanos()));
}

/// RELEASE was sent for each file that was made, as long as nobody had opened one.
#[test]
fn files_that_are_only_made_are_not_released() {
    const OPEN: u32 = 14;
    const RELEASE: u32 = 18;
    const CREATE: u32 = 35;
    const FILE_COUNT: u64 = 30;
    let Some(mut mounted) = Mounted::new() else { return };
    let mut names = 0..;
    let mut make_files = |mounted: &Mounted, releases: u64| {
        for _ in 0..FILE_COUNT {
            let name = format!("file {}", names.next().unwrap());
            File::create_new(mounted.path(&name)).unwrap().write_all(b"written").unwrap();
        }
        let (server, _) = mounted.server.as_ref().unwrap();
        let count = |operation| server.request_counts().get(&operation).copied().unwrap_or(0);
        // The kernel does not wait for the answers.
        let begun = Instant::now();
        while count(RELEASE) < releases && begun.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        [CREATE, RELEASE, OPEN].map(count)
    };
    assert_eq!(make_files(&mounted, 0), [FILE_COUNT, 0, 1]);
    mounted.judge();
    mounted.serve_options = ServeOptions { writeback: true, ..ServeOptions::default() };
    mounted.mount();
    assert_eq!(make_files(&mounted, 0), [FILE_COUNT, 0, 1]);
    mounted.unmount();
    mounted.serve_options = ServeOptions { naive: true, ..ServeOptions::default() };
    mounted.mount();
    assert_eq!(make_files(&mounted, FILE_COUNT), [FILE_COUNT, FILE_COUNT, 0]);
    mounted.unmount();
    mounted.serve_options = ServeOptions::default();
    // Nobody uses it once it is said to be there.
    for _ in 0..20 {
        mounted.mount();
        mounted.unmount();
    }
    let Some(_switch) = RingsOn::new() else { return };
    mounted.serve_options.uses_rings = true;
    mounted.mount();
    assert_eq!(make_files(&mounted, 0), [FILE_COUNT, 0, 1]);
    mounted.judge();
}

/// As Linux does with `relatime`: after a change, then not before a day has passed; and nothing else of the inode changes.
#[test]
fn access_is_noted_once_after_a_change() {
    let times = |about: &fs::Metadata| {
        let changed = (about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec());
        ((about.atime(), about.atime_nsec()), changed)
    };
    for notes_access in [true, false] {
        let serve_options = ServeOptions { notes_access, ..ServeOptions::default() };
        let Some(mut mounted) = Mounted::served_with(serve_options) else { return };
        let (file, directory) = (mounted.path("file"), mounted.path("directory"));
        fs::write(&file, [b'a'; 10_000]).unwrap();
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("entry"), b"").unwrap();
        let read = |mounted: &mut Mounted| {
            // What the kernel has in memory it does not ask for.
            mounted.unmount();
            mounted.mount();
            let before = [&file, &directory].map(|path| times(&fs::metadata(path).unwrap()));
            assert_eq!(fs::read(&file).unwrap().len(), 10_000);
            assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
            let after = [&file, &directory].map(|path| times(&fs::metadata(path).unwrap()));
            for (before, after) in before.iter().zip(&after) {
                assert_eq!(before.1, after.1, "times of change");
            }
            [0, 1].map(|at| before[at].0 != after[at].0)
        };
        assert_eq!(read(&mut mounted), [notes_access; 2]);
        assert_eq!(read(&mut mounted), [false; 2]);
        File::options().append(true).open(&file).unwrap().set_len(10_001).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
        File::options().append(true).open(&file).unwrap().set_len(10_000).unwrap();
        assert_eq!(read(&mut mounted), [notes_access; 2]);
        // Who compares reads as well.
        mounted.unmount();
        mounted.serve_options = ServeOptions::default();
        mounted.mount();
        mounted.judge();
    }
}

/// Threads that write, read, rename and remove, each in its own directory.
#[test]
fn threads_at_work_leave_what_each_expects() {
    let Some(mut mounted) = Mounted::new() else { return };
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let top = mounted.path(&thread.to_string());
            scope.spawn(move || {
                fs::create_dir(&top).unwrap();
                let mut random = Prng::new(thread);
                let mut expected = std::collections::BTreeMap::<String, Vec<u8>>::new();
                for _ in 0..600 {
                    let name = random.below(20).to_string();
                    let path = top.join(&name);
                    match random.below(5) {
                        0 | 1 => {
                            let len = usize::try_from(random.below(300_000)).unwrap();
                            let bytes = vec![u8::try_from(random.below(256)).unwrap(); len];
                            fs::write(&path, &bytes).unwrap();
                            expected.insert(name, bytes);
                        }
                        2 => {
                            let other = random.below(20).to_string();
                            match expected.remove(&name) {
                                Some(bytes) => {
                                    fs::rename(&path, top.join(&other)).unwrap();
                                    expected.insert(other, bytes);
                                }
                                None => assert!(fs::rename(&path, top.join(&other)).is_err()),
                            }
                        }
                        3 => {
                            let is_there = expected.remove(&name).is_some();
                            assert_eq!(fs::remove_file(&path).is_ok(), is_there);
                        }
                        _ => match expected.get(&name) {
                            Some(bytes) => assert!(fs::read(&path).unwrap() == *bytes),
                            None => assert!(fs::read(&path).is_err()),
                        },
                    }
                }
                let count = fs::read_dir(&top).unwrap().count();
                assert_eq!(count, expected.len());
            });
        }
    });
    mounted.judge();
}

/// A program that would make the file if there were none was told that there is one. Who has a command's names in the middle of it knows nothing of
/// them yet.
#[test]
fn what_a_command_has_just_made_is_opened_by_who_would_make_it() {
    let Some(mut mounted) = Mounted::new() else { return };
    let served = mounted.fs.clone().unwrap();
    let top = served.default_subvolume().unwrap();
    for name in ["file", "dir", "link", "new"] {
        // The kernel remembers that.
        assert!(!mounted.path(name).exists());
    }
    let new = |mode: u32| NewInode::new(mode, served.runtime().clock.now());
    let made = |name: &[u8], mode| {
        let mut handle = served.begin(Reservation::create(0)).unwrap();
        handle.create(top, name, &new(mode)).unwrap()
    };
    let file = served.open_data(made(b"file", 0o100_644)).unwrap();
    file.write(FileOffset::new(0), b"there").unwrap();
    drop(file);
    made(b"dir", 0o040_755);
    made(b"new", 0o100_644);
    let mut handle = served.begin(Reservation::create(0)).unwrap();
    handle.symlink(top, b"link", b"target", &new(0o120_777)).unwrap();
    drop(handle);
    let open = |name: &str| File::options().append(true).create(true).open(mounted.path(name));
    open("file").unwrap().write_all(b" and more").unwrap();
    assert_eq!(fs::read(mounted.path("file")).unwrap(), b"there and more");
    let refused = open("dir").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::IsADirectory);
    open("link").unwrap().write_all(b"behind the link").unwrap();
    assert_eq!(fs::read(mounted.path("target")).unwrap(), b"behind the link");
    let refused = File::create_new(mounted.path("new")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::AlreadyExists);
    // And once it knows.
    open("new").unwrap();
    drop(served);
    mounted.judge();
}
