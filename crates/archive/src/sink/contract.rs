//! What [`TreeSink`](super::tree::TreeSink) asks of a destination.

use crate::batch::Prepare;
use crate::entry::{Metadata, Segment, Special};
use crate::error::Cause;

/// What is at a name of the destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found<N> {
    /// Which.
    pub node: N,
    /// Of what kind.
    pub kind: FoundKind,
    /// Whether this run made it.
    pub is_ours: bool,
}

/// Kinds that matter to resolution.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FoundKind {
    /// A directory or subvolume.
    Directory,
    /// A symbolic link.
    Symlink,
    /// Anything else.
    Other,
}

/// What is to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Make<'a> {
    /// A directory.
    Directory,
    /// A subvolume.
    Subvolume,
    /// A regular file that will have this length.
    File {
        /// The length.
        size_bytes: u64,
    },
    /// Something else.
    Special(Special<&'a [u8]>),
}

/// What became of another name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// It is the same file's, or that of its copy in this subvolume.
    Same,
    /// The file lies in another subvolume. The name is the first of a copy, which shares its data.
    Copy,
}

/// What is changed together at worst.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Work {
    /// Names made or removed, or files whose metadata is set.
    pub names: u64,
    /// Extended attributes set.
    pub xattrs: u64,
    /// Bytes written.
    pub data_bytes: u64,
}

/// Why a tree refused.
#[derive(Debug)]
pub enum TreeError {
    /// The name is taken.
    Exists,
    /// Anything else.
    Other(Cause),
}

impl From<ubtrfs_engine::Error> for TreeError {
    fn from(error: ubtrfs_engine::Error) -> Self {
        match error {
            ubtrfs_engine::Error::Exists { .. } => Self::Exists,
            other => Self::Other(Cause::Engine(other)),
        }
    }
}

/// A destination that makes files by directory and name.
pub trait Tree {
    /// A file of any kind.
    type Node: Copy + Eq + std::fmt::Debug;
    /// Data, prepared for it.
    type Data: Send;

    /// The directory that the tree goes into.
    fn root(&self) -> Self::Node;

    /// What prepares data.
    fn prepare(&self) -> Box<dyn Prepare<Self::Data>>;

    /// Called before changes that belong together: those of one step. Between `begin` and `end`
    /// no file is appended to.
    ///
    /// # Errors
    /// No change can begin.
    fn begin(&mut self, work: Work) -> Result<(), TreeError>;

    /// Called after them, failed or not.
    fn end(&mut self);

    /// What is at a name.
    ///
    /// # Errors
    /// The destination cannot be read.
    fn lookup(
        &mut self,
        dir: Self::Node,
        name: &[u8],
    ) -> Result<Option<Found<Self::Node>>, TreeError>;

    /// Makes a file.
    ///
    /// # Errors
    /// [`TreeError::Exists`], or as the destination reports.
    fn make(
        &mut self,
        dir: Self::Node,
        name: &[u8],
        what: Make<'_>,
        metadata: &Metadata,
    ) -> Result<Self::Node, TreeError>;

    /// Makes another name for a file, or of a file that can have none there another one like it.
    ///
    /// # Errors
    /// [`TreeError::Exists`], or as the destination reports.
    fn link(&mut self, dir: Self::Node, name: &[u8], node: Self::Node) -> Result<Link, TreeError>;

    /// Removes a name that is not a directory's.
    ///
    /// # Errors
    /// As the destination reports.
    fn unlink(&mut self, dir: Self::Node, name: &[u8]) -> Result<(), TreeError>;

    /// Sets an extended attribute.
    ///
    /// # Errors
    /// As the destination reports.
    fn set_xattr(&mut self, node: Self::Node, name: &[u8], value: &[u8]) -> Result<(), TreeError>;

    /// Sets owner, permissions and times.
    ///
    /// # Errors
    /// As the destination reports.
    fn set_metadata(&mut self, node: Self::Node, metadata: &Metadata) -> Result<(), TreeError>;

    /// Sets times.
    ///
    /// # Errors
    /// As the destination reports.
    fn set_times(&mut self, node: Self::Node, metadata: &Metadata) -> Result<(), TreeError>;

    /// Gives the file made last its content: one whole piece, or one hole of `size_bytes`.
    ///
    /// # Errors
    /// As the destination reports.
    fn write_whole(
        &mut self,
        node: Self::Node,
        size_bytes: u64,
        data: Option<Self::Data>,
    ) -> Result<(), TreeError>;

    /// Begins to give the file made last its content.
    ///
    /// # Errors
    /// As the destination reports.
    fn begin_file(&mut self, node: Self::Node, size_bytes: u64) -> Result<(), TreeError>;

    /// Appends a piece.
    ///
    /// # Errors
    /// As the destination reports.
    fn append(&mut self, offset: u64, len_bytes: usize, data: Self::Data) -> Result<(), TreeError>;

    /// Appends a hole.
    ///
    /// # Errors
    /// As the destination reports.
    fn append_hole(&mut self, hole: Segment) -> Result<(), TreeError>;

    /// Ends the file's content.
    ///
    /// # Errors
    /// As the destination reports.
    fn finish_file(&mut self) -> Result<(), TreeError>;
}
