//! Space: block groups, extents and their references, the free space tree, chunks.
//!
//! Invariants:
//!
//! 1. Copying a block changes only what is in memory here and queues delayed refs. The extent
//!    tree, the free space tree, block group items and chunks are edited by [`settle`] alone,
//!    which the commit runs.
//! 2. Space is given out only from groups whose free space is loaded, and no group changes whose
//!    item was not read: of a group of data that happens when it is wanted, of the others before
//!    the first transaction's handle is granted. Both are done in [`load`], with no tree locked,
//!    and under a handle or by the commit, so that nothing changes what is read meanwhile.
//! 3. Space freed in a transaction is pinned: it becomes free when the superblock that no longer
//!    reaches it is durable. Space that was allocated and freed within one transaction, and never
//!    written, is free at once.
//! 4. A handle exists only for a reservation that was granted, and granting keeps back what the
//!    commit itself needs. So an allocation under a handle, or in the commit, does not fail.
//!
//! The lock of the state is innermost: nothing else is locked while it is held.
//!
//! A crash leaves what the last superblock says; all of this is memory.

pub(crate) mod block_group;
mod cache_v1;
pub(crate) mod chunk;
mod claim;
pub(crate) mod csum_tree;
mod data_space;
pub(crate) mod delayed_ref;
mod extent_tree;
mod free_space;
mod free_space_tree;
mod load;
mod profile;
mod rebuild;
pub(crate) mod settle;
pub(crate) mod share;
mod space_info;
#[cfg(test)]
mod tests;
mod unused;

use std::collections::BTreeMap;

use hdrhistogram::Histogram;

use ubtrfs_ondisk::block::NewBlock;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::extent::BackRef;
use ubtrfs_ondisk::features::{CompatRo, Incompat};
use ubtrfs_ondisk::superblock::Superblock;
use ubtrfs_ondisk::{
    Corruption, DeviceId, Generation, InodeNo, Key, LogicalAddr, Reason, RootId, Uuid,
};
use ubtrfs_rt::{Arc, AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, lock_brief};

use crate::btree::{BlockPtr, Roots, Store};
use crate::error::{Error, Result};
use block_group::BlockGroup;
use chunk::DeviceSpace;
pub(crate) use data_space::{DataPromise, Promised};
use delayed_ref::{DelayedRefs, ExtentKind, Queued};
use space_info::SpaceInfo;
pub(crate) use space_info::{Class, Left, bytes_of_extents, bytes_of_refs};

/// Options of the allocator that only measurements and image builders change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AllocOptions {
    /// Remember the form of each group's free space (see [`free_space_tree`]).
    pub(crate) cache_free_space_form: bool,
    /// Let the only device, an image file, grow when no space is left on it.
    pub(crate) grow_device: bool,
    /// Give freed space back to the devices.
    pub(crate) discard: bool,
}

impl Default for AllocOptions {
    fn default() -> Self {
        Self { cache_free_space_form: true, grow_device: false, discard: false }
    }
}

/// The allocator of one filesystem.
#[derive(Debug)]
pub(crate) struct Allocator {
    store: Arc<Store>,
    pub(crate) options: AllocOptions,
    fsid: Uuid,
    chunk_tree_uuid: Uuid,
    is_skinny: bool,
    is_mixed: bool,
    has_free_space_tree: AtomicBool,
    /// Time of each run of an extent's delayed refs, in nanoseconds.
    ref_times: Mutex<Histogram<u64>>,
    has_block_group_tree: bool,
    /// Searches for the form of a group's free space, for measuring what remembering it saves.
    form_searches: AtomicU64,
    /// Held from the count of a shared block's references to the drop of one of them: two trees that
    /// copy it at once must not both take the other for the one that stays. Before `state`, after a
    /// tree's lock, and before the extent tree's for reading.
    sharing: Mutex<()>,
    /// Held while groups are loaded, before `state` and with no tree locked.
    loading: Mutex<()>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    is_loaded: bool,
    /// Devices are missing.
    is_degraded: bool,
    profiles: [profile::Profile; Class::COUNT],
    /// Of each chunk one. Of groups of data whose item was not read it is not known what is used.
    groups: BTreeMap<LogicalAddr, BlockGroup>,
    /// Bytes of all extents: what the superblock said, and what has changed since.
    used_bytes: u64,
    spaces: [SpaceInfo; Class::COUNT],
    refs: DelayedRefs,
    /// Ranges freed in the running transaction.
    pinned: Vec<(u64, u64)>,
    /// Where ranges begin and end that only a log refers to.
    claimed: BTreeMap<u64, u64>,
    devices: BTreeMap<DeviceId, DeviceSpace>,
    /// Data and metadata share their groups.
    is_mixed: bool,
    /// Bytes promised to data that is in memory only.
    promised_data_bytes: u64,
    /// Bytes of data that is promised the space that it has: nothing is kept free for it.
    placed_bytes: u64,
    /// Bytes of metadata promised to open handles.
    reserved_bytes: u64,
    /// Bytes of metadata that what is held back above may need, as of the last reservation.
    held_back_bytes: u64,
    /// What brings a block of dirty data to the medium may take so much metadata, as was said last.
    storing_bytes: u64,
    /// Bytes of the trees that only the commit edits, as of the last reservation.
    tree_bytes: u64,
    /// Caches that Linux left of groups.
    caches: cache_v1::Caches,
    /// Bytes of metadata in use as of the last commit.
    metadata_used_bytes: u64,
    /// Bytes of the groups of metadata as of then.
    metadata_total_bytes: u64,
    /// Metadata blocks allocated since the transaction began.
    allocated_blocks: u64,
}

impl Allocator {
    /// An allocator that has loaded nothing yet. `chunk_tree_uuid` is what block headers carry.
    pub(crate) fn new(
        store: Arc<Store>,
        superblock: &Superblock,
        chunk_tree_uuid: Uuid,
        options: AllocOptions,
    ) -> Self {
        let incompat = Incompat(superblock.incompat_flags.get());
        let compat_ro = CompatRo(superblock.compat_ro_flags.get());
        let valid_free_space_tree = CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID;
        Self {
            store,
            options,
            fsid: superblock.header_fsid(),
            chunk_tree_uuid,
            is_skinny: incompat.contains(Incompat::SKINNY_METADATA),
            is_mixed: incompat.contains(Incompat::MIXED_GROUPS),
            has_free_space_tree: AtomicBool::new(compat_ro.contains(valid_free_space_tree)),
            ref_times: Mutex::new(Histogram::new(3).expect("three digits are allowed")),
            has_block_group_tree: compat_ro.contains(CompatRo::BLOCK_GROUP_TREE),
            form_searches: AtomicU64::new(0),
            sharing: Mutex::new(()),
            loading: Mutex::new(()),
            state: Mutex::new(State {
                is_mixed: incompat.contains(Incompat::MIXED_GROUPS),
                used_bytes: superblock.bytes_used.get(),
                ..State::default()
            }),
        }
    }

    /// Whether the free space tree is up to date, and kept so.
    fn has_free_space_tree(&self) -> bool {
        self.has_free_space_tree.load(Ordering::Relaxed)
    }

    /// Times of the runs of delayed refs so far.
    pub(crate) fn ref_times(&self) -> Histogram<u64> {
        self.ref_times.lock().clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock_brief(&self.state)
    }

    fn nodesize_bytes(&self) -> u64 {
        self.store.geometry().nodesize_bytes as u64
    }

    fn sectorsize_bytes(&self) -> u64 {
        self.store.geometry().sectorsize_bytes as u64
    }

    /// What a block of `owner` at `bytenr` begins with.
    pub(crate) fn new_block(
        &self,
        bytenr: LogicalAddr,
        generation: Generation,
        owner: RootId,
    ) -> NewBlock {
        NewBlock {
            fsid: self.fsid,
            chunk_tree_uuid: self.chunk_tree_uuid,
            bytenr,
            generation,
            owner,
            nodesize_bytes: self.store.geometry().nodesize_bytes,
        }
    }

    fn class_of_tree(root: RootId) -> Class {
        if root == RootId::CHUNK_TREE { Class::System } else { Class::Metadata }
    }

    /// The class that data is allocated from: that of metadata where groups are mixed.
    fn data_class(&self) -> Class {
        if self.is_mixed { Class::Metadata } else { Class::Data }
    }

    fn class_of_group(flags: BlockGroupFlags) -> Class {
        if flags.contains(BlockGroupFlags::SYSTEM) {
            Class::System
        } else if flags.contains(BlockGroupFlags::METADATA) {
            Class::Metadata
        } else {
            Class::Data
        }
    }

    /// Gives out a block and queues its reference.
    ///
    /// # Errors
    /// `NoSpace`, which a reservation rules out.
    pub(crate) fn allocate_block(
        &self,
        root: RootId,
        level: u8,
        first_key: Key,
    ) -> Result<LogicalAddr> {
        let nodesize = self.nodesize_bytes();
        let mut state = self.state();
        let class = Self::class_of_tree(root);
        let (start, _) = state.take(class, nodesize, nodesize, nodesize)?;
        let addr = LogicalAddr(start);
        let kind = ExtentKind::Block { level, first_key };
        if !state.refs.add_extent(addr, nodesize, kind, BackRef::TreeBlock { root }, 1) {
            return Err(in_use(addr));
        }
        state.allocated_blocks += 1;
        Ok(addr)
    }

    /// Takes back a tree's reference to a block. One that was allocated in this transaction, and
    /// has no other, leaves no trace.
    pub(crate) fn free_block(&self, root: RootId, ptr: &BlockPtr) {
        self.drop_block_ref(ptr, BackRef::TreeBlock { root });
    }

    /// Takes back one reference to a block.
    pub(crate) fn drop_block_ref(&self, ptr: &BlockPtr, reference: BackRef) {
        let nodesize = self.nodesize_bytes();
        let kind = ExtentKind::Block { level: ptr.level, first_key: Key::MIN };
        let mut state = self.state();
        if state.refs.change(ptr.addr, nodesize, kind, reference, -1) == Queued::Cancelled {
            // It may have been written already; another of this generation may come in its place.
            self.store.forget(ptr.addr);
            state.give(ptr.addr.0, nodesize);
        }
    }

    /// Gives out space for data: `max_bytes`, or the largest free extent of at least `min_bytes`.
    /// The space has no reference yet: [`Allocator::add_data`] or [`Allocator::release_data`]
    /// must follow before the transaction commits. A promise is spent by it.
    ///
    /// # Errors
    /// `NoSpace` where neither loaded groups nor a new chunk have it, or the damage of a group that
    /// was passed over; what stops the loading of a group.
    pub(crate) fn allocate_data(
        &self,
        roots: &Roots,
        min_bytes: u64,
        max_bytes: u64,
        promise: DataPromise,
    ) -> Result<(LogicalAddr, u64)> {
        let class = self.data_class();
        loop {
            if let Ok((start, len)) = self.take_data(max_bytes, max_bytes, promise) {
                return Ok((LogicalAddr(start), len));
            }
            if !self.load_free_space(roots, class)? {
                break;
            }
        }
        // One chunk: where it is shorter than what is asked for, so would be the next, and all that is
        // left of the devices would become data's.
        let is_new = self.allocate_chunk(roots, class)?;
        loop {
            match self.take_data(min_bytes, max_bytes, promise) {
                Ok((start, len)) => return Ok((LogicalAddr(start), len)),
                // Others may have been faster.
                Err(_) if is_new && self.allocate_chunk(roots, class)? => {}
                Err(error) => {
                    self.read_spare(roots)?;
                    return Err(self.state().fault_behind(class, error));
                }
            }
        }
    }

    /// Takes space for data out of loaded groups, none that was promised to others: other data, and
    /// metadata where they are mixed.
    fn take_data(
        &self,
        min_bytes: u64,
        max_bytes: u64,
        promise: DataPromise,
    ) -> Result<(u64, u64)> {
        let class = self.data_class();
        let align = self.sectorsize_bytes();
        let mut state = self.state();
        let kept_bytes = state.kept_from_data(self.nodesize_bytes(), promise);
        let free_bytes = state.spaces[class.index()].loaded_free_bytes;
        let spare_bytes = free_bytes.saturating_sub(kept_bytes);
        let spare_bytes = spare_bytes / align * align;
        if spare_bytes < min_bytes {
            return Err(Error::NoSpace {
                what: class.name(),
                needed_bytes: min_bytes,
                available_bytes: spare_bytes,
            });
        }
        let (start, len) = state.take(class, min_bytes, max_bytes.min(spare_bytes), align)?;
        if promise == DataPromise::Given {
            state.spend_promise(len);
        }
        Ok((start, len))
    }

    /// Gives back space of [`Allocator::allocate_data`] that was not used, with what was spent for it.
    pub(crate) fn release_data(&self, start: LogicalAddr, len_bytes: u64, promise: DataPromise) {
        let mut state = self.state();
        state.give(start.0, len_bytes);
        if promise == DataPromise::Given {
            state.promised_data_bytes += len_bytes;
        }
    }

    /// Queues the first reference of a data extent, a file extent of `inode` in `root`. `offset`
    /// is the file offset minus the offset in the extent.
    ///
    /// # Errors
    /// Corruption where the space was in use; the transaction must then not commit.
    pub(crate) fn add_data(
        &self,
        start: LogicalAddr,
        len_bytes: u64,
        root: RootId,
        inode: InodeNo,
        offset: u64,
    ) -> Result<()> {
        let reference = BackRef::ExtentData { root, inode, offset, count: 1 };
        let mut state = self.state();
        if !state.refs.add_extent(start, len_bytes, ExtentKind::Data, reference, 1) {
            return Err(in_use(start));
        }
        Ok(())
    }

    /// The data extent of this transaction that only this file refers to and that ends at `start` of the medium and `file_offset` of
    /// the file, in one block group with what follows: it may become longer, if its file extent is whole. Returns where it begins, and
    /// its length.
    pub(crate) fn data_before(
        &self,
        start: LogicalAddr,
        root: RootId,
        inode: InodeNo,
        file_offset: u64,
    ) -> Option<(LogicalAddr, u64)> {
        self.state().data_before(start, root, inode, file_offset)
    }

    /// Makes the extent that [`Allocator::data_before`] found longer by what lies behind it. Returns whether it was still so: to have
    /// its file extent copied may have given it another reference.
    pub(crate) fn grow_data(
        &self,
        start: LogicalAddr,
        root: RootId,
        inode: InodeNo,
        file_offset: u64,
        more_bytes: u64,
    ) -> bool {
        let mut state = self.state();
        let found = state.data_before(start, root, inode, file_offset);
        if let Some((addr, _)) = found {
            state.refs.grow(addr, more_bytes);
        }
        found.is_some()
    }

    /// The data extent at `start`, which was added just now, does not become longer.
    pub(crate) fn keep_data_len(&self, start: LogicalAddr) {
        self.state().refs.keep_len(start);
    }

    /// Searches made so far for the form in which a group's free space is kept.
    pub(crate) fn form_searches(&self) -> u64 {
        self.form_searches.load(Ordering::Relaxed)
    }

    /// Takes back one file extent's reference to a data extent. Returns whether the extent is gone
    /// at once, as it was allocated in this transaction: its checksums are then the caller's to
    /// forget, and after that its space to give back with [`Allocator::release_data`]. Those of
    /// others go when the commit frees them.
    pub(crate) fn drop_data(
        &self,
        start: LogicalAddr,
        len_bytes: u64,
        root: RootId,
        inode: InodeNo,
        offset: u64,
    ) -> bool {
        let reference = BackRef::ExtentData { root, inode, offset, count: 1 };
        self.drop_data_ref(start, len_bytes, reference)
    }

    /// As [`Allocator::drop_data`], for any reference.
    pub(crate) fn drop_data_ref(
        &self,
        start: LogicalAddr,
        len_bytes: u64,
        reference: BackRef,
    ) -> bool {
        let mut state = self.state();
        let queued = state.refs.change(start, len_bytes, ExtentKind::Data, reference, -1);
        queued == Queued::Cancelled
    }

    /// Queues a further reference of a data extent that has one, a file extent of `inode` in
    /// `root`. `offset` is the file offset minus the offset in the extent.
    pub(crate) fn share_data(
        &self,
        start: LogicalAddr,
        len_bytes: u64,
        root: RootId,
        inode: InodeNo,
        offset: u64,
    ) {
        let reference = BackRef::ExtentData { root, inode, offset, count: 1 };
        self.state().refs.change(start, len_bytes, ExtentKind::Data, reference, 1);
    }

    /// Bytes of metadata in use as of the last commit, and of blocks allocated since.
    pub(crate) fn metadata_used_bytes(&self) -> u64 {
        let state = self.state();
        state.metadata_used_bytes + state.allocated_blocks * self.nodesize_bytes()
    }

    /// Whether anything waits for a commit to become free.
    pub(crate) fn frees_by_commit(&self) -> bool {
        let state = self.state();
        !state.pinned.is_empty() || state.refs.len() > 0 || state.empty_spare().is_some()
    }

    /// Blocks allocated since the transaction began, and changes of references of extents with references still to run:
    /// what decides when a transaction is large enough.
    pub(crate) fn pending(&self) -> (u64, usize) {
        let state = self.state();
        (state.allocated_blocks, state.refs.change_count())
    }
}

impl State {
    fn data_before(
        &self,
        start: LogicalAddr,
        root: RootId,
        inode: InodeNo,
        file_offset: u64,
    ) -> Option<(LogicalAddr, u64)> {
        let (addr, len_bytes, reference) = self.refs.new_data_before(start)?;
        let offset = file_offset.checked_sub(len_bytes)?;
        let is_own = reference == BackRef::ExtentData { root, inode, offset, count: 1 };
        (is_own && !self.groups.contains_key(&start)).then_some((addr, len_bytes))
    }

    /// Takes space of a class out of a loaded group.
    fn take(
        &mut self,
        class: Class,
        min_bytes: u64,
        max_bytes: u64,
        align_bytes: u64,
    ) -> Result<(u64, u64)> {
        let hint = self.spaces[class.index()].hint;
        let space = &mut self.spaces[class.index()];
        let mut take = |group: &mut BlockGroup| {
            if Allocator::class_of_group(group.flags) != class
                || group.loaded_free_bytes() < min_bytes
            {
                return None;
            }
            let (at, len) = group.free.as_mut()?.take(min_bytes, max_bytes, align_bytes)?;
            space.hint = group.start;
            space.loaded_free_bytes -= len;
            Some((at, len))
        };
        if let Some(found) = self.groups.get_mut(&hint).and_then(&mut take) {
            return Ok(found);
        }
        match self.groups.values_mut().find_map(take) {
            Some(found) => Ok(found),
            None => Err(Error::NoSpace {
                what: class.name(),
                needed_bytes: min_bytes,
                available_bytes: self.longest_free_bytes(class).min(min_bytes.saturating_sub(1)),
            }),
        }
    }

    /// Bytes of the longest range, once a longer one was sought in vain.
    fn longest_free_bytes(&self, class: Class) -> u64 {
        let groups = self.groups.values();
        let free = groups
            .filter(|group| !group.is_spare && Allocator::class_of_group(group.flags) == class)
            .filter_map(|group| group.free.as_ref());
        free.map(free_space::FreeSpace::longest_max_bytes).max().unwrap_or(0)
    }

    fn count_metadata(&mut self) {
        let groups = self.groups.values();
        let metadata =
            groups.filter(|group| Allocator::class_of_group(group.flags) == Class::Metadata);
        // Their items are read first of all.
        let read = metadata.filter_map(|group| {
            Some((group.used_bytes?, if group.is_spare { 0 } else { group.len_bytes }))
        });
        (self.metadata_used_bytes, self.metadata_total_bytes) =
            read.fold((0, 0), |(used, total), (group_used, len)| (used + group_used, total + len));
    }

    /// What to say where there is no space for a class: the damage of a group of it that was passed
    /// over, unless a commit may free some.
    fn fault_behind(&self, class: Class, error: Error) -> Error {
        if !matches!(error, Error::NoSpace { .. }) || !self.pinned.is_empty() || self.refs.len() > 0
        {
            return error;
        }
        let mut groups = self.groups.values();
        let fault = groups.find_map(|group| {
            group.fault.as_ref().filter(|_| Allocator::class_of_group(group.flags) == class)
        });
        fault.cloned().unwrap_or(error)
    }

    /// Makes a range free at once.
    fn give(&mut self, start: u64, len_bytes: u64) {
        let Some(group) = self.group_at_mut(start) else { return };
        let class = Allocator::class_of_group(group.flags);
        if let Some(free) = group.free.as_mut() {
            free.add(start, start + len_bytes);
            if group.is_spare {
                return;
            }
            self.spaces[class.index()].loaded_free_bytes += len_bytes;
        }
    }

    fn group_at_mut(&mut self, addr: u64) -> Option<&mut BlockGroup> {
        let (_, group) = self.groups.range_mut(..=LogicalAddr(addr)).next_back()?;
        (addr < group.end().0).then_some(group)
    }
}

/// The free space tree, or what lies between extent items, called space free that is not.
#[cold]
fn in_use(addr: LogicalAddr) -> Error {
    Error::Corrupt(
        Corruption::new(Reason::Overlap)
            .in_block(addr)
            .have("free space")
            .expect("none where an extent is"),
    )
}
