//! Inodes, judged in pieces. A run is what was seen of one inode's items; two runs of neighbouring
//! leaves join into one. A summary is what was seen of a part of a tree: the runs at its two ends,
//! which may go on outside, and sums over the rest, which was judged.
//!
//! Joining is associative, so a node's summary is made of its children's, once for all trees that
//! share the node.

use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_ondisk::{InodeNo, LogicalAddr, RootId};

use crate::finding::Finding;
use crate::hash;

pub(crate) use words::SUMMARY_WORDS;

/// What is kept of an inode item.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inode {
    pub(crate) mode: u32,
    pub(crate) nlink: u32,
    pub(crate) size: u64,
    pub(crate) nbytes: u64,
    pub(crate) flags: u64,
}

/// A file extent in whose data something about checksums was noticed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CsumMark {
    pub(crate) block: LogicalAddr,
    pub(crate) offset: u64,
    pub(crate) at: LogicalAddr,
}

/// The file range that extents cover, holes between them included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// The leaf of the first one.
    pub(crate) block: LogicalAddr,
}

/// What was seen of one inode's items.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) number: InodeNo,
    /// The leaf of the inode item, or else of the first item seen.
    pub(crate) block: LogicalAddr,
    pub(crate) inode: Option<Inode>,
    /// Names, the root directory's own included.
    pub(crate) names: u64,
    /// Names that are entries of a directory.
    pub(crate) entries: u64,
    /// Lengths of the names in DIR_ITEMs.
    pub(crate) item_bytes: u64,
    /// Lengths of the names in DIR_INDEXes.
    pub(crate) index_bytes: u64,
    pub(crate) has_entries: bool,
    /// Bytes of extents, without holes.
    pub(crate) bytes: u64,
    pub(crate) span: Option<Span>,
    /// The first place between extents that none covers.
    pub(crate) gap: Option<u64>,
    /// Bytes of inline data, decompressed.
    pub(crate) inline_bytes: Option<u64>,
    pub(crate) csum_missing: Option<CsumMark>,
    pub(crate) csum_present: Option<CsumMark>,
    /// The first compressed extent, and how it is compressed.
    pub(crate) compressed: Option<(CsumMark, Compression)>,
    /// It adjoins what was lost, and may have gone on there: it is not judged.
    is_partial: bool,
}

impl Run {
    pub(crate) fn new(number: InodeNo, block: LogicalAddr) -> Self {
        Self {
            number,
            block,
            inode: None,
            names: 0,
            entries: 0,
            item_bytes: 0,
            index_bytes: 0,
            has_entries: false,
            bytes: 0,
            span: None,
            gap: None,
            inline_bytes: None,
            csum_missing: None,
            csum_present: None,
            compressed: None,
            is_partial: false,
        }
    }

    /// Joins what follows of the same inode.
    fn join(self, next: &Self, root: RootId, found: &mut Vec<Finding>) -> Self {
        let (inode, block) = match (self.inode, next.inode) {
            (None, Some(inode)) => (Some(inode), next.block),
            (inode, _) => (inode, self.block),
        };
        let mut gap = self.gap;
        let span = match (self.span, next.span) {
            (Some(before), Some(after)) => {
                if before.end > after.start {
                    found.push(Finding::FileExtentOverlap {
                        root,
                        block: after.block,
                        inode: self.number,
                        offset: after.start,
                        previous_end: before.end,
                    });
                } else if before.end < after.start {
                    gap = gap.or(Some(before.end));
                }
                Some(Span { end: after.end, ..before })
            }
            (before, after) => before.or(after),
        };
        Self {
            number: self.number,
            block,
            inode,
            names: self.names.saturating_add(next.names),
            entries: self.entries.saturating_add(next.entries),
            item_bytes: self.item_bytes.saturating_add(next.item_bytes),
            index_bytes: self.index_bytes.saturating_add(next.index_bytes),
            has_entries: self.has_entries || next.has_entries,
            bytes: self.bytes.saturating_add(next.bytes),
            span,
            gap: gap.or(next.gap),
            inline_bytes: self.inline_bytes.or(next.inline_bytes),
            csum_missing: self.csum_missing.or(next.csum_missing),
            csum_present: self.csum_present.or(next.csum_present),
            compressed: self.compressed.or(next.compressed),
            is_partial: self.is_partial || next.is_partial,
        }
    }
}

/// Differences that come to zero in a tree where all names agree and all inodes without one are
/// remembered.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub(crate) struct Sums {
    /// DIR_INDEXes less DIR_ITEMs.
    pub(crate) items: u64,
    /// DIR_INDEXes less names of inodes.
    pub(crate) refs: u64,
    /// File types by DIR_INDEX less those by the inodes' modes.
    pub(crate) types: u64,
    /// Inodes without a name less orphan items.
    pub(crate) orphans: u64,
}

impl Sums {
    pub(crate) fn add(&mut self, other: &Self) {
        self.items = self.items.wrapping_add(other.items);
        self.refs = self.refs.wrapping_add(other.refs);
        self.types = self.types.wrapping_add(other.types);
        self.orphans = self.orphans.wrapping_add(other.orphans);
    }

    /// Those about names; all zero where they agree.
    pub(crate) fn of_names(&self) -> [u64; 3] {
        [self.items, self.refs, self.types]
    }
}

/// What stands at the two ends of a part of a tree.
#[expect(clippy::large_enum_variant, reason = "nearly all of them are `Two`")]
#[derive(Clone, Copy, Debug, Default)]
enum Ends {
    /// No inode at all.
    #[default]
    Empty,
    /// One inode, which may have begun before and may go on behind.
    One(Run),
    /// Two: the first may have begun before, the last may go on behind, and what lies between was
    /// judged. `None` where that end was lost.
    Two(Option<Run>, Option<Run>),
}

/// What was seen of a part of a tree.
#[derive(Clone, Debug, Default)]
pub(crate) struct Summary {
    pub(crate) sums: Sums,
    ends: Ends,
    /// Something in it was lost.
    pub(crate) has_gap: bool,
}

/// How inodes are judged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) root: RootId,
    pub(crate) no_holes: bool,
}

impl Summary {
    /// Of a part that could not be read.
    pub(crate) fn lost() -> Self {
        Self { has_gap: true, ends: Ends::Two(None, None), ..Self::default() }
    }

    /// Adds the next inode of the same leaf.
    pub(crate) fn push(&mut self, run: Run, rules: &Rules, found: &mut Vec<Finding>) {
        self.ends = match self.ends {
            Ends::Empty => Ends::One(run),
            Ends::One(first) => Ends::Two(Some(first), Some(run)),
            Ends::Two(first, last) => {
                if let Some(last) = last {
                    self.close(&last, rules, found);
                }
                Ends::Two(first, Some(run))
            }
        };
    }

    /// Joins what lies to the right.
    pub(crate) fn join(&mut self, next: &Self, rules: &Rules, found: &mut Vec<Finding>) {
        self.sums.add(&next.sums);
        self.has_gap |= next.has_gap;
        self.ends = match (self.ends, next.ends) {
            (ends, Ends::Empty) | (Ends::Empty, ends) => ends,
            (Ends::One(before), Ends::One(after)) => {
                if before.number == after.number {
                    Ends::One(before.join(&after, rules.root, found))
                } else {
                    Ends::Two(Some(before), Some(after))
                }
            }
            (Ends::One(before), Ends::Two(after, last)) => {
                let (before, after) = border(Some(before), after, rules, found);
                self.close_all([after], rules, found);
                Ends::Two(before, last)
            }
            (Ends::Two(first, before), Ends::One(after)) => {
                // What is joined goes on behind.
                let (joined, after) = border(before, Some(after), rules, found);
                match after {
                    Some(after) => {
                        self.close_all([joined], rules, found);
                        Ends::Two(first, Some(after))
                    }
                    None => Ends::Two(first, joined),
                }
            }
            (Ends::Two(first, before), Ends::Two(after, last)) => {
                let (before, after) = border(before, after, rules, found);
                self.close_all([before, after], rules, found);
                Ends::Two(first, last)
            }
        };
    }

    /// The first inode of a whole tree.
    pub(crate) fn first(&self) -> Option<InodeNo> {
        match &self.ends {
            Ends::Empty | Ends::Two(None, _) => None,
            Ends::One(first) | Ends::Two(Some(first), _) => Some(first.number),
        }
    }

    /// Judges the inodes at the ends of a whole tree.
    pub(crate) fn finish(&mut self, rules: &Rules, found: &mut Vec<Finding>) {
        match std::mem::take(&mut self.ends) {
            Ends::Empty => {}
            Ends::One(run) => self.close(&run, rules, found),
            Ends::Two(first, last) => self.close_all([first, last], rules, found),
        }
    }

    fn close_all<const N: usize>(
        &mut self,
        runs: [Option<Run>; N],
        rules: &Rules,
        found: &mut Vec<Finding>,
    ) {
        for run in runs.into_iter().flatten() {
            self.close(&run, rules, found);
        }
    }

    /// Judges an inode of which all items were seen.
    fn close(&mut self, run: &Run, rules: &Rules, found: &mut Vec<Finding>) {
        if run.is_partial {
            return;
        }
        let (root, block, number) = (rules.root, run.block, run.number);
        let Some(inode) = run.inode else {
            found.push(Finding::InodeMissing { root, block, inode: number });
            return;
        };
        let file_type = FileType::from_mode(inode.mode);
        let typed = hash_of_type(number, file_type).wrapping_mul(run.entries);
        self.sums.types = self.sums.types.wrapping_sub(typed);
        let nlink = u64::from(inode.nlink);
        // Several links of a directory are the structural verifier's finding.
        if nlink != run.names && !(file_type == FileType::Directory && nlink > 1) {
            let (have, expect) = (nlink, run.names);
            found.push(Finding::InodeLinks { root, block, inode: number, have, expect });
        } else if nlink == 0 {
            // Its items are on their way out.
            self.sums.orphans = self.sums.orphans.wrapping_add(hash_of_orphan(number));
            return;
        }
        match file_type {
            FileType::Directory => directory(run, &inode, rules, found),
            FileType::Regular | FileType::Symlink => file(run, &inode, rules, found),
            _ => {}
        }
        let is_file = matches!(file_type, FileType::Regular | FileType::Symlink);
        let what = match (run.has_entries, run.span.is_some()) {
            (true, _) if file_type != FileType::Directory => "directory entries",
            (_, true) if !is_file => "file extents",
            _ => return,
        };
        let mode = u64::from(inode.mode);
        found.push(Finding::InodeItems { root, block, inode: number, mode, what });
    }
}

/// What stands on both sides of a border: one inode, joined, as the first; or two, each of which
/// ends there. Beside what was lost, it is not known where an inode ends.
fn border(
    before: Option<Run>,
    after: Option<Run>,
    rules: &Rules,
    found: &mut Vec<Finding>,
) -> (Option<Run>, Option<Run>) {
    match (before, after) {
        (Some(before), Some(after)) if before.number == after.number => {
            (Some(before.join(&after, rules.root, found)), None)
        }
        (Some(before), Some(after)) => (Some(before), Some(after)),
        (before, after) => {
            let partial = |run: Run| Run { is_partial: true, ..run };
            (before.map(partial), after.map(partial))
        }
    }
}

/// The hash of an entry's type.
pub(crate) fn hash_of_type(inode: InodeNo, file_type: FileType) -> u64 {
    hash::of_numbers([3, inode.0, u64::from(file_type.to_disk())])
}

/// The hash of an inode without a name, or of the item that remembers it.
pub(crate) fn hash_of_orphan(inode: InodeNo) -> u64 {
    hash::of_numbers([7, inode.0])
}

fn directory(run: &Run, inode: &Inode, rules: &Rules, found: &mut Vec<Finding>) {
    // Where the two kinds of items disagree, that is a finding of its own.
    let sizes = [
        run.index_bytes.saturating_mul(2),
        run.item_bytes.saturating_mul(2),
        run.index_bytes.saturating_add(run.item_bytes),
    ];
    if !sizes.contains(&inode.size) {
        found.push(Finding::DirectorySize {
            root: rules.root,
            block: run.block,
            inode: run.number,
            have: inode.size,
            expect: sizes[0],
        });
    }
}

fn file(run: &Run, inode: &Inode, rules: &Rules, found: &mut Vec<Finding>) {
    let (root, block, number) = (rules.root, run.block, run.number);
    if inode.nbytes != run.bytes {
        let (have, expect) = (inode.nbytes, run.bytes);
        found.push(Finding::InodeBytes { root, block, inode: number, have, expect });
    }
    if FileType::from_mode(inode.mode) == FileType::Symlink {
        let expect = run.inline_bytes.unwrap_or(0);
        if inode.size != expect {
            let have = inode.size;
            found.push(Finding::SymlinkSize { root, block, inode: number, have, expect });
        }
        let have = inode.flags & (flags::IMMUTABLE | flags::APPEND);
        if have != 0 {
            found.push(Finding::InodeFlags { root, block, inode: number, have });
        }
        return;
    }
    if !rules.no_holes {
        let start = run.span.map_or(0, |span| span.start);
        let end = run.span.map_or(0, |span| span.end);
        let hole = if start > 0 { Some(0) } else { run.gap.or(Some(end)) };
        if let Some(offset) = hole.filter(|offset| *offset < inode.size) {
            found.push(Finding::FileHole { root, block, inode: number, offset });
        }
    }
    let has_no_csums = inode.flags & flags::NODATASUM != 0;
    if let Some(mark) = run.csum_missing.filter(|_| !has_no_csums) {
        found.push(Finding::CsumMissing {
            root,
            block: mark.block,
            inode: number,
            offset: mark.offset,
            at: mark.at,
        });
    }
    if let Some((mark, compression)) = run.compressed.filter(|_| has_no_csums) {
        found.push(Finding::FileExtentField {
            root,
            block: mark.block,
            inode: number,
            offset: mark.offset,
            what: "the compression in a file without checksums",
            have: u64::from(compression.to_disk()),
            expect: "0".to_owned(),
        });
    }
    if let Some(mark) = run.csum_present.filter(|_| has_no_csums) {
        found.push(Finding::CsumUnwanted {
            root,
            block: mark.block,
            inode: number,
            offset: mark.offset,
            what: "a file without checksums",
            at: mark.at,
        });
    }
}

mod words;

#[cfg(test)]
mod tests;
