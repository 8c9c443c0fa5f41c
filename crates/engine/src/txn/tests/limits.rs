//! Findings of a review that need what is inside: each test is a counterexample.

use ubtrfs_iomap::Reach;
use ubtrfs_ondisk::FileOffset;
use ubtrfs_volume::MemDevice;

use super::*;
use crate::{Error, NewInode};

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
        insert(&fs, key(at, 0), &random.bytes(304));
    }
    fs.commit().unwrap();
    drop(fs);
    let fs = open_on(device);
    let reserved = || fs.inner.core.begin(Reservation::removals(20)).unwrap().reserved_bytes();
    let first = reserved();
    assert_eq!(first, reserved());
}

/// Freeing 64 extents at once needs more, at worst, than Linux may have left of a filesystem that it
/// filled: orphans stayed there, and files could not be cut off.
#[test]
fn little_room_suffices_to_cut_off_and_remove_a_file_of_some_extents() {
    let mut random = Prng::of_test(78);
    let device = Arc::new(MemDevice::new(256 << 20));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    for at in 0..20_000 {
        // Whole numbers of subvolumes, as the tree has them: some blocks are written and read back, and verified.
        insert(&fs, key(at, 0), &random.bytes(304));
    }
    let top = fs.top_level();
    let new = NewInode::new(0o100_644, fs.runtime().clock.now());
    let names: [&[u8]; 3] = [b"cut", b"cut_open", b"removed"];
    let ids = names.map(|name| {
        let id = fs.begin(Reservation::create(0)).unwrap().create(top, name, &new).unwrap();
        for at in 0..10 {
            fs.write(id, FileOffset(at * 8192), &random.bytes(4096)).unwrap();
        }
        id
    });
    let [cut, cut_open, removed] = ids;
    fs.unlink_deferred(top, b"removed").unwrap();
    let file = fs.open_data(cut_open).unwrap();
    fs.commit().unwrap();

    // Nothing is freed by a commit meanwhile.
    let held = fs.hold_commits();
    let core = &fs.inner.core;
    let mut taken = take_metadata(core);
    let few = Reservation::removals(3).and(Reservation::removals(2));
    let mut leave_little = || {
        while fs.begin_step(few).is_err() {
            core.alloc.unreserve(PIECE);
            taken -= PIECE;
        }
        // For blocks that the steps copy.
        core.alloc.unreserve(8 * PIECE);
        taken -= 8 * PIECE;
        let many = fs.begin_step(Reservation::removals(64));
        assert!(matches!(many, Err(crate::Error::NoSpace { .. })), "{many:?}");
    };
    leave_little();
    fs.truncate(cut, 4096).unwrap();
    leave_little();
    file.truncate(ubtrfs_iomap::FileOffset::new(4096)).unwrap();
    leave_little();
    fs.evict(removed).unwrap();
    core.alloc.unreserve(taken);
    drop(held);
    fs.commit().unwrap();
    for id in [cut, cut_open] {
        assert_eq!(fs.inode(id).unwrap().size_bytes, 4096);
        let extents = fs.file_extents(id, FileOffset(0)).unwrap();
        assert!(extents.map(Result::unwrap).all(|extent| extent.offset.0 < 4096));
    }
    assert!(matches!(fs.inode(removed), Err(crate::Error::NotFound { .. })));
}

/// What is written directly, and zeroed, took what had been promised to what others have dirty.
#[test]
fn data_that_was_taken_is_stored_where_little_is_left() {
    const LEN: usize = 1 << 20;
    let at = ubtrfs_iomap::FileOffset::new;
    let mut random = Prng::of_test(79);
    let device = Arc::new(MemDevice::new(256 << 20));
    let fs = mkfs_on(&device, &MkfsOptions::default());
    for at in 0..20_000 {
        insert(&fs, key(at, 0), &random.bytes(304));
    }
    let new = NewInode::new(0o100_644, fs.runtime().clock.now());
    let [old, dirty] = [b"old".as_slice(), b"dirty"].map(|name| {
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        let id = handle.create(fs.top_level(), name, &new).unwrap();
        drop(handle);
        let file = fs.open_data(id).unwrap();
        file.write(at(0), &vec![1; LEN]).unwrap();
        file.fsync().unwrap();
        file
    });
    dirty.write(at(0), &vec![2; LEN]).unwrap();

    let held = fs.hold_commits();
    let core = &fs.inner.core;
    let mut taken = take_metadata(core);
    while fs.begin_step(Reservation::storing(1, 1, 1).promised()).is_err() {
        core.alloc.unreserve(PIECE);
        taken -= PIECE;
    }
    drop(held);
    let is_refused = |result: Result<(), Error>| matches!(result, Err(Error::NoSpace { .. }));
    assert!(is_refused(old.direct_write(at(0), &[3; 4096]).map(drop)));
    assert!(is_refused(old.write(at(0), &[3; 4096]).map(drop)));
    assert!(is_refused(old.allocate_zeroed(at(0), LEN as u64, Reach::Stays)));
    // Nor in the middle of it.
    let step = Reservation::extents(2).and(Reservation::items(4)).and(Reservation::removals(2));
    assert!(is_refused(fs.begin_step(step.promised_behind_data()).map(drop)));
    dirty.fsync().unwrap();
    core.alloc.unreserve(taken);
    for (file, byte) in [(&old, 1), (&dirty, 2)] {
        let mut bytes = vec![0; LEN];
        fs.read(file.id(), FileOffset(0), &mut bytes).unwrap();
        assert!(bytes == vec![byte; LEN], "{byte}");
    }
    fs.sync().unwrap();
    let report = ubtrfs_check::check(fs.volume(), &Default::default()).unwrap();
    assert!(report.is_clean(), "{:?}", report.errors().collect::<Vec<_>>());
}
