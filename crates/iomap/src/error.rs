//! What can be wrong with a request, before the filesystem is asked.

use crate::offset::{FileOffset, FileRange};

/// Why a request was refused here. What the filesystem itself says passes through unchanged.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// Where Linux looks at the numbers before anything else: an offset or length that is negative as a system call takes it, a range of no
    /// length that is to have space or none, a read or write that reaches beyond [`FileOffset::MAX`] (EINVAL).
    #[error("{len_bytes} bytes at {offset} are no range of a file")]
    Invalid {
        /// Where it begins.
        offset: FileOffset,
        /// How long it is.
        len_bytes: u64,
    },
    /// The range reaches beyond [`FileOffset::MAX`] (EFBIG).
    #[error("{len_bytes} bytes at {offset} reach beyond what a file can hold")]
    TooLarge {
        /// Where it begins.
        offset: FileOffset,
        /// How long it is.
        len_bytes: u64,
    },
    /// A file is mapped in whole blocks (EINVAL).
    #[error("{len_bytes} bytes at {offset} are not whole blocks of {block_bytes} bytes")]
    Unaligned {
        /// Where it begins.
        offset: FileOffset,
        /// How long it is.
        len_bytes: u64,
        /// What both must be multiples of.
        block_bytes: u64,
    },
    /// There is no data, or no file, at or after the offset (ENXIO).
    #[error("no data at or after {offset}")]
    NoData {
        /// Where it was looked for.
        offset: FileOffset,
    },
    /// A mapped page lies wholly beyond the end of the file (SIGBUS).
    #[error("the page at {offset} lies beyond the end of the file at {size}")]
    BeyondEnd {
        /// The access.
        offset: FileOffset,
        /// The file's end.
        size: FileOffset,
    },
    /// The filesystem's answer does not hold what was asked for: a mistake in it.
    #[error("asked for {asked}, the filesystem mapped {mapped}")]
    BadMapping {
        /// What was asked for.
        asked: FileRange,
        /// What came.
        mapped: FileRange,
    },
}
