//! Broken and hostile images of others: each gives an answer or a message with its exit code, and
//! never a crash, a hang, or JSON that is none.

mod support;

use std::process::{Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use support::{Ran, command};
use ubtrfs_testkit::collections::{self, CollectedImage};
use ubtrfs_testkit::{Oracle, oracle};

/// Far more than any of them takes, on a machine with much else to do.
const PATIENCE: Duration = Duration::from_secs(120);

const COMMANDS: [&[&str]; 5] = [
    &["ls", "-laR"],
    &["tree", "-a", "--json"],
    &["df", "--json"],
    &["inspect", "super", "--all", "--full", "--json"],
    &["inspect", "tree"],
];

#[test]
fn collected_images_are_answered_or_refused() {
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
                    COMMANDS.iter().for_each(|words| judge(image, words));
                }
            });
        }
    });
}

fn judge(image: &CollectedImage, words: &[&str]) {
    let began = Instant::now();
    let child = command()
        .args(words)
        .arg(&image.path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
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
    let what = format!("{words:?} {} after {:?}: {stderr}", image.origin, began.elapsed());
    let code = status.code().unwrap_or_else(|| panic!("killed: {what}"));
    assert!([0, 1, 3, 4, 6].contains(&code), "{code}: {what}");
    assert!(!stderr.contains("panicked"), "{what}");
    assert!(code <= 1 || stderr.starts_with("ubtrfs: "), "{what}");
    if words.contains(&"--json") && !stdout.is_empty() {
        let ran = Ran { code, stdout, stderr };
        ran.json();
    }
}
