//! What the process that serves finds before it enters another mount namespace, where somebody else may have put anything by its name, or nothing.

use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Mode, OFlags};

use crate::read_ahead::ReadAhead;

/// It is of the namespace in which this process was started.
pub struct Outside {
    /// How far the kernel reads ahead.
    pub read_ahead: ReadAhead,
    nowhere: Option<OwnedFd>,
}

impl Outside {
    /// Finds it. Who has none goes on without.
    pub fn here() -> Self {
        Self { read_ahead: ReadAhead::here(), nowhere: open_null() }
    }

    /// Lets go of what the caller has given to say something to.
    pub fn say_no_more(&self) {
        if let Some(nowhere) = &self.nowhere {
            let _ = rustix::stdio::dup2_stdout(nowhere);
            let _ = rustix::stdio::dup2_stderr(nowhere);
        }
    }
}

/// The device that takes everything.
fn open_null() -> Option<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open("/dev/null", flags, Mode::empty()).ok()?;
    let about = rustix::fs::fstat(&opened).ok()?;
    let is_device = FileType::from_raw_mode(about.st_mode) == FileType::CharacterDevice;
    (is_device && about.st_rdev == rustix::fs::makedev(1, 3)).then_some(opened)
}
