//! Space for a file before its data comes.
//!
//! What is dirty has its space already, and what is on its way gets it there, so only what lies between is asked for. The range is locked, so
//! nothing in it becomes dirty meanwhile.

use crate::address_space::{AddressSpace, OpenFile, Reach};
use crate::extent_state::{CountQuery, StateBits, Want};
use crate::iter::MappingIter;
use crate::mapping::{FileSystem, MappingKind, Purpose};
use crate::offset::{FileOffset, FileRange};

impl<F: FileSystem> OpenFile<F> {
    /// Makes sure that the blocks of the range have space: what is a hole there becomes unwritten and reads as zeros; all else
    /// stays. Durable with [`OpenFile::fsync()`]. What is dirty in the range gets its space as it is written back: of what is lost then, as fsync
    /// tells, there is none.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`], [`crate::Error::TooLarge`], or what the filesystem said; then any part of the range may have space, and the size
    /// is as before.
    pub fn allocate(
        &self,
        offset: FileOffset,
        len_bytes: u64,
        reach: Reach,
    ) -> Result<(), F::Error> {
        let range = AddressSpace::<F>::space_range(offset, len_bytes)?;
        let space = &*self.space;
        let _locked = space.lock_for_write(range);
        space.allocate_locked(range)?;
        space.reach_locked(range.end, reach)
    }

    /// Makes the range zeros that have space (FALLOC_FL_ZERO_RANGE): whole blocks become unwritten, the
    /// bytes of others are zeroed. What is dirty of whole blocks is written first where it lies over data. Durable with [`OpenFile::fsync()`].
    ///
    /// # Errors
    /// As [`OpenFile::allocate()`]; then any part of the range may be zero, and the rest is as it was. Where there is no space for the whole blocks from the beginning,
    /// they are left as they are.
    pub fn allocate_zeroed(
        &self,
        offset: FileOffset,
        len_bytes: u64,
        reach: Reach,
    ) -> Result<(), F::Error> {
        let range = AddressSpace::<F>::space_range(offset, len_bytes)?;
        let space = &*self.space;
        // So that nobody cuts the file just behind it, whose end a dirty block in it is to say then.
        let _locked =
            space.lock_for_write(FileRange::new(range.start, range.end.saturating_add(1)));
        let (edges, inner) = space.split_at_blocks(range);
        for edge in edges {
            space.allocate_locked(edge)?;
            space.zero_in_file(edge)?;
        }
        if !inner.is_empty() {
            space.flush_old_tail(inner.end)?;
            space.make_unwritten_locked(inner)?;
        }
        space.reach_locked(range.end, reach)
    }
}

impl<F: FileSystem> AddressSpace<F> {
    fn make_unwritten_locked(&self, range: FileRange) -> Result<(), F::Error> {
        if let Err(error) = self.filesystem.check_unwritten_space(&self.inode, range.len_bytes()) {
            // What has the space that it needs, and is zeros on the medium, needs no more.
            let is_on_its_way = self.first_on_its_way(range).is_some();
            if is_on_its_way || !self.is_unwritten(range)? {
                return Err(error);
            }
            return self.replace_locked(range, || {
                // Writeback was quicker: it stays what it is.
                if !self.is_unwritten(range)? {
                    return Err(error);
                }
                self.filesystem.make_unwritten(&self.inode, range)
            });
        }
        let size = self.size();
        if size <= range.end {
            // Whatever fails then, the medium knows where the file ends: there may be nothing dirty any more that would say so.
            let last = FileRange::new(FileOffset::new(size.bytes().saturating_sub(1)), size);
            self.flush(last.intersection(range))?;
        }
        self.drop_dirty_over_zeros(range)?;
        self.flush(range)?;
        self.replace_locked(range, || self.filesystem.make_unwritten(&self.inode, range))
    }

    /// Drops what is dirty over holes and unwritten space in whole blocks, which the caller has locked and is about to make zeros on the medium: that,
    /// it is there already, should the rest fail. Over data it would be wrong: where that cannot be made zeros it would be back. So the
    /// caller brings to the device what this leaves.
    fn drop_dirty_over_zeros(&self, range: FileRange) -> Result<(), F::Error> {
        if self.cache.options().ablation.zero_without_batch {
            return Ok(());
        }
        let mut rest = range;
        while !rest.is_empty() {
            // Asked before the mappings: what goes on its way from now on is the last that was written. What was before may arrive below
            // what was written since.
            let on_its_way = self.first_on_its_way(rest);
            let still = FileRange::new(rest.start, on_its_way.map_or(rest.end, |run| run.start));
            let mut iter = MappingIter::new(self, still);
            while let Some((mapping, part)) = iter.next(Purpose::Read)? {
                if mapping.kind.is_zeros() {
                    self.discard(part);
                }
                iter.advance_to(part.end);
            }
            rest.start = on_its_way.map_or(rest.end, |run| run.end);
        }
        Ok(())
    }

    /// The first blocks of a range that are on their way to the device.
    fn first_on_its_way(&self, range: FileRange) -> Option<FileRange> {
        let query = CountQuery::first_run(range, Want::All(StateBits::ORDERED));
        self.states.count_range(query, None).map(|found| found.run())
    }

    /// Whether all of a range is unwritten on the medium.
    fn is_unwritten(&self, range: FileRange) -> Result<bool, F::Error> {
        let mut iter = MappingIter::new(self, range);
        while let Some((mapping, part)) = iter.next(Purpose::Read)? {
            if mapping.kind != MappingKind::Unwritten {
                return Ok(false);
            }
            iter.advance_to(part.end);
        }
        Ok(true)
    }

    /// The parts of blocks at the two ends of a range, and the whole blocks between them; of each there may be none.
    pub(crate) fn split_at_blocks(&self, range: FileRange) -> ([FileRange; 2], FileRange) {
        let inner = FileRange::new(
            range.start.round_up(self.block_bytes),
            range.end.round_down(self.block_bytes),
        );
        if inner.is_empty() {
            return ([range, FileRange::default()], FileRange::default());
        }
        ([FileRange::new(range.start, inner.start), FileRange::new(inner.end, range.end)], inner)
    }

    /// Zeroes what of a range, which the caller has locked, lies in the file.
    pub(crate) fn zero_in_file(&self, range: FileRange) -> Result<(), F::Error> {
        self.zero_locked(FileRange::new(range.start, range.end.min(self.size())))
    }

    fn allocate_locked(&self, range: FileRange) -> Result<(), F::Error> {
        let whole = range.round_out(self.block_bytes);
        let has_space = Want::Any(StateBits::DELALLOC | StateBits::ORDERED);
        let mut at = whole.start;
        while at < whole.end {
            let query = CountQuery::first_run(FileRange::new(at, whole.end), has_space);
            let next = self.states.count_range(query, None).map(|found| found.run());
            let gap = FileRange::new(at, next.map_or(whole.end, |run| run.start));
            if !gap.is_empty() {
                self.filesystem.allocate(&self.inode, gap)?;
            }
            at = next.map_or(whole.end, |run| run.end);
        }
        Ok(())
    }

    fn reach_locked(&self, end: FileOffset, reach: Reach) -> Result<(), F::Error> {
        if reach == Reach::Extends && end > self.size() { self.grow(end) } else { Ok(()) }
    }
}
