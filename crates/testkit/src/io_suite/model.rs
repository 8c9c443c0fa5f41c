//! What a file must be, as plain bytes and sets of blocks.

use std::collections::BTreeSet;
use std::ops::Range;

use ubtrfs_iomap::Reach;

/// A file.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) block: u64,
    pub(super) bytes: Vec<u8>,
    /// Blocks that are data, dirty or mapped; others read as zeros.
    pub(super) data: BTreeSet<u64>,
    /// Blocks that have space, whether or not they are data; also beyond the end.
    pub(super) space: BTreeSet<u64>,
    /// What the last fsync made durable, and the blocks that changed since.
    pub(super) durable: Vec<u8>,
    pub(super) changed: BTreeSet<u64>,
}

pub(super) fn index(offset: u64) -> usize {
    usize::try_from(offset).expect("a file of a test fits into memory")
}

impl Model {
    pub(super) fn new(block: u64) -> Self {
        Self {
            block,
            bytes: Vec::new(),
            data: BTreeSet::new(),
            space: BTreeSet::new(),
            durable: Vec::new(),
            changed: BTreeSet::new(),
        }
    }

    pub(super) fn size(&self) -> u64 {
        u64::try_from(self.bytes.len()).expect("a length fits")
    }

    /// All of it is durable now.
    pub(super) fn synced(&mut self) {
        self.durable = self.bytes.clone();
        self.changed.clear();
    }

    /// The blocks that hold a byte of the range.
    fn touched(&self, start: u64, end: u64) -> Range<u64> {
        start / self.block..end.div_ceil(self.block)
    }

    fn note_change(&mut self, start: u64, end: u64) {
        self.changed.extend(self.touched(start, end));
    }

    fn grow(&mut self, size: u64) {
        self.note_change(self.size(), size);
        self.bytes.resize(index(size), 0);
    }

    pub(super) fn truncate(&mut self, size: u64) {
        if size > self.size() {
            return self.grow(size);
        }
        self.note_change(size, self.size());
        let block = self.block;
        self.data.retain(|kept| kept * block < size);
        self.space.retain(|kept| kept * block < size);
        self.bytes.truncate(index(size));
    }

    pub(super) fn write(&mut self, start: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let end = start + u64::try_from(bytes.len()).expect("a length fits");
        if end > self.size() {
            self.grow(end);
        }
        self.note_change(start, end);
        self.bytes[index(start)..index(end)].copy_from_slice(bytes);
        self.data.extend(self.touched(start, end));
        self.space.extend(self.touched(start, end));
    }

    /// Through a map: also behind the end, where nobody sees it.
    pub(super) fn store(&mut self, start: u64, bytes: &[u8]) {
        let size = self.size();
        self.write(start, bytes);
        self.bytes.truncate(index(size));
    }

    pub(super) fn zero(&mut self, start: u64, end: u64) {
        let end = end.min(self.size());
        if start < end {
            self.note_change(start, end);
            self.bytes[index(start)..index(end)].fill(0);
        }
    }

    pub(super) fn allocate(&mut self, start: u64, len: u64, reach: Reach) {
        if len == 0 {
            return;
        }
        self.space.extend(self.touched(start, start + len));
        if reach == Reach::Extends && start + len > self.size() {
            self.grow(start + len);
        }
    }

    /// The range is zeros, and its whole blocks are not data any more; returns those.
    pub(super) fn drop_data(&mut self, start: u64, len: u64) -> Range<u64> {
        let whole = start.div_ceil(self.block)..(start + len) / self.block;
        self.zero(start, start + len);
        self.data.retain(|block| !whole.contains(block));
        whole
    }

    pub(super) fn punch(&mut self, start: u64, len: u64) {
        let whole = self.drop_data(start, len);
        self.space.retain(|block| !whole.contains(block));
    }

    /// Blocks of `from`, which lie in it, come to `to_block`.
    pub(super) fn clone_from_file(&mut self, from: &Self, blocks: Range<u64>, to_block: u64) {
        let source = index(blocks.start * self.block)..index(blocks.end * self.block);
        self.write(to_block * self.block, &from.bytes[source]);
        for (block, at) in blocks.zip(to_block..) {
            if !from.data.contains(&block) {
                self.data.remove(&at);
            }
            if !from.space.contains(&block) {
                self.space.remove(&at);
            }
        }
    }

    pub(super) fn seek(&self, from: u64, wants_data: bool) -> Option<u64> {
        if from >= self.size() {
            return None;
        }
        let last = self.size().div_ceil(self.block);
        let found = (from / self.block..last).find(|block| self.data.contains(block) == wants_data);
        match found {
            Some(block) => Some((block * self.block).max(from)),
            None if wants_data => None,
            None => Some(self.size()),
        }
    }
}

/// Names the first byte that is not as expected.
pub(super) fn assert_same(have: &[u8], expect: &[u8], start: u64, block: u64) {
    assert_eq!(have.len(), expect.len());
    if let Some(first) = have.iter().zip(expect).position(|(have, expect)| have != expect) {
        let (have, expect) = (have[first], expect[first]);
        let at = start + u64::try_from(first).expect("a length fits");
        panic!("at {at} (block {}): have {have}, expect {expect}", at / block);
    }
}
