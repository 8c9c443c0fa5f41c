//! Names: finding, making, removing and moving them.

use rustix::fs::OFlags;
use rustix::io::Errno;
use ubtrfs_engine::{Error, Inherit, InodeId, NewInode, RenameMode, Reservation, device_number};
use ubtrfs_ondisk::InodeNo;

use crate::abi::{self, EntryOut, InHeader, fopen, opcode};
use crate::errno::errno;
use crate::message::{Answer, Request, Result};
use crate::server::{Server, decode_device};

/// Attributes that a new inode takes over at most: two access control lists and how it is compressed.
const INHERITED_XATTRS: u64 = 3;
/// The kernel refuses an answer with a longer target: PATH_MAX without the zero.
const LINK_BYTES_MAX: usize = 4095;
const SET_GID: u32 = 0o2000;
const TYPE_CHAR_DEVICE: u32 = 0o020_000;
const TYPE_DIRECTORY: u32 = 0o040_000;
const TYPE_REGULAR: u32 = 0o100_000;
const TYPE_SYMLINK: u32 = 0o120_000;
const TYPE_MASK: u32 = 0o170_000;

/// Flags of `renameat2`.
mod renameat2 {
    pub(super) const NOREPLACE: u32 = 1;
    pub(super) const EXCHANGE: u32 = 2;
    pub(super) const WHITEOUT: u32 = 4;
}

impl Server {
    pub(crate) fn lookup(
        &self,
        dir: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let name = request.take_entry_name()?;
        if let Err(error) = self.check_not_deleted(dir) {
            self.forget_name_of_deleted(dir, name);
            return Err(error);
        }
        match self.fs.lookup(dir, name) {
            Ok(id) if id.is_stand_in() => {
                let entry = self.entry(id)?;
                self.nodes.note_place(entry.node, dir, name);
                self.forget_name_of_deleted(dir, name);
                answer.put(&entry);
                Ok(())
            }
            Ok(id) => self.put_entry(id, answer),
            // That there is none may be remembered, too.
            Err(Error::NotFound { .. }) => {
                self.forget_name_of_deleted(dir, name);
                answer.put(&EntryOut {
                    entry_valid: self.options.valid_seconds(),
                    ..EntryOut::default()
                });
                Ok(())
            }
            Err(error) => Err(errno(&error)),
        }
    }

    fn put_entry(&self, id: InodeId, answer: &mut Answer) -> Result {
        answer.put(&self.entry(id)?);
        Ok(())
    }

    pub(crate) fn new_inode(&self, header: &InHeader, mode: u32, umask: u32) -> NewInode {
        let (uid, gid) = self.owner(header);
        NewInode {
            uid,
            gid,
            inherit: Inherit::AsProcess { umask },
            ..NewInode::new(mode, self.now())
        }
    }

    /// What a moved name leaves behind is whose it is, and the directory's group's if that gives its own to what is made in it.
    fn whiteout(&self, dir: InodeId, header: &InHeader) -> Result<NewInode> {
        let (uid, gid) = self.owner(header);
        let parent = self.inode(dir)?;
        let gid = if parent.mode & SET_GID != 0 { parent.gid } else { gid };
        Ok(NewInode { uid, gid, ..NewInode::new(TYPE_CHAR_DEVICE, self.now()) })
    }

    fn make(&self, dir: InodeId, name: &[u8], new: &NewInode) -> Result<InodeId> {
        self.check_not_deleted(dir)?;
        self.fs
            .begin(Reservation::create(INHERITED_XATTRS))
            .and_then(|mut handle| handle.create(dir, name, new))
            .map_err(|error| errno(&error))
            .and_then(|id| self.settle_names(&[(dir, name)]).map(|()| id))
    }

    pub(crate) fn mknod(
        &self,
        dir: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::MknodIn = request.take()?;
        let name = request.take_entry_name()?;
        let (major, minor) = decode_device(wanted.rdev);
        let mut new = self.new_inode(&request.header, wanted.mode, wanted.umask);
        new.rdev = device_number(major, minor);
        let id = self.make(dir, name, &new)?;
        self.put_entry(id, answer)
    }

    pub(crate) fn mkdir(
        &self,
        dir: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::MkdirIn = request.take()?;
        let name = request.take_entry_name()?;
        let mode = TYPE_DIRECTORY | wanted.mode & !TYPE_MASK;
        let id = self.make(dir, name, &self.new_inode(&request.header, mode, wanted.umask))?;
        self.put_entry(id, answer)
    }

    pub(crate) fn create(
        &self,
        dir: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::CreateIn = request.take()?;
        let name = request.take_entry_name()?;
        let mode = TYPE_REGULAR | wanted.mode & !TYPE_MASK;
        let made = self.make(dir, name, &self.new_inode(&request.header, mode, wanted.umask));
        let must_be_new = wanted.flags & OFlags::EXCL.bits() != 0;
        let id = made.map_err(|error| match error {
            // A command has just made it, of which the kernel has not been told. It looks anew then, and opens what is there, if it may be.
            Errno::EXIST if !must_be_new => Errno::STALE,
            error => error,
        })?;
        self.put_opened(id, answer)
    }

    pub(crate) fn tmpfile(
        &self,
        dir: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::CreateIn = request.take()?;
        let mode = TYPE_REGULAR | wanted.mode & !TYPE_MASK;
        let new = self.new_inode(&request.header, mode, wanted.umask);
        let id = self
            .fs
            .begin(Reservation::create(INHERITED_XATTRS))
            .and_then(|mut handle| handle.create_unlinked(dir, &new))
            .map_err(|error| errno(&error))?;
        let told = self.put_opened(id, answer);
        // Unless it gets a name it goes when the kernel forgets it, or now, if it was not told of it; one that has got a name is not evicted.
        self.let_go(Some(id));
        told
    }

    fn put_opened(&self, id: InodeId, answer: &mut Answer) -> Result {
        self.put_entry(id, answer)?;
        let open_flags = match self.options.naive {
            true => 0,
            false => fopen::KEEP_CACHE | fopen::NOFLUSH,
        };
        answer.put(&abi::OpenOut { open_flags, ..abi::OpenOut::default() });
        Ok(())
    }

    pub(crate) fn symlink(
        &self,
        dir: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let (name, target) = (request.take_entry_name()?, request.take_name()?);
        self.check_not_deleted(dir)?;
        let new = self.new_inode(&request.header, TYPE_SYMLINK | 0o777, 0);
        let id = self
            .fs
            .begin(Reservation::create(INHERITED_XATTRS))
            .and_then(|mut handle| handle.symlink(dir, name, target, &new))
            .map_err(|error| errno(&error))?;
        self.settle_names(&[(dir, name)])?;
        self.put_entry(id, answer)
    }

    pub(crate) fn readlink(&self, id: InodeId, answer: &mut Answer) -> Result {
        let target = self.fs.read_link(id).map_err(|error| errno(&error))?;
        if target.len() > LINK_BYTES_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        if self.options.notes_access {
            self.note_access(id, OFlags::empty().bits());
        }
        answer.put_bytes(&target);
        Ok(())
    }

    pub(crate) fn link(
        &self,
        dir: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::LinkIn = request.take()?;
        let name = request.take_entry_name()?;
        let id = self.nodes.inode(wanted.old_node).ok_or(Errno::STALE)?;
        self.check_not_deleted(dir)?;
        self.fs
            .begin(Reservation::create(0))
            .and_then(|mut handle| handle.link(dir, name, id))
            .map_err(|error| errno(&error))?;
        self.settle_names(&[(dir, name)])?;
        self.put_entry(id, answer)
    }

    pub(crate) fn unlink(&self, dir: InodeId, mut request: Request<'_>) -> Result {
        let name = request.take_entry_name()?;
        let gone = self.fs.unlink_deferred(dir, name).map_err(|error| errno(&error))?;
        self.let_go(gone);
        self.settle_names(&[(dir, name)])
    }

    /// Removes a directory, or a subvolume if it is empty, as Linux does.
    pub(crate) fn rmdir(&self, dir: InodeId, mut request: Request<'_>) -> Result {
        let name = request.take_entry_name()?;
        let id = self.fs.lookup(dir, name).map_err(|error| errno(&error))?;
        if id.root != dir.root && id.inode == InodeNo::SUBVOLUME_ROOT {
            let deleted = self.fs.delete_empty_subvolume(dir, name);
            deleted.map_err(|error| self.errno_of_delete(id, &error))?;
            return self.settle_names(&[(dir, name)]);
        }
        let gone = self.fs.rmdir_deferred(dir, name).map_err(|error| errno(&error))?;
        self.let_go(gone);
        self.settle_names(&[(dir, name)])
    }

    pub(crate) fn rename(&self, dir: InodeId, mut request: Request<'_>) -> Result {
        let (new_dir, flags) = if request.header.opcode == opcode::RENAME2 {
            let abi::Rename2In { new_dir, flags, .. } = request.take()?;
            (new_dir, flags)
        } else {
            let abi::RenameIn { new_dir } = request.take()?;
            (new_dir, 0)
        };
        let (name, new_name) = (request.take_entry_name()?, request.take_entry_name()?);
        let new_dir = self.nodes.inode(new_dir).ok_or(Errno::STALE)?;
        [dir, new_dir].into_iter().try_for_each(|dir| self.check_not_deleted(dir))?;
        const WHITEOUT_OF_NONE: u32 = renameat2::WHITEOUT | renameat2::NOREPLACE;
        // The kernel has looked, too, and holds the directory.
        if flags == WHITEOUT_OF_NONE && self.fs.lookup(new_dir, new_name).is_ok() {
            return Err(Errno::EXIST);
        }
        let mode = match flags {
            0 => RenameMode::Replace,
            renameat2::NOREPLACE => RenameMode::NoReplace,
            renameat2::EXCHANGE => RenameMode::Exchange,
            renameat2::WHITEOUT | WHITEOUT_OF_NONE => RenameMode::Whiteout,
            _ => return Err(Errno::INVAL),
        };
        let replaced = match mode {
            RenameMode::Whiteout => {
                let whiteout = self.whiteout(dir, &request.header)?;
                self.fs.rename_leaving(dir, name, new_dir, new_name, &whiteout)
            }
            _ => self.fs.rename_deferred(dir, name, new_dir, new_name, mode),
        };
        self.let_go(replaced.map_err(|error| errno(&error))?);
        self.settle_names(&[(dir, name), (new_dir, new_name)])
    }
}
