//! Compressing what is written back, on all cores, and bringing what is done to the medium beside it.

use ubtrfs_rt::{AtomicUsize, Mutex, Ordering};

use super::{Job, Part, split_buffers};
use crate::alloc::DataPromise;
use crate::data::append::{self, Written};
use crate::data::compression::EXTENT_BYTES_MAX;
use crate::data::prepare::Extents;
use crate::error::Result;

/// Bytes that are compressed as one piece of work: an extent.
const PIECE_BYTES: u64 = EXTENT_BYTES_MAX as u64;
/// Pieces that get space and are written together: always as many, so that where they go does not depend on who was faster.
const BATCH_PIECES: usize = 32;

/// A piece of the file, and what becomes of it.
struct Piece<'a> {
    offset: u64,
    buffers: Vec<&'a [u8]>,
    done: Mutex<Option<Extents>>,
}

/// Pieces in their order, of which each thread takes the next: half of them each would wait for the one that shares its core with a writer.
struct Work<'a> {
    pieces: Vec<Piece<'a>>,
    next: AtomicUsize,
}

impl<'a> Work<'a> {
    fn new(parts: &[&Part<'a>]) -> Self {
        let mut pieces = Vec::new();
        for part in parts {
            let mut rest = part.buffers.clone();
            let mut offset = part.offset;
            while offset < part.range().end {
                let len = (part.range().end - offset).min(PIECE_BYTES);
                let (buffers, behind) = split_buffers(&rest, len);
                pieces.push(Piece { offset, buffers, done: Mutex::new(None) });
                (offset, rest) = (offset + len, behind);
            }
        }
        Self { pieces, next: AtomicUsize::new(0) }
    }

    /// Takes the next piece; none is left where there is none.
    fn take(&self) -> Option<&Piece<'a>> {
        self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Leaves the pieces that nobody took.
    fn stop(&self) {
        self.next.store(self.pieces.len(), Ordering::Relaxed);
    }
}

/// What was brought to the medium.
struct Progress {
    written: Written,
    csums: Vec<u8>,
    piece_count: usize,
}

impl Job<'_> {
    /// Writes parts compressed to space of their own, and puts it in the place of what the file had there. Returns the bytes of it.
    pub(super) fn write_compressed(&self, parts: &[&Part<'_>]) -> Result<u64> {
        let work = Work::new(parts);
        let compress = |piece: &Piece<'_>| {
            *piece.done.lock() = Some(Extents::gathered(&piece.buffers, &self.options));
        };
        let mut progress = Progress {
            written: Written::nothing(DataPromise::Given),
            csums: Vec::new(),
            piece_count: 0,
        };
        let executor = self.fs.runtime().executor;
        let thread_count = executor.thread_count().min(work.pieces.len());
        let beside = || {
            while let Some(piece) = work.take() {
                compress(piece);
                self.write_done(&work, &mut progress, BATCH_PIECES).inspect_err(|_| work.stop())?;
            }
            Ok(())
        };
        let take_all = |_| {
            while let Some(piece) = work.take() {
                compress(piece);
            }
        };
        let result = executor
            .compute_each_beside(0..thread_count.saturating_sub(1), take_all, beside)
            .and_then(|()| self.write_done(&work, &mut progress, 1));
        let Progress { written, csums, .. } = progress;
        self.enter_or_release(parts, &written, &csums, result)
    }

    /// Brings pieces that are done to the medium, those in front, by batches; not if there are fewer than so many.
    fn write_done(
        &self,
        work: &Work<'_>,
        progress: &mut Progress,
        piece_count_min: usize,
    ) -> Result<()> {
        loop {
            let rest = &work.pieces[progress.piece_count..];
            let batch = &rest[..rest.len().min(BATCH_PIECES)];
            if batch.len() < piece_count_min
                || batch.iter().any(|piece| piece.done.lock().is_none())
            {
                return Ok(());
            }
            let taken = |piece: &Piece<'_>| Some((piece.offset, piece.done.lock().take()?));
            let done: Vec<(u64, Extents)> = batch.iter().filter_map(taken).collect();
            let find = |core: &_| append::find_space(core, &done, DataPromise::Given);
            let found = self.find_space(find)?;
            let result = found.write(self.core(), append::bytes_of(&done));
            progress.written.append(found);
            progress.csums.extend(append::csums_of(&self.target, &done));
            progress.piece_count += batch.len();
            result?;
        }
    }
}
