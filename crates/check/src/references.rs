//! References both ways: what the trees ask for against what the extent tree lists.

use std::collections::{BTreeMap, BTreeSet};

use ubtrfs_ondisk::extent::{BackRef, ExtentItem, InlineRefs, flags};
use ubtrfs_ondisk::file_extent::FileExtent;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Generation, KeyType, LogicalAddr, RootId};

use crate::blocks::{Edge, Facts};
use crate::context::Context;
use crate::extents::Extents;
use crate::finding::{Finding, Maybe, Reference};
use crate::hash;
use crate::reread::LeavesRead;
use crate::roots::{DataUse, Roots};
use crate::view::View;
use crate::walk::{BATCH_BLOCKS, Kind as Walked};

/// Extents whose references are told apart; of more the number of findings says enough.
const EXPLAINED_MAX: usize = 10_000;
/// References of them that are held at a time. Of an extent that has too many it is only said that
/// they do not agree.
const REFERENCES_MAX: usize = 1 << 17;

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
    /// There were more references than are held.
    is_overfull: bool,
}

/// The accounts of some extents.
struct Accounts {
    by_extent: BTreeMap<LogicalAddr, Account>,
    /// References in all of them.
    held: usize,
}

impl Accounts {
    /// Adds something to an extent's account, if it has one.
    fn add(&mut self, at: LogicalAddr, add: impl FnOnce(&mut Account)) {
        let Some(account) = self.by_extent.get_mut(&at).filter(|it| !it.is_overfull) else {
            return;
        };
        let before = account.held();
        add(account);
        self.held += account.held() - before;
        if self.held > REFERENCES_MAX {
            self.held -= account.held();
            *account = Account { is_overfull: true, ..Account::default() };
        }
    }
}

impl Context<'_> {
    pub(crate) fn check_references(&mut self, roots: &Roots, extents: &Extents) {
        if !self.is_complete(RootId::EXTENT_TREE) {
            return;
        }
        self.ask_for_blocks(extents);
        let wrong: Vec<LogicalAddr> =
            extents.out_of_balance().map(|extent| extent.at).take(EXPLAINED_MAX).collect();
        if !wrong.is_empty() {
            self.explain(&wrong, roots, extents);
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
        let owner = self.blocks.get(edge.parent).map_or(RootId(0), |facts| facts.owner);
        BackRef::TreeBlock { root: owner }
    }

    /// Adds what the pointers to blocks ask for to the extents' balances.
    fn ask_for_blocks(&mut self, extents: &Extents) {
        for index in 0..self.blocks.len() {
            let facts = self.blocks.at_index(index);
            if facts.kind == Walked::Log {
                continue;
            }
            let Some(index) = extents.find(facts.at) else {
                let (root, block) = (facts.root, facts.at);
                self.findings.push(Finding::BlockNotInExtentTree { root, block });
                continue;
            };
            if !extents.get(index).is_data() {
                extents.expect(index, hash::of_generation(facts.generation));
            }
            self.ask_for_block(&facts.edge(), &facts, index, extents);
        }
        for index in 0..self.blocks.repeated_edge_count() {
            let edge = self.blocks.repeated_edge(index);
            let facts = self.blocks.get(edge.child);
            if let (Some(facts), Some(index)) = (facts, extents.find(edge.child)) {
                self.ask_for_block(&edge, &facts, index, extents);
            }
        }
    }

    fn ask_for_block(&mut self, edge: &Edge, facts: &Facts, index: usize, extents: &Extents) {
        extents.expect(index, hash::of_reference(&self.reference_of(edge, extents)));
        let extent = extents.get(index);
        let mut differ = |what, have: String, expect: String| {
            let bytenr = edge.child;
            self.findings.push(Finding::ExtentDisagrees { bytenr, what, have, expect });
        };
        if extent.is_data() {
            differ("kind", "file data".to_owned(), "a tree block".to_owned());
        } else if !facts.is_lost && facts.level != extent.level && extent.is_judged() {
            differ("level", extent.level.to_string(), facts.level.to_string());
        }
    }

    /// Says what is wrong with the references of some extents.
    fn explain(&mut self, wrong: &[LogicalAddr], roots: &Roots, extents: &Extents) {
        let by_extent = wrong.iter().map(|at| (*at, Account::default())).collect();
        let mut accounts = Accounts { by_extent, held: 0 };
        self.collect_listed(&mut accounts, wrong);
        self.collect_asked(&mut accounts, wrong, roots, extents);
        let mut flags: BTreeSet<(LogicalAddr, bool)> = BTreeSet::new();
        let mut found = Vec::new();
        let is_complete = self.files_are_complete() && self.gaps.is_empty();
        for (at, account) in accounts.by_extent {
            if account.is_overfull {
                // What is lost may be what would make it even.
                if is_complete {
                    found.push(Finding::ReferencesDisagree { bytenr: at });
                }
                continue;
            }
            let len_bytes =
                extents.find(at).map_or(0, |index| extents.get(index).len_bytes(extents.sector));
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
        self.blocks.get(at).map(|facts| facts.generation)
    }

    /// What the extent tree lists of some extents.
    fn collect_listed(&self, accounts: &mut Accounts, wrong: &[LogicalAddr]) {
        let is_wrong = |at: LogicalAddr| wrong.binary_search(&at).is_ok();
        let work = |view: &View| {
            let mut list = Vec::new();
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
        };
        let is_wanted = |facts: &Facts| facts.root == RootId::EXTENT_TREE && may_hold(facts, wrong);
        let mut take = |(at, listed)| {
            accounts.add(at, |account| match listed {
                Listed::Generation(generation) => account.generation = Some(generation),
                Listed::Reference(back_ref) => {
                    if let Some(kind) = Kind::of(&back_ref) {
                        let count = account.listed.entry(kind).or_default();
                        *count = count.saturating_add(back_ref.count());
                    }
                }
            });
        };
        let read = LeavesRead { batch: BATCH_BLOCKS, is_wanted, work };
        self.read_leaves(&read, |list| list.into_iter().for_each(&mut take));
    }

    /// What the trees ask for of some extents.
    fn collect_asked(
        &self,
        accounts: &mut Accounts,
        wrong: &[LogicalAddr],
        roots: &Roots,
        extents: &Extents,
    ) {
        for edge in self.blocks.edges() {
            if accounts.by_extent.contains_key(&edge.child) {
                let owner = self.blocks.get(edge.parent).map(|facts| facts.owner);
                let is_full = extents.is_full_backref(edge.parent);
                let other = match (owner, is_full) {
                    (Some(owner), true) => Kind::TreeBlock(owner.0),
                    _ => Kind::SharedBlock(edge.parent.0),
                };
                let own = self.reference_of(&edge, extents);
                accounts.add(edge.child, |account| account.ask(&own, edge.parent, other));
            }
        }
        let mut take = |used: &DataUse| {
            let is_full = extents.is_full_backref(used.block);
            let other = Kind::of(&used.reference(!is_full));
            let other = other.unwrap_or(Kind::SharedData(used.block.0));
            let own = used.reference(is_full);
            accounts.add(used.bytenr, |account| account.ask(&own, used.block, other));
        };
        let read = LeavesRead {
            batch: BATCH_BLOCKS,
            is_wanted: |facts: &Facts| facts.kind == Walked::Files,
            work: |view: &View| data_uses(view, wrong),
        };
        self.read_leaves(&read, |list| list.iter().for_each(&mut take));
        roots.data.iter().for_each(take);
    }
}

/// Whether a leaf of the extent tree may hold items of one of the extents.
fn may_hold(leaf: &Facts, wrong: &[LogicalAddr]) -> bool {
    let (Some(first), Some(last)) = (leaf.first_key, leaf.last_key) else { return false };
    // Keys of a damaged leaf may be in no order.
    if first > last {
        return true;
    }
    let from = wrong.partition_point(|at| at.0 < first.objectid.0);
    wrong.get(from).is_some_and(|at| at.0 <= last.objectid.0)
}

fn data_uses(view: &View, wrong: &[LogicalAddr]) -> Vec<DataUse> {
    let extents = view.items().filter(|(_, key, _)| key.ty == KeyType::EXTENT_DATA);
    extents
        .filter_map(|(_, key, data)| DataUse::of_item(view, key, &FileExtent::parse(data).ok()?))
        .filter(|used| wrong.binary_search(&used.bytenr).is_ok())
        .collect()
}

impl Account {
    fn held(&self) -> usize {
        self.listed.len() + self.asked.len() + self.askers.len()
    }

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
