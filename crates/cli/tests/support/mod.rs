//! Runs the command and keeps what it said.
#![allow(dead_code)] // Each test file uses its part.

use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use ubtrfs_testkit::{Compare, KernelMount, Oracle, TreeSnapshot, assert_checks_clean, oracle};

/// The command, with an environment that does not depend on who runs the test.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
    command.env("LC_ALL", "C").env("TZ", "UTC0").env_remove("SOURCE_DATE_EPOCH");
    command.env_remove("COLUMNS").stdin(Stdio::null());
    command
}

/// What a run of the command gave.
#[derive(Debug)]
pub struct Ran {
    /// The exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().expect("the command was killed by a signal"),
            stdout: output.stdout,
            stderr: String::from_utf8(output.stderr).expect("messages are UTF-8"),
        }
    }
}

/// Runs it with these arguments.
pub fn ubtrfs<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Ran {
    command().args(arguments).output().unwrap().into()
}

/// Runs it in a directory.
pub fn ubtrfs_in<S: AsRef<OsStr>>(directory: &Path, arguments: impl IntoIterator<Item = S>) -> Ran {
    command().current_dir(directory).args(arguments).output().unwrap().into()
}

/// Runs it with something to read.
pub fn ubtrfs_with_stdin<S: AsRef<OsStr>>(
    stdin: &[u8],
    arguments: impl IntoIterator<Item = S>,
) -> Ran {
    let mut child = command()
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let bytes = stdin.to_vec();
    let writer = std::thread::spawn(move || {
        // A command that fails early reads no further.
        let _ = pipe.write_all(&bytes);
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output.into()
}

impl Ran {
    /// Expects success, and nothing on stderr.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{}", self.stderr);
        assert_eq!(self.stderr, "");
        self
    }

    /// Expects this exit code, and a message of our form.
    #[track_caller]
    pub fn fails(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{}", self.stderr);
        assert!(self.stderr.starts_with("ubtrfs: "), "{:?}", self.stderr);
        self
    }

    /// Expects words in the message.
    #[track_caller]
    pub fn says(self, words: &str) -> Self {
        assert!(self.stderr.contains(words), "{words:?} not in {:?}", self.stderr);
        self
    }

    /// Standard output as text.
    #[track_caller]
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.stdout).unwrap()
    }
}

/// Has an image judged: `btrfs check` in all its modes, and the kernel, which must show every file,
/// attribute and hole as our export has it.
#[track_caller]
pub fn assert_judged(image: &Path) {
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(image);
    }
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        return;
    }
    // In memory where that is possible: its filesystem takes every attribute, which others do not.
    let memory = Path::new("/dev/shm");
    let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let scratch = tempfile::Builder::new().prefix("ubtrfs-judge-").tempdir_in(base).unwrap();
    let out = scratch.path().join("out");
    let words = ["export", "-q", "--subvolid", "5"].map(OsStr::new);
    let ran = ubtrfs(words.into_iter().chain([image.as_os_str(), "/".as_ref(), out.as_os_str()]));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.lines().all(|line| line.contains("attribute btrfs.")), "{}", ran.stderr);
    let mount = KernelMount::read_only(image, "subvolid=5,noatime");
    let mut kernel = TreeSnapshot::of_directory(mount.path());
    mount.unmount();
    for entry in kernel.entries.values_mut() {
        // Properties of btrfs itself.
        entry.xattrs.iter_mut().for_each(|all| all.retain(|name, _| !name.starts_with(b"btrfs.")));
    }
    kernel.assert_same(&TreeSnapshot::of_directory(&out), &Compare::copied());
}
