//! A block in which a file ends and that cannot be written is nothing to who uses what lies before it: that is on the medium, or may go there, and
//! shows nothing of what was cut off.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::{BLOCK, Failure, MemoryFs, at, new_file};
use ubtrfs_iomap::{CacheOptions, OpenFile};

const KEPT: u64 = 3000;

fn little_memory() -> CacheOptions {
    CacheOptions {
        cached_bytes_max: 16 * BLOCK,
        dirty_bytes_max: 4 * BLOCK,
        dirty_bytes_background: 2 * BLOCK,
        ..CacheOptions::default()
    }
}

/// A file of so many whole blocks on the medium and one more of which all but [`KEPT`] bytes were cut off, in memory: writing it has failed, and
/// each further write does.
fn file_with_failed_tail(
    fs: &Arc<MemoryFs>,
    blocks: u64,
    options: CacheOptions,
) -> OpenFile<MemoryFs> {
    let file = new_file(fs, options).open();
    for block in 0..=blocks {
        file.write(at(block * BLOCK), &[1; 4096]).unwrap();
    }
    file.fsync().unwrap();
    file.truncate(at(blocks * BLOCK + KEPT)).unwrap();
    fs.writes_left.store(0, Ordering::Relaxed);
    assert_eq!(file.fsync(), Err(Failure::Io));
    file
}

/// Nothing of what is asked for is dirty, and no write is needed.
#[test]
fn what_is_clean_before_a_block_that_cannot_be_written_is_used() {
    let fs = MemoryFs::new();
    let file = file_with_failed_tail(&fs, 4, CacheOptions::default());
    let mut buffer = [9; 4096];
    assert_eq!(file.direct_read(at(0), &mut buffer), Ok(4096));
    assert_eq!(buffer, [1; 4096]);
    assert_eq!(file.punch_hole(at(BLOCK), BLOCK), Ok(()));
}

/// Writes that reach no further than the medium does fill memory, up to the length of the file, whatever the budget.
#[test]
fn memory_does_not_fill_before_a_block_that_cannot_be_written() {
    let fs = MemoryFs::new();
    let file = file_with_failed_tail(&fs, 64, little_memory());
    for block in 0..64 {
        // It may be refused, or be lost as writing it back fails.
        let _ = file.write(at(block * BLOCK), &[2; 4096]);
    }
    let cached_bytes = file.space().cache().cached_bytes();
    assert!(cached_bytes <= 32 * BLOCK, "{} blocks are in memory", cached_bytes / BLOCK);
    let dirty_bytes = file.space().cache().dirty_bytes();
    assert!(dirty_bytes <= 8 * BLOCK, "{} blocks are dirty", dirty_bytes / BLOCK);
}

/// Who asks whether memory could be made clean is told of that block, too, once it can be written: he was told that nothing was.
#[test]
fn block_that_can_be_written_again_counts_as_written() {
    let fs = MemoryFs::new();
    let file = file_with_failed_tail(&fs, 1, CacheOptions::default());
    assert_eq!(file.space().cache().shrink_dirty(BLOCK), 0);
    fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(file.space().cache().shrink_dirty(BLOCK), BLOCK);
    assert_eq!(file.space().cache().dirty_bytes(), 0);
}

/// A single long write in the course of which that block is found to fail: it had been asked before the write only.
#[test]
fn one_long_write_does_not_fill_memory_behind_a_block_that_cannot_be_written() {
    let fs = MemoryFs::new();
    for straight_write_bytes_min in [u64::MAX, BLOCK] {
        let file =
            new_file(&fs, CacheOptions { straight_write_bytes_min, ..little_memory() }).open();
        file.write(at(0), &[1; 4096]).unwrap();
        file.fsync().unwrap();
        file.truncate(at(KEPT)).unwrap();
        fs.writes_left.store(0, Ordering::Relaxed);
        let written = file.write(at(2 * BLOCK), &[2; 512 * 4096]);
        let cached_bytes = file.space().cache().cached_bytes();
        assert!(cached_bytes <= 32 * BLOCK, "{} blocks are in memory", cached_bytes / BLOCK);
        assert!(written.is_ok_and(|len| len < 512 * 4096), "all of it was taken");
        fs.writes_left.store(u64::MAX, Ordering::Relaxed);
    }
}
