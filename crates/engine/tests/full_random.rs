//! Random operations on open files of a full filesystem, beside plain byte arrays: what a call took is there, what it refused has changed
//! nothing but what its documentation says, nobody else's bytes are touched, and writeback loses nothing for want of space.
//!
//! What the arrays allow where a call says that there is no space:
//! - a write or append has written exactly as many bytes as it says, none where it is an error, and so has a direct write;
//! - a file that was to become shorter is as long as it was, and what it has behind the new end may be zero, or, where the next fsync
//!   tells it, what a block had at some time since the last fsync; one that was to become longer may be so;
//! - of a range that was to be zero any byte may be, but no whole block that was to become allocated zeros, where metadata has space of its
//!   own; of a store and of a clone a front may be there, and of an allocation nothing is seen but where the file ends;
//! - an fsync, a sync and a commit never fail, but for the fsync behind a file that could not become shorter.

mod common;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::full::{create, make, make_mixed, noise, open_with, read};
use common::judge;
use common::power::{PoweredDevice, Unflushed};
use ubtrfs_engine::{
    DataFile, Error, Filesystem, InodeId, Method, NewInode, OpenOptions, Reservation,
};
use ubtrfs_iomap::{CacheOptions, FileOffset, Reach};
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::Time;
use ubtrfs_testkit::Prng;
use ubtrfs_volume::{FileDevice, OpenMode, Volume, VolumeOptions, Window};

const BLOCK: usize = 4096;
const MIB: u64 = 1 << 20;
const IMAGE_BYTES: u64 = 128 * MIB;
/// A file ends there at the latest.
const FILE_BYTES_MAX: usize = 3 << 20;
/// Of what is free, in pieces, when a run begins.
const LEFT_BYTES: u64 = 3 * MIB;
/// What becomes free where a file could not be made.
const ROOM_BYTES: u64 = 256 << 10;
const FILES: usize = 4;
const STEPS: usize = 600;
/// `UBTRFS_FULL_SEEDS` asks for more.
const SEEDS: u64 = 3;
/// Each of these calls is refused more often than that, and is made, too.
const REFUSED_MIN: u64 = 20;
const COUNTED: [&str; 6] =
    ["write", "append", "direct write", "store", "allocate", "allocate zeroed"];

const IN_PLACE: u64 = flags::NODATACOW | flags::NODATASUM;
const BITS: [u64; FILES] = [0, 0, IN_PLACE, flags::COMPRESS];

/// What fills the filesystem, and how it is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Plain,
    Zstd,
    Mixed,
}

fn at(offset: usize) -> FileOffset {
    FileOffset::new(offset as u64)
}

fn on_disk(offset: usize) -> ubtrfs_ondisk::FileOffset {
    ubtrfs_ondisk::FileOffset(offset as u64)
}

fn blocks_of(range: &Range<usize>) -> Range<usize> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}

/// Whether the call was made; it may be refused for want of space only.
fn is_done<T>(result: &Result<T, Error>) -> bool {
    match result {
        Ok(_) => true,
        Err(Error::NoSpace { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

/// What a file is to have.
struct Array {
    bytes: Vec<u8>,
    /// Of each block what it had since the last fsync, as hashes.
    versions: Vec<Vec<u64>>,
    hasher: RandomState,
}

impl Array {
    fn new() -> Self {
        Self { bytes: Vec::new(), versions: Vec::new(), hasher: RandomState::new() }
    }

    /// What a block of `bytes` hashes to, with zeros behind the end.
    fn hash(&self, bytes: &[u8], block: usize) -> u64 {
        let mut whole = [0; BLOCK];
        let have = &bytes[(block * BLOCK).min(bytes.len())..bytes.len().min((block + 1) * BLOCK)];
        whole[..have.len()].copy_from_slice(have);
        self.hasher.hash_one(whole)
    }

    /// The file has other bytes now, that may be on the medium from now on.
    fn become_bytes(&mut self, bytes: Vec<u8>) {
        let blocks = bytes.len().max(self.bytes.len()).div_ceil(BLOCK);
        let zeros = self.hash(&[], 0);
        self.versions.resize(self.versions.len().max(blocks), vec![zeros]);
        for block in 0..blocks {
            let range = block * BLOCK..(block + 1) * BLOCK;
            if bytes.get(range.clone()).is_none_or(|have| self.bytes.get(range) != Some(have)) {
                let hash = self.hash(&bytes, block);
                self.versions[block].push(hash);
            }
        }
        self.bytes = bytes;
    }

    /// All of it is on the medium.
    fn synced(&mut self) {
        let blocks = self.bytes.len().div_ceil(BLOCK);
        self.versions = (0..blocks).map(|block| vec![self.hash(&self.bytes, block)]).collect();
    }

    /// With other bytes at a place, and longer if it must be.
    fn with(&self, offset: usize, bytes: &[u8]) -> Vec<u8> {
        let mut all = self.bytes.clone();
        if !bytes.is_empty() {
            all.resize(all.len().max(offset + bytes.len()), 0);
            all[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        all
    }

    fn cut(&self, size: usize) -> Vec<u8> {
        let mut all = self.bytes.clone();
        all.resize(size, 0);
        all
    }

    /// What of a range lies in the file.
    fn within(&self, range: &Range<usize>) -> Range<usize> {
        range.start.min(self.bytes.len())..range.end.min(self.bytes.len())
    }

    /// With zeros in what of a range lies in the file.
    fn zeroed(&self, range: &Range<usize>) -> Vec<u8> {
        let mut all = self.bytes.clone();
        all[self.within(range)].fill(0);
        all
    }
}

struct Subject {
    name: String,
    id: InodeId,
    /// Twice, as each is told of errors.
    files: [DataFile; 2],
    array: Array,
    /// What the next fsync by each of them may tell.
    tells: [Telling; 2],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Telling {
    Nothing,
    MayTell,
    MustTell,
}

impl Subject {
    fn new(fs: &Filesystem, name: String, bits: u64) -> Result<Self, Error> {
        let file = create(fs, &name, bits)?;
        let id = file.id();
        let files = [file, fs.open_data(id)?];
        Ok(Self { name, id, files, array: Array::new(), tells: [Telling::Nothing; 2] })
    }

    fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0xEE; usize::try_from(self.files[0].size().bytes()).unwrap()];
        assert_eq!(self.files[0].read(at(0), &mut bytes).unwrap(), bytes.len());
        bytes
    }

    fn assert_same(&self, what: &str) {
        assert_same(&self.contents(), &self.array.bytes, &format!("{}: {what}", self.name));
    }

    fn fsync(&mut self, opened: usize) {
        let result = self.files[opened].fsync();
        match self.tells[opened] {
            Telling::Nothing => assert!(result.is_ok(), "{}: {result:?}", self.name),
            Telling::MayTell => _ = is_done(&result),
            Telling::MustTell => assert!(!is_done(&result), "{}: nobody told", self.name),
        }
        self.tells[opened] = Telling::Nothing;
        if result.is_ok() {
            self.array.synced();
        }
    }

    /// After a call that was refused: bytes outside of `range` are as they were, and those in it `may_be` so.
    fn look_again(
        &mut self,
        range: &Range<usize>,
        sizes: &[usize],
        what: &str,
        may_be: impl FnOnce(&[u8], &[u8]) -> bool,
    ) {
        let have = self.contents();
        let old = &self.array.bytes;
        assert!(sizes.contains(&have.len()), "{what}: {} bytes, not {sizes:?}", have.len());
        let mut expected = self.array.cut(have.len());
        let within = range.start.min(have.len())..range.end.min(have.len());
        let mine = &have[within.clone()];
        assert!(may_be(mine, &expected[within.clone()]), "{what}: of {} bytes before", old.len());
        expected[within].copy_from_slice(mine);
        assert_same(&have, &expected, what);
        self.array.become_bytes(have);
    }
}

fn assert_same(have: &[u8], expected: &[u8], what: &str) {
    assert_eq!(have.len(), expected.len(), "{what}");
    if let Some(wrong) = have.iter().zip(expected).position(|(have, want)| have != want) {
        panic!("{what}: {} instead of {} at {wrong}", have[wrong], expected[wrong]);
    }
}

/// A front is new, and the rest as it was.
fn is_front(have: &[u8], old: &[u8], new: &[u8]) -> bool {
    let front = have.iter().zip(new).take_while(|(have, new)| have == new).count();
    have[front..] == old[front..]
}

fn is_old_or_zero(have: &[u8], old: &[u8]) -> bool {
    have.iter().zip(old).all(|(have, old)| *have == 0 || have == old)
}

/// Of a range from `start` on the whole blocks are as they were.
fn is_same_between(start: usize, have: &[u8], old: &[u8]) -> bool {
    let first = (start.next_multiple_of(BLOCK) - start).min(have.len());
    let end = (start + have.len()) / BLOCK * BLOCK;
    let whole = first..end.saturating_sub(start).max(first);
    have[whole.clone()] == old[whole]
}

struct Run {
    kind: Kind,
    image: PathBuf,
    options: OpenOptions,
    random: Prng,
    unflushed: Arc<Unflushed>,
    fs: Filesystem,
    subjects: Vec<Subject>,
    /// Files that nobody touches.
    beside: Vec<(InodeId, Vec<u8>)>,
    made: usize,
    /// Files that only take metadata.
    takers: Vec<String>,
    /// How often each call was made, and refused.
    counts: BTreeMap<&'static str, [u64; 2]>,
}

impl Run {
    fn new(image: &Path, kind: Kind, seed: u64) -> Self {
        match kind {
            Kind::Mixed => make_mixed(image, IMAGE_BYTES),
            Kind::Plain | Kind::Zstd => make(image, IMAGE_BYTES),
        }
        let mut options = OpenOptions::default();
        if kind == Kind::Zstd {
            options.compression = Some(Method::with_default_level(Compression::Zstd));
        }
        // Of every other run hardly anything may be dirty.
        if seed % 2 == 1 {
            let (max, background) = (256 << 10, 128 << 10);
            options.page_cache = Some(CacheOptions {
                cached_bytes_max: MIB,
                dirty_bytes_max: max,
                dirty_bytes_background: background,
                ..CacheOptions::default()
            });
        }
        let unflushed = Arc::<Unflushed>::default();
        let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
        let device = PoweredDevice::new(device, Arc::clone(&unflushed));
        let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
        let fs = Filesystem::open(volume, options.clone()).unwrap();
        let mut this = Self {
            kind,
            image: image.to_owned(),
            options,
            random: Prng::of_test(seed),
            unflushed,
            fs,
            subjects: Vec::new(),
            beside: Vec::new(),
            made: 0,
            takers: Vec::new(),
            counts: BTreeMap::new(),
        };
        for bits in BITS {
            let name = this.new_name();
            this.subjects.push(Subject::new(&this.fs, name, bits).unwrap());
        }
        for (len, bits) in [(100, 0), (5000, flags::COMPRESS), (2 << 20, 0), (1 << 20, IN_PLACE)] {
            let file = create(&this.fs, &format!("beside of {len}"), bits).unwrap();
            let bytes = noise(&mut this.random, len);
            assert_eq!(file.write(at(0), &bytes).unwrap(), bytes.len());
            this.beside.push((file.id(), bytes));
        }
        this.fs.sync().unwrap();
        this.fill();
        this
    }

    /// Takes all space but a little, which is in pieces.
    fn fill(&mut self) {
        let filler = create(&self.fs, "filler", 0).unwrap();
        // Of one extent a part does not become free.
        let mut extents = Vec::new();
        let mut blocks_max = 64;
        while blocks_max > 0 {
            let (offset, len) = (filler.size(), (1 + self.random.below(blocks_max)) * BLOCK as u64);
            match filler.allocate(offset, len, Reach::Extends) {
                Ok(()) => extents.push((offset, len)),
                Err(Error::NoSpace { .. }) => blocks_max /= 2,
                Err(error) => panic!("{error}"),
            }
        }
        self.fs.commit().unwrap();
        let mut left = LEFT_BYTES;
        while left > 0 {
            let (offset, len) = extents.swap_remove(self.random.index(extents.len()));
            filler.punch_hole(offset, len).unwrap();
            left = left.saturating_sub(len);
        }
        self.fs.sync().unwrap();
    }

    /// Takes what metadata has, with attributes of files that nobody touches.
    fn fill_metadata(&mut self) {
        let mut last = self.fs.top_level();
        for number in 0_u64.. {
            let Ok(mut handle) = self.fs.begin(Reservation::create(1)) else { return };
            if number.is_multiple_of(4) {
                let new = NewInode::new(0o100_644, Time::default());
                let name = format!("metadata {number}");
                last = handle.create(self.fs.top_level(), name.as_bytes(), &new).unwrap();
                self.takers.push(name);
            }
            handle.set_xattr(last, format!("user.{number}").as_bytes(), &[7; 3000]).unwrap();
        }
    }

    /// Removes one of those files, or cuts off a part of what fills the filesystem.
    fn make_room(&mut self) {
        if let Some(taker) = self.takers.pop() {
            self.fs.unlink(self.fs.top_level(), taker.as_bytes()).unwrap();
        } else {
            let id = self.fs.lookup(self.fs.top_level(), b"filler").unwrap();
            let filler = self.fs.open_data(id).unwrap();
            let size = filler.size().bytes().checked_sub(ROOM_BYTES).expect("there is room by now");
            filler.truncate(FileOffset::new(size)).unwrap();
        }
        self.fs.commit().unwrap();
    }

    fn new_name(&mut self) -> String {
        self.made += 1;
        format!("file {}", self.made)
    }

    fn count(&mut self, call: &'static str, is_done: bool) {
        self.counts.entry(call).or_default()[usize::from(!is_done)] += 1;
    }

    /// What nobody wrote before, some of which compresses.
    fn bytes(&mut self, len: usize) -> Vec<u8> {
        match self.random.below(3) {
            0 => self.random.text(len),
            _ => self.random.bytes(len),
        }
    }

    /// A range with ends on blocks or anywhere, not empty.
    fn range(&mut self) -> Range<usize> {
        let random = &mut self.random;
        let len_max = [5000, 100_000, 300_000, 2 << 20][random.index(4)];
        let (mut start, mut len) = (random.index(FILE_BYTES_MAX - 1), 1 + random.index(len_max));
        if random.chance(1, 2) {
            start = start / BLOCK * BLOCK;
            len = len.next_multiple_of(BLOCK);
        }
        start..(start + len).min(FILE_BYTES_MAX)
    }

    fn step(&mut self) {
        let chosen = self.random.index(FILES);
        let range = self.range();
        match self.random.below(36) {
            0..=6 => self.write(chosen, &range),
            7..=8 => self.append(chosen, range.len()),
            9..=12 => self.write_direct(chosen, &range),
            13..=15 => self.truncate(chosen, range.start),
            16 => self.zero(chosen, &range),
            17 => self.punch(chosen, &range),
            18..=19 => self.allocate(chosen, &range),
            20..=21 => self.allocate_zeroed(chosen, &range),
            22..=23 => self.clone_range(chosen, &range),
            24..=26 => self.store(chosen, &range),
            27 => self.fault(chosen, range.start),
            28..=29 => {
                let opened = self.random.index(2);
                self.subjects[chosen].fsync(opened);
            }
            30 => self.fs.commit().unwrap(),
            31 => self.fs.write_back_due(self.random.below(100_000)),
            32 => self.fs.write_back_due(u64::MAX),
            33 => self.fs.drop_clean_data(),
            34 if self.random.chance(1, 3) => self.make_anew(chosen),
            _ => _ = self.fs.flush_files(),
        }
        self.subjects[chosen].assert_same("after a step");
    }

    /// Bytes were given, and so many taken.
    fn taken(&mut self, call: &'static str, chosen: usize, start: usize, bytes: &[u8], len: usize) {
        self.count(call, len == bytes.len());
        let array = &mut self.subjects[chosen].array;
        array.become_bytes(array.with(start, &bytes[..len]));
    }

    fn write(&mut self, chosen: usize, range: &Range<usize>) {
        let bytes = self.bytes(range.len());
        let result = self.subjects[chosen].files[0].write(at(range.start), &bytes);
        let len = if is_done(&result) { result.unwrap() } else { 0 };
        self.taken("write", chosen, range.start, &bytes, len);
    }

    fn append(&mut self, chosen: usize, len: usize) {
        let size = self.subjects[chosen].array.bytes.len();
        let bytes = self.bytes(len.min(FILE_BYTES_MAX - size));
        let result = self.subjects[chosen].files[0].append(&bytes);
        let len = if is_done(&result) { result.unwrap().1 } else { 0 };
        self.taken("append", chosen, size, &bytes, len);
    }

    fn write_direct(&mut self, chosen: usize, range: &Range<usize>) {
        let bytes = self.bytes(range.len());
        let result = self.subjects[chosen].files[0].direct_write(at(range.start), &bytes);
        let len = if is_done(&result) { result.unwrap() } else { 0 };
        self.taken("direct write", chosen, range.start, &bytes, len);
    }

    fn truncate(&mut self, chosen: usize, size: usize) {
        let subject = &mut self.subjects[chosen];
        let old = subject.array.bytes.len();
        let result = subject.files[0].truncate(at(size));
        let is_done = is_done(&result);
        if is_done {
            subject.array.become_bytes(subject.array.cut(size));
        } else if size >= old {
            subject.look_again(&(old..size), &[old], "longer", |_, _| true);
        } else {
            self.not_shorter(chosen, size);
        }
        self.count(if size < old { "shorter" } else { "longer" }, is_done);
    }

    /// It could not be made shorter.
    fn not_shorter(&mut self, chosen: usize, size: usize) {
        let subject = &mut self.subjects[chosen];
        let have = subject.contents();
        let old = subject.array.bytes.clone();
        assert_eq!(have.len(), old.len(), "not shorter");
        assert_same(&have[..size], &old[..size], "in front of the end that it did not get");
        let mut tells = Telling::MayTell;
        for block in blocks_of(&(size..old.len())) {
            let part = size.max(block * BLOCK)..old.len().min((block + 1) * BLOCK);
            if is_old_or_zero(&have[part.clone()], &old[part]) {
                continue;
            }
            let hash = subject.array.hash(&have, block);
            let is_older = block * BLOCK >= size && subject.array.versions[block].contains(&hash);
            assert!(is_older, "block {block} is what it never was");
            tells = Telling::MustTell;
        }
        for telling in &mut subject.tells {
            if *telling != Telling::MustTell {
                *telling = tells;
            }
        }
        subject.array.become_bytes(have);
    }

    fn zero(&mut self, chosen: usize, range: &Range<usize>) {
        let subject = &self.subjects[chosen];
        let result = subject.files[0].zero_range(at(range.start), range.len() as u64);
        self.made_zero("zero", chosen, range, &result, Reach::Stays);
    }

    fn punch(&mut self, chosen: usize, range: &Range<usize>) {
        let subject = &self.subjects[chosen];
        let result = subject.files[0].punch_hole(at(range.start), range.len() as u64);
        self.made_zero("punch", chosen, range, &result, Reach::Stays);
    }

    fn allocate_zeroed(&mut self, chosen: usize, range: &Range<usize>) {
        // What is dirty there may have taken what is free.
        if self.random.chance(1, 2) {
            self.write(chosen, range);
        }
        let reach = self.reach();
        let file = &self.subjects[chosen].files[0];
        let result = file.allocate_zeroed(at(range.start), range.len() as u64, reach);
        self.made_zero("allocate zeroed", chosen, range, &result, reach);
    }

    /// A range was made zero, or partly so.
    fn made_zero(
        &mut self,
        call: &'static str,
        chosen: usize,
        range: &Range<usize>,
        result: &Result<(), Error>,
        reach: Reach,
    ) {
        let is_done = is_done(result);
        let subject = &mut self.subjects[chosen];
        let (old, end) = sizes(subject, range, reach);
        if is_done {
            let mut bytes = subject.array.zeroed(range);
            bytes.resize(end, 0);
            subject.array.become_bytes(bytes);
        } else {
            // There is space for the whole blocks from the beginning, or they are left; but in mixed groups metadata may take it meanwhile.
            let is_all_or_none = call == "allocate zeroed" && self.kind != Kind::Mixed;
            subject.look_again(range, &[old, end], call, |have, old| match is_all_or_none {
                true => is_same_between(range.start, have, old) && is_old_or_zero(have, old),
                false => is_old_or_zero(have, old),
            });
        }
        self.count(call, is_done);
    }

    fn reach(&mut self) -> Reach {
        if self.random.chance(1, 2) { Reach::Extends } else { Reach::Stays }
    }

    fn allocate(&mut self, chosen: usize, range: &Range<usize>) {
        let reach = self.reach();
        let subject = &mut self.subjects[chosen];
        let (old, end) = sizes(subject, range, reach);
        let result = subject.files[0].allocate(at(range.start), range.len() as u64, reach);
        let is_done = is_done(&result);
        if is_done {
            subject.array.become_bytes(subject.array.cut(end));
        } else {
            subject.look_again(&(0..0), &[old, end], "allocate", |_, _| true);
        }
        self.count("allocate", is_done);
    }

    /// Whole blocks of another file that has checksums or has not, too.
    fn clone_range(&mut self, chosen: usize, to: &Range<usize>) {
        let source = self.random.index(FILES);
        let is_alike = (BITS[source] == IN_PLACE) == (BITS[chosen] == IN_PLACE);
        let whole_blocks = self.subjects[source].array.bytes.len() / BLOCK;
        if source == chosen || !is_alike || whole_blocks == 0 {
            return;
        }
        let first = self.random.index(whole_blocks);
        let (start, to_start) = (first * BLOCK, to.start / BLOCK * BLOCK);
        let len = to.len().next_multiple_of(BLOCK).min(whole_blocks * BLOCK - start);
        let len = len.min(FILE_BYTES_MAX - to_start);
        let new = self.subjects[source].array.bytes[start..start + len].to_vec();
        let disk = on_disk(start)..on_disk(start + len);
        let (from, into) = (self.subjects[source].id, self.subjects[chosen].id);
        let result = self.fs.clone_range(from, disk, into, on_disk(to_start));
        let is_done = is_done(&result);
        let subject = &mut self.subjects[chosen];
        if is_done {
            subject.array.become_bytes(subject.array.with(to_start, &new));
        } else {
            let old = subject.array.bytes.len();
            let range = to_start..to_start + len;
            subject.look_again(&range, &[old, old.max(range.end)], "clone", |have, old| {
                is_front(have, old, &new)
            });
        }
        self.subjects[source].assert_same("cloned from");
        self.count("clone", is_done);
    }

    /// Stores through a map, where the file has blocks.
    fn store(&mut self, chosen: usize, range: &Range<usize>) {
        let size = self.subjects[chosen].array.bytes.len();
        // Also behind the end in the last block, which nobody sees.
        let end = range.end.min(size.next_multiple_of(BLOCK));
        let start = range.start % size.max(1);
        let len = end.saturating_sub(start).min(range.len());
        if size == 0 || len == 0 {
            return;
        }
        let bytes = self.bytes(len);
        let subject = &mut self.subjects[chosen];
        let map = subject.files[0].map(at(0), FILE_BYTES_MAX as u64).unwrap();
        let is_done = is_done(&map.store(at(start), &bytes));
        let seen = &bytes[..len.min(size - start)];
        if is_done {
            subject.array.become_bytes(subject.array.with(start, seen));
        } else {
            subject.look_again(&(start..start + len), &[size], "store", |have, old| {
                is_front(have, old, seen)
            });
        }
        self.count("store", is_done);
    }

    /// A fault changes nothing that is seen.
    fn fault(&mut self, chosen: usize, start: usize) {
        let subject = &self.subjects[chosen];
        let size = subject.array.bytes.len();
        if size > 0 {
            let map = subject.files[0].map(at(0), FILE_BYTES_MAX as u64).unwrap();
            let is_done = is_done(&map.fault_for_write(at(start % size)));
            self.count("fault", is_done);
        }
    }

    /// Another file comes in the place of one that is closed and loses its name, dirty or not.
    fn make_anew(&mut self, chosen: usize) {
        let old = self.subjects.remove(chosen);
        let name = old.name.clone();
        drop(old);
        self.fs.unlink(self.fs.top_level(), name.as_bytes()).unwrap();
        let made = loop {
            let name = self.new_name();
            let made = Subject::new(&self.fs, name.clone(), BITS[chosen]);
            self.count("create", is_done(&made));
            if let Ok(made) = made {
                break made;
            }
            let found = self.fs.lookup(self.fs.top_level(), name.as_bytes());
            assert!(matches!(found, Err(Error::NotFound { .. })), "{found:?}");
            self.make_room();
        };
        self.subjects.insert(chosen, made);
    }

    fn check_all(&self, what: &str) {
        for subject in &self.subjects {
            subject.assert_same(what);
        }
        for (id, bytes) in &self.beside {
            assert_same(&read(&self.fs, *id), bytes, &format!("beside, {what}"));
        }
    }

    /// A file that was made durable is there, whatever else is, if the power goes now.
    fn cut(&mut self, chosen: usize) {
        (0..2).for_each(|opened| self.subjects[chosen].fsync(opened));
        let copy = self.image.with_extension("cut");
        std::fs::copy(&self.image, &copy).unwrap();
        self.unflushed.cut(&copy, &mut self.random);
        check(&copy);
        let fs = open_with(&copy, self.options.clone());
        let subject = &self.subjects[chosen];
        assert_same(&read(&fs, subject.id), &subject.array.bytes, "after a cut");
        for (id, bytes) in &self.beside {
            assert_same(&read(&fs, *id), bytes, "beside, after a cut");
        }
        drop(fs);
        std::fs::remove_file(&copy).unwrap();
    }

    /// Closes, lets all judge, and opens anew.
    fn end(mut self) -> BTreeMap<&'static str, [u64; 2]> {
        self.check_all("at the end");
        for subject in &mut self.subjects {
            (0..2).for_each(|opened| subject.fsync(opened));
        }
        self.fs.sync().unwrap();
        self.fs.drop_clean_data();
        self.check_all("read anew");
        let expected: Vec<_> =
            self.subjects.into_iter().map(|subject| (subject.id, subject.array.bytes)).collect();
        drop(self.fs);
        check(&self.image);
        judge(&self.image);
        let fs = open_with(&self.image, self.options);
        for (id, bytes) in expected.iter().chain(&self.beside) {
            assert_same(&read(&fs, *id), bytes, "opened anew");
        }
        self.counts
    }
}

/// How long a file is, and will be if an operation on the range is done.
fn sizes(subject: &Subject, range: &Range<usize>, reach: Reach) -> (usize, usize) {
    let old = subject.array.bytes.len();
    let end = if reach == Reach::Extends { old.max(range.end) } else { old };
    (old, end)
}

/// The checker that shares no code with the engine finds nothing.
fn check(image: &Path) {
    let device = FileDevice::open(image, OpenMode::ReadOnly, Window::Whole).unwrap();
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(vec![Arc::new(device)], &options).unwrap();
    let options = ubtrfs_check::CheckOptions { data: true, ..Default::default() };
    let report = ubtrfs_check::check(&volume, &options).unwrap();
    let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
    assert!(report.is_clean(), "{errors:#?}");
}

fn seed_count() -> u64 {
    let wanted = std::env::var("UBTRFS_FULL_SEEDS").ok();
    wanted.map_or(SEEDS, |count| count.parse().expect("UBTRFS_FULL_SEEDS is a number"))
}

fn run(kind: Kind) {
    let mut all = BTreeMap::<_, [u64; 2]>::new();
    for seed in 0..seed_count() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut run = Run::new(&dir.path().join("image"), kind, seed);
        // Of some there is no space for metadata either.
        if seed % 4 == 1 {
            run.fill_metadata();
        }
        for step in 0..STEPS {
            run.step();
            if step % 50 == 49 {
                run.check_all("between steps");
            }
            if step % 150 == 149 {
                let chosen = run.random.index(FILES);
                run.cut(chosen);
            }
        }
        for (call, counts) in run.end() {
            let sum = all.entry(call).or_default();
            (0..2).for_each(|index| sum[index] += counts[index]);
        }
    }
    println!("{kind:?}, done and refused: {all:?}");
    for call in COUNTED {
        let [done, refused] = all[call];
        assert!(done > 0 && refused > REFUSED_MIN, "{call}: {done} done, {refused} refused");
    }
    assert!(["clone", "shorter", "fault"].iter().all(|call| all[call][1] > 0), "{all:?}");
}

#[test]
fn random_operations_on_a_full_filesystem_same_as_arrays() {
    run(Kind::Plain);
}

#[test]
fn random_operations_on_a_full_compressed_filesystem_same_as_arrays() {
    run(Kind::Zstd);
}

#[test]
fn random_operations_on_full_mixed_groups_same_as_arrays() {
    run(Kind::Mixed);
}
