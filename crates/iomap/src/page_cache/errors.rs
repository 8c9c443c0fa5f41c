//! Errors of writeback: nobody waits for most writes, so who comes next with an fsync must hear.

/// The errors of a file's writeback.
#[derive(Debug)]
pub(crate) struct WritebackErrors<E> {
    /// How many there were.
    count: u64,
    last: Option<E>,
    /// Whether some open file was told of the last one.
    is_reported: bool,
    /// How many there were when a sync of all files asked last.
    synced: u64,
}

/// An error with which data of a file was lost, and of which no open file was told.
#[derive(Clone, Debug)]
pub struct LostData<E> {
    /// Why.
    pub error: E,
    /// Whether a sync of all files told.
    pub is_synced: bool,
}

/// What an open file was told already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ErrorMark(u64);

impl<E> Default for WritebackErrors<E> {
    fn default() -> Self {
        Self { count: 0, last: None, is_reported: true, synced: 0 }
    }
}

impl<E: Clone> WritebackErrors<E> {
    pub(crate) fn record(&mut self, error: E) {
        self.count += 1;
        self.last = Some(error);
        self.is_reported = false;
    }

    /// For a file opened now. An error that nobody was told of yet is told to it, too, so that one between a close and
    /// the next open is not lost.
    pub(crate) fn mark(&self) -> ErrorMark {
        ErrorMark(if self.is_reported { self.count } else { self.count - 1 })
    }

    /// What no open file was told, for who remembers it when the file leaves memory.
    pub(crate) fn untold(&mut self) -> Option<LostData<E>> {
        let error = self.last.take_if(|_| !self.is_reported)?;
        Some(LostData { error, is_synced: self.synced == self.count })
    }

    /// What nobody was told when the file was in memory before.
    pub(crate) fn restore(&mut self, lost: LostData<E>) {
        if !self.is_reported {
            // A newer one is told in its place.
            return;
        }
        self.record(lost.error);
        if lost.is_synced {
            self.synced = self.count;
        }
    }

    /// All so far.
    pub(crate) fn now(&self) -> ErrorMark {
        ErrorMark(self.count)
    }

    /// The last error, if it came after the mark. Nobody counts as told by that.
    pub(crate) fn look_since(&self, mark: ErrorMark) -> Option<E> {
        if mark == self.now() { None } else { self.last.clone() }
    }

    /// The last error, if nobody was told of it, no sync of all files either. One is now; open files are told all the same.
    pub(crate) fn take_unsynced(&mut self) -> Option<E> {
        let is_old = self.is_reported || self.synced == self.count;
        self.synced = self.count;
        if is_old { None } else { self.last.clone() }
    }

    /// The last error, if it came after the mark; and the mark behind it.
    pub(crate) fn since(&mut self, mark: ErrorMark) -> (Option<E>, ErrorMark) {
        let new = self.now();
        if mark == new {
            return (None, new);
        }
        self.is_reported = true;
        (self.last.clone(), new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_reported_once_to_each_open_file() {
        let mut errors = WritebackErrors::default();
        let (a, b) = (errors.mark(), errors.mark());
        errors.record("first");
        errors.record("second");
        let (error, a) = errors.since(a);
        assert_eq!(error, Some("second"));
        assert_eq!(errors.since(a).0, None);
        assert_eq!(errors.since(b).0, Some("second"));
        let opened_later = errors.mark();
        assert_eq!(errors.since(opened_later).0, None);
    }

    #[test]
    fn error_that_was_looked_at_is_reported_still() {
        let mut errors = WritebackErrors::default();
        errors.record("before");
        let now = errors.now();
        assert_eq!(errors.look_since(now), None);
        errors.record("lost");
        assert_eq!(errors.look_since(now), Some("lost"));
        assert_eq!(errors.since(now).0, Some("lost"));
    }

    #[test]
    fn error_is_told_to_one_sync_unless_an_open_file_was_told() {
        let mut errors = WritebackErrors::default();
        let open = errors.mark();
        errors.record("lost");
        assert_eq!(errors.take_unsynced(), Some("lost"));
        assert_eq!(errors.take_unsynced(), None);
        assert_eq!(errors.since(open).0, Some("lost"));
        errors.record("again");
        assert_eq!(errors.since(open).0, Some("again"));
        assert_eq!(errors.take_unsynced(), None);
    }

    #[test]
    fn error_that_nobody_saw_is_reported_to_who_opens_next() {
        let mut errors = WritebackErrors::default();
        errors.record("lost");
        let mark = errors.mark();
        assert_eq!(errors.since(mark).0, Some("lost"));
    }

    /// The file was forgotten with what was lost of it; who opened it next was told of nothing.
    #[test]
    fn error_of_a_file_that_left_memory_is_told_to_who_opens_it_next() {
        let mut before = WritebackErrors::default();
        assert!(before.untold().is_none());
        before.record("lost");
        assert_eq!(before.take_unsynced(), Some("lost"));
        let lost = before.untold().unwrap();
        assert!(lost.is_synced);
        let mut errors = WritebackErrors::default();
        errors.restore(lost);
        assert_eq!(errors.take_unsynced(), None);
        let open = errors.mark();
        assert_eq!(errors.since(open).0, Some("lost"));
        assert!(errors.untold().is_none());
        let later = errors.mark();
        assert_eq!(errors.since(later).0, None);
        errors.record("lost again");
        assert!(!errors.untold().unwrap().is_synced);
    }
}
