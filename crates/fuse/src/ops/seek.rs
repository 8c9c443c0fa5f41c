//! Finding data and holes.
//!
//! What a program stores to a map over a hole only the kernel has, until it writes its dirty pages, and it does not do so before it asks. So it is
//! told to forget what it may have over a hole before that is told to be one: it writes that first.
//!
//! 1. Only pages are asked for that the kernel may have read ([`Nodes::cached_bytes`]): none is stored to before.
//! 2. The kernel holds the inode's lock meanwhile, and no page. It waits for those who hold one, and for what it writes, which other threads of this server
//!    answer. So no thread that answers requests waits for it: one beside does, and sends the answer. Only rings take answers from
//!    nobody else; there the request waits in their pool, and not for long: what nobody knows may be data.
//!
//! [`Nodes::cached_bytes`]: crate::nodes::Nodes::cached_bytes

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

use rustix::io::Errno;
use ubtrfs_engine::{DataFile, Error, InodeId};
use ubtrfs_iomap::FileOffset;
use ubtrfs_rt::Arc;

use crate::abi;
use crate::errno::errno;
use crate::files::UsedFile;
use crate::message::{Answer, Request, Result};
use crate::server::{Server, offset};
use crate::tail::forgotten;
use crate::transport::Transport;

const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// For so long a request that comes by a ring waits for the kernel.
const PATIENCE: Duration = Duration::from_secs(1);

/// What is looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sought {
    Data,
    Hole,
}

/// From where what is looked for.
#[derive(Clone, Copy, Debug)]
struct Seek {
    sought: Sought,
    at: FileOffset,
}

/// A part of a file that is a hole as far as is known here.
struct Hole {
    begin: FileOffset,
    end: FileOffset,
}

impl Seek {
    fn ask(self, data: &DataFile) -> ubtrfs_engine::Result<FileOffset> {
        match self.sought {
            Sought::Data => data.seek_data(self.at),
            Sought::Hole => data.seek_hole(self.at),
        }
    }

    /// The hole that an answer tells of.
    fn hole_in(
        self,
        data: &DataFile,
        found: &ubtrfs_engine::Result<FileOffset>,
    ) -> ubtrfs_engine::Result<Option<Hole>> {
        let begin = match (self.sought, found) {
            (Sought::Hole, Ok(begin)) => *begin,
            (Sought::Data, Ok(_)) => self.at,
            (_, Err(error)) if is_no_data(error) => self.at,
            (_, Err(_)) => return Ok(None),
        };
        let end = match data.seek_data(begin) {
            Err(error) if is_no_data(&error) => FileOffset::new(data.inode()?.size_bytes),
            end => end?,
        };
        Ok((begin < end).then_some(Hole { begin, end }))
    }

    /// What is true where all may be data.
    fn if_data(self, data: &DataFile) -> ubtrfs_engine::Result<FileOffset> {
        match self.sought {
            Sought::Data => Ok(self.at),
            Sought::Hole => Ok(FileOffset::new(data.inode()?.size_bytes)),
        }
    }
}

fn is_no_data(error: &Error) -> bool {
    matches!(error, Error::File(ubtrfs_iomap::Error::NoData { .. }))
}

/// A search that has to wait for the kernel.
struct Waiting {
    seek: Seek,
    file: Arc<UsedFile>,
    transport: Arc<dyn Transport>,
    node: u64,
    /// Behind it the kernel has nothing.
    cached_to: FileOffset,
}

impl Waiting {
    fn finish(&self) -> ubtrfs_engine::Result<FileOffset> {
        let data = &self.file.data;
        let mut brought_to = self.seek.at;
        // Each round looks behind the one before: that was stored to from end to end, and the next hole is what is looked for.
        loop {
            let found = self.seek.ask(data);
            let hole = self.seek.hole_in(data, &found)?;
            let Some(Hole { begin, end }) =
                hole.filter(|hole| hole.begin >= brought_to && hole.begin < self.cached_to)
            else {
                return found;
            };
            let end = end.min(self.cached_to);
            let mut message = forgotten(self.node, begin.bytes(), end.bytes_since(begin));
            // One that it does not know has nothing.
            let _ = self.transport.send(message.finish_notification(abi::NOTIFY_INVAL_INODE));
            brought_to = end;
        }
    }

    /// As [`Waiting::finish`]; a panic is an error, as who asks would wait for ever.
    fn finished(&self) -> Result<FileOffset> {
        let found = catch_unwind(AssertUnwindSafe(|| self.finish()));
        found.map_or(Err(Errno::IO), |found| found.map_err(|error| errno(&error)))
    }
}

impl Server {
    pub(crate) fn lseek(
        &self,
        id: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let wanted: abi::LseekIn = request.take()?;
        let (file, at) = (self.file(id)?, offset(from(&wanted))?);
        let sought = match wanted.whence {
            SEEK_DATA => Sought::Data,
            SEEK_HOLE => Sought::Hole,
            _ => return Err(Errno::INVAL),
        };
        let seek = Seek { sought, at };
        let found = seek.ask(&file.data);
        let waiting = self.waiting(id, file, seek, &found).map_err(|error| errno(&error))?;
        let found = match waiting {
            None => found.map_err(|error| errno(&error)),
            Some(waiting) => match self.found_later(waiting, answer) {
                None => return Ok(()),
                Some(found) => found,
            },
        };
        put_found(found?, answer);
        Ok(())
    }

    /// What is found may not be so: the kernel may have something there.
    fn waiting(
        &self,
        id: InodeId,
        file: Arc<UsedFile>,
        seek: Seek,
        found: &ubtrfs_engine::Result<FileOffset>,
    ) -> ubtrfs_engine::Result<Option<Waiting>> {
        let cached = self.nodes.cached_bytes(id).filter(|(_, bytes)| *bytes > seek.at.bytes());
        let Some(((node, cached_bytes), transport)) = cached.zip(self.transport()) else {
            return Ok(None);
        };
        let cached_to = FileOffset::new(cached_bytes);
        let hole = seek.hole_in(&file.data, found)?.filter(|hole| hole.begin < cached_to);
        let transport = Arc::clone(transport);
        Ok(hole.map(|_| Waiting { seek, file, transport, node, cached_to }))
    }

    /// `None` where another thread sends the answer.
    fn found_later(&self, waiting: Waiting, answer: &mut Answer) -> Option<Result<FileOffset>> {
        let (file, seek) = (Arc::clone(&waiting.file), waiting.seek);
        if let Some(owed) = answer.owed().cloned() {
            let begun = self.beside.run(move || {
                let mut answer = Answer::with_room(size_of::<abi::LseekOut>());
                let found = waiting.finished().map(|found| put_found(found, &mut answer));
                owed.send(answer.finish(owed.unique(), found));
            });
            if begun.is_ok() {
                answer.note_sent();
                return None;
            }
        } else {
            let (is_found, found) = mpsc::channel();
            let begun = self.beside.run(move || {
                let _ = is_found.send(waiting.finished());
            });
            if begun.is_ok()
                && let Ok(found) = found.recv_timeout(PATIENCE)
            {
                return Some(found);
            }
        }
        Some(seek.if_data(&file.data).map_err(|error| errno(&error)))
    }

    /// Whether a search may wait for the kernel.
    pub(crate) fn seek_waits(&self, mut request: Request<'_>) -> bool {
        let id = self.nodes.inode(request.header.node);
        let cached = id.and_then(|id| self.nodes.cached_bytes(id));
        let wanted = request.take::<abi::LseekIn>().ok();
        cached.zip(wanted).is_some_and(|((_, bytes), wanted)| bytes > from(&wanted))
    }
}

/// Where the search begins. The kernel hands on what is before the file, and Linux's btrfs then looks from its beginning.
fn from(wanted: &abi::LseekIn) -> u64 {
    let is_before = i64::try_from(wanted.offset).is_err();
    if is_before { 0 } else { wanted.offset }
}

fn put_found(found: FileOffset, answer: &mut Answer) {
    answer.put(&abi::LseekOut { offset: found.bytes() });
}
