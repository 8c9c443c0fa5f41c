//! Threads beside each other: handles, commits, readers.

use std::io;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_volume::MemDevice;

use super::*;

/// A device that takes its time to read, so that threads meet in the middle.
#[derive(Debug)]
struct SlowDevice {
    under: MemDevice,
    is_slow: AtomicBool,
}

impl SlowDevice {
    fn new(len_bytes: u64) -> Self {
        Self { under: MemDevice::new(len_bytes), is_slow: AtomicBool::new(false) }
    }
}

impl Device for SlowDevice {
    fn name(&self) -> String {
        "slow".to_owned()
    }
    fn len_bytes(&self) -> u64 {
        self.under.len_bytes()
    }
    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        if self.is_slow.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_micros(300));
        }
        self.under.read_at(at, buf)
    }
    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        self.under.write_at(at, buf)
    }
    fn flush(&self) -> io::Result<()> {
        self.under.flush()
    }
    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> io::Result<()> {
        self.under.discard(at, len_bytes)
    }
    fn resize(&self, len_bytes: u64) -> io::Result<()> {
        self.under.resize(len_bytes)
    }
    fn is_read_only(&self) -> bool {
        false
    }
}

/// Two threads that began the first transaction together both loaded block groups and their free
/// space; what the second loaded took the place of what the first had allocated from already, and
/// blocks were given out twice.
#[test]
fn first_handles_of_several_threads_load_free_space_once() {
    const THREADS: u64 = 4;
    for round in 0..8 {
        let device = Arc::new(SlowDevice::new(256 << 20));
        drop(mkfs_on(&device, &MkfsOptions::default()));
        device.is_slow.store(true, Ordering::Relaxed);
        let fs = open_on(Arc::clone(&device) as Arc<dyn Device>);
        let barrier = Barrier::new(usize::try_from(THREADS).unwrap());
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (fs, barrier) = (&fs, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    std::thread::sleep(Duration::from_micros(150 * thread * round));
                    for at in 0..50 {
                        insert(fs, key(thread * 1000 + at, 0), &[1; 400]);
                    }
                });
            }
        });
        let free_bytes = fs.inner.core.alloc.metadata_free_bytes();
        assert!(free_bytes <= 26 << 20, "free space counted once: {free_bytes}");
        fs.commit().unwrap();
        let before = contents(&fs);
        drop(fs);
        device.is_slow.store(false, Ordering::Relaxed);
        let fs = open_on(Arc::clone(&device) as Arc<dyn Device>);
        assert!(contents(&fs) == before);
        assert_eq!(before.len(), 201);
        if round == 7 {
            judge(&*device);
        }
    }
}

/// A chunk that one thread had just allocated was, before its free space was entered, taken by
/// another thread for one whose free space must be read from the tree, which knew nothing of it.
#[test]
fn handles_of_several_threads_share_new_chunks() {
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let device = Arc::new(MemDevice::new(400 << 20));
    let fs = mkfs_on(&device, &options);
    let options = OpenOptions { cache_bytes: 1 << 30, ..open_options() };
    drop(fs);
    let volume = Volume::open(vec![Arc::clone(&device) as _], &VolumeOptions::default()).unwrap();
    let fs = Filesystem::open(volume, options).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let fs = &fs;
            scope.spawn(move || {
                for at in 0..150 {
                    // A large promise that is dropped again: chunks come early and often.
                    drop(fs.begin(Reservation::items(at * 5)).unwrap());
                    insert(fs, key(thread * 100_000 + at, 0), &[1; 1000]);
                }
            });
        }
    });
    fs.commit().unwrap();
    assert_eq!(contents(&fs).len(), 601);
    drop(fs);
    judge(&*device);
}

/// Readers walk the tree forward and backward while a writer adds, removes and commits: what the
/// writer does not touch is there each time, in order, and what it changes is a state that was.
#[test]
fn readers_during_commits_see_what_was_not_changed() {
    const STABLE: u64 = 2000;
    let device = Arc::new(MemDevice::new(256 << 20));
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    drop(mkfs_on(&device, &options));
    let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
    // Small, so that blocks are read again and again.
    let options = OpenOptions { cache_bytes: 64 * 4096, ..open_options() };
    let fs = Filesystem::open(volume, options).unwrap();
    for at in 0..STABLE {
        insert(&fs, key(10 * at, 0), &at.to_le_bytes());
    }
    fs.commit().unwrap();
    let (is_done, walks) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for reader in 0..3 {
            let (fs, is_done, walks) = (&fs, &is_done, &walks);
            scope.spawn(move || {
                while !is_done.load(Ordering::Relaxed) {
                    let keys: Vec<Key> = if reader == 0 {
                        contents_backward(fs)
                    } else {
                        contents(fs).into_keys().collect()
                    };
                    assert!(keys.is_sorted_by(|a, b| a < b), "ascending, none twice");
                    let stable = keys.iter().filter(|key| {
                        key.objectid.0.is_multiple_of(10) && key.objectid.0 < 10 * STABLE
                    });
                    assert_eq!(stable.count() as u64, STABLE);
                    let tree = fs.tree(RootId::UUID_TREE).unwrap();
                    for at in (0..STABLE).step_by(37) {
                        let item = tree.lookup(&key(10 * at, 0)).unwrap().unwrap();
                        assert_eq!(item[..], at.to_le_bytes());
                    }
                    walks.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut random = Prng::of_test(11);
        let mut known = std::collections::BTreeSet::new();
        let mut round = 0;
        while round < 40 || walks.load(Ordering::Relaxed) < 10 {
            for _ in 0..200 {
                let at = 10 * random.below(STABLE) + 1 + random.below(9);
                let mut handle = fs.begin(Reservation::items(1)).unwrap();
                if known.remove(&at) {
                    handle.txn.remove(RootId::UUID_TREE, key(at, 0)).unwrap();
                } else {
                    known.insert(at);
                    let words = 1 + random.index(60);
                    let data = random.bytes(8 * words);
                    handle.txn.insert(RootId::UUID_TREE, key(at, 0), &data).unwrap();
                }
            }
            fs.commit().unwrap();
            round += 1;
        }
        is_done.store(true, Ordering::Relaxed);
    });
}

/// Several threads make items and commit, each when it likes; nothing is lost and nobody waits for
/// ever.
#[test]
fn commits_of_several_threads_keep_every_item() {
    let device = Arc::new(MemDevice::new(256 << 20));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let fs = &fs;
            scope.spawn(move || {
                for at in 0..300 {
                    insert(fs, key(thread * 1000 + at, 0), &[1; 64]);
                    if at % (10 + thread) == 0 {
                        fs.commit().unwrap();
                    }
                }
            });
        }
    });
    fs.commit().unwrap();
    drop(fs);
    let fs = open_on(Arc::clone(&device) as Arc<dyn Device>);
    assert_eq!(contents(&fs).len(), 1201);
    drop(fs);
    judge(&*device);
}

/// The space of data that was removed in the transaction that wrote it was given out again before
/// its checksums were forgotten: those of the data that another thread put there went with them.
#[test]
fn removing_new_data_leaves_the_checksums_of_what_takes_its_place() {
    use crate::{NewInode, PreparedData};
    use ubtrfs_ondisk::FileOffset;
    let device = Arc::new(MemDevice::new(1 << 30));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    let (now, options) = (fs.runtime().clock.now(), fs.write_options(None));
    let write = |name: &[u8], byte: u8| {
        let new = NewInode::new(0o100_644, now);
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        let id = handle.create(fs.top_level(), name, &new).unwrap();
        drop(handle);
        let mut appender = fs.appender(id, 0).unwrap();
        let data = PreparedData::new(vec![byte; 64 << 10], &options);
        appender.push(FileOffset(0), data).unwrap();
        appender.finish().unwrap();
        id
    };
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let (fs, write) = (&fs, &write);
            scope.spawn(move || {
                let name = [b'a' + thread];
                for _ in 0..1500 {
                    let id = write(&name, thread);
                    let mut bytes = vec![0; 64 << 10];
                    fs.read(id, FileOffset(0), &mut bytes).unwrap();
                    assert!(bytes.iter().all(|byte| *byte == thread));
                    fs.unlink(fs.top_level(), &name).unwrap();
                }
                write(&name, thread);
            });
        }
    });
    fs.commit().unwrap();
    drop(fs);
    judge(&*device);
}

/// What a handle has reserved it gives back when it ends, most of it unused: who lacked that was told that there is no space, and data on its
/// way to the medium beside other data was lost.
#[test]
fn handle_that_lacks_what_another_has_reserved_waits_for_it() {
    let device = Arc::new(MemDevice::new(256 << 20));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    for at in 0..20_000 {
        insert(&fs, key(at, 0), &[3; 304]);
    }
    fs.commit().unwrap();
    let core = &fs.inner.core;
    let wanted = Reservation::removals(20);
    let bytes = core.begin(wanted).unwrap().reserved_bytes();
    fs.commit().unwrap();
    take_metadata(core);
    // Enough for one, and not for two.
    while core.begin(wanted).is_err() {
        core.alloc.unreserve(PIECE);
    }
    let one = core.begin(wanted).unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| core.begin(wanted).map(|handle| handle.reserved_bytes()));
        while !core.gate.lock().is_closed && !other.is_finished() {
            std::thread::yield_now();
        }
        drop(one);
        assert!(other.join().unwrap().unwrap() >= bytes);
    });
    // The gate is open again.
    drop(core.begin(Reservation::removals(0)).unwrap());
}
