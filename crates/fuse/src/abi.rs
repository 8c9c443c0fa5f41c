//! The kernel's protocol: messages as they lie in memory, in the machine's byte order.
//!
//! Source: `linux/fuse.h` of the user-space headers (version 7.38; STATX from 7.39), whose names these are without their prefix.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The version of the protocol that is spoken here; what the kernel has beyond it, it leaves out.
pub(crate) const MAJOR: u32 = 7;
pub(crate) const MINOR: u32 = 39;

/// The node that is mounted.
pub(crate) const ROOT_NODE: u64 = 1;

/// Operations, as in a request's header.
pub(crate) mod opcode {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const READLINK: u32 = 5;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const SETXATTR: u32 = 21;
    pub(crate) const GETXATTR: u32 = 22;
    pub(crate) const LISTXATTR: u32 = 23;
    pub(crate) const REMOVEXATTR: u32 = 24;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const IOCTL: u32 = 39;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const READDIRPLUS: u32 = 44;
    pub(crate) const RENAME2: u32 = 45;
    pub(crate) const LSEEK: u32 = 46;
    pub(crate) const COPY_FILE_RANGE: u32 = 47;
    pub(crate) const SYNCFS: u32 = 50;
    pub(crate) const TMPFILE: u32 = 51;
    pub(crate) const STATX: u32 = 52;
}

/// What both sides can, in INIT.
pub(crate) mod init {
    pub(crate) const ASYNC_READ: u32 = 1;
    pub(crate) const BIG_WRITES: u32 = 1 << 5;
    pub(crate) const DONT_MASK: u32 = 1 << 6;
    pub(crate) const HAS_IOCTL_DIR: u32 = 1 << 11;
    pub(crate) const DO_READDIRPLUS: u32 = 1 << 13;
    pub(crate) const READDIRPLUS_AUTO: u32 = 1 << 14;
    pub(crate) const WRITEBACK_CACHE: u32 = 1 << 16;
    pub(crate) const PARALLEL_DIROPS: u32 = 1 << 18;
    pub(crate) const POSIX_ACL: u32 = 1 << 20;
    pub(crate) const MAX_PAGES: u32 = 1 << 22;
    pub(crate) const CACHE_SYMLINKS: u32 = 1 << 23;
    pub(crate) const HANDLE_KILLPRIV_V2: u32 = 1 << 28;
    pub(crate) const SETXATTR_EXT: u32 = 1 << 29;
    /// There are more flags.
    pub(crate) const EXT: u32 = 1 << 30;
    /// Of these: requests can come by io_uring.
    pub(crate) const OVER_IO_URING: u32 = 1 << 9;
}

/// Which attributes SETATTR sets.
pub(crate) mod fattr {
    pub(crate) const MODE: u32 = 1;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const FH: u32 = 1 << 6;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
    pub(crate) const LOCKOWNER: u32 = 1 << 9;
    pub(crate) const CTIME: u32 = 1 << 10;
    pub(crate) const KILL_SUIDGID: u32 = 1 << 11;
}

/// How the kernel treats what is opened.
pub(crate) mod fopen {
    pub(crate) const KEEP_CACHE: u32 = 1 << 1;
    pub(crate) const NOFLUSH: u32 = 1 << 5;
}

/// Of WRITE: from the kernel's cache, as a map of the file was stored to.
pub(crate) const WRITE_CACHE: u32 = 1;
/// Of WRITE.
pub(crate) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// Of SETXATTR.
pub(crate) const SETXATTR_ACL_KILL_SGID: u32 = 1;
/// In the place of an error, in what is sent without having been asked for: what the kernel knows of an inode is old.
pub(crate) const NOTIFY_INVAL_INODE: i32 = 2;
/// Likewise: a name may mean something else.
pub(crate) const NOTIFY_INVAL_ENTRY: i32 = 3;
/// Likewise: bytes for its memory of a file.
pub(crate) const NOTIFY_STORE: i32 = 4;
/// Likewise: what a name meant is gone.
pub(crate) const NOTIFY_DELETE: i32 = 6;

macro_rules! message {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $ty:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub(crate) struct $name {
            $(pub(crate) $field: $ty,)*
        }
    )*};
}

message! {
    /// In front of each request.
    InHeader {
        len: u32,
        opcode: u32,
        unique: u64,
        node: u64,
        uid: u32,
        gid: u32,
        pid: u32,
        total_extlen: u16,
        padding: u16,
    }
    /// In front of each answer.
    OutHeader { len: u32, error: i32, unique: u64, }
    Attr {
        ino: u64,
        size: u64,
        blocks: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        nlink: u32,
        uid: u32,
        gid: u32,
        rdev: u32,
        blksize: u32,
        flags: u32,
    }
    EntryOut {
        node: u64,
        generation: u64,
        entry_valid: u64,
        attr_valid: u64,
        entry_valid_nsec: u32,
        attr_valid_nsec: u32,
        attr: Attr,
    }
    AttrOut { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr, }
    InitIn { major: u32, minor: u32, max_readahead: u32, flags: u32, }
    /// Behind it, where the kernel says EXT.
    InitInExt { flags2: u32, unused: [u32; 11], }
    InitOut {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u32,
        max_background: u16,
        congestion_threshold: u16,
        max_write: u32,
        time_gran: u32,
        max_pages: u16,
        map_alignment: u16,
        flags2: u32,
        unused: [u32; 7],
    }
    ForgetIn { count: u64, }
    ForgetOne { node: u64, count: u64, }
    BatchForgetIn { count: u32, dummy: u32, }
    SetattrIn {
        valid: u32,
        padding: u32,
        fh: u64,
        size: u64,
        lock_owner: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        unused4: u32,
        uid: u32,
        gid: u32,
        unused5: u32,
    }
    MknodIn { mode: u32, rdev: u32, umask: u32, padding: u32, }
    MkdirIn { mode: u32, umask: u32, }
    RenameIn { new_dir: u64, }
    Rename2In { new_dir: u64, flags: u32, padding: u32, }
    LinkIn { old_node: u64, }
    CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32, }
    OpenOut { fh: u64, open_flags: u32, padding: u32, }
    ReadIn {
        fh: u64,
        offset: u64,
        size: u32,
        read_flags: u32,
        lock_owner: u64,
        flags: u32,
        padding: u32,
    }
    WriteIn {
        fh: u64,
        offset: u64,
        size: u32,
        write_flags: u32,
        lock_owner: u64,
        flags: u32,
        padding: u32,
    }
    WriteOut { size: u32, padding: u32, }
    StatfsOut {
        blocks: u64,
        bfree: u64,
        bavail: u64,
        files: u64,
        ffree: u64,
        bsize: u32,
        namelen: u32,
        frsize: u32,
        padding: u32,
        spare: [u32; 6],
    }
    SetxattrIn { size: u32, flags: u32, }
    /// Behind it, where both sides can SETXATTR_EXT.
    SetxattrExt { setxattr_flags: u32, padding: u32, }
    /// With an offset below 0 of the attributes only, with 0 and no length all data, too.
    NotifyInvalInode { node: u64, offset: i64, len: i64, }
    /// The bytes follow.
    NotifyStore { node: u64, offset: u64, size: u32, padding: u32, }
    /// The name and a zero follow.
    NotifyInvalEntry { parent: u64, name_len: u32, flags: u32, }
    /// Likewise; of the child's node.
    NotifyDelete { parent: u64, child: u64, name_len: u32, padding: u32, }
    GetxattrIn { size: u32, padding: u32, }
    GetxattrOut { size: u32, padding: u32, }
    IoctlIn { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32, }
    IoctlOut { result: i32, flags: u32, in_iovs: u32, out_iovs: u32, }
    FallocateIn { fh: u64, offset: u64, len: u64, mode: u32, padding: u32, }
    LseekIn { fh: u64, offset: u64, whence: u32, padding: u32, }
    LseekOut { offset: u64, }
    CopyFileRangeIn {
        fh_in: u64,
        offset_in: u64,
        node_out: u64,
        fh_out: u64,
        offset_out: u64,
        len: u64,
        flags: u64,
    }
    /// In front of an entry's name, which zeros fill up to eight bytes.
    Dirent { ino: u64, off: u64, name_len: u32, ty: u32, }
    StatxTime { sec: i64, nsec: u32, reserved: i32, }
    StatxOut {
        attr_valid: u64,
        attr_valid_nsec: u32,
        flags: u32,
        spare: [u64; 2],
        mask: u32,
        blksize: u32,
        attributes: u64,
        nlink: u32,
        uid: u32,
        gid: u32,
        mode: u16,
        spare0: u16,
        ino: u64,
        size: u64,
        blocks: u64,
        attributes_mask: u64,
        atime: StatxTime,
        btime: StatxTime,
        ctime: StatxTime,
        mtime: StatxTime,
        rdev_major: u32,
        rdev_minor: u32,
        dev_major: u32,
        dev_minor: u32,
        spare2: [u64; 14],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes that a C compiler gives the structs of the header.
    #[test]
    fn messages_are_as_long_as_the_kernels() {
        assert_eq!(size_of::<InHeader>(), 40);
        assert_eq!(size_of::<OutHeader>(), 16);
        assert_eq!(size_of::<Attr>(), 88);
        assert_eq!(size_of::<EntryOut>(), 128);
        assert_eq!(size_of::<AttrOut>(), 104);
        assert_eq!(size_of::<InitOut>(), 64);
        assert_eq!(size_of::<SetattrIn>(), 88);
        assert_eq!(size_of::<ReadIn>(), 40);
        assert_eq!(size_of::<WriteIn>(), 40);
        assert_eq!(size_of::<StatfsOut>(), 80);
        assert_eq!(size_of::<IoctlIn>(), 32);
        assert_eq!(size_of::<IoctlOut>(), 16);
        assert_eq!(size_of::<CopyFileRangeIn>(), 56);
        assert_eq!(size_of::<Dirent>(), 24);
        assert_eq!(size_of::<StatxOut>(), 32 + 256);
    }
}
