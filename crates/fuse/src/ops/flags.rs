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
const SET_XFLAGS: u32 = 0x401c_5820;
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
            SET_XFLAGS => {
                let [xflags, extent_size_hint]: [u32; 2] = request.take()?;
                let [_extent_count, project, copy_hint]: [u32; 3] = request.take()?;
                let known: u32 = FLAGS.iter().map(|(_, xflag, _)| xflag).sum();
                if xflags & !known != 0 || [extent_size_hint, project, copy_hint] != [0; 3] {
                    return Err(Errno::OPNOTSUPP);
                }
                // Those that this form does not know stay.
                let kept = shown(self.inode(id)?.flags, |(flag, xflag, _)| match xflag {
                    0 => *flag,
                    _ => 0,
                });
                let set = FLAGS.iter().filter(|(_, xflag, _)| xflags & xflag != 0);
                self.set_flags(id, kept | set.map(|(flag, _, _)| flag).sum::<u32>())?;
                answer.put(&abi::IoctlOut::default());
                Ok(())
            }
            other => self.subvolume_ioctl(id, other, request, answer),
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
