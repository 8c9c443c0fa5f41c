//! Requests that are done whole by a thread beside, which answers them, as they may wait for the kernel as long as others take:
//!
//! 1. ioctls before which it writes what it holds of a subvolume's files, or of a file that is closed to changes. It writes by requests, which the
//!    threads that serve are to answer.
//! 2. ioctls that make or delete a subvolume, whose name it is to forget. For that it takes the directory's lock, which who makes a file there
//!    has until he is answered.
//! 3. Direct writes behind the end of a file of which it holds the last page (`tail`), which it writes first.
//!
//! So none of the threads that serve waits for that; who is done beside waits as long as it takes, be it for others who do the same. There are as many
//! such threads as callers wait, and no other bound: of each caller there is one request. Where the system gives no thread, and by rings, which take answers
//! from nobody else, it is done by who took it (of rings: in their pool), and not waited for long ([`Patience`]).
//!
//! Serving ends when all have been done ([`Handed::wait`]): nothing is changed after that, and nobody holds the filesystem.
//!
//! [`Patience`]: crate::notify::Patience

use rustix::io::Errno;
use ubtrfs_engine::InodeId;
use ubtrfs_rt::{Arc, Condvar, Mutex};

use crate::abi::{IoctlIn, opcode};
use crate::message::{Answer, Request};
use crate::notify::note_thread_answers;
use crate::ops::subvolumes::waits_for_kernel;
use crate::server::Server;

/// How many requests are being done by others.
#[derive(Default)]
pub(crate) struct Handed {
    count: Mutex<usize>,
    is_done: Condvar,
}

/// One of them, until it is dropped.
struct Counted(Arc<Handed>);

impl Counted {
    fn new(handed: &Arc<Handed>) -> Self {
        *handed.count.lock() += 1;
        Self(Arc::clone(handed))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        *self.0.count.lock() -= 1;
        self.0.is_done.notify_all();
    }
}

impl Handed {
    /// Waits until all are done.
    pub(crate) fn wait(&self) {
        let mut count = self.count.lock();
        while *count > 0 {
            self.is_done.wait(&mut count);
        }
    }
}

impl Server {
    /// Has a request that may wait long done and answered by a thread beside. Returns whether it is: not where only who took it may answer it, or
    /// there is no thread.
    pub(crate) fn hand_over(&self, id: InodeId, request: Request<'_>, answer: &mut Answer) -> bool {
        let Some(owed) = answer.owed().cloned().filter(|_| self.may_wait_long(id, request)) else {
            return false;
        };
        let Some(server) = self.itself.upgrade() else {
            return false;
        };
        let (request, counted) = (request.copied(), Counted::new(&self.handed));
        let begun = self.beside.run(move || {
            note_thread_answers();
            let mut answer = Answer::beside();
            let bytes = answer.finish_with(owed.unique(), |answer| {
                server.answer(request.as_request(), answer).unwrap_or(Err(Errno::NOSYS))
            });
            // Who waits for the end may close what is served.
            drop(server);
            owed.send(bytes);
            drop(owed);
            drop(counted);
        });
        if begun.is_ok() {
            answer.note_sent();
        }
        begun.is_ok()
    }

    /// Whether who does it may wait for the kernel as long as others take.
    fn may_wait_long(&self, id: InodeId, mut request: Request<'_>) -> bool {
        match request.header.opcode {
            opcode::IOCTL => request.take::<IoctlIn>().is_ok_and(|wanted| {
                waits_for_kernel(wanted.cmd) || self.closes_file(id, wanted.cmd, request)
            }),
            opcode::WRITE => self.direct_write_waits(id, request),
            _ => false,
        }
    }
}
