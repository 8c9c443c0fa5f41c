//! The bytes of a device, sparse, and shared between states that differ in a few blocks.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{SeekFrom, seek};

use crate::zeros::is_zeros;

const BLOCK_BYTES: usize = 4096;
const BLOCK: u64 = 4096;
const GROUP_BLOCKS: u64 = 64;
const READ_BYTES: usize = 64 * BLOCK_BYTES;

type Block = [u8; BLOCK_BYTES];

/// Blocks side by side; those that were never written are zeros.
type Group = BTreeMap<u64, Arc<Block>>;

/// The bytes of a device. A clone shares all of them, and the first change of a block afterwards
/// copies it, its group and the list of groups: thousands of states cost little more than what
/// they differ in.
#[derive(Clone, Debug)]
pub struct Image {
    len_bytes: u64,
    groups: Arc<BTreeMap<u64, Arc<Group>>>,
}

impl Image {
    /// Zeros.
    pub fn new(len_bytes: u64) -> Self {
        Self { len_bytes, groups: Arc::default() }
    }

    /// Its length.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Cuts it off, or adds zeros.
    pub fn resize(&mut self, len_bytes: u64) {
        if len_bytes < self.len_bytes {
            let groups = Arc::make_mut(&mut self.groups);
            let (first, inside) = (len_bytes / BLOCK, len_bytes % BLOCK);
            groups.split_off(&(first / GROUP_BLOCKS + 1));
            if let Some(group) = groups.get_mut(&(first / GROUP_BLOCKS)) {
                let cut = Arc::make_mut(group).split_off(&first);
                if let Some(block) = cut.get(&first).filter(|_| inside > 0) {
                    let mut kept = **block;
                    kept[usize::try_from(inside).expect("less than a block")..].fill(0);
                    Arc::make_mut(group).insert(first, Arc::new(kept));
                }
            }
        }
        self.len_bytes = len_bytes;
    }

    /// Whether both are as long, and hold the same in each of those blocks.
    pub fn is_same_in(&self, other: &Self, blocks: &BlockSet) -> bool {
        if self.len_bytes != other.len_bytes {
            return false;
        }
        if Arc::ptr_eq(&self.groups, &other.groups) {
            return true;
        }
        let covers = |one: &Self, two: &Self| {
            one.groups.iter().all(|(number, group)| {
                let others = two.groups.get(number);
                if others.is_some_and(|others| Arc::ptr_eq(group, others)) {
                    return true;
                }
                group.iter().all(|(block, bytes)| {
                    let their = others.and_then(|others| others.get(block));
                    match their {
                        Some(their) if Arc::ptr_eq(their, bytes) => true,
                        _ if !blocks.contains(*block) => true,
                        Some(their) => their == bytes,
                        None => is_zeros(&bytes[..]),
                    }
                })
            })
        };
        covers(self, other) && covers(other, self)
    }

    /// Takes over what the other holds in a range.
    pub(super) fn copy_range(&mut self, other: &Self, at: u64, len: usize) {
        let mut bytes = vec![0; len];
        other.read(at, &mut bytes);
        self.write(at, &bytes);
    }

    /// Fills `buffer` from `at` on. The range must lie inside.
    pub fn read(&self, at: u64, buffer: &mut [u8]) {
        for_each_block(at, buffer.len(), |block, inside, range| {
            let bytes = &mut buffer[range];
            let group = self.groups.get(&(block / GROUP_BLOCKS));
            match group.and_then(|group| group.get(&block)) {
                Some(stored) => bytes.copy_from_slice(&stored[inside..inside + bytes.len()]),
                None => bytes.fill(0),
            }
        });
    }

    /// Writes `bytes` at `at`. The range must lie inside.
    pub fn write(&mut self, at: u64, bytes: &[u8]) {
        let groups = Arc::make_mut(&mut self.groups);
        for_each_block(at, bytes.len(), |block, inside, range| {
            let group = Arc::make_mut(groups.entry(block / GROUP_BLOCKS).or_default());
            let bytes = &bytes[range];
            if let Ok(whole) = <&Block>::try_from(bytes) {
                group.insert(block, Arc::new(*whole));
            } else {
                let stored = group.entry(block).or_insert_with(|| Arc::new([0; BLOCK_BYTES]));
                Arc::make_mut(stored)[inside..inside + bytes.len()].copy_from_slice(bytes);
            }
        });
    }

    /// A number that is the same for images that hold the same.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.len_bytes.hash(&mut hasher);
        for (number, bytes) in self.groups.values().flat_map(|group| group.iter()) {
            if !is_zeros(&bytes[..]) {
                (number, &bytes[..]).hash(&mut hasher);
            }
        }
        hasher.finish()
    }

    /// The numbers of those blocks of 4 KiB in a range that were ever written.
    pub(super) fn stored_blocks(&self, range: Range<u64>) -> Vec<u64> {
        let groups =
            self.groups.range(range.start / GROUP_BLOCKS..range.end.div_ceil(GROUP_BLOCKS));
        let blocks = groups.flat_map(|(_, group)| group.keys().copied());
        blocks.filter(|block| range.contains(block)).collect()
    }

    /// What an image file holds.
    ///
    /// # Panics
    /// If the file cannot be read.
    pub fn read_from(file: &Path) -> Self {
        let file = File::open(file).expect("the image can be opened");
        let len_bytes = file.metadata().expect("a file has a length").len();
        let mut image = Self::new(len_bytes);
        let mut bytes = vec![0; READ_BYTES];
        let mut at = 0;
        // The holes of a sparse file are left out; past the last data there is an error.
        while let Ok(data) = seek(&file, SeekFrom::Data(at)) {
            at = data / BLOCK * BLOCK;
            let rest = usize::try_from(len_bytes - at).unwrap_or(usize::MAX);
            let bytes = &mut bytes[..rest.min(READ_BYTES)];
            file.read_exact_at(bytes, at).expect("the image can be read");
            for block in bytes.chunks(BLOCK_BYTES) {
                if !is_zeros(block) {
                    image.write(at, block);
                }
                at += u64::try_from(block.len()).expect("a length fits");
            }
        }
        image
    }

    /// Writes it out as a sparse image file, for judges that read files.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write_to(&self, file: &Path) {
        let file = File::create(file).expect("the image can be created");
        file.set_len(self.len_bytes).expect("the image can be that long");
        for (block, bytes) in self.groups.values().flat_map(|group| group.iter()) {
            let rest = usize::try_from(self.len_bytes - block * BLOCK).unwrap_or(usize::MAX);
            let bytes = &bytes[..rest.min(BLOCK_BYTES)];
            file.write_all_at(bytes, block * BLOCK).expect("the image can be written");
        }
    }
}

/// Numbers of blocks of 4 KiB.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BlockSet {
    words: Vec<u64>,
}

impl BlockSet {
    /// Whether a block is in it.
    pub fn contains(&self, block: u64) -> bool {
        let word = usize::try_from(block / 64).ok().and_then(|index| self.words.get(index));
        word.is_some_and(|word| word >> (block % 64) & 1 != 0)
    }

    /// Takes in the blocks that a range of bytes touches.
    pub fn insert_range(&mut self, at: u64, len: usize) {
        for_each_block(at, len, |block, _, _| {
            let index = usize::try_from(block / 64).expect("an image in memory");
            if self.words.len() <= index {
                self.words.resize(index + 1, 0);
            }
            self.words[index] |= 1 << (block % 64);
        });
    }

    /// Takes in all that the other has.
    pub fn insert_all(&mut self, other: &Self) {
        if self.words.len() < other.words.len() {
            self.words.resize(other.words.len(), 0);
        }
        for (word, others) in self.words.iter_mut().zip(&other.words) {
            *word |= others;
        }
    }
}

/// Calls with each block that a range touches, the offset in the block, and the range in the buffer.
fn for_each_block(at: u64, len: usize, mut body: impl FnMut(u64, usize, Range<usize>)) {
    let mut done = 0;
    while done < len {
        let offset = at + u64::try_from(done).expect("a length fits");
        let inside = usize::try_from(offset % BLOCK).expect("less than a block");
        let count = (BLOCK_BYTES - inside).min(len - done);
        body(offset / BLOCK, inside, done..done + count);
        done += count;
    }
}
