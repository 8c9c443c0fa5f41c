//! Files whose space the kernel was told before they have it.
//!
//! Of a file in memory only the kernel is told what it has on the medium and what it will have. Where that cannot be stored in the end the
//! sum was too large. The kernel keeps what it was told, so once nothing of such a file waits to be stored it is to ask again, if the sum
//! came out otherwise.

use std::time::Duration;

use rustc_hash::FxHashMap;
use ubtrfs_engine::InodeId;
use ubtrfs_rt::{Condvar, Mutex};

/// How often it is looked at what has been stored.
const EVERY: Duration = Duration::from_secs(1);
/// Of more files than this the kernel asks each time.
const FILES_MAX: usize = 1 << 16;

/// What the kernel was told: the blocks of 512 bytes, by file.
pub(crate) type Told = FxHashMap<InodeId, u64>;

#[derive(Debug, Default)]
struct State {
    /// Told since the last look. The kernel may not have taken it in yet.
    young: Told,
    /// Told before.
    old: Told,
    is_ending: bool,
}

impl State {
    fn is_empty(&self) -> bool {
        self.young.is_empty() && self.old.is_empty()
    }
}

/// The files of a mount that may take another space than the kernel knows.
#[derive(Debug, Default)]
pub(crate) struct Unsettled {
    state: Mutex<State>,
    changed: Condvar,
}

impl Unsettled {
    /// The kernel is about to be told of a file that is not stored. Returns false where it must not keep that: there are
    /// too many, or nobody looks.
    pub(crate) fn note(&self, id: InodeId, blocks: u64) -> bool {
        let mut state = self.state.lock();
        let is_known = state.old.remove(&id).is_some() || state.young.contains_key(&id);
        let is_full = state.young.len() + state.old.len() >= FILES_MAX;
        if state.is_ending || (is_full && !is_known) {
            return false;
        }
        if state.is_empty() {
            self.changed.notify_one();
        }
        state.young.insert(id, blocks);
        true
    }

    /// Waits for the next look, and takes what is due; `None` at the end. While there is nothing to look at, nobody wakes.
    pub(crate) fn wait(&self) -> Option<Told> {
        let mut state = self.state.lock();
        while state.is_empty() && !state.is_ending {
            self.changed.wait(&mut state);
        }
        if !state.is_ending {
            self.changed.wait_for(&mut state, EVERY);
        }
        if state.is_ending {
            return None;
        }
        let young = std::mem::take(&mut state.young);
        Some(std::mem::replace(&mut state.old, young))
    }

    /// What was due and is not stored yet is so later, unless the kernel was told anew.
    pub(crate) fn put_back(&self, told: Told) {
        let mut state = self.state.lock();
        for (id, blocks) in told {
            if !state.young.contains_key(&id) {
                state.old.entry(id).or_insert(blocks);
            }
        }
    }

    /// Nobody looks any more, so the kernel may not keep what it is told.
    pub(crate) fn end(&self) {
        self.state.lock().is_ending = true;
        self.changed.notify_all();
    }
}
