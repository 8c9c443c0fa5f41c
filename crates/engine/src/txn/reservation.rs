//! Worst cases, by name: how much metadata an operation may need.

use ubtrfs_ondisk::block::LEVEL_COUNT_MAX;

/// Metadata that an operation may need at worst. Granted before it begins, so that no operation
/// runs out of space half way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reservation {
    items: u64,
    /// Bytes of items that are inserted side by side, their headers included.
    adjacent_bytes: u64,
}

impl Reservation {
    /// Inserting, changing or removing `count` items anywhere. Each may copy and split every block
    /// on its way: two blocks a level, as Linux reckons.
    pub const fn items(count: u64) -> Self {
        Self { items: count, adjacent_bytes: 0 }
    }

    /// Making a file, directory, node or symlink, with `xattr_count` xattrs: its inode, reference,
    /// two directory items and inline data, the directory's inode, and the xattrs.
    pub const fn create(xattr_count: u64) -> Self {
        Self::items(6 + xattr_count)
    }

    /// Appending `extent_count` extents to a file: the inode, and the file extents, which lie side
    /// by side. Checksums are kept back apart, as they are inserted later.
    pub const fn extents(extent_count: u64) -> Self {
        Self { items: 2, adjacent_bytes: extent_count * (25 + 53) }
    }

    /// Both of two operations.
    pub const fn and(self, other: Self) -> Self {
        Self {
            items: self.items + other.items,
            adjacent_bytes: self.adjacent_bytes + other.adjacent_bytes,
        }
    }

    /// Making a subvolume: root item, references, uuid items, its first inode, the names in its
    /// parent, and a root block.
    pub const fn create_subvolume() -> Self {
        Self::items(12)
    }

    /// Bytes of metadata.
    pub(crate) fn bytes(self, nodesize_bytes: u64) -> u64 {
        // Leaves of items side by side may end up half full, and each needs a pointer above.
        let adjacent = self.adjacent_bytes.div_ceil(nodesize_bytes / 2) * 2 * nodesize_bytes;
        self.items * nodesize_bytes * 2 * LEVEL_COUNT_MAX as u64 + adjacent
    }
}
