//! Items of subvolumes and of the root tree.

use super::Slot;
use crate::block::LEVEL_COUNT_MAX;
use crate::dir::{DirEntries, DirEntry, FileType, NAME_LEN_MAX};
use crate::error::{Corruption, Reason, Result};
use crate::file_extent::{Compression, FileExtentHeader, FileExtentItem};
use crate::hash::name_hash;
use crate::inode::{InodeExtref, InodeExtrefs, InodeItem, InodeRef, InodeRefs, flags};
use crate::key::{Key, KeyType};
use crate::misc::OnDisk;
use crate::root::{ROOT_ITEM_V1_BYTES, RootItem, RootRef, flags as root_flags};
use crate::types::{ObjectId, RootId};

/// A file's item must follow one of the same inode, unless it begins the leaf: the inode item has
/// the least key. Log trees keep no such rule.
fn follows_its_inode(slot: &Slot<'_>) -> Result<()> {
    match slot.previous {
        Some((previous, _))
            if previous.objectid != slot.key.objectid && slot.owner.is_subvolume() =>
        {
            Err(Corruption::new(Reason::NoInode)
                .have(format!("{} after {previous}", slot.key))
                .expect("an item of the same inode before it"))
        }
        _ => Ok(()),
    }
}

/// Whether `key` can be that of an inode item.
fn is_inode_key(key: Key) -> bool {
    let number = key.objectid;
    key.offset == 0
        && ((ObjectId::FIRST_FREE..=ObjectId::LAST_FREE).contains(&number)
            || number == ObjectId::ROOT_TREE_DIR
            || number == ObjectId::FREE_INO)
}

pub(super) fn inode_item(slot: &Slot<'_>) -> Result<()> {
    if !is_inode_key(slot.key) {
        return Err(slot.bad_key("offset 0, an object id from 256 on, 6 or -12"));
    }
    slot.expect_len(size_of::<InodeItem>())?;
    let item = InodeItem::peek(slot.data)?;
    let mode = item.mode.get();
    if mode & !0o177_777 != 0 || FileType::from_mode(mode) == FileType::Unknown {
        return Err(slot.bad_value(format_args!("mode {mode:#o}"), "a file type and permissions"));
    }
    if FileType::from_mode(mode) == FileType::Directory && item.nlink.get() > 1 {
        return Err(slot.bad_value(format_args!("{} links", item.nlink), "1 for a directory"));
    }
    let unknown = item.flags.get() & u64::from(u32::MAX) & !flags::KNOWN;
    if unknown != 0 {
        return Err(slot.bad_value(format_args!("flags {unknown:#x}"), "none of those"));
    }
    Ok(())
}

pub(super) fn inode_ref(slot: &Slot<'_>) -> Result<()> {
    follows_its_inode(slot)?;
    if slot.data.len() <= size_of::<InodeRef>() {
        return Err(slot.bad_len("a name"));
    }
    for name in InodeRefs::new(slot.data) {
        check_name_len(slot, name?.name.len())?;
    }
    Ok(())
}

pub(super) fn inode_extref(slot: &Slot<'_>) -> Result<()> {
    follows_its_inode(slot)?;
    if slot.data.len() <= size_of::<InodeExtref>() {
        return Err(slot.bad_len("a name"));
    }
    for name in InodeExtrefs::new(slot.data) {
        check_name_len(slot, name?.name.len())?;
    }
    Ok(())
}

fn check_name_len(slot: &Slot<'_>, len_bytes: usize) -> Result<()> {
    if (1..=NAME_LEN_MAX).contains(&len_bytes) {
        return Ok(());
    }
    Err(slot.bad_value(format_args!("name of {len_bytes} bytes"), "1 to 255"))
}

/// A directory entry or xattr. The index's key has no hash.
pub(super) fn dir_item(slot: &Slot<'_>) -> Result<()> {
    follows_its_inode(slot)?;
    for entry in DirEntries::new(slot.data) {
        let entry = entry?;
        location(slot, &entry)?;
        if entry.item.ty & 0x7f > FileType::Xattr.to_disk() {
            return Err(slot.bad_value(format_args!("file type {}", entry.item.ty), "0 to 8"));
        }
        let is_xattr = entry.file_type() == FileType::Xattr;
        if is_xattr != (slot.key.ty == KeyType::XATTR_ITEM) {
            return Err(slot.bad_value(
                format_args!("file type {}", entry.item.ty),
                "8 for an xattr, else another",
            ));
        }
        if entry.name.len() > NAME_LEN_MAX {
            return Err(slot.bad_value(format_args!("name of {} bytes", entry.name.len()), "255"));
        }
        if !is_xattr && !entry.data.is_empty() {
            return Err(slot.bad_value(format_args!("{} bytes of data", entry.data.len()), "none"));
        }
        if slot.key.ty != KeyType::DIR_INDEX && name_hash(entry.name) != slot.key.offset {
            return Err(Corruption::new(Reason::WrongNameHash)
                .have(slot.key)
                .expect(format!("offset {}", name_hash(entry.name))));
        }
    }
    Ok(())
}

/// What an entry names: an inode, a subvolume, or nothing for an xattr.
fn location(slot: &Slot<'_>, entry: &DirEntry<'_>) -> Result<()> {
    let key = entry.item.location.key();
    let fits = match key.ty {
        KeyType::ROOT_ITEM => RootId(key.objectid.0).is_subvolume(),
        KeyType::INODE_ITEM | KeyType(0) if slot.key.ty == KeyType::XATTR_ITEM => key == Key::MIN,
        KeyType::INODE_ITEM | KeyType(0) => is_inode_key(key),
        _ => false,
    };
    if fits {
        return Ok(());
    }
    Err(slot.bad_value(format_args!("location {key}"), "an inode, a subvolume, or 0 in an xattr"))
}

pub(super) fn file_extent(slot: &Slot<'_>) -> Result<()> {
    slot.expect_aligned("file offset", slot.key.offset)?;
    follows_its_inode(slot)?;
    let (header, inline) = FileExtentHeader::split(slot.data)?;
    if header.ty > 2
        || header.encryption != 0
        || Compression::from_disk(header.compression).is_err()
    {
        return Err(slot.bad_value(
            format_args!(
                "file extent of type {}, compression {}, encryption {}",
                header.ty, header.compression, header.encryption
            ),
            "type 0 to 2, compression 0 to 3, encryption 0",
        ));
    }
    if header.ty == 0 {
        if slot.key.offset != 0 {
            return Err(slot.bad_key("offset 0 of an inline extent"));
        }
        if header.compression == 0 && header.ram_bytes.get() != inline.len() as u64 {
            return Err(slot.bad_value(
                format_args!("{} inline bytes", inline.len()),
                format_args!("ram_bytes, {}", header.ram_bytes),
            ));
        }
        return Ok(());
    }
    slot.expect_len(size_of::<FileExtentItem>())?;
    let item = FileExtentItem::peek(slot.data)?;
    let fields = [
        ("ram_bytes", header.ram_bytes),
        ("disk_bytenr", item.disk_bytenr),
        ("disk_num_bytes", item.disk_num_bytes),
        ("offset", item.offset),
        ("num_bytes", item.num_bytes),
    ];
    for (name, value) in fields {
        slot.expect_aligned(name, value.get())?;
    }
    if slot.key.offset.checked_add(item.num_bytes.get()).is_none() {
        return Err(slot.bad_value(format_args!("num_bytes {}", item.num_bytes), "an end in u64"));
    }
    overlaps_previous_extent(slot)
}

fn overlaps_previous_extent(slot: &Slot<'_>) -> Result<()> {
    let Some((key, data)) = slot.previous_of_type(KeyType::EXTENT_DATA) else { return Ok(()) };
    if key.objectid != slot.key.objectid {
        return Ok(());
    }
    let header = FileExtentHeader::peek(data)?;
    let end = if header.ty == 0 {
        let end = key.offset.checked_add(header.ram_bytes.get());
        end.and_then(|end| end.checked_next_multiple_of(slot.geometry.sectorsize_bytes as u64))
    } else {
        key.offset.checked_add(FileExtentItem::peek(data)?.num_bytes.get())
    };
    if end.is_none_or(|end| end > slot.key.offset) {
        return Err(slot.overlap(format_args!("{key}, which ends at {}", end.unwrap_or(u64::MAX))));
    }
    Ok(())
}

pub(super) fn root_item(slot: &Slot<'_>) -> Result<()> {
    let root = RootId(slot.key.objectid.0);
    // Linux refuses the copy of a data relocation tree today, but made them once.
    if root.0 == 0 || (root == RootId::TREE_RELOC && !RootId(slot.key.offset).holds_files()) {
        return Err(slot.bad_key("a tree, or the copy of one that holds files"));
    }
    if slot.data.len() != ROOT_ITEM_V1_BYTES {
        slot.expect_len(size_of::<RootItem>())?;
    }
    let item = RootItem::parse(slot.data)?;
    slot.expect_aligned("root block", item.bytenr.get())?;
    if usize::from(item.level.max(item.drop_level)) >= LEVEL_COUNT_MAX {
        return Err(Corruption::new(Reason::WrongLevel)
            .have(format!("level {}, drop level {}", item.level, item.drop_level))
            .expect("0 to 7"));
    }
    if item.drop_progress.objectid.get() != 0 && item.drop_level == 0 {
        return Err(slot.bad_value("drop progress of level 0", "a level above"));
    }
    let known = root_flags::RDONLY | root_flags::DEAD;
    if item.flags.get() & !known != 0 {
        return Err(slot.bad_value(
            format_args!("flags {:#x}", item.flags),
            format_args!("none but {known:#x}"),
        ));
    }
    Ok(())
}

pub(super) fn root_ref(slot: &Slot<'_>) -> Result<()> {
    let (_, name) = RootRef::parse(slot.data)?;
    check_name_len(slot, name.len())?;
    slot.expect_len(size_of::<RootRef>() + name.len())
}
