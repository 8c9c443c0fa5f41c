//! Whole trees as values: every entry with all that can be seen of it, to be compared.
//!
//! The same structure is made from a directory that the system can see ([`TreeSnapshot::of_directory`])
//! and, through a [`TreeBuilder`], from anything else that holds a tree. What a side does not
//! know is `None`, and is not compared.

mod diff;
mod text;
mod walk;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use sha2::{Digest, Sha256};

use crate::zeros::is_zeros;

pub use diff::{Compare, Differences};

/// A point in time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Timestamp {
    /// Seconds since 1970, negative before.
    pub sec: i64,
    /// Nanoseconds, below 10⁹.
    pub nsec: u32,
}

/// What an entry is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A fifo.
    Fifo,
    /// A socket.
    Socket,
}

impl Kind {
    /// From the type bits of a mode; `None` for what no entry can be.
    pub fn of_mode(mode: u32) -> Option<Self> {
        Some(match mode & 0o170_000 {
            0o100_000 => Self::File,
            0o040_000 => Self::Directory,
            0o120_000 => Self::Symlink,
            0o020_000 => Self::CharDevice,
            0o060_000 => Self::BlockDevice,
            0o010_000 => Self::Fifo,
            0o140_000 => Self::Socket,
            _ => return None,
        })
    }
}

/// Everything that can be seen of one entry. What is `None` is not known, and not compared.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// What it is.
    pub kind: Kind,
    /// Permission bits, set-id and sticky bits: 0 to 0o7777.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of links.
    pub nlink: Option<u32>,
    /// Length; of a directory whatever the filesystem says.
    pub size_bytes: Option<u64>,
    /// Last change of the contents.
    pub mtime: Option<Timestamp>,
    /// Last change of the inode.
    pub ctime: Option<Timestamp>,
    /// Last read.
    pub atime: Option<Timestamp>,
    /// Creation.
    pub btime: Option<Timestamp>,
    /// Major and minor number of a device.
    pub rdev: Option<(u32, u32)>,
    /// What a symbolic link says.
    pub target: Option<Vec<u8>>,
    /// All extended attributes, access control lists and capabilities among them, in the form in
    /// which the kernel lists them.
    pub xattrs: Option<BTreeMap<Vec<u8>, Vec<u8>>>,
    /// What a file holds, see [`hash_content`].
    pub content: Option<ContentHash>,
    /// Where a file has data, as SEEK_DATA and SEEK_HOLE say it: ascending, apart from each other,
    /// not beyond the end of the file.
    pub data: Option<Vec<Range<u64>>>,
    /// The inode's number.
    pub inode: Option<u64>,
    /// The number of the subvolume whose root this is; 0 for what is no root.
    pub subvolume: Option<u64>,
    /// The first name, in the order of the tree, of what this entry is another name of. Filled in
    /// by [`TreeBuilder`].
    pub link_of: Option<Vec<u8>>,
}

impl Entry {
    /// An entry of which nothing else is known yet.
    pub fn new(kind: Kind, mode: u32, uid: u32, gid: u32) -> Self {
        Self {
            kind,
            mode: mode & 0o7777,
            uid,
            gid,
            nlink: None,
            size_bytes: None,
            mtime: None,
            ctime: None,
            atime: None,
            btime: None,
            rdev: None,
            target: None,
            xattrs: None,
            content: None,
            data: None,
            inode: None,
            subvolume: None,
            link_of: None,
        }
    }
}

/// A hash of what a file holds, which does not depend on where its holes are.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContentHash(pub [u8; 32]);

impl std::fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

const HASH_BLOCK: usize = 4096;
const READ_BYTES_MAX: u64 = 1 << 20;

/// The hash of a file's contents: sha256 over offset and bytes of each aligned block of 4 KiB that
/// holds anything but zeros, the last one filled up with zeros. Reads only within `data`, the
/// ranges that may hold something, ascending.
///
/// # Errors
/// Those of `read_at`, which must fill the buffer.
pub fn hash_content<E>(
    size_bytes: u64,
    data: &[Range<u64>],
    mut read_at: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
) -> Result<ContentHash, E> {
    const BLOCK: u64 = HASH_BLOCK as u64;
    let mut hasher = Sha256::new();
    let at_once = size_bytes.div_ceil(BLOCK).saturating_mul(BLOCK).min(READ_BYTES_MAX);
    let mut buffer = vec![0; usize::try_from(at_once).expect("at most a buffer")];
    let mut done = 0;
    for range in data {
        let mut at = (range.start / BLOCK * BLOCK).max(done);
        let end = range.end.div_ceil(BLOCK).saturating_mul(BLOCK);
        while at < end && at < size_bytes {
            let len = (end - at).min(at_once);
            let readable = len.min(size_bytes - at);
            let bytes = &mut buffer[..usize::try_from(len).expect("at most a buffer")];
            let (inside, beyond) =
                bytes.split_at_mut(usize::try_from(readable).expect("at most a buffer"));
            read_at(at, inside)?;
            beyond.fill(0);
            for (index, block) in bytes.chunks_exact(HASH_BLOCK).enumerate() {
                if !is_zeros(block) {
                    let offset = at + BLOCK * u64::try_from(index).expect("an index fits");
                    hasher.update(offset.to_le_bytes());
                    hasher.update(block);
                }
            }
            at += len;
        }
        done = at.max(done);
    }
    Ok(ContentHash(hasher.finalize().into()))
}

/// Ranges in the form that [`Entry::data`] has: cut at the end of the file, empty ones left out,
/// neighbours joined. The ranges must ascend.
pub fn normal_ranges(
    ranges: impl IntoIterator<Item = Range<u64>>,
    size_bytes: u64,
) -> Vec<Range<u64>> {
    let mut normal: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        let range = range.start..range.end.min(size_bytes);
        if range.is_empty() {
            continue;
        }
        match normal.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => normal.push(range),
        }
    }
    normal
}

/// A tree: each entry at its path below the root, with `/` between names; the root at the empty path.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TreeSnapshot {
    /// The entries.
    pub entries: BTreeMap<Vec<u8>, Entry>,
}

impl TreeSnapshot {
    /// What differs between two trees.
    pub fn differences(&self, other: &Self, compare: &Compare) -> Differences {
        diff::differences(self, other, compare)
    }

    /// Panics where two trees differ.
    ///
    /// # Panics
    /// With the differences, the first ones of them in full.
    pub fn assert_same(&self, other: &Self, compare: &Compare) {
        let differences = self.differences(other, compare);
        assert!(differences.is_empty(), "the trees differ (left | right)\n{differences}");
    }

    /// The entries below a directory, as a tree of its own.
    pub fn below(&self, directory: &[u8]) -> Self {
        let mut prefix = directory.to_vec();
        prefix.push(b'/');
        let entries = self.entries.iter().filter_map(|(path, entry)| {
            let path = if path == directory { &[][..] } else { path.strip_prefix(&prefix[..])? };
            let mut entry = entry.clone();
            if let Some(first) = &entry.link_of {
                // A first name outside of the directory names nothing here.
                entry.link_of = first.strip_prefix(&prefix[..]).map(<[u8]>::to_vec);
            }
            Some((path.to_vec(), entry))
        });
        Self { entries: entries.collect() }
    }
}

/// Makes a snapshot of entries that are added in any order.
#[derive(Debug, Default)]
pub struct TreeBuilder {
    entries: BTreeMap<Vec<u8>, ((u64, u64), Entry)>,
}

impl TreeBuilder {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an entry. Entries of one `identity` (subvolume or device, inode) are names of one
    /// thing.
    ///
    /// # Panics
    /// If there is one at that path.
    pub fn add(&mut self, path: Vec<u8>, identity: (u64, u64), entry: Entry) {
        let before = self.entries.insert(path, (identity, entry));
        assert!(before.is_none(), "two entries have one path");
    }

    /// The snapshot.
    pub fn finish(self) -> TreeSnapshot {
        let mut firsts: HashMap<(u64, u64), Vec<u8>> = HashMap::new();
        let mut entries = BTreeMap::new();
        for (path, (identity, mut entry)) in self.entries {
            if entry.kind != Kind::Directory {
                match firsts.get(&identity) {
                    Some(first) => entry.link_of = Some(first.clone()),
                    None => _ = firsts.insert(identity, path.clone()),
                }
            }
            entries.insert(path, entry);
        }
        TreeSnapshot { entries }
    }
}
