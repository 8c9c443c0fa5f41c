//! The memory that holds file data: how much there may be of it, and who gives way.
//!
//! Files keep their folios themselves (`pages`). Here is what they share: the budget, the order in which clean folios
//! are reclaimed and dirty files written back. There are no threads here. Who writes too much writes back before it
//! goes on, or waits for others that do. The owner calls [`PageCache::background_pass()`] from time to time, or lends threads
//! (`service`).
//!
//! Invariants:
//! 1. Only clean folios are reclaimed, so memory is bounded as long as writeback does not fail to make progress: a call that
//!    needs memory writes back where reclaim does not give enough, and goes on with what it needs for itself. Where the block in which a
//!    file ends on the medium cannot be written, that and what is dirty behind it stay, and writes that reach further on are refused.
//! 2. A file with dirty folios is in the list of dirty files, which keeps it alive, or somebody has taken it from there to write
//!    it back. The list is in the order in which files became dirty.
//! 3. Lock order: a file's pages, then a list. A list's lock is held to put in or take out one file only.
//! 4. Who writes while too much is dirty or in memory, and all that is dirty is being written back by others, waits for one of them.

mod errors;
mod folios;
mod lists;
mod pages;
mod readahead;
mod service;

use std::sync::Weak;

use ubtrfs_rt::{Arc, AtomicU64, AtomicUsize, Condvar, Mutex, Ordering};

use crate::extent_state::Ablation;
use crate::offset::FileRange;

use lists::{DirtyFile, DirtyFiles, Listed};

pub(crate) use errors::WritebackErrors;
pub use errors::{ErrorMark, LostData};
pub(crate) use lists::{DirtyOrder, ListedSlot};
pub use pages::CacheCounts;
pub(crate) use pages::{Blocks, FolioPart, Gone, Pages, Source, Usage};
pub(crate) use readahead::{Ahead, AheadOptions, Readahead, ReadaheadNeed};
use service::AheadQueue;
pub use service::ServiceEnd;

/// What the cache may use, and when it writes.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// All folios together, in bytes. Beside it memory of folios that went is kept for new ones, up to an eighth of this (without
    /// [`CacheOptions::has_huge_pages`]); of it up to 8 MiB when there are no folios at all. What reads bring in counts
    /// from their beginning; with that alone beyond it, reads go on all the same.
    pub cached_bytes_max: u64,
    /// With more than this dirty, who writes has to write back first.
    pub dirty_bytes_max: u64,
    /// With more than this dirty, a background pass writes back the oldest.
    pub dirty_bytes_background: u64,
    /// A background pass writes back files that became dirty longer ago than this, in milliseconds.
    pub dirty_age_max_ms: u64,
    /// The largest folio, in bytes; at most 32 blocks.
    pub folio_bytes_max: u64,
    /// The most that is read beyond what was asked for, in bytes; cut to half of `cached_bytes_max`.
    pub readahead_bytes_max: u64,
    /// A read that has gone on for as long as is read ahead, in a file longer than `cached_bytes_max`, gets runs of at least this length,
    /// in bytes, straight into the reader's buffer; `u64::MAX` for never.
    pub straight_bytes_min: u64,
    /// The same of data that is encoded: as much as several processors can decode side by side.
    pub straight_encoded_bytes_min: u64,
    /// A write of at least this length, in bytes, that makes a file longer which is longer than `cached_bytes_max` (or than
    /// `dirty_bytes_background` where clean folios do not stay) goes straight from the writer's buffer; `u64::MAX` for never. Where the filesystem has others
    /// write back beside ([`crate::StraightWrites::Beside`]) it goes by steps of this length, which should be whole extents, as long as more
    /// is dirty than the background lets be.
    pub straight_write_bytes_min: u64,
    /// The most that is given to the filesystem to write back in one call, in bytes; cut to half of `cached_bytes_max`, and of one
    /// block at least.
    pub writeback_bytes_max: u64,
    /// Whether clean folios stay: not where somebody above keeps the data anyway, as the kernel does over FUSE.
    pub keeps_clean: bool,
    /// Whether the system is asked to back memory for folios by huge pages, as soon as they have more than 16 MiB. What is new then costs
    /// a third less, where such pages are at hand, and several times as much in a virtual machine whose host takes back free memory
    /// (free page reporting), which it does by just those.
    pub has_huge_pages: bool,
    /// Mechanisms turned off for an experiment.
    #[doc(hidden)]
    pub ablation: CacheAblation,
}

/// Turns mechanisms off, so that an experiment can print what it was like without.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheAblation {
    /// Of the extent states.
    pub states: Ablation,
    /// Zeroing writes back what is dirty first, and waits.
    pub zero_without_batch: bool,
    /// Each folio's memory comes from the allocator of the program.
    pub without_slabs: bool,
}

impl Default for CacheOptions {
    fn default() -> Self {
        const MIB: u64 = 1 << 20;
        Self {
            cached_bytes_max: 256 * MIB,
            dirty_bytes_max: 64 * MIB,
            dirty_bytes_background: 32 * MIB,
            dirty_age_max_ms: 30_000,
            // Longer ones make nothing faster.
            folio_bytes_max: MIB / 16,
            // As Linux's btrfs.
            readahead_bytes_max: 4 * MIB,
            // For a shorter run what a request costs is more than the copy.
            straight_bytes_min: MIB / 64,
            straight_encoded_bytes_min: MIB / 2,
            // What is written so becomes an extent of its own: not too short a one.
            straight_write_bytes_min: MIB,
            writeback_bytes_max: 16 * MIB,
            keeps_clean: true,
            has_huge_pages: false,
            ablation: CacheAblation::default(),
        }
    }
}

/// A file as the cache sees it.
pub(crate) trait CachedFile: Send + Sync {
    /// Drops clean folios of so many bytes, if nobody else is at work on the file; returns how many.
    fn reclaim(&self, wanted_bytes: u64) -> u64;

    /// Writes back so many bytes, in whole blocks and at least one, not waiting for what others write; returns how many it wrote.
    fn write_back_some(&self, bytes_max: u64) -> u64;

    /// Reads a range, of which nothing may be needed by the time, into memory.
    fn read_ahead(&self, range: FileRange);

    /// Asked of a file that was taken from this place in the list of dirty files: whether it goes back there. If not, it has
    /// noted that it left, or where it is now: at the end of the list, if it `is_new` there.
    fn is_still_dirty(&self, order: DirtyOrder, is_new: bool) -> bool;
}

/// The memory that holds file data, of all files of a filesystem, or of several.
pub struct PageCache {
    options: CacheOptions,
    usage: Arc<Usage>,
    listed: Mutex<Listed>,
    dirty: Mutex<DirtyFiles>,
    /// A file that was taken from the list of dirty ones was given back, or no more is dirty than may be.
    turn_ended: Condvar,
    /// More is dirty than the background lets be.
    became_due: Condvar,
    ahead: AheadQueue,
    writeback_server_count: AtomicUsize,
    /// The clock, as the first pass was told it; before that, the end of time.
    began_ms: AtomicU64,
    /// As the last one was.
    now_ms: AtomicU64,
}

impl std::fmt::Debug for PageCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageCache")
            .field("options", &self.options)
            .field("usage", &self.usage)
            .finish()
    }
}

/// How often reclaim goes round all files: the first time, folios used lately only lose their mark.
const RECLAIM_ROUNDS: usize = 2;

/// Reclaim goes on beyond what is needed at the moment, so that not each call has to look for folios: a part of the budget, at most.
const RECLAIM_AHEAD_PART: u64 = 16;
const RECLAIM_AHEAD_BYTES_MAX: u64 = 1 << 20;

/// What one call may read ahead, or write back, of the budget.
const CALL_PART: u64 = 2;

/// What one file is asked to write back before the next one has its turn.
const TURN_BYTES: u64 = 4 << 20;

impl PageCache {
    /// An empty one.
    pub fn new(mut options: CacheOptions) -> Arc<Self> {
        // What is read ahead would drive out itself, and what is being written cannot be reclaimed.
        let part_bytes = (options.cached_bytes_max / CALL_PART).max(1);
        options.readahead_bytes_max = options.readahead_bytes_max.min(part_bytes);
        options.writeback_bytes_max = options.writeback_bytes_max.min(part_bytes);
        let usage = Arc::new(Usage::new(&options));
        Arc::new(Self {
            options,
            usage,
            listed: Mutex::new(Listed::default()),
            dirty: Mutex::new(DirtyFiles::default()),
            turn_ended: Condvar::new(),
            became_due: Condvar::new(),
            ahead: AheadQueue::default(),
            writeback_server_count: AtomicUsize::new(0),
            began_ms: AtomicU64::new(u64::MAX),
            now_ms: AtomicU64::new(0),
        })
    }

    /// As given, but for what is cut to the budget.
    pub fn options(&self) -> &CacheOptions {
        &self.options
    }

    /// Bytes in folios, also in versions of them that are on their way to the medium and were changed since, and in what is being read.
    pub fn cached_bytes(&self) -> u64 {
        self.usage.cached_bytes()
    }

    /// Bytes of memory that the cache keeps: that of all folios, and what is kept for new ones.
    pub fn memory_bytes(&self) -> u64 {
        self.usage.memory_bytes()
    }

    /// Bytes that are dirty; what is on its way to the medium does not count.
    pub fn dirty_bytes(&self) -> u64 {
        self.usage.dirty_bytes()
    }

    /// Ranges of files that are dirty, or on their way to the medium, as the extent states have them: two that differ in state count as two.
    pub fn dirty_range_count(&self) -> u64 {
        self.usage.states().load(Ordering::Relaxed)
    }

    /// What was done so far for all files.
    pub fn counts(&self) -> CacheCounts {
        self.usage.counts()
    }

    /// What should be written by now is written back: files that have been dirty for too long, and the oldest ones as
    /// long as too much is dirty. `now_ms` is the owner's clock, never less than before, in milliseconds. Returns the
    /// time when the next file will have been dirty for too long, if any is dirty. The age of a file counts from the
    /// pass before it became dirty, or from the first one. Errors are kept for those that have the files open.
    pub fn background_pass(&self, now_ms: u64) -> Option<u64> {
        let (_, next_due) = self.pass(now_ms, || false);
        next_due
    }

    /// As [`PageCache::background_pass()`], unless it is to stop; also how many bytes it wrote.
    fn pass(&self, now_ms: u64, stops: impl Fn() -> bool) -> (u64, Option<u64>) {
        self.now_ms.fetch_max(now_ms, Ordering::Relaxed);
        let began_ms = self.began_ms.fetch_min(now_ms, Ordering::Relaxed).min(now_ms);
        // Nobody knows since when a file is dirty that was so before there was a clock.
        let since = |file: &DirtyFile| file.since_ms.max(began_ms);
        let due = |file: &DirtyFile| since(file).saturating_add(self.options.dirty_age_max_ms);
        let is_old = |file: &DirtyFile| due(file) <= now_ms;
        let is_too_much = || self.usage.dirty_bytes() > self.options.dirty_bytes_background;
        let is_due = |file: &DirtyFile| (is_too_much() || is_old(file)) && !stops();
        let turn = |file: &DirtyFile| {
            // No more than there is now, or who goes on writing would keep this from the other files.
            let mut left_bytes = self.usage.dirty_bytes();
            while left_bytes > 0 && is_due(file) {
                let step_bytes = left_bytes.min(self.options.writeback_bytes_max);
                let written_bytes = file.file.write_back_some(step_bytes);
                if written_bytes == 0 {
                    break;
                }
                left_bytes = left_bytes.saturating_sub(written_bytes);
                file.written_bytes.set(file.written_bytes.get() + written_bytes);
                // Who waits for this may wait no longer. Under the lock, so that nobody is between his look and his wait.
                let dirty = self.dirty.lock();
                self.turn_ended.notify_all();
                drop(dirty);
            }
            file.written_bytes.get()
        };
        let written_bytes = self.write_back_oldest(is_due, turn);
        let next_due = self.dirty.lock().first().map(due);
        (written_bytes, next_due)
    }

    /// Writes back so many bytes, if they are dirty, of as many files as that takes, the oldest first; no more than the last block
    /// of them. Returns how many. For a filesystem whose reservations need the space that dirty data holds: what it asks
    /// for is what is written, whatever the files are like. Not to be called where a writeback would wait for the caller.
    pub fn shrink_dirty(&self, len_bytes: u64) -> u64 {
        let left_bytes = std::cell::Cell::new(len_bytes);
        let turn = |file: &DirtyFile| {
            let written = file.file.write_back_some(left_bytes.get());
            left_bytes.set(left_bytes.get().saturating_sub(written));
            written
        };
        self.write_back_oldest(|_| left_bytes.get() > 0, turn)
    }

    /// Keeps dirty files alive no longer: for a filesystem that is dropped without having been synced, which they refer to. What is
    /// dirty in those that nobody else refers to is lost; in others it is not written back by passes any more. No other
    /// thread is at work on the filesystem.
    pub fn forget_dirty(&self) {
        let files = self.dirty.lock().take_all();
        // Without the list's lock: the last reference to a file may be among these.
        drop(files);
    }

    /// Drops so many bytes of what is clean, if there are so many, whether used lately or not; returns how many. For a budget that
    /// file data shares with something else.
    pub fn shrink_clean(&self, len_bytes: u64) -> u64 {
        let mut sum_bytes: u64 = 0;
        let turns = self.listed.lock().len().saturating_mul(RECLAIM_ROUNDS);
        for _ in 0..turns {
            if sum_bytes >= len_bytes {
                break;
            }
            let file = self.listed.lock().turn();
            if let Some(file) = file {
                sum_bytes += file.reclaim(len_bytes - sum_bytes);
            }
        }
        sum_bytes
    }

    pub(crate) fn usage(&self) -> &Arc<Usage> {
        &self.usage
    }

    pub(crate) fn list(&self, file: Weak<dyn CachedFile>) -> ListedSlot {
        self.listed.lock().add(file)
    }

    pub(crate) fn unlist(&self, slot: ListedSlot) {
        let file = self.listed.lock().remove(slot);
        drop(file);
    }

    pub(crate) fn list_dirty(&self, file: Arc<dyn CachedFile>) -> DirtyOrder {
        let since_ms = self.now_ms.load(Ordering::Relaxed);
        let written_bytes = std::cell::Cell::new(0);
        self.dirty.lock().add(DirtyFile { since_ms, written_bytes, file })
    }

    /// A file that is clean leaves the list; `false` if somebody has taken it, who will find out.
    pub(crate) fn unlist_dirty(&self, order: DirtyOrder) -> bool {
        let file = self.dirty.lock().remove(order);
        file.is_some()
    }

    /// Makes room for so many bytes, if it can. Called without a file's pages locked.
    pub(crate) fn make_room(&self, len_bytes: u64) {
        if self.excess(len_bytes) == 0 {
            return;
        }
        self.reclaim(len_bytes);
        let is_over = || self.excess(len_bytes) > 0;
        if is_over() {
            let is_needed = || {
                self.reclaim(len_bytes);
                is_over()
            };
            self.write_back_while(is_over, is_needed);
        }
    }

    /// [`PageCache::make_room()`] by what one file has, as far as that goes: for one that grows beyond what memory keeps, which would
    /// drive out the others otherwise.
    pub(crate) fn make_room_in(&self, file: &dyn CachedFile, len_bytes: u64) {
        for _ in 0..RECLAIM_ROUNDS {
            match self.excess(len_bytes) {
                0 => return,
                wanted_bytes => _ = file.reclaim(wanted_bytes.max(self.reclaim_ahead_bytes())),
            }
        }
    }

    fn reclaim_ahead_bytes(&self) -> u64 {
        (self.options.cached_bytes_max / RECLAIM_AHEAD_PART).min(RECLAIM_AHEAD_BYTES_MAX)
    }

    /// Writes back as long as too much is dirty, or more is in memory than may be and cannot be reclaimed, or waits for those that do.
    /// Called without any lock that a writeback may wait for.
    pub(crate) fn throttle(&self) {
        let is_needed =
            || self.usage.dirty_bytes() > self.options.dirty_bytes_max || self.excess(0) > 0;
        loop {
            if self.excess(0) > 0 {
                self.reclaim(0);
            }
            if !is_needed() {
                return;
            }
            if self.write_back_while(is_needed, is_needed) > 0 {
                continue;
            }
            let mut dirty = self.dirty.lock();
            if dirty.taken_count() == 0 {
                return;
            }
            if is_needed() {
                self.turn_ended.wait(&mut dirty);
            }
        }
    }

    /// How far over the budget so many more bytes would be.
    fn excess(&self, len_bytes: u64) -> u64 {
        (self.usage.cached_bytes().saturating_add(len_bytes))
            .saturating_sub(self.options.cached_bytes_max)
    }

    fn reclaim(&self, len_bytes: u64) {
        let turns = self.listed.lock().len().saturating_mul(RECLAIM_ROUNDS);
        let ahead_bytes = self.reclaim_ahead_bytes();
        for _ in 0..turns {
            let wanted = self.excess(len_bytes);
            if wanted == 0 {
                return;
            }
            let file = self.listed.lock().turn();
            if let Some(file) = file {
                file.reclaim(wanted.max(ahead_bytes));
            }
        }
    }

    /// `is_over` is asked with the dirty list locked, `is_needed` with nothing locked.
    fn write_back_while(&self, is_over: impl Fn() -> bool, is_needed: impl Fn() -> bool) -> u64 {
        let turn = |file: &DirtyFile| {
            let mut sum_bytes = 0;
            while is_needed() {
                match file.file.write_back_some(TURN_BYTES) {
                    0 => break,
                    bytes => sum_bytes += bytes,
                }
            }
            sum_bytes
        };
        self.write_back_oldest(|_| is_over(), turn)
    }

    /// Gives each dirty file a turn, in the order in which they became dirty, up to the first that is not chosen; returns how
    /// many bytes were written.
    fn write_back_oldest(
        &self,
        is_chosen: impl Fn(&DirtyFile) -> bool,
        turn: impl Fn(&DirtyFile) -> u64,
    ) -> u64 {
        let mut last = None;
        let mut sum_bytes = 0;
        let end = self.dirty.lock().end();
        loop {
            let taken = self.dirty.lock().take(last, end, &is_chosen);
            let Some((order, file)) = taken else { return sum_bytes };
            last = Some(order);
            let taken = Taken { cache: self, order, file: Some(file) };
            if let Some(file) = &taken.file {
                sum_bytes += turn(file);
            }
        }
    }
}

/// A file taken from the list of dirty ones, until this is dropped.
struct Taken<'a> {
    cache: &'a PageCache,
    order: DirtyOrder,
    file: Option<DirtyFile>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let is_rest = |file: &DirtyFile| {
            // What was written while it was old is not old any more.
            let is_new = file.written_bytes.get() > 0;
            file.file.is_still_dirty(self.order, is_new)
        };
        let (clean, dirty) = match self.file.take() {
            Some(file) if is_rest(&file) => (None, Some(file)),
            other => (other, None),
        };
        self.cache.dirty.lock().give_back(self.order, dirty);
        self.cache.turn_ended.notify_all();
        drop(clean);
    }
}
