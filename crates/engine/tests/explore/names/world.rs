//! A filesystem of some names, and all that is seen of it.

use std::collections::BTreeMap;
use std::ops::Deref;

use ubtrfs_engine::{Error, Filesystem, InodeId, NewInode, Reservation, Result};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_rt::Time;
use ubtrfs_testkit::crash::Image;

use crate::world::Opened;

/// Directories `a` with file `x`, and `b`; files `one`, and `two` with another name in `a`; subvolumes `s` with file `y`, and `t`.
pub struct Names {
    opened: Opened,
    pub top: InodeId,
    pub a: InodeId,
    pub b: InodeId,
    pub s: InodeId,
    pub t: InodeId,
    pub x: InodeId,
    pub y: InodeId,
    pub one: InodeId,
    pub two: InodeId,
}

impl Deref for Names {
    type Target = Opened;

    fn deref(&self) -> &Opened {
        &self.opened
    }
}

pub const NOW: Time = Time { sec: 1_700_000_000, nsec: 0 };

pub fn start() -> Image {
    crate::made(|| {
        let opened = Opened::new(None);
        let fs = &opened.fs;
        let top = fs.top_level();
        let new = |mode: u32| NewInode::new(mode, NOW);
        let make = |dir: InodeId, name: &[u8], mode: u32| {
            fs.begin(Reservation::create(0)).unwrap().create(dir, name, &new(mode)).unwrap()
        };
        let subvolume = |name: &[u8]| {
            let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
            handle.create_subvolume(top, name, &new(0o040_755)).unwrap()
        };
        let a = make(top, b"a", 0o040_755);
        make(top, b"b", 0o040_755);
        let s = subvolume(b"s");
        subvolume(b"t");
        let places = [(a, &b"x"[..]), (s, b"y"), (top, b"one"), (top, b"two")];
        for (number, (dir, name)) in places.into_iter().enumerate() {
            let id = make(dir, name, 0o100_644);
            let byte = b'0' + u8::try_from(number).unwrap();
            fs.open_data(id).unwrap().write(FileOffset::ZERO, &vec![byte; 10 << number]).unwrap();
            if name == b"two" {
                fs.begin(Reservation::create(0)).unwrap().link(a, b"too", id).unwrap();
            }
        }
        opened.close()
    })
}

impl Names {
    pub fn open(image: &Image) -> Self {
        let opened = Opened::of_image(image.clone(), None);
        let find = |path: &[u8]| opened.fs.resolve(opened.fs.top_level(), path).unwrap();
        let (top, a, b, s, t) = (find(b""), find(b"a"), find(b"b"), find(b"s"), find(b"t"));
        let (x, y, one, two) = (find(b"a/x"), find(b"s/y"), find(b"one"), find(b"two"));
        Self { opened, top, a, b, s, t, x, y, one, two }
    }

    /// What an inode is, by whatever number.
    pub fn shown(&self, id: InodeId) -> String {
        let known = [
            (self.top, "top"),
            (self.a, "a"),
            (self.b, "b"),
            (self.s, "s"),
            (self.t, "t"),
            (self.x, "x"),
            (self.y, "y"),
            (self.one, "one"),
            (self.two, "two"),
        ];
        let known = known.into_iter().find_map(|(known, name)| (known == id).then_some(name));
        match known {
            Some(name) => name.to_owned(),
            None if id.is_stand_in() => "a stand-in".to_owned(),
            None => "a new one".to_owned(),
        }
    }
}

/// All that is below the top level, by its path.
pub type Tree = BTreeMap<String, String>;

/// What is there when nobody changes it.
pub fn tree_of(fs: &Filesystem) -> Tree {
    let mut tree = Tree::new();
    let mut firsts = BTreeMap::new();
    walk(fs, fs.top_level(), "", &mut tree, &mut firsts).unwrap();
    for subvolume in fs.subvolumes().unwrap().into_iter().filter(|subvolume| !subvolume.deleted) {
        let path = String::from_utf8(subvolume.path.unwrap()).unwrap();
        tree.insert(format!("subvolume {path}"), format!("read-only {}", subvolume.read_only));
    }
    tree
}

fn walk(
    fs: &Filesystem,
    dir: InodeId,
    path: &str,
    tree: &mut Tree,
    firsts: &mut BTreeMap<InodeId, String>,
) -> Result<()> {
    for entry in fs.read_dir(dir, 0)? {
        let entry = entry?;
        let path = format!("{path}/{}", String::from_utf8_lossy(&entry.name));
        assert_eq!(fs.lookup(dir, &entry.name)?, entry.target, "{path}");
        let id = entry.target;
        let inode = fs.inode(id)?;
        assert_eq!(inode.file_type(), entry.file_type, "{path}");
        let first = firsts.entry(id).or_insert_with(|| path.clone()).clone();
        let mut seen = format!("{first} {:o} {} {}", inode.mode, inode.nlink, inode.size_bytes);
        for (name, value) in fs.xattrs(id)? {
            seen += &format!(" {}={value:?}", String::from_utf8_lossy(&name));
        }
        match inode.file_type() {
            FileType::Regular => {
                let mut bytes = vec![0; 100];
                let len = fs.read(id, DiskOffset(0), &mut bytes)?;
                seen += &format!(" {}", String::from_utf8_lossy(&bytes[..len]));
            }
            FileType::Symlink => seen += &String::from_utf8_lossy(&fs.read_link(id)?),
            FileType::Directory if !id.is_stand_in() => {
                assert_eq!(fs.parent(id)?, dir, "{path}");
                walk(fs, id, &path, tree, firsts)?;
            }
            _ => {}
        }
        tree.insert(path, seen);
    }
    Ok(())
}

/// What a call answers, whichever numbers it names; `None` if something failed.
pub fn answer_if_any<T>(result: Result<T>, shown: impl FnOnce(T) -> String) -> Option<String> {
    match result {
        Ok(found) => Some(shown(found)),
        Err(
            error @ (Error::NotFound { .. }
            | Error::Exists { .. }
            | Error::NotDirectory { .. }
            | Error::IsDirectory { .. }
            | Error::NotEmpty { .. }
            | Error::InvalidArgument { .. }
            | Error::OtherSubvolume { .. }
            | Error::ReadOnly { .. }),
        ) => {
            let shown = format!("{error:?}");
            shown.split(' ').next().map(str::to_owned)
        }
        Err(_) => None,
    }
}

/// As [`answer_if_any`], where nothing fails.
pub fn answer<T>(result: Result<T>, shown: impl FnOnce(T) -> String) -> String {
    answer_if_any(result, shown).expect("nothing fails")
}
