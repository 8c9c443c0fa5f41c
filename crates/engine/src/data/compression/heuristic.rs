//! Guessing whether data is worth compressing, from a sample of it.
//!
//! Two questions. Do byte values occur unevenly? The order-0 entropy of the sample bounds what a
//! coder without matches could save. Do strings repeat? Short strings taken at even distances are
//! hashed, and those that occur twice counted. Data that answers both with no (compressed files,
//! encrypted ones, noise) is stored as it is. A wrong guess costs space or time, never data.
//! A part of the sample answers the first question where the answer is a plain yes, as of most texts and programs.

/// Shorter data is not sampled but tried.
const SAMPLED_BYTES_MIN: usize = 16 << 10;
/// Bytes taken at each sampled place.
const RUN_BYTES: usize = 16;
/// Distance of the sampled places.
const STRIDE_BYTES: usize = 256;
/// Sampled places of which one is looked at first. No power of two, as data that is made of blocks has those.
const FIRST_SHARE: usize = 9;
/// Below this order-0 entropy, in 1/256 bits a byte, a part of the sample is enough: that of noise is too far above it for chance.
const FIRST_ENTROPY_MAX: u64 = 6 * 256;
/// Above this order-0 entropy, in 1/256 bits a byte, only repetition can make data smaller.
const ENTROPY_MAX: u64 = 7 * 256 + 218;
/// Sampled strings of which one must occur twice, so that the data counts as repetitive.
const REPEAT_SHARE: usize = 16;

/// Whether `data` looks as if compressing it saves space.
pub fn is_worth_compressing(data: &[u8]) -> bool {
    if data.len() < SAMPLED_BYTES_MIN {
        return true;
    }
    sampled_entropy(data, STRIDE_BYTES * FIRST_SHARE) < FIRST_ENTROPY_MAX
        || sampled_entropy(data, STRIDE_BYTES) < ENTROPY_MAX
        || is_repetitive(data)
}

/// Order-0 entropy of what is sampled at this distance, in 1/256 bits a byte, with what such a sample falls short of.
fn sampled_entropy(data: &[u8], stride: usize) -> u64 {
    let mut counts = [0_u32; 256];
    let mut sampled = 0;
    for place in data.chunks_exact(stride) {
        for byte in &place[..RUN_BYTES] {
            counts[usize::from(*byte)] += 1;
        }
        sampled += RUN_BYTES as u64;
    }
    // A sample of n bytes of noise falls short of 8 bits by 255 / (2 n ln 2), on average.
    entropy(&counts, sampled) + 47_090 / sampled.max(1)
}

fn is_repetitive(data: &[u8]) -> bool {
    let mut seen = [0_u32; 1024];
    let (mut strings, mut repeats) = (0, 0);
    for place in data.chunks_exact(STRIDE_BYTES) {
        for four in place[..RUN_BYTES].chunks_exact(4) {
            let four = u32::from_le_bytes(four.try_into().expect("a slice of four"));
            let slot = &mut seen[(four.wrapping_mul(0x9E37_79B1) >> 22) as usize];
            repeats += usize::from(*slot == four);
            *slot = four;
            strings += 1;
        }
    }
    repeats * REPEAT_SHARE > strings
}

/// Order-0 entropy in 1/256 bits a byte: log2(total) − Σ count·log2(count) / total.
fn entropy(counts: &[u32; 256], total: u64) -> u64 {
    let sum: u64 = counts.iter().map(|count| u64::from(*count) * log2(u64::from(*count))).sum();
    log2(total).saturating_sub(sum / total.max(1))
}

/// log2 in 1/256, from the exponent and a quadratic for the mantissa (error below 0.01).
fn log2(value: u64) -> u64 {
    let Some(exponent) = value.checked_ilog2() else {
        return 0;
    };
    // The mantissa's part above 1, in 1/256.
    let above = (u128::from(value) << 8 >> exponent) as u64 & 0xff;
    // log2(1 + x) ≈ x + 0.344·x·(1 − x)
    u64::from(exponent) * 256 + above + above * (256 - above) * 88 / 65_536
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize) -> Vec<u8> {
        let mut state = 0x1234_5678_9abc_def0_u64;
        std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .take(len)
        .collect()
    }

    #[test]
    fn is_worth_compressing_noise_is_not() {
        assert!(!is_worth_compressing(&noise(128 << 10)));
        assert!(!is_worth_compressing(&noise(20 << 10)));
    }

    /// Blocks of noise, with 12 bytes at the beginning of each that are always the same: were the first part of the sample taken at a
    /// distance of a power of two, half of it would be such.
    #[test]
    fn is_worth_compressing_noise_in_blocks_is_not() {
        let mut bytes = noise(128 << 10);
        for block in bytes.chunks_mut(4096) {
            block[..12].fill(7);
        }
        assert!(!is_worth_compressing(&bytes));
    }

    /// Of any length, at any place: no part of it may look uneven by chance.
    #[test]
    fn is_worth_compressing_no_stretch_of_noise_is() {
        let all = noise(8 << 20);
        for len in [16 << 10, 17 << 10, 32 << 10, 100 << 10, 128 << 10] {
            for (at, part) in all.chunks_exact(len).enumerate() {
                assert!(!is_worth_compressing(part), "part {at} of {len} bytes");
            }
        }
    }

    #[test]
    fn is_worth_compressing_text_zeros_and_skewed_bytes_are() {
        let text = include_str!("heuristic.rs").repeat(8);
        assert!(is_worth_compressing(text.as_bytes()));
        assert!(is_worth_compressing(&vec![0; 64 << 10]));
        let skewed: Vec<u8> = noise(64 << 10).iter().map(|byte| byte & 0x3f).collect();
        assert!(is_worth_compressing(&skewed));
    }

    #[test]
    fn is_worth_compressing_repeated_noise_is() {
        assert!(is_worth_compressing(&noise(2048).repeat(32)));
    }

    #[test]
    fn log2_is_near_the_real_one() {
        for value in [1_u64, 2, 3, 5, 100, 1000, 4097, 1 << 40] {
            #[expect(clippy::cast_precision_loss, reason = "a test's tolerance")]
            let (have, want) = (log2(value) as f64 / 256.0, (value as f64).log2());
            assert!((have - want).abs() < 0.015, "{value}: {have} {want}");
        }
    }
}
