//! What either side can do to a filesystem, on paths below the top level.

use std::collections::BTreeSet;
use std::fmt;

/// Bytes to write, of which no message shows more than how many there are.
#[derive(Clone)]
pub struct Data(pub Vec<u8>);

impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// By which way data comes in, where a side has several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// By one call; in the engine, past its page cache.
    Straight,
    /// Through the page cache, to be written later.
    Buffered,
    /// Past the page cache, in whole sectors.
    Direct,
}

/// What a new inode is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Node {
    File,
    /// An empty file that is then set to be overwritten in place.
    FileInPlace,
    /// Made without a name, filled, and then linked.
    Unnamed,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

/// How names change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rename {
    Replace,
    NoReplace,
    Exchange,
    Whiteout,
}

/// An inode flag that both sides set by one name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flag {
    Immutable,
    Append,
    InPlace,
    NoAtime,
    NoDump,
    Compress,
    NoCompress,
}

/// What becomes of a range of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    Allocate,
    /// The file ends where it did.
    AllocateBehind,
    Punch,
    Zero,
    ZeroBehind,
}

/// A range of one file, and where it goes in another.
#[derive(Clone, Debug)]
pub struct Ranges {
    pub from: String,
    pub offset: u64,
    /// Up to the source's end if it is 0.
    pub len_bytes: u64,
    pub to: String,
    pub to_offset: u64,
}

/// One thing that is done.
#[derive(Clone, Debug)]
pub enum Operation {
    Make {
        path: String,
        node: Node,
    },
    Write {
        path: String,
        offset: u64,
        data: Data,
        way: Way,
    },
    Truncate {
        path: String,
        size: u64,
        way: Way,
    },
    Reserve {
        path: String,
        offset: u64,
        len_bytes: u64,
        space: Space,
    },
    Clone(Ranges),
    /// The target first gets the same bytes.
    Dedupe(Ranges),
    Copy(Ranges),
    RemoveDirectory {
        path: String,
    },
    Remove {
        path: String,
    },
    /// The inode stays open until the turn ends, or the power goes.
    RemoveOpen {
        path: String,
    },
    Rename {
        from: String,
        to: String,
        mode: Rename,
    },
    Link {
        from: String,
        to: String,
    },
    LinkMany {
        from: String,
        to: Vec<String>,
    },
    RemoveMany {
        paths: Vec<String>,
    },
    Chmod {
        path: String,
        mode: u32,
    },
    Chown {
        path: String,
        uid: u32,
        gid: u32,
    },
    Times {
        path: String,
        atime: (i64, u32),
        mtime: (i64, u32),
    },
    SetXattr {
        path: String,
        name: &'static str,
        value: Data,
    },
    RemoveXattr {
        path: String,
        name: &'static str,
    },
    Acl {
        path: String,
        name: &'static str,
        value: Data,
    },
    Flag {
        path: String,
        flag: Flag,
        on: bool,
    },
    Compression {
        path: String,
        value: &'static str,
    },
    MakeSubvolume {
        path: String,
    },
    Snapshot {
        from: String,
        to: String,
        read_only: bool,
    },
    DeleteSubvolume {
        path: String,
    },
    ReadOnly {
        path: String,
        read_only: bool,
    },
    SetDefault {
        path: String,
    },
    /// Frees what deleted subvolumes hold, or begins to: the engine frees that many references.
    Clean {
        part: Option<usize>,
    },
    Fsync {
        path: String,
    },
    Commit,
}

impl Operation {
    /// What it is counted as.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Make { node, .. } => match node {
                Node::File => "create",
                Node::FileInPlace => "create in place",
                Node::Unnamed => "tmpfile",
                Node::Directory => "mkdir",
                Node::Symlink => "symlink",
                Node::Fifo | Node::Socket | Node::CharDevice | Node::BlockDevice => "mknod",
            },
            Self::Write { data, .. } if data.0.len() > 1 << 20 => "write much",
            Self::Write { way: Way::Direct, .. } => "write direct",
            Self::Write { .. } => "write",
            Self::Truncate { .. } => "truncate",
            Self::Reserve { space, .. } => match space {
                Space::Allocate => "allocate",
                Space::AllocateBehind => "allocate behind",
                Space::Punch => "punch",
                Space::Zero | Space::ZeroBehind => "zero",
            },
            Self::Clone(_) => "clone",
            Self::Dedupe(_) => "dedupe",
            Self::Copy(_) => "copy",
            Self::RemoveDirectory { .. } => "rmdir",
            Self::Remove { .. } => "unlink",
            Self::RemoveOpen { .. } => "unlink open",
            Self::Rename { mode, .. } => match mode {
                Rename::Replace => "rename",
                Rename::NoReplace => "rename noreplace",
                Rename::Exchange => "rename exchange",
                Rename::Whiteout => "rename whiteout",
            },
            Self::Link { .. } => "link",
            Self::LinkMany { .. } => "link many",
            Self::RemoveMany { .. } => "unlink many",
            Self::Chmod { .. } => "chmod",
            Self::Chown { .. } => "chown",
            Self::Times { .. } => "times",
            Self::SetXattr { .. } => "set xattr",
            Self::RemoveXattr { .. } => "remove xattr",
            Self::Acl { .. } => "acl",
            Self::Flag { on: true, .. } => "set flag",
            Self::Flag { on: false, .. } => "clear flag",
            Self::Compression { .. } => "compression",
            Self::MakeSubvolume { .. } => "subvolume",
            Self::Snapshot { .. } => "snapshot",
            Self::DeleteSubvolume { .. } => "delete subvolume",
            Self::ReadOnly { .. } => "read-only",
            Self::SetDefault { .. } => "default",
            Self::Clean { .. } => "clean",
            Self::Fsync { .. } => "fsync",
            Self::Commit => "commit",
        }
    }

    /// All that [`Operation::kind`] says.
    pub const KINDS: [&str; 44] = [
        "create",
        "create in place",
        "tmpfile",
        "mkdir",
        "symlink",
        "mknod",
        "write",
        "write much",
        "write direct",
        "truncate",
        "allocate",
        "allocate behind",
        "punch",
        "zero",
        "clone",
        "dedupe",
        "copy",
        "rmdir",
        "unlink",
        "unlink open",
        "rename",
        "rename noreplace",
        "rename exchange",
        "rename whiteout",
        "link",
        "link many",
        "unlink many",
        "chmod",
        "chown",
        "times",
        "set xattr",
        "remove xattr",
        "acl",
        "set flag",
        "clear flag",
        "compression",
        "subvolume",
        "snapshot",
        "delete subvolume",
        "read-only",
        "default",
        "clean",
        "fsync",
        "commit",
    ];

    /// Whether it is all or nothing, whatever it fails for.
    fn is_atomic(&self) -> bool {
        match self {
            // Its steps are operations of their own.
            Self::Make { node: Node::FileInPlace | Node::Unnamed, .. }
            | Self::Write { .. }
            | Self::Truncate { .. }
            | Self::Reserve { .. }
            | Self::Clone(_)
            | Self::Dedupe(_)
            | Self::Copy(_)
            | Self::LinkMany { .. }
            | Self::RemoveMany { .. } => false,
            _ => true,
        }
    }

    /// What it names and changes.
    pub fn paths(&self) -> Vec<&str> {
        match self {
            Self::Rename { from, to, .. }
            | Self::Link { from, to }
            | Self::Snapshot { from, to, .. } => vec![from, to],
            Self::Clone(ranges) | Self::Dedupe(ranges) | Self::Copy(ranges) => vec![&ranges.to],
            Self::LinkMany { from, .. } => vec![from],
            Self::RemoveMany { paths } => paths.iter().map(String::as_str).collect(),
            Self::Make { path, .. }
            | Self::Write { path, .. }
            | Self::Truncate { path, .. }
            | Self::Reserve { path, .. }
            | Self::RemoveDirectory { path }
            | Self::Remove { path }
            | Self::RemoveOpen { path }
            | Self::Chmod { path, .. }
            | Self::Chown { path, .. }
            | Self::Times { path, .. }
            | Self::SetXattr { path, .. }
            | Self::RemoveXattr { path, .. }
            | Self::Acl { path, .. }
            | Self::Flag { path, .. }
            | Self::Compression { path, .. }
            | Self::MakeSubvolume { path }
            | Self::DeleteSubvolume { path }
            | Self::ReadOnly { path, .. }
            | Self::SetDefault { path }
            | Self::Fsync { path } => vec![path],
            Self::Clean { .. } | Self::Commit => Vec::new(),
        }
    }

    /// What is as it was if it fails: what it names, and the directories above.
    pub fn witnesses(&self) -> BTreeSet<&str> {
        let paths = if self.is_atomic() { self.paths() } else { Vec::new() };
        paths.iter().flat_map(|path| [*path, split(path).0]).collect()
    }
}

/// A path's directory and last name.
pub fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}
