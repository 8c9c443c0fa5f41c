//! The extent tree as a table: one small record an extent, in the order of addresses.

use ubtrfs_ondisk::block_group::{BlockGroupFlags, BlockGroupItem};
use ubtrfs_ondisk::extent::{BackRef, ExtentDataRef, ExtentItem, InlineRefs, TreeBlockInfo, flags};
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Generation, Key, KeyType, LogicalAddr, ObjectId, RootId};
use ubtrfs_rt::Arc;

use crate::context::Context;
use crate::finding::Finding;
use crate::hash;
use crate::read::Pointer;
use crate::roots::Roots;
use crate::store::Store;
use crate::table::Table;
use crate::view::{View, number};
use crate::walk::{Kind, Visit};

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
    fn packed(&self) -> u64 {
        let [a, b, c, d] = self.sectors.to_le_bytes();
        u64::from_le_bytes([a, b, c, d, self.level, self.bits, 0, 0])
    }

    fn unpacked(at: u64, packed: u64) -> Self {
        let [a, b, c, d, level, bits, ..] = packed.to_le_bytes();
        Self { at: LogicalAddr(at), sectors: u32::from_le_bytes([a, b, c, d]), level, bits }
    }

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
#[derive(Debug)]
pub(crate) struct Extents {
    /// In the order of addresses. For each extent besides: the hashes of the references that trees
    /// ask for, less those of the listed ones.
    table: Table<3>,
    pub(crate) groups: Vec<Group>,
    /// Bytes of a sector.
    pub(crate) sector: u64,
    /// Bytes of the extents that are tree blocks.
    pub(crate) metadata_bytes: u64,
}

const BALANCE: usize = 2;

impl Extents {
    fn new(store: &Arc<Store>, sector: u64) -> Self {
        Self { table: Table::new(store), groups: Vec::new(), sector, metadata_bytes: 0 }
    }

    fn push(&mut self, extent: &Extent, sum: u64) {
        self.table.push([extent.at.0, extent.packed(), sum.wrapping_neg()]);
    }

    pub(crate) fn find(&self, at: LogicalAddr) -> Option<usize> {
        self.table.find(at.0)
    }

    pub(crate) fn get(&self, index: usize) -> Extent {
        let [at, packed, _] = self.table.get(index);
        Extent::unpacked(at, packed)
    }

    /// Those from an index on, in the order of addresses.
    pub(crate) fn iter_from(&self, index: usize) -> impl Iterator<Item = Extent> {
        self.table.iter_from(index).map(|[at, packed, _]| Extent::unpacked(at, packed))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Extent> {
        self.iter_from(0)
    }

    /// Notes that trees ask for a reference.
    pub(crate) fn expect(&self, index: usize, reference_hash: u64) {
        self.table.add(index, BALANCE, reference_hash);
    }

    fn list_reference(&self, index: usize, sum: u64) {
        self.table.add(index, BALANCE, sum.wrapping_neg());
    }

    pub(crate) fn is_full_backref(&self, block: LogicalAddr) -> bool {
        self.find(block).is_some_and(|index| self.get(index).is_full_backref())
    }

    /// The extents whose references are not what the trees ask for.
    pub(crate) fn out_of_balance(&self) -> impl Iterator<Item = Extent> {
        let off = self.table.iter().filter(|[.., balance]| *balance != 0);
        off.map(|[at, packed, _]| Extent::unpacked(at, packed)).filter(Extent::is_judged)
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
    /// Extents of its leaf before it.
    behind: usize,
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
                        let behind = out.extents.len();
                        out.keyed.push(Keyed { behind, slot, key, sum, count });
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
        let mut loading = Loading {
            extents: Extents::new(&self.store, limits.sector),
            open: Table::new(&self.store),
            keyed: Table::new(&self.store),
        };
        let mut used = Used::default();
        let pointers = roots.pointer_list(RootId::EXTENT_TREE);
        self.walk(pointers, Kind::Tree, &limits, |check, pointer, leaf| {
            check.lost(RootId::EXTENT_TREE, leaf.is_incomplete);
            check.take_leaf(&mut loading, pointer, &leaf);
            for (all, one) in used.0.iter_mut().zip(leaf.used.0) {
                *all = all.or(one);
            }
            loading.extents.groups.extend(leaf.groups);
        });
        for ((bit, feature), first) in FEATURES.into_iter().zip(used.0) {
            if let Some(at) = first.filter(|_| !self.incompat.contains(bit)) {
                let used_by = format!("the extent at {at}");
                self.findings.push(Finding::FeatureMissing { feature, used_by });
            }
        }
        if !loading.extents.table.is_sorted_by(|[at, ..]| *at) {
            loading.sort();
        }
        self.take_keyed(&mut loading);
        self.check_counts(&loading);
        let mut extents = loading.extents;
        let pointers = roots.pointer_list(RootId::BLOCK_GROUP_TREE);
        self.walk(pointers, Kind::Tree, &limits, |_, _, leaf| extents.groups.extend(leaf.groups));
        extents.groups.sort_by_key(|group| group.start);
        let (mut data_count, mut data_bytes) = (0_u64, 0_u64);
        for extent in extents.table.iter().map(|[at, packed, _]| Extent::unpacked(at, packed)) {
            let len_bytes = extent.len_bytes(limits.sector);
            if extent.is_data() {
                data_count += 1;
                data_bytes = data_bytes.saturating_add(len_bytes);
            } else {
                extents.metadata_bytes = extents.metadata_bytes.saturating_add(len_bytes);
            }
        }
        self.statistics.data_extent_count = data_count;
        self.statistics.data_extent_bytes = data_bytes;
        self.statistics.group_count = number(extents.groups.len());
        extents
    }

    fn take_leaf(&mut self, loading: &mut Loading, pointer: &Pointer, leaf: &ExtentLeaf) {
        let sector = self.sector();
        let before = loading.extents.table.len();
        let previous = before.checked_sub(1).map(|index| loading.extents.get(index));
        // Inside a leaf the structural verifier looks for it.
        if let (Some(previous), Some((first, _))) = (previous, leaf.extents.first())
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
                loading.open.push([number(before + index), *refs, *listed]);
            }
        }
        for (extent, sum) in &leaf.extents {
            loading.extents.push(extent, *sum);
        }
        for keyed in &leaf.keyed {
            // It follows its extent, where nothing is wrong.
            let own = (before + keyed.behind).checked_sub(1);
            let own = own.filter(|own| loading.extents.get(*own).at.0 == keyed.key.objectid.0);
            match own {
                Some(own) => loading.add(own, keyed.sum, keyed.count),
                None => loading.keyed.push(keyed.to_words(pointer.at)),
            }
        }
    }

    /// Takes in what did not follow its extent.
    fn take_keyed(&mut self, loading: &mut Loading) {
        for index in 0..loading.keyed.len() {
            let words = loading.keyed.get(index);
            let (block, keyed) = Keyed::of_words(&words);
            if let Some(own) = loading.extents.find(LogicalAddr(keyed.key.objectid.0)) {
                loading.add(own, keyed.sum, keyed.count);
            } else if self.is_complete(RootId::EXTENT_TREE) {
                let (slot, key) = (number(keyed.slot), keyed.key);
                self.findings.push(Finding::ReferenceWithoutExtent { block, slot, key });
            }
        }
    }

    fn check_counts(&mut self, loading: &Loading) {
        for [index, refs, listed] in loading.open.iter() {
            let extent = loading.extents.get(usize::try_from(index).unwrap_or(0));
            if refs == listed || !extent.is_judged() || !self.is_complete(RootId::EXTENT_TREE) {
                continue;
            }
            let bytenr = extent.at;
            self.findings.push(Finding::ExtentRefs { bytenr, have: refs, expect: listed });
        }
    }
}

/// The extent tree while it is read.
struct Loading {
    extents: Extents,
    /// Extents whose count is not that of their inline references, in order: the index, the count
    /// and the references listed so far.
    open: Table<3>,
    /// Keyed references that do not follow their extents.
    keyed: Table<7>,
}

impl Loading {
    /// Adds a keyed reference of an extent.
    fn add(&mut self, index: usize, sum: u64, count: u64) {
        self.extents.list_reference(index, sum);
        if let Some(place) = self.open.find(number(index)) {
            let [index, refs, listed] = self.open.get(place);
            self.open.set(place, [index, refs, listed.saturating_add(count)]);
        }
    }

    /// Puts a damaged tree's extents into order.
    fn sort(&mut self) {
        let store = self.extents.table.store().clone();
        let mut order = Table::<4>::new(&store);
        for (index, [at, packed, balance]) in (0_u64..).zip(self.extents.table.iter()) {
            order.push([at, packed, balance, index]);
        }
        order.sort_by(|[at, ..]| *at);
        let mut open = Table::new(&store);
        self.extents.table = Table::new(&store);
        for (now, [at, packed, balance, before]) in (0_u64..).zip(order.iter()) {
            self.extents.table.push([at, packed, balance]);
            if let Some(place) = self.open.find(before) {
                let [_, refs, listed] = self.open.get(place);
                open.push([now, refs, listed]);
            }
        }
        self.open = open;
    }
}

impl Keyed {
    fn to_words(&self, block: LogicalAddr) -> [u64; 7] {
        let Key { objectid, ty, offset } = self.key;
        let (slot, ty) = (number(self.slot), u64::from(ty.0));
        [block.0, slot, objectid.0, ty, offset, self.sum, self.count]
    }

    fn of_words(words: &[u64; 7]) -> (LogicalAddr, Self) {
        let [block, slot, objectid, ty, offset, sum, count] = *words;
        let ty = KeyType(u8::try_from(ty).unwrap_or(0));
        let key = Key::new(ObjectId(objectid), ty, offset);
        let slot = usize::try_from(slot).unwrap_or(0);
        (LogicalAddr(block), Self { behind: 0, slot, key, sum, count })
    }
}
