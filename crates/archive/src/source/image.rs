//! A directory or subvolume of a filesystem as a source.
//!
//! 1. Depth first, names sorted by their bytes, whatever the order in which they were made.
//! 2. Nested subvolumes are directories like others.
//! 3. Data is read, verified and decompressed by the workers; the walk reads metadata only.
//! 4. A damaged image cannot lead it astray: a directory that is met twice, and a name that is
//!    none, end the walk.

use std::collections::HashSet;

use ubtrfs_engine::{DirEntry, Filesystem, Inode, InodeId, MappingKind};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::inode::flags;

use crate::batch::{Batch, Entry, Identity, Load, Loaded, PIECE_BYTES_MAX, Place, Source, Step};
use crate::entry::{
    DeviceNumber, Metadata, PERMISSION_BITS, Segment, Special, align_segments, xattr_is_storable,
};
use crate::error::{BytePath, Cause, Error, Result, WarningKind};
use crate::source::files::{FileStep, Identities, OpenFile};

/// Segments begin at multiples of this.
const ALIGN_BYTES: u64 = 4096;

/// What is walked over.
#[derive(Debug)]
enum Start {
    Directory(InodeId),
    /// One regular file, under this name.
    File(Box<Inode>, Vec<u8>),
}

#[derive(Debug)]
struct Level {
    names: std::vec::IntoIter<DirEntry>,
    parent_path_len: usize,
}

/// The walk over a directory of a filesystem.
#[derive(Debug)]
pub struct ImageWalk {
    filesystem: Filesystem,
    /// Until it has begun.
    start: Option<Start>,
    stack: Vec<Level>,
    directories_seen: HashSet<InodeId>,
    open_file: Option<OpenFile<InodeId>>,
    identities: Identities<InodeId>,
    /// Path of the innermost directory.
    directory: Vec<u8>,
    /// Path of the file at hand.
    path: Vec<u8>,
}

impl ImageWalk {
    /// A walk over directory `root`.
    ///
    /// # Errors
    /// `root` cannot be read or is no directory.
    pub fn new(filesystem: &Filesystem, root: InodeId) -> Result<Self> {
        let inode = filesystem.inode(root).map_err(|e| Error::failed("read", Vec::new(), e))?;
        if !inode.is_dir() {
            return Err(Error::refused(Vec::new(), "is not a directory"));
        }
        Ok(Self::begin(filesystem, Start::Directory(root)))
    }

    /// A walk that meets one regular file, named `name`, and no directory.
    ///
    /// # Errors
    /// It cannot be read or is no regular file.
    pub fn of_file(filesystem: &Filesystem, file: InodeId, name: &[u8]) -> Result<Self> {
        let inode = filesystem.inode(file).map_err(|e| Error::failed("read", name, e))?;
        if inode.file_type() != FileType::Regular {
            return Err(Error::refused(name, "is no regular file"));
        }
        Ok(Self::begin(filesystem, Start::File(Box::new(inode), name.to_vec())))
    }

    fn begin(filesystem: &Filesystem, start: Start) -> Self {
        Self {
            filesystem: filesystem.clone(),
            start: Some(start),
            stack: Vec::new(),
            directories_seen: HashSet::new(),
            open_file: None,
            identities: Identities::new(),
            directory: Vec::new(),
            path: Vec::new(),
        }
    }

    fn failed(&self, op: &'static str, error: ubtrfs_engine::Error) -> Error {
        Error::failed(op, self.path.as_slice(), error)
    }

    fn enter(&mut self, batch: &mut Batch<ImageLoad>, name: &[u8], id: InodeId) -> Result<()> {
        if !id.is_stand_in() && !self.directories_seen.insert(id) {
            let why = "is a directory with two names";
            return Err(Error::damaged(self.path.as_slice(), why));
        }
        let inode = self.filesystem.inode(id).map_err(|e| self.failed("read", e))?;
        let mut names = self
            .filesystem
            .read_dir(id, 0)
            .and_then(|names| names.collect::<ubtrfs_engine::Result<Vec<_>>>())
            .map_err(|e| self.failed("list", e))?;
        names.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let entry = self.entry(batch, name, &inode)?;
        batch.push(Step::Enter(entry), 0);
        let parent_path_len = self.directory.len();
        self.directory.clone_from(&self.path);
        self.stack.push(Level { names: names.into_iter(), parent_path_len });
        Ok(())
    }

    /// Hands out the next name; `false` at the end of the walk.
    fn step(&mut self, batch: &mut Batch<ImageLoad>) -> Result<bool> {
        let Some(level) = self.stack.last_mut() else { return Ok(false) };
        let Some(found) = level.names.next() else {
            self.directory.truncate(level.parent_path_len);
            self.stack.pop();
            batch.push(Step::Leave, 0);
            return Ok(!self.stack.is_empty());
        };
        self.path.clone_from(&self.directory);
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(&found.name);
        let bad = |name: &[u8]| {
            name.is_empty()
                || name == b"."
                || name == b".."
                || name.iter().any(|byte| matches!(byte, b'/' | 0))
        };
        if bad(&found.name) {
            let why = "is not a valid file name";
            return Err(Error::damaged(self.path.as_slice(), why));
        }
        if found.file_type == FileType::Directory {
            return self.enter(batch, &found.name, found.target).map(|()| true);
        }
        let inode = self.filesystem.inode(found.target).map_err(|e| self.failed("read", e))?;
        match inode.file_type() {
            FileType::Directory => self.enter(batch, &found.name, found.target)?,
            FileType::Regular => self.file(batch, &found.name, &inode)?,
            kind => self.special(batch, &found.name, &inode, kind)?,
        }
        Ok(true)
    }

    fn file(&mut self, batch: &mut Batch<ImageLoad>, name: &[u8], inode: &Inode) -> Result<()> {
        let Some(identity) = self.identify(batch, name, inode) else { return Ok(()) };
        let entry = self.entry(batch, name, inode)?;
        let size_bytes = inode.size_bytes;
        let whole = Segment { offset: 0, len_bytes: size_bytes };
        // What the inode says is enough for small files. The extents of others are looked at in
        // any case: a damaged image may claim any length.
        let may_have_holes = inode.nbytes < size_bytes
            || inode.flags & flags::PREALLOC != 0
            || size_bytes > PIECE_BYTES_MAX as u64;
        let segments = if may_have_holes {
            let found = self.segments(inode)?;
            let segments = align_segments(&found, ALIGN_BYTES, size_bytes);
            (segments != [whole]).then_some(segments)
        } else {
            None
        };
        let step = FileStep { entry, size_bytes, identity };
        let filesystem = &self.filesystem;
        let load = |id| ImageLoad { filesystem: filesystem.clone(), id, offset: 0 };
        self.open_file = OpenFile::begin(batch, step, segments, inode.id, load);
        Ok(())
    }

    /// Where the file has data below its end.
    fn segments(&self, inode: &Inode) -> Result<Vec<Segment>> {
        let size_bytes = inode.size_bytes;
        let mut segments: Vec<Segment> = Vec::new();
        let extents = self.filesystem.file_extents(inode.id, FileOffset(0));
        for mapping in extents.map_err(|e| self.failed("read the extents of", e))? {
            let mapping = mapping.map_err(|e| self.failed("read the extents of", e))?;
            if mapping.offset.0 >= size_bytes {
                break;
            }
            if matches!(mapping.kind, MappingKind::Data | MappingKind::Inline) {
                let len_bytes = mapping.len_bytes.min(size_bytes - mapping.offset.0);
                match segments.last_mut() {
                    Some(last) if last.end() == mapping.offset.0 => last.len_bytes += len_bytes,
                    _ => segments.push(Segment { offset: mapping.offset.0, len_bytes }),
                }
            }
        }
        Ok(segments)
    }

    fn special(
        &mut self,
        batch: &mut Batch<ImageLoad>,
        name: &[u8],
        inode: &Inode,
        kind: FileType,
    ) -> Result<()> {
        let Some(identity) = self.identify(batch, name, inode) else { return Ok(()) };
        let (major, minor) = inode.device();
        let device = DeviceNumber { major, minor };
        let special = match kind {
            FileType::Symlink => {
                let target = self.filesystem.read_link(inode.id);
                let target = target.map_err(|e| self.failed("read link", e))?;
                if target.is_empty() || target.contains(&0) {
                    let why = "is a symbolic link to no valid path";
                    return Err(Error::damaged(self.path.as_slice(), why));
                }
                Special::Symlink(batch.span(&target))
            }
            FileType::CharDevice => Special::CharDevice(device),
            FileType::BlockDevice => Special::BlockDevice(device),
            FileType::Fifo => Special::Fifo,
            FileType::Socket => Special::Socket,
            _ => {
                let why = "is of a type that is not known";
                return Err(Error::damaged(self.path.as_slice(), why));
            }
        };
        let entry = self.entry(batch, name, inode)?;
        batch.push(Step::Special { entry, special, identity }, 0);
        Ok(())
    }

    #[expect(clippy::option_option, reason = "as it comes")]
    fn identify(
        &mut self,
        batch: &mut Batch<ImageLoad>,
        name: &[u8],
        inode: &Inode,
    ) -> Option<Option<Identity>> {
        self.identities.identify(batch, name, inode.id, inode.nlink)
    }

    fn entry(&mut self, batch: &mut Batch<ImageLoad>, name: &[u8], inode: &Inode) -> Result<Entry> {
        let found = self.filesystem.xattrs(inode.id);
        let mut found = found.map_err(|e| self.failed("read the attributes of", e))?;
        found.sort_unstable();
        let mut xattrs = Vec::with_capacity(found.len());
        for (name, value) in &found {
            if xattr_is_storable(name) && !name.contains(&0) {
                xattrs.extend(batch.xattr(&self.path, name, value));
            } else {
                let name = BytePath::from(name.as_slice());
                batch.warn(self.path.as_slice(), WarningKind::XattrNamespace(name));
            }
        }
        let metadata = Metadata {
            permissions: inode.mode & PERMISSION_BITS,
            uid: inode.uid,
            gid: inode.gid,
            atime: Some(inode.atime),
            mtime: inode.mtime,
        };
        Ok(Entry { place: Place::Name(batch.span(name)), metadata, xattrs })
    }
}

impl Source for ImageWalk {
    type Load = ImageLoad;

    fn fill(&mut self, batch: &mut Batch<ImageLoad>) -> Result<bool> {
        batch.directory.clone_from(&self.directory);
        if self.open_file.is_some() {
            batch.file.clone_from(&self.path);
        }
        match self.start.take() {
            Some(Start::Directory(root)) => self.enter(batch, b"", root)?,
            Some(Start::File(inode, name)) => {
                self.path.clone_from(&name);
                self.file(batch, &name, &inode)?;
            }
            None => {}
        }
        while !batch.is_full() {
            if let Some(open) = &mut self.open_file {
                let filesystem = &self.filesystem;
                let load = |id: &InodeId, offset, _| ImageLoad {
                    filesystem: filesystem.clone(),
                    id: *id,
                    offset,
                };
                if !open.hand_out(batch, load) {
                    self.open_file = None;
                }
            } else if !self.step(batch)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Data of a file of the filesystem.
#[derive(Debug)]
pub struct ImageLoad {
    filesystem: Filesystem,
    id: InodeId,
    offset: u64,
}

impl Load for ImageLoad {
    fn load(self, len_bytes: usize) -> Result<Loaded, Cause> {
        let mut bytes = vec![0; len_bytes];
        let mut have = 0;
        let mut file = self.filesystem.open_file(self.id)?;
        while have < len_bytes {
            let at = FileOffset(self.offset + have as u64);
            match file.read(at, &mut bytes[have..])? {
                0 => break,
                count => have += count,
            }
        }
        bytes.truncate(have);
        Ok(Loaded { bytes, grew: false })
    }
}
