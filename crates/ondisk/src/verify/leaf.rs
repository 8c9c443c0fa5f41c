//! The layout of a leaf, and which check an item of each type gets.

use std::fmt;

use zerocopy::FromBytes;

use super::{Geometry, devices, extents, files};
use crate::block::{FLAG_RELOC, HEADER_BYTES, Header, ITEM_BYTES, Item};
use crate::error::{Corruption, Reason, Result};
use crate::key::{Key, KeyType};
use crate::misc::{BalanceItem, DevReplaceItem, FreeSpaceHeader, OnDisk, RaidStride};
use crate::misc::{QgroupInfoItem, QgroupLimitItem, QgroupStatusItem, VerityDescriptorItem};
use crate::types::{ObjectId, RootId};

/// An item among its neighbours, to be judged.
pub(super) struct Slot<'a> {
    pub(super) key: Key,
    pub(super) data: &'a [u8],
    /// The item before it in the leaf.
    pub(super) previous: Option<(Key, &'a [u8])>,
    /// The tree that made the leaf.
    pub(super) owner: RootId,
    pub(super) geometry: &'a Geometry,
}

impl<'a> Slot<'a> {
    pub(super) fn sectorsize_bytes(&self) -> u32 {
        u32::try_from(self.geometry.sectorsize_bytes).unwrap_or(u32::MAX)
    }

    pub(super) fn is_aligned(&self, value: u64) -> bool {
        // Sector sizes are powers of two; the superblock's check sees to it.
        value & (self.geometry.sectorsize_bytes as u64).wrapping_sub(1) == 0
    }

    pub(super) fn expect_aligned(&self, what: &str, value: u64) -> Result<()> {
        if self.is_aligned(value) { Ok(()) } else { Err(self.unaligned(what, value)) }
    }

    #[cold]
    fn unaligned(&self, what: &str, value: u64) -> Box<Corruption> {
        Corruption::new(Reason::Unaligned)
            .have(format!("{what} {value} of {}", self.key))
            .expect(format!("a multiple of {}", self.geometry.sectorsize_bytes))
    }

    pub(super) fn expect_len(&self, len_bytes: usize) -> Result<()> {
        if self.data.len() == len_bytes {
            return Ok(());
        }
        Err(self.bad_len(format_args!("{len_bytes} bytes")))
    }

    /// At least `len_bytes`: for items that newer versions made longer.
    fn expect_len_min(&self, len_bytes: usize) -> Result<()> {
        if self.data.len() >= len_bytes {
            return Ok(());
        }
        Err(self.bad_len(format_args!("at least {len_bytes} bytes")))
    }

    /// One or more elements of `len_bytes`.
    fn expect_elements(&self, len_bytes: usize) -> Result<()> {
        if !self.data.is_empty() && self.data.len().is_multiple_of(len_bytes) {
            return Ok(());
        }
        Err(self.bad_len(format_args!("elements of {len_bytes} bytes")))
    }

    #[cold]
    pub(super) fn bad_len(&self, expect: impl fmt::Display) -> Box<Corruption> {
        Corruption::new(Reason::BadItemLen)
            .have(format!("{} bytes in {}", self.data.len(), self.key))
            .expect(expect)
    }

    #[cold]
    pub(super) fn bad_key(&self, expect: impl fmt::Display) -> Box<Corruption> {
        Corruption::new(Reason::BadKey).have(self.key).expect(expect)
    }

    #[cold]
    pub(super) fn bad_value(
        &self,
        have: impl fmt::Display,
        expect: impl fmt::Display,
    ) -> Box<Corruption> {
        Corruption::new(Reason::BadValue).have(format!("{have} in {}", self.key)).expect(expect)
    }

    #[cold]
    pub(super) fn overlap(&self, previous: impl fmt::Display) -> Box<Corruption> {
        Corruption::new(Reason::Overlap)
            .have(format!("{} after {previous}", self.key))
            .expect("ranges that do not overlap")
    }

    /// The item before this one, if it is of type `ty`.
    pub(super) fn previous_of_type(&self, ty: KeyType) -> Option<(Key, &'a [u8])> {
        self.previous.filter(|(key, _)| key.ty == ty)
    }
}

/// Checks the items of a block of level 0, whose header is right.
pub(super) fn check(bytes: &[u8], geometry: &Geometry) -> Result<()> {
    let header = Header::peek(bytes)?;
    let owner = RootId(header.owner.get());
    let count = header.nritems.get() as usize;
    let data = &bytes[HEADER_BYTES..];
    if count > data.len() / ITEM_BYTES {
        return Err(Corruption::new(Reason::BadItemCount)
            .have(count)
            .expect(format!("at most {}", data.len() / ITEM_BYTES)));
    }
    if count == 0 {
        return empty(header);
    }
    let headers_end = count * ITEM_BYTES;
    let items = <[Item]>::ref_from_bytes(&data[..headers_end]).expect("the length was computed");
    let mut data_end = data.len();
    let mut previous: Option<(Key, &[u8])> = None;
    for (slot, item) in items.iter().enumerate() {
        let key = item.key.key();
        if let Some((previous, _)) = previous
            && previous >= key
        {
            return Err(Corruption::new(Reason::KeyOrder)
                .at_slot(slot)
                .have(key)
                .expect(format!("above {previous}")));
        }
        let offset = item.offset.get() as usize;
        let len = item.len.get() as usize;
        if offset.checked_add(len) != Some(data_end) || offset < headers_end {
            return Err(Corruption::new(Reason::ItemDataLayout)
                .at_slot(slot)
                .have(format!("{len} bytes at {offset}"))
                .expect(format!("an end at {data_end}, a start at {headers_end} or above")));
        }
        let item = Slot { key, data: &data[offset..data_end], previous, owner, geometry };
        check_item(&item).map_err(|error| error.at_slot(slot))?;
        previous = Some((key, item.data));
        data_end = offset;
    }
    Ok(())
}

/// Trees that always hold something have no empty leaf. A relocation copy carries its
/// subvolume's number and may be empty.
fn empty(header: &Header) -> Result<()> {
    let never_empty = matches!(
        RootId(header.owner.get()),
        RootId(0)
            | RootId::ROOT_TREE
            | RootId::EXTENT_TREE
            | RootId::CHUNK_TREE
            | RootId::DEV_TREE
            | RootId::FS_TREE
            | RootId::DATA_RELOC_TREE
    );
    if never_empty && header.flags.get() & FLAG_RELOC == 0 {
        return Err(Corruption::new(Reason::BadItemCount)
            .have(format!("an empty leaf of tree {}", header.owner))
            .expect("at least 1 item"));
    }
    Ok(())
}

fn check_item(slot: &Slot<'_>) -> Result<()> {
    match slot.key.ty {
        KeyType::INODE_ITEM => files::inode_item(slot),
        KeyType::INODE_REF => files::inode_ref(slot),
        KeyType::INODE_EXTREF => files::inode_extref(slot),
        KeyType::DIR_ITEM | KeyType::DIR_INDEX | KeyType::XATTR_ITEM => files::dir_item(slot),
        KeyType::EXTENT_DATA => files::file_extent(slot),
        KeyType::DIR_LOG_INDEX => slot.expect_len(size_of::<u64>()),
        KeyType::VERITY_DESC_ITEM if slot.key.offset == 0 => {
            slot.expect_len(size_of::<VerityDescriptorItem>())
        }
        KeyType::EXTENT_CSUM => extents::csum(slot),
        KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => extents::extent_item(slot),
        KeyType::TREE_BLOCK_REF | KeyType::SHARED_BLOCK_REF => extents::keyed_block_ref(slot),
        KeyType::EXTENT_DATA_REF => extents::keyed_data_ref(slot),
        KeyType::SHARED_DATA_REF => extents::keyed_shared_data_ref(slot),
        KeyType::FREE_SPACE_INFO => extents::free_space_info(slot),
        KeyType::FREE_SPACE_EXTENT => extents::free_space_extent(slot),
        KeyType::FREE_SPACE_BITMAP => extents::free_space_bitmap(slot),
        KeyType::BLOCK_GROUP_ITEM => devices::block_group(slot),
        KeyType::CHUNK_ITEM => devices::chunk_item(slot),
        KeyType::DEV_ITEM => devices::dev_item(slot),
        KeyType::DEV_EXTENT => devices::dev_extent(slot),
        KeyType::RAID_STRIPE => {
            slot.expect_aligned("address", slot.key.objectid.0)?;
            slot.expect_elements(size_of::<RaidStride>())
        }
        KeyType::ROOT_ITEM => files::root_item(slot),
        KeyType::ROOT_REF | KeyType::ROOT_BACKREF => files::root_ref(slot),
        KeyType::UUID_KEY_SUBVOL | KeyType::UUID_KEY_RECEIVED_SUBVOL => {
            slot.expect_elements(size_of::<u64>())
        }
        KeyType::QGROUP_STATUS => slot.expect_len_min(size_of::<QgroupStatusItem>()),
        KeyType::QGROUP_INFO => slot.expect_len_min(size_of::<QgroupInfoItem>()),
        KeyType::QGROUP_LIMIT => slot.expect_len_min(size_of::<QgroupLimitItem>()),
        KeyType::TEMPORARY_ITEM if slot.key.objectid == ObjectId::BALANCE => {
            slot.expect_len_min(size_of::<BalanceItem>())
        }
        KeyType::DEV_REPLACE => slot.expect_len_min(size_of::<DevReplaceItem>()),
        KeyType::FREE_SPACE_HEADER if slot.key.objectid == ObjectId::FREE_SPACE => {
            slot.expect_len_min(size_of::<FreeSpaceHeader>())
        }
        // Orphans, quota relations and device statistics have no content that a reader depends
        // on; types that are not known are left to those who know them.
        _ => Ok(()),
    }
}
