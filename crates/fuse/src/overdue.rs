//! Answers that another thread sends where the one that owes them waits for the kernel too long.
//!
//! To have something done beside a request, and be told when it is done, wakes two threads, which takes longer than most of what is done.
//! So the request does it, and somebody looks now and then whether that goes on for too long. One at a time: the others are there to
//! answer what the kernel waits for.

use std::time::Duration;

use ubtrfs_rt::{Arc, Condvar, Mutex, monotonic_ns};

/// The watcher looks so often while there is something to look at now and then.
const LOOK_EVERY: Duration = Duration::from_millis(5);

type Send = Box<dyn FnOnce() + std::marker::Send>;

/// Who waits for the kernel.
struct Wait {
    until_ns: u64,
    send: Send,
}

#[derive(Default)]
struct State {
    wait: Option<Wait>,
    /// From the beginning of a wait to its end, be it overdue.
    is_taken: bool,
    has_watcher: bool,
    /// The watcher is to be woken by who waits next.
    watcher_sleeps: bool,
    has_ended: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// What is watched.
#[derive(Default)]
pub(crate) struct Overdue {
    shared: Arc<Shared>,
}

/// Somebody waits for the kernel, until this is dropped.
#[must_use = "it ends with it"]
pub(crate) struct Waiting<'a> {
    shared: &'a Shared,
}

impl Overdue {
    /// Has `send` called once the wait that begins has taken `patience`. `None` if another waits already, or nobody can watch.
    pub(crate) fn begin(
        &self,
        patience: Duration,
        send: impl FnOnce() + std::marker::Send + 'static,
    ) -> Option<Waiting<'_>> {
        let mut state = self.shared.state.lock();
        if state.is_taken || !(state.has_watcher || self.start(&mut state)) {
            return None;
        }
        state.is_taken = true;
        let patience_ns = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        let until_ns = monotonic_ns().saturating_add(patience_ns);
        state.wait = Some(Wait { until_ns, send: Box::new(send) });
        if std::mem::take(&mut state.watcher_sleeps) {
            self.shared.changed.notify_one();
        }
        Some(Waiting { shared: &self.shared })
    }

    fn start(&self, state: &mut State) -> bool {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("ubtrfs-overdue".to_owned());
        state.has_watcher = thread.spawn(move || watch(&shared)).is_ok();
        state.has_watcher
    }
}

impl Drop for Overdue {
    fn drop(&mut self) {
        self.shared.state.lock().has_ended = true;
        self.shared.changed.notify_one();
    }
}

impl Waiting<'_> {
    /// Whether it took too long: `send` has been called, or is about to be.
    pub(crate) fn is_overdue(&self) -> bool {
        self.shared.state.lock().wait.is_none()
    }

    /// The wait is over, and `send` is not called any more; returns whether it was before, as [`Waiting::is_overdue`].
    pub(crate) fn is_over(&self) -> bool {
        self.shared.state.lock().wait.take().is_none()
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.wait = None;
        state.is_taken = false;
    }
}

fn watch(shared: &Shared) {
    let mut state = shared.state.lock();
    // Looks in vain since there was something.
    let mut in_vain = 0;
    while !state.has_ended {
        let now = monotonic_ns();
        if let Some(overdue) = state.wait.take_if(|wait| wait.until_ns <= now) {
            drop(state);
            (overdue.send)();
            state = shared.state.lock();
            continue;
        }
        in_vain = if state.wait.is_some() { 0 } else { in_vain + 1 };
        if in_vain > 1 {
            state.watcher_sleeps = true;
            shared.changed.wait(&mut state);
            in_vain = 0;
        } else {
            shared.changed.wait_for(&mut state, LOOK_EVERY);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn answer_is_sent_by_another_only_where_its_owner_waits_too_long() {
        let overdue = Overdue::default();
        for is_late in [false, true, true, false] {
            let (sender, sent) = mpsc::channel();
            let patience = if is_late { Duration::from_millis(7) } else { LONG };
            let waiting = overdue.begin(patience, move || sender.send(()).unwrap()).unwrap();
            // One at a time.
            assert!(overdue.begin(LONG, || ()).is_none());
            if is_late {
                sent.recv_timeout(LONG).expect("the watcher sends it");
            }
            assert_eq!(waiting.is_overdue(), is_late);
            assert_eq!(waiting.is_over(), is_late);
            assert!(sent.try_recv().is_err());
            // So that the watcher sleeps before the next.
            while !overdue.shared.state.lock().watcher_sleeps {
                std::thread::yield_now();
            }
        }
    }

    /// It would hold what it could send by.
    #[test]
    fn watcher_ends_with_what_it_watches() {
        let overdue = Overdue::default();
        assert!(!overdue.begin(LONG, || ()).unwrap().is_over());
        let shared = Arc::downgrade(&overdue.shared);
        drop(overdue);
        while shared.strong_count() > 0 {
            std::thread::yield_now();
        }
    }
}
