//! Findings of a review that need what is inside: each test is a counterexample.

use ubtrfs_ondisk::FileOffset;
use ubtrfs_volume::MemDevice;

use super::*;
use crate::NewInode;

/// A size near the end of what a number holds, on a damaged or hostile filesystem.
#[test]
fn write_to_a_file_of_the_largest_size_is_no_panic() {
    let device = Arc::new(MemDevice::new(256 << 20));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    let new = NewInode::new(0o100_644, fs.runtime().clock.now());
    let id = fs.begin(Reservation::create(0)).unwrap().create(fs.top_level(), b"f", &new).unwrap();
    let mut handle = fs.begin(Reservation::items(1)).unwrap();
    handle
        .txn
        .update(id.root, id.key(ubtrfs_ondisk::KeyType::INODE_ITEM, 0), |bytes| {
            bytes[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        })
        .unwrap();
    drop(handle);
    fs.commit().unwrap();
    let _ = fs.write(id, FileOffset(0), b"bytes");
}

#[test]
fn orphan_of_the_largest_number_is_no_panic() {
    let device = Arc::new(MemDevice::new(256 << 20));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    let mut handle = fs.begin(Reservation::items(1)).unwrap();
    let key = Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, u64::MAX);
    handle.txn.insert(RootId::FS_TREE, key, &[]).unwrap();
    drop(handle);
    let _ = fs.clean_orphans(RootId::FS_TREE);
}

/// The first handle of an opened filesystem was reckoned before it was known how much metadata is in use, so without copies of any block.
#[test]
fn first_handle_reserves_as_much_as_later_ones() {
    let mut random = Prng::of_test(77);
    let device = Arc::new(MemDevice::new(256 << 20));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    for at in 0..20_000 {
        insert(&fs, key(at, 0), &random.bytes(300));
    }
    fs.commit().unwrap();
    drop(fs);
    let fs = open_on(device);
    let reserved = || fs.inner.core.begin(Reservation::removals(20)).unwrap().reserved_bytes();
    let first = reserved();
    assert_eq!(first, reserved());
}
