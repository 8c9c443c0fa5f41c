//! Randomness that a seed determines.

/// A generator of numbers (SplitMix64: Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Prng {
    state: u64,
    seed: u64,
}

impl Prng {
    /// A sequence that the seed determines.
    pub fn new(seed: u64) -> Self {
        Self { state: seed, seed }
    }

    /// From `UBTRFS_SEED` where that is set, else from `default`; prints which, so that a failure
    /// can be repeated.
    ///
    /// # Panics
    /// If the variable is not a number.
    pub fn of_test(default: u64) -> Self {
        let seed = match std::env::var("UBTRFS_SEED") {
            Ok(text) => text.parse().expect("UBTRFS_SEED is a number"),
            Err(_) => default,
        };
        println!("UBTRFS_SEED={seed}");
        Self::new(seed)
    }

    /// What it began with.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The next sixty-four bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    ///
    /// # Panics
    /// If `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        assert!(end > 0, "nothing is below 0");
        // The high word of the product; the bias is far below what a test can see.
        let product = u128::from(self.next_u64()) * u128::from(end);
        u64::try_from(product >> 64).expect("the high half fits")
    }

    /// An index into something `len` long.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn index(&mut self, len: usize) -> usize {
        let end = u64::try_from(len).expect("a length fits");
        usize::try_from(self.below(end)).expect("below a length")
    }

    /// True `numerator` times out of `denominator`.
    ///
    /// # Panics
    /// If `denominator` is 0.
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }

    /// Overwrites `bytes` with what no compression makes smaller.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }

    /// Bytes that no compression makes smaller.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes);
        bytes
    }

    /// Text of words that repeat: compresses to about a third.
    pub fn text(&mut self, len: usize) -> Vec<u8> {
        let words: Vec<Vec<u8>> = (0..200)
            .map(|_| {
                let len = 3 + self.index(8);
                (0..len).map(|_| b'a' + u8::try_from(self.below(26)).expect("below 26")).collect()
            })
            .collect();
        let mut bytes = Vec::with_capacity(len + 16);
        while bytes.len() < len {
            bytes.extend_from_slice(&words[self.index(words.len())]);
            bytes.push(if self.chance(1, 12) { b'\n' } else { b' ' });
        }
        bytes.truncate(len);
        bytes
    }
}
