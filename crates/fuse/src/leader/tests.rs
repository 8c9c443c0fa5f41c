use std::collections::VecDeque;
use std::sync::mpsc;
use std::time::Instant;

use zerocopy::IntoBytes as _;

use super::*;
use crate::abi::InHeader;

#[derive(Default)]
struct Queue {
    requests: VecDeque<Vec<u8>>,
    has_ended: bool,
}

/// Requests that a test puts in.
#[derive(Default)]
struct Queued {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Queued {
    fn put(&self, opcode: u32, unique: u64) {
        let len = u32::try_from(size_of::<InHeader>()).unwrap();
        let header = InHeader { len, opcode, unique, ..InHeader::default() };
        self.queue.lock().requests.push_back(header.as_bytes().to_vec());
        self.changed.notify_all();
    }

    fn end(&self) {
        self.queue.lock().has_ended = true;
        self.changed.notify_all();
    }
}

impl Transport for Queued {
    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        let mut queue = self.queue.lock();
        match queue.requests.pop_front() {
            Some(request) => {
                buffer[..request.len()].copy_from_slice(&request);
                Ok(Received::Request(request.len()))
            }
            None if queue.has_ended => Ok(Received::End),
            None => Ok(Received::Nothing),
        }
    }

    fn wait(&self) -> Result<(), Errno> {
        let mut queue = self.queue.lock();
        while queue.requests.is_empty() && !queue.has_ended {
            self.changed.wait(&mut queue);
        }
        Ok(())
    }

    fn has_request(&self) -> bool {
        !self.queue.lock().requests.is_empty()
    }

    fn send(&self, _answer: &[u8]) -> Result<(), Errno> {
        Ok(())
    }

    fn abort(&self, _device: Option<&str>) {
        self.end();
    }

    fn stop(&self) {}
}

fn unique(bytes: &[u8]) -> u64 {
    Request::parse(bytes).unwrap().header.unique
}

/// Has `count` threads serve what `feed` puts in, until that returns. Gives what each answered.
fn serve(
    count: usize,
    looking: Duration,
    feed: impl FnOnce(&Queued),
    answer: impl Fn(u64) + Sync,
) -> Vec<Vec<u64>> {
    serve_by(&Leaders::new(looking), count, feed, answer)
}

/// As [`serve`], where it is to be seen who led.
fn serve_by(
    leaders: &Leaders,
    count: usize,
    feed: impl FnOnce(&Queued),
    answer: impl Fn(u64) + Sync,
) -> Vec<Vec<u64>> {
    let queued = Queued::default();
    std::thread::scope(|scope| {
        let work = || {
            let mut answered = Vec::new();
            let result = leaders.work(&queued, &mut [0; 64], |bytes| {
                answer(unique(bytes));
                answered.push(unique(bytes));
                Ok(())
            });
            result.unwrap();
            answered
        };
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(work)).collect();
        feed(&queued);
        queued.end();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn requests_of_all_kinds_are_answered_once_by_any_number_of_threads() {
    const OPCODES: [u32; 5] =
        [opcode::LOOKUP, opcode::FORGET, opcode::FSYNC, opcode::RELEASE, opcode::WRITE];
    for (count, looking) in
        [(1, LOOKING), (2, Duration::ZERO), (2, LOOKING), (5, LOOKING), (5, Duration::ZERO)]
    {
        let feed = |queued: &Queued| {
            for at in 0..2000 {
                queued.put(OPCODES[usize::try_from(at).unwrap() % OPCODES.len()], at);
                if at % 100 == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        };
        let mut all = serve(count, looking, feed, |_| ()).concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..2000), "{count} threads, {looking:?}");
    }
}

/// One that asks for the next only when it has the last one's answer is served by one thread: nobody is woken for it.
#[test]
fn requests_one_after_the_other_are_answered_by_the_leader() {
    const COUNT: u64 = 500;
    let (told, heard) = mpsc::channel();
    // Long enough that it never sleeps, whatever else the machine does.
    let leaders = Leaders::new(Duration::from_secs(3600));
    let begun = Instant::now();
    let (mut terms, mut late_terms, mut lasted) = (0, 0, Duration::ZERO);
    let feed = |queued: &Queued| {
        for at in 0..COUNT {
            queued.put(opcode::LOOKUP, at);
            heard.recv().unwrap();
        }
        // Before the end, which each takes in a term of its own.
        let state = leaders.state.lock();
        (terms, late_terms) = (state.terms, state.late_terms);
        lasted = begun.elapsed();
    };
    let answered = serve_by(&leaders, 3, feed, |_| told.send(()).unwrap()).concat();
    assert!(answered.len() == usize::try_from(COUNT).unwrap());
    // Behind the first one leads only who follows a leader whose thread gets no time for so long.
    assert_eq!(terms, 1 + late_terms);
    let late_max = lasted.as_millis() / WATCH_EVERY.as_millis();
    assert!(u128::from(late_terms) <= late_max, "{late_terms} in {lasted:?}");
}

/// A request may wait for what another one brings.
#[test]
fn request_behind_one_that_waits_is_answered() {
    for (first, looking) in [
        (opcode::LOOKUP, LOOKING),
        (opcode::LOOKUP, Duration::ZERO),
        (opcode::FSYNC, LOOKING),
        (opcode::RELEASE, LOOKING),
    ] {
        let (told, heard) = mpsc::channel();
        let heard = Mutex::new(heard);
        let (begun, has_begun) = mpsc::channel();
        let answer = |unique: u64| match unique {
            1 => {
                begun.send(()).unwrap();
                heard.lock().recv().unwrap();
            }
            _ => told.send(()).unwrap(),
        };
        let feed = |queued: &Queued| {
            queued.put(first, 1);
            has_begun.recv().unwrap();
            queued.put(opcode::LOOKUP, 2);
        };
        let answered = serve(2, looking, feed, answer).concat();
        assert_eq!(answered.len(), 2);
    }
}

#[test]
fn error_of_one_thread_leaves_the_lead_to_others() {
    let (queued, leaders) = (Queued::default(), Leaders::new(LOOKING));
    let answered = Mutex::new(0);
    let work = || {
        leaders.work(&queued, &mut [0; 64], |bytes| {
            *answered.lock() += 1;
            if unique(bytes) == 7 { Err(ServeError::Protocol) } else { Ok(()) }
        })
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(work)).collect();
        for at in 0..100 {
            queued.put(opcode::LOOKUP, at);
        }
        queued.end();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(*answered.lock(), 100);
    assert_eq!(results.iter().filter(|result| result.is_err()).count(), 1);
}

/// So all that they have open can be closed before it is answered: nobody waits at the device for what does not come.
#[test]
fn last_request_ends_all_threads() {
    for count in [1, 2, 5] {
        let (queued, leaders) = (Queued::default(), Leaders::new(LOOKING));
        (0..100).for_each(|at| queued.put(opcode::GETATTR, at));
        queued.put(opcode::DESTROY, 100);
        let answered: u64 = std::thread::scope(|scope| {
            let work = || {
                let mut answered = 0;
                let count = |_: &[u8]| {
                    answered += 1;
                    Ok(())
                };
                leaders.work(&queued, &mut [0; 64], count).unwrap();
                answered
            };
            let threads: Vec<_> = (0..count).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(answered, 101, "{count} threads");
    }
}
