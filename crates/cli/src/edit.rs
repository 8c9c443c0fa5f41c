//! Changes to an image: what the commands that make them share.
//!
//! A command's changes are made in memory and become durable together, by one commit at its end.
//! Where one path of several fails, the others are done, as coreutils do; in a batch the first
//! failure ends everything, and nothing is committed.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::Read;

use ubtrfs_engine::{Filesystem, Handle, Inherit, InodeId, NewInode, Reservation, SetAttributes};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_rt::Time;

use crate::epoch;
use crate::failure::{Exit, Failure, Result};
use crate::image::{Image, Place};
use crate::live;
use crate::output::Output;
use crate::progress::Meter;

/// Bytes of a file that are read and placed at a time.
pub const PIECE_BYTES: usize = 1 << 20;
/// Attributes that a new file may take over from its directory: compression and both access control
/// lists.
pub const INHERITED_XATTRS: u64 = 3;
/// Permissions that what is copied or put gets without being asked: as with the usual umask.
pub const UMASK: u32 = 0o022;

/// What happens after a path has failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnFailure {
    /// It is reported, and the next one is done.
    GoOn,
    /// Everything ends.
    Stop,
}

/// Why something does not go where something else of the same command went.
pub const TAKEN: &str = "what came before it in this command was put there, and stays";

/// Names in directories.
type Names = BTreeSet<(InodeId, Vec<u8>)>;

/// An image that is being changed.
pub struct Edit<'a> {
    image: &'a Image,
    on_failure: OnFailure,
    now: Time,
    /// Of a command that puts several things into a directory: what names it gave there.
    given: RefCell<Option<Names>>,
}

impl<'a> Edit<'a> {
    /// Of an image that was opened for changes.
    pub fn new(image: &'a Image, on_failure: OnFailure) -> Self {
        let now = epoch::now(image.filesystem());
        Self { image, on_failure, now, given: RefCell::default() }
    }

    /// The image.
    pub fn image(&self) -> &'a Image {
        self.image
    }

    /// The engine's side.
    pub fn filesystem(&self) -> &'a Filesystem {
        self.image.filesystem()
    }

    /// When the command began.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Whether this is one line of a batch.
    pub fn is_batch(&self) -> bool {
        self.on_failure == OnFailure::Stop
    }

    /// Does something for each path; a failure of one is tolerated where that is wanted. What one of them put into a directory none that comes behind
    /// it replaces ([`Edit::destination`]).
    pub fn each<T>(
        &self,
        items: impl IntoIterator<Item = T>,
        out: &mut Output,
        mut change: impl FnMut(T, &mut Output) -> Result<()>,
    ) -> Result<()> {
        self.given.replace(Some(Names::new()));
        let done = items.into_iter().try_for_each(|item| {
            let result = change(item, out);
            self.tolerate(result, out)
        });
        self.given.replace(None);
        done
    }

    /// Reports a failure, or returns it where it ends everything.
    pub fn tolerate(&self, result: Result<()>, out: &mut Output) -> Result<()> {
        match self.on_failure {
            OnFailure::GoOn => out.tolerate(result),
            OnFailure::Stop => result,
        }
    }

    /// A change under one handle.
    pub fn under_handle<T>(
        &self,
        what: &str,
        path: &[u8],
        reservation: Reservation,
        change: impl FnOnce(&mut Handle<'_>) -> ubtrfs_engine::Result<T>,
    ) -> Result<T> {
        self.filesystem()
            .begin(reservation)
            .and_then(|mut handle| change(&mut handle))
            .map_err(|error| self.image.failure(what, path, error))
    }

    /// What a new inode begins with: root's, or at a mount of who mounted it, and with what a process's new file takes over from its
    /// directory. Of the permissions that are asked for it gets what the usual umask leaves, or the
    /// directory's default access control list.
    pub fn new_inode(&self, asked_mode: u32) -> NewInode {
        let (uid, gid) = live::served().map_or((0, 0), |live| live.owner);
        let inherit = Inherit::AsProcess { umask: UMASK };
        NewInode { inherit, uid, gid, ..NewInode::new(asked_mode, self.now) }
    }

    /// Makes a file, directory, device node, fifo or socket.
    pub fn create(&self, place: &Place, new: &NewInode, path: &[u8]) -> Result<InodeId> {
        let reservation = Reservation::create(INHERITED_XATTRS);
        self.under_handle("creating", path, reservation, |handle| {
            handle.create(place.dir, &place.name, new)
        })
    }

    /// Changes attributes.
    pub fn set_attributes(
        &self,
        id: InodeId,
        attributes: &SetAttributes,
        path: &[u8],
    ) -> Result<()> {
        self.under_handle("changing attributes", path, Reservation::items(1), |handle| {
            handle.set_attributes(id, attributes)
        })
    }

    /// Removes a name of what is no directory.
    pub fn unlink(&self, place: &Place, path: &[u8]) -> Result<()> {
        self.filesystem()
            .unlink(place.dir, &place.name)
            .map_err(|error| self.image.failure("removing", path, error))
    }

    /// Where something goes that is to be at `path`: into it, under its own name, if that is a
    /// directory. There it replaces nothing but a directory that [`Edit::each`] has put there before: of two files of one name the first
    /// would be gone.
    pub fn destination(
        &self,
        path: &[u8],
        own_name: &[u8],
        kind: FileType,
    ) -> Result<(Place, Vec<u8>)> {
        if let Some(id) = self.image.find_following(path)?
            && self.image.inode(id, path)?.is_dir()
        {
            if matches!(own_name, b"/" | b"." | b"..") {
                let why = "a directory is there, and what goes into it has no name of its own";
                return Err(Failure::new(Exit::Io, "finding", why)
                    .at_name(path)
                    .at_path(self.image.path())
                    .advice("Give the new name, too."));
            }
            let inside = crate::walk::join(path, own_name);
            let is_new = |given: &mut Names| given.insert((id, own_name.to_vec()));
            let is_taken = self.given.borrow_mut().as_mut().is_some_and(|given| !is_new(given));
            if is_taken && kind != FileType::Directory {
                return Err(Failure::new(Exit::Io, "replacing", TAKEN)
                    .at_name(&inside)
                    .at_path(self.image.path()));
            }
            return Ok((Place { dir: id, name: own_name.to_vec() }, inside));
        }
        Ok((self.image.place_of(path, kind)?, path.to_vec()))
    }

    /// Fills an empty file, with about `total_bytes`; 0 where that is not known. Returns its length.
    pub fn fill(
        &self,
        id: InodeId,
        source: &mut dyn Read,
        total_bytes: u64,
        path: &[u8],
        read_failed: &dyn Fn(&std::io::Error) -> Failure,
    ) -> Result<u64> {
        let failed = |error| self.image.failure("writing", path, error);
        let meter = Meter::new("put");
        let mut at = 0;
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        loop {
            piece.clear();
            let read = source.take(PIECE_BYTES as u64).read_to_end(&mut piece);
            let len = read.map_err(|error| read_failed(&error))? as u64;
            // What is nothing but zeros becomes a hole.
            if piece.iter().any(|byte| *byte != 0) {
                self.filesystem().write(id, FileOffset(at), &piece).map_err(failed)?;
            }
            at += len;
            meter.advance("", at, total_bytes);
            if len < PIECE_BYTES as u64 {
                self.filesystem().truncate(id, at).map_err(failed)?;
                return Ok(at);
            }
        }
    }
}

/// The attribute that carries the property.
pub const COMPRESSION: &[u8] = b"btrfs.compression";
