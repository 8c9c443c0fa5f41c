//! Walking a tree item by item, forward and backward.
//!
//! A cursor holds no lock between calls. It keeps its path's blocks, which do not change under it;
//! when the tree has changed since, the next step searches again from the key it stood at.

use ubtrfs_ondisk::Key;
use ubtrfs_ondisk::block::Block;
use ubtrfs_rt::Arc;

use super::readahead::{self, Readahead, child_ptr};
use super::tree::{Miss, Path, Tree, leaf_of};
use crate::error::Result;

/// An item's data, which stays as it was when found for as long as this lives.
#[derive(Clone, Debug)]
pub(crate) struct ItemBytes {
    block: Arc<Block>,
    slot: usize,
}

impl ItemBytes {
    pub(super) fn new(block: Arc<Block>, slot: usize) -> Self {
        Self { block, slot }
    }
}

impl std::ops::Deref for ItemBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        leaf_of(&self.block).data(self.slot)
    }
}

/// A place in a tree.
#[derive(Debug)]
pub(crate) struct Cursor {
    tree: Arc<Tree>,
    readahead: Readahead,
    /// Leaf first; empty before the first seek, and past either end.
    path: Path,
    version: u64,
}

impl Cursor {
    pub(super) fn new(tree: Arc<Tree>, readahead: Readahead) -> Self {
        Self { tree, readahead, path: Path::new(), version: 0 }
    }

    /// Goes to the first item whose key is not below `key`.
    ///
    /// # Errors
    /// A block on the way that is damaged or cannot be read. It is where it was, or past the end, then.
    pub(crate) fn seek(&mut self, key: &Key) -> Result<()> {
        loop {
            self.search(key)?;
            if !self.past_leaf() || self.next_leaf().inspect_err(|_| self.path.clear())? {
                return Ok(());
            }
        }
    }

    /// Goes to the last item whose key is not above `key`.
    ///
    /// # Errors
    /// A block on the way that is damaged or cannot be read. It is where it was, or past the end, then.
    pub(crate) fn seek_back(&mut self, key: &Key) -> Result<()> {
        let mut key = *key;
        loop {
            self.search(&key)?;
            let exact = matches!(self.peek(), Some((found, _)) if found == key);
            if exact || self.step_back().inspect_err(|_| self.path.clear())? {
                return Ok(());
            }
            let Some(before) = key.predecessor() else {
                self.path.clear();
                return Ok(());
            };
            key = before;
        }
    }

    /// Whether the tree is still as it was when the cursor came here.
    pub(crate) fn is_current(&self) -> bool {
        self.version == self.tree.version()
    }

    /// The blocks on the way here, with the slots taken, leaf first.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Which state of the tree the cursor came here in.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The item here, or `None` past either end.
    #[inline]
    pub(crate) fn current(&self) -> Result<Option<(Key, &[u8])>> {
        Ok(self.peek())
    }

    /// Goes to the next item.
    ///
    /// # Errors
    /// A block on the way that is damaged or cannot be read. It stays where it was then.
    #[inline]
    pub(crate) fn next(&mut self) -> Result<()> {
        let Some((key, _)) = self.peek() else { return Ok(()) };
        let stale = self.version != self.tree.version();
        if !stale && self.path[0].1 + 1 < self.path[0].0.len() {
            self.path[0].1 += 1;
            return Ok(());
        }
        self.or_stay(|cursor| cursor.leave_leaf(&key, stale))
    }

    fn leave_leaf(&mut self, key: &Key, stale: bool) -> Result<()> {
        match key.successor() {
            Some(next) if stale => self.seek(&next),
            Some(next) => {
                self.path[0].1 += 1;
                if self.next_leaf()? { Ok(()) } else { self.seek(&next) }
            }
            None => {
                self.path.clear();
                Ok(())
            }
        }
    }

    /// Goes to the item before.
    ///
    /// # Errors
    /// A block on the way that is damaged or cannot be read. It stays where it was then.
    pub(crate) fn prev(&mut self) -> Result<()> {
        let Some((key, _)) = self.peek() else { return Ok(()) };
        if self.is_current() && self.path[0].1 > 0 {
            self.path[0].1 -= 1;
            return Ok(());
        }
        self.or_stay(|cursor| cursor.go_back(&key))
    }

    /// Half a step would be taken for the end of the tree.
    fn or_stay(&mut self, step: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let (path, version) = (self.path.clone(), self.version);
        step(self).inspect_err(|_| (self.path, self.version) = (path, version))
    }

    fn go_back(&mut self, key: &Key) -> Result<()> {
        if self.version != self.tree.version() {
            self.search(key)?;
        }
        if self.step_back()? {
            return Ok(());
        }
        match key.predecessor() {
            Some(before) => self.seek_back(&before),
            None => {
                self.path.clear();
                Ok(())
            }
        }
    }

    #[inline]
    fn peek(&self) -> Option<(Key, &[u8])> {
        let (block, slot) = self.path.first()?;
        let leaf = leaf_of(block);
        (*slot < leaf.len()).then(|| (leaf.key(*slot), leaf.data(*slot)))
    }

    fn past_leaf(&self) -> bool {
        self.path.first().is_some_and(|(block, slot)| *slot >= block.len())
    }

    fn search(&mut self, key: &Key) -> Result<()> {
        if let Some(slot) = self.slot_near(key) {
            self.path[0].1 = slot;
            return Ok(());
        }
        (self.path, self.version) = self.tree.search(key)?;
        Ok(())
    }

    /// Where `key` is or would be, if that is between the items of the leaf that this is in.
    fn slot_near(&self, key: &Key) -> Option<usize> {
        let (block, _) = self.path.first()?;
        let leaf = leaf_of(block);
        let last = leaf.len().checked_sub(1)?;
        if !self.is_current() || *key < leaf.key(0) || *key > leaf.key(last) {
            return None;
        }
        let (Ok(slot) | Err(slot)) = leaf.search(key);
        Some(slot)
    }

    /// From a slot to the one before it. Returns false where the tree changed meanwhile: the path is
    /// void then.
    fn step_back(&mut self) -> Result<bool> {
        if self.path[0].1 > 0 {
            self.path[0].1 -= 1;
            return Ok(true);
        }
        let Some(level) = self.path.iter().skip(1).position(|(_, slot)| *slot > 0) else {
            self.path.clear();
            return Ok(true);
        };
        let level = level + 1;
        self.path[level].1 -= 1;
        self.descend(level, usize::MAX, Readahead::Back)
    }

    /// From the end of a leaf to the first item of the next. Returns false where the tree changed
    /// meanwhile: the path is void then.
    fn next_leaf(&mut self) -> Result<bool> {
        loop {
            let up = self.path.iter().skip(1).position(|(block, slot)| slot + 1 < block.len());
            let Some(level) = up.map(|up| up + 1) else {
                self.path.clear();
                return Ok(true);
            };
            self.path[level].1 += 1;
            if !self.descend(level, 0, self.readahead)? {
                return Ok(false);
            }
            if !self.past_leaf() {
                return Ok(true);
            }
        }
    }

    /// Fills the path below `level`, taking `slot` (or the last) in each block. Returns whether
    /// the tree stayed as it was; if not, the path is void.
    fn descend(&mut self, level: usize, slot: usize, mode: Readahead) -> Result<bool> {
        for below in (0..level).rev() {
            let (parent, parent_slot) = &self.path[below + 1];
            let Block::Node(node) = &**parent else { break };
            let ptr = child_ptr(node, *parent_slot);
            let miss = Miss { ptr, first_key: Some(node.key(*parent_slot)) };
            let mut loaded = None;
            let block = loop {
                let found = {
                    let state = self.tree.read();
                    if self.tree.version() != self.version {
                        return Ok(false);
                    }
                    state.block(&ptr, miss.first_key.as_ref(), &self.tree.store).or(loaded)
                };
                if let Some(block) = found {
                    if mode == Readahead::ForwardAlways {
                        readahead::around(&self.tree, parent, *parent_slot, mode);
                    }
                    break block;
                }
                readahead::around(&self.tree, parent, *parent_slot, mode);
                loaded = self.tree.load(&miss, self.version)?;
            };
            if below == 0 && mode == Readahead::Beside {
                readahead::ask_beside(&self.tree, node, *parent_slot);
            }
            let last = block.len().saturating_sub(1);
            self.path[below] = (block, slot.min(last));
        }
        Ok(true)
    }
}
