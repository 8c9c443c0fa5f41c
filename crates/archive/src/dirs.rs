//! A stack of open directories that may be deeper than the number of files a process may open.
//!
//! 1. The root and the innermost directories are open, at most [`OPEN_MAX`] together.
//! 2. A directory that was closed meanwhile is opened again through its child's `..` when the
//!    child is left, and must be the same one: nothing moves the work elsewhere.
//! 3. No path is ever resolved, so there is no limit to its length, and no symbolic link is
//!    followed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, Stat, fstat, openat};

use crate::error::{BytePath, Error, Result};

/// Directories that are open at most.
const OPEN_MAX: usize = 32;

/// How directories are opened.
pub(crate) const DIRECTORY_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Which file of the system something is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FileId {
    /// Device.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
}

impl From<&Stat> for FileId {
    fn from(stat: &Stat) -> Self {
        Self { device: stat.st_dev, inode: stat.st_ino }
    }
}

#[derive(Debug)]
struct Level<T> {
    id: FileId,
    /// Length of the parent's path.
    parent_path_len: usize,
    data: T,
}

/// The stack, with something of type `T` for each directory.
#[derive(Debug)]
pub(crate) struct DirStack<T> {
    levels: Vec<Level<T>>,
    root: OwnedFd,
    /// The open ones of the innermost levels, without the root's.
    open: VecDeque<OwnedFd>,
    path: Vec<u8>,
}

impl<T> DirStack<T> {
    /// A stack that holds the root, whose path is empty.
    pub fn new(root: OwnedFd, id: FileId, data: T) -> Self {
        let level = Level { id, parent_path_len: 0, data };
        Self { levels: vec![level], root, open: VecDeque::new(), path: Vec::new() }
    }

    /// The innermost directory.
    pub fn fd(&self) -> &OwnedFd {
        self.open.back().unwrap_or(&self.root)
    }

    /// The root.
    pub fn root(&self) -> &OwnedFd {
        &self.root
    }

    /// Path of the innermost directory from the root, and what was kept for it.
    pub fn top(&mut self) -> Option<(&[u8], &mut T, &OwnedFd)> {
        let level = self.levels.last_mut()?;
        Some((&self.path, &mut level.data, self.open.back().unwrap_or(&self.root)))
    }

    /// Path of the innermost directory from the root.
    pub fn path(&self) -> &[u8] {
        &self.path
    }

    /// Directories on the stack.
    pub fn depth(&self) -> usize {
        self.levels.len()
    }

    /// Goes into a directory of the innermost one.
    pub fn push(&mut self, name: &[u8], fd: OwnedFd, id: FileId, data: T) {
        let parent_path_len = self.path.len();
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name);
        self.levels.push(Level { id, parent_path_len, data });
        self.open.push_back(fd);
        if self.open.len() >= OPEN_MAX {
            self.open.pop_front();
        }
    }

    /// Leaves the innermost directory; gives what was kept for it and itself, if it is not the
    /// root.
    ///
    /// # Errors
    /// The parent had been closed and is no longer where it was.
    pub fn pop(&mut self) -> Result<Option<(T, Option<OwnedFd>)>> {
        let Some(level) = self.levels.pop() else { return Ok(None) };
        let left = self.open.pop_back();
        self.path.truncate(level.parent_path_len);
        if let (Some(left), true, Some(parent)) =
            (&left, self.open.is_empty() && self.levels.len() > 1, self.levels.last())
        {
            let error = |e: io::Error| Error::failed("return to", self.path.as_slice(), e);
            let fd =
                openat(left, c"..", DIRECTORY_FLAGS, Mode::empty()).map_err(|e| error(e.into()))?;
            let stat = fstat(&fd).map_err(|e| error(e.into()))?;
            if FileId::from(&stat) != parent.id {
                let why = "the directory was moved while it was being read or written";
                return Err(Error::refused(BytePath::from(self.path.as_slice()), why));
            }
            self.open.push_back(fd);
        }
        Ok(Some((level.data, left)))
    }
}
