//! Names, inodes, attributes and subvolumes.
//!
//! Each file here adds its calls to [`Filesystem`](crate::Filesystem). An inode is named by its
//! subvolume and its number there; entering a directory entry that names a subvolume leads to that
//! subvolume's root directory.

pub(crate) mod acl;
mod age_clock;
pub(crate) mod append;
mod background;
mod cuts;
pub(crate) mod delete_subvolume;
pub(crate) mod dir;
mod direct_write;
mod dirty_promises;
mod drop_tree;
mod entry;
pub(crate) mod file;
mod file_io;
mod file_space;
mod fixed_csums;
mod held_subvolumes;
pub(crate) mod inode;
mod left_behind;
pub(crate) mod log_replay;
mod lost_data;
pub(crate) mod make;
pub(crate) mod make_subvolume;
mod open_file;
pub(crate) mod path;
mod placed;
pub(crate) mod read_pieces;
mod received;
mod reflink;
mod remove;
pub(crate) mod rename;
mod replaced;
mod sharing;
pub(crate) mod snapshot;
pub(crate) mod state;
mod statfs;
pub(crate) mod stored;
mod subvolume;
pub(crate) mod usage;
mod uuid_tree;
mod watch;
mod write;
mod writeback;
pub(crate) mod xattr;

pub use append::Appender;
pub use background::{Background, BackgroundOptions};
pub use dir::{DirEntry, ReadDir};
pub use file::{File, FileExtents};
pub use file_io::{FileIo, IoInode};
pub use held_subvolumes::{SubvolumeHold, SubvolumeHolds};
pub use inode::{Inode, InodeId, Link, device_number};
pub use make::{Inherit, NewInode, SetAttributes};
pub(crate) use open_file::OpenFiles;
pub use open_file::{DataFile, MappedFile};
pub use received::Transfer;
pub use rename::RenameMode;
pub use snapshot::SnapshotOptions;
pub(crate) use state::FileState;
pub use statfs::StatFs;
pub use subvolume::SubvolumeInfo;
pub use usage::{SpaceUsage, Usage};
pub use watch::ChangedName;

#[cfg(test)]
mod tests;
