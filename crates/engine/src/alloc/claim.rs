//! Space that is in use and not in the extent tree: what a log refers to.

use ubtrfs_ondisk::extent::{ExtentItem, flags};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Corruption, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId};

use super::Allocator;
use crate::btree::Roots;
use crate::error::{Error, Result};

impl Allocator {
    /// Keeps space that the extent tree calls free from being given out before the commit.
    ///
    /// # Errors
    /// `Corrupt` where it is not free; damage in the free space tree.
    pub(crate) fn claim_until_commit(
        &self,
        roots: &Roots,
        start: LogicalAddr,
        len_bytes: u64,
    ) -> Result<()> {
        let group = {
            let mut state = self.state();
            state.group_at_mut(start.0).map(|group| (group.start, group.len_bytes))
        };
        let end = start.0.checked_add(len_bytes);
        let (Some((group, group_len)), Some(end)) = (group, end) else {
            return Err(not_free(start, len_bytes));
        };
        if end > group.0 + group_len {
            return Err(not_free(start, len_bytes));
        }
        self.load_group(roots, group, group_len)?;
        let mut state = self.state();
        let (class, is_spare) = {
            let group = state.group_at_mut(start.0).ok_or_else(|| not_free(start, len_bytes))?;
            let free = group.free.as_mut().filter(|free| free.contains(start.0, end));
            free.ok_or_else(|| not_free(start, len_bytes))?.remove(start.0, end);
            (Self::class_of_group(group.flags), group.is_spare)
        };
        if !is_spare {
            state.spaces[class.index()].loaded_free_bytes -= len_bytes;
        }
        state.claimed.insert(start.0, end);
        Ok(())
    }

    /// Takes over what was claimed: it stays in use after the commit.
    pub(crate) fn take_claimed(&self, start: LogicalAddr) {
        self.state().claimed.remove(&start.0);
    }

    /// Whether the extent tree has that data extent, as of the last commit.
    ///
    /// # Errors
    /// A damaged block.
    pub(crate) fn is_recorded(
        &self,
        roots: &Roots,
        start: LogicalAddr,
        len_bytes: u64,
    ) -> Result<bool> {
        let key = Key::new(ObjectId(start.0), KeyType::EXTENT_ITEM, len_bytes);
        let Some(bytes) = roots.tree(RootId::EXTENT_TREE)?.lookup(&key)? else { return Ok(false) };
        // Without SKINNY_METADATA, tree blocks have such keys, too.
        let item = ExtentItem::peek(&bytes).map_err(|error| error.in_root(RootId::EXTENT_TREE))?;
        Ok(item.flags.get() & flags::DATA != 0)
    }

    /// As [`Allocator::is_recorded`], what the running transaction has added included.
    ///
    /// # Errors
    /// A damaged block.
    pub(crate) fn is_known(
        &self,
        roots: &Roots,
        start: LogicalAddr,
        len_bytes: u64,
    ) -> Result<bool> {
        let is_new = self.state().refs.waiting(start).is_new;
        Ok(is_new || self.is_recorded(roots, start, len_bytes)?)
    }
}

#[cold]
fn not_free(start: LogicalAddr, len_bytes: u64) -> Error {
    Error::Corrupt(
        Corruption::new(Reason::Overlap)
            .in_root(RootId::TREE_LOG)
            .have(format!("{len_bytes} bytes at {start}"))
            .expect("space that is free but for the log"),
    )
}
