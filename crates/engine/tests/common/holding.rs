//! A device that may hold up what is written to it, and read it otherwise.

use std::fmt::{Debug, Formatter};
use std::io;

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_volume::Device;

type Read<D> = dyn Fn(&D, PhysicalAddr, &mut [u8]) -> io::Result<()> + Send + Sync;

/// Each write first waits as long as `wait` does.
pub struct Holding<D> {
    inner: D,
    wait: Box<dyn Fn() + Send + Sync>,
    read: Box<Read<D>>,
}

impl<D: Device + 'static> Holding<D> {
    pub fn new(inner: D, wait: impl Fn() + Send + Sync + 'static) -> Self {
        Self { inner, wait: Box::new(wait), read: Box::new(D::read_at) }
    }

    /// What is written is not held up, and each read is by `read`.
    pub fn read_by(
        inner: D,
        read: impl Fn(&D, PhysicalAddr, &mut [u8]) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self { read: Box::new(read), ..Self::new(inner, || ()) }
    }
}

impl<D: Debug> Debug for Holding<D> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Holding").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<D: Device> Device for Holding<D> {
    ubtrfs_testkit::device_passes_on!(inner: name, len_bytes, flush, discard, resize, is_read_only);

    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        (self.read)(&self.inner, at, buf)
    }
    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        (self.wait)();
        self.inner.write_at(at, buf)
    }
}
