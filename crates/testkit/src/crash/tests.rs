use std::collections::BTreeSet;

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_ondisk::superblock::SUPERBLOCK_OFFSETS;
use ubtrfs_volume::Device;

use super::*;
use crate::Prng;

fn write(device: &SimDevice, at: u64, byte: u8, len: usize) {
    device.write_at(PhysicalAddr(at), &vec![byte; len]).unwrap();
}

fn read(device: &SimDevice, at: u64) -> u8 {
    let mut byte = [0];
    device.read_at(PhysicalAddr(at), &mut byte).unwrap();
    byte[0]
}

#[test]
fn cuts_keep_what_was_flushed_and_lose_no_half_sector() {
    let device = SimDevice::new(1 << 20);
    write(&device, 0, 1, 4096);
    device.begin();
    write(&device, 4096, 2, 8192);
    device.flush().unwrap();
    write(&device, 100, 3, 10_000);
    let recording = device.recording();
    assert_eq!((recording.event_count(), recording.flush_count()), (3, 1));
    let cut = recording.cut_after(0);
    assert_eq!((read(&cut, 0), read(&cut, 4096)), (1, 0));
    let cut = recording.cut_after(3);
    let ends = [99, 100, 10_099, 10_100].map(|at| read(&cut, at));
    assert_eq!(ends, [1, 3, 3, 2]);
    let mut prng = Prng::new(1);
    let mut seen = BTreeSet::new();
    for _ in 0..200 {
        let torn = recording.torn_after(3, &mut prng);
        assert_eq!((read(&torn, 0), read(&torn, 12_000)), (1, 2));
        assert_eq!(read(&torn, 5120), read(&torn, 5631));
        seen.insert((read(&torn, 100), read(&torn, 5120), read(&torn, 9000)));
    }
    assert_eq!(seen.len(), 8, "every part may arrive or not");
}

#[test]
fn states_are_every_prefix_and_parts_of_each_window() {
    let device = SimDevice::new(1 << 20);
    for block in 0..4 {
        write(&device, block * 4096, 1, 4096);
    }
    device.flush().unwrap();
    for block in 0..3 {
        write(&device, block * 4096, 2, 4096);
    }
    let whole = |image: &Image| {
        let device = SimDevice::of_image(image.clone());
        [0, 1, 2, 3].map(|block| read(&device, block * 4096 + 4095))
    };
    let plan = CrashPlan { prefix_one_in: 1, torn_per_window: 40 };
    let states: Vec<_> = device.recording().states(plan, Prng::new(2)).collect();
    let prefixes: Vec<_> = states
        .iter()
        .filter(|state| state.kind == CrashKind::Prefix)
        .map(|state| (state.cut_after, whole(&state.image)))
        .collect();
    let expected = [
        (1, [1, 0, 0, 0]),
        (2, [1, 1, 0, 0]),
        (3, [1, 1, 1, 0]),
        (4, [1, 1, 1, 1]),
        (6, [2, 1, 1, 1]),
        (7, [2, 2, 1, 1]),
        (8, [2, 2, 2, 1]),
    ];
    assert_eq!(prefixes, expected);
    assert_eq!(states.len(), 7 + 2 * 40);
    let late: BTreeSet<_> = states
        .iter()
        .filter(|state| state.kind == CrashKind::Torn && state.cut_after > 5)
        .map(|state| whole(&state.image))
        .collect();
    assert!(late.iter().all(|blocks| blocks[3] == 1 && !blocks.contains(&0)), "the flush held");
    assert!(late.contains(&[1, 1, 2, 1]), "a later write without the earlier ones: {late:?}");
}

#[test]
fn superblock_write_is_never_torn() {
    let device = SimDevice::new(1 << 20);
    write(&device, SUPERBLOCK_OFFSETS[0].0, 7, 4096);
    let plan = CrashPlan { prefix_one_in: 1, torn_per_window: 200 };
    for state in device.recording().states(plan, Prng::new(3)) {
        let device = SimDevice::from(state);
        let at = SUPERBLOCK_OFFSETS[0].0;
        let ends = BTreeSet::from([0, 600, 2000, 4095].map(|offset| read(&device, at + offset)));
        assert_eq!(ends.len(), 1);
    }
}

#[test]
fn faults_strike_when_planned() {
    let device = SimDevice::new(1 << 20);
    let fault = |request, after, effect, stays| {
        device.forget_faults();
        device.plan(Fault { request, after, effect, stays });
    };
    let try_write = |at: u64, byte: u8| device.write_at(PhysicalAddr(at), &[byte; 4096]);

    fault(Request::Write, 1, Effect::Fail, false);
    assert!(try_write(0, 1).is_ok());
    assert!(try_write(0, 2).is_err());
    assert_eq!(read(&device, 0), 1);
    assert!(try_write(0, 3).is_ok());

    fault(Request::Flush, 0, Effect::Fail, true);
    assert!(device.flush().is_err());
    assert!(device.flush().is_err());
    assert!(try_write(0, 3).is_ok(), "of another kind");

    fault(Request::Write, 0, Effect::Tear { sectors: 2 }, false);
    assert!(try_write(0, 4).is_err());
    assert_eq!((read(&device, 1023), read(&device, 1024)), (4, 3));

    fault(Request::Read, 1, Effect::Corrupt { byte: 0 }, false);
    assert_eq!((read(&device, 0), read(&device, 0), read(&device, 0)), (4, 4 ^ 0x10, 4));

    fault(Request::Write, 0, Effect::Corrupt { byte: 5000 }, false);
    assert!(try_write(0, 5).is_ok());
    assert_eq!((read(&device, 903), read(&device, 904)), (5, 5 ^ 0x10));

    fault(Request::Read, 0, Effect::Delay(std::time::Duration::from_millis(20)), false);
    let start = std::time::Instant::now();
    read(&device, 0);
    assert!(start.elapsed().as_millis() >= 20);
    assert_eq!(device.fault_count(), 7);
}
