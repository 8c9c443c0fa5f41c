//! Checksums of data: looked up a run at a time, compared with what was read.
//!
//! Items lie in the checksum tree at (EXTENT_CSUM, EXTENT_CSUM, address), each a row of checksums
//! for the sectors from that address on.

use std::collections::BTreeMap;

use ubtrfs_ondisk::block::{HEADER_BYTES, ITEM_BYTES};
use ubtrfs_ondisk::{Corruption, CsumType, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId};
use ubtrfs_rt::{Arc, AtomicUsize, Mutex, Ordering, RwLock};

use crate::btree::{Cursor, Tree};
use crate::error::Result;
use crate::txn::Handle;

/// Finds the checksums of data, fastest where asked in order.
#[derive(Debug)]
pub(crate) struct CsumLookup {
    cursor: Cursor,
    pending: Arc<PendingCsums>,
    csum: CsumType,
    csum_bytes: u64,
    sectorsize_bytes: u64,
}

/// The key at which checksums from `at` on lie.
pub(crate) fn csum_key(at: LogicalAddr) -> Key {
    Key::new(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, at.0)
}

impl CsumLookup {
    pub(crate) fn new(
        csum_tree: &Arc<Tree>,
        pending: Arc<PendingCsums>,
        csum: CsumType,
        sectorsize_bytes: u64,
    ) -> Self {
        let csum_bytes = csum.len_bytes() as u64;
        Self { cursor: csum_tree.cursor(), pending, csum, csum_bytes, sectorsize_bytes }
    }

    /// Fills `out` with the checksums of the `count` sectors from `at` on.
    ///
    /// # Errors
    /// `Missing` where a sector has none: data that is not marked to be without must have them.
    pub(crate) fn find(&mut self, at: LogicalAddr, count: u64, out: &mut Vec<u8>) -> Result<()> {
        out.clear();
        let mut wanted = at.0;
        let mut left = count;
        // Whether the cursor was placed for what is wanted, and whether it is not pending either.
        let (mut is_placed, mut is_not_pending) = (false, false);
        while left > 0 {
            // What waits is newer than what the tree has, which may be of data that was there before.
            let sectorsize = self.sectorsize_bytes;
            let (found, upto) = self.pending.find(wanted, left, self.csum, sectorsize, out);
            if found > 0 {
                left -= found;
                wanted += found * sectorsize;
                (is_placed, is_not_pending) = (false, false);
                continue;
            }
            // What a cursor stands at from before stays as it was; the tree may have another item
            // there by now.
            let covering = match is_placed || self.cursor.is_current() {
                true => self.covering(wanted)?,
                false => None,
            };
            let Some((first, available)) = covering else {
                if !is_placed {
                    self.cursor.seek_back(&csum_key(LogicalAddr(wanted)))?;
                    is_placed = true;
                    continue;
                }
                if is_not_pending {
                    return Err(missing(wanted).into());
                }
                // They may have become items between the two looks.
                (is_placed, is_not_pending) = (false, true);
                continue;
            };
            is_not_pending = false;
            let take = left.min(available).min(upto);
            if let Some((_, data)) = self.cursor.current()? {
                // Bounded by the item, which `covering` measured.
                let from = usize::try_from(first * self.csum_bytes).unwrap_or(usize::MAX);
                let len = usize::try_from(take * self.csum_bytes).unwrap_or(usize::MAX);
                out.extend_from_slice(&data[from..from + len]);
            }
            left -= take;
            wanted += take * self.sectorsize_bytes;
            if left > 0 {
                self.cursor.next()?;
                is_placed = false;
            }
        }
        Ok(())
    }

    /// If the item here has the checksum of the sector at `wanted`: its index, and how many there
    /// are from it on.
    fn covering(&self, wanted: u64) -> Result<Option<(u64, u64)>> {
        let Some((key, data)) = self.cursor.current()? else { return Ok(None) };
        if key.objectid != ObjectId::EXTENT_CSUM || key.ty != KeyType::EXTENT_CSUM {
            return Ok(None);
        }
        let count = data.len() as u64 / self.csum_bytes;
        let Some(first) = wanted.checked_sub(key.offset).map(|d| d / self.sectorsize_bytes) else {
            return Ok(None);
        };
        Ok((first < count).then(|| (first, count - first)))
    }
}

/// Compares each sector of `data`, read from `at`, with the checksums, of which there may be more.
///
/// # Errors
/// `CsumMismatch` with the address of the first sector that differs; `Missing` where there are fewer.
pub(crate) fn verify(
    csum: CsumType,
    csums: &[u8],
    data: &[u8],
    sectorsize_bytes: usize,
    at: LogicalAddr,
) -> Result<(), Box<Corruption>> {
    let mut first = None;
    csum.for_each_mismatch(data, sectorsize_bytes, csums, |number| {
        first.get_or_insert(number);
    });
    let len = csum.len_bytes();
    let Some(number) = first else {
        let known = csums.len() / len;
        if known < data.len() / sectorsize_bytes {
            return Err(missing(at.0 + (known * sectorsize_bytes) as u64));
        }
        return Ok(());
    };
    let skipped = number * sectorsize_bytes;
    let stored = &csums[number * len..][..len];
    let sector = &data[skipped..][..sectorsize_bytes];
    let bad = LogicalAddr(at.0 + skipped as u64);
    Err(mismatch(csum, stored, sector).in_block(bad))
}

#[cold]
fn missing(at: u64) -> Box<Corruption> {
    Corruption::new(Reason::Missing)
        .in_root(RootId::CSUM_TREE)
        .in_block(LogicalAddr(at))
        .have("no checksum of the data at this address")
}

#[cold]
fn mismatch(csum: CsumType, stored: &[u8], sector: &[u8]) -> Box<Corruption> {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    Corruption::new(Reason::CsumMismatch)
        .have(hex(&csum.compute(sector)[..csum.len_bytes()]))
        .expect(hex(stored))
}

/// Checksums of data written in the running transaction, held back so that each item of the tree
/// is written once and full.
#[derive(Debug, Default)]
pub(crate) struct PendingCsums {
    runs: RwLock<PendingRuns>,
    /// Held by the one flush that runs.
    flush: Mutex<()>,
    /// Bytes of checksums held; read without the lock to skip it where there are none.
    bytes: AtomicUsize,
    run_count: AtomicUsize,
}

#[derive(Debug, Default)]
struct PendingRuns {
    /// By the address of the first sector; runs neither overlap nor touch.
    by_start: BTreeMap<u64, Vec<u8>>,
    /// Those that a flush is turning into items: still found here until all are in the tree.
    flushing: Arc<BTreeMap<u64, Vec<u8>>>,
}

/// Bytes of checksums that are held back at most.
const PENDING_BYTES_MAX: usize = 512 << 10;
/// Runs of them at most: metadata is kept free for each, for which groups would be made.
const PENDING_RUNS_MAX: usize = 1024;
/// Checksums in one item at most, as Linux limits itself.
const ITEM_CSUMS_MAX: usize = 4096;

impl PendingCsums {
    /// Holds the checksums of the sectors from `at` on.
    pub(crate) fn add(&self, at: LogicalAddr, csums: &[u8], csum: CsumType, sectorsize: u64) {
        if csums.is_empty() {
            return;
        }
        let mut runs = self.runs.write();
        let len_of = |csums: &[u8]| (csums.len() / csum.len_bytes()) as u64 * sectorsize;
        let before = runs.by_start.range_mut(..at.0).next_back();
        match before {
            Some((start, held)) if start + len_of(held) == at.0 => held.extend_from_slice(csums),
            _ => {
                runs.by_start.insert(at.0, csums.to_vec());
                self.run_count.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.bytes.fetch_add(csums.len(), Ordering::Relaxed);
    }

    /// Forgets the checksums of the sectors in `start..end`, held or in the tree: their data is
    /// gone in the transaction that wrote it.
    ///
    /// # Errors
    /// What stops an edit; the transaction is then aborted.
    pub(crate) fn remove(&self, handle: &mut Handle<'_>, start: u64, end: u64) -> Result<()> {
        let geometry = *handle.core().roots.store.geometry();
        let (csum_bytes, sectorsize) =
            (geometry.csum.len_bytes(), geometry.sectorsize_bytes as u64);
        let _alone = self.flush.lock();
        self.forget(start, end, csum_bytes, sectorsize);
        let removed = handle.edit(RootId::CSUM_TREE, |editor| {
            crate::alloc::csum_tree::remove(editor, start, end, csum_bytes, sectorsize)
        });
        removed.map_err(|error| handle.abort(error))
    }

    /// The part of [`PendingCsums::remove`] that concerns what is held.
    fn forget(&self, start: u64, end: u64, csum_bytes: usize, sectorsize: u64) {
        let mut runs = self.runs.write();
        let from = runs.by_start.range(..=start).next_back().map_or(start, |(from, _)| *from);
        let hit: Vec<u64> = runs.by_start.range(from..end).map(|(start, _)| *start).collect();
        let bytes_of = |len: u64| usize::try_from(len / sectorsize).unwrap_or(0) * csum_bytes;
        for run_start in hit {
            let run_len = runs.by_start[&run_start].len();
            let run_end = run_start + (run_len / csum_bytes) as u64 * sectorsize;
            let (cut_start, cut_end) = (start.max(run_start), end.min(run_end));
            if cut_start >= cut_end {
                continue;
            }
            let mut run = runs.by_start.remove(&run_start).expect("just seen");
            let tail = run.split_off(bytes_of(cut_end - run_start));
            run.truncate(bytes_of(cut_start - run_start));
            let mut kept = 0;
            for (at, part) in [(run_start, run), (cut_end, tail)] {
                if !part.is_empty() {
                    runs.by_start.insert(at, part);
                    kept += 1;
                }
            }
            // A cut in the middle leaves two runs of one.
            match kept {
                0 => _ = self.run_count.fetch_sub(1, Ordering::Relaxed),
                2 => _ = self.run_count.fetch_add(1, Ordering::Relaxed),
                _ => {}
            }
            self.bytes.fetch_sub(bytes_of(cut_end - cut_start), Ordering::Relaxed);
        }
    }

    /// Bytes of metadata that a flush may need: for each run the leaf where it begins and its share
    /// of the nodes above, and leaves for the checksums that may end up half full.
    pub(crate) fn held_back_bytes(&self, nodesize_bytes: u64) -> u64 {
        let bytes = self.bytes.load(Ordering::Relaxed) as u64;
        let runs = self.run_count.load(Ordering::Relaxed) as u64;
        runs * 3 * nodesize_bytes + bytes * 2
    }

    /// Whether so many are held that they should become items.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > PENDING_BYTES_MAX
            || self.run_count.load(Ordering::Relaxed) > PENDING_RUNS_MAX
    }

    /// Appends to `out` the checksums held of the sectors from `at` on, at most `count`; returns
    /// how many, and where there are none how many sectors there are before the next that are held.
    fn find(
        &self,
        at: u64,
        count: u64,
        csum: CsumType,
        sectorsize: u64,
        out: &mut Vec<u8>,
    ) -> (u64, u64) {
        if self.bytes.load(Ordering::Relaxed) == 0 {
            return (0, u64::MAX);
        }
        let runs = self.runs.read();
        let covering = [&runs.by_start, &*runs.flushing].into_iter().find_map(|runs| {
            let (start, held) = runs.range(..=at).next_back()?;
            let have = (held.len() / csum.len_bytes()) as u64;
            let first = (at - start) / sectorsize;
            (first < have).then_some((held, first, have))
        });
        let Some((held, first, have)) = covering else {
            let next = [&runs.by_start, &*runs.flushing].into_iter().filter_map(|runs| {
                runs.range(at..).next().map(|(start, _)| (start - at) / sectorsize)
            });
            return (0, next.min().unwrap_or(u64::MAX));
        };
        let take = (have - first).min(count);
        // Bounded by the run's length in memory.
        let from = usize::try_from(first).unwrap_or(usize::MAX).saturating_mul(csum.len_bytes());
        let len = usize::try_from(take).unwrap_or(0) * csum.len_bytes();
        out.extend_from_slice(held.get(from..from + len).unwrap_or_default());
        (take, u64::MAX)
    }

    /// Turns all that is held into items.
    ///
    /// # Errors
    /// What stops an edit; the transaction is then aborted.
    pub(crate) fn flush(&self, handle: &mut Handle<'_>) -> Result<()> {
        // Half of them may be items by then, and the rest would be lost.
        self.flush_unguarded(handle).map_err(|error| handle.abort(error))
    }

    fn flush_unguarded(&self, handle: &mut Handle<'_>) -> Result<()> {
        let _alone = self.flush.lock();
        // Readers look here after the tree, so what is in the tree may still be here, but not be
        // in neither. What other threads add meanwhile waits for the next flush.
        let flushing = {
            let mut runs = self.runs.write();
            runs.flushing = Arc::new(std::mem::take(&mut runs.by_start));
            Arc::clone(&runs.flushing)
        };
        let flushed_bytes = flushing.values().map(Vec::len).sum();
        let geometry = *handle.core().roots.store.geometry();
        let csum_bytes = geometry.csum.len_bytes();
        let room = geometry.nodesize_bytes - HEADER_BYTES - 2 * ITEM_BYTES;
        let item_bytes_max = (room / csum_bytes - 1).min(ITEM_CSUMS_MAX) * csum_bytes;
        for (&start, csums) in &*flushing {
            let sector_bytes = geometry.sectorsize_bytes as u64;
            let csums = extend_item(handle, start, csums, csum_bytes, item_bytes_max)?;
            let mut at = start + (csums.0 / csum_bytes) as u64 * sector_bytes;
            for part in csums.1.chunks(item_bytes_max) {
                handle.insert(RootId::CSUM_TREE, csum_key(LogicalAddr(at)), part)?;
                at += (part.len() / csum_bytes) as u64 * sector_bytes;
            }
        }
        self.runs.write().flushing = Arc::default();
        self.bytes.fetch_sub(flushed_bytes, Ordering::Relaxed);
        self.run_count.fetch_sub(flushing.len(), Ordering::Relaxed);
        Ok(())
    }
}

/// Puts as many as fit behind the item that ends where they begin. Returns the bytes taken and
/// those left. What the tree has of their space goes: some writers have left checksums of space that is free, which Linux writes over.
fn extend_item<'a>(
    handle: &mut Handle<'_>,
    start: u64,
    csums: &'a [u8],
    csum_bytes: usize,
    item_bytes_max: usize,
) -> Result<(usize, &'a [u8])> {
    let sectorsize = handle.core().roots.store.geometry().sectorsize_bytes as u64;
    let end = start + (csums.len() / csum_bytes) as u64 * sectorsize;
    let covered_upto = |key: &Key, data: &[u8]| {
        let is_csums = key.objectid == ObjectId::EXTENT_CSUM && key.ty == KeyType::EXTENT_CSUM;
        let covered = (data.len() / csum_bytes) as u64 * sectorsize;
        is_csums.then(|| key.offset.saturating_add(covered))
    };
    let mut cursor = handle.core().roots.tree(RootId::CSUM_TREE)?.cursor();
    // The last one that begins before their end: where that ends before they begin, so do all.
    cursor.seek_back(&csum_key(LogicalAddr(end - 1)))?;
    let is_stale = cursor.current()?.and_then(|(key, data)| covered_upto(&key, data)) > Some(start);
    if is_stale {
        handle.edit(RootId::CSUM_TREE, |editor| {
            crate::alloc::csum_tree::remove(editor, start, end, csum_bytes, sectorsize)
        })?;
        cursor.seek_back(&csum_key(LogicalAddr(start)))?;
    }
    let Some((key, data)) = cursor.current()? else { return Ok((0, csums)) };
    if covered_upto(&key, data) != Some(start) || data.len() >= item_bytes_max {
        return Ok((0, csums));
    }
    let take = (item_bytes_max - data.len()).min(csums.len()) / csum_bytes * csum_bytes;
    let longer = [data, &csums[..take]].concat();
    handle.replace(RootId::CSUM_TREE, key, &longer)?;
    Ok((take, &csums[take..]))
}

#[cfg(test)]
mod tests;
