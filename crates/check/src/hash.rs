//! Sums of hashes: how two collections are compared without keeping either.
//!
//! Equal collections have equal sums, in whatever order and in however many parts they are added.
//! The hashes are mixed well enough that different ones come to the same sum by accident only.

use ubtrfs_ondisk::Generation;
use ubtrfs_ondisk::extent::BackRef;

const KEYS: [u64; 4] =
    [0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB, 0xD6E8_FEB8_6659_FD93];

/// One step: multiplies to 128 bits and folds the halves.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    let mask = u128::from(u64::MAX);
    let low = u64::try_from(product & mask).unwrap_or(0);
    let high = u64::try_from(product >> 64).unwrap_or(0);
    low ^ high
}

/// The hash of a few numbers.
#[inline]
pub(crate) fn of_numbers<const N: usize>(numbers: [u64; N]) -> u64 {
    let mut state = KEYS[3];
    for number in numbers {
        state = fold(state ^ KEYS[0], number ^ KEYS[1]).wrapping_add(number ^ KEYS[2]);
    }
    finish(state)
}

/// The last rounds of SplitMix64 (Steele, Lea, Flood 2014).
#[inline]
fn finish(mut state: u64) -> u64 {
    state = (state ^ (state >> 30)).wrapping_mul(KEYS[1]);
    state = (state ^ (state >> 27)).wrapping_mul(KEYS[2]);
    state ^ (state >> 31)
}

/// The hash of bytes.
#[inline]
pub(crate) fn of_bytes(bytes: &[u8]) -> u64 {
    let mut state = KEYS[0] ^ crate::view::number(bytes.len());
    let mut words = bytes.chunks_exact(8);
    for word in &mut words {
        let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        state = fold(state ^ KEYS[3], word ^ KEYS[1]).wrapping_add(word);
    }
    let mut last = [0; 8];
    last[..words.remainder().len()].copy_from_slice(words.remainder());
    let last = u64::from_le_bytes(last);
    finish(fold(state ^ KEYS[2], last ^ KEYS[1]).wrapping_add(last))
}

/// The hash of the generation in which a tree block was made.
#[inline]
pub(crate) fn of_generation(generation: Generation) -> u64 {
    of_numbers([6, generation.0])
}

/// The hash of a back reference without its count, which is multiplied with it.
#[inline]
pub(crate) fn of_reference(back_ref: &BackRef) -> u64 {
    match *back_ref {
        BackRef::TreeBlock { root } => of_numbers([1, root.0]),
        BackRef::SharedBlock { parent } => of_numbers([2, parent.0]),
        BackRef::ExtentData { root, inode, offset, .. } => of_numbers([3, root.0, inode.0, offset]),
        BackRef::SharedData { parent, .. } => of_numbers([4, parent.0]),
        BackRef::Owner { root } => of_numbers([5, root.0]),
    }
}
