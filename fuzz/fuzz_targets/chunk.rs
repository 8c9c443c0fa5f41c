//! A chunk item of any content: parsed, checked and written again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ubtrfs_ondisk::chunk::Chunk;
use ubtrfs_ondisk::{LogicalAddr, print, verify};

fuzz_target!(|data: &[u8]| {
    let start = LogicalAddr(1 << 20);
    let Ok((chunk, used)) = Chunk::parse_prefix(start, data) else { return };
    let _ = print::chunk(&chunk);
    let _ = chunk.end();
    let _ = verify::chunk(&chunk, 4096, None);
    let written = chunk.to_bytes();
    assert_eq!(written.len(), used);
    assert_eq!(Chunk::parse(start, &written).expect("what was written"), chunk);
});
