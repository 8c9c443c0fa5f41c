//! What is done often takes no memory of the allocator.

mod common;

use allocation_counter::measure;
use common::full::{create, make, open_with};
use ubtrfs_engine::{DataFile, InodeId, OpenOptions};
use ubtrfs_iomap::FileOffset;

const BLOCK: u64 = 4096;
const EXTENTS: u64 = 3000;

/// All data and all holes, in turns; returns how many seeks it took.
fn walk(file: &DataFile) -> u64 {
    let (mut at, mut seeks) = (FileOffset::ZERO, 1);
    while let Ok(start) = file.seek_data(at) {
        at = file.seek_hole(start).unwrap();
        seeks += 2;
    }
    seeks
}

/// A seek over what is dirty, or mapped and its tree in memory. The last one, behind all data, has an error to tell.
#[test]
fn seeks_allocate_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let fs = open_with(&image, OpenOptions::default());
    let file = create(&fs, "file", 0).unwrap();
    for extent in 0..EXTENTS {
        file.write(FileOffset::new(extent * 2 * BLOCK), &[7; BLOCK as usize]).unwrap();
    }
    for state in ["delalloc", "synced"] {
        if state == "synced" {
            file.fsync().unwrap();
        }
        // What a first walk needs stays for the next ones.
        assert_eq!(walk(&file), 2 * EXTENTS + 1);
        let counted = measure(|| assert_eq!(walk(&file), 2 * EXTENTS + 1));
        assert!(counted.count_total <= 2, "{state}: {counted:?}");
    }
}

/// A search of a tree in memory.
#[test]
fn lookups_of_inodes_allocate_nothing() {
    const FILES: u64 = 500;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let fs = open_with(&image, OpenOptions::default());
    let ids: Vec<InodeId> =
        (0..FILES).map(|number| create(&fs, &format!("{number}"), 0).unwrap().id()).collect();
    fs.sync().unwrap();
    let look = || {
        for id in &ids {
            assert_eq!(fs.inode(*id).unwrap().nlink, 1);
        }
    };
    look();
    let counted = measure(look);
    assert_eq!(counted.count_total, 0, "{counted:?}");
    // It counts.
    assert_eq!(measure(|| drop(std::hint::black_box(vec![0; 100]))).count_total, 1);
}
