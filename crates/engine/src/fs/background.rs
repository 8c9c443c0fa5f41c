//! What goes on beside the users of a filesystem that is open for long: a commit at the latest so
//! long after a change, the freeing of what deleted subvolumes held, and of open files the writing back
//! of what is dirty and the reading ahead of who reads sequentially, or walks through his extents.
//!
//! A few threads, which hold no lock between their steps, and in a step wait as any other caller does.
//! A crash loses nothing of it: what is to be freed is in the trees
//! ([`delete_subvolume`](super::delete_subvolume)).

use std::time::Duration;

use ubtrfs_iomap::ServiceEnd;
use ubtrfs_rt::{Arc, Condvar, Mutex, Service};

use crate::btree::Store;
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;

/// References that one step of the freeing drops, about: how long others may wait for it.
const REFS_PER_STEP: usize = 512;

/// Threads that read ahead, at most: as much as devices and checksums can use.
const READAHEAD_THREADS_MAX: usize = 4;

/// What [`Filesystem::run_in_background`] does, and when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackgroundOptions {
    /// What was changed is durable at the latest so long after, and the time of its commit. Linux
    /// lets 30 seconds pass.
    pub commit_every: Duration,
    /// Free the space of deleted subvolumes, after each of these commits.
    pub cleans_deleted: bool,
}

impl Default for BackgroundOptions {
    fn default() -> Self {
        Self { commit_every: Duration::from_secs(30), cleans_deleted: true }
    }
}

/// From [`Filesystem::run_in_background`]. Dropping it ends the work, and commits nothing.
#[derive(Debug)]
pub struct Background {
    fs: Filesystem,
    shared: Arc<Shared>,
    services: Vec<Service>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Of what goes on for open files.
    end: ServiceEnd,
}

#[derive(Debug, Default)]
struct State {
    is_stopping: bool,
    first_error: Option<Error>,
}

impl Filesystem {
    /// Begins to commit by time, to free what deleted subvolumes hold, to write back what is dirty of open
    /// files and to read ahead in them and in the tree that holds their extents, until the answer is dropped. With [`Executor::Inline`](ubtrfs_rt::Executor::Inline) nothing runs by itself:
    /// there [`Filesystem::background_step`] is called in its place.
    ///
    /// # Errors
    /// The system's, where it gives no thread.
    pub fn run_in_background(&self, options: BackgroundOptions) -> std::io::Result<Background> {
        let shared = Arc::<Shared>::default();
        let (fs, its) = (self.clone(), Arc::clone(&shared));
        let work = move || {
            while !its.waits_to_stop(options.commit_every) {
                if let Err(error) = fs.background_work(&options, || its.state.lock().is_stopping) {
                    its.note(error);
                }
            }
        };
        let mut background = Background { fs: self.clone(), shared, services: Vec::new() };
        background.spawn("ubtrfs-background", work)?;
        let (fs, its) = (self.clone(), Arc::clone(&background.shared));
        background.spawn("ubtrfs-writeback", move || {
            fs.page_cache().serve_writeback(&its.end, || fs.now_ms());
        })?;
        for _ in 0..self.runtime().executor.thread_count().min(READAHEAD_THREADS_MAX) {
            let (fs, its) = (self.clone(), Arc::clone(&background.shared));
            let work = move || fs.page_cache().serve_readahead(&its.end);
            background.spawn("ubtrfs-readahead", work)?;
        }
        let (store, its) = (Arc::clone(self.tree_blocks()), Arc::clone(&background.shared));
        background.spawn("ubtrfs-tree-reads", move || {
            store.serve_reads(|| its.state.lock().is_stopping);
        })?;
        Ok(background)
    }

    /// What the background does once each [`BackgroundOptions::commit_every`], whole.
    ///
    /// # Errors
    /// As [`Filesystem::commit`] and [`Filesystem::clean_deleted_subvolumes`].
    pub fn background_step(&self, options: &BackgroundOptions) -> Result<()> {
        self.background_work(options, || false)
    }

    fn tree_blocks(&self) -> &Arc<Store> {
        &self.inner.core.roots.store
    }

    fn background_work(
        &self,
        options: &BackgroundOptions,
        is_stopping: impl Fn() -> bool,
    ) -> Result<()> {
        let core = &self.inner.core;
        self.write_back_old();
        self.commit_with_written_anew(|| core.commit_unless_held())?;
        if !options.cleans_deleted {
            return Ok(());
        }
        let mut has_cleaned = false;
        // What it frees must not come between the changes of who holds commits.
        while !is_stopping() && !core.is_held() {
            match self.clean_deleted_step(REFS_PER_STEP) {
                Ok(true) => has_cleaned = true,
                Ok(false) => break,
                // Its next turn may find room.
                Err(Error::NoSpace { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        if has_cleaned { core.commit_unless_held() } else { Ok(()) }
    }
}

impl Background {
    /// Ends the work, and says what stopped some of it, if anything did: what the caller's own calls
    /// need not have met, as damage in a subvolume that was to be freed.
    ///
    /// # Errors
    /// The first.
    pub fn stop(mut self) -> Result<()> {
        self.end();
        self.shared.state.lock().first_error.take().map_or(Ok(()), Err)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        self.services.extend(self.fs.runtime().executor.spawn(name, work)?);
        Ok(())
    }

    fn end(&mut self) {
        self.shared.state.lock().is_stopping = true;
        self.shared.changed.notify_all();
        self.fs.tree_blocks().wake_readers();
        self.fs.page_cache().end_services(&self.shared.end);
        self.services.drain(..).for_each(Service::join);
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    /// Waits that long; whether it was told to stop.
    fn waits_to_stop(&self, how_long: Duration) -> bool {
        let mut state = self.state.lock();
        if !state.is_stopping {
            // Woken too early it does its turn early, which harms nobody.
            let _ = self.changed.wait_for(&mut state, how_long);
        }
        state.is_stopping
    }

    fn note(&self, error: Error) {
        self.state.lock().first_error.get_or_insert(error);
    }
}
