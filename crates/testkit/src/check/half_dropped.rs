//! What the lowmem mode of `btrfs check` says of a deleted subvolume that is half dropped.
//!
//! How far the drop came is in its root item (`drop_progress`), and the blocks before are free. The
//! mode (seen in 6.2, 6.14 and 7.3) starts behind them, and yet looks names and inodes up through
//! the root, in blocks that were given back: as long as nobody has overwritten these, they are
//! there. An image of the kernel's, unmounted during the drop, is clean; with its free blocks
//! wiped, which is their good right, the mode reports names and inodes that it no longer finds.
//! The first mode does not.

use std::collections::BTreeSet;
use std::path::Path;

use super::{CheckMode, btrfs_checks};
use crate::run::run;

/// As [`super::assert_checks_clean`], for an image that holds half dropped subvolumes: the lowmem
/// mode is not asked, the others are.
///
/// # Panics
/// With what was said, if anything is found; if there is no half dropped subvolume.
pub fn assert_checks_clean_but_for_half_dropped(image: &Path) {
    let roots = half_dropped_roots(image);
    assert!(!roots.is_empty(), "{} has none half dropped: judge it strictly", image.display());
    for (mode, outcome) in btrfs_checks(image, &[CheckMode::Original, CheckMode::DataCsum]) {
        assert!(outcome.is_clean, "btrfs check {mode:?}: {}", outcome.transcript);
    }
}

/// The deleted subvolumes of which a part is dropped, and a part still there.
///
/// # Panics
/// If the image's root tree cannot be read.
pub fn half_dropped_roots(image: &Path) -> BTreeSet<u64> {
    let words = ["inspect-internal", "dump-tree", "-t", "root"].map(AsRef::as_ref);
    let dump = run("btrfs", words.into_iter().chain([image.as_os_str()]));
    let (mut roots, mut root) = (BTreeSet::new(), None::<u64>);
    for line in dump.lines().map(str::trim_start) {
        if let Some((_, key)) = line.split_once(" key (").filter(|_| line.starts_with("item ")) {
            let mut parts = key.split(' ');
            let number: Option<u64> = parts.next().and_then(|number| number.parse().ok());
            root = number.filter(|_| parts.next() == Some("ROOT_ITEM"));
        }
        let Some(progress) = line.strip_prefix("drop_progress key (") else { continue };
        if !progress.starts_with("0 UNKNOWN.0 0)") {
            roots.extend(root);
        }
    }
    roots
}
