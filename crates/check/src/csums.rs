//! Checksums of data: which ranges have them, and whether the data are what they say.

use std::ops::Range;

use ubtrfs_ondisk::chunk::STRIPE_LEN_BYTES;
use ubtrfs_ondisk::csum::CsumType;
use ubtrfs_ondisk::{Key, KeyType, LogicalAddr, ObjectId, RootId};
use ubtrfs_volume::Error;

use crate::blocks::Facts;
use crate::context::Context;
use crate::extents::Extents;
use crate::finding::{Finding, Maybe};
use crate::logs::Logged;
use crate::read::Pointer;
use crate::reread::LeavesRead;
use crate::roots::Roots;
use crate::table::Table;
use crate::view::{View, number};
use crate::walk::{Kind, Visit};

/// Data that is read at a time.
const PIECE_SECTORS: usize = 64;
/// Leaves of checksums whose data a thread reads at a time.
const BATCH_LEAVES: usize = 1;

/// The ranges that have checksums, in order, none touching the next.
#[derive(Debug)]
pub(crate) struct Csums {
    ranges: Table<2>,
}

impl Csums {
    pub(crate) fn covered_bytes(&self) -> u64 {
        self.ranges.iter().fold(0, |sum: u64, [start, end]| sum.saturating_add(end - start))
    }

    fn at_index(&self, index: usize) -> Option<Range<u64>> {
        let [start, end] = (index < self.ranges.len()).then(|| self.ranges.get(index))?;
        Some(start..end)
    }

    /// The last range that begins at an address or before it, and the next one.
    fn beside(&self, at: u64) -> [Option<Range<u64>>; 2] {
        let behind = self.ranges.count_up_to(at);
        let before = behind.checked_sub(1).and_then(|index| self.at_index(index));
        [before, self.at_index(behind)]
    }

    /// The first byte of a range without checksums.
    pub(crate) fn first_missing(&self, range: Range<u64>) -> Option<u64> {
        let [covered, _] = self.beside(range.start);
        match covered.filter(|covered| covered.end > range.start) {
            Some(covered) if covered.end >= range.end => None,
            Some(covered) => Some(covered.end),
            None => Some(range.start),
        }
    }

    /// The first byte of a range with a checksum.
    pub(crate) fn first_present(&self, range: Range<u64>) -> Option<u64> {
        let [before, next] = self.beside(range.start);
        let covered = before.filter(|covered| covered.end > range.start).or(next)?;
        let first = covered.start.max(range.start);
        (first < range.end).then_some(first)
    }
}

/// The checksums of one leaf: merged ranges, and where one begins before another has ended.
struct CsumVisitor {
    csum: CsumType,
    sector: u64,
}

impl CsumVisitor {
    fn range(&self, key: Key, data: &[u8]) -> Option<Range<u64>> {
        if key.ty != KeyType::EXTENT_CSUM || key.objectid != ObjectId::EXTENT_CSUM {
            return None;
        }
        let sectors = number(data.len() / self.csum.len_bytes());
        let end = key.offset.checked_add(sectors.checked_mul(self.sector)?)?;
        Some(key.offset..end)
    }
}

impl Visit for CsumVisitor {
    type Out = Vec<(Key, Range<u64>)>;

    fn leaf(&self, leaf: &View, _: &Pointer, _: &mut Vec<Finding>) -> Self::Out {
        let mut ranges: Vec<(Key, Range<u64>)> = Vec::new();
        for (_, key, data) in leaf.items() {
            let Some(range) = self.range(key, data) else { continue };
            match ranges.last_mut() {
                Some((_, last)) if last.end == range.start => last.end = range.end,
                _ => ranges.push((key, range)),
            }
        }
        ranges
    }
}

impl Context<'_> {
    fn csum_visitor(&self) -> CsumVisitor {
        CsumVisitor { csum: self.geometry.csum, sector: self.sector() }
    }

    pub(crate) fn load_csums(&mut self, roots: &Roots) -> Csums {
        let pointers = roots.pointer_list(RootId::CSUM_TREE);
        let mut ranges = Table::<2>::new(&self.store);
        let visitor = self.csum_visitor();
        self.walk(pointers, Kind::Tree, &visitor, |check, _, leaf| {
            for (index, (key, range)) in leaf.into_iter().enumerate() {
                let Some([start, end]) = ranges.last() else {
                    ranges.push([range.start, range.end]);
                    continue;
                };
                // Inside a leaf the structural verifier looks for it.
                if end > range.start && index == 0 {
                    let previous_end = LogicalAddr(end);
                    check.findings.push(Finding::CsumOverlap { key, previous_end });
                }
                if end >= range.start && start <= range.start {
                    ranges.set(ranges.len() - 1, [start, end.max(range.end)]);
                } else {
                    ranges.push([range.start, range.end]);
                }
            }
        });
        ranges.sort_by(|[start, _]| *start);
        let csums = Csums { ranges };
        self.statistics.csum_bytes = csums.covered_bytes();
        csums
    }

    /// Only data has checksums.
    pub(crate) fn check_csum_coverage(
        &mut self,
        extents: &Extents,
        csums: &Csums,
        logged: &Logged,
    ) {
        if !self.is_complete(RootId::EXTENT_TREE) {
            return;
        }
        let sector = self.sector();
        let mut data = extents.iter().filter(|extent| extent.is_data()).peekable();
        for [start, end] in csums.ranges.iter() {
            let range = start..end;
            let mut at = range.start;
            while at < range.end {
                while data.next_if(|extent| extent.end(sector) <= at).is_some() {}
                let next = data.peek();
                if let Some(extent) = next.filter(|extent| extent.at.0 <= at) {
                    at = extent.end(sector);
                    continue;
                }
                if let Some(end) = logged.end_at(at) {
                    at = end;
                    continue;
                }
                let end = next.map_or(range.end, |extent| extent.at.0.min(range.end));
                let len_bytes = end - at;
                let at_found = LogicalAddr(at);
                self.findings.push(Finding::CsumWithoutExtent { at: at_found, len_bytes });
                at = end;
            }
        }
    }

    /// Reads all copies of all data that have checksums.
    pub(crate) fn check_data(&mut self) {
        let visitor = self.csum_visitor();
        let is_wanted = |facts: &Facts| facts.root == RootId::CSUM_TREE;
        let work = |leaf: &View| {
            let mut found = Vec::new();
            let mut read_bytes = 0;
            let mut buffer = vec![0; PIECE_SECTORS * self.geometry.sectorsize_bytes];
            for (_, key, data) in leaf.items() {
                if let Some(range) = visitor.range(key, data) {
                    read_bytes += self.check_item(range.start, data, &mut buffer, &mut found);
                }
            }
            (found, read_bytes)
        };
        let (mut all_found, mut all_bytes) = (self.findings.like(), 0);
        let read = LeavesRead { batch: BATCH_LEAVES, is_wanted, work };
        let lost_count = self.read_leaves(&read, |(found, bytes)| {
            all_bytes += bytes;
            all_found.extend(found);
        });
        // Their data was not looked at.
        self.blocks.lost_count += number(lost_count);
        self.statistics.data_read_bytes += all_bytes;
        self.findings.join(all_found);
    }

    /// The data of one item of checksums; how many bytes were read.
    fn check_item(
        &self,
        start: u64,
        csums: &[u8],
        buffer: &mut [u8],
        found: &mut Vec<Finding>,
    ) -> u64 {
        let len = self.geometry.csum.len_bytes();
        let mut read_bytes = 0;
        let mut at = LogicalAddr(start);
        let mut rest = csums;
        let is_whole = self.volume.missing_devices().is_empty();
        while rest.len() >= len {
            let max = if is_whole { self.sectors_in_chunk(at) } else { self.sectors_in_stripe(at) };
            let sectors = (rest.len() / len).min(PIECE_SECTORS).min(max);
            let (csums, behind) = rest.split_at(sectors * len);
            rest = behind;
            let buffer = &mut buffer[..sectors * self.geometry.sectorsize_bytes];
            let copies = match self.volume.mirror_count(at) {
                Ok(copies) => copies,
                Err(error) => {
                    let len_bytes = number(buffer.len());
                    let error = error.to_string();
                    found.push(Finding::DataUnreadable { at, len_bytes, mirror: 0, error });
                    0
                }
            };
            read_bytes += self.check_piece(at, copies, csums, buffer, found);
            at = LogicalAddr(at.0.saturating_add(number(buffer.len())));
        }
        read_bytes
    }

    /// Sectors from `at` to the end of its chunk: a read stays inside one. At least 1.
    fn sectors_in_chunk(&self, at: LogicalAddr) -> usize {
        let end = self.volume.chunk_at(at).map_or(at.0, |chunk| chunk.end().0);
        let sectors = end.saturating_sub(at.0) / self.sector();
        usize::try_from(sectors).unwrap_or(usize::MAX).max(1)
    }

    /// The same up to the end of its stripe, which lies on one device: what is missing is that alone.
    fn sectors_in_stripe(&self, at: LogicalAddr) -> usize {
        let start = self.volume.chunk_at(at).map_or(at.0, |chunk| chunk.start.0);
        let rest = STRIPE_LEN_BYTES - at.0.saturating_sub(start) % STRIPE_LEN_BYTES;
        let sectors = usize::try_from(rest / self.sector()).unwrap_or(usize::MAX).max(1);
        sectors.min(self.sectors_in_chunk(at))
    }

    /// All copies of a piece. That one is on a device that is missing is no finding, if there is another.
    fn check_piece(
        &self,
        at: LogicalAddr,
        copies: usize,
        csums: &[u8],
        buffer: &mut [u8],
        found: &mut Vec<Finding>,
    ) -> u64 {
        let mut missing = None;
        let mut read_bytes = 0_u64;
        let len_bytes = number(buffer.len());
        let unreadable = |mirror, error: &Error| {
            let (mirror, error) = (number(mirror), error.to_string());
            Finding::DataUnreadable { at, len_bytes, mirror, error }
        };
        for mirror in 0..copies {
            match self.volume.read_mirror(at, mirror, buffer) {
                Ok(()) => {
                    read_bytes = read_bytes.saturating_add(len_bytes);
                    self.compare_copy(at, mirror, csums, buffer, found);
                }
                Err(error @ Error::MissingDevice { .. }) => {
                    missing.get_or_insert((mirror, error));
                }
                Err(error) => found.push(unreadable(mirror, &error)),
            }
        }
        if let Some((mirror, error)) = missing.filter(|_| read_bytes == 0) {
            found.push(unreadable(mirror, &error));
        }
        read_bytes
    }

    fn compare_copy(
        &self,
        at: LogicalAddr,
        mirror: usize,
        csums: &[u8],
        buffer: &[u8],
        found: &mut Vec<Finding>,
    ) {
        self.count_progress(number(buffer.len()));
        let csum = self.geometry.csum;
        csum.for_each_mismatch(buffer, self.geometry.sectorsize_bytes, csums, |index| {
            let bad = at.0.saturating_add(number(index) * self.sector());
            self.bad_sector(LogicalAddr(bad), mirror, found);
        });
    }

    /// Notes a bad sector, or makes the finding before it longer.
    fn bad_sector(&self, at: LogicalAddr, mirror: usize, found: &mut Vec<Finding>) {
        let sector = self.sector();
        if let Some(Finding::DataCsum { at: first, len_bytes, mirror: same, .. }) = found.last_mut()
            && *same == number(mirror)
            && first.0.checked_add(*len_bytes) == Some(at.0)
        {
            *len_bytes += sector;
            return;
        }
        let runs = self.volume.runs(at, sector).ok();
        let place = runs.and_then(|runs| runs.first()?.copies.get(mirror).copied());
        found.push(Finding::DataCsum {
            at,
            len_bytes: sector,
            mirror: number(mirror),
            device: Maybe(place.map(|place| place.devid)),
            physical: Maybe(place.map(|place| place.at)),
        });
    }
}
