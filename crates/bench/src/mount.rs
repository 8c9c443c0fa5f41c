//! The kernel's filesystems over images.

use std::path::{Path, PathBuf};

use tempfile::TempDir;
use ubtrfs_testkit::{LoopDevice, Oracle, command, oracle};

use crate::child;
use crate::error::{Error, Result};

/// Takes a competitor's image; all of it a hole at first. As long as ours.
const IMAGE_BYTES: u64 = 8 << 30;
/// Of [`Room::Vast`]: btrfs promises a reservation of 256 KiB for each extent of 131,072 with delalloc only where it could allocate a
/// multiple of that.
const VAST_BYTES: u64 = 8 << 40;
const UNMOUNT_TRIES: usize = 50;

/// How long an image is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Room {
    #[default]
    Plain,
    /// So long that btrfs writes nothing back for want of space to reserve, if the scratch directory can have such a file. It takes no
    /// more memory or disk, as what is not written is a hole.
    Vast,
}

/// How a filesystem of the kernel is made and mounted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Setup<'a> {
    /// What follows `mount -o`.
    pub(crate) options: &'a str,
    pub(crate) room: Room,
}

/// A filesystem of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kernel {
    Btrfs,
    Xfs,
}

impl Kernel {
    pub(crate) const BOTH: [Self; 2] = [Self::Btrfs, Self::Xfs];

    /// As a table names it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Btrfs => "kernel btrfs",
            Self::Xfs => "kernel xfs",
        }
    }

    fn kind(self) -> &'static str {
        match self {
            Self::Btrfs => "btrfs",
            Self::Xfs => "xfs",
        }
    }

    /// Why it cannot compete, if it cannot.
    pub(crate) fn available(self) -> std::result::Result<(), String> {
        // Root and loop devices are what both need.
        oracle::available(Oracle::KernelBtrfs)?;
        if self == Self::Btrfs {
            return Ok(());
        }
        let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
        if !known.lines().any(|line| line.trim() == "xfs") {
            return Err("the running kernel has no xfs".to_owned());
        }
        let mkfs = command("mkfs.xfs").arg("-V").output();
        match mkfs {
            Ok(output) if output.status.success() => Ok(()),
            _ => Err("mkfs.xfs is missing (Debian's xfsprogs)".to_owned()),
        }
    }

    /// Makes one in `image`.
    ///
    /// # Errors
    /// What mkfs said.
    pub(crate) fn make(self, image: &Path, room: Room) -> Result<()> {
        let make = || {
            let file = std::fs::File::create(image)?;
            if room == Room::Vast && file.set_len(VAST_BYTES).is_ok() {
                return Ok(());
            }
            file.set_len(IMAGE_BYTES)
        };
        make().map_err(Error::io(format!("make {}", image.display())))?;
        let mut mkfs = command(&format!("mkfs.{}", self.kind()));
        mkfs.arg(if self == Self::Btrfs { "--quiet" } else { "-q" });
        child::run(mkfs.arg(image)).map(drop)
    }
}

/// A mounted image; unmounted when dropped.
pub(crate) struct Mount {
    directory: Option<TempDir>,
    _device: LoopDevice,
}

impl Mount {
    /// Mounts an image. Freed space is not given back: ours does that on request only.
    ///
    /// # Errors
    /// What mount said.
    pub(crate) fn new(kernel: Kernel, image: &Path, options: &str) -> Result<Self> {
        let device = LoopDevice::attach(image, false);
        let directory = tempfile::Builder::new()
            .prefix("ubtrfs-bench-mount-")
            .tempdir()
            .map_err(Error::io("make a directory to mount at"))?;
        let options = if options.is_empty() {
            "nodiscard".to_owned()
        } else {
            format!("nodiscard,{options}")
        };
        let mut mount = command("mount");
        mount.args(["-t", kernel.kind(), "-o", &options]).arg(device.path()).arg(directory.path());
        child::run(&mut mount)?;
        Ok(Self { directory: Some(directory), _device: device })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.as_ref().map_or_else(PathBuf::new, |directory| directory.path().to_owned())
    }

    /// Unmounts it, and waits until everything is on the image.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn end(mut self) -> Result<()> {
        self.unmount()
    }

    fn unmount(&mut self) -> Result<()> {
        let Some(directory) = self.directory.take() else { return Ok(()) };
        let mut last = Ok(());
        for _ in 0..UNMOUNT_TRIES {
            last = child::run(command("umount").arg(directory.path())).map(drop);
            if last.is_ok() {
                let path = directory.path().to_owned();
                return directory.close().map_err(Error::io(format!("remove {}", path.display())));
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        // What could not be unmounted must not be deleted by name.
        let _ = directory.keep();
        last
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // After an error of the work itself, that one is told.
        let _ = self.unmount();
    }
}
