//! Operations on names and attributes. Each first refuses, in the order in which the
//! engine does, and then changes.

use std::collections::BTreeMap;

use ubtrfs_ondisk::hash::name_hash;
use ubtrfs_ondisk::inode::flags;

use super::{Change, Content, Id, Model, New, Node, Refusal, Result, SparseBytes, Target};
use crate::snapshot::Kind;

const PERMISSIONS: u32 = 0o7777;
/// Bytes before the name of an extended attribute.
const ENTRY_BYTES: usize = 30;
const COMPRESSION_XATTR: &[u8] = b"btrfs.compression";
const COMPRESSION_FLAGS: u64 = flags::COMPRESS | flags::NOCOMPRESS;

/// What a name leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Named {
    Inode(Id),
    Subvolume(u64),
    /// An empty directory in the place of a subvolume that is linked elsewhere.
    StandIn,
}

/// Whether an append-only inode may grow by what is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Growth {
    Allowed,
    Forbidden,
}

impl Model {
    /// Makes a file, directory, node, fifo or socket, of the number that the other side chose.
    ///
    /// # Errors
    /// As the engine's.
    pub fn create(&mut self, dir: Id, name: &[u8], new: &New, number: u64) -> Result<Id> {
        let content = match Kind::of_mode(new.mode) {
            Some(Kind::File) => Content::File(SparseBytes::default()),
            Some(Kind::Directory) => Content::Directory(BTreeMap::new()),
            Some(Kind::Symlink) | None => return Err(Refusal::InvalidArgument),
            Some(_) => Content::Special,
        };
        self.make(dir, name, Node::new(new, content), number)
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// As the engine's.
    pub fn symlink(
        &mut self,
        dir: Id,
        name: &[u8],
        target: &[u8],
        new: &New,
        number: u64,
    ) -> Result<Id> {
        if target.len() > self.limits.target_bytes {
            return Err(Refusal::TooLong);
        }
        if target.is_empty() || target.contains(&0) {
            return Err(Refusal::InvalidArgument);
        }
        let new = New { mode: 0o120_000 | new.mode & PERMISSIONS, ..*new };
        self.make(dir, name, Node::new(&new, Content::Symlink(target.to_vec())), number)
    }

    fn make(&mut self, dir: Id, name: &[u8], mut node: Node, number: u64) -> Result<Id> {
        self.check_name(name)?;
        self.writable(dir.root)?;
        let entries = self.entries(dir)?;
        self.permitted(dir, Growth::Allowed)?;
        if entries.contains_key(name) {
            return Err(Refusal::Exists);
        }
        inherit(self.found(dir)?, &mut node);
        let id = Id { root: dir.root, inode: number };
        self.insert(id, node);
        self.enter(dir, name, Target::Inode(number));
        Ok(id)
    }

    /// Makes an inode without a name, as a directory would.
    ///
    /// # Errors
    /// As the engine's.
    pub fn create_unlinked(&mut self, dir: Id, new: &New, number: u64) -> Result<Id> {
        let content = match Kind::of_mode(new.mode) {
            Some(Kind::File) => Content::File(SparseBytes::default()),
            Some(Kind::Directory | Kind::Symlink) | None => return Err(Refusal::InvalidArgument),
            Some(_) => Content::Special,
        };
        self.writable(dir.root)?;
        self.entries(dir)?;
        self.permitted(dir, Growth::Allowed)?;
        let mut node = Node::new(new, content);
        node.nlink = 0;
        inherit(self.found(dir)?, &mut node);
        let id = Id { root: dir.root, inode: number };
        self.insert(id, node);
        Ok(id)
    }

    /// Gives an inode another name.
    ///
    /// # Errors
    /// As the engine's.
    pub fn link(&mut self, dir: Id, name: &[u8], id: Id) -> Result<()> {
        self.check_name(name)?;
        if dir.root != id.root {
            return Err(Refusal::OtherSubvolume);
        }
        self.writable(dir.root)?;
        let node = self.found(id)?;
        if node.entries().is_some() {
            return Err(Refusal::IsDirectory);
        }
        self.permitted(id, Growth::Forbidden)?;
        if node.nlink >= self.limits.link_count {
            return Err(Refusal::Limit);
        }
        let entries = self.entries(dir)?;
        self.permitted(dir, Growth::Allowed)?;
        if entries.contains_key(name) {
            return Err(Refusal::Exists);
        }
        self.enter(dir, name, Target::Inode(id.inode));
        let now = self.now;
        let node = self.change(id);
        node.nlink += 1;
        node.ctime = now;
        Ok(())
    }

    /// Removes a name of a file. With its last, the file stays without one until
    /// [`Model::evict`]; the call returns it then.
    ///
    /// # Errors
    /// As the engine's.
    pub fn unlink(&mut self, dir: Id, name: &[u8]) -> Result<Option<Id>> {
        let named = self.removable(dir, name)?;
        match named {
            Named::Subvolume(_) | Named::StandIn => Err(Refusal::IsDirectory),
            Named::Inode(id) if self.found(id)?.entries().is_some() => Err(Refusal::IsDirectory),
            Named::Inode(id) => {
                self.permitted(id, Growth::Forbidden)?;
                self.leave(dir, name);
                Ok(self.drop_name(id))
            }
        }
    }

    /// Removes an empty directory, as [`Model::unlink`] a file.
    ///
    /// # Errors
    /// As the engine's.
    pub fn rmdir(&mut self, dir: Id, name: &[u8]) -> Result<Option<Id>> {
        match self.removable(dir, name)? {
            Named::Subvolume(_) => Err(Refusal::InvalidArgument),
            Named::StandIn => {
                self.leave(dir, name);
                Ok(None)
            }
            Named::Inode(id) => {
                let entries = self.found(id)?.entries().ok_or(Refusal::NotDirectory)?;
                self.permitted(id, Growth::Forbidden)?;
                if !entries.is_empty() {
                    return Err(Refusal::NotEmpty);
                }
                self.leave(dir, name);
                Ok(self.drop_name(id))
            }
        }
    }

    fn removable(&self, dir: Id, name: &[u8]) -> Result<Named> {
        self.writable(dir.root)?;
        let named = self.named(dir, name).ok_or(Refusal::NotFound)?;
        self.permitted(dir, Growth::Forbidden)?;
        Ok(named)
    }

    /// Removes an inode that has no name; one that has got a name stays.
    ///
    /// # Errors
    /// As the engine's.
    pub fn evict(&mut self, id: Id) -> Result<()> {
        if self.found(id)?.nlink == 0 {
            self.subvolumes.get_mut(&id.root).expect("it was found").nodes.remove(&id.inode);
        }
        Ok(())
    }

    /// Removes all inodes that have no name: what is left when the filesystem is opened again.
    pub fn evict_all(&mut self) {
        for subvolume in self.subvolumes.values_mut() {
            subvolume.nodes.retain(|_, node| node.nlink > 0);
        }
    }

    /// Counts one name less; returns the inode if it was the last.
    pub(super) fn drop_name(&mut self, id: Id) -> Option<Id> {
        let now = self.now;
        let node = self.change(id);
        node.nlink -= 1;
        node.ctime = now;
        (node.nlink == 0).then_some(id)
    }

    /// What a name names.
    pub(super) fn named(&self, dir: Id, name: &[u8]) -> Option<Named> {
        // What is no directory has no names, as the engine sees it.
        let target = self.node(dir)?.entries()?.get(name)?;
        Some(match target {
            Target::Inode(inode) => Named::Inode(Id { root: dir.root, inode: *inode }),
            Target::Subvolume(root) => match self.subvolume_at(dir, name, *root) {
                Some(root) => Named::Subvolume(root),
                None => Named::StandIn,
            },
        })
    }

    /// Refuses what an immutable or append-only inode forbids.
    pub(super) fn permitted(&self, id: Id, growth: Growth) -> Result<()> {
        let have = self.found(id)?.flags;
        let forbidding = match growth {
            Growth::Allowed => flags::IMMUTABLE,
            Growth::Forbidden => flags::IMMUTABLE | flags::APPEND,
        };
        if have & forbidding == 0 { Ok(()) } else { Err(Refusal::NotPermitted) }
    }

    /// Changes attributes.
    ///
    /// # Errors
    /// As the engine's.
    pub fn set_attributes(&mut self, id: Id, change: &Change) -> Result<()> {
        if change.flags.is_none() {
            self.permitted(id, Growth::Forbidden)?;
        }
        let pinned = change.flags.unwrap_or(0) & (flags::IMMUTABLE | flags::APPEND);
        if pinned != 0 && matches!(self.found(id)?.content, Content::Symlink(_)) {
            return Err(Refusal::InvalidArgument);
        }
        self.writable(id.root)?;
        self.found(id)?;
        let now = self.now;
        let node = self.change(id);
        if let Some(mode) = change.mode {
            node.mode = node.mode & !PERMISSIONS | mode & PERMISSIONS;
        }
        node.uid = change.uid.unwrap_or(node.uid);
        node.gid = change.gid.unwrap_or(node.gid);
        node.atime = change.atime.unwrap_or(node.atime);
        node.mtime = change.mtime.unwrap_or(node.mtime);
        node.ctime = change.ctime.unwrap_or(now);
        node.otime = change.otime.unwrap_or(node.otime);
        node.flags = change.flags.unwrap_or(node.flags);
        Ok(())
    }

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// As the engine's.
    pub fn set_xattr(&mut self, id: Id, name: &[u8], value: &[u8]) -> Result<()> {
        if name.is_empty() || name.contains(&0) {
            return Err(Refusal::InvalidArgument);
        }
        if name.len() > self.limits.name_bytes || name.len() + value.len() > self.limits.xattr_bytes
        {
            return Err(Refusal::TooLong);
        }
        self.writable(id.root)?;
        self.permitted(id, Growth::Forbidden)?;
        // Those whose names have one hash share an item.
        let hash = name_hash(name);
        let beside = self.found(id)?.xattrs.iter();
        let beside = beside.filter(|(other, _)| *other != name && name_hash(other) == hash);
        let beside_bytes: usize =
            beside.map(|(name, value)| ENTRY_BYTES + name.len() + value.len()).sum();
        if beside_bytes + ENTRY_BYTES + name.len() + value.len() > self.limits.item_bytes {
            return Err(Refusal::Limit);
        }
        let is_property = name == COMPRESSION_XATTR;
        if is_property && !takes_property(self.found(id)?) {
            return Err(Refusal::InvalidArgument);
        }
        let now = self.now;
        let node = self.change(id);
        if is_property {
            let is_none = [&b""[..], b"no", b"none"].contains(&value);
            let flag = if is_none { flags::NOCOMPRESS } else { flags::COMPRESS };
            node.flags = node.flags & !COMPRESSION_FLAGS | flag;
        }
        node.ctime = now;
        node.xattrs.insert(name.to_vec(), value.to_vec());
        Ok(())
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// As the engine's.
    pub fn remove_xattr(&mut self, id: Id, name: &[u8]) -> Result<()> {
        self.writable(id.root)?;
        self.permitted(id, Growth::Forbidden)?;
        if !self.found(id)?.xattrs.contains_key(name) {
            return Err(Refusal::NotFound);
        }
        if name == COMPRESSION_XATTR && !takes_property(self.found(id)?) {
            return Err(Refusal::InvalidArgument);
        }
        let now = self.now;
        let node = self.change(id);
        if name == COMPRESSION_XATTR {
            node.flags &= !COMPRESSION_FLAGS;
        }
        node.ctime = now;
        node.xattrs.remove(name);
        Ok(())
    }
}

/// Lets a new inode take over from its directory what Linux does: flags, and the property that names
/// a compression.
fn inherit(parent: &Node, node: &mut Node) {
    node.flags = if parent.flags & flags::NOCOMPRESS != 0 {
        flags::NOCOMPRESS
    } else {
        parent.flags & flags::COMPRESS
    };
    if parent.flags & flags::NODATACOW != 0 {
        node.flags |= flags::NODATACOW;
        if node.bytes().is_some() {
            node.flags |= flags::NODATASUM;
        }
    }
    if takes_property(node) && parent.flags & COMPRESSION_FLAGS != 0 {
        // The method alone. That there is to be none is not handed on but by the flag.
        let value = parent.xattrs.get(COMPRESSION_XATTR).map_or("", |value| {
            let value = str::from_utf8(value).unwrap_or_default();
            value.split(':').next().unwrap_or_default()
        });
        if ["zlib", "lzo", "zstd"].contains(&value) {
            node.xattrs.insert(COMPRESSION_XATTR.to_vec(), value.as_bytes().to_vec());
        }
    }
}

/// Whether an inode can have the property that names a compression.
fn takes_property(node: &Node) -> bool {
    let is_kind = node.bytes().is_some() || node.entries().is_some();
    is_kind && node.flags & (flags::NODATACOW | flags::NODATASUM) == 0
}
