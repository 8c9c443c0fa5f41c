//! A file in memory: its size, folios and extent states, and what all operations on it are made of.
//!
//! Invariants:
//! 1. A block is dirty in the page cache exactly if its extent state is delalloc, and under writeback exactly if it is
//!    ordered. Both change under the lock of the pages.
//! 2. The size changes under the lock of the pages, by somebody who has all of the file locked from the lower of
//!    the two sizes on.
//! 3. Bytes that lie beyond the end of the file in its last block may be anything in memory, as a mapped store may put them there. They are
//!    zeroed whenever the block is written back, and before the file grows over them.
//! 4. What an operation changes it has locked (`states.lock()`), and what it reads, too: reads and writes are atomic to
//!    each other. Writeback locks nothing: what it needs is in the states of blocks.
//!
//! States of a block, and who changes them:
//!
//! ```text
//! absent --fill()--> uptodate --write_range()--> dirty --write_back()--> under writeback
//!    |                                            ^ |                        |      |
//!    '--------------write_range()-----------------' '--drop_range()-> absent |      '--> uptodate, or absent if it failed,
//!                                                                                  or dirty if it must come again
//!                                                  ^--write_range()----------'
//! ```
//!
//! Lock order: a locked range, the filesystem's locks, the pages, extent states or a list of the page cache. The pages are never
//! locked while the filesystem is called. A crash leaves what the filesystem made durable.

use std::sync::Weak;

use ubtrfs_rt::{Arc, AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard, Ordering};

use crate::error::Error;
use crate::extent_state::{
    CachedState, Conversion, ExtentStates, LockMode, LockedRange, StateBits, Want,
};
use crate::iter::MappingIter;
use crate::mapping::{Cookie, Detail, FileSystem, Mapping, Purpose, ReadPiece};
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::{
    Blocks, CachedFile, DirtyOrder, ErrorMark, Gone, PageCache, Pages, Readahead, ReadaheadNeed,
    Source, WritebackErrors,
};
use crate::seek_window::SeekWindow;

/// How much is put into the cache before others have their turn.
const WRITE_STEP_BYTES: u64 = 128 << 10;

/// A step that reads or writes takes no more than such a part of all memory, as several threads make steps at once.
const STEP_PART: u64 = 4;

/// A step that reads what it writes takes so small a part.
const SAME_STEP_PART: u64 = 64;

/// How much is reclaimed before others have their turn, and its memory goes.
const RECLAIM_STEP_BYTES: u64 = 1 << 20;

/// How many mappings the filesystem is asked for at once, to read what lies there.
const ASKED_AHEAD_MAX: usize = 1024;

/// Whether an operation that reaches beyond the end of the file makes the file longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// The file ends at least where the operation does.
    Extends,
    /// The file ends where it did: KEEP_SIZE.
    Stays,
}

/// A file in memory. Each file has one, however often it is open.
pub struct AddressSpace<F: FileSystem> {
    pub(crate) filesystem: Arc<F>,
    pub(crate) inode: F::Inode,
    pub(crate) cache: Arc<PageCache>,
    pub(crate) states: ExtentStates,
    pub(crate) pages: Mutex<Pages>,
    /// A read or a writeback ended.
    pub(crate) ended: Condvar,
    pub(crate) errors: Mutex<WritebackErrors<F::Error>>,
    pub(crate) block_bytes: u64,
    /// Whether who reads it comes before what he wants is in memory.
    pub(crate) readahead_need: ReadaheadNeed,
    /// A read found encoded data, which several threads decode faster than the reader.
    pub(crate) is_encoded: AtomicBool,
    /// Of which open file the last read was.
    pub(crate) last_reader: AtomicU64,
    opened_count: AtomicU64,
    size: AtomicU64,
    /// Twice how many times it was made shorter; odd as long as the filesystem has not said whether it is.
    cuts: AtomicU64,
    /// How many of them the filesystem refused.
    refused_cuts: AtomicU64,
    /// The block in which the file ends on the medium could not be written, and stayed dirty; it may be there by now.
    pub(crate) has_failed_tail: AtomicBool,
    me: Weak<Self>,
}

/// Where a file ended at a moment, for who brings what lies before it to the medium and then records there that the file ends so
/// ([`AddressSpace::end_to_record()`]).
#[derive(Clone, Copy, Debug)]
pub struct SeenEnd {
    size: FileOffset,
    cuts: u64,
    refused_cuts: u64,
}

/// While it lives, a file is being cut.
pub(crate) struct Cutting<'a> {
    cuts: &'a AtomicU64,
    refused_cuts: &'a AtomicU64,
}

impl Cutting<'_> {
    /// The filesystem refused it, and the file ends where it did, also on the medium.
    pub(crate) fn refused(self) {
        self.refused_cuts.fetch_add(1, Ordering::Release);
    }
}

impl Drop for Cutting<'_> {
    fn drop(&mut self) {
        self.cuts.fetch_add(1, Ordering::Release);
    }
}

impl SeenEnd {
    /// Where it ended.
    pub fn size(self) -> FileOffset {
        self.size
    }

    /// As if it had ended at `limit` at the latest.
    #[must_use]
    pub fn at_most(self, limit: FileOffset) -> Self {
        Self { size: self.size.min(limit), ..self }
    }
}

/// A file that somebody has open. Threads may share it.
pub struct OpenFile<F: FileSystem> {
    pub(crate) space: Arc<AddressSpace<F>>,
    /// No other of the file has it.
    pub(crate) number: u64,
    pub(crate) cached_state: CachedState,
    pub(crate) seek_window: Mutex<SeekWindow>,
    pub(crate) readahead: Mutex<Readahead>,
    /// What lies before is behind who goes through the file, and not to be read ahead any more; 0 while nobody does.
    pub(crate) passed: Arc<AtomicU64>,
    pub(crate) errors_seen: Mutex<ErrorMark>,
}

impl<F: FileSystem> AddressSpace<F> {
    /// The file `inode`, which ends at `size`.
    pub fn new(
        filesystem: Arc<F>,
        inode: F::Inode,
        size: FileOffset,
        cache: Arc<PageCache>,
    ) -> Arc<Self> {
        let block_bytes = u64::from(filesystem.block_bytes());
        let options = cache.options();
        let pages = Pages::new(block_bytes, options.folio_bytes_max, Arc::clone(cache.usage()));
        let states = ExtentStates::counted(options.ablation.states, cache.usage().states());
        Arc::new_cyclic(|me| Self {
            filesystem,
            inode,
            cache,
            states,
            pages: Mutex::new(pages),
            ended: Condvar::new(),
            errors: Mutex::new(WritebackErrors::default()),
            block_bytes,
            readahead_need: ReadaheadNeed::default(),
            is_encoded: AtomicBool::new(false),
            last_reader: AtomicU64::new(0),
            opened_count: AtomicU64::new(0),
            size: AtomicU64::new(size.bytes()),
            cuts: AtomicU64::new(0),
            refused_cuts: AtomicU64::new(0),
            has_failed_tail: AtomicBool::new(false),
            me: Weak::clone(me),
        })
    }

    /// Opens it. Errors of writeback that nobody was told of are this file's to report, too.
    pub fn open(self: &Arc<Self>) -> OpenFile<F> {
        OpenFile {
            space: Arc::clone(self),
            number: self.opened_count.fetch_add(1, Ordering::Relaxed),
            cached_state: CachedState::new(),
            seek_window: Mutex::new(SeekWindow::default()),
            readahead: Mutex::new(Readahead::default()),
            passed: Arc::default(),
            errors_seen: Mutex::new(self.errors.lock().mark()),
        }
    }

    /// Where it ends.
    pub fn size(&self) -> FileOffset {
        FileOffset::new(self.size.load(Ordering::Acquire))
    }

    /// Where it ends now, for who will record it. What others write behind that end from now on may not be on the medium then.
    pub fn see_end(&self) -> SeenEnd {
        // In this order: who is cut between the two counts as cut.
        let refused_cuts = self.refused_cuts.load(Ordering::Acquire);
        let cuts = self.cuts.load(Ordering::Acquire);
        SeenEnd { size: self.size(), cuts, refused_cuts }
    }

    /// Where the file may be said to end on the medium, at least, once what was dirty before `seen` is there: nowhere, if it was cut since,
    /// as what lies below that end may have been written by others after that, and be in memory only. Who cut it says on the medium where it
    /// ends. Asked under a lock without which the filesystem's [`FileSystem::set_size()`] does not go on.
    pub fn end_to_record(&self, seen: SeenEnd) -> FileOffset {
        let size = self.size().min(seen.size);
        if self.cuts.load(Ordering::Acquire) == seen.cuts { size } else { FileOffset::ZERO }
    }

    /// What the filesystem keeps of it.
    pub fn inode(&self) -> &F::Inode {
        &self.inode
    }

    /// The memory that it is in.
    pub fn cache(&self) -> &Arc<PageCache> {
        &self.cache
    }

    /// What is in memory only, and what is on its way.
    pub fn states(&self) -> &ExtentStates {
        &self.states
    }

    /// Under the lock of the pages only.
    pub(crate) fn set_size(&self, _pages: &MutexGuard<'_, Pages>, size: FileOffset) {
        self.size.store(size.bytes(), Ordering::Release);
    }

    /// As [`AddressSpace::set_size()`], before where it ends.
    pub(crate) fn cut_to(&self, pages: &MutexGuard<'_, Pages>, size: FileOffset) {
        drop(self.begin_cut(pages, size));
    }

    /// As [`AddressSpace::cut_to()`]. Until what this returns is dropped the filesystem has not said yet whether the file is cut. All behind `size` is
    /// locked, so there is only one.
    pub(crate) fn begin_cut(&self, pages: &MutexGuard<'_, Pages>, size: FileOffset) -> Cutting<'_> {
        self.set_size(pages, size);
        self.cuts.fetch_add(1, Ordering::Release);
        Cutting { cuts: &self.cuts, refused_cuts: &self.refused_cuts }
    }

    /// Whether the filesystem has not said yet whether the file is cut.
    pub(crate) fn is_being_cut(&self) -> bool {
        !self.cuts.load(Ordering::Acquire).is_multiple_of(2)
    }

    /// Whether a cut was refused since the end was seen: that may have been one that the file never had, and the medium have had it, too. Asked
    /// behind [`AddressSpace::is_being_cut()`].
    pub(crate) fn was_cut_in_vain_since(&self, seen: SeenEnd) -> bool {
        self.refused_cuts.load(Ordering::Acquire) != seen.refused_cuts
    }

    pub(crate) fn blocks(&self, range: FileRange) -> Blocks {
        let range = range.round_out(self.block_bytes);
        range.start.bytes() / self.block_bytes..range.end.bytes() / self.block_bytes
    }

    pub(crate) fn range_of(&self, blocks: &Blocks) -> FileRange {
        FileRange::new(
            FileOffset::new(blocks.start * self.block_bytes),
            FileOffset::new(blocks.end * self.block_bytes),
        )
    }

    /// `len_bytes` at `offset`, if a file can hold that.
    pub(crate) fn checked_range(offset: FileOffset, len_bytes: u64) -> Result<FileRange, F::Error> {
        let end = offset.checked_add(len_bytes).ok_or(Error::TooLarge { offset, len_bytes })?;
        Ok(FileRange::new(offset, end))
    }

    /// What is read or written: `len_bytes` at `offset`, if Linux takes that; for who notes a change before it makes it.
    /// [`OpenFile::write()`] and [`OpenFile::direct_write()`] begin with this, and change nothing where the range is empty;
    /// [`OpenFile::truncate()`] does for no bytes at the new end.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn io_range(offset: FileOffset, len_bytes: u64) -> Result<FileRange, F::Error> {
        let end = offset.checked_add(len_bytes).ok_or(Error::Invalid { offset, len_bytes })?;
        Ok(FileRange::new(offset, end))
    }

    /// What is to have space, or to have none: `len_bytes` at `offset`, if Linux takes that; for who notes a change before it makes it.
    /// [`OpenFile::zero_range()`], [`OpenFile::punch_hole()`], [`OpenFile::allocate()`], [`OpenFile::allocate_zeroed()`] and
    /// [`OpenFile::unshare()`] begin with this.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::TooLarge`].
    pub fn space_range(offset: FileOffset, len_bytes: u64) -> Result<FileRange, F::Error> {
        let max = FileOffset::MAX.bytes();
        if offset.bytes() > max || !(1..=max).contains(&len_bytes) {
            return Err(Error::Invalid { offset, len_bytes }.into());
        }
        Self::checked_range(offset, len_bytes)
    }

    pub(crate) fn is_current(&self, cookie: Cookie) -> bool {
        self.filesystem.sequence(&self.inode).is_current(cookie)
    }

    pub(crate) fn cookie(&self) -> Cookie {
        self.filesystem.sequence(&self.inode).cookie()
    }

    /// Locks what a change of `range` changes: where that makes the file longer, everything from its end on.
    pub(crate) fn lock_for_write(&self, range: FileRange) -> LockedRange<'_> {
        loop {
            let size = self.size();
            let wanted = if range.end > size {
                FileRange::from(range.start.min(size).round_down(self.block_bytes))
            } else {
                range.round_out(self.block_bytes)
            };
            let locked = self.states.lock(wanted, LockMode::Exclusive);
            // Whoever changes the size has all behind the end locked. So what was seen before the lock may be old,
            // but what is seen now stays, if the lock reaches there.
            if range.end <= self.size()
                || self.size() >= wanted.start && wanted.end == FileOffset::MAX
            {
                return locked;
            }
        }
    }

    /// Reads blocks, none of which is uptodate, into memory. Others may have been at the pages meanwhile: who called this looks again.
    ///
    /// # Errors
    /// What the filesystem said.
    pub(crate) fn fill<'a>(
        &'a self,
        mut pages: MutexGuard<'a, Pages>,
        blocks: Blocks,
    ) -> Result<MutexGuard<'a, Pages>, F::Error> {
        let Some(id) = pages.begin_read(blocks.clone()) else {
            self.ended.wait(&mut pages);
            return Ok(pages);
        };
        let folios = pages.folios_for(blocks.clone());
        drop(pages);
        let range = self.range_of(&blocks);
        self.cache.make_room(range.len_bytes());
        let usage = self.cache.usage();
        usage.count_fill();
        let on_their_way = usage.count_read(range.len_bytes());
        let mut buffers: Vec<_> =
            folios.into_iter().map(|(first, len_bytes)| (first, usage.buffer(len_bytes))).collect();
        let into = buffers
            .iter_mut()
            .map(|(_, data)| {
                &mut **Arc::get_mut(data).expect("nobody else has seen the new buffers")
            })
            .collect();
        let result = self.mappings(range).and_then(|told| self.read_blocks(range, &told, into));
        let mut pages = self.pages.lock();
        let is_valid = pages.end_read(id);
        self.ended.notify_all();
        match result {
            // What was read is not what the blocks hold by now; neither is the error.
            _ if !is_valid => return Ok(pages),
            Err(error) => return Err(error),
            Ok(None) => return Ok(pages),
            Ok(Some(cookie)) if !self.is_current(cookie) => return Ok(pages),
            Ok(Some(_)) => {}
        }
        // From here on they are folios.
        drop(on_their_way);
        let size = self.size().bytes();
        for (first, mut data) in buffers {
            let in_file = size.saturating_sub(first * self.block_bytes);
            if let Some(data) = Arc::get_mut(&mut data)
                && let Some(tail) = usize::try_from(in_file).ok().and_then(|at| data.get_mut(at..))
            {
                tail.fill(0);
            }
            pages.install(first, data);
        }
        self.list(&mut pages);
        Ok(pages)
    }

    /// Reads what `mappings` say the range holds. A cookie by which the mappings were still the same after the data was
    /// read; `None` if they were not.
    pub(crate) fn read_blocks(
        &self,
        range: FileRange,
        mappings: &[Mapping],
        buffers: Vec<&mut [u8]>,
    ) -> Result<Option<Cookie>, F::Error> {
        let result = self.read_mapped(range, mappings, buffers);
        let first = mappings.first().map(|mapping| mapping.cookie);
        if let Some(cookie) = first.filter(|cookie| self.is_current(*cookie)) {
            return result.map(|()| Some(cookie));
        }
        // Some mapping of the file changed. Whether one of these did, they say themselves.
        let cookie = self.cookie();
        let now = self.mappings(range)?;
        let is_same = now.len() == mappings.len()
            && now.iter().zip(mappings).all(|(now, then)| now.is_same_in(then, range));
        if is_same { result.map(|()| Some(cookie)) } else { Ok(None) }
    }

    pub(crate) fn mappings(&self, range: FileRange) -> Result<Vec<Mapping>, F::Error> {
        let mut mappings = Vec::new();
        let mut rest = range;
        while !rest.is_empty() {
            self.ask_ahead(rest, Detail::Contents, ASKED_AHEAD_MAX, &mut mappings)?;
            rest.start = mappings.last().map_or(rest.end, |last| last.range.end.min(rest.end));
        }
        Ok(mappings)
    }

    /// Asks the filesystem for mappings from the start of `range` on, which is not empty.
    ///
    /// # Errors
    /// What the filesystem says, or that its answer does not fit.
    pub(crate) fn ask_ahead(
        &self,
        range: FileRange,
        detail: Detail,
        count_max: usize,
        mappings: &mut Vec<Mapping>,
    ) -> Result<(), F::Error> {
        let before = mappings.len();
        let asked = range.round_out(self.block_bytes);
        self.cache.usage().count_mapping();
        self.filesystem.map_ahead(&self.inode, asked, detail, count_max, mappings)?;
        let mut at = range.start;
        for mapping in &mappings[before..] {
            if !mapping.range.contains(at) {
                return Err(Error::BadMapping { asked, mapped: mapping.range }.into());
            }
            at = mapping.range.end;
        }
        if at == range.start {
            return Err(Error::BadMapping { asked, mapped: FileRange::new(at, at) }.into());
        }
        Ok(())
    }

    fn read_mapped(
        &self,
        range: FileRange,
        mappings: &[Mapping],
        buffers: Vec<&mut [u8]>,
    ) -> Result<(), F::Error> {
        let mut rest = buffers;
        rest.reverse();
        let mut pieces = Vec::new();
        let mut at = range.start;
        for mapping in mappings {
            let part = mapping.range.intersection(FileRange::new(at, range.end));
            let mut buffers = take_front(&mut rest, part.len_bytes());
            if mapping.kind.is_zeros() {
                buffers.iter_mut().for_each(|buffer| buffer.fill(0));
            } else {
                pieces.push(ReadPiece { mapping: *mapping, start: part.start, buffers });
            }
            at = part.end;
        }
        if pieces.is_empty() { Ok(()) } else { self.filesystem.read(&self.inode, &mut pieces) }
    }

    /// Puts data into the range, which the caller has locked.
    ///
    /// # Errors
    /// What the filesystem said, with how many bytes were put in before.
    pub(crate) fn write_range(
        &self,
        range: FileRange,
        source: Source<'_>,
        reach: Reach,
    ) -> Result<(), (u64, F::Error)> {
        let mut at = range.start;
        while at < range.end {
            let skipped = at.bytes_since(range.start);
            if reach == Reach::Extends {
                self.check_tail_before(range).map_err(|error| (skipped, error))?;
            }
            let rest = match source {
                Source::Bytes(bytes) => {
                    Source::Bytes(&bytes[usize::try_from(skipped).unwrap_or(bytes.len())..])
                }
                other => other,
            };
            let step_bytes = match source {
                // What is read first must stay until all of the step is there, whatever else wants memory.
                Source::Same => (self.cache.options().cached_bytes_max / SAME_STEP_PART)
                    .clamp(self.block_bytes, WRITE_STEP_BYTES),
                _ => self.step_bytes(WRITE_STEP_BYTES),
            };
            // Whole blocks but for the last step, so that no block is written in two parts.
            let step = if range.end.bytes_since(at) > step_bytes {
                let end = at.saturating_add(step_bytes).round_down(self.block_bytes);
                FileRange::new(at, end)
            } else {
                FileRange::new(at, range.end)
            };
            at = self.write_step(step, rest, reach).map_err(|error| (skipped, error))?;
            self.cache.throttle();
        }
        Ok(())
    }

    /// Refuses to write behind the block in which the file ends on the medium where that cannot be written: what comes there could not be either,
    /// and memory would fill with it, in the course of a single call.
    fn check_tail_before(&self, range: FileRange) -> Result<(), F::Error> {
        if !self.has_failed_tail() {
            return Ok(());
        }
        let last = FileOffset::new(range.end.bytes().saturating_sub(1));
        self.flush_old_tail(last.round_down(self.block_bytes))
    }

    /// Puts data into as much of `step` as one mapping holds; returns where that ends.
    fn write_step(
        &self,
        step: FileRange,
        source: Source<'_>,
        reach: Reach,
    ) -> Result<FileOffset, F::Error> {
        let whole = step.round_out(self.block_bytes);
        let pages = self.pages.lock();
        if self.states.test(whole, Want::All(StateBits::DELALLOC)) {
            // All dirty: the space is reserved and the bytes are there.
            self.put(pages, step, source, reach, false);
            return Ok(step.end);
        }
        drop(pages);
        let mut iter = MappingIter::new(self, whole);
        let Some((mapping, mapped)) = iter.next(Purpose::Write)? else { return Ok(step.end) };
        let part = mapped.intersection(step);
        let size = self.size();
        if step.start >= size && size.bytes() > self.cache.options().cached_bytes_max {
            self.cache.make_room_in(self, mapped.len_bytes());
        }
        self.cache.make_room(mapped.len_bytes());
        let result = self.put_mapped(&mapping, part, source, reach);
        let used_bytes = *result.as_ref().unwrap_or(&Some(0));
        let unused_bytes = mapped.len_bytes() - used_bytes.unwrap_or(0);
        if unused_bytes > 0 {
            self.filesystem.unreserve(&self.inode, unused_bytes);
        }
        // Where the mapping is stale, the same step is made again: somebody else made a step meanwhile.
        result.map(|used| if used.is_some() { part.end } else { part.start })
    }

    /// Puts data into a part of a mapping; returns how many bytes became dirty, or `None` if the mapping is stale.
    fn put_mapped(
        &self,
        mapping: &Mapping,
        part: FileRange,
        source: Source<'_>,
        reach: Reach,
    ) -> Result<Option<u64>, F::Error> {
        let mut pages = self.pages.lock();
        while let Some(block) = self.first_to_read(&pages, part, source) {
            let is_beyond = FileOffset::new(block * self.block_bytes) >= self.size();
            if is_beyond || mapping.is_zeros() {
                if !is_beyond && !self.is_current(mapping.cookie) {
                    return Ok(None);
                }
                // It is not uptodate, so it is neither dirty nor under writeback, and what the mapping says is all there is.
                pages.install(block, self.cache.usage().zeroed_buffer(self.block_bytes));
                continue;
            }
            pages = self.fill(pages, block..block + 1)?;
        }
        if mapping.flags.is_new && !self.is_current(mapping.cookie) {
            // What was on its way may have arrived, so that it has its space.
            return Ok(None);
        }
        if mapping.flags.is_placed {
            // What is on its way there becomes what the file has: the place is taken when it has arrived.
            while pages.has_writeback(&self.blocks(part), u64::MAX) {
                self.ended.wait(&mut pages);
            }
            // Where it did not arrive it is gone, and what stays of a block is to be read.
            let is_whole = self.first_to_read(&pages, part, source).is_none();
            if !is_whole || !self.is_current(mapping.cookie) {
                return Ok(None);
            }
        }
        Ok(Some(self.put(pages, part, source, reach, mapping.flags.is_new)))
    }

    /// The first block of which bytes stay that are not in memory.
    fn first_to_read(&self, pages: &Pages, part: FileRange, source: Source<'_>) -> Option<u64> {
        let blocks = self.blocks(part);
        if matches!(source, Source::Same) {
            return pages.missing(blocks).map(|missing| missing.start);
        }
        let is_cut = |offset: FileOffset| !offset.bytes().is_multiple_of(self.block_bytes);
        let first = is_cut(part.start).then_some(blocks.start);
        let last = is_cut(part.end).then_some(blocks.end - 1);
        [first, last].into_iter().flatten().find(|block| !pages.is_uptodate(*block))
    }

    /// Changes the pages; returns how many bytes became dirty. The file had nothing there if `is_new`.
    fn put(
        &self,
        mut pages: MutexGuard<'_, Pages>,
        part: FileRange,
        source: Source<'_>,
        reach: Reach,
        is_new: bool,
    ) -> u64 {
        pages.write(part.start.bytes(), part.end.bytes(), source);
        let new = if is_new { StateBits::DELALLOC_NEW } else { StateBits::NONE };
        let dirty = Conversion { set: StateBits::DELALLOC | new, clear: StateBits::NONE };
        let whole = part.round_out(self.block_bytes);
        let newly_bytes = self.states.convert_counting(whole, dirty, StateBits::DELALLOC);
        if newly_bytes > 0 {
            self.cache.add_dirty(newly_bytes);
        }
        if part.end > self.size() && reach == Reach::Extends {
            self.set_size(&pages, part.end);
        }
        self.list(&mut pages);
        newly_bytes
    }

    /// For the cache's lists.
    pub(crate) fn weak(&self) -> Weak<dyn CachedFile> {
        Weak::clone(&self.me) as Weak<dyn CachedFile>
    }

    /// `bytes_max`, or as much less as a step may take of a small budget, but one block.
    pub(crate) fn step_bytes(&self, bytes_max: u64) -> u64 {
        let part_bytes = self.cache.options().cached_bytes_max / STEP_PART;
        bytes_max.min(part_bytes).max(self.block_bytes)
    }

    /// Lets the cache know of folios, and of dirty ones.
    pub(crate) fn list(&self, pages: &mut Pages) {
        if pages.listed.is_none() && !pages.is_empty() {
            pages.listed = Some(self.cache.list(self.weak()));
        }
        if pages.dirty_order.is_none()
            && self.is_dirty()
            && let Some(me) = self.me.upgrade()
        {
            pages.dirty_order = Some(self.cache.list_dirty(me));
        }
    }

    /// A clean file need not be kept alive by the list of dirty ones.
    pub(crate) fn unlist_if_clean(&self, pages: &mut Pages) {
        if let Some(order) = pages.dirty_order
            && !self.is_dirty()
            && self.cache.unlist_dirty(order)
        {
            pages.dirty_order = None;
        }
    }

    /// Whether something of the file is dirty, and not on its way.
    pub fn is_dirty(&self) -> bool {
        let all = FileRange::from(FileOffset::ZERO);
        self.states.find_first(all, Want::All(StateBits::DELALLOC), None).is_some()
    }

    /// Drops the blocks of the range, dirty ones too, after those under writeback are written; returns how many bytes were
    /// dirty, whose reservation the caller gives back, and their memory. The range is locked by the caller.
    pub(crate) fn drop_range<'a>(
        &'a self,
        mut pages: MutexGuard<'a, Pages>,
        range: FileRange,
    ) -> (MutexGuard<'a, Pages>, u64, Gone) {
        let blocks = self.blocks(range);
        while pages.has_writeback(&blocks, u64::MAX) {
            self.ended.wait(&mut pages);
        }
        let gone = pages.drop_blocks(&blocks);
        let marks = StateBits::DEFRAG | StateBits::BOUNDARY;
        let clear = StateBits::DELALLOC | StateBits::DELALLOC_NEW | marks;
        let clean = Conversion { set: StateBits::NONE, clear };
        let range = self.range_of(&blocks);
        let dropped_bytes = self.states.convert_counting(range, clean, StateBits::DELALLOC);
        self.cache.subtract_dirty(dropped_bytes);
        if dropped_bytes > 0 {
            self.unlist_if_clean(&mut pages);
        }
        (pages, dropped_bytes, gone)
    }
}

/// The first `len_bytes` of the buffers, which are in reverse order.
fn take_front<'a>(rest: &mut Vec<&'a mut [u8]>, len_bytes: u64) -> Vec<&'a mut [u8]> {
    let mut taken = Vec::new();
    let mut left = usize::try_from(len_bytes).unwrap_or(usize::MAX);
    while left > 0 {
        let Some(buffer) = rest.pop() else { break };
        if buffer.len() > left {
            let (front, back) = buffer.split_at_mut(left);
            rest.push(back);
            taken.push(front);
            break;
        }
        left -= buffer.len();
        taken.push(buffer);
    }
    taken
}

impl<F: FileSystem> CachedFile for AddressSpace<F> {
    fn reclaim(&self, wanted_bytes: u64) -> u64 {
        let mut freed_bytes = 0;
        let mut round = None;
        while freed_bytes < wanted_bytes {
            let step_bytes = (wanted_bytes - freed_bytes).min(RECLAIM_STEP_BYTES);
            let Some(mut pages) = self.pages.try_lock() else { break };
            // One for all steps: what an earlier one passed over is not to be taken before who uses it had time to.
            let round = round.get_or_insert_with(|| pages.reclaim_round());
            let (bytes, gone) = pages.reclaim(round, step_bytes);
            if pages.is_empty()
                && let Some(slot) = pages.listed.take()
            {
                self.cache.unlist(slot);
            }
            drop(pages);
            drop(gone);
            freed_bytes += bytes;
            if bytes < step_bytes {
                break;
            }
        }
        freed_bytes
    }

    fn write_back_some(&self, bytes_max: u64) -> u64 {
        self.write_back_swept(bytes_max)
    }

    fn read_ahead(&self, range: FileRange) {
        // An error comes again to who reads there.
        let _ = self.read_ahead_of(range);
    }

    fn is_still_dirty(&self, order: DirtyOrder, is_new: bool) -> bool {
        let mut pages = self.pages.lock();
        let stays = pages.dirty_order == Some(order) && self.is_dirty();
        // What fails for good is not tried again at once.
        if stays && !is_new && !self.has_failed_tail() {
            return true;
        }
        pages.dirty_order = None;
        if stays {
            self.list(&mut pages);
        }
        false
    }
}

impl<F: FileSystem> Drop for AddressSpace<F> {
    fn drop(&mut self) {
        if let Some(slot) = self.pages.get_mut().listed.take() {
            self.cache.unlist(slot);
        }
        if let Some(lost) = self.errors.get_mut().untold() {
            self.filesystem.lost(&self.inode, lost);
        }
    }
}

impl<F: FileSystem> OpenFile<F> {
    /// The file, which others may have open, too.
    pub fn space(&self) -> &Arc<AddressSpace<F>> {
        &self.space
    }

    /// Where the file ends.
    pub fn size(&self) -> FileOffset {
        self.space.size()
    }

    /// How many times a seek had to search the extent states from their root.
    pub fn state_search_count(&self) -> u64 {
        self.cached_state.search_count()
    }
}

impl<F: FileSystem> std::fmt::Debug for AddressSpace<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AddressSpace").field("size", &self.size()).finish_non_exhaustive()
    }
}

impl<F: FileSystem> std::fmt::Debug for OpenFile<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenFile").field("space", &self.space).finish_non_exhaustive()
    }
}
