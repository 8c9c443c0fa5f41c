//! Threads that are kept for work that only computes: to start one takes longer than the checksums of a megabyte.
//!
//! A thread is asked for only if it has nothing to do, as nobody takes work back that waits for one. So who shares his work never waits
//! for another's.

use std::collections::VecDeque;
use std::sync::OnceLock;

use rayon_core::{ThreadPool, ThreadPoolBuilder};

use crate::{AtomicUsize, Condvar, Mutex, Ordering};

/// Kept threads, one less than processors: who shares his work has one.
static KEPT: OnceLock<Option<Kept>> = OnceLock::new();

struct Kept {
    pool: ThreadPool,
    /// Threads that nobody asked for.
    free_count: AtomicUsize,
}

impl Kept {
    /// None where the system gives no thread.
    fn new() -> Option<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = cores.saturating_sub(1).max(1);
        let builder = ThreadPoolBuilder::new().num_threads(count);
        let builder = builder.thread_name(|index| format!("ubtrfs-compute-{index}"));
        Some(Self { pool: builder.build().ok()?, free_count: AtomicUsize::new(count) })
    }

    /// Asks for threads; returns how many.
    fn take(&self, count_max: usize) -> usize {
        let left = |free: usize| Some(free - free.min(count_max));
        let free = self.free_count.fetch_update(Ordering::Acquire, Ordering::Relaxed, left);
        free.map_or(0, |free| free.min(count_max))
    }

    fn give_back(&self) {
        self.free_count.fetch_add(1, Ordering::Release);
    }
}

/// Items that were given and not taken.
struct Queue<T> {
    items: Mutex<Given<T>>,
    came: Condvar,
}

struct Given<T> {
    items: VecDeque<T>,
    /// No more come.
    are_all: bool,
}

impl<T> Queue<T> {
    fn new() -> Self {
        let given = Given { items: VecDeque::new(), are_all: false };
        Self { items: Mutex::new(given), came: Condvar::new() }
    }

    fn give(&self, item: T) {
        self.items.lock().items.push_back(item);
        self.came.notify_one();
    }

    /// The next one, for which is waited as long as more may come.
    fn take(&self) -> Option<T> {
        let mut given = self.items.lock();
        loop {
            let next = given.items.pop_front();
            if next.is_some() || given.are_all {
                return next;
            }
            self.came.wait(&mut given);
        }
    }
}

/// Says that no more come, also if who gives them panics: others wait for them.
struct End<'a, T>(&'a Queue<T>);

impl<T> Drop for End<'_, T> {
    fn drop(&mut self) {
        self.0.items.lock().are_all = true;
        self.0.came.notify_all();
    }
}

/// Runs `give` here, and `work` with each of the items that it gives: on kept threads, at most so many, from then on, and behind `give`
/// here.
pub(crate) fn share<T: Send, R>(
    thread_count_max: usize,
    give: impl FnOnce(&mut dyn FnMut(T)) -> R,
    work: impl Fn(T) + Sync,
) -> R {
    let queue = Queue::new();
    let give_all = || {
        let _end = End(&queue);
        give(&mut |item| queue.give(item))
    };
    let take_all = || {
        while let Some(item) = queue.take() {
            work(item);
        }
    };
    // A thread of somebody's pool would do others of its work while it waits for ours, with what it has locked.
    let kept = match thread_count_max > 0 && rayon_core::current_thread_index().is_none() {
        true => KEPT.get_or_init(Kept::new).as_ref(),
        false => None,
    };
    let Some(kept) = kept else {
        let result = give_all();
        take_all();
        return result;
    };
    kept.pool.in_place_scope(|scope| {
        for _ in 0..kept.take(thread_count_max) {
            scope.spawn(|_| {
                let _seat = Seat(kept);
                take_all();
            });
        }
        let result = give_all();
        take_all();
        result
    })
}

/// A kept thread that works; free again also if that panics.
struct Seat(&'static Kept);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

#[cfg(all(test, not(ubtrfs_explore)))]
mod tests {
    use std::sync::mpsc;

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

    #[test]
    fn items_are_worked_on_while_more_are_given() {
        let (tells, told) = mpsc::channel();
        let tells = Mutex::new(tells);
        // The second one is not given before somebody had the first.
        let give = |give: &mut dyn FnMut(u32)| {
            give(0);
            told.recv().unwrap();
            give(1);
        };
        while KEPT.get_or_init(Kept::new).as_ref().unwrap().free_count.load(Ordering::Acquire) == 0
        {
            crate::yield_now();
        }
        share(8, give, |_| tells.lock().send(()).unwrap());
        assert_eq!(told.try_iter().count(), 1);
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
        let kept = KEPT.get().unwrap().as_ref().unwrap();
        // Other tests may have some for a moment.
        while kept.free_count.load(Ordering::Acquire) == 0 {
            crate::yield_now();
        }
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
