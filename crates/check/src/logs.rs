//! Log trees: their structure. Their blocks and what they refer to are in the extent tree only
//! after a replay.

use std::ops::Range;

use ubtrfs_ondisk::file_extent::FileExtent;
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::{KeyType, RootId};

use crate::context::Context;
use crate::finding::Finding;
use crate::read::Pointer;
use crate::view::{View, number};
use crate::walk::{Kind, Visit};

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

struct LogVisitor;

impl Visit for LogVisitor {
    type Out = Vec<Range<u64>>;

    fn leaf(&self, leaf: &View, _: &Pointer, _: &mut Vec<Finding>) -> Self::Out {
        let items = leaf.items().filter(|(_, key, _)| key.ty == KeyType::EXTENT_DATA);
        items
            .filter_map(|(_, _, data)| match FileExtent::parse(data).ok()? {
                FileExtent::Regular(extent) if !extent.is_hole() => {
                    let start = extent.disk_bytenr.0;
                    Some(start..start.saturating_add(extent.disk_num_bytes))
                }
                _ => None,
            })
            .collect()
    }
}

impl Context<'_> {
    /// Walks the logs; the data that their files refer to, in order and none overlapping. Checksums
    /// of it may be in the checksum tree before its extents are in the extent tree.
    pub(crate) fn walk_logs(&mut self) -> Vec<Range<u64>> {
        let at = self.superblock.log_root.get();
        if at == 0 {
            return Vec::new();
        }
        self.findings.push(Finding::LogPresent {});
        let generation = self.generation.saturating_add(1);
        let level = self.superblock.log_root_level;
        let root = Pointer::to_root(RootId::TREE_LOG, at, generation, level);
        let leaves = self.walk(vec![root], Kind::Log, &LogRootVisitor);
        let logs: Vec<Pointer> = leaves.into_iter().flat_map(|leaf| leaf.out).collect();
        self.statistics.tree_count += number(logs.len()) + 1;
        let leaves = self.walk(logs, Kind::Log, &LogVisitor);
        let mut data: Vec<Range<u64>> = leaves.into_iter().flat_map(|leaf| leaf.out).collect();
        data.sort_unstable_by_key(|range| range.start);
        data.dedup_by(|next, range| {
            let is_joined = next.start <= range.end;
            if is_joined {
                range.end = range.end.max(next.end);
            }
            is_joined
        });
        data
    }
}
