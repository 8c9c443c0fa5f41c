//! What a file is when nobody changes it, and what may be seen of it while somebody does.

use super::file::{BLOCK, BLOCKS_MAX, Moving, contents};
use super::range;
use crate::address_space::OpenFile;
use crate::error::Error;
use crate::fiemap::FiemapSync;
use crate::offset::FileOffset;

const BLOCK_COUNT: usize = BLOCKS_MAX as usize;

/// What lies in a block, whatever it reads as.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Hole,
    Unwritten,
    Data,
}

type Places = [Place; BLOCK_COUNT];

/// A file of which nobody changes anything.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct State {
    pub(super) bytes: Vec<u8>,
    places: Places,
}

/// A state, and by which calls it came: the first call is 0.
pub(super) struct Moment {
    pub(super) done: Vec<usize>,
    pub(super) state: State,
}

fn at_block(block: usize) -> FileOffset {
    FileOffset::new(block as u64 * BLOCK)
}

fn block_of(offset: FileOffset) -> usize {
    usize::try_from(offset.bytes() / BLOCK).unwrap()
}

impl State {
    /// What FIEMAP, seeks and reads say, which may not contradict each other.
    pub(super) fn of(file: &OpenFile<Moving>) -> Self {
        let state = Self { bytes: contents(file), places: told_by_fiemap(file) };
        for block in 0..BLOCK_COUNT {
            let (at, data) = (at_block(block), state.next(block, true));
            let none = || Error::NoData { offset: at };
            assert_eq!(file.seek_data(at), data.map(at_block).ok_or_else(none), "{state:?}");
            let hole = match state.next(block, false) {
                _ if block >= state.blocks() => Err(none()),
                Some(hole) => Ok(at_block(hole)),
                None => Ok(file.space().size()),
            };
            assert_eq!(file.seek_hole(at), hole, "{state:?}");
        }
        state
    }

    /// In which the file has bytes.
    fn blocks(&self) -> usize {
        self.bytes.len().div_ceil(BLOCK as usize)
    }

    fn is_data(&self, block: usize) -> bool {
        block < self.blocks() && self.places[block] == Place::Data
    }

    /// The first block of the file from `block` on that has data, or that has none.
    fn next(&self, block: usize, is_data: bool) -> Option<usize> {
        (block..self.blocks()).find(|block| self.is_data(*block) == is_data)
    }
}

fn told_by_fiemap(file: &OpenFile<Moving>) -> Places {
    let mut places = [Place::Hole; BLOCK_COUNT];
    let extents = file.fiemap(range(0, BLOCK * BLOCKS_MAX), BLOCK_COUNT, FiemapSync::AsIs).unwrap();
    let mut told_to = 0;
    for extent in extents {
        let (first, end) = (block_of(extent.range.start), block_of(extent.range.end));
        assert!(told_to <= first && first < end, "{extent:?} in front of what was told");
        let place = if extent.flags.is_unwritten { Place::Unwritten } else { Place::Data };
        places[first..end].fill(place);
        told_to = end;
    }
    places
}

/// Seeks and FIEMAP tell of each place what it was at some moment: above all they tell no hole where there is data before and after.
pub(super) fn look_at_places(file: &OpenFile<Moving>, name: &str, moments: &[Moment]) {
    let any = |is_so: &dyn Fn(&State) -> bool| moments.iter().any(|moment| is_so(&moment.state));
    let may_be = |block, is_data| any(&|state| state.is_data(block) == is_data);
    let may_all_be = |first: usize, end, is_data| (first..end).all(|block| may_be(block, is_data));
    let may_end_at = |offset: FileOffset| any(&|state| state.bytes.len() as u64 == offset.bytes());
    let has_nothing = |from: usize| any(&|state| may_all_be(from, state.blocks(), false));
    for from in [0, 1, 2] {
        let (at, shown) = (at_block(from), format!("{name}, from block {from}"));
        match file.seek_data(at) {
            Ok(found) => {
                let block = block_of(found);
                let is_so = may_be(block, true) && may_all_be(from, block, false);
                assert!(is_so && at_block(block) == found, "{shown}: data at {found}");
            }
            Err(_) => assert!(has_nothing(from), "{shown}: no data"),
        }
        match file.seek_hole(at) {
            Ok(found) => {
                let (block, end) = (block_of(found), block_of(found.round_up(BLOCK)));
                let is_hole = at_block(block) == found && may_be(block, false);
                let is_so = (is_hole || may_end_at(found)) && may_all_be(from, end, true);
                assert!(is_so, "{shown}: a hole at {found}");
            }
            Err(_) => assert!(any(&|state| state.blocks() <= from), "{shown}: no file"),
        }
    }
    for (block, place) in told_by_fiemap(file).into_iter().enumerate() {
        // What is to be allocated may be a hole before.
        let may_be = |was: Place| was == place || (was, place) == (Place::Unwritten, Place::Hole);
        let is_so = any(&|state| may_be(state.places[block]));
        assert!(is_so, "{name}: {place:?} is told of block {block}");
    }
}

/// The calls after which each reading may have been; what was seen once is not taken back by the next.
pub(super) fn follow(seen: &[Vec<u8>], moments: &[Moment]) -> bool {
    let Some((first, later)) = seen.split_first() else { return true };
    let mut reached: Vec<&Moment> = fitting(first, moments).collect();
    for bytes in later {
        let goes_on =
            |next: &&Moment| reached.iter().any(|before| next.done.starts_with(&before.done));
        reached = fitting(bytes, moments).filter(goes_on).collect();
    }
    !reached.is_empty()
}

fn fitting<'a>(bytes: &'a [u8], moments: &'a [Moment]) -> impl Iterator<Item = &'a Moment> {
    moments.iter().filter(move |moment| moment.state.bytes == bytes)
}
