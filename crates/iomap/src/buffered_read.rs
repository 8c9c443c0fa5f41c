//! Reading through the page cache.

use crate::address_space::{AddressSpace, OpenFile};
use crate::extent_state::LockMode;
use crate::mapping::FileSystem;
use crate::offset::{FileOffset, FileRange};

/// How much is copied before others have their turn at the pages.
const COPY_STEP_BYTES: usize = 256 * 1024;

/// The most that one miss reads.
const FILL_BYTES_MAX: u64 = 4 << 20;

/// Where a read ends at the latest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// Where the file does.
    File,
    /// Where the last block of the file does.
    LastBlock,
}

impl<F: FileSystem> OpenFile<F> {
    /// Reads from `offset` on, up to the end of the file or of the buffer; returns how many bytes. What another call writes
    /// meanwhile is read in whole or not at all.
    ///
    /// # Errors
    /// What the filesystem said when data could not be read.
    pub fn read(&self, offset: FileOffset, buffer: &mut [u8]) -> Result<usize, F::Error> {
        let len_bytes = u64::try_from(buffer.len()).unwrap_or(u64::MAX);
        let range = FileRange::with_len(offset, len_bytes);
        let options = self.space.cache.options();
        // What is read ahead would go at once where nothing clean is kept.
        let window_max = if options.keeps_clean { options.readahead_bytes_max } else { 0 };
        let ahead_bytes =
            self.readahead.lock().read(range.start.bytes(), range.end.bytes(), window_max);
        let whole = range.round_out(self.space.block_bytes);
        let _locked = self.space.states.lock(whole, LockMode::Shared);
        self.space.read_range(offset, buffer, ahead_bytes, End::File)
    }
}

impl<F: FileSystem> AddressSpace<F> {
    /// Reads from `offset` on, where the caller has the range locked.
    pub(crate) fn read_range(
        &self,
        offset: FileOffset,
        buffer: &mut [u8],
        ahead_bytes: u64,
        limit: End,
    ) -> Result<usize, F::Error> {
        let mut done = 0;
        let mut pages = self.pages.lock();
        loop {
            let size = match limit {
                End::File => self.size(),
                End::LastBlock => self.size().round_up(self.block_bytes),
            };
            let left = FileRange::with_len(offset, u64::try_from(buffer.len()).unwrap_or(u64::MAX));
            let at = offset.saturating_add(u64::try_from(done).unwrap_or(u64::MAX));
            let rest = FileRange::new(at, left.end.min(size));
            if rest.is_empty() {
                break;
            }
            let len = usize::try_from(rest.len_bytes()).unwrap_or(usize::MAX).min(COPY_STEP_BYTES);
            let copied = pages.copy_out(at.bytes(), &mut buffer[done..done + len]);
            done += copied;
            if copied > 0 {
                if copied == COPY_STEP_BYTES {
                    ubtrfs_rt::MutexGuard::bump(&mut pages);
                }
                continue;
            }
            let ahead = rest.end.saturating_add(ahead_bytes).min(size);
            let upto = ahead.min(at.saturating_add(FILL_BYTES_MAX));
            let Some(missing) = pages.missing(self.blocks(FileRange::new(at, upto))) else {
                continue;
            };
            pages = self.fill(pages, missing)?;
        }
        if !self.cache.options().keeps_clean {
            pages.drop_clean(&self.blocks(FileRange::with_len(
                offset,
                u64::try_from(done).unwrap_or(u64::MAX).saturating_add(ahead_bytes),
            )));
        }
        Ok(done)
    }
}
