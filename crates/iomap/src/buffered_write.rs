//! Writing through the page cache.

use crate::address_space::{AddressSpace, OpenFile, Reach};
use crate::error::Error;
use crate::extent_state::{LockMode, LockedRange};
use crate::mapping::FileSystem;
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::Source;

impl<F: FileSystem> OpenFile<F> {
    /// Writes at `offset`; returns how many bytes, fewer than given where the filesystem refused the rest. [`OpenFile::fsync()`] makes it durable: it is in memory only, or, if it is long and makes a long file longer, on the device,
    /// but not safe there.
    ///
    /// # Errors
    /// If nothing was written: what the filesystem said, or [`Error::Invalid`].
    pub fn write(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize, F::Error> {
        let len_bytes = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let range = AddressSpace::<F>::io_range(offset, len_bytes)?;
        if range.is_empty() {
            return Ok(0);
        }
        let _locked = self.space.lock_for_write(range);
        self.space.write_locked(range, bytes)
    }

    /// As [`OpenFile::write()`], but changes no byte that the file has: `None`, and nothing is written, if it reaches beyond `offset`.
    ///
    /// # Errors
    /// As there.
    pub fn write_behind(
        &self,
        offset: FileOffset,
        bytes: &[u8],
    ) -> Result<Option<usize>, F::Error> {
        let len_bytes = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let range = AddressSpace::<F>::io_range(offset, len_bytes)?;
        let _locked = self.space.lock_for_write(range);
        // All behind the end is locked, if the range reaches there: it stays where it is.
        if self.space.size() > offset {
            return Ok(None);
        }
        if range.is_empty() { Ok(Some(0)) } else { self.space.write_locked(range, bytes).map(Some) }
    }

    /// Writes where the file ends; returns where that was, and how many bytes, as [`OpenFile::write()`], or as far as a file can
    /// reach.
    ///
    /// # Errors
    /// If nothing was written: what the filesystem said, or [`Error::TooLarge`].
    pub fn append(&self, bytes: &[u8]) -> Result<(FileOffset, usize), F::Error> {
        let _locked = self.space.lock_end();
        let offset = self.space.size();
        if bytes.is_empty() {
            return Ok((offset, 0));
        }
        let len_bytes = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.space.check_append(len_bytes)?;
        let range = FileRange::with_len(offset, len_bytes);
        self.space.write_locked(range, bytes).map(|len| (offset, len))
    }
}

impl<F: FileSystem> AddressSpace<F> {
    /// Whether [`OpenFile::append()`] would be refused now; for who notes a change before it makes it. It changes nothing where there is
    /// nothing to append.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn check_append(&self, len_bytes: u64) -> Result<(), F::Error> {
        let offset = self.size();
        let is_full = len_bytes > 0 && offset == FileOffset::MAX;
        if is_full { Err(Error::TooLarge { offset, len_bytes }.into()) } else { Ok(()) }
    }

    /// Locks everything from the end of the file on.
    fn lock_end(&self) -> LockedRange<'_> {
        loop {
            let size = self.size();
            let wanted = FileRange::from(size.round_down(self.block_bytes));
            let locked = self.states.lock(wanted, LockMode::Exclusive);
            if self.size() == size {
                return locked;
            }
        }
    }

    fn write_locked(&self, range: FileRange, bytes: &[u8]) -> Result<usize, F::Error> {
        self.zero_old_tail(range.start)?;
        let len = usize::try_from(range.len_bytes()).unwrap_or(bytes.len());
        let straight = self.straight_writes(range);
        let mut done = 0;
        while done < len {
            let rest = FileRange::new(range.start.saturating_add(done as u64), range.end);
            done += self.write_straight(rest, &bytes[done..len], straight);
            if done == len {
                break;
            }
            let rest = FileRange::new(range.start.saturating_add(done as u64), range.end);
            let part = self.memory_step(rest, straight);
            let part_len = usize::try_from(part.len_bytes()).unwrap_or(len - done);
            let source = Source::Bytes(&bytes[done..done + part_len]);
            match self.write_range(part, source, Reach::Extends) {
                Ok(()) => done += part_len,
                Err((0, error)) if done == 0 => return Err(error),
                Err((done_bytes, _)) => {
                    return Ok(done + usize::try_from(done_bytes).unwrap_or(part_len));
                }
            }
        }
        Ok(len)
    }

    /// The file will grow so that it holds `offset`: what its last block has behind its end becomes part of it, and must be
    /// zero.
    pub(crate) fn zero_old_tail(&self, offset: FileOffset) -> Result<(), F::Error> {
        let size = self.size();
        let tail = FileRange::new(size, size.round_up(self.block_bytes).min(offset));
        if tail.is_empty() { Ok(()) } else { self.zero_locked(tail) }
    }
}
