//! Time and identifiers: real, or those of a reproducible run.

use ubtrfs_engine::Filesystem;
use ubtrfs_ondisk::CsumType;
use ubtrfs_rt::{Arc, Runtime, Time};

use crate::failure::{Failure, Result};
use crate::live;

/// The real time and random identifiers; with `SOURCE_DATE_EPOCH`, that time, and identifiers that
/// follow from it and from `seed`.
pub fn runtime(seed: &str) -> Result<Arc<Runtime>> {
    let Some(time) = source_date_epoch()? else {
        return Ok(Arc::new(Runtime::system()));
    };
    let seed = CsumType::Xxhash.compute(format!("{} {seed}", time.sec).as_bytes());
    let seed = u64::from_le_bytes(*seed.first_chunk().expect("a checksum has 32 bytes"));
    Ok(Arc::new(Runtime::reproducible(time, seed)))
}

/// The moment that builds take for "now" when they are to be reproducible.
pub fn source_date_epoch() -> Result<Option<Time>> {
    const NAME: &str = "SOURCE_DATE_EPOCH";
    let Some(value) = std::env::var_os(NAME).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let time = value.to_str().and_then(parse).ok_or_else(|| {
        Failure::usage(NAME, "expected seconds since 1970, as a number")
            .advice("Unset it to take the time from the clock.")
    })?;
    Ok(Some(time))
}

/// Seconds since 1970.
pub fn parse(text: &str) -> Option<Time> {
    let seconds = text.parse::<u32>().ok()?;
    Some(Time { sec: seconds.into(), nsec: 0 })
}

/// The time of a command that begins: the clock's of the filesystem, or at a mount what the caller's `SOURCE_DATE_EPOCH` says.
pub fn now(filesystem: &Filesystem) -> Time {
    let said = live::served().and_then(|live| live.call.epoch);
    said.unwrap_or_else(|| filesystem.runtime().clock.now())
}
