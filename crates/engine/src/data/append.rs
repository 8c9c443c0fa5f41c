//! Placing prepared data: space, the bytes on the medium, file extents, references, checksums.
//!
//! Invariants:
//!
//! 1. Space is allocated and data written before anything refers to it; if that fails, the space
//!    goes back and nothing has changed.
//! 2. Then file extents, references and checksums are entered under the same handle, and the
//!    caller adds the bytes to the inode under it too: a commit in between cannot be.
//!
//! A crash before the commit leaves the space free and the data unreachable.

use smallvec::SmallVec;
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::file_extent::{Compression, FileExtent, FileExtentItem, RegularExtent};
use ubtrfs_ondisk::{Generation, InodeNo, Key, KeyType, LogicalAddr, RootId};

use super::csum::PendingCsums;
use super::drop_range;
use super::prepare::Extents;
use crate::alloc::DataPromise;
use crate::error::{Error, Result};
use crate::txn::{Core, Handle, Reservation};

/// Longest plain extent, as in Linux.
pub(crate) const PLAIN_EXTENT_BYTES_MAX: u64 = 128 << 20;

/// The file that data goes into.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) root: RootId,
    pub(crate) inode: InodeNo,
    pub(crate) has_csums: bool,
}

/// Whether what is entered may become part of the extent before, and what follows a part of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Grows {
    Yes,
    No,
}

/// A run of disk bytes that becomes a file extent, or, plain, part of one.
#[derive(Clone, Copy, Debug)]
struct Unit {
    file_offset: u64,
    ram_bytes: u64,
    disk_bytes: u64,
    compression: Compression,
}

/// Space that was allocated, and what goes there.
#[derive(Debug)]
struct Region {
    start: LogicalAddr,
    len_bytes: u64,
    units: SmallVec<[Unit; 4]>,
}

pub(crate) fn extent_key(target: &Target, file_offset: u64) -> Key {
    Key::new(target.inode.object_id(), KeyType::EXTENT_DATA, file_offset)
}

/// Space that pieces have, and that no file refers to yet. When they are on the medium, [`enter_all`]
/// or [`Written::release`] must follow.
#[derive(Debug)]
#[must_use = "its space is neither used nor free"]
pub(crate) struct Written {
    regions: Vec<Region>,
    promise: DataPromise,
}

impl Written {
    /// Of no pieces.
    pub(crate) fn nothing(promise: DataPromise) -> Self {
        Self { regions: Vec::new(), promise }
    }

    /// Takes the space of the pieces that follow.
    pub(crate) fn append(&mut self, next: Self) {
        debug_assert_eq!(self.promise, next.promise);
        self.regions.extend(next.regions);
    }

    /// Gives the space back: the pieces are not wanted any more.
    pub(crate) fn release(&self, core: &Core) {
        release(core, &self.regions, self.promise);
    }

    /// Bytes of space that they have.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.len_bytes).sum()
    }

    /// File extents that they become.
    pub(crate) fn extent_count(&self) -> u64 {
        self.regions.iter().map(|region| extents_of(region, Generation(0)).len() as u64).sum()
    }

    /// Brings the pieces to the medium, whose bytes are given in their order, cut anywhere; all of them, or this panics.
    ///
    /// # Errors
    /// The volume's.
    pub(crate) fn write<'a>(
        &self,
        core: &Core,
        bytes: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<()> {
        let mut bytes = bytes.into_iter();
        let mut rest: &[u8] = &[];
        for region in &self.regions {
            let mut slices: SmallVec<[&[u8]; 16]> = SmallVec::new();
            let mut left = usize::try_from(region.len_bytes).expect("in memory");
            while left > 0 {
                if rest.is_empty() {
                    rest = bytes.next().expect("space is found for the bytes that are given");
                }
                let (now, later) = rest.split_at(left.min(rest.len()));
                slices.push(now);
                (rest, left) = (later, left - now.len());
            }
            core.write_data(region.start, &slices)?;
        }
        assert!(
            rest.is_empty() && bytes.all(<[u8]>::is_empty),
            "space is found for all that is given"
        );
        Ok(())
    }
}

/// Places pieces of a file, each with its file offset, ascending and not overlapping, where the
/// file has nothing. Returns the bytes that they add to the inode's `nbytes`. The handle was opened for `extents_reserved` of them; where
/// space is in fragments they become more, and then that says how many.
///
/// # Errors
/// `NoSpace` or a failed write, with nothing changed; anything later aborts the transaction.
pub(crate) fn place(
    handle: &mut Handle<'_>,
    target: &Target,
    pieces: &[(u64, Extents)],
    extents_reserved: &mut u64,
    pending_csums: &PendingCsums,
) -> Result<u64> {
    let written = write_out(handle.core(), pieces)?;
    let more = written.extent_count().saturating_sub(*extents_reserved);
    *extents_reserved += more;
    if more > 0 {
        let granted = handle.reserve_more(Reservation::extents(more));
        granted.inspect_err(|_| written.release(handle.core()))?;
    }
    let csums = csums_of(target, pieces);
    enter_all(handle, target, &written, &csums, pending_csums, Grows::Yes)
}

/// The first part of [`place`]: allocates space and writes.
///
/// # Errors
/// `NoSpace` or a failed write, with nothing changed.
pub(crate) fn write_out(core: &Core, pieces: &[(u64, Extents)]) -> Result<Written> {
    let written = find_space(core, pieces, DataPromise::None)?;
    written.write(core, bytes_of(pieces)).inspect_err(|_| written.release(core))?;
    Ok(written)
}

/// What [`Written::write`] brings to the medium.
pub(crate) fn bytes_of(pieces: &[(u64, Extents)]) -> impl Iterator<Item = &[u8]> {
    pieces.iter().map(|(_, extents)| extents.disk_bytes.as_slice())
}

/// Finds space for pieces, as [`place`] takes them. Called under a handle.
///
/// # Errors
/// `NoSpace`, with nothing changed.
pub(crate) fn find_space(
    core: &Core,
    pieces: &[(u64, Extents)],
    promise: DataPromise,
) -> Result<Written> {
    let regions = allocate(core, units_of(pieces), promise)?;
    Ok(Written { regions, promise })
}

/// As [`find_space`], for plain bytes: file offsets and lengths, ascending, all whole sectors.
///
/// # Errors
/// As there.
pub(crate) fn find_space_for_plain(
    core: &Core,
    pieces: impl Iterator<Item = (u64, u64)>,
    promise: DataPromise,
) -> Result<Written> {
    let unit = |(file_offset, len_bytes)| Unit {
        file_offset,
        ram_bytes: len_bytes,
        disk_bytes: len_bytes,
        compression: Compression::None,
    };
    let regions = allocate(core, pieces.map(unit).collect(), promise)?;
    Ok(Written { regions, promise })
}

/// The second part of [`place`]: file extents, references, and `csums`, which are those of all sectors of the pieces in their order, or
/// none.
///
/// # Errors
/// What stops an edit; the transaction is then aborted.
pub(crate) fn enter_all(
    handle: &mut Handle<'_>,
    target: &Target,
    written: &Written,
    csums: &[u8],
    pending_csums: &PendingCsums,
    grows: Grows,
) -> Result<u64> {
    let mut nbytes = 0;
    let geometry = *handle.core().roots.store.geometry();
    let (csum, sectorsize) = (geometry.csum, geometry.sectorsize_bytes as u64);
    let mut csums = csums;
    for region in &written.regions {
        if target.has_csums {
            let sector_count = usize::try_from(region.len_bytes / sectorsize).expect("in memory");
            let (now, later) = csums.split_at(sector_count * csum.len_bytes());
            pending_csums.add(region.start, now, csum, sectorsize);
            csums = later;
        }
        for (file_offset, extent) in extents_of(region, handle.generation()) {
            nbytes += extent.num_bytes;
            enter(handle, target, file_offset, &extent, grows)?;
        }
    }
    debug_assert!(csums.is_empty(), "one of each sector");
    if pending_csums.is_full() {
        pending_csums.flush(handle)?;
    }
    Ok(nbytes)
}

/// Enters an explicit hole, which filesystems without NO_HOLES need.
///
/// # Errors
/// What stops the edit; the transaction is then aborted.
pub(crate) fn put_hole(
    handle: &mut Handle<'_>,
    target: &Target,
    start: u64,
    end: u64,
) -> Result<()> {
    let extent = RegularExtent {
        generation: handle.generation(),
        ram_bytes: end - start,
        compression: Compression::None,
        disk_bytenr: LogicalAddr(0),
        disk_num_bytes: 0,
        offset: 0,
        num_bytes: end - start,
    };
    insert(handle, target, start, &FileExtent::Regular(extent))
}

/// Enters a whole file as inline data.
///
/// # Errors
/// What stops the edit; the transaction is then aborted.
pub(crate) fn put_inline(
    handle: &mut Handle<'_>,
    target: &Target,
    ram_bytes: u64,
    compression: Compression,
    data: &[u8],
) -> Result<()> {
    use_compression(handle, compression);
    let generation = handle.generation();
    insert(handle, target, 0, &FileExtent::Inline { generation, ram_bytes, compression, data })
}

pub(crate) fn insert(
    handle: &mut Handle<'_>,
    target: &Target,
    file_offset: u64,
    extent: &FileExtent<'_>,
) -> Result<()> {
    let mut item = Vec::with_capacity(size_of::<FileExtentItem>());
    extent.write(&mut item);
    let key = extent_key(target, file_offset);
    let inserted = match handle.insert(target.root, key, &item) {
        Err(error @ Error::Exists { .. }) => {
            match drop_range::is_of_no_length(handle.core(), target, key) {
                Ok(true) => handle.replace(target.root, key, &item),
                Ok(false) => Err(error),
                Err(error) => Err(error),
            }
        }
        inserted => inserted,
    };
    inserted.map_err(|error| handle.abort(error))
}

fn units_of(pieces: &[(u64, Extents)]) -> Vec<Unit> {
    let mut units = Vec::new();
    for (file_offset, extents) in pieces {
        let mut file_offset = *file_offset;
        for piece in &extents.pieces {
            let (ram_bytes, disk_bytes) = (piece.ram_bytes as u64, piece.disk_bytes as u64);
            units.push(Unit { file_offset, ram_bytes, disk_bytes, compression: piece.compression });
            file_offset += ram_bytes;
        }
    }
    units
}

/// The checksums of pieces that were prepared with theirs, in their order; none of a file that has none.
pub(crate) fn csums_of(target: &Target, pieces: &[(u64, Extents)]) -> Vec<u8> {
    if !target.has_csums {
        return Vec::new();
    }
    pieces.iter().flat_map(|(_, extents)| &extents.csums).copied().collect()
}

/// Finds space for all units: as few regions as there are holes large enough.
fn allocate(core: &Core, mut units: Vec<Unit>, promise: DataPromise) -> Result<Vec<Region>> {
    let sectorsize = core.roots.store.geometry().sectorsize_bytes as u64;
    let mut regions: Vec<Region> = Vec::new();
    units.reverse();
    while let Some(first) = units.last() {
        let min_bytes = match first.compression {
            Compression::None => sectorsize,
            _ => first.disk_bytes,
        };
        let all_bytes: u64 = units.iter().map(|unit| unit.disk_bytes).sum();
        let wanted = all_bytes.min(PLAIN_EXTENT_BYTES_MAX);
        let space = core.alloc.allocate_data(&core.roots, min_bytes, wanted, promise);
        let (start, len_bytes) = match space {
            Ok(space) => space,
            Err(error) => {
                release(core, &regions, promise);
                let taken = regions.iter().map(|region| region.len_bytes).sum();
                return Err(no_space_for_all(error, taken, all_bytes));
            }
        };
        let mut region = Region { start, len_bytes, units: SmallVec::new() };
        let mut left = len_bytes;
        while let Some(unit) = units.pop() {
            if unit.disk_bytes <= left {
                left -= unit.disk_bytes;
                region.units.push(unit);
                continue;
            }
            if unit.compression != Compression::None || left == 0 {
                units.push(unit);
                break;
            }
            // A plain unit is cut where the space ends.
            region.units.push(Unit { ram_bytes: left, disk_bytes: left, ..unit });
            units.push(Unit {
                file_offset: unit.file_offset + left,
                ram_bytes: unit.ram_bytes - left,
                disk_bytes: unit.disk_bytes - left,
                ..unit
            });
            left = 0;
            break;
        }
        if left > 0 {
            core.alloc.release_data(LogicalAddr(start.0 + len_bytes - left), left, promise);
            region.len_bytes -= left;
        }
        regions.push(region);
    }
    Ok(regions)
}

/// Says what all pieces need, not only the one that was the first not to fit. Compressed data cannot
/// be cut, so that it may not fit though there is more space than it takes.
#[cold]
fn no_space_for_all(error: Error, taken_bytes: u64, left_bytes: u64) -> Error {
    match error {
        Error::NoSpace { needed_bytes, available_bytes, .. } if needed_bytes <= available_bytes => {
            Error::NoSpace { what: "data in one piece", needed_bytes, available_bytes }
        }
        Error::NoSpace { what, available_bytes, .. } => Error::NoSpace {
            what,
            needed_bytes: taken_bytes + left_bytes,
            available_bytes: taken_bytes + available_bytes,
        },
        other => other,
    }
}

fn release(core: &Core, regions: &[Region], promise: DataPromise) {
    for region in regions {
        core.alloc.release_data(region.start, region.len_bytes, promise);
    }
}

/// The file extents of a region: plain units that follow each other in the file are one.
fn extents_of(region: &Region, generation: Generation) -> Vec<(u64, RegularExtent)> {
    let mut extents: Vec<(u64, RegularExtent)> = Vec::with_capacity(region.units.len());
    let mut at = region.start.0;
    for unit in &region.units {
        let disk_num_bytes = unit.disk_bytes;
        match extents.last_mut() {
            Some((file_offset, last))
                if unit.compression == Compression::None
                    && last.compression == Compression::None
                    && *file_offset + last.num_bytes == unit.file_offset =>
            {
                last.disk_num_bytes += disk_num_bytes;
                last.num_bytes += unit.ram_bytes;
                last.ram_bytes += unit.ram_bytes;
            }
            _ => {
                let extent = RegularExtent {
                    generation,
                    ram_bytes: unit.ram_bytes,
                    compression: unit.compression,
                    disk_bytenr: LogicalAddr(at),
                    disk_num_bytes,
                    offset: 0,
                    num_bytes: unit.ram_bytes,
                };
                extents.push((unit.file_offset, extent));
            }
        }
        at += disk_num_bytes;
    }
    extents
}

fn enter(
    handle: &mut Handle<'_>,
    target: &Target,
    file_offset: u64,
    extent: &RegularExtent,
    grows: Grows,
) -> Result<()> {
    use_compression(handle, extent.compression);
    let may_grow = grows == Grows::Yes && extent.compression == Compression::None;
    if may_grow && grow(handle, target, file_offset, extent)? {
        return Ok(());
    }
    insert(handle, target, file_offset, &FileExtent::Regular(*extent))?;
    // The reference names file offset − offset in the extent, which is the extent's own beginning.
    let added = handle.core().alloc.add_data(
        extent.disk_bytenr,
        extent.disk_num_bytes,
        target.root,
        target.inode,
        file_offset,
    );
    if grows == Grows::No {
        handle.core().alloc.keep_data_len(extent.disk_bytenr);
    }
    added.map_err(|error| handle.abort(error))
}

/// Makes the file extent before longer by `extent`, if that goes on from it on the medium, too, and it was made in this transaction
/// and is whole: a file that is written in parts gets extents as large as one that is written at once.
fn grow(
    handle: &mut Handle<'_>,
    target: &Target,
    file_offset: u64,
    extent: &RegularExtent,
) -> Result<bool> {
    let alloc = &handle.core().alloc;
    let (start, more) = (extent.disk_bytenr, extent.disk_num_bytes);
    let Target { root, inode, .. } = *target;
    let Some((addr, len)) = alloc.data_before(start, root, inode, file_offset) else {
        return Ok(false);
    };
    if len + more > PLAIN_EXTENT_BYTES_MAX {
        return Ok(false);
    }
    let whole = |bytes: &[u8]| match FileExtent::parse(bytes) {
        Ok(FileExtent::Regular(before))
            if before.compression == Compression::None
                && before.disk_bytenr == addr
                && before.offset == 0
                && [before.ram_bytes, before.disk_num_bytes, before.num_bytes] == [len; 3] =>
        {
            Some(before)
        }
        _ => None,
    };
    let key = extent_key(target, file_offset - len);
    let grown = handle.edit(root, |editor| {
        // Only looked at, if it is cut: no leaf is copied for that.
        if editor.get(&key, |bytes| whole(bytes).is_none())?.is_none_or(|is_cut| is_cut) {
            return Ok(false);
        }
        editor.update(&key, |bytes| {
            let Some(mut before) = whole(bytes) else { return false };
            if !alloc.grow_data(start, root, inode, file_offset, more) {
                return false;
            }
            for field in [&mut before.ram_bytes, &mut before.disk_num_bytes, &mut before.num_bytes]
            {
                *field += more;
            }
            let mut item = Vec::with_capacity(bytes.len());
            FileExtent::Regular(before).write(&mut item);
            bytes.copy_from_slice(&item);
            true
        })
    });
    grown.map_err(|error| handle.abort(error))
}

/// Sets the feature bit that readers of this compression look for.
fn use_compression(handle: &mut Handle<'_>, compression: Compression) {
    match compression {
        Compression::None | Compression::Zlib => {}
        Compression::Lzo => handle.set_incompat(Incompat::COMPRESS_LZO),
        Compression::Zstd => handle.set_incompat(Incompat::COMPRESS_ZSTD),
    }
}

/// Longest inline data that a leaf of that size holds.
pub(crate) fn inline_bytes_max(nodesize_bytes: usize) -> usize {
    use ubtrfs_ondisk::block::{HEADER_BYTES, ITEM_BYTES};
    use ubtrfs_ondisk::file_extent::FileExtentHeader;
    nodesize_bytes - HEADER_BYTES - ITEM_BYTES - size_of::<FileExtentHeader>()
}

/// An error for a piece that cannot be where it is said to be.
#[cold]
pub(crate) fn misplaced(offset: u64, why: &str) -> Error {
    Error::InvalidArgument { what: format!("a piece of a file at offset {offset}: {why}") }
}
