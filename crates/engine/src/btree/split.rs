//! Splitting what is full and merging what is nearly empty.

use ubtrfs_ondisk::block::{Block, ITEM_BYTES, LEVEL_COUNT_MAX, Leaf, Node};
use ubtrfs_ondisk::{Key, LogicalAddr};
use ubtrfs_rt::Arc;

use super::edit::{EditPath, Editor};
use super::readahead::child_ptr;
use super::store::BlockPtr;
use crate::error::{Error, Result};

impl Editor<'_> {
    /// Splits the full node at `ptr`, below the nodes in `path`, all of which have room. Returns
    /// the half that `key` belongs to, and where that ends if it is the left one.
    pub(super) fn split_node(
        &mut self,
        path: &mut EditPath,
        ptr: BlockPtr,
        key: &Key,
    ) -> Result<(BlockPtr, Option<Key>)> {
        self.forget_fingers();
        if path.is_empty() {
            self.grow_root(ptr)?;
            let root = self.state.root.addr;
            path.push((root, 0));
            if *key < self.node_mut(root).key(0) {
                self.node_mut(root).set_key(0, *key);
            }
        }
        let node = self.node_mut(ptr.addr);
        let count = node.len();
        // Keys that arrive in order leave the left half full.
        let at = if node.key(count - 1) < *key { count - 1 } else { count / 2 };
        let right_key = node.key(at);
        let new = self.new_block(ptr.level, right_key)?;
        let mut right = Node::new(&new, ptr.level);
        self.node_mut(ptr.addr).move_tail_to(at, &mut right);
        self.state.dirty.insert(new.bytenr, Arc::new(Block::Node(right)));
        let (parent, slot) = path.last_mut().expect("a split node has a parent");
        let parent_slot = *slot;
        if *key >= right_key {
            *slot += 1;
        }
        let parent = *parent;
        let generation = self.generation;
        self.node_mut(parent).insert(parent_slot + 1, right_key, new.bytenr, generation);
        Ok(if *key >= right_key {
            (BlockPtr { addr: new.bytenr, generation: self.generation, level: ptr.level }, None)
        } else {
            (ptr, Some(right_key))
        })
    }

    /// Puts a node above the root, with the old root as its only child.
    fn grow_root(&mut self, old: BlockPtr) -> Result<()> {
        if usize::from(old.level) + 1 >= LEVEL_COUNT_MAX {
            return Err(Error::Limit { what: format!("levels of tree {}", self.tree.id) });
        }
        let key = self.load(&old, None)?.first_key().unwrap_or_default();
        let new = self.new_block(old.level + 1, key)?;
        let mut root = Node::new(&new, old.level + 1);
        root.insert(0, key, old.addr, old.generation);
        self.state.dirty.insert(new.bytenr, Arc::new(Block::Node(root)));
        self.state.root =
            BlockPtr { addr: new.bytenr, generation: self.generation, level: old.level + 1 };
        Ok(())
    }

    /// Splits the leaf at the end of `path` so that an item of `len_bytes` fits at the path's
    /// slot. Where the item goes on a run of inserts (`is_run`), the run so far stays in a full
    /// leaf. Returns the leaf and slot for it.
    pub(super) fn split_leaf(
        &mut self,
        path: &EditPath,
        key: Key,
        len_bytes: usize,
        is_run: bool,
    ) -> Result<(LogicalAddr, usize)> {
        self.forget_fingers();
        let mut path = path.clone();
        let (addr, slot) = path.pop().expect("a path ends in a leaf");
        if path.is_empty() {
            let old = self.state.root;
            self.grow_root(old)?;
            path.push((self.state.root.addr, 0));
            if slot == 0 {
                self.node_mut(self.state.root.addr).set_key(0, key);
            }
        }
        let need = ITEM_BYTES + len_bytes;
        let leaf = self.leaf_mut(addr);
        let count = leaf.len();
        if slot == count {
            // Keys that arrive in order leave full leaves behind.
            let right = self.add_leaf(&path, key)?;
            return Ok((right, 0));
        }
        if is_run && leaf.used_bytes(slot..count) + need <= leaf.capacity_bytes() {
            let right = self.add_leaf(&path, key)?;
            self.move_items(addr, slot, right);
            return Ok((right, 0));
        }
        let leaf = self.leaf_mut(addr);
        match split_point(leaf, slot, need) {
            Some(at) => {
                let right_key = leaf.key(at);
                let right = self.add_leaf(&path, right_key)?;
                self.move_items(addr, at, right);
                Ok(if slot > at { (right, slot - at) } else { (addr, slot) })
            }
            None => {
                // The item is so large that it needs a leaf of its own between the two halves.
                let tail_key = leaf.key(slot);
                let tail = self.add_leaf(&path, tail_key)?;
                self.move_items(addr, slot, tail);
                if slot == 0 {
                    return Ok((addr, 0));
                }
                let leaf = self.leaf_mut(addr);
                if leaf.free_bytes() >= need {
                    return Ok((addr, slot));
                }
                let middle = self.add_leaf(&path, key)?;
                Ok((middle, 0))
            }
        }
    }

    fn move_items(&mut self, from: LogicalAddr, at: usize, to: LogicalAddr) {
        let mut block = self.state.dirty.remove(&to).expect("just added");
        if let Block::Leaf(right) = Arc::make_mut(&mut block) {
            self.leaf_mut(from).move_tail_to(at, right);
        }
        self.state.dirty.insert(to, block);
    }

    /// Adds an empty leaf whose first key will be `key`, right behind the path's.
    fn add_leaf(&mut self, path: &EditPath, key: Key) -> Result<LogicalAddr> {
        let new = self.new_block(0, key)?;
        self.state.dirty.insert(new.bytenr, Arc::new(Block::Leaf(Leaf::new(&new))));
        let (parent, slot) = *path.last().expect("a leaf that splits has a parent");
        let generation = self.generation;
        self.node_mut(parent).insert(slot + 1, key, new.bytenr, generation);
        Ok(new.bytenr)
    }

    /// Merges the small leaf at the end of `path` with a neighbour, if the two leave an eighth of one leaf free: of a leaf that
    /// was merged full, the next insertion would make two again.
    pub(super) fn merge_leaf(&mut self, path: &EditPath) -> Result<()> {
        let (addr, _) = *path.last().expect("a path ends in a leaf");
        let (parent, slot) = path[path.len() - 2];
        let used_bytes = |leaf: &Leaf| leaf.capacity_bytes() - leaf.free_bytes();
        let used = used_bytes(self.leaf_mut(addr));
        let merged_max = self.leaf_capacity_bytes() / 8 * 7;
        let node = self.node_mut(parent);
        let right =
            (slot + 1 < node.len()).then(|| (child_ptr(node, slot + 1), node.key(slot + 1)));
        let left = slot.checked_sub(1).map(|slot| (child_ptr(node, slot), node.key(slot)));
        if let Some((mut ptr, key)) = right {
            let mut block = Block::clone(&*self.load(&ptr, Some(key))?);
            if let Block::Leaf(neighbour) = &mut block
                && used_bytes(neighbour) + used <= merged_max
            {
                let count = neighbour.len();
                neighbour.move_head_to(count, self.leaf_mut(addr));
                if !self.state.is_dirty(&ptr) && self.tree.may_share(&block) {
                    // What the items refer to must carry this tree's references where they go.
                    ptr = self.cow(&ptr, Some(key))?;
                    self.node_mut(parent).set_child(slot + 1, ptr.addr, ptr.generation);
                }
                let mut above: EditPath = path[..path.len() - 1].into();
                above.last_mut().expect("a parent").1 = slot + 1;
                return self.remove_clean_child(&above, &ptr);
            }
        }
        if let Some((ptr, key)) = left {
            let block = self.load(&ptr, Some(key))?;
            let Block::Leaf(neighbour) = &*block else { return Ok(()) };
            if used_bytes(neighbour) + used > merged_max {
                return Ok(());
            }
            drop(block);
            let target = if self.state.is_dirty(&ptr) {
                ptr.addr
            } else {
                let copy = self.cow(&ptr, Some(key))?;
                self.node_mut(parent).set_child(slot - 1, copy.addr, copy.generation);
                copy.addr
            };
            let mut block = self.state.dirty.remove(&addr).expect("the path is dirty");
            if let Block::Leaf(leaf) = Arc::make_mut(&mut block) {
                let count = leaf.len();
                leaf.move_head_to(count, self.leaf_mut(target));
            }
            self.state.dirty.insert(addr, block);
            return self.remove_child(&path[..path.len() - 1], addr, 0);
        }
        Ok(())
    }

    /// As [`Editor::remove_child`], for a child that may never have been copied.
    fn remove_clean_child(&mut self, path: &EditPath, child: &BlockPtr) -> Result<()> {
        self.forget_fingers();
        self.drop_block(child);
        let (parent, slot) = *path.last().expect("a child has a parent");
        let node = self.node_mut(parent);
        node.remove(slot);
        if path.len() == 1 && node.len() == 1 {
            return self.collapse_root();
        }
        Ok(())
    }
}

/// Where to split `leaf` so that `need` more bytes fit at `slot`, the halves as even as can be:
/// items from there on go right; the new item goes left if `slot` is not above it.
fn split_point(leaf: &Leaf, slot: usize, need: usize) -> Option<usize> {
    let capacity = leaf.capacity_bytes();
    let count = leaf.len();
    let total = leaf.used_bytes(0..count) + need;
    let mut best: Option<(usize, usize)> = None;
    let mut left_items = 0;
    for at in 1..count {
        left_items += leaf.used_bytes(at - 1..at);
        let left = if slot <= at { left_items + need } else { left_items };
        let right = total - left;
        if left <= capacity && right <= capacity {
            let larger = left.max(right);
            if best.is_none_or(|(_, size)| larger < size) {
                best = Some((at, larger));
            }
        }
    }
    best.map(|(at, _)| at)
}
