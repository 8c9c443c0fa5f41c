//! What an inode's bytes are: extents, checksums, compression.

pub mod compression;
