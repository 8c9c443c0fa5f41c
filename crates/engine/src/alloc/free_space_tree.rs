//! The free space tree: which bytes of each block group are free, as extents or as bitmaps.
//!
//! A group begins with one FREE_SPACE_INFO that counts its free extents and says the form. In the
//! form of extents each is an item with no data; in bitmaps an item covers 2048 sectors. A group
//! goes to bitmaps when its extents would take more room than bitmaps do, and back some way below
//! that, so that it does not flap.
//!
//! Which form a group has is cached in the group ([`FreeSpaceForm::uses_bitmaps`]), set when its info
//! item is first read and at each conversion: a change of free space then searches only for what
//! it changes. The allocator's option `cache_free_space_form` turns the cache off, for measuring.

use ubtrfs_ondisk::free_space::{BITMAP_BITS, BITMAP_BYTES, FreeSpaceInfo, USING_BITMAPS};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Corruption, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId};
use ubtrfs_rt::{Arc, AtomicU64, Ordering};
use zerocopy::IntoBytes;

use super::block_group::FreeSpaceForm;
use crate::btree::{Editor, Readahead, Tree};
use crate::error::{Error, Result};

/// Bytes of an item header: what an extent costs in the tree.
const ITEM_BYTES: u64 = 25;
/// How far below the upper threshold the lower one lies.
const HYSTERESIS: u64 = 100;

/// A change of free space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Delta {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) is_free: bool,
}

/// Extents above which a group of `len_bytes` goes to bitmaps, and below which it comes back.
///
/// Source: the published format: ⌈len / (2048 sectors)⌉ · (25 + 256) / 25, and 100 less.
fn thresholds(len_bytes: u64, sectorsize_bytes: u64) -> (u64, u64) {
    let bitmaps = len_bytes.div_ceil(BITMAP_BITS * sectorsize_bytes);
    let high = bitmaps * (ITEM_BYTES + BITMAP_BYTES) / ITEM_BYTES;
    (high, high.saturating_sub(HYSTERESIS))
}

fn info_key(group: &FreeSpaceForm) -> Key {
    Key::new(ObjectId(group.start.0), KeyType::FREE_SPACE_INFO, group.len_bytes)
}

fn extent_key(start: u64, end: u64) -> Key {
    Key::new(ObjectId(start), KeyType::FREE_SPACE_EXTENT, end - start)
}

/// Reads a group's free ranges.
///
/// # Errors
/// A damaged block or item; ranges outside the group or out of order.
pub(super) fn load(
    tree: &Arc<Tree>,
    start: LogicalAddr,
    len_bytes: u64,
    sectorsize_bytes: u64,
) -> Result<Vec<(u64, u64)>> {
    let end = start.0 + len_bytes;
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    let mut push = |from: u64, to: u64| -> Result<()> {
        let floor = ranges.last().map_or(start.0, |(_, end)| *end);
        if from < floor || to > end || from >= to {
            return Err(bad(format!("free space {from}..{to}"), format!("in {floor}..{end}")));
        }
        match ranges.last_mut() {
            Some((_, last)) if *last == from => *last = to,
            _ => ranges.push((from, to)),
        }
        Ok(())
    };
    let mut cursor = tree.cursor_with(Readahead::Forward);
    cursor.seek(&Key::new(ObjectId(start.0), KeyType::FREE_SPACE_INFO, 0))?;
    match cursor.current()? {
        Some((key, _))
            if key == Key::new(ObjectId(start.0), KeyType::FREE_SPACE_INFO, len_bytes) => {}
        other => {
            let have = other.map_or("nothing".to_owned(), |(key, _)| key.to_string());
            return Err(bad(have, format!("FREE_SPACE_INFO of block group {start}")));
        }
    }
    cursor.next()?;
    while let Some((key, data)) = cursor.current()? {
        if key.objectid.0 >= end {
            break;
        }
        match key.ty {
            KeyType::FREE_SPACE_EXTENT => {
                let to = key.objectid.0.saturating_add(key.offset);
                push(key.objectid.0, to)?;
            }
            KeyType::FREE_SPACE_BITMAP => {
                for (from, to) in runs(data) {
                    push(
                        key.objectid.0.saturating_add(from * sectorsize_bytes),
                        key.objectid.0.saturating_add(to * sectorsize_bytes),
                    )?;
                }
            }
            _ => return Err(bad(key, "free space of one block group")),
        }
        cursor.next()?;
    }
    Ok(ranges)
}

/// Runs of set bits.
fn runs(bitmap: &[u8]) -> Vec<(u64, u64)> {
    let mut runs = Vec::new();
    let mut from = None;
    for bit in 0..bitmap.len() as u64 * 8 {
        match (is_set(bitmap, bit), from) {
            (true, None) => from = Some(bit),
            (false, Some(start)) => {
                runs.push((start, bit));
                from = None;
            }
            _ => {}
        }
    }
    if let Some(start) = from {
        runs.push((start, bitmap.len() as u64 * 8));
    }
    runs
}

fn is_set(bitmap: &[u8], bit: u64) -> bool {
    usize::try_from(bit / 8)
        .ok()
        .and_then(|byte| bitmap.get(byte))
        .is_some_and(|byte| byte >> (bit % 8) & 1 == 1)
}

/// The free space tree, locked for the changes of one pass over block groups.
pub(super) struct FreeSpaceTree<'e, 'a> {
    pub(super) editor: &'e mut Editor<'a>,
    pub(super) sectorsize_bytes: u64,
    /// Whether a group's form is remembered between changes.
    pub(super) is_form_cached: bool,
    /// Searches for a group's form.
    pub(super) form_searches: &'e AtomicU64,
}

impl FreeSpaceTree<'_, '_> {
    /// Enters a new group, all of it free.
    ///
    /// # Errors
    /// What stops an edit.
    pub(super) fn add_group(&mut self, group: &mut FreeSpaceForm) -> Result<()> {
        group.uses_bitmaps = Some(false);
        group.extent_count = 1;
        let info = FreeSpaceInfo { extent_count: 1.into(), flags: 0.into() };
        self.editor.insert(info_key(group), size_of::<FreeSpaceInfo>(), |to| {
            to.copy_from_slice(info.as_bytes());
        })?;
        self.editor.insert(extent_key(group.start.0, group.end().0), 0, |_| {})
    }

    /// Removes all that the tree has of a group.
    ///
    /// # Errors
    /// What stops an edit.
    pub(super) fn remove_group(&mut self, start: LogicalAddr, len_bytes: u64) -> Result<()> {
        let first = Key::new(ObjectId(start.0), KeyType(0), 0);
        while let Some((key, _)) = self.editor.at_or_after(&first)? {
            if key.objectid.0 >= start.0 + len_bytes {
                break;
            }
            self.editor.remove(&key)?;
        }
        Ok(())
    }

    /// Applies changes of one group, in order, and writes its info item.
    ///
    /// # Errors
    /// Corruption where the tree contradicts the change; what stops an edit.
    pub(super) fn apply(&mut self, group: &mut FreeSpaceForm, deltas: &[Delta]) -> Result<()> {
        for delta in deltas {
            let uses_bitmaps = self.form(group)?;
            match (uses_bitmaps, delta.is_free) {
                (false, true) => self.add_extent(group, delta.start, delta.end)?,
                (false, false) => self.remove_extent(group, delta.start, delta.end)?,
                (true, is_free) => self.set_bits(group, delta.start, delta.end, is_free)?,
            }
            self.convert_if_due(group)?;
        }
        let info = FreeSpaceInfo {
            extent_count: group.extent_count.into(),
            flags: if group.uses_bitmaps == Some(true) { USING_BITMAPS } else { 0 }.into(),
        };
        self.editor.update(&info_key(group), |to| to.copy_from_slice(info.as_bytes()))
    }

    /// Whether the group's free space lies in bitmaps.
    fn form(&mut self, group: &mut FreeSpaceForm) -> Result<bool> {
        if let Some(uses_bitmaps) = group.uses_bitmaps {
            if !self.is_form_cached {
                self.search_form(group)?;
            }
            return Ok(uses_bitmaps);
        }
        let info = self.search_form(group)?;
        let uses_bitmaps = info.flags.get() & USING_BITMAPS != 0;
        group.uses_bitmaps = Some(uses_bitmaps);
        group.extent_count = info.extent_count.get();
        Ok(uses_bitmaps)
    }

    fn search_form(&mut self, group: &FreeSpaceForm) -> Result<FreeSpaceInfo> {
        self.form_searches.fetch_add(1, Ordering::Relaxed);
        let key = info_key(group);
        self.editor
            .get(&key, |bytes| FreeSpaceInfo::peek(bytes).copied())?
            .ok_or_else(|| bad("no item", key))?
            .map_err(Error::from)
    }

    fn add_extent(&mut self, group: &mut FreeSpaceForm, start: u64, end: u64) -> Result<()> {
        let (mut from, mut to) = (start, end);
        let before = Key::new(ObjectId(start), KeyType::FREE_SPACE_INFO, 0);
        if let Some((key, _)) = self.editor.at_or_before(&before)?
            && key.ty == KeyType::FREE_SPACE_EXTENT
            && key.objectid.0 >= group.start.0
        {
            let key_end = key.objectid.0 + key.offset;
            if key_end > start {
                return Err(bad(format!("{key}"), format!("{start}..{end} not free yet")));
            }
            if key_end == start {
                self.editor.remove(&key)?;
                count(group, -1)?;
                from = key.objectid.0;
            }
        }
        if end < group.end().0 {
            let behind = Key::new(ObjectId(end), KeyType::FREE_SPACE_EXTENT, 0);
            if let Some((key, _)) = self.editor.at_or_after(&behind)?
                && key.ty == KeyType::FREE_SPACE_EXTENT
                && key.objectid.0 == end
            {
                self.editor.remove(&key)?;
                count(group, -1)?;
                to = end + key.offset;
            }
        }
        self.editor.insert(extent_key(from, to), 0, |_| {})?;
        count(group, 1)?;
        Ok(())
    }

    fn remove_extent(&mut self, group: &mut FreeSpaceForm, start: u64, end: u64) -> Result<()> {
        let sought = Key::new(ObjectId(start), KeyType::FREE_SPACE_EXTENT, u64::MAX);
        let found = self.editor.at_or_before(&sought)?;
        let Some((key, _)) = found.filter(|(key, _)| {
            key.ty == KeyType::FREE_SPACE_EXTENT && key.objectid.0 + key.offset >= end
        }) else {
            return Err(bad("no such free extent", format!("{start}..{end} free")));
        };
        let (from, to) = (key.objectid.0, key.objectid.0 + key.offset);
        self.editor.remove(&key)?;
        count(group, -1)?;
        if from < start {
            self.editor.insert(extent_key(from, start), 0, |_| {})?;
            count(group, 1)?;
        }
        if end < to {
            self.editor.insert(extent_key(end, to), 0, |_| {})?;
            count(group, 1)?;
        }
        Ok(())
    }

    /// Sets or clears the bits of a range and keeps the count of free extents.
    fn set_bits(
        &mut self,
        group: &mut FreeSpaceForm,
        start: u64,
        end: u64,
        is_free: bool,
    ) -> Result<()> {
        let before = start > group.start.0 && self.bit(start - self.sectorsize_bytes)?;
        let behind = end < group.end().0 && self.bit(end)?;
        let mut at = start;
        while at < end {
            let key = self.bitmap_at(at)?;
            let bitmap_end = key.objectid.0 + key.offset;
            let upto = end.min(bitmap_end);
            let first = (at - key.objectid.0) / self.sectorsize_bytes;
            let last = (upto - key.objectid.0) / self.sectorsize_bytes;
            let consistent = self.editor.update(&key, |bitmap| {
                (first..last).all(|bit| {
                    let was_free = is_set(bitmap, bit);
                    if let Some(byte) =
                        usize::try_from(bit / 8).ok().and_then(|b| bitmap.get_mut(b))
                    {
                        *byte ^= 1 << (bit % 8);
                    }
                    was_free != is_free
                })
            })?;
            if !consistent {
                return Err(bad(
                    format!("bits of {at}..{upto} in {key}"),
                    if is_free { "not free yet" } else { "free" },
                ));
            }
            at = upto;
        }
        let neighbours = i64::from(before) + i64::from(behind);
        count(group, if is_free { 1 - neighbours } else { neighbours - 1 })?;
        Ok(())
    }

    fn bitmap_at(&mut self, addr: u64) -> Result<Key> {
        let sought = Key::new(ObjectId(addr), KeyType::FREE_SPACE_BITMAP, u64::MAX);
        match self.editor.at_or_before(&sought)? {
            Some((key, _))
                if key.ty == KeyType::FREE_SPACE_BITMAP
                    && key.offset > 0
                    && key.objectid.0.saturating_add(key.offset) > addr =>
            {
                Ok(key)
            }
            _ => Err(bad("no such bitmap", format!("a bitmap for {addr}"))),
        }
    }

    fn bit(&mut self, addr: u64) -> Result<bool> {
        let key = self.bitmap_at(addr)?;
        let bit = (addr - key.objectid.0) / self.sectorsize_bytes;
        Ok(self.editor.get(&key, |bitmap| is_set(bitmap, bit))?.unwrap_or(false))
    }

    fn convert_if_due(&mut self, group: &mut FreeSpaceForm) -> Result<()> {
        let (high, low) = thresholds(group.len_bytes, self.sectorsize_bytes);
        let count = u64::from(group.extent_count);
        match group.uses_bitmaps {
            Some(false) if count > high => self.convert(group, true),
            Some(true) if count < low => self.convert(group, false),
            _ => Ok(()),
        }
    }

    /// Rewrites the group's items in the other form.
    fn convert(&mut self, group: &mut FreeSpaceForm, to_bitmaps: bool) -> Result<()> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut sought = Key::new(ObjectId(group.start.0), KeyType::FREE_SPACE_EXTENT, 0);
        while let Some((key, data)) = self.editor.at_or_after(&sought)? {
            if key.objectid.0 >= group.end().0 {
                break;
            }
            match key.ty {
                KeyType::FREE_SPACE_EXTENT => {
                    ranges.push((key.objectid.0, key.objectid.0 + key.offset));
                }
                _ => ranges.extend(runs(&data).into_iter().map(|(from, to)| {
                    (
                        key.objectid.0.saturating_add(from * self.sectorsize_bytes),
                        key.objectid.0.saturating_add(to * self.sectorsize_bytes),
                    )
                })),
            }
            self.editor.remove(&key)?;
            sought = key;
        }
        ranges.dedup_by(|next, kept| {
            let touch = kept.1 == next.0;
            if touch {
                kept.1 = next.1;
            }
            touch
        });
        if to_bitmaps {
            self.insert_bitmaps(group, &ranges)?;
        } else {
            for (from, to) in &ranges {
                self.editor.insert(extent_key(*from, *to), 0, |_| {})?;
            }
        }
        group.uses_bitmaps = Some(to_bitmaps);
        group.extent_count = u32::try_from(ranges.len())
            .map_err(|_| bad(format!("{} free extents", ranges.len()), "a count that fits"))?;
        Ok(())
    }

    fn insert_bitmaps(&mut self, group: &FreeSpaceForm, ranges: &[(u64, u64)]) -> Result<()> {
        let span = BITMAP_BITS * self.sectorsize_bytes;
        let mut start = group.start.0;
        while start < group.end().0 {
            let end = group.end().0.min(start + span);
            let bits = (end - start) / self.sectorsize_bytes;
            let len = usize::try_from(bits.div_ceil(8)).expect("at most 256 bytes");
            let mut bitmap = vec![0_u8; len];
            let first = ranges.partition_point(|(_, to)| *to <= start);
            for (from, to) in ranges[first..].iter().take_while(|(from, _)| *from < end) {
                let from = (*from.max(&start) - start) / self.sectorsize_bytes;
                let to = (*to.min(&end) - start) / self.sectorsize_bytes;
                for bit in from..to {
                    let byte = usize::try_from(bit / 8).expect("within the bitmap");
                    bitmap[byte] |= 1 << (bit % 8);
                }
            }
            let key = Key::new(ObjectId(start), KeyType::FREE_SPACE_BITMAP, end - start);
            self.editor.insert(key, len, |to| to.copy_from_slice(&bitmap))?;
            start = end;
        }
        Ok(())
    }
}

/// Changes the number of a group's free extents, which is what its info item said.
fn count(group: &mut FreeSpaceForm, change: i64) -> Result<()> {
    let count = i64::from(group.extent_count) + change;
    group.extent_count = u32::try_from(count)
        .map_err(|_| bad(format!("{count} free extents"), "as many as there are"))?;
    Ok(())
}

#[cold]
fn bad(have: impl std::fmt::Display, expect: impl std::fmt::Display) -> Error {
    let corruption = Corruption::new(Reason::BadValue).in_root(RootId::FREE_SPACE_TREE);
    Error::Corrupt(corruption.have(have).expect(expect))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_of_a_gibibyte_are_those_of_the_format() {
        assert_eq!(thresholds(1 << 30, 4096), (1438, 1338));
    }

    #[test]
    fn thresholds_of_a_small_group_never_convert_back() {
        assert_eq!(thresholds(8 << 20, 4096), (11, 0));
    }

    #[test]
    fn runs_of_a_bitmap_are_its_set_bits() {
        assert_eq!(runs(&[0b0000_0110, 0b1000_0000, 0xff]), [(1, 3), (15, 24)]);
    }
}
