//! Where the names of a tree do not agree: which they are. Reads the tree twice again, so it is only
//! asked where the sums say that something is wrong: first for sums of parts of its names, then for
//! the names of those parts that do not come to zero. Others are not kept.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashSet;
use ubtrfs_ondisk::dir::{DirEntries, DirEntry, FileType};
use ubtrfs_ondisk::inode::{InodeExtrefs, InodeItem, InodeRefs};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{InodeNo, Key, KeyType, LogicalAddr};

use crate::context::Context;
use crate::files::{hash_of_entry, hash_of_target, is_inode};
use crate::finding::{Finding, Name};
use crate::hash;
use crate::read::Pointer;
use crate::roots::Root;
use crate::run::{Sums, hash_of_type};
use crate::view::View;

/// Parts in which the names of a tree are summed.
const PARTS: u64 = 4096;
/// Parts whose names are kept: of more there are more wrong names than anybody reads.
const PARTS_EXPLAINED_MAX: usize = 64;

/// The top directory names itself, and no directory has that name.
pub(crate) fn is_own_name(directory: InodeNo, inode: InodeNo) -> bool {
    directory == inode && inode == InodeNo::SUBVOLUME_ROOT
}

/// The part to which a name belongs, by whichever item it is met in.
fn part_of(directory: u64, name: &[u8]) -> usize {
    let part = hash::of_numbers([8, directory, hash::of_bytes(name)]) % PARTS;
    usize::try_from(part).expect("below the number of parts")
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
        let leaves = self.leaves_of(root);
        let mut parts = vec![Sums::default(); usize::try_from(PARTS).expect("a few thousand")];
        self.read_names(&leaves, |directory, name, said| {
            add_to(&mut parts[part_of(directory, name)], directory, name, said);
        });
        let mut off: Vec<bool> = parts.iter().map(|sums| *sums != Sums::default()).collect();
        let mut count = 0;
        let mut has_more = false;
        for is_off in off.iter_mut().filter(|is_off| **is_off) {
            count += 1;
            *is_off = count <= PARTS_EXPLAINED_MAX;
            has_more |= !*is_off;
        }
        let mut names = Names::default();
        names.unlinked = self.read_names(&leaves, |directory, name, said| {
            if off[part_of(directory, name)] {
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

    /// Hands over all names below some leaves; returns the directories that are deleted.
    fn read_names(
        &self,
        leaves: &[Pointer],
        mut each: impl FnMut(u64, &[u8], &Said),
    ) -> BTreeSet<u64> {
        let mut reader = Reader::default();
        for pointer in leaves {
            // What is wrong with the leaf was found when it was walked.
            if let Some(view) = self.read_block(pointer, &mut Vec::new()) {
                reader.read(&view, |directory, name, said| each(directory, name, &said));
            }
        }
        reader.unlinked
    }

    /// The leaves below a root, in the order of the tree.
    pub(crate) fn leaves_of(&self, root: &Root) -> Vec<Pointer> {
        let mut seen = FxHashSet::default();
        let mut pending = vec![LogicalAddr(root.item.bytenr.get())];
        let mut leaves = Vec::new();
        while let Some(at) = pending.pop() {
            if !seen.insert(at) {
                continue;
            }
            if let Some(children) = self.blocks.children.get(&at) {
                pending.extend(children.iter().rev());
            } else if let Some(facts) = self.blocks.facts.get(&at).filter(|facts| facts.level == 0)
            {
                let (generation, level) = (facts.generation.0, facts.level);
                leaves.push(Pointer::to_root(facts.root, at.0, generation, level));
            }
        }
        leaves
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
