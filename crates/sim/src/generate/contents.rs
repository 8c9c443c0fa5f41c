//! Operations on what files hold.

use ubtrfs_engine::Method;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_testkit::model::{Content, Copied, Id, Model, Node};

use super::{Generator, SECTOR};
use crate::op::{Data, How, Op};

/// A file of one sector may lie inline, compressed; then it takes no more, which only the engine
/// knows.
const MAYBE_INLINE_BYTES: u64 = SECTOR;
/// Files are no longer, about.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Copied ranges that are remembered, to be deduplicated.
const COPIED_MAX: usize = 12;

fn len_of(node: &Node) -> Option<u64> {
    node.bytes().map(|bytes| bytes.len_bytes())
}

impl Generator {
    pub(super) fn append(&mut self, model: &Model) -> Op {
        let wants = |node: &Node| match &node.content {
            Content::File(bytes) => {
                let len = bytes.len_bytes();
                len.is_multiple_of(SECTOR) && len != MAYBE_INLINE_BYTES && len < FILE_BYTES_MAX
            }
            _ => false,
        };
        let id = if self.prng.chance(1, 30) {
            let is_no_maybe = |node: &Node| node.bytes().is_none();
            self.any(model, is_no_maybe)
        } else {
            // Whether what was written in other ways lies in the tree only the engine knows, too.
            let written = std::mem::take(&mut self.written);
            let found = self.find(model, |id, node| wants(node) && !written.contains(&id.inode));
            self.written = written;
            match found {
                Some(id) => id,
                None => return self.create(model),
            }
        };
        let begin = model.node(id).and_then(Node::bytes).map_or(0, |bytes| bytes.len_bytes());
        let how = match begin {
            0 if self.prng.chance(1, 2) => How::OneHandle,
            _ => How::Appender,
        };
        let mut data = Vec::new();
        let mut end = begin.next_multiple_of(SECTOR);
        let count = 1 + self.prng.index(3);
        for number in 1..=count {
            if self.prng.chance(1, 3) {
                end += SECTOR * self.prng.below(20);
            }
            let mut len = self.len();
            if number < count || self.prng.chance(1, 2) {
                len = len.next_multiple_of(4096);
            }
            if len > 0 {
                data.push(self.data(end, len));
                end += u64::try_from(len).expect("a length fits");
            }
        }
        if self.prng.chance(1, 6) {
            end += self.prng.below(50_000);
        }
        let all = [Compression::None, Compression::Zlib, Compression::Lzo, Compression::Zstd];
        let method = Method::with_default_level(all[self.prng.index(all.len())]);
        let method = self.prng.chance(1, 2).then_some(method);
        Op::Append { id, data, size_bytes: end, method, how }
    }

    fn data(&mut self, offset: u64, len: usize) -> Data {
        let (seed, repeats) = (self.prng.next_u64(), self.prng.chance(1, 2));
        Data { offset, len, seed, repeats }
    }

    fn len(&mut self) -> usize {
        match self.prng.below(8) {
            0..=2 => self.prng.index(2100),
            3..=5 => self.prng.index(20_000),
            6 => self.prng.index(140_000),
            _ => 4096 * self.prng.index(20),
        }
    }

    pub(super) fn write(&mut self, model: &Model) -> Op {
        // Sectors here and there in a long file make it one of many extents, which takes several
        // steps to be cut off or written over.
        let is_long = |_: Id, node: &Node| len_of(node).is_some_and(|len| len > 100 * SECTOR);
        if self.prng.chance(1, 3)
            && let Some(id) = self.find(model, is_long)
        {
            let len = model.node(id).and_then(len_of).unwrap_or(SECTOR);
            let offset = self.prng.below(len / SECTOR) * SECTOR;
            return self.written_op(id, offset, 4096);
        }
        let id = self.any(model, |node| node.bytes().is_some());
        let end = model.node(id).and_then(len_of).unwrap_or(0);
        let offset = match self.prng.below(10) {
            0..=1 => 0,
            2..=4 => self.prng.below(end + 1),
            5 => self.prng.below(end / SECTOR + 1) * SECTOR,
            6..=7 => end,
            8 => end + self.prng.below(50_000),
            _ if self.prng.chance(1, 10) => u64::MAX - self.prng.below(1 << 62),
            _ => end + SECTOR * self.prng.below(20),
        };
        let offset = if offset > FILE_BYTES_MAX && offset < 1 << 40 { 0 } else { offset };
        let len = match self.prng.below(40) {
            0 => 0,
            1 => 400_000,
            // What is small is to be full again and again.
            2..=7 if self.is_tight => 100_000 + self.prng.index(900_000),
            _ => self.len(),
        };
        self.written_op(id, offset, len)
    }

    fn written_op(&mut self, id: Id, offset: u64, len: usize) -> Op {
        self.note_written(id);
        Op::Write { id, data: self.data(offset, len) }
    }

    pub(super) fn truncate(&mut self, model: &Model) -> Op {
        let id = self.any(model, |node| node.bytes().is_some());
        let end = model.node(id).and_then(len_of).unwrap_or(0);
        let size_bytes = match self.prng.below(12) {
            0..=1 => 0,
            2..=3 => self.prng.below(3000),
            4..=6 => self.prng.below(end + 1),
            7..=8 => self.prng.below(end / SECTOR + 1) * SECTOR,
            9 => end,
            10 if self.prng.chance(1, 10) => u64::MAX,
            _ => (end + self.prng.below(50_000)).min(FILE_BYTES_MAX),
        };
        self.note_written(id);
        Op::Truncate { id, size_bytes }
    }

    pub(super) fn clone_range(&mut self, model: &Model) -> Op {
        let Some((source, target)) = self.two_files(model) else { return self.write(model) };
        let len = |id| model.node(id).and_then(len_of).unwrap_or(0);
        let (from_len, to_len) = (len(source), len(target));
        let start = self.prng.below(from_len / SECTOR + 1) * SECTOR;
        let end = match self.prng.chance(1, 2) {
            true => from_len,
            false => (start + (1 + self.prng.below(40)) * SECTOR).min(from_len / SECTOR * SECTOR),
        };
        let mut target_offset = self.prng.below(to_len / SECTOR + 3) * SECTOR;
        if self.prng.chance(1, 25) {
            target_offset += self.prng.below(SECTOR);
        }
        if start >= end {
            return self.write(model);
        }
        let copied = Copied { source, range: start..end, target, target_offset };
        self.note_copied(&copied);
        Op::CloneRange(copied)
    }

    pub(super) fn copy_range(&mut self, model: &Model) -> Op {
        let Some((source, target)) = self.two_files(model) else { return self.write(model) };
        let len = |id| model.node(id).and_then(len_of).unwrap_or(0);
        let start = self.prng.below(len(source) + 1);
        let end = start + self.prng.below(200_000);
        let mut target_offset = self.prng.below(len(target) + 10_000).min(FILE_BYTES_MAX);
        if self.prng.chance(1, 2) {
            // What can be shared in the middle.
            target_offset = target_offset / SECTOR * SECTOR + start % SECTOR;
        }
        let copied = Copied { source, range: start..end, target, target_offset };
        self.note_copied(&copied);
        Op::CopyRange(copied)
    }

    pub(super) fn dedupe_range(&mut self, model: &Model) -> Op {
        let is_there = |id: Id| model.node(id).is_some_and(|node| node.bytes().is_some());
        let copied = self.copied.iter().filter(|one| is_there(one.source) && is_there(one.target));
        let copied: Vec<Copied> = copied.cloned().collect();
        if copied.is_empty() || self.prng.chance(1, 6) {
            return match self.clone_range(model) {
                Op::CloneRange(copied) => Op::DedupeRange(copied),
                other => other,
            };
        }
        // The whole sectors of what was copied, or up to the ends.
        let mut copied = copied[self.prng.index(copied.len())].clone();
        let skipped = copied.range.start.next_multiple_of(SECTOR) - copied.range.start;
        copied.range.start += skipped;
        copied.target_offset += skipped;
        let len = model.node(copied.source).and_then(len_of).unwrap_or(0);
        copied.range.end = copied.range.end.min(len);
        if self.prng.chance(1, 2) {
            copied.range.end = copied.range.end / SECTOR * SECTOR;
        }
        if copied.range.is_empty() {
            return self.write(model);
        }
        self.note_written(copied.target);
        Op::DedupeRange(copied)
    }

    /// A file with something in it, and one that takes it: mostly one that has checksums as it has.
    fn two_files(&mut self, model: &Model) -> Option<(Id, Id)> {
        let source = self.find(model, |_, node| len_of(node).is_some_and(|len| len > 0))?;
        let has_csums = |node: &Node| node.flags & flags::NODATASUM == 0;
        let wanted = model.node(source).map(has_csums);
        if self.prng.chance(1, 6) {
            return Some((source, source));
        }
        let is_like = |node: &Node| {
            let is_small = len_of(node).is_some_and(|len| len < FILE_BYTES_MAX);
            is_small && Some(has_csums(node)) == wanted
        };
        if self.prng.chance(1, 25) {
            return Some((source, self.find(model, |_, _| true)?));
        }
        Some((source, self.find(model, |_, node| is_like(node))?))
    }

    fn note_copied(&mut self, copied: &Copied) {
        self.note_written(copied.target);
        self.copied.push(copied.clone());
        if self.copied.len() > COPIED_MAX {
            self.copied.remove(0);
        }
    }

    fn note_written(&mut self, id: Id) {
        self.written.insert(id.inode);
    }
}
