//! What the last commit's trees remember of work that is to be gone on with, read block by block by
//! none of the engine's code.

use std::collections::{BTreeMap, BTreeSet};

use ubtrfs_ondisk::block::Block;
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::verify::{self, Expect};
use ubtrfs_ondisk::{Key, KeyType, LogicalAddr, ObjectId, RootId};
use ubtrfs_volume::Volume;

use crate::compare::Differs;

/// Inodes without a name, and deleted subvolumes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Remembered {
    /// Inodes that orphan items name, of each subvolume that is not deleted.
    pub(crate) orphans: BTreeMap<u64, BTreeSet<u64>>,
    /// Subvolumes whose trees are to be dropped, and whether that has begun.
    pub(crate) deleted: BTreeMap<u64, bool>,
}

impl Remembered {
    /// Reads it from a volume all of whose chunks are known, as that of an open filesystem.
    ///
    /// # Errors
    /// A block that cannot be read.
    pub(crate) fn of(volume: &Volume) -> Differs<Self> {
        let mut remembered = Self::default();
        let superblock = volume.superblock();
        let root = LogicalAddr(superblock.root.get());
        let first = Key::new(ObjectId(RootId::FS_TREE.0), KeyType::ROOT_ITEM, 0);
        let mut live = Vec::new();
        items_from(volume, root, &first, &mut |key, data| {
            let root = RootId(key.objectid.0);
            if key.ty != KeyType::ROOT_ITEM || !root.is_subvolume() {
                return;
            }
            let Ok(item) = RootItem::parse(data) else { return };
            match item.refs.get() {
                0 => {
                    let begun = item.drop_progress.key() != Key::MIN;
                    remembered.deleted.insert(root.0, begun);
                }
                _ => live.push((root.0, LogicalAddr(item.bytenr.get()))),
            }
        })?;
        let first = Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, 0);
        for (root, at) in live {
            items_from(volume, at, &first, &mut |key, _| {
                if key.objectid == ObjectId::ORPHAN && key.ty == KeyType::ORPHAN_ITEM {
                    remembered.orphans.entry(root).or_default().insert(key.offset);
                }
            })?;
        }
        Ok(remembered)
    }
}

/// All items of a tree from `first` on, in order.
fn items_from(
    volume: &Volume,
    root: LogicalAddr,
    first: &Key,
    each: &mut dyn FnMut(Key, &[u8]),
) -> Differs {
    // The next to be read is the last.
    let mut left = vec![root];
    while let Some(at) = left.pop() {
        let expect =
            Expect { bytenr: at, generation: None, level: None, first_key: None, owner: None };
        match block(volume, &expect)? {
            Block::Leaf(leaf) => {
                for slot in 0..leaf.len() {
                    let key = leaf.key(slot);
                    if key >= *first {
                        each(key, leaf.data(slot));
                    }
                }
            }
            Block::Node(node) if node.is_empty() => {}
            Block::Node(node) => {
                let slots = node.slot_for(first)..node.len();
                left.extend(slots.rev().map(|slot| node.child(slot)));
            }
        }
    }
    Ok(())
}

/// A block as it is expected, from whichever copy is whole.
///
/// # Errors
/// What is wrong with the last copy.
pub(crate) fn block(volume: &Volume, expect: &Expect) -> Differs<Block> {
    let geometry = volume.geometry();
    let mut bytes = vec![0; geometry.nodesize_bytes];
    let judge = |copy: &[u8]| verify::block(copy.into(), &geometry, expect).map(drop);
    volume.read(expect.bytenr, &mut bytes, &judge).map_err(|error| error.to_string())?;
    verify::block(bytes.into(), &geometry, expect).map_err(|error| error.to_string())
}
