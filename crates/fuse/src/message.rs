//! Taking requests apart and putting answers together.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::{InHeader, OutHeader, WriteOut};
use crate::notify::Patience;
use crate::owed::Owed;

/// Longest name of an entry; the kernel lets longer ones through.
const NAME_BYTES_MAX: usize = 255;

/// What an operation comes to: an answer, or a number of the system's.
pub(crate) type Result<T = ()> = std::result::Result<T, Errno>;

/// A request, taken apart from its front on.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub(crate) header: InHeader,
    body: &'a [u8],
    /// What follows the body, and may lie elsewhere; no argument is in both.
    rest: &'a [u8],
}

impl<'a> Request<'a> {
    /// One as it was received, header and all; `None` if it is cut off.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, rest) = InHeader::read_from_prefix(bytes).ok()?;
        let len = usize::try_from(header.len).ok()?.checked_sub(size_of::<InHeader>())?;
        Some(Self { header, body: rest.get(..len)?, rest: &[] })
    }

    /// One whose first argument lies apart from the others.
    pub(crate) fn of_parts(header: InHeader, first: &'a [u8], others: &'a [u8]) -> Self {
        let (body, rest) = if first.is_empty() { (others, first) } else { (first, others) };
        Self { header, body, rest }
    }

    fn go_on(&mut self, left: &'a [u8]) {
        self.body = left;
        if left.is_empty() {
            self.body = std::mem::take(&mut self.rest);
        }
    }

    /// What is left of it, in memory of its own.
    pub(crate) fn copied(self) -> CopiedRequest {
        CopiedRequest { header: self.header, body: [self.body, self.rest].concat() }
    }

    /// Takes the next argument off the front.
    pub(crate) fn take<T: FromBytes + KnownLayout + Immutable>(&mut self) -> Result<T> {
        let (value, rest) = T::read_from_prefix(self.body).map_err(|_| Errno::INVAL)?;
        self.go_on(rest);
        Ok(value)
    }

    /// Takes the next name off, which a zero ends.
    pub(crate) fn take_name(&mut self) -> Result<&'a [u8]> {
        let len = self.body.iter().position(|byte| *byte == 0).ok_or(Errno::INVAL)?;
        let (name, rest) = self.body.split_at(len);
        self.go_on(&rest[1..]);
        Ok(name)
    }

    /// As [`Request::take_name`], of an entry of a directory, which can be no longer than btrfs has it.
    pub(crate) fn take_entry_name(&mut self) -> Result<&'a [u8]> {
        let name = self.take_name()?;
        if name.len() > NAME_BYTES_MAX { Err(Errno::NAMETOOLONG) } else { Ok(name) }
    }

    /// Takes so many bytes off.
    pub(crate) fn take_bytes(&mut self, len: u32) -> Result<&'a [u8]> {
        let len = usize::try_from(len).map_err(|_| Errno::INVAL)?;
        let (bytes, rest) = self.body.split_at_checked(len).ok_or(Errno::INVAL)?;
        self.go_on(rest);
        Ok(bytes)
    }
}

/// A request that outlives the memory in which it was received.
pub(crate) struct CopiedRequest {
    header: InHeader,
    body: Vec<u8>,
}

impl CopiedRequest {
    pub(crate) fn as_request(&self) -> Request<'_> {
        Request { header: self.header, body: &self.body, rest: &[] }
    }
}

/// The memory in which a thread puts its answers together, one after the other.
pub struct Answer {
    bytes: Vec<u8>,
    len: usize,
    early: Early,
}

/// Whether an answer can be sent before who puts it together is done.
#[derive(Debug)]
enum Early {
    No,
    Can(Owed),
    Sent,
    /// Its thread is beside those that serve.
    Beside,
}

const HEADER_BYTES: usize = size_of::<OutHeader>();

impl Answer {
    /// For answers of up to so many bytes.
    pub fn with_room(len_max: usize) -> Self {
        Self { bytes: vec![0; HEADER_BYTES + len_max], len: HEADER_BYTES, early: Early::No }
    }

    /// One that a thread puts together which nobody else needs.
    pub(crate) fn beside() -> Self {
        Self { early: Early::Beside, ..Self::with_room(size_of::<WriteOut>()) }
    }

    /// For how long who puts it together may wait for others.
    pub(crate) fn patience(&self) -> Patience {
        if matches!(self.early, Early::Beside) { Patience::Endless } else { Patience::Brief }
    }

    /// Forgets what was put in.
    pub(crate) fn clear(&mut self) {
        self.len = HEADER_BYTES;
    }

    /// It may be sent before it is finished, as what is owed.
    pub(crate) fn allow_early(&mut self, owed: Owed) {
        self.early = Early::Can(owed);
    }

    /// Where another may send it.
    pub(crate) fn owed(&self) -> Option<&Owed> {
        if let Early::Can(owed) = &self.early { Some(owed) } else { None }
    }

    /// A copy to send early, of success with what was put in; `None` where it may not be, or is empty.
    pub(crate) fn early_copy(&self) -> Option<(Owed, Vec<u8>)> {
        let owed = self.owed()?;
        let bytes = self.bytes[..self.len].to_vec();
        let mut copy = Self { bytes, len: self.len, early: Early::No };
        (self.body_len() > 0).then(|| (owed.clone(), copy.finish(owed.unique(), Ok(())).to_vec()))
    }

    /// It was sent, or another will send it: it is not to be sent again.
    pub(crate) fn note_sent(&mut self) {
        self.early = Early::Sent;
    }

    pub(crate) fn is_sent(&self) -> bool {
        matches!(self.early, Early::Sent)
    }

    /// Appends a struct.
    pub(crate) fn put<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.put_bytes(value.as_bytes());
    }

    /// Appends bytes.
    pub(crate) fn put_bytes(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        self.bytes[self.len..end].copy_from_slice(bytes);
        self.len = end;
    }

    /// Lets `fill` put up to `len_max` bytes behind, and say how many.
    pub(crate) fn fill<E>(
        &mut self,
        len_max: usize,
        fill: impl FnOnce(&mut [u8]) -> std::result::Result<usize, E>,
    ) -> std::result::Result<(), E> {
        let end = self.len + len_max;
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        self.len += fill(&mut self.bytes[self.len..end])?;
        Ok(())
    }

    /// Bytes put in so far.
    pub(crate) fn body_len(&self) -> usize {
        self.len - HEADER_BYTES
    }

    /// The whole answer to a request: what was put in, or an error.
    pub(crate) fn finish(&mut self, unique: u64, result: Result) -> &[u8] {
        let error = match result {
            Ok(()) => 0,
            Err(errno) => {
                self.clear();
                -errno.raw_os_error()
            }
        };
        self.with_header(unique, error)
    }

    /// As [`Answer::finish`], of what `put` puts in. Where that panics it is an error: who asks would wait for ever, and so would who
    /// unmounts, if it ended the thread.
    pub(crate) fn finish_with(
        &mut self,
        unique: u64,
        put: impl FnOnce(&mut Self) -> Result,
    ) -> &[u8] {
        self.clear();
        let result = catch_unwind(AssertUnwindSafe(|| put(self))).unwrap_or(Err(Errno::IO));
        self.finish(unique, result)
    }

    /// What was put in, as a message that nobody asked for.
    pub(crate) fn finish_notification(&mut self, code: i32) -> &[u8] {
        self.with_header(0, code)
    }

    fn with_header(&mut self, unique: u64, error: i32) -> &[u8] {
        let len = u32::try_from(self.len).expect("an answer is short");
        let header = OutHeader { len, error, unique };
        self.bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        &self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_takes_what_is_there_and_refuses_what_is_cut_off() {
        let mut bytes =
            InHeader { len: 40 + 8 + 5, opcode: 9, ..InHeader::default() }.as_bytes().to_vec();
        bytes.extend([1, 0, 0, 0, 2, 0, 0, 0]);
        bytes.extend(b"ab\0cd");
        let mut request = Request::parse(&bytes).unwrap();
        assert_eq!(request.take::<[u32; 2]>().unwrap(), [1, 2]);
        assert_eq!(request.take_name().unwrap(), b"ab");
        assert_eq!(request.take_name(), Err(Errno::INVAL));
        assert_eq!(request.take_bytes(3), Err(Errno::INVAL));
        assert_eq!(request.take_bytes(2).unwrap(), b"cd");
        assert!(Request::parse(&bytes[..52]).is_none());
        assert!(Request::parse(&bytes[..39]).is_none());
        bytes[0] = 39;
        assert!(Request::parse(&bytes).is_none());
    }

    /// A panic ended the thread, and who asked waited for ever.
    #[test]
    fn request_whose_answer_panics_is_answered() {
        let mut answer = Answer::with_room(0);
        let bytes = answer.finish_with(5, |answer| {
            answer.put(&1_u64);
            panic!("as wanted")
        });
        let error = (-5_i32).to_ne_bytes();
        assert_eq!(bytes, [&[16, 0, 0, 0][..], &error, &5_u64.to_ne_bytes()].concat());
    }

    #[test]
    fn answer_holds_what_was_put_or_only_the_error() {
        let mut answer = Answer::with_room(4);
        answer.put(&7_u64);
        answer
            .fill(3, |bytes| {
                bytes[0] = 9;
                Ok::<usize, ()>(1)
            })
            .unwrap();
        assert_eq!(answer.body_len(), 9);
        let bytes = answer.finish(5, Ok(())).to_vec();
        assert_eq!(bytes.len(), 25);
        assert_eq!((bytes[0], bytes[8], bytes[16], bytes[24]), (25, 5, 7, 9));
        let bytes = answer.finish(6, Err(Errno::NOENT));
        assert_eq!((bytes.len(), bytes[0]), (16, 16));
        assert_eq!(i32::from_ne_bytes(bytes[4..8].try_into().unwrap()), -2);
    }
}
