//! A name and what it names, entered and taken away whole: the two entries of its directory and the
//! reference back, for inodes and subvolumes alike.

use ubtrfs_ondisk::dir::{DirEntries, FileType};
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::hash::{extref_hash, name_hash};
use ubtrfs_ondisk::inode::{InodeExtrefs, InodeRefs, flags};
use ubtrfs_ondisk::root::RootRef;
use ubtrfs_ondisk::{Corruption, InodeNo, Key, KeyType, Reason, RootId};

use super::inode::InodeId;
use super::make::{EntryBytes, RefPlan, insert_name, plan_ref};
use super::make_subvolume::insert_root_refs;
use super::state::Names;
use crate::error::{Error, Result};
use crate::filesystem::Handle;
use crate::txn::Core;

/// What a name names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Named {
    pub(super) id: InodeId,
    pub(super) file_type: FileType,
    /// The name is that of a subvolume, whose root directory `id` is.
    pub(super) is_subvolume: bool,
}

impl Named {
    /// What `name` in `dir` names.
    ///
    /// # Errors
    /// `NotFound`.
    pub(super) fn find(handle: &Handle<'_>, dir: InodeId, name: &[u8]) -> Result<Self> {
        let found = handle.fs.find_entry(dir, name)?;
        let (id, file_type) = found.ok_or_else(|| Error::not_found(shown(dir, name)))?;
        let is_subvolume = id.root != dir.root && id.inode == InodeNo::SUBVOLUME_ROOT;
        Ok(Self { id, file_type, is_subvolume })
    }

    pub(super) fn is_directory(&self) -> bool {
        self.file_type == FileType::Directory
    }

    fn location(&self) -> Key {
        if self.is_subvolume {
            Key::new(self.id.root.object_id(), KeyType::ROOT_ITEM, u64::MAX)
        } else {
            self.id.key(KeyType::INODE_ITEM, 0)
        }
    }
}

/// A name in words.
pub(super) fn shown(dir: InodeId, name: &[u8]) -> String {
    format!("{:?} in {dir}", String::from_utf8_lossy(name))
}

/// Refuses what an immutable or append-only inode forbids: to lose names, or, as a directory, to
/// lose one. An immutable one gets none either.
///
/// # Errors
/// `NotPermitted`.
pub(super) fn check_flags(id: InodeId, inode_flags: u64, is_append_allowed: bool) -> Result<()> {
    let flag = if inode_flags & flags::IMMUTABLE != 0 {
        "is immutable"
    } else if inode_flags & flags::APPEND != 0 && !is_append_allowed {
        "can only be appended to"
    } else {
        return Ok(());
    };
    Err(Error::NotPermitted { what: id.to_string(), flag })
}

impl Handle<'_> {
    /// Refuses a name for which `id` has no room for a reference back.
    ///
    /// # Errors
    /// `TooManyLinks`.
    pub(super) fn check_ref(&self, named: &Named, dir: InodeId, name: &[u8]) -> Result<()> {
        if named.is_subvolume {
            return Ok(());
        }
        plan_ref(&self.txn, named.id, dir.inode, 0, name, self.has_extended_refs()).map(drop)
    }

    pub(super) fn has_extended_refs(&self) -> bool {
        let superblock = self.txn.core().superblock.lock();
        Incompat(superblock.incompat_flags.get()).contains(Incompat::EXTENDED_IREF)
    }

    /// Enters a name at `index` of a directory that has room for it, and the reference back. The
    /// caller counts it.
    ///
    /// # Errors
    /// What stops an edit; the transaction is then aborted.
    pub(super) fn attach(
        &mut self,
        dir: InodeId,
        name: &[u8],
        named: &Named,
        index: u64,
    ) -> Result<()> {
        let transid = self.txn.generation().0;
        let entry = EntryBytes::new(named.location(), transid, named.file_type, name);
        let extended = self.has_extended_refs();
        let txn = &mut self.txn;
        insert_name(txn, dir, name, index, &entry).map_err(|error| txn.abort(error))?;
        if named.is_subvolume {
            return insert_root_refs(txn, dir, named.id.root, index, name)
                .map_err(|error| txn.abort(error));
        }
        let id = named.id;
        match plan_ref(txn, id, dir.inode, index, name, extended) {
            Ok(RefPlan::Insert(key, bytes)) => txn.insert(id.root, key, &bytes),
            Ok(RefPlan::Replace(key, bytes)) => txn.replace(id.root, key, &bytes),
            Err(error) => Err(error),
        }
        .map_err(|error| txn.abort(error))
    }

    /// Takes a name away, and the reference back. The caller uncounts it.
    ///
    /// # Errors
    /// Damage, where the parts of the name do not agree: nothing has changed if that is found at
    /// the reference back; anything later aborts the transaction.
    pub(super) fn detach(&mut self, dir: InodeId, name: &[u8], named: &Named) -> Result<()> {
        let index = if named.is_subvolume {
            self.remove_root_refs(dir, named.id.root)?
        } else {
            self.remove_ref(dir, name, named.id)?
        };
        self.remove_entry(dir, name).map_err(|error| self.txn.abort(error))?;
        self.tell_gone(dir, name, named.id);
        let txn = &mut self.txn;
        let key = dir.key(KeyType::DIR_INDEX, index);
        txn.remove(dir.root, key).map_err(|error| txn.abort(error))
    }

    /// Removes the references between a subvolume and the directory that it is linked in; returns
    /// its index there.
    fn remove_root_refs(&mut self, dir: InodeId, child: RootId) -> Result<u64> {
        let back = Key::new(child.object_id(), KeyType::ROOT_BACKREF, dir.root.0);
        let forth = Key::new(dir.root.object_id(), KeyType::ROOT_REF, child.0);
        let txn = &mut self.txn;
        let item = txn.core().roots.root_tree.lookup(&forth)?;
        let item = item.ok_or_else(|| Error::not_found(format!("item {forth}")))?;
        let (root_ref, _) =
            RootRef::parse(&item).map_err(|error| error.in_root(RootId::ROOT_TREE))?;
        let index = root_ref.sequence.get();
        txn.remove(RootId::ROOT_TREE, forth)
            .and_then(|()| txn.remove(RootId::ROOT_TREE, back))
            .map_err(|error| txn.abort(error))?;
        Ok(index)
    }

    /// Removes the reference from the inode to its name; returns the name's index.
    fn remove_ref(&mut self, dir: InodeId, name: &[u8], id: InodeId) -> Result<u64> {
        let tree = self.txn.core().roots.tree(id.root)?;
        let damaged = |error: Box<Corruption>| Error::from(error.in_root(id.root));
        let (mut index, mut rest) = (None, Vec::new());
        let key = id.key(KeyType::INODE_REF, dir.inode.0);
        if let Some(item) = tree.lookup(&key)? {
            for reference in InodeRefs::new(&item) {
                let reference = reference.map_err(damaged)?;
                if reference.name == name {
                    index = Some(reference.index);
                } else {
                    reference.write(&mut rest);
                }
            }
        }
        if let Some(index) = index {
            self.put_rest(id, key, &rest)?;
            return Ok(index);
        }
        rest.clear();
        let key = id.key(KeyType::INODE_EXTREF, extref_hash(dir.inode, name));
        if let Some(item) = tree.lookup(&key)? {
            for reference in InodeExtrefs::new(&item) {
                let reference = reference.map_err(damaged)?;
                if reference.parent == dir.inode && reference.name == name {
                    index = Some(reference.index);
                } else {
                    reference.write(&mut rest);
                }
            }
        }
        let Some(index) = index else {
            let what = format!("a reference from {id} to {}", shown(dir, name));
            return Err(damaged(Corruption::new(Reason::Missing).expect(what)));
        };
        self.put_rest(id, key, &rest)?;
        Ok(index)
    }

    /// Removes one name from a directory item that may hold several of its hash.
    pub(super) fn remove_entry(&mut self, dir: InodeId, name: &[u8]) -> Result<()> {
        let key = dir.key(KeyType::DIR_ITEM, name_hash(name));
        self.remove_part(dir, key, name)
    }

    /// Removes the part with that name from an item of directory entries or xattrs.
    pub(super) fn remove_part(&mut self, id: InodeId, key: Key, name: &[u8]) -> Result<()> {
        let item = self.txn.core().roots.tree(id.root)?.lookup(&key)?;
        let item = item.ok_or_else(|| self.txn.abort(Error::not_found(key)))?;
        let (mut rest, mut at) = (Vec::new(), 0);
        for entry in DirEntries::new(&item) {
            let entry = entry.map_err(|error| error.in_root(id.root))?;
            let len = entry.len_bytes();
            if entry.name != name {
                rest.extend_from_slice(&item[at..at + len]);
            }
            at += len;
        }
        self.put_rest(id, key, &rest)
    }

    /// Leaves what is left in an item, or removes it with its last part.
    fn put_rest(&mut self, id: InodeId, key: Key, rest: &[u8]) -> Result<()> {
        let txn = &mut self.txn;
        let result = if rest.is_empty() {
            txn.remove(id.root, key)
        } else {
            txn.replace(id.root, key, rest)
        };
        result.map_err(|error| txn.abort(error))
    }

    /// Counts a name that was made in `dir` at the index that was next.
    pub(super) fn count(&mut self, names: &mut Names, dir: InodeId, name: &[u8]) -> Result<()> {
        let (transid, now) = (self.txn.generation().0, self.txn.now());
        let parent = held(names, self.txn.core(), dir)?;
        parent.count_name(name.len(), transid, now);
        self.fs.inner.files.mark_dirty(&mut self.txn, dir, parent)
    }

    /// Uncounts a name that was taken away from `dir`.
    pub(super) fn uncount(&mut self, names: &mut Names, dir: InodeId, name: &[u8]) -> Result<()> {
        let (transid, now) = (self.txn.generation().0, self.txn.now());
        let parent = held(names, self.txn.core(), dir)?;
        parent.uncount_name(name.len(), transid, now);
        self.fs.inner.files.mark_dirty(&mut self.txn, dir, parent)
    }

    /// Counts a change of an inode itself, as of its names.
    pub(super) fn touch_inode(&mut self, names: &mut Names, id: InodeId) -> Result<()> {
        let (transid, now) = (self.txn.generation().0, self.txn.now());
        let inode = held(names, self.txn.core(), id)?;
        inode.touch(transid, now);
        self.fs.inner.files.mark_dirty(&mut self.txn, id, inode)
    }
}

fn held<'n>(
    names: &'n mut Names,
    core: &Core,
    id: InodeId,
) -> Result<&'n mut super::state::HeldInode> {
    names.hold(core, id).map_err(|error| core.abort(error))
}
