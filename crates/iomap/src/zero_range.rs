//! Zeroing a range without writing back what is dirty in it first.
//!
//! Over a hole or unwritten space only what is dirty in memory, or on its way, can be anything but zeros. The filesystem hands that over
//! as a batch, looked up under its extent lock together with the mapping. Only the batch is zeroed, and the
//! mapping ends where the batch does. To look the folios up here, after the mapping, would be wrong: writeback may
//! have ended and reclaim have dropped the folio in between, so that nothing is found while the medium holds data.

use crate::address_space::{AddressSpace, OpenFile, Reach};
use crate::extent_state::{CountQuery, StateBits, Want};
use crate::iter::MappingIter;
use crate::mapping::{DirtyBatch, FileSystem, Purpose};
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::Source;

impl<F: FileSystem> OpenFile<F> {
    /// Makes the bytes of the range that lie in the file zero; the file's size stays. Space that is the file's stays
    /// so. In memory only.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`], [`crate::Error::TooLarge`], or what the filesystem said; then any part of the range may be zero.
    pub fn zero_range(&self, offset: FileOffset, len_bytes: u64) -> Result<(), F::Error> {
        let range = AddressSpace::<F>::space_range(offset, len_bytes)?;
        let _locked = self.space.lock_for_write(range);
        self.space.zero_in_file(range)
    }

    /// Makes the range a hole; the file's size stays. What is dirty of whole blocks is written first. Durable with
    /// [`OpenFile::fsync()`].
    ///
    /// # Errors
    /// [`crate::Error::Invalid`], [`crate::Error::TooLarge`], or what the filesystem said; then any part of the range may be zero,
    /// and the rest is as it was.
    pub fn punch_hole(&self, offset: FileOffset, len_bytes: u64) -> Result<(), F::Error> {
        let range = AddressSpace::<F>::space_range(offset, len_bytes)?;
        let _locked = self.space.lock_for_write(range);
        self.space.punch_locked(range)
    }
}

impl<F: FileSystem> AddressSpace<F> {
    fn punch_locked(&self, range: FileRange) -> Result<(), F::Error> {
        let (edges, inner) = self.split_at_blocks(range);
        for edge in edges {
            self.zero_in_file(edge)?;
        }
        if inner.is_empty() {
            return Ok(());
        }
        self.flush_old_tail(inner.end)?;
        // Thrown away, it would be lost where the hole cannot be made, and what was there before it be back.
        self.flush(inner)?;
        self.replace_locked(inner, || self.filesystem.punch(&self.inode, inner))
    }

    /// Zeroes a range that the caller has locked, whether in the file or in its last block behind its end.
    pub(crate) fn zero_locked(&self, range: FileRange) -> Result<(), F::Error> {
        let zero = |range: FileRange| {
            self.write_range(range, Source::Zeros, Reach::Stays).map_err(|(_, error)| error)
        };
        let whole = range.round_out(self.block_bytes);
        let knows_memory = !self.cache.options().ablation.zero_without_batch;
        if knows_memory && self.states.test(whole, Want::All(StateBits::DELALLOC)) {
            // Dirty as a whole: what is mapped below does not matter. Should writeback begin now, the write finds that.
            return zero(range);
        }
        let mut iter = MappingIter::new(self, range);
        loop {
            let mut batch = DirtyBatch::new(&self.states);
            let Some((mapping, part)) = iter.next(Purpose::Zero(&mut batch))? else {
                return Ok(());
            };
            if !mapping.kind.is_zeros() {
                zero(part)?;
                iter.advance_to(part.end);
                continue;
            }
            let covered = match batch.covered() {
                Some(covered) if knows_memory => covered,
                _ => {
                    // Written, then mapped anew: what is dirty or on its way has become data of a mapping.
                    let any = Want::Any(StateBits::DELALLOC | StateBits::ORDERED);
                    let in_memory = CountQuery::first_run(part.round_out(self.block_bytes), any);
                    let is_clean = self.states.count_range(in_memory, None).is_none();
                    if !is_clean {
                        self.flush(part)?;
                    } else if self.is_current(mapping.cookie) {
                        // Asked behind the states: what writeback took out of them until then would have changed the mappings.
                        iter.advance_to(part.end);
                    }
                    continue;
                }
            };
            let part = part.intersection(covered);
            for run in batch.runs() {
                let dirty = run.intersection(part);
                if !dirty.is_empty() {
                    zero(dirty)?;
                }
            }
            iter.advance_to(part.end);
        }
    }
}
