//! Paths: from names to an inode, and back.

use rustc_hash::FxHashMap;
use ubtrfs_ondisk::root::RootRef;
use ubtrfs_ondisk::{Corruption, InodeNo, Key, KeyType, Reason, RootId};

use super::inode::{InodeId, Link};
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;

/// Deepest directory whose path is told; in a damaged filesystem parents may form a circle. Linux has
/// no limit.
pub(crate) const DEPTH_MAX: usize = 1 << 18;
/// Longest path of a subvolume that is told.
const PATH_BYTES_MAX: usize = 64 << 10;

/// Paths of subvolumes that were told before; `None` for one that has none, or is being looked for.
pub(crate) type SubvolumePaths = FxHashMap<RootId, Option<Vec<u8>>>;

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
        self.inner.files.settled(|| self.find_path_of(id), |_| false)
    }

    fn find_path_of(&self, id: InodeId) -> Result<Vec<u8>> {
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut here = id;
        while here != self.top_level() {
            here = self.step_up(here, &mut names)?;
        }
        names.reverse();
        Ok(names.join(&b'/'))
    }

    /// Adds a name of `id` to `names` and returns what holds it.
    fn step_up(&self, id: InodeId, names: &mut Vec<Vec<u8>>) -> Result<InodeId> {
        let link = self
            .name_of_directory(id)?
            .ok_or_else(|| Error::not_found(format!("a name of {id}")))?;
        if names.len() >= DEPTH_MAX {
            return Err(Corruption::new(Reason::BadValue)
                .in_root(id.root)
                .have(format!("{id} is below more than {DEPTH_MAX} directories"))
                .expect("parents that form no circle")
                .into());
        }
        names.push(link.name);
        Ok(link.parent)
    }

    /// The path of a subvolume, with the help of those told before; `None` where it has none.
    ///
    /// # Errors
    /// A block that cannot be read.
    pub(crate) fn subvolume_path(
        &self,
        root: RootId,
        told: &mut SubvolumePaths,
    ) -> Result<Option<Vec<u8>>> {
        let mut chain = Vec::new();
        let mut here = root;
        let mut path = loop {
            if here == RootId::FS_TREE {
                break Some(Vec::new());
            }
            if let Some(path) = told.get(&here) {
                break path.clone();
            }
            told.insert(here, None);
            match self.path_in_parent(here) {
                Ok((parent, path)) => {
                    chain.push((here, path));
                    here = parent;
                }
                // What has damaged parents has no path.
                Err(Error::NotFound { .. } | Error::Corrupt(_)) => break None,
                Err(error) => return Err(error),
            }
        };
        for (root, below) in chain.into_iter().rev() {
            path = path
                .map(|path| if path.is_empty() { below.clone() } else { [path, below].join(&b'/') })
                .filter(|path| path.len() <= PATH_BYTES_MAX);
            told.insert(root, path.clone());
        }
        Ok(path)
    }

    /// The subvolume that holds subvolume `root`, and the path in it.
    fn path_in_parent(&self, root: RootId) -> Result<(RootId, Vec<u8>)> {
        let mut names = Vec::new();
        let mut here = self.step_up(InodeId::root_of(root), &mut names)?;
        while here.inode != InodeNo::SUBVOLUME_ROOT {
            here = self.step_up(here, &mut names)?;
        }
        names.reverse();
        Ok((here.root, names.join(&b'/')))
    }

    /// The name by which a directory, or the first by which a file, is linked.
    pub(crate) fn name_of_directory(&self, id: InodeId) -> Result<Option<Link>> {
        if id.inode == InodeNo::SUBVOLUME_ROOT {
            return self.name_of_subvolume(id.root);
        }
        let links = self.inner.files.settled(|| self.find_links(id), |links| !links.is_empty())?;
        Ok(links.into_iter().next())
    }

    /// Where a subvolume is linked; `None` for the top level and for deleted ones.
    pub(crate) fn name_of_subvolume(&self, root: RootId) -> Result<Option<Link>> {
        self.inner.files.settled(|| self.find_name_of_subvolume(root), Option::is_some)
    }

    fn find_name_of_subvolume(&self, root: RootId) -> Result<Option<Link>> {
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
