//! Random operations on several files, beside plain byte arrays.

use std::collections::BTreeSet;

use ubtrfs_iomap::{CacheAblation, CacheOptions, Error, FiemapSync, FileOffset, FileRange, Reach};

use super::model::{Model, assert_same, index};
use super::{DataFile, Done, Expected, Harness, Refusal, contents};
use crate::iomap_model::{at, range};
use crate::prng::Prng;

/// Blocks that a file has at most.
const BLOCKS_MAX: u64 = 40;

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
}

impl RandomRun {
    /// Three files, all compared often.
    pub fn new(seed: u64, steps: usize) -> Self {
        Self { seed, steps, files: 3, check_every: 16 }
    }
}

struct Subject<H: Harness> {
    inode: H::Inode,
    /// `None` only while the filesystem is opened anew.
    file: Option<H::File>,
    model: Model,
}

impl<H: Harness> Subject<H> {
    fn file(&self) -> &H::File {
        self.file.as_ref().expect("it is open between steps")
    }

    fn fsync(&mut self) {
        self.file().fsync().unwrap();
        self.model.synced();
    }
}

struct Run<H: Harness> {
    harness: H,
    random: Prng,
    block: u64,
    subjects: Vec<Subject<H>>,
    now_ms: u64,
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
    let mut this = Run { harness, random: Prng::new(run.seed), block, subjects, now_ms: 0 };
    for step in 0..run.steps {
        let chosen = this.random.index(run.files);
        match this.random.below(120) {
            0..=3 => this.fail_writes(chosen),
            4..=5 => this.reopen(),
            6..=7 => this.crash(),
            8..=10 => this.harness.commit(),
            11..=15 => this.harness.reclaim(),
            16..=19 => this.clone_range(chosen),
            _ => this.step(chosen),
        }
        if step.is_multiple_of(run.check_every) {
            this.check(chosen);
        }
    }
    for index in 0..run.files {
        this.check(index);
        this.subjects[index].fsync();
        this.check(index);
    }
    this.reopen();
    for index in 0..run.files {
        this.check(index);
        this.subjects[index].file().truncate(at(0)).unwrap();
        this.subjects[index].model.truncate(0);
    }
    this.reopen();
}

impl<H: Harness> Run<H> {
    fn refused<T>(&self, result: Result<T, <H::File as DataFile>::Error>) -> Result<T, Refusal> {
        result.map_err(|error| self.harness.refusal(&error))
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        let first = self.random.below(255) + 1;
        (0..len).map(|at| u8::try_from((first + at * 7) % 255 + 1).expect("at most 255")).collect()
    }

    /// A range with ends on blocks, beside them, and anywhere.
    fn range(&mut self) -> (u64, u64) {
        let (block, random) = (self.block, &mut self.random);
        let mut end = |limit: u64| {
            let any = random.below(limit);
            match random.below(3) {
                0 => any / block * block,
                1 => (any / block * block + random.below(3)).saturating_sub(1),
                _ => any,
            }
        };
        let size_max = BLOCKS_MAX * block;
        let start = end(size_max);
        let len = if end(2) == 0 { end(3 * block) } else { end(20 * block) };
        (start, len.min(size_max - start))
    }

    fn step(&mut self, chosen: usize) {
        let (start, len) = self.range();
        let block = self.block;
        let (whole_start, whole_len) = (start / block * block, len / block * block);
        let kind = self.random.below(21);
        let bytes = match kind {
            0..=4 => self.bytes(len),
            14 => self.bytes(whole_len),
            _ => Vec::new(),
        };
        let reach = if self.random.chance(1, 2) { Reach::Extends } else { Reach::Stays };
        let Subject { inode, file, model } = &mut self.subjects[chosen];
        let file = file.as_ref().expect("it is open between steps");
        match kind {
            0..=3 => {
                assert_eq!(file.write(at(start), &bytes).unwrap(), bytes.len());
                model.write(start, &bytes);
            }
            4 => {
                let room = index((BLOCKS_MAX * block).saturating_sub(model.size()));
                let bytes = &bytes[..bytes.len().min(room)];
                let size = model.size();
                assert_eq!(file.append(bytes).unwrap(), (at(size), bytes.len()));
                model.write(size, bytes);
            }
            5..=8 => {
                let mut buffer = vec![0xEE; index(len)];
                let count = file.read(at(start), &mut buffer).unwrap();
                let from = index(start.min(model.size()));
                let end = index((start + len).min(model.size())).max(from);
                assert_same(&buffer[..count], &model.bytes[from..end], start, block);
            }
            9 | 10 => {
                file.truncate(at(start)).unwrap();
                model.truncate(start);
            }
            11 => {
                file.zero_range(at(start), len).unwrap();
                model.zero(start, start + len);
            }
            12 => {
                file.punch_hole(at(start), len).unwrap();
                model.punch(start, len);
            }
            13 => {
                if self.random.chance(1, 2) {
                    file.allocate(at(start), len, reach).unwrap();
                } else {
                    file.allocate_zeroed(at(start), len, reach).unwrap();
                    model.drop_data(start, len);
                }
                model.allocate(start, len, reach);
            }
            14 => {
                assert_eq!(file.direct_write(at(whole_start), &bytes).unwrap(), bytes.len());
                model.write(whole_start, &bytes);
            }
            15 => {
                let mut buffer = vec![0xEE; index(whole_len)];
                let count = file.direct_read(at(whole_start), &mut buffer).unwrap();
                let from = index(whole_start.min(model.size()));
                let end = index((whole_start + whole_len).min(model.size())).max(from);
                assert_same(&buffer[..count], &model.bytes[from..end], whole_start, block);
            }
            16 => self.store_mapped(chosen, start, len),
            17 => self.subjects[chosen].fsync(),
            18 => {
                self.now_ms += self.random.below(40_000);
                self.harness.background_pass(self.now_ms);
            }
            19 => {
                self.harness.relocate(inode);
                file.unshare(at(start), len).unwrap();
            }
            _ => file.flush(range(start, start + len)),
        }
    }

    /// Through a map, also behind the end of the file.
    fn store_mapped(&mut self, chosen: usize, start: u64, len: u64) {
        let bytes = self.bytes(len);
        let block = self.block;
        let map = range(0, BLOCKS_MAX * block);
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
        let mut loaded = vec![0; bytes.len()];
        file.load(map, at(start), &mut loaded).unwrap();
        let in_file = index(end.min(model.size()).saturating_sub(start));
        assert_same(&loaded[..in_file], &bytes[..in_file], start, block);
        model.store(start, &bytes);
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
        let to_block = self.random.below(BLOCKS_MAX - (blocks.end - blocks.start) + 1);
        let whole = range(blocks.start * self.block, blocks.end * self.block);
        let (from, to) = (&self.subjects[source].inode, &self.subjects[chosen].inode);
        if self.harness.clone_range(from, whole, to, at(to_block * self.block)) == Done::Yes {
            let other = std::mem::replace(&mut self.subjects[source].model, Model::new(self.block));
            self.subjects[chosen].model.clone_from_file(&other, blocks, to_block);
            self.subjects[source].model = other;
        }
    }

    /// Everything is written and closed; another look is had at it, and it is opened again.
    fn reopen(&mut self) {
        let mut files = Vec::new();
        for subject in &mut self.subjects {
            subject.fsync();
            subject.file = None;
            files.push(Expected {
                inode: subject.inode.clone(),
                bytes: subject.model.bytes.clone(),
                data_blocks: subject.model.data.iter().copied().collect(),
            });
        }
        self.harness.reopen();
        self.harness.judge(&files);
        self.open_all();
    }

    fn open_all(&mut self) {
        for subject in &mut self.subjects {
            subject.file = Some(self.harness.open(&subject.inode));
        }
    }

    /// All that is in memory only is gone. What an fsync made durable, and did not change since, is there.
    fn crash(&mut self) {
        self.subjects.iter_mut().for_each(|subject| subject.file = None);
        let has_crashed = self.harness.crash();
        self.open_all();
        if has_crashed == Done::NotSupported {
            return;
        }
        for subject in &mut self.subjects {
            let durable = std::mem::take(&mut subject.model.durable);
            let changed = std::mem::take(&mut subject.model.changed);
            reload(subject);
            let Model { bytes, block, .. } = &subject.model;
            assert!(!changed.is_empty() || *bytes == durable, "nothing changed, but its size");
            for (number, expect) in (0_u64..).zip(durable.chunks(index(*block))) {
                if !changed.contains(&number) {
                    let start = index(number * block);
                    assert!(bytes.len() >= start + expect.len(), "durable bytes are gone");
                    let have = &bytes[start..start + expect.len()];
                    assert_same(have, expect, number * block, *block);
                }
            }
            subject.model.synced();
        }
    }

    /// The device fails some writes. Either fsync says so, or all is stored; and memory shows what is stored.
    fn fail_writes(&mut self, chosen: usize) {
        // Nothing of the others is to be written while the device fails.
        self.subjects.iter_mut().for_each(Subject::fsync);
        let left = self.random.below(4);
        if self.harness.fail_data_writes(Some(left)) == Done::NotSupported {
            return;
        }
        for _ in 0..self.random.below(4) + 1 {
            let (start, len) = self.range();
            let bytes = self.bytes(len);
            let kind = self.random.below(4);
            let Subject { file, model, .. } = &mut self.subjects[chosen];
            let file = file.as_ref().expect("it is open between steps");
            match kind {
                0 => {
                    self.now_ms += 40_000;
                    self.harness.background_pass(self.now_ms);
                }
                1 => file.flush(range(start, start + len)),
                _ => {
                    assert_eq!(file.write(at(start), &bytes).unwrap(), bytes.len());
                    model.write(start, &bytes);
                }
            }
        }
        let result = self.subjects[chosen].file().fsync();
        self.harness.fail_data_writes(None);
        if result.is_err() {
            assert_eq!(self.refused(result), Err(Refusal::Io));
            assert!(self.subjects[chosen].file().fsync().is_ok(), "said once only");
            let shown = contents(self.subjects[chosen].file());
            self.subjects.iter_mut().for_each(|subject| subject.file = None);
            self.harness.reopen();
            self.open_all();
            reload(&mut self.subjects[chosen]);
            assert_same(&self.subjects[chosen].model.bytes, &shown, 0, self.block);
        }
        self.subjects[chosen].model.synced();
        self.check(chosen);
    }

    fn check(&self, chosen: usize) {
        let Subject { model, .. } = &self.subjects[chosen];
        let file = self.subjects[chosen].file();
        assert_eq!(file.size(), at(model.size()));
        assert_same(&contents(file), &model.bytes, 0, self.block);
        for from in (0..=model.size() + 1).step_by(1111) {
            let no_data = || Err(Refusal::Request(Error::NoData { offset: at(from) }));
            let expected = |found: Option<u64>| found.map_or_else(no_data, |found| Ok(at(found)));
            let data = self.refused(file.seek_data(at(from)));
            assert_eq!(data, expected(model.seek(from, true)), "data from {from}");
            let hole = self.refused(file.seek_hole(at(from)));
            assert_eq!(hole, expected(model.seek(from, false)), "hole from {from}");
        }
        let (data, space) = blocks_of(file, self.block);
        assert_eq!(data, model.data);
        assert_eq!(space, model.space);
    }
}

/// The blocks that fiemap says are data, and those that have space.
fn blocks_of(file: &impl DataFile, block: u64) -> (BTreeSet<u64>, BTreeSet<u64>) {
    let all = FileRange::from(FileOffset::ZERO);
    let extents = file.fiemap(all, usize::MAX, FiemapSync::AsIs).unwrap();
    let blocks = |range: FileRange| range.start.bytes() / block..range.end.bytes().div_ceil(block);
    for (index, extent) in extents.iter().enumerate() {
        assert_eq!(extent.flags.is_last, index + 1 == extents.len());
        let has_no_place = extent.flags.is_delalloc || extent.flags.is_inline;
        assert!(has_no_place || extent.address.is_some());
        assert!(!extent.flags.is_delalloc || extent.address.is_none());
    }
    for pair in extents.windows(2) {
        assert!(pair[0].range.end <= pair[1].range.start);
    }
    let data = extents.iter().filter(|extent| !extent.flags.is_unwritten);
    let data = data.flat_map(|extent| blocks(extent.range)).collect();
    (data, extents.iter().flat_map(|extent| blocks(extent.range)).collect())
}

/// The model is what the file says, which was opened anew.
fn reload<H: Harness>(subject: &mut Subject<H>) {
    let block = subject.model.block;
    let bytes = contents(subject.file());
    let (data, space) = blocks_of(subject.file(), block);
    let mut model = Model::new(block);
    model.bytes = bytes;
    model.data = data;
    model.space = space;
    subject.model = model;
}

/// `UBTRFS_IOMAP_SEEDS` asks for more than those that each test run has time for.
fn seeds<H: Harness>() -> std::ops::Range<u64> {
    let asked = std::env::var("UBTRFS_IOMAP_SEEDS").ok().and_then(|count| count.parse().ok());
    0..asked.unwrap_or(H::SEEDS)
}

/// With plenty of memory.
///
/// # Panics
/// As [`random_run()`].
pub fn random_operations_same_as_arrays<H: Harness>(make: impl Fn(CacheOptions) -> H) {
    for seed in seeds::<H>() {
        random_run(make(CacheOptions::default()), &RandomRun::new(seed, 1500));
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
        random_run(make(options.clone()), &RandomRun::new(seed, 1500));
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
        random_run(make(options.clone()), &RandomRun::new(seed, 1000));
    }
}

/// The ablations are slower, not different.
///
/// # Panics
/// As [`random_run()`].
pub fn random_operations_with_mechanisms_off_same_as_arrays<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let mut ablation = CacheAblation { zero_without_batch: true, ..CacheAblation::default() };
    ablation.states.without_hint = true;
    ablation.states.lock_in_tree = true;
    let options = CacheOptions { ablation, ..CacheOptions::default() };
    for seed in seeds::<H>() {
        random_run(make(options.clone()), &RandomRun::new(seed, 1000));
    }
}
