//! What can be wrong with a request, before the filesystem is asked.

use crate::offset::{FileOffset, FileRange};

/// Why a request was refused here. What the filesystem itself says passes through unchanged.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The range reaches beyond [`FileOffset::MAX`] (EFBIG; EINVAL where Linux says that).
    #[error("{len_bytes} bytes at {offset} reach beyond what a file can hold")]
    TooLarge {
        /// Where it begins.
        offset: FileOffset,
        /// How long it is.
        len_bytes: u64,
    },
    /// Direct I/O works on whole blocks (EINVAL).
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
