//! 6 to 10: extents and references.

use ubtrfs_check::{Finding, Maybe, Reference};
use ubtrfs_ondisk::extent::{BackRef, ExtentDataRef, ExtentItem, flags};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::{Generation, InodeNo, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId};
use ubtrfs_testkit::{CheckMode, KernelMount, Oracle, btrfs_check, oracle};

use crate::common;
use crate::common::image::{Image, Place};

const EXTENT_TREE: RootId = RootId::EXTENT_TREE;
/// Bytes of an extent item without references, and of an inline data reference.
const FIXED: usize = 24;
const DATA_REF: usize = 29;

/// An extent of data with so many inline references.
fn data_extent(image: &Image, refs: usize) -> Place {
    image.find(EXTENT_TREE, |key, data| {
        key.ty == KeyType::EXTENT_ITEM
            && data.len() == FIXED + refs * DATA_REF
            && data[FIXED] == KeyType::EXTENT_DATA_REF.0
    })
}

fn data_ref(place: &Place, index: usize) -> ExtentDataRef {
    *ExtentDataRef::peek(&place.data[FIXED + index * DATA_REF + 1..]).unwrap()
}

fn assert_refused(image: &Image, place: &Place, expect: Reason) {
    let found = image.expect(&["bad-block"]);
    assert!(
        matches!(
            &found[0],
            Finding::BadBlock { root: EXTENT_TREE, block, slot: Maybe(Some(slot)), reason, .. }
                if *block == place.block && *slot == place.slot as u64 && *reason == expect
        ),
        "{found:?}"
    );
}

#[test]
fn mistake_06_inline_references_out_of_order_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = data_extent(&image, 2);
    image.edit_leaf(place.block, |leaf| {
        let (first, second) = leaf.data_mut(place.slot)[FIXED..].split_at_mut(DATA_REF);
        first.swap_with_slice(second);
    });
    assert_refused(&image, &place, Reason::RefOrder);
}

#[test]
fn mistake_06_padding_behind_inline_references_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = data_extent(&image, 1);
    image.edit_leaf(place.block, |leaf| {
        let len = place.data.len();
        leaf.resize(place.slot, len + 16)[len..].fill(0);
    });
    assert_refused(&image, &place, Reason::BadValue);
}

#[test]
fn mistake_07_counts_that_are_not_the_references_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = data_extent(&image, 1);
    image.edit::<ExtentItem>(&place, |item| item.refs += 1);
    let bytenr = LogicalAddr(place.key.objectid.0);
    assert_eq!(
        image.expect(&["extent-refs"]),
        [Finding::ExtentRefs { bytenr, have: 2, expect: 1 }]
    );

    // Less than the inline ones.
    let image = Image::single();
    let place = data_extent(&image, 2);
    image.edit::<ExtentItem>(&place, |item| item.refs -= 1);
    assert_refused(&image, &place, Reason::WrongRefCount);

    // The counts agree with each other and not with the trees.
    let image = Image::single();
    let place = data_extent(&image, 1);
    image.edit::<ExtentItem>(&place, |item| item.refs += 1);
    image.edit_behind::<ExtentDataRef>(&place, FIXED + 1, |data_ref| data_ref.count += 1);
    let bytenr = LogicalAddr(place.key.objectid.0);
    let of = |count| {
        let mut data_ref = data_ref(&place, 0);
        data_ref.count = count;
        Maybe(Some(Reference(BackRef::from_data_ref(&data_ref))))
    };
    assert_eq!(
        image.expect(&["wrong-reference"]),
        [Finding::WrongReference { bytenr, have: of(2.into()), expect: of(1.into()) }]
    );
}

#[test]
fn mistake_07_reference_of_another_tree_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let at = image.root(RootId::CSUM_TREE);
    let place = image
        .find(EXTENT_TREE, |key, _| (key.objectid.0, key.ty) == (at.0, KeyType::METADATA_ITEM));
    image.edit_leaf(place.block, |leaf| {
        let uuid_tree = RootId::UUID_TREE.0.to_le_bytes();
        leaf.data_mut(place.slot)[FIXED + 1..].copy_from_slice(&uuid_tree);
    });
    let of = |root| Maybe(Some(Reference(BackRef::TreeBlock { root })));
    assert_eq!(
        image.expect(&["wrong-reference"]),
        [Finding::WrongReference {
            bytenr: at,
            have: of(RootId::UUID_TREE),
            expect: of(RootId::CSUM_TREE),
        }]
    );
}

/// Makes the only reference of an extent an item of its own, `moved` behind the hash of its key.
fn keyed(image: &Image, moved: i64) -> Place {
    let inode = image.inode(RootId::FS_TREE, "more");
    let file = image.item(RootId::FS_TREE, inode, KeyType::EXTENT_DATA, 0);
    let bytenr = u64::from_le_bytes(file.data[21..29].try_into().unwrap());
    let place = image.item(EXTENT_TREE, bytenr, KeyType::EXTENT_ITEM, 64 << 10);
    let data_ref = data_ref(&place, 0);
    let hash = BackRef::from_data_ref(&data_ref).key_offset();
    image.edit_leaf(place.block, |leaf| _ = leaf.resize(place.slot, FIXED));
    let offset = hash.checked_add_signed(moved).unwrap();
    let key = Key::new(place.key.objectid, KeyType::EXTENT_DATA_REF, offset);
    image.insert(EXTENT_TREE, key, zerocopy::IntoBytes::as_bytes(&data_ref))
}

/// References whose hashes collide stand one behind the other. When the first of them is dropped,
/// Linux leaves the others where they are, and finds them there: a gap was an error by ours.
#[test]
fn reference_behind_a_collision_that_is_gone_is_no_damage() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    keyed(&image, 2);
    image.expect(&[]);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    image.save(&path);
    assert!(btrfs_check(&path, CheckMode::Original).is_clean);
    let mounted = KernelMount::read_write(&path, "");
    std::fs::remove_file(mounted.path().join("more")).unwrap();
    mounted.unmount();
    assert!(btrfs_check(&path, CheckMode::Original).is_clean);
    assert!(common::check_all(&common::open(&[path])).is_clean());
}

#[test]
fn reference_of_no_extent_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let last = image
        .items(EXTENT_TREE)
        .into_iter()
        .rfind(|item| item.key.ty == KeyType::EXTENT_ITEM || item.key.ty == KeyType::METADATA_ITEM);
    let data_ref = data_ref(&data_extent(&image, 1), 0);
    let hash = BackRef::from_data_ref(&data_ref).key_offset();
    let objectid = ObjectId(last.unwrap().key.objectid.0 + (1 << 20));
    let key = Key::new(objectid, KeyType::EXTENT_DATA_REF, hash);
    let place = image.insert(EXTENT_TREE, key, zerocopy::IntoBytes::as_bytes(&data_ref));
    let (block, slot) = (place.block, place.slot as u64);
    assert_eq!(
        image.expect(&["reference-without-extent"]),
        [Finding::ReferenceWithoutExtent { block, slot, key }]
    );
}

/// Linux looks for a reference from its hash on upwards; and so many collisions there are not.
#[test]
fn reference_below_or_far_behind_its_hash_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for moved in [-1, 1 << 20] {
        let image = Image::single();
        let Place { block, slot, key, .. } = keyed(&image, moved);
        let expect = key.offset.checked_add_signed(-moved).unwrap();
        let slot = slot as u64;
        assert_eq!(
            image.expect(&["reference-key"]),
            [Finding::ReferenceKey { block, slot, key, expect }]
        );
    }
}

#[test]
fn mistake_08_full_backref_flag_not_set_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for is_set in [true, false] {
        let image = Image::single();
        // Blocks whose flag stands for something: leaves with file data.
        let refers = |at: u64| {
            [image.subvolume("sub"), image.subvolume("snap")].into_iter().any(|root| {
                image.items(root).iter().any(|item| {
                    item.block.0 == at && item.key.ty == KeyType::EXTENT_DATA && item.data[20] == 1
                })
            })
        };
        let place = image.find(EXTENT_TREE, |key, data| {
            let has =
                ExtentItem::peek(data).is_ok_and(|it| it.flags.get() & flags::FULL_BACKREF != 0);
            key.ty == KeyType::METADATA_ITEM && has == is_set && refers(key.objectid.0)
        });
        image.edit::<ExtentItem>(&place, |item| item.flags ^= flags::FULL_BACKREF);
        let block = LogicalAddr(place.key.objectid.0);
        let (have, expect) = (u64::from(!is_set), u64::from(is_set));
        assert_eq!(image.expect(&["full-backref"]), [Finding::FullBackref { block, have, expect }]);
    }
}

#[test]
fn mistake_09_data_reference_with_the_file_offset_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let clone = image.inode(RootId::FS_TREE, "clone");
    // What is left of the clone begins in the middle of the extent.
    let place = data_extent(&image, 2);
    let index = (0..2).find(|index| data_ref(&place, *index).objectid.get() == clone).unwrap();
    let mut refs = [data_ref(&place, 0), data_ref(&place, 1)];
    refs[index].offset = 102_400.into();
    // In their order all the same.
    let mut refs = refs.map(|data_ref| BackRef::from_data_ref(&data_ref));
    refs.sort_by(BackRef::inline_cmp);
    let mut inline = Vec::new();
    refs.iter().for_each(|back_ref| back_ref.write_inline(&mut inline));
    image.edit_leaf(place.block, |leaf| {
        leaf.data_mut(place.slot)[FIXED..].copy_from_slice(&inline);
    });
    let found = image.expect(&["wrong-reference"]);
    let of = |offset| {
        let (root, inode) = (RootId::FS_TREE, InodeNo(clone));
        Maybe(Some(Reference(BackRef::ExtentData { root, inode, offset, count: 1 })))
    };
    assert_eq!(
        found,
        [Finding::WrongReference {
            bytenr: LogicalAddr(place.key.objectid.0),
            have: of(102_400),
            expect: of(0),
        }]
    );
}

/// A block that was written again in another transaction where it was, which its parent and its
/// extent show.
#[test]
fn block_whose_extent_is_of_another_generation_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let bytenr = image.root(RootId::CSUM_TREE);
    let place = image
        .find(EXTENT_TREE, |key, _| (key.objectid.0, key.ty) == (bytenr.0, KeyType::METADATA_ITEM));
    let mut right = 0;
    image.edit::<ExtentItem>(&place, |item| {
        right = item.generation.get();
        item.generation -= 1;
    });
    let (have, expect) = ((right - 1).to_string(), right.to_string());
    assert_eq!(
        image.expect(&["extent-disagrees"]),
        [Finding::ExtentDisagrees { bytenr, what: "generation", have, expect }]
    );
    let theirs = image.theirs(CheckMode::Lowmem);
    assert!(!theirs.is_clean, "{}", theirs.transcript);
}

/// Moves the root of the checksum tree, and all that depends on where it is.
fn move_csum_root(image: &Image, to: LogicalAddr) {
    let from = image.root(RootId::CSUM_TREE);
    let mut bytes = image.bytes(from);
    ubtrfs_ondisk::block::Header::peek_mut(&mut bytes).unwrap().bytenr = to.0.into();
    image.write(to, bytes);
    image.edit::<RootItem>(&image.root_item(RootId::CSUM_TREE), |item| {
        item.bytenr = to.0.into();
    });
    image.edit_super(|superblock| {
        let backups = &mut superblock.super_roots;
        for backup in backups.iter_mut().filter(|backup| backup.csum_root.get() == from.0) {
            backup.csum_root = to.0.into();
        }
    });
    let place = image
        .find(EXTENT_TREE, |key, _| (key.objectid.0, key.ty) == (from.0, KeyType::METADATA_ITEM));
    image.remove(&place);
    let key = Key { objectid: ObjectId(to.0), ..place.key };
    image.insert(EXTENT_TREE, key, &place.data);
    image.settle_space();
}

/// Only the chunk tree is in block groups for it: Linux reads them before it knows any others.
#[test]
fn tree_block_among_those_of_the_chunk_tree_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let bytenr = LogicalAddr(image.root(RootId::CHUNK_TREE).0 + 65_536);
    move_csum_root(&image, bytenr);
    let what = "tree blocks but the chunk tree's";
    assert_eq!(
        image.expect(&["extent-outside-group"]),
        [Finding::ExtentOutsideGroup { bytenr, len_bytes: 16_384, what }]
    );
    image.expect_theirs();
}

/// `btrfs check` warns of one that crosses no stripe, and finds one that does.
#[test]
fn tree_block_that_is_not_aligned_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let stripe = |image: &Image| image.free_blocks(12).pop().unwrap().0.next_multiple_of(65_536);
    let image = Image::single();
    let bytenr = LogicalAddr(stripe(&image) + 16_384);
    move_csum_root(&image, bytenr);
    image.expect_notes(&[]);
    assert!(image.theirs(CheckMode::Original).is_clean);

    let image = Image::single();
    let bytenr = LogicalAddr(stripe(&image) + 20_480);
    move_csum_root(&image, bytenr);
    assert_eq!(
        image.expect_notes(&["block-unaligned"]),
        [Finding::BlockUnaligned { bytenr, len_bytes: 16_384 }]
    );
    image.expect_theirs();

    let image = Image::single();
    let bytenr = LogicalAddr(stripe(&image) + 57_344);
    move_csum_root(&image, bytenr);
    let border = LogicalAddr(bytenr.0 + 8192);
    assert_eq!(
        image.expect(&["block-crosses-stripe"]),
        [Finding::BlockCrossesStripe { bytenr, border }]
    );
    image.expect_theirs();
}

#[test]
fn extent_of_the_future_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let limit = Generation(image.superblock().generation.get());
    let place = data_extent(&image, 1);
    let bytenr = LogicalAddr(place.key.objectid.0);
    let have = Generation(limit.0 + 1);
    image.edit::<ExtentItem>(&place, |item| item.generation = have.0.into());
    assert_eq!(
        image.expect(&["extent-generation"]),
        [Finding::ExtentGeneration { bytenr, have, limit }]
    );
}

#[test]
fn mistake_10_overlapping_extents_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let items = image.items(EXTENT_TREE);
    let (place, next) = items
        .windows(2)
        .map(|pair| (&pair[0], &pair[1]))
        .find(|(a, b)| {
            a.key.ty == KeyType::EXTENT_ITEM
                && b.key.ty == KeyType::EXTENT_ITEM
                && a.block == b.block
                && a.key.objectid.0 + a.key.offset == b.key.objectid.0
        })
        .unwrap();
    let mut key = place.key;
    key.offset += 4096;
    image.edit_leaf(place.block, |leaf| leaf.set_key(place.slot, key));
    // The length is now that of no file extent, and counts in all sums.
    let found =
        image.expect(&["bad-block", "extent-disagrees", "group-used", "superblock-bytes-used"]);
    assert!(matches!(
        &found[0],
        Finding::BadBlock { slot: Maybe(Some(slot)), reason: Reason::Overlap, .. }
            if *slot == next.slot as u64
    ));
}

#[test]
fn extent_that_nothing_refers_to_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let inode = image.inode(RootId::FS_TREE, "more");
    let place = image.item(RootId::FS_TREE, inode, KeyType::EXTENT_DATA, 0);
    image.remove(&place);
    let found = image.expect(&["inode-nbytes", "extent-unreferenced"]);
    let bytenr = u64::from_le_bytes(place.data[21..29].try_into().unwrap());
    assert_eq!(
        found[1],
        Finding::ExtentUnreferenced { bytenr: LogicalAddr(bytenr), len_bytes: 64 << 10 }
    );
}

#[test]
fn extents_that_are_missing_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let inode = image.inode(RootId::FS_TREE, "more");
    let place = image.item(RootId::FS_TREE, inode, KeyType::EXTENT_DATA, 0);
    let bytenr = u64::from_le_bytes(place.data[21..29].try_into().unwrap());
    let place = image.item(EXTENT_TREE, bytenr, KeyType::EXTENT_ITEM, 64 << 10);
    image.remove(&place);
    let bytenr = LogicalAddr(bytenr);
    let found = image.expect(&[
        "extent-missing",
        "group-used",
        "superblock-bytes-used",
        "free-space-differs",
        "csum-without-extent",
    ]);
    assert!(matches!(&found[0], Finding::ExtentMissing { bytenr: at, .. } if *at == bytenr));

    let image = Image::single();
    let block = image.root(RootId::CSUM_TREE);
    let place = image
        .find(EXTENT_TREE, |key, _| (key.objectid.0, key.ty) == (block.0, KeyType::METADATA_ITEM));
    image.remove(&place);
    let found = image.expect(&[
        "group-used",
        "superblock-bytes-used",
        "free-space-differs",
        "block-not-in-extent-tree",
    ]);
    let root = RootId::CSUM_TREE;
    assert_eq!(found[3], Finding::BlockNotInExtentTree { root, block });
}

/// Stripes begin where the block group does, which need be no multiple of their length: a block that crosses
/// none of the group's was called damage.
#[test]
fn tree_block_across_a_stripe_is_judged_from_the_start_of_its_group() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for (offset, border) in [(49_152, None), (61_440, Some(65_536))] {
        let image = Image::single();
        let group = image.add_metadata_group(4096);
        let bytenr = LogicalAddr(group.0 + offset);
        move_csum_root(&image, bytenr);
        match border {
            None => {
                assert_eq!(
                    image.expect_notes(&["block-unaligned"]),
                    [Finding::BlockUnaligned { bytenr, len_bytes: 16_384 }]
                );
            }
            Some(border) => {
                let border = LogicalAddr(group.0 + border);
                assert_eq!(
                    image.expect(&["block-crosses-stripe"]),
                    [Finding::BlockCrossesStripe { bytenr, border }]
                );
                image.expect_theirs();
            }
        }
    }
}

/// The border of the stripe behind one was computed, which overflowed.
#[test]
fn tree_block_at_the_end_of_the_address_space_ends_with_a_report() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let place = image.find(EXTENT_TREE, |key, _| key.ty == KeyType::METADATA_ITEM);
    let bytenr = LogicalAddr(0xffff_ffff_ffff_f000);
    let key = Key { objectid: ObjectId(bytenr.0), ..place.key };
    image.insert(EXTENT_TREE, key, &place.data);
    let report = image.check();
    let is_outside = |it: &Finding| matches!(it, Finding::ExtentOutsideGroup { bytenr: at, .. } if *at == bytenr);
    assert!(report.errors().any(is_outside), "{}", common::lines(&report));
}
