//! Chunks, devices and device extents.

use std::collections::{BTreeMap, BTreeSet};

use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::chunk::Chunk;
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::misc::{DevExtent, DevItem, OnDisk};
use ubtrfs_ondisk::verify;
use ubtrfs_ondisk::{DeviceId, KeyType, LogicalAddr, PhysicalAddr, RootId, Uuid};
use ubtrfs_volume::Error;

use crate::Result;
use crate::context::Context;
use crate::finding::Finding;
use crate::read::Pointer;
use crate::roots::Roots;
use crate::superblock::generation_on;
use crate::view::View;
use crate::walk::{Kind, Visit};

/// What the chunk tree holds.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    pub(crate) chunks: BTreeMap<LogicalAddr, Chunk>,
    items: Vec<DevItem>,
}

/// An item of the device tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocated {
    device: DeviceId,
    offset: u64,
    len_bytes: u64,
    chunk: LogicalAddr,
}

struct ChunkVisitor;

impl Visit for ChunkVisitor {
    type Out = (Vec<Chunk>, Vec<DevItem>);

    fn leaf(&self, leaf: &View, _: &Pointer, _: &mut Vec<Finding>) -> Self::Out {
        let (mut chunks, mut devices) = (Vec::new(), Vec::new());
        for (_, key, data) in leaf.items() {
            match key.ty {
                KeyType::CHUNK_ITEM => {
                    chunks.extend(Chunk::parse(LogicalAddr(key.offset), data).ok());
                }
                KeyType::DEV_ITEM => devices.extend(DevItem::peek(data).ok().copied()),
                _ => {}
            }
        }
        (chunks, devices)
    }
}

struct DevExtentVisitor;

impl Visit for DevExtentVisitor {
    type Out = Vec<Allocated>;

    fn leaf(&self, leaf: &View, _: &Pointer, _: &mut Vec<Finding>) -> Self::Out {
        let extents = leaf.items().filter(|(_, key, _)| key.ty == KeyType::DEV_EXTENT);
        extents
            .filter_map(|(_, key, data)| {
                let item = DevExtent::peek(data).ok()?;
                Some(Allocated {
                    device: DeviceId(key.objectid.0),
                    offset: key.offset,
                    len_bytes: item.length.get(),
                    chunk: LogicalAddr(item.chunk_offset.get()),
                })
            })
            .collect()
    }
}

impl Context<'_> {
    /// Reads the chunk tree and gives its chunks to the volume.
    ///
    /// # Errors
    /// For a missing device, or a profile that cannot be read.
    pub(crate) fn load_devices(&mut self) -> Result<Devices> {
        let superblock = &self.superblock;
        let pointer = Pointer::to_root(
            RootId::CHUNK_TREE,
            superblock.chunk_root.get(),
            superblock.chunk_root_generation.get(),
            superblock.chunk_root_level,
        );
        let mut devices = Devices::default();
        self.walk(vec![pointer], Kind::Tree, &ChunkVisitor, |_, _, (chunks, items)| {
            devices.chunks.extend(chunks.into_iter().map(|chunk| (chunk.start, chunk)));
            devices.items.extend(items);
        });
        self.check_sys_chunks(&devices);
        self.bring_up_late_devices(&devices);
        let known = self.known_devices(&devices);
        for chunk in devices.chunks.values() {
            self.add_chunk(chunk, known.as_ref())?;
        }
        Ok(devices)
    }

    /// A device whose last superblock a power cut kept from it says of itself what was so before the
    /// last commit; the chunk tree says what is so. That it is late is a note of its own.
    fn bring_up_late_devices(&self, devices: &Devices) {
        for in_super in self.volume.device_items() {
            let medium = self.volume.device(DeviceId(in_super.devid.get()));
            let generation = medium.and_then(|medium| generation_on(&*medium));
            let item = devices.items.iter().find(|item| item.devid == in_super.devid);
            if let (Some(generation), Some(item)) = (generation, item)
                && generation < self.generation
            {
                let (total_bytes, bytes_used) = (item.total_bytes, item.bytes_used);
                self.volume.set_device_item(DevItem { total_bytes, bytes_used, ..in_super });
            }
        }
    }

    /// The devices that the filesystem has, where all are there.
    fn known_devices(&self, devices: &Devices) -> Option<BTreeSet<u64>> {
        let there = self.volume.device_items();
        let are_all = self.volume.missing_devices().is_empty()
            && crate::view::number(there.len()) == self.superblock.num_devices.get();
        let all = there.iter().chain(&devices.items).map(|item| item.devid.get());
        are_all.then(|| all.collect())
    }

    /// Takes a chunk into the volume. One that cannot be is left out: of what lies in it nothing can be
    /// read, and the rest is judged.
    fn add_chunk(&mut self, chunk: &Chunk, known: Option<&BTreeSet<u64>>) -> Result<()> {
        let sector = self.superblock.sectorsize.get();
        let mut is_bad = false;
        if let Err(corruption) = verify::chunk(chunk, sector, Some(self.incompat)) {
            self.bad_chunk(chunk, corruption.to_string());
            is_bad = true;
        }
        self.check_chunk_features(chunk);
        match self.volume.chunk_at(chunk.start) {
            // From the superblock's array: if it differs, that was found.
            Some(there) if there.start == chunk.start => return Ok(()),
            _ => {}
        }
        let is_strange = |device: &DeviceId| known.is_some_and(|known| !known.contains(&device.0));
        let mut devices = chunk.stripes.iter().map(|stripe| stripe.device);
        if let Some(device) = devices.find(is_strange) {
            if !is_bad {
                self.bad_chunk(chunk, format!("a stripe on device {device}, which there is not"));
            }
            return Ok(());
        }
        match self.volume.add_chunk(chunk.clone()) {
            Err(_) if is_bad => {}
            Err(error @ (Error::Corrupt(_) | Error::NoDevice { .. })) => {
                self.bad_chunk(chunk, error.to_string());
            }
            // That the feature is missing was found.
            Err(error @ Error::Unsupported { .. }) if !self.incompat.contains(Incompat::RAID56) => {
                self.bad_chunk(chunk, error.to_string());
            }
            result => result?,
        }
        Ok(())
    }

    fn bad_chunk(&mut self, chunk: &Chunk, error: String) {
        self.findings.push(Finding::BadChunk { chunk: chunk.start, error });
    }

    fn check_chunk_features(&mut self, chunk: &Chunk) {
        let used = [
            (BlockGroupFlags::RAID1C3, Incompat::RAID1C34, "RAID1C34"),
            (BlockGroupFlags::RAID1C4, Incompat::RAID1C34, "RAID1C34"),
            (BlockGroupFlags::RAID5, Incompat::RAID56, "RAID56"),
            (BlockGroupFlags::RAID6, Incompat::RAID56, "RAID56"),
        ];
        for (profile, bit, feature) in used {
            if chunk.flags.profile() == profile && !self.incompat.contains(bit) {
                let used_by = format!("the chunk at {}", chunk.start);
                self.findings.push(Finding::FeatureMissing { feature, used_by });
            }
        }
    }

    /// The superblock's array holds the system chunks of the chunk tree, and no others.
    fn check_sys_chunks(&mut self, devices: &Devices) {
        if !self.is_complete(RootId::CHUNK_TREE) {
            return;
        }
        let Ok(array) = self.superblock.sys_chunks() else { return };
        let array: BTreeMap<_, _> = array.into_iter().map(|chunk| (chunk.start, chunk)).collect();
        for (start, chunk) in &array {
            let in_tree = devices.chunks.get(start);
            if in_tree.is_none_or(|in_tree| !is_same(in_tree, chunk)) {
                self.sys_chunk(*start, Some(chunk), in_tree);
            }
        }
        for (start, chunk) in &devices.chunks {
            if chunk.flags.contains(BlockGroupFlags::SYSTEM) && !array.contains_key(start) {
                self.sys_chunk(*start, None, Some(chunk));
            }
        }
    }

    fn sys_chunk(&mut self, chunk: LogicalAddr, have: Option<&Chunk>, expect: Option<&Chunk>) {
        let describe = |chunk: Option<&Chunk>| {
            let Some(chunk) = chunk else { return "none".to_owned() };
            let mut text = format!("{} bytes of {}", chunk.len_bytes, chunk.flags);
            for stripe in &chunk.stripes {
                text.push_str(&format!(", device {} at {}", stripe.device, stripe.offset));
            }
            text
        };
        let (have, expect) = (describe(have), describe(expect));
        self.findings.push(Finding::SysChunkArray { chunk, have, expect });
    }

    pub(crate) fn load_dev_extents(&mut self, roots: &Roots) -> Vec<Allocated> {
        let mut extents = Vec::new();
        let pointers = roots.pointer_list(RootId::DEV_TREE);
        self.walk(pointers, Kind::Tree, &DevExtentVisitor, |_, _, leaf| extents.extend(leaf));
        extents
    }

    /// Chunks, device extents and device items agree.
    pub(crate) fn check_devices(&mut self, devices: &Devices, allocated: &[Allocated]) {
        let by_place: BTreeMap<(DeviceId, u64), &Allocated> =
            allocated.iter().map(|extent| ((extent.device, extent.offset), extent)).collect();
        let is_complete =
            self.is_complete(RootId::CHUNK_TREE) && self.is_complete(RootId::DEV_TREE);
        if is_complete {
            self.check_stripes(devices, &by_place);
        }
        self.check_dev_extent_order(&by_place);
        if self.is_complete(RootId::DEV_TREE) {
            self.check_device_items(devices, allocated);
        }
        self.check_device_totals(devices);
        self.check_device_lengths(devices);
    }

    fn check_stripes(
        &mut self,
        devices: &Devices,
        by_place: &BTreeMap<(DeviceId, u64), &Allocated>,
    ) {
        let mut stripes = BTreeMap::new();
        for chunk in devices.chunks.values() {
            let stripe_bytes = stripe_bytes(chunk);
            for stripe in &chunk.stripes {
                let place = (stripe.device, stripe.offset.0);
                stripes.insert(place, chunk.start);
                let (device, offset) = (stripe.device, stripe.offset);
                match by_place.get(&place).filter(|extent| extent.chunk == chunk.start) {
                    None => {
                        let chunk = chunk.start;
                        self.findings.push(Finding::DevExtentMissing { chunk, device, offset });
                    }
                    Some(extent) if stripe_bytes.is_some_and(|len| len != extent.len_bytes) => {
                        self.findings.push(Finding::DevExtentWrong {
                            device,
                            offset,
                            what: "length",
                            have: extent.len_bytes,
                            expect: stripe_bytes.unwrap_or(0),
                        });
                    }
                    Some(_) => {}
                }
            }
        }
        for extent in by_place.values() {
            if stripes.get(&(extent.device, extent.offset)) != Some(&extent.chunk) {
                self.findings.push(Finding::DevExtentWithoutChunk {
                    device: extent.device,
                    offset: PhysicalAddr(extent.offset),
                    chunk: extent.chunk,
                });
            }
        }
    }

    /// The device extents do not overlap. Inside a leaf the structural verifier sees to it; here
    /// it is for those in two leaves that the same place is judged by where the next one begins.
    fn check_dev_extent_order(&mut self, by_place: &BTreeMap<(DeviceId, u64), &Allocated>) {
        let mut before: Option<&Allocated> = None;
        for extent in by_place.values() {
            if let Some(before) = before
                && before.device == extent.device
                && before.offset.saturating_add(before.len_bytes) > extent.offset
            {
                self.findings.push(Finding::DevExtentWrong {
                    device: extent.device,
                    offset: PhysicalAddr(extent.offset),
                    what: "start",
                    have: extent.offset,
                    expect: before.offset.saturating_add(before.len_bytes),
                });
            }
            before = Some(extent);
        }
    }

    fn check_device_items(&mut self, devices: &Devices, allocated: &[Allocated]) {
        let mut by_device: BTreeMap<DeviceId, Vec<&Allocated>> = BTreeMap::new();
        for extent in allocated {
            by_device.entry(extent.device).or_default().push(extent);
        }
        for item in &devices.items {
            let device = DeviceId(item.devid.get());
            let own = by_device.get(&device).into_iter().flatten();
            let used = own.clone().fold(0, |sum: u64, extent| sum.saturating_add(extent.len_bytes));
            let mut wrong = |field, have, expect| {
                self.findings.push(Finding::DeviceField { device, field, have, expect });
            };
            if item.bytes_used.get() != used {
                wrong("bytes_used", item.bytes_used.get(), used);
            }
            let total = item.total_bytes.get();
            for extent in own {
                let end = extent.offset.saturating_add(extent.len_bytes);
                if end > total {
                    let offset = PhysicalAddr(extent.offset);
                    let (what, have, expect) = ("end", end, total);
                    self.findings.push(Finding::DevExtentWrong {
                        device,
                        offset,
                        what,
                        have,
                        expect,
                    });
                }
            }
        }
    }

    /// No device ends before the filesystem on it does, by the chunk tree, or where that does not
    /// tell, by its superblock.
    fn check_device_lengths(&mut self, devices: &Devices) {
        for in_super in self.volume.device_items() {
            let device = DeviceId(in_super.devid.get());
            let Some(medium) = self.volume.device(device) else { continue };
            let item = devices.items.iter().find(|item| item.devid == in_super.devid);
            let expect = item.unwrap_or(&in_super).total_bytes.get();
            let have = medium.len_bytes();
            if have < expect {
                self.findings.push(Finding::DeviceTooShort { device, have, expect });
            }
        }
    }

    /// Superblocks and chunk tree say the same of the devices.
    fn check_device_totals(&mut self, devices: &Devices) {
        if !self.is_complete(RootId::CHUNK_TREE) || devices.items.is_empty() {
            return;
        }
        let count = crate::view::number(devices.items.len());
        let have = self.superblock.num_devices.get();
        if have != count {
            let (field, have, expect) = ("num_devices", have.to_string(), count.to_string());
            self.findings.push(Finding::SuperblockField { field, have, expect });
        }
        let total = devices
            .items
            .iter()
            .fold(0, |sum: u64, item| sum.saturating_add(item.total_bytes.get()));
        let have = self.superblock.total_bytes.get();
        // Too few Linux does not mount; too many it takes as they are.
        if have < total {
            let (field, have, expect) =
                ("total_bytes", have.to_string(), format!("at least {total}"));
            self.findings.push(Finding::SuperblockField { field, have, expect });
        } else if have > total {
            self.findings.push(Finding::SuperblockTotalBytes { have, expect: total });
        }
        for in_super in self.volume.device_items() {
            let device = DeviceId(in_super.devid.get());
            if self.volume.device(device).is_none() {
                continue;
            }
            let Some(item) = devices.items.iter().find(|item| item.devid == in_super.devid) else {
                continue;
            };
            for (field, have, expect) in [
                ("total_bytes", in_super.total_bytes, item.total_bytes),
                ("bytes_used", in_super.bytes_used, item.bytes_used),
            ] {
                if have != expect {
                    let (have, expect) = (have.get(), expect.get());
                    self.findings.push(Finding::DeviceSuperblock { device, field, have, expect });
                }
            }
            for (field, have, expect) in
                [("uuid", item.uuid, in_super.uuid), ("fsid", item.fsid, in_super.fsid)]
            {
                if have != expect {
                    let (have, expect) = (Uuid(have), Uuid(expect));
                    self.findings.push(Finding::DeviceIdentity { device, field, have, expect });
                }
            }
        }
    }
}

/// Whether two descriptions of a chunk mean the same space.
fn is_same(a: &Chunk, b: &Chunk) -> bool {
    (a.start, a.len_bytes, a.flags, &a.stripes) == (b.start, b.len_bytes, b.flags, &b.stripes)
}

/// Bytes of each stripe on its device; `None` of a profile that is none.
fn stripe_bytes(chunk: &Chunk) -> Option<u64> {
    let count = crate::view::number(chunk.stripes.len());
    let columns = match chunk.flags.profile() {
        BlockGroupFlags::RAID0 => count,
        BlockGroupFlags::RAID10 => count / u64::from(chunk.sub_stripes.max(1)),
        BlockGroupFlags::RAID5 => count.checked_sub(1)?,
        BlockGroupFlags::RAID6 => count.checked_sub(2)?,
        _ => 1,
    };
    chunk.len_bytes.checked_div(columns)
}
