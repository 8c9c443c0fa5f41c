//! Bytes that say which write they are of: the file, the block and the version, so that a block which shows another's bytes, or
//! older ones of its own, is never taken for right.

/// A record begins at each offset that is a multiple of this, or of [`NOISE_STRETCH`] in what does not compress.
const RECORD: u64 = 16;
/// Of so many bytes of noise the first record is readable.
const NOISE_STRETCH: u64 = 256;
/// Blocks after which a mixed write turns from what compresses to what does not, and back.
const MIXED_BLOCKS: u64 = 3;
const MARK: u8 = 0xA5;

/// Whether bytes can be compressed, which decides whether a filesystem tries to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Grain {
    Text,
    Noise,
    Mixed,
}

/// A write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    pub(super) file: usize,
    pub(super) version: u32,
    pub(super) block: u64,
    pub(super) grain: Grain,
}

impl Stamp {
    /// What it writes at `start`.
    pub(super) fn bytes(&self, start: u64, len: u64) -> Vec<u8> {
        let end = start + len;
        let mut bytes = Vec::with_capacity(super::model::index(len + RECORD));
        let mut at = start / RECORD * RECORD;
        while at < end {
            let record = self.record(at);
            let from = super::model::index(start.saturating_sub(at));
            let upto = super::model::index((end - at).min(RECORD));
            bytes.extend_from_slice(&record[from..upto]);
            at += RECORD;
        }
        bytes
    }

    fn record(&self, at: u64) -> [u8; 16] {
        let block = at / self.block;
        let is_noise = match self.grain {
            Grain::Text => false,
            Grain::Noise => true,
            Grain::Mixed => (block / MIXED_BLOCKS) % 2 == 1,
        };
        let mut record = [b'.'; 16];
        if is_noise && !at.is_multiple_of(NOISE_STRETCH) {
            let seed = (u64::from(self.version) << 32) ^ at ^ ((self.file as u64) << 56);
            record.copy_from_slice(&crate::Prng::new(seed).bytes(16));
        } else {
            record[0] = MARK;
            record[1] = u8::try_from(self.file).expect("few files");
            record[2..4].copy_from_slice(&u16::try_from(block).expect("small files").to_le_bytes());
            record[4..8].copy_from_slice(&self.version.to_le_bytes());
        }
        record
    }
}

/// Which write a byte is of, as the records at and before it say; the bytes begin at `start` of the file.
fn describe(bytes: &[u8], start: u64, at: u64) -> String {
    let byte = bytes[super::model::index(at - start)];
    for step in [RECORD, NOISE_STRETCH] {
        let record = at / step * step;
        let Some(from) = record.checked_sub(start).map(super::model::index) else { continue };
        let Some(record) = bytes.get(from..from + 8) else { continue };
        if record[0] == MARK {
            let block = u16::from_le_bytes([record[2], record[3]]);
            let version = u32::from_le_bytes([record[4], record[5], record[6], record[7]]);
            return format!("{byte} (file {}, block {block}, version {version})", record[1]);
        }
    }
    byte.to_string()
}

/// Names the first byte that is not as expected.
pub(super) fn assert_same(have: &[u8], expect: &[u8], start: u64, block: u64) {
    assert_eq!(have.len(), expect.len());
    if have != expect {
        panic!("{}", difference(have, expect, start, block));
    }
}

/// Where two, of one length, that begin at `start` of a file differ first.
pub(super) fn difference(have: &[u8], expect: &[u8], start: u64, block: u64) -> String {
    let Some(first) = have.iter().zip(expect).position(|(have, expect)| have != expect) else {
        return "no difference".to_owned();
    };
    let at = start + u64::try_from(first).expect("a length fits");
    let (have, expect) = (describe(have, start, at), describe(expect, start, at));
    format!("at {at} (block {}): have {have}, expect {expect}", at / block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_part_are_those_of_the_whole() {
        for grain in [Grain::Text, Grain::Noise, Grain::Mixed] {
            let stamp = Stamp { file: 1, version: 77, block: 4096, grain };
            let whole = stamp.bytes(0, 50_000);
            for (start, len) in [(0, 1), (15, 2), (4095, 4098), (20_001, 29_999), (7, 0)] {
                let (from, upto) = (start as usize, (start + len) as usize);
                assert_eq!(stamp.bytes(start, len), whole[from..upto]);
            }
            let other = Stamp { version: 78, ..stamp }.bytes(0, 50_000);
            assert!(whole.chunks(4096).zip(other.chunks(4096)).all(|(one, two)| one != two));
            assert!(whole.chunks(4096).skip(1).all(|one| one != &whole[..one.len()]));
        }
    }

    #[test]
    fn difference_names_both_writes() {
        let stamp = Stamp { file: 2, version: 5, block: 4096, grain: Grain::Noise };
        let one = stamp.bytes(4096, 4096);
        let two = Stamp { version: 6, ..stamp }.bytes(4096, 4096);
        let said = difference(&one, &two, 4096, 4096);
        assert!(said.contains("file 2, block 1, version 5"), "{said}");
        assert!(said.contains("file 2, block 1, version 6"), "{said}");
    }
}
