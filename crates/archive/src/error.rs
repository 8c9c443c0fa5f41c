//! What can go wrong while a tree moves, always with the path or archive member it concerns.

use std::fmt;
use std::io;

/// A path or name as the bytes it is, printed with what is not text escaped.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct BytePath(pub Vec<u8>);

impl BytePath {
    /// `dir/name`, or `name` alone where `dir` is empty.
    pub fn join(dir: &[u8], name: &[u8]) -> Self {
        let mut path = Vec::with_capacity(dir.len() + 1 + name.len());
        path.extend_from_slice(dir);
        if !dir.is_empty() && !name.is_empty() && !dir.ends_with(b"/") {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        Self(path)
    }
}

impl From<&[u8]> for BytePath {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }
}

impl fmt::Display for BytePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str(".");
        }
        for chunk in self.0.utf8_chunks() {
            for c in chunk.valid().chars() {
                if c.is_control() {
                    write!(f, "{}", c.escape_default())?;
                } else {
                    write!(f, "{c}")?;
                }
            }
            for byte in chunk.invalid() {
                write!(f, "\\x{byte:02x}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for BytePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a tree could not be moved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused or failed.
    #[error("{op} {path}: {source}")]
    Io {
        /// What was tried.
        op: &'static str,
        /// On what.
        path: BytePath,
        /// What the system said.
        source: io::Error,
    },
    /// The filesystem refused or failed.
    #[error("{op} {path}: {source}")]
    Engine {
        /// What was tried.
        op: &'static str,
        /// On what.
        path: BytePath,
        /// What the engine said.
        source: ubtrfs_engine::Error,
    },
    /// The archive cannot be read further.
    #[error("{} at byte {offset}: {problem}", MemberName(.member))]
    Archive {
        /// The member, where its name is known.
        member: Option<BytePath>,
        /// Offset in the (decompressed) archive.
        offset: u64,
        /// What is wrong.
        problem: ArchiveProblem,
    },
    /// The filesystem holds what none does.
    #[error("{path}: {why}: the image is damaged")]
    Damaged {
        /// Where.
        path: BytePath,
        /// What.
        why: &'static str,
    },
    /// A directory that is to be filled holds something, and must not.
    #[error("{path}: the target directory is not empty")]
    NotEmpty {
        /// Which.
        path: BytePath,
    },
    /// The tree holds something that cannot be done safely or sensibly.
    #[error("{path}: {why}")]
    Refused {
        /// Where.
        path: BytePath,
        /// Why, and what to do.
        why: String,
    },
}

/// Who failed, before it is said where.
#[derive(Debug)]
pub enum Cause {
    /// The system.
    Io(io::Error),
    /// The filesystem.
    Engine(ubtrfs_engine::Error),
}

impl From<io::Error> for Cause {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<rustix::io::Errno> for Cause {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Io(error.into())
    }
}

impl From<ubtrfs_engine::Error> for Cause {
    fn from(error: ubtrfs_engine::Error) -> Self {
        Self::Engine(error)
    }
}

impl Error {
    /// `op` failed on `path`.
    pub fn failed(op: &'static str, path: impl Into<BytePath>, cause: impl Into<Cause>) -> Self {
        let path = path.into();
        match cause.into() {
            Cause::Io(source) => Self::Io { op, path, source },
            Cause::Engine(source) => Self::Engine { op, path, source },
        }
    }

    /// Damage at `path`.
    pub fn damaged(path: impl Into<BytePath>, why: &'static str) -> Self {
        Self::Damaged { path: path.into(), why }
    }

    /// A refusal of `path`.
    pub fn refused(path: impl Into<BytePath>, why: impl Into<String>) -> Self {
        Self::Refused { path: path.into(), why: why.into() }
    }
}

impl From<BytePath> for Vec<u8> {
    fn from(path: BytePath) -> Self {
        path.0
    }
}

impl From<Vec<u8>> for BytePath {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

/// How an archive's member is named in a message.
struct MemberName<'a>(&'a Option<BytePath>);

impl fmt::Display for MemberName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(name) => write!(f, "archive member {name}"),
            None => f.write_str("archive"),
        }
    }
}

/// What is wrong with an archive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveProblem {
    /// It does not begin as a tar archive does.
    #[error("this is not a tar archive")]
    NotTar,
    /// Nothing in it.
    #[error("the archive is empty")]
    Empty,
    /// A header's checksum is not that of its bytes.
    #[error("the header's checksum is wrong: the archive is damaged here")]
    BadChecksum,
    /// A number that is none.
    #[error("the header's {field} is not a valid number")]
    BadNumber {
        /// Which.
        field: &'static str,
    },
    /// It ends in the middle.
    #[error("the archive ends here, {missing_bytes} bytes too early")]
    Truncated {
        /// At least so many bytes are missing.
        missing_bytes: u64,
    },
    /// An extended header that breaks its own form.
    #[error("its extended header is malformed: {why}")]
    BadPax {
        /// How.
        why: &'static str,
    },
    /// A sparse map that breaks its own form.
    #[error("its sparse map is malformed: {why}")]
    BadSparse {
        /// How.
        why: &'static str,
    },
    /// A kind of member that we do not read.
    #[error("{what} are not supported")]
    Unsupported {
        /// Which.
        what: &'static str,
    },
    /// A header larger than any real one.
    #[error("its {what} takes {bytes} bytes, over the limit of {limit_bytes}")]
    TooLarge {
        /// Which.
        what: &'static str,
        /// What it takes.
        bytes: u64,
        /// What it may take.
        limit_bytes: u64,
    },
    /// A name that leads out of the tree.
    #[error("its {what} has a \"..\" component, which could lead out of the destination")]
    ParentComponent {
        /// Name or link target.
        what: &'static str,
    },
    /// No name, or one with a NUL byte, or one too long.
    #[error("its {what} is not a valid path: {why}")]
    BadName {
        /// Name or link target.
        what: &'static str,
        /// How.
        why: &'static str,
    },
    /// The input or its decompression failed.
    #[error("cannot read on: {0}")]
    Read(io::Error),
}

/// Something the user should know that did not stop the work.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Warning {
    /// Where.
    pub path: BytePath,
    /// What.
    pub what: WarningKind,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.what)
    }
}

/// What a [`Warning`] is about.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WarningKind {
    /// Listed in its directory, gone when it was to be read.
    #[error("vanished before it could be read; skipped")]
    Vanished,
    /// It was cut while it was read.
    #[error("shrank while it was read: {have_bytes} bytes where {expect_bytes} were")]
    Shrank {
        /// Bytes that were read.
        have_bytes: u64,
        /// Bytes that were there when it was opened.
        expect_bytes: u64,
    },
    /// It was appended to while it was read.
    #[error("grew while it was read; stored with its earlier length")]
    Grew,
    /// A hard link to a file of another subvolume, which cannot be.
    #[error("is a copy that shares its data: a hard link cannot lead into another subvolume")]
    LinkIsCopy,
    /// It is the image that is being written.
    #[error("skipped: it is the image that is being written")]
    IsTheImage,
    /// An extended attribute of a namespace that btrfs does not store.
    #[error("extended attribute {0} skipped: its namespace cannot be stored")]
    XattrNamespace(BytePath),
    /// An extended attribute that the destination refused.
    #[error("extended attribute {name} not set: {why}")]
    XattrRefused {
        /// Its name.
        name: BytePath,
        /// The system's reason.
        why: String,
    },
    /// Extended attributes could not be listed.
    #[error("its extended attributes cannot be read: {0}")]
    XattrUnreadable(String),
    /// Not privileged enough to make it.
    #[error("{what} skipped: making it needs root")]
    NeedsRoot {
        /// Kind of file.
        what: &'static str,
    },
    /// The system lets nobody here have it: in a user namespace, where it is no owner.
    #[error("owner {uid}:{gid} not set: {why}")]
    OwnerRefused {
        /// The user.
        uid: u32,
        /// The group.
        gid: u32,
        /// The system's reason.
        why: String,
    },
    /// The set-user-id or set-group-id bit would have named another owner.
    #[error("set-id bits dropped: its owner could not be set")]
    SetIdDropped,
    /// The archive format has no such kind.
    #[error("{what} skipped: a tar archive cannot hold it")]
    NotInTar {
        /// Kind of file.
        what: &'static str,
    },
    /// A part of an access control list named somebody unknown.
    #[error("access control list skipped: {0}")]
    Acl(String),
    /// The archive lacks its end marker.
    #[error("the archive has no end marker; it may have been cut")]
    NoEndMarker,
    /// Leading slashes were removed from names.
    #[error("leading \"/\" removed from member names")]
    AbsoluteName,
    /// A volume label, or another member without content of its own.
    #[error("archive member of type {0:?} skipped")]
    MemberSkipped(char),
}

impl WarningKind {
    /// Whether a file is missing in the destination because of it.
    pub fn is_skip(&self) -> bool {
        matches!(
            self,
            Self::Vanished
                | Self::IsTheImage
                | Self::NeedsRoot { .. }
                | Self::NotInTar { .. }
                | Self::MemberSkipped(_)
        )
    }

    /// Whether what the destination has of a file may be what it never was: it changed while it was read.
    pub fn is_change(&self) -> bool {
        matches!(self, Self::Shrank { .. } | Self::Grew)
    }
}
