//! A long file that is compressed by who writes it, beside those who write back what he gives to memory.

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

use common::full::{create, make, noise, read};
use common::judge;
use ubtrfs_engine::{BackgroundOptions, Filesystem, Method, OpenOptions};
use ubtrfs_iomap::{CacheOptions, FileOffset};
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::{FileOffset as DiskOffset, PhysicalAddr};
use ubtrfs_rt::{Executor, Runtime};
use ubtrfs_testkit::Prng;
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

const MIB: usize = 1 << 20;
const IMAGE_BYTES: u64 = 256 << 20;
/// Long enough for whatever a machine is at besides.
const PATIENCE: Duration = Duration::from_secs(120);

/// A device that holds up what the thread writes that writes back, as long as it is told to.
#[derive(Debug)]
struct HoldingDevice {
    inner: FileDevice,
    gate: Arc<Gate>,
}

#[derive(Debug, Default)]
struct Gate {
    is_shut: Mutex<bool>,
    opened: Condvar,
    is_somebody_there: AtomicBool,
    passed_bytes: AtomicU64,
}

impl Gate {
    fn shut(&self) {
        *self.is_shut.lock().unwrap() = true;
    }

    fn open(&self) {
        *self.is_shut.lock().unwrap() = false;
        self.opened.notify_all();
    }

    fn pass(&self, len_bytes: usize) {
        let mut is_shut = self.is_shut.lock().unwrap();
        if std::thread::current().name() == Some("ubtrfs-writeback") {
            while *is_shut {
                self.is_somebody_there.store(true, Ordering::SeqCst);
                is_shut = self.opened.wait(is_shut).unwrap();
            }
        } else if *is_shut {
            self.passed_bytes.fetch_add(len_bytes as u64, Ordering::SeqCst);
        }
    }
}

impl Device for HoldingDevice {
    fn name(&self) -> String {
        self.inner.name()
    }
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }
    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> std::io::Result<()> {
        self.inner.read_at(at, buf)
    }
    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> std::io::Result<()> {
        self.write_vectored_at(at, &[buf])
    }
    fn write_vectored_at(&self, at: PhysicalAddr, bufs: &[&[u8]]) -> std::io::Result<()> {
        self.gate.pass(bufs.iter().map(|buf| buf.len()).sum());
        self.inner.write_vectored_at(at, bufs)
    }
    fn flush(&self) -> std::io::Result<()> {
        self.inner.flush()
    }
    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> std::io::Result<()> {
        self.inner.discard(at, len_bytes)
    }
    fn resize(&self, len_bytes: u64) -> std::io::Result<()> {
        self.inner.resize(len_bytes)
    }
    fn is_read_only(&self) -> bool {
        false
    }
}

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

fn open(image: &Path) -> (Filesystem, Arc<Gate>) {
    open_with(image, options())
}

fn open_with(image: &Path, options: OpenOptions) -> (Filesystem, Arc<Gate>) {
    let gate = Arc::<Gate>::default();
    let inner = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let device: Arc<dyn Device> = Arc::new(HoldingDevice { inner, gate: Arc::clone(&gate) });
    let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
    (Filesystem::open(volume, options).unwrap(), gate)
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
    let (fs, gate) = open(&image);
    let bytes = text(1, LEN);
    let background = fs.run_in_background(rarely()).unwrap();
    let file = create(&fs, "file", 0).unwrap();
    let (before, held) = bytes.split_at(12 * MIB);
    for (number, part) in before.chunks(MIB).enumerate() {
        file.write(FileOffset::new((number * MIB) as u64), part).unwrap();
    }
    gate.shut();
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
        gate.open();
        assert_eq!(seen, Ok(true), "nobody waits for what is held up");
    });
    assert!(gate.is_somebody_there.load(Ordering::SeqCst), "somebody had to wait");
    // No more of it than may be dirty, and is on its way, went to memory.
    let passed_bytes = gate.passed_bytes.load(Ordering::SeqCst);
    assert!(passed_bytes > (held.len() / 8) as u64, "{passed_bytes}");
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
    let (fs, _) = open(&image);
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
    let (fs, _) = open_with(&image, options);
    let background = fs.run_in_background(rarely()).unwrap();
    let file = create(&fs, "file", 0).unwrap();
    let bytes = noise(&mut Prng::new(2), LEN as u64);
    for (number, part) in bytes.chunks(MIB).enumerate() {
        file.write(FileOffset::new((number * MIB) as u64), part).unwrap();
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

/// Appends of any length and kind, while others make the file durable and read what is there, and a little is cut off again.
#[test]
fn appends_beside_fsync_reads_and_cuts_same_as_array() {
    const LEN: usize = 48 * MIB;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    for seed in 0..3 {
        make(&image, IMAGE_BYTES);
        let (fs, _) = open(&image);
        let background = fs.run_in_background(rarely()).unwrap();
        let file = create(&fs, "file", 0).unwrap();
        let mut random = Prng::new(seed);
        // The same wherever it was cut off.
        let mut bytes = text(seed, LEN);
        noise(&mut random, 4 * MIB as u64).into_iter().zip(&mut bytes[20 * MIB..]).for_each(
            |(noise, byte)| {
                *byte = noise;
            },
        );
        // So much of it stays.
        let sure = AtomicU64::new(0);
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (file, bytes, sure, is_done) = (&file, &bytes, &sure, &is_done);
            scope.spawn(move || {
                while !is_done.load(Ordering::SeqCst) {
                    file.fsync().unwrap();
                }
            });
            scope.spawn(move || {
                let mut random = Prng::new(seed + 100);
                let mut buffer = vec![0; 2 * MIB];
                while !is_done.load(Ordering::SeqCst) {
                    let end = usize::try_from(sure.load(Ordering::SeqCst)).unwrap();
                    let at = random.index(end + 1);
                    let len = random.index(buffer.len()).min(end - at);
                    let seen = file.read(FileOffset::new(at as u64), &mut buffer[..len]).unwrap();
                    assert_eq!(seen, len, "of {len} bytes at {at} of {end}");
                    assert!(buffer[..len] == bytes[at..at + len], "{len} bytes at {at}");
                }
            });
            let mut end = 0;
            while end < LEN {
                let len = match random.index(4) {
                    0 => 1 + random.index(3 * MIB),
                    1 => 4096 * (1 + random.index(700)),
                    _ => MIB * (1 + random.index(3)),
                };
                let part = &bytes[end..LEN.min(end + len)];
                assert_eq!(file.append(part).unwrap(), (FileOffset::new(end as u64), part.len()));
                end += part.len();
                if end < LEN && random.chance(1, 8) {
                    end -= random.index(
                        MIB.min(end - usize::try_from(sure.load(Ordering::SeqCst)).unwrap()) + 1,
                    );
                    file.truncate(FileOffset::new(end as u64)).unwrap();
                }
                sure.store(end.saturating_sub(MIB) as u64, Ordering::SeqCst);
            }
            is_done.store(true, Ordering::SeqCst);
        });
        file.fsync().unwrap();
        background.stop().unwrap();
        drop((file, fs));
        judge(&image);
        let (fs, _) = open(&image);
        let id = fs.lookup(fs.top_level(), b"file").unwrap();
        assert!(read(&fs, id) == bytes, "seed {seed}");
        drop(fs);
        std::fs::remove_file(&image).unwrap();
    }
}
