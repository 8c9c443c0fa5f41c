//! Which reads go on where the last one ended, and how much more to read then.

use std::ops::Range;

use ubtrfs_rt::{AtomicU64, Ordering};

/// The first window behind a sequential read, in bytes; it doubles with each further one.
const WINDOW_FIRST_BYTES: u64 = 64 * 1024;

/// The least that somebody else is asked to read ahead.
const BESIDE_BYTES_MIN: u64 = 512 * 1024;

/// A read that begins so little behind the end of the last one goes on with it: who copies a file with holes leaves them out.
const GAP_BYTES_MAX: u64 = 32 * 1024;

/// So many requests to read ahead may find all there one after the other, as a reader may be there first, before nobody asks any more.
const IN_VAIN_MAX: u64 = 16;

/// Whether it helps to have somebody else read ahead in a file: not where all of it is in memory.
#[derive(Debug)]
pub(crate) struct ReadaheadNeed {
    /// Requests that found all there, since somebody missed something.
    in_vain: AtomicU64,
}

impl Default for ReadaheadNeed {
    /// Until something is missed, none.
    fn default() -> Self {
        Self { in_vain: AtomicU64::new(IN_VAIN_MAX) }
    }
}

impl ReadaheadNeed {
    pub(crate) fn is_there(&self) -> bool {
        self.in_vain.load(Ordering::Relaxed) < IN_VAIN_MAX
    }

    pub(crate) fn note_miss(&self) {
        self.in_vain.store(0, Ordering::Relaxed);
    }

    pub(crate) fn note_in_vain(&self) {
        // Only requests that were asked for come here, so that it stays near the limit.
        self.in_vain.fetch_add(1, Ordering::Relaxed);
    }
}

/// An open file's reads so far.
#[derive(Debug, Default)]
pub(crate) struct Readahead {
    /// Where the last read ended; a first read at the beginning of the file counts as sequential.
    next: u64,
    window_bytes: u64,
    /// Up to where somebody else was asked to read ahead.
    asked_end: u64,
    /// Where reads began that have gone on from each other since, with nobody else reading the file.
    run_start: u64,
    /// Where the last read but one ended, if the last one goes through the file.
    through_from: Option<u64>,
}

/// What to read ahead.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Ahead {
    /// So many bytes behind the end of the read, together with it, should it have to go to the device.
    With(u64),
    /// By somebody else meanwhile.
    Beside {
        /// What he is to be asked for; empty if that has been done.
        wanted: Range<u64>,
        /// So many bytes behind the end of the read are asked for: who comes before them reads some himself.
        asked_bytes: u64,
    },
    /// Nothing: reads have gone on from each other for so long that what this one finds missing may come straight to it.
    Straight,
}

/// How reads ahead may be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AheadOptions {
    pub(crate) window_bytes_max: u64,
    /// Whether there is somebody else to read ahead.
    pub(crate) is_served: bool,
    /// Whether memory cannot keep the file, so that a read that has gone on for a whole window does without it.
    pub(crate) may_be_straight: bool,
    /// Whether nobody else has read the file since the last read.
    pub(crate) is_alone: bool,
    /// Reads that have gone on from each other for so much go through the file: `u64::MAX` for never.
    pub(crate) through_bytes_min: u64,
}

impl Readahead {
    /// Something could not be read: the next reads begin with little again.
    pub(crate) fn stop(&mut self) {
        self.window_bytes = 0;
    }

    /// If the last read that began goes through the file: where the one before it ended.
    pub(crate) fn through_from(&self) -> Option<u64> {
        self.through_from
    }

    /// A read of `start..end` begins.
    pub(crate) fn read(&mut self, start: u64, end: u64, options: AheadOptions) -> Ahead {
        let AheadOptions { window_bytes_max, is_served, may_be_straight, .. } = options;
        let goes_on = start >= self.next && start - self.next <= GAP_BYTES_MAX;
        self.window_bytes = if goes_on {
            (self.window_bytes * 2).max(WINDOW_FIRST_BYTES).min(window_bytes_max)
        } else {
            0
        };
        let before = std::mem::replace(&mut self.next, end);
        if !goes_on {
            self.asked_end = end;
        }
        if !goes_on || !options.is_alone {
            self.run_start = start;
        }
        let is_through = start.saturating_sub(self.run_start) >= options.through_bytes_min;
        self.through_from = is_through.then_some(before);
        if may_be_straight && goes_on && self.window_bytes == window_bytes_max {
            return Ahead::Straight;
        }
        // To wake somebody for little costs more than it saves.
        if !is_served || self.window_bytes < BESIDE_BYTES_MIN {
            return Ahead::With(self.window_bytes);
        }
        let from = self.asked_end.max(end);
        let window_end = end.saturating_add(self.window_bytes);
        let is_due = window_end.saturating_sub(from) >= self.window_bytes / 2;
        self.asked_end = if is_due { window_end } else { from };
        Ahead::Beside { wanted: from..self.asked_end, asked_bytes: self.asked_end - end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: AheadOptions = AheadOptions {
        window_bytes_max: 4 << 20,
        is_served: false,
        may_be_straight: false,
        is_alone: true,
        through_bytes_min: u64::MAX,
    };

    #[test]
    fn reads_go_through_a_file_once_they_have_gone_on_for_long_and_nobody_else_reads_it() {
        let mut readahead = Readahead::default();
        let mut read = |at: u64, is_alone| {
            let options = AheadOptions { is_alone, through_bytes_min: 10, ..PLAIN };
            readahead.read(at, at + 5, options);
            readahead.through_from()
        };
        assert_eq!([0, 5, 10, 15].map(|at| read(at, true)), [None, None, Some(10), Some(15)]);
        // Somebody else, and a jump.
        assert_eq!([20, 25, 30].map(|at| read(at, at > 20)), [None, None, Some(30)]);
        assert_eq!([7, 12, 17].map(|at| read(at, true)), [None, None, Some(17)]);
    }

    #[test]
    fn straight_once_the_window_is_full_and_again_after_a_jump() {
        let mut readahead = Readahead::default();
        let options = AheadOptions { may_be_straight: true, ..PLAIN };
        let mut read = |at: u64| readahead.read(at << 20, (at + 1) << 20, options);
        let is_straight: Vec<bool> = (0..8).map(|at| read(at) == Ahead::Straight).collect();
        assert_eq!(is_straight, [false, false, false, false, false, false, true, true]);
        assert_eq!(read(100), Ahead::With(0));
        assert_eq!(read(101), Ahead::With(WINDOW_FIRST_BYTES));
    }

    #[test]
    fn sequential_reads_double_the_window_and_a_jump_closes_it() {
        let mut readahead = Readahead::default();
        let max = 256 * 1024;
        let options = AheadOptions { window_bytes_max: max, ..PLAIN };
        let windows: Vec<Ahead> =
            (0..4).map(|at| readahead.read(at * 100, at * 100 + 100, options)).collect();
        assert_eq!(windows, [64 * 1024, 128 * 1024, max, max].map(Ahead::With));
        let mut read = |start, end| readahead.read(start, end, options);
        assert_eq!(read(7, 10), Ahead::With(0));
        assert_eq!(read(10, 20), Ahead::With(64 * 1024));
        assert_eq!(read(4096, 8192), Ahead::With(128 * 1024));
        assert_eq!(read(8192 + GAP_BYTES_MAX + 1, 1 << 20), Ahead::With(0));
    }

    /// What somebody else is asked for covers the file without a gap, each part once, ahead of the reads.
    #[test]
    fn windows_beside_sequential_reads_touch_and_stay_ahead() {
        const READ: u64 = 100_000;
        let mut readahead = Readahead::default();
        let options = AheadOptions { is_served: true, ..PLAIN };
        let mut covered = None;
        for at in 0..1000 {
            let end = (at + 1) * READ;
            match readahead.read(at * READ, end, options) {
                Ahead::Straight => unreachable!("it may not be"),
                Ahead::With(bytes) => {
                    assert!(covered.is_none() && bytes < BESIDE_BYTES_MIN);
                }
                Ahead::Beside { wanted: asked, asked_bytes } => {
                    assert_eq!(asked_bytes, readahead.asked_end - end);
                    let before = covered.unwrap_or(end);
                    if !asked.is_empty() {
                        assert_eq!(asked.start, before.max(end));
                        assert!(asked.end - asked.start >= BESIDE_BYTES_MIN / 2);
                        covered = Some(asked.end);
                    }
                    assert!(covered.unwrap() >= end + readahead.window_bytes / 2);
                }
            }
        }
        // A jump: what lies behind it was not asked for.
        assert_eq!(readahead.read(1 << 40, (1 << 40) + 1, options), Ahead::With(0));
        assert_eq!(readahead.asked_end, (1 << 40) + 1);
    }
}
