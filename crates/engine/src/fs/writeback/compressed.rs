//! Compressing what is written back, on all cores, and bringing what is done to the medium beside it.
//!
//! Pieces get space and are written by batches, in their order; all are entered together, behind the last. Until then the space of each
//! batch is held by nothing but [`Progress`], over commits of others and such that make room for a later batch. If one fails, that of all
//! before it goes back, too.

use ubtrfs_rt::{AtomicUsize, Mutex, Ordering};

use super::{Job, Part};
use crate::alloc::DataPromise;
use crate::data::append::{self, Written};
use crate::data::compression::EXTENT_BYTES_MAX;
use crate::data::prepare::Extents;
use crate::error::Result;

/// Pieces that get space and are written together: as many of a run whoever is faster, so that where they go does not depend on that.
const BATCH_PIECES: usize = 32;

/// Bytes that become an extent, and what becomes of them.
struct Piece<'a> {
    offset: u64,
    buffers: Vec<&'a [u8]>,
    /// Held for no longer than it takes to put something in or take it out.
    done: Mutex<Option<Extents>>,
}

impl<'a> Piece<'a> {
    fn new(offset: u64, buffers: Vec<&'a [u8]>) -> Self {
        Self { offset, buffers, done: Mutex::new(None) }
    }

    /// Once it is done, whether nothing of it shrank.
    fn is_plain(&self) -> Option<bool> {
        self.done.lock().as_ref().map(Extents::is_plain)
    }
}

/// Pieces in their order, of which each thread takes the next when it is done with one: none waits for a slower one.
struct Work<'a> {
    pieces: Vec<Piece<'a>>,
    next: AtomicUsize,
}

impl<'a> Work<'a> {
    fn new(parts: &[&Part<'a>]) -> Self {
        let mut pieces = Vec::new();
        for part in parts {
            let mut offset = part.offset;
            let (mut buffers, mut len) = (Vec::new(), 0);
            for buffer in &part.buffers {
                let mut rest = *buffer;
                while !rest.is_empty() {
                    let (now, later) = rest.split_at(rest.len().min(EXTENT_BYTES_MAX - len));
                    buffers.push(now);
                    (rest, len) = (later, len + now.len());
                    if len == EXTENT_BYTES_MAX {
                        pieces.push(Piece::new(offset, std::mem::take(&mut buffers)));
                        offset += len as u64;
                        len = 0;
                    }
                }
            }
            if len > 0 {
                pieces.push(Piece::new(offset, buffers));
            }
        }
        Self { pieces, next: AtomicUsize::new(0) }
    }

    /// The next piece, for who calls alone.
    fn take(&self) -> Option<&Piece<'a>> {
        self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Nobody takes any more.
    fn stop(&self) {
        self.next.store(self.pieces.len(), Ordering::Relaxed);
    }
}

/// What was brought to the medium.
struct Progress {
    written: Written,
    csums: Vec<u8>,
    piece_count: usize,
    /// So many pieces in front were seen to be done.
    done_count: usize,
    /// What is left is written together.
    is_last: bool,
}

impl Job<'_> {
    /// Writes parts compressed to space of their own, and puts it in the place of what the file had there. Returns the bytes of it. Where
    /// some of it has space and the rest has not, the device was given for nothing what is not more than all of it compressed.
    pub(super) fn write_compressed(&self, parts: &[&Part<'_>]) -> Result<u64> {
        let work = Work::new(parts);
        let compress = |piece: &Piece<'_>| {
            let extents = Extents::gathered(&piece.buffers, &self.options);
            *piece.done.lock() = Some(extents);
        };
        let mut progress = Progress {
            written: Written::nothing(DataPromise::Given),
            csums: Vec::new(),
            piece_count: 0,
            done_count: 0,
            is_last: false,
        };
        let executor = self.fs.runtime().executor;
        let thread_count = executor.thread_count().min(work.pieces.len());
        let beside = || {
            while let Some(piece) = work.take() {
                compress(piece);
                self.write_done(&work, &mut progress).inspect_err(|_| work.stop())?;
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
            .and_then(|()| self.write_done(&work, &mut progress));
        let Progress { written, csums, .. } = progress;
        self.enter_or_release(parts, &written, &csums, result)
    }

    /// Brings to the medium those batches in front of which all pieces are done.
    fn write_done(&self, work: &Work<'_>, progress: &mut Progress) -> Result<()> {
        loop {
            let (start, all) = (progress.piece_count, work.pieces.len());
            let end = |is_last| if is_last { all } else { all.min(start + BATCH_PIECES) };
            while progress.done_count < end(progress.is_last)
                && let Some(is_plain) = work.pieces[progress.done_count].is_plain()
            {
                progress.done_count += 1;
                // What does not shrink becomes extents as large as the space that is found at once: with a batch's, those of files that are
                // written side by side would be no larger than that.
                progress.is_last |= is_plain;
            }
            let end = end(progress.is_last);
            if start == end || progress.done_count < end {
                return Ok(());
            }
            let batch = &work.pieces[start..end];
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
