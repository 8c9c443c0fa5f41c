//! What an operation says of its arguments can be asked before it, by who notes a change first.

mod common;

use common::{BLOCK, Failure, MemoryFs, at, new_file};
use ubtrfs_iomap::{AddressSpace, CacheOptions, Error, FileOffset, Reach};

type Space = AddressSpace<MemoryFs>;

const MAX: u64 = FileOffset::MAX.bytes();

/// Offsets and lengths at the limits, and some that are in them.
fn places() -> impl Iterator<Item = (FileOffset, u64)> {
    let offsets = [0, 5, BLOCK, MAX - 1, MAX, MAX + 1, u64::MAX];
    let lens = [0, 1, 4096, MAX - 5, MAX, MAX + 1, u64::MAX];
    offsets.into_iter().flat_map(move |offset| lens.map(|len| (at(offset), len)))
}

#[test]
fn space_range_refuses_what_operations_on_space_refuse() {
    let file = new_file(&MemoryFs::new(), CacheOptions::default()).open();
    for (offset, len) in places() {
        let checked = Space::space_range(offset, len).map(|_| ());
        assert_eq!(file.zero_range(offset, len), checked, "{len} at {offset}");
        if len > 4096 && checked.is_ok() {
            continue;
        }
        assert_eq!(file.punch_hole(offset, len), checked, "{len} at {offset}");
        assert_eq!(file.allocate(offset, len, Reach::Stays), checked, "{len} at {offset}");
        assert_eq!(file.allocate_zeroed(offset, len, Reach::Stays), checked, "{len} at {offset}");
    }
}

#[test]
fn io_range_refuses_what_writes_and_truncation_refuse() {
    let file = new_file(&MemoryFs::new(), CacheOptions::default()).open();
    for (offset, len) in places().filter(|(_, len)| *len <= 4096) {
        let bytes = vec![1; usize::try_from(len).unwrap()];
        let checked = Space::io_range(offset, len);
        if let Ok(range) = checked {
            assert_eq!(range.is_empty(), len == 0);
        }
        let checked = checked.map(|_| bytes.len());
        assert_eq!(file.direct_write(offset, &bytes), checked, "{len} at {offset}");
        assert_eq!(file.write(offset, &bytes), checked, "{len} at {offset}");
        assert_eq!(file.truncate(offset), Space::io_range(offset, 0).map(|_| ()));
        file.truncate(at(0)).unwrap();
    }
}

#[test]
fn check_append_refuses_what_append_refuses() {
    let space = new_file(&MemoryFs::new(), CacheOptions::default());
    let file = space.open();
    for size in [0, MAX - 1, MAX] {
        file.truncate(at(size)).unwrap();
        for bytes in [&[][..], &[1; 10]] {
            let checked = space.check_append(bytes.len() as u64);
            let appended = file.append(bytes).map(|_| ());
            assert_eq!(appended, checked, "{} bytes to {size}", bytes.len());
        }
    }
    let refused = Error::TooLarge { offset: FileOffset::MAX, len_bytes: 1 };
    assert_eq!(space.check_append(1), Err(Failure::Request(refused)));
}
