//! Items of the chunk and device trees, and block groups.

use super::Slot;
use crate::block_group::{BlockGroupFlags, BlockGroupItem};
use crate::chunk::{Chunk, STRIPE_LEN_BYTES};
use crate::error::{Corruption, Reason, Result};
use crate::features::Incompat;
use crate::key::KeyType;
use crate::misc::{DevExtent, DevItem, OnDisk};
use crate::types::{LogicalAddr, ObjectId, RootId};

/// Checks what a chunk says of itself, as Linux does: alignment, type and profile, number of
/// stripes. `incompat`, where known, decides whether data and metadata may share a chunk.
///
/// # Errors
/// The first finding.
pub fn chunk(chunk: &Chunk, sectorsize_bytes: u32, incompat: Option<Incompat>) -> Result<()> {
    let sectorsize = u64::from(sectorsize_bytes);
    let bad = |have: String, expect: &str| {
        Err(Corruption::new(Reason::BadValue)
            .have(format!("chunk at {}: {have}", chunk.start))
            .expect(expect))
    };
    if !chunk.start.0.is_multiple_of(sectorsize) || !chunk.len_bytes.is_multiple_of(sectorsize) {
        return Err(Corruption::new(Reason::Unaligned)
            .have(format!("chunk of {} bytes at {}", chunk.len_bytes, chunk.start))
            .expect(format!("multiples of {sectorsize}")));
    }
    if chunk.len_bytes == 0 || chunk.start.checked_add(chunk.len_bytes).is_none() {
        return bad(format!("{} bytes", chunk.len_bytes), "a range of the logical space");
    }
    if chunk.sector_size != sectorsize_bytes {
        return bad(format!("sector size {}", chunk.sector_size), "that of the superblock");
    }
    if chunk.stripe_len_bytes != STRIPE_LEN_BYTES {
        return bad(format!("stripe length {}", chunk.stripe_len_bytes), "65536");
    }
    let flags = chunk.flags;
    let known = BlockGroupFlags::TYPE_MASK | BlockGroupFlags::PROFILE_MASK;
    if flags.0 & !known.0 != 0 || flags.profile_name().is_none() || !is_type(flags) {
        return bad(format!("type {:#x}", flags.0), "one type and at most one profile");
    }
    let mixed = BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
    if flags.contains(mixed)
        && incompat.is_some_and(|features| !features.contains(Incompat::MIXED_GROUPS))
    {
        return bad("data and metadata together".to_owned(), "the feature MIXED_GROUPS");
    }
    if !stripe_count_fits(chunk) {
        return bad(
            format!("{} stripes, {} sub stripes", chunk.stripes.len(), chunk.sub_stripes),
            flags.profile_name().unwrap_or("a profile"),
        );
    }
    Ok(())
}

fn is_type(flags: BlockGroupFlags) -> bool {
    let mixed = BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
    [BlockGroupFlags::DATA, BlockGroupFlags::METADATA, BlockGroupFlags::SYSTEM, mixed]
        .contains(&flags.ty())
}

fn stripe_count_fits(chunk: &Chunk) -> bool {
    let count = chunk.stripes.len();
    match chunk.flags.profile() {
        BlockGroupFlags::RAID0 => count >= 1,
        BlockGroupFlags::RAID1 | BlockGroupFlags::DUP => count == 2,
        BlockGroupFlags::RAID1C3 => count == 3,
        BlockGroupFlags::RAID1C4 => count == 4,
        BlockGroupFlags::RAID10 => count >= 2 && count.is_multiple_of(2) && chunk.sub_stripes == 2,
        BlockGroupFlags::RAID5 => count >= 2,
        BlockGroupFlags::RAID6 => count >= 3,
        _ => count == 1,
    }
}

pub(super) fn chunk_item(slot: &Slot<'_>) -> Result<()> {
    let found = Chunk::parse(LogicalAddr(slot.key.offset), slot.data)?;
    chunk(&found, slot.sectorsize_bytes(), None)
}

pub(super) fn dev_item(slot: &Slot<'_>) -> Result<()> {
    if slot.key.objectid != ObjectId::DEV_ITEMS {
        return Err(slot.bad_key("object id 1"));
    }
    slot.expect_len(size_of::<DevItem>())?;
    let item = DevItem::peek(slot.data)?;
    if item.devid.get() != slot.key.offset {
        return Err(slot.bad_key(format_args!("offset {}, the device", item.devid)));
    }
    if item.bytes_used > item.total_bytes {
        return Err(Corruption::new(Reason::BadValue)
            .have(format!("{} bytes used", item.bytes_used))
            .expect(format!("at most {}", item.total_bytes)));
    }
    Ok(())
}

pub(super) fn dev_extent(slot: &Slot<'_>) -> Result<()> {
    slot.expect_len(size_of::<DevExtent>())?;
    let item = DevExtent::peek(slot.data)?;
    if item.chunk_tree.get() != RootId::CHUNK_TREE.0
        || item.chunk_objectid.get() != ObjectId::FIRST_CHUNK_TREE.0
    {
        return Err(Corruption::new(Reason::BadValue)
            .have(format!("chunk tree {}, object id {}", item.chunk_tree, item.chunk_objectid))
            .expect("3 and 256"));
    }
    slot.expect_aligned("device offset", slot.key.offset)?;
    slot.expect_aligned("chunk", item.chunk_offset.get())?;
    slot.expect_aligned("length", item.length.get())?;
    if let Some((key, data)) = slot.previous_of_type(KeyType::DEV_EXTENT)
        && key.objectid == slot.key.objectid
    {
        let len = DevExtent::peek(data)?.length.get();
        if key.offset.checked_add(len).is_none_or(|end| end > slot.key.offset) {
            return Err(slot.overlap(format_args!("{key} of {len} bytes")));
        }
    }
    Ok(())
}

pub(super) fn block_group(slot: &Slot<'_>) -> Result<()> {
    slot.expect_len(size_of::<BlockGroupItem>())?;
    let item = BlockGroupItem::peek(slot.data)?;
    if slot.key.offset == 0 {
        return Err(slot.bad_key("a length above 0"));
    }
    if item.chunk_objectid.get() != ObjectId::FIRST_CHUNK_TREE.0 {
        return Err(Corruption::new(Reason::BadValue)
            .have(format!("chunk object id {}", item.chunk_objectid))
            .expect(256));
    }
    if item.used.get() > slot.key.offset {
        return Err(Corruption::new(Reason::BadValue)
            .have(format!("{} bytes used", item.used))
            .expect(format!("at most {}", slot.key.offset)));
    }
    let flags = BlockGroupFlags(item.flags.get());
    if flags.profile_name().is_none() || !is_type(flags) {
        return Err(Corruption::new(Reason::BadValue)
            .have(format!("block group of type {:#x}", flags.0))
            .expect("one type and at most one profile"));
    }
    Ok(())
}
