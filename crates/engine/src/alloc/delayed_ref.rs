//! Delayed references: what the extent tree is still to be told.
//!
//! A change of references is queued here, by extent, and merged: an extent that was allocated and
//! freed within a transaction never reaches the extent tree. The queue is run in address order by
//! [`super::extent_tree`], additions before drops, until it stays empty.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use ubtrfs_ondisk::extent::BackRef;
use ubtrfs_ondisk::{Key, LogicalAddr};

/// What an extent is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ExtentKind {
    /// A tree block.
    Block {
        level: u8,
        /// Kept by filesystems without SKINNY_METADATA.
        first_key: Key,
    },
    /// File data.
    Data,
}

/// The pending changes of one extent.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) len_bytes: u64,
    pub(crate) kind: ExtentKind,
    /// Allocated in this transaction and not in the extent tree yet.
    pub(crate) is_new: bool,
    /// It may not become longer: its file extent may have to be placed again, and then all of it is to come back.
    pub(crate) keeps_len: bool,
    /// Net change by reference.
    pub(crate) changes: Changes,
    /// The block becomes one that what lies below it is referenced by: FULL_BACKREF.
    pub(crate) sets_full_backref: bool,
}

impl Head {
    fn of_old(len_bytes: u64, kind: ExtentKind) -> Self {
        let changes = Changes::default();
        Self { len_bytes, kind, is_new: false, keeps_len: false, changes, sets_full_backref: false }
    }

    fn net(&self) -> i64 {
        self.changes.net
    }

    /// Whether running it may free data that was there before.
    fn may_free_data(&self) -> bool {
        self.kind == ExtentKind::Data && !self.is_new && self.net() < 0
    }
}

/// Changes beyond which they are found by their hash.
const SEARCHED_MAX: usize = 16;

/// Net changes by reference, of an extent that has few of them, as most have.
pub(crate) type FewChanges = SmallVec<[(BackRef, i64); 2]>;

/// Net change by reference, none of them 0; the count inside each `BackRef` is 1 and means nothing.
/// Most extents have one. An extent that a hundred thousand files share has as many.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes {
    list: SmallVec<[(BackRef, i64); 1]>,
    /// Where in the list each is, once there are many.
    places: Option<Box<FxHashMap<BackRef, usize>>>,
    /// Sum of all.
    net: i64,
}

impl Changes {
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &(BackRef, i64)> {
        self.list.iter()
    }

    fn find(&self, reference: &BackRef) -> Option<usize> {
        match &self.places {
            Some(places) => places.get(reference).copied(),
            None => self.list.iter().position(|(known, _)| known == reference),
        }
    }

    fn add(&mut self, reference: BackRef, count: i64) {
        self.net += count;
        let Some(at) = self.find(&reference) else {
            if let Some(places) = &mut self.places {
                places.insert(reference, self.list.len());
            } else if self.list.len() == SEARCHED_MAX {
                let known = self.list.iter().map(|(known, _)| *known);
                let all = known.chain([reference]);
                self.places = Some(Box::new(all.zip(0..).collect()));
            }
            self.list.push((reference, count));
            return;
        };
        let pending = self.list[at].1 + count;
        self.list[at].1 = pending;
        if pending == 0 {
            let (gone, _) = self.list.swap_remove(at);
            if let Some(places) = &mut self.places {
                places.remove(&gone);
                if let Some((moved, _)) = self.list.get(at) {
                    places.insert(*moved, at);
                }
            }
        }
    }
}

/// What waits to be told of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Waiting {
    /// The extent is not in the extent tree yet.
    pub(crate) is_new: bool,
    /// References more, or fewer, than the extent tree says.
    pub(crate) net: i64,
    /// FULL_BACKREF is to be set.
    pub(crate) sets_full_backref: bool,
}

/// What became of a queued change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Queued {
    /// It waits to be run.
    Pending,
    /// It undid the extent's allocation: the extent never was, its space is free at once.
    Cancelled,
}

/// All pending changes.
#[derive(Debug, Default)]
pub(crate) struct DelayedRefs {
    heads: BTreeMap<LogicalAddr, Head>,
    /// Data extents among them that were there before: each may be freed.
    old_data_count: usize,
    /// Changes of references, of all extents.
    change_count: usize,
}

impl DelayedRefs {
    /// Number of extents with pending changes.
    pub(crate) fn len(&self) -> usize {
        self.heads.len()
    }

    /// Number of extents with pending changes, or of changes where they are more: an extent's many
    /// references become items of their own.
    pub(crate) fn change_count(&self) -> usize {
        self.change_count.max(self.heads.len())
    }

    /// Number of data extents that may be freed.
    pub(crate) fn old_data_count(&self) -> usize {
        self.old_data_count
    }

    /// Takes everything queued so far.
    pub(crate) fn take(&mut self) -> BTreeMap<LogicalAddr, Head> {
        self.old_data_count = 0;
        self.change_count = 0;
        std::mem::take(&mut self.heads)
    }

    /// Queues the first reference of an extent that was just allocated. Returns false, with
    /// nothing queued, where changes of an extent at that address wait: it is in use, then.
    #[must_use]
    pub(crate) fn add_extent(
        &mut self,
        addr: LogicalAddr,
        len_bytes: u64,
        kind: ExtentKind,
        reference: BackRef,
        count: i64,
    ) -> bool {
        let Entry::Vacant(entry) = self.heads.entry(addr) else { return false };
        let mut changes = Changes::default();
        changes.add(reference, count);
        self.change_count += 1;
        entry.insert(Head { is_new: true, changes, ..Head::of_old(len_bytes, kind) });
        true
    }

    /// The new data extent that ends at `end`, and its reference, if it has one only.
    pub(crate) fn new_data_before(&self, end: LogicalAddr) -> Option<(LogicalAddr, u64, BackRef)> {
        let (addr, head) = self.heads.range(..end).next_back()?;
        let [(reference, 1)] = head.changes.list.as_slice() else { return None };
        let is_new_data = head.is_new && !head.keeps_len && head.kind == ExtentKind::Data;
        let ends_there = addr.0 + head.len_bytes == end.0;
        (is_new_data && ends_there).then_some((*addr, head.len_bytes, *reference))
    }

    /// Makes the extent at `addr`, as [`DelayedRefs::new_data_before`] found it, longer.
    pub(crate) fn grow(&mut self, addr: LogicalAddr, more_bytes: u64) {
        let head = self.heads.get_mut(&addr).expect("it was found under this lock");
        head.len_bytes += more_bytes;
    }

    /// The new extent at `addr` does not become longer.
    pub(crate) fn keep_len(&mut self, addr: LogicalAddr) {
        if let Some(head) = self.heads.get_mut(&addr) {
            head.keeps_len = true;
        }
    }

    /// What waits for the extent at `addr`.
    pub(crate) fn waiting(&self, addr: LogicalAddr) -> Waiting {
        self.heads.get(&addr).map_or(Waiting::default(), |head| Waiting {
            is_new: head.is_new,
            net: head.net(),
            sets_full_backref: head.sets_full_backref,
        })
    }

    /// Whether the extent at `addr` was allocated in this transaction; whether changes wait for
    /// references that are not the caller's own.
    pub(crate) fn others(
        &self,
        addr: LogicalAddr,
        is_own: impl Fn(&BackRef) -> bool,
    ) -> (bool, bool) {
        self.heads.get(&addr).map_or((false, false), |head| {
            let adds_other =
                |(reference, count): &(BackRef, i64)| *count != 0 && !is_own(reference);
            (head.is_new, head.changes.iter().any(adds_other))
        })
    }

    /// Whether the extent at `addr` was allocated in this transaction, and the net changes that wait for
    /// it, by reference; `None` where they are more than `count_max`.
    pub(crate) fn changes(
        &self,
        addr: LogicalAddr,
        count_max: usize,
    ) -> Option<(bool, FewChanges)> {
        let Some(head) = self.heads.get(&addr) else { return Some((false, FewChanges::new())) };
        let is_short = head.changes.len() <= count_max;
        is_short.then(|| (head.is_new, head.changes.iter().copied().collect()))
    }

    /// Queues that a block is marked FULL_BACKREF.
    pub(crate) fn set_full_backref(&mut self, addr: LogicalAddr, len_bytes: u64, kind: ExtentKind) {
        let head = self.heads.entry(addr).or_insert_with(|| Head::of_old(len_bytes, kind));
        head.sets_full_backref = true;
    }

    /// Queues a change of `count` references, negative to drop.
    pub(crate) fn change(
        &mut self,
        addr: LogicalAddr,
        len_bytes: u64,
        kind: ExtentKind,
        reference: BackRef,
        count: i64,
    ) -> Queued {
        let head = self.heads.entry(addr).or_insert_with(|| Head::of_old(len_bytes, kind));
        self.old_data_count -= usize::from(head.may_free_data());
        self.change_count -= head.changes.len();
        head.changes.add(reference, count);
        self.old_data_count += usize::from(head.may_free_data());
        self.change_count += head.changes.len();
        let (is_new, is_empty) = (head.is_new, head.changes.is_empty());
        if is_empty && (is_new || !head.sets_full_backref) {
            self.heads.remove(&addr);
        }
        if is_empty && is_new { Queued::Cancelled } else { Queued::Pending }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ubtrfs_ondisk::RootId;

    const BLOCK: ExtentKind = ExtentKind::Block { level: 0, first_key: Key::MIN };

    fn of(root: u64) -> BackRef {
        BackRef::TreeBlock { root: RootId(root) }
    }

    #[test]
    fn change_that_undoes_an_allocation_cancels_it() {
        let mut refs = DelayedRefs::default();
        assert!(refs.add_extent(LogicalAddr(4096), 4096, BLOCK, of(5), 1));
        assert!(!refs.add_extent(LogicalAddr(4096), 4096, BLOCK, of(5), 1));
        assert_eq!(refs.change(LogicalAddr(4096), 4096, BLOCK, of(5), -1), Queued::Cancelled);
        assert_eq!(refs.len(), 0);
    }

    #[test]
    fn change_of_an_old_extent_that_cancels_leaves_nothing_to_run() {
        let mut refs = DelayedRefs::default();
        assert_eq!(refs.change(LogicalAddr(4096), 4096, BLOCK, of(5), 1), Queued::Pending);
        assert_eq!(refs.change(LogicalAddr(4096), 4096, BLOCK, of(5), -1), Queued::Pending);
        assert_eq!(refs.len(), 0);
    }

    /// What the removal of checksums needs was not kept back for the commit.
    #[test]
    fn data_that_may_be_freed_is_counted_until_it_is_taken_or_stays() {
        let mut refs = DelayedRefs::default();
        let data = |inode| BackRef::ExtentData {
            root: RootId(5),
            inode: ubtrfs_ondisk::InodeNo(inode),
            offset: 0,
            count: 1,
        };
        let change = |refs: &mut DelayedRefs, at, inode, count| {
            refs.change(LogicalAddr(at), 4096, ExtentKind::Data, data(inode), count)
        };
        assert!(refs.add_extent(LogicalAddr(0), 4096, ExtentKind::Data, data(1), 1));
        change(&mut refs, 0, 1, -1);
        change(&mut refs, 8192, 1, -1);
        change(&mut refs, 8192, 2, -1);
        change(&mut refs, 4096, 1, -1);
        assert_eq!(refs.old_data_count(), 2);
        change(&mut refs, 4096, 1, 1);
        assert_eq!(refs.old_data_count(), 1);
        refs.take();
        assert_eq!(refs.old_data_count(), 0);
    }

    /// A hundred thousand clones of one block took fourteen seconds: each searched all before it.
    #[test]
    fn change_of_many_references_agrees_with_a_map() {
        let mut state = 7_u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let mut changes = Changes::default();
        let mut model = std::collections::HashMap::new();
        for step in 0..20_000 {
            let root = random(if step < 10_000 { 200 } else { 30 });
            let count = if random(2) == 0 { 1 } else { -1 };
            changes.add(of(root), count);
            let pending = model.entry(root).or_insert(0);
            *pending += count;
            if *pending == 0 {
                model.remove(&root);
            }
            assert_eq!(changes.len(), model.len());
        }
        assert_eq!(changes.net, model.values().sum::<i64>());
        for (reference, count) in changes.iter() {
            let BackRef::TreeBlock { root } = reference else { panic!("{reference:?}") };
            assert_eq!(model.get(&root.0), Some(count));
        }
        for (root, count) in model {
            changes.add(of(root), -count);
        }
        assert!(changes.is_empty() && changes.net == 0);
    }

    #[test]
    fn change_of_different_references_keeps_both() {
        let mut refs = DelayedRefs::default();
        refs.change(LogicalAddr(4096), 4096, BLOCK, of(5), -1);
        refs.change(LogicalAddr(4096), 4096, BLOCK, of(6), 1);
        let heads = refs.take();
        assert_eq!(heads[&LogicalAddr(4096)].changes.len(), 2);
    }
}
