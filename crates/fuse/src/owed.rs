//! Answers that another thread sends than the one that took the request, or that are sent later.
//!
//! Where a connection has several ways ([`Transport::further_way`]) the kernel looks for a request among those that were taken by the way
//! that the answer comes by: by another one it finds none (`NOENT`), and who asked waits for ever. So whoever owes an answer keeps the way,
//! which stays open for it: with a way's last user the kernel lets all requests fail that were taken by it.

use ubtrfs_rt::Arc;

use crate::transport::Transport;

/// An answer that is owed to a request.
#[derive(Clone)]
pub(crate) struct Owed {
    unique: u64,
    /// By which the request came.
    way: Arc<dyn Transport>,
}

impl Owed {
    /// To the request of this number.
    pub(crate) fn new(unique: u64, way: &Arc<dyn Transport>) -> Self {
        Self { unique, way: Arc::clone(way) }
    }

    /// The request's number.
    pub(crate) fn unique(&self) -> u64 {
        self.unique
    }

    /// Sends the answer, header and all. One that went away needs none.
    pub(crate) fn send(&self, answer: &[u8]) {
        let _ = self.way.send(answer);
    }
}

impl std::fmt::Debug for Owed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Owed").field("unique", &self.unique).finish_non_exhaustive()
    }
}
