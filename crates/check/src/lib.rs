//! The offline checker: what the format and Linux ask of a filesystem, judged by a reader of its
//! own. It shares the format's parsers and the device layer with the engine and nothing else, so
//! that the engine's mistakes are not its own.
//!
//! [`check`] reads every leaf once, however many snapshots share it, the nodes of trees that hold
//! files twice, and answers with a [`Report`] of typed [`Finding`]s. It writes nothing to the
//! filesystem.
//!
//! How it goes:
//!
//! 1. the superblock and its copies, the chunk tree, the root tree;
//! 2. the extent tree, which becomes one record an extent, and the trees of checksums, devices and
//!    free space;
//! 3. all trees that hold files: each leaf is judged by itself and summarised, summaries are joined
//!    upwards node by node, so that what snapshots share is judged once;
//! 4. what was expected is compared with what was found.
//!
//! References are compared by sums of hashes first: each extent's record adds what the trees ask
//! for and takes off what the extent tree lists. Only where that does not come to zero are blocks
//! read again, to say what differs. By accident a wrong set of references comes to zero once in
//! 2⁶⁴ times. The names of a tree are compared in the same way.
//!
//! Memory is bounded. All that grows with the filesystem is kept in tables: 24 bytes an extent, some
//! 120 for a tree block and 24 for each further pointer to it, some 200 for a leaf of files,
//! 16 for each contiguous range of checksums, and the items of the free space tree. Their
//! pages take at most [`CheckOptions::memory_bytes_max`]; what is more lies in a file without a name in
//! the directory for temporary files, from which pages come back as they are wanted. What is found
//! does not depend on it. Besides there are, in memory:
//!
//! - some MiB: the blocks being read, what is seen of 512 leaves, and the pointers of eight nodes on
//!   each level;
//! - [`CheckOptions::finding_count_max`] findings, and before there are as many those of the 512
//!   leaves;
//! - the lists of subvolumes (about 1 KiB each, with its names and uuids), of chunks and their
//!   places on devices (about 300 bytes), of block groups (32 bytes), of the extents of the v1 free
//!   space cache (64 bytes) and of logs (152 bytes);
//! - where there is damage, 131,072 references of extents, 65,536 items that name something, and the numbers of
//!   deleted directories of a tree (about 20 bytes), while it is told what is wrong with them.
//!
//! A block that is damaged in one item is used for the rest;
//! where blocks are lost, what only they could tell is not judged, and a note says so.
#![forbid(unsafe_code)]

mod blocks;
mod context;
mod csums;
mod devices;
mod extents;
mod files;
mod finding;
mod free_space;
mod hash;
mod logs;
mod names;
mod orphans;
mod read;
mod references;
mod report;
mod reread;
mod roots;
mod run;
mod space;
mod store;
mod summaries;
mod superblock;
mod table;
mod view;
mod walk;

use ubtrfs_rt::Executor;
use ubtrfs_volume::Volume;

pub use finding::{Finding, Maybe, Name, Reference, Severity, Value};
pub use report::{Report, Statistics};

/// The result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a check could not be made. Damage is no error but a [`Finding`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device is missing, or the filesystem has what is not supported.
    #[error(transparent)]
    Volume(#[from] ubtrfs_volume::Error),
    /// The tables met [`CheckOptions::memory_bytes_max`], and what is more could not be kept in a
    /// temporary file.
    #[error("temporary file in {}: {_0}", std::env::temp_dir().display())]
    Spill(#[source] std::io::Error),
}

/// What is being looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Phase {
    /// Superblock, chunks and roots.
    Roots,
    /// The extent tree and those of checksums, devices and free space.
    Extents,
    /// Subvolumes.
    Files,
    /// What was found is compared.
    Comparing,
    /// File data, where asked for.
    Data,
}

/// How far a check has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Progress {
    /// What is being looked at.
    pub phase: Phase,
    /// Bytes of tree blocks or, in [`Phase::Data`], of data read so far.
    pub done_bytes: u64,
    /// About how many there are; 0 while that is not known.
    pub total_bytes: u64,
}

/// Tables of some three million tree blocks fit, which are 50 GB.
pub const MEMORY_BYTES_DEFAULT: u64 = 1 << 30;

/// How a check is made.
#[derive(Clone, Copy)]
pub struct CheckOptions<'a> {
    /// Read all file data too and compare every copy with its checksums, and read all copies of
    /// tree blocks.
    pub data: bool,
    /// On how many threads. The report does not depend on it.
    pub executor: Executor,
    /// Findings that are kept; of the rest the number is.
    pub finding_count_max: usize,
    /// Bytes of memory for tables that grow with the filesystem; what is more lies in a temporary
    /// file without a name in the directory for temporary files. Eight pages of them, 64 KiB at
    /// most, are held in any case, and 48 bytes for each page that is not. The report does not depend on
    /// it, but for what its statistics say of memory.
    pub memory_bytes_max: u64,
    /// Called now and then, from any of the threads.
    pub progress: Option<&'a (dyn Fn(Progress) + Sync)>,
}

impl Default for CheckOptions<'_> {
    fn default() -> Self {
        Self {
            data: false,
            executor: Executor::Inline,
            finding_count_max: 1000,
            memory_bytes_max: MEMORY_BYTES_DEFAULT,
            progress: None,
        }
    }
}

impl std::fmt::Debug for CheckOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CheckOptions")
            .field("data", &self.data)
            .field("executor", &self.executor)
            .field("finding_count_max", &self.finding_count_max)
            .field("memory_bytes_max", &self.memory_bytes_max)
            .finish_non_exhaustive()
    }
}

/// Checks the filesystem on `volume`, which nothing else may be writing to, as it is on the
/// medium. Writes nothing to it. The chunks of the chunk tree are added to the volume.
///
/// # Errors
/// When a device is missing or a chunk has a profile that cannot be read, or when a temporary file
/// is needed and fails; damage is no error.
pub fn check(volume: &Volume, options: &CheckOptions<'_>) -> Result<Report> {
    context::Context::new(volume, options).check()
}
