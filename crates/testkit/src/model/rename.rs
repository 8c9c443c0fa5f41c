//! Renaming.

use super::names::{Growth, Named};
use super::{Id, Model, New, Node, ROOT_DIRECTORY, Refusal, Result, Target};

/// What becomes of the names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenameMode {
    /// What has the new name goes.
    Replace,
    /// Nothing may have the new name.
    NoReplace,
    /// The two names change places.
    Exchange,
    /// As `Replace`; a character device of number 0 takes the old name's place.
    Whiteout,
}

/// A name and its directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place<'a> {
    /// The directory.
    pub dir: Id,
    /// The name.
    pub name: &'a [u8],
}

impl Model {
    /// Moves a name, or exchanges two. Returns what has no name left. `whiteout` is the number that
    /// the other side gave the whiteout, if it made one.
    ///
    /// # Errors
    /// As the engine's.
    pub fn rename(
        &mut self,
        old: Place<'_>,
        new: Place<'_>,
        mode: RenameMode,
        whiteout: u64,
    ) -> Result<Option<Id>> {
        self.check_name(new.name)?;
        for place in [old, new] {
            self.writable(place.dir.root)?;
            self.entries(place.dir)?;
            let growth = if place.dir == old.dir { Growth::Forbidden } else { Growth::Allowed };
            self.permitted(place.dir, growth)?;
        }
        let moved = self.named(old.dir, old.name).ok_or(Refusal::NotFound)?;
        let target = self.named(new.dir, new.name);
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(Refusal::Exists),
            (RenameMode::Exchange, None) => return Err(Refusal::NotFound),
            (_, Some(_)) => self.permitted(new.dir, Growth::Forbidden)?,
            (_, None) => {}
        }
        self.check_move(moved, old, new)?;
        let mut orphan = None;
        match target {
            Some(target) if target == moved => return Ok(None),
            Some(target) if mode == RenameMode::Exchange => {
                self.check_move(target, new, old)?;
                let (one, two) = (self.leave(old.dir, old.name), self.leave(new.dir, new.name));
                self.arrive(new, one);
                self.arrive(old, two);
                return Ok(None);
            }
            Some(target) => {
                let id = self.check_replaced(moved, target, old, new)?;
                self.leave(new.dir, new.name);
                orphan = self.drop_name(id);
            }
            None => {}
        }
        let target = self.leave(old.dir, old.name);
        self.arrive(new, target);
        if mode == RenameMode::Whiteout {
            let now = self.now;
            let device = New {
                mode: 0o020_000,
                uid: 0,
                gid: 0,
                rdev: 0,
                atime: now,
                mtime: now,
                ctime: now,
                otime: now,
            };
            self.create(old.dir, old.name, &device, whiteout)
                .expect("the name has just become free");
        }
        Ok(orphan)
    }

    /// Enters what was taken away elsewhere.
    fn arrive(&mut self, place: Place<'_>, target: Target) {
        self.enter(place.dir, place.name, target);
        match target {
            Target::Inode(inode) => {
                let now = self.now;
                self.change(Id { root: place.dir.root, inode }).ctime = now;
            }
            Target::Subvolume(root) => {
                let subvolume = self.subvolumes.get_mut(&root).expect("it was found");
                subvolume.parent = Some((place.dir, place.name.to_vec()));
            }
        }
    }

    fn check_move(&self, named: Named, from: Place<'_>, to: Place<'_>) -> Result<()> {
        let directory = match named {
            Named::StandIn => return Err(Refusal::InvalidArgument),
            Named::Inode(_) if from.dir.root != to.dir.root => {
                return Err(Refusal::OtherSubvolume);
            }
            Named::Inode(id) => {
                self.permitted(id, Growth::Forbidden)?;
                self.found(id)?.entries().map(|_| id)
            }
            Named::Subvolume(root) => Some(Id::root_of(root)),
        };
        match directory {
            Some(id) if from.dir != to.dir && self.is_below(to.dir, id) => {
                Err(Refusal::InvalidArgument)
            }
            _ => Ok(()),
        }
    }

    /// Whether `target` can go when `moved` takes its name; returns it.
    fn check_replaced(
        &self,
        moved: Named,
        target: Named,
        old: Place<'_>,
        new: Place<'_>,
    ) -> Result<Id> {
        let Named::Inode(id) = target else { return Err(Refusal::NotEmpty) };
        let is_directory = |named: Named| match named {
            Named::Inode(id) => self.node(id).is_some_and(|node| node.entries().is_some()),
            Named::Subvolume(_) | Named::StandIn => true,
        };
        let holds_both = is_directory(target) && old.dir != new.dir && self.is_below(old.dir, id);
        if holds_both {
            return Err(Refusal::NotEmpty);
        }
        match (is_directory(moved), is_directory(target)) {
            (false, true) => return Err(Refusal::IsDirectory),
            (true, false) => return Err(Refusal::NotDirectory),
            _ => {}
        }
        self.permitted(id, Growth::Forbidden)?;
        match self.found(id)?.entries() {
            Some(entries) if !entries.is_empty() => Err(Refusal::NotEmpty),
            _ => Ok(id),
        }
    }

    /// Whether `dir` is `other`, or lies somewhere below it.
    fn is_below(&self, dir: Id, other: Id) -> bool {
        let mut here = Some(dir);
        while let Some(id) = here {
            if id == other {
                return true;
            }
            here = self.parent(id);
        }
        false
    }

    /// The directory that holds a directory; `None` of the top level and of what has no name.
    pub fn parent(&self, dir: Id) -> Option<Id> {
        let subvolume = self.subvolumes.get(&dir.root)?;
        if dir.inode == ROOT_DIRECTORY {
            return subvolume.parent.as_ref().map(|(parent, _)| *parent);
        }
        let names = |node: &Node| {
            let mut targets = node.entries().into_iter().flat_map(|entries| entries.values());
            targets.any(|target| *target == Target::Inode(dir.inode))
        };
        let holder = subvolume.nodes.iter().find(|(_, node)| names(node));
        holder.map(|(inode, _)| Id { root: dir.root, inode: *inode })
    }
}
