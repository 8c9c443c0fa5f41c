//! Summaries as words, to be kept where memory is bounded.

use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::{InodeNo, LogicalAddr};

use super::{CsumMark, Ends, Inode, Run, Span, Summary, Sums};

const RUN_WORDS: usize = 26;
/// Words of a summary.
pub(crate) const SUMMARY_WORDS: usize = 5 + 2 * RUN_WORDS;

const HAS_INODE: u64 = 1 << 0;
const HAS_ENTRIES: u64 = 1 << 1;
const HAS_SPAN: u64 = 1 << 2;
const HAS_GAP: u64 = 1 << 3;
const HAS_INLINE: u64 = 1 << 4;
const HAS_CSUM_MISSING: u64 = 1 << 5;
const HAS_CSUM_PRESENT: u64 = 1 << 6;
const HAS_COMPRESSED: u64 = 1 << 7;
const IS_PARTIAL: u64 = 1 << 8;
/// Where the number of the compression begins.
const COMPRESSION_SHIFT: u32 = 16;

const ENDS_ONE: u64 = 1;
const ENDS_TWO: u64 = 2;
const HAS_FIRST: u64 = 1 << 2;
const HAS_LAST: u64 = 1 << 3;
const SUMMARY_GAP: u64 = 1 << 4;

fn flag(is_set: bool, flag: u64) -> u64 {
    if is_set { flag } else { 0 }
}

fn mark_words(mark: Option<CsumMark>) -> [u64; 3] {
    mark.map_or([0; 3], |mark| [mark.block.0, mark.offset, mark.at.0])
}

fn mark_of([block, offset, at]: [u64; 3]) -> CsumMark {
    CsumMark { block: LogicalAddr(block), offset, at: LogicalAddr(at) }
}

impl Run {
    fn to_words(self) -> [u64; RUN_WORDS] {
        let compression = self.compressed.map_or(0, |(_, compression)| compression.to_disk());
        let bits = flag(self.inode.is_some(), HAS_INODE)
            | flag(self.has_entries, HAS_ENTRIES)
            | flag(self.span.is_some(), HAS_SPAN)
            | flag(self.gap.is_some(), HAS_GAP)
            | flag(self.inline_bytes.is_some(), HAS_INLINE)
            | flag(self.csum_missing.is_some(), HAS_CSUM_MISSING)
            | flag(self.csum_present.is_some(), HAS_CSUM_PRESENT)
            | flag(self.compressed.is_some(), HAS_COMPRESSED)
            | flag(self.is_partial, IS_PARTIAL)
            | u64::from(compression) << COMPRESSION_SHIFT;
        let inode = self.inode.map_or([0; 4], |inode| {
            let kind = u64::from(inode.mode) | u64::from(inode.nlink) << 32;
            [kind, inode.size, inode.nbytes, inode.flags]
        });
        let span = self.span.map_or([0; 3], |span| [span.start, span.end, span.block.0]);
        let [missing, present] = [self.csum_missing, self.csum_present].map(mark_words);
        let compressed = mark_words(self.compressed.map(|(mark, _)| mark));
        let parts: [&[u64]; 7] = [
            &[bits, self.number.0, self.block.0, self.names, self.entries],
            &[self.item_bytes, self.index_bytes, self.bytes],
            &[self.gap.unwrap_or(0), self.inline_bytes.unwrap_or(0)],
            &inode,
            &span,
            &missing,
            &[present, compressed].concat(),
        ];
        let mut words = [0; RUN_WORDS];
        let all = parts.into_iter().flatten();
        words.iter_mut().zip(all).for_each(|(word, value)| *word = *value);
        words
    }

    fn of_words(words: &[u64]) -> Self {
        let word = |index: usize| words.get(index).copied().unwrap_or(0);
        let three = |index| [word(index), word(index + 1), word(index + 2)];
        let bits = word(0);
        let has = |flag| bits & flag != 0;
        let kind = word(10).to_le_bytes();
        let [a, b, c, d, e, f, g, h] = kind;
        let inode = Inode {
            mode: u32::from_le_bytes([a, b, c, d]),
            nlink: u32::from_le_bytes([e, f, g, h]),
            size: word(11),
            nbytes: word(12),
            flags: word(13),
        };
        let [start, end, block] = three(14);
        let compression = u8::try_from(bits >> COMPRESSION_SHIFT & 0xFF).unwrap_or(0);
        let compression = Compression::from_disk(compression).unwrap_or(Compression::None);
        Self {
            number: InodeNo(word(1)),
            block: LogicalAddr(word(2)),
            inode: has(HAS_INODE).then_some(inode),
            names: word(3),
            entries: word(4),
            item_bytes: word(5),
            index_bytes: word(6),
            has_entries: has(HAS_ENTRIES),
            bytes: word(7),
            span: has(HAS_SPAN).then_some(Span { start, end, block: LogicalAddr(block) }),
            gap: has(HAS_GAP).then_some(word(8)),
            inline_bytes: has(HAS_INLINE).then_some(word(9)),
            csum_missing: has(HAS_CSUM_MISSING).then_some(mark_of(three(17))),
            csum_present: has(HAS_CSUM_PRESENT).then_some(mark_of(three(20))),
            compressed: has(HAS_COMPRESSED).then_some((mark_of(three(23)), compression)),
            is_partial: has(IS_PARTIAL),
        }
    }
}

impl Summary {
    pub(crate) fn to_words(&self) -> [u64; SUMMARY_WORDS] {
        let (ends, first, last) = match self.ends {
            Ends::Empty => (0, None, None),
            Ends::One(run) => (ENDS_ONE, Some(run), None),
            Ends::Two(first, last) => (ENDS_TWO, first, last),
        };
        let Sums { items, refs, types, orphans } = self.sums;
        let head = ends
            | flag(first.is_some(), HAS_FIRST)
            | flag(last.is_some(), HAS_LAST)
            | flag(self.has_gap, SUMMARY_GAP);
        let [first, last] =
            [first, last].map(|run| run.map_or([0; RUN_WORDS], |run| run.to_words()));
        let head = [head, items, refs, types, orphans];
        let mut words = [0; SUMMARY_WORDS];
        let all = head.iter().chain(&first).chain(&last);
        words.iter_mut().zip(all).for_each(|(word, value)| *word = *value);
        words
    }

    pub(crate) fn of_words(words: &[u64; SUMMARY_WORDS]) -> Self {
        let [head, items, refs, types, orphans, runs @ ..] = words;
        let (first, last) = runs.split_at(RUN_WORDS);
        let first = (head & HAS_FIRST != 0).then(|| Run::of_words(first));
        let last = (head & HAS_LAST != 0).then(|| Run::of_words(last));
        let ends = match (head & (ENDS_ONE | ENDS_TWO), first) {
            (ENDS_ONE, Some(run)) => Ends::One(run),
            (ENDS_TWO, first) => Ends::Two(first, last),
            _ => Ends::Empty,
        };
        let sums = Sums { items: *items, refs: *refs, types: *types, orphans: *orphans };
        Self { sums, ends, has_gap: head & SUMMARY_GAP != 0 }
    }
}
