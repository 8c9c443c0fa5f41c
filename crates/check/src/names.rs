//! Where the names of a tree do not agree: which they are. Reads the tree again and keeps all its
//! names, so it is only asked where the sums say that something is wrong.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashSet;
use ubtrfs_ondisk::dir::{DirEntries, DirEntry, FileType};
use ubtrfs_ondisk::inode::{InodeExtrefs, InodeItem, InodeRefs};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{InodeNo, Key, KeyType, LogicalAddr};

use crate::context::Context;
use crate::finding::{Finding, Name};
use crate::read::Pointer;
use crate::roots::Root;
use crate::view::View;

/// The top directory names itself, and no directory has that name.
pub(crate) fn is_own_name(directory: InodeNo, inode: InodeNo) -> bool {
    directory == inode && inode == InodeNo::SUBVOLUME_ROOT
}

/// Where an entry leads, and the type that it gives.
type Target = (Key, u8);

/// All names of a tree.
#[derive(Default)]
struct Names {
    /// By directory and name.
    items: BTreeMap<(u64, Vec<u8>), Target>,
    /// By directory and index.
    indexes: BTreeMap<(u64, u64), (Vec<u8>, Target)>,
    /// Inode, directory, index, name.
    refs: BTreeSet<(u64, u64, u64, Vec<u8>)>,
    modes: BTreeMap<u64, u32>,
    /// Directories that are deleted: what is left in them is on its way out.
    unlinked: BTreeSet<u64>,
    /// A name stands twice in one item, which was found where the item was.
    has_duplicates: bool,
}

impl Names {
    fn add(&mut self, view: &View) {
        for (_, key, data) in view.items() {
            let inode = key.objectid.0;
            match key.ty {
                KeyType::INODE_ITEM => {
                    let Ok(item) = InodeItem::peek(data) else { continue };
                    self.modes.insert(inode, item.mode.get());
                    if item.nlink.get() == 0 {
                        self.unlinked.insert(inode);
                    }
                }
                KeyType::INODE_REF => {
                    for name in InodeRefs::new(data).filter_map(Result::ok) {
                        self.refs.insert((inode, key.offset, name.index, name.name.to_vec()));
                    }
                }
                KeyType::INODE_EXTREF => {
                    for name in InodeExtrefs::new(data).filter_map(Result::ok) {
                        let parent = name.parent.0;
                        self.refs.insert((inode, parent, name.index, name.name.to_vec()));
                    }
                }
                KeyType::DIR_ITEM => {
                    for entry in DirEntries::new(data).filter_map(Result::ok) {
                        let before =
                            self.items.insert((inode, entry.name.to_vec()), target(&entry));
                        self.has_duplicates |= before.is_some();
                    }
                }
                KeyType::DIR_INDEX => {
                    for entry in DirEntries::new(data).filter_map(Result::ok) {
                        let value = (entry.name.to_vec(), target(&entry));
                        self.indexes.insert((inode, key.offset), value);
                    }
                }
                _ => {}
            }
        }
    }
}

fn target(entry: &DirEntry<'_>) -> Target {
    (entry.item.location.key(), entry.item.ty)
}

impl Context<'_> {
    /// Says which names of a tree do not agree.
    pub(crate) fn explain_names(&mut self, root: &Root) {
        let mut names = Names::default();
        for pointer in self.leaves_of(root) {
            // What is wrong with the leaf was found when it was walked.
            if let Some(view) = self.read_block(&pointer, &mut Vec::new()) {
                names.add(&view);
            }
        }
        let before = self.findings.len();
        self.compare_indexes(root, &names);
        self.compare_items(root, &names);
        self.compare_refs(root, &names);
        // An inode without its item has no type to compare; that it has none was found.
        let has_no_item = |(inode, ..): &(u64, u64, u64, Vec<u8>)| !names.modes.contains_key(inode);
        let is_explained = self.findings.len() > before
            || names.has_duplicates
            || names.refs.iter().any(has_no_item);
        if !is_explained && names.unlinked.is_empty() {
            self.findings.push(Finding::NamesDisagree { root: root.id });
        }
    }

    /// The leaves below a root.
    pub(crate) fn leaves_of(&self, root: &Root) -> Vec<Pointer> {
        let mut seen = FxHashSet::default();
        let mut pending = vec![LogicalAddr(root.item.bytenr.get())];
        let mut leaves = Vec::new();
        while let Some(at) = pending.pop() {
            if !seen.insert(at) {
                continue;
            }
            if let Some(children) = self.blocks.children.get(&at) {
                pending.extend(children);
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
        let living = names.indexes.iter().filter(|((dir, _), _)| !names.unlinked.contains(dir));
        for ((dir, index), (bytes, (location, ty))) in living {
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
            names.indexes.iter().map(|((dir, _), (name, _))| (*dir, name)).collect();
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
            names.indexes.iter().map(|((dir, _), (name, _))| (*dir, name)).collect();
        for (inode, dir, index, bytes) in &names.refs {
            let indexed = names.indexes.get(&(*dir, *index));
            let leads_here = |(name, (location, _)): &(Vec<u8>, Target)| {
                name == bytes && location.objectid.0 == *inode
            };
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
