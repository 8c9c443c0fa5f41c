//! The free space tree: exactly what the extents leave of each block group.

use std::collections::BTreeMap;
use std::ops::Range;

use ubtrfs_ondisk::features::CompatRo;
use ubtrfs_ondisk::free_space::{FreeSpaceInfo, USING_BITMAPS};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Key, KeyType, LogicalAddr, RootId};

use crate::context::Context;
use crate::extents::{Extents, Group};
use crate::finding::Finding;
use crate::read::Pointer;
use crate::roots::Roots;
use crate::view::{View, number};
use crate::walk::{Kind, Visit};

/// One item of the free space tree.
#[derive(Clone, Debug)]
struct Item {
    key: Key,
    entry: Entry,
}

#[derive(Clone, Debug)]
enum Entry {
    Info {
        extent_count: u32,
        flags: u32,
    },
    Extent,
    /// The bits as they stand: runs of alternating ones would take 128 times their bytes.
    Bitmap(Box<[u8]>),
}

/// The items, in their order.
#[derive(Debug, Default)]
pub(crate) struct FreeSpace {
    items: Vec<Item>,
}

struct FreeSpaceVisitor;

impl Visit for FreeSpaceVisitor {
    type Out = Vec<Item>;

    fn leaf(&self, leaf: &View, _: &Pointer, _: &mut Vec<Finding>) -> Vec<Item> {
        let items = leaf.items().filter_map(|(_, key, data)| {
            let entry = match key.ty {
                KeyType::FREE_SPACE_INFO => {
                    let info = FreeSpaceInfo::peek(data).ok()?;
                    let (extent_count, flags) = (info.extent_count.get(), info.flags.get());
                    Entry::Info { extent_count, flags }
                }
                KeyType::FREE_SPACE_EXTENT => Entry::Extent,
                KeyType::FREE_SPACE_BITMAP => Entry::Bitmap(data.into()),
                _ => return None,
            };
            Some(Item { key, entry })
        });
        items.collect()
    }
}

/// Adds the runs of set bits, which stand for free sectors.
fn push_runs(runs: &mut Vec<Range<u64>>, key: Key, bitmap: &[u8], sector_bytes: u64) {
    let count = key.offset / sector_bytes;
    for (index, byte) in bitmap.iter().enumerate() {
        for bit in 0..8 {
            let sector = number(index) * 8 + bit;
            if byte >> bit & 1 == 0 || sector >= count {
                continue;
            }
            let start = key.objectid.0.saturating_add(sector * sector_bytes);
            push_merged(runs, start..start.saturating_add(sector_bytes));
        }
    }
}

/// Adds a range, joined with the last one if it begins inside or at the end of that.
fn push_merged(runs: &mut Vec<Range<u64>>, range: Range<u64>) {
    match runs.last_mut() {
        Some(last) if (last.start..=last.end).contains(&range.start) => {
            last.end = last.end.max(range.end);
        }
        _ => runs.push(range),
    }
}

impl Context<'_> {
    pub(crate) fn load_free_space(&mut self, roots: &Roots) -> FreeSpace {
        let pointers = roots.pointer_list(RootId::FREE_SPACE_TREE);
        let leaves = self.walk(pointers, Kind::Tree, &FreeSpaceVisitor);
        FreeSpace { items: leaves.into_iter().flat_map(|leaf| leaf.out).collect() }
    }

    pub(crate) fn check_free_space(&mut self, extents: &Extents, free_space: &FreeSpace) {
        let valid = CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID;
        if !self.compat_ro.contains(CompatRo::FREE_SPACE_TREE) {
            let cache = self.superblock.cache_generation.get();
            if cache != 0 && cache != u64::MAX {
                self.findings.push(Finding::SpaceCacheV1 {});
            }
            return;
        }
        if !self.compat_ro.contains(valid) {
            self.findings.push(Finding::FreeSpaceTreeInvalid {});
            return;
        }
        let trees = [RootId::EXTENT_TREE, RootId::BLOCK_GROUP_TREE, RootId::FREE_SPACE_TREE];
        if !trees.into_iter().all(|root| self.is_complete(root)) {
            return;
        }
        let mut by_group: BTreeMap<LogicalAddr, Vec<&Item>> = BTreeMap::new();
        // Where the last group ends of which there is nothing but free space.
        let mut gone_end = 0;
        for item in &free_space.items {
            let start = LogicalAddr(item.key.objectid.0);
            match group_at(&extents.groups, start) {
                Some(group) => by_group.entry(group.start).or_default().push(item),
                None if start.0 < gone_end => {}
                None => {
                    gone_end = start.0.saturating_add(item.key.offset);
                    self.findings.push(Finding::FreeSpaceWithoutGroup { key: item.key });
                }
            }
        }
        let mut next = 0;
        for group in &extents.groups {
            let free = self.free_ranges(group, extents, &mut next);
            let items = by_group.remove(&group.start).unwrap_or_default();
            self.check_free_space_of(group, &items, &free);
        }
    }

    /// What the extents leave of a group. `next` is the first extent that may lie in it.
    fn free_ranges(&self, group: &Group, extents: &Extents, next: &mut usize) -> Vec<Range<u64>> {
        let sector = self.sector();
        let mut free = Vec::new();
        let mut at = group.start.0;
        while let Some(extent) = extents.list.get(*next).filter(|extent| extent.at.0 < group.end())
        {
            *next += 1;
            if extent.end(sector) <= at {
                continue;
            }
            if extent.at.0 > at {
                free.push(at..extent.at.0);
            }
            at = extent.end(sector);
        }
        if at < group.end() {
            free.push(at..group.end());
        }
        free
    }

    fn check_free_space_of(&mut self, group: &Group, items: &[&Item], expect: &[Range<u64>]) {
        let start = group.start;
        let mut info = None;
        let mut wrong_form = None;
        // Ranges as they stand, and how many extents the count should say.
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut previous_end = LogicalAddr(0);
        for Item { key, entry } in items {
            let range = key.objectid.0..key.objectid.0.saturating_add(key.offset);
            if range.end > group.end() {
                self.findings.push(Finding::FreeSpaceKey { key: *key, group: start });
                continue;
            }
            if !matches!(entry, Entry::Info { .. }) {
                if range.start < previous_end.0 {
                    let (group, key) = (start, *key);
                    self.findings.push(Finding::FreeSpaceOverlap { group, key, previous_end });
                }
                previous_end = previous_end.max(LogicalAddr(range.end));
            }
            let uses_bitmaps = info.is_some_and(|(_, flags)| flags & USING_BITMAPS != 0);
            match entry {
                Entry::Info { extent_count, flags } => {
                    if key.objectid.0 != start.0 || key.offset != group.len_bytes {
                        self.findings.push(Finding::FreeSpaceKey { key: *key, group: start });
                    }
                    info = info.or(Some((*extent_count, *flags)));
                }
                Entry::Extent => {
                    if uses_bitmaps {
                        wrong_form.get_or_insert(*key);
                    }
                    if ranges.last().is_some_and(|last| last.end == range.start) && !uses_bitmaps {
                        let at = LogicalAddr(range.start);
                        self.findings.push(Finding::FreeSpaceUnmerged { group: start, at });
                    }
                    ranges.push(range);
                }
                Entry::Bitmap(bitmap) => {
                    if !uses_bitmaps {
                        wrong_form.get_or_insert(*key);
                    }
                    push_runs(&mut ranges, *key, bitmap, self.sector());
                }
            }
        }
        let Some((extent_count, _)) = info else {
            self.findings.push(Finding::FreeSpaceMissing { group: start });
            return;
        };
        if let Some(key) = wrong_form {
            self.findings.push(Finding::FreeSpaceForm { group: start, key });
        }
        let count = number(ranges.len());
        if u64::from(extent_count) != count {
            let have = u64::from(extent_count);
            self.findings.push(Finding::FreeSpaceCount { group: start, have, expect: count });
        }
        let mut have: Vec<Range<u64>> = Vec::new();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.into_iter().for_each(|range| push_merged(&mut have, range));
        self.compare_ranges(group, &have, expect);
    }

    /// Where two lists of ranges differ, both in order: the first difference of each kind.
    fn compare_ranges(&mut self, group: &Group, have: &[Range<u64>], expect: &[Range<u64>]) {
        for (from, without, said, right) in
            [(have, expect, "free", "used"), (expect, have, "used", "free")]
        {
            if let Some(rest) = first_outside(from, without) {
                self.findings.push(Finding::FreeSpaceDiffers {
                    group: group.start,
                    at: LogicalAddr(rest.start),
                    len_bytes: rest.end - rest.start,
                    have: said,
                    expect: right,
                });
            }
        }
    }
}

/// The first part of `ranges` that no range of `cover` holds. Both are in order.
fn first_outside(ranges: &[Range<u64>], cover: &[Range<u64>]) -> Option<Range<u64>> {
    let mut cover = cover.iter().peekable();
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            while cover.next_if(|cover| cover.end <= at).is_some() {}
            match cover.peek() {
                Some(cover) if cover.start <= at => at = cover.end,
                Some(cover) => return Some(at..range.end.min(cover.start)),
                None => return Some(at..range.end),
            }
        }
    }
    None
}

/// The group that holds an address.
pub(crate) fn group_at(groups: &[Group], at: LogicalAddr) -> Option<&Group> {
    let behind = groups.partition_point(|group| group.start <= at);
    groups.get(behind.checked_sub(1)?).filter(|group| at.0 < group.end())
}
