//! The one false alarm of `btrfs check` that tests of ours meet, and how to look behind it.
//!
//! An inode has an INODE_EXTREF item for each name that its INODE_REF item of that directory has
//! no room for. For such an item, the lowmem mode (seen in 6.2, 6.14 and 7.3) compares the type in
//! the directory's entry with the low eight bits of the inode's mode, which are permissions. They
//! differ in all but a few modes; it counts the entry as wrong without a line about it, and ends
//! with the bare summary. One such item is enough, in images of the kernel's as in ours; where the
//! inode's item is the last of its leaf, the mode passes the inode over and stays silent.
//!
//! So the alarm is not excused, it is taken away: in a copy of the image, the inodes that have such
//! items get permissions whose low bits are the type. That copy must be clean without exception.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ubtrfs_ondisk::block::{Block, Header, Leaf, zeroed_block};
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::inode::InodeItem;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::verify::{self, Expect, Geometry};
use ubtrfs_ondisk::{KeyType, LogicalAddr, RootId};

use super::{CheckMode, CheckOutcome, btrfs_checks, complaints, inline_gaps};
use crate::run::run;

/// What either mode says at its end when it found something in trees of files.
pub(super) const LOWMEM_SUMMARY: &str = "ERROR: errors found in fs roots";

/// As [`super::assert_checks_clean`], for an image that holds an inode with an extended reference
/// (more names in one directory than fit one item): the lowmem mode may end with its bare summary,
/// and is then asked again of a copy whose inodes have modes that it compares rightly.
///
/// # Panics
/// With what was said, if anything is found; if there is no extended reference in the image, which
/// then is for the strict call.
pub fn assert_checks_clean_but_for_extended_refs(image: &Path) {
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let copy = scratch.path().join("copy");
    run("cp", ["--sparse=always".as_ref(), image.as_os_str(), copy.as_os_str()]);
    let inode_count = make_modes_comparable(&copy);
    assert!(inode_count > 0, "{} has no extended reference: judge it strictly", image.display());
    for (mode, outcome) in btrfs_checks(image, &CheckMode::ALL) {
        let is_alarm = mode == CheckMode::Lowmem && is_bare_summary(&outcome)
            || inline_gaps::is_alarm(image, mode, &outcome);
        assert!(outcome.is_clean || is_alarm, "btrfs check {mode:?}: {}", outcome.transcript);
    }
    for (mode, outcome) in btrfs_checks(&copy, &CheckMode::ALL) {
        let is_alarm = inline_gaps::is_alarm(&copy, mode, &outcome);
        let is_clean = outcome.is_clean || is_alarm;
        assert!(is_clean, "btrfs check {mode:?}, with other modes: {}", outcome.transcript);
    }
}

/// Whether all it says is that it found something.
pub(super) fn is_bare_summary(outcome: &CheckOutcome) -> bool {
    complaints(&outcome.transcript) == [LOWMEM_SUMMARY]
}

/// Whether an inode of the image has an extended reference.
///
/// # Panics
/// If the image cannot be read.
pub fn has_extended_refs(image: &Path) -> bool {
    !Leaves::of(image, Access::Read).inodes_with_extended_refs().is_empty()
}

/// Gives each inode that has an extended reference permissions whose low bits are its type; returns
/// how many inodes those are.
pub(super) fn make_modes_comparable(image: &Path) -> usize {
    let mut leaves = Leaves::of(image, Access::Write);
    let inodes = leaves.inodes_with_extended_refs();
    leaves.for_each(|leaf| {
        let mut changed = false;
        for slot in 0..leaf.len() {
            let key = leaf.key(slot);
            if key.ty == KeyType::INODE_ITEM && inodes.contains(&key.objectid.0) {
                let item = InodeItem::peek_mut(leaf.data_mut(slot)).expect("it was checked");
                let mode = item.mode.get();
                let ty = u32::from(FileType::from_mode(mode).to_disk());
                item.mode = (mode & !0xff | ty).into();
                changed = true;
            }
        }
        changed
    });
    inodes.len()
}

/// What is done to an image.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// The leaves of file trees on a device, wherever they lie: every copy, stale ones too.
pub(super) struct Leaves {
    file: File,
    geometry: Geometry,
}

impl Leaves {
    pub(super) fn of(image: &Path, access: Access) -> Self {
        let writes = access == Access::Write;
        let file = File::options().read(true).write(writes).open(image).expect("an image");
        let at = SUPERBLOCK_OFFSETS[0];
        let mut bytes = [0; SUPERBLOCK_BYTES];
        file.read_exact_at(&mut bytes, at.0).expect("an image is longer");
        let superblock = Superblock::parse(&bytes, at).expect("a superblock");
        let geometry = Geometry {
            nodesize_bytes: usize::try_from(superblock.nodesize.get()).expect("a size fits"),
            sectorsize_bytes: usize::try_from(superblock.sectorsize.get()).expect("a size fits"),
            csum: superblock.csum_type().expect("a checked superblock"),
            fsid: superblock.header_fsid(),
        };
        Self { file, geometry }
    }

    fn inodes_with_extended_refs(&mut self) -> BTreeSet<u64> {
        let mut inodes = BTreeSet::new();
        self.for_each(|leaf| {
            let keys = leaf.items().iter().map(|item| item.key.key());
            let extended = keys.filter(|key| key.ty == KeyType::INODE_EXTREF);
            inodes.extend(extended.map(|key| key.objectid.0));
            false
        });
        inodes
    }

    /// Calls with each leaf, and writes those back of which the call says that it changed them.
    pub(super) fn for_each(&mut self, mut body: impl FnMut(&mut Leaf) -> bool) {
        let len = self.file.metadata().expect("an open file").len();
        let step = u64::try_from(self.geometry.sectorsize_bytes).expect("a size fits");
        let mut at = 0;
        while at < len {
            let Some(data) = self.next_data(at) else { break };
            at = data.next_multiple_of(step).max(at);
            let Some(mut leaf) = self.leaf_at(at) else {
                at += step;
                continue;
            };
            if body(&mut leaf) {
                let mut block = Block::Leaf(leaf);
                block.seal(self.geometry.csum);
                self.file.write_all_at(block.as_bytes(), at).expect("the image can be written");
            }
            at += u64::try_from(self.geometry.nodesize_bytes).expect("a size fits");
        }
    }

    /// Where the next bytes are that are no hole.
    fn next_data(&self, at: u64) -> Option<u64> {
        let page = at / PAGE_BYTES * PAGE_BYTES;
        rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(page)).ok().map(|data| data.max(at))
    }

    fn leaf_at(&self, at: u64) -> Option<Leaf> {
        let mut bytes = zeroed_block(self.geometry.nodesize_bytes);
        let header_bytes = size_of::<Header>();
        self.read(&mut bytes[..header_bytes], at).ok()?;
        let header = Header::peek(&bytes).ok()?;
        if header.fsid != self.geometry.fsid.0
            || header.level != 0
            || !RootId(header.owner.get()).is_subvolume()
        {
            return None;
        }
        let expect = Expect {
            bytenr: LogicalAddr(header.bytenr.get()),
            generation: None,
            level: Some(0),
            first_key: None,
            owner: None,
        };
        self.read(&mut bytes, at).ok()?;
        match verify::block(bytes, &self.geometry, &expect) {
            Ok(Block::Leaf(leaf)) => Some(leaf),
            _ => None,
        }
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, at)
    }
}

/// Holes in files begin and end with pages.
const PAGE_BYTES: u64 = 4096;
