//! An open file, as the suite uses it.

use std::fmt::Debug;

use ubtrfs_iomap::extent_state::{ExtentStates, StateBits, Want};
use ubtrfs_iomap::{FiemapExtent, FiemapSync, FileOffset, FileRange, FileSystem, OpenFile, Reach};

/// What [`OpenFile`] does, for it and for what wraps it. Each is as there.
#[allow(missing_docs, reason = "as the methods of the same name")]
#[allow(clippy::missing_errors_doc, reason = "as the methods of the same name")]
pub trait DataFile: Send + Sync {
    type Error: Debug;

    fn size(&self) -> FileOffset;
    fn read(&self, offset: FileOffset, buffer: &mut [u8]) -> Result<usize, Self::Error>;
    fn write(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize, Self::Error>;
    fn append(&self, bytes: &[u8]) -> Result<(FileOffset, usize), Self::Error>;
    fn direct_read(&self, offset: FileOffset, buffer: &mut [u8]) -> Result<usize, Self::Error>;
    fn direct_write(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize, Self::Error>;
    fn truncate(&self, size: FileOffset) -> Result<(), Self::Error>;
    fn zero_range(&self, offset: FileOffset, len_bytes: u64) -> Result<(), Self::Error>;
    fn punch_hole(&self, offset: FileOffset, len_bytes: u64) -> Result<(), Self::Error>;
    fn allocate(&self, offset: FileOffset, len: u64, reach: Reach) -> Result<(), Self::Error>;
    fn allocate_zeroed(
        &self,
        offset: FileOffset,
        len: u64,
        reach: Reach,
    ) -> Result<(), Self::Error>;
    fn unshare(&self, offset: FileOffset, len_bytes: u64) -> Result<(), Self::Error>;
    fn seek_data(&self, offset: FileOffset) -> Result<FileOffset, Self::Error>;
    fn seek_hole(&self, offset: FileOffset) -> Result<FileOffset, Self::Error>;
    fn fiemap(
        &self,
        range: FileRange,
        extents_max: usize,
        sync: FiemapSync,
    ) -> Result<Vec<FiemapExtent>, Self::Error>;
    fn fsync(&self) -> Result<(), Self::Error>;
    fn take_error(&self) -> Result<(), Self::Error>;
    /// Writes back what is dirty, and waits; an error with which data was lost is kept for [`DataFile::fsync()`].
    ///
    /// # Errors
    /// One that passes: it is still dirty.
    fn flush(&self, range: FileRange) -> Result<(), Self::Error>;
    /// Bytes that writeback wrote of all files so far.
    fn written_back_bytes(&self) -> u64;
    /// Memory that all files are in.
    fn cached_bytes(&self) -> u64;
    /// Whether something of a range is on its way to the medium.
    fn is_on_its_way(&self, range: FileRange) -> bool;
    /// A load through a map of `range`.
    fn load(&self, range: FileRange, at: FileOffset, buffer: &mut [u8]) -> Result<(), Self::Error>;
    /// A store through a map of `range`.
    fn store(&self, range: FileRange, at: FileOffset, bytes: &[u8]) -> Result<(), Self::Error>;
    /// A fault for reading through a map of `range`.
    fn fault_for_read(&self, range: FileRange, at: FileOffset) -> Result<(), Self::Error>;
    /// A fault for writing through a map of `range`.
    fn fault_for_write(&self, range: FileRange, at: FileOffset) -> Result<(), Self::Error>;
    /// Makes `part` durable through a map of `range`.
    fn msync(&self, range: FileRange, part: FileRange) -> Result<(), Self::Error>;
}

impl<F: FileSystem> DataFile for OpenFile<F> {
    type Error = F::Error;

    fn size(&self) -> FileOffset {
        Self::size(self)
    }

    fn read(&self, offset: FileOffset, buffer: &mut [u8]) -> Result<usize, F::Error> {
        Self::read(self, offset, buffer)
    }

    fn write(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize, F::Error> {
        Self::write(self, offset, bytes)
    }

    fn append(&self, bytes: &[u8]) -> Result<(FileOffset, usize), F::Error> {
        Self::append(self, bytes)
    }

    fn direct_read(&self, offset: FileOffset, buffer: &mut [u8]) -> Result<usize, F::Error> {
        Self::direct_read(self, offset, buffer)
    }

    fn direct_write(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize, F::Error> {
        Self::direct_write(self, offset, bytes)
    }

    fn truncate(&self, size: FileOffset) -> Result<(), F::Error> {
        Self::truncate(self, size)
    }

    fn zero_range(&self, offset: FileOffset, len_bytes: u64) -> Result<(), F::Error> {
        Self::zero_range(self, offset, len_bytes)
    }

    fn punch_hole(&self, offset: FileOffset, len_bytes: u64) -> Result<(), F::Error> {
        Self::punch_hole(self, offset, len_bytes)
    }

    fn allocate(&self, offset: FileOffset, len: u64, reach: Reach) -> Result<(), F::Error> {
        Self::allocate(self, offset, len, reach)
    }

    fn allocate_zeroed(&self, offset: FileOffset, len: u64, reach: Reach) -> Result<(), F::Error> {
        Self::allocate_zeroed(self, offset, len, reach)
    }

    fn unshare(&self, offset: FileOffset, len_bytes: u64) -> Result<(), F::Error> {
        Self::unshare(self, offset, len_bytes)
    }

    fn seek_data(&self, offset: FileOffset) -> Result<FileOffset, F::Error> {
        Self::seek_data(self, offset)
    }

    fn seek_hole(&self, offset: FileOffset) -> Result<FileOffset, F::Error> {
        Self::seek_hole(self, offset)
    }

    fn fiemap(
        &self,
        range: FileRange,
        extents_max: usize,
        sync: FiemapSync,
    ) -> Result<Vec<FiemapExtent>, F::Error> {
        Self::fiemap(self, range, extents_max, sync)
    }

    fn fsync(&self) -> Result<(), F::Error> {
        Self::fsync(self)
    }

    fn take_error(&self) -> Result<(), F::Error> {
        Self::take_error(self)
    }

    fn flush(&self, range: FileRange) -> Result<(), F::Error> {
        self.space().flush(range)
    }

    fn written_back_bytes(&self) -> u64 {
        self.space().cache().counts().bytes_written
    }

    fn cached_bytes(&self) -> u64 {
        self.space().cache().cached_bytes()
    }

    fn is_on_its_way(&self, range: FileRange) -> bool {
        is_on_its_way(self.space().states(), range)
    }

    fn load(&self, range: FileRange, at: FileOffset, buffer: &mut [u8]) -> Result<(), F::Error> {
        self.map(range.start, range.len_bytes())?.load(at, buffer)
    }

    fn store(&self, range: FileRange, at: FileOffset, bytes: &[u8]) -> Result<(), F::Error> {
        self.map(range.start, range.len_bytes())?.store(at, bytes)
    }

    fn fault_for_read(&self, range: FileRange, at: FileOffset) -> Result<(), F::Error> {
        self.map(range.start, range.len_bytes())?.fault_for_read(at)
    }

    fn fault_for_write(&self, range: FileRange, at: FileOffset) -> Result<(), F::Error> {
        self.map(range.start, range.len_bytes())?.fault_for_write(at)
    }

    fn msync(&self, range: FileRange, part: FileRange) -> Result<(), F::Error> {
        self.map(range.start, range.len_bytes())?.msync(part)
    }
}

/// Whether something of a range is on its way to the medium, by a file's extent states.
pub fn is_on_its_way(states: &ExtentStates, range: FileRange) -> bool {
    states.test(range, Want::Any(StateBits::ORDERED))
}

/// All of a file.
///
/// # Panics
/// If it cannot be read.
pub fn contents(file: &impl DataFile) -> Vec<u8> {
    let len = usize::try_from(file.size().bytes()).expect("a file of a test fits into memory");
    let mut bytes = vec![0xEE; len];
    let count = file.read(FileOffset::ZERO, &mut bytes).expect("the file can be read");
    assert_eq!(count, bytes.len());
    bytes
}

/// What SEEK_DATA and SEEK_HOLE say is data.
///
/// # Panics
/// If SEEK_HOLE fails.
pub fn walk(file: &impl DataFile) -> Vec<FileRange> {
    let mut found = Vec::new();
    let mut from = FileOffset::ZERO;
    while let Ok(start) = file.seek_data(from) {
        from = file.seek_hole(start).expect("data ends somewhere");
        found.push(FileRange::new(start, from));
    }
    found
}
