//! What the engine does.

use ubtrfs_engine::{
    Error, Filesystem, Inherit, InodeId, NewInode, RenameMode, Reservation, SetAttributes,
    SnapshotOptions, device_number,
};
use ubtrfs_iomap::Reach;
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::Time;

use crate::operation::{Flag, Node, Operation, Ranges, Rename, Space, Way, split};

/// What a device node stands for that no driver has.
pub const DEVICE: (u32, u32) = (240, 17);

/// Permissions that a new inode does not get where an access control list does not say them.
pub const UMASK: u32 = 0o022;

/// The property that names a file's or directory's compression.
pub const COMPRESSION: &str = "btrfs.compression";

/// The bit of an inode.
fn bit(flag: Flag) -> u64 {
    match flag {
        Flag::Immutable => flags::IMMUTABLE,
        Flag::Append => flags::APPEND,
        Flag::InPlace => flags::NODATACOW,
        Flag::NoAtime => flags::NOATIME,
        Flag::NoDump => flags::NODUMP,
        Flag::Compress => flags::COMPRESS,
        Flag::NoCompress => flags::NOCOMPRESS,
    }
}

fn at(offset: u64) -> ubtrfs_iomap::FileOffset {
    ubtrfs_iomap::FileOffset::new(offset)
}

/// Does one thing.
pub fn perform(fs: &Filesystem, operation: &Operation) -> Result<(), Error> {
    match operation {
        Operation::Make { path, node } => make(fs, path, *node),
        Operation::Write { path, offset, data, way } => {
            write(fs, file_at(fs, path)?, *offset, &data.0, *way)
        }
        Operation::Truncate { path, size, way: Way::Straight } => {
            fs.truncate(find(fs, path)?, *size)
        }
        Operation::Truncate { path, size, .. } => {
            fs.open_data(find(fs, path)?)?.truncate(at(*size))
        }
        Operation::Reserve { path, offset, len_bytes, space } => {
            let file = fs.open_data(find(fs, path)?)?;
            let (offset, len_bytes) = (at(*offset), *len_bytes);
            match space {
                Space::Allocate => file.allocate(offset, len_bytes, Reach::Extends),
                Space::AllocateBehind => file.allocate(offset, len_bytes, Reach::Stays),
                Space::Punch => file.punch_hole(offset, len_bytes),
                Space::Zero => file.allocate_zeroed(offset, len_bytes, Reach::Extends),
                Space::ZeroBehind => file.allocate_zeroed(offset, len_bytes, Reach::Stays),
            }
        }
        Operation::Clone(ranges) => {
            let (from, range, to) = files(fs, ranges)?;
            fs.clone_range(from, range, to, FileOffset(ranges.to_offset))
        }
        Operation::Copy(ranges) => {
            let (from, range, to) = files(fs, ranges)?;
            fs.copy_range(from, range, to, FileOffset(ranges.to_offset)).map(drop)
        }
        Operation::Dedupe(ranges) => dedupe(fs, ranges),
        Operation::Fsync { path } => fs.fsync(find(fs, path)?),
        Operation::Commit => fs.commit(),
        Operation::Clean { part: None } => fs.clean_deleted_subvolumes().map(drop),
        Operation::Clean { part: Some(count) } => fs.clean_deleted_step(*count).map(drop),
        _ => change_names(fs, operation),
    }
}

fn change_names(fs: &Filesystem, operation: &Operation) -> Result<(), Error> {
    match operation {
        Operation::RemoveDirectory { path } => {
            let (dir, name) = place(fs, path)?;
            fs.rmdir(dir, name)
        }
        Operation::Remove { path } => remove(fs, path),
        Operation::RemoveOpen { path } => {
            let (dir, name) = place(fs, path)?;
            fs.unlink_deferred(dir, name).map(drop)
        }
        Operation::RemoveMany { paths } => paths.iter().try_for_each(|path| remove(fs, path)),
        Operation::Rename { from, to, mode } => {
            let ((dir, name), (to_dir, to_name)) = (place(fs, from)?, place(fs, to)?);
            let mode = match mode {
                Rename::Replace => RenameMode::Replace,
                Rename::NoReplace => RenameMode::NoReplace,
                Rename::Exchange => RenameMode::Exchange,
                Rename::Whiteout => RenameMode::Whiteout,
            };
            fs.rename(dir, name, to_dir, to_name, mode)
        }
        Operation::Link { from, to } => link(fs, find(fs, from)?, to),
        Operation::LinkMany { from, to } => {
            let id = find(fs, from)?;
            to.iter().try_for_each(|to| link(fs, id, to))
        }
        _ => change_attributes(fs, operation),
    }
}

fn change_attributes(fs: &Filesystem, operation: &Operation) -> Result<(), Error> {
    let set = |path: &str, attributes: SetAttributes| {
        let id = find(fs, path)?;
        fs.begin(Reservation::items(4))?.set_attributes(id, &attributes)
    };
    let put = |path: &str, name: &str, value: &[u8]| {
        let id = find(fs, path)?;
        fs.begin(Reservation::items(6))?.set_xattr(id, name.as_bytes(), value)
    };
    match operation {
        Operation::Chmod { path, mode } => {
            set(path, SetAttributes { mode: Some(*mode), ..SetAttributes::default() })
        }
        Operation::Chown { path, uid, gid } => set(
            path,
            SetAttributes { uid: Some(*uid), gid: Some(*gid), ..SetAttributes::default() },
        ),
        Operation::Times { path, atime, mtime } => {
            let time = |(sec, nsec): (i64, u32)| Some(Time { sec, nsec });
            let (atime, mtime) = (time(*atime), time(*mtime));
            set(path, SetAttributes { atime, mtime, ..SetAttributes::default() })
        }
        Operation::SetXattr { path, name, value } | Operation::Acl { path, name, value } => {
            put(path, name, &value.0)
        }
        Operation::RemoveXattr { path, name } => {
            let id = find(fs, path)?;
            fs.begin(Reservation::items(4))?.remove_xattr(id, name.as_bytes())
        }
        Operation::Compression { path, value } => put(path, COMPRESSION, value.as_bytes()),
        Operation::Flag { path, flag, on } => set_flag(fs, find(fs, path)?, *flag, *on),
        _ => change_subvolumes(fs, operation),
    }
}

fn change_subvolumes(fs: &Filesystem, operation: &Operation) -> Result<(), Error> {
    let root = |path: &str| match find(fs, path)? {
        id if id == InodeId::root_of(id.root) => Ok(id.root),
        _ => Err(Error::InvalidArgument { what: path.to_owned() }),
    };
    match operation {
        Operation::MakeSubvolume { path } => {
            let (dir, name) = place(fs, path)?;
            let new = new_inode(fs, 0o755);
            fs.begin(Reservation::create_subvolume())?.create_subvolume(dir, name, &new).map(drop)
        }
        Operation::Snapshot { from, to, read_only } => {
            let (dir, name) = place(fs, to)?;
            let options = SnapshotOptions { read_only: *read_only };
            fs.snapshot(root(from)?, dir, name, &options).map(drop)
        }
        Operation::DeleteSubvolume { path } => {
            let (dir, name) = place(fs, path)?;
            fs.delete_subvolume(dir, name).map(drop)
        }
        Operation::ReadOnly { path, read_only } => {
            fs.set_subvolume_read_only(root(path)?, *read_only)
        }
        Operation::SetDefault { path } => fs.set_default_subvolume(root(path)?),
        other => unreachable!("{other:?}"),
    }
}

fn find(fs: &Filesystem, path: &str) -> Result<InodeId, Error> {
    fs.resolve(fs.top_level(), path.as_bytes())
}

fn place<'p>(fs: &Filesystem, path: &'p str) -> Result<(InodeId, &'p [u8]), Error> {
    let (dir, name) = split(path);
    Ok((find(fs, &format!("{dir}/"))?, name.as_bytes()))
}

fn new_inode(fs: &Filesystem, mode: u32) -> NewInode {
    let inherit = Inherit::AsProcess { umask: UMASK };
    NewInode { inherit, ..NewInode::new(mode, fs.runtime().clock.now()) }
}

fn make(fs: &Filesystem, path: &str, node: Node) -> Result<(), Error> {
    let (dir, name) = place(fs, path)?;
    let mut handle = fs.begin(Reservation::create(0))?;
    let rdev = device_number(DEVICE.0, DEVICE.1);
    let mode = match node {
        Node::Symlink => {
            let target = vec![b'x'; 1 + name.len() * 5];
            return handle.symlink(dir, name, &target, &new_inode(fs, 0o777)).map(drop);
        }
        Node::Unnamed => {
            let id = handle.create_unlinked(dir, &new_inode(fs, 0o100_600))?;
            drop(handle);
            write(fs, id, 0, &vec![name[0]; 7 + 3000 * name.len()], Way::Buffered)?;
            return fs.begin(Reservation::create(0))?.link(dir, name, id);
        }
        Node::File | Node::FileInPlace => 0o100_644,
        Node::Directory => 0o040_755,
        Node::Fifo => 0o010_640,
        Node::Socket => 0o140_600,
        Node::CharDevice => 0o020_600,
        Node::BlockDevice => 0o060_600,
    };
    let id = handle.create(dir, name, &NewInode { rdev, ..new_inode(fs, mode) })?;
    drop(handle);
    match node {
        Node::FileInPlace => set_flag(fs, id, Flag::InPlace, true),
        _ => Ok(()),
    }
}

/// The file, which is made if there is none.
fn file_at(fs: &Filesystem, path: &str) -> Result<InodeId, Error> {
    match find(fs, path) {
        Err(Error::NotFound { .. }) => {
            make(fs, path, Node::File)?;
            find(fs, path)
        }
        found => found,
    }
}

fn write(fs: &Filesystem, id: InodeId, offset: u64, bytes: &[u8], way: Way) -> Result<(), Error> {
    if way == Way::Straight {
        return fs.write(id, FileOffset(offset), bytes);
    }
    let file = fs.open_data(id)?;
    // As a process that opens it.
    if fs.inode(id)?.flags & flags::IMMUTABLE != 0 {
        return Err(Error::NotPermitted { what: id.to_string(), flag: "is immutable" });
    }
    let mut done = 0;
    while done < bytes.len() {
        let (offset, rest) = (at(offset + done as u64), &bytes[done..]);
        done += match way {
            Way::Direct => file.direct_write(offset, rest)?,
            _ => file.write(offset, rest)?,
        };
    }
    Ok(())
}

type Range = std::ops::Range<FileOffset>;

fn files(fs: &Filesystem, ranges: &Ranges) -> Result<(InodeId, Range, InodeId), Error> {
    let (from, to) = (find(fs, &ranges.from)?, find(fs, &ranges.to)?);
    let end = match ranges.len_bytes {
        0 => fs.inode(from)?.size_bytes,
        len => ranges.offset + len,
    };
    Ok((from, FileOffset(ranges.offset)..FileOffset(end.max(ranges.offset)), to))
}

fn dedupe(fs: &Filesystem, ranges: &Ranges) -> Result<(), Error> {
    let (from, range, to) = files(fs, ranges)?;
    let mut bytes = vec![0; usize::try_from(range.end.0 - range.start.0).unwrap()];
    let len = fs.read(from, range.start, &mut bytes)?;
    fs.write(to, FileOffset(ranges.to_offset), &bytes[..len])?;
    match fs.dedupe_range(from, range, to, FileOffset(ranges.to_offset))? {
        true => Ok(()),
        false => Err(Error::InvalidArgument { what: "what differs".to_owned() }),
    }
}

fn remove(fs: &Filesystem, path: &str) -> Result<(), Error> {
    let (dir, name) = place(fs, path)?;
    fs.unlink(dir, name)
}

fn link(fs: &Filesystem, id: InodeId, to: &str) -> Result<(), Error> {
    let (dir, name) = place(fs, to)?;
    fs.begin(Reservation::create(0))?.link(dir, name, id)
}

/// Sets or clears a flag as chattr does on a mount of Linux, where the flags of compression and the
/// property that names it go together.
fn set_flag(fs: &Filesystem, id: InodeId, flag: Flag, on: bool) -> Result<(), Error> {
    let inode = fs.inode(id)?;
    // As Linux refuses them: it takes neither beside the other, and nothing in place beside either.
    let excluded = match flag {
        Flag::Compress => flags::NOCOMPRESS | flags::NODATACOW,
        Flag::NoCompress => flags::COMPRESS | flags::NODATACOW,
        Flag::InPlace => flags::COMPRESS | flags::NOCOMPRESS,
        _ => 0,
    };
    if on && inode.flags & excluded != 0 {
        return Err(Error::InvalidArgument { what: format!("{flag:?} of {id}") });
    }
    let mut bits = bit(flag);
    // Without copy on write there are no checksums; Linux passes over it where there is data.
    if flag == Flag::InPlace && !inode.is_dir() {
        bits = if inode.size_bytes == 0 { bits | flags::NODATASUM } else { 0 };
    }
    let new = if on { inode.flags | bits } else { inode.flags & !bits };
    let reservation = match on {
        true => Reservation::items(6),
        false => Reservation::allow_removal().and(Reservation::items(4)),
    };
    let attributes = SetAttributes { flags: Some(new), ..SetAttributes::default() };
    let mut handle = fs.begin(reservation)?;
    let has_property = fs.xattr(id, COMPRESSION.as_bytes())?.is_some();
    match flag {
        Flag::Compress if on => handle.set_xattr(id, COMPRESSION.as_bytes(), b"zlib")?,
        Flag::Compress | Flag::NoCompress if has_property => {
            handle.remove_xattr(id, COMPRESSION.as_bytes())?;
        }
        _ => {}
    }
    handle.set_attributes(id, &attributes)
}
