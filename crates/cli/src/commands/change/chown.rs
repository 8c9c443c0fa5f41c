//! `ubtrfs chown`: owners.

use std::ffi::OsString;

use clap::ArgAction;
use ubtrfs_engine::{Reservation, SetAttributes};
use ubtrfs_ondisk::dir::FileType;

use super::{Below, Change, each_below};
use crate::edit::Edit;
use crate::failure::Result;
use crate::image::ChangedImageArgs;
use crate::output::Output;

/// Change owners in an image
///
/// OWNER is UID, UID:GID or :GID, in numbers: the names of this machine need not be those of the image.
/// As in Linux, set-user-ID and set-group-ID bits and capabilities of files go. Symbolic links are
/// followed, unless -h or -R is given: with -R, as GNU chown does it, links are changed themselves,
/// those that are named among them, and what they lead to is left alone.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    disable_help_flag = true,
    after_help = "\
Examples:
  ubtrfs chown disk.img 1000 /home/me/notes.txt
  ubtrfs chown -R disk.img 1000:1000 /home/me"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// User and group, as numbers
    #[arg(value_name = "OWNER", value_parser = Owner::parse)]
    owner: Owner,
    /// Files and directories
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
    /// Change directories with all below them
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Change symbolic links, not what they lead to, as -R does by itself
    #[arg(short = 'h', long)]
    no_dereference: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

/// What to change of an owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// The user.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
}

impl Owner {
    /// Reads `UID`, `UID:GID` or `:GID`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let number = |text: &str| match text.parse::<u32>() {
            // All ones means "leave it" to the kernel.
            Ok(u32::MAX) | Err(_) => {
                Err(format!("'{text}' is not a number; names are not known here"))
            }
            Ok(id) => Ok(Some(id)),
        };
        match text.split_once(':') {
            None => Ok(Self { uid: number(text)?, gid: None }),
            Some(("", gid)) => Ok(Self { uid: None, gid: number(gid)? }),
            Some((uid, "")) => Ok(Self { uid: number(uid)?, gid: None }),
            Some((uid, gid)) => Ok(Self { uid: number(uid)?, gid: number(gid)? }),
        }
    }
}

const CAPABILITY: &[u8] = b"security.capability";

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        let follow = !self.recursive && !self.no_dereference;
        let options = Below { recursive: self.recursive, follow };
        let image = edit.image();
        each_below(edit, &self.paths, options, out, |id, path| {
            let inode = image.inode(id, path)?;
            let mut attributes = SetAttributes {
                uid: self.owner.uid,
                gid: self.owner.gid,
                ..SetAttributes::default()
            };
            let mut has_capability = false;
            if inode.file_type() == FileType::Regular {
                attributes.mode = Some(without_set_id(inode.mode));
                let value = image.filesystem().xattr(id, CAPABILITY);
                has_capability =
                    value.map_err(|error| image.failure("reading", path, error))?.is_some();
            }
            edit.under_handle("changing the owner", path, Reservation::items(3), |handle| {
                handle.set_attributes(id, &attributes)?;
                if has_capability { handle.remove_xattr(id, CAPABILITY) } else { Ok(()) }
            })
        })
    }
}

/// Without the bits that a new owner must not inherit; set-group-ID without execution is something
/// else, mandatory locking.
fn without_set_id(mode: u32) -> u32 {
    let set_gid = if mode & 0o010 != 0 { 0o2000 } else { 0 };
    mode & !(0o4000 | set_gid)
}
