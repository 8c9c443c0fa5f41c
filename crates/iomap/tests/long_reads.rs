//! Files that memory cannot keep, read from their beginning to their end: what stays of them, and what of others.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{BLOCK, MemoryFs, at, new_file};
use ubtrfs_iomap::{AddressSpace, CacheOptions, OpenFile, PageCache};

const MIB: u64 = 1 << 20;

/// What is read through a file that memory cannot keep goes past memory when the reads have gone on for a window, or from there at once when
/// they have for half of what memory holds; what is dirty in it is seen, and other files stay in memory.
#[test]
fn long_sequential_reads_leave_memory_to_others() {
    let half = MIB / 2;
    let never = u64::MAX;
    for (straight_bytes_min, read) in
        [(0, half), (MIB / 8, half), (never, half), (never, BLOCK), (never, 5000)]
    {
        let fs = MemoryFs::new();
        let options = CacheOptions {
            cached_bytes_max: 4 * MIB,
            readahead_bytes_max: MIB / 4,
            straight_bytes_min,
            ..CacheOptions::default()
        };
        let cache = PageCache::new(options);
        let new = || AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
        let (long, short) = (new(), new());
        let file = long.open();
        let bytes: Vec<u8> = (0..16 * MIB + 100).map(|place| (place / 1000 % 251) as u8).collect();
        file.write(at(0), &bytes).unwrap();
        file.fsync().unwrap();
        cache.shrink_clean(u64::MAX);
        short.open().write(at(0), &[7; 1 << 19]).unwrap();
        short.open().fsync().unwrap();
        // Dirty in the middle, in blocks and in bytes.
        let mut expected = bytes;
        for place in [9 * MIB + 3, 11 * MIB] {
            file.write(at(place), &[255; 4096]).unwrap();
            let from = usize::try_from(place).unwrap();
            expected[from..from + 4096].fill(255);
        }
        let reads = || fs.read_count.swap(0, Ordering::Relaxed);
        reads();
        assert!(
            read_through(&long, read) == expected,
            "straight from {straight_bytes_min} bytes on"
        );
        let read_count = reads();
        assert!(read_count <= 128, "{read_count} requests by {read} bytes");
        assert_eq!(short.open().read(at(0), &mut vec![0; 1 << 19]), Ok(1 << 19));
        assert_eq!(reads(), 0, "straight from {straight_bytes_min} bytes on, by {read}");
        assert!(cache.cached_bytes() <= 4 * MIB, "{}", cache.cached_bytes());
    }
}

/// Who goes through a file takes nothing from those who wanted just what they read, nor what is dirty, and may come back a little.
#[test]
fn who_goes_through_a_file_leaves_in_memory_what_others_read_and_wrote() {
    let fs = MemoryFs::new();
    let options = CacheOptions {
        cached_bytes_max: 4 * MIB,
        readahead_bytes_max: MIB / 4,
        ..CacheOptions::default()
    };
    let cache = PageCache::new(options);
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let file = space.open();
    let mut bytes: Vec<u8> = (0..16 * MIB).map(|place| (place / 1000 % 251) as u8).collect();
    file.write(at(0), &bytes).unwrap();
    file.fsync().unwrap();
    cache.shrink_clean(u64::MAX);
    // Here and there, in no order; and a block that is dirty, where one of them is.
    let places: Vec<u64> = (0..64).map(|number| (number * 37 % 64 + 10) * 50 * BLOCK).collect();
    let look = |bytes: &[u8]| {
        for place in &places {
            let mut block = [0; 4096];
            file.read(at(*place), &mut block).unwrap();
            let from = usize::try_from(*place).unwrap();
            assert!(block == bytes[from..from + 4096]);
        }
    };
    look(&bytes);
    let (dirty, dirty_from) = (places[5], usize::try_from(places[5]).unwrap());
    file.write(at(dirty), &[9; 4096]).unwrap();
    bytes[dirty_from..dirty_from + 4096].fill(9);
    let kept_bytes = cache.cached_bytes();
    assert!(read_through(&space, BLOCK) == bytes);
    assert_eq!(cache.dirty_bytes(), BLOCK);
    // Beside them the first half of what memory holds, what is left behind, and what lies ahead.
    assert!(cache.cached_bytes() < kept_bytes + 3 * MIB, "{} bytes", cache.cached_bytes());
    let reads = || fs.read_count.swap(0, Ordering::Relaxed);
    reads();
    look(&bytes);
    file.read(at(16 * MIB - MIB / 8), &mut [0; 4096]).unwrap();
    assert_eq!(reads(), 0);
    // What nobody wanted but him is gone.
    file.read(at(14 * MIB), &mut [0; 4096]).unwrap();
    assert_eq!(reads(), 1);
}

/// Who copies a file with holes leaves them out: what lies in between goes, too.
#[test]
fn who_goes_through_a_file_with_gaps_leaves_memory_to_others() {
    let (_, space) = long_file();
    let cache = space.cache();
    let reader = space.open();
    for number in 0..16 * MIB / (5 * BLOCK) {
        assert_eq!(reader.read(at(number * 5 * BLOCK), &mut [0; 4096]), Ok(4096));
    }
    // The first half of what memory holds, 256 KiB behind the last read, and what lies ahead of it.
    assert!(cache.cached_bytes() < 3 * MIB, "{} bytes", cache.cached_bytes());
}

/// A part of a file that memory cannot keep is read again and again: it is shorter than half of what memory holds, and stays.
#[test]
fn part_of_a_long_file_that_is_read_again_stays_in_memory() {
    let (fs, space) = long_file();
    let file = space.open();
    let reads = || fs.read_count.swap(0, Ordering::Relaxed);
    let read = || {
        for place in (5 * MIB..6 * MIB + MIB / 2).step_by(4096) {
            assert_eq!(file.read(at(place), &mut [0; 4096]), Ok(4096));
        }
        reads()
    };
    assert!(read() > 0);
    assert_eq!([read(), read()], [0, 0]);
}

/// Who reads a file behind somebody else finds in memory what that one read.
#[test]
fn who_reads_a_long_file_behind_another_finds_it_in_memory() {
    let (fs, space) = long_file();
    let (first, second) = (space.open(), space.open());
    let read = |file: &OpenFile<MemoryFs>, place| {
        assert_eq!(file.read(at(place), &mut [0; 4096]), Ok(4096));
    };
    fs.read_count.store(0, Ordering::Relaxed);
    for place in (0..16 * MIB).step_by(4096) {
        read(&first, place);
        if let Some(behind) = place.checked_sub(MIB) {
            read(&second, behind);
        }
    }
    let read_count = fs.read_count.load(Ordering::Relaxed);
    assert!(read_count < 16 * MIB / (MIB / 4) + 8, "{read_count} requests");
}

/// A file of 16 MiB, of which memory keeps 4, and nothing at first.
fn long_file() -> (Arc<MemoryFs>, Arc<AddressSpace<MemoryFs>>) {
    let fs = MemoryFs::new();
    let options = CacheOptions {
        cached_bytes_max: 4 * MIB,
        readahead_bytes_max: MIB / 4,
        ..CacheOptions::default()
    };
    let space = new_file(&fs, options);
    space.open().write(at(0), &vec![1; 16 << 20]).unwrap();
    space.open().fsync().unwrap();
    space.cache().shrink_clean(u64::MAX);
    (fs, space)
}

/// All of a file, read from its beginning by so many bytes.
fn read_through(space: &Arc<AddressSpace<MemoryFs>>, len_bytes: u64) -> Vec<u8> {
    let reader = space.open();
    let mut seen = Vec::new();
    let mut buffer = vec![0; usize::try_from(len_bytes).unwrap()];
    loop {
        let len = reader.read(at(seen.len() as u64), &mut buffer).unwrap();
        seen.extend_from_slice(&buffer[..len]);
        if len == 0 {
            return seen;
        }
    }
}
