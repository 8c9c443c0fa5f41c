//! `ubtrfs import`: a directory or a tar archive becomes a tree in an image.

use std::ffi::OsString;
use std::fs;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

use ubtrfs_archive::FileId;
use ubtrfs_archive::import::{self, ImportOptions};
use ubtrfs_archive::progress::Summary;
use ubtrfs_archive::sink::tree::Owner;
use ubtrfs_engine::Filesystem;
use ubtrfs_rt::Arc;
use ubtrfs_volume::OpenMode;

use crate::commands::mkfs::MakeArgs;
use crate::compress::{self, Compress};
use crate::failure::{Exit, Failure, Result};
use crate::image::{Image, OpenArgs, StartArgs, check_named};
use crate::output::Output;
use crate::progress::Progress;
use crate::target::{Length, Target};

/// A new image without a size begins with a multiple of this.
const GROWS_FROM: u64 = 1 << 20;

/// Bring a directory or a tar archive into an image
///
/// With --mkfs, the filesystem is made first: in a new file, which grows as it needs to unless --size
/// is given, or in a file or device that exists. Without, the files are added to what is there.
///
/// A directory's contents go into PATH, as with `rsync SOURCE/ PATH/`; an archive's members likewise.
/// Owners, permissions, times, hard links, holes, device nodes, extended attributes, ACLs and
/// capabilities are kept. What is in the image already is never replaced: directories are filled, and
/// keep their owners, permissions and attributes; PATH takes those of SOURCE where it was empty. Should
/// an import fail, the image is sound and may hold a part of SOURCE; a file that --mkfs made goes away
/// again. What went or changed while it was read is named on standard error, and the exit code is 1
/// then.
/// A hard link cannot lead from one subvolume into another: with --subvol, a file with names in several
/// becomes a file in each, which share the data, and of which standard error tells.
///
/// Run by fakeroot(1), with --mkfs or without, it takes what that keeps of owners, devices and
/// attributes.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs import --mkfs disk.img photos/
  ubtrfs import --mkfs --compress zstd:9 --shrink root.img root.tar.xz
  ubtrfs import --mkfs --size 8G -L root --subvol home --subvol var/log root.img rootfs/
  ubtrfs import disk.img more/ /photos/more     add to an image that exists
  docker export box | ubtrfs import --mkfs --owner 0:0 box.img -"
)]
pub struct Args {
    /// The image or device
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// A directory, a tar archive (plain, gzip, xz, zstd or bzip2), or - for one on standard input
    #[arg(value_name = "SOURCE")]
    source: PathBuf,
    /// Where in the image it goes; made if missing
    #[arg(value_name = "PATH", default_value = "/")]
    path: OsString,
    /// Make the filesystem first
    #[arg(long)]
    mkfs: bool,
    /// Cut the image off behind the last byte in use when done
    #[arg(long)]
    shrink: bool,
    /// Compress: zlib, lzo or zstd, with a level if wanted (zstd:9)
    #[arg(long, value_name = "METHOD[:LEVEL]", value_parser = compress::parse)]
    compress: Option<Compress>,
    /// Make this directory of SOURCE a subvolume; repeat for each
    #[arg(long, value_name = "PATH")]
    subvol: Vec<OsString>,
    /// Own everything by this user and group, as numbers
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner)]
    owner: Option<Owner>,
    /// Leave out what is mounted below a SOURCE directory
    #[arg(short = 'x', long)]
    one_file_system: bool,
    /// Say nothing when done
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten, next_help_heading = "With --mkfs")]
    make: MakeArgs,
    #[command(flatten)]
    start: StartArgs,
    #[command(flatten)]
    open: OpenArgs,
}

fn parse_owner(text: &str) -> Result<Owner, String> {
    let (uid, gid) = text.split_once(':').ok_or("expected two numbers, such as 0:0")?;
    let number = |text: &str| text.parse().map_err(|_| format!("'{text}' is not a number"));
    Ok(Owner { uid: number(uid)?, gid: number(gid)? })
}

/// A method, or none although one might be the default.
/// Brings it in.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    check(args)?;
    if !args.mkfs {
        let filesystem = args.open.filesystem(&args.image, OpenMode::ReadWrite)?;
        return fill(args, filesystem, out);
    }
    let (filesystem, target) = make(args)?;
    let exit = fill(args, filesystem, out)?;
    target.keep();
    Ok(exit)
}

/// What can be told before anything is made: options that do not go together, a source that is
/// not there.
fn check(args: &Args) -> Result<()> {
    check_named(args.path.as_bytes(), &args.image)?;
    match args.make.first_given() {
        Some(option) if !args.mkfs => {
            let why = "means something only where the filesystem is made";
            return Err(Failure::usage(option, why).advice("Give --mkfs, too."));
        }
        _ => {}
    }
    if args.mkfs && args.open.names_other_devices() {
        return Err(Failure::new(Exit::Unsupported, "--device", "one device is made with --mkfs")
            .advice("Make the filesystem with `ubtrfs mkfs`, then import without --mkfs."));
    }
    if args.source.as_os_str() != "-" {
        let failed = |error| Failure::io("opening", &error).at_path(&args.source);
        let about = fs::metadata(&args.source).map_err(failed)?;
        // Who writes to a pipe is gone once its first reader is.
        if !about.file_type().is_fifo() {
            fs::File::open(&args.source).map_err(failed)?;
        }
    } else if io::stdin().is_terminal() {
        return Err(Failure::usage("import", "standard input is a terminal, not an archive"));
    }
    Ok(())
}

/// A new filesystem; in a new file without a size, one that grows.
fn make(args: &Args) -> Result<(Filesystem, Target)> {
    let options = args.make.options()?;
    let runtime = args.make.runtime()?;
    let is_new = fs::metadata(&args.image).map_or(true, |m| m.is_file() && m.len() == 0);
    let length = match args.make.size {
        Some(bytes) => Length::Bytes(bytes),
        None if is_new => Length::Bytes(options.device_bytes_min().next_multiple_of(GROWS_FROM)),
        None => Length::AsItIs,
    };
    let target = Target::open(&args.image, args.open.window(), length, args.make.existing())?;
    let failed = |what, error| Failure::engine(what, error).at_path(&args.image);
    let volume = ubtrfs_engine::mkfs(vec![target.device()], &options, &runtime)
        .map_err(|error| failed("making the filesystem", error))?;
    let mut options = args.open.engine_options(false, Arc::clone(&runtime))?;
    options.grow_device = is_new && args.make.size.is_none();
    let filesystem = Filesystem::open(volume, options).map_err(|error| failed("opening", error))?;
    Ok((filesystem, target))
}

fn fill(args: &Args, filesystem: Filesystem, out: &mut Output) -> Result<Exit> {
    let image = Image::new(filesystem, &args.image, &args.start)?;
    let filesystem = image.filesystem();
    let (into, holds_something) =
        import::destination(filesystem, &path_from_top(&image, args)?, args.owner)
            .map_err(|error| Failure::archive("import", &args.image, error))?;
    let options = ImportOptions {
        owner: args.owner,
        subvolumes: args.subvol.iter().map(|path| path.clone().into_vec()).collect(),
        compression: args.compress.and_then(|compress| compress.0),
        one_file_system: args.one_file_system,
        exclude: fs::metadata(&args.image)
            .map(|image| FileId { device: image.dev(), inode: image.ino() })
            .into_iter()
            .collect(),
        // What was just made, be it by a command before this one, takes the metadata of SOURCE.
        into_is_kept: holds_something,
    };
    let mut progress = Progress::new("import");
    let done = import::from_path(filesystem, into, &args.source, &options, &mut progress)
        .map_err(|error| Failure::archive("import", &args.image, error))?;
    if done == Summary::default() {
        let why = "there is nothing in it: an empty archive, or no archive at all";
        return Err(Failure::new(Exit::Io, "import", why).at_path(&args.source));
    }
    if args.shrink {
        shrink(&image)?;
    }
    progress.finish();
    if !args.quiet {
        out.line(&progress.sentence("imported", &done))?;
    }
    Ok(progress.exit())
}

/// PATH as seen from the top level, where the library begins. Of what is there, links are followed;
/// the rest is to be made.
fn path_from_top(image: &Image, args: &Args) -> Result<Vec<u8>> {
    let path = args.path.as_bytes();
    let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
    let ends: Vec<usize> = slashes.chain([path.len()]).collect();
    let mut there = (image.start(), 0);
    for end in ends.into_iter().rev() {
        if let Some(id) = image.find_following(&path[..end])? {
            there = (id, end);
            break;
        }
    }
    let (id, end) = there;
    let top =
        image.filesystem().path_of(id).map_err(|error| image.failure("finding", path, error))?;
    Ok([top.as_slice(), &path[end..]].join(&b'/'))
}

/// Cuts the image off behind the last byte in use.
fn shrink(image: &Image) -> Result<()> {
    let failed = |error| Failure::engine("shrinking", error).at_path(image.path());
    let filesystem = image.filesystem();
    let len_bytes = filesystem.shrink_to_fit().map_err(failed)?;
    let devices = filesystem.volume().device_items();
    let device = devices
        .first()
        .and_then(|item| filesystem.volume().device(ubtrfs_ondisk::DeviceId(item.devid.get())));
    match device.map(|device| device.resize(len_bytes)) {
        // A partition or a block device keeps its length: the filesystem is the shorter.
        Some(Err(error)) if error.kind() != io::ErrorKind::Unsupported => {
            Err(Failure::io("shrinking", &error).at_path(image.path()))
        }
        _ => Ok(()),
    }
}
