//! Transactions: handles, the commit, and what happens when one fails.
//!
//! States, and the functions that move between them:
//!
//! ```text
//! Running --begin--> Running (one more handle) --drop of Handle--> Running
//! Running --begin_alone--> Running (one handle, begin waits) --drop of Handle--> Running
//! Running --commit--> Committing (no handle is open, begin waits) --> Running, generation + 1
//! any     --abort--> Aborted (reads go on, begin and commit fail with the first cause)
//! ```
//!
//! Invariants:
//!
//! 1. While a handle is open no commit runs, so what a handle changed becomes durable all at once
//!    or not at all.
//! 2. A handle exists only for a reservation that was granted. Whoever holds one does not call
//!    [`Core::begin`] or [`Core::commit`]: a public handle borrows its filesystem's gate.
//! 3. The order on the medium is that of [`commit`]: data was written when it was appended; then
//!    tree blocks, a flush, the superblocks, a flush; only then is freed space given out again.
//!
//! A crash before the superblock leaves the last commit; nothing that it reaches was touched.

pub(crate) mod commit;
mod handle;
mod reservation;
mod watch;
mod writeout;

use std::sync::OnceLock;

use ubtrfs_ondisk::hash::name_hash;
use ubtrfs_ondisk::superblock::Superblock;
use ubtrfs_ondisk::{DeviceId, Generation, RootId};
use ubtrfs_rt::{Arc, AtomicBool, AtomicU64, Condvar, Mutex, Ordering, Runtime, Time, lock_brief};

use crate::alloc::{self, Allocator, Left};
use crate::btree::Roots;
use crate::error::{Error, Result};

pub(crate) use handle::Handle;
pub(crate) use reservation::Leaves;
pub use reservation::Reservation;
use watch::NameWatch;

/// What every layer of an open filesystem shares: trees, allocator, the running transaction.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) roots: Roots,
    pub(crate) alloc: Allocator,
    pub(crate) runtime: Arc<Runtime>,
    gate: Mutex<Gate>,
    changed: Condvar,
    /// The superblock to be written by the next commit.
    pub(crate) superblock: Mutex<Box<Superblock>>,
    /// What keeps changes in memory that must become items before a commit.
    flusher: OnceLock<Arc<dyn Flush>>,
    /// Bytes of dirty blocks at which a transaction commits by itself.
    commit_bytes: u64,
    /// The superblock must be written though no tree may have changed.
    pub(crate) has_new_superblock: AtomicBool,
    /// Where not 0, no handle commits what is there by itself, and a transaction grows up to so
    /// many bytes.
    held_bytes_max: AtomicU64,
    holds_begun: AtomicU64,
    /// Bytes of the trees that a commit edits by itself, as of the last commit: an upper bound for
    /// what it copies. 0 until first asked for.
    bookkeeping_bytes: AtomicU64,
    /// Memory that the running transaction took when its last handle began; 0 once it is committed.
    pending_bytes_seen: AtomicU64,
    /// Who is told of names that change.
    pub(crate) names: NameWatch,
}

/// Something above that holds changes back until the commit asks for them.
pub(crate) trait Flush: std::fmt::Debug + Send + Sync {
    /// Turns all that is held back into items.
    ///
    /// # Errors
    /// What stops an edit; the transaction is then aborted.
    fn flush(&self, handle: &mut Handle<'_>) -> Result<()>;

    /// Bytes of metadata that [`Flush::flush`] may need now. A reservation keeps them back, as the
    /// handles that they were reserved for are closed by then.
    fn held_back_bytes(&self, nodesize_bytes: u64) -> u64;

    /// Ranges of files that are dirty, which are held back, too.
    fn dirty_range_count(&self) -> u64;

    /// Memory that file data takes, of the budget that tree blocks have, too.
    fn data_bytes(&self) -> u64;
}

#[derive(Debug)]
struct Gate {
    /// The running transaction.
    generation: Generation,
    open_handles: usize,
    /// Who keeps it from committing by itself.
    holders: usize,
    /// A commit runs, or a handle that must be alone is open: no other begins.
    is_closed: bool,
    is_dirty: bool,
    read_only: Option<String>,
    first_cause: Option<(Generation, Arc<Error>)>,
}

/// Many, so that two sessions hardly take the same; few of all that there are.
const DEGRADED_STEPS: u64 = 1 << 16;

/// How often a handle waits for a commit that frees what it lacks, where others are quicker to use that.
const COMMIT_TRIES_MAX: usize = 3;

fn no_metadata(needed_bytes: u64) -> Error {
    Error::NoSpace { what: "metadata", needed_bytes, available_bytes: 0 }
}

/// How far the first generation of a session is above the last. A device that is missing now and comes back must not be taken for one that a power
/// cut kept from its last superblock, which is one transaction behind. Nor must two devices, each written to without the other, come to one
/// generation: of the same number of commits that allocated the same their superblocks would be the same.
fn first_step(missing: &[DeviceId], now: Time) -> u64 {
    if missing.is_empty() {
        return 1;
    }
    let mut told: Vec<u8> = missing.iter().flat_map(|device| device.0.to_le_bytes()).collect();
    told.extend(now.sec.to_le_bytes());
    told.extend(now.nsec.to_le_bytes());
    2 + name_hash(&told) % DEGRADED_STEPS
}

impl Core {
    /// The state of a filesystem whose last commit is `superblock`.
    pub(crate) fn new(
        roots: Roots,
        alloc: Allocator,
        runtime: Arc<Runtime>,
        superblock: Superblock,
        read_only: Option<String>,
        commit_bytes: u64,
    ) -> Self {
        // A log is of the generation that follows.
        let step = match superblock.log_root.get() {
            0 => first_step(&roots.store.volume().missing_devices(), runtime.clock.now()),
            _ => 1,
        };
        let generation = Generation(superblock.generation.get().saturating_add(step));
        let gate = Gate {
            generation,
            open_handles: 0,
            holders: 0,
            is_closed: false,
            is_dirty: false,
            read_only,
            first_cause: None,
        };
        Self {
            roots,
            alloc,
            runtime,
            gate: Mutex::new(gate),
            changed: Condvar::new(),
            superblock: Mutex::new(Box::new(superblock)),
            flusher: OnceLock::new(),
            commit_bytes,
            has_new_superblock: AtomicBool::new(false),
            held_bytes_max: AtomicU64::new(0),
            holds_begun: AtomicU64::new(0),
            bookkeeping_bytes: AtomicU64::new(0),
            pending_bytes_seen: AtomicU64::new(0),
            names: NameWatch::default(),
        }
    }

    /// Names who holds changes back. Called once, at open.
    pub(crate) fn install(&self, flusher: Arc<dyn Flush>) {
        let _ = self.flusher.set(flusher);
    }

    /// Lets nothing commit by itself, for what must become durable all at once and takes many
    /// handles: a transaction that takes more than `bytes_max` of memory, which is not 0, is refused
    /// instead. [`Core::release_commits`] follows.
    pub(crate) fn hold_commits(&self, bytes_max: u64) {
        let mut gate = lock_brief(&self.gate);
        gate.holders += 1;
        self.held_bytes_max.store(bytes_max, Ordering::Release);
        // Afterwards: who asked for the number before, and whether it is held behind that, knows of each hold he may have met, as one that
        // he saw neither begun nor held has begun, by this number, before it ends.
        self.holds_begun.fetch_add(1, Ordering::Release);
    }

    /// Takes one [`Core::hold_commits`] back.
    pub(crate) fn release_commits(&self) {
        let mut gate = lock_brief(&self.gate);
        gate.holders -= 1;
        if gate.holders == 0 {
            self.held_bytes_max.store(0, Ordering::Release);
        }
    }

    /// Opens a handle in the running transaction, for what `reservation` says. Commits first when
    /// the transaction is large, or when only a commit frees enough space.
    ///
    /// # Errors
    /// `ReadOnly`, `Aborted`, `NoSpace`; or what stops the loading of space or the commit.
    pub(crate) fn begin(&self, reservation: Reservation) -> Result<Handle<'_>> {
        let is_held = self.make_room()?;
        let handle = self.enter()?;
        let (bytes, is_granted) = self.reserve(reservation)?;
        if is_granted {
            return Ok(handle.with_reserved(bytes));
        }
        drop(handle);
        // Where nothing may commit, nothing is freed by it.
        if is_held {
            return Err(no_metadata(bytes));
        }
        for _ in 0..COMMIT_TRIES_MAX {
            self.commit_unless_held()?;
            // What others have reserved, of which they give back the most, is not lacking when they are through.
            let handle = self.enter_alone()?;
            if let (bytes, true) = self.reserve(reservation)? {
                return Ok(handle.beside_others().with_reserved(bytes));
            }
            // Who came between the two leaves what only another commit frees.
            if !self.frees_by_commit() {
                break;
            }
        }
        Err(no_metadata(bytes))
    }

    /// Commits where the transaction is large, else shares memory with it. Returns whether commits are held.
    fn make_room(&self) -> Result<bool> {
        let is_held = self.is_held();
        let pending_bytes = self.check_held_bytes()?;
        if !is_held && pending_bytes > self.commit_bytes {
            self.commit_unless_held()?;
        } else {
            self.share_memory_with(pending_bytes);
        }
        Ok(is_held)
    }

    /// As [`Core::begin`], for who has another way: `None` where there is no space without a commit.
    ///
    /// # Errors
    /// As [`Core::begin`], but for want of space.
    pub(crate) fn try_begin(&self, reservation: Reservation) -> Result<Option<Handle<'_>>> {
        self.make_room()?;
        let handle = self.enter()?;
        match self.reserve(reservation) {
            Ok((bytes, true)) => Ok(Some(handle.with_reserved(bytes))),
            Ok((_, false)) | Err(Error::NoSpace { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Bytes of metadata that what is held back above may need, with so many more dirty ranges of files.
    pub(crate) fn held_back_bytes(&self, more_ranges: u64) -> u64 {
        let Some(flusher) = self.flusher.get() else { return 0 };
        let nodesize = self.roots.store.geometry().nodesize_bytes as u64;
        let held_back = flusher.held_back_bytes(nodesize);
        if !self.roots.has_snapshots() {
            return held_back;
        }
        let ranges = flusher.dirty_range_count().saturating_add(more_ranges);
        held_back.saturating_add(self.alloc.unsharing_bytes(ranges))
    }

    /// Keeps metadata back for what `reservation` says, under a handle. Returns how many bytes, and whether they are there.
    ///
    /// # Errors
    /// What stops the loading of space.
    fn reserve(&self, reservation: Reservation) -> Result<(u64, bool)> {
        let nodesize = self.roots.store.geometry().nodesize_bytes as u64;
        self.alloc.load(&self.roots)?;
        // What is kept back for leaves that are shared, as is found out meanwhile, is a limit for who brings more, not for who stores what
        // there is, or frees.
        let held_back = match (reservation.leaves(), self.flusher.get()) {
            (Leaves::Nothing, Some(flusher)) => flusher.held_back_bytes(nodesize),
            _ => self.held_back_bytes(0),
        };
        let tree_bytes = self.bookkeeping_bytes()?;
        // Once it is loaded, and under the handle: what comes after is dirty, and is not copied.
        let used_bytes = self.alloc.metadata_used_bytes();
        let csum_tree_bytes = match reservation.frees() + reservation.adds() {
            0 => 0,
            _ => self.csum_tree_bytes()?,
        };
        let is_shared = self.roots.has_shared() || reservation.makes_shared();
        let worst = |reservation: Reservation, tree_bytes: u64, csum_tree_bytes: u64| {
            let (adds, frees) = (reservation.adds(), reservation.frees());
            let extents =
                alloc::bytes_of_extents(adds, frees, nodesize, tree_bytes, csum_tree_bytes);
            let bytes = reservation.bytes(nodesize, used_bytes).saturating_add(extents);
            if !is_shared {
                return bytes;
            }
            let refs = reservation.shared_refs(nodesize, used_bytes);
            bytes.saturating_add(alloc::bytes_of_refs(refs, nodesize, tree_bytes))
        };
        let bytes = worst(reservation, tree_bytes, csum_tree_bytes);
        // Behind the next commit those trees are larger by what is pending, in what it keeps back, too.
        let growth = if is_shared { self.alloc.pending_bytes() } else { 0 };
        let storing = Reservation::storing(1, 1, 1).with_holes(1);
        let left = Left {
            // So that a full filesystem can be emptied.
            freeing_bytes: worst(Reservation::delete_subvolume(), tree_bytes, 0),
            // Without a look at a tree, for so few extents.
            storing_bytes: worst(storing, tree_bytes.saturating_add(growth), u64::MAX)
                .saturating_add(growth),
            by: reservation.leaves(),
        };
        let is_granted = self.alloc.reserve(&self.roots, bytes, held_back, tree_bytes, left)?;
        Ok((bytes, is_granted))
    }

    /// Keeps more back for an open handle, without a commit. Returns how many bytes.
    ///
    /// # Errors
    /// `NoSpace` where only a commit might free that; what stops the loading of space.
    pub(super) fn reserve_more(&self, reservation: Reservation) -> Result<u64> {
        match self.reserve(reservation)? {
            (bytes, true) => Ok(bytes),
            (bytes, false) => Err(no_metadata(bytes)),
        }
    }

    /// As [`Core::begin`], for a handle that is the only one while it lives: what it sees is one
    /// moment of all trees.
    ///
    /// # Errors
    /// As [`Core::begin`].
    pub(crate) fn begin_alone(&self, reservation: Reservation) -> Result<Handle<'_>> {
        loop {
            let handle = self.begin(reservation)?;
            if self.is_only_one() {
                return Ok(handle.alone());
            }
        }
    }

    /// As [`Core::enter`], when no other handle is open, and as long as this one lives none is opened.
    fn enter_alone(&self) -> Result<Handle<'_>> {
        loop {
            let handle = self.enter()?;
            if self.is_only_one() {
                return Ok(handle.alone());
            }
        }
    }

    /// Closes the gate behind the one handle that this thread has open, and waits until all others have ended. Returns false where somebody
    /// else has closed it, and waits for this handle to end.
    fn is_only_one(&self) -> bool {
        let mut gate = lock_brief(&self.gate);
        if gate.is_closed {
            return false;
        }
        gate.is_closed = true;
        while gate.open_handles > 1 {
            self.changed.wait(&mut gate);
        }
        true
    }

    /// Opens the gate again for who waits for a handle.
    fn open_gate(&self) {
        lock_brief(&self.gate).is_closed = false;
        self.changed.notify_all();
    }

    /// The handle of a filesystem's first transaction: there is no extent tree yet that a
    /// reservation could be reckoned with.
    pub(crate) fn begin_first(&self) -> Result<Handle<'_>> {
        self.enter()
    }

    /// A handle for who changes nothing: while it is open there is no commit, and when it ends none to be made for it.
    ///
    /// # Errors
    /// As [`Core::begin`], but for want of space.
    pub(crate) fn look(&self) -> Result<Handle<'_>> {
        let mut gate = lock_brief(&self.gate);
        while gate.is_closed {
            self.changed.wait(&mut gate);
        }
        gate.check()?;
        gate.open_handles += 1;
        Ok(Handle::new(self, gate.generation))
    }

    fn enter(&self) -> Result<Handle<'_>> {
        let handle = self.look()?;
        lock_brief(&self.gate).is_dirty = true;
        Ok(handle)
    }

    fn leave(&self, was_alone: bool) {
        let mut gate = lock_brief(&self.gate);
        gate.open_handles -= 1;
        if was_alone {
            gate.is_closed = false;
        }
        // Who waits for all others to end has one open, or none.
        if gate.open_handles <= 1 {
            self.changed.notify_all();
        }
    }

    fn bookkeeping_bytes(&self) -> Result<u64> {
        match self.bookkeeping_bytes.load(Ordering::Relaxed) {
            0 => self.count_bookkeeping_bytes(),
            bytes => Ok(bytes),
        }
    }

    fn csum_tree_bytes(&self) -> Result<u64> {
        match self.roots.tree(RootId::CSUM_TREE) {
            Ok(tree) => Ok(tree.read().bytes_used),
            Err(Error::NotFound { .. }) => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Only a commit changes what this counts.
    fn count_bookkeeping_bytes(&self) -> Result<u64> {
        self.alloc.count_caches(&self.roots)?;
        let mut bytes = 0;
        for root in [RootId::EXTENT_TREE, RootId::FREE_SPACE_TREE] {
            match self.roots.tree(root) {
                Ok(tree) => bytes += tree.read().bytes_used,
                Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        self.bookkeeping_bytes.store(bytes, Ordering::Relaxed);
        Ok(bytes)
    }

    /// Whether nothing commits by itself just now.
    pub(crate) fn is_held(&self) -> bool {
        self.held_bytes_max.load(Ordering::Acquire) > 0
    }

    /// How many times somebody began to hold commits.
    pub(crate) fn holds_begun(&self) -> u64 {
        self.holds_begun.load(Ordering::Acquire)
    }

    /// What is changed while nothing commits must not take more memory than was said, files' data in memory included: that cannot be
    /// written back then. Returns what the running transaction takes.
    ///
    /// # Errors
    /// `Limit`.
    pub(crate) fn check_held_bytes(&self) -> Result<u64> {
        let held_bytes_max = self.held_bytes_max.load(Ordering::Relaxed);
        let pending_bytes = self.pending_bytes();
        if held_bytes_max > 0 && pending_bytes > held_bytes_max {
            return Err(Error::Limit {
                what: format!("a transaction that must not grow beyond {held_bytes_max} bytes"),
            });
        }
        Ok(pending_bytes)
    }

    /// Blocks of trees leave to files' bytes, and to the running transaction, what those take of the memory that all may have. Takes no lock
    /// that anybody holds for long.
    pub(crate) fn share_memory(&self) {
        let pending_bytes = self.pending_bytes_seen.load(Ordering::Relaxed);
        let data_bytes = self.flusher.get().map_or(0, |flusher| flusher.data_bytes());
        self.roots.store.leave_to_others(pending_bytes.saturating_add(data_bytes));
    }

    fn share_memory_with(&self, pending_bytes: u64) {
        self.pending_bytes_seen.store(pending_bytes, Ordering::Relaxed);
        self.share_memory();
    }

    /// Whether a commit may free space, and may be made.
    pub(crate) fn frees_by_commit(&self) -> bool {
        !self.is_held() && self.alloc.frees_by_commit()
    }

    /// Memory that the running transaction takes.
    fn pending_bytes(&self) -> u64 {
        let (blocks, extents) = self.alloc.pending();
        let nodesize = self.roots.store.geometry().nodesize_bytes as u64;
        blocks * nodesize + extents as u64 * EXTENT_MEMORY_BYTES
    }

    /// Stops all further changes; reads go on. Returns what every later call will fail with.
    pub(crate) fn abort(&self, cause: Error) -> Error {
        lock_brief(&self.gate).abort(cause)
    }

    /// Whether changes are possible.
    ///
    /// # Errors
    /// `ReadOnly` or `Aborted`.
    pub(crate) fn check_writable(&self) -> Result<()> {
        lock_brief(&self.gate).check()
    }
}

/// Memory that a pending delayed ref takes, about.
const EXTENT_MEMORY_BYTES: u64 = 256;

impl Gate {
    fn abort(&mut self, cause: Error) -> Error {
        let generation = self.generation;
        let (generation, first_cause) =
            self.first_cause.get_or_insert_with(|| (generation, Arc::new(cause))).clone();
        Error::Aborted { generation, first_cause }
    }

    fn check(&self) -> Result<()> {
        if let Some((generation, first_cause)) = &self.first_cause {
            return Err(Error::Aborted {
                generation: *generation,
                first_cause: Arc::clone(first_cause),
            });
        }
        match &self.read_only {
            Some(why) => Err(Error::ReadOnly { why: why.clone() }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
