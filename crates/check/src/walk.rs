//! Walking trees: each block is read once, by whichever thread comes to it, and what was seen comes
//! back in the order of the tree, so that nothing depends on the threads.

use std::collections::BTreeMap;
use std::convert::Infallible;

use rustc_hash::{FxHashMap, FxHashSet};
use ubtrfs_ondisk::block::FLAG_RELOC;
use ubtrfs_ondisk::{Generation, Key, LogicalAddr, RootId};
use ubtrfs_rt::{AtomicUsize, Executor, Mutex, Ordering};

use crate::context::Context;
use crate::finding::Finding;
use crate::read::Pointer;
use crate::view::{View, number};

/// Blocks that a thread takes at a time.
pub(crate) const BATCH_BLOCKS: usize = 32;

/// Blocks whose findings are held before those beyond the limit are dropped.
const VISITED_MAX: usize = 1 << 14;

/// What is remembered of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) generation: Generation,
    pub(crate) owner: RootId,
    /// The tree in which it was met first.
    pub(crate) root: RootId,
    pub(crate) level: u8,
    /// Nothing of it could be used; then the fields above are its parent's words.
    pub(crate) is_lost: bool,
    /// A balance moved it, and may have left it shared.
    is_relocated: bool,
    pub(crate) first_key: Option<Key>,
    pub(crate) last_key: Option<Key>,
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
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    pub(crate) facts: FxHashMap<LogicalAddr, Facts>,
    pub(crate) edges: Vec<Edge>,
    /// Children of the nodes in trees that hold files.
    pub(crate) children: FxHashMap<LogicalAddr, Vec<LogicalAddr>>,
    /// Parents and children there of which the parent says what is not so.
    pub(crate) refused: FxHashSet<(LogicalAddr, LogicalAddr)>,
    /// The newest block that a tree shares with another, or with itself, for each tree.
    pub(crate) newest_shared: BTreeMap<RootId, (Generation, LogicalAddr)>,
    pub(crate) lost_count: u64,
}

impl Blocks {
    /// A block to which a second pointer leads, which is right about it.
    fn note_shared(&mut self, pointer: &Pointer) {
        let Some(facts) = self.facts.get(&pointer.at) else { return };
        if facts.is_lost || facts.is_relocated {
            return;
        }
        let shared = (facts.generation, pointer.at);
        for root in [facts.root, pointer.root] {
            let newest = self.newest_shared.entry(root).or_insert(shared);
            *newest = shared.max(*newest);
        }
    }

    pub(crate) fn with_room(count: usize) -> Self {
        let mut blocks = Self::default();
        blocks.facts.reserve(count);
        blocks.edges.reserve(count);
        blocks
    }
}

/// What is done with each leaf.
pub(crate) trait Visit: Sync {
    type Out: Send;

    fn leaf(&self, leaf: &View, pointer: &Pointer, found: &mut Vec<Finding>) -> Self::Out;
}

/// A visitor that looks at nothing beyond the structure.
pub(crate) struct StructureOnly;

impl Visit for StructureOnly {
    type Out = ();

    fn leaf(&self, _: &View, _: &Pointer, _: &mut Vec<Finding>) {}
}

/// A leaf that was visited.
pub(crate) struct Visited<T> {
    pub(crate) pointer: Pointer,
    pub(crate) out: T,
}

/// What is walked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A tree whose blocks are in the extent tree.
    Tree,
    /// The same, and which node has which children is kept.
    Files,
    /// A log: its blocks are not in the extent tree, and of the next generation.
    Log,
}

struct Outcome<T> {
    facts: Facts,
    children: Vec<Pointer>,
    out: Option<T>,
    found: Vec<Finding>,
}

impl Context<'_> {
    /// Walks trees from their roots; the leaves come in the order of each tree.
    pub(crate) fn walk<V: Visit>(
        &mut self,
        roots: Vec<Pointer>,
        kind: Kind,
        visitor: &V,
    ) -> Vec<Visited<V::Out>> {
        let mut leaves = Vec::new();
        let mut next = roots;
        while !next.is_empty() {
            let (work, again) = self.enter(&next, kind);
            next = Vec::new();
            for work in work.chunks(VISITED_MAX) {
                let outcomes = self.visit_all(work, kind, visitor);
                for (pointer, outcome) in work.iter().zip(outcomes) {
                    let pointer = *pointer;
                    self.findings.extend(outcome.found);
                    self.statistics.block_count += 1;
                    self.lost(pointer.root, outcome.facts.is_lost);
                    self.blocks.facts.insert(pointer.at, outcome.facts);
                    if kind == Kind::Files && outcome.facts.level > 0 {
                        let children = outcome.children.iter().map(|child| child.at).collect();
                        self.blocks.children.insert(pointer.at, children);
                    }
                    next.extend(outcome.children);
                    leaves.extend(outcome.out.map(|out| Visited { pointer, out }));
                }
            }
            for pointer in again {
                if !self.agree(&pointer) && kind == Kind::Files {
                    self.blocks.refused.insert((pointer.parent, pointer.at));
                } else if kind == Kind::Files {
                    self.blocks.note_shared(&pointer);
                }
            }
        }
        leaves
    }

    /// Notes the pointers; those to blocks that are met for the first time, and the rest.
    fn enter(&mut self, pointers: &[Pointer], kind: Kind) -> (Vec<Pointer>, Vec<Pointer>) {
        let mut work = Vec::with_capacity(pointers.len());
        let mut again = Vec::new();
        for pointer in pointers {
            if kind != Kind::Log {
                let (child, parent) = (pointer.at, pointer.parent);
                self.blocks.edges.push(Edge { child, parent, root: pointer.root });
            }
            match self.blocks.facts.entry(pointer.at) {
                std::collections::hash_map::Entry::Occupied(_) => again.push(*pointer),
                std::collections::hash_map::Entry::Vacant(entry) => {
                    entry.insert(said_by_parent(pointer));
                    work.push(*pointer);
                }
            }
        }
        (work, again)
    }

    /// A block that was read before must be what this parent says too; whether it is.
    fn agree(&mut self, pointer: &Pointer) -> bool {
        let Some(facts) = self.blocks.facts.get(&pointer.at).copied() else { return true };
        if facts.is_lost {
            return true;
        }
        let before = self.findings.len();
        let mut differ = |what, have: String, expect: String| {
            self.findings.push(Finding::ParentDisagrees {
                root: pointer.root,
                block: pointer.at,
                parent: pointer.parent,
                what,
                have,
                expect,
            });
        };
        if facts.generation != pointer.generation {
            differ("generation", facts.generation.to_string(), pointer.generation.to_string());
        }
        if facts.level != pointer.level {
            differ("level", facts.level.to_string(), pointer.level.to_string());
        }
        let both_hold_files = facts.root.is_subvolume() && pointer.root.is_subvolume();
        let is_copy = [facts.root, pointer.root].contains(&RootId::TREE_RELOC);
        if facts.root != pointer.root && !both_hold_files && !is_copy {
            differ("tree", facts.root.to_string(), pointer.root.to_string());
        }
        if let (Some(have), Some(expect)) = (facts.first_key, pointer.first_key)
            && have != expect
        {
            differ("first key", have.to_string(), expect.to_string());
        }
        if let (Some(last), Some(limit)) = (facts.last_key, pointer.limit)
            && last >= limit
        {
            differ("last key below", last.to_string(), limit.to_string());
        }
        self.findings.len() == before
    }

    fn visit_all<V: Visit>(
        &self,
        work: &[Pointer],
        kind: Kind,
        visitor: &V,
    ) -> Vec<Outcome<V::Out>> {
        self.in_parallel(work, BATCH_BLOCKS, |pointer| self.visit(pointer, kind, visitor))
    }

    /// Does `work` for each item, on all threads, and returns the results in the items' order.
    pub(crate) fn in_parallel<I: Sync, T: Send>(
        &self,
        items: &[I],
        batch: usize,
        work: impl Fn(&I) -> T + Sync,
    ) -> Vec<T> {
        let lanes = self.options.executor.thread_count().min(items.len().div_ceil(batch));
        if lanes <= 1 {
            return items.iter().map(work).collect();
        }
        let next = AtomicUsize::new(0);
        let done = Mutex::new(Vec::with_capacity(items.len().div_ceil(batch)));
        let run = |_: &mut [()]| -> Result<(), Infallible> {
            loop {
                let start = next.fetch_add(batch, Ordering::Relaxed);
                let Some(rest) = items.get(start..).filter(|rest| !rest.is_empty()) else {
                    return Ok(());
                };
                let results: Vec<T> = rest.iter().take(batch).map(&work).collect();
                done.lock().push((start, results));
            }
        };
        let Ok(()) = Executor::Threads(lanes).for_each_part(&mut vec![(); lanes], run);
        let mut done = done.into_inner();
        done.sort_unstable_by_key(|(start, _)| *start);
        done.into_iter().flat_map(|(_, results)| results).collect()
    }

    fn visit<V: Visit>(&self, pointer: &Pointer, kind: Kind, visitor: &V) -> Outcome<V::Out> {
        let mut found = Vec::new();
        let view = self.read_block(pointer, &mut found);
        self.count_progress(number(self.geometry.nodesize_bytes));
        let Some(view) = view else {
            let facts = Facts { is_lost: true, ..said_by_parent(pointer) };
            return Outcome { facts, children: Vec::new(), out: None, found };
        };
        self.judge(pointer, &view, kind, &mut found);
        let facts = Facts {
            generation: Generation(view.header().generation.get()),
            owner: view.owner(),
            root: pointer.root,
            level: view.level(),
            is_lost: false,
            is_relocated: view.header().flags.get() & FLAG_RELOC != 0,
            first_key: view.first_key(),
            last_key: view.last_key(),
        };
        let mut children = Vec::new();
        let mut out = None;
        if view.level() == 0 {
            out = Some(visitor.leaf(&view, pointer, &mut found));
        } else {
            children.extend((0..view.len()).filter_map(|slot| pointer.child(&view, slot)));
            self.judge_generations(pointer, &view, kind, &mut found);
        }
        Outcome { facts, children, out, found }
    }

    /// What neither the block alone nor its parent's pointer tells.
    fn judge(&self, pointer: &Pointer, view: &View, kind: Kind, found: &mut Vec<Finding>) {
        if let (Some(last), Some(limit)) = (view.last_key(), pointer.limit)
            && last >= limit
        {
            found.push(Finding::KeyOrderAcrossBlocks {
                root: pointer.root,
                block: pointer.at,
                slot: number(view.len() - 1),
                have: last,
                limit,
            });
        }
        let have = Generation(view.header().generation.get());
        let limit = self.generation_max(kind);
        if have > limit {
            let (root, block) = (pointer.root, pointer.at);
            found.push(Finding::BlockGeneration { root, block, have, limit });
        }
    }

    fn generation_max(&self, kind: Kind) -> Generation {
        Generation(self.generation.saturating_add(u64::from(kind == Kind::Log)))
    }

    /// A block is copied before it is changed, and all above it with it: no child is newer. One of
    /// the future is found where it is read.
    fn judge_generations(
        &self,
        pointer: &Pointer,
        view: &View,
        kind: Kind,
        found: &mut Vec<Finding>,
    ) {
        let limit = Generation(view.header().generation.get());
        let max = self.generation_max(kind);
        for slot in 0..view.len() {
            let have = view.ptr(slot).map_or(limit, |ptr| Generation(ptr.generation.get()));
            if have > limit && have <= max {
                let (root, block, slot) = (pointer.root, pointer.at, number(slot));
                found.push(Finding::PointerGeneration { root, block, slot, have, limit });
            }
        }
    }
}

fn said_by_parent(pointer: &Pointer) -> Facts {
    Facts {
        generation: pointer.generation,
        owner: pointer.root,
        root: pointer.root,
        level: pointer.level,
        is_lost: false,
        is_relocated: false,
        first_key: pointer.first_key,
        last_key: None,
    }
}
