//! `stat`, `chmod`, `chown`, `utimes`, `truncate`, `statfs`.

use rustix::fs::OFlags;
use rustix::io::Errno;
use ubtrfs_engine::{Inode, InodeId, Reservation, SetAttributes};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::Time;

use crate::abi::{self, AttrOut, StatxOut, StatxTime, fattr};
use crate::errno::errno;
use crate::files::UsedFile;
use crate::message::{Answer, Request, Result};
use crate::ops::xattrs::CAPABILITY;
use crate::server::{Server, Shown, offset};
use crate::tail::{By, Growth};

const SET_UID: u32 = 0o4000;
const SET_GID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o10;
/// STATX_BASIC_STATS and STATX_BTIME.
const STATX_BASIC_AND_BIRTH: u32 = 0xfff;
/// What the kernel sets with `-o writeback` where it has written.
const OF_WRITES: u32 = fattr::MTIME | fattr::CTIME | fattr::FH;
/// chown(2) that names neither user nor group, with which the kernel leaves it to us to take away rights that a file gives who runs it. With
/// `-o writeback` it says when that was.
const OF_NO_CHANGE: u32 = fattr::CTIME | fattr::FH | fattr::LOCKOWNER | fattr::KILL_SUIDGID;
/// Items that a change of attributes changes at most: the inode, and access control lists.
const ATTRIBUTE_ITEMS: u64 = 3;
/// An access is noted after so long in any case.
const DAY_SECONDS: i64 = 24 * 60 * 60;

impl Server {
    pub(crate) fn getattr(&self, id: InodeId, answer: &mut Answer) -> Result {
        let Shown { attr, valid_seconds, .. } = self.shown(id)?;
        answer.put(&AttrOut { attr_valid: valid_seconds, attr, ..AttrOut::default() });
        Ok(())
    }

    pub(crate) fn statx(&self, id: InodeId, answer: &mut Answer) -> Result {
        let Shown { attr, valid_seconds, inode } = self.shown(id)?;
        let time = |time: Time| StatxTime { sec: time.sec, nsec: time.nsec, reserved: 0 };
        let (rdev_major, rdev_minor) = inode.device();
        answer.put(&StatxOut {
            attr_valid: valid_seconds,
            mask: STATX_BASIC_AND_BIRTH,
            blksize: attr.blksize,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            mode: u16::try_from(attr.mode & 0xffff).unwrap_or(0),
            ino: attr.ino,
            size: attr.size,
            blocks: attr.blocks,
            atime: time(inode.atime),
            btime: time(inode.otime),
            ctime: time(inode.ctime),
            mtime: time(inode.mtime),
            rdev_major,
            rdev_minor,
            ..StatxOut::default()
        });
        Ok(())
    }

    pub(crate) fn setattr(
        &self,
        id: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let new: abi::SetattrIn = request.take()?;
        let has = |bit: u32| new.valid & bit != 0;
        if has(fattr::SIZE) {
            let size = match has(fattr::FH) {
                true => self.ends.cut(id, new.size, request.header.pid),
                false => new.size,
            };
            let (file, size) = (self.file(id)?, offset(size)?);
            file.check_changeable()?;
            if has(fattr::KILL_SUIDGID) {
                self.drop_privileges(id)?;
            }
            self.drop_capabilities(id)?;
            // A page that was written whole may lie on the end then.
            self.note_cached(id, size.bytes());
            let growth = Growth { from: size.bytes(), by: By::Change };
            // With ftruncate(2) and O_TRUNC the times move in any case. The latter looks like truncate(2).
            let change = || match has(fattr::FH) || size == FileOffset::ZERO {
                true => file.data.truncate(size),
                false => file.data.resize(size),
            };
            let cut = self.growing(id, &file, Some(growth), answer, |_| change());
            if cut.is_err() {
                // Where it ends is in memory only, and some of it may be what it was before, or zero.
                file.note_written();
                self.forget_data_later(id);
            }
            cut.map_err(|error| errno(&error))?;
        }
        let now = self.now();
        let time = |bit: u32, now_bit: u32, sec: u64, nsec: u32| match has(bit) {
            true if has(now_bit) => Some(now),
            true => Some(Time { sec: i64::from_ne_bytes(sec.to_ne_bytes()), nsec }),
            false => None,
        };
        let mut attributes = SetAttributes {
            mode: has(fattr::MODE).then_some(new.mode),
            uid: has(fattr::UID).then_some(new.uid),
            gid: has(fattr::GID).then_some(new.gid),
            atime: time(fattr::ATIME, fattr::ATIME_NOW, new.atime, new.atimensec),
            mtime: time(fattr::MTIME, fattr::MTIME_NOW, new.mtime, new.mtimensec),
            ctime: time(fattr::CTIME, 0, new.ctime, new.ctimensec),
            ..SetAttributes::default()
        };
        let is_bare = new.valid & !OF_NO_CHANGE == 0;
        if has(fattr::UID) || has(fattr::GID) || is_bare {
            let inode = self.inode(id)?;
            if !is_bare && inode.flags & (flags::APPEND | flags::IMMUTABLE) != 0 {
                return Err(Errno::PERM);
            }
            if attributes.mode.is_none() {
                attributes.mode = mode_without_privileges(&inode);
            }
            self.drop_capabilities(id)?;
        }
        if self.options.writeback
            && let (Some(mtime), Some(file)) = (attributes.mtime, self.files.find(id))
        {
            file.note_times(mtime, attributes.ctime.unwrap_or(now));
        }
        let is_of_writes = self.options.writeback && new.valid & !OF_WRITES == 0;
        if is_bare || is_of_writes || self.is_touch_of_append_only(id, &new)? {
            self.set_whatever_flags(id, attributes)?;
        } else if attributes != SetAttributes::default() {
            self.set_attributes(id, &attributes)?;
        }
        self.getattr(id, answer)
    }

    /// What the flags APPEND and IMMUTABLE do not forbid: what the kernel says with `-o writeback` of when what it held back was written, and
    /// that rights go with a write.
    fn set_whatever_flags(&self, id: InodeId, mut attributes: SetAttributes) -> Result {
        let _lock = self.flags.lock();
        let bits = self.inode(id)?.flags;
        attributes.flags = (bits & (flags::APPEND | flags::IMMUTABLE) != 0).then_some(bits);
        self.set_attributes(id, &attributes)
    }

    /// Both times become now, and nothing else is asked for: that is no change which the flag APPEND forbids.
    fn is_touch_of_append_only(&self, id: InodeId, new: &abi::SetattrIn) -> Result<bool> {
        const BOTH: u32 = fattr::ATIME | fattr::ATIME_NOW | fattr::MTIME;
        let is_written_now = new.valid & fattr::MTIME_NOW != 0
            // With `-o writeback` the kernel says which time is now.
            || new.valid & fattr::CTIME != 0
                && (new.mtime, new.mtimensec) == (new.ctime, new.ctimensec);
        let others = new.valid & !(BOTH | fattr::MTIME_NOW | OF_NO_CHANGE);
        if new.valid & BOTH != BOTH || !is_written_now || others != 0 {
            return Ok(false);
        }
        let bits = self.inode(id)?.flags;
        Ok(bits & flags::APPEND != 0 && bits & flags::IMMUTABLE == 0)
    }

    /// Data of a file has changed as the kernel asked. With `-o writeback` it may have said before when that was, and not say it again: its
    /// request for times goes past those for data that wait, and within a tick of its clock all is at one time. What is wrong with that is nothing
    /// wrong with the data.
    pub(crate) fn keep_times_of_writes(&self, id: InodeId, file: &UsedFile) {
        let Some((mtime, ctime)) = file.times() else { return };
        let times = SetAttributes { mtime: Some(mtime), ctime: Some(ctime), ..Default::default() };
        let _ = self.set_whatever_flags(id, times);
    }

    pub(crate) fn set_attributes(&self, id: InodeId, attributes: &SetAttributes) -> Result {
        self.fs
            .begin(Reservation::items(ATTRIBUTE_ITEMS))
            .and_then(|mut handle| handle.set_attributes(id, attributes))
            .map_err(|error| errno(&error))
    }

    /// It is read by who has it open with these flags: notes so as `relatime` of Linux does. What cannot be noted is read all the same.
    pub(crate) fn note_access(&self, id: InodeId, open_flags: u32) {
        if open_flags & OFlags::NOATIME.bits() != 0 {
            return;
        }
        let (Ok(inode), now) = (self.inode(id), self.now()) else { return };
        if inode.flags & flags::NOATIME != 0 {
            return;
        }
        let is_old = now.sec.saturating_sub(inode.atime.sec) >= DAY_SECONDS;
        let is_due = is_old || inode.atime <= inode.mtime || inode.atime <= inode.ctime;
        if !is_due || self.fs.check_subvolume_writable(id.root).is_err() {
            return;
        }
        // The mount may have become so.
        if !self.device().is_some_and(|device| self.read_only_watch.lock().is_read_only(device)) {
            let handle = self.fs.begin(Reservation::items(1));
            let _ = handle.and_then(|mut handle| handle.set_access_time(id, now));
        }
    }

    /// Who writes to a file that runs with its owner's rights takes those from it.
    pub(crate) fn drop_privileges(&self, id: InodeId) -> Result {
        match mode_without_privileges(&self.inode(id)?) {
            None => Ok(()),
            mode => {
                self.set_whatever_flags(id, SetAttributes { mode, ..SetAttributes::default() })?;
                // Or it would go on to run it so.
                self.forget_attributes(id);
                Ok(())
            }
        }
    }

    /// Also the capabilities, which the kernel leaves to us to look for.
    pub(crate) fn drop_capabilities(&self, id: InodeId) -> Result {
        let file = self.files.find(id);
        if file.as_ref().is_some_and(|file| !file.may_have_capabilities()) {
            return Ok(());
        }
        // Before the look: who gives it some notes that after they are there.
        if let Some(file) = &file {
            file.note_without_capabilities();
        }
        let removed = match self.fs.xattr(id, CAPABILITY).map_err(|error| errno(&error)) {
            Ok(None) => Ok(()),
            Ok(Some(_)) => match self.remove_capabilities(id) {
                // Others write, too.
                Err(Errno::NODATA) => Ok(()),
                removed => removed,
            },
            Err(error) => Err(error),
        };
        if let (Err(_), Some(file)) = (removed, &file) {
            file.note_capabilities();
        }
        removed
    }

    /// An attribute is about to be set.
    pub(crate) fn note_new_xattr(&self, id: InodeId, name: &[u8]) {
        if name == CAPABILITY
            && let Some(file) = self.files.find(id)
        {
            file.note_capabilities();
        }
    }

    pub(crate) fn statfs(&self, id: InodeId, answer: &mut Answer) -> Result {
        let found = self.fs.statfs(id.root).map_err(|error| errno(&error))?;
        let block_bytes = u32::try_from(found.block_bytes).unwrap_or(4096);
        answer.put(&abi::StatfsOut {
            blocks: found.blocks,
            bfree: found.blocks_free,
            bavail: found.blocks_available,
            bsize: block_bytes,
            frsize: block_bytes,
            namelen: found.name_bytes_max,
            ..abi::StatfsOut::default()
        });
        Ok(())
    }
}

impl Server {
    /// As [`Server::drop_privileges`], for operations with which the kernel does not say whether the caller may keep them.
    pub(crate) fn drop_privileges_unless_root(&self, id: InodeId, uid: u32) -> Result {
        if uid == 0 { Ok(()) } else { self.drop_privileges(id) }
    }

    /// Somebody outside of the file's group gives it an access control list.
    pub(crate) fn drop_set_gid(&self, id: InodeId) -> Result {
        let mode = self.inode(id)?.mode;
        if mode & SET_GID == 0 {
            return Ok(());
        }
        let mode = Some(mode & !SET_GID);
        self.set_attributes(id, &SetAttributes { mode, ..SetAttributes::default() })?;
        self.forget_attributes(id);
        Ok(())
    }
}

/// The mode of what is no directory without the bits by which it runs with other rights; `None` if it has none of them.
fn mode_without_privileges(inode: &Inode) -> Option<u32> {
    let mut gone = inode.mode & SET_UID;
    if inode.mode & GROUP_EXECUTE != 0 {
        gone |= inode.mode & SET_GID;
    }
    // Of a directory they say what is made in it.
    let has_some = gone != 0 && !inode.is_dir();
    has_some.then_some(inode.mode & !gone)
}
