//! The model as a snapshot of a tree, to be compared with what the kernel shows.

use super::{Content, Id, Model, Node, ROOT_DIRECTORY, TOP_LEVEL, Target};
use crate::TreeSnapshot;
use crate::snapshot::{Entry, Kind, TreeBuilder, hash_content};

/// The number of the empty directories that stand in for subvolumes in snapshots.
const STAND_IN: u64 = 2;

impl Model {
    /// Everything below the top level. Where files have holes is not known.
    ///
    /// # Panics
    /// If a name leads nowhere.
    pub fn tree(&self) -> TreeSnapshot {
        let mut builder = TreeBuilder::new();
        self.add(Id::root_of(TOP_LEVEL), Vec::new(), &mut builder);
        builder.finish()
    }

    fn add(&self, id: Id, path: Vec<u8>, builder: &mut TreeBuilder) {
        let node = self.node(id).expect("a name leads to an inode");
        let is_root = id.inode == ROOT_DIRECTORY;
        let mut entry = entry_of(node);
        entry.inode = Some(id.inode);
        entry.subvolume = Some(if is_root { id.root } else { 0 });
        builder.add(path.clone(), (id.root, id.inode), entry);
        for (name, target) in node.entries().into_iter().flatten() {
            let mut below = path.clone();
            if !below.is_empty() {
                below.push(b'/');
            }
            below.extend_from_slice(name);
            let child = match target {
                Target::Inode(inode) => Some(Id { root: id.root, inode: *inode }),
                Target::Subvolume(root) => self.subvolume_at(id, name, *root).map(Id::root_of),
            };
            match child {
                Some(child) => self.add(child, below, builder),
                None => add_stand_in(id.root, node, below, builder),
            }
        }
    }
}

/// As the kernel shows it: with the owner of the directory that it lies in.
fn add_stand_in(root: u64, dir: &Node, path: Vec<u8>, builder: &mut TreeBuilder) {
    let mut entry = Entry::new(Kind::Directory, 0o755, dir.uid, dir.gid);
    entry.nlink = Some(1);
    entry.size_bytes = Some(0);
    entry.inode = Some(STAND_IN);
    entry.subvolume = Some(0);
    builder.add(path, (root, STAND_IN), entry);
}

fn entry_of(node: &Node) -> Entry {
    let kind = node.kind().expect("a mode says what it is");
    let mut entry = Entry::new(kind, node.mode, node.uid, node.gid);
    entry.nlink = Some(node.nlink);
    entry.size_bytes = Some(node.size_bytes());
    entry.mtime = Some(node.mtime);
    entry.ctime = Some(node.ctime);
    entry.atime = Some(node.atime);
    entry.btime = Some(node.otime);
    entry.xattrs = Some(node.xattrs.clone());
    match &node.content {
        Content::File(bytes) => {
            let whole = 0..bytes.len_bytes();
            let hash = hash_content(bytes.len_bytes(), std::slice::from_ref(&whole), |at, part| {
                bytes.read(at, part);
                Ok::<_, std::convert::Infallible>(())
            });
            entry.content = hash.ok();
        }
        Content::Symlink(target) => entry.target = Some(target.clone()),
        Content::Directory(_) | Content::Special => {}
    }
    if matches!(kind, Kind::CharDevice | Kind::BlockDevice) {
        let part = |bits: u64| u32::try_from(bits).expect("masked bits are few");
        entry.rdev = Some((part(node.rdev >> 20 & 0xfff), part(node.rdev & 0xf_ffff)));
    }
    entry
}
