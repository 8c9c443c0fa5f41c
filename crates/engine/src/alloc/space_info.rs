//! Space by class, and the promises made of it.
//!
//! A handle is granted only when the loaded free space of metadata covers, besides what was
//! promised before: the operation's worst case, and what the commit will need to write down what
//! has happened so far (`commit_reserve_bytes`).

use ubtrfs_ondisk::LogicalAddr;

use super::{Allocator, State};
use crate::btree::Roots;
use crate::error::{Error, Result};
use crate::txn::Leaves;

/// What a block group is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    /// File data.
    Data,
    /// Trees, and data too where groups are mixed.
    Metadata,
    /// The chunk tree.
    System,
}

impl Class {
    pub(super) const COUNT: usize = 3;
    pub(super) const ALL: [Self; Self::COUNT] = [Self::Data, Self::Metadata, Self::System];

    pub(super) fn index(self) -> usize {
        match self {
            Self::Data => 0,
            Self::Metadata => 1,
            Self::System => 2,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Metadata => "metadata",
            Self::System => "the chunk tree",
        }
    }
}

/// One class's counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SpaceInfo {
    /// Free bytes of the groups whose free space is loaded.
    pub(super) loaded_free_bytes: u64,
    /// The group that the last allocation came from.
    pub(super) hint: LogicalAddr,
}

/// Blocks that a commit may have to copy whatever it holds: the way to a leaf, and its
/// neighbours, in each tree that it edits.
const COMMIT_BLOCKS_BASE: u64 = 96;
/// Bytes of extent tree and free space tree that the items of one metadata block lie in, where
/// leaves may be a quarter full.
const COMMIT_BYTES_A_METADATA_BLOCK: u64 = 384;
/// Leaves of the checksum tree that are copied where data is freed: the two ends of a range, and one
/// that is split between them.
const COMMIT_CSUM_BLOCKS_A_FREED_EXTENT: u64 = 3;
/// Bytes of items that one pending extent adds to the extent tree and the free space tree, where
/// leaves may end up half empty.
const COMMIT_BYTES_AN_EXTENT: u64 = 512;

/// Bytes that a reference added to an extent takes in the extent tree, where leaves may end up half
/// empty.
const COMMIT_BYTES_A_REF: u64 = 128;

/// Bytes of metadata that the commit may need for `ref_count` references added to extents that are
/// there: the copies of the leaves that they lie in, no more than there are, and the references.
pub(crate) fn bytes_of_refs(ref_count: u64, nodesize_bytes: u64, tree_bytes: u64) -> u64 {
    let copies = ref_count.saturating_mul(3 * nodesize_bytes).min(tree_bytes);
    copies.saturating_add(ref_count.saturating_mul(COMMIT_BYTES_A_REF))
}

/// Bytes of metadata that the commit may need for `add_count` data extents that are made, or get a reference, and `free_count` that were
/// there and are freed: the copies of leaves of the extent tree and the free space tree, and of the checksum tree, no more than there are;
/// and the new items.
pub(crate) fn bytes_of_extents(
    add_count: u64,
    free_count: u64,
    nodesize_bytes: u64,
    tree_bytes: u64,
    csum_tree_bytes: u64,
) -> u64 {
    let count = add_count.saturating_add(free_count);
    let csums = COMMIT_CSUM_BLOCKS_A_FREED_EXTENT * nodesize_bytes;
    let csums = count.saturating_mul(csums);
    // Each cut may split a leaf, too.
    let csums = csums.min(csum_tree_bytes.saturating_mul(2));
    let items = add_count.saturating_mul(COMMIT_BYTES_AN_EXTENT);
    bytes_of_refs(count, nodesize_bytes, tree_bytes).saturating_add(items).saturating_add(csums)
}

/// What the change of a leaf that a snapshot has, too, adds for good, in blocks: copies of it and of the node above; and the references of
/// the copies in the extent tree, half a block to each, four times, as that tree's size is in what a handle reserves.
const UNSHARED_LEAF_NODES: u64 = 6;

/// What the commit after an operation that frees space needs, for references that it drops.
const FREEING_COMMIT_BYTES: u64 = 4 << 20;
/// Of small filesystems no more than this part of all metadata.
const FREEING_RESERVE_PART: u64 = 3;

/// What an operation leaves of metadata.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    /// The worst case of one operation that frees space.
    pub(crate) freeing_bytes: u64,
    /// That of bringing a block of dirty data to the medium.
    pub(crate) storing_bytes: u64,
    /// What of it the operation leaves.
    pub(crate) by: Leaves,
}

impl State {
    /// Bytes of metadata that the commit may need for what is pending: the copies of the leaves
    /// that it touches, and the new items. Each pending extent touches three leaves. Each leaf so
    /// copied frees a block, whose items lie in other leaves, which are copied in turn: in the end
    /// those of all metadata. It is no more than all there are.
    fn commit_reserve_bytes(&self, nodesize_bytes: u64) -> u64 {
        let pending = self.refs.change_count() as u64 + self.caches.frees;
        let blocks = self.metadata_used_bytes / nodesize_bytes + self.allocated_blocks;
        let chained = if self.is_mixed { u64::MAX } else { blocks * COMMIT_BYTES_A_METADATA_BLOCK };
        let copies = (pending * 3 * nodesize_bytes).saturating_add(chained).min(self.tree_bytes);
        let csums = self.refs.old_data_count() as u64 * COMMIT_CSUM_BLOCKS_A_FREED_EXTENT;
        let blocks = (COMMIT_BLOCKS_BASE + csums) * nodesize_bytes;
        blocks + self.caches.commit_bytes + copies + pending * COMMIT_BYTES_AN_EXTENT
    }

    /// Bytes of metadata that only what frees space may use: `worst_bytes` of one such operation,
    /// and the commit that follows it, so that a full filesystem can be emptied.
    /// Who makes data dirty leaves as much, and what brings that to the medium takes `storing_bytes` of it.
    pub(super) fn freeing_reserve_bytes(&self, worst_bytes: u64) -> u64 {
        let bytes = worst_bytes.saturating_add(FREEING_COMMIT_BYTES);
        bytes.min(self.metadata_total_bytes / FREEING_RESERVE_PART).max(self.storing_bytes)
    }

    /// Bytes of metadata that stay free behind an operation, beside those that are promised.
    fn left_bytes(&self, left: Left) -> u64 {
        let for_freeing = || self.freeing_reserve_bytes(left.freeing_bytes);
        match left.by {
            Leaves::Nothing => 0,
            // Less than who looks before it whether there is room, also where that is a part of little.
            Leaves::ForStoring => self.storing_bytes.min(for_freeing()),
            Leaves::ForFreeing => for_freeing(),
        }
    }

    /// Bytes of metadata that are promised.
    pub(super) fn kept_bytes(&self, nodesize_bytes: u64) -> u64 {
        let kept = self.reserved_bytes.saturating_add(self.held_back_bytes);
        kept.saturating_add(self.commit_reserve_bytes(nodesize_bytes))
    }
}

impl Allocator {
    /// Promises `bytes` of metadata, loading groups and allocating chunks until they are there.
    /// Returns false where committing might free what is missing, or others give back what they do not need of what is promised to them.
    /// `left` says what stays free besides.
    /// `held_back` bytes will be needed by what is not yet in the trees, and `tree_bytes` is the
    /// size of those that only the commit edits.
    ///
    /// # Errors
    /// `NoSpace`; or what stops the loading of a group.
    pub(crate) fn reserve(
        &self,
        roots: &Roots,
        bytes: u64,
        held_back: u64,
        tree_bytes: u64,
        left: Left,
    ) -> Result<bool> {
        let nodesize = self.nodesize_bytes();
        loop {
            let (needed, free, may_become_free) = {
                let mut state = self.state();
                state.held_back_bytes = held_back;
                state.tree_bytes = tree_bytes;
                let free = state.spaces[Class::Metadata.index()].loaded_free_bytes;
                let mut needed = state.kept_bytes(nodesize).saturating_add(bytes);
                if state.is_mixed {
                    needed = needed.saturating_add(state.promised_data_bytes);
                }
                state.storing_bytes = left.storing_bytes;
                needed = needed.saturating_add(state.left_bytes(left));
                if needed <= free {
                    state.reserved_bytes += bytes;
                    return Ok(true);
                }
                let has_pinned = !state.pinned.is_empty() || state.refs.len() > 0;
                (needed, free, has_pinned || state.reserved_bytes > 0)
            };
            if self.load_free_space(roots, Class::Metadata)? {
                continue;
            }
            // Chunks are not made for what would not fit into all of them.
            let could_fit = needed <= free.saturating_add(self.unallocated_bytes(Class::Metadata));
            if could_fit && self.allocate_chunk(roots, Class::Metadata)? {
                continue;
            }
            self.read_spare(roots)?;
            if may_become_free || self.state().empty_spare().is_some() {
                return Ok(false);
            }
            return Err(Error::NoSpace {
                what: Class::Metadata.name(),
                needed_bytes: needed,
                available_bytes: free,
            });
        }
    }

    /// Bytes that what is pending adds to the extent tree and the free space tree.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.state().refs.change_count() as u64 * COMMIT_BYTES_AN_EXTENT
    }

    /// Bytes of metadata that so many changes of leaves which snapshots have, too, add for good. A leaf is copied once.
    pub(crate) fn unsharing_bytes(&self, change_count: u64) -> u64 {
        let nodesize = self.nodesize_bytes();
        // Where data is in the same groups, it is not known how many leaves there are.
        let used_bytes = if self.is_mixed { 0 } else { self.metadata_used_bytes() };
        change_count.min(used_bytes / nodesize).saturating_mul(UNSHARED_LEAF_NODES * nodesize)
    }

    /// Takes a promise back.
    pub(crate) fn unreserve(&self, bytes: u64) {
        let mut state = self.state();
        state.reserved_bytes = state.reserved_bytes.saturating_sub(bytes);
    }

    /// Free bytes of metadata that are loaded.
    #[cfg(test)]
    pub(crate) fn metadata_free_bytes(&self) -> u64 {
        self.state().spaces[Class::Metadata.index()].loaded_free_bytes
    }
}
