//! Images made to exhaust whoever checks them: a check ends with a report, in bounded time and
//! memory.

mod common;

use common::image::Image;
use ubtrfs_check::CheckOptions;
use ubtrfs_ondisk::block::{Block, Leaf, NewBlock, Node};
use ubtrfs_ondisk::inode::InodeItem;
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::{Generation, Key, KeyType, LogicalAddr, ObjectId, RootId, Uuid};
use ubtrfs_testkit::{Ending, Limits, Oracle, oracle, run_limited};
use zerocopy::IntoBytes;

/// Blocks of which the larger ones consist.
const BLOCKS: usize = 450;

/// Names the damage to the process that makes and checks it.
const DAMAGE: &str = "UBTRFS_TEST_DAMAGE";

/// Has another process, with bounds, make the damage and check the image; returns the lines of
/// the report.
fn check_bounded(damage: &str, memory_bytes: u64) -> String {
    let limits = Limits { seconds: 60, memory_bytes };
    let program = std::env::current_exe().unwrap();
    let arguments = ["--exact", "checker_of_one_damage", "--nocapture"];
    let environment = [(DAMAGE, damage.as_ref())];
    let (ending, said) = run_limited(program.as_os_str(), arguments, &environment, limits);
    assert_eq!(ending, Ending::Exited(0), "{damage}:\n{said}");
    said
}

/// The other process.
#[test]
fn checker_of_one_damage() {
    let Ok(damage) = std::env::var(DAMAGE) else { return };
    let image = Image::single();
    match damage.as_str() {
        "same child often" => same_child_often(&image),
        "alternating bits" => alternating_bits(&image),
        "pointers to nowhere" => pointers_to_nowhere(&image),
        _ => panic!("{damage}"),
    }
    let volume = image.open(None);
    let report = common::check_twice(&volume, &CheckOptions::default()).unwrap();
    println!("{} errors\n{}", report.error_count, common::lines(&report));
}

/// A new block at a place of the image where none is yet.
fn new_block(image: &Image, at: LogicalAddr, generation: u64) -> NewBlock {
    let superblock = image.superblock();
    NewBlock {
        fsid: superblock.header_fsid(),
        chunk_tree_uuid: Uuid::NIL,
        bytenr: at,
        generation: Generation(generation),
        owner: RootId::FS_TREE,
        nodesize_bytes: superblock.nodesize.get() as usize,
    }
}

fn write(image: &Image, block: Block) {
    let mut block = block;
    block.seal(ubtrfs_ondisk::CsumType::Crc32c);
    image.write(block.bytenr(), block.as_bytes().into());
}

/// A leaf of inodes without names, and nodes each of whose pointers all lead to the one below.
fn same_child_often(image: &Image) {
    let generation = image.superblock().generation.get();
    let blocks = image.free_blocks(4);
    let mut leaf = Leaf::new(&new_block(image, blocks[0], generation));
    let item = InodeItem { generation: 1.into(), mode: 0o100_600.into(), ..InodeItem::default() };
    for number in 300.. {
        if leaf.free_bytes() < 200 {
            break;
        }
        let key = Key::new(ObjectId(number), KeyType::INODE_ITEM, 0);
        leaf.insert(leaf.len(), key, item.as_bytes().len()).copy_from_slice(item.as_bytes());
    }
    write(image, Block::Leaf(leaf));
    for (level, pair) in (1..).zip(blocks.windows(2)) {
        let mut node = Node::new(&new_block(image, pair[1], generation), level);
        for slot in 0..node.capacity() {
            let key = Key::new(ObjectId(300 + slot as u64), KeyType::INODE_ITEM, 0);
            node.insert(slot, key, pair[0], Generation(generation));
        }
        write(image, Block::Node(node));
    }
    lead_to(image, image.subvolume("snap"), blocks[3], 3);
}

/// Makes a tree begin at another block, of the superblock's generation.
fn lead_to(image: &Image, root: RootId, at: LogicalAddr, level: u8) {
    let generation = image.superblock().generation;
    image.edit::<RootItem>(&image.root_item(root), |item| {
        item.bytenr = at.0.into();
        item.generation = generation;
        item.generation_v2 = generation;
        item.level = level;
    });
}

/// What was seen of a child was joined once for each pointer to it, with the numbers of its inodes
/// that have no name: four blocks took 80 GB.
#[test]
fn same_child_in_every_slot_takes_bounded_memory() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let said = check_bounded("same child often", 1 << 30);
    assert!(said.contains("parent-disagrees"), "{said}");
}

/// Nodes with a child each of which leads on to children in no chunk.
fn pointers_to_nowhere(image: &Image) {
    let generation = image.superblock().generation.get();
    let mut blocks = image.free_blocks(BLOCKS);
    let top = blocks.pop().unwrap();
    let mut root = Node::new(&new_block(image, top, generation), 2);
    let mut number = 300;
    for at in blocks {
        let mut node = Node::new(&new_block(image, at, generation), 1);
        for slot in 0..node.capacity() {
            let key = Key::new(ObjectId(number), KeyType::INODE_ITEM, 0);
            if slot == 0 {
                root.insert(root.len(), key, at, Generation(generation));
            }
            let nowhere = LogicalAddr((1 << 50) + number * 16_384);
            node.insert(slot, key, nowhere, Generation(generation));
            number += 1;
        }
        write(image, Block::Node(node));
    }
    write(image, Block::Node(root));
    lead_to(image, image.subvolume("snap"), top, 2);
}

/// A free space tree of bitmaps in which every other bit is set.
fn alternating_bits(image: &Image) {
    let generation = image.superblock().generation.get();
    let mut blocks = image.free_blocks(BLOCKS);
    let top = blocks.pop().unwrap();
    let tree = RootId::FREE_SPACE_TREE;
    let owned = |at| NewBlock { owner: tree, ..new_block(image, at, generation) };
    let mut root = Node::new(&owned(top), 1);
    let bytes = [0x55; 16_000];
    let len = bytes.len() as u64 * 8 * 4096;
    for (index, at) in (0..).zip(blocks) {
        let key = Key::new(ObjectId((1 << 50) + index * len), KeyType::FREE_SPACE_BITMAP, len);
        let mut leaf = Leaf::new(&owned(at));
        leaf.insert(0, key, bytes.len()).copy_from_slice(&bytes);
        write(image, Block::Leaf(leaf));
        root.insert(root.len(), key, at, Generation(generation));
    }
    write(image, Block::Node(root));
    lead_to(image, tree, top, 1);
}

/// A bit took eight bytes while the tree was read.
#[test]
fn alternating_bits_take_bounded_memory() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let said = check_bounded("alternating bits", 256 << 20);
    assert!(said.contains("free-space-missing"), "{said}");
}

/// Each pointer's finding was held until all of a level were read.
#[test]
fn pointers_to_nowhere_take_bounded_memory() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let said = check_bounded("pointers to nowhere", 300 << 20);
    assert!(said.contains("unreadable-block"), "{said}");
}
