//! The trees of a filesystem, each made when first asked for.

use rustc_hash::{FxHashMap, FxHashSet};
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::{Generation, Key, KeyType, LogicalAddr, ObjectId, RootId};
use ubtrfs_rt::{Arc, AtomicBool, Ordering, RwLock};

use super::{BlockPtr, Store, Tree};
use crate::error::{Error, Result};

/// All trees.
#[derive(Debug)]
pub(crate) struct Roots {
    pub(crate) store: Arc<Store>,
    pub(crate) root_tree: Arc<Tree>,
    pub(crate) chunk_tree: Arc<Tree>,
    trees: RwLock<Known>,
    /// A subvolume may share blocks with a snapshot.
    has_shared: AtomicBool,
    /// Of those that were looked at one is a snapshot, or has one. What is kept back for dirty data is far more then.
    has_snapshots: AtomicBool,
}

/// Trees by number.
#[derive(Debug, Default)]
struct Known {
    open: FxHashMap<RootId, Arc<Tree>>,
    /// Deleted in this session. Who read such a tree's item before must not enter it after.
    deleted: FxHashSet<RootId>,
}

impl Roots {
    /// The two trees that the superblock points to; the others are found through the first.
    pub(crate) fn new(store: Arc<Store>, root_tree: Arc<Tree>, chunk_tree: Arc<Tree>) -> Self {
        let has_shared = AtomicBool::new(false);
        let has_snapshots = AtomicBool::new(false);
        Self { store, root_tree, chunk_tree, trees: RwLock::default(), has_shared, has_snapshots }
    }

    /// The tree `root`, read from its root item when first asked for.
    ///
    /// # Errors
    /// `NotFound` when there is no such tree; corruption where its root item is damaged.
    pub(crate) fn tree(&self, root: RootId) -> Result<Arc<Tree>> {
        match root {
            RootId::ROOT_TREE => return Ok(Arc::clone(&self.root_tree)),
            RootId::CHUNK_TREE => return Ok(Arc::clone(&self.chunk_tree)),
            _ => {}
        }
        if let Some(tree) = self.trees.read().open.get(&root) {
            return Ok(Arc::clone(tree));
        }
        let deleted = || Error::not_found(format!("subvolume {root}, which is deleted,"));
        let (key, item) =
            self.root_item(root)?.ok_or_else(|| Error::not_found(format!("tree {root}")))?;
        if root.is_subvolume() && item.refs.get() == 0 {
            return Err(deleted());
        }
        // The key of a snapshot says when it was made.
        if root.is_subvolume() && (key.offset > 0 || item.last_snapshot.get() > 0) {
            self.has_snapshots.store(true, Ordering::Relaxed);
        }
        let ptr = BlockPtr {
            addr: LogicalAddr(item.bytenr.get()),
            generation: Generation(item.generation.get()),
            level: item.level,
        };
        let tree = Tree::new(root, Arc::clone(&self.store), ptr).with_root_item(
            key,
            item.bytes_used.get(),
            Generation(item.last_snapshot.get()),
        );
        let mut known = self.trees.write();
        if known.deleted.contains(&root) {
            return Err(deleted());
        }
        Ok(known.enter(tree))
    }

    /// Whether the subvolume was deleted since the filesystem was opened.
    pub(crate) fn is_deleted(&self, root: RootId) -> bool {
        self.trees.read().deleted.contains(&root)
    }

    /// Whether a change may copy blocks that are shared: what lies below them gets references then.
    pub(crate) fn has_shared(&self) -> bool {
        self.has_shared.load(Ordering::Relaxed)
    }

    /// Finds out whether it may, as far as two look-ups tell: where there are other subvolumes than
    /// the top level, any may be a snapshot or have one.
    ///
    /// # Errors
    /// A damaged block or item.
    pub(crate) fn look_for_shared(&self) -> Result<()> {
        let top = self.root_item(RootId::FS_TREE)?;
        let mut cursor = self.root_tree.cursor();
        cursor.seek(&Key::new(ObjectId::FIRST_FREE, KeyType(0), 0))?;
        let has_others =
            cursor.current()?.is_some_and(|(key, _)| key.objectid <= ObjectId::LAST_FREE);
        if has_others || top.is_some_and(|(_, item)| item.last_snapshot.get() > 0) {
            self.set_shared();
        }
        Ok(())
    }

    /// From now on it may.
    pub(crate) fn set_shared(&self) {
        self.has_shared.store(true, Ordering::Relaxed);
    }

    /// Whether a subvolume that was looked at is a snapshot, or has one: its blocks may be shared.
    pub(crate) fn has_snapshots(&self) -> bool {
        self.has_snapshots.load(Ordering::Relaxed)
    }

    /// From now on one has.
    pub(crate) fn set_snapshots(&self) {
        self.set_shared();
        self.has_snapshots.store(true, Ordering::Relaxed);
    }

    /// Enters a tree that was just made, of which there is no item yet.
    pub(crate) fn insert(&self, tree: Tree) -> Arc<Tree> {
        self.trees.write().enter(tree)
    }

    /// Forgets a tree that is deleted and has no dirty block, for good: no other gets its number.
    pub(crate) fn forget(&self, root: RootId) {
        let mut known = self.trees.write();
        known.open.remove(&root);
        known.deleted.insert(root);
    }

    /// The trees looked at so far, by number, the root tree left out and the chunk tree too.
    pub(crate) fn open_trees(&self) -> Vec<Arc<Tree>> {
        let mut trees: Vec<_> = self.trees.read().open.values().map(Arc::clone).collect();
        trees.sort_by_key(|tree| tree.id);
        trees
    }

    /// The root item of a tree and its key. A snapshot's key offset is the transaction of its
    /// making, so the newest is taken.
    ///
    /// # Errors
    /// A damaged block or item.
    pub(crate) fn root_item(&self, root: RootId) -> Result<Option<(Key, RootItem)>> {
        let mut cursor = self.root_tree.cursor();
        cursor.seek_back(&Key::new(root.object_id(), KeyType::ROOT_ITEM, u64::MAX))?;
        match cursor.current()? {
            Some((key, data)) if key.objectid.0 == root.0 && key.ty == KeyType::ROOT_ITEM => {
                let item = RootItem::parse(data).map_err(|e| e.in_root(RootId::ROOT_TREE))?;
                Ok(Some((key, item)))
            }
            _ => Ok(None),
        }
    }
}

impl Known {
    /// The one that is there already wins.
    fn enter(&mut self, tree: Tree) -> Arc<Tree> {
        Arc::clone(self.open.entry(tree.id).or_insert_with(|| Arc::new(tree)))
    }
}
