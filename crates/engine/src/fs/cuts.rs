//! Files that nobody has open and that are being cut: a long one in steps, of which nobody is to see any.

use rustc_hash::FxHashMap;
use ubtrfs_rt::{AtomicUsize, Mutex, Ordering};

use super::inode::InodeId;
use super::state::FileState;

/// Where files end for who looks at them, while the medium still says that they end further on.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    /// Files in `ends`; read without its lock, to skip it where there are none.
    count: AtomicUsize,
    ends: Mutex<FxHashMap<InodeId, u64>>,
}

impl FileState {
    /// The file ends at `size` from now on, as long as the answer lives. The caller holds its data lock, and has begun a change of its
    /// data, so that who looks at it meanwhile looks again.
    pub(super) fn begin_cut(&self, id: InodeId, size: u64) -> Cut<'_> {
        self.cuts.change(|ends| ends.insert(id, size));
        Cut { files: self, id }
    }
}

impl Cuts {
    fn change<T>(&self, change: impl FnOnce(&mut FxHashMap<InodeId, u64>) -> T) {
        let mut ends = self.ends.lock();
        change(&mut ends);
        self.count.store(ends.len(), Ordering::Release);
    }

    /// Where a file ends for who looks at it, if it ends at `size` on the medium.
    pub(super) fn end_of(&self, id: InodeId, size: u64) -> u64 {
        if self.count.load(Ordering::Acquire) == 0 {
            return size;
        }
        self.ends.lock().get(&id).map_or(size, |end| size.min(*end))
    }
}

/// From [`FileState::begin_cut`].
pub(super) struct Cut<'a> {
    files: &'a FileState,
    id: InodeId,
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        self.files.cuts.change(|ends| ends.remove(&self.id));
        // If it failed, the file ends where the medium says, after all.
        self.files.note_data_changed(self.id);
    }
}

#[cfg(test)]
mod tests {
    use ubtrfs_ondisk::{InodeNo, RootId};

    use super::*;

    /// Who had opened the file by its number meanwhile had its end as it was to be, also when the cut had failed.
    #[test]
    fn who_looked_at_what_is_being_cut_looks_again() {
        let files = FileState::default();
        let id = InodeId { root: RootId(5), inode: InodeNo(257) };
        assert_eq!(files.cuts.end_of(id, 9000), 9000);
        let cut = files.begin_cut(id, 5000);
        assert_eq!(files.cuts.end_of(id, 9000), 5000);
        assert_eq!(files.cuts.end_of(id, 4000), 4000);
        assert_eq!(files.cuts.end_of(InodeId { inode: InodeNo(258), ..id }, 9000), 9000);
        let seen = files.data_count(id);
        drop(cut);
        assert_eq!(files.cuts.end_of(id, 9000), 9000);
        assert!(seen.is_some() && files.data_count(id).is_some());
        assert_ne!(files.data_count(id), seen);
    }
}
