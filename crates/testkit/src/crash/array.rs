//! Devices under one power supply, and what goes wrong with them.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ubtrfs_volume::Device;

use super::device::SimDevice;
use super::image::{BlockSet, Image};
use super::is_superblock;
use super::states::Recording;

/// What a device is asked to do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Request {
    /// A read of any length.
    Read,
    /// A write of any length; each buffer of a request is one.
    Write,
    /// A flush.
    Flush,
}

/// What goes wrong with a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// It fails, and nothing was done.
    Fail,
    /// A write stores so many sectors of 512 bytes, then fails; that of a superblock all or none.
    /// Another request fails.
    Tear {
        /// Sectors that arrive; at most what the write has, which then has arrived and is said not
        /// to have.
        sectors: usize,
    },
    /// One bit is another: of what a read returns, or of what a write stores. Nothing fails.
    Corrupt {
        /// The byte it is in, counted modulo the request's length.
        byte: usize,
    },
    /// It takes longer.
    Delay(Duration),
}

/// A fault to come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Which device of the array it strikes; `None` for any.
    pub device: Option<usize>,
    /// Which kind of request it strikes.
    pub request: Request,
    /// How many such requests go well before it.
    pub after: u64,
    /// What happens.
    pub effect: Effect,
    /// Whether it strikes all such requests from then on.
    pub stays: bool,
}

/// A request that a fault struck.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strike {
    /// The device's place in its array.
    pub device: usize,
    /// What it was asked for.
    pub request: Request,
    /// Where the request began; 0 of a flush.
    pub at: u64,
    /// How many bytes it was for.
    pub len_bytes: usize,
    /// What happened.
    pub effect: Effect,
}

impl Strike {
    /// Whether it was for one superblock.
    pub fn is_of_superblock(&self) -> bool {
        is_superblock(self.at, self.len_bytes)
    }
}

/// Devices in memory, recorded together: what was asked of which, in one order.
#[derive(Clone, Debug)]
pub struct SimArray {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) recording: Recording,
    faults: Vec<Fault>,
    are_faults_off: bool,
    strikes: Vec<Strike>,
    /// What was read of each device, where that is wanted.
    reads: Option<Vec<BlockSet>>,
}

impl SimArray {
    /// Empty devices of those lengths.
    pub fn new(lens_bytes: &[u64]) -> Self {
        Self::of_images(lens_bytes.iter().map(|len_bytes| Image::new(*len_bytes)).collect())
    }

    /// Devices that hold what the images do.
    pub fn of_images(images: Vec<Image>) -> Self {
        let state = State {
            recording: Recording::new(images),
            faults: Vec::new(),
            are_faults_off: false,
            strikes: Vec::new(),
            reads: None,
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// The device in that place.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn device(&self, index: usize) -> SimDevice {
        let count = self.state().recording.now().len();
        assert!(index < count, "device {index} of {count}");
        SimDevice::in_array(self.clone(), index)
    }

    /// All devices, as a volume takes them.
    pub fn devices(&self) -> Vec<Arc<dyn Device>> {
        let count = self.state().recording.now().len();
        let device = |index| Arc::new(SimDevice::in_array(self.clone(), index)) as Arc<dyn Device>;
        (0..count).map(device).collect()
    }

    /// Takes what is there as arrived, and forgets how it came.
    pub fn begin(&self) {
        let mut state = self.state();
        state.recording = Recording::new(state.recording.now().to_vec());
    }

    /// What was recorded since [`Self::begin`].
    pub fn recording(&self) -> Recording {
        self.state().recording.clone()
    }

    /// How many writes and flushes were recorded since [`Self::begin`].
    pub fn event_count(&self) -> usize {
        self.state().recording.event_count()
    }

    /// How many writes were recorded since [`Self::begin`].
    pub fn write_count(&self) -> usize {
        self.state().recording.write_count()
    }

    /// What the devices hold now.
    pub fn images(&self) -> Vec<Image> {
        self.state().recording.now().to_vec()
    }

    /// Plans a fault, beside those planned before; each counts its requests from now on.
    pub fn plan(&self, fault: Fault) {
        self.state().faults.push(fault);
    }

    /// Forgets all faults that are planned.
    pub fn forget_faults(&self) {
        self.state().faults.clear();
    }

    /// Lets requests go well, and uncounted, until faults are let in again: for who looks at what
    /// there is, as a judge.
    pub fn suspend_faults(&self, are_off: bool) {
        self.state().are_faults_off = are_off;
    }

    /// What faults struck, delays among it.
    pub fn strikes(&self) -> Vec<Strike> {
        self.state().strikes.clone()
    }

    /// Begins to note which blocks are read, forgetting what was noted.
    pub fn note_reads(&self) {
        let mut state = self.state();
        let count = state.recording.now().len();
        state.reads = Some(vec![BlockSet::default(); count]);
    }

    /// The blocks of each device that were read since [`Self::note_reads`], which ends.
    pub fn take_reads(&self) -> Vec<BlockSet> {
        self.state().reads.take().unwrap_or_default()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request; returns what goes wrong with it, once any delay is over.
    pub(super) fn count(
        &self,
        device: usize,
        request: Request,
        at: u64,
        len_bytes: usize,
    ) -> Option<Effect> {
        let effects = self.state().count(device, request, at, len_bytes);
        let mut wrong = None;
        for effect in effects {
            match effect {
                Effect::Delay(time) => std::thread::sleep(time),
                other => wrong = wrong.or(Some(other)),
            }
        }
        wrong
    }
}

impl State {
    fn count(&mut self, device: usize, request: Request, at: u64, len_bytes: usize) -> Vec<Effect> {
        let mut effects = Vec::new();
        if self.are_faults_off || self.faults.is_empty() {
            return effects;
        }
        self.faults.retain_mut(|fault| {
            if fault.request != request || fault.device.is_some_and(|one| one != device) {
                return true;
            }
            if fault.after > 0 {
                fault.after -= 1;
                return true;
            }
            effects.push(fault.effect);
            fault.stays
        });
        for effect in &effects {
            self.strikes.push(Strike { device, request, at, len_bytes, effect: *effect });
        }
        effects
    }

    pub(super) fn read(&mut self, device: usize, at: u64, buffer: &mut [u8]) {
        self.recording.now()[device].read(at, buffer);
        if let Some(reads) = &mut self.reads {
            reads[device].insert_range(at, buffer.len());
        }
    }
}

pub(super) fn failure() -> io::Error {
    io::Error::other("the simulated device fails")
}
