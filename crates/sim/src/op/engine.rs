//! What each operation does to the engine.

use ubtrfs_engine::{
    Error, Filesystem, InodeId, Method, NewInode, PreparedData, Reservation, SetAttributes,
    SnapshotOptions,
};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_ondisk::{DeviceId, FileOffset, InodeNo, RootId};
use ubtrfs_rt::Time;
use ubtrfs_testkit::model::{Change, Copied, Id, New, Refusal, RenameMode};
use ubtrfs_testkit::snapshot::Timestamp;

use super::{Data, Effect, How, Last, Op};

/// What went wrong in the engine, as far as the model knows such things.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The model must refuse it too.
    Refused(Refusal),
    /// There was no space: nothing may have changed, or a beginning of what takes several steps.
    NoSpace,
    /// The device failed, or had failed, or gave back what it was not given. As with no space,
    /// unless the filesystem is aborted.
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
            Error::Limit { .. } | Error::TooManyLinks { .. } | Error::HashFull { .. } => {
                Refusal::Limit
            }
            Error::ReadOnly { .. } => Refusal::ReadOnly,
            Error::Unsupported { .. } => Refusal::Unsupported,
            Error::NoSpace { .. } => return Self::NoSpace,
            Error::Volume(_) | Error::Corrupt(_) | Error::Aborted { .. } => {
                return Self::Device(error);
            }
            _ => return Self::Unexpected(error),
        })
    }
}

impl Effect {
    fn made(id: InodeId) -> Self {
        Self { made: Some(to_model(id)), ..Self::default() }
    }

    fn orphan(id: Option<InodeId>) -> Self {
        Self { orphan: id.map(to_model), ..Self::default() }
    }

    pub(super) fn told(number: u64) -> Self {
        Self { told: Some(number), ..Self::default() }
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
            Self::CreateUnlinked { dir, new } => {
                Effect::made(fs.begin(one)?.create_unlinked(to_engine(*dir), &new_inode(new))?)
            }
            Self::CreateSubvolume { dir, name, new } => {
                let mut handle = fs.begin(Reservation::create_subvolume())?;
                Effect::made(handle.create_subvolume(to_engine(*dir), name, &new_inode(new))?)
            }
            Self::Snapshot { source, dir, name, read_only } => {
                let options = SnapshotOptions { read_only: *read_only };
                Effect::made(fs.snapshot(RootId(*source), to_engine(*dir), name, &options)?)
            }
            Self::Unlink { dir, name, last: Last::Stays } => {
                Effect::orphan(fs.unlink_deferred(to_engine(*dir), name)?)
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
            Self::DedupeRange(copied) => {
                let (source, range, target, offset) = copied_range(copied);
                Effect::told(u64::from(fs.dedupe_range(source, range, target, offset)?))
            }
            Self::CopyRange(copied) => {
                let (source, range, target, offset) = copied_range(copied);
                Effect::told(fs.copy_range(source, range, target, offset)?)
            }
            _ => {
                self.silently_on_engine(fs)?;
                Effect::default()
            }
        };
        Ok(effect)
    }

    /// As [`Op::on_engine`], what makes and tells nothing.
    fn silently_on_engine(&self, fs: &Filesystem) -> Result<(), Failed> {
        let one = Reservation::create(1);
        match self {
            Self::Link { dir, name, id } => {
                fs.begin(one)?.link(to_engine(*dir), name, to_engine(*id))?;
            }
            Self::Unlink { dir, name, .. } => fs.unlink(to_engine(*dir), name)?,
            Self::Rmdir { dir, name, .. } => fs.rmdir(to_engine(*dir), name)?,
            Self::Evict { id } => fs.evict(to_engine(*id))?,
            Self::SetAttributes { id, change } => {
                let forbidding = flags::IMMUTABLE | flags::APPEND;
                let reservation = match change.flags {
                    Some(flags) if flags & forbidding == 0 => Reservation::allow_removal(),
                    _ => one,
                };
                fs.begin(reservation)?.set_attributes(to_engine(*id), &set_attributes(change))?;
            }
            Self::SetXattr { id, name, value } => {
                fs.begin(one)?.set_xattr(to_engine(*id), name, value)?;
            }
            Self::RemoveXattr { id, name } => {
                fs.begin(one)?.remove_xattr(to_engine(*id), name)?;
            }
            Self::Append { id, data, size_bytes, method, how } => {
                append(fs, to_engine(*id), data, *size_bytes, *method, *how)?;
            }
            Self::Write { id, data } => {
                fs.write(to_engine(*id), FileOffset(data.offset), &data.bytes())?;
            }
            Self::Truncate { id, size_bytes } => fs.truncate(to_engine(*id), *size_bytes)?,
            Self::CloneRange(copied) => {
                let (source, range, target, offset) = copied_range(copied);
                fs.clone_range(source, range, target, offset)?;
            }
            Self::SetReadOnly { root, read_only } => {
                fs.set_subvolume_read_only(RootId(*root), *read_only)?;
            }
            Self::DeleteSubvolume { dir, name } => {
                fs.delete_subvolume(to_engine(*dir), name)?;
            }
            Self::CleanDeleted { part: None } => _ = fs.clean_deleted_subvolumes()?,
            Self::CleanDeleted { part: Some(count) } => _ = fs.clean_deleted_step(*count)?,
            Self::SetDefaultSubvolume { root } => fs.set_default_subvolume(RootId(*root))?,
            Self::GrowDevice { device, by_bytes } => {
                let items = fs.volume().device_items();
                let item = items.get(*device).ok_or(Failed::Refused(Refusal::InvalidArgument))?;
                let total_bytes = item.total_bytes.get() + by_bytes;
                fs.grow_device(DeviceId(item.devid.get()), total_bytes)?;
            }
            Self::Commit | Self::Reopen => fs.commit()?,
            _ => unreachable!("{} makes or tells something", self.name()),
        }
        Ok(())
    }
}

type Range = std::ops::Range<FileOffset>;

fn copied_range(copied: &Copied) -> (InodeId, Range, InodeId, FileOffset) {
    let range = FileOffset(copied.range.start)..FileOffset(copied.range.end);
    let target_offset = FileOffset(copied.target_offset);
    (to_engine(copied.source), range, to_engine(copied.target), target_offset)
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
        uid: new.uid,
        gid: new.gid,
        rdev: new.rdev,
        atime: time(new.atime),
        mtime: time(new.mtime),
        ctime: time(new.ctime),
        otime: time(new.otime),
        ..NewInode::new(new.mode, Time::default())
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
