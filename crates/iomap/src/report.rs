//! What a file is at a place: what the filesystem mapped, and over it what is in memory only or on its way.
//!
//! Writeback first makes the filesystem map the data, and then ends the block's state. So who looks at the mapping first and
//! at the states then can miss data that went from the one to the other in between; the cookie, looked at last, tells.

use crate::address_space::OpenFile;
use crate::extent_state::{CountQuery, LockMode, LockedRange, StateBits, Want};
use crate::mapping::{Cookie, FileSystem};
use crate::offset::{FileOffset, FileRange};

/// What the filesystem said of a place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<W> {
    /// Holds the place.
    pub(crate) range: FileRange,
    /// Whether it reads as zeros, where nothing lies over it.
    pub(crate) is_zeros: bool,
    pub(crate) cookie: Cookie,
    pub(crate) what: W,
}

/// A part of a file that is all the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment<W> {
    pub(crate) range: FileRange,
    pub(crate) content: Content<W>,
    /// What is known to begin where it ends.
    pub(crate) behind: Behind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Content<W> {
    /// As the filesystem said; there is nothing else in memory.
    Zeros(W),
    /// As the filesystem said.
    Data(W),
    /// Data that the mapping does not show yet.
    InMemory,
}

/// What begins behind a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Behind {
    Unknown,
    Data,
    Zeros,
}

impl<W> Segment<W> {
    pub(crate) fn is_data(&self) -> bool {
        !matches!(self.content, Content::Zeros(_))
    }
}

impl<F: FileSystem> OpenFile<F> {
    /// What the file is from `at` on, at most up to `end`, which is after it; `piece_at` says what the filesystem does.
    #[inline(always)]
    pub(crate) fn segment<W>(
        &self,
        at: FileOffset,
        end: FileOffset,
        mut piece_at: impl FnMut(FileOffset) -> Result<Piece<W>, F::Error>,
    ) -> Result<Segment<W>, F::Error> {
        loop {
            let piece = piece_at(at)?;
            let within = FileRange::new(at, piece.range.end.min(end));
            if !piece.is_zeros {
                let content = Content::Data(piece.what);
                return Ok(Segment { range: within, content, behind: Behind::Unknown });
            }
            let any = Want::Any(StateBits::DELALLOC | StateBits::ORDERED);
            let query = CountQuery::first_run(within, any);
            let found = self.space.states.count_range(query, Some(&self.cached_state));
            if !self.space.is_current(piece.cookie) {
                continue;
            }
            let content = Content::Zeros(piece.what);
            return Ok(match found {
                None => Segment { range: within, content, behind: Behind::Unknown },
                Some(found) if found.start == at => {
                    let range = found.run();
                    let is_cut = range.end >= within.end;
                    let behind = if is_cut { Behind::Unknown } else { Behind::Zeros };
                    Segment { range, content: Content::InMemory, behind }
                }
                Some(found) => {
                    let range = FileRange::new(at, found.start);
                    Segment { range, content, behind: Behind::Data }
                }
            });
        }
    }

    /// Only for the experiment that shows what it costs to lock ranges record by record.
    pub(crate) fn lock_as_before(&self, range: FileRange) -> Option<LockedRange<'_>> {
        let locks = self.space.cache.options().ablation.states.lock_in_tree;
        locks.then(|| self.space.states.lock(range, LockMode::Shared))
    }
}
