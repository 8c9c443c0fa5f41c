//! The root tree: which trees there are, how subvolumes are named, which are deleted.

use std::collections::{BTreeMap, BTreeSet};

use ubtrfs_ondisk::dir::DirEntries;
use ubtrfs_ondisk::extent::BackRef;
use ubtrfs_ondisk::features::{CompatRo, Incompat};
use ubtrfs_ondisk::file_extent::FileExtent;
use ubtrfs_ondisk::hash::name_hash;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::root::{RootItem, RootRef};
use ubtrfs_ondisk::{InodeNo, Key, KeyType, LogicalAddr, ObjectId, RootId, Uuid};

use crate::context::Context;
use crate::files::InodeAt;
use crate::finding::Finding;
use crate::read::{Dropped, Pointer};
use crate::view::View;
use crate::walk::{Kind, StructureOnly, Visit};

/// A tree, as its root item describes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Root {
    pub(crate) id: RootId,
    pub(crate) key_offset: u64,
    pub(crate) item: RootItem,
    /// As it stands there; that of `item` is 0 where it is not the generation.
    generation_v2: u64,
}

impl Root {
    pub(crate) fn is_deleted(&self) -> bool {
        self.item.refs.get() == 0
    }

    /// Where its walk begins. Of a tree that is not deleted nothing is dropped, whatever its item
    /// says; in a relocation copy it says how far the tree took over the copy's blocks.
    pub(crate) fn pointer(&self) -> Pointer {
        let item = &self.item;
        let key = item.drop_progress.key();
        let is_dropped = key.objectid.0 != 0 && self.is_deleted();
        let dropped = is_dropped.then_some(Dropped { key, level: item.drop_level });
        let (at, generation) = (item.bytenr.get(), item.generation.get());
        Pointer { dropped, ..Pointer::to_root(self.id, at, generation, item.level) }
    }
}

/// How a subvolume is named: the directory, the index in it and the name.
type Naming = (u64, u64, Vec<u8>);

/// What the root tree holds.
#[derive(Debug, Default)]
pub(crate) struct Roots {
    pub(crate) by_id: BTreeMap<RootId, Root>,
    /// Copies that a relocation left.
    pub(crate) relocation: Vec<Root>,
    /// By parent and child.
    refs: BTreeMap<(RootId, RootId), Naming>,
    backrefs: BTreeMap<(RootId, RootId), Naming>,
    orphans: BTreeSet<u64>,
    default: Option<RootId>,
    /// References to data from the root tree, where it holds the v1 cache.
    pub(crate) data: Vec<DataUse>,
}

/// A file extent's use of a data extent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataUse {
    pub(crate) block: LogicalAddr,
    pub(crate) owner: RootId,
    pub(crate) inode: InodeNo,
    pub(crate) file_offset: u64,
    pub(crate) bytenr: LogicalAddr,
    pub(crate) disk_num_bytes: u64,
    /// File offset less offset in the extent.
    pub(crate) ref_offset: u64,
}

impl DataUse {
    /// From an EXTENT_DATA item; `None` for inline data, holes and what cannot be read.
    pub(crate) fn of_item(leaf: &View, key: Key, extent: &FileExtent<'_>) -> Option<Self> {
        let (FileExtent::Regular(extent) | FileExtent::Prealloc(extent)) = extent else {
            return None;
        };
        (!extent.is_hole()).then(|| Self {
            block: leaf.at(),
            owner: leaf.owner(),
            inode: InodeNo(key.objectid.0),
            file_offset: key.offset,
            bytenr: extent.disk_bytenr,
            disk_num_bytes: extent.disk_num_bytes,
            ref_offset: key.offset.wrapping_sub(extent.offset),
        })
    }

    /// The reference that the extent tree must list.
    pub(crate) fn reference(&self, is_full_backref: bool) -> BackRef {
        if is_full_backref {
            return BackRef::SharedData { parent: self.block, count: 1 };
        }
        let (root, inode, offset) = (self.owner, self.inode, self.ref_offset);
        BackRef::ExtentData { root, inode, offset, count: 1 }
    }
}

impl Roots {
    /// Where the walk of a tree begins; nothing when it does not exist.
    pub(crate) fn pointer_list(&self, root: RootId) -> Vec<Pointer> {
        self.by_id
            .get(&root)
            .filter(|root| root.item.bytenr.get() != 0)
            .map(Root::pointer)
            .into_iter()
            .collect()
    }

    /// The trees to which names lead from the top-level subvolume, by either of the two items of a
    /// name. What is deleted has none left below.
    fn reachable(&self) -> BTreeSet<RootId> {
        let mut children: BTreeMap<RootId, Vec<RootId>> = BTreeMap::new();
        for (parent, child) in self.refs.keys().chain(self.backrefs.keys()) {
            children.entry(*parent).or_default().push(*child);
        }
        let mut reached = BTreeSet::new();
        let mut pending = vec![RootId::FS_TREE];
        while let Some(root) = pending.pop() {
            let lives = self.by_id.get(&root).is_some_and(|root| !root.is_deleted());
            if lives && reached.insert(root) {
                pending.extend(children.get(&root).into_iter().flatten());
            }
        }
        reached
    }

    /// The trees that hold files, relocation copies included.
    pub(crate) fn of_files(&self) -> impl Iterator<Item = &Root> {
        let trees = self.by_id.values().filter(|root| root.id.holds_files());
        trees.chain(&self.relocation).filter(|root| root.item.bytenr.get() != 0)
    }
}

#[derive(Default)]
struct RootLeaf {
    roots: Vec<Root>,
    refs: Vec<(KeyType, RootId, RootId, Naming)>,
    orphans: Vec<u64>,
    default: Option<RootId>,
    data: Vec<DataUse>,
}

struct RootVisitor {
    /// The superblock's.
    generation: u64,
}

impl Visit for RootVisitor {
    type Out = RootLeaf;

    fn leaf(&self, leaf: &View, _: &Pointer, found: &mut Vec<Finding>) -> RootLeaf {
        let mut out = RootLeaf::default();
        for (_, key, data) in leaf.items() {
            match key.ty {
                KeyType::ROOT_ITEM => {
                    let id = RootId(key.objectid.0);
                    let generation_v2 =
                        RootItem::peek(data).map_or(0, |item| item.generation_v2.get());
                    let key_offset = key.offset;
                    let item = RootItem::parse(data).ok();
                    let root = item.map(|item| Root { id, key_offset, item, generation_v2 });
                    out.roots.extend(root);
                }
                KeyType::ROOT_REF | KeyType::ROOT_BACKREF => {
                    let Ok((naming, name)) = RootRef::parse(data) else { continue };
                    let (a, b) = (RootId(key.objectid.0), RootId(key.offset));
                    let (parent, child) = if key.ty == KeyType::ROOT_REF { (a, b) } else { (b, a) };
                    let naming = (naming.dirid.get(), naming.sequence.get(), name.to_vec());
                    out.refs.push((key.ty, parent, child, naming));
                }
                KeyType::ORPHAN_ITEM if key.objectid == ObjectId::ORPHAN => {
                    out.orphans.push(key.offset);
                }
                KeyType::DIR_ITEM if key.objectid == ObjectId::ROOT_TREE_DIR => {
                    let entries = DirEntries::new(data).filter_map(Result::ok);
                    let default = entries.filter(|entry| entry.name == b"default").last();
                    out.default = default
                        .map(|entry| RootId(entry.item.location.objectid.get()))
                        .or(out.default);
                }
                KeyType::INODE_ITEM => {
                    let (root, inode) = (RootId::ROOT_TREE, InodeNo(key.objectid.0));
                    InodeAt { root, block: leaf.at(), inode }.check(data, self.generation, found);
                }
                KeyType::EXTENT_DATA => {
                    let extent = FileExtent::parse(data).ok();
                    out.data.extend(extent.and_then(|extent| DataUse::of_item(leaf, key, &extent)));
                }
                _ => {}
            }
        }
        out
    }
}

/// The trees that must exist.
const ALWAYS: [RootId; 4] =
    [RootId::EXTENT_TREE, RootId::DEV_TREE, RootId::FS_TREE, RootId::CSUM_TREE];

impl Context<'_> {
    pub(crate) fn load_roots(&mut self) -> Roots {
        let superblock = &self.superblock;
        let pointer = Pointer::to_root(
            RootId::ROOT_TREE,
            superblock.root.get(),
            superblock.generation.get(),
            superblock.root_level,
        );
        let mut roots = Roots::default();
        let visitor = RootVisitor { generation: self.generation };
        self.walk(vec![pointer], Kind::Tree, &visitor, |_, _, leaf| {
            for root in leaf.roots {
                if root.id == RootId::TREE_RELOC {
                    roots.relocation.push(root);
                } else {
                    roots.by_id.insert(root.id, root);
                }
            }
            for (ty, parent, child, naming) in leaf.refs {
                let to =
                    if ty == KeyType::ROOT_REF { &mut roots.refs } else { &mut roots.backrefs };
                to.insert((parent, child), naming);
            }
            roots.orphans.extend(leaf.orphans);
            roots.default = leaf.default.or(roots.default);
            roots.data.extend(leaf.data);
        });
        self.check_trees(&roots);
        let files = roots.of_files().filter(|root| root.id.is_subvolume()).count();
        self.statistics.subvolume_count = crate::view::number(files);
        self.statistics.tree_count =
            crate::view::number(roots.by_id.len() + roots.relocation.len() + 2);
        roots
    }

    /// Which trees there must be, and what each root item says.
    fn check_trees(&mut self, roots: &Roots) {
        if self.is_complete(RootId::ROOT_TREE) {
            let by_feature = [
                (CompatRo::FREE_SPACE_TREE, RootId::FREE_SPACE_TREE),
                (CompatRo::BLOCK_GROUP_TREE, RootId::BLOCK_GROUP_TREE),
            ];
            let wanted = by_feature.iter().filter(|(bit, _)| self.compat_ro.contains(*bit));
            let wanted: Vec<_> = ALWAYS.into_iter().chain(wanted.map(|(_, root)| *root)).collect();
            for root in wanted {
                if !roots.by_id.contains_key(&root) {
                    self.findings.push(Finding::RootMissing { root });
                }
            }
        }
        for root in roots.by_id.values().chain(&roots.relocation) {
            self.check_root_item(root);
        }
    }

    fn check_root_item(&mut self, root: &Root) {
        let item = &root.item;
        let mut wrong = |field, have: String, expect: &str| {
            let expect = expect.to_owned();
            self.findings.push(Finding::RootField { root: root.id, field, have, expect });
        };
        if item.generation.get() > self.generation {
            let expect = format!("at most {}", self.generation);
            wrong("generation", item.generation.to_string(), &expect);
        }
        // Linux refuses the leaf for these.
        let limit = self.generation.saturating_add(1);
        for (field, have) in
            [("generation_v2", root.generation_v2), ("last_snapshot", item.last_snapshot.get())]
        {
            if have > limit {
                wrong(field, have.to_string(), &format!("at most {limit}"));
            }
        }
        let progress = item.drop_progress.key();
        if progress.objectid.0 == 0 {
            if item.drop_level != 0 {
                wrong("drop_level", item.drop_level.to_string(), "0 without drop_progress");
            }
        } else if !root.is_deleted() && root.id != RootId::TREE_RELOC {
            wrong("drop_progress", progress.to_string(), "none in a tree that is not deleted");
        } else if item.drop_level > item.level {
            let expect = format!("at most the tree's level, {}", item.level);
            wrong("drop_level", item.drop_level.to_string(), &expect);
        }
        let is_user = root.id.is_subvolume();
        if is_user && item.root_dirid.get() != InodeNo::SUBVOLUME_ROOT.0 {
            wrong("root_dirid", item.root_dirid.to_string(), "256");
        }
        // A snapshot's key names the transaction that made it.
        if root.key_offset > self.generation && root.id != RootId::TREE_RELOC {
            let expect = format!("at most {}", self.generation);
            wrong("key offset", root.key_offset.to_string(), &expect);
        }
    }

    /// Trees of which nothing but the structure is judged, or what is judged elsewhere.
    pub(crate) fn walk_other_trees(&mut self, roots: &Roots) {
        let judged = |root: &RootId| {
            root.holds_files()
                || [
                    RootId::EXTENT_TREE,
                    RootId::BLOCK_GROUP_TREE,
                    RootId::DEV_TREE,
                    RootId::CSUM_TREE,
                    RootId::FREE_SPACE_TREE,
                ]
                .contains(root)
        };
        let others: Vec<RootId> = roots.by_id.keys().copied().filter(|id| !judged(id)).collect();
        for id in others {
            if id == RootId::QUOTA_TREE {
                self.findings.push(Finding::QuotasNotJudged {});
            }
            if id == RootId::UUID_TREE {
                self.check_uuids(roots);
            } else {
                self.walk(roots.pointer_list(id), Kind::Tree, &StructureOnly, |_, _, ()| {});
            }
        }
    }

    /// How subvolumes are named, and whether deleted ones are remembered.
    pub(crate) fn check_roots(&mut self, roots: &Roots) {
        self.check_last_snapshots(roots);
        if !self.is_complete(RootId::ROOT_TREE) {
            return;
        }
        for ((parent, child), naming) in &roots.refs {
            match roots.backrefs.get(&(*parent, *child)) {
                None => self.root_ref_missing(*child, *parent, "ROOT_BACKREF"),
                Some(other) if other != naming => {
                    let (root, parent) = (*child, *parent);
                    self.findings.push(Finding::RootRefsDiffer { root, parent });
                }
                Some(_) => {}
            }
            if !roots.by_id.contains_key(child) {
                self.root_ref_missing(*child, *parent, "ROOT_ITEM");
            }
            if !roots.by_id.contains_key(parent) {
                self.root_ref_missing(*child, *parent, "ROOT_ITEM of the parent");
            }
            self.check_subvolume_entry(roots, *parent, *child, naming);
        }
        for (parent, child) in roots.backrefs.keys() {
            if !roots.refs.contains_key(&(*parent, *child)) {
                self.root_ref_missing(*child, *parent, "ROOT_REF");
            }
        }
        let named = roots.reachable();
        for root in roots.by_id.values().filter(|root| root.id.is_subvolume()) {
            self.check_life(root, &roots.orphans, &named);
        }
        if let Some(root) = roots.default {
            if roots.by_id.get(&root).is_none_or(Root::is_deleted) {
                self.findings.push(Finding::DefaultSubvolume { root });
            } else if root != RootId::FS_TREE && !self.incompat.contains(Incompat::DEFAULT_SUBVOL) {
                let used_by = format!("the default subvolume, {root},");
                self.findings.push(Finding::FeatureMissing { feature: "DEFAULT_SUBVOL", used_by });
            }
        }
    }

    fn root_ref_missing(&mut self, root: RootId, parent: RootId, what: &'static str) {
        self.findings.push(Finding::RootRefMissing { root, parent, what });
    }

    /// A subvolume is reached by names, or deleted and remembered.
    fn check_life(&mut self, root: &Root, orphans: &BTreeSet<u64>, named: &BTreeSet<RootId>) {
        let root_id = root.id;
        if root.is_deleted() {
            if !orphans.contains(&root_id.0) {
                self.findings.push(Finding::RootOrphanMissing { root: root_id });
            }
        } else if root_id != RootId::FS_TREE && !named.contains(&root_id) {
            self.findings.push(Finding::SubvolumeUnreferenced { root: root_id });
        }
    }

    /// The directory that a ROOT_REF names holds the entry.
    fn check_subvolume_entry(
        &mut self,
        roots: &Roots,
        parent: RootId,
        child: RootId,
        (directory, index, name): &Naming,
    ) {
        let Some(tree) = roots.by_id.get(&parent).filter(|root| !root.is_deleted()) else { return };
        if !self.is_complete(parent) {
            return;
        }
        let leads_there = |data: &[u8]| {
            DirEntries::new(data).filter_map(Result::ok).any(|entry| {
                let location = entry.item.location.key();
                entry.name == name.as_slice()
                    && location.ty == KeyType::ROOT_ITEM
                    && location.objectid.0 == child.0
            })
        };
        for (ty, offset, what) in [
            (KeyType::DIR_ITEM, name_hash(name), "DIR_ITEM"),
            (KeyType::DIR_INDEX, *index, "DIR_INDEX"),
        ] {
            let key = Key::new(ObjectId(*directory), ty, offset);
            if !self.look_up(tree, key, leads_there).unwrap_or(false) {
                self.root_ref_missing(child, parent, what);
            }
        }
    }

    /// A block that a tree shares is not newer than the last snapshot of the tree: else Linux takes
    /// it for the tree's alone. Those that a balance moved have a flag that says so.
    fn check_last_snapshots(&mut self, roots: &Roots) {
        for (root, (generation, block)) in &self.blocks.newest_shared {
            let Some(found) = roots.by_id.get(root).filter(|root| root.id.is_subvolume()) else {
                continue;
            };
            let have = found.item.last_snapshot.get();
            if generation.0 > have {
                self.findings.push(Finding::RootField {
                    root: *root,
                    field: "last_snapshot",
                    have: have.to_string(),
                    expect: format!("at least {generation}, as the block {block} is shared"),
                });
            }
        }
    }

    /// Finds an item in a tree and asks something of it.
    pub(crate) fn look_up<T>(&self, root: &Root, key: Key, ask: impl Fn(&[u8]) -> T) -> Option<T> {
        let mut pointer = root.pointer();
        // What is wrong with the blocks was found when they were walked.
        let mut found = Vec::new();
        for _ in 0..ubtrfs_ondisk::block::LEVEL_COUNT_MAX {
            let view = self.read_block(&pointer, &mut found)?;
            if view.level() == 0 {
                let (_, _, data) = view.items().find(|(_, found, _)| *found == key)?;
                return Some(ask(data));
            }
            let slots = 0..view.len();
            let below = slots.take_while(|slot| view.key(*slot).is_some_and(|first| first <= key));
            pointer = pointer.child(&view, below.last()?)?;
        }
        None
    }

    /// The uuid tree lists each subvolume's uuids, if the superblock says that it is current.
    fn check_uuids(&mut self, roots: &Roots) {
        let mut listed: BTreeSet<(Uuid, KeyType, u64)> = BTreeSet::new();
        let pointers = roots.pointer_list(RootId::UUID_TREE);
        self.walk(pointers, Kind::Tree, &UuidVisitor, |_, _, leaf| listed.extend(leaf));
        let is_current = self.superblock.uuid_tree_generation.get() == self.generation
            && self.is_complete(RootId::UUID_TREE);
        let mut wanted = BTreeSet::new();
        for root in roots.by_id.values().filter(|root| root.id.is_subvolume()) {
            let uuids = [
                (root.item.uuid, KeyType::UUID_KEY_SUBVOL, "uuid"),
                (root.item.received_uuid, KeyType::UUID_KEY_RECEIVED_SUBVOL, "received uuid"),
            ];
            for (uuid, ty, what) in uuids {
                let entry = (Uuid(uuid), ty, root.id.0);
                let is_asked = !Uuid(uuid).is_nil() && !root.is_deleted();
                if is_asked && is_current && !listed.contains(&entry) {
                    let uuid = Uuid(uuid);
                    self.findings.push(Finding::UuidMissing { root: root.id, what, uuid });
                }
                wanted.insert(entry);
            }
        }
        for (uuid, _, root) in listed.difference(&wanted) {
            let (root, uuid) = (RootId(*root), *uuid);
            self.findings.push(Finding::UuidStale { root, uuid });
        }
    }
}

struct UuidVisitor;

impl Visit for UuidVisitor {
    type Out = Vec<(Uuid, KeyType, u64)>;

    fn leaf(&self, leaf: &View, _: &Pointer, _: &mut Vec<Finding>) -> Self::Out {
        let mut out = Vec::new();
        let types = [KeyType::UUID_KEY_SUBVOL, KeyType::UUID_KEY_RECEIVED_SUBVOL];
        for (_, key, data) in leaf.items().filter(|(_, key, _)| types.contains(&key.ty)) {
            let mut uuid = [0; 16];
            uuid[..8].copy_from_slice(&key.objectid.0.to_le_bytes());
            uuid[8..].copy_from_slice(&key.offset.to_le_bytes());
            for id in data.chunks_exact(8) {
                let id = u64::from_le_bytes(id.try_into().expect("eight bytes"));
                out.push((Uuid(uuid), key.ty, id));
            }
        }
        out
    }
}
