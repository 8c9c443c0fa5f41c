//! Worst cases, by name: how much metadata an operation may need.

use ubtrfs_ondisk::block::LEVEL_COUNT_MAX;

/// Metadata that an operation may need at worst. Granted before it begins, so that no operation
/// runs out of space half way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reservation {
    items: u64,
}

impl Reservation {
    /// Inserting, changing or removing `count` items anywhere. Each may copy and split every block
    /// on its way: two blocks a level, as Linux reckons.
    pub const fn items(count: u64) -> Self {
        Self { items: count }
    }

    /// Making a file, directory, node or symlink, with `xattr_count` xattrs: its inode, reference,
    /// two directory items and inline data, the directory's inode, and the xattrs.
    pub const fn create(xattr_count: u64) -> Self {
        Self::items(6 + xattr_count)
    }

    /// Appending `extent_count` extents to a file: a file extent and a checksum item each, and the
    /// inode.
    pub const fn extents(extent_count: u64) -> Self {
        Self::items(1 + 3 * extent_count)
    }

    /// Making a subvolume: root item, references, uuid items, its first inode, the names in its
    /// parent, and a root block.
    pub const fn create_subvolume() -> Self {
        Self::items(12)
    }

    /// Bytes of metadata.
    pub(crate) fn bytes(self, nodesize_bytes: u64) -> u64 {
        self.items * nodesize_bytes * 2 * LEVEL_COUNT_MAX as u64
    }
}
