//! Settling: what the allocator did in memory becomes items. Only the commit runs this, with no
//! handle open; each pass may queue more, and the commit repeats until a pass finds nothing.

use ubtrfs_ondisk::block_group::{BlockGroupFlags, BlockGroupItem};
use ubtrfs_ondisk::chunk::Chunk;
use ubtrfs_ondisk::misc::{DevExtent, DevItem, OnDisk};
use ubtrfs_ondisk::{
    Corruption, DeviceId, Generation, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId,
};
use ubtrfs_rt::{self as rt, Arc};
use zerocopy::IntoBytes;

use super::block_group::{BlockGroup, FreeSpaceForm};
use super::chunk::DeviceSpace;
use super::delayed_ref::{ExtentKind, Head};
use super::extent_tree::{self, Form, Outcome};
use super::free_space_tree::{Delta, FreeSpaceTree};
use super::{Allocator, Class, csum_tree};
use crate::btree::{Editor, Roots, Tree};
use crate::error::{Error, Result};

/// Each run queues what changing the trees for the one before it took and gave back, which soon is nothing. If it is not, the commit
/// shall say so before it has taken all there is.
const RUN_COUNT_MAX: usize = 1000;

impl Allocator {
    /// One pass: items of new chunks, delayed refs, free space, block groups, devices. Returns
    /// whether there was anything to do.
    ///
    /// # Errors
    /// What stops an edit; the transaction must then not commit.
    pub(crate) fn settle(&self, roots: &Roots, generation: Generation) -> Result<bool> {
        let mut did = self.insert_new_groups(roots, generation)?;
        for run in 0.. {
            if !self.run_delayed_refs(roots, generation)? {
                break;
            }
            if run == RUN_COUNT_MAX {
                let what = format!("references that queue others after {run} runs");
                return Err(Error::Unsupported { what });
            }
            did = true;
        }
        did |= self.write_groups(roots, generation)?;
        did |= self.write_devices(roots, generation)?;
        Ok(did)
    }

    pub(super) fn edit<'a>(
        &'a self,
        roots: &'a Roots,
        tree: &'a Tree,
        generation: Generation,
    ) -> Editor<'a> {
        Editor::new(tree, roots, self, generation)
    }

    pub(super) fn group_items_tree(&self, roots: &Roots) -> Result<Arc<Tree>> {
        roots.tree(if self.has_block_group_tree {
            RootId::BLOCK_GROUP_TREE
        } else {
            RootId::EXTENT_TREE
        })
    }

    fn insert_new_groups(&self, roots: &Roots, generation: Generation) -> Result<bool> {
        let new: Vec<(LogicalAddr, u64, BlockGroupFlags, FreeSpaceForm)> = {
            let mut state = self.state();
            let new = state.groups.values_mut().filter(|group| group.is_new);
            new.map(|group| {
                group.is_new = false;
                (group.start, group.len_bytes, group.flags, group.form)
            })
            .collect()
        };
        for (start, len_bytes, flags, mut form) in new.iter().copied() {
            let chunk = self.store.volume().chunk_at(start).ok_or_else(|| no_chunk(start))?;
            self.insert_chunk(roots, generation, &chunk)?;
            let item = BlockGroupItem {
                used: 0.into(),
                chunk_objectid: ObjectId::FIRST_CHUNK_TREE.0.into(),
                flags: flags.0.into(),
            };
            let tree = self.group_items_tree(roots)?;
            let key = Key::new(ObjectId(start.0), KeyType::BLOCK_GROUP_ITEM, len_bytes);
            self.edit(roots, &tree, generation).insert(key, size_of_val(&item), |to| {
                to.copy_from_slice(item.as_bytes());
            })?;
            if self.has_free_space_tree() {
                let tree = roots.tree(RootId::FREE_SPACE_TREE)?;
                let mut editor = self.edit(roots, &tree, generation);
                self.free_space_tree(&mut editor).add_group(&mut form)?;
                drop(editor);
                self.set_form(form);
            }
        }
        Ok(!new.is_empty())
    }

    fn insert_chunk(&self, roots: &Roots, generation: Generation, chunk: &Chunk) -> Result<()> {
        let bytes = chunk.to_bytes();
        let key = Key::new(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, chunk.start.0);
        let mut editor = self.edit(roots, &roots.chunk_tree, generation);
        editor.insert(key, bytes.len(), |to| to.copy_from_slice(&bytes))?;
        drop(editor);
        let tree = roots.tree(RootId::DEV_TREE)?;
        let stripe_bytes = self.store.volume().stripe_bytes(chunk.start)?;
        let mut editor = self.edit(roots, &tree, generation);
        for stripe in &chunk.stripes {
            let extent = DevExtent {
                chunk_tree: RootId::CHUNK_TREE.0.into(),
                chunk_objectid: ObjectId::FIRST_CHUNK_TREE.0.into(),
                chunk_offset: chunk.start.0.into(),
                length: stripe_bytes.into(),
                chunk_tree_uuid: self.chunk_tree_uuid.0,
            };
            let key = Key::new(ObjectId(stripe.device.0), KeyType::DEV_EXTENT, stripe.offset.0);
            editor.insert(key, size_of_val(&extent), |to| to.copy_from_slice(extent.as_bytes()))?;
        }
        Ok(())
    }

    pub(super) fn free_space_tree<'e, 'a>(
        &'e self,
        editor: &'e mut Editor<'a>,
    ) -> FreeSpaceTree<'e, 'a> {
        FreeSpaceTree {
            editor,
            sectorsize_bytes: self.sectorsize_bytes(),
            is_form_cached: self.options.cache_free_space_form,
            form_searches: &self.form_searches,
        }
    }

    pub(super) fn set_form(&self, form: FreeSpaceForm) {
        if let Some(group) = self.state().groups.get_mut(&form.start) {
            group.form = form;
        }
    }

    /// Runs what is queued now, new extents first, each in address order. Returns whether anything was.
    fn run_delayed_refs(&self, roots: &Roots, generation: Generation) -> Result<bool> {
        let heads = self.state().refs.take();
        if heads.is_empty() {
            return Ok(false);
        }
        let form =
            Form { is_skinny: self.is_skinny, nodesize_bytes: self.nodesize_bytes(), generation };
        let tree = roots.tree(RootId::EXTENT_TREE)?;
        let mut deltas = Vec::new();
        let mut freed_data = Vec::new();
        let mut editor = self.edit(roots, &tree, generation);
        let mut times = self.ref_times.lock();
        let mut started = rt::monotonic_ns();
        // What is new goes in before anything is taken out, so that leaves are merged only where they fit with it. A leaf
        // that was merged full, and split by what came behind, would give back and take two blocks in each run, without end.
        let is_new = |(_, head): &(&LogicalAddr, &Head)| head.is_new;
        let (new, old): (Vec<_>, Vec<_>) = heads.iter().partition(is_new);
        for (addr, head) in new.into_iter().chain(old) {
            let outcome = extent_tree::run(&mut editor, &form, *addr, head)?;
            let ended = rt::monotonic_ns();
            times.saturating_record(ended - started);
            started = ended;
            let is_free = match outcome {
                Outcome::Changed => continue,
                Outcome::Allocated => false,
                Outcome::Freed => true,
            };
            deltas.push(Delta { start: addr.0, end: addr.0 + head.len_bytes, is_free });
            if is_free && head.kind == ExtentKind::Data {
                freed_data.push((addr.0, addr.0 + head.len_bytes));
            }
        }
        drop(times);
        drop(editor);
        deltas.sort_by_key(|delta: &Delta| delta.start);
        self.remove_csums(roots, generation, &freed_data)?;
        self.account(roots, &deltas)?;
        if self.has_free_space_tree() {
            self.apply_free_space(roots, generation, &self.merge(deltas))?;
        }
        Ok(true)
    }

    fn remove_csums(
        &self,
        roots: &Roots,
        generation: Generation,
        freed_data: &[(u64, u64)],
    ) -> Result<()> {
        if freed_data.is_empty() {
            return Ok(());
        }
        let geometry = *self.store.geometry();
        let tree = roots.tree(RootId::CSUM_TREE)?;
        let mut editor = self.edit(roots, &tree, generation);
        for (start, end) in freed_data {
            let csum_bytes = geometry.csum.len_bytes();
            csum_tree::remove(&mut editor, *start, *end, csum_bytes, self.sectorsize_bytes())?;
        }
        Ok(())
    }

    /// Merges changes of one kind that touch, within a group; they come in address order.
    fn merge(&self, deltas: Vec<Delta>) -> Vec<Delta> {
        let state = self.state();
        let mut merged: Vec<Delta> = Vec::with_capacity(deltas.len());
        for delta in deltas {
            let begins_group = state.groups.contains_key(&LogicalAddr(delta.start));
            match merged.last_mut() {
                Some(last)
                    if last.end == delta.start
                        && last.is_free == delta.is_free
                        && !begins_group =>
                {
                    last.end = delta.end;
                }
                _ => merged.push(delta),
            }
        }
        merged
    }

    /// Changes what block groups say is used, and pins what was freed. No tree is locked.
    fn account(&self, roots: &Roots, deltas: &[Delta]) -> Result<()> {
        self.read_groups_of(roots, deltas)?;
        let mut state = self.state();
        for delta in deltas {
            let len = delta.end - delta.start;
            let group = state
                .group_at_mut(delta.start)
                .ok_or_else(|| no_chunk(LogicalAddr(delta.start)))?;
            let used_before = group.used_bytes.expect("read above");
            let used = if delta.is_free {
                used_before.checked_sub(len)
            } else {
                used_before.checked_add(len).filter(|used| *used <= group.len_bytes)
            };
            let used = used.ok_or_else(|| {
                Error::Corrupt(
                    Corruption::new(Reason::BadValue)
                        .have(format!("block group {} used {used_before}", group.start))
                        .expect(format!("room to change by {len}")),
                )
            })?;
            group.used_bytes = Some(used);
            group.is_dirty = true;
            if delta.is_free {
                if group.free.as_ref().is_some_and(|free| free.overlaps(delta.start, delta.end)) {
                    return Err(super::in_use(LogicalAddr(delta.start)));
                }
                state.pinned.push((delta.start, delta.end));
                // As the superblock says it, which may be anything.
                state.used_bytes = state.used_bytes.saturating_sub(len);
            } else {
                state.used_bytes = state.used_bytes.saturating_add(len);
            }
        }
        Ok(())
    }

    fn apply_free_space(
        &self,
        roots: &Roots,
        generation: Generation,
        deltas: &[Delta],
    ) -> Result<()> {
        let tree = roots.tree(RootId::FREE_SPACE_TREE)?;
        let mut rest = deltas;
        while let Some(first) = rest.first() {
            let form = {
                let mut state = self.state();
                let group = state.group_at_mut(first.start);
                group.ok_or_else(|| no_chunk(LogicalAddr(first.start)))?.form
            };
            let count = rest.partition_point(|delta| delta.start < form.end().0);
            let (own, others) = rest.split_at(count);
            let mut form = form;
            let mut editor = self.edit(roots, &tree, generation);
            self.free_space_tree(&mut editor).apply(&mut form, own)?;
            drop(editor);
            self.set_form(form);
            rest = others;
        }
        Ok(())
    }

    fn write_groups(&self, roots: &Roots, generation: Generation) -> Result<bool> {
        let dirty: Vec<(LogicalAddr, u64, BlockGroupItem)> = {
            let mut state = self.state();
            let dirty = state.groups.values_mut().filter(|group| group.is_dirty);
            dirty.filter_map(item_of).collect()
        };
        let tree = self.group_items_tree(roots)?;
        let mut editor = self.edit(roots, &tree, generation);
        for (start, len_bytes, item) in &dirty {
            let key = Key::new(ObjectId(start.0), KeyType::BLOCK_GROUP_ITEM, *len_bytes);
            editor.update(&key, |to| {
                if let Ok(to) = BlockGroupItem::peek_mut(to) {
                    to.used = item.used;
                }
            })?;
        }
        drop(editor);
        if !self.has_free_space_tree() {
            self.distrust_caches(roots, generation, dirty.iter().map(|(start, ..)| *start))?;
        }
        Ok(!dirty.is_empty())
    }

    fn write_devices(&self, roots: &Roots, generation: Generation) -> Result<bool> {
        let dirty: Vec<DevItem> = {
            let mut state = self.state();
            let dirty = state.devices.values_mut().filter(|device| device.is_dirty);
            dirty
                .map(|device: &mut DeviceSpace| {
                    device.is_dirty = false;
                    device.item
                })
                .collect()
        };
        let mut editor = self.edit(roots, &roots.chunk_tree, generation);
        for item in &dirty {
            let key = Key::new(ObjectId::DEV_ITEMS, KeyType::DEV_ITEM, item.devid.get());
            match editor.update(&key, |to| to.copy_from_slice(item.as_bytes())) {
                Err(Error::NotFound { .. }) => {
                    editor.insert(key, size_of_val(item), |to| {
                        to.copy_from_slice(item.as_bytes());
                    })?;
                }
                other => other?,
            }
        }
        Ok(!dirty.is_empty())
    }

    /// Whether anything was allocated, freed or grown since the last commit.
    pub(crate) fn has_changes(&self) -> bool {
        let state = self.state();
        state.allocated_blocks > 0
            || state.refs.len() > 0
            || state.groups.values().any(|group| group.is_new || group.is_dirty)
            || state.empty_spare().is_some()
            || state.devices.values().any(|device| device.is_dirty)
    }

    /// Bytes of all extents, and of all devices, for the superblock.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let state = self.state();
        // The sum of the groups is what counts, where all of them are known.
        let used: Option<u64> = state.groups.values().map(|group| group.used_bytes).sum();
        (used.unwrap_or(state.used_bytes), state.devices_bytes())
    }

    /// After the superblock is durable, and before another handle is opened: what the transaction
    /// freed is free.
    pub(crate) fn unpin(&self) {
        let freed = {
            let mut state = self.state();
            let mut freed = std::mem::take(&mut state.pinned);
            freed.extend(std::mem::take(&mut state.claimed));
            freed
        };
        if self.options.discard {
            for (start, end) in &freed {
                // Whatever becomes of it, the space is free: a device that cannot is no failure.
                let _ = self.store.volume().discard(LogicalAddr(*start), end - start);
            }
        }
        let mut state = self.state();
        for (start, end) in freed {
            self.store.forget(LogicalAddr(start));
            state.give(start, end - start);
        }
        state.allocated_blocks = 0;
        state.count_metadata();
    }

    /// The chunks that the superblock must carry: those of the chunk tree.
    pub(crate) fn system_chunks(&self) -> Vec<Chunk> {
        let chunks = self.store.volume().chunks();
        chunks
            .iter()
            .filter(|chunk| Self::class_of_group(chunk.flags) == Class::System)
            .map(|chunk| Chunk::clone(chunk))
            .collect()
    }

    /// The device numbers, for checks of a filesystem that is being made.
    pub(crate) fn device_ids(&self) -> Vec<DeviceId> {
        self.state().devices.keys().copied().collect()
    }
}

/// The item of a group that has changed, and was read before it did.
fn item_of(group: &mut BlockGroup) -> Option<(LogicalAddr, u64, BlockGroupItem)> {
    let item = BlockGroupItem {
        used: group.used_bytes?.into(),
        chunk_objectid: ObjectId::FIRST_CHUNK_TREE.0.into(),
        flags: group.flags.0.into(),
    };
    group.is_dirty = false;
    Some((group.start, group.len_bytes, item))
}

#[cold]
pub(super) fn no_chunk(at: LogicalAddr) -> Error {
    Error::Corrupt(
        Corruption::new(Reason::Missing).have(format!("address {at}")).expect("a block group"),
    )
}
