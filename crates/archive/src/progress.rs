//! What was done so far, and to whom it is told.

use crate::error::Warning;

/// Counts of what was moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Summary {
    /// Regular files.
    pub files: u64,
    /// Directories, the root included.
    pub directories: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Devices, fifos and sockets.
    pub specials: u64,
    /// Further names of files.
    pub hard_links: u64,
    /// Extended attributes.
    pub xattrs: u64,
    /// Subvolumes.
    pub subvolumes: u64,
    /// Bytes of data.
    pub data_bytes: u64,
    /// Bytes of files that are holes.
    pub hole_bytes: u64,
    /// Files that the destination does not have.
    pub skipped: u64,
    /// Warnings given, those for skipped files included.
    pub warnings: u64,
}

/// Hears how the work goes. Called on the thread that runs it, about once a batch.
pub trait Progress {
    /// The counts so far.
    fn advance(&mut self, done: &Summary) {
        let _ = done;
    }

    /// Something that the user should see.
    fn warning(&mut self, warning: &Warning) {
        let _ = warning;
    }
}

/// Nobody listens; warnings are still counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {}

/// Keeps the warnings, for tests and for callers that show them at the end.
impl Progress for Vec<Warning> {
    fn warning(&mut self, warning: &Warning) {
        self.push(warning.clone());
    }
}

/// What a sink counts and warns through.
pub struct Report<'a> {
    /// The counts.
    pub done: Summary,
    progress: &'a mut dyn Progress,
}

impl<'a> Report<'a> {
    /// Nothing done yet.
    pub fn new(progress: &'a mut dyn Progress) -> Self {
        Self { done: Summary::default(), progress }
    }

    /// Counts and passes on a warning.
    pub fn warn(&mut self, warning: &Warning) {
        self.done.warnings += 1;
        if warning.what.is_skip() {
            self.done.skipped += 1;
        }
        self.progress.warning(warning);
    }

    /// Passes on the counts.
    pub fn advance(&mut self) {
        self.progress.advance(&self.done);
    }
}
