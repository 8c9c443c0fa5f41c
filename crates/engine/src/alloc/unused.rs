//! Removing block groups that have become empty, so that their space on the devices can be given to
//! another class or profile.
//!
//! A group goes in the commit after the one that emptied it: until that is durable, what the last
//! superblock reaches may lie in it. One group of each type that is allocated from stays, and what is free in
//! the others of its class must be as much again, so that groups do not come and go. Those that nothing is allocated from just go. A group whose
//! item was not read does not go, and nothing counts as free in it. A cache that Linux made of it goes with
//! it, of some groups in each commit.

use ubtrfs_ondisk::chunk::Chunk;
use ubtrfs_ondisk::{Generation, Key, KeyType, LogicalAddr, ObjectId, RootId};
use ubtrfs_rt::Arc;

use super::block_group::BlockGroup;
use super::{Allocator, Class, State, cache_v1};
use crate::btree::Roots;
use crate::error::Result;

impl State {
    /// A group that can go.
    fn unused_group(&self, nodesize_bytes: u64) -> Option<LogicalAddr> {
        if let Some(spare) = self.empty_spare() {
            return Some(spare);
        }
        let unused = self.groups.values().find(|group| {
            let class = Allocator::class_of_group(group.flags);
            let others = || {
                self.groups.values().filter(|other| {
                    other.start != group.start
                        && !other.is_spare
                        && Allocator::class_of_group(other.flags) == class
                })
            };
            let loaded = self.spaces[class.index()].loaded_free_bytes;
            let left = loaded.saturating_sub(group.loaded_free_bytes());
            group.is_empty()
                && others().any(|other| other.flags.ty() == group.flags.ty())
                && match class {
                    Class::System => false,
                    Class::Data => {
                        let free = others().filter_map(BlockGroup::unused_bytes);
                        // What is promised is free in what is loaded.
                        let promised = self.promised_data_bytes;
                        left >= promised
                            && free.sum::<u64>() >= group.len_bytes.saturating_add(promised)
                    }
                    // The commit itself needs what is loaded.
                    Class::Metadata => {
                        let kept = self.kept_bytes(nodesize_bytes);
                        let promised = if self.is_mixed { self.promised_data_bytes } else { 0 };
                        left >= kept.saturating_add(promised).saturating_add(group.len_bytes)
                    }
                }
        });
        unused.map(|group| group.start)
    }
}

impl Allocator {
    /// Removes the groups that can go, with their chunks. Called by the commit, before anything
    /// else of it allocates.
    ///
    /// # Errors
    /// What stops an edit; the transaction must then not commit.
    pub(crate) fn remove_unused(&self, roots: &Roots, generation: Generation) -> Result<()> {
        let mut freed = 0;
        while freed < cache_v1::FREES_MAX && self.has_unused() {
            self.load_devices(roots)?;
            let Some(chunk) = self.take_unused() else { break };
            self.remove_items(roots, generation, &chunk)?;
            freed += self.remove_cache(roots, generation, chunk.start)?;
        }
        Ok(())
    }

    fn has_unused(&self) -> bool {
        self.state().unused_group(self.nodesize_bytes()).is_some()
    }

    fn take_unused(&self) -> Option<Arc<Chunk>> {
        let mut state = self.state();
        let start = state.unused_group(self.nodesize_bytes())?;
        let chunk = self.store.volume().remove_chunk(start)?;
        let group = state.groups.remove(&start)?;
        let class = Self::class_of_group(group.flags);
        state.spaces[class.index()].loaded_free_bytes -= group.loaded_free_bytes();
        state.note_profiles();
        for stripe in &chunk.stripes {
            if let Some(device) = state.devices.get_mut(&stripe.device) {
                device.vacate(stripe.offset.0);
                self.store.volume().set_device_item(device.item);
            }
        }
        Some(chunk)
    }

    fn remove_items(&self, roots: &Roots, generation: Generation, chunk: &Chunk) -> Result<()> {
        let (start, len_bytes) = (chunk.start, chunk.len_bytes);
        let tree = self.group_items_tree(roots)?;
        let key = Key::new(ObjectId(start.0), KeyType::BLOCK_GROUP_ITEM, len_bytes);
        self.edit(roots, &tree, generation).remove(&key)?;
        if self.has_free_space_tree() {
            let tree = roots.tree(RootId::FREE_SPACE_TREE)?;
            let mut editor = self.edit(roots, &tree, generation);
            self.free_space_tree(&mut editor).remove_group(start, len_bytes)?;
        }
        let key = Key::new(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, start.0);
        self.edit(roots, &roots.chunk_tree, generation).remove(&key)?;
        let tree = roots.tree(RootId::DEV_TREE)?;
        let mut editor = self.edit(roots, &tree, generation);
        for stripe in &chunk.stripes {
            let objectid = ObjectId(stripe.device.0);
            editor.remove(&Key::new(objectid, KeyType::DEV_EXTENT, stripe.offset.0))?;
        }
        Ok(())
    }
}
