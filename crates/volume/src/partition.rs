//! Partition tables: where the partitions of an image or disk lie.
//!
//! The `gpt` crate reads headers and records. What it would trust, an entry's size, the number of
//! entries and where a chain of logical partitions leads, is bounded here first.

use std::fmt;
use std::io::{self, BufReader, Read, Seek, SeekFrom};

use gpt::disk::LogicalBlockSize;
use gpt::header::{Header, read_header_from_arbitrary_device};
use gpt::mbr::PartRecord;
use gpt::partition::file_read_partitions;
use ubtrfs_ondisk::PhysicalAddr;

use crate::device::Device;
use crate::error::{Error, Op, Result};

/// Entries of a GPT that are looked at; tables have 128.
const GPT_ENTRY_COUNT_MAX: u32 = 4096;
/// Bytes of a GPT entry, the only length that is written in practice.
const GPT_ENTRY_BYTES: u32 = 128;
/// Links of the chain of logical partitions that are followed.
const LOGICAL_COUNT_MAX: usize = 256;
/// Sectors of an MBR, and of most GPTs.
const SECTOR_BYTES: u64 = 512;

/// A partition of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Partition {
    /// Its number, as Linux counts: logical ones from 5.
    pub number: u32,
    /// First byte on the device.
    pub start_bytes: u64,
    /// Its length.
    pub len_bytes: u64,
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} MiB from {} on)", self.number, self.len_bytes >> 20, self.start_bytes)
    }
}

/// The partitions of the device's GPT or MBR, by number; none without a table.
///
/// # Errors
/// `Partition` for a damaged table, or one with entries outside the device; `Io`.
pub fn partitions(device: &dyn Device) -> Result<Vec<Partition>> {
    let Some(records) = read_records(device, 0)? else { return Ok(Vec::new()) };
    let is_protective = |record: &PartRecord| record.os_type == 0xEE;
    let mut partitions = if records.iter().any(is_protective) {
        read_gpt(device)?
    } else {
        read_mbr(device, &records)?
    };
    partitions.sort_unstable_by_key(|partition| partition.number);
    Ok(partitions)
}

/// The partition of that number.
///
/// # Errors
/// `Partition` when there is none, naming those that there are; as [`partitions`].
pub fn partition(device: &dyn Device, number: u32) -> Result<Partition> {
    let all = partitions(device)?;
    all.iter().find(|partition| partition.number == number).copied().ok_or_else(|| {
        let names: Vec<String> = all.iter().map(Partition::to_string).collect();
        let what = match names.is_empty() {
            true => format!("no partition {number}: there is no partition table"),
            false => format!("no partition {number}: there are {}", names.join(", ")),
        };
        bad_table(device, what)
    })
}

fn bad_table(device: &dyn Device, what: impl fmt::Display) -> Error {
    Error::Partition { device: device.name(), what: what.to_string() }
}

// GPT.

fn read_gpt(device: &dyn Device) -> Result<Vec<Partition>> {
    let mut failure = None;
    for (sector, sector_bytes) in [(LogicalBlockSize::Lb512, 512), (LogicalBlockSize::Lb4096, 4096)]
    {
        match read_gpt_with(device, sector, sector_bytes) {
            Ok(partitions) => return Ok(partitions),
            Err(error) => failure.get_or_insert(error),
        };
    }
    Err(failure.expect("two sector sizes were tried"))
}

fn read_gpt_with(
    device: &dyn Device,
    sector: LogicalBlockSize,
    sector_bytes: u64,
) -> Result<Vec<Partition>> {
    // The crate reads the header in sector 1. The backup in the last sector is read from a
    // device that begins one sector before it.
    let backup_base = (device.len_bytes() / sector_bytes).saturating_sub(2) * sector_bytes;
    let header = [0, backup_base].into_iter().find_map(|base| {
        let header =
            read_header_from_arbitrary_device(&mut Reader::new(device, base), sector).ok()?;
        is_usable(&header).then_some(header)
    });
    let Some(header) = header else {
        return Err(bad_table(
            device,
            "its partition table (GPT) is damaged: repair it with gdisk, or give --offset",
        ));
    };
    let entries =
        file_read_partitions(&mut BufReader::new(Reader::new(device, 0)), &header, sector)
            .map_err(|error| bad_table(device, format!("its partition table (GPT): {error}")))?;
    let mut partitions = Vec::new();
    for (number, entry) in entries {
        if entry.part_type_guid.guid.is_nil() {
            continue;
        }
        let sectors = entry.last_lba.checked_sub(entry.first_lba).and_then(|n| n.checked_add(1));
        let range = sectors.and_then(|sectors| {
            Some((entry.first_lba.checked_mul(sector_bytes)?, sectors.checked_mul(sector_bytes)?))
        });
        partitions.push(check_inside(device, number, range)?);
    }
    Ok(partitions)
}

fn is_usable(header: &Header) -> bool {
    header.part_size == GPT_ENTRY_BYTES && header.num_parts <= GPT_ENTRY_COUNT_MAX
}

// MBR.

fn read_mbr(device: &dyn Device, records: &[PartRecord; 4]) -> Result<Vec<Partition>> {
    let mut partitions = Vec::new();
    for (number, record) in (1..).zip(records) {
        if record.os_type == 0 || record.lb_size == 0 {
            continue;
        }
        if !matches!(record.boot_indicator, 0 | 0x80) {
            // The boot sector of a filesystem has the same signature.
            return Ok(Vec::new());
        }
        let (start, len) = range_of(record, 0);
        let partition = check_inside(device, number, Some((start, len)))?;
        if is_extended(record) {
            read_logical(device, &partition, &mut partitions)?;
        } else {
            partitions.push(partition);
        }
    }
    Ok(partitions)
}

/// Follows the chain in an extended partition: each link holds a logical partition, relative to
/// the link, and the next link, relative to the extended partition.
fn read_logical(
    device: &dyn Device,
    extended: &Partition,
    partitions: &mut Vec<Partition>,
) -> Result<()> {
    let mut link = extended.start_bytes;
    for number in (5..).take(LOGICAL_COUNT_MAX) {
        let Some([logical, next, ..]) = read_records(device, link)? else { return Ok(()) };
        if logical.os_type != 0 && logical.lb_size != 0 {
            partitions.push(check_inside(device, number, Some(range_of(&logical, link)))?);
        }
        if !is_extended(&next) || next.lb_size == 0 {
            return Ok(());
        }
        link = range_of(&next, extended.start_bytes).0;
    }
    Err(bad_table(device, "its chain of logical partitions does not end; give --offset"))
}

fn is_extended(record: &PartRecord) -> bool {
    matches!(record.os_type, 0x05 | 0x0F | 0x85)
}

/// Start and length in bytes; 32 bits of sectors cannot overflow on a base inside a device.
fn range_of(record: &PartRecord, base_bytes: u64) -> (u64, u64) {
    let start = base_bytes.saturating_add(u64::from(record.lb_start) * SECTOR_BYTES);
    (start, u64::from(record.lb_size) * SECTOR_BYTES)
}

/// The four records of the sector at `at`, or `None` where there is no boot signature.
fn read_records(device: &dyn Device, at: u64) -> Result<Option<[PartRecord; 4]>> {
    const RECORDS_AT: usize = 446;
    const RECORD_BYTES: usize = 16;
    if at.checked_add(SECTOR_BYTES).is_none_or(|end| end > device.len_bytes()) {
        return Ok(None);
    }
    let mut sector = [0; 512];
    device.read_at(PhysicalAddr(at), &mut sector).map_err(|source| Error::Io {
        device: device.name(),
        op: Op::Read,
        offset: PhysicalAddr(at),
        source,
    })?;
    if sector[510..] != [0x55, 0xAA] {
        return Ok(None);
    }
    let mut records = [PartRecord::zero(); 4];
    for (index, record) in records.iter_mut().enumerate() {
        let start = RECORDS_AT + index * RECORD_BYTES;
        *record = PartRecord::from_bytes(&sector[start..start + RECORD_BYTES])
            .map_err(|error| bad_table(device, error))?;
    }
    Ok(Some(records))
}

fn check_inside(device: &dyn Device, number: u32, range: Option<(u64, u64)>) -> Result<Partition> {
    let inside = range.filter(|(start, len)| {
        start.checked_add(*len).is_some_and(|end| end <= device.len_bytes())
    });
    let Some((start_bytes, len_bytes)) = inside else {
        return Err(bad_table(
            device,
            format!(
                "partition {number} goes past the end at {} bytes: the image is cut short, or its \
                 partition table is damaged; give --offset",
                device.len_bytes()
            ),
        ));
    };
    Ok(Partition { number, start_bytes, len_bytes })
}

/// A device as a stream that begins at `base`.
struct Reader<'a> {
    device: &'a dyn Device,
    base: u64,
    position: u64,
}

impl<'a> Reader<'a> {
    fn new(device: &'a dyn Device, base: u64) -> Self {
        Self { device, base, position: 0 }
    }

    fn len(&self) -> u64 {
        self.device.len_bytes().saturating_sub(self.base)
    }
}

impl Read for Reader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = self.len().saturating_sub(self.position);
        let count = usize::try_from(left).unwrap_or(usize::MAX).min(buf.len());
        self.device.read_at(PhysicalAddr(self.base + self.position), &mut buf[..count])?;
        self.position += count as u64;
        Ok(count)
    }
}

impl Seek for Reader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::End(offset) => self.len().checked_add_signed(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
        };
        self.position = position
            .filter(|position| *position <= self.len())
            .ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

#[cfg(test)]
mod tests;
