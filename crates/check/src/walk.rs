//! Walking trees: each block is read once, by whichever thread comes to it, and what was seen comes
//! back in the order of the tree, so that nothing depends on the threads. A walk goes down first:
//! what it holds is the pointers of a few nodes on each level.

use ubtrfs_ondisk::block::{FLAG_RELOC, LEVEL_COUNT_MAX};
use ubtrfs_ondisk::{Generation, RootId};
use ubtrfs_rt::Mutex;

use crate::blocks::{Facts, said_by_parent};
use crate::context::Context;
use crate::finding::Finding;
use crate::read::Pointer;
use crate::report::Counts;
use crate::view::{View, number};

/// Blocks that a thread takes at a time.
pub(crate) const BATCH_BLOCKS: usize = 16;

/// Leaves that are visited before what was seen of them is taken in.
pub(crate) const LEAVES_AT_ONCE: usize = 512;
/// Nodes that are visited before their children are.
const NODES_AT_ONCE: usize = 8;

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
    /// Findings that would not be kept.
    counted: Counts,
}

impl Context<'_> {
    /// Walks trees from their roots, and hands over each leaf; they come in the order of each tree.
    pub(crate) fn walk<V: Visit>(
        &mut self,
        roots: Vec<Pointer>,
        kind: Kind,
        visitor: &V,
        mut take: impl FnMut(&mut Self, &Pointer, V::Out),
    ) {
        // For each level, what is still to be visited, the next one last.
        let mut pending = vec![reversed(roots)];
        while let Some(level) = pending.last_mut() {
            if level.is_empty() {
                pending.pop();
                continue;
            }
            if self.store.has_failed() {
                return;
            }
            let is_leaf = level.last().is_some_and(|pointer| pointer.level == 0);
            let most = if is_leaf { LEAVES_AT_ONCE } else { NODES_AT_ONCE };
            let mut pointers = level.split_off(level.len().saturating_sub(most));
            pointers.reverse();
            let may_go_down = pending.len() < LEVEL_COUNT_MAX;
            let mut below = Vec::new();
            let first = self.blocks.len();
            let (work, again) = self.enter(&pointers, kind);
            let outcomes =
                self.in_parallel(&work, BATCH_BLOCKS, |pointer| self.visit(pointer, kind, visitor));
            for ((index, pointer), outcome) in (first..).zip(&work).zip(outcomes) {
                self.findings.extend(outcome.found);
                self.findings.count(outcome.counted);
                self.statistics.block_count += 1;
                // Children of what is no node by its parent's word may go on without an end.
                let is_cut = !may_go_down && !outcome.children.is_empty();
                self.lost(pointer.root, outcome.facts.is_lost || is_cut);
                self.blocks.set(index, &outcome.facts);
                if may_go_down {
                    below.extend(outcome.children);
                }
                if let Some(out) = outcome.out {
                    take(self, pointer, out);
                }
            }
            for pointer in again {
                if !self.agree(&pointer) && kind == Kind::Files {
                    self.blocks.refuse(&pointer);
                } else if kind == Kind::Files {
                    self.blocks.note_shared(&pointer);
                }
            }
            if !below.is_empty() {
                pending.push(reversed(below));
            }
        }
    }

    /// Notes the pointers; those to blocks that are met for the first time, and the rest.
    fn enter(&mut self, pointers: &[Pointer], kind: Kind) -> (Vec<Pointer>, Vec<Pointer>) {
        pointers.iter().partition(|pointer| self.blocks.enter(pointer, kind))
    }

    /// A block that was read before must be what this parent says too; whether it is.
    fn agree(&mut self, pointer: &Pointer) -> bool {
        let Some(facts) = self.blocks.get(pointer.at) else { return true };
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

    /// Does `work` for each item, on all threads, and returns the results in the items' order.
    pub(crate) fn in_parallel<I: Sync, T: Send>(
        &self,
        items: &[I],
        batch: usize,
        work: impl Fn(&I) -> T + Sync,
    ) -> Vec<T> {
        let done = Mutex::new(Vec::with_capacity(items.len().div_ceil(batch)));
        self.options.executor.for_each_next(items.chunks(batch).enumerate(), |(index, batch)| {
            let results: Vec<T> = batch.iter().map(&work).collect();
            done.lock().push((index, results));
        });
        let mut done = done.into_inner();
        done.sort_unstable_by_key(|(index, _)| *index);
        done.into_iter().flat_map(|(_, results)| results).collect()
    }

    fn visit<V: Visit>(&self, pointer: &Pointer, kind: Kind, visitor: &V) -> Outcome<V::Out> {
        let mut outcome = self.look_at(pointer, kind, visitor);
        if self.findings.is_full() {
            outcome.counted = Counts::of(&std::mem::take(&mut outcome.found));
        }
        outcome
    }

    fn look_at<V: Visit>(&self, pointer: &Pointer, kind: Kind, visitor: &V) -> Outcome<V::Out> {
        let mut found = Vec::new();
        let view = self.read_block(pointer, &mut found);
        self.count_progress(number(self.geometry.nodesize_bytes));
        let Some(view) = view else {
            let facts = Facts { is_lost: true, ..said_by_parent(pointer, kind) };
            let counted = Counts::default();
            return Outcome { facts, children: Vec::new(), out: None, found, counted };
        };
        self.judge(pointer, &view, kind, &mut found);
        let facts = Facts {
            generation: Generation(view.header().generation.get()),
            owner: view.owner(),
            level: view.level(),
            is_relocated: view.header().flags.get() & FLAG_RELOC != 0,
            first_key: view.first_key(),
            last_key: view.last_key(),
            ..said_by_parent(pointer, kind)
        };
        let mut children = Vec::new();
        let mut out = None;
        if view.level() == 0 {
            out = Some(visitor.leaf(&view, pointer, &mut found));
        } else {
            children.extend((0..view.len()).filter_map(|slot| pointer.child(&view, slot)));
            self.judge_generations(pointer, &view, kind, &mut found);
        }
        Outcome { facts, children, out, found, counted: Counts::default() }
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

/// The next one last.
fn reversed(mut pointers: Vec<Pointer>) -> Vec<Pointer> {
    pointers.reverse();
    pointers
}
