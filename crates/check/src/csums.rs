//! Checksums of data: which ranges have them, and whether the data are what they say.

use std::ops::Range;

use ubtrfs_ondisk::csum::CsumType;
use ubtrfs_ondisk::{Key, KeyType, LogicalAddr, ObjectId, RootId};

use crate::context::Context;
use crate::extents::Extents;
use crate::finding::{Finding, Maybe};
use crate::read::Pointer;
use crate::roots::Roots;
use crate::view::{View, number};
use crate::walk::{Kind, Visit};

/// Data that is read at a time.
const PIECE_SECTORS: usize = 64;
/// Leaves of checksums whose data a thread reads at a time.
const BATCH_LEAVES: usize = 1;

/// The ranges that have checksums, in order, none touching the next.
#[derive(Debug, Default)]
pub(crate) struct Csums {
    ranges: Vec<Range<u64>>,
    leaves: Vec<Pointer>,
}

impl Csums {
    pub(crate) fn covered_bytes(&self) -> u64 {
        self.ranges.iter().fold(0, |sum: u64, range| sum.saturating_add(range.end - range.start))
    }

    /// The first byte of a range without checksums.
    pub(crate) fn first_missing(&self, range: Range<u64>) -> Option<u64> {
        let behind = self.ranges.partition_point(|covered| covered.start <= range.start);
        let covered = behind.checked_sub(1).and_then(|index| self.ranges.get(index));
        match covered.filter(|covered| covered.end > range.start) {
            Some(covered) if covered.end >= range.end => None,
            Some(covered) => Some(covered.end),
            None => Some(range.start),
        }
    }

    /// The first byte of a range with a checksum.
    pub(crate) fn first_present(&self, range: Range<u64>) -> Option<u64> {
        let index = self.ranges.partition_point(|covered| covered.end <= range.start);
        let covered = self.ranges.get(index)?;
        (covered.start < range.end).then_some(covered.start.max(range.start))
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
        let mut csums = Csums::default();
        for leaf in self.walk(pointers, Kind::Tree, &self.csum_visitor()) {
            for (index, (key, range)) in leaf.out.into_iter().enumerate() {
                let Some(last) = csums.ranges.last_mut() else {
                    csums.ranges.push(range);
                    continue;
                };
                // Inside a leaf the structural verifier looks for it.
                if last.end > range.start && index == 0 {
                    let previous_end = LogicalAddr(last.end);
                    self.findings.push(Finding::CsumOverlap { key, previous_end });
                }
                if last.end >= range.start && last.start <= range.start {
                    last.end = last.end.max(range.end);
                } else {
                    csums.ranges.push(range);
                }
            }
            csums.leaves.push(leaf.pointer);
        }
        if !csums.ranges.is_sorted_by_key(|range| range.start) {
            csums.ranges.sort_unstable_by_key(|range| range.start);
        }
        self.statistics.csum_bytes = csums.covered_bytes();
        csums
    }

    /// Only data has checksums.
    pub(crate) fn check_csum_coverage(
        &mut self,
        extents: &Extents,
        csums: &Csums,
        logged: &[Range<u64>],
    ) {
        if !self.is_complete(RootId::EXTENT_TREE) {
            return;
        }
        let sector = self.sector();
        let mut data = extents.list.iter().filter(|extent| extent.is_data()).peekable();
        let logged_end = |at: u64| {
            let behind = logged.partition_point(|range| range.start <= at);
            let of_log = logged.get(behind.checked_sub(1)?)?;
            of_log.contains(&at).then_some(of_log.end)
        };
        for range in &csums.ranges {
            let mut at = range.start;
            while at < range.end {
                while data.next_if(|extent| extent.end(sector) <= at).is_some() {}
                let next = data.peek();
                if let Some(extent) = next.filter(|extent| extent.at.0 <= at) {
                    at = extent.end(sector);
                    continue;
                }
                if let Some(end) = logged_end(at) {
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
    pub(crate) fn check_data(&mut self, csums: &Csums) {
        let visitor = self.csum_visitor();
        let results = self.in_parallel(&csums.leaves, BATCH_LEAVES, |pointer| {
            let mut found = Vec::new();
            // What is wrong with the leaf was found when it was walked.
            let Some(leaf) = self.read_block(pointer, &mut Vec::new()) else {
                return (found, 0);
            };
            let mut read_bytes = 0;
            let mut buffer = vec![0; PIECE_SECTORS * self.geometry.sectorsize_bytes];
            for (_, key, data) in leaf.items() {
                if let Some(range) = visitor.range(key, data) {
                    read_bytes += self.check_item(range.start, data, &mut buffer, &mut found);
                }
            }
            (found, read_bytes)
        });
        for (found, read_bytes) in results {
            self.statistics.data_read_bytes += read_bytes;
            self.findings.extend(found);
        }
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
        while rest.len() >= len {
            let sectors = (rest.len() / len).min(PIECE_SECTORS).min(self.sectors_in_chunk(at));
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
            for mirror in 0..copies {
                read_bytes += self.check_piece(at.0, mirror, csums, buffer, found);
            }
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

    fn check_piece(
        &self,
        at: u64,
        mirror: usize,
        csums: &[u8],
        buffer: &mut [u8],
        found: &mut Vec<Finding>,
    ) -> u64 {
        let len_bytes = number(buffer.len());
        if let Err(error) = self.volume.read_mirror(LogicalAddr(at), mirror, buffer) {
            if !matches!(error, ubtrfs_volume::Error::MissingDevice { .. }) {
                found.push(Finding::DataUnreadable {
                    at: LogicalAddr(at),
                    len_bytes,
                    mirror: number(mirror),
                    error: error.to_string(),
                });
            }
            return 0;
        }
        self.count_progress(len_bytes);
        let csum = self.geometry.csum;
        let sectors = buffer.chunks(self.geometry.sectorsize_bytes);
        for (index, (sector, stored)) in sectors.zip(csums.chunks(csum.len_bytes())).enumerate() {
            if !csum.matches(stored, sector) {
                let bad = at.saturating_add(number(index) * self.sector());
                self.bad_sector(LogicalAddr(bad), mirror, found);
            }
        }
        len_bytes
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
