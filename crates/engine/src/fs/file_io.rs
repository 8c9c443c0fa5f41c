//! The engine's side of file I/O: what [`ubtrfs_iomap`] asks of a filesystem.
//!
//! Invariants:
//!
//! 1. The mappings of an open file change under its place lock, by the holder of its data lock, and the
//!    sequence is counted up before anything of it changes: whoever read space that is given up here
//!    finds so before it believes what it read.
//! 2. Data is on the medium before a file extent refers to it, and the inode's size on the medium never
//!    reaches beyond what was mapped by then, or was said by a change of the size itself; nor beyond the
//!    block in which it ends there before that block is on the medium ([`ubtrfs_iomap::AddressSpace::flush_old_tail`]).
//! 3. Dirty data has space promised ([`DataPromise`](crate::alloc::DataPromise)), and what its items may need is kept back from
//!    every reservation ([`FileState::held_back_bytes`](super::state::FileState)).
//!
//! Lock order: a locked range of the file, its data lock, a handle, its place, names, a tree.
//!
//! A crash leaves the file as of the last commit; what was only in memory is lost.

use std::sync::Weak;

use ubtrfs_iomap::extent_state::{StateBits, Want};
use ubtrfs_iomap::{
    Beyond, Detail, DirtyBatch, Fate, FileOffset, FileRange, FileSystem, LostData, Mapping,
    MappingFlags, MappingKind, MappingSequence, Purpose, ReadPiece, RunFailure, SeenEnd,
    StraightWrites, WritebackRun,
};
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::extent::BackRef;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_rt::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, Time};

use super::file_space::ALLOCATION_STEP;
use super::inode::{Inode, InodeId};
use super::replaced::Cut;
use super::sharing::Sharing;
use super::state::DataChange;
use super::stored::Stored;
use super::writeback::{From, has_own_space};
use crate::alloc::Promised;
use crate::data::append::Target;
use crate::data::drop_range;
use crate::data::file_extent::{self, ExtentWalk, ExtentsOf};
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Inner};
use crate::txn::{Core, Reservation};

/// Where mappings end that nothing is mapped behind: past every file, in whole blocks of any size.
const END: u64 = 1 << 63;

/// A filesystem as file I/O sees it. Does not keep the filesystem open.
pub struct FileIo {
    inner: Weak<Inner>,
    block_bytes: u32,
}

/// What the engine keeps of a file that is open for I/O.
pub struct IoInode {
    pub(super) id: InodeId,
    inner: Weak<Inner>,
    sequence: MappingSequence,
    place: Mutex<Place>,
    /// What is on the medium, once looked up; read and changed by the holder of the file's data lock.
    medium: Mutex<Option<Medium>>,
    /// The file is no more.
    is_gone: AtomicBool,
    /// Whether dirty data, or a mapping that is about to get some, counts on the space that the file has.
    pub(super) has_placed: AtomicBool,
    /// Whether it ever did.
    has_had_placed: AtomicBool,
    /// Whether a block is promised, beside what is dirty, for inline data that must move to an extent when something behind it is
    /// written: see [`FileIo::promise_outline`].
    has_outline_promise: AtomicBool,
    /// Longer than a block, it is known not to be inline on the medium. Set under its data lock.
    is_outlined: AtomicBool,
    /// No data lies behind its end on the medium: see [`Filesystem::drop_left_behind`].
    pub(super) has_nothing_behind: AtomicBool,
    /// Half of what of it was to be compressed the last time did not shrink.
    pub(super) stays_plain: AtomicBool,
    /// Whether it is written anew: see [`super::replaced`].
    pub(super) cut: Cut,
    /// The inode's flags.
    flags: AtomicU64,
    /// When it was last written in memory; `None` once the inode says so.
    pub(super) written: Mutex<Option<Time>>,
}

/// How far a file reaches on the medium.
#[derive(Clone, Copy, Debug)]
pub(super) struct Medium {
    /// The inode's size.
    pub(super) size: u64,
    /// Where its last file extent ends.
    pub(super) extents_end: u64,
}

/// Where mappings were last looked up.
#[derive(Default)]
pub(super) struct Place {
    walk: Option<ExtentWalk>,
    last: Option<Mapping>,
}

/// While it lives, the mappings of a file are being changed.
pub(super) struct MappingChange<'a> {
    _place: MutexGuard<'a, Place>,
    _count: DataChange<'a>,
}

impl IoInode {
    pub(super) fn new(fs: &Filesystem, inode: &Inode) -> Self {
        let id = inode.id;
        Self {
            id,
            medium: Mutex::new(None),
            is_gone: AtomicBool::new(false),
            has_placed: AtomicBool::new(false),
            has_had_placed: AtomicBool::new(false),
            has_outline_promise: AtomicBool::new(false),
            is_outlined: AtomicBool::new(false),
            has_nothing_behind: AtomicBool::new(fs.has_no_holes()),
            stays_plain: AtomicBool::new(false),
            cut: Cut::default(),
            flags: AtomicU64::new(inode.flags),
            inner: std::sync::Arc::downgrade(&fs.inner),
            sequence: MappingSequence::new(),
            place: Mutex::new(Place::default()),
            written: Mutex::new(None),
        }
    }

    /// Begins a change of the file's mappings. The caller holds its data lock and a handle.
    pub(super) fn change<'a>(&'a self, fs: &'a Filesystem) -> MappingChange<'a> {
        MappingChange {
            _place: self.change_mappings(),
            _count: fs.inner.files.change_data(self.id),
        }
    }

    /// As [`IoInode::change`], for who counts the change of the data by himself.
    pub(super) fn change_mappings(&self) -> MutexGuard<'_, Place> {
        let mut place = self.place.lock();
        self.sequence.changed();
        // A walk goes on behind what it told, which may be another extent's by now.
        *place = Place::default();
        *self.medium.lock() = None;
        place
    }

    /// The file is no more, or will not be: nothing is mapped from now on.
    pub(super) fn end(&self, _: &MutexGuard<'_, Place>) {
        self.is_gone.store(true, Ordering::Release);
    }

    /// How far it reaches on the medium. The caller holds its data lock.
    pub(super) fn medium(&self, fs: &Filesystem) -> Result<Medium> {
        let mut known = self.medium.lock();
        if let Some(medium) = *known {
            return Ok(medium);
        }
        let size = fs.disk_inode(self.id)?.size_bytes;
        let extents_end = drop_range::extents_end(&fs.inner.core, &self.target(true))?;
        Ok(*known.insert(Medium { size, extents_end }))
    }

    /// The inode's size changed.
    pub(super) fn forget_medium(&self) {
        *self.medium.lock() = None;
    }

    /// The file was written, in memory.
    pub(super) fn note_write(&self, now: Time) {
        *self.written.lock() = Some(now);
    }

    /// The file was changed, of which the inode tells at once. What is noted is none before that.
    pub(super) fn raise_noted_time(&self, now: Time) {
        if let Some(noted) = &mut *self.written.lock() {
            *noted = now.max(*noted);
        }
    }

    /// What the file is at `at`.
    fn mapping_at(&self, fs: &Filesystem, place: &mut Place, at: u64) -> Result<Mapping> {
        match self.known_at(place, at)? {
            Some(last) => Ok(last),
            None => Ok(self.looked_up(fs, place, at)?.0),
        }
    }

    /// What was looked up last, if that is `at` and nothing changed since. Inlined by order, as [`IoInode::looked_up`].
    #[inline(always)]
    fn known_at(&self, place: &Place, at: u64) -> Result<Option<Mapping>> {
        if self.is_gone.load(Ordering::Acquire) {
            return Err(Error::not_found(self.id));
        }
        let is_known = |last: &Mapping| {
            last.cookie == self.sequence.cookie() && last.range.contains(FileOffset::new(at))
        };
        Ok(place.last.filter(is_known))
    }

    /// [`IoInode::mapping_at`], and the file extent that says so, at which the walk of the place is then.
    ///
    /// Inlined by order, as each seek over many extents asks: what it returns is long.
    #[inline(always)]
    fn looked_up(
        &self,
        fs: &Filesystem,
        place: &mut Place,
        at: u64,
    ) -> Result<(Mapping, Option<file_extent::Mapping>)> {
        let cookie = self.sequence.cookie();
        let walk = match &mut place.walk {
            Some(walk) => walk,
            none => {
                none.insert(ExtentWalk::new(&fs.tree(self.id.root)?, self.of(fs), DiskOffset(at)))
            }
        };
        walk.seek(DiskOffset(at));
        let found = walk.next()?;
        let end = walk.position();
        let hole = FileRange::new(FileOffset::new(at), FileOffset::new(END));
        let (range, found) = match found {
            None => (hole, None),
            Some(found) => {
                let start = found.offset.0.min(at);
                (FileRange::new(FileOffset::new(start), FileOffset::new(end)), Some(found))
            }
        };
        let mapping = iomap_mapping(range, found.as_ref(), cookie);
        place.last = Some(mapping);
        Ok((mapping, found))
    }

    /// What [`Detail::Sharing`] asks for.
    fn map_with_sharing(
        &self,
        fs: &Filesystem,
        range: FileRange,
        count_max: usize,
        mappings: &mut Vec<Mapping>,
    ) -> Result<()> {
        // While it is held no commit moves references from the queue to the tree.
        let _handle = fs.inner.core.look().ok();
        let mut sharing = Sharing::of(fs, self)?;
        let mut place = self.place.lock();
        map_in_turn(range, count_max, mappings, |at| {
            let known = self.known_at(&place, at)?;
            if let Some(hole) = known.filter(|known| known.kind == MappingKind::Hole) {
                return Ok(hole);
            }
            // Looked up anew: so the walk is where it says.
            let (mut mapping, found) = self.looked_up(fs, &mut place, at)?;
            if let (Some(found), Some(walk)) = (found, &place.walk) {
                mapping.flags.is_shared = sharing.is_shared(walk, &found)?;
            }
            Ok(mapping)
        })
    }

    /// Whether a reference is that of the file's own extents with that offset.
    pub(super) fn is_own(&self, reference: &BackRef, offset: u64) -> bool {
        matches!(reference, BackRef::ExtentData { root, inode, offset: o, .. }
            if (*root, *inode, *o) == (self.id.root, self.id.inode, offset))
    }

    /// Whether data may take less space than it has bytes: compressed, or inline.
    fn may_take_less(&self, fs: &Filesystem, range: FileRange) -> bool {
        range.end.bytes() <= fs.sectorsize_bytes() || self.compresses(fs)
    }

    /// Whether what is written to it is compressed where it shrinks.
    pub(super) fn compresses(&self, fs: &Filesystem) -> bool {
        fs.compresses(self.flags())
    }

    pub(super) fn flags(&self) -> u64 {
        self.flags.load(Ordering::Relaxed)
    }

    /// The inode has other flags.
    pub(super) fn note_flags(&self, bits: u64) {
        self.flags.store(bits, Ordering::Relaxed);
    }

    /// Its data is inline now. The caller holds the data lock.
    pub(super) fn note_inline(&self) {
        self.is_outlined.store(false, Ordering::Relaxed);
    }

    /// The promise for moving inline data, if there is one: spent, or kept for another time, by who calls this.
    pub(super) fn take_outline_promise(&self) -> bool {
        self.has_outline_promise.swap(false, Ordering::AcqRel)
    }

    pub(super) fn has_outline_promise(&self) -> bool {
        self.has_outline_promise.load(Ordering::Acquire)
    }

    /// The data is not inline any more, or of no concern.
    pub(super) fn give_outline_promise_back(&self, core: &Core) {
        if self.take_outline_promise() {
            let len_bytes = core.roots.store.geometry().sectorsize_bytes as u64;
            core.alloc.take_back_data(len_bytes, Promised::Space);
        }
    }

    /// Keeps a promise that was taken and not spent.
    pub(super) fn keep_outline_promise(&self, fs: &Filesystem) {
        if self.has_outline_promise.swap(true, Ordering::AcqRel) {
            // Another came meanwhile.
            fs.inner.core.alloc.take_back_data(fs.sectorsize_bytes(), Promised::Space);
        }
    }

    /// What was promised to what is dirty of it, as far as that is known.
    pub(super) fn promised(&self) -> Promised {
        match self.has_had_placed.load(Ordering::Acquire) {
            true => Promised::Place,
            false => Promised::Space,
        }
    }

    /// Its extents and the hole behind them.
    pub(super) fn of(&self, fs: &Filesystem) -> ExtentsOf {
        ExtentsOf {
            root: self.id.root,
            inode: self.id.inode,
            sectorsize_bytes: fs.sectorsize_bytes(),
            size_bytes: END,
        }
    }

    pub(super) fn target(&self, has_csums: bool) -> Target {
        Target { root: self.id.root, inode: self.id.inode, has_csums }
    }
}

/// Mappings from the start of `range` on, each asked of `map` where the one before ends.
///
/// # Errors
/// That of the first.
#[inline(always)]
fn map_in_turn(
    range: FileRange,
    count_max: usize,
    mappings: &mut Vec<Mapping>,
    mut map: impl FnMut(u64) -> Result<Mapping>,
) -> Result<()> {
    let mut at = range.start;
    for index in 0..count_max {
        let mapping = match map(at.bytes()) {
            // Who wants to know what lies there asks for it again.
            Err(_) if index > 0 => break,
            mapping => mapping?,
        };
        mappings.push(mapping);
        at = mapping.range.end;
        if at >= range.end {
            break;
        }
    }
    Ok(())
}

fn iomap_mapping(
    range: FileRange,
    found: Option<&file_extent::Mapping>,
    cookie: ubtrfs_iomap::Cookie,
) -> Mapping {
    let mut mapping = Mapping {
        range,
        kind: MappingKind::Hole,
        flags: MappingFlags::default(),
        cookie,
        address: None,
        token: 0,
    };
    let Some(found) = found else { return mapping };
    mapping.kind = match found.kind {
        file_extent::MappingKind::Hole => return mapping,
        file_extent::MappingKind::Inline => MappingKind::Inline,
        file_extent::MappingKind::Data => MappingKind::Mapped,
        file_extent::MappingKind::Prealloc => MappingKind::Unwritten,
    };
    mapping.flags.is_encoded = found.compression != Compression::None;
    let into = if mapping.flags.is_encoded { 0 } else { found.extent_offset };
    // As Linux reports it: inline data lies at 0.
    mapping.address = Some(found.disk_bytenr.0.saturating_add(into));
    mapping
}

impl FileIo {
    pub(super) fn new(fs: &Filesystem) -> Self {
        Self {
            inner: std::sync::Arc::downgrade(&fs.inner),
            block_bytes: u32::try_from(fs.sectorsize_bytes()).expect("a sector is small"),
        }
    }

    fn fs(&self) -> Result<Filesystem> {
        let inner = self.inner.upgrade();
        inner.map(|inner| Filesystem { inner }).ok_or_else(|| Error::ReadOnly {
            why: "the filesystem was closed while the file was open".to_owned(),
        })
    }

    /// Promises space for what will be dirty: for as much of the range as there is space for.
    fn reserve(&self, fs: &Filesystem, inode: &IoInode, wanted: FileRange) -> Result<Mapping> {
        fs.inner.core.check_writable()?;
        fs.inner.core.check_held_bytes()?;
        let block = u64::from(self.block_bytes);
        let mut range = wanted;
        let result = loop {
            match self.reserve_all(fs, inode, range) {
                Err(Error::NoSpace { .. }) if range.len_bytes() > block => {
                    let half = (range.len_bytes() / 2).next_multiple_of(block);
                    range = FileRange::with_len(range.start, half.min(range.len_bytes() - block));
                }
                result => break result,
            }
        };
        let is_behind = |range: FileRange| range.end.bytes() > block;
        let is_kept = result.as_ref().is_ok_and(|mapping| is_behind(mapping.range));
        // The caller has locked the file from its end on: if that is in the first block, nothing behind it is dirty, or about to be.
        if is_behind(wanted) && !is_kept && inode.has_outline_promise() {
            let space = fs.inner.open_files.find(inode.id);
            if space.is_some_and(|space| space.size().bytes() <= block) {
                inode.give_outline_promise_back(&fs.inner.core);
            }
        }
        result
    }

    fn reserve_all(&self, fs: &Filesystem, inode: &IoInode, range: FileRange) -> Result<Mapping> {
        let (at, len_bytes) = (range.start.bytes(), range.len_bytes());
        self.promise_outline(fs, inode, range)?;
        fs.promise_items(len_bytes)?;
        if let Err(error) = fs.promise_data(len_bytes) {
            match self.reserve_placed(fs, inode, range, error) {
                Err(Error::NoSpace { .. }) => {}
                result => return result,
            }
            fs.with_less_dirty(len_bytes, || fs.promise_data(len_bytes))?;
        }
        fs.inner.files.add_delalloc(len_bytes);
        if inode.may_take_less(fs, range) {
            fs.inner.open_files.may_take_less.store(true, Ordering::Relaxed);
        }
        let mapping = inode.mapping_at(fs, &mut inode.place.lock(), at);
        self.reserved(fs, range, mapping, Promised::Space)
    }

    /// The first block of a file that is no longer may lie inline, or come to, as long as memory has it end there. What comes behind it
    /// moves it to an extent, so that has its space promised, too.
    fn promise_outline(&self, fs: &Filesystem, inode: &IoInode, range: FileRange) -> Result<()> {
        let block = u64::from(self.block_bytes);
        if range.end.bytes() <= block
            || inode.has_outline_promise()
            || !self.may_be_inline(fs, inode, range)?
        {
            return Ok(());
        }
        fs.with_less_dirty(block, || fs.promise_data(block))?;
        inode.keep_outline_promise(fs);
        Ok(())
    }

    /// Whether the first block may be inline on the medium when data in `range`, which reaches beyond it, is written.
    fn may_be_inline(&self, fs: &Filesystem, inode: &IoInode, range: FileRange) -> Result<bool> {
        let block = u64::from(self.block_bytes);
        let is_inline = || drop_range::is_inline(&fs.inner.core, &inode.target(true));
        let is_short = |size| size <= fs.inner.options.max_inline_bytes as u64;
        let first = FileRange::with_len(FileOffset::ZERO, block);
        let Some(space) = fs.inner.open_files.find(inode.id) else { return Ok(false) };
        match space.size().bytes() {
            size if size > block => {
                // Only who found no space to move it has left it so, or Linux.
                if inode.is_outlined.load(Ordering::Relaxed) {
                    return Ok(false);
                }
                let _lock = fs.inner.files.lock_data(inode.id);
                let is_inline = is_inline()?;
                inode.is_outlined.store(!is_inline, Ordering::Relaxed);
                Ok(is_inline)
            }
            // It is among what is written: only packed can all of a block be inline, which then may be on the medium before the rest
            // is in memory; or an older version of it that is short, which arrives when what lies behind is about to.
            size if range.start.bytes() < block => {
                let has_older = |bits| space.states().test(first, Want::Any(bits));
                let may_become = inode.compresses(fs)
                    || has_older(StateBits::ORDERED)
                    || is_short(size) && has_older(StateBits::DELALLOC);
                Ok(may_become && !has_own_space(&fs.disk_inode(inode.id)?))
            }
            0 => Ok(false),
            size => {
                // What is on its way may be shorter than it is now.
                let is_coming_short =
                    is_short(size) || space.states().test(first, Want::Any(StateBits::ORDERED));
                let may_become = (is_coming_short || inode.compresses(fs))
                    && !has_own_space(&fs.disk_inode(inode.id)?);
                Ok(may_become || is_inline()?)
            }
        }
    }

    /// A mapping by which data goes where the file has its space, for which there is no other: `error`.
    fn reserve_placed(
        &self,
        fs: &Filesystem,
        inode: &IoInode,
        range: FileRange,
        error: Error,
    ) -> Result<Mapping> {
        let (at, len_bytes) = (range.start.bytes(), range.len_bytes());
        let is_full = matches!(error, Error::NoSpace { .. });
        // Who shares the file's extents is not waited for in vain.
        if !is_full || !inode.may_have_space_at(fs, at)? {
            return Err(error);
        }
        let _alone = fs.lock_placing();
        // While it is held no commit moves references from the queue to the tree, between which nobody sees them.
        let _handle = fs.begin_step(Reservation::items(0).promised())?;
        loop {
            // What is found must be what the mapping says: writeback may bring other data there.
            let cookie = inode.sequence.cookie();
            if !inode.has_space_at(fs, at)? {
                return Err(error);
            }
            let mapping = inode.mapping_at(fs, &mut inode.place.lock(), at)?;
            if mapping.cookie != cookie {
                continue;
            }
            inode.has_placed.store(true, Ordering::Release);
            inode.has_had_placed.store(true, Ordering::Release);
            fs.inner.core.alloc.promise_placed_data(len_bytes);
            fs.inner.files.add_delalloc(len_bytes);
            let mut mapping = self.reserved(fs, range, Ok(mapping), Promised::Place)?;
            mapping.flags.is_placed = true;
            return Ok(mapping);
        }
    }

    /// Keeps of what was promised for a range as much as the mapping holds.
    fn reserved(
        &self,
        fs: &Filesystem,
        range: FileRange,
        mapping: Result<Mapping>,
        promised: Promised,
    ) -> Result<Mapping> {
        let len_bytes = range.len_bytes();
        let mut mapping = mapping.inspect_err(|_| fs.take_back_data(len_bytes, promised))?;
        mapping.range.end = mapping.range.end.min(range.end);
        fs.take_back_data(len_bytes - mapping.range.intersection(range).len_bytes(), promised);
        Ok(mapping.reserved())
    }
}

impl FileSystem for FileIo {
    type Inode = IoInode;
    type Error = Error;

    fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    fn sequence<'a>(&self, inode: &'a IoInode) -> &'a MappingSequence {
        &inode.sequence
    }

    fn map(&self, inode: &IoInode, range: FileRange, purpose: Purpose<'_, '_>) -> Result<Mapping> {
        let fs = self.fs()?;
        let at = range.start.bytes();
        match purpose {
            Purpose::Write => self.reserve(&fs, inode, range),
            Purpose::Zero(batch) => {
                let mut place = inode.place.lock();
                let mapping = inode.mapping_at(&fs, &mut place, at)?;
                Ok(cover(mapping, range, batch))
            }
            Purpose::Read => inode.mapping_at(&fs, &mut inode.place.lock(), at),
        }
    }

    fn map_ahead(
        &self,
        inode: &IoInode,
        range: FileRange,
        detail: Detail,
        count_max: usize,
        mappings: &mut Vec<Mapping>,
    ) -> Result<()> {
        let fs = self.fs()?;
        if detail == Detail::Sharing {
            return inode.map_with_sharing(&fs, range, count_max, mappings);
        }
        let mut place = inode.place.lock();
        map_in_turn(range, count_max, mappings, |at| inode.mapping_at(&fs, &mut place, at))
    }

    fn read(&self, inode: &IoInode, pieces: &mut [ReadPiece<'_>]) -> Result<()> {
        let fs = self.fs()?;
        // Who only reads begins no handle, where it is done otherwise.
        fs.inner.core.share_memory();
        fs.read_pieces(inode, pieces)
    }

    fn write_back(
        &self,
        inode: &IoInode,
        runs: &[WritebackRun<'_>],
    ) -> Result<(), RunFailure<Error>> {
        let mut stored = Stored::default();
        let fs = self.fs().map_err(|error| {
            let (fate, stored) = (Fate::Lost { but: FileRange::default() }, Vec::new());
            RunFailure { index: 0, error, fate, stored }
        })?;
        let (core, files) = (&fs.inner.core, &fs.inner.files);
        // In this order: whose hold came between the two counts.
        let holds_before = core.holds_begun();
        let was_held = core.is_held();
        // What was kept back for the items of these is what their handles ask for now.
        files.subtract_delalloc(stored.missing_bytes(runs));
        if fs.write_runs(inode, runs, &mut stored).is_ok() {
            return Ok(());
        }
        // One by one: what can be written is, and who could not is known.
        for (index, run) in runs.iter().enumerate() {
            let Err(error) = fs.write_run_in_parts(inode, run, &mut stored) else {
                continue;
            };
            // While somebody holds commits, if only for a moment since this began, a transaction may be as large as it may become, or
            // space not be free yet.
            let passes = match error {
                Error::Limit { .. } => true,
                Error::NoSpace { .. } => {
                    was_held || core.is_held() || core.holds_begun() != holds_before
                }
                _ => false,
            };
            let mut fate = Fate::Kept;
            let mut kept_bytes = stored.missing_bytes(&runs[index..]);
            // Where it cannot be said where the file ends, that block may be any.
            if !passes && let Ok(end) = self.stored_size(inode) {
                let end = end.unwrap_or_default();
                let but = stored.missing_tail(run.range, end, self.block_bytes);
                let lost_bytes = stored.missing_bytes(&runs[index..=index]) - but.len_bytes();
                core.alloc.take_back_data(lost_bytes, inode.promised());
                kept_bytes -= lost_bytes;
                fate = Fate::Lost { but };
            }
            files.add_delalloc(kept_bytes);
            let stored = stored.from(run.range.start);
            return Err(RunFailure { index, error, fate, stored });
        }
        Ok(())
    }

    fn write_direct(&self, inode: &IoInode, run: &WritebackRun<'_>) -> Result<u64> {
        self.fs()?.write_direct(inode, run, From::Caller)
    }

    fn straight_writes(&self, inode: &IoInode) -> StraightWrites {
        let Ok(fs) = self.fs() else { return StraightWrites::Never };
        match (fs.writes_back_beside(), inode.compresses(&fs)) {
            // What does not shrink has larger extents if it comes from memory.
            (true, true) if !inode.stays_plain.load(Ordering::Relaxed) => StraightWrites::Beside,
            // Who copies to memory goes on while a thread on another processor writes that: sooner done, for a copy more.
            (true, _) => StraightWrites::Never,
            (false, _) => StraightWrites::Always,
        }
    }

    fn write_straight(&self, inode: &IoInode, run: &WritebackRun<'_>) -> Result<u64> {
        let fs = self.fs()?;
        let from = if fs.writes_back_beside() { From::Writer } else { From::Caller };
        fs.write_direct(inode, run, from)
    }

    fn lost(&self, inode: &IoInode, lost: LostData<Error>) {
        // Of a file that was removed meanwhile nothing was to be kept.
        let is_gone = inode.is_gone.load(Ordering::Acquire);
        if !is_gone && let Ok(fs) = self.fs() {
            fs.inner.open_files.note_lost(inode.id, lost);
        }
    }

    fn unreserve(&self, inode: &IoInode, len_bytes: u64) {
        if let Ok(fs) = self.fs() {
            fs.take_back_data(len_bytes, inode.promised());
        }
    }

    fn stored_size(&self, inode: &IoInode) -> Result<Option<FileOffset>> {
        match self.fs()?.disk_inode(inode.id) {
            Err(Error::NotFound { .. }) => Ok(None),
            inode => Ok(Some(FileOffset::new(inode?.size_bytes))),
        }
    }

    fn set_size(&self, inode: &IoInode, size: FileOffset, beyond: Beyond) -> Result<()> {
        let fs = self.fs()?;
        fs.set_file_size(inode, size.bytes(), beyond)?;
        if beyond == Beyond::Dropped && size.bytes() <= u64::from(self.block_bytes) {
            // Nothing is behind the first block, in memory neither, as long as the caller has that locked: nothing makes it move.
            inode.give_outline_promise_back(&fs.inner.core);
        }
        Ok(())
    }

    fn punch(&self, inode: &IoInode, range: FileRange) -> Result<()> {
        self.fs()?.punch_file(inode, range.start.bytes()..range.end.bytes())
    }

    fn check_space(&self, _inode: &IoInode, len_bytes: u64) -> Result<()> {
        let fs = self.fs()?;
        fs.with_less_dirty(len_bytes, || fs.promise_data(len_bytes))?;
        fs.inner.core.alloc.take_back_data(len_bytes, Promised::Space);
        Ok(())
    }

    fn check_unwritten_space(&self, inode: &IoInode, len_bytes: u64) -> Result<()> {
        self.check_space(inode, len_bytes)?;
        // As who makes data dirty: what was promised goes first, and what frees space. Then as each step will ask.
        let fs = self.fs()?;
        fs.promise_items(fs.sectorsize_bytes())?;
        fs.begin_step(ALLOCATION_STEP).map(drop)
    }

    fn allocate(&self, inode: &IoInode, range: FileRange) -> Result<()> {
        let (fs, range) = (self.fs()?, range.start.bytes()..range.end.bytes());
        // Where metadata is kept back for what is dirty, that is written first.
        fs.promise_items(fs.sectorsize_bytes())?;
        fs.with_less_dirty(range.end - range.start, || {
            fs.allocate_file(inode, range.clone(), ALLOCATION_STEP)
        })
    }

    fn make_unwritten(&self, inode: &IoInode, range: FileRange) -> Result<()> {
        let fs = self.fs()?;
        let Some(rest) =
            fs.other_than_unwritten(inode, &(range.start.bytes()..range.end.bytes()))?
        else {
            return fs.record_end(inode);
        };
        fs.punch_file(inode, rest.clone())?;
        // What was there is gone by now, and from memory what was dirty over holes: refused now, it would be gone for nothing. But what others
        // have dirty would be lost for it.
        let step = ALLOCATION_STEP.promised_behind_data();
        fs.with_less_dirty(rest.end - rest.start, || fs.allocate_file(inode, rest.clone(), step))
    }

    fn sync(&self, inode: &IoInode, end: SeenEnd) -> Result<()> {
        let fs = self.fs()?;
        fs.record_file(inode, end)?;
        fs.commit()
    }
}

/// Fills the batch over what reads as zeros; the mapping ends where the batch does.
fn cover(mut mapping: Mapping, range: FileRange, batch: &mut DirtyBatch<'_>) -> Mapping {
    if mapping.kind.is_zeros() {
        mapping.range.end = batch.fill(mapping.range.intersection(range)).end;
    }
    mapping
}

impl Drop for IoInode {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.upgrade() {
            self.give_outline_promise_back(&inner.core);
            inner.open_files.forget(self.id);
        }
    }
}

impl std::fmt::Debug for FileIo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileIo").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for IoInode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IoInode").field("id", &self.id).finish_non_exhaustive()
    }
}
