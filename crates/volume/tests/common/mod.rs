//! What the tests against real images share: the judges, and images that mkfs.btrfs makes.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use ubtrfs_volume::{Device, FileDevice, OpenMode, VolumeOptions, Window};

pub const READ_ONLY: VolumeOptions =
    VolumeOptions { read_only: true, degraded: false, super_copy: None };

/// How often a mount is tried to be taken off.
const UMOUNT_COUNT_MAX: usize = 50;

pub const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Whether a judge is there; where judges are required, its absence fails the test.
fn judge_is(there: bool, name: &str) -> bool {
    let required = std::env::var_os("UBTRFS_REQUIRE_ORACLES").is_some_and(|value| value == "1");
    assert!(there || !required, "{name} is missing and judges are required");
    if !there {
        eprintln!("SKIPPED: {name} is missing");
    }
    there
}

/// Whether all `programs` are there.
pub fn judge(programs: &[&str]) -> bool {
    programs.iter().all(|program| {
        let found = PATH.split(':').any(|dir| Path::new(dir).join(program).is_file());
        judge_is(found, program)
    })
}

/// Whether the kernel can mount images for us.
pub fn judge_kernel_mount() -> bool {
    let root = rustix::process::geteuid().is_root();
    let loops = Path::new("/dev/loop-control").exists();
    let btrfs = std::fs::read_to_string("/proc/filesystems").unwrap_or_default().contains("btrfs");
    judge_is(root && loops && btrfs, "a kernel that mounts btrfs through loop devices, and root")
        && judge(&["mount", "umount", "losetup", "mkfs.btrfs"])
}

/// Runs a program that must succeed, and returns what it printed.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).env("PATH", PATH).args(arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// As [`run`], with input.
pub fn run_with(program: &str, arguments: &[&str], input: &str) {
    use std::io::Write;
    let mut child = Command::new(program)
        .env("PATH", PATH)
        .args(arguments)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{program} {arguments:?}");
}

/// `count` images that mkfs.btrfs made into one filesystem, or `None` without it.
pub fn mkfs(dir: &Path, count: usize, options: &[&str]) -> Option<Vec<PathBuf>> {
    if !judge(&["mkfs.btrfs"]) {
        return None;
    }
    let images: Vec<PathBuf> = (1..=count).map(|n| dir.join(format!("{n}.img"))).collect();
    for image in &images {
        std::fs::File::create(image).unwrap().set_len(512 << 20).unwrap();
    }
    let paths = images.iter().map(|path| path.to_str().unwrap());
    let arguments: Vec<&str> =
        ["-q", "-f"].into_iter().chain(options.iter().copied()).chain(paths).collect();
    run("mkfs.btrfs", &arguments);
    Some(images)
}

pub fn open_devices(images: &[PathBuf], mode: OpenMode) -> Vec<Arc<dyn Device>> {
    let open = |path| Arc::new(FileDevice::open(path, mode, Window::Whole).unwrap());
    images.iter().map(|path| open(path) as Arc<dyn Device>).collect()
}

/// A mount that ends with the test.
pub struct Mount {
    pub point: PathBuf,
}

impl Mount {
    pub fn new(options: &str, source: &Path, point: PathBuf) -> Self {
        std::fs::create_dir_all(&point).unwrap();
        run("mount", &["-o", options, source.to_str().unwrap(), point.to_str().unwrap()]);
        Self { point }
    }
}

impl Drop for Mount {
    /// A program that another test starts has, until it runs, all files of this process open: so the mount can be busy for a moment.
    fn drop(&mut self) {
        let mut last = String::new();
        for _ in 0..UMOUNT_COUNT_MAX {
            let output =
                Command::new("umount").env("PATH", PATH).arg(&self.point).output().unwrap();
            if output.status.success() {
                return;
            }
            last = String::from_utf8_lossy(&output.stderr).into_owned();
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("umount {}: {last}", self.point.display());
    }
}

/// A loop device that ends with the test.
pub struct LoopDevice {
    pub path: PathBuf,
}

impl LoopDevice {
    pub fn new(image: &Path, options: &[&str]) -> Self {
        let image = image.to_str().unwrap();
        let arguments: Vec<&str> =
            ["-f", "--show"].into_iter().chain(options.iter().copied()).chain([image]).collect();
        Self { path: run("losetup", &arguments).into() }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        run("losetup", &["-d", self.path.to_str().unwrap()]);
    }
}
