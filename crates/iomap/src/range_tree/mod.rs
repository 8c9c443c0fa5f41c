//! Non-overlapping ranges of `u64` with a value each; touching ranges of equal value are one record.
//!
//! A B+ tree in an arena: records lie in leaves, which are linked to their neighbours. A [`Place`]
//! (leaf and slot) may be kept from one call to the next. It is never trusted: [`RangeTree::find_near()`]
//! looks at the record that is there now.
//!
//! Invariants:
//! 1. Records are sorted, not empty, and do not overlap; neighbours that touch differ in value.
//! 2. The `first` of a child is the start of the first record below it. So the leaf for an offset is
//!    the last one whose first record starts at or before it.
//! 3. No leaf or inner node is empty, except the only leaf of an empty tree; all leaves have the same depth.
//! 4. A node in a free list has `is_linked` false and holds nothing.

mod nodes;
#[cfg(test)]
mod tests;

use nodes::{Inner, Leaf, NONE};
pub(crate) use nodes::{Place, Record};

/// The tree. Nothing is allocated until something is put in.
#[derive(Debug)]
pub(crate) struct RangeTree<V> {
    leaves: Vec<Leaf<V>>,
    inners: Vec<Inner>,
    /// Heads of the lists of unused nodes, linked by `parent`.
    free_leaf: u32,
    free_inner: u32,
    /// A leaf if `height` is 0; `NONE` before the first record.
    root: u32,
    height: u32,
    record_count: usize,
}

impl<V> Default for RangeTree<V> {
    fn default() -> Self {
        Self {
            leaves: Vec::new(),
            inners: Vec::new(),
            free_leaf: NONE,
            free_inner: NONE,
            root: NONE,
            height: 0,
            record_count: 0,
        }
    }
}

impl<V: Copy + Eq> RangeTree<V> {
    /// How many records there are.
    pub(crate) fn len(&self) -> usize {
        self.record_count
    }

    /// The first record that ends after `at`: the one that holds `at`, or else the next one.
    pub(crate) fn find(&self, at: u64) -> Option<Place> {
        if self.root == NONE {
            return None;
        }
        let leaf = self.leaf_for(at);
        let slot = self.leaf(leaf).records.partition_point(|record| record.end <= at);
        self.settle(leaf, slot)
    }

    /// What [`RangeTree::find()`] gives, if `near` is the place of that record or of the one before; else `None`.
    /// A place is that of the record if one is linked there, `at` is not before the end of its
    /// predecessor (or it has none), and `at` is before its own end. This is judged by the records that are
    /// there now, whatever was there when `near` was taken.
    #[expect(clippy::option_option, reason = "what the hint says, and whether it says anything")]
    pub(crate) fn find_by_hint(&self, at: u64, near: Place) -> Option<Option<Place>> {
        let record = self.linked(near)?;
        if at < record.end {
            let is_first = self.prev(near).is_none_or(|prev| self.record(prev).end <= at);
            return is_first.then_some(Some(near));
        }
        let Some(next) = self.next(near) else { return Some(None) };
        (at < self.record(next).end).then_some(Some(next))
    }

    fn find_near(&self, at: u64, near: Option<Place>) -> Option<Place> {
        match near.and_then(|near| self.find_by_hint(at, near)) {
            Some(found) => found,
            None => self.find(at),
        }
    }

    /// The record at a place that one of the searches just gave.
    pub(crate) fn record(&self, place: Place) -> Record<V> {
        self.leaf(place.leaf).records[place.slot()]
    }

    /// The record's successor.
    pub(crate) fn next(&self, place: Place) -> Option<Place> {
        self.settle(place.leaf, place.slot() + 1)
    }

    /// The record's predecessor.
    pub(crate) fn prev(&self, place: Place) -> Option<Place> {
        if let Some(slot) = place.slot.checked_sub(1) {
            return Some(Place { slot, ..place });
        }
        let leaf = self.leaf(place.leaf).prev;
        (leaf != NONE).then(|| Place::new(leaf, self.leaf(leaf).records.len() - 1))
    }

    /// The values of `start..end`, gaps being `None`, become what `change` says, piece by piece in their order.
    /// Takes O(log n) and O(1) for each record in the range, and allocates at most as nodes split.
    pub(crate) fn update(
        &mut self,
        start: u64,
        end: u64,
        mut change: impl FnMut(Record<Option<V>>) -> Option<V>,
    ) {
        let mut at = start;
        let mut near = None;
        while at < end {
            let place = self.find_near(at, near);
            let record = place.map(|place| self.record(place));
            match (place, record) {
                (Some(place), Some(record)) if record.start <= at => {
                    let upto = record.end.min(end);
                    let value = Some(record.value);
                    let changed = change(Record { start: at, end: upto, value });
                    near = Some(place);
                    if changed != value {
                        near = self.replace(place, at, upto, changed);
                    }
                    at = upto;
                }
                _ => {
                    let upto = record.map_or(end, |record| record.start.min(end));
                    near = place;
                    if let Some(value) = change(Record { start: at, end: upto, value: None }) {
                        near = Some(self.put(Record { start: at, end: upto, value }, place));
                    }
                    at = upto;
                }
            }
        }
    }

    /// The place of `leaf`'s `slot`, or where that is past its end, the first of the next leaf.
    fn settle(&self, leaf: u32, slot: usize) -> Option<Place> {
        if slot < self.leaf(leaf).records.len() {
            return Some(Place::new(leaf, slot));
        }
        let next = self.leaf(leaf).next;
        (next != NONE).then(|| Place::new(next, 0))
    }

    /// The record at `place`, if one is linked there now.
    fn linked(&self, place: Place) -> Option<Record<V>> {
        let leaf = self.leaves.get(place.leaf as usize).filter(|leaf| leaf.is_linked)?;
        leaf.records.get(place.slot()).copied()
    }

    /// Puts a record into a gap, and joins it with equal neighbours that it touches.
    fn put(&mut self, new: Record<V>, near: Option<Place>) -> Place {
        let right = self.find_near(new.end, near);
        // What ends at the new record's start does not end after it, so it is no `find()`'s answer.
        let left = match right {
            Some(right) => self.prev(right),
            None => self.last(),
        };
        let left =
            left.filter(|place| self.record(*place).end == new.start && self.is(*place, new.value));
        let right = right
            .filter(|place| self.record(*place).start == new.end && self.is(*place, new.value));
        match (left, right) {
            (None, None) => self.insert(new),
            (Some(left), None) => {
                self.record_mut(left).end = new.end;
                left
            }
            (None, Some(right)) => {
                self.set_start(right, new.start);
                right
            }
            (Some(left), Some(right)) => {
                self.record_mut(left).end = self.record(right).end;
                self.remove(right);
                // The removal may have moved it.
                self.find(new.start).unwrap_or(left)
            }
        }
    }

    /// Gives the part `from..upto` of the record at `place` another value, or takes it out.
    fn replace(&mut self, place: Place, from: u64, upto: u64, value: Option<V>) -> Option<Place> {
        let old = self.record(place);
        let near = Some(place);
        match (from == old.start, upto == old.end, value) {
            (true, true, Some(value)) => {
                self.record_mut(place).value = value;
                return self.join_neighbours(place);
            }
            (true, true, None) => {
                self.remove(place);
                return Some(place);
            }
            (true, false, _) => self.set_start(place, upto),
            (false, true, _) => self.record_mut(place).end = from,
            (false, false, _) => {
                self.record_mut(place).end = from;
                self.insert(Record { start: upto, ..old });
            }
        }
        match value {
            Some(value) => Some(self.put(Record { start: from, end: upto, value }, near)),
            None => near,
        }
    }

    /// After the value at `place` changed: joins it with what it touches and now equals.
    fn join_neighbours(&mut self, place: Place) -> Option<Place> {
        let record = self.record(place);
        let is_equal = |other: Record<V>| other.value == record.value;
        let next = self.next(place).filter(|next| {
            let next = self.record(*next);
            next.start == record.end && is_equal(next)
        });
        if let Some(next) = next {
            self.record_mut(place).end = self.record(next).end;
            self.remove(next);
            // The removal may have moved it.
            return self.find(record.start).and_then(|place| self.join_neighbours(place));
        }
        let prev = self.prev(place).filter(|prev| {
            let prev = self.record(*prev);
            prev.end == record.start && is_equal(prev)
        });
        let Some(prev) = prev else { return Some(place) };
        self.record_mut(prev).end = record.end;
        self.remove(place);
        self.find(record.start)
    }

    fn is(&self, place: Place, value: V) -> bool {
        self.record(place).value == value
    }
}
