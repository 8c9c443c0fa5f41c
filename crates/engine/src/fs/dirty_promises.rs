//! What dirty data is promised: space, and metadata for its items.

use ubtrfs_rt::Ordering;

use crate::alloc::Promised;
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;
use crate::txn::{Flush, Reservation};

/// File extents that a reservation for dirty data counts with at most.
const ITEMS_AT_ONCE_MAX: u64 = 64;
/// What is written at once of all that is dirty, for want of space, where less is wanted.
const SHRINK_PART: u64 = 8;
/// How often a part is written so, before all is.
const SHRINK_TRIES_MAX: u64 = 16;

impl Filesystem {
    /// Promises space for dirty data, after a commit where that frees some. The thread holds no
    /// handle.
    pub(super) fn promise_data(&self, len_bytes: u64) -> Result<()> {
        let core = &self.inner.core;
        if core.alloc.try_promise_data(len_bytes) {
            return Ok(());
        }
        let under_handle = || {
            let _handle = self.begin_step(Reservation::items(0))?;
            core.alloc.promise_data(&core.roots, len_bytes)
        };
        match under_handle() {
            Err(Error::NoSpace { .. }) if core.frees_by_commit() => {
                core.commit_unless_held()?;
                under_handle()
            }
            result => result,
        }
    }

    /// Asks for space; as long as there is none, has some of what is dirty in memory written, and asks again, where that may take
    /// less than was promised to it: what is compressed, or becomes inline. By pages, over files, the oldest first, as much as is wanted
    /// or a part of all; all of it in the end. The thread holds no handle, and no file's data lock.
    ///
    /// # Errors
    /// That of the last time.
    pub(super) fn with_less_dirty<T>(
        &self,
        wanted_bytes: u64,
        ask: impl Fn() -> Result<T>,
    ) -> Result<T> {
        let may_take_less = &self.inner.open_files.may_take_less;
        self.ask_again(wanted_bytes, ask, |has_written| {
            if !may_take_less.load(Ordering::Relaxed) {
                return false;
            }
            if !has_written() {
                // What becomes dirty from now on is noted again.
                may_take_less.store(false, Ordering::Relaxed);
                if has_written() {
                    may_take_less.store(true, Ordering::Relaxed);
                }
            }
            true
        })
    }

    /// Asks; as long as there is no space, asks again after `write`, unless that says that it is in vain. It is given what has some of the
    /// dirty data written, or waits for those who do, and says whether there was any.
    fn ask_again<T>(
        &self,
        wanted_bytes: u64,
        ask: impl Fn() -> Result<T>,
        write: impl Fn(&dyn Fn() -> bool) -> bool,
    ) -> Result<T> {
        let cache = self.page_cache();
        let mut tries = 0;
        loop {
            let result = ask();
            let is_full = matches!(result, Err(Error::NoSpace { .. }));
            let part_bytes = match tries < SHRINK_TRIES_MAX {
                true => wanted_bytes.max(cache.dirty_bytes() / SHRINK_PART),
                false => u64::MAX,
            };
            // What is on its way by others has its promise, too, until it is there.
            let has_written = || cache.shrink_dirty(part_bytes) > 0 || self.wait_for_writeback();
            if !is_full || tries > SHRINK_TRIES_MAX || !write(&has_written) {
                return result;
            }
            tries += 1;
        }
    }

    /// Makes sure that there is metadata for the items of so much more dirty data: where there is not, what is dirty is written, as
    /// its items take far less than is kept back for them. The thread holds no handle, and no file's data lock.
    pub(super) fn promise_items(&self, len_bytes: u64) -> Result<()> {
        let files = &self.inner.files;
        let held_back = files.held_back_bytes(self.nodesize_bytes());
        let more = files.delalloc_items_bytes(1, len_bytes);
        if self.inner.core.alloc.has_metadata_for(held_back.saturating_add(more)) {
            return Ok(());
        }
        // Loads groups, makes chunks, commits.
        let extents = len_bytes.div_ceil(self.sectorsize_bytes()).min(ITEMS_AT_ONCE_MAX);
        let ask = || self.begin_step(Reservation::extents(extents)).map(drop);
        self.ask_again(len_bytes, ask, |has_written| has_written())
    }

    /// Takes back what was promised to dirty data.
    pub(super) fn take_back_data(&self, len_bytes: u64, promised: Promised) {
        if len_bytes > 0 {
            self.inner.core.alloc.take_back_data(len_bytes, promised);
            self.inner.files.subtract_delalloc(len_bytes);
        }
    }
}
