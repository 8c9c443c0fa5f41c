//! What an operation says of its arguments can be asked before it, by who notes a change first.

use crate::common::{BLOCK, Failure, MemoryFs, at, new_file};
use ubtrfs_iomap::{AddressSpace, CacheOptions, Error, FiemapSync, FileOffset, FileRange, Reach};

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
        assert_eq!(file.unshare(offset, len), checked, "{len} at {offset}");
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

/// The offset of a map is that of a block, and it ends where a file may.
#[test]
fn map_refuses_what_is_no_range_of_blocks() {
    let file = new_file(&MemoryFs::new(), CacheOptions::default()).open();
    for (offset, len_bytes) in places() {
        let expected = if !offset.bytes().is_multiple_of(BLOCK) {
            Some(Error::Unaligned { offset, len_bytes, block_bytes: BLOCK })
        } else if len_bytes == 0 {
            Some(Error::Invalid { offset, len_bytes })
        } else if offset.bytes().checked_add(len_bytes).is_none_or(|end| end > MAX) {
            Some(Error::TooLarge { offset, len_bytes })
        } else {
            None
        };
        let found = file.map(offset, len_bytes).err();
        assert_eq!(found, expected.map(Failure::Request), "{len_bytes} at {offset}");
    }
}

/// Where Linux sends SIGBUS, at the limits, too; and nothing is changed by it.
#[test]
fn access_to_blocks_that_the_file_does_not_have_is_beyond_its_end() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    for size in [0, 5, MAX - 5, MAX].map(at) {
        file.truncate(size).unwrap();
        let map = file.map(at(0), MAX).unwrap();
        let upto = size.round_up(BLOCK);
        for (offset, len) in places().filter(|(_, len)| *len <= BLOCK) {
            let is_there = |len: u64| {
                let end = offset.bytes().checked_add(len).filter(|end| *end <= MAX);
                end.is_some_and(|end| end <= upto.bytes())
            };
            let expected = |len| match is_there(len) {
                true => Ok(()),
                false => Err(Failure::Request(Error::BeyondEnd { offset, size })),
            };
            let mut bytes = vec![0; usize::try_from(len).unwrap()];
            let what = format!("{len} at {offset} of {size}");
            assert_eq!(map.load(offset, &mut bytes), expected(len), "{what}");
            assert_eq!(map.store(offset, &bytes), expected(len), "{what}");
            assert_eq!(map.fault_for_read(offset), expected(1), "{what}");
            assert_eq!(map.fault_for_write(offset), expected(1), "{what}");
            assert_eq!(file.size(), size);
        }
        for (offset, len) in places() {
            assert_eq!(map.msync(FileRange::with_len(offset, len)), Ok(()), "{len} at {offset}");
        }
        file.truncate(at(0)).unwrap();
    }
    file.fsync().unwrap();
    assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (0, 0));
}

/// Any range may be asked about, as far as a file can have it; one that ends before it begins is empty.
#[test]
fn fiemap_takes_any_range_that_a_file_can_have() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    file.write(at(MAX - 3), &[7; 3]).unwrap();
    file.write(at(0), &[7; 4096]).unwrap();
    for (offset, len_bytes) in places() {
        for sync in [FiemapSync::AsIs, FiemapSync::WriteBack] {
            let range = FileRange::with_len(offset, len_bytes);
            let extents = file.fiemap(range, usize::MAX, sync).unwrap();
            let last = at(MAX - 3).round_down(BLOCK);
            let blocks = [at(0), last].map(|start| FileRange::with_len(start, BLOCK));
            let asked = range.round_out(BLOCK);
            let holds = |block: &&FileRange| !range.is_empty() && block.overlaps(asked);
            let expected = blocks.iter().filter(holds).count();
            assert_eq!(extents.len(), expected, "{len_bytes} at {offset}: {extents:?}");
        }
    }
    assert_eq!((file.size(), fs.reserved_blocks()), (FileOffset::MAX, 0));
}
