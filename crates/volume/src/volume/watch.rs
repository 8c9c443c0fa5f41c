//! Whether what is written to is this volume's alone.
//!
//! No lock keeps a loop device from an image, so the kernel may mount what is open here, write to it, and unmount it again. Who writes
//! looks whether somebody does so now ([`Device::check_unused`]), and whether somebody has: then a primary
//! superblock is another than the one last read or written here. Space that is free to us is the other's by then.
//!
//! 1. Nothing is written on a look that is older than [`LOOK_AGAIN_MS`], where no look has been yet, or after one that refused. A commit
//!    compares the superblocks besides, before its tree blocks, before its superblocks, and, of several devices, before the primaries. What
//!    remains is that time: what another commits in it is written over, as is what he has not committed when he is seen.
//! 2. Once a superblock was another, nothing is written any more, whatever it is then.
//! 3. Whether anything was written since the last look is known, so that what is told is true. A write is in `under_way` from before it
//!    asks whether it still may to after it is in `has_written`.

use std::time::Instant;

use ubtrfs_rt::{AtomicBool, AtomicU64, Mutex, Ordering};

use super::Volume;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::superblocks::{self, Change, Seen};

/// How long others are not looked for, in milliseconds: to look takes as long as some writes.
const LOOK_AGAIN_MS: u64 = 50;

/// No look has been yet.
const NEVER: u64 = u64::MAX;

/// When to look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Look {
    /// Where the last one is too old.
    IfDue,
    /// Now, at the superblocks at least.
    Now,
}

/// When was looked, and what was found.
#[derive(Debug)]
pub(super) struct Watch {
    /// A device may come to be written by others.
    is_shareable: bool,
    opened: Instant,
    /// Taken by who looks; before a member's `seen`.
    looking: Mutex<()>,
    /// When the last look began that refused nothing, in milliseconds since it was opened.
    looked_at_ms: AtomicU64,
    /// Writes that may still be made.
    under_way: AtomicU64,
    /// Something was written since the superblocks were last compared.
    has_written: AtomicBool,
    /// There is something in `lost`, or will be as that is unlocked.
    is_lost: AtomicBool,
    lost: Mutex<Option<Lost>>,
}

/// What was found first, and whether anything may have been written over it.
#[derive(Debug)]
struct Lost {
    change: Change,
    has_written: bool,
}

impl Lost {
    fn error(&self) -> Error {
        let Change { device, have, expect } = self.change.clone();
        Error::SuperblockChanged { device, have, expect, has_written: self.has_written }
    }
}

/// A write under way.
#[derive(Debug)]
pub(super) struct Writing<'a> {
    watch: &'a Watch,
    is_superblock: bool,
}

impl Writing<'_> {
    /// What was written are superblocks, from which another's are told from now on: nothing was written since those of others could be seen.
    pub(super) fn end_as_superblock(mut self) {
        self.is_superblock = true;
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if !self.is_superblock {
            self.watch.has_written.store(true, Ordering::SeqCst);
        }
        self.watch.under_way.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Watch {
    pub(super) fn new(is_shareable: bool) -> Self {
        Self {
            is_shareable,
            opened: Instant::now(),
            looking: Mutex::new(()),
            looked_at_ms: AtomicU64::new(NEVER),
            under_way: AtomicU64::new(0),
            has_written: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            lost: Mutex::new(None),
        }
    }

    /// The time, where it is time to look.
    fn due_at(&self) -> Option<u64> {
        if !self.is_shareable {
            return None;
        }
        let now_ms = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(NEVER - 1);
        let last_ms = self.looked_at_ms.load(Ordering::Acquire);
        let is_due = last_ms == NEVER || now_ms.saturating_sub(last_ms) >= LOOK_AGAIN_MS;
        is_due.then_some(now_ms)
    }

    pub(super) fn check(&self) -> Result<()> {
        if !self.is_lost.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.lost.lock().as_ref().map_or(Ok(()), |lost| Err(lost.error()))
    }

    pub(super) fn begin_write(&self) -> Result<Writing<'_>> {
        self.under_way.fetch_add(1, Ordering::SeqCst);
        if let Err(error) = self.check() {
            self.under_way.fetch_sub(1, Ordering::SeqCst);
            return Err(error);
        }
        Ok(Writing { watch: self, is_superblock: false })
    }

    /// Nothing is written from now on but what is under way.
    fn lose(&self, change: Change) -> Error {
        let mut lost = self.lost.lock();
        self.is_lost.store(true, Ordering::SeqCst);
        // In this order: what is no more under way is in the other.
        let is_writing = self.under_way.load(Ordering::SeqCst) > 0;
        let has_written = is_writing || self.has_written.load(Ordering::SeqCst);
        lost.get_or_insert(Lost { change, has_written }).error()
    }
}

impl Volume {
    /// Refuses where a primary superblock is not as last read or written here: somebody else has written to the filesystem. A commit
    /// asks before the first of its tree blocks goes out. After it was refused nothing is written any more.
    ///
    /// # Errors
    /// `SuperblockChanged`; `MountedByKernel`, where it is time to look for that; `Io`.
    pub fn check_ours(&self) -> Result<()> {
        self.look(Look::Now)
    }

    /// Lets a write begin, to what is still ours.
    pub(super) fn begin_write(&self) -> Result<Writing<'_>> {
        self.check_writable()?;
        self.look(Look::IfDue)?;
        self.catch_up_first()?;
        self.watch.begin_write()
    }

    /// Looks whether somebody else writes to the devices, or has.
    pub(super) fn look(&self, look: Look) -> Result<()> {
        let watch = &self.watch;
        watch.check()?;
        if look == Look::IfDue && watch.due_at().is_none() {
            return Ok(());
        }
        let _looking = watch.looking.lock();
        // Who held the lock may have looked.
        let due_at = watch.due_at();
        if look == Look::IfDue && due_at.is_none() {
            return watch.check();
        }
        let had_written = watch.has_written.swap(false, Ordering::SeqCst);
        let looked = self.look_at_devices(due_at.is_some());
        if !matches!(looked, Ok(None)) {
            watch.has_written.fetch_or(had_written, Ordering::SeqCst);
            watch.looked_at_ms.store(NEVER, Ordering::Release);
        } else if let Some(now_ms) = due_at {
            watch.looked_at_ms.store(now_ms, Ordering::Release);
        }
        looked?.map_or(Ok(()), |change| Err(watch.lose(change)))
    }

    /// Who has mounted a device, and unmounted it after that was looked for, is told by the superblock.
    fn look_at_devices(&self, is_due: bool) -> Result<Option<Change>> {
        for member in self.present_members() {
            let Some(device) = &member.device else { continue };
            if is_due {
                device.check_unused()?;
            }
            // Held while it is read, as while it is written.
            let seen = member.seen.lock();
            let change = superblocks::change(&**device, *seen)?;
            if change.is_some() {
                return Ok(change);
            }
        }
        Ok(None)
    }

    /// As [`Volume::check_ours`], of a device whose superblock is locked.
    pub(super) fn check_seen(&self, device: &dyn Device, seen: Option<Seen>) -> Result<()> {
        match superblocks::change(device, seen)? {
            Some(change) => Err(self.watch.lose(change)),
            None => Ok(()),
        }
    }
}
