//! A device over an image that forgets, when the power goes, some of the blocks that were written since its last flush.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_testkit::Prng;
use ubtrfs_volume::{Device, FileDevice};

/// The blocks that were written since the last flush, as they were before, by where they are.
#[derive(Debug, Default)]
pub struct Unflushed(Mutex<BTreeMap<u64, Vec<u8>>>);

impl Unflushed {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes away, from the image or a copy of it, all of those blocks, none, or each with even chances. Returns how many. All that is
    /// left counts as flushed, unless it is a copy.
    pub fn cut(&self, image: &Path, random: &mut Prng) -> usize {
        let file = std::fs::File::options().write(true).open(image).unwrap();
        let kind = random.below(4);
        let mut count = 0;
        for (at, bytes) in self.lock().iter() {
            let is_lost = match kind {
                0 => false,
                1 => true,
                _ => random.chance(1, 2),
            };
            if is_lost {
                file.write_all_at(bytes, *at).unwrap();
                count += 1;
            }
        }
        count
    }

    /// The image is opened anew, and what it has is durable.
    pub fn forget(&self) {
        self.lock().clear();
    }
}

/// The device.
#[derive(Debug)]
pub struct PoweredDevice {
    inner: FileDevice,
    unflushed: Arc<Unflushed>,
    /// What is written or not as a whole.
    block_bytes: u64,
}

impl PoweredDevice {
    /// One that writes 4096 bytes as a whole, or none of them.
    pub fn new(inner: FileDevice, unflushed: Arc<Unflushed>) -> Self {
        Self::with_blocks(inner, unflushed, 4096)
    }

    /// As [`PoweredDevice::new`], of so many bytes.
    pub fn with_blocks(inner: FileDevice, unflushed: Arc<Unflushed>, block_bytes: u64) -> Self {
        unflushed.forget();
        Self { inner, unflushed, block_bytes }
    }

    fn note(&self, at: PhysicalAddr, len_bytes: u64) -> std::io::Result<()> {
        let first = at.0 / self.block_bytes * self.block_bytes;
        let mut unflushed = self.unflushed.lock();
        for at in (first..at.0 + len_bytes).step_by(self.block_bytes as usize) {
            if let Entry::Vacant(entry) = unflushed.entry(at) {
                let mut bytes = vec![0; self.block_bytes.min(self.inner.len_bytes() - at) as usize];
                self.inner.read_at(PhysicalAddr(at), &mut bytes)?;
                entry.insert(bytes);
            }
        }
        Ok(())
    }
}

impl Device for PoweredDevice {
    ubtrfs_testkit::device_passes_on!(inner: name, len_bytes, read_at, resize, is_read_only);

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> std::io::Result<()> {
        self.write_vectored_at(at, &[buf])
    }
    fn write_vectored_at(&self, at: PhysicalAddr, bufs: &[&[u8]]) -> std::io::Result<()> {
        self.note(at, bufs.iter().map(|buf| buf.len() as u64).sum())?;
        self.inner.write_vectored_at(at, bufs)
    }
    fn flush(&self) -> std::io::Result<()> {
        // What is written beside it may be durable or not: it counts as not, from what it finds here on.
        let flushed = std::mem::take(&mut *self.unflushed.lock());
        let result = self.inner.flush();
        if result.is_err() {
            let mut unflushed = self.unflushed.lock();
            unflushed.extend(flushed);
        }
        result
    }
    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> std::io::Result<()> {
        self.note(at, len_bytes)?;
        self.inner.discard(at, len_bytes)
    }
}
