//! Renaming: a name moved, in one handle with what it replaces.

use super::entry::{Named, check_flags, shown};
use super::inode::InodeId;
use super::make::{Inherit, NewInode, check_directory, check_new_name, checked_name};
use super::path::DEPTH_MAX;
use super::state::Names;
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle};
use crate::txn::Reservation;

/// A character device; its number is 0.
const WHITEOUT_MODE: u32 = 0o020_000;

/// What becomes of the names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenameMode {
    /// What has the new name goes.
    Replace,
    /// Nothing may have the new name.
    NoReplace,
    /// The two names change places.
    Exchange,
    /// As `Replace`; a whiteout, a character device with number 0, takes the old name's place.
    Whiteout,
}

/// A name and its directory.
#[derive(Clone, Copy)]
struct Place<'a> {
    dir: InodeId,
    name: &'a [u8],
}

impl Filesystem {
    /// Gives what is named `from_name` in `from` the name `to_name` in `to`, all at once: after a
    /// crash it has one of the two. A directory moves with all below it, a subvolume also into
    /// another. Two names of one file stay as they are. The calling thread must hold no handle.
    /// Durable with the next commit. Where a file with contents loses its name, what memory has of that which takes it is on the
    /// medium before: a crash leaves the old contents or the new ones.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`, `NotPermitted`, `Exists`, `TooLong`, `TooManyLinks`, `HashFull`; `OtherSubvolume` for
    /// what is no subvolume; `IsDirectory`, `NotDirectory` or `NotEmpty` where the new name is of
    /// what cannot be replaced so; `InvalidArgument` for a directory that would come to lie in
    /// itself.
    pub fn rename(
        &self,
        from: InodeId,
        from_name: &[u8],
        to: InodeId,
        to_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        let replaced = self.rename_deferred(from, from_name, to, to_name, mode)?;
        replaced.map_or(Ok(()), |id| self.evict_now_or_later(id))
    }

    /// As [`Filesystem::rename`]; what was replaced stays, if that was its last name, until
    /// [`Filesystem::evict`].
    ///
    /// # Errors
    /// As [`Filesystem::rename`].
    pub fn rename_deferred(
        &self,
        from: InodeId,
        from_name: &[u8],
        to: InodeId,
        to_name: &[u8],
        mode: RenameMode,
    ) -> Result<Option<InodeId>> {
        self.store_before_replacing((from, from_name), (to, to_name), mode);
        let mut handle = self.begin(Reservation::rename())?;
        let (old, new) = (Place { dir: from, name: from_name }, Place { dir: to, name: to_name });
        let whiteout = NewInode::new(WHITEOUT_MODE, handle.txn.now());
        handle.rename(old, new, mode, &whiteout)
    }

    /// As [`Filesystem::rename_deferred`] with [`RenameMode::Whiteout`], and says whose the whiteout is.
    ///
    /// # Errors
    /// As [`Filesystem::rename`].
    pub fn rename_leaving(
        &self,
        from: InodeId,
        from_name: &[u8],
        to: InodeId,
        to_name: &[u8],
        whiteout: &NewInode,
    ) -> Result<Option<InodeId>> {
        self.store_before_replacing((from, from_name), (to, to_name), RenameMode::Whiteout);
        let mut handle = self.begin(Reservation::rename())?;
        let (old, new) = (Place { dir: from, name: from_name }, Place { dir: to, name: to_name });
        let whiteout = NewInode { mode: WHITEOUT_MODE, inherit: Inherit::Nothing, ..*whiteout };
        handle.rename(old, new, RenameMode::Whiteout, &whiteout)
    }
}

impl Handle<'_> {
    fn rename(
        &mut self,
        old: Place<'_>,
        new: Place<'_>,
        mode: RenameMode,
        whiteout: &NewInode,
    ) -> Result<Option<InodeId>> {
        checked_name(new.name)?;
        let core = self.txn.core();
        let files = &self.fs.inner.files;
        let mut names = files.names();
        for place in [old, new] {
            names.check_writable(core, place.dir.root)?;
            let item = names.hold(core, place.dir)?.item;
            check_directory(place.dir, &item)?;
            // Whether it loses one is known when what has the new name is.
            check_flags(place.dir, item.flags.get(), place.dir != old.dir)?;
        }
        let moved = Named::find(self, old.dir, old.name)?;
        let target = match Named::find(self, new.dir, new.name) {
            Ok(target) => Some(target),
            Err(Error::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        match (mode, &target) {
            (RenameMode::NoReplace, Some(_)) => {
                return Err(Error::Exists { what: shown(new.dir, new.name) });
            }
            (RenameMode::Exchange, None) => {
                return Err(Error::not_found(shown(new.dir, new.name)));
            }
            (_, Some(_)) => {
                check_flags(new.dir, names.hold(core, new.dir)?.item.flags.get(), false)?;
            }
            (_, None) => {}
        }
        self.check_move(&mut names, &moved, old, new)?;
        match &target {
            None => check_new_name(self.fs, core, new.dir, new.name)?,
            Some(target) if target.id == moved.id => return Ok(None),
            Some(target) if mode == RenameMode::Exchange => {
                self.check_move(&mut names, target, new, old)?;
                return self.exchange(&mut names, [(old, moved), (new, *target)]);
            }
            Some(target) => self.check_replaced(&mut names, &moved, target, old, new)?,
        }
        self.check_ref(&moved, new.dir, new.name)?;
        for dir in [new.dir, old.dir] {
            names.hold(core, dir)?.next_index(core, dir)?;
        }

        let mut orphan = None;
        let _replacement = files.replace_name(&mut names);
        if let Some(target) = target {
            self.detach(new.dir, new.name, &target)?;
            self.uncount(&mut names, new.dir, new.name)?;
            orphan = self.drop_link(&mut names, target.id)?;
        }
        self.detach(old.dir, old.name, &moved).map_err(|error| self.txn.abort(error))?;
        self.uncount(&mut names, old.dir, old.name)?;
        self.attach_next(&mut names, new, &moved)?;
        self.touch_moved(&mut names, &moved)?;
        if mode == RenameMode::Whiteout {
            self.make_under(&mut names, old.dir, old.name, whiteout, None)
                .map_err(|error| self.txn.abort(error))?;
        }
        Ok(orphan)
    }

    /// Enters a name at the next index of its directory and counts it.
    fn attach_next(&mut self, names: &mut Names, place: Place<'_>, named: &Named) -> Result<()> {
        let core = self.txn.core();
        let parent = names.hold(core, place.dir).map_err(|error| self.txn.abort(error))?;
        let index = parent.next_index(core, place.dir).map_err(|error| self.txn.abort(error))?;
        self.attach(place.dir, place.name, named, index)?;
        self.count(names, place.dir, place.name)
    }

    fn touch_moved(&mut self, names: &mut Names, named: &Named) -> Result<()> {
        // A subvolume may be read-only, and is not changed by its name.
        if named.is_subvolume { Ok(()) } else { self.touch_inode(names, named.id) }
    }

    fn exchange(
        &mut self,
        names: &mut Names,
        both: [(Place<'_>, Named); 2],
    ) -> Result<Option<InodeId>> {
        let [(old, moved), (new, target)] = both;
        self.check_ref(&moved, new.dir, new.name)?;
        self.check_ref(&target, old.dir, old.name)?;
        let core = self.txn.core();
        for dir in [new.dir, old.dir] {
            names.hold(core, dir)?.next_index(core, dir)?;
        }
        let _replacement = self.fs.inner.files.replace_name(names);
        for (place, named) in both {
            self.detach(place.dir, place.name, &named).map_err(|error| self.txn.abort(error))?;
            self.uncount(names, place.dir, place.name)?;
        }
        for (place, named) in [(new, moved), (old, target)] {
            self.attach_next(names, place, &named)?;
            self.touch_moved(names, &named)?;
        }
        Ok(None)
    }

    /// Whether what lies at one place can go to another.
    fn check_move(
        &self,
        names: &mut Names,
        named: &Named,
        from: Place<'_>,
        to: Place<'_>,
    ) -> Result<()> {
        if named.id.is_stand_in() {
            let what = format!("{} holds a subvolume's place", shown(from.dir, from.name));
            return Err(Error::InvalidArgument { what });
        }
        if from.dir.root != to.dir.root && !named.is_subvolume {
            return Err(Error::OtherSubvolume { what: shown(from.dir, from.name) });
        }
        if named.is_subvolume {
            names.check_not_deleted(to.dir.root)?;
        } else {
            let item = names.hold(self.txn.core(), named.id)?.item;
            check_flags(named.id, item.flags.get(), false)?;
        }
        let is_moving = named.is_directory() && from.dir != to.dir;
        if is_moving && self.is_below(to.dir, named.id)? {
            let what = format!("{} would come to lie in itself", named.id);
            return Err(Error::InvalidArgument { what });
        }
        Ok(())
    }

    /// Whether `dir` is `other`, or lies somewhere below it.
    fn is_below(&self, dir: InodeId, other: InodeId) -> Result<bool> {
        let mut here = Some(dir);
        // In a damaged filesystem parents may form a circle.
        for _ in 0..DEPTH_MAX {
            match here {
                None => return Ok(false),
                Some(id) if id == other => return Ok(true),
                Some(id) => here = self.fs.name_of_directory(id)?.map(|link| link.parent),
            }
        }
        Err(Error::Limit { what: format!("directories above {dir}") })
    }

    /// Whether `target` can go when `moved` takes its name.
    fn check_replaced(
        &self,
        names: &mut Names,
        moved: &Named,
        target: &Named,
        old: Place<'_>,
        new: Place<'_>,
    ) -> Result<()> {
        let what = || shown(new.dir, new.name);
        let holds_both =
            target.is_directory() && old.dir != new.dir && self.is_below(old.dir, target.id)?;
        if target.is_subvolume || target.id.is_stand_in() || holds_both {
            return Err(Error::NotEmpty { what: what() });
        }
        match (moved.is_directory(), target.is_directory()) {
            (false, true) => return Err(Error::IsDirectory { what: what() }),
            (true, false) => return Err(Error::NotDirectory { what: what() }),
            _ => {}
        }
        let item = names.hold(self.txn.core(), target.id)?.item;
        check_flags(target.id, item.flags.get(), false)?;
        if target.is_directory() && item.size.get() != 0 {
            return Err(Error::NotEmpty { what: what() });
        }
        Ok(())
    }
}
