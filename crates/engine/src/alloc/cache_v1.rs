//! The free space cache of version 1, which is not read or written here: a file of the root tree for
//! each block group, named by a header item.
//!
//! Linux does not believe any of them at its first mount after another wrote, as the superblock's
//! `cache_generation` is behind. But it writes a cache anew only of groups that it changes itself,
//! and a commit of its own brings `cache_generation` up: at the mount after that it would believe
//! what it wrote before we changed the group. So a changed group's cache is made one that cannot
//! be believed, as Linux does before it changes one: its inode's generation becomes 0, which is
//! never the header's. That must be in the commit that changes the group, or before it. The cache of a
//! group that is removed is removed, as another group may come to lie at its address.
//!
//! Both are done by the commit, in leaves of the root tree that it would not copy otherwise. What that
//! takes is kept back from reservations ([`Allocator::count_caches`]) as long as there are caches.

use ubtrfs_ondisk::block::{Block, HEADER_BYTES};
use ubtrfs_ondisk::file_extent::FileExtent;
use ubtrfs_ondisk::inode::InodeItem;
use ubtrfs_ondisk::misc::{FreeSpaceHeader, OnDisk};
use ubtrfs_ondisk::{Generation, InodeNo, Key, KeyType, LogicalAddr, ObjectId, RootId};

use super::Allocator;
use crate::btree::{Editor, Roots};
use crate::error::{Error, Result};

/// Blocks that a group's cache may have changed at most, where it lies in leaves of its own: header, inode and
/// file extents, their neighbours, and the ways there.
const BLOCKS_A_CACHE_MAX: u64 = 16;
/// Bytes of a pointer to a child in a node.
const CHILD_BYTES: u64 = 33;
/// Extents of caches that one commit frees about, with the groups that it removes.
pub(super) const FREES_MAX: u64 = 64;

/// What is known of caches.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Caches {
    /// Whether there are any: none is made here.
    are_there: Option<bool>,
    /// Bytes of the root tree that the next commit may copy for them.
    pub(super) commit_bytes: u64,
    /// Extents of them that it may free.
    pub(super) frees: u64,
}

impl Allocator {
    /// Counts what a commit may need for caches, before the first reservation and after each commit: only
    /// blocks that the last one wrote are copied by the next.
    ///
    /// # Errors
    /// A block of the root tree that cannot be read.
    pub(crate) fn count_caches(&self, roots: &Roots) -> Result<()> {
        if self.has_no_caches() {
            return Ok(());
        }
        let first = header_key(LogicalAddr(0));
        let mut cursor = roots.root_tree.cursor();
        cursor.seek(&first)?;
        let are_there = cursor.current()?.is_some_and(|(key, _)| is_header(&key));
        let mut caches = Caches { are_there: Some(are_there), ..Caches::default() };
        if are_there {
            let (path, _) = roots.root_tree.search(&first)?;
            let blocks = path.last().map_or(0, |(root, _)| self.blocks_max_below(root));
            let groups = self.state().groups.len() as u64;
            let blocks = blocks.min(groups.saturating_mul(BLOCKS_A_CACHE_MAX));
            caches.commit_bytes = blocks.saturating_mul(self.nodesize_bytes());
            caches.frees = FREES_MAX;
        }
        self.state().caches = caches;
        Ok(())
    }

    /// Blocks that a tree has at most, its root included.
    fn blocks_max_below(&self, root: &Block) -> u64 {
        let Block::Node(node) = root else { return 1 };
        let children_max = (self.nodesize_bytes() - HEADER_BYTES as u64) / CHILD_BYTES;
        let (mut all, mut of_level) = (1, node.len() as u64);
        for _ in 0..root.level() {
            all = of_level.saturating_add(all);
            of_level = of_level.saturating_mul(children_max);
        }
        all
    }

    fn has_no_caches(&self) -> bool {
        self.state().caches.are_there == Some(false)
    }

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
        if self.has_no_caches() {
            return Ok(());
        }
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
        let Some(inode) = cache_inode(&mut editor, start)? else { return Ok(()) };
        let key = Key::new(inode.object_id(), KeyType::INODE_ITEM, 0);
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

    /// Removes the cache of a group that is removed, with its inode and its data. Returns how many extents of it are
    /// freed.
    ///
    /// # Errors
    /// What stops an edit, damage in its file extents; the transaction must then not commit.
    pub(super) fn remove_cache(
        &self,
        roots: &Roots,
        generation: Generation,
        start: LogicalAddr,
    ) -> Result<u64> {
        let mut freed = 0;
        if self.has_no_caches() {
            return Ok(freed);
        }
        let mut editor = self.edit(roots, &roots.root_tree, generation);
        let header = header_key(start);
        if editor.get(&header, |_| ())?.is_none() {
            return Ok(freed);
        }
        if let Some(inode) = cache_inode(&mut editor, start)? {
            // Of a subvolume with that number there may be other items.
            while let Some((key, item)) = first_extent(&mut editor, inode)? {
                let extent = FileExtent::parse(&item);
                match extent.map_err(|error| error.in_root(RootId::ROOT_TREE))? {
                    FileExtent::Regular(extent) | FileExtent::Prealloc(extent)
                        if !extent.is_hole() =>
                    {
                        let (at, len) = (extent.disk_bytenr, extent.disk_num_bytes);
                        let offset = key.offset.wrapping_sub(extent.offset);
                        // It is of an earlier transaction, so it goes when references are run.
                        self.drop_data(at, len, RootId::ROOT_TREE, inode, offset);
                        freed += 1;
                    }
                    _ => {}
                }
                editor.remove(&key)?;
            }
            let key = Key::new(inode.object_id(), KeyType::INODE_ITEM, 0);
            match editor.remove(&key) {
                Ok(()) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        editor.remove(&header)?;
        Ok(freed)
    }
}

fn header_key(start: LogicalAddr) -> Key {
    Key::new(ObjectId::FREE_SPACE, KeyType::FREE_SPACE_HEADER, start.0)
}

fn is_header(key: &Key) -> bool {
    key.objectid == ObjectId::FREE_SPACE && key.ty == KeyType::FREE_SPACE_HEADER
}

/// The inode that the header of a group's cache names, if that may be one. A damaged header is believed by nobody.
fn cache_inode(editor: &mut Editor<'_>, start: LogicalAddr) -> Result<Option<InodeNo>> {
    let location = editor.get(&header_key(start), |bytes| {
        FreeSpaceHeader::peek(bytes).map(|header| header.location.key())
    })?;
    let Some(Ok(inode)) = location else { return Ok(None) };
    let may_be = inode.ty == KeyType::INODE_ITEM && inode.objectid >= ObjectId::FIRST_FREE;
    Ok(may_be.then_some(InodeNo(inode.objectid.0)))
}

/// The first file extent of a cache.
fn first_extent(editor: &mut Editor<'_>, inode: InodeNo) -> Result<Option<(Key, Vec<u8>)>> {
    let from = Key::new(inode.object_id(), KeyType::EXTENT_DATA, 0);
    let found = editor.at_or_after(&from)?;
    Ok(found.filter(|(key, _)| key.objectid == from.objectid && key.ty == from.ty))
}

#[cfg(test)]
mod tests;
