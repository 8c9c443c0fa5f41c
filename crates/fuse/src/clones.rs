//! Further descriptors of a connection by `/dev/fuse`: each has a queue of its own for the requests that were read by it and are not
//! answered yet. Those that nobody has read are in one queue for all.
//!
//! Source: `FUSE_DEV_IOC_CLONE` in `linux/fuse.h`, from Linux 4.2 on.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

use crate::mount::open_fuse;

const CLONE: Opcode = opcode::read::<u32>(229, 0);

/// Opens the device anew, as another descriptor of a connection that is mounted. Reading it does not wait.
///
/// # Errors
/// The system's: of opening it, which this process may not be allowed even where it was handed the first, and of having it be the same connection.
pub(crate) fn clone_of(device: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let clone = open_fuse()?;
    let number = u32::try_from(device.as_raw_fd()).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel reads four bytes, the number of a descriptor that is open until this returns, and writes nothing.
    unsafe { ioctl(&clone, Setter::<CLONE, u32>::new(number)) }?;
    Ok(clone)
}
