//! What a filesystem does to a file by itself: whole blocks become something else, and memory must not go on to show what they were.

use ubtrfs_rt::MutexGuard;

use crate::address_space::AddressSpace;
use crate::extent_state::LockMode;
use crate::mapping::FileSystem;
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::Pages;

impl<F: FileSystem> AddressSpace<F> {
    /// Runs `change`, which gives whole blocks other contents: a clone into the file, say. Nobody reads or writes the range
    /// meanwhile. What memory has of it is dropped, dirty or not. The file is made longer where it ends before `size_min`, in memory;
    /// `change` has recorded that.
    ///
    /// # Errors
    /// That of `change`, or of zeroing what the old last block has behind the old end.
    pub fn replace_range(
        &self,
        range: FileRange,
        size_min: FileOffset,
        change: impl FnOnce() -> Result<(), F::Error>,
    ) -> Result<(), F::Error> {
        let change = || change().map(|()| Some(size_min));
        self.replace(range, range, size_min, || Ok(()), change).map(drop)
    }

    /// As [`AddressSpace::replace_range()`] for a change that may fail half way: what is dirty in the range is written back
    /// first, so that what the change has not come to is on the medium. Nobody reads or writes `beside` either, of which the
    /// change makes use. Where the change was made it returns where the file then ends at least; where it was not, the file ends where it
    /// did. It may end behind `size_min`, up to which what is between the old end and the range is zeros, if the range begins in the file.
    /// Returns whether the change was made.
    ///
    /// # Errors
    /// As there, and those of [`AddressSpace::flush()`], with which nothing is changed.
    pub fn replace_flushed_range(
        &self,
        range: FileRange,
        beside: Option<FileRange>,
        size_min: FileOffset,
        change: impl FnOnce() -> Result<Option<FileOffset>, F::Error>,
    ) -> Result<bool, F::Error> {
        let beside = beside.unwrap_or(range);
        let flush = || self.flush(range.round_out(self.block_bytes));
        self.replace(range, beside, size_min, flush, change)
    }

    fn replace(
        &self,
        range: FileRange,
        beside: FileRange,
        size_min: FileOffset,
        prepare: impl FnOnce() -> Result<(), F::Error>,
        change: impl FnOnce() -> Result<Option<FileOffset>, F::Error>,
    ) -> Result<bool, F::Error> {
        let range = range.round_out(self.block_bytes);
        let reach = FileRange::new(range.start, range.end.max(size_min));
        let locked = FileRange::new(reach.start.min(beside.start), reach.end.max(beside.end));
        let _locked = self.lock_for_write(locked);
        prepare()?;
        if size_min > self.size() {
            self.zero_old_tail(size_min)?;
        }
        self.flush_old_tail(reach.end)?;
        let made = self.replace_growing(range, change, |made| *made)?;
        Ok(made.is_some())
    }

    /// Runs `change`, which may move the data of whole blocks and leaves their contents: deduplication, defragmentation. What is dirty
    /// of them is written back first, and nobody reads or writes the range meanwhile. What memory has of it, all clean, is
    /// dropped.
    ///
    /// # Errors
    /// That of `change`, and those of [`AddressSpace::flush()`], with which nothing is changed. One of writeback with which data was
    /// lost is kept for [`crate::OpenFile::fsync()`].
    pub fn change_flushed<T>(
        &self,
        range: FileRange,
        change: impl FnOnce() -> Result<T, F::Error>,
    ) -> Result<T, F::Error> {
        let range = range.round_out(self.block_bytes);
        let _locked = self.states.lock(range, LockMode::Exclusive);
        self.flush(range)?;
        let result = change();
        self.discard(range);
        result
    }

    /// [`AddressSpace::replace_range()`] for a range that the caller has locked, and that lies in the file.
    pub(crate) fn replace_locked<T>(
        &self,
        range: FileRange,
        change: impl FnOnce() -> Result<T, F::Error>,
    ) -> Result<T, F::Error> {
        self.replace_growing(range, change, |_| None)
    }

    /// As [`AddressSpace::replace_locked()`], of a range behind which the file ends where `ends_at` says, if it did not end further on. The
    /// caller has it locked from its end on.
    pub(crate) fn replace_growing<T>(
        &self,
        range: FileRange,
        change: impl FnOnce() -> Result<T, F::Error>,
        ends_at: impl FnOnce(&T) -> Option<FileOffset>,
    ) -> Result<T, F::Error> {
        self.discard(range);
        let result = change();
        // A read ahead of another range may have brought in what was there, and zeros for all that is behind the old end, though the
        // device had what was just written. So it is dropped in one step with where the file ends.
        let end = result.as_ref().ok().and_then(ends_at);
        self.discard_and(range, |pages| {
            if let Some(end) = end {
                self.set_size(pages, self.size().max(end));
            }
        });
        result
    }

    /// Throws away what memory has of a file that is no more, dirty or not.
    pub fn throw_away(&self) {
        let all = FileRange::from(FileOffset::ZERO);
        let _locked = self.lock_for_write(all);
        self.discard(all);
    }

    /// Drops what memory has of whole blocks, dirty or not; the caller has them locked.
    pub(crate) fn discard(&self, range: FileRange) {
        self.discard_and(range, |_| {});
    }

    /// As [`AddressSpace::discard()`], and what is to be seen together with it.
    pub(crate) fn discard_and(&self, range: FileRange, then: impl FnOnce(&MutexGuard<'_, Pages>)) {
        let (pages, dropped_bytes, gone) = self.drop_range(self.pages.lock(), range);
        then(&pages);
        drop(pages);
        drop(gone);
        if dropped_bytes > 0 {
            self.filesystem.unreserve(&self.inode, dropped_bytes);
        }
    }
}
