//! Files that are written in parts, and how many extents they get; what has to hold for an extent that grew.

use std::path::Path;
use std::sync::Arc;

use crate::common::failing::{DataFaults, FailingDevice, Lasting};
use crate::common::full::{create, make, noise, open, read};
use crate::common::judge;
use ubtrfs_engine::{DataFile, Filesystem, OpenOptions, SnapshotOptions};
use ubtrfs_iomap::{FileOffset, Reach};
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_testkit::Prng;
use ubtrfs_volume::{FileDevice, OpenMode, Volume, VolumeOptions, Window};

const MIB: u64 = 1 << 20;
/// As Linux has it.
const EXTENT_BYTES_MAX: u64 = 128 * MIB;

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

/// The lengths of the extents that the file refers to, on the medium.
fn extents(fs: &Filesystem, file: &DataFile) -> Vec<u64> {
    let mappings = fs.file_extents(file.id(), DiskOffset(0)).unwrap().map(Result::unwrap);
    mappings.map(|mapping| mapping.disk_num_bytes).collect()
}

/// Brings what is in memory to its place, without a commit.
fn settle(fs: &Filesystem) {
    fs.flush_files().unwrap();
}

/// Each megabyte of a long file was an extent of its own, as it was written, and each 16 MiB of one that memory kept.
#[test]
fn sequential_file_has_extents_as_large_as_may_be() {
    let dir = tempfile::tempdir().unwrap();
    for (name, part_bytes) in [("by 1 MiB", MIB), ("by 64 KiB", MIB / 16), ("at once", 300 * MIB)] {
        let image = dir.path().join(name);
        make(&image, 2 << 30);
        let fs = open(&image);
        let file = create(&fs, "file", 0).unwrap();
        let bytes = noise(&mut Prng::new(1), 300 * MIB);
        for part in bytes.chunks(usize::try_from(part_bytes).unwrap()) {
            file.append(part).unwrap();
        }
        file.fsync().unwrap();
        let found = extents(&fs, &file);
        // One more where a block group ends.
        assert!(found.len() <= 4, "{name}: {found:?}");
        assert!(found.iter().all(|len| *len <= EXTENT_BYTES_MAX), "{name}: {found:?}");
        assert!(read(&fs, file.id()) == bytes, "{name}");
        drop((file, fs));
        judge(&image);
        std::fs::remove_file(&image).unwrap();
    }
}

/// An extent grows only as long as one file extent refers to it, to all of it.
#[test]
fn extent_that_is_shared_or_cut_does_not_grow() {
    type Change = fn(&Filesystem, &DataFile);
    let changes: [(&str, Change, &[u64]); 5] = [
        ("none", |_, _| (), &[2 * MIB]),
        (
            "clone",
            |fs, file| {
                let to = create(fs, "clone", 0).unwrap().id();
                let all = DiskOffset(0)..DiskOffset(MIB);
                fs.clone_range(file.id(), all, to, DiskOffset(0)).unwrap();
            },
            &[MIB, MIB],
        ),
        (
            "snapshot",
            |fs, _| {
                let top = fs.top_level();
                let options = SnapshotOptions::default();
                fs.snapshot(top.root, top, b"snapshot", &options).unwrap();
            },
            &[MIB, MIB],
        ),
        ("hole", |_, file| file.punch_hole(at(MIB / 2), 4096).unwrap(), &[MIB, 0, MIB, MIB]),
        ("front cut off", |_, file| file.punch_hole(at(0), 4096).unwrap(), &[0, MIB, MIB]),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (name, change, expected) in changes {
        let image = dir.path().join(name);
        make(&image, 512 << 20);
        let fs = open(&image);
        let file = create(&fs, "file", 0).unwrap();
        let bytes = noise(&mut Prng::new(1), 2 * MIB);
        let (first, second) = bytes.split_at(usize::try_from(MIB).unwrap());
        file.append(first).unwrap();
        settle(&fs);
        change(&fs, &file);
        file.append(second).unwrap();
        settle(&fs);
        assert_eq!(extents(&fs, &file), expected, "{name}");
        assert_ends_in(&fs, &file, second, name);
        fs.sync().unwrap();
        drop((file, fs));
        judge(&image);
        shown_as_written(&image, second, name);
    }
}

fn assert_ends_in(fs: &Filesystem, file: &DataFile, bytes: &[u8], what: &str) {
    assert!(read(fs, file.id()).ends_with(bytes), "{what}");
}

fn shown_as_written(image: &Path, end: &[u8], what: &str) {
    let fs = open(image);
    let id = fs.lookup(fs.top_level(), b"file").unwrap();
    assert!(read(&fs, id).ends_with(end), "{what}, reopened");
}

/// What is placed before something else of the same writeback fails is placed again. Had it become part of the extent before, the
/// first place of it would have been cut off that, and given no space back, though that is promised to others.
#[test]
fn extent_does_not_grow_by_what_may_be_placed_again() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let faults = Arc::<DataFaults>::default();
    let fs = open_failing(&image, &faults);
    let file = create(&fs, "file", 0).unwrap();
    let bytes = noise(&mut Prng::new(1), 2 * MIB);
    let (first, second) = bytes.split_at(usize::try_from(MIB).unwrap());
    file.append(first).unwrap();
    file.allocate(at(4 * MIB), MIB, Reach::Stays).unwrap();
    settle(&fs);
    // New space, and then preallocated space, which fails.
    file.append(second).unwrap();
    file.write(at(4 * MIB), first).unwrap();
    faults.fail_after(1, Lasting::Once);
    let flushed = file.fsync();
    assert_eq!((faults.failures(), flushed.is_ok()), (1, true), "it is tried again: {flushed:?}");
    // The first, the second, a hole, and what was preallocated.
    assert_eq!(extents(&fs, &file), [MIB, MIB, 0, MIB]);
    let expected = [&bytes[..], &vec![0; bytes.len()], first].concat();
    assert!(read(&fs, file.id()) == expected);
    drop((file, fs));
    judge(&image);
}

/// The same, where what follows it is written by somebody else before that is known: what may be placed again does not grow.
#[test]
fn what_may_be_placed_again_does_not_grow_by_what_follows_it() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open(&image);
    let file = create(&fs, "file", 0).unwrap();
    let bytes = noise(&mut Prng::new(1), 3 * MIB);
    let part = |index: usize| &bytes[index << 20..(index + 1) << 20];
    file.append(part(0)).unwrap();
    file.allocate(at(4 * MIB), MIB, Reach::Stays).unwrap();
    settle(&fs);
    // New space and preallocated space in one writeback, and then what lies behind the new.
    file.append(part(1)).unwrap();
    file.write(at(4 * MIB), part(0)).unwrap();
    settle(&fs);
    file.write(at(2 * MIB), part(2)).unwrap();
    settle(&fs);
    let mappings = fs.file_extents(file.id(), DiskOffset(0)).unwrap().map(Result::unwrap);
    let places: Vec<_> = mappings.map(|one| (one.disk_bytenr.0, one.disk_num_bytes)).collect();
    let lens: Vec<u64> = places.iter().map(|(_, len)| *len).collect();
    assert_eq!(lens, [MIB, MIB, MIB, 0, MIB]);
    assert_eq!(places[1].0 + MIB, places[2].0, "it could have become part of what lies before");
    drop((file, fs));
    judge(&image);
}

fn open_failing(image: &Path, faults: &Arc<DataFaults>) -> Filesystem {
    let inner = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let device = FailingDevice::new(inner, Arc::clone(faults));
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, OpenOptions::default()).unwrap()
}

/// What grew is given back as one, in the same transaction and in a later one.
#[test]
fn extent_that_grew_is_freed_whole() {
    let dir = tempfile::tempdir().unwrap();
    for is_later in [false, true] {
        let image = dir.path().join("image");
        make(&image, 512 << 20);
        let fs = open(&image);
        let is_data = |flags: BlockGroupFlags| flags.contains(BlockGroupFlags::DATA);
        let used = || {
            let usage = fs.usage().unwrap();
            usage
                .spaces
                .iter()
                .filter(|space| is_data(space.flags))
                .map(|space| space.used_bytes)
                .sum::<u64>()
        };
        let file = create(&fs, "file", 0).unwrap();
        fs.sync().unwrap();
        let before = used();
        for part in noise(&mut Prng::new(1), 8 * MIB).chunks(1 << 20) {
            file.append(part).unwrap();
            settle(&fs);
        }
        assert_eq!(extents(&fs, &file), [8 * MIB]);
        if is_later {
            fs.sync().unwrap();
        }
        file.truncate(at(0)).unwrap();
        fs.sync().unwrap();
        fs.sync().unwrap();
        assert_eq!(used(), before, "later: {is_later}");
        drop((file, fs));
        judge(&image);
    }
}
