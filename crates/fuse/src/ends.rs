//! Files of which the kernel may not know where they end: a command changed that beside it.
//!
//! Without `-o writeback` the kernel asks for a file's size before it shows it, and not before it appends. So what is appended to such
//! a file goes to its end here, until the kernel has been seen to know that. What is written past its cache (`O_DIRECT`) comes in
//! several requests at once where it is long, which are answered in any order: those are moved by as much as the end was, as long as
//! the kernel cannot know of that. Where such a write fails, the kernel cuts the file off where it believes it to have ended: that is moved,
//! too, or what the command gave the file would be gone.

use rustc_hash::{FxHashMap, FxHashSet};
use ubtrfs_engine::InodeId;
use ubtrfs_rt::{AtomicBool, AtomicU64, Mutex, Ordering};

/// Two ideas of where a file ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MovedEnd {
    /// The kernel's, unless it has asked since.
    pub(crate) known_bytes: u64,
    pub(crate) true_bytes: u64,
}

/// How it is appended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Append {
    /// One request after the other.
    Cached,
    /// Several at once.
    Direct,
}

/// Where something is to be written that the kernel appends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// Where the kernel says.
    AsAsked,
    At(u64),
    /// Where the file ends, wherever that is.
    End,
}

#[derive(Clone, Copy, Debug)]
struct Moved {
    end: MovedEnd,
    /// The kernel has not been told.
    is_unknown: bool,
    /// The thread of which a write failed that the kernel did not expect to end within the file.
    cut_by: Option<u32>,
}

impl Moved {
    fn of(end: MovedEnd, is_unknown: bool) -> Self {
        Self { end, is_unknown, cut_by: None }
    }

    /// What is at `at` for the kernel, where that is behind the end that it knows.
    fn place(&self, at: u64) -> Option<u64> {
        let behind = at.checked_sub(self.end.known_bytes)?;
        Some(self.end.true_bytes.saturating_add(behind))
    }
}

#[derive(Debug, Default)]
struct State {
    /// Changes that are under way: they may be of any file.
    change_count: usize,
    /// Files that programs changed meanwhile, or of which the kernel was told: it may know more than before.
    touched: FxHashSet<InodeId>,
    moved: FxHashMap<InodeId, Moved>,
}

/// The files of a mount whose end the kernel may not know.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// Read without the lock, to skip it where there are none.
    are_some: AtomicBool,
    /// Changes that have begun, and that have ended. It changes with the state's lock held.
    generation: AtomicU64,
    state: Mutex<State>,
}

/// A change that is under way.
#[must_use = "it is under way while it lives"]
pub(crate) struct Change<'a> {
    ends: &'a Ends,
    moved: Vec<(InodeId, MovedEnd)>,
}

impl Change<'_> {
    /// It is done, and has moved the ends of these.
    pub(crate) fn end(mut self, moved: Vec<(InodeId, MovedEnd)>) {
        self.moved = moved;
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.ends.end(std::mem::take(&mut self.moved));
    }
}

/// When something began that may come across a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Since(u64);

impl Ends {
    /// To be asked before a file is looked at, or changed by a program.
    pub(crate) fn now(&self) -> Since {
        Since(self.generation.load(Ordering::Acquire))
    }

    /// A change begins. It is under way until what is returned ends, or is dropped, where looking for the ends that it moved panics: of those
    /// nothing is known then.
    pub(crate) fn begin(&self) -> Change<'_> {
        let mut state = self.state.lock();
        state.change_count += 1;
        self.note(&state);
        self.generation.fetch_add(1, Ordering::AcqRel);
        Change { ends: self, moved: Vec::new() }
    }

    /// A change is done, and has moved the ends of these.
    fn end(&self, moved: Vec<(InodeId, MovedEnd)>) {
        let mut state = self.state.lock();
        state.change_count -= 1;
        for (id, end) in moved {
            let is_unknown = !state.touched.contains(&id);
            state.moved.insert(id, Moved::of(end, is_unknown));
        }
        if state.change_count == 0 {
            state.touched.clear();
        }
        self.note(&state);
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// The kernel is told of a file, or a program changes it.
    pub(crate) fn note_touched(&self, id: InodeId) {
        if !self.are_some.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.state.lock();
        if state.change_count > 0 {
            state.touched.insert(id);
        }
    }

    /// A program has changed a file, which it began to do at `since`: if a change began or ended meanwhile, nobody can say which of
    /// both came first.
    pub(crate) fn note_done(&self, id: InodeId, since: Since) {
        if self.now() == since {
            return;
        }
        let mut state = self.state.lock();
        if state.change_count > 0 {
            state.touched.insert(id);
        }
        if let Some(moved) = state.moved.get_mut(&id) {
            moved.is_unknown = false;
        }
    }

    /// The kernel is told of a file what was found after `since`. Of what a change that ended later made of it, it still does not know.
    pub(crate) fn note_told(&self, id: InodeId, since: Since) {
        self.note_touched(id);
        if !self.are_some.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.state.lock();
        if self.now() == since
            && let Some(moved) = state.moved.get_mut(&id)
        {
            moved.is_unknown = false;
        }
    }

    /// The kernel appends to a file, at what it believes to be its end, or behind it.
    pub(crate) fn place(&self, id: InodeId, at: u64, append: Append) -> Place {
        if !self.are_some.load(Ordering::Acquire) {
            return Place::AsAsked;
        }
        let state = self.state.lock();
        match (append, state.moved.get(&id)) {
            (Append::Cached, Some(_)) => Place::End,
            (Append::Cached, None) if state.change_count > 0 => Place::End,
            (Append::Direct, Some(moved)) if moved.is_unknown => {
                moved.place(at).map_or(Place::AsAsked, Place::At)
            }
            _ => Place::AsAsked,
        }
    }

    /// A write of `thread` past the kernel's cache failed, which was to end at `end` for the kernel.
    pub(crate) fn note_failed(&self, id: InodeId, end: u64, thread: u32) {
        if !self.are_some.load(Ordering::Acquire) {
            return;
        }
        if let Some(moved) = self.state.lock().moved.get_mut(&id)
            && moved.is_unknown
            && end > moved.end.known_bytes
        {
            moved.cut_by = Some(thread);
        }
    }

    /// Where `thread` is to cut a file off that is open, at `size` for the kernel.
    pub(crate) fn cut(&self, id: InodeId, size: u64, thread: u32) -> u64 {
        if !self.are_some.load(Ordering::Acquire) {
            return size;
        }
        let mut state = self.state.lock();
        let Some(moved) = state.moved.get_mut(&id) else { return size };
        let is_after_failure = moved.cut_by.take() == Some(thread) && moved.is_unknown;
        is_after_failure.then(|| moved.place(size)).flatten().unwrap_or(size)
    }

    /// What the kernel appended where it knew the end went to where that is.
    pub(crate) fn note_appended(&self, id: InodeId, end: MovedEnd) {
        let mut state = self.state.lock();
        if end.known_bytes == end.true_bytes {
            state.moved.remove(&id);
        } else {
            state.moved.insert(id, Moved::of(end, true));
        }
        self.note(&state);
    }

    /// The kernel is about to believe that a file ends at a place where it did a moment ago, and may not any more.
    pub(crate) fn note_late(&self, id: InodeId, end: MovedEnd) {
        let mut state = self.state.lock();
        state.moved.entry(id).or_insert(Moved::of(end, false));
        self.note(&state);
    }

    /// The kernel knows nothing of the file any more.
    pub(crate) fn forget(&self, id: InodeId) {
        if self.are_some.load(Ordering::Acquire) {
            let mut state = self.state.lock();
            state.moved.remove(&id);
            self.note(&state);
        }
    }

    fn note(&self, state: &State) {
        self.are_some.store(state.change_count > 0 || !state.moved.is_empty(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ubtrfs_ondisk::{InodeNo, RootId};

    const OLD: MovedEnd = MovedEnd { known_bytes: 100, true_bytes: 7 };

    fn id(inode: u64) -> InodeId {
        InodeId { root: RootId(5), inode: InodeNo(inode) }
    }

    #[test]
    fn cached_appends_go_to_the_end_until_the_kernel_knows_it() {
        let ends = Ends::default();
        let place = |inode, at| ends.place(id(inode), at, Append::Cached);
        assert_eq!(place(257, 100), Place::AsAsked);
        let change = ends.begin();
        assert_eq!((place(257, 100), place(258, 0)), (Place::End, Place::End));
        change.end(vec![(id(257), OLD)]);
        assert_eq!((place(257, 100), place(258, 0)), (Place::End, Place::AsAsked));
        ends.note_appended(id(257), OLD);
        ends.note_told(id(257), ends.now());
        assert_eq!(place(257, 110), Place::End);
        ends.note_appended(id(257), MovedEnd { known_bytes: 17, true_bytes: 17 });
        assert_eq!(place(257, 27), Place::AsAsked);
        assert!(!ends.are_some.load(Ordering::Acquire));
    }

    #[test]
    fn direct_appends_are_moved_in_any_order_while_the_kernel_cannot_know() {
        let ends = Ends::default();
        let place = |inode, at| ends.place(id(inode), at, Append::Direct);
        let change = ends.begin();
        // Of all files that are not changed, too.
        assert_eq!(place(257, 100), Place::AsAsked);
        ends.note_touched(id(258));
        change.end(vec![(id(257), OLD), (id(258), OLD)]);
        assert_eq!((place(257, 110), place(257, 100)), (Place::At(17), Place::At(7)));
        assert_eq!((place(257, 99), place(258, 100)), (Place::AsAsked, Place::AsAsked));
        ends.note_told(id(257), ends.now());
        assert_eq!(place(257, 100), Place::AsAsked);
        ends.forget(id(257));
        ends.forget(id(258));
        assert!(!ends.are_some.load(Ordering::Acquire));
    }

    #[test]
    fn appends_go_to_the_end_once_the_kernel_may_hear_late_of_another() {
        let ends = Ends::default();
        ends.note_late(id(257), OLD);
        assert_eq!(ends.place(id(257), 100, Append::Cached), Place::End);
        assert_eq!(ends.place(id(257), 100, Append::Direct), Place::AsAsked);
        ends.note_appended(id(257), MovedEnd { known_bytes: 7, true_bytes: 7 });
        assert_eq!(ends.place(id(257), 10, Append::Cached), Place::AsAsked);
        // What is known of a file is kept.
        ends.note_appended(id(257), OLD);
        ends.note_late(id(257), MovedEnd { known_bytes: 50, true_bytes: 60 });
        assert_eq!(ends.place(id(257), 100, Append::Direct), Place::At(7));
    }

    #[test]
    fn what_the_kernel_cuts_off_after_a_failed_write_is_cut_where_the_file_ends() {
        let ends = Ends::default();
        ends.note_failed(id(257), 200, 1);
        assert_eq!(ends.cut(id(257), 100, 1), 100);
        let change = ends.begin();
        change.end(vec![(id(257), MovedEnd { known_bytes: 100, true_bytes: 7000 })]);
        // Of a program, or after a write that did not go behind the end.
        assert_eq!(ends.cut(id(257), 100, 1), 100);
        ends.note_failed(id(257), 100, 1);
        assert_eq!(ends.cut(id(257), 100, 1), 100);
        // Once, and of this thread.
        ends.note_failed(id(257), 101, 1);
        assert_eq!([150, 150].map(|size| ends.cut(id(257), size, 1)), [7050, 150]);
        ends.note_failed(id(257), 101, 1);
        assert_eq!(ends.cut(id(257), 100, 2), 100);
        // It knows by now.
        ends.note_failed(id(257), 101, 1);
        ends.note_told(id(257), ends.now());
        assert_eq!(ends.cut(id(257), 100, 1), 100);
    }

    /// A write that began before the change was not noted, and the next one went to a wrong place; an answer that was older than the
    /// change passed for one that told of it.
    #[test]
    fn what_comes_across_a_change_is_not_taken_for_what_came_before_or_after() {
        let place = |ends: &Ends| ends.place(id(257), 100, Append::Direct);
        for is_done_before_the_end in [true, false] {
            let ends = Ends::default();
            let since = ends.now();
            ends.note_touched(id(257));
            let change = ends.begin();
            if is_done_before_the_end {
                ends.note_done(id(257), since);
            }
            change.end(vec![(id(257), OLD)]);
            if !is_done_before_the_end {
                ends.note_done(id(257), since);
            }
            assert_eq!(place(&ends), Place::AsAsked, "{is_done_before_the_end}");
        }
        let ends = Ends::default();
        let before = ends.now();
        let change = ends.begin();
        change.end(vec![(id(257), OLD)]);
        ends.note_told(id(257), before);
        assert_eq!(place(&ends), Place::At(7));
        // It began when the change was over.
        ends.note_done(id(257), ends.now());
        assert_eq!(place(&ends), Place::At(7));
    }
}
