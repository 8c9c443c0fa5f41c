//! All tree blocks that were met, with what is needed of them later: some words for each, and
//! two for its place in an index.

use std::collections::BTreeMap;

use ubtrfs_ondisk::{Generation, Key, KeyType, LogicalAddr, ObjectId, RootId};
use ubtrfs_rt::Arc;

use crate::hash;
use crate::read::Pointer;
use crate::store::Store;
use crate::table::{Index, Table};
use crate::walk::Kind;

/// What is remembered of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) at: LogicalAddr,
    pub(crate) generation: Generation,
    pub(crate) owner: RootId,
    /// The tree in which it was met first.
    pub(crate) root: RootId,
    /// The node by which it was met first; 0 of a root.
    pub(crate) parent: LogicalAddr,
    pub(crate) level: u8,
    /// Nothing of it could be used; then generation, owner, level and first key are its parent's
    /// words.
    pub(crate) is_lost: bool,
    /// A balance moved it, and may have left it shared.
    pub(crate) is_relocated: bool,
    /// In what kind of walk it was met.
    pub(crate) kind: Kind,
    pub(crate) first_key: Option<Key>,
    pub(crate) last_key: Option<Key>,
}

/// What a parent, or a root item, says.
pub(crate) fn said_by_parent(pointer: &Pointer, kind: Kind) -> Facts {
    Facts {
        at: pointer.at,
        generation: pointer.generation,
        owner: pointer.root,
        root: pointer.root,
        parent: pointer.parent,
        level: pointer.level,
        is_lost: false,
        is_relocated: false,
        kind,
        first_key: pointer.first_key,
        last_key: None,
    }
}

/// Words of the facts of a block, and one for what a summary of it has.
const WORDS: usize = 11;
const SUMMARY: usize = WORDS - 1;

const LOST: u8 = 1 << 0;
const RELOCATED: u8 = 1 << 1;
const HAS_FIRST: u8 = 1 << 2;
const HAS_LAST: u8 = 1 << 3;
const OF_FILES: u8 = 1 << 4;
const OF_LOG: u8 = 1 << 5;

impl Facts {
    fn to_words(self) -> [u64; WORDS] {
        let none = Key::new(ObjectId(0), KeyType(0), 0);
        let (first, last) = (self.first_key.unwrap_or(none), self.last_key.unwrap_or(none));
        let flags = [
            (LOST, self.is_lost),
            (RELOCATED, self.is_relocated),
            (HAS_FIRST, self.first_key.is_some()),
            (HAS_LAST, self.last_key.is_some()),
            (OF_FILES, self.kind == Kind::Files),
            (OF_LOG, self.kind == Kind::Log),
        ];
        let flags = flags.iter().fold(0, |all, (flag, is_set)| all | (flag * u8::from(*is_set)));
        let small = [self.level, first.ty.0, last.ty.0, flags, 0, 0, 0, 0];
        [
            self.at.0,
            self.generation.0,
            self.owner.0,
            self.root.0,
            self.parent.0,
            u64::from_le_bytes(small),
            first.objectid.0,
            first.offset,
            last.objectid.0,
            last.offset,
            0,
        ]
    }

    fn of_words(words: &[u64; WORDS]) -> Self {
        let [at, generation, owner, root, parent, small, first, first_offset, last, last_offset, _] =
            *words;
        let [level, first_ty, last_ty, flags, ..] = small.to_le_bytes();
        let has = |flag| flags & flag != 0;
        let key = |flag, objectid, ty, offset| {
            has(flag).then_some(Key::new(ObjectId(objectid), KeyType(ty), offset))
        };
        Self {
            at: LogicalAddr(at),
            generation: Generation(generation),
            owner: RootId(owner),
            root: RootId(root),
            parent: LogicalAddr(parent),
            level,
            is_lost: has(LOST),
            is_relocated: has(RELOCATED),
            kind: match (has(OF_FILES), has(OF_LOG)) {
                (true, _) => Kind::Files,
                (false, true) => Kind::Log,
                (false, false) => Kind::Tree,
            },
            first_key: key(HAS_FIRST, first, first_ty, first_offset),
            last_key: key(HAS_LAST, last, last_ty, last_offset),
        }
    }

    /// To read it again.
    pub(crate) fn pointer(&self) -> Pointer {
        Pointer::to_root(self.root, self.at.0, self.generation.0, self.level)
    }

    /// The pointer by which it was met first.
    pub(crate) fn edge(&self) -> Edge {
        Edge { child: self.at, parent: self.parent, root: self.root }
    }
}

/// A pointer from a node, or from a root item, to a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    pub(crate) child: LogicalAddr,
    /// 0 for a root.
    pub(crate) parent: LogicalAddr,
    /// The tree, of a root.
    pub(crate) root: RootId,
}

/// All blocks that were met.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// In the order in which they were met.
    facts: Table<WORDS>,
    by_address: Index,
    /// Pointers to blocks that had been met before.
    edges: Table<3>,
    /// Parents and children in trees that hold files of which the parent says what is not so, as a
    /// hash of both.
    refused: Index,
    /// The newest block that a tree shares with another, or with itself, for each tree.
    pub(crate) newest_shared: BTreeMap<RootId, (Generation, LogicalAddr)>,
    pub(crate) lost_count: u64,
}

fn refusal(parent: LogicalAddr, child: LogicalAddr) -> u64 {
    hash::of_numbers([9, parent.0, child.0])
}

impl Blocks {
    pub(crate) fn new(store: &Arc<Store>) -> Self {
        Self {
            facts: Table::new(store),
            by_address: Index::new(store),
            edges: Table::new(store),
            refused: Index::new(store),
            newest_shared: BTreeMap::new(),
            lost_count: 0,
        }
    }

    pub(crate) fn get(&self, at: LogicalAddr) -> Option<Facts> {
        Some(self.at_index(self.by_address.get(at.0)?))
    }

    pub(crate) fn len(&self) -> usize {
        self.facts.len()
    }

    /// The block that was met after that many others.
    pub(crate) fn at_index(&self, index: usize) -> Facts {
        Facts::of_words(&self.facts.get(index))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Facts> {
        self.facts.iter().map(|words| Facts::of_words(&words))
    }

    /// Notes a pointer; whether its block is met for the first time.
    pub(crate) fn enter(&mut self, pointer: &Pointer, kind: Kind) -> bool {
        if self.by_address.get(pointer.at.0).is_some() {
            if kind != Kind::Log {
                self.edges.push([pointer.at.0, pointer.parent.0, pointer.root.0]);
            }
            return false;
        }
        self.by_address.insert(pointer.at.0, self.facts.len());
        self.facts.push(said_by_parent(pointer, kind).to_words());
        true
    }

    /// Keeps what was seen of the block that was entered after that many others.
    pub(crate) fn set(&mut self, index: usize, facts: &Facts) {
        self.facts.set(index, facts.to_words());
    }

    /// All pointers to blocks that are in the extent tree: the first one to each, the others.
    pub(crate) fn edges(&self) -> impl Iterator<Item = Edge> {
        let first = self.iter().filter(|facts| facts.kind != Kind::Log).map(|facts| facts.edge());
        first.chain((0..self.edges.len()).map(|index| self.repeated_edge(index)))
    }

    /// How many of them are not the first to their blocks.
    pub(crate) fn repeated_edge_count(&self) -> usize {
        self.edges.len()
    }

    pub(crate) fn repeated_edge(&self, index: usize) -> Edge {
        let [child, parent, root] = self.edges.get(index);
        Edge { child: LogicalAddr(child), parent: LogicalAddr(parent), root: RootId(root) }
    }

    /// Notes that a parent is wrong about a child.
    pub(crate) fn refuse(&mut self, pointer: &Pointer) {
        let key = refusal(pointer.parent, pointer.at);
        if self.refused.get(key).is_none() {
            self.refused.insert(key, 0);
        }
    }

    pub(crate) fn is_refused(&self, parent: LogicalAddr, child: LogicalAddr) -> bool {
        self.refused.get(refusal(parent, child)).is_some()
    }

    /// A block to which a second pointer leads, which is right about it.
    pub(crate) fn note_shared(&mut self, pointer: &Pointer) {
        let Some(facts) = self.get(pointer.at) else { return };
        if facts.is_lost || facts.is_relocated {
            return;
        }
        let shared = (facts.generation, pointer.at);
        for root in [facts.root, pointer.root] {
            let newest = self.newest_shared.entry(root).or_insert(shared);
            *newest = shared.max(*newest);
        }
    }

    /// The number kept with a block; 0 if there is none.
    pub(crate) fn summary(&self, at: LogicalAddr) -> Option<u64> {
        let index = self.by_address.get(at.0)?;
        Some(self.facts.get(index)[SUMMARY])
    }

    /// Keeps a number with a block.
    pub(crate) fn set_summary(&mut self, at: LogicalAddr, number: u64) {
        if let Some(index) = self.by_address.get(at.0) {
            let before = self.facts.get(index)[SUMMARY];
            self.facts.add(index, SUMMARY, number.wrapping_sub(before));
        }
    }
}
