//! Offsets and lengths at and over what a file can have.

use ubtrfs_iomap::{CacheOptions, Error, FileOffset, FileRange, Reach};

use super::{DataFile, Harness, Look, Refusal, judge_files};
use crate::iomap_model::at;

fn too_large<T>(offset: FileOffset, len_bytes: u64) -> Result<T, Refusal> {
    Err(Refusal::Request(Error::TooLarge { offset, len_bytes }))
}

fn invalid<T>(offset: FileOffset, len_bytes: u64) -> Result<T, Refusal> {
    Err(Refusal::Request(Error::Invalid { offset, len_bytes }))
}

fn len_of(blocks: u64) -> usize {
    usize::try_from(blocks).expect("blocks fit into memory")
}

/// Negative offsets, the last bytes that a file can have, lengths that overflow.
///
/// # Panics
/// If it is not so.
pub fn offsets_at_the_limits_are_answered_as_linux_does<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let mut harness = make(CacheOptions::default());
    let inode = harness.create();
    let file = harness.open(&inode);
    let max = FileOffset::MAX;
    let refused = |error| harness.refusal(&error);
    for (offset, len) in [(max, 1), (at(u64::MAX), 1)] {
        assert_eq!(file.write(offset, &[1]).map_err(refused), invalid(offset, len));
        assert_eq!(file.direct_write(offset, &[1]).map_err(refused), invalid(offset, len));
        assert_eq!(file.read(offset, &mut [1]).map_err(refused), invalid(offset, len));
        assert_eq!(file.direct_read(offset, &mut [1]).map_err(refused), invalid(offset, len));
    }
    let beyond = at(max.bytes() + 1);
    assert_eq!(file.truncate(beyond).map_err(refused), invalid(beyond, 0));
    assert_eq!(file.zero_range(max, 1).map_err(refused), too_large(max, 1));
    assert_eq!(file.punch_hole(at(5), max.bytes()).map_err(refused), too_large(at(5), max.bytes()));
    for (offset, len) in [(at(5), u64::MAX), (at(5), 0), (at(u64::MAX), 1)] {
        assert_eq!(file.zero_range(offset, len).map_err(refused), invalid(offset, len));
        assert_eq!(file.punch_hole(offset, len).map_err(refused), invalid(offset, len));
    }
    let whole = FileRange::new(at(1), at(11));
    assert!(matches!(
        file.load(whole, at(1), &mut [0]).map_err(refused),
        Err(Refusal::Request(Error::Unaligned { .. }))
    ));
    assert_eq!(file.size(), at(0));
    assert_eq!(file.write(at(0), &[]).map_err(refused), Ok(0));
    assert_eq!(file.write(at(77), &[]).map_err(refused), Ok(0));
    assert_eq!(file.size(), at(0));
    // The last bytes that a file can have.
    let front = at(max.bytes() - 3);
    assert_eq!(file.write(front, &[7; 4]).map_err(refused), invalid(front, 4));
    assert_eq!(file.write(front, &[7; 3]).map_err(refused), Ok(3));
    assert_eq!(file.size(), max);
    let last = |file: &H::File| {
        let mut bytes = [0; 5];
        assert_eq!(file.read(at(max.bytes() - 5), &mut bytes).unwrap(), 5);
        assert_eq!(bytes, [0, 0, 7, 7, 7]);
    };
    last(&file);
    assert_eq!(file.append(&[1]).map_err(refused), too_large(max, 1));
    file.fsync().unwrap();
    file.flush(FileRange::from(at(0))).unwrap();
    drop(file);
    harness.reopen();
    let file = harness.open(&inode);
    assert_eq!(file.size(), max);
    last(&file);
    // Too long to be read as a whole.
    drop(file);
    harness.judge(&[], Look::Full);
    let file = harness.open(&inode);
    file.truncate(at(0)).unwrap();
    file.fsync().unwrap();
    assert_eq!(file.size(), at(0));
    drop(file);
    judge_files(&mut harness, &[inode]);
}

/// The same of space calls.
///
/// # Panics
/// If it is not so.
pub fn allocate_at_the_limits_is_answered_as_linux_does<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let mut harness = make(CacheOptions::default());
    let inode = harness.create();
    let file = harness.open(&inode);
    let max = FileOffset::MAX;
    for is_zeroed in [false, true] {
        let call = |offset, len_bytes, reach| {
            let result = if is_zeroed {
                file.allocate_zeroed(offset, len_bytes, reach)
            } else {
                file.allocate(offset, len_bytes, reach)
            };
            result.map_err(|error| harness.refusal(&error))
        };
        assert_eq!(call(max, 1, Reach::Extends), too_large(max, 1));
        assert_eq!(call(at(u64::MAX), 1, Reach::Stays), invalid(at(u64::MAX), 1));
        assert_eq!(call(at(5), u64::MAX, Reach::Stays), invalid(at(5), u64::MAX));
        assert_eq!(call(at(100), 0, Reach::Extends), invalid(at(100), 0));
        assert_eq!(file.size(), at(0));
        assert_eq!(call(at(max.bytes() - 1), 1, Reach::Extends), Ok(()));
        assert_eq!(file.size(), max);
        assert!(file.seek_data(at(0)).is_err());
        file.truncate(at(0)).unwrap();
    }
    drop(file);
    judge_files(&mut harness, &[inode]);
}

/// As a bus error would say.
///
/// # Panics
/// If it is not so.
pub fn mapped_access_wholly_beyond_the_end_is_refused<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let mut harness = make(CacheOptions::default());
    let block = harness.block_bytes();
    let inode = harness.create();
    let file = harness.open(&inode);
    file.write(at(0), &vec![1; len_of(block + 904)]).unwrap();
    let size = file.size();
    let map = FileRange::new(at(0), at(10 * block));
    let refused = |result: Result<(), _>| result.map_err(|error| harness.refusal(&error));
    let beyond = |offset| Err(Refusal::Request(Error::BeyondEnd { offset: at(offset), size }));
    assert_eq!(refused(file.load(map, at(2 * block), &mut [0; 1])), beyond(2 * block));
    assert_eq!(refused(file.store(map, at(2 * block - 2), &[0; 3])), beyond(2 * block - 2));
    assert_eq!(refused(file.store(map, at(2 * block - 2), &[9; 2])), Ok(()));
    let mut bytes = [1; 4];
    file.load(map, at(2 * block - 4), &mut bytes).unwrap();
    assert_eq!(bytes, [0, 0, 9, 9]);
    file.truncate(at(100)).unwrap();
    assert!(file.load(map, at(block), &mut [0; 1]).is_err());
    file.fsync().unwrap();
    drop(file);
    judge_files(&mut harness, &[inode]);
}
