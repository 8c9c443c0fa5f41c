//! Single operations on a tree.

use std::path::Path;

use ubtrfs_engine::bench_hooks::TreeProbe;
use ubtrfs_engine::{Filesystem, Reservation};

use super::{Timing, make, random_order, reopen, require, timed};
use crate::error::Result;

/// Bytes of an item's data: about what a directory item has.
const ITEM_DATA_BYTES: usize = 48;

/// Items of one tree: inserted in order and at random, found, walked over.
pub(super) fn run(image: &Path, count: u64) -> Result<Vec<Timing>> {
    let mut timings = Vec::new();
    let fs = make(image)?;
    let probe = TreeProbe::new(&fs)?;
    let data = [7; ITEM_DATA_BYTES];
    let (inserted, ()) = timed(|| insert_all(&fs, &probe, 0..count, 0, &data))?;
    let (committed, ()) = timed(|| Ok(fs.commit()?))?;
    timings.push(Timing::new("insert in order", count, inserted + committed));
    timings.push(Timing::new("… without the commit", count, inserted));

    let order = random_order(count);
    let (searched, found) = timed(|| search_all(&probe, order.iter().copied()))?;
    require(found == count)?;
    timings.push(Timing::new("search", count, searched));
    let (searched, found) = timed(|| search_all(&probe, 0..count))?;
    require(found == count)?;
    timings.push(Timing::new("search near the last one", count, searched));
    let (walked, seen) = timed(|| Ok(probe.walk()?))?;
    require(seen >= count)?;
    timings.push(Timing::new("next", seen, walked));

    let (inserted, ()) = timed(|| insert_all(&fs, &probe, order, 1, &data))?;
    let (committed, ()) = timed(|| Ok(fs.commit()?))?;
    timings.push(Timing::new("insert at random", count, inserted + committed));
    timings.push(Timing::new("… without the commit", count, inserted));
    drop(probe);
    drop(fs);

    let fs = reopen(image)?;
    let probe = TreeProbe::new(&fs)?;
    let (walked, seen) = timed(|| Ok(probe.walk()?))?;
    require(seen >= 2 * count)?;
    timings.push(Timing::new("next, cold", seen, walked));
    Ok(timings)
}

/// A handle for each: what an operation of its own costs.
fn insert_all(
    fs: &Filesystem,
    probe: &TreeProbe,
    ids: impl IntoIterator<Item = u64>,
    offset: u64,
    data: &[u8],
) -> Result<()> {
    for id in ids {
        let mut handle = fs.begin(Reservation::items(1))?;
        probe.insert(&mut handle, id, offset, data)?;
    }
    Ok(())
}

fn search_all(probe: &TreeProbe, ids: impl IntoIterator<Item = u64>) -> Result<u64> {
    let mut found = 0;
    for id in ids {
        found += u64::from(probe.search(id, 0)?);
    }
    Ok(found)
}
