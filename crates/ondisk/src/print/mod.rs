//! The format as text for people, and as (name, value) pairs for programs.
//!
//! Printing never fails: bytes that do not parse are said to be damaged where they stand. The
//! text is stable: names are those of the fields, one record a line.

mod items;

use std::fmt::{self, Write};

use crate::block::{Block, FLAG_RELOC, FLAG_WRITTEN, Header, MIXED_BACKREF_REV};
use crate::chunk::Chunk;
use crate::features::{CompatRo, Incompat};
use crate::key::{Key, KeyType};
use crate::misc::{DevItem, Timespec};
use crate::superblock::{RootBackup, Superblock, flags};
use crate::types::{ObjectId, RootId, Uuid};

/// Fields by name, in the order in which they lie on disk. A name may occur several times.
pub type Record = Vec<(&'static str, String)>;

/// The fields of a superblock.
pub fn superblock(superblock: &Superblock) -> Record {
    let csum = superblock.csum_type();
    let csum_len = csum.as_ref().map_or(superblock.csum.len(), |csum| csum.len_bytes());
    let csum_name = csum.map_or_else(
        |error| damage(&error),
        |csum| format!("{} ({})", csum.to_disk(), csum.name()),
    );
    let mut record = vec![
        ("csum_type", csum_name),
        ("csum", crate::superblock::hex(&superblock.csum[..csum_len])),
        ("bytenr", superblock.bytenr.to_string()),
        ("flags", superblock_flags(superblock.flags.get())),
        ("magic", bytes(&superblock.magic.get().to_le_bytes())),
        ("fsid", Uuid(superblock.fsid).to_string()),
        ("metadata_uuid", Uuid(superblock.metadata_uuid).to_string()),
        ("label", bytes(superblock.label())),
        ("generation", superblock.generation.to_string()),
        ("root", superblock.root.to_string()),
        ("root_level", superblock.root_level.to_string()),
        ("chunk_root", superblock.chunk_root.to_string()),
        ("chunk_root_level", superblock.chunk_root_level.to_string()),
        ("chunk_root_generation", superblock.chunk_root_generation.to_string()),
        ("log_root", superblock.log_root.to_string()),
        ("log_root_transid", superblock.log_root_transid.to_string()),
        ("log_root_level", superblock.log_root_level.to_string()),
        ("total_bytes", superblock.total_bytes.to_string()),
        ("bytes_used", superblock.bytes_used.to_string()),
        ("root_dir", superblock.root_dir_objectid.to_string()),
        ("num_devices", superblock.num_devices.to_string()),
        ("sectorsize", superblock.sectorsize.to_string()),
        ("nodesize", superblock.nodesize.to_string()),
        ("leafsize", superblock.leafsize.to_string()),
        ("stripesize", superblock.stripesize.to_string()),
        ("compat_flags", format!("{:#x}", superblock.compat_flags)),
        ("compat_ro_flags", feature_bits(superblock.compat_ro_flags.get(), &compat_ro(superblock))),
        ("incompat_flags", feature_bits(superblock.incompat_flags.get(), &incompat(superblock))),
        ("cache_generation", superblock.cache_generation.to_string()),
        ("uuid_tree_generation", superblock.uuid_tree_generation.to_string()),
        ("nr_global_roots", superblock.nr_global_roots.to_string()),
        ("sys_chunk_array_size", superblock.sys_chunk_array_size.to_string()),
    ];
    for (name, value) in dev_item(&superblock.dev_item) {
        record.push((name, value));
    }
    match superblock.sys_chunks() {
        Ok(chunks) => record.extend(chunks.iter().map(|found| ("sys_chunk", chunk(found)))),
        Err(error) => record.push(("sys_chunk", damage(&error))),
    }
    let backups = superblock.super_roots.iter().filter(|backup| backup.tree_root.get() != 0);
    record.extend(backups.map(|backup| ("backup_root", backup_roots(backup))));
    record
}

fn incompat(superblock: &Superblock) -> Incompat {
    Incompat(superblock.incompat_flags.get())
}

fn compat_ro(superblock: &Superblock) -> CompatRo {
    CompatRo(superblock.compat_ro_flags.get())
}

fn feature_bits(raw: u64, names: &dyn fmt::Display) -> String {
    if raw == 0 { "0x0".to_owned() } else { format!("{raw:#x} ({names})") }
}

fn superblock_flags(raw: u64) -> String {
    bit_names(
        raw,
        &[
            (flags::WRITTEN, "WRITTEN"),
            (flags::ERROR, "ERROR"),
            (flags::SEEDING, "SEEDING"),
            (flags::METADUMP, "METADUMP"),
            (flags::METADUMP_V2, "METADUMP_V2"),
            (flags::CHANGING_FSID, "CHANGING_FSID"),
            (flags::CHANGING_FSID_V2, "CHANGING_FSID_V2"),
        ],
    )
}

fn dev_item(item: &DevItem) -> Record {
    vec![
        ("dev_item.devid", item.devid.to_string()),
        ("dev_item.uuid", Uuid(item.uuid).to_string()),
        ("dev_item.fsid", Uuid(item.fsid).to_string()),
        ("dev_item.total_bytes", item.total_bytes.to_string()),
        ("dev_item.bytes_used", item.bytes_used.to_string()),
        ("dev_item.generation", item.generation.to_string()),
        ("dev_item.sector_size", item.sector_size.to_string()),
    ]
}

fn backup_roots(backup: &RootBackup) -> String {
    let trees = [
        ("root", backup.tree_root, backup.tree_root_gen, backup.tree_root_level),
        ("chunk", backup.chunk_root, backup.chunk_root_gen, backup.chunk_root_level),
        ("extent", backup.extent_root, backup.extent_root_gen, backup.extent_root_level),
        ("fs", backup.fs_root, backup.fs_root_gen, backup.fs_root_level),
        ("dev", backup.dev_root, backup.dev_root_gen, backup.dev_root_level),
        ("csum", backup.csum_root, backup.csum_root_gen, backup.csum_root_level),
    ];
    let mut text = String::new();
    for (name, bytenr, generation, level) in trees {
        let _ = write!(text, "{name} {bytenr} generation {generation} level {level}, ");
    }
    let _ = write!(
        text,
        "total_bytes {}, bytes_used {}, num_devices {}",
        backup.total_bytes, backup.bytes_used, backup.num_devices
    );
    text
}

/// A chunk in one line.
pub fn chunk(chunk: &Chunk) -> String {
    let mut text = format!(
        "start {} length {} type {} stripe_len {} sub_stripes {} stripes",
        chunk.start, chunk.len_bytes, chunk.flags, chunk.stripe_len_bytes, chunk.sub_stripes
    );
    for stripe in &chunk.stripes {
        let _ = write!(text, " {}:{}", stripe.device, stripe.offset);
    }
    text
}

/// The fields of a block's header.
pub fn header(header: &Header) -> Record {
    vec![
        ("bytenr", header.bytenr.to_string()),
        ("level", header.level.to_string()),
        ("items", header.nritems.to_string()),
        ("generation", header.generation.to_string()),
        ("owner", tree(RootId(header.owner.get()))),
        (
            "flags",
            bit_names(
                header.flags.get(),
                &[
                    (FLAG_WRITTEN, "WRITTEN"),
                    (FLAG_RELOC, "RELOC"),
                    (MIXED_BACKREF_REV, "MIXED_BACKREF_REV"),
                ],
            ),
        ),
        ("fsid", Uuid(header.fsid).to_string()),
        ("chunk_tree_uuid", Uuid(header.chunk_tree_uuid).to_string()),
    ]
}

/// A block with all its items or children.
pub fn block(block: &Block) -> String {
    let kind = if block.level() == 0 { "leaf" } else { "node" };
    let mut text = format!("{kind} {}\n", line(&header(block.header())));
    match block {
        Block::Leaf(leaf) => {
            for (slot, header) in leaf.items().iter().enumerate() {
                let key = leaf.key(slot);
                let _ =
                    writeln!(text, "  item {slot} key {} length {}", self::key(key), header.len);
                for record in records(key, leaf.data(slot)) {
                    let _ = writeln!(text, "    {}", line(&record));
                }
            }
        }
        Block::Node(node) => {
            for slot in 0..node.len() {
                let _ = writeln!(
                    text,
                    "  key {} block {} generation {}",
                    key(node.key(slot)),
                    node.child(slot),
                    node.child_generation(slot)
                );
            }
        }
    }
    text
}

/// An item's content: a line for each record, which are several where an item holds several
/// names, references or stripes.
pub fn item(key: Key, data: &[u8]) -> String {
    let lines: Vec<String> = records(key, data).iter().map(|record| line(record)).collect();
    lines.join("\n")
}

/// An item's content as pairs. What does not parse ends in a record with a field `damage`.
pub fn records(key: Key, data: &[u8]) -> Vec<Record> {
    items::records(key, data)
}

/// A record in one line.
pub fn line(record: &[(&'static str, String)]) -> String {
    let mut text = String::new();
    for (name, value) in record {
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(name);
        if !value.is_empty() {
            text.push(' ');
            text.push_str(value);
        }
    }
    text
}

/// A key, with names for the trees and objects that have one.
pub fn key(key: Key) -> String {
    let offset = match key.ty {
        KeyType::ROOT_ITEM if key.objectid.0 == RootId::TREE_RELOC.0 => tree(RootId(key.offset)),
        KeyType::ROOT_REF | KeyType::ROOT_BACKREF => tree(RootId(key.offset)),
        KeyType::QGROUP_INFO | KeyType::QGROUP_LIMIT | KeyType::QGROUP_RELATION => {
            qgroup(key.offset)
        }
        KeyType::UUID_KEY_SUBVOL | KeyType::UUID_KEY_RECEIVED_SUBVOL => {
            format!("{:#018x}", key.offset)
        }
        KeyType::ROOT_ITEM if key.offset == u64::MAX => "-1".to_owned(),
        _ => key.offset.to_string(),
    };
    let objectid = match key.ty {
        KeyType::ROOT_ITEM | KeyType::ROOT_REF | KeyType::ROOT_BACKREF => {
            tree(RootId(key.objectid.0))
        }
        KeyType::QGROUP_RELATION => qgroup(key.objectid.0),
        KeyType::UUID_KEY_SUBVOL | KeyType::UUID_KEY_RECEIVED_SUBVOL => {
            format!("{:#018x}", key.objectid.0)
        }
        KeyType::FREE_SPACE_HEADER if key.objectid == ObjectId::FREE_SPACE => {
            return format!("(FREE_SPACE UNTYPED {offset})");
        }
        _ => object(key.objectid),
    };
    format!("({objectid} {} {offset})", key.ty)
}

/// A tree by name, or by number where it is a subvolume.
pub fn tree(root: RootId) -> String {
    let name = match root {
        RootId::ROOT_TREE => "ROOT_TREE",
        RootId::EXTENT_TREE => "EXTENT_TREE",
        RootId::CHUNK_TREE => "CHUNK_TREE",
        RootId::DEV_TREE => "DEV_TREE",
        RootId::FS_TREE => "FS_TREE",
        RootId::CSUM_TREE => "CSUM_TREE",
        RootId::QUOTA_TREE => "QUOTA_TREE",
        RootId::UUID_TREE => "UUID_TREE",
        RootId::FREE_SPACE_TREE => "FREE_SPACE_TREE",
        RootId::BLOCK_GROUP_TREE => "BLOCK_GROUP_TREE",
        RootId::RAID_STRIPE_TREE => "RAID_STRIPE_TREE",
        RootId::TREE_LOG => "TREE_LOG",
        RootId::TREE_RELOC => "TREE_RELOC",
        RootId::DATA_RELOC_TREE => "DATA_RELOC_TREE",
        RootId(number) if number == ObjectId::ROOT_TREE_DIR.0 => "ROOT_TREE_DIR",
        other => return object(other.object_id()),
    };
    name.to_owned()
}

/// The negative numbers have one meaning in all trees.
fn object(id: ObjectId) -> String {
    let name = match id {
        ObjectId::BALANCE => "BALANCE",
        ObjectId::ORPHAN => "ORPHAN",
        ObjectId::EXTENT_CSUM => "EXTENT_CSUM",
        ObjectId::FREE_SPACE => "FREE_SPACE",
        ObjectId::FREE_INO => "FREE_INO",
        ObjectId(id) if id == RootId::TREE_LOG.0 => "TREE_LOG",
        ObjectId(id) if id == RootId::TREE_RELOC.0 => "TREE_RELOC",
        ObjectId(id) if id == RootId::DATA_RELOC_TREE.0 => "DATA_RELOC_TREE",
        other => return other.to_string(),
    };
    name.to_owned()
}

/// A quota group as `level/number`.
fn qgroup(id: u64) -> String {
    format!("{}/{}", id >> 48, id & 0xffff_ffff_ffff)
}

fn damage(error: &crate::Corruption) -> String {
    format!("damaged: {error}")
}

/// Bytes that are mostly text: valid UTF-8 as it is, control characters and the rest escaped.
pub fn bytes(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            if character.is_control() || character == '\\' {
                let _ = write!(text, "{}", character.escape_default());
            } else {
                text.push(character);
            }
        }
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

/// The set bits by name, what has no name as a number.
fn bit_names(raw: u64, names: &[(u64, &str)]) -> String {
    let mut text = format!("{raw:#x}");
    let mut rest = raw;
    let mut separator = " (";
    for (bit, name) in names {
        if rest & bit == *bit {
            rest &= !bit;
            let _ = write!(text, "{separator}{name}");
            separator = "|";
        }
    }
    if separator == "|" {
        if rest != 0 {
            let _ = write!(text, "|{rest:#x}");
        }
        text.push(')');
    }
    text
}

/// A time as seconds since 1970 and as a date in UTC.
fn time(time: &Timespec) -> String {
    let (sec, nsec) = (time.sec.get(), time.nsec.get());
    let (days, second) = (sec.div_euclid(86_400), sec.rem_euclid(86_400));
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let Some((year, month, day)) = civil_date(days) else { return format!("{sec}.{nsec:09}") };
    format!("{sec}.{nsec:09} ({year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02})")
}

/// Year, month and day of a count of days since 1970, in the proleptic Gregorian calendar; `None`
/// beyond a million years. The year is counted from March, so that a leap day is its last.
fn civil_date(days: i64) -> Option<(i64, i64, i64)> {
    const DAYS_OF_400_YEARS: i64 = 146_097;
    if days.abs() > DAYS_OF_400_YEARS * 2500 {
        return None;
    }
    let days = days + 719_468;
    let era = days.div_euclid(DAYS_OF_400_YEARS);
    let day_of_era = days.rem_euclid(DAYS_OF_400_YEARS);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    Some((year, month, day))
}

#[cfg(test)]
mod tests;
