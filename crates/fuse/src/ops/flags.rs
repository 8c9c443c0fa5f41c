//! Inode flags, as `lsattr` and `chattr` use them, and what else is told of an inode so.

use rustix::io::Errno;
use ubtrfs_engine::{InodeId, Method, Reservation, SetAttributes};
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;

use crate::abi::{self, InHeader, opcode};
use crate::errno::errno;
use crate::message::{Answer, Request, Result};
use crate::notify::Patience;
use crate::server::Server;

/// Numbers of requests, from `linux/fs.h`.
const GET_FLAGS: u32 = 0x8008_6601;
const SET_FLAGS: u32 = 0x4008_6602;
const GET_VERSION: u32 = 0x8008_7601;
const GET_XFLAGS: u32 = 0x801c_581f;
const SET_XFLAGS: u32 = 0x401c_5820;
/// The bytes of `struct fsxattr`.
const XFLAGS_BYTES: usize = 28;

const COMPRESS: u32 = 0x4;
const IMMUTABLE: u32 = 0x10;
const APPEND: u32 = 0x20;
const NODUMP: u32 = 0x40;
const NOATIME: u32 = 0x80;
const NOCOMPRESS: u32 = 0x400;
const DIRSYNC: u32 = 0x1_0000;
const NODATACOW: u32 = 0x80_0000;

const COMPRESSION: &[u8] = b"btrfs.compression";
/// Items that a change of flags changes at most: the inode, the property, access control lists.
const FLAGS_ITEMS: u64 = 4;

/// A flag of `linux/fs.h` in both of its forms (0 where it has none), and that of the inode.
const FLAGS: [(u32, u32, u64); 9] = [
    (COMPRESS, 0, flags::COMPRESS),
    (0x8, 0x20, flags::SYNC),
    (IMMUTABLE, 0x8, flags::IMMUTABLE),
    (APPEND, 0x10, flags::APPEND),
    (NODUMP, 0x80, flags::NODUMP),
    (NOATIME, 0x40, flags::NOATIME),
    (NOCOMPRESS, 0, flags::NOCOMPRESS),
    (DIRSYNC, 0, flags::DIRSYNC),
    (NODATACOW, 0, flags::NODATACOW),
];

impl Server {
    pub(crate) fn ioctl(
        &self,
        id: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::IoctlIn = request.take()?;
        match wanted.cmd {
            GET_FLAGS => {
                let shown = shown(self.inode(id)?.flags, |(flag, _, _)| *flag);
                answer.put(&abi::IoctlOut::default());
                // The number says a long; a flag word is what is there.
                answer.put_bytes(&shown.to_ne_bytes());
                answer.put_bytes(&[0; 4][..usize::from(wanted.out_size > 4) * 4]);
                Ok(())
            }
            GET_VERSION => {
                let generation = self.inode(id)?.generation.0;
                let shown = u32::try_from(generation & u64::from(u32::MAX)).expect("32 bits");
                answer.put(&abi::IoctlOut::default());
                // The number says a long; btrfs writes an int, and there may be no room for more.
                answer.put_bytes(&shown.to_ne_bytes());
                Ok(())
            }
            GET_XFLAGS => {
                let shown = shown(self.inode(id)?.flags, |(_, xflag, _)| *xflag);
                let mut bytes = [0; XFLAGS_BYTES];
                bytes[..4].copy_from_slice(&shown.to_ne_bytes());
                answer.put(&abi::IoctlOut::default());
                answer.put_bytes(&bytes);
                Ok(())
            }
            SET_FLAGS => {
                let asked: u32 = request.take()?;
                self.check_may_set(id, &request.header, wanted.cmd, asked)?;
                self.bring_back_before(id, asked, answer.patience())?;
                let lock = self.flags.lock();
                self.set_flags(id, asked, Form::Words)?;
                drop(lock);
                self.forget_attributes(id);
                answer.put(&abi::IoctlOut::default());
                // It is one, too.
                self.settle(id, opcode::SETATTR)
            }
            SET_XFLAGS => {
                let [xflags, extent_size_hint]: [u32; 2] = request.take()?;
                let [_extent_count, project, copy_hint]: [u32; 3] = request.take()?;
                let known: u32 = FLAGS.iter().map(|(_, xflag, _)| xflag).sum();
                if xflags & !known != 0 || [extent_size_hint, project, copy_hint] != [0; 3] {
                    return Err(Errno::OPNOTSUPP);
                }
                let set = words(xflags);
                self.check_may_set(id, &request.header, wanted.cmd, set)?;
                self.bring_back_before(id, set, answer.patience())?;
                let lock = self.flags.lock();
                // Those that this form does not know stay.
                let kept = shown(self.inode(id)?.flags, |(flag, xflag, _)| match xflag {
                    0 => *flag,
                    _ => 0,
                });
                self.set_flags(id, kept | set, Form::Xfs)?;
                drop(lock);
                self.forget_attributes(id);
                answer.put(&abi::IoctlOut::default());
                // It is one, too.
                self.settle(id, opcode::SETATTR)
            }
            other => self.subvolume_ioctl(id, other, request, answer),
        }
    }

    /// Refuses what the kernel refuses before it asks here, where it does not look at that.
    fn check_may_set(&self, id: InodeId, header: &InHeader, command: u32, asked: u32) -> Result {
        if !self.leaves_flags_to_us() {
            return Ok(());
        }
        if self.is_read_only_to(header, command) {
            return Err(Errno::ROFS);
        }
        let inode = self.inode(id)?;
        let has = shown(inode.flags, |(flag, _, _)| *flag);
        let is_for_root = (has ^ asked) & (IMMUTABLE | APPEND) != 0;
        match self.owner(header) {
            (0, _) => Ok(()),
            (uid, _) if uid == inode.uid && !is_for_root => Ok(()),
            _ => Err(Errno::PERM),
        }
    }

    /// Has the kernel write what it holds of a file that is about to be closed to changes: it is refused then.
    fn bring_back_before(&self, id: InodeId, asked: u32, patience: Patience) -> Result {
        if self.is_closed_by(id, asked)? { self.bring_back_file(id, patience) } else { Ok(()) }
    }

    /// Whether a request closes a file to changes, of which the kernel may hold something that it writes before.
    pub(crate) fn closes_file(&self, id: InodeId, command: u32, mut request: Request<'_>) -> bool {
        let asked = match command {
            SET_FLAGS => request.take().ok(),
            SET_XFLAGS => request.take().ok().map(words),
            _ => None,
        };
        asked.is_some_and(|asked| self.is_closed_by(id, asked) == Ok(true))
    }

    fn is_closed_by(&self, id: InodeId, asked: u32) -> Result<bool> {
        let inode = self.inode(id)?;
        let is_closed = FLAGS.iter().any(|(flag, _, bit)| {
            const FORBID: u64 = flags::IMMUTABLE | flags::APPEND;
            asked & flag != 0 && bit & FORBID & !inode.flags != 0
        });
        Ok(is_closed && inode.file_type() == FileType::Regular)
    }

    /// The kernel is to be told when nobody waits for it any more with the lock on flags.
    fn set_flags(&self, id: InodeId, asked: u32, form: Form) -> Result {
        let inode = self.inode(id)?;
        let asked = asked & possible(inode.file_type());
        let known: u32 = FLAGS.iter().map(|(flag, _, _)| flag).sum();
        if asked & !known != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let old = inode.flags;
        let mut new = FLAGS.iter().fold(old, |bits, (flag, _, bit)| match asked & flag {
            0 => bits & !bit,
            _ => bits | bit,
        });
        if inode.file_type() == FileType::Regular {
            // Without copy-on-write there are no checksums; both can change while there is no data, and do not after.
            const BOTH: u64 = flags::NODATACOW | flags::NODATASUM;
            new = match inode.size_bytes {
                0 if new & flags::NODATACOW != 0 => new | BOTH,
                0 if old & flags::NODATACOW != 0 => new & !BOTH,
                0 => new,
                _ => new & !flags::NODATACOW | old & flags::NODATACOW,
            };
        }
        if form == Form::Words {
            check_compression(old, asked)?;
        }
        const COMPRESSION_BITS: u64 = flags::COMPRESS | flags::NOCOMPRESS;
        let property = match new & COMPRESSION_BITS {
            bits if bits == old & COMPRESSION_BITS => Property::Stays,
            flags::COMPRESS => Property::Set,
            _ => Property::Removed,
        };
        self.change_flags(id, new, property).map_err(|error| errno(&error))?;
        self.note_syncs(new);
        if let Some(file) = self.files.find(id) {
            file.note_flags(new);
        }
        Ok(())
    }
}

impl Server {
    /// The flags, and the property of compression that goes with them, all or none.
    fn change_flags(&self, id: InodeId, new: u64, property: Property) -> ubtrfs_engine::Result<()> {
        let has_property = self.fs.xattr(id, COMPRESSION)?.is_some();
        let mut handle = self.fs.begin(Reservation::items(FLAGS_ITEMS))?;
        let with = |flags| SetAttributes { flags: Some(flags), ..SetAttributes::default() };
        if property != Property::Stays {
            // Which forbid to change the property, and not the flags.
            handle.set_attributes(id, &with(new & !(flags::IMMUTABLE | flags::APPEND)))?;
        }
        match property {
            Property::Set => {
                let method = self.fs.compression().map_or("zlib", name_of);
                handle.set_xattr(id, COMPRESSION, method.as_bytes())?;
            }
            Property::Removed if has_property => handle.remove_xattr(id, COMPRESSION)?,
            Property::Removed | Property::Stays => {}
        }
        handle.set_attributes(id, &with(new))
    }
}

/// The request by which flags are set. That of xfs knows none of compression and copy-on-write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Words,
    Xfs,
}

/// What becomes of the property that names the compression.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Property {
    Set,
    Removed,
    Stays,
}

/// As Linux writes it into the property.
fn name_of(method: Method) -> &'static str {
    match method.compression {
        Compression::Lzo => "lzo",
        Compression::Zstd => "zstd",
        Compression::Zlib | Compression::None => "zlib",
    }
}

/// The flags that an inode can have; others Linux leaves out, whatever is asked for.
fn possible(file_type: FileType) -> u32 {
    match file_type {
        FileType::Directory => u32::MAX,
        FileType::Regular => !DIRSYNC,
        _ => NODUMP | NOATIME,
    }
}

/// Flags in the form of xfs as words have them.
fn words(xflags: u32) -> u32 {
    FLAGS.iter().filter(|(_, xflag, _)| xflags & xflag != 0).map(|(flag, _, _)| flag).sum()
}

/// Refuses flags that contradict each other, or what the inode has.
fn check_compression(old: u64, asked: u32) -> Result {
    const BOTH: u32 = COMPRESS | NOCOMPRESS;
    let was_in_place = old & flags::NODATACOW != 0;
    let had_compression = old & (flags::COMPRESS | flags::NOCOMPRESS) != 0;
    let contradicts = asked & BOTH == BOTH
        || asked & COMPRESS != 0 && asked & NODATACOW != 0
        || was_in_place && asked & BOTH != 0
        || asked & NODATACOW != 0 && had_compression;
    if contradicts { Err(Errno::INVAL) } else { Ok(()) }
}

fn shown(bits: u64, form: impl Fn(&(u32, u32, u64)) -> u32) -> u32 {
    FLAGS.iter().filter(|(_, _, bit)| bits & bit != 0).map(form).sum()
}
