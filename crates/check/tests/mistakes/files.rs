//! 17, 18, 19, 21, 22 and 24: inodes and file extents.

use ubtrfs_check::{Finding, Maybe};
use ubtrfs_ondisk::file_extent::{FileExtentHeader, FileExtentItem};
use ubtrfs_ondisk::inode::{InodeItem, flags};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Generation, InodeNo, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId};
use ubtrfs_testkit::{CheckMode, KernelMount, Oracle, oracle};

use crate::common::image::{Base, Image, Place};

const FS_TREE: RootId = RootId::FS_TREE;

fn inode(image: &Image, name: &str) -> Place {
    image.item(FS_TREE, image.inode(FS_TREE, name), KeyType::INODE_ITEM, 0)
}

fn extent(image: &Image, name: &str, offset: u64) -> Place {
    image.item(FS_TREE, image.inode(FS_TREE, name), KeyType::EXTENT_DATA, offset)
}

fn number(place: &Place) -> InodeNo {
    InodeNo(place.key.objectid.0)
}

fn assert_refused(found: &Finding, place: &Place, expect: Reason) {
    assert!(
        matches!(
            found,
            Finding::BadBlock { root, block, slot: Maybe(Some(slot)), reason, .. }
                if *root == place.root
                    && *block == place.block
                    && *slot == place.slot as u64
                    && *reason == expect
        ),
        "{found:?}"
    );
}

#[test]
fn mistake_17_overlapping_file_extents_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    // The second part of the clone begins a sector too early, and its reference with it.
    let number = image.inode(FS_TREE, "clone");
    let items = image.items(FS_TREE);
    let parts: Vec<&Place> = items
        .iter()
        .filter(|item| item.key.objectid.0 == number && item.key.ty == KeyType::EXTENT_DATA)
        .collect();
    let place = parts[1];
    let mut key = place.key;
    key.offset -= 4096;
    image.edit::<FileExtentItem>(place, |item| item.offset -= 4096);
    image.edit_leaf(place.block, |leaf| leaf.set_key(place.slot, key));
    let found = image.expect(&["bad-block"]);
    assert_refused(&found[0], place, Reason::Overlap);
}

#[test]
fn mistake_17_unaligned_file_extent_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = extent(&image, "holey", 4096 * 16);
    image.edit::<FileExtentItem>(&place, |item| item.header.ram_bytes += 100);
    let found = image.expect(&["bad-block"]);
    assert_refused(&found[0], &place, Reason::Unaligned);
}

#[test]
fn mistake_17_inline_extent_that_is_not_as_long_as_it_says_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = extent(&image, "small", 0);
    image.edit::<FileExtentHeader>(&place, |header| header.ram_bytes += 1);
    // The sum of the inode's bytes depends on it.
    let found = image.expect(&["bad-block", "inode-nbytes"]);
    assert_refused(&found[0], &place, Reason::BadValue);
}

#[test]
fn mistake_17_inline_extent_behind_the_start_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = extent(&image, "small", 0);
    let key = Key { offset: 4096, ..place.key };
    image.edit_leaf(place.block, |leaf| leaf.set_key(place.slot, key));
    let found = image.expect(&["bad-block"]);
    assert_refused(&found[0], &place, Reason::BadKey);
}

/// Asserts that one field of a file extent is wrong, and that `btrfs check` finds it too.
fn assert_field(image: &Image, place: &Place, kinds: &[&str], expect: (&str, u64)) {
    let found = image.expect(kinds);
    let is_it = found.iter().any(|finding| {
        matches!(
            finding,
            Finding::FileExtentField { root: FS_TREE, block, inode, offset, what, have, .. }
                if *block == place.block
                    && *inode == number(place)
                    && *offset == place.key.offset
                    && (*what, *have) == expect
        )
    });
    assert!(is_it, "{found:?}");
    image.expect_theirs();
}

/// The data of an inode, in an item that had other data.
fn make_inline(image: &Image, place: &Place, len: usize, compression: u8) {
    let ram_bytes = if compression == 0 { len } else { 8192 } as u64;
    image.edit_leaf(place.block, |leaf| {
        let data = leaf.resize(place.slot, 21 + len);
        data[21..].fill(b'x');
        let header = FileExtentHeader::peek_mut(data).unwrap();
        header.ram_bytes = ram_bytes.into();
        header.compression = compression;
    });
    let inode = image.item(FS_TREE, place.key.objectid.0, KeyType::INODE_ITEM, 0);
    image.edit::<InodeItem>(&inode, |item| {
        item.nbytes = ram_bytes.into();
        item.size = ram_bytes.into();
    });
}

#[test]
fn inline_extent_of_no_bytes_or_longer_than_a_sector_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = extent(&image, "small", 0);
    make_inline(&image, &place, 0, 0);
    assert_field(&image, &place, &["file-extent-field"], ("the inline bytes", 0));

    let image = Image::single();
    let roomy = |item: &Place| {
        let leaves = image.leaves(FS_TREE);
        let leaf = leaves.iter().find(|(leaf, _)| leaf.header().bytenr.get() == item.block.0);
        leaf.is_some_and(|(leaf, _)| leaf.free_bytes() > 4096)
    };
    let items = image.items(FS_TREE);
    let is_inline = |it: &&Place| it.key.ty == KeyType::EXTENT_DATA && it.data[20] == 0;
    let place = items.iter().filter(is_inline).find(|item| roomy(item)).unwrap();
    make_inline(&image, place, 4095, 0);
    image.expect(&[]);
    assert!(image.theirs(CheckMode::Original).is_clean);
    make_inline(&image, place, 4096, 0);
    assert_field(&image, place, &["file-extent-field"], ("the inline bytes", 4096));

    let image = Image::single();
    make_inline(&image, place, 100, 1);
    assert_field(&image, place, &["file-extent-field"], ("the inline bytes", 8192));
}

#[test]
fn preallocated_space_that_is_compressed_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = extent(&image, "prealloc", 0);
    image.edit::<FileExtentHeader>(&place, |header| header.compression = 1);
    let what = "the compression of preallocated space";
    assert_field(&image, &place, &["file-extent-field"], (what, 1));
}

#[test]
fn hole_of_no_bytes_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::of(Base::Holes);
    let place = extent(&image, "holey", 4096);
    image.edit::<FileExtentItem>(&place, |item| item.num_bytes = 0.into());
    // What it covered has no item now.
    assert_field(&image, &place, &["file-extent-field", "file-hole"], ("num_bytes", 0));
}

#[test]
fn file_extent_that_ends_behind_its_extent_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = extent(&image, "prealloc", 0);
    image.edit::<FileExtentItem>(&place, |item| item.offset += 4096);
    // The offset in the extent is part of its reference.
    let found = image.expect(&["file-extent-field", "wrong-reference"]);
    assert!(matches!(
        &found[0],
        Finding::FileExtentField { root: FS_TREE, block, inode, offset: 0, have: 266_240, .. }
            if *block == place.block && *inode == number(&place)
    ));
}

#[test]
fn mistake_18_bytes_of_an_inode_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for name in ["data", "prealloc", "holey", "small"] {
        let image = Image::single();
        let place = inode(&image, name);
        let mut right = 0;
        image.edit::<InodeItem>(&place, |item| {
            right = item.nbytes.get();
            item.nbytes += 4096;
        });
        assert_eq!(
            image.expect(&["inode-nbytes"]),
            [Finding::InodeBytes {
                root: FS_TREE,
                block: place.block,
                inode: number(&place),
                have: right + 4096,
                expect: right,
            }]
        );
    }
}

#[test]
fn mistake_19_size_of_a_directory_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = inode(&image, "directory");
    let mut right = 0;
    image.edit::<InodeItem>(&place, |item| {
        right = item.size.get();
        item.size += 2;
    });
    assert_eq!(
        image.expect(&["directory-size"]),
        [Finding::DirectorySize {
            root: FS_TREE,
            block: place.block,
            inode: number(&place),
            have: right + 2,
            expect: right,
        }]
    );
}

#[test]
fn mistake_21_link_counts_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for (name, names) in [("small", 2), ("data", 1)] {
        let image = Image::single();
        let place = inode(&image, name);
        image.edit::<InodeItem>(&place, |item| item.nlink += 1);
        assert_eq!(
            image.expect(&["inode-links"]),
            [Finding::InodeLinks {
                root: FS_TREE,
                block: place.block,
                inode: number(&place),
                have: names + 1,
                expect: names,
            }]
        );
    }
    // Of a directory.
    let image = Image::single();
    let place = inode(&image, "directory");
    image.edit::<InodeItem>(&place, |item| item.nlink += 1);
    let found = image.expect(&["bad-block"]);
    assert_refused(&found[0], &place, Reason::BadValue);
}

#[test]
fn mistake_21_unlinked_inode_without_an_orphan_item_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let inode_item = |generation: u64| InodeItem {
        generation: generation.into(),
        transid: generation.into(),
        mode: 0o100_600.into(),
        ..InodeItem::default()
    };
    let last = image.items(FS_TREE).into_iter().rfind(|item| item.key.objectid.0 < 1 << 40);
    let number = last.unwrap().key.objectid.0 + 1;
    let key = Key::new(ObjectId(number), KeyType::INODE_ITEM, 0);
    image.insert(FS_TREE, key, zerocopy::IntoBytes::as_bytes(&inode_item(5)));
    let inode = InodeNo(number);
    assert_eq!(
        image.expect(&["orphan-missing"]),
        [Finding::OrphanMissing { root: FS_TREE, inode }]
    );
    // With it, all is well.
    image.insert(FS_TREE, Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, number), &[]);
    image.expect(&[]);
}

#[test]
fn mistake_22_inode_of_no_generation_or_of_the_future_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for generation in [0, 1_000_000] {
        let image = Image::single();
        let limit = Generation(image.superblock().generation.get() + 1);
        let place = inode(&image, "data");
        image.edit::<InodeItem>(&place, |item| item.generation = generation.into());
        assert_eq!(
            image.expect(&["inode-generation"]),
            [Finding::InodeGeneration {
                root: FS_TREE,
                block: place.block,
                inode: number(&place),
                field: "generation",
                have: Generation(generation),
                limit,
            }]
        );
    }
}

#[test]
fn mistake_24_hole_without_an_item_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::of(Base::Holes);
    let place = extent(&image, "holey", 4096);
    assert_eq!(place.data[21..29], [0; 8], "a hole");
    image.remove(&place);
    assert_eq!(
        image.expect(&["file-hole"]),
        [Finding::FileHole {
            root: FS_TREE,
            block: inode(&image, "holey").block,
            inode: number(&place),
            offset: 4096,
        }]
    );
}

#[test]
fn file_without_checksums_that_has_them_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = inode(&image, "more");
    image.edit::<InodeItem>(&place, |item| item.flags |= flags::NODATASUM);
    let data = extent(&image, "more", 0);
    let at = u64::from_le_bytes(data.data[21..29].try_into().unwrap());
    assert_eq!(
        image.expect(&["csum-unwanted"]),
        [Finding::CsumUnwanted {
            root: FS_TREE,
            block: data.block,
            inode: number(&place),
            offset: 0,
            what: "a file without checksums",
            at: LogicalAddr(at),
        }]
    );
}

#[test]
fn symbolic_link_of_the_wrong_size_or_with_flags_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = inode(&image, "symlink");
    image.edit::<InodeItem>(&place, |item| item.size += 1);
    assert_eq!(
        image.expect(&["symlink-size"]),
        [Finding::SymlinkSize {
            root: FS_TREE,
            block: place.block,
            inode: number(&place),
            have: 6,
            expect: 5,
        }]
    );
    let image = Image::single();
    image.edit::<InodeItem>(&place, |item| item.flags |= flags::IMMUTABLE);
    let (root, block, inode, have) = (FS_TREE, place.block, number(&place), flags::IMMUTABLE);
    assert_eq!(image.expect(&["inode-flags"]), [Finding::InodeFlags { root, block, inode, have }]);
}

#[test]
fn inode_with_items_of_another_type_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = inode(&image, "data");
    image.edit::<InodeItem>(&place, |item| item.mode = 0o010_600.into());
    // Its name says that it is a file.
    let found = image.expect(&["inode-items", "file-type-differs"]);
    assert_eq!(
        found[0],
        Finding::InodeItems {
            root: FS_TREE,
            block: place.block,
            inode: number(&place),
            mode: 0o010_600,
            what: "file extents",
        }
    );
}

/// What snapshots share is told once. An inode at the end of a leaf may go on in the next one, which need
/// not be shared: each tree tells of it. Where the kernel splits a leaf is chance, and the first inode was at
/// the end of one now and then.
#[test]
fn damage_in_a_shared_leaf_is_told_once() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let (sub, snap) = (image.subvolume("sub"), image.subvolume("snap"));
    let (sub_items, snap_items) = (image.items(sub), image.items(snap));
    let place = image.find(sub, |key, _| {
        let place = sub_items.iter().find(|item| item.key == key).unwrap();
        let in_leaf = |item: &&Place| item.block == place.block;
        let mut neighbours = sub_items.iter().filter(in_leaf).map(|item| item.key.objectid);
        let is_inside = neighbours.next().is_some_and(|first| first < key.objectid)
            && neighbours.next_back().is_some_and(|last| last > key.objectid);
        key.ty == KeyType::INODE_ITEM
            && is_inside
            && snap_items.iter().filter(|item| item.key.objectid == key.objectid).all(|item| {
                let own = image.item(sub, key.objectid.0, item.key.ty, item.key.offset);
                own.block == item.block
            })
            && key.objectid.0 > 256
    });
    image.edit::<InodeItem>(&place, |item| item.nlink += 1);
    image.expect(&["inode-links"]);
}

/// Of the upper half of an inode's flags Linux knows one bit. It refuses a leaf with another one where the
/// filesystem is mounted for writing; such a filesystem was called clean.
#[test]
fn unknown_flags_in_the_upper_half_of_an_inode_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let sub = image.subvolume("sub");
    let inode = image.inode(sub, "zzz-data");
    let place = image.item(sub, inode, KeyType::INODE_ITEM, 0);
    image.edit::<InodeItem>(&place, |item| item.flags |= flags::RO_VERITY);
    image.expect(&[]);
    let have = 1 << 33 | 1 << 63;
    image.edit::<InodeItem>(&place, |item| item.flags |= have);
    let (root, block, inode) = (sub, place.block, number(&place));
    assert_eq!(
        image.expect(&["inode-flags-unknown"]),
        [Finding::InodeFlagsUnknown { root, block, inode, have }]
    );
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    image.save(&path);
    for read_only in [true, false] {
        let mounted = KernelMount::mount(std::slice::from_ref(&path), "", read_only).unwrap();
        let is_read = std::fs::metadata(mounted.path().join("sub/zzz-data")).is_ok();
        mounted.unmount();
        assert_eq!(is_read, read_only);
    }
}

/// A file extent of another encoding, which Linux reads as if it were none, was not read at all: what it refers
/// to was not judged, and nothing told of it.
#[test]
fn file_extent_of_another_encoding_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = extent(&image, "prealloc", 0);
    image.edit::<FileExtentHeader>(&place, |header| header.other_encoding = 1.into());
    assert_field(&image, &place, &["file-extent-field"], ("other_encoding", 1));

    // What nothing refers to is found all the same.
    let image = Image::single();
    let place = extent(&image, "data", 0);
    image.edit::<FileExtentHeader>(&place, |header| header.other_encoding = 1.into());
    image.remove(&extent(&image, "more", 0));
    image.expect(&["file-extent-field", "inode-nbytes", "extent-unreferenced"]);
}
