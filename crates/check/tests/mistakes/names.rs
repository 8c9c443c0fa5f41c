//! 20: names.

use ubtrfs_check::{Finding, Name};
use ubtrfs_ondisk::dir::DirItem;
use ubtrfs_ondisk::hash::{extref_hash, name_hash};
use ubtrfs_ondisk::inode::write_extref;
use ubtrfs_ondisk::{InodeNo, Key, KeyType, ObjectId, RootId};
use ubtrfs_testkit::{Oracle, oracle};

use crate::common::image::{Image, Place};

const FS_TREE: RootId = RootId::FS_TREE;
const NAME: &str = "file-50";

/// The three items of a file in a directory: by hash, by index, and the inode's.
struct Entry {
    directory: InodeNo,
    inode: InodeNo,
    index: u64,
    item: Place,
    indexed: Place,
    reference: Place,
}

fn entry(image: &Image) -> Entry {
    let directory = image.inode(FS_TREE, "directory");
    let hash = name_hash(NAME.as_bytes());
    let item = image.item(FS_TREE, directory, KeyType::DIR_ITEM, hash);
    let inode = u64::from_le_bytes(item.data[..8].try_into().unwrap());
    let indexed = image.find(FS_TREE, |key, data| {
        (key.objectid.0, key.ty) == (directory, KeyType::DIR_INDEX) && data[..8] == item.data[..8]
    });
    let reference = image.item(FS_TREE, inode, KeyType::INODE_REF, directory);
    Entry {
        directory: InodeNo(directory),
        inode: InodeNo(inode),
        index: indexed.key.offset,
        item,
        indexed,
        reference,
    }
}

fn name() -> Name {
    Name(NAME.as_bytes().to_vec())
}

#[test]
fn mistake_20_missing_dir_item_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let entry = entry(&image);
    image.remove(&entry.item);
    let directory = entry.directory;
    assert_eq!(
        image.expect(&["dir-item-missing"]),
        [Finding::DirItemMissing { root: FS_TREE, directory, name: name() }]
    );
}

#[test]
fn mistake_20_missing_dir_index_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let entry = entry(&image);
    image.remove(&entry.indexed);
    let directory = entry.directory;
    assert_eq!(
        image.expect(&["dir-index-missing"]),
        [Finding::DirIndexMissing { root: FS_TREE, directory, name: name() }]
    );
}

#[test]
fn mistake_20_missing_inode_ref_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let Entry { directory, inode, index, reference, .. } = entry(&image);
    image.remove(&reference);
    // The link counts one name more than there is.
    let found = image.expect(&["inode-links", "inode-ref-missing"]);
    let name = name();
    assert_eq!(found[1], Finding::InodeRefMissing { root: FS_TREE, directory, name, index, inode });
}

#[test]
fn mistake_20_missing_directory_entry_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let Entry { directory, inode, index, item, .. } = entry(&image);
    image.remove(&item);
    image.remove(&entry_index(&image, directory, index));
    // The size counts the name.
    let found = image.expect(&["directory-size", "dir-entry-missing"]);
    let name = name();
    assert_eq!(found[1], Finding::DirEntryMissing { root: FS_TREE, directory, name, index, inode });
}

fn entry_index(image: &Image, directory: InodeNo, index: u64) -> Place {
    image.item(FS_TREE, directory.0, KeyType::DIR_INDEX, index)
}

#[test]
fn mistake_20_entries_that_lead_to_different_inodes_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let entry = entry(&image);
    image.edit::<DirItem>(&entry.item, |item| item.location.objectid += 1);
    let found = image.expect(&["dir-entries-differ"]);
    assert!(matches!(
        &found[0],
        Finding::DirEntriesDiffer { root: FS_TREE, directory, name: found, .. }
            if *directory == entry.directory && *found == name()
    ));
}

#[test]
fn mistake_20_wrong_file_type_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let entry = entry(&image);
    image.edit::<DirItem>(&entry.item, |item| item.ty = 7);
    image.edit::<DirItem>(&entry.indexed, |item| item.ty = 7);
    assert_eq!(
        image.expect(&["file-type-differs"]),
        [Finding::FileTypeDiffers {
            root: FS_TREE,
            directory: entry.directory,
            name: name(),
            have: 7,
            expect: 1,
        }]
    );
}

#[test]
fn mistake_20_wrong_index_in_the_inode_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let Entry { directory, inode, index, reference, .. } = entry(&image);
    image.edit_leaf(reference.block, |leaf| {
        leaf.data_mut(reference.slot)[..8].copy_from_slice(&(index + 1000).to_le_bytes());
    });
    assert_eq!(
        image.expect(&["inode-ref-missing", "dir-entry-missing"]),
        [
            Finding::InodeRefMissing { root: FS_TREE, directory, name: name(), index, inode },
            Finding::DirEntryMissing {
                root: FS_TREE,
                directory,
                name: name(),
                index: index + 1000,
                inode,
            },
        ]
    );
}

/// Only the top directory names itself.
#[test]
fn inode_that_only_names_itself_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let Entry { directory, inode, index, item, reference, .. } = entry(&image);
    image.remove(&item);
    image.remove(&entry_index(&image, directory, index));
    let key = Key::new(reference.key.objectid, KeyType::INODE_REF, inode.0);
    image.edit_leaf(reference.block, |leaf| leaf.set_key(reference.slot, key));
    let found = image.expect(&["directory-size", "dir-entry-missing"]);
    let (name, directory) = (name(), inode);
    assert_eq!(found[1], Finding::DirEntryMissing { root: FS_TREE, directory, name, index, inode });
    image.expect_theirs();
}

#[test]
fn mistake_20_name_that_is_there_twice_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    // Twice by index.
    let image = Image::single();
    let Entry { directory, inode, indexed, .. } = entry(&image);
    let index = 100_000;
    let key = Key::new(ObjectId(directory.0), KeyType::DIR_INDEX, index);
    image.insert(FS_TREE, key, &indexed.data);
    // The second has no counterpart in the inode.
    assert_eq!(
        image.expect(&["duplicate-name", "inode-ref-missing"]),
        [
            Finding::DuplicateName { root: FS_TREE, inode: directory, name: name() },
            Finding::InodeRefMissing { root: FS_TREE, directory, name: name(), index, inode },
        ]
    );
    // Twice by hash, where the leaf has room.
    let image = Image::single();
    let roomy = |item: &Place| {
        let leaves = image.leaves(FS_TREE);
        let mut leaves = leaves.iter().map(|(leaf, _)| leaf);
        leaves.any(|leaf| leaf.header().bytenr.get() == item.block.0 && leaf.free_bytes() > 100)
    };
    let items = image.items(FS_TREE);
    let place = items.iter().find(|item| item.key.ty == KeyType::DIR_ITEM && roomy(item)).unwrap();
    let len = place.data.len();
    image.edit_leaf(place.block, |leaf| {
        leaf.resize(place.slot, 2 * len)[len..].copy_from_slice(&place.data);
    });
    let inode = InodeNo(place.key.objectid.0);
    let name = Name(place.data[30..].to_vec());
    assert_eq!(
        image.expect(&["duplicate-name"]),
        [Finding::DuplicateName { root: FS_TREE, inode, name }]
    );
}

/// Of many wrong names a part is told, and that there are more: only that part is kept.
#[test]
fn more_wrong_names_than_are_told_are_said_to_be_more() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let directory = image.inode(FS_TREE, "directory");
    let entries: Vec<Place> = image
        .items(FS_TREE)
        .into_iter()
        .filter(|item| item.key.objectid.0 == directory)
        .filter(|item| matches!(item.key.ty, KeyType::DIR_ITEM | KeyType::DIR_INDEX))
        .collect();
    for place in &entries {
        image.edit::<DirItem>(place, |item| item.ty = 7);
    }
    let report = image.check();
    let kinds: Vec<&str> = report.errors().map(Finding::kind).collect();
    let (last, told) = kinds.split_last().unwrap();
    assert_eq!(*last, "names-disagree");
    assert!(told.iter().all(|kind| *kind == "file-type-differs"), "{told:?}");
    assert!((64..entries.len() / 2).contains(&told.len()), "{}", told.len());
}

#[test]
fn extended_reference_whose_key_is_not_its_hash_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let Entry { directory, index, reference, .. } = entry(&image);
    let expect = extref_hash(directory, NAME.as_bytes());
    let key = Key::new(reference.key.objectid, KeyType::INODE_EXTREF, expect + 1);
    let mut data = Vec::new();
    write_extref(&mut data, directory, index, NAME.as_bytes());
    image.remove(&reference);
    let Place { block, slot, .. } = image.insert(FS_TREE, key, &data);
    let slot = slot as u64;
    assert_eq!(
        image.expect(&["extref-hash"]),
        [Finding::ExtrefHash { root: FS_TREE, block, slot, key, name: name(), expect }]
    );
}

#[test]
fn top_directory_that_is_missing_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    use ubtrfs_ondisk::root::RootItem;
    let image = Image::single();
    let root = image.subvolume("snap");
    // A tree that begins in its middle: its first leaves are cut off.
    let (leaf, _) = image.leaves(root).remove(2);
    let place = image.root_item(root);
    image.edit::<RootItem>(&place, |item| {
        item.bytenr = leaf.header().bytenr;
        item.generation = leaf.header().generation;
        item.generation_v2 = leaf.header().generation;
        item.level = 0;
    });
    let report = image.check();
    let block = ubtrfs_ondisk::LogicalAddr(leaf.header().bytenr.get());
    let missing = Finding::InodeMissing { root, block, inode: InodeNo(256) };
    assert!(report.errors().any(|finding| *finding == missing));
}

#[test]
fn inode_that_is_missing_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let Entry { inode, .. } = entry(&image);
    let place = image.item(FS_TREE, inode.0, KeyType::INODE_ITEM, 0);
    image.remove(&place);
    // The structural verifier sees that the inode's other items follow those of another.
    let found = image.expect(&["bad-block", "inode-missing"]);
    let block = place.block;
    assert_eq!(found[1], Finding::InodeMissing { root: FS_TREE, block, inode });
}
