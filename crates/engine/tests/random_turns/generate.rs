//! Random operations on what a filesystem holds, as far as it is known: a side may find it otherwise.

use std::collections::{BTreeMap, BTreeSet};

use ubtrfs_testkit::Prng;
use ubtrfs_testkit::odd::acl_xattr;
use ubtrfs_testkit::snapshot::Kind;

use crate::operation::{Data, Flag, Node, Operation, Ranges, Rename, Space, Way, split};
use crate::view::View;

/// Names of one directory, of each sort.
const FILE_NAMES: u64 = 12;
const DIRECTORY_NAMES: u64 = 4;
const SUBVOLUME_NAMES: u64 = 5;
/// Names above another, at most.
const DEPTH_MAX: usize = 3;
/// With more entries than that, what is done is to remove some.
const ENTRIES_MAX: usize = 400;
/// Bytes of a name of which few fit an inode's reference item.
pub const LONG_NAME_BYTES: usize = 230;
const SECTOR_BYTES: u64 = 4096;
/// Where files are written at most, about: each look reads all that lies before. And for a long hole of
/// a file without checksums that has an item, with address 0, the lowmem mode of `btrfs check` counts
/// the checksums that others have at such addresses, in images of the kernel's as in ours: holes must
/// end before 13 MiB, where data begins.
const OFFSET_MAX: u64 = 6 << 20;
/// Longer files do not get many names: each is read by each.
const MANY_NAMES_BYTES_MAX: u64 = 256 << 10;

/// What an entry is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Is {
    File,
    Directory,
    Subvolume,
    /// A directory in whose place another subvolume lay.
    StandIn,
    Other,
}

/// Which operations there are more of.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    pub nodesize_bytes: usize,
    pub many_names: usize,
    /// Large files that no compression makes smaller.
    pub fills: bool,
    /// As much is removed as is done otherwise.
    pub shrinks: bool,
    /// The first thing is to make a file that is overwritten in place.
    pub begins_in_place: bool,
}

/// Chooses operations.
#[derive(Debug)]
pub struct Generator {
    random: Prng,
    habits: Habits,
    entries: BTreeMap<String, Is>,
    /// What has a flag that forbids its removal.
    pinned: BTreeSet<String>,
    /// Subvolumes that are read-only.
    frozen: BTreeSet<String>,
    /// Lengths of files and names of attributes, as far as they are known.
    sizes: BTreeMap<String, u64>,
    xattrs: BTreeSet<(String, &'static str)>,
    /// Directories whose new files get a flag of compression.
    compressing: BTreeMap<String, Flag>,
}

const XATTRS: [&str; 4] = ["trusted.one", "user.two", "user.three", "trusted.overlay.opaque"];

impl Generator {
    /// For a filesystem of which `view` is known.
    pub fn new(random: Prng, habits: Habits, view: &View) -> Self {
        let is = |entry: &ubtrfs_testkit::snapshot::Entry| match (entry.kind, entry.subvolume) {
            (Kind::File, _) => Is::File,
            (Kind::Directory, Some(1..)) => Is::Subvolume,
            (Kind::Directory, _) if entry.inode == Some(2) => Is::StandIn,
            (Kind::Directory, _) => Is::Directory,
            _ => Is::Other,
        };
        let text = |path: &Vec<u8>| String::from_utf8(path.clone()).unwrap();
        let entries = view.tree.entries.iter().map(|(path, entry)| (text(path), is(entry)));
        let (entries, pinned, frozen) = (entries.collect(), view.pinned(), view.read_only());
        let (mut sizes, mut xattrs) = (BTreeMap::new(), BTreeSet::new());
        for (path, entry) in &view.tree.entries {
            sizes.extend(entry.size_bytes.map(|size| (text(path), size)));
            let has = |name: &&str| {
                entry.xattrs.as_ref().is_some_and(|all| all.contains_key(name.as_bytes()))
            };
            xattrs.extend(XATTRS.into_iter().filter(has).map(|name| (text(path), name)));
        }
        let compressing = view.compressing();
        Self { random, habits, entries, pinned, frozen, sizes, xattrs, compressing }
    }

    /// The next operation.
    pub fn next(&mut self) -> Operation {
        if std::mem::take(&mut self.habits.begins_in_place) {
            return self.make_in_place();
        }
        loop {
            let operation = self.any();
            let is_idle = match &operation {
                // There is no such thing: the top level came in its place.
                Operation::RemoveDirectory { path }
                | Operation::Remove { path }
                | Operation::DeleteSubvolume { path } => path.is_empty(),
                Operation::Rename { from, to, .. } => from.is_empty() || from == to,
                _ => false,
            };
            if !is_idle {
                return operation;
            }
        }
    }

    fn any(&mut self) -> Operation {
        let is_crowded = self.entries.len() > ENTRIES_MAX;
        if (is_crowded || self.habits.shrinks) && self.random.chance(1, 2) {
            return self.removal();
        }
        if !self.pinned.is_empty() && self.random.chance(1, 12) {
            return self.clear_flag(String::new());
        }
        match self.random.below(100) {
            0..42 => self.of_data(),
            42..66 => self.of_names(),
            66..82 => self.of_attributes(),
            82..93 => self.of_subvolumes(),
            93..97 => Operation::Fsync { path: self.file() },
            97 => Operation::Clean { part: self.random.chance(1, 2).then_some(8) },
            _ => Operation::Commit,
        }
    }

    /// One that is not a commit of everything.
    pub fn next_without_commit(&mut self) -> Operation {
        loop {
            match self.next() {
                Operation::Commit
                | Operation::Clean { .. }
                | Operation::Fsync { .. }
                | Operation::Snapshot { .. }
                | Operation::MakeSubvolume { .. }
                | Operation::DeleteSubvolume { .. } => {}
                operation => return operation,
            }
        }
    }

    /// An fsync, more likely of what `operation` changed than of another file.
    pub fn fsync_after(&mut self, operation: &Operation) -> Operation {
        let changed: Vec<&str> =
            operation.paths().into_iter().filter(|path| self.is_there(path)).collect();
        let path = match changed.is_empty() || self.random.chance(1, 3) {
            true => self.file(),
            false => changed[self.random.index(changed.len())].to_owned(),
        };
        Operation::Fsync { path }
    }

    fn is_there(&self, path: &str) -> bool {
        matches!(self.entries.get(path), Some(Is::File | Is::Directory | Is::Subvolume))
    }

    /// Takes note of what was done.
    pub fn note(&mut self, operation: &Operation) {
        match operation {
            Operation::Make { path, node } => {
                let is = match node {
                    Node::File | Node::FileInPlace | Node::Unnamed => Is::File,
                    Node::Directory => Is::Directory,
                    _ => Is::Other,
                };
                self.entries.insert(path.clone(), is);
                if is == Is::Directory {
                    self.note_inherited(path);
                }
            }
            Operation::Write { path, offset, data, .. } => {
                self.entries.insert(path.clone(), Is::File);
                self.note_end(path, offset + data.0.len() as u64);
            }
            Operation::Truncate { path, size, .. } => _ = self.sizes.insert(path.clone(), *size),
            Operation::Clone(ranges) | Operation::Copy(ranges) | Operation::Dedupe(ranges) => {
                self.note_end(&ranges.to, ranges.to_offset + ranges.len_bytes);
            }
            Operation::SetXattr { path, name, .. } => {
                _ = self.xattrs.insert((path.clone(), *name));
            }
            Operation::RemoveXattr { path, name } => {
                _ = self.xattrs.remove(&(path.clone(), *name));
            }
            Operation::RemoveDirectory { path }
            | Operation::Remove { path }
            | Operation::RemoveOpen { path }
            | Operation::DeleteSubvolume { path } => _ = self.take(path),
            Operation::RemoveMany { paths } => paths.iter().for_each(|path| _ = self.take(path)),
            Operation::Rename { from, to, mode } => self.note_rename(from, to, *mode),
            Operation::Link { from, to } => self.note_link(from, to),
            Operation::LinkMany { from, to } => to.iter().for_each(|to| self.note_link(from, to)),
            Operation::MakeSubvolume { path } => {
                self.entries.insert(path.clone(), Is::Subvolume);
                self.note_inherited(path);
            }
            Operation::Snapshot { from, to, read_only } => {
                self.note_snapshot(from, to);
                self.note_frozen(to, *read_only);
            }
            Operation::ReadOnly { path, read_only } => self.note_frozen(path, *read_only),
            Operation::Flag { path, flag: Flag::Immutable | Flag::Append, on } => match on {
                true => _ = self.pinned.insert(path.clone()),
                false => _ = self.pinned.remove(path),
            },
            Operation::Flag { path, flag: flag @ (Flag::Compress | Flag::NoCompress), on } => {
                self.note_compressing(path, on.then_some(*flag));
            }
            Operation::Compression { path, value } => {
                let flag = if *value == "none" { Flag::NoCompress } else { Flag::Compress };
                self.note_compressing(path, Some(flag));
            }
            _ => {}
        }
    }

    fn note_inherited(&mut self, path: &str) {
        let flag = self.compressing.get(split(path).0).copied();
        self.note_compressing(path, flag);
    }

    fn note_compressing(&mut self, path: &str, flag: Option<Flag>) {
        let is_directory =
            matches!(self.entries.get(path), Some(Is::Directory | Is::Subvolume | Is::StandIn));
        match flag.filter(|_| is_directory) {
            Some(flag) => _ = self.compressing.insert(path.to_owned(), flag),
            None => _ = self.compressing.remove(path),
        }
    }

    fn note_end(&mut self, path: &str, end: u64) {
        let size = self.sizes.entry(path.to_owned()).or_default();
        *size = end.max(*size);
    }

    fn note_frozen(&mut self, path: &str, read_only: bool) {
        match read_only {
            true => _ = self.frozen.insert(path.to_owned()),
            false => _ = self.frozen.remove(path),
        }
    }

    fn note_link(&mut self, from: &str, to: &str) {
        let is = self.entries.get(from).copied().unwrap_or(Is::File);
        self.entries.insert(to.to_owned(), is);
    }

    fn note_rename(&mut self, from: &str, to: &str, mode: Rename) {
        if from == to {
            return;
        }
        let moved = self.take(from);
        let replaced = self.take(to);
        self.put(to, moved);
        match mode {
            Rename::Exchange => self.put(from, replaced),
            Rename::Whiteout => _ = self.entries.insert(from.to_owned(), Is::Other),
            Rename::Replace | Rename::NoReplace => {}
        }
    }

    fn note_snapshot(&mut self, from: &str, to: &str) {
        let mut copied = self.below(from);
        let inner: Vec<String> = copied
            .iter()
            .filter(|(path, is)| **is == Is::Subvolume && !path.is_empty())
            .map(|(path, _)| path.clone())
            .collect();
        copied.retain(|path, _| !inner.iter().any(|inner| is_inside(path, inner)));
        copied.extend(inner.into_iter().map(|path| (path, Is::StandIn)));
        copied.insert(String::new(), Is::Subvolume);
        self.put(to, copied);
    }

    /// An entry and all below it, by the rest of their paths.
    fn below(&self, path: &str) -> BTreeMap<String, Is> {
        let rest = |at: &str| match at.strip_prefix(path)? {
            "" => Some(String::new()),
            rest if path.is_empty() => Some(rest.to_owned()),
            rest => rest.strip_prefix('/').map(str::to_owned),
        };
        self.entries.iter().filter_map(|(at, is)| Some((rest(at)?, *is))).collect()
    }

    fn take(&mut self, path: &str) -> BTreeMap<String, Is> {
        let taken = self.below(path);
        self.entries.retain(|at, _| at != path && !is_inside(at, path));
        for marked in [&mut self.pinned, &mut self.frozen] {
            marked.retain(|at| at != path && !is_inside(at, path));
        }
        self.xattrs.retain(|(at, _)| at != path && !is_inside(at, path));
        self.sizes.retain(|at, _| at != path && !is_inside(at, path));
        self.compressing.retain(|at, _| at != path && !is_inside(at, path));
        taken
    }

    fn put(&mut self, path: &str, entries: BTreeMap<String, Is>) {
        self.entries.extend(entries.into_iter().map(|(rest, is)| match rest.as_str() {
            "" => (path.to_owned(), is),
            _ => (format!("{path}/{rest}"), is),
        }));
    }
}

/// What operations are about.
impl Generator {
    fn of_data(&mut self) -> Operation {
        let path = self.file();
        match self.random.below(40) {
            0..16 => self.write(path),
            16..20 => Operation::Truncate {
                path,
                size: self.random.below(150_000),
                way: if self.random.chance(1, 2) { Way::Straight } else { Way::Buffered },
            },
            20..29 => {
                let (offset, len_bytes) =
                    (self.random.below(150_000), 1 + self.random.below(200_000));
                let space = match self.random.below(9) {
                    0..2 => Space::Allocate,
                    2..4 => Space::AllocateBehind,
                    4..7 => Space::Punch,
                    7 => Space::Zero,
                    _ => Space::ZeroBehind,
                };
                Operation::Reserve { path, offset, len_bytes, space }
            }
            29..33 => Operation::Clone(self.ranges(true)),
            33..36 => Operation::Dedupe(self.ranges(true)),
            _ => Operation::Copy(self.ranges(false)),
        }
    }

    fn write(&mut self, path: String) -> Operation {
        let random = &mut self.random;
        let way = match random.below(5) {
            0 => Way::Direct,
            1..3 => Way::Buffered,
            _ => Way::Straight,
        };
        let (is_large, much) = match self.habits.fills {
            true => (random.chance(1, 2), 16 << 20),
            false => (random.chance(1, 16), 4 << 20),
        };
        let mut len = match random.below(4) {
            _ if is_large => (1 << 20) + 1 + random.index(much),
            0 => 1 + random.index(150_000),
            _ => 1 + random.index(6000),
        };
        let mut offset = match random.below(8) {
            0..4 => 0,
            4..7 => random.below(250_000),
            _ => random.below(OFFSET_MAX),
        };
        if way == Way::Direct {
            let sector = usize::try_from(SECTOR_BYTES).unwrap();
            (len, offset) = (len.next_multiple_of(sector), offset / SECTOR_BYTES * SECTOR_BYTES);
        }
        let bytes = match random.below(6) {
            _ if self.habits.fills && is_large => random.bytes(len),
            0..3 => random.text(len),
            3 => vec![0; len],
            _ => random.bytes(len),
        };
        Operation::Write { path, offset, data: Data(bytes), way }
    }

    /// Ranges of two files, of whole sectors if `is_aligned`; seldom beyond the end of the source.
    fn ranges(&mut self, is_aligned: bool) -> Ranges {
        let from = self.file();
        let to = match self.random.chance(1, 8) {
            true => self.fresh_file(),
            false => self.file(),
        };
        let unit = if is_aligned { SECTOR_BYTES } else { 1 };
        let size = match self.random.chance(1, 10) {
            true => 100_000,
            false => self.sizes.get(&from).copied().unwrap_or(0),
        };
        let random = &mut self.random;
        let to_offset = random.below(150_000) / unit * unit;
        let units = size / unit;
        if units == 0 || random.chance(1, 4) {
            return Ranges { from, offset: 0, len_bytes: 0, to, to_offset };
        }
        let start = random.below(units);
        let count = 1 + random.below((units - start).min(200_000 / unit));
        Ranges { from, offset: start * unit, len_bytes: count * unit, to, to_offset }
    }

    fn of_names(&mut self) -> Operation {
        let mode = match self.random.below(6) {
            0..3 => Rename::Replace,
            3 => Rename::NoReplace,
            4 => Rename::Exchange,
            _ => Rename::Whiteout,
        };
        match self.random.below(40) {
            0..3 => Operation::Make { path: self.fresh_file(), node: Node::File },
            3..5 => self.make_in_place(),
            5..8 => Operation::Make { path: self.fresh_file(), node: Node::Unnamed },
            8..14 => Operation::Make { path: self.fresh("d"), node: Node::Directory },
            14..16 => {
                Operation::RemoveDirectory { path: self.one_of(&[Is::Directory, Is::StandIn]) }
            }
            16..18 => Operation::Remove { path: self.file() },
            18 => Operation::RemoveOpen { path: self.file() },
            19..26 => {
                let from = self.file();
                let takes = match mode {
                    Rename::Exchange => true,
                    Rename::NoReplace => false,
                    Rename::Replace | Rename::Whiteout => self.random.chance(1, 2),
                };
                let to = self.place_for(&from, takes);
                Operation::Rename { from, to, mode }
            }
            26..28 => {
                let (from, to) = (self.one_of(&[Is::Directory]), self.fresh("d"));
                Operation::Rename { from, to, mode }
            }
            28..32 => {
                let from = self.file();
                let to = self.place_for(&from, false);
                Operation::Link { from, to }
            }
            32 => self.link_many(),
            33..36 => Operation::Make { path: self.fresh_file(), node: Node::Symlink },
            36 => self.remove_many(),
            _ => {
                let nodes = [Node::Fifo, Node::Socket, Node::CharDevice, Node::BlockDevice];
                let node = nodes[self.random.index(nodes.len())];
                Operation::Make { path: self.fresh("n"), node }
            }
        }
    }

    /// A file that is overwritten in place, which Linux refuses beside the flags of compression that a new file
    /// inherits. Where all directories have one, as by chance the top level's goes down to all that is made
    /// later, one of them loses it.
    fn make_in_place(&mut self) -> Operation {
        for _ in 0..20 {
            let path = self.fresh_file();
            if !self.compressing.contains_key(split(&path).0) {
                return Operation::Make { path, node: Node::FileInPlace };
            }
        }
        let at = self.random.index(self.compressing.len());
        let (path, flag) = self.compressing.iter().nth(at).expect("each place had one");
        Operation::Flag { path: path.clone(), flag: *flag, on: false }
    }

    /// More names in one directory than fit one item.
    fn link_many(&mut self) -> Operation {
        let mut from = self.file();
        for _ in 0..10 {
            if self.sizes.get(&from).is_none_or(|size| *size < MANY_NAMES_BYTES_MAX) {
                break;
            }
            from = self.file();
        }
        let dir = split(&from).0;
        let tag = self.random.below(4);
        let filler = "x".repeat(LONG_NAME_BYTES - 6);
        let to =
            (0..self.habits.many_names).map(|at| join(dir, &format!("m{tag}-{at:03}{filler}")));
        Operation::LinkMany { to: to.collect(), from }
    }

    fn remove_many(&mut self) -> Operation {
        let is_one = |path: &&String| split(path).1.len() == LONG_NAME_BYTES;
        let all: Vec<&String> = self.entries.keys().filter(is_one).collect();
        if all.is_empty() {
            return self.link_many();
        }
        let prefix = |path: &str| path[..path.len() - LONG_NAME_BYTES + 3].to_owned();
        let chosen = prefix(all[self.random.index(all.len())]);
        let paths = all.into_iter().filter(|path| prefix(path) == chosen).cloned();
        Operation::RemoveMany { paths: paths.collect() }
    }

    fn of_attributes(&mut self) -> Operation {
        let path = self.one_of(&[Is::File, Is::File, Is::Directory, Is::Subvolume]);
        let random = &mut self.random;
        let name = XATTRS[random.index(XATTRS.len())];
        match random.below(20) {
            0..2 => Operation::Chmod { path, mode: u32::try_from(random.below(0o10000)).unwrap() },
            2..4 => {
                let mut id = || u32::try_from(random.below(70_000)).unwrap();
                Operation::Chown { path, uid: id(), gid: id() }
            }
            4..6 => {
                let mut time = || {
                    let sec = i64::try_from(random.below(1 << 33)).unwrap() - (1 << 31);
                    (sec, u32::try_from(random.below(1_000_000_000)).unwrap())
                };
                Operation::Times { path, atime: time(), mtime: time() }
            }
            6..10 => {
                let len_max =
                    if random.chance(1, 5) { self.habits.nodesize_bytes - 500 } else { 300 };
                let len = random.index(len_max);
                Operation::SetXattr { path, name, value: Data(random.bytes(len)) }
            }
            10..12 => match self.xattrs.len() {
                0 => Operation::RemoveXattr { path, name },
                len => {
                    let (path, name) = self.xattrs.iter().nth(random.index(len)).unwrap().clone();
                    Operation::RemoveXattr { path, name }
                }
            },
            12..14 => self.acl(path),
            14..16 => {
                let values = ["zstd", "lzo", "zlib", "none"];
                Operation::Compression { path, value: values[random.index(values.len())] }
            }
            16..18 => {
                let flags = [
                    Flag::Immutable,
                    Flag::Append,
                    Flag::InPlace,
                    Flag::InPlace,
                    Flag::NoAtime,
                    Flag::NoDump,
                    Flag::Compress,
                    Flag::NoCompress,
                ];
                let flag = flags[random.index(flags.len())];
                // Of a directory, nothing could be done in it.
                let pins = matches!(flag, Flag::Immutable | Flag::Append);
                let path = if pins && random.chance(7, 8) { self.file() } else { path };
                Operation::Flag { path, flag, on: true }
            }
            _ => self.clear_flag(path),
        }
    }

    fn clear_flag(&mut self, path: String) -> Operation {
        let pinned: Vec<&String> = self.pinned.iter().collect();
        let path = match pinned.is_empty() {
            true => path,
            false => pinned[self.random.index(pinned.len())].clone(),
        };
        let flags =
            [Flag::Immutable, Flag::Append, Flag::InPlace, Flag::NoCompress, Flag::Compress];
        // Both of those that pin, sooner or later.
        let count = if pinned.is_empty() { flags.len() } else { 2 };
        Operation::Flag { path, flag: flags[self.random.index(count)], on: false }
    }

    fn acl(&mut self, path: String) -> Operation {
        const NO_ID: u32 = u32::MAX;
        let random = &mut self.random;
        let mut permissions = || u16::try_from(random.below(8)).unwrap();
        let (user, group, mask) = (permissions(), permissions(), permissions());
        let uid = u32::from(permissions()) + 1000;
        let entries = [
            (0x01, 7, NO_ID),
            (0x02, user, uid),
            (0x04, group, NO_ID),
            (0x08, user, uid + 9),
            (0x10, mask, NO_ID),
            (0x20, 4, NO_ID),
        ];
        let is_directory = self.entries.get(&path).is_some_and(|is| *is != Is::File);
        let name = match is_directory && self.random.chance(1, 2) {
            true => "system.posix_acl_default",
            false => "system.posix_acl_access",
        };
        Operation::Acl { path, name, value: Data(acl_xattr(&entries)) }
    }

    fn of_subvolumes(&mut self) -> Operation {
        let path = self.one_of(&[Is::Subvolume]);
        let is_top = path.is_empty();
        match self.random.below(22) {
            0..5 => Operation::MakeSubvolume { path: self.fresh("s") },
            5..11 => {
                let read_only = self.random.chance(1, 3);
                Operation::Snapshot { from: path, to: self.fresh("s"), read_only }
            }
            11..13 => {
                let to = self.fresh("s");
                Operation::Rename { from: path, to, mode: Rename::NoReplace }
            }
            13..16 if !is_top => Operation::ReadOnly { path, read_only: self.random.chance(1, 3) },
            16..18 => Operation::SetDefault { path },
            _ => Operation::DeleteSubvolume { path: self.leaf_subvolume() },
        }
    }

    fn removal(&mut self) -> Operation {
        match self.random.below(12) {
            0..3 => self.remove_many(),
            3..7 => Operation::DeleteSubvolume { path: self.leaf_subvolume() },
            7 => Operation::Clean { part: None },
            8 => Operation::Truncate { path: self.file(), size: 0, way: Way::Straight },
            9 => Operation::Remove { path: self.one_of(&[Is::Other, Is::File]) },
            _ => Operation::Remove { path: self.file() },
        }
    }
}

/// Paths.
impl Generator {
    /// A path of one of these, the top level if there is none; each of them is as likely. Seldom of
    /// what lies in a read-only subvolume, where nothing can be done.
    fn one_of(&mut self, of: &[Is]) -> String {
        let wanted = of[self.random.index(of.len())];
        let takes_frozen = self.random.chance(1, 15);
        let is_frozen = |path: &str| self.frozen.iter().any(|frozen| is_inside(path, frozen));
        let all: Vec<&String> = self
            .entries
            .iter()
            .filter(|(path, is)| **is == wanted && (!path.is_empty() || wanted == Is::Subvolume))
            .map(|(path, _)| path)
            .filter(|path| takes_frozen || !is_frozen(path))
            .collect();
        match all.len() {
            0 => String::new(),
            len => all[self.random.index(len)].clone(),
        }
    }

    /// A file that is there, seldom one that is not.
    fn file(&mut self) -> String {
        let path = self.one_of(&[Is::File]);
        if path.is_empty() || self.random.chance(1, 12) { self.fresh_file() } else { path }
    }

    /// A subvolume that holds no other, nearly always: such ones can be deleted.
    fn leaf_subvolume(&mut self) -> String {
        let mut path = String::new();
        for _ in 0..8 {
            path = self.one_of(&[Is::Subvolume]);
            let inner = |(at, is): (&String, &Is)| *is == Is::Subvolume && is_inside(at, &path);
            if !path.is_empty() && !self.entries.iter().any(inner) {
                break;
            }
        }
        path
    }

    fn fresh_file(&mut self) -> String {
        self.fresh("f")
    }

    /// A place for something new, which may be taken.
    fn fresh(&mut self, letter: &str) -> String {
        let mut path = String::new();
        for _ in 0..4 {
            let dir = match self.random.chance(1, 3) {
                true => String::new(),
                false => self.one_of(&[Is::Directory, Is::Subvolume]),
            };
            path = self.inside(&dir, letter);
            let is_free = !self.entries.contains_key(&path) && !self.frozen.contains(&dir);
            if dir.split('/').count() <= DEPTH_MAX && is_free {
                return path;
            }
        }
        path
    }

    /// A file, or a free place, where `from` can be moved to: in its own subvolume, nearly always.
    fn place_for(&mut self, from: &str, is_taken: bool) -> String {
        let own = self.subvolume_of(from).to_owned();
        let mut path = String::new();
        for _ in 0..20 {
            path = if is_taken { self.file() } else { self.fresh_file() };
            let is_good = self.entries.contains_key(&path) == is_taken && path != from;
            if is_good && self.subvolume_of(&path) == own {
                return path;
            }
        }
        path
    }

    /// Where the subvolume begins that holds a path.
    fn subvolume_of<'p>(&self, path: &'p str) -> &'p str {
        let mut above = split(path).0;
        while !above.is_empty() && self.entries.get(above) != Some(&Is::Subvolume) {
            above = split(above).0;
        }
        above
    }

    fn inside(&mut self, dir: &str, letter: &str) -> String {
        let count = match letter {
            "d" => DIRECTORY_NAMES,
            "s" => SUBVOLUME_NAMES,
            _ => FILE_NAMES,
        };
        join(dir, &format!("{letter}{}", self.random.below(count)))
    }
}

fn join(dir: &str, name: &str) -> String {
    if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") }
}

fn is_inside(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
}
