//! Where requests come from and answers go: the seam at which another way than `/dev/fuse` can take
//! its place.
//!
//! - [`Transport`]: a connection. Whoever looks for a request may take the next one, and any thread may
//!   send an answer. It may have further ways ([`Transport::further_way`]), one for a thread: whoever
//!   takes the next request, any thread may answer it, but by the way that it was taken by (`owed`).
//! - [`Queues`]: where a connection has them, most requests come by these, each answered where it came
//!   from: io_uring (`ring`), or a virtual machine's queues. INIT, FORGET, INTERRUPT, and what the kernel
//!   is told unasked, go by the connection itself still.
//!
//! Who serves knows these two and no kind of them.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use ubtrfs_rt::{Arc, AtomicBool, Mutex, Ordering};

use crate::clones::clone_of;
use crate::message::{Answer, Request};
use crate::mount::{self, MountedDevice};
use crate::own;
use crate::ring::Rings;

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

    /// A way of its own for one more thread that looks for requests, while there is one. What was received by it is to be sent
    /// by it, and by no other; what nobody asked for may go by any. It ends and is stopped with the
    /// connection. Without one a thread shares this.
    fn further_way(&self) -> Option<Arc<dyn Transport>> {
        None
    }

    /// Queues of its own, where it can have some: asked for once, before the first request is answered, and
    /// only where the kernel offers them and they are wanted. What they take does not come by
    /// [`Transport::receive`].
    fn queues(&self) -> Option<Arc<dyn Queues>> {
        None
    }

    /// What has the kernel open and close the file `name` of the directory that is mounted, where
    /// that can be done. It waits for answers to requests, and does not keep the connection.
    fn opener(&self, _name: &str) -> Option<Box<dyn FnOnce() + Send>> {
        None
    }

    /// It is the end for all who look for requests here, though the filesystem is mounted yet.
    fn stop(&self);

    /// It is the end for the kernel, too: all requests fail, and who waits until it has taken a notification waits no more. `device` is the
    /// mount's device number, as `/proc` writes it, where that is known. What cannot be done is not.
    fn abort(&self, device: Option<&str>);
}

/// Who answers what comes by [`Queues`]. Threads share it.
pub trait Answers: Sync {
    /// Does what a request asks for. Returns its answer, put together in `memory`, header and all.
    fn answer_to<'a>(&self, request: Request<'_>, memory: &'a mut Answer) -> &'a [u8];

    /// Whether the answer may take long, or have to wait for answers to others: no queue's own thread
    /// should give it.
    fn takes_long(&self, request: Request<'_>) -> bool;
}

/// Queues of a connection, by which requests come and answers go. Each has a thread of its own; they share
/// a pool of threads for what takes long.
pub trait Queues: Send + Sync {
    /// Number of queues, each of which wants a thread in [`Queues::run_queue`].
    fn queue_count(&self) -> usize;

    /// Number of threads that [`Queues::run_pool`] is to have.
    fn pool_count(&self) -> usize;

    /// Serves the queue of this number until the filesystem is unmounted, or any queue has failed.
    fn run_queue(&self, number: usize, answers: &dyn Answers);

    /// Does what takes long, until [`Queues::end_pool`].
    fn run_pool(&self, answers: &dyn Answers);

    /// Lets the pool's threads go when they have done what waits. Called when all queues have ended.
    fn end_pool(&self);

    /// Ends all queues though the filesystem may be mounted yet.
    fn fail(&self, errno: Errno);

    /// Why a queue ended before its time.
    fn failure(&self) -> Option<Errno>;
}

/// `/dev/fuse`: a request is one `read`, its answer one `write`.
#[derive(Debug)]
pub struct FuseDevice {
    device: Arc<OwnedFd>,
    directory: PathBuf,
    stop: Arc<Stop>,
    /// For threads to come.
    clones: Mutex<Vec<OwnedFd>>,
}

/// The end for all who look for requests at a connection.
#[derive(Debug)]
struct Stop {
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
        let stop = Arc::new(Stop { is_stopped: AtomicBool::new(false), stopped });
        Ok(Self { device: Arc::new(device), directory, stop, clones: Mutex::default() })
    }

    /// Has so many further threads take requests by descriptors of their own, as `-o clone_fd` does with libfuse: to be called before it is
    /// served, with [`Server::further_threads`](crate::Server::further_threads).
    ///
    /// # Errors
    /// The system's, where there is not one for each; then all share the one that there is.
    pub fn clone_for_threads(&self, count: usize) -> Result<(), Errno> {
        let clones: Result<Vec<_>, _> = (0..count).map(|_| clone_of(self.device.as_fd())).collect();
        *self.clones.lock() = clones?;
        Ok(())
    }
}

impl Transport for FuseDevice {
    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        loop {
            match rustix::io::read(&self.device, &mut *buffer) {
                Ok(len) => return Ok(Received::Request(len)),
                Err(Errno::AGAIN) if self.stop.is_stopped.load(Ordering::Acquire) => {
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
            [&*self.device, &self.stop.stopped].map(|fd| PollFd::new(fd, PollFlags::IN));
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

    fn further_way(&self) -> Option<Arc<dyn Transport>> {
        let device = Arc::new(self.clones.lock().pop()?);
        let (directory, stop) = (self.directory.clone(), Arc::clone(&self.stop));
        Some(Arc::new(Self { device, directory, stop, clones: Mutex::default() }))
    }

    fn queues(&self) -> Option<Arc<dyn Queues>> {
        Some(Rings::prepare(Arc::clone(&self.device))?)
    }

    fn opener(&self, name: &str) -> Option<Box<dyn FnOnce() + Send>> {
        let path = self.directory.join(name);
        Some(Box::new(move || drop(File::open(path))))
    }

    fn stop(&self) {
        self.stop.is_stopped.store(true, Ordering::Release);
        // Nothing reads it, so there is room.
        let _ = rustix::io::write(&self.stop.stopped, &1_u64.to_ne_bytes());
    }

    fn abort(&self, device: Option<&str>) {
        let Some(device) = device.filter(|_| !self.has_ended()) else { return };
        let ended = connection_of(device).is_some_and(|number| own::end_connection(number).is_ok());
        // What the kernel tells of connections is to be seen where somebody has mounted it only. Others than root can do nothing else.
        if !ended && own::user().is_root() {
            let _ = mount::end_by_force(&self.directory, device);
        }
    }
}

/// The number of a connection: of the mount's device, as the kernel has it.
fn connection_of(device: &str) -> Option<u32> {
    const MINOR_BITS: u32 = 20;
    let (major, minor) = device.split_once(':')?;
    let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
    Some(major << MINOR_BITS | minor)
}

impl FuseDevice {
    /// Whether it is unmounted: its number may be another's by now.
    fn has_ended(&self) -> bool {
        let mut device = [PollFd::new(&self.device, PollFlags::IN)];
        let looked = poll(&mut device, Some(&Timespec::default()));
        looked.is_err() || device[0].revents().contains(PollFlags::ERR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_has_the_number_of_its_device() {
        // Of a mount that holds no block device, and of one that does.
        let found = ["0:53", "8:17", "", "0", "a:b"].map(connection_of);
        assert_eq!(found, [Some(53), Some(8 << 20 | 17), None, None, None]);
    }
}
