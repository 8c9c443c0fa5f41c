//! Memory with a bound, for all that grows with the filesystem: pages of 64-bit words, of which as
//! many are held as the limit allows. The others lie in a file without a name in the directory for
//! temporary files, which is made when the limit is first met. A page that is wanted comes back in
//! the place of one that was not used lately.
//!
//! 1. What a page holds does not depend on where it lies: a check finds the same with any limit.
//! 2. Frames and the directory of pages together take no more than the limit, but for
//!    [`FRAMES_MIN`] frames.
//! 3. A page that cannot be written stays in memory, one that cannot be read is zero; either is
//!    remembered as the failure of the whole check, which ends at its next step.
//!
//! Lock order: there is one lock, and nothing else is called while it is held. Readers of pages
//! that are in memory share it; words are atomic, so that they may add to them as well.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use ubtrfs_rt::{AtomicBool, AtomicU64, Ordering, RwLock};

use crate::view::number;

/// The page of a limit that is not tiny.
const PAGE_BYTES_MAX: usize = 8 << 10;
const PAGE_BYTES_MIN: usize = 512;
/// Below this many frames pages would come and go at every access.
const FRAMES_MIN: usize = 8;
/// What is kept for each page, wherever it lies: its place here, and in its table its number and
/// first word, each in a list that may have grown to twice its length.
const DIRECTORY_BYTES: usize = 3 * 2 * size_of::<u64>();
/// Names that are tried for the file.
const NAMES_MAX: u32 = 100;
const WORD_BYTES: usize = size_of::<u64>();

/// The place of a page that is not in memory.
const AWAY: usize = usize::MAX;
/// What a frame holds when it holds nothing.
const NO_PAGE: usize = usize::MAX;

/// Pages, in memory or away.
pub(crate) struct Store {
    page_words: usize,
    limit_bytes: usize,
    state: RwLock<State>,
    has_failed: AtomicBool,
}

#[derive(Default)]
struct State {
    /// For each page its frame.
    places: Vec<usize>,
    frames: Vec<Frame>,
    /// Pages that no table has.
    free: Vec<usize>,
    /// Frames that hold none.
    empty: Vec<usize>,
    /// Where the search for a page to be sent away goes on.
    hand: usize,
    file: Option<File>,
    spilled_bytes: u64,
    peak_bytes: usize,
    failure: Option<io::Error>,
}

struct Frame {
    page: usize,
    words: Box<[AtomicU64]>,
    was_used: AtomicBool,
    is_dirty: AtomicBool,
}

/// What a store took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// At most in memory.
    pub(crate) peak_bytes: u64,
    /// Written to the file, pages that were written again included.
    pub(crate) spilled_bytes: u64,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("limit_bytes", &self.limit_bytes).finish_non_exhaustive()
    }
}

impl Store {
    pub(crate) fn new(limit_bytes: u64) -> Self {
        let limit_bytes = usize::try_from(limit_bytes).unwrap_or(usize::MAX);
        // The largest power of two with which there are 64 frames.
        let wanted = (limit_bytes / 64).clamp(PAGE_BYTES_MIN, PAGE_BYTES_MAX);
        let page_bytes = 1 << wanted.ilog2();
        Self {
            page_words: page_bytes / WORD_BYTES,
            limit_bytes,
            state: RwLock::new(State::default()),
            has_failed: AtomicBool::new(false),
        }
    }

    pub(crate) fn page_words(&self) -> usize {
        self.page_words
    }

    fn page_bytes(&self) -> usize {
        self.page_words * WORD_BYTES
    }

    /// Whether the file failed. What tables say from then on is worth nothing.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    pub(crate) fn take_failure(&self) -> Option<io::Error> {
        self.state.write().failure.take()
    }

    pub(crate) fn taken(&self) -> Taken {
        let state = self.state.read();
        Taken { peak_bytes: number(state.peak_bytes), spilled_bytes: state.spilled_bytes }
    }

    /// A page of zeroes.
    pub(crate) fn allocate(&self) -> usize {
        let mut state = self.state.write();
        let page = state.free.pop().unwrap_or_else(|| {
            state.places.push(AWAY);
            state.places.len() - 1
        });
        let index = self.frame(&mut state);
        let frame = &mut state.frames[index];
        frame.words.iter_mut().for_each(|word| *word.get_mut() = 0);
        self.settle(&mut state, index, page, true);
        page
    }

    pub(crate) fn release(&self, pages: &[usize]) {
        let mut state = self.state.write();
        for page in pages {
            let frame = std::mem::replace(&mut state.places[*page], AWAY);
            if frame != AWAY {
                state.frames[frame].page = NO_PAGE;
                state.empty.push(frame);
            }
            state.free.push(*page);
        }
    }

    /// Looks at the words of a page.
    #[inline]
    pub(crate) fn read<R>(&self, page: usize, look: impl FnOnce(&[AtomicU64]) -> R) -> R {
        self.with(page, false, look)
    }

    /// Looks at the words of a page, to change some.
    #[inline]
    pub(crate) fn change<R>(&self, page: usize, change: impl FnOnce(&[AtomicU64]) -> R) -> R {
        self.with(page, true, change)
    }

    #[inline]
    fn with<R>(&self, page: usize, changes: bool, work: impl FnOnce(&[AtomicU64]) -> R) -> R {
        {
            let state = self.state.read();
            if let Some(frame) = state.frames.get(state.places[page]) {
                return frame.work(changes, work);
            }
        }
        let mut state = self.state.write();
        if state.places[page] == AWAY {
            self.fetch(&mut state, page);
        }
        state.frames[state.places[page]].work(changes, work)
    }

    #[cold]
    fn fetch(&self, state: &mut State, page: usize) {
        let index = self.frame(state);
        let mut bytes = vec![0; self.page_bytes()];
        let read = match &state.file {
            Some(file) => file.read_exact_at(&mut bytes, self.offset(page)),
            None => Err(io::Error::other("a page was never written")),
        };
        if let Err(error) = read {
            self.fail(state, error);
            bytes.fill(0);
        }
        let words = state.frames[index].words.iter_mut();
        for (word, bytes) in words.zip(bytes.chunks_exact(WORD_BYTES)) {
            *word.get_mut() = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        }
        self.settle(state, index, page, false);
    }

    fn settle(&self, state: &mut State, index: usize, page: usize, is_dirty: bool) {
        let frame = &mut state.frames[index];
        frame.page = page;
        *frame.is_dirty.get_mut() = is_dirty;
        *frame.was_used.get_mut() = true;
        state.places[page] = index;
    }

    fn offset(&self, page: usize) -> u64 {
        number(page).saturating_mul(number(self.page_bytes()))
    }

    fn frame_count_max(&self, state: &State) -> usize {
        let directory = state.places.len().saturating_mul(DIRECTORY_BYTES);
        let rest = self.limit_bytes.saturating_sub(directory);
        (rest / self.page_bytes()).max(FRAMES_MIN)
    }

    /// A frame that holds nothing; another page is sent away for it where the limit asks.
    fn frame(&self, state: &mut State) -> usize {
        let count_max = self.frame_count_max(state);
        loop {
            if state.frames.len() <= count_max
                && let Some(index) = state.empty.pop()
            {
                return index;
            }
            if state.frames.len() < count_max || state.failure.is_some() {
                return self.add_frame(state);
            }
            let index = match state.empty.pop() {
                Some(index) => index,
                None => match self.send_away(state) {
                    Some(index) => index,
                    None => return self.add_frame(state),
                },
            };
            if state.frames.len() <= count_max {
                return index;
            }
            // The directory has grown since there were so many.
            state.remove_frame(index);
        }
    }

    fn add_frame(&self, state: &mut State) -> usize {
        state.frames.push(Frame {
            page: NO_PAGE,
            words: (0..self.page_words).map(|_| AtomicU64::new(0)).collect(),
            was_used: AtomicBool::new(false),
            is_dirty: AtomicBool::new(false),
        });
        let count = state.frames.len();
        let taken = count * self.page_bytes() + state.places.len() * DIRECTORY_BYTES;
        debug_assert!(
            taken <= self.limit_bytes || count <= FRAMES_MIN || state.failure.is_some(),
            "{taken} bytes of {}",
            self.limit_bytes
        );
        state.peak_bytes = state.peak_bytes.max(taken);
        count - 1
    }

    /// Sends a page away that was not used since the last turn; its frame, or `None` if that failed.
    fn send_away(&self, state: &mut State) -> Option<usize> {
        let index = loop {
            state.hand = (state.hand + 1) % state.frames.len();
            let frame = &mut state.frames[state.hand];
            if frame.page != NO_PAGE && !std::mem::take(frame.was_used.get_mut()) {
                break state.hand;
            }
        };
        let page = state.frames[index].page;
        if *state.frames[index].is_dirty.get_mut() {
            let words = state.frames[index].words.iter();
            let bytes: Vec<u8> =
                words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
            if let Err(error) = state.write(self.offset(page), &bytes) {
                self.fail(state, error);
                return None;
            }
            state.spilled_bytes += number(bytes.len());
        }
        state.places[page] = AWAY;
        state.frames[index].page = NO_PAGE;
        Some(index)
    }

    fn fail(&self, state: &mut State, error: io::Error) {
        state.failure.get_or_insert(error);
        self.has_failed.store(true, Ordering::Relaxed);
    }
}

impl State {
    /// Takes away a frame that holds nothing.
    fn remove_frame(&mut self, index: usize) {
        self.frames.swap_remove(index);
        let last = self.frames.len();
        if let Some(moved) = self.frames.get(index) {
            if moved.page == NO_PAGE {
                self.empty.iter_mut().filter(|empty| **empty == last).for_each(|it| *it = index);
            } else {
                self.places[moved.page] = index;
            }
        }
        self.hand = 0;
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(unnamed_file()?),
        };
        file.write_all_at(bytes, offset)
    }
}

impl Frame {
    #[inline]
    fn work<R>(&self, changes: bool, work: impl FnOnce(&[AtomicU64]) -> R) -> R {
        // Written only where it differs: many threads come here.
        if !self.was_used.load(Ordering::Relaxed) {
            self.was_used.store(true, Ordering::Relaxed);
        }
        if changes && !self.is_dirty.load(Ordering::Relaxed) {
            self.is_dirty.store(true, Ordering::Relaxed);
        }
        work(&self.words)
    }
}

/// A file that is gone when it is closed, whatever becomes of this process.
fn unnamed_file() -> io::Result<File> {
    // Where TMPDIR says nothing, not the usual place: that is in memory on some systems.
    let large = || Some(PathBuf::from("/var/tmp")).filter(|place| place.is_dir());
    let named = std::env::var_os("TMPDIR").map(PathBuf::from);
    let directory = named.or_else(large).unwrap_or_else(std::env::temp_dir);
    let process = std::process::id();
    for attempt in 0..NAMES_MAX {
        let path = directory.join(format!("ubtrfs-check-{process}-{attempt}"));
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from(io::ErrorKind::AlreadyExists))
}
