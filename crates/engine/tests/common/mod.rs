//! What the engine's tests share; each uses a part of it.
#![allow(dead_code)]

pub mod failing;
pub mod filefrag;
pub mod full;
pub mod holding;
pub mod interrupted;
pub mod kernel_log;
pub mod power;
pub mod simulated;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ubtrfs_engine::{Filesystem, Inode, InodeId, MappingKind, OpenOptions};
use ubtrfs_iomap::FiemapExtent;
use ubtrfs_ondisk::FileOffset;
use ubtrfs_rt::Time;
use ubtrfs_testkit::snapshot::{Entry, Kind, Timestamp, TreeBuilder, hash_content, normal_ranges};
use ubtrfs_testkit::{Compare, KernelMount, Oracle, TreeSnapshot, assert_checks_clean, oracle};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// What `filefrag -v` calls the flags of an extent.
pub fn fiemap_flag_names(extent: &FiemapExtent) -> Vec<String> {
    let of = extent.flags;
    let named = [
        (of.is_last, "last"),
        (of.is_delalloc, "delalloc"),
        (of.is_unwritten, "unwritten"),
        (of.is_encoded, "encoded"),
        (of.is_inline, "inline"),
        (of.is_shared, "shared"),
    ];
    named.iter().filter(|(is, _)| *is).map(|(_, name)| (*name).to_owned()).collect()
}

/// Opens image files as one filesystem, for reading.
pub fn open(images: &[impl AsRef<Path>]) -> Filesystem {
    let devices = images
        .iter()
        .map(|image| {
            let device = FileDevice::open(image, OpenMode::ReadOnly, Window::Whole).unwrap();
            Arc::new(device) as Arc<dyn Device>
        })
        .collect();
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(devices, &options).unwrap();
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    Filesystem::open(volume, options).unwrap()
}

/// Opens an image file, to change it.
pub fn open_for_writing(image: &Path) -> Filesystem {
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, OpenOptions::default()).unwrap()
}

/// Takes away the bit that says that the free space tree is up to date.
pub fn forget_valid(image: &Path) {
    use std::os::unix::fs::FileExt;
    use ubtrfs_ondisk::features::CompatRo;
    use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
    let file = std::fs::File::options().read(true).write(true).open(image).unwrap();
    let at = SUPERBLOCK_OFFSETS[0];
    let mut bytes = [0; SUPERBLOCK_BYTES];
    file.read_exact_at(&mut bytes, at.0).unwrap();
    let mut superblock = Superblock::parse(&bytes, at).unwrap();
    let valid = CompatRo::FREE_SPACE_TREE_VALID.0;
    superblock.compat_ro_flags = (superblock.compat_ro_flags.get() & !valid).into();
    superblock.seal(at).unwrap();
    file.write_all_at(zerocopy::IntoBytes::as_bytes(&*superblock), at.0).unwrap();
}

/// Lets `btrfs check` judge an image in all its modes, and compares all that the engine sees in it
/// with all that the kernel sees, as far as they are here.
pub fn judge(image: &Path) {
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(image);
    }
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        return;
    }
    let fs = open(&[image]);
    let ours = snapshot(&fs, fs.top_level());
    let mount = KernelMount::read_only(image, "subvolid=5");
    let theirs = TreeSnapshot::of_directory(mount.path());
    mount.unmount();
    theirs.assert_same(&ours, &Compare::same_filesystem());
}

/// Everything that the engine sees below `root`.
pub fn snapshot(fs: &Filesystem, root: InodeId) -> TreeSnapshot {
    let mut builder = TreeBuilder::new();
    add(fs, root, root, Vec::new(), &mut builder);
    builder.finish()
}

fn add(fs: &Filesystem, id: InodeId, top: InodeId, path: Vec<u8>, builder: &mut TreeBuilder) {
    let inode = fs.inode(id).unwrap();
    let kind = Kind::of_mode(inode.mode).unwrap();
    let mut entry = Entry::new(kind, inode.mode, inode.uid, inode.gid);
    let time = |time: Time| Some(Timestamp { sec: time.sec, nsec: time.nsec });
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
    let xattrs: BTreeMap<_, _> = fs.xattrs(id).unwrap().into_iter().collect();
    for (name, value) in &xattrs {
        assert_eq!(fs.xattr(id, name).unwrap().as_ref(), Some(value));
    }
    entry.xattrs = Some(xattrs);
    if kind == Kind::Symlink {
        entry.target = Some(fs.read_link(id).unwrap());
    }
    if kind == Kind::File {
        contents(fs, &inode, &mut entry);
    }
    entry.inode = Some(id.inode.0);
    let is_root = kind == Kind::Directory && id.inode.0 == 256;
    entry.subvolume = Some(if is_root { id.root.0 } else { 0 });
    builder.add(path.clone(), (id.root.0, id.inode.0), entry);
    if kind != Kind::Directory {
        return;
    }
    let mut size_bytes = 0;
    for child in fs.read_dir(id, 0).unwrap() {
        let child = child.unwrap();
        size_bytes += 2 * child.name.len() as u64;
        assert_eq!(fs.lookup(id, &child.name).unwrap(), child.target);
        let mut below = path.clone();
        if !below.is_empty() {
            below.push(b'/');
        }
        below.extend_from_slice(&child.name);
        assert_eq!(fs.resolve(top, &below).unwrap(), child.target);
        let is_directory = child.file_type == ubtrfs_ondisk::dir::FileType::Directory;
        if is_directory && !child.target.is_stand_in() {
            assert_eq!(fs.parent(child.target).unwrap(), id);
        }
        add(fs, child.target, top, below, builder);
    }
    assert_eq!(size_bytes, inode.size_bytes, "size of {id}");
}

fn contents(fs: &Filesystem, inode: &Inode, entry: &mut Entry) {
    let mut at = 0;
    let mut nbytes = 0;
    let mut data = Vec::new();
    for mapping in fs.file_extents(inode.id, FileOffset(0)).unwrap() {
        let mapping = mapping.unwrap();
        assert_eq!(mapping.offset.0, at, "mappings follow each other");
        at = mapping.end().0.next_multiple_of(fs.sectorsize_bytes());
        let has_data = matches!(mapping.kind, MappingKind::Data | MappingKind::Inline);
        if mapping.kind != MappingKind::Hole {
            nbytes += mapping.len_bytes;
        }
        if has_data {
            data.push(mapping.offset.0..at);
        }
    }
    assert!(at >= inode.size_bytes);
    assert_eq!(nbytes, inode.nbytes, "nbytes of {}", inode.id);
    let size = inode.size_bytes;
    let ranges = normal_ranges(data, size);
    let whole = 0..size;
    let mut file = fs.open_file(inode.id).unwrap();
    let read_at = |offset, buffer: &mut [u8]| -> Result<(), ubtrfs_engine::Error> {
        let len = buffer.len();
        assert_eq!(file.read(FileOffset(offset), buffer)?, len);
        Ok(())
    };
    entry.content = Some(hash_content(size, std::slice::from_ref(&whole), read_at).unwrap());
    entry.data = Some(ranges);
}
