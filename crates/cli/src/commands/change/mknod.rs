//! `ubtrfs mknod`: device nodes, fifos and sockets.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use clap::ValueEnum;
use ubtrfs_engine::device_number;

use super::Change;
use super::chmod::{self, Mode};
use crate::edit::Edit;
use crate::failure::{Failure, Result};
use crate::image::ChangedImageArgs;
use crate::output::Output;

/// Of a device number of Linux, which has 32 bits.
const MAJOR_MAX: u32 = 0xfff;
const MINOR_MAX: u32 = 0xf_ffff;

/// What is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Kind {
    /// A block device
    B,
    /// A character device
    C,
    /// As c
    U,
    /// A fifo
    P,
    /// A socket
    S,
}

impl Kind {
    fn type_bits(self) -> u32 {
        match self {
            Self::B => 0o060_000,
            Self::C | Self::U => 0o020_000,
            Self::P => 0o010_000,
            Self::S => 0o140_000,
        }
    }

    fn is_device(self) -> bool {
        !matches!(self, Self::P | Self::S)
    }
}

/// Make a device node, a fifo or a socket in an image
///
/// It is root's, with permissions 0644, unless something else is asked for. No root is needed: the
/// node means something to the system that mounts the image.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs mknod -m 666 disk.img /dev/null c 1 3
  ubtrfs mknod disk.img /run/initctl p"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// What to make
    #[arg(value_name = "PATH")]
    path: OsString,
    /// Its type: b (block device), c or u (character device), p (fifo), s (socket)
    #[arg(value_name = "TYPE", value_enum, hide_possible_values = true)]
    kind: Kind,
    /// Major number of a device
    #[arg(value_name = "MAJOR", value_parser = clap::value_parser!(u32).range(..=i64::from(MAJOR_MAX)))]
    major: Option<u32>,
    /// Minor number of a device
    #[arg(value_name = "MINOR", value_parser = clap::value_parser!(u32).range(..=i64::from(MINOR_MAX)))]
    minor: Option<u32>,
    /// Permissions, as for chmod [default: 644]
    #[arg(short, long, value_name = "MODE", value_parser = Mode::parse)]
    mode: Option<Mode>,
}

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, _out: &mut Output) -> Result<()> {
        let rdev = match (self.kind.is_device(), self.major, self.minor) {
            (true, Some(major), Some(minor)) => device_number(major, minor),
            (false, None, None) => 0,
            (true, ..) => {
                return Err(Failure::usage("mknod", "a device needs MAJOR and MINOR"));
            }
            (false, ..) => {
                return Err(Failure::usage("mknod", "a fifo or socket has no MAJOR and MINOR"));
            }
        };
        let path = self.path.as_bytes();
        let place = edit.image().place(path)?;
        let mut new = edit.new_inode(self.kind.type_bits() | 0o666);
        new.rdev = rdev;
        let id = edit.create(&place, &new, path)?;
        chmod::set_on_new(edit, id, self.mode.as_ref(), 0o666, path)
    }
}
