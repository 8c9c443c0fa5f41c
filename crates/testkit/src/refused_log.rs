//! Logs that Linux (seen in 6.18) writes and then refuses to replay, told by what the image holds.
//!
//! - With mixed block groups it takes all extents that a log names out of the free space before it replays
//!   anything. Where the group's free space is kept in bitmaps in memory, which it is once it lies in many
//!   pieces, an extent that was in use at the last commit already is not found there: EINVAL.
//! - A snapshot shows an empty directory in the place of a subvolume that lay in its source. Once such a
//!   stand-in is removed and its directory's entries are logged, the replay looks for the inode that the
//!   entry names, whose number is the subvolume's: there is none, or one without that name: ENOENT. The same where the
//!   directory itself is gone, as the replay then removes what the last commit has in it.
//!
//! Whoever reads these with the engine finds them whole; only the replay is to be left to it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use ubtrfs_ondisk::block::{Block, Leaf};
use ubtrfs_ondisk::chunk::Chunk;
use ubtrfs_ondisk::dir::{DirEntry, FileType};
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::file_extent::FileExtent;
use ubtrfs_ondisk::root::{RootItem, RootRef};
use ubtrfs_ondisk::verify::{self, Expect};
use ubtrfs_ondisk::{Key, KeyType, LogicalAddr, RootId};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// Smaller groups have no bitmaps: one would stand for more than twice the group, with sectors and pages of
/// 4 KiB.
const BITMAP_GROUP_BYTES_MIN: u64 = 64 << 20;
/// With fewer pieces of free space than that, a group has no bitmaps. Linux begins them with a third of the
/// extents that fit 32 KiB of its memory, which are somewhat more than 100.
const PIECES_MIN: usize = 90;

/// Why Linux does not replay a log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum RefusedLog {
    /// It names extents of mixed block groups that were in use at the last commit.
    ExtentsInUse,
    /// A directory was logged without the stand-in of a subvolume that it held.
    StandInRemoved,
}

impl RefusedLog {
    /// Whether that is what mount said.
    #[must_use]
    pub fn is_told_by(self, said: &str) -> bool {
        said.contains(match self {
            // Its words for EINVAL.
            Self::ExtentsInUse => "wrong fs type, bad option, bad superblock",
            Self::StandInRemoved => "No such file or directory",
        })
    }
}

/// All for which Linux may refuse the log of a filesystem that lies in these images; nothing if it has to
/// take it.
///
/// # Panics
/// If the filesystem cannot be read.
#[must_use]
pub fn refused_log(images: &[PathBuf]) -> BTreeSet<RefusedLog> {
    let trees = Trees::of(images);
    let mut found = BTreeSet::new();
    if trees.logs.is_empty() {
        return found;
    }
    if trees.names_extents_in_use() {
        found.insert(RefusedLog::ExtentsInUse);
    }
    if trees.logs.iter().any(|(root, log)| trees.removes_stand_in(*root, *log)) {
        found.insert(RefusedLog::StandInRemoved);
    }
    found
}

/// The trees of the last commit, and the logs behind it.
struct Trees {
    volume: Volume,
    roots: BTreeMap<RootId, LogicalAddr>,
    /// Where a subvolume is, by its parent: the directory and the index there.
    places: BTreeSet<(RootId, RootId, u64, u64)>,
    logs: BTreeMap<RootId, LogicalAddr>,
    log_block_count: usize,
}

impl Trees {
    fn of(images: &[PathBuf]) -> Self {
        let open = |image: &PathBuf| {
            let device = FileDevice::open(image, OpenMode::ReadOnly, Window::Whole);
            Arc::new(device.expect("an image opens")) as Arc<dyn Device>
        };
        let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
        let volume = Volume::open(images.iter().map(open).collect(), &options);
        let volume = volume.expect("the images are a filesystem's");
        let superblock = volume.superblock();
        let mut trees = Self {
            volume,
            roots: BTreeMap::new(),
            places: BTreeSet::new(),
            logs: BTreeMap::new(),
            log_block_count: 0,
        };
        for_each_item(&trees.volume, LogicalAddr(superblock.chunk_root.get()), |key, data| {
            if key.ty == KeyType::CHUNK_ITEM {
                let chunk = Chunk::parse(LogicalAddr(key.offset), data).expect("a chunk");
                trees.volume.add_chunk(chunk).expect("the chunk is on these devices");
            }
        });
        for_each_item(&trees.volume, LogicalAddr(superblock.root.get()), |key, data| {
            let root = RootId(key.objectid.0);
            match key.ty {
                KeyType::ROOT_ITEM => _ = trees.roots.insert(root, address_of_root(data)),
                KeyType::ROOT_BACKREF => {
                    let (place, _) = RootRef::parse(data).expect("a reference");
                    let (dir, index) = (place.dirid.get(), place.sequence.get());
                    trees.places.insert((root, RootId(key.offset), dir, index));
                }
                _ => {}
            }
        });
        if superblock.log_root.get() != 0 {
            let log_root = LogicalAddr(superblock.log_root.get());
            trees.log_block_count = for_each_item(&trees.volume, log_root, |key, data| {
                if key.ty == KeyType::ROOT_ITEM {
                    trees.logs.insert(RootId(key.offset), address_of_root(data));
                }
            });
            for log in trees.logs.values() {
                trees.log_block_count += for_each_item(&trees.volume, *log, |_, _| ());
            }
        }
        trees
    }

    fn names_extents_in_use(&self) -> bool {
        let features = Incompat(self.volume.superblock().incompat_flags.get());
        if !features.contains(Incompat::MIXED_GROUPS) {
            return false;
        }
        let mut logged = BTreeSet::new();
        for log in self.logs.values() {
            for_each_item(&self.volume, *log, |key, data| {
                if key.ty != KeyType::EXTENT_DATA {
                    return;
                }
                if let FileExtent::Regular(extent) | FileExtent::Prealloc(extent) =
                    FileExtent::parse(data).expect("a file extent")
                {
                    // Holes are of no extent.
                    logged.insert((extent.disk_bytenr.0, extent.disk_num_bytes));
                }
            });
        }
        let mut used = BTreeMap::new();
        let nodesize_bytes = self.volume.geometry().nodesize_bytes as u64;
        for_each_item(&self.volume, self.roots[&RootId::EXTENT_TREE], |key, _| match key.ty {
            KeyType::EXTENT_ITEM => _ = used.insert(key.objectid.0, key.offset),
            KeyType::METADATA_ITEM => _ = used.insert(key.objectid.0, nodesize_bytes),
            _ => {}
        });
        let in_use = logged.iter().filter(|(start, len)| used.get(start) == Some(len));
        in_use.into_iter().any(|(start, _)| {
            let group = self.volume.chunk_at(LogicalAddr(*start)).expect("the extent has a chunk");
            // A block of the log takes a piece apart.
            let pieces = free_pieces(&group, &used) + self.log_block_count;
            group.len_bytes >= BITMAP_GROUP_BYTES_MIN && pieces >= PIECES_MIN
        })
    }

    fn removes_stand_in(&self, root: RootId, log: LogicalAddr) -> bool {
        let Some(committed) = self.roots.get(&root) else { return false };
        let committed = Entries::of(&self.volume, *committed);
        let logged = Entries::of(&self.volume, log);
        let is_stand_in = |dir: u64, index: u64, entry: &Entry| {
            let place = (RootId(entry.target.objectid.0), root, dir, index);
            entry.target.ty == KeyType::ROOT_ITEM && !self.places.contains(&place)
        };
        // Directories all of which the replay removes.
        let mut removed = Vec::new();
        let mut removes = |dir: u64, index: u64, entry: &Entry| {
            if entry.is_directory && !logged.named.contains(&entry.target.objectid.0) {
                removed.push(entry.target.objectid.0);
            }
            is_stand_in(dir, index, entry)
        };
        for (dir, ranges) in &logged.ranges {
            for (index, entry) in committed.of_directory(*dir) {
                let is_logged = ranges.iter().any(|range| range.contains(&index));
                if is_logged && !logged.has(*dir, index, entry) && removes(*dir, index, entry) {
                    return true;
                }
            }
        }
        while let Some(dir) = removed.pop() {
            for (index, entry) in committed.of_directory(dir) {
                if entry.is_directory && !logged.named.contains(&entry.target.objectid.0) {
                    removed.push(entry.target.objectid.0);
                }
                if is_stand_in(dir, index, entry) {
                    return true;
                }
            }
        }
        false
    }
}

/// In how many pieces a group's free space is.
fn free_pieces(group: &Chunk, used: &BTreeMap<u64, u64>) -> usize {
    let (mut at, end) = (group.start.0, group.start.0 + group.len_bytes);
    let mut count = 0;
    for (start, len) in used.range(at..end) {
        count += usize::from(*start > at);
        at = start + len;
    }
    count + usize::from(end > at)
}

/// What a directory holds at an index.
struct Entry {
    name: Vec<u8>,
    target: Key,
    /// One of its own, no subvolume.
    is_directory: bool,
}

/// The directories of one tree, or of its log.
#[derive(Default)]
struct Entries {
    by_index: BTreeMap<(u64, u64), Entry>,
    /// Indexes of which a log has all entries.
    ranges: BTreeMap<u64, Vec<RangeInclusive<u64>>>,
    /// Inodes that have a name.
    named: BTreeSet<u64>,
}

impl Entries {
    fn of(volume: &Volume, root: LogicalAddr) -> Self {
        let mut entries = Self::default();
        for_each_item(volume, root, |key, data| {
            let inode = key.objectid.0;
            match key.ty {
                KeyType::DIR_INDEX => {
                    let (entry, _) = DirEntry::split(data).expect("an entry");
                    let target = entry.item.location.key();
                    let is_directory = entry.file_type() == FileType::Directory
                        && target.ty == KeyType::INODE_ITEM;
                    let entry = Entry { name: entry.name.to_vec(), target, is_directory };
                    entries.by_index.insert((inode, key.offset), entry);
                }
                KeyType::DIR_LOG_INDEX => {
                    let end = data.try_into().map(u64::from_le_bytes).expect("an index");
                    entries.ranges.entry(inode).or_default().push(key.offset..=end);
                }
                KeyType::INODE_REF | KeyType::INODE_EXTREF => _ = entries.named.insert(inode),
                _ => {}
            }
        });
        entries
    }

    fn of_directory(&self, dir: u64) -> impl Iterator<Item = (u64, &Entry)> {
        let all = self.by_index.range((dir, 0)..=(dir, u64::MAX));
        all.map(|((_, index), entry)| (*index, entry))
    }

    fn has(&self, dir: u64, index: u64, entry: &Entry) -> bool {
        self.by_index.get(&(dir, index)).is_some_and(|other| other.name == entry.name)
    }
}

fn address_of_root(data: &[u8]) -> LogicalAddr {
    LogicalAddr(RootItem::parse(data).expect("a root").bytenr.get())
}

/// All items of a tree, in order. Returns how many blocks it has.
fn for_each_item(volume: &Volume, root: LogicalAddr, mut each: impl FnMut(Key, &[u8])) -> usize {
    let mut count = 0;
    // The next to be read is the last.
    let mut left = vec![root];
    while let Some(at) = left.pop() {
        count += 1;
        match block(volume, at) {
            Block::Leaf(leaf) => for_each_slot(&leaf, &mut each),
            Block::Node(node) => left.extend((0..node.len()).rev().map(|slot| node.child(slot))),
        }
    }
    count
}

fn for_each_slot(leaf: &Leaf, each: &mut impl FnMut(Key, &[u8])) {
    (0..leaf.len()).for_each(|slot| each(leaf.key(slot), leaf.data(slot)));
}

fn block(volume: &Volume, at: LogicalAddr) -> Block {
    let geometry = volume.geometry();
    let expect = Expect { bytenr: at, generation: None, level: None, first_key: None, owner: None };
    let mut bytes = vec![0; geometry.nodesize_bytes];
    let judge = |copy: &[u8]| verify::block(copy.into(), &geometry, &expect).map(drop);
    volume.read(at, &mut bytes, &judge).unwrap_or_else(|error| panic!("block {at}: {error}"));
    verify::block(bytes.into(), &geometry, &expect).expect("it was judged")
}
