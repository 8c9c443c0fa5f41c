//! Which devices a filesystem has, asked of its chunk tree: so that what is missing has a name.

use ubtrfs_ondisk::block::Block;
use ubtrfs_ondisk::misc::{DevItem, OnDisk};
use ubtrfs_ondisk::verify::{self, Expect};
use ubtrfs_ondisk::{Generation, Key, KeyType, LogicalAddr, ObjectId, RootId};

use crate::error::Result;
use crate::volume::Volume;

/// Blocks of the chunk tree that are read at most. A leaf of the smallest node size holds 29
/// device items.
const BLOCK_COUNT_MAX: usize = 4096;

/// The device items of the chunk tree, as far as it can be read.
///
/// # Errors
/// `NoWholeCopy`, `MissingDevice` or `Io` when a block of the tree cannot be read.
pub(crate) fn device_items(volume: &Volume) -> Result<Vec<DevItem>> {
    let superblock = volume.superblock();
    let root = Expect {
        bytenr: LogicalAddr(superblock.chunk_root.get()),
        generation: Some(Generation(superblock.chunk_root_generation.get())),
        level: Some(superblock.chunk_root_level),
        first_key: None,
        owner: Some(RootId::CHUNK_TREE),
    };
    let mut items = Vec::new();
    // The last is the leftmost: device items are the first of the tree.
    let mut pending = vec![root];
    for _ in 0..BLOCK_COUNT_MAX {
        let Some(expect) = pending.pop() else { break };
        match read_block(volume, &expect)? {
            Block::Leaf(leaf) => {
                for slot in 0..leaf.len() {
                    if is_device(leaf.key(slot)) {
                        items.push(*DevItem::peek(leaf.data(slot))?);
                    } else if leaf.key(slot).objectid > ObjectId::DEV_ITEMS {
                        return Ok(items);
                    }
                }
            }
            Block::Node(node) => {
                let children = (0..node.len())
                    .filter(|slot| node.key(*slot).objectid <= ObjectId::DEV_ITEMS)
                    .map(|slot| Expect {
                        bytenr: node.child(slot),
                        generation: Some(node.child_generation(slot)),
                        level: expect.level.and_then(|level| level.checked_sub(1)),
                        first_key: Some(node.key(slot)),
                        owner: Some(RootId::CHUNK_TREE),
                    });
                pending.extend(children.rev());
            }
        }
    }
    Ok(items)
}

fn is_device(key: Key) -> bool {
    key.objectid == ObjectId::DEV_ITEMS && key.ty == KeyType::DEV_ITEM
}

fn read_block(volume: &Volume, expect: &Expect) -> Result<Block> {
    let geometry = volume.geometry();
    let mut bytes = vec![0; geometry.nodesize_bytes].into_boxed_slice();
    volume.read(expect.bytenr, &mut bytes, &|copy| {
        verify::block(copy.into(), &geometry, expect).map(drop)
    })?;
    Ok(verify::block(bytes, &geometry, expect)?)
}
