//! Space for files before their data comes.

use ubtrfs_iomap::{CacheOptions, FiemapSync, FileOffset, FileRange, Reach};

use super::{DataFile, Harness, contents, judge_files};
use crate::iomap_model::{at, range};

/// Each extent: its blocks, and whether it is unwritten; what touches and is the same is one.
fn extents(file: &impl DataFile) -> Vec<(FileRange, bool)> {
    let all = FileRange::from(FileOffset::ZERO);
    let mut merged: Vec<(FileRange, bool)> = Vec::new();
    for extent in file.fiemap(all, usize::MAX, FiemapSync::AsIs).unwrap() {
        let is_unwritten = extent.flags.is_unwritten;
        match merged.last_mut() {
            Some(last) if last.0.end == extent.range.start && last.1 == is_unwritten => {
                last.0.end = extent.range.end;
            }
            _ => merged.push((extent.range, is_unwritten)),
        }
    }
    merged
}

/// Round what is mapped and what is dirty.
///
/// # Panics
/// If it is not so.
pub fn allocate_gives_holes_space_and_leaves_data<H: Harness>(make: impl Fn(CacheOptions) -> H) {
    let mut harness = make(CacheOptions::default());
    let block = harness.block_bytes();
    let inode = harness.create();
    let file = harness.open(&inode);
    file.write(at(2 * block), &[1; 4096]).unwrap();
    file.fsync().unwrap();
    file.write(at(4 * block), &[2; 5000]).unwrap();
    let before = contents(&file);
    file.allocate(at(block + 5), 6 * block, Reach::Stays).unwrap();
    let blocks = |start: u64, end: u64| range(start * block, end * block);
    let expected = [
        (blocks(1, 2), true),
        (blocks(2, 3), false),
        (blocks(3, 4), true),
        (blocks(4, 6), false),
        (blocks(6, 8), true),
    ];
    assert_eq!(extents(&file), expected);
    assert!(contents(&file) == before);
    file.fsync().unwrap();
    assert_eq!(extents(&file), expected);
    assert!(contents(&file) == before);
    file.allocate(at(0), 9 * block - 1, Reach::Extends).unwrap();
    assert_eq!(file.size(), at(9 * block - 1));
    drop(file);
    harness.reopen();
    let file = harness.open(&inode);
    assert_eq!(file.size(), at(9 * block - 1));
    let after = [(blocks(0, 2), true), expected[1], expected[2], expected[3], (blocks(6, 9), true)];
    assert_eq!(extents(&file), after);
    assert!(contents(&file)[..before.len()] == before);
    drop(file);
    judge_files(&mut harness, &[inode]);
}

/// Space beyond the end stays when the file grows, and goes when it is cut, also where it is cut to the size that it has.
///
/// # Panics
/// If it is not so.
pub fn space_beyond_the_end_goes_with_truncation_down_only<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let mut harness = make(CacheOptions::default());
    let block = harness.block_bytes();
    let inode = harness.create();
    let file = harness.open(&inode);
    let blocks = |count: u64| vec![(range(0, count * block), true)];
    for (size, kept) in [(5000, 16), (4000, 1), (4000, 1)] {
        file.allocate(at(0), 16 * block, Reach::Stays).unwrap();
        assert_eq!(extents(&file), blocks(16));
        file.truncate(at(size)).unwrap();
        assert_eq!((file.size(), extents(&file)), (at(size), blocks(kept)));
    }
    // In memory the file ends further on than the filesystem knows.
    file.allocate(at(0), 16 * block, Reach::Stays).unwrap();
    file.write(at(0), &[1; 5 * 4096]).unwrap();
    file.truncate(at(3 * block)).unwrap();
    file.fsync().unwrap();
    assert_eq!(extents(&file), [(range(0, 3 * block), false)]);
    drop(file);
    judge_files(&mut harness, &[inode]);
}

/// A mapped store behind the old end is not seen by those who read there then.
///
/// # Panics
/// If it is not so.
pub fn allocate_that_extends_reads_zeros_behind_the_old_end<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    for is_zeroed in [false, true] {
        let mut harness = make(CacheOptions::default());
        let inode = harness.create();
        let file = harness.open(&inode);
        file.write(at(0), &[1; 1000]).unwrap();
        file.store(range(0, 4096), at(1000), &[2; 3096]).unwrap();
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
        drop(file);
        judge_files(&mut harness, &[inode]);
    }
}

/// Over mapped and dirty blocks.
///
/// # Panics
/// If it is not so.
pub fn allocate_zeroed_makes_whole_blocks_unwritten_and_zeroes_the_edges<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let mut harness = make(CacheOptions::default());
    let block = harness.block_bytes();
    let inode = harness.create();
    let file = harness.open(&inode);
    let len = |blocks: u64| usize::try_from(blocks * block).expect("blocks fit into memory");
    file.write(at(0), &vec![1; len(6)]).unwrap();
    file.fsync().unwrap();
    file.write(at(block), &vec![2; len(2)]).unwrap();
    file.allocate_zeroed(at(100), 5 * block, Reach::Stays).unwrap();
    let mut expected = vec![1; len(6)];
    expected[100..100 + len(5)].fill(0);
    assert!(contents(&file) == expected);
    let blocks = |start: u64, end: u64| range(start * block, end * block);
    file.fsync().unwrap();
    let kinds = [(blocks(0, 1), false), (blocks(1, 5), true), (blocks(5, 6), false)];
    assert_eq!(extents(&file), kinds);
    drop(file);
    harness.reopen();
    let file = harness.open(&inode);
    assert_eq!(extents(&file), kinds);
    assert!(contents(&file) == expected);
    drop(file);
    judge_files(&mut harness, &[inode]);
}
