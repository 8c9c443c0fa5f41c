//! Long writes that go past memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::{Failure, MemoryFs, at};
use ubtrfs_iomap::{AddressSpace, CacheOptions, FileOffset, PageCache};

const MIB: u64 = 1 << 20;
const CHUNK: usize = 1 << 20;

fn options() -> CacheOptions {
    CacheOptions {
        cached_bytes_max: 4 * MIB,
        dirty_bytes_max: 2 * MIB,
        dirty_bytes_background: MIB,
        ..CacheOptions::default()
    }
}

fn chunk(number: u64) -> Vec<u8> {
    (0..CHUNK).map(|place| ((place as u64 / 1000 + number) % 251) as u8).collect()
}

/// A file that grows beyond what memory keeps is written past it, with its end through memory where that is inside a block, or takes the
/// place of its own beginning there; what other files have in memory stays there.
#[test]
fn long_appends_leave_memory_to_others() {
    for (straight_write_bytes_min, is_straight) in [(MIB, true), (u64::MAX, false)] {
        let fs = MemoryFs::new();
        let cache = PageCache::new(CacheOptions { straight_write_bytes_min, ..options() });
        let new = || AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
        let (long, short) = (new(), new());
        let file = long.open();
        let mut expected = Vec::new();
        for number in 0..16 {
            if number == 5 {
                short.open().write(at(0), &[7; 4096]).unwrap();
                short.open().fsync().unwrap();
            }
            let mut bytes = chunk(number);
            if number == 15 {
                bytes.extend_from_slice(&[9; 100]);
            }
            assert_eq!(file.write(at(number * MIB), &bytes), Ok(bytes.len()));
            expected.extend_from_slice(&bytes);
            assert_eq!(file.size(), at(expected.len() as u64));
            if is_straight && number >= 4 {
                // On the device when the call returns.
                let place = usize::try_from(number * MIB).unwrap();
                let stored = fs.stored(long.inode(), (number + 1) * MIB);
                assert!(stored[place..] == expected[place..place + CHUNK]);
            }
        }
        let reads = || fs.read_count.swap(0, Ordering::Relaxed);
        reads();
        assert_eq!(short.open().read(at(0), &mut [0; 4096]), Ok(4096));
        assert_eq!(reads(), 0, "straight from {straight_write_bytes_min} bytes on");
        // In pieces, over what was written and beyond it.
        for (place, len) in [(5 * MIB + 3, 5000), (16 * MIB + 50, 3 * CHUNK)] {
            let from = usize::try_from(place).unwrap();
            assert_eq!(file.write(at(place), &vec![255; len]), Ok(len));
            expected.resize(expected.len().max(from + len), 0);
            expected[from..from + len].fill(255);
        }
        let mut seen = vec![0; expected.len() + 1];
        assert_eq!(file.read(at(0), &mut seen), Ok(expected.len()));
        assert!(seen[..expected.len()] == expected);
        file.fsync().unwrap();
        let stored = fs.stored(long.inode(), expected.len() as u64);
        assert!(stored[..expected.len()] == expected);
        assert_eq!((cache.dirty_bytes(), fs.reserved_blocks()), (0, 0));
    }
}

/// A short file stays in memory, however long its writes.
#[test]
fn short_file_stays_in_memory() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(options());
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), cache);
    let file = space.open();
    for number in 0..3 {
        file.write(at(number * MIB), &chunk(number)).unwrap();
    }
    file.fsync().unwrap();
    fs.read_count.store(0, Ordering::Relaxed);
    assert_eq!(file.read(at(0), &mut vec![0; 3 * CHUNK]), Ok(3 * CHUNK));
    assert_eq!(fs.read_count.load(Ordering::Relaxed), 0);
}

/// Where others write back beside, they get what may be dirty without a background pass, and only what comes then goes straight.
#[test]
fn writer_beside_others_gives_them_their_share_first() {
    let fs = MemoryFs::new();
    fs.writes_beside.store(true, Ordering::Relaxed);
    let cache = PageCache::new(CacheOptions { dirty_bytes_max: 3 * MIB, ..options() });
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let file = space.open();
    let straight = || fs.straight_count.load(Ordering::Relaxed);
    let dirty_mib = || cache.dirty_bytes() / MIB;
    for number in 0..4 {
        file.write(at(number * MIB), &chunk(number)).unwrap();
    }
    // What is short is kept.
    assert_eq!(straight(), 0);
    file.fsync().unwrap();
    // Of six, two are more than the background lets be; of the next two none goes to memory.
    let six: Vec<u8> = (4..10).flat_map(chunk).collect();
    assert_eq!(file.write(at(4 * MIB), &six), Ok(six.len()));
    assert_eq!((straight(), dirty_mib()), (4, 2));
    let stored = fs.stored(space.inode(), 10 * MIB);
    assert!(stored[6 * CHUNK..] == six[2 * CHUNK..]);
    let two: Vec<u8> = (10..12).flat_map(chunk).collect();
    assert_eq!(file.write(at(10 * MIB), &two), Ok(two.len()));
    assert_eq!((straight(), dirty_mib()), (6, 2));
    // When they have come on, it is their turn again; what is no whole MiB is always theirs.
    cache.background_pass(0);
    assert_eq!(cache.dirty_bytes(), 0);
    let mut last: Vec<u8> = (12..14).flat_map(chunk).collect();
    last.extend_from_slice(&[9; 5000]);
    assert_eq!(file.write(at(12 * MIB), &last), Ok(last.len()));
    assert_eq!((straight(), cache.dirty_bytes()), (6, 2 * MIB + 2 * 4096));
    let expected: Vec<u8> = (0..14).flat_map(chunk).chain([9; 5000]).collect();
    let mut seen = vec![0; expected.len() + 1];
    assert_eq!(file.read(at(0), &mut seen), Ok(expected.len()));
    assert!(seen[..expected.len()] == expected);
    file.fsync().unwrap();
    let stored = fs.stored(space.inode(), expected.len() as u64);
    assert!(stored[..expected.len()] == expected);
    assert_eq!((cache.dirty_bytes(), fs.reserved_blocks()), (0, 0));
}

/// A long write to the last byte that a file can have, which is inside a block: it is all written, or what is not is not told of as written.
#[test]
fn writer_beside_others_reaches_the_end_of_the_largest_file() {
    for dirty_bytes_background in [0, MIB, 64 * MIB] {
        let fs = MemoryFs::new();
        fs.writes_beside.store(true, Ordering::Relaxed);
        let cache = PageCache::new(CacheOptions { dirty_bytes_background, ..options() });
        let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), cache);
        let file = space.open();
        let start = FileOffset::MAX.bytes() + 1 - 3 * MIB;
        file.truncate(at(start)).unwrap();
        let bytes: Vec<u8> = (0..3).flat_map(chunk).take(3 * CHUNK - 1).collect();
        assert_eq!(file.write(at(start), &bytes), Ok(bytes.len()));
        assert_eq!(file.size(), FileOffset::MAX);
        assert!(file.append(&[1]).is_err());
        let mut seen = vec![0; bytes.len()];
        assert_eq!(file.read(at(start), &mut seen), Ok(bytes.len()));
        assert!(seen == bytes);
        file.fsync().unwrap();
    }
}

/// The device fails: the writer may not be told at once, but by fsync, and what was there before is not touched.
#[test]
fn straight_write_that_fails_is_told_of_by_fsync() {
    [false, true].into_iter().for_each(fail_straight_write);
}

fn fail_straight_write(writes_beside: bool) {
    let fs = MemoryFs::new();
    fs.writes_beside.store(writes_beside, Ordering::Relaxed);
    let cache = PageCache::new(options());
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let file = space.open();
    for number in 0..6 {
        file.write(at(number * MIB), &chunk(number)).unwrap();
    }
    file.fsync().unwrap();
    fs.writes_left.store(0, Ordering::Relaxed);
    let told_at_once = file.write(at(6 * MIB), &chunk(6)).is_err();
    let told_by_fsync = file.fsync().is_err();
    assert!(told_at_once || told_by_fsync);
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    let expected: Vec<u8> = (0..6).flat_map(chunk).collect();
    assert!(fs.stored(space.inode(), 6 * MIB) == expected);
    // And on it goes.
    file.truncate(at(6 * MIB)).unwrap();
    file.write(at(6 * MIB), &chunk(6)).unwrap();
    file.fsync().unwrap();
    assert!(fs.stored(space.inode(), 7 * MIB)[6 * CHUNK..] == chunk(6));
}

/// There is no space for all of it: what there is space for is written.
#[test]
fn straight_write_without_space_is_short_then_refused() {
    [false, true].into_iter().for_each(fill_by_straight_writes);
}

fn fill_by_straight_writes(writes_beside: bool) {
    let fs = MemoryFs::with_capacity(6 * 256);
    fs.writes_beside.store(writes_beside, Ordering::Relaxed);
    let cache = PageCache::new(options());
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), cache);
    let file = space.open();
    for number in 0..5 {
        file.write(at(number * MIB), &chunk(number)).unwrap();
    }
    // One more fits; the model refuses a run that does not fit as a whole.
    let two: Vec<u8> = (5..7).flat_map(chunk).collect();
    let written = file.write(at(5 * MIB), &two);
    assert!(
        matches!(written, Ok(len) if len <= CHUNK) || written == Err(Failure::NoSpace),
        "{written:?}"
    );
    let end = 5 * MIB + written.unwrap_or(0) as u64;
    assert_eq!(file.size(), at(end));
    file.fsync().unwrap();
    let expected: Vec<u8> = (0..7).flat_map(chunk).take(usize::try_from(end).unwrap()).collect();
    assert!(fs.stored(space.inode(), end) == expected);
    assert_eq!(fs.reserved_blocks(), 0);
}
