//! Work beside those who read and write, in threads that the owner lends: what is dirty goes to the medium while more is
//! written, and what will be read next comes while the last is looked at.
//!
//! Without such a thread all is done by the callers themselves, in time.
//!
//! Lock order: none of the locks here is held while a file is asked for anything.

use std::collections::VecDeque;
use std::sync::Weak;
use std::time::Duration;

use ubtrfs_rt::{Arc, AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering};

use super::{CachedFile, PageCache};
use crate::offset::{FileOffset, FileRange};

/// Requests that wait at most: who reads further on than these were for has read them himself.
const REQUESTS_MAX: usize = 64;
/// A look at least so often, as time passes and others write, too.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// At most so often where what should be written cannot be at the moment, or is on its way by others.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Tells services of a [`PageCache`] to end, by [`PageCache::end_services()`].
#[derive(Debug, Default)]
pub struct ServiceEnd(AtomicBool);

impl ServiceEnd {
    fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// What is to be read ahead.
#[derive(Default)]
pub(super) struct AheadQueue {
    requests: Mutex<VecDeque<AheadRequest>>,
    came: Condvar,
    server_count: AtomicUsize,
}

struct AheadRequest {
    file: Weak<dyn CachedFile>,
    range: FileRange,
    /// What lies before is behind who asked, and may have gone from memory again.
    passed: Arc<AtomicU64>,
}

/// What of a request lies not before `passed`.
fn left_of(range: FileRange, passed: u64) -> FileRange {
    FileRange::new(range.start.max(FileOffset::new(passed)).min(range.end), range.end)
}

impl PageCache {
    /// Reads ahead for those who read sequentially, until told to end. Threads may serve together.
    pub fn serve_readahead(&self, end: &ServiceEnd) {
        self.ahead.server_count.fetch_add(1, Ordering::Relaxed);
        while let Some(request) = self.next_request(end) {
            let left = left_of(request.range, request.passed.load(Ordering::Relaxed));
            if !left.is_empty()
                && let Some(file) = request.file.upgrade()
            {
                file.read_ahead(left);
            }
        }
        self.ahead.server_count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Does [`PageCache::background_pass()`] whenever there is something for it to do, until told to end. `now_ms` is the clock.
    pub fn serve_writeback(&self, end: &ServiceEnd, now_ms: impl Fn() -> u64) {
        self.writeback_server_count.fetch_add(1, Ordering::Relaxed);
        self.write_back_until(end, now_ms);
        self.writeback_server_count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether somebody writes back beside those who write.
    pub fn has_writeback_service(&self) -> bool {
        self.writeback_server_count.load(Ordering::Relaxed) > 0
    }

    fn write_back_until(&self, end: &ServiceEnd, now_ms: impl Fn() -> u64) {
        while !end.is_set() {
            let now = now_ms();
            let due_count = self.dirty.lock().due_count;
            let (written_bytes, next_due) = self.pass(now, || end.is_set());
            let mut dirty = self.dirty.lock();
            if end.is_set() {
                break;
            }
            let is_too_much = self.usage.dirty_bytes() > self.options.dirty_bytes_background;
            // What became due during the pass it may have missed, and the wake-up as well.
            let goes_on = written_bytes > 0 || dirty.due_count != due_count;
            let wait = match next_due {
                _ if is_too_much && goes_on => continue,
                _ if is_too_much => LOOK_AGAIN,
                Some(due) => {
                    Duration::from_millis(due.saturating_sub(now)).clamp(LOOK_AGAIN, LOOK_EVERY)
                }
                None => LOOK_EVERY,
            };
            // Woken too early it finds nothing to do, which harms nobody.
            let _ = self.became_due.wait_for(&mut dirty, wait);
        }
    }

    /// Ends the services that were given `end`, after what they are at.
    pub fn end_services(&self, end: &ServiceEnd) {
        end.0.store(true, Ordering::Release);
        // Under the locks, so that nobody is between his look and his wait.
        let requests = self.ahead.requests.lock();
        self.ahead.came.notify_all();
        drop(requests);
        let dirty = self.dirty.lock();
        self.became_due.notify_all();
        drop(dirty);
    }

    /// Whether somebody reads ahead if asked to.
    pub(crate) fn has_readahead_service(&self) -> bool {
        self.ahead.server_count.load(Ordering::Relaxed) > 0
    }

    /// Asks for a range to be read before it is needed, but for what lies before `passed` by then.
    pub(crate) fn ask_readahead(
        &self,
        file: Weak<dyn CachedFile>,
        range: FileRange,
        passed: &Arc<AtomicU64>,
    ) {
        let mut requests = self.ahead.requests.lock();
        let oldest = if requests.len() < REQUESTS_MAX { None } else { requests.pop_front() };
        requests.push_back(AheadRequest { file, range, passed: Arc::clone(passed) });
        drop(requests);
        drop(oldest);
        self.ahead.came.notify_one();
    }

    /// So much more is dirty. Called with a file's pages locked.
    pub(crate) fn add_dirty(&self, len_bytes: u64) {
        let before = self.usage.add_dirty(len_bytes);
        let limit = self.options.dirty_bytes_background;
        if before <= limit && before.saturating_add(len_bytes) > limit {
            let mut dirty = self.dirty.lock();
            dirty.due_count += 1;
            self.became_due.notify_all();
            drop(dirty);
        }
    }

    /// So much less is dirty, as it is on its way or gone: who waits for that goes on at once, beside what takes it to the medium. Called with
    /// a file's pages locked.
    pub(crate) fn subtract_dirty(&self, len_bytes: u64) {
        let before = self.usage.subtract_dirty(len_bytes);
        let limit = self.options.dirty_bytes_max;
        if before > limit && before.saturating_sub(len_bytes) <= limit {
            // Under the lock, so that nobody is between his look and his wait.
            let dirty = self.dirty.lock();
            self.turn_ended.notify_all();
            drop(dirty);
        }
    }

    fn next_request(&self, end: &ServiceEnd) -> Option<AheadRequest> {
        let mut requests = self.ahead.requests.lock();
        loop {
            if end.is_set() {
                return None;
            }
            if let Some(request) = requests.pop_front() {
                return Some(request);
            }
            self.ahead.came.wait(&mut requests);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A service that comes late would read again what the reader had and dropped.
    #[test]
    fn request_is_for_what_is_not_behind_who_asked() {
        let range = FileRange::new(FileOffset::new(100), FileOffset::new(200));
        let left = |passed| {
            let left = left_of(range, passed);
            (left.start.bytes(), left.end.bytes())
        };
        assert_eq!([0, 150, 201].map(left), [(100, 200), (150, 200), (200, 200)]);
    }
}
