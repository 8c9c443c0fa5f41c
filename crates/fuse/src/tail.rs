//! What the kernel has in memory behind the end of a file.
//!
//! A program may store to a map of a file behind its end, up to where the page ends. Nobody sees that while the file ends before it, and it
//! has to read as zeros once the file grows. The kernel leaves that to a server (seen in Linux 6.18): so zeros are put into its memory
//! before it hears that the file has grown. Not with `-o writeback`, where files grow without the server.

use std::sync::mpsc;
use std::time::Duration;

use ubtrfs_engine::InodeId;
use ubtrfs_rt::{Arc, AtomicBool, Ordering};

use crate::abi::{self, NotifyStore};
use crate::files::UsedFile;
use crate::message::Answer;
use crate::server::Server;

/// For so long who makes a file grow waits for the kernel, which may have to read the page first.
const PATIENCE: Duration = Duration::from_secs(1);
/// Likewise where he writes to that page himself. The kernel holds it for him as long as it has not been read: then it has nothing old, and
/// would keep the zeros waiting for his answer.
const PATIENCE_OF_PAGE: Duration = Duration::from_millis(20);

/// The part of a page behind the end of a file that becomes part of the file, where what is new begins at `from`.
fn tail(end: u64, from: u64, page_bytes: u64) -> Option<(u64, usize)> {
    let stop = end.checked_next_multiple_of(page_bytes)?.min(from);
    let len = stop.checked_sub(end).filter(|len| *len > 0)?;
    Some((end, usize::try_from(len).ok()?))
}

impl Server {
    /// A file is about to have data at `from`, or to end there, where that may be behind its end.
    pub(crate) fn clear_tail(&self, id: InodeId, file: &UsedFile, from: u64) {
        if from == 0 || self.options.writeback || !file.may_be_cached() {
            return;
        }
        let Ok(inode) = file.data.inode() else { return };
        let page_bytes = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
        let Some((end, len)) = tail(inode.size_bytes, from, page_bytes) else { return };
        let (Some(node), Some(transport)) = (self.nodes.number(id), self.transport().cloned())
        else {
            return;
        };
        let mut message = Answer::with_room(size_of::<NotifyStore>() + len);
        let size = u32::try_from(len).unwrap_or(0);
        message.put(&NotifyStore { node, offset: end, size, padding: 0 });
        message.put_bytes(&vec![0; len]);
        let is_decided = Arc::new(AtomicBool::new(false));
        let (is_done, done) = mpsc::channel();
        let begun = {
            let is_decided = Arc::clone(&is_decided);
            // Whoever the kernel waits for before it takes them is to be answered meanwhile.
            std::thread::Builder::new().spawn(move || {
                if !is_decided.swap(true, Ordering::AcqRel) {
                    // One that it does not know has nothing old.
                    let _ = transport.send(message.finish_notification(abi::NOTIFY_STORE));
                }
                let _ = is_done.send(());
            })
        };
        if begun.is_ok() {
            let is_of_page = from < end.next_multiple_of(page_bytes);
            let patience = if is_of_page { PATIENCE_OF_PAGE } else { PATIENCE };
            let _ = done.recv_timeout(patience);
            // Later they would go over what others have written by then.
            is_decided.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_goes_from_the_end_to_what_is_new_within_the_page() {
        assert_eq!(tail(1000, 5000, 4096), Some((1000, 3096)));
        assert_eq!(tail(1000, 1010, 4096), Some((1000, 10)));
        assert_eq!(tail(5000, 8192, 4096), Some((5000, 3192)));
        for (end, from) in [(1000, 1000), (1000, 999), (4096, 9000), (0, 9000), (u64::MAX, 0)] {
            assert_eq!(tail(end, from, 4096), None, "{end} {from}");
        }
    }
}
