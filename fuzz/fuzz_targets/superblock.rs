//! A superblock of any fields: parsed, checked and printed, its chunks read and written again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::superblock::{MAGIC, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::{print, verify};
use zerocopy::IntoBytes;

fuzz_target!(|data: &[u8]| {
    let _ = Superblock::parse(data, SUPERBLOCK_OFFSETS[0]);
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    let len = data.len().min(SUPERBLOCK_BYTES);
    bytes[..len].copy_from_slice(&data[..len]);
    let Ok(superblock) = Superblock::peek_mut(&mut bytes) else { return };
    superblock.magic = MAGIC.into();
    let _ = print::line(&print::superblock(superblock));
    let _ = verify::unknown_features(superblock);
    let _ = verify::suspicions(superblock);
    if superblock.seal(SUPERBLOCK_OFFSETS[0]).is_err() {
        return;
    }
    let mut superblock = Superblock::parse(superblock.as_bytes(), SUPERBLOCK_OFFSETS[0])
        .expect("a sealed superblock parses");
    let chunks = superblock.sys_chunks();
    if verify::superblock(&superblock).is_ok() {
        let chunks = chunks.expect("a checked superblock has readable chunks");
        superblock.set_sys_chunks(&chunks).expect("what was read fits");
        assert_eq!(superblock.sys_chunks().expect("what was written"), chunks);
    }
});
