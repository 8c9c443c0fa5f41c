//! The extent tree as a table: one small record an extent, in the order of addresses.

use rustc_hash::FxHashMap;
use ubtrfs_ondisk::block_group::{BlockGroupFlags, BlockGroupItem};
use ubtrfs_ondisk::extent::{BackRef, ExtentDataRef, ExtentItem, InlineRefs, TreeBlockInfo, flags};
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Generation, Key, KeyType, LogicalAddr, RootId};
use ubtrfs_rt::{AtomicU64, Ordering};

use crate::context::Context;
use crate::finding::Finding;
use crate::hash;
use crate::read::Pointer;
use crate::roots::Roots;
use crate::view::{View, number};
use crate::walk::{Kind, Visit, Visited};

const DATA: u8 = 1 << 0;
const FULL_BACKREF: u8 = 1 << 1;
/// Its item could not be read as a whole: its references are not judged.
const UNJUDGED: u8 = 1 << 2;

/// A key further behind its hash was not put there by collisions.
const COLLISIONS_MAX: u64 = 1 << 16;

/// One extent. What it holds is kept small: there may be millions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) at: LogicalAddr,
    sectors: u32,
    pub(crate) level: u8,
    bits: u8,
}

impl Extent {
    pub(crate) fn is_data(&self) -> bool {
        self.bits & DATA != 0
    }

    pub(crate) fn is_full_backref(&self) -> bool {
        self.bits & FULL_BACKREF != 0
    }

    pub(crate) fn is_judged(&self) -> bool {
        self.bits & UNJUDGED == 0
    }

    pub(crate) fn len_bytes(&self, sector: u64) -> u64 {
        u64::from(self.sectors) * sector
    }

    pub(crate) fn end(&self, sector: u64) -> u64 {
        self.at.0.saturating_add(self.len_bytes(sector))
    }
}

/// A block group item.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) start: LogicalAddr,
    pub(crate) len_bytes: u64,
    pub(crate) used: u64,
    pub(crate) flags: BlockGroupFlags,
}

impl Group {
    pub(crate) fn end(&self) -> u64 {
        self.start.0.saturating_add(self.len_bytes)
    }
}

/// All extents, and the block groups that lie among them.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    pub(crate) list: Vec<Extent>,
    /// For each extent: the hashes of the references that trees ask for, less those of the listed
    /// ones.
    balances: Vec<AtomicU64>,
    pub(crate) groups: Vec<Group>,
    /// Bytes of a sector.
    pub(crate) sector: u64,
    /// The extent tree's leaves, to be read again where something is wrong.
    pub(crate) leaves: Vec<Pointer>,
}

impl Extents {
    pub(crate) fn find(&self, at: LogicalAddr) -> Option<usize> {
        self.list.binary_search_by_key(&at, |extent| extent.at).ok()
    }

    /// Notes that trees ask for a reference.
    pub(crate) fn expect(&self, index: usize, reference_hash: u64) {
        if let Some(balance) = self.balances.get(index) {
            balance.fetch_add(reference_hash, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_full_backref(&self, block: LogicalAddr) -> bool {
        self.find(block).is_some_and(|index| self.list[index].is_full_backref())
    }

    /// The extents whose references are not what the trees ask for.
    pub(crate) fn out_of_balance(&self) -> impl Iterator<Item = &Extent> {
        self.list
            .iter()
            .zip(&self.balances)
            .filter(|(extent, balance)| extent.is_judged() && balance.load(Ordering::Relaxed) != 0)
            .map(|(extent, _)| extent)
    }

    pub(crate) fn metadata_bytes(&self, sectorsize_bytes: usize) -> u64 {
        let sector = number(sectorsize_bytes);
        let blocks = self.list.iter().filter(|extent| !extent.is_data());
        blocks.fold(0, |sum: u64, extent| sum.saturating_add(extent.len_bytes(sector)))
    }

    fn list_reference(&self, index: usize, sum: u64) {
        if let Some(balance) = self.balances.get(index) {
            balance.fetch_sub(sum, Ordering::Relaxed);
        }
    }
}

/// A leaf of the extent tree, condensed.
#[derive(Default)]
pub(crate) struct ExtentLeaf {
    extents: Vec<(Extent, u64)>,
    /// Extents of this leaf whose count is not that of their inline references: its index here,
    /// the count, and the inline ones.
    open: Vec<(usize, u64, u64)>,
    keyed: Vec<Keyed>,
    groups: Vec<Group>,
    used: Used,
    is_damaged: bool,
    /// An extent could not be read at all.
    is_incomplete: bool,
}

/// Features that extents make use of, each with the first that does.
#[derive(Clone, Copy, Default)]
struct Used([Option<LogicalAddr>; 2]);

const FEATURES: [(Incompat, &str); 2] =
    [(Incompat::SKINNY_METADATA, "SKINNY_METADATA"), (Incompat::SIMPLE_QUOTA, "SIMPLE_QUOTA")];
const SKINNY: usize = 0;
const OWNER: usize = 1;

/// A reference that is an item of its own.
struct Keyed {
    slot: usize,
    key: Key,
    sum: u64,
    count: u64,
}

/// Reads leaves of the extent tree and of the block group tree.
pub(crate) struct Limits {
    pub(crate) generation_max: u64,
    pub(crate) sector: u64,
    pub(crate) nodesize: u64,
}

impl Visit for Limits {
    type Out = ExtentLeaf;

    fn leaf(&self, leaf: &View, pointer: &Pointer, found: &mut Vec<Finding>) -> ExtentLeaf {
        let mut out = ExtentLeaf { is_damaged: !leaf.is_verified(), ..ExtentLeaf::default() };
        let mut last = None;
        for (slot, key, data) in leaf.items() {
            match key.ty {
                KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => {
                    let counts = self.extent(&mut out, key, data, found);
                    out.is_incomplete |= counts.is_none();
                    last = counts.or(last);
                }
                KeyType::BLOCK_GROUP_ITEM => out.groups.extend(group(key, data)),
                KeyType::EXTENT_DATA_REF
                | KeyType::SHARED_DATA_REF
                | KeyType::TREE_BLOCK_REF
                | KeyType::SHARED_BLOCK_REF => {
                    if let Some((sum, count)) = keyed_sum(key, data) {
                        out.keyed.push(Keyed { slot, key, sum, count });
                        open_last(&mut out, last);
                    }
                    found.extend(wrong_hash(pointer.at, slot, key, data));
                }
                _ => {}
            }
        }
        // Keyed ones may follow in the next leaf.
        open_last(&mut out, last);
        out
    }
}

/// Keeps the counts of the last extent: keyed references of it are to be added.
fn open_last(out: &mut ExtentLeaf, last: Option<(u64, u64)>) {
    let Some((index, (refs, listed))) = out.extents.len().checked_sub(1).zip(last) else { return };
    if out.open.last().is_none_or(|(open, ..)| *open != index) {
        out.open.push((index, refs, listed));
    }
}

impl Limits {
    /// Takes an extent in; its count of references and how many are inline.
    fn extent(
        &self,
        out: &mut ExtentLeaf,
        key: Key,
        data: &[u8],
        found: &mut Vec<Finding>,
    ) -> Option<(u64, u64)> {
        let at = LogicalAddr(key.objectid.0);
        let (item, rest) = ExtentItem::split(data).ok()?;
        let is_data = item.flags.get() & flags::DATA != 0;
        let is_skinny = key.ty == KeyType::METADATA_ITEM;
        let mut bits = if is_data { DATA } else { 0 };
        if item.flags.get() & flags::FULL_BACKREF != 0 {
            bits |= FULL_BACKREF;
        }
        let mut level = u8::try_from(key.offset).unwrap_or(u8::MAX);
        if is_skinny {
            out.used.0[SKINNY].get_or_insert(at);
        } else {
            level =
                if is_data { 0 } else { TreeBlockInfo::peek(rest).map_or(0, |info| info.level) };
        }
        // Of a tree block the generation is compared with the block's own.
        let generation = Generation(item.generation.get());
        let mut sum = if is_data { 0 } else { hash::of_generation(generation) };
        let mut listed = 0_u64;
        match InlineRefs::of_item(key.ty, data) {
            Ok(refs) => {
                for back_ref in refs {
                    let Ok(back_ref) = back_ref else {
                        bits |= UNJUDGED;
                        break;
                    };
                    if matches!(back_ref, BackRef::Owner { .. }) {
                        out.used.0[OWNER].get_or_insert(at);
                    }
                    let count = back_ref.count();
                    listed = listed.saturating_add(count);
                    sum = sum.wrapping_add(hash::of_reference(&back_ref).wrapping_mul(count));
                }
            }
            Err(_) => bits |= UNJUDGED,
        }
        let len_bytes = if is_skinny { self.nodesize } else { key.offset };
        let sectors = u32::try_from(len_bytes.div_ceil(self.sector)).unwrap_or(u32::MAX);
        if item.refs.get() != listed {
            out.open.push((out.extents.len(), item.refs.get(), listed));
        }
        out.extents.push((Extent { at, sectors, level, bits }, sum));
        if item.generation.get() > self.generation_max {
            found.push(Finding::ExtentGeneration {
                bytenr: at,
                have: Generation(item.generation.get()),
                limit: Generation(self.generation_max),
            });
        }
        Some((item.refs.get(), listed))
    }
}

/// A keyed data reference is one struct in an item; one of another hash may have taken its place,
/// and then it stands behind that one.
fn keyed_sum(key: Key, data: &[u8]) -> Option<(u64, u64)> {
    let back_ref = BackRef::parse_keyed(key, data).ok()?;
    let count = back_ref.count();
    Some((hash::of_reference(&back_ref).wrapping_mul(count), count))
}

/// A collision moves a key on to the next offset. Those before it may be gone since: Linux looks
/// through all references from the hash on.
fn wrong_hash(block: LogicalAddr, slot: usize, key: Key, data: &[u8]) -> Option<Finding> {
    if key.ty != KeyType::EXTENT_DATA_REF {
        return None;
    }
    let expect = BackRef::from_data_ref(ExtentDataRef::peek(data).ok()?).key_offset();
    let collisions = key.offset.checked_sub(expect);
    let is_found = collisions.is_some_and(|count| count <= COLLISIONS_MAX);
    (!is_found).then_some(Finding::ReferenceKey { block, slot: number(slot), key, expect })
}

fn group(key: Key, data: &[u8]) -> Option<Group> {
    let item = BlockGroupItem::peek(data).ok()?;
    Some(Group {
        start: LogicalAddr(key.objectid.0),
        len_bytes: key.offset,
        used: item.used.get(),
        flags: BlockGroupFlags(item.flags.get()),
    })
}

impl Context<'_> {
    pub(crate) fn limits(&self) -> Limits {
        Limits {
            generation_max: self.generation,
            sector: self.sector(),
            nodesize: number(self.geometry.nodesize_bytes),
        }
    }

    /// Reads the extent tree and the tree of block groups.
    pub(crate) fn load_extents(&mut self, roots: &Roots) -> Extents {
        let limits = self.limits();
        let mut extents = Extents { sector: limits.sector, ..Extents::default() };
        let leaves = self.walk(roots.pointer_list(RootId::EXTENT_TREE), Kind::Tree, &limits);
        let mut open: FxHashMap<usize, (u64, u64)> = FxHashMap::default();
        let mut keyed = Vec::new();
        let mut used = Used::default();
        for Visited { pointer, out } in leaves {
            self.lost(RootId::EXTENT_TREE, out.is_incomplete);
            self.take_leaf(&mut extents, &mut open, &pointer, &out);
            for (all, one) in used.0.iter_mut().zip(out.used.0) {
                *all = all.or(one);
            }
            keyed.extend(out.keyed.into_iter().map(|keyed| (pointer.at, keyed)));
            extents.groups.extend(out.groups);
            extents.leaves.push(pointer);
        }
        for ((bit, feature), first) in FEATURES.into_iter().zip(used.0) {
            if let Some(at) = first.filter(|_| !self.incompat.contains(bit)) {
                let used_by = format!("the extent at {at}");
                self.findings.push(Finding::FeatureMissing { feature, used_by });
            }
        }
        if !extents.list.is_sorted_by_key(|extent| extent.at) {
            sort(&mut extents, &mut open);
        }
        self.take_keyed(&extents, &mut open, keyed);
        self.check_counts(&extents, open);
        let groups = self.walk(roots.pointer_list(RootId::BLOCK_GROUP_TREE), Kind::Tree, &limits);
        extents.groups.extend(groups.into_iter().flat_map(|leaf| leaf.out.groups));
        extents.groups.sort_by_key(|group| group.start);
        let data = extents.list.iter().filter(|extent| extent.is_data());
        self.statistics.data_extent_count = number(data.clone().count());
        self.statistics.data_extent_bytes =
            data.fold(0, |sum: u64, extent| sum.saturating_add(extent.len_bytes(limits.sector)));
        self.statistics.group_count = number(extents.groups.len());
        extents
    }

    fn take_leaf(
        &mut self,
        extents: &mut Extents,
        open: &mut FxHashMap<usize, (u64, u64)>,
        pointer: &Pointer,
        leaf: &ExtentLeaf,
    ) {
        let sector = self.sector();
        // Inside a leaf the structural verifier looks for it.
        if let (Some(previous), Some((first, _))) = (extents.list.last(), leaf.extents.first())
            && previous.end(sector) > first.at.0
            && pointer.first_key.is_some()
        {
            self.findings.push(Finding::ExtentOverlap {
                bytenr: first.at,
                previous: previous.at,
                previous_bytes: previous.len_bytes(sector),
            });
        }
        for (index, refs, listed) in &leaf.open {
            // That the inline ones alone are too many is the structural verifier's finding.
            if refs > listed || !leaf.is_damaged {
                open.insert(extents.list.len() + index, (*refs, *listed));
            }
        }
        for (extent, sum) in &leaf.extents {
            extents.list.push(*extent);
            extents.balances.push(AtomicU64::new(sum.wrapping_neg()));
        }
    }

    fn take_keyed(
        &mut self,
        extents: &Extents,
        open: &mut FxHashMap<usize, (u64, u64)>,
        keyed: Vec<(LogicalAddr, Keyed)>,
    ) {
        for (block, Keyed { slot, key, sum, count }) in keyed {
            let Some(index) = extents.find(LogicalAddr(key.objectid.0)) else {
                if self.is_complete(RootId::EXTENT_TREE) {
                    let slot = number(slot);
                    self.findings.push(Finding::ReferenceWithoutExtent { block, slot, key });
                }
                continue;
            };
            extents.list_reference(index, sum);
            if let Some((_, listed)) = open.get_mut(&index) {
                *listed = listed.saturating_add(count);
            }
        }
    }

    fn check_counts(&mut self, extents: &Extents, open: FxHashMap<usize, (u64, u64)>) {
        let mut open: Vec<_> = open.into_iter().collect();
        open.sort_unstable();
        for (index, (refs, listed)) in open {
            let extent = &extents.list[index];
            if refs == listed || !extent.is_judged() || !self.is_complete(RootId::EXTENT_TREE) {
                continue;
            }
            let bytenr = extent.at;
            self.findings.push(Finding::ExtentRefs { bytenr, have: refs, expect: listed });
        }
    }
}

/// Puts a damaged tree's extents into order.
fn sort(extents: &mut Extents, open: &mut FxHashMap<usize, (u64, u64)>) {
    let mut order: Vec<usize> = (0..extents.list.len()).collect();
    order.sort_by_key(|index| extents.list[*index].at);
    extents.list = order.iter().map(|index| extents.list[*index]).collect();
    extents.balances = order
        .iter()
        .map(|index| AtomicU64::new(extents.balances[*index].load(Ordering::Relaxed)))
        .collect();
    *open = order
        .iter()
        .enumerate()
        .filter_map(|(now, before)| open.get(before).map(|counts| (now, *counts)))
        .collect();
}
