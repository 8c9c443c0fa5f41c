//! A filesystem whose services never rest: what writes back, commits and reclaims does so beside all that a test does.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use ubtrfs_iomap::{FileOffset, FileRange};

use super::random::random_by_number;
use super::{DataFile, Done, Expected, Harness, Look, Refusal};

/// A pass is for all that is dirty.
const PASS_MS: u64 = 40_000;
/// The longest time between two things that the service does, so that it meets each step of a call now and then.
const PAUSE_MAX_US: u64 = 200;

/// A harness with a service.
pub struct Restless<H: Harness + 'static> {
    shared: Arc<Shared<H>>,
    service: Option<JoinHandle<()>>,
}

struct Shared<H> {
    /// Written to where the filesystem is closed.
    harness: RwLock<H>,
    now_ms: AtomicU64,
    /// Held for each thing that the service does.
    turn: Mutex<()>,
    rests: AtomicBool,
    /// What the service did so far.
    done: AtomicU64,
    has_ended: AtomicBool,
}

impl<H: Harness + 'static> Shared<H> {
    fn read(&self) -> RwLockReadGuard<'_, H> {
        self.harness.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, H> {
        self.harness.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(&self, harness: &H) {
        harness.background_pass(self.now_ms.fetch_add(PASS_MS, Ordering::Relaxed) + PASS_MS);
    }

    fn serve(&self, number: u64) {
        let mut random = random_by_number(number);
        while !self.has_ended.load(Ordering::Relaxed) {
            {
                let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
                if !self.rests.load(Ordering::Relaxed) {
                    let harness = self.read();
                    match random.below(4) {
                        0 => harness.commit(),
                        1 => harness.reclaim(),
                        _ => self.pass(&harness),
                    }
                    self.done.fetch_add(1, Ordering::Relaxed);
                }
            }
            std::thread::sleep(Duration::from_micros(random.below(PAUSE_MAX_US)));
        }
    }
}

impl<H: Harness + 'static> Restless<H> {
    /// The service begins at once. What it does when follows from `number`, and from what the system lets it.
    pub fn new(harness: H, number: u64) -> Self {
        let shared = Arc::new(Shared {
            harness: RwLock::new(harness),
            now_ms: AtomicU64::new(0),
            turn: Mutex::new(()),
            rests: AtomicBool::new(false),
            done: AtomicU64::new(0),
            has_ended: AtomicBool::new(false),
        });
        let served = Arc::clone(&shared);
        let service = Some(std::thread::spawn(move || served.serve(number)));
        Self { shared, service }
    }
}

impl<H: Harness + 'static> Drop for Restless<H> {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::Relaxed);
        let ended = self.service.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(matches!(ended, Some(Ok(()))), "the service failed");
            assert!(
                self.shared.done.load(Ordering::Relaxed) > 0,
                "nothing was done beside the test"
            );
        }
    }
}

impl<H: Harness + 'static> Harness for Restless<H> {
    type Inode = H::Inode;
    type File = H::File;

    const SEEDS: u64 = H::SEEDS;
    const RACE_ROUNDS: u64 = H::RACE_ROUNDS;
    const RACES: u64 = H::RACES;
    const IS_IMAGE: bool = H::IS_IMAGE;

    fn block_bytes(&self) -> u64 {
        self.shared.read().block_bytes()
    }

    fn create(&self) -> H::Inode {
        self.shared.read().create()
    }

    fn open(&self, inode: &H::Inode) -> H::File {
        self.shared.read().open(inode)
    }

    fn refusal(&self, error: &<H::File as DataFile>::Error) -> Refusal {
        self.shared.read().refusal(error)
    }

    fn taken_bytes(&self, inode: &H::Inode) -> u64 {
        self.shared.read().taken_bytes(inode)
    }

    fn reclaim(&self) {
        self.shared.read().reclaim();
    }

    fn background_pass(&self, _now_ms: u64) {
        self.shared.pass(&self.shared.read());
    }

    fn commit(&self) {
        self.shared.read().commit();
    }

    fn sync(&self) -> Done {
        self.shared.read().sync()
    }

    fn relocate(&self, inode: &H::Inode) -> Done {
        self.shared.read().relocate(inode)
    }

    fn clone_range(
        &self,
        from: &H::Inode,
        range: FileRange,
        to: &H::Inode,
        to_start: FileOffset,
    ) -> Done {
        self.shared.read().clone_range(from, range, to, to_start)
    }

    fn reopen(&mut self) {
        self.shared.write().reopen();
    }

    fn crash(&mut self) -> Done {
        self.shared.write().crash()
    }

    fn fail_data_writes(&self, left: Option<u64>) -> Done {
        self.shared.read().fail_data_writes(left)
    }

    fn yield_in_data_writes(&self, yields: bool) {
        self.shared.read().yield_in_data_writes(yields);
    }

    fn failures(&self) -> u64 {
        self.shared.read().failures()
    }

    fn rest(&self, rests: bool) {
        self.shared.rests.store(rests, Ordering::Relaxed);
        // What it is at ends before.
        drop(self.shared.turn.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn judge(&mut self, files: &[Expected<H::Inode>], look: Look) {
        self.shared.write().judge(files, look);
    }
}
