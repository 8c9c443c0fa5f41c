//! FIEMAP: where a file's extents lie.

use crate::address_space::OpenFile;
use crate::error::Error;
use crate::mapping::{Detail, FileSystem, Mapping, MappingKind};
use crate::offset::{FileOffset, FileRange};
use crate::report::{Content, Piece, Segment};
use crate::seek_window::Questions;

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
        let mut told = Told::default();
        let mut at = range.start;
        // One more than asked for shows that the last one asked for ended.
        while at < range.end && extents.len() <= extents_max {
            let piece_at = |at| self.piece_for_fiemap(at, range.end, &mut told);
            let segment = self.segment(at, range.end, piece_at)?;
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
            && !self.has_extent_after(at, &mut told)?
        {
            last.flags.is_last = true;
        }
        Ok(extents)
    }

    /// The mapping at a place, with all that is to be known of it.
    fn piece_for_fiemap(
        &self,
        at: FileOffset,
        end: FileOffset,
        told: &mut Told,
    ) -> Result<Piece<Mapping>, F::Error> {
        let known = told.find(at);
        let is_stale = known.is_some_and(|known| !self.space.is_current(known.cookie));
        let mapping = match known {
            Some(mapping) if !is_stale => mapping,
            _ => {
                // Who changes the file waits for this, and makes most of it useless.
                let count_max = told.begin_question(!is_stale);
                let range = FileRange::new(at, end);
                self.space.ask_ahead(range, Detail::Sharing, count_max, &mut told.mappings)?;
                told.find(at).ok_or(Error::NoData { offset: at })?
            }
        };
        let Mapping { range, cookie, .. } = mapping;
        Ok(Piece { range, is_zeros: mapping.kind.is_zeros(), cookie, what: mapping })
    }

    fn has_extent_after(&self, mut at: FileOffset, told: &mut Told) -> Result<bool, F::Error> {
        let end = FileOffset::MAX;
        // One extent is enough.
        told.questions = Questions::default();
        while at < end {
            let segment = self.segment(at, end, |at| self.piece_for_fiemap(at, end, told))?;
            if FiemapExtent::of(&segment).is_some() {
                return Ok(true);
            }
            at = segment.range.end;
        }
        Ok(false)
    }
}

/// What a call was told last: mappings that touch. It asks for more at once the longer it goes on.
#[derive(Default)]
struct Told {
    mappings: Vec<Mapping>,
    /// The one found last.
    at: usize,
    questions: Questions,
}

impl Told {
    /// The mapping at `at`, which is never before where the last one was asked for.
    fn find(&mut self, at: FileOffset) -> Option<Mapping> {
        let rest = self.mappings.get(self.at..)?;
        self.at += rest.iter().take_while(|mapping| mapping.range.end <= at).count();
        self.mappings.get(self.at).filter(|mapping| mapping.range.contains(at)).copied()
    }

    /// Forgets them. Returns how many to ask for.
    fn begin_question(&mut self, goes_on: bool) -> usize {
        self.mappings.clear();
        self.at = 0;
        self.questions.next(goes_on)
    }
}
