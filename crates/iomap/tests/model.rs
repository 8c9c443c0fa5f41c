//! Random operations on files, beside plain byte arrays.

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{BLOCK, Failure, MemoryFs, MemoryInode, Random, at, range};
use ubtrfs_iomap::{
    AddressSpace, CacheAblation, CacheOptions, Error, FiemapSync, FileOffset, FileRange, OpenFile,
    PageCache, Reach,
};

const SIZE_MAX: u64 = 40 * BLOCK;
const FILES: usize = 3;

/// What a file must be.
#[derive(Default)]
struct Model {
    bytes: Vec<u8>,
    /// Blocks that are data, dirty or mapped; others read as zeros.
    data: BTreeSet<u64>,
    /// Blocks that have space, whether or not they are data; also beyond the end.
    space: BTreeSet<u64>,
    /// What the last fsync made durable, and the blocks that changed since.
    durable: Vec<u8>,
    changed: BTreeSet<u64>,
    /// A size can be durable before the zeroing of what lies behind it, which a crash or a failing device then keeps from
    /// the medium. Nobody ever sees those bytes: they are zeroed before the file grows over them.
    may_have_tail: bool,
}

impl Model {
    fn size(&self) -> u64 {
        u64::try_from(self.bytes.len()).unwrap()
    }

    /// All of it is durable now.
    fn synced(&mut self) {
        self.durable = self.bytes.clone();
        self.changed.clear();
    }

    /// It holds what is on the medium, and nothing else.
    fn reload(&mut self, fs: &MemoryFs, inode: &MemoryInode) {
        let size = MemoryFs::stored_size(inode);
        self.bytes = fs.stored(inode, size);
        self.bytes.truncate(usize::try_from(size).unwrap());
        self.data = MemoryFs::stored_blocks(inode).into_iter().collect();
        self.data.retain(|block| block * BLOCK < size);
        self.space = MemoryFs::allocated_blocks(inode).into_iter().collect();
        self.may_have_tail = true;
    }

    fn note_change(&mut self, start: u64, end: u64) {
        self.changed.extend(start / BLOCK..end.div_ceil(BLOCK));
    }

    fn resize(&mut self, size: u64) {
        let old = self.size();
        self.note_change(old.min(size), old.max(size));
        if size <= old {
            self.data.retain(|block| block * BLOCK < size);
            self.space.retain(|block| block * BLOCK < size);
        }
        self.bytes.resize(usize::try_from(size).unwrap(), 0);
    }

    fn write(&mut self, start: u64, bytes: &[u8]) {
        let end = start + u64::try_from(bytes.len()).unwrap();
        if end > self.size() {
            self.resize(end);
        }
        self.note_change(start, end);
        self.bytes[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()]
            .copy_from_slice(bytes);
        self.data.extend(start / BLOCK..end.div_ceil(BLOCK));
        self.space.extend(start / BLOCK..end.div_ceil(BLOCK));
    }

    fn allocate(&mut self, start: u64, len: u64, reach: Reach) {
        let end = start + len;
        if len > 0 {
            self.space.extend(start / BLOCK..end.div_ceil(BLOCK));
        }
        if len > 0 && reach == Reach::Extends && end > self.size() {
            self.resize(end);
        }
    }

    /// Whole blocks of the range are not data any more.
    fn drop_data(&mut self, start: u64, len: u64) -> std::ops::Range<u64> {
        let whole = start.div_ceil(BLOCK)..(start + len) / BLOCK;
        self.zero(start, start + len);
        self.data.retain(|block| !whole.contains(block));
        whole
    }

    fn zero(&mut self, start: u64, end: u64) {
        let end = end.min(self.size());
        if start < end {
            self.note_change(start, end);
            self.bytes[usize::try_from(start).unwrap()..usize::try_from(end).unwrap()].fill(0);
        }
    }

    fn seek(&self, from: u64, wants_data: bool) -> Option<u64> {
        if from >= self.size() {
            return None;
        }
        let last = self.size().div_ceil(BLOCK);
        let found = (from / BLOCK..last).find(|block| self.data.contains(block) == wants_data);
        match found {
            Some(block) => Some((block * BLOCK).max(from)),
            None if wants_data => None,
            None => Some(self.size()),
        }
    }
}

struct Subject {
    inode: Arc<MemoryInode>,
    file: OpenFile<MemoryFs>,
    model: Model,
}

struct Run {
    fs: Arc<MemoryFs>,
    cache: Arc<PageCache>,
    random: Random,
    now_ms: u64,
}

impl Run {
    fn open(&self, inode: &Arc<MemoryInode>, size: u64) -> OpenFile<MemoryFs> {
        let (fs, cache) = (Arc::clone(&self.fs), Arc::clone(&self.cache));
        AddressSpace::new(fs, Arc::clone(inode), at(size), cache).open()
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        let first = self.random.below(255) + 1;
        (0..len).map(|at| u8::try_from((first + at * 7) % 255 + 1).unwrap()).collect()
    }

    /// A range with ends on blocks, beside them, and anywhere.
    fn range(&mut self) -> (u64, u64) {
        let mut end = |limit: u64| {
            let any = self.random.below(limit);
            match self.random.below(3) {
                0 => any / BLOCK * BLOCK,
                1 => (any / BLOCK * BLOCK + self.random.below(3)).saturating_sub(1),
                _ => any,
            }
        };
        let start = end(SIZE_MAX);
        let len = if end(2) == 0 { end(3 * BLOCK) } else { end(20 * BLOCK) };
        (start, len.min(SIZE_MAX - start))
    }

    fn step(&mut self, subject: &mut Subject) {
        let (start, len) = self.range();
        let Subject { inode, file, model } = subject;
        match self.random.below(23) {
            0..=3 => {
                let bytes = self.bytes(len);
                assert_eq!(file.write(at(start), &bytes), Ok(bytes.len()));
                if len > 0 {
                    model.write(start, &bytes);
                }
            }
            4 => {
                let bytes = self.bytes(len.min(SIZE_MAX.saturating_sub(model.size())));
                let size = model.size();
                assert_eq!(file.append(&bytes), Ok((at(size), bytes.len())));
                if !bytes.is_empty() {
                    model.write(size, &bytes);
                }
            }
            5..=8 => {
                let mut buffer = vec![0xEE; usize::try_from(len).unwrap()];
                let count = file.read(at(start), &mut buffer).unwrap();
                let end = (start + len).min(model.size()).max(start);
                assert_eq!(u64::try_from(count).unwrap(), end - start.min(end));
                if count > 0 {
                    let from = usize::try_from(start).unwrap();
                    assert_same(&buffer[..count], &model.bytes[from..from + count], start);
                }
            }
            9 | 10 => {
                file.truncate(at(start)).unwrap();
                model.resize(start);
            }
            11 => {
                file.zero_range(at(start), len).unwrap();
                model.zero(start, start + len);
            }
            12 => {
                file.punch_hole(at(start), len).unwrap();
                let whole = model.drop_data(start, len);
                model.space.retain(|block| !whole.contains(block));
            }
            13 => {
                let reach = if self.random.chance(2) { Reach::Extends } else { Reach::Stays };
                if self.random.chance(2) {
                    file.allocate(at(start), len, reach).unwrap();
                } else {
                    file.allocate_zeroed(at(start), len, reach).unwrap();
                    model.drop_data(start, len);
                }
                model.allocate(start, len, reach);
            }
            14 => {
                let (start, len) = (start / BLOCK * BLOCK, len / BLOCK * BLOCK);
                let bytes = self.bytes(len);
                assert_eq!(file.direct_write(at(start), &bytes), Ok(bytes.len()));
                if len > 0 {
                    model.write(start, &bytes);
                }
            }
            15 => {
                let (start, len) = (start / BLOCK * BLOCK, len / BLOCK * BLOCK);
                let mut buffer = vec![0xEE; usize::try_from(len).unwrap()];
                let count = file.direct_read(at(start), &mut buffer).unwrap();
                let from = usize::try_from(start.min(model.size())).unwrap();
                let end = usize::try_from((start + len).min(model.size())).unwrap().max(from);
                assert_same(&buffer[..count], &model.bytes[from..end], start);
            }
            16 => self.store_mapped(file, model, start, len),
            17 => {
                file.fsync().unwrap();
                model.synced();
            }
            21 => self.crash(subject),
            18 => {
                self.now_ms += self.random.below(40_000);
                self.cache.background_pass(self.now_ms);
            }
            19 => {
                self.fs.relocate(inode);
                file.unshare(at(start), len).unwrap();
            }
            20 => file.space().flush(range(start, start + len)),
            _ => {
                file.fsync().unwrap();
                model.synced();
                assert_eq!(MemoryFs::stored_size(inode), model.size());
                *file = self.open(inode, model.size());
            }
        }
    }

    /// All that is in memory only is gone. What an fsync made durable, and did not change since, is there.
    fn crash(&mut self, subject: &mut Subject) {
        let Subject { inode, file, model } = subject;
        // What is in memory of the file goes, and the filesystem is not asked.
        let nothing = || Ok(());
        file.space().replace_range(FileRange::from(FileOffset::ZERO), at(0), nothing).unwrap();
        let before = (std::mem::take(&mut model.durable), std::mem::take(&mut model.changed));
        model.reload(&self.fs, inode);
        *file = self.open(inode, model.size());
        let (durable, changed) = before;
        for (block, bytes) in (0_u64..).zip(durable.chunks(4096)) {
            if !changed.contains(&block) {
                let start = usize::try_from(block * BLOCK).unwrap();
                assert_same(&model.bytes[start..start + bytes.len()], bytes, block * BLOCK);
            }
        }
        model.synced();
    }

    /// The device fails some writes. Either fsync says so, or all is stored; and memory shows what is stored.
    fn fail_writes(&mut self, subject: &mut Subject) {
        self.fs.writes_left.store(self.random.below(4), Ordering::Relaxed);
        for _ in 0..self.random.below(4) + 1 {
            let (start, len) = self.range();
            let bytes = self.bytes(len);
            match self.random.below(4) {
                0 => {
                    self.now_ms += 40_000;
                    self.cache.background_pass(self.now_ms);
                }
                1 => subject.file.space().flush(range(start, start + len)),
                _ => {
                    assert_eq!(subject.file.write(at(start), &bytes), Ok(bytes.len()));
                    if len > 0 {
                        subject.model.write(start, &bytes);
                    }
                }
            }
        }
        let result = subject.file.fsync();
        self.fs.writes_left.store(u64::MAX, Ordering::Relaxed);
        if result.is_err() {
            assert_eq!(result, Err(Failure::Io));
            assert_eq!(subject.file.fsync(), Ok(()));
            assert_eq!(subject.file.size(), at(MemoryFs::stored_size(&subject.inode)));
            subject.model.reload(&self.fs, &subject.inode);
        }
        subject.model.synced();
        check(subject);
    }

    /// Through a map, also behind the end of the file.
    fn store_mapped(&mut self, file: &OpenFile<MemoryFs>, model: &mut Model, start: u64, len: u64) {
        let map = file.map(at(0), SIZE_MAX).unwrap();
        let bytes = self.bytes(len);
        let end = start + len;
        let last = model.size().next_multiple_of(BLOCK);
        let result = map.store(at(start), &bytes);
        if end > last {
            let error = Error::BeyondEnd { offset: at(start), size: at(model.size()) };
            assert_eq!(result, Err(Failure::Request(error)));
            return;
        }
        result.unwrap();
        if len == 0 {
            return;
        }
        let mut loaded = vec![0; bytes.len()];
        map.load(at(start), &mut loaded).unwrap();
        let in_file = usize::try_from(end.min(model.size()).saturating_sub(start)).unwrap();
        assert_same(&loaded[..in_file], &bytes[..in_file], start);
        let size = model.size();
        model.write(start, &bytes);
        model.bytes.truncate(usize::try_from(size).unwrap());
    }
}

fn assert_same(have: &[u8], expect: &[u8], start: u64) {
    assert_eq!(have.len(), expect.len());
    if let Some(first) = have.iter().zip(expect).position(|(have, expect)| have != expect) {
        let (have, expect) = (have[first], expect[first]);
        let at = start + u64::try_from(first).unwrap();
        panic!("at {at} (block {}): have {have}, expect {expect}", at / BLOCK);
    }
}

fn check(subject: &Subject) {
    let Subject { file, model, .. } = subject;
    assert_eq!(file.size(), at(model.size()));
    assert_same(&common::contents(file), &model.bytes, 0);
    for from in (0..=model.size() + 1).step_by(1111) {
        let no_data = Err(Failure::Request(Error::NoData { offset: at(from) }));
        let expected = |found: Option<u64>| found.map_or(no_data.clone(), |found| Ok(at(found)));
        assert_eq!(file.seek_data(at(from)), expected(model.seek(from, true)), "data from {from}");
        assert_eq!(file.seek_hole(at(from)), expected(model.seek(from, false)), "hole from {from}");
    }
    let extents =
        file.fiemap(FileRange::from(FileOffset::ZERO), usize::MAX, FiemapSync::AsIs).unwrap();
    let data = extents.iter().filter(|extent| !extent.flags.is_unwritten);
    let in_extents: BTreeSet<u64> = data.flat_map(|extent| common::blocks(extent.range)).collect();
    assert_eq!(in_extents, model.data);
    let with_space: BTreeSet<u64> =
        extents.iter().flat_map(|extent| common::blocks(extent.range)).collect();
    assert_eq!(with_space, model.space);
    for (index, extent) in extents.iter().enumerate() {
        assert_eq!(extent.flags.is_last, index + 1 == extents.len());
        assert_eq!(extent.flags.is_delalloc, extent.address.is_none());
    }
    for pair in extents.windows(2) {
        assert!(pair[0].range.end <= pair[1].range.start);
    }
}

fn run(seed: u64, steps: usize, options: CacheOptions, mapping_blocks_max: u64) {
    println!("seed {seed}, {options:?}, mappings of at most {mapping_blocks_max} blocks");
    let fs = MemoryFs::new();
    fs.cut_mappings(mapping_blocks_max);
    let cache = PageCache::new(options);
    let mut run = Run { fs, cache, random: Random(seed), now_ms: 0 };
    let mut subjects: Vec<Subject> = (0..FILES)
        .map(|_| {
            let inode = Arc::default();
            let file = run.open(&inode, 0);
            Subject { inode, file, model: Model::default() }
        })
        .collect();
    for step in 0..steps {
        let chosen = usize::try_from(run.random.below(3)).unwrap();
        if run.random.chance(24) {
            // Nothing of the others is to be written while the device fails.
            for subject in &mut subjects {
                subject.file.fsync().unwrap();
                subject.model.synced();
            }
            run.fail_writes(&mut subjects[chosen]);
        } else {
            run.step(&mut subjects[chosen]);
        }
        if step % 16 == 0 {
            check(&subjects[chosen]);
        }
    }
    for subject in &subjects {
        check(subject);
        subject.file.fsync().unwrap();
        check(subject);
        let stored = run.fs.stored(&subject.inode, subject.model.size());
        let len = subject.model.bytes.len();
        assert_same(&stored[..len], &subject.model.bytes, 0);
        let has_tail = stored[len..].iter().any(|byte| *byte != 0);
        assert!(!has_tail || subject.model.may_have_tail, "bytes beyond the end stored");
    }
    assert_eq!(run.fs.reserved_blocks(), 0);
    assert_eq!(run.cache.dirty_bytes(), 0);
    for subject in &subjects {
        subject.file.truncate(at(0)).unwrap();
    }
    assert_eq!(run.fs.used_blocks(), 0);
    // Files that were dirty once are kept until a pass finds them clean.
    assert_eq!(run.cache.background_pass(u64::MAX), None);
    assert_eq!(run.cache.cached_bytes(), 0);
}

/// `UBTRFS_IOMAP_SEEDS` asks for more than the few that each test run has time for.
fn seeds(few: u64) -> std::ops::Range<u64> {
    let asked = std::env::var("UBTRFS_IOMAP_SEEDS").ok().and_then(|count| count.parse().ok());
    0..asked.unwrap_or(few)
}

#[test]
fn random_operations_same_as_arrays() {
    for seed in seeds(30) {
        run(seed, 1500, CacheOptions::default(), u64::MAX);
    }
}

/// Hardly anything fits into memory, so that all is written back and reclaimed between any two operations.
#[test]
fn random_operations_with_little_memory_same_as_arrays() {
    let options = CacheOptions {
        cached_bytes_max: 6 * BLOCK,
        dirty_bytes_max: 3 * BLOCK,
        dirty_bytes_background: 2 * BLOCK,
        folio_bytes_max: 4 * BLOCK,
        writeback_bytes_max: 3 * BLOCK,
        ..CacheOptions::default()
    };
    for seed in seeds(30) {
        run(seed, 1500, options.clone(), 1 + seed % 5);
    }
}

#[test]
fn random_operations_where_clean_folios_go_at_once_same_as_arrays() {
    let options = CacheOptions { keeps_clean: false, ..CacheOptions::default() };
    for seed in seeds(20) {
        run(seed, 1000, options.clone(), 1 + seed % 7);
    }
}

/// The ablations are slower, not different.
#[test]
fn random_operations_with_mechanisms_off_same_as_arrays() {
    let mut ablation = CacheAblation { zero_without_batch: true, ..CacheAblation::default() };
    ablation.states.without_hint = true;
    ablation.states.lock_in_tree = true;
    let options = CacheOptions { ablation, ..CacheOptions::default() };
    for seed in seeds(20) {
        run(seed, 1000, options.clone(), u64::MAX);
    }
}
