//! Names and contents that come whole or not at all.
//!
//! What a command makes is complete before it gets its name, and what has the name goes with that
//! step, a rename, and no earlier. So a failure in between leaves what was there; the commit that
//! follows, for the sake of other paths, makes nothing half durable.
//!
//! A file whose inode is to stay gets its contents from an inode without a name that has all of
//! them, and a second one keeps the old ones: both only share extents with it. From the cut of the
//! file until it has the new contents, or the old ones back, nothing commits by itself: a power cut
//! leaves the old contents or the new ones. At a mount other programs may be in the way: a sync of
//! theirs commits in between, and so does what puts the old contents back where they left no room for
//! it in the one transaction.

use ubtrfs_engine::{Inode, InodeId, NewInode, RenameMode, Reservation, SetAttributes};
use ubtrfs_ondisk::inode::flags;

use crate::edit::{Edit, INHERITED_XATTRS};
use crate::failure::{Exit, Failure, Result};
use crate::image::Place;

/// The attribute that a change of a file's contents takes away, as in Linux.
const CAPABILITY: &[u8] = b"security.capability";

/// Makes a name with `make`, in place of what has it: then under another one first, which takes
/// the place over. Directories are not replaced.
pub fn named<T>(
    edit: &Edit<'_>,
    place: &Place,
    path: &[u8],
    make: impl FnOnce(&Place) -> Result<T>,
) -> Result<T> {
    let image = edit.image();
    let Some(there) = image.entry(place, path)? else { return make(place) };
    // Refused before there is another name, which could not be removed from such a directory.
    check_flags(edit, place.dir, path)?;
    check_no_directory(edit, there, path)?;
    let between = free_name(edit, place, path)?;
    let made = make(&between)?;
    let renamed = edit
        .filesystem()
        .rename(between.dir, &between.name, place.dir, &place.name, RenameMode::Replace)
        .map_err(|error| image.failure("replacing", path, error));
    // Of two names of one file, both stay.
    if renamed.is_err() || image.entry(&between, path)?.is_some() {
        let removed = edit.unlink(&between, path);
        renamed.and(removed)?;
    }
    Ok(made)
}

/// Makes a regular file, in place of what has the name: fills it first, then names it.
pub fn file(
    edit: &Edit<'_>,
    place: &Place,
    new: &NewInode,
    path: &[u8],
    fill: impl FnOnce(InodeId) -> Result<()>,
) -> Result<InodeId> {
    // Looked at again when it is named; here, before all is read and written.
    if let Some(there) = edit.image().entry(place, path)? {
        check_no_directory(edit, there, path)?;
    }
    let id = unlinked(edit, place.dir, new, path)?;
    let result = fill(id).and_then(|()| {
        named(edit, place, path, |place| {
            edit.under_handle("creating", path, Reservation::create(0), |handle| {
                handle.link(place.dir, &place.name, id)
            })
        })
    });
    if result.is_err() {
        discard(edit, id);
    }
    result.map(|()| id)
}

/// Gives a regular file that has a name other contents, those that `fill` gives to a file of the
/// same kind. Returns the file that has the name then: another one, with the attributes of the
/// first, unless that has several names.
pub fn contents(
    edit: &Edit<'_>,
    old: &Inode,
    path: &[u8],
    fill: impl FnOnce(InodeId) -> Result<()>,
) -> Result<InodeId> {
    if old.nlink > 1 {
        // The other names are of this inode.
        return contents_of_inode(edit, old, path, fill).map(|()| old.id);
    }
    let place = a_name_of(edit, old, path)?;
    file(edit, &place, &like(edit, old), path, |id| {
        take_over(edit, old, id, path)?;
        fill(id)
    })
}

/// As [`contents`], of a file whose inode is to stay: all its names, and who has it open, have the
/// new contents.
pub fn contents_of_inode(
    edit: &Edit<'_>,
    old: &Inode,
    path: &[u8],
    fill: impl FnOnce(InodeId) -> Result<()>,
) -> Result<()> {
    let place = a_name_of(edit, old, path)?;
    let staged = unlinked(edit, place.dir, &like(edit, old), path)?;
    let result = take_over(edit, old, staged, path)
        .and_then(|()| fill(staged))
        .and_then(|()| replace_from(edit, staged, old, &place, path));
    discard(edit, staged);
    result
}

/// Lets a file have the contents of another one of its kind.
fn replace_from(
    edit: &Edit<'_>,
    staged: InodeId,
    old: &Inode,
    place: &Place,
    path: &[u8],
) -> Result<()> {
    if edit.is_batch() {
        // After a failure nothing is committed.
        return share_all(edit, staged, old.id).map_err(|error| replacing(edit, path, error));
    }
    let kept = unlinked(edit, place.dir, &like(edit, old), path)?;
    let result = take_over(edit, old, kept, path)
        .and_then(|()| {
            let rehearsed = rehearse(edit, staged, kept, old.id);
            rehearsed.map_err(|error| replacing(edit, path, error))
        })
        .and_then(|()| replace_or_put_back(edit, staged, kept, old.id, path));
    discard(edit, kept);
    result
}

/// Lets `kept` have what a file has, and does to `kept` there and back what may be done to the file:
/// what one transaction has no memory or no space for is refused here. Ends with an empty
/// transaction.
fn rehearse(
    edit: &Edit<'_>,
    staged: InodeId,
    kept: InodeId,
    old: InodeId,
) -> ubtrfs_engine::Result<()> {
    share_all(edit, old, kept)?;
    edit.filesystem().commit()?;
    let held = edit.filesystem().hold_commits();
    share_all(edit, staged, kept)?;
    share_all(edit, old, kept)?;
    drop(held);
    edit.filesystem().commit()
}

/// Lets the file have what `staged` has or, where that fails, what it had, which `kept` has.
fn replace_or_put_back(
    edit: &Edit<'_>,
    staged: InodeId,
    kept: InodeId,
    old: InodeId,
    path: &[u8],
) -> Result<()> {
    let held = edit.filesystem().hold_commits();
    let Err(error) = share_all(edit, staged, old) else { return Ok(()) };
    let is_aborted = matches!(error, ubtrfs_engine::Error::Aborted { .. });
    let failure = replacing(edit, path, error);
    if is_aborted {
        // Nothing of this becomes durable.
        return Err(failure);
    }
    let put_back = share_all(edit, kept, old);
    drop(held);
    // What programs at a mount left no room for is done with commits in between.
    Err(match put_back.or_else(|_| share_all(edit, kept, old)) {
        Ok(()) => failure,
        Err(error) => failure.advice_also(&format!("What it had could not be put back: {error}.")),
    })
}

/// Lets a file have all that another one has, and nothing else, to the byte. What is in memory only
/// of the other one, which may be open, is shared, too.
fn share_all(edit: &Edit<'_>, from: InodeId, to: InodeId) -> ubtrfs_engine::Result<()> {
    let filesystem = edit.filesystem();
    filesystem.truncate(to, 0)?;
    filesystem.clone_file(from, to)
}

fn replacing(edit: &Edit<'_>, path: &[u8], error: ubtrfs_engine::Error) -> Failure {
    edit.image().failure("replacing", path, error)
}

/// One of a file's names.
fn a_name_of(edit: &Edit<'_>, file: &Inode, path: &[u8]) -> Result<Place> {
    let links = edit.filesystem().links(file.id).map_err(|error| replacing(edit, path, error))?;
    let link = links.into_iter().next().ok_or_else(|| {
        let what = format!("a name of {}", file.id);
        replacing(edit, path, ubtrfs_engine::Error::NotFound { what })
    })?;
    Ok(Place { dir: link.parent, name: link.name })
}

/// What an inode in the place of another one begins with.
fn like(edit: &Edit<'_>, old: &Inode) -> NewInode {
    let mut new = NewInode::new(old.mode, edit.now());
    (new.uid, new.gid, new.atime, new.otime) = (old.uid, old.gid, old.atime, old.otime);
    new
}

fn unlinked(edit: &Edit<'_>, dir: InodeId, new: &NewInode, path: &[u8]) -> Result<InodeId> {
    let reservation = Reservation::create(INHERITED_XATTRS);
    edit.under_handle("creating", path, reservation, |handle| handle.create_unlinked(dir, new))
}

/// Removes a file without a name that is not needed any more.
fn discard(edit: &Edit<'_>, id: InodeId) {
    // What fails here is done with a later commit, or by the next session.
    let _ = edit.filesystem().evict_now_or_later(id);
}

/// Flags, which say how data is kept, and extended attributes.
fn take_over(edit: &Edit<'_>, old: &Inode, id: InodeId, path: &[u8]) -> Result<()> {
    check_flags(edit, old.id, path)?;
    let flags = Some(old.flags & !flags::RO_VERITY);
    edit.set_attributes(id, &SetAttributes { flags, ..SetAttributes::default() }, path)?;
    let failed = |error| edit.image().failure("replacing", path, error);
    for (name, value) in edit.filesystem().xattrs(old.id).map_err(failed)? {
        if name != CAPABILITY {
            edit.under_handle("replacing", path, Reservation::items(3), |handle| {
                handle.set_xattr(id, &name, &value)
            })?;
        }
    }
    Ok(())
}

fn check_no_directory(edit: &Edit<'_>, id: InodeId, path: &[u8]) -> Result<()> {
    if !edit.image().inode(id, path)?.is_dir() {
        return Ok(());
    }
    Err(Failure::new(Exit::Io, "replacing", "it is a directory")
        .at_name(path)
        .at_path(edit.image().path()))
}

/// Refuses what cannot be removed, or removed from.
fn check_flags(edit: &Edit<'_>, id: InodeId, path: &[u8]) -> Result<()> {
    let inode = edit.image().inode(id, path)?;
    let flag = if inode.flags & flags::IMMUTABLE != 0 {
        "is immutable"
    } else if inode.flags & flags::APPEND != 0 {
        "can only be appended to"
    } else {
        return Ok(());
    };
    let error = ubtrfs_engine::Error::NotPermitted { what: id.to_string(), flag };
    Err(edit.image().failure("replacing", path, error))
}

/// A name that the directory does not have.
fn free_name(edit: &Edit<'_>, place: &Place, path: &[u8]) -> Result<Place> {
    for number in 0_u32.. {
        let name = format!(".ubtrfs-{number}").into_bytes();
        let candidate = Place { dir: place.dir, name };
        if edit.image().entry(&candidate, path)?.is_none() {
            return Ok(candidate);
        }
    }
    Err(Failure::new(Exit::Io, "replacing", "no free name").at_name(path))
}

#[cfg(test)]
mod tests;
