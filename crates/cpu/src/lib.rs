//! Copies and checksums as the processor at hand makes them fast.
//!
//! Results are the same on each; only how they are had differs. What is told of processors was measured (docs/adr/0006-by-processor.md).
#![deny(unsafe_code)]

mod copy;
mod crc32c;
mod processor;

pub use copy::{copy, read_aligned};
pub use crc32c::crc32c_of_sectors;
