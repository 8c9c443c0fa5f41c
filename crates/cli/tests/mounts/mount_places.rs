//! Which mount a name leads to: what lies on another, what was moved, what somebody has put there meanwhile; and what becomes of a
//! place that is mounted again.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::place::{Memory, PATIENCE, Place, assert_image_clean, server_of, wait_until};
use ubtrfs_testkit::oracle::{self, Oracle};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

fn said(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What root says, wherever the mount is of.
fn as_root(words: &[&str], paths: &[&Path]) -> Output {
    Command::new(UBTRFS).args(words).args(paths).output().unwrap()
}

/// The options of a place, without those of the filesystem.
fn options_of(directory: &Path) -> BTreeSet<String> {
    let words = ["-n", "-o", "VFS-OPTIONS", "--mountpoint"];
    let output = Command::new("findmnt").args(words).arg(directory).output().unwrap();
    said(&output).trim().split(',').map(str::to_owned).collect()
}

fn set(words: &str) -> BTreeSet<String> {
    words.split(',').map(str::to_owned).collect()
}

/// What was not said was taken back: `remount,ro` of a place that was nosuid, nodev and noexec let programs run with their owner's rights.
#[test]
fn mounting_again_changes_what_is_said_and_leaves_all_else() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&["-o", "nosuid,nodev,noexec,nosymfollow,relatime"]);
    for (words, expected) in [
        ("ro", "ro,nosuid,nodev,noexec,nosymfollow,relatime"),
        ("exec", "ro,nosuid,nodev,nosymfollow,relatime"),
        ("rw", "rw,nosuid,nodev,nosymfollow,relatime"),
        ("bind,ro", "ro,nosuid,nodev,nosymfollow,relatime"),
        ("bind,symfollow", "ro,nosuid,nodev,relatime"),
        ("rw,dev,noexec", "rw,nosuid,noexec,relatime"),
        ("suid", "rw,noexec,relatime"),
        ("user", "rw,nosuid,nodev,noexec,relatime"),
    ] {
        let words = format!("remount,{words}");
        place.done(&["mount", "-o", &words], &[&place.image, &place.directory]);
        assert_eq!(options_of(&place.directory), set(expected), "{words}");
    }
    place.umount();
}

/// A user's image came to run programs with their owner's rights as root made it read-only.
#[test]
fn place_of_a_user_stays_restricted_when_root_mounts_it_again() {
    let Some(place) = Place::new(false) else { return };
    place.mount(&[]);
    let before = options_of(&place.directory);
    assert!(before.contains("nosuid") && before.contains("nodev"), "{before:?}");
    for words in ["ro", "rw"] {
        let output = as_root(
            &["mount", "-o", &format!("remount,{words}")],
            &[&place.image, &place.directory],
        );
        assert!(output.status.success(), "{}", said(&output));
        let mut expected = before.clone();
        expected.remove("rw");
        expected.insert(words.to_owned());
        assert_eq!(options_of(&place.directory), expected);
    }
    place.umount();
}

fn umount_of(directory: &Path) -> Command {
    let mut umount = Command::new(UBTRFS);
    umount.arg("umount").arg(directory);
    umount
}

/// An `umount` of root that waits for the server.
fn waiting_umount(mut umount: Command) -> Child {
    let child = umount.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let files = PathBuf::from(format!("/proc/{}/fd", child.id()));
    wait_until("asks the server", || {
        let open = fs::read_dir(&files).unwrap().flatten();
        open.filter_map(|one| fs::read_link(one.path()).ok())
            .any(|target| target.to_string_lossy().starts_with("socket:"))
    });
    child
}

fn is_mountpoint(directory: &Path) -> bool {
    Command::new("mountpoint").arg("-q").arg(directory).status().unwrap().success()
}

/// It went by the name again after it had waited: a user had root take off whatever he pointed a link at.
#[test]
fn umount_takes_off_nothing_that_was_put_into_its_place() {
    let Some(place) = Place::new(false) else { return };
    let memory = Memory::new(&place, "1M");
    place.mount(&[]);
    let server = place.server();
    place.signal("-STOP");
    let umount = waiting_umount(umount_of(&place.directory));
    let mut own = place.command("fusermount3");
    assert!(own.arg("-uz").arg(&place.directory).status().unwrap().success());
    fs::remove_dir(&place.directory).unwrap();
    symlink(&memory.directory, &place.directory).unwrap();
    assert!(Command::new("kill").args(["-CONT", &server]).status().unwrap().success());
    let output = umount.wait_with_output().unwrap();
    assert!(is_mountpoint(&memory.directory), "{}", said(&output));
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert!(said(&output).contains("by now"), "{}", said(&output));
}

/// The second one took off what lay below, which it had neither synced nor waited for.
#[test]
fn umount_beside_another_takes_off_no_more_than_the_one_that_it_found() {
    assert_umounts_take_off_one(umount_of);
}

/// So it did where both had looked what is there before the first one took it off. Here each waits between the two, by strace(1).
#[test]
fn umount_that_looked_before_another_unmounted_takes_off_nothing_else() {
    if !oracle::require(Oracle::Strace) {
        return;
    }
    assert_umounts_take_off_one(|directory| {
        let mut strace = Command::new("strace");
        // The command stays this process's child.
        strace.args(["-D", "-o", "/dev/null", "-e", "trace=umount2"]);
        strace.args(["-e", "inject=umount2:delay_enter=300000", UBTRFS, "umount"]).arg(directory);
        strace
    });
}

/// Of two mounts in one place, two umounts at once take off the one that both have found.
fn assert_umounts_take_off_one(umount: impl Fn(&Path) -> Command) {
    let Some(place) = Place::new(true) else { return };
    let other = place.image.with_file_name("other");
    File::create(&other).unwrap().set_len(512 << 20).unwrap();
    place.done(&["mkfs"], &[&other]);
    place.mount(&[]);
    fs::write(place.directory.join("below"), b"below").unwrap();
    place.done(&["mount"], &[&other, &place.directory]);
    fs::write(place.directory.join("above"), b"above").unwrap();
    let server = server_of(&other);
    let signal = |signal: &str| {
        assert!(Command::new("kill").args([signal, &server]).status().unwrap().success());
    };
    signal("-STOP");
    let umounts = [(); 2].map(|()| waiting_umount(umount(&place.directory)));
    signal("-CONT");
    let outputs = umounts.map(|umount| umount.wait_with_output().unwrap());
    let mut codes = outputs.each_ref().map(|output| output.status.code().unwrap());
    codes.sort_unstable();
    assert_eq!(codes, [0, 4], "{outputs:?}");
    assert_eq!(fs::read(place.directory.join("below")).unwrap(), b"below");
    place.umount();
    place.assert_clean();
    assert_image_clean(&other);
}

/// What a shell says in a mount namespace of its own, with the image as `$1`, the directory as `$2`, the scratch directory as `$3`, the
/// command as `$4`.
fn in_a_namespace(place: &Place, script: &str) -> String {
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", &format!("set -e; exec 2>&1; {script}"), "sh"])
        .args([&place.image, &place.directory])
        .arg(place.image.parent().unwrap())
        .arg(UBTRFS)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    said(&output)
}

/// The last one in the system's table was taken for the one on top, which it is not after a move: commands changed what was hidden, and
/// `umount` waited for the wrong server.
#[test]
fn commands_reach_what_lies_on_top_whatever_the_order_of_the_table_is() {
    let Some(place) = Place::new(true) else { return };
    let said = in_a_namespace(
        &place,
        "cd \"$3\"
        mkdir first
        truncate -s 512M other
        \"$4\" mkfs other >/dev/null
        \"$4\" mount -o commit=3600 other first
        \"$4\" mount -o commit=3600 \"$1\" \"$2\"
        touch first/above \"$2/below\"
        mount --move first \"$2\"
        \"$4\" ls \"$2\" /
        \"$4\" mkdir \"$2\" /made
        head -c 30000000 /dev/urandom >\"$2/data\"
        \"$4\" umount \"$2\"
        flock -n other true || echo in use
        \"$4\" ls other /
        ls \"$2\"
        \"$4\" umount \"$2\"
        flock -n \"$1\" true || echo in use",
    );
    assert_eq!(said, "above\nabove\ndata\nmade\nbelow\n");
    place.assert_clean();
    assert_image_clean(&place.image.with_file_name("other"));
}

/// What lies in a directory that is covered is in the system's table still, and commands changed it.
#[test]
fn what_lies_below_a_covered_directory_is_not_what_a_name_leads_to() {
    let Some(place) = Place::new(true) else { return };
    let said = in_a_namespace(
        &place,
        "cd \"$3\"
        mkdir -p over/sub
        \"$4\" mount \"$1\" over/sub
        mount -t tmpfs none over
        mkdir over/sub over/sub/dir
        for command in umount 'umount -l' df 'mount -o remount,ro x'; do
            \"$4\" $command over/sub >said 2>&1 && echo \"$command is done\"
            grep -q 'lies in what is mounted' said && echo \"$command: it lies there\"
        done
        \"$4\" df over/sub/dir 2>&1 | grep 'lies in' || true
        umount over
        touch over/sub/file
        \"$4\" umount over/sub
        \"$4\" ls \"$1\" /",
    );
    assert_eq!(said, "file\n");
    place.assert_clean();
}

/// By a symbolic link it asked the server, which it was to do without; and it failed as busy, where those who waited for the server were
/// about to be told that there is none.
#[test]
fn umount_by_force_asks_nobody_and_ends_those_who_wait() {
    let Some(place) = Place::new(true) else { return };
    let link = place.image.with_file_name("link");
    symlink(&place.directory, &link).unwrap();
    for name in [&link, &place.directory] {
        place.mount(&[]);
        let server = place.server();
        place.signal("-STOP");
        let inside = place.directory.join("name");
        let mut look = Command::new("stat");
        look.arg(inside).stdout(Stdio::null()).stderr(Stdio::null());
        let looking: Vec<Child> = (0..20).map(|_| look.spawn().unwrap()).collect();
        // One asks, and others wait for that one.
        let waits = |child: &Child| {
            let about = fs::read_to_string(format!("/proc/{}/wchan", child.id())).unwrap();
            about.contains("request_wait_answer")
        };
        wait_until("waits for the server", || looking.iter().any(waits));
        std::thread::sleep(Duration::from_millis(300));
        let mut umount = Command::new(UBTRFS)
            .args(["umount", "-f"])
            .arg(name)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // It waits a while for the server then.
        let begun = Instant::now();
        while place.is_mounted()
            && begun.elapsed() < PATIENCE
            && umount.try_wait().unwrap().is_none()
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        let is_mounted = place.is_mounted();
        if is_mounted {
            let _ = umount.kill();
            assert!(
                Command::new("umount").arg("-l").arg(&place.directory).status().unwrap().success()
            );
        }
        assert!(Command::new("kill").args(["-CONT", &server]).status().unwrap().success());
        for mut child in looking {
            child.wait().unwrap();
        }
        let output = umount.wait_with_output().unwrap();
        assert!(!is_mounted && output.status.success(), "{name:?}: {output:?}");
    }
    place.assert_clean();
}
