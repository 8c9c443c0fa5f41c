//! What an inode's bytes are: file extents, checksums, compression.
//!
//! Reading goes from a file offset through `file_extent` (which range is what) to `read` (the
//! bytes, decoded with [`compression`]) and `sectors` (what the medium has, verified with `csum`). Writing goes from bytes through
//! `prepare` (compressed and checksummed, on any thread) to `append` (placed).

pub(crate) mod append;
pub mod compression;
pub(crate) mod csum;
pub(crate) mod drop_range;
pub(crate) mod file_extent;
pub(crate) mod prealloc;
pub(crate) mod prepare;
pub(crate) mod read;
pub(crate) mod sectors;

pub use file_extent::{Mapping, MappingKind};
pub use prepare::{MAX_INLINE_BYTES_DEFAULT, PreparedData, WriteOptions};
