//! What an inode's bytes are: file extents, checksums, compression.
//!
//! Reading goes from a file offset through [`file_extent`] (which range is what) to [`read`] (the
//! bytes, verified with [`csum`] and decoded with [`compression`]).

pub mod compression;
pub(crate) mod csum;
pub(crate) mod file_extent;
pub(crate) mod read;

pub use file_extent::{Mapping, MappingKind};
