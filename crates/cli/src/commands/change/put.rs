//! `ubtrfs put`: single files of this machine into an image.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ubtrfs_engine::SetAttributes;
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_rt::Time;

use super::chmod::Mode;
use super::chown::Owner;
use super::{Change, only_into_a_directory};
use crate::edit::{Edit, UMASK};
use crate::failure::{Exit, Failure, Result};
use crate::image::{ChangedImageArgs, Place};
use crate::output::Output;
use crate::whole;

/// Put files of this machine into an image
///
/// With several SOURCEs, or where PATH is a directory, they go into it under their own names. A file
/// that has the name is replaced by the new one, whole or not at all. The new file is root's, has the
/// permissions of SOURCE except writing for group and others (0644 from standard input) and the time
/// of now, unless options say otherwise. Whole trees are brought in by `ubtrfs import`.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    override_usage = "ubtrfs put [OPTIONS] <IMAGE> <SOURCE>... <PATH>",
    after_help = "\
Examples:
  ubtrfs put disk.img motd /etc/motd
  ubtrfs put disk.img *.jpg /photos
  echo box1 | ubtrfs put --mode 644 disk.img - /etc/hostname"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// Files of this machine, or - for standard input, and last where they go
    #[arg(value_names = ["SOURCE", "PATH"], num_args = 2.., required = true)]
    words: Vec<OsString>,
    /// Permissions, as for chmod
    #[arg(short, long, value_name = "MODE", value_parser = Mode::parse)]
    mode: Option<Mode>,
    /// Owner, as numbers
    #[arg(long, value_name = "UID:GID", value_parser = Owner::parse)]
    owner: Option<Owner>,
    /// Keep owner, permissions and times of SOURCE
    #[arg(short, long)]
    preserve: bool,
}

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        let Some((path, sources)) = self.words.split_last() else { return Ok(()) };
        let path = path.as_bytes();
        only_into_a_directory(edit, sources.len(), path)?;
        edit.each(sources, out, |source, _| {
            if source == "-" {
                return self.standard_input(edit, path);
            }
            self.file(edit, &PathBuf::from(source), path)
        })
    }
}

/// A file of this machine that is open.
struct Source {
    /// As it is when it is opened; 0 where that is not known.
    len_bytes: u64,
    mode: u32,
    owner: Owner,
    times: Option<(Time, Time)>,
}

impl Args {
    fn file(&self, edit: &Edit<'_>, source: &Path, path: &[u8]) -> Result<()> {
        let failed = |what: &str, error: &io::Error| Failure::io(what, error).at_path(source);
        let mut file = File::open(source).map_err(|error| failed("opening", &error))?;
        let metadata = file.metadata().map_err(|error| failed("reading", &error))?;
        if metadata.is_dir() {
            return Err(Failure::new(Exit::Io, "opening", "it is a directory")
                .at_path(source)
                .advice("`ubtrfs import` brings in directories."));
        }
        let own_name = super::base_name(source.as_os_str().as_bytes());
        let (place, path) = edit.destination(path, own_name, FileType::Regular)?;
        let time = |sec, nsec| Time { sec, nsec: u32::try_from(nsec).unwrap_or(0) };
        let mut about = Source {
            len_bytes: metadata.len(),
            mode: metadata.mode() & 0o777,
            owner: Owner { uid: None, gid: None },
            times: None,
        };
        if self.preserve {
            about.mode = metadata.mode() & 0o7777;
            about.owner = Owner { uid: Some(metadata.uid()), gid: Some(metadata.gid()) };
            let atime = time(metadata.atime(), metadata.atime_nsec());
            about.times = Some((atime, time(metadata.mtime(), metadata.mtime_nsec())));
        }
        let read_failed = |error: &io::Error| failed("reading", error);
        self.bring(edit, &mut file, &about, &place, &path, &read_failed)
    }

    fn standard_input(&self, edit: &Edit<'_>, path: &[u8]) -> Result<()> {
        if edit.is_batch() {
            return Err(Failure::usage("put", "standard input holds the commands of the batch"));
        }
        if io::stdin().is_terminal() {
            return Err(Failure::usage("put", "standard input is a terminal, not a file"));
        }
        if let Some(id) = edit.image().find_following(path)?
            && edit.image().inode(id, path)?.is_dir()
        {
            return Err(
                Failure::usage("put", "what comes from standard input needs a name").at_name(path)
            );
        }
        let place = edit.image().place_of(path, FileType::Regular)?;
        let about = Source {
            len_bytes: 0,
            mode: 0o666,
            owner: Owner { uid: None, gid: None },
            times: None,
        };
        let read_failed = |error: &io::Error| Failure::io("reading", error).at("standard input");
        self.bring(edit, &mut io::stdin().lock(), &about, &place, path, &read_failed)
    }

    fn bring(
        &self,
        edit: &Edit<'_>,
        source: &mut dyn io::Read,
        about: &Source,
        place: &Place,
        path: &[u8],
        read_failed: &dyn Fn(&io::Error) -> Failure,
    ) -> Result<()> {
        let new = edit.new_inode(0o100_000 | about.mode & 0o777);
        // Asked for by name, it is not taken over from the directory.
        let mode = match &self.mode {
            Some(mode) => Some(mode.applied_to(about.mode & !UMASK, FileType::Regular)),
            None => self.preserve.then_some(about.mode),
        };
        let owners = [self.owner, Some(about.owner)];
        let uid = owners.iter().flatten().find_map(|owner| owner.uid);
        let gid = owners.iter().flatten().find_map(|owner| owner.gid);
        whole::file(edit, place, &new, path, |id| {
            edit.fill(id, source, about.len_bytes, path, read_failed)?;
            let (atime, mtime) = about.times.unwrap_or((edit.now(), edit.now()));
            let attributes = SetAttributes {
                mode,
                uid,
                gid,
                atime: Some(atime),
                mtime: Some(mtime),
                ..SetAttributes::default()
            };
            edit.set_attributes(id, &attributes, path)
        })?;
        Ok(())
    }
}
