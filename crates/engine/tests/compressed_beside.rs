//! A long file that is compressed by who writes it, beside those who write back what he gives to memory.

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use common::full::{create, make, make_mixed, noise, open_failing_with, open_with, read};
use common::judge;
use ubtrfs_engine::{BackgroundOptions, DataFile, Error, Filesystem, Method, OpenOptions};
use ubtrfs_iomap::{CacheOptions, FileOffset};
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_rt::{Executor, Runtime};
use ubtrfs_testkit::Prng;

const MIB: usize = 1 << 20;
const IMAGE_BYTES: u64 = 256 << 20;
/// Long enough for whatever a machine is at besides.
const PATIENCE: Duration = Duration::from_secs(120);

/// With memory for a short file only.
fn options() -> OpenOptions {
    let page_cache = CacheOptions {
        cached_bytes_max: 8 * MIB as u64,
        dirty_bytes_max: 4 * MIB as u64,
        dirty_bytes_background: 2 * MIB as u64,
        ..CacheOptions::default()
    };
    OpenOptions {
        runtime: Arc::new(Runtime { executor: Executor::Threads(2), ..Runtime::system() }),
        compression: Some(Method::with_default_level(Compression::Zstd)),
        page_cache: Some(page_cache),
        ..OpenOptions::default()
    }
}

fn open(image: &Path) -> Filesystem {
    open_with(image, options())
}

/// Nobody commits beside.
fn rarely() -> BackgroundOptions {
    BackgroundOptions { commit_every: Duration::from_secs(3600), ..BackgroundOptions::default() }
}

/// Whole extents of it shrink to a quarter.
fn text(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Prng::new(seed);
    let mut bytes = random.text(len);
    bytes.truncate(len);
    bytes
}

/// Where the writer had to wait until others had compressed what he gave to memory, he compresses it himself: here they never come on.
#[test]
fn writer_compresses_himself_what_others_have_no_time_for() {
    const LEN: usize = 64 * MIB;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, IMAGE_BYTES);
    let (fs, faults) = open_failing_with(&image, options());
    let bytes = text(1, LEN);
    let background = fs.run_in_background(rarely()).unwrap();
    let file = create(&fs, "file", 0).unwrap();
    let (before, held) = bytes.split_at(12 * MIB);
    for (number, part) in before.chunks(MIB).enumerate() {
        file.write(FileOffset::new((number * MIB) as u64), part).unwrap();
    }
    let before_bytes = straight_bytes(&file);
    faults.stalls_writeback.store(true, Ordering::Relaxed);
    let (done, is_done) = mpsc::channel();
    std::thread::scope(|scope| {
        let (file, fs, bytes) = (&file, &fs, &bytes);
        scope.spawn(move || {
            for (number, part) in held.chunks(3 * MIB).enumerate() {
                let at = before.len() + number * 3 * MIB;
                assert_eq!(file.write(FileOffset::new(at as u64), part).unwrap(), part.len());
            }
            // What is held up is read from memory, all else from the device.
            done.send(read(fs, file.id()) == *bytes).unwrap();
        });
        let seen = is_done.recv_timeout(PATIENCE);
        faults.stalls_writeback.store(false, Ordering::Relaxed);
        assert_eq!(seen, Ok(true), "nobody waits for what is held up");
    });
    assert!(faults.is_stalled.load(Ordering::Relaxed), "somebody had to wait");
    // Of the rest no more than may be dirty, and is on its way, went to memory.
    let went_bytes = straight_bytes(&file) - before_bytes;
    assert!(went_bytes > (held.len() / 2) as u64, "{went_bytes}");
    file.fsync().unwrap();
    background.stop().unwrap();
    let mappings = fs.file_extents(file.id(), DiskOffset(0)).unwrap().map(Result::unwrap);
    for mapping in mappings {
        assert_eq!(mapping.compression, Compression::Zstd);
        assert_eq!(mapping.ram_bytes, 128 << 10, "{mapping:?}");
    }
    drop(file);
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
    let fs = open(&image);
    let id = fs.lookup(fs.top_level(), b"file").unwrap();
    assert!(read(&fs, id) == bytes);
}

/// What does not shrink comes from memory, in extents as large as what is written back at once: written by who makes the file longer, each
/// MiB lay by itself between what others wrote.
#[test]
fn what_does_not_shrink_has_large_extents_beside_those_who_write_back() {
    const LEN: usize = 64 * MIB;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, IMAGE_BYTES);
    let mut options = options();
    let cache = options.page_cache.as_mut().unwrap();
    (cache.dirty_bytes_max, cache.dirty_bytes_background) = (16 << 20, 8 << 20);
    cache.cached_bytes_max = 32 << 20;
    let fs = open_with(&image, options);
    let background = fs.run_in_background(rarely()).unwrap();
    let file = create(&fs, "file", 0).unwrap();
    let bytes = noise(&mut Prng::new(2), LEN as u64);
    for (number, part) in bytes.chunks(MIB).enumerate() {
        file.write(FileOffset::new((number * MIB) as u64), part).unwrap();
        // As long as all of it is kept nothing goes another way; by then it is known what it is like.
        if number == 20 {
            file.fsync().unwrap();
        }
    }
    file.fsync().unwrap();
    background.stop().unwrap();
    let found: Vec<_> =
        fs.file_extents(file.id(), DiskOffset(0)).unwrap().map(Result::unwrap).collect();
    assert!(found.iter().all(|mapping| mapping.compression == Compression::None));
    // Nobody writes beside, so what comes in order lies together, as far as there is space: it is 3 or 4, and was 9 to 11.
    assert!(found.len() <= 6, "{found:?}");
    assert!(read(&fs, file.id()) == bytes);
    drop(file);
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
}

/// So much went past memory, of all files.
fn straight_bytes(file: &DataFile) -> u64 {
    file.space().cache().counts().straight_bytes_written
}

/// Ends whoever goes on until then, also where a thread panics.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Appends of any length and kind, while others make the file durable and read what is there, and a little is cut off again.
#[test]
fn appends_beside_fsync_reads_and_cuts_same_as_array() {
    const LEN: usize = 64 * MIB;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    for seed in 0..3 {
        make(&image, IMAGE_BYTES);
        let fs = open(&image);
        let background = fs.run_in_background(rarely()).unwrap();
        let file = create(&fs, "file", 0).unwrap();
        let mut bytes = text(seed, LEN);
        // A part of it does not shrink.
        let noise = noise(&mut Prng::new(seed), 4 * MIB as u64);
        bytes[20 * MIB..20 * MIB + noise.len()].copy_from_slice(&noise);
        // So much of it is there, and stays.
        let sure = AtomicUsize::new(0);
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (file, bytes, sure, is_done) = (&file, &bytes, &sure, &is_done);
            let _end = End(is_done);
            scope.spawn(move || {
                while !is_done.load(Ordering::SeqCst) {
                    file.fsync().unwrap();
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            scope.spawn(move || {
                let mut random = Prng::new(seed + 100);
                let mut buffer = vec![0; 2 * MIB];
                while !is_done.load(Ordering::SeqCst) {
                    let end = sure.load(Ordering::SeqCst);
                    let at = random.index(end + 1);
                    let len = random.index(buffer.len()).min(end - at);
                    let seen = file.read(FileOffset::new(at as u64), &mut buffer[..len]).unwrap();
                    assert_eq!(seen, len, "of {len} bytes at {at} of {end}");
                    assert!(buffer[..len] == bytes[at..at + len], "{len} bytes at {at}");
                }
            });
            let mut random = Prng::new(seed);
            let mut end = 0;
            while end < LEN {
                let len = match random.index(6) {
                    0 => 1 + random.index(3 * MIB),
                    1 => 4096 * (1 + random.index(700)),
                    _ => MIB * (1 + random.index(3)),
                };
                let part = &bytes[end..LEN.min(end + len)];
                assert_eq!(file.append(part).unwrap(), (FileOffset::new(end as u64), part.len()));
                end += part.len();
                if end < LEN && random.chance(1, 6) {
                    end -= random.index(MIB.min(end - sure.load(Ordering::SeqCst)) + 1);
                    file.truncate(FileOffset::new(end as u64)).unwrap();
                }
                // What begins inside a block goes by memory: mostly a block begins there.
                if end % 4096 > 0 && random.chance(3, 4) {
                    let part = &bytes[end..LEN.min(end.next_multiple_of(4096))];
                    file.append(part).unwrap();
                    end += part.len();
                }
                sure.store(end.saturating_sub(2 * MIB), Ordering::SeqCst);
            }
        });
        file.fsync().unwrap();
        background.stop().unwrap();
        let straight_bytes = straight_bytes(&file);
        assert!(straight_bytes > 10 * MIB as u64, "{straight_bytes} bytes went straight");
        drop((file, fs));
        judge(&image);
        let fs = open(&image);
        let id = fs.lookup(fs.top_level(), b"file").unwrap();
        assert!(read(&fs, id) == bytes, "seed {seed}");
        drop(fs);
        std::fs::remove_file(&image).unwrap();
    }
}

/// Data and metadata share what there is: what is written straight leaves what removing files takes.
#[test]
fn full_filesystem_of_mixed_groups_is_emptied_again() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make_mixed(&image, IMAGE_BYTES);
    let fs = open(&image);
    let background = fs.run_in_background(rarely()).unwrap();
    // Of each extent a third is text.
    let mut bytes = text(9, 16 * MIB);
    let mut random = Prng::new(9);
    for extent in bytes.chunks_mut(128 << 10) {
        let noise = noise(&mut random, extent.len() as u64 * 2 / 3);
        extent[..noise.len()].copy_from_slice(&noise);
    }
    let mut names = Vec::new();
    let (mut is_full, mut straight_max) = (false, 0);
    while !is_full {
        let name = format!("file {}", names.len());
        let Ok(file) = create(&fs, &name, 0) else { break };
        names.push(name);
        let mut end = 0;
        while end < 8 * bytes.len() && !is_full {
            let part = &bytes[end % bytes.len()..][..MIB];
            match file.append(part) {
                Ok((_, len)) => end += len,
                Err(Error::NoSpace { .. }) => is_full = true,
                Err(error) => panic!("{error}"),
            }
            is_full |= end % MIB > 0;
        }
        file.fsync().unwrap();
        straight_max = straight_max.max(straight_bytes(&file));
        let size = usize::try_from(file.size().bytes()).unwrap();
        assert_eq!(size, end);
        let seen = read(&fs, file.id());
        let expected = bytes.iter().cycle().take(size);
        assert!(seen.len() == size && seen.iter().eq(expected));
    }
    assert!(is_full);
    assert!(straight_max > 0, "nothing went straight");
    background.stop().unwrap();
    fs.sync().unwrap();
    for name in &names {
        fs.unlink(fs.top_level(), name.as_bytes()).unwrap();
    }
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
}
