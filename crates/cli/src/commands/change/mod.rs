//! Commands that change what is in an image, on a command line of their own or as a line of a
//! batch.

pub mod batch;
pub mod chmod;
pub mod chown;
pub mod cp;
pub mod ln;
pub mod mkdir;
pub mod mknod;
pub mod mv;
pub mod property;
pub mod put;
pub mod rm;
pub mod setfattr;
pub mod subvolume;
pub mod touch;
pub mod truncate;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use ubtrfs_engine::InodeId;

use crate::edit::{Edit, OnFailure};
use crate::failure::{Exit, Failure, Result};
use crate::image::{ChangedImageArgs, Image};
use crate::output::Output;
use crate::walk::{self, Walk};

/// A command that changes an image.
pub trait Change {
    /// IMAGE and its options.
    fn image(&self) -> &ChangedImageArgs;

    /// Makes the changes. They are committed by the caller.
    ///
    /// # Errors
    /// What ends the command. Failures of single paths are tolerated where the edit says so.
    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()>;

    /// What is to be done once the changes are durable, and need not be done for them to be.
    ///
    /// # Errors
    /// What ends the command; the changes stay.
    fn finish(&self, _image: &Image) -> Result<()> {
        Ok(())
    }
}

/// Makes the changes of one command and commits them.
pub fn run(change: &dyn Change, out: &mut Output) -> Result<Exit> {
    let image = change.image().write()?;
    let edit = Edit::new(&image, OnFailure::GoOn);
    let result = change.apply(&edit, out);
    // What was done for other paths stays done.
    commit(&image)?;
    result?;
    change.finish(&image)?;
    Ok(Exit::Done)
}

/// Makes the changes durable.
pub fn commit(image: &Image) -> Result<()> {
    image
        .filesystem()
        .commit()
        .map_err(|error| Failure::engine("committing", error).at_path(image.path()))
}

/// Several things go only into a directory.
fn only_into_a_directory(edit: &Edit<'_>, count: usize, path: &[u8]) -> Result<()> {
    if count < 2 || edit.image().inode(edit.image().resolve_following(path)?, path)?.is_dir() {
        return Ok(());
    }
    Err(Failure::new(Exit::Io, "finding", "not a directory, and there are several sources")
        .at_name(path)
        .at_path(edit.image().path()))
}

/// The last name of a path.
pub fn base_name(path: &[u8]) -> &[u8] {
    path.split(|byte| *byte == b'/').rfind(|name| !name.is_empty()).unwrap_or(b"/")
}

/// Does something to what each path names and, where that is wanted, to all below.
fn each_below(
    edit: &Edit<'_>,
    paths: &[OsString],
    options: Below,
    out: &mut Output,
    mut change: impl FnMut(InodeId, &[u8]) -> Result<()>,
) -> Result<()> {
    let image = edit.image();
    edit.each(paths, out, |path, out| {
        let path = path.as_bytes();
        let id =
            if options.follow { image.resolve_following(path)? } else { image.resolve(path)? };
        if !options.recursive || !image.inode(id, path)?.is_dir() {
            return change(id, path);
        }
        let mut walk = Walk::new(id, path.to_vec());
        while let Some(visit) = walk.next() {
            let result = change(visit.id, &visit.path);
            edit.tolerate(result, out)?;
            let children = walk::children(image, visit.id, &visit.path)?;
            for child in children.iter().filter(|child| !child.is_directory) {
                if child.is_symlink && options.follow {
                    continue;
                }
                let result = change(child.id, &walk::join(&visit.path, &child.name));
                edit.tolerate(result, out)?;
            }
            walk.enter(&visit, &children)?;
        }
        Ok(())
    })
}

/// How [`each_below`] goes.
#[derive(Clone, Copy)]
struct Below {
    /// Into directories.
    recursive: bool,
    /// Through symbolic links that are named; those below are then left alone.
    follow: bool,
}
