//! Making subvolumes, and choosing the default one.

use ubtrfs_ondisk::dir::{DirEntries, FileType};
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::hash::name_hash;
use ubtrfs_ondisk::inode::{InodeItem, flags};
use ubtrfs_ondisk::root::{RootItem, RootRef};
use ubtrfs_ondisk::{DiskKey, InodeNo, Key, KeyType, ObjectId, RootId, Uuid};
use zerocopy::IntoBytes;

use super::entry::check_flags;
use super::inode::InodeId;
use super::make::{
    EntryBytes, NewInode, check_directory, check_new_name, insert_name, insert_root_directory,
};
use super::state::timespec;
use super::uuid_tree;
use super::xattr::{COMPRESSION_XATTR, inheritable};
use crate::error::Result;
use crate::filesystem::{Filesystem, Handle};
use crate::txn::{self, Reservation};

impl Handle<'_> {
    /// Makes an empty subvolume named `name` in `dir` and returns its root directory, which gets
    /// the attributes of `new`.
    ///
    /// # Errors
    /// As [`Handle::create`]; `Limit` when there are no numbers left.
    pub fn create_subvolume(
        &mut self,
        dir: InodeId,
        name: &[u8],
        new: &NewInode,
    ) -> Result<InodeId> {
        let (transid, now) = (self.txn.generation().0, self.txn.now());
        let core = self.txn.core();
        let files = &self.fs.inner.files;
        let mut names = files.names();
        names.check_writable(core, dir.root)?;
        names.check_not_deleted(dir.root)?;
        let parent = names.hold(core, dir)?;
        check_directory(dir, &parent.item)?;
        let dir_flags = parent.item.flags.get();
        let index = parent.next_index(core, dir)?;
        check_new_name(self.fs, core, dir, name)?;
        // In this order, unlike where a file is made: as Linux.
        check_flags(dir, dir_flags, true)?;
        let new = self.permissions_of_subvolume(dir, new)?;
        // All that may fail for what it reads comes before the first change.
        let from = InodeId::root_of(dir.root);
        let property =
            self.fs.xattr(from, COMPRESSION_XATTR)?.and_then(|value| inheritable(&value));
        let root = names.take_root(core)?;
        let location = Key::new(root.object_id(), KeyType::ROOT_ITEM, 0);
        let entry = EntryBytes::new(location, transid, FileType::Directory, name);
        let _replacement = files.replace_name(&mut names);
        insert_name(&mut self.txn, dir, name, index, &entry)?;

        let uuid = Uuid(core.runtime.identifiers.uuid());
        let nodesize = core.roots.store.geometry().nodesize_bytes as u64;
        let otime = timespec(new.otime);
        let item = RootItem {
            inode: root_inode(nodesize),
            root_dirid: InodeNo::SUBVOLUME_ROOT.0.into(),
            refs: 1.into(),
            uuid: uuid.0,
            ctransid: transid.into(),
            otransid: transid.into(),
            ctime: timespec(now),
            otime,
            ..RootItem::default()
        };
        let txn = &mut self.txn;
        txn.create_tree(root, &item).map_err(|error| txn.abort(error))?;
        let mut directory = insert_root_directory(txn, root, &new)?;
        let id = InodeId::root_of(root);
        if let Some(value) = property {
            directory.flags = flags::COMPRESS.into();
            self.put_compression(id, &directory, &value)?;
        }
        let txn = &mut self.txn;
        insert_root_refs(txn, dir, root, index, name).map_err(|error| txn.abort(error))?;
        uuid_tree::add(txn, KeyType::UUID_KEY_SUBVOL, uuid, root)
            .map_err(|error| txn.abort(error))?;

        let parent = names.hold(core, dir)?;
        parent.count_name(name.len(), transid, now);
        files.mark_dirty(&mut self.txn, dir, parent)?;
        names.hold_new_directory(id, directory);
        Ok(id)
    }
}

impl Handle<'_> {
    /// Gives a new subvolume the compression that was set by name for the one that it is made in:
    /// in Linux that counts, not the directory.
    fn put_compression(&mut self, id: InodeId, directory: &InodeItem, value: &[u8]) -> Result<()> {
        let txn = &mut self.txn;
        txn.replace(id.root, id.key(KeyType::INODE_ITEM, 0), directory.as_bytes())
            .map_err(|error| txn.abort(error))?;
        self.put_xattr(id, COMPRESSION_XATTR, value).map_err(|error| self.txn.abort(error))
    }
}

impl Filesystem {
    /// Makes `root` the subvolume that is mounted when none is named. Durable with the next
    /// commit.
    ///
    /// # Errors
    /// `NotFound` when there is no such subvolume.
    pub fn set_default_subvolume(&self, root: RootId) -> Result<()> {
        // The default cannot be deleted: a full filesystem is emptied after another is.
        let mut handle = self.begin(Reservation::allow_removal_in_subvolumes())?;
        // A deletion is alone while it looks for the default: it comes before, or sees this.
        handle.live_root_item(root)?;
        let txn = &mut handle.txn;
        let key = Key::new(ObjectId::ROOT_TREE_DIR, KeyType::DIR_ITEM, name_hash(b"default"));
        let location = Key::new(root.object_id(), KeyType::ROOT_ITEM, u64::MAX);
        let transid = txn.generation().0;
        let item = self.tree(RootId::ROOT_TREE)?.lookup(&key)?;
        let changed = match &item {
            Some(item) => with_location(item, location)?,
            None => None,
        };
        match changed {
            Some(bytes) => txn.replace(RootId::ROOT_TREE, key, &bytes)?,
            None => {
                let entry = EntryBytes::new(location, transid, FileType::Directory, b"default");
                let bytes = [item.as_deref().unwrap_or_default(), entry.as_slice()].concat();
                match &item {
                    Some(_) => txn.replace(RootId::ROOT_TREE, key, &bytes)?,
                    None => txn.insert(RootId::ROOT_TREE, key, &bytes)?,
                }
            }
        }
        txn.set_incompat(Incompat::DEFAULT_SUBVOL);
        Ok(())
    }
}

/// The item with the location of its entry `default` changed; `None` if it has none.
fn with_location(item: &[u8], location: Key) -> Result<Option<Vec<u8>>> {
    let mut at = 0;
    for entry in DirEntries::new(item) {
        let entry = entry.map_err(|error| error.in_root(RootId::ROOT_TREE))?;
        if entry.name == b"default" {
            let mut changed = item.to_vec();
            let bytes = DiskKey::new(location);
            changed[at..at + size_of::<DiskKey>()].copy_from_slice(bytes.as_bytes());
            return Ok(Some(changed));
        }
        at += entry.len_bytes();
    }
    Ok(None)
}

/// The inode in a subvolume's root item, of which Linux uses nothing but the flag.
fn root_inode(nodesize_bytes: u64) -> InodeItem {
    InodeItem {
        generation: 1.into(),
        size: 3.into(),
        nbytes: nodesize_bytes.into(),
        nlink: 1.into(),
        mode: 0o40755.into(),
        flags: flags::ROOT_ITEM_INIT.into(),
        ..InodeItem::default()
    }
}

pub(super) fn insert_root_refs(
    txn: &mut txn::Handle<'_>,
    dir: InodeId,
    child: RootId,
    index: u64,
    name: &[u8],
) -> Result<()> {
    let root_ref = RootRef {
        dirid: dir.inode.0.into(),
        sequence: index.into(),
        name_len: u16::try_from(name.len()).expect("a checked name is short").into(),
    };
    let bytes = [root_ref.as_bytes(), name].concat();
    let parent = dir.root;
    let back = Key::new(child.object_id(), KeyType::ROOT_BACKREF, parent.0);
    txn.insert(RootId::ROOT_TREE, back, &bytes)?;
    let forth = Key::new(parent.object_id(), KeyType::ROOT_REF, child.0);
    txn.insert(RootId::ROOT_TREE, forth, &bytes)
}
