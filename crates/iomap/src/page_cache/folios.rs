//! Where a file's folios are found: sorted chunks of them, each of a fixed stretch of the file, so that a folio of one block costs
//! little beside its data.
//!
//! A folio is no longer than a chunk's stretch and aligned to its own length, so it lies in one chunk. No chunk is empty.

use std::collections::BTreeMap;

use ubtrfs_memory::Buffer;
use ubtrfs_rt::Arc;

/// Blocks of a folio are bits of a word.
pub(super) const FOLIO_BLOCKS_MAX: u64 = 32;

/// Blocks that a chunk is for.
const CHUNK_BLOCKS: u64 = 128;

/// A piece of the page cache: blocks that touch, with what each of them is as a bit.
#[derive(Debug)]
pub(super) struct Folio {
    pub(super) data: Arc<Buffer>,
    pub(super) uptodate: u32,
    pub(super) dirty: u32,
    pub(super) writeback: u32,
    pub(super) is_referenced: bool,
    /// Whether somebody wrote it, or read it who may come again.
    pub(super) is_wanted: bool,
    /// The first block, from the start of the chunk on.
    in_chunk: u8,
}

impl Folio {
    pub(super) fn new(data: Arc<Buffer>, uptodate: u32) -> Self {
        Self {
            data,
            uptodate,
            dirty: 0,
            writeback: 0,
            is_referenced: true,
            is_wanted: false,
            in_chunk: 0,
        }
    }

    /// All its blocks are uptodate and dirty.
    pub(super) fn new_dirty(data: Arc<Buffer>, all: u32) -> Self {
        Self { dirty: all, is_wanted: true, ..Self::new(data, all) }
    }

    pub(super) fn is_clean(&self) -> bool {
        self.dirty == 0 && self.writeback == 0
    }

    /// Its bytes, to change them; also how many bytes of the version before a writeback on its way keeps from now on, as these are a
    /// copy then.
    pub(super) fn bytes_mut(&mut self) -> (&mut [u8], usize) {
        let is_kept = self.writeback != 0 && Arc::get_mut(&mut self.data).is_none();
        let kept_bytes = if is_kept { self.data.len() } else { 0 };
        (&mut **Arc::make_mut(&mut self.data), kept_bytes)
    }
}

/// All folios of a file, by their first blocks.
#[derive(Debug, Default)]
pub(super) struct Folios {
    chunks: BTreeMap<u64, Vec<Folio>>,
}

/// The chunk of a block, and where in it the block lies.
fn place(block: u64) -> (u64, u8) {
    let in_chunk = u8::try_from(block % CHUNK_BLOCKS).expect("a chunk has few blocks");
    (block / CHUNK_BLOCKS, in_chunk)
}

fn first_block(chunk: u64, folio: &Folio) -> u64 {
    chunk * CHUNK_BLOCKS + u64::from(folio.in_chunk)
}

impl Folios {
    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The last folio in the block's chunk that begins at or before it, and its first block.
    pub(super) fn at_or_before(&self, block: u64) -> Option<(u64, &Folio)> {
        let (chunk, in_chunk) = place(block);
        let folios = self.chunks.get(&chunk)?;
        let after = folios.partition_point(|folio| folio.in_chunk <= in_chunk);
        let folio = &folios[after.checked_sub(1)?];
        Some((first_block(chunk, folio), folio))
    }

    /// The same, to change it.
    pub(super) fn at_or_before_mut(&mut self, block: u64) -> Option<(u64, &mut Folio)> {
        let (chunk, in_chunk) = place(block);
        let folios = self.chunks.get_mut(&chunk)?;
        let after = folios.partition_point(|folio| folio.in_chunk <= in_chunk);
        let folio = &mut folios[after.checked_sub(1)?];
        Some((first_block(chunk, folio), folio))
    }

    /// The folio that begins at `first`.
    pub(super) fn get(&self, first: u64) -> Option<&Folio> {
        self.at_or_before(first).filter(|(found, _)| *found == first).map(|(_, folio)| folio)
    }

    /// The same, to change it.
    pub(super) fn get_mut(&mut self, first: u64) -> Option<&mut Folio> {
        self.at_or_before_mut(first).filter(|(found, _)| *found == first).map(|(_, folio)| folio)
    }

    /// The first block of the first folio that begins at or after `block`.
    pub(super) fn next(&self, block: u64) -> Option<u64> {
        let (chunk, _) = place(block);
        // Of the first chunk all may lie before; of the next one none does.
        self.chunks.range(chunk..).take(2).find_map(|(chunk, folios)| {
            let at = folios.partition_point(|folio| first_block(*chunk, folio) < block);
            folios.get(at).map(|folio| first_block(*chunk, folio))
        })
    }

    /// The first blocks of all folios that begin in `start..end`.
    pub(super) fn firsts(&self, start: u64, end: u64) -> Vec<u64> {
        if start >= end {
            return Vec::new();
        }
        let chunks = self.chunks.range(start / CHUNK_BLOCKS..=(end - 1) / CHUNK_BLOCKS);
        chunks
            .flat_map(|(chunk, folios)| folios.iter().map(|folio| first_block(*chunk, folio)))
            .filter(|first| (start..end).contains(first))
            .collect()
    }

    /// All folios that begin in `start..end`, in order.
    pub(super) fn range_mut(
        &mut self,
        start: u64,
        end: u64,
    ) -> impl Iterator<Item = (u64, &mut Folio)> {
        let upto = end.max(start).div_ceil(CHUNK_BLOCKS).max(start / CHUNK_BLOCKS);
        self.chunks
            .range_mut(start / CHUNK_BLOCKS..upto)
            .flat_map(|(chunk, folios)| {
                folios.iter_mut().map(|folio| (first_block(*chunk, folio), folio))
            })
            .filter(move |(first, _)| (start..end).contains(first))
    }

    /// All folios.
    pub(super) fn values(&self) -> impl Iterator<Item = &Folio> {
        self.chunks.values().flatten()
    }

    /// Puts a folio where there is none.
    pub(super) fn insert(&mut self, first: u64, mut folio: Folio) {
        let (chunk, in_chunk) = place(first);
        folio.in_chunk = in_chunk;
        let folios = self.chunks.entry(chunk).or_default();
        let at = folios.partition_point(|other| other.in_chunk < in_chunk);
        debug_assert!(
            folios.get(at).is_none_or(|other| other.in_chunk != in_chunk),
            "a folio in place of another"
        );
        folios.insert(at, folio);
    }

    /// Takes out the folio that begins at `first`.
    pub(super) fn remove(&mut self, first: u64) -> Option<Folio> {
        let (chunk, in_chunk) = place(first);
        let folios = self.chunks.get_mut(&chunk)?;
        let at = folios.binary_search_by_key(&in_chunk, |folio| folio.in_chunk).ok()?;
        let folio = folios.remove(at);
        if folios.is_empty() {
            self.chunks.remove(&chunk);
        }
        Some(folio)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use ubtrfs_memory::{Arena, ArenaOptions};

    use super::*;

    /// With the reference counts, the buffer and the allocator's word 72 bytes, 1.8 %, for a folio of one block of 4 KiB, the smallest.
    #[test]
    fn folio_is_small_beside_a_block() {
        assert!(size_of::<Folio>() <= 24);
        assert!(size_of::<Buffer>() <= 24);
    }

    proptest! {
        /// Folios of one block, beside a set of their places.
        #[test]
        fn folios_random_changes_same_as_set(
            steps in prop::collection::vec((0..400_u64, any::<bool>()), 1..300),
            looks in prop::collection::vec((0..450_u64, 0..450_u64), 20),
        ) {
            let nothing = ArenaOptions {
                slab_bytes_max: 0,
                free_bytes_max: 0,
                idle_bytes_max: 0,
                has_huge_pages: false,
            };
            let memory = Arena::new(nothing);
            let mut folios = Folios::default();
            let mut model = BTreeSet::new();
            for (block, inserts) in steps {
                if inserts && model.insert(block) {
                    folios.insert(block, Folio::new(Arc::new(memory.zeroed(1)), 1));
                } else if !inserts {
                    prop_assert_eq!(folios.remove(block).is_some(), model.remove(&block));
                }
            }
            prop_assert_eq!(folios.is_empty(), model.is_empty());
            prop_assert_eq!(folios.values().count(), model.len());
            for (start, end) in looks {
                let chunk = start / CHUNK_BLOCKS * CHUNK_BLOCKS;
                let before = model.range(chunk..=start).next_back().copied();
                prop_assert_eq!(folios.at_or_before(start).map(|(first, _)| first), before);
                prop_assert_eq!(folios.at_or_before_mut(start).map(|(first, _)| first), before);
                prop_assert_eq!(folios.get(start).is_some(), model.contains(&start));
                prop_assert_eq!(folios.get_mut(start).is_some(), model.contains(&start));
                prop_assert_eq!(folios.next(start), model.range(start..).next().copied());
                let within: Vec<u64> = model.range(start..end.max(start)).copied().collect();
                prop_assert_eq!(&folios.firsts(start, end), &within);
                let mutable: Vec<u64> = folios.range_mut(start, end).map(|(first, _)| first).collect();
                prop_assert_eq!(&mutable, &within);
            }
        }
    }
}
