//! `ubtrfs umount`: unmounts, and waits until all is durable.

use std::fs::{File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::ArgAction;
use rustix::io::Errno;

use crate::failure::{self, Exit, Failure, Result};
use crate::image::mount_at;
use crate::live;
use crate::mounts::{self, Mounted};

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
    let mounted = find(&args.directory)?;
    let directory = mounted.directory.clone();
    let failure = |what: &str, error: &dyn std::fmt::Display| {
        Failure::new(Exit::Io, what, error).at_path(&args.directory)
    };
    // Of what cannot be made durable only this tells: nobody hears the process that serves when it ends.
    if let Some(exit) = make_durable(&mounted)
        .map_err(|error| Failure::io("making all durable", &error).at_path(&args.directory))?
    {
        return Ok(exit);
    }
    // Opened before: it may be known by this name only as long as it is mounted.
    let file = File::open(&mounted.source);
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

/// What this command has mounted on a directory, whether or not anybody serves it.
fn find(directory: &Path) -> Result<Mounted> {
    if let Some(mounted) = mount_at(directory) {
        return Ok(mounted);
    }
    // Of one that nobody serves not even the directory can be looked at.
    let by_parent = directory.parent().zip(directory.file_name()).and_then(|(parent, name)| {
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        mounts::on(&std::fs::canonicalize(parent).ok()?.join(name))
    });
    if let Some(mounted) = by_parent {
        return Ok(mounted);
    }
    std::fs::metadata(directory)
        .map_err(|error| Failure::io("unmounting", &error).at_path(directory))?;
    let why = "ubtrfs has nothing mounted there";
    Err(Failure::new(Exit::Io, "unmounting", why).at_path(directory))
}

/// What programs wrote is durable then, or lost and told of. Returns what to exit with where who serves has said that something is lost.
fn make_durable(mounted: &Mounted) -> io::Result<Option<Exit>> {
    if !mounted.is_read_only
        && let Ok(answer) = live::sync(mounted)
        && answer.exit != Exit::Done.code()
    {
        let _ = io::stderr().write_all(&answer.errors);
        return Ok(Some(live::exit_of(&answer).unwrap_or(Exit::Io)));
    }
    // Where commands do not reach who serves, this does.
    match File::open(&mounted.directory).and_then(|top| top.sync_all()) {
        // Nobody serves it: there is nothing left to wait for.
        Err(error) if is_unserved(&error) => {
            failure::say("ubtrfs: note: nobody served it any more; what was not synced is lost");
            Ok(None)
        }
        result => result.map(|()| None),
    }
}

fn is_unserved(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOTCONN | Errno::CONNABORTED))
}
