//! Broken and hostile images of others: each gives an answer or a message with its exit code, and
//! never a crash, a hang, or JSON that is none.

mod support;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::process::{Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use support::{Ran, command};
use ubtrfs_testkit::collections::{self, CollectedImage};
use ubtrfs_testkit::{Oracle, oracle, run};

/// Far more than any of them takes, on a machine with much else to do.
const PATIENCE: Duration = Duration::from_secs(120);

const COMMANDS: [&[&str]; 7] = [
    &["ls", "-laR"],
    &["tree", "-a", "--json"],
    &["df", "--json"],
    &["inspect", "super", "--all", "--full", "--json"],
    &["inspect", "tree"],
    &["inspect", "free-space", "--json"],
    &["check", "--data", "--json"],
];

/// What is tried on a copy, in this order: the words before IMAGE, and those behind.
const CHANGES: [(&[&str], &[&str]); 12] = [
    (&["mkdir", "-p"], &["/ubtrfs/a/b"]),
    (&["put"], &["Cargo.toml", "/ubtrfs/file"]),
    (&["cp", "-a"], &["/ubtrfs/file", "/ubtrfs/copy"]),
    (&["setfattr", "-n", "user.x", "-v", "x"], &["/ubtrfs/file"]),
    (&["subvolume", "create"], &["/ubtrfs/sub"]),
    (&["subvolume", "snapshot"], &["/", "/ubtrfs/snapshot"]),
    (&["mv"], &["/ubtrfs/file", "/ubtrfs/a/b"]),
    (&["truncate", "-s", "1"], &["/ubtrfs/a/b/file"]),
    (&["chmod", "-R"], &["go-w", "/"]),
    (&["chown", "-R"], &["1:1", "/"]),
    (&["subvolume", "delete"], &["/ubtrfs/snapshot", "/ubtrfs/sub"]),
    (&["rm", "-rf"], &["/ubtrfs"]),
];

#[test]
fn collected_images_are_answered_or_refused() {
    for_each_image(|image| {
        for words in COMMANDS {
            let arguments = words.iter().map(OsStr::new).chain([image.path.as_os_str()]);
            judge(&image.origin, arguments.collect());
        }
    });
}

/// Each takes changes or is refused, and an end of all that is in it, too. What both checkers found
/// clean before, they find clean after.
#[test]
fn collected_images_are_changed_or_refused() {
    let has_judge = oracle::require(Oracle::BtrfsProgs);
    let (taken, clean) = (AtomicUsize::new(0), AtomicUsize::new(0));
    for_each_image(|image| {
        let scratch = tempfile::tempdir().unwrap();
        let copy = scratch.path().join("copy");
        run("cp", ["--sparse=always".as_ref(), image.path.as_os_str(), copy.as_os_str()]);
        let change = |before: &[&str], behind: &[OsString]| {
            let before = before.iter().map(OsStr::new).chain([copy.as_os_str()]);
            judge(&image.origin, before.chain(behind.iter().map(OsString::as_os_str)).collect())
        };
        let theirs = || {
            let mut check = ubtrfs_testkit::command("btrfs");
            check.args(["check", "--readonly", "--check-data-csum"]).arg(&copy);
            check.output().unwrap().status.success()
        };
        let ours = || change(&["check", "--data"], &[]).code == 0;
        let was_clean = has_judge && ours() && theirs();
        for (before, behind) in CHANGES {
            let behind: Vec<OsString> = behind.iter().map(OsString::from).collect();
            let is_done = change(before, &behind).code == 0;
            taken.fetch_add(usize::from(is_done), Ordering::Relaxed);
        }
        let names = change(&["ls", "-A"], &[]).stdout;
        let names = names.split(|byte| *byte == b'\n').filter(|name| !name.is_empty());
        let paths: Vec<OsString> =
            names.map(|name| OsString::from_vec([b"/", name].concat())).collect();
        if !paths.is_empty() {
            change(&["cp", "-r"], &[paths.clone(), vec!["/".into()]].concat());
            change(&["rm", "-rf"], &paths);
        }
        if was_clean {
            clean.fetch_add(1, Ordering::Relaxed);
            assert!(ours(), "{}: our check finds damage", image.origin);
            assert!(theirs(), "{}: btrfs check finds damage", image.origin);
        }
    });
    let (taken, clean) = (taken.into_inner(), clean.into_inner());
    println!("{taken} changes were taken, {clean} images stayed clean");
    assert!(!oracle::require(Oracle::ImageCollections) || taken > 50);
    assert!(!has_judge || !oracle::require(Oracle::ImageCollections) || clean > 10);
}

fn for_each_image(judge: impl Fn(&CollectedImage) + Sync) {
    if !oracle::require(Oracle::ImageCollections) {
        return;
    }
    let images = collections::images();
    assert!(images.len() > 100);
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(image) = images.get(next.fetch_add(1, Ordering::Relaxed)) {
                    judge(image);
                }
            });
        }
    });
}

fn judge(origin: &str, words: Vec<&OsStr>) -> Ran {
    let began = Instant::now();
    let child =
        command().args(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let id = child.id().to_string();
    let (done, is_done) = mpsc::channel::<()>();
    // A child that never ends is ended, which then shows as a signal.
    let watch = std::thread::spawn(move || {
        if is_done.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            let _ = std::process::Command::new("kill").args(["-9", &id]).status();
        }
    });
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    drop(done);
    watch.join().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    let what = format!("{words:?} {origin} after {:?}: {stderr}", began.elapsed());
    let code = status.code().unwrap_or_else(|| panic!("killed: {what}"));
    assert!([0, 1, 3, 4, 5, 6].contains(&code), "{code}: {what}");
    assert!(!stderr.contains("panicked"), "{what}");
    assert!(code <= 1 || stderr.starts_with("ubtrfs: "), "{what}");
    let ran = Ran { code, stdout, stderr };
    if words.contains(&OsStr::new("--json")) && !ran.stdout.is_empty() {
        ran.json();
    }
    ran
}
