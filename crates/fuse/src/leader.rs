//! Which thread takes the next request: one leads, the others follow.
//!
//! Who makes small requests one after the other waits for each, and to wake a thread for one takes longer than to answer it. So the
//! leader answers what it takes itself, and looks for the next for a short time ([`Leaders::new`]) before it sleeps. A follower
//! takes over
//!
//! - while the leader answers what may take long, or what waited for it beside others;
//! - when the leader has been at one request for some milliseconds, which the first of the followers watches while requests come.
//!
//! Nothing here is O(requests), and nobody wakes while no requests come.

use std::time::Duration;

use rustix::io::Errno;
use ubtrfs_rt::{AtomicU64, Condvar, Mutex, Ordering, monotonic_ns};

use crate::abi::opcode;
use crate::message::Request;
use crate::server::ServeError;
use crate::transport::{Received, Transport};

/// For so long the leader looks for the next request before it sleeps, where nothing else is asked for.
pub const LOOKING: Duration = Duration::from_micros(100);

/// A leader that is at one request for so long is followed by another.
const WATCH_EVERY: Duration = Duration::from_millis(4);

/// What the leader does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Doing {
    /// Nothing: there is no request.
    Sleeps,
    Looks,
    /// Its nth request.
    Answers(u64),
}

#[derive(Debug)]
struct State {
    /// The leader's term.
    leader: Option<u64>,
    terms: u64,
    /// Of these, such as began because the leader was at one request for too long.
    #[cfg(test)]
    late_terms: u64,
    doing: Doing,
    requests: u64,
    follower_count: usize,
    is_watched: bool,
    /// The last request was taken.
    has_ended: bool,
}

/// A request that the leader found.
struct Found {
    /// In bytes.
    len: usize,
    /// The leader was looking when it came. So it is not one of several that were waiting, and who makes one after the other is
    /// spared a system call for each that would ask for more.
    was_looked_for: bool,
}

/// Threads that serve one mount.
#[derive(Debug)]
pub(crate) struct Leaders {
    state: Mutex<State>,
    /// For followers that do not watch.
    followers: Condvar,
    watcher: Condvar,
    looking_ns: AtomicU64,
}

/// Gives up the lead where that has not been done.
struct Term<'a> {
    leaders: &'a Leaders,
    number: u64,
}

impl Drop for Term<'_> {
    fn drop(&mut self) {
        self.leaders.give_up(self.number);
    }
}

impl Leaders {
    /// The leader looks for so long for the next request before it sleeps; on a machine of one processor it does not, as nobody
    /// could make one meanwhile.
    pub(crate) fn new(looking: Duration) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let looking = if processors > 1 { looking } else { Duration::ZERO };
        let state = State {
            leader: None,
            terms: 0,
            #[cfg(test)]
            late_terms: 0,
            doing: Doing::Looks,
            requests: 0,
            follower_count: 0,
            is_watched: false,
            has_ended: false,
        };
        Self {
            state: Mutex::new(state),
            followers: Condvar::new(),
            watcher: Condvar::new(),
            looking_ns: AtomicU64::new(u64::try_from(looking.as_nanos()).unwrap_or(u64::MAX)),
        }
    }

    /// The leader sleeps at once from now on: few requests come this way, and nobody waits for them.
    pub(crate) fn stop_looking(&self) {
        self.looking_ns.store(0, Ordering::Relaxed);
    }

    /// Takes requests into `buffer` and has them answered until the filesystem is unmounted, as one of several threads.
    ///
    /// # Errors
    /// The transport's; those of `answer`.
    pub(crate) fn work(
        &self,
        transport: &dyn Transport,
        buffer: &mut [u8],
        mut answer: impl FnMut(&[u8]) -> Result<(), ServeError>,
    ) -> Result<(), ServeError> {
        loop {
            let Some(term) = self.lead() else { return Ok(()) };
            while let Some(request) = self.begin(term.number) {
                let received = self.receive(transport, buffer).map_err(ServeError::Transport)?;
                let Some(found) = received else { return Ok(()) };
                let bytes = &buffer[..found.len];
                // Nobody else takes over while it leads and answers nothing yet.
                if is_last(bytes) {
                    self.end();
                    return answer(bytes);
                }
                self.does(term.number, Doing::Answers(request));
                // Who has answered before another is awake leads again.
                let opcode = Request::parse(bytes).map(|request| request.header.opcode);
                match opcode.map_or(Length::Short, length_of) {
                    Length::Long => self.give_up(term.number),
                    Length::Any if !found.was_looked_for && transport.has_request() => {
                        self.give_up(term.number);
                    }
                    Length::Any | Length::Short => {}
                }
                answer(bytes)?;
            }
        }
    }

    /// Waits until this thread leads; `None` where there is no further request.
    fn lead(&self) -> Option<Term<'_>> {
        let mut state = self.state.lock();
        loop {
            if state.has_ended {
                return None;
            }
            if state.leader.is_none() {
                return Some(self.take_over(&mut state));
            }
            if state.is_watched || state.doing == Doing::Sleeps {
                state.follower_count += 1;
                self.followers.wait(&mut state);
                state.follower_count -= 1;
                continue;
            }
            let (leader, doing) = (state.leader, state.doing);
            state.is_watched = true;
            let is_late = self.watcher.wait_for(&mut state, WATCH_EVERY).timed_out();
            state.is_watched = false;
            let is_stuck = matches!(doing, Doing::Answers(_)) && state.doing == doing;
            if is_late && is_stuck && state.leader == leader && !state.has_ended {
                #[cfg(test)]
                {
                    state.late_terms += 1;
                }
                return Some(self.take_over(&mut state));
            }
        }
    }

    /// Nobody leads any more.
    fn end(&self) {
        self.state.lock().has_ended = true;
        self.followers.notify_all();
        self.watcher.notify_all();
    }

    fn take_over(&self, state: &mut State) -> Term<'_> {
        state.terms += 1;
        state.leader = Some(state.terms);
        state.doing = Doing::Looks;
        self.ask_for_watcher(state);
        Term { leaders: self, number: state.terms }
    }

    fn ask_for_watcher(&self, state: &State) {
        if !state.is_watched && state.follower_count > 0 {
            self.followers.notify_one();
        }
    }

    /// The leader looks for another request; returns its number, or `None` if another leads.
    fn begin(&self, term: u64) -> Option<u64> {
        let mut state = self.state.lock();
        if state.leader != Some(term) {
            return None;
        }
        state.doing = Doing::Looks;
        state.requests += 1;
        Some(state.requests)
    }

    fn does(&self, term: u64, doing: Doing) {
        let mut state = self.state.lock();
        if state.leader == Some(term) {
            state.doing = doing;
        }
    }

    fn give_up(&self, term: u64) {
        let mut state = self.state.lock();
        if state.leader == Some(term) {
            state.leader = None;
            match state.follower_count {
                0 => self.watcher.notify_one(),
                _ => self.followers.notify_one(),
            };
        }
    }

    /// The leader waits for a request.
    fn receive(
        &self,
        transport: &dyn Transport,
        buffer: &mut [u8],
    ) -> Result<Option<Found>, Errno> {
        let mut began = None;
        let mut has_slept = false;
        loop {
            match transport.receive(buffer)? {
                Received::Request(len) => {
                    let was_looked_for = began.is_some() && !has_slept;
                    return Ok(Some(Found { len, was_looked_for }));
                }
                Received::End => return Ok(None),
                Received::Nothing => {}
            }
            let now = monotonic_ns();
            if now - *began.get_or_insert(now) < self.looking_ns.load(Ordering::Relaxed) {
                std::hint::spin_loop();
                continue;
            }
            // Only the leader changes it, and nobody takes over from one that does not answer.
            self.state.lock().doing = Doing::Sleeps;
            transport.wait()?;
            has_slept = true;
            let mut state = self.state.lock();
            state.doing = Doing::Looks;
            self.ask_for_watcher(&state);
        }
    }
}

/// Whether no request comes after it.
fn is_last(request: &[u8]) -> bool {
    Request::parse(request).is_some_and(|request| request.header.opcode == opcode::DESTROY)
}

/// How long a request takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Length {
    /// Nobody waits for its answer, and nothing is looked up for it.
    Short,
    Any,
    /// It waits for the medium, or changes much.
    Long,
}

pub(crate) fn length_of(operation: u32) -> Length {
    match operation {
        opcode::FORGET
        | opcode::BATCH_FORGET
        | opcode::INTERRUPT
        | opcode::RELEASE
        | opcode::RELEASEDIR => Length::Short,
        opcode::FSYNC
        | opcode::FSYNCDIR
        | opcode::SYNCFS
        | opcode::FALLOCATE
        | opcode::COPY_FILE_RANGE
        | opcode::IOCTL
        | opcode::DESTROY => Length::Long,
        _ => Length::Any,
    }
}

#[cfg(test)]
mod tests;
