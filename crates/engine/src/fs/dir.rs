//! Directories: finding a name by its hash, listing names by their index.

use ubtrfs_ondisk::dir::{DirEntries, DirEntry as DiskEntry, FileType};
use ubtrfs_ondisk::hash::name_hash;
use ubtrfs_ondisk::{Corruption, InodeNo, Key, KeyType, Reason, RootId};

use super::inode::InodeId;
use crate::btree::Cursor;
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;

/// A name in a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirEntry {
    /// The name.
    pub name: Vec<u8>,
    /// Its place in the directory's order, from 2 on; what to go on from.
    pub index: u64,
    /// What it names; of a subvolume, that one's root directory.
    pub target: InodeId,
    /// What kind of thing that is.
    pub file_type: FileType,
}

/// The names of a directory in the order of their index. Names made or removed meanwhile may or
/// may not be told; all others are, once, but that what changes places meanwhile may be told twice.
#[derive(Debug)]
pub struct ReadDir {
    filesystem: Filesystem,
    dir: InodeId,
    cursor: Cursor,
    /// What is told next has no index below.
    next_index: u64,
    done: bool,
}

impl Filesystem {
    /// What `name` in directory `dir` names. A subvolume's name leads to its root directory, or to
    /// a stand-in where the subvolume does not belong here: in a snapshot of its parent.
    ///
    /// # Errors
    /// `NotFound` when there is no such name, `NotDirectory` when `dir` is none.
    pub fn lookup(&self, dir: InodeId, name: &[u8]) -> Result<InodeId> {
        let is_sure = |found: &Option<(InodeId, FileType)>| {
            found.is_some_and(|(target, _)| !target.is_stand_in())
        };
        let found = self.inner.files.settled(|| self.find_entry(dir, name), is_sure)?;
        if let Some((target, _)) = found {
            return Ok(target);
        }
        self.directory(dir)?;
        Err(Error::not_found(format!("{:?} in {dir}", String::from_utf8_lossy(name))))
    }

    /// As [`Filesystem::lookup`], with the entry's type, and `None` when there is no such name. While others replace it, there may be none, or it
    /// leads to a stand-in.
    pub(crate) fn find_entry(
        &self,
        dir: InodeId,
        name: &[u8],
    ) -> Result<Option<(InodeId, FileType)>> {
        let key = dir.key(KeyType::DIR_ITEM, name_hash(name));
        let Some(item) = self.tree(dir.root)?.lookup(&key)? else {
            return Ok(None);
        };
        for entry in DirEntries::new(&item) {
            let entry = entry.map_err(|error| error.in_root(dir.root))?;
            if entry.name == name {
                return Ok(Some((self.target_of(dir, &entry)?, entry.file_type())));
            }
        }
        Ok(None)
    }

    fn target_of(&self, dir: InodeId, entry: &DiskEntry<'_>) -> Result<InodeId> {
        let location = entry.item.location.key();
        match location.ty {
            KeyType::INODE_ITEM => {
                Ok(InodeId { root: dir.root, inode: InodeNo(location.objectid.0) })
            }
            KeyType::ROOT_ITEM => {
                let child = RootId(location.objectid.0);
                if self.is_child(dir, child, entry.name)? {
                    Ok(InodeId::root_of(child))
                } else {
                    Ok(InodeId::stand_in(dir.root))
                }
            }
            _ => Err(Corruption::new(Reason::BadKey)
                .in_root(dir.root)
                .have(format!("an entry of {dir} that names {location}"))
                .expect("an inode or a root")
                .into()),
        }
    }

    /// The names of directory `dir`, from the first whose index is above `after_index` on; 0 for
    /// all.
    ///
    /// # Errors
    /// `NotDirectory` when `dir` is none.
    pub fn read_dir(&self, dir: InodeId, after_index: u64) -> Result<ReadDir> {
        self.directory(dir)?;
        let mut cursor = self.tree(dir.root)?.cursor();
        let next_index = after_index.saturating_add(1);
        let done = next_index == after_index || dir.is_stand_in();
        if !done {
            cursor.seek(&dir.key(KeyType::DIR_INDEX, next_index))?;
        }
        Ok(ReadDir { filesystem: self.clone(), dir, cursor, next_index, done })
    }

    /// The highest index of a name in directory `dir`; 0 where it has none. Names that come later are behind it.
    ///
    /// # Errors
    /// `NotDirectory` when `dir` is none.
    pub fn last_dir_index(&self, dir: InodeId) -> Result<u64> {
        self.directory(dir)?;
        if dir.is_stand_in() {
            return Ok(0);
        }
        let mut cursor = self.tree(dir.root)?.cursor();
        cursor.seek_back(&dir.key(KeyType::DIR_INDEX, u64::MAX))?;
        Ok(match cursor.current()? {
            Some((Key { objectid, ty: KeyType::DIR_INDEX, offset }, _))
                if objectid == dir.inode.object_id() =>
            {
                offset
            }
            _ => 0,
        })
    }
}

impl ReadDir {
    fn step(&mut self) -> Result<Option<DirEntry>> {
        let is_sure = |found: &Option<DirEntry>| {
            found.as_ref().is_some_and(|entry| !entry.target.is_stand_in())
        };
        let mut found = self.entry()?;
        if !is_sure(&found) {
            // What changes places with another is entered behind all others.
            let filesystem = self.filesystem.clone();
            let find = || {
                self.cursor.seek(&self.dir.key(KeyType::DIR_INDEX, self.next_index))?;
                self.entry()
            };
            found = filesystem.inner.files.settled(find, is_sure)?;
        }
        if let Some(entry) = &found {
            self.next_index = entry.index.saturating_add(1);
            self.cursor.next()?;
        }
        Ok(found)
    }

    /// Where the cursor is.
    fn entry(&mut self) -> Result<Option<DirEntry>> {
        let Some((key, data)) = self.cursor.current()? else {
            return Ok(None);
        };
        let Key { objectid, ty, offset: index } = key;
        if objectid != self.dir.inode.object_id() || ty != KeyType::DIR_INDEX {
            return Ok(None);
        }
        let (entry, _) = DiskEntry::split(data).map_err(|error| error.in_root(self.dir.root))?;
        let target = self.filesystem.target_of(self.dir, &entry)?;
        let (name, file_type) = (entry.name.to_vec(), entry.file_type());
        Ok(Some(DirEntry { name, index, target, file_type }))
    }
}

impl Iterator for ReadDir {
    type Item = Result<DirEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let step = self.step();
        self.done = !matches!(step, Ok(Some(_)));
        step.transpose()
    }
}
