//! Extended attributes, access control lists among them.

use rustix::io::Errno;
use ubtrfs_engine::{Error, InodeId, Reservation, SetAttributes};
use ubtrfs_ondisk::inode::flags;

use crate::abi;
use crate::errno::errno;
use crate::message::{Answer, Request, Result};
use crate::server::Server;

const CREATE: u32 = 1;
const REPLACE: u32 = 2;
/// What a file gives who runs it.
pub(crate) const CAPABILITY: &[u8] = b"security.capability";
/// Items that a change of an attribute changes at most.
const XATTR_ITEMS: u64 = 3;

impl Server {
    pub(crate) fn getxattr(
        &self,
        id: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::GetxattrIn = request.take()?;
        let name = known_name(request.take_name()?)?;
        let value = self.fs.xattr(id, name).map_err(|error| errno(&error))?;
        put_sized(&value.ok_or(Errno::NODATA)?, wanted.size, answer)
    }

    pub(crate) fn listxattr(
        &self,
        id: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::GetxattrIn = request.take()?;
        let mut names = Vec::new();
        for (name, _) in self.fs.xattrs(id).map_err(|error| errno(&error))? {
            names.extend(name);
            names.push(0);
        }
        put_sized(&names, wanted.size, answer)
    }

    pub(crate) fn setxattr(&self, id: InodeId, mut request: Request<'_>) -> Result {
        let wanted: abi::SetxattrIn = request.take()?;
        let abi::SetxattrExt { setxattr_flags, .. } = match self.has_setxattr_ext() {
            true => request.take()?,
            false => abi::SetxattrExt::default(),
        };
        let name = settable_name(request.take_name()?)?;
        let value = request.take_bytes(wanted.size)?;
        if name == COMPRESSION && value.is_empty() {
            return self.remove_compression(id, wanted.flags);
        }
        if wanted.flags & (CREATE | REPLACE) != 0 {
            let has_one = self.fs.xattr(id, name).map_err(|error| errno(&error))?.is_some();
            match (has_one, wanted.flags) {
                (true, flags) if flags & CREATE != 0 => return Err(Errno::EXIST),
                (false, flags) if flags & REPLACE != 0 => return Err(Errno::NODATA),
                _ => {}
            }
        }
        let done = self
            .fs
            .begin(Reservation::items(XATTR_ITEMS))
            .and_then(|mut handle| handle.set_xattr(id, name, value));
        // Before the next write can look, after it is there.
        self.note_new_xattr(id, name);
        done.map_err(|error| match error {
            // What does not fit beside others does not fit.
            Error::TooLong { .. } | Error::Limit { .. } => Errno::NOSPC,
            other => errno(&other),
        })?;
        if setxattr_flags & abi::SETXATTR_ACL_KILL_SGID != 0 {
            self.drop_set_gid(id)?;
        }
        Ok(())
    }

    /// A property without a value is none, as in Linux: neither one that is there nor none is in the way.
    fn remove_compression(&self, id: InodeId, xattr_flags: u32) -> Result {
        match self.remove_xattr(id, COMPRESSION) {
            Err(Errno::NODATA) if xattr_flags & REPLACE == 0 => Ok(()),
            result => result,
        }
    }

    pub(crate) fn removexattr(&self, id: InodeId, mut request: Request<'_>) -> Result {
        let name = settable_name(request.take_name()?)?;
        // The kernel asks for this before a write, too, which may append where nothing else may be changed.
        if name == CAPABILITY
            && self.inode(id)?.flags & (flags::APPEND | flags::IMMUTABLE) == flags::APPEND
        {
            return self.remove_capabilities(id);
        }
        match self.remove_xattr(id, name) {
            Err(Errno::NODATA) if LISTS.contains(&name) => self.note_without_list(id, name),
            result => result,
        }
    }

    /// An access control list was to be taken off where there is none: that changes it all the same where there could be one, as in Linux.
    fn note_without_list(&self, id: InodeId, name: &[u8]) -> Result {
        if name == DEFAULT_LIST && !self.inode(id)?.is_dir() {
            return Ok(());
        }
        let ctime = Some(self.now());
        self.set_attributes(id, &SetAttributes { ctime, ..SetAttributes::default() })
    }

    pub(crate) fn remove_xattr(&self, id: InodeId, name: &[u8]) -> Result {
        if self.fs.xattr(id, name).map_err(|error| errno(&error))?.is_none() {
            return Err(Errno::NODATA);
        }
        self.fs
            .begin(Reservation::items(XATTR_ITEMS))
            .and_then(|mut handle| handle.remove_xattr(id, name))
            .map_err(|error| match error {
                Error::NotFound { .. } => Errno::NODATA,
                other => errno(&other),
            })
    }

    /// A file was written, or has another owner: it gives who runs it nothing more.
    pub(crate) fn remove_capabilities(&self, id: InodeId) -> Result {
        let handle = self.fs.begin(Reservation::items(XATTR_ITEMS));
        match handle.and_then(|mut handle| handle.remove_capabilities(id)) {
            Err(Error::NotFound { .. }) => Err(Errno::NODATA),
            result => result.map_err(|error| errno(&error)),
        }
    }
}

/// What the names of properties begin with.
const PROPERTIES: &[u8] = b"btrfs.";
/// The property that Linux keeps.
const COMPRESSION: &[u8] = b"btrfs.compression";

/// Access control lists; of directories they may have one for what is made in them.
const DEFAULT_LIST: &[u8] = b"system.posix_acl_default";
const LISTS: [&[u8]; 2] = [b"system.posix_acl_access", DEFAULT_LIST];

/// Refuses names of other kinds than btrfs keeps, and a kind without a name. As Linux does.
fn known_name(name: &[u8]) -> Result<&[u8]> {
    const KNOWN: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", PROPERTIES];
    match KNOWN.iter().find_map(|prefix| name.strip_prefix(*prefix)) {
        Some([]) => Err(Errno::INVAL),
        Some(_) => Ok(name),
        None if LISTS.contains(&name) => Ok(name),
        None => Err(Errno::OPNOTSUPP),
    }
}

/// Refuses properties, too, that Linux does not know: it would neither show nor remove them.
fn settable_name(name: &[u8]) -> Result<&[u8]> {
    let name = known_name(name)?;
    let is_property = name.starts_with(PROPERTIES);
    if is_property && name != COMPRESSION { Err(Errno::INVAL) } else { Ok(name) }
}

/// The bytes, or only how many there are where no room was given.
fn put_sized(bytes: &[u8], room: u32, answer: &mut Answer) -> Result {
    let len = u32::try_from(bytes.len()).map_err(|_| Errno::TOOBIG)?;
    if room == 0 {
        answer.put(&abi::GetxattrOut { size: len, padding: 0 });
    } else if len > room {
        return Err(Errno::RANGE);
    } else {
        answer.put_bytes(bytes);
    }
    Ok(())
}
