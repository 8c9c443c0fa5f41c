//! `ubtrfs export`: a tree of an image becomes a directory or a tar archive.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ubtrfs_archive::codec::{Compression, is_name_of_another_archive};
use ubtrfs_archive::error::Error;
use ubtrfs_archive::export;
use ubtrfs_archive::progress::Summary;
use ubtrfs_archive::sink::directory::Existing;
use ubtrfs_engine::{Inode, InodeId};

use crate::commands::get;
use crate::failure::{Exit, Failure, Result};
use crate::image::{Image, ImageArgs};
use crate::output::{Output, quote};
use crate::progress::Progress;
use crate::unfinished::Unfinished;

/// Bytes of an archive that are written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// Get files out of an image, into a directory or a tar archive
///
/// PATH is a directory or subvolume in the image, whose contents go into TARGET, or a single file,
/// which becomes TARGET, or goes into it if that is a directory. TARGET is a directory, made if
/// missing; or, by its ending, an archive: .tar, .tar.gz, .tar.xz, .tar.zst, .tar.bz2; or - for an
/// archive on standard output. A new directory that is called as another kind of archive has a /
/// behind its name.
///
/// Owners and device nodes need root in a directory, or fakeroot(1); an archive keeps them without.
/// What could not be kept is named on standard error, and the exit code is 1 if files are missing
/// because of it.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs export disk.img / files/
  ubtrfs export disk.img /home/me home.tar.zst
  ubtrfs export disk.img / - | ssh host tar xp -C /srv/box"
)]
pub struct Args {
    #[command(flatten)]
    image: ImageArgs,
    /// What is taken out
    #[arg(value_name = "PATH")]
    path: OsString,
    /// A directory, an archive, or -
    #[arg(value_name = "TARGET")]
    target: PathBuf,
    /// Fill a directory that holds something, replacing files that are there; replace an archive
    #[arg(short, long)]
    force: bool,
    /// Say nothing when done
    #[arg(short, long)]
    quiet: bool,
}

/// Gets them out.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let path = args.path.as_bytes();
    let from = image.resolve_following(path)?;
    let inode = image.inode(from, path)?;
    let target = Target::of(&args.target);
    if !inode.is_dir() {
        return single_file(&image, &inode, args, target, out);
    }
    check_meant(&args.target, target)?;
    let mut progress = Progress::new("export");
    let done = match target {
        Target::Stdout => to_stdout(&image, from, &mut progress)?,
        Target::Archive(compression) => to_archive(&image, from, args, compression, &mut progress)?,
        Target::Directory => {
            let existing = if args.force { Existing::Merge } else { Existing::Refuse };
            export::to_directory(image.filesystem(), from, &args.target, existing, &mut progress)
                .map_err(|error| refused_directory(error, args))?
        }
    };
    progress.finish();
    if !args.quiet && target != Target::Stdout {
        out.line(&progress.sentence("exported", &done))?;
    }
    Ok(progress.exit())
}

/// A single file becomes one, and no archive.
fn single_file(
    image: &Image,
    inode: &Inode,
    args: &Args,
    target: Target,
    out: &mut Output,
) -> Result<Exit> {
    let path = args.path.as_bytes();
    if target != Target::Directory {
        return Err(Failure::new(Exit::Io, "export", "not a directory; archives are of those")
            .at_name(path)
            .at_path(image.path())
            .advice(format!(
                "For a single file, let TARGET be a name; or: ubtrfs cat {} {}",
                quote::for_terminal(image.path().as_os_str().as_bytes()),
                quote::for_terminal(path)
            )));
    }
    get::check_regular(image, inode, path)?;
    let target = get::inside(&args.target, path);
    get::check_replaceable(&target, args.force)?;
    let failed = |what: &str, error: &io::Error| Failure::io(what, error).at_path(&target);
    let partial = get::partial_name(&target);
    let unfinished = Unfinished::new(partial.clone());
    let mut progress = Progress::new("export");
    let done = export::to_file(image.filesystem(), inode.id, &partial, &mut progress)
        .map_err(|error| Failure::archive("export", image.path(), error))?;
    unfinished.rename(&target).map_err(|error| failed("writing", &error))?;
    progress.finish();
    if !args.quiet {
        out.line(&progress.sentence("exported", &done))?;
    }
    Ok(progress.exit())
}

/// A directory that is to be made is not called as an archive is.
fn check_meant(path: &Path, target: Target) -> Result<()> {
    let is_odd = target == Target::Directory
        && is_name_of_another_archive(path.as_os_str().as_bytes())
        && path.symlink_metadata().is_err();
    if !is_odd {
        return Ok(());
    }
    let why = "archives of this kind are not written here";
    Err(Failure::usage("export", why).at_path(path).advice(
        "Let it end in .tar, .tar.gz, .tar.xz, .tar.zst or .tar.bz2; a directory of this name has a / \
         behind it.",
    ))
}

fn refused_directory(error: Error, args: &Args) -> Failure {
    let is_not_empty = matches!(error, Error::NotEmpty { .. });
    let failure = Failure::archive("export", args.image.path(), error);
    if is_not_empty {
        return failure.advice("-f (--force) fills a directory that holds something already.");
    }
    failure
}

/// What TARGET means.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Directory,
    Archive(Compression),
    Stdout,
}

impl Target {
    fn of(target: &Path) -> Self {
        let name = target.as_os_str().as_bytes();
        match Compression::of_name(name) {
            _ if name == b"-" => Self::Stdout,
            Some(compression) if !name.ends_with(b"/") && !target.is_dir() => {
                Self::Archive(compression)
            }
            _ => Self::Directory,
        }
    }
}

fn to_stdout(image: &Image, from: InodeId, progress: &mut Progress) -> Result<Summary> {
    let stdout = io::stdout();
    if stdout.is_terminal() {
        return Err(Failure::usage(
            "export",
            "standard output is a terminal; an archive is not text",
        )
        .advice("Send it into a file or a pipe."));
    }
    write(image, from, stdout.lock(), Compression::None, progress)
}

/// Writes under another name first: what was there stays until the whole archive is.
fn to_archive(
    image: &Image,
    from: InodeId,
    args: &Args,
    compression: Compression,
    progress: &mut Progress,
) -> Result<Summary> {
    let target = &args.target;
    let failed = |what: &str, error: &io::Error| Failure::io(what, error).at_path(target);
    get::check_replaceable(target, args.force)?;
    let partial = get::partial_name(target);
    let (unfinished, file) = Unfinished::make(partial, |partial| File::create_new(partial))
        .map_err(|error| failed("creating", &error))?;
    let done = write(image, from, &file, compression, progress)?;
    unfinished.rename(target).map_err(|error| failed("writing", &error))?;
    Ok(done)
}

fn write(
    image: &Image,
    from: InodeId,
    output: impl Write,
    compression: Compression,
    progress: &mut Progress,
) -> Result<Summary> {
    let buffer = BufWriter::with_capacity(BUFFER_BYTES, output);
    let (done, mut buffer) =
        export::to_tar(image.filesystem(), from, buffer, compression, progress)
            .map_err(|error| Failure::archive("export", image.path(), error))?;
    buffer.flush().map_err(|error| Failure::io("writing the archive", &error))?;
    Ok(done)
}
