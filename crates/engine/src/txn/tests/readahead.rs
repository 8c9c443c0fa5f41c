//! Reading ahead: the same items, fewer requests.

use std::io;

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_rt::{AtomicBool, AtomicU64, Ordering};
use ubtrfs_volume::MemDevice;

use super::*;
use crate::btree::{Readahead, Store, Tree};

/// A device in memory that counts its reads.
#[derive(Debug)]
struct Counting {
    device: MemDevice,
    reads: AtomicU64,
}

impl Device for Counting {
    fn name(&self) -> String {
        self.device.name()
    }
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }
    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.device.read_at(at, buf)
    }
    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        self.device.write_at(at, buf)
    }
    fn flush(&self) -> io::Result<()> {
        self.device.flush()
    }
    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> io::Result<()> {
        self.device.discard(at, len_bytes)
    }
    fn resize(&self, len_bytes: u64) -> io::Result<()> {
        self.device.resize(len_bytes)
    }
    fn is_read_only(&self) -> bool {
        false
    }
}

const ITEM_COUNT: u64 = 50_000;

/// A filesystem with so many items in one tree.
fn made() -> Arc<Counting> {
    let counting =
        Arc::new(Counting { device: MemDevice::new(256 << 20), reads: AtomicU64::new(0) });
    let device: Arc<dyn Device> = Arc::clone(&counting) as Arc<dyn Device>;
    let volume = mkfs(vec![device], &MkfsOptions::default(), &runtime()).unwrap();
    let fs = Filesystem::open(volume, open_options()).unwrap();
    for at in 0..ITEM_COUNT {
        let mut handle = fs.begin(Reservation::items(1)).unwrap();
        handle.txn.insert(RootId::UUID_TREE, key(1000, at), &[0; 56]).unwrap();
    }
    fs.commit().unwrap();
    counting
}

/// That filesystem, with nothing of it in memory.
fn opened(counting: &Arc<Counting>) -> Filesystem {
    let device: Arc<dyn Device> = Arc::clone(counting) as Arc<dyn Device>;
    let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
    // Room for all of it.
    let options = OpenOptions { cache_bytes: 64 << 20, ..open_options() };
    Filesystem::open(volume, options).unwrap()
}

/// Walks through all items, and returns how many requests that took. `at_each` is called for each of them.
fn requests(
    counting: &Counting,
    tree: &Arc<Tree>,
    mode: Readahead,
    mut at_each: impl FnMut(),
) -> u64 {
    let before = counting.reads.load(Ordering::Relaxed);
    let mut cursor = tree.cursor_with(mode);
    cursor.seek(&key(1000, 0)).unwrap();
    let mut found = 0;
    while let Some((key, _)) = cursor.current().unwrap() {
        found += u64::from(key.objectid.0 == 1000);
        at_each();
        cursor.next().unwrap();
    }
    assert_eq!(found, ITEM_COUNT);
    counting.reads.load(Ordering::Relaxed) - before
}

/// A walk with `ForwardAlways` asked for one more leaf at each leaf, so that it read ahead but saved
/// no request.
#[test]
fn a_walk_that_reads_ahead_finds_the_same_in_fewer_requests() {
    let counting = made();
    let requests = |mode| {
        let fs = opened(&counting);
        requests(&counting, &fs.tree(RootId::UUID_TREE).unwrap(), mode, || ())
    };
    let none = requests(Readahead::None);
    let forward = requests(Readahead::Forward);
    let always = requests(Readahead::ForwardAlways);
    println!("requests: {none} one by one, {forward} forward, {always} forward always");
    assert!(forward * 4 < none, "{forward} against {none}");
    assert!(always * 4 < none, "{always} against {none}");
    // Nobody is there who could be asked.
    assert_eq!(requests(Readahead::Beside), none);
}

/// Ends who serves, also where a test fails.
struct Serving<'a> {
    store: &'a Store,
    is_stopping: &'a AtomicBool,
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.store.wake_readers();
    }
}

/// A walk through a file's extents read each leaf itself, one after the other, when it came there.
#[test]
fn leaves_that_a_walk_will_want_are_read_by_who_serves_it() {
    let counting = made();
    let none = {
        let fs = opened(&counting);
        requests(&counting, &fs.tree(RootId::UUID_TREE).unwrap(), Readahead::None, || ())
    };
    let fs = opened(&counting);
    let tree = fs.tree(RootId::UUID_TREE).unwrap();
    let is_stopping = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let store = &*tree.store;
        let _serving = Serving { store, is_stopping: &is_stopping };
        scope.spawn(|| store.serve_reads(|| is_stopping.load(Ordering::Relaxed)));
        while !store.has_reader() {
            ubtrfs_rt::yield_now();
        }
        let beside = requests(&counting, &tree, Readahead::Beside, || store.wait_for_readers());
        println!("requests: {none} one by one, {beside} beside");
        assert!(beside * 4 < none, "{beside} against {none}");
        // All is in memory: nobody is asked.
        assert_eq!(requests(&counting, &tree, Readahead::Beside, || store.wait_for_readers()), 0);
    });
    assert!(!tree.store.has_reader());
}
