//! Snapshots: a subvolume that begins as a copy of another, sharing all its blocks.

use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::root::flags as root_flags;
use ubtrfs_ondisk::{Key, KeyType, RootId, Uuid};

use super::entry::check_flags;
use super::inode::InodeId;
use super::make::{EntryBytes, check_directory, check_new_name, insert_name};
use super::make_subvolume::insert_root_refs;
use super::state::timespec;
use super::uuid_tree;
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle};
use crate::txn::Reservation;

/// What a snapshot is to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SnapshotOptions {
    /// Nothing inside can be changed.
    pub read_only: bool,
}

impl Filesystem {
    /// Makes a snapshot of subvolume `source`, named `name` in `dir`, and returns its root
    /// directory. It shows one moment: all that was done through handles closed before, and
    /// nothing of those opened after. The calling thread must hold no handle; others wait.
    /// Durable with the next commit.
    ///
    /// What it costs does not grow with the subvolume, beyond writing the blocks that changed since
    /// the last commit.
    ///
    /// # Errors
    /// `NotFound` when there is no such subvolume; otherwise as
    /// [`Handle::create_subvolume`](crate::Handle::create_subvolume).
    pub fn snapshot(
        &self,
        source: RootId,
        dir: InodeId,
        name: &[u8],
        options: &SnapshotOptions,
    ) -> Result<InodeId> {
        // Data in memory at the time of the call is in it.
        let shared = self.flush_subvolume_to_share(source)?;
        let txn = self.inner.core.begin_alone(Reservation::snapshot())?;
        let id = Handle { fs: self, txn }.snapshot(source, dir, name, options)?;
        drop(shared);
        // Whoever keeps an inode without a name has it in the source. The snapshot is there by now,
        // whatever keeps them from going.
        match self.clean_orphans_or_later(id.root) {
            Err(error @ Error::Aborted { .. }) => Err(error),
            Err(_) => {
                self.inner.files.names().note_late(id.root);
                Ok(id)
            }
            Ok(()) => Ok(id),
        }
    }

    /// Makes a subvolume read-only, or writable. A writable one forgets what it was received from,
    /// which it may no longer be. Durable with the next commit.
    ///
    /// # Errors
    /// `NotFound` when there is no such subvolume.
    pub fn set_subvolume_read_only(&self, root: RootId, read_only: bool) -> Result<()> {
        if read_only {
            self.flush_subvolume(root)?;
        }
        let reservation = match read_only {
            true => Reservation::items(4),
            false => Reservation::allow_removal_in_subvolumes(),
        };
        let txn = self.inner.core.begin_alone(reservation)?;
        let mut handle = Handle { fs: self, txn };
        let item = handle.live_root_item(root)?;
        if (item.flags.get() & root_flags::RDONLY != 0) == read_only {
            return Ok(());
        }
        let core = handle.txn.core();
        // What is remembered of it is read before anything changes: that may fail.
        self.inner.files.names().check_known(core, root)?;
        if read_only {
            // What is held of it would become items after it became read-only.
            self.inner.files.write_inodes(&mut self.inner.files.names(), &mut handle.txn)?;
        }
        handle.txn.change_root_item(root, |item| {
            if read_only {
                item.flags |= zerocopy::little_endian::U64::new(root_flags::RDONLY);
            } else {
                item.flags = (item.flags.get() & !root_flags::RDONLY).into();
                forget_origin(item);
            }
        })?;
        if !read_only {
            let received = Uuid(item.received_uuid);
            let ty = KeyType::UUID_KEY_RECEIVED_SUBVOL;
            let txn = &mut handle.txn;
            uuid_tree::remove(txn, ty, received, root).map_err(|error| txn.abort(error))?;
        }
        self.inner.files.names().set_read_only(core, root, read_only)
    }
}

/// Makes a root item that of a subvolume that was not received.
fn forget_origin(item: &mut ubtrfs_ondisk::root::RootItem) {
    item.received_uuid = Uuid::NIL.0;
    item.stransid = 0.into();
    item.rtransid = 0.into();
    item.stime = Default::default();
    item.rtime = Default::default();
}

impl Handle<'_> {
    fn snapshot(
        &mut self,
        source: RootId,
        dir: InodeId,
        name: &[u8],
        options: &SnapshotOptions,
    ) -> Result<InodeId> {
        let (generation, now) = (self.txn.generation(), self.txn.now());
        let source_item = self.live_root_item(source)?;
        let core = self.txn.core();
        let files = &self.fs.inner.files;
        let mut names = files.names();
        names.check_writable(core, dir.root)?;
        names.check_not_deleted(dir.root)?;
        let parent = names.hold(core, dir)?;
        check_directory(dir, &parent.item)?;
        let dir_flags = parent.item.flags.get();
        let index = parent.next_index(core, dir)?;
        check_new_name(self.fs, core, dir, name)?;
        // In this order, unlike where a file is made: as Linux.
        check_flags(dir, dir_flags, true)?;
        if options.read_only {
            let received = Uuid(source_item.received_uuid);
            uuid_tree::check_room(&self.txn, KeyType::UUID_KEY_RECEIVED_SUBVOL, received)?;
        }
        let root = names.take_root(core)?;
        files.write_inodes(&mut names, &mut self.txn)?;

        let uuid = Uuid(core.runtime.identifiers.uuid());
        let source_tree = core.roots.tree(source)?;
        let has_changed = source_tree.root().generation == generation;
        let mut received = Uuid::NIL;
        self.txn.write_early(&source_tree)?;
        let _replacement = files.replace_name(&mut names);
        self.txn.copy_tree(&source_tree, root, |item| {
            item.uuid = uuid.0;
            item.parent_uuid = source_item.uuid;
            item.otransid = generation.0.into();
            item.otime = timespec(now);
            if has_changed {
                item.ctransid = generation.0.into();
                item.ctime = timespec(now);
            }
            item.flags = (item.flags.get() & !root_flags::RDONLY).into();
            if options.read_only {
                item.flags = (item.flags.get() | root_flags::RDONLY).into();
                received = Uuid(item.received_uuid);
            } else {
                forget_origin(item);
            }
        })?;
        names.go_on_with_numbers(source, root);
        let txn = &mut self.txn;
        insert_root_refs(txn, dir, root, index, name).map_err(|error| txn.abort(error))?;
        uuid_tree::add(txn, KeyType::UUID_KEY_SUBVOL, uuid, root)
            .and_then(|()| uuid_tree::add(txn, KeyType::UUID_KEY_RECEIVED_SUBVOL, received, root))
            .map_err(|error| txn.abort(error))?;
        let location = Key::new(root.object_id(), KeyType::ROOT_ITEM, u64::MAX);
        let entry = EntryBytes::new(location, generation.0, FileType::Directory, name);
        insert_name(txn, dir, name, index, &entry).map_err(|error| txn.abort(error))?;

        let parent = names.hold(core, dir).map_err(|error| core.abort(error))?;
        parent.count_name_at(index, name.len(), generation.0, now);
        files.mark_dirty(&mut self.txn, dir, parent)?;
        Ok(InodeId::root_of(root))
    }

    /// The root item of a subvolume that is not deleted.
    ///
    /// # Errors
    /// `NotFound`.
    pub(super) fn live_root_item(&self, root: RootId) -> Result<ubtrfs_ondisk::root::RootItem> {
        let item = match root.is_subvolume() {
            true => self.fs.root_item(root)?,
            false => None,
        };
        match item {
            Some((_, item)) if item.refs.get() > 0 => Ok(item),
            _ => Err(Error::not_found(format!("subvolume {root}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use ubtrfs_ondisk::FileOffset;
    use ubtrfs_rt::{Arc, Runtime, Time};
    use ubtrfs_volume::{Device, MemDevice, Volume, VolumeOptions};

    use super::*;
    use crate::filesystem::OpenOptions;
    use crate::fs::make::NewInode;
    use crate::mkfs::{MkfsOptions, mkfs};

    /// A file without a name that somebody has open when a snapshot is taken goes from the source before it goes from the snapshot, all
    /// in one transaction, as threads can have it. There its reference was taken back before the leaf was copied that had been
    /// shared, which gave it that reference: nobody took its checksums back, and they stayed for space that was free.
    #[test]
    fn file_without_a_name_that_goes_from_both_sides_of_a_snapshot_leaves_no_checksums() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        let runtime = Arc::new(Runtime::simulated(1));
        let volume = mkfs(vec![Arc::clone(&device)], &MkfsOptions::default(), &runtime).unwrap();
        let options = OpenOptions { runtime, ..OpenOptions::default() };
        let fs = Filesystem::open(volume, options).unwrap();
        let top = fs.top_level();
        for number in 0..300 {
            let mut handle = fs.begin(Reservation::create(0)).unwrap();
            let new = NewInode::new(0o100_644, Time::default());
            let id = handle.create(top, format!("file {number}").as_bytes(), &new).unwrap();
            drop(handle);
            fs.write(id, FileOffset(0), &[7; 5000]).unwrap();
        }
        let unnamed = [&b"file 7"[..], b"file 150"]
            .map(|name| fs.unlink_deferred(top, name).unwrap().unwrap());
        let shared = fs.flush_subvolume_to_share(top.root).unwrap();
        let txn = fs.inner.core.begin_alone(Reservation::snapshot()).unwrap();
        let options = SnapshotOptions { read_only: false };
        let copy = Handle { fs: &fs, txn }.snapshot(top.root, top, b"copy", &options).unwrap();
        drop(shared);
        unnamed.iter().for_each(|id| fs.evict(*id).unwrap());
        assert_eq!(fs.clean_orphans(copy.root).unwrap(), 2);
        fs.commit().unwrap();
        drop(fs);
        let read_only = VolumeOptions { read_only: true, ..VolumeOptions::default() };
        let volume = Volume::open(vec![device], &read_only).unwrap();
        let report = ubtrfs_check::check(&volume, &ubtrfs_check::CheckOptions::default()).unwrap();
        let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
        assert!(report.is_clean(), "{errors:#?}");
    }

    /// A number that was free again was given to another file in the copy, of the same generation: send took that for the same file, renamed.
    #[test]
    fn number_that_went_is_not_another_files_in_a_copy_of_the_same_transaction() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        let runtime = Arc::new(Runtime::simulated(1));
        let volume = mkfs(vec![device], &MkfsOptions::default(), &runtime).unwrap();
        let options = OpenOptions { runtime, ..OpenOptions::default() };
        let fs = Filesystem::open(volume, options).unwrap();
        let top = fs.top_level();
        let create = |dir: InodeId, name: &[u8]| {
            let mut handle = fs.begin(Reservation::create(0)).unwrap();
            handle.create(dir, name, &NewInode::new(0o100_644, Time::default())).unwrap()
        };
        let _held = fs.hold_commits();
        let options = SnapshotOptions { read_only: false };
        let gone = create(top, b"gone");
        let generation = fs.inode(gone).unwrap().generation;
        fs.unlink(top, b"gone").unwrap();
        let copy = fs.snapshot(top.root, top, b"copy", &options).unwrap();
        let again = fs.snapshot(copy.root, top, b"again", &options).unwrap();
        for root in [copy, again] {
            let new = create(root, b"new");
            assert_eq!(fs.inode(new).unwrap().generation, generation, "of one transaction");
            assert!(new.inode > gone.inode, "{new} as {gone}");
        }
    }
}
