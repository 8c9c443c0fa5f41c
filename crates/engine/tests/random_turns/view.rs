//! All that one side sees of a filesystem, to be compared with what the other sees.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use ubtrfs_engine::Filesystem;
use ubtrfs_iomap::{FiemapSync, FileOffset, FileRange};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_ondisk::{RootId, Uuid};
use ubtrfs_testkit::snapshot::{Entry, Kind, Timestamp};
use ubtrfs_testkit::{Compare, TreeSnapshot, run};

use crate::by_kernel::btrfs;
use crate::common::{self, fiemap_flag_names};
use crate::operation::Flag;

/// Files that are asked for their extents at once.
const FILEFRAG_FILES_MAX: usize = 200;

/// Inode flags as `lsattr` shows them, and on the medium.
const FLAGS: [(u32, u64); 9] = [
    (0x4, flags::COMPRESS),
    (0x8, flags::SYNC),
    (0x10, flags::IMMUTABLE),
    (0x20, flags::APPEND),
    (0x40, flags::NODUMP),
    (0x80, flags::NOATIME),
    (0x400, flags::NOCOMPRESS),
    (0x1_0000, flags::DIRSYNC),
    (0x80_0000, flags::NODATACOW),
];
/// Linux sets the second beside the first where data did not shrink and it has not found the property,
/// as behind many names; of both it shows one.
const COMPRESSIONS: u32 = 0x4 | 0x400;
/// The inode of the directory that stands for a subvolume which lay in what was snapshotted.
const STAND_IN: u64 = 2;
/// Those that keep an inode from being removed.
const PINNING: u32 = 0x10 | 0x20;

/// An extent: where it begins in the file and on the medium, its length, and its flags by name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Extent {
    pub logical: u64,
    pub physical: Option<u64>,
    pub len_bytes: u64,
    pub flags: BTreeSet<String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Subvolume {
    path: String,
    uuid: Option<Uuid>,
    parent_uuid: Option<Uuid>,
    is_read_only: bool,
}

/// Everything that a side sees.
#[derive(Clone, Debug)]
pub struct View {
    pub tree: TreeSnapshot,
    /// Of files and directories, as `lsattr` shows them.
    flags: BTreeMap<PathBuf, u32>,
    /// Of files.
    pub extents: BTreeMap<PathBuf, Vec<Extent>>,
    subvolumes: BTreeMap<u64, Subvolume>,
    default: u64,
    /// Nothing is left to be freed, after which fewer extents are shared.
    pub is_settled: bool,
}

fn has_flags(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::File | Kind::Directory) && entry.inode != Some(STAND_IN)
}

/// Paths of what is of a sort.
fn paths(tree: &TreeSnapshot, is: impl Fn(&Entry) -> bool) -> Vec<PathBuf> {
    let chosen = tree.entries.iter().filter(|(_, entry)| is(entry));
    chosen.map(|(path, _)| std::ffi::OsStr::from_bytes(path).into()).collect()
}

fn is_file(entry: &Entry) -> bool {
    entry.kind == Kind::File
}

impl View {
    /// What the engine sees. Nothing may be in memory only.
    pub fn of_engine(fs: &Filesystem, is_settled: bool) -> Self {
        let mut tree = common::snapshot(fs, fs.top_level());
        let find = |path: &Path| fs.resolve(fs.top_level(), path.as_os_str().as_bytes()).unwrap();
        for path in paths(&tree, is_file) {
            let inode = fs.inode(find(&path)).unwrap();
            let entry = tree.entries.get_mut(path.as_os_str().as_bytes()).unwrap();
            if inode.flags & flags::PREALLOC == 0 && inode.nbytes == inode.size_bytes {
                without_holes(entry);
            }
        }
        let flags = paths(&tree, has_flags).into_iter().map(|path| {
            let bits = fs.inode(find(&path)).unwrap().flags;
            let shown = FLAGS.iter().filter(|(_, bit)| bits & bit != 0);
            (path, shown.map(|(flag, _)| flag).sum())
        });
        let flags = flags.collect();
        let extents = paths(&tree, is_file).into_iter().map(|path| {
            let file = fs.open_data(find(&path)).unwrap();
            let all = FileRange::from(FileOffset::ZERO);
            let extents = file.fiemap(all, usize::MAX, FiemapSync::WriteBack).unwrap();
            let mut pushed = Vec::new();
            extents.iter().for_each(|extent| push(&mut pushed, Extent::of_engine(extent)));
            (path, pushed)
        });
        let extents = extents.collect();
        let named = |uuid: Uuid| (uuid != Uuid([0; 16])).then_some(uuid);
        let all = fs.subvolumes().unwrap().into_iter();
        let live = all.filter(|info| !info.deleted && info.id != RootId::FS_TREE);
        let subvolumes = live.map(|info| {
            let subvolume = Subvolume {
                path: String::from_utf8(info.path.unwrap()).unwrap(),
                uuid: named(info.uuid),
                parent_uuid: named(info.parent_uuid),
                is_read_only: info.read_only,
            };
            (info.id.0, subvolume)
        });
        let subvolumes = subvolumes.collect();
        let default = fs.default_subvolume().unwrap().root.0;
        Self { tree, flags, extents, subvolumes, default, is_settled }
    }

    /// What a mount of the top level shows, before anything is done there: some of what Linux changes
    /// it keeps in memory only, as the time at which a subvolume was renamed.
    pub fn of_kernel(top: &Path, is_settled: bool) -> Self {
        let mut tree = TreeSnapshot::of_directory(top);
        for entry in tree.entries.values_mut().filter(|entry| entry.inode == Some(STAND_IN)) {
            // Made up when it is looked at, from the directory in which it lies.
            (entry.uid, entry.gid) = (0, 0);
        }
        let flags = paths(&tree, has_flags).into_iter().map(|path| {
            let open = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NOATIME;
            let file = rustix::fs::open(top.join(&path), open, Mode::empty()).unwrap();
            let flags = rustix::fs::ioctl_getflags(&file).unwrap().bits();
            (path, flags)
        });
        let flags = flags.collect();
        let extents = extents_by_kernel(top, &paths(&tree, is_file));
        let subvolumes = subvolumes_by_kernel(top);
        let default = btrfs(&["subvolume", "get-default"], &[top]).unwrap();
        let default = default.split_whitespace().nth(1).unwrap().parse().unwrap();
        Self { tree, flags, extents, subvolumes, default, is_settled }
    }

    /// Where inodes lie that a flag keeps from being removed.
    pub fn pinned(&self) -> BTreeSet<String> {
        let pinned = self.flags.iter().filter(|(_, flags)| *flags & PINNING != 0);
        pinned.map(|(path, _)| path.to_str().unwrap().to_owned()).collect()
    }

    /// Where directories lie whose new files get a flag of compression, and which.
    pub fn compressing(&self) -> BTreeMap<String, Flag> {
        let is_directory = |path: &Path| {
            let entry = self.tree.entries.get(path.as_os_str().as_bytes());
            entry.is_some_and(|entry| entry.kind == Kind::Directory)
        };
        let flag = |flags: u32| match flags & COMPRESSIONS {
            0 => None,
            0x4 => Some(Flag::Compress),
            _ => Some(Flag::NoCompress),
        };
        let all = self.flags.iter().filter(|(path, _)| is_directory(path));
        let of = |(path, flags): (&PathBuf, &u32)| Some((path.to_str()?.to_owned(), flag(*flags)?));
        all.filter_map(of).collect()
    }

    /// Where read-only subvolumes lie.
    pub fn read_only(&self) -> BTreeSet<String> {
        let frozen = self.subvolumes.values().filter(|subvolume| subvolume.is_read_only);
        frozen.map(|subvolume| subvolume.path.clone()).collect()
    }

    /// How many extents have a flag.
    pub fn extents_with(&self, flag: &str) -> usize {
        self.extents.values().flatten().filter(|extent| extent.flags.contains(flag)).count()
    }

    /// Fails where the sides see different things. The other is the engine's.
    pub fn assert_same(&self, other: &Self, when: &str) {
        let differences = self.tree.differences(&other.tree, &Compare::same_filesystem());
        assert!(differences.is_empty(), "{when}: the trees differ\n{differences}");
        let mut flags = self.flags.clone();
        for (path, flags) in &mut flags {
            let is_both =
                other.flags.get(path).is_some_and(|flags| flags & COMPRESSIONS == COMPRESSIONS);
            if is_both && *flags & COMPRESSIONS != 0 {
                *flags |= COMPRESSIONS;
            }
        }
        assert_same_maps(&flags, &other.flags, &format!("{when}: flags"));
        assert_same_maps(&self.subvolumes, &other.subvolumes, &format!("{when}: subvolumes"));
        assert_eq!(self.default, other.default, "{when}: the default subvolume");
        let compares_sharing = self.is_settled && other.is_settled;
        let of = |view: &Self| {
            let mut extents = view.extents.clone();
            if !compares_sharing {
                for extent in extents.values_mut().flatten() {
                    extent.flags.remove("shared");
                }
            }
            extents
        };
        assert_same_maps(&of(self), &of(other), &format!("{when}: extents"));
    }

    /// What loses a name in the replay of a log gets the time of the replay, on each side as the order
    /// of steps has it. Such times are not compared, all others are.
    pub fn forget_times_of_replay(&mut self, other: &mut Self, cut: Timestamp) {
        for (path, ours) in &mut self.tree.entries {
            let Some(theirs) = other.tree.entries.get_mut(path) else { continue };
            let is_late = |ctime: Option<Timestamp>| ctime.is_some_and(|ctime| ctime > cut);
            if is_late(ours.ctime) || is_late(theirs.ctime) {
                (ours.ctime, theirs.ctime) = (None, None);
            }
        }
    }
}

/// Linux looks for no hole in a file of as many bytes as it is long, unless a flag says that space was
/// preallocated there. One that got such space from another file, by a clone, has no such flag.
fn without_holes(entry: &mut Entry) {
    let (Some(data), Some(size)) = (&mut entry.data, entry.size_bytes) else { return };
    data.truncate(1);
    if let Some(first) = data.first_mut() {
        first.end = size;
    }
}

fn assert_same_maps<K: Ord + Debug, V: PartialEq + Debug>(
    left: &BTreeMap<K, V>,
    right: &BTreeMap<K, V>,
    what: &str,
) {
    let keys: BTreeSet<&K> = left.keys().chain(right.keys()).collect();
    for key in keys {
        assert_eq!(left.get(key), right.get(key), "{what} of {key:?} (left | right)");
    }
}

impl Extent {
    fn of_engine(extent: &ubtrfs_iomap::FiemapExtent) -> Self {
        Self {
            logical: extent.range.start.bytes(),
            physical: extent.address,
            len_bytes: extent.range.len_bytes(),
            flags: fiemap_flag_names(extent).into_iter().collect(),
        }
    }

    /// From a line of `filefrag`, if it is one of an extent:
    /// `ext: logical..end: physical..end: length: [expected:] flags`.
    fn of_line(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split(':').collect();
        if fields.len() < 5 || fields[0].trim().parse::<u64>().is_err() {
            return None;
        }
        let number = |field: &str| field.split("..").next()?.trim().parse::<u64>().ok();
        let names = fields[fields.len() - 1].split(',').map(|name| name.trim().to_owned());
        let unsaid = ["", "eof", "not_aligned"];
        let flags: BTreeSet<_> = names.filter(|name| !unsaid.contains(&name.as_str())).collect();
        let has_place = !flags.contains("unknown_loc") && !flags.contains("delalloc");
        Some(Self {
            logical: number(fields[1])?,
            physical: number(fields[2]).filter(|_| has_place),
            len_bytes: number(fields[3])?,
            flags,
        })
    }
}

/// Adds an extent. Linux reports two as one where their places follow each other as their offsets do,
/// also compressed ones, which are shorter there.
fn push(extents: &mut Vec<Extent>, extent: Extent) {
    if let Some(last) = extents.last_mut() {
        let place = last.physical.map(|place| place + last.len_bytes);
        let follows = last.logical + last.len_bytes == extent.logical
            && place.is_some()
            && place == extent.physical;
        let mut flags = extent.flags.clone();
        let is_last = flags.remove("last");
        if follows && flags == last.flags {
            last.len_bytes += extent.len_bytes;
            last.flags.extend(is_last.then(|| "last".to_owned()));
            return;
        }
    }
    extents.push(extent);
}

fn extents_by_kernel(top: &Path, files: &[PathBuf]) -> BTreeMap<PathBuf, Vec<Extent>> {
    let mut all: BTreeMap<PathBuf, Vec<Extent>> = BTreeMap::new();
    for files in files.chunks(FILEFRAG_FILES_MAX) {
        let paths = files.iter().map(|file| top.join(file).into_os_string());
        let said = run("filefrag", ["-v".into(), "-b1".into()].into_iter().chain(paths));
        let mut file = PathBuf::new();
        for line in said.lines() {
            if let Some(rest) = line.strip_prefix("File size of ") {
                let path = Path::new(rest.split_once(" is ").unwrap().0);
                file = path.strip_prefix(top).unwrap().to_owned();
                all.insert(file.clone(), Vec::new());
            } else if let Some(extent) = Extent::of_line(line) {
                push(all.get_mut(&file).unwrap(), extent);
            }
        }
    }
    assert_eq!(all.len(), files.len(), "filefrag speaks of each file");
    all
}

fn subvolumes_by_kernel(top: &Path) -> BTreeMap<u64, Subvolume> {
    // ID 257 gen 9 top level 5 parent_uuid - uuid 0d0c… path s1
    let list = |words: &[&str]| btrfs(words, &[top]).unwrap();
    let id = |line: &str| -> u64 { line.split_whitespace().nth(1).unwrap().parse().unwrap() };
    let read_only = list(&["subvolume", "list", "-r"]);
    let read_only: BTreeSet<u64> = read_only.lines().map(id).collect();
    let all = list(&["subvolume", "list", "-u", "-q"]);
    let of_line = |line: &str| {
        let uuid = |name: &str| {
            let mut words = line.split_whitespace();
            words.find(|word| *word == name).unwrap();
            parse_uuid(words.next().unwrap())
        };
        let subvolume = Subvolume {
            path: line.split_once(" path ").unwrap().1.to_owned(),
            uuid: uuid("uuid"),
            parent_uuid: uuid("parent_uuid"),
            is_read_only: read_only.contains(&id(line)),
        };
        (id(line), subvolume)
    };
    all.lines().map(of_line).collect()
}

fn parse_uuid(text: &str) -> Option<Uuid> {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    let bytes: Vec<u8> = digits.chunks(2).map(byte).collect();
    bytes.try_into().ok().map(Uuid)
}
