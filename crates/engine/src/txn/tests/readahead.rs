//! Reading ahead: the same items, fewer requests.

use std::io;

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_rt::{AtomicU64, Ordering};
use ubtrfs_volume::MemDevice;

use super::*;
use crate::btree::Readahead;

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

/// A walk with `ForwardAlways` asked for one more leaf at each leaf, so that it read ahead but saved
/// no request.
#[test]
fn a_walk_that_reads_ahead_finds_the_same_in_fewer_requests() {
    let counting =
        Arc::new(Counting { device: MemDevice::new(256 << 20), reads: AtomicU64::new(0) });
    let device: Arc<dyn Device> = Arc::clone(&counting) as Arc<dyn Device>;
    let volume = mkfs(vec![Arc::clone(&device)], &MkfsOptions::default(), &runtime()).unwrap();
    let fs = Filesystem::open(volume, open_options()).unwrap();
    let count = 50_000_u64;
    for at in 0..count {
        let mut handle = fs.begin(Reservation::items(1)).unwrap();
        handle.txn.insert(RootId::UUID_TREE, key(1000, at), &[0; 56]).unwrap();
    }
    fs.commit().unwrap();
    drop(fs);
    let requests = |mode: Readahead| {
        let volume = Volume::open(vec![Arc::clone(&device)], &VolumeOptions::default()).unwrap();
        let fs = Filesystem::open(volume, open_options()).unwrap();
        let tree = fs.tree(RootId::UUID_TREE).unwrap();
        let before = counting.reads.load(Ordering::Relaxed);
        let mut cursor = tree.cursor_with(mode);
        cursor.seek(&key(1000, 0)).unwrap();
        let mut found = 0;
        while let Some((key, _)) = cursor.current().unwrap() {
            found += u64::from(key.objectid.0 == 1000);
            cursor.next().unwrap();
        }
        assert_eq!(found, count);
        counting.reads.load(Ordering::Relaxed) - before
    };
    let none = requests(Readahead::None);
    let forward = requests(Readahead::Forward);
    let always = requests(Readahead::ForwardAlways);
    println!("requests: {none} one by one, {forward} forward, {always} forward always");
    assert!(forward * 4 < none, "{forward} against {none}");
    assert!(always * 4 < none, "{always} against {none}");
}
