//! The edits against a model of vectors; after each edit the sealed bytes must verify again.

use proptest::prelude::*;

use super::*;
use crate::csum::CsumType;
use crate::key::KeyType;
use crate::types::ObjectId;
use crate::verify::{self, Expect, Geometry};

const NODESIZE_BYTES: usize = 4096;
const FSID: Uuid = Uuid([7; 16]);
const ADDRESS: LogicalAddr = LogicalAddr(0x40_0000);
const GENERATION: Generation = Generation(11);

fn new_block() -> NewBlock {
    NewBlock {
        fsid: FSID,
        chunk_tree_uuid: Uuid([9; 16]),
        bytenr: ADDRESS,
        generation: GENERATION,
        owner: RootId::CSUM_TREE,
        nodesize_bytes: NODESIZE_BYTES,
    }
}

/// Seals a copy of the block and puts its bytes through the checker.
fn verified(mut block: Block) -> Block {
    block.seal(CsumType::Crc32c);
    let geometry = Geometry {
        nodesize_bytes: NODESIZE_BYTES,
        sectorsize_bytes: 4096,
        csum: CsumType::Crc32c,
        fsid: FSID,
    };
    let expect = Expect {
        bytenr: ADDRESS,
        generation: Some(GENERATION),
        level: Some(block.level()),
        first_key: block.first_key(),
        owner: Some(RootId::CSUM_TREE),
    };
    verify::block(block.as_bytes().into(), &geometry, &expect).expect("an edited block verifies")
}

/// A key that no check of items knows, so that its data may be anything.
fn key(number: u16) -> Key {
    Key::new(ObjectId(u64::from(number)), KeyType::STRING_ITEM, 0)
}

type Items = Vec<(Key, Vec<u8>)>;

fn contents(leaf: &Leaf) -> Items {
    (0..leaf.len()).map(|slot| (leaf.key(slot), leaf.data(slot).to_vec())).collect()
}

fn used_bytes(items: &Items) -> usize {
    items.iter().map(|(_, data)| ITEM_BYTES + data.len()).sum()
}

fn check_leaf(leaf: &Leaf, model: &Items) {
    assert_eq!(&contents(leaf), model);
    assert_eq!(leaf.is_empty(), model.is_empty());
    assert_eq!(leaf.free_bytes(), leaf.capacity_bytes() - used_bytes(model));
    assert_eq!(leaf.used_bytes(0..leaf.len()), used_bytes(model));
    for (slot, (key, _)) in model.iter().enumerate() {
        assert_eq!(leaf.search(key), Ok(slot));
        let above = key.successor().expect("not the greatest");
        let next = model.get(slot + 1).is_some_and(|(key, _)| *key == above);
        assert_eq!(leaf.search(&above), if next { Ok(slot + 1) } else { Err(slot + 1) });
    }
    let Block::Leaf(again) = verified(Block::Leaf(leaf.clone())) else { panic!("a leaf") };
    assert_eq!(&contents(&again), model);
}

#[derive(Clone, Debug)]
enum LeafEdit {
    Insert { number: u16, len_bytes: usize, fill: u8 },
    Remove { first: usize, count: usize },
    Resize { slot: usize, len_bytes: usize, fill: u8 },
    RemoveFront { slot: usize, len_bytes: usize },
    SetKey { slot: usize },
    MoveTail { slot: usize },
    MoveHead { count: usize },
    Swap,
}

fn leaf_edit() -> impl Strategy<Value = LeafEdit> {
    let len = prop_oneof![3 => 0..80usize, 1 => 0..1500usize];
    // Few numbers meet again, and beside one another.
    let number = prop_oneof![0..8u16, any::<u16>()];
    prop_oneof![
        6 => (number, len.clone(), any::<u8>())
            .prop_map(|(number, len_bytes, fill)| LeafEdit::Insert { number, len_bytes, fill }),
        2 => (any::<usize>(), 0..5usize)
            .prop_map(|(first, count)| LeafEdit::Remove { first, count }),
        2 => (any::<usize>(), len.clone(), any::<u8>())
            .prop_map(|(slot, len_bytes, fill)| LeafEdit::Resize { slot, len_bytes, fill }),
        1 => (any::<usize>(), 0..80usize)
            .prop_map(|(slot, len_bytes)| LeafEdit::RemoveFront { slot, len_bytes }),
        1 => any::<usize>().prop_map(|slot| LeafEdit::SetKey { slot }),
        1 => any::<usize>().prop_map(|slot| LeafEdit::MoveTail { slot }),
        1 => any::<usize>().prop_map(|count| LeafEdit::MoveHead { count }),
        1 => Just(LeafEdit::Swap),
    ]
}

/// Two neighbours: the keys of `left` all lie below `boundary`, those of `right` at or above it.
struct Leaves {
    left: Leaf,
    right: Leaf,
    left_model: Items,
    right_model: Items,
    /// Whether edits of one leaf go to the right one.
    on_right: bool,
}

impl Leaves {
    fn new() -> Self {
        Self {
            left: Leaf::new(&new_block()),
            right: Leaf::new(&new_block()),
            left_model: Vec::new(),
            right_model: Vec::new(),
            on_right: false,
        }
    }

    fn current(&mut self) -> (&mut Leaf, &mut Items) {
        if self.on_right {
            (&mut self.right, &mut self.right_model)
        } else {
            (&mut self.left, &mut self.left_model)
        }
    }

    fn apply(&mut self, edit: &LeafEdit) {
        match *edit {
            LeafEdit::Insert { number, len_bytes, fill } => self.insert(number, len_bytes, fill),
            LeafEdit::Swap => self.on_right = !self.on_right,
            LeafEdit::MoveTail { slot } => {
                let slot = slot % (self.left.len() + 1);
                let moved = self.left_model[slot..].to_vec();
                if used_bytes(&moved) <= self.right.free_bytes() {
                    self.left.move_tail_to(slot, &mut self.right);
                    self.left_model.truncate(slot);
                    self.right_model.splice(0..0, moved);
                }
            }
            LeafEdit::MoveHead { count } => {
                let count = count % (self.right.len() + 1);
                let moved = self.right_model[..count].to_vec();
                if used_bytes(&moved) <= self.left.free_bytes() {
                    self.right.move_head_to(count, &mut self.left);
                    self.right_model.drain(..count);
                    self.left_model.extend(moved);
                }
            }
            _ => self.change(edit),
        }
        check_leaf(&self.left, &self.left_model);
        check_leaf(&self.right, &self.right_model);
    }

    fn insert(&mut self, number: u16, len_bytes: usize, fill: u8) {
        // Keys are above one another over both leaves.
        let key = key(number);
        let disordered = if self.on_right {
            self.left_model.last().is_some_and(|(last, _)| *last >= key)
        } else {
            self.right_model.first().is_some_and(|(first, _)| *first <= key)
        };
        if disordered {
            return;
        }
        let (leaf, model) = self.current();
        let Err(slot) = leaf.search(&key) else { return };
        assert_eq!(slot, model.partition_point(|(other, _)| *other < key));
        if leaf.free_bytes() < ITEM_BYTES + len_bytes {
            return;
        }
        leaf.insert(slot, key, len_bytes).fill(fill);
        model.insert(slot, (key, vec![fill; len_bytes]));
    }

    fn change(&mut self, edit: &LeafEdit) {
        let boundary = self.right_model.first().filter(|_| !self.on_right).map(|(key, _)| *key);
        let (leaf, model) = self.current();
        if model.is_empty() {
            return;
        }
        match *edit {
            LeafEdit::Remove { first, count } => {
                let first = first % model.len();
                let end = (first + count).min(model.len());
                leaf.remove(first..end);
                model.drain(first..end);
            }
            LeafEdit::Resize { slot, len_bytes, fill } => {
                let slot = slot % model.len();
                let old = model[slot].1.len();
                if len_bytes > old + leaf.free_bytes() {
                    return;
                }
                let data = leaf.resize(slot, len_bytes);
                assert_eq!(data.len(), len_bytes);
                if let Some(fresh) = data.get_mut(old..) {
                    fresh.fill(fill);
                }
                model[slot].1.resize(len_bytes, fill);
            }
            LeafEdit::RemoveFront { slot, len_bytes } => {
                let slot = slot % model.len();
                let len_bytes = len_bytes.min(model[slot].1.len());
                leaf.remove_front(slot, len_bytes);
                model[slot].1.drain(..len_bytes);
            }
            LeafEdit::SetKey { slot } => {
                let slot = slot % model.len();
                let next = Key { offset: model[slot].0.offset + 1, ..model[slot].0 };
                // No two items have one key: 65,536 numbers met that once in hundreds of runs.
                if model.get(slot + 1).map(|(key, _)| *key).or(boundary) == Some(next) {
                    return;
                }
                leaf.set_key(slot, next);
                model[slot].0 = next;
            }
            _ => unreachable!("the others concern both leaves"),
        }
    }
}

#[derive(Clone, Debug)]
enum NodeEdit {
    Insert { number: u16, on_right: bool },
    Remove { slot: usize, on_right: bool },
    SetChild { slot: usize, on_right: bool },
    MoveTail { slot: usize },
    MoveHead { count: usize },
}

fn node_edit() -> impl Strategy<Value = NodeEdit> {
    prop_oneof![
        6 => (any::<u16>(), any::<bool>())
            .prop_map(|(number, on_right)| NodeEdit::Insert { number, on_right }),
        1 => (any::<usize>(), any::<bool>())
            .prop_map(|(slot, on_right)| NodeEdit::Remove { slot, on_right }),
        1 => (any::<usize>(), any::<bool>())
            .prop_map(|(slot, on_right)| NodeEdit::SetChild { slot, on_right }),
        1 => any::<usize>().prop_map(|slot| NodeEdit::MoveTail { slot }),
        1 => any::<usize>().prop_map(|count| NodeEdit::MoveHead { count }),
    ]
}

type Children = Vec<(Key, LogicalAddr, Generation)>;

fn check_node(node: &Node, model: &Children) {
    let children: Children = (0..node.len())
        .map(|slot| (node.key(slot), node.child(slot), node.child_generation(slot)))
        .collect();
    assert_eq!(&children, model);
    for (slot, (key, ..)) in model.iter().enumerate() {
        assert_eq!(node.slot_for(key), slot);
        assert_eq!(node.slot_for(&key.successor().expect("not the greatest")), slot);
        assert_eq!(node.slot_for(&key.predecessor().expect("not the least")), slot.max(1) - 1);
    }
    if !model.is_empty() {
        assert_eq!(verified(Block::Node(node.clone())).len(), model.len());
    }
}

fn apply_node(nodes: &mut [Node; 2], models: &mut [Children; 2], edit: &NodeEdit) {
    match *edit {
        NodeEdit::Insert { number, on_right } => {
            let side = usize::from(on_right);
            // The upper half of the numbers is the right node's, so that both orders hold.
            let number = if on_right { number | 0x8000 } else { number & 0x7fff };
            let key = key(number.max(1));
            let slot = models[side].partition_point(|(other, ..)| *other < key);
            let taken = models.iter().flatten().any(|(other, ..)| *other == key);
            let disordered = models[1 - side].iter().any(|(other, ..)| (*other > key) == on_right);
            if taken || disordered || nodes[side].len() == nodes[side].capacity() {
                return;
            }
            let child = (LogicalAddr(u64::from(number) * 4096 + 4096), Generation(3));
            nodes[side].insert(slot, key, child.0, child.1);
            models[side].insert(slot, (key, child.0, child.1));
        }
        NodeEdit::Remove { slot, on_right } => {
            let side = usize::from(on_right);
            if !models[side].is_empty() {
                let slot = slot % models[side].len();
                nodes[side].remove(slot);
                models[side].remove(slot);
            }
        }
        NodeEdit::SetChild { slot, on_right } => {
            let side = usize::from(on_right);
            if !models[side].is_empty() {
                let slot = slot % models[side].len();
                nodes[side].set_child(slot, LogicalAddr(8192), Generation(5));
                models[side][slot].1 = LogicalAddr(8192);
                models[side][slot].2 = Generation(5);
            }
        }
        NodeEdit::MoveTail { slot } => {
            let slot = slot % (models[0].len() + 1);
            let moved = models[0][slot..].to_vec();
            if models[1].len() + moved.len() <= nodes[1].capacity() {
                let [left, right] = nodes;
                left.move_tail_to(slot, right);
                models[0].truncate(slot);
                models[1].splice(0..0, moved);
            }
        }
        NodeEdit::MoveHead { count } => {
            let count = count % (models[1].len() + 1);
            let moved = models[1][..count].to_vec();
            if models[0].len() + moved.len() <= nodes[0].capacity() {
                let [left, right] = nodes;
                right.move_head_to(count, left);
                models[1].drain(..count);
                models[0].extend(moved);
            }
        }
    }
    check_node(&nodes[0], &models[0]);
    check_node(&nodes[1], &models[1]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn leaf_after_any_edits_equals_the_model_and_verifies(
        edits in prop::collection::vec(leaf_edit(), 1..120),
    ) {
        let mut leaves = Leaves::new();
        for edit in &edits {
            leaves.apply(edit);
        }
    }

    #[test]
    fn node_after_any_edits_equals_the_model_and_verifies(
        edits in prop::collection::vec(node_edit(), 1..300),
    ) {
        let mut nodes = [Node::new(&new_block(), 1), Node::new(&new_block(), 1)];
        let mut models = [Children::new(), Children::new()];
        for edit in &edits {
            apply_node(&mut nodes, &mut models, edit);
        }
    }
}

#[test]
fn leaf_filled_in_order_takes_items_to_the_last_byte() {
    let mut leaf = Leaf::new(&new_block());
    let mut model = Items::new();
    while leaf.free_bytes() >= ITEM_BYTES {
        let len = (leaf.free_bytes() - ITEM_BYTES).min(200);
        let number = u16::try_from(model.len()).unwrap();
        leaf.insert(model.len(), key(number), len).fill(3);
        model.push((key(number), vec![3; len]));
    }
    assert!(leaf.free_bytes() < ITEM_BYTES);
    check_leaf(&leaf, &model);
}

#[test]
fn readdress_then_seal_makes_a_block_of_the_new_place() {
    let mut block = Block::Leaf(Leaf::new(&new_block()));
    block.seal(CsumType::Crc32c);
    assert!(block.is_written());
    block.readdress(LogicalAddr(0x80_0000), Generation(12), RootId::UUID_TREE);
    assert!(!block.is_written());
    assert_eq!(block.bytenr(), LogicalAddr(0x80_0000));
    assert_eq!(block.generation(), Generation(12));
    assert_eq!(block.owner(), RootId::UUID_TREE);
}

#[test]
#[should_panic(expected = "the item fits")]
fn leaf_insert_without_room_panics() {
    Leaf::new(&new_block()).insert(0, key(1), NODESIZE_BYTES);
}

#[test]
#[should_panic(expected = "room for a child")]
fn node_insert_without_room_panics() {
    let mut node = Node::new(&new_block(), 1);
    for number in 0..=u16::try_from(node.capacity()).unwrap() {
        node.insert(node.len(), key(number), LogicalAddr(4096), GENERATION);
    }
}
