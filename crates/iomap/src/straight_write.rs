//! Writing straight from the writer's buffer: a file that grows by large writes to more than memory keeps would be copied there only to
//! be copied once more, and drive out what memory holds.
//!
//! Only what lies behind the end of the file is written so: nobody has seen it, so nothing of it is dirty. What cannot be written so goes
//! through memory, and an error is told as one of writeback is.

use crate::address_space::AddressSpace;
use crate::mapping::FileSystem;
use crate::offset::FileRange;

impl<F: FileSystem> AddressSpace<F> {
    /// Writes the front of `range`, which the caller has locked, straight, if it makes a long file longer; returns how many bytes, in
    /// whole blocks. On the device, but durable only with [`crate::OpenFile::fsync()`].
    pub(crate) fn write_straight(&self, range: FileRange, bytes: &[u8]) -> usize {
        let mut done = 0;
        if !self.may_write_straight(range) {
            return done;
        }
        let mut rest = FileRange::new(range.start, range.end.round_down(self.block_bytes));
        while !rest.is_empty() {
            let step_bytes = self.cache.options().writeback_bytes_max.max(self.block_bytes);
            let end = rest.start.saturating_add(step_bytes).round_down(self.block_bytes);
            let step = FileRange::new(rest.start, end.min(rest.end));
            let Ok(len) = usize::try_from(step.len_bytes()) else { break };
            if len == 0 {
                break;
            }
            // An error comes again where the rest goes through memory, or it has passed by then.
            let Ok(done_bytes) = self.write_device(step, &bytes[done..done + len]) else { break };
            self.cache.usage().count_run(done_bytes);
            done += usize::try_from(done_bytes).unwrap_or(len);
            rest.start = step.start.saturating_add(done_bytes);
            if done_bytes < step.len_bytes() {
                break;
            }
        }
        done
    }

    fn may_write_straight(&self, range: FileRange) -> bool {
        let options = self.cache.options();
        let is_whole = range.start.bytes().is_multiple_of(self.block_bytes);
        let end = range.end.round_down(self.block_bytes);
        let is_kept = options.keeps_clean && end.bytes() <= options.cached_bytes_max;
        is_whole
            && range.start == self.size()
            && end > range.start
            && end.bytes_since(range.start) >= options.straight_write_bytes_min
            && range.start.bytes() >= options.dirty_bytes_background
            && !is_kept
            && self.filesystem.may_write_straight(&self.inode)
    }
}
