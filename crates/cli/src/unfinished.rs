//! Files that are being made: they go away again if the command fails or is interrupted.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use signal_hook::low_level::emulate_default_handler;

use crate::signals;

static FILES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
static WATCH: Once = Once::new();

/// A file that is removed unless it is kept.
pub struct Unfinished {
    path: Option<PathBuf>,
}

impl Unfinished {
    /// Takes charge of a file that the command is about to make, whether or not it comes to be.
    pub fn new(path: PathBuf) -> Self {
        WATCH.call_once(watch_signals);
        files().push(path.clone());
        Self { path: Some(path) }
    }

    /// Takes charge of a file that `make` makes, and nobody else has: where it fails there is none to remove.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn make<T, E>(
        path: PathBuf,
        make: impl FnOnce(&Path) -> Result<T, E>,
    ) -> Result<(Self, T), E> {
        WATCH.call_once(watch_signals);
        // A signal meanwhile waits until it is known whether there is a file.
        let mut files = files();
        let made = make(&path)?;
        files.push(path.clone());
        Ok((Self { path: Some(path) }, made))
    }

    /// It is finished: it stays.
    pub fn keep(mut self) {
        self.forget();
    }

    /// It is finished: it gets its name, in place of what has it.
    ///
    /// # Errors
    /// The system's; it is gone then.
    pub fn rename(mut self, name: &Path) -> io::Result<()> {
        // A signal meanwhile waits until the name is given.
        let mut files = files();
        let renamed = match &self.path {
            Some(path) => std::fs::rename(path, name),
            None => Ok(()),
        };
        if renamed.is_ok() {
            files.retain(|other| Some(other) != self.path.as_ref());
            self.path = None;
        }
        drop(files);
        renamed
    }

    fn forget(&mut self) -> Option<PathBuf> {
        let path = self.path.take()?;
        files().retain(|other| *other != path);
        Some(path)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = self.forget() {
            remove(&path);
        }
    }
}

fn remove(path: &Path) {
    // The failure that brought us here is what is reported.
    let _ = std::fs::remove_file(path);
}

fn files() -> MutexGuard<'static, Vec<PathBuf>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on a signal that ends the command removes what is unfinished first. Where no thread can
/// be had, signals do what they always do.
fn watch_signals() {
    let Ok(mut signals) = signals::that_end() else { return };
    let _ = std::thread::Builder::new().spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // Held to the end: nothing becomes finished, or unfinished, any more.
            let files = files();
            files.iter().for_each(|path| remove(path));
            let _ = emulate_default_handler(signal);
        }
    });
}
