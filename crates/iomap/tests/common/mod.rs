//! The filesystem in memory, and what else several test files use.
#![allow(dead_code, unused_imports, reason = "each test file uses a part of it")]

use std::sync::Arc;

use ubtrfs_iomap::{AddressSpace, CacheOptions, FileOffset, OpenFile, PageCache};

pub use ubtrfs_testkit::io_suite::{contents, walk};
pub use ubtrfs_testkit::iomap_model::{BLOCK, Failure, MemoryFs, MemoryInode, at, blocks, range};

/// A file of its own, with a cache of its own.
pub fn new_file(fs: &Arc<MemoryFs>, options: CacheOptions) -> Arc<AddressSpace<MemoryFs>> {
    let cache = PageCache::new(options);
    AddressSpace::new(Arc::clone(fs), Arc::default(), FileOffset::ZERO, cache)
}
