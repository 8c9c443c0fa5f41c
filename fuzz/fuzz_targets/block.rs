//! A block of any content: when the checker accepts it, everything that reads or edits blocks
//! must cope with it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ubtrfs_fuzz::{ADDRESS, NODESIZE_BYTES, geometry};
use ubtrfs_ondisk::block::{Block, ITEM_BYTES, Leaf, NewBlock, Node};
use ubtrfs_ondisk::{Generation, Key, RootId, Uuid, print};

fuzz_target!(|data: &[u8]| {
    let Ok(block) = ubtrfs_fuzz::block(data) else { return };
    let _ = print::block(&block);
    match block {
        Block::Leaf(leaf) => edit_leaf(leaf, data),
        Block::Node(node) => edit_node(node),
    }
});

fn new_block() -> NewBlock {
    NewBlock {
        fsid: geometry().fsid,
        chunk_tree_uuid: Uuid::NIL,
        bytenr: ADDRESS,
        generation: Generation(1),
        owner: RootId::FS_TREE,
        nodesize_bytes: NODESIZE_BYTES,
    }
}

fn contents(leaf: &Leaf) -> Vec<(Key, Vec<u8>)> {
    (0..leaf.len()).map(|slot| (leaf.key(slot), leaf.data(slot).to_vec())).collect()
}

/// Splits the leaf, joins it, and replaces each item by itself: nothing may change.
fn edit_leaf(mut leaf: Leaf, data: &[u8]) {
    let before = contents(&leaf);
    for (slot, (key, _)) in before.iter().enumerate() {
        assert_eq!(leaf.search(key), Ok(slot));
    }
    let mut right = Leaf::new(&new_block());
    let split = usize::from(data.first().copied().unwrap_or(0)) % (leaf.len() + 1);
    leaf.move_tail_to(split, &mut right);
    assert_eq!(leaf.len(), split);
    right.move_head_to(right.len(), &mut leaf);
    assert_eq!(contents(&leaf), before);
    for (slot, (key, content)) in before.iter().enumerate() {
        leaf.remove(slot..slot + 1);
        assert!(leaf.free_bytes() >= ITEM_BYTES + content.len());
        leaf.insert(slot, *key, content.len()).copy_from_slice(content);
        leaf.remove_front(slot, content.len() / 2);
        leaf.resize(slot, content.len()).copy_from_slice(content);
    }
    assert_eq!(contents(&leaf), before);
}

fn edit_node(mut node: Node) {
    let before = node.ptrs().to_vec();
    for (slot, ptr) in before.iter().enumerate() {
        assert_eq!(node.slot_for(&ptr.key.key()), slot);
    }
    let mut right = Node::new(&new_block(), 1);
    node.move_tail_to(before.len() / 2, &mut right);
    right.move_head_to(right.len(), &mut node);
    assert_eq!(node.ptrs(), before);
}
