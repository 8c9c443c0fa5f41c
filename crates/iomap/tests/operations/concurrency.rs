//! Threads at the same file, of which one is at a certain place when another comes. What they do at random is in the suite.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::{BLOCK, Failure, MemoryFs, at, contents, new_file, range};
use ubtrfs_iomap::{CacheOptions, FileRange};

/// What an fsync promised is stored, whatever other threads do.
#[test]
fn fsync_beside_writers_stores_what_was_written_before() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = space.open();
            let mut value = 0_u8;
            while !stop.load(Ordering::Relaxed) {
                value = value.wrapping_add(1);
                file.write(at(0), &[value; 8192]).unwrap();
            }
        });
        let file = space.open();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 0..300_u64 {
                let value = u8::try_from(round % 256).unwrap();
                file.write(at((round + 2) * BLOCK), &[value; 4096]).unwrap();
                file.fsync().unwrap();
                let stored = fs.stored(space.inode(), (round + 3) * BLOCK);
                assert!(stored[stored.len() - 4096..].iter().all(|byte| *byte == value));
                let first = stored[..8192].iter().all(|byte| *byte == stored[0]);
                assert!(first, "a write was stored in part");
            }
        }));
        stop.store(true, Ordering::Relaxed);
        result.unwrap();
    });
}

/// A block is written again while its older version is on its way. The fsync behind that waits, and then brings the new version
/// down, too.
#[test]
fn fsync_of_a_block_whose_older_version_is_on_its_way_stores_the_new_one() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 4096]).unwrap();
    let is_on_its_way = Arc::new(AtomicBool::new(false));
    let is_written_again = Arc::new(AtomicBool::new(false));
    let (on_its_way, written_again) = (Arc::clone(&is_on_its_way), Arc::clone(&is_written_again));
    fs.before_mapping(move || {
        if !on_its_way.swap(true, Ordering::SeqCst) {
            while !written_again.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            // Long enough for the fsync to get here, most often.
            for _ in 0..1000 {
                std::thread::yield_now();
            }
        }
    });
    std::thread::scope(|scope| {
        scope.spawn(|| space.flush(FileRange::from(at(0))).unwrap());
        while !is_on_its_way.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        file.write(at(0), &[2; 4096]).unwrap();
        is_written_again.store(true, Ordering::SeqCst);
        file.fsync().unwrap();
        assert!(fs.stored(space.inode(), 4096) == vec![2; 4096]);
    });
}

/// Truncation, too, waits for what is on its way beyond the new end: else the filesystem would map it after it dropped the
/// range.
#[test]
fn truncate_waits_for_what_is_on_its_way() {
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    let file = space.open();
    file.write(at(0), &[1; 8192]).unwrap();
    let (begun, weak) = (Arc::new(AtomicBool::new(false)), Arc::downgrade(&space));
    let has_begun = Arc::clone(&begun);
    fs.before_mapping(move || {
        has_begun.store(true, Ordering::SeqCst);
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        assert_eq!(weak.upgrade().unwrap().size(), at(8192), "cut while a write was on its way");
    });
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| space.flush(FileRange::from(at(0))).unwrap());
        while !begun.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        file.truncate(at(4096)).unwrap();
        flush.join().unwrap();
    });
    assert_eq!(fs.used_blocks(), 1);
    file.truncate(at(8192)).unwrap();
    assert!(contents(&file)[4096..].iter().all(|byte| *byte == 0));
}

/// A cut within blocks that are on their way. What arrives behind it is from before the cut, and who says where the file ends on the medium took
/// it for the file's. Where the file grows again at once, and nothing was on the medium yet, the block came there with what had been cut off,
/// and the file ended behind that.
#[test]
fn file_cut_off_within_what_is_on_its_way_has_nothing_behind_the_cut_on_the_medium() {
    for (written, cut, grown) in
        [(8192, 5000, 5000), (4096, 100, 3000), (4096, 100, 8192), (8192, 5000, 4096)]
    {
        let fs = MemoryFs::new();
        let space = new_file(&fs, CacheOptions::default());
        space.inode().note_space(&space);
        let file = space.open();
        file.write(at(0), &vec![1; written]).unwrap();
        let (started, first) = (Arc::new(AtomicBool::new(false)), AtomicBool::new(true));
        let has_started = Arc::clone(&started);
        fs.before_mapping(move || {
            if first.swap(false, Ordering::SeqCst) {
                has_started.store(true, Ordering::SeqCst);
                // So long that who does not wait for it is done.
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
        });
        std::thread::scope(|scope| {
            let flushed = scope.spawn(|| space.flush(range(0, 8192)));
            while !started.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            file.truncate(at(cut)).unwrap();
            file.truncate(at(grown)).unwrap();
            flushed.join().unwrap().unwrap();
        });
        let is_stale = |bytes: &[u8]| bytes.iter().skip(cut as usize).any(|byte| *byte != 0);
        fs.commit(space.inode());
        assert!(!is_stale(&fs.durable(space.inode())), "{cut}, grown to {grown}");
        file.fsync().unwrap();
        let durable = fs.durable(space.inode());
        assert_eq!(durable.len() as u64, grown);
        assert!(!is_stale(&durable), "{cut}, grown to {grown}, synced");
        assert!(durable.iter().take(cut as usize).all(|byte| *byte == 1));
        assert_eq!((file.size(), MemoryFs::stored_size(space.inode())), (at(grown), grown));
        let stored = fs.stored(space.inode(), grown.next_multiple_of(4096));
        assert!(!is_stale(&stored), "behind the end");
    }
}

/// A cut that the filesystem refuses, beside an fsync that saw the end before it: what was written back meanwhile had said on the medium that the
/// file ends where it was to be cut, the fsync took it that who cuts says where it ends, and nobody did: it was short after a crash, and when it
/// was opened again, which nothing told.
#[test]
fn file_that_could_not_be_cut_ends_on_the_medium_where_it_did() {
    const SIZE: u64 = BLOCK + 100;
    let fs = MemoryFs::new();
    let options = CacheOptions { writeback_bytes_max: BLOCK, ..CacheOptions::default() };
    let space = new_file(&fs, options);
    space.inode().note_space(&space);
    let file = space.open();
    file.write(at(0), &[1; 4096]).unwrap();
    file.write(at(BLOCK), &[2; 100]).unwrap();
    let is_refused = Arc::new(AtomicBool::new(false));
    let (refused, weak) = (Arc::clone(&is_refused), Arc::downgrade(&space));
    fs.refuse_next_size(move || {
        weak.upgrade().unwrap().flush(range(BLOCK, 2 * BLOCK)).unwrap();
        refused.store(true, Ordering::SeqCst);
    });
    let (begun, first) = (Arc::new(AtomicBool::new(false)), AtomicBool::new(true));
    let has_begun = Arc::clone(&begun);
    fs.before_mapping(move || {
        if first.swap(false, Ordering::SeqCst) {
            has_begun.store(true, Ordering::SeqCst);
            while !is_refused.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        }
    });
    std::thread::scope(|scope| {
        let synced = scope.spawn(|| space.open().fsync());
        while !begun.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        assert_eq!(file.truncate(at(BLOCK + 20)), Err(Failure::NoSpace));
        synced.join().unwrap().unwrap();
    });
    assert_eq!(file.size(), at(SIZE));
    let durable = fs.durable(space.inode());
    assert_eq!(durable.len() as u64, SIZE, "an fsync promised it");
    assert!(durable[4096..][..20] == [2; 20]);
}

/// The same of an fsync that begins while the file is being cut, and so sees it shorter than it will ever have been.
#[test]
fn fsync_of_a_file_that_is_being_cut_in_vain_makes_all_of_it_durable() {
    const SIZE: u64 = BLOCK + 100;
    let fs = MemoryFs::new();
    let space = new_file(&fs, CacheOptions::default());
    space.inode().note_space(&space);
    let file = space.open();
    file.write(at(0), &[1; SIZE as usize]).unwrap();
    let syncing = Arc::new(Mutex::new(None));
    let (slot, weak, device) = (Arc::clone(&syncing), Arc::downgrade(&space), Arc::downgrade(&fs));
    fs.refuse_next_size(move || {
        let (space, fs) = (weak.upgrade().unwrap(), device.upgrade().unwrap());
        let other = space.open();
        *slot.lock().unwrap() = Some(std::thread::spawn(move || other.fsync()));
        while fs.durable(space.inode()).len() as u64 != BLOCK + 20 {
            std::thread::yield_now();
        }
    });
    assert_eq!(file.truncate(at(BLOCK + 20)), Err(Failure::NoSpace));
    let syncing = syncing.lock().unwrap().take().unwrap();
    syncing.join().unwrap().unwrap();
    assert_eq!(fs.durable(space.inode()).len() as u64, SIZE, "an fsync promised it");
}
