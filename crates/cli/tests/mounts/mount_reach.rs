//! Who reaches a mount, and what may be done by it: the control socket, requests by ioctl, locks, and rights that end when a file is
//! written.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::place::{NOBODY, PATIENCE, Place, server_of};
use ubtrfs_testkit::{KernelMount, LoopDevice, Prng};

/// `BTRFS_IOC_SUBVOL_CREATE` of ARGV[1] in ARGV[0].
const CREATE: &str = "open(D, '<', $ARGV[0]) or die $!; my $b = pack('q a4088', 0, $ARGV[1]); ioctl(D, 0x5000940e, $b) or die $!";
/// `BTRFS_IOC_SNAP_CREATE` of the subvolume ARGV[0] in itself, by the name ARGV[1].
const SNAPSHOT: &str = "open(D, '<', $ARGV[0]) or die $!; my $b = pack('q a4088', fileno(D), $ARGV[1]); \
    ioctl(D, 0x50009401, $b) or die $!";

fn perl(script: &str, directory: &Path, name: &str) -> Output {
    Command::new("perl").args(["-e", script]).arg(directory).arg(name).output().unwrap()
}

fn said(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The socket was looked for where the session has it, if there was one then, and made where it was, if there was one before.
#[test]
fn commands_reach_a_mount_when_a_session_begins_and_ends_meanwhile() {
    let Some(place) = Place::new(false) else { return };
    let script = "
        set -e
        mount -t tmpfs none /run
        as=\"setpriv --reuid $3 --regid $3 --clear-groups\"
        $as \"$4\" mount \"$1\" \"$2\"
        mkdir -p /run/user/$3
        chown $3:$3 /run/user/$3
        chmod 700 /run/user/$3
        $as \"$4\" mkdir \"$2\" /begun
        $as \"$4\" umount \"$2\"
        $as \"$4\" mount \"$1\" \"$2\"
        test -S /run/user/$3/ubtrfs/*.control
        $as \"$4\" mkdir \"$2\" /in
        \"$4\" mkdir \"$2\" /by-root
        rm -r /run/user/$3
        $as \"$4\" mkdir \"$2\" /ended
        $as \"$4\" umount \"$2\"
        # Where somebody else has taken the name, that of the session is left.
        mkdir -p /run/user/$3
        chown $3:$3 /run/user/$3
        mount -t tmpfs none /tmp/ubtrfs-$3
        chown 1:1 /tmp/ubtrfs-$3
        $as \"$4\" mount \"$1\" \"$2\"
        $as \"$4\" mkdir \"$2\" /beside
        $as \"$4\" umount \"$2\"
        ls -A /run/user/$3/ubtrfs /tmp/ubtrfs-$3
        \"$4\" ls \"$1\" /";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script, "sh"])
        .args([&place.image, &place.directory])
        .args([&NOBODY.to_string(), env!("CARGO_BIN_EXE_ubtrfs")])
        .output()
        .unwrap();
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    let names = "begun\nbeside\nby-root\nended\nin\n";
    assert!(said.ends_with(names), "{said}");
    assert!(!said.contains("control"), "{said}");
}

/// What was stored to a map stayed with the kernel, and the snapshot had the file as it was before.
#[test]
fn snapshot_has_what_was_stored_to_a_map_whoever_makes_it() {
    for options in ["rw", "writeback"] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", options]);
        let top = &place.directory;
        let mut file = fs::File::create(top.join("file")).unwrap();
        file.write_all(&[b'a'; 8192]).unwrap();
        file.sync_all().unwrap();
        let mut child = Command::new("stdbuf")
            .args(["-oL", "xfs_io"])
            .arg(top.join("file"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut input = child.stdin.take().unwrap();
        writeln!(input, "mmap -rw 0 8192").unwrap();
        for (letter, name) in [(b'b', "by ioctl"), (b'c', "by command"), (b'd', "by ioctl again")] {
            writeln!(input, "mwrite -S {letter} 0 8192\nmread -v 8176 16").unwrap();
            let mut line = String::new();
            output.read_line(&mut line).unwrap();
            assert!(line.contains(&char::from(letter).to_string().repeat(16)), "{line}");
            if name == "by command" {
                let path = Path::new("/").join(name);
                place.done(&["subvolume", "snapshot"], &[top, Path::new("/"), &path]);
            } else {
                let output = perl(SNAPSHOT, top, name);
                assert!(output.status.success(), "{output:?}");
            }
            let bytes = fs::read(top.join(name).join("file")).unwrap();
            assert!(bytes == [letter; 8192], "{options}, {name}: {}", char::from(bytes[0]));
        }
        drop((file, input));
        child.wait().unwrap();
        place.umount();
        place.assert_clean();
    }
}

/// `chattr +A` says so of a file.
#[test]
fn time_of_access_of_a_file_stays_where_its_flag_says_so() {
    const OLD: &str = "1580608922\n";
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "relatime"]);
    let shell = |script: &str| {
        let output =
            Command::new("sh").args(["-ec", script]).current_dir(&place.directory).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    shell(
        "mkdir dir; for name in kept noted dir/in; do echo $name >$name; done; chattr +A kept dir
        touch -a -d @1580608922 kept noted dir",
    );
    place.umount();
    place.mount(&["-o", "relatime"]);
    shell("cat kept noted; ls dir");
    let times = ["kept", "dir", "noted"].map(|name| shell(&format!("stat -c %X {name}")));
    assert!(times[..2] == [OLD, OLD] && times[2] != OLD, "{times:?}");
    place.umount();
    place.assert_clean();
}

/// A mount that has become read-only was changed all the same by commands and by ioctls.
#[test]
fn mount_that_has_become_read_only_is_changed_by_nobody() {
    let Some(place) = Place::new(true) else { return };
    let top = &place.directory;
    place.mount(&[]);
    fs::write(top.join("file"), b"written").unwrap();
    let remount = |how: &str| {
        let options = format!("remount,{how}");
        let output = Command::new("mount").args(["-i", "-o", &options]).arg(top).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let name = |path: &'static str| Path::new(path);
    for how in ["ro", "bind,ro"] {
        remount(how);
        for (words, paths) in [
            (&["mkdir"][..], &[name("/made")][..]),
            (&["reflink"], &[name("/file"), name("/made")]),
            (&["subvolume", "create"], &[name("/made")]),
            (&["filesystem", "label"], &[name("made")]),
        ] {
            let output = place.run(words, &[&[top.as_path()], paths].concat());
            let said = said(&output);
            assert!(!output.status.success(), "{how}, {words:?}: {said}");
            assert!(said.to_lowercase().contains("read-only"), "{how}, {words:?}: {said}");
        }
        for script in [CREATE, SNAPSHOT] {
            let said = said(&perl(script, top, "made"));
            assert!(said.contains("Read-only file system"), "{how}: {said}");
        }
        // What changes nothing is done.
        place.done(&["filesystem", "sync"], &[top]);
        assert!(place.done(&["ls"], &[top, name("/")]) == "file\n", "{how}");
        remount("rw");
        remount("bind,rw");
    }
    place.done(&["mkdir"], &[top, name("/made")]);
    assert!(perl(CREATE, top, "by ioctl").status.success());
    // Who serves can write yet, and is waited for.
    fs::write(top.join("large"), Prng::new(1).bytes(30 << 20)).unwrap();
    remount("ro");
    place.umount();
    place.assert_clean();
    assert_eq!(place.done(&["ls"], &[&place.image, name("/")]), "by ioctl\nfile\nlarge\nmade\n");
}

/// As the kernel's btrfs makes it.
#[test]
fn subvolume_made_by_ioctl_has_the_mode_that_its_maker_leaves() {
    let Some(place) = Place::new(true) else { return };
    let modes = |top: &Path| {
        ["077", "022", "000", "027"].map(|mask| {
            let script = format!("umask {mask}; exec perl -e \"$0\" \"$1\" {mask}");
            let output =
                Command::new("sh").args(["-c", &script, CREATE]).arg(top).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            let shown = Command::new("stat").args(["-c", "%a"]).arg(top.join(mask)).output();
            said(&shown.unwrap())
        })
    };
    place.mount(&[]);
    let ours = modes(&place.directory);
    place.umount();
    place.done(&["mkfs", "-f"], &[&place.image]);
    let kernel = KernelMount::read_write(&place.image, "");
    assert_eq!(ours, modes(kernel.path()));
    assert_eq!(ours[0], "700\n");
}

/// The kernel keeps those of ranges for programs on one machine, as it does those of files.
#[test]
fn locks_of_ranges_keep_other_processes_out() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let path = place.directory.join("file");
    fs::write(&path, [b'x'; 100]).unwrap();
    // The first process locks bytes 10 to 19, and the second one, its child, tries bytes beside, at them and across.
    let script = "use Fcntl; use Errno; $| = 1; sub lock_of { my ($f, $type, $start, $len) = @_; \
            my $l = pack('s s x4 q q l x4', $type, 0, $start, $len, 0); return fcntl($f, F_SETLK, $l) ? 'ok' : $!{EAGAIN} || $!{EACCES} ? 'again' : $!; } \
        open(F, '+<', $ARGV[0]) or die $!; print lock_of(*F, F_WRLCK, 10, 10), ' '; \
        if (!fork) { open(G, '+<', $ARGV[0]) or die $!; \
            print join(' ', map { lock_of(*G, F_WRLCK, @$_) } [0, 10], [12, 1], [19, 5], [20, 5]), ' '; \
            print lock_of(*G, F_RDLCK, 10, 1), ' '; exit } \
        wait; lock_of(*F, F_UNLCK, 10, 10); \
        if (!fork) { open(G, '+<', $ARGV[0]) or die $!; print lock_of(*G, F_WRLCK, 12, 1); exit } wait;";
    let output = perl(script, &path, "");
    assert_eq!(said(&output), "ok ok again again ok again ok");
    place.umount();
}

/// Who writes to a file that runs with its owner's rights takes those from it, unless he is root: as with the kernel's btrfs. (Not so the
/// group's rights where that may not run it, from who is not in the group: the kernel does not say of FUSE's requests who is.)
#[test]
fn rights_to_run_as_the_owner_end_as_with_the_kernel() {
    let Some(place) = Place::new(true) else { return };
    const COPY: &str = "use Fcntl; open(S, '<', 'source') or die $!; open(F, '+<', $ARGV[0]) or die $!; \
        syscall(326, fileno(S), 0, fileno(F), 0, 4096, 0) == 4096 or die $!";
    let script = "cd \"$0\"; umask 0; head -c 8192 /dev/urandom >source; mkdir all; chmod 777 all
        for mode in 4777 6777 2777 4747; do
            for way in write truncate grow open fallocate punch copy; do
                for who in 0 65534 1; do
                    file=all/$mode-$way-$who
                    head -c 8192 /dev/zero >$file; chown 65534:65534 $file; chmod $mode $file
                    case $way in
                        write) set -- dd if=source of=$file bs=4096 count=1 conv=notrunc status=none ;;
                        truncate) set -- perl -e 'open(F, \"+<\", $ARGV[0]) or die; truncate(F, 4096) or die' $file ;;
                        grow) set -- truncate -s 10000 $file ;;
                        open) set -- sh -c ': >$0' $file ;;
                        fallocate) set -- fallocate -l 20000 $file ;;
                        punch) set -- fallocate -p -l 4096 $file ;;
                        copy) set -- perl -e \"$copy\" $file ;;
                    esac
                    setpriv --reuid $who --regid $who --clear-groups \"$@\" || echo failed
                    echo $mode $way $who $(stat -c %a $file)
                done
            done
        done";
    let modes = |top: &Path| {
        let output = Command::new("sh").args(["-c", script]).arg(top).env("copy", COPY).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
        said(&output)
    };
    place.mount(&[]);
    let ours = modes(&place.directory);
    place.umount();
    place.done(&["mkfs", "-f"], &[&place.image]);
    let kernel = KernelMount::read_write(&place.image, "");
    let theirs = modes(kernel.path());
    assert!(!ours.contains("failed"), "{ours}");
    let differ: Vec<_> = ours.lines().zip(theirs.lines()).filter(|(a, b)| a != b).collect();
    assert!(differ.is_empty(), "ours, the kernel's: {differ:?}");
    assert!(ours.contains("4777 write 0 4777") && ours.contains("6777 write 1 777"), "{ours}");
}

/// It said that a directory is no image, and nothing of the mount in which it lies.
#[test]
fn directory_inside_of_a_mount_leads_to_the_mount() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let inside = place.directory.join("dir");
    fs::create_dir(&inside).unwrap();
    for words in [&["subvolume", "list"][..], &["df"], &["check"]] {
        let output = place.run(words, &[&inside]);
        let said = said(&output);
        let place = place.directory.display().to_string();
        assert!(!output.status.success() && said.contains("name that directory"), "{said}");
        assert!(said.contains(&place), "{said}");
    }
    place.umount();
    let said = said(&place.run(&["df"], &[place.image.parent().unwrap()]));
    assert!(said.contains("a directory") && !said.contains("lies in"), "{said}");
}

/// What of a mount is to be seen in another place, too.
struct Bound(PathBuf);

impl Bound {
    fn new(what: &Path, place: PathBuf) -> Self {
        if what.is_dir() {
            fs::create_dir(&place).unwrap();
        } else {
            fs::write(&place, b"").unwrap();
        }
        let output = Command::new("mount").arg("--bind").arg(what).arg(&place).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        Self(place)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

/// Paths began at the top of what is mounted wherever a part of it was bound to: `subvolume delete` of a name that the directory shows took
/// another subvolume away.
#[test]
fn paths_at_a_bound_directory_begin_at_what_it_shows() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let (top, name) = (place.directory.as_path(), |path: &'static str| Path::new(path));
    for path in ["/home", "/old", "/home/old"] {
        place.done(&["subvolume", "create"], &[top, name(path)]);
    }
    fs::create_dir_all(top.join("home/a dir/in")).unwrap();
    std::os::unix::fs::symlink("/a dir", top.join("home/link")).unwrap();
    let home = Bound::new(&top.join("home"), place.image.with_file_name("bound home"));
    let deeper = Bound::new(&top.join("home/a dir"), place.image.with_file_name("deeper"));
    place.done(&["subvolume", "delete"], &[&home.0, name("/old")]);
    assert!(top.join("old").exists() && !top.join("home/old").exists());
    place.done(&["mkdir"], &[&home.0, name("/made")]);
    place.done(&["subvolume", "snapshot"], &[&home.0, name("/"), name("/copy")]);
    assert!(top.join("home/made").exists() && top.join("home/copy/a dir").exists());
    assert_eq!(place.done(&["ls"], &[&home.0, name("/")]), "a dir\ncopy\nlink\nmade\n");
    // An absolute link and `..` go by what is shown, as PATH does.
    assert_eq!(place.done(&["ls"], &[&home.0, name("/link/../..")]), "a dir\ncopy\nlink\nmade\n");
    assert_eq!(place.done(&["ls"], &[&deeper.0, name("/")]), "in\n");
    // By another name since.
    fs::rename(top.join("home/a dir"), top.join("moved")).unwrap_err();
    fs::rename(top.join("home/a dir"), top.join("home/moved")).unwrap();
    assert_eq!(place.done(&["ls"], &[&deeper.0, name("/")]), "in\n");
    // Of the whole filesystem.
    for words in [&["filesystem", "sync"][..], &["df"], &["filesystem", "label"]] {
        place.done(words, &[&deeper.0]);
    }
    let list = place.done(&["subvolume", "list"], &[&deeper.0]);
    assert!(list.contains("path home/copy\n") && list.contains("path old\n"), "{list}");
    // By none.
    fs::remove_dir_all(top.join("home/moved")).unwrap();
    let output = place.run(&["ls"], &[&deeper.0, name("/")]);
    let said = said(&output);
    assert!(!output.status.success() && said.contains("where all of it is mounted"), "{said}");
    assert!(said.contains("lost its name") && said.contains(&top.display().to_string()), "{said}");
    place.done(&["filesystem", "sync"], &[&deeper.0]);
    place.done(&["umount"], &[&deeper.0]);
    // A file is what lies in it, and nothing of the mount.
    fs::File::create(top.join("disk.img")).unwrap().set_len(128 << 20).unwrap();
    place.done(&["mkfs", "-f", "-L", "inner"], &[&top.join("disk.img")]);
    let file = Bound::new(&top.join("disk.img"), place.image.with_file_name("bound file"));
    let label = place.done(&["filesystem", "label"], &[&file.0]);
    assert_eq!(label, "inner\n");
    place.done(&["umount"], &[&file.0]);
    drop((file, home));
    place.umount();
    place.assert_clean();
}

/// A command at a mount went by the variables of the process that serves it: it read and printed times in the time zone of who had mounted.
#[test]
fn commands_at_a_mount_go_by_the_time_zone_and_the_epoch_of_who_calls() {
    let Some(place) = Place::new(true) else { return };
    let with = |zone: Option<&str>, epoch: Option<&str>, words: &[&str], paths: &[&Path]| {
        let mut command = place.command(env!("CARGO_BIN_EXE_ubtrfs"));
        for (name, value) in [("TZ", zone), ("SOURCE_DATE_EPOCH", epoch)] {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.args(words).args(paths).output().unwrap()
    };
    let (top, file) = (place.directory.as_path(), Path::new("/file"));
    let mounted = with(Some("UTC-3"), None, &["mount"], &[&place.image, top]);
    assert!(mounted.status.success(), "{mounted:?}");
    let date = ["touch", "-d", "2024-07-03 12:00:00"];
    let mut zones = vec![Some("UTC0"), Some("UTC-7"), Some("CET-1CEST,M3.5.0,M10.5.0/3"), None];
    if Path::new("/usr/share/zoneinfo/Asia/Kolkata").exists() {
        zones.push(Some("Asia/Kolkata"));
    }
    for zone in zones {
        let output = with(zone, None, &date, &[top, file]);
        assert!(output.status.success(), "{output:?}");
        let mut date = Command::new("date");
        match zone {
            Some(zone) => date.env("TZ", zone),
            None => date.env_remove("TZ"),
        };
        let said_by = |command: &mut Command| said(&command.output().unwrap());
        date.args(["+%F %T.%N %z", "-r"]).arg(top.join("file"));
        let expected = said_by(&mut date);
        assert!(expected.starts_with("2024-07-03 12:00:00"), "{zone:?}: {expected}");
        let shown = said(&with(zone, None, &["stat"], &[top, file]));
        assert!(shown.contains(expected.trim_end()), "{zone:?}: {shown}");
        let listed = said(&with(zone, None, &["ls", "-l"], &[top, file]));
        assert!(listed.contains("Jul  3  2024"), "{zone:?}: {listed}");
    }
    // What it makes and touches, and for it alone.
    let output = with(None, Some("1700000000"), &["touch"], &[top, file]);
    assert!(output.status.success(), "{output:?}");
    let time = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    let epoch = std::time::UNIX_EPOCH;
    assert_eq!(time(&top.join("file")), epoch + Duration::from_secs(1_700_000_000));
    place.done(&["touch"], &[top, Path::new("/other")]);
    assert!(time(&top.join("other")) > epoch + Duration::from_secs(1_710_000_000));
    let output = with(None, Some("yesterday"), &["touch"], &[top, file]);
    assert!(said(&output).contains("SOURCE_DATE_EPOCH") && !output.status.success(), "{output:?}");
    place.umount();
}

/// The most memory that the server of a mount had, after files were written and read by it.
fn peak_bytes(options: &str) -> Option<u64> {
    let place = Place::new(true)?;
    place.mount(&["-o", options]);
    let bytes = Prng::new(1).bytes(1 << 20);
    for number in 0..180 {
        fs::write(place.directory.join(format!("file {number}")), &bytes).unwrap();
    }
    for number in 0..180 {
        assert!(fs::read(place.directory.join(format!("file {number}"))).unwrap() == bytes);
    }
    let about = fs::read_to_string(format!("/proc/{}/status", place.server())).unwrap();
    let peak = about.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    place.umount();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    Some(peak << 10)
}

/// What is dirty is written back sooner, and less is kept.
#[test]
fn memory_of_a_mount_is_what_is_asked_for() {
    let (Some(small), Some(usual)) = (peak_bytes("cache=16M"), peak_bytes("rw")) else { return };
    println!("with cache=16M {} MiB, else {} MiB", small >> 20, usual >> 20);
    assert!(small < 64 << 20 && small + (20 << 20) < usual, "{small}, {usual}");
    let Some(place) = Place::new(true) else { return };
    for bad in ["cache=", "cache=much", "cache=-1", "busy_poll=x", "busy_poll=", "busy_poll=-1"] {
        let output = place.run(&["mount", "-o", bad], &[&place.image, &place.directory]);
        assert_eq!(output.status.code(), Some(2), "{bad}: {}", said(&output));
    }
    // With nothing to keep it is slower, and works.
    place.mount(&["-o", "cache=0,busy_poll=0"]);
    let bytes = Prng::new(2).bytes(5 << 20);
    fs::write(place.directory.join("file"), &bytes).unwrap();
    assert!(fs::read(place.directory.join("file")).unwrap() == bytes);
    place.umount();
    place.assert_clean();
}

/// Files are made and removed in a mount by more threads than serve it, beside one that does `write` again and again.
#[track_caller]
fn assert_goes_on(place: &Place, write: impl Fn() -> bool + Send) {
    const TIME: Duration = Duration::from_secs(6);
    let (changes, is_over) = (&AtomicU64::new(0), &AtomicBool::new(false));
    let goes_on = || !is_over.load(Ordering::Relaxed);
    let thread_count = 2 * std::thread::available_parallelism().map_or(1, usize::from).max(4);
    let is_stuck = std::thread::scope(|scope| {
        for name in 0..thread_count {
            // Of changes in one directory the kernel makes one at a time.
            let path = place.directory.join(name.to_string());
            fs::create_dir(&path).unwrap();
            let path = path.join("file");
            scope.spawn(move || {
                while goes_on() && fs::write(&path, b"").is_ok() && fs::remove_file(&path).is_ok() {
                    changes.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(move || while goes_on() && write() {});
        let begun = Instant::now();
        let mut last = (0, begun);
        let is_stuck = loop {
            std::thread::sleep(Duration::from_millis(50));
            let count = changes.load(Ordering::Relaxed);
            if count == last.0 && last.1.elapsed() > PATIENCE {
                break true;
            } else if count > last.0 && begun.elapsed() > TIME {
                break false;
            } else if count > last.0 {
                last = (count, Instant::now());
            }
        };
        is_over.store(true, Ordering::Relaxed);
        if is_stuck {
            place.kill();
        }
        is_stuck
    });
    assert!(!is_stuck, "stopped after {changes:?} changes");
}

/// An image that is mounted, whoever serves that from which it comes.
struct Inside {
    image: PathBuf,
    directory: PathBuf,
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.directory).output();
        let server = server_of(&self.image);
        if !server.is_empty() {
            let _ = Command::new("kill").args(["-KILL", &server]).status();
        }
    }
}

/// A server looks while it commits whether the kernel has mounted its image, and asked for the attributes of all that is mounted: of what lies in
/// its own mount it asked itself, while all its threads waited for the commit.
#[test]
fn mount_goes_on_while_an_image_inside_of_it_is_mounted() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "commit=1"]);
    let image = place.directory.join("image inside");
    fs::File::create(&image).unwrap().set_len(128 << 20).unwrap();
    place.done(&["mkfs"], &[&image]);
    let inside = Inside { image, directory: place.image.with_file_name("inside") };
    fs::create_dir(&inside.directory).unwrap();
    place.done(&["mount", "-o", "commit=1"], &[&inside.image, &inside.directory]);
    let (path, bytes) = (inside.directory.join("file"), Prng::new(1).bytes(1 << 20));
    assert_goes_on(&place, || fs::write(&path, &bytes).is_ok());
    place.done(&["umount"], &[&inside.directory]);
    drop(inside);
    place.umount();
    place.assert_clean();
}

/// So it did with the files behind all loop devices.
#[test]
fn mount_goes_on_while_an_image_inside_of_it_is_attached() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "commit=1"]);
    let image = place.directory.join("image inside");
    fs::File::create(&image).unwrap().set_len(128 << 20).unwrap();
    let device = LoopDevice::attach(&image, false);
    let (file, bytes) = (fs::File::options().write(true).open(device.path()), [1; 1 << 20]);
    let file = file.unwrap();
    assert_goes_on(&place, || file.write_all_at(&bytes, 0).is_ok() && file.sync_data().is_ok());
    drop((file, device));
    place.umount();
    place.assert_clean();
}

/// The kernel tells who watches, once it is told that the name is gone for good.
#[test]
fn who_watches_a_directory_hears_that_a_command_has_deleted_a_subvolume() {
    use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init};
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let top = &place.directory;
    place.done(&["subvolume", "create"], &[top, Path::new("/sub")]);
    let events = init(CreateFlags::CLOEXEC).unwrap();
    add_watch(&events, top, WatchFlags::DELETE).unwrap();
    let gone = add_watch(&events, top.join("sub"), WatchFlags::DELETE_SELF).unwrap();
    place.done(&["subvolume", "delete"], &[top, Path::new("/sub")]);
    let mut space = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = Reader::new(&events, &mut space);
    let event = reader.next().unwrap();
    assert!(event.wd() == gone && event.events().contains(ReadFlags::DELETE_SELF), "{event:?}");
    drop(events);
    place.umount();
    place.assert_clean();
}
