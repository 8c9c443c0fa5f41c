//! Space for data, and the promises made of it.
//!
//! Data that is in memory only has space promised: who writes it to the device later finds some. What
//! was promised is counted, not placed; who allocates without a promise leaves so much free. Who allocates
//! with one spends it: what has its space is promised no more, and is again when that is released.

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
            if !self.load_free_space(roots, class)? && !self.allocate_chunk(roots, class)? {
                let state = self.state();
                let free = state.spaces[class.index()].loaded_free_bytes;
                let kept = state.kept_from_data(self.nodesize_bytes(), DataPromise::None);
                let error = Error::NoSpace {
                    what: class.name(),
                    needed_bytes: len_bytes,
                    available_bytes: free.saturating_sub(kept),
                };
                return Err(state.fault_behind(class, error));
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

    /// Counts a promise for data that has its space, so that it is taken back as any other: from before, or
    /// as it was placed and is to be placed again.
    pub(crate) fn promise_placed_data(&self, len_bytes: u64) {
        self.state().promised_data_bytes += len_bytes;
    }

    /// Takes a promise back.
    pub(crate) fn take_back_data(&self, len_bytes: u64) {
        let mut state = self.state();
        state.promised_data_bytes = state.promised_data_bytes.saturating_sub(len_bytes);
    }
}
