//! A device in memory.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_rt::{AtomicBool, AtomicU64, Ordering, RwLock};

use super::{Device, check_range};

const PAGE_BYTES: usize = 64 * 1024;

/// A sparse device in memory, for tests: pages that were never written read as zeros.
#[derive(Debug)]
pub struct MemDevice {
    name: String,
    len_bytes: AtomicU64,
    read_only: AtomicBool,
    pages: RwLock<BTreeMap<u64, Box<[u8]>>>,
}

impl MemDevice {
    /// An empty one of that length.
    pub fn new(len_bytes: u64) -> Self {
        Self::named("memory", len_bytes)
    }

    /// An empty one with a name for messages.
    pub fn named(name: impl Into<String>, len_bytes: u64) -> Self {
        Self {
            name: name.into(),
            len_bytes: AtomicU64::new(len_bytes),
            read_only: AtomicBool::new(false),
            pages: RwLock::default(),
        }
    }

    /// One that holds `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let device = Self::new(bytes.len() as u64);
        device.write_at(PhysicalAddr(0), bytes).expect("the range is the device's length");
        device
    }

    /// Refuses writes from now on, or takes them again.
    pub fn set_read_only(&self, read_only: bool) {
        self.read_only.store(read_only, Ordering::Relaxed);
    }

    /// Bytes of memory that its content takes.
    pub fn resident_bytes(&self) -> u64 {
        (self.pages.read().len() * PAGE_BYTES) as u64
    }

    fn check_writable(&self) -> io::Result<()> {
        if self.is_read_only() {
            return Err(io::Error::from(io::ErrorKind::ReadOnlyFilesystem));
        }
        Ok(())
    }
}

/// The pages that `[at, at + len)` touches: the page, the range in it, the range in the buffer.
fn pages(at: u64, len: usize) -> impl Iterator<Item = (u64, Range<usize>, Range<usize>)> {
    let page_bytes = PAGE_BYTES as u64;
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let offset = at + done as u64;
        let start = usize::try_from(offset % page_bytes).expect("less than a page");
        let count = (PAGE_BYTES - start).min(len - done);
        let buffer = done..done + count;
        done += count;
        Some((offset / page_bytes, start..start + count, buffer))
    })
}

impl Device for MemDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Acquire)
    }

    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        check_range(at, buf.len(), self.len_bytes())?;
        let stored = self.pages.read();
        for (page, range, buffer) in pages(at.0, buf.len()) {
            match stored.get(&page) {
                Some(bytes) => buf[buffer].copy_from_slice(&bytes[range]),
                None => buf[buffer].fill(0),
            }
        }
        Ok(())
    }

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        self.check_writable()?;
        check_range(at, buf.len(), self.len_bytes())?;
        let mut stored = self.pages.write();
        for (page, range, buffer) in pages(at.0, buf.len()) {
            let bytes =
                stored.entry(page).or_insert_with(|| vec![0; PAGE_BYTES].into_boxed_slice());
            bytes[range].copy_from_slice(&buf[buffer]);
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> io::Result<()> {
        self.check_writable()?;
        let page_bytes = PAGE_BYTES as u64;
        let end = at.0.saturating_add(len_bytes).min(self.len_bytes());
        let whole = at.0.div_ceil(page_bytes)..end / page_bytes;
        if whole.start < whole.end {
            self.pages.write().retain(|page, _| !whole.contains(page));
        }
        Ok(())
    }

    fn resize(&self, len_bytes: u64) -> io::Result<()> {
        self.check_writable()?;
        let mut stored = self.pages.write();
        stored.retain(|page, _| page * (PAGE_BYTES as u64) < len_bytes);
        // What grows back must read as zeros.
        let tail = usize::try_from(len_bytes % PAGE_BYTES as u64).expect("less than a page");
        if tail > 0
            && let Some(bytes) = stored.get_mut(&(len_bytes / PAGE_BYTES as u64))
        {
            bytes[tail..].fill(0);
        }
        self.len_bytes.store(len_bytes, Ordering::Release);
        Ok(())
    }

    fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Relaxed)
    }
}
