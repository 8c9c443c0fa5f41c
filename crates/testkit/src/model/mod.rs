//! A filesystem as plain maps in memory: what the engine must agree with.
//!
//! It has the operations of the engine's interface and refuses what that refuses, for the same
//! reason, and knows nothing else of it: no tree, no transaction, no extent. The numbers of inodes
//! and subvolumes are the other side's to choose, as two filesystems may count differently; the
//! model only wants them to be new. A clone is cheap and shares what does not change.

mod bytes;
mod contents;
mod names;
mod rename;
mod subvolumes;
mod view;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::snapshot::{Kind, Timestamp};
pub use bytes::SparseBytes;
pub use contents::{Copied, Piece, Progress};
pub use rename::{Place, RenameMode};

/// An inode: its subvolume and its number there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Id {
    /// The subvolume.
    pub root: u64,
    /// The number in it.
    pub inode: u64,
}

/// The number of each subvolume's root directory.
pub const ROOT_DIRECTORY: u64 = 256;

/// The number of the top-level subvolume.
pub const TOP_LEVEL: u64 = 5;

impl Id {
    /// The root directory of a subvolume.
    pub fn root_of(root: u64) -> Self {
        Self { root, inode: ROOT_DIRECTORY }
    }
}

/// Why an operation is refused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Refusal {
    /// What was named is not there.
    NotFound,
    /// The name is taken.
    Exists,
    /// A directory was needed.
    NotDirectory,
    /// Something other than a directory was needed.
    IsDirectory,
    /// The directory has entries.
    NotEmpty,
    /// A name, target or attribute is longer than fits.
    TooLong,
    /// What no filesystem takes.
    InvalidArgument,
    /// What is to be linked or moved lies in another subvolume.
    OtherSubvolume,
    /// A flag of the inode forbids it.
    NotPermitted,
    /// A count is at its limit.
    Limit,
    /// The subvolume is read-only.
    ReadOnly,
    /// What this version does not do.
    Unsupported,
}

/// The result of an operation.
pub type Result<T, E = Refusal> = std::result::Result<T, E>;

/// What an inode is made with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct New {
    /// Type and permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number, as it is stored.
    pub rdev: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// Birth.
    pub otime: Timestamp,
}

/// Attributes to change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Change {
    /// Permissions.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last access.
    pub atime: Option<Timestamp>,
    /// Last change of the content.
    pub mtime: Option<Timestamp>,
    /// Last change of the inode; unless given, now.
    pub ctime: Option<Timestamp>,
    /// Birth.
    pub otime: Option<Timestamp>,
    /// Inode flags, all of them.
    pub flags: Option<u64>,
}

/// An inode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// Type and permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node, else 0.
    pub rdev: u64,
    /// Inode flags.
    pub flags: u64,
    /// Number of names; 1 of a directory.
    pub nlink: u32,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// Birth.
    pub otime: Timestamp,
    /// Extended attributes.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// What it holds.
    pub content: Content,
}

/// What an inode holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// A file's bytes.
    File(SparseBytes),
    /// A directory's names.
    Directory(BTreeMap<Vec<u8>, Target>),
    /// A symbolic link's target.
    Symlink(Vec<u8>),
    /// Nothing: a device, fifo or socket.
    Special,
}

/// What a name names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Target {
    /// An inode of the same subvolume.
    Inode(u64),
    /// A subvolume; where it is not linked here, an empty directory that stands in for it.
    Subvolume(u64),
}

/// A subvolume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subvolume {
    /// Its inodes by number.
    pub nodes: BTreeMap<u64, Arc<Node>>,
    /// The directory and name by which it is linked; `None` of the top level.
    pub parent: Option<(Id, Vec<u8>)>,
    /// Whether it refuses changes.
    pub read_only: bool,
    /// Of which subvolume it is a snapshot, by number, which may be gone.
    pub snapshot_of: Option<u64>,
}

/// What the format and the filesystem's options allow at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes of a name.
    pub name_bytes: usize,
    /// Bytes of a symbolic link's target.
    pub target_bytes: usize,
    /// Bytes of an item's data in a leaf.
    pub item_bytes: usize,
    /// Bytes of an extended attribute's name and value together.
    pub xattr_bytes: usize,
    /// Names of one inode.
    pub link_count: u32,
    /// Bytes of a sector.
    pub sector_bytes: u64,
}

impl Limits {
    /// Those of a filesystem with tree blocks of that size.
    pub fn of_nodesize(nodesize_bytes: usize) -> Self {
        // Header of a leaf, header of an item.
        let item_bytes = nodesize_bytes - 101 - 25;
        Self {
            name_bytes: 255,
            item_bytes,
            // After the head of an inline extent.
            target_bytes: (item_bytes - 21).min(4095),
            // After the head of an entry.
            xattr_bytes: (item_bytes - 30).min(65_535),
            link_count: 65_535,
            sector_bytes: 4096,
        }
    }
}

/// The whole filesystem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Model {
    subvolumes: BTreeMap<u64, Subvolume>,
    default_subvolume: u64,
    limits: Limits,
    now: Timestamp,
}

impl Model {
    /// An empty one, of which `root` is the root directory, and `now` the time that never changes.
    pub fn new(root: &New, limits: Limits, now: Timestamp) -> Self {
        let mut top =
            Subvolume { nodes: BTreeMap::new(), parent: None, read_only: false, snapshot_of: None };
        let node = Node::new(root, Content::Directory(BTreeMap::new()));
        top.nodes.insert(ROOT_DIRECTORY, Arc::new(node));
        let subvolumes = BTreeMap::from([(TOP_LEVEL, top)]);
        Self { subvolumes, default_subvolume: TOP_LEVEL, limits, now }
    }

    /// The limits that it was made with.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The subvolumes by number.
    pub fn subvolumes(&self) -> &BTreeMap<u64, Subvolume> {
        &self.subvolumes
    }

    /// The number of the subvolume that is mounted when none is named.
    pub fn default_subvolume(&self) -> u64 {
        self.default_subvolume
    }

    /// An inode, if there is one.
    pub fn node(&self, id: Id) -> Option<&Node> {
        self.subvolumes.get(&id.root)?.nodes.get(&id.inode).map(|node| &**node)
    }

    /// All inodes, by subvolume and number.
    pub fn nodes(&self) -> impl Iterator<Item = (Id, &Node)> {
        self.subvolumes.iter().flat_map(|(root, subvolume)| {
            let id = |inode: &u64| Id { root: *root, inode: *inode };
            subvolume.nodes.iter().map(move |(inode, node)| (id(inode), &**node))
        })
    }

    /// How many inodes there are.
    pub fn node_count(&self) -> usize {
        self.subvolumes.values().map(|subvolume| subvolume.nodes.len()).sum()
    }

    fn writable(&self, root: u64) -> Result<()> {
        match self.subvolumes.get(&root) {
            None => Err(Refusal::NotFound),
            Some(subvolume) if subvolume.read_only => Err(Refusal::ReadOnly),
            Some(_) => Ok(()),
        }
    }

    fn found(&self, id: Id) -> Result<&Node> {
        self.node(id).ok_or(Refusal::NotFound)
    }

    fn entries(&self, dir: Id) -> Result<&BTreeMap<Vec<u8>, Target>> {
        let node = self.found(dir)?;
        match &node.content {
            Content::Directory(_) if node.nlink == 0 => Err(Refusal::NotFound),
            Content::Directory(entries) => Ok(entries),
            _ => Err(Refusal::NotDirectory),
        }
    }

    /// The inode, to be changed. It was found before.
    fn change(&mut self, id: Id) -> &mut Node {
        let subvolume = self.subvolumes.get_mut(&id.root).expect("it was found before");
        Arc::make_mut(subvolume.nodes.get_mut(&id.inode).expect("it was found before"))
    }

    fn insert(&mut self, id: Id, node: Node) {
        let nodes = &mut self.subvolumes.get_mut(&id.root).expect("it was found before").nodes;
        let before = nodes.insert(id.inode, Arc::new(node));
        assert!(before.is_none(), "the number {} of {} is taken", id.inode, id.root);
    }

    /// Names `target` in a directory that has no such name.
    fn enter(&mut self, dir: Id, name: &[u8], target: Target) {
        let now = self.now;
        let node = self.change(dir);
        (node.mtime, node.ctime) = (now, now);
        let Content::Directory(entries) = &mut node.content else {
            unreachable!("it was found to be a directory")
        };
        let before = entries.insert(name.to_vec(), target);
        assert!(before.is_none(), "the name was found to be free");
    }

    /// Takes a name out of a directory that has it.
    fn leave(&mut self, dir: Id, name: &[u8]) -> Target {
        let now = self.now;
        let node = self.change(dir);
        (node.mtime, node.ctime) = (now, now);
        let Content::Directory(entries) = &mut node.content else {
            unreachable!("it was found to be a directory")
        };
        entries.remove(name).expect("the name was found")
    }

    fn check_name(&self, name: &[u8]) -> Result<()> {
        if name.len() > self.limits.name_bytes {
            return Err(Refusal::TooLong);
        }
        let is_one = !name.is_empty()
            && name != b"."
            && name != b".."
            && !name.contains(&b'/')
            && !name.contains(&0);
        if is_one { Ok(()) } else { Err(Refusal::InvalidArgument) }
    }
}

impl Node {
    fn new(new: &New, content: Content) -> Self {
        let is_device =
            matches!(Kind::of_mode(new.mode), Some(Kind::CharDevice | Kind::BlockDevice));
        Self {
            mode: new.mode,
            uid: new.uid,
            gid: new.gid,
            rdev: if is_device { new.rdev } else { 0 },
            flags: 0,
            nlink: 1,
            atime: new.atime,
            mtime: new.mtime,
            ctime: new.ctime,
            otime: new.otime,
            xattrs: BTreeMap::new(),
            content,
        }
    }

    /// What it is.
    pub fn kind(&self) -> Option<Kind> {
        Kind::of_mode(self.mode)
    }

    /// The length that it tells: of a directory twice the length of its names.
    pub fn size_bytes(&self) -> u64 {
        let len = |bytes: usize| u64::try_from(bytes).expect("a length fits");
        match &self.content {
            Content::File(bytes) => bytes.len_bytes(),
            Content::Directory(entries) => entries.keys().map(|name| 2 * len(name.len())).sum(),
            Content::Symlink(target) => len(target.len()),
            Content::Special => 0,
        }
    }

    /// A directory's names.
    pub fn entries(&self) -> Option<&BTreeMap<Vec<u8>, Target>> {
        match &self.content {
            Content::Directory(entries) => Some(entries),
            _ => None,
        }
    }

    /// A file's bytes.
    pub fn bytes(&self) -> Option<&SparseBytes> {
        match &self.content {
            Content::File(bytes) => Some(bytes),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
