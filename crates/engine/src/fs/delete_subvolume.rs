//! Deleting subvolumes: the name first, at once; the blocks later, a few at a time.
//!
//! [`Filesystem::delete_subvolume`] takes the name away and leaves an orphan item in the root tree
//! that says that the tree is to be dropped. [`Filesystem::clean_deleted_subvolumes`] drops such
//! trees, those that a crash or Linux left half dropped too ([`DropTree`]).
//!
//! A subvolume that somebody holds ([`SubvolumeHolds`]) loses its name only, as in Linux: what is in it can be read and changed
//! through inodes that are known, and is lost with a crash. It is closed when its turn to be dropped comes and nobody holds it.

use std::collections::BTreeSet;

use ubtrfs_ondisk::root::flags as root_flags;
use ubtrfs_ondisk::{DiskKey, Key, KeyType, ObjectId, RootId, Uuid};

use super::drop_tree::DropTree;
use super::entry::{Named, check_flags, shown};
use super::held_subvolumes::SubvolumeHolds;
use super::inode::{InodeId, Link};
use super::uuid_tree;
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle, begin_freeing};
use crate::txn::Reservation;

/// References that one handle of a clean-up drops, about.
const REFS_PER_HANDLE: usize = 512;
/// Bytes of a leaf that a reference to data takes: a file extent and its item's header.
const REFERENCE_BYTES_MIN: u64 = 78;

/// What a subvolume that is to be deleted may hold.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contents {
    Any,
    Nothing,
}

impl Filesystem {
    /// Deletes the subvolume named `name` in `dir`: it is no longer there, and nothing can be
    /// changed in it, unless somebody holds it ([`Filesystem::subvolume_holds`]). Its space is freed by [`Filesystem::clean_deleted_subvolumes`], in this or
    /// any later session, or by Linux. Durable with the next commit. The calling thread must hold
    /// no handle.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for what is no subvolume, or is the default one; `NotEmpty`
    /// where it holds other subvolumes; `ReadOnly` where `dir` cannot be changed.
    pub fn delete_subvolume(&self, dir: InodeId, name: &[u8]) -> Result<RootId> {
        self.delete_by(|handle| handle.delete_subvolume(dir, name, Contents::Any))
    }

    /// As [`Filesystem::delete_subvolume`], of one in which there is nothing: whatever others do meanwhile, they find it gone, or it stays
    /// with what they made.
    ///
    /// # Errors
    /// As [`Filesystem::delete_subvolume`]; `NotEmpty` where there is a name in it.
    pub fn delete_empty_subvolume(&self, dir: InodeId, name: &[u8]) -> Result<RootId> {
        self.delete_by(|handle| handle.delete_subvolume(dir, name, Contents::Nothing))
    }

    /// As [`Filesystem::delete_subvolume`], of the one of that number, whatever name it has by now. Returns where it was.
    ///
    /// # Errors
    /// As [`Filesystem::delete_subvolume`]; `NotFound` also for one that is deleted, and for the top level, which has no name.
    pub fn delete_subvolume_numbered(&self, root: RootId) -> Result<Link> {
        let mut place = None;
        self.delete_by(|handle| {
            let missing = || Error::not_found(format!("subvolume {root}"));
            let link = place.insert(self.name_of_subvolume(root)?.ok_or_else(missing)?);
            // In a damaged filesystem another may have that name.
            if Named::find(handle, link.parent, &link.name)?.id.root != root {
                return Err(missing());
            }
            handle.delete_subvolume(link.parent, &link.name, Contents::Any)
        })?;
        Ok(place.expect("what was deleted had a name"))
    }

    /// Nobody else has a handle while `delete` has.
    fn delete_by(
        &self,
        delete: impl FnOnce(&mut Handle<'_>) -> Result<(RootId, bool)>,
    ) -> Result<RootId> {
        let txn = self.inner.core.begin_alone(Reservation::delete_subvolume())?;
        let mut handle = Handle { fs: self, txn };
        let (root, is_closed) = delete(&mut handle)?;
        let files = if is_closed { self.end_files_of(root) } else { Vec::new() };
        drop(handle);
        files.iter().for_each(|file| file.throw_away());
        if !is_closed {
            self.inner.subvolume_holds.tell_wanted(&[root]);
        }
        Ok(root)
    }

    /// Which subvolumes somebody uses by number.
    pub fn subvolume_holds(&self) -> &SubvolumeHolds {
        &self.inner.subvolume_holds
    }

    /// A deleted subvolume that was kept for who held it is there no more, if nobody holds it now. Returns whether
    /// it may be dropped.
    fn close_deleted(&self, root: RootId) -> Result<bool> {
        if !self.inner.files.names().is_kept(root) {
            return Ok(true);
        }
        let txn = self.inner.core.begin_alone(Reservation::delete_subvolume())?;
        let mut handle = Handle { fs: self, txn };
        // He who looks for it now finds it gone, or held it before.
        if self.inner.subvolume_holds.is_held(root) {
            return Ok(false);
        }
        let files = &self.inner.files;
        let mut names = files.names();
        files.write_inodes(&mut names, &mut handle.txn)?;
        let txn = &mut handle.txn;
        txn.close_tree(root).map_err(|error| txn.abort(error))?;
        names.forget_subvolume(root);
        drop(names);
        let open = self.end_files_of(root);
        drop(handle);
        open.iter().for_each(|file| file.throw_away());
        Ok(true)
    }

    /// Frees what deleted subvolumes held and no other shares, in small transactions. Returns how
    /// many subvolumes are gone; those that somebody holds stay. The calling thread must hold no handle; others go on meanwhile.
    ///
    /// # Errors
    /// As [`Filesystem::begin`]; the first damage in their trees, once the others are gone. What was dropped before is not lost: the next
    /// call goes on from there.
    pub fn clean_deleted_subvolumes(&self) -> Result<u64> {
        let mut damaged = self.inner.cleaning.lock();
        damaged.clear();
        let (mut count, mut failure) = (0, None);
        while let Some(root) = self.next_deleted_but(&damaged)? {
            if self.close_deleted(root)? {
                match self.drop_tree(root) {
                    Ok(()) => count += 1,
                    Err(error) => {
                        failure.get_or_insert(pass_over(&mut damaged, root, error)?);
                    }
                }
            }
        }
        failure.map_or(Ok(count), Err)
    }

    /// A deleted subvolume that still has blocks and that nobody holds.
    ///
    /// # Errors
    /// Damage in the root tree.
    pub(crate) fn next_deleted(&self) -> Result<Option<RootId>> {
        self.next_deleted_but(&BTreeSet::new())
    }

    fn next_deleted_but(&self, damaged: &BTreeSet<RootId>) -> Result<Option<RootId>> {
        let mut cursor = self.tree(RootId::ROOT_TREE)?.cursor();
        cursor.seek(&Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, 0))?;
        let (mut found, mut held) = (None, Vec::new());
        while let Some((key, _)) = cursor.current()? {
            if key.objectid != ObjectId::ORPHAN || key.ty != KeyType::ORPHAN_ITEM {
                break;
            }
            let root = RootId(key.offset);
            // Linux keeps orphan items of trees that it relocates, too.
            if root.is_subvolume()
                && !damaged.contains(&root)
                && self.root_item(root)?.is_none_or(|(_, item)| item.refs.get() == 0)
            {
                if !self.inner.subvolume_holds.is_held(root) {
                    found = Some(root);
                    break;
                }
                held.push(root);
            }
            cursor.next()?;
        }
        // Once, when all else is done.
        if found.is_none() {
            self.inner.subvolume_holds.tell_wanted(&held);
        }
        Ok(found)
    }

    /// One small transaction's part of [`Filesystem::clean_deleted_subvolumes`]: about `count`
    /// references. Returns whether more is to be done.
    ///
    /// # Errors
    /// As [`Filesystem::clean_deleted_subvolumes`]; of damage once, as what is damaged is passed over from then on.
    #[doc(hidden)]
    pub fn clean_deleted_step(&self, count: usize) -> Result<bool> {
        let mut damaged = self.inner.cleaning.lock();
        let Some(root) = self.next_deleted_but(&damaged)? else { return Ok(false) };
        if self.close_deleted(root)?
            && let Err(error) = self.drop_some(root, &mut None, &mut { count })
        {
            return Err(pass_over(&mut damaged, root, error)?);
        }
        Ok(true)
    }

    fn drop_tree(&self, root: RootId) -> Result<()> {
        let mut walk = None;
        let mut count = REFS_PER_HANDLE;
        while !self.drop_some(root, &mut walk, &mut count)? {}
        Ok(())
    }

    /// Goes on with the walk that drops the tree, or begins it: under a handle, beside which no
    /// commit runs what the references of its blocks are told by. Returns whether all of the tree is
    /// gone, with its root item.
    fn drop_some(
        &self,
        root: RootId,
        walk: &mut Option<DropTree>,
        count: &mut usize,
    ) -> Result<bool> {
        // A leaf is dropped whole, whatever is left of the count.
        let in_a_leaf = self.nodesize_bytes() / REFERENCE_BYTES_MIN;
        let mut handle =
            begin_freeing(count, |count| self.begin(Reservation::drops(count + in_a_leaf)))?;
        let walk = match walk {
            Some(walk) => walk,
            None => {
                let Some((key, item)) = self.root_item(root)? else {
                    // Only its orphan item was left.
                    handle.txn.remove(RootId::ROOT_TREE, orphan_key(root))?;
                    return Ok(true);
                };
                walk.insert(DropTree::begin(&self.inner.core, root, key, &item)?)
            }
        };
        let txn = &mut handle.txn;
        let (progress, failure) = match walk.step(txn, self.inner.files.kept(), *count) {
            Ok(progress) => (progress, None),
            Err(error @ Error::Aborted { .. }) => return Err(error),
            // What came before is not to be done again, and the filesystem is not to stop for one block that nobody wants. Nor is there to be a
            // commit each time that it is tried.
            Err(error) => {
                let noted = self.noted_place(root).map_err(|error| txn.abort(error))?;
                let place = walk.place();
                if place.is_none() || place == noted {
                    return Err(error);
                }
                (place, Some(error))
            }
        };
        let result = match progress {
            Some((next, level)) => txn
                .change_root_item(root, |item| {
                    item.drop_progress = DiskKey::new(next);
                    item.drop_level = level;
                })
                .map(|_| false),
            None => txn
                .remove(RootId::ROOT_TREE, walk.root_key())
                .and_then(|()| txn.remove(RootId::ROOT_TREE, orphan_key(root)))
                .map(|()| true),
        };
        let is_done = result.map_err(|error| handle.txn.abort(error))?;
        failure.map_or(Ok(is_done), Err)
    }

    /// How far the root item says that a tree is dropped.
    fn noted_place(&self, root: RootId) -> Result<Option<(Key, u8)>> {
        let found = self.root_item(root)?;
        Ok(found.map(|(_, item)| (item.drop_progress.key(), item.drop_level)))
    }
}

/// Notes a subvolume that cannot be dropped for damage, so that others are, and gives the error back.
///
/// # Errors
/// The same, where it is of the filesystem, or will pass.
fn pass_over(damaged: &mut BTreeSet<RootId>, root: RootId, error: Error) -> Result<Error> {
    if matches!(error, Error::Aborted { .. } | Error::NoSpace { .. } | Error::ReadOnly { .. }) {
        return Err(error);
    }
    damaged.insert(root);
    Ok(error)
}

fn orphan_key(root: RootId) -> Key {
    Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, root.0)
}

impl Handle<'_> {
    /// Returns the subvolume, and whether its tree was closed, as nobody holds it.
    fn delete_subvolume(
        &mut self,
        dir: InodeId,
        name: &[u8],
        holds: Contents,
    ) -> Result<(RootId, bool)> {
        let named = Named::find(self, dir, name)?;
        if !named.is_subvolume {
            let what = format!("{} is no subvolume", shown(dir, name));
            return Err(Error::InvalidArgument { what });
        }
        let root = named.id.root;
        // First, as in Linux. Nobody makes anything while this handle lives.
        if holds == Contents::Nothing
            && self.fs.read_dir(named.id, 0)?.next().transpose()?.is_some()
        {
            return Err(Error::NotEmpty { what: shown(dir, name) });
        }
        let item = self.live_root_item(root)?;
        if self.fs.default_root()? == root {
            let what = format!("{} is the default subvolume", shown(dir, name));
            return Err(Error::InvalidArgument { what });
        }
        if self.has_subvolumes(root)? {
            return Err(Error::NotEmpty {
                what: format!("{}: it holds subvolumes", shown(dir, name)),
            });
        }
        let core = self.txn.core();
        let files = &self.fs.inner.files;
        let mut names = files.names();
        names.check_writable(core, dir.root)?;
        let parent = names.hold(core, dir)?.item;
        check_flags(dir, parent.flags.get(), false)?;
        // Its own number is not to be given again while somebody may still hold it.
        names.next_root(core)?;
        let is_held = self.fs.inner.subvolume_holds.is_held(root);
        if is_held {
            // What is remembered of it cannot be read from its item any more.
            names.check_known(core, root)?;
            self.fs.tree(root)?;
        }
        files.write_inodes(&mut names, &mut self.txn)?;
        let txn = &mut self.txn;
        if is_held {
            names.keep(root);
        } else {
            // First what may fail for the device's sake: nothing has gone then.
            txn.close_tree(root).map_err(|error| txn.abort(error))?;
            names.forget_subvolume(root);
        }
        let _replacement = files.replace_name(&mut names);
        self.detach(dir, name, &named).map_err(|error| self.txn.abort(error))?;
        let txn = &mut self.txn;
        txn.change_root_item(root, |item| {
            item.refs = 0.into();
            item.flags = (item.flags.get() | root_flags::DEAD).into();
            item.drop_progress = DiskKey::new(Key::MIN);
            item.drop_level = 0;
        })
        .map_err(|error| txn.abort(error))?;
        txn.insert(RootId::ROOT_TREE, orphan_key(root), &[]).map_err(|error| txn.abort(error))?;
        let uuids = [
            (KeyType::UUID_KEY_SUBVOL, Uuid(item.uuid)),
            (KeyType::UUID_KEY_RECEIVED_SUBVOL, Uuid(item.received_uuid)),
        ];
        for (ty, uuid) in uuids {
            uuid_tree::remove(txn, ty, uuid, root).map_err(|error| txn.abort(error))?;
        }
        self.uncount(&mut names, dir, name)?;
        Ok((root, !is_held))
    }

    /// Whether subvolumes are linked inside `root`.
    fn has_subvolumes(&self, root: RootId) -> Result<bool> {
        let mut cursor = self.fs.tree(RootId::ROOT_TREE)?.cursor();
        cursor.seek(&Key::new(root.object_id(), KeyType::ROOT_REF, 0))?;
        Ok(cursor.current()?.is_some_and(|(key, _)| {
            key.objectid == root.object_id() && key.ty == KeyType::ROOT_REF
        }))
    }
}
