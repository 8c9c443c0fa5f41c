//! Who is told of names that change, by those who change them.

use ubtrfs_ondisk::{InodeNo, RootId};
use ubtrfs_rt::{Arc, AtomicBool, Ordering, RwLock};

/// A name that is entered into a directory, or taken away: the directory, the name, and what it named where it is taken away.
pub(crate) type Told<'a> = ((RootId, InodeNo), &'a [u8], Option<(RootId, InodeNo)>);

type Watch = Arc<dyn Fn(Told<'_>) + Send + Sync>;

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
    pub(crate) fn tell(&self, told: Told<'_>) {
        if !self.is_watched.load(Ordering::Acquire) {
            return;
        }
        if let Some(watch) = &*self.watch.read() {
            watch(told);
        }
    }

    /// Names who is told from now on.
    pub(crate) fn set(&self, watch: impl Fn(Told<'_>) + Send + Sync + 'static) {
        *self.watch.write() = Some(Arc::new(watch));
        self.is_watched.store(true, Ordering::Release);
    }
}
