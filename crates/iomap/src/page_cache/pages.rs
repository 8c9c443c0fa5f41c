//! The folios of one file, and which of their blocks are uptodate, dirty and under writeback.
//!
//! Invariants:
//! 1. Folios do not overlap; each is a power of two of blocks and aligned to its length.
//! 2. A dirty block is uptodate, and so is one under writeback. A folio with either stays. Bytes of blocks that are not uptodate are zero.
//! 3. Bytes that somebody looks at without the lock (a write on its way, a reader) are never changed: the folio
//!    gets a copy of its own first.
//! 4. A read that is under way is void as soon as a block of its range is written, dropped or zeroed.
//! 5. The version of a folio that only a write on its way has still counts as cached, until that write ends.

use std::ops::Range;

use ubtrfs_memory::{Arena, ArenaOptions, Buffer, SLAB_BYTES};
use ubtrfs_rt::{Arc, AtomicU64, Ordering};

use super::folios::{FOLIO_BLOCKS_MAX, Folio, Folios};
use super::{CacheOptions, DirtyOrder, ListedSlot};
use crate::offset::FileRange;

mod reclaim;

/// A stretch of blocks.
pub(crate) type Blocks = Range<u64>;

/// What was dropped, to be let go with the pages unlocked: memory may go back to the system, which takes a while.
pub(crate) type Gone = Vec<Arc<Buffer>>;

/// Memory that all files use together.
#[derive(Debug)]
pub(crate) struct Usage {
    cached_bytes: AtomicU64,
    dirty_bytes: AtomicU64,
    states: Arc<AtomicU64>,
    mappings: AtomicU64,
    fills: AtomicU64,
    runs_written: AtomicU64,
    bytes_written: AtomicU64,
    straight_bytes_written: AtomicU64,
    /// What folios' bytes are cut from.
    memory: Arena,
}

/// Buffers that are being read into, which are no folios yet.
pub(crate) struct ReadBuffers<'a> {
    usage: &'a Usage,
    len_bytes: u64,
}

impl Drop for ReadBuffers<'_> {
    fn drop(&mut self) {
        self.usage.cached_bytes.fetch_sub(self.len_bytes, Ordering::Relaxed);
    }
}

/// Slabs may have so many times the addresses that folios may have memory: those that are left may lie scattered over them.
const ADDRESSES_TIMES: u64 = 2;

/// Memory of folios that went is kept for new ones: this part of what folios may have. To get memory from the system anew, and zeroed,
/// costs as much as to read into it.
const IDLE_PART: u64 = 8;

/// The same of slabs with no folio in them, and so many bytes at most.
const FREE_PART: u64 = 16;
const FREE_BYTES_MAX: u64 = 8 << 20;

/// What was done so far, which depends on no machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheCounts {
    /// Mappings that the filesystem was asked for.
    pub mappings: u64,
    /// Reads of what was not in memory.
    pub fills: u64,
    /// Runs of dirty blocks given to the filesystem to write back.
    pub runs_written: u64,
    /// The bytes of those.
    pub bytes_written: u64,
    /// Of those, what went straight from the writer's buffer.
    pub straight_bytes_written: u64,
}

impl Usage {
    /// Of a cache with these options.
    pub(super) fn new(options: &CacheOptions) -> Self {
        let cached_bytes_max = options.cached_bytes_max;
        let is_cut = !options.ablation.without_slabs;
        let memory = Arena::new(ArenaOptions {
            slab_bytes_max: if is_cut {
                cached_bytes_max.saturating_mul(ADDRESSES_TIMES).max(SLAB_BYTES as u64)
            } else {
                0
            },
            // One at least: how much of its memory is kept the next limit says.
            free_bytes_max: (cached_bytes_max / FREE_PART).clamp(SLAB_BYTES as u64, FREE_BYTES_MAX),
            idle_bytes_max: cached_bytes_max / IDLE_PART,
            has_huge_pages: options.has_huge_pages,
        });
        Self {
            cached_bytes: AtomicU64::new(0),
            dirty_bytes: AtomicU64::new(0),
            states: Arc::default(),
            mappings: AtomicU64::new(0),
            fills: AtomicU64::new(0),
            runs_written: AtomicU64::new(0),
            bytes_written: AtomicU64::new(0),
            straight_bytes_written: AtomicU64::new(0),
            memory,
        }
    }

    /// A buffer that may hold anything. To be called with no file's pages locked: new memory takes the system a while.
    pub(crate) fn buffer(&self, len_bytes: u64) -> Arc<Buffer> {
        Arc::new(self.memory.buffer(index(len_bytes)))
    }

    /// Counts bytes of buffers that are being read into as cached, as long as the answer lives.
    pub(crate) fn count_read(&self, len_bytes: u64) -> ReadBuffers<'_> {
        self.cached_bytes.fetch_add(len_bytes, Ordering::Relaxed);
        ReadBuffers { usage: self, len_bytes }
    }

    /// A buffer that holds these bytes.
    fn buffer_of(&self, bytes: &[u8]) -> Arc<Buffer> {
        Arc::new(self.memory.copy_of(bytes))
    }

    /// A buffer that holds zeros.
    pub(crate) fn zeroed_buffer(&self, len_bytes: u64) -> Arc<Buffer> {
        Arc::new(self.memory.zeroed(index(len_bytes)))
    }

    pub(crate) fn cached_bytes(&self) -> u64 {
        self.cached_bytes.load(Ordering::Relaxed)
    }

    /// With what is kept for new folios.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.cached_bytes().saturating_add(self.memory.idle_bytes())
    }

    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty_bytes.load(Ordering::Relaxed)
    }

    /// Records of the files' extent states.
    pub(crate) fn states(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.states)
    }

    pub(crate) fn counts(&self) -> CacheCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CacheCounts {
            mappings: read(&self.mappings),
            fills: read(&self.fills),
            runs_written: read(&self.runs_written),
            bytes_written: read(&self.bytes_written),
            straight_bytes_written: read(&self.straight_bytes_written),
        }
    }

    pub(crate) fn count_mapping(&self) {
        self.mappings.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_fill(&self) {
        self.fills.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_run(&self, len_bytes: u64) {
        self.runs_written.fetch_add(1, Ordering::Relaxed);
        self.bytes_written.fetch_add(len_bytes, Ordering::Relaxed);
    }

    /// A run that went straight from the writer's buffer.
    pub(crate) fn count_straight_run(&self, len_bytes: u64) {
        self.count_run(len_bytes);
        self.straight_bytes_written.fetch_add(len_bytes, Ordering::Relaxed);
    }

    /// Returns how many there were before.
    pub(super) fn add_dirty(&self, len_bytes: u64) -> u64 {
        self.dirty_bytes.fetch_add(len_bytes, Ordering::Relaxed)
    }

    /// Returns how many there were before.
    pub(super) fn subtract_dirty(&self, len_bytes: u64) -> u64 {
        self.dirty_bytes.fetch_sub(len_bytes, Ordering::Relaxed)
    }
}

/// What a write puts into the cache.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a> {
    Bytes(&'a [u8]),
    Zeros,
    /// What is there already, which becomes dirty.
    Same,
}

/// Bytes of a folio, as they are now: who writes to the folio meanwhile gets a copy.
#[derive(Debug)]
pub(crate) struct FolioPart {
    data: Arc<Buffer>,
    bytes: Range<usize>,
}

impl FolioPart {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.data[self.bytes.clone()]
    }
}

#[derive(Debug)]
struct ReadUnderWay {
    id: u64,
    blocks: Blocks,
    is_valid: bool,
}

#[derive(Debug)]
struct WritebackUnderWay {
    ticket: u64,
    blocks: Blocks,
    /// Bytes of folios that got a copy of their own since, and which nobody else has any more.
    kept_bytes: u64,
}

/// The folios of one file.
#[derive(Debug)]
pub(crate) struct Pages {
    block_bytes: u64,
    folio_blocks_max: u64,
    usage: Arc<Usage>,
    folios: Folios,
    reads: Vec<ReadUnderWay>,
    writebacks: Vec<WritebackUnderWay>,
    next_id: u64,
    /// How many writebacks ended with their blocks dirty again.
    abandoned_count: u64,
    /// Where the search for folios to reclaim goes on.
    hand: u64,
    /// Where the cache has the file in its lists: because there are folios, and because some are dirty.
    pub(crate) listed: Option<ListedSlot>,
    pub(crate) dirty_order: Option<DirtyOrder>,
    /// What is left of the sweep of the background over the file.
    pub(crate) sweep: FileRange,
}

/// Bits of the blocks that `blocks` and the folio of `count` blocks at `first` share.
fn mask(first: u64, count: u64, blocks: &Blocks) -> u32 {
    let start = blocks.start.clamp(first, first + count) - first;
    let end = blocks.end.clamp(first, first + count) - first;
    let ones = |len: u64| if len >= 32 { u64::from(u32::MAX) } else { (1 << len) - 1 };
    let bits = if end > start { ones(end) & !ones(start) } else { 0 };
    u32::try_from(bits).unwrap_or(u32::MAX)
}

fn index(offset_bytes: u64) -> usize {
    usize::try_from(offset_bytes).expect("an offset in memory")
}

fn len_u64(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}

impl Pages {
    pub(crate) fn new(block_bytes: u64, folio_bytes_max: u64, usage: Arc<Usage>) -> Self {
        let blocks = (folio_bytes_max / block_bytes).clamp(1, FOLIO_BLOCKS_MAX);
        let folio_blocks_max =
            if blocks.is_power_of_two() { blocks } else { blocks.next_power_of_two() / 2 };
        Self {
            block_bytes,
            folio_blocks_max,
            usage,
            folios: Folios::default(),
            reads: Vec::new(),
            writebacks: Vec::new(),
            next_id: 0,
            abandoned_count: 0,
            hand: 0,
            listed: None,
            dirty_order: None,
            sweep: FileRange::default(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.folios.is_empty()
    }

    /// The folio that holds `block`, and its first block.
    fn folio(&self, block: u64) -> Option<(u64, &Folio)> {
        let (first, folio) = self.folios.at_or_before(block)?;
        (block < first + self.block_count(folio)).then_some((first, folio))
    }

    fn folio_mut(&mut self, block: u64) -> Option<(u64, &mut Folio)> {
        let block_bytes = self.block_bytes;
        let (first, folio) = self.folios.at_or_before_mut(block)?;
        (block < first + len_u64(&folio.data) / block_bytes).then_some((first, folio))
    }

    fn block_count(&self, folio: &Folio) -> u64 {
        len_u64(&folio.data) / self.block_bytes
    }

    /// First blocks of the folios that share a block with `blocks`.
    fn firsts(&self, blocks: &Blocks) -> Vec<u64> {
        let start = self.folio(blocks.start).map_or(blocks.start, |(first, _)| first);
        self.folios.firsts(start, blocks.end)
    }

    pub(crate) fn is_uptodate(&self, block: u64) -> bool {
        self.folio(block).is_some_and(|(first, folio)| {
            folio.uptodate & mask(first, 32, &(block..block + 1)) != 0
        })
    }

    /// The first run of blocks in `blocks` that are not uptodate.
    pub(crate) fn missing(&self, blocks: Blocks) -> Option<Blocks> {
        let start = self.end_of_run(blocks.clone(), true);
        let end = self.end_of_run(start..blocks.end, false);
        (start < end).then_some(start..end)
    }

    /// Where the first run of `blocks` ends that are all uptodate, or all not.
    fn end_of_run(&self, blocks: Blocks, is_uptodate: bool) -> u64 {
        let mut at = blocks.start;
        while at < blocks.end {
            let count = match self.folio(at) {
                Some((first, folio)) => {
                    let left = first + self.block_count(folio) - at;
                    let bits = folio.uptodate >> (at - first);
                    let bits = if is_uptodate { bits } else { !bits };
                    let count = u64::from(bits.trailing_ones()).min(left);
                    if count < left {
                        return (at + count).min(blocks.end);
                    }
                    count
                }
                None if is_uptodate => break,
                None => self.folios.next(at).unwrap_or(u64::MAX).min(blocks.end) - at,
            };
            at += count;
        }
        at.min(blocks.end)
    }

    /// Copies bytes from `at` on, up to the first block that is not uptodate; returns how many. `passes` if who wants them goes through a
    /// file that memory cannot keep.
    pub(crate) fn copy_out(&mut self, at: u64, buffer: &mut [u8], passes: bool) -> usize {
        let block_bytes = self.block_bytes;
        let mut done = 0;
        while done < buffer.len() {
            let offset = at + u64::try_from(done).unwrap_or(u64::MAX);
            let Some((first, folio)) = self.folio_mut(offset / block_bytes) else { break };
            let in_folio = offset - first * block_bytes;
            let from_block = in_folio / block_bytes;
            let ready = u64::from((folio.uptodate >> from_block).trailing_ones());
            if ready == 0 {
                break;
            }
            folio.is_referenced = true;
            folio.is_wanted |= !passes;
            let end = ((from_block + ready) * block_bytes).min(len_u64(&folio.data));
            let part = &folio.data[index(in_folio)..index(end)];
            let len = part.len().min(buffer.len() - done);
            ubtrfs_cpu::copy(&mut buffer[done..done + len], &part[..len]);
            done += len;
        }
        done
    }

    /// Puts bytes into the range, makes its blocks uptodate and dirty. A block that is written in part is uptodate
    /// before, or reads as zeros: its other bytes become so.
    pub(crate) fn write(&mut self, start: u64, end: u64, source: Source<'_>) {
        let block_bytes = self.block_bytes;
        let blocks = start / block_bytes..end.div_ceil(block_bytes);
        self.void_reads(&blocks);
        let mut at = start;
        while at < end {
            let block = at / block_bytes;
            if self.folio(block).is_none() {
                let count = self.gap_blocks(block, blocks.end.max(self.append_end(block)));
                let (from, upto) = (block * block_bytes, (block + count) * block_bytes);
                match source {
                    Source::Bytes(bytes) if from == at && upto <= end => {
                        let bytes = &bytes[index(from - start)..index(upto - start)];
                        let data = self.usage.buffer_of(bytes);
                        let all = mask(block, count, &(block..block + count));
                        self.insert(block, Folio::new_dirty(data, all));
                        at = upto;
                        continue;
                    }
                    _ => {
                        let zeros = self.usage.zeroed_buffer(upto - from);
                        self.insert(block, Folio::new(zeros, 0));
                    }
                }
            }
            let (first, folio) = self.folio_mut(block).expect("a folio was put there");
            let folio_start = first * block_bytes;
            let folio_bytes = len_u64(&folio.data);
            let upto = end.min(folio_start + folio_bytes);
            let touched =
                mask(first, folio_bytes / block_bytes, &(block..upto.div_ceil(block_bytes)));
            let (from, to) = (index(at - folio_start), index(upto - folio_start));
            folio.uptodate |= touched;
            folio.dirty |= touched;
            folio.is_referenced = true;
            folio.is_wanted = true;
            let kept_bytes = match source {
                Source::Bytes(bytes) => {
                    let (data, kept_bytes) = folio.bytes_mut();
                    let bytes = &bytes[index(at - start)..index(upto - start)];
                    ubtrfs_cpu::copy(&mut data[from..to], bytes);
                    kept_bytes
                }
                Source::Zeros => {
                    let (data, kept_bytes) = folio.bytes_mut();
                    data[from..to].fill(0);
                    kept_bytes
                }
                Source::Same => 0,
            };
            self.count_kept(first, kept_bytes);
            at = upto;
        }
    }

    /// How far a new folio at `block` may reach beyond what is written now. Dirty data that goes on where the folio before ends is
    /// likely to go on further, so folios grow.
    fn append_end(&self, block: u64) -> u64 {
        let before = block.checked_sub(1).and_then(|last| self.folio(last));
        let Some((first, folio)) = before.filter(|(_, folio)| folio.dirty != 0) else { return 0 };
        block + (block - first).min(self.block_count(folio)) * 2
    }

    /// The blocks of a new folio at `block`, where there is none: as large as alignment, what lies behind and `end` allow.
    fn gap_blocks(&self, block: u64, end: u64) -> u64 {
        let next = self.folios.next(block).unwrap_or(u64::MAX);
        let mut count = self.folio_blocks_max;
        while count > 1 && (!block.is_multiple_of(count) || block + count > end.min(next)) {
            count /= 2;
        }
        count
    }

    /// The folios that `blocks`, none of which is uptodate, will be read into: where each begins, and its length in bytes.
    pub(crate) fn folios_for(&self, blocks: Blocks) -> Vec<(u64, u64)> {
        let mut folios = Vec::new();
        let mut at = blocks.start;
        while at < blocks.end {
            let count = self.gap_blocks(at, blocks.end);
            folios.push((at, count * self.block_bytes));
            at += count;
        }
        folios
    }

    /// Takes over what was read for the blocks from `first` on; blocks that are uptodate stay as they are.
    pub(crate) fn install(&mut self, first: u64, data: Arc<Buffer>) {
        let count = len_u64(&data) / self.block_bytes;
        let blocks = first..first + count;
        if self.firsts(&blocks).is_empty() {
            let all = mask(first, count, &blocks);
            self.insert(first, Folio::new(data, all));
            return;
        }
        for block in blocks.clone() {
            if self.is_uptodate(block) {
                continue;
            }
            let from = index((block - blocks.start) * self.block_bytes);
            let bytes = &data[from..from + index(self.block_bytes)];
            match self.folio_mut(block) {
                Some((first, folio)) => {
                    let at = index((block - first) * len_u64(bytes));
                    folio.uptodate |= mask(first, FOLIO_BLOCKS_MAX, &(block..block + 1));
                    let (into, kept_bytes) = folio.bytes_mut();
                    into[at..at + bytes.len()].copy_from_slice(bytes);
                    self.count_kept(first, kept_bytes);
                }
                None => {
                    let data = self.usage.buffer_of(bytes);
                    self.insert(block, Folio::new(data, 1));
                }
            }
        }
    }

    /// Zeroes what the block that holds `size` has behind it, if it is in memory.
    pub(crate) fn zero_tail(&mut self, size: u64) {
        let block_bytes = self.block_bytes;
        let block = size / block_bytes;
        if size.is_multiple_of(block_bytes) || !self.is_uptodate(block) {
            return;
        }
        let Some((first, folio)) = self.folio_mut(block) else { return };
        let start = first * block_bytes;
        let tail = index(size - start)..index((block + 1) * block_bytes - start);
        if folio.data[tail.clone()].iter().any(|byte| *byte != 0) {
            let (data, kept_bytes) = folio.bytes_mut();
            data[tail].fill(0);
            self.count_kept(first, kept_bytes);
        }
    }

    /// The folio at `first` got a copy of its own, and the version before stays so long as a writeback of it is under way.
    fn count_kept(&mut self, first: u64, kept_bytes: usize) {
        if kept_bytes == 0 {
            return;
        }
        let len_bytes = u64::try_from(kept_bytes).unwrap_or(u64::MAX);
        let end = first + len_bytes / self.block_bytes;
        let has_it = |writeback: &&mut WritebackUnderWay| {
            writeback.blocks.start < end && first < writeback.blocks.end
        };
        // Should there be several of one folio, they mostly end together.
        let last = self.writebacks.iter_mut().filter(has_it).max_by_key(|other| other.ticket);
        if let Some(writeback) = last {
            writeback.kept_bytes += len_bytes;
            self.usage.cached_bytes.fetch_add(len_bytes, Ordering::Relaxed);
        }
    }

    /// Takes out a writeback under way, with what was kept for it; its blocks.
    fn take_writeback(&mut self, ticket: u64) -> Option<Blocks> {
        let at = self.writebacks.iter().position(|other| other.ticket == ticket)?;
        let writeback = self.writebacks.swap_remove(at);
        self.usage.cached_bytes.fetch_sub(writeback.kept_bytes, Ordering::Relaxed);
        Some(writeback.blocks)
    }

    /// The bytes of `blocks`, all dirty, which are no longer that, but under writeback until
    /// [`Pages::end_writeback()`] with the ticket.
    pub(crate) fn begin_writeback(&mut self, blocks: &Blocks) -> (u64, Vec<FolioPart>) {
        let block_bytes = self.block_bytes;
        let mut parts = Vec::new();
        for first in self.firsts(blocks) {
            let Some(folio) = self.folios.get_mut(first) else { continue };
            let count = len_u64(&folio.data) / block_bytes;
            let bits = mask(first, count, blocks);
            debug_assert!(folio.dirty & bits == bits, "writeback of blocks that are not dirty");
            debug_assert!(folio.writeback & bits == 0, "two writebacks of a block at once");
            folio.dirty &= !bits;
            folio.writeback |= bits;
            let from = blocks.start.max(first) - first;
            let upto = blocks.end.min(first + count) - first;
            let bytes = index(from * block_bytes)..index(upto * block_bytes);
            parts.push(FolioPart { data: Arc::clone(&folio.data), bytes });
        }
        let ticket = self.next_id;
        self.next_id += 1;
        let blocks = blocks.clone();
        self.writebacks.push(WritebackUnderWay { ticket, blocks, kept_bytes: 0 });
        (ticket, parts)
    }

    /// What was under writeback is not any more, and is stored.
    pub(crate) fn end_writeback(&mut self, ticket: u64) {
        let Some(blocks) = self.take_writeback(ticket) else { return };
        for first in self.firsts(&blocks) {
            let Some(folio) = self.folios.get_mut(first) else { continue };
            folio.writeback &= !mask(first, FOLIO_BLOCKS_MAX, &blocks);
        }
    }

    /// What was under writeback is not any more, and is not stored. Memory must not go on to show what the medium does not hold: blocks
    /// that were not written again since are dropped, but for `kept`, which are dirty again.
    pub(crate) fn lose_writeback(&mut self, ticket: u64, kept: &Blocks) {
        let Some(blocks) = self.take_writeback(ticket) else { return };
        self.abandoned_count += u64::from(!kept.is_empty());
        for first in self.firsts(&blocks) {
            let Some(folio) = self.folios.get_mut(first) else { continue };
            let bits = mask(first, FOLIO_BLOCKS_MAX, &blocks);
            folio.dirty |= bits & folio.writeback & mask(first, FOLIO_BLOCKS_MAX, kept);
            folio.writeback &= !bits;
            let lost = bits & !folio.dirty;
            self.forget(first, lost);
        }
    }

    /// What was under writeback is not any more, and is dirty again, but for blocks that are stored.
    pub(crate) fn abandon_writeback(&mut self, ticket: u64, stored: &[Blocks]) {
        let Some(blocks) = self.take_writeback(ticket) else { return };
        self.abandoned_count += 1;
        for first in self.firsts(&blocks) {
            let Some(folio) = self.folios.get_mut(first) else { continue };
            let bits = mask(first, FOLIO_BLOCKS_MAX, &blocks) & folio.writeback;
            let clean =
                stored.iter().fold(0, |all, part| all | mask(first, FOLIO_BLOCKS_MAX, part));
            folio.writeback &= !bits;
            folio.dirty |= bits & !clean;
        }
    }

    /// How many writebacks were abandoned so far.
    pub(crate) fn abandoned_count(&self) -> u64 {
        self.abandoned_count
    }

    /// Whether a writeback that began before `ticket` is under way in `blocks`.
    pub(crate) fn has_writeback(&self, blocks: &Blocks, ticket: u64) -> bool {
        self.writebacks.iter().any(|other| {
            other.ticket < ticket
                && other.blocks.start < blocks.end
                && blocks.start < other.blocks.end
        })
    }

    /// The ticket that the next writeback will have.
    pub(crate) fn next_ticket(&self) -> u64 {
        self.next_id
    }

    /// Drops blocks, dirty ones too; none of them is under writeback.
    pub(crate) fn drop_blocks(&mut self, blocks: &Blocks) -> Gone {
        self.void_reads(blocks);
        let mut gone = Gone::new();
        for first in self.firsts(blocks) {
            let Some(folio) = self.folios.get_mut(first) else { continue };
            let bits = mask(first, FOLIO_BLOCKS_MAX, blocks);
            debug_assert!(folio.writeback & bits == 0, "dropped under writeback");
            folio.dirty &= !bits;
            gone.extend(self.forget(first, bits));
        }
        gone
    }

    /// Notes that `blocks` are being read. `None` if somebody else reads some of them already.
    pub(crate) fn begin_read(&mut self, blocks: Blocks) -> Option<u64> {
        let overlaps = |read: &ReadUnderWay| {
            read.is_valid && read.blocks.start < blocks.end && blocks.start < read.blocks.end
        };
        if self.reads.iter().any(overlaps) {
            return None;
        }
        let id = self.next_id;
        self.next_id += 1;
        self.reads.push(ReadUnderWay { id, blocks, is_valid: true });
        Some(id)
    }

    /// The read ended; whether what it read still is what the blocks hold.
    pub(crate) fn end_read(&mut self, id: u64) -> bool {
        let Some(at) = self.reads.iter().position(|read| read.id == id) else { return false };
        self.reads.swap_remove(at).is_valid
    }

    fn void_reads(&mut self, blocks: &Blocks) {
        for read in &mut self.reads {
            if read.blocks.start < blocks.end && blocks.start < read.blocks.end {
                read.is_valid = false;
            }
        }
    }

    fn insert(&mut self, first: u64, folio: Folio) {
        self.usage.cached_bytes.fetch_add(len_u64(&folio.data), Ordering::Relaxed);
        self.folios.insert(first, folio);
    }

    fn remove(&mut self, first: u64) -> Option<Arc<Buffer>> {
        let folio = self.folios.remove(first)?;
        self.usage.cached_bytes.fetch_sub(len_u64(&folio.data), Ordering::Relaxed);
        Some(folio.data)
    }

    /// Blocks of a folio are not uptodate any more; bytes of such blocks are zero. Returns what a folio had that goes.
    fn forget(&mut self, first: u64, bits: u32) -> Option<Arc<Buffer>> {
        let block_bytes = index(self.block_bytes);
        let folio = self.folios.get_mut(first)?;
        // Others are zero already. To look at no more than that matters where a file is cut again and again.
        let bits = bits & folio.uptodate;
        folio.uptodate &= !bits;
        if folio.uptodate == 0 {
            return self.remove(first);
        }
        if bits == 0 {
            return None;
        }
        let (data, kept_bytes) = folio.bytes_mut();
        for (at, block) in data.chunks_exact_mut(block_bytes).enumerate() {
            if bits >> at & 1 == 1 {
                block.fill(0);
            }
        }
        self.count_kept(first, kept_bytes);
        None
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let kept: u64 = self.writebacks.iter().map(|writeback| writeback.kept_bytes).sum();
        let cached: u64 = self.folios.values().map(|folio| len_u64(&folio.data)).sum();
        let cached = cached + kept;
        self.usage.cached_bytes.fetch_sub(cached, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage() -> Arc<Usage> {
        Arc::new(Usage::new(&CacheOptions::default()))
    }

    #[test]
    fn folios_grow_as_a_file_is_appended_to() {
        let usage = usage();
        let mut pages = Pages::new(4096, 128 * 1024, Arc::clone(&usage));
        for block in 0..256 {
            pages.write(block * 4096, (block + 1) * 4096, Source::Bytes(&[1; 4096]));
        }
        let sizes: Vec<usize> =
            pages.folios.values().map(|folio| folio.data.len() / 4096).collect();
        assert_eq!(sizes.iter().sum::<usize>(), 256);
        assert!(sizes.len() <= 20, "{sizes:?}");
        assert_eq!(usage.cached_bytes(), 256 * 4096);
    }

    /// Blocks of a folio that nobody has written are zeros, whatever its memory held before.
    #[test]
    fn folio_of_used_memory_has_zeros_where_nothing_was_written() {
        let usage = usage();
        let mut pages = Pages::new(4096, 1 << 16, Arc::clone(&usage));
        pages.write(0, 1 << 20, Source::Bytes(&[7; 1 << 20]));
        let before: Vec<*const u8> =
            pages.folios.values().map(|folio| folio.data.as_ptr()).collect();
        drop(pages.drop_blocks(&(0..256)));
        pages.write(1 << 16, (1 << 16) + 4096, Source::Bytes(&[1; 4096]));
        pages.write(1 << 17, (1 << 17) + (1 << 15), Source::Bytes(&[1; 1 << 15]));
        pages.write(1 << 18, (1 << 18) + 5, Source::Bytes(&[1; 5]));
        // What goes on where dirty data ends has a folio that reaches further.
        pages.write(3 << 17, (3 << 17) + 8192, Source::Bytes(&[1; 8192]));
        pages.write((3 << 17) + 8192, (3 << 17) + 8193, Source::Bytes(&[1]));
        let written: Vec<usize> = pages
            .folios
            .values()
            .map(|folio| {
                let written = folio.data.iter().take_while(|byte| **byte == 1).count();
                assert!(folio.data[written..].iter().all(|byte| *byte == 0));
                written
            })
            .collect();
        assert_eq!(written, [4096, 1 << 15, 5, 8192, 1]);
        let last = pages.folios.values().last().unwrap();
        assert_eq!((last.data.len(), last.uptodate), (8192, 1));
        assert!(
            pages.folios.values().any(|folio| before.contains(&folio.data.as_ptr())),
            "used again"
        );
        let zeros: Arc<Buffer> = usage.zeroed_buffer(1 << 16);
        assert!(zeros.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn blocks_far_apart_have_folios_of_their_own() {
        let usage = usage();
        let mut pages = Pages::new(4096, 128 * 1024, Arc::clone(&usage));
        for block in 0..64 {
            pages.write(block * 8192, block * 8192 + 4096, Source::Bytes(&[1; 4096]));
        }
        assert_eq!(usage.cached_bytes(), 64 * 4096);
        let mut bytes = [0; 8192];
        assert_eq!(pages.copy_out(0, &mut bytes, false), 4096);
        drop(pages);
        assert_eq!(usage.cached_bytes(), 0);
    }
}
