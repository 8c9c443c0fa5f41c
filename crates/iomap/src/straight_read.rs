//! Reading straight into the reader's buffer: a file that is read from its beginning to its end and that memory cannot keep would
//! only drive out what memory holds, at the price of a second copy of each byte.
//!
//! The reader has the range locked, so that nobody writes there. What is in memory is taken from there; a run of whole blocks that is not
//! comes from the filesystem by the same protocol as a fill of the page cache, and is not kept.

use ubtrfs_rt::{MutexGuard, Ordering};

use crate::address_space::AddressSpace;
use crate::mapping::FileSystem;
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::{Blocks, Pages};

/// A file longer than this part of the cache's memory is not kept by it, as other files have their share, and what is written.
const CACHE_PART: u64 = 2;

impl<F: FileSystem> AddressSpace<F> {
    /// Whether reads of so many bytes may go past memory, if they go on from each other.
    pub(crate) fn may_read_straight(&self, len_bytes: u64) -> bool {
        let options = self.cache.options();
        let kept_bytes = options.cached_bytes_max / CACHE_PART;
        let is_kept = options.keeps_clean && self.size().bytes() <= kept_bytes;
        len_bytes >= options.straight_bytes_min
            && !is_kept
            && !self.is_encoded.load(Ordering::Relaxed)
    }

    /// The whole blocks of `missing` that a read of `rest` may get straight, if `rest` begins with enough of them.
    pub(crate) fn straight_blocks(
        &self,
        at: FileOffset,
        missing: &Blocks,
        rest: FileRange,
    ) -> Option<Blocks> {
        let whole_end = rest.end.bytes() / self.block_bytes;
        let blocks = missing.start..missing.end.min(whole_end);
        let is_aligned = at.bytes() == blocks.start * self.block_bytes;
        let range = is_aligned.then(|| self.range_of(&blocks))?;
        (range.len_bytes() >= self.cache.options().straight_bytes_min).then_some(blocks)
    }

    /// Reads blocks, none of which is uptodate, to the front of `buffer`; returns how many bytes. None if they may be in memory by
    /// now: who called this looks again.
    ///
    /// # Errors
    /// What the filesystem said.
    pub(crate) fn read_straight<'a>(
        &'a self,
        mut pages: MutexGuard<'a, Pages>,
        blocks: Blocks,
        buffer: &mut [u8],
    ) -> Result<(MutexGuard<'a, Pages>, usize), F::Error> {
        let Some(id) = pages.begin_read(blocks.clone()) else {
            self.ended.wait(&mut pages);
            return Ok((pages, 0));
        };
        drop(pages);
        let range = self.range_of(&blocks);
        let len = usize::try_from(range.len_bytes()).unwrap_or(usize::MAX);
        self.cache.usage().count_fill();
        let result = self.mappings(range).and_then(|mappings| {
            if mappings.iter().any(|mapping| mapping.flags.is_encoded) {
                // From the next read on.
                self.is_encoded.store(true, Ordering::Relaxed);
            }
            self.read_blocks(range, &mappings, vec![&mut buffer[..len]])
        });
        let mut pages = self.pages.lock();
        let is_valid = pages.end_read(id);
        self.ended.notify_all();
        match result {
            _ if !is_valid => Ok((pages, 0)),
            Err(error) => Err(error),
            Ok(Some(cookie)) if self.is_current(cookie) => Ok((pages, len)),
            Ok(_) => Ok((pages, 0)),
        }
    }
}
