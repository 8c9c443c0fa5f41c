//! The one door to locks, condition variables, threads, time and random identifiers.
//!
//! Everything below takes these from here, so that a run can be replayed from a seed and images
//! can be reproduced byte for byte.
#![forbid(unsafe_code)]

mod compute;
#[cfg(ubtrfs_explore)]
mod explore;
mod per_thread;
mod source;
#[cfg(not(ubtrfs_explore))]
mod sync;

#[cfg(ubtrfs_explore)]
use explore as sync;
#[cfg(ubtrfs_explore)]
pub use explore::check_orders;
pub use per_thread::{PerThread, with_per_thread};
pub use source::{Clock, Executor, Identifiers, Runtime, Service, Shared, Time, monotonic_ns};

pub use sync::{
    Arc, AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, RwLock,
    RwLockReadGuard, RwLockWriteGuard, lock_brief, yield_now,
};
