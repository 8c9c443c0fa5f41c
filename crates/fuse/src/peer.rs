//! Who is at the other end of a socket.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use rustix::process::{Pid, Uid};

/// Who has connected, or listens where was connected to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Peer {
    /// His user.
    pub(crate) uid: Uid,
    /// His process, unless it lies outside of what processes this one sees.
    pub(crate) pid: Option<Pid>,
}

impl Peer {
    /// Of a stream of this machine.
    ///
    /// Source: SO_PEERCRED, unix(7). The number of a process that is not seen is 0, pid_namespaces(7), for which rustix's type has no place.
    pub(crate) fn of(stream: &UnixStream) -> io::Result<Self> {
        let mut about = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len_bytes = libc::socklen_t::try_from(size_of_val(&about)).expect("a few bytes");
        // SAFETY: the system writes no more than `len_bytes` to `about`, of three numbers that may have any value, and what it wrote
        // to `len_bytes`; both live longer than the call.
        let result = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut about).cast(),
                &raw mut len_bytes,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { uid: Uid::from_raw(about.uid), pid: Pid::from_raw(about.pid) })
    }
}
