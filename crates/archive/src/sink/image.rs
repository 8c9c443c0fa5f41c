//! A filesystem as the destination of a [`TreeSink`](super::tree::TreeSink).
//!
//! The changes of one step go under one transaction handle, begun with their worst case. Large
//! files are appended to without one.
//!
//! Memory: a number for each subvolume and file with names in another one.

use std::collections::HashMap;

use ubtrfs_engine::{
    Appender, Error, Filesystem, Handle, Inherit, InodeId, NewInode, PreparedData, Reservation,
    SetAttributes, WriteOptions, device_number,
};
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::{FileOffset, Generation, RootId};
use ubtrfs_rt::Time;

use super::contract::{Found, FoundKind, Link, Make, Tree, TreeError, Work};
use crate::batch::Prepare;
use crate::entry::{Metadata, Segment, Special, file_type};
use crate::error::Cause;

/// Items that a name takes at worst: those of a subvolume, which needs most.
const ITEMS_PER_NAME: u64 = 12;

/// Items that an extent takes: its own, and its checksums.
const ITEMS_PER_EXTENT: u64 = 3;

/// The shortest extents are compressed ones.
const EXTENT_BYTES_MIN: u64 = 128 << 10;

/// A directory of a filesystem that is being filled.
#[derive(Debug)]
pub struct ImageTree<'f> {
    filesystem: &'f Filesystem,
    root: InodeId,
    options: WriteOptions,
    /// When the import began: the birth and change time of all that it makes.
    now: Time,
    /// What is newer was made by this import.
    before: Generation,
    handle: Option<Handle<'f>>,
    /// What the handle of the step at hand was begun with.
    step: Option<Reservation>,
    appender: Option<Appender>,
    /// Where the file ends that is appended to.
    end: u64,
    /// Copies, in a subvolume, of files of others that have names there.
    copies: HashMap<(RootId, InodeId), InodeId>,
}

impl<'f> ImageTree<'f> {
    /// Fills directory `root`. Commits what was changed before, to tell it from what this makes.
    ///
    /// # Errors
    /// The filesystem cannot be written.
    pub fn new(
        filesystem: &'f Filesystem,
        root: InodeId,
        options: WriteOptions,
    ) -> Result<Self, Error> {
        filesystem.commit()?;
        Ok(Self {
            filesystem,
            root,
            options,
            now: filesystem.runtime().clock.now(),
            before: Generation(filesystem.superblock().generation.get()),
            handle: None,
            step: None,
            appender: None,
            end: 0,
            copies: HashMap::new(),
        })
    }

    /// The handle of the changes at hand.
    fn handle(&mut self) -> Result<&mut Handle<'f>, TreeError> {
        if self.handle.is_none() {
            self.begin(Work { names: 1, ..Work::default() })?;
        }
        Ok(self.handle.as_mut().expect("begun above"))
    }

    fn new_inode(&self, type_bits: u32, rdev: u64, metadata: &Metadata) -> NewInode {
        NewInode {
            mode: type_bits | metadata.permissions,
            uid: metadata.uid,
            gid: metadata.gid,
            rdev,
            atime: metadata.atime.unwrap_or(metadata.mtime),
            mtime: metadata.mtime,
            ctime: self.now,
            otime: self.now,
            inherit: Inherit::Nothing,
        }
    }
}

impl ImageTree<'_> {
    /// What takes handles of its own; the step goes on under a new one.
    fn aside<T>(
        &mut self,
        what: impl FnOnce(&Self) -> Result<T, TreeError>,
    ) -> Result<T, TreeError> {
        self.handle = None;
        let done = what(self)?;
        if let Some(reservation) = self.step {
            self.handle = Some(self.filesystem.begin(reservation)?);
        }
        Ok(done)
    }

    /// Makes a file as `source` is: its data shared, all else copied.
    fn copy(&self, dir: InodeId, name: &[u8], source: InodeId) -> Result<InodeId, TreeError> {
        let filesystem = self.filesystem;
        let inode = filesystem.inode(source)?;
        let new = NewInode {
            mode: inode.mode,
            uid: inode.uid,
            gid: inode.gid,
            rdev: inode.rdev,
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: self.now,
            otime: self.now,
            inherit: Inherit::Nothing,
        };
        let xattrs = filesystem.xattrs(source)?;
        let mut handle = filesystem.begin(Reservation::items(ITEMS_PER_NAME))?;
        let copy = if inode.file_type() == FileType::Symlink {
            handle.symlink(dir, name, &filesystem.read_link(source)?, &new)?
        } else {
            handle.create(dir, name, &new)?
        };
        drop(handle);
        if inode.file_type() == FileType::Regular {
            let all = FileOffset(0)..FileOffset(inode.size_bytes);
            filesystem.copy_range(source, all, copy, FileOffset(0))?;
        }
        // Behind the data, as writing takes capabilities away, and sets times.
        let mut handle = filesystem.begin(Reservation::items(xattrs.len() as u64 + 2))?;
        for (name, value) in &xattrs {
            handle.set_xattr(copy, name, value)?;
        }
        let times = SetAttributes {
            mode: Some(inode.mode),
            atime: Some(inode.atime),
            mtime: Some(inode.mtime),
            ctime: Some(self.now),
            ..SetAttributes::default()
        };
        handle.set_attributes(copy, &times)?;
        Ok(copy)
    }

    /// The copy of `node` in the subvolume `root`, if there is one that still has a name.
    fn copy_in(&self, root: RootId, node: InodeId) -> Option<InodeId> {
        let copy = *self.copies.get(&(root, node))?;
        self.filesystem.inode(copy).is_ok_and(|inode| inode.nlink > 0).then_some(copy)
    }
}

impl Tree for ImageTree<'_> {
    type Node = InodeId;
    type Data = PreparedData;

    fn root(&self) -> InodeId {
        self.root
    }

    fn prepare(&self) -> Box<dyn Prepare<PreparedData>> {
        Box::new(Preparation(self.options))
    }

    fn begin(&mut self, work: Work) -> Result<(), TreeError> {
        let extents = work.data_bytes.div_ceil(EXTENT_BYTES_MIN) + 1;
        let items = work.names * ITEMS_PER_NAME + work.xattrs + 1 + extents * ITEMS_PER_EXTENT;
        let reservation = Reservation::items(items).and(Reservation::extents(extents));
        self.handle = Some(self.filesystem.begin(reservation)?);
        self.step = Some(reservation);
        Ok(())
    }

    fn end(&mut self) {
        self.handle = None;
        self.step = None;
    }

    fn lookup(&mut self, dir: InodeId, name: &[u8]) -> Result<Option<Found<InodeId>>, TreeError> {
        let node = match self.filesystem.lookup(dir, name) {
            Ok(node) => node,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let inode = self.filesystem.inode(node)?;
        let kind = match inode.file_type() {
            FileType::Directory => FoundKind::Directory,
            FileType::Symlink => FoundKind::Symlink,
            _ => FoundKind::Other,
        };
        Ok(Some(Found { node, kind, is_ours: inode.generation > self.before }))
    }

    fn make(
        &mut self,
        dir: InodeId,
        name: &[u8],
        what: Make<'_>,
        metadata: &Metadata,
    ) -> Result<InodeId, TreeError> {
        let (type_bits, rdev) = match what {
            Make::Directory | Make::Subvolume => (file_type::DIRECTORY, 0),
            Make::File { .. } => (file_type::REGULAR, 0),
            Make::Special(special @ (Special::CharDevice(n) | Special::BlockDevice(n))) => {
                (special.type_bits(), device_number(n.major, n.minor))
            }
            Make::Special(special) => (special.type_bits(), 0),
        };
        let new = self.new_inode(type_bits, rdev, metadata);
        let handle = self.handle()?;
        Ok(match what {
            Make::Subvolume => handle.create_subvolume(dir, name, &new)?,
            Make::Special(Special::Symlink(target)) => handle.symlink(dir, name, target, &new)?,
            _ => handle.create(dir, name, &new)?,
        })
    }

    fn link(&mut self, dir: InodeId, name: &[u8], node: InodeId) -> Result<Link, TreeError> {
        if dir.root == node.root {
            self.handle()?.link(dir, name, node)?;
            return Ok(Link::Same);
        }
        if let Some(copy) = self.copy_in(dir.root, node) {
            self.handle()?.link(dir, name, copy)?;
            return Ok(Link::Same);
        }
        let copy = self.aside(|tree| tree.copy(dir, name, node))?;
        self.copies.insert((dir.root, node), copy);
        Ok(Link::Copy)
    }

    fn unlink(&mut self, dir: InodeId, name: &[u8]) -> Result<(), TreeError> {
        self.aside(|tree| Ok(tree.filesystem.unlink(dir, name)?))
    }

    fn set_xattr(&mut self, node: InodeId, name: &[u8], value: &[u8]) -> Result<(), TreeError> {
        Ok(self.handle()?.set_xattr(node, name, value)?)
    }

    fn set_metadata(&mut self, node: InodeId, metadata: &Metadata) -> Result<(), TreeError> {
        let attributes = SetAttributes {
            mode: Some(metadata.permissions),
            uid: Some(metadata.uid),
            gid: Some(metadata.gid),
            atime: Some(metadata.atime.unwrap_or(metadata.mtime)),
            mtime: Some(metadata.mtime),
            ctime: Some(self.now),
            ..SetAttributes::default()
        };
        Ok(self.handle()?.set_attributes(node, &attributes)?)
    }

    fn set_times(&mut self, node: InodeId, metadata: &Metadata) -> Result<(), TreeError> {
        let attributes = SetAttributes {
            atime: Some(metadata.atime.unwrap_or(metadata.mtime)),
            mtime: Some(metadata.mtime),
            ctime: Some(self.now),
            ..SetAttributes::default()
        };
        Ok(self.handle()?.set_attributes(node, &attributes)?)
    }

    fn write_whole(
        &mut self,
        node: InodeId,
        size_bytes: u64,
        data: Option<PreparedData>,
    ) -> Result<(), TreeError> {
        let pieces = data.map(|data| (FileOffset(0), data)).into_iter().collect();
        Ok(self.handle()?.write_file(node, pieces, size_bytes)?)
    }

    fn begin_file(&mut self, node: InodeId, size_bytes: u64) -> Result<(), TreeError> {
        self.appender = Some(self.filesystem.appender(node, size_bytes)?);
        self.end = 0;
        Ok(())
    }

    fn append(
        &mut self,
        offset: u64,
        len_bytes: usize,
        data: PreparedData,
    ) -> Result<(), TreeError> {
        if let Some(appender) = &mut self.appender {
            appender.push(FileOffset(offset), data)?;
            self.end = offset + len_bytes as u64;
        }
        Ok(())
    }

    fn append_hole(&mut self, hole: Segment) -> Result<(), TreeError> {
        // A hole before a piece follows from that piece's offset.
        self.end = hole.end();
        Ok(())
    }

    fn finish_file(&mut self) -> Result<(), TreeError> {
        if let Some(mut appender) = self.appender.take() {
            appender.hole_to(self.end)?;
            appender.finish()?;
        }
        Ok(())
    }
}

/// Checksums and compresses on the workers.
struct Preparation(WriteOptions);

impl Prepare<PreparedData> for Preparation {
    fn prepare(&self, bytes: Vec<u8>, is_whole_file: bool) -> Result<PreparedData, Cause> {
        let max_inline_bytes = if is_whole_file { self.0.max_inline_bytes } else { 0 };
        Ok(PreparedData::new(bytes, &WriteOptions { max_inline_bytes, ..self.0 }))
    }
}
