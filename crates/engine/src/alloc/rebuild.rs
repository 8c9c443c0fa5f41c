//! Making the free space tree anew, where the superblock says that it is not up to date: somebody
//! changed the filesystem who does not keep it.
//!
//! It is made from the extent tree as of the last commit. What the transaction that makes it changes
//! itself, the blocks of the new tree included, follows as with any other change when its delayed
//! refs are run.

use ubtrfs_ondisk::features::CompatRo;
use ubtrfs_ondisk::{Key, RootId};
use ubtrfs_rt::Ordering;

use super::Allocator;
use super::free_space_tree::Delta;
use crate::btree::Roots;
use crate::error::Result;
use crate::txn::{Handle, Reservation};

/// Bytes of the items that a group has whatever its form.
const GROUP_BYTES: u64 = 256;

impl Allocator {
    /// Whether there is a free space tree that must be made anew before anything changes.
    pub(crate) fn needs_rebuild(&self, compat_ro: CompatRo) -> bool {
        compat_ro.contains(CompatRo::FREE_SPACE_TREE) && !self.has_free_space_tree()
    }

    /// What making it anew may need: the tree holds of each group either bitmaps or no more extents
    /// than lie between those of the extent tree. Every group's item is read, as each group gets
    /// items in the tree.
    ///
    /// # Errors
    /// A chunk without its block group; a damaged root item.
    pub(crate) fn reservation_of_rebuild(&self, roots: &Roots) -> Result<Reservation> {
        self.load(roots)?;
        let starts: Vec<_> = self.state().groups.keys().copied().collect();
        for start in starts {
            self.read_group(roots, start)?;
        }
        let (group_count, total_bytes) = {
            let state = self.state();
            let total = state.groups.values().map(|group| group.len_bytes);
            (state.groups.len() as u64, total.fold(0, u64::saturating_add))
        };
        let bitmap_bytes = total_bytes / self.sectorsize_bytes() / 8 * 2;
        let extent_bytes = roots.tree(RootId::EXTENT_TREE)?.read().bytes_used;
        let group_bytes = group_count.saturating_mul(GROUP_BYTES);
        let bytes = bitmap_bytes.min(extent_bytes).saturating_add(group_bytes);
        Ok(Reservation::rebuild(bytes))
    }

    /// Makes it anew, in the transaction of `handle`, the first since the filesystem was opened.
    ///
    /// # Errors
    /// Damage in the extent tree; what stops an edit.
    pub(crate) fn rebuild_free_space_tree(&self, handle: &mut Handle<'_>) -> Result<()> {
        let roots = &handle.core().roots;
        let tree = roots.tree(RootId::FREE_SPACE_TREE)?;
        let generation = handle.generation();
        {
            let mut editor = self.edit(roots, &tree, generation);
            while let Some((key, _)) = editor.at_or_after(&Key::MIN)? {
                editor.remove(&key)?;
            }
        }
        // Nothing of the old tree is remembered, and no form of a group either.
        // Those made since the last commit are entered by the next, as always.
        let forms: Vec<_> = {
            let state = self.state();
            let old = state.groups.values().filter(|group| !group.is_new);
            old.map(|group| group.form).collect()
        };
        for mut form in forms {
            let end = form.end().0;
            let free = self.scan_extents(roots, form.start, form.len_bytes)?;
            let mut used = Vec::with_capacity(free.len() + 1);
            let mut at = form.start.0;
            for (start, free_end) in free {
                used.push((at, start));
                at = free_end;
            }
            used.push((at, end));
            let deltas: Vec<Delta> = used
                .into_iter()
                .filter(|(start, end)| start < end)
                .map(|(start, end)| Delta { start, end, is_free: false })
                .collect();
            let mut editor = self.edit(roots, &tree, generation);
            let mut free_space_tree = self.free_space_tree(&mut editor);
            free_space_tree.add_group(&mut form)?;
            free_space_tree.apply(&mut form, &deltas)?;
            drop(editor);
            self.set_form(form);
        }
        self.has_free_space_tree.store(true, Ordering::Relaxed);
        handle.set_compat_ro(CompatRo::FREE_SPACE_TREE_VALID);
        Ok(())
    }
}
