//! The btrfs engine: a filesystem as a library, with no kernel driver.
//!
//! [`Filesystem`] is the whole of the public surface: it opens what a
//! [`Volume`](ubtrfs_volume::Volume) holds, reads it, and changes it through transactions.
//!
//! Modules import downward only: `filesystem`, then `fs` (names, inodes, subvolumes), `data` (file
//! contents), and the knot of `txn`, `alloc` and `btree`.
#![forbid(unsafe_code)]

mod alloc;
#[doc(hidden)]
pub mod bench_hooks;
mod btree;
pub mod data;
mod error;
mod filesystem;
mod fs;
mod mkfs;
mod txn;

pub use data::compression::Method;
pub use data::{MAX_INLINE_BYTES_DEFAULT, Mapping, MappingKind, PreparedData, WriteOptions};
pub use error::{Error, Result};
pub use filesystem::{
    CACHE_BYTES_DEFAULT, DelayedRefTimes, Filesystem, Handle, HeldCommits, Notice, OpenOptions,
};
pub use fs::{
    Appender, Background, BackgroundOptions, ChangedName, DataFile, DirEntry, File, FileExtents,
    FileIo, Inherit, Inode, InodeId, IoInode, Link, MappedFile, NewInode, ReadDir, RenameMode,
    SetAttributes, SnapshotOptions, SpaceUsage, StatFs, SubvolumeHold, SubvolumeHolds,
    SubvolumeInfo, Transfer, Usage, device_number,
};
pub use mkfs::{MkfsOptions, mkfs};
pub use txn::Reservation;

/// The example in the README, which is a test this way.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
