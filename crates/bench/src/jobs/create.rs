//! Making files.

use std::path::Path;

use ubtrfs_engine::{NewInode, PreparedData, Reservation};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_rt::Time;

use super::{Timing, make, random_order, timed};
use crate::error::Result;

/// Contents of a small file, as in the send experiment.
const INLINE_BYTES: usize = 2000;

/// Files in one directory: empty ones, then small ones with their contents.
pub(super) fn run(image: &Path, count: u64) -> Result<Vec<Timing>> {
    let mut timings = Vec::new();
    let fs = make(image)?;
    let new = NewInode::new(0o100_644, Time { sec: 1_600_000_000, nsec: 0 });
    let dir = fs.top_level();
    let (created, ()) = timed(|| {
        for at in 0..count {
            let name = name("e", at);
            fs.begin(Reservation::create(0))?.create(dir, name.as_bytes(), &new)?;
        }
        Ok(())
    })?;
    let (committed, ()) = timed(|| Ok(fs.commit()?))?;
    timings.push(Timing::new("create empty", count, created + committed));
    timings.push(Timing::new("… without the commit", count, created));

    let options = fs.write_options(None);
    let contents = [b'x'; INLINE_BYTES];
    let reservation = Reservation::create(3);
    let (created, ()) = timed(|| {
        for at in 0..count {
            let name = name("i", at);
            let data = PreparedData::new(contents.to_vec(), &options);
            let mut handle = fs.begin(reservation)?;
            let id = handle.create(dir, name.as_bytes(), &new)?;
            handle.write_file(id, vec![(FileOffset(0), data)], INLINE_BYTES as u64)?;
        }
        Ok(())
    })?;
    let (committed, ()) = timed(|| Ok(fs.commit()?))?;
    timings.push(Timing::new("create with 2000 bytes inline", count, created + committed));
    timings.push(Timing::new("… without the commit", count, created));
    let order = random_order(count);
    let (looked_up, ()) = timed(|| {
        for at in order {
            fs.inode(fs.lookup(dir, name("e", at).as_bytes())?)?;
        }
        Ok(())
    })?;
    timings.push(Timing::new("look up a name and its inode", count, looked_up));
    Ok(timings)
}

fn name(prefix: &str, at: u64) -> String {
    format!("{prefix}{at:07}")
}
