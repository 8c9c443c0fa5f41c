//! Reading straight into the reader's buffer: a file that is read from its beginning to its end and that memory cannot keep would
//! only drive out what memory holds, at the price of a second copy of each byte.
//!
//! The reader has the range locked, so nobody writes there, and a block that is not in memory is neither dirty nor on its way: what
//! mappings say of it holds as long as the mappings are the same. What is in memory is taken from there. What is read so is
//! not kept, so nobody need know of it.

use ubtrfs_rt::Ordering;

use crate::address_space::AddressSpace;
use crate::mapping::FileSystem;
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::Blocks;

impl<F: FileSystem> AddressSpace<F> {
    /// Whether reads like that of a range may go past memory, if they go on from each other.
    pub(crate) fn may_read_straight(&self, range: FileRange) -> bool {
        let options = self.cache.options();
        let start = range.start.round_up(self.block_bytes);
        let end = range.end.round_down(self.block_bytes);
        let whole_bytes = if start < end { end.bytes_since(start) } else { 0 };
        let bytes_min = match self.is_encoded.load(Ordering::Relaxed) {
            true => options.straight_encoded_bytes_min.max(options.straight_bytes_min),
            false => options.straight_bytes_min,
        };
        whole_bytes > 0 && whole_bytes >= bytes_min && !self.is_kept()
    }

    /// Whether memory can keep all of the file.
    pub(crate) fn is_kept(&self) -> bool {
        let options = self.cache.options();
        options.keeps_clean && self.size().bytes() <= options.cached_bytes_max
    }

    /// The whole blocks of `missing` that a read of `rest`, from `at` on, may get straight, if it begins with enough of them.
    pub(crate) fn straight_blocks(
        &self,
        at: FileOffset,
        missing: &Blocks,
        rest: FileRange,
    ) -> Option<Blocks> {
        let whole_end = rest.end.bytes() / self.block_bytes;
        let blocks = missing.start..missing.end.min(whole_end);
        if blocks.is_empty() || at.bytes() != blocks.start * self.block_bytes {
            return None;
        }
        let len_bytes = self.range_of(&blocks).len_bytes();
        (len_bytes >= self.cache.options().straight_bytes_min).then_some(blocks)
    }

    /// Reads blocks, none of which was in memory, to the front of `buffer`; returns how many bytes. None if mappings changed
    /// meanwhile: who called this looks again.
    ///
    /// # Errors
    /// What the filesystem said.
    pub(crate) fn read_straight(
        &self,
        blocks: &Blocks,
        buffer: &mut [u8],
    ) -> Result<usize, F::Error> {
        let range = self.range_of(blocks);
        let len = usize::try_from(range.len_bytes()).unwrap_or(usize::MAX);
        self.cache.usage().count_fill();
        let mappings = self.mappings(range)?;
        if mappings.iter().any(|mapping| mapping.flags.is_encoded) {
            // From the next read on.
            self.is_encoded.store(true, Ordering::Relaxed);
        }
        match self.read_blocks(range, &mappings, vec![&mut buffer[..len]])? {
            Some(cookie) if self.is_current(cookie) => Ok(len),
            _ => Ok(0),
        }
    }
}
