//! Clean blocks: read from the volume, verified once, kept in a bounded cache.

use std::time::Duration;

use quick_cache::sync::{Cache, DefaultLifecycle, EntryAction, EntryResult, PlaceholderGuard};
use quick_cache::{DefaultHashBuilder, Weighter};
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

    /// The same, with a first key if that is known.
    #[inline]
    fn means(&self, block: &Block, first_key: Option<&Key>) -> bool {
        self.is_of(block) && first_key.is_none_or(|key| block.first_key() == Some(*key))
    }
}

#[derive(Clone, Debug)]
struct BlockWeighter;

impl Weighter<LogicalAddr, Arc<Block>> for BlockWeighter {
    fn weight(&self, _: &LogicalAddr, block: &Arc<Block>) -> u64 {
        block.as_bytes().len() as u64
    }
}

type Place<'a> = PlaceholderGuard<
    'a,
    LogicalAddr,
    Arc<Block>,
    BlockWeighter,
    DefaultHashBuilder,
    DefaultLifecycle<LogicalAddr, Arc<Block>>,
>;

/// What is known of a block that is wanted.
enum Found<'a> {
    /// It is in memory.
    Block(Arc<Block>),
    /// It may be read, and kept there.
    Place(Place<'a>),
    /// Somebody else is reading it, or another block has its address by now.
    Busy,
}

/// The clean blocks of a filesystem.
#[derive(Debug)]
pub(crate) struct Store {
    volume: Arc<Volume>,
    geometry: Geometry,
    cache: Cache<LogicalAddr, Arc<Block>, BlockWeighter>,
    /// Bytes of blocks in memory, the dirty ones included.
    budget_bytes: u64,
    /// Of them, left to others than clean blocks: dirty ones and files' bytes; in whole steps.
    left_bytes: AtomicU64,
    /// Held by who changes that.
    leaving: Mutex<()>,
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

/// Parts of the budget in which room is left to others.
const BUDGET_STEPS: u64 = 32;

/// What is left to others of a budget, where it was `before` and they have `len_bytes`: whole steps, and never all, as a cache that has had
/// no room does not know any more what comes again and again. What falls by less than a step changes nothing.
fn left_bytes(budget_bytes: u64, before: u64, len_bytes: u64) -> u64 {
    let step_bytes = (budget_bytes / BUDGET_STEPS).max(1);
    if len_bytes > 0 && len_bytes < before && before - len_bytes < step_bytes {
        return before;
    }
    len_bytes.min(budget_bytes.saturating_sub(step_bytes)) / step_bytes * step_bytes
}

impl Store {
    /// A store over `volume` that keeps at most `cache_bytes` of blocks, less what is left to others.
    pub(crate) fn new(volume: Arc<Volume>, cache_bytes: usize) -> Self {
        let geometry = volume.geometry();
        let estimate = cache_bytes / geometry.nodesize_bytes.max(1);
        Self {
            volume,
            geometry,
            cache: Cache::with_weighter(estimate, cache_bytes as u64, BlockWeighter),
            budget_bytes: cache_bytes as u64,
            left_bytes: AtomicU64::new(0),
            leaving: Mutex::new(()),
            wanted: Wanted::default(),
            counts: Counts::default(),
        }
    }

    /// Leaves about so much of what may be kept in memory to others: to the running transaction, and to files' bytes.
    pub(crate) fn leave_to_others(&self, len_bytes: u64) {
        let next = |before| left_bytes(self.budget_bytes, before, len_bytes);
        let before = self.left_bytes.load(Ordering::Relaxed);
        if next(before) == before {
            return;
        }
        // One at a time: the last limit that the cache is told is to be the last one here.
        let _turn = self.leaving.lock();
        let before = self.left_bytes.load(Ordering::Relaxed);
        let left_bytes = next(before);
        if left_bytes != before {
            self.left_bytes.store(left_bytes, Ordering::Relaxed);
            self.cache.set_capacity(self.budget_bytes - left_bytes);
        }
    }

    /// Most bytes of clean blocks at the moment.
    pub(crate) fn clean_bytes_max(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.left_bytes.load(Ordering::Relaxed))
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
        self.cache.get(&ptr.addr).filter(|block| ptr.means(block, first_key))
    }

    /// Whether [`Store::cached`] has it, which is no use of it.
    pub(super) fn has(&self, ptr: &BlockPtr) -> bool {
        self.cache.peek(&ptr.addr).is_some_and(|block| ptr.means(&block, None))
    }

    /// Puts a block in that was just written.
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
        // Behind who reads it already.
        let place = match self.place(ptr, first_key.as_ref(), None) {
            Found::Block(block) => return Ok(block),
            Found::Place(place) => Some(place),
            Found::Busy => None,
        };
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
        place.map(|place| place.insert(Arc::clone(&block)));
        Ok(block)
    }

    /// Where what is read of a block will be kept, if it is not there. Whoever drops or writes a block of that address meanwhile takes the
    /// place away: what was read may be what was there before, of the same transaction even, and is not kept then. One at a time has the
    /// place; others wait for so long, forever with `None`.
    fn place(
        &self,
        ptr: &BlockPtr,
        first_key: Option<&Key>,
        how_long: Option<Duration>,
    ) -> Found<'_> {
        let look = |_: &LogicalAddr, block: &mut Arc<Block>| {
            if ptr.means(block, first_key) {
                EntryAction::Retain(Found::Block(Arc::clone(block)))
            } else if block.generation() > ptr.generation {
                // It has taken the place of the one meant, of which the caller heard before.
                EntryAction::Retain(Found::Busy)
            } else {
                EntryAction::ReplaceWithGuard
            }
        };
        // Threads of an explorer take turns on one of the system's: who slept there would have nobody to wake him.
        let how_long = if cfg!(ubtrfs_explore) { Some(Duration::ZERO) } else { how_long };
        match self.cache.entry(&ptr.addr, how_long, look) {
            EntryResult::Retained(found) => found,
            EntryResult::Replaced(place, _) | EntryResult::Vacant(place) => Found::Place(place),
            EntryResult::Removed(..) | EntryResult::Timeout => Found::Busy,
        }
    }

    /// Reads blocks that are not in memory, those that lie side by side with one request, as long as `goes_on` says so, and keeps those
    /// that are whole. A hint: what is damaged is met again, and reported, by [`Store::read`].
    pub(crate) fn read_runs(
        &self,
        mut blocks: Vec<(BlockPtr, Key)>,
        root: RootId,
        goes_on: impl Fn() -> bool,
    ) {
        let nodesize = self.geometry.nodesize_bytes as u64;
        let touch = |a: &BlockPtr, b: &BlockPtr| a.addr.0.checked_add(nodesize) == Some(b.addr.0);
        blocks.sort_by_key(|(ptr, _)| ptr.addr);
        for run in blocks.chunk_by(|(a, _), (b, _)| touch(a, b)) {
            if !goes_on() {
                return;
            }
            // Others have come to some of them.
            let free = |(ptr, key): &(BlockPtr, Key)| match self.place(
                ptr,
                Some(key),
                Some(Duration::ZERO),
            ) {
                Found::Place(place) => Some((*ptr, *key, place)),
                Found::Block(_) | Found::Busy => None,
            };
            let mut missing: Vec<_> = run.iter().filter_map(free).collect();
            while !missing.is_empty() {
                let touching = missing.windows(2).take_while(|pair| touch(&pair[0].0, &pair[1].0));
                let count = 1 + touching.count();
                self.read_run(missing.drain(..count).collect(), root);
            }
        }
    }

    fn read_run(&self, run: Vec<(BlockPtr, Key, Place<'_>)>, root: RootId) {
        let nodesize = self.geometry.nodesize_bytes;
        let Some((first, ..)) = run.first() else { return };
        let mut bytes = vec![0; nodesize * run.len()];
        if self.volume.read(first.addr, &mut bytes, &|_| Ok(())).is_err() {
            return;
        }
        for ((ptr, key, place), copy) in run.into_iter().zip(bytes.chunks_exact(nodesize)) {
            let expect = expect(&ptr, root, Some(key));
            if let Ok(block) = verify::block(copy.into(), &self.geometry, &expect) {
                self.counts.blocks_read.fetch_add(1, Ordering::Relaxed);
                let _ = place.insert(Arc::new(block));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_left_whole_steps_and_never_all() {
        const BUDGET: u64 = 3200;
        let left = |before, len_bytes| left_bytes(BUDGET, before, len_bytes);
        assert_eq!(
            [99, 100, 199, 3100, 3200, u64::MAX].map(|len| left(0, len)),
            [0, 100, 100, 3100, 3100, 3100]
        );
        // A step of a little less and a little more is no change.
        assert_eq!([200, 101, 100, 1, 0].map(|len| left(200, len)), [200, 200, 100, 0, 0]);
        assert_eq!([3099, 3001, 3000].map(|len| left(3100, len)), [3100, 3100, 3000]);
        for small in [0, 1, 31, 33] {
            for len in [0, 1, 31, 33] {
                assert!(left_bytes(small, 0, len) <= small.saturating_sub(1));
            }
        }
    }
}
