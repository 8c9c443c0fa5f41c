//! What differs between two trees, in words.

use std::fmt::{self, Debug};

use super::{Entry, Kind, Timestamp, TreeSnapshot};

/// What two trees must agree in. What one side does not know is never compared.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is one attribute")]
pub struct Compare {
    /// Owners and groups.
    pub owners: bool,
    /// Times of last change.
    pub mtime: bool,
    /// Times of last change of inodes.
    pub ctime: bool,
    /// Times of last read.
    pub atime: bool,
    /// Times of creation.
    pub btime: bool,
    /// Where files have holes.
    pub holes: bool,
    /// Lengths and link counts of directories, which each filesystem counts in its own way.
    pub directory_numbers: bool,
    /// Numbers of inodes.
    pub inodes: bool,
    /// Which directories are roots of subvolumes, and their numbers.
    pub subvolumes: bool,
    /// Extended attributes.
    pub xattrs: bool,
    /// The root directory's own attributes.
    pub root: bool,
    /// Nanoseconds of times; without, seconds only.
    pub nanoseconds: bool,
}

impl Compare {
    /// Two views of one filesystem: everything.
    pub fn same_filesystem() -> Self {
        Self {
            owners: true,
            mtime: true,
            ctime: true,
            atime: true,
            btime: true,
            holes: true,
            directory_numbers: true,
            inodes: true,
            subvolumes: true,
            xattrs: true,
            root: true,
            nanoseconds: true,
        }
    }

    /// A tree and its copy on another filesystem: all that a copy can carry.
    pub fn copied() -> Self {
        Self {
            ctime: false,
            atime: false,
            btime: false,
            directory_numbers: false,
            inodes: false,
            subvolumes: false,
            ..Self::same_filesystem()
        }
    }
}

/// Differences, each with its path.
#[derive(Clone, Debug, Default)]
pub struct Differences {
    /// A line each.
    pub lines: Vec<String>,
}

impl Differences {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }
}

const SHOWN_MAX: usize = 40;

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.lines.iter().take(SHOWN_MAX) {
            writeln!(f, "  {line}")?;
        }
        match self.lines.len().checked_sub(SHOWN_MAX) {
            None | Some(0) => Ok(()),
            Some(more) => writeln!(f, "  … and {more} more"),
        }
    }
}

pub(super) fn differences(
    left: &TreeSnapshot,
    right: &TreeSnapshot,
    compare: &Compare,
) -> Differences {
    let mut found = Differences::default();
    for (path, entry) in &left.entries {
        match right.entries.get(path) {
            None => found.lines.push(format!("{}: {:?} | missing", show(path), entry.kind)),
            Some(other) if path.is_empty() && !compare.root => {
                if entry.kind != other.kind {
                    found.lines.push(format!("the root: {:?} | {:?}", entry.kind, other.kind));
                }
            }
            Some(other) => {
                let mut of_entry =
                    OfEntry { path, lines: &mut found.lines, nanoseconds: compare.nanoseconds };
                of_entry.compare(entry, other, compare);
            }
        }
    }
    for (path, entry) in &right.entries {
        if !left.entries.contains_key(path) {
            found.lines.push(format!("{}: missing | {:?}", show(path), entry.kind));
        }
    }
    found
}

struct OfEntry<'a> {
    path: &'a [u8],
    lines: &'a mut Vec<String>,
    nanoseconds: bool,
}

impl OfEntry<'_> {
    fn compare(&mut self, left: &Entry, right: &Entry, compare: &Compare) {
        if left.kind != right.kind {
            return self.differ("kind", &left.kind, &right.kind);
        }
        if left.mode != right.mode {
            self.line("mode", &format!("{:o}", left.mode), &format!("{:o}", right.mode));
        }
        if compare.owners && (left.uid, left.gid) != (right.uid, right.gid) {
            self.differ("owner", &(left.uid, left.gid), &(right.uid, right.gid));
        }
        if left.kind != Kind::Directory || compare.directory_numbers {
            self.known("nlink", left.nlink.as_ref(), right.nlink.as_ref());
            self.known("size", left.size_bytes.as_ref(), right.size_bytes.as_ref());
        }
        if compare.mtime {
            self.time("mtime", left.mtime, right.mtime);
        }
        if compare.ctime {
            self.time("ctime", left.ctime, right.ctime);
        }
        if compare.atime {
            self.time("atime", left.atime, right.atime);
        }
        if compare.btime {
            self.time("btime", left.btime, right.btime);
        }
        self.known("rdev", left.rdev.as_ref(), right.rdev.as_ref());
        self.known_bytes("target", left.target.as_deref(), right.target.as_deref());
        if compare.xattrs {
            self.xattrs(left, right);
        }
        self.known("content", left.content.as_ref(), right.content.as_ref());
        if compare.holes {
            self.known("data at", left.data.as_ref(), right.data.as_ref());
        }
        if compare.inodes {
            self.known("inode", left.inode.as_ref(), right.inode.as_ref());
        }
        if compare.subvolumes {
            self.known("subvolume", left.subvolume.as_ref(), right.subvolume.as_ref());
        }
        if left.link_of != right.link_of {
            let name = |link: &Option<Vec<u8>>| link.as_deref().map_or("itself".to_owned(), show);
            self.line("another name of", &name(&left.link_of), &name(&right.link_of));
        }
    }

    fn xattrs(&mut self, left: &Entry, right: &Entry) {
        let (Some(left), Some(right)) = (&left.xattrs, &right.xattrs) else { return };
        for (name, value) in left {
            let what = format!("xattr {}", show(name));
            match right.get(name) {
                None => self.line(&what, &show(value), "missing"),
                Some(other) => self.known_bytes(&what, Some(value), Some(other)),
            }
        }
        for (name, value) in right {
            if !left.contains_key(name) {
                self.line(&format!("xattr {}", show(name)), "missing", &show(value));
            }
        }
    }

    fn time(&mut self, what: &str, left: Option<Timestamp>, right: Option<Timestamp>) {
        let seen = |time: Option<Timestamp>| {
            time.map(|time| if self.nanoseconds { time } else { Timestamp { nsec: 0, ..time } })
        };
        let (left, right) = (seen(left), seen(right));
        self.known(what, left.as_ref(), right.as_ref());
    }

    fn known<T: PartialEq + Debug>(&mut self, what: &str, left: Option<&T>, right: Option<&T>) {
        if let (Some(left), Some(right)) = (left, right)
            && left != right
        {
            self.differ(what, left, right);
        }
    }

    fn known_bytes(&mut self, what: &str, left: Option<&[u8]>, right: Option<&[u8]>) {
        if let (Some(left), Some(right)) = (left, right)
            && left != right
        {
            self.line(what, &show(left), &show(right));
        }
    }

    fn differ<T: Debug>(&mut self, what: &str, left: &T, right: &T) {
        self.line(what, &format!("{left:?}"), &format!("{right:?}"));
    }

    fn line(&mut self, what: &str, left: &str, right: &str) {
        self.lines.push(format!("{}: {what}: {left} | {right}", show(self.path)));
    }
}

const SHOWN_BYTES_MAX: usize = 120;

fn show(bytes: &[u8]) -> String {
    let shown = bytes[..bytes.len().min(SHOWN_BYTES_MAX)].escape_ascii();
    if bytes.len() > SHOWN_BYTES_MAX {
        format!("\"{shown}…\" ({} bytes)", bytes.len())
    } else {
        format!("\"{shown}\"")
    }
}
