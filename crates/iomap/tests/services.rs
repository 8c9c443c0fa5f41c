//! Threads that read ahead and write back beside those who read and write.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{BLOCK, MemoryFs, at};
use ubtrfs_iomap::{AddressSpace, CacheOptions, PageCache, ServiceEnd};

const MIB: u64 = 1 << 20;

/// Waits for what a thread does in its own time. What never comes hangs, and the test's time limit tells.
fn wait_until(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Does `work` beside the services of a cache, which end behind it.
fn beside_services(cache: &PageCache, now_ms: &AtomicU64, work: impl FnOnce()) {
    let end = ServiceEnd::default();
    std::thread::scope(|scope| {
        scope.spawn(|| cache.serve_readahead(&end));
        scope.spawn(|| cache.serve_writeback(&end, || now_ms.load(Ordering::Relaxed)));
        // Also where the work fails, so that the threads end.
        struct Ends<'a>(&'a PageCache, &'a ServiceEnd);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.end_services(self.1);
            }
        }
        let _ends = Ends(cache, &end);
        work();
    });
}

#[test]
fn sequential_read_finds_what_the_service_read_before_it() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(CacheOptions::default());
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let file = space.open();
    let bytes: Vec<u8> = (0..16 * MIB).map(|at| u8::try_from(at / BLOCK % 251).unwrap()).collect();
    file.write(at(0), &bytes).unwrap();
    file.fsync().unwrap();
    cache.shrink_clean(u64::MAX);
    assert_eq!(cache.cached_bytes(), 0);
    beside_services(&cache, &AtomicU64::new(0), || {
        let mut buffer = vec![0; 64 * 1024];
        let mut done = 0;
        for step in 0..256 {
            let from = usize::try_from(step * 65_536).unwrap();
            assert_eq!(file.read(at(step * 65_536), &mut buffer), Ok(65_536));
            assert_eq!(buffer, bytes[from..from + 65_536]);
            done += 65_536;
            if done == 2 * MIB {
                // Nobody reads, and more comes.
                wait_until(|| cache.cached_bytes() >= done + MIB / 4);
            }
        }
    });
    // Each byte came once, whoever asked for it.
    assert_eq!(fs.bytes_read.load(Ordering::Relaxed), 16 * MIB);
}

/// All is in memory but for the holes, which nobody reads: there is nothing to do, and nobody is asked to.
#[test]
fn service_has_no_work_where_what_is_read_is_in_memory() {
    let fs = MemoryFs::new();
    let cache = PageCache::new(CacheOptions::default());
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let file = space.open();
    for block in 0..2000 {
        file.write(at(block * 2 * BLOCK), &[7; 4096]).unwrap();
    }
    file.fsync().unwrap();
    beside_services(&cache, &AtomicU64::new(0), || {
        let maps = fs.map_count.load(Ordering::Relaxed);
        let mut buffer = [0; 4096];
        for block in 0..2000 {
            assert_eq!(file.read(at(block * 2 * BLOCK), &mut buffer), Ok(4096));
            assert_eq!(buffer, [7; 4096]);
        }
        assert_eq!(fs.map_count.load(Ordering::Relaxed), maps);
    });
    assert_eq!(cache.cached_bytes(), 2000 * BLOCK);
    assert_eq!(fs.bytes_read.load(Ordering::Relaxed), 0);
}

#[test]
fn service_writes_back_what_is_too_much_and_what_is_old() {
    let fs = MemoryFs::new();
    let options = CacheOptions {
        dirty_bytes_background: MIB,
        dirty_age_max_ms: 30_000,
        ..CacheOptions::default()
    };
    let cache = PageCache::new(options);
    let space = AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache));
    let file = space.open();
    let now_ms = AtomicU64::new(1000);
    beside_services(&cache, &now_ms, || {
        file.write(at(0), &vec![1; 2 << 20]).unwrap();
        wait_until(|| cache.dirty_bytes() <= MIB);
        file.write(at(8 * MIB), &[2; 4096]).unwrap();
        now_ms.store(40_000, Ordering::Relaxed);
        wait_until(|| cache.dirty_bytes() == 0);
    });
    assert_eq!(fs.reserved_blocks(), 0);
}

/// Writers that wait because too much is dirty go on as soon as it is less, not only when the service is done.
#[test]
fn writers_beside_the_service_end_and_lose_nothing() {
    let fs = MemoryFs::new();
    let options = CacheOptions {
        dirty_bytes_max: MIB,
        dirty_bytes_background: MIB / 2,
        writeback_bytes_max: MIB / 4,
        ..CacheOptions::default()
    };
    let cache = PageCache::new(options);
    let spaces: Vec<_> = (0..2)
        .map(|_| AddressSpace::new(Arc::clone(&fs), Arc::default(), at(0), Arc::clone(&cache)))
        .collect();
    beside_services(&cache, &AtomicU64::new(0), || {
        std::thread::scope(|scope| {
            for (number, space) in (1..).zip(&spaces) {
                scope.spawn(move || {
                    let file = space.open();
                    for step in 0..200 {
                        file.write(at(step * 100_000), &vec![number; 100_000]).unwrap();
                    }
                    file.fsync().unwrap();
                });
            }
        });
    });
    cache.shrink_clean(u64::MAX);
    for (number, space) in (1..).zip(&spaces) {
        let mut bytes = vec![0; 20_000_000];
        assert_eq!(space.open().read(at(0), &mut bytes), Ok(20_000_000));
        assert!(bytes.iter().all(|byte| *byte == number));
    }
}
