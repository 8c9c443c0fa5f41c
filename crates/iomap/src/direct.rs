//! I/O past the page cache, in whole blocks.

use crate::address_space::{AddressSpace, OpenFile};
use crate::extent_state::LockMode;
use crate::iter::MappingIter;
use crate::mapping::{FileSystem, Purpose, ReadPiece, WritebackRun};
use crate::offset::{FileOffset, FileRange};

fn bytes_of(buffer: &[u8]) -> u64 {
    u64::try_from(buffer.len()).unwrap_or(u64::MAX)
}

impl<F: FileSystem> OpenFile<F> {
    /// Reads as [`OpenFile::read()`], but from the device: what is dirty in the range is brought there first. What is not whole
    /// blocks is read through memory, as by Linux's btrfs.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`], or what the filesystem said: also where what was dirty was lost on its way, which the next fsync
    /// tells, too.
    pub fn direct_read(&self, offset: FileOffset, buffer: &mut [u8]) -> Result<usize, F::Error> {
        let range = AddressSpace::<F>::io_range(offset, bytes_of(buffer))?;
        if !self.space.is_aligned(range) {
            return self.read(offset, buffer);
        }
        let _locked = self.space.states.lock(range, LockMode::Shared);
        let in_file = FileRange::new(offset, range.end.min(self.space.size()));
        let whole = in_file.round_out(self.space.block_bytes).intersection(range);
        self.space.flush_told(whole)?;
        let whole_len = usize::try_from(whole.len_bytes()).unwrap_or(buffer.len());
        self.space.read_device(whole, &mut buffer[..whole_len])?;
        Ok(usize::try_from(in_file.len_bytes()).unwrap_or(whole_len))
    }

    /// Writes to the device; the page cache forgets the range. Returns how many bytes, in whole blocks: fewer than given where there
    /// is no space for the rest, or it cannot be written; the file then ends no further than what was. What is not whole blocks goes
    /// through memory to the device, as by Linux's btrfs; where it cannot be stored yet it stays dirty, as what any write leaves.
    /// Durable with [`OpenFile::fsync()`].
    ///
    /// # Errors
    /// If nothing was written: [`crate::Error::Invalid`], or what the filesystem said. And where what went through memory was lost on its
    /// way to the device, whatever else was written; the next fsync tells that, too.
    pub fn direct_write(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize, F::Error> {
        let range = AddressSpace::<F>::io_range(offset, bytes_of(bytes))?;
        if range.is_empty() {
            return Ok(0);
        }
        if !self.space.is_aligned(range) {
            let before = self.space.errors_so_far();
            let done = self.write(offset, bytes)?;
            let written = FileRange::with_len(offset, bytes_of(&bytes[..done]));
            self.space.flush_written(written, before)?;
            return Ok(done);
        }
        let space = &*self.space;
        let _locked = space.lock_for_write(range);
        space.zero_old_tail(range.start)?;
        // What is lost here is overwritten, so the next fsync tells it and the write goes on: as Linux since 6.6, which then writes through
        // memory. Of what stays dirty instead it is told here.
        space.flush(range)?;
        let write = |run: &WritebackRun<'_>| space.filesystem.write_direct(&space.inode, run);
        let done_bytes = space.write_device(range, bytes, write)?;
        Ok(usize::try_from(done_bytes).unwrap_or(bytes.len()))
    }
}

impl<F: FileSystem> AddressSpace<F> {
    fn is_aligned(&self, range: FileRange) -> bool {
        range == range.round_out(self.block_bytes)
    }

    /// Writes whole blocks, of which nothing is dirty, to the device; the caller has them locked, and the end of the file where they
    /// lie beyond it. Returns how many bytes of their front `write` wrote.
    pub(crate) fn write_device(
        &self,
        range: FileRange,
        bytes: &[u8],
        write: impl FnOnce(&WritebackRun<'_>) -> Result<u64, F::Error>,
    ) -> Result<u64, F::Error> {
        self.flush_old_tail(range.end)?;
        let size = self.size().max(range.end);
        let run = WritebackRun { range, buffers: &[bytes], size };
        let change = || write(&run).map(|done_bytes| done_bytes.min(range.len_bytes()));
        self.replace_growing(range, change, |done_bytes| {
            Some(range.start.saturating_add(*done_bytes))
        })
    }

    /// Reads what mappings say. Mappings that changed while they were read are read again.
    fn read_device(&self, range: FileRange, buffer: &mut [u8]) -> Result<(), F::Error> {
        let mut iter = MappingIter::new(self, range);
        while let Some((mapping, part)) = iter.next(Purpose::Read)? {
            let from = usize::try_from(part.start.bytes_since(range.start)).unwrap_or(usize::MAX);
            let len = usize::try_from(part.len_bytes()).unwrap_or(usize::MAX);
            let bytes = &mut buffer[from..from + len];
            let result = if mapping.kind.is_zeros() {
                bytes.fill(0);
                Ok(())
            } else {
                let piece = ReadPiece { mapping, start: part.start, buffers: vec![bytes] };
                self.filesystem.read(&self.inode, &mut [piece])
            };
            if !self.is_current(mapping.cookie) {
                let now = iter.next(Purpose::Read)?;
                if !now.is_some_and(|(now, _)| now.is_same_in(&mapping, part)) {
                    continue;
                }
            }
            result?;
            iter.advance_to(part.end);
        }
        Ok(())
    }
}
