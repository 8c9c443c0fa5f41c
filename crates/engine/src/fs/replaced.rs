//! Files that are written anew, in place of what they were: cut to nothing, or given the name of another.
//!
//! Who writes so, and syncs nothing, as editors and `> file` do, expects the old contents or the new ones after a crash. But
//! what names and sizes are is durable with the next commit, and data only when it is written back, which may be half a
//! minute later: between the two the file would be empty. Linux's btrfs writes the data back as the name is replaced, and as
//! a file is closed that was cut to nothing. Here the data of what replaces a name is brought to the medium before the name is, and
//! that of what was cut before the commits that come by time or are asked for: an embedder's file, or one behind FUSE, may
//! never be closed. A commit that comes by itself because its transaction is full looks for neither; nor is it known of a file that nobody had
//! open that it was cut.

use std::sync::Weak;

use ubtrfs_ondisk::dir::FileType;
use ubtrfs_rt::{Arc, AtomicUsize, Mutex, Ordering, Time};

use super::inode::InodeId;
use super::open_file::Space;
use super::rename::RenameMode;
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;

/// How long after it was cut to nothing what is written to a file counts as its new contents: longer than passes between two commits.
const ANEW_SECONDS: i64 = 60;

/// When a file was last cut to nothing, and whether it waits for the next commit.
#[derive(Debug, Default)]
pub(super) struct Cut {
    state: Mutex<CutState>,
}

#[derive(Debug, Default)]
struct CutState {
    when: Option<Time>,
    is_waiting: bool,
}

/// Those that have new contents, which are to be stored before the next commit.
#[derive(Debug, Default)]
pub(crate) struct WrittenAnew {
    /// In `spaces`, or being stored.
    count: AtomicUsize,
    spaces: Mutex<Vec<Weak<Space>>>,
    /// Held while they are stored: who commits meanwhile waits.
    storing: Mutex<()>,
}

impl WrittenAnew {
    fn add(&self, space: &Arc<Space>) {
        let mut spaces = self.spaces.lock();
        // Each time before it would grow: who never asks for a commit closes files all the same.
        if spaces.len() == spaces.capacity() {
            let before = spaces.len();
            spaces.retain(|space| space.strong_count() > 0);
            self.count.fetch_sub(before - spaces.len(), Ordering::Release);
            // As many more before it is looked through again.
            let kept = spaces.len();
            spaces.reserve(kept + 1);
        }
        spaces.push(Arc::downgrade(space));
        self.count.fetch_add(1, Ordering::Release);
    }
}

impl Filesystem {
    /// A file that had something is cut to nothing.
    pub(super) fn note_cut(&self, space: &Space) {
        space.inode().cut.state.lock().when = Some(self.runtime().clock.now());
    }

    /// A file was written, and is dirty by now.
    pub(super) fn note_written(&self, space: &Arc<Space>) {
        let mut cut = space.inode().cut.state.lock();
        let Some(when) = cut.when else { return };
        let passed = self.runtime().clock.now().sec.saturating_sub(when.sec);
        if !(0..=ANEW_SECONDS).contains(&passed) {
            cut.when = None;
        } else if !std::mem::replace(&mut cut.is_waiting, true) {
            self.inner.open_files.written_anew.add(space);
        }
    }

    /// Commits, with the new contents of files that were cut to nothing. What finds no room before may find it behind the commit, and has one
    /// of its own: a crash between the two, or before there is room, leaves such a file empty. Called by a thread that holds no handle.
    ///
    /// # Errors
    /// Those of `commit`.
    pub(crate) fn commit_with_written_anew(&self, commit: impl Fn() -> Result<()>) -> Result<()> {
        let are_stored = self.store_written_anew();
        commit()?;
        if are_stored {
            return Ok(());
        }
        self.store_written_anew();
        commit()
    }

    /// Brings the new contents of files that were cut to nothing to the medium. What cannot be stored is told to who syncs those files.
    /// Returns whether none of them lacked room: what did, before the commit or as commits are held, is tried again with the next call.
    fn store_written_anew(&self) -> bool {
        let anew = &self.inner.open_files.written_anew;
        if anew.count.load(Ordering::Acquire) == 0 {
            return true;
        }
        let _storing = anew.storing.lock();
        let spaces = std::mem::take(&mut *anew.spaces.lock());
        let mut are_stored = true;
        for space in &spaces {
            if let Some(space) = space.upgrade() {
                // What is written from now on waits for the next commit.
                space.inode().cut.state.lock().is_waiting = false;
                let is_stored = self.store(&space);
                are_stored &= is_stored;
                if !is_stored {
                    // However long ago it was cut: it is still new contents that the medium does not have.
                    self.store_with_next_commit(&space);
                } else if space.is_dirty() {
                    self.note_written(&space);
                }
            }
            anew.count.fetch_sub(1, Ordering::Release);
        }
        are_stored
    }

    fn store_with_next_commit(&self, space: &Arc<Space>) {
        let mut cut = space.inode().cut.state.lock();
        if !std::mem::replace(&mut cut.is_waiting, true) {
            self.inner.open_files.written_anew.add(space);
        }
    }

    /// Where a rename gives a file the name of one that has contents: brings its own to the medium before. The thread holds no handle.
    pub(super) fn store_before_replacing(
        &self,
        (from, from_name): (InodeId, &[u8]),
        (to, to_name): (InodeId, &[u8]),
        mode: RenameMode,
    ) {
        let replaces = matches!(mode, RenameMode::Replace | RenameMode::Whiteout);
        if !replaces || self.inner.open_files.is_none_open() {
            return;
        }
        // What is wrong with the names is for the rename to say.
        let Ok(target) = self.lookup(to, to_name) else { return };
        let Ok(moved) = self.lookup(from, from_name) else { return };
        let Some(space) = self.inner.open_files.find(moved) else { return };
        let has_contents = self
            .inode(target)
            .is_ok_and(|inode| inode.file_type() == FileType::Regular && inode.size_bytes > 0);
        if has_contents && moved != target && !self.store(&space) {
            self.store_with_next_commit(&space);
        }
    }

    /// Returns whether another try would be of no use: all is stored, or lost, or cannot be, which the file's next fsync tells. Not where it
    /// only lacked room.
    fn store(&self, space: &Space) -> bool {
        !matches!(self.flush_space(space), Err(Error::NoSpace { .. } | Error::Limit { .. }))
    }
}
