//! What a power cut leaves: a device that records its writes, and the states that a cut at any of
//! them may leave behind.
//!
//! Writes before the last flush have arrived. Of those after it, any 4 KiB may have and any may
//! not, in any order; one 4 KiB block arrives whole or not at all.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_volume::Device;

use crate::Prng;

const BLOCK: u64 = 4096;
const BLOCK_BYTES: usize = 4096;

/// The blocks of a device that were ever written; the others are zeros.
#[derive(Clone, Debug, Default)]
struct Blocks(BTreeMap<u64, Arc<[u8; BLOCK_BYTES]>>);

impl Blocks {
    fn read(&self, at: u64, buffer: &mut [u8]) {
        for_each_block(at, buffer.len(), |block, inside, range| {
            let bytes = &mut buffer[range];
            match self.0.get(&block) {
                Some(stored) => bytes.copy_from_slice(&stored[inside..inside + bytes.len()]),
                None => bytes.fill(0),
            }
        });
    }

    fn write(&mut self, at: u64, bytes: &[u8]) {
        for_each_block(at, bytes.len(), |block, inside, range| {
            let stored = self.0.entry(block).or_insert_with(|| Arc::new([0; BLOCK_BYTES]));
            let bytes = &bytes[range];
            Arc::make_mut(stored)[inside..inside + bytes.len()].copy_from_slice(bytes);
        });
    }
}

/// Calls with each block that a range touches, the offset in the block, and the range in the buffer.
fn for_each_block(at: u64, len: usize, mut body: impl FnMut(u64, usize, std::ops::Range<usize>)) {
    let mut done = 0;
    while done < len {
        let offset = at + u64::try_from(done).expect("a length fits");
        let inside = usize::try_from(offset % BLOCK).expect("less than a block");
        let count = (BLOCK_BYTES - inside).min(len - done);
        body(offset / BLOCK, inside, done..done + count);
        done += count;
    }
}

#[derive(Clone, Debug)]
enum Event {
    Write { at: u64, bytes: Arc<[u8]> },
    Flush,
}

/// A device in memory that records what is written to it, and when it is flushed.
#[derive(Debug)]
pub struct RecordingDevice {
    len_bytes: u64,
    state: Mutex<Recording>,
}

impl RecordingDevice {
    /// An empty one of that length.
    pub fn new(len_bytes: u64) -> Self {
        let recording =
            Recording { len_bytes, base: Blocks::default(), now: Blocks::default(), log: vec![] };
        Self { len_bytes, state: Mutex::new(recording) }
    }

    /// Takes what is there as arrived, and forgets how it came.
    pub fn begin(&self) {
        let mut state = self.state();
        state.base = state.now.clone();
        state.log.clear();
    }

    /// What was recorded since [`Self::begin`].
    pub fn recording(&self) -> Recording {
        self.state().clone()
    }

    fn state(&self) -> MutexGuard<'_, Recording> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for RecordingDevice {
    fn name(&self) -> String {
        "recorded".to_owned()
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        check_range(at, buf.len(), self.len_bytes)?;
        self.state().now.read(at.0, buf);
        Ok(())
    }

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        check_range(at, buf.len(), self.len_bytes)?;
        let mut state = self.state();
        state.now.write(at.0, buf);
        state.log.push(Event::Write { at: at.0, bytes: buf.into() });
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.state().log.push(Event::Flush);
        Ok(())
    }

    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> io::Result<()> {
        // Reads of what was discarded may give anything: here what no reader takes for its own.
        let (first, end) = (at.0.div_ceil(BLOCK), at.0.saturating_add(len_bytes) / BLOCK);
        let stored: Vec<u64> =
            self.state().now.0.range(first..end.max(first)).map(|b| *b.0).collect();
        for block in stored {
            self.write_at(PhysicalAddr(block * BLOCK), &[0xd5; BLOCK_BYTES])?;
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

/// Writes and flushes in their order, and what was there before them.
#[derive(Clone, Debug)]
pub struct Recording {
    len_bytes: u64,
    base: Blocks,
    now: Blocks,
    log: Vec<Event>,
}

impl Recording {
    /// How many writes and flushes there were: a cut may come before the first, and after each.
    pub fn event_count(&self) -> usize {
        self.log.len()
    }

    /// How many flushes there were.
    pub fn flush_count(&self) -> usize {
        self.log.iter().filter(|event| matches!(event, Event::Flush)).count()
    }

    /// The state when the first `events` arrived, and no more.
    ///
    /// # Panics
    /// If there were not as many.
    pub fn cut_after(&self, events: usize) -> CutDevice {
        let mut blocks = self.base.clone();
        for event in &self.log[..events] {
            if let Event::Write { at, bytes } = event {
                blocks.write(*at, bytes);
            }
        }
        CutDevice { len_bytes: self.len_bytes, blocks: Mutex::new(blocks) }
    }

    /// A state when the power went after `events`: what came before the last flush arrived, and of
    /// what came after it a part that chance chooses.
    ///
    /// # Panics
    /// If there were not as many.
    pub fn torn_after(&self, events: usize, prng: &mut Prng) -> CutDevice {
        let before = &self.log[..events];
        let durable =
            before.iter().rposition(|event| matches!(event, Event::Flush)).map_or(0, |at| at + 1);
        let cut = self.cut_after(durable);
        let mut blocks = cut.blocks.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut pieces = Vec::new();
        for event in &before[durable..] {
            let Event::Write { at, bytes } = event else { continue };
            for_each_block(*at, bytes.len(), |block, inside, range| {
                let offset = block * BLOCK + u64::try_from(inside).expect("less than a block");
                pieces.push((offset, &bytes[range]));
            });
        }
        // Some cuts lose almost nothing, some almost all.
        let chance = prng.below(101);
        for (at, bytes) in pieces {
            if prng.chance(chance, 100) {
                blocks.write(at, bytes);
            }
        }
        CutDevice { len_bytes: self.len_bytes, blocks: Mutex::new(blocks) }
    }
}

/// The device as the power comes back.
#[derive(Debug)]
pub struct CutDevice {
    len_bytes: u64,
    blocks: Mutex<Blocks>,
}

impl CutDevice {
    /// Writes it out as a sparse image file, for judges that read files.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write_image(&self, image: &Path) {
        let file = File::create(image).expect("the image can be created");
        file.set_len(self.len_bytes).expect("the image can be that long");
        for (block, bytes) in &self.blocks().0 {
            file.write_all_at(&bytes[..], block * BLOCK).expect("the image can be written");
        }
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for CutDevice {
    fn name(&self) -> String {
        "cut".to_owned()
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        check_range(at, buf.len(), self.len_bytes)?;
        self.blocks().read(at.0, buf);
        Ok(())
    }

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        check_range(at, buf.len(), self.len_bytes)?;
        self.blocks().write(at.0, buf);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _at: PhysicalAddr, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn resize(&self, _len_bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn is_read_only(&self) -> bool {
        false
    }
}

fn check_range(at: PhysicalAddr, len: usize, device_len_bytes: u64) -> io::Result<()> {
    let end = u64::try_from(len).ok().and_then(|len| at.0.checked_add(len));
    match end {
        Some(end) if end <= device_len_bytes => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
