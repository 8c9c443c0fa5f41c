//! Replaying names: entries that went, entries that came, and each inode's references to them.

use std::collections::BTreeSet;

use ubtrfs_ondisk::dir::{DirEntry, FileType};
use ubtrfs_ondisk::inode::{InodeExtrefs, InodeRefs};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Corruption, InodeNo, Key, KeyType, ObjectId, Reason, RootId};
use zerocopy::little_endian::U64;

use super::{Item, Replay};
use crate::error::{Error, Result};
use crate::fs::entry::Named;
use crate::fs::inode::InodeId;
use crate::fs::state::timespec;
use crate::txn::Reservation;

/// To take a name away, or to enter one: two directory items, the reference back, both inodes.
const NAME: Reservation = Reservation::items(6);

/// A name of an inode, as a reference back tells it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Name {
    parent: u64,
    index: u64,
    name: Vec<u8>,
}

/// The names that an INODE_REF or INODE_EXTREF item tells.
fn names_of(key: &Key, data: &[u8], root: RootId) -> Result<Vec<Name>> {
    let mut names = Vec::new();
    if key.ty == KeyType::INODE_REF {
        for reference in InodeRefs::new(data) {
            let reference = reference.map_err(|error| error.in_root(root))?;
            let name = reference.name.to_vec();
            names.push(Name { parent: key.offset, index: reference.index, name });
        }
    } else {
        for reference in InodeExtrefs::new(data) {
            let reference = reference.map_err(|error| error.in_root(root))?;
            let name = reference.name.to_vec();
            names.push(Name { parent: reference.parent.0, index: reference.index, name });
        }
    }
    Ok(names)
}

impl Replay<'_> {
    fn exists(&self, number: u64) -> Result<bool> {
        match self.fs.inode(self.id(number)) {
            Ok(_) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What is named so, if there is such a name.
    fn named(&self, dir: InodeId, name: &[u8]) -> Result<Option<Named>> {
        let handle = self.begin(Reservation::items(0))?;
        match Named::find(&handle, dir, name) {
            Ok(named) => Ok(Some(named)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The name at an index of a directory, and what it names.
    fn name_at(&self, dir: u64, index: u64) -> Result<Option<(Vec<u8>, Key)>> {
        let key = self.id(dir).key(KeyType::DIR_INDEX, index);
        let Some(item) = self.tree()?.lookup(&key)? else { return Ok(None) };
        let (entry, _) = DirEntry::split(&item).map_err(|error| error.in_root(self.root))?;
        Ok(Some((entry.name.to_vec(), entry.item.location.key())))
    }

    /// Takes a name away, and what it named is counted in the end.
    fn remove_name(&mut self, dir: InodeId, name: &[u8]) -> Result<()> {
        let Some(named) = self.named(dir, name)? else { return Ok(()) };
        if named.is_subvolume {
            // Linux commits when subvolumes are made or deleted: none is ever logged.
            return Ok(());
        }
        let mut handle = self.begin(NAME)?;
        if named.id.is_stand_in() {
            // Removed as an empty directory is; Linux writes such a log, and fails to replay it.
            handle.remove_stand_in(dir, name)?;
            return self.resize(&mut handle, dir, -2 * i64::try_from(name.len()).unwrap_or(0));
        }
        handle.detach(dir, name, &named)?;
        self.resize(&mut handle, dir, -2 * i64::try_from(name.len()).unwrap_or(0))?;
        self.touched.insert(named.id.inode.0);
        // As in Linux: it changes now, whoever it was logged by.
        let now = timespec(handle.txn.now());
        handle.change_inode(named.id, |item| item.ctime = now)
    }

    /// Enters a name at an index that is free, of an inode that exists.
    fn add_name(&mut self, dir: InodeId, name: &[u8], index: u64, named: &Named) -> Result<()> {
        if !self.fs.inode(dir)?.is_dir() {
            return Err(Corruption::new(Reason::BadValue)
                .in_root(RootId::TREE_LOG)
                .have(format!("a name in {dir}"))
                .expect("a directory")
                .into());
        }
        let mut handle = self.begin(NAME)?;
        handle.attach(dir, name, named, index)?;
        self.resize(&mut handle, dir, 2 * i64::try_from(name.len()).unwrap_or(0))?;
        self.touched.insert(named.id.inode.0);
        Ok(())
    }

    /// Changes a directory's size, and nothing else of it: its times are the log's.
    fn resize(
        &self,
        handle: &mut crate::filesystem::Handle<'_>,
        dir: InodeId,
        bytes: i64,
    ) -> Result<()> {
        let files = &self.fs.inner.files;
        let mut names = files.names();
        let held = names.hold(handle.txn.core(), dir)?;
        held.resize(bytes);
        files.mark_dirty(&mut handle.txn, dir, held)
    }

    /// Removes the entries of a directory that lie in a range of the log's and are not in the log.
    pub(super) fn remove_entries(&mut self, number: u64, own: &[Item]) -> Result<()> {
        let logged: BTreeSet<u64> = own
            .iter()
            .filter(|item| item.key.ty == KeyType::DIR_INDEX)
            .map(|item| item.key.offset)
            .collect();
        for range in own.iter().filter(|item| item.key.ty == KeyType::DIR_LOG_INDEX) {
            let end = U64::peek(&range.data).map_err(|error| error.in_root(RootId::TREE_LOG))?;
            self.remove_range(number, range.key.offset, end.get(), &logged)?;
        }
        Ok(())
    }

    /// Removes the entries from `start` to `end`, that included, but for some.
    fn remove_range(
        &mut self,
        number: u64,
        start: u64,
        end: u64,
        kept: &BTreeSet<u64>,
    ) -> Result<()> {
        let dir = self.id(number);
        let mut gone = Vec::new();
        let mut cursor = self.tree()?.cursor();
        cursor.seek(&dir.key(KeyType::DIR_INDEX, start))?;
        while let Some((key, data)) = cursor.current()? {
            let is_in_range = key.objectid == dir.inode.object_id()
                && key.ty == KeyType::DIR_INDEX
                && key.offset <= end;
            if !is_in_range {
                break;
            }
            if !kept.contains(&key.offset) {
                let (entry, _) = DirEntry::split(data).map_err(|e| e.in_root(self.root))?;
                gone.push(entry.name.to_vec());
            }
            cursor.next()?;
        }
        for name in gone {
            self.remove_name(dir, &name)?;
        }
        Ok(())
    }

    /// Enters a directory's entry, unless it is there, or comes with its inode's references.
    pub(super) fn put_entry(&mut self, number: u64, item: &Item) -> Result<()> {
        let dir = self.id(number);
        let (entry, _) =
            DirEntry::split(&item.data).map_err(|error| error.in_root(RootId::TREE_LOG))?;
        let location = entry.item.location.key();
        if location.ty != KeyType::INODE_ITEM {
            return Ok(());
        }
        let target = self.id(location.objectid.0);
        let exists = self.exists(target.inode.0)?;
        let by_name = self.named(dir, entry.name)?;
        let by_index = self.name_at(number, item.key.offset)?;
        let is_same = |named: &Named| named.id == target && !named.is_subvolume;
        let has_name = by_name.as_ref().is_some_and(is_same);
        let has_index =
            by_index.as_ref().is_some_and(|(name, at)| name == entry.name && *at == location);
        if has_name && has_index {
            return Ok(());
        }
        if !exists {
            return Ok(());
        }
        if by_name.is_some() && !has_name {
            self.remove_name(dir, entry.name)?;
        }
        if let Some((name, _)) = by_index.filter(|_| !has_index) {
            self.remove_name(dir, &name)?;
        }
        if self.is_logged(target, number, entry.name)? {
            return Ok(());
        }
        // It may be there at another index, from which Linux does not move it.
        if self.named(dir, entry.name)?.is_some() || !self.exists(number)? {
            return Ok(());
        }
        let named = Named { id: target, file_type: entry.file_type(), is_subvolume: false };
        self.add_name(dir, entry.name, item.key.offset, &named)
    }

    /// Whether the log has a reference from `id` to that name.
    fn is_logged(&self, id: InodeId, parent: u64, name: &[u8]) -> Result<bool> {
        let keys = [
            id.key(KeyType::INODE_REF, parent),
            id.key(KeyType::INODE_EXTREF, ubtrfs_ondisk::hash::extref_hash(InodeNo(parent), name)),
        ];
        for key in keys {
            if let Some(item) = self.log.lookup(&key)? {
                let names = names_of(&key, &item, RootId::TREE_LOG)?;
                if names.iter().any(|known| known.parent == parent && known.name == name) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Gives an inode the names that an item of the log tells, and takes those away that the same
    /// item of the subvolume tells besides.
    pub(super) fn put_names(&mut self, number: u64, item: &Item) -> Result<()> {
        if !self.exists(number)? {
            return Ok(());
        }
        let id = self.id(number);
        let logged = names_of(&item.key, &item.data, RootId::TREE_LOG)?;
        let have = match self.tree()?.lookup(&item.key)? {
            Some(data) => names_of(&item.key, &data, self.root)?,
            None => Vec::new(),
        };
        for old in &have {
            let stays = logged.iter().any(|new| new.parent == old.parent && new.name == old.name);
            let is_moved = self.is_logged(id, old.parent, &old.name)?;
            if !stays && !is_moved {
                self.remove_name(self.id(old.parent), &old.name)?;
            }
        }
        let inode = self.fs.inode(id)?;
        let named = Named { id, file_type: inode.file_type(), is_subvolume: false };
        for new in logged {
            // Not all directories above are logged; the count of links takes care of the rest.
            if self.exists(new.parent)? {
                self.put_name(&named, &new)?;
            }
        }
        Ok(())
    }

    fn put_name(&mut self, named: &Named, new: &Name) -> Result<()> {
        let dir = self.id(new.parent);
        if named.id == dir {
            // A subvolume's root names itself.
            return Ok(());
        }
        let by_name = self.named(dir, &new.name)?;
        let by_index = self.name_at(new.parent, new.index)?;
        let location = named.id.key(KeyType::INODE_ITEM, 0);
        let is_there = by_name.is_some_and(|known| known.id == named.id)
            && by_index.as_ref().is_some_and(|(name, at)| *name == new.name && *at == location);
        if is_there {
            return Ok(());
        }
        if let Some((name, _)) = by_index {
            self.remove_name(dir, &name)?;
        }
        self.remove_name(dir, &new.name)?;
        self.add_name(dir, &new.name, new.index, named)
    }

    /// Counts the links of all inodes that were touched. Those without any become orphans, and a
    /// directory of them loses its entries.
    pub(super) fn count_links(&mut self) -> Result<()> {
        while let Some(number) = self.touched.pop_first() {
            let id = self.id(number);
            let inode = match self.fs.inode(id) {
                Ok(inode) => inode,
                Err(Error::NotFound { .. }) => continue,
                Err(error) => return Err(error),
            };
            if number == InodeNo::SUBVOLUME_ROOT.0 {
                continue;
            }
            let count = u32::try_from(self.fs.links(id)?.len()).unwrap_or(u32::MAX);
            if inode.is_dir() && count > 1 {
                return Err(Corruption::new(Reason::BadValue)
                    .in_root(RootId::TREE_LOG)
                    .have(format!("{count} names of {id}"))
                    .expect("one of a directory")
                    .into());
            }
            let mut handle = self.begin(Reservation::items(2))?;
            if count != inode.nlink {
                handle.change_inode(id, |item| item.nlink = count.into())?;
            }
            if count > 0 {
                continue;
            }
            let orphan = Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, number);
            match handle.txn.insert(self.root, orphan, &[]) {
                Ok(()) | Err(Error::Exists { .. }) => {}
                Err(error) => return Err(error),
            }
            drop(handle);
            if inode.file_type() == FileType::Directory {
                self.remove_range(number, 0, u64::MAX, &BTreeSet::new())?;
            }
        }
        Ok(())
    }
}

/// The checksums in the log of the sectors in a range of addresses: where each run begins, and its
/// bytes.
///
/// # Errors
/// A damaged block.
pub(super) fn logged_csums(
    log: &ubtrfs_rt::Arc<crate::btree::Tree>,
    start: u64,
    end: u64,
    csum_bytes: usize,
    sectorsize_bytes: u64,
) -> Result<Vec<(u64, Vec<u8>)>> {
    let mut runs = Vec::new();
    // An item covers no more than a whole block of checksums.
    let nodesize = log.store.geometry().nodesize_bytes;
    let covered_max = (nodesize / csum_bytes.max(1)) as u64 * sectorsize_bytes;
    let first = start.saturating_sub(covered_max);
    let mut cursor = log.cursor();
    cursor.seek(&Key::new(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, first))?;
    while let Some((key, data)) = cursor.current()? {
        let is_csum = key.objectid == ObjectId::EXTENT_CSUM && key.ty == KeyType::EXTENT_CSUM;
        if !is_csum || key.offset >= end {
            break;
        }
        let covered = (data.len() / csum_bytes) as u64 * sectorsize_bytes;
        let (from, to) = (key.offset.max(start), key.offset.saturating_add(covered).min(end));
        if from < to {
            let bytes_upto = |at: u64| {
                usize::try_from((at - key.offset) / sectorsize_bytes).unwrap_or(0) * csum_bytes
            };
            runs.push((from, data[bytes_upto(from)..bytes_upto(to)].to_vec()));
        }
        cursor.next()?;
    }
    Ok(runs)
}
