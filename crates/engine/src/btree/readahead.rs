//! Reading ahead of a cursor: the blocks that a walk will want next, in few requests.
//!
//! When a cursor comes to a new leaf, the leaves beside it in its node are known. Those not in
//! memory that lie side by side are read with one request each run, verified, and kept.

use ubtrfs_ondisk::Key;
use ubtrfs_ondisk::block::{Block, Node};

use super::store::BlockPtr;
use super::tree::Tree;

/// Which blocks a cursor reads before they are asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Readahead {
    /// None.
    #[default]
    None,
    /// Leaves before the one reached, near it on the volume.
    Back,
    /// Leaves behind the one reached, near it on the volume.
    Forward,
    /// The next blocks of every level, wherever they lie and even where the first is in memory:
    /// for walks of a whole tree.
    ForwardAlways,
}

/// Most bytes of leaves that are read ahead of one position.
const BUDGET_BYTES: usize = 256 * 1024;
/// How far from the block reached a block may lie to be worth reading, unless `ForwardAlways`.
const NEAR_BYTES: u64 = 1024 * 1024;

/// Reads ahead from `slot` of `node`.
pub(crate) fn around(tree: &Tree, node: &Block, slot: usize, mode: Readahead) {
    let Block::Node(node) = node else { return };
    let nodesize = tree.store.geometry().nodesize_bytes;
    let count = (BUDGET_BYTES / nodesize).max(2);
    let slots: Vec<usize> = match mode {
        Readahead::None => return,
        Readahead::Forward | Readahead::ForwardAlways => {
            (slot..node.len().min(slot + count)).collect()
        }
        Readahead::Back => (slot.saturating_sub(count - 1)..=slot).rev().collect(),
    };
    // A walk of everything keeps half the budget before it, so that it asks for the other half at
    // once and not for one block a step.
    let probe = match mode {
        Readahead::ForwardAlways => (slot + count / 2).min(node.len() - 1),
        _ => slot,
    };
    if is_present(tree, node, probe) {
        return;
    }
    let mut wanted: Vec<(BlockPtr, Key)> = slots
        .into_iter()
        .filter(|wanted| {
            let near = node.child(*wanted).0.abs_diff(node.child(slot).0) <= NEAR_BYTES;
            (near || mode == Readahead::ForwardAlways) && !is_present(tree, node, *wanted)
        })
        .map(|slot| (child_ptr(node, slot), node.key(slot)))
        .collect();
    wanted.sort_by_key(|(ptr, _)| ptr.addr);
    for run in wanted.chunk_by(|(a, _), (b, _)| a.addr.0 + nodesize as u64 == b.addr.0) {
        tree.store.read_run(run, tree.id);
    }
}

fn is_present(tree: &Tree, node: &Node, slot: usize) -> bool {
    let ptr = child_ptr(node, slot);
    tree.store.cached(&ptr, None).is_some() || tree.read().dirty.contains_key(&ptr.addr)
}

/// What `node` says of the child in `slot`.
pub(crate) fn child_ptr(node: &Node, slot: usize) -> BlockPtr {
    BlockPtr {
        addr: node.child(slot),
        generation: node.child_generation(slot),
        level: node.header().level - 1,
    }
}
