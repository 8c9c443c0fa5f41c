//! Making a file shorter or longer.

use crate::address_space::{AddressSpace, OpenFile};
use crate::extent_state::{CountQuery, LockMode, StateBits, Want};
use crate::mapping::{Beyond, FileSystem};
use crate::offset::{FileOffset, FileRange};

impl<F: FileSystem> OpenFile<F> {
    /// Makes the file end at `size`; bytes that it gains are zero. Nothing is written for it, and only what is on its way
    /// beyond the new end, and in the block that holds it, is waited for. Space that was allocated beyond the end goes, unless the file grows. Durable with
    /// [`OpenFile::fsync()`].
    ///
    /// # Errors
    /// [`crate::Error::Invalid`], or what the filesystem said. One that was to become shorter is as long as it was then, also on the
    /// medium, or the next [`OpenFile::fsync()`] tells that it is not; what it has beyond the new end may be zero, or, where it had not been written
    /// back yet, what was there before: the next [`OpenFile::fsync()`] tells that, too. One that was to become longer ends where it did, or
    /// as far on as somebody else made durable meanwhile.
    pub fn truncate(&self, size: FileOffset) -> Result<(), F::Error> {
        let size = AddressSpace::<F>::io_range(size, 0)?.start;
        self.space.truncate(size)
    }

    /// Drops the space that was allocated beyond the end of a file that ends at `size`, as [`OpenFile::truncate()`] does, and changes nothing
    /// else. Returns whether the file ends there; where it does not, nothing is done.
    ///
    /// # Errors
    /// As there.
    pub fn drop_beyond(&self, size: FileOffset) -> Result<bool, F::Error> {
        let space = &self.space;
        let from = FileRange::from(size.round_down(space.block_bytes));
        let _locked = space.states.lock(from, LockMode::Exclusive);
        if space.size() != size {
            return Ok(false);
        }
        space.filesystem.set_size(&space.inode, size, Beyond::Dropped)?;
        Ok(true)
    }
}

impl<F: FileSystem> AddressSpace<F> {
    fn truncate(&self, new: FileOffset) -> Result<(), F::Error> {
        let (_locked, old) = loop {
            let old = self.size();
            let wanted = FileRange::from(new.min(old).round_down(self.block_bytes));
            let locked = self.states.lock(wanted, LockMode::Exclusive);
            if self.size() == old {
                break (locked, old);
            }
        };
        if new <= old { self.shrink(new, old) } else { self.grow(new) }
    }

    /// Makes the file longer; from its old end on it is locked by the caller.
    pub(crate) fn grow(&self, new: FileOffset) -> Result<(), F::Error> {
        self.zero_old_tail(new)?;
        self.flush_old_tail(new)?;
        let pages = self.pages.lock();
        let old = self.size();
        self.set_size(&pages, new);
        drop(pages);
        self.filesystem.set_size(&self.inode, new, Beyond::Kept).inspect_err(|_| {
            self.cut_to(&self.pages.lock(), old);
            // Somebody else may have recorded the new end, as it was in memory, and may be at it still: this waits for him, and changes
            // nothing.
            let _ = self.filesystem.set_size(&self.inode, old, Beyond::Kept);
            let stored = self.filesystem.stored_size(&self.inode).ok().flatten();
            if let Some(stored) = stored {
                self.end_not_before(stored.min(new));
            }
        })
    }

    fn shrink(&self, new: FileOffset, old: FileOffset) -> Result<(), F::Error> {
        let kept = new.round_up(self.block_bytes);
        let tail = FileRange::new(new, kept);
        let mut has_dropped = false;
        if let Err(error) = self.zero_locked(tail) {
            // A block that is dirty beyond has the space that this lacks, and goes anyway.
            let has_space = self.filesystem.check_space(&self.inode, self.block_bytes).is_ok();
            if has_space || !self.drop_dirty_block(FileRange::from(kept)) {
                return Err(error);
            }
            has_dropped = true;
            self.zero_locked(tail).inspect_err(|error| self.errors.lock().record(error.clone()))?;
        }
        let mut pages = self.pages.lock();
        // What is on its way there is as it was before the zeros, which are in memory only. Were it to arrive behind this, nobody would know: the
        // file may have grown by then, and what was cut off would be a part of it on the medium. It arrives before this instead, so that the
        // file ends on the medium within that block, which then is there before the file ends further on.
        if !tail.is_empty() {
            self.wait_for_runs(&mut pages, &self.blocks(tail));
        }
        let (pages, dropped_bytes, gone) = self.drop_range(pages, FileRange::from(kept));
        // In one step with the drop: whoever reads sees either both or none.
        let cutting = self.begin_cut(&pages, new);
        drop(pages);
        drop(gone);
        if dropped_bytes > 0 {
            self.filesystem.unreserve(&self.inode, dropped_bytes);
        }
        let result = self.filesystem.set_size(&self.inode, new, Beyond::Dropped);
        if let Err(error) = &result {
            // The medium may end anywhere up to the old end. Were memory to end before it, what lies there would come to light as the file
            // grows, and fsync promise an end that is not there.
            self.discard_and(FileRange::from(kept), |pages| {
                // Together: who read ahead since the cut found zeros there.
                self.set_size(pages, self.size().max(old));
            });
            // A part of the cut, or what was written back since, may have said on the medium that the file ends before that.
            // Where what that makes part of the file cannot be stored, as was tried above, the medium goes on ending before it.
            let is_restored = self.flush_old_tail(old).is_ok()
                && self.filesystem.set_size(&self.inode, old, Beyond::Kept).is_ok();
            if dropped_bytes > 0 || has_dropped || !is_restored {
                self.errors.lock().record(error.clone());
            }
            cutting.refused();
        }
        result
    }

    /// Drops the first dirty block of a range that the caller has locked; returns whether there was one.
    fn drop_dirty_block(&self, range: FileRange) -> bool {
        let dirty = CountQuery::first_run(range, Want::All(StateBits::DELALLOC));
        let Some(found) = self.states.count_range(dirty, None) else { return false };
        let block = FileRange::with_len(found.start, self.block_bytes);
        let (pages, dropped_bytes, gone) = self.drop_range(self.pages.lock(), block);
        drop(pages);
        drop(gone);
        if dropped_bytes > 0 {
            self.filesystem.unreserve(&self.inode, dropped_bytes);
        }
        dropped_bytes > 0
    }

    /// After a change that failed, for who has locked the file from its end on: the medium may end as far on as at `size`, and so
    /// the file does.
    pub fn end_not_before(&self, size: FileOffset) {
        let pages = self.pages.lock();
        self.set_size(&pages, self.size().max(size));
    }
}
