//! A directory of the system as a sink.
//!
//! 1. Nothing is made or opened through a symbolic link: every step is relative to an open
//!    directory and refuses to follow one, so that no tree leads out of the target.
//! 2. What is made is private until it is complete: permissions come last but for access control
//!    lists and times. A directory's metadata is set when it is left. Lists that the directory above it
//!    hands on are removed at once: the image's own are all that it gets.
//! 3. Owners are set by root only, fakeroot(1)'s, too. Set-id bits are kept only where the owner is the recorded one.
//! 4. What the system refuses for lack of privilege is skipped with a warning and counted.
//! 5. A file is never longer than what was written of it, until all of it was: who finds one that a
//!    kill has cut off sees that. After an error the file at hand is removed.

use std::collections::HashMap;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, fchown};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, chmod, chownat,
    fstat, ftruncate, futimens, linkat, makedev, mkdirat, mknodat, openat, statat, symlinkat,
    unlinkat, utimensat,
};
use rustix::io::{Errno, pwrite};

use super::Sink;
use crate::batch::{
    Batch, Content, Entry, Identity, LinkTarget, Place, Prepare, Step, Text, Unprepared,
};
use crate::dirs::{DIRECTORY_FLAGS, DirStack, FileId};
use crate::entry::{Metadata, Special, xattr_is_acl};
use crate::error::{BytePath, Cause, Error, Result, Warning, WarningKind};
use crate::progress::Report;
use crate::xattr::{Subject, remove, set};

/// Set-user-id and set-group-id.
const SET_ID_BITS: u32 = 0o6000;

/// What a directory with a default list hands on to something new in it.
const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// How a directory is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Existing {
    /// The directory must be empty or missing.
    #[default]
    Refuse,
    /// Directories that are there are filled, other files replaced.
    Merge,
}

/// What a directory gets when it is left.
#[derive(Debug)]
struct Pending {
    metadata: Metadata,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A file whose pieces are coming, or an earlier one with names left.
#[derive(Debug)]
struct OpenFile {
    file: OwnedFd,
    /// Its name in the directory entered last.
    name: Vec<u8>,
    pending: Pending,
    /// Length that it is to have.
    size_bytes: u64,
    /// Where what was written of it ends.
    written_bytes: u64,
}

/// The sink.
#[derive(Debug)]
pub struct DirectorySink {
    stack: DirStack<Option<Pending>>,
    existing: Existing,
    root_entered: bool,
    is_root_user: bool,
    open_file: Option<OpenFile>,
    /// Paths of files whose further names may come, and how many.
    links: HashMap<u64, (Vec<u8>, u32)>,
    /// The target as the user named it.
    name: Vec<u8>,
    /// Path of the file at hand, for messages.
    path: Vec<u8>,
}

impl DirectorySink {
    /// Opens the target directory, made if it is missing.
    ///
    /// # Errors
    /// It cannot be made or opened, or holds something and `existing` refuses that.
    pub fn new(path: &Path, existing: Existing) -> Result<Self> {
        let name = path.as_os_str().as_bytes();
        let is_made = match mkdirat(CWD, path, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(Error::failed("create directory", name, error)),
        };
        let sink = Self::open(path, existing)?;
        if is_made {
            sink.disinherit(Subject::Open(sink.stack.root().as_fd()))?;
        }
        Ok(sink)
    }

    /// Opens a target directory that is there.
    ///
    /// # Errors
    /// It cannot be opened, or holds something and `existing` refuses that.
    pub fn open(path: &Path, existing: Existing) -> Result<Self> {
        let name = path.as_os_str().as_bytes().to_vec();
        let flags = DIRECTORY_FLAGS.difference(OFlags::NOFOLLOW);
        let root = openat(CWD, path, flags, Mode::empty())
            .map_err(|e| Error::failed("open directory", name.clone(), e))?;
        let stat = fstat(&root).map_err(|e| Error::failed("stat", name.clone(), e))?;
        if existing == Existing::Refuse {
            let mut names =
                std::fs::read_dir(path).map_err(|e| Error::failed("list", name.clone(), e))?;
            if names.next().is_some() {
                return Err(Error::NotEmpty { path: name.into() });
            }
        }
        Ok(Self {
            stack: DirStack::new(root, FileId::from(&stat), None),
            existing,
            root_entered: false,
            is_root_user: rustix::process::geteuid().is_root(),
            open_file: None,
            links: HashMap::new(),
            name,
            path: Vec::new(),
        })
    }

    fn step(&mut self, step: Step<Vec<u8>>, text: &Text, report: &mut Report<'_>) -> Result<()> {
        match step {
            Step::Enter(entry) => self.enter(&entry, text, report),
            Step::Leave => self.leave(report),
            Step::File { entry, size_bytes, content, identity } => {
                let name = self.locate(entry.place, text)?;
                let file = self.create_file(name)?;
                self.remember(identity);
                report.done.files += 1;
                let (name, pending) = (name.to_vec(), pending(&entry, text));
                let open = OpenFile { file, name, pending, size_bytes, written_bytes: 0 };
                self.fill_file(open, content, report)
            }
            Step::Data { offset, len_bytes, data } => {
                self.write(&data, offset)?;
                report.done.data_bytes += len_bytes as u64;
                report.done.hole_bytes = report.done.hole_bytes.saturating_sub(len_bytes as u64);
                Ok(())
            }
            Step::End => self.finish_file(report),
            Step::Special { entry, special, identity } => self
                .put_special(&entry, special.map(|target| text.bytes(target)), text, report)
                .map(|made| {
                    if made {
                        self.remember(identity)
                    }
                }),
            Step::Link { place, target: LinkTarget::Identity(number) } => {
                self.link(place, number, text, report)
            }
            Step::Directory(Entry { place, .. }) | Step::Link { place, .. } => {
                let why = "an archive's paths cannot be unpacked into a directory";
                Err(Error::refused(text.bytes(place.span()), why))
            }
            Step::Warning(warning) => {
                report.warn(&warning);
                Ok(())
            }
        }
    }

    fn enter(&mut self, entry: &Entry, text: &Text, report: &mut Report<'_>) -> Result<()> {
        report.done.directories += 1;
        let pending = Some(pending(entry, text));
        if !self.root_entered {
            self.root_entered = true;
            if let Some((_, kept, _)) = self.stack.top() {
                *kept = pending;
            }
            return Ok(());
        }
        let name = self.locate(entry.place, text)?;
        let is_made = match mkdirat(self.stack.fd(), name, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) if self.existing == Existing::Merge => false,
            Err(error) => return Err(self.failed("create directory", error)),
        };
        let fd = openat(self.stack.fd(), name, DIRECTORY_FLAGS, Mode::empty());
        let fd = fd.map_err(|e| self.failed("open directory", e))?;
        if is_made {
            self.disinherit(Subject::Open(fd.as_fd()))?;
        }
        let stat = fstat(&fd).map_err(|e| self.failed("stat", e))?;
        self.stack.push(name, fd, FileId::from(&stat), pending);
        Ok(())
    }

    fn leave(&mut self, report: &mut Report<'_>) -> Result<()> {
        self.path.clear();
        self.path.extend_from_slice(self.stack.path());
        // The parent is opened again through this directory, so before its permissions are set.
        let Some((Some(pending), left)) = self.stack.pop()? else { return Ok(()) };
        let fd = left.as_ref().unwrap_or(self.stack.root());
        self.set_attributes(fd.as_fd(), &pending, report)
    }

    fn create_file(&self, name: &[u8]) -> Result<OwnedFd> {
        let flags = OFlags::WRONLY
            .union(OFlags::CREATE)
            .union(OFlags::EXCL)
            .union(OFlags::NOFOLLOW)
            .union(OFlags::CLOEXEC);
        let dir = self.stack.fd();
        let create = || openat(dir, name, flags, Mode::RUSR.union(Mode::WUSR));
        self.make(name, create)
    }

    /// Takes away what a directory's default access control list gave to something new in it.
    fn disinherit(&self, subject: Subject<'_>) -> Result<()> {
        ACLS.into_iter()
            .try_for_each(|name| remove(subject, name))
            .map_err(|e| self.failed("remove the access control list of", e))
    }

    /// Makes something, in the place of what is there if that may be replaced.
    fn make<T>(&self, name: &[u8], make: impl Fn() -> rustix::io::Result<T>) -> Result<T> {
        let result = match make() {
            Err(Errno::EXIST) if self.existing == Existing::Merge => {
                unlinkat(self.stack.fd(), name, AtFlags::empty())
                    .map_err(|e| self.failed("replace", e))?;
                make()
            }
            result => result,
        };
        result.map_err(|e| self.failed("create", e))
    }

    fn fill_file(
        &mut self,
        open: OpenFile,
        content: Content<Vec<u8>>,
        report: &mut Report<'_>,
    ) -> Result<()> {
        let size_bytes = open.size_bytes;
        self.open_file = Some(open);
        if let Some(open) = &self.open_file {
            self.disinherit(Subject::Open(open.file.as_fd()))?;
        }
        match content {
            Content::Whole(data) => {
                self.write(&data, 0)?;
                report.done.data_bytes += size_bytes;
                self.finish_file(report)
            }
            Content::Empty | Content::Pieces { .. } => {
                // What data comes is taken off again.
                report.done.hole_bytes += size_bytes;
                if matches!(content, Content::Empty) { self.finish_file(report) } else { Ok(()) }
            }
        }
    }

    fn write(&mut self, data: &[u8], offset: u64) -> Result<()> {
        let Some(open) = &mut self.open_file else { return Ok(()) };
        open.written_bytes = open.written_bytes.max(offset + data.len() as u64);
        let written = write_at(&open.file, data, offset);
        written.map_err(|e| self.failed("write", e))
    }

    fn finish_file(&mut self, report: &mut Report<'_>) -> Result<()> {
        let Some(open) = &self.open_file else { return Ok(()) };
        if open.written_bytes < open.size_bytes {
            ftruncate(&open.file, open.size_bytes).map_err(|e| self.failed("write", e))?;
        }
        self.set_attributes(open.file.as_fd(), &open.pending, report)?;
        self.open_file = None;
        Ok(())
    }

    /// Sets owner, attributes, permissions, access control lists and times, in the order in which
    /// none undoes another: a new owner clears set-id bits and capabilities, new permissions the
    /// mask of a list.
    fn set_attributes(
        &self,
        fd: BorrowedFd<'_>,
        pending: &Pending,
        report: &mut Report<'_>,
    ) -> Result<()> {
        let Pending { metadata, xattrs } = pending;
        let have = || fstat(fd);
        let is_owned = self.set_owner(metadata, report, have, |uid, gid| {
            // Of rustix it goes past the C library, as does the next, and so past fakeroot.
            fchown(fd, Some(uid), Some(gid))
        })?;
        let subject = Subject::Open(fd);
        self.set_xattrs(subject, xattrs.iter().filter(|x| !xattr_is_acl(&x.0)), report);
        let mode = Permissions::from_mode(self.permissions(metadata, is_owned, report));
        let file = fd.try_clone_to_owned().map(File::from);
        file.and_then(|file| file.set_permissions(mode))
            .map_err(|e| self.failed("set permissions of", e))?;
        self.set_xattrs(subject, xattrs.iter().filter(|x| xattr_is_acl(&x.0)), report);
        futimens(fd, &times(metadata)).map_err(|e| self.failed("set times of", e))
    }

    /// Sets the owner, if this may. Returns whether the recorded one is the file's.
    fn set_owner(
        &self,
        metadata: &Metadata,
        report: &mut Report<'_>,
        have: impl FnOnce() -> rustix::io::Result<Stat>,
        set: impl FnOnce(u32, u32) -> io::Result<()>,
    ) -> Result<bool> {
        let Metadata { uid, gid, .. } = *metadata;
        if !self.is_root_user {
            // Not whose process this is: a set-group-ID directory gives what is made in it its group.
            let have = have().map_err(|e| self.failed("stat", e))?;
            return Ok((have.st_uid, have.st_gid) == (uid, gid));
        }
        // To the system that number says that the owner stays as it is.
        let result = match uid == u32::MAX || gid == u32::MAX {
            true => Err(Errno::INVAL.into()),
            false => set(uid, gid),
        };
        let Err(error) = result else { return Ok(true) };
        // Root of a user namespace cannot give a file to who is not in it, nor root to anybody where the filesystem has no owners.
        if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::PermissionDenied) {
            let why = error.to_string();
            self.warn(report, WarningKind::OwnerRefused { uid, gid, why });
            return Ok(false);
        }
        Err(self.failed("set owner of", error))
    }

    fn permissions(&self, metadata: &Metadata, is_owned: bool, report: &mut Report<'_>) -> u32 {
        if is_owned || metadata.permissions & SET_ID_BITS == 0 {
            return metadata.permissions;
        }
        self.warn(report, WarningKind::SetIdDropped);
        metadata.permissions & !SET_ID_BITS
    }

    fn set_xattrs<'x>(
        &self,
        subject: Subject<'_>,
        xattrs: impl Iterator<Item = &'x (Vec<u8>, Vec<u8>)>,
        report: &mut Report<'_>,
    ) {
        for (name, value) in xattrs {
            match set(subject, name, value) {
                Ok(()) => report.done.xattrs += 1,
                Err(error) => {
                    let (name, why) = (BytePath(name.clone()), error.to_string());
                    self.warn(report, WarningKind::XattrRefused { name, why });
                }
            }
        }
    }

    /// Makes what is neither directory nor regular; `false` if it was skipped.
    fn put_special(
        &mut self,
        entry: &Entry,
        special: Special<&[u8]>,
        text: &Text,
        report: &mut Report<'_>,
    ) -> Result<bool> {
        let name = self.locate(entry.place, text)?;
        let dir = self.stack.fd();
        let node = |kind, device| mknodat(dir, name, kind, Mode::RUSR.union(Mode::WUSR), device);
        let made = self.make(name, || match special {
            Special::Symlink(target) => symlinkat(target, dir, name),
            Special::CharDevice(n) => node(FileType::CharacterDevice, makedev(n.major, n.minor)),
            Special::BlockDevice(n) => node(FileType::BlockDevice, makedev(n.major, n.minor)),
            Special::Fifo => node(FileType::Fifo, 0),
            Special::Socket => node(FileType::Socket, 0),
        });
        match made {
            Err(Error::Io { source, .. })
                if source.kind() == io::ErrorKind::PermissionDenied
                    && matches!(special, Special::CharDevice(_) | Special::BlockDevice(_)) =>
            {
                self.warn(report, WarningKind::NeedsRoot { what: special.name() });
                return Ok(false);
            }
            made => made?,
        }
        let is_symlink = matches!(special, Special::Symlink(_));
        if is_symlink {
            report.done.symlinks += 1;
        } else {
            self.disinherit(Subject::Named(dir.as_fd(), name))?;
            report.done.specials += 1;
        }
        self.set_named_attributes(name, is_symlink, &pending(entry, text), report)?;
        Ok(true)
    }

    /// [`DirectorySink::set_attributes`] for what cannot be opened.
    fn set_named_attributes(
        &self,
        name: &[u8],
        is_symlink: bool,
        pending: &Pending,
        report: &mut Report<'_>,
    ) -> Result<()> {
        let Pending { metadata, xattrs } = pending;
        let dir = self.stack.fd();
        let have = || statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
        let is_owned = self.set_owner(metadata, report, have, |uid, gid| {
            let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
            Ok(chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?)
        })?;
        let subject = Subject::Named(dir.as_fd(), name);
        self.set_xattrs(subject, xattrs.iter().filter(|x| !xattr_is_acl(&x.0)), report);
        if !is_symlink {
            let mode = Mode::from_raw_mode(self.permissions(metadata, is_owned, report));
            let flags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
            openat(dir, name, flags, Mode::empty())
                .and_then(|fd| chmod(format!("/proc/self/fd/{}", fd.as_raw_fd()), mode))
                .map_err(|e| self.failed("set permissions of", e))?;
        }
        self.set_xattrs(subject, xattrs.iter().filter(|x| xattr_is_acl(&x.0)), report);
        utimensat(dir, name, &times(metadata), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| self.failed("set times of", e))
    }

    fn link(
        &mut self,
        place: Place,
        number: u64,
        text: &Text,
        report: &mut Report<'_>,
    ) -> Result<()> {
        let name = self.locate(place, text)?;
        let Some((target, names_left)) = self.links.get_mut(&number) else {
            self.warn(report, WarningKind::NeedsRoot { what: "link to a skipped device" });
            return Ok(());
        };
        *names_left = names_left.saturating_sub(1);
        let (target, is_last) = (target.clone(), *names_left == 0);
        if is_last {
            self.links.remove(&number);
        }
        let opened = self.open_parent(&target).map_err(|e| self.failed("find the link of", e))?;
        let target_name = target.rsplit(|&b| b == b'/').next().unwrap_or(&target);
        let parent = opened.as_ref().unwrap_or(self.stack.root());
        let dir = self.stack.fd();
        self.make(name, || linkat(parent, target_name, dir, name, AtFlags::empty()))?;
        report.done.hard_links += 1;
        Ok(())
    }

    /// The directory of an earlier file, found without following a symbolic link; `None` is the
    /// root.
    fn open_parent(&self, path: &[u8]) -> rustix::io::Result<Option<OwnedFd>> {
        let mut parent = None;
        let mut components = path.split(|&b| b == b'/').peekable();
        while let Some(component) = components.next()
            && components.peek().is_some()
        {
            let dir = parent.as_ref().unwrap_or(self.stack.root());
            let flags = DIRECTORY_FLAGS.difference(OFlags::RDONLY).union(OFlags::PATH);
            parent = Some(openat(dir, component, flags, Mode::empty())?);
        }
        Ok(parent)
    }

    fn remember(&mut self, identity: Option<Identity>) {
        if let Some(Identity { number, links }) = identity
            && links > 1
        {
            self.links.insert(number, (self.path.clone(), links - 1));
        }
    }

    /// The name of a place in the directory entered last. Sets the path for messages.
    fn locate<'t>(&mut self, place: Place, text: &'t Text) -> Result<&'t [u8]> {
        let name = text.bytes(place.span());
        self.path.clear();
        self.path.extend_from_slice(self.stack.path());
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name);
        // A name from a damaged image may be anything.
        if name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') {
            return Err(Error::refused(self.path.as_slice(), "is not a valid file name"));
        }
        Ok(name)
    }

    fn failed(&self, op: &'static str, error: impl Into<Cause>) -> Error {
        Error::failed(op, BytePath::join(&self.name, &self.path), error)
    }

    fn warn(&self, report: &mut Report<'_>, what: WarningKind) {
        report.warn(&Warning { path: BytePath(self.path.clone()), what });
    }
}

impl Drop for DirectorySink {
    fn drop(&mut self) {
        if let Some(open) = self.open_file.take() {
            // The failure that brought us here is what is reported.
            let _ = unlinkat(self.stack.fd(), open.name.as_slice(), AtFlags::empty());
        }
    }
}

impl Sink for DirectorySink {
    type Data = Vec<u8>;

    fn prepare(&self) -> Box<dyn Prepare<Vec<u8>>> {
        Box::new(Unprepared)
    }

    fn apply(&mut self, batch: Batch<Vec<u8>>, report: &mut Report<'_>) -> Result<()> {
        let Batch { steps, text, .. } = batch;
        steps.into_iter().try_for_each(|step| self.step(step, &text, report))
    }

    fn finish(&mut self, _: &mut Report<'_>) -> Result<()> {
        Ok(())
    }
}

fn pending(entry: &Entry, text: &Text) -> Pending {
    let owned = |span| text.bytes(span).to_vec();
    let xattrs = entry.xattrs.iter().map(|x| (owned(x.name), owned(x.value))).collect();
    Pending { metadata: entry.metadata, xattrs }
}

fn times(metadata: &Metadata) -> Timestamps {
    let timespec = |time: ubtrfs_rt::Time| Timespec { tv_sec: time.sec, tv_nsec: time.nsec.into() };
    let last_access = timespec(metadata.atime.unwrap_or(metadata.mtime));
    Timestamps { last_access, last_modification: timespec(metadata.mtime) }
}

fn write_at(file: &OwnedFd, mut data: &[u8], mut offset: u64) -> rustix::io::Result<()> {
    while !data.is_empty() {
        match pwrite(file, data, offset) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => {
                data = &data[count..];
                offset += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
