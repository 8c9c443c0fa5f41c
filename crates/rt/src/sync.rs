//! Locks. One place, so that an interleaving explorer can stand in for them.

pub use std::sync::Arc;
pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub use std::thread::yield_now;

pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Looks at a mutex before a thread sleeps for it, and the pauses of the processor between two of them at most: some tens of
/// microseconds in all.
const LOOKS_BEFORE_SLEEP: u32 = 64;
const PAUSES_MAX: u32 = 32;

/// Locks a mutex that is held for a few microseconds at a time. Who finds it taken looks again for some time before he
/// sleeps: to be woken takes longer than that. He looks ever less often, so that who holds it goes on for some
/// turns with what it guards in his processor's cache, instead of handing that over at each.
pub fn lock_brief<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    let mut pauses = 1;
    for _ in 0..LOOKS_BEFORE_SLEEP {
        if let Some(guard) = mutex.try_lock() {
            return guard;
        }
        for _ in 0..pauses {
            std::hint::spin_loop();
        }
        pauses = (pauses * 2).min(PAUSES_MAX);
    }
    mutex.lock()
}
