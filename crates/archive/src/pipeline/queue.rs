//! The bounded queue between source, workers and sink, which keeps the order of submission.
//!
//! Slots are numbered in the order of `put_work`. States of a slot, in `State::slots`:
//! Waiting -> (take_work) Working -> (put_result) Done -> (take_result) gone. One lock; nobody
//! holds it while loading or applying.

use std::collections::VecDeque;

use ubtrfs_rt::{Condvar, Mutex};

use crate::batch::Batch;
use crate::error::{Error, Result};

/// What was loaded of a batch, and what ended that, if anything did.
type Loaded<D> = (Batch<D>, Result<()>);

enum Slot<L, D> {
    Waiting(Batch<L>),
    Working,
    Done(Loaded<D>),
}

struct State<L, D> {
    /// The oldest slot that the sink has not taken is the first.
    slots: VecDeque<(Slot<L, D>, usize)>,
    /// Number of the first slot.
    first: u64,
    /// Number of the next slot that a worker takes.
    next_work: u64,
    /// Bytes put and not yet released.
    ahead_bytes: usize,
    /// The source ended, with this error.
    ended: Option<Option<Error>>,
    /// Somebody gave up: everybody stops.
    stopped: bool,
}

/// The queue; see the module.
pub(super) struct Queue<L, D> {
    state: Mutex<State<L, D>>,
    work: Condvar,
    room: Condvar,
    done: Condvar,
    batches_max: usize,
    bytes_max: usize,
}

impl<L, D> Queue<L, D> {
    pub(super) fn new(batches_max: usize, bytes_max: usize) -> Self {
        let state = State {
            slots: VecDeque::new(),
            first: 0,
            next_work: 0,
            ahead_bytes: 0,
            ended: None,
            stopped: false,
        };
        Self {
            state: Mutex::new(state),
            work: Condvar::new(),
            room: Condvar::new(),
            done: Condvar::new(),
            batches_max,
            bytes_max,
        }
    }

    /// Submits a batch when there is room; `false` if the queue was stopped.
    pub(super) fn put_work(&self, batch: Batch<L>) -> bool {
        let mut state = self.state.lock();
        while !state.stopped
            && !state.slots.is_empty()
            && (state.slots.len() >= self.batches_max || state.ahead_bytes >= self.bytes_max)
        {
            self.room.wait(&mut state);
        }
        let bytes = batch.memory_bytes();
        state.ahead_bytes += bytes;
        state.slots.push_back((Slot::Waiting(batch), bytes));
        self.work.notify_one();
        !state.stopped
    }

    /// No more batches come.
    pub(super) fn end(&self, error: Option<Error>) {
        self.state.lock().ended = Some(error);
        self.work.notify_all();
        self.done.notify_all();
    }

    /// The oldest batch that no worker has; `None` at the end.
    pub(super) fn take_work(&self) -> Option<(u64, Batch<L>)> {
        let mut state = self.state.lock();
        loop {
            if state.stopped {
                return None;
            }
            let index = usize::try_from(state.next_work - state.first).expect("few slots");
            if let Some((slot, _)) = state.slots.get_mut(index)
                && let Slot::Waiting(batch) = std::mem::replace(slot, Slot::Working)
            {
                let ticket = state.next_work;
                state.next_work += 1;
                return Some((ticket, batch));
            }
            if state.ended.is_some() {
                return None;
            }
            self.work.wait(&mut state);
        }
    }

    /// Gives back the loaded batch of `ticket`.
    pub(super) fn put_result(&self, ticket: u64, result: Loaded<D>) {
        let mut state = self.state.lock();
        let index = usize::try_from(ticket - state.first).expect("few slots");
        if let Some((slot, _)) = state.slots.get_mut(index) {
            *slot = Slot::Done(result);
        }
        if index == 0 {
            self.done.notify_one();
        }
    }

    /// The next loaded batch in order and the bytes to release after it; `None` at the end.
    pub(super) fn take_result(&self) -> Option<(Loaded<D>, usize)> {
        let mut state = self.state.lock();
        loop {
            if matches!(state.slots.front(), Some((Slot::Done(_), _))) {
                let front = state.slots.pop_front();
                state.first += 1;
                self.room.notify_one();
                if let Some((Slot::Done(result), bytes)) = front {
                    return Some((result, bytes));
                }
            }
            if state.slots.is_empty()
                && let Some(error) = &mut state.ended
            {
                return error.take().map(|error| ((Batch::default(), Err(error)), 0));
            }
            if state.stopped {
                return None;
            }
            self.done.wait(&mut state);
        }
    }

    /// The bytes of a batch were applied.
    pub(super) fn release(&self, bytes: usize) {
        self.state.lock().ahead_bytes -= bytes;
        self.room.notify_one();
    }

    fn stop(&self) {
        self.state.lock().stopped = true;
        self.work.notify_all();
        self.room.notify_all();
        self.done.notify_all();
    }

    /// Stops everybody when dropped.
    pub(super) fn stop_on_drop(&self) -> Stop<'_, L, D> {
        Stop { queue: self, only_on_panic: false }
    }

    /// Stops everybody when dropped by a panic, so that the others do not wait for ever.
    pub(super) fn stop_on_panic(&self) -> Stop<'_, L, D> {
        Stop { queue: self, only_on_panic: true }
    }
}

/// Stops the queue when dropped.
pub(super) struct Stop<'a, L, D> {
    queue: &'a Queue<L, D>,
    only_on_panic: bool,
}

impl<L, D> Drop for Stop<'_, L, D> {
    fn drop(&mut self) {
        if !self.only_on_panic || std::thread::panicking() {
            self.queue.stop();
        }
    }
}
