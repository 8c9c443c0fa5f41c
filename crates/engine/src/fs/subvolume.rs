//! Subvolumes and snapshots.

use ubtrfs_ondisk::dir::DirEntries;
use ubtrfs_ondisk::hash::name_hash;
use ubtrfs_ondisk::misc::Timespec;
use ubtrfs_ondisk::root::{RootItem, flags};
use ubtrfs_ondisk::{Generation, Key, KeyType, ObjectId, RootId, Uuid};
use ubtrfs_rt::Time;

use super::inode::InodeId;
use super::path::SubvolumePaths;
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;

/// A subvolume or snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SubvolumeInfo {
    /// Its number.
    pub id: RootId,
    /// The directory that it is linked in; `None` for the top level and for one that is deleted
    /// but not yet cleaned up.
    pub parent: Option<InodeId>,
    /// The path from the top level, empty for the top level itself; `None` where it has none.
    pub path: Option<Vec<u8>>,
    /// Its own uuid.
    pub uuid: Uuid,
    /// Of what it is a snapshot, or nil.
    pub parent_uuid: Uuid,
    /// What it was received from, or nil.
    pub received_uuid: Uuid,
    /// Transaction of its last change of the tree.
    pub generation: Generation,
    /// Transaction of the last change inside.
    pub ctransid: Generation,
    /// Transaction of its making.
    pub otransid: Generation,
    /// Transaction of its sending, at the sender.
    pub stransid: Generation,
    /// Transaction of its receiving.
    pub rtransid: Generation,
    /// Time of the last change inside.
    pub ctime: Time,
    /// Time of its making.
    pub otime: Time,
    /// Time of its sending, at the sender; 1970 where it was not received.
    pub stime: Time,
    /// Time of its receiving; 1970 where it was not.
    pub rtime: Time,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Whether it is deleted and waits for its blocks to be freed.
    pub deleted: bool,
}

fn time_of(time: &Timespec) -> Time {
    Time { sec: time.sec.get(), nsec: time.nsec.get().min(999_999_999) }
}

impl Filesystem {
    /// The root directory of the top-level subvolume.
    pub fn top_level(&self) -> InodeId {
        InodeId::root_of(RootId::FS_TREE)
    }

    /// The root directory of the subvolume that is mounted when none is named.
    ///
    /// # Errors
    /// `NotFound` when the subvolume that is named does not exist.
    pub fn default_subvolume(&self) -> Result<InodeId> {
        let root = self.default_root()?;
        if root == RootId::FS_TREE {
            return Ok(self.top_level());
        }
        match self.root_item(root)? {
            Some((_, item)) if root.is_subvolume() && item.refs.get() > 0 => {
                Ok(InodeId::root_of(root))
            }
            _ => Err(Error::not_found(format!("default subvolume {root}"))),
        }
    }

    /// The number that is named as that of the default subvolume, which may be gone.
    pub(super) fn default_root(&self) -> Result<RootId> {
        let root_tree = self.tree(RootId::ROOT_TREE)?;
        let key = Key::new(ObjectId::ROOT_TREE_DIR, KeyType::DIR_ITEM, name_hash(b"default"));
        let Some(item) = root_tree.lookup(&key)? else {
            return Ok(RootId::FS_TREE);
        };
        for entry in DirEntries::new(&item) {
            let entry = entry.map_err(|error| error.in_root(RootId::ROOT_TREE))?;
            if entry.name == b"default" {
                return Ok(RootId(entry.item.location.key().objectid.0));
            }
        }
        Ok(RootId::FS_TREE)
    }

    /// All subvolumes in the order of their numbers, the top level first; each as it was at some moment.
    ///
    /// # Errors
    /// Damaged items, or the device's error.
    pub fn subvolumes(&self) -> Result<Vec<SubvolumeInfo>> {
        let mut found = Vec::new();
        let mut told = SubvolumePaths::default();
        let mut cursor = self.tree(RootId::ROOT_TREE)?.cursor();
        let mut next = Key::new(RootId::FS_TREE.object_id(), KeyType::ROOT_ITEM, 0);
        loop {
            cursor.seek(&next)?;
            let Some((key, _)) = cursor.current()? else { break };
            let root = RootId(key.objectid.0);
            if root.0 > ObjectId::LAST_FREE.0 {
                break;
            }
            if key.ty == KeyType::ROOT_ITEM && root.is_subvolume() {
                let mut is_again = false;
                let find = || {
                    if std::mem::replace(&mut is_again, true) {
                        told.clear();
                    }
                    self.find_subvolume(root, &mut told)
                };
                found.extend(self.inner.files.settled(find, |_| false)?);
            }
            // On to the next object's root item, or to this object's if it is still ahead.
            next = if key.ty < KeyType::ROOT_ITEM {
                Key::new(key.objectid, KeyType::ROOT_ITEM, 0)
            } else {
                Key::new(ObjectId(key.objectid.0 + 1), KeyType::ROOT_ITEM, 0)
            };
        }
        Ok(found)
    }

    /// One subvolume.
    ///
    /// # Errors
    /// `NotFound` when there is no such subvolume.
    pub fn subvolume(&self, root: RootId) -> Result<SubvolumeInfo> {
        let missing = || Error::not_found(format!("subvolume {root}"));
        if !root.is_subvolume() {
            return Err(missing());
        }
        let find = || self.find_subvolume(root, &mut SubvolumePaths::default());
        self.inner.files.settled(find, |_| false)?.ok_or_else(missing)
    }

    fn find_subvolume(
        &self,
        root: RootId,
        told: &mut SubvolumePaths,
    ) -> Result<Option<SubvolumeInfo>> {
        let item = self.root_item(root)?;
        item.map(|(_, item)| self.subvolume_info(root, &item, told)).transpose()
    }

    fn subvolume_info(
        &self,
        root: RootId,
        item: &RootItem,
        told: &mut SubvolumePaths,
    ) -> Result<SubvolumeInfo> {
        let path = self.subvolume_path(root, told)?;
        Ok(SubvolumeInfo {
            id: root,
            parent: self.name_of_subvolume(root)?.map(|link| link.parent),
            path,
            uuid: Uuid(item.uuid),
            parent_uuid: Uuid(item.parent_uuid),
            received_uuid: Uuid(item.received_uuid),
            generation: Generation(item.generation.get()),
            ctransid: Generation(item.ctransid.get()),
            otransid: Generation(item.otransid.get()),
            stransid: Generation(item.stransid.get()),
            rtransid: Generation(item.rtransid.get()),
            ctime: time_of(&item.ctime),
            otime: time_of(&item.otime),
            stime: time_of(&item.stime),
            rtime: time_of(&item.rtime),
            read_only: item.flags.get() & flags::RDONLY != 0,
            deleted: item.refs.get() == 0 || item.flags.get() & flags::DEAD != 0,
        })
    }
}
