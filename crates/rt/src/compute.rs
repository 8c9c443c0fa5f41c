//! Threads that are kept for work that computes, or copies out of the system's cache: to start one takes longer than the checksums of a megabyte.
//!
//! A thread is asked for only if it has nothing to do, as nobody takes work back that waits for one. So who shares his work never waits
//! for another's.

use std::collections::VecDeque;
use std::sync::{OnceLock, PoisonError};

use rayon_core::{ThreadPool, ThreadPoolBuilder};
use rustix::process::getpid;
use rustix::thread::{sched_getaffinity, sched_setaffinity};

use crate::{AtomicUsize, Mutex, Ordering, monotonic_ns};

/// Kept threads, one less than processors: who shares his work has one.
static KEPT: OnceLock<Kept> = OnceLock::new();
/// Held by who makes them.
static MAKING: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Turns of a loop that waits for who works still, before his waker is waited for: to sleep and be woken takes some 50 µs in a virtual machine,
/// and a short piece of work less. 40 µs on an AMD EPYC.
const SPINS_MAX: u32 = 2000;

struct Kept {
    pool: ThreadPool,
    /// Threads that nobody asked for.
    free_count: AtomicUsize,
}

impl Kept {
    /// None where the system gives no thread; the next one asks again.
    fn get() -> Option<&'static Self> {
        if KEPT.get().is_none() {
            let _alone = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
            if KEPT.get().is_none() {
                // By a thread that may run wherever the process may: the first to share work may be bound to one processor, and whom he
                // starts would be, too.
                let made = std::thread::Builder::new().spawn(|| {
                    if let Ok(processors) = sched_getaffinity(Some(getpid())) {
                        let _ = sched_setaffinity(None, &processors);
                    }
                    Self::new()
                });
                let made = made.ok()?.join().ok()??;
                KEPT.get_or_init(|| made);
            }
        }
        KEPT.get()
    }

    fn new() -> Option<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = cores.saturating_sub(1).max(1);
        let builder = ThreadPoolBuilder::new().num_threads(count);
        let builder = builder.thread_name(|index| format!("ubtrfs-compute-{index}"));
        Some(Self { pool: builder.build().ok()?, free_count: AtomicUsize::new(count) })
    }

    /// Asks for a thread; returns whether it has one.
    fn take(&self) -> bool {
        let left = |free: usize| free.checked_sub(1);
        self.free_count.fetch_update(Ordering::Acquire, Ordering::Relaxed, left).is_ok()
    }

    fn give_back(&self) {
        self.free_count.fetch_add(1, Ordering::Release);
    }
}

/// Runs `give` here, and `work` with each of the items that it gives: on kept threads, at most so many, from then on, and behind `give`
/// here. A thread that finds no more items goes; for one that is given later another is asked for. Returns what `give` did, and for how
/// many ns this thread slept until the others were done.
pub(crate) fn share<T: Send, R>(
    thread_count_max: usize,
    give: impl FnOnce(&mut dyn FnMut(T)) -> R,
    work: impl Fn(T) + Sync,
) -> (R, u64) {
    // A thread of somebody's pool would do others of its work while it waits for ours, with what it has locked.
    let kept = match thread_count_max > 0 && rayon_core::current_thread_index().is_none() {
        true => Kept::get(),
        false => None,
    };
    let items = Mutex::new(VecDeque::new());
    let take_all = || {
        loop {
            let next = items.lock().pop_front();
            let Some(item) = next else { return };
            work(item);
        }
    };
    let Some(kept) = kept else {
        let result = give(&mut |item| items.lock().push_back(item));
        take_all();
        return (result, 0);
    };
    let working_count = AtomicUsize::new(0);
    let (result, slept_from_ns) = kept.pool.in_place_scope(|scope| {
        let result = give(&mut |item| {
            items.lock().push_back(item);
            if working_count.load(Ordering::Relaxed) < thread_count_max && kept.take() {
                working_count.fetch_add(1, Ordering::Relaxed);
                scope.spawn(|_| {
                    let _seat = Seat { kept, working_count: &working_count };
                    take_all();
                });
            }
        });
        take_all();
        let is_working = || working_count.load(Ordering::Acquire) > 0;
        (0..SPINS_MAX).take_while(|_| is_working()).for_each(|_| std::hint::spin_loop());
        (result, is_working().then(monotonic_ns))
    });
    (result, slept_from_ns.map_or(0, |from_ns| monotonic_ns() - from_ns))
}

/// A kept thread that works; free again also if that panics.
struct Seat<'a> {
    kept: &'static Kept,
    working_count: &'a AtomicUsize,
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.working_count.fetch_sub(1, Ordering::Release);
        self.kept.give_back();
    }
}

#[cfg(all(test, not(ubtrfs_explore)))]
mod tests {
    use std::sync::mpsc;

    use rustix::thread::CpuSet;

    use super::*;
    use crate::Executor;

    #[test]
    fn each_item_is_worked_on_once_beside_what_is_done_first() {
        for executor in [Executor::Inline, Executor::Threads(1), Executor::Threads(4)] {
            let mut items = vec![0u32; 1000];
            let work = |(index, item): (usize, &mut u32)| *item += u32::try_from(index).unwrap();
            let first = executor.compute_each_beside(items.iter_mut().enumerate(), work, || "done");
            assert_eq!(first, "done");
            assert!(items.iter().copied().eq(0..1000), "{executor:?}");
            executor.compute_each(std::iter::empty::<()>(), |()| panic!("none"));
        }
    }

    #[test]
    fn without_threads_the_items_come_behind_what_is_first_and_in_their_order() {
        let seen = Mutex::new(Vec::new());
        let work = |item| seen.lock().push(item);
        Executor::Inline.compute_each_beside([1, 2, 3].into_iter(), work, || seen.lock().push(0));
        assert_eq!(*seen.lock(), [0, 1, 2, 3]);
    }

    /// Gives numbers below that.
    fn numbers(count: u32) -> impl FnOnce(&mut dyn FnMut(u32)) {
        move |give| (0..count).for_each(give)
    }

    /// Other tests have some for a moment.
    fn wait_for_a_free_one() {
        while Kept::get().unwrap().free_count.load(Ordering::Acquire) == 0 {
            crate::yield_now();
        }
    }

    /// The first to share work was bound to a processor, and the kept threads were with him, for good.
    #[test]
    fn kept_threads_run_wherever_the_process_may() {
        let all = sched_getaffinity(Some(getpid())).unwrap();
        let is_bound = std::thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set((0..CpuSet::MAX_CPU).find(|processor| all.is_set(*processor)).unwrap());
            sched_setaffinity(None, &one).unwrap();
            wait_for_a_free_one();
            let seen = Kept::get().unwrap().pool.install(|| sched_getaffinity(None).unwrap());
            sched_getaffinity(None).unwrap() != seen || all.count() == 1
        });
        assert!(is_bound.join().unwrap());
    }

    /// While the giver is at something else, others have the threads.
    #[test]
    fn thread_without_items_is_free_while_more_may_be_given() {
        let give = |give: &mut dyn FnMut(u32)| {
            give(0);
            wait_for_a_free_one();
            give(1);
        };
        let sum = Mutex::new(0);
        share(8, give, |item| *sum.lock() += item);
        assert_eq!(sum.into_inner(), 1);
    }

    #[test]
    fn items_are_worked_on_while_more_are_given() {
        let (tells, told) = mpsc::channel();
        let tells = Mutex::new(tells);
        // More are given until somebody had one: other tests may have the threads for a moment.
        let give = |give: &mut dyn FnMut(())| {
            let mut count = 0;
            while told.recv_timeout(std::time::Duration::from_millis(1)).is_err() {
                give(());
                count += 1;
            }
            count
        };
        let (given_count, _) = share(8, give, |()| tells.lock().send(()).unwrap());
        assert_eq!(told.try_iter().count() + 1, given_count);
    }

    #[test]
    fn who_shares_work_waits_for_nobody_elses() {
        let (ends, end) = mpsc::channel::<()>();
        let end = Mutex::new(end);
        let (begins, begun) = mpsc::channel();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = u32::try_from(cores).unwrap() + 1;
        std::thread::scope(|scope| {
            // Every kept thread, and this one, until they are told.
            scope.spawn(|| {
                let begins = Mutex::new(begins);
                let work = |_| {
                    begins.lock().send(()).unwrap();
                    end.lock().recv().unwrap();
                };
                share(cores, numbers(count), work);
            });
            begun.recv().unwrap();
            let sum = Mutex::new(0);
            share(8, numbers(100), |item| *sum.lock() += item);
            assert_eq!(*sum.lock(), 4950);
            (0..count).for_each(|_| ends.send(()).unwrap());
        });
    }

    #[test]
    fn panic_in_shared_work_goes_on_in_who_shared_it_and_no_thread_is_lost() {
        for _ in 0..50 {
            let in_work = || share(1, numbers(100), |item| assert_ne!(item, 50));
            assert!(std::panic::catch_unwind(in_work).is_err());
            let in_giving = || share(1, |_: &mut dyn FnMut(u32)| panic!("no more"), |_| {});
            assert!(std::panic::catch_unwind(in_giving).is_err());
        }
        wait_for_a_free_one();
    }

    #[test]
    fn thread_of_another_pool_does_its_work_itself() {
        let pool = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let (own, others) = pool.install(|| {
            let own = std::thread::current().id();
            let others = Mutex::new(0);
            let is_other = || u32::from(std::thread::current().id() != own);
            share(8, numbers(1000), |_| *others.lock() += is_other());
            (own, others.into_inner())
        });
        assert_ne!(own, std::thread::current().id());
        assert_eq!(others, 0);
    }
}
