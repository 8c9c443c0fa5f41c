//! Block groups in memory.

use ubtrfs_ondisk::LogicalAddr;
use ubtrfs_ondisk::block_group::BlockGroupFlags;

use super::free_space::FreeSpace;
use crate::error::Error;

/// How the free space tree keeps a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FreeSpaceForm {
    pub(crate) start: LogicalAddr,
    pub(crate) len_bytes: u64,
    /// Whether it is kept in bitmaps: set at the first look-up of the group's FREE_SPACE_INFO and
    /// at each conversion, so that a change of free space needs no search to learn the form.
    pub(crate) uses_bitmaps: Option<bool>,
    /// Free extents as the tree counts them, known when `uses_bitmaps` is.
    pub(crate) extent_count: u32,
}

impl FreeSpaceForm {
    /// End of the group in logical space.
    pub(crate) fn end(&self) -> LogicalAddr {
        LogicalAddr(self.start.0 + self.len_bytes)
    }
}

/// A block group as the allocator knows it.
#[derive(Debug)]
pub(crate) struct BlockGroup {
    pub(crate) start: LogicalAddr,
    pub(crate) len_bytes: u64,
    pub(crate) flags: BlockGroupFlags,
    /// Bytes of extents in the extent tree, as of the delayed refs run so far. `None` until its item
    /// was read, which of a group of data is done when the group is wanted: what is not known must
    /// not be taken for none.
    pub(crate) used_bytes: Option<u64>,
    /// The damage that keeps anything from being allocated here.
    pub(crate) fault: Option<Error>,
    /// Others of its class are of a more redundant profile: nothing is allocated here.
    pub(crate) is_spare: bool,
    /// Whether its item must be written before the next superblock.
    pub(crate) is_dirty: bool,
    /// Whether its chunk, device extents and items are yet to be inserted.
    pub(crate) is_new: bool,
    /// Free space, once it was loaded; only then is anything allocated here.
    pub(crate) free: Option<FreeSpace>,
    /// Bytes that lie under copies of the superblock, known when `free` is.
    pub(crate) shadowed_bytes: u64,
    /// How the free space tree keeps this group.
    pub(crate) form: FreeSpaceForm,
    /// Whether a cache of version 1 that was written of it says that it is none any more.
    pub(crate) is_cache_distrusted: bool,
}

impl BlockGroup {
    /// A group of the chunk map, whose item is not read unless `used_bytes` are given, or one just
    /// made.
    pub(crate) fn new(
        start: LogicalAddr,
        len_bytes: u64,
        flags: BlockGroupFlags,
        used_bytes: Option<u64>,
    ) -> Self {
        Self {
            start,
            len_bytes,
            flags,
            used_bytes,
            fault: None,
            is_spare: false,
            is_dirty: false,
            is_new: false,
            free: None,
            shadowed_bytes: 0,
            form: FreeSpaceForm { start, len_bytes, uses_bitmaps: None, extent_count: 0 },
            is_cache_distrusted: false,
        }
    }

    /// End in logical space.
    pub(crate) fn end(&self) -> LogicalAddr {
        LogicalAddr(self.start.0 + self.len_bytes)
    }

    /// Whether nothing lies in it, and nothing was given out of it that may come to. One whose item
    /// was not read is not known to be.
    pub(crate) fn is_empty(&self) -> bool {
        let is_free = self
            .free
            .as_ref()
            .is_none_or(|free| free.free_bytes() + self.shadowed_bytes == self.len_bytes);
        self.used_bytes == Some(0) && !self.is_new && !self.is_dirty && is_free
    }

    /// Bytes that no extent has, where its item was read.
    pub(crate) fn unused_bytes(&self) -> Option<u64> {
        self.used_bytes.map(|used| self.len_bytes.saturating_sub(used))
    }

    /// Bytes that can be allocated at once.
    pub(crate) fn loaded_free_bytes(&self) -> u64 {
        self.free.as_ref().filter(|_| !self.is_spare).map_or(0, FreeSpace::free_bytes)
    }
}
