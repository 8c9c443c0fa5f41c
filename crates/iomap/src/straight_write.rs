//! Writing straight from the writer's buffer: a file that grows by large writes to more than memory keeps would be copied there only to
//! be copied once more, and drive out what memory holds.
//!
//! Only what lies behind the end of the file is written so: nobody has seen it, so nothing of it is dirty. What cannot be written so goes
//! through memory, and an error is told as one of writeback is.
//!
//! Where there is more to do than to copy, as to compress, those who write back do it beside ([`StraightWrites::Beside`]): memory is for
//! their share. A writer gives them what the background lets be, and does himself what comes before they have come on with that, where
//! he would have copied it and then waited for them. So a later part of a file may be on the medium, and by a commit part of the file
//! there, before an earlier one: as where two writebacks overtake each other, it shows zeros until it is made durable.

use crate::address_space::AddressSpace;
use crate::mapping::{FileSystem, StraightWrites, WritebackRun};
use crate::offset::FileRange;

impl<F: FileSystem> AddressSpace<F> {
    /// Whether a write of `range`, which the caller has locked, is one that may go straight: it makes a long file longer.
    pub(crate) fn straight_writes(&self, range: FileRange) -> StraightWrites {
        let options = self.cache.options();
        let is_whole = range.start.bytes().is_multiple_of(self.block_bytes);
        let end = range.end.round_down(self.block_bytes);
        let is_kept = options.keeps_clean && end.bytes() <= options.cached_bytes_max;
        let may = is_whole
            && range.start == self.size()
            && end > range.start
            && end.bytes_since(range.start) >= options.straight_write_bytes_min
            && range.start.bytes() >= options.dirty_bytes_background
            && !is_kept;
        if may { self.filesystem.straight_writes(&self.inode) } else { StraightWrites::Never }
    }

    /// Writes the front of `range`, which the caller has locked, straight; returns how many bytes, in whole blocks. On the device, but
    /// durable only with [`crate::OpenFile::fsync()`].
    pub(crate) fn write_straight(
        &self,
        range: FileRange,
        bytes: &[u8],
        straight: StraightWrites,
    ) -> usize {
        let mut done = 0;
        let mut rest = FileRange::new(range.start, range.end.round_down(self.block_bytes));
        while let Some(step) = self.straight_step(rest, straight) {
            let Ok(len) = usize::try_from(step.len_bytes()) else { break };
            let write = |run: &WritebackRun<'_>| self.filesystem.write_straight(&self.inode, run);
            // An error comes again where the rest goes through memory, or it has passed by then.
            let Ok(done_bytes) = self.write_device(step, &bytes[done..done + len], write) else {
                break;
            };
            self.cache.usage().count_straight_run(done_bytes);
            done += usize::try_from(done_bytes).unwrap_or(len);
            rest.start = step.start.saturating_add(done_bytes);
            if done_bytes < step.len_bytes() {
                break;
            }
        }
        done
    }

    /// How much of `rest` goes straight in one step now.
    fn straight_step(&self, rest: FileRange, straight: StraightWrites) -> Option<FileRange> {
        let options = self.cache.options();
        let step_bytes = match straight {
            StraightWrites::Never => return None,
            StraightWrites::Always => options.writeback_bytes_max,
            StraightWrites::Beside => {
                let has_enough = self.cache.dirty_bytes() > options.dirty_bytes_background;
                let is_long = rest.len_bytes() >= options.straight_write_bytes_min;
                // What came of the last step may decide about the next.
                let is_still = || self.filesystem.straight_writes(&self.inode) == straight;
                if !has_enough || !is_long || !is_still() {
                    return None;
                }
                options.straight_write_bytes_min
            }
        };
        let end = rest.start.saturating_add(step_bytes.max(self.block_bytes));
        let step = FileRange::new(rest.start, end.round_down(self.block_bytes).min(rest.end));
        (!step.is_empty()).then_some(step)
    }

    /// How much of `rest` goes to memory before more of it may go straight.
    pub(crate) fn memory_step(&self, rest: FileRange, straight: StraightWrites) -> FileRange {
        let step_bytes = self.cache.options().straight_write_bytes_min.max(self.block_bytes);
        if straight != StraightWrites::Beside || rest.len_bytes() <= step_bytes {
            return rest;
        }
        let end = rest.start.saturating_add(step_bytes).round_down(self.block_bytes);
        FileRange::new(rest.start, end)
    }
}
