//! Loading: what is known of block groups and devices, each when it is wanted.
//!
//! Before the first handle, the items of the groups of metadata and of the chunk tree are read, which
//! are few, and whose sum a reservation needs. The item of a group of data is read when its free
//! space is loaded, when something in it is freed, or when the free space tree is made anew; the
//! device extents when a chunk is made or removed. So a first change reads no more where there are
//! more groups of data.
//!
//! Damage in the item or the free space of a group of data is an error for who wants that group.
//! Who only looks for space passes the group over, and hears of it where there is no other space.

use ubtrfs_ondisk::block_group::{BlockGroupFlags, BlockGroupItem};
use ubtrfs_ondisk::misc::{DevExtent, OnDisk};
use ubtrfs_ondisk::{Corruption, DeviceId, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId};

use super::block_group::BlockGroup;
use super::chunk::DeviceSpace;
use super::free_space::FreeSpace;
use super::free_space_tree::Delta;
use super::settle::no_chunk;
use super::{Allocator, Class, State, free_space_tree};
use crate::btree::{Readahead, Roots};
use crate::error::{Error, Result};

impl Allocator {
    /// Learns of the groups, one for each chunk, and reads the items of those of metadata and of the
    /// chunk tree. Does nothing when that was done.
    ///
    /// # Errors
    /// A chunk of those without its block group; damaged blocks or items.
    pub(crate) fn load(&self, roots: &Roots) -> Result<()> {
        if self.state().is_loaded {
            return Ok(());
        }
        // Loaded twice, the second would take the place of what the first has allocated from.
        let _alone = self.loading.lock();
        if self.state().is_loaded {
            return Ok(());
        }
        let mut groups = Vec::new();
        for chunk in self.store.volume().chunks() {
            let (start, len_bytes, flags) = (chunk.start, chunk.len_bytes, chunk.flags);
            let used_bytes = match Self::class_of_group(flags) {
                Class::Data => None,
                Class::Metadata | Class::System => {
                    Some(self.read_used(roots, start, len_bytes, flags)?)
                }
            };
            groups.push(BlockGroup::new(start, len_bytes, flags, used_bytes));
        }
        self.load_profiles(roots)?;
        let is_degraded = !self.store.volume().missing_devices().is_empty();
        let items = self.store.volume().device_items();
        let devices =
            items.into_iter().map(|item| (DeviceId(item.devid.get()), DeviceSpace::unread(item)));
        let mut state = self.state();
        state.devices = devices.collect();
        // What a try before this one loaded is loaded again.
        state.spaces = Default::default();
        state.groups = groups.into_iter().map(|group| (group.start, group)).collect();
        state.is_degraded = is_degraded;
        state.note_profiles();
        state.count_metadata();
        drop(state);
        // The chunk tree may be edited by any commit.
        while self.load_free_space(roots, Class::System)? {}
        self.state().is_loaded = true;
        Ok(())
    }

    /// Reads the device extents, if that was not done; the caller locks no tree.
    ///
    /// # Errors
    /// Damage in the device tree.
    pub(super) fn load_devices(&self, roots: &Roots) -> Result<()> {
        let is_read = || self.state().devices.values().all(DeviceSpace::is_read);
        if is_read() {
            return Ok(());
        }
        let _alone = self.loading.lock();
        if is_read() {
            return Ok(());
        }
        for item in self.store.volume().device_items() {
            let devid = DeviceId(item.devid.get());
            let mut space = DeviceSpace::empty(item);
            let mut cursor = roots.tree(RootId::DEV_TREE)?.cursor_with(Readahead::Forward);
            cursor.seek(&Key::new(ObjectId(devid.0), KeyType::DEV_EXTENT, 0))?;
            while let Some((key, data)) = cursor.current()? {
                if key.objectid.0 != devid.0 || key.ty != KeyType::DEV_EXTENT {
                    break;
                }
                space.occupy(key.offset, DevExtent::peek(data)?.length.get())?;
                cursor.next()?;
            }
            // The item may have changed since it was loaded, and stays.
            if let Some(known) = self.state().devices.get_mut(&devid) {
                known.enter_extents(space);
            }
        }
        Ok(())
    }

    /// What the item of a group says is used.
    ///
    /// # Errors
    /// `Corrupt` where there is none, or it is not that of the chunk; a damaged block.
    fn read_used(
        &self,
        roots: &Roots,
        start: LogicalAddr,
        len_bytes: u64,
        flags: BlockGroupFlags,
    ) -> Result<u64> {
        let tree = self.group_items_tree(roots)?;
        let key = Key::new(ObjectId(start.0), KeyType::BLOCK_GROUP_ITEM, len_bytes);
        let bytes = tree.lookup(&key)?.ok_or_else(|| {
            Error::Corrupt(
                Corruption::new(Reason::Missing)
                    .in_root(tree.id)
                    .have("a chunk without block group")
                    .expect(key),
            )
        })?;
        let item = BlockGroupItem::peek(&bytes)?;
        let found = BlockGroupFlags(item.flags.get());
        if found != flags {
            return Err(Error::Corrupt(
                Corruption::new(Reason::BadValue)
                    .in_root(tree.id)
                    .have(format!("block group {start} of flags {:#x}", found.0))
                    .expect(format!("flags {:#x}, as its chunk has", flags.0)),
            ));
        }
        Ok(item.used.get())
    }

    /// Reads the item of a group, if that was not done; the caller locks no tree, and nothing commits
    /// meanwhile but the caller. Returns what is used in it.
    ///
    /// # Errors
    /// A chunk without its block group; a damaged block or item.
    pub(super) fn read_group(&self, roots: &Roots, start: LogicalAddr) -> Result<u64> {
        let (len_bytes, flags) = {
            let state = self.state();
            let group = state.groups.get(&start).ok_or_else(|| no_chunk(start))?;
            if let Some(used_bytes) = group.used_bytes {
                return Ok(used_bytes);
            }
            (group.len_bytes, group.flags)
        };
        let used_bytes = self.read_used(roots, start, len_bytes, flags)?;
        let mut state = self.state();
        let group = state.groups.get_mut(&start).ok_or_else(|| no_chunk(start))?;
        // Another thread may have read it meanwhile, which saw the same.
        Ok(*group.used_bytes.get_or_insert(used_bytes))
    }

    /// Reads the items of the groups in which `deltas` lie, as far as that was not done. As
    /// [`Allocator::read_group`].
    ///
    /// # Errors
    /// As [`Allocator::read_group`]; `Corrupt` for what lies in no group.
    pub(super) fn read_groups_of(&self, roots: &Roots, deltas: &[Delta]) -> Result<()> {
        let mut last = 0..0;
        for delta in deltas {
            if last.contains(&delta.start) {
                continue;
            }
            let start = {
                let mut state = self.state();
                let group = state.group_at_mut(delta.start);
                let group = group.ok_or_else(|| no_chunk(LogicalAddr(delta.start)))?;
                last = group.start.0..group.end().0;
                group.start
            };
            self.read_group(roots, start)?;
        }
        Ok(())
    }

    /// Loads the free space of one more group of `class` that has any; the caller locks no tree.
    /// Returns false when there is none. A group of data with damage is passed over.
    ///
    /// # Errors
    /// Damage in the free space tree or the extent tree, or in a group's item; of data, the
    /// device's error only.
    pub(super) fn load_free_space(&self, roots: &Roots, class: Class) -> Result<bool> {
        let mut from = LogicalAddr(0);
        loop {
            let unloaded = {
                let state = self.state();
                let mut groups = state.groups.range(from..).map(|(_, group)| group);
                let found = groups.find(|group| {
                    Self::class_of_group(group.flags) == class
                        && group.free.is_none()
                        && !group.is_spare
                        && group.fault.is_none()
                        && group.unused_bytes() != Some(0)
                });
                found.map(|group| (group.start, group.len_bytes))
            };
            let Some((start, len_bytes)) = unloaded else { return Ok(false) };
            let result = match self.read_group(roots, start) {
                Ok(used_bytes) if used_bytes == len_bytes => {
                    from = LogicalAddr(start.0 + len_bytes);
                    continue;
                }
                Ok(_) => self.load_group(roots, start, len_bytes),
                Err(error) => Err(error),
            };
            match result {
                Err(fault) if class == Class::Data && fault.is_damage() => {
                    if let Some(group) = self.state().groups.get_mut(&start) {
                        group.fault = Some(fault);
                    }
                }
                result => return result.map(|()| true),
            }
        }
    }

    /// Loads the free space of one group, and what is used of it, if that was not done.
    ///
    /// # Errors
    /// Damage in the free space tree or the extent tree, or in the group's item.
    pub(super) fn load_group(
        &self,
        roots: &Roots,
        start: LogicalAddr,
        len_bytes: u64,
    ) -> Result<()> {
        if self.state().groups.get(&start).is_some_and(|group| group.free.is_some()) {
            return Ok(());
        }
        self.read_group(roots, start)?;
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
        // Claimed ranges lie within their group, whose free space the first of them had loaded.
        let group = self.groups.get_mut(&start).expect("the caller found it");
        let class = Allocator::class_of_group(group.flags);
        group.shadowed_bytes = shadowed_bytes;
        group.free = Some(free);
        self.spaces[class.index()].loaded_free_bytes += group.loaded_free_bytes();
    }
}
