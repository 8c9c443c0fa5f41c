//! The commit: everything changed since the last one becomes durable, or nothing does.
//!
//! [`Core::commit`] closes the gate, lets what was held back become items, and repeats
//! [`Core::settle`] until a pass changes nothing: delayed refs edit the extent tree, which copies
//! blocks, which queues delayed refs. It ends because a block is copied once a transaction, and because
//! what a pass adds goes in before what it takes out, so that no leaf is merged and split by turns. Then
//! it writes blocks, flushes, writes the superblocks, and gives freed space out again.

use ubtrfs_ondisk::misc::{OnDisk, QgroupStatusItem};
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::superblock::{RootBackup, Superblock};
use ubtrfs_ondisk::{Generation, Key, KeyType, ObjectId, RootId};
use ubtrfs_rt::{Arc, Ordering};
use zerocopy::IntoBytes;

use super::{Core, Handle};
use crate::btree::{BlockPtr, Editor, Tree};
use crate::error::{Error, Result};

/// Passes after which a commit that does not settle is taken for a bug.
const PASS_COUNT_MAX: usize = 64;
/// Flag of the quota status: the counts are not to be believed before a rescan.
const QGROUP_INCONSISTENT: u64 = 1 << 2;

/// Who wants a commit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asked {
    ByUser,
    /// Time, or a transaction that has grown large.
    ByNobody,
}

impl Core {
    /// Makes everything durable that was changed through handles closed before the call. Of many
    /// that ask at once, one commits for all.
    ///
    /// # Errors
    /// `Aborted`, with its first cause; the medium then holds the last commit.
    pub(crate) fn commit(&self) -> Result<()> {
        self.commit_as(Asked::ByUser)
    }

    /// As [`Core::commit`], by whom nobody asked: while commits are held, nothing is done.
    ///
    /// # Errors
    /// As [`Core::commit`].
    pub(crate) fn commit_unless_held(&self) -> Result<()> {
        self.commit_as(Asked::ByNobody)
    }

    fn commit_as(&self, asked: Asked) -> Result<()> {
        let Some(generation) = self.close_gate(asked)? else { return Ok(()) };
        let result = self.commit_alone(generation);
        let mut gate = self.gate.lock();
        gate.is_closed = false;
        self.changed.notify_all();
        match result {
            Ok(has_changed) => {
                gate.generation = Generation(generation.0 + u64::from(has_changed));
                gate.is_dirty = false;
                Ok(())
            }
            // Under the same lock: who waited here must not go on with a failed transaction.
            Err(error) => Err(gate.abort(error)),
        }
    }

    /// Waits until no handle is open and keeps new ones out. `None` when there is nothing to do.
    fn close_gate(&self, asked: Asked) -> Result<Option<Generation>> {
        let mut gate = self.gate.lock();
        let wanted = gate.generation;
        while gate.is_closed {
            self.changed.wait(&mut gate);
        }
        // Who committed meanwhile took along what the caller changed.
        if !gate.is_dirty || gate.generation > wanted {
            return Ok(None);
        }
        gate.check()?;
        gate.is_closed = true;
        while gate.open_handles > 0 {
            self.changed.wait(&mut gate);
        }
        // Commits may have been held since the caller looked. From here on no handle is granted that
        // this commit could tear from others of its holder's.
        let is_unwanted = asked == Asked::ByNobody && self.is_held();
        let checked = gate.check();
        if checked.is_err() || is_unwanted {
            gate.is_closed = false;
            self.changed.notify_all();
        }
        checked?;
        Ok((!is_unwanted).then_some(gate.generation))
    }

    /// Returns whether there was anything to commit.
    fn commit_alone(&self, generation: Generation) -> Result<bool> {
        if let Some(flusher) = self.flusher.get() {
            flusher.flush(&mut Handle::of_commit(self, generation))?;
        }
        let is_new = self.has_new_superblock.load(Ordering::Relaxed);
        if !self.alloc.has_changes() && !is_new {
            return Ok(false);
        }
        Editor::new(&self.roots.root_tree, &self.roots, &self.alloc, generation).touch_root()?;
        self.mark_quotas_stale(generation)?;
        self.alloc.remove_unused(&self.roots, generation)?;
        self.settle(generation)?;
        let mut superblock = self.next_superblock(generation)?;
        let volume = self.roots.store.volume();
        // What is free here is another's where somebody has committed meanwhile.
        volume.check_ours()?;
        self.write_blocks()?;
        volume.flush()?;
        superblock.generation = generation.0.into();
        volume.write_superblocks(&superblock)?;
        **self.superblock.lock() = superblock;
        self.has_new_superblock.store(false, Ordering::Relaxed);
        self.share_memory_with(0);
        self.retire_blocks();
        self.alloc.unpin();
        // Counted anew by who needs it next, who is told where that cannot be read: this commit is made.
        self.bookkeeping_bytes.store(0, Ordering::Relaxed);
        Ok(true)
    }

    /// Says in the quota tree, if there is one, that its counts need a rescan: they are not kept.
    fn mark_quotas_stale(&self, generation: Generation) -> Result<()> {
        let tree = match self.roots.tree(RootId::QUOTA_TREE) {
            Ok(tree) => tree,
            Err(Error::NotFound { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let key = Key::new(ObjectId(0), KeyType::QGROUP_STATUS, 0);
        let mut editor = Editor::new(&tree, &self.roots, &self.alloc, generation);
        let flags = editor.get(&key, |item| QgroupStatusItem::peek(item).map(|item| item.flags))?;
        let Some(flags) = flags.transpose()? else { return Ok(()) };
        if flags.get() & QGROUP_INCONSISTENT != 0 {
            return Ok(());
        }
        editor.update(&key, |item| {
            if let Ok(item) = QgroupStatusItem::peek_mut(item) {
                item.flags = (flags.get() | QGROUP_INCONSISTENT).into();
            }
        })
    }

    /// Brings extent tree, free space tree, block groups and root items to a fixed point.
    fn settle(&self, generation: Generation) -> Result<()> {
        for _ in 0..PASS_COUNT_MAX {
            let mut did = self.alloc.settle(&self.roots, generation)?;
            for tree in self.roots.open_trees() {
                did |= self.record_root(&tree, generation)?;
            }
            if !did {
                return Ok(());
            }
        }
        Err(Error::Unsupported {
            what: format!("a commit that has not settled after {PASS_COUNT_MAX} passes"),
        })
    }

    /// Writes a tree's place into its root item, if it moved.
    pub(super) fn record_root(&self, tree: &Tree, generation: Generation) -> Result<bool> {
        let (root, bytes_used) = {
            let mut state = tree.read_mut_quietly();
            let now = (state.root, state.bytes_used);
            if now == state.recorded {
                return Ok(false);
            }
            state.recorded = now;
            now
        };
        let now = self.runtime.clock.now();
        let root_tree = &self.roots.root_tree;
        let mut editor = Editor::new(root_tree, &self.roots, &self.alloc, generation);
        let mut item = match editor.get(&tree.root_key, RootItem::parse)? {
            Some(item) => item.map_err(|error| error.in_root(RootId::ROOT_TREE))?,
            None => return Err(Error::not_found(format!("root item of tree {}", tree.id))),
        };
        item.bytenr = root.addr.0.into();
        item.level = root.level;
        item.generation = root.generation.0.into();
        item.generation_v2 = root.generation.0.into();
        item.bytes_used = bytes_used.into();
        if tree.id.is_subvolume() {
            item.ctransid = generation.0.into();
            item.ctime = ubtrfs_ondisk::misc::Timespec::new(now.sec, now.nsec);
        }
        editor.replace(&tree.root_key, item.as_bytes())?;
        Ok(true)
    }

    /// The superblock that reaches the new roots.
    fn next_superblock(&self, generation: Generation) -> Result<Superblock> {
        let mut superblock = **self.superblock.lock();
        let old_generation = superblock.generation;
        let root = self.roots.root_tree.root();
        let chunk_root = self.roots.chunk_tree.root();
        superblock.generation = generation.0.into();
        superblock.root = root.addr.0.into();
        superblock.root_level = root.level;
        superblock.chunk_root = chunk_root.addr.0.into();
        superblock.chunk_root_level = chunk_root.level;
        superblock.chunk_root_generation = chunk_root.generation.0.into();
        let (used_bytes, total_bytes) = self.alloc.totals();
        superblock.bytes_used = used_bytes.into();
        superblock.total_bytes = total_bytes.into();
        superblock.set_sys_chunks(&self.alloc.system_chunks())?;
        if superblock.uuid_tree_generation == old_generation {
            superblock.uuid_tree_generation = generation.0.into();
        }
        self.back_up_roots(&mut superblock, old_generation.get())?;
        Ok(superblock)
    }

    /// Enters the roots in the next of the four slots of earlier roots.
    fn back_up_roots(&self, superblock: &mut Superblock, old_generation: u64) -> Result<()> {
        let last = superblock
            .super_roots
            .iter()
            .position(|backup| backup.tree_root_gen.get() == old_generation && old_generation > 0);
        let slot = last.map_or(0, |last| (last + 1) % superblock.super_roots.len());
        let root_of = |root: RootId| -> Result<BlockPtr> { Ok(self.roots.tree(root)?.root()) };
        let tree = root_of(RootId::ROOT_TREE)?;
        let chunk = root_of(RootId::CHUNK_TREE)?;
        let extent = root_of(RootId::EXTENT_TREE)?;
        let fs = root_of(RootId::FS_TREE)?;
        let dev = root_of(RootId::DEV_TREE)?;
        let csum = root_of(RootId::CSUM_TREE)?;
        superblock.super_roots[slot] = RootBackup {
            tree_root: tree.addr.0.into(),
            tree_root_gen: tree.generation.0.into(),
            tree_root_level: tree.level,
            chunk_root: chunk.addr.0.into(),
            chunk_root_gen: chunk.generation.0.into(),
            chunk_root_level: chunk.level,
            extent_root: extent.addr.0.into(),
            extent_root_gen: extent.generation.0.into(),
            extent_root_level: extent.level,
            fs_root: fs.addr.0.into(),
            fs_root_gen: fs.generation.0.into(),
            fs_root_level: fs.level,
            dev_root: dev.addr.0.into(),
            dev_root_gen: dev.generation.0.into(),
            dev_root_level: dev.level,
            csum_root: csum.addr.0.into(),
            csum_root_gen: csum.generation.0.into(),
            csum_root_level: csum.level,
            total_bytes: superblock.total_bytes,
            bytes_used: superblock.bytes_used,
            num_devices: superblock.num_devices,
            ..RootBackup::default()
        };
        Ok(())
    }

    /// All trees that may hold dirty blocks.
    pub(super) fn all_trees(&self) -> Vec<Arc<Tree>> {
        let mut trees = self.roots.open_trees();
        trees.push(Arc::clone(&self.roots.root_tree));
        trees.push(Arc::clone(&self.roots.chunk_tree));
        trees
    }
}
