//! An image that the built command mounts, as root or as somebody else.
#![allow(dead_code)] // Each test file uses its part.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ubtrfs_testkit::{Oracle, assert_checks_clean_whatever_it_holds, oracle};

/// Who is nobody.
pub const NOBODY: u32 = 65_534;

/// What has not come by then does not come: a machine that has much else to do may take a while. No test judges by it how long something
/// takes.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// One test at a time: a process that another one starts has, between its fork and its exec, all files of this process open,
/// and a mount with an open file is busy.
static ALONE: Mutex<()> = Mutex::new(());

/// An image, and a directory to mount it on.
pub struct Place {
    _scratch: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
    pub image: PathBuf,
    pub directory: PathBuf,
    is_root: bool,
}

impl Place {
    pub fn new(is_root: bool) -> Option<Self> {
        let judges = [Oracle::Root, Oracle::Fuse, Oracle::KernelBtrfs, Oracle::BtrfsProgs];
        if !oracle::require_all(&judges) {
            return None;
        }
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let scratch = tempfile::tempdir().unwrap();
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (image, directory) = (scratch.path().join("image"), scratch.path().join("a b"));
        fs::create_dir(&directory).unwrap();
        File::create(&image).unwrap().set_len(512 << 20).unwrap();
        if !is_root {
            // As distributions have it.
            fs::set_permissions("/dev/fuse", fs::Permissions::from_mode(0o666)).unwrap();
            for path in [&image, &directory] {
                chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
            }
        }
        let place = Self { _scratch: scratch, _alone: alone, image, directory, is_root };
        place.done(&["mkfs"], &[&place.image]);
        if !is_root {
            place.done(&["chown"], &[&place.image, Path::new(&NOBODY.to_string()), Path::new("/")]);
        }
        Some(place)
    }

    pub fn command(&self, program: &str) -> Command {
        if self.is_root {
            return Command::new(program);
        }
        let mut command = Command::new("setpriv");
        let who = NOBODY.to_string();
        command.args(["--reuid", &who, "--regid", &who, "--clear-groups", program]);
        command
    }

    pub fn run(&self, words: &[&str], paths: &[&Path]) -> Output {
        self.command(env!("CARGO_BIN_EXE_ubtrfs")).args(words).args(paths).output().unwrap()
    }

    pub fn done(&self, words: &[&str], paths: &[&Path]) -> String {
        let output = self.run(words, paths);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words:?}: {errors}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// `scripts/with-rings` says whether requests are to come by io_uring.
    pub fn mount(&self, options: &[&str]) {
        let has_rings = std::env::var_os("UBTRFS_RINGS").is_some_and(|said| said == "Y");
        let rings: &[&str] = if has_rings { &["-o", "io_uring"] } else { &[] };
        self.done(&[&["mount"], options, rings].concat(), &[&self.image, &self.directory]);
    }

    pub fn umount(&self) {
        self.done(&["umount"], &[&self.directory]);
    }

    pub fn is_mounted(&self) -> bool {
        let place = self.directory.display().to_string().replace(' ', "\\040");
        // The name of an image may be no text.
        let table = fs::read("/proc/self/mountinfo").unwrap();
        String::from_utf8_lossy(&table).contains(&format!(" {place} "))
    }

    /// The process that serves.
    pub fn server(&self) -> String {
        server_of(&self.image)
    }

    pub fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.server()]).status().unwrap();
        assert!(status.success());
    }

    /// The process that serves is gone, without having done anything for it.
    pub fn kill(&self) {
        self.signal("-KILL");
        // Who holds the image is gone when it can be locked.
        File::open(&self.image).unwrap().lock_shared().unwrap();
    }

    /// As if the machine had stopped.
    pub fn cut_off(&self) {
        self.kill();
        let output = Command::new("umount").arg("-l").arg(&self.directory).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// Both checkers find nothing in what was unmounted.
    #[track_caller]
    pub fn assert_clean(&self) {
        assert_image_clean(&self.image);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_mounted() {
            let _ = Command::new("umount").arg("-l").arg(&self.directory).status();
        }
    }
}

/// A filesystem in memory, which can be full.
pub struct Memory {
    pub directory: PathBuf,
}

impl Memory {
    pub fn new(place: &Place, size: &str) -> Self {
        let directory = place.directory.with_file_name("memory");
        fs::create_dir(&directory).unwrap();
        let size = format!("size={size}");
        let words = ["-t", "tmpfs", "-o", &size, "none"];
        let output = Command::new("mount").args(words).arg(&directory).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        Self { directory }
    }

    /// As [`Memory::new`], with an image in it that is the place's from now on, and longer than there is memory.
    pub fn with_image(place: &mut Place, size: &str) -> Self {
        let memory = Self::new(place, size);
        place.image = memory.directory.join("image");
        File::create(&place.image).unwrap().set_len(512 << 20).unwrap();
        place.done(&["mkfs"], &[&place.image]);
        memory
    }

    /// Has what is written to a file lost, where 8 MiB are more than a mount may have in memory; there is room behind it.
    pub fn lose(&self, file: &mut File) {
        self.fill();
        let _ = file.write_all(&[2; 8 << 20]);
        // What is neither stored nor waits to be takes no space.
        wait_until("lost", || {
            let about = file.metadata().unwrap();
            about.blocks() * 512 < about.len()
        });
        self.free();
    }

    /// Takes all that is free.
    pub fn fill(&self) {
        let mut file = File::create(self.directory.join("filler")).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
    }

    pub fn free(&self) {
        fs::remove_file(self.directory.join("filler")).unwrap();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.directory).status();
    }
}

/// The process that serves an image, or nothing.
pub fn server_of(image: &Path) -> String {
    let image = image.display().to_string();
    let output = Command::new("pgrep").args(["-f", &format!("mount.*{image}")]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Both checkers find nothing in an image that is not mounted, nor in the data of its files.
#[track_caller]
pub fn assert_image_clean(image: &Path) {
    assert_checks_clean_whatever_it_holds(&[image.to_owned()]);
    let output = Command::new(env!("CARGO_BIN_EXE_ubtrfs"))
        .args(["check", "--data"])
        .arg(image)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "ubtrfs check: {}", String::from_utf8_lossy(&said));
}

pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
