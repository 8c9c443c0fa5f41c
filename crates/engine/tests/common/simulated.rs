//! Filesystems on simulated devices, which fail when they are told to, and all that is seen of them.

use std::path::Path;
use std::sync::Arc;

use ubtrfs_engine::{
    Error, Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, PreparedData, Reservation,
    SnapshotOptions, mkfs,
};
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::{FileOffset, RootId};
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::crash::{Image, SimDevice};
use ubtrfs_testkit::{Compare, TreeSnapshot};
use ubtrfs_volume::{Device, Volume, VolumeOptions};

const COMPRESSION: (&[u8], &[u8]) = (b"btrfs.compression", b"zstd");

/// Nothing is in memory yet, so that whatever is looked at is read.
pub fn open(device: &Arc<SimDevice>) -> Filesystem {
    try_open(device).unwrap()
}

pub fn try_open(device: &Arc<SimDevice>) -> Result<Filesystem, Error> {
    let devices = vec![Arc::clone(device) as Arc<dyn Device>];
    let volume = Volume::open(devices, &VolumeOptions::default())?;
    let options =
        OpenOptions { runtime: Arc::new(Runtime::simulated(1)), ..OpenOptions::default() };
    Filesystem::open(volume, options)
}

/// One whose leaves are so small that each operation reads several; metadata is there once.
pub fn empty(options: &MkfsOptions) -> (Arc<SimDevice>, Filesystem) {
    let options =
        MkfsOptions { metadata_profile: Some(BlockGroupFlags::default()), ..options.clone() };
    empty_of_profile(&options)
}

fn empty_of_profile(options: &MkfsOptions) -> (Arc<SimDevice>, Filesystem) {
    let device = Arc::new(SimDevice::new(256 << 20));
    let options = MkfsOptions { nodesize_bytes: 4096, ..options.clone() };
    let runtime = Arc::new(Runtime::simulated(1));
    drop(mkfs(vec![Arc::clone(&device) as Arc<dyn Device>], &options, &runtime).unwrap());
    let fs = open(&device);
    (device, fs)
}

pub fn new(mode: u32) -> NewInode {
    NewInode::new(mode, Time { sec: 1_700_000_000, nsec: 0 })
}

pub fn file(fs: &Filesystem, dir: InodeId, name: &[u8], len: usize) -> InodeId {
    let mut handle = fs.begin(Reservation::create(1).and(Reservation::extents(4))).unwrap();
    let id = handle.create(dir, name, &new(0o100_644)).unwrap();
    handle.set_xattr(id, b"user.name", &[name, &[b'x'; 150][..]].concat()).unwrap();
    // Sectors of all large files are the same, and no two of one.
    let first = if len > 4096 { 7 } else { name[0] };
    let bytes = (0..len).map(|at| first + u8::try_from(at / 4096).unwrap()).collect();
    let data = PreparedData::new(bytes, &fs.write_options(None));
    handle.write_file(id, vec![(FileOffset(0), data)], len as u64).unwrap();
    id
}

/// Directories, files inline and not (each third, of 9000 bytes), a subvolume and its snapshot, each with so many files.
pub fn made(files: u64) -> Image {
    let (device, fs) = empty(&MkfsOptions::default());
    fill(&fs, files);
    drop(fs);
    device.image()
}

/// As [`made`], where metadata is there twice.
pub fn made_with_copies(files: u64) -> Image {
    let (device, fs) = empty_of_profile(&MkfsOptions::default());
    fill(&fs, files);
    drop(fs);
    device.image()
}

fn fill(fs: &Filesystem, files: u64) {
    let top = fs.top_level();
    fs.begin(Reservation::items(4)).unwrap().set_xattr(top, COMPRESSION.0, COMPRESSION.1).unwrap();
    // So many that the one above lies in another leaf than the inode.
    for at in 0..12 {
        let name = format!("user.{at}");
        let mut handle = fs.begin(Reservation::items(4)).unwrap();
        handle.set_xattr(top, name.as_bytes(), &[1; 900]).unwrap();
    }
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    let sub = handle.create_subvolume(top, b"sub", &new(0o040_755)).unwrap();
    drop(handle);
    fs.begin(Reservation::create(0)).unwrap().create(top, b"empty", &new(0o100_644)).unwrap();
    for dir in [top, sub] {
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        let below = handle.create(dir, b"dir", &new(0o040_755)).unwrap();
        drop(handle);
        for at in 0..files {
            let len = if at.is_multiple_of(3) { 9000 } else { 90 };
            let dir = if at.is_multiple_of(2) { dir } else { below };
            file(fs, dir, format!("{at}").as_bytes(), len);
        }
    }
    fs.snapshot(RootId(256), top, b"snap", &SnapshotOptions { read_only: false }).unwrap();
    fs.sync().unwrap();
}

/// The checker that shares no code with the engine finds nothing.
pub fn check(device: &Arc<SimDevice>, what: &str) {
    let devices = vec![Arc::clone(device) as Arc<dyn Device>];
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(devices, &options).unwrap();
    let options = ubtrfs_check::CheckOptions { data: true, ..Default::default() };
    let report = ubtrfs_check::check(&volume, &options).unwrap();
    let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
    assert!(report.is_clean(), "{what}: {errors:#?}");
}

/// Writes what a device holds to a file, lets a judge look, and removes the file.
pub fn with_file(device: &SimDevice, look: impl FnOnce(&Path)) {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = directory.path().join("image");
    device.write_image(&image);
    look(&image);
}

/// The inode of a path from the top level.
pub fn path(fs: &Filesystem, path: &str) -> Result<InodeId, Error> {
    fs.resolve(fs.top_level(), path.as_bytes())
}

/// All that is seen of a filesystem.
#[derive(Clone, Debug)]
pub struct State {
    pub tree: TreeSnapshot,
    /// What is seen of the filesystem itself and of its subvolumes.
    rest: String,
    /// What the file has that an operation changes.
    pub bytes: Option<Vec<u8>>,
}

impl State {
    /// With what is in the file of that path.
    pub fn of(fs: &Filesystem, file: Option<&str>) -> Self {
        let subvolumes: Vec<_> = fs
            .subvolumes()
            .unwrap()
            .into_iter()
            .filter(|sub| !sub.deleted)
            .map(|sub| (sub.id, sub.path, sub.uuid, sub.received_uuid, sub.read_only))
            .collect();
        let superblock = fs.superblock();
        let label = superblock.label.iter().take_while(|byte| **byte != 0).copied();
        let label = String::from_utf8(label.collect()).unwrap();
        let default = fs.default_subvolume().unwrap();
        let len_bytes = superblock.total_bytes.get();
        let bytes = file.and_then(|file| path(fs, file).ok()).map(|id| {
            let size = fs.inode(id).unwrap().size_bytes;
            let mut bytes = vec![0; usize::try_from(size).unwrap()];
            assert_eq!(fs.read(id, FileOffset(0), &mut bytes).unwrap(), bytes.len());
            bytes
        });
        Self {
            tree: super::snapshot(fs, fs.top_level()),
            rest: format!("{label:?}, default {default}, {len_bytes} bytes, {subvolumes:?}"),
            bytes,
        }
    }

    pub fn is_same(&self, other: &Self) -> bool {
        self.rest == other.rest
            && self.tree.differences(&other.tree, &Compare::same_filesystem()).is_empty()
    }

    /// That it is one of two, or between them: of the file that is changed in steps, each sector is as in the one or the other.
    pub fn assert_between(&self, before: &Self, after: &Self, file: Option<&str>, what: &str) {
        if self.is_same(before) || self.is_same(after) {
            return;
        }
        let compare = Compare::same_filesystem();
        let tell = || {
            let to_before = self.tree.differences(&before.tree, &compare);
            let to_after = self.tree.differences(&after.tree, &compare);
            format!(
                "{what}: not before\n{to_before}\nnor after\n{to_after}\n{}\n{}\n{}",
                self.rest, before.rest, after.rest
            )
        };
        let (Some(file), Some(bytes)) = (file, &self.bytes) else { panic!("{}", tell()) };
        let (old, new) = (before.bytes.as_ref().unwrap(), after.bytes.as_ref().unwrap());
        let without = |state: &Self| {
            let mut tree = state.tree.clone();
            tree.entries.remove(file.as_bytes()).unwrap();
            tree
        };
        let others = without(self).differences(&without(before), &compare);
        assert!(others.is_empty() && self.rest == before.rest, "{}", tell());
        let lens = old.len().min(new.len())..=old.len().max(new.len());
        assert!(lens.contains(&bytes.len()), "{}", tell());
        for (number, sector) in bytes.chunks(4096).enumerate() {
            let is_of = |other: &Vec<u8>| {
                let mut theirs = other[(number * 4096).min(other.len())..].to_vec();
                theirs.resize(sector.len(), 0);
                theirs == sector
            };
            assert!(is_of(old) || is_of(new), "sector {number}, {}", tell());
        }
    }
}
