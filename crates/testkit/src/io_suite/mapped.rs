//! Threads that access a file as memory, beside what takes blocks from under their maps.
//!
//! The file has three parts. The first is stored to by one owner only, all of it at once. In the second each block has parts of several
//! owners, and nothing is ever made zero, so that each store stays until the next one. In the third, which is like that, a thread cuts the
//! file off and makes it longer again, punches holes and zeroes.

use std::sync::atomic::{AtomicU64, Ordering};

use ubtrfs_iomap::{CacheOptions, Error, FileRange, Reach};

use super::concurrency::{beside, concurrent_rounds, disturb};
use super::counts::{Count, Running, count};
use super::model::index;
use super::random::random_by_number;
use super::{DataFile, Done, Harness, Refusal, contents, judge_files, little_memory};
use crate::iomap_model::{at, range};
use crate::prng::Prng;

const BLOCKS: u64 = 28;
/// Blocks that are stored to at once.
const WIDE_BLOCKS: u64 = 6;
/// Behind these blocks things are made zero.
const KEPT_BLOCKS: u64 = 14;
const OWNERS: u64 = 3;
/// Of each block the owners have so many parts, and nobody has the last one.
const PARTS: u64 = OWNERS + 1;
/// Blocks that are cut at once, at most.
const CUT_BLOCKS_MAX: u64 = 5;

/// What may be in which block by now.
struct Board {
    block: u64,
    /// Stores of each owner in each block that have begun.
    begun: Vec<AtomicU64>,
    /// The last of them that has ended well.
    ended: Vec<AtomicU64>,
    /// The same of stores to all of the first blocks.
    wide_begun: AtomicU64,
    wide_ended: AtomicU64,
    /// How often something began or ended that makes bytes of a block zero: odd meanwhile.
    cuts: Vec<AtomicU64>,
}

/// What an owner stores, the how manieth it is in that block.
fn value(store: u64) -> u8 {
    match store.checked_sub(1) {
        None => 0,
        Some(before) => u8::try_from(before % 255 + 1).expect("a byte"),
    }
}

fn counters(count: u64) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// The number of a part among all.
fn part_of(owner: u64, block: u64) -> usize {
    index(owner * BLOCKS + block)
}

impl Board {
    fn new(block: u64) -> Self {
        let parts = OWNERS * BLOCKS;
        Self {
            block,
            begun: counters(parts),
            ended: counters(parts),
            wide_begun: AtomicU64::new(0),
            wide_ended: AtomicU64::new(0),
            cuts: counters(BLOCKS),
        }
    }

    fn size(&self) -> u64 {
        BLOCKS * self.block
    }

    fn part_bytes(&self) -> u64 {
        self.block / PARTS
    }

    /// The whole file.
    fn map(&self) -> FileRange {
        range(0, self.size())
    }

    /// What is stored to at once: with ends inside of blocks.
    fn wide(&self) -> FileRange {
        range(100, WIDE_BLOCKS * self.block - 100)
    }

    fn ended(&self, block: u64) -> Vec<u64> {
        (0..OWNERS).map(|owner| self.ended[part_of(owner, block)].load(Ordering::SeqCst)).collect()
    }

    fn cuts(&self, block: u64) -> u64 {
        self.cuts[index(block)].load(Ordering::SeqCst)
    }

    /// That a part of a block is of a store that had not been followed by another when it was looked for; or zero, where that may be.
    fn assert_no_older(&self, block: u64, owner: u64, bytes: &[u8], ended: u64, may_be_zero: bool) {
        let begun = self.begun[part_of(owner, block)].load(Ordering::SeqCst);
        let is_right =
            |byte: &u8| may_be_zero && *byte == 0 || (ended..=begun).any(|at| value(at) == *byte);
        if let Some(wrong) = bytes.iter().find(|byte| !is_right(byte)) {
            panic!("{wrong} in block {block} of owner {owner}, of stores {ended} to {begun}");
        }
    }
}

/// Who stores in a part of each block, and what he knows to be there: his last store, and how often something had been cut then.
struct Owner<'a, H: Harness> {
    harness: &'a H,
    board: &'a Board,
    file: &'a H::File,
    number: u64,
    known: Vec<Option<(u64, u64)>>,
}

impl<H: Harness> Owner<'_, H> {
    fn is_beyond(&self, result: Result<(), <H::File as DataFile>::Error>) -> bool {
        match result.map_err(|error| self.harness.refusal(&error)) {
            Ok(()) => false,
            Err(Refusal::Request(Error::BeyondEnd { .. })) => true,
            Err(refusal) => panic!("{refusal:?}"),
        }
    }

    /// What is refused because the block is beyond the end must have been cut off at that time.
    fn assert_was_cut(&self, block: u64, cuts: u64) {
        let is_cut = cuts % 2 == 1 || self.board.cuts(block) != cuts;
        assert!(block >= KEPT_BLOCKS && is_cut, "block {block} was not beyond the end");
    }

    fn store(&mut self, block: u64, faults_first: bool) {
        let (board, file) = (self.board, self.file);
        let part = part_of(self.number, block);
        let start = at(block * board.block + self.number * board.part_bytes());
        let cuts = board.cuts(block);
        if faults_first && self.is_beyond(file.fault_for_write(board.map(), start)) {
            return self.assert_was_cut(block, cuts);
        }
        let store = board.begun[part].fetch_add(1, Ordering::SeqCst) + 1;
        let bytes = vec![value(store); index(board.part_bytes())];
        if self.is_beyond(file.store(board.map(), start, &bytes)) {
            return self.assert_was_cut(block, cuts);
        }
        board.ended[part].store(store, Ordering::SeqCst);
        let was_alone = cuts.is_multiple_of(2) && board.cuts(block) == cuts;
        self.known[index(block)] = was_alone.then_some((store, cuts));
    }

    fn store_wide(&self) {
        let board = self.board;
        let store = board.wide_begun.fetch_add(1, Ordering::SeqCst) + 1;
        let bytes = vec![value(store); index(board.wide().len_bytes())];
        self.file.store(board.map(), board.wide().start, &bytes).unwrap();
        board.wide_ended.store(store, Ordering::SeqCst);
    }

    /// It is of one store, and of none that is older than the last one that had ended.
    fn look_at_wide(&self) {
        let board = self.board;
        let ended = board.wide_ended.load(Ordering::SeqCst);
        let mut bytes = vec![0xEE; index(board.wide().len_bytes())];
        self.file.load(board.map(), board.wide().start, &mut bytes).unwrap();
        let begun = board.wide_begun.load(Ordering::SeqCst);
        let other = bytes.iter().position(|byte| *byte != bytes[0]);
        assert!(other.is_none(), "a store was seen in part, up to {other:?}");
        let is_right = (ended..=begun).any(|store| value(store) == bytes[0]);
        assert!(is_right, "{}, of stores {ended} to {begun}", bytes[0]);
    }

    /// Loads a block, or reads it, and looks at all parts of it.
    fn look(&self, block: u64, loads: bool) {
        let (board, file) = (self.board, self.file);
        let (cuts, ended) = (board.cuts(block), board.ended(block));
        let mut bytes = vec![0xEE; index(board.block)];
        let start = at(block * board.block);
        if loads {
            if self.is_beyond(file.load(board.map(), start, &mut bytes)) {
                return self.assert_was_cut(block, cuts);
            }
        } else {
            // Shorter where the file is cut off just then.
            let len = file.read(start, &mut bytes).unwrap();
            bytes[len..].fill(0);
        }
        let is_kept = block < KEPT_BLOCKS;
        let parts = bytes.chunks(index(board.part_bytes()));
        for (owner, (part, ended)) in (0..).zip(parts.zip(ended)) {
            board.assert_no_older(block, owner, part, ended, !is_kept);
            let is_whole = part.iter().all(|byte| *byte == part[0]);
            assert!(!is_kept || is_whole, "block {block}: a store of {owner} was seen in part");
        }
        let unowned = &bytes[index(OWNERS * board.part_bytes())..];
        assert!(unowned.iter().all(|byte| *byte == 0), "block {block}: what nobody stored");
        if let Some((store, since)) = self.known[index(block)]
            && board.cuts(block) == since
        {
            let own = index(self.number * board.part_bytes());
            let own = &bytes[own..own + index(board.part_bytes())];
            let other = own.iter().find(|byte| **byte != value(store));
            assert!(other.is_none(), "block {block}: {other:?} instead of {}", value(store));
        }
    }
}

/// Makes bytes of the last part zero, by any means, and looks that they are.
fn cut<H: Harness>(harness: &H, board: &Board, file: &H::File, random: &mut Prng) {
    let front = KEPT_BLOCKS * board.block;
    let start = front + random.below(board.size() - front);
    let kind = random.below(4);
    let end = match kind {
        0 => board.size(),
        _ => (start + 1 + random.below(CUT_BLOCKS_MAX * board.block)).min(board.size()),
    };
    let touched = start / board.block..end.div_ceil(board.block);
    let note = |cuts: &AtomicU64| _ = cuts.fetch_add(1, Ordering::SeqCst);
    let cuts = &board.cuts[index(touched.start)..index(touched.end)];
    cuts.iter().for_each(note);
    let ended: Vec<_> = touched.clone().map(|block| board.ended(block)).collect();
    match kind {
        0 => {
            file.truncate(at(start)).unwrap();
            let beyond = at(start.next_multiple_of(board.block));
            let refused = [
                file.load(board.map(), beyond, &mut [0]),
                file.fault_for_read(board.map(), beyond),
                file.fault_for_write(board.map(), beyond),
            ];
            for result in refused {
                let error = Error::BeyondEnd { offset: beyond, size: at(start) };
                let result = result.map_err(|error| harness.refusal(&error));
                assert_eq!(result, Err(Refusal::Request(error)));
            }
            std::thread::yield_now();
            file.truncate(at(board.size())).unwrap();
        }
        1 => file.punch_hole(at(start), end - start).unwrap(),
        2 => file.zero_range(at(start), end - start).unwrap(),
        _ => file.allocate_zeroed(at(start), end - start, Reach::Stays).unwrap(),
    }
    cuts.iter().for_each(note);
    for (block, ended) in touched.zip(ended) {
        let mut bytes = vec![0xEE; index(board.block)];
        file.load(board.map(), at(block * board.block), &mut bytes).unwrap();
        for (owner, ended) in (0..).zip(ended) {
            let part = block * board.block + owner * board.part_bytes();
            let zeroed = start.max(part)..end.min(part + board.part_bytes());
            if zeroed.is_empty() {
                continue;
            }
            let within = |offset: u64| index(offset - block * board.block);
            let zeroed = &bytes[within(zeroed.start)..within(zeroed.end)];
            // What was stored before is gone.
            board.assert_no_older(block, owner, zeroed, ended + 1, true);
        }
    }
}

/// Stores, loads, faults and msync of threads, each of which owns its bytes, beside truncation, holes, zeroing, writeback, reclaim and
/// commits: a load shows no older store than the last one that had ended, what was made zero stays so until something is
/// stored there, what lies beyond the end is refused, and nothing is lost that was not cut. What is there at last is what
/// reads, another open file and a crash behind msync show.
///
/// # Panics
/// If it is not so.
pub fn mapped_access_of_threads_beside_truncation_and_holes_is_exact<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let _running = Running::new();
    let passing = CacheOptions { keeps_clean: false, ..little_memory(4096) };
    for options in [little_memory(4096), passing] {
        let mut harness = make(options);
        let board = Board::new(harness.block_bytes());
        let inode = harness.create();
        let disturber = harness.open(&inode);
        disturber.truncate(at(board.size())).unwrap();
        let rounds = concurrent_rounds::<H>(100);
        let work = |thread: u64| {
            let own = harness.open(&inode);
            // Two share an open file, as two that map it may.
            let file = if thread < 2 { &disturber } else { &own };
            let mut random = random_by_number(thread);
            let known = vec![None; index(BLOCKS)];
            let mut owner = Owner { harness: &harness, board: &board, file, number: thread, known };
            for _ in 0..rounds {
                if thread == OWNERS {
                    cut(&harness, &board, file, &mut random);
                    continue;
                }
                let block = WIDE_BLOCKS + random.below(BLOCKS - WIDE_BLOCKS);
                match random.below(16) {
                    0 | 1 if thread == 0 => owner.store_wide(),
                    0 | 1 => owner.look_at_wide(),
                    2..=6 => owner.store(block, random.chance(1, 3)),
                    7..=12 => owner.look(block, random.chance(3, 4)),
                    13 | 14 => {
                        let cuts = board.cuts(block);
                        if owner
                            .is_beyond(file.fault_for_read(board.map(), at(block * board.block)))
                        {
                            owner.assert_was_cut(block, cuts);
                        }
                    }
                    _ => {
                        let part = FileRange::with_len(at(block * board.block), 3 * board.block);
                        file.msync(board.map(), part).unwrap();
                    }
                }
            }
            if thread < OWNERS {
                (WIDE_BLOCKS..BLOCKS).for_each(|block| owner.look(block, true));
            }
            count(Count::ConcurrentRounds, rounds);
        };
        beside(OWNERS + 1, work, |round| disturb(&harness, &inode, &disturber, round));
        let mut last = contents(&disturber);
        let mut loaded = vec![0; last.len()];
        disturber.load(board.map(), at(0), &mut loaded).unwrap();
        assert!(loaded == last, "a load and a read differ");
        // Few enough to be dirty still.
        for block in [0, WIDE_BLOCKS, BLOCKS - 1] {
            let offset = block * board.block + 200;
            disturber.store(board.map(), at(offset), &[0xFE; 300]).unwrap();
            last[index(offset)..index(offset + 300)].fill(0xFE);
        }
        disturber.msync(board.map(), board.map()).unwrap();
        drop(disturber);
        if harness.crash() == Done::NotSupported {
            harness.reopen();
        }
        assert!(contents(&harness.open(&inode)) == last, "what msync made durable");
        judge_files(&mut harness, &[inode]);
    }
}
