//! A filesystem's devices and chunks together.
//!
//! Lock order: `members`, then `map`, then `superblock`; none is held during I/O.

use std::collections::BTreeMap;

use smallvec::SmallVec;
use ubtrfs_ondisk::chunk::Chunk;
use ubtrfs_ondisk::misc::DevItem;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::verify::{self, Geometry};
use ubtrfs_ondisk::{
    Corruption, CsumType, DeviceId, Generation, LogicalAddr, PhysicalAddr, Reason, Uuid,
};
use ubtrfs_rt::{Arc, Mutex, RwLock};

use crate::chunk_map::{ChunkMap, Place, Run};
use crate::device::Device;
use crate::error::{Error, Op, Result};
use crate::missing;
use crate::stats::{Counters, DeviceStats};
use crate::superblocks::{self, Seen};

/// How a volume is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VolumeOptions {
    /// Refuse all writes.
    pub read_only: bool,
    /// Open although devices are missing, where every chunk has a copy of everything on the rest.
    pub degraded: bool,
    /// Believe this copy of the superblock instead of the primary: 1 or 2.
    pub super_copy: Option<usize>,
}

/// The devices of a filesystem and where its logical addresses lie on them.
///
/// All calls may be made from many threads. Nothing is durable before [`Volume::flush`] returns.
#[derive(Debug)]
pub struct Volume {
    options: VolumeOptions,
    geometry: Geometry,
    members: RwLock<BTreeMap<DeviceId, Arc<Member>>>,
    map: RwLock<ChunkMap>,
    superblock: RwLock<Box<Superblock>>,
}

/// A device of the filesystem, there or missing.
#[derive(Debug)]
struct Member {
    devid: DeviceId,
    device: Option<Arc<dyn Device>>,
    item: Mutex<DevItem>,
    /// The primary superblock as last read or written; `None` before that.
    seen: Mutex<Option<Seen>>,
    counters: Counters,
}

impl Member {
    fn new(item: DevItem, device: Option<Arc<dyn Device>>, seen: Option<Seen>) -> Arc<Self> {
        Arc::new(Self {
            devid: DeviceId(item.devid.get()),
            device,
            item: Mutex::new(item),
            seen: Mutex::new(seen),
            counters: Counters::default(),
        })
    }

    fn missing(devid: DeviceId, uuid: Uuid) -> Arc<Self> {
        let item = DevItem { devid: devid.0.into(), uuid: uuid.0, ..DevItem::default() };
        Self::new(item, None, None)
    }

    fn uuid(&self) -> Uuid {
        Uuid(self.item.lock().uuid)
    }
}

impl Volume {
    /// Opens the filesystem that the devices make up: reads their superblocks and takes in the
    /// system chunks. The other chunks are the caller's to add.
    ///
    /// # Errors
    /// `NotBtrfs` or `BadSuperblock` for a device without a usable superblock; `OtherFilesystem`,
    /// `DuplicateDevice`, `StaleDevice` or `MissingDevice` when the devices do not make up one
    /// filesystem; `Unsupported` for a feature that cannot be opened; `TooShort`; `Io`; `Corrupt`.
    pub fn open(devices: Vec<Arc<dyn Device>>, options: &VolumeOptions) -> Result<Self> {
        let copy = options.super_copy.unwrap_or(0);
        let mut found = Vec::with_capacity(devices.len());
        for device in devices {
            let superblock = superblocks::read(&*device, copy)?;
            found.push((device, superblock));
        }
        let newest = newest_of(&found)?;
        superblocks::check_features(&newest, options.read_only)?;
        let volume = Self {
            options: *options,
            geometry: geometry_of(&newest)?,
            members: RwLock::default(),
            map: RwLock::default(),
            superblock: RwLock::new(newest.clone()),
        };
        for (device, superblock) in found {
            verify::superblock(&superblock)?;
            volume.take_member(device, &superblock, &newest)?;
        }
        let volume = volume.with_all_members(&newest)?;
        for chunk in newest.sys_chunks()? {
            volume.add_chunk(chunk)?;
        }
        Ok(volume)
    }

    /// The volume of a filesystem that is being made; nothing is read. Device `i` gets the number
    /// `i + 1` and the superblock's `dev_item` with its own length; the caller gives each its uuid
    /// with [`Volume::set_device_item`] before it adds chunks.
    ///
    /// # Errors
    /// `Corrupt` when the superblock's sizes or checksum are impossible; `ReadOnly`.
    pub fn create(devices: Vec<Arc<dyn Device>>, superblock: Superblock) -> Result<Self> {
        let geometry = geometry_of(&superblock)?;
        let mut members = BTreeMap::new();
        for (devid, device) in (1..).zip(devices) {
            if device.is_read_only() {
                return Err(Error::ReadOnly { device: device.name() });
            }
            let mut item = DevItem {
                devid: devid.into(),
                total_bytes: device.len_bytes().into(),
                ..superblock.dev_item
            };
            if devid != 1 {
                item.uuid = Uuid::NIL.0;
            }
            members.insert(DeviceId(devid), Member::new(item, Some(device), None));
        }
        Ok(Self {
            options: VolumeOptions::default(),
            geometry,
            members: RwLock::new(members),
            map: RwLock::default(),
            superblock: RwLock::new(Box::new(superblock)),
        })
    }

    /// The superblock last read or written. Its `dev_item` is that of whichever device it was
    /// read from; those of all devices are [`Volume::device_items`].
    pub fn superblock(&self) -> Superblock {
        **self.superblock.read()
    }

    /// What all blocks of the filesystem have in common.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.options.read_only
    }

    // Chunks.

    /// Takes a chunk in. One that is there already, in all equal, is no error.
    ///
    /// # Errors
    /// `Unsupported` for RAID5 and RAID6; `Corrupt` when it overlaps another chunk or the end of
    /// its device, or names a device otherwise than the filesystem does; `MissingDevice` when too
    /// few copies are on devices that are there.
    pub fn add_chunk(&self, chunk: Chunk) -> Result<()> {
        self.check_alignment(&chunk)?;
        for stripe in &chunk.stripes {
            self.find_or_miss(stripe.device, stripe.device_uuid)?;
        }
        let start = chunk.start;
        let mut candidate = ChunkMap::new();
        candidate.add(chunk.clone())?;
        self.check_stripe_ends(&chunk, &candidate)?;
        if !(self.options.degraded && self.options.read_only) {
            self.check_copies_there(start, &candidate)?;
        }
        self.map.write().add(chunk)
    }

    /// Takes a chunk out.
    pub fn remove_chunk(&self, start: LogicalAddr) -> Option<Arc<Chunk>> {
        self.map.write().remove(start)
    }

    /// The chunk that holds `at`.
    pub fn chunk_at(&self, at: LogicalAddr) -> Option<Arc<Chunk>> {
        self.map.read().chunk_at(at).cloned()
    }

    /// All chunks, by address.
    pub fn chunks(&self) -> Vec<Arc<Chunk>> {
        self.map.read().chunks().cloned().collect()
    }

    /// How many copies the chunk at `at` keeps.
    ///
    /// # Errors
    /// `NoChunk`.
    pub fn mirror_count(&self, at: LogicalAddr) -> Result<usize> {
        self.map.read().mirror_count(at)
    }

    /// The logical ranges of the chunk that begins at `start` which cover copies of the
    /// superblock: the allocator must not give them out.
    ///
    /// # Errors
    /// `NoChunk`.
    pub fn superblock_ranges(
        &self,
        start: LogicalAddr,
    ) -> Result<Vec<std::ops::Range<LogicalAddr>>> {
        self.map.read().superblock_ranges(start)
    }

    /// Where a logical range lies on the devices.
    ///
    /// # Errors
    /// `NoChunk` when no single chunk holds the range.
    pub fn runs(&self, at: LogicalAddr, len_bytes: u64) -> Result<SmallVec<[Run; 1]>> {
        self.map.read().runs(at, len_bytes)
    }

    // Reading and writing.

    /// Reads one copy, the first being 0, and judges nothing.
    ///
    /// # Errors
    /// `NoChunk`, `NoMirror`, `MissingDevice` or `Io`, which is counted.
    pub fn read_mirror(&self, at: LogicalAddr, mirror: usize, buf: &mut [u8]) -> Result<()> {
        let runs = self.runs(at, buf.len() as u64)?;
        let copies = runs.first().map_or(1, |run| run.copies.len());
        if mirror >= copies {
            return Err(Error::NoMirror { at, mirror, copies });
        }
        self.read_runs(&runs, mirror, buf)
    }

    /// Reads from the first copy that `accept` finds whole; each copy that is not is counted
    /// against its device. The range may cross stripes, but not chunks.
    ///
    /// A copy is judged as a whole: the shorter the range, the more damage can be read around.
    ///
    /// # Errors
    /// `NoWholeCopy` with the last finding when `accept` took none; `NoChunk`, `MissingDevice` or
    /// `Io` when none could be read.
    pub fn read(
        &self,
        at: LogicalAddr,
        buf: &mut [u8],
        accept: &dyn Fn(&[u8]) -> ubtrfs_ondisk::Result<()>,
    ) -> Result<()> {
        let runs = self.runs(at, buf.len() as u64)?;
        let copies = runs.first().map_or(1, |run| run.copies.len());
        let mut failure = None;
        for mirror in 0..copies {
            if let Err(error) = self.read_runs(&runs, mirror, buf) {
                failure.get_or_insert(error);
                continue;
            }
            match accept(buf) {
                Ok(()) => return Ok(()),
                Err(corruption) => {
                    self.count_bad_copy(&runs, mirror, &corruption);
                    failure = Some(Error::NoWholeCopy { at, copies, corruption });
                }
            }
        }
        Err(failure.expect("every chunk has at least one copy"))
    }

    /// Writes all copies.
    ///
    /// # Errors
    /// As [`Volume::write_vectored`].
    pub fn write(&self, at: LogicalAddr, buf: &[u8]) -> Result<()> {
        self.write_vectored(at, &[buf])
    }

    /// Writes buffers one behind the other, all copies, in one request for each contiguous range
    /// of a device. Copies on missing devices are left out.
    ///
    /// # Errors
    /// `NoChunk` when no single chunk holds the range; `ReadOnly`; `MissingDevice` when no copy of
    /// a part is on a device that is there; `Io`, which is counted: some copies may be written.
    pub fn write_vectored(&self, at: LogicalAddr, bufs: &[&[u8]]) -> Result<()> {
        self.check_writable()?;
        let runs = self.runs(at, bufs.iter().map(|buf| buf.len() as u64).sum())?;
        let mut gathered: SmallVec<[&[u8]; 16]> = SmallVec::new();
        for run in &runs {
            // A single run holds the range in one piece.
            let pieces = if runs.len() == 1 {
                bufs
            } else {
                gather(bufs, run, &mut gathered);
                &gathered
            };
            self.write_run(run, pieces)?;
        }
        Ok(())
    }

    fn write_run(&self, run: &Run, pieces: &[&[u8]]) -> Result<()> {
        let mut written = 0;
        for place in &run.copies {
            let member = self.member(place.devid)?;
            let Some(device) = &member.device else { continue };
            device.write_vectored_at(place.at, pieces).map_err(|source| {
                Counters::add(&member.counters.write);
                io_error(&**device, Op::Write, place.at, source)
            })?;
            written += 1;
        }
        if written == 0 {
            let member = self.member(run.copies[0].devid)?;
            return Err(self.missing_error(&member));
        }
        Ok(())
    }

    /// Gives all copies of a range back to the medium; what is read there afterwards may be
    /// anything.
    ///
    /// # Errors
    /// `NoChunk`, `ReadOnly` or `Io`.
    pub fn discard(&self, at: LogicalAddr, len_bytes: u64) -> Result<()> {
        self.check_writable()?;
        for run in self.runs(at, len_bytes)? {
            for place in &run.copies {
                let member = self.member(place.devid)?;
                if let Some(device) = &member.device {
                    device
                        .discard(place.at, run.len_bytes)
                        .map_err(|source| io_error(&**device, Op::Discard, place.at, source))?;
                }
            }
        }
        Ok(())
    }

    /// Makes durable all that was written before the call, on all devices.
    ///
    /// # Errors
    /// The first device's `Io`, which is counted; the others are flushed all the same.
    pub fn flush(&self) -> Result<()> {
        let mut failure = None;
        for member in self.present_members() {
            let Some(device) = &member.device else { continue };
            if let Err(source) = device.flush() {
                Counters::add(&member.counters.flush);
                failure.get_or_insert(io_error(&**device, Op::Flush, PhysicalAddr(0), source));
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Writes the superblock to all devices, each with its own device item, and makes it durable.
    /// The caller has flushed everything that it reaches.
    ///
    /// # Errors
    /// `SuperblockChanged` when a primary is not as last read or written here; nothing is written
    /// then. `ReadOnly`; `Io`: the filesystem on the medium is then the old or the new one.
    pub fn write_superblocks(&self, superblock: &Superblock) -> Result<()> {
        self.check_writable()?;
        let members = self.present_members();
        let devices = || members.iter().filter_map(|m| Some((m, m.device.as_deref()?)));
        for (member, device) in devices() {
            superblocks::check_unchanged(device, *member.seen.lock())?;
        }
        let own = |member: &Member| {
            let mut own = *superblock;
            own.dev_item = *member.item.lock();
            own
        };
        let counted = |member: &Member, result: Result<Seen>| {
            result.inspect_err(|_| Counters::add(&member.counters.write))
        };
        for (member, device) in devices() {
            let own = own(member);
            for at in superblocks::copies(own.dev_item.total_bytes.get()).skip(1) {
                counted(member, superblocks::write_copy(device, &own, at))?;
            }
        }
        for (member, device) in devices() {
            let written = superblocks::write_copy(device, &own(member), SUPERBLOCK_OFFSETS[0]);
            *member.seen.lock() = Some(counted(member, written)?);
        }
        **self.superblock.write() = *superblock;
        self.flush()
    }

    // Devices.

    /// How many devices the filesystem has, missing ones included.
    pub fn device_count(&self) -> usize {
        self.members.read().len()
    }

    /// The device of that number, unless it is missing.
    pub fn device(&self, devid: DeviceId) -> Option<Arc<dyn Device>> {
        self.members.read().get(&devid)?.device.clone()
    }

    /// The numbers of the devices that are missing.
    pub fn missing_devices(&self) -> Vec<DeviceId> {
        let members = self.members.read();
        members.values().filter(|m| m.device.is_none()).map(|m| m.devid).collect()
    }

    /// The device items, by number, as the next superblocks will hold them.
    pub fn device_items(&self) -> Vec<DevItem> {
        self.members.read().values().map(|member| *member.item.lock()).collect()
    }

    /// Says what a device's next superblock holds of it. A number that is not known yet is that
    /// of a missing device.
    pub fn set_device_item(&self, item: DevItem) {
        let devid = DeviceId(item.devid.get());
        let mut members = self.members.write();
        match members.get(&devid) {
            Some(member) => *member.item.lock() = item,
            None => {
                members.insert(devid, Member::new(item, None, None));
            }
        }
    }

    /// Changes the length of an image file, and of its device item.
    ///
    /// # Errors
    /// `NoDevice`; `MissingDevice`; `Io` where the length is fixed.
    pub fn resize_device(&self, devid: DeviceId, len_bytes: u64) -> Result<()> {
        self.check_writable()?;
        let member = self.member(devid)?;
        let device = member.device.as_ref().ok_or_else(|| self.missing_error(&member))?;
        device
            .resize(len_bytes)
            .map_err(|source| io_error(&**device, Op::Resize, PhysicalAddr(len_bytes), source))?;
        member.item.lock().total_bytes = len_bytes.into();
        Ok(())
    }

    /// The errors of each device since the volume was opened.
    pub fn stats(&self) -> Vec<DeviceStats> {
        self.members.read().values().map(|m| m.counters.snapshot(m.devid)).collect()
    }

    // Helpers.

    fn read_runs(&self, runs: &[Run], mirror: usize, buf: &mut [u8]) -> Result<()> {
        for run in runs {
            let Place { devid, at } = run.copies[mirror];
            let member = self.member(devid)?;
            let device = member.device.as_ref().ok_or_else(|| self.missing_error(&member))?;
            let mut at = at;
            for piece in run.pieces() {
                let piece = index(piece.start)..index(piece.end);
                let piece = &mut buf[piece];
                device.read_at(at, piece).map_err(|source| {
                    Counters::add(&member.counters.read);
                    io_error(&**device, Op::Read, at, source)
                })?;
                at = PhysicalAddr(at.0 + piece.len() as u64);
            }
        }
        Ok(())
    }

    /// In a range over several columns it is not known which was bad, so all of them count.
    fn count_bad_copy(&self, runs: &[Run], mirror: usize, corruption: &Corruption) {
        let members = self.members.read();
        for run in runs {
            if let Some(member) = members.get(&run.copies[mirror].devid) {
                member.counters.add_bad_copy(corruption);
            }
        }
    }

    fn member(&self, devid: DeviceId) -> Result<Arc<Member>> {
        self.members.read().get(&devid).cloned().ok_or(Error::NoDevice { devid })
    }

    fn present_members(&self) -> Vec<Arc<Member>> {
        self.members.read().values().filter(|member| member.device.is_some()).cloned().collect()
    }

    fn missing_error(&self, member: &Member) -> Error {
        Error::MissingDevice {
            fsid: Uuid(self.superblock.read().fsid),
            devid: Some(member.devid),
            device_uuid: Some(member.uuid()),
        }
    }

    fn check_writable(&self) -> Result<()> {
        if !self.options.read_only {
            return Ok(());
        }
        let members = self.members.read();
        let device = members.values().find_map(|member| member.device.as_ref());
        Err(Error::ReadOnly { device: device.map_or(String::new(), |device| device.name()) })
    }

    fn take_member(
        &self,
        device: Arc<dyn Device>,
        superblock: &Superblock,
        newest: &Superblock,
    ) -> Result<()> {
        let generation = superblock.generation.get();
        // A cut between the superblocks of two devices leaves them one commit apart: what the
        // newer one reaches was durable on both.
        if generation.saturating_add(1) < newest.generation.get() {
            if self.options.degraded {
                return Ok(());
            }
            return Err(Error::StaleDevice {
                device: device.name(),
                have: Generation(generation),
                newest: Generation(newest.generation.get()),
            });
        }
        if !self.options.read_only {
            if device.is_read_only() {
                return Err(Error::ReadOnly { device: device.name() });
            }
            let expect_bytes = superblock.dev_item.total_bytes.get();
            if device.len_bytes() < expect_bytes {
                let have_bytes = device.len_bytes();
                return Err(Error::TooShort { device: device.name(), have_bytes, expect_bytes });
            }
        }
        // Opened from a copy, the primary's state is whatever it is: that must not change either.
        let seen = match self.options.super_copy {
            None | Some(0) => Some(Seen::of(superblock)),
            Some(_) => superblocks::read_copy(&*device, SUPERBLOCK_OFFSETS[0])
                .ok()
                .map(|primary| Seen::of(&primary)),
        };
        let devid = DeviceId(superblock.dev_item.devid.get());
        let mut members = self.members.write();
        if let Some(Member { device: Some(first), .. }) = members.get(&devid).map(|m| &**m) {
            let (first, second) = (first.name(), device.name());
            return Err(Error::DuplicateDevice { first, second, devid });
        }
        members.insert(devid, Member::new(superblock.dev_item, Some(device), seen));
        Ok(())
    }

    /// Finds out which devices are missing, if any are, and takes them in as such.
    fn with_all_members(mut self, newest: &Superblock) -> Result<Self> {
        let expect = newest.num_devices.get();
        let have = self.members.read().len() as u64;
        if have > expect {
            return Err(Corruption::new(Reason::BadValue)
                .have(format!("{have} devices"))
                .expect(format!("{expect}, as the superblock says"))
                .into());
        }
        if have == expect {
            return Ok(self);
        }
        let options = self.options;
        // Reads what there is, so as to know what there is not.
        self.options = VolumeOptions { read_only: true, degraded: true, ..options };
        let mut unreadable = None;
        for chunk in newest.sys_chunks()? {
            self.add_chunk(chunk)?;
        }
        match missing::device_items(&self) {
            Ok(items) => {
                for item in items {
                    let devid = DeviceId(item.devid.get());
                    if self.device(devid).is_none() {
                        self.set_device_item(item);
                    }
                }
            }
            Err(error) => unreadable = Some(error),
        }
        self.options = options;
        if options.degraded {
            return Ok(self);
        }
        let members = self.members.read();
        let absent = members.values().find(|member| member.device.is_none());
        Err(match (absent, unreadable) {
            (Some(member), _) => self.missing_error(member),
            (None, Some(error @ Error::Io { .. })) => error,
            (None, _) => {
                Error::MissingDevice { fsid: Uuid(newest.fsid), devid: None, device_uuid: None }
            }
        })
    }

    /// A device that a chunk names and nobody gave is missing.
    fn find_or_miss(&self, devid: DeviceId, uuid: Uuid) -> Result<Arc<Member>> {
        if let Some(member) = self.members.read().get(&devid) {
            if member.uuid() == uuid {
                return Ok(member.clone());
            }
            return Err(Corruption::new(Reason::BadValue)
                .have(format!("uuid {uuid} for device {devid} in a chunk"))
                .expect(member.uuid())
                .into());
        }
        let member = Member::missing(devid, uuid);
        if !self.options.degraded {
            return Err(self.missing_error(&member));
        }
        self.members.write().insert(devid, member.clone());
        Ok(member)
    }

    fn check_alignment(&self, chunk: &Chunk) -> Result<()> {
        let sectorsize = self.geometry.sectorsize_bytes as u64;
        if chunk.start.0.is_multiple_of(sectorsize) && chunk.len_bytes.is_multiple_of(sectorsize) {
            return Ok(());
        }
        Err(Corruption::new(Reason::BadValue)
            .have(format!("chunk of {} bytes at {}", chunk.len_bytes, chunk.start))
            .expect(format!("multiples of the sector, {sectorsize}"))
            .into())
    }

    fn check_stripe_ends(&self, chunk: &Chunk, candidate: &ChunkMap) -> Result<()> {
        let stripe_bytes = candidate.stripe_bytes(chunk.start)?;
        for stripe in &chunk.stripes {
            let member = self.member(stripe.device)?;
            if member.device.is_none() {
                continue;
            }
            let total_bytes = member.item.lock().total_bytes.get();
            if stripe.offset.0 + stripe_bytes > total_bytes {
                return Err(Corruption::new(Reason::BadValue)
                    .have(format!(
                        "stripe of {stripe_bytes} bytes at {} on device {}",
                        stripe.offset, stripe.device
                    ))
                    .expect(format!("inside its {total_bytes} bytes"))
                    .into());
            }
        }
        Ok(())
    }

    fn check_copies_there(&self, start: LogicalAddr, candidate: &ChunkMap) -> Result<()> {
        let members = self.members.read();
        let is_there = |devid: &DeviceId| members.get(devid).is_some_and(|m| m.device.is_some());
        for column in candidate.columns(start)? {
            if !column.iter().any(is_there) {
                let member = members.get(&column[0]).ok_or(Error::NoDevice { devid: column[0] })?;
                return Err(self.missing_error(member));
            }
        }
        Ok(())
    }
}

type Found = (Arc<dyn Device>, Box<Superblock>);

/// The superblock of the highest generation, once all are of one filesystem.
fn newest_of(found: &[Found]) -> Result<Box<Superblock>> {
    let Some((_, first)) = found.first() else {
        let device = "(no device)".to_owned();
        return Err(Error::NotBtrfs { device, at: SUPERBLOCK_OFFSETS[0], found: None });
    };
    for (device, superblock) in found {
        if superblock.fsid != first.fsid {
            return Err(Error::OtherFilesystem {
                device: device.name(),
                have: Uuid(superblock.fsid),
                expect: Uuid(first.fsid),
            });
        }
    }
    let newest = found.iter().rev().max_by_key(|(_, superblock)| superblock.generation.get());
    Ok(newest.map_or_else(|| first.clone(), |(_, superblock)| superblock.clone()))
}

fn geometry_of(superblock: &Superblock) -> Result<Geometry> {
    let (nodesize, sectorsize) = (superblock.nodesize.get(), superblock.sectorsize.get());
    let possible = |bytes: u32| bytes.is_power_of_two() && (4096..=65536).contains(&bytes);
    if !possible(nodesize) || !possible(sectorsize) || nodesize < sectorsize {
        return Err(Corruption::new(Reason::BadGeometry)
            .have(format!("nodes of {nodesize} bytes, sectors of {sectorsize}"))
            .expect("powers of two from 4096 to 65536, nodes not below sectors")
            .into());
    }
    Ok(Geometry {
        nodesize_bytes: nodesize as usize,
        sectorsize_bytes: sectorsize as usize,
        csum: CsumType::from_disk(superblock.csum_type.get())?,
        fsid: superblock.header_fsid(),
    })
}

fn io_error(device: &dyn Device, op: Op, offset: PhysicalAddr, source: std::io::Error) -> Error {
    Error::Io { device: device.name(), op, offset, source }
}

fn index(offset: u64) -> usize {
    usize::try_from(offset).expect("an offset in a buffer in memory")
}

/// Collects the parts of `bufs` that a run consists of.
fn gather<'a>(bufs: &[&'a [u8]], run: &Run, gathered: &mut SmallVec<[&'a [u8]; 16]>) {
    gathered.clear();
    let mut bufs = bufs.iter();
    let mut current: &'a [u8] = &[];
    // Offset of `current` in the range.
    let mut offset = 0;
    for piece in run.pieces() {
        let (start, end) = (index(piece.start), index(piece.end));
        while offset < end {
            let skip = start.saturating_sub(offset);
            if skip >= current.len() {
                offset += current.len();
                current = bufs.next().expect("the runs cover the buffers");
                continue;
            }
            let take = (end - offset).min(current.len());
            gathered.push(&current[skip..take]);
            current = &current[take..];
            offset += take;
        }
    }
}
