//! Data that becomes many extents, as what is free lies in fragments: what the commit needs for them is there before it begins.

use ubtrfs_iomap::{FileOffset, FileRange, Reach};
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_volume::MemDevice;

use super::*;
use crate::{DataFile, Error, InodeId, MappingKind, NewInode, PreparedData};

const BLOCK: u64 = 4096;
/// Data that comes, in blocks.
const BLOCKS: u64 = 2000;
/// Of them, extents that stay between two free blocks: enough for each to lie in a leaf of its own, or nearly.
const KEPT: u64 = 24;

fn create(fs: &Filesystem, name: &str) -> Result<InodeId, Error> {
    let new = NewInode::new(0o100_644, fs.runtime().clock.now());
    fs.begin(Reservation::create(0))?.create(fs.top_level(), name.as_bytes(), &new)
}

fn open(fs: &Filesystem, name: &str) -> DataFile {
    fs.open_data(create(fs, name).unwrap()).unwrap()
}

/// Whose free data space is single blocks, in as many leaves of the extent tree, and which has no metadata to spare.
fn fragmented() -> (Arc<MemDevice>, Filesystem) {
    fragmented_after(|_| {})
}

/// As [`fragmented`], behind what `first` does.
fn fragmented_after(first: impl FnOnce(&Filesystem)) -> (Arc<MemDevice>, Filesystem) {
    let device = Arc::new(MemDevice::new(512 << 20));
    let options = MkfsOptions {
        nodesize_bytes: 4096,
        metadata_profile: Some(BlockGroupFlags::default()),
        ..MkfsOptions::default()
    };
    let fs = mkfs_on(&device, &options);
    first(&fs);
    let many = open(&fs, "many");
    for block in 0..BLOCKS * (KEPT + 1) {
        // Not beside each other in the file, so an extent each.
        many.write(FileOffset::new(2 * block * BLOCK), &[1; BLOCK as usize]).unwrap();
    }
    fs.sync().unwrap();
    let filler = open(&fs, "filler");
    for len in [16 << 20, 64 << 10, BLOCK] {
        while filler.allocate(filler.size(), len, Reach::Extends).is_ok() {}
    }
    fs.sync().unwrap();
    for hole in 0..BLOCKS {
        let block = FileOffset::new(2 * hole * (KEPT + 1) * BLOCK);
        many.punch_hole(block, BLOCK).unwrap();
    }
    fs.sync().unwrap();
    use_up_metadata(&fs);
    (device, fs)
}

/// Makes files until there is no metadata for another one.
fn use_up_metadata(fs: &Filesystem) {
    for number in 0.. {
        let made = create(fs, &format!("inline {number}"));
        let written = made.and_then(|id| fs.write(id, DiskOffset(0), &[3; 1000]));
        match written {
            Ok(()) => {}
            Err(Error::NoSpace { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    fs.sync().unwrap();
}

fn assert_whole(device: Arc<MemDevice>, fs: Filesystem) {
    fs.commit().unwrap();
    let report = ubtrfs_check::check(fs.volume(), &Default::default()).unwrap();
    assert!(report.is_clean(), "{:?}", report.errors().collect::<Vec<_>>());
    drop((fs, device));
}

#[test]
fn extents_are_reserved_for_as_the_commit_needs_it() {
    let (device, fs) = fragmented();
    let core = &fs.inner.core;
    let bytes = |count| {
        core.begin(Reservation::extents(count).promised()).map(|handle| handle.reserved_bytes())
    };
    let tree_bytes = core.roots.tree(RootId::EXTENT_TREE).unwrap().read().bytes_used;
    // Or there is no space for so many.
    if let Ok(bytes) = bytes(BLOCKS) {
        assert!(bytes >= tree_bytes.min(3 * BLOCKS * 4096), "{bytes} of {tree_bytes}");
    }
    assert_whole(device, fs);
}

#[test]
fn writeback_to_fragments_where_metadata_is_short_aborts_nothing() {
    let (device, fs) = fragmented();
    let file = fs.open_data(fs.lookup(fs.top_level(), b"inline 0").unwrap()).unwrap();
    for piece in 0..BLOCKS / 100 {
        let written = file.write(FileOffset::new(piece * 100 * BLOCK), &[4; 100 * BLOCK as usize]);
        assert!(matches!(written, Ok(_) | Err(Error::NoSpace { .. })), "{written:?}");
    }
    let flushed = file.space().flush(FileRange::from(FileOffset::ZERO));
    assert!(matches!(flushed, Ok(()) | Err(Error::NoSpace { .. })), "{flushed:?}");
    let synced = file.fsync();
    assert!(matches!(synced, Ok(()) | Err(Error::NoSpace { .. })), "{synced:?}");
    let extents = fs.file_extents(file.id(), DiskOffset(0)).unwrap().count();
    assert!(extents as u64 > BLOCKS / 2, "{extents}: what was free was no fragments");
    drop(file);
    assert_whole(device, fs);
}

#[test]
fn appending_to_fragments_where_metadata_is_short_aborts_nothing() {
    let (device, fs) = fragmented();
    let id = fs.lookup(fs.top_level(), b"inline 1").unwrap();
    fs.truncate(id, 0).unwrap();
    let mut appender = fs.appender(id, BLOCKS * BLOCK).unwrap();
    let mut appended = Ok(());
    for piece in 0..BLOCKS / 250 {
        let data = PreparedData::new(vec![5; 250 * BLOCK as usize], &fs.write_options(None));
        appended = appended.and_then(|()| appender.push(DiskOffset(piece * 250 * BLOCK), data));
    }
    let appended = appended.and_then(|()| appender.finish());
    assert!(matches!(appended, Ok(()) | Err(Error::NoSpace { .. })), "{appended:?}");
    assert_whole(device, fs);
}

/// Writes single blocks anywhere in the space of `file`, by `write`, until one is refused.
fn write_until_refused(
    file: &DataFile,
    mut write: impl FnMut(FileOffset, &[u8]) -> Result<usize, Error>,
) -> Option<u64> {
    // One of two, once: each lies where it was allocated, and none becomes one extent with another.
    const STEP: u64 = 7919;
    let blocks = file.size().bytes() / BLOCK / 2;
    for count in 0..blocks.next_multiple_of(STEP) - 1 {
        let block = count * STEP % (blocks.next_multiple_of(STEP) - 1);
        if block >= blocks {
            continue;
        }
        match write(FileOffset::new(2 * block * BLOCK), &[6; BLOCK as usize]) {
            Ok(written) => assert_eq!(written as u64, BLOCK),
            Err(Error::NoSpace { .. }) => return Some(count),
            Err(error) => panic!("{error}"),
        }
    }
    None
}

fn find(fs: &Filesystem, name: &str) -> DataFile {
    fs.open_data(fs.lookup(fs.top_level(), name.as_bytes()).unwrap()).unwrap()
}

/// Where there is another subvolume, blocks may be shared, and a handle is granted less easily: writes were taken all the same, until there
/// was none for them, and what had been taken was lost.
#[test]
fn data_that_was_taken_is_stored_beside_another_subvolume() {
    let (device, fs) = fragmented_after(|fs| {
        let new = NewInode::new(0o040_755, fs.runtime().clock.now());
        let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
        handle.create_subvolume(fs.top_level(), b"subvolume", &new).unwrap();
    });
    // What there is of subvolumes is looked for as it is opened: until then less was kept back.
    drop(fs);
    let fs = open_on(Arc::clone(&device) as Arc<dyn Device>);
    assert!(fs.inner.core.roots.has_shared());
    // Free space is looked for.
    fs.unlink(fs.top_level(), b"inline 1").unwrap();
    let file = find(&fs, "filler");
    let mut count = 0;
    let refused = write_until_refused(&file, |at, bytes| {
        count += 1;
        if count % 100 == 0 {
            file.space().flush(FileRange::from(FileOffset::ZERO)).unwrap();
        }
        file.write(at, bytes)
    });
    file.fsync().unwrap();
    assert!(refused > Some(100), "{refused:?}");
    drop(file);
    assert_whole(device, fs);
}

/// A filesystem with no metadata to spare, and much space for data, behind what `first` does; of which memory keeps a lot.
fn short_of_metadata<T>(first: impl FnOnce(&Filesystem) -> T) -> (Arc<MemDevice>, Filesystem, T) {
    let device = Arc::new(MemDevice::new(1 << 30));
    drop(mkfs_on(&device, &MkfsOptions::default()));
    let options =
        OpenOptions { runtime: runtime(), cache_bytes: 1 << 30, ..OpenOptions::default() };
    let opened = Arc::clone(&device) as Arc<dyn Device>;
    let volume = Volume::open(vec![opened], &VolumeOptions::default()).unwrap();
    let fs = Filesystem::open(volume, options).unwrap();
    let made = first(&fs);
    let filler = open(&fs, "filler");
    for len in [16 << 20, 64 << 10, BLOCK] {
        while filler.allocate(filler.size(), len, Reach::Extends).is_ok() {}
    }
    fs.sync().unwrap();
    filler.truncate(FileOffset::new(64 << 20)).unwrap();
    fs.sync().unwrap();
    use_up_metadata(&fs);
    (device, fs, made)
}

/// A block in the middle of an extent needs far more for its items than a part of its bytes: of many that were taken some were lost.
#[test]
fn data_that_was_taken_is_stored_of_many_single_blocks() {
    let (device, fs, file) = short_of_metadata(|fs| {
        let file = open(fs, "large");
        for piece in 0..256 {
            file.write(FileOffset::new(piece << 20), &vec![1; 1 << 20]).unwrap();
        }
        file.fsync().unwrap();
        file
    });
    let refused = write_until_refused(&file, |at, bytes| file.write(at, bytes));
    file.fsync().unwrap();
    assert!(refused > Some(1000), "{refused:?}");
    drop(file);
    assert_whole(device, fs);
}

/// Data that becomes inline needs all its bytes of metadata. Where that is short it goes where data goes.
#[test]
fn data_that_was_taken_is_stored_of_many_small_files() {
    const LEN: u64 = 2000;
    let (device, fs, files) = short_of_metadata(|fs| {
        (0..8000).map(|number| open(fs, &format!("small {number}"))).collect::<Vec<_>>()
    });
    let written: Vec<_> = files
        .into_iter()
        .filter(|file| match file.write(FileOffset::ZERO, &[7; LEN as usize]) {
            Ok(count) => count as u64 == LEN,
            Err(Error::NoSpace { .. }) => false,
            Err(error) => panic!("{error}"),
        })
        .collect();
    assert!(written.len() > 4000, "{}", written.len());
    fs.sync().unwrap();
    let is_inline = |file: &DataFile| {
        file.fsync().unwrap();
        let mut bytes = [0; LEN as usize];
        fs.read(file.id(), DiskOffset(0), &mut bytes).unwrap();
        assert_eq!(bytes, [7; LEN as usize]);
        let first = fs.file_extents(file.id(), DiskOffset(0)).unwrap().next();
        first.unwrap().unwrap().kind == MappingKind::Inline
    };
    let inline_count = written.iter().filter(|file| is_inline(file)).count();
    assert!((10..written.len() - 10).contains(&inline_count), "{inline_count}");
    drop(written);
    assert_whole(device, fs);
}

/// A leaf that a snapshot has, too, is copied for good when one of its files changes: what that takes was not kept back.
#[test]
fn data_that_was_taken_is_stored_in_leaves_that_a_snapshot_has() {
    const FILES: usize = 8000;
    let contents = |byte: u8| vec![byte; 1000];
    let (device, fs, files) = short_of_metadata(|fs| {
        let make = |number| {
            let file = open(fs, &format!("shared {number}"));
            file.write(FileOffset::ZERO, &contents(1)).unwrap();
            file
        };
        let files: Vec<_> = (0..FILES).map(make).collect();
        fs.sync().unwrap();
        let top = fs.top_level();
        fs.snapshot(top.root, top, b"snapshot", &crate::SnapshotOptions::default()).unwrap();
        files
    });
    let mut taken = 0;
    for file in &files {
        match file.write(FileOffset::ZERO, &contents(2)) {
            Ok(count) => assert_eq!(count, 1000),
            Err(Error::NoSpace { .. }) => break,
            Err(error) => panic!("{error}"),
        }
        taken += 1;
    }
    assert!(taken > 100, "{taken}");
    fs.sync().unwrap();
    for (number, file) in files.iter().enumerate() {
        let mut bytes = contents(0);
        fs.read(file.id(), DiskOffset(0), &mut bytes).unwrap();
        assert!(bytes == contents(if number < taken { 2 } else { 1 }), "{number} of {taken}");
    }
    drop(files);
    assert_whole(device, fs);
}

/// As soon as it was seen that there is a snapshot, more was kept back for what was dirty already than there was, and that was lost.
#[test]
fn data_that_was_taken_is_stored_where_a_snapshot_is_found_later() {
    let (device, fs, ()) = short_of_metadata(|fs| {
        let file = open(fs, "large");
        for piece in 0..64 {
            file.write(FileOffset::new(piece << 20), &vec![1; 1 << 20]).unwrap();
        }
        let new = NewInode::new(0o040_755, fs.runtime().clock.now());
        let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
        let sub = handle.create_subvolume(fs.top_level(), b"sub", &new).unwrap();
        drop(handle);
        let top = fs.top_level();
        fs.snapshot(sub.root, top, b"snapshot", &crate::SnapshotOptions::default()).unwrap();
    });
    drop(fs);
    let options =
        OpenOptions { runtime: runtime(), cache_bytes: 1 << 30, ..OpenOptions::default() };
    let opened = Arc::clone(&device) as Arc<dyn Device>;
    let volume = Volume::open(vec![opened], &VolumeOptions::default()).unwrap();
    let fs = Filesystem::open(volume, options).unwrap();
    fs.unlink(fs.top_level(), b"inline 1").unwrap();
    assert!(!fs.inner.core.roots.has_snapshots());
    let file = find(&fs, "large");
    write_until_refused(&file, |at, bytes| file.write(at, bytes));
    let snapshot = fs.lookup(fs.top_level(), b"snapshot").unwrap();
    fs.inode(snapshot).unwrap();
    assert!(fs.inner.core.roots.has_snapshots());
    file.fsync().unwrap();
    drop(file);
    assert_whole(device, fs);
}
