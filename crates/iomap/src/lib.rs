//! File I/O that knows no filesystem.
//!
//! A filesystem says what a range of a file is (a mapping) and does the I/O for it; everything above that is
//! here once for all filesystems. What lies below the seam, device addresses, checksums, compression,
//! mirrors, is never seen here.
#![forbid(unsafe_code)]

mod address_space;
mod buffered_read;
mod buffered_write;
mod direct;
mod error;
pub mod extent_state;
mod fiemap;
mod iter;
mod mapped;
mod mapping;
mod mapping_cache;
mod offset;
mod page_cache;
mod range_tree;
mod replace;
mod report;
mod seek;
mod truncate;
mod unshare;
mod writeback;
mod zero_range;

pub use address_space::{AddressSpace, OpenFile};
pub use error::Error;
pub use fiemap::{FiemapExtent, FiemapFlags, FiemapSync};
pub use mapped::MappedRange;
pub use mapping::{
    BATCH_RUNS_MAX, Cookie, DirtyBatch, FileSystem, Mapping, MappingFlags, MappingKind,
    MappingSequence, Purpose, RunFailure, WritebackRun,
};
pub use offset::{FileOffset, FileRange};
pub use page_cache::{CacheAblation, CacheOptions, PageCache};
