//! The operations: what each does to the engine, and what to the model.
//!
//! To add one: a variant of [`Op`] with its name, an arm of [`Op::on_engine`] with the engine's
//! call, an arm of [`Op::on_model`] with the model's, an arm of [`Op::touched`], one of
//! [`Op::inside`] where it takes several steps, and a line in [`crate::generate`].

mod engine;
mod model;

use std::cell::RefCell;

use ubtrfs_engine::Method;
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::model::{Change, Copied, Id, New, RenameMode};

pub(crate) use engine::{Failed, to_engine, to_model};

/// One operation on a filesystem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Makes a file, directory, node, fifo or socket.
    Create {
        /// Where.
        dir: Id,
        /// Its name.
        name: Vec<u8>,
        /// What it begins with.
        new: New,
    },
    /// Makes a symbolic link.
    Symlink {
        /// Where.
        dir: Id,
        /// Its name.
        name: Vec<u8>,
        /// What it says.
        target: Vec<u8>,
        /// What it begins with.
        new: New,
    },
    /// Gives a file another name.
    Link {
        /// Where.
        dir: Id,
        /// The name.
        name: Vec<u8>,
        /// The file.
        id: Id,
    },
    /// Makes a file, node, fifo or socket without a name.
    CreateUnlinked {
        /// The directory that it is like.
        dir: Id,
        /// What it begins with.
        new: New,
    },
    /// Removes a name of a file.
    Unlink {
        /// Where.
        dir: Id,
        /// The name.
        name: Vec<u8>,
        /// What becomes of the file with its last name.
        last: Last,
    },
    /// Removes an empty directory.
    Rmdir {
        /// Where.
        dir: Id,
        /// The name.
        name: Vec<u8>,
        /// What becomes of it.
        last: Last,
    },
    /// Moves a name.
    Rename {
        /// From where.
        from: Id,
        /// The old name.
        from_name: Vec<u8>,
        /// Where to.
        to: Id,
        /// The new name.
        to_name: Vec<u8>,
        /// What becomes of the names.
        mode: RenameMode,
        /// What becomes of what is replaced.
        last: Last,
    },
    /// Removes an inode without a name.
    Evict {
        /// Which.
        id: Id,
    },
    /// Changes attributes.
    SetAttributes {
        /// Whose.
        id: Id,
        /// To what.
        change: Change,
    },
    /// Sets an extended attribute.
    SetXattr {
        /// Whose.
        id: Id,
        /// Its name.
        name: Vec<u8>,
        /// Its value.
        value: Vec<u8>,
    },
    /// Removes an extended attribute.
    RemoveXattr {
        /// Whose.
        id: Id,
        /// Its name.
        name: Vec<u8>,
    },
    /// Appends to a file.
    Append {
        /// The file.
        id: Id,
        /// What.
        data: Vec<Data>,
        /// Where it ends then.
        size_bytes: u64,
        /// How it is compressed.
        method: Option<Method>,
        /// Under which handles.
        how: How,
    },
    /// Writes into a file.
    Write {
        /// The file.
        id: Id,
        /// What, and where.
        data: Data,
    },
    /// Cuts a file off, or lets it end with a hole.
    Truncate {
        /// The file.
        id: Id,
        /// Where it ends then.
        size_bytes: u64,
    },
    /// Lets a file share what another has in a range.
    CloneRange(Copied),
    /// The same, where both have the same bytes.
    DedupeRange(Copied),
    /// Copies a range.
    CopyRange(Copied),
    /// Makes a subvolume.
    CreateSubvolume {
        /// Where.
        dir: Id,
        /// Its name.
        name: Vec<u8>,
        /// What its root directory begins with.
        new: New,
    },
    /// Makes a snapshot.
    Snapshot {
        /// Of which subvolume.
        source: u64,
        /// Where.
        dir: Id,
        /// Its name.
        name: Vec<u8>,
        /// Whether it refuses changes.
        read_only: bool,
    },
    /// Makes a subvolume read-only, or writable.
    SetReadOnly {
        /// Its number.
        root: u64,
        /// Which.
        read_only: bool,
    },
    /// Deletes a subvolume.
    DeleteSubvolume {
        /// Where.
        dir: Id,
        /// Its name.
        name: Vec<u8>,
    },
    /// Frees what deleted subvolumes held, all of it or a part.
    CleanDeleted {
        /// About so many references; `None` for all.
        part: Option<usize>,
    },
    /// Chooses the default subvolume.
    SetDefaultSubvolume {
        /// Its number.
        root: u64,
    },
    /// Makes a device longer.
    GrowDevice {
        /// Its place, from 0.
        device: usize,
        /// By how much.
        by_bytes: u64,
    },
    /// Makes everything durable.
    Commit,
    /// Commits, closes and opens again.
    Reopen,
}

/// Bytes of a file, as a recipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Data {
    /// Where they begin.
    pub offset: u64,
    /// How many.
    pub len: usize,
    /// Of what.
    pub seed: u64,
    /// Whether they repeat.
    pub repeats: bool,
}

impl Data {
    fn bytes(&self) -> Vec<u8> {
        let mut prng = Prng::new(self.seed);
        if !self.repeats {
            return prng.bytes(self.len);
        }
        let phrase = prng.bytes(200);
        phrase.iter().copied().cycle().take(self.len).collect()
    }
}

/// What becomes of an inode that has lost its last name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Last {
    /// It goes.
    Goes,
    /// It stays, as somebody has it open, until it is evicted or the filesystem closed.
    Stays,
}

/// What an operation made and told, and what it left without a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Effect {
    /// What it made.
    pub made: Option<Id>,
    /// What has no name now, and stays.
    pub orphan: Option<Id>,
    /// The number that it answered with.
    pub told: Option<u64>,
}

/// How data is appended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// By an appender, with handles of its own.
    Appender,
    /// Under one handle, to an empty file.
    OneHandle,
}

impl Op {
    /// What reports call it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Create { .. } => "create",
            Self::Symlink { .. } => "symlink",
            Self::Link { .. } => "link",
            Self::CreateUnlinked { .. } => "create without a name",
            Self::Unlink { .. } => "unlink",
            Self::Rmdir { .. } => "rmdir",
            Self::Rename { .. } => "rename",
            Self::Evict { .. } => "evict",
            Self::SetAttributes { .. } => "set attributes",
            Self::SetXattr { .. } => "set xattr",
            Self::RemoveXattr { .. } => "remove xattr",
            Self::Append { .. } => "append",
            Self::Write { .. } => "write",
            Self::Truncate { .. } => "truncate",
            Self::CloneRange(_) => "clone range",
            Self::DedupeRange(_) => "dedupe range",
            Self::CopyRange(_) => "copy range",
            Self::CreateSubvolume { .. } => "create subvolume",
            Self::Snapshot { .. } => "snapshot",
            Self::SetReadOnly { .. } => "set read-only",
            Self::DeleteSubvolume { .. } => "delete subvolume",
            Self::CleanDeleted { .. } => "clean deleted",
            Self::SetDefaultSubvolume { .. } => "set default subvolume",
            Self::GrowDevice { .. } => "grow device",
            Self::Commit => "commit",
            Self::Reopen => "reopen",
        }
    }

    /// The inodes that it names by number.
    pub(crate) fn mentions(&self) -> Vec<Id> {
        let seen = RefCell::new(Vec::new());
        self.translated(|id| {
            seen.borrow_mut().push(id);
            id
        });
        seen.into_inner()
    }

    /// Whether a full filesystem must have room for it.
    pub(crate) fn is_removal(&self) -> bool {
        matches!(
            self,
            Self::Unlink { .. }
                | Self::Rmdir { .. }
                | Self::Evict { .. }
                | Self::DeleteSubvolume { .. }
                | Self::CleanDeleted { .. }
                | Self::SetReadOnly { read_only: false, .. }
                | Self::SetDefaultSubvolume { .. }
                | Self::GrowDevice { .. }
                | Self::Commit
                | Self::Reopen
        )
    }

    /// The same on other inodes: a run that is repeated from an earlier state may number what it
    /// makes otherwise.
    pub(crate) fn translated(&self, to: impl Fn(Id) -> Id) -> Self {
        let mut op = self.clone();
        match &mut op {
            Self::Create { dir, .. }
            | Self::Symlink { dir, .. }
            | Self::CreateUnlinked { dir, .. }
            | Self::Unlink { dir, .. }
            | Self::Rmdir { dir, .. }
            | Self::DeleteSubvolume { dir, .. }
            | Self::CreateSubvolume { dir, .. } => *dir = to(*dir),
            Self::Rename { from, to: into, .. } => (*from, *into) = (to(*from), to(*into)),
            Self::Snapshot { source, dir, .. } => {
                (*source, *dir) = (to(Id::root_of(*source)).root, to(*dir));
            }
            Self::Link { dir, id, .. } => (*dir, *id) = (to(*dir), to(*id)),
            Self::Evict { id }
            | Self::SetAttributes { id, .. }
            | Self::SetXattr { id, .. }
            | Self::RemoveXattr { id, .. }
            | Self::Write { id, .. }
            | Self::Truncate { id, .. }
            | Self::Append { id, .. } => *id = to(*id),
            Self::CloneRange(copied) | Self::DedupeRange(copied) | Self::CopyRange(copied) => {
                (copied.source, copied.target) = (to(copied.source), to(copied.target));
            }
            Self::SetDefaultSubvolume { root } | Self::SetReadOnly { root, .. } => {
                *root = to(Id::root_of(*root)).root;
            }
            Self::CleanDeleted { .. } | Self::GrowDevice { .. } | Self::Commit | Self::Reopen => {}
        }
        op
    }
}
