//! How far the kernel reads ahead in a mount.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};

use crate::mounts::Mounted;

/// A large file is read half again to twice as fast as by 128 KiB, and no faster by more.
const READ_AHEAD_KIB: u32 = 512;
/// Where the kernel tells of what it reads ahead, and is told.
const DIRECTORY: &str = "/sys/class/bdi";
/// Source: `SYSFS_MAGIC` of `linux/magic.h`.
const SYSFS_MAGIC: u32 = 0x6265_6572;

/// Where it is said. Found before another mount namespace is entered: by that name somebody else may have put links there to what root
/// alone can write.
pub struct ReadAhead(Option<OwnedFd>);

impl ReadAhead {
    /// Of the namespace in which this process is. Who has none goes on without.
    pub fn here() -> Self {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self(rustix::fs::open(DIRECTORY, flags, Mode::empty()).ok())
    }

    /// Has the kernel read further ahead, and ask for as much at once: where a server may only ask for less than its 128 KiB, root may
    /// say more. Others go on with that.
    pub fn set(&self, mounted: &Mounted) {
        for kind in ["", "-fuseblk"] {
            let _ = self.say(&format!("{}{kind}/read_ahead_kb", mounted.device));
        }
    }

    fn say(&self, name: &str) -> io::Result<()> {
        let Some(directory) = &self.0 else { return Ok(()) };
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, name, flags, Mode::empty())?;
        if u32::try_from(rustix::fs::fstatfs(&file)?.f_type) != Ok(SYSFS_MAGIC) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        File::from(file).write_all(READ_AHEAD_KIB.to_string().as_bytes())
    }
}
