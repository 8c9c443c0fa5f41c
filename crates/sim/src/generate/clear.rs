//! Removing all that there is.

use ubtrfs_ondisk::inode::flags;
use ubtrfs_testkit::model::{Change, Model, TOP_LEVEL, Target};

use super::Generator;
use crate::op::{Last, Op};

impl Generator {
    /// The next operation on the way to an empty filesystem; `None` on one. What needs room comes
    /// when there is nothing left that frees some.
    pub(crate) fn clearing(&mut self, model: &Model) -> Option<Op> {
        let is_taken = |op: &Op| op.on_model(&mut model.clone(), None).is_ok();
        if let Some(op) = removals(model).into_iter().find(is_taken) {
            return Some(op);
        }
        if model.default_subvolume() != TOP_LEVEL {
            return Some(Op::SetDefaultSubvolume { root: TOP_LEVEL });
        }
        let read_only = model.subvolumes().iter().find(|(_, subvolume)| subvolume.read_only);
        if let Some((root, _)) = read_only {
            return Some(Op::SetReadOnly { root: *root, read_only: false });
        }
        let forbidding = flags::IMMUTABLE | flags::APPEND;
        let (id, node) = model.nodes().find(|(_, node)| node.flags & forbidding != 0)?;
        let change = Change { flags: Some(node.flags & !forbidding), ..Change::default() };
        Some(Op::SetAttributes { id, change })
    }

    /// Something that frees space, if a few tries find it.
    pub(super) fn clearing_somewhere(&mut self, model: &Model) -> Option<Op> {
        if self.prng.chance(1, 8) {
            return Some(self.clean_deleted());
        }
        let all = removals(model);
        (0..all.len().min(TRIES_MAX))
            .map(|_| all[self.prng.index(all.len())].clone())
            .find(|op| op.on_model(&mut model.clone(), None).is_ok())
    }
}

/// Removals that are tried before something else is done.
const TRIES_MAX: usize = 20;

/// Whatever might be removed.
fn removals(model: &Model) -> Vec<Op> {
    let last = Last::Goes;
    let mut removals = Vec::new();
    for (id, node) in model.nodes() {
        if node.nlink == 0 {
            removals.push(Op::Evict { id });
        }
        for (name, target) in node.entries().into_iter().flatten() {
            let (dir, name) = (id, name.clone());
            removals.push(match target {
                Target::Inode(_) => Op::Unlink { dir, name: name.clone(), last },
                Target::Subvolume(_) => Op::DeleteSubvolume { dir, name: name.clone() },
            });
            removals.push(Op::Rmdir { dir, name, last });
        }
    }
    removals
}
