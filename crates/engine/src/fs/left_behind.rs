//! Data behind the end of a file, which another driver left there.
//!
//! Without the feature NO_HOLES Linux lets a file end on the medium no further than its extents go on from the beginning. What was
//! written further on, and arrived, lies behind the end after a power cut. It is no part of the file: when that grows, there are zeros. So
//! it is dropped before the file is changed. What is preallocated stays, as in Linux. The engine leaves nothing there: what it enters of a
//! file it enters together with where that ends.

use std::sync::atomic::Ordering;

use ubtrfs_ondisk::FileOffset;

use super::file_io::IoInode;
use super::write::Locked;
use crate::data::drop_range::{self, drop_range};
use crate::data::file_extent::MappingKind;
use crate::error::Result;
use crate::filesystem::Filesystem;
use crate::txn::Reservation;

impl Filesystem {
    /// Drops it of an open file that is about to be changed, once.
    pub(super) fn drop_left_behind(&self, io: &IoInode) -> Result<()> {
        if io.has_nothing_behind.load(Ordering::Acquire) {
            return Ok(());
        }
        let _lock = self.inner.files.lock_data(io.id);
        Locked::of_open(self, io.id)?.drop_left_behind()?;
        io.has_nothing_behind.store(true, Ordering::Release);
        Ok(())
    }
}

impl Locked<'_> {
    /// Drops it of a file that is about to be changed.
    pub(super) fn drop_left_behind(&mut self) -> Result<()> {
        let kept = std::mem::replace(&mut self.keeps_times, true);
        let dropped = self.drop_behind(self.inode.size_bytes.next_multiple_of(self.sector));
        self.keeps_times = kept;
        dropped
    }

    fn drop_behind(&self, start: u64) -> Result<()> {
        let (fs, id) = (self.fs, self.inode.id);
        if self.no_holes() || drop_range::extents_end(&fs.inner.core, &self.target)? <= start {
            return Ok(());
        }
        let mut at = start;
        loop {
            let mut mappings = fs.file_extents(id, FileOffset(at))?;
            let data = mappings.find(|mapping| match mapping {
                Ok(mapping) => mapping.kind == MappingKind::Data,
                Err(_) => true,
            });
            let Some(data) = data.transpose()? else { return Ok(()) };
            let range = data.offset.0.max(start)..data.end().0;
            let reservation = Reservation::removals(3).and(Reservation::removals(1));
            let mut handle = fs.begin_step(reservation)?;
            handle.check_file(id)?;
            let _change = self.change();
            let kept = fs.inner.files.kept();
            let lost = drop_range(&mut handle.txn, &self.target, &range, kept)?;
            self.count(&mut handle, 0, lost, self.inode.size_bytes)?;
            at = range.end;
        }
    }
}
