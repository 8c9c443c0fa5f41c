//! The threads of a connection's queues, and of the pool that they share.
//!
//! The pool outlives the queues: a queue may hand something over until it ends, and ends only when that was answered.

use rustix::io::Errno;
use ubtrfs_rt::{Arc, Service};

use crate::leader::{Length, length_of};
use crate::message::{Answer, Request};
use crate::server::Server;
use crate::transport::{Answers, Queues, Transport};

impl Answers for Server {
    fn answer_to<'a>(&self, request: Request<'_>, memory: &'a mut Answer) -> &'a [u8] {
        // What waits for no answer does not come by queues.
        memory.finish_with(request.header.unique, |answer| {
            self.count_and_answer(request, answer).unwrap_or(Err(Errno::NOSYS))
        })
    }

    fn takes_long(&self, request: Request<'_>) -> bool {
        length_of(request.header.opcode) == Length::Long || self.waits_for_kernel(request)
    }
}

/// Threads that answer what comes by queues.
pub(crate) struct QueueThreads {
    queues: Arc<dyn Queues>,
    threads: Vec<Service>,
    pool: Vec<Service>,
}

impl QueueThreads {
    /// Starts them. Where that fails all of them end, as does the transport, and the connection for the kernel.
    pub(crate) fn spawn(
        queues: Arc<dyn Queues>,
        server: &Arc<Server>,
        transport: &Arc<dyn Transport>,
    ) -> Self {
        let mut threads = Self { queues, threads: Vec::new(), pool: Vec::new() };
        if threads.start(server, transport).is_err() {
            threads.fail(Errno::AGAIN);
            end(&**transport, server);
        }
        threads
    }

    fn start(
        &mut self,
        server: &Arc<Server>,
        transport: &Arc<dyn Transport>,
    ) -> std::io::Result<()> {
        let executor = server.fs.runtime().executor;
        for _ in 0..self.queues.pool_count() {
            let (server, queues) = (Arc::clone(server), Arc::clone(&self.queues));
            self.pool.extend(executor.spawn("ubtrfs-fuse", move || queues.run_pool(&*server))?);
        }
        for number in 0..self.queues.queue_count() {
            let (server, queues) = (Arc::clone(server), Arc::clone(&self.queues));
            let transport = Arc::clone(transport);
            let work = move || {
                queues.run_queue(number, &*server);
                if queues.failure().is_some() {
                    end(&*transport, &server);
                }
            };
            self.threads.extend(executor.spawn("ubtrfs-ring", work)?);
        }
        Ok(())
    }

    /// Ends the queues though the filesystem may be mounted yet.
    pub(crate) fn fail(&self, errno: Errno) {
        self.queues.fail(errno);
    }

    /// Waits until the queues have ended, then ends the pool. Returns why a queue ended before its time.
    pub(crate) fn join(self) -> Option<Errno> {
        self.threads.into_iter().for_each(Service::join);
        self.queues.end_pool();
        self.pool.into_iter().for_each(Service::join);
        self.queues.failure()
    }
}

/// A queue has failed: nobody takes what comes by it any more, and somebody may wait for that until the kernel hears so.
fn end(transport: &dyn Transport, server: &Server) {
    transport.stop();
    transport.abort(server.device());
}
