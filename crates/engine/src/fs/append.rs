//! Writing a file from its beginning to its end.

use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::file_extent::FileExtent;
use ubtrfs_ondisk::{FileOffset, KeyType};

use super::entry::check_flags;
use super::inode::{Inode, InodeId};
use super::writeback::has_own_space;
use crate::data::append::{self, Target, misplaced};
use crate::data::compression::Method;
use crate::data::drop_range::drop_range;
use crate::data::prepare::{Extents, PreparedData, WriteOptions};
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle};
use crate::txn::Reservation;

/// Bytes that an appender holds back before it places them together.
const BATCH_BYTES: u64 = 8 << 20;

/// Extents that it holds back at most: what is held is placed under one handle, whose worst case
/// grows with them and has to fit into a small filesystem too.
const BATCH_EXTENTS_MAX: u64 = 32;

/// Appends prepared pieces to one file, from [`Filesystem::appender`]. Pieces are placed some at a
/// time, the rest by [`Appender::finish`]; dropped without, the file ends after what was placed.
#[derive(Debug)]
#[must_use = "what was pushed last is written by finish"]
pub struct Appender {
    fs: Filesystem,
    tail: Tail,
}

/// The end of a file that grows.
#[derive(Debug)]
struct Tail {
    id: InodeId,
    target: Target,
    sectorsize_bytes: u64,
    no_holes: bool,
    /// What has space of its own, or is written in place, is never inline.
    may_be_inline: bool,
    /// Pieces not placed yet, with their file offsets.
    held: Vec<(u64, PreparedData)>,
    held_bytes: u64,
    /// Extents that they become at most, a hole before each piece included.
    held_extents: u64,
    /// Pieces that are to be placed now.
    pieces: Vec<(u64, Extents)>,
    inode_flags: u64,
    /// There may be file extents of no length where pieces come.
    has_empty_behind: bool,
    /// End of what was placed, in whole sectors.
    placed_end: u64,
    /// End of the last piece or hole: the file's size when all is placed.
    end: u64,
    /// The file's size as the inode says it.
    recorded_end: u64,
}

impl Filesystem {
    /// How data is written here: with the filesystem's checksum, inline up to
    /// [`OpenOptions::max_inline_bytes`](crate::OpenOptions::max_inline_bytes), and compressed if asked for.
    pub fn write_options(&self, compression: Option<Method>) -> WriteOptions {
        let sectorsize_bytes = self.inner.core.roots.store.geometry().sectorsize_bytes;
        WriteOptions {
            csum: Some(self.csum_type()),
            compression,
            force_compression: false,
            sectorsize_bytes,
            // What is longer lies in extents, whatever was asked for.
            max_inline_bytes: self.inner.options.max_inline_bytes.min(sectorsize_bytes - 1),
        }
    }

    /// How new data of a file is written: compressed as the file says, or the options that the filesystem was opened with.
    ///
    /// # Errors
    /// As [`Filesystem::compression_of`].
    pub(super) fn write_options_of(&self, inode: &Inode) -> Result<WriteOptions> {
        let options = &self.inner.options;
        let of_filesystem = self.write_options(self.compression_of(inode)?);
        Ok(WriteOptions {
            force_compression: options.force_compression && options.compression.is_some(),
            max_inline_bytes: if has_own_space(inode) { 0 } else { of_filesystem.max_inline_bytes },
            ..of_filesystem
        })
    }

    /// Appends to the regular file `id`, which is empty or ends with a whole sector.
    /// `size_hint_bytes` is what is expected to come; 0 when not known. The inode's times stay as
    /// they are.
    ///
    /// The thread must hold no [`Handle`] while it pushes: pieces are placed under handles of
    /// their own. To make a small file with its contents under one, see [`Handle::write_file`].
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`, `NotPermitted`, `IsDirectory`; `InvalidArgument` for another type; `Unsupported`
    /// for a file whose end is inside a sector.
    pub fn appender(&self, id: InodeId, size_hint_bytes: u64) -> Result<Appender> {
        self.inner.core.check_writable()?;
        self.inner.files.names().check_writable(&self.inner.core, id.root)?;
        let mut tail = self.tail_of(id)?;
        let pieces = size_hint_bytes.min(BATCH_BYTES).div_ceil(1 << 20);
        tail.held.reserve(usize::try_from(pieces).unwrap_or(0));
        Ok(Appender { fs: self.clone(), tail })
    }

    fn tail_of(&self, id: InodeId) -> Result<Tail> {
        let inode = self.disk_inode(id)?;
        if self.is_open(id) {
            let what = format!("appending prepared data to {id} while it is open");
            return Err(Error::Unsupported { what });
        }
        match inode.file_type() {
            FileType::Regular => {}
            FileType::Directory => return Err(Error::IsDirectory { what: id.to_string() }),
            _ => return Err(Error::InvalidArgument { what: format!("{id} is no regular file") }),
        }
        self.inner.files.names().check_not_going(id, inode.nlink)?;
        check_flags(id, inode.flags, true)?;
        let sectorsize_bytes = self.sectorsize_bytes();
        let end = inode.size_bytes;
        if !end.is_multiple_of(sectorsize_bytes) {
            return Err(Error::Unsupported {
                what: format!("appending to {id}, which ends inside a sector"),
            });
        }
        let has_empty_behind = self.check_nothing_behind(id, end)?;
        Ok(Tail {
            id,
            target: Target { root: id.root, inode: id.inode, has_csums: inode.has_csums() },
            sectorsize_bytes,
            no_holes: Incompat(self.inner.core.superblock.lock().incompat_flags.get())
                .contains(Incompat::NO_HOLES),
            may_be_inline: !has_own_space(&inode),
            held: Vec::new(),
            held_bytes: 0,
            held_extents: 0,
            pieces: Vec::new(),
            inode_flags: inode.flags,
            has_empty_behind,
            placed_end: end,
            end,
            recorded_end: end,
        })
    }
}

impl Filesystem {
    /// Refuses a file whose last extent is inline, or preallocated beyond its end: what is appended
    /// would lie over it. Returns whether there are some of no length behind the last one that has any.
    fn check_nothing_behind(&self, id: InodeId, end: u64) -> Result<bool> {
        let mut cursor = self.tree(id.root)?.cursor();
        cursor.seek_back(&id.key(KeyType::EXTENT_DATA, u64::MAX))?;
        let mut has_empty = false;
        loop {
            let Some((key, data)) = cursor.current()? else { return Ok(has_empty) };
            if key.objectid != id.inode.object_id() || key.ty != KeyType::EXTENT_DATA {
                return Ok(has_empty);
            }
            let extent = FileExtent::parse(data).map_err(|error| error.in_root(id.root))?;
            let extent_end = match extent {
                FileExtent::Inline { ram_bytes: 0, .. } => Some(key.offset),
                FileExtent::Inline { .. } => None,
                FileExtent::Regular(extent) | FileExtent::Prealloc(extent) => {
                    key.offset.checked_add(extent.num_bytes)
                }
            };
            if extent_end == Some(key.offset) {
                has_empty = true;
                cursor.prev()?;
                continue;
            }
            if extent_end.is_none_or(|extent_end| extent_end > end) {
                let what =
                    format!("appending to {id}, which has inline data or space beyond its end");
                return Err(Error::Unsupported { what });
            }
            return Ok(has_empty);
        }
    }
}

impl Appender {
    /// Appends a piece at `offset`: the file's end, or beyond it with a hole between. All pieces
    /// begin with a sector, and all but the last end with one.
    ///
    /// # Errors
    /// `InvalidArgument` for a piece that overlaps or is not aligned, or was prepared for another
    /// filesystem. `NoSpace` or a failed write: the file then ends before the pieces that were held
    /// back, and takes no more. `InvalidArgument` where others changed the file since.
    pub fn push(&mut self, offset: FileOffset, data: PreparedData) -> Result<()> {
        self.tail.hold(&self.fs, offset, data)?;
        if self.tail.held_bytes < BATCH_BYTES && self.tail.held_extents < BATCH_EXTENTS_MAX {
            return Ok(());
        }
        self.tail.place_under_handle(&self.fs, Tail::place)
    }

    /// Lets the file end at `size_bytes`, with a hole behind the last piece.
    ///
    /// # Errors
    /// `InvalidArgument` for less than there is.
    pub fn hole_to(&mut self, size_bytes: u64) -> Result<()> {
        self.tail.hole_to(size_bytes)
    }

    /// Places all that is left. Durable with the next commit.
    ///
    /// # Errors
    /// As [`Appender::push`].
    pub fn finish(mut self) -> Result<()> {
        if self.tail.is_placed() {
            return Ok(());
        }
        self.tail.place_under_handle(&self.fs, Tail::finish)
    }
}

impl Handle<'_> {
    /// Refuses a file that went, or that can no longer be changed, since its data lock was taken.
    /// While the handle is open, neither can happen.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`.
    pub(super) fn check_file(&self, id: InodeId) -> Result<()> {
        self.fs.inner.files.names().check_writable(self.txn.core(), id.root)?;
        self.check_file_is_there(id)
    }

    /// Refuses a file that is not there any more. What was written before its subvolume became read-only may be
    /// brought to the medium after that.
    ///
    /// # Errors
    /// `NotFound`.
    pub(super) fn check_file_is_there(&self, id: InodeId) -> Result<()> {
        self.fs.disk_inode(id).map(drop)
    }

    /// Fills the empty regular file `id` with pieces, each at its offset as with
    /// [`Appender::push`], and lets it end at `size_bytes`. Needs a [`Reservation`] of
    /// [`Reservation::extents`] for them, beside that for making the file. Nobody else may write
    /// the file meanwhile, as with one that was made under this handle.
    ///
    /// # Errors
    /// As [`Filesystem::appender`] and [`Appender::push`].
    pub fn write_file(
        &mut self,
        id: InodeId,
        pieces: Vec<(FileOffset, PreparedData)>,
        size_bytes: u64,
    ) -> Result<()> {
        self.fs.inner.files.names().check_writable(self.txn.core(), id.root)?;
        let mut tail = self.fs.tail_of(id)?;
        for (offset, data) in pieces {
            tail.hold(self.fs, offset, data)?;
        }
        tail.hole_to(size_bytes)?;
        if tail.is_placed() {
            return Ok(());
        }
        tail.finish(self)
    }
}

impl Tail {
    /// Refuses a file that is not as this left it: others may have written it, or removed it, since its
    /// data lock was held last. Until the handle ends they cannot.
    fn check_unchanged(&self, handle: &Handle<'_>) -> Result<()> {
        handle.check_file(self.id)?;
        let inode = handle.fs.disk_inode(self.id)?;
        if handle.fs.is_open(self.id)
            || inode.size_bytes != self.recorded_end
            || inode.has_csums() != self.target.has_csums
        {
            let what = format!("appending to {}, which others changed meanwhile", self.id);
            return Err(Error::InvalidArgument { what });
        }
        handle.fs.check_nothing_behind(self.id, self.placed_end).map(drop)
    }

    /// Places what is held, by `place`; behind a commit, where that makes free what is missing.
    fn place_under_handle(
        &mut self,
        fs: &Filesystem,
        place: fn(&mut Self, &mut Handle<'_>) -> Result<()>,
    ) -> Result<()> {
        let files = &fs.inner.files;
        let _lock = files.lock_data(self.id);
        let _csums = files.fixed_csums.fix(self.id);
        let once = |tail: &mut Self| {
            let reservation = tail.reservation();
            let mut handle =
                fs.begin_step_for_data(tail.target.root, tail.inode_flags, reservation)?;
            tail.check_unchanged(&handle)?;
            place(tail, &mut handle)
        };
        let core = &fs.inner.core;
        let foreseen = self.held_extents;
        let is_short = |result: &Result<()>| matches!(result, Err(Error::NoSpace { .. }));
        let mut result = once(self);
        if is_short(&result) && core.frees_by_commit() {
            result = core.commit_unless_held().and_then(|()| once(self));
            if is_short(&result) && self.held_extents > foreseen {
                // What was found in so many fragments may be found in one now.
                self.held_extents = foreseen;
                result = once(self);
            }
        }
        if result.is_err() && !self.pieces.is_empty() {
            // Nothing of them was placed: the file ends where it did.
            self.pieces.clear();
            (self.held_extents, self.end) = (0, self.recorded_end);
        }
        result
    }

    fn is_placed(&self) -> bool {
        self.held.is_empty() && self.pieces.is_empty() && self.end == self.recorded_end
    }

    fn hold(&mut self, fs: &Filesystem, offset: FileOffset, data: PreparedData) -> Result<()> {
        let offset = offset.0;
        let options = &data.options;
        if !offset.is_multiple_of(self.sectorsize_bytes) {
            return Err(misplaced(offset, "not at the beginning of a sector"));
        }
        if offset < self.end {
            return Err(misplaced(offset, "before the end of the one before"));
        }
        let csum_fits = !self.target.has_csums || options.csum == Some(fs.csum_type());
        if !csum_fits || options.sectorsize_bytes as u64 != self.sectorsize_bytes {
            return Err(misplaced(offset, "prepared for another checksum or sector size"));
        }
        let end = offset
            .checked_add(data.len_bytes() as u64)
            .filter(|end| i64::try_from(*end).is_ok())
            .ok_or_else(|| misplaced(offset, "beyond the largest file"))?;
        if data.is_empty() {
            return self.hole_to(self.end.max(offset));
        }
        self.held_bytes += data.len_bytes() as u64;
        self.held_extents += data.extent_count_max() + 1;
        self.end = end;
        self.held.push((offset, data));
        Ok(())
    }

    fn hole_to(&mut self, size_bytes: u64) -> Result<()> {
        if size_bytes < self.end || i64::try_from(size_bytes).is_err() {
            return Err(misplaced(size_bytes, "a hole must end behind the last piece"));
        }
        self.end = size_bytes;
        Ok(())
    }

    /// Worst case of placing what is held.
    fn reservation(&self) -> Reservation {
        Reservation::extents(self.held_extents + 1)
    }

    fn finish(&mut self, handle: &mut Handle<'_>) -> Result<()> {
        self.drop_empty_behind(handle)?;
        if self.place_inline(handle)? {
            return Ok(());
        }
        self.place(handle)?;
        let end = self.end.next_multiple_of(self.sectorsize_bytes);
        if !self.no_holes && end > self.placed_end {
            append::put_hole(&mut handle.txn, &self.target, self.placed_end, end)?;
            self.placed_end = end;
        }
        if self.recorded_end != self.end {
            self.grow_inode(handle, 0, self.end)?;
        }
        Ok(())
    }

    /// Places the file as inline data, if it is one small piece.
    fn place_inline(&mut self, handle: &mut Handle<'_>) -> Result<bool> {
        let [(0, data)] = self.held.as_slice() else { return Ok(false) };
        let len = data.len_bytes() as u64;
        if !self.may_be_inline || self.placed_end != 0 || self.end != len {
            return Ok(false);
        }
        let Some((compression, bytes)) = data.inline(self.target.has_csums) else {
            return Ok(false);
        };
        let nodesize = handle.fs.inner.core.roots.store.geometry().nodesize_bytes;
        if bytes.len() > append::inline_bytes_max(nodesize) {
            return Ok(false);
        }
        append::put_inline(&mut handle.txn, &self.target, len, compression, bytes)?;
        self.grow_inode(handle, len, len)?;
        self.placed_end = len.next_multiple_of(self.sectorsize_bytes);
        self.held.clear();
        self.held_bytes = 0;
        self.held_extents = 0;
        Ok(true)
    }

    /// Makes way for what is placed.
    fn drop_empty_behind(&mut self, handle: &mut Handle<'_>) -> Result<()> {
        if std::mem::take(&mut self.has_empty_behind) {
            let (behind, kept) = (self.placed_end..u64::MAX, handle.fs.inner.files.kept());
            drop_range(&mut handle.txn, &self.target, &behind, kept)?;
        }
        Ok(())
    }

    /// Places what is held, as extents, and lets the inode's size reach up to them.
    fn place(&mut self, handle: &mut Handle<'_>) -> Result<()> {
        let held = std::mem::take(&mut self.held);
        self.held_bytes = 0;
        for (offset, data) in held {
            let extents = self.extents_of(data);
            self.pieces.push((offset, extents));
        }
        let fs = handle.fs;
        self.drop_empty_behind(handle)?;
        let csums = &fs.inner.files.csums;
        let (target, reserved) = (&self.target, &mut self.held_extents);
        let nbytes = append::place(&mut handle.txn, target, &self.pieces, reserved, csums)?;
        self.held_extents = 0;
        let pieces = std::mem::take(&mut self.pieces);
        let mut placed_end = self.placed_end;
        for (offset, extents) in &pieces {
            if !self.no_holes && *offset > placed_end {
                append::put_hole(&mut handle.txn, &self.target, placed_end, *offset)?;
            }
            let ram_bytes: usize = extents.pieces.iter().map(|piece| piece.ram_bytes).sum();
            placed_end = offset + ram_bytes as u64;
        }
        self.placed_end = placed_end;
        self.grow_inode(handle, nbytes, self.end.min(placed_end))
    }

    /// Data without checksums is not compressed: Linux would not, and `btrfs check` objects.
    fn extents_of(&self, data: PreparedData) -> Extents {
        let extents = data.into_extents();
        if self.target.has_csums { extents } else { extents.into_plain(self.sectorsize_bytes) }
    }

    fn grow_inode(&mut self, handle: &mut Handle<'_>, nbytes: u64, size: u64) -> Result<()> {
        let transid = handle.txn.generation().0;
        self.recorded_end = size;
        handle
            .change_inode(self.id, |item| {
                item.transid = transid.into();
                item.size = size.into();
                item.nbytes = item.nbytes.get().saturating_add(nbytes).into();
            })
            .map_err(|error| handle.txn.abort(error))?;
        handle.fs.inner.files.note_data_changed(self.id);
        Ok(())
    }
}
