//! The only place that turns logical addresses into device offsets.
//!
//! Invariants:
//! 1. Every chunk in the map has passed the layout check: a known profile, as many stripes as it
//!    asks for, and arithmetic on its fields that cannot overflow.
//! 2. No two chunks overlap in logical space, and no two stripes on a device.

use std::collections::BTreeMap;
use std::ops::Range;

use smallvec::SmallVec;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::chunk::{Chunk, STRIPE_LEN_BYTES};
use ubtrfs_ondisk::{Corruption, DeviceId, LogicalAddr, PhysicalAddr, Reason};
use ubtrfs_rt::Arc;

use crate::error::{Error, Result};

/// A byte on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The device.
    pub devid: DeviceId,
    /// The offset on it.
    pub at: PhysicalAddr,
}

/// A part of a logical range that lies in one piece on each device that holds a copy of it. On
/// striped profiles it consists of several pieces of the logical range, one stripe element each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// Where each copy begins.
    pub copies: SmallVec<[Place; 4]>,
    /// Bytes on the device.
    pub len_bytes: u64,
    /// Offset of the first piece from the start of the range.
    first_offset: u64,
    /// Bytes of the first piece.
    first_len_bytes: u64,
    /// From the end of one piece to the start of the next, in the range.
    gap_bytes: u64,
}

impl Run {
    /// The pieces of the logical range, as offsets from its start, in the order in which they lie
    /// on the device.
    pub fn pieces(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let (mut offset, mut len) = (self.first_offset, self.first_len_bytes);
        let mut left = self.len_bytes;
        let gap = self.gap_bytes;
        std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let piece = offset..offset + len.min(left);
            left -= piece.end - piece.start;
            offset = piece.end + gap;
            len = STRIPE_LEN_BYTES;
            Some(piece)
        })
    }
}

/// How a profile lays its stripes out: `columns` take turns, each kept `copies` times. The copies
/// of a column are neighbours in the chunk's list of stripes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Layout {
    columns: usize,
    copies: usize,
}

impl Layout {
    fn of(chunk: &Chunk) -> Result<Self> {
        let count = chunk.stripes.len();
        let profile = chunk.flags.profile();
        let (layout, right_count) = match profile {
            BlockGroupFlags(0) => (Self { columns: 1, copies: 1 }, count == 1),
            BlockGroupFlags::DUP | BlockGroupFlags::RAID1 => {
                (Self { columns: 1, copies: 2 }, count == 2)
            }
            BlockGroupFlags::RAID1C3 => (Self { columns: 1, copies: 3 }, count == 3),
            BlockGroupFlags::RAID1C4 => (Self { columns: 1, copies: 4 }, count == 4),
            BlockGroupFlags::RAID0 => (Self { columns: count, copies: 1 }, count >= 1),
            BlockGroupFlags::RAID10 => {
                let right = count >= 2 && count.is_multiple_of(2) && chunk.sub_stripes == 2;
                (Self { columns: count / 2, copies: 2 }, right)
            }
            BlockGroupFlags::RAID5 | BlockGroupFlags::RAID6 => {
                return Err(Error::Unsupported {
                    what: format!("the profile {} of the chunk at {}", chunk.flags, chunk.start),
                });
            }
            other => {
                return Err(Corruption::new(Reason::BadValue)
                    .have(format!("profile bits {:#x} of the chunk at {}", other.0, chunk.start))
                    .expect("one profile")
                    .into());
            }
        };
        if !right_count {
            return Err(Corruption::new(Reason::BadValue)
                .have(format!(
                    "{count} stripes, {} sub-stripes for {} at {}",
                    chunk.sub_stripes, chunk.flags, chunk.start
                ))
                .expect("what the profile asks for")
                .into());
        }
        Ok(layout)
    }
}

#[derive(Clone, Debug)]
struct Entry {
    chunk: Arc<Chunk>,
    layout: Layout,
    /// Bytes of each stripe on its device.
    stripe_bytes: u64,
}

/// The chunks of a filesystem.
#[derive(Clone, Debug, Default)]
pub struct ChunkMap {
    by_start: BTreeMap<LogicalAddr, Entry>,
    /// The end of the stripe that begins at each place, and its chunk.
    stripes: BTreeMap<(DeviceId, PhysicalAddr), (PhysicalAddr, LogicalAddr)>,
}

impl ChunkMap {
    /// An empty map.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a chunk in. One that is there already, in all equal, is no error.
    ///
    /// # Errors
    /// `Unsupported` for RAID5 and RAID6; `Corrupt` for a chunk that no filesystem can have, or
    /// that overlaps another.
    pub fn add(&mut self, chunk: Chunk) -> Result<()> {
        if self.by_start.get(&chunk.start).is_some_and(|entry| *entry.chunk == chunk) {
            return Ok(());
        }
        let entry = check(chunk)?;
        let chunk = &entry.chunk;
        let before = self.by_start.range(..chunk.end()).next_back();
        if let Some((_, other)) = before.filter(|(_, other)| other.chunk.end() > chunk.start) {
            return Err(Corruption::new(Reason::Overlap)
                .have(format!("chunk {}..{}", chunk.start, chunk.end()))
                .expect(format!("clear of chunk {}..{}", other.chunk.start, other.chunk.end()))
                .into());
        }
        let ranges = self.check_stripes(&entry)?;
        for (devid, range) in ranges {
            self.stripes.insert((devid, range.start), (range.end, chunk.start));
        }
        self.by_start.insert(chunk.start, entry);
        Ok(())
    }

    /// The ranges of the chunk's stripes, once they are known to overlap no other.
    fn check_stripes(&self, entry: &Entry) -> Result<Vec<(DeviceId, Range<PhysicalAddr>)>> {
        let mut ranges: Vec<(DeviceId, Range<PhysicalAddr>)> = Vec::new();
        for stripe in &entry.chunk.stripes {
            let end = PhysicalAddr(stripe.offset.0 + entry.stripe_bytes);
            ranges.push((stripe.device, stripe.offset..end));
        }
        ranges.sort_unstable_by_key(|(devid, range)| (*devid, range.start));
        let among_themselves =
            ranges.windows(2).any(|pair| pair[0].0 == pair[1].0 && pair[0].1.end > pair[1].1.start);
        for (devid, range) in &ranges {
            let before = self.stripes.range(..(*devid, range.end)).next_back();
            let taken =
                before.filter(|((other, _), (end, _))| other == devid && *end > range.start);
            if taken.is_some() || among_themselves {
                let with = taken.map_or(entry.chunk.start, |(_, (_, start))| *start);
                return Err(Corruption::new(Reason::Overlap)
                    .have(format!(
                        "stripe of chunk {} on device {devid} at {}..{}",
                        entry.chunk.start, range.start, range.end
                    ))
                    .expect(format!("clear of the stripes of chunk {with}"))
                    .into());
            }
        }
        Ok(ranges)
    }

    /// Takes a chunk out.
    pub fn remove(&mut self, start: LogicalAddr) -> Option<Arc<Chunk>> {
        let entry = self.by_start.remove(&start)?;
        for stripe in &entry.chunk.stripes {
            self.stripes.remove(&(stripe.device, stripe.offset));
        }
        Some(entry.chunk)
    }

    /// The chunk that holds `at`.
    pub fn chunk_at(&self, at: LogicalAddr) -> Option<&Arc<Chunk>> {
        self.entry_at(at).map(|entry| &entry.chunk)
    }

    /// All chunks, by address.
    pub fn chunks(&self) -> impl Iterator<Item = &Arc<Chunk>> {
        self.by_start.values().map(|entry| &entry.chunk)
    }

    /// How many copies the chunk at `at` keeps.
    ///
    /// # Errors
    /// `NoChunk`.
    pub fn mirror_count(&self, at: LogicalAddr) -> Result<usize> {
        let entry = self.entry_at(at).ok_or(Error::NoChunk { at, len_bytes: 1 })?;
        Ok(entry.layout.copies)
    }

    /// The stripes of each column of the chunk at `at`: the copies of a column are one slice.
    ///
    /// # Errors
    /// `NoChunk`.
    pub fn columns(&self, at: LogicalAddr) -> Result<impl Iterator<Item = Vec<DeviceId>>> {
        let entry = self.entry_at(at).ok_or(Error::NoChunk { at, len_bytes: 1 })?;
        let columns = entry.chunk.stripes.chunks(entry.layout.copies);
        Ok(columns.map(|stripes| stripes.iter().map(|stripe| stripe.device).collect()))
    }

    /// Bytes that each stripe of the chunk at `at` takes on its device.
    ///
    /// # Errors
    /// `NoChunk`.
    pub fn stripe_bytes(&self, at: LogicalAddr) -> Result<u64> {
        let entry = self.entry_at(at).ok_or(Error::NoChunk { at, len_bytes: 1 })?;
        Ok(entry.stripe_bytes)
    }

    /// Where a range lies. It may cross stripe elements, but not the end of its chunk.
    ///
    /// # Errors
    /// `NoChunk` when no single chunk holds the range.
    pub fn runs(&self, at: LogicalAddr, len_bytes: u64) -> Result<SmallVec<[Run; 1]>> {
        let no_chunk = || Error::NoChunk { at, len_bytes };
        let entry = self.entry_at(at).ok_or_else(no_chunk)?;
        let end = at.checked_add(len_bytes).ok_or_else(no_chunk)?;
        if end > entry.chunk.end() {
            return Err(no_chunk());
        }
        let start = at.0 - entry.chunk.start.0;
        if entry.layout.columns == 1 {
            let mut runs = SmallVec::new();
            runs.push(Run {
                copies: entry.copies(0, start),
                len_bytes,
                first_offset: 0,
                first_len_bytes: len_bytes,
                gap_bytes: 0,
            });
            return Ok(runs);
        }
        Ok(entry.striped_runs(start..start + len_bytes))
    }

    /// The logical ranges of a chunk that cover copies of the superblock, a whole stripe element
    /// each: the allocator must not give them out.
    ///
    /// # Errors
    /// `NoChunk` when no chunk begins at `start`.
    pub fn superblock_ranges(&self, start: LogicalAddr) -> Result<Vec<Range<LogicalAddr>>> {
        let entry = self.by_start.get(&start).ok_or(Error::NoChunk { at: start, len_bytes: 1 })?;
        let mut ranges: Vec<Range<LogicalAddr>> = Vec::new();
        let columns = entry.layout.columns as u64;
        for (index, stripe) in entry.chunk.stripes.iter().enumerate() {
            let column = (index / entry.layout.copies) as u64;
            for at in ubtrfs_ondisk::superblock::SUPERBLOCK_OFFSETS {
                // A superblock touches one element, or two where stripes are not aligned to it.
                let last = at.0 + ubtrfs_ondisk::superblock::SUPERBLOCK_BYTES as u64 - 1;
                let mut rows: Vec<u64> = [at.0, last]
                    .into_iter()
                    .filter_map(|byte| byte.checked_sub(stripe.offset.0))
                    .filter(|offset| *offset < entry.stripe_bytes)
                    .map(|offset| offset / STRIPE_LEN_BYTES)
                    .collect();
                rows.dedup();
                for row in rows {
                    let first = (row * columns + column) * STRIPE_LEN_BYTES;
                    let end = (first + STRIPE_LEN_BYTES).min(entry.chunk.len_bytes);
                    ranges.push(LogicalAddr(start.0 + first)..LogicalAddr(start.0 + end));
                }
            }
        }
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup();
        Ok(ranges)
    }

    fn entry_at(&self, at: LogicalAddr) -> Option<&Entry> {
        let (_, entry) = self.by_start.range(..=at).next_back()?;
        (at < entry.chunk.end()).then_some(entry)
    }
}

impl Entry {
    /// The copies of the byte at `offset` in the stripes of a column.
    fn copies(&self, column: usize, offset: u64) -> SmallVec<[Place; 4]> {
        let first = column * self.layout.copies;
        self.chunk.stripes[first..first + self.layout.copies]
            .iter()
            .map(|stripe| Place {
                devid: stripe.device,
                at: PhysicalAddr(stripe.offset.0 + offset),
            })
            .collect()
    }

    /// One run for each column that the range (of offsets in the chunk) touches: the elements of
    /// a column that a range covers are neighbours on the device.
    fn striped_runs(&self, range: Range<u64>) -> SmallVec<[Run; 1]> {
        let columns = self.layout.columns as u64;
        let mut runs = SmallVec::new();
        if range.is_empty() {
            return runs;
        }
        let first_element = range.start / STRIPE_LEN_BYTES;
        let end_element = range.end.div_ceil(STRIPE_LEN_BYTES);
        for element in first_element..end_element.min(first_element + columns) {
            let piece_start = (element * STRIPE_LEN_BYTES).max(range.start);
            let piece_end = ((element + 1) * STRIPE_LEN_BYTES).min(range.end);
            let last_element = element + (end_element - 1 - element) / columns * columns;
            let elements = (last_element - element) / columns + 1;
            let last_end = ((last_element + 1) * STRIPE_LEN_BYTES).min(range.end);
            let len_bytes = if elements == 1 {
                piece_end - piece_start
            } else {
                (piece_end - piece_start)
                    + (elements - 2) * STRIPE_LEN_BYTES
                    + (last_end - last_element * STRIPE_LEN_BYTES)
            };
            let column = usize::try_from(element % columns).expect("less than the columns");
            let in_stripe = element / columns * STRIPE_LEN_BYTES + piece_start % STRIPE_LEN_BYTES;
            runs.push(Run {
                copies: self.copies(column, in_stripe),
                len_bytes,
                first_offset: piece_start - range.start,
                first_len_bytes: piece_end - piece_start,
                gap_bytes: (columns - 1) * STRIPE_LEN_BYTES,
            });
        }
        runs
    }
}

/// Checks all that can be checked of a chunk by itself.
fn check(chunk: Chunk) -> Result<Entry> {
    let layout = Layout::of(&chunk)?;
    let bad = |have: String, expect: String| {
        Err(Error::from(Corruption::new(Reason::BadValue).have(have).expect(expect)))
    };
    let known = BlockGroupFlags::TYPE_MASK | BlockGroupFlags::PROFILE_MASK;
    let ty = chunk.flags.ty();
    let system_and_more = ty.contains(BlockGroupFlags::SYSTEM) && ty != BlockGroupFlags::SYSTEM;
    if !known.contains(chunk.flags) || ty.0 == 0 || system_and_more {
        return bad(
            format!("type bits {:#x} of the chunk at {}", chunk.flags.0, chunk.start),
            "data, metadata, both, or system".to_owned(),
        );
    }
    if chunk.stripe_len_bytes != STRIPE_LEN_BYTES {
        return bad(
            format!("stripe length {} of the chunk at {}", chunk.stripe_len_bytes, chunk.start),
            STRIPE_LEN_BYTES.to_string(),
        );
    }
    let columns = layout.columns as u64;
    // Elements of a striped chunk fill its rows.
    let unit = if columns > 1 { columns * STRIPE_LEN_BYTES } else { 1 };
    if chunk.len_bytes == 0
        || !chunk.len_bytes.is_multiple_of(unit)
        || chunk.start.checked_add(chunk.len_bytes).is_none()
    {
        return bad(
            format!("chunk of {} bytes at {}", chunk.len_bytes, chunk.start),
            format!("a range of the logical space, a multiple of {unit} long"),
        );
    }
    let stripe_bytes = chunk.len_bytes / columns;
    if let Some(stripe) =
        chunk.stripes.iter().find(|stripe| stripe.offset.checked_add(stripe_bytes).is_none())
    {
        return bad(
            format!("stripe of {stripe_bytes} bytes at {}", stripe.offset),
            "a range of a device".to_owned(),
        );
    }
    Ok(Entry { chunk: Arc::new(chunk), layout, stripe_bytes })
}

#[cfg(test)]
mod tests;
