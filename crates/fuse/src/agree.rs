//! What kernel and server can, agreed upon in the first request.

use ubtrfs_rt::Arc;

use crate::abi::{self, init, opcode};
use crate::message::{Answer, Request};
use crate::server::{DATA_BYTES_MAX, ServeError, ServeOptions};
use crate::transport::{Queues, Received, Transport};

/// What kernel and server can, both.
pub(crate) struct Agreed {
    /// The kernel's flags.
    pub(crate) flags: u32,
    /// The minor version of the protocol that the kernel speaks.
    pub(crate) minor: u32,
    /// By which requests come then.
    pub(crate) queues: Option<Arc<dyn Queues>>,
}

/// Answers the first request, in which the kernel says what it can do. `None` where it went away.
///
/// # Errors
/// The transport's; another protocol than this.
pub(crate) fn agree(
    transport: &dyn Transport,
    buffer: &mut [u8],
    options: &ServeOptions,
) -> std::result::Result<Option<Agreed>, ServeError> {
    let len = loop {
        match transport.receive(buffer).map_err(ServeError::Transport)? {
            Received::Request(len) => break len,
            Received::Nothing => transport.wait().map_err(ServeError::Transport)?,
            Received::End => return Ok(None),
        }
    };
    let mut request = Request::parse(&buffer[..len]).ok_or(ServeError::Protocol)?;
    let theirs: abi::InitIn = request.take().map_err(|_| ServeError::Protocol)?;
    if request.header.opcode != opcode::INIT || theirs.major != abi::MAJOR {
        return Err(ServeError::Protocol);
    }
    let more = match theirs.flags & init::EXT {
        0 => abi::InitInExt::default(),
        _ => request.take().map_err(|_| ServeError::Protocol)?,
    };
    let may_use_queues = options.uses_rings && more.flags2 & init::OVER_IO_URING != 0;
    let queues = may_use_queues.then(|| transport.queues()).flatten();
    let flags2 = if queues.is_some() { init::OVER_IO_URING } else { 0 };
    // With access control lists the kernel checks permissions, whatever else it was told.
    let acl = if options.fake_root.is_none() { init::POSIX_ACL } else { 0 };
    let writeback = if options.writeback { init::WRITEBACK_CACHE } else { 0 };
    let savings = init::DO_READDIRPLUS
        | init::READDIRPLUS_AUTO
        | init::MAX_PAGES
        | init::CACHE_SYMLINKS
        | init::HANDLE_KILLPRIV_V2;
    let wanted = acl
        | writeback
        | if options.naive { 0 } else { savings }
        | init::ASYNC_READ
        | init::BIG_WRITES
        | init::DONT_MASK
        | init::HAS_IOCTL_DIR
        // Not ASYNC_DIO: behind a write past its cache for which nobody waits the kernel neither asks for what O_DSYNC promises nor forgets what others read
        // there in the meantime.
        | init::PARALLEL_DIROPS
        | init::SETXATTR_EXT
        | if queues.is_some() { init::EXT } else { 0 };
    // Of the kernel's pages: what a ring has room for is no more than so many.
    let max_pages = (DATA_BYTES_MAX / rustix::param::page_size()).max(1);
    let max_pages = u16::try_from(max_pages).expect("at most 256, of 4096 bytes");
    let ours = abi::InitOut {
        major: abi::MAJOR,
        minor: abi::MINOR,
        max_readahead: theirs.max_readahead,
        flags: theirs.flags & wanted,
        max_background: 64,
        congestion_threshold: 48,
        max_write: u32::try_from(DATA_BYTES_MAX).expect("1 MiB"),
        time_gran: 1,
        max_pages,
        flags2,
        ..abi::InitOut::default()
    };
    let mut answer = Answer::with_room(0);
    answer.put(&ours);
    let answer = answer.finish(request.header.unique, Ok(()));
    transport.send(answer).map_err(ServeError::Transport)?;
    Ok(Some(Agreed { flags: theirs.flags, minor: theirs.minor, queues }))
}
