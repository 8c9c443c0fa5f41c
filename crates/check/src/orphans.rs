//! Inodes without a name, which orphan items must remember. The sums of a tree tell whether they
//! do; here the tree is read again to say which do not.

use ubtrfs_ondisk::inode::InodeItem;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{InodeNo, KeyType, ObjectId};

use crate::context::Context;
use crate::finding::Finding;
use crate::read::Pointer;
use crate::roots::Root;
use crate::table::Table;
use crate::view::View;
use crate::walk::{BATCH_BLOCKS, LEAVES_AT_ONCE};

/// What one leaf says.
#[derive(Default)]
struct Said {
    /// Inodes whose link count is 0.
    unlinked: Vec<InodeNo>,
    /// Those of them, and of the leaf before, that have a name all the same.
    named: Vec<InodeNo>,
    remembered: Vec<InodeNo>,
}

impl Said {
    fn of(view: &View) -> Self {
        let mut said = Self::default();
        let mut linked = None;
        for (_, key, data) in view.items() {
            let inode = InodeNo(key.objectid.0);
            match key.ty {
                KeyType::INODE_ITEM => match InodeItem::peek(data) {
                    Ok(item) if item.nlink.get() == 0 => said.unlinked.push(inode),
                    _ => linked = Some(inode),
                },
                KeyType::INODE_REF | KeyType::INODE_EXTREF if linked != Some(inode) => {
                    said.named.push(inode);
                }
                KeyType::ORPHAN_ITEM if key.objectid == ObjectId::ORPHAN => {
                    said.remembered.push(InodeNo(key.offset));
                }
                _ => {}
            }
        }
        said
    }
}

impl Context<'_> {
    /// Says which inodes without a name a tree does not remember. An item that remembers an inode
    /// with a name, or none, is no damage: Linux takes it away.
    pub(crate) fn explain_orphans(&mut self, root: &Root) {
        let mut unlinked = Table::<1>::new(&self.store);
        let mut known = Table::<1>::new(&self.store);
        let mut leaves = self.leaves_of(root);
        loop {
            let some: Vec<Pointer> = leaves.by_ref().take(LEAVES_AT_ONCE).collect();
            if some.is_empty() || self.store.has_failed() {
                break;
            }
            let said = self.in_parallel(&some, BATCH_BLOCKS, |pointer| {
                // What is wrong with the leaf was found when it was walked.
                let view = self.read_block(pointer, &mut Vec::new());
                view.map_or(Said::default(), |view| Said::of(&view))
            });
            for leaf in said {
                leaf.unlinked.into_iter().for_each(|inode| unlinked.push([inode.0]));
                leaf.remembered.into_iter().for_each(|inode| known.push([inode.0]));
                // That it has a name and no link was found where its items were joined.
                leaf.named.into_iter().for_each(|inode| known.push([inode.0]));
            }
        }
        drop(leaves);
        unlinked.sort_by(|[inode]| *inode);
        known.sort_by(|[inode]| *inode);
        let mut before = None;
        for [inode] in unlinked.iter() {
            if before.replace(inode) != Some(inode) && known.find(inode).is_none() {
                let inode = InodeNo(inode);
                self.findings.push(Finding::OrphanMissing { root: root.id, inode });
            }
        }
    }
}
