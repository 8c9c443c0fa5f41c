//! Removing names of files, and the file with its last name.
//!
//! A file may have more extents than one transaction should free. So its last name goes first, in
//! one handle with an orphan item that says that the inode is to be removed; its items go a few at
//! a time, from the end; and the inode goes last with the orphan item. A crash in between leaves
//! an orphan, which Linux removes at its next mount.

use ubtrfs_ondisk::dir::{DirEntries, FileType};
use ubtrfs_ondisk::file_extent::FileExtent;
use ubtrfs_ondisk::hash::{extref_hash, name_hash};
use ubtrfs_ondisk::inode::{InodeExtrefs, InodeRefs};
use ubtrfs_ondisk::{Corruption, Key, KeyType, ObjectId, Reason};

use super::inode::InodeId;
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle};
use crate::txn::Reservation;

/// Items of a removed inode that go under one handle.
const ITEMS_PER_HANDLE: usize = 64;

impl Filesystem {
    /// Removes the name `name` from directory `dir`, and the file with its last name. The calling
    /// thread must hold no handle. Durable with the next commit.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`; `IsDirectory` for a directory or subvolume; damage in the tree.
    pub fn unlink(&self, dir: InodeId, name: &[u8]) -> Result<()> {
        let mut handle = self.begin(Reservation::items(8))?;
        let orphan = handle.unlink_name(dir, name)?;
        drop(handle);
        let Some(id) = orphan else { return Ok(()) };
        loop {
            let mut handle = self.begin(Reservation::items(3 * ITEMS_PER_HANDLE as u64))?;
            if handle.remove_items(id)? {
                return Ok(());
            }
        }
    }
}

impl Handle<'_> {
    /// Removes a name. Returns the inode if that was its last: it is an orphan then.
    fn unlink_name(&mut self, dir: InodeId, name: &[u8]) -> Result<Option<InodeId>> {
        let (id, file_type) = self
            .fs
            .find_entry(dir, name)?
            .ok_or_else(|| Error::not_found(format!("{:?} in {dir}", lossy(name))))?;
        if file_type == FileType::Directory || id.root != dir.root {
            return Err(Error::IsDirectory { what: format!("{:?} in {dir}", lossy(name)) });
        }
        let (transid, now) = (self.txn.generation().0, self.txn.now());
        let core = self.txn.core();
        let files = &self.fs.inner.files;
        let mut names = files.names();
        names.check_writable(core, dir.root)?;
        names.hold(core, dir)?;
        names.hold(core, id)?;

        let index = self.remove_ref(dir, name, id)?;
        self.remove_entry(dir, name).map_err(|error| self.txn.abort(error))?;
        let txn = &mut self.txn;
        let key = dir.key(KeyType::DIR_INDEX, index);
        txn.remove(dir.root, key).map_err(|error| txn.abort(error))?;

        let parent = names.hold(core, dir)?;
        parent.uncount_name(name.len(), transid, now);
        files.mark_dirty(txn, dir, parent)?;
        let held = names.hold(core, id)?;
        held.item.nlink = held.item.nlink.get().saturating_sub(1).into();
        held.touch(transid, now);
        files.mark_dirty(txn, id, held)?;
        if held.item.nlink.get() > 0 {
            return Ok(None);
        }
        let key = Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, id.inode.0);
        txn.insert(id.root, key, &[]).map_err(|error| txn.abort(error))?;
        Ok(Some(id))
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
            let what = format!("a reference from {id} to {:?} in {dir}", lossy(name));
            return Err(damaged(Corruption::new(Reason::Missing).expect(what)));
        };
        self.put_rest(id, key, &rest)?;
        Ok(index)
    }

    /// Removes one name from a directory item that may hold several of its hash.
    fn remove_entry(&mut self, dir: InodeId, name: &[u8]) -> Result<()> {
        let key = dir.key(KeyType::DIR_ITEM, name_hash(name));
        let item = self.txn.core().roots.tree(dir.root)?.lookup(&key)?;
        let item = item.ok_or_else(|| self.txn.abort(Error::not_found(key)))?;
        let (mut rest, mut at) = (Vec::new(), 0);
        for entry in DirEntries::new(&item) {
            let entry = entry.map_err(|error| error.in_root(dir.root))?;
            let len = entry.len_bytes();
            if entry.name != name {
                rest.extend_from_slice(&item[at..at + len]);
            }
            at += len;
        }
        self.put_rest(dir, key, &rest)
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

    /// Removes the last items of an orphan, its extents with them. Returns whether all are gone,
    /// the inode and its orphan item too.
    fn remove_items(&mut self, id: InodeId) -> Result<bool> {
        for _ in 0..ITEMS_PER_HANDLE {
            let last = {
                let mut cursor = self.txn.core().roots.tree(id.root)?.cursor();
                cursor.seek_back(&id.key(KeyType::MAX, u64::MAX))?;
                cursor.current()?.map(|(key, data)| (key, data.to_vec()))
            };
            let Some((key, data)) = last.filter(|(key, _)| key.objectid == id.inode.object_id())
            else {
                return Err(self.txn.abort(Error::not_found(id)));
            };
            if key.ty == KeyType::EXTENT_DATA {
                self.drop_extent(id, key.offset, &data)?;
            }
            let txn = &mut self.txn;
            txn.remove(id.root, key).map_err(|error| txn.abort(error))?;
            if key.ty == KeyType::INODE_ITEM {
                let orphan = Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, id.inode.0);
                txn.remove(id.root, orphan).map_err(|error| txn.abort(error))?;
                self.fs.inner.files.forget(id);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Takes back a file extent's reference to its data.
    fn drop_extent(&mut self, id: InodeId, file_offset: u64, data: &[u8]) -> Result<()> {
        let extent = FileExtent::parse(data).map_err(|error| error.in_root(id.root))?;
        let (FileExtent::Regular(extent) | FileExtent::Prealloc(extent)) = extent else {
            return Ok(());
        };
        if extent.is_hole() {
            return Ok(());
        }
        let (start, len) = (extent.disk_bytenr, extent.disk_num_bytes);
        let offset = file_offset.wrapping_sub(extent.offset);
        if self.txn.core().alloc.drop_data(start, len, id.root, id.inode, offset) {
            let csums = &self.fs.inner.files.csums;
            csums.remove(&mut self.txn, start.0, start.0.saturating_add(len))?;
            // Only now: who gets the space next brings checksums of its own.
            self.txn.core().alloc.release_data(start, len);
        }
        Ok(())
    }
}

fn lossy(name: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(name)
}
