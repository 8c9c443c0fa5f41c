//! Access to a file as memory, without a memory map: what a fault would do is a call.
//!
//! A store may go to any byte of the file's last block, also beyond the file's end. There it is seen by loads, and by nobody
//! else: it is zeroed when the block is written back, and before the file grows over it.

use crate::address_space::{AddressSpace, OpenFile, Reach};
use crate::buffered_read::{End, Misses};
use crate::error::Error;
use crate::extent_state::{LockMode, LockedRange};
use crate::mapping::FileSystem;
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::Source;

/// A range of an open file that is accessed as memory, shared with all who have the file open.
#[derive(Debug)]
pub struct MappedRange<'a, F: FileSystem> {
    file: &'a OpenFile<F>,
    range: FileRange,
}

impl<F: FileSystem> OpenFile<F> {
    /// Maps whole blocks, which may lie beyond the end of the file as long as they are not touched.
    ///
    /// # Errors
    /// [`Error::Unaligned`] if `offset` is not that of a block, [`Error::TooLarge`].
    pub fn map(&self, offset: FileOffset, len_bytes: u64) -> Result<MappedRange<'_, F>, F::Error> {
        let block_bytes = self.space.block_bytes;
        if !offset.bytes().is_multiple_of(block_bytes) {
            return Err(Error::Unaligned { offset, len_bytes, block_bytes }.into());
        }
        let range = AddressSpace::<F>::checked_range(offset, len_bytes)?;
        Ok(MappedRange { file: self, range: range.round_out(block_bytes) })
    }
}

impl<F: FileSystem> MappedRange<'_, F> {
    /// The range, in whole blocks.
    pub fn range(&self) -> FileRange {
        self.range
    }

    /// Faults for reading only: the block that holds `at` is read into memory, so that a load need not wait until it is
    /// reclaimed. Where the cache keeps nothing clean it only says whether the block can be read.
    ///
    /// # Errors
    /// As [`MappedRange::load()`].
    pub fn fault_for_read(&self, at: FileOffset) -> Result<(), F::Error> {
        let (range, _locked) = self.lock(at, 1, LockMode::Shared)?;
        let space = &self.file.space;
        let blocks = space.blocks(range);
        let mut pages = space.pages.lock();
        while let Some(missing) = pages.missing(blocks.clone()) {
            pages = space.fill(pages, missing)?;
        }
        if !space.cache.options().keeps_clean {
            pages.drop_clean(&blocks);
        }
        Ok(())
    }

    /// Faults for reading, and reads: fills the buffer from `at`, an offset in the file.
    ///
    /// # Errors
    /// [`Error::BeyondEnd`] if a block lies outside of the range or wholly beyond the end of the file, or what the
    /// filesystem said.
    pub fn load(&self, at: FileOffset, buffer: &mut [u8]) -> Result<(), F::Error> {
        let (range, _locked) = self.lock(at, buffer.len(), LockMode::Shared)?;
        let misses = Misses::Cached { ahead_bytes: 0 };
        let (len, _) = self.file.space.read_range(at, buffer, misses, End::LastBlock);
        let len = len?;
        debug_assert_eq!(len, buffer.len(), "{range} lies in the file's blocks");
        Ok(())
    }

    /// Faults for writing, and writes. In memory only: [`MappedRange::msync()`] makes it durable. The file's size stays.
    ///
    /// # Errors
    /// As [`MappedRange::load()`], and if there is no space; then a part may be written.
    pub fn store(&self, at: FileOffset, bytes: &[u8]) -> Result<(), F::Error> {
        let (range, _locked) = self.lock(at, bytes.len(), LockMode::Exclusive)?;
        let space = &self.file.space;
        space.write_range(range, Source::Bytes(bytes), Reach::Stays).map_err(|(_, error)| error)
    }

    /// Faults for writing only: space is reserved for the block that holds `at`, and it is dirty.
    ///
    /// # Errors
    /// As [`MappedRange::store()`].
    pub fn fault_for_write(&self, at: FileOffset) -> Result<(), F::Error> {
        let (range, _locked) = self.lock(at, 1, LockMode::Exclusive)?;
        let space = &self.file.space;
        let block = range.round_out(space.block_bytes);
        space.write_range(block, Source::Same, Reach::Stays).map_err(|(_, error)| error)
    }

    /// Makes a part of the range durable, with what the file has before it, as [`OpenFile::fsync()`]: the file on the medium ends
    /// where the part does, or further, and what it shows below that is what was written.
    ///
    /// # Errors
    /// As there.
    pub fn msync(&self, range: FileRange) -> Result<(), F::Error> {
        let space = &self.file.space;
        let upto = range.intersection(self.range).end;
        // What others write behind the end from now on may not be on the medium.
        let size = space.size().min(upto);
        let flushed = space.flush(FileRange::new(FileOffset::ZERO, upto));
        let synced = flushed.and_then(|()| space.filesystem.sync(&space.inode, size));
        self.file.take_error()?;
        synced
    }

    /// Locks the blocks of an access, which all hold a byte of the file.
    fn lock(
        &self,
        at: FileOffset,
        len: usize,
        mode: LockMode,
    ) -> Result<(FileRange, LockedRange<'_>), F::Error> {
        let len_bytes = u64::try_from(len).unwrap_or(u64::MAX);
        let range = AddressSpace::<F>::checked_range(at, len_bytes)?;
        let space = &self.file.space;
        let locked = space.states.lock(range.round_out(space.block_bytes), mode);
        // The end does not go below the blocks as long as they are locked.
        let size = space.size();
        let upto = size.round_up(space.block_bytes).min(self.range.end);
        if range.start < self.range.start || range.end > upto {
            return Err(Error::BeyondEnd { offset: at, size }.into());
        }
        Ok((range, locked))
    }
}
