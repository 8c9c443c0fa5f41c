//! 23: roots.

use ubtrfs_check::Finding;
use ubtrfs_ondisk::dir::DirItem;
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::inode::InodeItem;
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::{
    DiskKey, Generation, InodeNo, Key, KeyType, LogicalAddr, ObjectId, RootId, Uuid,
};
use ubtrfs_testkit::{CheckMode, KernelMount, Oracle, btrfs_check, collections, oracle};

use crate::common;
use crate::common::image::{Image, Place};

const ROOT_TREE: RootId = RootId::ROOT_TREE;

fn naming(image: &Image, ty: KeyType) -> (RootId, Place) {
    let sub = image.subvolume("snap");
    let place = image.find(ROOT_TREE, |key, data| key.ty == ty && data.ends_with(b"snap"));
    (sub, place)
}

#[test]
fn mistake_23_missing_names_of_a_subvolume_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for (ty, what) in [(KeyType::ROOT_REF, "ROOT_REF"), (KeyType::ROOT_BACKREF, "ROOT_BACKREF")] {
        let image = Image::single();
        let (root, place) = naming(&image, ty);
        image.remove(&place);
        let parent = RootId::FS_TREE;
        assert_eq!(
            image.expect(&["root-ref-missing"]),
            [Finding::RootRefMissing { root, parent, what }]
        );
    }
    // Both of them.
    let image = Image::single();
    let (root, place) = naming(&image, KeyType::ROOT_REF);
    image.remove(&place);
    let place = image
        .find(ROOT_TREE, |key, data| key.ty == KeyType::ROOT_BACKREF && data.ends_with(b"snap"));
    image.remove(&place);
    assert_eq!(
        image.expect(&["subvolume-unreferenced"]),
        [Finding::SubvolumeUnreferenced { root }]
    );
}

/// Linux takes a block that is newer than its tree's last snapshot for the tree's alone, and gives its
/// place away when the tree changes it.
#[test]
fn block_that_is_shared_and_newer_than_the_last_snapshot_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for name in ["sub", "snap"] {
        let image = Image::single();
        let root = image.subvolume(name);
        let place = image.root_item(root);
        image.edit::<RootItem>(&place, |item| item.last_snapshot = 0.into());
        let found = image.expect(&["root-field"]);
        assert!(
            matches!(
                &found[0],
                Finding::RootField { root: at, field: "last_snapshot", have, .. }
                    if *at == root && have == "0"
            ),
            "{found:?}"
        );
        // What Linux makes of it.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        image.save(&path);
        let mounted = KernelMount::read_write(&path, "");
        for number in (0..300).step_by(7) {
            let file = mounted.path().join(format!("{name}/file-{number}"));
            let _ = std::fs::write(file, "changed");
        }
        mounted.unmount();
        assert!(!btrfs_check(&path, CheckMode::Original).is_clean);
    }
}

#[test]
fn tree_that_is_missing_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let root = RootId::FREE_SPACE_TREE;
    image.remove(&image.root_item(root));
    let extents = image.items(RootId::EXTENT_TREE);
    let groups = extents.iter().filter(|item| item.key.ty == KeyType::BLOCK_GROUP_ITEM);
    let of_groups = vec!["free-space-missing"; groups.count()];
    let kinds = [&["root-missing"], &of_groups[..], &["extent-unreferenced"]].concat();
    assert_eq!(image.expect(&kinds)[0], Finding::RootMissing { root });
}

#[test]
fn mistake_23_names_of_a_subvolume_that_differ_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let (root, place) = naming(&image, KeyType::ROOT_BACKREF);
    image.edit_leaf(place.block, |leaf| leaf.data_mut(place.slot)[8] ^= 0x40);
    let parent = RootId::FS_TREE;
    assert_eq!(image.expect(&["root-refs-differ"]), [Finding::RootRefsDiffer { root, parent }]);
}

#[test]
fn mistake_23_missing_entry_of_a_subvolume_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let root = image.subvolume("snap");
    let place = image
        .find(RootId::FS_TREE, |key, data| key.ty == KeyType::DIR_INDEX && data.ends_with(b"snap"));
    image.remove(&place);
    let found = image.expect(&["dir-index-missing", "root-ref-missing"]);
    let parent = RootId::FS_TREE;
    assert_eq!(found[1], Finding::RootRefMissing { root, parent, what: "DIR_INDEX" });
}

/// Names count only in trees that are there: one that is named by no tree, or by subvolumes that
/// name each other, nobody reaches.
#[test]
fn subvolume_that_is_named_where_nobody_comes_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for (parent, kinds) in [
        (None, &["root-ref-missing", "subvolume-unreferenced"][..]),
        (Some("snap"), &["root-ref-missing", "root-ref-missing", "subvolume-unreferenced"]),
    ] {
        let image = Image::single();
        let root = image.subvolume("snap");
        let parent = parent.map_or(RootId(999), |name| image.subvolume(name));
        let (_, reference) = naming(&image, KeyType::ROOT_REF);
        let (_, backref) = naming(&image, KeyType::ROOT_BACKREF);
        // The one that comes first last, so that the other's slot stays right.
        image.remove(&backref);
        image.remove(&reference);
        let key = Key::new(ObjectId(parent.0), KeyType::ROOT_REF, root.0);
        image.insert(ROOT_TREE, key, &reference.data);
        let key = Key::new(ObjectId(root.0), KeyType::ROOT_BACKREF, parent.0);
        image.insert(ROOT_TREE, key, &backref.data);
        let found = image.expect(kinds);
        assert_eq!(found.last(), Some(&Finding::SubvolumeUnreferenced { root }));
        if parent == RootId(999) {
            let what = "ROOT_ITEM of the parent";
            assert_eq!(found[0], Finding::RootRefMissing { root, parent, what });
        }
        image.expect_theirs();
    }
}

#[test]
fn mistake_23_deleted_subvolume_without_its_orphan_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let root = image.subvolume("snap");
    let place = image.root_item(root);
    image.edit::<RootItem>(&place, |item| item.refs = 0.into());
    assert_eq!(image.expect(&["root-orphan-missing"]), [Finding::RootOrphanMissing { root }]);
    image.insert(ROOT_TREE, Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, root.0), &[]);
    image.expect(&[]);
}

#[test]
fn mistake_23_drop_progress_and_drop_level_apart_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    // A level without progress.
    let image = Image::single();
    let root = image.subvolume("snap");
    let place = image.root_item(root);
    image.edit::<RootItem>(&place, |item| item.drop_level = 1);
    let found = image.expect(&["root-field"]);
    assert!(matches!(
        &found[0],
        Finding::RootField { root: at, field: "drop_level", .. } if *at == root
    ));
    // Progress without a level is what the structural verifier refuses; in a tree that is not
    // deleted it is wrong besides.
    let image = Image::single();
    image.edit::<RootItem>(&place, |item| {
        item.drop_progress = DiskKey::new(Key::new(ObjectId(1), KeyType(0), 0));
    });
    image.expect(&["bad-block", "root-field"]);
}

/// The part of a tree that was deleted is not looked for, and what is left of it is.
#[test]
fn half_deleted_subvolume_is_walked_from_where_its_deletion_stopped() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let root = image.subvolume("snap");
    let (leaf, _) = image.leaves(root).remove(2);
    let place = image.root_item(root);
    image.edit::<RootItem>(&place, |item| {
        item.refs = 0.into();
        item.drop_progress = DiskKey::new(leaf.key(0));
        item.drop_level = 1;
    });
    image.insert(ROOT_TREE, Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, root.0), &[]);
    // The references of the first two leaves were not dropped, and nothing asks for them now.
    let found = image.expect(&["wrong-reference"; 2]);
    for (finding, (leaf, _)) in found.iter().zip(image.leaves(root)) {
        let at = leaf.header().bytenr.get();
        let Finding::WrongReference { bytenr, expect, .. } = finding else { panic!() };
        assert!(
            expect.0.is_none()
                && image.leaves(root)[..2]
                    .iter()
                    .any(|(leaf, _)| { leaf.header().bytenr.get() == bytenr.0 }),
            "{finding} {at}"
        );
    }
}

/// While a balance puts copies in the place of a tree's blocks, it notes in the copy's root item how
/// far it came. Nothing of the copy is dropped then: an image cut off there was damaged by ours, and
/// Linux goes on from it.
#[test]
fn progress_of_a_balance_is_no_damage() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::ImageCollections]) {
        return;
    }
    let images = collections::images();
    let source = images.iter().find(|image| image.origin.ends_with("shared_block_ref_only.raw.xz"));
    let image = Image::of_file(&source.unwrap().path);
    let place = image.find(ROOT_TREE, |key, data| {
        let item = RootItem::parse(data);
        key.objectid.0 == RootId::TREE_RELOC.0
            && key.ty == KeyType::ROOT_ITEM
            && item.is_ok_and(|item| item.level > 0 && item.refs.get() == 1)
    });
    let at = LogicalAddr(RootItem::parse(&place.data).unwrap().bytenr.get());
    let ubtrfs_ondisk::block::Block::Node(node) = image.block(at) else { panic!() };
    image.edit::<RootItem>(&place, |item| {
        item.drop_progress = DiskKey::new(node.key(node.len() / 2));
        item.drop_level = 1;
    });
    image.expect(&[]);
    // That one takes the copy for half dropped.
    image.expect_theirs();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    image.save(&path);
    KernelMount::read_write(&path, "").unmount();
    let after = btrfs_check(&path, CheckMode::Original);
    assert!(after.is_clean, "{}", after.transcript);
    assert!(common::check_all(&common::open(&[path])).is_clean());
}

#[test]
fn uuid_and_default_subvolume_are_looked_up() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let root = image.subvolume("snap");
    let place = image.root_item(root);
    let mut uuid = [0; 16];
    image.edit::<RootItem>(&place, |item| {
        item.uuid[0] ^= 1;
        uuid = item.uuid;
    });
    let what = "uuid";
    assert_eq!(
        image.expect(&["uuid-missing"]),
        [Finding::UuidMissing { root, what, uuid: Uuid(uuid) }]
    );
    assert!(image.check().notes().any(|note| note.kind() == "uuid-stale"));

    let image = Image::single();
    let default = image.find(ROOT_TREE, |key, _| {
        key.objectid == ObjectId::ROOT_TREE_DIR && key.ty == KeyType::DIR_ITEM
    });
    image.edit::<DirItem>(&default, |item| item.location.objectid = 999.into());
    image.edit_super(|superblock| superblock.incompat_flags |= Incompat::DEFAULT_SUBVOL.0);
    assert_eq!(
        image.expect(&["default-subvolume"]),
        [Finding::DefaultSubvolume { root: RootId(999) }]
    );
}

/// Linux refuses a leaf of the root tree that names a transaction behind the next one, and with it the
/// filesystem, which was called clean.
#[test]
fn mistake_22_transactions_of_the_future_in_the_root_tree_are_found() {
    type Edit<T> = fn(&mut T, u64);
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let fields: [(&str, Edit<RootItem>); 2] = [
        ("last_snapshot", |item, to| item.last_snapshot = to.into()),
        ("generation_v2", |item, to| item.generation_v2 = to.into()),
    ];
    for (field, edit) in fields {
        let image = Image::single();
        let root = image.subvolume("snap");
        let limit = image.superblock().generation.get() + 1;
        let place = image.root_item(root);
        image.edit::<RootItem>(&place, |item| edit(item, limit + 1));
        let (have, expect) = ((limit + 1).to_string(), format!("at most {limit}"));
        assert_eq!(
            image.expect(&["root-field"]),
            [Finding::RootField { root, field, have, expect }]
        );
        assert!(!image.is_mounted());
        image.edit::<RootItem>(&place, |item| edit(item, limit));
        image.expect(&[]);
        assert!(image.is_mounted());
    }

    let fields: [(&str, Edit<InodeItem>); 2] = [
        ("generation", |item, to| item.generation = to.into()),
        ("transid", |item, to| item.transid = to.into()),
    ];
    for (field, edit) in fields {
        let image = Image::single();
        let limit = image.superblock().generation.get() + 1;
        let place = image.item(ROOT_TREE, ObjectId::ROOT_TREE_DIR.0, KeyType::INODE_ITEM, 0);
        image.edit::<InodeItem>(&place, |item| edit(item, limit + 1));
        let (block, inode) = (place.block, InodeNo(place.key.objectid.0));
        let (have, limit) = (Generation(limit + 1), Generation(limit));
        assert_eq!(
            image.expect(&["inode-generation"]),
            [Finding::InodeGeneration { root: ROOT_TREE, block, inode, field, have, limit }]
        );
        assert!(!image.is_mounted());
        image.edit::<InodeItem>(&place, |item| edit(item, limit.0));
        image.expect(&[]);
        assert!(image.is_mounted());
    }
}
