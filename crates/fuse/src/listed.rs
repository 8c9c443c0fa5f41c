//! How far each listing of a directory goes: to the name that was its last when the listing began. What is renamed meanwhile gets
//! a place behind all others, so that without an end who renames what he finds would find it again, without end.
//!
//! The kernel opens directories without telling. So a listing is known by its directory and the thread that lists it, and begins where
//! it is read from the first entry on.

use rustc_hash::FxHashMap;
use ubtrfs_engine::InodeId;
use ubtrfs_rt::Mutex;

/// Listings that are remembered; with more, all go on to what is their directory's last name then.
const LISTINGS_MAX: usize = 4096;

type Key = (InodeId, u32);

/// The listings of a mount that have begun.
#[derive(Debug, Default)]
pub(crate) struct Listed {
    ends: Mutex<FxHashMap<Key, u64>>,
}

impl Listed {
    /// The index of the last name of a listing; `last` is its directory's at the moment.
    pub(crate) fn end(
        &self,
        dir: InodeId,
        thread: u32,
        is_begin: bool,
        last: impl FnOnce() -> ubtrfs_engine::Result<u64>,
    ) -> ubtrfs_engine::Result<u64> {
        let key = (dir, thread);
        if !is_begin && let Some(end) = self.ends.lock().get(&key) {
            return Ok(*end);
        }
        let end = last()?;
        let mut ends = self.ends.lock();
        if ends.len() >= LISTINGS_MAX {
            ends.clear();
        }
        ends.insert(key, end);
        Ok(end)
    }

    /// The listing was told that there is no more.
    pub(crate) fn forget(&self, dir: InodeId, thread: u32) {
        self.ends.lock().remove(&(dir, thread));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ubtrfs_ondisk::{InodeNo, RootId};

    #[test]
    fn listing_ends_where_its_directory_did_when_it_began() {
        let dir = InodeId { root: RootId(5), inode: InodeNo(256) };
        let listed = Listed::default();
        assert_eq!(listed.end(dir, 1, true, || Ok(7)).unwrap(), 7);
        assert_eq!(listed.end(dir, 2, true, || Ok(9)).unwrap(), 9);
        assert_eq!(listed.end(dir, 1, false, || Ok(99)).unwrap(), 7);
        assert_eq!(listed.end(dir, 1, true, || Ok(11)).unwrap(), 11);
        listed.forget(dir, 1);
        assert_eq!(listed.end(dir, 1, false, || Ok(12)).unwrap(), 12);
        assert_eq!(listed.end(dir, 2, false, || Ok(99)).unwrap(), 9);
        for thread in 10..10 + LISTINGS_MAX as u32 {
            listed.end(dir, thread, true, || Ok(1)).unwrap();
        }
        assert!(listed.ends.lock().len() <= LISTINGS_MAX);
    }
}
