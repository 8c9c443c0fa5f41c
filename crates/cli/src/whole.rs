//! Names and contents that come whole or not at all.
//!
//! What a command makes is complete before it gets its name, and what has the name goes with that
//! step, a rename, and no earlier. So a failure in between leaves what was there; the commit that
//! follows, for the sake of other paths, makes nothing half durable.

use ubtrfs_engine::{Inode, InodeId, NewInode, RenameMode, Reservation, SetAttributes};
use ubtrfs_ondisk::FileOffset;
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
    discard_failed(edit, id, result).map(|()| id)
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
    let image = edit.image();
    let failed = |error| image.failure("replacing", path, error);
    let links = edit.filesystem().links(old.id).map_err(failed)?;
    let link = links.into_iter().next().ok_or_else(|| {
        failed(ubtrfs_engine::Error::NotFound { what: format!("a name of {}", old.id) })
    })?;
    let place = Place { dir: link.parent, name: link.name };
    let mut new = NewInode::new(old.mode, edit.now());
    (new.uid, new.gid, new.atime, new.otime) = (old.uid, old.gid, old.atime, old.otime);
    if old.nlink == 1 {
        return file(edit, &place, &new, path, |id| {
            take_over(edit, old, id, path)?;
            fill(id)
        });
    }
    // The other names are of this inode: it takes the extents over, once all of them are there.
    let staged = unlinked(edit, place.dir, &new, path)?;
    let result = take_over(edit, old, staged, path).and_then(|()| fill(staged)).and_then(|()| {
        let size_bytes = image.inode(staged, path)?.size_bytes;
        edit.filesystem().truncate(old.id, 0).map_err(failed)?;
        if size_bytes > 0 {
            let all = FileOffset(0)..FileOffset(size_bytes);
            edit.filesystem().clone_range(staged, all, old.id, FileOffset(0)).map_err(failed)?;
        }
        Ok(())
    });
    discard_failed(edit, staged, result)?;
    edit.filesystem().evict(staged).map_err(failed)?;
    Ok(old.id)
}

fn unlinked(edit: &Edit<'_>, dir: InodeId, new: &NewInode, path: &[u8]) -> Result<InodeId> {
    let reservation = Reservation::create(INHERITED_XATTRS);
    edit.under_handle("creating", path, reservation, |handle| handle.create_unlinked(dir, new))
}

/// Removes a file without a name after a failure.
fn discard_failed(edit: &Edit<'_>, id: InodeId, result: Result<()>) -> Result<()> {
    if result.is_err() {
        // The failure is what is reported; the next session removes what stays.
        let _ = edit.filesystem().evict(id);
    }
    result
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
