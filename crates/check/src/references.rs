//! References both ways: what the trees ask for against what the extent tree lists.

use std::collections::{BTreeMap, BTreeSet};

use ubtrfs_ondisk::extent::{BackRef, ExtentItem, InlineRefs, flags};
use ubtrfs_ondisk::file_extent::FileExtent;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Generation, KeyType, LogicalAddr, RootId};

use crate::context::Context;
use crate::extents::Extents;
use crate::files::Files;
use crate::finding::{Finding, Maybe, Reference};
use crate::hash;
use crate::read::Pointer;
use crate::roots::{DataUse, Roots};
use crate::view::View;
use crate::walk::{BATCH_BLOCKS, Edge};

/// Extents whose references are told apart; of more the number of findings says enough.
const EXPLAINED_MAX: usize = 10_000;

/// A reference without its count. Ordered, to be counted in maps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Kind {
    TreeBlock(u64),
    SharedBlock(u64),
    Data { root: u64, inode: u64, offset: u64 },
    SharedData(u64),
}

impl Kind {
    fn of(back_ref: &BackRef) -> Option<Self> {
        Some(match *back_ref {
            BackRef::TreeBlock { root } => Self::TreeBlock(root.0),
            BackRef::SharedBlock { parent } => Self::SharedBlock(parent.0),
            BackRef::ExtentData { root, inode, offset, .. } => {
                Self::Data { root: root.0, inode: inode.0, offset }
            }
            BackRef::SharedData { parent, .. } => Self::SharedData(parent.0),
            BackRef::Owner { .. } => return None,
        })
    }

    fn reference(self, count: u64) -> Reference {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        Reference(match self {
            Self::TreeBlock(root) => BackRef::TreeBlock { root: RootId(root) },
            Self::SharedBlock(parent) => BackRef::SharedBlock { parent: LogicalAddr(parent) },
            Self::Data { root, inode, offset } => BackRef::ExtentData {
                root: RootId(root),
                inode: ubtrfs_ondisk::InodeNo(inode),
                offset,
                count,
            },
            Self::SharedData(parent) => BackRef::SharedData { parent: LogicalAddr(parent), count },
        })
    }
}

/// What an item of the extent tree says of an extent.
enum Listed {
    /// Of a tree block.
    Generation(Generation),
    Reference(BackRef),
}

fn generation(extent: &[u8]) -> Option<Listed> {
    let item = ExtentItem::peek(extent).ok()?;
    let is_block = item.flags.get() & flags::TREE_BLOCK != 0;
    is_block.then_some(Listed::Generation(Generation(item.generation.get())))
}

/// All references of an extent that do not come out even.
#[derive(Default)]
struct Account {
    /// Of a tree block, as the extent tree says.
    generation: Option<Generation>,
    /// What the extent tree lists.
    listed: BTreeMap<Kind, u64>,
    /// What the trees ask for, each with the block that asks.
    asked: BTreeMap<Kind, u64>,
    /// Blocks that ask, what for, and the other form of that.
    askers: Vec<(LogicalAddr, Kind, Kind)>,
}

impl Context<'_> {
    pub(crate) fn check_references(&mut self, roots: &Roots, extents: &Extents, files: &Files) {
        if !self.is_complete(RootId::EXTENT_TREE) {
            return;
        }
        self.ask_for_blocks(extents);
        let wrong: Vec<LogicalAddr> =
            extents.out_of_balance().map(|extent| extent.at).take(EXPLAINED_MAX).collect();
        if !wrong.is_empty() {
            self.explain(&wrong, roots, extents, files);
        }
    }

    /// The reference that a pointer to a block stands for.
    fn reference_of(&self, edge: &Edge, extents: &Extents) -> BackRef {
        if edge.parent.0 == 0 {
            // The root of a relocation copy is its own parent.
            return if edge.root == RootId::TREE_RELOC {
                BackRef::SharedBlock { parent: edge.child }
            } else {
                BackRef::TreeBlock { root: edge.root }
            };
        }
        if extents.is_full_backref(edge.parent) {
            return BackRef::SharedBlock { parent: edge.parent };
        }
        let owner = self.blocks.facts.get(&edge.parent).map_or(RootId(0), |facts| facts.owner);
        BackRef::TreeBlock { root: owner }
    }

    fn ask_for_blocks(&mut self, extents: &Extents) {
        let mut missing = BTreeSet::new();
        let mut found = Vec::new();
        // A bit for each extent: whether a block was met there.
        let mut met = vec![0_u64; extents.list.len().div_ceil(64)];
        for edge in &self.blocks.edges {
            let facts = self.blocks.facts.get(&edge.child);
            let Some(index) = extents.find(edge.child) else {
                if missing.insert(edge.child) {
                    let root = facts.map_or(edge.root, |facts| facts.root);
                    found.push(Finding::BlockNotInExtentTree { root, block: edge.child });
                }
                continue;
            };
            extents.expect(index, hash::of_reference(&self.reference_of(edge, extents)));
            let extent = &extents.list[index];
            let bit = 1 << (index % 64);
            if let Some(facts) = facts.filter(|_| !extent.is_data() && met[index / 64] & bit == 0) {
                met[index / 64] |= bit;
                extents.expect(index, hash::of_generation(facts.generation));
            }
            let mut differ = |what, have: String, expect: String| {
                let bytenr = edge.child;
                found.push(Finding::ExtentDisagrees { bytenr, what, have, expect });
            };
            if extent.is_data() {
                differ("kind", "file data".to_owned(), "a tree block".to_owned());
            } else if let Some(facts) = facts.filter(|facts| !facts.is_lost)
                && facts.level != extent.level
                && extent.is_judged()
            {
                differ("level", extent.level.to_string(), facts.level.to_string());
            }
        }
        self.findings.extend(found);
    }

    /// Says what is wrong with the references of some extents.
    fn explain(&mut self, wrong: &[LogicalAddr], roots: &Roots, extents: &Extents, files: &Files) {
        let mut accounts: BTreeMap<LogicalAddr, Account> =
            wrong.iter().map(|at| (*at, Account::default())).collect();
        self.collect_listed(&mut accounts, wrong, extents);
        self.collect_asked(&mut accounts, wrong, roots, extents, files);
        let mut flags: BTreeSet<(LogicalAddr, bool)> = BTreeSet::new();
        let mut found = Vec::new();
        let is_complete = self.files_are_complete() && self.gaps.is_empty();
        for (at, account) in accounts {
            let len_bytes =
                extents.find(at).map_or(0, |index| extents.list[index].len_bytes(extents.sector));
            if account.asked.is_empty() {
                if is_complete {
                    found.push(Finding::ExtentUnreferenced { bytenr: at, len_bytes });
                }
                continue;
            }
            if let (Some(have), Some(expect)) = (account.generation, self.generation_of(at))
                && have != expect
            {
                let (have, expect) = (have.to_string(), expect.to_string());
                let what = "generation";
                found.push(Finding::ExtentDisagrees { bytenr: at, what, have, expect });
                if account.listed == account.asked {
                    continue;
                }
            }
            account.compare(at, is_complete, &mut flags, &mut found);
        }
        for (block, is_set) in flags {
            let (have, expect) = (u64::from(is_set), u64::from(!is_set));
            self.findings.push(Finding::FullBackref { block, have, expect });
        }
        self.findings.extend(found);
    }

    /// The generation of the block at an address, if there is one.
    fn generation_of(&self, at: LogicalAddr) -> Option<Generation> {
        self.blocks.facts.get(&at).map(|facts| facts.generation)
    }

    /// What the extent tree lists of some extents.
    fn collect_listed(
        &self,
        accounts: &mut BTreeMap<LogicalAddr, Account>,
        wrong: &[LogicalAddr],
        extents: &Extents,
    ) {
        let is_wrong = |at: LogicalAddr| wrong.binary_search(&at).is_ok();
        let lists = self.in_parallel(&extents.leaves, BATCH_BLOCKS, |pointer| {
            let mut list = Vec::new();
            if !may_hold(pointer, wrong) {
                return list;
            }
            let Some(view) = self.read_block(pointer, &mut Vec::new()) else { return list };
            for (_, key, data) in view.items() {
                let at = LogicalAddr(key.objectid.0);
                if !is_wrong(at) {
                    continue;
                }
                if matches!(key.ty, KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM) {
                    let refs = InlineRefs::of_item(key.ty, data).into_iter().flatten();
                    let refs = refs.filter_map(Result::ok).map(Listed::Reference);
                    list.extend(generation(data).into_iter().chain(refs).map(|it| (at, it)));
                } else if let Ok(back_ref) = BackRef::parse_keyed(key, data) {
                    list.push((at, Listed::Reference(back_ref)));
                }
            }
            list
        });
        for (at, listed) in lists.into_iter().flatten() {
            let Some(account) = accounts.get_mut(&at) else { continue };
            match listed {
                Listed::Generation(generation) => account.generation = Some(generation),
                Listed::Reference(back_ref) => {
                    if let Some(kind) = Kind::of(&back_ref) {
                        let count = account.listed.entry(kind).or_default();
                        *count = count.saturating_add(back_ref.count());
                    }
                }
            }
        }
    }

    /// What the trees ask for of some extents.
    fn collect_asked(
        &self,
        accounts: &mut BTreeMap<LogicalAddr, Account>,
        wrong: &[LogicalAddr],
        roots: &Roots,
        extents: &Extents,
        files: &Files,
    ) {
        for edge in &self.blocks.edges {
            if let Some(account) = accounts.get_mut(&edge.child) {
                let owner = self.blocks.facts.get(&edge.parent).map(|facts| facts.owner);
                let is_full = extents.is_full_backref(edge.parent);
                let other = match (owner, is_full) {
                    (Some(owner), true) => Kind::TreeBlock(owner.0),
                    _ => Kind::SharedBlock(edge.parent.0),
                };
                account.ask(&self.reference_of(edge, extents), edge.parent, other);
            }
        }
        let leaves = self.in_parallel(&files.leaves, BATCH_BLOCKS, |pointer| {
            let view = self.read_block(pointer, &mut Vec::new());
            view.map_or(Vec::new(), |view| data_uses(&view, wrong))
        });
        for used in leaves.iter().flatten().chain(&roots.data) {
            if let Some(account) = accounts.get_mut(&used.bytenr) {
                let is_full = extents.is_full_backref(used.block);
                let other = Kind::of(&used.reference(!is_full));
                let other = other.unwrap_or(Kind::SharedData(used.block.0));
                account.ask(&used.reference(is_full), used.block, other);
            }
        }
    }
}

/// Whether a leaf of the extent tree may hold items of one of the extents.
fn may_hold(pointer: &Pointer, wrong: &[LogicalAddr]) -> bool {
    let first = pointer.first_key.map_or(0, |key| key.objectid.0);
    let last = pointer.limit.map_or(u64::MAX, |key| key.objectid.0);
    let from = wrong.partition_point(|at| at.0 < first);
    wrong.get(from).is_some_and(|at| at.0 <= last)
}

fn data_uses(view: &View, wrong: &[LogicalAddr]) -> Vec<DataUse> {
    let extents = view.items().filter(|(_, key, _)| key.ty == KeyType::EXTENT_DATA);
    extents
        .filter_map(|(_, key, data)| DataUse::of_item(view, key, &FileExtent::parse(data).ok()?))
        .filter(|used| wrong.binary_search(&used.bytenr).is_ok())
        .collect()
}

impl Account {
    fn ask(&mut self, back_ref: &BackRef, by: LogicalAddr, other: Kind) {
        if let Some(kind) = Kind::of(back_ref) {
            *self.asked.entry(kind).or_default() += 1;
            self.askers.push((by, kind, other));
        }
    }

    /// Says where the two sides differ. `flags` takes the blocks whose children are all referenced
    /// in the other form, with whether their flag is set.
    fn compare(
        mut self,
        at: LogicalAddr,
        is_complete: bool,
        flags: &mut BTreeSet<(LogicalAddr, bool)>,
        found: &mut Vec<Finding>,
    ) {
        let mut missing = Vec::new();
        let mut extra = Vec::new();
        let kinds: BTreeSet<Kind> = self.listed.keys().chain(self.asked.keys()).copied().collect();
        for kind in kinds {
            let listed = self.listed.get(&kind).copied().unwrap_or(0);
            let asked = self.asked.get(&kind).copied().unwrap_or(0);
            if listed < asked {
                missing.push((kind, listed, asked));
            } else if listed > asked {
                extra.push((kind, listed, asked));
            }
        }
        if missing.is_empty() && extra.is_empty() {
            found.push(Finding::ReferencesDisagree { bytenr: at });
            return;
        }
        let kinds_of = |list: &[(Kind, u64, u64)]| -> BTreeSet<Kind> {
            list.iter().map(|(kind, ..)| *kind).collect()
        };
        let (missing_kinds, extra_kinds) = (kinds_of(&missing), kinds_of(&extra));
        self.askers
            .retain(|(_, own, other)| missing_kinds.contains(own) && extra_kinds.contains(other));
        if !self.askers.is_empty() {
            for (block, _, other) in self.askers {
                let is_set = matches!(other, Kind::TreeBlock(_) | Kind::Data { .. });
                flags.insert((block, is_set));
            }
            return;
        }
        if let ([(asked_kind, 0, asked)], [(listed_kind, listed, 0)]) = (&missing[..], &extra[..]) {
            let have = Maybe(Some(listed_kind.reference(*listed)));
            let expect = Maybe(Some(asked_kind.reference(*asked)));
            found.push(Finding::WrongReference { bytenr: at, have, expect });
            return;
        }
        let some = |kind: Kind, count| Maybe((count > 0).then(|| kind.reference(count)));
        // What is lost may be what an extra reference stands for.
        let extra = extra.into_iter().filter(|_| is_complete);
        for (kind, listed, asked) in missing.into_iter().chain(extra) {
            let (have, expect) = (some(kind, listed), some(kind, asked));
            found.push(Finding::WrongReference { bytenr: at, have, expect });
        }
    }
}
