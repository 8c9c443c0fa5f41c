//! `ubtrfs subvolume create|delete|snapshot|set-default`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use ubtrfs_engine::{InodeId, Reservation, SnapshotOptions};
use ubtrfs_ondisk::InodeNo;
use ubtrfs_ondisk::dir::FileType;

use super::{Change, base_name, commit};
use crate::edit::Edit;
use crate::failure::{Exit, Failure, Result};
use crate::image::{ChangedImageArgs, Image};
use crate::live;
use crate::output::Output;

/// Make empty subvolumes
#[derive(clap::Args)]
#[command(after_help = "\
Example:
  ubtrfs subvolume create disk.img /home /var/log")]
pub struct CreateArgs {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// Subvolumes to make
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
}

impl Change for CreateArgs {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        edit.each(&self.paths, out, |path, _| {
            let path = path.as_bytes();
            let place = edit.image().place(path)?;
            let new = edit.new_inode(0o040_777);
            let reservation = Reservation::create_subvolume();
            edit.under_handle("creating", path, reservation, |handle| {
                handle.create_subvolume(place.dir, &place.name, &new).map(|_| ())
            })
        })
    }
}

/// Delete subvolumes and snapshots
///
/// They are gone at once. The space that only they used is freed afterwards; if that is interrupted,
/// it goes on with the next deletion, or when Linux mounts the filesystem. A subvolume that holds
/// others is refused, and the default one.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Example:
  ubtrfs subvolume delete disk.img /snapshots/2024-11-20"
)]
pub struct DeleteArgs {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// Subvolumes to delete
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
    /// Leave it to later to free the space
    #[arg(short, long)]
    no_clean: bool,
}

impl Change for DeleteArgs {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        edit.each(&self.paths, out, |path, _| {
            let path = path.as_bytes();
            let subvolume = named_subvolume(edit.image(), path)?;
            if live::served().is_some_and(|live| live.root.root == subvolume.root) {
                return Err(Failure::new(Exit::Io, "deleting", "it is what is mounted")
                    .at_name(path)
                    .at_path(edit.image().path()));
            }
            let place = edit.image().place(path)?;
            edit.filesystem().delete_subvolume(place.dir, &place.name).map(|_| ()).map_err(
                |error| match error {
                    ubtrfs_engine::Error::NotEmpty { .. } => {
                        Failure::new(Exit::Io, "deleting", "it holds other subvolumes")
                            .at_name(path)
                            .at_path(edit.image().path())
                            .advice("Delete those first; `ubtrfs subvolume list` lists them.")
                    }
                    error => edit.image().failure("deleting", path, error),
                },
            )
        })
    }

    fn finish(&self, image: &Image) -> Result<()> {
        if self.no_clean {
            return Ok(());
        }
        let cleaned = image
            .filesystem()
            .clean_deleted_subvolumes()
            .map_err(|error| Failure::engine("freeing space", error).at_path(image.path()));
        // What was freed before a failure is not to be freed again.
        commit(image)?;
        cleaned.map(drop)
    }
}

/// Make a snapshot of a subvolume
///
/// It is a subvolume that begins as a copy of SOURCE and shares all data with it. Where DEST is a
/// directory, it is made in it under SOURCE's own name. Subvolumes inside SOURCE are empty
/// directories in the snapshot.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs subvolume snapshot -r disk.img /home /snapshots/home-1
  ubtrfs subvolume snapshot disk.img / /before-upgrade"
)]
pub struct SnapshotArgs {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// The subvolume
    #[arg(value_name = "SOURCE")]
    source: OsString,
    /// The snapshot's name, or a directory for it
    #[arg(value_name = "DEST")]
    dest: OsString,
    /// Make it read-only
    #[arg(short, long)]
    readonly: bool,
}

impl Change for SnapshotArgs {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, _: &mut Output) -> Result<()> {
        let (source, dest) = (self.source.as_bytes(), self.dest.as_bytes());
        let id = named_subvolume(edit.image(), source)?;
        let (place, path) = edit.destination(dest, base_name(source), FileType::Directory)?;
        let options = SnapshotOptions { read_only: self.readonly };
        edit.filesystem()
            .snapshot(id.root, place.dir, &place.name, &options)
            .map(|_| ())
            .map_err(|error| edit.image().failure("making the snapshot", &path, error))
    }
}

/// Choose the default subvolume: what is mounted when none is named
///
/// Paths begin there from now on, for ubtrfs as for a mount; --subvolid 5 begins at the top level.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs subvolume set-default disk.img /root-snapshot
  ubtrfs subvolume set-default --subvolid 5 disk.img /     the top level again"
)]
pub struct SetDefaultArgs {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// The subvolume
    #[arg(value_name = "PATH")]
    path: OsString,
}

impl Change for SetDefaultArgs {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, _: &mut Output) -> Result<()> {
        let path = self.path.as_bytes();
        let id = named_subvolume(edit.image(), path)?;
        edit.filesystem()
            .set_default_subvolume(id.root)
            .map_err(|error| edit.image().failure("setting the default", path, error))
    }
}

/// The subvolume that a path names.
pub fn named_subvolume(image: &Image, path: &[u8]) -> Result<InodeId> {
    let id = image.resolve_following(path)?;
    if id.inode == InodeNo::SUBVOLUME_ROOT {
        return Ok(id);
    }
    Err(Failure::new(Exit::Io, "finding the subvolume", "it is no subvolume")
        .at_name(path)
        .at_path(image.path())
        .advice("`ubtrfs subvolume list` lists those there are."))
}
