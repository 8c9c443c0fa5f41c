//! Where requests come from and answers go: the seam at which another way than `/dev/fuse` can take its place.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use ubtrfs_rt::{AtomicBool, Ordering};

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

    /// The device to which queues of io_uring can be registered, if it is one.
    fn device(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// It is the end for all who look for requests here, though the filesystem is mounted yet.
    fn stop(&self);
}

/// `/dev/fuse`: a request is one `read`, its answer one `write`.
#[derive(Debug)]
pub struct FuseDevice {
    device: OwnedFd,
    is_stopped: AtomicBool,
    /// Readable once it is.
    stopped: OwnedFd,
}

impl FuseDevice {
    /// Takes over a device that a mount belongs to.
    ///
    /// # Errors
    /// The system's, where reading it cannot be made not to wait.
    pub fn new(device: OwnedFd) -> Result<Self, Errno> {
        let flags = fcntl_getfl(&device)?;
        fcntl_setfl(&device, flags | OFlags::NONBLOCK)?;
        let stopped = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { device, is_stopped: AtomicBool::new(false), stopped })
    }
}

impl Transport for FuseDevice {
    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        loop {
            match rustix::io::read(&self.device, &mut *buffer) {
                Ok(len) => return Ok(Received::Request(len)),
                Err(Errno::AGAIN) if self.is_stopped.load(Ordering::Acquire) => {
                    return Ok(Received::End);
                }
                Err(Errno::AGAIN) => return Ok(Received::Nothing),
                Err(Errno::NODEV) => return Ok(Received::End),
                // NOENT: the request was withdrawn while it was read.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    fn wait(&self) -> Result<(), Errno> {
        let [device, stopped] =
            [&self.device, &self.stopped].map(|fd| PollFd::new(fd, PollFlags::IN));
        match poll(&mut [device, stopped], None) {
            // Who looks then finds out.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    fn has_request(&self) -> bool {
        let ready =
            poll(&mut [PollFd::new(&self.device, PollFlags::IN)], Some(&Timespec::default()));
        ready.is_ok_and(|ready| ready > 0)
    }

    fn send(&self, answer: &[u8]) -> Result<(), Errno> {
        rustix::io::retry_on_intr(|| rustix::io::write(&self.device, answer)).map(|_| ())
    }

    fn device(&self) -> Option<BorrowedFd<'_>> {
        Some(self.device.as_fd())
    }

    fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        // Nothing reads it, so there is room.
        let _ = rustix::io::write(&self.stopped, &1_u64.to_ne_bytes());
    }
}
