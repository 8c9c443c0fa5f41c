//! File I/O that knows no filesystem.
//!
//! A filesystem says what a range of a file is (a mapping) and does the I/O for it; everything above that is
//! here once for all filesystems. What lies below the seam, device addresses, checksums, compression,
//! mirrors, is never seen here.
#![forbid(unsafe_code)]

pub mod extent_state;
mod offset;
mod range_tree;

pub use offset::{FileOffset, FileRange};
