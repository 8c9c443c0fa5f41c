//! What a filesystem lies on: something with a length that is read and written by offset.

mod file;
mod mem;

use std::fmt::Debug;
use std::io;

use ubtrfs_ondisk::PhysicalAddr;

pub use file::{FileDevice, OpenMode, Window};
pub use mem::MemDevice;

/// An image, a block device, or what stands in for one. All calls may be made from many threads; reads also from a thread of a rayon pool, where
/// what is joined may do other reads meanwhile: who joins there has nothing locked.
pub trait Device: Send + Sync + Debug {
    /// How messages name it.
    fn name(&self) -> String;

    /// Its length in bytes.
    fn len_bytes(&self) -> u64;

    /// Fills `buf` from `at` on.
    ///
    /// # Errors
    /// The medium's; `UnexpectedEof` when the range goes past the end.
    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()>;

    /// Writes all of `buf` from `at` on. Durable only after [`Device::flush`].
    ///
    /// # Errors
    /// The medium's; `UnexpectedEof` when the range goes past the end.
    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()>;

    /// Writes all of `bufs` one behind the other from `at` on. Durable only after
    /// [`Device::flush`].
    ///
    /// # Errors
    /// As [`Device::write_at`].
    fn write_vectored_at(&self, at: PhysicalAddr, bufs: &[&[u8]]) -> io::Result<()> {
        let mut offset = at.0;
        for buf in bufs {
            self.write_at(PhysicalAddr(offset), buf)?;
            offset += buf.len() as u64;
        }
        Ok(())
    }

    /// Makes durable all that was written before the call.
    ///
    /// # Errors
    /// The medium's; what was written since the last flush may then be lost.
    fn flush(&self) -> io::Result<()>;

    /// Gives the range back to the medium. Best effort; what is read there afterwards may be
    /// anything.
    ///
    /// # Errors
    /// The medium's; that it cannot discard is no error.
    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> io::Result<()>;

    /// Changes the length. What is added reads as zeros.
    ///
    /// # Errors
    /// `Unsupported` where the length is fixed.
    fn resize(&self, len_bytes: u64) -> io::Result<()>;

    /// Whether its length is where the filesystem's room ends. Where not, what lies behind the
    /// filesystem may be somebody else's.
    fn is_end_known(&self) -> bool {
        true
    }

    /// Whether somebody whom no lock keeps out may come to write to what it lies on. Who writes then looks for that now and again.
    fn is_shareable(&self) -> bool {
        false
    }

    /// Refuses where somebody else, whom no lock keeps out, has what it lies on by now. It takes as long as some writes.
    ///
    /// # Errors
    /// `MountedByKernel`.
    fn check_unused(&self) -> crate::Result<()> {
        Ok(())
    }

    /// Lets the kernel hold what it lies on, which goes on to be read and written: for a mount of the kernel's that shows this
    /// filesystem, and keeps others out instead.
    fn yield_claim(&self) {}

    /// Whether writes are refused.
    fn is_read_only(&self) -> bool;
}

/// Refuses a range that goes past the end.
fn check_range(at: PhysicalAddr, len: usize, device_len_bytes: u64) -> io::Result<()> {
    let end = u64::try_from(len).ok().and_then(|len| at.0.checked_add(len));
    if end.is_some_and(|end| end <= device_len_bytes) {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::UnexpectedEof,
        format!("{len} bytes go past the end at {device_len_bytes}"),
    ))
}
