//! Requests that come by queues of a connection: any transport's, behind the trait. Those of io_uring, with
//! the kernel, are in `mount.rs`.

#[path = "support/fake.rs"]
mod fake;

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fake::{CREATE, Fake, GETATTR, INIT, IOCTL, LOOKUP, MKDIR, ROOT_NODE, ioctl, number};
use rustix::io::Errno;
use ubtrfs_engine::{Filesystem, MkfsOptions, OpenOptions, mkfs};
use ubtrfs_fuse::{
    Answer, Answers, Queues, Received, Request, ServeError, ServeOptions, Server, Transport,
};
use ubtrfs_rt::{Arc, Condvar, Mutex, Runtime};
use ubtrfs_volume::{Device, MemDevice, Volume, VolumeOptions};

const FSYNCDIR: u32 = 30;
/// Flags of INIT: there is a second word of them, and in that one.
const EXT: u32 = 1 << 30;
const OVER_IO_URING: u32 = 1 << 9;
/// For so long something may take to come.
const PATIENCE: Duration = Duration::from_secs(20);

/// Whose thread answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum By {
    Queue(usize),
    Pool,
}

#[derive(Default)]
struct State {
    waiting: [VecDeque<Vec<u8>>; 2],
    for_pool: VecDeque<Vec<u8>>,
    answers: BTreeMap<u64, (By, Vec<u8>)>,
    /// Threads in `run_queue` and `run_pool`.
    running: usize,
    is_unmounted: bool,
    is_pool_ended: bool,
    failure: Option<Errno>,
}

/// Two queues and a pool of one thread.
#[derive(Default)]
struct TwoQueues {
    state: Mutex<State>,
    changed: Condvar,
}

impl TwoQueues {
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
        self.changed.notify_all();
    }

    fn answer(&self, by: By, request: &[u8], answers: &dyn Answers, memory: &mut Answer) {
        let request = Request::parse(request).unwrap();
        let answer = answers.answer_to(request, memory).to_vec();
        self.change(|state| {
            state.answers.insert(number(&answer, 8), (by, answer));
        });
    }

    /// Waits until something is so.
    fn wait_until<T>(&self, what: &str, mut is_so: impl FnMut(&mut State) -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            if let Some(value) = is_so(&mut self.state.lock()) {
                return value;
            }
            assert!(begun.elapsed() < PATIENCE, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Queues for TwoQueues {
    fn queue_count(&self) -> usize {
        2
    }

    fn pool_count(&self) -> usize {
        1
    }

    fn run_queue(&self, number: usize, answers: &dyn Answers) {
        self.change(|state| state.running += 1);
        let mut memory = Answer::with_room(0);
        loop {
            let mut state = self.state.lock();
            let bytes = loop {
                match state.waiting[number].pop_front() {
                    Some(bytes) => break Some(bytes),
                    None if state.is_unmounted || state.failure.is_some() => break None,
                    None => self.changed.wait(&mut state),
                }
            };
            drop(state);
            let Some(bytes) = bytes else { break };
            match answers.takes_long(Request::parse(&bytes).unwrap()) {
                true => self.change(|state| state.for_pool.push_back(bytes)),
                false => self.answer(By::Queue(number), &bytes, answers, &mut memory),
            }
        }
        self.change(|state| state.running -= 1);
    }

    fn run_pool(&self, answers: &dyn Answers) {
        self.change(|state| state.running += 1);
        let mut memory = Answer::with_room(0);
        loop {
            let mut state = self.state.lock();
            let bytes = loop {
                match state.for_pool.pop_front() {
                    Some(bytes) => break Some(bytes),
                    None if state.is_pool_ended => break None,
                    None => self.changed.wait(&mut state),
                }
            };
            drop(state);
            let Some(bytes) = bytes else { break };
            self.answer(By::Pool, &bytes, answers, &mut memory);
        }
        self.change(|state| state.running -= 1);
    }

    fn end_pool(&self) {
        self.change(|state| state.is_pool_ended = true);
    }

    fn fail(&self, errno: Errno) {
        self.change(|state| {
            state.failure.get_or_insert(errno);
        });
    }

    fn failure(&self) -> Option<Errno> {
        self.state.lock().failure
    }
}

/// A connection that has them.
struct Connection {
    fake: std::sync::Arc<Fake>,
    queues: Arc<TwoQueues>,
}

impl Transport for Connection {
    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        self.fake.receive(buffer)
    }
    fn wait(&self) -> Result<(), Errno> {
        self.fake.wait()
    }
    fn has_request(&self) -> bool {
        self.fake.has_request()
    }
    fn send(&self, answer: &[u8]) -> Result<(), Errno> {
        self.fake.send(answer)
    }
    fn queues(&self) -> Option<Arc<dyn Queues>> {
        let queues: Arc<dyn Queues> = Arc::<TwoQueues>::clone(&self.queues);
        Some(queues)
    }
    fn stop(&self) {
        self.fake.stop();
    }
    fn abort(&self, device: Option<&str>) {
        self.fake.abort(device);
    }
}

struct Served {
    fake: std::sync::Arc<Fake>,
    queues: Arc<TwoQueues>,
    /// What INIT was answered.
    agreed: Vec<u8>,
    serving: JoinHandle<Result<(), ServeError>>,
    next: u64,
}

impl Served {
    fn new(flags2: u32, uses_rings: bool) -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        let runtime = Arc::new(Runtime::system());
        mkfs(vec![Arc::clone(&device)], &MkfsOptions::default(), &runtime).unwrap();
        let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
        let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
        let root = fs.default_subvolume().unwrap();
        let options = ServeOptions { uses_rings, ..ServeOptions::default() };
        let server = Server::new(fs, root, options);
        let fake = Fake::new();
        let mut init = [7, 39, 1 << 17, EXT, flags2].map(u32::to_ne_bytes).concat();
        init.resize(64, 0);
        let first = fake.ask(INIT, 0, &init);
        let queues = Arc::<TwoQueues>::default();
        let transport: Arc<dyn Transport> = Arc::new(Connection {
            fake: std::sync::Arc::clone(&fake),
            queues: Arc::clone(&queues),
        });
        let (say_ready, ready) = mpsc::channel();
        let is_ready = move || say_ready.send(()).unwrap();
        let serving = std::thread::spawn(move || server.run(&transport, is_ready));
        let agreed = fake.answer(first).unwrap();
        ready.recv_timeout(PATIENCE).unwrap();
        Self { fake, queues, agreed, serving, next: 1 << 32 }
    }

    /// Makes a request by a queue; returns its number.
    fn ask(&mut self, queue: usize, operation: u32, node: u64, body: &[u8]) -> u64 {
        self.next += 1;
        let unique = self.next;
        let len = u32::try_from(40 + body.len()).unwrap();
        let mut bytes = [len.to_ne_bytes(), operation.to_ne_bytes()].concat();
        bytes.extend([unique.to_ne_bytes(), node.to_ne_bytes()].concat());
        // Of root.
        bytes.extend([0_u32, 0, 1, 0].map(u32::to_ne_bytes).concat());
        bytes.extend(body);
        self.queues.change(|state| state.waiting[queue].push_back(bytes));
        unique
    }

    /// What a request by a queue is answered: by whom, an error, and what there is.
    fn done(&mut self, queue: usize, operation: u32, node: u64, body: &[u8]) -> (By, i32, Vec<u8>) {
        let unique = self.ask(queue, operation, node, body);
        let (by, answer) =
            self.queues.wait_until("answered", |state| state.answers.remove(&unique));
        (by, i32::from_ne_bytes(answer[4..8].try_into().unwrap()), answer[16..].to_vec())
    }

    fn unmount(self) -> Result<(), ServeError> {
        self.queues.change(|state| state.is_unmounted = true);
        self.fake.end();
        self.serving.join().unwrap()
    }
}

fn flags2_of(agreed: &[u8]) -> u32 {
    u32::from_ne_bytes(agreed[32..36].try_into().unwrap())
}

#[test]
fn requests_by_queues_are_answered_there_and_what_takes_long_by_the_pool() {
    let mut served = Served::new(OVER_IO_URING, true);
    assert_eq!(flags2_of(&served.agreed), OVER_IO_URING);
    let running = |state: &mut State| (state.running == 3).then_some(());
    served.queues.wait_until("two queues and a pool", running);
    let made = served.done(1, MKDIR, ROOT_NODE, &[&[0; 8][..], b"made\0"].concat());
    assert_eq!((made.0, made.1), (By::Queue(1), 0));
    let node = number(&made.2, 0);
    let found = served.done(0, LOOKUP, ROOT_NODE, b"made\0");
    assert_eq!((found.0, found.1, number(&found.2, 0)), (By::Queue(0), 0, node));
    let missing = served.done(0, LOOKUP, ROOT_NODE, b"missing\0");
    // That it is not there may be remembered.
    assert_eq!((missing.0, missing.1, number(&missing.2, 0)), (By::Queue(0), 0, 0));
    assert_eq!(served.done(1, FSYNCDIR, node, &[0; 16]), (By::Pool, 0, Vec::new()));
    // Beside them the connection answers yet.
    assert!(served.fake.done(GETATTR, node, &[0; 16]).is_ok());
    let queues = Arc::clone(&served.queues);
    served.unmount().unwrap();
    assert_eq!(queues.state.lock().running, 0);
}

#[test]
fn queue_that_fails_ends_the_service_which_says_why() {
    let mut served = Served::new(OVER_IO_URING, true);
    assert_eq!(served.done(0, GETATTR, ROOT_NODE, &[0; 16]).1, 0);
    served.queues.fail(Errno::PERM);
    let queues = Arc::clone(&served.queues);
    let error = served.serving.join().unwrap().unwrap_err();
    assert!(matches!(error, ServeError::Transport(Errno::PERM)), "{error}");
    assert_eq!(queues.state.lock().running, 0);
}

/// What somebody waits for that the kernel is to forget it writes before, by requests that nobody takes once a queue has failed: the pool's thread
/// was waited for without end, and the mount with it.
#[test]
fn queue_that_fails_ends_the_service_though_others_wait_for_the_kernel() {
    const SET_SUBVOLUME_FLAGS: u32 = 0x4008_941a;
    let mut served = Served::new(OVER_IO_URING, true);
    let made = [0_u32, 0o100_644, 0, 0].map(u32::to_ne_bytes).concat();
    let made = served.done(0, CREATE, ROOT_NODE, &[&made, &b"file\0"[..]].concat());
    assert_eq!(made.1, 0);
    served.fake.hold_pages(true);
    let read_only = ioctl(SET_SUBVOLUME_FLAGS, &2_u64.to_ne_bytes());
    served.ask(1, IOCTL, ROOT_NODE, &read_only);
    served.fake.wait_held_pages();
    // One that is done beside waits for the first.
    let beside = served.fake.ask(IOCTL, ROOT_NODE, &read_only);
    served.fake.wait_taken(beside);
    served.queues.fail(Errno::PERM);
    let serving = &served.serving;
    served.queues.wait_until("ended", |_| serving.is_finished().then_some(()));
    let error = served.serving.join().unwrap().unwrap_err();
    assert!(matches!(error, ServeError::Transport(Errno::PERM)), "{error}");
}

#[test]
fn queues_are_left_alone_where_they_are_not_offered_or_not_wanted() {
    for (flags2, uses_rings) in [(0, true), (OVER_IO_URING, false)] {
        let served = Served::new(flags2, uses_rings);
        assert_eq!(flags2_of(&served.agreed), 0);
        assert!(served.fake.done(GETATTR, ROOT_NODE, &[0; 16]).is_ok());
        assert_eq!(served.queues.state.lock().running, 0);
        served.unmount().unwrap();
    }
}
