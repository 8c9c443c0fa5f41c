//! A filesystem in memory that plugs in below `iomap`, made to show mistakes above: it writes each block to a new place, a place that is
//! given up reads as garbage from then on, and a crash leaves of each file what was made durable last.

mod durable;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use durable::Durable;
use ubtrfs_iomap::extent_state::{StateBits, Want};
use ubtrfs_iomap::{
    AddressSpace, Beyond, Detail, Error, Fate, FileOffset, FileRange, FileSystem, Mapping,
    MappingFlags, MappingKind, MappingSequence, Purpose, ReadPiece, RunFailure, SeenEnd,
    StraightWrites, WritebackRun,
};

/// The unit in which it allocates, in bytes.
pub const BLOCK: u64 = 4096;

/// What a place reads as that was given up.
const GARBAGE: u8 = 0xDB;

const UNPOISONED: &str = "no thread panicked with the lock";
const REFERENCED: &str = "a place that a file has is counted";
const IN_MEMORY: &str = "what is in memory can be counted";

/// What the filesystem says when something fails.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The request cannot be met.
    Request(Error),
    /// There is no space.
    NoSpace,
    /// The device failed.
    Io,
    /// Not at the moment.
    NotNow,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Request(error)
    }
}

/// What a file has in one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    address: u64,
    kind: MappingKind,
}

/// A file of [`MemoryFs`].
#[derive(Debug, Default)]
pub struct MemoryInode {
    sequence: MappingSequence,
    /// The extent lock.
    extents: Mutex<Extents>,
    /// What is in memory of it, where somebody has said so.
    space: Mutex<Weak<AddressSpace<MemoryFs>>>,
    durable: Mutex<Durable>,
}

impl MemoryInode {
    /// From now on this is what is in memory of it.
    pub fn note_space(&self, space: &Arc<AddressSpace<MemoryFs>>) {
        *self.space.lock().expect(UNPOISONED) = Arc::downgrade(space);
    }

    fn space(&self) -> Option<Arc<AddressSpace<MemoryFs>>> {
        self.space.lock().expect(UNPOISONED).upgrade()
    }

    /// Where it is to end, which it was to do at `size` before: who cuts it off in memory says so here afterwards.
    fn size_now(&self, size: u64) -> u64 {
        self.space().map_or(size, |space| space.size().bytes().min(size))
    }

    /// Whether the block in which it ends at `size` is dirty, and so will say that it does. What is on its way may have begun when it
    /// ended before.
    fn ends_dirty(&self, size: u64) -> bool {
        let Some(last) = size.checked_sub(1) else { return false };
        let block = FileRange::with_len(at(last / BLOCK * BLOCK), BLOCK);
        let is_dirty = Want::All(StateBits::DELALLOC);
        self.space().is_some_and(|space| space.states().test(block, is_dirty))
    }
}

#[derive(Clone, Debug, Default)]
struct Extents {
    places: BTreeMap<u64, Place>,
    size: u64,
}

#[derive(Debug, Default)]
struct Disk {
    blocks: HashMap<u64, Arc<Vec<u8>>>,
    references: HashMap<u64, u32>,
    /// Addresses that cannot be read, and how often.
    bad: HashMap<u64, u64>,
    next_address: u64,
    used_blocks: u64,
    reserved_blocks: u64,
}

/// Called at certain points, to make something happen there.
type Hook = Box<dyn Fn() + Send + Sync>;

/// The filesystem.
#[derive(Default)]
pub struct MemoryFs {
    disk: Mutex<Disk>,
    capacity_blocks: AtomicU64,
    /// Mappings are cut to so many blocks.
    mapping_blocks_max: AtomicU64,
    /// So many more writes to the device succeed.
    pub writes_left: AtomicU64,
    /// So many more reads succeed.
    pub reads_left: AtomicU64,
    /// A small file's only block is kept inline.
    pub inline_bytes_max: AtomicU64,
    /// Overwrites data where it lies, as for NOCOW files; mappings do not change then.
    pub is_in_place: AtomicUsize,
    /// Who makes a long file longer writes beside those who write back: [`StraightWrites::Beside`].
    pub writes_beside: AtomicBool,
    /// Writes that went straight.
    pub straight_count: AtomicU64,
    /// Does not fill the batch of dirty blocks.
    pub ignores_batch: AtomicUsize,
    /// Writing back fails with [`Failure::NotNow`], which passes.
    pub is_held: AtomicBool,
    /// Writes that failed.
    pub failure_count: AtomicU64,
    /// Runs written.
    pub write_count: AtomicU64,
    /// Calls that write runs back.
    pub write_back_count: AtomicU64,
    /// After so many more writes to the device, one fails.
    pub writes_before_failure: AtomicU64,
    /// A run whose write fails is stored up to so many blocks, fewer than it has.
    pub blocks_before_failure: AtomicU64,
    /// Reads.
    pub read_count: AtomicU64,
    /// Bytes read.
    pub bytes_read: AtomicU64,
    /// Mappings told.
    pub map_count: AtomicU64,
    /// Calls that asked for several.
    pub ask_ahead_count: AtomicU64,
    /// After data was written, before it is mapped.
    before_mapping: Mutex<Option<Arc<Hook>>>,
    /// After a mapping was taken.
    after_map: Mutex<Option<Arc<Hook>>>,
    /// Before a range is punched or written past the cache.
    before_change: Mutex<Option<Arc<Hook>>>,
    /// After data was read.
    after_read: Mutex<Option<Arc<Hook>>>,
    /// When where a file ends is to be changed, which then fails.
    size_refusal: Mutex<Option<Arc<Hook>>>,
}

impl MemoryFs {
    /// One that never runs full.
    #[allow(clippy::new_ret_no_self, reason = "address spaces share it")]
    pub fn new() -> Arc<Self> {
        Self::with_capacity(u64::MAX)
    }

    /// One that has so many blocks.
    pub fn with_capacity(blocks: u64) -> Arc<Self> {
        let fs = Self::default();
        fs.capacity_blocks.store(blocks, Ordering::Relaxed);
        fs.mapping_blocks_max.store(u64::MAX, Ordering::Relaxed);
        fs.writes_left.store(u64::MAX, Ordering::Relaxed);
        fs.reads_left.store(u64::MAX, Ordering::Relaxed);
        fs.writes_before_failure.store(u64::MAX, Ordering::Relaxed);
        Arc::new(fs)
    }

    /// From now on a mapping holds so many blocks at most.
    pub fn cut_mappings(&self, blocks_max: u64) {
        self.mapping_blocks_max.store(blocks_max, Ordering::Relaxed);
    }

    /// Each time after data was written, before it is mapped.
    pub fn before_mapping(&self, hook: impl Fn() + Send + Sync + 'static) {
        *self.before_mapping.lock().expect(UNPOISONED) = Some(Arc::new(Box::new(hook)));
    }

    /// Each time after a mapping was taken.
    pub fn after_map(&self, hook: impl Fn() + Send + Sync + 'static) {
        *self.after_map.lock().expect(UNPOISONED) = Some(Arc::new(Box::new(hook)));
    }

    /// Once, before a range is punched or written past the cache.
    pub fn before_change(&self, hook: impl Fn() + Send + Sync + 'static) {
        *self.before_change.lock().expect(UNPOISONED) = Some(Arc::new(Box::new(hook)));
    }

    /// Once, when where a file ends is to be changed, which then fails for want of space.
    pub fn refuse_next_size(&self, hook: impl Fn() + Send + Sync + 'static) {
        *self.size_refusal.lock().expect(UNPOISONED) = Some(Arc::new(Box::new(hook)));
    }

    fn change_begins(&self) {
        let hook = self.before_change.lock().expect(UNPOISONED).take();
        if let Some(hook) = hook {
            hook();
        }
    }

    /// Once, after data was read.
    pub fn after_next_read(&self, hook: impl Fn() + Send + Sync + 'static) {
        *self.after_read.lock().expect(UNPOISONED) = Some(Arc::new(Box::new(hook)));
    }

    /// Blocks reserved.
    pub fn reserved_blocks(&self) -> u64 {
        self.disk.lock().expect(UNPOISONED).reserved_blocks
    }

    /// Blocks that files have.
    pub fn used_blocks(&self) -> u64 {
        self.disk.lock().expect(UNPOISONED).used_blocks
    }

    /// A reflink: `to` gets what `from` has. Nothing of both is dirty.
    pub fn share(&self, from: &MemoryInode, to: &MemoryInode) {
        let source = from.extents.lock().expect(UNPOISONED).clone();
        let mut disk = self.disk.lock().expect(UNPOISONED);
        for place in source.places.values() {
            *disk.references.get_mut(&place.address).expect(REFERENCED) += 1;
        }
        *to.extents.lock().expect(UNPOISONED) = source;
        to.sequence.changed();
        from.sequence.changed();
    }

    /// A reflink of whole blocks of `from` to `to_block` of `to`, another file, which ends no earlier then. Nothing of both is
    /// dirty.
    pub fn clone_blocks(
        &self,
        from: &MemoryInode,
        from_blocks: std::ops::Range<u64>,
        to: &MemoryInode,
        to_block: u64,
    ) {
        let source = from.extents.lock().expect(UNPOISONED).clone();
        let mut extents = to.extents.lock().expect(UNPOISONED);
        let mut disk = self.disk.lock().expect(UNPOISONED);
        for (block, at) in from_blocks.clone().zip(to_block..) {
            let place = source.places.get(&block).copied();
            if let Some(place) = place {
                *disk.references.get_mut(&place.address).expect(REFERENCED) += 1;
            }
            let old = match place {
                Some(place) => extents.places.insert(at, place),
                None => extents.places.remove(&at),
            };
            if let Some(old) = old {
                disk.drop_address(old.address);
            }
        }
        let count = from_blocks.end - from_blocks.start;
        extents.size = extents.size.max((to_block + count) * BLOCK);
        to.sequence.changed();
        from.sequence.changed();
    }

    /// From now on a block that a file has cannot be read.
    ///
    /// # Panics
    /// If the file has none there.
    pub fn spoil(&self, inode: &MemoryInode, block: u64) {
        self.spoil_for(inode, block, u64::MAX);
    }

    /// As [`MemoryFs::spoil`], but for so many reads of it.
    ///
    /// # Panics
    /// If the file has none there.
    pub fn spoil_for(&self, inode: &MemoryInode, block: u64, reads: u64) {
        let place = inode.extents.lock().expect(UNPOISONED).places[&block];
        self.disk.lock().expect(UNPOISONED).bad.insert(place.address, reads);
    }

    /// Moves all data of a file elsewhere, as balance does.
    pub fn relocate(&self, inode: &MemoryInode) {
        let mut extents = inode.extents.lock().expect(UNPOISONED);
        let mut disk = self.disk.lock().expect(UNPOISONED);
        for place in extents.places.values_mut() {
            let old = place.address;
            place.address = disk.take_address();
            if let Some(bytes) = disk.blocks.get(&old).cloned() {
                disk.blocks.insert(place.address, bytes);
            }
            disk.drop_address(old);
        }
        inode.sequence.changed();
    }

    /// What the file would hold if it were opened now.
    pub fn stored(&self, inode: &MemoryInode, size: u64) -> Vec<u8> {
        let extents = inode.extents.lock().expect(UNPOISONED);
        let disk = self.disk.lock().expect(UNPOISONED);
        let mut bytes = vec![0; usize::try_from(size.next_multiple_of(BLOCK)).expect(IN_MEMORY)];
        for (block, place) in &extents.places {
            let at = usize::try_from(block * BLOCK).expect(IN_MEMORY);
            if !place.kind.is_zeros() && at < bytes.len() {
                bytes[at..at + 4096].copy_from_slice(&disk.blocks[&place.address]);
            }
        }
        bytes
    }

    /// Blocks that have data on the medium.
    pub fn stored_blocks(inode: &MemoryInode) -> Vec<u64> {
        let extents = inode.extents.lock().expect(UNPOISONED);
        let data = extents.places.iter().filter(|(_, place)| !place.kind.is_zeros());
        data.map(|(block, _)| *block).collect()
    }

    /// Blocks that have space.
    pub fn allocated_blocks(inode: &MemoryInode) -> Vec<u64> {
        inode.extents.lock().expect(UNPOISONED).places.keys().copied().collect()
    }

    /// Where the file ends, as the filesystem knows.
    pub fn stored_size(inode: &MemoryInode) -> u64 {
        inode.extents.lock().expect(UNPOISONED).size
    }

    /// The block in which a file ends, if that is inside of one.
    fn old_tail(inode: &MemoryInode) -> FileRange {
        let size = Self::stored_size(inode);
        FileRange::new(at(size), at(size.next_multiple_of(BLOCK))).round_out(BLOCK)
    }

    fn drop_blocks(&self, inode: &MemoryInode, range: FileRange) {
        self.change_begins();
        let mut extents = inode.extents.lock().expect(UNPOISONED);
        let mut disk = self.disk.lock().expect(UNPOISONED);
        let gone: Vec<u64> = extents.places.range(blocks(range)).map(|(block, _)| *block).collect();
        for block in gone {
            let place = extents.places.remove(&block).expect("it was there");
            disk.drop_address(place.address);
        }
        inode.sequence.changed();
    }

    fn spend(counter: &AtomicU64) -> Result<(), Failure> {
        let spent = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| match left {
            0 => None,
            u64::MAX => Some(u64::MAX),
            left => Some(left - 1),
        });
        spent.map(|_| ()).map_err(|_| Failure::Io)
    }

    fn store(
        &self,
        inode: &MemoryInode,
        run: &WritebackRun<'_>,
        from_memory: bool,
    ) -> Result<(), Failure> {
        self.write_count.fetch_add(1, Ordering::Relaxed);
        let failed = |_: &Failure| _ = self.failure_count.fetch_add(1, Ordering::Relaxed);
        Self::spend(&self.writes_left).inspect_err(failed)?;
        Self::spend(&self.writes_before_failure)
            .inspect_err(|_| self.writes_before_failure.store(u64::MAX, Ordering::Relaxed))
            .inspect_err(failed)?;
        self.store_whole(inode, run, from_memory);
        Ok(())
    }

    fn store_whole(&self, inode: &MemoryInode, run: &WritebackRun<'_>, from_memory: bool) {
        let total: usize = run.buffers.iter().map(|buffer| buffer.len()).sum();
        assert_eq!(u64::try_from(total).expect(IN_MEMORY), run.range.len_bytes());
        let mut bytes = run.buffers.iter().flat_map(|buffer| buffer.chunks(4096));
        let mut written = Vec::new();
        for block in blocks(run.range) {
            let data = Arc::new(bytes.next().expect("as many as the range has").to_vec());
            let beyond =
                usize::try_from(run.size.bytes().saturating_sub(block * BLOCK)).expect(IN_MEMORY);
            assert!(
                data.iter().skip(beyond).all(|byte| *byte == 0),
                "bytes beyond the end written"
            );
            let old = inode.extents.lock().expect(UNPOISONED).places.get(&block).copied();
            let mut disk = self.disk.lock().expect(UNPOISONED);
            if self.is_in_place.load(Ordering::Relaxed) == 1
                && let Some(Place { address, kind: MappingKind::Mapped }) = old
            {
                disk.blocks.insert(address, data);
                continue;
            }
            let address = disk.take_address();
            disk.blocks.insert(address, data);
            let inline_max = self.inline_bytes_max.load(Ordering::Relaxed);
            let is_inline = block == 0 && run.size.bytes() <= inline_max;
            let kind = if is_inline { MappingKind::Inline } else { MappingKind::Mapped };
            written.push((block, Place { address, kind }));
        }
        let hook = self.before_mapping.lock().expect(UNPOISONED).clone();
        if let Some(hook) = hook {
            hook();
        }
        let mut extents = inode.extents.lock().expect(UNPOISONED);
        let mut disk = self.disk.lock().expect(UNPOISONED);
        let is_mapped_anew = !written.is_empty();
        for (block, place) in written {
            if let Some(old) = extents.places.insert(block, place) {
                disk.drop_address(old.address);
            }
        }
        if is_mapped_anew {
            inode.sequence.changed();
        }
        // Data is never mapped behind the end.
        let end = run.size.bytes().min(run.range.end.bytes());
        let end = if from_memory { inode.size_now(end) } else { end };
        extents.size = extents.size.max(end);
    }

    /// The front of a run whose write failed; returns what of it is stored.
    fn store_front(&self, inode: &MemoryInode, run: &WritebackRun<'_>) -> Vec<FileRange> {
        let len_bytes = self.blocks_before_failure.load(Ordering::Relaxed) * BLOCK;
        if len_bytes == 0 {
            return Vec::new();
        }
        let front = FileRange::with_len(run.range.start, len_bytes);
        let bytes = run.buffers.concat();
        let bytes = &bytes[..usize::try_from(len_bytes).expect(IN_MEMORY)];
        let part = WritebackRun { range: front, buffers: &[bytes], size: run.size };
        self.store_whole(inode, &part, true);
        vec![front]
    }
}

impl Disk {
    fn take_address(&mut self) -> u64 {
        let address = self.next_address;
        self.next_address += 1;
        self.used_blocks += 1;
        self.references.insert(address, 1);
        address
    }

    fn drop_address(&mut self, address: u64) {
        let references = self.references.get_mut(&address).expect(REFERENCED);
        *references -= 1;
        if *references == 0 {
            self.references.remove(&address);
            self.blocks.remove(&address);
            self.used_blocks -= 1;
        }
    }
}

/// The blocks that hold a byte of the range.
pub fn blocks(range: FileRange) -> std::ops::Range<u64> {
    range.start.bytes() / BLOCK..range.end.bytes().div_ceil(BLOCK)
}

impl MemoryFs {
    fn map_in_detail(
        &self,
        inode: &Arc<MemoryInode>,
        range: FileRange,
        purpose: Purpose<'_, '_>,
        detail: Detail,
    ) -> Result<Mapping, Failure> {
        assert!(!range.is_empty() && range.start.bytes().is_multiple_of(BLOCK));
        self.map_count.fetch_add(1, Ordering::Relaxed);
        let extents = inode.extents.lock().expect(UNPOISONED);
        let disk_lock = self.disk.lock();
        let mut disk = disk_lock.expect(UNPOISONED);
        let first = range.start.bytes() / BLOCK;
        let place = extents.places.get(&first).copied();
        let is_shared = |place: Place| disk.references[&place.address] > 1;
        let same = |at: u64| {
            let other = extents.places.get(&(first + at)).copied();
            match (place, other) {
                (None, None) => true,
                (Some(place), Some(other)) => {
                    other.kind == place.kind
                        && other.address == place.address + at
                        && is_shared(other) == is_shared(place)
                }
                _ => false,
            }
        };
        let mut end = range.end.round_up(BLOCK);
        let count = match place {
            None => extents.places.range(first..).next().map_or(u64::MAX, |(next, _)| next - first),
            Some(_) => (1..).find(|at| !same(*at)).expect("a file ends"),
        };
        let is_last_hole = count == u64::MAX;
        let blocks_max = self.mapping_blocks_max.load(Ordering::Relaxed);
        let count = if is_last_hole { count } else { count.min(blocks_max) };
        if let Some(upto) = first.checked_add(count).and_then(|block| block.checked_mul(BLOCK)) {
            // What was not asked for is told, too, where it is cheap.
            end = if place.is_some() {
                FileOffset::new(upto)
            } else {
                end.min(FileOffset::new(upto))
            };
        }
        let kind = place.map_or(MappingKind::Hole, |place| place.kind);
        let mut mapped = FileRange::new(range.start, end);
        // Only who is to be told may know.
        let tells_shared = detail == Detail::Sharing;
        let is_write = matches!(purpose, Purpose::Write);
        let is_shared = tells_shared && place.is_some_and(is_shared);
        match purpose {
            Purpose::Write => {
                let wanted = mapped.intersection(range.round_out(BLOCK)).len_bytes() / BLOCK;
                let capacity = self.capacity_blocks.load(Ordering::Relaxed);
                if wanted > capacity.saturating_sub(disk.used_blocks + disk.reserved_blocks) {
                    return Err(Failure::NoSpace);
                }
                disk.reserved_blocks += wanted;
            }
            Purpose::Zero(batch)
                if kind.is_zeros() && self.ignores_batch.load(Ordering::Relaxed) == 0 =>
            {
                mapped = batch.fill(mapped.intersection(range.round_out(BLOCK)));
            }
            _ => {}
        }
        let mapping = Mapping {
            range: mapped,
            kind,
            flags: MappingFlags { is_shared, ..MappingFlags::default() },
            cookie: inode.sequence.cookie(),
            address: place.map(|place| place.address * BLOCK),
            token: place.map_or(0, |place| place.address),
        };
        let mapping = if is_write { mapping.reserved() } else { mapping };
        drop((disk, extents));
        let hook = self.after_map.lock().expect(UNPOISONED).clone();
        if let Some(hook) = hook {
            hook();
        }
        Ok(mapping)
    }
}

impl FileSystem for MemoryFs {
    type Inode = Arc<MemoryInode>;
    type Error = Failure;

    fn straight_writes(&self, _inode: &Arc<MemoryInode>) -> StraightWrites {
        match self.writes_beside.load(Ordering::Relaxed) {
            true => StraightWrites::Beside,
            false => StraightWrites::Always,
        }
    }

    fn write_straight(
        &self,
        inode: &Arc<MemoryInode>,
        run: &WritebackRun<'_>,
    ) -> Result<u64, Failure> {
        let result = self.write_direct(inode, run);
        self.straight_count.fetch_add(u64::from(result.is_ok()), Ordering::Relaxed);
        result
    }

    fn block_bytes(&self) -> u32 {
        4096
    }

    fn sequence<'a>(&self, inode: &'a Arc<MemoryInode>) -> &'a MappingSequence {
        &inode.sequence
    }

    fn map(
        &self,
        inode: &Arc<MemoryInode>,
        range: FileRange,
        purpose: Purpose<'_, '_>,
    ) -> Result<Mapping, Failure> {
        self.map_in_detail(inode, range, purpose, Detail::Contents)
    }

    /// Several mappings of one moment, as long as nothing changes between them.
    fn map_ahead(
        &self,
        inode: &Arc<MemoryInode>,
        range: FileRange,
        detail: Detail,
        count_max: usize,
        mappings: &mut Vec<Mapping>,
    ) -> Result<(), Failure> {
        self.ask_ahead_count.fetch_add(1, Ordering::Relaxed);
        let mut rest = range;
        for index in 0..count_max {
            let mapping = self.map_in_detail(inode, rest, Purpose::Read, detail)?;
            let is_later = mappings.last().is_some_and(|last| last.cookie != mapping.cookie);
            if index > 0 && is_later {
                break;
            }
            mappings.push(mapping);
            rest.start = mapping.range.end.min(rest.end);
            if rest.is_empty() {
                break;
            }
        }
        Ok(())
    }

    fn read(&self, _inode: &Arc<MemoryInode>, pieces: &mut [ReadPiece<'_>]) -> Result<(), Failure> {
        self.read_count.fetch_add(1, Ordering::Relaxed);
        Self::spend(&self.reads_left)?;
        for ReadPiece { mapping, start, buffers } in pieces {
            let mut at = *start;
            for part in buffers.iter_mut().flat_map(|buffer| buffer.chunks_mut(4096)) {
                assert!(mapping.range.contains(at));
                let block = at.bytes_since(mapping.range.start) / BLOCK;
                let from = usize::try_from(at.bytes() % BLOCK).expect(IN_MEMORY);
                assert!(from + part.len() <= 4096);
                let mut disk = self.disk.lock().expect(UNPOISONED);
                if let Some(left @ 1..) = disk.bad.get_mut(&(mapping.token + block)) {
                    *left -= 1;
                    return Err(Failure::Io);
                }
                match disk.blocks.get(&(mapping.token + block)) {
                    Some(bytes) => part.copy_from_slice(&bytes[from..from + part.len()]),
                    None => part.fill(GARBAGE),
                }
                let len_bytes = u64::try_from(part.len()).expect(IN_MEMORY);
                self.bytes_read.fetch_add(len_bytes, Ordering::Relaxed);
                at = at.saturating_add(len_bytes);
            }
        }
        let hook = self.after_read.lock().expect(UNPOISONED).take();
        if let Some(hook) = hook {
            hook();
        }
        Ok(())
    }

    fn write_back(
        &self,
        inode: &Arc<MemoryInode>,
        runs: &[WritebackRun<'_>],
    ) -> Result<(), RunFailure<Failure>> {
        self.write_back_count.fetch_add(1, Ordering::Relaxed);
        for (index, run) in runs.iter().enumerate() {
            if self.is_held.load(Ordering::Relaxed) {
                let stored = Vec::new();
                return Err(RunFailure { index, error: Failure::NotNow, fate: Fate::Kept, stored });
            }
            let result = self.store(inode, run, true);
            let but = match &result {
                Ok(()) => FileRange::default(),
                Err(_) => Self::old_tail(inode).intersection(run.range),
            };
            let stored = if result.is_err() { self.store_front(inode, run) } else { Vec::new() };
            self.unreserve(inode, run.range.len_bytes() - but.len_bytes());
            let fate = Fate::Lost { but };
            result.map_err(|error| RunFailure { index, error, fate, stored })?;
        }
        Ok(())
    }

    fn write_direct(
        &self,
        inode: &Arc<MemoryInode>,
        run: &WritebackRun<'_>,
    ) -> Result<u64, Failure> {
        self.change_begins();
        let wanted = run.range.len_bytes() / BLOCK;
        let capacity = self.capacity_blocks.load(Ordering::Relaxed);
        let disk = self.disk.lock().expect(UNPOISONED);
        let free = capacity.saturating_sub(disk.used_blocks + disk.reserved_blocks);
        drop(disk);
        if wanted <= free {
            return self.store(inode, run, false).map(|()| run.range.len_bytes());
        }
        if free == 0 {
            return Err(Failure::NoSpace);
        }
        let front = FileRange::with_len(run.range.start, free * BLOCK);
        let bytes = run.buffers.concat();
        let bytes = &bytes[..usize::try_from(front.len_bytes()).expect(IN_MEMORY)];
        self.store(
            inode,
            &WritebackRun { range: front, buffers: &[bytes], size: run.size },
            false,
        )?;
        Ok(front.len_bytes())
    }

    fn unreserve(&self, _inode: &Arc<MemoryInode>, len_bytes: u64) {
        let mut disk = self.disk.lock().expect(UNPOISONED);
        assert_eq!(len_bytes % BLOCK, 0);
        disk.reserved_blocks = disk
            .reserved_blocks
            .checked_sub(len_bytes / BLOCK)
            .expect("more given back than taken");
    }

    fn stored_size(&self, inode: &Arc<MemoryInode>) -> Result<Option<FileOffset>, Failure> {
        Ok(Some(at(inode.extents.lock().expect(UNPOISONED).size)))
    }

    fn set_size(
        &self,
        inode: &Arc<MemoryInode>,
        size: FileOffset,
        beyond: Beyond,
    ) -> Result<(), Failure> {
        let refusal = self.size_refusal.lock().expect(UNPOISONED).take();
        if let Some(refusal) = refusal {
            refusal();
            return Err(Failure::NoSpace);
        }
        let ends_dirty = inode.ends_dirty(size.bytes());
        // Shorter than in memory, it may be longer than on the medium.
        if beyond == Beyond::Dropped
            && !ends_dirty
            && let Some(space) = inode.space()
        {
            space.flush_old_tail(size)?;
        }
        if beyond == Beyond::Dropped {
            self.drop_blocks(inode, FileRange::from(size.round_up(BLOCK)));
        }
        let mut extents = inode.extents.lock().expect(UNPOISONED);
        // A block that is on its way says itself that the file ends in it.
        let is_told = ends_dirty && size.bytes() > extents.size;
        if !is_told {
            extents.size = size.bytes();
        }
        Ok(())
    }

    fn punch(&self, inode: &Arc<MemoryInode>, range: FileRange) -> Result<(), Failure> {
        self.drop_blocks(inode, range);
        // The dirty block that would have said where the file ends may be gone. Behind the block in which it ended that must be there first.
        if let Some(space) = inode.space() {
            space.flush_old_tail(space.size())?;
        }
        let mut extents = inode.extents.lock().expect(UNPOISONED);
        if let Some(space) = inode.space() {
            extents.size = extents.size.max(space.size().bytes());
        }
        Ok(())
    }

    fn check_space(&self, _inode: &Arc<MemoryInode>, len_bytes: u64) -> Result<(), Failure> {
        let disk = self.disk.lock().expect(UNPOISONED);
        let free = self.capacity_blocks.load(Ordering::Relaxed);
        let free = free.saturating_sub(disk.used_blocks + disk.reserved_blocks);
        if len_bytes / BLOCK > free { Err(Failure::NoSpace) } else { Ok(()) }
    }

    fn allocate(&self, inode: &Arc<MemoryInode>, range: FileRange) -> Result<(), Failure> {
        assert!(!range.is_empty() && range.round_out(BLOCK) == range);
        let mut extents = inode.extents.lock().expect(UNPOISONED);
        let mut disk = self.disk.lock().expect(UNPOISONED);
        let capacity = self.capacity_blocks.load(Ordering::Relaxed);
        for block in blocks(range) {
            if extents.places.contains_key(&block) {
                continue;
            }
            if disk.used_blocks + disk.reserved_blocks >= capacity {
                return Err(Failure::NoSpace);
            }
            let place = Place { address: disk.take_address(), kind: MappingKind::Unwritten };
            extents.places.insert(block, place);
            inode.sequence.changed();
        }
        Ok(())
    }

    fn sync(&self, inode: &Arc<MemoryInode>, end: SeenEnd) -> Result<(), Failure> {
        // What is made durable of a file may end before it does.
        let mut extents = inode.extents.lock().expect(UNPOISONED);
        let size = inode.space().map_or(end.size(), |space| space.end_to_record(end));
        extents.size = extents.size.max(size.bytes());
        inode.make_durable(&extents, &self.disk.lock().expect(UNPOISONED));
        Ok(())
    }
}

/// A place in a file.
pub fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

/// From `start` up to `end`.
pub fn range(start: u64, end: u64) -> FileRange {
    FileRange::new(at(start), at(end))
}
