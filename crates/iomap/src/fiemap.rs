//! FIEMAP: where a file's extents lie.

use crate::address_space::OpenFile;
use crate::iter::MappingIter;
use crate::mapping::{FileSystem, Mapping, MappingKind, Purpose};
use crate::offset::{FileOffset, FileRange};
use crate::report::{Content, Piece, Segment};

/// What is to be known of an extent; the names are those of FIEMAP_EXTENT_*.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FiemapFlags {
    /// LAST: no extent of the file comes after it.
    pub is_last: bool,
    /// DELALLOC, and so UNKNOWN: it is in memory only, and has no place yet. What is written over data that has one is told as that data,
    /// as by Linux's btrfs: the place does not have what the file reads as until it is written back, and then it may be another.
    pub is_delalloc: bool,
    /// UNWRITTEN: reads as zeros.
    pub is_unwritten: bool,
    /// ENCODED: its bytes are not stored as they are.
    pub is_encoded: bool,
    /// DATA_INLINE, and so NOT_ALIGNED.
    pub is_inline: bool,
    /// SHARED: others refer to the same space.
    pub is_shared: bool,
}

/// An extent of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FiemapExtent {
    /// What part of the file it is.
    pub range: FileRange,
    /// Where it lies in the filesystem's address space, in bytes.
    pub address: Option<u64>,
    /// More about it.
    pub flags: FiemapFlags,
}

impl FiemapExtent {
    fn of(segment: &Segment<Mapping>) -> Option<Self> {
        let mapping = match segment.content {
            Content::Zeros(mapping) | Content::Data(mapping) => mapping,
            Content::InMemory => {
                let flags = FiemapFlags { is_delalloc: true, ..FiemapFlags::default() };
                return Some(Self { range: segment.range, address: None, flags });
            }
        };
        if mapping.kind == MappingKind::Hole {
            return None;
        }
        // Of what is encoded only the beginning has a place.
        let into = segment.range.start.bytes_since(mapping.range.start);
        let into = if mapping.flags.is_encoded { 0 } else { into };
        Some(Self {
            range: segment.range,
            address: mapping.address.map(|address| address.saturating_add(into)),
            flags: FiemapFlags {
                is_last: false,
                is_delalloc: mapping.kind == MappingKind::Delalloc,
                is_unwritten: mapping.kind == MappingKind::Unwritten,
                is_encoded: mapping.flags.is_encoded,
                is_inline: mapping.kind == MappingKind::Inline,
                is_shared: mapping.flags.is_shared,
            },
        })
    }

    /// Whether `next` goes on where this ends, in the file and where it lies: as if it lay there in full length, also if it is encoded,
    /// as Linux has it.
    fn goes_on_with(&self, next: &Self) -> bool {
        let place = self.address.map(|address| address.checked_add(self.range.len_bytes()));
        self.range.end == next.range.start
            && self.flags == next.flags
            && place == next.address.map(Some)
    }
}

/// Whether a report is made of what is on the medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FiemapSync {
    /// What is dirty has no place, or that of the data below it.
    AsIs,
    /// FIEMAP_FLAG_SYNC: what is dirty is brought to the device first.
    WriteBack,
}

impl<F: FileSystem> OpenFile<F> {
    /// The extents that hold a byte of the range, in order, whole as far as they lie in the range; at most `extents_max`. A file that
    /// changes meanwhile is reported as each place was at some moment.
    ///
    /// An empty range holds no byte, nor does one from [`FileOffset::MAX`] on: of those there are no extents, where Linux refuses the call (EINVAL,
    /// EFBIG). Linux tells extents whole, also what of them lies outside of the range, where this cuts them to its blocks; and given room for no
    /// extent it tells how many there are, of which this says nothing. No mount hands this on: FUSE has no such request.
    ///
    /// # Errors
    /// What the filesystem said: with [`FiemapSync::WriteBack`] also where what was dirty was lost on its way, which the next fsync
    /// tells, too.
    pub fn fiemap(
        &self,
        range: FileRange,
        extents_max: usize,
        sync: FiemapSync,
    ) -> Result<Vec<FiemapExtent>, F::Error> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        if sync == FiemapSync::WriteBack {
            self.space.flush_told(range)?;
        }
        let range = range.round_out(self.space.block_bytes);
        let range = FileRange::new(range.start, range.end.min(FileOffset::MAX));
        let _locked = self.lock_as_before(range);
        let mut extents: Vec<FiemapExtent> = Vec::new();
        let mut last = None;
        let mut piece_at = |at| self.piece_for_fiemap(at, &mut last);
        let mut at = range.start;
        // One more than asked for shows that the last one asked for ended.
        while at < range.end && extents.len() <= extents_max {
            let segment = self.segment(at, range.end, &mut piece_at)?;
            at = segment.range.end;
            let Some(extent) = FiemapExtent::of(&segment) else { continue };
            match extents.last_mut() {
                Some(last) if last.goes_on_with(&extent) => last.range.end = extent.range.end,
                _ => extents.push(extent),
            }
        }
        let is_cut = extents.len() > extents_max;
        extents.truncate(extents_max);
        if let Some(last) = extents.last_mut()
            && last.range.end == FileOffset::MAX
        {
            // Of the largest file the last block ends a byte behind where a file can.
            last.range.end = last.range.end.round_up(self.space.block_bytes);
        }
        if !is_cut
            && let Some(last) = extents.last_mut()
            && !self.has_extent_after(at, piece_at)?
        {
            last.flags.is_last = true;
        }
        Ok(extents)
    }

    /// The mapping at a place, with all that is to be known of it; `last` is the one that the same call asked for before.
    fn piece_for_fiemap(
        &self,
        at: FileOffset,
        last: &mut Option<Mapping>,
    ) -> Result<Piece<Mapping>, F::Error> {
        let is_usable =
            |mapping: &Mapping| mapping.range.contains(at) && self.space.is_current(mapping.cookie);
        let mapping = match *last {
            Some(mapping) if is_usable(&mapping) => mapping,
            _ => {
                let mut iter = MappingIter::new(&*self.space, FileRange::from(at));
                let asked = iter.next(Purpose::Fiemap)?;
                let (mapping, _) = asked.ok_or(crate::Error::NoData { offset: at })?;
                *last = Some(mapping);
                mapping
            }
        };
        let Mapping { range, cookie, .. } = mapping;
        Ok(Piece { range, is_zeros: mapping.kind.is_zeros(), cookie, what: mapping })
    }

    fn has_extent_after(
        &self,
        mut at: FileOffset,
        mut piece_at: impl FnMut(FileOffset) -> Result<Piece<Mapping>, F::Error>,
    ) -> Result<bool, F::Error> {
        while at < FileOffset::MAX {
            let segment = self.segment(at, FileOffset::MAX, &mut piece_at)?;
            if FiemapExtent::of(&segment).is_some() {
                return Ok(true);
            }
            at = segment.range.end;
        }
        Ok(false)
    }
}
