//! What a file was that one thread changes, for those who read it meanwhile.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

const READERS: usize = 2;

/// The file after each change, from the oldest on that a reader may see.
#[derive(Debug)]
pub(super) struct History(Mutex<Kept>);

#[derive(Debug)]
struct Kept {
    /// Which change made the first of the states.
    first: u64,
    states: VecDeque<Vec<u8>>,
    /// The last change that is done; one that is begun may come behind it.
    done: u64,
    /// For each reader the change that was done when he began.
    readers: [Option<u64>; READERS],
}

impl Default for History {
    /// Of a file that is empty.
    fn default() -> Self {
        let states = VecDeque::from([Vec::new()]);
        Self(Mutex::new(Kept { first: 0, states, done: 0, readers: [None; READERS] }))
    }
}

impl History {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the file may be seen so.
    pub(super) fn begin(&self, bytes: Vec<u8>) {
        self.lock().states.push_back(bytes);
    }

    /// Who begins from now on sees nothing from before that.
    pub(super) fn end(&self) {
        let mut kept = self.lock();
        kept.done = kept.first + kept.states.len() as u64 - 1;
        let needed = kept.readers.iter().flatten().min().copied().unwrap_or(kept.done);
        while kept.first < needed {
            kept.states.pop_front();
            kept.first += 1;
        }
    }

    pub(super) fn begin_reading(&self, reader: usize) {
        let mut kept = self.lock();
        kept.readers[reader] = Some(kept.done);
    }

    /// A reader who asked for as much as the buffer holds got `len` bytes.
    ///
    /// # Panics
    /// If the file never had them, or that end, since he began.
    pub(super) fn judge(&self, reader: usize, start: u64, buffer: &[u8], len: usize) {
        let mut kept = self.lock();
        let begun = kept.readers[reader].take().expect("he began");
        let states = kept.states.range(usize::try_from(begun - kept.first).expect("few")..);
        let start = usize::try_from(start).expect("a file of a test fits into memory");
        let lens = states.clone().map(|state| state.len().saturating_sub(start).min(buffer.len()));
        let lens = (lens.clone().min(), lens.max());
        assert!(lens.0 <= Some(len) && Some(len) <= lens.1, "{len} of {lens:?} from {start} on");
        for (at, byte) in (start..).zip(&buffer[..len]) {
            let was = |state: &Vec<u8>| state.get(at).copied().unwrap_or(0);
            let is_right = states.clone().any(|state| was(state) == *byte);
            assert!(
                is_right,
                "{byte} at {at}, was {:?}",
                states.clone().map(was).collect::<Vec<_>>()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_right(bytes: &[u8], len: usize, during: impl Fn(&History)) -> bool {
        let history = History::default();
        for state in [&b"aaaa"[..], b"bbbb"] {
            history.begin(state.to_vec());
            history.end();
        }
        history.begin_reading(1);
        during(&history);
        let judge = || history.judge(1, 0, bytes, len);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(judge)).is_ok()
    }

    #[test]
    fn reader_sees_what_was_since_he_began_and_nothing_older() {
        let cut = |history: &History| {
            history.begin(b"b".to_vec());
            history.end();
            history.begin(b"bcc".to_vec());
        };
        assert!(is_right(b"bbbb", 4, |_| {}));
        assert!(!is_right(b"abbb", 4, |_| {}), "older");
        assert!(!is_right(b"bbb", 2, |_| {}), "short");
        assert!(is_right(b"bcb0", 3, cut));
        assert!(is_right(b"b\0\0b", 4, cut));
        assert!(is_right(b"b000", 1, cut));
        assert!(!is_right(b"b000", 0, cut));
        assert!(!is_right(b"cbbb", 4, cut), "another's");
    }
}
