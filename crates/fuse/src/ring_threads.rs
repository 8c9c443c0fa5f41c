//! The threads of the queues of io_uring, and of the pool that they share.
//!
//! The pool outlives the queues: a queue may hand something over until it ends, and ends only when that was answered.

use rustix::io::Errno;
use ubtrfs_rt::{Arc, Service};

use crate::message::{Answer, Request};
use crate::ring::Rings;
use crate::server::Server;
use crate::transport::Transport;

/// Threads that answer what comes by io_uring.
pub(crate) struct RingThreads {
    rings: Arc<Rings>,
    queues: Vec<Service>,
    pool: Vec<Service>,
}

impl RingThreads {
    /// Starts them. Where that fails all of them end, as does the transport.
    pub(crate) fn spawn(
        rings: &Arc<Rings>,
        server: &Arc<Server>,
        transport: &Arc<dyn Transport>,
    ) -> Self {
        let mut threads = Self { rings: Arc::clone(rings), queues: Vec::new(), pool: Vec::new() };
        if threads.start(server, transport).is_err() {
            rings.fail(Errno::AGAIN);
            transport.stop();
        }
        threads
    }

    fn start(
        &mut self,
        server: &Arc<Server>,
        transport: &Arc<dyn Transport>,
    ) -> std::io::Result<()> {
        let executor = server.fs.runtime().executor;
        for _ in 0..self.rings.pool_count() {
            let (server, rings) = (Arc::clone(server), Arc::clone(&self.rings));
            let work = move || {
                rings.run_pool(&|request, answer| server.count_and_answer(request, answer));
            };
            self.pool.extend(executor.spawn("ubtrfs-fuse", work)?);
        }
        for number in 0..self.rings.queue_count() {
            let (server, rings) = (Arc::clone(server), Arc::clone(&self.rings));
            let transport = Arc::clone(transport);
            let work = move || {
                if let Some(device) = transport.device() {
                    let answers = |request: Request<'_>, answer: &mut Answer| {
                        server.count_and_answer(request, answer)
                    };
                    let waits = |request: Request<'_>| server.waits_for_kernel(request);
                    rings.run_queue(number, device, &answers, &waits);
                    if rings.failure().is_some() {
                        transport.stop();
                    }
                }
            };
            self.queues.extend(executor.spawn("ubtrfs-ring", work)?);
        }
        Ok(())
    }

    /// Ends the queues though the filesystem may be mounted yet.
    pub(crate) fn fail(&self, errno: Errno) {
        self.rings.fail(errno);
    }

    /// Waits until the queues have ended, then ends the pool. Returns why a queue ended before its time.
    pub(crate) fn join(self) -> Option<Errno> {
        self.queues.into_iter().for_each(Service::join);
        self.rings.end_pool();
        self.pool.into_iter().for_each(Service::join);
        self.rings.failure()
    }
}
