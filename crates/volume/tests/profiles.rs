//! Reading and writing on every profile, against a plain array, on devices that count and fail.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::chunk::{Chunk, ChunkStripe};
use ubtrfs_ondisk::superblock::{SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::{Corruption, DeviceId, LogicalAddr, PhysicalAddr, Reason, Uuid};
use ubtrfs_volume::{Device, Error, MemDevice, Op, Volume};

/// A device that counts its requests, keeps their order, and fails when told to.
#[derive(Debug)]
struct TestDevice {
    inner: MemDevice,
    requests: AtomicU64,
    fails: AtomicBool,
    log: Arc<events::Log>,
}

/// What happened on all devices, in order.
mod events {
    use std::sync::Mutex;

    #[derive(Debug, Default)]
    pub struct Log(Mutex<Vec<String>>);

    impl Log {
        pub fn push(&self, line: String) {
            self.0.lock().unwrap().push(line);
        }

        pub fn take(&self) -> Vec<String> {
            std::mem::take(&mut *self.0.lock().unwrap())
        }
    }
}

impl TestDevice {
    fn request(&self, what: &str, at: PhysicalAddr) -> io::Result<()> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.log.push(format!("{} {what} {at}", self.name()));
        match self.fails.load(Ordering::Relaxed) {
            true => Err(io::Error::other("told to fail")),
            false => Ok(()),
        }
    }
}

impl Device for TestDevice {
    fn name(&self) -> String {
        self.inner.name()
    }
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }
    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        self.request("read", at)?;
        self.inner.read_at(at, buf)
    }
    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        self.request("write", at)?;
        self.inner.write_at(at, buf)
    }
    fn write_vectored_at(&self, at: PhysicalAddr, bufs: &[&[u8]]) -> io::Result<()> {
        self.request("write", at)?;
        self.inner.write_vectored_at(at, bufs)
    }
    fn flush(&self) -> io::Result<()> {
        self.request("flush", PhysicalAddr(0))
    }
    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> io::Result<()> {
        self.inner.discard(at, len_bytes)
    }
    fn resize(&self, len_bytes: u64) -> io::Result<()> {
        self.inner.resize(len_bytes)
    }
    fn is_read_only(&self) -> bool {
        false
    }
}

const START: LogicalAddr = LogicalAddr(16 << 20);
const ROWS: u64 = 4;
const ELEMENT: u64 = 64 << 10;

/// A profile: its bits, its stripes, its columns.
type Profile = (BlockGroupFlags, u64, u64);

const PROFILES: [Profile; 8] = [
    (BlockGroupFlags(0), 1, 1),
    (BlockGroupFlags::DUP, 2, 1),
    (BlockGroupFlags::RAID0, 3, 3),
    (BlockGroupFlags::RAID1, 2, 1),
    (BlockGroupFlags::RAID10, 4, 2),
    (BlockGroupFlags::RAID10, 6, 3),
    (BlockGroupFlags::RAID1C3, 3, 1),
    (BlockGroupFlags::RAID1C4, 4, 1),
];

struct Fixture {
    volume: Volume,
    devices: Vec<Arc<TestDevice>>,
    log: Arc<events::Log>,
    len_bytes: u64,
}

impl Fixture {
    fn new((flags, stripe_count, columns): Profile) -> Self {
        let device_count = if flags == BlockGroupFlags::DUP { 1 } else { stripe_count };
        let log = Arc::new(events::Log::default());
        let devices: Vec<Arc<TestDevice>> = (1..=device_count)
            .map(|devid| {
                Arc::new(TestDevice {
                    inner: MemDevice::named(format!("device {devid}"), 128 << 20),
                    requests: AtomicU64::new(0),
                    fails: AtomicBool::new(false),
                    log: log.clone(),
                })
            })
            .collect();
        let superblock = Superblock {
            magic: ubtrfs_ondisk::superblock::MAGIC.into(),
            nodesize: 16384.into(),
            sectorsize: 4096.into(),
            generation: 1.into(),
            ..Superblock::default()
        };
        let members = devices.iter().map(|device| device.clone() as Arc<dyn Device>).collect();
        let volume = Volume::create(members, superblock).unwrap();
        let len_bytes = ROWS * columns * ELEMENT;
        let stripe_bytes = ROWS * ELEMENT;
        let stripes = (0..stripe_count).map(|index| ChunkStripe {
            device: DeviceId(index % device_count + 1),
            offset: PhysicalAddr((1 << 20) + index / device_count * stripe_bytes + index * 4096),
            device_uuid: Uuid::NIL,
        });
        let chunk = Chunk {
            start: START,
            len_bytes,
            stripe_len_bytes: ELEMENT,
            flags: flags | BlockGroupFlags::DATA,
            io_align: 65536,
            io_width: 65536,
            sector_size: 4096,
            sub_stripes: if flags == BlockGroupFlags::RAID10 { 2 } else { 1 },
            stripes: stripes.collect(),
        };
        volume.add_chunk(chunk).unwrap();
        Self { volume, devices, log, len_bytes }
    }

    fn requests(&self) -> u64 {
        self.devices.iter().map(|device| device.requests.swap(0, Ordering::Relaxed)).sum()
    }
}

fn at(offset: u64) -> LogicalAddr {
    LogicalAddr(START.0 + offset)
}

fn expect_bytes(expect: &[u8]) -> impl Fn(&[u8]) -> ubtrfs_ondisk::Result<()> {
    move |bytes| match bytes == expect {
        true => Ok(()),
        false => Err(Corruption::new(Reason::CsumMismatch)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn writes_of_any_shape_read_back_from_every_copy(
        profile in 0..PROFILES.len(),
        writes in proptest::collection::vec(
            (any::<u64>(), proptest::collection::vec(0_usize..200_000, 1..5), any::<u8>()), 1..6,
        ),
    ) {
        let fixture = Fixture::new(PROFILES[profile]);
        let volume = &fixture.volume;
        let mut model = vec![0_u8; usize::try_from(fixture.len_bytes).unwrap()];
        for (offset, lens, seed) in writes {
            let mut offset = usize::try_from(offset % fixture.len_bytes).unwrap();
            let first = offset;
            let mut bufs = Vec::new();
            for len in lens {
                let len = len.min(model.len() - offset);
                let bytes: Vec<u8> =
                    (0..len).map(|i| (i / 7 + offset / 4096) as u8 ^ seed).collect();
                model[offset..offset + len].copy_from_slice(&bytes);
                offset += len;
                bufs.push(bytes);
            }
            let slices: Vec<&[u8]> = bufs.iter().map(Vec::as_slice).collect();
            volume.write_vectored(at(first as u64), &slices).unwrap();
        }
        let mut have = vec![0; model.len()];
        for mirror in 0..volume.mirror_count(START).unwrap() {
            volume.read_mirror(START, mirror, &mut have).unwrap();
            prop_assert!(have == model, "copy {mirror}");
        }
    }
}

#[test]
fn write_of_one_mebibyte_is_one_request_for_each_copy_on_each_device() {
    for (profile, expect) in [(0, 1), (1, 2), (2, 3), (3, 2), (4, 4), (5, 6), (6, 3), (7, 4)] {
        let fixture = Fixture::new(PROFILES[profile]);
        let bytes = vec![7; usize::try_from(fixture.len_bytes.min(1 << 20)).unwrap()];
        let halves = bytes.split_at(bytes.len() / 2);
        fixture.volume.write_vectored(START, &[halves.0, halves.1]).unwrap();
        assert_eq!(fixture.requests(), expect, "{:?}", PROFILES[profile]);
    }
}

#[test]
fn read_with_a_failing_device_answers_from_another_copy_and_counts() {
    for profile in PROFILES {
        let fixture = Fixture::new(profile);
        let bytes = vec![7; 65536];
        fixture.volume.write(START, &bytes).unwrap();
        fixture.devices[0].fails.store(true, Ordering::Relaxed);
        let mut have = vec![0; bytes.len()];
        let result = fixture.volume.read(START, &mut have, &expect_bytes(&bytes));
        if fixture.devices.len() > 1 && profile.0 != BlockGroupFlags::RAID0 {
            result.unwrap();
            assert_eq!(have, bytes);
        } else {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Io { op: Op::Read, .. }), "{error}");
        }
        let stats = fixture.volume.stats();
        let copies_there = if profile.0 == BlockGroupFlags::DUP { 2 } else { 1 };
        assert_eq!(stats[0].read_errors, copies_there, "{profile:?}");
        assert!(stats[1..].iter().all(|stats| stats.read_errors == 0));
    }
}

/// Two devices of different pairs may fail: neither all first copies nor all second ones can be
/// read then, but a mix of them can.
#[test]
fn read_over_columns_mixes_their_copies() {
    for profile in [PROFILES[4], PROFILES[5]] {
        let fixture = Fixture::new(profile);
        let bytes: Vec<u8> = (0..fixture.len_bytes).map(|i| (i / 1000) as u8).collect();
        fixture.volume.write(START, &bytes).unwrap();
        let mut have = vec![0; bytes.len()];
        fixture.devices[0].fails.store(true, Ordering::Relaxed);
        fixture.devices[3].fails.store(true, Ordering::Relaxed);
        fixture.volume.read(START, &mut have, &expect_bytes(&bytes)).unwrap();
        for device in &fixture.devices {
            device.fails.store(false, Ordering::Relaxed);
        }
        let stats = fixture.volume.stats();
        assert!(stats.iter().all(|stats| stats.corruption_errors == 0), "{stats:?}");

        // The copies 0 of the first and copies 1 of the second column are damaged.
        for index in [0, 3] {
            let offset = PhysicalAddr((1 << 20) + index * 4096 + 100);
            fixture.devices[index as usize].write_at(offset, b"damage").unwrap();
        }
        fixture.volume.read(START, &mut have, &expect_bytes(&bytes)).unwrap();
        assert!(have == bytes);
        let bad: Vec<u64> =
            fixture.volume.stats().iter().map(|stats| stats.corruption_errors).collect();
        assert_eq!(bad[0], 1, "{bad:?}");
        assert_eq!(bad[1..].iter().sum::<u64>(), 0, "the second column's first copy is whole");

        // Both copies of a column: nothing helps.
        let offset = PhysicalAddr((1 << 20) + 4096 + 100);
        fixture.devices[1].write_at(offset, b"damage").unwrap();
        let error = fixture.volume.read(START, &mut have, &expect_bytes(&bytes)).unwrap_err();
        assert!(matches!(error, Error::NoWholeCopy { copies: 2, .. }), "{error}");
    }
}

#[test]
fn read_of_a_copy_of_another_generation_counts_as_that() {
    let fixture = Fixture::new(PROFILES[3]);
    let mut buf = [0; 4096];
    let error = fixture
        .volume
        .read(START, &mut buf, &|_| Err(Corruption::new(Reason::WrongGeneration)))
        .unwrap_err();
    assert!(matches!(error, Error::NoWholeCopy { copies: 2, .. }), "{error}");
    for stats in fixture.volume.stats() {
        assert_eq!((stats.generation_errors, stats.corruption_errors), (1, 0));
    }
}

#[test]
fn write_to_a_failing_device_is_an_error_and_counts() {
    let fixture = Fixture::new(PROFILES[3]);
    fixture.devices[1].fails.store(true, Ordering::Relaxed);
    let error = fixture.volume.write(START, &[1; 4096]).unwrap_err();
    assert!(matches!(error, Error::Io { op: Op::Write, .. }), "{error}");
    assert!(error.to_string().contains("device 2"), "{error}");
    let error = fixture.volume.flush().unwrap_err();
    assert!(matches!(error, Error::Io { op: Op::Flush, .. }), "{error}");
    let stats = fixture.volume.stats();
    assert_eq!((stats[0].write_errors, stats[0].flush_errors), (0, 0));
    assert_eq!((stats[1].write_errors, stats[1].flush_errors), (1, 1));
}

#[test]
fn read_and_write_past_the_chunk_are_refused_and_change_nothing() {
    let fixture = Fixture::new(PROFILES[2]);
    let volume = &fixture.volume;
    let last = at(fixture.len_bytes - 4096);
    assert!(matches!(volume.write(last, &[1; 8192]), Err(Error::NoChunk { .. })));
    let mut buf = [0; 8192];
    assert!(matches!(volume.read_mirror(last, 0, &mut buf), Err(Error::NoChunk { .. })));
    assert!(matches!(
        volume.read_mirror(START, 1, &mut buf),
        Err(Error::NoMirror { mirror: 1, copies: 1, .. })
    ));
    assert_eq!(fixture.requests(), 0);
}

#[test]
fn write_superblocks_writes_all_copies_before_any_primary_and_flushes_last() {
    let fixture = Fixture::new(PROFILES[3]);
    let mut superblock = fixture.volume.superblock();
    fixture.volume.write_superblocks(&superblock).unwrap();
    fixture.log.take();
    superblock.generation += 1;
    fixture.volume.write_superblocks(&superblock).unwrap();
    let [primary, copy, _] = SUPERBLOCK_OFFSETS;
    let expect = [
        format!("device 1 read {primary}"),
        format!("device 2 read {primary}"),
        format!("device 1 write {copy}"),
        format!("device 2 write {copy}"),
        "device 1 flush 0".to_owned(),
        "device 2 flush 0".to_owned(),
        // Once more, as the flush may have taken long.
        format!("device 1 read {primary}"),
        format!("device 2 read {primary}"),
        format!("device 1 write {primary}"),
        format!("device 2 write {primary}"),
        "device 1 flush 0".to_owned(),
        "device 2 flush 0".to_owned(),
    ];
    assert_eq!(fixture.log.take(), expect);
    for (index, device) in fixture.devices.iter().enumerate() {
        for at in [primary, copy] {
            let mut bytes = [0; 4096];
            device.read_at(at, &mut bytes).unwrap();
            let stored = Superblock::parse(&bytes, at).unwrap();
            assert_eq!(stored.generation, superblock.generation);
            assert_eq!(stored.dev_item.devid.get(), index as u64 + 1);
        }
    }
}

#[test]
fn add_chunk_past_the_end_of_its_device_or_of_another_device_is_corrupt() {
    let fixture = Fixture::new(PROFILES[0]);
    let chunk = fixture.volume.chunks()[0].as_ref().clone();
    let refused = |change: &dyn Fn(&mut Chunk)| {
        let mut chunk = chunk.clone();
        chunk.start = LogicalAddr(1 << 30);
        chunk.stripes[0].offset = PhysicalAddr(64 << 20);
        change(&mut chunk);
        fixture.volume.add_chunk(chunk).unwrap_err()
    };
    let past_end = refused(&|chunk| chunk.stripes[0].offset = PhysicalAddr((128 << 20) - 4096));
    assert!(matches!(past_end, Error::Corrupt(_)), "{past_end}");
    let overflow = refused(&|chunk| chunk.stripes[0].offset = PhysicalAddr(u64::MAX - 4096));
    assert!(matches!(overflow, Error::Corrupt(_)), "{overflow}");
    let other_uuid = refused(&|chunk| chunk.stripes[0].device_uuid = Uuid([9; 16]));
    assert!(matches!(other_uuid, Error::Corrupt(_)), "{other_uuid}");
    let unaligned = refused(&|chunk| chunk.start.0 += 1);
    assert!(matches!(unaligned, Error::Corrupt(_)), "{unaligned}");
    let missing = refused(&|chunk| chunk.stripes[0].device = DeviceId(9));
    assert!(matches!(missing, Error::MissingDevice { devid: Some(DeviceId(9)), .. }), "{missing}");
}

#[test]
fn resize_and_discard_go_to_the_device() {
    let fixture = Fixture::new(PROFILES[1]);
    fixture.volume.write(START, &[1; 262144]).unwrap();
    fixture.volume.discard(START, 262144).unwrap();
    fixture.volume.resize_device(DeviceId(1), 256 << 20).unwrap();
    assert_eq!(fixture.devices[0].len_bytes(), 256 << 20);
    assert_eq!(fixture.volume.device_items()[0].total_bytes.get(), 256 << 20);
    assert!(matches!(
        fixture.volume.resize_device(DeviceId(2), 1 << 20),
        Err(Error::NoDevice { devid: DeviceId(2) })
    ));
}
