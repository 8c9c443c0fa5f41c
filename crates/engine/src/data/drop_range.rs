//! Taking a range out of a file: extents in it removed, those that reach beyond it cut.
//!
//! An extent on disk goes with its last reference. A file extent that is cut keeps its one: the
//! reference names file offset minus offset in the extent, which does not change; one that is cut
//! in two adds one.

use std::ops::Range;

use ubtrfs_ondisk::file_extent::{FileExtent, RegularExtent};
use ubtrfs_ondisk::{Corruption, Key, KeyType, Reason};

use super::append::{Target, extent_key, insert, put_hole};
use super::csum::PendingCsums;
use super::read::DecodedCache;
use crate::alloc::DataPromise;
use crate::error::{Error, Result};
use crate::txn::{Core, Handle};

/// What is kept in memory of data, and must forget what is freed.
#[derive(Clone, Copy)]
pub(crate) struct Kept<'a> {
    pub(crate) csums: &'a PendingCsums,
    pub(crate) decoded: &'a DecodedCache,
}

/// The first `count_max` file extents that overlap a range, or are in it and of no length, with their items' data, in order.
///
/// # Errors
/// A block that cannot be read; damage in an item.
pub(super) fn overlapping(
    core: &Core,
    target: &Target,
    range: &Range<u64>,
    count_max: usize,
) -> Result<Vec<(u64, Vec<u8>)>> {
    let mut found = Vec::new();
    let tree = core.roots.tree(target.root)?;
    let mut cursor = tree.cursor();
    // The one before may reach into the range.
    cursor.seek_back(&extent_key(target, range.start))?;
    if !cursor.current()?.is_some_and(|(key, _)| is_extent(target, &key)) {
        cursor.seek(&extent_key(target, 0))?;
    }
    while let Some((key, data)) = cursor.current()? {
        if !is_extent(target, &key) || key.offset >= range.end || found.len() >= count_max {
            break;
        }
        let extent = FileExtent::parse(data).map_err(|error| error.in_root(target.root))?;
        // One of no length, as old kernels left some, has the key of what comes in its place.
        let end = end_of(key.offset, &extent);
        if end > range.start || (end == key.offset && key.offset >= range.start) {
            found.push((key.offset, data.to_vec()));
        }
        cursor.next()?;
    }
    Ok(found)
}

fn is_extent(target: &Target, key: &Key) -> bool {
    key.objectid == target.inode.object_id() && key.ty == KeyType::EXTENT_DATA
}

fn end_of(start: u64, extent: &FileExtent<'_>) -> u64 {
    match extent {
        FileExtent::Inline { ram_bytes, .. } => *ram_bytes,
        FileExtent::Regular(extent) | FileExtent::Prealloc(extent) => {
            start.saturating_add(extent.num_bytes)
        }
    }
}

/// Whether the file extent with a key is one of no length, with which nothing is lost. Old kernels left some.
///
/// # Errors
/// A block that cannot be read; damage in the item.
pub(super) fn is_of_no_length(core: &Core, target: &Target, key: Key) -> Result<bool> {
    let Some(data) = core.roots.tree(target.root)?.lookup(&key)? else { return Ok(false) };
    Ok(has_no_length(&FileExtent::parse(&data).map_err(|error| error.in_root(target.root))?))
}

fn has_no_length(extent: &FileExtent<'_>) -> bool {
    match extent {
        FileExtent::Inline { ram_bytes, .. } => *ram_bytes == 0,
        FileExtent::Regular(extent) => extent.is_hole() && extent.num_bytes == 0,
        FileExtent::Prealloc(_) => false,
    }
}

/// Takes `range`, whole sectors, out of a file. Inline data goes whole. Returns the bytes that the
/// inode's `nbytes` loses.
///
/// # Errors
/// Damage in the file's extents, with nothing changed; what stops an edit aborts the transaction.
pub(crate) fn drop_range(
    handle: &mut Handle<'_>,
    target: &Target,
    range: &Range<u64>,
    kept: Kept<'_>,
) -> Result<u64> {
    let mut dropped = 0;
    if range.is_empty() {
        return Ok(dropped);
    }
    for (start, data) in overlapping(handle.core(), target, range, usize::MAX)? {
        let extent = FileExtent::parse(&data).map_err(|error| error.in_root(target.root))?;
        let key = extent_key(target, start);
        let (regular, is_prealloc) = match extent {
            FileExtent::Inline { ram_bytes, .. } => {
                dropped = dropped.saturating_add(ram_bytes);
                handle.remove(target.root, key).map_err(|error| handle.abort(error))?;
                continue;
            }
            FileExtent::Regular(extent) => (extent, false),
            FileExtent::Prealloc(extent) => (extent, true),
        };
        let whole = |extent| match is_prealloc {
            true => FileExtent::Prealloc(extent),
            false => FileExtent::Regular(extent),
        };
        let end = start.saturating_add(regular.num_bytes);
        let lost = end.min(range.end) - start.max(range.start);
        if !regular.is_hole() {
            dropped = dropped.saturating_add(lost);
        }
        let left = (start < range.start)
            .then(|| whole(RegularExtent { num_bytes: range.start - start, ..regular }));
        let right = (end > range.end).then(|| {
            whole(RegularExtent {
                offset: regular.offset.saturating_add(range.end - start),
                num_bytes: end - range.end,
                ..regular
            })
        });
        match &left {
            Some(left) => {
                let mut item = Vec::new();
                left.write(&mut item);
                handle.replace(target.root, key, &item).map_err(|error| handle.abort(error))?;
            }
            None => handle.remove(target.root, key).map_err(|error| handle.abort(error))?,
        }
        if let Some(right) = &right {
            insert(handle, target, range.end, right)?;
        }
        if regular.is_hole() {
            continue;
        }
        match (left.is_some(), right.is_some()) {
            (true, true) => {
                let offset = start.wrapping_sub(regular.offset);
                let (at, len) = (regular.disk_bytenr, regular.disk_num_bytes);
                let alloc = &handle.core().alloc;
                alloc.share_data(at, len, target.root, target.inode, offset);
            }
            (false, false) => drop_reference(handle, target, start, &regular, kept)?,
            _ => {}
        }
    }
    Ok(dropped)
}

/// Takes back the reference of the file extent at `start`, which is gone.
///
/// # Errors
/// What stops an edit; the transaction is then aborted.
pub(crate) fn drop_reference(
    handle: &mut Handle<'_>,
    target: &Target,
    start: u64,
    extent: &RegularExtent,
    kept: Kept<'_>,
) -> Result<()> {
    let (at, len) = (extent.disk_bytenr, extent.disk_num_bytes);
    let offset = start.wrapping_sub(extent.offset);
    if handle.core().alloc.drop_data(at, len, target.root, target.inode, offset) {
        forget(handle, at, len, kept)?;
    }
    Ok(())
}

/// Frees the space of data that was allocated in this transaction and has no reference left.
///
/// # Errors
/// What stops an edit; the transaction is then aborted.
pub(crate) fn forget(
    handle: &mut Handle<'_>,
    at: ubtrfs_ondisk::LogicalAddr,
    len_bytes: u64,
    kept: Kept<'_>,
) -> Result<()> {
    kept.csums.remove(handle, at.0, at.0.saturating_add(len_bytes))?;
    kept.decoded.forget(at);
    // Only now: who gets the space next brings checksums of its own.
    handle.core().alloc.release_data(at, len_bytes, DataPromise::None);
    Ok(())
}

/// How many file extents overlap a range.
///
/// # Errors
/// As [`drop_range`] before anything changes.
pub(crate) fn extent_count(core: &Core, target: &Target, range: &Range<u64>) -> Result<u64> {
    Ok(overlapping(core, target, range, usize::MAX)?.len() as u64)
}

/// Where the last file extent ends; 0 where there is none.
///
/// # Errors
/// As [`drop_range`] before anything changes.
pub(crate) fn extents_end(core: &Core, target: &Target) -> Result<u64> {
    let mut cursor = core.roots.tree(target.root)?.cursor();
    cursor.seek_back(&extent_key(target, u64::MAX))?;
    let Some((key, data)) = cursor.current()?.filter(|(key, _)| is_extent(target, key)) else {
        return Ok(0);
    };
    let extent = FileExtent::parse(data).map_err(|error| error.in_root(target.root))?;
    Ok(end_of(key.offset, &extent))
}

/// Where the last `count_max` file extents that overlap `range` begin, or the range; `None` where none
/// does. What it costs does not grow with the file.
///
/// # Errors
/// As [`drop_range`] before anything changes.
pub(crate) fn start_of_last(
    core: &Core,
    target: &Target,
    range: &Range<u64>,
    count_max: usize,
) -> Result<Option<u64>> {
    let mut cursor = core.roots.tree(target.root)?.cursor();
    cursor.seek_back(&extent_key(target, range.end - 1))?;
    let mut from = None;
    // And one more: where that does not overlap, there may be a hole before the last of those that count.
    for count in 0..=count_max {
        let Some((key, data)) = cursor.current()?.filter(|(key, _)| is_extent(target, key)) else {
            return Ok(from.map(|_| range.start));
        };
        let extent = FileExtent::parse(data).map_err(|error| error.in_root(target.root))?;
        if end_of(key.offset, &extent) <= range.start {
            return Ok(from.map(|_| range.start));
        }
        if count == count_max {
            break;
        }
        from = Some(key.offset.max(range.start));
        if key.offset <= range.start {
            break;
        }
        cursor.prev()?;
    }
    Ok(from)
}

/// Where `range` is to end so that at most `count_max` file extents overlap it.
///
/// # Errors
/// As [`drop_range`] before anything changes.
pub(crate) fn end_of_extents(
    core: &Core,
    target: &Target,
    range: &Range<u64>,
    count_max: usize,
) -> Result<u64> {
    let found = overlapping(core, target, range, count_max + 1)?;
    Ok(found.get(count_max).map_or(range.end, |(start, _)| (*start).min(range.end)))
}

/// Enters explicit holes, which filesystems without NO_HOLES need, wherever `range`, whole sectors, has no
/// extent. Inline data has its sector for itself.
///
/// # Errors
/// As [`drop_range`].
pub(crate) fn put_missing_holes(
    handle: &mut Handle<'_>,
    target: &Target,
    range: &Range<u64>,
) -> Result<()> {
    for hole in missing_holes(handle.core(), target, range)? {
        put_hole(handle, target, hole.start, hole.end)?;
    }
    Ok(())
}

/// How many [`put_missing_holes`] would enter. The file's extents must stay as they are until then: the caller holds its data lock.
///
/// # Errors
/// A block that cannot be read.
pub(crate) fn missing_hole_count(core: &Core, target: &Target, range: &Range<u64>) -> Result<u64> {
    Ok(missing_holes(core, target, range)?.len() as u64)
}

fn missing_holes(core: &Core, target: &Target, range: &Range<u64>) -> Result<Vec<Range<u64>>> {
    let sector = core.roots.store.geometry().sectorsize_bytes as u64;
    let mut holes = Vec::new();
    let mut at = range.start;
    for (start, data) in overlapping(core, target, range, usize::MAX)? {
        let extent = FileExtent::parse(&data).map_err(|error| error.in_root(target.root))?;
        if end_of(start, &extent) == start && !has_no_length(&extent) {
            // Nothing gives way to a hole but what is none, and this has space.
            let key = extent_key(target, start);
            return Err(Corruption::new(Reason::BadValue)
                .in_root(target.root)
                .have(format!("a file extent of no length that has space, {key}"))
                .into());
        }
        if start > at {
            holes.push(at..start);
        }
        let end = end_of(start, &extent).checked_next_multiple_of(sector).unwrap_or(u64::MAX);
        at = at.max(end);
    }
    if at < range.end {
        holes.push(at..range.end);
    }
    Ok(holes)
}

/// Whether the file's data is inline.
///
/// # Errors
/// A block that cannot be read; a damaged item.
pub(crate) fn is_inline(core: &Core, target: &Target) -> Result<bool> {
    let item = core.roots.tree(target.root)?.lookup(&extent_key(target, 0))?;
    let Some(item) = item else { return Ok(false) };
    let extent =
        FileExtent::parse(&item).map_err(|error| Error::from(error.in_root(target.root)))?;
    Ok(matches!(extent, FileExtent::Inline { .. }))
}
