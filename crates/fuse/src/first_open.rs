//! A file that the server itself opens, so that the kernel is refused OPEN before others open one.
//!
//! Until an OPEN was answered with ENOSYS the kernel sends a RELEASE for each file that CREATE
//! opened, and who only makes files sends no OPEN. So the server has one sent before it says that
//! the mount is there.
//!
//! 1. The file is in no filesystem: its name is random and is found once, its node is no inode's.
//! 2. Nothing that the kernel is told of it may be kept.
//! 3. ENOSYS answers only what all files are refused.
//! 4. It is closed when the mount is said to be there, or [`PATIENCE`] is over.
//!
//! What fails is not told: then the kernel sends what it would have sent otherwise.

use std::sync::mpsc;
use std::time::Duration;

use rustix::io::Errno;
use ubtrfs_rt::{AtomicBool, Identifiers, Mutex, Ordering};

use crate::abi::{self, Attr, AttrOut, EntryOut, ROOT_NODE, opcode};
use crate::message::{Answer, Request, Result};
use crate::transport::Transport;

/// Those of inodes are counted from the root's up.
const NODE: u64 = u64::MAX;
/// A regular file, for its owner to read.
const MODE: u32 = 0o100_400;
/// For so long it may take until the mount is said to be there all the same.
const PATIENCE: Duration = Duration::from_secs(1);

/// The file.
#[derive(Debug, Default)]
pub(crate) struct FirstOpen {
    /// Read without the lock, to skip it where nobody looks for the file.
    is_expected: AtomicBool,
    /// Until it was found.
    name: Mutex<Option<String>>,
}

impl FirstOpen {
    /// Has the kernel open and close it. Other threads are to answer meanwhile.
    pub(crate) fn run(&self, transport: &dyn Transport) {
        let name: String = Identifiers::System.uuid().map(|byte| format!("{byte:02x}")).concat();
        let name = format!(".ubtrfs-{name}");
        let Some(open) = transport.opener(&name) else { return };
        self.expect(Some(name));
        let (is_done, done) = mpsc::channel();
        // Nobody waits for a thread that the kernel keeps: it ends with the connection.
        let begun = std::thread::Builder::new().spawn(move || {
            open();
            let _ = is_done.send(());
        });
        if begun.is_ok() {
            let _ = done.recv_timeout(PATIENCE);
        }
        self.expect(None);
    }

    fn expect(&self, name: Option<String>) {
        let is_expected = name.is_some();
        *self.name.lock() = name;
        self.is_expected.store(is_expected, Ordering::Release);
    }

    /// What is answered of it; `None` where a request is about another.
    pub(crate) fn answer(&self, request: Request<'_>, answer: &mut Answer) -> Option<Result> {
        let header = request.header;
        if header.node == NODE {
            return Some(answer_of(request, answer));
        }
        let is_in_question = header.opcode == opcode::LOOKUP && header.node == ROOT_NODE;
        if !is_in_question || !self.is_expected.load(Ordering::Acquire) {
            return None;
        }
        self.find(request)?;
        answer.put(&EntryOut { node: NODE, attr: attr(&request), ..EntryOut::default() });
        Some(Ok(()))
    }

    /// Whether it is looked for: found once, it is so no more.
    fn find(&self, mut request: Request<'_>) -> Option<String> {
        let looked_for = request.take_name().ok()?;
        self.name.lock().take_if(|name| name.as_bytes() == looked_for)
    }
}

/// What is answered with ENOSYS the kernel asks of no file any more.
fn answer_of(request: Request<'_>, answer: &mut Answer) -> Result {
    match request.header.opcode {
        opcode::OPEN | opcode::FLUSH => Err(Errno::NOSYS),
        // It checks permissions by them.
        opcode::GETATTR => {
            answer.put(&AttrOut { attr: attr(&request), ..AttrOut::default() });
            Ok(())
        }
        opcode::GETXATTR => Err(Errno::NODATA),
        opcode::RELEASE => Ok(()),
        _ => Err(Errno::STALE),
    }
}

/// It belongs to who asks.
fn attr(request: &Request<'_>) -> Attr {
    let abi::InHeader { uid, gid, .. } = request.header;
    Attr { ino: NODE, mode: MODE, nlink: 1, uid, gid, blksize: 4096, ..Attr::default() }
}
