//! Reading ahead of a cursor: the blocks that a walk will want next, in few requests.
//!
//! When a cursor comes to a new leaf, the leaves beside it in its node are known. Those not in
//! memory that lie side by side are read with one request each run, verified, and kept.

use ubtrfs_ondisk::Key;
use ubtrfs_ondisk::block::{Block, Node};

use super::read_beside::Request;
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
    /// Leaves behind the one stepped to, wherever they lie, by a thread that is there for that
    /// ([`Store::serve_reads`](super::Store::serve_reads)); none where there is no such thread.
    Beside,
}

/// Most bytes of leaves that are read ahead of one position.
const BUDGET_BYTES: usize = 256 * 1024;
/// How far from the block reached a block may lie to be worth reading, unless `ForwardAlways`.
const NEAR_BYTES: u64 = 1024 * 1024;

/// Reads ahead from `slot` of `node`.
pub(crate) fn around(tree: &Tree, node: &Block, slot: usize, mode: Readahead) {
    let Block::Node(node) = node else { return };
    let count = leaves_at_once(tree);
    let slots: Vec<usize> = match mode {
        Readahead::None | Readahead::Beside => return,
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
    let wanted: Vec<(BlockPtr, Key)> = slots
        .into_iter()
        .filter(|wanted| {
            let near = node.child(*wanted).0.abs_diff(node.child(slot).0) <= NEAR_BYTES;
            (near || mode == Readahead::ForwardAlways) && !is_present(tree, node, *wanted)
        })
        .map(|slot| (child_ptr(node, slot), node.key(slot)))
        .collect();
    tree.store.read_runs(wanted, tree.id, || true);
}

/// Asks for the leaves behind `slot` of `node`, a node of level 1, to which a walk has stepped: at
/// every half of what is read at once, so that the other half is there when it is asked for.
pub(crate) fn ask_beside(tree: &Tree, node: &Node, slot: usize) {
    let count = leaves_at_once(tree);
    if !slot.is_multiple_of(count / 2) || !tree.store.reads_beside(BUDGET_BYTES) {
        return;
    }
    let blocks: Vec<(BlockPtr, Key)> = (slot + 1..node.len().min(slot + 1 + count))
        .filter(|wanted| !is_present(tree, node, *wanted))
        .map(|slot| (child_ptr(node, slot), node.key(slot)))
        .collect();
    if !blocks.is_empty() {
        tree.store.ask_for(Request { root: tree.id, blocks });
    }
}

fn leaves_at_once(tree: &Tree) -> usize {
    (BUDGET_BYTES / tree.store.geometry().nodesize_bytes).max(2)
}

fn is_present(tree: &Tree, node: &Node, slot: usize) -> bool {
    let ptr = child_ptr(node, slot);
    tree.store.has(&ptr) || tree.read().dirty.contains_key(&ptr.addr)
}

/// What `node` says of the child in `slot`.
pub(crate) fn child_ptr(node: &Node, slot: usize) -> BlockPtr {
    BlockPtr {
        addr: node.child(slot),
        generation: node.child_generation(slot),
        level: node.header().level - 1,
    }
}
