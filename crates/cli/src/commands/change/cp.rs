//! `ubtrfs cp` and `ubtrfs reflink`: copies inside an image.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use ubtrfs_engine::{Inode, InodeId, NewInode, Reservation, SetAttributes};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::dir::FileType;

use super::chmod::{SET_ID, SPECIAL};
use super::{Change, base_name, only_into_a_directory};
use crate::edit::{Edit, INHERITED_XATTRS, UMASK};
use crate::failure::{Exit, Failure, Result};
use crate::image::{ChangedImageArgs, Place};
use crate::live;
use crate::output::Output;
use crate::walk::{self, Walk};
use crate::whole;

/// Copy files inside an image, and with -r directories
///
/// Copies share their data with what they are copies of until one is changed (reflinks), wherever the
/// filesystem can do that. With several SOURCEs, or where DEST is a directory, they go into it. A
/// file that has the name is overwritten. Copies are root's, with the permissions of SOURCE except
/// writing for group and others, unless -p or -a is given.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    override_usage = "ubtrfs cp [OPTIONS] <IMAGE> <SOURCE>... <DEST>",
    after_help = "\
Examples:
  ubtrfs cp disk.img /etc/fstab /etc/fstab.old
  ubtrfs cp -a disk.img /srv /backup"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// What is copied, and last where it goes
    #[arg(value_names = ["SOURCE", "DEST"], num_args = 2.., required = true)]
    words: Vec<OsString>,
    /// Copy directories with all that is in them; symbolic links as such
    #[arg(short, visible_short_alias = 'R', long)]
    recursive: bool,
    /// Keep owners and times, too
    #[arg(short, long)]
    preserve: bool,
    /// Keep everything: -r, -p, extended attributes and ACLs, hard links
    #[arg(short, long)]
    archive: bool,
    /// Keep files that have the name
    #[arg(short, long)]
    no_clobber: bool,
}

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        let Some((dest, sources)) = self.words.split_last() else { return Ok(()) };
        let dest = dest.as_bytes();
        only_into_a_directory(edit, sources.len(), dest)?;
        let mut copy = Copy { args: self, edit, copied: HashMap::new() };
        edit.each(sources, out, |source, out| copy.one(source.as_bytes(), dest, out))
    }
}

/// Where the copy of a directory is, or is to be.
enum Spot {
    There(InodeId),
    Named(Place),
}

struct Copy<'a> {
    args: &'a Args,
    edit: &'a Edit<'a>,
    /// Copies of files with several names.
    copied: HashMap<InodeId, InodeId>,
}

impl Copy<'_> {
    fn one(&mut self, source: &[u8], dest: &[u8], out: &mut Output) -> Result<()> {
        let image = self.edit.image();
        let recursive = self.args.recursive || self.args.archive;
        let id =
            if recursive { image.resolve(source)? } else { image.resolve_following(source)? };
        let inode = image.inode(id, source)?;
        let own_name = base_name(source);
        if !inode.is_dir() {
            let (place, path) = self.edit.destination(dest, own_name, inode.file_type())?;
            return self.leaf(&inode, source, &place, &path);
        }
        if !recursive {
            return Err(Failure::new(Exit::Io, "copying", "it is a directory")
                .at_name(source)
                .at_path(image.path())
                .advice("Give -r (--recursive), too."));
        }
        // `/a/.` has no name of its own: what is in it goes into DEST.
        if matches!(own_name, b"/" | b"." | b"..")
            && let Some(there) = image.find_following(dest)?
            && image.inode(there, dest)?.is_dir()
        {
            return self.tree(&inode, source, Spot::There(there), dest, out);
        }
        let (place, path) = self.edit.destination(dest, own_name, FileType::Directory)?;
        self.tree(&inode, source, Spot::Named(place), &path, out)
    }

    /// Copies a directory. Its entries are listed before the copy is made in it, should that lie
    /// inside; the attributes of directories come last, since what is made in them changes their
    /// times.
    fn tree(
        &mut self,
        top: &Inode,
        source: &[u8],
        spot: Spot,
        path: &[u8],
        out: &mut Output,
    ) -> Result<()> {
        let image = self.edit.image();
        let mut above = match &spot {
            Spot::There(dir) => *dir,
            Spot::Named(place) => place.dir,
        };
        while above != image.start() {
            if above == top.id {
                return Err(Failure::new(Exit::Io, "copying", "a directory into itself")
                    .at_name(path)
                    .at_path(image.path()));
            }
            above = image.parent(above, path)?;
        }
        if above == top.id {
            return Err(Failure::new(Exit::Io, "copying", "a directory into itself")
                .at_name(path)
                .at_path(image.path()));
        }
        let mut walk = Walk::new(top.id, source.to_vec());
        // The copy of each directory on the way down, and its path.
        let mut targets = vec![(spot, path.to_vec())];
        let mut made = Vec::new();
        while let Some(visit) = walk.next() {
            let Some((spot, path)) = targets.pop() else { break };
            let inode = image.inode(visit.id, &visit.path)?;
            let dir = match spot {
                Spot::There(dir) => Ok(dir),
                Spot::Named(place) => self.directory(&inode, &place, &path),
            };
            let dir = match dir {
                Ok(dir) => dir,
                Err(failure) => {
                    self.edit.tolerate(Err(failure), out)?;
                    continue;
                }
            };
            let children = walk::children(image, visit.id, &visit.path)?;
            for child in &children {
                if child.is_directory {
                    continue;
                }
                let from = walk::join(&visit.path, &child.name);
                let result = image.inode(child.id, &from).and_then(|inode| {
                    let place = Place { dir, name: child.name.clone() };
                    self.leaf(&inode, &from, &place, &walk::join(&path, &child.name))
                });
                self.edit.tolerate(result, out)?;
            }
            for child in children.iter().rev().filter(|child| child.is_directory) {
                let place = Place { dir, name: child.name.clone() };
                targets.push((Spot::Named(place), walk::join(&path, &child.name)));
            }
            walk.enter(&visit, &children)?;
            made.push((inode, dir, path));
        }
        for (inode, dir, path) in made.iter().rev() {
            self.finish(inode, *dir, path)?;
        }
        Ok(())
    }

    /// The copy of a directory, made if it is not there.
    fn directory(&self, inode: &Inode, place: &Place, path: &[u8]) -> Result<InodeId> {
        match self.edit.image().entry(place, path)? {
            Some(id) if self.edit.image().inode(id, path)?.is_dir() => Ok(id),
            Some(_) => Err(self.edit.image().failure(
                "creating",
                path,
                ubtrfs_engine::Error::Exists { what: String::new() },
            )),
            None => {
                let new = self.new_inode(inode);
                self.edit.create(place, &new, path)
            }
        }
    }

    /// Copies what is no directory.
    fn leaf(&mut self, inode: &Inode, source: &[u8], place: &Place, path: &[u8]) -> Result<()> {
        let image = self.edit.image();
        let there = self.there(inode, place, path)?;
        if let Some(there) = there {
            if there == inode.id {
                return Err(Failure::new(Exit::Io, "copying", "source and copy are one file")
                    .at_name(path)
                    .at_path(image.path()));
            }
            if self.args.no_clobber {
                return Ok(());
            }
        }
        let keeps_links = self.args.archive && inode.nlink > 1;
        if keeps_links && let Some(copy) = self.copied.get(&inode.id) {
            let copy = *copy;
            return whole::named(self.edit, place, path, |place| {
                self.edit.under_handle("linking", path, Reservation::create(0), |handle| {
                    handle.link(place.dir, &place.name, copy)
                })
            });
        }
        let there = there.map(|id| image.inode(id, path)).transpose()?;
        if there.as_ref().is_some_and(Inode::is_dir) {
            return Err(Failure::new(Exit::Io, "copying", "a directory is there")
                .at_name(path)
                .at_path(image.path()));
        }
        let id = match there {
            _ if inode.file_type() != FileType::Regular => {
                let id = whole::named(self.edit, place, path, |place| {
                    self.make(inode, source, place, path)
                })?;
                self.finish(inode, id, path)?;
                id
            }
            Some(there) if there.file_type() == FileType::Regular => {
                let id = whole::contents(self.edit, &there, path, |id| self.fill(inode, id, path))?;
                self.finish(inode, id, path)?;
                id
            }
            _ => {
                let new = self.new_inode(inode);
                whole::file(self.edit, place, &new, path, |id| {
                    self.fill(inode, id, path)?;
                    self.finish(inode, id, path)
                })?
            }
        };
        if keeps_links {
            self.copied.insert(inode.id, id);
        }
        Ok(())
    }

    /// Copies the data.
    fn fill(&self, inode: &Inode, id: InodeId, path: &[u8]) -> Result<()> {
        let all = FileOffset(0)..FileOffset(inode.size_bytes);
        let copied = self.edit.filesystem().copy_range(inode.id, all, id, FileOffset(0));
        copied.map(drop).map_err(|error| self.edit.image().failure("copying", path, error))
    }

    /// What has the name. A file is written through a symbolic link to another.
    fn there(&self, inode: &Inode, place: &Place, path: &[u8]) -> Result<Option<InodeId>> {
        let image = self.edit.image();
        let Some(there) = image.entry(place, path)? else { return Ok(None) };
        let is_link = image.inode(there, path)?.file_type() == FileType::Symlink;
        if !is_link || inode.file_type() != FileType::Regular {
            return Ok(Some(there));
        }
        match image.find_following(path)? {
            Some(target) => Ok(Some(target)),
            None => Err(Failure::new(Exit::Io, "copying", "a symbolic link that leads nowhere")
                .at_name(path)
                .at_path(image.path())),
        }
    }

    fn make(&self, inode: &Inode, source: &[u8], place: &Place, path: &[u8]) -> Result<InodeId> {
        let mut new = self.new_inode(inode);
        if inode.file_type() != FileType::Symlink {
            new.rdev = inode.rdev;
            return self.edit.create(place, &new, path);
        }
        let target = self.edit.image().read_link(inode.id, source)?;
        let reservation = Reservation::create(INHERITED_XATTRS);
        self.edit.under_handle("creating", path, reservation, |handle| {
            handle.symlink(place.dir, &place.name, &target, &new)
        })
    }

    /// Without the bits that make a program run as its owner, who is another one now; a directory
    /// keeps its sticky bit, a file does not.
    fn new_inode(&self, inode: &Inode) -> NewInode {
        if self.preserves() {
            return NewInode::new(inode.mode, self.edit.now());
        }
        self.edit.new_inode(match inode.file_type() {
            FileType::Symlink => inode.mode,
            // As coreutils do it, who set a directory's permissions once more when it is filled.
            FileType::Directory => inode.mode & !(SET_ID | UMASK),
            _ => inode.mode & !SPECIAL,
        })
    }

    fn preserves(&self) -> bool {
        self.args.preserve || self.args.archive
    }

    /// Gives a copy the attributes that it is to have, its times last.
    fn finish(&self, inode: &Inode, id: InodeId, path: &[u8]) -> Result<()> {
        if !self.preserves() {
            return Ok(());
        }
        self.copy_xattrs(inode.id, id, path)?;
        let attributes = SetAttributes {
            mode: Some(inode.mode),
            uid: Some(inode.uid),
            gid: Some(inode.gid),
            atime: Some(inode.atime),
            mtime: Some(inode.mtime),
            ..SetAttributes::default()
        };
        self.edit.set_attributes(id, &attributes, path)
    }
}

impl Copy<'_> {
    /// With -a all of them; with -p access control lists, which are part of the permissions, and
    /// which a copy that was there may have without the source.
    fn copy_xattrs(&self, from: InodeId, to: InodeId, path: &[u8]) -> Result<()> {
        const WHAT: &str = "copying extended attributes";
        let failed = |error| self.edit.image().failure(WHAT, path, error);
        let is_acl = |name: &[u8]| name.starts_with(b"system.posix_acl_");
        let filesystem = self.edit.filesystem();
        let there = filesystem.xattrs(from).map_err(failed)?;
        for (name, _) in filesystem.xattrs(to).map_err(failed)? {
            if is_acl(&name) && !there.iter().any(|(other, _)| *other == name) {
                self.edit.under_handle(WHAT, path, Reservation::items(3), |handle| {
                    handle.remove_xattr(to, &name)
                })?;
            }
        }
        for (name, value) in &there {
            if self.args.archive || is_acl(name) {
                self.edit.under_handle(WHAT, path, Reservation::items(3), |handle| {
                    handle.set_xattr(to, name, value)
                })?;
            }
        }
        Ok(())
    }
}

/// Copy a file inside an image by sharing all its data
///
/// As cp, but where data cannot be shared, nothing is copied, and the command fails. DEST is made, or
/// overwritten; of a directory, the copy goes into it.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Example:
  ubtrfs reflink disk.img /vm/base.raw /vm/box1.raw"
)]
pub struct ReflinkArgs {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// The file
    #[arg(value_name = "SOURCE")]
    source: OsString,
    /// Its copy
    #[arg(value_name = "DEST")]
    dest: OsString,
}

impl Change for ReflinkArgs {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, _: &mut Output) -> Result<()> {
        let image = edit.image();
        let (source, dest) = (self.source.as_bytes(), self.dest.as_bytes());
        let id = image.resolve_following(source)?;
        let inode = image.inode(id, source)?;
        if inode.file_type() != FileType::Regular {
            return Err(Failure::new(Exit::Io, "sharing data", "it is no regular file")
                .at_name(source)
                .at_path(image.path()));
        }
        let (place, path) = edit.destination(dest, base_name(source), FileType::Regular)?;
        let refused = |why: &str| {
            Err(Failure::new(Exit::Io, "sharing data", why).at_name(&path).at_path(image.path()))
        };
        let share = |target: InodeId| {
            if inode.has_csums() != image.inode(target, &path)?.has_csums() {
                return refused("one of the files has checksums, the other has none")
                    .map_err(|failure| failure.advice("`ubtrfs cp` copies the data instead."));
            }
            edit.filesystem()
                .clone_file(id, target)
                .map_err(|error| image.failure("sharing data", &path, error))
        };
        match image.entry(&place, &path)? {
            Some(target) if target == id => refused("source and copy are one file"),
            Some(target) => {
                let target = image.inode(target, &path)?;
                if target.file_type() != FileType::Regular {
                    return refused("it is no regular file");
                }
                if live::served().is_some() {
                    // Who has it open is to have it still.
                    return whole::contents_of_inode(edit, &target, &path, share);
                }
                whole::contents(edit, &target, &path, share).map(drop)
            }
            None => {
                let new = edit.new_inode(0o100_000 | inode.mode & 0o777);
                whole::file(edit, &place, &new, &path, share).map(drop)
            }
        }
    }
}
