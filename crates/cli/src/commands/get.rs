//! `ubtrfs get`: files of an image, to this machine.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ubtrfs_engine::{Inode, InodeId, MappingKind};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_rt::Time;

use crate::commands::change::base_name;
use crate::edit::{PIECE_BYTES, TAKEN};
use crate::failure::{Exit, Failure, Result};
use crate::image::{Image, ImageArgs};
use crate::output::Output;
use crate::progress::Meter;
use crate::unfinished::Unfinished;

/// Get single files out of an image
///
/// Where TARGET is a directory, the files go into it under their own names, which are also the
/// default. To standard output they go where TARGET is -. Data, permissions and holes come over, with
/// -p the modification time, too. Whole trees, and owners, are got out by `ubtrfs export`.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    override_usage = "ubtrfs get [OPTIONS] <IMAGE> <PATH> [TARGET]\n       ubtrfs get [OPTIONS] -t <DIRECTORY> <IMAGE> <PATH>...",
    after_help = "\
Examples:
  ubtrfs get disk.img /etc/fstab
  ubtrfs get -p disk.img /var/log/messages box1-messages
  ubtrfs get -t logs/ disk.img /var/log/messages /var/log/auth.log"
)]
pub struct Args {
    #[command(flatten)]
    image: ImageArgs,
    /// The file, and where it goes; with -t, files
    #[arg(value_names = ["PATH", "TARGET"], num_args = 1.., required = true)]
    words: Vec<OsString>,
    /// The directory into which all go
    #[arg(short, long, value_name = "DIRECTORY")]
    target_directory: Option<PathBuf>,
    /// Replace files that are there
    #[arg(short, long)]
    force: bool,
    /// Keep the modification time
    #[arg(short, long)]
    preserve: bool,
}

/// How a file is brought out.
#[derive(Clone, Copy)]
struct GetOptions {
    /// A file that is there is replaced.
    force: bool,
    /// With the modification time.
    preserve: bool,
}

/// Gets them.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let options = GetOptions { force: args.force, preserve: args.preserve };
    let (paths, target) = match (&args.target_directory, args.words.as_slice()) {
        (Some(directory), paths) => (paths, directory.clone()),
        (None, [_]) => (args.words.as_slice(), PathBuf::from(".")),
        (None, [path, target]) => (std::slice::from_ref(path), PathBuf::from(target)),
        (None, _) => {
            return Err(Failure::usage("get", "one file and one target at a time")
                .advice("Several files go into a directory: -t DIRECTORY."));
        }
    };
    let goes_out = target.as_os_str() == "-";
    if args.target_directory.is_some() && !goes_out && !target.is_dir() {
        return Err(
            Failure::new(Exit::Io, "writing", "there is no such directory").at_path(&target)
        );
    }
    let mut given = BTreeSet::new();
    for path in paths {
        let path = path.as_bytes();
        let result = image.resolve_following(path).and_then(|id| {
            let inode = image.inode(id, path)?;
            if goes_out {
                return to_stdout(&image, &inode, path, out);
            }
            let target = inside(&target, path);
            if given.contains(&target) {
                return Err(Failure::new(Exit::Io, "replacing", TAKEN).at_path(&target));
            }
            to_file(&image, &inode, path, &target, options)?;
            given.insert(target);
            Ok(())
        });
        out.tolerate(result)?;
    }
    Ok(Exit::Done)
}

fn to_stdout(image: &Image, inode: &Inode, path: &[u8], out: &mut Output) -> Result<()> {
    check_regular(image, inode, path)?;
    let mut file =
        image.filesystem().open_file(inode.id).map_err(|e| image.failure("reading", path, e))?;
    let mut buffer = vec![0; PIECE_BYTES];
    let mut at = 0;
    loop {
        let read = file.read(FileOffset(at), &mut buffer);
        let len = read.map_err(|error| image.failure("reading", path, error))?;
        if len == 0 {
            return Ok(());
        }
        out.bytes(&buffer[..len])?;
        at += len as u64;
    }
}

/// Refuses what is no regular file.
pub fn check_regular(image: &Image, inode: &Inode, path: &[u8]) -> Result<()> {
    let why = match inode.file_type() {
        FileType::Regular => return Ok(()),
        FileType::Directory => "it is a directory",
        _ => "it is no regular file",
    };
    Err(Failure::new(Exit::Io, "reading", why)
        .at_name(path)
        .at_path(image.path())
        .advice("`ubtrfs export` gets out directories and what is in them."))
}

/// Brings a regular file out, under another name first: what has the name stays until all is there.
fn to_file(
    image: &Image,
    inode: &Inode,
    path: &[u8],
    target: &Path,
    options: GetOptions,
) -> Result<()> {
    check_regular(image, inode, path)?;
    check_replaceable(target, options.force)?;
    let failed = |what: &str, error: &io::Error| Failure::io(what, error).at_path(target);
    let partial = partial_name(target);
    // Nobody else reads it before it has its permissions.
    let mut private = File::options();
    private.write(true).create_new(true).mode(0o600);
    let (unfinished, mut file) = Unfinished::make(partial, |partial| private.open(partial))
        .map_err(|error| failed("creating", &error))?;
    copy_out(image, inode.id, inode.size_bytes, path, &mut file, target)?;
    file.set_permissions(fs::Permissions::from_mode(inode.mode & 0o777))
        .map_err(|error| failed("setting permissions", &error))?;
    if options.preserve
        && let Some(mtime) = system_time(inode.mtime)
    {
        file.set_modified(mtime).map_err(|error| failed("setting the time", &error))?;
    }
    drop(file);
    unfinished.rename(target).map_err(|error| failed("writing", &error))
}

/// Where a file goes that is to be at `target`: into it, under its own name, if that is a directory.
pub fn inside(target: &Path, path: &[u8]) -> PathBuf {
    if target.is_dir() {
        target.join(OsString::from_vec(base_name(path).to_vec()))
    } else {
        target.to_owned()
    }
}

/// Refuses a target that is there, unless it may be replaced and is a file.
pub fn check_replaceable(target: &Path, force: bool) -> Result<()> {
    if target.symlink_metadata().is_err() {
        return Ok(());
    }
    if !force {
        return Err(Failure::new(Exit::Io, "creating", "exists already; nothing was changed")
            .at_path(target)
            .advice("Give -f (--force) to replace it, or choose another name."));
    }
    match target.metadata() {
        Ok(metadata) if !metadata.is_file() => {
            Err(Failure::new(Exit::Io, "replacing", "it is no regular file; it stays as it is")
                .at_path(target)
                .advice("To write into a device or pipe, let TARGET be -, and redirect."))
        }
        // A symbolic link that leads nowhere can go.
        _ => Ok(()),
    }
}

/// The name under which a file is written before it is whole.
pub fn partial_name(target: &Path) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(format!(".partial-{}", std::process::id()));
    PathBuf::from(name)
}

/// Copies the data; holes stay holes.
fn copy_out(
    image: &Image,
    id: InodeId,
    size_bytes: u64,
    path: &[u8],
    file: &mut File,
    target: &Path,
) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let read_failed = |error| image.failure("reading", path, error);
    let write_failed = |error: io::Error| Failure::io("writing", &error).at_path(target);
    let filesystem = image.filesystem();
    let mut source = filesystem.open_file(id).map_err(read_failed)?;
    let mut buffer = vec![0; PIECE_BYTES];
    let meter = Meter::new("get");
    for mapping in filesystem.file_extents(id, FileOffset(0)).map_err(read_failed)? {
        let mapping = mapping.map_err(read_failed)?;
        if !matches!(mapping.kind, MappingKind::Data | MappingKind::Inline) {
            continue;
        }
        let end = mapping.offset.0.saturating_add(mapping.len_bytes).min(size_bytes);
        let mut at = mapping.offset.0;
        while at < end {
            let want = usize::try_from(end - at).map_or(PIECE_BYTES, |left| left.min(PIECE_BYTES));
            let len = source.read(FileOffset(at), &mut buffer[..want]).map_err(read_failed)?;
            if len == 0 {
                break;
            }
            file.write_all_at(&buffer[..len], at).map_err(write_failed)?;
            at += len as u64;
            meter.advance("", at, size_bytes);
        }
    }
    file.set_len(size_bytes).map_err(write_failed)?;
    file.flush().map_err(write_failed)
}

fn system_time(time: Time) -> Option<SystemTime> {
    let nanoseconds = Duration::from_nanos(time.nsec.into());
    let seconds = Duration::from_secs(time.sec.unsigned_abs());
    let whole = if time.sec < 0 {
        UNIX_EPOCH.checked_sub(seconds)
    } else {
        UNIX_EPOCH.checked_add(seconds)
    };
    whole?.checked_add(nanoseconds)
}
