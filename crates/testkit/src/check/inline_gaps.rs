//! A false alarm of the lowmem mode: a gap behind inline data.
//!
//! Linux makes a short file longer and enters the hole behind its first block at once; the first block,
//! inline until then, becomes an extent when it is written back. A cut between the two leaves inline data and a
//! hole from the next block on, which Linux reads as it was meant. Without NO_HOLES the lowmem mode wants
//! the hole to begin where the inline data ends.

use std::path::Path;

use super::extended_refs::LOWMEM_SUMMARY;
use super::{CheckMode, CheckOutcome, complaints};
use crate::run::run;

/// Holes begin with blocks.
const BLOCK_BYTES: u64 = 4096;

/// Whether all that the lowmem mode said is of such gaps, and the image has them.
pub(super) fn is_alarm(image: &Path, mode: CheckMode, outcome: &CheckOutcome) -> bool {
    let said = complaints(&outcome.transcript);
    let gaps: Vec<&str> = said.iter().copied().filter(|line| *line != LOWMEM_SUMMARY).collect();
    let is_gap = |line: &&str| Gap::parse(line).is_some_and(|gap| gap.is_behind_inline_data(image));
    mode == CheckMode::Lowmem && !gaps.is_empty() && gaps.iter().all(is_gap)
}

/// What it said of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Gap {
    root: u64,
    inode: u64,
    inline_bytes: u64,
}

impl Gap {
    /// `ERROR: root R EXTENT_DATA[I N] gap exists, expected: EXTENT_DATA[I M]`.
    fn parse(line: &str) -> Option<Self> {
        let rest = line.strip_prefix("ERROR: root ")?;
        let (root, rest) = rest.split_once(" EXTENT_DATA[")?;
        let (found, rest) = rest.split_once("] gap exists, expected: EXTENT_DATA[")?;
        let place = |text: &str| {
            let (inode, at) = text.split_once(' ')?;
            Some((inode.parse::<u64>().ok()?, at.parse::<u64>().ok()?))
        };
        let (found, expected) = (place(found)?, place(rest.strip_suffix(']')?)?);
        let gap = Self { root: root.parse().ok()?, inode: found.0, inline_bytes: expected.1 };
        let is_next_block = found.1 == expected.1.next_multiple_of(BLOCK_BYTES);
        (found.0 == expected.0 && is_next_block && expected.1 < BLOCK_BYTES).then_some(gap)
    }

    fn is_behind_inline_data(&self, image: &Path) -> bool {
        let root = self.root.to_string();
        let words = ["inspect-internal", "dump-tree", "-t", &root].map(AsRef::as_ref);
        let dump = run("btrfs", words.into_iter().chain([image.as_os_str()]));
        let key = format!(" key ({} EXTENT_DATA 0) ", self.inode);
        let item = dump.split_once(&key).map_or("", |(_, item)| item);
        let item = item.split_once(" key (").map_or(item, |(item, _)| item);
        item.contains(&format!("inline extent data size {} ", self.inline_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{assert_checks_clean_whatever_it_holds, btrfs_check};
    use crate::{KernelMount, MkfsBtrfs, Oracle, oracle};

    /// As Linux leaves it: the transaction commits before the file's first block is written back.
    #[test]
    fn alarm_of_lowmem_mode_is_raised_by_a_short_file_made_longer_and_a_cut() {
        let judges = [Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs, Oracle::BtrfsProgs];
        if !oracle::require_all(&judges) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (image, copy) = (dir.path().join("image"), dir.path().join("copy"));
        MkfsBtrfs::new().options("-O ^no-holes").size_bytes(256 << 20).make(&image);
        let mount = KernelMount::read_write(&image, "");
        let (file, other) = (mount.path().join("file"), mount.path().join("other"));
        run("btrfs", ["subvolume".as_ref(), "create".as_ref(), other.as_os_str()]);
        std::fs::write(&file, [1; 1511]).unwrap();
        run("sync", ["-f".as_ref(), mount.path().as_os_str()]);
        std::fs::File::options().write(true).open(&file).unwrap().set_len(45_286).unwrap();
        // Commits, and writes files of that subvolume only.
        let snapshot = mount.path().join("snapshot");
        let words = ["subvolume", "snapshot"].map(AsRef::as_ref);
        run("btrfs", words.into_iter().chain([other.as_os_str(), snapshot.as_os_str()]));
        run("cp", ["--sparse=always".as_ref(), image.as_os_str(), copy.as_os_str()]);
        mount.unmount();
        let said = btrfs_check(&copy, CheckMode::Lowmem);
        assert!(!said.is_clean && is_alarm(&copy, CheckMode::Lowmem, &said), "{}", said.transcript);
        assert!(btrfs_check(&copy, CheckMode::Original).is_clean);
        assert_checks_clean_whatever_it_holds(std::slice::from_ref(&copy));
        // Of an image that has no such gap nobody may say so.
        assert!(!is_alarm(&image, CheckMode::Lowmem, &said));
    }

    #[test]
    fn other_gaps_are_told_apart() {
        let gap =
            "ERROR: root 327 EXTENT_DATA[259 4096] gap exists, expected: EXTENT_DATA[259 1511]";
        assert_eq!(Gap::parse(gap), Some(Gap { root: 327, inode: 259, inline_bytes: 1511 }));
        for other in [
            "ERROR: root 327 EXTENT_DATA[259 8192] gap exists, expected: EXTENT_DATA[259 1511]",
            "ERROR: root 327 EXTENT_DATA[259 4096] gap exists, expected: EXTENT_DATA[260 1511]",
            "ERROR: root 327 EXTENT_DATA[259 8192] gap exists, expected: EXTENT_DATA[259 4097]",
            "ERROR: root 327 EXTENT_DATA[259 8192] gap exists",
        ] {
            assert_eq!(Gap::parse(other), None, "{other}");
        }
    }
}
