//! Blocks that somebody else reads before a walk comes to them, in threads that the owner of the filesystem lends.
//!
//! Without such a thread nobody is asked, and a walk reads its blocks when it comes to them.

use std::collections::VecDeque;

use ubtrfs_ondisk::{Key, RootId};
use ubtrfs_rt::{AtomicUsize, Condvar, Mutex, Ordering};

use super::store::{BlockPtr, Store};

/// Requests that wait at most: who walks faster than they are read has read their blocks himself.
const REQUESTS_MAX: usize = 8;

/// Of the memory for blocks so large a part, at most, is for what one walk has read ahead.
const BUDGET_PART: u64 = 8;

/// What is to be read.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    queue: Mutex<Queue>,
    changed: Condvar,
    reader_count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<Request>,
    /// Requests that are being read.
    reading_count: usize,
}

/// Blocks of one tree, with their first keys.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) root: RootId,
    pub(super) blocks: Vec<(BlockPtr, Key)>,
}

impl Store {
    /// Reads what walks will want, until `is_stopping` says so behind [`Store::wake_readers`]. Threads may serve together.
    pub(crate) fn serve_reads(&self, is_stopping: impl Fn() -> bool) {
        let _serving = Serving::new(&self.wanted);
        while let Some(Request { root, blocks }) = self.next_request(&is_stopping) {
            let _reading = Reading(&self.wanted);
            self.read_runs(blocks, root, || !is_stopping());
        }
    }

    /// Has all who serve look whether they are to stop.
    pub(crate) fn wake_readers(&self) {
        // Under the lock, so that nobody is between his look and his wait.
        let queue = self.wanted.queue.lock();
        self.wanted.changed.notify_all();
        drop(queue);
    }

    /// Whether so many bytes may be read ahead: somebody does it, and they are still in memory when they are wanted.
    pub(super) fn reads_beside(&self, len_bytes: usize) -> bool {
        self.has_reader() && self.clean_bytes_max() / BUDGET_PART >= len_bytes as u64
    }

    /// Whether somebody reads what is asked for.
    pub(crate) fn has_reader(&self) -> bool {
        self.wanted.reader_count.load(Ordering::Relaxed) > 0
    }

    /// Asks for blocks to be read before they are needed.
    pub(super) fn ask_for(&self, request: Request) {
        let mut queue = self.wanted.queue.lock();
        // The last one to serve may have gone.
        if !self.has_reader() {
            return;
        }
        if queue.requests.len() == REQUESTS_MAX {
            queue.requests.pop_front();
        }
        queue.requests.push_back(request);
        self.wanted.changed.notify_all();
    }

    fn next_request(&self, is_stopping: impl Fn() -> bool) -> Option<Request> {
        let mut queue = self.wanted.queue.lock();
        loop {
            if is_stopping() {
                return None;
            }
            if let Some(request) = queue.requests.pop_front() {
                queue.reading_count += 1;
                return Some(request);
            }
            self.wanted.changed.wait(&mut queue);
        }
    }

    /// Waits until all that was asked for has been read, or nobody reads.
    #[cfg(test)]
    pub(crate) fn wait_for_readers(&self) {
        let mut queue = self.wanted.queue.lock();
        while !queue.requests.is_empty() || queue.reading_count > 0 {
            self.wanted.changed.wait(&mut queue);
        }
    }
}

/// A thread that serves; nobody asks it any more also if that panics.
struct Serving<'a>(&'a Wanted);

impl<'a> Serving<'a> {
    fn new(wanted: &'a Wanted) -> Self {
        wanted.reader_count.fetch_add(1, Ordering::Relaxed);
        Self(wanted)
    }
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock();
        if self.0.reader_count.fetch_sub(1, Ordering::Relaxed) == 1 {
            queue.requests.clear();
            self.0.changed.notify_all();
        }
    }
}

/// A request that is being read; not any more also if that panics.
struct Reading<'a>(&'a Wanted);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.queue.lock().reading_count -= 1;
        self.0.changed.notify_all();
    }
}
