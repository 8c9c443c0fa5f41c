//! Zeroing that knows the page cache.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{BLOCK, MemoryFs, at, contents, new_file};
use ubtrfs_iomap::{
    AddressSpace, BATCH_RUNS_MAX, CacheAblation, CacheOptions, FileRange, OpenFile, PageCache,
    Reach,
};

/// Little enough that whatever is clean goes with the next read or write.
fn little_memory() -> CacheOptions {
    CacheOptions { cached_bytes_max: BLOCK, folio_bytes_max: BLOCK, ..CacheOptions::default() }
}

fn reopen(fs: &Arc<MemoryFs>, file: &OpenFile<MemoryFs>) -> OpenFile<MemoryFs> {
    file.fsync().unwrap();
    let inode = Arc::clone(file.space().inode());
    let cache = PageCache::new(CacheOptions::default());
    AddressSpace::new(Arc::clone(fs), inode, file.size(), cache).open()
}

/// What the posted patch gets wrong: between the mapping (unwritten) and the look at the page cache, the dirty block is written
/// back and its folio reclaimed. Absent then does not mean zero: the medium has data.
/// Whatever the filesystem and the options are: with its batch, where it gives none, and where the mechanism is off. Without a batch a mapping
/// was believed, long ago, when nothing was dirty or on its way behind it, though it was no longer true then.
#[test]
fn zeroing_while_block_is_written_back_and_reclaimed_zeroes_it() {
    for (ignores_batch, zero_without_batch) in [(0, false), (1, false), (0, true)] {
        let fs = MemoryFs::new();
        fs.ignores_batch.store(ignores_batch, Ordering::Relaxed);
        let ablation = CacheAblation { zero_without_batch, ..CacheAblation::default() };
        let cache = PageCache::new(CacheOptions { ablation, ..little_memory() });
        let new =
            |size| AddressSpace::new(Arc::clone(&fs), Arc::default(), at(size), Arc::clone(&cache));
        let (space, other) = (new(0), new(8 * BLOCK));
        let file = space.open();
        file.allocate(at(0), 32768, Reach::Stays).unwrap();
        file.write(at(0), &[1; 4096]).unwrap();
        file.truncate(at(8192)).unwrap();
        let (weak, armed) = (Arc::downgrade(&space), AtomicBool::new(true));
        fs.after_map(move || {
            if let Some(space) = weak.upgrade()
                && armed.swap(false, Ordering::Relaxed)
            {
                space.flush(FileRange::from(at(0))).unwrap();
                // Needs memory, which only the now clean folio can give.
                other.open().read(at(0), &mut [0; 4096]).unwrap();
            }
        });
        // Reaches into a block that is not dirty, so that the mapping is asked for.
        file.zero_range(at(2048), 6144).unwrap();
        assert!(
            fs.write_count.load(Ordering::Relaxed) > 0 && fs.read_count.load(Ordering::Relaxed) > 0
        );
        let mut expected = vec![0; 8192];
        expected[..2048].fill(1);
        assert!(contents(&file) == expected, "{ignores_batch}, {zero_without_batch}");
        assert!(contents(&reopen(&fs, &file)) == expected);
    }
}

/// Experiment 5: a block is written, and the file cut to one byte less than its end. Nothing goes to the device for it.
#[test]
fn truncate_down_over_dirty_blocks_writes_nothing() {
    let writes = |zero_without_batch| {
        let fs = MemoryFs::new();
        let ablation = CacheAblation { zero_without_batch, ..CacheAblation::default() };
        let file = new_file(&fs, CacheOptions { ablation, ..CacheOptions::default() }).open();
        for round in 0..100 {
            file.write(at(round * BLOCK), &[7; 4096]).unwrap();
            file.truncate(at((round + 1) * BLOCK - 1)).unwrap();
        }
        let bytes = contents(&file);
        let is_right = |(at, byte): (usize, &u8)| *byte == if at % 4096 == 4095 { 0 } else { 7 };
        assert!(bytes.iter().enumerate().all(is_right));
        fs.write_count.load(Ordering::Relaxed)
    };
    assert_eq!(writes(false), 0);
    assert!(writes(true) >= 100, "the ablation shows what it was like before");
}

/// More dirty runs than a batch holds, over unwritten space and holes: the mapping is trimmed to the batch, and the next one begins
/// there.
#[test]
fn zero_range_over_more_dirty_runs_than_a_batch_holds_zeroes_all() {
    for ignores_batch in [0, 1] {
        let fs = MemoryFs::new();
        fs.ignores_batch.store(ignores_batch, Ordering::Relaxed);
        let space = new_file(&fs, CacheOptions::default());
        let file = space.open();
        let runs = u64::try_from(BATCH_RUNS_MAX).unwrap() * 3 + 5;
        file.allocate(at(0), runs * BLOCK, Reach::Stays).unwrap();
        for run in 0..runs {
            file.write(at(run * 2 * BLOCK), &[9; 4096]).unwrap();
        }
        file.zero_range(at(100), runs * 2 * BLOCK).unwrap();
        let write_count = fs.write_count.load(Ordering::Relaxed);
        assert_eq!(write_count > 0, ignores_batch == 1, "the batch spares {write_count} writes");
        let bytes = contents(&file);
        assert!(bytes[..100].iter().all(|byte| *byte == 9));
        assert!(bytes[100..].iter().all(|byte| *byte == 0));
        assert!(contents(&reopen(&fs, &file)) == bytes);
        assert_eq!(fs.reserved_blocks(), 0);
    }
}

#[test]
fn zero_range_over_hole_makes_no_data() {
    let fs = MemoryFs::new();
    let file = new_file(&fs, CacheOptions::default()).open();
    file.truncate(at(1 << 40)).unwrap();
    file.zero_range(at(10), 1 << 39).unwrap();
    file.fsync().unwrap();
    assert!(file.seek_data(at(0)).is_err());
    assert_eq!((fs.used_blocks(), fs.reserved_blocks()), (0, 0));
}
