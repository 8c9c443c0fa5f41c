//! What a thread keeps from one use to the next.

use std::cell::RefCell;
use std::thread::LocalKey;

/// What a thread keeps: nothing until it is needed.
pub type PerThread<T> = RefCell<Option<T>>;

/// Does `work` with what this thread keeps there. Who comes while he ends, as what is dropped then may, has nothing there any more, and
/// who comes while he is at `work` has nothing there yet: a new one of his own.
pub fn with_per_thread<T: Default, R>(
    place: &'static LocalKey<PerThread<T>>,
    work: impl FnOnce(&mut T) -> R,
) -> R {
    let mut kept = place.try_with(RefCell::take).ok().flatten().unwrap_or_default();
    let result = work(&mut kept);
    let _ = place.try_with(|place| place.replace(Some(kept)));
    result
}

#[cfg(all(test, not(ubtrfs_explore)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    thread_local! {
        static KEPT: PerThread<Vec<usize>> = const { PerThread::new(None) };
    }

    #[test]
    fn thread_finds_what_it_kept_and_another_does_not() {
        with_per_thread(&KEPT, |kept| kept.push(1));
        with_per_thread(&KEPT, |kept| {
            with_per_thread(&KEPT, |inner| assert!(inner.is_empty()));
            kept.push(2);
        });
        with_per_thread(&KEPT, |kept| assert_eq!(*kept, [1, 2]));
        std::thread::spawn(|| with_per_thread(&KEPT, |kept| assert!(kept.is_empty())))
            .join()
            .unwrap();
    }

    /// What is dropped when its thread ends and uses it then had nothing there any more, and the process was aborted.
    #[test]
    fn thread_that_ends_has_a_new_one() {
        static USED: AtomicUsize = AtomicUsize::new(0);
        struct User;
        impl Drop for User {
            fn drop(&mut self) {
                with_per_thread(&KEPT, |kept| kept.push(0));
                USED.fetch_add(1, Ordering::Relaxed);
            }
        }
        thread_local! {
            static BEFORE: User = const { User };
            static BEHIND: User = const { User };
        }
        std::thread::spawn(|| {
            BEFORE.with(|_| ());
            with_per_thread(&KEPT, |_| ());
            BEHIND.with(|_| ());
        })
        .join()
        .unwrap();
        assert_eq!(USED.load(Ordering::Relaxed), 2);
    }
}
