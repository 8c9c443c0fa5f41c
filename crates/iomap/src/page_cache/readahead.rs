//! Which reads go on where the last one ended, and how much more to read then.

/// The first window behind a sequential read, in bytes; it doubles with each further one.
const WINDOW_FIRST_BYTES: u64 = 64 * 1024;

/// A read that begins so little behind the end of the last one goes on with it: who copies a file with holes leaves them out.
const GAP_BYTES_MAX: u64 = 32 * 1024;

/// An open file's reads so far.
#[derive(Debug, Default)]
pub(crate) struct Readahead {
    /// Where the last read ended; a first read at the beginning of the file counts as sequential.
    next: u64,
    window_bytes: u64,
}

impl Readahead {
    /// A read of `start..end` begins. How many bytes behind `end` should be read with it, should it have to go
    /// to the device.
    pub(crate) fn read(&mut self, start: u64, end: u64, window_bytes_max: u64) -> u64 {
        let goes_on = start >= self.next && start - self.next <= GAP_BYTES_MAX;
        self.window_bytes = if goes_on {
            (self.window_bytes * 2).max(WINDOW_FIRST_BYTES).min(window_bytes_max)
        } else {
            0
        };
        self.next = end;
        self.window_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_reads_double_the_window_and_a_jump_closes_it() {
        let mut readahead = Readahead::default();
        let max = 256 * 1024;
        let windows: Vec<u64> =
            (0..4).map(|at| readahead.read(at * 100, at * 100 + 100, max)).collect();
        assert_eq!(windows, [64 * 1024, 128 * 1024, max, max]);
        assert_eq!(readahead.read(7, 10, max), 0);
        assert_eq!(readahead.read(10, 20, max), 64 * 1024);
        assert_eq!(readahead.read(4096, 8192, max), 128 * 1024);
        assert_eq!(readahead.read(8192 + GAP_BYTES_MAX + 1, 1 << 20, max), 0);
    }
}
