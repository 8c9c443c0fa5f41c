//! What is kept in memory of files while they change.
//!
//! Invariants:
//!
//! 1. An inode that is held and dirty is right here and stale in the tree; [`FileState::flush`],
//!    which every commit calls, brings the tree up to date. All who read an inode look here first.
//! 2. The numbers held (next inode, next index in a directory) are above all that the tree has.
//!
//! Directories change with every name made in them, which would rewrite their inode each time:
//! so they are held. Other inodes are changed in the tree.
//!
//! Lock order: a file's data, then a handle, then `names`, then a tree. `names` is held through one
//! operation on names, never through a commit.
//!
//! A crash loses nothing here that a commit had promised.

use std::sync::OnceLock;

use rustc_hash::{FxHashMap, FxHashSet};
use ubtrfs_iomap::PageCache;
use ubtrfs_ondisk::inode::InodeItem;
use ubtrfs_ondisk::misc::{OnDisk, Timespec};
use ubtrfs_ondisk::root::{RootItem, flags as root_flags};
use ubtrfs_ondisk::{Key, KeyType, ObjectId, RootId};
use ubtrfs_rt::{
    Arc, AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, Time, lock_brief,
};
use zerocopy::IntoBytes;

use super::cuts::Cuts;
use super::fixed_csums::FixedCsums;
use super::inode::InodeId;
use super::xattr;
use crate::data::csum::PendingCsums;
use crate::data::drop_range::Kept;
use crate::data::read::DecodedCache;
use crate::data::sectors::LongReads;
use crate::error::{Error, Result};
use crate::txn::{Core, Flush, Handle};

/// The first index in a directory: 0 and 1 would be `.` and `..`.
pub(crate) const DIR_INDEX_MIN: u64 = 2;
/// Locks that files share.
const DATA_LOCK_COUNT: usize = 64;
/// Counts of changes that files share: more, as a reader of another file must read again.
const DATA_CHANGE_COUNT: usize = 4096;
/// Dirty data needs this part of it for its items: file extents of a few blocks each, which may leave
/// leaves half full, and checksums.
const DELALLOC_PART: u64 = 32;
/// And each range of it, where it is a block in the middle of another extent: two file extents, an extent's item, free space, and a checksum,
/// 290 bytes with their headers, in leaves that end up half full.
const DELALLOC_RANGE_BYTES: u64 = 512;
/// Inodes that are held at most.
const HELD_COUNT_MAX: usize = 32 << 10;

/// All that is held.
#[derive(Debug)]
pub(crate) struct FileState {
    names: Mutex<Names>,
    /// Dirty inodes in `names`; read without its lock, to skip it where there are none.
    dirty_count: AtomicUsize,
    /// `names` knows subvolumes with orphans; read without its lock.
    has_uncleaned: Arc<AtomicBool>,
    /// Odd while a name is being replaced; more after each time.
    replacements: AtomicU64,
    /// Who changes a file's data holds the lock of its number.
    data_locks: [Mutex<()>; DATA_LOCK_COUNT],
    /// Odd while the extents of a file of that number are being replaced; more after each time.
    data_changes: Box<[AtomicU64]>,
    pub(crate) csums: Arc<PendingCsums>,
    pub(super) fixed_csums: FixedCsums,
    pub(super) cuts: Cuts,
    pub(crate) decoded: Arc<DecodedCache>,
    pub(super) long_reads: Arc<LongReads>,
    /// Bytes of file data that are dirty in memory and will have items.
    delalloc_bytes: AtomicU64,
    /// What keeps file data, once there is one.
    page_cache: OnceLock<Arc<PageCache>>,
}

/// What operations on names keep.
#[derive(Debug, Default)]
pub(crate) struct Names {
    subvolumes: FxHashMap<RootId, SubvolumeState>,
    held: FxHashMap<InodeId, HeldInode>,
    /// Where the numbers of a copy that nobody looked at begin.
    next_inodes: FxHashMap<RootId, u64>,
    next_root: Option<u64>,
    /// Inodes without a name that this session made so: no clean-up takes them.
    live_orphans: FxHashSet<InodeId>,
    /// Inodes of which a part is removed, and the rest will be.
    going: FxHashSet<InodeId>,
    /// Subvolumes that were first looked at by who changes them, and hold older orphans.
    uncleaned: Vec<RootId>,
    /// Subvolumes with inodes that should have gone and found no room to.
    late: Vec<RootId>,
    has_uncleaned: Arc<AtomicBool>,
    /// Deleted subvolumes that are there yet for who held them.
    kept: FxHashSet<RootId>,
}

impl Default for FileState {
    fn default() -> Self {
        let has_uncleaned = Arc::<AtomicBool>::default();
        let names = Names { has_uncleaned: Arc::clone(&has_uncleaned), ..Names::default() };
        Self {
            names: Mutex::new(names),
            dirty_count: AtomicUsize::default(),
            has_uncleaned,
            replacements: AtomicU64::new(0),
            data_locks: std::array::from_fn(|_| Mutex::new(())),
            data_changes: (0..DATA_CHANGE_COUNT).map(|_| AtomicU64::new(0)).collect(),
            csums: Arc::default(),
            fixed_csums: FixedCsums::default(),
            cuts: Cuts::default(),
            decoded: Arc::default(),
            long_reads: Arc::default(),
            delalloc_bytes: AtomicU64::new(0),
            page_cache: OnceLock::new(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct SubvolumeState {
    next_inode: u64,
    is_read_only: bool,
}

/// While it lives, a name may be missing, or lead to a stand-in, that leads to something before or after, and what has a name then may have
/// none.
pub(super) struct Replacement<'a>(&'a AtomicU64);

impl Drop for Replacement<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// An inode in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldInode {
    pub(crate) item: InodeItem,
    /// Of a directory, once looked for.
    next_index: Option<u64>,
    is_dirty: bool,
}

impl FileState {
    pub(crate) fn names(&self) -> MutexGuard<'_, Names> {
        lock_brief(&self.names)
    }

    /// A name is about to be taken away that something else gets, or a subvolume made or deleted, by the holder of the names.
    pub(super) fn replace_name(&self, _: &mut Names) -> Replacement<'_> {
        self.replacements.fetch_add(1, Ordering::AcqRel);
        Replacement(&self.replacements)
    }

    /// What is found of names. Where it may be of a moment within a replacement, and `is_sure` does not say that it is none, it is looked for
    /// once more behind whoever was replacing a name meanwhile: the thread does not hold the names while it replaces one.
    ///
    /// # Errors
    /// That of `find`.
    pub(super) fn settled<T>(
        &self,
        mut find: impl FnMut() -> Result<T>,
        is_sure: impl FnOnce(&T) -> bool,
    ) -> Result<T> {
        let before = self.replacements.load(Ordering::Acquire);
        let found = find();
        let is_now = self.replacements.load(Ordering::Acquire);
        let is_settled = is_now == before && is_now.is_multiple_of(2);
        if is_settled || found.as_ref().is_ok_and(is_sure) {
            return found;
        }
        let _names = self.names();
        find()
    }

    /// Subvolumes whose orphans are to be cleaned, once each.
    pub(crate) fn take_uncleaned(&self) -> Vec<RootId> {
        if !self.has_uncleaned.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut names = self.names.lock();
        self.has_uncleaned.store(false, Ordering::Release);
        std::mem::take(&mut names.uncleaned)
    }

    /// The inode as it is, where the tree's is stale.
    pub(crate) fn held_item(&self, id: InodeId) -> Option<InodeItem> {
        if self.dirty_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.names.lock().held.get(&id).filter(|held| held.is_dirty).map(|held| held.item)
    }

    /// Makes room when many inodes are held.
    ///
    /// # Errors
    /// What stops an edit; the transaction is then aborted.
    pub(crate) fn bound(&self, names: &mut Names, handle: &mut Handle<'_>) -> Result<()> {
        if names.held.len() < HELD_COUNT_MAX {
            return Ok(());
        }
        self.write_inodes(names, handle)
    }

    /// Brings the tree up to date with all inodes that are held, and holds none.
    ///
    /// # Errors
    /// What stops an edit; the transaction is then aborted.
    pub(crate) fn write_inodes(&self, names: &mut Names, handle: &mut Handle<'_>) -> Result<()> {
        let mut dirty: Vec<(InodeId, InodeItem)> = names
            .held
            .iter()
            .filter(|(_, held)| held.is_dirty)
            .map(|(id, held)| (*id, held.item))
            .collect();
        dirty.sort_unstable_by_key(|(id, _)| *id);
        for (id, item) in dirty {
            let key = id.key(KeyType::INODE_ITEM, 0);
            handle
                .update(id.root, key, |bytes| {
                    if let Some(bytes) = bytes.get_mut(..size_of::<InodeItem>()) {
                        bytes.copy_from_slice(item.as_bytes());
                    }
                })
                .map_err(|error| handle.abort(error))?;
        }
        names.held.clear();
        self.dirty_count.store(0, Ordering::Release);
        Ok(())
    }

    /// What must forget data that is freed.
    pub(crate) fn kept(&self) -> Kept<'_> {
        Kept { csums: &self.csums, decoded: &self.decoded }
    }

    /// Names what keeps file data. Called once, at open.
    pub(crate) fn set_page_cache(&self, cache: Arc<PageCache>) {
        let _ = self.page_cache.set(cache);
    }

    /// Metadata that dirty data of so many bytes in so many ranges of files may need for its items.
    pub(super) fn delalloc_items_bytes(&self, range_count: u64, len_bytes: u64) -> u64 {
        (len_bytes / DELALLOC_PART).saturating_add(range_count.saturating_mul(DELALLOC_RANGE_BYTES))
    }

    /// Counts data that became dirty in memory.
    pub(super) fn add_delalloc(&self, len_bytes: u64) {
        self.delalloc_bytes.fetch_add(len_bytes, Ordering::Relaxed);
    }

    /// Counts data that is dirty no more.
    pub(super) fn subtract_delalloc(&self, len_bytes: u64) {
        self.delalloc_bytes.fetch_sub(len_bytes, Ordering::Relaxed);
    }

    /// Locks a file's data for a change. Taken before a handle is opened, never under one.
    pub(crate) fn lock_data(&self, id: InodeId) -> MutexGuard<'_, ()> {
        self.data_locks[data_lock_of(id)].lock()
    }

    /// While the answer lives, a file's extents are being replaced, by the holder of its data lock:
    /// who reads it meanwhile reads it again.
    pub(crate) fn change_data(&self, id: InodeId) -> DataChange<'_> {
        let count = &self.data_changes[place_of(id, DATA_CHANGE_COUNT)];
        count.fetch_add(1, Ordering::AcqRel);
        DataChange { count }
    }

    /// What is told of a file's data became another at once: who reads it reads it again. Its data lock need not be held.
    pub(super) fn note_data_changed(&self, id: InodeId) {
        // Whether one is being changed is in the lowest bit.
        self.data_changes[place_of(id, DATA_CHANGE_COUNT)].fetch_add(2, Ordering::AcqRel);
    }

    /// Counts the changes of a file's extents; `None` while one is under way. A reader that finds the
    /// same count before and after has read what was there in between.
    pub(crate) fn data_count(&self, id: InodeId) -> Option<u64> {
        Some(self.any_data_count(id)).filter(|count| count.is_multiple_of(2))
    }

    /// As [`FileState::data_count`], also while a change is under way.
    pub(crate) fn any_data_count(&self, id: InodeId) -> u64 {
        self.data_changes[place_of(id, DATA_CHANGE_COUNT)].load(Ordering::Acquire)
    }

    /// As [`FileState::data_count`], when no change is under way. However long that takes: whoever makes a change waits for no reader.
    pub(crate) fn quiet_data_count(&self, id: InodeId) -> u64 {
        loop {
            match self.data_count(id) {
                Some(count) => return count,
                None => ubtrfs_rt::yield_now(),
            }
        }
    }

    /// As [`FileState::lock_data`], for two files.
    pub(crate) fn lock_both(&self, a: InodeId, b: InodeId) -> [Option<MutexGuard<'_, ()>>; 2] {
        let (a, b) = (data_lock_of(a), data_lock_of(b));
        let first = self.data_locks[a.min(b)].lock();
        [Some(first), (a != b).then(|| self.data_locks[a.max(b)].lock())]
    }

    /// Drops an inode that is no more.
    pub(crate) fn forget(&self, names: &mut Names, id: InodeId) {
        names.going.remove(&id);
        let removed = names.held.remove(&id);
        if removed.is_some_and(|held| held.is_dirty) {
            self.dirty_count.fetch_sub(1, Ordering::Release);
        }
    }

    /// Marks a held inode dirty, for a change that follows or preceded under the same handle. The
    /// first time in a transaction this makes its leaf dirty too, so that the commit needs no space
    /// for it that was not reserved.
    ///
    /// # Errors
    /// What stops the edit; the transaction is then aborted.
    pub(crate) fn mark_dirty(
        &self,
        handle: &mut Handle<'_>,
        id: InodeId,
        held: &mut HeldInode,
    ) -> Result<()> {
        if !held.is_dirty {
            handle
                .update(id.root, id.key(KeyType::INODE_ITEM, 0), |_| ())
                .map_err(|error| handle.abort(error))?;
            held.is_dirty = true;
            self.dirty_count.fetch_add(1, Ordering::Release);
        }
        Ok(())
    }
}

/// From [`FileState::change_data`].
pub(crate) struct DataChange<'a> {
    count: &'a AtomicU64,
}

impl Drop for DataChange<'_> {
    fn drop(&mut self) {
        self.count.fetch_add(1, Ordering::AcqRel);
    }
}

impl Flush for FileState {
    fn flush(&self, handle: &mut Handle<'_>) -> Result<()> {
        self.write_inodes(&mut self.names.lock(), handle)?;
        self.csums.flush(handle)
    }

    fn held_back_bytes(&self, nodesize_bytes: u64) -> u64 {
        // A held inode's leaf became dirty with it.
        let csums = self.csums.held_back_bytes(nodesize_bytes);
        let delalloc_bytes = self.delalloc_bytes.load(Ordering::Relaxed);
        let ranges = self.dirty_range_count();
        csums.saturating_add(self.delalloc_items_bytes(ranges, delalloc_bytes))
    }

    fn dirty_range_count(&self) -> u64 {
        self.page_cache.get().map_or(0, |cache| cache.dirty_range_count())
    }

    fn data_bytes(&self) -> u64 {
        self.page_cache.get().map_or(0, |cache| cache.memory_bytes())
    }
}

impl Names {
    /// Refuses a subvolume that is read-only.
    ///
    /// # Errors
    /// `ReadOnly`; `NotFound` when there is no such subvolume.
    pub(crate) fn check_writable(&mut self, core: &Core, root: RootId) -> Result<()> {
        if self.subvolume(core, root)?.is_read_only {
            return Err(Error::ReadOnly { why: format!("subvolume {root} is read-only") });
        }
        Ok(())
    }

    /// Reads what is remembered of a subvolume, unless it is known.
    ///
    /// # Errors
    /// `NotFound` when there is no such subvolume; damage in the tree.
    pub(crate) fn check_known(&mut self, core: &Core, root: RootId) -> Result<()> {
        self.subvolume(core, root).map(drop)
    }

    /// Remembers that a subvolume became read-only, or writable.
    ///
    /// # Errors
    /// As [`Names::check_writable`].
    pub(crate) fn set_read_only(
        &mut self,
        core: &Core,
        root: RootId,
        read_only: bool,
    ) -> Result<()> {
        self.subvolume(core, root)?.is_read_only = read_only;
        Ok(())
    }

    /// Refuses a deleted subvolume that is there yet for who held it: no subvolume can be in it.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn check_not_deleted(&self, root: RootId) -> Result<()> {
        match self.is_kept(root) {
            true => Err(Error::not_found(format!("subvolume {root}, which is deleted,"))),
            false => Ok(()),
        }
    }

    /// Whether a subvolume is deleted, and there yet for who held it.
    pub(crate) fn is_kept(&self, root: RootId) -> bool {
        self.kept.contains(&root)
    }

    /// Remembers that a subvolume is deleted, and there yet.
    pub(crate) fn keep(&mut self, root: RootId) {
        self.kept.insert(root);
    }

    /// Forgets a subvolume that is deleted, of which no inode is held.
    pub(crate) fn forget_subvolume(&mut self, root: RootId) {
        self.subvolumes.remove(&root);
        self.next_inodes.remove(&root);
        self.kept.remove(&root);
        self.uncleaned.retain(|known| *known != root);
        self.live_orphans.retain(|id| id.root != root);
        self.going.retain(|id| id.root != root);
    }

    fn subvolume(&mut self, core: &Core, root: RootId) -> Result<&mut SubvolumeState> {
        use std::collections::hash_map::Entry;
        match self.subvolumes.entry(root) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let mut state = read_subvolume(core, root)?;
                if has_orphans(core, root)? {
                    self.uncleaned.push(root);
                    self.has_uncleaned.store(true, Ordering::Release);
                }
                let least = self.next_inodes.remove(&root).unwrap_or_default();
                state.next_inode = state.next_inode.max(least);
                Ok(entry.insert(state))
            }
        }
    }

    /// Subvolumes whose orphans are to be cleaned yet.
    pub(crate) fn note_uncleaned(&mut self, roots: Vec<RootId>) {
        self.uncleaned.extend(roots);
        self.has_uncleaned.store(!self.uncleaned.is_empty(), Ordering::Release);
    }

    /// Remembers that the subvolume has inodes that go when there is room again.
    pub(crate) fn note_late(&mut self, root: RootId) {
        if !self.late.contains(&root) {
            self.late.push(root);
        }
    }

    /// What [`Names::note_late`] remembered, once.
    pub(crate) fn take_late(&mut self) -> Vec<RootId> {
        std::mem::take(&mut self.late)
    }

    /// Whether this session took the inode's last name, or made it without one, and it is not being
    /// removed.
    pub(crate) fn is_live_orphan(&self, id: InodeId) -> bool {
        self.live_orphans.contains(&id)
    }

    /// Refuses to change an inode that is to be removed: it lost its last name before the filesystem was opened, and goes after the
    /// first change in its subvolume, or there was no room to remove it yet.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn check_not_going(&self, id: InodeId, link_count: u32) -> Result<()> {
        match link_count == 0 && !self.is_live_orphan(id) {
            true => Err(Error::not_found(id)),
            false => Ok(()),
        }
    }

    /// Remembers an inode that has no name.
    pub(crate) fn add_live_orphan(&mut self, id: InodeId) {
        self.live_orphans.insert(id);
    }

    /// Forgets one that has got a name.
    pub(crate) fn remove_live_orphan(&mut self, id: InodeId) {
        self.live_orphans.remove(&id);
    }

    /// From now on nobody can give the inode a name.
    pub(crate) fn begin_eviction(&mut self, id: InodeId) {
        self.live_orphans.remove(&id);
    }

    /// Something of what it holds is about to be removed. [`FileState::forget`] ends that, with the inode.
    pub(crate) fn begin_removal(&mut self, id: InodeId) {
        self.begin_eviction(id);
        self.going.insert(id);
    }

    /// Refuses to read an inode of which a part may have been removed.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn check_is_whole(&self, id: InodeId) -> Result<()> {
        if self.going.contains(&id) { Err(Error::not_found(id)) } else { Ok(()) }
    }

    /// The number that the next inode of a subvolume gets; [`Names::take_inode`] takes it.
    ///
    /// # Errors
    /// `Limit` when the subvolume has no numbers left.
    pub(crate) fn next_inode(&mut self, core: &Core, root: RootId) -> Result<u64> {
        let next = self.subvolume(core, root)?.next_inode;
        if next > ObjectId::LAST_FREE.0 {
            return Err(Error::Limit { what: format!("inode numbers of subvolume {root}") });
        }
        Ok(next)
    }

    /// The numbers of a copy go on behind those of its source. One that is free there by now may be of the running transaction, as the copy's
    /// next file is: of two snapshots that would be the same file, to who compares them.
    pub(super) fn go_on_with_numbers(&mut self, source: RootId, copy: RootId) {
        let next = self.subvolumes.get(&source).map(|state| state.next_inode);
        if let Some(next) = next.or_else(|| self.next_inodes.get(&source).copied()) {
            self.next_inodes.insert(copy, next);
        }
    }

    /// Counts the number of [`Names::next_inode`] as used.
    pub(crate) fn take_inode(&mut self, root: RootId) {
        if let Some(state) = self.subvolumes.get_mut(&root) {
            state.next_inode += 1;
        }
    }

    /// The number that the next subvolume gets. Once asked for, none is given twice, whatever is
    /// deleted meanwhile.
    ///
    /// # Errors
    /// Damage in the root tree.
    pub(crate) fn next_root(&mut self, core: &Core) -> Result<u64> {
        let next = match self.next_root {
            Some(next) => next,
            None => next_objectid(core, RootId::ROOT_TREE)?,
        };
        self.next_root = Some(next);
        Ok(next)
    }

    /// The number that the next subvolume gets, taken at once.
    ///
    /// # Errors
    /// `Limit`, or damage in the root tree.
    pub(crate) fn take_root(&mut self, core: &Core) -> Result<RootId> {
        let next = self.next_root(core)?;
        if next > ObjectId::LAST_FREE.0 {
            return Err(Error::Limit { what: "numbers of subvolumes".to_owned() });
        }
        self.next_root = Some(next + 1);
        Ok(RootId(next))
    }

    /// The inode in memory, read from the tree where it is not yet.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub(crate) fn hold(&mut self, core: &Core, id: InodeId) -> Result<&mut HeldInode> {
        use std::collections::hash_map::Entry;
        match self.held.entry(id) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let bytes = core
                    .roots
                    .tree(id.root)?
                    .lookup(&id.key(KeyType::INODE_ITEM, 0))?
                    .ok_or_else(|| Error::not_found(id))?;
                let mut item = *InodeItem::peek(&bytes).map_err(|error| error.in_root(id.root))?;
                item.flags = (item.flags.get() | xattr::flags_unsaid(core, id, &item)?).into();
                Ok(entry.insert(HeldInode { item, next_index: None, is_dirty: false }))
            }
        }
    }

    /// The inode, if it is in memory.
    pub(crate) fn held_mut(&mut self, id: InodeId) -> Option<&mut HeldInode> {
        self.held.get_mut(&id)
    }

    /// Holds a directory that was just made, whose next index is known.
    pub(crate) fn hold_new_directory(&mut self, id: InodeId, item: InodeItem) {
        let held = HeldInode { item, next_index: Some(DIR_INDEX_MIN), is_dirty: false };
        self.held.insert(id, held);
    }
}

impl HeldInode {
    /// Index that the next name in the directory gets.
    ///
    /// # Errors
    /// Damage in the tree.
    pub(crate) fn next_index(&mut self, core: &Core, id: InodeId) -> Result<u64> {
        if let Some(next) = self.next_index {
            return Ok(next);
        }
        let mut cursor = core.roots.tree(id.root)?.cursor();
        cursor.seek_back(&id.key(KeyType::DIR_INDEX, u64::MAX))?;
        let next = match cursor.current()? {
            Some((key, _))
                if key.objectid == id.inode.object_id() && key.ty == KeyType::DIR_INDEX =>
            {
                // The one after it must be a number, too.
                key.offset
                    .checked_add(1)
                    .filter(|next| *next < u64::MAX)
                    .ok_or_else(|| Error::Limit { what: format!("indexes of directory {id}") })?
            }
            _ => DIR_INDEX_MIN,
        };
        self.next_index = Some(next.max(DIR_INDEX_MIN));
        Ok(next.max(DIR_INDEX_MIN))
    }

    /// Counts a name of `name_bytes` that was made in the directory at the next index.
    pub(crate) fn count_name(&mut self, name_bytes: usize, transid: u64, now: Time) {
        self.next_index = self.next_index.map(|next| next + 1);
        self.count_bytes(name_bytes, transid, now);
    }

    /// As [`HeldInode::count_name`], for a name that was made at `index`.
    pub(crate) fn count_name_at(&mut self, index: u64, name_bytes: usize, transid: u64, now: Time) {
        self.next_index = Some(index + 1);
        self.count_bytes(name_bytes, transid, now);
    }

    fn count_bytes(&mut self, name_bytes: usize, transid: u64, now: Time) {
        self.item.size = self.item.size.get().saturating_add(2 * name_bytes as u64).into();
        self.touch(transid, now);
        self.item.mtime = timespec(now);
    }

    /// Counts a name of `name_bytes` that was removed from the directory.
    pub(crate) fn uncount_name(&mut self, name_bytes: usize, transid: u64, now: Time) {
        let size = self.item.size.get().saturating_sub(2 * name_bytes as u64);
        self.item.size = size.into();
        self.touch(transid, now);
        self.item.mtime = timespec(now);
    }

    /// Adds to a directory's size, and nothing else: its next index is looked for again.
    pub(crate) fn resize(&mut self, bytes: i64) {
        self.item.size = self.item.size.get().saturating_add_signed(bytes).into();
        self.next_index = None;
    }

    /// Counts a change of the inode.
    pub(crate) fn touch(&mut self, transid: u64, now: Time) {
        touch(&mut self.item, transid, now);
    }
}

fn data_lock_of(id: InodeId) -> usize {
    place_of(id, DATA_LOCK_COUNT)
}

/// Files that share a count share a lock: two who change data never count at the same place at once.
fn place_of(id: InodeId, count: usize) -> usize {
    let mixed = id.inode.0 ^ id.root.0.rotate_left(7);
    usize::try_from(mixed % count as u64).unwrap_or(0)
}

/// Counts a change of an inode.
pub(crate) fn touch(item: &mut InodeItem, transid: u64, now: Time) {
    item.transid = transid.into();
    item.sequence = item.sequence.get().wrapping_add(1).into();
    item.ctime = timespec(now);
}

/// The disk form of a time.
pub(crate) fn timespec(time: Time) -> Timespec {
    Timespec::new(time.sec, time.nsec)
}

fn read_subvolume(core: &Core, root: RootId) -> Result<SubvolumeState> {
    let missing = || Error::not_found(format!("subvolume {root}"));
    if !root.is_subvolume() {
        return Err(missing());
    }
    let (_, item): (Key, RootItem) = core.roots.root_item(root)?.ok_or_else(missing)?;
    if item.refs.get() == 0 {
        return Err(missing());
    }
    let next_inode = next_objectid(core, root)?;
    let is_read_only = item.flags.get() & root_flags::RDONLY != 0;
    Ok(SubvolumeState { next_inode, is_read_only })
}

fn has_orphans(core: &Core, root: RootId) -> Result<bool> {
    let mut cursor = core.roots.tree(root)?.cursor();
    cursor.seek(&Key::new(ObjectId::ORPHAN, KeyType::ORPHAN_ITEM, 0))?;
    Ok(cursor
        .current()?
        .is_some_and(|(key, _)| key.objectid == ObjectId::ORPHAN && key.ty == KeyType::ORPHAN_ITEM))
}

/// One above the greatest object id below the special ones.
fn next_objectid(core: &Core, root: RootId) -> Result<u64> {
    let mut cursor = core.roots.tree(root)?.cursor();
    cursor.seek_back(&Key::new(ObjectId::LAST_FREE, KeyType::MAX, u64::MAX))?;
    let last = cursor.current()?.map_or(0, |(key, _)| key.objectid.0);
    Ok(last.max(ObjectId::FIRST_FREE.0 - 1) + 1)
}
