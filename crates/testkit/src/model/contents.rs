//! Operations on what files hold. Each first refuses, in the order in which the engine does, and
//! then changes.
//!
//! What the engine does in several steps can stop, or be made durable, between two of them:
//! [`Progress`] names the states that are then there, and the `_until` form of each operation makes
//! them.

use std::ops::Range;

use ubtrfs_ondisk::inode::flags;

use super::names::Growth;
use super::{Content, Id, Model, Refusal, Result, SparseBytes};

/// Bytes of the longest file.
const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// Bytes at an offset of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Where they begin.
    pub offset: u64,
    /// They.
    pub bytes: Vec<u8>,
}

/// How far an operation of several steps came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Only the file's times are new: its data moved from the tree to space of its own.
    Begun,
    /// The file is as it will be up to that offset, and behind it as it was; of one that is being
    /// cut off, that is where it ends now.
    UpTo(u64),
}

/// A part of one file, and a place in another or the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Copied {
    /// The file that is read.
    pub source: Id,
    /// What of it; the end may lie behind the file's.
    pub range: Range<u64>,
    /// The file that is changed.
    pub target: Id,
    /// Where.
    pub target_offset: u64,
}

impl Copied {
    fn overlaps(&self) -> bool {
        let len = self.range.end.saturating_sub(self.range.start);
        let target_end = self.target_offset.saturating_add(len);
        self.source == self.target
            && self.target_offset < self.range.end
            && self.range.start < target_end
    }
}

impl Model {
    /// Appends pieces to a file, which then ends at `size_bytes`. The times stay.
    ///
    /// # Errors
    /// As the engine's.
    pub fn append(&mut self, id: Id, pieces: &[Piece], size_bytes: u64) -> Result<()> {
        self.writable(id.root)?;
        let sector_bytes = self.limits.sector_bytes;
        let bytes = self.file(id)?;
        self.permitted(id, Growth::Allowed)?;
        if !bytes.len_bytes().is_multiple_of(sector_bytes) {
            return Err(Refusal::Unsupported);
        }
        let mut end = bytes.len_bytes();
        for piece in pieces {
            if !piece.offset.is_multiple_of(sector_bytes) || piece.offset < end {
                return Err(Refusal::InvalidArgument);
            }
            end = piece.offset + len_of(&piece.bytes);
        }
        if size_bytes < end {
            return Err(Refusal::InvalidArgument);
        }
        let bytes = self.bytes_mut(id);
        for piece in pieces {
            bytes.write(piece.offset, &piece.bytes);
        }
        bytes.resize(size_bytes);
        Ok(())
    }

    /// Writes bytes into a file, over what is there, behind its end with zeros between.
    ///
    /// # Errors
    /// As the engine's.
    pub fn write(&mut self, id: Id, offset: u64, bytes: &[u8]) -> Result<()> {
        let size_bytes = self.changeable(id)?;
        self.appends(id, offset, size_bytes)?;
        let end = end_of(offset, len_of(bytes))?;
        if !bytes.is_empty() {
            self.write_until(id, offset, bytes, Progress::UpTo(end));
        }
        Ok(())
    }

    /// What [`Model::write`] leaves that came so far. The file was found before.
    pub fn write_until(&mut self, id: Id, offset: u64, bytes: &[u8], progress: Progress) {
        if let Progress::UpTo(end) = progress {
            let count = usize::try_from(end - offset).expect("bytes in memory");
            self.bytes_mut(id).write(offset, &bytes[..count]);
        }
        self.contents_changed(id);
    }

    /// Cuts a file off, or lets it end with zeros.
    ///
    /// # Errors
    /// As the engine's.
    pub fn truncate(&mut self, id: Id, size_bytes: u64) -> Result<()> {
        self.changeable(id)?;
        self.permitted(id, Growth::Forbidden)?;
        end_of(size_bytes, 0)?;
        self.truncate_until(id, Progress::UpTo(size_bytes));
        Ok(())
    }

    /// What [`Model::truncate`] leaves that came so far. The file was found before.
    pub fn truncate_until(&mut self, id: Id, progress: Progress) {
        if let Progress::UpTo(end) = progress {
            self.bytes_mut(id).resize(end);
        }
        self.contents_changed(id);
    }

    /// Lets a file have what another has in a range: whole sectors, or up to the ends of both.
    ///
    /// # Errors
    /// As the engine's.
    pub fn clone_range(&mut self, copied: &Copied) -> Result<()> {
        self.check_clone(copied)?;
        self.appends(copied.target, copied.target_offset, self.file_len(copied.target)?)?;
        let len = copied.range.end - copied.range.start;
        self.copy_until(copied, Progress::UpTo(copied.target_offset + len));
        Ok(())
    }

    /// As [`Model::clone_range`], where both have the same bytes already. Returns whether they do.
    /// Nothing of it is seen: times stay, as in Linux.
    ///
    /// # Errors
    /// As the engine's.
    pub fn dedupe_range(&self, copied: &Copied) -> Result<bool> {
        self.check_clone(copied)?;
        self.permitted(copied.target, Growth::Forbidden)?;
        let len = copied.range.end - copied.range.start;
        if copied.target_offset + len > self.file_len(copied.target)? {
            return Ok(false);
        }
        let count = usize::try_from(len).expect("a file in memory");
        let (mut ours, mut theirs) = (vec![0; count], vec![0; count]);
        self.file(copied.source)?.read(copied.range.start, &mut ours);
        self.file(copied.target)?.read(copied.target_offset, &mut theirs);
        Ok(ours == theirs)
    }

    /// Copies a range from file to file. Returns how many bytes: fewer where the source ends.
    ///
    /// # Errors
    /// As the engine's.
    pub fn copy_range(&mut self, copied: &Copied) -> Result<u64> {
        let size_bytes = self.file_len(copied.source)?;
        let range = copied.range.start..copied.range.end.min(size_bytes);
        if range.is_empty() {
            return Ok(0);
        }
        let copied = Copied { range, ..copied.clone() };
        let len = copied.range.end - copied.range.start;
        copied.target_offset.checked_add(len).ok_or(Refusal::InvalidArgument)?;
        if copied.overlaps() {
            return Err(Refusal::InvalidArgument);
        }
        self.found(copied.target)?;
        let target_bytes = self.changeable(copied.target)?;
        self.appends(copied.target, copied.target_offset, target_bytes)?;
        let end = end_of(copied.target_offset, len)?;
        self.copy_until(&copied, Progress::UpTo(end));
        Ok(len)
    }

    /// What [`Model::clone_range`] and [`Model::copy_range`] leave that came so far in the target.
    /// Both files were found before.
    pub fn copy_until(&mut self, copied: &Copied, progress: Progress) {
        if let Progress::UpTo(end) = progress {
            let source = self.file(copied.source).expect("it was found before").clone();
            let (from, at) = (copied.range.start, copied.target_offset);
            self.bytes_mut(copied.target).copy_from(at, &source, from, end - at);
        }
        if !copied.range.is_empty() {
            self.contents_changed(copied.target);
        }
    }

    fn check_clone(&self, copied: &Copied) -> Result<()> {
        let Copied { source, range, target, target_offset } = copied;
        let from_bytes = self.file_len(*source)?;
        let to_bytes = self.changeable(*target)?;
        if range.start > range.end || range.end > from_bytes {
            return Err(Refusal::InvalidArgument);
        }
        let end = end_of(*target_offset, range.end - range.start)?;
        let is_sector = |offset: u64| offset.is_multiple_of(self.limits.sector_bytes);
        let ends_with_source = range.end == from_bytes && end >= to_bytes;
        let is_aligned = is_sector(range.start) && is_sector(*target_offset);
        if !is_aligned || !(is_sector(range.end) || ends_with_source) || copied.overlaps() {
            return Err(Refusal::InvalidArgument);
        }
        let has_csums = |id: Id| Ok(self.found(id)?.flags & flags::NODATASUM == 0);
        if has_csums(*source)? != has_csums(*target)? {
            return Err(Refusal::InvalidArgument);
        }
        Ok(())
    }

    fn file(&self, id: Id) -> Result<&SparseBytes> {
        match &self.found(id)?.content {
            Content::File(bytes) => Ok(bytes),
            Content::Directory(_) => Err(Refusal::IsDirectory),
            Content::Symlink(_) | Content::Special => Err(Refusal::InvalidArgument),
        }
    }

    fn file_len(&self, id: Id) -> Result<u64> {
        self.file(id).map(SparseBytes::len_bytes)
    }

    /// Refuses what is no file that may be changed; returns its length.
    fn changeable(&self, id: Id) -> Result<u64> {
        self.writable(id.root)?;
        let len_bytes = self.file_len(id)?;
        self.permitted(id, Growth::Allowed)?;
        Ok(len_bytes)
    }

    /// Refuses to change what an append-only file has.
    fn appends(&self, id: Id, offset: u64, size_bytes: u64) -> Result<()> {
        if offset < size_bytes { self.permitted(id, Growth::Forbidden) } else { Ok(()) }
    }

    fn bytes_mut(&mut self, id: Id) -> &mut SparseBytes {
        match &mut self.change(id).content {
            Content::File(bytes) => bytes,
            _ => unreachable!("it was found to be a file"),
        }
    }

    fn contents_changed(&mut self, id: Id) {
        let now = self.now;
        let node = self.change(id);
        (node.mtime, node.ctime) = (now, now);
    }
}

fn len_of(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).expect("a length fits")
}

/// Refuses an end behind that of the longest file.
fn end_of(offset: u64, len_bytes: u64) -> Result<u64> {
    let end = offset.checked_add(len_bytes).filter(|end| *end <= FILE_BYTES_MAX);
    end.ok_or(Refusal::InvalidArgument)
}
