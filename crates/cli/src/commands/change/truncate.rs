//! `ubtrfs truncate`: lengths.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use ubtrfs_ondisk::dir::FileType;

use super::Change;
use crate::edit::Edit;
use crate::failure::Result;
use crate::image::ChangedImageArgs;
use crate::output::Output;
use crate::size;

/// Cut off or extend files in an image
///
/// A file that is not there is made. SIZE may begin with + or - to make files longer or shorter by that
/// much. What is added is a hole and reads as zeros.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs truncate -s 0 disk.img /var/log/messages
  ubtrfs truncate -s +1G disk.img /vm/box1.raw"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// Files
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
    /// The length, as `ubtrfs help sizes` says, or a change of it
    #[arg(short, long, value_name = "SIZE", value_parser = Length::parse, allow_hyphen_values = true)]
    size: Length,
    /// Make nothing
    #[arg(short = 'c', long)]
    no_create: bool,
}

/// A length, or how it changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Length {
    Is(u64),
    Grows(u64),
    Shrinks(u64),
}

impl Length {
    fn parse(text: &str) -> Result<Self, String> {
        if let Some(text) = text.strip_prefix('+') {
            return size::parse(text).map(Self::Grows);
        }
        match text.strip_prefix('-') {
            Some(text) => size::parse(text).map(Self::Shrinks),
            None => size::parse(text).map(Self::Is),
        }
    }

    fn of(self, before: u64) -> u64 {
        match self {
            Self::Is(bytes) => bytes,
            Self::Grows(bytes) => before.saturating_add(bytes),
            Self::Shrinks(bytes) => before.saturating_sub(bytes),
        }
    }
}

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        edit.each(&self.paths, out, |path, _| {
            let path = path.as_bytes();
            let id = match edit.image().find_following(path)? {
                Some(id) => id,
                None if self.no_create => return Ok(()),
                None => {
                    let place = edit.image().place_of(path, FileType::Regular)?;
                    let new = edit.new_inode(0o100_666);
                    edit.create(&place, &new, path)?
                }
            };
            let before = edit.image().inode(id, path)?.size_bytes;
            edit.filesystem()
                .truncate(id, self.size.of(before))
                .map_err(|error| edit.image().failure("truncating", path, error))
        })
    }
}
