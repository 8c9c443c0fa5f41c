//! `ubtrfs umount`: unmounts, and waits until all is durable.

use std::fs::TryLockError;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ArgAction;

use crate::failure::{Exit, Failure, Result};
use crate::mounts;

/// For so long the process that serves may take to end.
const WAIT_MAX: Duration = Duration::from_secs(120);
/// For so long one that only read.
const WAIT_FOR_READER_MAX: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(5);

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
    let Some(mounted) = mounts::on(&directory) else {
        let why = "ubtrfs has nothing mounted there";
        return Err(Failure::new(Exit::Io, "unmounting", why).at_path(&args.directory));
    };
    let failure = |what: &str, error: &dyn std::fmt::Display| {
        Failure::new(Exit::Io, what, error).at_path(&args.directory)
    };
    // Of what cannot be made durable only this tells: nobody hears the process that serves when it ends.
    std::fs::File::open(&directory)
        .and_then(|top| top.sync_all())
        .map_err(|error| Failure::io("making all durable", &error).at_path(&args.directory))?;
    // Opened before: it may be known by this name only as long as it is mounted.
    let file = std::fs::File::open(&mounted.source);
    ubtrfs_fuse::unmount(&directory).map_err(|error| failure("unmounting", &error))?;
    let Ok(file) = file else { return Ok(Exit::Done) };
    // Who serves it holds the lock until all is durable.
    let begun = Instant::now();
    // Who only reads lets others read: he has ended when nobody has the image any more, or others read it, too.
    let is_free = || match mounted.is_read_only {
        true => file.try_lock(),
        false => file.try_lock_shared(),
    };
    while let Err(TryLockError::WouldBlock) = is_free() {
        if mounted.is_read_only && begun.elapsed() > WAIT_FOR_READER_MAX {
            break;
        }
        if begun.elapsed() > WAIT_MAX {
            let why = "unmounted here, but the image is still in use: it is mounted in another \
                       place, too, or somebody else has opened it";
            return Err(failure("waiting for the image", &why));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(Exit::Done)
}
