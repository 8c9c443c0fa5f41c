//! Who is told of names that change: a mount, say, whose kernel remembers names.

use ubtrfs_rt::{Arc, AtomicBool, Ordering, RwLock};

use super::inode::InodeId;
use crate::filesystem::Filesystem;

/// A name that is being entered into a directory, or taken away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChangedName<'a> {
    /// The directory.
    pub dir: InodeId,
    /// The name.
    pub name: &'a [u8],
    /// What it named, where it is taken away.
    pub gone: Option<InodeId>,
}

type Watch = Arc<dyn Fn(ChangedName<'_>) + Send + Sync>;

/// Who is told.
#[derive(Default)]
pub(crate) struct NameWatch {
    /// Read without the lock, to skip it where nobody is.
    is_watched: AtomicBool,
    watch: RwLock<Option<Watch>>,
}

impl std::fmt::Debug for NameWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NameWatch").field("is_watched", &self.is_watched).finish_non_exhaustive()
    }
}

impl NameWatch {
    pub(crate) fn tell(&self, changed: ChangedName<'_>) {
        if !self.is_watched.load(Ordering::Acquire) {
            return;
        }
        if let Some(watch) = &*self.watch.read() {
            watch(changed);
        }
    }
}

impl Filesystem {
    /// Has `watch` called with each name that is entered or taken away from now on, in place of who was called before. It is called by
    /// the thread that makes the change, in the midst of it: others may not see it yet, it may fail yet, and no call of this filesystem may
    /// be made from there.
    pub fn watch_names(&self, watch: impl Fn(ChangedName<'_>) + Send + Sync + 'static) {
        let names = &self.inner.core.names;
        *names.watch.write() = Some(Arc::new(watch));
        names.is_watched.store(true, Ordering::Release);
    }
}
