//! Reading ahead: the same items, fewer requests.

use std::io;

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_ondisk::block::Block;
use ubtrfs_rt::{AtomicBool, AtomicU64, Condvar, Mutex, Ordering};
use ubtrfs_volume::MemDevice;

use super::*;
use crate::btree::readahead::child_ptr;
use crate::btree::{Readahead, Store, Tree};

/// A device in memory that counts its reads, and holds up what it has read.
#[derive(Debug)]
struct Counting {
    device: MemDevice,
    reads: AtomicU64,
    hold: Mutex<Hold>,
    changed: Condvar,
}

#[derive(Debug, Default, PartialEq)]
enum Hold {
    #[default]
    No,
    /// What is read next.
    Next,
    /// It has been read.
    Held,
}

impl Counting {
    /// Until the next read has been done, whose reader does not know yet.
    fn wait_until_held(&self) {
        let mut hold = self.hold.lock();
        while *hold != Hold::Held {
            self.changed.wait(&mut hold);
        }
    }

    fn set(&self, hold: Hold) {
        *self.hold.lock() = hold;
        self.changed.notify_all();
    }
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
        self.device.read_at(at, buf)?;
        let mut hold = self.hold.lock();
        if *hold == Hold::Next {
            *hold = Hold::Held;
            self.changed.notify_all();
            while *hold == Hold::Held {
                self.changed.wait(&mut hold);
            }
        }
        Ok(())
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
    let counting = Arc::new(Counting {
        device: MemDevice::new(256 << 20),
        reads: AtomicU64::new(0),
        hold: Mutex::default(),
        changed: Condvar::default(),
    });
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

/// A block that was dropped, and whose place another one of the same transaction and first key had by the time it had been read, was
/// kept, and taken for that one.
#[test]
fn what_was_read_of_a_block_is_not_kept_once_another_has_its_place() {
    let counting = made();
    let fs = opened(&counting);
    let tree = fs.tree(RootId::UUID_TREE).unwrap();
    let store = &tree.store;
    let root = store.read(&tree.read().root, tree.id, None).unwrap();
    let Block::Node(node) = &*root else { panic!("a tree of one leaf") };
    let (ptr, first_key) = (child_ptr(node, 1), node.key(1));
    let one_by_one = || drop(store.read(&ptr, tree.id, Some(first_key)).unwrap());
    let ahead = || store.read_runs(vec![(ptr, first_key)], tree.id, || true);
    let readers: [&(dyn Fn() + Sync); 2] = [&one_by_one, &ahead];
    for read in readers {
        // Nothing happens: it is kept.
        store.forget(ptr.addr);
        read();
        let old = store.cached(&ptr, Some(&first_key)).unwrap();
        let mut other = Block::clone(&old);
        let Block::Leaf(leaf) = &mut other else { panic!("no leaf") };
        leaf.data_mut(0).fill(7);
        let other = Arc::new(other);
        for takes_its_place in [false, true] {
            store.forget(ptr.addr);
            counting.set(Hold::Next);
            std::thread::scope(|scope| {
                scope.spawn(read);
                counting.wait_until_held();
                store.forget(ptr.addr);
                if takes_its_place {
                    store.insert(Arc::clone(&other));
                }
                counting.set(Hold::No);
            });
            let kept = store.cached(&ptr, Some(&first_key));
            assert_eq!(kept.is_some(), takes_its_place);
            assert!(kept.is_none_or(|kept| Arc::ptr_eq(&kept, &other)));
        }
    }
}

/// Who wants a block that is being read waits for that, and reads nothing.
#[test]
fn block_is_read_once_however_many_want_it() {
    let counting = made();
    let fs = opened(&counting);
    let tree = fs.tree(RootId::UUID_TREE).unwrap();
    let (store, id) = (&tree.store, tree.id);
    let root = store.read(&tree.read().root, id, None).unwrap();
    let Block::Node(node) = &*root else { panic!("a tree of one leaf") };
    let blocks = [1, 2, 3].map(|slot| (child_ptr(node, slot), node.key(slot)));
    let before = counting.reads.load(Ordering::Relaxed);
    counting.set(Hold::Next);
    std::thread::scope(|scope| {
        scope.spawn(|| store.read_runs(blocks.to_vec(), id, || true));
        counting.wait_until_held();
        let readers =
            blocks.map(|(ptr, key)| scope.spawn(move || store.read(&ptr, id, Some(key)).unwrap()));
        // Who asks ahead for what is being read asks for nothing.
        store.read_runs(blocks.to_vec(), id, || true);
        counting.set(Hold::No);
        for (reader, (ptr, key)) in readers.into_iter().zip(blocks) {
            assert_eq!(reader.join().unwrap().bytenr(), ptr.addr);
            assert!(store.cached(&ptr, Some(&key)).is_some());
        }
    });
    assert_eq!(counting.reads.load(Ordering::Relaxed) - before, 1);
}
