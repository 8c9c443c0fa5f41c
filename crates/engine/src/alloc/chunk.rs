//! Allocating chunks: where on the devices, how large, and for what.
//!
//! A new chunk is in the chunk map and can be used at once; its items in the chunk tree, device
//! tree, block group tree and free space tree are inserted by the commit ([`super::settle`]), as
//! nothing durable refers to it before.

use std::collections::BTreeMap;

use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::chunk::{Chunk, ChunkStripe, STRIPE_LEN_BYTES};
use ubtrfs_ondisk::misc::DevItem;
use ubtrfs_ondisk::{Corruption, DeviceId, LogicalAddr, PhysicalAddr, Reason, RootId, Uuid};

use super::block_group::BlockGroup;
use super::{Allocator, Class, State};
use crate::btree::Roots;
use crate::error::{Error, Result};

/// The first bytes of a device, which no chunk takes.
pub(crate) const DEVICE_RESERVED_BYTES: u64 = 1 << 20;
/// The first logical address that a chunk gets in a new filesystem.
const FIRST_LOGICAL: u64 = 1 << 20;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// A filesystem larger than this gets metadata chunks of 1 GiB.
const LARGE_FILESYSTEM_BYTES: u64 = 50 * GIB;
/// The least that a chunk may be, unless that is all that is left.
const CHUNK_BYTES_MIN: u64 = MIB;
/// By how much an image grows that may grow.
const GROWTH_BYTES: u64 = 256 * MIB;

/// One device's allocated ranges.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSpace {
    pub(crate) item: DevItem,
    /// Start to end of each device extent. `None` until they were read, which is done when a chunk
    /// is to be made or removed.
    extents: Option<BTreeMap<u64, u64>>,
    /// Whether the device's item must be written before the next superblock.
    pub(crate) is_dirty: bool,
}

impl DeviceSpace {
    /// A device whose extents were not read.
    pub(super) fn unread(item: DevItem) -> Self {
        Self { item, extents: None, is_dirty: false }
    }

    /// A device that has no extents.
    pub(super) fn empty(item: DevItem) -> Self {
        Self { item, extents: Some(BTreeMap::new()), is_dirty: false }
    }

    pub(super) fn is_read(&self) -> bool {
        self.extents.is_some()
    }

    /// Takes over the extents of `other`, the same device, unless it has its own.
    pub(super) fn enter_extents(&mut self, other: Self) {
        if self.extents.is_none() {
            self.extents = other.extents;
        }
    }

    fn extents(&self) -> &BTreeMap<u64, u64> {
        self.extents.as_ref().expect("who makes or removes chunks reads them first")
    }

    fn extents_mut(&mut self) -> &mut BTreeMap<u64, u64> {
        self.extents.as_mut().expect("who makes or removes chunks reads them first")
    }

    /// Takes a device extent out.
    pub(super) fn vacate(&mut self, start: u64) {
        if let Some(end) = self.extents_mut().remove(&start) {
            let used_bytes = self.item.bytes_used.get().saturating_sub(end - start);
            self.item.bytes_used = used_bytes.into();
            self.is_dirty = true;
        }
    }

    /// Enters a device extent.
    ///
    /// # Errors
    /// `Overlap` with another.
    pub(crate) fn occupy(&mut self, start: u64, len_bytes: u64) -> Result<()> {
        let end = start.checked_add(len_bytes).filter(|end| *end > start);
        let before_end = self.extents().range(..=start).next_back().map_or(0, |(_, end)| *end);
        let behind = self.extents().range(start..).next().map_or(u64::MAX, |(start, _)| *start);
        match end {
            Some(end) if before_end <= start && end <= behind => {
                self.extents_mut().insert(start, end);
                Ok(())
            }
            _ => Err(Error::Corrupt(
                Corruption::new(Reason::Overlap)
                    .in_root(RootId::DEV_TREE)
                    .have(format!("device extent of {len_bytes} bytes at {start}"))
                    .expect("a range of its own"),
            )),
        }
    }

    /// Where the first free range of `len_bytes` begins.
    fn find(&self, len_bytes: u64) -> Option<u64> {
        let mut at = DEVICE_RESERVED_BYTES;
        let end = self.item.total_bytes.get();
        for (start, extent_end) in self.extents().iter().map(|(s, e)| (*s, *e)).chain([(end, end)])
        {
            if start.min(end).saturating_sub(at) >= len_bytes {
                return Some(at);
            }
            at = at.max(extent_end.checked_next_multiple_of(STRIPE_LEN_BYTES)?);
        }
        None
    }

    /// End of the last device extent.
    pub(crate) fn allocated_end(&self) -> u64 {
        self.extents().values().next_back().copied().unwrap_or(DEVICE_RESERVED_BYTES)
    }

    fn total_bytes(&self) -> u64 {
        self.item.total_bytes.get()
    }
}

/// How a profile lies on devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Layout {
    /// Places that a byte has.
    copies: usize,
    /// All copies lie on one device.
    is_on_one: bool,
    /// The chunk is spread over as many devices as have room.
    is_striped: bool,
}

impl Layout {
    fn of(profile: BlockGroupFlags) -> Result<Self> {
        let on_one = |copies| Self { copies, is_on_one: true, is_striped: false };
        let mirrored = |copies| Self { copies, is_on_one: false, is_striped: false };
        let striped = |copies| Self { copies, is_on_one: false, is_striped: true };
        match profile {
            BlockGroupFlags(0) => Ok(on_one(1)),
            BlockGroupFlags::DUP => Ok(on_one(2)),
            BlockGroupFlags::RAID1 => Ok(mirrored(2)),
            BlockGroupFlags::RAID1C3 => Ok(mirrored(3)),
            BlockGroupFlags::RAID1C4 => Ok(mirrored(4)),
            BlockGroupFlags::RAID0 => Ok(striped(1)),
            BlockGroupFlags::RAID10 => Ok(striped(2)),
            other => Err(Error::Unsupported {
                what: format!(
                    "allocating a chunk with profile {}",
                    other.profile_name().unwrap_or("of several bits")
                ),
            }),
        }
    }

    /// Bytes of data in `stripe_count` stripes of `stripe_bytes`.
    fn data_bytes(self, stripe_count: usize, stripe_bytes: u64) -> u64 {
        let columns = if self.is_striped { stripe_count / self.copies } else { 1 };
        stripe_bytes.saturating_mul(columns as u64)
    }
}

/// Where a chunk's stripes lie, each as long.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Placed {
    stripes: Vec<ChunkStripe>,
    stripe_bytes: u64,
    /// Bytes of data in all of them.
    len_bytes: u64,
}

/// Bytes that a new chunk should have: a tenth of the devices at most, and no more than its class
/// is given.
///
/// Source: the sizes that Linux uses since 2018 (data 1 GiB, metadata 256 MiB or 1 GiB, system
/// 32 MiB).
fn wanted_bytes(class: Class, devices_bytes: u64) -> u64 {
    let most = match class {
        Class::Data => GIB,
        Class::Metadata if devices_bytes > LARGE_FILESYSTEM_BYTES => GIB,
        Class::Metadata => 256 * MIB,
        Class::System => 32 * MIB,
    };
    let tenth = devices_bytes / 10 / STRIPE_LEN_BYTES * STRIPE_LEN_BYTES;
    most.min(tenth).max(CHUNK_BYTES_MIN)
}

impl Allocator {
    /// Adds a block group of `class`, of the profile that its groups have. Returns false when the
    /// devices have no room.
    ///
    /// # Errors
    /// `Unsupported` for a profile that is not allocated yet; damage in the device tree; or the
    /// volume's error.
    pub(super) fn allocate_chunk(&self, roots: &Roots, class: Class) -> Result<bool> {
        self.load_devices(roots)?;
        let flags = self.flags_of_new(class);
        if class != Class::System && !self.has_room_in_system(flags)? {
            return Ok(false);
        }
        let devices_bytes = self.devices_bytes();
        self.add_chunk(flags, wanted_bytes(class, devices_bytes))
    }

    /// What a new group of `class` is: what those are that it is allocated from.
    fn flags_of_new(&self, class: Class) -> BlockGroupFlags {
        self.state().flags_of(class).unwrap_or(default_flags(class, self.is_mixed))
    }

    /// Makes sure that the chunk tree can take the items of one more chunk.
    fn has_room_in_system(&self, flags: BlockGroupFlags) -> Result<bool> {
        let needed = 16 * self.nodesize_bytes();
        let (free, system) = {
            let state = self.state();
            let free = state.spaces[Class::System.index()].loaded_free_bytes;
            (free, state.flags_of(Class::System))
        };
        if free >= needed {
            return Ok(true);
        }
        let system = system.unwrap_or(BlockGroupFlags::SYSTEM | flags.profile());
        let devices_bytes = self.devices_bytes();
        self.add_chunk(system, wanted_bytes(Class::System, devices_bytes))
    }

    /// Adds a block group of `flags` with at most `wanted_bytes`. Returns false when the devices
    /// have no room. Their extents were read.
    ///
    /// # Errors
    /// `Unsupported` for a profile that is not allocated yet; or the volume's error.
    pub(crate) fn add_chunk(&self, flags: BlockGroupFlags, wanted_bytes: u64) -> Result<bool> {
        let missing = self.store.volume().missing_devices();
        let mut state = self.state();
        let found = match place(&state, &missing, flags, wanted_bytes)? {
            Some(found) => Some(found),
            None if self.options.grow_device && state.devices.len() == 1 => {
                self.grow(&mut state, flags, wanted_bytes)?;
                place(&state, &missing, flags, wanted_bytes)?
            }
            None => None,
        };
        let Some(Placed { stripes, stripe_bytes, len_bytes }) = found else { return Ok(false) };
        let last = state.groups.values().next_back();
        let start = LogicalAddr(last.map_or(FIRST_LOGICAL, |group| group.end().0));
        let sector_size = u32::try_from(self.sectorsize_bytes()).expect("at most 64 KiB");
        let chunk = Chunk {
            start,
            len_bytes,
            stripe_len_bytes: STRIPE_LEN_BYTES,
            flags,
            io_align: u32::try_from(STRIPE_LEN_BYTES).expect("64 KiB"),
            io_width: u32::try_from(STRIPE_LEN_BYTES).expect("64 KiB"),
            sector_size,
            sub_stripes: if flags.profile() == BlockGroupFlags::RAID10 { 2 } else { 1 },
            stripes: stripes.clone(),
        };
        self.store.volume().add_chunk(chunk)?;
        for stripe in &stripes {
            let device = state.devices.get_mut(&stripe.device).expect("placed on it");
            device.occupy(stripe.offset.0, stripe_bytes)?;
            let used_bytes = device.item.bytes_used.get().saturating_add(stripe_bytes);
            device.item.bytes_used = used_bytes.into();
            device.is_dirty = true;
            self.store.volume().set_device_item(device.item);
        }
        let mut group = BlockGroup::new(start, len_bytes, flags, Some(0));
        group.is_new = true;
        state.groups.insert(start, group);
        state.note_profiles();
        let class = Self::class_of_group(flags);
        if class == Class::Data {
            state.spaces[class.index()].hint = start;
        }
        let shadowed = self.store.volume().superblock_ranges(start)?;
        state.enter_free_space(start, &[(start.0, start.0 + len_bytes)], &shadowed);
        Ok(true)
    }

    /// Makes the only device longer, so that a chunk of `wanted_bytes` fits behind what is there.
    fn grow(&self, state: &mut State, flags: BlockGroupFlags, wanted_bytes: u64) -> Result<()> {
        let copies = Layout::of(flags.profile())?.copies;
        let (devid, device) = state.devices.iter_mut().next().expect("the only device");
        let needed = device.allocated_end().saturating_add(wanted_bytes * copies as u64);
        let grown = device.total_bytes().saturating_add(GROWTH_BYTES);
        let total = needed.max(grown).checked_next_multiple_of(MIB).unwrap_or(u64::MAX);
        self.store.volume().resize_device(*devid, total)?;
        device.item.total_bytes = total.into();
        device.is_dirty = true;
        self.store.volume().set_device_item(device.item);
        Ok(())
    }

    /// Bytes that new chunks of `class` can hold at most, each as often as it is stored; without end where the device grows.
    pub(super) fn unallocated_bytes(&self, class: Class) -> u64 {
        if self.options.grow_device {
            return u64::MAX;
        }
        let layout = Layout::of(self.flags_of_new(class).profile());
        let copies = layout.map_or(1, |layout| layout.copies.max(1) as u64);
        let state = self.state();
        let free = state.devices.values().map(|device| {
            let item = &device.item;
            item.total_bytes.get().saturating_sub(item.bytes_used.get())
        });
        free.fold(0, u64::saturating_add) / copies
    }

    /// Makes a device longer.
    ///
    /// # Errors
    /// `InvalidArgument` for less than it has, or a device that is not there; the volume's error.
    pub(crate) fn grow_device(&self, devid: DeviceId, total_bytes: u64) -> Result<()> {
        let total = total_bytes / self.sectorsize_bytes() * self.sectorsize_bytes();
        let mut state = self.state();
        let device = state.devices.get_mut(&devid);
        let Some(device) = device.filter(|device| total >= device.total_bytes()) else {
            let what = format!("growing device {devid} to {total_bytes} bytes");
            return Err(Error::InvalidArgument { what });
        };
        if self.store.volume().device(devid).is_some_and(|on| on.len_bytes() < total) {
            self.store.volume().resize_device(devid, total)?;
        }
        device.item.total_bytes = total.into();
        device.is_dirty = true;
        self.store.volume().set_device_item(device.item);
        Ok(())
    }

    /// Cuts the only device off behind its last device extent.
    ///
    /// # Errors
    /// Damage in the device tree.
    pub(crate) fn shrink_device_to_fit(&self, roots: &Roots) -> Result<()> {
        self.load_devices(roots)?;
        let mut state = self.state();
        let Some(device) = state.devices.values_mut().next() else { return Ok(()) };
        let end = device.allocated_end();
        let total = end.checked_next_multiple_of(self.sectorsize_bytes()).unwrap_or(end);
        device.item.total_bytes = total.into();
        device.is_dirty = true;
        self.store.volume().set_device_item(device.item);
        Ok(())
    }

    /// Bytes of all devices.
    pub(crate) fn devices_bytes(&self) -> u64 {
        self.state().devices_bytes()
    }

    /// Enters a device of a filesystem that is being made.
    pub(crate) fn add_device(&self, item: DevItem) {
        let mut state = self.state();
        let mut space = DeviceSpace::empty(item);
        space.is_dirty = true;
        state.devices.insert(DeviceId(item.devid.get()), space);
        state.is_loaded = true;
        self.store.volume().set_device_item(item);
    }
}

impl State {
    pub(super) fn devices_bytes(&self) -> u64 {
        let bytes = self.devices.values().map(DeviceSpace::total_bytes);
        bytes.fold(0, u64::saturating_add)
    }
}

/// Places the stripes of a chunk: `wanted_bytes` of data, or as much as there is room for.
fn place(
    state: &State,
    missing: &[DeviceId],
    flags: BlockGroupFlags,
    wanted_bytes: u64,
) -> Result<Option<Placed>> {
    let layout = Layout::of(flags.profile())?;
    let is_missing = |device: &DeviceSpace| missing.contains(&DeviceId(device.item.devid.get()));
    let mut devices: Vec<&DeviceSpace> = state.devices.values().collect();
    if layout.copies == 1 || layout.is_on_one {
        devices.retain(|device| !is_missing(device));
    }
    // The emptiest first, so that devices fill evenly; by number where equal. One that is missing
    // only takes a copy that no other could.
    devices.sort_by_key(|device| {
        let unallocated = device.total_bytes().saturating_sub(device.item.bytes_used.get());
        (is_missing(device), std::cmp::Reverse(unallocated), device.item.devid.get())
    });
    if !layout.is_striped {
        return place_longest(&devices, missing, layout, layout.copies, wanted_bytes);
    }
    // All devices that have room for the least, in whole columns.
    let least = CHUNK_BYTES_MIN / STRIPE_LEN_BYTES * STRIPE_LEN_BYTES;
    devices.retain(|device| device.find(least).is_some());
    if layout.copies > 1 && !missing.is_empty() {
        devices = with_one_present_each(devices, &is_missing, layout.copies);
    }
    let count = devices.len() / layout.copies * layout.copies;
    // Linux makes a RAID10 of two devices, too, and a RAID0 of one.
    if count == 0 {
        return Ok(None);
    }
    let columns = (count / layout.copies) as u64;
    place_longest(&devices, missing, layout, count, (wanted_bytes / columns).max(least))
}

/// Of the devices as many as make up whole columns of `copies`, in their order, each with one that is there.
fn with_one_present_each<'a>(
    devices: Vec<&'a DeviceSpace>,
    is_missing: &dyn Fn(&DeviceSpace) -> bool,
    copies: usize,
) -> Vec<&'a DeviceSpace> {
    let count = devices.len();
    let (absent, mut present): (Vec<_>, Vec<_>) =
        devices.into_iter().partition(|device| is_missing(device));
    let spare = present.split_off(present.len().min(count / copies));
    let mut others = spare.into_iter().chain(absent);
    let mut columns = Vec::with_capacity(count);
    for first in present {
        columns.push(first);
        columns.extend(others.by_ref().take(copies - 1));
    }
    columns
}

/// Places `count` stripes of `wanted_bytes`, or of as much as there is room for.
fn place_longest(
    devices: &[&DeviceSpace],
    missing: &[DeviceId],
    layout: Layout,
    count: usize,
    wanted_bytes: u64,
) -> Result<Option<Placed>> {
    // What no device holds that is there cannot be written.
    let is_held = |column: &[ChunkStripe]| column.iter().any(|one| !missing.contains(&one.device));
    let fit = |stripe_bytes: u64| -> Result<Option<Placed>> {
        let stripes = place_whole(devices, count, layout.is_on_one, stripe_bytes)?;
        let stripes = stripes.filter(|stripes| stripes.chunks(layout.copies).all(is_held));
        let len_bytes = layout.data_bytes(count, stripe_bytes);
        Ok(stripes.map(|stripes| Placed { stripes, stripe_bytes, len_bytes }))
    };
    let wanted_bytes = wanted_bytes / STRIPE_LEN_BYTES * STRIPE_LEN_BYTES;
    if let Some(placed) = fit(wanted_bytes)? {
        return Ok(Some(placed));
    }
    // The longest that fits lies between the two, in elements of stripes; what is shorter fits too.
    let (mut fits, mut too_long) = (None, wanted_bytes / STRIPE_LEN_BYTES);
    let mut least = CHUNK_BYTES_MIN / STRIPE_LEN_BYTES;
    while least < too_long {
        let middle = if fits.is_none() { least } else { (least + too_long) / 2 };
        match fit(middle * STRIPE_LEN_BYTES)? {
            Some(placed) => {
                fits = Some(placed);
                least = middle + 1;
            }
            None if fits.is_none() => return Ok(None),
            None => too_long = middle,
        }
    }
    Ok(fits)
}

/// Places `stripe_count` stripes of exactly `len_bytes`, all on one device or each on another.
fn place_whole(
    devices: &[&DeviceSpace],
    stripe_count: usize,
    on_one: bool,
    len_bytes: u64,
) -> Result<Option<Vec<ChunkStripe>>> {
    let mut stripes = Vec::with_capacity(stripe_count);
    for device in devices {
        let count = if on_one { stripe_count } else { 1 };
        if on_one {
            stripes.clear();
        }
        let mut trial = (*device).clone();
        for _ in 0..count {
            let Some(offset) = trial.find(len_bytes) else { break };
            trial.occupy(offset, len_bytes)?;
            stripes.push(stripe(device, offset));
        }
        if stripes.len() == stripe_count {
            return Ok(Some(stripes));
        }
    }
    Ok(None)
}

fn stripe(device: &DeviceSpace, offset: u64) -> ChunkStripe {
    ChunkStripe {
        device: DeviceId(device.item.devid.get()),
        offset: PhysicalAddr(offset),
        device_uuid: Uuid(device.item.uuid),
    }
}

fn default_flags(class: Class, is_mixed: bool) -> BlockGroupFlags {
    match class {
        Class::Data => BlockGroupFlags::DATA,
        Class::Metadata if is_mixed => BlockGroupFlags::DATA | BlockGroupFlags::METADATA,
        Class::Metadata => BlockGroupFlags::METADATA | BlockGroupFlags::DUP,
        Class::System => BlockGroupFlags::SYSTEM | BlockGroupFlags::DUP,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(list: &[(u64, &[(u64, u64)])]) -> State {
        let mut state = State::default();
        for (devid, (total_bytes, extents)) in (1..).zip(list) {
            let used: u64 = extents.iter().map(|(_, len)| len).sum();
            let mut device = DeviceSpace::empty(DevItem {
                devid: devid.into(),
                total_bytes: (*total_bytes).into(),
                bytes_used: used.into(),
                ..DevItem::default()
            });
            for (start, len) in *extents {
                device.occupy(*start, *len).unwrap();
            }
            state.devices.insert(DeviceId(devid), device);
        }
        state
    }

    fn lens(state: &State, flags: BlockGroupFlags, wanted_bytes: u64) -> Option<(Vec<u64>, u64)> {
        let placed = place(state, &[], flags, wanted_bytes).unwrap()?;
        Some((placed.stripes.iter().map(|stripe| stripe.device.0).collect(), placed.len_bytes))
    }

    /// The longest free range of a full device counted for the length of the next try: with one
    /// device full, no chunk was found on the others unless they had room for all that was wanted.
    #[test]
    fn place_beside_a_full_device_takes_what_the_others_have() {
        let full: &[(u64, u64)] = &[(MIB, 63 * MIB)];
        let state = devices(&[(64 * MIB, full), (64 * MIB, &[(MIB, 43 * MIB)])]);
        let found = lens(&state, BlockGroupFlags::DATA, 100 * MIB);
        assert_eq!(found, Some((vec![2], 20 * MIB)));
        let empty: &[(u64, u64)] = &[];
        let state = devices(&[(64 * MIB, full), (64 * MIB, empty), (40 * MIB, empty)]);
        let found = lens(&state, BlockGroupFlags::DATA | BlockGroupFlags::RAID1, 50 * MIB);
        assert_eq!(found, Some((vec![2, 3], 39 * MIB)));
    }

    /// Two copies on one device whose only hole was as long as what was wanted found no room.
    #[test]
    fn place_dup_in_one_hole_takes_its_halves() {
        let state = devices(&[(65 * MIB, &[])]);
        let flags = BlockGroupFlags::METADATA | BlockGroupFlags::DUP;
        assert_eq!(lens(&state, flags, 64 * MIB), Some((vec![1, 1], 32 * MIB)));
        assert_eq!(lens(&state, flags, 10 * MIB), Some((vec![1, 1], 10 * MIB)));
        let state = devices(&[(3 * MIB - 4096, &[])]);
        assert_eq!(lens(&state, flags, 64 * MIB), None);
    }

    #[test]
    fn place_in_holes_takes_none_of_what_is_used() {
        let used: &[(u64, u64)] = &[(2 * MIB, 4 * MIB), (10 * MIB, MIB)];
        let state = devices(&[(12 * MIB, used)]);
        let found = place(&state, &[], BlockGroupFlags::DATA, 4 * MIB).unwrap().unwrap();
        assert_eq!((found.stripes[0].offset.0, found.len_bytes), (6 * MIB, 4 * MIB));
        let flags = BlockGroupFlags::DATA | BlockGroupFlags::DUP;
        let found = place(&state, &[], flags, 4 * MIB).unwrap().unwrap();
        let offsets = (found.stripes[0].offset.0, found.stripes[1].offset.0);
        assert_eq!(offsets, (6 * MIB, 8 * MIB));
        assert_eq!(found.len_bytes, 2 * MIB);
    }

    #[test]
    fn place_striped_takes_all_devices_that_have_room() {
        let empty: &[(u64, u64)] = &[];
        let full: &[(u64, u64)] = &[(MIB, 63 * MIB)];
        let three = [(64 * MIB, empty), (64 * MIB, full), (64 * MIB, empty), (21 * MIB, empty)];
        let state = devices(&three);
        let raid0 = BlockGroupFlags::DATA | BlockGroupFlags::RAID0;
        assert_eq!(lens(&state, raid0, 30 * MIB), Some((vec![1, 3, 4], 30 * MIB)));
        assert_eq!(lens(&state, raid0, 300 * MIB), Some((vec![1, 3, 4], 60 * MIB)));
        let raid10 = BlockGroupFlags::DATA | BlockGroupFlags::RAID10;
        assert_eq!(lens(&state, raid10, 300 * MIB), Some((vec![1, 3], 63 * MIB)));
        assert_eq!(lens(&devices(&[(64 * MIB, full)]), raid0, MIB), None);
        assert_eq!(lens(&devices(&[(64 * MIB, empty)]), raid10, MIB), None);
    }

    /// Missing devices came last, two of a RAID10 as one column: what was placed there could not be written, and the filesystem was aborted. So
    /// could a mirror lie on missing ones alone, where those that are there had no room for so much.
    #[test]
    fn place_puts_no_column_on_missing_devices_alone() {
        let empty: &[(u64, u64)] = &[];
        let placed = |list: &[(u64, &[(u64, u64)])], missing: &[u64], flags| {
            let missing: Vec<_> = missing.iter().copied().map(DeviceId).collect();
            let found = place(&devices(list), &missing, flags, 100 * MIB).unwrap()?;
            let ids: Vec<_> = found.stripes.iter().map(|stripe| stripe.device.0).collect();
            Some((ids, found.len_bytes))
        };
        let raid10 = BlockGroupFlags::DATA | BlockGroupFlags::RAID10;
        let five = [(64 * MIB, empty); 5];
        assert_eq!(placed(&five[..4], &[], raid10), Some((vec![1, 2, 3, 4], 100 * MIB)));
        assert_eq!(placed(&five[..4], &[2, 3], raid10), Some((vec![1, 2, 4, 3], 100 * MIB)));
        assert_eq!(placed(&five[..4], &[1, 2, 3], raid10), Some((vec![4, 1], 63 * MIB)));
        assert_eq!(placed(&five, &[4], raid10), Some((vec![1, 3, 2, 5], 100 * MIB)));
        assert_eq!(placed(&five[..2], &[1, 2], raid10), None);
        let raid1 = BlockGroupFlags::DATA | BlockGroupFlags::RAID1;
        let small = [(21 * MIB, empty), (200 * MIB, empty), (200 * MIB, empty)];
        assert_eq!(placed(&small, &[2, 3], raid1), Some((vec![1, 2], 20 * MIB)));
        assert_eq!(placed(&small[1..], &[1, 2], raid1), None);
    }

    #[test]
    fn place_at_the_end_of_the_address_space_is_no_panic() {
        let at_the_end: &[(u64, u64)] = &[(MIB, u64::MAX - MIB)];
        let state = devices(&[(u64::MAX, at_the_end)]);
        assert_eq!(lens(&state, BlockGroupFlags::DATA, MIB), None);
    }
}
