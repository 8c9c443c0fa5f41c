//! Where requests come from and answers go: the seam at which another way than `/dev/fuse` can take
//! its place.
//!
//! Queues of io_uring (`ring_threads`) stand beside this seam, not behind it: they take the
//! kernel's device from [`Transport::device`], and receive and answer requests by threads of their
//! own that call none of the other functions. Only a queue that fails says so, by
//! [`Transport::stop`]. INIT, FORGET, INTERRUPT, and what the kernel is told unasked, go this way
//! still. A transport without a device has no queues.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use ubtrfs_rt::{AtomicBool, Ordering};

use crate::mount::MountedDevice;

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
    /// The system's; `NOENT` where the request was interrupted and nobody waits for its answer, `INVAL` where the answer is malformed,
    /// and the request has failed by that.
    fn send(&self, answer: &[u8]) -> Result<(), Errno>;

    /// The device to which queues of io_uring can be registered, if it is one: what they take does
    /// not come by [`Transport::receive`].
    fn device(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// What has the kernel open and close the file `name` of the directory that is mounted, where
    /// that can be done. It waits for answers to requests, and does not keep the connection.
    fn opener(&self, _name: &str) -> Option<Box<dyn FnOnce() + Send>> {
        None
    }

    /// It is the end for all who look for requests here, though the filesystem is mounted yet.
    fn stop(&self);
}

/// `/dev/fuse`: a request is one `read`, its answer one `write`.
#[derive(Debug)]
pub struct FuseDevice {
    device: OwnedFd,
    directory: PathBuf,
    is_stopped: AtomicBool,
    /// Readable once it is.
    stopped: OwnedFd,
}

impl FuseDevice {
    /// Takes over the device of a mount.
    ///
    /// # Errors
    /// The system's, where reading it cannot be made not to wait.
    pub fn new(mounted: MountedDevice) -> Result<Self, Errno> {
        let MountedDevice { device, directory } = mounted;
        let flags = fcntl_getfl(&device)?;
        fcntl_setfl(&device, flags | OFlags::NONBLOCK)?;
        let stopped = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { device, directory, is_stopped: AtomicBool::new(false), stopped })
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

    fn opener(&self, name: &str) -> Option<Box<dyn FnOnce() + Send>> {
        let path = self.directory.join(name);
        Some(Box::new(move || drop(File::open(path))))
    }

    fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        // Nothing reads it, so there is room.
        let _ = rustix::io::write(&self.stopped, &1_u64.to_ne_bytes());
    }
}
