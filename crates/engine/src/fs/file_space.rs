//! What changes where an open file has space, without data: its size, holes, preallocation.

use std::ops::Range;

use super::file_io::IoInode;
use super::write::{Locked, STEP_EXTENTS_MAX};
use crate::alloc::{DataPromise, Promised};
use crate::data::append::PLAIN_EXTENT_BYTES_MAX;
use crate::data::drop_range::{self, drop_range};
use crate::data::file_extent::{ExtentWalk, MappingKind};
use crate::data::prealloc;
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, begin_freeing};
use crate::txn::Reservation;
use ubtrfs_iomap::extent_state::{StateBits, Want};
use ubtrfs_iomap::{Beyond, FileRange, SeenEnd};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::inode::flags;

/// What each step of an allocation takes; promised where it may use what is kept back.
pub(super) const ALLOCATION_STEP: Reservation =
    Reservation::extents(2).and(Reservation::items(4)).and(Reservation::removals(2));

impl Filesystem {
    /// Lets the file end at `size`, and drops what it has beyond, where it is to. What is not on the
    /// medium needs no change there: writeback says where it ends.
    pub(super) fn set_file_size(&self, io: &IoInode, size: u64, beyond: Beyond) -> Result<()> {
        // Shorter than in memory, it may be longer than on the medium.
        let flush_old_tail = || match self.inner.open_files.find(io.id) {
            Some(space) => space.flush_old_tail(ubtrfs_iomap::FileOffset::new(size)),
            None => Ok(()),
        };
        let was_dirty = self.ends_dirty(io, size);
        if !was_dirty {
            flush_old_tail()?;
        }
        let mut lock = self.inner.files.lock_data(io.id);
        let is_dirty = self.ends_dirty(io, size);
        if was_dirty && !is_dirty {
            // On its way by now, and what must be there before it may not be.
            drop(lock);
            flush_old_tail()?;
            lock = self.inner.files.lock_data(io.id);
        }
        let _lock = lock;
        let medium = io.medium(self)?;
        let end = size.next_multiple_of(self.sectorsize_bytes());
        let has_beyond = beyond == Beyond::Dropped && medium.extents_end > end;
        if size > medium.size && is_dirty {
            // It ends no further before the block where it will is there, and the one where it does.
            if has_beyond {
                self.cut_locked(io, size, u64::MAX)?;
            }
            return Ok(());
        }
        if !has_beyond && size == medium.size {
            return Ok(());
        }
        self.set_locked_size(io, size, beyond, DataPromise::None)
    }

    /// As [`Filesystem::set_file_size`], on the medium in any case; of data that was taken, with the promise given. The caller holds the
    /// data lock.
    fn set_locked_size(
        &self,
        io: &IoInode,
        size: u64,
        beyond: Beyond,
        promise: DataPromise,
    ) -> Result<()> {
        if beyond == Beyond::Dropped {
            self.cut_locked(io, size, u64::MAX)?;
        }
        let mut locked = Locked::of_open(self, io.id)?;
        if size <= locked.inode.size_bytes {
            return Ok(());
        }
        // Inline data is all that a file has.
        if size > locked.write_options()?.max_inline_bytes as u64 {
            locked.outline_as_promised(io)?;
        }
        let reservation = Reservation::items(4)
            .and(Reservation::extents(2))
            .with_holes(self.holes_grown_over(io, size)?);
        let mut handle = self.begin_step(match promise {
            DataPromise::None => reservation,
            DataPromise::Given => reservation.promised(),
        })?;
        match promise {
            DataPromise::None => handle.check_file(io.id)?,
            // What was taken before its subvolume became read-only keeps nobody from making durable what is there.
            DataPromise::Given => handle.check_file_is_there(io.id)?,
        }
        let _change = io.change(self);
        handle.count_data(io, 0, 0, |old| old.max(size))
    }

    /// Drops what the file has from the sector behind `size` up to `end`, and lets it end at `size` where it is longer. The caller
    /// holds the data lock.
    fn cut_locked(&self, io: &IoInode, size: u64, end: u64) -> Result<()> {
        let start = size.next_multiple_of(self.sectorsize_bytes());
        // The size goes down with what is dropped; with the last of that to where it is to be, as else a crash could leave the file ending in
        // between although all of it goes at once.
        self.drop_in_steps(io, start..end, |old, from| {
            old.min(if from == start { size } else { from })
        })?;
        if size >= self.disk_inode(io.id)?.size_bytes {
            return Ok(());
        }
        // What cuts off may use what is kept back for freeing.
        let mut handle = self.begin_step(Reservation::removals(1))?;
        handle.check_file(io.id)?;
        let _change = io.change(self);
        handle.count_data(io, 0, 0, |_| size)
    }

    /// After a clone that failed half way, by who has locked the range that was to be changed, and the end of the
    /// file where that lies before `end`: the file is as long on the medium as in memory, or, where that fails,
    /// in memory as it would have become. Where the range lies in the file nothing was to become longer, and what is behind it is others'.
    pub(super) fn cut_to_memory(&self, io: &IoInode, end: ubtrfs_iomap::FileOffset) {
        let Some(space) = self.inner.open_files.find(io.id) else { return };
        let cut = || {
            let _lock = self.inner.files.lock_data(io.id);
            // What was allocated behind what was to be cloned stays.
            let end = end.bytes().next_multiple_of(self.sectorsize_bytes());
            self.cut_locked(io, space.size().bytes(), end)
        };
        if end > space.size() && cut().is_err() {
            // The first failure is told. What was cloned by then is shown.
            space.end_not_before(end);
        }
    }

    /// How many holes must be entered for an open file to end at `size` on the medium. The caller holds the data lock.
    pub(super) fn holes_grown_over(&self, io: &IoInode, size: u64) -> Result<u64> {
        if self.has_no_holes() {
            return Ok(0);
        }
        let sector = self.sectorsize_bytes();
        let old = self.disk_inode(io.id)?.size_bytes.next_multiple_of(sector);
        let gap = old..size.next_multiple_of(sector);
        if gap.is_empty() {
            return Ok(0);
        }
        drop_range::missing_hole_count(&self.inner.core, &io.target(true), &gap)
    }

    /// Whether the block where a file of `size` ends is dirty: then its writeback says where it ends.
    fn ends_dirty(&self, io: &IoInode, size: u64) -> bool {
        let Some(space) = self.inner.open_files.find(io.id) else { return false };
        let start = size.saturating_sub(1) / self.sectorsize_bytes() * self.sectorsize_bytes();
        let last =
            FileRange::with_len(ubtrfs_iomap::FileOffset::new(start), self.sectorsize_bytes());
        space.states().test(last, Want::All(StateBits::DELALLOC))
    }

    /// Makes whole blocks a hole.
    pub(super) fn punch_file(&self, io: &IoInode, range: Range<u64>) -> Result<()> {
        {
            let _lock = self.inner.files.lock_data(io.id);
            self.drop_in_steps(io, range, |old, _| old)?;
        }
        self.record_end(io)
    }

    /// The dirty block that would have said where the file ends may be gone.
    pub(super) fn record_end(&self, io: &IoInode) -> Result<()> {
        let Some(space) = self.inner.open_files.find(io.id) else { return Ok(()) };
        let end = space.see_end();
        let size = end.size();
        // If it is there still, or on its way, it will.
        let last = size.bytes().saturating_sub(1);
        let last = FileRange::new(ubtrfs_iomap::FileOffset::new(last), size);
        let is_coming =
            space.states().test(last, Want::Any(StateBits::DELALLOC | StateBits::ORDERED));
        if is_coming { self.record_times(io) } else { self.record_file(io, end) }
    }

    /// Takes a range out of the file from its end on, a few extents under each handle. `size` says from
    /// the file's size and the offset from which on nothing is left what its size is. The caller
    /// holds the data lock.
    fn drop_in_steps(
        &self,
        io: &IoInode,
        range: Range<u64>,
        size: impl Fn(u64, u64) -> u64,
    ) -> Result<()> {
        let core = &self.inner.core;
        let mut end = range.end;
        let mut count = STEP_EXTENTS_MAX;
        while range.start < end {
            let inode = self.disk_inode(io.id)?;
            let target = io.target(inode.has_csums());
            let rest = range.start..end;
            // Where there is nothing, nothing is written.
            if drop_range::start_of_last(core, &target, &rest, 1)?.is_none() {
                return Ok(());
            }
            let mut handle = begin_freeing(&mut count, |count| {
                let removals = Reservation::removals(count);
                self.begin_step(Reservation::removals(3).and(removals))
            })?;
            let last = drop_range::start_of_last(core, &target, &rest, count)?;
            let Some(from) = last else { return Ok(()) };
            handle.check_file(io.id)?;
            let _change = io.change(self);
            let kept = self.inner.files.kept();
            let lost = drop_range(&mut handle.txn, &target, &(from..end), kept)?;
            let new_size = size(inode.size_bytes, from);
            let file_end = new_size.next_multiple_of(self.sectorsize_bytes());
            let hole = from..end.min(file_end);
            if !self.has_no_holes() && !hole.is_empty() {
                drop_range::put_missing_holes(&mut handle.txn, &target, &hole)
                    .map_err(|error| handle.txn.abort(error))?;
            }
            handle.count_data(io, 0, lost, |_| new_size)?;
            end = from;
        }
        Ok(())
    }

    /// Gives holes in whole blocks space. Where there is not enough for all of them, none gets any. `step` is [`ALLOCATION_STEP`].
    pub(super) fn allocate_file(
        &self,
        io: &IoInode,
        range: Range<u64>,
        step: Reservation,
    ) -> Result<()> {
        let _lock = self.inner.files.lock_data(io.id);
        let mut promised_bytes = self.bytes_of_holes(io, &range)?;
        self.promise_data(promised_bytes)?;
        let mut at = range.start;
        let result = loop {
            if at >= range.end {
                break Ok(());
            }
            match self.allocate_some(io, at..range.end, step, &mut promised_bytes) {
                Ok(end) => at = end,
                Err(error) => break Err(error),
            }
        };
        self.inner.core.alloc.take_back_data(promised_bytes, Promised::Space);
        result
    }

    /// From the first to the last of a range of whole blocks that are anything but space to which nothing is written.
    pub(super) fn other_than_unwritten(
        &self,
        io: &IoInode,
        range: &Range<u64>,
    ) -> Result<Option<Range<u64>>> {
        let tree = self.tree(io.id.root)?;
        let mut walk = ExtentWalk::new(&tree, io.of(self), FileOffset(range.start));
        let (mut at, mut other) = (range.start, None::<Range<u64>>);
        while at < range.end {
            let mapping = walk.next()?;
            let end = mapping.map_or(range.end, |_| walk.position()).min(range.end);
            if mapping.is_none_or(|mapping| mapping.kind != MappingKind::Prealloc) {
                other = Some(other.map_or(at, |other| other.start)..end);
            }
            at = end;
        }
        Ok(other)
    }

    /// How much of a range of whole blocks has no space.
    fn bytes_of_holes(&self, io: &IoInode, range: &Range<u64>) -> Result<u64> {
        let tree = self.tree(io.id.root)?;
        let mut walk = ExtentWalk::new(&tree, io.of(self), FileOffset(range.start));
        let (mut at, mut bytes) = (range.start, 0);
        while at < range.end {
            let mapping = walk.next()?;
            let end = mapping.map_or(range.end, |_| walk.position()).min(range.end);
            if mapping.is_none_or(|mapping| mapping.kind == MappingKind::Hole) {
                bytes += end - at;
            }
            at = end;
        }
        Ok(bytes)
    }

    /// Gives the first hole of the range space, of what is promised, or the beginning of it; returns where to go on.
    fn allocate_some(
        &self,
        io: &IoInode,
        range: Range<u64>,
        step: Reservation,
        promised_bytes: &mut u64,
    ) -> Result<u64> {
        let core = &self.inner.core;
        let tree = self.tree(io.id.root)?;
        let mut walk = ExtentWalk::new(&tree, io.of(self), FileOffset(range.start));
        let mapping = walk.next()?;
        let is_hole = mapping.is_none_or(|mapping| mapping.kind == MappingKind::Hole);
        let end = mapping.map_or(range.end, |_| walk.position()).min(range.end);
        if !is_hole {
            return Ok(end);
        }
        let mut locked = Locked::of_open(self, io.id)?;
        locked.outline_as_promised(io)?;
        let target = io.target(locked.inode.has_csums());
        let hole = range.start..end;
        let wanted = (hole.end - hole.start).min(PLAIN_EXTENT_BYTES_MAX);
        let mut has_committed = false;
        loop {
            let mut handle = self.begin_step_behind_snapshots(io.id.root, step)?;
            handle.check_file(io.id)?;
            let sector = self.sectorsize_bytes();
            let found = core.alloc.allocate_data(&core.roots, sector, wanted, DataPromise::Given);
            let (start, len) = match found {
                Err(Error::NoSpace { .. }) if core.frees_by_commit() && !has_committed => {
                    drop(handle);
                    core.commit_unless_held()?;
                    has_committed = true;
                    continue;
                }
                found => found?,
            };
            let _change = io.change(self);
            let part = hole.start..hole.start + len;
            // An explicit hole, if anything.
            let kept = self.inner.files.kept();
            if let Err(error) = drop_range(&mut handle.txn, &target, &part, kept) {
                core.alloc.release_data(start, len, DataPromise::Given);
                return Err(error);
            }
            *promised_bytes = promised_bytes.saturating_sub(len);
            prealloc::put_prealloc(&mut handle.txn, &target, part.start, start, len)?;
            handle
                .change_inode(io.id, |item| {
                    item.flags = (item.flags.get() | flags::PREALLOC).into();
                })
                .map_err(|error| handle.txn.abort(error))?;
            handle.count_data(io, len, 0, |old| old)?;
            return Ok(part.end);
        }
    }

    /// Enters in the inode what was only noted in memory: that the file ends where it was seen to, at least, if it was not cut since, and
    /// when it was written. What was dirty before it was seen is on the medium; but of who made a hole of the file's last block only what is in
    /// that: what is dirty before it may be zeros after a crash, as with Linux's btrfs with NO_HOLES.
    pub(super) fn record_file(&self, io: &IoInode, end: SeenEnd) -> Result<()> {
        let space = self.inner.open_files.find(io.id);
        if let Some(space) = &space {
            space.flush_old_tail(end.size())?;
        }
        let _lock = self.inner.files.lock_data(io.id);
        // Who truncates changes memory first, and the medium under this lock.
        let size = space.map_or(end.size(), |space| space.end_to_record(end)).bytes();
        if io.medium(self)?.size < size {
            return self.set_locked_size(io, size, Beyond::Kept, DataPromise::Given);
        }
        self.record_locked_times(io)
    }

    /// As [`Filesystem::record_file`], but not where the file ends.
    pub(super) fn record_times(&self, io: &IoInode) -> Result<()> {
        let _lock = self.inner.files.lock_data(io.id);
        self.record_locked_times(io)
    }

    fn record_locked_times(&self, io: &IoInode) -> Result<()> {
        if io.written.lock().is_none() {
            return Ok(());
        }
        // What was taken is told of as it was, also of a subvolume that is read-only by now.
        let mut handle = self.begin_step(Reservation::items(1).promised())?;
        handle.check_file_is_there(io.id)?;
        handle.count_data(io, 0, 0, |old| old)
    }
}
