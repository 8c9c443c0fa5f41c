//! Reading a file's bytes: every sector with a checksum is compared with it, every copy tried.
//!
//! Plain data goes from the device into the caller's buffer; only sectors that the caller wants
//! in part go through a buffer here. A compressed extent that is wanted whole is decoded into the
//! caller's buffer, several on all cores; of one wanted in part the decoded bytes are kept for the next call.

use ubtrfs_ondisk::file_extent::{Compression, FileExtent};
use ubtrfs_ondisk::{Corruption, FileOffset, LogicalAddr, Reason};
use ubtrfs_rt::{Arc, AtomicBool, Mutex, Ordering};

use super::compression;
use super::file_extent::{ExtentWalk, ExtentsOf, Mapping, MappingKind};
use super::sectors::{DataSource, Scratch, SectorReader, with_scratch};
use crate::btree::Tree;
use crate::error::{Error, Result};

/// Unaligned ranges up to this length are read whole into a buffer here, longer ones only at
/// their ends.
const BOUNCE_BYTES_MAX: usize = 64 << 10;
/// Bytes of extents that are decoded side by side, at most, decoded or not, whichever are more: what they are decoded from is in memory.
const TOGETHER_BYTES_MAX: usize = 1 << 20;
/// The part of them that is read before any is decoded: the shorter, the sooner others have something to do.
const READ_FIRST_PART: usize = 4;
/// Decoded extents that are kept.
const DECODED_COUNT: usize = 8;

/// Decoded extents of which part was wanted, so that the next read of the same one is a copy.
#[derive(Debug, Default)]
pub(crate) struct DecodedCache {
    slots: Mutex<DecodedSlots>,
}

#[derive(Debug, Default)]
struct DecodedSlots {
    slots: [Option<(DecodedKey, Arc<Vec<u8>>)>; DECODED_COUNT],
    next: usize,
    /// How often an extent was forgotten: what was decoded before may be of one that is gone.
    forgotten: u64,
}

/// The extent's generation keeps a reused address apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DecodedKey {
    disk_bytenr: LogicalAddr,
    disk_num_bytes: u64,
    ram_bytes: u64,
    compression: u8,
    generation: u64,
}

impl DecodedCache {
    /// The decoded extent; else what [`DecodedCache::keep`] is to be told of it.
    fn find(&self, key: &DecodedKey) -> Result<Arc<Vec<u8>>, u64> {
        let slots = self.slots.lock();
        let found = slots.slots.iter().flatten().find(|(have, _)| have == key);
        found.map(|(_, bytes)| Arc::clone(bytes)).ok_or(slots.forgotten)
    }

    /// Forgets an extent that is gone: another of this transaction may come in its place.
    pub(crate) fn forget(&self, disk_bytenr: LogicalAddr) {
        let mut slots = self.slots.lock();
        slots.forgotten += 1;
        for slot in &mut slots.slots {
            if slot.as_ref().is_some_and(|(key, _)| key.disk_bytenr == disk_bytenr) {
                *slot = None;
            }
        }
    }

    /// Keeps what was decoded since `forgotten` was told, unless it may be gone since.
    fn keep(&self, key: DecodedKey, bytes: Arc<Vec<u8>>, forgotten: u64) {
        let mut slots = self.slots.lock();
        if slots.forgotten != forgotten {
            return;
        }
        let place = slots.next;
        slots.slots[place] = Some((key, bytes));
        slots.next = (place + 1) % DECODED_COUNT;
    }
}

/// Reads one file.
#[derive(Debug)]
pub(crate) struct FileReader {
    of: ExtentsOf,
    walk: ExtentWalk,
    sectors: SectorReader,
}

/// A compressed extent that is wanted whole.
struct WholeExtent<'a> {
    offset: FileOffset,
    mapping: Mapping,
    out: &'a mut [u8],
}

impl WholeExtent<'_> {
    fn disk_bytes(&self) -> usize {
        usize::try_from(self.mapping.disk_num_bytes).expect("at most 128 KiB")
    }

    /// Whether another one lies behind it on the medium.
    fn is_followed_by(&self, next: &Self) -> bool {
        self.mapping.disk_bytenr.0 + self.mapping.disk_num_bytes == next.mapping.disk_bytenr.0
    }
}

/// How and from what it is decoded, and where to.
type Encoded<'a> = (Compression, &'a [u8], &'a mut [u8]);

fn disk_bytes_of(whole: &[WholeExtent<'_>]) -> usize {
    whole.iter().map(WholeExtent::disk_bytes).sum()
}

impl SectorReader {
    /// Fills `out` with what extents are decoded from, one behind the other. What lies together comes with one request, or one by one
    /// where it cannot: across the end of a chunk, or beside what is damaged.
    fn read_encoded(
        &mut self,
        extents: &[WholeExtent<'_>],
        mut out: &mut [u8],
        csums: &mut Vec<u8>,
    ) -> Result<()> {
        for together in extents.chunk_by(WholeExtent::is_followed_by) {
            let (now, later) = out.split_at_mut(disk_bytes_of(together));
            out = later;
            let whole = self.read_alone(together[0].mapping.disk_bytenr, now, csums);
            if whole.is_ok() || together.len() == 1 {
                whole?;
                continue;
            }
            let mut now = now;
            for one in together {
                let (bytes, behind) = now.split_at_mut(one.disk_bytes());
                self.read_alone(one.mapping.disk_bytenr, bytes, csums)?;
                now = behind;
            }
        }
        Ok(())
    }
}

/// Gives each to be decoded, from `bytes`, which has one behind the other.
fn give_encoded<'a>(
    whole: &'a mut [WholeExtent<'_>],
    mut bytes: &'a [u8],
    give: &mut dyn FnMut(Encoded<'a>),
) {
    for one in whole {
        let (now, later) = bytes.split_at(one.disk_bytes());
        bytes = later;
        give((one.mapping.compression, now, &mut *one.out));
    }
}

impl FileReader {
    /// A reader of the file's first `of.size_bytes` bytes.
    ///
    /// # Errors
    /// `Missing` where data has checksums and the filesystem no tree of them.
    pub(crate) fn new(
        source: DataSource,
        tree: &Arc<Tree>,
        of: ExtentsOf,
        has_csums: bool,
    ) -> Result<Self> {
        let has_csums = has_csums && of.size_bytes > 0;
        let sectors = SectorReader::new(source, has_csums)?;
        let walk = ExtentWalk::new(tree, of, FileOffset(0));
        Ok(Self { of, walk, sectors })
    }

    /// Reads from `offset` until `buf` is full or the file ends; returns how much.
    pub(crate) fn read(&mut self, offset: FileOffset, buf: &mut [u8]) -> Result<usize> {
        let Some(left) = self.of.size_bytes.checked_sub(offset.0).filter(|left| *left > 0) else {
            return Ok(0);
        };
        let want = usize::try_from(left).map_or(buf.len(), |left| left.min(buf.len()));
        with_scratch(|scratch| self.read_all(offset.0, buf, want, scratch))?;
        Ok(want)
    }

    /// Fills `out` from `offset` on, with zeros behind the end of the file.
    ///
    /// # Errors
    /// As [`FileReader::read`].
    pub(crate) fn read_or_zero(&mut self, offset: FileOffset, out: &mut [u8]) -> Result<()> {
        let have = self.read(offset, out)?;
        out[have..].fill(0);
        Ok(())
    }

    /// As [`FileReader::read_or_zero`], of pieces that are each the whole of a compressed extent: these are decoded on all cores. What
    /// else there is among them comes one by one.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn read_whole_extents<'a>(
        &mut self,
        pieces: impl Iterator<Item = (FileOffset, &'a mut [u8])>,
    ) -> Result<()> {
        let mut whole = Vec::new();
        let mut whole_bytes = 0;
        for (offset, out) in pieces {
            let Some(mapping) = self.whole_extent(offset, out.len())? else {
                self.read_or_zero(offset, out)?;
                continue;
            };
            let one = WholeExtent { offset, mapping, out };
            let more_bytes = one.disk_bytes().max(one.out.len());
            if whole_bytes + more_bytes > TOGETHER_BYTES_MAX {
                self.read_whole(std::mem::take(&mut whole))?;
                whole_bytes = 0;
            }
            whole_bytes += more_bytes;
            whole.push(one);
        }
        self.read_whole(whole)
    }

    /// The mapping of a compressed extent, of which a piece of that length from `offset` on is the whole.
    fn whole_extent(&mut self, offset: FileOffset, len: usize) -> Result<Option<Mapping>> {
        let len_bytes = len as u64;
        let is_in_file = |end: u64| end <= self.of.size_bytes;
        if !offset.0.checked_add(len_bytes).is_some_and(is_in_file) {
            return Ok(None);
        }
        self.walk.seek(offset);
        let is_whole = |mapping: &Mapping| {
            mapping.kind == MappingKind::Data
                && mapping.compression != Compression::None
                && mapping.extent_offset == 0
                && mapping.offset == offset
                && mapping.ram_bytes == len_bytes
                && mapping.end().0 - offset.0 == len_bytes
        };
        Ok(self.walk.next()?.filter(is_whole))
    }

    fn read_whole(&mut self, mut whole: Vec<WholeExtent<'_>>) -> Result<()> {
        if whole.len() > 1 && with_scratch(|scratch| self.decode_all(&mut whole, scratch)) {
            return Ok(());
        }
        // One by one: that says of which file and where what could not be read is.
        whole.into_iter().try_for_each(|one| self.read_or_zero(one.offset, one.out))
    }

    /// Whether it could. Who reads what they are decoded from gives it to be decoded as it comes.
    fn decode_all<'a>(
        &mut self,
        whole: &'a mut [WholeExtent<'_>],
        scratch: &'a mut Scratch,
    ) -> bool {
        let (count, sectorsize) = (whole.len(), self.sectors.sectorsize_bytes);
        let Scratch { compressed, csums, .. } = scratch;
        compressed.resize(disk_bytes_of(whole), 0);
        let mut rest = compressed.as_mut_slice();
        let has_failed = AtomicBool::new(false);
        let decode = |(compression, from, out): Encoded<'a>| {
            if compression::decompress(compression, from, out, sectorsize).is_err() {
                has_failed.store(true, Ordering::Relaxed);
            }
        };
        let executor = self.sectors.source.executor;
        let sectors = &mut self.sectors;
        let (head, tail) = whole.split_at_mut(count.div_ceil(READ_FIRST_PART));
        let parts = [head, tail];
        let read = move |give: &mut dyn FnMut(Encoded<'a>)| {
            for part in parts {
                let (bytes, later) = std::mem::take(&mut rest).split_at_mut(disk_bytes_of(part));
                rest = later;
                sectors.read_encoded(part, bytes, csums)?;
                give_encoded(part, bytes, give);
            }
            Ok::<_, Error>(())
        };
        let is_read = executor.compute_given(count, read, decode).is_ok();
        is_read && !has_failed.into_inner()
    }

    fn read_all(
        &mut self,
        offset: u64,
        buf: &mut [u8],
        want: usize,
        scratch: &mut Scratch,
    ) -> Result<()> {
        self.walk.seek(FileOffset(offset));
        let mut done = 0;
        while done < want {
            let position = offset + done as u64;
            let Some(mapping) = self.walk.next()? else {
                buf[done..want].fill(0);
                break;
            };
            let left = want - done;
            let covered = match mapping.kind {
                MappingKind::Inline => self.walk.position() - position,
                _ => mapping.end().0 - position,
            };
            let len = usize::try_from(covered).map_or(left, |covered| covered.min(left));
            let rest = &mut buf[done..];
            match mapping.kind {
                MappingKind::Hole | MappingKind::Prealloc => rest[..len].fill(0),
                MappingKind::Inline => self.read_inline(&mapping, position, &mut rest[..len])?,
                MappingKind::Data if mapping.compression == Compression::None => {
                    self.read_plain(&mapping, position, rest, len, scratch)
                        .map_err(|error| self.place(error, position))?;
                }
                MappingKind::Data => {
                    self.read_compressed(&mapping, position, rest, len, scratch)
                        .map_err(|error| self.place(error, position))?;
                }
            }
            done += len;
        }
        Ok(())
    }

    fn read_inline(&self, mapping: &Mapping, position: u64, out: &mut [u8]) -> Result<()> {
        let item = self.walk.item()?.unwrap_or_default();
        let FileExtent::Inline { data, .. } = FileExtent::parse(item)? else {
            return Err(Error::not_found("the inline extent just met"));
        };
        let decoded;
        let bytes = if mapping.compression == Compression::None {
            data
        } else {
            // Bounded when the mapping was made.
            let mut whole = vec![0; usize::try_from(mapping.ram_bytes).unwrap_or(0)];
            compression::decompress(
                mapping.compression,
                data,
                &mut whole,
                self.sectors.sectorsize_bytes,
            )
            .map_err(|error| self.place(error.into(), position))?;
            decoded = whole;
            &decoded
        };
        let from = usize::try_from(position).unwrap_or(usize::MAX).min(bytes.len());
        let len = out.len().min(bytes.len() - from);
        out[..len].copy_from_slice(&bytes[from..from + len]);
        out[len..].fill(0);
        Ok(())
    }

    /// Reads `want` bytes of a plain extent to the front of `buf`. What is behind them in `buf` is
    /// filled later, or lies behind the end of the file: it may hold the rest of the last sector
    /// meanwhile, and is zero afterwards.
    fn read_plain(
        &mut self,
        mapping: &Mapping,
        position: u64,
        buf: &mut [u8],
        want: usize,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let sectorsize = self.sectors.sectorsize_bytes;
        let at = mapping.disk_bytenr.0 + mapping.extent_offset + (position - mapping.offset.0);
        let head = usize::try_from(at % sectorsize as u64).expect("below the sector size");
        let start = LogicalAddr(at - head as u64);
        let whole = (head + want).next_multiple_of(sectorsize);
        if head == 0 && buf.len() >= whole {
            self.sectors.read(start, &mut buf[..whole], &mut scratch.csums)?;
            buf[want..whole].fill(0);
            return Ok(());
        }
        if whole <= BOUNCE_BYTES_MAX {
            scratch.sectors.resize(whole, 0);
            self.sectors.read(start, &mut scratch.sectors, &mut scratch.csums)?;
            buf[..want].copy_from_slice(&scratch.sectors[head..head + want]);
            return Ok(());
        }
        // The ends through a sector here, the middle straight into `buf`.
        scratch.sectors.resize(sectorsize, 0);
        let mut done = 0;
        if head > 0 {
            self.sectors.read(start, &mut scratch.sectors, &mut scratch.csums)?;
            done = sectorsize - head;
            buf[..done].copy_from_slice(&scratch.sectors[head..]);
        }
        let middle = (want - done) / sectorsize * sectorsize;
        let at = LogicalAddr(at + done as u64);
        self.sectors.read(at, &mut buf[done..done + middle], &mut scratch.csums)?;
        done += middle;
        if done < want {
            let at = LogicalAddr(at.0 + middle as u64);
            self.sectors.read(at, &mut scratch.sectors, &mut scratch.csums)?;
            buf[done..want].copy_from_slice(&scratch.sectors[..want - done]);
        }
        Ok(())
    }

    fn read_compressed(
        &mut self,
        mapping: &Mapping,
        position: u64,
        buf: &mut [u8],
        want: usize,
        scratch: &mut Scratch,
    ) -> Result<()> {
        // Bounded when the mapping was made.
        let ram_bytes = usize::try_from(mapping.ram_bytes).expect("at most 128 KiB");
        let from = mapping.extent_offset + (position - mapping.offset.0);
        let from = usize::try_from(from).expect("inside the decoded extent");
        if from == 0 && buf.len() >= ram_bytes {
            self.decode(mapping, &mut buf[..ram_bytes], scratch)?;
            buf[want.min(ram_bytes)..ram_bytes].fill(0);
            return Ok(());
        }
        let key = DecodedKey {
            disk_bytenr: mapping.disk_bytenr,
            disk_num_bytes: mapping.disk_num_bytes,
            ram_bytes: mapping.ram_bytes,
            compression: mapping.compression.to_disk(),
            generation: self.walk.generation()?,
        };
        let decoded = match self.sectors.source.decoded.find(&key) {
            Ok(decoded) => decoded,
            Err(forgotten) => {
                let mut decoded = vec![0; ram_bytes];
                self.decode(mapping, &mut decoded, scratch)?;
                let decoded = Arc::new(decoded);
                // An extent of which this was the last part is not read again soon.
                if from + want < ram_bytes {
                    self.sectors.source.decoded.keep(key, Arc::clone(&decoded), forgotten);
                }
                decoded
            }
        };
        ubtrfs_cpu::copy(&mut buf[..want], &decoded[from..from + want]);
        Ok(())
    }

    fn decode(&mut self, mapping: &Mapping, out: &mut [u8], scratch: &mut Scratch) -> Result<()> {
        let len = usize::try_from(mapping.disk_num_bytes).expect("at most 128 KiB");
        scratch.compressed.resize(len, 0);
        self.sectors.read(mapping.disk_bytenr, &mut scratch.compressed, &mut scratch.csums)?;
        compression::decompress(
            mapping.compression,
            &scratch.compressed,
            out,
            self.sectors.sectorsize_bytes,
        )
        .map_err(|error| error.in_block(mapping.disk_bytenr).into())
    }

    /// Names the file in what went wrong.
    #[cold]
    fn place(&self, error: Error, position: u64) -> Error {
        let Error::Corrupt(corruption) = error else { return error };
        let place = format!("inode {}, file offset {position}", self.of.inode);
        Error::Corrupt(named(corruption.in_root(self.of.root), &place))
    }
}

#[cold]
fn named(mut corruption: Box<Corruption>, place: &str) -> Box<Corruption> {
    corruption.have = match (corruption.have.as_str(), corruption.reason) {
        ("", _) => place.to_owned(),
        (have, Reason::CsumMismatch) => format!("{have} in {place}"),
        (have, _) => format!("{have} ({place})"),
    };
    corruption
}
