//! The simulated device.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_volume::Device;

use super::image::Image;
use super::states::{Event, Recording};
use super::{CrashState, SECTOR_BYTES, is_superblock};

const BLOCK: u64 = 4096;

/// What a device is asked to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
    /// A write stores so many sectors of 512 bytes, then fails; that of a superblock and another
    /// request fail.
    Tear {
        /// Sectors that arrive; at most what the write has.
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
    /// Which kind of request it strikes.
    pub request: Request,
    /// How many requests of that kind go well before it.
    pub after: u64,
    /// What happens.
    pub effect: Effect,
    /// Whether it strikes all requests of that kind from then on.
    pub stays: bool,
}

/// A device in memory that records what is written to it and when it is flushed, and that fails
/// when it is told to.
#[derive(Debug)]
pub struct SimDevice {
    len_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    recording: Recording,
    faults: Vec<Fault>,
    fault_count: u64,
}

impl SimDevice {
    /// An empty one of that length.
    pub fn new(len_bytes: u64) -> Self {
        Self::of_image(Image::new(len_bytes))
    }

    /// One that holds what the image does.
    pub fn of_image(image: Image) -> Self {
        let len_bytes = image.len_bytes();
        let state = State { recording: Recording::new(image), faults: Vec::new(), fault_count: 0 };
        Self { len_bytes, state: Mutex::new(state) }
    }

    /// Takes what is there as arrived, and forgets how it came.
    pub fn begin(&self) {
        let mut state = self.state();
        state.recording = Recording::new(state.recording.now().clone());
    }

    /// What was recorded since [`Self::begin`].
    pub fn recording(&self) -> Recording {
        self.state().recording.clone()
    }

    /// What it holds now.
    pub fn image(&self) -> Image {
        self.state().recording.now().clone()
    }

    /// Writes out what it holds now as a sparse image file, for judges that read files.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write_image(&self, file: &Path) {
        self.image().write_to(file);
    }

    /// Plans a fault, beside those planned before; each counts its requests from now on.
    pub fn plan(&self, fault: Fault) {
        self.state().faults.push(fault);
    }

    /// Forgets all faults that are planned.
    pub fn forget_faults(&self) {
        self.state().faults.clear();
    }

    /// How often a fault struck.
    pub fn fault_count(&self) -> u64 {
        self.state().fault_count
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request; returns what goes wrong with it, once any delay is over.
    fn count(&self, request: Request) -> Option<Effect> {
        let effects = {
            let mut state = self.state();
            let mut effects = Vec::new();
            state.faults.retain_mut(|fault| {
                if fault.request != request {
                    return true;
                }
                if fault.after > 0 {
                    fault.after -= 1;
                    return true;
                }
                effects.push(fault.effect);
                fault.stays
            });
            state.fault_count += u64::try_from(effects.len()).expect("a count fits");
            effects
        };
        let mut wrong = None;
        for effect in effects {
            match effect {
                Effect::Delay(time) => std::thread::sleep(time),
                other => wrong = wrong.or(Some(other)),
            }
        }
        wrong
    }

    fn store(&self, at: PhysicalAddr, mut bytes: Vec<u8>) -> io::Result<()> {
        check_range(at, bytes.len(), self.len_bytes)?;
        let mut result = Ok(());
        match self.count(Request::Write) {
            Some(Effect::Fail) => return Err(failure()),
            Some(Effect::Tear { .. }) if is_superblock(at.0, bytes.len()) => return Err(failure()),
            Some(Effect::Tear { sectors }) => {
                bytes.truncate(sectors.saturating_mul(SECTOR_BYTES).min(bytes.len()));
                result = Err(failure());
            }
            Some(Effect::Corrupt { byte }) => flip(&mut bytes, byte),
            _ => {}
        }
        self.state().recording.push(Event::Write { at: at.0, bytes: Arc::from(bytes) });
        result
    }
}

impl From<CrashState> for SimDevice {
    fn from(state: CrashState) -> Self {
        Self::of_image(state.image)
    }
}

fn flip(bytes: &mut [u8], byte: usize) {
    if let Some(at) = byte.checked_rem(bytes.len()) {
        bytes[at] ^= 0x10;
    }
}

fn failure() -> io::Error {
    io::Error::other("the simulated device fails")
}

fn check_range(at: PhysicalAddr, len: usize, device_len_bytes: u64) -> io::Result<()> {
    let end = u64::try_from(len).ok().and_then(|len| at.0.checked_add(len));
    match end {
        Some(end) if end <= device_len_bytes => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl Device for SimDevice {
    fn name(&self) -> String {
        "simulated".to_owned()
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        check_range(at, buf.len(), self.len_bytes)?;
        let effect = self.count(Request::Read);
        if matches!(effect, Some(Effect::Fail | Effect::Tear { .. })) {
            return Err(failure());
        }
        self.state().recording.now().read(at.0, buf);
        if let Some(Effect::Corrupt { byte }) = effect {
            flip(buf, byte);
        }
        Ok(())
    }

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        // Of several buffers in one request, each is a write of its own: a cut may come between.
        self.store(at, buf.to_vec())
    }

    fn flush(&self) -> io::Result<()> {
        if matches!(self.count(Request::Flush), Some(Effect::Fail | Effect::Tear { .. })) {
            return Err(failure());
        }
        self.state().recording.push(Event::Flush);
        Ok(())
    }

    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> io::Result<()> {
        // Reads of what was discarded may give anything: here what no reader takes for its own.
        let (first, end) = (at.0.div_ceil(BLOCK), at.0.saturating_add(len_bytes) / BLOCK);
        let stored = self.image().stored_blocks(first..end.max(first));
        for block in stored {
            let bytes = Arc::from([0xd5; 4096]);
            self.state().recording.push(Event::Write { at: block * BLOCK, bytes });
        }
        Ok(())
    }

    fn resize(&self, _len_bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn is_read_only(&self) -> bool {
        false
    }
}
