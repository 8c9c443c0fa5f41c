//! Requests that are done whole by a thread beside, which answers them: ioctls that wait until the kernel has written what it holds of a
//! subvolume's files.
//!
//! It writes by requests, which the threads that serve are to answer. So none of them waits for that; who is done beside waits as long as it
//! takes, be it for others who do the same. Only rings take answers from nobody else: there it is done in their pool, and not waited for
//! another for long ([`Patience`]).
//!
//! Serving ends when all have been done ([`Handed::wait`]): nothing is changed after that, and nobody holds the filesystem.

use ubtrfs_engine::InodeId;
use ubtrfs_rt::{Arc, Condvar, Mutex};

use crate::abi::IoctlOut;
use crate::message::{Answer, Request};
use crate::notify::{Patience, note_thread_answers};
use crate::server::{Server, send_answer};

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
    /// Has a request about subvolumes done and answered by a thread beside. Returns whether it is: not where only who took it may answer it, or
    /// there is no thread.
    pub(crate) fn hand_over_ioctl(
        &self,
        id: InodeId,
        command: u32,
        request: &Request<'_>,
        answer: &mut Answer,
    ) -> bool {
        let Some(unique) = answer.early_for() else { return false };
        let (Some(server), Some(transport)) = (self.itself.upgrade(), self.transport().cloned())
        else {
            return false;
        };
        let (request, counted) = (request.copied(), Counted::new(&self.handed));
        let begun = self.beside.run(move || {
            note_thread_answers();
            let mut answer = Answer::with_room(size_of::<IoctlOut>());
            let bytes = answer.finish_with(unique, |answer| {
                let request = request.as_request();
                server.subvolume_ioctl(id, command, request, Patience::Endless, answer)
            });
            // Who waits for the end may close what is served.
            drop(server);
            let _ = send_answer(&*transport, bytes);
            drop(transport);
            drop(counted);
        });
        if begun.is_ok() {
            answer.note_sent();
        }
        begun.is_ok()
    }
}
