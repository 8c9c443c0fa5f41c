//! Items of the extent, checksum and free space trees.

use super::Slot;
use crate::block::LEVEL_COUNT_MAX;
use crate::error::{Corruption, Reason, Result};
use crate::extent::{BackRef, ExtentDataRef, ExtentItem, SharedDataRef, TreeBlockInfo, flags};
use crate::free_space::{FreeSpaceInfo, USING_BITMAPS};
use crate::key::KeyType;
use crate::misc::OnDisk;
use crate::types::{InodeNo, ObjectId, RootId};

pub(super) fn csum(slot: &Slot<'_>) -> Result<()> {
    if slot.key.objectid != ObjectId::EXTENT_CSUM {
        return Err(slot.bad_key("object id -10"));
    }
    slot.expect_aligned("address", slot.key.offset)?;
    let csum_len = slot.geometry.csum.len_bytes();
    if !slot.data.len().is_multiple_of(csum_len) {
        return Err(slot.bad_len(format_args!("checksums of {csum_len} bytes")));
    }
    if let Some((key, data)) = slot.previous_of_type(KeyType::EXTENT_CSUM) {
        let len = (data.len() / csum_len * slot.geometry.sectorsize_bytes) as u64;
        if key.offset.checked_add(len).is_none_or(|end| end > slot.key.offset) {
            return Err(slot.overlap(format_args!("{key} of {len} bytes")));
        }
    }
    Ok(())
}

/// An EXTENT_ITEM or METADATA_ITEM.
pub(super) fn extent_item(slot: &Slot<'_>) -> Result<()> {
    slot.expect_aligned("address", slot.key.objectid.0)?;
    let (item, mut inline) = ExtentItem::split(slot.data)?;
    let is_tree_block = match item.flags.get() & (flags::DATA | flags::TREE_BLOCK) {
        flags::DATA => false,
        flags::TREE_BLOCK => true,
        _ => {
            return Err(slot.bad_value(
                format_args!("flags {:#x}", item.flags),
                "either data or a tree block",
            ));
        }
    };
    if slot.key.ty == KeyType::METADATA_ITEM {
        if !is_tree_block {
            return Err(slot.bad_key("EXTENT_ITEM for data"));
        }
        check_level(slot.key.offset)?;
    } else if is_tree_block {
        if slot.key.offset != slot.geometry.nodesize_bytes as u64 {
            return Err(slot.bad_key(format_args!("offset {}", slot.geometry.nodesize_bytes)));
        }
        let (info, rest) = TreeBlockInfo::split(inline)?;
        check_level(u64::from(info.level))?;
        inline = rest;
    } else {
        slot.expect_aligned("length", slot.key.offset)?;
        if item.flags.get() & flags::FULL_BACKREF != 0 {
            return Err(slot.bad_value("FULL_BACKREF", "only in a tree block"));
        }
    }
    inline_refs(slot, item, inline)?;
    overlaps_previous_extent(slot)
}

fn check_level(level: u64) -> Result<()> {
    if level < LEVEL_COUNT_MAX as u64 {
        return Ok(());
    }
    Err(Corruption::new(Reason::WrongLevel).have(level).expect("0 to 7"))
}

fn inline_refs(slot: &Slot<'_>, item: &ExtentItem, mut inline: &[u8]) -> Result<()> {
    let mut listed = 0_u64;
    let mut previous: Option<BackRef> = None;
    while !inline.is_empty() {
        let (back_ref, rest) = BackRef::split_inline(inline)?;
        inline = rest;
        reference(slot, &back_ref)?;
        listed = listed.saturating_add(back_ref.count());
        if let Some(previous) = previous
            && back_ref.inline_cmp(&previous).is_lt()
        {
            return Err(Corruption::new(Reason::RefOrder)
                .have(format!("{back_ref:?} after {previous:?}"))
                .expect("types ascending, within a type hash or parent descending"));
        }
        previous = Some(back_ref);
    }
    if listed > item.refs.get() {
        return Err(Corruption::new(Reason::WrongRefCount)
            .have(format!("{} references in {}", item.refs, slot.key))
            .expect(format!("at least the {listed} inline ones")));
    }
    Ok(())
}

/// What holds for a reference, inline or keyed.
fn reference(slot: &Slot<'_>, back_ref: &BackRef) -> Result<()> {
    match *back_ref {
        BackRef::TreeBlock { .. } | BackRef::Owner { .. } => Ok(()),
        BackRef::SharedBlock { parent } => slot.expect_aligned("parent", parent.0),
        BackRef::SharedData { parent, count } => {
            slot.expect_aligned("parent", parent.0)?;
            check_count(slot, count)
        }
        BackRef::ExtentData { root, inode, offset, count } => {
            slot.expect_aligned("offset", offset)?;
            check_count(slot, count)?;
            // The root tree has data where it holds the v1 free space cache.
            if !(root.holds_files() || root == RootId::ROOT_TREE) || !is_file(inode) {
                return Err(slot.bad_value(
                    format_args!("reference from root {root}, inode {inode}"),
                    "a file",
                ));
            }
            Ok(())
        }
    }
}

fn is_file(inode: InodeNo) -> bool {
    let id = inode.object_id();
    (ObjectId::FIRST_FREE..=ObjectId::LAST_FREE).contains(&id) || id == ObjectId::FREE_INO
}

fn check_count(slot: &Slot<'_>, count: u32) -> Result<()> {
    if count != 0 {
        return Ok(());
    }
    Err(Corruption::new(Reason::WrongRefCount)
        .have(format!("a reference with count 0 in {}", slot.key))
        .expect("at least 1"))
}

fn overlaps_previous_extent(slot: &Slot<'_>) -> Result<()> {
    let Some((key, _)) = slot.previous else { return Ok(()) };
    let len = match key.ty {
        KeyType::EXTENT_ITEM => key.offset,
        KeyType::METADATA_ITEM => slot.geometry.nodesize_bytes as u64,
        _ => return Ok(()),
    };
    if key.objectid.0.checked_add(len).is_none_or(|end| end > slot.key.objectid.0) {
        return Err(slot.overlap(key));
    }
    Ok(())
}

/// A TREE_BLOCK_REF or SHARED_BLOCK_REF.
pub(super) fn keyed_block_ref(slot: &Slot<'_>) -> Result<()> {
    slot.expect_len(0)?;
    slot.expect_aligned("address", slot.key.objectid.0)?;
    reference(slot, &BackRef::parse_keyed(slot.key, slot.data)?)
}

/// A SHARED_DATA_REF.
pub(super) fn keyed_shared_data_ref(slot: &Slot<'_>) -> Result<()> {
    slot.expect_len(size_of::<SharedDataRef>())?;
    slot.expect_aligned("address", slot.key.objectid.0)?;
    reference(slot, &BackRef::parse_keyed(slot.key, slot.data)?)
}

/// An EXTENT_DATA_REF. Its key's hash is not judged: a collision moves it on.
pub(super) fn keyed_data_ref(slot: &Slot<'_>) -> Result<()> {
    slot.expect_aligned("address", slot.key.objectid.0)?;
    let mut rest = slot.data;
    while !rest.is_empty() {
        let (data_ref, behind) = ExtentDataRef::split(rest)?;
        reference(slot, &BackRef::from_data_ref(data_ref))?;
        rest = behind;
    }
    Ok(())
}

fn free_space_range(slot: &Slot<'_>) -> Result<()> {
    slot.expect_aligned("address", slot.key.objectid.0)?;
    slot.expect_aligned("length", slot.key.offset)?;
    if slot.key.offset == 0 || slot.key.objectid.0.checked_add(slot.key.offset).is_none() {
        return Err(slot.bad_key("a range of the logical space"));
    }
    Ok(())
}

pub(super) fn free_space_info(slot: &Slot<'_>) -> Result<()> {
    free_space_range(slot)?;
    slot.expect_len(size_of::<FreeSpaceInfo>())?;
    let info = FreeSpaceInfo::peek(slot.data)?;
    if info.flags.get() & !USING_BITMAPS != 0 {
        return Err(slot.bad_value(format_args!("flags {:#x}", info.flags), "0 or 1"));
    }
    let count_max = slot.key.offset / slot.geometry.sectorsize_bytes as u64;
    if u64::from(info.extent_count.get()) > count_max {
        return Err(slot.bad_value(
            format_args!("{} free extents", info.extent_count),
            format_args!("at most {count_max}"),
        ));
    }
    Ok(())
}

pub(super) fn free_space_extent(slot: &Slot<'_>) -> Result<()> {
    free_space_range(slot)?;
    slot.expect_len(0)
}

pub(super) fn free_space_bitmap(slot: &Slot<'_>) -> Result<()> {
    free_space_range(slot)?;
    let bytes = (slot.key.offset / slot.geometry.sectorsize_bytes as u64).div_ceil(8);
    if slot.data.len() as u64 != bytes {
        return Err(slot.bad_len(format_args!("{bytes} bytes, a bit for each sector")));
    }
    Ok(())
}
