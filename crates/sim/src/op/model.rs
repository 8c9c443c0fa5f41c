//! What each operation does to the model, and which states lie inside of it.

use ubtrfs_testkit::model::{
    Copied, Id, Model, Node, Piece, Place, Progress, Refusal, SparseBytes, Target,
};

use super::{Data, Effect, Last, Op};

impl Op {
    /// Does it to the model, which takes over the number of what the engine made.
    pub(crate) fn on_model(&self, model: &mut Model, made: Option<Id>) -> Result<Effect, Refusal> {
        // Where the engine made nothing the model must refuse before it needs a number.
        let inode = made.map_or(0, |id| id.inode);
        let root = made.map_or(0, |id| id.root);
        let nothing = Effect { made, ..Effect::default() };
        let orphan = |orphan: Option<Id>| Effect { orphan, ..nothing };
        match self {
            Self::Create { dir, name, new } => model.create(*dir, name, new, inode).map(drop),
            Self::Symlink { dir, name, target, new } => {
                model.symlink(*dir, name, target, new, inode).map(drop)
            }
            Self::Link { dir, name, id } => model.link(*dir, name, *id),
            Self::CreateUnlinked { dir, new } => model.create_unlinked(*dir, new, inode).map(drop),
            Self::Unlink { dir, name, last } => {
                let left = model.unlink(*dir, name)?;
                return settle(model, left, *last).map(orphan);
            }
            Self::Rmdir { dir, name, last } => {
                let left = model.rmdir(*dir, name)?;
                return settle(model, left, *last).map(orphan);
            }
            Self::Rename { from, from_name, to, to_name, mode, last } => {
                let old = Place { dir: *from, name: from_name };
                let new = Place { dir: *to, name: to_name };
                let left = model.rename(old, new, *mode, inode)?;
                return settle(model, left, *last).map(orphan);
            }
            Self::Evict { id } => model.evict(*id),
            Self::SetAttributes { id, change } => model.set_attributes(*id, change),
            Self::SetXattr { id, name, value } => model.set_xattr(*id, name, value),
            Self::RemoveXattr { id, name } => model.remove_xattr(*id, name),
            Self::Append { id, data, size_bytes, .. } => {
                let piece = |data: &Data| Piece { offset: data.offset, bytes: data.bytes() };
                let pieces: Vec<Piece> = data.iter().map(piece).collect();
                model.append(*id, &pieces, *size_bytes)
            }
            Self::Write { id, data } => model.write(*id, data.offset, &data.bytes()),
            Self::Truncate { id, size_bytes } => model.truncate(*id, *size_bytes),
            Self::CloneRange(copied) => model.clone_range(copied),
            Self::DedupeRange(copied) => {
                return model.dedupe_range(copied).map(|same| Effect::told(u64::from(same)));
            }
            Self::CopyRange(copied) => return model.copy_range(copied).map(Effect::told),
            Self::CreateSubvolume { dir, name, new } => {
                model.create_subvolume(*dir, name, new, root).map(drop)
            }
            Self::Snapshot { source, dir, name, read_only } => {
                model.snapshot(*source, *dir, name, *read_only, root).map(drop)
            }
            Self::SetReadOnly { root, read_only } => {
                model.set_subvolume_read_only(*root, *read_only)
            }
            Self::DeleteSubvolume { dir, name } => model.delete_subvolume(*dir, name),
            Self::SetDefaultSubvolume { root } => model.set_default_subvolume(*root),
            Self::CleanDeleted { .. } | Self::GrowDevice { .. } | Self::Commit | Self::Reopen => {
                Ok(())
            }
        }
        .map(|()| nothing)
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
            Self::CloneRange(copied) | Self::DedupeRange(copied) | Self::CopyRange(copied) => {
                vec![copied.source, copied.target]
            }
            Self::Evict { id }
            | Self::SetAttributes { id, .. }
            | Self::SetXattr { id, .. }
            | Self::RemoveXattr { id, .. }
            | Self::Write { id, .. }
            | Self::Truncate { id, .. }
            | Self::Append { id, .. } => vec![*id],
            Self::SetReadOnly { .. }
            | Self::CleanDeleted { .. }
            | Self::SetDefaultSubvolume { .. }
            | Self::GrowDevice { .. }
            | Self::Commit
            | Self::Reopen => vec![],
        }
    }

    /// The states that lie inside of it, where it changes a file in several steps, each durable by
    /// itself: the file is new up to the border of a sector, or of what is copied at a time, and
    /// behind that as it was; all else is as before. Nothing else may be seen of an operation that
    /// failed half way, or inside of which a commit came.
    pub(crate) fn inside<'a>(&'a self, before: &'a Model) -> Box<dyn Iterator<Item = Model> + 'a> {
        let states = self.borders(before).into_iter().map(|progress| {
            let mut model = before.clone();
            match self {
                Self::Write { id, data } => {
                    model.write_until(*id, data.offset, &data.bytes(), progress);
                }
                Self::Truncate { id, .. } => model.truncate_until(*id, progress),
                Self::CloneRange(copied) | Self::CopyRange(copied) => {
                    model.copy_until(copied, progress);
                }
                _ => unreachable!("{} has no borders", self.name()),
            }
            model
        });
        Box::new(states)
    }

    /// How far it may have come.
    fn borders(&self, before: &Model) -> Vec<Progress> {
        let Some((start, end)) = self.changed_range(before) else { return Vec::new() };
        let sector = before.limits().sector_bytes;
        let mut borders = vec![Progress::Begun];
        let first = (start / sector + 1) * sector;
        let sectors = (0..).map(|number| first + number * sector).take_while(|at| *at < end);
        borders.extend(sectors.map(Progress::UpTo));
        if matches!(self, Self::CopyRange(_)) {
            let pieces = (1..).map(|number| start + number * COPY_BYTES);
            borders.extend(pieces.take_while(|at| *at < end).map(Progress::UpTo));
        }
        borders
    }

    /// Between which offsets it changes a file, if it is allowed to.
    fn changed_range(&self, before: &Model) -> Option<(u64, u64)> {
        let has_range = matches!(
            self,
            Self::Write { .. } | Self::Truncate { .. } | Self::CloneRange(_) | Self::CopyRange(_)
        );
        if !has_range || self.on_model(&mut before.clone(), None).is_err() {
            return None;
        }
        let len =
            |id: &Id| before.node(*id).and_then(Node::bytes).map_or(0, SparseBytes::len_bytes);
        match self {
            Self::Write { data, .. } => {
                Some((data.offset, data.offset + u64::try_from(data.len).ok()?))
            }
            // From the end on; what is longer then has a hole, which is one step.
            Self::Truncate { id, size_bytes } => Some((*size_bytes, len(id).max(*size_bytes))),
            Self::CloneRange(copied) | Self::CopyRange(copied) => {
                let Copied { source, range, target_offset, .. } = copied;
                let count = range.end.min(len(source)).saturating_sub(range.start);
                Some((*target_offset, target_offset + count))
            }
            _ => None,
        }
    }

    /// Whether it takes several handles, so that a commit that comes by itself may be before it, or
    /// inside, or behind all that can be seen of it.
    pub(crate) fn is_in_parts(&self) -> bool {
        matches!(
            self,
            Self::Unlink { .. }
                | Self::Rmdir { .. }
                | Self::Rename { .. }
                | Self::Evict { .. }
                | Self::Snapshot { .. }
                | Self::Append { .. }
                | Self::Write { .. }
                | Self::Truncate { .. }
                | Self::CloneRange(_)
                | Self::DedupeRange(_)
                | Self::CopyRange(_)
        )
    }
}

/// Bytes that are copied at a time where nothing can be shared.
const COPY_BYTES: u64 = 128 << 10;

fn settle(model: &mut Model, orphan: Option<Id>, last: Last) -> Result<Option<Id>, Refusal> {
    match (orphan, last) {
        (Some(id), Last::Goes) => model.evict(id).map(|()| None),
        (orphan, _) => Ok(orphan),
    }
}
