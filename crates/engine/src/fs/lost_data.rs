//! Files that left memory with data lost in writeback, before an fsync told: who opens one next is told by his, as Linux does as long as
//! it has the inode in memory.

use rustc_hash::FxHashMap;
use ubtrfs_iomap::LostData;
use ubtrfs_rt::Mutex;

use super::inode::InodeId;
use crate::error::{Error, Result};

/// Of more files only who syncs all of them is told.
const FILES_MAX: usize = 1024;

/// What was lost, by file.
#[derive(Debug, Default)]
pub(crate) struct LostFiles {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    files: FxHashMap<InodeId, LostData<Error>>,
    /// The last of one that was too many, if no sync has told.
    other: Option<Error>,
}

impl LostFiles {
    /// The file leaves memory.
    pub(super) fn note(&self, id: InodeId, lost: LostData<Error>) {
        let mut state = self.state.lock();
        if state.files.len() >= FILES_MAX && !state.files.contains_key(&id) {
            let gone = state.files.keys().next().copied();
            let gone = gone.and_then(|gone| state.files.remove(&gone));
            state.other =
                gone.filter(|gone| !gone.is_synced).map(|gone| gone.error).or(state.other.take());
        }
        state.files.insert(id, lost);
    }

    /// The file comes to memory again.
    pub(super) fn take(&self, id: InodeId) -> Option<LostData<Error>> {
        self.state.lock().files.remove(&id)
    }

    /// What was lost of files that are no more is nobody's concern.
    pub(super) fn forget(&self, is_gone: impl Fn(InodeId) -> bool) {
        self.state.lock().files.retain(|id, _| !is_gone(*id));
    }

    /// Whether who opens the file is told of something.
    pub(crate) fn has(&self, id: InodeId) -> bool {
        self.state.lock().files.contains_key(&id)
    }

    /// For who syncs all files: one of the errors that no sync told, if there is one. All count as told to it.
    ///
    /// # Errors
    /// That error.
    pub(super) fn tell_sync(&self) -> Result<()> {
        let mut state = self.state.lock();
        let mut told = state.other.take();
        for lost in state.files.values_mut().filter(|lost| !lost.is_synced) {
            lost.is_synced = true;
            told = Some(lost.error.clone());
        }
        told.map_or(Ok(()), Err)
    }
}
