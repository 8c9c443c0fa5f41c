//! Changing a tree: insert, update, resize and remove items, each block copied before its first
//! change in a transaction.
//!
//! An [`Editor`] holds its tree's writer lock. Its path is addresses and slots: every block on it
//! is dirty, so it can be changed where it lies. Full nodes are split on the way down, so that a
//! leaf that splits finds room above it.
//!
//! A [`Finger`] remembers the key range of a dirty leaf reached lately: a key in that range needs
//! no walk. Anything that changes which dirty leaf holds which keys forgets all fingers. The copying of a
//! clean block does not: no leaf below it was dirty.

use smallvec::SmallVec;
use ubtrfs_ondisk::block::{Block, ITEM_BYTES, LEVEL_COUNT_MAX, Leaf, NewBlock, Node};
use ubtrfs_ondisk::{Generation, Key, LogicalAddr};
use ubtrfs_rt::{Arc, RwLockWriteGuard};

use super::readahead::child_ptr;
use super::roots::Roots;
use super::store::BlockPtr;
use super::tree::{Tree, TreeState};
use crate::alloc::Allocator;
use crate::error::{Error, Result};

/// Leaves remembered for keys near the last ones: of two threads that make files each the end of a
/// directory, their last inodes, and some for names, which lie anywhere.
pub(super) const FINGER_COUNT: usize = 6;
/// Children that a leaf's split may add to its parent.
const SPLIT_CHILDREN_MAX: usize = 2;

/// A dirty leaf and the keys that belong to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finger {
    leaf: LogicalAddr,
    low: Key,
    /// First key that belongs to the next leaf.
    high: Option<Key>,
    /// The key last inserted through this finger: one right behind it is part of a run.
    last: Option<Key>,
    /// When it was of use last, by [`TreeState::finger_clock`].
    used: u64,
}

/// Blocks from root (first) to leaf (last), with the slot taken in each.
pub(super) type EditPath = SmallVec<[(LogicalAddr, usize); LEVEL_COUNT_MAX]>;

/// What a walk is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Insert,
    Change,
}

/// A tree locked for changes in the running transaction.
pub(crate) struct Editor<'a> {
    pub(super) tree: &'a Tree,
    pub(super) roots: &'a Roots,
    pub(super) state: RwLockWriteGuard<'a, TreeState>,
    pub(super) alloc: &'a Allocator,
    pub(super) generation: Generation,
}

impl<'a> Editor<'a> {
    /// Locks `tree`. The caller is in a transaction whose generation is `generation`.
    pub(crate) fn new(
        tree: &'a Tree,
        roots: &'a Roots,
        alloc: &'a Allocator,
        generation: Generation,
    ) -> Self {
        Self { tree, roots, state: tree.write(), alloc, generation }
    }

    /// Inserts an item of `len_bytes`, filled by `fill`.
    ///
    /// # Errors
    /// `Exists`, with nothing changed; `TooLong` for an item that no leaf holds; otherwise what
    /// stopped the copy of a block, after which the transaction must not commit.
    pub(crate) fn insert(
        &mut self,
        key: Key,
        len_bytes: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let mut last = None;
        if let Some(finger) = self.finger_for(&key) {
            last = finger.last.replace(key);
            let leaf = finger.leaf;
            let leaf = self.leaf_mut(leaf);
            if leaf.free_bytes() >= ITEM_BYTES + len_bytes {
                let slot = free_slot(leaf, &key)?;
                fill(leaf.insert(slot, key, len_bytes));
                return Ok(());
            }
        }
        self.check_fits(&key, len_bytes)?;
        let path = self.descend(&key, Purpose::Insert)?;
        let (addr, slot) = *path.last().expect("a path ends in a leaf");
        let leaf = self.leaf_mut(addr);
        if slot < leaf.len() && leaf.key(slot) == key {
            return Err(exists(&key));
        }
        if leaf.free_bytes() >= ITEM_BYTES + len_bytes {
            fill(leaf.insert(slot, key, len_bytes));
            return Ok(());
        }
        let is_run = slot > 0 && last == Some(leaf.key(slot - 1));
        let (addr, slot) = self.split_leaf(&path, key, len_bytes, is_run)?;
        fill(self.leaf_mut(addr).insert(slot, key, len_bytes));
        Ok(())
    }

    /// Changes the item's data in place. Returns what `change` returns.
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`Editor::insert`].
    pub(crate) fn update<T>(
        &mut self,
        key: &Key,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T> {
        let (addr, slot) = self.find(key)?;
        Ok(change(self.leaf_mut(addr).data_mut(slot)))
    }

    /// Gives the item other data, of any length.
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`Editor::insert`].
    pub(crate) fn replace(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        let (addr, slot) = self.find(key)?;
        let leaf = self.leaf_mut(addr);
        let growth = data.len().saturating_sub(leaf.data(slot).len());
        if growth <= leaf.free_bytes() {
            leaf.resize(slot, data.len()).copy_from_slice(data);
            return Ok(());
        }
        self.check_fits(key, data.len())?;
        self.remove(key)?;
        self.insert(*key, data.len(), |bytes| bytes.copy_from_slice(data))
    }

    /// Refuses an item that no leaf holds.
    fn check_fits(&self, key: &Key, have_bytes: usize) -> Result<()> {
        let max_bytes = self.leaf_capacity_bytes() - ITEM_BYTES;
        if have_bytes <= max_bytes {
            return Ok(());
        }
        Err(Error::TooLong { what: format!("item {key}"), have_bytes, max_bytes })
    }

    /// Removes the item.
    ///
    /// # Errors
    /// `NotFound`; otherwise as [`Editor::insert`].
    pub(crate) fn remove(&mut self, key: &Key) -> Result<()> {
        if let Some(leaf) = self.finger_leaf(key)
            && let Ok(slot) = leaf.search(key)
            && slot > 0
        {
            leaf.remove(slot..slot + 1);
            return Ok(());
        }
        let path = self.descend(key, Purpose::Change)?;
        let (addr, slot) = *path.last().expect("a path ends in a leaf");
        let leaf = self.leaf_mut(addr);
        if slot >= leaf.len() || leaf.key(slot) != *key {
            return Err(Error::not_found(format!("item {key} in tree {}", self.tree.id)));
        }
        leaf.remove(slot..slot + 1);
        self.after_removal(&path)
    }

    /// Copies the root block, if this transaction has not: the superblock's generation is also
    /// that of the root tree's root.
    ///
    /// # Errors
    /// As [`Editor::insert`].
    pub(crate) fn touch_root(&mut self) -> Result<()> {
        let ptr = self.state.root;
        if !self.state.is_dirty(&ptr) {
            self.state.root = self.cow(&ptr, None)?;
            self.forget_fingers();
        }
        Ok(())
    }

    /// The item's data, as the transaction sees it.
    ///
    /// # Errors
    /// A block on the way that is damaged or cannot be read.
    pub(crate) fn get<T>(&mut self, key: &Key, look: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
        if let Some(leaf) = self.finger_leaf(key) {
            return Ok(leaf.search(key).ok().map(|slot| look(leaf.data(slot))));
        }
        let leaf = self.leaf_for(key)?;
        let Block::Leaf(leaf) = &*leaf else { return Ok(None) };
        Ok(leaf.search(key).ok().map(|slot| look(leaf.data(slot))))
    }

    /// The last item whose key is not above `key`, if it lies in the leaf where `key` would.
    ///
    /// # Errors
    /// A block on the way that is damaged or cannot be read.
    pub(crate) fn at_or_before(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        let mut sought = *key;
        for _ in 0..2 {
            let block = self.leaf_for(&sought)?;
            let Block::Leaf(leaf) = &*block else { return Ok(None) };
            let slot = match leaf.search(&sought) {
                Ok(slot) => Some(slot),
                Err(slot) => slot.checked_sub(1),
            };
            if let Some(slot) = slot {
                return Ok(Some((leaf.key(slot), leaf.data(slot).to_vec())));
            }
            // The leaf's first key is above: the item before lies in another leaf, whose keys end
            // right below the first key of this one's range.
            let Some(before) = self.range_start(&sought)?.predecessor() else { return Ok(None) };
            sought = before;
        }
        Ok(None)
    }

    /// The first item whose key is not below `key`.
    ///
    /// # Errors
    /// A block on the way that is damaged or cannot be read.
    pub(crate) fn at_or_after(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        let mut sought = *key;
        loop {
            let (block, high) = self.leaf_and_end(&sought)?;
            let Block::Leaf(leaf) = &*block else { return Ok(None) };
            let (Ok(slot) | Err(slot)) = leaf.search(&sought);
            if slot < leaf.len() {
                return Ok(Some((leaf.key(slot), leaf.data(slot).to_vec())));
            }
            match high {
                Some(high) => sought = high,
                None => return Ok(None),
            }
        }
    }

    fn find(&mut self, key: &Key) -> Result<(LogicalAddr, usize)> {
        if let Some(addr) = self.finger_addr(key)
            && let Ok(slot) = self.leaf_mut(addr).search(key)
        {
            return Ok((addr, slot));
        }
        let path = self.descend(key, Purpose::Change)?;
        let (addr, slot) = *path.last().expect("a path ends in a leaf");
        let leaf = self.leaf_mut(addr);
        if slot < leaf.len() && leaf.key(slot) == *key {
            return Ok((addr, slot));
        }
        Err(Error::not_found(format!("item {key} in tree {}", self.tree.id)))
    }

    /// The leaf where `key` belongs, without copying anything.
    fn leaf_for(&self, key: &Key) -> Result<Arc<Block>> {
        Ok(self.leaf_and_end(key)?.0)
    }

    fn leaf_and_end(&self, key: &Key) -> Result<(Arc<Block>, Option<Key>)> {
        self.tree.store.note_search();
        let (mut block, mut high) = (self.load(&self.state.root, None)?, None);
        while let Block::Node(node) = &*block {
            let slot = node.slot_for(key);
            if slot + 1 < node.len() {
                high = Some(node.key(slot + 1));
            }
            let next = self.load(&child_ptr(node, slot), Some(node.key(slot)))?;
            block = next;
        }
        Ok((block, high))
    }

    /// First key of the leaf where `key` belongs, as the nodes above it say.
    fn range_start(&self, key: &Key) -> Result<Key> {
        self.tree.store.note_search();
        let (mut block, mut low) = (self.load(&self.state.root, None)?, Key::MIN);
        while let Block::Node(node) = &*block {
            let slot = node.slot_for(key);
            low = node.key(slot);
            let next = self.load(&child_ptr(node, slot), Some(low))?;
            block = next;
        }
        Ok(low)
    }

    pub(super) fn load(&self, ptr: &BlockPtr, first_key: Option<Key>) -> Result<Arc<Block>> {
        match self.state.block(ptr, first_key.as_ref(), &self.tree.store) {
            Some(block) => Ok(block),
            None => self.tree.store.read(ptr, self.tree.id, first_key),
        }
    }

    /// The finger whose leaf `key` belongs to, which is of use now.
    #[inline]
    fn finger_for(&mut self, key: &Key) -> Option<&mut Finger> {
        let used = self.state.tick_fingers();
        let finger = self
            .state
            .fingers
            .iter_mut()
            .flatten()
            .find(|finger| finger.low <= *key && finger.high.is_none_or(|high| *key < high))?;
        finger.used = used;
        Some(finger)
    }

    #[inline]
    fn finger_addr(&mut self, key: &Key) -> Option<LogicalAddr> {
        self.finger_for(key).map(|finger| finger.leaf)
    }

    #[inline]
    fn finger_leaf(&mut self, key: &Key) -> Option<&mut Leaf> {
        let addr = self.finger_addr(key)?;
        Some(self.leaf_mut(addr))
    }

    pub(super) fn forget_fingers(&mut self) {
        self.state.fingers = Default::default();
    }

    /// Walks to the leaf where `key` belongs, making every block on the way dirty.
    fn descend(&mut self, key: &Key, purpose: Purpose) -> Result<EditPath> {
        self.tree.store.note_search();
        let mut path = EditPath::new();
        let mut ptr = self.state.root;
        if !self.state.is_dirty(&ptr) {
            ptr = self.cow(&ptr, None)?;
            self.state.root = ptr;
        }
        let (mut low, mut high) = (Key::MIN, None);
        loop {
            let block = self.state.dirty.get_mut(&ptr.addr).expect("the path is dirty");
            let node = match Arc::make_mut(block) {
                Block::Leaf(leaf) => {
                    let (Ok(slot) | Err(slot)) = leaf.search(key);
                    path.push((ptr.addr, slot));
                    break;
                }
                Block::Node(node) => node,
            };
            if purpose == Purpose::Insert && node.len() + SPLIT_CHILDREN_MAX > node.capacity() {
                let (half, end) = self.split_node(&mut path, ptr, key)?;
                ptr = half;
                high = end.or(high);
                continue;
            }
            let slot = node.slot_for(key);
            let first_key = node.key(slot);
            low = first_key;
            let is_lowered = purpose == Purpose::Insert && *key < first_key;
            if slot + 1 < node.len() {
                high = Some(node.key(slot + 1));
            }
            let child = child_ptr(node, slot);
            path.push((ptr.addr, slot));
            if self.state.is_dirty(&child) {
                ptr = child;
            } else {
                ptr = self.cow(&child, Some(first_key))?;
                self.node_mut(path.last().expect("just pushed").0).set_child(
                    slot,
                    ptr.addr,
                    ptr.generation,
                );
            }
            if is_lowered {
                self.node_mut(path.last().expect("just pushed").0).set_key(slot, *key);
                low = *key;
            }
        }
        let known = self.state.fingers.iter().flatten().any(|finger| finger.leaf == ptr.addr);
        if !known {
            let used = self.state.tick_fingers();
            let oldest = self
                .state
                .fingers
                .iter_mut()
                .min_by_key(|finger| finger.as_ref().map_or(0, |finger| finger.used));
            let place = oldest.expect("there is room for some");
            *place = Some(Finger { leaf: ptr.addr, low, high, last: None, used });
        }
        Ok(path)
    }

    /// Copies a clean block to a new address and makes the copy dirty.
    pub(super) fn cow(&mut self, ptr: &BlockPtr, first_key: Option<Key>) -> Result<BlockPtr> {
        let block = self.load(ptr, first_key)?;
        let _sharing = self.tree.may_share(&block).then(|| self.alloc.lock_sharing());
        self.alloc.share_below(self.roots, self.tree, &block)?;
        let key = block.first_key().unwrap_or_default();
        let addr = self.alloc.allocate_block(self.tree.id, ptr.level, key)?;
        if !self.tree.may_share(&block) {
            // Only the last commit reaches it now, which nobody reads: its room is the copy's.
            self.tree.store.forget(ptr.addr);
        }
        let mut copy = Arc::unwrap_or_clone(block);
        copy.readdress(addr, self.generation, self.tree.id);
        self.state.dirty.insert(addr, Arc::new(copy));
        self.alloc.free_block(self.tree.id, ptr);
        Ok(BlockPtr { addr, generation: self.generation, level: ptr.level })
    }

    /// Allocates a block that has no forerunner.
    pub(super) fn new_block(&mut self, level: u8, first_key: Key) -> Result<NewBlock> {
        let bytenr = self.alloc.allocate_block(self.tree.id, level, first_key)?;
        self.state.bytes_used += self.tree.store.geometry().nodesize_bytes as u64;
        Ok(self.alloc.new_block(bytenr, self.generation, self.tree.id))
    }

    /// Gives a block back.
    pub(super) fn drop_block(&mut self, ptr: &BlockPtr) {
        if self.state.is_dirty(ptr) {
            self.state.dirty.remove(&ptr.addr);
        }
        let nodesize_bytes = self.tree.store.geometry().nodesize_bytes as u64;
        self.state.bytes_used = self.state.bytes_used.saturating_sub(nodesize_bytes);
        self.alloc.free_block(self.tree.id, ptr);
    }

    pub(super) fn leaf_capacity_bytes(&self) -> usize {
        self.tree.store.geometry().nodesize_bytes - ubtrfs_ondisk::block::HEADER_BYTES
    }

    #[inline]
    pub(super) fn leaf_mut(&mut self, addr: LogicalAddr) -> &mut Leaf {
        match self.dirty_mut(addr) {
            Block::Leaf(leaf) => leaf,
            Block::Node(_) => panic!("block {addr} is a leaf on this path"),
        }
    }

    #[inline]
    pub(super) fn node_mut(&mut self, addr: LogicalAddr) -> &mut Node {
        match self.dirty_mut(addr) {
            Block::Node(node) => node,
            Block::Leaf(_) => panic!("block {addr} is a node on this path"),
        }
    }

    #[inline]
    fn dirty_mut(&mut self, addr: LogicalAddr) -> &mut Block {
        Arc::make_mut(self.state.dirty.get_mut(&addr).expect("the path is dirty"))
    }

    /// After the leaf at the end of `path` lost items: its first key may have changed, it may be
    /// empty, or so small that it fits a neighbour.
    fn after_removal(&mut self, path: &EditPath) -> Result<()> {
        let (addr, _) = *path.last().expect("a path ends in a leaf");
        let leaf = self.leaf_mut(addr);
        let (count, used) = (leaf.len(), leaf.capacity_bytes() - leaf.free_bytes());
        if path.len() == 1 {
            return Ok(());
        }
        if count == 0 {
            return self.remove_child(&path[..path.len() - 1], addr, 0);
        }
        self.fix_first_keys(path);
        if used < self.leaf_capacity_bytes() / 4 {
            self.merge_leaf(path)?;
        }
        Ok(())
    }

    /// Makes the nodes above name the first key of the block at the end of `path`.
    pub(super) fn fix_first_keys(&mut self, path: &[(LogicalAddr, usize)]) {
        let (addr, _) = *path.last().expect("a path is not empty");
        let Some(key) = self.dirty_mut(addr).first_key() else { return };
        for (addr, slot) in path[..path.len() - 1].iter().rev() {
            let node = self.node_mut(*addr);
            if node.key(*slot) == key {
                return;
            }
            node.set_key(*slot, key);
            self.forget_fingers();
            if *slot > 0 {
                return;
            }
        }
    }

    /// Frees the block below the last node of `path` and every node that it leaves empty.
    pub(super) fn remove_child(
        &mut self,
        path: &[(LogicalAddr, usize)],
        child: LogicalAddr,
        child_level: u8,
    ) -> Result<()> {
        self.forget_fingers();
        self.drop_block(&BlockPtr { addr: child, generation: self.generation, level: child_level });
        let (addr, slot) = *path.last().expect("a child has a parent");
        let node = self.node_mut(addr);
        node.remove(slot);
        let (count, level) = (node.len(), node.header().level);
        if count == 0 {
            if path.len() > 1 {
                return self.remove_child(&path[..path.len() - 1], addr, level);
            }
            return self.empty_root();
        }
        if slot == 0 {
            self.fix_first_keys(path);
        }
        if path.len() == 1 && count == 1 {
            return self.collapse_root();
        }
        Ok(())
    }

    /// The last child of the root is gone: the root becomes an empty leaf.
    fn empty_root(&mut self) -> Result<()> {
        let old = self.state.root;
        let new = self.new_block(0, Key::MIN)?;
        self.state.dirty.insert(new.bytenr, Arc::new(Block::Leaf(Leaf::new(&new))));
        self.state.root = BlockPtr { addr: new.bytenr, generation: self.generation, level: 0 };
        self.drop_block(&old);
        Ok(())
    }

    /// A root with one child gives way to it.
    pub(super) fn collapse_root(&mut self) -> Result<()> {
        self.forget_fingers();
        loop {
            let old = self.state.root;
            let block = self.load(&old, None)?;
            let Block::Node(node) = &*block else { return Ok(()) };
            if node.len() > 1 {
                return Ok(());
            }
            let child = child_ptr(node, 0);
            // A root's generation is the transaction's: the child must be dirty to become one.
            let child = if self.state.is_dirty(&child) {
                child
            } else {
                self.cow(&child, Some(node.key(0)))?
            };
            self.state.root = child;
            self.drop_block(&old);
        }
    }
}

fn free_slot(leaf: &Leaf, key: &Key) -> Result<usize> {
    match leaf.search(key) {
        Ok(_) => Err(exists(key)),
        Err(slot) => Ok(slot),
    }
}

#[cold]
fn exists(key: &Key) -> Error {
    Error::Exists { what: format!("item {key}") }
}
