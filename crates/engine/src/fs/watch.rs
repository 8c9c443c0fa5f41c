//! Who is told of names that change: a mount, say, whose kernel remembers names.

use super::inode::InodeId;
use crate::filesystem::{Filesystem, Handle};
use crate::txn;

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

/// A name was entered.
pub(super) fn tell_entered(handle: &txn::Handle<'_>, dir: InodeId, name: &[u8]) {
    handle.core().names.tell(((dir.root, dir.inode), name, None));
}

impl Handle<'_> {
    /// A name was taken away.
    pub(super) fn tell_gone(&self, dir: InodeId, name: &[u8], gone: InodeId) {
        let gone = Some((gone.root, gone.inode));
        self.txn.core().names.tell(((dir.root, dir.inode), name, gone));
    }
}

impl Filesystem {
    /// Has `watch` called with each name that is entered or taken away from now on, in place of who was called before. It is called by
    /// the thread that makes the change, in the midst of it: others may not see it yet, it may fail yet, and no call of this filesystem may
    /// be made from there.
    pub fn watch_names(&self, watch: impl Fn(ChangedName<'_>) + Send + Sync + 'static) {
        self.inner.core.names.set(move |(dir, name, gone)| {
            let id = |(root, inode)| InodeId { root, inode };
            watch(ChangedName { dir: id(dir), name, gone: gone.map(id) });
        });
    }
}
