//! Where requests come from and answers go: the seam at which another way than `/dev/fuse` can take its place.

use std::os::fd::OwnedFd;

use rustix::io::Errno;

/// A connection to a kernel that has the filesystem mounted. Threads share it.
pub trait Transport: Send + Sync {
    /// Waits for a request and puts it into `buffer`; returns its length, or `None` once the filesystem is unmounted.
    ///
    /// # Errors
    /// The system's.
    fn receive(&self, buffer: &mut [u8]) -> Result<Option<usize>, Errno>;

    /// Sends an answer, header and all, in one piece.
    ///
    /// # Errors
    /// The system's; `NOENT` where the request was interrupted and nobody waits for its answer.
    fn send(&self, answer: &[u8]) -> Result<(), Errno>;
}

/// `/dev/fuse`: a request is one `read`, its answer one `write`.
#[derive(Debug)]
pub struct FuseDevice {
    device: OwnedFd,
}

impl FuseDevice {
    /// Takes over a device that a mount belongs to.
    pub fn new(device: OwnedFd) -> Self {
        Self { device }
    }
}

impl Transport for FuseDevice {
    fn receive(&self, buffer: &mut [u8]) -> Result<Option<usize>, Errno> {
        loop {
            match rustix::io::read(&self.device, &mut *buffer) {
                Ok(len) => return Ok(Some(len)),
                // NOENT: the request was withdrawn while it was read.
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
                Err(Errno::NODEV) => return Ok(None),
                Err(errno) => return Err(errno),
            }
        }
    }

    fn send(&self, answer: &[u8]) -> Result<(), Errno> {
        rustix::io::retry_on_intr(|| rustix::io::write(&self.device, answer)).map(|_| ())
    }
}
