//! Worst cases, by name: how much metadata an operation may need.

use ubtrfs_ondisk::block::LEVEL_COUNT_MAX;

/// Bytes of a pointer to a child in a node.
const CHILD_BYTES: u64 = 33;
/// Bytes of a file extent's item and its header.
const FILE_EXTENT_BYTES: u64 = 25 + 53;

/// What an operation leaves of the metadata that is kept back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leaves {
    /// All that is kept back for what frees space.
    ForFreeing,
    /// What one handle takes that stores dirty data: it was promised, but less than that was.
    ForStoring,
    /// Nothing: it was promised, or frees more than it takes.
    Nothing,
}

/// Metadata that an operation may need at worst. Granted before it begins, so that no operation
/// runs out of space half way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reservation {
    items: u64,
    /// Of them, those in trees that no snapshot shares.
    unshared_items: u64,
    /// Bytes of items that are inserted side by side, their headers included.
    adjacent_bytes: u64,
    /// Items that are removed, side by side.
    removals: u64,
    /// Data extents that may be freed by it.
    frees: u64,
    /// Data extents that are added, or references to some.
    adds: u64,
    /// It is what makes blocks shared.
    makes_shared: bool,
    leaves: Leaves,
}

impl Reservation {
    /// Inserting, changing or removing `count` items anywhere.
    pub const fn items(count: u64) -> Self {
        Self {
            items: count,
            unshared_items: 0,
            adjacent_bytes: 0,
            removals: 0,
            frees: 0,
            adds: 0,
            makes_shared: false,
            leaves: Leaves::ForFreeing,
        }
    }

    /// Making a file, directory, node or symlink, with `xattr_count` xattrs: its inode, reference,
    /// two directory items and inline data, the directory's inode, and the xattrs, with the three
    /// that it may inherit.
    pub const fn create(xattr_count: u64) -> Self {
        Self::items(9 + xattr_count)
    }

    /// Appending `extent_count` extents to a file: the inode, and the file extents, which lie side
    /// by side. What the commit needs for the extents themselves, and for their checksums, is with it.
    pub const fn extents(extent_count: u64) -> Self {
        Self {
            adjacent_bytes: extent_count * FILE_EXTENT_BYTES,
            adds: extent_count,
            ..Self::items(2)
        }
    }

    /// Making a tree of items of so many bytes anew, which may use what is kept back: nothing can be
    /// removed before.
    pub(crate) const fn rebuild(bytes: u64) -> Self {
        Self { adjacent_bytes: bytes, leaves: Leaves::Nothing, ..Self::items(16) }
    }

    /// With explicit holes, so many, between the extents of a file, which are moved for them.
    pub(crate) const fn with_holes(self, count: u64) -> Self {
        Self { adjacent_bytes: self.adjacent_bytes + 2 * count * FILE_EXTENT_BYTES, ..self }
    }

    /// With the checksums of the extents, so many bytes, which may become items under the same handle.
    pub(crate) const fn with_csums(self, bytes: u64) -> Self {
        Self { adjacent_bytes: self.adjacent_bytes + bytes, ..self }
    }

    /// Putting `extent_count` extents in the place of `old_count` in `part_count` ranges of a file.
    pub(crate) const fn storing(extent_count: u64, old_count: u64, part_count: u64) -> Self {
        let removals = Self::removals(old_count + 2 * part_count);
        Self::extents(extent_count + 2).and(Self::items(4)).and(removals)
    }

    /// Both of two operations.
    pub const fn and(self, other: Self) -> Self {
        Self {
            items: self.items + other.items,
            unshared_items: self.unshared_items + other.unshared_items,
            adjacent_bytes: self.adjacent_bytes + other.adjacent_bytes,
            removals: self.removals + other.removals,
            frees: self.frees + other.frees,
            adds: self.adds + other.adds,
            makes_shared: self.makes_shared || other.makes_shared,
            leaves: match (self.leaves, other.leaves) {
                (Leaves::ForFreeing, _) | (_, Leaves::ForFreeing) => Leaves::ForFreeing,
                (Leaves::ForStoring, _) | (_, Leaves::ForStoring) => Leaves::ForStoring,
                _ => Leaves::Nothing,
            },
        }
    }

    /// Making a subvolume: root item, references, uuid items, its first inode, the names in its
    /// parent, a root block, and what it inherits.
    pub const fn create_subvolume() -> Self {
        Self { unshared_items: 11, ..Self::items(15) }
    }

    /// Making a snapshot: as a subvolume, and the source's root item.
    pub const fn snapshot() -> Self {
        Self { unshared_items: 10, makes_shared: true, ..Self::items(14) }
    }

    /// Taking back up to `count` references of a tree that is dropped, which changes no block of the
    /// tree: its root item.
    pub(crate) const fn drops(count: u64) -> Self {
        Self { leaves: Leaves::Nothing, adjacent_bytes: count * 64, frees: count, ..Self::items(2) }
    }

    /// Removing a name: two directory items, the reference back, both inodes, an orphan item. It may
    /// use what is kept back from what does not free space.
    pub const fn remove_name() -> Self {
        Self { leaves: Leaves::Nothing, ..Self::items(7) }
    }

    /// Removing `count` items that lie side by side.
    pub const fn removals(count: u64) -> Self {
        Self { leaves: Leaves::Nothing, removals: count, frees: count, ..Self::items(2) }
    }

    /// Deleting a subvolume's name: its entries and references, its root item, an orphan item, its
    /// uuids, the directory's inode. As [`Reservation::remove_name`] it may use what is kept back.
    pub const fn delete_subvolume() -> Self {
        Self { leaves: Leaves::Nothing, unshared_items: 9, ..Self::items(12) }
    }

    /// Clearing flags of an inode that forbid to remove what is below it. It may use what is kept
    /// back, as a full filesystem could not be emptied otherwise.
    pub const fn allow_removal() -> Self {
        Self { leaves: Leaves::Nothing, ..Self::items(1) }
    }

    /// Making a subvolume writable, or another one the default: root item, two uuid items, the directory of roots. As
    /// [`Reservation::allow_removal`] it may use what is kept back.
    pub(crate) const fn allow_removal_in_subvolumes() -> Self {
        Self { leaves: Leaves::Nothing, unshared_items: 4, ..Self::items(4) }
    }

    /// For what was promised before: it may use what is kept back.
    pub(crate) const fn promised(self) -> Self {
        Self { leaves: Leaves::Nothing, ..self }
    }

    /// For what was promised, and must not take what others need whose data would be lost without: see [`Leaves::ForStoring`].
    pub(crate) const fn promised_behind_data(self) -> Self {
        Self { leaves: Leaves::ForStoring, ..self }
    }

    /// Renaming: two names taken away, two made, four inodes, an orphan item, a whiteout.
    pub const fn rename() -> Self {
        Self::items(24)
    }

    /// References that may be added where the blocks of the trees are shared with snapshots: copying
    /// such a block adds one for each that lies below it. Two nodes and a leaf for each item; items
    /// that lie side by side are in few blocks. And a block is copied once: there are no more than
    /// pointers and extents in `used_bytes` of metadata.
    pub(crate) fn shared_refs(self, nodesize_bytes: u64, used_bytes: u64) -> u64 {
        let node = nodesize_bytes / CHILD_BYTES;
        let leaf = nodesize_bytes / FILE_EXTENT_BYTES;
        let way = 2 * node + leaf;
        let removed = if self.removals > 0 { self.removals + leaf + way } else { 0 };
        let all = (self.items - self.unshared_items).saturating_mul(way).saturating_add(removed);
        all.min(used_bytes / CHILD_BYTES)
    }

    /// Data extents that may be added under its handle, or get references: what the commit then needs for them is kept back from the
    /// beginning.
    pub(crate) fn adds(self) -> u64 {
        self.adds
    }

    /// Whether blocks of trees may be shared although none is yet.
    pub(crate) fn makes_shared(self) -> bool {
        self.makes_shared
    }

    /// Data extents that may be freed under its handle: what the commit then needs for them is kept
    /// back from the beginning.
    pub(crate) fn frees(self) -> u64 {
        self.frees
    }

    /// What it leaves of the metadata that is kept back.
    pub(crate) fn leaves(self) -> Leaves {
        self.leaves
    }

    /// Bytes of metadata that may be needed, where `used_bytes` are in use.
    ///
    /// Linux reckons two blocks a level for each item. But all items of a transaction together
    /// copy no more than there is, as a block is copied once; and what is split is at most two
    /// leaves an item, and far fewer nodes, as each takes many splits below it to fill.
    pub(crate) fn bytes(self, nodesize_bytes: u64, used_bytes: u64) -> u64 {
        let levels = LEVEL_COUNT_MAX as u64;
        // What lies side by side lies in as many leaves at most, below few nodes.
        let removed = self.removals.saturating_mul(2 * nodesize_bytes);
        let copies = self.items.saturating_mul(levels * nodesize_bytes).saturating_add(removed);
        let copies = copies.min(used_bytes);
        let splits = self.items.saturating_mul(3 * nodesize_bytes);
        let splits = splits.saturating_add(2 * levels * nodesize_bytes);
        // Leaves of items side by side may end up half full, and each needs a pointer above.
        let leaves = self.adjacent_bytes.div_ceil(nodesize_bytes / 2);
        let adjacent = leaves.saturating_mul(2 * nodesize_bytes);
        copies.saturating_add(splits).saturating_add(adjacent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: u64 = 16 * 1024;

    #[test]
    fn bytes_on_a_full_filesystem_cover_every_level_of_each_item() {
        let one = Reservation::items(1).bytes(NODE, u64::MAX);
        assert!(one >= LEVEL_COUNT_MAX as u64 * 2 * NODE, "{one}");
        assert!(
            Reservation::items(10).bytes(NODE, u64::MAX)
                >= 10 * (LEVEL_COUNT_MAX as u64 + 2) * NODE
        );
    }

    #[test]
    fn bytes_of_many_items_on_a_small_filesystem_copy_no_more_than_there_is() {
        let small = Reservation::items(1000).bytes(NODE, 10 * NODE);
        assert!(small <= (3 * 1000 + 26) * NODE, "{small}");
    }

    #[test]
    fn shared_refs_cover_a_way_for_each_item_and_one_for_neighbours() {
        let way = 2 * (NODE / 33) + NODE / 78;
        assert_eq!(Reservation::items(3).shared_refs(NODE, u64::MAX), 3 * way);
        assert_eq!(Reservation::items(3).shared_refs(NODE, 2 * NODE), 2 * NODE / 33);
        let removals = Reservation::removals(64);
        assert!(removals.shared_refs(NODE, u64::MAX) < 4 * way + 64);
    }

    #[test]
    fn and_adds_both() {
        let both = Reservation::create(0).and(Reservation::extents(5));
        assert_eq!(both.items, Reservation::create(0).items + 2);
        assert_eq!(both.adjacent_bytes, 5 * 78);
        assert_eq!(both.adds, 5);
    }
}
