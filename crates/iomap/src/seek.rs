//! SEEK_DATA and SEEK_HOLE, exact to the block over what is mapped, dirty, or on its way.
//!
//! No range is locked: each step looks at one mapping and at the states under it at one moment.

use crate::address_space::OpenFile;
use crate::error::Error;
use crate::mapping::FileSystem;
use crate::offset::{FileOffset, FileRange};

impl<F: FileSystem> OpenFile<F> {
    /// The first byte of data at or after `offset`.
    ///
    /// # Errors
    /// [`Error::NoData`] if there is none, or what the filesystem said.
    pub fn seek_data(&self, offset: FileOffset) -> Result<FileOffset, F::Error> {
        let size = self.space.size();
        let _locked = self.lock_as_before(FileRange::new(offset, size));
        let mut at = offset;
        while at < size {
            let segment = self.segment(at, size, |at| self.mapping_for_seek(at))?;
            if segment.is_data() {
                return Ok(at);
            }
            at = segment.range.end;
            if segment.is_before_data {
                return Ok(at);
            }
        }
        Err(Error::NoData { offset }.into())
    }

    /// The first byte at or after `offset` that is in a hole; the end of the file is one.
    ///
    /// # Errors
    /// [`Error::NoData`] if `offset` is not in the file, or what the filesystem said.
    pub fn seek_hole(&self, offset: FileOffset) -> Result<FileOffset, F::Error> {
        let size = self.space.size();
        if offset >= size {
            return Err(Error::NoData { offset }.into());
        }
        let _locked = self.lock_as_before(FileRange::new(offset, size));
        let mut at = offset;
        while at < size {
            let segment = self.segment(at, size, |at| self.mapping_for_seek(at))?;
            if !segment.is_data() {
                return Ok(at);
            }
            at = segment.range.end;
        }
        Ok(size)
    }
}
