//! Counts of what went wrong on each device.

use ubtrfs_ondisk::{Corruption, DeviceId, Reason};
use ubtrfs_rt::{AtomicU64, Ordering};

/// Errors of one device since the volume was opened: the five counts of `btrfs device stats`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceStats {
    /// The device.
    pub devid: DeviceId,
    /// Writes that failed.
    pub write_errors: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Flushes that failed.
    pub flush_errors: u64,
    /// Copies whose bytes were wrong.
    pub corruption_errors: u64,
    /// Copies that were whole, but of another generation.
    pub generation_errors: u64,
}

/// The counts while they are kept.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) write: AtomicU64,
    pub(crate) read: AtomicU64,
    pub(crate) flush: AtomicU64,
    corruption: AtomicU64,
    generation: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn add_bad_copy(&self, corruption: &Corruption) {
        Self::add(match corruption.reason {
            Reason::WrongGeneration => &self.generation,
            _ => &self.corruption,
        });
    }

    pub(crate) fn snapshot(&self, devid: DeviceId) -> DeviceStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DeviceStats {
            devid,
            write_errors: read(&self.write),
            read_errors: read(&self.read),
            flush_errors: read(&self.flush),
            corruption_errors: read(&self.corruption),
            generation_errors: read(&self.generation),
        }
    }
}
