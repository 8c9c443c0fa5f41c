//! What a power cut leaves, and what a failing device does: a simulated device that records its
//! writes, the states that a cut at any of them may leave behind, and faults on request.
//!
//! Writes before the last flush have arrived. Of those after it, any may have and any may not, in
//! any order, and one may have arrived in part, cut at the borders of its sectors of 512 bytes.
//! Alone the write of a superblock, 4 KiB where one belongs, arrives whole or not at all: the
//! format has no other answer to a torn one.

mod device;
mod image;
mod states;

use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS};

pub use device::{Effect, Fault, Request, SimDevice};
pub use image::Image;
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
