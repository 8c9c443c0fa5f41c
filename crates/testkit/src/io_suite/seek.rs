//! Seek and fiemap.

use ubtrfs_iomap::{CacheOptions, Error, FiemapFlags, FiemapSync, FileOffset, FileRange, Reach};

use super::{DataFile, Harness, Refusal, walk};
use crate::iomap_model::{at, range};

/// Experiment 1 in small: data in every other block, found with delalloc, after sync, after reopening; fiemap says the same.
///
/// # Panics
/// If it is not so.
pub fn walk_of_sparse_file_finds_each_extent<H: Harness>(make: impl Fn(CacheOptions) -> H) {
    const EXTENTS: u64 = 2000;
    let mut harness = make(CacheOptions::default());
    let block = harness.block_bytes();
    let inode = harness.create();
    let file = harness.open(&inode);
    let bytes = vec![1; usize::try_from(block).expect("a block fits into memory")];
    for extent in 0..EXTENTS {
        file.write(at(extent * 2 * block), &bytes).unwrap();
    }
    let expected: Vec<FileRange> =
        (0..EXTENTS).map(|extent| range(extent * 2 * block, (extent * 2 + 1) * block)).collect();
    let found = |file: &H::File| {
        assert_eq!(walk(file), expected);
        let all = FileRange::from(FileOffset::ZERO);
        let extents = file.fiemap(all, usize::MAX, FiemapSync::AsIs).unwrap();
        let ranges: Vec<FileRange> = extents.iter().map(|extent| extent.range).collect();
        assert_eq!(ranges, expected);
        extents.iter().filter(|extent| extent.flags.is_delalloc).count()
    };
    assert_eq!(found(&file), 2000);
    file.fsync().unwrap();
    assert_eq!(found(&file), 0);
    harness.reclaim();
    assert_eq!(found(&file), 0);
    drop(file);
    harness.reopen();
    assert_eq!(found(&harness.open(&inode)), 0);
}

/// Mapped, unwritten and delalloc, cut and merged.
///
/// # Panics
/// If it is not so.
pub fn fiemap_names_each_kind_of_extent<H: Harness>(make: impl Fn(CacheOptions) -> H) {
    let harness = make(CacheOptions::default());
    let block = harness.block_bytes();
    let file = harness.open(&harness.create());
    let bytes = vec![1; usize::try_from(2 * block).expect("blocks fit into memory")];
    file.write(at(0), &bytes).unwrap();
    file.fsync().unwrap();
    file.allocate(at(4 * block), 4 * block, Reach::Stays).unwrap();
    file.write(at(5 * block), &bytes[..bytes.len() / 2]).unwrap();
    file.write(at(9 * block), &[1; 100]).unwrap();
    let all = FileRange::from(at(0));
    let extents = file.fiemap(all, 100, FiemapSync::AsIs).unwrap();
    let none = FiemapFlags::default();
    let unwritten = FiemapFlags { is_unwritten: true, ..none };
    let delalloc = FiemapFlags { is_delalloc: true, ..none };
    let (zeroth, first) = (extents[0].address, extents[1].address.expect("it has a place"));
    assert!(zeroth.is_some());
    let list: Vec<_> =
        extents.iter().map(|extent| (extent.range, extent.address, extent.flags)).collect();
    let blocks = |start: u64, end: u64| range(start * block, end * block);
    let expected = [
        (blocks(0, 2), zeroth, none),
        (blocks(4, 5), Some(first), unwritten),
        (blocks(5, 6), None, delalloc),
        (blocks(6, 8), Some(first + 2 * block), unwritten),
        (blocks(9, 10), None, FiemapFlags { is_last: true, ..delalloc }),
    ];
    assert_eq!(list, expected);
    // Cut, the last one shown is not the file's last, and it is whole.
    let two = file.fiemap(all, 2, FiemapSync::AsIs).unwrap();
    assert_eq!(two, extents[..2]);
    let part = file.fiemap(blocks(7, 8), 9, FiemapSync::AsIs).unwrap();
    assert_eq!(part.len(), 1);
    assert!(!part[0].flags.is_last);
    let synced = file.fiemap(all, 100, FiemapSync::WriteBack).unwrap();
    assert!(synced.iter().all(|extent| !extent.flags.is_delalloc && extent.address.is_some()));
}

/// Before, at and beyond the end, and in a file as long as a file can be.
///
/// # Panics
/// If it is not so.
pub fn seek_outside_of_the_file_is_no_data<H: Harness>(make: impl Fn(CacheOptions) -> H) {
    let harness = make(CacheOptions::default());
    let block = harness.block_bytes();
    let file = harness.open(&harness.create());
    let refusal = |result: Result<FileOffset, _>| result.map_err(|error| harness.refusal(&error));
    let no_data = |offset| Err(Refusal::Request(Error::NoData { offset }));
    for offset in [at(0), at(5), FileOffset::MAX, at(u64::MAX)] {
        assert_eq!(refusal(file.seek_data(offset)), no_data(offset));
        assert_eq!(refusal(file.seek_hole(offset)), no_data(offset));
    }
    file.truncate(FileOffset::MAX).unwrap();
    assert_eq!(refusal(file.seek_hole(at(5))), Ok(at(5)));
    assert_eq!(refusal(file.seek_data(at(5))), no_data(at(5)));
    file.write(at((1 << 62) + 1), &[1]).unwrap();
    assert_eq!(refusal(file.seek_data(at(5))), Ok(at(1 << 62)));
    assert_eq!(refusal(file.seek_hole(at(1 << 62))), Ok(at((1 << 62) + block)));
    file.truncate(at(0)).unwrap();
}
