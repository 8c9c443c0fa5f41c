//! How far listings of a directory go: to the name that was its last when the latest of them began. What is renamed meanwhile gets
//! a place behind all others, so that without an end who renames what he finds would find it again, without end.
//!
//! The kernel opens directories without telling, and any thread may ask for any part of a listing. So listings are not told apart: one
//! that began earlier goes on to where the latest ends, or, once one of them was told that there is no more, to what is the directory's last
//! name then.
//!
//! 1. None ends before what was the last name when it began: of a directory the highest end is kept that was looked up since the last
//!    time one was forgotten, and nothing that was looked up before that ([`Ends::forgotten_count`]).
//! 2. Where no other listing begins or ends meanwhile, one has one end, and so comes to it.
//!
//! A program that opens a directory anew and seeks to a place in it, without reading its first part, cannot be told from one that goes on: it is
//! not told of names that are newer than the latest listing that began, if nobody has read that to its end.

use rustc_hash::FxHashMap;
use ubtrfs_engine::InodeId;
use ubtrfs_rt::Mutex;

/// Directories whose ends are remembered; with more, listings under way go on to what is their directory's last name then.
const DIRECTORIES_MAX: usize = 4096;

#[derive(Debug, Default)]
struct Ends {
    of_directories: FxHashMap<InodeId, u64>,
    forgotten_count: u64,
}

impl Ends {
    fn forget(&mut self, forget: impl FnOnce(&mut FxHashMap<InodeId, u64>)) {
        forget(&mut self.of_directories);
        self.forgotten_count = self.forgotten_count.wrapping_add(1);
    }
}

/// The listings of a mount that have begun.
#[derive(Debug, Default)]
pub(crate) struct Listed {
    ends: Mutex<Ends>,
}

impl Listed {
    /// The index of the last name of a listing; `last` is its directory's at the moment.
    pub(crate) fn end(
        &self,
        dir: InodeId,
        is_begin: bool,
        last: impl FnOnce() -> ubtrfs_engine::Result<u64>,
    ) -> ubtrfs_engine::Result<u64> {
        let forgotten_count = {
            let ends = self.ends.lock();
            match ends.of_directories.get(&dir) {
                Some(end) if !is_begin => return Ok(*end),
                _ => ends.forgotten_count,
            }
        };
        // It may wait for the medium, so nobody is kept from listing by it.
        let end = last()?;
        let mut ends = self.ends.lock();
        if ends.forgotten_count != forgotten_count {
            return Ok(end);
        }
        if ends.of_directories.len() >= DIRECTORIES_MAX && !ends.of_directories.contains_key(&dir) {
            ends.forget(FxHashMap::clear);
        }
        let known = ends.of_directories.entry(dir).or_insert(end);
        *known = end.max(*known);
        Ok(*known)
    }

    /// A listing was told that there is no more.
    pub(crate) fn forget(&self, dir: InodeId) {
        self.ends.lock().forget(|ends| {
            ends.remove(&dir);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ubtrfs_ondisk::{InodeNo, RootId};

    fn dir(number: u64) -> InodeId {
        InodeId { root: RootId(5), inode: InodeNo(number) }
    }

    #[test]
    fn listing_ends_where_its_directory_did_when_the_latest_began() {
        let listed = Listed::default();
        let end = |is_begin, last| listed.end(dir(256), is_begin, || Ok(last)).unwrap();
        assert_eq!(end(true, 7), 7);
        assert_eq!(end(false, 99), 7);
        assert_eq!(end(true, 9), 9);
        assert_eq!(end(false, 99), 9);
        // Its last name is gone; who lists it sees what came until then.
        assert_eq!(end(true, 8), 9);
        listed.forget(dir(256));
        assert_eq!(end(false, 12), 12);
        assert_eq!(end(false, 99), 12);
        for number in 300..300 + 2 * DIRECTORIES_MAX as u64 {
            listed.end(dir(number), true, || Ok(1)).unwrap();
        }
        assert!(listed.ends.lock().of_directories.len() <= DIRECTORIES_MAX);
    }

    /// What one looked up before another began would end that one too early.
    #[test]
    fn end_that_was_looked_up_before_one_was_forgotten_is_nobody_elses() {
        let listed = Listed::default();
        let slow = listed.end(dir(256), false, || {
            assert_eq!(listed.end(dir(256), true, || Ok(9)).unwrap(), 9);
            listed.forget(dir(256));
            Ok(7)
        });
        assert_eq!(slow.unwrap(), 7);
        assert_eq!(listed.end(dir(256), false, || Ok(10)).unwrap(), 10);
    }
}
