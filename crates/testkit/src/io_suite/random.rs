//! Random operations on several files, beside plain byte arrays.

use ubtrfs_iomap::{CacheAblation, CacheOptions, Error, Reach};

use super::content::{Grain, Stamp, assert_same};
use super::counts::{Count, Running, asked, count};
use super::model::{Model, index};
use super::restless::Restless;
use super::{DataFile, Done, Harness, Look, Refusal};
use crate::iomap_model::{at, range};
use crate::prng::Prng;

/// Blocks that a file has at most, and a long one.
const BLOCKS_MAX: u64 = 40;
const LONG_BLOCKS_MAX: u64 = 400;
/// One with extents as long as they become.
const LONGEST_BLOCKS_MAX: u64 = 8192;
/// With so many steps a device has failed.
const STEPS_WITH_FAILURES: usize = 1000;

/// One random run.
#[derive(Clone, Debug)]
pub struct RandomRun {
    /// What decides all.
    pub seed: u64,
    /// Operations.
    pub steps: usize,
    /// Files.
    pub files: usize,
    /// Every so many steps everything is compared.
    pub check_every: usize,
    /// Blocks that a file has at most.
    pub blocks_max: u64,
}

impl RandomRun {
    /// Three files, all compared often; of one seed in eight long ones.
    pub fn new(seed: u64, steps: usize) -> Self {
        let blocks_max = if seed % 8 == 3 { LONG_BLOCKS_MAX } else { BLOCKS_MAX };
        Self { seed, steps, files: 3, check_every: 16, blocks_max }
    }
}

pub(super) struct Subject<H: Harness> {
    pub(super) inode: H::Inode,
    /// `None` only while the filesystem is opened anew.
    pub(super) file: Option<H::File>,
    pub(super) model: Model,
}

impl<H: Harness> Subject<H> {
    pub(super) fn file(&self) -> &H::File {
        self.file.as_ref().expect("it is open between steps")
    }

    pub(super) fn fsync(&mut self) {
        self.file().fsync().unwrap();
        self.model.synced();
    }
}

pub(super) struct Run<H: Harness> {
    /// Before the filesystem, which is to have no file open when it goes.
    pub(super) subjects: Vec<Subject<H>>,
    pub(super) harness: H,
    pub(super) random: Prng,
    pub(super) block: u64,
    pub(super) now_ms: u64,
    /// Writes that the device failed.
    pub(super) failures: u64,
    blocks_max: u64,
    /// Writes so far.
    version: u32,
}

/// Runs `run.steps` random operations on the files of a filesystem: all that [`DataFile`] has, with writeback, reclaim,
/// commits, reopening, crashes and failing devices between them, as far as the harness can.
///
/// # Panics
/// If anything is not as the model says.
pub fn random_run<H: Harness>(harness: H, run: &RandomRun) {
    println!("{run:?}");
    let block = harness.block_bytes();
    let subjects = (0..run.files)
        .map(|_| {
            let inode = harness.create();
            let file = Some(harness.open(&inode));
            Subject { inode, file, model: Model::new(block) }
        })
        .collect();
    let mut this = Run {
        harness,
        random: Prng::new(run.seed),
        block,
        subjects,
        now_ms: 0,
        failures: 0,
        blocks_max: run.blocks_max,
        version: 0,
    };
    for step in 0..run.steps {
        let chosen = this.random.index(run.files);
        let chance = this.random.below(120);
        match chance {
            0..=3 => this.fail_writes(chosen),
            4..=5 => this.reopen(Look::Sampled),
            6..=7 => this.crash(),
            8..=10 => this.harness.commit(),
            11..=15 => this.harness.reclaim(),
            16..=19 => this.clone_range(chosen),
            20 => this.sync(),
            _ => this.step(chosen),
        }
        // Those between them are not of a file, and not each clone finds a range.
        count(Count::Operations, u64::from(matches!(chance, 0..=3 | 20..)));
        if step.is_multiple_of(run.check_every) {
            this.check(chosen);
        }
    }
    for index in 0..run.files {
        this.check(index);
        this.subjects[index].fsync();
        this.check(index);
    }
    this.reopen(Look::Full);
    for index in 0..run.files {
        this.check(index);
        this.subjects[index].file().truncate(at(0)).unwrap();
        this.subjects[index].model.truncate(0);
    }
    this.reopen(Look::Sampled);
    let can_fail = this.harness.fail_data_writes(None) == Done::Yes;
    assert!(!can_fail || this.failures > 0 || run.steps < STEPS_WITH_FAILURES, "no write failed");
}

impl<H: Harness> Run<H> {
    pub(super) fn refused<T>(
        &self,
        result: Result<T, <H::File as DataFile>::Error>,
    ) -> Result<T, Refusal> {
        result.map_err(|error| self.harness.refusal(&error))
    }

    /// What nobody wrote before.
    fn bytes(&mut self, file: usize, start: u64, len: u64) -> Vec<u8> {
        self.version += 1;
        let grain = [Grain::Text, Grain::Noise, Grain::Mixed][self.random.index(3)];
        Stamp { file, version: self.version, block: self.block, grain }.bytes(start, len)
    }

    /// A range with ends on blocks, beside them, and anywhere.
    pub(super) fn range(&mut self) -> (u64, u64) {
        let size_max = self.blocks_max * self.block;
        let (block, random) = (self.block, &mut self.random);
        let mut end = |limit: u64| {
            let any = random.below(limit);
            match random.below(3) {
                0 => any / block * block,
                1 => (any / block * block + random.below(3)).saturating_sub(1),
                _ => any,
            }
        };
        let start = end(size_max);
        let long = self.blocks_max.div_ceil(20).max(20);
        let len = if end(2) == 0 { end(3 * block) } else { end(long * block) };
        (start, len.min(size_max - start))
    }

    fn step(&mut self, chosen: usize) {
        let (start, len) = self.range();
        // A range that is to have space or none has some length.
        let some = len.max(1);
        let kind = self.random.below(29);
        let Subject { inode, file, model } = &mut self.subjects[chosen];
        let file = file.as_ref().expect("it is open between steps");
        match kind {
            0..=3 => self.write(chosen, start, len),
            4 => self.append(chosen, len),
            5..=8 => self.read(chosen, start, len),
            9 | 10 => {
                file.truncate(at(start)).unwrap();
                model.truncate(start);
            }
            11 => {
                file.zero_range(at(start), some).unwrap();
                model.zero(start, start + some);
            }
            12 => {
                file.punch_hole(at(start), some).unwrap();
                model.punch(start, some);
            }
            13 => self.allocate(chosen, start, some),
            14 => self.write_direct(chosen, start, len),
            15 => self.read_direct(chosen, start, len),
            16 | 17 => self.store_mapped(chosen, start, len),
            18 => self.subjects[chosen].fsync(),
            19 => {
                self.now_ms += self.random.below(40_000);
                self.harness.background_pass(self.now_ms);
            }
            20 => {
                self.harness.relocate(inode);
                file.unshare(at(start), some).unwrap();
            }
            21 => self.read_on(chosen, start),
            22 => self.append_blocks(chosen, len),
            23 | 24 => self.msync(chosen, start, len),
            25 => self.fault(chosen, start),
            26 => self.close_and_open(chosen),
            _ => file.flush(range(start, start + len)).unwrap(),
        }
    }

    pub(super) fn write(&mut self, chosen: usize, start: u64, len: u64) {
        let bytes = self.bytes(chosen, start, len);
        let result = self.subjects[chosen].file().write(at(start), &bytes);
        let result = self.refused(result);
        let model = &mut self.subjects[chosen].model;
        let done = match result {
            Err(Refusal::Io) if model.loses() => return,
            // What comes behind a block in which the file ends and that is found to fail is refused.
            Ok(done) if model.loses() && done < bytes.len() => {
                assert!(done > 0 && (start + done as u64).is_multiple_of(self.block), "{done}");
                done
            }
            result => {
                assert_eq!(result, Ok(bytes.len()));
                bytes.len()
            }
        };
        model.write(start, &bytes[..done]);
    }

    fn append(&mut self, chosen: usize, len: u64) {
        let size = self.subjects[chosen].model.size();
        let len = len.min((self.blocks_max * self.block).saturating_sub(size));
        let bytes = self.bytes(chosen, size, len);
        let subject = &mut self.subjects[chosen];
        assert_eq!(subject.file().append(&bytes).unwrap(), (at(size), bytes.len()));
        subject.model.write(size, &bytes);
    }

    /// Where a block begins, so that it may go straight to the device.
    fn append_blocks(&mut self, chosen: usize, len: u64) {
        let subject = &mut self.subjects[chosen];
        let size = subject.model.size().next_multiple_of(self.block);
        if size >= self.blocks_max * self.block {
            return;
        }
        subject.file().truncate(at(size)).unwrap();
        subject.model.truncate(size);
        self.append(chosen, len.next_multiple_of(self.block).max(2 * self.block));
    }

    /// What is not whole blocks goes through memory.
    fn mostly_aligned(&mut self, start: u64, len: u64) -> (u64, u64) {
        match self.random.chance(1, 4) {
            true => (start, len),
            false => (start / self.block * self.block, len / self.block * self.block),
        }
    }

    fn write_direct(&mut self, chosen: usize, start: u64, len: u64) {
        let (start, len) = self.mostly_aligned(start, len);
        let bytes = self.bytes(chosen, start, len);
        let subject = &mut self.subjects[chosen];
        assert_eq!(subject.file().direct_write(at(start), &bytes).unwrap(), bytes.len());
        subject.model.write(start, &bytes);
    }

    fn read(&mut self, chosen: usize, start: u64, len: u64) {
        let mut buffer = vec![0xEE; index(len)];
        let count = self.subjects[chosen].file().read(at(start), &mut buffer).unwrap();
        self.assert_read(chosen, start, len, &buffer[..count]);
    }

    fn read_direct(&mut self, chosen: usize, start: u64, len: u64) {
        let (start, len) = self.mostly_aligned(start, len);
        let mut buffer = vec![0xEE; index(len)];
        let count = self.subjects[chosen].file().direct_read(at(start), &mut buffer).unwrap();
        self.assert_read(chosen, start, len, &buffer[..count]);
    }

    /// One read after another, to the end.
    fn read_on(&mut self, chosen: usize, start: u64) {
        let mut start = start / self.block * self.block;
        let len = (1 + self.random.below(8)) * self.block;
        while start < self.subjects[chosen].model.size() {
            self.read(chosen, start, len);
            start += len;
        }
    }

    fn assert_read(&self, chosen: usize, start: u64, len: u64, have: &[u8]) {
        let model = &self.subjects[chosen].model;
        let from = index(start.min(model.size()));
        let end = index((start + len).min(model.size())).max(from);
        assert_same(have, &model.bytes[from..end], start, self.block);
    }

    fn allocate(&mut self, chosen: usize, start: u64, len: u64) {
        let reach = if self.random.chance(1, 2) { Reach::Extends } else { Reach::Stays };
        let is_zeroed = self.random.chance(1, 2);
        let Subject { file, model, .. } = &mut self.subjects[chosen];
        let file = file.as_ref().expect("it is open between steps");
        if is_zeroed {
            file.allocate_zeroed(at(start), len, reach).unwrap();
            model.drop_data(start, len);
        } else {
            file.allocate(at(start), len, reach).unwrap();
        }
        model.allocate(start, len, reach);
    }

    /// What the file has up to the end of a part of a map is durable.
    fn msync(&mut self, chosen: usize, start: u64, len: u64) {
        let map = range(0, self.blocks_max * self.block);
        let subject = &mut self.subjects[chosen];
        subject.file().msync(map, range(start, start + len)).unwrap();
        subject.model.synced_up_to(start + len);
    }

    /// A block comes to memory, and becomes dirty as it is where the fault is for writing.
    fn fault(&mut self, chosen: usize, start: u64) {
        let map = range(0, self.blocks_max * self.block);
        let is_write = self.random.chance(2, 3);
        let file = self.subjects[chosen].file();
        let result = match is_write {
            true => file.fault_for_write(map, at(start)),
            false => file.fault_for_read(map, at(start)),
        };
        let result = self.refused(result);
        let model = &mut self.subjects[chosen].model;
        if start >= model.size().next_multiple_of(self.block) {
            let error = Error::BeyondEnd { offset: at(start), size: at(model.size()) };
            assert_eq!(result, Err(Refusal::Request(error)));
            return;
        }
        result.unwrap();
        if !is_write {
            return;
        }
        model.data.insert(start / self.block);
        model.space.insert(start / self.block);
    }

    /// Through a map, also behind the end of the file.
    pub(super) fn store_mapped(&mut self, chosen: usize, start: u64, len: u64) {
        let bytes = self.bytes(chosen, start, len);
        let block = self.block;
        let map = range(0, self.blocks_max * block);
        let result = self.subjects[chosen].file().store(map, at(start), &bytes);
        let result = self.refused(result);
        let Subject { file, model, .. } = &mut self.subjects[chosen];
        let file = file.as_ref().expect("it is open between steps");
        let end = start + len;
        if end > model.size().next_multiple_of(block) {
            let error = Error::BeyondEnd { offset: at(start), size: at(model.size()) };
            assert_eq!(result, Err(Refusal::Request(error)));
            return;
        }
        result.unwrap();
        model.store(start, &bytes);
        if model.loses() {
            return;
        }
        let mut loaded = vec![0; bytes.len()];
        file.load(map, at(start), &mut loaded).unwrap();
        let in_file = index(end.min(model.size()).saturating_sub(start));
        assert_same(&loaded[..in_file], &bytes[..in_file], start, block);
    }

    /// Whole blocks of the file after this one.
    fn clone_range(&mut self, chosen: usize) {
        let source = (chosen + 1) % self.subjects.len();
        let whole_blocks = self.subjects[source].model.size() / self.block;
        if source == chosen || whole_blocks == 0 {
            return;
        }
        let first = self.random.below(whole_blocks);
        let blocks = first..first + 1 + self.random.below((whole_blocks - first).min(12));
        let to_block = self.random.below(self.blocks_max - (blocks.end - blocks.start) + 1);
        let whole = range(blocks.start * self.block, blocks.end * self.block);
        let (from, to) = (&self.subjects[source].inode, &self.subjects[chosen].inode);
        if self.harness.clone_range(from, whole, to, at(to_block * self.block)) == Done::Yes {
            let other = std::mem::replace(&mut self.subjects[source].model, Model::new(self.block));
            self.subjects[chosen].model.clone_from_file(&other, blocks, to_block);
            self.subjects[source].model = other;
        }
    }
}

/// The first seed of each random test: other runs than the last time, by `UBTRFS_IOMAP_FIRST_SEED`.
pub(super) fn first_seed() -> u64 {
    asked("UBTRFS_IOMAP_FIRST_SEED").unwrap_or(0)
}

/// What is random without a seed of its own, and told apart by its number: other things with another first seed.
pub fn random_by_number(number: u64) -> Prng {
    Prng::new(number.wrapping_add(first_seed() << 32))
}

/// The seeds of each random test; `UBTRFS_IOMAP_SEEDS` asks for more than those that each test run has time for.
///
/// # Panics
/// If the environment asks for what is no number.
pub fn seeds<H: Harness>() -> impl Iterator<Item = u64> {
    let first = first_seed();
    // The test counts until its last one is done, and its filesystem gone.
    let running = Running::new();
    let seeds = first..first + asked("UBTRFS_IOMAP_SEEDS").unwrap_or(H::SEEDS);
    seeds.inspect(move |_| {
        let _ = &running;
    })
}

/// For every other seed, what is long enough goes past memory from two blocks on.
fn straight_for_some(options: &CacheOptions, seed: u64) -> CacheOptions {
    if seed.is_multiple_of(2) {
        return options.clone();
    }
    let bytes_min = 2 * 4096;
    CacheOptions {
        straight_bytes_min: bytes_min,
        straight_encoded_bytes_min: bytes_min,
        straight_write_bytes_min: bytes_min,
        readahead_bytes_max: bytes_min,
        dirty_bytes_background: options.dirty_bytes_background.min(bytes_min),
        ..options.clone()
    }
}

/// With plenty of memory.
///
/// # Panics
/// As [`random_run()`].
pub fn random_operations_same_as_arrays<H: Harness>(make: impl Fn(CacheOptions) -> H) {
    for seed in seeds::<H>() {
        random_run(
            make(straight_for_some(&CacheOptions::default(), seed)),
            &RandomRun::new(seed, 1500),
        );
    }
}

/// Hardly anything fits into memory, so that all is written back and reclaimed between any two operations.
///
/// # Panics
/// As [`random_run()`].
pub fn random_operations_with_little_memory_same_as_arrays<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let options = CacheOptions {
        cached_bytes_max: 6 * 4096,
        dirty_bytes_max: 3 * 4096,
        dirty_bytes_background: 2 * 4096,
        folio_bytes_max: 4 * 4096,
        writeback_bytes_max: 3 * 4096,
        ..CacheOptions::default()
    };
    for seed in seeds::<H>() {
        random_run(make(straight_for_some(&options, seed)), &RandomRun::new(seed, 1500));
    }
}

/// As over FUSE, where the kernel keeps what is clean.
///
/// # Panics
/// As [`random_run()`].
pub fn random_operations_where_clean_folios_go_at_once_same_as_arrays<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let options = CacheOptions { keeps_clean: false, ..CacheOptions::default() };
    for seed in seeds::<H>() {
        random_run(make(straight_for_some(&options, seed)), &RandomRun::new(seed, 1000));
    }
}

/// What else writes back, commits and reclaims does so in any step of any call. Of one seed in three the files are so long that their extents
/// are as long as extents become.
///
/// # Panics
/// As [`random_run()`].
pub fn random_operations_beside_services_same_as_arrays<H: Harness + 'static>(
    make: impl Fn(CacheOptions) -> H,
) {
    for seed in seeds::<H>() {
        let options = match seed % 2 {
            0 => CacheOptions::default(),
            _ => super::little_memory(4096),
        };
        let harness = Restless::new(make(straight_for_some(&options, seed / 2)), seed);
        let run = match seed % 3 {
            0 => RandomRun {
                blocks_max: LONGEST_BLOCKS_MAX,
                check_every: 100,
                ..RandomRun::new(seed, 400)
            },
            _ => RandomRun::new(seed, 1000),
        };
        random_run(harness, &run);
    }
}

/// The ablations are slower, not different.
///
/// # Panics
/// As [`random_run()`].
pub fn random_operations_with_mechanisms_off_same_as_arrays<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let mut ablation =
        CacheAblation { zero_without_batch: true, without_slabs: true, ..CacheAblation::default() };
    ablation.states.without_hint = true;
    ablation.states.lock_in_tree = true;
    let options = CacheOptions { ablation, ..CacheOptions::default() };
    for seed in seeds::<H>() {
        random_run(make(straight_for_some(&options, seed)), &RandomRun::new(seed, 1000));
    }
}
