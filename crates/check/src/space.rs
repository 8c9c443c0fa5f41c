//! Block groups: their chunks, their extents and the sums of those.

use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::chunk::STRIPE_LEN_BYTES;
use ubtrfs_ondisk::{LogicalAddr, RootId};

use crate::context::Context;
use crate::devices::Devices;
use crate::extents::{Extent, Extents, Group};
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
        for extent in extents.iter() {
            let len_bytes = extent.len_bytes(sector);
            total = total.saturating_add(len_bytes);
            while let Some(current) = group.filter(|group| group.end() <= extent.at.0) {
                self.check_used_of(current, used);
                (group, used) = (groups.next(), 0);
            }
            let is_inside =
                |group: &&Group| group.start <= extent.at && extent.end(sector) <= group.end();
            if let Some(what) = self.misplaced(&extent, group.filter(is_inside)) {
                let bytenr = extent.at;
                self.findings.push(Finding::ExtentOutsideGroup { bytenr, len_bytes, what });
            }
            if !extent.is_data() {
                self.check_alignment(&extent, group.filter(is_inside), sector);
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

    /// What group an extent should be in, if it is in none of that kind. Those of the type SYSTEM
    /// are for the chunk tree, which Linux reads before it knows any others.
    fn misplaced(&self, extent: &Extent, group: Option<&Group>) -> Option<&'static str> {
        let has = |flags| group.is_some_and(|group| group.flags.intersects(flags));
        if extent.is_data() {
            return (!has(BlockGroupFlags::DATA)).then_some("data");
        }
        if has(BlockGroupFlags::METADATA) {
            return None;
        }
        if !has(BlockGroupFlags::SYSTEM) {
            return Some("tree blocks");
        }
        let facts = self.blocks.get(extent.at).filter(|facts| !facts.is_lost);
        let is_others = facts.is_some_and(|facts| facts.root != RootId::CHUNK_TREE);
        is_others.then_some("tree blocks but the chunk tree's")
    }

    /// A tree block crosses no border of a stripe; stripes begin where its block group does. That it is
    /// aligned to its length no reader of now asks for; one with pages of 64 KiB might.
    fn check_alignment(&mut self, extent: &Extent, group: Option<&Group>, sector: u64) {
        let (bytenr, len_bytes) = (extent.at, extent.len_bytes(sector));
        if let Some(border) = group.and_then(|group| crossed_border(group.start, bytenr, len_bytes))
        {
            self.findings.push(Finding::BlockCrossesStripe { bytenr, border });
        } else if len_bytes != 0 && !bytenr.0.is_multiple_of(len_bytes) {
            self.findings.push(Finding::BlockUnaligned { bytenr, len_bytes });
        }
    }

    fn check_used_of(&mut self, group: &Group, expect: u64) {
        if group.used != expect {
            let (group, have) = (group.start, group.used);
            self.findings.push(Finding::GroupUsed { group, have, expect });
        }
    }
}

/// The border of a stripe between the first and the last byte of a range in a block group.
fn crossed_border(group: LogicalAddr, at: LogicalAddr, len_bytes: u64) -> Option<LogicalAddr> {
    let first = at.0.checked_sub(group.0)?;
    let last = first.checked_add(len_bytes.checked_sub(1)?)?;
    let border = (last / STRIPE_LEN_BYTES).checked_mul(STRIPE_LEN_BYTES)?;
    (border > first).then_some(LogicalAddr(group.0.checked_add(border)?))
}
