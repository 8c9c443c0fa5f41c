//! crc32c of many sectors.
//!
//! Each sector has a checksum of its own, so that several can be had side by side with nothing to put together. That keeps the
//! crc32 instruction of a processor busy, which takes 8 bytes a cycle but gives its result only after three.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use crate::processor::Processor;

/// Sectors side by side: more than the cycles that the instruction takes.
#[cfg(target_arch = "x86_64")]
const LANES: usize = 4;
/// Bytes that the instruction takes at a time.
#[cfg(target_arch = "x86_64")]
const WORD: usize = 8;

/// Tells `each` the crc32c (Castagnoli, begun and ended inverted, as of [`crc_fast::crc32_iscsi`]) of each `sectorsize_bytes` of `data`, in order; the
/// last of what is left.
///
/// # Panics
/// If `sectorsize_bytes` is zero.
pub fn crc32c_of_sectors(data: &[u8], sectorsize_bytes: usize, mut each: impl FnMut(u32)) {
    #[cfg(target_arch = "x86_64")]
    let data = of_groups(data, sectorsize_bytes, &mut each);
    for sector in data.chunks(sectorsize_bytes) {
        each(crc_fast::crc32_iscsi(sector));
    }
}

/// Tells `each` the checksums of the first sectors, as many as this processor has side by side faster than by the library; returns the rest.
#[cfg(target_arch = "x86_64")]
fn of_groups<'a>(data: &'a [u8], sectorsize_bytes: usize, each: &mut impl FnMut(u32)) -> &'a [u8] {
    if !Processor::this().is_amd_narrow || !sectorsize_bytes.is_multiple_of(WORD) {
        return data;
    }
    let mut groups = data.chunks_exact(sectorsize_bytes * LANES);
    for group in groups.by_ref() {
        // SAFETY: `is_amd_narrow` says that the processor has SSE 4.2.
        let sums = unsafe { of_lanes(group, sectorsize_bytes) };
        sums.into_iter().for_each(&mut *each);
    }
    groups.remainder()
}

/// Of [`LANES`] sectors of whole words.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn of_lanes(data: &[u8], sectorsize_bytes: usize) -> [u32; LANES] {
    use std::arch::x86_64::_mm_crc32_u64;
    let (front, back) = data.split_at(sectorsize_bytes * 2);
    let ((a, b), (c, d)) = (front.split_at(sectorsize_bytes), back.split_at(sectorsize_bytes));
    let (a, b, c, d) = (words(a), words(b), words(c), words(d));
    let mut sums = [u64::from(!0_u32); LANES];
    for (((a, b), c), d) in a.zip(b).zip(c).zip(d) {
        sums[0] = _mm_crc32_u64(sums[0], a);
        sums[1] = _mm_crc32_u64(sums[1], b);
        sums[2] = _mm_crc32_u64(sums[2], c);
        sums[3] = _mm_crc32_u64(sums[3], d);
    }
    // The register has 32 bits.
    sums.map(|sum| !(sum as u32))
}

#[cfg(target_arch = "x86_64")]
fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let (words, _) = bytes.as_chunks::<WORD>();
    words.iter().map(|word| u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of_sectors(data: &[u8], sectorsize_bytes: usize) -> Vec<u32> {
        let mut sums = Vec::new();
        crc32c_of_sectors(data, sectorsize_bytes, |sum| sums.push(sum));
        sums
    }

    /// From the catalogue of CRCs, and RFC 3720, B.4.
    #[test]
    fn checksums_are_those_of_the_catalogue() {
        assert_eq!(of_sectors(b"123456789", 9), [0xe306_9283]);
        let rising: Vec<u8> = (0..32).collect();
        let data = [&[0; 32][..], &[0xff; 32], &rising, &[0; 32], &[0xff; 5]].concat();
        let sums = of_sectors(&data, 32);
        assert_eq!(sums[..4], [0x8a91_36aa, 0x62a8_ab43, 0x46dd_794e, 0x8a91_36aa]);
        assert_eq!(sums.len(), 5);
        assert_eq!(of_sectors(&[], 4096), []);
    }

    proptest! {
        /// The same as one behind the other, by another's code; on whatever processor this runs, and side by side where it can.
        #[test]
        fn checksums_side_by_side_are_those_of_each(
            seed in any::<u64>(),
            len in 0_usize..40_000,
            sectorsize in prop::sample::select(vec![1_usize, 7, 8, 24, 512, 1024, 4096, 4100, 16384]),
            skipped in 0_usize..9,
        ) {
            let mut state = seed | 1;
            let data: Vec<u8> = std::iter::repeat_with(|| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 24) as u8
            })
            .take(len + skipped)
            .collect();
            let data = &data[skipped..];
            let expected: Vec<u32> = data.chunks(sectorsize).map(crc_fast::crc32_iscsi).collect();
            prop_assert_eq!(of_sectors(data, sectorsize), &expected[..]);
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("sse4.2") && sectorsize.is_multiple_of(WORD) {
                let groups = data.chunks_exact(sectorsize * LANES);
                // SAFETY: looked at just now.
                let sums = groups.flat_map(|group| unsafe { of_lanes(group, sectorsize) });
                let sums: Vec<u32> = sums.collect();
                prop_assert_eq!(&sums[..], &expected[..sums.len()]);
                prop_assert_eq!(sums.len(), data.len() / (sectorsize * LANES) * LANES);
            }
        }
    }
}
