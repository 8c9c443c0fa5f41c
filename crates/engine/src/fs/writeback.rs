//! Dirty data on its way to the medium: space, the bytes, then file extents, all runs of a file
//! together.
//!
//! Plain data goes from the cache's folios to the devices as it lies. Compression and checksums are
//! made on all cores. Space is found under handles of its own and used under another: between them the data is
//! written, and others may commit; what has space and no file extent yet is lost with a crash, and
//! free again.

use std::iter;
use std::ops::Range;

use ubtrfs_iomap::{AddressSpace, FileRange, WritebackRun};
use ubtrfs_ondisk::extent::BackRef;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_ondisk::{FileOffset, LogicalAddr};

use ubtrfs_rt::Arc;

use super::file_io::{FileIo, IoInode};
use super::fixed_csums::CsumsFixed;
use super::inode::{Inode, time_of};
use super::state::{timespec, touch};
use super::stored::Stored;
use super::write::Locked;
use crate::alloc::{DataPromise, Promised};
use crate::data::append::{self, Grows, Target, Written};
use crate::data::drop_range::{self, drop_range};
use crate::data::file_extent::{ExtentWalk, Mapping, MappingKind};
use crate::data::prealloc;
use crate::data::prepare::{PreparedData, WriteOptions};
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle};
use crate::txn::{Core, Reservation};

pub(super) mod compressed;

/// Bytes whose checksums are one piece of work: whole sectors.
const CHECKSUMMED_PIECE_BYTES: usize = 128 << 10;
/// With less than this, one thread makes the checksums.
const PARALLEL_BYTES_MIN: usize = 1 << 20;
/// Ranges that are written in place under one handle.
const IN_PLACE_RANGES_MAX: usize = 16;

/// Where data comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum From {
    /// The page cache: the file ends where memory says.
    Memory,
    /// A caller who goes past it, and tells memory afterwards.
    Caller,
    /// Such a one who makes a file longer and longer while what he gives to memory is written back: he works alone, as the other
    /// processors have enough to do.
    Writer,
}

/// A part of a run, all whole blocks.
struct Part<'a> {
    offset: u64,
    buffers: Vec<&'a [u8]>,
    /// It is written where the file has its space.
    stays: bool,
}

impl Part<'_> {
    fn len_bytes(&self) -> u64 {
        self.buffers.iter().map(|buffer| buffer.len() as u64).sum()
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len_bytes()
    }

    /// Whole blocks: of the largest file the last one ends a byte behind where a file can.
    fn file_range(&self) -> FileRange {
        let Range { start, end } = self.range();
        FileRange::new(ubtrfs_iomap::FileOffset::new(start), ubtrfs_iomap::FileOffset::new(end))
    }
}

/// A file that is written back.
struct Job<'a> {
    fs: &'a Filesystem,
    io: &'a IoInode,
    inode: Inode,
    target: Target,
    options: WriteOptions,
    /// Where the file ended in memory when this began.
    size: u64,
    from: From,
    /// What it was promised.
    promised: Promised,
    /// What is placed may become part of the extent before. Not where it may have to be placed again: then that would be cut, and give
    /// no space back.
    grows: Grows,
    /// The file in memory, if the data comes from there: it may end elsewhere by now.
    space: Option<Arc<AddressSpace<FileIo>>>,
    _csums: CsumsFixed<'a>,
}

/// Whether a file may have space into which its data is written.
pub(super) fn has_own_space(inode: &Inode) -> bool {
    inode.flags & (flags::PREALLOC | flags::NODATACOW) != 0
}

impl Filesystem {
    /// Writes runs of one file from memory, ascending, and maps them. Space is promised for them, and is not any more for what is
    /// `stored` when it returns.
    ///
    /// # Errors
    /// As [`Filesystem::write`]; of what is not stored no mapping is changed then.
    pub(super) fn write_runs(
        &self,
        io: &IoInode,
        runs: &[WritebackRun<'_>],
        stored: &mut Stored,
    ) -> Result<()> {
        self.write_runs_once(io, runs, Grows::Yes, stored)
    }

    fn write_runs_once(
        &self,
        io: &IoInode,
        runs: &[WritebackRun<'_>],
        grows: Grows,
        stored: &mut Stored,
    ) -> Result<()> {
        let Some(last) = runs.last() else { return Ok(()) };
        let mut job = Job::new(self, io, last.size.bytes(), From::Memory, io.promised())?;
        job.grows = grows;
        if let [only] = runs
            && stored.within(only.range).next().is_none()
            && job.write_inline(only)?
        {
            self.inner.core.alloc.take_back_data(only.range.len_bytes(), job.promised);
            return Ok(());
        }
        let mut parts = job.split_in_place(runs, stored)?;
        // All that is new together; first those of the kind of the block in which the file ends on the medium, behind
        // which it must not end before that block is written.
        let old_end = job.inode.size_bytes;
        let tail_stays = parts.iter().find(|part| part.range().contains(&old_end));
        let tail_stays = tail_stays.is_none_or(|part| part.stays);
        parts.sort_by_key(|part| part.stays != tail_stays);
        if steps(&parts).nth(1).is_some() {
            job.grows = Grows::No;
        }
        for parts in steps(&parts) {
            job.write_parts(parts)?;
            // Who fails later is not tried again with these: what was written in place has its checksums by now, and would need
            // space of its own, which nobody promised.
            parts.iter().for_each(|part| stored.add(part.file_range()));
        }
        // What was inline may have been written over instead. As long as memory has no more than the first block, the promise is of who is
        // about to write behind it, and that may become inline again before.
        let core = &self.inner.core;
        if io.has_outline_promise()
            && job.size_now(0) > self.sectorsize_bytes()
            && !drop_range::is_inline(core, &job.target).unwrap_or(true)
        {
            io.give_outline_promise_back(core);
        }
        Ok(())
    }

    /// Writes a run of a caller's from its front on, and maps it. Space is promised for it, or its place; none of it is
    /// afterwards. Returns how many bytes were written, and what kept it from the rest, of which nothing
    /// is mapped.
    pub(super) fn write_front(
        &self,
        io: &IoInode,
        run: &WritebackRun<'_>,
        promised: Promised,
        from: From,
    ) -> (u64, Result<()>) {
        let mut done_bytes = 0;
        let result = Job::new(self, io, run.size.bytes(), from, promised)
            .and_then(|job| job.write_front(run, &mut done_bytes));
        let left_bytes = run.range.len_bytes() - done_bytes;
        if left_bytes > 0 {
            self.inner.core.alloc.take_back_data(left_bytes, promised);
        }
        (done_bytes, result)
    }

    /// Whether data may go where a mapping of the file lies, at which the walk stands: nobody else shows it.
    pub(super) fn is_written_in_place(
        &self,
        io: &IoInode,
        inode: &Inode,
        walk: &ExtentWalk,
        mapping: &Mapping,
    ) -> Result<bool> {
        let is_candidate = match mapping.kind {
            MappingKind::Prealloc => has_own_space(inode),
            MappingKind::Data => inode.flags & flags::NODATACOW != 0 && !inode.has_csums(),
            MappingKind::Hole | MappingKind::Inline => false,
        };
        let core = &self.inner.core;
        let last_snapshot = core.roots.tree(io.id.root)?.last_snapshot();
        let is_plain = mapping.compression == Compression::None;
        if !is_candidate || !is_plain || walk.generation()? <= last_snapshot.0 {
            return Ok(false);
        }
        let offset = mapping.offset.0.wrapping_sub(mapping.extent_offset);
        let (start, len) = (mapping.disk_bytenr, mapping.disk_num_bytes);
        let is_own = |reference: &BackRef| io.is_own(reference, offset);
        core.alloc.is_data_of_caller(&core.roots, start, len, is_own)
    }

    /// As [`Filesystem::write_runs`], of one run, in halves where there is no space to write it whole.
    ///
    /// # Errors
    /// As there.
    pub(super) fn write_run_in_parts(
        &self,
        io: &IoInode,
        run: &WritebackRun<'_>,
        stored: &mut Stored,
    ) -> Result<()> {
        self.write_run_or_halves(io, run, Grows::Yes, stored)
    }

    fn write_run_or_halves(
        &self,
        io: &IoInode,
        run: &WritebackRun<'_>,
        grows: Grows,
        stored: &mut Stored,
    ) -> Result<()> {
        let block = self.sectorsize_bytes();
        match self.write_runs_once(io, std::slice::from_ref(run), grows, stored) {
            Err(Error::NoSpace { .. }) if run.range.len_bytes() > block => {}
            result => return result,
        }
        let half = (run.range.len_bytes() / 2).next_multiple_of(block);
        let middle = run.range.start.saturating_add(half);
        let (front, back) = split_buffers(run.buffers, half);
        let mut write_part = |start, end, buffers: &[&[u8]]| {
            let part = WritebackRun { range: FileRange::new(start, end), buffers, size: run.size };
            self.write_run_or_halves(io, &part, Grows::No, stored)
        };
        write_part(run.range.start, middle, &front)?;
        write_part(middle, run.range.end, &back)
    }
}

/// Parts that are written together: those beside each other that are of one kind.
fn steps<'p, 'a>(parts: &'p [Part<'a>]) -> impl Iterator<Item = &'p [Part<'a>]> {
    let kinds = parts.chunk_by(|one, next| one.stays == next.stays);
    kinds.flat_map(|same| {
        let stay = same.first().is_some_and(|part| part.stays);
        same.chunks(if stay { IN_PLACE_RANGES_MAX } else { same.len().max(1) })
    })
}

fn len_of(parts: &[Part<'_>]) -> u64 {
    parts.iter().map(Part::len_bytes).sum()
}

impl<'f> Job<'f> {
    fn new(
        fs: &'f Filesystem,
        io: &'f IoInode,
        size: u64,
        from: From,
        promised: Promised,
    ) -> Result<Self> {
        let csums = fs.inner.files.fixed_csums.fix(io.id);
        let inode = fs.disk_inode(io.id)?;
        let options = fs.write_options_of(&inode)?;
        let target = io.target(inode.has_csums());
        let space = match from {
            From::Memory => fs.inner.open_files.find(io.id),
            From::Caller | From::Writer => None,
        };
        Ok(Self {
            fs,
            io,
            inode,
            target,
            options,
            size,
            from,
            promised,
            grows: Grows::Yes,
            space,
            _csums: csums,
        })
    }

    fn write_front(&self, run: &WritebackRun<'_>, done_bytes: &mut u64) -> Result<()> {
        if self.write_inline(run)? {
            *done_bytes = run.range.len_bytes();
            self.core().alloc.take_back_data(*done_bytes, self.promised);
            return Ok(());
        }
        let parts = self.split_in_place(std::slice::from_ref(run), &Stored::default())?;
        // Each step is mapped whole or not at all, and only then comes the next.
        for parts in steps(&parts) {
            self.write_parts(parts)?;
            *done_bytes += len_of(parts);
        }
        Ok(())
    }

    /// Writes parts of one kind, all or none. The promise for them is used up.
    fn write_parts(&self, parts: &[Part<'_>]) -> Result<()> {
        let stays = parts.first().is_some_and(|part| part.stays) && self.write_in_place(parts)?;
        let spent_bytes = if stays { 0 } else { self.write_new(parts)? };
        let unspent_bytes = len_of(parts).saturating_sub(spent_bytes);
        self.fs.inner.core.alloc.take_back_data(unspent_bytes, self.promised);
        Ok(())
    }

    /// Writes the run as inline data, if it is the whole of a short file. Returns whether it was.
    fn write_inline(&self, run: &WritebackRun<'_>) -> Result<bool> {
        let (fs, sector) = (self.fs, self.options.sectorsize_bytes as u64);
        let may_be = run.range.start.bytes() == 0 && self.size > 0 && self.size <= sector;
        if !may_be || self.inode.size_bytes > self.size {
            return Ok(false);
        }
        let mut bytes = run.buffers.concat();
        bytes.truncate(usize::try_from(self.size).expect("within a sector"));
        let data = PreparedData::new(bytes, &self.options);
        let nodesize = fs.inner.core.roots.store.geometry().nodesize_bytes;
        let inline = data.inline(self.target.has_csums);
        let Some((compression, bytes)) =
            inline.filter(|(_, bytes)| bytes.len() <= append::inline_bytes_max(nodesize))
        else {
            return Ok(false);
        };
        let reservation = Reservation::extents(2).and(Reservation::items(4));
        let _lock = fs.inner.files.lock_data(self.io.id);
        let reservation = reservation.and(Reservation::removals(2)).promised_behind_data();
        // It has space among data, and takes less of what is promised to others there.
        let Some(mut handle) = fs.try_begin_step(reservation)? else { return Ok(false) };
        self.check(&handle)?;
        let _change = self.io.change(fs);
        // Longer by now, it will have something behind.
        let has_more = self.size_now(self.size) > sector
            || self.extents_behind(sector)?
            || fs.disk_inode(self.io.id)?.size_bytes > self.size;
        if has_more {
            return Ok(false);
        }
        let lost = drop_range(&mut handle.txn, &self.target, &(0..sector), fs.inner.files.kept())?;
        append::put_inline(&mut handle.txn, &self.target, self.size, compression, bytes)?;
        self.io.note_inline();
        self.count(&mut handle, self.size, lost, self.size)?;
        Ok(true)
    }

    /// Whether anything but holes is mapped from `at` on.
    fn extents_behind(&self, at: u64) -> Result<bool> {
        let tree = self.fs.tree(self.io.id.root)?;
        let mut walk = ExtentWalk::new(&tree, self.io.of(self.fs), FileOffset(at));
        while let Some(mapping) = walk.next()? {
            if mapping.kind != MappingKind::Hole && mapping.end().0 > at {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// What of runs, where it is not stored, is written where the file has its space, and what gets other space, in order.
    fn split_in_place<'a>(
        &self,
        runs: &[WritebackRun<'a>],
        stored: &Stored,
    ) -> Result<Vec<Part<'a>>> {
        let mut whole = runs.iter().flat_map(|run| {
            stored.missing_in(run.range).into_iter().map(|missing| {
                let skipped = missing.start.bytes_since(run.range.start);
                let (_, behind) = split_buffers(run.buffers, skipped);
                let (buffers, _) = split_buffers(&behind, missing.len_bytes());
                Part { offset: missing.start.bytes(), buffers, stays: false }
            })
        });
        if !has_own_space(&self.inode) {
            return Ok(whole.collect());
        }
        // What is stored by now needs no handle, for which there may be no room.
        let Some(first) = whole.next() else { return Ok(Vec::new()) };
        // As long as it is held no commit moves references from the queue to the tree, between which nobody sees them: what was promised
        // its place would be given other space, of what others were promised.
        let _handle = self.fs.begin_step(Reservation::items(0).promised())?;
        let mut split: Vec<Part<'a>> = Vec::new();
        let tree = self.fs.tree(self.io.id.root)?;
        for mut part in iter::once(first).chain(whole) {
            let end = part.range().end;
            let mut walk = ExtentWalk::new(&tree, self.io.of(self.fs), FileOffset(part.offset));
            while part.offset < end {
                let mapping = walk.next()?;
                let stays = mapping.map_or(Ok(false), |m| self.is_written_in_place(&walk, &m))?;
                let mapped_end = mapping.map_or(end, |_| walk.position()).min(end);
                let len = mapped_end - part.offset;
                let (front, back) = split_buffers(&part.buffers, len);
                match split.last_mut() {
                    Some(last) if !stays && !last.stays && last.range().end == part.offset => {
                        last.buffers.extend(front);
                    }
                    _ => split.push(Part { offset: part.offset, buffers: front, stays }),
                }
                part = Part { offset: mapped_end, buffers: back, stays: false };
            }
        }
        Ok(split)
    }

    /// Whether data may go where the mapping lies, at which the walk stands.
    fn is_written_in_place(&self, walk: &ExtentWalk, mapping: &Mapping) -> Result<bool> {
        self.fs.is_written_in_place(self.io, &self.inode, walk, mapping)
    }

    /// A handle to write parts in place. What goes past memory was promised no items: into space that is cut for it, it leaves those of
    /// others.
    fn begin_in_place(&self, parts: &[Part<'_>], reservation: Reservation) -> Result<Handle<'_>> {
        let fs = self.fs;
        if matches!(self.from, From::Memory) {
            return fs.begin_step(reservation.promised());
        }
        let behind_data = reservation.promised_behind_data();
        if let Some(handle) = fs.try_begin_step(behind_data)? {
            return Ok(handle);
        }
        let tree = fs.tree(self.io.id.root)?;
        for part in parts {
            let mut walk = ExtentWalk::new(&tree, self.io.of(fs), FileOffset(part.offset));
            if walk.next()?.is_none_or(|mapping| mapping.kind != MappingKind::Data) {
                return fs.begin_step(behind_data);
            }
        }
        fs.begin_step(reservation.promised())
    }

    /// Writes parts where the file has its space; returns false where that is not so any more. The
    /// handle keeps snapshots away from what was asked before, and the data lock clones.
    fn write_in_place(&self, parts: &[Part<'_>]) -> Result<bool> {
        let fs = self.fs;
        let core = &fs.inner.core;
        let count = parts.len() as u64;
        let _lock = fs.inner.files.lock_data(self.io.id);
        let end = parts.last().map_or(0, |part| part.range().end).min(self.size);
        let len_bytes: u64 = parts.iter().map(Part::len_bytes).sum();
        let reservation = Reservation::extents(3 * count)
            .and(Reservation::items(2 + count))
            .with_csums(self.csums_bytes(len_bytes))
            .with_holes(fs.holes_grown_over(self.io, end)?);
        let reservation = reservation.and(Reservation::removals(count));
        let mut handle = self.begin_in_place(parts, reservation)?;
        self.check(&handle)?;
        let tree = fs.tree(self.io.id.root)?;
        let mut places = Vec::new();
        for part in parts {
            let mut walk = ExtentWalk::new(&tree, self.io.of(fs), FileOffset(part.offset));
            let mapping = walk.next()?.filter(|mapping| mapping.end().0 >= part.range().end);
            let Some(mapping) = mapping else { return Ok(false) };
            if !self.is_written_in_place(&walk, &mapping)? {
                return Ok(false);
            }
            let into = mapping.extent_offset + (part.offset - mapping.offset.0);
            places.push((LogicalAddr(mapping.disk_bytenr.0 + into), mapping.kind));
        }
        let all: Vec<&Part<'_>> = parts.iter().collect();
        // Who reads the file by its number meanwhile would find a part of it.
        let is_over_data = places.iter().any(|(_, kind)| *kind == MappingKind::Data);
        let over_data = is_over_data.then(|| fs.inner.files.change_data(self.io.id));
        let (result, csums) = self.with_csums_of(&all, || {
            let mut placed = parts.iter().zip(&places);
            placed.try_for_each(|(part, (at, _))| core.write_data(*at, &part.buffers))
        });
        drop(over_data);
        result?;
        let mut csums = csums.as_slice();
        let _change = self.io.change(fs);
        let geometry = core.roots.store.geometry();
        let mut is_changed = false;
        let sector = geometry.sectorsize_bytes as u64;
        for (part, (at, kind)) in parts.iter().zip(&places) {
            let sector_count = usize::try_from(part.len_bytes() / sector).expect("in memory");
            let of_part = sector_count * geometry.csum.len_bytes();
            let (csums_of_part, later) =
                csums.split_at(if self.target.has_csums { of_part } else { 0 });
            csums = later;
            if *kind != MappingKind::Prealloc {
                continue;
            }
            let (txn, range) = (&mut handle.txn, part.range());
            // Before its checksums are kept, which nobody would take back.
            match prealloc::mark_written(txn, &self.target, &range, tree.last_snapshot()) {
                Err(error) if is_changed => return Err(txn.abort(error)),
                other => other?,
            }
            is_changed = true;
            if self.target.has_csums {
                fs.inner.files.csums.add(*at, csums_of_part, geometry.csum, sector);
                if fs.inner.files.csums.is_full() {
                    fs.inner.files.csums.flush(&mut handle.txn)?;
                }
            }
        }
        self.count(&mut handle, 0, 0, end)?;
        Ok(true)
    }

    /// Writes parts to space of their own, and puts it in the place of what the file had there. Returns the
    /// bytes of it, for which as much of the promise is spent.
    fn write_new(&self, parts: &[Part<'_>]) -> Result<u64> {
        let all: Vec<&Part<'_>> = parts.iter().collect();
        if self.target.has_csums && self.options.compression.is_some() {
            match self.write_compressed(&all) {
                // Compressed extents cannot be cut to what is free.
                Err(Error::NoSpace { .. }) => {}
                result => return result,
            }
        }
        let pieces = || {
            all.iter().flat_map(|part| {
                part.buffers.iter().scan(part.offset, |at, buffer| {
                    let (offset, len) = (*at, buffer.len() as u64);
                    *at += len;
                    Some((offset, len))
                })
            })
        };
        let promise = DataPromise::Given;
        let written =
            self.find_space(|core| append::find_space_for_plain(core, pieces(), promise))?;
        let (result, csums) = self.with_csums_of(&all, || {
            let buffers = all.iter().flat_map(|part| part.buffers.iter().copied());
            written.write(self.core(), buffers)
        });
        self.enter_or_release(&all, &written, &csums, result)
    }

    /// Moves inline data that is not written over into an extent: beside others it cannot stay inline. The caller holds the data lock, without
    /// which the beginning of a file may become inline at any time: how long it is in memory says who writes directly only behind that.
    fn outline(&self, parts: &[&Part<'_>]) -> Result<()> {
        let is_kept = parts.first().is_none_or(|part| part.offset > 0);
        if !is_kept || !drop_range::is_inline(&self.fs.inner.core, &self.target)? {
            return Ok(());
        }
        Locked::of_open(self.fs, self.io.id)?.outline_as_promised(self.io)
    }

    /// Finds space, if need be behind a commit that makes it free.
    fn find_space(&self, find: impl Fn(&Core) -> Result<Written>) -> Result<Written> {
        let core = self.core();
        let found = {
            let _handle = self.fs.begin_step(Reservation::items(0).promised())?;
            find(core)
        };
        match found {
            Err(Error::NoSpace { .. }) if core.frees_by_commit() => {
                core.commit_unless_held()?;
                let _handle = self.fs.begin_step(Reservation::items(0).promised())?;
                find(core)
            }
            found => found,
        }
    }

    /// Enters what was written, if it was, with its checksums, or gives its space back. Returns the bytes of that space.
    fn enter_or_release(
        &self,
        parts: &[&Part<'_>],
        written: &Written,
        csums: &[u8],
        result: Result<()>,
    ) -> Result<u64> {
        match result.and_then(|()| self.enter(parts, written, csums)) {
            Ok(()) => Ok(written.disk_bytes()),
            // After an abort nothing is given out again.
            Err(error @ Error::Aborted { .. }) => Err(error),
            Err(error) => {
                written.release(self.core());
                Err(error)
            }
        }
    }

    /// Puts what is on the medium in the place of what the file had there.
    fn enter(&self, parts: &[&Part<'_>], written: &Written, csums: &[u8]) -> Result<()> {
        let (fs, core) = (self.fs, &self.fs.inner.core);
        let mut old_count = 0;
        for part in parts {
            old_count += drop_range::extent_count(core, &self.target, &part.range())?;
        }
        let _lock = fs.inner.files.lock_data(self.io.id);
        self.outline(parts)?;
        let end = parts.last().map_or(0, |part| part.range().end).min(self.size);
        let (extents, parts_count) = (written.extent_count(), parts.len() as u64);
        let reservation = Reservation::storing(extents, old_count, parts_count)
            .with_holes(fs.holes_grown_over(self.io, end)?)
            .with_csums(csums.len() as u64)
            .promised();
        let mut handle = fs.begin_step_for_data(self.io.id.root, self.inode.flags, reservation)?;
        self.check(&handle)?;
        let _change = self.io.change(fs);
        let (kept, pending) = (fs.inner.files.kept(), &fs.inner.files.csums);
        let mut lost = 0;
        for (index, part) in parts.iter().enumerate() {
            match drop_range(&mut handle.txn, &self.target, &part.range(), kept) {
                Ok(bytes) => lost += bytes,
                // With nothing changed only as long as nothing was.
                Err(error) if index > 0 => return Err(handle.txn.abort(error)),
                Err(error) => return Err(error),
            }
        }
        let txn = &mut handle.txn;
        let added = append::enter_all(txn, &self.target, written, csums, pending, self.grows)?;
        self.count(&mut handle, added, lost, end)
    }

    /// Brings parts to the medium by `write`, and makes the checksums of all of them beside it, on all cores where that is worth it; none
    /// of a file that has none.
    fn with_csums_of<R>(&self, parts: &[&Part<'_>], write: impl FnOnce() -> R) -> (R, Vec<u8>) {
        if !self.target.has_csums {
            return (write(), Vec::new());
        }
        let (csum, sector) = (self.fs.csum_type(), self.options.sectorsize_bytes);
        let buffers: Vec<&[u8]> =
            parts.iter().flat_map(|part| part.buffers.iter().copied()).collect();
        let len_bytes: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        let mut csums = vec![0; len_bytes / sector * csum.len_bytes()];
        let mut work = Vec::with_capacity(buffers.len());
        let mut rest = csums.as_mut_slice();
        for part in buffers.iter().flat_map(|buffer| buffer.chunks(CHECKSUMMED_PIECE_BYTES)) {
            let (now, later) = rest.split_at_mut(part.len() / sector * csum.len_bytes());
            work.push((part, now));
            rest = later;
        }
        let compute = |(bytes, csums): (&[u8], &mut [u8])| {
            csum.compute_sectors(bytes, sector, csums);
        };
        let result = if len_bytes < PARALLEL_BYTES_MIN {
            work.into_iter().for_each(compute);
            write()
        } else {
            self.fs.runtime().executor.compute_each_beside(work.into_iter(), compute, write)
        };
        (result, csums)
    }

    /// Bytes of the checksums of so much data of the file.
    fn csums_bytes(&self, len_bytes: u64) -> u64 {
        let (sector, csum) = (self.options.sectorsize_bytes as u64, self.fs.csum_type());
        if self.target.has_csums { len_bytes / sector * csum.len_bytes() as u64 } else { 0 }
    }

    fn core(&self) -> &Core {
        &self.fs.inner.core
    }

    /// Refuses what the file may not be written for any more.
    fn check(&self, handle: &Handle<'_>) -> Result<()> {
        match self.from {
            From::Memory => handle.check_file_is_there(self.io.id),
            From::Caller | From::Writer => handle.check_file(self.io.id),
        }
    }

    /// Where the file ends in memory by now.
    fn size_now(&self, otherwise: u64) -> u64 {
        self.space.as_ref().map_or(otherwise, |space| space.size().bytes())
    }

    /// Enters in the inode that its data changed, and that it ends at `size` or later.
    fn count(&self, handle: &mut Handle<'_>, added: u64, lost: u64, size: u64) -> Result<()> {
        // Truncated meanwhile, it ends there: whoever did says so after this, or has.
        let size = size.min(self.size_now(size));
        handle.count_data(self.io, added, lost, |old| old.max(size))
    }
}

impl Handle<'_> {
    /// Enters in the inode of an open file that its data changed, when it was written, and its size. Whether the file may be
    /// changed was asked.
    pub(super) fn count_data(
        &mut self,
        io: &IoInode,
        added: u64,
        lost: u64,
        size: impl Fn(u64) -> u64,
    ) -> Result<()> {
        if !self.fs.has_no_holes() {
            // The file's extents are others by now.
            let inode = self.fs.disk_inode(io.id).map_err(|error| self.txn.abort(error))?;
            let old = inode.size_bytes;
            let sector = self.fs.sectorsize_bytes();
            let gap = old.next_multiple_of(sector)..size(old).next_multiple_of(sector);
            // What the file grows over needs items, if only of holes.
            if !gap.is_empty() {
                drop_range::put_missing_holes(&mut self.txn, &io.target(true), &gap)
                    .map_err(|error| self.txn.abort(error))?;
            }
        }
        io.forget_medium();
        let transid = self.txn.generation().0;
        let fs = self.fs;
        self.change_checked_inode(&mut fs.inner.files.names(), io.id, |item| {
            item.size = size(item.size.get()).into();
            item.nbytes = item.nbytes.get().saturating_add(added).saturating_sub(lost).into();
            // Before memory says nothing of it any more: who had looked at the tree then looks again.
            fs.inner.files.note_data_changed(io.id);
            // Under the lock of names: who sets the time of the last write meanwhile has the last word.
            match io.written.lock().take() {
                Some(at) => {
                    let changed = time_of(&item.ctime).max(at);
                    touch(item, transid, changed);
                    item.mtime = timespec(at);
                }
                None => item.transid = transid.into(),
            }
        })
        .map_err(|error| self.txn.abort(error))
    }
}

/// The first `len_bytes` of buffers, and the rest.
pub(super) fn split_buffers<'a>(
    buffers: &[&'a [u8]],
    len_bytes: u64,
) -> (Vec<&'a [u8]>, Vec<&'a [u8]>) {
    let mut left = usize::try_from(len_bytes).unwrap_or(usize::MAX);
    let (mut front, mut back) = (Vec::new(), Vec::new());
    for buffer in buffers {
        let (now, later) = buffer.split_at(left.min(buffer.len()));
        left -= now.len();
        for (part, list) in [(now, &mut front), (later, &mut back)] {
            if !part.is_empty() {
                list.push(part);
            }
        }
    }
    (front, back)
}
