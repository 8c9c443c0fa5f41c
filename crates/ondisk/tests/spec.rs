//! docs/SPEC.md and the structs say the same: each field's offset and size.

use std::mem::offset_of;

use ubtrfs_ondisk::block::Header;
use ubtrfs_ondisk::chunk::ChunkHeader;
use ubtrfs_ondisk::dir::DirItem;
use ubtrfs_ondisk::file_extent::{FileExtentHeader, FileExtentItem};
use ubtrfs_ondisk::inode::InodeItem;
use ubtrfs_ondisk::misc::DevItem;
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::superblock::Superblock;

/// The offsets of a struct's fields, by name. Its last field is given for its end.
macro_rules! offsets {
    ($name:ident: $($field:ident),*) => {
        [$((stringify!($field), offset_of!($name, $field))),*]
    };
}

/// The rows of the table that follows `heading`: offset, bytes, fields.
fn rows(spec: &str, heading: &str) -> Vec<(usize, String, String)> {
    let at = spec.find(heading).unwrap_or_else(|| panic!("SPEC.md speaks of {heading}"));
    let lines = spec[at..].lines().skip_while(|line| !line.starts_with("| at |")).skip(2);
    lines
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let offset = match cells[1].strip_prefix("0x") {
                Some(hex) => usize::from_str_radix(hex, 16),
                None => cells[1].parse(),
            };
            (offset.unwrap(), cells[2].to_owned(), cells[3].to_owned())
        })
        .collect()
}

#[track_caller]
fn agree(heading: &str, len_bytes: usize, fields: &[(&str, usize)]) {
    let spec = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/SPEC.md"));
    let rows = rows(&spec.unwrap(), heading);
    for (field, offset) in fields {
        // A row may name several fields, the first of which lies where the row says.
        let row = rows.iter().find(|(_, _, names)| names.split(", ").next() == Some(*field));
        let (at, ..) = row.unwrap_or_else(|| panic!("{heading}: no row for {field}"));
        assert_eq!(at, offset, "{heading}: {field}");
    }
    // Each row ends where the next begins.
    let ends = rows.iter().skip(1).map(|(at, ..)| *at).chain([len_bytes]);
    for ((at, bytes, names), end) in rows.iter().zip(ends) {
        let bytes: usize = bytes.split(" × ").map(|part| part.parse::<usize>().unwrap()).product();
        assert_eq!(at + bytes, end, "{heading}: {names}");
    }
}

#[test]
fn layouts_in_the_specification_are_those_of_the_structs() {
    agree(
        "btrfs_super_block`",
        4096,
        &offsets!(Superblock: csum, fsid, bytenr, flags, magic, generation, root, chunk_root,
            log_root, total_bytes, bytes_used, root_dir_objectid, num_devices, sectorsize,
            nodesize, leafsize, stripesize, sys_chunk_array_size, chunk_root_generation,
            compat_flags, compat_ro_flags, incompat_flags, csum_type, root_level,
            chunk_root_level, log_root_level, dev_item, label, cache_generation,
            uuid_tree_generation, metadata_uuid, nr_global_roots, reserved, sys_chunk_array,
            super_roots, padding),
    );
    agree(
        "btrfs_header`",
        101,
        &offsets!(Header: csum, fsid, bytenr, flags, chunk_tree_uuid, generation, owner, nritems,
            level),
    );
    agree(
        "btrfs_root_item`",
        439,
        &offsets!(RootItem: inode, generation, root_dirid, bytenr, byte_limit, bytes_used,
            last_snapshot, flags, refs, drop_progress, drop_level, level, generation_v2, uuid,
            parent_uuid, received_uuid, ctransid, ctime, reserved),
    );
    agree(
        "btrfs_inode_item`",
        160,
        &offsets!(InodeItem: generation, transid, size, nbytes, block_group, nlink, uid, gid, mode,
            rdev, flags, sequence, reserved, atime),
    );
    agree("btrfs_dir_item`", 30, &offsets!(DirItem: location, transid, data_len, name_len));
    let header = offsets!(FileExtentHeader: generation, ram_bytes, compression, encryption);
    let item = offsets!(FileExtentItem: disk_bytenr, disk_num_bytes, offset, num_bytes);
    let extent = [&header[..], &item[..]].concat();
    agree("btrfs_file_extent_item`", 53, &extent);
    agree(
        "btrfs_dev_item`",
        98,
        &offsets!(DevItem: devid, total_bytes, bytes_used, io_align, generation, start_offset,
            dev_group, uuid, fsid),
    );
    let chunk =
        offsets!(ChunkHeader: length, owner, stripe_len, io_align, num_stripes, sub_stripes);
    // One stripe stands for all in the table.
    agree("btrfs_chunk`", 80, &chunk);
}
