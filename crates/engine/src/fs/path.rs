//! Paths: from names to an inode, and back.

use ubtrfs_ondisk::root::RootRef;
use ubtrfs_ondisk::{Corruption, InodeNo, Key, KeyType, Reason, RootId};

use super::inode::{InodeId, Link};
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;

/// Deepest directory whose path is told; in a damaged filesystem parents may form a circle.
const DEPTH_MAX: usize = 16 << 10;

impl Filesystem {
    /// Goes from `start` along `path`, whose components are separated by `/`; empty ones and `.`
    /// stay, `..` goes to the parent, also out of a subvolume, and at the top level stays. A
    /// symbolic link is not followed: as the last component it is the answer, before it an error.
    ///
    /// # Errors
    /// `NotFound` and `NotDirectory`.
    pub fn resolve(&self, start: InodeId, path: &[u8]) -> Result<InodeId> {
        let mut here = start;
        // The way that was come: what `..` goes back, also from a stand-in, which knows no parent.
        let mut way = Vec::new();
        for component in path.split(|byte| *byte == b'/') {
            here = match component {
                b"" | b"." => here,
                b".." => match way.pop() {
                    Some(parent) => {
                        self.directory(here)?;
                        parent
                    }
                    None => self.parent(here)?,
                },
                name => {
                    let next = self.lookup(here, name)?;
                    way.push(here);
                    next
                }
            };
        }
        if path.ends_with(b"/") {
            self.directory(here)?;
        }
        Ok(here)
    }

    /// The directory that holds directory `dir`; of the top level, itself; of a stand-in, the root
    /// of its subvolume, since all of one subvolume are the same inode.
    ///
    /// # Errors
    /// `NotDirectory` when `dir` is none, `NotFound` when nothing holds it.
    pub fn parent(&self, dir: InodeId) -> Result<InodeId> {
        self.directory(dir)?;
        if dir.is_stand_in() {
            return Ok(InodeId::root_of(dir.root));
        }
        match self.name_of_directory(dir)? {
            Some(link) => Ok(link.parent),
            None if dir == self.top_level() => Ok(dir),
            None => Err(Error::not_found(format!("the parent of {dir}"))),
        }
    }

    /// A path from the top level to `id`: of several hard links the first. Empty for the top level
    /// itself, else without a leading `/`.
    ///
    /// # Errors
    /// `NotFound` when it is not linked (deleted, or in a subvolume that is), `Corrupt` when
    /// parents form a circle.
    pub fn path_of(&self, id: InodeId) -> Result<Vec<u8>> {
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut here = id;
        while here != self.top_level() {
            let link = self
                .name_of_directory(here)?
                .ok_or_else(|| Error::not_found(format!("a name of {here}")))?;
            if names.len() >= DEPTH_MAX {
                return Err(Corruption::new(Reason::BadValue)
                    .in_root(id.root)
                    .have(format!("{id} more than {DEPTH_MAX} directories deep"))
                    .expect("parents that form no circle")
                    .into());
            }
            names.push(link.name);
            here = link.parent;
        }
        names.reverse();
        Ok(names.join(&b'/'))
    }

    /// The name by which a directory, or the first by which a file, is linked.
    fn name_of_directory(&self, id: InodeId) -> Result<Option<Link>> {
        if id.inode == InodeNo::SUBVOLUME_ROOT {
            return self.name_of_subvolume(id.root);
        }
        Ok(self.links(id)?.into_iter().next())
    }

    /// Where a subvolume is linked; `None` for the top level and for deleted ones.
    pub(crate) fn name_of_subvolume(&self, root: RootId) -> Result<Option<Link>> {
        let mut cursor = self.tree(RootId::ROOT_TREE)?.cursor();
        cursor.seek(&Key::new(root.object_id(), KeyType::ROOT_BACKREF, 0))?;
        match cursor.current()? {
            Some((key, data))
                if key.objectid == root.object_id() && key.ty == KeyType::ROOT_BACKREF =>
            {
                let (root_ref, name) =
                    RootRef::parse(data).map_err(|error| error.in_root(RootId::ROOT_TREE))?;
                let parent =
                    InodeId { root: RootId(key.offset), inode: InodeNo(root_ref.dirid.get()) };
                let index = root_ref.sequence.get();
                Ok(Some(Link { parent, index, name: name.to_vec() }))
            }
            _ => Ok(None),
        }
    }

    /// Whether `dir` holds subvolume `child` by that name: entries in a snapshot name subvolumes
    /// that are linked where the snapshot was taken from.
    pub(crate) fn is_child(&self, dir: InodeId, child: RootId, name: &[u8]) -> Result<bool> {
        let key = Key::new(dir.root.object_id(), KeyType::ROOT_REF, child.0);
        let Some(item) = self.tree(RootId::ROOT_TREE)?.lookup(&key)? else {
            return Ok(false);
        };
        let (root_ref, have) =
            RootRef::parse(&item).map_err(|error| error.in_root(RootId::ROOT_TREE))?;
        Ok(root_ref.dirid.get() == dir.inode.0 && have == name && self.root_item(child)?.is_some())
    }
}
