//! Where the names of a tree do not agree: which they are. Reads the tree twice again, so it is only
//! asked where the sums say that something is wrong: first for sums of parts of its names, then for
//! the names of those parts that do not come to zero. Others are not kept.

use std::collections::{BTreeMap, BTreeSet};

use ubtrfs_ondisk::dir::{DirEntries, DirEntry, FileType};
use ubtrfs_ondisk::inode::{InodeExtrefs, InodeItem, InodeRefs};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{InodeNo, Key, KeyType};
use ubtrfs_rt::Arc;

use crate::context::Context;
use crate::files::{hash_of_entry, hash_of_target, is_inode};
use crate::finding::{Finding, Name};
use crate::hash;
use crate::roots::Root;
use crate::run::{Sums, hash_of_type};
use crate::store::Store;
use crate::table::Table;
use crate::view::{View, number};

/// Parts in which the names of a tree are summed, at least.
const PARTS_MIN: u64 = 4096;
/// Names in one part, about, where there are more.
const NAMES_EACH: u64 = 256;
/// Parts whose names are kept: of more there are more wrong names than anybody reads.
const PARTS_EXPLAINED_MAX: usize = 64;
/// What is kept in memory of them, items that name something.
const NAMES_KEPT_MAX: u64 = 1 << 16;

/// The top directory names itself, and no directory has that name.
pub(crate) fn is_own_name(directory: InodeNo, inode: InodeNo) -> bool {
    directory == inode && inode == InodeNo::SUBVOLUME_ROOT
}

/// The names of a tree by parts: for each part the sums, as differences, and how many items there
/// are. The first word says whether the part is explained.
struct Parts(Table<6>);

impl Parts {
    fn new(store: &Arc<Store>, count: u64) -> Self {
        let mut table = Table::new(store);
        (0..count).for_each(|_| table.push([0; 6]));
        Self(table)
    }

    /// The part to which a name belongs, by whichever item it is met in.
    fn of(&self, directory: u64, name: &[u8]) -> usize {
        let part = hash::of_numbers([8, directory, hash::of_bytes(name)]);
        usize::try_from(part % number(self.0.len())).expect("below the number of parts")
    }

    fn add(&mut self, directory: u64, name: &[u8], said: &Said) {
        let mut sums = Sums::default();
        add_to(&mut sums, directory, name, said);
        let part = self.of(directory, name);
        let added = [sums.items, sums.refs, sums.types, sums.orphans, 1];
        (1..).zip(added).for_each(|(word, value)| self.0.add(part, word, value));
    }

    /// Chooses the parts that are explained; whether there are others to be explained.
    fn choose(&mut self) -> bool {
        let (mut count, mut kept, mut has_more) = (0, 0, false);
        for index in 0..self.0.len() {
            let [_, sums @ .., items] = self.0.get(index);
            if sums == [0; 4] {
                continue;
            }
            let fits = count < PARTS_EXPLAINED_MAX && items <= NAMES_KEPT_MAX - kept;
            has_more |= !fits;
            if fits {
                count += 1;
                kept += items;
                let [a, b, c, d] = sums;
                self.0.set(index, [1, a, b, c, d, items]);
            }
        }
        has_more
    }

    fn is_chosen(&self, directory: u64, name: &[u8]) -> bool {
        self.0.get(self.of(directory, name))[0] != 0
    }
}

/// Where an entry leads, and the type that it gives.
type Target = (Key, u8);

/// What an item says of a name in a directory.
enum Said {
    Item(Target),
    /// The index and where it leads.
    Index(u64, Target),
    /// The index, and the inode with its mode, where its item comes before.
    Reference(u64, u64, Option<u32>),
}

/// Reads leaves in the order of the tree.
#[derive(Default)]
struct Reader {
    /// The inode whose item came last, and its mode.
    inode: Option<(u64, u32)>,
    /// Directories that are deleted: what is left in them is on its way out.
    unlinked: BTreeSet<u64>,
}

impl Reader {
    /// Hands over each name of a leaf: the directory, the name, and what is said of it.
    fn read(&mut self, view: &View, mut each: impl FnMut(u64, &[u8], Said)) {
        for (_, key, data) in view.items().filter(|(_, key, _)| is_inode(key.objectid)) {
            let inode = key.objectid.0;
            let mode = self.inode.filter(|(number, _)| *number == inode).map(|(_, mode)| mode);
            match key.ty {
                KeyType::INODE_ITEM => self.inode(inode, data),
                KeyType::INODE_REF => {
                    for name in InodeRefs::new(data).filter_map(Result::ok) {
                        each(key.offset, name.name, Said::Reference(name.index, inode, mode));
                    }
                }
                KeyType::INODE_EXTREF => {
                    for name in InodeExtrefs::new(data).filter_map(Result::ok) {
                        each(name.parent.0, name.name, Said::Reference(name.index, inode, mode));
                    }
                }
                KeyType::DIR_ITEM => {
                    for entry in DirEntries::new(data).filter_map(Result::ok) {
                        each(inode, entry.name, Said::Item(target(&entry)));
                    }
                }
                KeyType::DIR_INDEX => {
                    for entry in DirEntries::new(data).filter_map(Result::ok) {
                        each(inode, entry.name, Said::Index(key.offset, target(&entry)));
                    }
                }
                _ => {}
            }
        }
    }

    fn inode(&mut self, number: u64, data: &[u8]) {
        let Ok(item) = InodeItem::peek(data) else { return };
        let mode = item.mode.get();
        self.inode = Some((number, mode));
        if item.nlink.get() == 0 && FileType::from_mode(mode) == FileType::Directory {
            self.unlinked.insert(number);
        }
    }
}

fn target(entry: &DirEntry<'_>) -> Target {
    (entry.item.location.key(), entry.item.ty)
}

/// Adds to the sums of a part as the walk of the files does to those of a whole tree.
fn add_to(sums: &mut Sums, directory: u64, name: &[u8], said: &Said) {
    let directory = InodeNo(directory);
    match *said {
        Said::Item((location, ty)) => {
            let sum = hash_of_target(directory, name, location, ty);
            sums.items = sums.items.wrapping_sub(sum);
        }
        Said::Index(index, (location, ty)) => {
            let sum = hash_of_target(directory, name, location, ty);
            sums.items = sums.items.wrapping_add(sum);
            if location.ty == KeyType::INODE_ITEM {
                let inode = InodeNo(location.objectid.0);
                let sum = hash_of_entry(directory, index, hash::of_bytes(name), inode);
                sums.refs = sums.refs.wrapping_add(sum);
                let sum = hash_of_type(inode, FileType::from_disk(ty));
                sums.types = sums.types.wrapping_add(sum);
            }
        }
        Said::Reference(index, inode, mode) => {
            let inode = InodeNo(inode);
            if is_own_name(directory, inode) {
                return;
            }
            let sum = hash_of_entry(directory, index, hash::of_bytes(name), inode);
            sums.refs = sums.refs.wrapping_sub(sum);
            let sum = mode.map_or(0, |mode| hash_of_type(inode, FileType::from_mode(mode)));
            sums.types = sums.types.wrapping_sub(sum);
        }
    }
}

/// The names of some parts of a tree.
#[derive(Default)]
struct Names {
    /// By directory and name.
    items: BTreeMap<(u64, Vec<u8>), Target>,
    /// By directory, index and name.
    indexes: BTreeMap<(u64, u64, Vec<u8>), Target>,
    /// Inode, directory, index, name.
    refs: BTreeSet<(u64, u64, u64, Vec<u8>)>,
    modes: BTreeMap<u64, u32>,
    unlinked: BTreeSet<u64>,
    /// A name stands twice in one item, which was found where the item was.
    has_duplicates: bool,
}

impl Names {
    fn add(&mut self, directory: u64, name: &[u8], said: &Said) {
        let name = name.to_vec();
        match *said {
            Said::Item(target) => {
                let before = self.items.insert((directory, name), target);
                self.has_duplicates |= before.is_some();
            }
            Said::Index(index, target) => {
                self.indexes.insert((directory, index, name), target);
            }
            Said::Reference(index, inode, mode) => {
                self.refs.insert((inode, directory, index, name));
                self.modes.extend(mode.map(|mode| (inode, mode)));
            }
        }
    }
}

impl Context<'_> {
    /// Says which names of a tree do not agree.
    pub(crate) fn explain_names(&mut self, root: &Root) {
        let count = (self.statistics.entry_count / NAMES_EACH).max(PARTS_MIN);
        let mut parts = Parts::new(&self.store, count);
        self.read_names(root, |directory, name, said| parts.add(directory, name, said));
        let has_more = parts.choose();
        let mut names = Names::default();
        names.unlinked = self.read_names(root, |directory, name, said| {
            if parts.is_chosen(directory, name) {
                names.add(directory, name, said);
            }
        });
        let before = self.findings.len();
        self.compare_indexes(root, &names);
        self.compare_items(root, &names);
        self.compare_refs(root, &names);
        // An inode without its item has no type to compare; that it has none was found.
        let has_no_item = |(inode, ..): &(u64, u64, u64, Vec<u8>)| !names.modes.contains_key(inode);
        let is_explained = self.findings.len() > before
            || names.has_duplicates
            || names.refs.iter().any(has_no_item);
        if (has_more || !is_explained) && names.unlinked.is_empty() {
            self.findings.push(Finding::NamesDisagree { root: root.id });
        }
    }

    /// Hands over all names of a tree; returns the directories that are deleted.
    fn read_names(&self, root: &Root, mut each: impl FnMut(u64, &[u8], &Said)) -> BTreeSet<u64> {
        let mut reader = Reader::default();
        for pointer in self.leaves_of(root) {
            // What is wrong with the leaf was found when it was walked.
            if let Some(view) = self.read_block(&pointer, &mut Vec::new()) {
                reader.read(&view, |directory, name, said| each(directory, name, &said));
            }
        }
        reader.unlinked
    }

    /// Each DIR_INDEX has its DIR_ITEM and its inode.
    fn compare_indexes(&mut self, root: &Root, names: &Names) {
        let root = root.id;
        let mut seen = BTreeSet::new();
        let living = names.indexes.iter().filter(|((dir, ..), _)| !names.unlinked.contains(dir));
        for ((dir, index, bytes), (location, ty)) in living {
            let (directory, name) = (InodeNo(*dir), Name(bytes.clone()));
            if !seen.insert((*dir, bytes)) {
                let (inode, name) = (directory, name.clone());
                self.findings.push(Finding::DuplicateName { root, inode, name });
            }
            match names.items.get(&(*dir, bytes.clone())) {
                None => {
                    let name = name.clone();
                    self.findings.push(Finding::DirItemMissing { root, directory, name });
                }
                Some((other, other_ty)) if (other, other_ty) != (location, ty) => {
                    self.findings.push(Finding::DirEntriesDiffer {
                        root,
                        directory,
                        name: name.clone(),
                        have: format!("{other} of type {other_ty}"),
                        expect: format!("{location} of type {ty}"),
                    });
                }
                Some(_) => {}
            }
            if location.ty != KeyType::INODE_ITEM {
                continue;
            }
            let inode = InodeNo(location.objectid.0);
            if !names.refs.contains(&(inode.0, *dir, *index, bytes.clone())) {
                let (name, index) = (name.clone(), *index);
                let finding = Finding::InodeRefMissing { root, directory, name, index, inode };
                self.findings.push(finding);
            }
            let mode = names.modes.get(&inode.0);
            let expect = mode.map(|mode| FileType::from_mode(*mode));
            if let Some(expect) = expect.filter(|expect| *expect != FileType::from_disk(*ty)) {
                self.findings.push(Finding::FileTypeDiffers {
                    root,
                    directory,
                    name,
                    have: u64::from(*ty),
                    expect: u64::from(expect.to_disk()),
                });
            }
        }
    }

    /// Each DIR_ITEM has its DIR_INDEX.
    fn compare_items(&mut self, root: &Root, names: &Names) {
        let indexed: BTreeSet<(u64, &Vec<u8>)> =
            names.indexes.keys().map(|(dir, _, name)| (*dir, name)).collect();
        for (dir, name) in names.items.keys() {
            if !names.unlinked.contains(dir) && !indexed.contains(&(*dir, name)) {
                let (directory, name) = (InodeNo(*dir), Name(name.clone()));
                self.findings.push(Finding::DirIndexMissing { root: root.id, directory, name });
            }
        }
    }

    /// Each name of an inode is in its directory. That its DIR_INDEX alone is missing was said.
    fn compare_refs(&mut self, root: &Root, names: &Names) {
        let by_name: BTreeSet<(u64, &Vec<u8>)> =
            names.indexes.keys().map(|(dir, _, name)| (*dir, name)).collect();
        for (inode, dir, index, bytes) in &names.refs {
            let indexed = names.indexes.get(&(*dir, *index, bytes.clone()));
            let leads_here = |(location, _): &Target| location.objectid.0 == *inode;
            let is_exempt =
                is_own_name(InodeNo(*dir), InodeNo(*inode)) || names.unlinked.contains(dir);
            if is_exempt || indexed.is_some_and(leads_here) {
                continue;
            }
            let has_item = names.items.contains_key(&(*dir, bytes.clone()));
            if has_item && !by_name.contains(&(*dir, bytes)) {
                continue;
            }
            self.findings.push(Finding::DirEntryMissing {
                root: root.id,
                directory: InodeNo(*dir),
                name: Name(bytes.clone()),
                index: *index,
                inode: InodeNo(*inode),
            });
        }
    }
}
