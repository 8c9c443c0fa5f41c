//! Why a call failed.

use ubtrfs_ondisk::{Corruption, Generation};
use ubtrfs_rt::Arc;

/// The result of an engine call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed. Nothing durable is lost by any of them.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What was asked for is not there.
    #[error("{what} not found")]
    NotFound {
        /// What was looked for.
        what: String,
    },
    /// The name is taken.
    #[error("{what} exists already")]
    Exists {
        /// What exists.
        what: String,
    },
    /// A directory was needed.
    #[error("{what} is not a directory")]
    NotDirectory {
        /// What is none.
        what: String,
    },
    /// Something other than a directory was needed.
    #[error("{what} is a directory")]
    IsDirectory {
        /// What is one.
        what: String,
    },
    /// The directory has entries.
    #[error("directory {what} is not empty")]
    NotEmpty {
        /// The directory.
        what: String,
    },
    /// A name, symlink target or xattr is longer than the format holds.
    #[error("{what} is too long: {have_bytes} bytes, at most {max_bytes} fit")]
    TooLong {
        /// What is too long.
        what: String,
        /// Its length.
        have_bytes: usize,
        /// The greatest length.
        max_bytes: usize,
    },
    /// An argument that no filesystem could take.
    #[error("invalid argument: {what}")]
    InvalidArgument {
        /// What is wrong with it.
        what: String,
    },
    /// What lies in one subvolume cannot be linked or moved into another.
    #[error("{what} lies in another subvolume")]
    OtherSubvolume {
        /// What was to be linked or moved.
        what: String,
    },
    /// A flag of the inode forbids it: immutable, or append only.
    #[error("{what} {flag}")]
    NotPermitted {
        /// The inode.
        what: String,
        /// What it is: "is immutable" or "can only be appended to".
        flag: &'static str,
    },
    /// A file has as many names as it can have.
    #[error("limit reached: {what}")]
    TooManyLinks {
        /// Which names.
        what: String,
    },
    /// A directory has names of one hash, which share an item, and no leaf has room for another of them.
    #[error("limit reached: {what}")]
    HashFull {
        /// Which names.
        what: String,
    },
    /// There is no room for another number, or in a transaction that cannot be committed just now.
    #[error("limit reached: {what}")]
    Limit {
        /// Which limit.
        what: String,
    },
    /// The filesystem is full.
    #[error("no space left for {what}: {needed_bytes} bytes needed, {available_bytes} available")]
    NoSpace {
        /// Data or metadata.
        what: &'static str,
        /// Bytes that the call needs.
        needed_bytes: u64,
        /// Bytes that there are.
        available_bytes: u64,
    },
    /// The filesystem, or the subvolume, cannot be written.
    #[error("read-only: {why}")]
    ReadOnly {
        /// Why.
        why: String,
    },
    /// The format or the call asks for what this version does not do.
    #[error("not supported: {what}")]
    Unsupported {
        /// What.
        what: String,
    },
    /// The medium holds what cannot be.
    #[error("damaged: {0}")]
    Corrupt(Box<Corruption>),
    /// A place in a file that cannot be, or is not there.
    #[error(transparent)]
    File(#[from] ubtrfs_iomap::Error),
    /// A device failed, or the volume refused.
    #[error(transparent)]
    Volume(Arc<ubtrfs_volume::Error>),
    /// A write or commit failed earlier; the filesystem takes no more changes until it is opened
    /// again, when it shows its last durable state.
    #[error(
        "the filesystem stopped at transaction {generation} and takes no more changes: {first_cause}"
    )]
    Aborted {
        /// The transaction that failed.
        generation: Generation,
        /// What went wrong first.
        first_cause: Arc<Error>,
    },
}

impl From<Box<Corruption>> for Error {
    fn from(corruption: Box<Corruption>) -> Self {
        Self::Corrupt(corruption)
    }
}

impl From<ubtrfs_volume::Error> for Error {
    fn from(error: ubtrfs_volume::Error) -> Self {
        match error {
            ubtrfs_volume::Error::Corrupt(corruption) => Self::Corrupt(corruption),
            other => Self::Volume(Arc::new(other)),
        }
    }
}

impl Error {
    /// A [`Error::NotFound`] of `what`.
    #[cold]
    pub fn not_found(what: impl std::fmt::Display) -> Self {
        Self::NotFound { what: what.to_string() }
    }

    /// Whether what was read is damaged, which another try will find again.
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            Self::Corrupt(_) => true,
            Self::Volume(error) => matches!(**error, ubtrfs_volume::Error::NoWholeCopy { .. }),
            _ => false,
        }
    }
}
