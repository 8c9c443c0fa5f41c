//! Loading: block groups and device extents once, each group's free space when it is wanted.

use ubtrfs_ondisk::block_group::{BlockGroupFlags, BlockGroupItem};
use ubtrfs_ondisk::misc::{DevExtent, OnDisk};
use ubtrfs_ondisk::{Corruption, DeviceId, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId};

use super::block_group::BlockGroup;
use super::chunk::DeviceSpace;
use super::free_space::FreeSpace;
use super::{Allocator, Class, State, free_space_tree};
use crate::btree::{Readahead, Roots};
use crate::error::{Error, Result};

impl Allocator {
    /// Reads the block group items, one look-up a chunk, and the device extents. Does nothing
    /// when that was done.
    ///
    /// # Errors
    /// A chunk without its block group; damaged blocks or items.
    pub(crate) fn load(&self, roots: &Roots) -> Result<()> {
        if self.state().is_loaded {
            return Ok(());
        }
        // Loaded twice, the second would take the place of what the first has allocated from.
        let _alone = self.loading.lock();
        if self.state().is_loaded {
            return Ok(());
        }
        let item_root =
            if self.has_block_group_tree { RootId::BLOCK_GROUP_TREE } else { RootId::EXTENT_TREE };
        let tree = roots.tree(item_root)?;
        let mut groups = Vec::new();
        for chunk in self.store.volume().chunks() {
            let objectid = ObjectId(chunk.start.0);
            let key = Key::new(objectid, KeyType::BLOCK_GROUP_ITEM, chunk.len_bytes);
            let bytes = tree.lookup(&key)?.ok_or_else(|| {
                Error::Corrupt(
                    Corruption::new(Reason::Missing)
                        .in_root(item_root)
                        .have("a chunk without block group")
                        .expect(key),
                )
            })?;
            let item = BlockGroupItem::peek(&bytes)?;
            let flags = BlockGroupFlags(item.flags.get());
            groups.push(BlockGroup::new(chunk.start, chunk.len_bytes, flags, item.used.get()));
        }
        let devices = self.load_devices(roots)?;
        let mut state = self.state();
        state.devices = devices.into_iter().collect();
        // What a try before this one loaded is loaded again.
        state.spaces = Default::default();
        state.groups = groups.into_iter().map(|group| (group.start, group)).collect();
        state.count_metadata();
        drop(state);
        // The chunk tree may be edited by any commit.
        while self.load_free_space(roots, Class::System)? {}
        self.state().is_loaded = true;
        Ok(())
    }

    fn load_devices(&self, roots: &Roots) -> Result<Vec<(DeviceId, DeviceSpace)>> {
        let mut devices = Vec::new();
        for item in self.store.volume().device_items() {
            let devid = DeviceId(item.devid.get());
            let mut space = DeviceSpace::new(item);
            let mut cursor = roots.tree(RootId::DEV_TREE)?.cursor_with(Readahead::Forward);
            cursor.seek(&Key::new(ObjectId(devid.0), KeyType::DEV_EXTENT, 0))?;
            while let Some((key, data)) = cursor.current()? {
                if key.objectid.0 != devid.0 || key.ty != KeyType::DEV_EXTENT {
                    break;
                }
                space.occupy(key.offset, DevExtent::peek(data)?.length.get())?;
                cursor.next()?;
            }
            devices.push((devid, space));
        }
        Ok(devices)
    }

    /// Loads the free space of one more group of `class` that has any; the caller locks no tree.
    /// Returns false when there is none.
    ///
    /// # Errors
    /// Damage in the free space tree or the extent tree.
    pub(super) fn load_free_space(&self, roots: &Roots, class: Class) -> Result<bool> {
        let unloaded = {
            let state = self.state();
            let found = state.groups.values().find(|group| {
                Self::class_of_group(group.flags) == class
                    && group.free.is_none()
                    && group.used_bytes < group.len_bytes
            });
            found.map(|group| (group.start, group.len_bytes))
        };
        let Some((start, len_bytes)) = unloaded else { return Ok(false) };
        self.load_group(roots, start, len_bytes)?;
        Ok(true)
    }

    /// Loads the free space of one group, if it is not yet.
    ///
    /// # Errors
    /// As [`Allocator::load_free_space`].
    pub(super) fn load_group(
        &self,
        roots: &Roots,
        start: LogicalAddr,
        len_bytes: u64,
    ) -> Result<()> {
        if self.state().groups.get(&start).is_some_and(|group| group.free.is_some()) {
            return Ok(());
        }
        let ranges = if self.has_free_space_tree() {
            let tree = roots.tree(RootId::FREE_SPACE_TREE)?;
            free_space_tree::load(&tree, start, len_bytes, self.sectorsize_bytes())?
        } else {
            self.scan_extents(roots, start, len_bytes)?
        };
        let shadowed = self.store.volume().superblock_ranges(start)?;
        let mut state = self.state();
        // Another thread may have loaded it meanwhile.
        if state.groups.get(&start).is_some_and(|group| group.free.is_none()) {
            state.enter_free_space(start, &ranges, &shadowed);
        }
        Ok(())
    }

    /// What lies between a group's extents, where there is no free space tree to say.
    pub(super) fn scan_extents(
        &self,
        roots: &Roots,
        start: LogicalAddr,
        len_bytes: u64,
    ) -> Result<Vec<(u64, u64)>> {
        let end = start.0 + len_bytes;
        let mut ranges = Vec::new();
        let mut at = start.0;
        let tree = roots.tree(RootId::EXTENT_TREE)?;
        let mut cursor = tree.cursor_with(Readahead::Forward);
        cursor.seek(&Key::new(ObjectId(start.0), KeyType(0), 0))?;
        while let Some((key, _)) = cursor.current()? {
            if key.objectid.0 >= end {
                break;
            }
            let len = match key.ty {
                KeyType::EXTENT_ITEM => key.offset,
                KeyType::METADATA_ITEM => self.nodesize_bytes(),
                _ => {
                    cursor.next()?;
                    continue;
                }
            };
            let extent_end =
                key.objectid.0.checked_add(len).filter(|extent_end| *extent_end <= end);
            let Some(extent_end) = extent_end.filter(|_| key.objectid.0 >= at) else {
                return Err(Error::Corrupt(
                    Corruption::new(Reason::Overlap)
                        .in_root(RootId::EXTENT_TREE)
                        .have(key)
                        .expect(format!("an extent in {at}..{end}")),
                ));
            };
            if at < key.objectid.0 {
                ranges.push((at, key.objectid.0));
            }
            at = extent_end;
            cursor.next()?;
        }
        if at < end {
            ranges.push((at, end));
        }
        Ok(ranges)
    }
}

impl State {
    /// Makes the ranges the free space of a group, less what is pinned or under a superblock.
    pub(super) fn enter_free_space(
        &mut self,
        start: LogicalAddr,
        ranges: &[(u64, u64)],
        shadowed: &[std::ops::Range<LogicalAddr>],
    ) {
        let mut free = FreeSpace::default();
        for (from, to) in ranges {
            free.add(*from, *to);
        }
        let before = free.free_bytes();
        for range in shadowed {
            free.remove(range.start.0, range.end.0);
        }
        let shadowed_bytes = before - free.free_bytes();
        for (from, to) in &self.pinned {
            free.remove(*from, *to);
        }
        let group = self.groups.get_mut(&start).expect("the caller found it");
        let class = Allocator::class_of_group(group.flags);
        self.spaces[class.index()].loaded_free_bytes += free.free_bytes();
        group.shadowed_bytes = shadowed_bytes;
        group.free = Some(free);
    }
}
