//! All that the engine shows of a filesystem, to be compared with what the kernel shows.

use std::collections::BTreeMap;

use ubtrfs_engine::{Error, Filesystem, Inode, MappingKind};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_rt::Time;
use ubtrfs_testkit::TreeSnapshot;
use ubtrfs_testkit::snapshot::{Entry, Kind, Timestamp, TreeBuilder, hash_content, normal_ranges};

use crate::compare::Differs;

/// The number of a subvolume's root directory.
const ROOT_DIRECTORY: u64 = 256;

/// Everything below the top level, as a mount with `subvolid=5` shows it.
///
/// # Errors
/// What cannot be read.
pub(crate) fn of(fs: &Filesystem) -> Differs<TreeSnapshot> {
    let mut builder = TreeBuilder::new();
    let mut left = vec![(fs.top_level(), Vec::new())];
    while let Some((id, path)) = left.pop() {
        let failed = |error: Error| format!("{}: {error}", String::from_utf8_lossy(&path));
        let inode = fs.inode(id).map_err(failed)?;
        builder.add(path.clone(), (id.root.0, id.inode.0), entry(fs, &inode).map_err(failed)?);
        if inode.file_type() != FileType::Directory {
            continue;
        }
        for child in fs.read_dir(id, 0).map_err(failed)? {
            let child = child.map_err(failed)?;
            let mut below = path.clone();
            if !below.is_empty() {
                below.push(b'/');
            }
            below.extend_from_slice(&child.name);
            left.push((child.target, below));
        }
    }
    Ok(builder.finish())
}

fn entry(fs: &Filesystem, inode: &Inode) -> Result<Entry, Error> {
    let id = inode.id;
    let kind = Kind::of_mode(inode.mode).unwrap_or(Kind::Socket);
    let mut entry = Entry::new(kind, inode.mode, inode.uid, inode.gid);
    entry.nlink = Some(inode.nlink);
    entry.size_bytes = Some(inode.size_bytes);
    if !id.is_stand_in() {
        entry.mtime = time(inode.mtime);
        entry.ctime = time(inode.ctime);
        entry.atime = time(inode.atime);
        entry.btime = time(inode.otime);
    }
    if matches!(kind, Kind::CharDevice | Kind::BlockDevice) {
        entry.rdev = Some(inode.device());
    }
    entry.xattrs = Some(fs.xattrs(id)?.into_iter().collect::<BTreeMap<_, _>>());
    if kind == Kind::Symlink {
        entry.target = Some(fs.read_link(id)?);
    }
    if kind == Kind::File {
        contents(fs, inode, &mut entry)?;
    }
    entry.inode = Some(id.inode.0);
    let is_root = kind == Kind::Directory && id.inode.0 == ROOT_DIRECTORY;
    entry.subvolume = Some(if is_root { id.root.0 } else { 0 });
    Ok(entry)
}

fn contents(fs: &Filesystem, inode: &Inode, entry: &mut Entry) -> Result<(), Error> {
    let mut data = Vec::new();
    for mapping in fs.file_extents(inode.id, FileOffset(0))? {
        let mapping = mapping?;
        if matches!(mapping.kind, MappingKind::Data | MappingKind::Inline) {
            let end = mapping.end().0.next_multiple_of(fs.sectorsize_bytes());
            data.push(mapping.offset.0..end);
        }
    }
    let size = inode.size_bytes;
    let mut file = fs.open_file(inode.id)?;
    let read_at = |offset, buffer: &mut [u8]| file.read(FileOffset(offset), buffer).map(drop);
    let whole = 0..size;
    entry.content = Some(hash_content(size, std::slice::from_ref(&whole), read_at)?);
    entry.data = Some(normal_ranges(data, size));
    Ok(())
}

fn time(time: Time) -> Option<Timestamp> {
    Some(Timestamp { sec: time.sec, nsec: time.nsec })
}
