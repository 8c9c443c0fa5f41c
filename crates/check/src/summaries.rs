//! Summaries of leaves and nodes, each written as the words of it that are not zero.

use ubtrfs_rt::Arc;

use crate::run::{SUMMARY_WORDS, Summary};
use crate::store::Store;
use crate::table::Table;
use crate::view::number;

/// Words that are stored together.
const PART_WORDS: usize = 8;
/// Room for the words of a summary, and the one before them.
const ROOM_WORDS: usize = 8 * PART_WORDS;

/// One bit of that one says whether a word is there.
const _: () = assert!(SUMMARY_WORDS < ROOM_WORDS && SUMMARY_WORDS <= 64);

/// All summaries that were made. Each has a number, which is not 0.
pub(crate) struct Summaries {
    /// For each: a bit for each word that is not zero, and those words.
    parts: Table<PART_WORDS>,
}

impl Summaries {
    pub(crate) fn new(store: &Arc<Store>) -> Self {
        Self { parts: Table::new(store) }
    }

    /// Keeps a summary; its number.
    pub(crate) fn push(&mut self, summary: &Summary) -> u64 {
        let place = self.parts.len();
        let mut packed = [0; ROOM_WORDS];
        let mut len = 1;
        for (bit, word) in summary.to_words().into_iter().enumerate() {
            if word != 0 {
                packed[0] |= 1 << bit;
                packed[len] = word;
                len += 1;
            }
        }
        let (parts, _) = packed.as_chunks::<PART_WORDS>();
        parts[..len.div_ceil(PART_WORDS)].iter().for_each(|part| self.parts.push(*part));
        number(place) + 1
    }

    /// The summary of a number that was given out.
    pub(crate) fn get(&self, number: u64) -> Summary {
        let place = usize::try_from(number - 1).unwrap_or(0);
        let mut words = self.parts.iter_from(place).flatten();
        let mask: u64 = words.next().unwrap_or(0);
        let words =
            std::array::from_fn(
                |bit| {
                    if mask >> bit & 1 == 0 { 0 } else { words.next().unwrap_or(0) }
                },
            );
        Summary::of_words(&words)
    }
}
