//! The offline checker: what the format and Linux ask of a filesystem, judged by a reader of its
//! own. It shares the format's parsers and the device layer with the engine and nothing else, so
//! that the engine's mistakes are not its own.
//!
//! [`check`] reads every tree block once, however many snapshots share it, and answers with a
//! [`Report`] of typed [`Finding`]s. It writes nothing.
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
//! Memory: 24 bytes an extent, about 2 KiB a tree block, up to 1 KiB for each pointer
//! to where there is none, 16 bytes for each contiguous range of checksums, the items of the free space tree,
//! and the blocks being read. A block that is damaged in one item is used for the rest;
//! where blocks are lost, what only they could tell is not judged, and a note says so.
#![forbid(unsafe_code)]

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
mod roots;
mod run;
mod space;
mod superblock;
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
    /// Called now and then, from any of the threads.
    pub progress: Option<&'a (dyn Fn(Progress) + Sync)>,
}

impl Default for CheckOptions<'_> {
    fn default() -> Self {
        Self { data: false, executor: Executor::Inline, finding_count_max: 1000, progress: None }
    }
}

impl std::fmt::Debug for CheckOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CheckOptions")
            .field("data", &self.data)
            .field("executor", &self.executor)
            .field("finding_count_max", &self.finding_count_max)
            .finish_non_exhaustive()
    }
}

/// Checks the filesystem on `volume`, which nothing else may be writing to, as it is on the
/// medium. Writes nothing. The chunks of the chunk tree are added to the volume.
///
/// # Errors
/// When a device is missing or a chunk has a profile that cannot be read; damage is no error.
pub fn check(volume: &Volume, options: &CheckOptions<'_>) -> Result<Report> {
    context::Context::new(volume, options).check()
}
