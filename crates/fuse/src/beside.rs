//! What a request may wait for, but not for ever, is done by a thread beside it. One that has done its work waits for more: to start one
//! costs several times what most of it does.

use std::sync::{Weak, mpsc};

use ubtrfs_rt::{Arc, Mutex};

type Work = Box<dyn FnOnce() + Send>;

/// Work for a thread, and what it is asked by for more.
struct Job {
    work: Work,
    asked_by: mpsc::Sender<Job>,
}

/// The thread that waits, if one does.
type Idle = Mutex<Option<mpsc::Sender<Job>>>;

/// Threads that work beside requests.
#[derive(Default)]
pub(crate) struct Beside {
    idle: Arc<Idle>,
}

impl Beside {
    /// Has it done. However long others take, it begins at once.
    ///
    /// # Errors
    /// The system's, where it gives no thread.
    pub(crate) fn run(&self, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let mut work: Work = Box::new(work);
        let waiting = self.idle.lock().take();
        if let Some(thread) = waiting {
            match thread.send(Job { work, asked_by: thread.clone() }) {
                Ok(()) => return Ok(()),
                Err(mpsc::SendError(job)) => work = job.work,
            }
        }
        let idle = Arc::downgrade(&self.idle);
        let thread = std::thread::Builder::new().name("ubtrfs-beside".to_owned());
        thread.spawn(move || serve(&idle, work)).map(drop)
    }
}

/// Does one after the other, as long as no other thread waits for work and somebody may have some.
fn serve(idle: &Weak<Idle>, first: Work) {
    let (sender, jobs) = mpsc::channel();
    let mut job = Job { work: first, asked_by: sender };
    loop {
        (job.work)();
        {
            let Some(idle) = idle.upgrade() else { return };
            let mut idle = idle.lock();
            if idle.is_some() {
                return;
            }
            *idle = Some(job.asked_by);
        }
        job = match jobs.recv() {
            Ok(job) => job,
            Err(mpsc::RecvError) => return,
        };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// The thread that does it tells who it is, before it waits for the signal to end.
    fn run(beside: &Beside) -> (std::thread::ThreadId, mpsc::Sender<()>) {
        let (tell, told) = mpsc::channel();
        let (end, ends) = mpsc::channel();
        let work = move || {
            tell.send(std::thread::current().id()).unwrap();
            let _ = ends.recv();
        };
        beside.run(work).unwrap();
        (told.recv_timeout(LONG).expect("it begins at once"), end)
    }

    #[test]
    fn one_that_is_stuck_keeps_nobody_and_one_that_is_done_is_used_again() {
        let beside = Beside::default();
        let (stuck, end) = run(&beside);
        let (other, end_other) = run(&beside);
        assert_ne!(stuck, other);
        drop(end_other);
        while beside.idle.lock().is_none() {
            std::thread::yield_now();
        }
        let (again, end_again) = run(&beside);
        assert_eq!(again, other);
        drop((end, end_again));
    }

    /// They hold the kernel's device, or whatever their work does, no longer than that.
    #[test]
    fn one_that_waits_ends_with_the_last_who_could_ask_it() {
        let beside = Beside::default();
        let (_, end) = run(&beside);
        drop(end);
        while beside.idle.lock().is_none() {
            std::thread::yield_now();
        }
        let thread = beside.idle.lock().clone().unwrap();
        drop(beside);
        let (held, gone) = mpsc::channel::<()>();
        let work: Work = Box::new(move || drop(held));
        // It does what it gets, and then nobody has a place for it to wait.
        let _ = thread.send(Job { work, asked_by: thread.clone() });
        assert_eq!(gone.recv_timeout(LONG), Err(mpsc::RecvTimeoutError::Disconnected));
        while thread.send(Job { work: Box::new(|| ()), asked_by: thread.clone() }).is_ok() {
            std::thread::yield_now();
        }
    }
}
