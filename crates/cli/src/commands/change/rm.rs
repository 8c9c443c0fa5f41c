//! `ubtrfs rm`: files and directories go.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use ubtrfs_engine::InodeId;
use ubtrfs_ondisk::InodeNo;

use super::Change;
use crate::edit::Edit;
use crate::failure::{Exit, Failure, Result};
use crate::image::{ChangedImageArgs, Place};
use crate::output::Output;
use crate::walk::{self, Walk};

/// Remove files from an image, and with -r directories
///
/// Subvolumes are not removed; see `ubtrfs help subvolume delete`.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs rm disk.img /etc/machine-id
  ubtrfs rm -rf disk.img /var/cache/apt /var/lib/apt/lists"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// What is removed
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
    /// Remove directories with all that is in them
    #[arg(short, visible_short_alias = 'R', long)]
    recursive: bool,
    /// Remove empty directories, too
    #[arg(short, long)]
    dir: bool,
    /// Say nothing of what is not there
    #[arg(short, long)]
    force: bool,
}

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        edit.each(&self.paths, out, |path, out| {
            let path = path.as_bytes();
            match edit.image().resolve(path) {
                Err(failure) if self.force && failure.is_not_found() => Ok(()),
                Err(failure) => Err(failure),
                Ok(id) => self.one(edit, id, path, out),
            }
        })
    }
}

impl Args {
    fn one(&self, edit: &Edit<'_>, id: InodeId, path: &[u8], out: &mut Output) -> Result<()> {
        let image = edit.image();
        if id == image.start() {
            return Err(refused(edit, path, "the directory in which paths begin stays"));
        }
        let place = image.place(path)?;
        if !image.inode(id, path)?.is_dir() {
            return edit.unlink(&place, path);
        }
        if self.recursive {
            return tree(edit, place, path, out);
        }
        if self.dir {
            return rmdir(edit, &place, path);
        }
        Err(refused(edit, path, "it is a directory").advice("Give -r (--recursive), too."))
    }
}

fn refused(edit: &Edit<'_>, path: &[u8], why: &str) -> Failure {
    Failure::new(Exit::Io, "removing", why).at_name(path).at_path(edit.image().path())
}

/// Removes a directory that is no subvolume.
fn rmdir(edit: &Edit<'_>, place: &Place, path: &[u8]) -> Result<()> {
    let image = edit.image();
    if let Some(id) = image.entry(place, path)?
        && id.inode == InodeNo::SUBVOLUME_ROOT
    {
        return Err(refused(edit, path, "it is a subvolume")
            .advice("`ubtrfs subvolume delete` deletes it."));
    }
    edit.filesystem()
        .rmdir(place.dir, &place.name)
        .map_err(|error| image.failure("removing", path, error))
}

/// Removes a directory and what is in it: files while it goes down, the directories afterwards.
fn tree(edit: &Edit<'_>, place: Place, path: &[u8], out: &mut Output) -> Result<()> {
    let image = edit.image();
    let Some(top) = image.entry(&place, path)? else { return Ok(()) };
    let mut walk = Walk::new(top, path.to_vec());
    let mut directories = vec![(place, path.to_vec())];
    while let Some(visit) = walk.next() {
        if visit.id.inode == InodeNo::SUBVOLUME_ROOT {
            // Reported when its name is to be removed.
            continue;
        }
        let children = walk::children(image, visit.id, &visit.path)?;
        for child in &children {
            let place = Place { dir: visit.id, name: child.name.clone() };
            let path = walk::join(&visit.path, &child.name);
            if child.is_directory {
                directories.push((place, path));
            } else {
                edit.tolerate(edit.unlink(&place, &path), out)?;
            }
        }
        walk.enter(&visit, &children)?;
    }
    for (place, path) in directories.iter().rev() {
        edit.tolerate(rmdir(edit, place, path), out)?;
    }
    Ok(())
}
