//! The records of each item type.

use zerocopy::little_endian::U64;

use super::{Record, bit_names, bytes, chunk, damage, key as key_text, qgroup, time, tree};
use crate::block_group::{BlockGroupFlags, BlockGroupItem};
use crate::chunk::Chunk;
use crate::dir::{DirEntries, FileType};
use crate::error::{Corruption, Result};
use crate::extent::{BackRef, ExtentItem, InlineRefs, TreeBlockInfo, flags as extent_flags};
use crate::file_extent::{FileExtent, RegularExtent};
use crate::free_space::{FreeSpaceInfo, USING_BITMAPS};
use crate::inode::{InodeExtrefs, InodeItem, InodeRefs, flags as inode_flags};
use crate::key::{Key, KeyType};
use crate::misc::{
    BalanceItem, DevExtent, DevItem, DevReplaceItem, DevStatsItem, FreeSpaceHeader, OnDisk,
    QgroupInfoItem, QgroupLimitItem, QgroupStatusItem, RaidStride, VerityDescriptorItem,
};
use crate::root::{RootItem, RootRef, flags as root_flags};
use crate::types::{LogicalAddr, ObjectId, RootId, Uuid};

/// An item's content, a record for each thing it holds.
pub(super) fn records(key: Key, data: &[u8]) -> Vec<Record> {
    let mut out = Vec::new();
    if let Err(error) = fill(key, data, &mut out) {
        out.push(vec![("damage", damage(&error))]);
    }
    out
}

fn fill(key: Key, data: &[u8], out: &mut Vec<Record>) -> Result<()> {
    match key.ty {
        KeyType::INODE_ITEM => out.push(inode(InodeItem::peek(data)?)),
        KeyType::INODE_REF => {
            for name in InodeRefs::new(data) {
                let name = name?;
                out.push(vec![("index", name.index.to_string()), ("name", bytes(name.name))]);
            }
        }
        KeyType::INODE_EXTREF => {
            for name in InodeExtrefs::new(data) {
                let name = name?;
                out.push(vec![
                    ("parent", name.parent.to_string()),
                    ("index", name.index.to_string()),
                    ("name", bytes(name.name)),
                ]);
            }
        }
        KeyType::DIR_ITEM | KeyType::DIR_INDEX | KeyType::XATTR_ITEM => dir_entries(data, out)?,
        KeyType::EXTENT_DATA => out.push(file_extent(data)?),
        KeyType::ROOT_ITEM => out.push(root_item(data)?),
        KeyType::ROOT_REF | KeyType::ROOT_BACKREF => {
            let (root_ref, name) = RootRef::parse(data)?;
            out.push(vec![
                ("dir", root_ref.dirid.to_string()),
                ("index", root_ref.sequence.to_string()),
                ("name", bytes(name)),
            ]);
        }
        KeyType::DIR_LOG_ITEM | KeyType::DIR_LOG_INDEX => {
            out.push(vec![("end", word(data)?.to_string())]);
        }
        KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => extent_item(key, data, out)?,
        KeyType::TREE_BLOCK_REF
        | KeyType::SHARED_BLOCK_REF
        | KeyType::EXTENT_DATA_REF
        | KeyType::SHARED_DATA_REF
        | KeyType::EXTENT_OWNER_REF => out.push(back_ref(&BackRef::parse_keyed(key, data)?)),
        _ => return fill_others(key, data, out),
    }
    Ok(())
}

/// The items of trees without files.
fn fill_others(key: Key, data: &[u8], out: &mut Vec<Record>) -> Result<()> {
    match key.ty {
        KeyType::BLOCK_GROUP_ITEM => {
            let item = BlockGroupItem::peek(data)?;
            out.push(vec![
                ("used", item.used.to_string()),
                ("chunk_objectid", item.chunk_objectid.to_string()),
                ("flags", BlockGroupFlags(item.flags.get()).to_string()),
            ]);
        }
        KeyType::CHUNK_ITEM => {
            out.push(vec![("chunk", chunk(&Chunk::parse(LogicalAddr(key.offset), data)?))]);
        }
        KeyType::DEV_ITEM => out.push(dev_item(DevItem::peek(data)?)),
        KeyType::DEV_EXTENT => {
            let item = DevExtent::peek(data)?;
            out.push(vec![
                ("chunk_tree", item.chunk_tree.to_string()),
                ("chunk_objectid", item.chunk_objectid.to_string()),
                ("chunk_offset", item.chunk_offset.to_string()),
                ("length", item.length.to_string()),
                ("chunk_tree_uuid", Uuid(item.chunk_tree_uuid).to_string()),
            ]);
        }
        KeyType::FREE_SPACE_INFO => {
            let info = FreeSpaceInfo::peek(data)?;
            let flags =
                bit_names(info.flags.get().into(), &[(USING_BITMAPS.into(), "USING_BITMAPS")]);
            out.push(vec![("extent_count", info.extent_count.to_string()), ("flags", flags)]);
        }
        KeyType::FREE_SPACE_BITMAP => {
            let free: u32 = data.iter().map(|byte| byte.count_ones()).sum();
            out.push(vec![
                ("free_sectors", free.to_string()),
                ("sectors", (data.len() * 8).to_string()),
            ]);
        }
        KeyType::EXTENT_CSUM => out.push(vec![("csum_bytes", data.len().to_string())]),
        KeyType::UUID_KEY_SUBVOL | KeyType::UUID_KEY_RECEIVED_SUBVOL => {
            for bytes in data.chunks(size_of::<u64>()) {
                out.push(vec![("subvolume", word(bytes)?.to_string())]);
            }
        }
        KeyType::RAID_STRIPE => {
            for stride in data.chunks(size_of::<RaidStride>()) {
                let stride = RaidStride::peek(stride)?;
                out.push(vec![
                    ("devid", stride.devid.to_string()),
                    ("physical", stride.physical.to_string()),
                ]);
            }
        }
        _ => return fill_state(key, data, out),
    }
    Ok(())
}

/// Quotas, statistics and what is in progress.
fn fill_state(key: Key, data: &[u8], out: &mut Vec<Record>) -> Result<()> {
    match key.ty {
        KeyType::QGROUP_STATUS => {
            let item = QgroupStatusItem::peek(data)?;
            let names = [(1, "ON"), (2, "RESCAN"), (4, "INCONSISTENT"), (8, "SIMPLE_MODE")];
            out.push(vec![
                ("version", item.version.to_string()),
                ("generation", item.generation.to_string()),
                ("flags", bit_names(item.flags.get(), &names)),
                ("rescan", item.rescan.to_string()),
            ]);
        }
        KeyType::QGROUP_INFO => {
            let item = QgroupInfoItem::peek(data)?;
            out.push(vec![
                ("generation", item.generation.to_string()),
                ("referenced", item.rfer.to_string()),
                ("referenced_compressed", item.rfer_cmpr.to_string()),
                ("exclusive", item.excl.to_string()),
                ("exclusive_compressed", item.excl_cmpr.to_string()),
            ]);
        }
        KeyType::QGROUP_LIMIT => {
            let item = QgroupLimitItem::peek(data)?;
            out.push(vec![
                ("flags", format!("{:#x}", item.flags)),
                ("max_referenced", item.max_rfer.to_string()),
                ("max_exclusive", item.max_excl.to_string()),
                ("reserved_referenced", item.rsv_rfer.to_string()),
                ("reserved_exclusive", item.rsv_excl.to_string()),
            ]);
        }
        KeyType::QGROUP_RELATION => out.push(vec![("with", qgroup(key.offset))]),
        KeyType::PERSISTENT_ITEM if key.objectid == ObjectId::DEV_STATS => {
            let [write, read, flush, corruption, generation] = DevStatsItem::peek(data)?.values;
            out.push(vec![
                ("write_errors", write.to_string()),
                ("read_errors", read.to_string()),
                ("flush_errors", flush.to_string()),
                ("corruption_errors", corruption.to_string()),
                ("generation_errors", generation.to_string()),
            ]);
        }
        KeyType::TEMPORARY_ITEM if key.objectid == ObjectId::BALANCE => {
            let item = BalanceItem::peek(data)?;
            out.push(vec![("flags", format!("{:#x}", item.flags))]);
            for (name, args) in
                [("data", &item.data), ("metadata", &item.meta), ("system", &item.sys)]
            {
                out.push(vec![
                    ("filters_of", name.to_owned()),
                    ("flags", format!("{:#x}", args.flags)),
                    ("profiles", format!("{:#x}", args.profiles)),
                    ("target", format!("{:#x}", args.target)),
                    ("usage", args.usage.to_string()),
                ]);
            }
        }
        KeyType::DEV_REPLACE => {
            let item = DevReplaceItem::peek(data)?;
            out.push(vec![
                ("src_devid", item.src_devid.to_string()),
                ("cursor_left", item.cursor_left.to_string()),
                ("cursor_right", item.cursor_right.to_string()),
                ("state", item.replace_state.to_string()),
                ("time_started", item.time_started.to_string()),
                ("time_stopped", item.time_stopped.to_string()),
                ("write_errors", item.num_write_errors.to_string()),
                ("read_errors", item.num_uncorrectable_read_errors.to_string()),
            ]);
        }
        KeyType::VERITY_DESC_ITEM if key.offset == 0 => {
            let item = VerityDescriptorItem::peek(data)?;
            out.push(vec![
                ("descriptor_bytes", item.size.to_string()),
                ("encryption", item.encryption.to_string()),
            ]);
        }
        KeyType::FREE_SPACE_HEADER if key.objectid == ObjectId::FREE_SPACE => {
            let item = FreeSpaceHeader::peek(data)?;
            out.push(vec![
                ("location", key_text(item.location.key())),
                ("generation", item.generation.to_string()),
                ("entries", item.num_entries.to_string()),
                ("bitmaps", item.num_bitmaps.to_string()),
            ]);
        }
        KeyType::STRING_ITEM => out.push(vec![("string", bytes(data))]),
        KeyType::ORPHAN_ITEM | KeyType::FREE_SPACE_EXTENT if data.is_empty() => {}
        _ => out.push(vec![("bytes", data.len().to_string())]),
    }
    Ok(())
}

fn word(data: &[u8]) -> Result<u64, Box<Corruption>> {
    Ok(U64::peek(data)?.get())
}

fn inode(item: &InodeItem) -> Record {
    let rdev = item.rdev.get();
    vec![
        ("generation", item.generation.to_string()),
        ("transid", item.transid.to_string()),
        ("size", item.size.to_string()),
        ("nbytes", item.nbytes.to_string()),
        ("mode", format!("{:#o}", item.mode)),
        ("nlink", item.nlink.to_string()),
        ("uid", item.uid.to_string()),
        ("gid", item.gid.to_string()),
        ("rdev", format!("{}:{}", rdev >> 20, rdev & 0xf_ffff)),
        ("flags", inode_flag_names(item.flags.get())),
        ("sequence", item.sequence.to_string()),
        ("atime", time(&item.atime)),
        ("ctime", time(&item.ctime)),
        ("mtime", time(&item.mtime)),
        ("otime", time(&item.otime)),
    ]
}

fn inode_flag_names(raw: u64) -> String {
    use inode_flags::{
        APPEND, COMPRESS, DIRSYNC, IMMUTABLE, NOATIME, NOCOMPRESS, NODATACOW, NODATASUM, NODUMP,
        PREALLOC, READONLY, RO_VERITY, ROOT_ITEM_INIT, SYNC,
    };
    bit_names(
        raw,
        &[
            (NODATASUM, "NODATASUM"),
            (NODATACOW, "NODATACOW"),
            (READONLY, "READONLY"),
            (NOCOMPRESS, "NOCOMPRESS"),
            (PREALLOC, "PREALLOC"),
            (SYNC, "SYNC"),
            (IMMUTABLE, "IMMUTABLE"),
            (APPEND, "APPEND"),
            (NODUMP, "NODUMP"),
            (NOATIME, "NOATIME"),
            (DIRSYNC, "DIRSYNC"),
            (COMPRESS, "COMPRESS"),
            (ROOT_ITEM_INIT, "ROOT_ITEM_INIT"),
            (RO_VERITY, "RO_VERITY"),
        ],
    )
}

fn dir_entries(data: &[u8], out: &mut Vec<Record>) -> Result<()> {
    for entry in DirEntries::new(data) {
        let entry = entry?;
        let file_type = entry.file_type();
        let mut record = vec![
            ("location", key_text(entry.item.location.key())),
            ("type", format!("{file_type:?}").to_lowercase()),
            ("transid", entry.item.transid.to_string()),
            ("name", bytes(entry.name)),
        ];
        if file_type == FileType::Xattr {
            record.push(("value", bytes(entry.data)));
        }
        out.push(record);
    }
    Ok(())
}

fn file_extent(data: &[u8]) -> Result<Record> {
    let regular = |kind: &str, extent: &RegularExtent| {
        vec![
            ("type", kind.to_owned()),
            ("generation", extent.generation.to_string()),
            ("compression", format!("{:?}", extent.compression).to_lowercase()),
            ("disk_bytenr", extent.disk_bytenr.to_string()),
            ("disk_num_bytes", extent.disk_num_bytes.to_string()),
            ("offset", extent.offset.to_string()),
            ("num_bytes", extent.num_bytes.to_string()),
            ("ram_bytes", extent.ram_bytes.to_string()),
        ]
    };
    Ok(match FileExtent::parse(data)? {
        FileExtent::Inline { generation, ram_bytes, compression, data } => vec![
            ("type", "inline".to_owned()),
            ("generation", generation.to_string()),
            ("compression", format!("{compression:?}").to_lowercase()),
            ("data_bytes", data.len().to_string()),
            ("ram_bytes", ram_bytes.to_string()),
        ],
        FileExtent::Regular(extent) if extent.is_hole() => regular("hole", &extent),
        FileExtent::Regular(extent) => regular("regular", &extent),
        FileExtent::Prealloc(extent) => regular("prealloc", &extent),
    })
}

fn root_item(data: &[u8]) -> Result<Record> {
    let item = RootItem::parse(data)?;
    let flags =
        bit_names(item.flags.get(), &[(root_flags::RDONLY, "RDONLY"), (root_flags::DEAD, "DEAD")]);
    let mut record = vec![
        ("bytenr", item.bytenr.to_string()),
        ("level", item.level.to_string()),
        ("generation", item.generation.to_string()),
        ("root_dirid", item.root_dirid.to_string()),
        ("refs", item.refs.to_string()),
        ("flags", flags),
        ("bytes_used", item.bytes_used.to_string()),
        ("last_snapshot", item.last_snapshot.to_string()),
    ];
    if item.drop_level != 0 || item.drop_progress.key() != Key::MIN {
        record.push(("drop_progress", key_text(item.drop_progress.key())));
        record.push(("drop_level", item.drop_level.to_string()));
    }
    // Trees without files and old filesystems have no more to say.
    if item.uuid != [0; 16] {
        record.extend([
            ("uuid", Uuid(item.uuid).to_string()),
            ("parent_uuid", Uuid(item.parent_uuid).to_string()),
            ("received_uuid", Uuid(item.received_uuid).to_string()),
            ("ctransid", item.ctransid.to_string()),
            ("otransid", item.otransid.to_string()),
            ("stransid", item.stransid.to_string()),
            ("rtransid", item.rtransid.to_string()),
            ("ctime", time(&item.ctime)),
            ("otime", time(&item.otime)),
            ("stime", time(&item.stime)),
            ("rtime", time(&item.rtime)),
        ]);
    }
    Ok(record)
}

fn extent_item(key: Key, data: &[u8], out: &mut Vec<Record>) -> Result<()> {
    let (item, rest) = ExtentItem::split(data)?;
    let flags = item.flags.get();
    let names = [
        (extent_flags::DATA, "DATA"),
        (extent_flags::TREE_BLOCK, "TREE_BLOCK"),
        (extent_flags::FULL_BACKREF, "FULL_BACKREF"),
    ];
    let mut record = vec![
        ("refs", item.refs.to_string()),
        ("generation", item.generation.to_string()),
        ("flags", bit_names(flags, &names)),
    ];
    if key.ty == KeyType::METADATA_ITEM {
        record.push(("level", key.offset.to_string()));
    } else if flags & extent_flags::TREE_BLOCK != 0
        && let Ok(info) = TreeBlockInfo::peek(rest)
    {
        record.push(("first_key", key_text(info.key.key())));
        record.push(("level", info.level.to_string()));
    }
    out.push(record);
    for found in InlineRefs::of_item(key.ty, data)? {
        out.push(back_ref(&found?));
    }
    Ok(())
}

fn back_ref(found: &BackRef) -> Record {
    let by_root = |root: RootId| ("root", tree(root));
    let ty = ("ref", found.key_type().to_string());
    match *found {
        BackRef::TreeBlock { root } | BackRef::Owner { root } => vec![ty, by_root(root)],
        BackRef::SharedBlock { parent } => vec![ty, ("parent", parent.to_string())],
        BackRef::SharedData { parent, count } => {
            vec![ty, ("parent", parent.to_string()), ("count", count.to_string())]
        }
        BackRef::ExtentData { root, inode, offset, count } => vec![
            ty,
            by_root(root),
            ("inode", inode.to_string()),
            // Below zero where the extent begins before the file does.
            ("offset", offset.cast_signed().to_string()),
            ("count", count.to_string()),
        ],
    }
}

fn dev_item(item: &DevItem) -> Record {
    vec![
        ("devid", item.devid.to_string()),
        ("total_bytes", item.total_bytes.to_string()),
        ("bytes_used", item.bytes_used.to_string()),
        ("io_align", item.io_align.to_string()),
        ("io_width", item.io_width.to_string()),
        ("sector_size", item.sector_size.to_string()),
        ("generation", item.generation.to_string()),
        ("start_offset", item.start_offset.to_string()),
        ("uuid", Uuid(item.uuid).to_string()),
        ("fsid", Uuid(item.fsid).to_string()),
    ]
}
