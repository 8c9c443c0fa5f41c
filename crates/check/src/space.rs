//! Block groups: their chunks, their extents and the sums of those.

use ubtrfs_ondisk::RootId;
use ubtrfs_ondisk::block_group::BlockGroupFlags;

use crate::context::Context;
use crate::devices::Devices;
use crate::extents::{Extents, Group};
use crate::finding::Finding;

impl Context<'_> {
    pub(crate) fn check_groups(&mut self, devices: &Devices, extents: &Extents) {
        let are_complete =
            self.is_complete(RootId::EXTENT_TREE) && self.is_complete(RootId::BLOCK_GROUP_TREE);
        if are_complete && self.is_complete(RootId::CHUNK_TREE) {
            self.check_chunks_of_groups(devices, extents);
        }
        if are_complete {
            self.check_used(extents);
        }
    }

    fn check_chunks_of_groups(&mut self, devices: &Devices, extents: &Extents) {
        for group in &extents.groups {
            let Some(chunk) = devices.chunks.get(&group.start) else {
                self.findings.push(Finding::GroupWithoutChunk { group: group.start });
                continue;
            };
            if group.len_bytes != chunk.len_bytes {
                self.findings.push(Finding::GroupDisagrees {
                    group: group.start,
                    what: "length",
                    have: group.len_bytes.to_string(),
                    expect: chunk.len_bytes.to_string(),
                });
            }
            if group.flags != chunk.flags {
                self.findings.push(Finding::GroupDisagrees {
                    group: group.start,
                    what: "type",
                    have: group.flags.to_string(),
                    expect: chunk.flags.to_string(),
                });
            }
        }
        for start in devices.chunks.keys() {
            if extents.groups.binary_search_by_key(start, |group| group.start).is_err() {
                self.findings.push(Finding::GroupMissing { chunk: *start });
            }
        }
    }

    /// Each extent is inside a group for its kind, and each group's count is their sum.
    fn check_used(&mut self, extents: &Extents) {
        let sector = self.sector();
        let mut groups = extents.groups.iter();
        let mut group: Option<&Group> = groups.next();
        let (mut used, mut total) = (0_u64, 0_u64);
        for extent in &extents.list {
            let len_bytes = extent.len_bytes(sector);
            total = total.saturating_add(len_bytes);
            while let Some(current) = group.filter(|group| group.end() <= extent.at.0) {
                self.check_used_of(current, used);
                (group, used) = (groups.next(), 0);
            }
            let what = if extent.is_data() { "data" } else { "tree blocks" };
            match group.filter(|group| {
                group.start <= extent.at
                    && extent.end(sector) <= group.end()
                    && fits(group, extent.is_data())
            }) {
                Some(_) => {}
                None => self.findings.push(Finding::ExtentOutsideGroup {
                    bytenr: extent.at,
                    len_bytes,
                    what,
                }),
            }
            if group.is_some_and(|group| group.start <= extent.at) {
                used = used.saturating_add(len_bytes);
            }
        }
        while let Some(current) = group {
            self.check_used_of(current, used);
            (group, used) = (groups.next(), 0);
        }
        let have = self.superblock.bytes_used.get();
        if have != total {
            self.findings.push(Finding::SuperblockBytesUsed { have, expect: total });
        }
    }

    fn check_used_of(&mut self, group: &Group, expect: u64) {
        if group.used != expect {
            let (group, have) = (group.start, group.used);
            self.findings.push(Finding::GroupUsed { group, have, expect });
        }
    }
}

fn fits(group: &Group, is_data: bool) -> bool {
    let wanted = if is_data {
        BlockGroupFlags::DATA
    } else {
        BlockGroupFlags::METADATA | BlockGroupFlags::SYSTEM
    };
    group.flags.intersects(wanted)
}
