//! 1 to 5, and 22: tree blocks.

use std::collections::BTreeSet;

use ubtrfs_check::{Finding, Maybe, Report};
use ubtrfs_ondisk::block::{Block, FLAG_WRITTEN, HEADER_BYTES, Item, KeyPtr, NewBlock, Node};
use ubtrfs_ondisk::extent::ExtentItem;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::{CsumType, Generation, Key, KeyType, LogicalAddr, Reason, RootId, Uuid};
use ubtrfs_testkit::{Oracle, oracle};

use crate::common::image::{Base, Image};
use crate::common::lines;

/// Bytes of a block before the pointer in `slot`.
fn ptr_at(slot: usize) -> usize {
    HEADER_BYTES + slot * 33
}

#[test]
fn mistake_01_key_order_across_leaves_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let leaves = image.leaves(RootId::FS_TREE);
    // An item of no meaning, at the end of a leaf, above the first of the next.
    let (left, right) = leaves
        .windows(2)
        .map(|pair| (&pair[0].0, &pair[1].0))
        .find(|(left, _)| left.free_bytes() >= 25)
        .unwrap();
    let next = right.key(0);
    let key = Key::new(next.objectid, KeyType(220), 0);
    let block = LogicalAddr(left.header().bytenr.get());
    image.edit_leaf(block, |leaf| {
        let end = leaf.len();
        leaf.insert(end, key, 0);
    });
    assert_eq!(
        image.expect(&["key-order-across-blocks"]),
        [Finding::KeyOrderAcrossBlocks {
            root: RootId::FS_TREE,
            block,
            slot: left.len() as u64,
            have: key,
            limit: next,
        }]
    );
}

#[test]
fn mistake_01_parent_key_that_is_not_the_childs_first_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let leaves = image.leaves(RootId::FS_TREE);
    let (leaf, parent) = &leaves[1];
    let (node, slot) = parent.unwrap();
    let lower = leaf.key(0).predecessor().unwrap();
    image.edit_bytes(node, |bytes| {
        KeyPtr::peek_mut(&mut bytes[ptr_at(slot)..]).unwrap().key =
            ubtrfs_ondisk::DiskKey::new(lower);
    });
    let found = image.expect(&["bad-block"]);
    let at = LogicalAddr(leaf.header().bytenr.get());
    assert!(matches!(
        &found[0],
        Finding::BadBlock { root: RootId::FS_TREE, block, reason: Reason::WrongFirstKey, .. }
            if *block == at
    ));
}

#[test]
fn mistake_02_gap_between_item_data_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let leaf = image.leaves(RootId::DEV_TREE).remove(0).0;
    let at = LogicalAddr(leaf.header().bytenr.get());
    assert_eq!(leaf.key(0).ty, KeyType::PERSISTENT_ITEM);
    image.edit_bytes(at, |bytes| {
        Item::peek_mut(&mut bytes[HEADER_BYTES..]).unwrap().len -= 8;
    });
    let found = image.expect(&["bad-block"]);
    assert!(matches!(
        &found[0],
        Finding::BadBlock {
            root: RootId::DEV_TREE,
            block,
            slot: Maybe(Some(0)),
            reason: Reason::ItemDataLayout,
            ..
        } if *block == at
    ));
}

#[test]
fn mistake_03_block_not_marked_as_written_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let at = image.root(RootId::CSUM_TREE);
    image.edit_header(at, |header| header.flags &= !FLAG_WRITTEN);
    let found = image.expect(&["bad-block"]);
    assert!(matches!(
        &found[0],
        Finding::BadBlock { root: RootId::CSUM_TREE, block, reason: Reason::NotWritten, .. }
            if *block == at
    ));
}

/// The block under an old generation is what a lost write of its successor leaves.
#[test]
fn mistake_04_child_generation_level_and_owner_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let expect_reason = |image: &Image, expect: Reason, at: LogicalAddr| {
        let found = image.expect(&["bad-block"]);
        assert!(matches!(
            &found[0],
            Finding::BadBlock { block, reason, .. } if *block == at && *reason == expect
        ));
    };
    let image = Image::single();
    let (leaf, parent) = image.leaves(RootId::FS_TREE).remove(1);
    let at = LogicalAddr(leaf.header().bytenr.get());
    let (node, slot) = parent.unwrap();
    image.edit_bytes(node, |bytes| {
        KeyPtr::peek_mut(&mut bytes[ptr_at(slot)..]).unwrap().generation -= 1;
    });
    expect_reason(&image, Reason::WrongGeneration, at);

    let image = Image::single();
    let at = image.root(RootId::CSUM_TREE);
    let place = image.root_item(RootId::CSUM_TREE);
    image.edit::<RootItem>(&place, |item| item.level += 1);
    expect_reason(&image, Reason::WrongLevel, at);

    let image = Image::single();
    let at = image.root(RootId::CSUM_TREE);
    image.edit_header(at, |header| header.owner = RootId::FS_TREE.0.into());
    expect_reason(&image, Reason::WrongOwner, at);
}

/// A shared block is read once; what its other parents say of it is compared.
#[test]
fn mistake_04_second_parent_that_disagrees_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let (sub, root) = (image.subvolume("sub"), image.subvolume("snap"));
    let own: Vec<_> = image.blocks(sub).iter().map(|(block, _)| block.bytenr()).collect();
    let shared = image
        .leaves(root)
        .into_iter()
        .find(|(leaf, _)| own.contains(&LogicalAddr(leaf.header().bytenr.get())));
    let (leaf, parent) = shared.unwrap();
    let (parent, slot) = parent.unwrap();
    let mut right = 0;
    image.edit_bytes(parent, |bytes| {
        let ptr = KeyPtr::peek_mut(&mut bytes[ptr_at(slot)..]).unwrap();
        right = ptr.generation.get();
        ptr.generation += 1;
    });
    assert_eq!(
        image.expect(&["parent-disagrees"]),
        [Finding::ParentDisagrees {
            root,
            block: LogicalAddr(leaf.header().bytenr.get()),
            parent,
            what: "generation",
            have: right.to_string(),
            expect: (right + 1).to_string(),
        }]
    );
}

/// A block is copied before it is changed, and its parents with it: none is newer than its parent.
#[test]
fn mistake_03_block_written_again_where_it_is_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let root = image.subvolume("snap");
    // The children that were changed last become newer than what is above.
    let node = image.root(root);
    let have = image.block(node).generation();
    let limit = Generation(have.0 - 1);
    image.edit_header(node, |header| header.generation = limit.0.into());
    image.edit::<RootItem>(&image.root_item(root), |item| {
        item.generation = limit.0.into();
        item.generation_v2 = limit.0.into();
    });
    let place = image.find(RootId::EXTENT_TREE, |key, _| {
        (key.objectid.0, key.ty) == (node.0, KeyType::METADATA_ITEM)
    });
    image.edit::<ExtentItem>(&place, |item| item.generation = limit.0.into());
    let Block::Node(children) = image.block(node) else { panic!("{node} is no node") };
    let newer: Vec<Finding> = (0..children.len())
        .filter(|slot| children.child_generation(*slot) == have)
        .map(|slot| {
            let slot = slot as u64;
            Finding::PointerGeneration { root, block: node, slot, have, limit }
        })
        .collect();
    assert!(!newer.is_empty());
    assert_eq!(image.expect(&vec!["pointer-generation"; newer.len()]), newer);
}

#[test]
fn mistake_05_empty_leaf_below_a_node_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    // A leaf that holds one attribute and nothing else.
    let (leaf, parent) = image
        .leaves(RootId::FS_TREE)
        .into_iter()
        .find(|(leaf, _)| (0..leaf.len()).all(|slot| leaf.key(slot).ty == KeyType::XATTR_ITEM))
        .unwrap();
    let block = LogicalAddr(leaf.header().bytenr.get());
    let parent = parent.unwrap().0;
    image.edit_leaf(block, |leaf| leaf.remove(0..leaf.len()));
    let root = RootId::FS_TREE;
    assert_eq!(image.expect(&["empty-leaf"]), [Finding::EmptyLeaf { root, block, parent }]);
}

#[test]
fn block_in_no_chunk_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let root = RootId::CSUM_TREE;
    let at = LogicalAddr(1 << 50);
    image.edit::<RootItem>(&image.root_item(root), |item| item.bytenr = at.0.into());
    let found = image.expect(&["unreadable-block", "block-not-in-extent-tree"]);
    assert!(matches!(&found[0], Finding::UnreadableBlock { block, .. } if *block == at));
    assert_eq!(found[1], Finding::BlockNotInExtentTree { root, block: at });
}

#[test]
fn mistake_22_block_of_the_future_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let limit = image.superblock().generation.get();
    let (leaf, parent) = image.leaves(RootId::FS_TREE).remove(1);
    let at = LogicalAddr(leaf.header().bytenr.get());
    let (node, slot) = parent.unwrap();
    image.edit_bytes(node, |bytes| {
        KeyPtr::peek_mut(&mut bytes[ptr_at(slot)..]).unwrap().generation = (limit + 2).into();
    });
    image.edit_header(at, |header| header.generation = (limit + 2).into());
    // The extent tree says when it was made.
    let found = image.expect(&["block-generation", "extent-disagrees"]);
    let (have, limit) = (Generation(limit + 2), Generation(limit));
    let root = RootId::FS_TREE;
    assert_eq!(found[0], Finding::BlockGeneration { root, block: at, have, limit });
}

/// One copy of two is whole: the filesystem reads well, and yet that is damage.
#[test]
fn block_with_one_bad_copy_is_found_and_read_from_the_other() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for mirror in [0, 1] {
        let image = Image::of(Base::Dup);
        let at = image.root(RootId::CSUM_TREE);
        image.spoil(at, mirror);
        let found = image.expect(&["bad-block-copy"]);
        assert!(matches!(
            &found[0],
            Finding::BadBlockCopy { block, mirror: bad, reason: Reason::CsumMismatch, .. }
                if *block == at && *bad == mirror as u64
        ));
    }
}

/// What a lost block held is not judged, and that is said.
#[test]
fn block_without_a_whole_copy_is_the_only_error() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let sub = |image: &Image| image.leaves(image.subvolume("sub")).remove(3).0;
    let leaf = |image: &Image, root: RootId| image.leaves(root).remove(0).0;
    for root in [RootId::CSUM_TREE, RootId::FREE_SPACE_TREE, RootId::DEV_TREE] {
        let image = Image::single();
        image.spoil(image.root(root), 0);
        image.expect(&["bad-block"]);
        let notes: Vec<_> = image.check().notes().map(Finding::kind).collect();
        assert!(notes.contains(&"incomplete"), "root {root}: {notes:?}");
    }
    let image = Image::single();
    image.spoil(LogicalAddr(sub(&image).header().bytenr.get()), 0);
    image.expect(&["bad-block"]);
    let image = Image::single();
    image.spoil(LogicalAddr(leaf(&image, RootId::EXTENT_TREE).header().bytenr.get()), 0);
    image.expect(&["bad-block"]);
}

fn write(image: &Image, mut block: Block) {
    block.seal(CsumType::Crc32c);
    image.write(block.bytenr(), block.as_bytes().into());
}

/// Beside a node that was lost, its neighbours were judged as if there had been nothing below it:
/// names and inodes of which it held a part were called damaged.
#[test]
fn lost_node_takes_no_findings_about_what_it_held_with_it() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let root = image.subvolume("snap");
    let Block::Node(node) = image.block(image.root(root)) else { panic!("a tree of some leaves") };
    assert_eq!(node.header().level, 1);
    let superblock = image.superblock();
    let generation = superblock.generation;
    let blocks = image.free_blocks(3);
    let new = |at| NewBlock {
        fsid: superblock.header_fsid(),
        chunk_tree_uuid: Uuid(node.header().chunk_tree_uuid),
        bytenr: at,
        generation: Generation(generation.get()),
        owner: root,
        nodesize_bytes: usize::try_from(superblock.nodesize.get()).unwrap(),
    };
    let mut top = Node::new(&new(blocks[2]), 2);
    let half = node.len() / 2;
    for (at, slots) in [(blocks[0], 0..half), (blocks[1], half..node.len())] {
        let mut part = Node::new(&new(at), 1);
        for slot in slots {
            part.insert(part.len(), node.key(slot), node.child(slot), node.child_generation(slot));
        }
        top.insert(top.len(), part.key(0), at, Generation(generation.get()));
        write(&image, Block::Node(part));
    }
    write(&image, Block::Node(top));
    image.edit::<RootItem>(&image.root_item(root), |item| {
        item.bytenr = blocks[2].0.into();
        item.generation = generation;
        item.generation_v2 = generation;
        item.level = 2;
    });
    let kinds =
        |report: &Report| -> BTreeSet<&str> { report.errors().map(Finding::kind).collect() };
    // The new nodes are in no extent tree, the old one is in no tree.
    let before = image.check();
    let expect = ["block-not-in-extent-tree", "extent-unreferenced"];
    assert_eq!(kinds(&before), BTreeSet::from(expect), "{}", lines(&before));
    image.spoil(blocks[1], 0);
    let after = image.check();
    assert!(after.notes().any(|note| note.kind() == "incomplete"));
    let expect = ["bad-block", "block-not-in-extent-tree"];
    assert_eq!(kinds(&after), BTreeSet::from(expect), "{}", lines(&after));
}
