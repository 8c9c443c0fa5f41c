//! A run in the middle of a file that cannot be written takes nothing from what lies behind it: neither the states of blocks that others have on
//! their way, nor what is new there. What is lost is the run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{BLOCK, Failure, MemoryFs, at, contents, new_file, range};
use ubtrfs_iomap::extent_state::{StateBits, Want};
use ubtrfs_iomap::{AddressSpace, CacheOptions, OpenFile};

/// A file that ends at four blocks, of which the first and the last have data; then the first and the third are dirty, and while the third is on
/// its way (before it is mapped) writing the first fails, after which `then` is done.
fn with_third_block_on_its_way(
    then: impl Fn(&Arc<AddressSpace<MemoryFs>>, &OpenFile<MemoryFs>) + Send + Sync + 'static,
) -> (Arc<MemoryFs>, Arc<AddressSpace<MemoryFs>>, OpenFile<MemoryFs>) {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 4096]).unwrap();
    file.write(at(3 * BLOCK), &[1; 4096]).unwrap();
    file.fsync().unwrap();
    file.write(at(0), &[2; 4096]).unwrap();
    file.write(at(2 * BLOCK), &[3; 4096]).unwrap();
    let (weak, device) = (Arc::downgrade(&space), Arc::downgrade(&fs));
    let armed = AtomicBool::new(true);
    fs.before_mapping(move || {
        if armed.swap(false, Ordering::Relaxed) {
            let (space, device) = (weak.upgrade().unwrap(), device.upgrade().unwrap());
            let file = space.open();
            device.writes_left.store(0, Ordering::Relaxed);
            space.flush(range(0, BLOCK)).unwrap();
            device.writes_left.store(u64::MAX, Ordering::Relaxed);
            then(&space, &file);
        }
    });
    space.flush(range(2 * BLOCK, 3 * BLOCK)).unwrap();
    (fs, space, file)
}

/// Invariant 1 of `address_space.rs`; and who seeks sees data.
#[test]
fn block_on_its_way_stays_ordered_though_one_before_it_is_lost() {
    let (_fs, _space, file) = with_third_block_on_its_way(|space, file| {
        let third = range(2 * BLOCK, 3 * BLOCK);
        let is_ordered = space.states().test(third, Want::All(StateBits::ORDERED));
        assert!(is_ordered, "it is on its way");
        assert_eq!(file.seek_data(at(BLOCK)), Ok(at(2 * BLOCK)));
        assert_eq!(file.seek_hole(at(2 * BLOCK)), Ok(at(4 * BLOCK)));
        assert_eq!(space.states().delalloc_new_bytes(), BLOCK, "it is to take space");
    });
    assert_eq!(file.fsync(), Err(Failure::Io));
}

/// What is zeroed while it is on its way is zeros, not what arrives then.
#[test]
fn zeroing_what_is_on_its_way_zeroes_it_though_a_block_before_it_was_lost() {
    let (fs, space, file) = with_third_block_on_its_way(|_, file| {
        file.zero_range(at(2 * BLOCK), BLOCK).unwrap();
    });
    assert!(contents(&file)[2 * 4096..3 * 4096] == [0; 4096], "what was zeroed came back");
    assert_eq!(file.fsync(), Err(Failure::Io));
    assert_eq!(file.fsync(), Ok(()));
    assert!(fs.stored(space.inode(), 4 * BLOCK)[2 * 4096..3 * 4096] == [0; 4096]);
}

/// Of a block two versions are never on their way at once: the older one might arrive last, and stay, though an fsync had promised the newer. By
/// debug assertion it is "two writebacks of a block at once"; in a release build what is on the medium is old.
#[test]
fn newer_version_waits_for_the_older_one_though_a_block_before_it_was_lost() {
    let (fs, space, file) = with_third_block_on_its_way(|space, file| {
        file.write(at(2 * BLOCK), &[4; 4096]).unwrap();
        // Does not wait for others: takes what is dirty and of which no older version is on its way, so nothing.
        space.cache().shrink_dirty(BLOCK);
    });
    file.fsync().unwrap_err();
    file.fsync().unwrap();
    assert!(contents(&file)[2 * 4096..3 * 4096] == [4; 4096]);
    assert!(
        fs.stored(space.inode(), 4 * BLOCK)[2 * 4096..3 * 4096] == [4; 4096],
        "the medium has the older version"
    );
}
