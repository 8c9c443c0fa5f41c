//! Log trees: their structure. Their blocks and what they refer to are in the extent tree only
//! after a replay.

use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::{KeyType, RootId};

use crate::context::Context;
use crate::finding::Finding;
use crate::read::Pointer;
use crate::view::{View, number};
use crate::walk::{Kind, StructureOnly, Visit};

struct LogRootVisitor;

impl Visit for LogRootVisitor {
    type Out = Vec<Pointer>;

    fn leaf(&self, leaf: &View, _: &Pointer, _: &mut Vec<Finding>) -> Vec<Pointer> {
        let items = leaf.items().filter(|(_, key, _)| key.ty == KeyType::ROOT_ITEM);
        items
            .filter_map(|(_, _, data)| {
                let item = RootItem::parse(data).ok()?;
                let (at, generation) = (item.bytenr.get(), item.generation.get());
                Some(Pointer::to_root(RootId::TREE_LOG, at, generation, item.level))
            })
            .collect()
    }
}

impl Context<'_> {
    pub(crate) fn walk_logs(&mut self) {
        let at = self.superblock.log_root.get();
        if at == 0 {
            return;
        }
        self.findings.push(Finding::LogPresent {});
        let generation = self.generation.saturating_add(1);
        let level = self.superblock.log_root_level;
        let root = Pointer::to_root(RootId::TREE_LOG, at, generation, level);
        let leaves = self.walk(vec![root], Kind::Log, &LogRootVisitor);
        let logs: Vec<Pointer> = leaves.into_iter().flat_map(|leaf| leaf.out).collect();
        self.statistics.tree_count += number(logs.len()) + 1;
        self.walk(logs, Kind::Log, &StructureOnly);
    }
}
