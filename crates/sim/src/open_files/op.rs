//! Operations on open files: what each makes of the contents, and how they are chosen.

use std::ops::Range;
use std::rc::Rc;

use ubtrfs_testkit::Prng;

use super::fill::Fill;
use super::history::BLOCK_BYTES;
use super::shape::Kind;

const BLOCK: u64 = 4096;
/// Files become so long at most.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// ... those that are to stay short.
const SHORT_FILE_BYTES_MAX: u64 = 5000;
/// What is written or changed at once, at most.
const PIECE_BYTES_MAX: u64 = 96 << 10;
/// Snapshots that are kept.
const SNAPSHOTS_MAX: usize = 3;

/// Bytes that are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Data {
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) fill: Fill,
}

/// Which range of which file goes where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Copied {
    pub(super) source: usize,
    pub(super) range: Range<u64>,
    pub(super) offset: u64,
}

/// How a range is changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// Its bytes become zeros.
    Zero,
    /// It becomes a hole.
    Punch,
    /// It has space.
    Allocate { extends: bool },
    /// It is zeros that have space.
    AllocateZeroed { extends: bool },
    /// What it shares becomes its own.
    Unshare,
}

/// An operation on one file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum FileOp {
    Write(Data),
    /// By [`ubtrfs_engine::Filesystem::write`].
    WriteThrough(Data),
    Append {
        len: usize,
        fill: Fill,
    },
    DirectWrite(Data),
    /// Through a mapping; may reach behind the end of the file in its last block.
    Store(Data),
    /// A write to a mapping that changes nothing.
    Fault {
        at: u64,
    },
    /// Writes what is there.
    Rewrite,
    Truncate {
        size: u64,
    },
    /// By [`ubtrfs_engine::Filesystem::truncate`].
    TruncateThrough {
        size: u64,
    },
    Change {
        change: Change,
        range: Range<u64>,
    },
    CloneFrom(Copied),
    DedupeFrom(Copied),
    /// Brings a range to the medium.
    Flush {
        range: Range<u64>,
    },
    Fsync,
    /// Of a range, through a mapping.
    Msync {
        range: Range<u64>,
    },
    /// Nobody has it open any more; the next operation opens it.
    Close,
}

/// An operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Op {
    File {
        file: usize,
        op: FileOp,
    },
    Sync,
    Commit,
    FlushFiles,
    /// Time passes, and what has been dirty for long is written back.
    WriteBackDue,
    DropClean,
    Snapshot,
    DeleteSnapshot {
        number: usize,
    },
    /// After a sync, closes the filesystem and opens it again.
    Reopen,
}

impl Op {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::File { op, .. } => op.name(),
            Self::Sync => "sync",
            Self::Commit => "commit",
            Self::FlushFiles => "flush files",
            Self::WriteBackDue => "write back due",
            Self::DropClean => "drop clean data",
            Self::Snapshot => "snapshot",
            Self::DeleteSnapshot { .. } => "delete snapshot",
            Self::Reopen => "reopen",
        }
    }

    /// Whether it may take unwritten space of a file without writing to it.
    pub(super) fn may_drop_unwritten(&self) -> bool {
        let Self::File { op, .. } = self else { return false };
        match op {
            FileOp::Truncate { .. }
            | FileOp::TruncateThrough { .. }
            | FileOp::CloneFrom(_)
            | FileOp::DedupeFrom(_) => true,
            FileOp::Change { change, .. } => {
                matches!(change, Change::Punch | Change::AllocateZeroed { .. } | Change::Unshare)
            }
            _ => false,
        }
    }
}

impl FileOp {
    fn name(&self) -> &'static str {
        match self {
            Self::Write(_) => "write",
            Self::WriteThrough(_) => "write through",
            Self::Append { .. } => "append",
            Self::DirectWrite(_) => "direct write",
            Self::Store(_) => "mapped store",
            Self::Fault { .. } => "fault for write",
            Self::Rewrite => "rewrite",
            Self::Truncate { .. } => "truncate",
            Self::TruncateThrough { .. } => "truncate through",
            Self::Change { change: Change::Zero, .. } => "zero range",
            Self::Change { change: Change::Punch, .. } => "punch hole",
            Self::Change { change: Change::Allocate { .. }, .. } => "allocate",
            Self::Change { change: Change::AllocateZeroed { .. }, .. } => "allocate zeroed",
            Self::Change { change: Change::Unshare, .. } => "unshare",
            Self::CloneFrom(_) => "clone range",
            Self::DedupeFrom(_) => "dedupe range",
            Self::Flush { .. } => "flush range",
            Self::Fsync => "fsync",
            Self::Msync { .. } => "msync",
            Self::Close => "close",
        }
    }

    /// The same, where an append to a file so long says where it writes.
    pub(super) fn at_end_of(&self, len: usize) -> Self {
        match self {
            Self::Append { len: count, fill } => {
                let offset = u64::try_from(len).expect("a length fits");
                Self::Write(Data { offset, len: *count, fill: *fill })
            }
            other => other.clone(),
        }
    }

    /// Whether what it copies, if anything, is there.
    pub(super) fn has_source(&self, contents: &[Rc<[u8]>]) -> bool {
        let Self::CloneFrom(copied) = self else { return true };
        index(copied.range.end) <= contents[copied.source].len()
    }

    /// What the file is after it, as operation `number`, where `done` bytes of what it writes were
    /// written; `None` where it is as before.
    pub(super) fn result(
        &self,
        file: usize,
        number: u64,
        done: usize,
        contents: &[Rc<[u8]>],
    ) -> Option<Vec<u8>> {
        let mut bytes = contents[file].to_vec();
        let put = |bytes: &mut Vec<u8>, data: &Data| {
            let at = index(data.offset);
            let new = data.fill.bytes(file, number, data.offset, data.len.min(done));
            if !new.is_empty() {
                bytes.resize(bytes.len().max(at + new.len()), 0);
                bytes[at..at + new.len()].copy_from_slice(&new);
            }
        };
        match self {
            Self::Write(data) | Self::WriteThrough(data) | Self::DirectWrite(data) => {
                put(&mut bytes, data);
            }
            Self::Append { len, fill } => {
                let offset = u64::try_from(bytes.len()).expect("a length fits");
                put(&mut bytes, &Data { offset, len: *len, fill: *fill });
            }
            Self::Store(data) => {
                let size = bytes.len();
                put(&mut bytes, data);
                bytes.truncate(size);
            }
            Self::Truncate { size } | Self::TruncateThrough { size } => {
                bytes.resize(index(*size), 0);
            }
            Self::Change { change, range } => changed(&mut bytes, *change, range),
            Self::CloneFrom(copied) => {
                let from = contents[copied.source][usizes(&copied.range)].to_vec();
                let at = index(copied.offset);
                bytes.resize(bytes.len().max(at + from.len()), 0);
                bytes[at..at + from.len()].copy_from_slice(&from);
            }
            Self::DedupeFrom(_)
            | Self::Fault { .. }
            | Self::Rewrite
            | Self::Flush { .. }
            | Self::Fsync
            | Self::Msync { .. }
            | Self::Close => return None,
        }
        Some(bytes)
    }
}

fn changed(bytes: &mut Vec<u8>, change: Change, range: &Range<u64>) {
    let range = usizes(range);
    let inside = range.start.min(bytes.len())..range.end.min(bytes.len());
    let extends = match change {
        Change::Zero | Change::Punch => {
            bytes[inside].fill(0);
            false
        }
        Change::AllocateZeroed { extends } => {
            bytes[inside].fill(0);
            extends
        }
        Change::Allocate { extends } => extends,
        Change::Unshare => false,
    };
    if extends && !range.is_empty() {
        bytes.resize(bytes.len().max(range.end), 0);
    }
}

fn bytes_max(kind: Kind) -> u64 {
    if kind == Kind::Short { SHORT_FILE_BYTES_MAX } else { FILE_BYTES_MAX }
}

fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a file in memory")
}

fn usizes(range: &Range<u64>) -> Range<usize> {
    index(range.start)..index(range.end)
}

/// Blocks that a range touches.
pub(super) fn blocks(range: &Range<u64>) -> Range<usize> {
    index(range.start) / BLOCK_BYTES..index(range.end).div_ceil(BLOCK_BYTES)
}

/// What the next operation is chosen by.
pub(super) struct Scene<'a> {
    pub(super) kinds: &'a [Kind],
    pub(super) lens: &'a [u64],
    /// Numbers of the snapshots that there are.
    pub(super) snapshots: &'a [usize],
}

/// Chooses operations.
#[derive(Debug)]
pub(super) struct Generator {
    prng: Prng,
    /// Whether files and the filesystem may be closed.
    closes: bool,
}

impl Generator {
    pub(super) fn new(prng: Prng) -> Self {
        Self { prng, closes: true }
    }

    /// One whose files stay open.
    pub(super) fn of_open(prng: Prng) -> Self {
        Self { prng, closes: false }
    }

    pub(super) fn next(&mut self, scene: &Scene<'_>) -> Op {
        let file = self.prng.index(scene.kinds.len());
        match self.prng.below(100) {
            0..=2 => Op::Sync,
            3..=6 => Op::Commit,
            7..=8 => Op::FlushFiles,
            9..=12 => Op::WriteBackDue,
            13..=15 => Op::DropClean,
            16..=17 if scene.snapshots.len() < SNAPSHOTS_MAX => Op::Snapshot,
            16..=18 if !scene.snapshots.is_empty() => {
                let number = scene.snapshots[self.prng.index(scene.snapshots.len())];
                Op::DeleteSnapshot { number }
            }
            19 if self.closes => Op::Reopen,
            _ => Op::File { file, op: self.on_file(file, scene) },
        }
    }

    /// A write to a file.
    pub(super) fn write(&mut self, file: usize, scene: &Scene<'_>) -> Op {
        let max = bytes_max(scene.kinds[file]);
        Op::File { file, op: FileOp::Write(self.data(scene.lens[file], max)) }
    }

    fn on_file(&mut self, file: usize, scene: &Scene<'_>) -> FileOp {
        let (kind, size) = (scene.kinds[file], scene.lens[file]);
        let max = bytes_max(kind);
        match self.prng.below(100) {
            0..=29 => FileOp::Write(self.data(size, max)),
            30..=31 => FileOp::WriteThrough(self.data(size, max)),
            32..=37 if size < max => {
                let Data { len, fill, .. } = self.data(size, max);
                FileOp::Append { len: len.min(index(max - size)), fill }
            }
            38..=42 if kind != Kind::Short => FileOp::DirectWrite(self.whole_blocks(size, max)),
            43..=49 if size > 0 => FileOp::Store(self.stored(size)),
            50 if size > 0 => FileOp::Fault { at: self.prng.below(size) },
            51..=56 => FileOp::Truncate { size: self.new_size(size, max) },
            57 => FileOp::TruncateThrough { size: self.new_size(size, max) },
            58..=61 => self.change(Change::Zero, size, max),
            62..=65 => self.change(Change::Punch, size, max),
            66..=70 => {
                let extends = self.prng.chance(1, 2);
                self.change(Change::Allocate { extends }, size, max)
            }
            71..=73 => {
                let extends = self.prng.chance(1, 2);
                self.change(Change::AllocateZeroed { extends }, size, max)
            }
            74 => self.change(Change::Unshare, size, max),
            75..=79 => match self.copied(file, scene, max) {
                Some((copied, true)) => FileOp::DedupeFrom(copied),
                Some((copied, false)) => FileOp::CloneFrom(copied),
                None => FileOp::Fsync,
            },
            80..=84 => FileOp::Flush { range: self.range(size.max(1)) },
            85..=88 if size > 0 => FileOp::Msync { range: self.block_range(size) },
            89..=91 if self.closes => FileOp::Close,
            _ => FileOp::Fsync,
        }
    }

    /// A place near what a file of `size` has, short of `max`.
    fn offset(&mut self, size: u64, max: u64) -> u64 {
        let offset = match self.prng.below(10) {
            // Behind the end, with a hole between.
            0..=1 => size + self.prng.below(5 * BLOCK),
            2 => size,
            // Where it began to be written.
            3 => 0,
            _ => self.prng.below(size.max(1)),
        };
        let offset = if self.prng.chance(1, 2) { offset / BLOCK * BLOCK } else { offset };
        offset.min(max - 1)
    }

    fn len(&mut self) -> u64 {
        let max = [64, 700, BLOCK, 3 * BLOCK, 8 * BLOCK, PIECE_BYTES_MAX][self.prng.index(6)];
        let len = 1 + self.prng.below(max);
        if self.prng.chance(1, 2) { len.next_multiple_of(BLOCK) } else { len }
    }

    fn data(&mut self, size: u64, max: u64) -> Data {
        let offset = self.offset(size, max);
        let len = index(self.len().min(max - offset));
        Data { offset, len, fill: Fill::random(&mut self.prng) }
    }

    fn whole_blocks(&mut self, size: u64, max: u64) -> Data {
        let offset = self.offset(size, max) / BLOCK * BLOCK;
        let len = self.len().next_multiple_of(BLOCK).min(max - offset);
        Data { offset, len: index(len), fill: Fill::random(&mut self.prng) }
    }

    /// What a mapping of a file that is not empty takes.
    fn stored(&mut self, size: u64) -> Data {
        let end = size.next_multiple_of(BLOCK);
        let offset = match self.prng.below(3) {
            // In the last block, before or behind the end of the file.
            0 => end - 1 - self.prng.below(BLOCK),
            _ => self.prng.below(end),
        };
        let len = index(self.len().min(end - offset));
        Data { offset, len, fill: Fill::random(&mut self.prng) }
    }

    fn new_size(&mut self, size: u64, max: u64) -> u64 {
        let new = match self.prng.below(8) {
            0 => 0,
            1..=3 => size + self.prng.below(3 * BLOCK),
            _ => self.prng.below(size + 1),
        };
        let new = if self.prng.chance(1, 4) { new / BLOCK * BLOCK } else { new };
        new.min(max)
    }

    fn range(&mut self, size: u64) -> Range<u64> {
        let offset = self.prng.below(size);
        offset..offset + self.len()
    }

    /// Some whole blocks of a file that is not empty.
    fn block_range(&mut self, size: u64) -> Range<u64> {
        let count = size.div_ceil(BLOCK);
        let first = self.prng.below(count);
        first * BLOCK..(first + 1 + self.prng.below(count - first)) * BLOCK
    }

    fn change(&mut self, change: Change, size: u64, max: u64) -> FileOp {
        let offset = self.offset(size, max);
        let end = (offset + self.len()).min(max);
        FileOp::Change { change, range: offset..end }
    }

    /// A range of any file that can be cloned to this one, and whether it is to be compared first.
    fn copied(&mut self, file: usize, scene: &Scene<'_>, max: u64) -> Option<(Copied, bool)> {
        let source = self.prng.index(scene.kinds.len());
        let (from, to) = (scene.lens[source], scene.lens[file]);
        let dedupes = self.prng.chance(1, 4);
        let first = self.prng.below(from.div_ceil(BLOCK).max(1)) * BLOCK;
        // At the same place it is more often the same.
        let offset = if dedupes { first } else { self.offset(to, max) / BLOCK * BLOCK };
        let mut end = (first + self.len().next_multiple_of(BLOCK)).min(from);
        if !end.is_multiple_of(BLOCK) && (offset + (end - first) < to || dedupes) {
            end = end / BLOCK * BLOCK;
        }
        if dedupes {
            end = end.min(to / BLOCK * BLOCK);
        }
        let is_in = end > first && offset + (end - first) <= max;
        let overlaps = file == source && offset < end && first < offset + (end - first);
        (is_in && !overlaps).then_some((Copied { source, range: first..end, offset }, dedupes))
    }
}
