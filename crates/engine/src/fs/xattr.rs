//! Extended attributes. ACLs and capabilities are some of them.

use ubtrfs_ondisk::KeyType;
use ubtrfs_ondisk::dir::DirEntries;
use ubtrfs_ondisk::hash::name_hash;

use super::inode::InodeId;
use crate::error::Result;
use crate::filesystem::Filesystem;

impl Filesystem {
    /// The value of an extended attribute, named with its namespace (`user.x`), or `None`.
    ///
    /// # Errors
    /// Damaged items, or the device's error.
    pub fn xattr(&self, id: InodeId, name: &[u8]) -> Result<Option<Vec<u8>>> {
        if id.is_stand_in() {
            return Ok(None);
        }
        let key = id.key(KeyType::XATTR_ITEM, name_hash(name));
        let Some(item) = self.tree(id.root)?.lookup(&key)? else {
            return Ok(None);
        };
        for entry in DirEntries::new(&item) {
            let entry = entry.map_err(|error| error.in_root(id.root))?;
            if entry.name == name {
                return Ok(Some(entry.data.to_vec()));
            }
        }
        Ok(None)
    }

    /// All extended attributes with their values, in the order of the tree.
    ///
    /// # Errors
    /// Damaged items, or the device's error.
    pub fn xattrs(&self, id: InodeId) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut xattrs = Vec::new();
        if id.is_stand_in() {
            return Ok(xattrs);
        }
        let mut cursor = self.tree(id.root)?.cursor();
        cursor.seek(&id.key(KeyType::XATTR_ITEM, 0))?;
        while let Some((key, data)) = cursor.current()? {
            if key.objectid != id.inode.object_id() || key.ty != KeyType::XATTR_ITEM {
                break;
            }
            for entry in DirEntries::new(data) {
                let entry = entry.map_err(|error| error.in_root(id.root))?;
                xattrs.push((entry.name.to_vec(), entry.data.to_vec()));
            }
            cursor.next()?;
        }
        Ok(xattrs)
    }
}
