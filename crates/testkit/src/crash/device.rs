//! The simulated device.

use std::io;
use std::path::Path;
use std::sync::Arc;

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_ondisk::superblock::SUPERBLOCK_BYTES;
use ubtrfs_volume::Device;

use super::array::{Effect, Fault, Request, SimArray, failure};
use super::image::Image;
use super::states::{Event, Recording};
use super::{CrashState, SECTOR_BYTES, is_superblock};

const BLOCK: u64 = 4096;
const BLOCK_BYTES: usize = 4096;
const SUPERBLOCK_SECTORS: usize = SUPERBLOCK_BYTES / SECTOR_BYTES;

/// A device in memory that records what is written to it and when it is flushed, and that fails
/// when it is told to: one of a [`SimArray`], or alone.
#[derive(Debug)]
pub struct SimDevice {
    array: SimArray,
    index: usize,
}

impl SimDevice {
    /// An empty one of that length, alone.
    pub fn new(len_bytes: u64) -> Self {
        Self::of_image(Image::new(len_bytes))
    }

    /// One that holds what the image does, alone.
    pub fn of_image(image: Image) -> Self {
        Self::in_array(SimArray::of_images(vec![image]), 0)
    }

    pub(super) fn in_array(array: SimArray, index: usize) -> Self {
        Self { array, index }
    }

    /// As [`SimArray::begin`].
    pub fn begin(&self) {
        self.array.begin();
    }

    /// As [`SimArray::recording`].
    pub fn recording(&self) -> Recording {
        self.array.recording()
    }

    /// What it holds now.
    pub fn image(&self) -> Image {
        self.array.state().recording.now()[self.index].clone()
    }

    /// Writes out what it holds now as a sparse image file, for judges that read files.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write_image(&self, file: &Path) {
        self.image().write_to(file);
    }

    /// As [`SimArray::plan`].
    pub fn plan(&self, fault: Fault) {
        self.array.plan(fault);
    }

    /// As [`SimArray::forget_faults`].
    pub fn forget_faults(&self) {
        self.array.forget_faults();
    }

    fn store(&self, at: PhysicalAddr, mut bytes: Vec<u8>) -> io::Result<()> {
        check_range(at, bytes.len(), self.len_bytes())?;
        let mut result = Ok(());
        match self.array.count(self.index, Request::Write, at.0, bytes.len()) {
            Some(Effect::Fail) => return Err(failure()),
            Some(Effect::Tear { sectors }) => {
                if is_superblock(at.0, bytes.len()) && sectors < SUPERBLOCK_SECTORS {
                    return Err(failure());
                }
                bytes.truncate(sectors.saturating_mul(SECTOR_BYTES).min(bytes.len()));
                result = Err(failure());
            }
            Some(Effect::Corrupt { byte }) => flip(&mut bytes, byte),
            _ => {}
        }
        self.record(Event::Write { at: at.0, bytes: Arc::from(bytes) });
        result
    }

    fn record(&self, event: Event) {
        self.array.state().recording.push(self.index, event);
    }
}

impl From<CrashState> for SimDevice {
    /// The first device of the state.
    fn from(state: CrashState) -> Self {
        SimArray::of_images(state.images).device(0)
    }
}

fn flip(bytes: &mut [u8], byte: usize) {
    if let Some(at) = byte.checked_rem(bytes.len()) {
        bytes[at] ^= 0x10;
    }
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
        format!("simulated device {}", self.index + 1)
    }

    fn len_bytes(&self) -> u64 {
        self.array.state().recording.now()[self.index].len_bytes()
    }

    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        check_range(at, buf.len(), self.len_bytes())?;
        let effect = self.array.count(self.index, Request::Read, at.0, buf.len());
        if matches!(effect, Some(Effect::Fail | Effect::Tear { .. })) {
            return Err(failure());
        }
        self.array.state().read(self.index, at.0, buf);
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
        let effect = self.array.count(self.index, Request::Flush, 0, 0);
        if matches!(effect, Some(Effect::Fail | Effect::Tear { .. })) {
            return Err(failure());
        }
        self.record(Event::Flush);
        Ok(())
    }

    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> io::Result<()> {
        // Reads of what was discarded may give anything: here what no reader takes for its own.
        let (first, end) = (at.0.div_ceil(BLOCK), at.0.saturating_add(len_bytes) / BLOCK);
        let stored = self.image().stored_blocks(first..end.max(first));
        // Neighbours go together, as the device was asked.
        for run in stored.chunk_by(|one, next| one + 1 == *next) {
            let bytes = Arc::from(vec![0xd5; run.len() * BLOCK_BYTES]);
            self.record(Event::Write { at: run[0] * BLOCK, bytes });
        }
        Ok(())
    }

    fn resize(&self, len_bytes: u64) -> io::Result<()> {
        self.record(Event::Resize { len_bytes });
        Ok(())
    }

    fn is_read_only(&self) -> bool {
        false
    }
}
