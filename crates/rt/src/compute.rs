//! Threads that are kept for work that only computes: to start one takes longer than the checksums of a megabyte.
//!
//! A thread is asked for only if it has nothing to do, as nobody takes work back that waits for one. So who shares his work never waits
//! for another's.

use std::sync::OnceLock;

use rayon_core::{ThreadPool, ThreadPoolBuilder};

use crate::{AtomicUsize, Mutex, Ordering};

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

/// Does `first` here, and `work` with each of the items: on kept threads, at most so many, and behind `first` here.
pub(crate) fn share<T: Send, R>(
    thread_count_max: usize,
    items: impl ExactSizeIterator<Item = T> + Send,
    work: impl Fn(T) + Sync,
    first: impl FnOnce() -> R,
) -> R {
    let count_max = thread_count_max.min(items.len());
    // A thread of somebody's pool would do others of its work while it waits for ours, with what it has locked.
    let kept = match count_max > 0 && rayon_core::current_thread_index().is_none() {
        true => KEPT.get_or_init(Kept::new).as_ref(),
        false => None,
    };
    let items = Mutex::new(items);
    let take_all = || {
        loop {
            let next = items.lock().next();
            let Some(item) = next else { return };
            work(item);
        }
    };
    let Some(kept) = kept else {
        let result = first();
        take_all();
        return result;
    };
    kept.pool.in_place_scope(|scope| {
        for _ in 0..kept.take(count_max) {
            scope.spawn(|_| {
                let _seat = Seat(kept);
                take_all();
            });
        }
        let result = first();
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

    #[test]
    fn who_shares_work_waits_for_nobody_elses() {
        let (ends, end) = mpsc::channel::<()>();
        let end = Mutex::new(end);
        let (begins, begun) = mpsc::channel();
        std::thread::scope(|scope| {
            // Every kept thread, and this one, until they are told.
            scope.spawn(|| {
                let begins = Mutex::new(begins);
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                share(
                    cores,
                    0..cores + 1,
                    |_| {
                        begins.lock().send(()).unwrap();
                        end.lock().recv().unwrap();
                    },
                    || (),
                );
            });
            begun.recv().unwrap();
            let sum = Mutex::new(0);
            share(8, 0..100, |item| *sum.lock() += item, || ());
            assert_eq!(*sum.lock(), 4950);
            for _ in 0..=std::thread::available_parallelism().map_or(1, usize::from) {
                ends.send(()).unwrap();
            }
        });
    }

    #[test]
    fn panic_in_shared_work_goes_on_in_who_shared_it_and_no_thread_is_lost() {
        for _ in 0..50 {
            let shared = std::panic::catch_unwind(|| {
                share(1, 0..100, |item| assert_ne!(item, 50), || ());
            });
            assert!(shared.is_err());
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
            share(
                8,
                0..1000,
                |_: u32| {
                    *others.lock() += u32::from(std::thread::current().id() != own);
                },
                || (),
            );
            (own, others.into_inner())
        });
        assert_ne!(own, std::thread::current().id());
        assert_eq!(others, 0);
    }
}
