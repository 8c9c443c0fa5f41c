//! Which judges this machine has.

use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::collections;
use crate::run::{command, path_of};

/// Something outside of this project that a test needs to judge by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Oracle {
    /// `btrfs check` and the rest of the installed btrfs-progs.
    BtrfsProgs,
    /// A newer btrfs-progs, which `scripts/fetch-collections` unpacks.
    NewBtrfsProgs,
    /// `mkfs.btrfs`.
    MkfsBtrfs,
    /// The kernel's btrfs, mounted through a loop device: needs root.
    KernelBtrfs,
    /// The kernel's xfs, likewise.
    KernelXfs,
    /// Root itself: to make device nodes, to own files of others.
    Root,
    /// The images of btrfs-progs's tests, which `scripts/fetch-collections` unpacks.
    ImageCollections,
    /// GNU tar.
    Tar,
    /// libarchive's tar.
    Bsdtar,
    /// The kernel's FUSE, and `fusermount3` with which others than root mount.
    Fuse,
    /// FUSE over io_uring, which root may switch on (from Linux 6.14 on).
    FuseRings,
    /// strace(1), which has system calls fail.
    Strace,
    /// fakeroot(1).
    Fakeroot,
}

/// Whether the judge is there. Where it is not, says so as a line that begins with SKIPPED.
///
/// # Panics
/// If it is missing and `UBTRFS_REQUIRE_ORACLES=1` is set.
#[must_use]
pub fn require(oracle: Oracle) -> bool {
    let Err(why) = available(oracle) else { return true };
    let required = std::env::var("UBTRFS_REQUIRE_ORACLES").is_ok_and(|value| value == "1");
    assert!(!required, "{oracle:?} is required and missing: {why}");
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test").to_owned();
    // Not by eprintln, whose text the test harness keeps back when a test passes.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: no {oracle:?}: {why}");
    false
}

/// Whether all of them are there, as [`require`].
///
/// # Panics
/// As [`require`].
#[must_use]
pub fn require_all(oracles: &[Oracle]) -> bool {
    oracles.iter().all(|oracle| require(*oracle))
}

/// Where root switches FUSE over io_uring on and off.
pub const FUSE_RINGS_SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// The directory that holds a newer `btrfs` and `mkfs.btrfs`, if it was fetched.
pub fn new_btrfs_progs() -> Option<PathBuf> {
    let directory = collections::directory()?.join("btrfs-progs");
    directory.join("sbin/mkfs.btrfs").exists().then_some(directory)
}

/// Whether the judge is there.
///
/// # Errors
/// Why it is not.
pub fn available(oracle: Oracle) -> Result<(), String> {
    match oracle {
        Oracle::BtrfsProgs => has_tool("btrfs"),
        Oracle::MkfsBtrfs => has_tool("mkfs.btrfs"),
        Oracle::Tar => has_tool("tar"),
        Oracle::Bsdtar => has_tool("bsdtar"),
        Oracle::Strace => has_tool("strace"),
        Oracle::Fakeroot => has_tool("fakeroot"),
        Oracle::Fuse => match std::fs::File::open("/dev/fuse") {
            Ok(_) => has_tool("fusermount3"),
            Err(error) => Err(format!("/dev/fuse: {error}")),
        },
        Oracle::FuseRings => match std::fs::metadata(FUSE_RINGS_SWITCH) {
            Ok(_) => is_root(),
            Err(error) => Err(format!("{FUSE_RINGS_SWITCH}: {error}")),
        },
        Oracle::NewBtrfsProgs => new_btrfs_progs()
            .map(|_| ())
            .ok_or_else(|| "scripts/fetch-collections has not run".to_owned()),
        Oracle::ImageCollections => collections::directory()
            .map(|_| ())
            .ok_or_else(|| "scripts/fetch-collections has not run".to_owned()),
        Oracle::Root => is_root(),
        Oracle::KernelBtrfs => {
            static ANSWER: OnceLock<Result<(), String>> = OnceLock::new();
            ANSWER.get_or_init(|| kernel_has("btrfs", &["mkfs.btrfs", "btrfs"])).clone()
        }
        Oracle::KernelXfs => {
            static ANSWER: OnceLock<Result<(), String>> = OnceLock::new();
            ANSWER.get_or_init(|| kernel_has("xfs", &["mkfs.xfs"])).clone()
        }
    }
}

fn is_root() -> Result<(), String> {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err("not root".to_owned()) }
}

fn kernel_has(filesystem: &str, tools: &[&str]) -> Result<(), String> {
    is_root()?;
    for tool in ["mount", "umount", "losetup"].iter().chain(tools) {
        has_tool(tool)?;
    }
    let line = format!("\t{filesystem}");
    let knows = || {
        std::fs::read_to_string("/proc/filesystems")
            .is_ok_and(|list| list.lines().any(|listed| listed.ends_with(&line)))
    };
    if !knows() {
        // A kernel that has it as a module; failure shows in the next look.
        let _ = command("modprobe").arg(filesystem).output();
    }
    if !knows() {
        return Err(format!("the kernel has no {filesystem}"));
    }
    match std::fs::exists("/dev/loop-control") {
        Ok(true) => Ok(()),
        _ => Err("no loop devices".to_owned()),
    }
}

fn has_tool(name: &str) -> Result<(), String> {
    let found = path_of(name).is_some();
    if found { Ok(()) } else { Err(format!("no {name} (scripts/setup installs it)")) }
}
