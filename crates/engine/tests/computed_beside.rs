//! Checksums and compression of what is written back are computed by more than one thread, where there may be more.

mod common;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
const WORKED_NS: u64 = 2_000_000;
/// Long enough for a thread to come on, whatever a machine is at besides.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long all kept threads have been running, by the kernel's count.
fn computed_ns() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let kept = tasks.filter(|task| {
        let name = fs::read_to_string(task.join("comm"));
        name.is_ok_and(|name| name.trim_end() == NAME)
    });
    let ran = |text: String| text.split(' ').next().unwrap().parse::<u64>().unwrap();
    kept.map(|task| ran(fs::read_to_string(task.join("schedstat")).unwrap())).sum()
}

/// Waits until kept threads have run so long, `0` for not at all: whoever writes does not do their work meanwhile.
fn wait_until(ran_ns: &AtomicU64) {
    let until_ns = ran_ns.load(Ordering::SeqCst);
    let began = Instant::now();
    while computed_ns() < until_ns && began.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    ran_ns.store(0, Ordering::SeqCst);
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

/// Writes a file back; returns how long kept threads worked on it.
fn written_back_ns(executor: Executor, bits: u64, bytes: &[u8], waits: bool) -> u64 {
    let until_ns = Arc::new(AtomicU64::new(0));
    let wait = {
        let until_ns = Arc::clone(&until_ns);
        move || wait_until(&until_ns)
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
    let before_ns = computed_ns();
    if waits {
        until_ns.store(before_ns + WORKED_NS, Ordering::SeqCst);
    }
    file.fsync().unwrap();
    let worked_ns = computed_ns() - before_ns;
    assert!(read(&fs, file.id()) == bytes);
    worked_ns
}

#[test]
fn writeback_is_computed_by_more_threads_than_the_one_that_writes() {
    let mut random = Prng::of_test(1);
    let text = random.text(usize::try_from(FILE_BYTES).unwrap());
    let kinds = [("plain", 0, noise(&mut random, FILE_BYTES)), ("packed", flags::COMPRESS, text)];
    for (name, bits, bytes) in &kinds {
        let worked_ns = written_back_ns(Executor::Inline, *bits, bytes, false);
        assert_eq!(worked_ns, 0, "{name} with nobody beside");
    }
    for (name, bits, bytes) in &kinds {
        let worked_ns = written_back_ns(Executor::Threads(2), *bits, bytes, true);
        println!("{name}: {worked_ns} ns of kept threads");
        assert!(worked_ns >= WORKED_NS, "{name}: {worked_ns} ns of kept threads");
    }
}
