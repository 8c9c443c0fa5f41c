//! Where time, random identifiers and threads come from.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Mutex;

/// A point in time: seconds since 1970 and nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct Time {
    /// Seconds since 1970, negative before.
    pub sec: i64,
    /// Nanoseconds, below 10⁹.
    pub nsec: u32,
}

/// Where the time of day comes from.
#[derive(Debug)]
pub enum Clock {
    /// The system's clock.
    System,
    /// Always the same moment: `SOURCE_DATE_EPOCH`, or a test's.
    Fixed(Time),
}

impl Clock {
    /// The time now.
    pub fn now(&self) -> Time {
        match self {
            Self::Fixed(time) => *time,
            Self::System => {
                let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
                Time { sec: now.tv_sec, nsec: u32::try_from(now.tv_nsec).unwrap_or(0) }
            }
        }
    }
}

/// Nanoseconds since some moment, never fewer than before: to measure how long something took. What
/// is measured must decide nothing where one thread does all, as such a run is replayed.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (sec, nsec) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    sec.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(nsec.unwrap_or(0))
}

/// Where random identifiers come from.
#[derive(Debug)]
pub enum Identifiers {
    /// The kernel's random numbers.
    System,
    /// A sequence that its seed determines.
    Seeded(AtomicU64),
}

impl Identifiers {
    /// Sixteen bytes that make a random (version 4) uuid.
    pub fn uuid(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        match self {
            Self::System => {
                let high = hash_of_random_state();
                let low = hash_of_random_state();
                bytes[..8].copy_from_slice(&high.to_le_bytes());
                bytes[8..].copy_from_slice(&low.to_le_bytes());
            }
            Self::Seeded(state) => {
                for half in bytes.chunks_exact_mut(8) {
                    half.copy_from_slice(&split_mix(state).to_le_bytes());
                }
            }
        }
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        bytes
    }
}

/// Sixty-four random bits: the standard library's hasher keys are drawn from the kernel.
fn hash_of_random_state() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let time = Clock::System.now();
    let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.write_i64(time.sec);
    hasher.write_u32(time.nsec);
    hasher.finish()
}

/// SplitMix64 (Steele, Lea, Flood 2014).
fn split_mix(state: &AtomicU64) -> u64 {
    const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut z = state.fetch_add(GAMMA, Ordering::Relaxed).wrapping_add(GAMMA);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// How work that could run beside its submitter is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Executor {
    /// On threads, at most this many.
    Threads(usize),
    /// By the submitter, at once: a replayed run.
    Inline,
}

impl Executor {
    /// Threads that may work beside the submitter; 0 for `Inline`.
    pub fn thread_count(self) -> usize {
        match self {
            Self::Threads(count) => count,
            Self::Inline => 0,
        }
    }

    /// Runs `work` on a thread of its own, named `name`, until it returns. `None` for `Inline`, where
    /// nothing runs beside its submitter and `work` is not run.
    ///
    /// # Errors
    /// The system's, where it gives no thread.
    pub fn spawn(
        self,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<Option<Service>> {
        match self {
            Self::Inline => Ok(None),
            Self::Threads(_) => {
                let builder = std::thread::Builder::new().name(name.to_owned());
                Ok(Some(Service { thread: builder.spawn(work)? }))
            }
        }
    }

    /// Works on the parts of `items` side by side, one part a thread, the caller's among them, and
    /// returns when all are done. The parts and their order do not depend on how they are run.
    ///
    /// # Errors
    /// That of the first part, in order, that failed.
    pub fn for_each_part<T: Send, E: Send>(
        self,
        items: &mut [T],
        work: impl Fn(&mut [T]) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let part_len = items.len().div_ceil(self.thread_count().max(1)).max(1);
        let mut parts: Vec<_> = items.chunks_mut(part_len).map(|part| (part, Ok(()))).collect();
        self.for_each_next(parts.iter_mut(), |(part, result)| *result = work(part));
        parts.into_iter().try_for_each(|(_, result)| result)
    }

    /// Works on items side by side, each thread taking the next one when it is done with one, and returns when all are done: as fast
    /// as it can be where items, or processors, take longer or shorter. `Inline` does them in their order. Where the system gives fewer
    /// threads, those do all.
    pub fn for_each_next<T: Send>(
        self,
        items: impl ExactSizeIterator<Item = T> + Send,
        work: impl Fn(T) + Sync,
    ) {
        let count = self.thread_count().max(1).min(items.len());
        if count <= 1 {
            return items.for_each(work);
        }
        let items = Mutex::new(items);
        let take_all = || {
            loop {
                let next = items.lock().next();
                let Some(item) = next else { return };
                work(item);
            }
        };
        std::thread::scope(|scope| {
            // With those threads that the system gives.
            let others: Vec<_> = (1..count)
                .filter_map(|_| std::thread::Builder::new().spawn_scoped(scope, take_all).ok())
                .collect();
            take_all();
            others.into_iter().for_each(joined);
        });
    }

    /// Works on the items that `give` gives to what it is called with, at most so many, and returns what that returned when all are done:
    /// from when they are given on, on threads that are kept for that, and behind `give` here, too. `work` must only compute,
    /// or read a device: neither wait for another thread, nor hold a lock while it computes, nor share work itself. `Inline` runs `give`, then works on the items in their order.
    pub fn compute_given<T: Send, R>(
        self,
        count_max: usize,
        give: impl FnOnce(&mut dyn FnMut(T)) -> R,
        work: impl Fn(T) + Sync,
    ) -> R {
        let thread_count_max = self.thread_count().saturating_sub(1).min(count_max);
        crate::compute::share(thread_count_max, give, work).0
    }

    /// As [`Executor::compute_each`], with one thread beside at most, and tells whether that was worth it.
    pub fn compute_each_with_one<T: Send>(
        self,
        items: impl ExactSizeIterator<Item = T>,
        work: impl Fn(T) + Sync,
    ) -> Shared {
        let thread_count_max = self.thread_count().saturating_sub(1).min(1);
        let from_ns = monotonic_ns();
        let ((), slept_ns) = crate::compute::share(
            thread_count_max,
            |give: &mut dyn FnMut(T)| items.for_each(give),
            work,
        );
        Shared { worked_ns: (monotonic_ns() - from_ns).saturating_sub(slept_ns), slept_ns }
    }

    /// As [`Executor::compute_given`], with items that there are: does `first` here, and works on them beside it.
    pub fn compute_each_beside<T: Send, R>(
        self,
        items: impl ExactSizeIterator<Item = T>,
        work: impl Fn(T) + Sync,
        first: impl FnOnce() -> R,
    ) -> R {
        let count = items.len();
        let give = |give: &mut dyn FnMut(T)| {
            items.for_each(give);
            first()
        };
        self.compute_given(count, give, work)
    }

    /// As [`Executor::compute_each_beside`], with nothing to do first.
    pub fn compute_each<T: Send>(
        self,
        items: impl ExactSizeIterator<Item = T>,
        work: impl Fn(T) + Sync,
    ) {
        self.compute_each_beside(items, work, || ());
    }
}

/// What became of work that was shared.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// Nanoseconds that this thread worked.
    pub worked_ns: u64,
    /// Nanoseconds that it then slept until the other was done; 0 where that was done about when this one was. Where it was not, other
    /// programs may have its processor, or it waits for a device.
    pub slept_ns: u64,
}

/// What a thread returned. A panic there goes on here.
fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A thread of [`Executor::spawn`].
#[derive(Debug)]
pub struct Service {
    thread: std::thread::JoinHandle<()>,
}

impl Service {
    /// Waits until its work has returned. A panic there goes on here.
    pub fn join(self) {
        if let Err(panic) = self.thread.join() {
            std::panic::resume_unwind(panic);
        }
    }
}

/// All of them together, as a filesystem is opened with.
#[derive(Debug)]
pub struct Runtime {
    /// Threads.
    pub executor: Executor,
    /// Time.
    pub clock: Clock,
    /// Identifiers.
    pub identifiers: Identifiers,
}

impl Runtime {
    /// The real ones, with a thread a core.
    pub fn system() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            executor: Executor::Threads(cores),
            clock: Clock::System,
            identifiers: Identifiers::System,
        }
    }

    /// Fixed time and seeded identifiers, with a thread a core: for images that must come out the
    /// same each time.
    pub fn reproducible(time: Time, seed: u64) -> Self {
        Self {
            clock: Clock::Fixed(time),
            identifiers: Identifiers::Seeded(AtomicU64::new(seed)),
            ..Self::system()
        }
    }

    /// Fixed time, seeded identifiers and no threads: a run that replays.
    pub fn simulated(seed: u64) -> Self {
        Self {
            executor: Executor::Inline,
            clock: Clock::Fixed(Time { sec: 1_700_000_000, nsec: 0 }),
            identifiers: Identifiers::Seeded(AtomicU64::new(seed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_each_part_visits_all_and_reports_the_first_error() {
        for executor in [Executor::Inline, Executor::Threads(1), Executor::Threads(3)] {
            let mut items: Vec<u32> = (0..10).collect();
            let double = |part: &mut [u32]| -> Result<(), u32> {
                part.iter_mut().for_each(|item| *item *= 2);
                Ok(())
            };
            executor.for_each_part(&mut items, double).unwrap();
            assert_eq!(items, (0..10).map(|item| item * 2).collect::<Vec<_>>());
            let first = |part: &mut [u32]| part.first().map_or(Ok(()), |item| Err(*item));
            assert_eq!(executor.for_each_part(&mut items, first), Err(0));
        }
    }

    #[test]
    fn for_each_next_does_each_item_once_beside_one_that_takes_long() {
        for executor in [Executor::Inline, Executor::Threads(1), Executor::Threads(3)] {
            let mut items = [0_u32; 10];
            let ended = AtomicU64::new(0);
            executor.for_each_next(items.iter_mut().enumerate(), |(index, item)| {
                // The first waits for the last, which is another thread's, where there are others.
                while index == 0 && executor.thread_count() > 1 && ended.load(Ordering::Relaxed) < 9
                {
                    std::thread::yield_now();
                }
                *item += 1;
                ended.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(items, [1; 10], "{executor:?}");
        }
        Executor::Threads(2).for_each_next(std::iter::empty::<()>(), |()| panic!("none"));
    }

    #[test]
    fn seeded_identifiers_same_seed_same_sequence() {
        let (a, b) = (Runtime::simulated(7), Runtime::simulated(7));
        for _ in 0..10 {
            assert_eq!(a.identifiers.uuid(), b.identifiers.uuid());
        }
        assert_ne!(Runtime::simulated(8).identifiers.uuid(), a.identifiers.uuid());
    }

    #[test]
    fn system_identifiers_differ() {
        let runtime = Runtime::system();
        assert_ne!(runtime.identifiers.uuid(), runtime.identifiers.uuid());
    }
}
