//! Space for files before their data comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{BLOCK, Failure, MemoryFs, at, contents, new_file};
use ubtrfs_iomap::{CacheOptions, Reach};

#[test]
fn allocate_without_space_fails_and_leaves_size_and_data() {
    let fs = MemoryFs::with_capacity(4);
    let file = new_file(&fs, CacheOptions::default()).open();
    file.write(at(0), &[1; 5000]).unwrap();
    assert_eq!(file.allocate(at(0), 5 * BLOCK, Reach::Extends), Err(Failure::NoSpace));
    assert_eq!(file.size(), at(5000));
    assert!(contents(&file) == vec![1; 5000]);
    // What is dirty does not need space twice.
    file.truncate(at(5000)).unwrap();
    assert_eq!(file.allocate(at(0), 4 * BLOCK, Reach::Extends), Ok(()));
    assert_eq!(file.write(at(0), &[2; 4 * 4096]), Err(Failure::NoSpace));
    file.fsync().unwrap();
    assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (4, 0));
}

/// Blocks that are on their way while space is allocated round them keep their data.
#[test]
fn allocate_during_writeback_keeps_what_is_on_its_way() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(2 * BLOCK), &[1; 8192]).unwrap();
    let (weak, armed) = (Arc::downgrade(&space), AtomicBool::new(true));
    fs.before_mapping(move || {
        if armed.swap(false, Ordering::Relaxed) {
            let file = weak.upgrade().unwrap().open();
            file.allocate(at(0), 8 * BLOCK, Reach::Stays).unwrap();
        }
    });
    file.fsync().unwrap();
    assert!(contents(&file)[8192..] == vec![1; 8192]);
    assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (8, 0));
}
