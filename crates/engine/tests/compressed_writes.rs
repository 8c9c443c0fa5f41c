//! Long compressed writes, of which a part is on the medium while more is compressed.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::failing::{DataFaults, FailingDevice, Lasting};
use common::full::{create, fill, noise, open_with, read};
use common::judge;
use ubtrfs_engine::{DataFile, Filesystem, Method, MkfsOptions, OpenOptions, mkfs};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::{Executor, Runtime};
use ubtrfs_testkit::Prng;
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

const MIB: usize = 1 << 20;
const EXTENT: usize = 128 << 10;
/// What is written to the medium together is some of these, and no whole number of them.
const LEN: usize = 17 * MIB + 3 * EXTENT + 5 * 4096;

fn make(image: &Path) {
    std::fs::File::create(image).unwrap().set_len(256 << 20).unwrap();
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    mkfs(vec![Arc::new(device)], &MkfsOptions::default(), &Arc::new(Runtime::simulated(3)))
        .unwrap();
}

fn options(executor: Executor) -> OpenOptions {
    OpenOptions {
        runtime: Arc::new(Runtime { executor, ..Runtime::simulated(4) }),
        compression: Some(Method::with_default_level(Compression::Zstd)),
        force_compression: true,
        ..OpenOptions::default()
    }
}

/// Of each extent two thirds are noise, so that it shrinks to 88 KiB.
fn contents(seed: u64) -> Vec<u8> {
    let mut random = Prng::new(seed);
    let mut bytes = noise(&mut random, LEN as u64);
    bytes.truncate(LEN);
    for extent in bytes.chunks_mut(EXTENT) {
        let noise_len = extent.len() * 2 / 3;
        extent[noise_len..].fill(0);
    }
    bytes
}

/// Where its extents are on the medium, how long they are there, and whether they are compressed.
fn extents(fs: &Filesystem, file: &DataFile) -> Vec<(u64, u64, bool)> {
    let mappings = fs.file_extents(file.id(), DiskOffset(0)).unwrap().map(Result::unwrap);
    let extent = |mapping: ubtrfs_engine::Mapping| {
        let is_plain = mapping.compression == Compression::None;
        (mapping.disk_bytenr.0, mapping.disk_num_bytes, !is_plain)
    };
    mappings.map(extent).collect()
}

/// Leaves space free in small pieces, 25 MiB in all, and before them in a large one, where part of a long write finds room.
fn scatter(fs: &Filesystem, large_bytes: u64, small_bytes: u64) {
    let mut random = Prng::new(5);
    let file = create(fs, "large", flags::NOCOMPRESS).unwrap();
    file.append(&noise(&mut random, large_bytes)).unwrap();
    file.fsync().unwrap();
    drop(file);
    let names = (0..(50 << 20) / small_bytes).map(|number| format!("small {number}"));
    let mut small = Vec::new();
    for name in names {
        let file = create(fs, &name, flags::NOCOMPRESS).unwrap();
        file.append(&noise(&mut random, small_bytes)).unwrap();
        small.push((name, file));
    }
    fs.sync().unwrap();
    // As they lie: they need not in the order in which they were made.
    small.sort_by_key(|(_, file)| extents(fs, file)[0].0);
    let small: Vec<String> = small.into_iter().map(|(name, _)| name).collect();
    drop(fill(fs, &mut random));
    fs.unlink(fs.top_level(), b"large").unwrap();
    for name in small.iter().step_by(2) {
        fs.unlink(fs.top_level(), name.as_bytes()).unwrap();
    }
    fs.sync().unwrap();
}

/// Such a filesystem.
fn scattered(image: &Path, large_bytes: u64, small_bytes: u64) {
    make(image);
    scatter(&open_with(image, options(Executor::Inline)), large_bytes, small_bytes);
}

/// Opens it on a device whose writes of data can be made to fail.
fn open_failing(image: &Path, executor: Executor) -> (Filesystem, Arc<DataFaults>) {
    let faults = Arc::<DataFaults>::default();
    let inner = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let device: Arc<dyn Device> = Arc::new(FailingDevice::new(inner, Arc::clone(&faults)));
    let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
    (Filesystem::open(volume, options(executor)).unwrap(), faults)
}

fn free_bytes(fs: &Filesystem) -> u64 {
    fs.sync().unwrap();
    fs.usage().unwrap().free_bytes
}

/// What is written together has its space together: were it written whenever some of it is done, its places would depend on who was
/// faster.
#[test]
fn extents_lie_where_they_would_without_threads() {
    let dir = tempfile::tempdir().unwrap();
    let [image, copy] = ["image", "copy"].map(|name| dir.path().join(name));
    let bytes = contents(1);
    // Some extents find room in a small piece, and not all that are written together.
    scattered(&image, 7 << 20, 500 << 10);
    let mut seen = Vec::new();
    for executor in [Executor::Inline, Executor::Threads(2), Executor::Threads(8)] {
        std::fs::copy(&image, &copy).unwrap();
        let fs = open_with(&copy, options(executor));
        let file = create(&fs, "file", 0).unwrap();
        assert_eq!(file.direct_write(FileOffset::ZERO, &bytes).unwrap(), bytes.len());
        let found = extents(&fs, &file);
        assert!(found.iter().filter(|(.., is_packed)| *is_packed).count() > 130, "{found:?}");
        seen.push(found);
        assert!(read(&fs, file.id()) == bytes);
        drop(file);
        fs.sync().unwrap();
        drop(fs);
        judge(&copy);
    }
    assert_eq!(seen[1], seen[0]);
    assert_eq!(seen[2], seen[0]);
}

/// The first of it had space compressed, and what follows had not: all of it is written plain, and the space of the first is free again.
#[test]
fn write_of_which_a_part_has_space_compressed_is_plain() {
    let dir = tempfile::tempdir().unwrap();
    let [image, copy] = ["image", "copy"].map(|name| dir.path().join(name));
    let bytes = contents(2);
    scattered(&image, 7 << 20, 64 << 10);
    for executor in [Executor::Inline, Executor::Threads(2)] {
        for is_direct in [false, true] {
            std::fs::copy(&image, &copy).unwrap();
            let fs = open_with(&copy, options(executor));
            let before = free_bytes(&fs);
            for _ in 0..2 {
                let file = create(&fs, "file", 0).unwrap();
                match is_direct {
                    true => assert_eq!(file.direct_write(FileOffset::ZERO, &bytes).unwrap(), LEN),
                    false => assert_eq!(file.write(FileOffset::ZERO, &bytes).unwrap(), LEN),
                }
                file.fsync().unwrap();
                let found = extents(&fs, &file);
                assert!(found.iter().any(|(.., is_packed)| !is_packed), "{found:?}");
                let written: u64 = found.iter().map(|(_, len, _)| len).sum();
                assert!(before - free_bytes(&fs) >= written, "{before}: {written}");
                assert!(read(&fs, file.id()) == bytes);
                drop(file);
                fs.unlink(fs.top_level(), b"file").unwrap();
                assert_eq!(free_bytes(&fs), before);
            }
            drop(fs);
            judge(&copy);
        }
    }
}

/// Whichever of its writes to the device fails: nothing of it is in the file, its space is free, and another try writes it all.
#[test]
fn write_that_fails_in_the_middle_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let bytes = contents(3);
    make(&image);
    for executor in [Executor::Inline, Executor::Threads(2)] {
        for passes in 0.. {
            let (fs, faults) = open_failing(&image, executor);
            let before = free_bytes(&fs);
            let file = create(&fs, "file", 0).unwrap();
            faults.fail_after(passes, Lasting::Once);
            let failed = file.direct_write(FileOffset::ZERO, &bytes).is_err();
            assert_eq!(failed, faults.failures() == 1);
            assert!(failed || passes > 3, "it is several writes");
            if failed {
                assert_eq!(extents(&fs, &file), []);
                assert_eq!(free_bytes(&fs), before, "after {passes}");
                assert_eq!(file.direct_write(FileOffset::ZERO, &bytes).unwrap(), LEN);
            }
            faults.fail_no_more();
            assert!(read(&fs, file.id()) == bytes);
            fs.sync().unwrap();
            drop((file, fs));
            judge(&image);
            let fs = open_with(&image, options(executor));
            let id = fs.lookup(fs.top_level(), b"file").unwrap();
            assert!(read(&fs, id) == bytes);
            fs.unlink(fs.top_level(), b"file").unwrap();
            assert_eq!(free_bytes(&fs), before);
            if !failed {
                break;
            }
        }
    }
}

/// Space that is only kept in memory is not counted as used.
#[test]
fn write_that_fails_often_keeps_no_space() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let bytes = contents(6);
    make(&image);
    let (fs, faults) = open_failing(&image, Executor::Threads(2));
    let file = create(&fs, "file", 0).unwrap();
    for _ in 0..40 {
        faults.fail_after(3, Lasting::Once);
        assert!(file.direct_write(FileOffset::ZERO, &bytes).is_err());
    }
    faults.fail_no_more();
    assert_eq!(file.direct_write(FileOffset::ZERO, &bytes).unwrap(), LEN);
    assert!(extents(&fs, &file).iter().all(|(.., is_packed)| *is_packed));
    drop((file, fs));
    judge(&image);
}

/// What does not shrink is stored as it is, and what is written together did not end its extents.
#[test]
fn what_does_not_shrink_has_large_extents() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image);
    let fs = open_with(&image, options(Executor::Threads(2)));
    let bytes = noise(&mut Prng::new(4), LEN as u64);
    for (name, is_direct) in [("direct", true), ("cached", false)] {
        let file = create(&fs, name, 0).unwrap();
        match is_direct {
            true => assert_eq!(file.direct_write(FileOffset::ZERO, &bytes).unwrap(), LEN),
            false => assert_eq!(file.write(FileOffset::ZERO, &bytes).unwrap(), LEN),
        }
        file.fsync().unwrap();
        let found = extents(&fs, &file);
        assert!(found.len() <= 3, "{name}: {found:?}");
        assert!(found.iter().all(|(.., is_packed)| !is_packed), "{name}: {found:?}");
    }
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
}
