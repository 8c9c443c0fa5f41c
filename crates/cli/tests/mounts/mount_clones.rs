//! Mounts whose threads have descriptors of `/dev/fuse` of their own (`-o clone_fd`). The kernel finds a request only by the one that took it, so an
//! answer that went by another would leave who asked waiting for ever.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::place::{NOBODY, Place, assert_image_clean, server_of};
use ubtrfs_testkit::{KernelMount, LoopDevice, Prng};

/// Threads that take requests, at least.
const THREADS_MIN: usize = 4;
/// `BTRFS_IOC_SNAP_CREATE` of the subvolume ARGV[0] in itself, by the name ARGV[1].
const SNAPSHOT: &str = "open(D, '<', $ARGV[0]) or die $!; my $b = pack('q a4088', fileno(D), $ARGV[1]); \
    ioctl(D, 0x50009401, $b) or die $!";

fn ubtrfs(place: &Place, words: &[&str]) -> Command {
    let mut command = place.command(env!("CARGO_BIN_EXE_ubtrfs"));
    command.args(words);
    command
}

#[track_caller]
fn checked(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Mounts it; returns what was said.
fn mount(place: &Place, options: &str) -> String {
    let mut command = ubtrfs(place, &["mount", "-o", options]);
    checked(command.args([&place.image, &place.directory]).output().unwrap())
}

/// How many descriptors of `/dev/fuse` the process has that serves.
fn descriptors(image: &Path) -> usize {
    let open = fs::read_dir(format!("/proc/{}/fd", server_of(image))).unwrap();
    let targets = open.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    targets.filter(|target| target == Path::new("/dev/fuse")).count()
}

/// Writes, renames, reads and syncs in a directory of its own.
fn work(directory: &Path, thread: u64, rounds: usize) {
    let mut random = Prng::new(thread);
    let name = |at: usize| directory.join(format!("{thread}-{at}"));
    for at in 0..rounds {
        let bytes = random.bytes(random.clone().index(200_000));
        fs::write(name(at), &bytes).unwrap();
        if at % 7 == 0 {
            File::open(name(at)).unwrap().sync_all().unwrap();
        }
        assert!(fs::read(name(at)).unwrap() == bytes);
        assert_eq!(fs::metadata(name(at)).unwrap().len(), bytes.len() as u64);
        match at % 4 {
            0 => fs::remove_file(name(at)).unwrap(),
            1 => fs::rename(name(at), directory.join(format!("{thread}-{at}-moved"))).unwrap(),
            _ => {}
        }
    }
}

fn work_at_once(directory: &Path, threads: u64, rounds: usize) {
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || work(directory, thread, rounds));
        }
    });
    assert_eq!(
        fs::read_dir(directory).unwrap().count(),
        usize::try_from(threads).unwrap() * (rounds - rounds.div_ceil(4))
    );
}

#[test]
fn each_thread_has_a_descriptor_where_that_is_asked_for() {
    for is_root in [true, false] {
        let Some(place) = Place::new(is_root) else { return };
        for (options, counts) in [("clone_fd", THREADS_MIN..=usize::MAX), ("rw", 1..=1)] {
            assert_eq!(mount(&place, options), "");
            let count = descriptors(&place.image);
            assert!(counts.contains(&count), "{options}: {count}");
            let inside = place.directory.join(options);
            checked(place.command("mkdir").args(["-m", "777"]).arg(&inside).output().unwrap());
            if is_root {
                work_at_once(&inside, 4, 60);
            }
            place.umount();
            place.assert_clean();
        }
    }
}

/// Each request is told of again, as interrupted, while it is answered.
#[test]
fn requests_that_are_interrupted_are_answered() {
    const INTERRUPT: &str = "36";
    let Some(place) = Place::new(true) else { return };
    let counts = place.image.with_file_name("counts");
    let mut command = ubtrfs(&place, &["mount", "-o", "clone_fd"]);
    command.env("UBTRFS_REQUEST_COUNTS", &counts);
    checked(command.args([&place.image, &place.directory]).output().unwrap());
    let script = "use Time::HiRes 'ualarm'; use IO::Handle; $SIG{ALRM} = sub {}; ualarm(300, 300);
        for my $at (1..150) {
            my $f; until (open($f, '>', \"$ARGV[0]/$ARGV[1]-$at\")) { $!{EINTR} or die $! }
            my $left = length(my $b = 'x' x 30000);
            while ($left) { my $n = syswrite($f, $b, $left); $!{EINTR} or die $! if !defined $n; $left -= $n // 0 }
            until ($f->sync) { $!{EINTR} or die $! }
        }
        ualarm(0);";
    let writers: Vec<_> = (0..3)
        .map(|writer: u32| {
            let mut command = Command::new("perl");
            command.args(["-e", script]).arg(&place.directory).arg(writer.to_string());
            command.stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    // Who is killed waits for nothing more.
    for _ in 0..20 {
        let mut killed = Command::new("sh");
        killed.args(["-c", "while :; do echo x >\"$0/killed\"; sync \"$0/killed\"; done"]);
        let mut killed = killed.arg(&place.directory).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        killed.kill().unwrap();
        killed.wait().unwrap();
    }
    for writer in writers {
        checked(writer.wait_with_output().unwrap());
    }
    let lengths = (0..3).flat_map(|writer| (1..=150).map(move |at| format!("{writer}-{at}")));
    for name in lengths {
        assert_eq!(fs::metadata(place.directory.join(&name)).unwrap().len(), 30000, "{name}");
    }
    place.umount();
    let counts = fs::read_to_string(counts).unwrap();
    assert!(counts.lines().any(|line| line.split(' ').next() == Some(INTERRUPT)), "{counts}");
    place.assert_clean();
}

/// Snapshots that have the kernel write first, which answers of others wait for; files that grow behind what was stored there; searches for
/// holes over what only the kernel has.
#[test]
fn answers_that_other_threads_send_arrive() {
    let Some(place) = Place::new(true) else { return };
    mount(&place, "clone_fd");
    place.done(&["subvolume", "create"], &[&place.directory, Path::new("/sub")]);
    let inside = place.directory.join("sub");
    let script = "
import mmap,os,sys,threading
def store(name):
    f=os.open(name,os.O_RDWR|os.O_CREAT,0o644)
    os.ftruncate(f,1<<20)
    m=mmap.mmap(f,1<<20)
    for at in range(300):
        m[(at*4096*7)%(1<<20)]=at%251+1
        os.lseek(f,0,os.SEEK_HOLE)
        os.pwrite(f,b'w',(1<<20)+at*1000)
        os.ftruncate(f,1<<20)
    m.flush()
each=[threading.Thread(target=store,args=(sys.argv[1]+'/stored%d'%n,)) for n in range(3)]
[t.start() for t in each]
[t.join() for t in each]
";
    let mut storing = Command::new("python3");
    storing.args(["-c", script]).arg(&inside).stderr(Stdio::piped());
    let storing = storing.spawn().unwrap();
    std::thread::scope(|scope| {
        for at in 0..12 {
            let inside = &inside;
            scope.spawn(move || {
                let mut command = Command::new("perl");
                command.args(["-e", SNAPSHOT]).arg(inside).arg(format!("snapshot {at}"));
                checked(command.output().unwrap());
            });
        }
        let place = &place;
        let inside = place.directory.join("beside");
        scope.spawn(move || {
            fs::create_dir(&inside).unwrap();
            work_at_once(&inside, 2, 60);
        });
    });
    checked(storing.wait_with_output().unwrap());
    let snapshots = fs::read_dir(&inside).unwrap();
    let is_snapshot = |entry: fs::DirEntry| entry.file_name().to_str()?.starts_with("snap").into();
    let count = snapshots.filter_map(|entry| is_snapshot(entry.unwrap())).filter(|is| *is).count();
    assert_eq!(count, 12);
    place.umount();
    place.assert_clean();
}

/// The answer to the last request is sent when all threads have ended; it comes by any of the descriptors.
#[test]
fn block_device_is_unmounted_and_free_then() {
    let Some(place) = Place::new(true) else { return };
    let device = LoopDevice::attach(&place.image, false);
    for round in 0..10 {
        let mut command = ubtrfs(&place, &["mount", "-o", "clone_fd"]);
        checked(command.args([device.path(), &place.directory]).output().unwrap());
        let table = fs::read_to_string("/proc/mounts").unwrap();
        assert!(table.contains("fuseblk.ubtrfs"));
        let inside = place.directory.join(round.to_string());
        fs::create_dir(&inside).unwrap();
        work_at_once(&inside, 3, 8);
        let begun = Instant::now();
        let status = Command::new("umount").arg(&place.directory).status().unwrap();
        assert!(status.success());
        assert!(begun.elapsed() < Duration::from_secs(60));
        let kernel = KernelMount::read_only(device.path(), "");
        assert!(kernel.path().join(round.to_string()).is_dir());
        kernel.unmount();
    }
    drop(device);
    place.assert_clean();
}

#[test]
fn process_that_is_killed_loses_nothing_that_was_synced_and_holds_nothing() {
    let Some(place) = Place::new(true) else { return };
    for round in 0..4 {
        mount(&place, "clone_fd");
        let (inside, synced) =
            (place.directory.join(format!("dir{round}")), format!("synced{round}"));
        let mut file = File::create(place.directory.join(&synced)).unwrap();
        file.write_all(synced.as_bytes()).unwrap();
        file.sync_all().unwrap();
        drop(file);
        let mut writers = Command::new("sh");
        writers.args([
            "-c",
            "mkdir \"$0\"; for t in 1 2 3 4; do (i=0; while echo $i >\"$0/$t-$i\"; do i=$((i+1)); done) & done; wait",
        ]);
        let mut writers = writers.arg(&inside).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(150));
        place.kill();
        // Whoever waited for an answer has an error.
        writers.wait().unwrap();
        let refused = fs::read(place.directory.join(&synced)).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::NotConnected);
        let output = Command::new("umount").arg(&place.directory).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let kept = place.done(&["cat"], &[&place.image, Path::new(&format!("/{synced}"))]);
        assert_eq!(kept, synced);
    }
    place.assert_clean();
}

/// `fusermount3` opened the device, and he may not open it himself. As with libfuse he has the mount all the same.
#[test]
fn threads_share_a_descriptor_where_there_can_be_no_other() {
    let Some(place) = Place::new(false) else { return };
    let script = "set -e
        mkdir -m 755 \"$1\"
        mknod -m 600 \"$1/device\" c 10 229
        chown $2 \"$1/device\"
        mount --bind \"$1/device\" /dev/fuse
        # It is opened once.
        echo \"#!/bin/sh\n$(command -v fusermount3) \\\"\\$@\\\" && chmod 0 /dev/fuse\" >\"$1/fusermount3\"
        chmod 755 \"$1/fusermount3\"
        as=\"setpriv --reuid $2 --regid $2 --clear-groups\"
        PATH=\"$1:$PATH\" $as \"$3\" mount -o clone_fd \"$4\" \"$5\"
        $as sh -c 'echo made >\"$0\"/file' \"$5\"
        find /proc/$(pgrep -f \"[u]btrfs mount.*$4\")/fd -lname '*/fuse' | wc -l
        $as \"$3\" umount \"$5\"";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script, "sh"]).arg(place.image.with_file_name("fuse"));
    command.arg(NOBODY.to_string()).arg(env!("CARGO_BIN_EXE_ubtrfs"));
    let output = command.args([&place.image, &place.directory]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n", "{output:?}");
    let said = checked(output);
    assert!(said.contains("threads share one descriptor"), "{said}");
    assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]), "made\n");
    place.assert_clean();
}

#[test]
fn root_of_a_user_namespace_has_them_too() {
    let Some(place) = Place::new(false) else { return };
    // Root there is root in it.
    place.done(&["chown"], &[&place.image, Path::new("0:0"), Path::new("/")]);
    let script = "set -e
        \"$0\" mount -o clone_fd \"$1\" \"$2\"
        echo made >\"$2/file\"
        for n in 1 2 3; do (for i in $(seq 50); do echo $i >\"$2/$n-$i\"; cat \"$2/$n-$i\" >/dev/null; done) & done
        wait
        find /proc/$(pgrep -f \"[u]btrfs mount.*$1\")/fd -lname '*/fuse' | wc -l
        \"$0\" umount \"$2\"";
    let mut command = place.command("unshare");
    command.args(["-Urm", "sh", "-c", script]).arg(env!("CARGO_BIN_EXE_ubtrfs"));
    let output = command.args([&place.image, &place.directory]).output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout).trim().parse::<usize>();
    assert!(shown.is_ok_and(|count| count >= THREADS_MIN), "{output:?}");
    assert_eq!(checked(output), "");
    assert_image_clean(&place.image);
}

#[test]
fn queues_of_io_uring_and_descriptors_are_not_asked_for_at_once() {
    let Some(place) = Place::new(true) else { return };
    let words = ["mount", "-o", "io_uring,clone_fd"];
    let output = place.run(&words, &[&place.image, &place.directory]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("clone_fd") && said.contains("io_uring"), "{said}");
    assert!(!place.is_mounted());
}
