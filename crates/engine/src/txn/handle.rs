//! A handle: the right to change trees in the running transaction.

use ubtrfs_ondisk::block::{Block, Leaf};
use ubtrfs_ondisk::features::{CompatRo, Incompat};
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::superblock::Superblock;
use ubtrfs_ondisk::{Generation, Key, KeyType, RootId};
use ubtrfs_rt::{Arc, Ordering, Time};
use zerocopy::IntoBytes;

use super::{Core, Reservation};
use crate::alloc::share::Below;
use crate::btree::{Editor, Tree};
use crate::error::{Error, Result};

/// An open handle. While it lives, the transaction does not commit.
#[derive(Debug)]
pub(crate) struct Handle<'a> {
    core: &'a Core,
    generation: Generation,
    reserved_bytes: u64,
    /// The commit's own handle is not counted.
    is_counted: bool,
    /// No other can be open.
    is_alone: bool,
    /// The tree of the last edit, so that a run of edits in one tree finds it once.
    last_tree: Option<Arc<Tree>>,
}

impl<'a> Handle<'a> {
    pub(super) fn new(core: &'a Core, generation: Generation) -> Self {
        Self {
            core,
            generation,
            reserved_bytes: 0,
            is_counted: true,
            is_alone: false,
            last_tree: None,
        }
    }

    /// The handle with which the commit flushes what was held back.
    pub(super) fn of_commit(core: &'a Core, generation: Generation) -> Self {
        let mut handle = Self::new(core, generation);
        handle.is_counted = false;
        handle
    }

    pub(super) fn alone(mut self) -> Self {
        self.is_alone = true;
        self
    }

    /// Others may be opened again.
    pub(super) fn beside_others(mut self) -> Self {
        self.is_alone = false;
        self.core.open_gate();
        self
    }

    #[cfg(test)]
    pub(super) fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }

    pub(super) fn with_reserved(mut self, bytes: u64) -> Self {
        self.reserved_bytes = bytes;
        self
    }

    /// Takes more than what it was opened for: of an operation whose worst case is known under the handle only.
    ///
    /// # Errors
    /// `NoSpace`, although a commit might free what is missing; what stops the loading of space.
    pub(crate) fn reserve_more(&mut self, reservation: Reservation) -> Result<()> {
        self.reserved_bytes += self.core.reserve_more(reservation)?;
        Ok(())
    }

    /// What the whole filesystem shares.
    pub(crate) fn core(&self) -> &'a Core {
        self.core
    }

    /// The running transaction.
    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    /// The time now.
    pub(crate) fn now(&self) -> Time {
        self.core.runtime.clock.now()
    }

    /// Locks a tree for several edits in a row.
    ///
    /// # Errors
    /// `NotFound` when there is no such tree.
    pub(crate) fn edit<T>(
        &mut self,
        root: RootId,
        edit: impl FnOnce(&mut Editor<'_>) -> Result<T>,
    ) -> Result<T> {
        let tree = match &self.last_tree {
            Some(tree) if tree.id == root => Arc::clone(tree),
            _ => self.core.roots.tree(root)?,
        };
        let result = {
            let mut editor =
                Editor::new(&tree, &self.core.roots, &self.core.alloc, self.generation);
            edit(&mut editor)
        };
        self.last_tree = Some(tree);
        self.guard(result)
    }

    /// Inserts an item.
    ///
    /// # Errors
    /// `Exists`, `TooLong`, with nothing changed; anything else aborts the transaction.
    pub(crate) fn insert(&mut self, root: RootId, key: Key, data: &[u8]) -> Result<()> {
        self.edit(root, |editor| {
            editor.insert(key, data.len(), |bytes| bytes.copy_from_slice(data))
        })
    }

    /// Inserts an item that `fill` writes in place.
    ///
    /// # Errors
    /// As [`Handle::insert`].
    pub(crate) fn insert_with(
        &mut self,
        root: RootId,
        key: Key,
        len_bytes: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        self.edit(root, |editor| editor.insert(key, len_bytes, fill))
    }

    /// Changes an item in place.
    ///
    /// # Errors
    /// `NotFound`, with nothing changed; anything else aborts the transaction.
    pub(crate) fn update<T>(
        &mut self,
        root: RootId,
        key: Key,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T> {
        self.edit(root, |editor| editor.update(&key, change))
    }

    /// Gives an item other data, of any length.
    ///
    /// # Errors
    /// `NotFound`, with nothing changed; anything else aborts the transaction.
    pub(crate) fn replace(&mut self, root: RootId, key: Key, data: &[u8]) -> Result<()> {
        self.edit(root, |editor| editor.replace(&key, data))
    }

    /// Removes an item.
    ///
    /// # Errors
    /// `NotFound`, with nothing changed; anything else aborts the transaction.
    pub(crate) fn remove(&mut self, root: RootId, key: Key) -> Result<()> {
        self.edit(root, |editor| editor.remove(&key))
    }

    /// Makes an empty tree and enters its root item, whose place, level and generation are set
    /// here.
    ///
    /// # Errors
    /// Any aborts the transaction.
    pub(crate) fn create_tree(&mut self, root: RootId, item: &RootItem) -> Result<Arc<Tree>> {
        let alloc = &self.core.alloc;
        let result = alloc.allocate_block(root, 0, Key::MIN);
        let addr = self.guard(result)?;
        let leaf = Leaf::new(&alloc.new_block(addr, self.generation, root));
        let tree = Tree::new_empty(root, Arc::clone(&self.core.roots.store), leaf);
        let tree = self.core.roots.insert(tree);
        let nodesize_bytes = self.core.roots.store.geometry().nodesize_bytes as u64;
        let item = RootItem {
            bytenr: addr.0.into(),
            level: 0,
            generation: self.generation.0.into(),
            generation_v2: self.generation.0.into(),
            bytes_used: nodesize_bytes.into(),
            ..*item
        };
        let key = Key::new(root.object_id(), KeyType::ROOT_ITEM, 0);
        self.insert(RootId::ROOT_TREE, key, item.as_bytes()).map_err(|error| self.abort(error))?;
        Ok(tree)
    }

    /// Makes a tree that shares all below the root block of `source`, whose dirty blocks are
    /// written now, and enters its root item, whose place, level and generation are set here.
    ///
    /// The handle must be the only one. What it costs beyond writing what is dirty does not grow
    /// with the tree.
    ///
    /// # Errors
    /// As [`Handle::insert`]; a failed write aborts the transaction.
    pub(crate) fn copy_tree(
        &mut self,
        source: &Tree,
        root: RootId,
        root_item: impl FnOnce(&mut RootItem),
    ) -> Result<Arc<Tree>> {
        let result = self.copy_tree_unguarded(source, root, root_item);
        result.map_err(|error| self.abort(error))
    }

    fn copy_tree_unguarded(
        &mut self,
        source: &Tree,
        root: RootId,
        change_item: impl FnOnce(&mut RootItem),
    ) -> Result<Arc<Tree>> {
        let core = self.core;
        let (ptr, bytes_used) = {
            let mut state = source.write();
            core.write_early(&mut state)?;
            source.set_last_snapshot(self.generation);
            core.roots.set_snapshots();
            (state.root, state.bytes_used)
        };
        let block = core.roots.store.read(&ptr, source.id, None)?;
        let first_key = block.first_key().unwrap_or_default();
        let addr = core.alloc.allocate_block(root, ptr.level, first_key)?;
        let mut copy = Block::clone(&block);
        copy.readdress(addr, self.generation, root);
        core.alloc.change_below(&copy, Below::Tree(root), 1)?;

        let generation = self.generation;
        let item =
            self.change_root_item(source.id, |item| item.last_snapshot = generation.0.into())?;
        let mut item = RootItem {
            bytenr: addr.0.into(),
            level: ptr.level,
            generation: self.generation.0.into(),
            generation_v2: self.generation.0.into(),
            bytes_used: bytes_used.into(),
            ..item
        };
        change_item(&mut item);
        // Who drops the tree takes blocks up to the key's offset for older than the tree, and others'.
        // Linux makes snapshots at the end of a transaction; here the tree may have blocks of its
        // own of this transaction before it ends.
        let key = Key::new(root.object_id(), KeyType::ROOT_ITEM, self.generation.0 - 1);
        let tree = Tree::new_copy(root, Arc::clone(&core.roots.store), copy).with_root_item(
            key,
            bytes_used,
            self.generation,
        );
        // Before its item: who found that first would read the tree from it, which is not there yet.
        let tree = core.roots.insert(tree);
        self.insert(RootId::ROOT_TREE, key, item.as_bytes())?;
        Ok(tree)
    }

    /// Writes what is dirty of a tree, so that [`Handle::copy_tree`] has little to write.
    ///
    /// # Errors
    /// A failed write aborts the transaction.
    pub(crate) fn write_early(&mut self, tree: &Tree) -> Result<()> {
        self.core.write_early(&mut tree.write()).map_err(|error| self.abort(error))
    }

    /// Writes what is dirty of a tree, brings its root item up to date and forgets the tree: nobody
    /// finds it any more that looks for it by its number. The handle must be the only one.
    ///
    /// # Errors
    /// A failed write; the transaction must then not commit.
    pub(crate) fn close_tree(&mut self, root: RootId) -> Result<()> {
        let tree = self.core.roots.tree(root)?;
        self.core.write_early(&mut tree.write())?;
        self.core.record_root(&tree, self.generation)?;
        self.core.roots.forget(root);
        self.last_tree = None;
        Ok(())
    }

    /// Changes a root item, and returns it as it is then.
    ///
    /// # Errors
    /// `NotFound`; anything else aborts the transaction.
    pub(crate) fn change_root_item(
        &mut self,
        root: RootId,
        change: impl FnOnce(&mut RootItem),
    ) -> Result<RootItem> {
        let found = self.core.roots.root_item(root)?;
        let (key, mut item) = found.ok_or_else(|| Error::not_found(format!("tree {root}")))?;
        change(&mut item);
        // Without this, what a shorter, old item leaves at zero would not count.
        item.generation_v2 = item.generation;
        self.replace(RootId::ROOT_TREE, key, item.as_bytes())?;
        Ok(item)
    }

    /// Sets feature bits that follow from what is being written.
    pub(crate) fn set_incompat(&mut self, bits: Incompat) {
        let mut superblock = self.core.superblock.lock();
        superblock.incompat_flags = (superblock.incompat_flags.get() | bits.0).into();
    }

    /// Sets feature bits that a writer must know.
    pub(crate) fn set_compat_ro(&mut self, bits: CompatRo) {
        let mut superblock = self.core.superblock.lock();
        superblock.compat_ro_flags = (superblock.compat_ro_flags.get() | bits.0).into();
    }

    /// Changes the superblock that the commit writes.
    pub(crate) fn change_superblock(&mut self, change: impl FnOnce(&mut Superblock)) {
        change(&mut self.core.superblock.lock());
        self.core.has_new_superblock.store(true, Ordering::Relaxed);
    }

    /// Aborts the transaction, as an operation that failed half way must.
    pub(crate) fn abort(&self, cause: Error) -> Error {
        self.core.abort(cause)
    }

    /// Lets through what changed nothing; anything else aborts the transaction.
    fn guard<T>(&self, result: Result<T>) -> Result<T> {
        match result {
            Err(
                error @ (Error::Exists { .. }
                | Error::NotFound { .. }
                | Error::TooLong { .. }
                | Error::InvalidArgument { .. }
                | Error::Aborted { .. }),
            ) => Err(error),
            Err(error) => {
                self.core.abort(error.clone());
                Err(error)
            }
            Ok(value) => Ok(value),
        }
    }
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Who knows what half of its operation it has done.
            self.core.abort(Error::Limit { what: "an operation that panicked".to_owned() });
        }
        self.core.alloc.unreserve(self.reserved_bytes);
        if self.is_counted {
            self.core.leave(self.is_alone);
        }
    }
}
