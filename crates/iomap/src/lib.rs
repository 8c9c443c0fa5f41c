//! File I/O that knows no filesystem.
//!
//! A filesystem says what a range of a file is (a mapping) and does the I/O for it; everything above that is
//! here once for all filesystems. What lies below the seam, device addresses, checksums, compression,
//! mirrors, is never seen here.
//!
//! # How a filesystem plugs in
//!
//! It implements [`FileSystem`], has a [`MappingSequence`] in what it keeps of each file, and changes mappings under an extent
//! lock of that file. A file that is read or written has one [`AddressSpace`]; each open file is an [`OpenFile`] of it, on which
//! all operations are. All files share a [`PageCache`].
//!
//! - Its own operations that give blocks other contents (a clone into a file, moving extents in it) go through
//!   [`AddressSpace::replace_range()`]; before one that reads a file below the page cache (a clone from it) comes
//!   [`AddressSpace::flush()`]. What only makes holes unwritten space needs neither, but is better asked for by
//!   [`OpenFile::allocate()`]. What moves data of a file without changing it goes through [`AddressSpace::change_flushed()`]
//!   (deduplication), or only counts up the sequence (balance).
//! - Threads of its own are in [`PageCache::serve_writeback()`] and [`PageCache::serve_readahead()`], or its main loop calls
//!   [`PageCache::background_pass()`]. Reservations that need space call [`PageCache::shrink_dirty()`].
//! - A deleted file is dropped from memory by [`AddressSpace::replace_range()`] of all of it with a change that does nothing.
//! - A dirty file stays in memory until it is written, also when nobody else refers to it any more, and keeps the cache with
//!   it: whoever closes a filesystem first calls [`PageCache::shrink_dirty()`] for all there is, or, to lose it,
//!   [`PageCache::forget_dirty()`].
#![forbid(unsafe_code)]

mod address_space;
mod allocate;
mod buffered_read;
mod buffered_write;
mod direct;
mod error;
#[cfg(all(test, ubtrfs_explore))]
mod explore;
pub mod extent_state;
mod fiemap;
mod iter;
mod mapped;
mod mapping;
mod offset;
mod page_cache;
mod range_tree;
mod replace;
mod report;
mod seek;
mod seek_window;
mod straight_read;
mod straight_write;
mod truncate;
mod unshare;
mod writeback;
mod zero_range;

pub use address_space::{AddressSpace, OpenFile, Reach, SeenEnd};
pub use error::Error;
pub use fiemap::{FiemapExtent, FiemapFlags, FiemapSync};
pub use mapped::MappedRange;
pub use mapping::{
    BATCH_RUNS_MAX, Beyond, Cookie, Detail, DirtyBatch, Fate, FileSystem, Mapping, MappingFlags,
    MappingKind, MappingSequence, Purpose, ReadPiece, RunFailure, StraightWrites, WritebackRun,
};
pub use offset::{FileOffset, FileRange};
pub use page_cache::{
    CacheAblation, CacheCounts, CacheOptions, ErrorMark, LostData, PageCache, ServiceEnd,
};
