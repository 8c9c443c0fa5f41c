//! The lists that files are in: those with folios, and those that are dirty.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Weak;

use ubtrfs_rt::Arc;

use super::CachedFile;

/// Files with folios. A hand goes round them.
#[derive(Default)]
pub(super) struct Listed {
    slots: Vec<Option<Weak<dyn CachedFile>>>,
    free: Vec<usize>,
    hand: usize,
}

/// A file's place among those with folios.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ListedSlot(usize);

impl Listed {
    pub(super) fn add(&mut self, file: Weak<dyn CachedFile>) -> ListedSlot {
        if let Some(slot) = self.free.pop() {
            self.slots[slot] = Some(file);
            return ListedSlot(slot);
        }
        self.slots.push(Some(file));
        ListedSlot(self.slots.len() - 1)
    }

    pub(super) fn remove(&mut self, slot: ListedSlot) -> Option<Weak<dyn CachedFile>> {
        let file = self.slots.get_mut(slot.0)?.take();
        if file.is_some() {
            self.free.push(slot.0);
        }
        file
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// The file at the hand, which goes on to the next one.
    pub(super) fn turn(&mut self) -> Option<Arc<dyn CachedFile>> {
        self.hand = if self.hand < self.slots.len() { self.hand } else { 0 };
        let file = self.slots.get(self.hand)?.as_ref().and_then(Weak::upgrade);
        self.hand += 1;
        file
    }
}

/// When a file became dirty, among all files.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct DirtyOrder(u64);

/// A file that is, or was lately, dirty; the list keeps it alive.
pub(super) struct DirtyFile {
    pub(super) since_ms: u64,
    /// By who has it taken, in a pass over what is due.
    pub(super) written_bytes: Cell<u64>,
    pub(super) file: Arc<dyn CachedFile>,
}

/// Dirty files, in the order in which they became dirty.
#[derive(Default)]
pub(super) struct DirtyFiles {
    files: BTreeMap<DirtyOrder, DirtyFile>,
    next: u64,
    /// Files that somebody took to write them back.
    taken_count: usize,
    /// How often more became dirty than the background lets be.
    pub(super) due_count: u64,
}

impl DirtyFiles {
    pub(super) fn add(&mut self, file: DirtyFile) -> DirtyOrder {
        let order = DirtyOrder(self.next);
        self.next += 1;
        self.files.insert(order, file);
        order
    }

    /// `None` if somebody has taken it.
    pub(super) fn remove(&mut self, order: DirtyOrder) -> Option<DirtyFile> {
        self.files.remove(&order)
    }

    pub(super) fn take_all(&mut self) -> Vec<DirtyFile> {
        std::mem::take(&mut self.files).into_values().collect()
    }

    pub(super) fn first(&self) -> Option<&DirtyFile> {
        self.files.values().next()
    }

    /// The order that the next file to become dirty has.
    pub(super) fn end(&self) -> DirtyOrder {
        DirtyOrder(self.next)
    }

    /// Takes the first file behind `after` and before `end`, if it is chosen.
    pub(super) fn take(
        &mut self,
        after: Option<DirtyOrder>,
        end: DirtyOrder,
        is_chosen: impl Fn(&DirtyFile) -> bool,
    ) -> Option<(DirtyOrder, DirtyFile)> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        if after.is_some_and(|after| after >= end) {
            return None;
        }
        let (order, file) = self.files.range((start, Bound::Excluded(end))).next()?;
        if !is_chosen(file) {
            return None;
        }
        let order = *order;
        self.taken_count += 1;
        self.files.remove(&order).map(|file| (order, file))
    }

    /// The file is not taken any more; one that is still dirty has its old place again.
    pub(super) fn give_back(&mut self, order: DirtyOrder, dirty: Option<DirtyFile>) {
        self.taken_count -= 1;
        if let Some(file) = dirty {
            self.files.insert(order, file);
        }
    }

    pub(super) fn taken_count(&self) -> usize {
        self.taken_count
    }
}
