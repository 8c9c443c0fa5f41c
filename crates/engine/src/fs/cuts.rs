//! Files that nobody has open and that are being cut: a long one in steps, of which nobody is to see any.

use rustc_hash::FxHashMap;
use ubtrfs_rt::{AtomicUsize, Mutex, Ordering};

use super::inode::InodeId;

/// Where files end for who looks at them, while the medium still says that they end further on.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    /// Files in `ends`; read without its lock, to skip it where there are none.
    count: AtomicUsize,
    ends: Mutex<FxHashMap<InodeId, u64>>,
}

impl Cuts {
    /// The file ends at `size` from now on, as long as the answer lives. The caller holds its data lock, and has begun a change of its
    /// data, so that who looks at it meanwhile looks again.
    pub(super) fn begin(&self, id: InodeId, size: u64) -> Cut<'_> {
        let mut ends = self.ends.lock();
        ends.insert(id, size);
        self.count.store(ends.len(), Ordering::Release);
        Cut { cuts: self, id }
    }

    /// Where a file ends for who looks at it, if it ends at `size` on the medium.
    pub(super) fn end_of(&self, id: InodeId, size: u64) -> u64 {
        if self.count.load(Ordering::Acquire) == 0 {
            return size;
        }
        self.ends.lock().get(&id).map_or(size, |end| size.min(*end))
    }
}

/// From [`Cuts::begin`].
pub(super) struct Cut<'a> {
    cuts: &'a Cuts,
    id: InodeId,
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        let mut ends = self.cuts.ends.lock();
        ends.remove(&self.id);
        self.cuts.count.store(ends.len(), Ordering::Release);
    }
}
