//! The lists that files are in: those with folios, and those that are dirty.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Weak;

use ubtrfs_rt::Arc;

use super::CachedFile;

/// Files with folios, by when they came. A hand goes round them; what it costs is by those that are there, however many there were.
#[derive(Default)]
pub(super) struct Listed {
    files: BTreeMap<u64, Weak<dyn CachedFile>>,
    next: u64,
    /// The place behind the file that had the last turn.
    hand: u64,
}

/// A file's place among those with folios.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ListedSlot(u64);

impl Listed {
    pub(super) fn add(&mut self, file: Weak<dyn CachedFile>) -> ListedSlot {
        let slot = self.next;
        self.next += 1;
        self.files.insert(slot, file);
        ListedSlot(slot)
    }

    pub(super) fn remove(&mut self, slot: ListedSlot) -> Option<Weak<dyn CachedFile>> {
        self.files.remove(&slot.0)
    }

    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    /// The file at the hand, which goes on to the next one.
    pub(super) fn turn(&mut self) -> Option<Arc<dyn CachedFile>> {
        let behind = self.files.range(self.hand..).next();
        let (slot, file) = behind.or_else(|| self.files.first_key_value())?;
        self.hand = slot + 1;
        file.upgrade()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offset::FileRange;

    struct File;

    impl CachedFile for File {
        fn reclaim(&self, _: u64) -> u64 {
            0
        }

        fn write_back_some(&self, _: u64) -> u64 {
            0
        }

        fn read_ahead(&self, _: FileRange) {}

        fn is_still_dirty(&self, _: DirtyOrder, _: bool) -> bool {
            false
        }
    }

    /// It went round as many places as there ever were files at once.
    #[test]
    fn turns_go_round_those_that_are_there() {
        let mut listed = Listed::default();
        let files: Vec<Arc<dyn CachedFile>> =
            (0..1000).map(|_| Arc::new(File) as Arc<dyn CachedFile>).collect();
        let slots: Vec<ListedSlot> =
            files.iter().map(|file| listed.add(Arc::downgrade(file))).collect();
        for (number, slot) in slots.iter().enumerate() {
            if ![10, 500, 998].contains(&number) {
                assert!(listed.remove(*slot).is_some());
                assert!(listed.remove(*slot).is_none());
            }
        }
        assert_eq!(listed.len(), 3);
        for number in [10, 500, 998, 10, 500] {
            let file = listed.turn().unwrap();
            assert!(Arc::ptr_eq(&file, &files[number]), "{number}");
        }
        // What comes at the hand, or goes from it, keeps nobody from his turn.
        let new: Arc<dyn CachedFile> = Arc::new(File);
        listed.add(Arc::downgrade(&new));
        assert!(listed.remove(slots[500]).is_some());
        for file in [&files[998], &new, &files[10], &files[998]] {
            assert!(Arc::ptr_eq(&listed.turn().unwrap(), file));
        }
        assert_eq!(listed.len(), 3);
    }

    #[test]
    fn nobody_has_a_turn_where_nobody_is() {
        let mut listed = Listed::default();
        assert!(listed.turn().is_none());
        let file: Arc<dyn CachedFile> = Arc::new(File);
        let slot = listed.add(Arc::downgrade(&file));
        assert!(listed.turn().is_some());
        listed.remove(slot);
        assert!(listed.turn().is_none());
        assert_eq!(listed.len(), 0);
    }
}
