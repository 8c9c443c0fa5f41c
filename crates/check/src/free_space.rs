//! The free space tree: exactly what the extents leave of each block group.

use std::ops::Range;

use ubtrfs_ondisk::features::CompatRo;
use ubtrfs_ondisk::free_space::{FreeSpaceInfo, USING_BITMAPS};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Key, KeyType, LogicalAddr, ObjectId, RootId};
use ubtrfs_rt::Arc;

use crate::context::Context;
use crate::extents::{Extents, Group};
use crate::finding::Finding;
use crate::read::Pointer;
use crate::roots::Roots;
use crate::store::Store;
use crate::table::Table;
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
#[derive(Debug)]
pub(crate) struct FreeSpace {
    /// Key, and what the kind of item says: count and flags, or where its bits begin.
    items: Table<4>,
    /// For each bitmap its bytes and the bits.
    bits: Table<1>,
}

impl FreeSpace {
    fn push(&mut self, item: &Item) {
        let Key { objectid, ty, offset } = item.key;
        let word = match &item.entry {
            Entry::Info { extent_count, flags } => {
                u64::from(*extent_count) | u64::from(*flags) << 32
            }
            Entry::Extent => 0,
            Entry::Bitmap(bitmap) => {
                let place = self.bits.len();
                self.bits.push([number(bitmap.len())]);
                for bytes in bitmap.chunks(8) {
                    let mut word = [0; 8];
                    word[..bytes.len()].copy_from_slice(bytes);
                    self.bits.push([u64::from_le_bytes(word)]);
                }
                number(place)
            }
        };
        self.items.push([objectid.0, u64::from(ty.0), offset, word]);
    }

    fn item(&self, [objectid, ty, offset, word]: [u64; 4]) -> Item {
        let key = Key::new(ObjectId(objectid), KeyType(u8::try_from(ty).unwrap_or(0)), offset);
        let entry = match key.ty {
            KeyType::FREE_SPACE_INFO => {
                let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
                let extent_count = u32::from_le_bytes([a, b, c, d]);
                Entry::Info { extent_count, flags: u32::from_le_bytes([e, f, g, h]) }
            }
            KeyType::FREE_SPACE_BITMAP => Entry::Bitmap(self.bitmap(word)),
            _ => Entry::Extent,
        };
        Item { key, entry }
    }

    fn bitmap(&self, place: u64) -> Box<[u8]> {
        let place = usize::try_from(place).unwrap_or(0);
        let mut words = self.bits.iter_from(place).map(|[word]| word);
        let len = usize::try_from(words.next().unwrap_or(0)).unwrap_or(0);
        let bytes = words.take(len.div_ceil(8)).flat_map(u64::to_le_bytes);
        bytes.take(len).collect()
    }
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

/// Ranges of addresses, in the order in which they were added.
struct Ranges {
    table: Table<2>,
    /// The last one, which may grow yet.
    last: Option<Range<u64>>,
}

impl Ranges {
    fn new(store: &Arc<Store>) -> Self {
        Self { table: Table::new(store), last: None }
    }

    fn clear(&mut self) {
        self.table.clear();
        self.last = None;
    }

    fn len(&self) -> usize {
        self.table.len() + usize::from(self.last.is_some())
    }

    fn push(&mut self, range: Range<u64>) {
        if let Some(last) = self.last.replace(range) {
            self.table.push([last.start, last.end]);
        }
    }

    /// Adds a range, joined with the last one if it begins inside or at the end of that.
    fn push_merged(&mut self, range: Range<u64>) {
        match &mut self.last {
            Some(last) if (last.start..=last.end).contains(&range.start) => {
                last.end = last.end.max(range.end);
            }
            _ => self.push(range),
        }
    }

    /// Adds the runs of set bits, which stand for free sectors.
    fn push_runs(&mut self, key: Key, bitmap: &[u8], sector_bytes: u64) {
        let count = key.offset / sector_bytes;
        for (index, byte) in bitmap.iter().enumerate() {
            for bit in 0..8 {
                let sector = number(index) * 8 + bit;
                if byte >> bit & 1 == 0 || sector >= count {
                    continue;
                }
                let start = key.objectid.0.saturating_add(sector * sector_bytes);
                self.push_merged(start..start.saturating_add(sector_bytes));
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.table.iter().map(|[start, end]| start..end).chain(self.last.clone())
    }

    /// The same in order, and joined where they touch or overlap.
    fn settle(&mut self) {
        if let Some(last) = self.last.take() {
            self.table.push([last.start, last.end]);
        }
        self.table.sort_by(|[start, _]| *start);
        let mut settled = Self::new(self.table.store());
        self.iter().for_each(|range| settled.push_merged(range));
        *self = settled;
    }
}

impl Context<'_> {
    pub(crate) fn load_free_space(&mut self, roots: &Roots) -> FreeSpace {
        let (items, bits) = (Table::new(&self.store), Table::new(&self.store));
        let mut free_space = FreeSpace { items, bits };
        let pointers = roots.pointer_list(RootId::FREE_SPACE_TREE);
        self.walk(pointers, Kind::Tree, &FreeSpaceVisitor, |_, _, items| {
            items.iter().for_each(|item| free_space.push(item));
        });
        free_space
    }

    pub(crate) fn check_free_space(&mut self, extents: &Extents, free_space: FreeSpace) {
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
        let mut by_group = Table::<5>::new(&self.store);
        // Where the last group ends of which there is nothing but free space.
        let mut gone_end = 0;
        for [objectid, ty, offset, word] in free_space.items.iter() {
            let start = LogicalAddr(objectid);
            match group_at(&extents.groups, start) {
                Some(group) => by_group.push([group.start.0, objectid, ty, offset, word]),
                None if start.0 < gone_end => {}
                None => {
                    gone_end = start.0.saturating_add(offset);
                    let key = free_space.item([objectid, ty, offset, word]).key;
                    self.findings.push(Finding::FreeSpaceWithoutGroup { key });
                }
            }
        }
        // In a damaged tree only they are in another order.
        by_group.sort_by(|[group, ..]| *group);
        let mut next = 0;
        let mut expect = Ranges::new(&self.store);
        for group in &extents.groups {
            self.free_ranges(group, extents, &mut next, &mut expect);
            let items = by_group.iter_from(by_group.count_below(group.start.0));
            let items = items.take_while(|[of, ..]| *of == group.start.0);
            let items = items.map(|[_, item @ ..]| free_space.item(item));
            self.check_free_space_of(group, items, &expect);
        }
    }

    /// What the extents leave of a group. `next` is the first extent that may lie in it.
    fn free_ranges(&self, group: &Group, extents: &Extents, next: &mut usize, free: &mut Ranges) {
        let sector = self.sector();
        free.clear();
        let mut at = group.start.0;
        let inside = extents.iter_from(*next).take_while(|extent| extent.at.0 < group.end());
        for extent in inside {
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
    }

    fn check_free_space_of(
        &mut self,
        group: &Group,
        items: impl Iterator<Item = Item>,
        expect: &Ranges,
    ) {
        let start = group.start;
        let mut info = None;
        let mut wrong_form = None;
        // Ranges as they stand, and how many extents the count should say.
        let mut ranges = Ranges::new(&self.store);
        let mut previous_end = LogicalAddr(0);
        for Item { key, entry } in items {
            let range = key.objectid.0..key.objectid.0.saturating_add(key.offset);
            if range.end > group.end() {
                self.findings.push(Finding::FreeSpaceKey { key, group: start });
                continue;
            }
            if !matches!(entry, Entry::Info { .. }) {
                if range.start < previous_end.0 {
                    let group = start;
                    self.findings.push(Finding::FreeSpaceOverlap { group, key, previous_end });
                }
                previous_end = previous_end.max(LogicalAddr(range.end));
            }
            let uses_bitmaps = info.is_some_and(|(_, flags)| flags & USING_BITMAPS != 0);
            match entry {
                Entry::Info { extent_count, flags } => {
                    if key.objectid.0 != start.0 || key.offset != group.len_bytes {
                        self.findings.push(Finding::FreeSpaceKey { key, group: start });
                    }
                    info = info.or(Some((extent_count, flags)));
                }
                Entry::Extent => {
                    if uses_bitmaps {
                        wrong_form.get_or_insert(key);
                    }
                    let last = &ranges.last;
                    if last.as_ref().is_some_and(|it| it.end == range.start) && !uses_bitmaps {
                        let at = LogicalAddr(range.start);
                        self.findings.push(Finding::FreeSpaceUnmerged { group: start, at });
                    }
                    ranges.push(range);
                }
                Entry::Bitmap(bitmap) => {
                    if !uses_bitmaps {
                        wrong_form.get_or_insert(key);
                    }
                    ranges.push_runs(key, &bitmap, self.sector());
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
        ranges.settle();
        self.compare_ranges(group, &ranges, expect);
    }

    /// Where two lists of ranges differ, both in order: the first difference of each kind.
    fn compare_ranges(&mut self, group: &Group, have: &Ranges, expect: &Ranges) {
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
fn first_outside(ranges: &Ranges, cover: &Ranges) -> Option<Range<u64>> {
    let mut cover = cover.iter().peekable();
    for range in ranges.iter() {
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
