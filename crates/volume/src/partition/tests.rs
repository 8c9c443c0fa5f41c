use super::*;

use proptest::prelude::*;

use crate::device::MemDevice;

/// A record of an MBR or a link of the chain: type, start and length in sectors.
fn record(os_type: u8, lb_start: u32, lb_size: u32) -> [u8; 16] {
    PartRecord { os_type, lb_start, lb_size, ..PartRecord::zero() }.to_bytes()
}

fn put_table(device: &MemDevice, sector: u64, records: &[[u8; 16]]) {
    let mut bytes = [0; 512];
    for (index, record) in records.iter().enumerate() {
        bytes[446 + index * 16..][..16].copy_from_slice(record);
    }
    bytes[510..].copy_from_slice(&[0x55, 0xAA]);
    device.write_at(PhysicalAddr(sector * 512), &bytes).unwrap();
}

fn starts(device: &MemDevice) -> Vec<(u32, u64, u64)> {
    let found = partitions(device).unwrap();
    found.iter().map(|p| (p.number, p.start_bytes / 512, p.len_bytes / 512)).collect()
}

#[test]
fn partitions_without_a_table_is_none() {
    assert!(partitions(&MemDevice::new(0)).unwrap().is_empty());
    assert!(partitions(&MemDevice::new(1 << 20)).unwrap().is_empty());
    let error = partition(&MemDevice::new(1 << 20), 1).unwrap_err();
    assert!(error.to_string().contains("no partition table"), "{error}");
}

#[test]
fn partitions_of_an_mbr_with_logical_ones_are_all_found() {
    let device = MemDevice::new(1 << 20);
    put_table(&device, 0, &[record(0x83, 64, 100), record(0x0F, 200, 1000)]);
    put_table(&device, 200, &[record(0x83, 8, 50), record(0x05, 300, 400)]);
    put_table(&device, 500, &[record(0x83, 16, 60)]);
    assert_eq!(starts(&device), [(1, 64, 100), (5, 208, 50), (6, 516, 60)]);
    let error = partition(&device, 2).unwrap_err();
    assert!(error.to_string().contains("there are 1 ("), "{error}");
}

#[test]
fn partitions_of_a_chain_that_bites_its_tail_is_an_error() {
    let device = MemDevice::new(1 << 20);
    put_table(&device, 0, &[record(0x05, 200, 1000)]);
    put_table(&device, 200, &[record(0x83, 8, 50), record(0x05, 0, 400)]);
    assert!(matches!(partitions(&device), Err(Error::Partition { .. })));
}

#[test]
fn partitions_past_the_end_is_an_error() {
    let device = MemDevice::new(1 << 20);
    put_table(&device, 0, &[record(0x83, 64, u32::MAX)]);
    let error = partitions(&device).unwrap_err();
    assert!(error.to_string().contains("cut short"), "{error}");
}

/// A GPT with one partition of sectors 2048 to 4095, as the crate writes it.
fn gpt_device() -> MemDevice {
    use gpt::GptConfig;
    let bytes = io::Cursor::new(vec![0_u8; 4 << 20]);
    let mut disk = GptConfig::new().writable(true).create_from_device(bytes, None).unwrap();
    disk.add_partition_at("data", 1, 2048, 2048, gpt::partition_types::LINUX_FS, 0).unwrap();
    let mut bytes = disk.write().unwrap();
    let mbr = gpt::mbr::ProtectiveMBR::with_lb_size(u32::try_from((4 << 20) / 512 - 1).unwrap());
    mbr.overwrite_lba0(&mut bytes).unwrap();
    MemDevice::from_bytes(bytes.get_ref())
}

#[test]
fn partitions_of_a_gpt_are_found_from_the_backup_too() {
    let device = gpt_device();
    assert_eq!(starts(&device), [(1, 2048, 2048)]);
    device.write_at(PhysicalAddr(512), &[0; 512]).unwrap();
    assert_eq!(starts(&device), [(1, 2048, 2048)]);
    device.write_at(PhysicalAddr((4 << 20) - 512), &[0; 512]).unwrap();
    assert!(matches!(partitions(&device), Err(Error::Partition { .. })));
}

proptest! {
    #[test]
    fn partitions_of_a_damaged_gpt_never_panics(
        damage in proptest::collection::vec((0_usize..1024, any::<u8>()), 1..8),
        fix_csum in any::<bool>(),
    ) {
        let device = gpt_device();
        let mut head = [0; 1536];
        device.read_at(PhysicalAddr(0), &mut head).unwrap();
        for (at, byte) in damage {
            head[at + 430] = byte;
        }
        if fix_csum {
            head[512 + 16..512 + 20].fill(0);
            let crc = crc32(&head[512..512 + 92]);
            head[512 + 16..512 + 20].copy_from_slice(&crc.to_le_bytes());
        }
        device.write_at(PhysicalAddr(0), &head).unwrap();
        let _ = partitions(&device);
    }

    #[test]
    fn partitions_of_any_mbr_never_panics(
        records in proptest::collection::vec(any::<[u8; 16]>(), 4),
        link in proptest::collection::vec(any::<[u8; 16]>(), 4),
        at in 0_u64..2000,
    ) {
        let device = MemDevice::new(1 << 20);
        put_table(&device, at, &link);
        put_table(&device, 0, &records);
        let _ = partitions(&device);
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(!0_u32, |mut crc, byte| {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg());
        }
        crc
    }) ^ !0
}
