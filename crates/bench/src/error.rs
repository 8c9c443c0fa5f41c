//! What can go wrong with a benchmark.

use std::io;

use crate::report::Table;

/// The result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a benchmark has no figures.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file, directory or process of the benchmark's own.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A measured command did not succeed.
    #[error("{command}: {status}\n{said}")]
    Command {
        /// The command.
        command: String,
        /// How it ended.
        status: String,
        /// What it wrote to its standard error.
        said: String,
    },
    /// The input cannot be used.
    #[error("{what}")]
    Input {
        /// Why.
        what: String,
    },
    /// A workload ended before it had done all of its jobs.
    #[error("{source}")]
    Unfinished {
        /// What the jobs before gave.
        tables: Vec<Table>,
        /// Why.
        source: Box<Error>,
    },
    /// The engine, in a job inside of this process.
    #[error(transparent)]
    Engine(#[from] ubtrfs_engine::Error),
    /// The devices, in a job inside of this process.
    #[error(transparent)]
    Volume(#[from] ubtrfs_volume::Error),
    /// The server that does nothing.
    #[error(transparent)]
    Serve(#[from] ubtrfs_fuse::ServeError),
}

impl Error {
    /// Says what was being done when `source` happened.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        |source| Self::Io { what, source }
    }
}
