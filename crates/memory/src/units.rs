//! Which units of a slab are free, as bits.

use crate::slab::SLAB_BYTES;

/// What slabs are cut into.
pub const UNIT_BYTES: usize = 4096;

/// The longest buffer that is cut from a slab.
pub const RUN_BYTES_MAX: usize = UNIT_BYTES << RUN_ORDER_MAX;

/// How many a slab has.
pub(crate) const UNITS: usize = SLAB_BYTES / UNIT_BYTES;
const WORDS: usize = UNITS / 64;

/// A run of a whole word of units.
const RUN_ORDER_MAX: usize = 6;
const ORDER_OF_WORD: u8 = 6;
pub(crate) const WORD_UNITS: usize = 64;

/// What [`Units::rank()`] says of a slab none of whose units is taken.
pub(crate) const RANK_WHOLE: usize = RUN_ORDER_MAX + 1;

/// A set of a slab's units.
#[derive(Clone, Debug)]
pub(crate) struct Units([u64; WORDS]);

/// Units that touch, as many as a power of two, aligned to their number, so that they lie in one word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    first: u16,
    order: u8,
}

impl Run {
    pub(crate) fn offset_bytes(self) -> usize {
        usize::from(self.first) * UNIT_BYTES
    }

    pub(crate) fn len_bytes(self) -> usize {
        UNIT_BYTES << self.order
    }

    /// Whether it is a whole word of units.
    pub(crate) fn is_word(self) -> bool {
        self.order == ORDER_OF_WORD
    }

    #[cfg(test)]
    pub(crate) fn unit(unit: usize) -> Self {
        Self { first: u16::try_from(unit).unwrap(), order: 0 }
    }

    /// The word of units that it lies in, as a run.
    pub(crate) fn word_run(self) -> Self {
        Self { first: self.first & !63, order: ORDER_OF_WORD }
    }

    fn word(self) -> usize {
        usize::from(self.first) / 64
    }

    fn mask(self) -> u64 {
        let ones = u64::MAX >> (64 - (1_u32 << self.order));
        ones << (self.first % 64)
    }
}

/// The order of a run of so many bytes, if a slab can have one.
pub(crate) fn order_of(len_bytes: usize) -> Option<usize> {
    if !len_bytes.is_power_of_two() || !(UNIT_BYTES..=RUN_BYTES_MAX).contains(&len_bytes) {
        return None;
    }
    Some((len_bytes / UNIT_BYTES).trailing_zeros() as usize)
}

/// Bits at multiples of 1, 2, 4…
const ALIGNED: [u64; RUN_ORDER_MAX + 1] = [
    u64::MAX,
    0x5555_5555_5555_5555,
    0x1111_1111_1111_1111,
    0x0101_0101_0101_0101,
    0x0001_0001_0001_0001,
    0x0000_0001_0000_0001,
    1,
];

/// Of the bits where an aligned run of the order begins, all of whose bits are set, those where one of twice the length does.
fn doubled(starts: u64, order: usize) -> u64 {
    starts & starts >> (1 << order) & ALIGNED[order + 1]
}

/// Of a word's bits, those where an aligned run of the order begins of which all are set.
fn starts(word: u64, order: usize) -> u64 {
    (0..order).fold(word, doubled)
}

/// The order of a word's longest run.
fn longest(word: u64) -> Option<usize> {
    let mut starts = word;
    for order in 0..RUN_ORDER_MAX {
        if starts == 0 {
            return order.checked_sub(1);
        }
        starts = doubled(starts, order);
    }
    Some(if starts == 0 { RUN_ORDER_MAX - 1 } else { RUN_ORDER_MAX })
}

impl Units {
    pub(crate) fn none() -> Self {
        Self([0; WORDS])
    }

    pub(crate) fn all() -> Self {
        Self([u64::MAX; WORDS])
    }

    /// The first run of the order in the set.
    pub(crate) fn find(&self, order: usize) -> Option<Run> {
        self.0.iter().enumerate().find_map(|(at, word)| {
            let starts = starts(*word, order);
            let first = at * 64 + starts.trailing_zeros() as usize;
            (starts != 0).then(|| Run {
                first: u16::try_from(first).expect("a slab has few units"),
                order: u8::try_from(order).expect("a word has few orders"),
            })
        })
    }

    /// Whether the set has a unit of the run.
    pub(crate) fn meets(&self, run: Run) -> bool {
        self.0[run.word()] & run.mask() != 0
    }

    /// Whether the set has all units of the run.
    pub(crate) fn has(&self, run: Run) -> bool {
        self.0[run.word()] & run.mask() == run.mask()
    }

    /// What is in both sets.
    pub(crate) fn common(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] & other.0[word]))
    }

    /// How many units of the word that the run lies in are in this set and in the other.
    pub(crate) fn count_common(&self, other: &Self, run: Run) -> usize {
        (self.0[run.word()] & other.0[run.word()]).count_ones() as usize
    }

    pub(crate) fn insert(&mut self, run: Run) {
        self.0[run.word()] |= run.mask();
    }

    pub(crate) fn remove(&mut self, run: Run) {
        self.0[run.word()] &= !run.mask();
    }

    /// The order of the longest run in the set, [`RANK_WHOLE`] if it has all units; `None` if it has none.
    pub(crate) fn rank(&self) -> Option<usize> {
        if self.0.iter().all(|word| *word == u64::MAX) {
            return Some(RANK_WHOLE);
        }
        self.0.iter().filter_map(|word| longest(*word)).max()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bit by bit.
    fn runs_of(set: &Units, order: usize) -> Vec<usize> {
        let has = |unit: usize| set.0[unit / 64] >> (unit % 64) & 1 == 1;
        (0..UNITS)
            .step_by(1 << order)
            .filter(|first| (*first..first + (1 << order)).all(has))
            .collect()
    }

    proptest! {
        #[test]
        fn runs_are_found_as_by_looking_at_each_bit(
            words in prop::array::uniform8(prop_oneof![
                any::<u64>(), Just(u64::MAX), Just(0), any::<u64>().prop_map(|word| word | word << 1 | word >> 7 | word << 13),
            ]),
            order in 0..=RUN_ORDER_MAX,
        ) {
            let set = Units(words);
            let runs = runs_of(&set, order);
            prop_assert_eq!(set.find(order).map(|run| usize::from(run.first)), runs.first().copied());
            let rank = (0..=RUN_ORDER_MAX).rev().find(|order| !runs_of(&set, *order).is_empty());
            let rank = if words == [u64::MAX; 8] { Some(RANK_WHOLE) } else { rank };
            prop_assert_eq!(set.rank(), rank);
        }
    }

    #[test]
    fn a_run_is_taken_out_and_put_back_alone() {
        let mut set = Units::all();
        for order in 0..=RUN_ORDER_MAX {
            let run = set.find(order).expect("a run");
            assert!(usize::from(run.first).is_multiple_of(1 << order), "aligned to its length");
            set.remove(run);
            assert!(!set.meets(run));
            let taken: u32 = set.0.iter().map(|word| word.count_zeros()).sum();
            assert_eq!(taken, (0..=order).map(|order| 1 << order).sum::<u32>());
        }
    }

    #[test]
    fn lengths_that_a_slab_has() {
        assert_eq!(order_of(4096), Some(0));
        assert_eq!(order_of(128 << 10), Some(5));
        assert_eq!(order_of(256 << 10), Some(6));
        for other in [0, 1, 2048, 4097, 12 << 10, 512 << 10, usize::MAX] {
            assert_eq!(order_of(other), None, "{other}");
        }
    }
}
