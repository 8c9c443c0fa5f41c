//! Dropping a deleted tree: every reference that it has is taken back, and what is left without
//! one is freed.
//!
//! The tree's blocks are not changed. The walk goes from the first leaf on; a block goes after all
//! below it. How far it came is kept in the root item, as Linux keeps it: the key and the level of
//! the next child to go, everything before it gone, so that a crash, or Linux, can go on from there.
//!
//! What others share stays. If the tree that goes owns it, it is handed over first, from the leaves up. A leaf that is marked
//! FULL_BACKREF has nothing of the owner's below it, so that a walk that was cut off finds again what is still to be done. A marked node
//! may have: Linux marks from the root down, and a balance moves nodes, which are marked then, and leaves the leaves below where they are.

use ubtrfs_ondisk::block::{Block, Node};
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::{Generation, Key, LogicalAddr, RootId};
use ubtrfs_rt::Arc;

use crate::alloc::share::{Below, data_below};
use crate::btree::BlockPtr;
use crate::data::drop_range::{self, Kept};
use crate::error::Result;
use crate::txn::{Core, Handle};

/// A walk that drops a tree.
pub(super) struct DropTree {
    root: RootId,
    root_key: Key,
    /// Blocks up to this generation were there before the tree: others own them.
    born: Generation,
    /// From the root on; empty when all is done.
    way: Vec<Step>,
    /// The root, where it is a leaf.
    root_leaf: Option<BlockPtr>,
    /// Up to this key all that others share was handed over: a walk that goes on does not look for it again.
    handed_over: Key,
}

/// A node on the way, which nobody shares, and the next child to go.
struct Step {
    ptr: BlockPtr,
    block: Arc<Block>,
    slot: usize,
    /// Whose references the children carry.
    below: Below,
}

impl Step {
    fn node(&self) -> &Node {
        match &*self.block {
            Block::Node(node) => node,
            Block::Leaf(_) => unreachable_leaf(),
        }
    }

    fn child(&self) -> Option<(BlockPtr, Key)> {
        let (node, slot) = (self.node(), self.slot);
        (slot < node.len()).then(|| {
            let ptr = BlockPtr {
                addr: node.child(slot),
                generation: node.child_generation(slot),
                level: self.ptr.level - 1,
            };
            (ptr, node.key(slot))
        })
    }
}

#[cold]
fn unreachable_leaf() -> ! {
    panic!("only nodes are put on the way")
}

impl DropTree {
    /// Begins, or goes on, with the tree of a root item.
    ///
    /// # Errors
    /// A damaged block on the way.
    pub(super) fn begin(core: &Core, root: RootId, key: Key, item: &RootItem) -> Result<Self> {
        let ptr = BlockPtr {
            addr: LogicalAddr(item.bytenr.get()),
            generation: Generation(item.generation.get()),
            level: item.level,
        };
        let mut this = Self {
            root,
            root_key: key,
            born: Generation(key.offset),
            way: Vec::new(),
            root_leaf: None,
            handed_over: Key::MIN,
        };
        if ptr.level == 0 {
            this.root_leaf = Some(ptr);
            return Ok(this);
        }
        let (progress, level) = (item.drop_progress.key(), item.drop_level);
        let mut next = Some((ptr, None));
        while let Some((ptr, first_key)) = next.take() {
            let mut step = this.enter(core, ptr, first_key)?;
            if level > 0 {
                step.slot = step.node().slot_for(&progress);
                if ptr.level > level.max(1) {
                    next = step.child().map(|(ptr, key)| (ptr, Some(key)));
                }
            }
            this.way.push(step);
        }
        Ok(this)
    }

    fn enter(&self, core: &Core, ptr: BlockPtr, first_key: Option<Key>) -> Result<Step> {
        let refs = core.alloc.block_refs(&core.roots, ptr.addr, ptr.level)?;
        let block = core.roots.store.read(&ptr, self.root, first_key)?;
        let below = match refs.is_full_backref {
            true => Below::Block(ptr.addr),
            false => Below::Tree(self.root),
        };
        Ok(Step { ptr, block, slot: 0, below })
    }

    /// The key of its root item.
    pub(super) fn root_key(&self) -> Key {
        self.root_key
    }

    /// Where it is, the key and level that the root item is to say: all before that is gone.
    pub(super) fn place(&self) -> Option<(Key, u8)> {
        let step = self.way.last()?;
        step.child().map(|(_, key)| (key, step.ptr.level))
    }

    /// Takes back about `count` references. Returns where it stopped, as [`DropTree::place`] does; `None` when all is done.
    ///
    /// # Errors
    /// A block that is damaged or cannot be read: what came before it is done, and no part of it, so that the transaction may commit. Where a part
    /// was done it is aborted.
    pub(super) fn step(
        &mut self,
        handle: &mut Handle<'_>,
        kept: Kept<'_>,
        count: usize,
    ) -> Result<Option<(Key, u8)>> {
        let mut budget = count;
        if let Some(ptr) = self.root_leaf {
            self.drop_leaf(handle, kept, &ptr, None, Below::Tree(self.root), &mut budget)?;
            self.root_leaf = None;
        }
        loop {
            let Some(step) = self.way.last() else { return Ok(None) };
            let Some((child, key)) = step.child() else {
                self.leave(handle.core());
                continue;
            };
            if budget == 0 {
                return Ok(Some((key, step.ptr.level)));
            }
            let below = step.below;
            if self.drop_child(handle, kept, child, key, below, &mut budget)? {
                self.way.last_mut().expect("it is still there").slot += 1;
            }
        }
    }

    /// Drops the last node on the way, below which nothing is left.
    fn leave(&mut self, core: &Core) {
        let Some(step) = self.way.pop() else { return };
        let reference = match self.way.last_mut() {
            Some(parent) => {
                parent.slot += 1;
                parent.below.of_block()
            }
            None => Below::Tree(self.root).of_block(),
        };
        core.alloc.drop_block_ref(&step.ptr, reference);
    }

    /// Returns whether the child is done with; else it is on the way now, or the budget is at its
    /// end.
    fn drop_child(
        &mut self,
        handle: &mut Handle<'_>,
        kept: Kept<'_>,
        child: BlockPtr,
        key: Key,
        below: Below,
        budget: &mut usize,
    ) -> Result<bool> {
        let core = handle.core();
        let sharing = core.alloc.lock_sharing();
        let refs = core.alloc.block_refs(&core.roots, child.addr, child.level)?;
        if refs.count > 1 {
            if !self.hand_over(core, child, key, refs.is_full_backref, budget)? {
                return Ok(false);
            }
            core.alloc.drop_block_ref(&child, below.of_block());
            *budget = budget.saturating_sub(1);
            return Ok(true);
        }
        // Nobody else has a reference, and nobody can get one.
        drop(sharing);
        if child.level == 0 {
            self.drop_leaf(handle, kept, &child, Some(key), below, budget)?;
            return Ok(true);
        }
        let step = self.enter(core, child, Some(key))?;
        self.way.push(step);
        Ok(false)
    }

    /// Drops a leaf that nobody shares, and its references to data.
    fn drop_leaf(
        &self,
        handle: &mut Handle<'_>,
        kept: Kept<'_>,
        ptr: &BlockPtr,
        first_key: Option<Key>,
        below: Below,
        budget: &mut usize,
    ) -> Result<()> {
        let step = self.enter(handle.core(), *ptr, first_key)?;
        let data = data_below(&step.block, self.root)?;
        *budget = budget.saturating_sub(1 + data.len());
        for data in data {
            let reference = step.below.of_data(data.inode, data.offset);
            let (start, len) = (data.start, data.len_bytes);
            if handle.core().alloc.drop_data_ref(start, len, reference) {
                let forgotten = drop_range::forget(handle, start, len, kept);
                forgotten.map_err(|error| handle.abort(error))?;
            }
        }
        handle.core().alloc.drop_block_ref(ptr, below.of_block());
        Ok(())
    }

    /// Hands what this tree owns of a shared block and all below it over to those who share it; the block itself is that already where
    /// it is marked FULL_BACKREF. Returns false if the budget ended before all was done.
    fn hand_over(
        &mut self,
        core: &Core,
        ptr: BlockPtr,
        first_key: Key,
        is_marked: bool,
        budget: &mut usize,
    ) -> Result<bool> {
        if ptr.generation <= self.born || (ptr.level == 0 && is_marked) {
            return Ok(true);
        }
        if *budget == 0 {
            return Ok(false);
        }
        let block = core.roots.store.read(&ptr, self.root, Some(first_key))?;
        if block.owner() != self.root {
            return Ok(true);
        }
        if let Block::Node(node) = &*block {
            for slot in 0..node.len() {
                let next = (slot + 1 < node.len()).then(|| node.key(slot + 1));
                if next.is_some_and(|next| next <= self.handed_over) {
                    continue;
                }
                let child = BlockPtr {
                    addr: node.child(slot),
                    generation: node.child_generation(slot),
                    level: ptr.level - 1,
                };
                if child.generation > self.born {
                    let refs = core.alloc.block_refs(&core.roots, child.addr, child.level)?;
                    let is_marked = refs.is_full_backref;
                    if !self.hand_over(core, child, node.key(slot), is_marked, budget)? {
                        return Ok(false);
                    }
                }
                self.handed_over = next.unwrap_or(self.handed_over);
            }
        }
        if is_marked {
            return Ok(true);
        }
        core.alloc.hand_over(&block)?;
        *budget = budget.saturating_sub(
            match &*block {
                Block::Node(node) => 2 * node.len(),
                Block::Leaf(_) => 2 * data_below(&block, self.root)?.len(),
            } + 1,
        );
        Ok(true)
    }
}
