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

fn whole(images: &[Image]) -> [u8; 4] {
    let device = SimDevice::of_image(images[0].clone());
    [0, 1, 2, 3].map(|block| read(&device, block * 4096 + 4095))
}

/// The kinds of states of one window, with what they hold.
fn states_of(device: &SimDevice, mixed: usize) -> Vec<(CrashKind, usize, [u8; 4])> {
    let states = device.recording().states(CrashPlan::all(mixed), Prng::new(2));
    states.map(|state| (state.kind, state.cut_after, whole(&state.images))).collect()
}

#[test]
fn states_are_every_prefix_and_every_set_of_a_short_window() {
    let device = SimDevice::new(1 << 20);
    for block in 0..4 {
        write(&device, block * 4096, 1, 4096);
    }
    device.flush().unwrap();
    device.begin();
    for block in 0..3 {
        write(&device, block * 4096, 2, 4096);
    }
    device.flush().unwrap();
    write(&device, 0, 3, 4096);
    let states = states_of(&device, 0);
    let of = |kind| states.iter().filter(move |state| state.0 == kind);
    let prefixes: Vec<_> = of(CrashKind::Prefix).map(|state| (state.1, state.2)).collect();
    let expected = [(1, [2, 1, 1, 1]), (2, [2, 2, 1, 1]), (3, [2, 2, 2, 1]), (5, [3, 2, 2, 1])];
    assert_eq!(prefixes, expected);
    let sets: BTreeSet<_> =
        of(CrashKind::Subset).filter(|state| state.1 == 3).map(|state| state.2).collect();
    assert_eq!(sets.len(), 7, "each set but all of them: {sets:?}");
    assert!(sets.contains(&[1, 1, 2, 1]), "a later write without the earlier ones");
    let late: Vec<_> = of(CrashKind::Subset).filter(|state| state.1 == 5).collect();
    assert_eq!(late, [&(CrashKind::Subset, 5, [2, 2, 2, 1])], "the flush held");
    // Front or back of each write.
    assert_eq!(of(CrashKind::Torn).count(), 8);
}

#[test]
fn states_of_a_long_window_lose_and_keep_each_write() {
    let device = SimDevice::new(1 << 20);
    write(&device, 0, 1, 4 * 4096);
    device.flush().unwrap();
    device.begin();
    // The third covers half of the first two.
    for (at, byte, len) in [(0, 2, 4096), (4096, 3, 4096), (2048, 4, 4096), (12_288, 5, 4096)] {
        write(&device, at, byte, len);
    }
    for byte in 6..9 {
        write(&device, 8192, byte, 4096);
    }
    let states = states_of(&device, 50);
    let of = |kind| -> BTreeSet<_> {
        states.iter().filter(|state| state.0 == kind).map(|state| state.2).collect()
    };
    // The last bytes of the blocks: the third write ends inside the second's.
    let lost = [[1, 1, 1, 1], [4, 3, 8, 5], [4, 1, 8, 5], [2, 3, 8, 5], [4, 3, 8, 1], [4, 3, 7, 5]];
    assert_eq!(of(CrashKind::Lost), BTreeSet::from(lost));
    let alone = [
        [2, 1, 1, 1],
        [1, 3, 1, 1],
        [4, 1, 1, 1],
        [1, 1, 1, 5],
        [1, 1, 6, 1],
        [1, 1, 7, 1],
        [1, 1, 8, 1],
    ];
    assert_eq!(of(CrashKind::Alone), BTreeSet::from(alone));
    assert!(of(CrashKind::Mixed).len() > 10);
    assert_eq!(states.iter().filter(|state| state.0 == CrashKind::Torn).count(), 2 * 7);
}

#[test]
fn flush_of_one_device_leaves_the_writes_of_another_open() {
    let array = SimArray::new(&[1 << 20, 1 << 20]);
    let [first, second] = [0, 1].map(|index| array.device(index));
    write(&first, 0, 1, 4096);
    write(&second, 0, 2, 4096);
    first.flush().unwrap();
    write(&first, 4096, 3, 4096);
    let states = array.recording().states(CrashPlan::all(0), Prng::new(4));
    let seen: BTreeSet<_> = states
        .filter(|state| state.cut_after == 4)
        .map(|state| {
            let [one, two] = [0, 1].map(|index| SimDevice::of_image(state.images[index].clone()));
            (read(&one, 0), read(&two, 0), read(&one, 4096), read(&two, 4095))
        })
        .collect();
    assert!(seen.iter().all(|state| state.0 == 1), "it was flushed: {seen:?}");
    assert!(seen.contains(&(1, 0, 0, 0)) && seen.contains(&(1, 0, 3, 0)), "{seen:?}");
    assert!(seen.contains(&(1, 2, 0, 0)) && seen.contains(&(1, 0, 0, 2)), "{seen:?}");
}

#[test]
fn resize_that_was_not_flushed_may_be_lost_with_what_lies_behind() {
    let device = SimDevice::new(8192);
    write(&device, 0, 1, 8192);
    device.flush().unwrap();
    device.begin();
    device.resize(16_384).unwrap();
    write(&device, 4096, 2, 8192);
    assert_eq!((device.len_bytes(), read(&device, 12_287), read(&device, 12_288)), (16_384, 2, 0));
    let states = device.recording().states(CrashPlan::all(30), Prng::new(5));
    let mut lens = BTreeSet::new();
    for state in states {
        let len_bytes = state.images[0].len_bytes();
        let device = SimDevice::of_image(state.images[0].clone());
        lens.insert((len_bytes, read(&device, 4096)));
        assert!(device.read_at(PhysicalAddr(len_bytes), &mut [0]).is_err());
    }
    assert_eq!(lens, BTreeSet::from([(8192, 1), (8192, 2), (16_384, 1), (16_384, 2)]));
    device.resize(6000).unwrap();
    device.resize(8192).unwrap();
    assert_eq!((read(&device, 5999), read(&device, 6000)), (2, 0));
}

#[test]
fn images_are_the_same_where_nothing_that_was_read_differs() {
    let array = SimArray::new(&[1 << 20]);
    let device = array.device(0);
    write(&device, 0, 1, 65_536);
    let before = array.images();
    array.note_reads();
    read(&device, 5000);
    read(&device, 500_000);
    let reads = array.take_reads();
    assert!(reads[0].contains(1) && reads[0].contains(122) && !reads[0].contains(0));
    write(&device, 8192, 2, 100);
    assert!(device.image().is_same_in(&before[0], &reads[0]));
    write(&device, 4096, 1, 4096);
    assert!(device.image().is_same_in(&before[0], &reads[0]), "as it was");
    write(&device, 500_000, 0, 10);
    assert!(device.image().is_same_in(&before[0], &reads[0]), "zeros as before");
    write(&device, 4096, 9, 1);
    assert!(!device.image().is_same_in(&before[0], &reads[0]));
    assert!(!before[0].is_same_in(&device.image(), &reads[0]));
}

#[test]
fn image_written_to_a_file_and_read_back_is_the_same() {
    let device = SimDevice::new((3 << 20) + 100);
    write(&device, 5000, 1, 10_000);
    write(&device, 2 << 20, 2, 4096);
    write(&device, (3 << 20) + 50, 3, 50);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("image");
    device.write_image(&file);
    let image = Image::read_from(&file);
    assert_eq!(image.len_bytes(), (3 << 20) + 100);
    let mut all = BlockSet::default();
    all.insert_range(0, (3 << 20) + 100);
    assert!(image.is_same_in(&device.image(), &all));
    assert_eq!(image.digest(), device.image().digest());
    write(&device, 900_000, 0, 5);
    assert_eq!(image.digest(), device.image().digest(), "zeros as before");
    write(&device, 900_000, 1, 1);
    assert_ne!(image.digest(), device.image().digest());
}

#[test]
fn superblock_write_is_never_torn() {
    let device = SimDevice::new(1 << 20);
    write(&device, SUPERBLOCK_OFFSETS[0].0, 7, 4096);
    for state in device.recording().states(CrashPlan::all(200), Prng::new(3)) {
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
        device.plan(Fault { device: None, request, after, effect, stays });
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

    let primary = SUPERBLOCK_OFFSETS[0].0;
    for (sectors, byte) in [(7, 0), (8, 6)] {
        fault(Request::Write, 0, Effect::Tear { sectors }, false);
        assert!(try_write(primary, 6).is_err());
        assert_eq!([0, 4095].map(|at| read(&device, primary + at)), [byte; 2]);
    }

    fault(Request::Read, 1, Effect::Corrupt { byte: 0 }, false);
    assert_eq!((read(&device, 0), read(&device, 0), read(&device, 0)), (4, 4 ^ 0x10, 4));

    fault(Request::Write, 0, Effect::Corrupt { byte: 5000 }, false);
    assert!(try_write(0, 5).is_ok());
    assert_eq!((read(&device, 903), read(&device, 904)), (5, 5 ^ 0x10));

    fault(Request::Read, 0, Effect::Delay(std::time::Duration::from_millis(20)), false);
    let start = std::time::Instant::now();
    read(&device, 0);
    assert!(start.elapsed().as_millis() >= 20);
}

#[test]
fn faults_strike_the_device_they_are_for_while_they_are_not_suspended() {
    let array = SimArray::new(&[1 << 20, 1 << 20]);
    let [first, second] = [0, 1].map(|index| array.device(index));
    let (request, effect) = (Request::Write, Effect::Fail);
    array.plan(Fault { device: Some(1), request, after: 1, effect, stays: false });
    let try_write = |device: &SimDevice| device.write_at(PhysicalAddr(4096), &[7; 4096]);
    assert!(try_write(&first).is_ok() && try_write(&second).is_ok());
    array.suspend_faults(true);
    assert!(try_write(&second).is_ok(), "uncounted");
    array.suspend_faults(false);
    assert!(try_write(&first).is_ok() && try_write(&second).is_err());
    let strike = Strike { device: 1, request, at: 4096, len_bytes: 4096, effect };
    assert_eq!(array.strikes(), [strike]);
    assert!(!strike.is_of_superblock());
}
