//! Locks. One place, so that an interleaving explorer can stand in for them.

pub use std::sync::Arc;
pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub use std::thread::yield_now;

pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Looks at a mutex before a thread sleeps for it: about ten microseconds.
const LOOKS_BEFORE_SLEEP: u32 = 256;

/// Locks a mutex that is held for a few microseconds at a time. Who finds it taken looks again for about as long before he
/// sleeps: to be woken takes longer than that.
pub fn lock_brief<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    for _ in 0..LOOKS_BEFORE_SLEEP {
        if let Some(guard) = mutex.try_lock() {
            return guard;
        }
        std::hint::spin_loop();
    }
    mutex.lock()
}
