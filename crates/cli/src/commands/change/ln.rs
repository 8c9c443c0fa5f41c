//! `ubtrfs ln`: hard and symbolic links.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use clap::ArgAction;
use ubtrfs_engine::{InodeId, Reservation};
use ubtrfs_ondisk::dir::FileType;

use super::Change;
use crate::edit::Edit;
use crate::failure::{Exit, Failure, Result};
use crate::image::{ChangedImageArgs, Place};
use crate::output::Output;
use crate::whole;

/// Give files in an image another name, or make symbolic links
///
/// LINK becomes a name of TARGET; with several TARGETs, or where LINK is a directory, the links are
/// made in it under the TARGETs' own names. Of a symbolic link, TARGET is any text; what is there
/// does not matter.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    override_usage = "ubtrfs ln [OPTIONS] <IMAGE> <TARGET>... <LINK>",
    disable_help_flag = true,
    after_help = "\
Examples:
  ubtrfs ln disk.img /usr/bin/vim /usr/bin/vi
  ubtrfs ln -s disk.img ../usr/share/zoneinfo/UTC /etc/localtime"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// What the links lead to, and last the new name or directory
    #[arg(value_names = ["TARGET", "LINK"], num_args = 2.., required = true)]
    words: Vec<OsString>,
    /// Make symbolic links
    #[arg(short, long)]
    symbolic: bool,
    /// Replace files that have the name
    #[arg(short, long)]
    force: bool,
    /// Take LINK for a name even where it is a symbolic link to a directory
    #[arg(short = 'n', long)]
    no_dereference: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        let Some((link, targets)) = self.words.split_last() else { return Ok(()) };
        let link = link.as_bytes();
        super::only_into_a_directory(edit, targets.len(), link)?;
        edit.each(targets, out, |target, _| self.one(edit, target.as_bytes(), link))
    }
}

impl Args {
    fn one(&self, edit: &Edit<'_>, target: &[u8], link: &[u8]) -> Result<()> {
        let image = edit.image();
        let keeps_link = self.no_dereference
            && image
                .resolve(link)
                .is_ok_and(|id| image.inode(id, link).is_ok_and(|inode| !inode.is_dir()));
        let (place, path) = if keeps_link {
            (image.place_of(link, FileType::Symlink)?, link.to_vec())
        } else {
            edit.destination(link, super::base_name(target), FileType::Symlink)?
        };
        let source = if self.symbolic { None } else { Some(image.resolve(target)?) };
        let there = image.entry(&place, &path)?;
        if there.is_some() && there == source && self.force {
            return Ok(());
        }
        let make = |place: &Place| self.make(edit, source, target, place, &path);
        if self.force { whole::named(edit, &place, &path, make) } else { make(&place) }
    }

    fn make(
        &self,
        edit: &Edit<'_>,
        source: Option<InodeId>,
        target: &[u8],
        place: &Place,
        path: &[u8],
    ) -> Result<()> {
        let Place { dir, name } = place;
        match source {
            Some(id) => edit.under_handle("linking", path, Reservation::create(0), |handle| {
                handle.link(*dir, name, id)
            }),
            None if target.is_empty() => {
                Err(Failure::new(Exit::Usage, "linking", "a symbolic link leads somewhere"))
            }
            None => {
                let new = edit.new_inode(0o120_777);
                edit.under_handle("linking", path, Reservation::create(0), |handle| {
                    handle.symlink(*dir, name, target, &new).map(|_| ())
                })
            }
        }
    }
}
