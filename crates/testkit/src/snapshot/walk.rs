//! Snapshots of directories that the system can see.
//!
//! Walks by directory descriptors, so that paths may be longer than the system takes in one call.
//! Leaves no trace in times of last read, where it may: not on symbolic links, which need a mount with
//! `noatime` or `ro` for that.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, Mode, OFlags, SeekFrom, Statx, StatxFlags, StatxTimestamp};
use rustix::io::Errno;

use super::{
    ContentHash, Entry, Kind, Timestamp, TreeBuilder, TreeSnapshot, hash_content, normal_ranges,
};
use crate::run::run;

const BTRFS_MAGIC: u64 = 0x9123_683E;
/// The inode that each subvolume's root directory has.
const SUBVOLUME_ROOT_INODE: u64 = 256;
/// The inode of the empty directory that stands, in a snapshot, for a subvolume that lay in what
/// was snapshotted.
const STUB_INODE: u64 = 2;

impl TreeSnapshot {
    /// Takes a snapshot of a directory and all below it, other filesystems left out.
    ///
    /// # Panics
    /// If something cannot be read.
    pub fn of_directory(directory: &Path) -> Self {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(directory, flags, Mode::empty())
            .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        let stat = rustix::fs::fstatfs(&root).expect("an open directory can be asked");
        let is_btrfs = u64::try_from(stat.f_type).is_ok_and(|magic| magic == BTRFS_MAGIC);
        let mut walk = Walk { builder: TreeBuilder::new(), is_btrfs, device: None };
        walk.entry(root.as_fd(), c".", Vec::new());
        walk.builder.finish()
    }
}

struct Walk {
    builder: TreeBuilder,
    is_btrfs: bool,
    /// Of the root, elsewhere than on btrfs, whose subvolumes have devices of their own.
    device: Option<(u32, u32)>,
}

impl Walk {
    fn entry(&mut self, parent: BorrowedFd<'_>, name: &CStr, path: Vec<u8>) {
        let fail = |error: Errno| -> ! { panic!("{}: {error}", path.escape_ascii()) };
        let stat = rustix::fs::statx(
            parent,
            name,
            AtFlags::SYMLINK_NOFOLLOW,
            StatxFlags::BASIC_STATS | StatxFlags::BTIME,
        )
        .unwrap_or_else(|error| fail(error));
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        if !self.is_btrfs && *self.device.get_or_insert(device) != device {
            return;
        }
        let kind = Kind::of_mode(u32::from(stat.stx_mode)).expect("a known type of file");
        let mut entry = entry_of_stat(kind, &stat);
        let opened = match kind {
            Kind::File | Kind::Directory => {
                Some(open(parent, name).unwrap_or_else(|error| fail(error)))
            }
            _ => None,
        };
        entry.xattrs = Some(xattrs(parent, name, opened.as_ref()).unwrap_or_else(|e| fail(e)));
        if kind == Kind::Symlink {
            let target = rustix::fs::readlinkat(parent, name, Vec::new())
                .unwrap_or_else(|error| fail(error));
            entry.target = Some(target.into_bytes());
        }
        if let (Kind::File, Some(file)) = (kind, &opened) {
            let (data, content) = contents(file, stat.stx_size).unwrap_or_else(|error| fail(error));
            entry.data = Some(data);
            entry.content = Some(content);
        }
        entry.subvolume = self.subvolume(&entry, opened.as_ref());
        if self.is_btrfs && kind == Kind::Directory && stat.stx_ino == STUB_INODE {
            // Made up by the kernel when it is looked at.
            (entry.mtime, entry.ctime, entry.atime, entry.btime) = (None, None, None, None);
        }
        let identity = (u64::from(device.0) << 32 | u64::from(device.1), stat.stx_ino);
        self.builder.add(path.clone(), identity, entry);
        if let (Kind::Directory, Some(directory)) = (kind, opened) {
            self.children(&directory, &path);
        }
    }

    fn children(&mut self, directory: &OwnedFd, path: &[u8]) {
        let mut names: Vec<CString> = Vec::new();
        for entry in Dir::read_from(directory).expect("an open directory can be read") {
            let entry = entry.unwrap_or_else(|error| panic!("{}: {error}", path.escape_ascii()));
            if entry.file_name() != c"." && entry.file_name() != c".." {
                names.push(entry.file_name().to_owned());
            }
        }
        names.sort();
        for name in names {
            let mut below = path.to_vec();
            if !below.is_empty() {
                below.push(b'/');
            }
            below.extend_from_slice(name.to_bytes());
            self.entry(directory.as_fd(), &name, below);
        }
    }

    fn subvolume(&self, entry: &Entry, opened: Option<&OwnedFd>) -> Option<u64> {
        if !self.is_btrfs {
            return None;
        }
        match (entry.kind, entry.inode, opened) {
            (Kind::Directory, Some(SUBVOLUME_ROOT_INODE), Some(directory)) => {
                let path = format!("/proc/{}/fd/{}/.", std::process::id(), directory.as_raw_fd());
                let id = run("btrfs", ["inspect-internal", "rootid", &path]);
                Some(id.trim().parse().expect("a number"))
            }
            _ => Some(0),
        }
    }
}

fn entry_of_stat(kind: Kind, stat: &Statx) -> Entry {
    let mut entry = Entry::new(kind, u32::from(stat.stx_mode), stat.stx_uid, stat.stx_gid);
    entry.nlink = Some(stat.stx_nlink);
    entry.size_bytes = Some(stat.stx_size);
    entry.mtime = Some(timestamp(stat.stx_mtime));
    entry.ctime = Some(timestamp(stat.stx_ctime));
    entry.atime = Some(timestamp(stat.stx_atime));
    entry.btime =
        (stat.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| timestamp(stat.stx_btime));
    if matches!(kind, Kind::CharDevice | Kind::BlockDevice) {
        entry.rdev = Some((stat.stx_rdev_major, stat.stx_rdev_minor));
    }
    entry.inode = Some(stat.stx_ino);
    entry
}

fn timestamp(time: StatxTimestamp) -> Timestamp {
    Timestamp { sec: time.tv_sec, nsec: time.tv_nsec }
}

fn open(parent: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(parent, name, flags | OFlags::NOATIME, Mode::empty()) {
        // Only the owner may ask for that.
        Err(Errno::PERM) => rustix::fs::openat(parent, name, flags, Mode::empty()),
        opened => opened,
    }
}

fn xattrs(
    parent: BorrowedFd<'_>,
    name: &CStr,
    opened: Option<&OwnedFd>,
) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, Errno> {
    let path =
        [format!("/proc/self/fd/{}/", parent.as_raw_fd()).into_bytes(), name.to_bytes().to_vec()]
            .concat();
    let mut names = vec![0; 1 << 16];
    let len = match opened {
        Some(file) => rustix::fs::flistxattr(file, &mut names[..]),
        None => rustix::fs::llistxattr(&path[..], &mut names[..]),
    };
    let len = match len {
        Err(Errno::NOTSUP) => 0,
        len => len?,
    };
    let mut found = BTreeMap::new();
    for name in names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0; 1 << 16];
        let len = match opened {
            Some(file) => rustix::fs::fgetxattr(file, name, &mut value[..]),
            None => rustix::fs::lgetxattr(&path[..], name, &mut value[..]),
        }?;
        value.truncate(len);
        found.insert(name.to_vec(), value);
    }
    Ok(found)
}

fn contents(file: &OwnedFd, size: u64) -> Result<(Vec<Range<u64>>, ContentHash), Errno> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => break,
            start => start?,
        };
        at = rustix::fs::seek(file, SeekFrom::Hole(start))?;
        ranges.push(start..at);
    }
    let data = normal_ranges(ranges, size);
    let content = hash_content(size, &data, |mut offset, mut buffer: &mut [u8]| {
        while !buffer.is_empty() {
            let read = rustix::io::pread(file, &mut *buffer, offset)?;
            if read == 0 {
                return Err(Errno::IO);
            }
            buffer = &mut buffer[read..];
            offset += u64::try_from(read).expect("a length fits");
        }
        Ok(())
    })?;
    Ok((data, content))
}
