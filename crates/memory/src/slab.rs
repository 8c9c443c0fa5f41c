//! Slabs, and the memory of runs of units in them: the only `unsafe` of the crate.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::units::{RANK_WHOLE, Run, UNITS, Units};

/// The length of a slab, and what it is aligned to: a huge page of the processors that have them of this size.
pub const SLAB_BYTES: usize = 2 << 20;

/// When the system gives a slab the memory behind its addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backing {
    /// Page by page, each at a fault.
    AsTouched,
    /// All pages of a run by one call, or of the word of units that it lies in where that has none yet.
    ByRuns,
    /// At the first fault, a huge page, if the system has one.
    HugePage,
}

/// Address space of [`SLAB_BYTES`], of which runs of units are taken and put back.
#[derive(Debug)]
pub(crate) struct Slab {
    start: NonNull<u8>,
    backing: Backing,
    free: Units,
    /// [`Units::rank()`] of what is free.
    rank: Option<usize>,
    /// Units that were taken at some time, and not given back to the system since. Others are zero.
    used: Units,
    /// Units that the system may have given memory for: all for which it has, and those of `used`.
    backed: Units,
    /// Units that are backed and free.
    idle: usize,
}

/// What was taken of a slab.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) memory: RunMemory,
    /// Nobody had it before.
    pub(crate) is_zero: bool,
    /// What [`RunMemory::populate()`] is to be called for, and [`Slab::note_backed()`] behind that.
    pub(crate) bare: Option<Run>,
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
        // Twice as much as wanted holds an aligned piece of what is wanted. The last one: Linux maps below what it has mapped, so that
        // slabs touch, and are one mapping of the few that a process may have.
        let before = SLAB_BYTES - mapped.addr() % SLAB_BYTES;
        let start = mapped.wrapping_add(before);
        let rest = [(mapped, before), (start.wrapping_add(SLAB_BYTES), SLAB_BYTES - before)];
        for (from, len_bytes) in rest {
            if len_bytes > 0 {
                // SAFETY: parts of the mapping above, outside of what the slab keeps; nobody has seen them. Should it fail they
                // stay, as address space that is never touched.
                let _ = unsafe { munmap(from.cast::<c_void>(), len_bytes) };
            }
        }
        // Not as the system would have it: where it gives huge pages unasked, what is touched is less than what is taken.
        let advice = match backing {
            Backing::HugePage => Advice::LinuxHugepage,
            Backing::AsTouched | Backing::ByRuns => Advice::LinuxNoHugepage,
        };
        // SAFETY: advice about the mapping above, which changes nothing of what it holds. A system that does not know it refuses,
        // and nothing is lost.
        let _ = unsafe { madvise(start.cast::<c_void>(), SLAB_BYTES, advice) };
        let is_huge = backing == Backing::HugePage;
        Some(Self {
            start: NonNull::new(start)?,
            backing,
            free: Units::all(),
            rank: Some(RANK_WHOLE),
            used: Units::none(),
            backed: if is_huge { Units::all() } else { Units::none() },
            idle: if is_huge { UNITS } else { 0 },
        })
    }

    /// [`Units::rank()`] of what is free.
    pub(crate) fn rank(&self) -> Option<usize> {
        self.rank
    }

    /// Units with memory that nobody has.
    pub(crate) fn idle(&self) -> usize {
        self.idle
    }

    /// A run of the order, if one is free; one with memory first. `may_idle` where memory may come for more than that. `place` is the
    /// caller's, to find the slab again.
    pub(crate) fn take(&mut self, order: usize, place: u32, may_idle: bool) -> Option<Taken> {
        let has_memory = self.free.common(&self.backed).find(order);
        let run = has_memory.or_else(|| self.free.find(order))?;
        assert!(run.offset_bytes() + run.len_bytes() <= SLAB_BYTES, "a run inside the slab");
        assert!(self.free.has(run), "a run that nobody has");
        let is_zero = !self.used.meets(run);
        let bare = (self.backing == Backing::ByRuns && !self.backed.has(run)).then(|| {
            let is_first = !self.backed.meets(run.word_run());
            if is_first && may_idle { run.word_run() } else { run }
        });
        self.change(run, |slab| {
            slab.free.remove(run);
            slab.used.insert(run);
            slab.backed.insert(run);
        });
        // SAFETY: inside the mapping, by the first assertion.
        let start = unsafe { self.start.add(run.offset_bytes()) };
        Some(Taken { memory: RunMemory { start, run, place }, is_zero, bare })
    }

    /// The system was asked for the memory of all of it. What of it was given back meanwhile may have it again.
    pub(crate) fn note_backed(&mut self, run: Run) {
        self.change(run, |slab| slab.backed.insert(run));
    }

    /// Takes back what was taken; `is_given_back` as [`RunMemory::give_back()`] said.
    pub(crate) fn put_back(&mut self, memory: RunMemory, is_given_back: bool) {
        let RunMemory { start, run, .. } = memory;
        let place = start.as_ptr().addr().wrapping_sub(self.start.as_ptr().addr());
        assert!(place == run.offset_bytes() && !self.free.meets(run), "a run of this slab");
        self.change(run, |slab| {
            slab.free.insert(run);
            if is_given_back {
                slab.used.remove(run);
                slab.backed.remove(run);
            }
        });
    }

    /// Changes units of the word that the run lies in, and what is counted of them.
    fn change(&mut self, run: Run, change: impl FnOnce(&mut Self)) {
        let count = |slab: &Self| slab.free.count_common(&slab.backed, run);
        let idle_before = count(self);
        change(self);
        self.idle = self.idle - idle_before + count(self);
        self.rank = self.free.rank();
    }

    #[cfg(test)]
    pub(crate) fn start_address(&self) -> usize {
        self.start.as_ptr().addr()
    }

    #[cfg(test)]
    pub(crate) fn count_idle(&self) -> usize {
        let idle = self.free.common(&self.backed);
        (0..UNITS).filter(|unit| idle.has(Run::unit(*unit))).count()
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if self.rank != Some(RANK_WHOLE) {
            // Somebody has a run yet: the memory stays.
            return;
        }
        let start = self.start.as_ptr().cast::<c_void>();
        // SAFETY: a mapping that the slab made, whole, of which nobody has a run.
        let unmapped = unsafe { munmap(start, SLAB_BYTES) };
        if unmapped.is_err() {
            // The process has as many mappings as it may, and this would split one. The memory goes at least.
            // SAFETY: as above.
            let _ = unsafe { madvise(start, SLAB_BYTES, Advice::LinuxDontNeed) };
        }
    }
}

/// The memory of a run, which belongs to who has this. Dropped, it is lost until the process ends, and so is its slab.
#[derive(Debug)]
pub(crate) struct RunMemory {
    start: NonNull<u8>,
    run: Run,
    place: u32,
}

// SAFETY: as a box of bytes: the memory belongs to this alone.
unsafe impl Send for RunMemory {}
// SAFETY: as a box of bytes: shared, it is only read.
unsafe impl Sync for RunMemory {}

impl RunMemory {
    /// As it was told to [`Slab::take()`].
    pub(crate) fn place(&self) -> u32 {
        self.place
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.run.len_bytes()
    }

    /// Has the system give the memory of `bare`, which is this run or the word of units that it lies in, where it has not yet.
    pub(crate) fn populate(&self, bare: Run) {
        assert!(bare == self.run || bare == self.run.word_run(), "a run with this one in it");
        let start = self.start.as_ptr().wrapping_sub(self.run.offset_bytes() - bare.offset_bytes());
        // SAFETY: a part of the slab, whose mapping is there for as long as `self`. This changes nothing of what it holds, whoever has
        // other runs of it. A system that does not know it refuses, and gives the memory at faults.
        let _ = unsafe {
            madvise(start.cast::<c_void>(), bare.len_bytes(), Advice::LinuxPopulateWrite)
        };
    }

    /// Has the system take the memory back: what is there is zeros then. Whether it did.
    pub(crate) fn give_back(&mut self) -> bool {
        let start = self.start.as_ptr().cast::<c_void>();
        // SAFETY: the memory belongs to `self`, which is not shared; bytes that were anything are zeros behind it.
        unsafe { madvise(start, self.len_bytes(), Advice::LinuxDontNeed) }.is_ok()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: memory of this length, zeroed when it was mapped. It is there for as long as `self`: the slab unmaps nothing
        // before this was put back. No other run has a unit of it, and who changes it has `self` for himself.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes()) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is not shared.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes()) }
    }
}
