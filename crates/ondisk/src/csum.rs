//! The four checksums of the format.

use crate::error::{Corruption, Reason, Result};

/// Bytes that a checksum takes in a superblock or block header, whatever its algorithm.
pub const CSUM_FIELD_BYTES: usize = 32;

/// Which algorithm a filesystem uses for blocks and data. Numbers: `enum btrfs_csum_type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum CsumType {
    /// crc32c, 4 bytes.
    #[default]
    Crc32c,
    /// xxHash64 with seed 0, 8 bytes, little-endian.
    Xxhash,
    /// SHA-256, 32 bytes.
    Sha256,
    /// BLAKE2b with 32 bytes of output.
    Blake2,
}

impl CsumType {
    /// Reads the superblock's number.
    ///
    /// # Errors
    /// `UnknownCsumType` for a number that is not assigned.
    pub fn from_disk(number: u16) -> Result<Self> {
        match number {
            0 => Ok(Self::Crc32c),
            1 => Ok(Self::Xxhash),
            2 => Ok(Self::Sha256),
            3 => Ok(Self::Blake2),
            other => Err(Corruption::new(Reason::UnknownCsumType).have(other).expect("0 to 3")),
        }
    }

    /// The superblock's number.
    pub fn to_disk(self) -> u16 {
        match self {
            Self::Crc32c => 0,
            Self::Xxhash => 1,
            Self::Sha256 => 2,
            Self::Blake2 => 3,
        }
    }

    /// Bytes of one checksum.
    #[inline]
    pub fn len_bytes(self) -> usize {
        match self {
            Self::Crc32c => 4,
            Self::Xxhash => 8,
            Self::Sha256 | Self::Blake2 => 32,
        }
    }

    /// The name that `mkfs.btrfs --csum` takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Crc32c => "crc32c",
            Self::Xxhash => "xxhash",
            Self::Sha256 => "sha256",
            Self::Blake2 => "blake2",
        }
    }

    /// The algorithm of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "crc32c" => Some(Self::Crc32c),
            "xxhash" | "xxhash64" => Some(Self::Xxhash),
            "sha256" => Some(Self::Sha256),
            "blake2" | "blake2b" => Some(Self::Blake2),
            _ => None,
        }
    }

    /// The checksum of `bytes`, zeros behind it.
    pub fn compute(self, bytes: &[u8]) -> [u8; CSUM_FIELD_BYTES] {
        let mut out = [0; CSUM_FIELD_BYTES];
        match self {
            Self::Crc32c => {
                let crc = crc_fast::crc32_iscsi(bytes);
                out[..4].copy_from_slice(&crc.to_le_bytes());
            }
            Self::Xxhash => {
                let hash = xxhash_rust::xxh64::xxh64(bytes, 0);
                out[..8].copy_from_slice(&hash.to_le_bytes());
            }
            Self::Sha256 => {
                use sha2::Digest;
                out.copy_from_slice(&sha2::Sha256::digest(bytes));
            }
            Self::Blake2 => {
                let hash = blake2b_simd::Params::new().hash_length(CSUM_FIELD_BYTES).hash(bytes);
                out.copy_from_slice(hash.as_bytes());
            }
        }
        out
    }

    /// Whether the first bytes of `stored` are the checksum of `bytes`.
    pub fn matches(self, stored: &[u8], bytes: &[u8]) -> bool {
        let len = self.len_bytes();
        stored.get(..len) == Some(&self.compute(bytes)[..len])
    }

    /// Fills `out` with the checksums of each `sectorsize_bytes` of `data`, the last of what is left of it: as many as `out` has room for.
    pub fn compute_sectors(self, data: &[u8], sectorsize_bytes: usize, out: &mut [u8]) {
        let len = self.len_bytes();
        let mut places = out.chunks_exact_mut(len);
        let data = &data[..data.len().min(places.len().saturating_mul(sectorsize_bytes))];
        self.for_each_sector(data, sectorsize_bytes, |sum| {
            if let Some(place) = places.next() {
                place.copy_from_slice(sum);
            }
        });
    }

    /// Tells `each` the whole sectors of `data`, by their numbers and in order, that differ from their checksums in `stored`; those that have none there
    /// are not looked at.
    pub fn for_each_mismatch(
        self,
        data: &[u8],
        sectorsize_bytes: usize,
        stored: &[u8],
        mut each: impl FnMut(usize),
    ) {
        let mut stored = stored.chunks_exact(self.len_bytes());
        let count = (data.len() / sectorsize_bytes).min(stored.len());
        let mut number = 0;
        self.for_each_sector(&data[..count * sectorsize_bytes], sectorsize_bytes, |sum| {
            if stored.next() != Some(sum) {
                each(number);
            }
            number += 1;
        });
    }

    /// Tells `each` the checksum of each sector, in order.
    fn for_each_sector(self, data: &[u8], sectorsize_bytes: usize, mut each: impl FnMut(&[u8])) {
        if self == Self::Crc32c {
            ubtrfs_cpu::crc32c_of_sectors(data, sectorsize_bytes, |sum| each(&sum.to_le_bytes()));
            return;
        }
        let len = self.len_bytes();
        for sector in data.chunks(sectorsize_bytes) {
            each(&self.compute(sector)[..len]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn checksums_of_known_input_match_their_specifications() {
        assert_eq!(hex(&CsumType::Crc32c.compute(b"123456789")[..4]), "839206e3");
        assert_eq!(hex(&CsumType::Xxhash.compute(b"")[..8]), "99e9d85137db46ef");
        assert_eq!(
            hex(&CsumType::Sha256.compute(b"abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(
            hex(&CsumType::Blake2.compute(b"")),
            "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"
        );
    }

    #[test]
    fn names_and_numbers_round_trip() {
        for csum in [CsumType::Crc32c, CsumType::Xxhash, CsumType::Sha256, CsumType::Blake2] {
            assert_eq!(CsumType::from_disk(csum.to_disk()).unwrap(), csum);
            assert_eq!(CsumType::from_name(csum.name()), Some(csum));
        }
    }

    fn mismatches(csum: CsumType, data: &[u8], stored: &[u8]) -> Vec<usize> {
        let mut numbers = Vec::new();
        csum.for_each_mismatch(data, 512, stored, |number| numbers.push(number));
        numbers
    }

    #[test]
    fn checksums_of_sectors_are_those_of_each_and_mismatches_are_found() {
        let data: Vec<u8> = (0..11 * 512 + 100).map(|at| ((at * 31) >> 3) as u8).collect();
        for csum in [CsumType::Crc32c, CsumType::Xxhash, CsumType::Sha256, CsumType::Blake2] {
            let len = csum.len_bytes();
            let each = data.chunks(512).map(|sector| csum.compute(sector)[..len].to_vec());
            let expected: Vec<u8> = each.flatten().collect();
            let mut sums = vec![0; 12 * len];
            csum.compute_sectors(&data, 512, &mut sums);
            assert_eq!(sums, expected);
            let mut some = vec![0; 6 * len + 1];
            csum.compute_sectors(&data, 512, &mut some);
            assert_eq!(some[..6 * len], expected[..6 * len], "as many as there is room for");
            assert_eq!(some[6 * len], 0);

            assert_eq!(mismatches(csum, &data, &sums), []);
            for bad in 0..10 {
                let mut damaged = data.clone();
                damaged[bad * 512 + 511] ^= 0x80;
                damaged[10 * 512] ^= 1;
                assert_eq!(mismatches(csum, &damaged, &sums), [bad, 10]);
                let stored = &sums[..bad * len];
                assert_eq!(mismatches(csum, &damaged, stored), [], "none is stored");
            }
            // What is no whole sector has no checksum.
            let mut damaged = data.clone();
            damaged[11 * 512] ^= 1;
            assert_eq!(mismatches(csum, &damaged, &sums), []);
        }
    }
}
