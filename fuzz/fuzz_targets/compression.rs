//! Compressed extents of any bytes decode or give an error; what is encoded decodes to itself.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ubtrfs_engine::data::compression::{Method, compress, decompress};
use ubtrfs_ondisk::file_extent::Compression;

const SECTORSIZE_BYTES: usize = 4096;

fuzz_target!(|data: &[u8]| {
    let [choice, data @ ..] = data else { return };
    let compression = Compression::from_disk(choice & 3).expect("two bits are a compression");
    let ram_bytes = (usize::from(choice >> 2) + 1) * SECTORSIZE_BYTES / 2;
    let mut out = vec![0; ram_bytes];
    let _ = decompress(compression, data, &mut out, SECTORSIZE_BYTES);

    let method = Method::new(compression, i32::from(choice >> 5));
    let mut encoded = Vec::new();
    if compress(method, data, &mut encoded, 4 * data.len() + 64, SECTORSIZE_BYTES) {
        let mut decoded = vec![0; data.len()];
        decompress(compression, &encoded, &mut decoded, SECTORSIZE_BYTES)
            .expect("what was encoded decodes");
        assert_eq!(decoded, data);
    }
});
