//! Slabs, and the memory of runs of units in them: the only `unsafe` of the crate.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::units::{RANK_WHOLE, Run, Units};

/// The length of a slab, and what it is aligned to: a huge page of the processors that have them of this size.
pub const SLAB_BYTES: usize = 2 << 20;

/// When the system gives a slab the memory behind its addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backing {
    /// Page by page, each at a fault.
    AsTouched,
    /// All its pages now.
    AtOnce,
    /// At the first fault, a huge page, if the system has one.
    HugePage,
}

/// Memory of [`SLAB_BYTES`], of which runs of units are taken and put back.
#[derive(Debug)]
pub(crate) struct Slab {
    start: NonNull<u8>,
    free: Units,
    /// [`Units::rank()`] of what is free.
    rank: Option<usize>,
    /// Units that were taken at some time. Others are zero, as the system gave them.
    used: Units,
}

// SAFETY: the memory belongs to the slab as a box's belongs to the box. What of it was taken belongs to a `RunMemory`, and the slab
// does not look at it.
unsafe impl Send for Slab {}

impl Slab {
    /// `None` where the system gives no more address space, or lets the process have no more mappings.
    pub(crate) fn new(backing: Backing) -> Option<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let len_bytes = 2 * SLAB_BYTES;
        // SAFETY: a new mapping at an address of the system's choice.
        let mapped = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len_bytes, protection, MapFlags::PRIVATE)
        };
        let mapped = mapped.ok()?.cast::<u8>();
        // Twice as much as wanted holds an aligned piece of what is wanted. The rest goes.
        let before = mapped.align_offset(SLAB_BYTES);
        let start = mapped.wrapping_add(before);
        let rest = [(mapped, before), (start.wrapping_add(SLAB_BYTES), SLAB_BYTES - before)];
        for (from, len_bytes) in rest {
            if len_bytes > 0 {
                // SAFETY: parts of the mapping above, outside of what the slab keeps; nobody has seen them. Should it fail they
                // stay, as address space that is never touched.
                let _ = unsafe { munmap(from.cast::<c_void>(), len_bytes) };
            }
        }
        let advice = match backing {
            Backing::AsTouched => None,
            Backing::AtOnce => Some(Advice::LinuxPopulateWrite),
            Backing::HugePage => Some(Advice::LinuxHugepage),
        };
        if let Some(advice) = advice {
            // SAFETY: advice about the mapping above, which changes nothing of what it holds. A system that does not know it refuses,
            // and nothing is lost.
            let _ = unsafe { madvise(start.cast::<c_void>(), SLAB_BYTES, advice) };
        }
        Some(Self {
            start: NonNull::new(start)?,
            free: Units::all(),
            rank: Some(RANK_WHOLE),
            used: Units::none(),
        })
    }

    /// [`Units::rank()`] of what is free.
    pub(crate) fn rank(&self) -> Option<usize> {
        self.rank
    }

    /// The memory of a run of the order, if one is free; and whether it is zero, as nobody had it before.
    pub(crate) fn take(&mut self, order: usize) -> Option<(RunMemory, bool)> {
        let run = self.free.find(order)?;
        self.free.remove(run);
        self.rank = self.free.rank();
        let is_zero = !self.used.meets(run);
        self.used.insert(run);
        assert!(run.offset_bytes() + run.len_bytes() <= SLAB_BYTES, "a run inside the slab");
        // SAFETY: inside the mapping, by the line before.
        let start = unsafe { self.start.add(run.offset_bytes()) };
        Some((RunMemory { start, run }, is_zero))
    }

    /// Takes back what was taken.
    pub(crate) fn put_back(&mut self, memory: RunMemory) {
        let RunMemory { start, run } = memory;
        let place = start.as_ptr().addr().wrapping_sub(self.start.as_ptr().addr());
        assert!(place == run.offset_bytes() && !self.free.meets(run), "a run of this slab");
        self.free.insert(run);
        self.rank = self.free.rank();
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if self.rank != Some(RANK_WHOLE) {
            // Somebody has a run yet: the memory stays.
            return;
        }
        // SAFETY: a mapping that the slab made, whole, of which nobody has a run. Should it fail the mapping stays, which loses
        // memory and nothing else.
        let _ = unsafe { munmap(self.start.as_ptr().cast::<c_void>(), SLAB_BYTES) };
    }
}

/// The memory of a run, which belongs to who has this. Dropped, it is lost until the process ends, and so is its slab.
#[derive(Debug)]
pub(crate) struct RunMemory {
    start: NonNull<u8>,
    run: Run,
}

// SAFETY: as a box of bytes: the memory belongs to this alone.
unsafe impl Send for RunMemory {}
// SAFETY: as a box of bytes: shared, it is only read.
unsafe impl Sync for RunMemory {}

impl RunMemory {
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: memory of this length, zeroed when it was mapped. It is there for as long as `self`: the slab unmaps nothing
        // before this was put back. No other run has a unit of it, and who changes it has `self` for himself.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.run.len_bytes()) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is not shared.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.run.len_bytes()) }
    }
}
