//! A kernel of the test's own: it makes requests, and sees what is answered and told. Each thread that serves has a way of its own
//! ([`Transport::further_way`]), and what is answered by another than the request was taken by finds nobody, as with Linux.
#![allow(dead_code)] // Each test file uses its part.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::RangeInclusive;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use ubtrfs_engine::{Filesystem, OpenOptions};
use ubtrfs_fuse::{Farewell, Received, ServeOptions, Server, Transport};
use ubtrfs_volume::{Device, Volume, VolumeOptions};

pub const LOOKUP: u32 = 1;
pub const FORGET: u32 = 2;
pub const INTERRUPT: u32 = 36;
pub const DESTROY: u32 = 38;
pub const BATCH_FORGET: u32 = 42;
pub const GETATTR: u32 = 3;
pub const SETATTR: u32 = 4;
pub const READLINK: u32 = 5;
pub const MKDIR: u32 = 9;
pub const OPEN: u32 = 14;
pub const READ: u32 = 15;
pub const WRITE: u32 = 16;
pub const FLUSH: u32 = 25;
pub const INIT: u32 = 26;
pub const READDIR: u32 = 28;
pub const CREATE: u32 = 35;
pub const IOCTL: u32 = 39;
pub const FALLOCATE: u32 = 43;
pub const LSEEK: u32 = 46;
pub const INVAL_INODE: i32 = 2;
pub const INVAL_ENTRY: i32 = 3;
pub const STORE: i32 = 4;
pub const DELETE: i32 = 6;
pub const ROOT_NODE: u64 = 1;
/// Of the protocol, as it is spoken if no other is said to be.
const MINOR: u32 = 39;
const EIO: i32 = 5;
/// Bytes in front of what is sent.
const HEADER_BYTES: usize = 16;
/// For so long something may take to come.
const PATIENCE: Duration = Duration::from_secs(20);

/// What was sent without a request, and whether the kernel knew what it is about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Told {
    pub code: i32,
    pub node: u64,
    /// Of data: where.
    pub at: u64,
    /// Of what is gone: its node.
    pub child: u64,
    pub name: Vec<u8>,
    pub is_known: bool,
}

/// An answer: an error of the system's, or what there is.
pub type Answered = Result<Vec<u8>, i32>;

/// A file that the server had opened, as a kernel does for a program, and what it answered.
#[derive(Clone, Debug)]
pub struct Opened {
    pub name: String,
    pub found: Answered,
    pub node: u64,
    pub attributes: Answered,
    pub open: Answered,
    pub flush: Answered,
}

#[derive(Default)]
struct State {
    requests: VecDeque<Vec<u8>>,
    answers: BTreeMap<u64, Answered>,
    answered: BTreeSet<u64>,
    /// A request was answered twice.
    is_answered_twice: bool,
    way_count: usize,
    /// The ways by which requests were taken that are to be answered, or were.
    taken_by: BTreeMap<u64, usize>,
    /// Answers by another way than their requests came by, and requests whose way was closed before they were answered.
    astray: Vec<u64>,
    told: Vec<Told>,
    known: BTreeSet<u64>,
    /// Answers that are held on their way, and whether they are there.
    held: BTreeMap<u64, bool>,
    /// Requests whose answers it takes for malformed.
    refused: BTreeSet<u64>,
    holds_stores: bool,
    holds_pages: bool,
    holds_names: bool,
    /// Those who wait with what it forgets of files' pages.
    waiting_for_pages: usize,
    opened: Vec<Opened>,
    next: u64,
    is_ended: bool,
    /// Nobody takes requests any more.
    is_stopped: bool,
    /// Nobody is answered any more.
    is_aborted: bool,
    /// Ways by which no request can be taken, and those that were tried.
    failing: Option<RangeInclusive<usize>>,
    failed: BTreeSet<usize>,
}

#[derive(Default)]
pub struct Fake {
    state: Mutex<State>,
    changed: Condvar,
    itself: Weak<Self>,
}

impl Fake {
    pub fn new() -> Arc<Self> {
        Arc::new_cyclic(|itself| Self { itself: Weak::clone(itself), ..Self::default() })
    }

    fn wait_until<T>(&self, what: &str, mut is_so: impl FnMut(&mut State) -> Option<T>) -> T {
        let begun = Instant::now();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(value) = is_so(&mut state) {
                return value;
            }
            assert!(begun.elapsed() < PATIENCE, "{what}");
            state = self
                .changed
                .wait_timeout(state, Duration::from_millis(50))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Makes a request; returns its number.
    pub fn ask(&self, operation: u32, node: u64, body: &[u8]) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let unique = self.put(&mut state, process(), operation, node, body);
        self.changed.notify_all();
        unique
    }

    /// As [`Fake::ask`]; the answer stays on its way until [`Fake::let_through`].
    pub fn ask_and_hold(&self, operation: u32, node: u64, body: &[u8]) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let unique = self.put(&mut state, process(), operation, node, body);
        state.held.insert(unique, false);
        self.changed.notify_all();
        unique
    }

    /// As [`Fake::ask`]; the answer is refused, and the request fails.
    pub fn ask_and_refuse(&self, operation: u32, node: u64, body: &[u8]) -> u64 {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let unique = self.put(&mut state, process(), operation, node, body);
        state.refused.insert(unique);
        self.changed.notify_all();
        unique
    }

    /// The way by which a request was taken, if it was.
    pub fn way_of(&self, unique: u64) -> Option<usize> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.taken_by.get(&unique).copied()
    }

    /// Waits until a request was taken.
    pub fn wait_taken(&self, unique: u64) {
        self.wait_until("taken", |state| state.taken_by.contains_key(&unique).then_some(()));
    }

    /// Keeps the thread that has no way of its own from taking any further request, until what is returned is let through.
    pub fn keep_first_thread(&self) -> u64 {
        let mut held = Vec::new();
        loop {
            let unique = self.ask_and_hold(GETATTR, ROOT_NODE, &[0; 16]);
            self.wait_on_its_way(unique);
            if self.way_of(unique) == Some(0) {
                held.iter().for_each(|other| self.let_through(*other));
                held.iter().for_each(|other| drop(self.answer(*other).unwrap()));
                return unique;
            }
            held.push(unique);
        }
    }

    fn put(&self, state: &mut State, pid: u32, operation: u32, node: u64, body: &[u8]) -> u64 {
        self.put_as(state, [0, pid], operation, node, body)
    }

    fn put_as(
        &self,
        state: &mut State,
        [uid, pid]: [u32; 2],
        operation: u32,
        node: u64,
        body: &[u8],
    ) -> u64 {
        state.next += 1;
        let unique = state.next;
        let len = u32::try_from(40 + body.len()).unwrap();
        let mut bytes = [len.to_ne_bytes(), operation.to_ne_bytes()].concat();
        bytes.extend([unique.to_ne_bytes(), node.to_ne_bytes()].concat());
        bytes.extend([uid, uid, pid, 0].map(u32::to_ne_bytes).concat());
        bytes.extend(body);
        state.requests.push_back(bytes);
        unique
    }

    /// From now on nothing can be taken by these ways.
    pub fn fail_ways(&self, ways: RangeInclusive<usize>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failing = Some(ways);
        self.changed.notify_all();
    }

    /// Whether somebody has tried a way that fails.
    pub fn has_failed(&self, way: usize) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failed.contains(&way)
    }

    /// Waits until the answer is on its way, or somebody has tried a way that fails.
    pub fn wait_on_its_way_or_failed(&self, unique: u64, way: usize) {
        self.wait_until("on its way", |state| {
            let is_there = state.held.get(&unique) == Some(&true);
            (is_there || state.failed.contains(&way)).then_some(())
        });
    }

    /// Whether the server has ended the connection.
    pub fn is_aborted(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).is_aborted
    }

    /// Waits until it has.
    pub fn wait_aborted(&self) {
        self.wait_until("aborted", |state| state.is_aborted.then_some(()));
    }

    /// Whether it waits with what it is to put into its memory.
    pub fn hold_stores(&self, holds: bool) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).holds_stores = holds;
        self.changed.notify_all();
    }

    /// Whether it waits with forgetting what a file has.
    pub fn hold_pages(&self, holds: bool) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).holds_pages = holds;
        self.changed.notify_all();
    }

    /// Waits until somebody waits for that.
    pub fn wait_held_pages(&self) {
        self.wait_until("pages are held", |state| (state.waiting_for_pages > 0).then_some(()));
    }

    /// Whether it waits with forgetting names: somebody has the directory's lock.
    pub fn hold_names(&self, holds: bool) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).holds_names = holds;
        self.changed.notify_all();
    }

    /// Waits until the answer is on its way.
    pub fn wait_on_its_way(&self, unique: u64) {
        self.wait_until("on its way", |state| {
            (state.held.get(&unique) == Some(&true)).then_some(())
        });
    }

    pub fn let_through(&self, unique: u64) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).held.remove(&unique);
        self.changed.notify_all();
    }

    /// Waits for the answer.
    pub fn answer(&self, unique: u64) -> Answered {
        self.wait_until("answered", |state| state.answers.remove(&unique))
    }

    /// Whether it was answered.
    pub fn is_answered(&self, unique: u64) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).answers.contains_key(&unique)
    }

    /// Makes a request and waits for its answer.
    pub fn done(&self, operation: u32, node: u64, body: &[u8]) -> Answered {
        self.answer(self.ask(operation, node, body))
    }

    /// As [`Fake::done`], by another process.
    pub fn done_by(&self, pid: u32, operation: u32, node: u64, body: &[u8]) -> Answered {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let unique = self.put(&mut state, pid, operation, node, body);
        drop(state);
        self.changed.notify_all();
        self.answer(unique)
    }

    /// As [`Fake::done`], by another user.
    pub fn done_as(&self, uid: u32, operation: u32, node: u64, body: &[u8]) -> Answered {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let unique = self.put_as(&mut state, [uid, process()], operation, node, body);
        drop(state);
        self.changed.notify_all();
        self.answer(unique)
    }

    /// Waits until something like that was told.
    pub fn wait_told(&self, what: &str, is_it: impl Fn(&Told) -> bool) {
        self.wait_until(what, |state| state.told.iter().any(&is_it).then_some(()));
    }

    /// Whether something like that was told.
    pub fn has_told(&self, is_it: impl Fn(&Told) -> bool) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).told.iter().any(is_it)
    }

    /// What was told of a name so far: the code, and the node of what is gone.
    pub fn told_of(&self, parent: u64, name: &[u8]) -> Vec<(i32, u64)> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let told = state.told.iter().filter(|told| told.node == parent && told.name == name);
        told.map(|told| (told.code, told.child)).collect()
    }

    /// What the server had opened so far.
    pub fn opened(&self) -> Vec<Opened> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).opened.clone()
    }

    /// Opens a file of the top and closes it.
    fn open_and_close(&self, name: String) {
        let found = self.done(LOOKUP, ROOT_NODE, &[name.as_bytes(), b"\0"].concat());
        let node = found.as_ref().map_or(0, |found| number(found, 0));
        let attributes = self.done(GETATTR, node, &[0; 16]);
        let (open, flush) = (self.done(OPEN, node, &[0; 8]), self.done(FLUSH, node, &[0; 24]));
        let opened = Opened { name, found, node, attributes, open, flush };
        self.state.lock().unwrap_or_else(PoisonError::into_inner).opened.push(opened);
    }

    /// The filesystem is unmounted.
    pub fn end(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).is_ended = true;
        self.changed.notify_all();
    }
}

/// Who makes requests if nobody else is said to: of others this process may not be told all.
fn process() -> u32 {
    std::process::id()
}

/// A number in an answer.
pub fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// What IOCTL has.
pub fn ioctl(command: u32, argument: &[u8]) -> Vec<u8> {
    let words = |words: [u32; 2]| words.map(u32::to_ne_bytes).concat();
    let zero = [0; 8];
    let len = u32::try_from(argument.len()).unwrap();
    [&zero[..], &words([0, command]), &zero, &words([len, 0]), argument].concat()
}

/// A way for a thread of its own. The connection itself has number 0.
struct Way {
    fake: Arc<Fake>,
    number: usize,
}

impl Transport for Way {
    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        self.fake.receive_by(self.number, buffer)
    }

    fn wait(&self) -> Result<(), Errno> {
        self.fake.wait()
    }

    fn has_request(&self) -> bool {
        self.fake.has_request()
    }

    fn send(&self, bytes: &[u8]) -> Result<(), Errno> {
        self.fake.send_by(self.number, bytes)
    }

    fn stop(&self) {
        self.fake.stop();
    }

    fn abort(&self, device: Option<&str>) {
        self.fake.abort(device);
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        let mut state = self.fake.state.lock().unwrap_or_else(PoisonError::into_inner);
        let its = state.taken_by.iter().filter(|(_, number)| **number == self.number);
        let left = its.map(|(unique, _)| *unique).filter(|unique| !state.answered.contains(unique));
        let left: Vec<u64> = left.collect();
        state.astray.extend(left);
    }
}

impl Transport for Fake {
    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        self.receive_by(0, buffer)
    }

    fn wait(&self) -> Result<(), Errno> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.requests.is_empty() && !state.is_ended && !state.is_stopped {
            drop(self.changed.wait_timeout(state, Duration::from_millis(50)));
        }
        Ok(())
    }

    fn has_request(&self) -> bool {
        !self.state.lock().unwrap_or_else(PoisonError::into_inner).requests.is_empty()
    }

    fn send(&self, bytes: &[u8]) -> Result<(), Errno> {
        self.send_by(0, bytes)
    }

    fn further_way(&self) -> Option<ubtrfs_rt::Arc<dyn Transport>> {
        let fake = self.itself.upgrade()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.way_count += 1;
        let number = state.way_count;
        drop(state);
        Some(ubtrfs_rt::Arc::new(Way { fake, number }))
    }

    fn opener(&self, name: &str) -> Option<Box<dyn FnOnce() + Send>> {
        let (itself, name) = (self.itself.upgrade()?, name.to_owned());
        Some(Box::new(move || itself.open_and_close(name)))
    }

    /// What it was told before it has not taken for that.
    fn stop(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).is_stopped = true;
        self.changed.notify_all();
    }

    fn abort(&self, _device: Option<&str>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).is_aborted = true;
        self.end();
    }
}

impl Fake {
    fn receive_by(&self, way: usize, buffer: &mut [u8]) -> Result<Received, Errno> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.failing.as_ref().is_some_and(|failing| failing.contains(&way)) {
            state.failed.insert(way);
            self.changed.notify_all();
            return Err(Errno::IO);
        }
        match state.requests.pop_front() {
            Some(bytes) => {
                let operation = u32::from_ne_bytes(bytes[4..8].try_into().unwrap());
                if ![FORGET, BATCH_FORGET, INTERRUPT].contains(&operation) {
                    state.taken_by.insert(number(&bytes, 8), way);
                }
                buffer[..bytes.len()].copy_from_slice(&bytes);
                Ok(Received::Request(bytes.len()))
            }
            None if state.is_ended || state.is_stopped => Ok(Received::End),
            None => Ok(Received::Nothing),
        }
    }

    fn send_by(&self, way: usize, bytes: &[u8]) -> Result<(), Errno> {
        let error = i32::from_ne_bytes(bytes[4..8].try_into().unwrap());
        let (unique, body) = (number(bytes, 8), &bytes[HEADER_BYTES..]);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if unique == 0 {
            let (node, at) = (number(body, 0), number(body, 8));
            while error == STORE && state.holds_stores && !state.is_ended {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let is_of_pages = error == INVAL_INODE && at <= i64::MAX as u64;
            let waits = is_of_pages && state.holds_pages;
            state.waiting_for_pages += usize::from(waits);
            self.changed.notify_all();
            while is_of_pages && state.holds_pages && !state.is_ended {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.waiting_for_pages -= usize::from(waits);
            while error == INVAL_ENTRY && state.holds_names && !state.is_ended {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            // A name, behind a struct, and a zero.
            let named = |struct_bytes: usize| body[struct_bytes..body.len() - 1].to_vec();
            let (child, name) = match error {
                INVAL_ENTRY => (0, named(16)),
                DELETE => (number(body, 8), named(24)),
                _ => (0, Vec::new()),
            };
            let is_known = node == ROOT_NODE || state.known.contains(&node);
            state.told.push(Told { code: error, node, at, child, name, is_known });
            self.changed.notify_all();
            return if is_known { Ok(()) } else { Err(Errno::NOENT) };
        }
        if state.taken_by.get(&unique).is_some_and(|by| *by != way) {
            state.astray.push(unique);
            return Err(Errno::NOENT);
        }
        if let Some(is_there) = state.held.get_mut(&unique) {
            *is_there = true;
            self.changed.notify_all();
            while state.held.contains_key(&unique) && !state.is_ended {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        if state.refused.remove(&unique) {
            state.answered.insert(unique);
            state.answers.insert(unique, Err(EIO));
            self.changed.notify_all();
            return Err(Errno::INVAL);
        }
        let answered = if error == 0 { Ok(body.to_vec()) } else { Err(-error) };
        // What tells of a node is as long as one that tells of an entry.
        if let Ok(body) = &answered
            && body.len() == 128
        {
            state.known.insert(number(body, 0));
        }
        state.is_answered_twice |= !state.answered.insert(unique);
        state.answers.insert(unique, answered);
        self.changed.notify_all();
        Ok(())
    }
}

/// A filesystem that is served to a kernel of the test's own.
pub struct Served {
    pub fake: Arc<Fake>,
    pub fs: Filesystem,
    pub server: Arc<Server>,
    serving: Option<JoinHandle<()>>,
}

impl Served {
    /// One on a device that has a filesystem.
    pub fn new(device: Arc<dyn Device>, options: ServeOptions) -> Self {
        Self::to_kernel(MINOR, device, options)
    }

    /// To a kernel that speaks another minor version of the protocol.
    pub fn to_kernel(minor: u32, device: Arc<dyn Device>, options: ServeOptions) -> Self {
        let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
        let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
        let root = fs.default_subvolume().unwrap();
        let server = Server::new(fs.clone(), root, options);
        let fake = Fake::new();
        let init = [7_u32, minor, 1 << 17, 0].map(u32::to_ne_bytes).concat();
        let first = fake.ask(INIT, 0, &init);
        let transport: Arc<dyn Transport> = Arc::<Fake>::clone(&fake);
        let serving = Arc::clone(&server);
        // What cannot be made durable at the end is the tests' own doing.
        let (say_ready, ready) = mpsc::channel();
        let is_ready = move || say_ready.send(()).unwrap();
        let serving = std::thread::spawn(move || drop(serving.run(&transport, is_ready)));
        fake.answer(first).unwrap();
        ready.recv_timeout(PATIENCE).unwrap();
        Self { fake, fs, server, serving: Some(serving) }
    }

    /// The last answer, once all that serve have ended.
    pub fn take_farewell(&self) -> Option<Farewell> {
        let has_ended = self.serving.as_ref().is_none_or(JoinHandle::is_finished);
        has_ended.then(|| self.server.take_farewell()).flatten()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.fake.end();
        if let Some(serving) = self.serving.take() {
            let served = serving.join();
            let state = self.fake.state.lock().unwrap_or_else(PoisonError::into_inner);
            let is_good = served.is_ok() && !state.is_answered_twice && state.astray.is_empty();
            let astray = &state.astray;
            assert!(is_good || std::thread::panicking(), "astray: {astray:?}");
        }
    }
}
