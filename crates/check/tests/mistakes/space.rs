//! 11 to 16: sums, free space, chunks, checksums.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::FallocateFlags;
use ubtrfs_check::{Finding, Maybe};
use ubtrfs_ondisk::block_group::{BlockGroupFlags, BlockGroupItem};
use ubtrfs_ondisk::chunk::Stripe;
use ubtrfs_ondisk::features::CompatRo;
use ubtrfs_ondisk::file_extent::FileExtentHeader;
use ubtrfs_ondisk::free_space::{FreeSpaceInfo, USING_BITMAPS};
use ubtrfs_ondisk::misc::{DevExtent, DevItem};
use ubtrfs_ondisk::{
    DeviceId, InodeNo, Key, KeyType, LogicalAddr, ObjectId, PhysicalAddr, Reason, RootId, Uuid,
};
use ubtrfs_testkit::corpus::kernel_image;
use ubtrfs_testkit::{CheckMode, KernelMount, MkfsBtrfs, Oracle, Prng, oracle};
use ubtrfs_volume::Device;

use crate::common;
use crate::common::image::{Image, Place};

const FREE_SPACE: RootId = RootId::FREE_SPACE_TREE;
const CSUMS: RootId = RootId::CSUM_TREE;

fn data_group(image: &Image) -> Place {
    image.find(RootId::EXTENT_TREE, |key, data| {
        key.ty == KeyType::BLOCK_GROUP_ITEM && data[16..24] == BlockGroupFlags::DATA.0.to_le_bytes()
    })
}

#[test]
fn mistake_11_used_bytes_of_a_block_group_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = data_group(&image);
    let mut right = 0;
    image.edit::<BlockGroupItem>(&place, |item| {
        right = item.used.get();
        item.used += 4096;
    });
    let group = LogicalAddr(place.key.objectid.0);
    assert_eq!(
        image.expect(&["group-used"]),
        [Finding::GroupUsed { group, have: right + 4096, expect: right }]
    );
}

#[test]
fn mistake_12_used_bytes_of_superblock_and_device_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let right = image.superblock().bytes_used.get();
    image.edit_super(|superblock| {
        superblock.bytes_used += 4096;
        for backup in &mut superblock.super_roots {
            if backup.tree_root_gen == superblock.generation {
                backup.bytes_used += 4096;
            }
        }
    });
    assert_eq!(
        image.expect(&["superblock-bytes-used"]),
        [Finding::SuperblockBytesUsed { have: right + 4096, expect: right }]
    );

    let image = Image::single();
    let place = image.find(RootId::CHUNK_TREE, |key, _| key.ty == KeyType::DEV_ITEM);
    let mut right = 0;
    image.edit::<DevItem>(&place, |item| {
        right = item.bytes_used.get();
        item.bytes_used -= 4096;
    });
    image.edit_super(|superblock| superblock.dev_item.bytes_used -= 4096);
    let (device, field) = (DeviceId(1), "bytes_used");
    assert_eq!(
        image.expect(&["device-field"]),
        [Finding::DeviceField { device, field, have: right - 4096, expect: right }]
    );
}

/// Linux looks for a device by its uuid.
#[test]
fn device_item_of_another_device_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for field in ["uuid", "fsid"] {
        let image = Image::single();
        let place = image.find(RootId::CHUNK_TREE, |key, _| key.ty == KeyType::DEV_ITEM);
        let mut both = [Uuid::NIL; 2];
        image.edit::<DevItem>(&place, |item| {
            let bytes = if field == "uuid" { &mut item.uuid } else { &mut item.fsid };
            both[0] = Uuid(*bytes);
            bytes[3] ^= 1;
            both[1] = Uuid(*bytes);
        });
        let [expect, have] = both;
        let device = DeviceId(1);
        assert_eq!(
            image.expect(&["device-identity"]),
            [Finding::DeviceIdentity { device, field, have, expect }]
        );
        image.expect_theirs();
    }
}

fn free_space_info(image: &Image) -> Place {
    let group = data_group(image).key.objectid;
    image.find(FREE_SPACE, |key, _| key.objectid == group && key.ty == KeyType::FREE_SPACE_INFO)
}

#[test]
fn mistake_13_count_of_free_extents_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = free_space_info(&image);
    let mut right = 0;
    image.edit::<FreeSpaceInfo>(&place, |info| {
        right = u64::from(info.extent_count.get());
        info.extent_count += 1;
    });
    let group = LogicalAddr(place.key.objectid.0);
    assert_eq!(
        image.expect(&["free-space-count"]),
        [Finding::FreeSpaceCount { group, have: right + 1, expect: right }]
    );
}

#[test]
fn mistake_13_free_extents_that_touch_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let info = free_space_info(&image);
    let group = info.key.objectid.0;
    let last = image.items(FREE_SPACE).into_iter().rfind(|item| {
        item.key.ty == KeyType::FREE_SPACE_EXTENT
            && (group..group + info.key.offset).contains(&item.key.objectid.0)
    });
    let last = last.unwrap();
    let (start, len) = (last.key.objectid.0, last.key.offset);
    let key = |start, len| Key::new(ObjectId(start), KeyType::FREE_SPACE_EXTENT, len);
    image.edit_leaf(last.block, |leaf| {
        leaf.set_key(last.slot, key(start, 8192));
        leaf.insert(last.slot + 1, key(start + 8192, len - 8192), 0);
    });
    image.edit::<FreeSpaceInfo>(&info, |info| info.extent_count += 1);
    let at = LogicalAddr(start + 8192);
    assert_eq!(
        image.expect(&["free-space-unmerged"]),
        [Finding::FreeSpaceUnmerged { group: LogicalAddr(group), at }]
    );
}

/// The ranges were compared as sets, in which a range inside another does not show.
#[test]
fn mistake_13_free_extents_that_overlap_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let info = free_space_info(&image);
    let group = info.key.objectid.0;
    let last = image.items(FREE_SPACE).into_iter().rfind(|item| {
        item.key.ty == KeyType::FREE_SPACE_EXTENT
            && (group..group + info.key.offset).contains(&item.key.objectid.0)
    });
    let Key { objectid, ty, offset } = last.unwrap().key;
    let key = Key::new(ObjectId(objectid.0 + 4096), ty, offset - 4096);
    image.insert(FREE_SPACE, key, &[]);
    image.edit::<FreeSpaceInfo>(&info, |info| info.extent_count += 1);
    let previous_end = LogicalAddr(objectid.0 + offset);
    assert_eq!(
        image.expect(&["free-space-overlap"]),
        [Finding::FreeSpaceOverlap { group: LogicalAddr(group), key, previous_end }]
    );
    image.expect_theirs();
}

#[test]
fn mistake_13_wrong_form_flag_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = free_space_info(&image);
    image.edit::<FreeSpaceInfo>(&place, |info| info.flags ^= USING_BITMAPS);
    let found = image.expect(&["free-space-form"]);
    let group = LogicalAddr(place.key.objectid.0);
    assert!(matches!(&found[0], Finding::FreeSpaceForm { group: at, key }
        if *at == group && key.ty == KeyType::FREE_SPACE_EXTENT));
}

#[test]
fn mistake_13_used_space_called_free_and_free_space_called_used_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for grow in [true, false] {
        let image = Image::single();
        let info = free_space_info(&image);
        let group = info.key.objectid.0;
        let place = image.items(FREE_SPACE).into_iter().rfind(|item| {
            item.key.ty == KeyType::FREE_SPACE_EXTENT
                && item.key.objectid.0 > group
                && item.key.objectid.0 < group + info.key.offset
        });
        let place = place.unwrap();
        let mut key = place.key;
        if grow {
            key.objectid.0 -= 4096;
            key.offset += 4096;
        } else {
            key.objectid.0 += 4096;
            key.offset -= 4096;
        }
        image.edit_leaf(place.block, |leaf| leaf.set_key(place.slot, key));
        let at = LogicalAddr(place.key.objectid.0.min(key.objectid.0));
        let (have, expect) = if grow { ("free", "used") } else { ("used", "free") };
        assert_eq!(
            image.expect(&["free-space-differs"]),
            [Finding::FreeSpaceDiffers {
                group: LogicalAddr(group),
                at,
                len_bytes: 4096,
                have,
                expect
            }]
        );
    }
}

/// The same space as bitmaps is as right, and a bit that is wrong is found.
#[test]
fn mistake_13_wrong_bit_of_a_bitmap_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let info = free_space_info(&image);
    let (start, len) = (info.key.objectid.0, info.key.offset);
    let range = start..start + len;
    let items = image.items(FREE_SPACE);
    let extents: Vec<&Place> = items
        .iter()
        .filter(|it| it.key.ty == KeyType::FREE_SPACE_EXTENT && range.contains(&it.key.objectid.0))
        .collect();
    let mut bits = vec![0_u8; usize::try_from(len / 4096 / 8).unwrap()];
    for extent in &extents {
        let first = (extent.key.objectid.0 - start) / 4096;
        for sector in first..first + extent.key.offset / 4096 {
            bits[usize::try_from(sector / 8).unwrap()] |= 1 << (sector % 8);
        }
    }
    let (first, last) = (extents[0].slot, extents[extents.len() - 1].slot);
    image.edit_leaf(info.block, |leaf| {
        leaf.remove(first..last + 1);
        for (index, bits) in bits.chunks(256).enumerate() {
            let at = start + index as u64 * (8 << 20);
            let bitmap_len = bits.len() as u64 * 8 * 4096;
            let key = Key::new(ObjectId(at), KeyType::FREE_SPACE_BITMAP, bitmap_len);
            leaf.insert(first + index, key, bits.len()).copy_from_slice(bits);
        }
    });
    image.edit::<FreeSpaceInfo>(&info, |info| info.flags |= USING_BITMAPS);
    image.expect(&[]);
    // The last sector of the group, in the last bitmap.
    let last = image.items(FREE_SPACE).into_iter().rfind(|item| {
        item.key.ty == KeyType::FREE_SPACE_BITMAP && range.contains(&item.key.objectid.0)
    });
    let last = last.unwrap();
    let end = last.data.len() - 1;
    image.edit_leaf(last.block, |leaf| leaf.data_mut(last.slot)[end] ^= 0x80);
    let group = LogicalAddr(start);
    assert_eq!(
        image.expect(&["free-space-differs"]),
        [Finding::FreeSpaceDiffers {
            group,
            at: LogicalAddr(start + len - 4096),
            len_bytes: 4096,
            have: "used",
            expect: "free",
        }]
    );
}

/// Old versions of mkfs.btrfs leave such items, so that they are no error.
#[test]
fn mistake_14_free_space_that_outlived_its_group_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let notes = |image: &Image| {
        let report = image.check();
        let notes = report.notes().filter(|note| note.kind() == "free-space-without-group");
        notes.cloned().collect::<Vec<Finding>>()
    };
    let image = Image::single();
    // What mkfs.btrfs left, if it is old.
    let before = notes(&image);
    let last = image.items(FREE_SPACE).pop().unwrap();
    let start = ObjectId(last.key.objectid.0 + (64 << 30));
    let key = Key::new(start, KeyType::FREE_SPACE_INFO, 8 << 20);
    let info = [1_u32.to_le_bytes(), 0_u32.to_le_bytes()].concat();
    image.insert(FREE_SPACE, key, &info);
    image.insert(FREE_SPACE, Key::new(start, KeyType::FREE_SPACE_EXTENT, 8 << 20), &[]);
    image.expect(&[]);
    let mut after = notes(&image);
    assert_eq!(after.len(), before.len() + 1);
    after.retain(|note| !before.contains(note));
    assert_eq!(after, [Finding::FreeSpaceWithoutGroup { key }]);

    // A group of which nothing is said is an error.
    let image = Image::single();
    let place = free_space_info(&image);
    image.remove(&place);
    let group = LogicalAddr(place.key.objectid.0);
    assert_eq!(image.expect(&["free-space-missing"]), [Finding::FreeSpaceMissing { group }]);
}

#[test]
fn mistake_15_device_extents_that_are_not_their_chunks_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = image.find(RootId::DEV_TREE, |key, _| key.ty == KeyType::DEV_EXTENT);
    let (device, offset) = (DeviceId(1), PhysicalAddr(place.key.offset));
    let mut chunk = 0;
    image.edit::<DevExtent>(&place, |extent| {
        chunk = extent.chunk_offset.get();
        extent.chunk_offset += 4096;
    });
    let wrong = LogicalAddr(chunk + 4096);
    let chunk = LogicalAddr(chunk);
    assert_eq!(
        image.expect(&["dev-extent-missing", "dev-extent-without-chunk"]),
        [
            Finding::DevExtentMissing { chunk, device, offset },
            Finding::DevExtentWithoutChunk { device, offset, chunk: wrong },
        ]
    );

    // A length counts in the device's sum too.
    let image = Image::single();
    let mut right = 0;
    image.edit::<DevExtent>(&place, |extent| {
        right = extent.length.get();
        extent.length -= 4096;
    });
    let found = image.expect(&["dev-extent-wrong", "device-field"]);
    assert_eq!(
        found[0],
        Finding::DevExtentWrong {
            device,
            offset,
            what: "length",
            have: right - 4096,
            expect: right
        }
    );
}

#[test]
fn mistake_15_block_group_that_is_not_its_chunk_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = data_group(&image);
    image.edit::<BlockGroupItem>(&place, |item| item.flags |= BlockGroupFlags::DUP.0);
    let found = image.expect(&["group-disagrees"]);
    let at = LogicalAddr(place.key.objectid.0);
    assert!(
        matches!(&found[0], Finding::GroupDisagrees { group, what: "type", .. } if *group == at)
    );

    let image = Image::single();
    let place = data_group(&image);
    image.remove(&place);
    let chunk = LogicalAddr(place.key.objectid.0);
    let range = chunk.0..chunk.0 + place.key.offset;
    let items = image.items(RootId::EXTENT_TREE);
    let is_inside =
        |item: &&Place| item.key.ty == KeyType::EXTENT_ITEM && range.contains(&item.key.objectid.0);
    let outside = vec!["extent-outside-group"; items.iter().filter(is_inside).count()];
    let kinds = [&["group-missing"], &outside[..]].concat();
    assert_eq!(image.expect(&kinds)[0], Finding::GroupMissing { chunk });

    // One too many.
    let image = Image::single();
    let last = image.items(RootId::EXTENT_TREE).pop().unwrap();
    let group = LogicalAddr(last.key.objectid.0 + (1 << 30));
    let key = Key::new(ObjectId(group.0), KeyType::BLOCK_GROUP_ITEM, 8 << 20);
    let item = BlockGroupItem {
        chunk_objectid: 256.into(),
        flags: BlockGroupFlags::DATA.0.into(),
        ..BlockGroupItem::default()
    };
    image.insert(RootId::EXTENT_TREE, key, zerocopy::IntoBytes::as_bytes(&item));
    assert_eq!(
        image.expect(&["group-without-chunk", "free-space-missing"]),
        [Finding::GroupWithoutChunk { group }, Finding::FreeSpaceMissing { group }]
    );
}

#[test]
fn chunk_that_leaves_its_device_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let group = data_group(&image).key.objectid.0;
    let place = image
        .find(RootId::CHUNK_TREE, |key, _| (key.ty, key.offset) == (KeyType::CHUNK_ITEM, group));
    let end = image.device.len_bytes();
    image.edit_behind::<Stripe>(&place, 48, |stripe| stripe.offset = (end - 4096).into());
    let report = image.check();
    let kinds: Vec<&str> = report.errors().map(Finding::kind).collect();
    assert_eq!(kinds[..3], ["bad-chunk", "dev-extent-missing", "dev-extent-without-chunk"]);
    // Where its data is nobody knows.
    assert!(kinds[3..].iter().all(|kind| *kind == "data-unreadable"), "{kinds:?}");
    assert!(kinds.len() > 3);
}

#[test]
fn free_space_that_does_not_fit_its_group_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = free_space_info(&image);
    let key = Key { offset: place.key.offset - 4096, ..place.key };
    image.edit_leaf(place.block, |leaf| leaf.set_key(place.slot, key));
    let group = LogicalAddr(key.objectid.0);
    assert_eq!(image.expect(&["free-space-key"]), [Finding::FreeSpaceKey { key, group }]);
}

#[test]
fn free_space_that_linux_makes_anew_is_noted() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    image.edit_super(|superblock| {
        superblock.compat_ro_flags &= !CompatRo::FREE_SPACE_TREE_VALID.0;
    });
    image.expect_notes(&["free-space-tree-invalid"]);
    let image = Image::single();
    image.edit_super(|superblock| superblock.cache_generation = 1.into());
    image.expect_notes(&["space-cache-stale"]);
}

#[test]
fn what_is_not_judged_is_noted() {
    for (name, kind) in [("cache-v1", "space-cache-v1"), ("quota", "quotas-not-judged")] {
        let Some(image) = kernel_image(name) else { return };
        let report = common::check_all(&common::open(&image.devices));
        assert!(report.notes().any(|note| note.kind() == kind), "{}", common::lines(&report));
    }
}

#[test]
fn mistake_15_stale_array_of_system_chunks_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let mut chunks = image.superblock().sys_chunks().unwrap();
    let chunk = chunks[0].start;
    // Another chunk's end is in it; reads of the chunk tree still go right.
    chunks[0].len_bytes /= 2;
    image.edit_super(|superblock| superblock.set_sys_chunks(&chunks).unwrap());
    let found = image.expect(&["sys-chunk-array"]);
    assert!(matches!(&found[0], Finding::SysChunkArray { chunk: at, .. } if *at == chunk));
}

fn csum_item(image: &Image, of: &str) -> (u64, u64, Place) {
    let inode = image.inode(RootId::FS_TREE, of);
    let extent = image.item(RootId::FS_TREE, inode, KeyType::EXTENT_DATA, 0);
    let bytenr = u64::from_le_bytes(extent.data[21..29].try_into().unwrap());
    let items = image.items(CSUMS);
    let csum = items.into_iter().rfind(|item| item.key.offset <= bytenr).unwrap();
    (inode, bytenr, csum)
}

#[test]
fn mistake_16_missing_checksums_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    // The checksums of the last file of an item.
    let item = image.items(CSUMS).pop().unwrap();
    let end = item.key.offset + item.data.len() as u64 / 4 * 4096;
    image.edit_leaf(item.block, |leaf| {
        leaf.resize(item.slot, item.data.len() - 4);
    });
    let found = image.expect(&["csum-missing"]);
    assert!(matches!(&found[0], Finding::CsumMissing { at, .. } if at.0 == end - 4096));
}

#[test]
fn mistake_16_checksums_of_free_and_preallocated_space_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let group = data_group(&image);
    let last = image.items(FREE_SPACE).into_iter().rfind(|item| {
        item.key.ty == KeyType::FREE_SPACE_EXTENT
            && item.key.objectid >= group.key.objectid
            && item.key.objectid.0 < group.key.objectid.0 + group.key.offset
    });
    let at = last.unwrap().key.objectid.0 + 65_536;
    let key = |at| Key::new(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, at);
    // That of a sector of zeros, so that the data are right.
    let zeros = 0x98f9_4189_u32.to_le_bytes();
    image.insert(CSUMS, key(at), &zeros);
    let at = LogicalAddr(at);
    assert_eq!(
        image.expect(&["csum-without-extent"]),
        [Finding::CsumWithoutExtent { at, len_bytes: 4096 }]
    );

    let image = Image::single();
    let inode = image.inode(RootId::FS_TREE, "prealloc");
    let extent = image.item(RootId::FS_TREE, inode, KeyType::EXTENT_DATA, 0);
    let at = u64::from_le_bytes(extent.data[21..29].try_into().unwrap()) + 8192;
    image.insert(CSUMS, key(at), &zeros);
    assert_eq!(
        image.expect(&["csum-unwanted"]),
        [Finding::CsumUnwanted {
            root: RootId::FS_TREE,
            block: extent.block,
            inode: InodeNo(inode),
            offset: 0,
            what: "preallocated space",
            at: LogicalAddr(at),
        }]
    );
}

#[test]
fn mistake_16_overlapping_checksums_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let (_, bytenr, item) = csum_item(&image, "more");
    // An item of one sector more, inside the one that is there; the data are right.
    let index = usize::try_from((bytenr - item.key.offset) / 4096).unwrap() * 4 + 4;
    let key = Key::new(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, bytenr + 4096);
    let place = image.insert(CSUMS, key, &item.data[index..index + 4]);
    let found = image.expect(&["bad-block"]);
    assert!(matches!(
        &found[0],
        Finding::BadBlock { root: CSUMS, slot: Maybe(Some(slot)), reason: Reason::Overlap, .. }
            if *slot == place.slot as u64
    ));
}

#[test]
fn data_that_is_not_its_checksum_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let (_, bytenr, _) = csum_item(&image, "more");
    let physical = image.physical(LogicalAddr(bytenr + 8192));
    image.device.write_at(physical, b"other").unwrap();
    image.device.write_at(PhysicalAddr(physical.0 + 4096), b"bytes").unwrap();
    assert_eq!(
        image.expect(&["data-csum"]),
        [Finding::DataCsum {
            at: LogicalAddr(bytenr + 8192),
            len_bytes: 8192,
            mirror: 0,
            device: Maybe(Some(DeviceId(1))),
            physical: Maybe(Some(physical)),
        }]
    );
}

/// A log that was replayed after a cut leaves a preallocated extent that a clone says was written: where the
/// checksums go on behind its end, as the next extent has some, those were taken for its own.
#[test]
fn preallocated_extent_that_a_clone_wrote_beside_other_data_is_no_damage() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    MkfsBtrfs::new().options("-m single -d single").size_bytes(160 << 20).make(&path);
    let mounted = KernelMount::read_write(&path, "noatime");
    let top = mounted.path();
    let mut prng = Prng::new(11);
    let foo = File::create(top.join("foo")).unwrap();
    rustix::fs::fallocate(&foo, FallocateFlags::empty(), 0, 256 << 10).unwrap();
    foo.sync_all().unwrap();
    let behind = File::create(top.join("behind")).unwrap();
    // Linux keeps extents of different lengths in groups of their own.
    behind.write_all_at(&prng.bytes(256 << 10), 0).unwrap();
    behind.sync_all().unwrap();
    foo.write_all_at(&prng.bytes(256 << 10), 0).unwrap();
    foo.sync_all().unwrap();
    let bar = File::create(top.join("bar")).unwrap();
    rustix::fs::ioctl_ficlone(&bar, File::open(top.join("foo")).unwrap()).unwrap();
    drop((foo, behind, bar));
    mounted.unmount();
    let image = Image::of_file(&path);
    let (inode, bytenr, _) = csum_item(&image, "foo");
    let end = bytenr + (256 << 10);
    let is_behind = |item: &Place| {
        let start = item.key.offset;
        (start..start + item.data.len() as u64 / 4 * 4096).contains(&end)
    };
    assert!(image.items(CSUMS).iter().any(is_behind), "the other extent is right behind");
    // What the replay makes of it.
    let extent = image.item(RootId::FS_TREE, inode, KeyType::EXTENT_DATA, 0);
    image.edit::<FileExtentHeader>(&extent, |header| header.ty = 2);
    image.expect(&[]);
    assert!(image.theirs(CheckMode::Original).is_clean);
}
