//! `ubtrfs umount`: unmounts, and waits until all is durable.

use std::path::PathBuf;

use clap::ArgAction;

use crate::commands::mount::source_of;
use crate::failure::{Exit, Failure, Result};

/// Unmount a filesystem that `ubtrfs mount` mounted
///
/// Returns when all that was written is durable in the image, which others can open then.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    disable_help_flag = true,
    after_help = "\
Examples:
  ubtrfs umount /mnt"
)]
pub struct Args {
    /// Where it is mounted
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

/// Unmounts it.
pub fn run(args: &Args) -> Result<Exit> {
    let directory = std::fs::canonicalize(&args.directory)
        .map_err(|error| Failure::io("unmounting", &error).at_path(&args.directory))?;
    let Some(image) = source_of(&directory) else {
        let why = "ubtrfs has nothing mounted there";
        return Err(Failure::new(Exit::Io, "unmounting", why).at_path(&args.directory));
    };
    // Opened before: it may be known by this name only as long as it is mounted.
    let file = std::fs::File::open(&image);
    ubtrfs_fuse::unmount(&directory)
        .map_err(|error| Failure::new(Exit::Io, "unmounting", error).at_path(&args.directory))?;
    if let Ok(file) = file {
        // Who serves it holds the lock until all is durable. One that cannot be waited for is no failure.
        let _ = file.lock_shared();
    }
    Ok(Exit::Done)
}
