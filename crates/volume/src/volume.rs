//! A filesystem's devices and chunks together.
//!
//! Lock order: `members`, then `map`, then `superblock`, then a member's `seen`; none but `seen` is held during I/O, which is that of the
//! superblock.

mod open;
mod read;
mod watch;

use std::collections::BTreeMap;

use smallvec::SmallVec;
use ubtrfs_ondisk::chunk::Chunk;
use ubtrfs_ondisk::misc::DevItem;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::verify::Geometry;
use ubtrfs_ondisk::{Corruption, DeviceId, Generation, LogicalAddr, PhysicalAddr, Reason, Uuid};
use ubtrfs_rt::{Arc, AtomicBool, Mutex, Ordering, RwLock};

use crate::chunk_map::{ChunkMap, Run};
use crate::device::Device;
use crate::error::{Error, Op, Result};
use crate::stats::{Counters, DeviceStats};
use crate::superblocks::{self, Seen};
use watch::{Look, Watch};

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
    /// All devices have the last superblock, durably.
    is_caught_up: AtomicBool,
    /// Held by who gives it to them.
    catching_up: Mutex<()>,
    watch: Watch,
    left_out: Vec<LeftOut>,
}

/// A device that was given and is not used: it is missing, as others were written to without it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeftOut {
    /// Its name.
    pub device: String,
    /// Its superblock's generation.
    pub have: Generation,
    /// That of the filesystem.
    pub newest: Generation,
}

/// A device of the filesystem, there or missing.
#[derive(Debug)]
struct Member {
    devid: DeviceId,
    device: Option<Arc<dyn Device>>,
    item: Mutex<DevItem>,
    /// The item of the superblock that was found.
    found_item: DevItem,
    /// The item as of the last superblock.
    durable_item: Mutex<DevItem>,
    /// The primary superblock as last read or written; `None` before that, and where writing it failed. Locked while it is written, and
    /// while it is compared.
    seen: Mutex<Option<Seen>>,
    counters: Counters,
}

impl Member {
    fn new(item: DevItem, device: Option<Arc<dyn Device>>, seen: Option<Seen>) -> Arc<Self> {
        Arc::new(Self {
            devid: DeviceId(item.devid.get()),
            device,
            item: Mutex::new(item),
            found_item: item,
            durable_item: Mutex::new(item),
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

    /// Bytes that each stripe of the chunk at `at` takes on its device.
    ///
    /// # Errors
    /// `NoChunk`.
    pub fn stripe_bytes(&self, at: LogicalAddr) -> Result<u64> {
        self.map.read().stripe_bytes(at)
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
    /// a part is on a device that is there; `MountedByKernel` and `SuperblockChanged`, with nothing of this
    /// written; `Io`, which is counted: some copies may be written.
    pub fn write_vectored(&self, at: LogicalAddr, bufs: &[&[u8]]) -> Result<()> {
        let _writing = self.begin_write()?;
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
    /// `NoChunk`, `ReadOnly` or `Io`; `MountedByKernel` and `SuperblockChanged`, with nothing done.
    pub fn discard(&self, at: LogicalAddr, len_bytes: u64) -> Result<()> {
        let _writing = self.begin_write()?;
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
    /// `SuperblockChanged` when a primary is not as last read or written here, and `MountedByKernel`: no primary is written then, or, where another
    /// thread sees that meanwhile, none from then on. `ReadOnly`; `Io`: the filesystem on the medium is then the old or the new one.
    pub fn write_superblocks(&self, superblock: &Superblock) -> Result<()> {
        self.check_writable()?;
        self.check_ours()?;
        self.catch_up_first()?;
        let members = self.present_members();
        let is_one = members.len() <= 1;
        let mut writing = self.watch.begin_write()?;
        let devices = || members.iter().filter_map(|m| Some((m, m.device.as_deref()?)));
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
        if !is_one {
            self.flush()?;
            drop(writing);
            // That may have taken seconds.
            self.check_ours()?;
            writing = self.watch.begin_write()?;
        }
        for (member, device) in devices() {
            let own = own(member);
            let mut seen = member.seen.lock();
            // Another thread may have looked since.
            self.watch.check()?;
            let written = superblocks::write_copy(device, &own, SUPERBLOCK_OFFSETS[0]);
            // Where that failed it is the old one, or this, or neither, of our own making.
            *seen = written.as_ref().ok().copied();
            counted(member, written)?;
        }
        writing.end_as_superblock();
        **self.superblock.write() = *superblock;
        self.note_durable_items();
        self.flush()
    }

    /// The device items are those of the superblock last read or written: after they were read from the
    /// tree, before anything changes.
    pub fn note_durable_items(&self) {
        for member in self.members.read().values() {
            *member.durable_item.lock() = *member.item.lock();
        }
    }

    /// Makes durable what the volume was opened with, unless this session has done so. What is read is not what a power cut leaves: whoever
    /// wrote the last superblock may have been killed, or have failed, as it was to be flushed. Who does not ask for it has it done before his
    /// first write; so has who opened another copy than the primary, which stays as it is until then.
    ///
    /// # Errors
    /// `MountedByKernel` and `SuperblockChanged`; `Io`: it is done again by the next call, or the next write.
    pub fn make_opened_durable(&self) -> Result<()> {
        let is_of_primaries = self.options.super_copy.unwrap_or(0) == 0;
        if self.options.read_only || !is_of_primaries || self.is_caught_up.load(Ordering::Acquire) {
            return Ok(());
        }
        self.look(Look::IfDue)?;
        self.catch_up_first()
    }

    /// Before anything else is written, all devices get the last superblock, durably: what the one before it refers to may be written over from
    /// now on, and a device that a power cut kept from it would be two behind after another cut, or have no copy of it any more, and be
    /// taken for stale. It is written where it stands already, too: after a flush that failed the system may have dropped it, and takes the next
    /// flush, of which nothing is left, for done.
    fn catch_up_first(&self) -> Result<()> {
        if self.is_caught_up.load(Ordering::Acquire) {
            return Ok(());
        }
        let _catching_up = self.catching_up.lock();
        if self.is_caught_up.load(Ordering::Acquire) {
            return Ok(());
        }
        let last = self.superblock();
        let mut caught_up = Vec::new();
        let writing = self.watch.begin_write()?;
        for member in self.present_members() {
            let Some(device) = member.device.as_deref() else { continue };
            let mut seen = member.seen.lock();
            // Its own as it is: what a damaged filesystem says of it elsewhere may keep it from being opened again.
            let dev_item = match *seen {
                Some(seen) if seen.generation.0 == last.generation.get() => member.found_item,
                _ => *member.durable_item.lock(),
            };
            let own = Superblock { dev_item, ..last };
            self.check_seen(device, *seen)?;
            self.watch.check()?;
            // Until that is durable it is the old one, or this, or neither, of our own making.
            *seen = None;
            let written = superblocks::write_copy(device, &own, SUPERBLOCK_OFFSETS[0])
                .inspect_err(|_| Counters::add(&member.counters.write))?;
            drop(seen);
            caught_up.push((member, written));
        }
        writing.end_as_superblock();
        self.flush()?;
        for (member, written) in caught_up {
            *member.seen.lock() = Some(written);
        }
        self.is_caught_up.store(true, Ordering::Release);
        Ok(())
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

    /// Lets the kernel hold the devices, as a mount of its own that shows this filesystem will.
    pub fn yield_claims(&self) {
        for member in self.members.read().values() {
            if let Some(device) = &member.device {
                device.yield_claim();
            }
        }
    }

    /// The devices that were given and are out of date, which a degraded volume does without.
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
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
    /// `NoDevice`; `MissingDevice`; `Io` where the length is fixed; `MountedByKernel` and `SuperblockChanged`.
    pub fn resize_device(&self, devid: DeviceId, len_bytes: u64) -> Result<()> {
        self.check_writable()?;
        self.check_ours()?;
        let _writing = self.watch.begin_write()?;
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
