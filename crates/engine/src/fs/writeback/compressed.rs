//! Compressing what is written, on all cores, and bringing what is done to the medium beside it. Who makes a file longer beside those who
//! write back compresses what he writes alone ([`From::Writer`]), and leaves them one core less.
//!
//! Pieces get space and are written by batches, in their order; all are entered together, behind the last. Until then the space of each
//! batch is held by nothing but [`Progress`], over commits of others and such that make room for a later batch. If one fails, that of all
//! before it goes back, too.

use ubtrfs_rt::{AtomicBool, AtomicUsize, Mutex, Ordering};

use super::{From, Job, Part};
use crate::alloc::DataPromise;
use crate::data::append::{self, Written};
use crate::data::compression::EXTENT_BYTES_MAX;
use crate::data::prepare::Extents;
use crate::error::Result;

/// Pieces that get space and are written together: as many of a run whoever is faster, so that where they go does not depend on that.
const BATCH_PIECES: usize = 32;

/// Whether somebody who makes a file longer has compressed a part of it himself ([`From::Writer`]) since this was asked the last time, and so
/// is likely to be at it.
#[derive(Debug, Default)]
pub(in crate::fs) struct Writers(AtomicBool);

impl Writers {
    fn note(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

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

    fn len_bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.len()).sum()
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

    /// What is left, each piece for who gets it alone.
    fn rest(&self) -> impl Iterator<Item = &Piece<'a>> {
        std::iter::from_fn(|| self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)))
    }

    /// How many pieces nobody has taken.
    fn left_count(&self) -> usize {
        self.pieces.len().saturating_sub(self.next.load(Ordering::Relaxed))
    }

    fn len_bytes(&self) -> usize {
        self.pieces.iter().map(Piece::len_bytes).sum()
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
    /// What of those did not shrink.
    plain_bytes: usize,
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
            plain_bytes: 0,
            is_last: false,
        };
        let executor = self.fs.runtime().executor;
        let take_all = |_| work.rest().for_each(compress);
        let mut result = Ok(());
        while result.is_ok() && work.left_count() > 0 {
            let helper_count = self.helper_count().min(work.left_count() - 1);
            // Alone no further than a batch: by then others may have come free.
            let pieces_max = if helper_count == 0 { BATCH_PIECES } else { usize::MAX };
            let beside = || {
                for piece in work.rest().take(pieces_max) {
                    compress(piece);
                    self.write_done(&work, &mut progress).inspect_err(|_| work.stop())?;
                }
                Ok(())
            };
            result = executor.compute_each_beside(0..helper_count, take_all, beside);
        }
        let result = result.and_then(|()| self.write_done(&work, &mut progress));
        // A single block never shrinks, and less than an extent tells little of the rest.
        let len_bytes = work.len_bytes();
        if len_bytes >= EXTENT_BYTES_MAX {
            let stays_plain = progress.plain_bytes > len_bytes / 2;
            self.io.stays_plain.store(stays_plain, Ordering::Relaxed);
        }
        let Progress { written, csums, .. } = progress;
        self.enter_or_release(parts, &written, &csums, result)
    }

    /// How many threads compress beside this one.
    fn helper_count(&self) -> usize {
        let others = self.fs.runtime().executor.thread_count().saturating_sub(1);
        let writers = &self.fs.inner.open_files.writers;
        match self.from {
            From::Caller => others,
            From::Writer => {
                writers.note();
                0
            }
            // A writer who works himself has one of the processors.
            From::Memory => others.saturating_sub(usize::from(writers.take())),
        }
    }

    /// Brings to the medium those batches in front of which all pieces are done.
    fn write_done(&self, work: &Work<'_>, progress: &mut Progress) -> Result<()> {
        loop {
            let (start, all) = (progress.piece_count, work.pieces.len());
            let end = |is_last| if is_last { all } else { all.min(start + BATCH_PIECES) };
            while progress.done_count < end(progress.is_last)
                && let piece = &work.pieces[progress.done_count]
                && let Some(is_plain) = piece.is_plain()
            {
                progress.done_count += 1;
                progress.plain_bytes += if is_plain { piece.len_bytes() } else { 0 };
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
