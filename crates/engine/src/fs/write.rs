//! Writing into files, and cutting and extending them.
//!
//! Data is never overwritten where it lies: a write takes space of its own, goes to the medium, and
//! then takes the place of what the file had there. A crash leaves the file as of the last commit.
//! Long writes are several steps, each under a handle of its own: after a crash, a beginning of
//! them may be there.
//!
//! One file is changed by one thread at a time: each call holds the file's data lock
//! ([`FileState::lock_data`](super::state::FileState::lock_data)).

use std::ops::Range;

use ubtrfs_iomap::AddressSpace;
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::{InodeItem, flags};
use ubtrfs_ondisk::{Corruption, FileOffset, KeyType, Reason};
use ubtrfs_rt::Arc;

use super::cuts::Cut;
use super::entry::check_flags;
use super::file_io::{FileIo, IoInode, MappingChange};
use super::fixed_csums::CsumsFixed;
use super::inode::{Inode, InodeId};
use super::state::{DataChange, timespec, touch};
use super::writeback::has_own_space;
use super::xattr::COMPRESSION_XATTR;
use crate::alloc::DataPromise;
use crate::data::append::{self, Grows, Target, Written};
use crate::data::compression::Method;
use crate::data::drop_range::{self, drop_range};
use crate::data::prepare::{PreparedData, WriteOptions};
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle, begin_freeing};
use crate::txn::Reservation;

/// Most bytes that one step writes.
const STEP_BYTES_MAX: u64 = 4 << 20;
/// Most file extents that one step takes out.
pub(super) const STEP_EXTENTS_MAX: usize = 64;
/// Most that one step takes away of a file that is cut. The explorer's files are short.
const CUT_EXTENTS_MAX: usize = if cfg!(ubtrfs_explore) { 2 } else { STEP_EXTENTS_MAX };
/// As many go at once with a file's end, be it to where a commit has it in between.
const CUT_AT_ONCE_MAX: usize = CUT_EXTENTS_MAX;
/// Largest file, as in Linux.
const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// A regular file whose data lock is held.
pub(super) struct Locked<'a> {
    pub(super) fs: &'a Filesystem,
    pub(super) inode: Inode,
    pub(super) target: Target,
    pub(super) sector: u64,
    /// Whether what is written was promised its space: it is data that a caller was told is taken.
    pub(super) promise: DataPromise,
    /// Data only moves, or is shared: the file is not changed.
    pub(super) keeps_times: bool,
    /// What memory has of it, if it is open.
    space: Option<Arc<AddressSpace<FileIo>>>,
    _csums: CsumsFixed<'a>,
}

/// While it lives, a file's extents are being changed.
pub(super) enum DataChanging<'a> {
    Open { _change: MappingChange<'a> },
    Closed { _change: DataChange<'a> },
}

impl Filesystem {
    /// Writes `bytes` at `offset` of a regular file, over what is there, beyond its end with a hole
    /// between. Compressed, where the file's property or flag says so. The calling thread must hold
    /// no handle. Durable with the next commit; after a crash, a beginning of a long write may be
    /// there.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`, `NotPermitted`, `NoSpace`, `IsDirectory`; `InvalidArgument` for
    /// another type, or an end beyond the largest file. What was written before an error stays.
    pub fn write(&self, id: InodeId, offset: FileOffset, bytes: &[u8]) -> Result<()> {
        // While the lock is held nobody opens it.
        let Some(lock) = self.lock_closed(id) else {
            return self.write_open(id, offset, bytes);
        };
        let mut file = Locked::new(self, id)?;
        let is_append_only = file.inode.flags & flags::APPEND != 0;
        if is_append_only && offset.0 < file.inode.size_bytes {
            return check_flags(id, file.inode.flags, false);
        }
        let len = bytes.len() as u64;
        let end = offset.0.checked_add(len).filter(|end| *end <= FILE_BYTES_MAX);
        let end = end.ok_or_else(|| append::misplaced(offset.0, "beyond the largest file"))?;
        if len == 0 {
            return Ok(());
        }
        let options = file.write_options()?;
        file.outline_unless(0..end)?;
        let mut rest = (offset.0, bytes);
        match file.write_steps(&mut rest, &options) {
            // Only who has it open writes to the space that it has.
            Err(Error::NoSpace { .. }) if has_own_space(&file.inode) => {
                drop((file, lock));
                self.write_open(id, FileOffset(rest.0), rest.1)
            }
            result => result,
        }
    }

    /// Cuts a regular file off, or extends it with a hole, to `size_bytes`. The calling thread must
    /// hold no handle. Durable with the next commit; after a crash, a long file may be cut off in
    /// part.
    ///
    /// # Errors
    /// As [`Filesystem::write`].
    pub fn truncate(&self, id: InodeId, size_bytes: u64) -> Result<()> {
        let Some(_lock) = self.lock_closed(id) else {
            return self.truncate_open(id, size_bytes);
        };
        let mut file = Locked::new(self, id)?;
        check_flags(id, file.inode.flags, false)?;
        if size_bytes > FILE_BYTES_MAX {
            return Err(append::misplaced(size_bytes, "beyond the largest file"));
        }
        let old = file.inode.size_bytes;
        if size_bytes > old {
            file.outline_unless(0..size_bytes)?;
        }
        let sectors_end = size_bytes.next_multiple_of(file.sector);
        // Whatever a commit has of it, all that goes at once is gone or there.
        if size_bytes < old
            && start_of_last_extents(self, id, sectors_end, CUT_AT_ONCE_MAX + 1)? <= sectors_end
        {
            match file.end_at(size_bytes) {
                // Fewer at a time take less.
                Err(Error::NoSpace { .. }) => {}
                result => return result,
            }
        }
        let _cut = match size_bytes < old {
            true => file.cut_from_end(size_bytes)?,
            false => None,
        };
        file.end_at(size_bytes)
    }
}

impl Locked<'_> {
    /// Lets the file end at `size`, and drops the few extents that it has behind that, in one step.
    fn end_at(&mut self, size: u64) -> Result<()> {
        let options = self.write_options()?;
        // A file that Linux left may go on behind its inline data.
        if size <= self.sector && self.is_inline()? {
            let bytes = self.read(0..size)?;
            // What is inline stays so, whatever new data of the file is: to be cut it needs no space.
            let max_inline_bytes = self.fs.write_options(None).max_inline_bytes;
            let options = WriteOptions { max_inline_bytes, ..options };
            return self.replace(0, &bytes, size, &options);
        }
        // What lies behind the end in its sector must be zeros, for when the file grows.
        let edge = size.min(self.inode.size_bytes);
        let sector_start = edge / self.sector * self.sector;
        if edge > sector_start && self.has_data_at(sector_start)? {
            let kept = self.read(sector_start..edge)?;
            return self.replace(sector_start, &kept, size, &options);
        }
        self.replace(edge.next_multiple_of(self.sector), &[], size, &options)
    }
}

impl<'a> Locked<'a> {
    /// A regular file that may be changed. The caller holds its data lock.
    pub(super) fn new(fs: &'a Filesystem, id: InodeId) -> Result<Self> {
        fs.inner.core.check_writable()?;
        fs.inner.files.names().check_writable(&fs.inner.core, id.root)?;
        let mut file = Self::for_reading(fs, id)?;
        fs.inner.files.names().check_not_going(id, file.inode.nlink)?;
        check_flags(id, file.inode.flags, true)?;
        file.drop_left_behind()?;
        Ok(file)
    }

    /// A regular file that stays as it is while the caller holds its data lock.
    pub(super) fn for_reading(fs: &'a Filesystem, id: InodeId) -> Result<Self> {
        let file = Self::of_open(fs, id)?;
        let inode = &file.inode;
        match inode.file_type() {
            FileType::Regular => {}
            FileType::Directory => return Err(Error::IsDirectory { what: id.to_string() }),
            _ => return Err(Error::InvalidArgument { what: format!("{id} is no regular file") }),
        }
        if inode.size_bytes > FILE_BYTES_MAX {
            return Err(Corruption::new(Reason::BadValue)
                .in_root(id.root)
                .have(format!("{id} of {} bytes", inode.size_bytes))
                .expect(format!("at most {FILE_BYTES_MAX}"))
                .into());
        }
        Ok(file)
    }

    /// The file, whatever its flags say: for who has it open already.
    pub(super) fn of_open(fs: &'a Filesystem, id: InodeId) -> Result<Self> {
        let csums = fs.inner.files.fixed_csums.fix(id);
        let inode = fs.disk_inode(id)?;
        fs.check_is_whole(&inode)?;
        let target = Target { root: id.root, inode: id.inode, has_csums: inode.has_csums() };
        let space = fs.inner.open_files.find(id);
        Ok(Self {
            fs,
            inode,
            target,
            sector: fs.sectorsize_bytes(),
            promise: DataPromise::None,
            keeps_times: false,
            space,
            _csums: csums,
        })
    }

    /// Begins a change of its extents.
    pub(super) fn change(&self) -> DataChanging<'_> {
        match &self.space {
            Some(space) => DataChanging::Open { _change: space.inode().change(self.fs) },
            None => {
                DataChanging::Closed { _change: self.fs.inner.files.change_data(self.inode.id) }
            }
        }
    }

    /// How the file's data is written.
    pub(super) fn write_options(&self) -> Result<WriteOptions> {
        self.fs.write_options_of(&self.inode)
    }

    pub(super) fn no_holes(&self) -> bool {
        self.fs.has_no_holes()
    }

    fn read(&self, range: Range<u64>) -> Result<Vec<u8>> {
        let len = usize::try_from(range.end - range.start).expect("what is read here is short");
        let mut bytes = vec![0; len];
        let have = self.fs.read_device(self.inode.id, FileOffset(range.start), &mut bytes)?;
        bytes[have..].fill(0);
        Ok(bytes)
    }

    /// Whether the sector at `start` is data on the medium.
    fn has_data_at(&self, start: u64) -> Result<bool> {
        let mut extents = self.fs.file_extents(self.inode.id, FileOffset(start))?;
        let first = extents.next().transpose()?;
        Ok(first.is_some_and(|mapping| mapping.kind == crate::MappingKind::Data))
    }

    /// Before something is written from `at` on, in another sector than that in which the file ends: makes zeros of what that has
    /// behind the end, where a crash may have left what was cut off.
    pub(super) fn clear_old_tail(&mut self, at: u64, options: &WriteOptions) -> Result<()> {
        let end = self.inode.size_bytes;
        let start = end / self.sector * self.sector;
        if at < start + self.sector || end == start || !self.has_data_at(start)? {
            return Ok(());
        }
        let kept = self.read(start..end)?;
        // Beside others it cannot be inline.
        let options = WriteOptions { max_inline_bytes: 0, ..*options };
        self.replace(start, &kept, end, &options)
    }

    fn is_inline(&self) -> Result<bool> {
        drop_range::is_inline(&self.fs.inner.core, &self.target)
    }

    /// Moves inline data into an extent of its own, unless the file will be short enough to stay
    /// inline when `range`, from its beginning, has been written.
    pub(super) fn outline_unless(&mut self, range: Range<u64>) -> Result<()> {
        let options = self.write_options()?;
        if !self.is_inline()? || range.end <= options.max_inline_bytes as u64 {
            return Ok(());
        }
        let size = self.inode.size_bytes;
        let bytes = self.read(0..size.min(self.sector))?;
        let options = WriteOptions { max_inline_bytes: 0, ..options };
        let kept = std::mem::replace(&mut self.keeps_times, true);
        let moved = self.replace(0, &bytes, size, &options);
        self.keeps_times = kept;
        moved
    }

    /// Moves inline data of an open file into an extent, by what was promised for that, if anything was.
    pub(super) fn outline_as_promised(&mut self, io: &IoInode) -> Result<()> {
        // Others may have moved it before the file was locked: then the promise is not spent.
        if !self.is_inline()? {
            return Ok(());
        }
        if !io.take_outline_promise() {
            return self.outline_unless(0..u64::MAX);
        }
        let before = std::mem::replace(&mut self.promise, DataPromise::Given);
        let moved = self.outline_unless(0..u64::MAX);
        self.promise = before;
        moved.inspect_err(|_| io.keep_outline_promise(self.fs))
    }

    /// Writes all that is left of a write, from its offset on, in steps. What could not be written is left then.
    fn write_steps(&mut self, left: &mut (u64, &[u8]), options: &WriteOptions) -> Result<()> {
        let end = left.0 + left.1.len() as u64;
        self.clear_old_tail(left.0, options)?;
        while !left.1.is_empty() {
            let (at, rest) = *left;
            let step_end =
                self.step_end(at, end.min(at / self.sector * self.sector + STEP_BYTES_MAX))?;
            let count = usize::try_from(step_end - at).expect("a step is short");
            self.write_step(at, &rest[..count], options)?;
            *left = (step_end, &rest[count..]);
        }
        Ok(())
    }

    /// Where a step from `at` ends so that it replaces few enough extents.
    pub(super) fn step_end(&self, at: u64, end: u64) -> Result<u64> {
        let start = at / self.sector * self.sector;
        let range = start..end.next_multiple_of(self.sector);
        let core = &self.fs.inner.core;
        let limit = drop_range::end_of_extents(core, &self.target, &range, STEP_EXTENTS_MAX)?;
        Ok(end.min(limit.max(start + self.sector)))
    }

    /// Writes a piece, with what the file has in the sectors at its ends.
    pub(super) fn write_step(
        &mut self,
        at: u64,
        bytes: &[u8],
        options: &WriteOptions,
    ) -> Result<()> {
        let end = at + bytes.len() as u64;
        let size = self.inode.size_bytes.max(end);
        let start = at / self.sector * self.sector;
        let sectors_end = end.next_multiple_of(self.sector).min(size);
        if start == at && sectors_end == end {
            return self.replace(start, bytes, size, options);
        }
        let mut whole = self.read(start..at)?;
        whole.extend_from_slice(bytes);
        whole.extend_from_slice(&self.read(end..sectors_end)?);
        self.replace(start, &whole, size, options)
    }

    /// Puts `bytes`, from the beginning of a sector on, in the place of what the file has there,
    /// all sectors that they touch whole, and lets the file end at `size`: all at once.
    fn replace(
        &mut self,
        start: u64,
        bytes: &[u8],
        size: u64,
        options: &WriteOptions,
    ) -> Result<()> {
        let data = PreparedData::new(bytes.to_vec(), options);
        let result = self.replace_once(start, data, size);
        if !matches!(result, Err(Error::NoSpace { .. })) || !self.fs.inner.core.frees_by_commit() {
            return result;
        }
        // What was freed in this transaction can be used after its commit.
        self.fs.inner.core.commit_unless_held()?;
        let data = PreparedData::new(bytes.to_vec(), options);
        self.replace_once(start, data, size)
    }

    fn replace_once(&mut self, start: u64, data: PreparedData, size: u64) -> Result<()> {
        let core = &self.fs.inner.core;
        let len = data.len_bytes() as u64;
        let old_end = self.inode.size_bytes.next_multiple_of(self.sector);
        let inline_max = append::inline_bytes_max(core.roots.store.geometry().nodesize_bytes);
        let is_whole = start == 0 && len == size && size > 0 && old_end <= self.sector;
        let inline = data
            .inline(self.target.has_csums)
            .filter(|(_, bytes)| is_whole && bytes.len() <= inline_max);
        // Beside what is allocated behind the end it cannot be inline, nor where memory has more.
        let has_more = inline.is_some()
            && (self.space.as_ref().is_some_and(|space| space.size().bytes() > self.sector)
                || drop_range::extents_end(core, &self.target)? > self.sector);
        if let Some((compression, bytes)) = inline.filter(|_| !has_more) {
            self.replace_by_inline(len, compression, bytes)?;
        } else {
            let mut extents = data.into_extents();
            if !self.target.has_csums {
                extents = extents.into_plain(self.sector);
            }
            let pieces = [(start, extents)];
            let csums = append::csums_of(&self.target, &pieces);
            let written = {
                // What only cuts off may use what is kept back for freeing.
                let reservation = match (len, self.promise) {
                    (0, _) | (_, DataPromise::Given) => Reservation::items(0).promised(),
                    _ => Reservation::items(0),
                };
                let _handle = self.fs.begin_step(reservation)?;
                append::find_space(core, &pieces, self.promise)?
            };
            let end = (start + len).next_multiple_of(self.sector);
            let entered = written
                .write(core, append::bytes_of(&pieces))
                .and_then(|()| self.replace_by(start..end, &written, &csums, size));
            entered.inspect_err(|error| {
                // After an abort nothing is given out again.
                if !matches!(error, Error::Aborted { .. }) {
                    written.release(core);
                }
            })?;
        }
        self.inode.size_bytes = size;
        Ok(())
    }

    fn replace_by_inline(&self, len: u64, compression: Compression, bytes: &[u8]) -> Result<()> {
        let removals = Reservation::removals(STEP_EXTENTS_MAX as u64);
        let reservation = Reservation::extents(2).and(Reservation::items(4)).and(removals);
        let mut handle = self.fs.begin_step(reservation)?;
        handle.check_file(self.inode.id)?;
        let kept = self.fs.inner.files.kept();
        let _change = self.change();
        let lost = drop_range(&mut handle.txn, &self.target, &(0..self.sector), kept)?;
        append::put_inline(&mut handle.txn, &self.target, len, compression, bytes)?;
        if let Some(space) = &self.space {
            space.inode().note_inline();
        }
        self.count(&mut handle, len, lost, len)
    }

    /// Puts what is on the medium in the place of what the file has in `range`. As many extents as it
    /// became are reserved for: in fragmented space they are more than there were pieces.
    fn replace_by(
        &self,
        range: Range<u64>,
        written: &Written,
        csums: &[u8],
        size: u64,
    ) -> Result<()> {
        // What is behind the end of a file that is cut off goes, too.
        let is_cut = size < self.inode.size_bytes;
        let dropped = range.start..if is_cut { u64::MAX } else { range.end };
        let old_count = drop_range::extent_count(&self.fs.inner.core, &self.target, &dropped)?;
        let reservation = match written.extent_count() {
            // What only cuts off frees space.
            0 => Reservation::removals(old_count + 2),
            count => Reservation::storing(count, old_count, 1).with_csums(csums.len() as u64),
        };
        let gap = self.gap_behind(range.start, size);
        let reservation = reservation.with_holes(self.hole_count(&gap)?);
        let reservation = match self.promise {
            DataPromise::None => reservation,
            DataPromise::Given => reservation.promised(),
        };
        let (root, inode_flags) = (self.target.root, self.inode.flags);
        let mut handle = self.fs.begin_step_for_data(root, inode_flags, reservation)?;
        match self.promise {
            DataPromise::None => handle.check_file(self.inode.id)?,
            DataPromise::Given => handle.check_file_is_there(self.inode.id)?,
        }
        let files = &self.fs.inner.files;
        let txn = &mut handle.txn;
        let _change = self.change();
        let lost = drop_range(txn, &self.target, &dropped, files.kept())?;
        let pending = &files.csums;
        let added = append::enter_all(txn, &self.target, written, csums, pending, Grows::Yes)?;
        if !self.no_holes() && !gap.is_empty() {
            drop_range::put_missing_holes(txn, &self.target, &gap)
                .map_err(|error| txn.abort(error))?;
        }
        self.count(&mut handle, added, lost, size)
    }

    /// What a file that ends at `end` then must have items for, where holes have some: from where it ended, or from `start`,
    /// where it is changed.
    pub(super) fn gap_behind(&self, start: u64, end: u64) -> Range<u64> {
        let old_end = self.inode.size_bytes.next_multiple_of(self.sector);
        old_end.min(start)..end.next_multiple_of(self.sector)
    }

    /// How many holes must be entered in a gap.
    pub(super) fn hole_count(&self, gap: &Range<u64>) -> Result<u64> {
        match self.no_holes() || gap.is_empty() {
            true => Ok(0),
            false => drop_range::missing_hole_count(&self.fs.inner.core, &self.target, gap),
        }
    }

    /// Enters in the inode that its data changed.
    pub(super) fn count(
        &self,
        handle: &mut Handle<'_>,
        added: u64,
        lost: u64,
        size: u64,
    ) -> Result<()> {
        let (transid, now) = (handle.txn.generation().0, handle.txn.now());
        if let Some(space) = self.space.as_ref().filter(|_| !self.keeps_times) {
            // What was written before and is noted only is no later than this.
            space.inode().raise_noted_time(now);
        }
        let change = |item: &mut InodeItem| {
            item.size = size.into();
            item.nbytes = item.nbytes.get().saturating_add(added).saturating_sub(lost).into();
            if self.keeps_times {
                item.transid = transid.into();
            } else {
                item.mtime = timespec(now);
                touch(item, transid, now);
            }
        };
        let id = self.inode.id;
        let changed = match self.promise {
            DataPromise::None => handle.change_inode(id, change),
            // As it was begun: what was taken is written though its subvolume is read-only by now.
            DataPromise::Given => {
                handle.change_checked_inode(&mut self.fs.inner.files.names(), id, change)
            }
        };
        changed.map_err(|error| handle.txn.abort(error))
    }

    /// Removes extents from the end of the file until none begins behind the sector in which it ends if it ends at `size`, a few under
    /// each handle, the file's size on the medium going down with them. If that takes any step, the file ends at `size` for who looks at it
    /// from the first one on, as long as what is returned lives.
    fn cut_from_end(&mut self, size: u64) -> Result<Option<Cut<'a>>> {
        let (fs, id) = (self.fs, self.inode.id);
        let end = size.next_multiple_of(self.sector);
        let mut count = CUT_EXTENTS_MAX;
        let mut cut = None;
        loop {
            if start_of_last_extents(fs, id, end, 1)? <= end {
                return Ok(cut);
            }
            let mut handle = begin_freeing(&mut count, |count| {
                let removals = Reservation::removals(count);
                fs.begin_step(Reservation::removals(3).and(removals))
            })?;
            // Of as many as there was room for.
            let from = start_of_last_extents(fs, id, end, count)?;
            handle.check_file(id)?;
            let kept = fs.inner.files.kept();
            let change = self.change();
            cut.get_or_insert_with(|| fs.inner.files.begin_cut(id, size));
            let lost = drop_range(&mut handle.txn, &self.target, &(from..u64::MAX), kept)?;
            let size_now = self.inode.size_bytes.min(from);
            self.count(&mut handle, 0, lost, size_now)?;
            drop(change);
            self.inode.size_bytes = size_now;
        }
    }
}

/// Where the last `count` extents of a file begin, but not before `end`.
///
/// # Errors
/// A block that cannot be read.
pub(super) fn start_of_last_extents(
    fs: &Filesystem,
    id: InodeId,
    end: u64,
    count: usize,
) -> Result<u64> {
    let mut cursor = fs.tree(id.root)?.cursor();
    cursor.seek_back(&id.key(KeyType::EXTENT_DATA, u64::MAX))?;
    let mut from = end;
    for _ in 0..count {
        match cursor.current()? {
            Some((key, _))
                if key.objectid == id.inode.object_id()
                    && key.ty == KeyType::EXTENT_DATA
                    && key.offset > end =>
            {
                from = key.offset;
            }
            // The rest goes with the last step.
            _ => return Ok(end),
        }
        cursor.prev()?;
    }
    Ok(from)
}

impl Filesystem {
    /// Whether what is not mapped is a hole: else holes have items.
    pub(crate) fn has_no_holes(&self) -> bool {
        let superblock = self.inner.core.superblock.lock();
        Incompat(superblock.incompat_flags.get()).contains(Incompat::NO_HOLES)
    }

    /// Whether data is compressed of a file whose inode has these flags.
    pub(super) fn compresses(&self, bits: u64) -> bool {
        let options = &self.inner.options;
        let (is_asked, is_forced) = (options.compression.is_some(), options.force_compression);
        // Data that is written in place, or has no checksums, cannot be compressed.
        let is_plain = bits & (flags::NODATACOW | flags::NODATASUM) != 0;
        let is_refused = is_plain || bits & flags::NOCOMPRESS != 0 && !(is_forced && is_asked);
        !is_refused && (is_asked || bits & flags::COMPRESS != 0)
    }

    /// How new data of a file is compressed, by its property and flags and by what the filesystem was opened with.
    /// The rules are Linux's `inode_need_compress()` and `compress_file_range()`.
    ///
    /// # Errors
    /// Damaged items, or the device's error.
    pub(crate) fn compression_of(&self, inode: &Inode) -> Result<Option<Method>> {
        if !self.compresses(inode.flags) {
            return Ok(None);
        }
        let asked = self.inner.options.compression;
        let is_chosen = inode.flags & flags::COMPRESS != 0;
        // Who has a property has the flag.
        let property = match is_chosen {
            true => self.xattr(inode.id, COMPRESSION_XATTR)?,
            false => None,
        };
        let compression = match property.as_deref() {
            Some(value) if value.starts_with(b"zlib") => Compression::Zlib,
            Some(value) if value.starts_with(b"zstd") => Compression::Zstd,
            Some(value) if value.starts_with(b"lzo") => Compression::Lzo,
            _ => asked.map_or(Compression::Zlib, |method| method.compression),
        };
        Ok(Some(Method::new(compression, asked.map_or(0, |method| method.level))))
    }
}
