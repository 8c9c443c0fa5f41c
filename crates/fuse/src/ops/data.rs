//! The bytes of regular files.

use rustix::fs::OFlags;
use rustix::io::Errno;
use ubtrfs_engine::InodeId;
use ubtrfs_iomap::{FileOffset, Reach};
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::dir::FileType;

use crate::abi;
use crate::ends::{Append, MovedEnd, Place};
use crate::errno::errno;
use crate::files::UsedFile;
use crate::message::{Answer, Request, Result};
use crate::server::{DATA_BYTES_MAX, Server, Syncs, offset};
use crate::tail::{By, Growth};

/// Modes of `fallocate`: others the kernel refuses itself.
mod falloc {
    pub(super) const KEEP_SIZE: u32 = 1;
    pub(super) const PUNCH_HOLE: u32 = 2;
    pub(super) const ZERO_RANGE: u32 = 0x10;
}

/// An answer says in 32 bits how much was copied.
const COPY_BYTES_MAX: u64 = 1 << 30;

impl Server {
    pub(crate) fn read(
        &self,
        id: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::ReadIn = request.take()?;
        let len = usize::try_from(wanted.size).unwrap_or(usize::MAX).min(DATA_BYTES_MAX);
        let (file, at) = (self.file(id)?, offset(wanted.offset)?);
        // The kernel asks for whole pages, of which the last of all reaches further than a file may.
        let left = FileOffset::MAX.bytes_since(at);
        let len = len.min(usize::try_from(left).unwrap_or(usize::MAX));
        self.note_cached(id, wanted.offset.saturating_add(u64::from(wanted.size)));
        if self.options.notes_access {
            self.note_access(id, wanted.flags);
        }
        // A short answer says that the file ends there.
        answer.fill(len, |buffer| file.data.read_whole(at, buffer)).map_err(|error| errno(&error))
    }

    pub(crate) fn write(
        &self,
        id: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::WriteIn = request.take()?;
        let bytes = request.take_bytes(wanted.size)?;
        let written = self.write_bytes(id, &wanted, bytes, answer);
        if let Err(errno) = written
            && wanted.write_flags & abi::WRITE_CACHE != 0
        {
            self.note_refused(errno);
        }
        if written.is_err() && wanted.flags & OFlags::DIRECT.bits() != 0 {
            let end = wanted.offset.saturating_add(u64::from(wanted.size));
            self.ends.note_failed(id, end, request.header.pid);
        }
        written
    }

    fn write_bytes(
        &self,
        id: InodeId,
        wanted: &abi::WriteIn,
        bytes: &[u8],
        answer: &mut Answer,
    ) -> Result {
        let (file, at) = (self.file(id)?, offset(wanted.offset)?);
        let is_cached = wanted.write_flags & abi::WRITE_CACHE != 0;
        // What the kernel held back when changes were forbidden it has brought before that. With `-o writeback` it may be an append.
        let is_mapped = is_cached && !self.options.writeback;
        let checked = if is_mapped { file.check_changeable() } else { file.check_mutable() };
        if checked.is_err() && is_cached {
            // It would show that.
            self.forget_refused(id, &file);
        }
        checked?;
        if wanted.write_flags & abi::WRITE_KILL_SUIDGID != 0 {
            self.drop_privileges(id)?;
        }
        self.drop_capabilities(id)?;
        file.note_written();
        let place = if is_cached { Place::AsAsked } else { self.append_place(id, wanted) };
        let at = if let Place::At(place) = place { offset(place)? } else { at };
        let is_direct = wanted.flags & OFlags::DIRECT.bits() != 0;
        let by = match is_direct {
            true => By::Direct,
            false => By::Cached(at.bytes().saturating_add(len_bytes(bytes.len()))),
        };
        let growth =
            (place == Place::AsAsked && !is_cached).then_some(Growth { from: at.bytes(), by });
        let written = self.growing(id, &file, growth, answer, |answer| {
            let mut done = 0;
            while done < bytes.len() {
                let (rest, at) = (&bytes[done..], at.saturating_add(len_bytes(done)));
                let written = match place {
                    Place::End => self.append(id, &file, at, rest),
                    _ if is_cached => file.data.write_cached(at, rest),
                    _ => file.data.write(at, rest),
                };
                match written {
                    Ok(0) => break,
                    Ok(len) => done += len,
                    // Of what comes from a map the kernel takes a short answer for a whole one.
                    Err(_) if done > 0 && !is_cached => break,
                    Err(error) => return Err(errno(&error)),
                }
            }
            answer.put(&abi::WriteOut { size: u32::try_from(done).unwrap_or(0), padding: 0 });
            Ok(())
        });
        if written.is_err() && is_cached {
            // As above: it is nowhere else, and not tried again.
            self.forget_refused(id, &file);
        }
        written?;
        if is_cached {
            self.keep_times_of_writes(id, &file);
        }
        // An fsync may have come between.
        file.note_written();
        Ok(())
    }

    /// Where a request is to write. What the kernel holds back may lie before the place where it appends: so that is believed, unless a
    /// command has changed the file.
    fn append_place(&self, id: InodeId, wanted: &abi::WriteIn) -> Place {
        let has = |flag: OFlags| wanted.flags & flag.bits() != 0;
        if !has(OFlags::APPEND) {
            return Place::AsAsked;
        }
        let append = if has(OFlags::DIRECT) { Append::Direct } else { Append::Cached };
        self.ends.place(id, wanted.offset, append)
    }

    /// Appends what the kernel believes to be `at`.
    fn append(
        &self,
        id: InodeId,
        file: &UsedFile,
        at: FileOffset,
        bytes: &[u8],
    ) -> ubtrfs_engine::Result<usize> {
        let (end, len) = file.data.append(bytes)?;
        let moved = MovedEnd { known_bytes: at.bytes(), true_bytes: end.bytes() };
        self.ends.note_appended(id, moved);
        if end != at {
            // It has in its memory what is not there.
            self.forget_attributes(id);
            self.forget_data_later(id);
        }
        Ok(len)
    }

    pub(crate) fn fsync(&self, id: InodeId) -> Result {
        let result = match self.inode(id)?.file_type() {
            FileType::Regular => {
                let file = self.file(id)?;
                file.note_synced();
                file.data.fsync()
            }
            _ => self.fs.fsync(id),
        };
        result.map_err(|error| errno(&error))
    }

    pub(crate) fn fallocate(
        &self,
        id: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::FallocateIn = request.take()?;
        let (file, at, len) = (self.file(id)?, offset(wanted.offset)?, wanted.len);
        match wanted.mode & !falloc::KEEP_SIZE {
            0 => file.check_mutable()?,
            _ => file.check_changeable()?,
        }
        offset(wanted.offset.checked_add(len).ok_or(Errno::FBIG)?)?;
        self.drop_privileges_unless_root(id, self.owner(&request.header).0)?;
        self.drop_capabilities(id)?;
        file.note_written();
        let reach = match wanted.mode & falloc::KEEP_SIZE {
            0 => Reach::Extends,
            _ => Reach::Stays,
        };
        let growth = (reach == Reach::Extends)
            .then_some(Growth { from: wanted.offset + len, by: By::Change });
        let data = &file.data;
        let allocated = self.growing(id, &file, growth, answer, |_| {
            let done = match wanted.mode & !falloc::KEEP_SIZE {
                0 => data.allocate(at, len, reach),
                falloc::PUNCH_HOLE if reach == Reach::Stays => data.punch_hole(at, len),
                falloc::ZERO_RANGE => data.allocate_zeroed(at, len, reach),
                _ => return Err(Errno::OPNOTSUPP),
            };
            done.map_err(|error| errno(&error))
        });
        if allocated.is_err() && wanted.mode & (falloc::PUNCH_HOLE | falloc::ZERO_RANGE) != 0 {
            // Some of it may be zero.
            self.forget_data_later(id);
        }
        allocated?;
        self.keep_times_of_writes(id, &file);
        Ok(())
    }

    pub(crate) fn copy_file_range(
        &self,
        id: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::CopyFileRangeIn = request.take()?;
        let target = self.nodes.inode(wanted.node_out).ok_or(Errno::STALE)?;
        // Of the target the kernel may not know the end: what the request is of stays as it is.
        let since = self.ends.now();
        self.ends.note_touched(target);
        let copied = self.copy_to(id, target, &wanted, &request, answer);
        self.ends.note_done(target, since);
        if copied.is_err() {
            self.forget_attributes(target);
        }
        copied
    }

    fn copy_to(
        &self,
        id: InodeId,
        target: InodeId,
        wanted: &abi::CopyFileRangeIn,
        request: &Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        if wanted.flags != 0 {
            return Err(Errno::INVAL);
        }
        let len = wanted.len.min(COPY_BYTES_MAX);
        let end = wanted.offset_in.checked_add(len).ok_or(Errno::OVERFLOW)?;
        let target_file = self.file(target)?;
        target_file.check_mutable()?;
        self.drop_privileges_unless_root(target, self.owner(&request.header).0)?;
        self.drop_capabilities(target)?;
        let (range, to) =
            (DiskOffset(wanted.offset_in)..DiskOffset(end), DiskOffset(wanted.offset_out));
        let growth = Growth { from: wanted.offset_out, by: By::Change };
        let copied = self.growing(target, &target_file, Some(growth), answer, |_| {
            self.fs.copy_range(id, range, target, to)
        });
        if copied.is_err() {
            // Some of it may be there.
            self.forget_data_later(target);
        }
        let done = copied.map_err(|error| errno(&error))?;
        self.keep_times_of_writes(target, &target_file);
        // Who has the target open to write synchronously the request does not say.
        if [id, target].into_iter().any(|id| self.syncs_of(id) == Syncs::All) {
            // The kernel believes that nothing was copied then.
            self.fsync(target).inspect_err(|_| self.forget_data_later(target))?;
        }
        answer.put(&abi::WriteOut { size: u32::try_from(done).unwrap_or(0), padding: 0 });
        Ok(())
    }
}

fn len_bytes(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
