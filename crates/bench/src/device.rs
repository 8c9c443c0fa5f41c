//! A device that counts what is asked of it: figures that depend on no machine.

use std::io;

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_rt::{Arc, AtomicU64, Ordering};
use ubtrfs_volume::{Device, FileDevice};

/// An image.
#[derive(Debug)]
pub(crate) struct CountingDevice {
    file: FileDevice,
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
}

/// Requests so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Requests {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) flushes: u64,
}

impl CountingDevice {
    pub(crate) fn new(file: FileDevice) -> Arc<Self> {
        let zero = AtomicU64::default;
        Arc::new(Self { file, reads: zero(), writes: zero(), flushes: zero() })
    }

    pub(crate) fn requests(&self) -> Requests {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Requests {
            reads: read(&self.reads),
            writes: read(&self.writes),
            flushes: read(&self.flushes),
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Device for CountingDevice {
    fn name(&self) -> String {
        self.file.name()
    }

    fn len_bytes(&self) -> u64 {
        self.file.len_bytes()
    }

    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        count(&self.reads);
        self.file.read_at(at, buf)
    }

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        count(&self.writes);
        self.file.write_at(at, buf)
    }

    fn write_vectored_at(&self, at: PhysicalAddr, bufs: &[&[u8]]) -> io::Result<()> {
        count(&self.writes);
        self.file.write_vectored_at(at, bufs)
    }

    fn flush(&self) -> io::Result<()> {
        count(&self.flushes);
        self.file.flush()
    }

    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> io::Result<()> {
        self.file.discard(at, len_bytes)
    }

    fn resize(&self, len_bytes: u64) -> io::Result<()> {
        self.file.resize(len_bytes)
    }

    fn is_end_known(&self) -> bool {
        self.file.is_end_known()
    }

    fn is_read_only(&self) -> bool {
        self.file.is_read_only()
    }
}
