//! Reading leaves again, where something is to be looked at once more: those that were met, in
//! their order, or those of one tree. What is wrong with a leaf was found when it was walked.

use ubtrfs_ondisk::LogicalAddr;

use crate::blocks::Facts;
use crate::context::Context;
use crate::finding::Finding;
use crate::read::Pointer;
use crate::roots::Root;
use crate::table::Index;
use crate::view::View;
use crate::walk::LEAVES_AT_ONCE;

/// Which leaves are read again, and what is done with each.
pub(crate) struct LeavesRead<A, W> {
    /// How many a thread takes at a time.
    pub(crate) batch: usize,
    pub(crate) is_wanted: A,
    pub(crate) work: W,
}

impl Context<'_> {
    /// Reads leaves that were met, and hands over what was made of each, in their order. Returns how many could
    /// not be read this time.
    pub(crate) fn read_leaves<T, A, W>(
        &self,
        read: &LeavesRead<A, W>,
        mut take: impl FnMut(T),
    ) -> usize
    where
        T: Send,
        A: Fn(&Facts) -> bool,
        W: Fn(&View) -> T + Sync,
    {
        let wanted = |facts: &Facts| facts.level == 0 && !facts.is_lost && (read.is_wanted)(facts);
        let work = &read.work;
        let mut pointers = self.blocks.iter().filter(wanted).map(|facts| facts.pointer());
        let mut lost_count = 0;
        loop {
            let some: Vec<Pointer> = pointers.by_ref().take(LEAVES_AT_ONCE).collect();
            if some.is_empty() || self.store.has_failed() {
                return lost_count;
            }
            let results = self.in_parallel(&some, read.batch, |pointer| {
                self.read_block(pointer, &mut Vec::new()).map(|view| work(&view))
            });
            lost_count += results.iter().filter(|result| result.is_none()).count();
            results.into_iter().flatten().for_each(&mut take);
        }
    }

    /// The leaves below a root, in the order of the tree.
    pub(crate) fn leaves_of(&self, root: &Root) -> LeavesOf<'_, '_> {
        let seen = Index::new(&self.store);
        LeavesOf { check: self, seen, pending: vec![LogicalAddr(root.item.bytenr.get())] }
    }
}

/// The leaves of one tree.
pub(crate) struct LeavesOf<'c, 'o> {
    check: &'c Context<'o>,
    /// A damaged tree may come to a block several times.
    seen: Index,
    /// The next one last.
    pending: Vec<LogicalAddr>,
}

impl Iterator for LeavesOf<'_, '_> {
    type Item = Pointer;

    fn next(&mut self) -> Option<Pointer> {
        while let Some(at) = self.pending.pop() {
            let is_new = self.seen.get(at.0).is_none();
            let Some(facts) = self.check.blocks.get(at).filter(|facts| is_new && !facts.is_lost)
            else {
                continue;
            };
            self.seen.insert(at.0, 0);
            if facts.level == 0 {
                return Some(facts.pointer());
            }
            let children = self.check.children_of(&facts, &mut Vec::new()).unwrap_or_default();
            self.pending.extend(children.iter().rev().map(|child| child.at));
        }
        None
    }
}

impl Context<'_> {
    /// The children of a node that was met; `None` where it cannot be read this time.
    pub(crate) fn children_of(
        &self,
        node: &Facts,
        found: &mut Vec<Finding>,
    ) -> Option<Vec<Pointer>> {
        let pointer = node.pointer();
        let view = self.read_block(&pointer, found)?;
        Some((0..view.len()).filter_map(|slot| pointer.child(&view, slot)).collect())
    }
}
