//! Whether others show what a file's extents lie in: other file extents, or other trees by blocks that they share with the file's.
//!
//! Who asks of many extents in a row finds each where the one before was, or beside it: in the file's leaf, and in that of the extent tree.

use ubtrfs_ondisk::extent::BackRef;
use ubtrfs_ondisk::{FileOffset, LogicalAddr};
use ubtrfs_rt::Arc;

use super::file_io::IoInode;
use crate::btree::{Cursor, Path, Tree};
use crate::data::append::extent_key;
use crate::data::file_extent::{ExtentWalk, Mapping, MappingKind};
use crate::error::Result;
use crate::filesystem::Filesystem;

/// Looks at an extent beside others who change the tree, from each of which it is a few microseconds to the next.
const LOOKS_MAX: usize = 100;

/// What is known of one file while its extents are asked about. Who has it holds a handle, so that no commit moves references meanwhile, and
/// no snapshot is made.
pub(super) struct Sharing<'a> {
    fs: &'a Filesystem,
    inode: &'a IoInode,
    tree: Arc<Tree>,
    /// Where the last extent's references are, once there was one.
    references: Option<Cursor>,
    /// The last leaf, in which state of the tree, and whether others have the way to it, too.
    leaf: Option<(LogicalAddr, u64, bool)>,
}

impl<'a> Sharing<'a> {
    /// # Errors
    /// The file's tree cannot be read.
    pub(super) fn of(fs: &'a Filesystem, inode: &'a IoInode) -> Result<Self> {
        Ok(Self { fs, inode, tree: fs.tree(inode.id.root)?, references: None, leaf: None })
    }

    /// Whether others show what `found` lies in, which `walk` has just told.
    ///
    /// # Errors
    /// Damage, or a block that cannot be read.
    pub(super) fn is_shared(&mut self, walk: &ExtentWalk, found: &Mapping) -> Result<bool> {
        if !matches!(found.kind, MappingKind::Data | MappingKind::Prealloc) {
            return Ok(false);
        }
        let (path, version) = walk.way();
        let mut answer = self.is_shared_by(path, version, found);
        let mut seen = version;
        // What was seen of a way that is another by now is no proof: references by a block that was left are not known as the file's, and
        // what a block shared when the extent was looked at the extent may share when the block is.
        for _ in 0..LOOKS_MAX {
            if self.tree.version() == seen {
                break;
            }
            let key = extent_key(&self.inode.target(true), found.offset.0);
            let (path, version) = self.tree.search(&key)?;
            answer = self.is_shared_by(&path, version, found);
            seen = version;
        }
        answer
    }

    fn is_shared_by(&mut self, path: &Path, version: u64, found: &Mapping) -> Result<bool> {
        let leaf = path.first().map(|(leaf, _)| leaf.bytenr());
        let FileOffset(offset) = found.offset;
        let offset = offset.wrapping_sub(found.extent_offset);
        let is_own = |reference: &BackRef| match reference {
            BackRef::SharedData { parent, .. } => Some(*parent) == leaf,
            other => self.inode.is_own(other, offset),
        };
        let (start, len_bytes) = (found.disk_bytenr, found.disk_num_bytes);
        let core = &self.fs.inner.core;
        let references = match &mut self.references {
            Some(references) => references,
            none => none.insert(core.alloc.references(&core.roots)?),
        };
        Ok(core.alloc.is_data_shared(references, start, len_bytes, is_own)?
            || self.is_way_shared(path, version)?)
    }

    fn is_way_shared(&mut self, path: &Path, version: u64) -> Result<bool> {
        let Some((leaf, _)) = path.first() else { return Ok(false) };
        let leaf = leaf.bytenr();
        if let Some((known, seen, is_shared)) = self.leaf
            && (known, seen) == (leaf, version)
        {
            return Ok(is_shared);
        }
        let core = &self.fs.inner.core;
        let mut is_shared = false;
        // The root block is the tree's own.
        for (block, _) in path.iter().take(path.len().saturating_sub(1)) {
            if self.tree.may_share(block) {
                let refs = core.alloc.block_refs(&core.roots, block.bytenr(), block.level())?;
                is_shared |= refs.count > 1;
            }
        }
        self.leaf = Some((leaf, version, is_shared));
        Ok(is_shared)
    }
}
