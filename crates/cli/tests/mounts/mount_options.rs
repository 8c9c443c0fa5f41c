//! What options of a mount do, each seen by somebody else: the kernel, another user, another program.

use std::fs::{self, File};
use std::io::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::place::{NOBODY, PATIENCE, Place, wait_until};
use ubtrfs_testkit::oracle::FUSE_RINGS_SWITCH;
use ubtrfs_testkit::{
    KernelMount, MkfsBtrfs, Oracle, Prng, assert_checks_clean_whatever_it_holds, oracle,
};

/// The flags of a file's extents, as the kernel tells them.
fn extents(kernel: &KernelMount, name: &str) -> String {
    let output = Command::new("filefrag").arg("-v").arg(kernel.path().join(name)).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn data_is_inline_or_compressed_as_is_asked_for() {
    let zeros = vec![0; 1 << 20];
    // What does not shrink comes first, by which it is judged whether the rest may.
    let mut mixed = Prng::new(3).bytes(1 << 20);
    mixed.extend(&zeros);
    for (options, is_inline, is_encoded, is_mixed_encoded) in [
        ("max_inline=0", false, false, false),
        ("max_inline=2048", true, false, false),
        ("compress=zstd", true, true, false),
        ("compress-force=zstd:3", true, true, true),
        ("busy_poll=0,cache=8M", true, false, false),
    ] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", options]);
        fs::write(place.directory.join("small"), [b's'; 500]).unwrap();
        fs::write(place.directory.join("zeros"), &zeros).unwrap();
        fs::write(place.directory.join("mixed"), &mixed).unwrap();
        place.umount();
        let kernel = KernelMount::read_only(&place.image, "");
        assert_eq!(extents(&kernel, "small").contains("inline"), is_inline, "{options}");
        assert_eq!(extents(&kernel, "zeros").contains("encoded"), is_encoded, "{options}");
        if is_mixed_encoded || !is_encoded {
            let shown = extents(&kernel, "mixed");
            assert_eq!(shown.contains("encoded"), is_mixed_encoded, "{options}: {shown}");
        }
        assert!(fs::read(kernel.path().join("mixed")).unwrap() == mixed);
        kernel.unmount();
        place.assert_clean();
    }
}

#[test]
fn subvolume_is_mounted_by_its_number() {
    let Some(place) = Place::new(true) else { return };
    place.done(&["subvolume", "create"], &[&place.image, Path::new("/sub")]);
    place.done(&["mkdir"], &[&place.image, Path::new("/sub/inside")]);
    let kernel = KernelMount::read_only(&place.image, "");
    let shown = Command::new("btrfs")
        .args(["inspect-internal", "rootid"])
        .arg(kernel.path().join("sub"))
        .output()
        .unwrap();
    kernel.unmount();
    let number = String::from_utf8_lossy(&shown.stdout).trim().to_owned();
    place.mount(&["-o", &format!("subvolid={number}")]);
    let names: Vec<_> =
        fs::read_dir(&place.directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["inside"]);
    place.umount();
}

/// As long as it lies in the image it takes space there.
#[test]
fn space_that_is_freed_goes_back_to_the_image_where_it_is_asked_for() {
    for (options, goes_back) in [("commit=1,discard", true), ("commit=1", false)] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", options]);
        let path = place.directory.join("file");
        fs::write(&path, Prng::new(1).bytes(30 << 20)).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let taken = || fs::metadata(&place.image).unwrap().blocks() * 512;
        let before = taken();
        assert!(before > 30 << 20);
        fs::remove_file(&path).unwrap();
        place.umount();
        assert_eq!(taken() < 20 << 20, goes_back, "{options}: {before}, then {}", taken());
        place.assert_clean();
    }
}

/// That of the last commit, as `btrfs` reads it beside the mount.
fn generation(image: &Path) -> u64 {
    let mut command = Command::new("btrfs");
    let output = command.args(["inspect-internal", "dump-super"]).arg(image).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = said.lines().find_map(|line| line.strip_prefix("generation"));
    line.unwrap_or_else(|| panic!("{output:?}")).trim().parse().unwrap()
}

/// What nobody synced or closed is there as soon as commits that came by time have it, and not before.
#[test]
fn commits_come_as_often_as_is_asked_for() {
    /// Three commits take longer where nothing is asked for.
    const OF_THE_DEFAULT: Duration = Duration::from_secs(60);
    let mut lasted = Duration::ZERO;
    for (options, do_come) in [("commit=1", true), ("commit=3600", false)] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", options]);
        let mut file = File::create(place.directory.join("file")).unwrap();
        file.write_all(&[b'x'; 300_000]).unwrap();
        let (before, begun) = (generation(&place.image), Instant::now());
        // The next commit may have begun before, the one after it may find the bytes too young to be written back.
        let have_come = || {
            // Where nothing has changed there is no commit.
            fs::write(place.directory.join("other"), b"changed").unwrap();
            generation(&place.image) >= before + 3
        };
        if do_come {
            wait_until("commits", have_come);
            lasted = begun.elapsed();
            assert!(lasted < OF_THE_DEFAULT, "{lasted:?}");
        } else {
            while begun.elapsed() < lasted {
                assert!(!have_come());
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(generation(&place.image), before);
        }
        place.cut_off();
        let output = place.run(&["cat"], &[&place.image, Path::new("/file")]);
        assert_eq!(output.status.success(), do_come, "{options}");
        assert!(output.stdout == vec![b'x'; if do_come { 300_000 } else { 0 }], "{options}");
        place.assert_clean();
    }
}

/// Mounted where that variable is set no time went by: what was written was never old enough to be written back, and all had one time.
#[test]
fn time_goes_by_in_a_mount_whatever_the_time_of_builds_is() {
    for epoch in ["1700000000", "yesterday"] {
        let Some(place) = Place::new(true) else { return };
        let mut mount = place.command(env!("CARGO_BIN_EXE_ubtrfs"));
        mount.args(["mount", "-o", "commit=1"]).args([&place.image, &place.directory]);
        let output = mount.env("SOURCE_DATE_EPOCH", epoch).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let path = place.directory.join("file");
        let mut file = File::create(&path).unwrap();
        file.write_all(&[b'x'; 300_000]).unwrap();
        let now = std::time::SystemTime::now();
        let written = file.metadata().unwrap().modified().unwrap();
        assert!(now.duration_since(written).unwrap_or_default() < PATIENCE, "{written:?}");
        let before = generation(&place.image);
        wait_until("commits", || {
            fs::write(place.directory.join("other"), b"changed").unwrap();
            generation(&place.image) >= before + 4
        });
        place.cut_off();
        drop(file);
        let bytes = place.done(&["cat"], &[&place.image, Path::new("/file")]);
        assert!(bytes.len() == 300_000 && bytes.bytes().all(|byte| byte == b'x'));
        place.assert_clean();
    }
}

/// Of what was read, on its own and in a directory: noted if it had not been since the last change, or for a day.
#[test]
fn time_of_access_is_noted_where_that_is_asked_for() {
    const OLD: i64 = 1_580_608_922;
    for is_root in [true, false] {
        for (options, notes) in
            [("relatime", true), ("noatime", false), ("rw", false), ("noatime,relatime", true)]
        {
            let Some(place) = Place::new(is_root) else { return };
            let shell = |script: &str| {
                let mut command = place.command("sh");
                let output =
                    command.args(["-ec", script]).current_dir("/").env("D", &place.directory);
                let output = output.output().unwrap();
                assert!(output.status.success(), "{options}: {output:?}");
                String::from_utf8_lossy(&output.stdout).into_owned()
            };
            place.mount(&[]);
            shell(
                "cd \"$D\"; mkdir dir; for name in old recent dir/in; do echo $name >$name; done
                touch -a -d @1580608922 old dir; touch -a -d '1 hour' recent",
            );
            place.umount();
            // The kernel keeps what it has read, and asks for it once.
            place.mount(&["-o", options]);
            let times = "cd \"$D\"; stat -c %X old dir recent";
            let before = shell(times);
            shell("cd \"$D\"; cat old recent; ls dir");
            let after = shell(times);
            place.umount();
            let kernel = KernelMount::read_only(&place.image, "noatime");
            let stored = ["old", "dir", "recent"]
                .map(|name| fs::metadata(kernel.path().join(name)).unwrap().atime());
            kernel.unmount();
            let seconds = |shown: &str| -> Vec<i64> {
                shown.lines().map(|line| line.parse().unwrap()).collect()
            };
            let (before, after) = (seconds(&before), seconds(&after));
            assert_eq!(before[..2], [OLD, OLD], "{options}");
            assert_eq!(after, stored, "{options}");
            assert_eq!([after[0] > OLD, after[1] > OLD], [notes, notes], "{options}");
            assert_eq!(after[2], before[2], "{options}");
        }
    }
}

/// The kernel's switch for FUSE over io_uring; as it was when this is dropped.
struct RingsSwitch {
    before: String,
}

impl RingsSwitch {
    fn turned(is_on: bool) -> Self {
        let before = fs::read_to_string(FUSE_RINGS_SWITCH).unwrap();
        fs::write(FUSE_RINGS_SWITCH, if is_on { "Y" } else { "N" }).unwrap();
        Self { before }
    }
}

impl Drop for RingsSwitch {
    fn drop(&mut self) {
        let _ = fs::write(FUSE_RINGS_SWITCH, self.before.trim());
    }
}

/// With more of them that are possible, the server takes no rings.
const RING_PROCESSORS_MAX: usize = 64;

fn possible_processors() -> usize {
    let list = fs::read_to_string("/sys/devices/system/cpu/possible").unwrap();
    let last = list.trim().rsplit([',', '-']).next().unwrap();
    last.parse::<usize>().unwrap() + 1
}

/// Each queue has a thread of its own.
fn ring_threads(place: &Place) -> usize {
    let tasks = fs::read_dir(format!("/proc/{}/task", place.server())).unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "ubtrfs-ring").count()
}

#[test]
fn requests_come_by_io_uring_where_that_is_asked_for_and_on() {
    for is_on in [false, true] {
        for options in ["rw", "io_uring"] {
            let Some(place) = Place::new(true) else { return };
            if !oracle::require(Oracle::FuseRings) {
                return;
            }
            let switch = RingsSwitch::turned(is_on);
            place.mount(&["-o", options]);
            drop(switch);
            // The first request is answered when all queues are registered.
            let path = place.directory.join("file");
            fs::write(&path, b"by whichever way").unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"by whichever way");
            let has_rings =
                is_on && options == "io_uring" && possible_processors() <= RING_PROCESSORS_MAX;
            assert_eq!(ring_threads(&place) > 0, has_rings, "{options}, switch: {is_on}");
            place.umount();
            assert_eq!(
                place.done(&["cat"], &[&place.image, Path::new("/file")]),
                "by whichever way"
            );
        }
    }
}

/// One of two devices is not there: it can be read and written, and the other one is as the kernel takes it.
#[test]
fn filesystem_that_lacks_a_device_is_mounted_where_that_is_allowed() {
    let Some(mut place) = Place::new(true) else { return };
    let images = ["first", "second"].map(|name| place.image.with_file_name(name));
    MkfsBtrfs::new().size_bytes(256 << 20).options("-d raid1 -m raid1").make_on(&images);
    place.image = images[0].clone();
    let refused = place.run(&["mount"], &[&place.image, &place.directory]);
    assert!(!refused.status.success() && !place.is_mounted());
    place.mount(&["-o", "ro,degraded"]);
    assert_eq!(fs::read_dir(&place.directory).unwrap().count(), 0);
    place.umount();
    place.mount(&["-o", "degraded"]);
    fs::write(place.directory.join("file"), b"by one").unwrap();
    place.umount();
    let kernel = KernelMount::read_only(&place.image, "degraded");
    assert_eq!(fs::read(kernel.path().join("file")).unwrap(), b"by one");
    kernel.unmount();
    assert_checks_clean_whatever_it_holds(std::slice::from_ref(&place.image));
    place.done(&["check", "--data", "--degraded"], &[&place.image]);
}

/// In a mount namespace of its own, where `fusermount3` is told that users may let others in.
#[test]
fn others_are_let_in_where_it_is_asked_for_and_allowed() {
    let Some(place) = Place::new(false) else { return };
    let configuration = place.image.with_file_name("fuse.conf");
    fs::write(&configuration, "user_allow_other\n").unwrap();
    fs::set_permissions(&configuration, fs::Permissions::from_mode(0o644)).unwrap();
    let script = "set -e
        touch /etc/fuse.conf
        mount --bind \"$1\" /etc/fuse.conf
        setpriv --reuid $2 --regid $2 --clear-groups \"$3\" mount -o allow_other \"$4\" \"$5\"
        setpriv --reuid $2 --regid $2 --clear-groups sh -c 'echo let in >\"$0\"/file; chmod 644 \"$0\"/file' \"$5\"
        setpriv --reuid 1 --regid 1 --clear-groups cat \"$5/file\"
        setpriv --reuid $2 --regid $2 --clear-groups \"$3\" umount \"$5\"";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script, "sh"])
        .arg(&configuration)
        .arg(NOBODY.to_string())
        .arg(env!("CARGO_BIN_EXE_ubtrfs"))
        .args([&place.image, &place.directory])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(said, "let in\n", "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn commands_of_others_are_refused() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let program = env!("CARGO_BIN_EXE_ubtrfs");
    let output = Command::new("setpriv")
        .args(["--reuid", &NOBODY.to_string(), "--regid", &NOBODY.to_string(), "--clear-groups"])
        .args([program, "mkdir"])
        .args([&place.directory, Path::new("/made")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("Who mounted it"), "{said}");
    assert!(!place.directory.join("made").exists());
    place.umount();
}

/// The kernel keeps locks for programs on one machine.
#[test]
fn locks_keep_other_programs_out() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let path = place.directory.join("file");
    let file = File::create(&path).unwrap();
    file.lock().unwrap();
    let other = || Command::new("flock").arg("-n").arg(&path).arg("true").status().unwrap();
    assert!(!other().success());
    file.unlock().unwrap();
    assert!(other().success());
    drop(file);
    place.umount();
}

/// A subvolume and its snapshot have the same numbers inside; programs that tell files by them must not take one's for the other's.
#[test]
fn programs_tell_a_subvolume_from_its_snapshot() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let top = &place.directory;
    place.done(&["subvolume", "create"], &[top, Path::new("/sub")]);
    fs::write(top.join("sub/name"), vec![b'1'; 100_000]).unwrap();
    fs::hard_link(top.join("sub/name"), top.join("sub/link")).unwrap();
    place.done(&["subvolume", "snapshot"], &[top, Path::new("/sub"), Path::new("/snap")]);
    fs::write(top.join("snap/name"), vec![b'2'; 100_000]).unwrap();
    let run = |program: &str, words: &[&str]| {
        let output = Command::new(program).args(words).current_dir(top).output().unwrap();
        assert!(output.status.success(), "{program}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let copied: Vec<PathBuf> =
        ["tar", "cp"].iter().map(|name| place.image.with_file_name(name)).collect();
    for place in &copied {
        fs::create_dir(place).unwrap();
    }
    let [tar, cp] = [&copied[0], &copied[1]].map(|path| path.display().to_string());
    run("sh", &["-c", &format!("tar -c sub snap | tar -x -C '{tar}'")]);
    run("cp", &["-a", "sub", "snap", &cp]);
    for copy in copied {
        for (inside, byte) in [("sub", b'1'), ("snap", b'2')] {
            for name in ["name", "link"] {
                let path = copy.join(inside).join(name);
                assert!(fs::read(&path).unwrap() == vec![byte; 100_000], "{}", path.display());
                assert_eq!(fs::metadata(&path).unwrap().nlink(), 2, "{}", path.display());
            }
        }
    }
    // Each pair of links once.
    let counted: u64 = run("du", &["-sk", "--apparent-size", "sub", "snap"])
        .lines()
        .map(|line| line.split_whitespace().next().unwrap().parse::<u64>().unwrap())
        .sum();
    assert!((190..230).contains(&counted), "{counted}");
    assert_eq!(run("find", &["sub", "snap", "-samefile", "sub/name"]).lines().count(), 2);
    place.umount();
}

/// A subvolume that holds hard links and a repository, and a snapshot beside it in which some of it has changed since.
fn subvolume_and_snapshot(place: &Place, git: impl Fn(&str, &[&str]) -> String) {
    let top = &place.directory;
    place.done(&["subvolume", "create"], &[top, Path::new("/sub")]);
    fs::write(top.join("sub/name"), vec![b'1'; 100_000]).unwrap();
    fs::hard_link(top.join("sub/name"), top.join("sub/link")).unwrap();
    fs::write(top.join("sub/same"), b"in both").unwrap();
    fs::hard_link(top.join("sub/same"), top.join("sub/same too")).unwrap();
    fs::create_dir(top.join("sub/repository")).unwrap();
    git("sub", &["init", "-q"]);
    for number in 0..20 {
        fs::write(top.join(format!("sub/repository/file {number}")), number.to_string()).unwrap();
    }
    git("sub", &["add", "."]);
    git("sub", &["commit", "-q", "-m", "first"]);
    place.done(&["subvolume", "snapshot"], &[top, Path::new("/sub"), Path::new("/snap")]);
    fs::write(top.join("snap/name"), vec![b'2'; 100_000]).unwrap();
}

/// rsync finds hard links by what git knows unchanged files by: device, inode number, times.
#[test]
fn rsync_and_git_tell_a_subvolume_from_its_snapshot() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let top = &place.directory;
    let run = |program: &str, words: &[&str]| {
        let mut command = Command::new(program);
        command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1");
        let output = command.args(words).current_dir(top).output().unwrap();
        assert!(output.status.success(), "{program} {words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let git = |inside: &str, words: &[&str]| {
        let repository = format!("{inside}/repository");
        let who = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"];
        run("git", &[&["-C", &repository], &who[..], words].concat())
    };
    subvolume_and_snapshot(&place, git);
    let copy = place.image.with_file_name("rsync");
    let target = format!("{}/", copy.display());
    run("rsync", &["-aH", "sub", "snap", &target]);
    run("rsync", &["-aH", &target, "back/"]);
    for inside in ["sub", "snap"] {
        for there in [copy.join(inside), top.join("back").join(inside)] {
            run("diff", &["-r", inside, there.to_str().unwrap()]);
            let about = |name: &str| fs::metadata(there.join(name)).unwrap();
            for [name, link] in [["name", "link"], ["same", "same too"]] {
                assert_eq!(about(name).ino(), about(link).ino(), "{}", there.display());
                assert_eq!(about(name).nlink(), 2, "{}", there.display());
            }
        }
    }
    // What it would copy again, it takes for changed.
    assert_eq!(run("rsync", &["-aHni", "--delete", "sub", "snap", &target]), "");
    for _ in 0..2 {
        for inside in ["sub", "snap"] {
            // It looks at attributes alone, and at no file.
            assert_eq!(git(inside, &["diff-files", "--name-only"]), "", "{inside}");
            assert_eq!(git(inside, &["status", "--porcelain"]), "", "{inside}");
        }
        place.umount();
        place.mount(&[]);
    }
    fs::write(top.join("snap/repository/file 3"), b"4").unwrap();
    assert_eq!(git("snap", &["status", "--porcelain"]), " M \"file 3\"\n");
    assert_eq!(git("sub", &["status", "--porcelain"]), "");
    git("snap", &["commit", "-q", "-a", "-m", "second"]);
    for (inside, count) in [("sub", "1\n"), ("snap", "2\n")] {
        assert_eq!(git(inside, &["rev-list", "--count", "HEAD"]), count, "{inside}");
        git(inside, &["fsck", "--full", "--strict"]);
    }
    place.umount();
    place.assert_clean();
}

/// What `statfs` says of a directory's filesystem.
fn figures(directory: &Path) -> Vec<u64> {
    let mut command = Command::new("stat");
    // Bytes of a block twice, blocks: all, free, available; bytes of a name; inodes: all, free.
    let output = command.args(["-f", "-c", "%s %S %b %f %a %l %c %d"]).arg(directory);
    let output = output.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.split_whitespace().map(|figure| figure.parse().unwrap()).collect()
}

#[test]
fn figures_of_a_mount_are_those_of_the_kernel() {
    let Some(place) = Place::new(true) else { return };
    let top = &place.directory;
    for round in 0..3 {
        place.mount(&[]);
        match round {
            0 => {}
            1 => {
                fs::write(top.join("large"), Prng::new(1).bytes(40 << 20)).unwrap();
                for number in 0..1000 {
                    fs::write(top.join(format!("small {number}")), [b's'; 1000]).unwrap();
                }
            }
            _ => {
                let names = ["/", "/snap"].map(Path::new);
                place.done(&["subvolume", "snapshot"], &[top, names[0], names[1]]);
                fs::remove_file(top.join("large")).unwrap();
            }
        }
        place.done(&["filesystem", "sync"], &[top]);
        let ours = figures(top);
        place.umount();
        let kernel = KernelMount::read_only(&place.image, "");
        assert_eq!(ours, figures(kernel.path()), "round {round}");
    }
}

/// Starts it in the foreground.
fn serve_in_foreground(place: &Place, socket: &str) -> Child {
    let mut command = place.command(env!("CARGO_BIN_EXE_ubtrfs"));
    command.args(["mount", "-f"]).args([&place.image, &place.directory]);
    command.env("NOTIFY_SOCKET", socket).spawn().unwrap()
}

/// In the foreground it serves until it is unmounted, and tells a service manager that asks for it when it can be used.
#[test]
fn foreground_process_tells_when_it_serves_and_ends_with_its_mount() {
    for (is_root, is_abstract) in [(true, false), (true, true), (false, false)] {
        let Some(place) = Place::new(is_root) else { return };
        let path = place.image.with_file_name("socket").display().to_string();
        let (name, address) = if is_abstract {
            (format!("@{path}"), SocketAddr::from_abstract_name(&path).unwrap())
        } else {
            (path.clone(), SocketAddr::from_pathname(&path).unwrap())
        };
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        if !is_abstract {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        }
        let mut child = serve_in_foreground(&place, &name);
        let mut message = [0; 100];
        let len = socket.recv(&mut message).expect("it says nothing");
        assert_eq!(String::from_utf8_lossy(&message[..len]), "READY=1");
        // At once.
        assert!(place.is_mounted());
        let file = place.directory.join("file");
        let output =
            place.command("sh").args(["-c", r#"printf written >"$0""#]).arg(&file).output();
        assert!(output.unwrap().status.success());
        place.umount();
        assert!(child.wait().unwrap().success());
        assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]), "written");
    }
}

/// Who cannot be told is not waited for.
#[test]
fn foreground_process_serves_where_nobody_listens() {
    let Some(place) = Place::new(true) else { return };
    let mut child = serve_in_foreground(&place, "/nonexistent/socket");
    wait_until("mounted", || place.is_mounted());
    File::create(place.directory.join("file")).unwrap().write_all(b"written").unwrap();
    place.umount();
    assert!(child.wait().unwrap().success());
    assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]), "written");
}

/// The kernel asks for 128 KiB at once and no more, unless root says otherwise; it asked of us no more than of any.
#[test]
fn large_files_are_read_by_large_requests_where_root_mounts() {
    let Some(place) = Place::new(true) else { return };
    let bytes = Prng::new(5).bytes(8 << 20);
    place.mount(&[]);
    fs::write(place.directory.join("large"), &bytes).unwrap();
    place.umount();
    let counts = place.image.with_extension("counts");
    let mut mount = place.command(env!("CARGO_BIN_EXE_ubtrfs"));
    mount.env("UBTRFS_REQUEST_COUNTS", &counts).arg("mount");
    mount.args([&place.image, &place.directory]);
    assert!(mount.status().unwrap().success());
    assert!(fs::read(place.directory.join("large")).unwrap() == bytes);
    place.umount();
    let counts = fs::read_to_string(counts).unwrap();
    // By the number of READ.
    let reads = counts.lines().find_map(|line| line.strip_prefix("15 ")).unwrap();
    let reads: u64 = reads.parse().unwrap();
    // By 128 KiB they are 64.
    assert!((1..=32).contains(&reads), "{counts}");
}
