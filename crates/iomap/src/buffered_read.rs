//! Reading through the page cache.

use std::ops::Range;

use ubtrfs_rt::{Arc, AtomicU64, Ordering};

use crate::address_space::{AddressSpace, OpenFile};
use crate::extent_state::LockMode;
use crate::mapping::FileSystem;
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::{Ahead, AheadOptions};

/// How much is copied before others have their turn at the pages.
const COPY_STEP_BYTES: usize = 256 * 1024;

/// The most that one miss reads; of a small budget, a part.
const FILL_BYTES_MAX: u64 = 4 << 20;

/// How much behind who goes through a file that memory cannot keep stays there for a while.
const LEFT_BEHIND_BYTES: u64 = 256 * 1024;

/// By how much it goes from there at once.
const DROP_STEP_BYTES: u64 = 64 * 1024;

/// What is read ahead at once, beside who reads.
const AHEAD_STEP_BYTES: u64 = 1 << 20;

/// How a read gets what is not in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Misses {
    /// Into memory, with so many bytes behind the end of the read.
    Cached { ahead_bytes: u64 },
    /// What is long enough, straight into the reader's buffer; the rest into memory.
    Straight,
}

/// Where a read ends at the latest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// Where the file does.
    File,
    /// Where the last block of the file does.
    LastBlock,
}

/// What became of a read.
#[derive(Debug)]
pub(crate) struct Read<E> {
    pub(crate) len: usize,
    /// Why it ended before both the file and the buffer did.
    pub(crate) error: Option<E>,
    /// Whether anything on the way could not be read, if only what nobody asked for.
    met_error: bool,
}

impl<E> Read<E> {
    /// How much was read, if that was all that there is.
    pub(crate) fn whole(self) -> Result<usize, E> {
        self.error.map_or(Ok(self.len), Err)
    }
}

impl<F: FileSystem> OpenFile<F> {
    /// Reads from `offset` on, up to the end of the file or of the buffer; returns how many bytes. What another call writes
    /// meanwhile is read in whole or not at all. Behind these bytes the buffer may hold anything.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`]; what the filesystem said when the first byte could not be read. Where a later one cannot, the read ends
    /// before its block.
    pub fn read(&self, offset: FileOffset, buffer: &mut [u8]) -> Result<usize, F::Error> {
        let read = self.read_as_far_as_it_goes(offset, buffer)?;
        if read.len == 0 { read.whole() } else { Ok(read.len) }
    }

    /// As [`OpenFile::read`], but no shorter than the file: for who takes a short answer for its end.
    ///
    /// # Errors
    /// As there, also where a later byte cannot be read.
    pub fn read_whole(&self, offset: FileOffset, buffer: &mut [u8]) -> Result<usize, F::Error> {
        self.read_as_far_as_it_goes(offset, buffer)?.whole()
    }

    fn read_as_far_as_it_goes(
        &self,
        offset: FileOffset,
        buffer: &mut [u8],
    ) -> Result<Read<F::Error>, F::Error> {
        let len_bytes = u64::try_from(buffer.len()).unwrap_or(u64::MAX);
        let range = AddressSpace::<F>::io_range(offset, len_bytes)?;
        let options = self.space.cache.options();
        // What is read ahead would go at once where nothing clean is kept.
        let window_max = if options.keeps_clean { options.readahead_bytes_max } else { 0 };
        let (start, end) = (range.start.bytes(), range.end.bytes());
        let ahead = AheadOptions {
            window_bytes_max: window_max,
            is_served: self.space.cache.has_readahead_service()
                && self.space.readahead_need.is_there(),
            may_be_straight: self.space.may_read_straight(range),
            is_alone: self.is_alone(),
            through_bytes_min: self.space.through_bytes_min(),
        };
        let (ahead, through_from) = {
            let mut readahead = self.readahead.lock();
            (readahead.read(start, end, ahead), readahead.through_from())
        };
        if through_from.is_none() && self.passed.load(Ordering::Relaxed) != 0 {
            self.passed.store(0, Ordering::Relaxed);
        }
        let misses = match ahead {
            Ahead::With(bytes) => Misses::Cached { ahead_bytes: bytes },
            Ahead::Beside { wanted, asked_bytes } => {
                self.space.ask_readahead(&wanted, &self.passed);
                Misses::Cached { ahead_bytes: asked_bytes.min(AHEAD_STEP_BYTES) }
            }
            Ahead::Straight => Misses::Straight,
        };
        let whole = range.round_out(self.space.block_bytes);
        let _locked = self.space.states.lock(whole, LockMode::Shared);
        let passes = through_from.is_some();
        let read = self.space.read_range(offset, buffer, misses, End::File, passes);
        if let Some(from) = through_from {
            let done = u64::try_from(read.len).unwrap_or(u64::MAX);
            self.space.drop_passed(from, start.saturating_add(done), &self.passed);
        }
        if read.met_error {
            // Or each read that comes near would try the bad block again.
            self.readahead.lock().stop();
        }
        Ok(read)
    }

    /// Whether nobody else has read the file since this one was read last.
    fn is_alone(&self) -> bool {
        let last_reader = &self.space.last_reader;
        let is_alone = last_reader.load(Ordering::Relaxed) == self.number;
        if !is_alone {
            last_reader.store(self.number, Ordering::Relaxed);
        }
        is_alone
    }
}

impl<F: FileSystem> AddressSpace<F> {
    /// Reads that have gone on from each other for so much go through the file, and what they read goes from memory behind them: it would
    /// only drive out the rest, and lie in memory that no processor has in its cache any more. Half of what memory holds, so that what is
    /// read again and again stays there, as does the rest of what others want.
    fn through_bytes_min(&self) -> u64 {
        let options = self.cache.options();
        // Where nothing clean is kept it goes anyhow.
        if self.is_kept() || !options.keeps_clean { u64::MAX } else { options.cached_bytes_max / 2 }
    }

    /// Who goes through the file has come from one place to another. Some of what lies behind him he may look at again.
    fn drop_passed(&self, from: u64, upto: u64, passed: &AtomicU64) {
        // Not by blocks, so that most reads have nothing to drop.
        let behind = |at: u64| at.saturating_sub(LEFT_BEHIND_BYTES) / DROP_STEP_BYTES;
        let steps = behind(from)..behind(upto);
        if !steps.is_empty() {
            let at = |step: u64| step * DROP_STEP_BYTES;
            passed.store(at(steps.end), Ordering::Relaxed);
            let blocks = at(steps.start) / self.block_bytes..at(steps.end) / self.block_bytes;
            let gone = self.pages.lock().drop_passed(&blocks);
            drop(gone);
        }
    }

    /// Asks the cache's service to read a range of bytes, as far as it is in the file.
    fn ask_readahead(&self, wanted: &Range<u64>, passed: &Arc<AtomicU64>) {
        let end = FileOffset::new(wanted.end).min(self.size());
        let mut at = FileOffset::new(wanted.start);
        let step_bytes = self.step_bytes(AHEAD_STEP_BYTES);
        // In parts, so that several threads can do it.
        while at < end {
            let range = FileRange::new(at, at.saturating_add(step_bytes).min(end));
            self.cache.ask_readahead(self.weak(), range, passed);
            at = range.end;
        }
    }

    /// Reads into memory what of the range is not there, in parts, so that nobody has to wait for the whole. Holes are left out:
    /// who copies a sparse file does not read them.
    pub(crate) fn read_ahead_of(&self, range: FileRange) -> Result<(), F::Error> {
        let mut was_needed = false;
        let mut at = range.start;
        let step_bytes = self.step_bytes(AHEAD_STEP_BYTES);
        while at < range.end.min(self.size()) {
            let step = FileRange::with_len(at, step_bytes);
            let part = FileRange::new(at, step.end.min(range.end).min(self.size()));
            let missing = self.pages.lock().missing(self.blocks(part));
            let Some(missing) = missing else {
                at = part.end;
                continue;
            };
            let missing_range = self.range_of(&missing);
            at = missing_range.end;
            if self.mappings(missing_range)?.iter().all(|mapping| mapping.kind.is_zeros()) {
                continue;
            }
            was_needed = true;
            let pages = self.pages.lock();
            // Nobody was at it meanwhile.
            if pages.missing(missing.clone()).as_ref() == Some(&missing) {
                drop(self.fill(pages, missing)?);
            }
        }
        if !was_needed {
            self.readahead_need.note_in_vain();
        }
        Ok(())
    }

    /// Reads from `offset` on, where the caller has the range locked, and `passes` if he is not likely to come again.
    pub(crate) fn read_range(
        &self,
        offset: FileOffset,
        buffer: &mut [u8],
        misses: Misses,
        limit: End,
        passes: bool,
    ) -> Read<F::Error> {
        // Up to here one block at a time, so that what is wanted and whole is had: something there could not be read.
        let mut careful_until = None;
        let fill_bytes_max = self.step_bytes(FILL_BYTES_MAX);
        // Once what was read was changed by others: what lies ahead they may change as often as they like, what is locked they may not.
        let mut was_in_vain = false;
        let mut pages = self.pages.lock();
        let mut done = 0;
        let error = loop {
            let size = match limit {
                End::File => self.size(),
                End::LastBlock => self.size().round_up(self.block_bytes),
            };
            let left = FileRange::with_len(offset, u64::try_from(buffer.len()).unwrap_or(u64::MAX));
            let at = offset.saturating_add(u64::try_from(done).unwrap_or(u64::MAX));
            let rest = FileRange::new(at, left.end.min(size));
            if rest.is_empty() {
                break None;
            }
            let len = usize::try_from(rest.len_bytes()).unwrap_or(usize::MAX).min(COPY_STEP_BYTES);
            let copied = pages.copy_out(at.bytes(), &mut buffer[done..done + len], passes);
            done += copied;
            if copied > 0 {
                if copied == COPY_STEP_BYTES {
                    ubtrfs_rt::MutexGuard::bump(&mut pages);
                }
                continue;
            }
            let ahead_bytes = match misses {
                Misses::Cached { ahead_bytes } if careful_until.is_none() && !was_in_vain => {
                    ahead_bytes
                }
                _ => 0,
            };
            let ahead = rest.end.saturating_add(ahead_bytes).min(size);
            let upto = ahead.min(at.saturating_add(fill_bytes_max));
            let Some(mut missing) = pages.missing(self.blocks(FileRange::new(at, upto))) else {
                continue;
            };
            if careful_until.is_some_and(|until| missing.start < until) {
                missing.end = missing.start + 1;
            }
            let straight = match misses {
                Misses::Straight => self.straight_blocks(at, &missing, rest),
                Misses::Cached { .. } => None,
            };
            let end = straight.as_ref().map_or(missing.end, |blocks| blocks.end);
            let is_one = end - missing.start == 1;
            let result = if let Some(blocks) = straight {
                drop(pages);
                let result = self.read_straight(&blocks, &mut buffer[done..]);
                pages = self.pages.lock();
                result
            } else {
                self.readahead_need.note_miss();
                let first = missing.start..missing.start + 1;
                match self.fill(pages, missing) {
                    Ok(after) => {
                        pages = after;
                        was_in_vain |= pages.missing(first).is_some();
                        Ok(0)
                    }
                    Err(error) => {
                        pages = self.pages.lock();
                        Err(error)
                    }
                }
            };
            match result {
                Ok(read) => done += read,
                // Once more, by blocks; what alone could not be read just then, too.
                Err(_) if !is_one || careful_until.is_none_or(|until| until < end) => {
                    careful_until = Some(end);
                }
                Err(error) => {
                    careful_until = Some(end);
                    break Some(error);
                }
            }
        };
        if !self.cache.options().keeps_clean {
            let ahead_bytes = match misses {
                Misses::Cached { ahead_bytes } => ahead_bytes,
                Misses::Straight => 0,
            };
            let len_bytes = u64::try_from(done).unwrap_or(u64::MAX).saturating_add(ahead_bytes);
            let gone = pages.drop_clean(&self.blocks(FileRange::with_len(offset, len_bytes)));
            drop(pages);
            drop(gone);
        }
        Read { len: done, error, met_error: careful_until.is_some() }
    }
}
