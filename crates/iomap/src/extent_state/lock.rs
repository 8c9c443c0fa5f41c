//! Locks on ranges of a file.
//!
//! The held ranges are a tree of their own, so a lock takes O(log n) of the locks held, and O(1) for each of them that it
//! overlaps. Who asked first goes first among those that exclude each other.

use ubtrfs_rt::{Condvar, Mutex};

use crate::offset::FileRange;
use crate::range_tree::{RangeTree, Record};

/// Whether others may hold the range, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockMode {
    /// Others may, in this mode.
    Shared,
    /// Nobody else may.
    Exclusive,
}

/// Who holds a range: so many in shared mode, or one in exclusive mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Holders(u32);

impl Holders {
    const EXCLUSIVE: Self = Self(u32::MAX);
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    range: FileRange,
    mode: LockMode,
}

impl Waiter {
    fn excludes(&self, range: FileRange, mode: LockMode) -> bool {
        let is_exclusive = self.mode == LockMode::Exclusive || mode == LockMode::Exclusive;
        is_exclusive && self.range.overlaps(range)
    }
}

#[derive(Debug, Default)]
struct State {
    held: RangeTree<Holders>,
    /// In the order of their tickets.
    waiting: Vec<Waiter>,
    next_ticket: u64,
}

/// Locks on ranges, shared or exclusive.
#[derive(Debug, Default)]
pub struct IntervalLock {
    state: Mutex<State>,
    released: Condvar,
}

/// A range that is locked until this is dropped.
#[derive(Debug)]
pub struct LockedInterval<'a> {
    lock: &'a IntervalLock,
    range: FileRange,
}

impl LockedInterval<'_> {
    /// The range.
    pub fn range(&self) -> FileRange {
        self.range
    }
}

impl IntervalLock {
    /// Nothing is locked.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits for those that hold, or asked before for, what `mode` on `range` excludes, then holds it.
    /// A thread that holds a range must not ask for one that overlaps it.
    pub fn lock(&self, range: FileRange, mode: LockMode) -> LockedInterval<'_> {
        let mut state = self.state.lock();
        if !state.is_free(range, mode, u64::MAX) {
            let ticket = state.next_ticket;
            state.next_ticket += 1;
            state.waiting.push(Waiter { ticket, range, mode });
            while !state.is_free(range, mode, ticket) {
                self.released.wait(&mut state);
            }
            state.waiting.retain(|waiter| waiter.ticket != ticket);
        }
        state.hold(range, mode);
        LockedInterval { lock: self, range }
    }

    /// The same if there is nothing to wait for, else `None`.
    pub fn try_lock(&self, range: FileRange, mode: LockMode) -> Option<LockedInterval<'_>> {
        let mut state = self.state.lock();
        if !state.is_free(range, mode, u64::MAX) {
            return None;
        }
        state.hold(range, mode);
        Some(LockedInterval { lock: self, range })
    }

    /// How many threads wait.
    pub fn waiting_count(&self) -> usize {
        self.state.lock().waiting.len()
    }
}

impl Drop for LockedInterval<'_> {
    fn drop(&mut self) {
        let mut state = self.lock.state.lock();
        state.release(self.range);
        if !state.waiting.is_empty() {
            self.lock.released.notify_all();
        }
    }
}

impl State {
    /// Whether no holder, and none that waits with an earlier ticket, excludes this.
    fn is_free(&self, range: FileRange, mode: LockMode, ticket: u64) -> bool {
        let mut earlier = self.waiting.iter().take_while(|waiter| waiter.ticket < ticket);
        if earlier.any(|waiter| waiter.excludes(range, mode)) {
            return false;
        }
        let mut place = self.held.find(range.start.bytes());
        while let Some(found) = place {
            let Record { start, value, .. } = self.held.record(found);
            if start >= range.end.bytes() {
                break;
            }
            if mode == LockMode::Exclusive || value == Holders::EXCLUSIVE {
                return false;
            }
            place = self.held.next(found);
        }
        true
    }

    fn hold(&mut self, range: FileRange, mode: LockMode) {
        self.held.update(range.start.bytes(), range.end.bytes(), |piece| match mode {
            LockMode::Exclusive => Some(Holders::EXCLUSIVE),
            LockMode::Shared => Some(Holders(piece.value.map_or(1, |Holders(count)| count + 1))),
        });
    }

    fn release(&mut self, range: FileRange) {
        self.held.update(range.start.bytes(), range.end.bytes(), |piece| match piece.value {
            Some(Holders::EXCLUSIVE | Holders(1)) | None => None,
            Some(Holders(count)) => Some(Holders(count - 1)),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::offset::FileOffset;

    fn range(start: u64, end: u64) -> FileRange {
        FileRange::new(FileOffset::new(start), FileOffset::new(end))
    }

    proptest! {
        /// A lock is given exactly if none of the held ones excludes it.
        #[test]
        fn try_lock_random_same_as_list_of_held(
            steps in prop::collection::vec((0..60_u64, 1..20_u64, any::<bool>(), any::<bool>()), 1..80),
        ) {
            let lock = IntervalLock::new();
            let mut held = BTreeMap::new();
            for (index, (start, len, is_shared, releases)) in steps.into_iter().enumerate() {
                if releases {
                    held.pop_first();
                    continue;
                }
                let mode = if is_shared { LockMode::Shared } else { LockMode::Exclusive };
                let wanted = range(start, start + len);
                let is_excluded = held.values().any(|(_, other, other_mode)| {
                    wanted.overlaps(*other)
                        && (mode == LockMode::Exclusive || *other_mode == LockMode::Exclusive)
                });
                let locked = lock.try_lock(wanted, mode);
                prop_assert_eq!(locked.is_none(), is_excluded);
                if let Some(locked) = locked {
                    held.insert(index, (locked, wanted, mode));
                }
            }
            held.clear();
            prop_assert_eq!(lock.state.lock().held.len(), 0);
        }
    }

    /// Who waits in exclusive mode is not overtaken by those that come later in shared mode.
    #[test]
    fn lock_waiting_exclusive_keeps_later_shared_out() {
        let lock = IntervalLock::new();
        let first = lock.lock(range(0, 10), LockMode::Shared);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| drop(lock.lock(range(5, 15), LockMode::Exclusive)));
            while lock.waiting_count() == 0 {
                std::thread::yield_now();
            }
            assert!(lock.try_lock(range(0, 6), LockMode::Shared).is_none());
            assert!(lock.try_lock(range(0, 5), LockMode::Shared).is_some());
            drop(first);
            waiter.join().unwrap();
        });
        assert!(lock.try_lock(range(0, 20), LockMode::Exclusive).is_some());
    }

    /// Threads change counters that only the lock protects.
    #[test]
    fn lock_threads_exclude_each_other() {
        use std::sync::atomic::{AtomicU64, Ordering};
        let lock = IntervalLock::new();
        let inside: Vec<AtomicU64> = (0..8).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (lock, inside) = (&lock, &inside);
                scope.spawn(move || {
                    for step in 0..2000 {
                        let start = (thread * 3 + step * 5) % 8;
                        let end = (start + 1 + step % 3).min(8);
                        let is_shared = step % 3 == 0;
                        let mode = if is_shared { LockMode::Shared } else { LockMode::Exclusive };
                        let locked = lock.lock(range(start, end), mode);
                        let weight = if is_shared { 1 } else { 1000 };
                        for at in start..end {
                            let slot = &inside[usize::try_from(at).unwrap()];
                            let others = slot.fetch_add(weight, Ordering::SeqCst);
                            assert!(others < 1000 && (is_shared || others == 0), "{others} inside");
                        }
                        for at in start..end {
                            inside[usize::try_from(at).unwrap()]
                                .fetch_sub(weight, Ordering::SeqCst);
                        }
                        drop(locked);
                    }
                });
            }
        });
    }
}
