//! The free space cache of version 1, which is not read or written here: a file of the root tree for
//! each block group, named by a header item.
//!
//! Linux does not believe any of them at its first mount after another wrote, as the superblock's
//! `cache_generation` is behind. But it writes a cache anew only of groups that it changes itself,
//! and a commit of its own brings `cache_generation` up: at the mount after that it would believe
//! what it wrote before we changed the group. So a changed group's cache is made one that cannot
//! be believed, as Linux does before it changes one: its inode's generation becomes 0, which is
//! never the header's.

use ubtrfs_ondisk::inode::InodeItem;
use ubtrfs_ondisk::misc::{FreeSpaceHeader, OnDisk};
use ubtrfs_ondisk::{Generation, Key, KeyType, LogicalAddr, ObjectId, RootId};

use super::Allocator;
use crate::btree::Roots;
use crate::error::{Error, Result};

impl Allocator {
    /// Makes the caches of groups that changed ones that Linux does not believe, once for each group.
    ///
    /// # Errors
    /// What stops an edit; the transaction must then not commit.
    pub(super) fn distrust_caches(
        &self,
        roots: &Roots,
        generation: Generation,
        groups: impl Iterator<Item = LogicalAddr>,
    ) -> Result<()> {
        for start in groups {
            let is_done = match self.state().groups.get_mut(&start) {
                Some(group) => std::mem::replace(&mut group.is_cache_distrusted, true),
                None => true,
            };
            if !is_done {
                self.distrust_cache(roots, generation, start)?;
            }
        }
        Ok(())
    }

    fn distrust_cache(
        &self,
        roots: &Roots,
        generation: Generation,
        start: LogicalAddr,
    ) -> Result<()> {
        let mut editor = self.edit(roots, &roots.root_tree, generation);
        let header = Key::new(ObjectId::FREE_SPACE, KeyType::FREE_SPACE_HEADER, start.0);
        let location = editor.get(&header, |bytes| {
            FreeSpaceHeader::peek(bytes).map(|header| header.location.key())
        })?;
        let Some(location) = location else { return Ok(()) };
        let inode = location.map_err(|error| error.in_root(RootId::ROOT_TREE))?;
        if inode.ty != KeyType::INODE_ITEM || inode.objectid < ObjectId::FIRST_FREE {
            return Ok(());
        }
        let key = Key::new(inode.objectid, KeyType::INODE_ITEM, 0);
        let is_believed = editor.get(&key, |bytes| {
            InodeItem::peek(bytes).is_ok_and(|item| item.generation.get() != 0)
        })?;
        if is_believed != Some(true) {
            return Ok(());
        }
        editor.update(&key, |bytes| match InodeItem::peek_mut(bytes) {
            Ok(item) => {
                item.generation = 0.into();
                Ok(())
            }
            Err(error) => Err(Error::from(error.in_root(RootId::ROOT_TREE))),
        })?
    }
}
