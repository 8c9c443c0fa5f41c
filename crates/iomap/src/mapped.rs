//! Access to a file as memory, without a memory map: what a fault would do is a call.
//!
//! A store may go to any byte of the file's last block, also beyond the file's end. There it is seen by loads, and by nobody
//! else: it is zeroed when the block is written back, and before the file grows over it.
//!
//! # Maps of who embeds this, and of the kernel
//!
//! Nothing here gives out addresses: no page is shared, and bytes are copied by [`MappedRange::load()`] and [`MappedRange::store()`].
//! Who shows a file to a program as memory (a user-space pager, a virtual machine's monitor, an interpreter) keeps pages of
//! his own and calls:
//!
//! | what happens to his page | call |
//! |---|---|
//! | it is touched for the first time | [`MappedRange::load()`] of its blocks |
//! | it is stored to for the first time since it was clean | [`MappedRange::fault_for_write()`] of each of its blocks: that there is no space is said here, and what was reserved is kept until the block is written back |
//! | what was stored goes to the file | [`MappedRange::store()`], of no more than what was stored |
//! | somebody asks for it to be durable | the stores, then [`MappedRange::msync()`] |
//!
//! - Stores are in memory only, as those of [`OpenFile::write()`]: writeback brings them to the medium, with age, for want of memory or
//!   by any flush, and an error of it is told by the next msync or fsync. `munmap` has no call: what was stored stays.
//! - [`MappedRange::msync()`] makes durable all that the file has from its beginning to the end of the part, and that it ends there or
//!   further on: more than POSIX asks for, as a length that is durable must not show what is not. MS_ASYNC has no call either.
//! - A load, store or fault of a block that lies wholly beyond the end of the file, or outside of the range, is [`Error::BeyondEnd`], and
//!   changes nothing: where Linux sends SIGBUS. The rest of the last block is there, and reads as zeros until something is stored there.
//! - Each call is atomic to all reads and writes, as those are to each other: none sees a store in part. Of what lies in pages of somebody
//!   else nothing is known here: whoever truncates, punches, clones or deduplicates has to have them stored before, and loaded again after.
//!   No call comes back from here to say that a block was changed, or that one was written back, which may be at any time. What is stored behind that
//!   has nothing reserved: the store reserves it, and may be told that there is no space. To be sure of it first, fault for writing again.
//! - A private map is the embedder's: he loads, and stores nothing.
//!
//! Over FUSE nothing of this is called. The kernel's page cache is the map: a fault for reading is a READ request, answered by
//! [`OpenFile::read_whole()`]; a fault for writing asks nobody; and what was stored comes as WRITE requests of whole pages, cut at the
//! end of the file, with the flag WRITE_CACHE (as all writes do with `-o writeback`), when the kernel writes its dirty pages back, which go to
//! [`OpenFile::write()`] (`DataFile::write_cached()` of the engine). So there is no space reserved for a store to such a map before it is written back, msync(2) is those
//! requests and then FSYNC, SIGBUS is the kernel's to send, and what it keeps behind the end of the file the server has it clear
//! (docs/adr/0003-own-fuse-protocol.md).

use crate::address_space::{AddressSpace, OpenFile, Reach};
use crate::buffered_read::{End, Misses};
use crate::error::Error;
use crate::extent_state::{LockMode, LockedRange};
use crate::mapping::FileSystem;
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::Source;

/// A range of an open file that is accessed as memory, shared with all who have the file open. What who shows it to programs as a memory map
/// calls, and when, is told at the head of `mapped.rs`.
#[derive(Debug)]
pub struct MappedRange<'a, F: FileSystem> {
    file: &'a OpenFile<F>,
    range: FileRange,
}

impl<F: FileSystem> OpenFile<F> {
    /// Maps whole blocks, which may lie beyond the end of the file as long as they are not touched.
    ///
    /// # Errors
    /// [`Error::Unaligned`] if `offset` is not that of a block, [`Error::Invalid`] of no bytes, as mmap(2) has it; [`Error::TooLarge`],
    /// where that says EOVERFLOW.
    pub fn map(&self, offset: FileOffset, len_bytes: u64) -> Result<MappedRange<'_, F>, F::Error> {
        let block_bytes = self.space.block_bytes;
        if !offset.bytes().is_multiple_of(block_bytes) {
            return Err(Error::Unaligned { offset, len_bytes, block_bytes }.into());
        }
        if len_bytes == 0 {
            return Err(Error::Invalid { offset, len_bytes }.into());
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
        pages.note_wanted(&blocks);
        if !space.cache.options().keeps_clean {
            let gone = pages.drop_clean(&blocks);
            drop(pages);
            drop(gone);
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
        let len = self.file.space.read_range(at, buffer, misses, End::LastBlock, false).whole()?;
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
    /// where the part does, or further, and what it shows below that is what was written. What lies outside of the map does not count.
    ///
    /// # Errors
    /// As there.
    pub fn msync(&self, range: FileRange) -> Result<(), F::Error> {
        let upto = range.intersection(self.range).end;
        let synced = self.file.space.make_durable(upto);
        self.file.take_error()?;
        synced
    }

    /// Whether a load or a store would be refused now, as not all of its blocks hold a byte of the file; for who notes a change before he
    /// makes it.
    ///
    /// # Errors
    /// [`Error::BeyondEnd`].
    pub fn check(&self, at: FileOffset, len: usize) -> Result<(), F::Error> {
        self.check_range(self.access(at, len)?)
    }

    fn access(&self, at: FileOffset, len: usize) -> Result<FileRange, F::Error> {
        let len_bytes = u64::try_from(len).unwrap_or(u64::MAX);
        let beyond = |_| Error::BeyondEnd { offset: at, size: self.file.space.size() };
        Ok(AddressSpace::<F>::checked_range(at, len_bytes).map_err(beyond)?)
    }

    fn check_range(&self, range: FileRange) -> Result<(), F::Error> {
        let space = &self.file.space;
        let size = space.size();
        let upto = size.round_up(space.block_bytes).min(self.range.end);
        if range.start < self.range.start || range.end > upto {
            return Err(Error::BeyondEnd { offset: range.start, size }.into());
        }
        Ok(())
    }

    /// Locks the blocks of an access, which all hold a byte of the file.
    fn lock(
        &self,
        at: FileOffset,
        len: usize,
        mode: LockMode,
    ) -> Result<(FileRange, LockedRange<'_>), F::Error> {
        let range = self.access(at, len)?;
        let space = &self.file.space;
        let locked = space.states.lock(range.round_out(space.block_bytes), mode);
        // The end does not go below the blocks as long as they are locked.
        self.check_range(range)?;
        Ok((range, locked))
    }
}
