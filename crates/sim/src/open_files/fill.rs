//! Bytes that say who wrote them: which operation, to which file, where. So what is stale, another
//! file's or another place's is never taken for what belongs there.

use ubtrfs_testkit::Prng;

/// How bytes look to a compressor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fill {
    /// Each word counts: some of it can be compressed.
    Words,
    /// A sector is the same word all over.
    Sectors,
    /// Nothing can be made smaller; these do not tell whose they are.
    Random,
}

const WORD: u64 = 8;
const SECTOR: u64 = 512;
const MARK_WORDS: u8 = 0xa5;
const MARK_SECTORS: u8 = 0xa6;

impl Fill {
    pub(super) fn random(prng: &mut Prng) -> Self {
        [Self::Words, Self::Sectors, Self::Sectors, Self::Random][prng.index(4)]
    }

    /// What operation `number` writes to a file from `offset` on.
    pub(super) fn bytes(self, file: usize, number: u64, offset: u64, len: usize) -> Vec<u8> {
        let word_at = |at: u64| -> [u8; 8] {
            let place = match self {
                Self::Words => at / WORD,
                Self::Sectors => at / SECTOR,
                Self::Random => {
                    let file = u64::try_from(file).unwrap_or(0);
                    let seed = (number << 40) | (file << 36) | (at / WORD);
                    return Prng::new(seed ^ 0x6669_6c6c).next_u64().to_le_bytes();
                }
            };
            let mark = if self == Self::Words { MARK_WORDS } else { MARK_SECTORS };
            let (number, place) = (number.to_le_bytes(), place.to_le_bytes());
            let file = u8::try_from(file + 1).unwrap_or(u8::MAX);
            [mark, file, number[0], number[1], number[2], place[0], place[1], place[2]]
        };
        let end = offset + u64::try_from(len).expect("a length fits");
        let mut bytes = Vec::with_capacity(len);
        let mut at = offset;
        while at < end {
            let inside = usize::try_from(at % WORD).expect("less than a word");
            let word = word_at(at - at % WORD);
            let rest = usize::try_from(end - at).expect("a length that fits");
            let part = &word[inside..][..rest.min(word.len() - inside)];
            bytes.extend_from_slice(part);
            at += u64::try_from(part.len()).expect("a word");
        }
        bytes
    }
}

/// Who wrote bytes that were found at `at`, if they say so.
pub(super) fn origin(bytes: &[u8], at: usize) -> String {
    let inside = at % 8;
    let word = bytes.get((8 - inside) % 8..).and_then(|rest| rest.first_chunk::<8>());
    let Some([mark, file, n0, n1, n2, p0, p1, p2]) = word.copied() else {
        return String::new();
    };
    let unit = match mark {
        MARK_WORDS => WORD,
        MARK_SECTORS => SECTOR,
        _ => return String::new(),
    };
    let number = u64::from_le_bytes([n0, n1, n2, 0, 0, 0, 0, 0]);
    let place = u64::from_le_bytes([p0, p1, p2, 0, 0, 0, 0, 0]) * unit;
    format!(" (what operation {number} wrote to file {} at {place})", file.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_an_operation_differ_by_operation_file_and_place_and_say_so() {
        for fill in [Fill::Words, Fill::Sectors, Fill::Random] {
            let whole = fill.bytes(2, 7, 0, 10_000);
            assert_eq!(fill.bytes(2, 7, 4099, 600), whole[4099..4699]);
            assert_ne!(fill.bytes(2, 8, 0, 10_000), whole);
            assert_ne!(fill.bytes(1, 7, 0, 10_000), whole);
            assert_ne!(whole[..4096], whole[4096..8192]);
        }
        let bytes = Fill::Words.bytes(2, 7, 4099, 600);
        assert_eq!(origin(&bytes, 4099), " (what operation 7 wrote to file 2 at 4104)");
        assert_eq!(origin(&[0; 24], 4096), "");
    }
}
