//! Space for files before their data comes.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{BLOCK, Failure, MemoryFs, at, contents, new_file, range};
use ubtrfs_iomap::{CacheOptions, Error, FiemapSync, FileOffset, FileRange, OpenFile, Reach};

/// Each extent: its blocks, and whether it is unwritten.
fn extents(file: &OpenFile<MemoryFs>) -> Vec<(FileRange, bool)> {
    let all = FileRange::from(FileOffset::ZERO);
    let extents = file.fiemap(all, 100, FiemapSync::AsIs).unwrap();
    extents.iter().map(|extent| (extent.range, extent.flags.is_unwritten)).collect()
}

#[test]
fn allocate_gives_holes_space_and_leaves_data() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    file.write(at(2 * BLOCK), &[1; 4096]).unwrap();
    file.fsync().unwrap();
    file.write(at(4 * BLOCK), &[2; 5000]).unwrap();
    let before = contents(&file);
    file.allocate(at(BLOCK + 5), 6 * BLOCK, Reach::Stays).unwrap();
    let blocks = |start: u64, end: u64| range(start * BLOCK, end * BLOCK);
    let expected = [
        (blocks(1, 2), true),
        (blocks(2, 3), false),
        (blocks(3, 4), true),
        (blocks(4, 6), false),
        (blocks(6, 8), true),
    ];
    assert_eq!(extents(&file), expected);
    assert!(contents(&file) == before);
    // What is dirty has its own space.
    assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (5, 2));
    file.fsync().unwrap();
    assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (7, 0));
    assert!(contents(&file) == before);
    file.allocate(at(0), 9 * BLOCK - 1, Reach::Extends).unwrap();
    assert_eq!(file.size(), at(9 * BLOCK - 1));
    assert_eq!(fs.used_blocks(), 9);
}

/// Space beyond the end stays when the file grows, and goes when it is cut, also where it is cut to the size that it has.
#[test]
fn space_beyond_the_end_goes_with_truncation_down_only() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    for (size, kept) in [(5000, 16), (4000, 1), (4000, 1)] {
        file.allocate(at(0), 16 * BLOCK, Reach::Stays).unwrap();
        assert_eq!(fs.used_blocks(), 16);
        file.truncate(at(size)).unwrap();
        assert_eq!((file.size(), fs.used_blocks()), (at(size), kept));
    }
    // In memory the file ended further on than the filesystem knew.
    file.allocate(at(0), 16 * BLOCK, Reach::Stays).unwrap();
    file.write(at(0), &[1; 5 * 4096]).unwrap();
    file.truncate(at(3 * BLOCK)).unwrap();
    assert_eq!(fs.used_blocks(), 3);
}

#[test]
fn allocate_that_extends_reads_zeros_behind_the_old_end() {
    for is_zeroed in [false, true] {
        let fs = MemoryFs::new();
        let file = new_file(&fs, CacheOptions::default()).open();
        file.write(at(0), &[1; 1000]).unwrap();
        file.map(at(0), BLOCK).unwrap().store(at(1000), &[2; 3096]).unwrap();
        if is_zeroed {
            file.allocate_zeroed(at(5000), 5000, Reach::Extends).unwrap();
        } else {
            file.allocate(at(5000), 5000, Reach::Extends).unwrap();
        }
        let mut expected = vec![0; 10_000];
        expected[..1000].fill(1);
        assert!(contents(&file) == expected);
        file.fsync().unwrap();
        assert!(contents(&file) == expected);
    }
}

#[test]
fn allocate_zeroed_makes_whole_blocks_unwritten_and_zeroes_the_edges() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    file.write(at(0), &[1; 6 * 4096]).unwrap();
    file.fsync().unwrap();
    file.write(at(BLOCK), &[2; 2 * 4096]).unwrap();
    file.allocate_zeroed(at(100), 5 * BLOCK, Reach::Stays).unwrap();
    let mut expected = vec![1; 6 * 4096];
    expected[100..100 + 5 * 4096].fill(0);
    assert!(contents(&file) == expected);
    let blocks = |start: u64, end: u64| range(start * BLOCK, end * BLOCK);
    file.fsync().unwrap();
    let kinds: Vec<_> = extents(&file).iter().map(|(range, kind)| (*range, *kind)).collect();
    assert_eq!(kinds, [(blocks(0, 1), false), (blocks(1, 5), true), (blocks(5, 6), false)]);
    assert!(contents(&file) == expected);
    assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (6, 0));
}

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

#[test]
fn allocate_at_the_limits_is_answered_as_linux_does() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    let max = FileOffset::MAX;
    let too_large =
        |offset, len_bytes| Err(Failure::Request(Error::TooLarge { offset, len_bytes }));
    for call in [OpenFile::allocate, OpenFile::allocate_zeroed] {
        assert_eq!(call(&file, max, 1, Reach::Extends), too_large(max, 1));
        assert_eq!(call(&file, at(u64::MAX), 1, Reach::Stays), too_large(at(u64::MAX), 1));
        assert_eq!(call(&file, at(5), u64::MAX, Reach::Stays), too_large(at(5), u64::MAX));
        assert_eq!(call(&file, at(100), 0, Reach::Extends), Ok(()));
        assert_eq!((file.size(), fs.used_blocks()), (at(0), 0));
        assert_eq!(call(&file, at(max.bytes() - 1), 1, Reach::Extends), Ok(()));
        assert_eq!((file.size(), fs.used_blocks()), (max, 1));
        assert_eq!(file.seek_data(at(0)), Err(Failure::Request(Error::NoData { offset: at(0) })));
        file.truncate(at(0)).unwrap();
        assert_eq!(fs.used_blocks(), 0);
    }
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
