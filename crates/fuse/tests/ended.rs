//! Connections that the server ends, with somebody waiting for an answer: by what the kernel tells of connections, and without that.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ubtrfs_fuse::{FuseDevice, MountOptions, Transport, mount};
use ubtrfs_testkit::{Oracle, oracle};

/// For so long something may take to come.
const PATIENCE: Duration = Duration::from_secs(20);
/// Says to this test that it is in a mount namespace of its own.
const INSIDE: &str = "UBTRFS_TEST_INSIDE";

/// Taken off at the end.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-q", "-l"]).arg(&self.0).status();
    }
}

fn device_of(place: &Path) -> String {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut lines = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    lines.find(|words| Path::new(words[4]) == place).unwrap()[2].to_owned()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Where the kernel's own filesystem of connections is not mounted, nothing ended them while the process that serves was there.
#[test]
fn connection_that_is_ended_leaves_nobody_waiting() {
    if !oracle::require_all(&[Oracle::Root, Oracle::Fuse]) {
        return;
    }
    if std::env::var_os(INSIDE).is_none() {
        for prepare in [
            "mount -t fusectl none /sys/fs/fuse/connections",
            "umount -q /sys/fs/fuse/connections || true",
        ] {
            let script = format!(
                "{prepare}; exec \"$0\" --exact connection_that_is_ended_leaves_nobody_waiting"
            );
            let mut inside = Command::new("unshare");
            inside.args(["-m", "sh", "-ec", &script]).arg(std::env::current_exe().unwrap());
            let output = inside.env(INSIDE, "1").output().unwrap();
            assert!(output.status.success(), "{prepare}: {output:?}");
        }
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let place = Place(scratch.path().canonicalize().unwrap());
    let options = MountOptions { source: "nothing".into(), ..MountOptions::default() };
    let transport = FuseDevice::new(mount(&place.0, &options).unwrap()).unwrap();
    let device = device_of(&place.0);
    let mut stat = Command::new("stat");
    stat.args(["--cached=never", "-c", "%i"]).arg(place.0.join("name"));
    let mut child: Child = stat.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("it asks", || transport.has_request());
    // Of another connection.
    transport.abort(Some("0:1048575"));
    transport.abort(None);
    std::thread::sleep(Duration::from_millis(50));
    let waits = child.try_wait().unwrap().is_none();
    transport.abort(Some(&device));
    wait_until("it is told", || child.try_wait().unwrap().is_some());
    assert!(waits && !child.wait().unwrap().success());
}
