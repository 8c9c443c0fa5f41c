//! Replaying the log that Linux leaves: what was fsynced since the last commit.
//!
//! The log is a tree of trees. The one that the superblock names has a root item for each
//! subvolume in which something was fsynced; that tree holds copies of items of the subvolume's,
//! as they were: inodes with all their names, attributes, some or all of their extents, checksums,
//! and of directories the entries of some ranges of indexes, each range told by a DIR_LOG_INDEX
//! item. What is in such a range and not in the log was removed.
//!
//! Invariants:
//!
//! 1. All is replayed in one transaction, whose commit clears the log from the superblock: before
//!    that nothing commits ([`hold_commits`](crate::txn::Core::hold_commits)). A crash leaves the log for the next open.
//! 2. Blocks of the log, and data that only it refers to, are not in the extent tree: they are
//!    claimed before anything is allocated, and what is not taken over is free after the commit.
//! 3. Names are entered and taken away whole, by the same steps as in any operation; so the trees
//!    agree at each moment but for the counts of links, which are counted anew in the end for each
//!    inode that was touched.
//!
//! The stages and what each replays: [`inodes`](Replay::inodes), [`entries`](Replay::entries),
//! [`rest`](Replay::rest), [`count_links`](Replay::count_links). Names are in [`names`], data in
//! [`extents`].

mod extents;
mod names;

use std::collections::{BTreeMap, BTreeSet};

use ubtrfs_ondisk::block::Block;
use ubtrfs_ondisk::dir::{DirEntries, FileType};
use ubtrfs_ondisk::file_extent::{Compression, FileExtent, RegularExtent};
use ubtrfs_ondisk::inode::InodeItem;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::{
    Corruption, Generation, InodeNo, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId,
};
use ubtrfs_rt::Arc;
use zerocopy::IntoBytes;

use super::inode::InodeId;
use super::state::HeldInode;
use crate::btree::{BlockPtr, Tree};
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle};
use crate::txn::Reservation;

/// The key of each subvolume's root item in the tree of logs is its number in the offset.
const LOG_ROOTS: ObjectId = ObjectId(RootId::TREE_LOG.0);

/// An item of a log, copied out.
struct Item {
    key: Key,
    data: Vec<u8>,
}

/// The replay of one subvolume's log.
struct Replay<'a> {
    fs: &'a Filesystem,
    root: RootId,
    log: Arc<Tree>,
    /// Inodes whose links are to be counted.
    touched: BTreeSet<u64>,
}

/// Replays the log that the superblock names, and commits.
///
/// # Errors
/// Damage in the log or the trees; the filesystem is aborted then, and the medium as it was.
pub(crate) fn replay(fs: &Filesystem) -> Result<()> {
    let core = &fs.inner.core;
    core.hold_commits(u64::MAX);
    let result = replay_all(fs).and_then(|roots| {
        // Before anything can commit: a superblock must not name a log that is replayed already.
        core.begin(Reservation::items(0).promised())?.change_superblock(|superblock| {
            superblock.log_root = 0.into();
            superblock.log_root_level = 0;
            superblock.log_root_transid = 0.into();
        });
        Ok(roots)
    });
    core.release_commits();
    let roots = result.map_err(|error| core.abort(error))?;
    fs.commit()?;
    {
        // What is remembered of these is of before: the number of the next inode, first of all.
        let mut names = fs.inner.files.names();
        for root in roots {
            names.forget_subvolume(root);
            names.check_known(core, root)?;
        }
    }
    // What lost its last name goes, for good before anybody sees the filesystem. What cannot go stays noted: the log is replayed
    // all the same, and who opens the filesystem is told.
    fs.commit()
}

fn replay_all(fs: &Filesystem) -> Result<Vec<RootId>> {
    let core = &fs.inner.core;
    core.alloc.load(&core.roots)?;
    let superblock = fs.superblock();
    let ptr = BlockPtr {
        addr: LogicalAddr(superblock.log_root.get()),
        generation: Generation(superblock.generation.get() + 1),
        level: superblock.log_root_level,
    };
    let store = &core.roots.store;
    let log_roots = Arc::new(Tree::new(RootId::TREE_LOG, Arc::clone(store), ptr));
    claim_blocks(fs, &log_roots)?;
    let mut replays = Vec::new();
    for Item { key, data } in items(&log_roots, Key::new(LOG_ROOTS, KeyType::ROOT_ITEM, 0))? {
        if key.objectid != LOG_ROOTS || key.ty != KeyType::ROOT_ITEM {
            break;
        }
        let item = RootItem::parse(&data).map_err(|error| error.in_root(RootId::TREE_LOG))?;
        let ptr = BlockPtr {
            addr: LogicalAddr(item.bytenr.get()),
            generation: Generation(item.generation.get()),
            level: item.level,
        };
        let log = Arc::new(Tree::new(RootId::TREE_LOG, Arc::clone(store), ptr));
        claim_blocks(fs, &log)?;
        let root = RootId(key.offset);
        let is_live = fs.root_item(root)?.is_some_and(|(_, item)| item.refs.get() > 0);
        // Of a subvolume that was deleted since, nothing is to be replayed.
        if root.is_subvolume() && is_live {
            // Linux logs what is written to a file that was open when its subvolume became read-only.
            fs.inner.files.names().set_read_only(core, root, false)?;
            replays.push(Replay { fs, root, log, touched: BTreeSet::new() });
        }
    }
    let mut claimed = BTreeMap::new();
    for replay in &replays {
        replay.claim_data(&mut claimed)?;
    }
    // From here on space is allocated. Each stage is done for all before the next: a name may have
    // gone from one subvolume's log to another's.
    for replay in &mut replays {
        replay.inodes()?;
    }
    for replay in &mut replays {
        replay.entries()?;
    }
    for replay in &mut replays {
        replay.rest()?;
        replay.count_links()?;
    }
    Ok(replays.iter().map(|replay| replay.root).collect())
}

/// All items of a tree from `first` on.
fn items(tree: &Arc<Tree>, first: Key) -> Result<Vec<Item>> {
    let mut found = Vec::new();
    let mut cursor = tree.cursor();
    cursor.seek(&first)?;
    while let Some((key, data)) = cursor.current()? {
        found.push(Item { key, data: data.to_vec() });
        cursor.next()?;
    }
    Ok(found)
}

/// The extent of a file extent item that has one. The file uses nothing beyond it: that would be what lies
/// there of others. It is of generation `newest` or older.
fn regular_extent(data: &[u8], newest: u64) -> Result<Option<RegularExtent>> {
    let extent = match FileExtent::parse(data).map_err(|error| error.in_root(RootId::TREE_LOG))? {
        FileExtent::Regular(extent) | FileExtent::Prealloc(extent) => extent,
        FileExtent::Inline { .. } => return Ok(None),
    };
    let damage = |reason, have: String, expect: String| {
        let corruption = Corruption::new(reason).in_root(RootId::TREE_LOG);
        Err(corruption.in_block(extent.disk_bytenr).have(have).expect(expect).into())
    };
    if extent.generation.0 > newest {
        let have = format!("file extent of generation {}", extent.generation);
        return damage(Reason::WrongGeneration, have, format!("at most {newest}"));
    }
    let len_bytes = match extent.compression {
        _ if extent.is_hole() => u64::MAX,
        // Some versions of Linux wrote other decoded lengths of what is not encoded.
        Compression::None => extent.disk_num_bytes,
        _ if extent.disk_num_bytes == 0 => 0,
        _ => extent.ram_bytes,
    };
    let end = extent.offset.checked_add(extent.num_bytes);
    if extent.num_bytes == 0 || end.is_none_or(|end| end > len_bytes) {
        let have = format!("{} bytes at {} in an extent", extent.num_bytes, extent.offset);
        return damage(
            Reason::BadValue,
            have,
            format!("some, and an end at {len_bytes} or before"),
        );
    }
    Ok((!extent.is_hole()).then_some(extent))
}

/// Keeps the blocks of a log's tree from being given out before the commit.
fn claim_blocks(fs: &Filesystem, log: &Tree) -> Result<()> {
    let core = &fs.inner.core;
    let nodesize_bytes = fs.nodesize_bytes();
    let mut left = vec![(log.root(), None)];
    while let Some((ptr, first_key)) = left.pop() {
        core.alloc.claim_until_commit(&core.roots, ptr.addr, nodesize_bytes)?;
        let block = core.roots.store.read(&ptr, RootId::TREE_LOG, first_key)?;
        if let Block::Node(node) = &*block {
            left.extend((0..node.len()).map(|slot| {
                let child = BlockPtr {
                    addr: node.child(slot),
                    generation: node.child_generation(slot),
                    level: ptr.level - 1,
                };
                (child, Some(node.key(slot)))
            }));
        }
    }
    Ok(())
}

impl<'a> Replay<'a> {
    fn id(&self, number: u64) -> InodeId {
        InodeId { root: self.root, inode: InodeNo(number) }
    }

    /// A handle for one step of the replay. It may use what is kept back from what does not free space: a filesystem that is nearly
    /// full could not be opened otherwise, to be emptied.
    fn begin(&self, reservation: Reservation) -> Result<Handle<'a>> {
        self.fs.begin_step(reservation.promised())
    }

    fn tree(&self) -> Result<Arc<Tree>> {
        self.fs.tree(self.root)
    }

    /// The generation of the transaction that was logged.
    fn newest(&self) -> u64 {
        self.fs.superblock().generation.get().saturating_add(1)
    }

    /// The items of the log, one inode's at a time, those of inodes without a name left out: such
    /// an inode would only be removed.
    fn for_each_inode(
        &mut self,
        mut each: impl FnMut(&mut Self, u64, &[Item]) -> Result<()>,
    ) -> Result<()> {
        let mut next = Key::new(ObjectId::FIRST_FREE, KeyType(0), 0);
        loop {
            let mut cursor = self.log.cursor();
            cursor.seek(&next)?;
            let Some((first, _)) = cursor.current()? else { return Ok(()) };
            let number = first.objectid.0;
            if number > ObjectId::LAST_FREE.0 {
                return Ok(());
            }
            let mut own = Vec::new();
            while let Some((key, data)) = cursor.current()? {
                if key.objectid.0 != number {
                    break;
                }
                own.push(Item { key, data: data.to_vec() });
                cursor.next()?;
            }
            let is_nameless = match own.first() {
                Some(item) if item.key.ty == KeyType::INODE_ITEM => {
                    self.inode_item(&item.data)?.nlink.get() == 0
                }
                _ => false,
            };
            if !is_nameless {
                each(self, number, &own)?;
            }
            next = Key::new(ObjectId(number + 1), KeyType(0), 0);
        }
    }

    /// An inode of the log, which is of the transaction after the last commit, or of an earlier one: Linux
    /// refuses to read any other.
    fn inode_item(&self, data: &[u8]) -> Result<InodeItem> {
        let item = *InodeItem::peek(data).map_err(|error| error.in_root(RootId::TREE_LOG))?;
        let newest = self.newest();
        if item.generation.get().max(item.transid.get()) > newest {
            return Err(Corruption::new(Reason::WrongGeneration)
                .in_root(RootId::TREE_LOG)
                .have(format!("inode of generation {}, transid {}", item.generation, item.transid))
                .expect(format!("at most {newest}"))
                .into());
        }
        Ok(item)
    }

    /// Keeps the data that only the log refers to, each extent once.
    fn claim_data(&self, claimed: &mut BTreeMap<LogicalAddr, u64>) -> Result<()> {
        let core = &self.fs.inner.core;
        let mut cursor = self.log.cursor();
        cursor.seek(&Key::MIN)?;
        while let Some((key, data)) = cursor.current()? {
            let extent = match key.ty {
                KeyType::EXTENT_DATA => regular_extent(data, self.newest())?,
                _ => None,
            };
            cursor.next()?;
            let Some(extent) = extent else { continue };
            let (start, len) = (extent.disk_bytenr, extent.disk_num_bytes);
            if core.alloc.is_recorded(&core.roots, start, len)? {
                continue;
            }
            match claimed.insert(start, len) {
                None => core.alloc.claim_until_commit(&core.roots, start, len)?,
                Some(other) if other == len => {}
                Some(other) => {
                    return Err(Corruption::new(Reason::Overlap)
                        .in_root(RootId::TREE_LOG)
                        .in_block(start)
                        .have(format!("extents of {len} and {other} bytes at one address"))
                        .into());
                }
            }
        }
        Ok(())
    }

    /// First stage: the inodes, what they no longer have, and of directories the entries that are
    /// no longer there.
    fn inodes(&mut self) -> Result<()> {
        self.for_each_inode(|this, number, own| {
            let Some(first) = own.first().filter(|item| item.key.ty == KeyType::INODE_ITEM) else {
                return Ok(());
            };
            let item = this.inode_item(&first.data)?;
            this.remove_xattrs(number, own)?;
            let file_type = FileType::from_mode(item.mode.get());
            if file_type == FileType::Directory {
                this.remove_entries(number, own)?;
            }
            this.put_inode(number, &item)?;
            if file_type == FileType::Regular {
                this.cut_behind_end(number)?;
            }
            this.touched.insert(number);
            Ok(())
        })
    }

    /// Second stage: entries of directories.
    fn entries(&mut self) -> Result<()> {
        self.for_each_inode(|this, number, own| {
            for item in own.iter().filter(|item| item.key.ty == KeyType::DIR_INDEX) {
                this.put_entry(number, item)?;
            }
            Ok(())
        })
    }

    /// Third stage: attributes, names of the inodes, and data.
    fn rest(&mut self) -> Result<()> {
        self.for_each_inode(|this, number, own| {
            for item in own {
                match item.key.ty {
                    KeyType::XATTR_ITEM => this.put_item(item)?,
                    KeyType::INODE_REF | KeyType::INODE_EXTREF => this.put_names(number, item)?,
                    KeyType::EXTENT_DATA => this.put_extent(number, item)?,
                    _ => {}
                }
            }
            Ok(())
        })
    }

    /// Gives an item of the subvolume the log's data.
    fn put_item(&self, item: &Item) -> Result<()> {
        let mut handle = self.begin(Reservation::items(1))?;
        let txn = &mut handle.txn;
        match txn.insert(self.root, item.key, &item.data) {
            Err(Error::Exists { .. }) => txn.replace(self.root, item.key, &item.data),
            other => other,
        }
    }

    /// Enters an inode as the log has it, but for what the other items bring: the bytes of its
    /// extents, and the size of a directory.
    fn put_inode(&self, number: u64, logged: &InodeItem) -> Result<()> {
        let id = self.id(number);
        let mut handle = self.begin(Reservation::items(1))?;
        let generation = handle.txn.generation().0;
        let files = &self.fs.inner.files;
        let mut names = files.names();
        let is_directory = FileType::from_mode(logged.mode.get()) == FileType::Directory;
        match names.hold(handle.txn.core(), id) {
            Ok(held) => {
                let HeldInode { item, .. } = held;
                let had_type = FileType::from_mode(item.mode.get());
                // Numbers are not given again before a commit.
                if had_type != FileType::from_mode(logged.mode.get()) {
                    return Err(Corruption::new(Reason::BadValue)
                        .in_root(RootId::TREE_LOG)
                        .have(format!("mode {:#o} of {id}", logged.mode))
                        .expect(format!("the type of mode {:#o}", item.mode))
                        .into());
                }
                let was_file = had_type == FileType::Regular;
                if logged.generation.get() == 0 {
                    // It was logged only so that it exists; what is here is newer.
                    let size = logged.size.get();
                    let is_file = FileType::from_mode(logged.mode.get()) == FileType::Regular;
                    if is_file && was_file && size != 0 {
                        item.size = size.into();
                    }
                } else {
                    let (nbytes, size) = (item.nbytes, item.size);
                    *item = *logged;
                    item.nbytes = nbytes;
                    if is_directory {
                        item.size = size;
                    }
                }
                files.mark_dirty(&mut handle.txn, id, held)
            }
            Err(Error::NotFound { .. }) => {
                let mut item = *logged;
                item.nbytes = 0.into();
                if is_directory {
                    item.size = 0.into();
                }
                if item.generation.get() == 0 {
                    item.generation = generation.into();
                }
                let txn = &mut handle.txn;
                txn.insert(self.root, id.key(KeyType::INODE_ITEM, 0), item.as_bytes())
            }
            Err(error) => Err(error),
        }
    }

    /// Removes the attributes that the log does not have: it has all of an inode's.
    fn remove_xattrs(&self, number: u64, own: &[Item]) -> Result<()> {
        let id = self.id(number);
        let mut logged = BTreeSet::new();
        for item in own.iter().filter(|item| item.key.ty == KeyType::XATTR_ITEM) {
            for entry in DirEntries::new(&item.data) {
                let entry = entry.map_err(|error| error.in_root(RootId::TREE_LOG))?;
                logged.insert(entry.name.to_vec());
            }
        }
        for (name, _) in self.fs.xattrs(id)? {
            if !logged.contains(&name) {
                let key = id.key(KeyType::XATTR_ITEM, ubtrfs_ondisk::hash::name_hash(&name));
                self.begin(Reservation::items(1))?.remove_part(id, key, &name)?;
            }
        }
        Ok(())
    }
}
