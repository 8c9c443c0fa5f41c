//! Space that a file has before its data comes: preallocated extents, and data written into them.
//!
//! The extent stays one; its file extent is cut where data was written. Each part is a reference of
//! its own, all with the same file offset minus offset in the extent.

use std::ops::Range;

use ubtrfs_ondisk::file_extent::{Compression, FileExtent, RegularExtent};
use ubtrfs_ondisk::{Generation, LogicalAddr};

use super::append::{Target, extent_key, insert};
use super::drop_range::overlapping;
use crate::error::Result;
use crate::txn::Handle;

/// Enters an extent that holds no data yet.
///
/// # Errors
/// What stops an edit; the transaction is then aborted.
pub(crate) fn put_prealloc(
    handle: &mut Handle<'_>,
    target: &Target,
    file_offset: u64,
    start: LogicalAddr,
    len_bytes: u64,
) -> Result<()> {
    let extent = RegularExtent {
        generation: handle.generation(),
        ram_bytes: len_bytes,
        compression: Compression::None,
        disk_bytenr: start,
        disk_num_bytes: len_bytes,
        offset: 0,
        num_bytes: len_bytes,
    };
    insert(handle, target, file_offset, &FileExtent::Prealloc(extent))?;
    let alloc = &handle.core().alloc;
    let added = alloc.add_data(start, len_bytes, target.root, target.inode, file_offset);
    added.map_err(|error| handle.abort(error))
}

/// What was preallocated in `range`, whole sectors, is data from now on. A part that goes on where data
/// of the same extent ends, written since `last_snapshot`, becomes part of that.
///
/// # Errors
/// Damage in the file's extents, with nothing changed; what stops an edit aborts the transaction.
pub(crate) fn mark_written(
    handle: &mut Handle<'_>,
    target: &Target,
    range: &Range<u64>,
    last_snapshot: Generation,
) -> Result<()> {
    let with_before = range.start.saturating_sub(1)..range.end;
    let found = overlapping(handle.core(), target, &with_before, usize::MAX)?;
    let mut before: Option<(u64, RegularExtent)> = None;
    for (start, data) in found {
        let extent = match FileExtent::parse(&data).map_err(|e| e.in_root(target.root))? {
            FileExtent::Prealloc(extent) => extent,
            FileExtent::Regular(extent) if !extent.is_hole() => {
                before = Some((start, extent));
                continue;
            }
            _ => {
                before = None;
                continue;
            }
        };
        let end = start.saturating_add(extent.num_bytes);
        let cut = start.max(range.start)..end.min(range.end);
        if cut.is_empty() {
            before = None;
            continue;
        }
        let part = |part: Range<u64>| RegularExtent {
            offset: extent.offset.saturating_add(part.start - start),
            num_bytes: part.end - part.start,
            ..extent
        };
        let written = RegularExtent { generation: handle.generation(), ..part(cut.clone()) };
        let joined = before.filter(|(at, known)| {
            start == cut.start
                && at.saturating_add(known.num_bytes) == cut.start
                && known.disk_bytenr == extent.disk_bytenr
                && known.compression == Compression::None
                && known.offset.saturating_add(known.num_bytes) == written.offset
                && known.generation > last_snapshot
        });
        let mut added = 0;
        if start < cut.start {
            replace(handle, target, start, &FileExtent::Prealloc(part(start..cut.start)))?;
            insert(handle, target, cut.start, &FileExtent::Regular(written))?;
            before = Some((cut.start, written));
            added += 1;
        } else if let Some((at, known)) = joined {
            let longer = RegularExtent {
                num_bytes: known.num_bytes.saturating_add(written.num_bytes),
                // What is new of it is: who looks for items newer than a generation finds it.
                generation: handle.generation(),
                ..known
            };
            replace(handle, target, at, &FileExtent::Regular(longer))?;
            handle
                .remove(target.root, extent_key(target, start))
                .map_err(|error| handle.abort(error))?;
            before = Some((at, longer));
            added -= 1;
        } else {
            replace(handle, target, start, &FileExtent::Regular(written))?;
            before = Some((start, written));
        }
        if cut.end < end {
            insert(handle, target, cut.end, &FileExtent::Prealloc(part(cut.end..end)))?;
            added += 1;
        }
        count(handle, target, start, &extent, added);
    }
    Ok(())
}

fn replace(
    handle: &mut Handle<'_>,
    target: &Target,
    file_offset: u64,
    extent: &FileExtent<'_>,
) -> Result<()> {
    let mut item = Vec::new();
    extent.write(&mut item);
    handle
        .replace(target.root, extent_key(target, file_offset), &item)
        .map_err(|error| handle.abort(error))
}

/// References that file extents of the extent at `start` gained; one of them stays always.
fn count(handle: &Handle<'_>, target: &Target, start: u64, extent: &RegularExtent, added: i32) {
    let (at, len) = (extent.disk_bytenr, extent.disk_num_bytes);
    let offset = start.wrapping_sub(extent.offset);
    let alloc = &handle.core().alloc;
    for _ in 0..added {
        alloc.share_data(at, len, target.root, target.inode, offset);
    }
    if added < 0 {
        let is_gone = alloc.drop_data(at, len, target.root, target.inode, offset);
        debug_assert!(!is_gone, "the file extent that it was joined to refers to it");
    }
}
