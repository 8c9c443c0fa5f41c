//! The hashes that the format derives keys from. All are crc32c with a seed given and, unlike
//! the checksum, without the final inversion.

/// crc32c (Castagnoli, reflected) of `bytes`, continuing the raw register `seed`, with no final
/// inversion: `crc32c_raw(!0, bytes) ^ !0` is the usual crc32c.
pub fn crc32c_raw(seed: u32, bytes: &[u8]) -> u32 {
    let mut digest =
        crc_fast::Digest::new_with_init_state(crc_fast::CrcAlgorithm::Crc32Iscsi, u64::from(seed));
    digest.update(bytes);
    !u32::try_from(digest.finalize()).expect("a 32-bit crc fits")
}

/// Key offset of the DIR_ITEM or XATTR_ITEM of a name: crc32c with seed `~1`.
pub fn name_hash(name: &[u8]) -> u64 {
    u64::from(crc32c_raw(!1, name))
}

/// Key offset of an INODE_EXTREF: crc32c of the name, the parent inode (its low 32 bits) as seed.
pub fn extref_hash(parent: crate::InodeNo, name: &[u8]) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "the format takes the low 32 bits")]
    let seed = parent.0 as u32;
    u64::from(crc32c_raw(seed, name))
}

/// Key offset of a keyed EXTENT_DATA_REF, and the order of inline ones: two crc32c with seed `~0`,
/// the root in the high one, owner then offset in the low one, `(high << 31) ^ low`.
pub fn extent_data_ref_hash(root: crate::RootId, owner: crate::InodeNo, offset: u64) -> u64 {
    let high = crc32c_raw(!0, &root.0.to_le_bytes());
    let low = crc32c_raw(!0, &owner.0.to_le_bytes());
    let low = crc32c_raw(low, &offset.to_le_bytes());
    (u64::from(high) << 31) ^ u64::from(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_raw_check_value_matches_the_catalogue() {
        assert_eq!(!crc32c_raw(!0, b"123456789"), 0xE306_9283);
        assert_eq!(!crc32c_raw(crc32c_raw(!0, b"12345"), b"6789"), 0xE306_9283);
    }

    #[test]
    fn name_hash_of_default_matches_what_every_mkfs_writes() {
        // The DIR_ITEM of the root tree directory: (6 DIR_ITEM 2378154706).
        assert_eq!(name_hash(b"default"), 2_378_154_706);
    }
}
