//! Removing names, and the inode with its last name.
//!
//! A file may have more extents than one transaction should free. So its last name goes first, in
//! one handle with an orphan item that says that the inode is to be removed; its items go a few at
//! a time, from the end; and the inode goes last with the orphan item. A crash in between leaves
//! an orphan, which Linux removes at its next mount and [`Filesystem::clean_orphans`] before the
//! subvolume is changed next.
//!
//! Orphans that this session made, and that somebody may still use, are remembered in
//! [`Names`](super::state::Names), so that no clean-up takes them.

use ubtrfs_ondisk::dir::DirEntry;
use ubtrfs_ondisk::file_extent::{FileExtent, RegularExtent};
use ubtrfs_ondisk::{InodeNo, Key, KeyType, ObjectId, RootId};

use super::entry::{Named, check_flags, shown};
use super::inode::InodeId;
use super::make::NewInode;
use crate::data::append::Target;
use crate::data::drop_range::drop_reference;
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle, begin_freeing};
use crate::txn::Reservation;

/// Items of a removed inode that go under one handle.
const ITEMS_PER_HANDLE: usize = 32;

/// What a name that is removed must be of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Expected {
    File,
    Directory,
}

impl Filesystem {
    /// Removes the name `name` from directory `dir`, and the file with its last name. The calling
    /// thread must hold no handle. Durable with the next commit.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`, `NotPermitted`; `IsDirectory` for a directory or subvolume; damage
    /// in the tree.
    pub fn unlink(&self, dir: InodeId, name: &[u8]) -> Result<()> {
        self.unlink_deferred(dir, name)?.map_or(Ok(()), |id| self.evict_now_or_later(id))
    }

    /// As [`Filesystem::unlink`], but the file stays, without a name, until
    /// [`Filesystem::evict`]: for who has it open. Returns it if it has no name left. What is not
    /// evicted before the filesystem is closed goes at the next open.
    ///
    /// # Errors
    /// As [`Filesystem::unlink`].
    pub fn unlink_deferred(&self, dir: InodeId, name: &[u8]) -> Result<Option<InodeId>> {
        self.begin(Reservation::remove_name())?.remove_name(dir, name, Expected::File)
    }

    /// Removes the empty directory `name` from directory `dir`. The calling thread must hold no
    /// handle. Durable with the next commit.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`, `NotPermitted`, `NotDirectory`, `NotEmpty`; `InvalidArgument` for a
    /// subvolume, which has [`Filesystem::delete_subvolume`]; damage in the tree.
    pub fn rmdir(&self, dir: InodeId, name: &[u8]) -> Result<()> {
        self.rmdir_deferred(dir, name)?.map_or(Ok(()), |id| self.evict_now_or_later(id))
    }

    /// As [`Filesystem::rmdir`], but the directory stays, without a name, until
    /// [`Filesystem::evict`].
    ///
    /// # Errors
    /// As [`Filesystem::rmdir`].
    pub fn rmdir_deferred(&self, dir: InodeId, name: &[u8]) -> Result<Option<InodeId>> {
        self.begin(Reservation::remove_name())?.remove_name(dir, name, Expected::Directory)
    }

    /// Removes an inode that has no name, and frees what it holds. One that has got a name stays.
    ///
    /// # Errors
    /// As [`Filesystem::begin`]; damage in the tree. What is left goes at the next open.
    pub fn evict(&self, id: InodeId) -> Result<()> {
        let lock = self.inner.files.lock_data(id);
        let space = self.inner.open_files.find(id);
        let mut count = ITEMS_PER_HANDLE;
        loop {
            let mut handle = begin_freeing(&mut count, |count| {
                self.begin_step(Reservation::removals(2 * count))
            })?;
            let place = space.as_ref().map(|space| space.inode().change_mappings());
            let removed = handle.remove_items(id, count);
            let is_going = match removed {
                Ok(Removed::All | Removed::Some) => true,
                Ok(Removed::NothingOfNamed) => return Ok(()),
                // Some may have gone.
                Err(_) => self.inner.files.names().check_is_whole(id).is_err(),
            };
            // What is gone is no hole: who has it open reads only what memory has of it.
            if let (true, Some(space), Some(place)) = (is_going, &space, &place) {
                space.inode().end(place);
            }
            if let Removed::All = removed? {
                break;
            }
        }
        if let Some(space) = space {
            drop(lock);
            space.throw_away();
        }
        let _ = self.inner.open_files.lost.take(id);
        Ok(())
    }

    /// As [`Filesystem::evict`], after the name went: where there is no room for that just now, the
    /// inode goes after the next commit, or at the next open, and the name is gone all the same.
    ///
    /// # Errors
    /// As there, but for want of space.
    pub fn evict_now_or_later(&self, id: InodeId) -> Result<()> {
        let evicted = self.evict(id);
        if let Err(error) = &evicted
            && !matches!(error, Error::Aborted { .. })
        {
            let mut names = self.inner.files.names();
            names.begin_eviction(id);
            names.note_late(id.root);
        }
        match evicted {
            Err(Error::NoSpace { .. } | Error::Limit { .. }) => Ok(()),
            other => other,
        }
    }

    /// Removes the inodes of a subvolume that have no name: what was unlinked while it was open
    /// when Linux, or an earlier session, ended. What this session made so stays. Called by itself
    /// at open for the top level, where a [`Notice`](crate::Notice) tells what keeps it from being
    /// done, and of another subvolume after its first change, before the next change or commit.
    ///
    /// # Errors
    /// `NotFound` when there is no such subvolume; otherwise as [`Filesystem::evict`].
    pub fn clean_orphans(&self, root: RootId) -> Result<u64> {
        let mut count = 0;
        let mut next = 0;
        while let Some(number) = self.next_orphan(root, next)?.filter(|number| *number < u64::MAX) {
            let id = InodeId { root, inode: InodeNo(number) };
            next = number.saturating_add(1);
            if !self.inner.files.names().is_live_orphan(id) {
                self.clean_orphan(id)?;
                count += 1;
            }
        }
        Ok(count)
    }

    /// As [`Filesystem::clean_orphans`], after what the caller did: where there is no room for it just
    /// now, it is done later.
    pub(crate) fn clean_orphans_or_later(&self, root: RootId) -> Result<()> {
        match self.clean_orphans(root) {
            // Or they went with their subvolume.
            Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
            // A transaction that must not grow any more has no room, either.
            Err(Error::NoSpace { .. } | Error::Limit { .. }) => {
                self.inner.files.names().note_late(root);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn next_orphan(&self, root: RootId, from: u64) -> Result<Option<u64>> {
        let mut cursor = self.tree(root)?.cursor();
        cursor.seek(&Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, from))?;
        Ok(cursor.current()?.and_then(|(key, _)| {
            let is_orphan = key.objectid == ObjectId::ORPHAN && key.ty == KeyType::ORPHAN_ITEM;
            is_orphan.then_some(key.offset)
        }))
    }

    fn clean_orphan(&self, id: InodeId) -> Result<()> {
        let is_nameless = match self.inode(id) {
            Ok(inode) => inode.nlink == 0,
            Err(Error::NotFound { .. }) => false,
            Err(error) => return Err(error),
        };
        if is_nameless {
            return self.evict(id);
        }
        // Of a truncation that an old Linux did not finish, or of nothing: the inode stays.
        let mut handle = self.begin(Reservation::removals(1))?;
        handle.txn.remove(id.root, orphan_key(id))
    }
}

impl Handle<'_> {
    /// Makes an inode without a name in the subvolume of `dir`, from which it takes over what a
    /// new file takes over. [`Handle::link`] gives it a name; [`Filesystem::evict`] removes it.
    ///
    /// # Errors
    /// As [`Handle::create`].
    pub fn create_unlinked(&mut self, dir: InodeId, new: &NewInode) -> Result<InodeId> {
        self.make_unlinked(dir, new)
    }

    /// Removes a name. Returns the inode if that was its last: it is an orphan then.
    fn remove_name(
        &mut self,
        dir: InodeId,
        name: &[u8],
        expected: Expected,
    ) -> Result<Option<InodeId>> {
        let files = &self.fs.inner.files;
        let mut names = files.names();
        let core = self.txn.core();
        names.check_writable(core, dir.root)?;
        let named = Named::find(self, dir, name)?;
        check_flags(dir, names.hold(core, dir)?.item.flags.get(), false)?;
        match (expected, named.is_directory()) {
            (Expected::File, true) => {
                return Err(Error::IsDirectory { what: shown(dir, name) });
            }
            (Expected::Directory, false) => {
                return Err(Error::NotDirectory { what: shown(dir, name) });
            }
            _ => {}
        }
        if named.is_subvolume {
            let what = format!("{} is a subvolume", shown(dir, name));
            return Err(Error::InvalidArgument { what });
        }
        if named.id.is_stand_in() {
            self.remove_stand_in(dir, name)?;
            self.tell_gone(dir, name, named.id);
            self.uncount(&mut names, dir, name)?;
            return Ok(None);
        }
        let item = names.hold(core, named.id)?.item;
        check_flags(named.id, item.flags.get(), false)?;
        if named.is_directory() && item.size.get() != 0 {
            return Err(Error::NotEmpty { what: shown(dir, name) });
        }
        self.detach(dir, name, &named)?;
        self.uncount(&mut names, dir, name)?;
        self.drop_link(&mut names, named.id)
    }

    /// Takes one from an inode's count of names; returns it if that was the last: it is an orphan
    /// then.
    pub(super) fn drop_link(
        &mut self,
        names: &mut super::state::Names,
        id: InodeId,
    ) -> Result<Option<InodeId>> {
        self.touch_inode(names, id)?;
        let held = names.hold(self.txn.core(), id)?;
        held.item.nlink = held.item.nlink.get().saturating_sub(1).into();
        if held.item.nlink.get() > 0 {
            return Ok(None);
        }
        let txn = &mut self.txn;
        txn.insert(id.root, orphan_key(id), &[]).map_err(|error| txn.abort(error))?;
        names.add_live_orphan(id);
        Ok(Some(id))
    }

    /// Removes the entries that name a subvolume which is linked elsewhere.
    pub(super) fn remove_stand_in(&mut self, dir: InodeId, name: &[u8]) -> Result<()> {
        // Nothing says its index: Linux looks through the directory, too.
        let mut cursor = self.txn.core().roots.tree(dir.root)?.cursor();
        cursor.seek(&dir.key(KeyType::DIR_INDEX, 0))?;
        let index = loop {
            match cursor.current()? {
                Some((key, data))
                    if key.objectid == dir.inode.object_id() && key.ty == KeyType::DIR_INDEX =>
                {
                    let (entry, _) =
                        DirEntry::split(data).map_err(|error| error.in_root(dir.root))?;
                    if entry.name == name {
                        break key.offset;
                    }
                }
                _ => return Err(Error::not_found(shown(dir, name))),
            }
            cursor.next()?;
        };
        let txn = &mut self.txn;
        txn.remove(dir.root, dir.key(KeyType::DIR_INDEX, index))?;
        self.remove_entry(dir, name).map_err(|error| self.txn.abort(error))
    }

    /// Takes out what was just made of an inode that gets no name. It has no extents.
    ///
    /// # Errors
    /// What stops an edit.
    pub(super) fn unmake(&mut self, id: InodeId) -> Result<()> {
        while let Some((key, _)) = self.last_item(id)? {
            self.txn.remove(id.root, key)?;
        }
        Ok(())
    }

    /// The last item of an inode.
    fn last_item(&self, id: InodeId) -> Result<Option<(Key, Vec<u8>)>> {
        let mut cursor = self.txn.core().roots.tree(id.root)?.cursor();
        cursor.seek_back(&id.key(KeyType::MAX, u64::MAX))?;
        let last = cursor.current()?.filter(|(key, _)| key.objectid == id.inode.object_id());
        Ok(last.map(|(key, data)| (key, data.to_vec())))
    }

    /// Removes the last `count` items of an orphan, its extents with them.
    fn remove_items(&mut self, id: InodeId, count: usize) -> Result<Removed> {
        let files = &self.fs.inner.files;
        // Under the lock, so that nobody gives the inode a name meanwhile.
        let mut names = files.names();
        let core = self.txn.core();
        if names.hold(core, id)?.item.nlink.get() > 0 {
            return Ok(Removed::NothingOfNamed);
        }
        names.begin_removal(id);
        let _change = files.change_data(id);
        for _ in 0..count {
            let Some((key, data)) = self.last_item(id)? else {
                return Err(self.txn.abort(Error::not_found(id)));
            };
            let extent = match key.ty {
                KeyType::EXTENT_DATA => data_of(&data).map_err(|error| error.in_root(id.root))?,
                _ => None,
            };
            let txn = &mut self.txn;
            txn.remove(id.root, key).map_err(|error| txn.abort(error))?;
            if let Some(extent) = extent {
                // Only now: the leaf may have been shared until it was copied for this, and what lies in it then got the
                // reference that is taken back.
                self.drop_extent(id, key.offset, &extent)?;
            }
            if key.ty == KeyType::INODE_ITEM {
                let txn = &mut self.txn;
                txn.remove(id.root, orphan_key(id)).map_err(|error| txn.abort(error))?;
                files.forget(&mut names, id);
                return Ok(Removed::All);
            }
        }
        Ok(Removed::Some)
    }

    /// Takes back a file extent's reference to its data.
    fn drop_extent(&mut self, id: InodeId, file_offset: u64, extent: &RegularExtent) -> Result<()> {
        // Checksums go by address, whether this file has any or not.
        let target = Target { root: id.root, inode: id.inode, has_csums: true };
        let kept = self.fs.inner.files.kept();
        drop_reference(&mut self.txn, &target, file_offset, extent, kept)
    }
}

/// What became of an orphan's items.
enum Removed {
    /// More are there.
    Some,
    /// All are gone, the inode and its orphan item too.
    All,
    /// None: it has got a name.
    NothingOfNamed,
}

/// The file extent in an item, if it has space.
fn data_of(item: &[u8]) -> ubtrfs_ondisk::Result<Option<RegularExtent>> {
    match FileExtent::parse(item)? {
        FileExtent::Regular(extent) | FileExtent::Prealloc(extent) if !extent.is_hole() => {
            Ok(Some(extent))
        }
        _ => Ok(None),
    }
}

/// The item that says that an inode has no name.
pub(super) fn orphan_key(id: InodeId) -> Key {
    Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, id.inode.0)
}
