//! Trees' shapes that random items seldom make.

use ubtrfs_ondisk::block::Block;
use ubtrfs_volume::MemDevice;

use super::*;

fn root_block(fs: &Filesystem) -> Arc<Block> {
    let tree = fs.tree(RootId::UUID_TREE).unwrap();
    let state = tree.read();
    state.block(&state.root, None, &tree.store).unwrap()
}

/// A node that was split while an item was inserted below its left half kept, for the leaf at that
/// half's end, the key at which the whole node had ended: the next keys, which belong to the right
/// half, went into that leaf.
#[test]
fn insert_behind_a_split_node_goes_to_the_right_half() {
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let fs = mkfs_on(&Arc::new(MemDevice::new(64 << 20)), &options);
    let mut model = contents(&fs);
    let mut put = |key: Key, len: usize| {
        insert(&fs, key, &vec![1; len]);
        model.insert(key, vec![1; len]);
    };
    // Four items fill a leaf but for some bytes; the root has room for one child more.
    let mut at = 0;
    let node = loop {
        put(key(at, 0), 800);
        at += 10;
        match &*root_block(&fs) {
            Block::Node(node) if node.len() + 1 == node.capacity() => break node.clone(),
            _ => {}
        }
    };
    let left_end = node.key(node.len() / 2);
    put(key(left_end.objectid.0 - 1, 0), 8);
    assert_eq!(root_block(&fs).level(), 2, "the root was split");
    put(key(left_end.objectid.0 + 1, 0), 8);
    assert!(contents(&fs) == model);
    let tree = fs.tree(RootId::UUID_TREE).unwrap();
    for key in model.keys() {
        assert!(tree.lookup(key).unwrap().is_some(), "{key}");
    }
}

/// A root that was split by an item before all others kept, in the new root, the first key that the
/// tree had had: the tree could not be read again, as a parent and its child disagreed.
#[test]
fn insert_before_all_others_lowers_the_key_in_a_new_root() {
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let device = Arc::new(MemDevice::new(64 << 20));
    let fs = mkfs_on(&device, &options);
    let mut model = contents(&fs);
    let mut at = 1_000_000;
    while root_block(&fs).level() < 2 {
        at -= 1;
        insert(&fs, key(at, 0), &[1; 800]);
        model.insert(key(at, 0), vec![1; 800]);
    }
    fs.commit().unwrap();
    drop(fs);
    let fs = open_on(device);
    assert!(contents(&fs) == model);
}

/// A cache that held less than a path from root to leaf made a search begin again for ever.
#[test]
fn search_with_a_cache_smaller_than_a_path_ends() {
    let device = Arc::new(MemDevice::new(64 << 20));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    let mut model = contents(&fs);
    for at in 0..3000 {
        insert(&fs, key(at, 0), &[7; 104]);
        model.insert(key(at, 0), vec![7; 104]);
    }
    fs.commit().unwrap();
    drop(fs);
    let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
    let options = OpenOptions { cache_bytes: 0, ..open_options() };
    let fs = Filesystem::open(volume, options).unwrap();
    assert!(contents(&fs) == model);
    assert!(contents_backward(&fs).iter().eq(model.keys()));
}
