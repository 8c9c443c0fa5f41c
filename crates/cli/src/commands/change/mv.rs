//! `ubtrfs mv`: other names and places.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use ubtrfs_engine::{Error, RenameMode};

use super::Change;
use crate::edit::Edit;
use crate::failure::{Failure, Result};
use crate::image::{ChangedImageArgs, Place};
use crate::output::Output;

/// Rename or move files and directories in an image
///
/// With several SOURCEs, or where DEST is a directory, they are moved into it. A file that has the
/// name is replaced, and an empty directory by a directory. Nothing is copied: what lies in another
/// subvolume is refused, except a whole subvolume.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    override_usage = "ubtrfs mv [OPTIONS] <IMAGE> <SOURCE>... <DEST>",
    after_help = "\
Examples:
  ubtrfs mv disk.img /etc/motd /etc/motd.old
  ubtrfs mv -T disk.img /new /current         the name /current, even if it is a directory
  ubtrfs mv --exchange disk.img /a /b"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// What is moved, and last the new name or directory
    #[arg(value_names = ["SOURCE", "DEST"], num_args = 2.., required = true)]
    words: Vec<OsString>,
    /// Replace nothing: refuse names that are taken
    #[arg(short, long, conflicts_with = "exchange")]
    no_clobber: bool,
    /// Take DEST for a name even where it is a directory
    #[arg(short = 'T', long)]
    no_target_directory: bool,
    /// Let both change places
    #[arg(long)]
    exchange: bool,
}

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        let Some((dest, sources)) = self.words.split_last() else { return Ok(()) };
        let dest = dest.as_bytes();
        if sources.len() > 1 && (self.no_target_directory || self.exchange) {
            let option = if self.exchange { "--exchange" } else { "-T" };
            return Err(Failure::usage("mv", format!("{option} takes one SOURCE")));
        }
        super::only_into_a_directory(edit, sources.len(), dest)?;
        edit.each(sources, out, |source, _| self.one(edit, source.as_bytes(), dest))
    }
}

impl Args {
    fn one(&self, edit: &Edit<'_>, source: &[u8], dest: &[u8]) -> Result<()> {
        let image = edit.image();
        let from = image.place(source)?;
        let id = image.resolve(source)?;
        let kind = image.inode(id, source)?.file_type();
        let (to, path) = if self.no_target_directory || self.exchange {
            (image.place_of(dest, kind)?, dest.to_vec())
        } else {
            edit.destination(dest, &from.name, kind)?
        };
        let mode = match (self.exchange, self.no_clobber) {
            (true, _) => RenameMode::Exchange,
            (false, true) => RenameMode::NoReplace,
            (false, false) => RenameMode::Replace,
        };
        let Place { dir, name } = &to;
        let is_another_name = (from.dir, &from.name) != (*dir, name);
        if mode == RenameMode::Replace && is_another_name && image.entry(&to, &path)? == Some(id) {
            // To rename(2) two names of one file are there already, both.
            let gone = edit.filesystem().unlink(from.dir, &from.name);
            return gone.map_err(|error| image.failure("moving", source, error));
        }
        edit.filesystem().rename(from.dir, &from.name, *dir, name, mode).map_err(|error| {
            let other_subvolume = matches!(error, Error::OtherSubvolume { .. });
            let failure = image.failure("moving", &path, error);
            if other_subvolume {
                return failure.advice("Copy it with `ubtrfs cp -a`, then remove it.");
            }
            failure
        })
    }
}
