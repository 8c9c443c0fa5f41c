//! What benchmarks time and no user calls: single operations on a tree. No part of the interface.

use ubtrfs_ondisk::{Key, KeyType, ObjectId, RootId};
use ubtrfs_rt::Arc;

use crate::btree::Tree;
use crate::error::Result;
use crate::filesystem::{Filesystem, Handle};

/// The tree whose items can have any key and length without harm to the filesystem.
const ROOT: RootId = RootId::UUID_TREE;

/// A tree to time.
#[derive(Debug)]
pub struct TreeProbe {
    tree: Arc<Tree>,
}

impl TreeProbe {
    /// The uuid tree of `fs`.
    ///
    /// # Errors
    /// A filesystem without one.
    pub fn new(fs: &Filesystem) -> Result<Self> {
        Ok(Self { tree: fs.tree(ROOT)? })
    }

    /// Inserts an item.
    ///
    /// # Errors
    /// What stops the edit.
    pub fn insert(&self, handle: &mut Handle<'_>, id: u64, offset: u64, data: &[u8]) -> Result<()> {
        handle.txn.insert(ROOT, key(id, offset), data)
    }

    /// Whether the item is there.
    ///
    /// # Errors
    /// A block that cannot be read.
    pub fn search(&self, id: u64, offset: u64) -> Result<bool> {
        Ok(self.tree.lookup(&key(id, offset))?.is_some())
    }

    /// Visits every item; returns how many there are.
    ///
    /// # Errors
    /// A block that cannot be read.
    pub fn walk(&self) -> Result<u64> {
        let mut cursor = self.tree.cursor();
        let mut count = 0;
        cursor.seek(&Key::MIN)?;
        while cursor.current()?.is_some() {
            count += 1;
            cursor.next()?;
        }
        Ok(count)
    }
}

fn key(id: u64, offset: u64) -> Key {
    Key::new(ObjectId(id), KeyType::UUID_KEY_SUBVOL, offset)
}
