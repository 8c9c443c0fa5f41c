//! What the kernel has in memory behind the end of a file.
//!
//! A program may store to a map of a file behind its end, up to where the page ends. Nobody sees that while the file ends before it, and it
//! has to read as zeros once the file grows. The kernel leaves that to a server (seen in Linux 6.18): so zeros are put into its memory when
//! the file has grown, before it is answered. Not with `-o writeback`, where files grow without the server.
//!
//! 1. What grew is known by the engine: the kernel takes what is put there for part of the file, so of a change that was refused nothing
//!    is. Until it is answered the kernel takes no size from elsewhere.
//! 2. Only a page is put zeros into whose contents the kernel may know: one that was read, or cut off ([`Nodes::cached_bytes`]). Any other
//!    it reads before it shows it.
//! 3. What is written past the kernel's memory (`O_DIRECT`) may come in several requests, and if one fails the kernel cuts the file off where
//!    it believes it to end, whatever became of the others: so that belief stays, and the kernel forgets the page before. It writes it for that, for which a
//!    truncation would wait for itself; so it is not done elsewhere. Who writes so is done beside those that serve (`handed`), which are to take that page.
//! 4. The kernel may hold the page: for a request for it, which another thread answers; or, where it does not know what is in it, for the very write that
//!    makes the file longer, until that is answered. So it is waited for a while. Who puts zeros there later may do so over what others have written by
//!    then; so he has the kernel forget the page, and what is appended until then goes to where the file ends ([`Ends::note_late`]). The
//!    thread of a write waits itself where none does so already, and its answer is sent by another ([`Overdue`]). Not where it may not be
//!    answered before it is durable (`-o sync`, `chattr +S`), nor where requests come by rings, which take answers from nobody else: there,
//!    and for any other change, another thread waits ([`Beside`]).
//!
//! [`Nodes::cached_bytes`]: crate::nodes::Nodes::cached_bytes
//! [`Ends::note_late`]: crate::ends::Ends::note_late
//! [`Overdue`]: crate::overdue::Overdue
//! [`Beside`]: crate::beside::Beside

use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::OFlags;
use ubtrfs_engine::InodeId;
use ubtrfs_rt::Arc;

use crate::abi::{self, NotifyInvalInode, NotifyStore, fattr, opcode};
use crate::ends::MovedEnd;
use crate::files::UsedFile;
use crate::message::{Answer, Request};
use crate::server::{Server, Syncs};
use crate::transport::Transport;

/// For so long who made a file grow waits for the kernel, which may have to read the page first.
const PATIENCE: Duration = Duration::from_secs(1);
/// Likewise where it may hold the page for him: then it has nothing old.
const PATIENCE_OF_HOLDER: Duration = Duration::from_millis(20);

/// How a file is about to grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Growth {
    /// There it may have data, or end.
    pub(crate) from: u64,
    pub(crate) by: By,
}

/// What a file grows by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum By {
    /// A write through the kernel's memory that ends here. For what lies in one page the kernel may hold that page.
    Cached(u64),
    /// A write past it.
    Direct,
    /// Anything else.
    Change,
}

/// What lies behind the end of a file in its last page, as far as it may become part of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Tail {
    node: u64,
    end: u64,
    stop: u64,
    by: By,
}

impl Tail {
    fn patience(&self) -> Duration {
        let page_end = self.end.next_multiple_of(page_bytes());
        if matches!(self.by, By::Cached(to) if to <= page_end) {
            PATIENCE_OF_HOLDER
        } else {
            PATIENCE
        }
    }
}

fn page_bytes() -> u64 {
    u64::try_from(rustix::param::page_size()).unwrap_or(4096)
}

/// The bytes behind `end` in its page that come before `from`.
fn behind(end: u64, from: u64, page_bytes: u64) -> Option<std::ops::Range<u64>> {
    let stop = end.checked_next_multiple_of(page_bytes)?.min(from);
    (stop > end).then_some(end..stop)
}

impl Server {
    /// The kernel is about to know what the pages of a file hold that begin before `end`.
    pub(crate) fn note_cached(&self, id: InodeId, end: u64) {
        let end = end.checked_next_multiple_of(page_bytes()).unwrap_or(u64::MAX);
        self.nodes.note_cached(id, end);
    }

    /// Changes a file, which may grow by that; then nothing old is in the kernel's memory of what has become part of it. The answer to a
    /// write is put together by `change`, as it may be sent before this returns.
    pub(crate) fn growing<T>(
        &self,
        id: InodeId,
        file: &UsedFile,
        growth: Option<Growth>,
        answer: &mut Answer,
        change: impl FnOnce(&mut Answer) -> T,
    ) -> T {
        let Some(tail) = growth.and_then(|growth| self.tail(id, file, growth)) else {
            return change(answer);
        };
        if tail.by == By::Direct {
            let message = forgotten(tail.node, tail.end, tail.stop - tail.end);
            self.notify_in(answer.patience(), abi::NOTIFY_INVAL_INODE, message);
            return change(answer);
        }
        let result = change(answer);
        self.clear_tail(id, file, tail, answer);
        result
    }

    fn tail(&self, id: InodeId, file: &UsedFile, growth: Growth) -> Option<Tail> {
        if growth.from == 0 || self.options.writeback {
            return None;
        }
        // Of most files it has nothing, and they need not be looked at.
        let (node, cached_bytes) = self.nodes.cached_bytes(id).filter(|(_, bytes)| *bytes > 0)?;
        let end = file.data.inode().ok()?.size_bytes;
        let behind = behind(end, growth.from, page_bytes()).filter(|_| end < cached_bytes)?;
        Some(Tail { node, end, stop: behind.end, by: growth.by })
    }

    /// Whether the answer may have to wait for the kernel, and so for the answers to other requests.
    pub(crate) fn waits_for_kernel(&self, mut request: Request<'_>) -> bool {
        if request.header.opcode == opcode::LSEEK {
            return self.seek_waits(request);
        }
        let from = match request.header.opcode {
            opcode::WRITE => request.take::<abi::WriteIn>().ok().map(|wanted| wanted.offset),
            opcode::SETATTR => request
                .take::<abi::SetattrIn>()
                .ok()
                .filter(|new| new.valid & fattr::SIZE != 0)
                .map(|new| new.size),
            _ => None,
        };
        let (Some(from), Some(id)) = (from, self.nodes.inode(request.header.node)) else {
            return false;
        };
        let file = self.files.find(id);
        file.is_some_and(|file| self.tail(id, &file, Growth { from, by: By::Change }).is_some())
    }

    /// Whether a write past the kernel's memory waits until it has written what it holds of the last page.
    pub(crate) fn direct_write_waits(&self, id: InodeId, mut request: Request<'_>) -> bool {
        let wanted = request.take::<abi::WriteIn>().ok();
        let wanted = wanted.filter(|wanted| wanted.flags & OFlags::DIRECT.bits() != 0);
        wanted.zip(self.files.find(id)).is_some_and(|(wanted, file)| {
            self.tail(id, &file, Growth { from: wanted.offset, by: By::Direct }).is_some()
        })
    }

    /// The file was changed, or not.
    fn clear_tail(&self, id: InodeId, file: &UsedFile, tail: Tail, answer: &mut Answer) {
        let (Ok(inode), Some(transport)) = (file.data.inode(), self.transport().cloned()) else {
            return;
        };
        let Tail { node, end, .. } = tail;
        let stop = tail.stop.min(inode.size_bytes);
        let Some(len_bytes) = stop.checked_sub(end).filter(|len| *len > 0) else { return };
        let (Ok(len), Ok(size)) = (usize::try_from(len_bytes), u32::try_from(len_bytes)) else {
            return;
        };
        let mut zeros = Answer::with_room(size_of::<NotifyStore>() + len);
        zeros.put(&NotifyStore { node, offset: end, size, padding: 0 });
        zeros.put_bytes(&vec![0; len]);
        let moved = MovedEnd { known_bytes: stop, true_bytes: inode.size_bytes };
        let forgotten = forgotten(node, end, len_bytes);
        // What is to be made durable before it is answered is not by now.
        let early = answer.early_copy().filter(|_| self.syncs_of(id) != Syncs::All);
        if let (By::Cached(_), Some((owed, early)), true) = (tail.by, early, self.has_helpers()) {
            let ends = Arc::clone(&self.ends);
            let waiting = self.overdue.begin(tail.patience(), move || {
                ends.note_late(id, moved);
                owed.send(&early);
            });
            if let Some(waiting) = waiting {
                if waiting.is_overdue() {
                    // Others may have written there by now, to a map: better what is old than to lose that.
                    answer.note_sent();
                    return;
                }
                // One that it does not know has nothing old.
                let _ = transport.send(zeros.finish_notification(abi::NOTIFY_STORE));
                if waiting.is_over() {
                    answer.note_sent();
                    forget(&*transport, forgotten);
                }
                return;
            }
        }
        let (has_begun, begun) = mpsc::channel();
        let (is_done, done) = mpsc::channel();
        let is_begun = {
            // Whoever the kernel waits for before it takes them is to be answered meanwhile.
            self.beside.run(move || {
                let _ = has_begun.send(());
                // One that it does not know has nothing old.
                let _ = transport.send(zeros.finish_notification(abi::NOTIFY_STORE));
                if is_done.send(()).is_err() {
                    // Nobody has waited: the request was answered before.
                    forget(&*transport, forgotten);
                }
            })
        };
        // A thread that there is begins, and nobody keeps it from that. Where there is none, what is old stays.
        let is_begun = is_begun.is_ok() && begun.recv().is_ok();
        if is_begun && done.recv_timeout(tail.patience()).is_err() {
            self.ends.note_late(id, moved);
        }
    }
}

fn forget(transport: &dyn Transport, mut message: Answer) {
    // It may have done so.
    let _ = transport.send(message.finish_notification(abi::NOTIFY_INVAL_INODE));
}

/// That the kernel is to forget a part of a file.
pub(crate) fn forgotten(node: u64, offset: u64, len_bytes: u64) -> Answer {
    let mut message = Answer::with_room(size_of::<NotifyInvalInode>());
    let [offset, len] = [offset, len_bytes].map(|bytes| i64::try_from(bytes).unwrap_or(0));
    message.put(&NotifyInvalInode { node, offset, len });
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_goes_from_the_end_to_what_is_new_within_the_page() {
        assert_eq!(behind(1000, 5000, 4096), Some(1000..4096));
        assert_eq!(behind(1000, 1010, 4096), Some(1000..1010));
        assert_eq!(behind(5000, 8192, 4096), Some(5000..8192));
        for (end, from) in [(1000, 1000), (1000, 999), (4096, 9000), (0, 9000), (u64::MAX, 0)] {
            assert_eq!(behind(end, from, 4096), None, "{end} {from}");
        }
    }
}
