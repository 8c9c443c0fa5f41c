//! Locks and counters of an explorer of interleavings (`shuttle`), by the names and the shapes that
//! [`sync`](super::sync) has. Only with `--cfg ubtrfs_explore`, for tests of what is built on these; see `make explore`.
//!
//! A wait with a time limit never ends by time: who relies on that is found out as a deadlock.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use shuttle::sync as explored;

pub use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub use shuttle::sync::{RwLockReadGuard, RwLockWriteGuard};
pub use shuttle::thread::yield_now;
pub use std::sync::Arc;

const POISONED: &str = "a test that panicked is over";

/// See `parking_lot::Mutex`.
#[derive(Debug, Default)]
pub struct Mutex<T>(explored::Mutex<T>);

/// See `parking_lot::MutexGuard`.
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// Always there, but within a wait.
    guard: Option<explored::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// Not locked.
    pub fn new(value: T) -> Self {
        Self(explored::Mutex::new(value))
    }

    /// Waits for it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { mutex: self, guard: Some(self.0.lock().expect(POISONED)) }
    }

    /// `None` if it is locked.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = self.0.try_lock().ok()?;
        Some(MutexGuard { mutex: self, guard: Some(guard) })
    }

    /// What it guarded.
    pub fn into_inner(self) -> T {
        self.0.into_inner().expect(POISONED)
    }

    /// Without locking: nobody else has it.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().expect(POISONED)
    }
}

impl<T> MutexGuard<'_, T> {
    /// Lets those that wait have a turn.
    pub fn bump(guard: &mut Self) {
        guard.guard = None;
        guard.guard = Some(guard.mutex.0.lock().expect(POISONED));
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_ref().expect("locked")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("locked")
    }
}

/// See `parking_lot::RwLock`.
#[derive(Debug, Default)]
pub struct RwLock<T>(explored::RwLock<T>);

impl<T> RwLock<T> {
    /// Not locked.
    pub fn new(value: T) -> Self {
        Self(explored::RwLock::new(value))
    }

    /// Waits until nobody changes it.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().expect(POISONED)
    }

    /// Waits until nobody else has it.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().expect(POISONED)
    }

    /// Without locking: nobody else has it.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().expect(POISONED)
    }
}

/// See `parking_lot::Condvar`.
#[derive(Debug, Default)]
pub struct Condvar(explored::Condvar);

impl Condvar {
    /// Nobody waits.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits until woken.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let inner = guard.guard.take().expect("locked");
        guard.guard = Some(self.0.wait(inner).expect(POISONED));
    }

    /// Waits until woken, however long that takes; says that it was not the time that ended it.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) -> bool {
        self.wait(guard);
        false
    }

    /// Wakes one of those that wait.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all that wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// Waits for it: here nobody sleeps.
pub fn lock_brief<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// Orders of a test's threads that are chosen at random.
const RANDOM_RUNS: usize = 5000;
/// Runs in which few switches are forced at places chosen at random, which finds what needs just those.
const PCT_RUNS: usize = 2500;
/// One more than the switches.
const PCT_DEPTH: usize = 3;

/// Runs a test in many orders of its threads, which `shuttle::thread` starts. One that fails prints the schedule that replays it.
///
/// # Panics
/// If a run does, or none of its threads can go on.
pub fn check_orders(run: fn()) {
    shuttle::check_random(run, RANDOM_RUNS);
    shuttle::check_pct(run, PCT_RUNS, PCT_DEPTH);
}
