//! Where requests come from and answers go: the seam at which another way than `/dev/fuse` can take its place.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

/// What came of looking for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Received {
    /// One of so many bytes.
    Request(usize),
    /// None so far.
    Nothing,
    /// None any more: the filesystem is unmounted.
    End,
}

/// A connection to a kernel that has the filesystem mounted. Threads share it.
pub trait Transport: Send + Sync {
    /// Puts a request into `buffer`, if there is one, without waiting.
    ///
    /// # Errors
    /// The system's.
    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno>;

    /// Waits until there is a request, or the end.
    ///
    /// # Errors
    /// The system's.
    fn wait(&self) -> Result<(), Errno>;

    /// Whether a request waits.
    fn has_request(&self) -> bool;

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
    ///
    /// # Errors
    /// The system's, where reading it cannot be made not to wait.
    pub fn new(device: OwnedFd) -> Result<Self, Errno> {
        let flags = fcntl_getfl(&device)?;
        fcntl_setfl(&device, flags | OFlags::NONBLOCK)?;
        Ok(Self { device })
    }

    fn poll(&self, timeout: Option<&Timespec>) -> Result<usize, Errno> {
        poll(&mut [PollFd::new(&self.device, PollFlags::IN)], timeout)
    }
}

impl Transport for FuseDevice {
    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        loop {
            match rustix::io::read(&self.device, &mut *buffer) {
                Ok(len) => return Ok(Received::Request(len)),
                Err(Errno::AGAIN) => return Ok(Received::Nothing),
                Err(Errno::NODEV) => return Ok(Received::End),
                // NOENT: the request was withdrawn while it was read.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    fn wait(&self) -> Result<(), Errno> {
        match self.poll(None) {
            // Who looks then finds out.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    fn has_request(&self) -> bool {
        self.poll(Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    fn send(&self, answer: &[u8]) -> Result<(), Errno> {
        rustix::io::retry_on_intr(|| rustix::io::write(&self.device, answer)).map(|_| ())
    }
}
