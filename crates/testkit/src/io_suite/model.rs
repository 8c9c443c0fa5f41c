//! What a file must be, as plain bytes and sets of blocks, and what it may be after a crash.
//!
//! A crash may bring back each block as it was at any moment since the last sync, by itself; no block is what another was, nor
//! what it was before that sync, nor anything else.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ubtrfs_iomap::Reach;

use super::content::difference;

/// A file.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) block: u64,
    pub(super) bytes: Vec<u8>,
    /// Blocks that are data, dirty or mapped; others read as zeros.
    pub(super) data: BTreeSet<u64>,
    /// Blocks that have space, whether or not they are data; also beyond the end.
    pub(super) space: BTreeSet<u64>,
    past: Past,
}

/// What a file was since it was last made durable, in whole blocks; behind its end a block is zeros.
#[derive(Debug, Default)]
struct Past {
    /// What is durable of each block; of those not named, zeros.
    durable: BTreeMap<u64, Vec<u8>>,
    /// What each block was after that, oldest first.
    later: BTreeMap<u64, Vec<Vec<u8>>>,
    /// Where the file ended at some moment.
    sizes: BTreeSet<u64>,
    /// Writes that made it longer. Written back in parts, it ends for a time where one of those does.
    grown: Vec<Range<u64>>,
    /// Each change may have found any of the earlier ones lost.
    loses: bool,
}

pub(super) fn index(offset: u64) -> usize {
    usize::try_from(offset).expect("a file of a test fits into memory")
}

impl Past {
    /// What a block was, the durable value first.
    fn values_of(&self, number: u64) -> impl Iterator<Item = &Vec<u8>> {
        let later = self.later.get(&number).map_or(&[][..], Vec::as_slice);
        self.durable.get(&number).into_iter().chain(later)
    }
}

impl Model {
    pub(super) fn new(block: u64) -> Self {
        Self::durable(block, Vec::new(), BTreeSet::new(), BTreeSet::new())
    }

    /// One that is durable as it is.
    pub(super) fn durable(
        block: u64,
        bytes: Vec<u8>,
        data: BTreeSet<u64>,
        space: BTreeSet<u64>,
    ) -> Self {
        let mut model = Self { block, bytes, data, space, past: Past::default() };
        model.synced();
        model
    }

    pub(super) fn size(&self) -> u64 {
        u64::try_from(self.bytes.len()).expect("a length fits")
    }

    /// A block as it is, with zeros behind the end of the file.
    fn block_now(&self, number: u64) -> Vec<u8> {
        let start = index(number * self.block).min(self.bytes.len());
        let end = index((number + 1) * self.block).min(self.bytes.len());
        let mut block = self.bytes[start..end].to_vec();
        block.resize(index(self.block), 0);
        block
    }

    /// All of it is durable now.
    pub(super) fn synced(&mut self) {
        self.past = Past::default();
        self.make_durable(self.size());
        self.past.sizes.insert(self.size());
    }

    /// What it has before `end` is durable now, and that it ends there or further on.
    pub(super) fn synced_up_to(&mut self, end: u64) {
        self.make_durable(end);
        let least = self.size().min(end);
        let Past { sizes, grown, .. } = &mut self.past;
        let was_less = sizes.first().is_some_and(|size| *size < least);
        sizes.retain(|size| *size >= least);
        // Where it did, that was made durable in between.
        sizes.extend(was_less.then_some(least));
        grown.iter_mut().for_each(|grown| grown.start = grown.start.max(least));
        grown.retain(|grown| !grown.is_empty());
    }

    fn make_durable(&mut self, end: u64) {
        for number in self.touched(0, end) {
            self.past.later.remove(&number);
            self.past.durable.insert(number, self.block_now(number));
        }
    }

    /// The blocks that hold a byte of the range.
    pub(super) fn touched(&self, start: u64, end: u64) -> Range<u64> {
        start / self.block..end.div_ceil(self.block)
    }

    /// From now on until the next sync a change may be lost before the next one is made.
    pub(super) fn begin_losing(&mut self) {
        self.past.loses = true;
    }

    /// Whether what was written may be lost by now.
    pub(super) fn loses(&self) -> bool {
        self.past.loses
    }

    /// The file was cut at `size`, and that cannot be lost: what it had from there on never comes back.
    pub(super) fn was_cut(&mut self, size: u64) {
        let block = self.block;
        let cut = |number: u64, value: &mut Vec<u8>| {
            let kept = index(size.saturating_sub(number * block).min(block));
            value[kept..].fill(0);
        };
        let Past { durable, later, .. } = &mut self.past;
        durable.range_mut(size / block..).for_each(|(number, value)| cut(*number, value));
        for (number, values) in later.range_mut(size / block..) {
            values.iter_mut().for_each(|value| cut(*number, value));
        }
    }

    /// Bytes of the range are others by now.
    fn changed(&mut self, start: u64, end: u64) {
        for number in self.touched(start, end) {
            let now = self.block_now(number);
            let mut new = vec![now];
            if self.past.loses {
                let first = number * self.block;
                let part = index(start.saturating_sub(first))..index((end - first).min(self.block));
                let zeros = vec![0; index(self.block)];
                let earlier = self.past.values_of(number).cloned().collect::<Vec<_>>();
                for mut was in earlier.into_iter().chain([zeros]) {
                    was[part.clone()].copy_from_slice(&new[0][part.clone()]);
                    new.push(was);
                }
            }
            let later = self.past.later.entry(number).or_default();
            for value in new {
                if later.last() != Some(&value) && !(self.past.loses && later.contains(&value)) {
                    later.push(value);
                }
            }
        }
    }

    fn grow(&mut self, size: u64) {
        self.bytes.resize(index(size), 0);
        self.past.sizes.insert(size);
    }

    /// By a write, of which a part may be on the medium before the rest.
    fn grow_in_parts(&mut self, size: u64) {
        self.past.grown.push(self.size()..size);
        self.grow(size);
    }

    pub(super) fn truncate(&mut self, size: u64) {
        if size > self.size() {
            return self.grow(size);
        }
        let old = self.size();
        let block = self.block;
        self.data.retain(|kept| kept * block < size);
        self.space.retain(|kept| kept * block < size);
        self.bytes.truncate(index(size));
        self.past.sizes.insert(size);
        self.changed(size, old);
    }

    pub(super) fn write(&mut self, start: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let end = start + u64::try_from(bytes.len()).expect("a length fits");
        if end > self.size() {
            self.grow_in_parts(end);
        }
        self.bytes[index(start)..index(end)].copy_from_slice(bytes);
        self.data.extend(self.touched(start, end));
        self.space.extend(self.touched(start, end));
        self.changed(start, end);
    }

    /// Through a map: also behind the end, where nobody sees it.
    pub(super) fn store(&mut self, start: u64, bytes: &[u8]) {
        let len = u64::try_from(bytes.len()).expect("a length fits");
        let in_file = index(len.min(self.size().saturating_sub(start)));
        self.write(start, &bytes[..in_file]);
        if len > 0 {
            self.data.extend(self.touched(start, start + len));
            self.space.extend(self.touched(start, start + len));
        }
    }

    pub(super) fn zero(&mut self, start: u64, end: u64) {
        let end = end.min(self.size());
        if start < end {
            self.bytes[index(start)..index(end)].fill(0);
            self.changed(start, end);
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

    /// Whether the file may end there after a crash.
    fn may_end_at(&self, size: u64) -> bool {
        let is_of_a_part = |grown: &Range<u64>| {
            size.is_multiple_of(self.block) && grown.start < size && size < grown.end
        };
        self.past.sizes.contains(&size) || self.past.grown.iter().any(is_of_a_part)
    }

    /// That a crash may have made this of the file.
    pub(super) fn assert_may_crash_to(&self, found: &[u8]) {
        let size = u64::try_from(found.len()).expect("a length fits");
        let Past { sizes, grown, .. } = &self.past;
        assert!(self.may_end_at(size), "ends at {size}, was {sizes:?}, written over {grown:?}");
        self.assert_blocks_were(found);
    }

    /// That each block is what that block was at some moment since the last sync.
    pub(super) fn assert_blocks_were(&self, found: &[u8]) {
        for (number, have) in (0_u64..).zip(found.chunks(index(self.block))) {
            let zeros = vec![0; index(self.block)];
            let was_new = (!self.past.durable.contains_key(&number)).then_some(&zeros);
            let values: Vec<&Vec<u8>> =
                was_new.into_iter().chain(self.past.values_of(number)).collect();
            if values.iter().any(|was| was[..have.len()] == *have) {
                continue;
            }
            let start = number * self.block;
            let to = |was: &&Vec<u8>| difference(have, &was[..have.len()], start, self.block);
            let told: Vec<String> = values.iter().map(to).collect();
            panic!(
                "block {number} was none of this since the last sync, of {} bytes:\n{}",
                self.size(),
                told.join("\n")
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may_be(model: &Model, found: &[u8]) -> bool {
        std::panic::catch_unwind(|| model.assert_may_crash_to(found)).is_ok()
    }

    #[test]
    fn crash_brings_back_what_a_block_was_since_the_last_sync_and_nothing_else() {
        let mut model = Model::new(4);
        model.write(0, b"aaaabbbbcc");
        model.synced();
        model.write(4, b"BBBB");
        model.write(4, b"xx");
        assert!(may_be(&model, b"aaaabbbbcc"));
        assert!(may_be(&model, b"aaaaBBBBcc"));
        assert!(may_be(&model, b"aaaaxxBBcc"));
        // Half of a write, another block's bytes, and what did not change.
        assert!(!may_be(&model, b"aaaaxBBBcc"));
        assert!(!may_be(&model, b"aaaaaaaacc"));
        assert!(!may_be(&model, b"AaaaBBBBcc"));
        assert!(!may_be(&model, b"aaaabbbb"));
        model.synced_up_to(5);
        assert!(may_be(&model, b"aaaaxxBBcc"));
        assert!(!may_be(&model, b"aaaaBBBBcc"));
        assert!(!may_be(&model, b"aaaax"));
    }

    #[test]
    fn crash_ends_a_file_where_it_ended_or_a_part_of_a_write_does() {
        let mut model = Model::new(4);
        model.write(0, b"aa");
        model.synced();
        model.write(2, b"bbccccdddd");
        for (found, is_right) in [
            (&b"aa"[..], true),
            (b"aabb", true),
            (b"aabbcccc", true),
            (b"aa\0\0cccc\0\0\0\0", true),
            (b"aabbccccdddd", true),
            (b"aabbc", false),
            (b"aabbccccddddd", false),
        ] {
            assert_eq!(may_be(&model, found), is_right, "{found:?}");
        }
        model.truncate(1);
        model.truncate(6);
        assert!(may_be(&model, b"a"));
        assert!(may_be(&model, b"a\0\0\0\0\0"));
        // Whole blocks of what it was, each by itself.
        assert!(may_be(&model, b"aabb\0\0"));
        assert!(!may_be(&model, b"ab"));
        model.synced();
        model.write(6, b"eeeeee");
        model.synced_up_to(9);
        assert!(may_be(&model, b"a\0\0\0\0\0eee"));
        assert!(may_be(&model, b"a\0\0\0\0\0eeeeee"));
        assert!(!may_be(&model, b"a\0\0\0\0\0"));
        assert!(!may_be(&model, b"a\0\0\0\0\0ee"));
    }
}
