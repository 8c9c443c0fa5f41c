//! Checksums and compression of what is written back are computed by more than one thread, where there may be more.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::full::{create, noise, read};
use common::holding::Holding;
use ubtrfs_engine::{Filesystem, MkfsOptions, OpenOptions, mkfs};
use ubtrfs_iomap::{CacheOptions, FileOffset};
use ubtrfs_ondisk::CsumType;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::{Executor, Runtime};
use ubtrfs_testkit::Prng;
use ubtrfs_volume::{Device, MemDevice, Volume, VolumeOptions};

const MIB: u64 = 1 << 20;
const FILE_BYTES: u64 = 32 * MIB;
/// What kept threads are called, as far as Linux keeps it.
const NAME: &str = "ubtrfs-compute-";
/// More than a thread takes that wakes and finds nothing to do, and a small part of what there is to do.
const WORKED_NS: u64 = 1_000_000;
/// Long enough for a thread to come on, whatever a machine is at besides.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long each kept thread has been running, by the kernel's count.
fn computed_ns() -> BTreeMap<PathBuf, u64> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let kept = tasks.filter(|task| {
        let name = fs::read_to_string(task.join("comm"));
        name.is_ok_and(|name| name.trim_end() == NAME)
    });
    let ran = |text: String| text.split(' ').next().unwrap().parse::<u64>().unwrap();
    kept.map(|task| (task.clone(), ran(fs::read_to_string(task.join("schedstat")).unwrap())))
        .collect()
}

/// How many kept threads have worked since.
fn workers_since(before: &BTreeMap<PathBuf, u64>) -> usize {
    let worked = |(task, ran_ns): &(PathBuf, u64)| {
        ran_ns - before.get(task).copied().unwrap_or(0) >= WORKED_NS
    };
    computed_ns().into_iter().filter(worked).count()
}

/// What is waited for, once.
struct Awaited {
    before: BTreeMap<PathBuf, u64>,
    workers: usize,
}

/// Waits until so many kept threads have worked: whoever writes does not do their work meanwhile.
fn wait_until(awaited: &Mutex<Option<Awaited>>) {
    let Some(awaited) = awaited.lock().unwrap().take() else { return };
    let began = Instant::now();
    while workers_since(&awaited.before) < awaited.workers && began.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// All of a file is dirty, and half of it is written back at once.
fn options(executor: Executor) -> OpenOptions {
    let page_cache = CacheOptions {
        cached_bytes_max: 256 * MIB,
        dirty_bytes_max: 128 * MIB,
        dirty_bytes_background: 64 * MIB,
        writeback_bytes_max: FILE_BYTES / 2,
        ..CacheOptions::default()
    };
    OpenOptions {
        runtime: Arc::new(Runtime { executor, ..Runtime::system() }),
        page_cache: Some(page_cache),
        ..OpenOptions::default()
    }
}

/// Writes a file back; returns how many kept threads worked on it.
fn workers_of_writeback(executor: Executor, bits: u64, bytes: &[u8], workers: usize) -> usize {
    let awaited = Arc::new(Mutex::new(None));
    let wait = {
        let awaited = Arc::clone(&awaited);
        move || wait_until(&awaited)
    };
    let device = Arc::new(Holding::new(MemDevice::new(512 * MIB), wait));
    let devices = || vec![Arc::clone(&device) as Arc<dyn Device>];
    // One that takes its time.
    let made = MkfsOptions { csum: CsumType::Blake2, ..MkfsOptions::default() };
    drop(mkfs(devices(), &made, &Arc::new(Runtime::system())).unwrap());
    let volume = Volume::open(devices(), &VolumeOptions::default()).unwrap();
    let fs = Filesystem::open(volume, options(executor)).unwrap();
    let file = create(&fs, "file", bits).unwrap();
    fs.sync().unwrap();
    assert_eq!(file.write(FileOffset::ZERO, bytes).unwrap(), bytes.len());
    let before = computed_ns();
    if workers > 0 {
        *awaited.lock().unwrap() = Some(Awaited { before: before.clone(), workers });
    }
    file.fsync().unwrap();
    let worked = workers_since(&before);
    assert!(read(&fs, file.id()) == bytes);
    worked
}

#[test]
fn writeback_is_computed_by_more_threads_than_the_one_that_writes() {
    let mut random = Prng::of_test(1);
    let text = random.text(usize::try_from(FILE_BYTES).unwrap());
    let kinds = [("plain", 0, noise(&mut random, FILE_BYTES)), ("packed", flags::COMPRESS, text)];
    for (name, bits, bytes) in &kinds {
        let worked = workers_of_writeback(Executor::Inline, *bits, bytes, 0);
        assert_eq!(worked, 0, "{name} with nobody beside");
    }
    // One less than there are processors is kept.
    let kept = std::thread::available_parallelism().map_or(1, |count| count.get() - 1).max(1);
    for threads in [2, 4] {
        let beside = kept.min(threads - 1);
        for (name, bits, bytes) in &kinds {
            let worked = workers_of_writeback(Executor::Threads(threads), *bits, bytes, beside);
            assert!(worked >= beside, "{name}, of {threads} threads: {worked} beside who writes");
        }
    }
}
