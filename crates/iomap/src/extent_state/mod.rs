//! What a file's ranges are in at the moment: delalloc, being written, and so on, as bits of ranges.
//!
//! Ranges do not overlap and are merged when their bits are equal. A walk over a file by SEEK_DATA and SEEK_HOLE asks for one
//! range after another. So each open file handle keeps a [`CachedState`], where the last search ended, and
//! the next one need not go down the tree.
//!
//! Invariants:
//! 1. A hint never decides an answer. It is a place in the tree, not a reference to a record. Under the tree's lock the
//!    record that is in that place now is taken if it is linked, the search starts after the end of
//!    its predecessor (or it has none), and not after its own end. Else its successor is tried by the same rule,
//!    and then the tree is searched.
//! 2. A hint is one word. Threads that share a handle each read and write whole words, so each sees a
//!    place that some search ended in.
//! 3. A range that is locked ([`ExtentStates::lock()`]) is not in the tree: a lock costs O(log n) of the locks held, not of
//!    the records in its range.
//!
//! Lock order: a range lock, then the tree's lock, which is held within one call only. A crash leaves
//! nothing of this.

mod lock;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::BitOr;

use ubtrfs_rt::{Arc, AtomicU64, AtomicUsize, Ordering, RwLock};

use crate::offset::{FileOffset, FileRange};
use crate::range_tree::{Place, RangeTree};

pub use lock::{IntervalLock, LockMode, LockedInterval};

/// A set of states.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct StateBits(u32);

impl StateBits {
    /// No state.
    pub const NONE: Self = Self(0);
    /// Written to memory, with space reserved and no place on the medium yet: what is dirty is always that, so there is no bit for it
    /// besides.
    pub const DELALLOC: Self = Self(1);
    /// On its way to the medium; the mapping does not show it yet.
    pub const ORDERED: Self = Self(1 << 1);
    /// To be written anew as few large extents. Set and cleared by the filesystem; goes with blocks that are dropped.
    pub const DEFRAG: Self = Self(1 << 2);
    /// An extent must not be merged across the start of this range: writeback ends a run there. Of the first block, as ranges that
    /// touch are one. Set and cleared by the filesystem; goes with blocks that are dropped.
    pub const BOUNDARY: Self = Self(1 << 3);
    /// Delalloc or ordered over what was a hole, so that it adds to the space that the file takes.
    pub const DELALLOC_NEW: Self = Self(1 << 4);
    /// Only with [`Ablation::lock_in_tree`]: the range is locked.
    const LOCKED: Self = Self(1 << 31);

    const NAMES: [(Self, &str); 6] = [
        (Self::DELALLOC, "delalloc"),
        (Self::ORDERED, "ordered"),
        (Self::DEFRAG, "defrag"),
        (Self::BOUNDARY, "boundary"),
        (Self::DELALLOC_NEW, "delalloc-new"),
        (Self::LOCKED, "locked"),
    ];

    /// Whether all of `bits` are in it.
    pub const fn has(self, bits: Self) -> bool {
        self.0 & bits.0 == bits.0
    }

    /// Whether one of `bits` is in it.
    pub const fn has_any(self, bits: Self) -> bool {
        self.0 & bits.0 != 0
    }

    /// Without `bits`.
    #[must_use]
    pub const fn without(self, bits: Self) -> Self {
        Self(self.0 & !bits.0)
    }

    /// A record's value, which is never empty.
    fn in_tree(self) -> Option<Self> {
        (self != Self::NONE).then_some(self)
    }
}

impl BitOr for StateBits {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for StateBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (_, name) in Self::NAMES.iter().filter(|(bits, _)| self.has(*bits)) {
            write!(f, "{separator}{name}")?;
            separator = "|";
        }
        if separator.is_empty() { f.write_str("none") } else { Ok(()) }
    }
}

/// Which ranges a search is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Want {
    /// Those that have all of these bits.
    All(StateBits),
    /// Those that have at least one of these bits.
    Any(StateBits),
}

impl Want {
    fn is_met(self, bits: StateBits) -> bool {
        match self {
            Self::All(wanted) => bits.has(wanted),
            Self::Any(wanted) => bits.has_any(wanted),
        }
    }
}

/// How far a count goes on behind the first range found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Span {
    /// To the first byte without the wanted bits.
    Contiguous,
    /// To the end of the range asked about.
    All,
}

/// What [`ExtentStates::count_range()`] counts.
#[derive(Clone, Copy, Debug)]
pub struct CountQuery {
    /// Where to look.
    pub within: FileRange,
    /// What for.
    pub want: Want,
    /// How far.
    pub span: Span,
    /// The count stops when it has this many bytes.
    pub bytes_max: u64,
}

impl CountQuery {
    /// The first run in `within`, whole.
    pub fn first_run(within: FileRange, want: Want) -> Self {
        Self { within, want, span: Span::Contiguous, bytes_max: u64::MAX }
    }
}

/// What was counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counted {
    /// Where the first range begins.
    pub start: FileOffset,
    /// Bytes with the wanted bits, from `start` on.
    pub len_bytes: u64,
}

impl Counted {
    /// The run, if the count was of [`Span::Contiguous`].
    pub fn run(self) -> FileRange {
        // Not cut at the last offset of a file, which lies inside of the last block.
        FileRange::new(self.start, FileOffset::new(self.start.bytes() + self.len_bytes))
    }
}

/// Bits to set and bits to clear, in one step. A bit in both is set.
#[derive(Clone, Copy, Debug, Default)]
pub struct Conversion {
    /// Set in all of the range.
    pub set: StateBits,
    /// Cleared in all of the range.
    pub clear: StateBits,
}

/// Where the last search of an open file handle ended.
///
/// Of one handle on one file; threads that share the handle may share it. Used with another file's states it is
/// useless, not wrong.
#[derive(Debug)]
pub struct CachedState {
    place: AtomicU64,
    search_count: AtomicU64,
}

/// Not the word of any place.
const NO_PLACE: u64 = u64::MAX;

impl Default for CachedState {
    fn default() -> Self {
        Self { place: AtomicU64::new(NO_PLACE), search_count: AtomicU64::new(0) }
    }
}

impl CachedState {
    /// No hint yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many times the tree had to be searched from its root.
    pub fn search_count(&self) -> u64 {
        self.search_count.load(Ordering::Relaxed)
    }

    fn load(&self) -> Option<Place> {
        // A word carries nothing but itself, so no order is needed.
        let word = self.place.load(Ordering::Relaxed);
        (word != NO_PLACE).then(|| Place::from_word(word))
    }

    fn store(&self, place: Place) {
        let word = place.to_word();
        if self.place.load(Ordering::Relaxed) != word {
            self.place.store(word, Ordering::Relaxed);
        }
    }

    fn count_search(&self) {
        self.search_count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Turns parts of the mechanism off, so that an experiment can print what it was like without.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ablation {
    /// Each search begins at the root.
    pub without_hint: bool,
    /// A locked range is marked in the tree, record by record, as Linux does.
    pub lock_in_tree: bool,
}

/// A file's states.
#[derive(Debug, Default)]
pub struct ExtentStates {
    tree: RwLock<RangeTree<StateBits>>,
    /// Written under the tree's lock: who finds that there are none need not lock it. What came before the last one went is seen by who
    /// sees that.
    record_count: RecordCount,
    /// Written under the tree's lock.
    delalloc_new_bytes: AtomicU64,
    lock: IntervalLock,
    ablation: Ablation,
}

/// How many records are in a tree, and in all that are counted together.
#[derive(Debug, Default)]
struct RecordCount {
    own: AtomicUsize,
    all: Option<Arc<AtomicU64>>,
}

impl RecordCount {
    fn load(&self) -> usize {
        self.own.load(Ordering::Acquire)
    }

    /// Called under the tree's lock.
    fn store(&self, count: usize) {
        let before = self.own.load(Ordering::Relaxed);
        self.own.store(count, Ordering::Release);
        if let Some(all) = self.all.as_ref().filter(|_| count != before) {
            all.fetch_add((count as u64).wrapping_sub(before as u64), Ordering::Relaxed);
        }
    }
}

impl Drop for RecordCount {
    fn drop(&mut self) {
        self.store(0);
    }
}

/// A range that [`ExtentStates::lock()`] locked, until this is dropped.
#[derive(Debug)]
pub struct LockedRange<'a> {
    states: &'a ExtentStates,
    interval: LockedInterval<'a>,
}

impl LockedRange<'_> {
    /// The range.
    pub fn range(&self) -> FileRange {
        self.interval.range()
    }
}

impl Drop for LockedRange<'_> {
    fn drop(&mut self) {
        if self.states.ablation.lock_in_tree {
            self.states.clear(self.interval.range(), StateBits::LOCKED);
        }
    }
}

impl ExtentStates {
    /// No range is in any state.
    pub fn new() -> Self {
        Self::default()
    }

    /// With parts of the mechanism turned off.
    #[doc(hidden)]
    pub fn with_ablation(ablation: Ablation) -> Self {
        Self { ablation, ..Self::default() }
    }

    /// As [`ExtentStates::with_ablation()`]; its records are counted in `all`, beside those of others.
    pub(crate) fn counted(ablation: Ablation, all: Arc<AtomicU64>) -> Self {
        let record_count = RecordCount { own: AtomicUsize::new(0), all: Some(all) };
        Self { ablation, record_count, ..Self::default() }
    }

    /// Sets `bits` in all of `range`; returns in how many bytes one of them was not set before.
    pub fn set(&self, range: FileRange, bits: StateBits) -> u64 {
        self.convert(range, Conversion { set: bits, clear: StateBits::NONE })
    }

    /// Clears `bits` in all of `range`; returns in how many bytes one of them was set before.
    pub fn clear(&self, range: FileRange, bits: StateBits) -> u64 {
        self.convert(range, Conversion { set: StateBits::NONE, clear: bits })
    }

    /// Changes all of `range` in one step, which nobody sees half done; returns how many bytes were changed.
    pub fn convert(&self, range: FileRange, conversion: Conversion) -> u64 {
        self.convert_counting(range, conversion, StateBits(u32::MAX))
    }

    /// As [`ExtentStates::convert()`]; returns in how many bytes one of the bits in `counted` was changed.
    pub fn convert_counting(
        &self,
        range: FileRange,
        conversion: Conversion,
        counted: StateBits,
    ) -> u64 {
        let (mut changed_bytes, mut new_bytes, mut old_bytes) = (0, 0, 0);
        let Conversion { set, clear } = conversion;
        let mut tree = self.tree.write();
        tree.update(range.start.bytes(), range.end.bytes(), |piece| {
            let old = piece.value.unwrap_or_default();
            let new = old.without(clear) | set;
            let len_bytes = piece.end - piece.start;
            let changed = old.without(new) | new.without(old);
            if changed.has_any(counted) {
                changed_bytes += len_bytes;
            }
            if changed.has(StateBits::DELALLOC_NEW) {
                let sum =
                    if new.has(StateBits::DELALLOC_NEW) { &mut new_bytes } else { &mut old_bytes };
                *sum += len_bytes;
            }
            new.in_tree()
        });
        self.record_count.store(tree.len());
        if new_bytes != old_bytes {
            let before = self.delalloc_new_bytes.load(Ordering::Relaxed);
            self.delalloc_new_bytes.store(before + new_bytes - old_bytes, Ordering::Relaxed);
        }
        changed_bytes
    }

    /// Bytes that are [`StateBits::DELALLOC_NEW`].
    pub fn delalloc_new_bytes(&self) -> u64 {
        self.delalloc_new_bytes.load(Ordering::Relaxed)
    }

    fn is_empty(&self) -> bool {
        self.record_count.load() == 0
    }

    /// The states of the byte at `offset`.
    pub fn at(&self, offset: FileOffset) -> StateBits {
        let tree = self.tree.read();
        let found = tree.find(offset.bytes()).map(|place| tree.record(place));
        found.filter(|record| record.start <= offset.bytes()).map_or(StateBits::NONE, |r| r.value)
    }

    /// Whether each byte of `range` is as wanted. An empty range is.
    pub fn test(&self, range: FileRange, want: Want) -> bool {
        if range.is_empty() || want.is_met(StateBits::NONE) {
            return true;
        }
        let found = self.count_range(CountQuery::first_run(range, want), None);
        found.is_some_and(|found| found.run() == range)
    }

    /// The first record in `within` that is as wanted: its part of `within`, and all its states.
    pub fn find_first(
        &self,
        within: FileRange,
        want: Want,
        hint: Option<&CachedState>,
    ) -> Option<(FileRange, StateBits)> {
        if self.is_empty() {
            return None;
        }
        let tree = self.tree.read();
        let mut place =
            self.first_place(&tree, within.start, hint.and_then(CachedState::load), hint);
        while let Some(found) = place {
            let record = tree.record(found);
            if record.start.max(within.start.bytes()) >= within.end.bytes() {
                return None;
            }
            if want.is_met(record.value) {
                if let Some(hint) = hint {
                    hint.store(found);
                }
                let (start, end) = (FileOffset::new(record.start), FileOffset::new(record.end));
                return Some((within.intersection(FileRange::new(start, end)), record.value));
            }
            place = tree.next(found);
        }
        None
    }

    /// Finds the first byte in the range that is as wanted, and counts from there on. Records that touch
    /// count as one, whatever their other bits. `None` if there is no such byte.
    ///
    /// Takes O(1) for each record that it looks at, if the hint serves, and O(log n) besides if not.
    pub fn count_range(&self, query: CountQuery, hint: Option<&CachedState>) -> Option<Counted> {
        if self.is_empty() {
            return None;
        }
        let near = hint.and_then(CachedState::load);
        let (counted, last) = self.count_from(query, near, hint)?;
        if let Some(hint) = hint {
            hint.store(last);
        }
        Some(counted)
    }

    /// The count, and the place of the last record in it.
    fn count_from(
        &self,
        query: CountQuery,
        near: Option<Place>,
        searches: Option<&CachedState>,
    ) -> Option<(Counted, Place)> {
        let tree = self.tree.read();
        let (from, upto) = (query.within.start.bytes(), query.within.end.bytes());
        let mut place = self.first_place(&tree, query.within.start, near, searches)?;
        let mut record = tree.record(place);
        while !query.want.is_met(record.value) && record.start < upto {
            place = tree.next(place)?;
            record = tree.record(place);
        }
        let start = record.start.max(from);
        if start >= upto {
            return None;
        }
        let mut end = record.end.min(upto);
        let mut len_bytes = end - start;
        let mut last = place;
        while len_bytes < query.bytes_max && end < upto {
            let Some(next) = tree.next(place) else { break };
            record = tree.record(next);
            let is_wanted = query.want.is_met(record.value);
            let goes_on = is_wanted && record.start == end;
            if record.start >= upto || !goes_on && query.span == Span::Contiguous {
                break;
            }
            place = next;
            end = record.end.min(upto);
            if is_wanted {
                len_bytes += end - record.start;
                last = next;
            }
        }
        let len_bytes = len_bytes.min(query.bytes_max);
        Some((Counted { start: FileOffset::new(start), len_bytes }, last))
    }

    /// The first record that ends after `start`.
    fn first_place(
        &self,
        tree: &RangeTree<StateBits>,
        start: FileOffset,
        near: Option<Place>,
        searches: Option<&CachedState>,
    ) -> Option<Place> {
        let near = near.filter(|_| !self.ablation.without_hint);
        if let Some(place) = near.and_then(|near| tree.find_by_hint(start.bytes(), near)) {
            return place;
        }
        if let Some(searches) = searches {
            searches.count_search();
        }
        tree.find(start.bytes())
    }

    /// Each record in `range`, cut to it, in order.
    pub fn records(&self, range: FileRange) -> Vec<(FileRange, StateBits)> {
        let tree = self.tree.read();
        let mut records = Vec::new();
        let mut place = tree.find(range.start.bytes());
        while let Some(found) = place {
            let record = tree.record(found);
            let whole = FileRange::new(FileOffset::new(record.start), FileOffset::new(record.end));
            if whole.start.max(range.start) >= range.end {
                break;
            }
            records.push((range.intersection(whole), record.value));
            place = tree.next(found);
        }
        records
    }

    /// How many records there are.
    pub fn record_count(&self) -> usize {
        self.record_count.load()
    }

    /// Waits until nobody holds a lock that overlaps `range` and excludes `mode`, and nobody waits for one
    /// that came first; then holds it until the guard is dropped. A thread that holds a lock must not ask for
    /// another one on the same states that overlaps it.
    pub fn lock(&self, range: FileRange, mode: LockMode) -> LockedRange<'_> {
        let interval = self.lock.lock(range, mode);
        if self.ablation.lock_in_tree {
            self.set(range, StateBits::LOCKED);
        }
        LockedRange { states: self, interval }
    }

    /// The same if there is nothing to wait for, else `None`.
    pub fn try_lock(&self, range: FileRange, mode: LockMode) -> Option<LockedRange<'_>> {
        let interval = self.lock.try_lock(range, mode)?;
        if self.ablation.lock_in_tree {
            self.set(range, StateBits::LOCKED);
        }
        Some(LockedRange { states: self, interval })
    }
}
