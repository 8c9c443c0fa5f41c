//! What a power cut leaves, and what a failing device does: simulated devices that record their
//! writes, the states that a cut at any of them may leave behind, and faults on request.
//!
//! Writes before a device's last flush have arrived. Of those after it, any may have and any may
//! not, in any order, and one may have arrived in part, cut at the borders of its sectors of 512
//! bytes. What lies at a sector is then what one of the writes to it left, or what was there before
//! them: so a set of writes and parts of writes says all that any order can leave. Alone the write
//! of a superblock, 4 KiB where one belongs, arrives whole or not at all: the format has no other
//! answer to a torn one. Devices of one array lose their power together, and each is flushed alone.

mod array;
mod device;
mod image;
mod states;

use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS};

pub use array::{Effect, Fault, Request, SimArray, Strike};
pub use device::SimDevice;
pub use image::{BlockSet, Image};
pub use states::{CrashKind, CrashPlan, CrashState, CrashStates, Recording};

/// A simulated device whose recording is what a test is about.
pub type RecordingDevice = SimDevice;

/// A simulated device as the power comes back.
pub type CutDevice = SimDevice;

/// What arrives in part, if a write does.
const SECTOR_BYTES: usize = 512;

/// Whether a write is one superblock in its place.
fn is_superblock(at: u64, len: usize) -> bool {
    len == SUPERBLOCK_BYTES && SUPERBLOCK_OFFSETS.iter().any(|offset| offset.0 == at)
}

#[cfg(test)]
mod tests;
