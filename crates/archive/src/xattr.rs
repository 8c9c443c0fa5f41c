//! Extended attributes of the system's files.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::fs::{
    XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr, lgetxattr, llistxattr,
    lremovexattr, lsetxattr,
};
use rustix::io::Errno;

/// The kernel's limit on a value and on a list of names (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
pub(crate) const XATTR_BYTES_MAX: usize = 65536;

/// A file whose attributes are read or set.
#[derive(Clone, Copy)]
pub(crate) enum Subject<'a> {
    /// An open file.
    Open(BorrowedFd<'a>),
    /// A name in an open directory; what cannot be opened, such as a symbolic link.
    Named(BorrowedFd<'a>, &'a [u8]),
}

impl Subject<'_> {
    /// A path to a named file that neither follows it nor resolves its parents: there is no
    /// system call for attributes of a name in a directory before Linux 6.13.
    fn path(self) -> Option<CString> {
        match self {
            Self::Open(_) => None,
            Self::Named(dir, name) => {
                let mut path = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
                path.extend_from_slice(name);
                Some(CString::new(path).unwrap_or_default())
            }
        }
    }
}

/// Buffers for reading attributes, kept so that most files cost no allocation.
#[derive(Debug)]
pub(crate) struct Reader {
    names: Vec<u8>,
    value: Vec<u8>,
}

impl Reader {
    pub fn new() -> Self {
        Self { names: Vec::new(), value: vec![0; XATTR_BYTES_MAX] }
    }

    /// Calls `each` with the name and value of every attribute, by name.
    ///
    /// # Errors
    /// As the system reports; a filesystem without attributes has none.
    pub fn read(
        &mut self,
        subject: Subject<'_>,
        mut each: impl FnMut(&[u8], &[u8]),
    ) -> io::Result<()> {
        let path = subject.path();
        // Most files have none, and one call with a small buffer says so.
        let mut few = [0; 256];
        let list = |buffer: &mut [u8]| match (subject, &path) {
            (Subject::Open(fd), _) => flistxattr(fd, buffer),
            (_, Some(path)) => llistxattr(path.as_c_str(), buffer),
            (Subject::Named(..), None) => Err(Errno::INVAL),
        };
        let names: &[u8] = match list(&mut few) {
            Ok(0) => return Ok(()),
            Ok(len) => &few[..len],
            Err(Errno::RANGE) => {
                self.names.resize(XATTR_BYTES_MAX, 0);
                let len = list(&mut self.names)?;
                &self.names[..len]
            }
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let mut names: Vec<&[u8]> =
            names.split(|&byte| byte == 0).filter(|name| !name.is_empty()).collect();
        names.sort_unstable();
        for name in names {
            let result = match (subject, &path) {
                (Subject::Open(fd), _) => fgetxattr(fd, name, &mut self.value[..]),
                (_, Some(path)) => lgetxattr(path.as_c_str(), name, &mut self.value[..]),
                (Subject::Named(..), None) => Err(Errno::INVAL),
            };
            match result {
                Ok(len) => each(name, &self.value[..len]),
                // Removed since it was listed, or an ACL name without an ACL.
                Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Sets an attribute.
///
/// # Errors
/// As the system reports.
pub(crate) fn set(subject: Subject<'_>, name: &[u8], value: &[u8]) -> io::Result<()> {
    match (subject, subject.path()) {
        (Subject::Open(fd), _) => fsetxattr(fd.as_fd(), name, value, XattrFlags::empty())?,
        (_, Some(path)) => lsetxattr(path.as_c_str(), name, value, XattrFlags::empty())?,
        (Subject::Named(..), None) => return Err(Errno::INVAL.into()),
    }
    Ok(())
}

/// Removes an attribute, where there is one.
///
/// # Errors
/// As the system reports.
pub(crate) fn remove(subject: Subject<'_>, name: &[u8]) -> io::Result<()> {
    let removed = match (subject, subject.path()) {
        (Subject::Open(fd), _) => fremovexattr(fd, name),
        (_, Some(path)) => lremovexattr(path.as_c_str(), name),
        (Subject::Named(..), None) => Err(Errno::INVAL),
    };
    match removed {
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
