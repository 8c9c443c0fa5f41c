//! Files that share data: ranges cloned, deduplicated, copied.

use std::ops::Range;

use ubtrfs_iomap::extent_state::LockMode;
use ubtrfs_ondisk::file_extent::{FileExtent, RegularExtent};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_ondisk::{FileOffset, LogicalAddr};

use super::entry::check_flags;
use super::inode::InodeId;
use super::write::{Locked, STEP_EXTENTS_MAX};
use crate::data::append::{self, Target};
use crate::data::drop_range::{self, drop_range};
use crate::data::file_extent::{Mapping, MappingKind};
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle};
use crate::txn::Reservation;

/// Bytes that are compared, or copied, at a time.
const PIECE_BYTES: u64 = 128 << 10;
/// Behind all that a file can have.
const FARTHEST: FileOffset = FileOffset(u64::MAX);

impl Filesystem {
    /// Lets `target` have, from `target_offset` on, the data that `source` has in `range`: the same
    /// extents, no byte copied but inline data. The files may be in different subvolumes, or be the
    /// same one. Offsets and length are whole sectors; a range that ends with the source may end
    /// inside one, if the target ends there or before. The calling thread must hold no handle.
    /// Durable with the next commit; after a crash, a beginning of a long clone may be there.
    ///
    /// # Errors
    /// `InvalidArgument` for a range that is not so, overlaps itself, or is beyond the source's
    /// end, and between files with and without checksums; otherwise as [`Filesystem::write`].
    pub fn clone_range(
        &self,
        source: InodeId,
        range: Range<FileOffset>,
        target: InodeId,
        target_offset: FileOffset,
    ) -> Result<()> {
        let end = Some(range.end);
        self.clone_up_to(source, range.start, end, target, target_offset)
    }

    /// As [`Filesystem::clone_range`], of all that the source is when it is cloned: wherever it ends then, what others append
    /// meanwhile is in it or is not. The target has that from its beginning on.
    ///
    /// # Errors
    /// As there.
    pub fn clone_file(&self, source: InodeId, target: InodeId) -> Result<()> {
        self.clone_up_to(source, FileOffset(0), None, target, FileOffset(0))
    }

    /// Clones from `start` on, up to `end`, or to where the source ends then.
    fn clone_up_to(
        &self,
        source: InodeId,
        start: FileOffset,
        end: Option<FileOffset>,
        target: InodeId,
        target_offset: FileOffset,
    ) -> Result<()> {
        // Before anybody has to wait.
        self.flush_file(source)?;
        self.flush_file(target)?;
        // Nobody makes the source longer or shorter either, where it is all of it.
        let reach = start..end.unwrap_or(FARTHEST);
        let unwritten = shared_range(&reach, start);
        let mut source_space = None;
        loop {
            source_space = source_space.or_else(|| self.inner.open_files.find(source));
            let other = source_space.as_deref().filter(|_| source != target);
            // Who writes the source does so before the clone or behind it. Of two files the one that comes first is locked first.
            let lock = || other.map(|space| space.states().lock(unwritten, LockMode::Shared));
            let locked_first = if source < target { lock() } else { None };
            let pair =
                Pair { source, target, is_held: source_space.is_some(), is_whole: end.is_none() };
            // All of it is as much as there is once nobody writes it.
            let range_now = || -> Result<Range<FileOffset>> {
                let end = end.map_or_else(|| self.end_of(source), Ok)?;
                Ok(start..end)
            };
            let Some(space) = self.flush_file(target)? else {
                let _locked = locked_first.or_else(lock);
                let range = range_now()?;
                match self.clone_closed(&pair, &range, target_offset, false, &mut false)? {
                    Some(()) => return Ok(()),
                    // It was opened meanwhile, or is longer or shorter.
                    None => continue,
                }
            };
            // What is refused is so before anything is thrown away.
            let locks = self.inner.files.lock_both(source, target);
            let known = start..end.unwrap_or(start);
            Clone::checked(self, source, &known, target, target_offset)?;
            drop(locks);
            if end == Some(start) {
                return Ok(());
            }
            let replaced = shared_range(&reach, target_offset);
            // All of a file goes to the beginning of another, where there is nothing before it that the file could grow over.
            let size_min = end.map_or(ubtrfs_iomap::FileOffset::ZERO, |_| replaced.end);
            let beside = (source == target).then_some(unwritten);
            let is_cloned = space.replace_flushed_range(replaced, beside, size_min, || {
                let _locked = if source > target { lock() } else { None };
                let range = range_now()?;
                let cloned_to = shared_range(&range, target_offset).end;
                let mut begun = false;
                let cloned = self.clone_closed(&pair, &range, target_offset, true, &mut begun);
                let cloned = cloned.inspect_err(|_| {
                    if begun {
                        self.cut_to_memory(space.inode(), cloned_to);
                    }
                });
                Ok(cloned?.map(|()| cloned_to))
            })?;
            if is_cloned {
                return Ok(());
            }
        }
    }

    fn end_of(&self, id: InodeId) -> Result<FileOffset> {
        Ok(FileOffset(self.inode(id)?.size_bytes))
    }

    /// Clones between files whose data is all on the medium. `None`, and nothing is done, where one is open and is not
    /// said to be, or ends elsewhere. Sets `begun` once a part of it is cloned.
    fn clone_closed(
        &self,
        pair: &Pair,
        range: &Range<FileOffset>,
        target_offset: FileOffset,
        may_be_open: bool,
        begun: &mut bool,
    ) -> Result<Option<()>> {
        let Pair { source, target, is_held, is_whole } = *pair;
        let _shared = self.flush_to_share(source)?;
        let _locks = self.inner.files.lock_both(source, target);
        if self.is_open(target) && !may_be_open || self.is_open(source) && !is_held {
            return Ok(None);
        }
        if is_whole && Locked::for_reading(self, source)?.inode.size_bytes != range.end.0 {
            return Ok(None);
        }
        let mut clone = Clone::checked(self, source, range, target, target_offset)?;
        clone.target.outline_unless(0..u64::MAX)?;
        if !may_be_open {
            let options = clone.target.write_options()?;
            clone.target.clear_old_tail(target_offset.0, &options)?;
        }
        loop {
            let has_more = clone.step()?;
            *begun = true;
            if !has_more {
                return Ok(Some(()));
            }
        }
    }

    /// As [`Filesystem::clone_range`], if the target has the same bytes there already. Returns
    /// whether it has. What is compared cannot change before it is shared: others wait.
    ///
    /// # Errors
    /// As [`Filesystem::clone_range`].
    pub fn dedupe_range(
        &self,
        source: InodeId,
        range: Range<FileOffset>,
        target: InodeId,
        target_offset: FileOffset,
    ) -> Result<bool> {
        self.flush_file(source)?;
        loop {
            let Some(space) = self.flush_file(target)? else {
                match self.dedupe_closed(source, &range, target, target_offset, false)? {
                    Some(is_same) => return Ok(is_same),
                    None => continue,
                }
            };
            let is_same = space.change_flushed(shared_range(&range, target_offset), || {
                self.dedupe_closed(source, &range, target, target_offset, true)
            })?;
            return Ok(is_same.unwrap_or(false));
        }
    }

    fn dedupe_closed(
        &self,
        source: InodeId,
        range: &Range<FileOffset>,
        target: InodeId,
        target_offset: FileOffset,
        may_be_open: bool,
    ) -> Result<Option<bool>> {
        let _shared = self.flush_to_share(source)?;
        let _locks = self.inner.files.lock_both(source, target);
        if self.is_open(target) && !may_be_open {
            return Ok(None);
        }
        let mut clone = Clone::new(self, source, range, target, target_offset)?;
        // Its data stays, but not where it lies.
        check_flags(target, clone.target.inode.flags, false)?;
        if clone.end > clone.target.inode.size_bytes || !clone.is_same()? {
            return Ok(Some(false));
        }

        clone.target.keeps_times = true;
        clone.target.outline_unless(0..u64::MAX)?;
        while clone.step()? {}
        Ok(Some(true))
    }

    /// Copies a range from file to file, sharing extents where offsets allow it. Returns how many
    /// bytes were copied: fewer than asked for where the source ends.
    ///
    /// # Errors
    /// `InvalidArgument` for ranges of one file that overlap; otherwise as [`Filesystem::write`].
    pub fn copy_range(
        &self,
        source: InodeId,
        range: Range<FileOffset>,
        target: InodeId,
        target_offset: FileOffset,
    ) -> Result<u64> {
        Locked::for_reading(self, source)?;
        // A part of a sector is shared only where both files end, which they do no more once somebody appends to one.
        let mut shares_end = true;
        loop {
            let sizes = || -> Result<_> { Ok((self.end_of(source)?, self.end_of(target)?)) };
            let before = sizes()?;
            let range = range.start.0..range.end.0.min(before.0.0);
            match self.copy_known(source, &range, target, target_offset.0, shares_end) {
                Err(Error::InvalidArgument { .. }) if sizes()? != before => shares_end = false,
                copied => return copied.map(|()| range.end.saturating_sub(range.start)),
            }
        }
    }

    /// Copies a range that lies in the file.
    fn copy_known(
        &self,
        source: InodeId,
        range: &Range<u64>,
        target: InodeId,
        target_offset: u64,
        shares_end: bool,
    ) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let (sector, len) = (self.sectorsize_bytes(), range.end - range.start);
        let target_end = target_offset
            .checked_add(len)
            .ok_or_else(|| append::misplaced(target_offset, "beyond the largest file"))?;
        if source == target && target_offset < range.end && range.start < target_end {
            return Err(append::misplaced(target_offset, "in the range that is copied"));
        }
        let (from, to) = (self.inode(source)?, self.inode(target)?);
        let clones =
            range.start % sector == target_offset % sector && from.has_csums() == to.has_csums();
        let head = range.start.next_multiple_of(sector).min(range.end);
        // Of one file, which may become longer by what is copied first, not at all.
        let ends_both = range.end == from.size_bytes && target_end >= to.size_bytes;
        let tail = match ends_both && shares_end && source != target {
            true => range.end,
            false => (range.end / sector * sector).max(head),
        };
        if !clones || tail <= head {
            return self.copy_bytes(source, range, target, target_offset);
        }
        let to = |at: u64| target_offset + (at - range.start);
        self.copy_bytes(source, &(range.start..head), target, to(range.start))?;
        let middle = FileOffset(head)..FileOffset(tail);
        self.clone_range(source, middle, target, FileOffset(to(head)))?;
        self.copy_bytes(source, &(tail..range.end), target, to(tail))
    }

    fn copy_bytes(
        &self,
        source: InodeId,
        range: &Range<u64>,
        target: InodeId,
        target_offset: u64,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let bytes = self.read_piece(source, at, range.end)?;
            self.write(target, FileOffset(target_offset + (at - range.start)), &bytes)?;
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// At most a piece of a file from `at` on, zeros behind its end.
    fn read_piece(&self, id: InodeId, at: u64, end: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; piece_len(at, end)];
        let have = self.read(id, FileOffset(at), &mut bytes)?;
        bytes[have..].fill(0);
        Ok(bytes)
    }

    /// As [`Filesystem::read_piece`], from the medium.
    fn read_device_piece(&self, id: InodeId, at: u64, end: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; piece_len(at, end)];
        let have = self.read_device(id, FileOffset(at), &mut bytes)?;
        bytes[have..].fill(0);
        Ok(bytes)
    }
}

fn piece_len(at: u64, end: u64) -> usize {
    usize::try_from((end - at).min(PIECE_BYTES)).expect("a piece is short")
}

/// As long as `range`, from an offset on: what memory must not have while the extents of the target change, and what nobody writes of the
/// source.
fn shared_range(range: &Range<FileOffset>, start: FileOffset) -> ubtrfs_iomap::FileRange {
    let len_bytes = range.end.0.saturating_sub(range.start.0);
    ubtrfs_iomap::FileRange::with_len(ubtrfs_iomap::FileOffset::new(start.0), len_bytes)
}

/// The files of a clone.
struct Pair {
    source: InodeId,
    target: InodeId,
    /// The source is in memory, and nobody writes there what is cloned.
    is_held: bool,
    /// It is cloned up to its end, wherever that is.
    is_whole: bool,
}

/// A clone in progress. Both files' data locks are held.
struct Clone<'a> {
    source: Locked<'a>,
    target: Locked<'a>,
    /// What is still to be cloned, in the source; whole sectors.
    at: u64,
    sectors_end: u64,
    /// Added to an offset in the source, it is one in the target.
    shift: u64,
    /// Where the clone ends in the target, to the byte.
    end: u64,
}

impl<'a> Clone<'a> {
    fn new(
        fs: &'a Filesystem,
        source: InodeId,
        range: &Range<FileOffset>,
        target: InodeId,
        target_offset: FileOffset,
    ) -> Result<Self> {
        let of = Locked::for_reading(fs, source)?;
        let to = Locked::new(fs, target)?;
        let (start, end, sector) = (range.start.0, range.end.0, of.sector);
        let (from_size, to_size) = (of.inode.size_bytes, to.inode.size_bytes);
        let wrong = |why: &str| Err(append::misplaced(start, why));
        if start > end || end > from_size {
            return wrong("a range beyond the end of the file");
        }
        let target_end = target_offset.0.checked_add(end - start);
        let Some(target_end) = target_end.filter(|end| i64::try_from(*end).is_ok()) else {
            return wrong("beyond the largest file");
        };
        let ends_with_source = end == from_size && target_end >= to_size;
        let is_aligned = start.is_multiple_of(sector) && target_offset.0.is_multiple_of(sector);
        if !is_aligned || !(end.is_multiple_of(sector) || ends_with_source) {
            return wrong("not whole sectors");
        }
        if source == target && target_offset.0 < end && start < target_end {
            return wrong("a range that overlaps its copy");
        }
        if of.target.has_csums != to.target.has_csums {
            return wrong("one file has checksums, the other none");
        }
        Ok(Self {
            source: of,
            target: to,
            at: start,
            sectors_end: end.next_multiple_of(sector),
            shift: target_offset.0.wrapping_sub(start),
            end: target_end,
        })
    }

    /// As [`Clone::new`], if the target's flags allow it.
    fn checked(
        fs: &'a Filesystem,
        source: InodeId,
        range: &Range<FileOffset>,
        target: InodeId,
        target_offset: FileOffset,
    ) -> Result<Self> {
        let clone = Self::new(fs, source, range, target, target_offset)?;
        let inode = &clone.target.inode;
        if target_offset.0 < inode.size_bytes {
            check_flags(target, inode.flags, false)?;
        }
        Ok(clone)
    }

    fn to_target(&self, at: u64) -> u64 {
        at.wrapping_add(self.shift)
    }

    /// Whether the target has the source's bytes.
    fn is_same(&self) -> Result<bool> {
        let fs = self.source.fs;
        let end = self.end.wrapping_sub(self.shift);
        let mut at = self.at;
        while at < end {
            let ours = fs.read_device_piece(self.source.inode.id, at, end)?;
            let theirs =
                fs.read_device_piece(self.target.inode.id, self.to_target(at), self.end)?;
            if ours != theirs {
                return Ok(false);
            }
            at += ours.len() as u64;
        }
        Ok(true)
    }

    /// Clones the next few extents. Returns whether more are to come.
    fn step(&mut self) -> Result<bool> {
        if self.at >= self.sectors_end {
            return Ok(false);
        }
        let fs = self.source.fs;
        let limit =
            self.target.step_end(self.to_target(self.at), self.to_target(self.sectors_end))?;
        let limit = limit.next_multiple_of(self.target.sector).wrapping_sub(self.shift);
        let mut mappings = Vec::new();
        let mut end = self.at;
        for mapping in fs.file_extents(self.source.inode.id, FileOffset(self.at))? {
            let mapping = mapping?;
            if mapping.kind == MappingKind::Inline {
                return self.copy_inline();
            }
            if mapping.offset.0 >= limit || mappings.len() >= STEP_EXTENTS_MAX {
                break;
            }
            end = mapping.end().0.min(limit);
            mappings.push(mapping);
        }
        if end <= self.at {
            // Nothing lies there: a hole.
            end = limit;
        }
        let end = end.min(self.sectors_end);
        let gap = self.target.gap_behind(self.to_target(self.at), self.to_target(end));
        let reservation = Reservation::extents(2 * mappings.len() as u64 + 2)
            .and(Reservation::items(4))
            .and(Reservation::removals(STEP_EXTENTS_MAX as u64))
            .with_holes(self.target.hole_count(&gap)?);
        // What is there and not written is written in place, whatever the file's flags say.
        let is_allocated = mappings.iter().any(|mapping| mapping.kind == MappingKind::Prealloc);
        let (root, inode_flags) = (self.target.target.root, self.target.inode.flags);
        let mut handle = match is_allocated {
            true => fs.begin_step_behind_snapshots(root, reservation)?,
            false => fs.begin_step_for_data(root, inode_flags, reservation)?,
        };
        handle.check_file(self.target.inode.id)?;
        // A source whose subvolume was deleted since may have lost its extents.
        fs.disk_inode(self.source.inode.id)?;
        self.share(&mut handle, &mappings, end)?;
        self.at = end;
        Ok(self.at < self.sectors_end)
    }

    /// Lets the target have what the source has up to `end`.
    fn share(&mut self, handle: &mut Handle<'_>, mappings: &[Mapping], end: u64) -> Result<()> {
        let range = self.to_target(self.at)..self.to_target(end);
        let gap = self.target.gap_behind(range.start, range.end);
        let kept = self.target.fs.inner.files.kept();
        let of = self.target.target;
        let change = self.target.change();
        let lost = drop_range(&mut handle.txn, &of, &range, kept)?;
        let mut added = 0;
        for mapping in mappings {
            let start = mapping.offset.0.max(self.at);
            let mapping_end = mapping.end().0.min(end);
            let is_extent = matches!(mapping.kind, MappingKind::Data | MappingKind::Prealloc);
            if !is_extent || start >= mapping_end {
                continue;
            }
            added += mapping_end - start;
            let skipped = start - mapping.offset.0;
            self.enter(handle, &of, mapping, self.to_target(start), skipped, mapping_end - start)?;
        }
        if !self.target.no_holes() {
            drop_range::put_missing_holes(&mut handle.txn, &of, &gap)
                .map_err(|error| handle.txn.abort(error))?;
        }
        let size = self.target.inode.size_bytes.max(range.end.min(self.end));
        self.target.count(handle, added, lost, size)?;
        if mappings.iter().any(|mapping| mapping.kind == MappingKind::Prealloc) {
            // Without it Linux takes a file of as many bytes as it is long for one of data alone.
            handle
                .change_inode(self.target.inode.id, |item| {
                    item.flags = (item.flags.get() | flags::PREALLOC).into();
                })
                .map_err(|error| handle.txn.abort(error))?;
        }
        drop(change);
        self.target.inode.size_bytes = size;
        Ok(())
    }

    fn enter(
        &self,
        handle: &mut Handle<'_>,
        of: &Target,
        mapping: &Mapping,
        file_offset: u64,
        skipped: u64,
        len_bytes: u64,
    ) -> Result<()> {
        let extent = RegularExtent {
            generation: handle.txn.generation(),
            ram_bytes: mapping.ram_bytes,
            compression: mapping.compression,
            disk_bytenr: mapping.disk_bytenr,
            disk_num_bytes: mapping.disk_num_bytes,
            offset: mapping.extent_offset + skipped,
            num_bytes: len_bytes,
        };
        let item = match mapping.kind {
            MappingKind::Prealloc => FileExtent::Prealloc(extent),
            _ => FileExtent::Regular(extent),
        };
        append::insert(&mut handle.txn, of, file_offset, &item)?;
        let at: LogicalAddr = extent.disk_bytenr;
        handle.txn.core().alloc.share_data(
            at,
            extent.disk_num_bytes,
            of.root,
            of.inode,
            file_offset.wrapping_sub(extent.offset),
        );
        Ok(())
    }

    /// A source whose data is inline is no longer than a sector: its bytes are copied.
    fn copy_inline(&mut self) -> Result<bool> {
        let source = &self.source.inode;
        let end = self.end.wrapping_sub(self.shift).min(source.size_bytes);
        let bytes = self.source.fs.read_device_piece(source.id, self.at, end)?;
        let at = self.to_target(self.at);
        let options = self.target.write_options()?;
        self.target.write_step(at, &bytes, &options)?;
        self.at = self.sectors_end.min(self.at + self.source.sector);
        Ok(self.at < self.sectors_end)
    }
}
