//! `ubtrfs touch`: times.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use clap::ArgAction;
use ubtrfs_engine::{InodeId, SetAttributes};
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_rt::Time;

use super::Change;
use crate::edit::Edit;
use crate::failure::Result;
use crate::image::ChangedImageArgs;
use crate::output::Output;
use crate::output::time;

/// Set the times of files in an image, and make those that are not there
///
/// Access and modification time become now, or what -d or -r say. A TIME is 2024-11-20, 2024-11-20
/// 12:19:05.5 in the time zone of this machine, the same with T between and Z or +01:00 behind,
/// @SECONDS since 1970, or now.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    disable_help_flag = true,
    after_help = "\
Examples:
  ubtrfs touch disk.img /.autorelabel
  ubtrfs touch -d '2024-11-20 12:19' disk.img /etc/motd
  ubtrfs touch -m -r /etc/motd disk.img /etc/issue"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// Files and directories
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
    /// The access time only
    #[arg(short)]
    access: bool,
    /// The modification time only
    #[arg(short)]
    modification: bool,
    /// Make nothing
    #[arg(short = 'c', long)]
    no_create: bool,
    /// This time, not now
    #[arg(short, long, value_name = "TIME", value_parser = parse_time)]
    date: Option<When>,
    /// The times of this file in the image, not now
    #[arg(short, long, value_name = "PATH", conflicts_with = "date")]
    reference: Option<OsString>,
    /// Symbolic links, not what they lead to
    #[arg(short = 'h', long)]
    no_dereference: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

/// A time that was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum When {
    Now,
    At(Time),
}

fn parse_time(text: &str) -> Result<When, String> {
    if text == "now" {
        return Ok(When::Now);
    }
    time::parse(text).map(When::At)
}

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        let (atime, mtime) = match (&self.reference, self.date) {
            (Some(path), _) => {
                let path = path.as_bytes();
                let inode = edit.image().inode(self.find(edit, path)?, path)?;
                (inode.atime, inode.mtime)
            }
            (None, Some(When::At(time))) => (time, time),
            (None, Some(When::Now) | None) => (edit.now(), edit.now()),
        };
        let both = self.access == self.modification;
        let attributes = SetAttributes {
            atime: (both || self.access).then_some(atime),
            mtime: (both || self.modification).then_some(mtime),
            ..SetAttributes::default()
        };
        edit.each(&self.paths, out, |path, _| {
            let path = path.as_bytes();
            let id = match self.find(edit, path) {
                Err(failure) if failure.is_not_found() && self.no_create => return Ok(()),
                Err(failure) if failure.is_not_found() && !self.no_dereference => {
                    let place = edit.image().place_of(path, FileType::Regular)?;
                    let new = edit.new_inode(0o100_666);
                    edit.create(&place, &new, path)?
                }
                found => found?,
            };
            edit.set_attributes(id, &attributes, path)
        })
    }
}

impl Args {
    fn find(&self, edit: &Edit<'_>, path: &[u8]) -> Result<InodeId> {
        if self.no_dereference {
            edit.image().resolve(path)
        } else {
            edit.image().resolve_following(path)
        }
    }
}
