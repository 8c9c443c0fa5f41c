//! Trees that hold files: every item of every leaf, once.

use std::collections::BTreeSet;
use std::ops::Range;

use ubtrfs_ondisk::block::LEVEL_COUNT_MAX;
use ubtrfs_ondisk::dir::DirEntries;
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::file_extent::{Compression, FileExtent, FileExtentHeader, RegularExtent};
use ubtrfs_ondisk::hash::extref_hash;
use ubtrfs_ondisk::inode::{InodeExtrefs, InodeItem, InodeRefs, flags};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Generation, InodeNo, Key, KeyType, LogicalAddr, ObjectId, RootId};

use crate::blocks::Facts;
use crate::context::Context;
use crate::csums::Csums;
use crate::extents::Extents;
use crate::finding::{Finding, Name};
use crate::hash;
use crate::names;
use crate::read::Pointer;
use crate::reread::LeavesRead;
use crate::roots::{DataUse, Root, Roots};
use crate::run::{CsumMark, Inode, Rules, Run, Span, Summary, hash_of_orphan, hash_of_type};
use crate::summaries::Summaries;
use crate::table::Table;
use crate::view::{View, number};
use crate::walk::{BATCH_BLOCKS, Kind, Visit};

/// Features that items make use of, with the first use.
#[derive(Clone, Copy, Default)]
struct Used([Option<(RootId, InodeNo)>; 3]);

const FEATURES: [(Incompat, &str); 3] = [
    (Incompat::COMPRESS_LZO, "COMPRESS_LZO"),
    (Incompat::COMPRESS_ZSTD, "COMPRESS_ZSTD"),
    (Incompat::EXTENDED_IREF, "EXTENDED_IREF"),
];
const LZO: usize = 0;
const ZSTD: usize = 1;
const EXTREF: usize = 2;

struct FileLeaf {
    /// Boxed, as it is large and goes from hand to hand.
    summary: Box<Summary>,
    used: Used,
    inode_count: u64,
    entry_count: u64,
    extent_count: u64,
    written: Vec<Written>,
    /// Something that refers to data could not be read.
    is_incomplete: bool,
}

/// A preallocated file extent with checksums. Another file, which shares the space, may have
/// written it.
struct Written {
    root: RootId,
    inode: InodeNo,
    mark: CsumMark,
    extent: LogicalAddr,
    range: Range<u64>,
}

const WRITTEN_WORDS: usize = 8;

impl Written {
    /// The extent first.
    fn to_words(&self) -> [u64; WRITTEN_WORDS] {
        let Self { root, inode, mark, extent, range } = self;
        let CsumMark { block, offset, at } = mark;
        [extent.0, root.0, inode.0, block.0, *offset, at.0, range.start, range.end]
    }

    fn of_words(words: &[u64; WRITTEN_WORDS]) -> Self {
        let [extent, root, inode, block, offset, at, start, end] = *words;
        Self {
            root: RootId(root),
            inode: InodeNo(inode),
            mark: CsumMark { block: LogicalAddr(block), offset, at: LogicalAddr(at) },
            extent: LogicalAddr(extent),
            range: start..end,
        }
    }
}

/// In the place of a block's summary: it is being made, or cannot be.
const BEGUN: u64 = 1;

struct FileVisitor<'a> {
    extents: &'a Extents,
    /// `None` where they cannot be judged.
    csums: Option<&'a Csums>,
    judges_extents: bool,
    no_holes: bool,
    sector: u64,
    generation: u64,
}

/// A leaf that is being looked at.
struct Leaf<'a> {
    visitor: &'a FileVisitor<'a>,
    view: &'a View,
    root: RootId,
    is_full_backref: bool,
    out: FileLeaf,
    found: &'a mut Vec<Finding>,
}

impl Visit for FileVisitor<'_> {
    type Out = FileLeaf;

    fn leaf(&self, view: &View, pointer: &Pointer, found: &mut Vec<Finding>) -> FileLeaf {
        let mut leaf = Leaf {
            visitor: self,
            view,
            root: pointer.root,
            is_full_backref: self.extents.is_full_backref(pointer.at),
            out: FileLeaf {
                summary: Box::default(),
                used: Used::default(),
                inode_count: 0,
                entry_count: 0,
                extent_count: 0,
                written: Vec::new(),
                is_incomplete: false,
            },
            found,
        };
        leaf.look();
        leaf.out
    }
}

/// Whether items of that number belong to a file of a user.
pub(crate) fn is_inode(id: ObjectId) -> bool {
    (ObjectId::FIRST_FREE..=ObjectId::LAST_FREE).contains(&id)
}

/// Where an inode item is.
#[derive(Clone, Copy)]
pub(crate) struct InodeAt {
    pub(crate) root: RootId,
    pub(crate) block: LogicalAddr,
    pub(crate) inode: InodeNo,
}

impl InodeAt {
    /// Judges what Linux refuses the leaf for; and a file is of some generation.
    pub(crate) fn check(self, data: &[u8], super_generation: u64, found: &mut Vec<Finding>) {
        let Ok(item) = InodeItem::peek(data) else { return };
        let Self { root, block, inode } = self;
        let limit = super_generation.saturating_add(1);
        let (generation, transid) = (item.generation.get(), item.transid.get());
        let is_file = is_inode(ObjectId(inode.0)) && root != RootId::ROOT_TREE;
        let fields = [
            ("generation", generation, (generation == 0 && is_file) || generation > limit),
            ("transid", transid, transid > limit),
        ];
        for (field, have, _) in fields.into_iter().filter(|(.., is_wrong)| *is_wrong) {
            let (have, limit) = (Generation(have), Generation(limit));
            found.push(Finding::InodeGeneration { root, block, inode, field, have, limit });
        }
        let have = item.flags.get() & !u64::from(u32::MAX) & !flags::KNOWN_RO;
        if have != 0 {
            found.push(Finding::InodeFlagsUnknown { root, block, inode, have });
        }
    }
}

impl Leaf<'_> {
    fn look(&mut self) {
        let rules = Rules { root: self.root, no_holes: self.visitor.no_holes };
        let view = self.view;
        let mut run: Option<Run> = None;
        for (slot, key, data) in view.items() {
            if !is_inode(key.objectid) {
                match key.ty {
                    KeyType::INODE_ITEM => {
                        let at = self.inode_at(InodeNo(key.objectid.0));
                        at.check(data, self.visitor.generation, self.found);
                    }
                    KeyType::EXTENT_DATA => self.cache_extent(key, data),
                    KeyType::ORPHAN_ITEM if key.objectid == ObjectId::ORPHAN => {
                        self.orphan(InodeNo(key.offset));
                    }
                    _ => {}
                }
                continue;
            }
            let inode = InodeNo(key.objectid.0);
            if run.as_ref().is_none_or(|run| run.number != inode)
                && let Some(before) = run.replace(Run::new(inode, view.at()))
            {
                self.out.summary.push(before, &rules, self.found);
            }
            if let Some(run) = &mut run {
                self.item(run, slot, key, data);
            }
        }
        if let Some(run) = run {
            self.out.summary.push(run, &rules, self.found);
        }
    }

    fn item(&mut self, run: &mut Run, slot: usize, key: Key, data: &[u8]) {
        match key.ty {
            KeyType::INODE_ITEM => self.inode(run, data),
            KeyType::INODE_REF => {
                let directory = InodeNo(key.offset);
                for name in InodeRefs::new(data).filter_map(Result::ok) {
                    self.name(run, directory, name.index, name.name);
                }
            }
            KeyType::INODE_EXTREF => self.extref(run, slot, key, data),
            KeyType::DIR_ITEM => self.dir_item(run, data),
            KeyType::DIR_INDEX => self.dir_index(run, key, data),
            KeyType::XATTR_ITEM => self.duplicates(run.number, data),
            KeyType::EXTENT_DATA => self.file_extent(run, key, data),
            _ => {}
        }
    }

    fn inode(&mut self, run: &mut Run, data: &[u8]) {
        let Ok(item) = InodeItem::peek(data) else { return };
        self.out.inode_count += 1;
        run.block = self.view.at();
        run.inode = Some(Inode {
            mode: item.mode.get(),
            nlink: item.nlink.get(),
            size: item.size.get(),
            nbytes: item.nbytes.get(),
            flags: item.flags.get(),
        });
        self.inode_at(run.number).check(data, self.visitor.generation, self.found);
    }

    fn inode_at(&self, inode: InodeNo) -> InodeAt {
        InodeAt { root: self.root, block: self.view.at(), inode }
    }

    /// A name of the inode.
    fn name(&mut self, run: &mut Run, directory: InodeNo, index: u64, name: &[u8]) {
        run.names += 1;
        if names::is_own_name(directory, run.number) {
            return;
        }
        run.entries += 1;
        let sum = hash_of_entry(directory, index, hash::of_bytes(name), run.number);
        let sums = &mut self.out.summary.sums;
        sums.refs = sums.refs.wrapping_sub(sum);
    }

    fn extref(&mut self, run: &mut Run, slot: usize, key: Key, data: &[u8]) {
        self.out.used.0[EXTREF].get_or_insert((self.root, run.number));
        for name in InodeExtrefs::new(data).filter_map(Result::ok) {
            self.name(run, name.parent, name.index, name.name);
            let expect = extref_hash(name.parent, name.name);
            if key.offset != expect {
                self.found.push(Finding::ExtrefHash {
                    root: self.root,
                    block: self.view.at(),
                    slot: number(slot),
                    key,
                    name: Name(name.name.to_vec()),
                    expect,
                });
            }
        }
    }

    fn dir_item(&mut self, run: &mut Run, data: &[u8]) {
        run.has_entries = true;
        for entry in DirEntries::new(data).filter_map(Result::ok) {
            self.out.entry_count += 1;
            run.item_bytes += number(entry.name.len());
            let location = entry.item.location.key();
            let sum = hash_of_target(run.number, entry.name, location, entry.item.ty);
            let sums = &mut self.out.summary.sums;
            sums.items = sums.items.wrapping_sub(sum);
        }
        self.duplicates(run.number, data);
    }

    fn dir_index(&mut self, run: &mut Run, key: Key, data: &[u8]) {
        run.has_entries = true;
        for entry in DirEntries::new(data).filter_map(Result::ok) {
            run.index_bytes += number(entry.name.len());
            let location = entry.item.location.key();
            let sums = &mut self.out.summary.sums;
            let sum = hash_of_target(run.number, entry.name, location, entry.item.ty);
            sums.items = sums.items.wrapping_add(sum);
            // Of a subvolume the root tree keeps the name.
            if location.ty == KeyType::INODE_ITEM {
                let inode = InodeNo(location.objectid.0);
                let name = hash::of_bytes(entry.name);
                let sum = hash_of_entry(run.number, key.offset, name, inode);
                sums.refs = sums.refs.wrapping_add(sum);
                let typed = hash_of_type(inode, entry.file_type());
                sums.types = sums.types.wrapping_add(typed);
            }
        }
    }

    /// Names that stand twice in one item. Twice in several shows in the sums.
    fn duplicates(&mut self, inode: InodeNo, data: &[u8]) {
        let mut entries = DirEntries::new(data).filter_map(Result::ok);
        let Some(first) = entries.next() else { return };
        let mut names = vec![first.name];
        for entry in entries {
            if names.contains(&entry.name) {
                let name = Name(entry.name.to_vec());
                self.found.push(Finding::DuplicateName { root: self.root, inode, name });
            }
            names.push(entry.name);
        }
    }

    fn file_extent(&mut self, run: &mut Run, key: Key, data: &[u8]) {
        let Ok(extent) = FileExtent::parse(data) else {
            self.out.is_incomplete = true;
            return;
        };
        self.out.extent_count += 1;
        let other = FileExtentHeader::peek(data).map_or(0, |header| header.other_encoding.get());
        if other != 0 {
            self.wrong_field(run.number, key, "other_encoding", other.into(), "0".to_owned());
        }
        let (compression, end) = match &extent {
            FileExtent::Inline { ram_bytes, compression, .. } => {
                self.inline_bytes(run.number, key, *ram_bytes, *compression);
                run.bytes = run.bytes.saturating_add(*ram_bytes);
                run.inline_bytes = run.inline_bytes.or(Some(*ram_bytes));
                let len = ram_bytes.checked_next_multiple_of(self.visitor.sector);
                (*compression, key.offset.saturating_add(len.unwrap_or(u64::MAX)))
            }
            FileExtent::Regular(regular) | FileExtent::Prealloc(regular) => {
                if !regular.is_hole() {
                    run.bytes = run.bytes.saturating_add(regular.num_bytes);
                    self.fields(run.number, key, regular);
                }
                if regular.num_bytes == 0 {
                    let expect = "more than 0".to_owned();
                    self.wrong_field(run.number, key, "num_bytes", 0, expect);
                }
                let is_prealloc = matches!(extent, FileExtent::Prealloc(_));
                if is_prealloc && regular.compression != Compression::None {
                    let have = u64::from(regular.compression.to_disk());
                    let what = "the compression of preallocated space";
                    self.wrong_field(run.number, key, what, have, "0".to_owned());
                }
                self.csums(run, key, regular, is_prealloc);
                (regular.compression, key.offset.saturating_add(regular.num_bytes))
            }
        };
        match compression {
            Compression::Lzo => _ = self.out.used.0[LZO].get_or_insert((self.root, run.number)),
            Compression::Zstd => _ = self.out.used.0[ZSTD].get_or_insert((self.root, run.number)),
            Compression::None | Compression::Zlib => {}
        }
        if let Some(span) = &mut run.span {
            if key.offset > span.end {
                run.gap = run.gap.or(Some(span.end));
            }
            span.end = end;
        } else {
            run.span = Some(Span { start: key.offset, end, block: self.view.at() });
        }
        self.data_use(key, &extent);
    }

    /// An inode that is remembered, to be removed.
    fn orphan(&mut self, inode: InodeNo) {
        let sums = &mut self.out.summary.sums;
        sums.orphans = sums.orphans.wrapping_sub(hash_of_orphan(inode));
    }

    /// An extent of what is no file of a user: caches that old versions of Linux kept.
    fn cache_extent(&mut self, key: Key, data: &[u8]) {
        if let Ok(extent) = FileExtent::parse(data) {
            self.data_use(key, &extent);
        }
    }

    fn data_use(&mut self, key: Key, extent: &FileExtent<'_>) {
        let Some(used) = DataUse::of_item(self.view, key, extent) else { return };
        let visitor = self.visitor;
        let is_judged = visitor.judges_extents;
        use_data(visitor.extents, &used, self.root, self.is_full_backref, is_judged, self.found);
    }

    fn fields(&mut self, inode: InodeNo, key: Key, extent: &RegularExtent) {
        let end = extent.offset.saturating_add(extent.num_bytes);
        let limits = [
            ("the end in the extent", end, extent.ram_bytes, true),
            (
                "the end in the extent",
                end,
                extent.disk_num_bytes,
                extent.compression == Compression::None,
            ),
        ];
        for (what, have, limit, applies) in limits {
            if applies && have > limit {
                self.wrong_field(inode, key, what, have, format!("at most {limit}"));
                break;
            }
        }
    }

    /// Inline data is shorter than a sector; compressed, it stands for a sector at most.
    fn inline_bytes(&mut self, inode: InodeNo, key: Key, have: u64, compression: Compression) {
        let sector = self.visitor.sector;
        let max = if compression == Compression::None { sector - 1 } else { sector };
        if !(1..=max).contains(&have) {
            self.wrong_field(inode, key, "the inline bytes", have, format!("1 to {max}"));
        }
    }

    fn wrong_field(
        &mut self,
        inode: InodeNo,
        key: Key,
        what: &'static str,
        have: u64,
        expect: String,
    ) {
        let (root, block, offset) = (self.root, self.view.at(), key.offset);
        let finding = Finding::FileExtentField { root, block, inode, offset, what, have, expect };
        self.found.push(finding);
    }

    /// Whether the data of an extent have checksums.
    fn csums(&mut self, run: &mut Run, key: Key, extent: &RegularExtent, is_prealloc: bool) {
        let Some(csums) = self.visitor.csums else { return };
        if extent.is_hole() || self.root == RootId::DATA_RELOC_TREE {
            return;
        }
        let start = extent.disk_bytenr.0;
        let range = if extent.compression == Compression::None {
            let start = start.saturating_add(extent.offset);
            start..start.saturating_add(extent.num_bytes)
        } else {
            start..start.saturating_add(extent.disk_num_bytes)
        };
        let mark = |at| CsumMark { block: self.view.at(), offset: key.offset, at: LogicalAddr(at) };
        let present = csums.first_present(range.clone()).map(mark);
        if !is_prealloc {
            run.csum_missing = run.csum_missing.or(csums.first_missing(range).map(mark));
            run.csum_present = run.csum_present.or(present);
            if extent.compression != Compression::None {
                run.compressed = run.compressed.or(Some((mark(start), extent.compression)));
            }
        } else if let Some(mark) = present {
            let (root, inode) = (self.root, run.number);
            let extent = extent.disk_bytenr;
            self.out.written.push(Written { root, inode, mark, extent, range });
        }
    }
}

/// An entry of a directory and where it leads.
pub(crate) fn hash_of_target(directory: InodeNo, name: &[u8], location: Key, ty: u8) -> u64 {
    let kinds = u64::from(location.ty.0) << 8 | u64::from(ty);
    hash::of_numbers([1, directory.0, hash::of_bytes(name), location.objectid.0, kinds])
}

/// An entry of a directory and the inode that knows it.
pub(crate) fn hash_of_entry(directory: InodeNo, index: u64, name: u64, inode: InodeNo) -> u64 {
    hash::of_numbers([2, directory.0, index, name, inode.0])
}

/// Notes a reference to data, and judges the extent that it goes to.
fn use_data(
    extents: &Extents,
    used: &DataUse,
    root: RootId,
    is_full_backref: bool,
    is_judged: bool,
    found: &mut Vec<Finding>,
) {
    let Some(index) = extents.find(used.bytenr) else {
        if is_judged {
            found.push(Finding::ExtentMissing {
                root,
                block: used.block,
                inode: used.inode,
                offset: used.file_offset,
                bytenr: used.bytenr,
            });
        }
        return;
    };
    extents.expect(index, hash::of_reference(&used.reference(is_full_backref)));
    let extent = extents.get(index);
    if !extent.is_data() {
        found.push(Finding::ExtentDisagrees {
            bytenr: used.bytenr,
            what: "kind",
            have: "a tree block".to_owned(),
            expect: "file data".to_owned(),
        });
    } else if extent.len_bytes(extents.sector) != used.disk_num_bytes {
        found.push(Finding::ExtentDisagrees {
            bytenr: used.bytenr,
            what: "length",
            have: extent.len_bytes(extents.sector).to_string(),
            expect: used.disk_num_bytes.to_string(),
        });
    }
}

/// The parts of some extents that regular file extents of a leaf say were written.
fn written_ranges(view: &View, written: &Table<WRITTEN_WORDS>) -> Vec<[u64; 3]> {
    let items = view.items().filter(|(_, key, _)| key.ty == KeyType::EXTENT_DATA);
    items
        .filter_map(|(_, _, data)| match FileExtent::parse(data).ok()? {
            FileExtent::Regular(extent) if written.find(extent.disk_bytenr.0).is_some() => {
                let start = extent.disk_bytenr.0.saturating_add(extent.offset);
                Some([extent.disk_bytenr.0, start, start.saturating_add(extent.num_bytes)])
            }
            _ => None,
        })
        .collect()
}

impl Context<'_> {
    /// Walks the trees that hold files; returns the summaries of their leaves.
    pub(crate) fn load_files(
        &mut self,
        roots: &Roots,
        extents: &Extents,
        csums: &Csums,
    ) -> Summaries {
        let judges_extents = self.is_complete(RootId::EXTENT_TREE);
        let mut found = Vec::new();
        for used in &roots.data {
            let root = RootId::ROOT_TREE;
            let is_full_backref = extents.is_full_backref(used.block);
            use_data(extents, used, root, is_full_backref, judges_extents, &mut found);
        }
        self.findings.extend(found);
        let visitor = FileVisitor {
            extents,
            csums: self.is_complete(RootId::CSUM_TREE).then_some(csums),
            judges_extents,
            no_holes: self.incompat.contains(Incompat::NO_HOLES),
            sector: self.sector(),
            generation: self.generation,
        };
        let pointers = roots.of_files().map(Root::pointer).collect();
        let mut summaries = Summaries::new(&self.store);
        let mut used = Used::default();
        let mut written = Table::new(&self.store);
        self.walk(pointers, Kind::Files, &visitor, |check, pointer, leaf| {
            check.statistics.inode_count += leaf.inode_count;
            check.statistics.entry_count += leaf.entry_count;
            check.statistics.file_extent_count += leaf.extent_count;
            for (all, one) in used.0.iter_mut().zip(leaf.used.0) {
                *all = all.or(one);
            }
            check.lost(pointer.root, leaf.is_incomplete);
            leaf.written.iter().for_each(|it| written.push(it.to_words()));
            let number = summaries.push(&leaf.summary) + BEGUN;
            check.blocks.set_summary(pointer.at, number);
        });
        for ((bit, feature), first) in FEATURES.into_iter().zip(used.0) {
            if let Some((root, inode)) = first.filter(|_| !self.incompat.contains(bit)) {
                let used_by = format!("inode {inode} of root {root}");
                // Linux sets a compression's bit when it compresses. What comes compressed, as from
                // a stream, it writes without.
                self.findings.push(if bit == Incompat::EXTENDED_IREF {
                    Finding::FeatureMissing { feature, used_by }
                } else {
                    Finding::FeatureUnset { feature, used_by }
                });
            }
        }
        if !written.is_empty() {
            self.check_written(written, csums);
        }
        summaries
    }

    /// Preallocated space has checksums only where another file extent says that it was written.
    fn check_written(&mut self, mut written: Table<WRITTEN_WORDS>, csums: &Csums) {
        written.sort_by(|[extent, ..]| *extent);
        let mut by_others = Table::<3>::new(&self.store);
        let read = LeavesRead {
            batch: BATCH_BLOCKS,
            is_wanted: |facts: &Facts| facts.kind == Kind::Files,
            work: |view: &View| written_ranges(view, &written),
        };
        self.read_leaves(&read, |ranges| ranges.into_iter().for_each(|it| by_others.push(it)));
        by_others.sort_by(|[extent, start, _]| (*extent, *start));
        let by_others = self.joined(&by_others);
        for words in written.iter() {
            let Written { root, inode, mark, extent, range } = Written::of_words(&words);
            let others = by_others.iter_from(by_others.count_below(extent.0));
            let mut others = others.take_while(|other| other[0] == extent.0).peekable();
            let mut at = range.start;
            while let Some(present) = csums.first_present(at..range.end) {
                while others.peek().is_some_and(|[.., end]| *end <= present) {
                    others.next();
                }
                let cover = others.peek().filter(|[_, start, _]| *start <= present);
                let Some([.., end]) = cover.copied() else {
                    self.findings.push(Finding::CsumUnwanted {
                        root,
                        block: mark.block,
                        inode,
                        offset: mark.offset,
                        what: "preallocated space",
                        at: LogicalAddr(present),
                    });
                    break;
                };
                at = end;
            }
        }
    }

    /// Ranges of extents, which are in order, with those joined that touch.
    fn joined(&self, ranges: &Table<3>) -> Table<3> {
        let mut joined = Table::<3>::new(&self.store);
        let mut last: Option<[u64; 3]> = None;
        for [extent, start, end] in ranges.iter() {
            match &mut last {
                Some([of, _, last_end]) if *of == extent && start <= *last_end => {
                    *last_end = end.max(*last_end);
                }
                _ => {
                    last.into_iter().for_each(|range| joined.push(range));
                    last = Some([extent, start, end]);
                }
            }
        }
        last.into_iter().for_each(|range| joined.push(range));
        joined
    }

    /// Joins each tree's summaries and judges what only the whole tree tells.
    pub(crate) fn check_files(&mut self, roots: &Roots, mut summaries: Summaries) {
        // Snapshots of one damaged tree are off by the same.
        let mut explained: BTreeSet<[u64; 3]> = BTreeSet::from([[0; 3]]);
        let mut explained_orphans: BTreeSet<u64> = BTreeSet::from([0]);
        let trees = roots
            .by_id
            .values()
            .filter(|root| root.id.holds_files() && !root.is_deleted())
            .filter(|root| root.item.bytenr.get() != 0);
        for root in trees {
            let no_holes = self.incompat.contains(Incompat::NO_HOLES);
            let rules = Rules { root: root.id, no_holes };
            let at = LogicalAddr(root.item.bytenr.get());
            let mut summary = self.summarise(at, 0, &rules, &mut summaries);
            let mut found = Vec::new();
            let has_top = summary.first() == Some(InodeNo::SUBVOLUME_ROOT);
            if root.id.is_subvolume() && !has_top && !summary.has_gap {
                let inode = InodeNo::SUBVOLUME_ROOT;
                found.push(Finding::InodeMissing { root: root.id, block: at, inode });
            }
            summary.finish(&rules, &mut found);
            self.findings.extend(found);
            if summary.has_gap {
                continue;
            }
            if explained_orphans.insert(summary.sums.orphans) {
                self.explain_orphans(root);
            }
            if explained.insert(summary.sums.of_names()) {
                self.explain_names(root);
            }
        }
    }

    /// The summary of a block, made from those below it if it is not there yet.
    fn summarise(
        &mut self,
        at: LogicalAddr,
        depth: usize,
        rules: &Rules,
        summaries: &mut Summaries,
    ) -> Summary {
        let Some(facts) = self.blocks.get(at) else { return Summary::lost() };
        match self.blocks.summary(at) {
            Some(0) | None => {}
            Some(BEGUN) => return Summary::lost(),
            Some(number) => return summaries.get(number - BEGUN),
        }
        // A damaged tree may lead back here, or on and on.
        self.blocks.set_summary(at, BEGUN);
        if depth == LEVEL_COUNT_MAX || facts.is_lost || facts.level == 0 {
            return Summary::lost();
        }
        let mut found = Vec::new();
        let children = self.children_of(&facts, &mut found);
        self.findings.extend(found);
        // It was there when it was walked: a device that fails now and then.
        let Some(children) = children else {
            self.lost(facts.root, true);
            return Summary::lost();
        };
        let mut summary = Summary::default();
        for child in children {
            // What lies below is not of this place; and a node with the same child in each of its
            // slots must not count it so often.
            let next = if self.blocks.is_refused(at, child.at) {
                Summary::lost()
            } else {
                self.summarise(child.at, depth + 1, rules, summaries)
            };
            let mut found = Vec::new();
            summary.join(&next, rules, &mut found);
            self.findings.extend(found);
        }
        self.blocks.set_summary(at, summaries.push(&summary) + BEGUN);
        summary
    }
}
