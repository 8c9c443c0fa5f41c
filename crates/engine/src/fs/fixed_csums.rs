//! Whether a file has checksums stays as it is while its data is written or shared.
//!
//! Data goes to the medium with checksums or without, as the inode says when that begins; its file extents
//! come later, under other handles. Were the inode to say otherwise by then, the data would have checksums
//! that nobody made, or lack those that it is read by. So the flags that say it are changed only of a file
//! without data, and of one that nobody is just giving some: to that the change comes too late, as if the
//! data were there already.
//!
//! Invariant: who gives a file data asks what it has while a [`CsumsFixed`] lives, and lets it live until the
//! file extents are there. Who changes the flags holds [`FixedCsums::lock`] from the look at what is fixed
//! until the inode says so.
//!
//! Lock order: a file's data, a handle, names, this, a tree.

use rustc_hash::FxHashMap;
use ubtrfs_rt::{Mutex, MutexGuard, lock_brief};

use super::inode::InodeId;

/// How many are giving each file data.
type Counts = FxHashMap<InodeId, u32>;
/// As long as it is held nobody begins to give a file data.
pub(super) type CsumsLock<'a> = MutexGuard<'a, Counts>;

/// Files of which it is fixed whether they have checksums.
#[derive(Debug, Default)]
pub(crate) struct FixedCsums {
    counts: Mutex<Counts>,
}

impl FixedCsums {
    /// Fixes it of a file. Asked before the inode is.
    pub(super) fn fix(&self, id: InodeId) -> CsumsFixed<'_> {
        *lock_brief(&self.counts).entry(id).or_default() += 1;
        CsumsFixed { of: self, id }
    }

    /// Keeps all who would give a file data from it. `None` where somebody is just doing so.
    pub(super) fn lock(&self, id: InodeId) -> Option<CsumsLock<'_>> {
        let counts = lock_brief(&self.counts);
        (!counts.contains_key(&id)).then_some(counts)
    }
}

/// While it lives, a file has checksums as it had, or has none.
#[derive(Debug)]
pub(super) struct CsumsFixed<'a> {
    of: &'a FixedCsums,
    id: InodeId,
}

impl Drop for CsumsFixed<'_> {
    fn drop(&mut self) {
        let mut counts = lock_brief(&self.of.counts);
        if let Some(count) = counts.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.id);
            }
        }
    }
}
