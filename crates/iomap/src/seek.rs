//! SEEK_DATA and SEEK_HOLE, exact to the block over what is mapped, dirty, or on its way.
//!
//! No range is locked: each step looks at what the filesystem said and at the states under it, at one moment. Threads that
//! share an open file share its window; who finds it taken asks for himself.
//!
//! What each seek goes through is inlined by order: left to the compiler it was calls in some builds, a third more for a seek.

use crate::address_space::OpenFile;
use crate::error::Error;
use crate::mapping::{Detail, FileSystem};
use crate::offset::{FileOffset, FileRange};
use crate::report::{Behind, Piece};
use crate::seek_window::SeekWindow;

impl<F: FileSystem> OpenFile<F> {
    /// The first byte of data at or after `offset`. There is none at one that is negative to Linux, beyond [`FileOffset::MAX`]: so say ext4
    /// and xfs, too, while Linux's btrfs begins at the beginning of the file then, as does the server of a mount.
    ///
    /// # Errors
    /// [`Error::NoData`] if there is none, or what the filesystem said.
    pub fn seek_data(&self, offset: FileOffset) -> Result<FileOffset, F::Error> {
        let size = self.space.size();
        let _locked = self.lock_as_before(FileRange::new(offset, size));
        self.with_seek_window(|window| {
            let mut at = offset;
            while at < size {
                let segment = self.segment(at, size, |at| self.piece_at(window, at, size))?;
                if segment.is_data() {
                    return Ok(at);
                }
                at = segment.range.end;
                if segment.behind == Behind::Data {
                    return Ok(at);
                }
            }
            Err(Error::NoData { offset }.into())
        })
    }

    /// The first byte at or after `offset` that is in a hole; the end of the file is one. Offsets that are negative to Linux are as with
    /// [`OpenFile::seek_data()`].
    ///
    /// # Errors
    /// [`Error::NoData`] if `offset` is not in the file, or what the filesystem said.
    pub fn seek_hole(&self, offset: FileOffset) -> Result<FileOffset, F::Error> {
        let size = self.space.size();
        if offset >= size {
            return Err(Error::NoData { offset }.into());
        }
        let _locked = self.lock_as_before(FileRange::new(offset, size));
        self.with_seek_window(|window| {
            let mut at = offset;
            while at < size {
                let segment = self.segment(at, size, |at| self.piece_at(window, at, size))?;
                if !segment.is_data() {
                    return Ok(at);
                }
                at = segment.range.end;
                if segment.behind == Behind::Zeros {
                    return Ok(at);
                }
            }
            Ok(size)
        })
    }

    #[inline(always)]
    fn with_seek_window<T>(&self, seek: impl FnOnce(&mut SeekWindow) -> T) -> T {
        match self.seek_window.try_lock() {
            Some(mut window) => seek(&mut window),
            None => seek(&mut SeekWindow::default()),
        }
    }

    /// What the filesystem says of a place: it said so before, and it is current, or it is asked, for what lies in front of `end`.
    #[inline(always)]
    fn piece_at(
        &self,
        window: &mut SeekWindow,
        at: FileOffset,
        end: FileOffset,
    ) -> Result<Piece<()>, F::Error> {
        match window.find(at) {
            Some(piece) if self.space.is_current(piece.cookie) => Ok(piece),
            _ => self.asked_piece_at(window, at, end),
        }
    }

    #[cold]
    #[inline(never)]
    fn asked_piece_at(
        &self,
        window: &mut SeekWindow,
        at: FileOffset,
        end: FileOffset,
    ) -> Result<Piece<()>, F::Error> {
        let range = FileRange::new(at, end);
        window.refill(at, |count_max, mappings| {
            self.space.ask_ahead(range, Detail::Contents, count_max, mappings)
        })?;
        Ok(window.find(at).expect("the mapping asked for holds the place"))
    }
}
