//! Space for data, and the promises made of it.
//!
//! Data that is in memory only has space promised: who writes it to the device later finds some. What
//! was promised is counted, not placed; who allocates without a promise leaves so much free. Who allocates
//! with one spends it: what has its space is promised no more, and is again when that is released.
//!
//! Data that goes where its file has space already is counted apart: nothing is kept free for it, which
//! matters most where groups are mixed and metadata would lack it. Who gives a promise back says of which kind
//! it was ([`Promised`]). Of a file that has dirty data of both kinds nobody knows; so the sum of both is
//! exact, and what is kept free never less than was promised: there places are taken back first, and the
//! free space spent first.

use super::{Allocator, Class, State};
use crate::btree::Roots;
use crate::error::{Error, Result};

/// Whose space is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DataPromise {
    /// Nobody's: what others were promised stays free.
    None,
    /// Of who was promised at least as much.
    Given,
}

/// What a promise was of that is taken back: of that kind first, and of the other where that is not enough.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Promised {
    /// Free space.
    Space,
    /// Space that the file has; or either, of who does not know.
    Place,
}

impl State {
    /// Bytes of its groups that data must leave.
    pub(super) fn kept_from_data(&self, nodesize_bytes: u64, promise: DataPromise) -> u64 {
        let metadata = if self.is_mixed { self.kept_bytes(nodesize_bytes) } else { 0 };
        if promise == DataPromise::Given {
            return metadata;
        }
        // Freeing needs metadata, and so does placing what is promised.
        let freeing = if self.is_mixed { self.freeing_reserve_bytes(0) } else { 0 };
        metadata.saturating_add(freeing).saturating_add(self.promised_data_bytes)
    }

    /// Counts space that was taken for what was promised, or is promised no more.
    pub(super) fn spend_promise(&mut self, len_bytes: u64) {
        let spent = len_bytes.min(self.promised_data_bytes);
        self.promised_data_bytes -= spent;
        self.placed_bytes = self.placed_bytes.saturating_sub(len_bytes - spent);
    }
}

impl Allocator {
    /// Promises `len_bytes` for data, if so many are free in the groups that are loaded.
    pub(crate) fn try_promise_data(&self, len_bytes: u64) -> bool {
        let class = self.data_class();
        let nodesize = self.nodesize_bytes();
        let mut state = self.state();
        let free = state.spaces[class.index()].loaded_free_bytes;
        let kept = state.kept_from_data(nodesize, DataPromise::None);
        if free.saturating_sub(kept) < len_bytes {
            return false;
        }
        state.promised_data_bytes += len_bytes;
        true
    }

    /// As [`Allocator::try_promise_data`]; loads groups and makes chunks until there is enough. Called
    /// under a handle.
    ///
    /// # Errors
    /// `NoSpace`, or the damage of a group that was passed over; or what stops the loading of one.
    pub(crate) fn promise_data(&self, roots: &Roots, len_bytes: u64) -> Result<()> {
        let class = self.data_class();
        self.load(roots)?;
        while !self.try_promise_data(len_bytes) {
            if self.load_free_space(roots, class)? {
                continue;
            }
            let (free, kept) = {
                let state = self.state();
                let free = state.spaces[class.index()].loaded_free_bytes;
                (free, state.kept_from_data(self.nodesize_bytes(), DataPromise::None))
            };
            // Chunks are not made for what would not fit into all of them.
            let most = free.saturating_add(self.unallocated_bytes(class));
            let could_fit = len_bytes.saturating_add(kept) <= most;
            if !could_fit || !self.allocate_chunk(roots, class)? {
                self.read_spare(roots)?;
                let error = Error::NoSpace {
                    what: class.name(),
                    needed_bytes: len_bytes,
                    available_bytes: free.saturating_sub(kept),
                };
                return Err(self.state().fault_behind(class, error));
            }
        }
        Ok(())
    }

    /// Whether so much metadata may be held back beside all that is promised, and what frees space still
    /// has its room.
    pub(crate) fn has_metadata_for(&self, held_back_bytes: u64) -> bool {
        let nodesize = self.nodesize_bytes();
        let mut state = self.state();
        state.held_back_bytes = held_back_bytes;
        let promised_data = if state.is_mixed { state.promised_data_bytes } else { 0 };
        let kept = state.kept_bytes(nodesize).saturating_add(state.freeing_reserve_bytes(0));
        let free = state.spaces[Class::Metadata.index()].loaded_free_bytes;
        free >= kept.saturating_add(promised_data)
    }

    /// Counts a promise for data that goes where its file has space, so that it is taken back as any other.
    pub(crate) fn promise_placed_data(&self, len_bytes: u64) {
        self.state().placed_bytes += len_bytes;
    }

    /// Takes a promise back.
    pub(crate) fn take_back_data(&self, len_bytes: u64, promised: Promised) {
        let mut state = self.state();
        if promised == Promised::Space {
            return state.spend_promise(len_bytes);
        }
        let placed = len_bytes.min(state.placed_bytes);
        state.placed_bytes -= placed;
        state.promised_data_bytes = state.promised_data_bytes.saturating_sub(len_bytes - placed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who does not know of which kind a promise was takes none of space back too early. Who knew did not say so: where another file's
    /// data had its place, what was given back of free space stayed promised, and others were refused it.
    #[test]
    fn promises_of_both_kinds_are_all_taken_back_and_none_of_space_too_early() {
        let runtime = ubtrfs_rt::Arc::new(ubtrfs_rt::Runtime::simulated(1));
        let device = ubtrfs_rt::Arc::new(ubtrfs_volume::MemDevice::new(160 << 20));
        let volume = crate::mkfs(vec![device], &crate::MkfsOptions::default(), &runtime).unwrap();
        let options = crate::OpenOptions { runtime, ..crate::OpenOptions::default() };
        let fs = crate::Filesystem::open(volume, options).unwrap();
        let core = &fs.inner.core;
        let counts = || {
            let state = core.alloc.state();
            (state.promised_data_bytes, state.placed_bytes)
        };
        let promise = || {
            let _handle = fs.begin(crate::Reservation::items(0)).unwrap();
            core.alloc.promise_data(&core.roots, 8192).unwrap();
            core.alloc.promise_placed_data(12_288);
            assert_eq!(counts(), (8192, 12_288));
        };
        promise();
        core.alloc.take_back_data(4096, Promised::Place);
        assert_eq!(counts(), (8192, 8192));
        core.alloc.take_back_data(16_384, Promised::Place);
        assert_eq!(counts(), (0, 0));
        promise();
        core.alloc.take_back_data(4096, Promised::Space);
        assert_eq!(counts(), (4096, 12_288));
        core.alloc.take_back_data(16_384, Promised::Space);
        assert_eq!(counts(), (0, 0));
        promise();
        let handle = fs.begin(crate::Reservation::items(0)).unwrap();
        let (start, len) =
            core.alloc.allocate_data(&core.roots, 12_288, 12_288, DataPromise::Given).unwrap();
        assert_eq!(counts(), (0, 8192));
        core.alloc.release_data(start, len, DataPromise::Given);
        assert_eq!(counts(), (12_288, 8192));
        drop(handle);
        core.alloc.take_back_data(20_480, Promised::Place);
        assert_eq!(counts(), (0, 0));
    }
}
