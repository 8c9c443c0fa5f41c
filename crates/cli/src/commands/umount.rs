//! `ubtrfs umount`: unmounts, and waits until all is durable.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::failure::{self, Exit, Failure, Result};
use crate::live::{self, Synced};
use crate::mount_helper;
use crate::mounts::{self, Mounted};
use crate::output::quote;
use clap::ArgAction;
use ubtrfs_fuse::ServingProcess;

/// For so long the process that serves may take to end.
const WAIT_MAX: Duration = Duration::from_secs(120);
/// For so long one that only read.
const WAIT_FOR_READER_MAX: Duration = Duration::from_secs(2);
/// And one that was made to end.
const WAIT_FOR_FORCED_MAX: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Unmount a filesystem that `ubtrfs mount` mounted
///
/// Returns when all that was written is durable in the image, which others can open then; where
/// it is to be seen in another place, too (mount --bind), that stays, and the image in use. A
/// filesystem that has stopped for an error is unmounted all the same; the exit code is the error's.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    disable_help_flag = true,
    after_help = "\
Examples:
  ubtrfs umount /mnt

umount(8) waits likewise where this command is linked as /sbin/umount.fuse.ubtrfs and as
/sbin/umount.fuse (which gives back to it what others have mounted); without that it returns
while the image is still being written."
)]
pub struct Args {
    /// Where it is mounted
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Take it off now; it ends when nobody uses it any more, which is not waited for
    #[arg(short, long)]
    lazy: bool,
    /// Take it off though who serves it does not answer: what was not durable may be lost
    #[arg(short, long)]
    force: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

/// Unmounts it.
pub fn run(args: &Args) -> Result<Exit> {
    mount_helper::enter_namespace()?;
    let mounted = find(&args.directory)?;
    let failure = |what: &str, error: &dyn std::fmt::Display| {
        Failure::new(Exit::Io, what, error).at_path(&args.directory)
    };
    // Before fusermount3 says so of whoever may have it in use.
    let me = ubtrfs_fuse::user();
    if !me.is_root() && me.as_raw() != mounted.uid {
        let why = format!("user {} has mounted it: he can unmount it, and root", mounted.uid);
        return Err(failure("unmounting", &why));
    }
    if args.lazy {
        ubtrfs_fuse::unmount_when_unused(&mounted.directory, mounted.id)
            .map_err(|error| failure("unmounting", &error))?;
        return Ok(Exit::Done);
    }
    // Of what cannot be made durable only this tells: nobody hears the process that serves when it ends. Who does not answer is not asked.
    let synced = match args.force {
        true => Synced::Durable,
        false => live::make_durable(&mounted)
            .map_err(|error| Failure::io("making all durable", &error).at_path(&args.directory))?,
    };
    let exit = match synced {
        Synced::Durable => Exit::Done,
        // Who has them can write them elsewhere.
        Synced::Lost(exit) => return Ok(exit),
        Synced::Stopped(exit) => exit,
    };
    // That took its time, in which its directory may have got another name, and its place another mount.
    let mounted = mounts::as_it_is_now(&mounted).ok_or_else(|| {
        failure("unmounting", &"something else is mounted there by now, or nothing")
    })?;
    let directory = &mounted.directory;
    // Looked for before: it listens, and the image may be known by this name, only as long as it is mounted.
    let serving = {
        let mounted = mounted.clone();
        let found = live::within(mounts::LOOK_WAIT_MAX, move || Serving::of(&mounted));
        found.unwrap_or(Serving::Unknown)
    };
    let unmounted = match args.force {
        true => ubtrfs_fuse::unmount_by_force(directory, mounted.id),
        false => ubtrfs_fuse::unmount(directory, mounted.id),
    };
    unmounted.map_err(|error| failure("unmounting", &error))?;
    if exit != Exit::Done {
        failure::say(&format!(
            "ubtrfs: note: {}: unmounted all the same: the filesystem had stopped",
            quote::path(&args.directory)
        ));
    }
    // It is served where else it is to be seen, and all was made durable.
    if mounts::is_anywhere(&mounted) {
        return Ok(exit);
    }
    let waited = serving.wait(mounted.is_read_only, args.force);
    waited.map(|()| exit).map_err(|why| failure("waiting for the image", &why))
}

/// By what is known that who serves a mount has ended, and all is durable.
enum Serving {
    /// Itself.
    Process(ServingProcess),
    /// Where it is not to be reached: the lock of the image, if that is still found by its name.
    Image(File),
    Unknown,
}

impl Serving {
    fn of(mounted: &Mounted) -> Self {
        if let Ok(process) = ServingProcess::of_mount(mounted.uid, &mounted.device) {
            return Self::Process(process);
        }
        // By this name it is below what is mounted, where only who may not answer could look for it.
        if mounted.source.starts_with(&mounted.directory) {
            return Self::Unknown;
        }
        mounted.open_source().map_or(Self::Unknown, Self::Image)
    }

    /// Waits for its end. Says why it went on too long.
    fn wait(&self, is_read_only: bool, was_forced: bool) -> std::result::Result<(), &'static str> {
        let patience = if was_forced { WAIT_FOR_FORCED_MAX } else { WAIT_MAX };
        let has_ended = match self {
            Self::Process(process) => process.wait(patience).unwrap_or(false),
            Self::Image(file) => wait_until_free(file, is_read_only, patience),
            Self::Unknown => true,
        };
        match (has_ended, was_forced) {
            (true, _) => Ok(()),
            (false, true) => {
                Err("unmounted here, but who served it has not let go of the image yet")
            }
            (false, false) => {
                Err("unmounted here, but the image is still in use: it is mounted in another \
                        place, too, or somebody else has opened it")
            }
        }
    }
}

/// Waits for who served a mount, and holds the image's lock until all is durable. Whether that was within `patience`.
fn wait_until_free(file: &File, is_read_only: bool, patience: Duration) -> bool {
    let begun = Instant::now();
    // Who can write shares the image with nobody. A mount that became read-only may still be served by one who can.
    while let Err(TryLockError::WouldBlock) = file.try_lock_shared() {
        if begun.elapsed() > patience {
            return false;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    // Who only reads has ended when nobody has the image any more, or others read it, too.
    let begun = Instant::now();
    while is_read_only
        && let Err(TryLockError::WouldBlock) = file.try_lock()
        && begun.elapsed() < WAIT_FOR_READER_MAX
    {
        std::thread::sleep(LOOK_EVERY);
    }
    // For who else wants it: this process has yet to end. A lock that cannot be given back ends with it.
    let _ = file.unlock();
    true
}

/// What this command has mounted on a directory, or a file, whether or not anybody serves it.
fn find(directory: &Path) -> Result<Mounted> {
    const WHAT: &str = "unmounting";
    let found =
        mounts::at(directory).map_err(|error| Failure::io(WHAT, &error).at_path(directory))?;
    found.ok_or_else(|| {
        let why = "ubtrfs has nothing mounted there";
        Failure::new(Exit::Io, WHAT, why).at_path(directory)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It had the lock until it ended, and who wanted the image in that moment was refused.
    #[test]
    fn image_that_was_waited_for_is_left_to_others() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let [waiting, other] = [(); 2].map(|()| File::open(image.path()).unwrap());
        for is_read_only in [false, true] {
            assert!(wait_until_free(&waiting, is_read_only, Duration::ZERO));
            other.try_lock().unwrap();
            other.unlock().unwrap();
        }
    }
}
