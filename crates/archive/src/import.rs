//! Into a filesystem, from a directory or an archive.

use std::collections::HashSet;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use ubtrfs_engine::{Filesystem, InodeId, Method, NewInode, Reservation};
use ubtrfs_rt::Clock;

use crate::batch::Source;
use crate::dirs::FileId;
use crate::error::{Error, Result};
use crate::pipeline::{PipelineOptions, run};
use crate::progress::{Progress, Summary};
use crate::sink::image::ImageTree;
use crate::sink::tree::{Owner, TreeOptions, TreeSink};
use crate::source::tar::TarSource;
use crate::source::walk::{Walk, WalkOptions};

/// How a tree is imported.
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// Own everything by this user and group.
    pub owner: Option<Owner>,
    /// Paths, relative to the destination, of directories that become subvolumes.
    pub subvolumes: Vec<Vec<u8>>,
    /// How to compress file data, if at all.
    pub compression: Option<Method>,
    /// Leave mount points below a source directory empty.
    pub one_file_system: bool,
    /// Files of a source directory to leave out, such as the image that is being written.
    pub exclude: HashSet<FileId>,
    /// The directory that is filled was there before, and keeps its metadata, as those below do.
    pub into_is_kept: bool,
}

/// Imports `source`, which is a directory, a tar archive, or `-` for an archive from standard
/// input, into directory `into`: see [`from_directory`] and [`from_tar`].
///
/// # Errors
/// As there.
pub fn from_path(
    filesystem: &Filesystem,
    into: InodeId,
    source: &Path,
    options: &ImportOptions,
    progress: &mut dyn Progress,
) -> Result<Summary> {
    if source.as_os_str() != "-" && source.is_dir() {
        return from_directory(filesystem, into, source, options, progress);
    }
    let (align_bytes, executor) = (filesystem.sectorsize_bytes(), filesystem.runtime().executor);
    let archive = TarSource::open(source, align_bytes, executor)?;
    import(filesystem, into, archive, options, progress)
}

/// Imports the contents of a directory, and its metadata, into directory `into`. Names that are
/// there already are kept: directories are filled, anything else ends the import. Access and
/// modification times are the source's, change and birth times that of the import; with a fixed
/// clock (`SOURCE_DATE_EPOCH`) the access time is the modification time, since reading changes it.
///
/// All is durable when it returns. After an error the filesystem is consistent and holds what was
/// there before; it may hold a part of the source.
///
/// # Errors
/// With the path: the source cannot be read, a name is taken, the filesystem is full or damaged.
pub fn from_directory(
    filesystem: &Filesystem,
    into: InodeId,
    source: &Path,
    options: &ImportOptions,
    progress: &mut dyn Progress,
) -> Result<Summary> {
    for path in &options.subvolumes {
        let relative = PathBuf::from(std::ffi::OsString::from_vec(path.clone()));
        let relative = relative.strip_prefix("/").unwrap_or(&relative);
        let directory = source.join(relative);
        if !directory.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
            let why = "was to become a subvolume, but is no directory";
            return Err(Error::refused(directory.as_os_str().as_bytes(), why));
        }
    }
    let walk_options = WalkOptions {
        one_file_system: options.one_file_system,
        exclude: options.exclude.clone(),
        align_bytes: filesystem.sectorsize_bytes(),
    };
    import(filesystem, into, Walk::new(source, walk_options)?, options, progress)
}

/// Imports the members of a tar archive, whatever compressed it, as [`from_directory`] does. A
/// member that comes twice replaces the earlier one; what was there before is kept.
///
/// # Errors
/// As [`from_directory`], and with member and offset where the archive is damaged, hostile or not
/// supported.
pub fn from_tar(
    filesystem: &Filesystem,
    into: InodeId,
    archive: Box<dyn Read + Send>,
    options: &ImportOptions,
    progress: &mut dyn Progress,
) -> Result<Summary> {
    let (align_bytes, executor) = (filesystem.sectorsize_bytes(), filesystem.runtime().executor);
    let source = TarSource::new(archive, align_bytes, executor)?;
    import(filesystem, into, source, options, progress)
}

fn import<S: Source>(
    filesystem: &Filesystem,
    into: InodeId,
    source: S,
    options: &ImportOptions,
    progress: &mut dyn Progress,
) -> Result<Summary> {
    let runtime = filesystem.runtime();
    let failed = |op, error| Error::failed(op, Vec::new(), error);
    let write_options = filesystem.write_options(options.compression);
    let tree = ImageTree::new(filesystem, into, write_options);
    let tree = tree.map_err(|e| failed("begin to change the filesystem at", e))?;
    let tree_options = TreeOptions {
        owner: options.owner,
        subvolumes: options.subvolumes.clone(),
        implied_time: runtime.clock.now(),
        atime_is_mtime: matches!(runtime.clock, Clock::Fixed(_)),
        root_is_kept: options.into_is_kept,
    };
    let mut sink = TreeSink::new(tree, tree_options)?;
    let summary = run(source, &mut sink, &PipelineOptions::new(runtime.executor), progress)?;
    drop(sink);
    filesystem.commit().map_err(|e| failed("commit the import into", e))?;
    Ok(summary)
}

/// The directory at `path` from the top level, made with its parents where they are missing, and
/// whether it held anything.
///
/// # Errors
/// A component is no directory, or one cannot be made.
pub fn destination(
    filesystem: &Filesystem,
    path: &[u8],
    owner: Option<Owner>,
) -> Result<(InodeId, bool)> {
    let mut here = filesystem.top_level();
    let mut so_far = Vec::new();
    for name in path.split(|&b| b == b'/') {
        so_far.extend_from_slice(name);
        let failed = |op, error: ubtrfs_engine::Error| Error::failed(op, so_far.clone(), error);
        here = match filesystem.resolve(here, name) {
            Ok(next) => next,
            Err(ubtrfs_engine::Error::NotFound { .. }) => {
                let mut new = NewInode::new(0o040_755, filesystem.runtime().clock.now());
                if let Some(Owner { uid, gid }) = owner {
                    (new.uid, new.gid) = (uid, gid);
                }
                filesystem
                    .begin(Reservation::create(0))
                    .and_then(|mut handle| handle.create(here, name, &new))
                    .map_err(|e| failed("create", e))?
            }
            Err(error) => return Err(failed("find", error)),
        };
        so_far.push(b'/');
    }
    let inode = filesystem.inode(here).map_err(|e| Error::failed("read", path, e))?;
    if !inode.is_dir() {
        return Err(Error::refused(path, "is not a directory"));
    }
    let first = filesystem.read_dir(here, 0).and_then(|mut entries| entries.next().transpose());
    let holds_something = first.map_err(|e| Error::failed("read", path, e))?.is_some();
    Ok((here, holds_something))
}

#[cfg(test)]
mod tests;
