//! `ubtrfs mkdir`: directories.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use super::Change;
use super::chmod::{self, Mode};
use crate::edit::Edit;
use crate::failure::Result;
use crate::image::{ChangedImageArgs, Place};
use crate::output::Output;

/// Make directories in an image
///
/// They are root's, with permissions 0755, unless something else is asked for.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs mkdir disk.img /srv /var/tmp
  ubtrfs mkdir -p -m 700 disk.img /home/me/.ssh"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// Directories to make
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
    /// Make the directories above, too, and accept directories that are there
    #[arg(short, long)]
    parents: bool,
    /// Permissions, as for chmod [default: 755]
    #[arg(short, long, value_name = "MODE", value_parser = Mode::parse)]
    mode: Option<Mode>,
}

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        edit.each(&self.paths, out, |path, _| {
            let path = path.as_bytes();
            if self.parents { self.with_parents(edit, path) } else { self.one(edit, path) }
        })
    }
}

impl Args {
    fn one(&self, edit: &Edit<'_>, path: &[u8]) -> Result<()> {
        let place = edit.image().place(path)?;
        self.make(edit, &place, path)
    }

    fn make(&self, edit: &Edit<'_>, place: &Place, path: &[u8]) -> Result<()> {
        let id = edit.create(place, &edit.new_inode(0o040_777), path)?;
        chmod::set_on_new(edit, id, self.mode.as_ref(), 0o777, path)
    }

    fn with_parents(&self, edit: &Edit<'_>, path: &[u8]) -> Result<()> {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        // Nothing stands before a first slash.
        for end in ends.filter(|end| *end > 0).chain([path.len()]) {
            let part = &path[..end];
            let is_last = path[end..].iter().all(|byte| *byte == b'/');
            match edit.image().find_following(part)? {
                Some(id) if edit.image().inode(id, part)?.is_dir() => {}
                Some(_) => {
                    let taken = ubtrfs_engine::Error::Exists { what: String::new() };
                    return Err(edit.image().failure("creating", part, taken));
                }
                // -m is for the directory that was asked for.
                None if is_last => return self.one(edit, part),
                None => {
                    let place = edit.image().place(part)?;
                    edit.create(&place, &edit.new_inode(0o040_777), part)?;
                }
            }
        }
        Ok(())
    }
}
