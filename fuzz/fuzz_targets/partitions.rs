//! The first sectors of a disk, and the sectors that a chain of logical partitions may lead to.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_volume::partition::partitions;
use ubtrfs_volume::{Device, MemDevice};

const GPT_AT: usize = 512;
const GPT_HEADER_BYTES: usize = 92;

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = bytes.to_vec();
    // Lets the fuzzer behind the checksum of a GPT's header.
    if bytes.len() >= GPT_AT + GPT_HEADER_BYTES && bytes[GPT_AT..].starts_with(b"EFI PART") {
        bytes[GPT_AT + 16..GPT_AT + 20].fill(0);
        let crc = crc32(&bytes[GPT_AT..GPT_AT + GPT_HEADER_BYTES]);
        bytes[GPT_AT + 16..GPT_AT + 20].copy_from_slice(&crc.to_le_bytes());
    }
    let device = MemDevice::from_bytes(&bytes);
    for partition in partitions(&device).unwrap_or_default() {
        let end = partition.start_bytes.checked_add(partition.len_bytes);
        assert!(end.is_some_and(|end| end <= device.len_bytes()));
        let mut first = [0; 1];
        if partition.len_bytes > 0 {
            device.read_at(PhysicalAddr(partition.start_bytes), &mut first).unwrap();
        }
    }
});

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
        })
    })
}
