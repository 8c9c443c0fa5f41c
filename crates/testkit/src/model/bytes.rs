//! A file's bytes, sparse.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::zeros::is_zeros;

const BLOCK_BYTES: usize = 4096;
const BLOCK: u64 = 4096;

/// Bytes of which long runs may be zeros. Two are equal when all their bytes are, wherever their
/// holes are. A clone shares what does not change.
#[derive(Clone, Debug, Default)]
pub struct SparseBytes {
    len_bytes: u64,
    /// Zeros where there is none; what lies beyond the end is zeros.
    blocks: BTreeMap<u64, Arc<[u8; BLOCK_BYTES]>>,
}

impl SparseBytes {
    /// How many they are.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// Fills `buffer` from `at` on, with zeros beyond the end.
    pub fn read(&self, at: u64, buffer: &mut [u8]) {
        for_each_block(at, buffer.len(), |block, inside, range| {
            let bytes = &mut buffer[range];
            match self.blocks.get(&block) {
                Some(stored) => bytes.copy_from_slice(&stored[inside..inside + bytes.len()]),
                None => bytes.fill(0),
            }
        });
    }

    /// Writes bytes, which may reach beyond the end.
    pub fn write(&mut self, at: u64, bytes: &[u8]) {
        for_each_block(at, bytes.len(), |block, inside, range| {
            let stored = self.blocks.entry(block).or_insert_with(|| Arc::new([0; BLOCK_BYTES]));
            let bytes = &bytes[range];
            Arc::make_mut(stored)[inside..inside + bytes.len()].copy_from_slice(bytes);
        });
        if !bytes.is_empty() {
            let end = at + u64::try_from(bytes.len()).expect("a length fits");
            self.len_bytes = self.len_bytes.max(end);
        }
    }

    /// Cuts off, or adds zeros.
    pub fn resize(&mut self, len_bytes: u64) {
        if len_bytes < self.len_bytes {
            self.zero(len_bytes, self.len_bytes - len_bytes);
        }
        self.len_bytes = len_bytes;
    }

    /// Turns a range into zeros; the length stays.
    pub fn zero(&mut self, at: u64, len_bytes: u64) {
        let end = at.saturating_add(len_bytes);
        let whole = at.div_ceil(BLOCK)..end / BLOCK;
        self.blocks.retain(|block, _| !whole.contains(block));
        for block in [at / BLOCK, end / BLOCK] {
            let start = block * BLOCK;
            let from = at.clamp(start, start + BLOCK) - start;
            let to = end.clamp(start, start + BLOCK) - start;
            if from < to
                && let Some(stored) = self.blocks.get_mut(&block)
            {
                let index = |offset: u64| usize::try_from(offset).expect("within a block");
                Arc::make_mut(stored)[index(from)..index(to)].fill(0);
            }
        }
    }

    /// Takes over a range of another file's bytes, as a reflink does.
    pub fn copy_from(&mut self, at: u64, source: &Self, from: u64, len_bytes: u64) {
        let mut buffer = vec![0; usize::try_from(len_bytes).expect("a range in memory")];
        source.read(from, &mut buffer);
        self.write(at, &buffer);
    }
}

impl PartialEq for SparseBytes {
    fn eq(&self, other: &Self) -> bool {
        let covers = |one: &Self, two: &Self| {
            one.blocks.iter().all(|(block, bytes)| match two.blocks.get(block) {
                Some(stored) => stored == bytes,
                None => is_zeros(&bytes[..]),
            })
        };
        self.len_bytes == other.len_bytes && covers(self, other) && covers(other, self)
    }
}

impl Eq for SparseBytes {}

/// Calls with each block that a range touches, the offset in the block, and the range in the buffer.
fn for_each_block(at: u64, len: usize, mut body: impl FnMut(u64, usize, std::ops::Range<usize>)) {
    let mut done = 0;
    while done < len {
        let offset = at + u64::try_from(done).expect("a length fits");
        let inside = usize::try_from(offset % BLOCK).expect("less than a block");
        let count = (BLOCK_BYTES - inside).min(len - done);
        body(offset / BLOCK, inside, done..done + count);
        done += count;
    }
}
