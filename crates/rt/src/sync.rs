//! Locks. One place, so that an interleaving explorer can stand in for them.

pub use std::sync::Arc;
pub use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub use std::thread::yield_now;

pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
