//! Long compressed writes, of which a part is on the medium while more is compressed.

use std::path::Path;
use std::sync::Arc;

use crate::common::failing::{DataFaults, FailingDevice, Lasting};
use crate::common::full::{create, fill, fill_by, make, noise, open_with, read};
use crate::common::judge;
use ubtrfs_engine::{DataFile, Filesystem, Method, OpenOptions};
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

const IMAGE_BYTES: u64 = 256 << 20;

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

/// Leaves space free in small pieces, 25 MiB in all, and before them in a large one, where part of a long write finds room. All else is full,
/// 20 MiB of it of the file `old`.
fn scatter(fs: &Filesystem, large_bytes: u64, small_bytes: u64) {
    let mut random = Prng::new(5);
    for (name, len_bytes) in [("large", large_bytes), ("old", 20 << 20)] {
        let file = create(fs, name, flags::NOCOMPRESS).unwrap();
        file.append(&noise(&mut random, len_bytes)).unwrap();
        file.fsync().unwrap();
    }
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
    make(image, IMAGE_BYTES);
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

/// What the trees do not use.
fn free_bytes(fs: &Filesystem) -> u64 {
    fs.sync().unwrap();
    fs.usage().unwrap().free_bytes
}

/// How much still finds space: what memory keeps is missing there, and not in [`free_bytes`].
fn filled_bytes(fs: &Filesystem) -> u64 {
    fill_by(fs, "last filler", &mut Prng::new(7)).size().bytes()
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
    std::fs::copy(&image, &copy).unwrap();
    let untouched = filled_bytes(&open_with(&copy, options(Executor::Inline)));
    assert_eq!(untouched, 32 << 20);
    for executor in [Executor::Inline, Executor::Threads(2)] {
        for is_direct in [false, true] {
            std::fs::copy(&image, &copy).unwrap();
            let fs = open_with(&copy, options(executor));
            let file = create(&fs, "file", 0).unwrap();
            match is_direct {
                true => assert_eq!(file.direct_write(FileOffset::ZERO, &bytes).unwrap(), LEN),
                false => assert_eq!(file.write(FileOffset::ZERO, &bytes).unwrap(), LEN),
            }
            file.fsync().unwrap();
            let found = extents(&fs, &file);
            let plain_count = found.iter().filter(|(.., is_packed)| !is_packed).count();
            // From memory it is written in two parts, of which the second may be short enough.
            assert!(plain_count > 100, "{found:?}");
            assert!(!is_direct || plain_count == found.len(), "{found:?}");
            assert!(read(&fs, file.id()) == bytes);
            drop(file);
            fs.unlink(fs.top_level(), b"file").unwrap();
            fs.sync().unwrap();
            assert_eq!(filled_bytes(&fs), untouched);
            drop(fs);
            judge(&copy);
        }
    }
}

/// A commit makes room for what comes later, while what was first has space that no file refers to yet.
#[test]
fn write_goes_on_in_what_a_commit_frees() {
    let dir = tempfile::tempdir().unwrap();
    let [image, copy] = ["image", "copy"].map(|name| dir.path().join(name));
    let bytes = contents(8);
    scattered(&image, 7 << 20, 64 << 10);
    for executor in [Executor::Inline, Executor::Threads(2)] {
        std::fs::copy(&image, &copy).unwrap();
        let fs = open_with(&copy, options(executor));
        fs.unlink(fs.top_level(), b"old").unwrap();
        let file = create(&fs, "file", 0).unwrap();
        assert_eq!(file.direct_write(FileOffset::ZERO, &bytes).unwrap(), LEN);
        let found = extents(&fs, &file);
        assert!(found.iter().all(|(.., is_packed)| *is_packed), "{found:?}");
        // Not all behind the commit, and not all before it.
        let mut pairs = found.windows(2);
        assert!(pairs.any(|pair| pair[0].0 + pair[0].1 != pair[1].0), "{found:?}");
        assert!(read(&fs, file.id()) == bytes);
        drop(file);
        fs.sync().unwrap();
        drop(fs);
        judge(&copy);
        let fs = open_with(&copy, options(executor));
        let id = fs.lookup(fs.top_level(), b"file").unwrap();
        assert!(read(&fs, id) == bytes);
    }
}

/// Whichever of its writes to the device fails: nothing of it is in the file, its space is free, and another try writes it all.
#[test]
fn write_that_fails_in_the_middle_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let bytes = contents(3);
    make(&image, IMAGE_BYTES);
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
    make(&image, IMAGE_BYTES);
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

/// What does not shrink is stored as it is, in extents as large as what is written at once: not as what is compressed together, which lay
/// between that of others who wrote beside. All of it may be dirty: with less, who writes has to write back first, 4 MiB of each file in its
/// turn, and that is what this took for compressed together on some runs.
#[test]
fn what_does_not_shrink_has_large_extents_beside_others() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, IMAGE_BYTES);
    let all_dirty = OpenOptions { cache_bytes: 1 << 30, ..options(Executor::Threads(2)) };
    let fs = open_with(&image, all_dirty);
    let bytes = noise(&mut Prng::new(4), LEN as u64);
    let files = [("direct", true), ("beside", true), ("cached", false), ("cached, too", false)]
        .map(|(name, is_direct)| (create(&fs, name, 0).unwrap(), is_direct));
    std::thread::scope(|scope| {
        for (file, is_direct) in &files {
            let bytes = &bytes;
            scope.spawn(move || {
                match is_direct {
                    true => assert_eq!(file.direct_write(FileOffset::ZERO, bytes).unwrap(), LEN),
                    false => assert_eq!(file.write(FileOffset::ZERO, bytes).unwrap(), LEN),
                }
                file.fsync().unwrap();
            });
        }
    });
    for (file, is_direct) in &files {
        let found = extents(&fs, file);
        assert!(found.len() <= 3, "direct: {is_direct}: {found:?}");
        assert!(found.iter().all(|(.., is_packed)| !is_packed), "{found:?}");
        assert!(read(&fs, file.id()) == bytes);
    }
    drop(files);
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
}

/// What does not shrink is in memory once more until all that is written at once is looked at, so that is bounded, however long the call.
#[test]
fn long_direct_write_of_what_does_not_shrink_goes_in_pieces() {
    const PIECE_BYTES: u64 = 32 << 20;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, IMAGE_BYTES);
    let (fs, faults) = open_failing(&image, Executor::Threads(2));
    let bytes = noise(&mut Prng::new(7), PIECE_BYTES + (1 << 20));
    let file = create(&fs, "file", 0).unwrap();
    // Where a device fails tells what was there before: the first piece.
    let mut written = Vec::new();
    for writes in 0.. {
        faults.fail_after(writes, Lasting::Once);
        let len = file.direct_write(FileOffset::ZERO, &bytes).unwrap_or(0);
        faults.fail_no_more();
        written.push(len as u64);
        if len == bytes.len() {
            break;
        }
    }
    written.dedup();
    assert_eq!(written, [0, PIECE_BYTES, bytes.len() as u64]);
    file.fsync().unwrap();
    assert!(read(&fs, file.id()) == bytes);
    drop((file, fs));
    judge(&image);
}
