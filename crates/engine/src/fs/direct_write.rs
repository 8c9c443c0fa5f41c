//! Data from a caller's buffer to the medium, past memory.
//!
//! Invariant: what is written of it, and mapped, is always a front. It goes in pieces, each of as much as is
//! promised space, and a piece in steps that are mapped whole or not at all; the first that fails ends it.
//! So nothing has to be undone, and what the file has behind that, preallocated or not, is not touched.

use ubtrfs_iomap::{FileRange, WritebackRun};
use ubtrfs_rt::RwLockWriteGuard;

use super::file_io::IoInode;
use super::writeback::{From, split_buffers};
use crate::alloc::Promised;
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;

/// The longest piece of a file that is compressed: what does not shrink of it is in memory once more until all of it is looked at.
const COMPRESSED_BYTES_MAX: u64 = 32 << 20;

/// How long the next piece may be; shorter each time that there was no space for one.
struct PieceMax {
    /// With space of its own.
    new_bytes: u64,
    /// Where the file has its space.
    placed_bytes: u64,
}

/// A piece that has its promise.
struct PromisedPiece<'a> {
    range: FileRange,
    /// Of one that goes where the file has its space.
    alone: Option<RwLockWriteGuard<'a, ()>>,
}

impl Filesystem {
    /// Writes as much of the run's front as there is space for, and returns how much that is. The thread
    /// holds no handle.
    ///
    /// # Errors
    /// As [`Filesystem::write`], if nothing was written.
    pub(super) fn write_direct(
        &self,
        io: &IoInode,
        run: &WritebackRun<'_>,
        from: From,
    ) -> Result<u64> {
        let len_bytes = run.range.len_bytes();
        let new_bytes = if io.compresses(self) { COMPRESSED_BYTES_MAX } else { len_bytes };
        let mut max = PieceMax { new_bytes, placed_bytes: len_bytes };
        let mut done_bytes = 0;
        while done_bytes < len_bytes {
            let start = run.range.start.saturating_add(done_bytes);
            let rest = FileRange::new(start, run.range.end);
            let piece = match self.promise_piece(io, rest, &mut max) {
                Err(_) if done_bytes > 0 => break,
                piece => piece?,
            };
            let (_, behind) = split_buffers(run.buffers, done_bytes);
            let (buffers, _) = split_buffers(&behind, piece.range.len_bytes());
            let part = WritebackRun { range: piece.range, buffers: &buffers, size: run.size };
            let promised = match piece.alone {
                Some(_) => Promised::Place,
                None => Promised::Space,
            };
            let (written_bytes, result) = self.write_front(io, &part, promised, from);
            done_bytes += written_bytes;
            match result {
                Ok(()) => {}
                Err(Error::NoSpace { .. }) if self.has_shortened(&piece, &mut max) => {}
                Err(_) if done_bytes > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done_bytes)
    }

    /// Promises space for the front of a range, of which the file may have it.
    fn promise_piece(
        &self,
        io: &IoInode,
        rest: FileRange,
        max: &mut PieceMax,
    ) -> Result<PromisedPiece<'_>> {
        loop {
            let range = front_of(rest, max.new_bytes);
            if self.has_items(range.len_bytes()) {
                match self.promise_data(range.len_bytes()) {
                    Ok(()) => return Ok(PromisedPiece { range, alone: None }),
                    Err(Error::NoSpace { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            let placed = front_of(rest, max.placed_bytes);
            if let Some((alone, range)) = self.lock_places(io, placed)? {
                return Ok(PromisedPiece { range, alone: Some(alone) });
            }
            let len_bytes = range.len_bytes();
            let error = match self.promise_new(len_bytes) {
                Ok(()) => return Ok(PromisedPiece { range, alone: None }),
                Err(error @ Error::NoSpace { .. }) => error,
                Err(error) => return Err(error),
            };
            max.new_bytes = self.half(range).ok_or(error)?;
        }
    }

    /// Promises space, and metadata as for what becomes dirty: what is written directly takes none of what is kept back for that, and for
    /// removals.
    fn promise_new(&self, len_bytes: u64) -> Result<()> {
        self.with_less_dirty(len_bytes, || self.promise_data(len_bytes))?;
        self.promise_items(len_bytes).inspect_err(|_| {
            self.inner.core.alloc.take_back_data(len_bytes, Promised::Space);
        })
    }

    /// Shortens the next pieces, after there was no space for the items of one. Returns false where that
    /// was as short as can be.
    fn has_shortened(&self, piece: &PromisedPiece<'_>, max: &mut PieceMax) -> bool {
        let Some(half) = self.half(piece.range) else { return false };
        match piece.alone {
            Some(_) => max.placed_bytes = half,
            None => max.new_bytes = half,
        }
        true
    }

    /// Half of a range, in whole blocks, if it has more than one.
    fn half(&self, range: FileRange) -> Option<u64> {
        let block = self.sectorsize_bytes();
        let has_more = range.len_bytes() > block;
        has_more.then(|| (range.len_bytes() / 2).next_multiple_of(block))
    }
}

fn front_of(range: FileRange, len_bytes: u64) -> FileRange {
    FileRange::with_len(range.start, range.len_bytes().min(len_bytes))
}
