//! Clean blocks: read from the volume, verified once, kept in a bounded cache.

use quick_cache::Weighter;
use quick_cache::sync::Cache;
use ubtrfs_ondisk::block::{Block, zeroed_block};
use ubtrfs_ondisk::verify::{self, Expect, Geometry};
use ubtrfs_ondisk::{Generation, Key, LogicalAddr, RootId};
use ubtrfs_rt::{Arc, AtomicU64, Mutex, Ordering};
use ubtrfs_volume::Volume;

use super::read_beside::Wanted;
use crate::error::Result;

/// What a parent, root item or superblock says of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockPtr {
    pub(crate) addr: LogicalAddr,
    pub(crate) generation: Generation,
    pub(crate) level: u8,
}

impl BlockPtr {
    /// Whether `block`, which lies at this address, is the one meant.
    #[inline]
    pub(crate) fn is_of(&self, block: &Block) -> bool {
        block.generation() == self.generation && block.level() == self.level
    }
}

#[derive(Clone, Debug)]
struct BlockWeighter;

impl Weighter<LogicalAddr, Arc<Block>> for BlockWeighter {
    fn weight(&self, _: &LogicalAddr, block: &Arc<Block>) -> u64 {
        block.as_bytes().len() as u64
    }
}

/// The clean blocks of a filesystem.
#[derive(Debug)]
pub(crate) struct Store {
    volume: Arc<Volume>,
    geometry: Geometry,
    cache: Cache<LogicalAddr, Arc<Block>, BlockWeighter>,
    /// Bytes of blocks in memory, the dirty ones included.
    pub(super) budget_bytes: u64,
    /// Of them, left to dirty blocks; in whole steps.
    left_bytes: AtomicU64,
    pub(super) wanted: Wanted,
    counts: Counts,
}

/// What was done since the store was made. On cache lines of their own: each search writes to one of them and reads the rest of
/// the store.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Counts {
    searches: AtomicU64,
    blocks_read: AtomicU64,
    blocks_written: AtomicU64,
}

/// Parts of the budget in which room is left to dirty blocks.
const BUDGET_STEPS: u64 = 32;

impl Store {
    /// A store over `volume` that keeps at most `cache_bytes` of blocks, less what is left to dirty
    /// ones.
    pub(crate) fn new(volume: Arc<Volume>, cache_bytes: usize) -> Self {
        let geometry = volume.geometry();
        let estimate = cache_bytes / geometry.nodesize_bytes.max(1);
        Self {
            volume,
            geometry,
            cache: Cache::with_weighter(estimate, cache_bytes as u64, BlockWeighter),
            budget_bytes: cache_bytes as u64,
            left_bytes: AtomicU64::new(0),
            wanted: Wanted::default(),
            counts: Counts::default(),
        }
    }

    /// Leaves about `dirty_bytes` of what may be kept in memory to the running transaction.
    pub(crate) fn leave_to_dirty(&self, dirty_bytes: u64) {
        let step_bytes = (self.budget_bytes / BUDGET_STEPS).max(1);
        let left_bytes = dirty_bytes.min(self.budget_bytes) / step_bytes * step_bytes;
        if self.left_bytes.swap(left_bytes, Ordering::Relaxed) != left_bytes {
            self.cache.set_capacity(self.budget_bytes - left_bytes);
        }
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(crate) fn volume(&self) -> &Volume {
        &self.volume
    }

    pub(crate) fn shared_volume(&self) -> Arc<Volume> {
        Arc::clone(&self.volume)
    }

    /// Blocks read from the volume since the store was made.
    pub(crate) fn blocks_read(&self) -> u64 {
        self.counts.blocks_read.load(Ordering::Relaxed)
    }

    /// Walks from the root of a tree to a leaf since the store was made, those that change what they meet included. One that
    /// waits for a block counts once.
    pub(crate) fn searches(&self) -> u64 {
        self.counts.searches.load(Ordering::Relaxed)
    }

    /// Notes one of [`Store::searches`].
    #[inline]
    pub(crate) fn note_search(&self) {
        self.counts.searches.fetch_add(1, Ordering::Relaxed);
    }

    /// Blocks written to the volume since the store was made, each once, whatever its copies.
    pub(crate) fn blocks_written(&self) -> u64 {
        self.counts.blocks_written.load(Ordering::Relaxed)
    }

    /// Notes `count` of [`Store::blocks_written`].
    pub(crate) fn note_written(&self, count: usize) {
        self.counts.blocks_written.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// The block, if it is in memory and is the one meant: also under another parent than that
    /// under which it was verified.
    #[inline]
    pub(crate) fn cached(&self, ptr: &BlockPtr, first_key: Option<&Key>) -> Option<Arc<Block>> {
        let block = self.cache.get(&ptr.addr)?;
        let has_key = first_key.is_none_or(|key| block.first_key() == Some(*key));
        (ptr.is_of(&block) && has_key).then_some(block)
    }

    /// Puts a block in that was just written, or just read.
    pub(crate) fn insert(&self, block: Arc<Block>) {
        self.cache.insert(block.bytenr(), block);
    }

    /// Drops a block whose space is free again.
    pub(crate) fn forget(&self, addr: LogicalAddr) {
        self.cache.remove(&addr);
    }

    /// The block, from memory or from whichever copy on the volume is whole.
    ///
    /// # Errors
    /// Corruption with root and block named, or the device's error.
    pub(crate) fn read(
        &self,
        ptr: &BlockPtr,
        root: RootId,
        first_key: Option<Key>,
    ) -> Result<Arc<Block>> {
        if let Some(block) = self.cached(ptr, first_key.as_ref()) {
            return Ok(block);
        }
        let expect = expect(ptr, root, first_key);
        let mut bytes = zeroed_block(self.geometry.nodesize_bytes);
        let accepted = Mutex::new(None);
        self.volume.read(ptr.addr, &mut bytes, &|copy| {
            let block = verify::block(copy.into(), &self.geometry, &expect)
                .map_err(|error| error.in_root(root))?;
            *accepted.lock() = Some(block);
            Ok(())
        })?;
        self.counts.blocks_read.fetch_add(1, Ordering::Relaxed);
        let block = accepted.into_inner().expect("an accepted read left its block");
        let block = Arc::new(block);
        self.insert(Arc::clone(&block));
        Ok(block)
    }

    /// Reads blocks, those that lie side by side with one request, and keeps those that are whole. A
    /// hint: what is damaged is met again, and reported, by [`Store::read`].
    pub(super) fn read_runs(&self, mut blocks: Vec<(BlockPtr, Key)>, root: RootId) {
        let nodesize = self.geometry.nodesize_bytes as u64;
        blocks.sort_by_key(|(ptr, _)| ptr.addr);
        for run in
            blocks.chunk_by(|(a, _), (b, _)| a.addr.0.checked_add(nodesize) == Some(b.addr.0))
        {
            self.read_run(run, root);
        }
    }

    fn read_run(&self, run: &[(BlockPtr, Key)], root: RootId) {
        let nodesize = self.geometry.nodesize_bytes;
        let Some((first, _)) = run.first() else { return };
        let mut bytes = vec![0; nodesize * run.len()];
        if self.volume.read(first.addr, &mut bytes, &|_| Ok(())).is_err() {
            return;
        }
        for ((ptr, key), copy) in run.iter().zip(bytes.chunks_exact(nodesize)) {
            let expect = expect(ptr, root, Some(*key));
            if let Ok(block) = verify::block(copy.into(), &self.geometry, &expect) {
                self.counts.blocks_read.fetch_add(1, Ordering::Relaxed);
                self.insert(Arc::new(block));
            }
        }
    }
}

/// A block's owner is its tree, save where trees share blocks: subvolumes and relocation.
fn expect(ptr: &BlockPtr, root: RootId, first_key: Option<Key>) -> Expect {
    let shares = root.holds_files() || root == RootId::TREE_RELOC;
    Expect {
        bytenr: ptr.addr,
        generation: Some(ptr.generation),
        level: Some(ptr.level),
        first_key,
        owner: (!shares).then_some(root),
    }
}
