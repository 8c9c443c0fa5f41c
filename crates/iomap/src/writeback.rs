//! From memory to the medium.
//!
//! A run of dirty blocks is taken as long as blocks touch, so that the filesystem can place it as few extents. While it is on its way
//! readers read it, and writers write to a copy.
//!
//! What the block that holds the end of the file has behind it is zeroed each time: a mapped store may have
//! put bytes there, at any time.

use ubtrfs_rt::MutexGuard;

use crate::address_space::{AddressSpace, OpenFile};
use crate::extent_state::{Conversion, CountQuery, Span, StateBits, Want};
use crate::mapping::{FileSystem, WritebackRun};
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::{FolioPart, Pages};

/// What to do about dirty blocks of which an older version is still on its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Busy {
    Wait,
    Skip,
}

impl<F: FileSystem> OpenFile<F> {
    /// Makes the file durable: its data, how it is mapped, and its size. All that was written before the call is
    /// durable when it returns without an error.
    ///
    /// # Errors
    /// That of the last writeback of this file that failed since the last call on this open file, whoever began it;
    /// the data of such a writeback is lost. Else that of making it durable.
    pub fn fsync(&self) -> Result<(), F::Error> {
        let all = FileRange::from(FileOffset::ZERO);
        // What others write behind the end from now on may not be on the device, so it is not of the file yet.
        let size_before = self.space.size();
        self.space.flush(all);
        let size = self.space.size().min(size_before);
        let synced = self.space.filesystem.sync(&self.space.inode, size);
        self.take_error()?;
        synced
    }

    /// The error of writeback that this open file was not told of yet.
    pub(crate) fn take_error(&self) -> Result<(), F::Error> {
        let mut seen = self.errors_seen.lock();
        let (error, mark) = self.space.errors.lock().since(*seen);
        *seen = mark;
        error.map_or(Ok(()), Err)
    }
}

impl<F: FileSystem> AddressSpace<F> {
    /// Brings to the device what is dirty in `range` and waits for what is on its way. Errors are kept for
    /// [`OpenFile::fsync()`]. Durable only after that.
    pub fn flush(&self, range: FileRange) {
        self.write_back_runs(range, u64::MAX, Busy::Wait);
        let blocks = self.blocks(range);
        let mut pages = self.pages.lock();
        let ticket = pages.next_ticket();
        while pages.has_writeback(&blocks, ticket) {
            self.ended.wait(&mut pages);
        }
        self.unlist_if_clean(&mut pages);
    }

    /// Brings about `bytes_max` dirty bytes to the device, but none of which an older version is on its way; returns how
    /// many.
    pub(crate) fn write_back_dirty(&self, range: FileRange, bytes_max: u64) -> u64 {
        self.write_back_runs(range, bytes_max, Busy::Skip)
    }

    fn write_back_runs(&self, range: FileRange, bytes_max: u64, busy: Busy) -> u64 {
        let range = range.round_out(self.block_bytes);
        let run_bytes_max = self.cache.options().writeback_bytes_max;
        let run_bytes_max =
            (run_bytes_max - run_bytes_max % self.block_bytes).max(self.block_bytes);
        let mut at = range.start;
        let mut done_bytes = 0;
        while done_bytes < bytes_max {
            let mut pages = self.pages.lock();
            let dirty = CountQuery {
                within: FileRange::new(at, range.end),
                want: Want::All(StateBits::DELALLOC),
                span: Span::Contiguous,
                bytes_max: run_bytes_max,
            };
            let Some(found) = self.states.count_range(dirty, None) else { break };
            let mut run = found.run();
            let ordered = CountQuery::first_run(run, Want::All(StateBits::ORDERED));
            if let Some(on_its_way) = self.states.count_range(ordered, None) {
                if on_its_way.start > run.start {
                    run.end = on_its_way.start;
                } else if busy == Busy::Skip {
                    at = on_its_way.run().end;
                    continue;
                } else {
                    self.ended.wait(&mut pages);
                    continue;
                }
            }
            at = run.end;
            done_bytes += run.len_bytes();
            self.write_run(pages, run);
        }
        done_bytes
    }

    /// Writes blocks that are all dirty and none of which is on its way.
    fn write_run(&self, mut pages: MutexGuard<'_, Pages>, range: FileRange) {
        let blocks = self.blocks(range);
        let size = self.size();
        if range.contains(size) {
            pages.zero_tail(size.bytes());
        }
        let (ticket, parts) = pages.begin_writeback(&blocks);
        let ordered = Conversion { set: StateBits::ORDERED, clear: StateBits::DELALLOC };
        self.states.convert(range, ordered);
        self.cache.usage().subtract_dirty(range.len_bytes());
        drop(pages);

        let buffers: Vec<&[u8]> = parts.iter().map(FolioPart::bytes).collect();
        let run = WritebackRun { range, buffers: &buffers, size };
        let result = self.filesystem.write_back(&self.inode, &run);
        drop(buffers);
        drop(parts);

        let mut pages = self.pages.lock();
        pages.end_writeback(ticket, result.is_err());
        // The mapping shows the data before the state goes: a seek that does not see the one sees the other.
        self.states.clear(range, StateBits::ORDERED);
        if !self.cache.options().keeps_clean {
            pages.drop_clean(&blocks);
        }
        if let Err(error) = result {
            self.errors.lock().record(error);
        }
        drop(pages);
        self.ended.notify_all();
    }
}
