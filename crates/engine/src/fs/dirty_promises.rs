//! What dirty data is promised: space, and metadata for its items.

use ubtrfs_rt::Ordering;

use crate::alloc::Promised;
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle};
use crate::txn::Reservation;

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
        if self.has_items(len_bytes) {
            return Ok(());
        }
        if self.has_much_unshared() && self.shrink_to_have_items(len_bytes) {
            return Ok(());
        }
        // Loads groups, makes chunks, commits.
        let extents = len_bytes.div_ceil(self.sectorsize_bytes()).min(ITEMS_AT_ONCE_MAX);
        let ask = || self.begin_step(Reservation::extents(extents)).map(drop);
        self.ask_again(len_bytes, ask, |has_written| has_written())
    }

    /// Whether [`Filesystem::promise_items`] would grant that at once.
    pub(super) fn has_items(&self, len_bytes: u64) -> bool {
        let core = &self.inner.core;
        let more = self.inner.files.delalloc_items_bytes(1, len_bytes);
        core.alloc.has_metadata_for(core.held_back_bytes(1).saturating_add(more))
    }

    /// What dirty data needs at worst where snapshots have the same leaves is far more than it takes: where that is much, some of it is written
    /// before chunks are made for it.
    fn shrink_to_have_items(&self, len_bytes: u64) -> bool {
        let cache = self.page_cache();
        for _ in 0..SHRINK_TRIES_MAX {
            if self.has_items(len_bytes) {
                return true;
            }
            let part_bytes = cache.dirty_bytes() / SHRINK_PART;
            if !self.has_much_unshared() || cache.shrink_dirty(part_bytes) == 0 {
                break;
            }
        }
        self.has_items(len_bytes)
    }

    fn has_much_unshared(&self) -> bool {
        self.inner.core.roots.has_snapshots()
            && self.page_cache().dirty_range_count() > ITEMS_AT_ONCE_MAX
    }

    /// [`Filesystem::begin_step`] for who holds no file's data lock: as long as there is no space, what is dirty is written, for which
    /// metadata is kept back, and it is asked again.
    pub(crate) fn begin_beside_dirty(&self, reservation: Reservation) -> Result<Handle<'_>> {
        let has_dirty = || self.page_cache().dirty_range_count() > 0;
        if self.has_much_unshared() {
            self.shrink_to_have_items(0);
        }
        match self.begin_step(reservation) {
            Err(Error::NoSpace { .. }) if has_dirty() => {
                self.ask_again(0, || self.begin_step(reservation), |has_written| has_written())
            }
            result => result,
        }
    }

    /// Takes back what was promised to dirty data.
    pub(super) fn take_back_data(&self, len_bytes: u64, promised: Promised) {
        if len_bytes > 0 {
            self.inner.core.alloc.take_back_data(len_bytes, promised);
            self.inner.files.subtract_delalloc(len_bytes);
        }
    }
}
