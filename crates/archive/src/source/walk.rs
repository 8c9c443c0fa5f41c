//! A directory of the system as a source.
//!
//! 1. Depth first, the names of a directory sorted by their bytes: the stream does not depend on
//!    the order in which the directory lists them.
//! 2. Memory: the names of the directories on the way down, and a number for each file with more
//!    than one name that has names left to come.
//! 3. Files are opened relative to their directory and without following symbolic links.
//!
//! What it asks of owners, types and attributes goes through the C library, so that who runs this by fakeroot(1) gets what that tells.
//!
//! Mount points are crossed, as `rsync` and `mkfs.btrfs --rootdir` do, unless
//! [`WalkOptions::one_file_system`] is set. Birth and change times are not in the stream: no
//! filesystem lets them be set from outside, and a destination gives its own.

use std::collections::HashSet;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use rustix::buffer::spare_capacity;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RawDir, SeekFrom, Stat, fstat, major, minor, openat,
    readlinkat, seek, statat,
};
use rustix::io::{Errno, pread};

use crate::batch::{Batch, Entry, Identity, Load, Loaded, Place, Source, Step};
use crate::dirs::{DIRECTORY_FLAGS, DirStack, FileId};
use crate::entry::{
    DeviceNumber, Metadata, PERMISSION_BITS, Segment, Special, align_segments, xattr_is_storable,
};
use crate::error::{BytePath, Cause, Error, Result, WarningKind};
use crate::source::files::{FileStep, Identities, OpenFile};
use crate::xattr::{Reader, Subject};
use ubtrfs_rt::Time;

/// Flags for a regular file: should it have become a fifo or a terminal, nothing waits for it.
const FILE_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);

/// Bytes of a directory that are read at once.
const LISTING_BUFFER_BYTES: usize = 32 << 10;
/// What sinks pad data to: the sector of nearly all images.
const SECTOR_BYTES: usize = 4096;

/// How a directory is read.
#[derive(Clone, Debug)]
pub struct WalkOptions {
    /// Leave mount points empty.
    pub one_file_system: bool,
    /// Files to leave out, such as the image that is being written.
    pub exclude: HashSet<FileId>,
    /// Pieces of files begin at multiples of this: the destination's sector size.
    pub align_bytes: u64,
}

impl Default for WalkOptions {
    fn default() -> Self {
        Self { one_file_system: false, exclude: HashSet::new(), align_bytes: 4096 }
    }
}

/// The names of a directory and how far the walk is.
#[derive(Debug, Default)]
struct Listing {
    text: Vec<u8>,
    /// Start and length in `text`, and the type where the filesystem tells it.
    names: Vec<(usize, usize, FileType)>,
    next: usize,
}

/// A file that was opened.
#[derive(Debug)]
struct Opened {
    file: Arc<OwnedFd>,
    path: Vec<u8>,
    /// As it was then.
    size_bytes: u64,
}

/// The walk over a directory.
#[derive(Debug)]
pub struct Walk {
    stack: Option<DirStack<Listing>>,
    root_stat: Stat,
    root_entered: bool,
    options: WalkOptions,
    open_file: Option<OpenFile<Opened>>,
    identities: Identities<FileId>,
    xattrs: Reader,
    /// The source as the user named it, for messages.
    name: Vec<u8>,
}

impl Walk {
    /// Opens the directory `path`, through symbolic links.
    ///
    /// # Errors
    /// It cannot be opened or is no directory.
    pub fn new(path: &Path, options: WalkOptions) -> Result<Self> {
        let name = path.as_os_str().as_bytes().to_vec();
        let flags = DIRECTORY_FLAGS.difference(OFlags::NOFOLLOW);
        let root = openat(CWD, path, flags, Mode::empty())
            .map_err(|e| Error::failed("open directory", name.clone(), e))?;
        let stat = fstat(&root).map_err(|e| Error::failed("stat", name.clone(), e))?;
        let listing = list(&root).map_err(|e| Error::failed("list", name.clone(), e))?;
        Ok(Self {
            stack: Some(DirStack::new(root, FileId::from(&stat), listing)),
            root_stat: stat,
            root_entered: false,
            options,
            open_file: None,
            identities: Identities::new(),
            xattrs: Reader::new(),
            name,
        })
    }

    fn shown(&self, path: &[u8]) -> BytePath {
        BytePath::join(&self.name, path)
    }

    fn enter_root(&mut self, batch: &mut Batch<FileLoad>) -> Result<()> {
        let Some(stack) = &self.stack else { return Ok(()) };
        let stat = self.root_stat;
        let name = BytePath(self.name.clone());
        let entry =
            entry(batch, b"", &stat, Subject::Open(stack.fd().as_fd()), &mut self.xattrs, &name);
        batch.push(Step::Enter(entry), 0);
        self.root_entered = true;
        Ok(())
    }

    /// Hands out the next name; `false` at the end of the walk.
    fn step(&mut self, batch: &mut Batch<FileLoad>) -> Result<bool> {
        let Some(stack) = &mut self.stack else { return Ok(false) };
        let Some((_, listing, _)) = stack.top() else { return Ok(false) };
        let Some(&(start, len, file_type)) = listing.names.get(listing.next) else {
            batch.push(Step::Leave, 0);
            let last = stack.depth() == 1;
            stack.pop()?;
            return Ok(!last);
        };
        listing.next += 1;
        let name = listing.text[start..start + len].to_vec();
        match self.visit(batch, &name, file_type) {
            Err(Error::Io { source, path, .. }) if source.kind() == io::ErrorKind::NotFound => {
                batch.warn(path, WarningKind::Vanished);
                Ok(true)
            }
            result => result.map(|()| true),
        }
    }

    fn visit(&mut self, batch: &mut Batch<FileLoad>, name: &[u8], listed: FileType) -> Result<()> {
        let Some(stack) = &self.stack else { return Ok(()) };
        let path = BytePath::join(stack.path(), name);
        let failed = |op| {
            let path = BytePath::join(&self.name, &path.0);
            move |e: Errno| Error::failed(op, path, e)
        };
        // Opened by the listed type; the opened file says what it is.
        let mut listed = listed;
        let mut stat = None;
        if listed == FileType::Unknown {
            let found =
                statat(stack.fd(), name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed("stat"))?;
            listed = FileType::from_raw_mode(found.st_mode);
            stat = Some(found);
        }
        let flags = match listed {
            FileType::Directory => Some(DIRECTORY_FLAGS),
            FileType::RegularFile => Some(FILE_FLAGS),
            _ => None,
        };
        let opened = match flags {
            Some(flags) => {
                let file =
                    openat(stack.fd(), name, flags, Mode::empty()).map_err(failed("open"))?;
                stat = Some(fstat(&file).map_err(failed("stat"))?);
                Some(file)
            }
            None => None,
        };
        let stat = match stat {
            Some(stat) => stat,
            None => statat(stack.fd(), name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed("stat"))?,
        };
        if self.options.exclude.contains(&FileId::from(&stat)) {
            let path = self.shown(&path.0);
            batch.warn(path, WarningKind::IsTheImage);
            return Ok(());
        }
        match (FileType::from_raw_mode(stat.st_mode), opened) {
            (FileType::Directory, Some(fd)) => self.visit_directory(batch, name, path, &stat, fd),
            (FileType::RegularFile, Some(fd)) => self.visit_file(batch, name, path, &stat, fd),
            (FileType::Directory | FileType::RegularFile, None) => {
                let why = "was replaced by a file of another type while it was being read";
                Err(Error::refused(self.shown(&path.0), why))
            }
            (kind, _) => self.visit_special(batch, name, path, &stat, kind),
        }
    }

    fn visit_directory(
        &mut self,
        batch: &mut Batch<FileLoad>,
        name: &[u8],
        path: BytePath,
        stat: &Stat,
        fd: OwnedFd,
    ) -> Result<()> {
        let shown = self.shown(&path.0);
        let is_mount_point = stat.st_dev != self.root_stat.st_dev;
        let listing = if self.options.one_file_system && is_mount_point {
            Listing::default()
        } else {
            list(&fd).map_err(|e| Error::failed("list", shown.clone(), e))?
        };
        let entry = entry(batch, name, stat, Subject::Open(fd.as_fd()), &mut self.xattrs, &shown);
        batch.push(Step::Enter(entry), 0);
        if let Some(stack) = &mut self.stack {
            stack.push(name, fd, FileId::from(stat), listing);
        }
        Ok(())
    }

    fn visit_file(
        &mut self,
        batch: &mut Batch<FileLoad>,
        name: &[u8],
        path: BytePath,
        stat: &Stat,
        fd: OwnedFd,
    ) -> Result<()> {
        let Some(identity) = self.identify(batch, name, stat) else { return Ok(()) };
        let shown = self.shown(&path.0);
        let entry = entry(batch, name, stat, Subject::Open(fd.as_fd()), &mut self.xattrs, &shown);
        let size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let all = Segment { offset: 0, len_bytes: size_bytes };
        let stored_bytes = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
        let segments = if stored_bytes < size_bytes {
            let found = data_segments(&fd, size_bytes)
                .map_err(|e| Error::failed("find the holes of", shown, e))?;
            let segments = align_segments(&found, self.options.align_bytes, size_bytes);
            (segments != [all]).then_some(segments)
        } else {
            None
        };
        let step = FileStep { entry, size_bytes, identity };
        let opened = Opened { file: Arc::new(fd), path: path.0, size_bytes };
        let whole = |opened: Opened| FileLoad { file: opened.file, offset: 0, ends_file: true };
        self.open_file = OpenFile::begin(batch, step, segments, opened, whole);
        Ok(())
    }

    fn visit_special(
        &mut self,
        batch: &mut Batch<FileLoad>,
        name: &[u8],
        path: BytePath,
        stat: &Stat,
        kind: FileType,
    ) -> Result<()> {
        let Some(identity) = self.identify(batch, name, stat) else { return Ok(()) };
        let Some(stack) = &self.stack else { return Ok(()) };
        let shown = BytePath::join(&self.name, &path.0);
        let device = DeviceNumber { major: major(stat.st_rdev), minor: minor(stat.st_rdev) };
        let special = match kind {
            FileType::Symlink => {
                let target = readlinkat(stack.fd(), name, Vec::new())
                    .map_err(|e| Error::failed("read link", shown.clone(), e))?;
                Special::Symlink(batch.span(target.as_bytes()))
            }
            FileType::CharacterDevice => Special::CharDevice(device),
            FileType::BlockDevice => Special::BlockDevice(device),
            FileType::Fifo => Special::Fifo,
            FileType::Socket => Special::Socket,
            _ => return Err(Error::refused(shown, "is of a type that is not known")),
        };
        let subject = Subject::Named(stack.fd().as_fd(), name);
        let entry = entry(batch, name, stat, subject, &mut self.xattrs, &shown);
        batch.push(Step::Special { entry, special, identity }, 0);
        Ok(())
    }

    #[expect(clippy::option_option, reason = "as it comes")]
    fn identify(
        &mut self,
        batch: &mut Batch<FileLoad>,
        name: &[u8],
        stat: &Stat,
    ) -> Option<Option<Identity>> {
        let links = u32::try_from(stat.st_nlink).unwrap_or(u32::MAX);
        self.identities.identify(batch, name, FileId::from(stat), links)
    }
}

impl Source for Walk {
    type Load = FileLoad;

    fn fill(&mut self, batch: &mut Batch<FileLoad>) -> Result<bool> {
        if let Some(stack) = &self.stack {
            batch.directory.clone_from(&self.shown(stack.path()).0);
        }
        if let Some(open) = &self.open_file {
            batch.file = self.shown(&open.file.path).0;
        }
        if !self.root_entered {
            self.enter_root(batch)?;
        }
        while !batch.is_full() {
            if let Some(open) = &mut self.open_file {
                let load = |opened: &Opened, offset, len_bytes| FileLoad {
                    file: Arc::clone(&opened.file),
                    offset,
                    ends_file: offset + len_bytes == opened.size_bytes,
                };
                if !open.hand_out(batch, load) {
                    self.open_file = None;
                }
            } else if !self.step(batch)? {
                self.stack = None;
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Data of a file that is open.
#[derive(Debug)]
pub struct FileLoad {
    file: Arc<OwnedFd>,
    offset: u64,
    /// It reaches to where the file ended when it was opened.
    ends_file: bool,
}

impl Load for FileLoad {
    fn load(self, len_bytes: usize) -> Result<Loaded, Cause> {
        // One byte more than is expected shows that the file grew, without another call. Whole
        // sectors, since the image's sink pads to one: without a copy, if there is room.
        let room = len_bytes + usize::from(self.ends_file);
        let mut bytes = Vec::with_capacity(room.next_multiple_of(SECTOR_BYTES));
        while bytes.len() < len_bytes {
            let at = self.offset + bytes.len() as u64;
            match pread(&self.file, spare_capacity(&mut bytes), at) {
                Ok(0) => break,
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let grew = self.ends_file && bytes.len() > len_bytes;
        bytes.truncate(len_bytes);
        Ok(Loaded { bytes, grew })
    }
}

/// The name, metadata and extended attributes of a file.
fn entry(
    batch: &mut Batch<FileLoad>,
    name: &[u8],
    stat: &Stat,
    subject: Subject<'_>,
    reader: &mut Reader,
    shown: &BytePath,
) -> Entry {
    let place = Place::Name(batch.span(name));
    let mut xattrs = Vec::new();
    let mut not_storable = Vec::new();
    let result = reader.read(subject, |name, value| {
        if xattr_is_storable(name) {
            xattrs.extend(batch.xattr(&shown.0, name, value));
        } else {
            not_storable.push(BytePath::from(name));
        }
    });
    if let Err(error) = result {
        batch.warn(shown.clone(), WarningKind::XattrUnreadable(error.to_string()));
    }
    for name in not_storable {
        batch.warn(shown.clone(), WarningKind::XattrNamespace(name));
    }
    let metadata = Metadata {
        permissions: stat.st_mode & PERMISSION_BITS,
        uid: stat.st_uid,
        gid: stat.st_gid,
        atime: Some(time(stat.st_atime, stat.st_atime_nsec)),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
    };
    Entry { place, metadata, xattrs }
}

fn time(sec: i64, nsec: i64) -> Time {
    Time { sec, nsec: u32::try_from(nsec).unwrap_or(0) }
}

/// The names of a directory, sorted.
fn list(fd: &OwnedFd) -> rustix::io::Result<Listing> {
    let mut listing = Listing::default();
    let mut buffer = [MaybeUninit::uninit(); LISTING_BUFFER_BYTES];
    let mut dir = RawDir::new(fd, &mut buffer);
    while let Some(entry) = dir.next() {
        let entry = match entry {
            Ok(entry) => entry,
            // A directory that was removed while it was being read has no more names.
            Err(Errno::NOENT) => break,
            Err(error) => return Err(error),
        };
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            listing.names.push((listing.text.len(), name.len(), entry.file_type()));
            listing.text.extend_from_slice(name);
        }
    }
    let text = &listing.text;
    listing.names.sort_unstable_by(|a, b| text[a.0..a.0 + a.1].cmp(&text[b.0..b.0 + b.1]));
    Ok(listing)
}

/// Where a file has data. A filesystem that cannot tell has data everywhere.
fn data_segments(fd: &OwnedFd, size_bytes: u64) -> rustix::io::Result<Vec<Segment>> {
    let mut segments = Vec::new();
    let mut at = 0;
    while at < size_bytes {
        let start = match seek(fd, SeekFrom::Data(at)) {
            Ok(start) => start.min(size_bytes),
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL | Errno::NOTTY | Errno::OPNOTSUPP) => {
                return Ok(vec![Segment { offset: 0, len_bytes: size_bytes }]);
            }
            Err(error) => return Err(error),
        };
        let end = match seek(fd, SeekFrom::Hole(start)) {
            Ok(end) => end.min(size_bytes),
            Err(Errno::NXIO) => size_bytes,
            Err(error) => return Err(error),
        };
        if end <= start {
            break;
        }
        segments.push(Segment { offset: start, len_bytes: end - start });
        at = end;
    }
    Ok(segments)
}

#[cfg(test)]
#[path = "walk_tests.rs"]
mod tests;
