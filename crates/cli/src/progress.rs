//! How long work goes, told on standard error: at a terminal, and only once it takes a second.

use std::io::{self, IsTerminal};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use ubtrfs_archive::error::{Warning, WarningKind};
use ubtrfs_archive::progress::Summary;

use crate::failure::Exit;
use crate::size;

/// Work that takes less is done before anybody would read of it.
const QUIET_FOR: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(100);

/// A line that counts bytes, moved on by any thread.
pub struct Meter {
    what: &'static str,
    began: Instant,
    is_wanted: bool,
    bar: Mutex<Option<ProgressBar>>,
}

impl Meter {
    /// Of `what`, which begins now.
    pub fn new(what: &'static str) -> Self {
        let is_wanted = io::stderr().is_terminal();
        Self { what, began: Instant::now(), is_wanted, bar: Mutex::new(None) }
    }

    /// So many bytes are done, of about so many; 0 where that is not known. A thread that finds
    /// another at it has nothing to add.
    pub fn advance(&self, part: &'static str, done_bytes: u64, total_bytes: u64) {
        if !self.is_wanted || self.began.elapsed() < QUIET_FOR {
            return;
        }
        let Ok(mut bar) = self.bar.try_lock() else { return };
        let bar = bar.get_or_insert_with(|| {
            let bar = ProgressBar::new(0).with_elapsed(self.began.elapsed());
            let template =
                "{prefix}: {msg} {wide_bar} {binary_bytes}/{binary_total_bytes} [{elapsed}]";
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.set_prefix(self.what);
            bar
        });
        bar.set_message(part);
        bar.set_length(total_bytes.max(done_bytes));
        bar.set_position(done_bytes);
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Ok(bar) = self.bar.get_mut()
            && let Some(bar) = bar.take()
        {
            bar.finish_and_clear();
        }
    }
}

/// A line that counts, and the warnings above it.
pub struct Progress {
    what: &'static str,
    began: Instant,
    is_wanted: bool,
    bar: Option<ProgressBar>,
    /// Files that were left out, against what was asked for, or changed while they were read.
    amiss: u64,
}

impl Progress {
    /// Of `what`, which begins now.
    pub fn new(what: &'static str) -> Self {
        Self {
            what,
            began: Instant::now(),
            is_wanted: io::stderr().is_terminal(),
            bar: None,
            amiss: 0,
        }
    }

    /// Says something above the line.
    pub fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Takes the line away.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// What was done, in a sentence.
    pub fn sentence(&self, verb: &str, done: &Summary) -> String {
        let mut parts = Vec::new();
        for (count, one, many) in [
            (done.files, "file", "files"),
            (done.directories, "directory", "directories"),
            (done.symlinks, "symbolic link", "symbolic links"),
            (done.hard_links, "hard link", "hard links"),
            (done.specials, "special file", "special files"),
            (done.subvolumes, "subvolume", "subvolumes"),
        ] {
            if count > 0 {
                parts.push(format!("{count} {}", if count == 1 { one } else { many }));
            }
        }
        parts.push(size::binary(done.data_bytes));
        let seconds = self.began.elapsed().as_secs_f64();
        format!("{verb} {} in {seconds:.1} s", parts.join(", "))
    }

    /// Whether all came over: the answer is no where a file is missing at the other end, or is there as it may never have been.
    pub fn exit(&self) -> Exit {
        if self.amiss == 0 { Exit::Done } else { Exit::No }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

impl ubtrfs_archive::progress::Progress for Progress {
    fn advance(&mut self, done: &Summary) {
        if !self.is_wanted || self.began.elapsed() < QUIET_FOR {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::new_spinner().with_elapsed(self.began.elapsed());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} [{elapsed}]") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(TICK);
            bar
        });
        let files = done.files + done.symlinks + done.specials + done.hard_links;
        let millis = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let rate = size::binary(done.data_bytes.saturating_mul(1000) / millis.max(1));
        let bytes = size::binary(done.data_bytes);
        bar.set_message(format!("{}: {files} files, {bytes}, {rate}/s", self.what));
    }

    fn warning(&mut self, warning: &Warning) {
        let is_missing = warning.what.is_skip() && warning.what != WarningKind::IsTheImage;
        if is_missing || warning.what.is_change() {
            self.amiss += 1;
        }
        self.say(&format!("ubtrfs: warning: {warning}"));
    }
}
