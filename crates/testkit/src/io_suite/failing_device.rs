//! Threads at one file while the device fails writes of data now and then.

use std::collections::BTreeSet;

use ubtrfs_iomap::{CacheOptions, FileOffset, FileRange, Reach};

use super::concurrency::{beside, concurrent_rounds};
use super::counts::{Count, Running, count};
use super::random::random_by_number;
use super::{DataFile, Done, Harness, contents, judge_files, little_memory};
use crate::iomap_model::at;
use crate::prng::Prng;

/// Whole blocks of the file, each of them one thread's; behind them is the one in which it ends, of a thread of its own.
const BLOCKS: u64 = 24;
const OWNERS: u64 = 3;
/// What is written to the block in which the file ends.
const TAIL_BYTE: u8 = 0xee;

/// What may be in a block that one thread alone writes, whole each time: how often it had been written, or 0 for zeros.
#[derive(Debug, Default)]
struct Model {
    now: u64,
    /// All that were there since the block was last known to be durable, and what was there then.
    since_durable: BTreeSet<u64>,
    /// Somebody was told of a loss, or of a change that failed, since it was last looked at.
    is_unsure: bool,
}

/// A thread with blocks of its own.
struct Owner<'a, H: Harness> {
    file: &'a H::File,
    number: u64,
    block_bytes: u64,
    models: Vec<Model>,
    random: Prng,
    last_version: u64,
}

impl<H: Harness> Owner<'_, H> {
    fn stamp(&self, version: u64) -> u64 {
        if version == 0 { 0 } else { (self.number + 1) << 32 | version }
    }

    fn start(&self, own: usize) -> u64 {
        (u64::try_from(own).expect("few blocks") * OWNERS + self.number) * self.block_bytes
    }

    /// Which of its versions a block has.
    fn version_of(&self, bytes: &[u8]) -> u64 {
        let stamp: [u8; 8] = bytes[..8].try_into().expect("eight bytes");
        assert!(bytes.chunks(8).all(|other| other == stamp), "a block is torn");
        let stamp = u64::from_le_bytes(stamp);
        let version = stamp & u64::from(u32::MAX);
        assert_eq!(stamp, self.stamp(version), "another's bytes");
        version
    }

    /// The file was told that something is lost, or that a change of its own failed.
    fn is_told(&mut self) {
        self.models.iter_mut().for_each(|model| model.is_unsure = true);
    }

    /// What is not as this thread left it is as it was once, and this thread is told of a loss by now.
    fn excuse(&mut self, own: usize, what: &str) {
        if !self.models[own].is_unsure {
            // Whoever's writeback lost it may be about to say so.
            let _ = self.file.flush(FileRange::with_len(at(self.start(own)), self.block_bytes));
            let told = self.file.take_error();
            assert!(told.is_err(), "block {own} of {}: {what}, and no loss is told", self.number);
            self.is_told();
        }
    }

    fn look(&mut self, own: usize) {
        let start = self.start(own);
        let mut bytes = vec![0; usize::try_from(self.block_bytes).expect("a block is small")];
        let read = match self.random.chance(1, 3) {
            // What is dirty is written first, which may fail.
            true => match self.file.direct_read(at(start), &mut bytes) {
                Ok(read) => read,
                Err(_) => return,
            },
            false => self.file.read(at(start), &mut bytes).expect("no read fails"),
        };
        assert_eq!(read, bytes.len());
        let found = self.version_of(&bytes);
        let expected = self.models[own].now;
        if found != expected {
            self.excuse(own, &format!("{found} instead of {expected}"));
        }
        let model = &mut self.models[own];
        assert!(
            model.since_durable.contains(&found),
            "block {own} of {}: {found} of {model:?}",
            self.number
        );
        (model.now, model.is_unsure) = (found, false);
        if found != 0 && self.file.seek_data(at(start)).expect("no look fails") != at(start) {
            self.excuse(own, "no data by seek");
        }
    }

    fn change(&mut self, own: usize) {
        let start = at(self.start(own));
        let kind = self.random.below(6);
        let version = if kind < 3 { self.last_version + 1 } else { 0 };
        self.last_version = self.last_version.max(version);
        let len = self.block_bytes;
        let bytes =
            self.stamp(version).to_le_bytes().repeat(usize::try_from(len / 8).expect("few"));
        let changed = match kind {
            0 | 1 => self.file.write(start, &bytes).map(|written| assert_eq!(written, bytes.len())),
            2 => {
                let written = self.file.direct_write(start, &bytes);
                written.map(|written| assert_eq!(written, bytes.len()))
            }
            3 => self.file.zero_range(start, len),
            4 => self.file.punch_hole(start, len),
            _ => self.file.allocate_zeroed(start, len, Reach::Stays),
        };
        let model = &mut self.models[own];
        model.since_durable.insert(version);
        match changed {
            Ok(()) => (model.now, model.is_unsure) = (version, false),
            Err(_) => model.is_unsure = true,
        }
    }

    fn sync(&mut self) {
        if self.file.fsync().is_err() {
            self.is_told();
            return;
        }
        for model in self.models.iter_mut().filter(|model| !model.is_unsure) {
            model.since_durable = BTreeSet::from([model.now]);
        }
    }

    fn run(&mut self, rounds: u64) {
        let blocks = u64::try_from(self.models.len()).expect("few blocks");
        for _ in 0..rounds {
            let own = usize::try_from(self.random.below(blocks)).expect("few blocks");
            self.look(own);
            match self.random.below(8) {
                0 => self.sync(),
                _ => self.change(own),
            }
        }
        (0..self.models.len()).for_each(|own| self.look(own));
    }
}

/// Cuts and writes the block in which the file ends; each may be refused as it cannot be written.
fn change_tail<F: DataFile>(file: &F, block_bytes: u64, random: &mut Prng) {
    let start = BLOCKS * block_bytes;
    let end = start + 1 + random.below(block_bytes);
    let mut bytes = vec![TAIL_BYTE; usize::try_from(end - start).expect("a block is small")];
    let _ = match random.below(3) {
        0 => file.truncate(at(end)),
        1 => file.write(at(start), &bytes).map(drop),
        _ => file.fsync(),
    };
    let read = file.read(at(start), &mut bytes).expect("no read fails");
    let is_one = |byte: &u8| [0, TAIL_BYTE].contains(byte);
    assert!(bytes[..read].iter().all(is_one), "others' bytes at the end");
}

/// While the device fails writes now and then, and writeback, reclaim and commits go on, each thread finds its blocks as it left them, or else
/// is told of a loss, and then as they were some time since they were durable: never torn, another's, or older. A device that is well again
/// leaves a file that is in order, which takes the space that it has.
///
/// # Panics
/// If it is not so.
pub fn failing_device_takes_no_more_from_threads_than_is_told<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let _running = Running::new();
    let rounds = concurrent_rounds::<H>(40);
    let mut harness = make(little_memory(4096));
    if harness.fail_data_writes(None) == Done::NotSupported {
        return;
    }
    let block_bytes = harness.block_bytes();
    let inode = harness.create();
    let file = harness.open(&inode);
    file.truncate(at(BLOCKS * block_bytes + 1000)).unwrap();
    file.fsync().unwrap();
    let work = |number: u64| {
        let own = harness.open(&inode);
        let mut random = random_by_number(number);
        if number == OWNERS {
            (0..rounds).for_each(|_| change_tail(&own, block_bytes, &mut random));
        } else {
            let durable = || Model { since_durable: BTreeSet::from([0]), ..Model::default() };
            let models = (0..BLOCKS / OWNERS).map(|_| durable()).collect();
            let file = &own;
            Owner::<H> { file, number, block_bytes, models, random, last_version: 0 }.run(rounds);
        }
        count(Count::ConcurrentRounds, rounds);
    };
    let all = FileRange::from(FileOffset::ZERO);
    let trouble = |round: u64| {
        match round % 8 {
            0 => _ = harness.fail_data_writes(Some(round / 8 % 5)),
            5 => _ = harness.fail_data_writes(None),
            _ => {}
        }
        match round % 4 {
            0 => harness.background_pass(round * 10_000),
            1 => _ = file.flush(all),
            2 => harness.reclaim(),
            _ => harness.commit(),
        }
    };
    beside(OWNERS + 1, work, trouble);
    harness.fail_data_writes(None);
    assert!(harness.failures() > 0, "no write failed");
    // What could not be written can be now; what was lost is told once.
    let _ = file.fsync();
    file.fsync().unwrap();
    let (bytes, taken_bytes) = (contents(&file), harness.taken_bytes(&inode));
    drop(file);
    harness.reopen();
    assert!(contents(&harness.open(&inode)) == bytes);
    assert_eq!(harness.taken_bytes(&inode), taken_bytes);
    judge_files(&mut harness, &[inode]);
}
