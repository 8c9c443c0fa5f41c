//! Log trees: their structure. Their blocks and what they refer to are in the extent tree only
//! after a replay.

use std::ops::Range;

use ubtrfs_ondisk::file_extent::FileExtent;
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::{KeyType, RootId};

use crate::context::Context;
use crate::finding::Finding;
use crate::read::Pointer;
use crate::table::Table;
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

/// The data that logs refer to, in order and none overlapping.
pub(crate) struct Logged(Table<2>);

impl Logged {
    /// The end of the range that holds an address.
    pub(crate) fn end_at(&self, at: u64) -> Option<u64> {
        let [_, end] = self.0.get(self.0.count_up_to(at).checked_sub(1)?);
        (at < end).then_some(end)
    }
}

impl Context<'_> {
    /// Walks the logs, for the data that their files refer to: checksums of it may be in the
    /// checksum tree before its extents are in the extent tree.
    pub(crate) fn walk_logs(&mut self) -> Logged {
        let mut logged = Logged(Table::new(&self.store));
        let at = self.superblock.log_root.get();
        if at == 0 {
            return logged;
        }
        self.findings.push(Finding::LogPresent {});
        let generation = self.generation.saturating_add(1);
        let level = self.superblock.log_root_level;
        let root = Pointer::to_root(RootId::TREE_LOG, at, generation, level);
        let mut logs = Vec::new();
        self.walk(vec![root], Kind::Log, &LogRootVisitor, |_, _, found| logs.extend(found));
        self.statistics.tree_count += number(logs.len()) + 1;
        let mut data = Table::<2>::new(&self.store);
        self.walk(logs, Kind::Log, &LogVisitor, |_, _, ranges| {
            ranges.into_iter().for_each(|range| data.push([range.start, range.end]));
        });
        data.sort_by(|[start, _]| *start);
        let mut last: Option<[u64; 2]> = None;
        for [start, end] in data.iter() {
            match &mut last {
                Some(last) if start <= last[1] => last[1] = last[1].max(end),
                _ => last.replace([start, end]).into_iter().for_each(|it| logged.0.push(it)),
            }
        }
        last.into_iter().for_each(|it| logged.0.push(it));
        logged
    }
}
