//! Out of a filesystem, into a directory or an archive.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ubtrfs_engine::{Filesystem, InodeId};

use crate::codec::{Compression, Encoder};
use crate::error::{Error, Result};
use crate::pipeline::{PipelineOptions, run};
use crate::progress::{Progress, Summary};
use crate::sink::directory::{DirectorySink, Existing};
use crate::sink::tar::TarSink;
use crate::source::image::ImageWalk;

/// Exports the contents of directory `from`, and its metadata, into a directory of the system,
/// which is made if it is missing. What could not be made for lack of privilege is warned of and
/// counted in [`Summary::skipped`].
///
/// # Errors
/// The image is damaged where it is read, or the target cannot be written; with the path.
pub fn to_directory(
    filesystem: &Filesystem,
    from: InodeId,
    target: &Path,
    existing: Existing,
    progress: &mut dyn Progress,
) -> Result<Summary> {
    let source = ImageWalk::new(filesystem, from)?;
    let mut sink = DirectorySink::new(target, existing)?;
    let options = PipelineOptions::new(filesystem.runtime().executor);
    run(source, &mut sink, &options, progress)
}

/// Exports one regular file, and its metadata, as `target` in a directory that is there; a file that
/// has the name is replaced before the first byte is written. Warns as [`to_directory`].
///
/// # Errors
/// The image is damaged where it is read, or the target cannot be written; with the path.
pub fn to_file(
    filesystem: &Filesystem,
    file: InodeId,
    target: &Path,
    progress: &mut dyn Progress,
) -> Result<Summary> {
    let name = target.file_name().unwrap_or_default().as_bytes();
    let directory = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let source = ImageWalk::of_file(filesystem, file, name)?;
    let mut sink = DirectorySink::open(directory, Existing::Merge)?;
    run(source, &mut sink, &PipelineOptions::new(filesystem.runtime().executor), progress)
}

/// Exports the contents of directory `from`, and its metadata, as a tar archive, and gives back
/// the output, to which everything was written. The same tree gives the same bytes.
///
/// # Errors
/// The image is damaged where it is read, or the output cannot be written; with the path.
pub fn to_tar<W: Write>(
    filesystem: &Filesystem,
    from: InodeId,
    output: W,
    compression: Compression,
    progress: &mut dyn Progress,
) -> Result<(Summary, W)> {
    let source = ImageWalk::new(filesystem, from)?;
    let executor = filesystem.runtime().executor;
    let failed = |e: std::io::Error| Error::failed("write", &b"the archive"[..], e);
    let encoder = Encoder::new(output, compression, executor).map_err(failed)?;
    let mut sink = TarSink::new(encoder);
    let summary = run(source, &mut sink, &PipelineOptions::new(executor), progress)?;
    Ok((summary, sink.into_output().finish().map_err(failed)?))
}

#[cfg(test)]
mod tests;
