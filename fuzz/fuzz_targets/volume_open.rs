//! A superblock, its address, magic and checksum put right, on a device that is otherwise empty or holds
//! the rest of the input.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_ondisk::csum::{CSUM_FIELD_BYTES, CsumType};
use ubtrfs_ondisk::superblock::{MAGIC, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS};
use ubtrfs_volume::{Device, MemDevice, Volume, VolumeOptions};

fuzz_target!(|bytes: &[u8]| {
    let Some((options, bytes)) = bytes.split_first() else { return };
    let (head, tail) = bytes.split_at(bytes.len().min(SUPERBLOCK_BYTES - CSUM_FIELD_BYTES));
    let mut superblock = [0; SUPERBLOCK_BYTES];
    superblock[CSUM_FIELD_BYTES..][..head.len()].copy_from_slice(head);
    superblock[48..56].copy_from_slice(&SUPERBLOCK_OFFSETS[0].0.to_le_bytes());
    superblock[64..72].copy_from_slice(&MAGIC.to_le_bytes());
    let csum_type = u16::from_le_bytes([superblock[0xc4], superblock[0xc5]]);
    let csum = CsumType::from_disk(csum_type).unwrap_or_default();
    let csum = csum.compute(&superblock[CSUM_FIELD_BYTES..]);
    superblock[..CSUM_FIELD_BYTES].copy_from_slice(&csum);

    let device = MemDevice::new(64 << 20);
    device.write_at(PhysicalAddr(1 << 20), &tail[..tail.len().min(1 << 20)]).unwrap();
    device.write_at(SUPERBLOCK_OFFSETS[0], &superblock).unwrap();
    let options =
        VolumeOptions { read_only: options & 1 != 0, degraded: options & 2 != 0, super_copy: None };
    let Ok(volume) = Volume::open(vec![Arc::new(device)], &options) else { return };
    let mut buf = vec![0; 65536];
    for chunk in volume.chunks() {
        let _ = volume.read(chunk.start, &mut buf, &|_| Ok(()));
    }
});
