//! Random operations, done to the engine and to a map in memory; whatever the order of commits and
//! reopenings, both hold the same, and `btrfs check` finds nothing.

mod common;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::sync::Arc;

use ubtrfs_engine::{
    Error, Filesystem, InodeId, Method, MkfsOptions, NewInode, OpenOptions, PreparedData,
    Reservation, SetAttributes, mkfs,
};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{Oracle, Prng, assert_checks_clean, oracle};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// What the model knows of an inode.
#[derive(Clone, Debug, Default)]
struct Node {
    mode: u32,
    uid: u32,
    nlink: u32,
    bytes: Vec<u8>,
    names: BTreeMap<Vec<u8>, InodeId>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

struct Model {
    nodes: BTreeMap<InodeId, Node>,
    directories: Vec<InodeId>,
    files: Vec<InodeId>,
}

const TIME: Time = Time { sec: 1_700_000_000, nsec: 0 };

fn open(path: &Path, mode: OpenMode) -> Filesystem {
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(path, mode, Window::Whole).unwrap());
    let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, OpenOptions::default()).unwrap()
}

impl Model {
    fn new(top: InodeId) -> Self {
        let node = Node { mode: 0o040_755, nlink: 1, ..Node::default() };
        Self { nodes: [(top, node)].into(), directories: vec![top], files: Vec::new() }
    }

    fn directory(&self, prng: &mut Prng) -> InodeId {
        self.directories[prng.index(self.directories.len())]
    }

    fn step(&mut self, fs: &Filesystem, prng: &mut Prng) {
        match prng.below(20) {
            0..=2 => self.make(fs, prng, 0o040_755),
            3..=9 => self.make(fs, prng, 0o100_644),
            10..=11 => self.make(fs, prng, 0o010_600),
            12 => self.symlink(fs, prng),
            13..=14 => self.link(fs, prng),
            15..=16 => self.xattr(fs, prng),
            17 => self.attributes(fs, prng),
            18 => self.subvolume(fs, prng),
            _ => fs.commit().unwrap(),
        }
    }

    fn name(prng: &mut Prng) -> Vec<u8> {
        // Few short names, so that some are taken; some long ones.
        if prng.chance(4, 5) {
            format!("{}", prng.below(30)).into_bytes()
        } else {
            vec![b'a' + u8::try_from(prng.below(26)).unwrap(); prng.index(255) + 1]
        }
    }

    /// Enters what the engine made, or checks that it refused a name that was taken.
    fn enter(&mut self, dir: InodeId, name: Vec<u8>, made: Result<InodeId, Error>, node: Node) {
        let names = &mut self.nodes.get_mut(&dir).unwrap().names;
        if names.contains_key(&name) {
            assert!(matches!(made, Err(Error::Exists { .. })));
            return;
        }
        let id = made.unwrap();
        names.insert(name, id);
        match node.mode & 0o170_000 {
            0o040_000 => self.directories.push(id),
            0o100_000 => self.files.push(id),
            _ => {}
        }
        self.nodes.insert(id, node);
    }

    fn make(&mut self, fs: &Filesystem, prng: &mut Prng, mode: u32) {
        let (dir, name) = (self.directory(prng), Self::name(prng));
        let new = NewInode::new(mode, TIME);
        let mut node = Node { mode, nlink: 1, ..Node::default() };
        let mut handle = fs.begin(Reservation::items(40)).unwrap();
        let made = handle.create(dir, &name, &new);
        if let (Ok(id), 0o100_644) = (&made, mode) {
            node.bytes = Self::contents(prng);
            let options = fs.write_options(Self::method(prng));
            let cut = prng.index(5) * 4096;
            if prng.chance(1, 2) && node.bytes.len() > cut {
                drop(handle);
                let mut appender = fs.appender(*id, 0).unwrap();
                let (front, rest) = node.bytes.split_at(cut);
                for (at, part) in [(0, front), (cut, rest)] {
                    let data = PreparedData::new(part.to_vec(), &options);
                    appender.push(FileOffset(at as u64), data).unwrap();
                }
                appender.finish().unwrap();
            } else {
                let size = node.bytes.len() as u64;
                let data = PreparedData::new(node.bytes.clone(), &options);
                handle.write_file(*id, vec![(FileOffset(0), data)], size).unwrap();
            }
        }
        self.enter(dir, name, made, node);
    }

    fn contents(prng: &mut Prng) -> Vec<u8> {
        let len = match prng.below(4) {
            0 => prng.index(100),
            1 => prng.index(5000),
            2 => prng.index(20_000),
            _ => prng.index(400_000),
        };
        if prng.chance(1, 2) { prng.text(len) } else { prng.bytes(len) }
    }

    fn method(prng: &mut Prng) -> Option<Method> {
        let all = [Compression::None, Compression::Zlib, Compression::Lzo, Compression::Zstd];
        prng.chance(1, 2).then(|| Method::with_default_level(all[prng.index(4)]))
    }

    fn symlink(&mut self, fs: &Filesystem, prng: &mut Prng) {
        let (dir, name) = (self.directory(prng), Self::name(prng));
        let len = 1 + prng.index(500);
        let bytes = vec![b't'; len];
        let new = NewInode::new(0o777, TIME);
        let made = fs.begin(Reservation::create(0)).unwrap().symlink(dir, &name, &bytes, &new);
        self.enter(dir, name, made, Node { mode: 0o120_777, nlink: 1, bytes, ..Node::default() });
    }

    fn link(&mut self, fs: &Filesystem, prng: &mut Prng) {
        if self.files.is_empty() {
            return;
        }
        let (dir, name) = (self.directory(prng), Self::name(prng));
        let id = self.files[prng.index(self.files.len())];
        let linked = fs.begin(Reservation::create(0)).unwrap().link(dir, &name, id);
        if id.root != dir.root {
            assert!(matches!(linked, Err(Error::OtherSubvolume { .. })));
            return;
        }
        match self.nodes.get_mut(&dir).unwrap().names.entry(name) {
            Entry::Occupied(_) => assert!(matches!(linked, Err(Error::Exists { .. }))),
            Entry::Vacant(entry) => {
                linked.unwrap();
                entry.insert(id);
                self.nodes.get_mut(&id).unwrap().nlink += 1;
            }
        }
    }

    fn xattr(&mut self, fs: &Filesystem, prng: &mut Prng) {
        let index = prng.index(self.nodes.len());
        let (id, node) = self.nodes.iter_mut().nth(index).unwrap();
        let name = format!("trusted.{}", prng.below(4)).into_bytes();
        let len = prng.index(300);
        let value = prng.bytes(len);
        fs.begin(Reservation::create(0)).unwrap().set_xattr(*id, &name, &value).unwrap();
        node.xattrs.insert(name, value);
    }

    fn attributes(&mut self, fs: &Filesystem, prng: &mut Prng) {
        let index = prng.index(self.nodes.len());
        let (id, node) = self.nodes.iter_mut().nth(index).unwrap();
        node.uid = u32::try_from(prng.below(1 << 32)).unwrap();
        let attributes = SetAttributes { uid: Some(node.uid), ..SetAttributes::default() };
        fs.begin(Reservation::create(0)).unwrap().set_attributes(*id, &attributes).unwrap();
    }

    fn subvolume(&mut self, fs: &Filesystem, prng: &mut Prng) {
        let (dir, name) = (self.directory(prng), Self::name(prng));
        let new = NewInode::new(0o755, TIME);
        let made =
            fs.begin(Reservation::create_subvolume()).unwrap().create_subvolume(dir, &name, &new);
        self.enter(dir, name, made, Node { mode: 0o040_755, nlink: 1, ..Node::default() });
    }

    fn check(&self, fs: &Filesystem) {
        for (id, node) in &self.nodes {
            let inode = fs.inode(*id).unwrap();
            assert_eq!((inode.mode, inode.uid, inode.nlink), (node.mode, node.uid, node.nlink));
            let xattrs: BTreeMap<_, _> = fs.xattrs(*id).unwrap().into_iter().collect();
            assert_eq!(xattrs, node.xattrs);
            match node.mode & 0o170_000 {
                0o040_000 => self.check_directory(fs, *id, node),
                0o100_000 => {
                    assert_eq!(inode.size_bytes, node.bytes.len() as u64);
                    let mut bytes = vec![0; node.bytes.len() + 5];
                    let len = fs.read(*id, FileOffset(0), &mut bytes).unwrap();
                    assert!(bytes[..len] == node.bytes, "contents of {id}");
                }
                0o120_000 => assert_eq!(fs.read_link(*id).unwrap(), node.bytes),
                _ => {}
            }
        }
    }

    fn check_directory(&self, fs: &Filesystem, id: InodeId, node: &Node) {
        let entries: BTreeMap<_, _> = fs
            .read_dir(id, 0)
            .unwrap()
            .map(|entry| entry.map(|entry| (entry.name, entry.target)))
            .collect::<Result<_, _>>()
            .unwrap();
        assert_eq!(entries, node.names);
    }
}

#[test]
fn random_operations_agree_with_a_model() {
    let directory = tempfile::tempdir().unwrap();
    for seed in 0..6 {
        let mut prng = Prng::of_test(1000 + seed);
        let image = directory.path().join(format!("image{seed}"));
        let options = MkfsOptions {
            nodesize_bytes: if seed % 2 == 0 { 4096 } else { 16384 },
            no_holes: seed % 3 != 0,
            block_group_tree: seed % 3 != 0,
            ..MkfsOptions::default()
        };
        let mode = OpenMode::CreateNew { len_bytes: 1 << 30 };
        let device: Arc<dyn Device> =
            Arc::new(FileDevice::open(&image, mode, Window::Whole).unwrap());
        drop(mkfs(vec![device], &options, &Arc::new(Runtime::system())).unwrap());
        let mut fs = open(&image, OpenMode::ReadWrite);
        let mut model = Model::new(fs.top_level());
        for round in 0..4 {
            for _ in 0..150 {
                model.step(&fs, &mut prng);
            }
            model.check(&fs);
            fs.commit().unwrap();
            if round % 2 == 1 {
                drop(fs);
                if oracle::require(Oracle::BtrfsProgs) {
                    assert_checks_clean(&image);
                }
                fs = open(&image, OpenMode::ReadWrite);
                model.check(&fs);
            }
        }
        common::snapshot(&fs, fs.top_level());
    }
}
