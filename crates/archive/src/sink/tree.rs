//! A sink over anything that makes files by directory and name, such as the engine.
//!
//! 1. A directory's times are set when it is left, or at the end, since making files changes them.
//! 2. Paths of an archive are resolved component by component in the destination. A component
//!    that is a symbolic link is refused: nothing is ever made through one. Missing parents are
//!    made.
//! 3. What the destination had before is kept: only what this run made is replaced by a later
//!    member of the same name. Directories that were there are filled, and keep their metadata.
//! 4. Memory: directories on the way down, or, for an archive, all of its directories; and the
//!    files whose further names may still come.

use std::collections::{BTreeSet, HashMap};

use ubtrfs_rt::Time;

use super::Sink;
use super::contract::{Found, FoundKind, Link, Make, Tree, TreeError, Work};
use super::directories::Directories;
use crate::batch::{Batch, Content, Entry, Identity, LinkTarget, Place, Prepare, Step, Text};
use crate::entry::{Metadata, Segment, Special};
use crate::error::{BytePath, Error, Result, Warning, WarningKind};
use crate::progress::Report;

/// The longest name of a directory entry.
const NAME_BYTES_MAX: usize = 255;

/// Who owns what is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// How a tree is filled.
#[derive(Clone, Debug, Default)]
pub struct TreeOptions {
    /// Own everything by this user and group.
    pub owner: Option<Owner>,
    /// Paths, relative to the root, of directories that become subvolumes.
    pub subvolumes: Vec<Vec<u8>>,
    /// What directories get that an archive implies but does not have.
    pub implied_time: Time,
    /// Take the modification time for the access time, so that two runs over one source, whose
    /// reading changes access times, give the same.
    pub atime_is_mtime: bool,
    /// The root was there before, and keeps its metadata.
    pub root_is_kept: bool,
}

/// A directory that was entered.
#[derive(Debug)]
struct Level<N> {
    node: N,
    /// What it gets when it is left; none where it was there before.
    metadata: Option<Metadata>,
    /// Length of the parent's path.
    parent_path_len: usize,
}

/// A file whose further names may come.
#[derive(Debug)]
struct Linked<N> {
    node: N,
    names_left: u32,
}

/// How far the content of the open file was told.
#[derive(Debug)]
struct Extent {
    size_bytes: u64,
    told_bytes: u64,
}

/// The sink over a [`Tree`].
#[derive(Debug)]
pub struct TreeSink<T: Tree> {
    tree: T,
    options: TreeOptions,
    stack: Vec<Level<T::Node>>,
    /// Path of the innermost directory entered.
    directory_path: Vec<u8>,
    /// Path of the file at hand, for errors.
    path: Vec<u8>,
    directories: Directories<T::Node>,
    links: HashMap<u64, Linked<T::Node>>,
    subvolumes_left: BTreeSet<Vec<u8>>,
    open_file: Option<Extent>,
}

impl<T: Tree> TreeSink<T> {
    /// A sink that fills `tree`.
    ///
    /// # Errors
    /// A path of `options.subvolumes` is no path below the root.
    pub fn new(tree: T, options: TreeOptions) -> Result<Self> {
        let mut subvolumes_left = BTreeSet::new();
        for path in &options.subvolumes {
            let components: Vec<&[u8]> = path
                .split(|&b| b == b'/')
                .filter(|component| !component.is_empty() && *component != b".")
                .collect();
            if components.is_empty() || components.contains(&&b".."[..]) {
                let why = "is not a path below the root, so it cannot become a subvolume";
                return Err(Error::refused(path.as_slice(), why));
            }
            subvolumes_left.insert(components.join(&b'/'));
        }
        let mut directories = Directories::new(tree.root());
        if options.root_is_kept {
            directories.keep(Directories::<T::Node>::ROOT);
        }
        Ok(Self {
            tree,
            options,
            stack: Vec::new(),
            directory_path: Vec::new(),
            path: Vec::new(),
            directories,
            links: HashMap::new(),
            subvolumes_left,
            open_file: None,
        })
    }

    /// The tree.
    pub fn into_tree(self) -> T {
        self.tree
    }

    fn step(&mut self, step: Step<T::Data>, text: &Text, report: &mut Report<'_>) -> Result<()> {
        match step {
            Step::Data { offset, len_bytes, data } => {
                self.hole_up_to(offset, report)?;
                self.tree.append(offset, len_bytes, data).map_err(|e| self.failed("write", e))?;
                if let Some(extent) = &mut self.open_file {
                    extent.told_bytes = offset + len_bytes as u64;
                }
                report.done.data_bytes += len_bytes as u64;
                Ok(())
            }
            Step::End => {
                let size_bytes = self.open_file.as_ref().map_or(0, |extent| extent.size_bytes);
                self.hole_up_to(size_bytes, report)?;
                self.open_file = None;
                self.tree.finish_file().map_err(|e| self.failed("write", e))
            }
            Step::Warning(warning) => {
                report.warn(&warning);
                Ok(())
            }
            change => {
                self.tree
                    .begin(work_of(&change, text))
                    .map_err(|e| self.failed("begin to change", e))?;
                let result = self.change(change, text, report);
                self.tree.end();
                match result? {
                    Some((node, size_bytes)) => {
                        self.open_file = Some(Extent { size_bytes, told_bytes: 0 });
                        self.tree.begin_file(node, size_bytes).map_err(|e| self.failed("write", e))
                    }
                    None => Ok(()),
                }
            }
        }
    }

    /// A step that changes names or metadata. Gives the file whose pieces are to come, if any, and
    /// its length.
    fn change(
        &mut self,
        step: Step<T::Data>,
        text: &Text,
        report: &mut Report<'_>,
    ) -> Result<Option<(T::Node, u64)>> {
        match step {
            Step::Enter(entry) => self.enter(&entry, text, report)?,
            Step::Leave => self.leave()?,
            Step::Directory(entry) => self.directory(&entry, text, report)?,
            Step::File { entry, size_bytes, content, identity } => {
                let node = self.put(&entry, Make::File { size_bytes }, text, report)?;
                self.remember(identity, node);
                report.done.files += 1;
                let data = match content {
                    Content::Pieces { .. } => return Ok(Some((node, size_bytes))),
                    Content::Whole(data) => {
                        report.done.data_bytes += size_bytes;
                        Some(data)
                    }
                    Content::Empty => {
                        report.done.hole_bytes += size_bytes;
                        None
                    }
                };
                if size_bytes > 0 {
                    let written = self.tree.write_whole(node, size_bytes, data);
                    written.map_err(|e| self.failed("write", e))?;
                }
            }
            Step::Special { entry, special, identity } => {
                let what = Make::Special(special.map(|target| text.bytes(target)));
                let node = self.put(&entry, what, text, report)?;
                self.remember(identity, node);
                match special {
                    Special::Symlink(_) => report.done.symlinks += 1,
                    _ => report.done.specials += 1,
                }
            }
            Step::Link { place, target } => self.link(place, target, text, report)?,
            Step::Data { .. } | Step::End | Step::Warning(_) => {}
        }
        Ok(None)
    }

    fn enter(&mut self, entry: &Entry, text: &Text, report: &mut Report<'_>) -> Result<()> {
        let parent_path_len = self.directory_path.len();
        let metadata = self.adjusted(entry.metadata);
        let (node, is_kept) = if self.stack.is_empty() {
            let (root, is_kept) = (self.tree.root(), self.options.root_is_kept);
            self.path.clear();
            if !is_kept {
                self.tree.set_metadata(root, &metadata).map_err(|e| self.failed("set", e))?;
            }
            (root, is_kept)
        } else {
            let (dir, name) = self.locate(entry.place, text, report)?;
            let path = std::mem::take(&mut self.path);
            let node = self.make_directory(dir, name, &path, &metadata, report);
            self.path = path;
            self.directory_path.clone_from(&self.path);
            node?
        };
        report.done.directories += 1;
        if !is_kept {
            self.set_xattrs(node, entry, text, report)?;
        }
        let metadata = (!is_kept).then_some(metadata);
        self.stack.push(Level { node, metadata, parent_path_len });
        Ok(())
    }

    fn leave(&mut self) -> Result<()> {
        let Some(level) = self.stack.pop() else { return Ok(()) };
        self.path.clone_from(&self.directory_path);
        self.directory_path.truncate(level.parent_path_len);
        let Some(metadata) = level.metadata else { return Ok(()) };
        self.tree.set_times(level.node, &metadata).map_err(|e| self.failed("set times of", e))
    }

    fn directory(&mut self, entry: &Entry, text: &Text, report: &mut Report<'_>) -> Result<()> {
        let metadata = self.adjusted(entry.metadata);
        let path = text.bytes(entry.place.span());
        let index = self.resolve(path, Missing::Make(Some(metadata)), report)?;
        let index = index.unwrap_or(Directories::<T::Node>::ROOT);
        let node = self.directories.node(index);
        self.path.clear();
        self.path.extend_from_slice(path);
        if self.directories.is_kept(index) {
            report.done.directories += 1;
            return Ok(());
        }
        self.tree.set_metadata(node, &metadata).map_err(|e| self.failed("set", e))?;
        self.directories.set_metadata(index, metadata);
        report.done.directories += 1;
        self.set_xattrs(node, entry, text, report)
    }

    /// Makes what is not a directory, with its extended attributes.
    fn put(
        &mut self,
        entry: &Entry,
        what: Make<'_>,
        text: &Text,
        report: &mut Report<'_>,
    ) -> Result<T::Node> {
        let (dir, name) = self.locate(entry.place, text, report)?;
        let metadata = self.adjusted(entry.metadata);
        let node = match self.tree.make(dir, name, what, &metadata) {
            Err(TreeError::Exists) => {
                self.clear_way(dir, name)?;
                self.tree.make(dir, name, what, &metadata)
            }
            result => result,
        };
        let node = node.map_err(|e| self.failed("create", e))?;
        self.set_xattrs(node, entry, text, report)?;
        Ok(node)
    }

    fn hole_up_to(&mut self, offset: u64, report: &mut Report<'_>) -> Result<()> {
        let Some(extent) = &mut self.open_file else { return Ok(()) };
        if offset > extent.told_bytes {
            let hole = Segment { offset: extent.told_bytes, len_bytes: offset - extent.told_bytes };
            extent.told_bytes = offset;
            report.done.hole_bytes += hole.len_bytes;
            self.tree.append_hole(hole).map_err(|e| self.failed("write", e))?;
        }
        Ok(())
    }

    fn link(
        &mut self,
        place: Place,
        target: LinkTarget,
        text: &Text,
        report: &mut Report<'_>,
    ) -> Result<()> {
        let node = match target {
            LinkTarget::Identity(number) => self.linked(number),
            LinkTarget::Path(path) => self.link_target(text.bytes(path), place, text, report)?,
        };
        let (dir, name) = self.locate(place, text, report)?;
        let Some(node) = node else {
            let why = "is a hard link to a file that does not come before it";
            return Err(Error::refused(self.path.as_slice(), why));
        };
        let linked = match self.tree.link(dir, name, node) {
            Err(TreeError::Exists) => {
                let found = self.tree.lookup(dir, name).map_err(|e| self.failed("look up", e))?;
                if found.is_some_and(|found| found.node == node) {
                    return Ok(());
                }
                self.clear_way(dir, name)?;
                self.tree.link(dir, name, node)
            }
            result => result,
        };
        match linked.map_err(|e| self.failed("link", e))? {
            Link::Same => report.done.hard_links += 1,
            Link::Copy => {
                report.done.files += 1;
                let path = BytePath(self.path.clone());
                report.warn(&Warning { path, what: WarningKind::LinkIsCopy });
            }
        }
        Ok(())
    }

    fn linked(&mut self, number: u64) -> Option<T::Node> {
        let linked = self.links.get_mut(&number)?;
        linked.names_left = linked.names_left.saturating_sub(1);
        let node = linked.node;
        if linked.names_left == 0 {
            self.links.remove(&number);
        }
        Some(node)
    }

    fn link_target(
        &mut self,
        target: &[u8],
        place: Place,
        text: &Text,
        report: &mut Report<'_>,
    ) -> Result<Option<T::Node>> {
        let (parent, name) = split(target);
        let dir = self.resolve(parent, Missing::Leave, report)?;
        self.path.clear();
        self.path.extend_from_slice(text.bytes(place.span()));
        let Some(dir) = dir else { return Ok(None) };
        let dir = self.directories.node(dir);
        let found = self.tree.lookup(dir, name).map_err(|e| self.failed("look up", e))?;
        match found {
            Some(Found { kind: FoundKind::Directory, .. }) => {
                let why = format!("is a hard link to the directory {}", BytePath::from(target));
                Err(Error::refused(self.path.as_slice(), why))
            }
            found => Ok(found.map(|found| found.node)),
        }
    }

    fn remember(&mut self, identity: Option<Identity>, node: T::Node) {
        if let Some(Identity { number, links }) = identity {
            self.links.insert(number, Linked { node, names_left: links.saturating_sub(1) });
        }
    }

    /// The directory and name of a place. Sets the path for errors; makes missing parents.
    fn locate<'t>(
        &mut self,
        place: Place,
        text: &'t Text,
        report: &mut Report<'_>,
    ) -> Result<(T::Node, &'t [u8])> {
        self.path.clear();
        let (dir, name) = match place {
            Place::Name(name) => {
                let name = text.bytes(name);
                self.path.extend_from_slice(&self.directory_path);
                if !self.path.is_empty() {
                    self.path.push(b'/');
                }
                self.path.extend_from_slice(name);
                let dir = self.stack.last().map_or_else(|| self.tree.root(), |level| level.node);
                (dir, name)
            }
            Place::Path(path) => {
                let path = text.bytes(path);
                let (parent, name) = split(path);
                let dir = self.resolve(parent, Missing::Make(None), report)?;
                self.path.clear();
                self.path.extend_from_slice(path);
                (self.directories.node(dir.unwrap_or(Directories::<T::Node>::ROOT)), name)
            }
        };
        check_name(name, &self.path)?;
        Ok((dir, name))
    }

    /// The directory at `path`, found component by component and made as `missing` says; `None`
    /// if it is missing and stays so.
    fn resolve(
        &mut self,
        path: &[u8],
        missing: Missing,
        report: &mut Report<'_>,
    ) -> Result<Option<usize>> {
        if let Some(index) = self.directories.last_resolved(path) {
            return Ok(Some(index));
        }
        let mut index = Directories::<T::Node>::ROOT;
        let mut end = 0;
        for name in path.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
            end += name.len() + usize::from(end > 0);
            index = match self.directories.child(index, name) {
                Some(child) => child,
                None => match self.find_or_make(
                    index,
                    name,
                    &path[..end],
                    end == path.len(),
                    missing,
                    report,
                )? {
                    Some(child) => child,
                    None => return Ok(None),
                },
            };
        }
        self.directories.set_last_resolved(path, index);
        Ok(Some(index))
    }

    /// One component of [`TreeSink::resolve`] that is not known yet.
    fn find_or_make(
        &mut self,
        parent: usize,
        name: &[u8],
        path: &[u8],
        is_last: bool,
        missing: Missing,
        report: &mut Report<'_>,
    ) -> Result<Option<usize>> {
        check_name(name, path)?;
        let dir = self.directories.node(parent);
        let member = match missing {
            Missing::Make(metadata) if is_last => metadata,
            _ => None,
        };
        let found = self.tree.lookup(dir, name).map_err(|e| failed("look up", path, e))?;
        match found {
            Some(Found { kind: FoundKind::Directory, node, is_ours }) => {
                let index = self.directories.insert(parent, name, node, None);
                if !is_ours {
                    self.directories.keep(index);
                }
                return Ok(Some(index));
            }
            Some(found) if found.is_ours && member.is_some() => {
                self.tree.unlink(dir, name).map_err(|e| failed("replace", path, e))?;
            }
            Some(Found { kind: FoundKind::Symlink, .. }) => {
                let why = "is a symbolic link; nothing is put below one";
                return Err(Error::refused(path, why));
            }
            Some(_) => {
                let why = "is not a directory; nothing can be put below it";
                return Err(Error::refused(path, why));
            }
            None if matches!(missing, Missing::Leave) => return Ok(None),
            None => {}
        }
        let metadata = member.unwrap_or_else(|| self.implied());
        let (node, _) = self.make_directory(dir, name, path, &metadata, report)?;
        Ok(Some(self.directories.insert(parent, name, node, Some(metadata))))
    }

    /// Makes a directory, or a subvolume where one was asked for. One that is there is taken.
    /// Returns whether it was there before this run, too, and keeps its metadata.
    fn make_directory(
        &mut self,
        dir: T::Node,
        name: &[u8],
        path: &[u8],
        metadata: &Metadata,
        report: &mut Report<'_>,
    ) -> Result<(T::Node, bool)> {
        let is_subvolume = !self.subvolumes_left.is_empty() && self.subvolumes_left.remove(path);
        let what = if is_subvolume { Make::Subvolume } else { Make::Directory };
        match self.tree.make(dir, name, what, metadata) {
            Ok(node) => {
                report.done.subvolumes += u64::from(is_subvolume);
                Ok((node, false))
            }
            Err(TreeError::Exists) => {
                let found = self.tree.lookup(dir, name).map_err(|e| failed("look up", path, e))?;
                match found {
                    Some(Found { kind: FoundKind::Directory, .. }) if is_subvolume => {
                        let why = "is there already, so it cannot become a subvolume";
                        Err(Error::refused(path, why))
                    }
                    Some(Found { kind: FoundKind::Directory, node, is_ours: false }) => {
                        Ok((node, true))
                    }
                    Some(Found { kind: FoundKind::Directory, node, is_ours: true }) => {
                        self.tree
                            .set_metadata(node, metadata)
                            .map_err(|e| failed("set", path, e))?;
                        Ok((node, false))
                    }
                    _ => Err(Error::refused(path, TAKEN)),
                }
            }
            Err(error) => Err(failed("create", path, error)),
        }
    }

    /// Removes what this run made under a name that is made again.
    fn clear_way(&mut self, dir: T::Node, name: &[u8]) -> Result<()> {
        let found = self.tree.lookup(dir, name).map_err(|e| self.failed("look up", e))?;
        match found {
            None => Ok(()),
            Some(Found { kind: FoundKind::Directory, .. }) => {
                let why = "is a directory in the destination and something else in the source";
                Err(Error::refused(self.path.as_slice(), why))
            }
            Some(found) if found.is_ours => {
                self.tree.unlink(dir, name).map_err(|e| self.failed("replace", e))
            }
            Some(_) => Err(Error::refused(self.path.as_slice(), TAKEN)),
        }
    }

    fn set_xattrs(
        &mut self,
        node: T::Node,
        entry: &Entry,
        text: &Text,
        report: &mut Report<'_>,
    ) -> Result<()> {
        for xattr in &entry.xattrs {
            let (name, value) = (text.bytes(xattr.name), text.bytes(xattr.value));
            self.tree
                .set_xattr(node, name, value)
                .map_err(|e| self.failed("set an extended attribute of", e))?;
            report.done.xattrs += 1;
        }
        Ok(())
    }

    fn adjusted(&self, mut metadata: Metadata) -> Metadata {
        if let Some(Owner { uid, gid }) = self.options.owner {
            (metadata.uid, metadata.gid) = (uid, gid);
        }
        if self.options.atime_is_mtime {
            metadata.atime = Some(metadata.mtime);
        }
        metadata
    }

    /// Metadata of a directory that an archive implies but does not have.
    fn implied(&self) -> Metadata {
        let mtime = self.options.implied_time;
        self.adjusted(Metadata { permissions: 0o755, uid: 0, gid: 0, atime: Some(mtime), mtime })
    }

    fn failed(&self, op: &'static str, error: TreeError) -> Error {
        failed(op, &self.path, error)
    }

    fn set_directory_times(&mut self) -> Result<(), TreeError> {
        while let Some(some) = self.directories.take_metadata(DIRECTORIES_AT_ONCE) {
            self.tree.begin(Work { names: some.len() as u64, ..Work::default() })?;
            let result =
                some.iter().try_for_each(|(node, metadata)| self.tree.set_times(*node, metadata));
            self.tree.end();
            result?;
        }
        Ok(())
    }
}

impl<T: Tree> Sink for TreeSink<T> {
    type Data = T::Data;

    fn prepare(&self) -> Box<dyn Prepare<T::Data>> {
        self.tree.prepare()
    }

    fn apply(&mut self, batch: Batch<T::Data>, report: &mut Report<'_>) -> Result<()> {
        let Batch { steps, text, .. } = batch;
        steps.into_iter().try_for_each(|step| self.step(step, &text, report))
    }

    fn finish(&mut self, _: &mut Report<'_>) -> Result<()> {
        self.path.clear();
        self.set_directory_times().map_err(|e| self.failed("set times of", e))?;
        match self.subvolumes_left.first() {
            Some(path) => {
                let why = "was to become a subvolume, but the source has no such directory";
                Err(Error::refused(path.as_slice(), why))
            }
            None => Ok(()),
        }
    }
}

/// Directories whose times are set in one batch of changes.
const DIRECTORIES_AT_ONCE: usize = 8;

const TAKEN: &str = "is there already; what the destination has is not replaced";

/// What to do where a path leads to nothing.
#[derive(Clone, Copy)]
enum Missing {
    /// Leave it so.
    Leave,
    /// Make directories, the last with this metadata: it is a member of the archive.
    Make(Option<Metadata>),
}

/// What a step changes at worst.
fn work_of<D>(step: &Step<D>, text: &Text) -> Work {
    // Parents that are missing are made: an archive's path may be all new.
    let names_of = |place: &Place| match place {
        Place::Name(_) => 1,
        Place::Path(path) => {
            1 + text.bytes(*path).iter().filter(|&&byte| byte == b'/').count() as u64
        }
    };
    match step {
        Step::Enter(entry) | Step::Directory(entry) | Step::Special { entry, .. } => {
            Work { names: names_of(&entry.place), xattrs: entry.xattrs.len() as u64, data_bytes: 0 }
        }
        Step::File { entry, size_bytes, content, .. } => Work {
            names: names_of(&entry.place),
            xattrs: entry.xattrs.len() as u64,
            data_bytes: if matches!(content, Content::Whole(_)) { *size_bytes } else { 0 },
        },
        // A name in the way is removed first.
        Step::Link { place, .. } => Work { names: 1 + names_of(place), ..Work::default() },
        _ => Work { names: 1, ..Work::default() },
    }
}

/// The parent and the name of a path.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&b| b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&path[..0], path),
    }
}

fn check_name(name: &[u8], path: &[u8]) -> Result<()> {
    if name.len() > NAME_BYTES_MAX {
        let why = format!("has a name of {} bytes; {NAME_BYTES_MAX} is the limit", name.len());
        return Err(Error::refused(path, why));
    }
    Ok(())
}

fn failed(op: &'static str, path: &[u8], error: TreeError) -> Error {
    match error {
        TreeError::Exists => Error::refused(path, TAKEN),
        TreeError::Other(cause) => Error::failed(op, path, cause),
    }
}
