//! What of runs that are written back is on the medium and mapped, while the rest is tried again.

use ubtrfs_iomap::{FileOffset, FileRange, WritebackRun};

/// Ranges of a file, ascending, of whole blocks.
#[derive(Debug, Default)]
pub(super) struct Stored {
    ranges: Vec<FileRange>,
}

impl Stored {
    /// Adds a range that is not stored yet.
    pub(super) fn add(&mut self, range: FileRange) {
        let at = self.ranges.partition_point(|known| known.start < range.start);
        self.ranges.insert(at, range);
    }

    /// What of a range is stored, ascending.
    pub(super) fn within(&self, range: FileRange) -> impl Iterator<Item = FileRange> {
        let at = self.ranges.partition_point(|known| known.end <= range.start);
        let known = self.ranges[at..].iter().take_while(move |known| known.start < range.end);
        known.map(move |known| known.intersection(range))
    }

    /// What of a range is not stored, ascending.
    pub(super) fn missing_in(&self, range: FileRange) -> Vec<FileRange> {
        let mut missing = Vec::new();
        let mut at = range.start;
        let behind = FileRange::new(range.end, range.end);
        for known in self.within(range).chain([behind]) {
            let gap = FileRange::new(at, known.start);
            if !gap.is_empty() {
                missing.push(gap);
            }
            at = known.end;
        }
        missing
    }

    /// The block in which a file that ends at `end` does so, where that is inside of it, and the range has it and it is not stored.
    pub(super) fn missing_tail(
        &self,
        range: FileRange,
        end: FileOffset,
        block_bytes: u32,
    ) -> FileRange {
        let block_bytes = u64::from(block_bytes);
        let tail = FileRange::new(end, end.round_up(block_bytes)).round_out(block_bytes);
        let missing = tail.intersection(range);
        if self.within(missing).next().is_some() { FileRange::default() } else { missing }
    }

    /// Bytes of runs that are not stored.
    pub(super) fn missing_bytes(&self, runs: &[WritebackRun<'_>]) -> u64 {
        let of_run = |run: &WritebackRun<'_>| {
            let stored: u64 = self.within(run.range).map(FileRange::len_bytes).sum();
            run.range.len_bytes() - stored
        };
        runs.iter().map(of_run).sum()
    }

    /// All from an offset on, to the end of the last block that a file can have.
    pub(super) fn from(&self, offset: FileOffset) -> Vec<FileRange> {
        let end = self.ranges.last().map_or(offset, |last| last.end);
        self.within(FileRange::new(offset, end)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> FileRange {
        FileRange::new(FileOffset::new(start), FileOffset::new(end))
    }

    #[test]
    fn ranges_that_are_stored_and_what_lies_between_are_all_of_a_run() {
        let mut stored = Stored::default();
        assert_eq!(stored.missing_in(range(0, 10)), [range(0, 10)]);
        for part in [range(20, 30), range(0, 10), range(12, 14)] {
            stored.add(part);
        }
        assert_eq!(stored.missing_in(range(5, 25)), [range(10, 12), range(14, 20)]);
        assert_eq!(stored.within(range(5, 13)).collect::<Vec<_>>(), [range(5, 10), range(12, 13)]);
        assert_eq!(stored.missing_in(range(20, 30)), []);
        assert_eq!(stored.from(FileOffset::new(13)), [range(13, 14), range(20, 30)]);
        let run = WritebackRun { range: range(8, 21), buffers: &[], size: FileOffset::ZERO };
        assert_eq!(stored.missing_bytes(&[run]), 8);
        let missing = |end| {
            let tail = stored.missing_tail(range(10, 36), FileOffset::new(end), 2);
            (!tail.is_empty()).then_some(tail)
        };
        assert_eq!([missing(11), missing(35)], [Some(range(10, 12)), Some(range(34, 36))]);
        // Stored; on the border of a block; elsewhere.
        assert_eq!([missing(13), missing(12), missing(9), missing(37)], [None; 4]);
        // The last block of the largest file.
        let last = range((1 << 63) - 4096, 1 << 63);
        stored.add(last);
        assert_eq!((stored.missing_in(last), stored.from(last.start)), (vec![], vec![last]));
    }
}
