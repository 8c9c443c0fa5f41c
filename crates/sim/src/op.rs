//! The operations: what each does to the engine, and what to the model.
//!
//! To add one: a variant of [`Op`], an arm of [`Op::on_engine`] with the engine's call, an arm of
//! [`Op::on_model`] with the model's, an arm of [`Op::touched`], and a line in
//! [`crate::generate`].

use std::cell::RefCell;

use ubtrfs_engine::{
    Error, Filesystem, Inherit, InodeId, Method, NewInode, PreparedData, Reservation,
    SetAttributes, SnapshotOptions,
};
use ubtrfs_ondisk::{FileOffset, InodeNo, RootId};
use ubtrfs_rt::Time;
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::model::{Change, Id, Model, New, Piece, Place, Refusal, RenameMode, Target};
use ubtrfs_testkit::snapshot::Timestamp;

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

/// What an operation made, and what it left without a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Effect {
    /// What it made.
    pub made: Option<Id>,
    /// What has no name now, and stays.
    pub orphan: Option<Id>,
}

impl Effect {
    fn made(id: InodeId) -> Self {
        Self { made: Some(to_model(id)), orphan: None }
    }

    fn orphan(id: Option<InodeId>) -> Self {
        Self { made: None, orphan: id.map(to_model) }
    }
}

/// How data is appended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// By an appender, with handles of its own.
    Appender,
    /// Under one handle, to an empty file.
    OneHandle,
}

/// What went wrong in the engine, as far as the model knows such things.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The model must refuse it too.
    Refused(Refusal),
    /// There was no space: nothing may have changed.
    NoSpace,
    /// The device failed, or had failed: nothing may have changed.
    Device(Error),
    /// What must not be.
    Unexpected(Error),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Refused(match &error {
            Error::NotFound { .. } => Refusal::NotFound,
            Error::Exists { .. } => Refusal::Exists,
            Error::NotDirectory { .. } => Refusal::NotDirectory,
            Error::IsDirectory { .. } => Refusal::IsDirectory,
            Error::NotEmpty { .. } => Refusal::NotEmpty,
            Error::TooLong { .. } => Refusal::TooLong,
            Error::InvalidArgument { .. } => Refusal::InvalidArgument,
            Error::OtherSubvolume { .. } => Refusal::OtherSubvolume,
            Error::NotPermitted { .. } => Refusal::NotPermitted,
            Error::Limit { .. } => Refusal::Limit,
            Error::ReadOnly { .. } => Refusal::ReadOnly,
            Error::Unsupported { .. } => Refusal::Unsupported,
            Error::NoSpace { .. } => return Self::NoSpace,
            Error::Volume(_) | Error::Aborted { .. } => return Self::Device(error),
            _ => return Self::Unexpected(error),
        })
    }
}

impl Op {
    /// Does it to the engine.
    pub(crate) fn on_engine(&self, fs: &Filesystem) -> Result<Effect, Failed> {
        let one = Reservation::create(1);
        let effect = match self {
            Self::Create { dir, name, new } => {
                Effect::made(fs.begin(one)?.create(to_engine(*dir), name, &new_inode(new))?)
            }
            Self::Symlink { dir, name, target, new } => {
                let (dir, new) = (to_engine(*dir), new_inode(new));
                Effect::made(fs.begin(one)?.symlink(dir, name, target, &new)?)
            }
            Self::Link { dir, name, id } => {
                fs.begin(one)?.link(to_engine(*dir), name, to_engine(*id))?;
                Effect::default()
            }
            Self::CreateUnlinked { dir, new } => {
                Effect::made(fs.begin(one)?.create_unlinked(to_engine(*dir), &new_inode(new))?)
            }
            Self::Unlink { dir, name, last: Last::Goes } => {
                fs.unlink(to_engine(*dir), name)?;
                Effect::default()
            }
            Self::Unlink { dir, name, last: Last::Stays } => {
                Effect::orphan(fs.unlink_deferred(to_engine(*dir), name)?)
            }
            Self::Rmdir { dir, name, last: Last::Goes } => {
                fs.rmdir(to_engine(*dir), name)?;
                Effect::default()
            }
            Self::Rmdir { dir, name, last: Last::Stays } => {
                Effect::orphan(fs.rmdir_deferred(to_engine(*dir), name)?)
            }
            Self::Rename { from, from_name, to, to_name, mode, last } => {
                let (from, to) = (to_engine(*from), to_engine(*to));
                let engine_mode = rename_mode(*mode);
                let orphan = match last {
                    Last::Goes => {
                        fs.rename(from, from_name, to, to_name, engine_mode)?;
                        None
                    }
                    Last::Stays => fs.rename_deferred(from, from_name, to, to_name, engine_mode)?,
                };
                let whiteout = match mode {
                    RenameMode::Whiteout => Some(fs.lookup(from, from_name)?),
                    _ => None,
                };
                Effect { made: whiteout.map(to_model), ..Effect::orphan(orphan) }
            }
            Self::Evict { id } => {
                fs.evict(to_engine(*id))?;
                Effect::default()
            }
            Self::SetAttributes { id, change } => {
                fs.begin(one)?.set_attributes(to_engine(*id), &set_attributes(change))?;
                Effect::default()
            }
            Self::SetXattr { id, name, value } => {
                fs.begin(one)?.set_xattr(to_engine(*id), name, value)?;
                Effect::default()
            }
            Self::RemoveXattr { id, name } => {
                fs.begin(one)?.remove_xattr(to_engine(*id), name)?;
                Effect::default()
            }
            Self::Append { id, data, size_bytes, method, how } => {
                append(fs, to_engine(*id), data, *size_bytes, *method, *how)?;
                Effect::default()
            }
            Self::CreateSubvolume { dir, name, new } => {
                let mut handle = fs.begin(Reservation::create_subvolume())?;
                Effect::made(handle.create_subvolume(to_engine(*dir), name, &new_inode(new))?)
            }
            Self::Snapshot { source, dir, name, read_only } => {
                let options = SnapshotOptions { read_only: *read_only };
                Effect::made(fs.snapshot(RootId(*source), to_engine(*dir), name, &options)?)
            }
            Self::SetReadOnly { root, read_only } => {
                fs.set_subvolume_read_only(RootId(*root), *read_only)?;
                Effect::default()
            }
            Self::DeleteSubvolume { dir, name } => {
                fs.delete_subvolume(to_engine(*dir), name)?;
                Effect::default()
            }
            Self::CleanDeleted { part: None } => {
                fs.clean_deleted_subvolumes()?;
                Effect::default()
            }
            Self::CleanDeleted { part: Some(count) } => {
                fs.clean_deleted_step(*count)?;
                Effect::default()
            }
            Self::SetDefaultSubvolume { root } => {
                fs.set_default_subvolume(RootId(*root))?;
                Effect::default()
            }
            Self::Commit | Self::Reopen => {
                fs.commit()?;
                Effect::default()
            }
        };
        Ok(effect)
    }

    /// Does it to the model, which takes over the number of what the engine made; returns what has
    /// no name now, and stays.
    pub(crate) fn on_model(
        &self,
        model: &mut Model,
        made: Option<Id>,
    ) -> Result<Option<Id>, Refusal> {
        // Where the engine made nothing the model must refuse before it needs a number.
        let inode = made.map_or(0, |id| id.inode);
        let root = made.map_or(0, |id| id.root);
        match self {
            Self::Create { dir, name, new } => model.create(*dir, name, new, inode).map(|_| None),
            Self::Symlink { dir, name, target, new } => {
                model.symlink(*dir, name, target, new, inode).map(|_| None)
            }
            Self::Link { dir, name, id } => model.link(*dir, name, *id).map(|()| None),
            Self::CreateUnlinked { dir, new } => {
                model.create_unlinked(*dir, new, inode).map(|_| None)
            }
            Self::Unlink { dir, name, last } => {
                model.unlink(*dir, name).and_then(|orphan| settle(model, orphan, *last))
            }
            Self::Rmdir { dir, name, last } => {
                model.rmdir(*dir, name).and_then(|orphan| settle(model, orphan, *last))
            }
            Self::Rename { from, from_name, to, to_name, mode, last } => {
                let old = Place { dir: *from, name: from_name };
                let new = Place { dir: *to, name: to_name };
                let orphan = model.rename(old, new, *mode, inode)?;
                settle(model, orphan, *last)
            }
            Self::Evict { id } => model.evict(*id).map(|()| None),
            Self::SetAttributes { id, change } => model.set_attributes(*id, change).map(|()| None),
            Self::SetXattr { id, name, value } => model.set_xattr(*id, name, value).map(|()| None),
            Self::RemoveXattr { id, name } => model.remove_xattr(*id, name).map(|()| None),
            Self::Append { id, data, size_bytes, .. } => {
                let piece = |data: &Data| Piece { offset: data.offset, bytes: data.bytes() };
                let pieces: Vec<Piece> = data.iter().map(piece).collect();
                model.append(*id, &pieces, *size_bytes).map(|()| None)
            }
            Self::CreateSubvolume { dir, name, new } => {
                model.create_subvolume(*dir, name, new, root).map(|_| None)
            }
            Self::Snapshot { source, dir, name, read_only } => {
                model.snapshot(*source, *dir, name, *read_only, root).map(|_| None)
            }
            Self::SetReadOnly { root, read_only } => {
                model.set_subvolume_read_only(*root, *read_only).map(|()| None)
            }
            Self::DeleteSubvolume { dir, name } => {
                model.delete_subvolume(*dir, name).map(|()| None)
            }
            Self::SetDefaultSubvolume { root } => model.set_default_subvolume(*root).map(|()| None),
            Self::CleanDeleted { .. } | Self::Commit | Self::Reopen => Ok(None),
        }
    }

    /// The inodes that it changes, besides one that it makes.
    pub(crate) fn touched(&self, before: &Model) -> Vec<Id> {
        let named = |dir: Id, name: &[u8]| {
            let target = before.node(dir).and_then(|node| node.entries()?.get(name));
            match target {
                Some(Target::Inode(inode)) => Some(Id { root: dir.root, inode: *inode }),
                Some(Target::Subvolume(root)) => Some(Id::root_of(*root)),
                None => None,
            }
        };
        match self {
            Self::Create { dir, .. }
            | Self::Symlink { dir, .. }
            | Self::CreateUnlinked { dir, .. }
            | Self::CreateSubvolume { dir, .. } => vec![*dir],
            Self::Unlink { dir, name, .. }
            | Self::Rmdir { dir, name, .. }
            | Self::DeleteSubvolume { dir, name } => {
                [Some(*dir), named(*dir, name)].into_iter().flatten().collect()
            }
            Self::Rename { from, from_name, to, to_name, .. } => {
                let moved = [named(*from, from_name), named(*to, to_name)];
                [Some(*from), Some(*to)].into_iter().chain(moved).flatten().collect()
            }
            Self::Snapshot { source, dir, .. } => vec![*dir, Id::root_of(*source)],
            Self::Link { dir, id, .. } => vec![*dir, *id],
            Self::Evict { id }
            | Self::SetAttributes { id, .. }
            | Self::SetXattr { id, .. }
            | Self::RemoveXattr { id, .. }
            | Self::Append { id, .. } => vec![*id],
            Self::SetReadOnly { .. }
            | Self::CleanDeleted { .. }
            | Self::SetDefaultSubvolume { .. }
            | Self::Commit
            | Self::Reopen => vec![],
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

    /// Whether it takes several handles, so that a commit may come in between.
    pub(crate) fn is_in_parts(&self) -> bool {
        matches!(
            self,
            Self::Unlink { .. }
                | Self::Rmdir { .. }
                | Self::Rename { .. }
                | Self::Append { how: How::Appender, .. }
        )
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
            | Self::Append { id, .. } => *id = to(*id),
            Self::SetDefaultSubvolume { root } | Self::SetReadOnly { root, .. } => {
                *root = to(Id::root_of(*root)).root;
            }
            Self::CleanDeleted { .. } | Self::Commit | Self::Reopen => {}
        }
        op
    }
}

fn settle(model: &mut Model, orphan: Option<Id>, last: Last) -> Result<Option<Id>, Refusal> {
    match (orphan, last) {
        (Some(id), Last::Goes) => model.evict(id).map(|()| None),
        (orphan, _) => Ok(orphan),
    }
}

fn rename_mode(mode: RenameMode) -> ubtrfs_engine::RenameMode {
    match mode {
        RenameMode::Replace => ubtrfs_engine::RenameMode::Replace,
        RenameMode::NoReplace => ubtrfs_engine::RenameMode::NoReplace,
        RenameMode::Exchange => ubtrfs_engine::RenameMode::Exchange,
        RenameMode::Whiteout => ubtrfs_engine::RenameMode::Whiteout,
    }
}

fn append(
    fs: &Filesystem,
    id: InodeId,
    data: &[Data],
    size_bytes: u64,
    method: Option<Method>,
    how: How,
) -> Result<(), Error> {
    let options = fs.write_options(method);
    let pieces = data
        .iter()
        .map(|data| (FileOffset(data.offset), PreparedData::new(data.bytes(), &options)));
    match how {
        How::Appender => {
            let mut appender = fs.appender(id, size_bytes)?;
            for (offset, data) in pieces {
                appender.push(offset, data)?;
            }
            appender.hole_to(size_bytes)?;
            appender.finish()
        }
        How::OneHandle => {
            let pieces: Vec<_> = pieces.collect();
            let reservation = Reservation::create(0).and(Reservation::extents(EXTENTS_MAX));
            fs.begin(reservation)?.write_file(id, pieces, size_bytes)
        }
    }
}

/// Extents that one [`Op::Append`] makes at most.
const EXTENTS_MAX: u64 = 24;

pub(crate) fn to_engine(id: Id) -> InodeId {
    InodeId { root: RootId(id.root), inode: InodeNo(id.inode) }
}

pub(crate) fn to_model(id: InodeId) -> Id {
    Id { root: id.root.0, inode: id.inode.0 }
}

fn time(time: Timestamp) -> Time {
    Time { sec: time.sec, nsec: time.nsec }
}

fn new_inode(new: &New) -> NewInode {
    NewInode {
        mode: new.mode,
        uid: new.uid,
        gid: new.gid,
        rdev: new.rdev,
        atime: time(new.atime),
        mtime: time(new.mtime),
        ctime: time(new.ctime),
        otime: time(new.otime),
        inherit: Inherit::Nothing,
    }
}

fn set_attributes(change: &Change) -> SetAttributes {
    SetAttributes {
        mode: change.mode,
        uid: change.uid,
        gid: change.gid,
        atime: change.atime.map(time),
        mtime: change.mtime.map(time),
        ctime: change.ctime.map(time),
        otime: change.otime.map(time),
        flags: change.flags,
    }
}
