//! The nodes of the tree: where records lie, how nodes split and join. The order of records is the caller's
//! to keep.

use super::RangeTree;

/// No node.
pub(super) const NONE: u32 = u32::MAX;

/// Records in a leaf: memory moved by an insertion against levels to go down.
/// Unit tests have small nodes, so that their trees are deep.
const LEAF_RECORDS_MAX: usize = if cfg!(test) { 8 } else { 64 };
const INNER_CHILDREN_MAX: usize = if cfg!(test) { 8 } else { 64 };

/// Nodes below this join a sibling if both together leave room.
const LEAF_RECORDS_LOW: usize = LEAF_RECORDS_MAX / 4;
const INNER_CHILDREN_LOW: usize = INNER_CHILDREN_MAX / 4;

/// A range and its value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Record<V> {
    /// The first.
    pub(crate) start: u64,
    /// One past the last.
    pub(crate) end: u64,
    /// The same for all of the range.
    pub(crate) value: V,
}

/// Where a record lies, or lay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(super) leaf: u32,
    pub(super) slot: u32,
}

impl Place {
    pub(super) fn new(leaf: u32, slot: usize) -> Self {
        let slot = u32::try_from(slot).expect("a leaf has few slots");
        Self { leaf, slot }
    }

    pub(super) fn slot(self) -> usize {
        self.slot as usize
    }

    /// As one word, never `u64::MAX`.
    pub(crate) fn to_word(self) -> u64 {
        u64::from(self.leaf) << 32 | u64::from(self.slot)
    }

    /// The inverse; any word is a place, which may hold nothing.
    pub(crate) fn from_word(word: u64) -> Self {
        let (leaf, slot) = (word >> 32, word & u64::from(u32::MAX));
        Self {
            leaf: u32::try_from(leaf).unwrap_or(NONE),
            slot: u32::try_from(slot).unwrap_or(NONE),
        }
    }
}

#[derive(Debug)]
pub(super) struct Leaf<V> {
    pub(super) records: Vec<Record<V>>,
    /// Unused leaves: the next unused one.
    pub(super) parent: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) is_linked: bool,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) children: Vec<Child>,
    /// Unused nodes: the next unused one.
    pub(super) parent: u32,
    /// Whether the children are leaves.
    pub(super) is_lowest: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Child {
    /// Start of the first record below.
    pub(super) first: u64,
    pub(super) index: u32,
}

impl<V: Copy + Eq> RangeTree<V> {
    pub(super) fn leaf(&self, index: u32) -> &Leaf<V> {
        &self.leaves[index as usize]
    }

    fn leaf_mut(&mut self, index: u32) -> &mut Leaf<V> {
        &mut self.leaves[index as usize]
    }

    pub(super) fn inner(&self, index: u32) -> &Inner {
        &self.inners[index as usize]
    }

    fn inner_mut(&mut self, index: u32) -> &mut Inner {
        &mut self.inners[index as usize]
    }

    pub(super) fn record_mut(&mut self, place: Place) -> &mut Record<V> {
        &mut self.leaf_mut(place.leaf).records[place.slot()]
    }

    /// The last leaf whose first record starts at or before `at`, or else the first leaf.
    pub(super) fn leaf_for(&self, at: u64) -> u32 {
        let mut index = self.root;
        for _ in 0..self.height {
            let children = &self.inner(index).children;
            let after = children.partition_point(|child| child.first <= at);
            index = children[after.saturating_sub(1)].index;
        }
        index
    }

    /// The last record.
    pub(super) fn last(&self) -> Option<Place> {
        if self.record_count == 0 {
            return None;
        }
        let mut index = self.root;
        for _ in 0..self.height {
            let children = &self.inner(index).children;
            index = children[children.len() - 1].index;
        }
        Some(Place::new(index, self.leaf(index).records.len() - 1))
    }

    /// Moves a record's start, within the gap before it or within itself.
    pub(super) fn set_start(&mut self, place: Place, start: u64) {
        self.record_mut(place).start = start;
        if place.slot == 0 {
            self.first_changed(place.leaf, true, start);
        }
    }

    /// Puts a record between two others, which it does not overlap.
    pub(super) fn insert(&mut self, record: Record<V>) -> Place {
        if self.root == NONE {
            self.root = self.new_leaf();
        }
        self.record_count += 1;
        let leaf = self.leaf_for(record.start);
        let records = &self.leaf(leaf).records;
        let slot = records.partition_point(|other| other.start < record.start);
        let place = if records.len() < LEAF_RECORDS_MAX {
            Place::new(leaf, slot)
        } else {
            self.split_leaf(leaf, slot, record.start)
        };
        self.leaf_mut(place.leaf).records.insert(place.slot(), record);
        if place.slot == 0 {
            self.first_changed(place.leaf, true, record.start);
        }
        place
    }

    /// Takes a record out. Other places of its leaf, and of the leaves beside it, may change.
    pub(super) fn remove(&mut self, place: Place) {
        self.record_count -= 1;
        let leaf = self.leaf_mut(place.leaf);
        leaf.records.remove(place.slot());
        let (len, first) = (leaf.records.len(), leaf.records.first().map(|record| record.start));
        if self.record_count == 0 && self.leaves.len() > 1 {
            *self = Self::default();
            return;
        }
        match first {
            None => self.remove_leaf(place.leaf),
            Some(first) => {
                if place.slot == 0 {
                    self.first_changed(place.leaf, true, first);
                }
                if len < LEAF_RECORDS_LOW {
                    self.join_leaf(place.leaf);
                }
            }
        }
    }

    /// Makes room in a full leaf; where the record that would have come to `slot` goes now. Records that come in
    /// ascending order leave full leaves behind.
    fn split_leaf(&mut self, leaf: u32, slot: usize, start: u64) -> Place {
        let new = self.new_leaf();
        let next = self.leaf(leaf).next;
        let keep = if slot == LEAF_RECORDS_MAX && next == NONE {
            LEAF_RECORDS_MAX
        } else {
            LEAF_RECORDS_MAX / 2
        };
        let moved = self.leaf_mut(leaf).records.split_off(keep);
        let first = moved.first().map_or(start, |record| record.start);
        let new_leaf = self.leaf_mut(new);
        new_leaf.records = moved;
        new_leaf.prev = leaf;
        new_leaf.next = next;
        if next != NONE {
            self.leaf_mut(next).prev = new;
        }
        self.leaf_mut(leaf).next = new;
        self.insert_child(leaf, Child { first, index: new }, true);
        if slot < keep || (slot == keep && keep < LEAF_RECORDS_MAX) {
            Place::new(leaf, slot)
        } else {
            Place::new(new, slot - keep)
        }
    }

    /// Puts `child` behind its sibling `left`, which is a leaf or an inner node.
    fn insert_child(&mut self, left: u32, child: Child, are_leaves: bool) {
        let parent = self.parent(left, are_leaves);
        if parent == NONE {
            let first = self.first_below(left, are_leaves);
            let root = self.new_inner(are_leaves);
            self.inner_mut(root).children.extend([Child { first, index: left }, child]);
            self.set_parent(left, root, are_leaves);
            self.set_parent(child.index, root, are_leaves);
            self.root = root;
            self.height += 1;
            return;
        }
        let at = self.position(parent, left) + 1;
        if self.inner(parent).children.len() < INNER_CHILDREN_MAX {
            self.inner_mut(parent).children.insert(at, child);
            self.set_parent(child.index, parent, are_leaves);
            return;
        }
        let keep =
            if at == INNER_CHILDREN_MAX { INNER_CHILDREN_MAX - 1 } else { INNER_CHILDREN_MAX / 2 };
        let new = self.new_inner(are_leaves);
        let mut moved = self.inner_mut(parent).children.split_off(keep);
        if at > keep {
            moved.insert(at - keep, child);
        } else {
            self.inner_mut(parent).children.insert(at, child);
            self.set_parent(child.index, parent, are_leaves);
        }
        let first = moved[0].first;
        for child in &moved {
            self.set_parent(child.index, new, are_leaves);
        }
        self.inner_mut(new).children = moved;
        self.insert_child(parent, Child { first, index: new }, false);
    }

    /// The first record below a node starts elsewhere: its ancestors must say so.
    fn first_changed(&mut self, node: u32, is_leaf: bool, first: u64) {
        let mut below = node;
        let mut parent = self.parent(node, is_leaf);
        while parent != NONE {
            let at = self.position(parent, below);
            self.inner_mut(parent).children[at].first = first;
            if at > 0 {
                return;
            }
            below = parent;
            parent = self.inner(parent).parent;
        }
    }

    /// An empty leaf goes, unless it is the only one.
    fn remove_leaf(&mut self, leaf: u32) {
        let (parent, prev, next) = {
            let leaf = self.leaf(leaf);
            (leaf.parent, leaf.prev, leaf.next)
        };
        if parent == NONE {
            return;
        }
        if prev != NONE {
            self.leaf_mut(prev).next = next;
        }
        if next != NONE {
            self.leaf_mut(next).prev = prev;
        }
        let head = self.free_leaf;
        let unused = self.leaf_mut(leaf);
        unused.records = Vec::new();
        unused.is_linked = false;
        unused.parent = head;
        self.free_leaf = leaf;
        self.remove_child(parent, leaf);
    }

    fn remove_child(&mut self, parent: u32, child: u32) {
        let at = self.position(parent, child);
        let children = &mut self.inner_mut(parent).children;
        children.remove(at);
        let (len, first) = (children.len(), children.first().map(|child| child.first));
        let above = self.inner(parent).parent;
        match first {
            None => {
                self.free_inner(parent);
                // The root has at least two children, so an empty node has a parent.
                self.remove_child(above, parent);
            }
            Some(_) if above == NONE => self.lower_root(),
            Some(first) => {
                if at == 0 {
                    self.first_changed(parent, false, first);
                }
                if len < INNER_CHILDREN_LOW {
                    self.join_inner(parent);
                }
            }
        }
    }

    /// A root with one child is not needed.
    fn lower_root(&mut self) {
        while self.height > 0 && self.inner(self.root).children.len() == 1 {
            let old = self.root;
            let are_leaves = self.inner(old).is_lowest;
            self.root = self.inner(old).children[0].index;
            self.height -= 1;
            self.set_parent(self.root, NONE, are_leaves);
            self.free_inner(old);
        }
    }

    /// Joins a leaf that holds little with a sibling.
    fn join_leaf(&mut self, leaf: u32) {
        let parent = self.leaf(leaf).parent;
        if parent == NONE {
            return;
        }
        let len_of = |index: u32| self.leaf(index).records.len();
        let Some((left, right)) = self.pair(parent, leaf, len_of, LEAF_RECORDS_MAX) else {
            return;
        };
        let mut moved = std::mem::take(&mut self.leaf_mut(right).records);
        self.leaf_mut(left).records.append(&mut moved);
        self.remove_leaf(right);
    }

    fn join_inner(&mut self, inner: u32) {
        let parent = self.inner(inner).parent;
        if parent == NONE {
            return;
        }
        let len_of = |index: u32| self.inner(index).children.len();
        let Some((left, right)) = self.pair(parent, inner, len_of, INNER_CHILDREN_MAX) else {
            return;
        };
        let are_leaves = self.inner(right).is_lowest;
        let mut moved = std::mem::take(&mut self.inner_mut(right).children);
        for child in &moved {
            self.set_parent(child.index, left, are_leaves);
        }
        self.inner_mut(left).children.append(&mut moved);
        self.free_inner(right);
        self.remove_child(parent, right);
    }

    /// `node` and one of its siblings, in order, which together fill at most three quarters of a node.
    fn pair(
        &self,
        parent: u32,
        node: u32,
        len_of: impl Fn(u32) -> usize,
        len_max: usize,
    ) -> Option<(u32, u32)> {
        let children = &self.inner(parent).children;
        let at = self.position(parent, node);
        let next = children.get(at + 1).map(|child| (node, child.index));
        let prev = at.checked_sub(1).map(|before| (children[before].index, node));
        [next, prev]
            .into_iter()
            .flatten()
            .find(|(left, right)| len_of(*left) + len_of(*right) <= len_max / 4 * 3)
    }

    fn position(&self, parent: u32, child: u32) -> usize {
        self.inner(parent)
            .children
            .iter()
            .position(|other| other.index == child)
            .expect("a node's parent has it among its children")
    }

    pub(super) fn parent(&self, node: u32, is_leaf: bool) -> u32 {
        if is_leaf { self.leaf(node).parent } else { self.inner(node).parent }
    }

    fn set_parent(&mut self, node: u32, parent: u32, is_leaf: bool) {
        if is_leaf {
            self.leaf_mut(node).parent = parent;
        } else {
            self.inner_mut(node).parent = parent;
        }
    }

    fn first_below(&self, node: u32, is_leaf: bool) -> u64 {
        if is_leaf { self.leaf(node).records[0].start } else { self.inner(node).children[0].first }
    }

    fn new_leaf(&mut self) -> u32 {
        let leaf =
            Leaf { records: Vec::new(), parent: NONE, prev: NONE, next: NONE, is_linked: true };
        if self.free_leaf != NONE {
            let index = self.free_leaf;
            self.free_leaf = self.leaf(index).parent;
            *self.leaf_mut(index) = leaf;
            return index;
        }
        self.leaves.push(leaf);
        node_index(self.leaves.len())
    }

    fn new_inner(&mut self, is_lowest: bool) -> u32 {
        let inner = Inner { children: Vec::new(), parent: NONE, is_lowest };
        if self.free_inner != NONE {
            let index = self.free_inner;
            self.free_inner = self.inner(index).parent;
            *self.inner_mut(index) = inner;
            return index;
        }
        self.inners.push(inner);
        node_index(self.inners.len())
    }

    fn free_inner(&mut self, index: u32) {
        let head = self.free_inner;
        let unused = self.inner_mut(index);
        unused.children = Vec::new();
        unused.parent = head;
        self.free_inner = index;
    }
}

/// The index of the last of `len` nodes.
fn node_index(len: usize) -> u32 {
    u32::try_from(len - 1)
        .ok()
        .filter(|index| *index != NONE)
        .expect("four thousand million nodes do not fit into memory")
}
