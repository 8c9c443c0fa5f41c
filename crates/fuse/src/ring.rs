//! FUSE over io_uring, where root has switched it on (`/sys/module/fuse/parameters/enable_uring`, from Linux 6.14 on): the kernel
//! puts requests into memory that it was given, and takes answers from there; to answer one and wait for the next is one system
//! call, made by a thread on the processor of who asked.
//!
//! - There is a queue for each possible processor, with a thread of its own that is bound to it. Nothing is answered until all
//!   queues are registered.
//! - What may take long ([`Answers::takes_long`]) is done by a pool of threads, so that others of the same processor need not wait for it;
//!   only the queue's own thread hands answers over, woken by an eventfd.
//! - INIT, FORGET, INTERRUPT, and what the kernel is told unasked, go by `/dev/fuse` still.
//!
//! Source: `struct fuse_uring_req_header` and what is around it in `linux/fuse.h`, and the kernel's
//! `Documentation/filesystems/fuse-io-uring.rst`.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode as command, squeue, types};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};
use ubtrfs_rt::{Arc, Condvar, Mutex};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::{InHeader, OutHeader, opcode};
use crate::message::{Answer, Request};
use crate::server::DATA_BYTES_MAX;
use crate::transport::{Answers, Queues};

/// Where root switches it on. From Linux 6.14 on it is there.
pub const RINGS_SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Commands, as the kernel numbers them.
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;
/// Requests of one processor that the kernel may hand over before the first is answered.
const ENTRY_COUNT: usize = 8;
/// Data and, in front of it, what does not fit into a header.
const PAYLOAD_BYTES: usize = DATA_BYTES_MAX + 4096;
/// More queues than this take more memory than they are worth.
const QUEUE_COUNT_MAX: usize = 64;
/// Threads for what takes long, of all queues together.
const POOL_THREADS: usize = 4;
/// What the eventfd's completions are marked with.
const WOKEN: u64 = u64::MAX;
/// Bytes of a header that an operation's first argument may take.
const ARGUMENT_BYTES: usize = 128;

/// Whether the kernel lets requests come by io_uring.
pub fn offers_rings() -> bool {
    std::fs::read_to_string(RINGS_SWITCH).is_ok_and(|switch| switch.trim() == "Y")
}

/// What the kernel and the server tell each other of a request, beside its data.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    /// The request's header, then the answer's.
    in_out: [u8; 128],
    /// The operation's first argument.
    argument: [u8; ARGUMENT_BYTES],
    flags: u64,
    commit_id: u64,
    payload_bytes: u32,
    padding: u32,
    reserved: u64,
}

impl Header {
    const fn zeroed() -> Self {
        Self {
            in_out: [0; 128],
            argument: [0; ARGUMENT_BYTES],
            flags: 0,
            commit_id: 0,
            payload_bytes: 0,
            padding: 0,
            reserved: 0,
        }
    }
}

/// `struct iovec`.
#[repr(C)]
struct Piece {
    start: *mut u8,
    len_bytes: usize,
}

/// Memory for one request at a time. Between a commit and the completion that follows it is the kernel's.
struct Entry {
    header: Box<Header>,
    payload: Vec<u8>,
    pieces: Box<[Piece; 2]>,
}

// SAFETY: the pointers are to memory that the entry owns, and only the kernel is given them.
unsafe impl Send for Entry {}

impl Entry {
    fn new() -> Self {
        let mut header: Box<Header> = Box::new(Header::zeroed());
        let mut payload = vec![0; PAYLOAD_BYTES];
        let pieces = Box::new([
            Piece { start: header.as_mut_bytes().as_mut_ptr(), len_bytes: size_of::<Header>() },
            Piece { start: payload.as_mut_ptr(), len_bytes: payload.len() },
        ]);
        Self { header, payload, pieces }
    }

    fn request(&self) -> Option<Request<'_>> {
        let (header, _) = InHeader::read_from_prefix(&self.header.in_out).ok()?;
        let payload = self.payload.get(..usize::try_from(self.header.payload_bytes).ok()?)?;
        let body_bytes = usize::try_from(header.len).ok()?.checked_sub(size_of::<InHeader>())?;
        let argument_bytes = body_bytes.checked_sub(payload.len())?;
        Some(Request::of_parts(header, self.header.argument.get(..argument_bytes)?, payload))
    }

    /// Has the request that is in it answered in its place.
    fn answer(&mut self, answers: &dyn Answers, answer: &mut Answer) {
        match self.request() {
            Some(request) => {
                self.put_answer(answers.answer_to(request, answer));
            }
            None => self.put_error(0, Errno::INVAL),
        }
    }

    /// Puts an answer, header and all, in the request's place.
    fn put_answer(&mut self, answer: &[u8]) {
        let (header, body) = answer.split_at(size_of::<OutHeader>());
        let Some(payload) = self.payload.get_mut(..body.len()) else {
            // Nothing asks for as much.
            let unique = OutHeader::read_from_bytes(header).map_or(0, |header| header.unique);
            return self.put_error(unique, Errno::IO);
        };
        payload.copy_from_slice(body);
        self.header.in_out[..header.len()].copy_from_slice(header);
        self.header.payload_bytes = u32::try_from(body.len()).expect("no longer than the payload");
    }

    fn put_error(&mut self, unique: u64, errno: Errno) {
        let len = u32::try_from(size_of::<OutHeader>()).expect("16");
        let header = OutHeader { len, error: -errno.raw_os_error(), unique };
        self.header.in_out[..size_of::<OutHeader>()].copy_from_slice(header.as_bytes());
        self.header.payload_bytes = 0;
    }
}

/// Answers on their way from the pool to a queue's thread.
struct Mailbox {
    event: OwnedFd,
    state: Mutex<Mail>,
}

#[derive(Default)]
struct Mail {
    answered: Vec<(usize, Entry)>,
    is_stopped: bool,
}

impl Mailbox {
    fn wake(&self) {
        // It is woken already where that fails for being full.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

/// A request that may take long.
struct Job {
    mailbox: Arc<Mailbox>,
    index: usize,
    entry: Entry,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    is_ended: bool,
}

/// The queues of a mount, and the pool that they share.
pub(crate) struct Rings {
    device: Arc<OwnedFd>,
    mailboxes: Vec<Arc<Mailbox>>,
    jobs: Mutex<Jobs>,
    has_jobs: Condvar,
    failure: Mutex<Option<Errno>>,
}

/// Possible processors, for each of which the kernel wants a queue: as `0-3,8` there.
fn possible_processors(list: &str) -> Option<usize> {
    let mut count = 0_usize;
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

fn new_ring() -> std::io::Result<IoUring<Entry128, cqueue::Entry>> {
    IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(u32::try_from(2 * (ENTRY_COUNT + 1)).expect("few"))
}

impl Rings {
    /// What is needed beside the kernel's offer; `None` where something is missing. Asked before the offer is taken: after that
    /// there is no way back.
    pub(crate) fn prepare(device: Arc<OwnedFd>) -> Option<Arc<Self>> {
        let list = std::fs::read_to_string("/sys/devices/system/cpu/possible").ok()?;
        let count = possible_processors(&list).filter(|count| *count <= QUEUE_COUNT_MAX)?;
        new_ring().ok()?;
        let new_mailbox = |_| {
            let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
            Some(Arc::new(Mailbox { event, state: Mutex::default() }))
        };
        let mailboxes: Option<Vec<_>> = (0..count).map(new_mailbox).collect();
        Some(Arc::new(Self {
            device,
            mailboxes: mailboxes?,
            jobs: Mutex::default(),
            has_jobs: Condvar::new(),
            failure: Mutex::default(),
        }))
    }

    /// Returns the job where the pool has ended.
    fn hand_over(&self, job: Job) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        if jobs.is_ended {
            return Some(job);
        }
        jobs.waiting.push_back(job);
        drop(jobs);
        self.has_jobs.notify_one();
        None
    }
}

impl Queues for Rings {
    fn queue_count(&self) -> usize {
        self.mailboxes.len()
    }

    fn pool_count(&self) -> usize {
        POOL_THREADS.min(2 * self.mailboxes.len())
    }

    fn run_queue(&self, number: usize, answers: &dyn Answers) {
        // One that is not there, or not for us, has its requests answered elsewhere.
        let mut processors = CpuSet::new();
        processors.set(number);
        let _ = sched_setaffinity(None, &processors);
        let served = Queue::new(number, self).and_then(|mut queue| queue.serve(answers));
        if let Err(errno) = served.or_else(|errno| match has_ended(self.device.as_fd()) {
            // Who registers while the filesystem is unmounted is told all kinds of things.
            true => Ok(()),
            false => Err(errno),
        }) {
            self.fail(errno);
        }
    }

    fn run_pool(&self, answers: &dyn Answers) {
        let mut answer = Answer::with_room(DATA_BYTES_MAX);
        loop {
            let mut jobs = self.jobs.lock();
            let mut job = loop {
                match jobs.waiting.pop_front() {
                    Some(job) => break job,
                    None if jobs.is_ended => return,
                    None => self.has_jobs.wait(&mut jobs),
                }
            };
            drop(jobs);
            job.entry.answer(answers, &mut answer);
            job.mailbox.state.lock().answered.push((job.index, job.entry));
            job.mailbox.wake();
        }
    }

    fn end_pool(&self) {
        self.jobs.lock().is_ended = true;
        self.has_jobs.notify_all();
    }

    /// Ends all of them: without one of its queues the kernel answers nobody.
    fn fail(&self, errno: Errno) {
        self.failure.lock().get_or_insert(errno);
        for mailbox in &self.mailboxes {
            mailbox.state.lock().is_stopped = true;
            mailbox.wake();
        }
    }

    fn failure(&self) -> Option<Errno> {
        *self.failure.lock()
    }
}

/// Whether the connection is cut: the filesystem is unmounted.
fn has_ended(device: BorrowedFd<'_>) -> bool {
    let mut device = [PollFd::new(&device, PollFlags::IN)];
    poll(&mut device, Some(&Timespec::default())).is_ok()
        && device[0].revents().contains(PollFlags::ERR)
}

struct Queue<'a> {
    number: u16,
    rings: &'a Rings,
    mailbox: Arc<Mailbox>,
    ring: ManuallyDrop<IoUring<Entry128, cqueue::Entry>>,
    /// Those that are not with the pool.
    entries: ManuallyDrop<Vec<Option<Entry>>>,
    /// Entries that the kernel has not given up.
    registered: usize,
}

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        if self.registered == 0 {
            // SAFETY: nobody uses them after this. The kernel has given up all entries, so that it writes to none.
            unsafe {
                ManuallyDrop::drop(&mut self.ring);
                ManuallyDrop::drop(&mut self.entries);
            }
        }
        // Else the kernel may write to the entries yet: they stay until the process ends, as the mount does.
    }
}

impl<'a> Queue<'a> {
    /// To be made by the thread that serves it.
    fn new(number: usize, rings: &'a Rings) -> Result<Self, Errno> {
        let ring = new_ring().map_err(|error| errno_of(&error))?;
        Ok(Self {
            number: u16::try_from(number).map_err(|_| Errno::INVAL)?,
            rings,
            mailbox: Arc::clone(&rings.mailboxes[number]),
            ring: ManuallyDrop::new(ring),
            entries: ManuallyDrop::new((0..ENTRY_COUNT).map(|_| Some(Entry::new())).collect()),
            registered: 0,
        })
    }

    /// Answers until the kernel has given up all entries, or the queue is stopped.
    fn serve(&mut self, answers: &dyn Answers) -> Result<(), Errno> {
        let mut answer = Answer::with_room(DATA_BYTES_MAX);
        for entry in 0..ENTRY_COUNT {
            self.push_command(REGISTER, entry)?;
            self.registered += 1;
        }
        self.push_wait()?;
        let mut completed = Vec::new();
        loop {
            self.submit(1)?;
            let completions = self.ring.completion();
            completed.extend(completions.map(|entry| (entry.user_data(), entry.result())));
            let mut rest = completed.len();
            for (what, result) in completed.drain(..) {
                rest -= 1;
                if what == WOKEN {
                    if self.take_mail()? {
                        return Ok(());
                    }
                } else if result < 0 {
                    self.registered -= 1;
                    match Errno::from_raw_os_error(-result) {
                        // Unmounted, or the connection was cut.
                        Errno::NOTCONN | Errno::CONNABORTED => {}
                        errno => return Err(errno),
                    }
                } else {
                    let entry = usize::try_from(what).map_err(|_| Errno::INVAL)?;
                    self.answer(entry, rest > 0, answers, &mut answer)?;
                }
                if rest > 0 {
                    // Nobody waits for what is answered after him.
                    self.submit(0)?;
                }
            }
            if self.registered == 0 {
                return Ok(());
            }
        }
    }

    fn submit(&mut self, wanted: usize) -> Result<(), Errno> {
        match self.ring.submit_and_wait(wanted) {
            Ok(_) => Ok(()),
            Err(error) => match errno_of(&error) {
                Errno::INTR | Errno::AGAIN | Errno::BUSY => Ok(()),
                errno => Err(errno),
            },
        }
    }

    /// Answers what the kernel has put into an entry, or has it answered: what may take long or wait for other answers, and, where others
    /// wait, what may read or write much.
    fn answer(
        &mut self,
        index: usize,
        others_wait: bool,
        answers: &dyn Answers,
        answer: &mut Answer,
    ) -> Result<(), Errno> {
        let place = self.entries.get_mut(index).ok_or(Errno::INVAL)?;
        let is_for_pool = |entry: &mut Entry| {
            entry.request().is_some_and(|request| {
                let has_data = matches!(request.header.opcode, opcode::READ | opcode::WRITE);
                has_data && others_wait || answers.takes_long(request)
            })
        };
        if let Some(entry) = place.take_if(is_for_pool) {
            let mailbox = Arc::clone(&self.mailbox);
            match self.rings.hand_over(Job { mailbox, index, entry }) {
                None => return Ok(()),
                Some(job) => *place = Some(job.entry),
            }
        }
        place.as_mut().ok_or(Errno::INVAL)?.answer(answers, answer);
        self.push_command(COMMIT_AND_FETCH, index)
    }

    /// Hands over what the pool has answered. Returns whether the queue is to stop.
    fn take_mail(&mut self) -> Result<bool, Errno> {
        let _ = rustix::io::read(&self.mailbox.event, &mut [0; 8]);
        let (answered, is_stopped) = {
            let mut mail = self.mailbox.state.lock();
            (std::mem::take(&mut mail.answered), mail.is_stopped)
        };
        for (index, entry) in answered {
            *self.entries.get_mut(index).ok_or(Errno::INVAL)? = Some(entry);
            self.push_command(COMMIT_AND_FETCH, index)?;
        }
        self.push_wait()?;
        Ok(is_stopped)
    }

    fn push_command(&mut self, number: u32, index: usize) -> Result<(), Errno> {
        let entry = self.entries.get(index).and_then(Option::as_ref).ok_or(Errno::INVAL)?;
        let mut data = [0; 80];
        // Flags, then which request is answered, then the queue.
        data[8..16].copy_from_slice(&entry.header.commit_id.to_ne_bytes());
        data[16..18].copy_from_slice(&self.number.to_ne_bytes());
        let pieces = entry.pieces.as_ptr();
        let mut command =
            command::UringCmd80::new(types::Fd(self.rings.device.as_raw_fd()), number)
                .cmd(data)
                .addr(Some(pieces as u64))
                .build()
                .user_data(index as u64);
        set_len(&mut command, 2);
        self.push(&command)
    }

    /// Asks to be woken by the mailbox, once.
    fn push_wait(&mut self) -> Result<(), Errno> {
        let event = types::Fd(self.mailbox.event.as_fd().as_raw_fd());
        let flags = u32::from(PollFlags::IN.bits().cast_unsigned());
        let wait = command::PollAdd::new(event, flags).build().user_data(WOKEN);
        self.push(&Entry128::from(wait))
    }

    fn push(&mut self, command: &Entry128) -> Result<(), Errno> {
        // SAFETY: what a command points to is an entry's memory, which stays where it is, and is not touched here, until the
        // kernel has completed the command, or for ever ([`Queue::drop`]); the device and the eventfd live as long as the rings.
        unsafe { self.ring.submission().push(command) }.map_err(|_| Errno::OVERFLOW)
    }
}

/// How many pieces of memory the command has; the crate has no way to say so.
fn set_len(command: &mut Entry128, count: u32) {
    /// `len` in `struct io_uring_sqe`.
    const LEN_OFFSET: usize = 24;
    let start = std::ptr::from_mut(command).cast::<u8>();
    // SAFETY: an `Entry128` is the kernel's struct of 128 bytes, of which these are four.
    unsafe { start.add(LEN_OFFSET).cast::<u32>().write_unaligned(count) };
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

const _: () = assert!(size_of::<Header>() == 288 && size_of::<squeue::Entry128>() == 128);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_as_the_kernel_lists_them() {
        assert_eq!(possible_processors("0\n"), Some(1));
        assert_eq!(possible_processors("0-3,8,10-11\n"), Some(7));
        for wrong in ["", "a", "3-1", "0-", "0-18446744073709551615"] {
            assert_eq!(possible_processors(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn entry_gives_what_is_in_it_and_refuses_what_is_cut_off() {
        let mut entry = Entry::new();
        let header = InHeader { len: 40 + 8 + 3, opcode: 1, unique: 5, ..InHeader::default() };
        entry.header.in_out[..40].copy_from_slice(header.as_bytes());
        entry.header.argument[..8].copy_from_slice(&7_u64.to_ne_bytes());
        entry.payload[..3].copy_from_slice(b"ab\0");
        entry.header.payload_bytes = 3;
        let mut request = entry.request().unwrap();
        assert_eq!(request.take::<u64>().unwrap(), 7);
        assert_eq!(request.take_name().unwrap(), b"ab");
        for payload_bytes in [u32::MAX, 12] {
            entry.header.payload_bytes = payload_bytes;
            assert!(entry.request().is_none());
        }
        entry.header.payload_bytes = 3;
        entry.header.in_out[..4].copy_from_slice(&(40_u32 + 3 + 129).to_ne_bytes());
        assert!(entry.request().is_none());
        entry.put_answer(&[&[9; 16][..], &[8; 5]].concat());
        assert_eq!((entry.header.payload_bytes, entry.payload[4]), (5, 8));
        entry.put_answer(&vec![0; 16 + PAYLOAD_BYTES + 1]);
        let answer = OutHeader::read_from_prefix(&entry.header.in_out).unwrap().0;
        assert_eq!((answer.error, entry.header.payload_bytes), (-5, 0));
    }
}
