//! Data that is promised the space that its file has already: on a full filesystem, what was
//! preallocated, or is written in place, takes data still.
//!
//! Such a promise is void as soon as others show the space, too: a snapshot, a clone. Then the data would
//! need space of its own, which nobody kept for it. So who shares a file's extents first lets all that was
//! promised so become stale or go to the medium, and no promise is made until the extents are shared:
//! promises are made one at a time, beside any number of those who share.

use ubtrfs_iomap::{FileOffset, FileRange};
use ubtrfs_ondisk::RootId;
use ubtrfs_rt::{Ordering, RwLockReadGuard, RwLockWriteGuard};

use super::file_io::IoInode;
use super::inode::InodeId;
use super::writeback::has_own_space;
use crate::data::file_extent::ExtentWalk;
use crate::error::Result;
use crate::filesystem::Filesystem;
use crate::txn::Reservation;

impl Filesystem {
    /// Held by who promises data the space that its file has, from the look at it until the mapping is
    /// taken.
    pub(super) fn lock_placing(&self) -> RwLockWriteGuard<'_, ()> {
        self.inner.open_files.placing.write()
    }

    /// Brings what a file has in memory to the medium, to be shared: until the guard is dropped no dirty
    /// data counts on its space. The thread holds no handle.
    ///
    /// # Errors
    /// As [`Filesystem::flush_file`].
    pub(super) fn flush_to_share(&self, id: InodeId) -> Result<RwLockReadGuard<'_, ()>> {
        let shared = self.inner.open_files.placing.read();
        if let Some(space) = self.inner.open_files.find(id) {
            space.inode().void_places();
        }
        self.flush_file(id)?;
        Ok(shared)
    }

    /// As [`Filesystem::flush_to_share`], of all files of a subvolume.
    ///
    /// # Errors
    /// As there.
    pub(super) fn flush_subvolume_to_share(&self, root: RootId) -> Result<RwLockReadGuard<'_, ()>> {
        // Most of it while others may still be promised their places.
        self.flush_subvolume(root)?;
        let shared = self.inner.open_files.placing.read();
        for space in self.inner.open_files.of_subvolume(root) {
            space.inode().void_places();
        }
        self.flush_subvolume(root)?;
        Ok(shared)
    }

    /// Promises that the front of a range is written where the file has its space, as far as it has. Until
    /// the guard is dropped nobody shares it.
    ///
    /// # Errors
    /// Damage, or the device's error.
    pub(super) fn lock_places(
        &self,
        io: &IoInode,
        range: FileRange,
    ) -> Result<Option<(RwLockWriteGuard<'_, ()>, FileRange)>> {
        if !io.may_have_space_at(self, range.start.bytes())? {
            return Ok(None);
        }
        let alone = self.lock_placing();
        let front = {
            // While it is held no commit moves references from the queue to the tree, between which nobody sees them.
            let _handle = self.begin_step(Reservation::items(0).promised())?;
            io.with_space(self, range)?
        };
        if front.is_empty() {
            return Ok(None);
        }
        self.inner.core.alloc.promise_placed_data(front.len_bytes());
        Ok(Some((alone, front)))
    }
}

impl IoInode {
    /// Mappings by which data may go where the file has its space are stale from now on, where it is not
    /// dirty yet.
    fn void_places(&self) {
        if self.has_placed.swap(false, Ordering::AcqRel) {
            drop(self.change_mappings());
        }
    }

    /// As [`IoInode::has_space_at`], for who holds no handle: without one a commit may move references from the queue to the tree, between
    /// which nobody sees them.
    pub(super) fn may_have_space_at(&self, fs: &Filesystem, at: u64) -> Result<bool> {
        if !has_own_space(&fs.disk_inode(self.id)?) {
            return Ok(false);
        }
        let _handle = fs.begin_step(Reservation::items(0).promised())?;
        self.has_space_at(fs, at)
    }

    /// Whether data at `at` is written where the file has its space. The caller has a handle.
    pub(super) fn has_space_at(&self, fs: &Filesystem, at: u64) -> Result<bool> {
        Ok(self.space_from(fs, at)? > at)
    }

    /// The front of a range that is.
    fn with_space(&self, fs: &Filesystem, range: FileRange) -> Result<FileRange> {
        let mut front = FileRange::new(range.start, range.start);
        while front.end < range.end {
            let end = FileOffset::new(self.space_from(fs, front.end.bytes())?).min(range.end);
            if end <= front.end {
                break;
            }
            front.end = end;
        }
        Ok(front)
    }

    /// How far data from `at` on is written where the file has its space.
    fn space_from(&self, fs: &Filesystem, at: u64) -> Result<u64> {
        let inode = fs.disk_inode(self.id)?;
        let tree = fs.tree(self.id.root)?;
        let mut walk = ExtentWalk::new(&tree, self.of(fs), ubtrfs_ondisk::FileOffset(at));
        let Some(mapping) = walk.next()? else { return Ok(at) };
        let stays = fs.is_written_in_place(self, &inode, &walk, &mapping)?;
        Ok(if stays { walk.position() } else { at })
    }
}

#[cfg(test)]
mod tests {
    use ubtrfs_iomap::{FileOffset, FileRange, FileSystem, Purpose, Reach};
    use ubtrfs_rt::{Arc, Runtime, Time};
    use ubtrfs_volume::MemDevice;

    use super::super::file_io::FileIo;
    use crate::{
        DataFile, Error, Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, PreparedData,
        Reservation, SetAttributes, SnapshotOptions, mkfs,
    };
    use ubtrfs_ondisk::inode::flags;

    const LEN: u64 = 1 << 20;

    fn create(fs: &Filesystem, name: &[u8]) -> DataFile {
        let new = NewInode::new(0o100_644, Time::default());
        let top = fs.top_level();
        let id = fs.begin(Reservation::create(0)).unwrap().create(top, name, &new).unwrap();
        fs.open_data(id).unwrap()
    }

    fn append(fs: &Filesystem, id: InodeId, bytes: Vec<u8>) {
        let mut appender = fs.appender(id, bytes.len() as u64).unwrap();
        let data = PreparedData::new(bytes, &fs.write_options(None));
        appender.push(ubtrfs_ondisk::FileOffset(0), data).unwrap();
        appender.finish().unwrap();
    }

    fn create_in_place(fs: &Filesystem) -> DataFile {
        let file = create(fs, b"in place");
        let flags = Some(flags::NODATACOW | flags::NODATASUM);
        let attributes = SetAttributes { flags, ..SetAttributes::default() };
        fs.begin(Reservation::items(1)).unwrap().set_attributes(file.id(), &attributes).unwrap();
        file
    }

    /// A full filesystem, with a file that is preallocated.
    fn full() -> (Filesystem, DataFile) {
        let device = Arc::new(MemDevice::new(160 << 20));
        let runtime = Arc::new(Runtime::simulated(1));
        let volume = mkfs(vec![device], &MkfsOptions::default(), &runtime).unwrap();
        let options = OpenOptions { runtime, ..OpenOptions::default() };
        let fs = Filesystem::open(volume, options).unwrap();
        let file = create(&fs, b"allocated");
        file.allocate(FileOffset::ZERO, LEN, Reach::Extends).unwrap();
        let filler = create(&fs, b"filler");
        while filler.allocate(filler.size(), 64 << 10, Reach::Extends).is_ok() {}
        while filler.allocate(filler.size(), 4096, Reach::Extends).is_ok() {}
        fs.sync().unwrap();
        (fs, file)
    }

    /// A write had its place, then came the snapshot or the clone, then the bytes: they became dirty, and
    /// there was no space to write them to.
    #[test]
    fn mapping_by_which_data_has_its_place_is_stale_once_the_file_is_shared() {
        let shared_by: [fn(&Filesystem, &DataFile); 2] = [
            |fs, _| {
                let top = fs.top_level();
                fs.snapshot(top.root, top, b"snapshot", &SnapshotOptions::default()).unwrap();
            },
            |fs, file| {
                let copy = create(fs, b"copy").id();
                let disk = ubtrfs_ondisk::FileOffset;
                fs.clone_range(file.id(), disk(0)..disk(LEN), copy, disk(0)).unwrap();
            },
        ];
        for share in shared_by {
            let (fs, file) = full();
            let (io, inode) = (FileIo::new(&fs), file.space().inode());
            let range = FileRange::with_len(FileOffset::ZERO, 64 << 10);
            let mapping = io.map(inode, range, Purpose::Write).unwrap();
            assert!(mapping.flags.is_placed && io.sequence(inode).is_current(mapping.cookie));
            share(&fs, &file);
            assert!(!io.sequence(inode).is_current(mapping.cookie));
            io.unreserve(inode, mapping.range.intersection(range).len_bytes());
            let again = io.map(inode, range, Purpose::Write);
            assert!(matches!(again, Err(Error::NoSpace { .. })), "{again:?}");
            assert!(matches!(file.write(FileOffset::ZERO, &[1; 4096]), Err(Error::NoSpace { .. })));
            fs.sync().unwrap();
        }
    }

    /// Space that was allocated in the transaction in which a snapshot had been made was never written in place: it has the generation of that,
    /// as if the snapshot had it, too. Linux has its snapshots at the end of transactions.
    #[test]
    fn space_allocated_behind_a_snapshot_takes_its_data_on_a_full_filesystem() {
        let (fs, file) = full();
        file.truncate(FileOffset::ZERO).unwrap();
        fs.sync().unwrap();
        let top = fs.top_level();
        fs.snapshot(top.root, top, b"snapshot", &SnapshotOptions::default()).unwrap();
        file.allocate(FileOffset::ZERO, LEN, Reach::Extends).unwrap();
        let filler = create(&fs, b"rest");
        while filler.allocate(filler.size(), 4096, Reach::Extends).is_ok() {}
        file.write(FileOffset::ZERO, &[1; 4096]).unwrap();
        fs.sync().unwrap();
        let id = file.id();
        drop(file);
        // Closed, too.
        fs.write(id, ubtrfs_ondisk::FileOffset(8192), &[2; 4096]).unwrap();
        let mut bytes = vec![9; 3 * 4096];
        fs.read(id, ubtrfs_ondisk::FileOffset(0), &mut bytes).unwrap();
        assert!(bytes == [[1; 4096], [0; 4096], [2; 4096]].concat());
    }

    /// Data that is written in place, too: by who has the file open, and by who has not.
    #[test]
    fn data_written_in_place_behind_a_snapshot_is_written_over_on_a_full_filesystem() {
        let disk = ubtrfs_ondisk::FileOffset;
        for way in ["open", "closed", "appended"] {
            let (fs, space) = full();
            let file = create_in_place(&fs);
            let id = file.id();
            space.truncate(FileOffset::ZERO).unwrap();
            fs.sync().unwrap();
            let top = fs.top_level();
            fs.snapshot(top.root, top, b"snapshot", &SnapshotOptions::default()).unwrap();
            if way == "open" {
                file.write(FileOffset::ZERO, &[1; 3 * 4096]).unwrap();
                file.fsync().unwrap();
            }
            drop(file);
            if way == "closed" {
                fs.write(id, disk(0), &[1; 3 * 4096]).unwrap();
            }
            if way == "appended" {
                append(&fs, id, vec![1; 3 * 4096]);
            }
            let filler = create(&fs, b"rest");
            while filler.allocate(filler.size(), 4096, Reach::Extends).is_ok() {}
            fs.sync().unwrap();
            fs.write(id, disk(4096), &[2; 4096]).unwrap();
            fs.open_data(id).unwrap().write(FileOffset::new(8192), &[3; 4096]).unwrap();
            fs.sync().unwrap();
            let mut bytes = vec![9; 3 * 4096];
            fs.read(id, disk(0), &mut bytes).unwrap();
            assert!(bytes == [[1; 4096], [2; 4096], [3; 4096]].concat(), "{way}");
        }
    }

    /// What was freed in the same transaction was no space for what is appended.
    #[test]
    fn appended_data_gets_space_that_only_a_commit_frees() {
        let (fs, file) = full();
        let id = create(&fs, b"appended").id();
        file.truncate(FileOffset::ZERO).unwrap();
        let bytes = vec![5; usize::try_from(LEN / 2).unwrap()];
        append(&fs, id, bytes.clone());
        let mut have = vec![0; bytes.len()];
        fs.read(id, ubtrfs_ondisk::FileOffset(0), &mut have).unwrap();
        assert!(have == bytes);
    }

    /// It was dirty in memory, for as long as nobody asked that it be stored.
    #[test]
    fn front_of_a_closed_write_that_fails_is_on_the_medium() {
        let (fs, space) = full();
        space.truncate(FileOffset::ZERO).unwrap();
        fs.sync().unwrap();
        let file = create_in_place(&fs);
        let id = file.id();
        file.allocate(FileOffset::ZERO, 4096, Reach::Extends).unwrap();
        file.fsync().unwrap();
        drop(file);
        let filler = create(&fs, b"rest");
        while filler.allocate(filler.size(), 4096, Reach::Extends).is_ok() {}
        fs.sync().unwrap();
        let written = fs.write(id, ubtrfs_ondisk::FileOffset(0), &[2; 8192]);
        assert!(matches!(written, Err(Error::NoSpace { .. })), "{written:?}");
        assert!(!fs.is_open(id), "nothing is dirty");
        let mut bytes = vec![9; 4096];
        assert_eq!(fs.read(id, ubtrfs_ondisk::FileOffset(0), &mut bytes).unwrap(), 4096);
        assert!(bytes == [2; 4096]);
    }

    /// What a clone brings behind a snapshot, of a file that is not in that, belongs to the clone alone when its source is gone.
    #[test]
    fn data_cloned_behind_a_snapshot_is_written_over_on_a_full_filesystem() {
        let disk = ubtrfs_ondisk::FileOffset;
        for is_allocated in [false, true] {
            let (fs, space) = full();
            space.truncate(FileOffset::ZERO).unwrap();
            fs.sync().unwrap();
            let top = fs.top_level();
            let new = NewInode::new(0o040_755, fs.runtime().clock.now());
            let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
            let sub = handle.create_subvolume(top, b"sub", &new).unwrap();
            drop(handle);
            let create_in = |dir, name: &[u8]| {
                let new = NewInode::new(0o100_644, fs.runtime().clock.now());
                let mut handle = fs.begin(Reservation::create(0)).unwrap();
                let id = handle.create(dir, name, &new).unwrap();
                let bits = if is_allocated { 0 } else { flags::NODATACOW | flags::NODATASUM };
                let attributes = SetAttributes { flags: Some(bits), ..SetAttributes::default() };
                handle.set_attributes(id, &attributes).unwrap();
                id
            };
            let source = create_in(top, b"source");
            let file = fs.open_data(source).unwrap();
            file.allocate(FileOffset::ZERO, 4096, Reach::Extends).unwrap();
            if !is_allocated {
                file.write(FileOffset::ZERO, &[1; 4096]).unwrap();
            }
            file.fsync().unwrap();
            drop(file);
            let copy = create_in(sub, b"copy");
            fs.sync().unwrap();
            fs.snapshot(sub.root, top, b"snapshot", &SnapshotOptions::default()).unwrap();
            fs.clone_range(source, disk(0)..disk(4096), copy, disk(0)).unwrap();
            fs.unlink(top, b"source").unwrap();
            fs.sync().unwrap();
            let filler = create(&fs, b"rest");
            while filler.allocate(filler.size(), 4096, Reach::Extends).is_ok() {}
            fs.sync().unwrap();
            fs.write(copy, disk(0), &[2; 4096]).unwrap();
            fs.sync().unwrap();
            let mut bytes = vec![9; 4096];
            fs.read(copy, disk(0), &mut bytes).unwrap();
            assert!(bytes == [2; 4096], "{is_allocated}");
        }
    }

    /// The block in which the file ends is written over first.
    #[test]
    fn closed_file_takes_data_behind_its_end_in_its_space_on_a_full_filesystem() {
        let (fs, space) = full();
        space.truncate(FileOffset::ZERO).unwrap();
        fs.sync().unwrap();
        let file = create_in_place(&fs);
        let id = file.id();
        file.allocate(FileOffset::ZERO, LEN, Reach::Stays).unwrap();
        file.write(FileOffset::ZERO, &[1; 100]).unwrap();
        file.fsync().unwrap();
        drop(file);
        let filler = create(&fs, b"rest");
        while filler.allocate(filler.size(), 4096, Reach::Extends).is_ok() {}
        fs.sync().unwrap();
        fs.write(id, ubtrfs_ondisk::FileOffset(8192), &[2; 4096]).unwrap();
        let mut bytes = vec![9; 3 * 4096];
        fs.read(id, ubtrfs_ondisk::FileOffset(0), &mut bytes).unwrap();
        assert!(bytes == [&[1; 100][..], &[0; 8092], &[2; 4096]].concat());
    }

    /// What goes of the file makes room for the block in which it ends. By memory that block would be first.
    #[test]
    fn file_of_many_extents_is_cut_inside_a_block_on_a_full_filesystem() {
        let (fs, file) = full();
        file.truncate(FileOffset::ZERO).unwrap();
        fs.sync().unwrap();
        let many = create(&fs, b"many");
        let id = many.id();
        for block in 0..4 {
            many.write(FileOffset::new(4096 * block), &[1; 4096]).unwrap();
            many.fsync().unwrap();
        }
        drop(many);
        while file.allocate(file.size(), 4096, Reach::Extends).is_ok() {}
        fs.sync().unwrap();
        let written = create(&fs, b"none").write(FileOffset::ZERO, &[1; 4096]);
        assert!(matches!(written, Err(Error::NoSpace { .. })), "{written:?}");
        fs.truncate(id, 5000).unwrap();
        let mut bytes = [0; 8192];
        assert_eq!(fs.read(id, ubtrfs_ondisk::FileOffset(0), &mut bytes).unwrap(), 5000);
        assert_eq!(bytes[..5000], [1; 5000]);
    }
}
