//! Subvolumes that somebody uses by number, as the kernel does whose files are open: deleted, they stay for him.

use rustc_hash::FxHashMap;
use ubtrfs_ondisk::RootId;
use ubtrfs_rt::{Arc, Mutex, lock_brief};

/// Which subvolumes of a filesystem are held, and how often; from [`Filesystem::subvolume_holds`](crate::Filesystem::subvolume_holds).
#[derive(Clone, Default)]
pub struct SubvolumeHolds {
    counts: Arc<Mutex<FxHashMap<RootId, usize>>>,
    watch: Arc<Mutex<Option<Arc<Watch>>>>,
}

type Watch = dyn Fn(&[RootId]) + Send + Sync;

impl SubvolumeHolds {
    /// Holds a subvolume, whether it is there or not: until the answer is dropped, deleting it takes its name, and
    /// nothing of what is in it.
    pub fn hold(&self, root: RootId) -> SubvolumeHold {
        *lock_brief(&self.counts).entry(root).or_default() += 1;
        SubvolumeHold { holds: self.clone(), root }
    }

    /// `watch` is called from now on with subvolumes that are deleted and held: one when it is deleted, all by who would free what it has,
    /// each time that he passes by ([`Filesystem::clean_deleted_subvolumes`](crate::Filesystem::clean_deleted_subvolumes)). The holder may
    /// let go of what nobody uses any more; he waits for nobody.
    pub fn watch(&self, watch: impl Fn(&[RootId]) + Send + Sync + 'static) {
        *self.watch.lock() = Some(Arc::new(watch));
    }

    /// These are deleted, and held.
    pub(super) fn tell_wanted(&self, roots: &[RootId]) {
        if roots.is_empty() {
            return;
        }
        let watch = self.watch.lock().clone();
        if let Some(watch) = watch {
            watch(roots);
        }
    }

    /// Whether anybody holds it now.
    pub fn is_held(&self, root: RootId) -> bool {
        lock_brief(&self.counts).contains_key(&root)
    }
}

impl std::fmt::Debug for SubvolumeHolds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SubvolumeHolds").field("counts", &self.counts).finish_non_exhaustive()
    }
}

/// From [`SubvolumeHolds::hold`].
#[derive(Debug)]
pub struct SubvolumeHold {
    holds: SubvolumeHolds,
    root: RootId,
}

impl Drop for SubvolumeHold {
    fn drop(&mut self) {
        let mut counts = lock_brief(&self.holds.counts);
        if let Some(count) = counts.get_mut(&self.root) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.root);
            }
        }
    }
}
