//! Inode flags, as `lsattr` and `chattr` use them.

use rustix::io::Errno;
use ubtrfs_engine::{InodeId, SetAttributes};
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::inode::flags;

use crate::abi;
use crate::message::{Answer, Request, Result};
use crate::server::Server;

/// Numbers of requests, from `linux/fs.h`.
const GET_FLAGS: u32 = 0x8008_6601;
const SET_FLAGS: u32 = 0x4008_6602;
const GET_XFLAGS: u32 = 0x801c_581f;
/// The bytes of `struct fsxattr`.
const XFLAGS_BYTES: usize = 28;

/// A flag of `linux/fs.h` in both of its forms (0 where it has none), and that of the inode.
const FLAGS: [(u32, u32, u64); 9] = [
    (0x4, 0, flags::COMPRESS),
    (0x8, 0x20, flags::SYNC),
    (0x10, 0x8, flags::IMMUTABLE),
    (0x20, 0x10, flags::APPEND),
    (0x40, 0x80, flags::NODUMP),
    (0x80, 0x40, flags::NOATIME),
    (0x400, 0, flags::NOCOMPRESS),
    (0x1_0000, 0, flags::DIRSYNC),
    (0x80_0000, 0, flags::NODATACOW),
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
                self.set_flags(id, asked)?;
                answer.put(&abi::IoctlOut::default());
                Ok(())
            }
            _ => Err(Errno::NOTTY),
        }
    }

    fn set_flags(&self, id: InodeId, asked: u32) -> Result {
        let known: u32 = FLAGS.iter().map(|(flag, _, _)| flag).sum();
        if asked & !known != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let inode = self.inode(id)?;
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
        self.set_attributes(id, &SetAttributes { flags: Some(new), ..SetAttributes::default() })?;
        self.forget_attributes(id);
        if let Some(file) = self.files.find(id) {
            file.note_flags(new);
        }
        Ok(())
    }
}

fn shown(bits: u64, form: impl Fn(&(u32, u32, u64)) -> u32) -> u32 {
    FLAGS.iter().filter(|(_, _, bit)| bits & bit != 0).map(form).sum()
}
