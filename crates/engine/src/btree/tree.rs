//! One tree: its root, its dirty blocks, and the walk from root to leaf.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use ubtrfs_ondisk::block::{Block, LEVEL_COUNT_MAX, Leaf};
use ubtrfs_ondisk::{Generation, Key, KeyType, LogicalAddr, RootId};
use ubtrfs_rt::{Arc, AtomicU64, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::cursor::{Cursor, ItemBytes};
use super::edit::{FINGER_COUNT, Finger};
use super::readahead::Readahead;
use super::store::{BlockPtr, Store};
use crate::error::Result;

/// A tree in memory. One writer or many readers at a time.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) id: RootId,
    pub(crate) store: Arc<Store>,
    state: RwLock<TreeState>,
    /// Counts the edits, so that a cursor knows when its path may be stale.
    version: AtomicU64,
    /// Key of the root item; its offset is not 0 for a snapshot.
    pub(crate) root_key: Key,
    /// Blocks up to this generation may be shared with a snapshot.
    last_snapshot: AtomicU64,
}

/// What the tree's lock guards.
#[derive(Debug)]
pub(crate) struct TreeState {
    pub(crate) root: BlockPtr,
    /// The root as the root item, or the superblock, last said.
    pub(crate) recorded: (BlockPtr, u64),
    /// The blocks of the running transaction, by address.
    pub(crate) dirty: FxHashMap<LogicalAddr, Arc<Block>>,
    /// Bytes of all blocks of the tree, as its root item says.
    pub(crate) bytes_used: u64,
    pub(crate) fingers: [Option<Finger>; FINGER_COUNT],
    /// Counts the uses of fingers.
    finger_clock: u64,
}

/// The blocks from the root (last) to a leaf (first), each with the slot taken.
pub(crate) type Path = SmallVec<[(Arc<Block>, usize); LEVEL_COUNT_MAX]>;

/// A block of the way is not in memory.
pub(crate) struct Miss {
    pub(crate) ptr: BlockPtr,
    pub(crate) first_key: Option<Key>,
}

impl TreeState {
    /// The time of a use of a finger, above all before.
    #[inline]
    pub(super) fn tick_fingers(&mut self) -> u64 {
        self.finger_clock += 1;
        self.finger_clock
    }

    /// The block, if it is in memory.
    #[inline]
    pub(crate) fn block(
        &self,
        ptr: &BlockPtr,
        first_key: Option<&Key>,
        store: &Store,
    ) -> Option<Arc<Block>> {
        match self.dirty.get(&ptr.addr) {
            // In a damaged filesystem an address may be in use twice.
            Some(block) if ptr.is_of(block) => Some(Arc::clone(block)),
            _ => store.cached(ptr, first_key),
        }
    }

    /// Whether the block is one of the running transaction.
    #[inline]
    pub(crate) fn is_dirty(&self, ptr: &BlockPtr) -> bool {
        self.dirty.get(&ptr.addr).is_some_and(|block| ptr.is_of(block))
    }

    /// Walks towards `key` through blocks in memory, or among those just `loaded`.
    fn walk(
        &self,
        store: &Store,
        key: &Key,
        loaded: &[(BlockPtr, Arc<Block>)],
    ) -> std::result::Result<Path, Miss> {
        let mut ptr = self.root;
        let mut first_key = None;
        let mut path = Path::new();
        loop {
            let block = match self.block(&ptr, first_key.as_ref(), store) {
                Some(block) => block,
                None => match loaded.iter().find(|(known, _)| *known == ptr) {
                    Some((_, block)) => Arc::clone(block),
                    None => return Err(Miss { ptr, first_key }),
                },
            };
            match &*block {
                Block::Leaf(leaf) => {
                    let (Ok(slot) | Err(slot)) = leaf.search(key);
                    path.push((block, slot));
                    path.reverse();
                    return Ok(path);
                }
                Block::Node(node) => {
                    let slot = node.slot_for(key);
                    first_key = Some(node.key(slot));
                    ptr = BlockPtr {
                        addr: node.child(slot),
                        generation: node.child_generation(slot),
                        level: ptr.level - 1,
                    };
                    path.push((block, slot));
                }
            }
        }
    }
}

impl Tree {
    /// A tree whose root block lies on the volume.
    pub(crate) fn new(id: RootId, store: Arc<Store>, root: BlockPtr) -> Self {
        let state = TreeState {
            root,
            recorded: (root, 0),
            dirty: FxHashMap::default(),
            bytes_used: 0,
            fingers: Default::default(),
            finger_clock: 0,
        };
        Self {
            id,
            store,
            state: RwLock::new(state),
            version: AtomicU64::new(0),
            root_key: Key::new(id.object_id(), KeyType::ROOT_ITEM, 0),
            last_snapshot: AtomicU64::new(0),
        }
    }

    /// Adds what the tree's root item says.
    pub(crate) fn with_root_item(
        mut self,
        root_key: Key,
        bytes_used: u64,
        last_snapshot: Generation,
    ) -> Self {
        self.root_key = root_key;
        let state = self.state.get_mut();
        state.bytes_used = bytes_used;
        state.recorded.1 = bytes_used;
        self.last_snapshot = AtomicU64::new(last_snapshot.0);
        self
    }

    /// A tree with no block on the volume yet: one empty leaf, dirty.
    pub(crate) fn new_empty(id: RootId, store: Arc<Store>, leaf: Leaf) -> Self {
        let nodesize_bytes = store.geometry().nodesize_bytes as u64;
        let mut tree = Self::new_copy(id, store, Block::Leaf(leaf));
        let state = tree.state.get_mut();
        state.bytes_used = nodesize_bytes;
        state.recorded.1 = nodesize_bytes;
        tree
    }

    /// A tree whose root block is dirty, and the only one of its own.
    pub(crate) fn new_copy(id: RootId, store: Arc<Store>, block: Block) -> Self {
        let (addr, generation) = (block.bytenr(), block.generation());
        let root = BlockPtr { addr, generation, level: block.level() };
        let mut tree = Self::new(id, store, root);
        tree.state.get_mut().dirty.insert(root.addr, Arc::new(block));
        tree
    }

    /// Whether another tree may share the block: one of before the last snapshot, or one that
    /// Linux has moved.
    pub(crate) fn may_share(&self, block: &Block) -> bool {
        let last_snapshot = Generation(self.last_snapshot.load(Ordering::Relaxed));
        self.id.is_subvolume() && (block.generation() <= last_snapshot || block.is_relocated())
    }

    /// Blocks up to `generation` may be shared from now on.
    pub(crate) fn last_snapshot(&self) -> Generation {
        Generation(self.last_snapshot.load(Ordering::Relaxed))
    }

    /// Remembers when it was last the source of a snapshot.
    pub(crate) fn set_last_snapshot(&self, generation: Generation) {
        self.last_snapshot.store(generation.0, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, TreeState> {
        self.state.read()
    }

    /// Locks for an edit; cursors then search again.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, TreeState> {
        let guard = self.state.write();
        self.version.fetch_add(1, Ordering::Release);
        guard
    }

    /// Locks for what no cursor can notice: sealing a block, recording the root.
    pub(crate) fn read_mut_quietly(&self) -> RwLockWriteGuard<'_, TreeState> {
        self.state.write()
    }

    /// Changes whenever the tree may have.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The root block's pointer.
    pub(crate) fn root(&self) -> BlockPtr {
        self.read().root
    }

    /// The path to where `key` is or would be, and the version at which that held.
    ///
    /// # Errors
    /// A block on the way that is damaged or cannot be read.
    pub(crate) fn search(&self, key: &Key) -> Result<(Path, u64)> {
        self.store.note_search();
        // What was loaded on the way, in case the cache is too small to keep it.
        let mut loaded: SmallVec<[(BlockPtr, Arc<Block>); 1]> = SmallVec::new();
        loop {
            let (miss, version) = {
                let state = self.read();
                let version = self.version();
                match state.walk(&self.store, key, &loaded) {
                    Ok(path) => return Ok((path, version)),
                    Err(miss) => (miss, version),
                }
            };
            if let Some(block) = self.load(&miss, version)? {
                loaded.push((miss.ptr, block));
            }
        }
    }

    /// Brings a block into memory with no lock held. A block that was freed meanwhile, and its
    /// space reused, reads as damaged; that is no error, but `None`, if the tree has changed.
    pub(crate) fn load(&self, miss: &Miss, version: u64) -> Result<Option<Arc<Block>>> {
        match self.store.read(&miss.ptr, self.id, miss.first_key) {
            Ok(block) => Ok(Some(block)),
            Err(_) if self.version() != version => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The item with exactly that key.
    ///
    /// # Errors
    /// A block on the way that is damaged or cannot be read.
    pub(crate) fn lookup(&self, key: &Key) -> Result<Option<ItemBytes>> {
        let (path, _) = self.search(key)?;
        let (block, slot) = path.into_iter().next().expect("a path ends in a leaf");
        let found = {
            let leaf = leaf_of(&block);
            slot < leaf.len() && leaf.key(slot) == *key
        };
        Ok(found.then(|| ItemBytes::new(block, slot)))
    }

    /// A cursor, not yet anywhere.
    pub(crate) fn cursor(self: &Arc<Self>) -> Cursor {
        Cursor::new(Arc::clone(self), Readahead::None)
    }

    /// A cursor that reads ahead.
    pub(crate) fn cursor_with(self: &Arc<Self>, readahead: Readahead) -> Cursor {
        Cursor::new(Arc::clone(self), readahead)
    }
}

/// The leaf at the end of a path.
#[inline]
pub(crate) fn leaf_of(block: &Block) -> &Leaf {
    match block {
        Block::Leaf(leaf) => leaf,
        Block::Node(_) => unreachable_level(),
    }
}

#[cold]
fn unreachable_level() -> ! {
    panic!("a path's first block is a leaf: the walk ends at level 0")
}
