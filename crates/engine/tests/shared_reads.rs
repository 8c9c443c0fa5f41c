//! Long reads that are shared with a kept thread: the bytes and the errors are those of reads alone.

mod common;

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use common::full::{create, noise};
use common::holding::Holding;
use ubtrfs_engine::{Error, Filesystem, InodeId, MkfsOptions, OpenOptions, mkfs};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_ondisk::{CsumType, FileOffset as DiskOffset, LogicalAddr, PhysicalAddr, Reason};
use ubtrfs_rt::{Executor, Runtime};
use ubtrfs_testkit::Prng;
use ubtrfs_volume::{Device, MemDevice, Volume, VolumeOptions};

const SECTOR: usize = 4096;
const MIB: usize = 1 << 20;
/// More than the checksums of which are looked up at once, no whole requests, and whole sectors, however large.
const LEN: usize = 9 * MIB + 3 * (64 << 10);
/// Longer than any read that is not one of data.
const LONG: usize = 64 << 10;
/// Long enough for a thread to come on, whatever a machine is at besides.
const PATIENCE: Duration = Duration::from_secs(60);

/// The kept threads are the process's: what another test has of them this one has not.
static ALONE: Mutex<()> = Mutex::new(());

/// Knows how many long reads are in the devices of a filesystem, and which sectors there cannot be read.
#[derive(Default)]
struct Meeting {
    readers: Mutex<Readers>,
    came: Condvar,
    unreadable: Mutex<Vec<PhysicalAddr>>,
}

#[derive(Default)]
struct Readers {
    now: usize,
    most: usize,
    all: usize,
    /// Who reads this comes late.
    slow: Option<PhysicalAddr>,
    /// So many wait for each other.
    awaited: usize,
}

impl Meeting {
    /// How many long reads there were at a time at most in `work`, of which the first wait for one another until there are so many.
    fn most_in(&self, awaited: usize, work: impl FnOnce()) -> usize {
        *self.readers.lock().unwrap() = Readers { awaited, ..Readers::default() };
        work();
        self.readers.lock().unwrap().most
    }

    fn read(&self, inner: &MemDevice, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        if buf.len() < LONG {
            return self.readable(inner, at, buf);
        }
        let mut readers = self.readers.lock().unwrap();
        readers.now += 1;
        readers.most = readers.most.max(readers.now);
        readers.all += 1;
        self.came.notify_all();
        let is_lone = |readers: &mut Readers| readers.most < readers.awaited;
        let (mut readers, waited) =
            self.came.wait_timeout_while(readers, PATIENCE, is_lone).unwrap();
        if waited.timed_out() {
            readers.awaited = 0;
        }
        let is_slow = readers.slow.is_some_and(|slow| holds(at, buf, slow));
        drop(readers);
        if is_slow {
            std::thread::sleep(Duration::from_millis(20));
        }
        let result = self.readable(inner, at, buf);
        self.readers.lock().unwrap().now -= 1;
        result
    }

    fn readable(&self, inner: &MemDevice, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        let unreadable = self.unreadable.lock().unwrap();
        if unreadable.iter().any(|place| holds(at, buf, *place)) {
            return Err(io::Error::other("no such sector any more"));
        }
        drop(unreadable);
        inner.read_at(at, buf)
    }
}

type TestDevice = Holding<MemDevice>;

/// Whether a read of `buf` from `at` on has what lies there.
fn holds(at: PhysicalAddr, buf: &[u8], place: PhysicalAddr) -> bool {
    (at.0..at.0 + buf.len() as u64).contains(&place.0)
}

fn open(devices: &[Arc<TestDevice>], executor: Executor, shares_reads: bool) -> Filesystem {
    let devices = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>);
    let volume = Volume::open(devices.collect(), &VolumeOptions::default()).unwrap();
    let runtime = Arc::new(Runtime { executor, ..Runtime::system() });
    Filesystem::open(volume, OpenOptions { runtime, shares_reads, ..OpenOptions::default() })
        .unwrap()
}

/// A file in a new filesystem.
struct Made {
    devices: Vec<Arc<TestDevice>>,
    meeting: Arc<Meeting>,
    id: InodeId,
    bytes: Vec<u8>,
    /// Where each copy of its beginning is, on the first device of a filesystem of one.
    copies: Vec<PhysicalAddr>,
}

fn made(options: &MkfsOptions, device_count: usize, bits: u64) -> Made {
    let bytes = noise(&mut Prng::new(3), LEN as u64);
    let meeting = Arc::<Meeting>::default();
    let device = || {
        let meeting = Arc::clone(&meeting);
        let read = move |inner: &MemDevice, at, buf: &mut [u8]| meeting.read(inner, at, buf);
        Arc::new(Holding::read_by(MemDevice::new(512 << 20), read))
    };
    let devices: Vec<_> = std::iter::repeat_with(device).take(device_count).collect();
    let made = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>);
    drop(mkfs(made.collect(), options, &Arc::new(Runtime::system())).unwrap());
    let fs = open(&devices, Executor::Inline, false);
    let file = create(&fs, "file", bits).unwrap();
    assert_eq!(file.write(FileOffset::ZERO, &bytes).unwrap(), bytes.len());
    file.fsync().unwrap();
    let id = file.id();
    let start = logical_start(&fs, id);
    let chunks = fs.volume().chunks().to_vec();
    let chunk = chunks
        .iter()
        .find(|chunk| (chunk.start.0..chunk.start.0 + chunk.len_bytes).contains(&start.0))
        .unwrap();
    let place = |offset: u64| PhysicalAddr(offset + (start.0 - chunk.start.0));
    let copies = chunk.stripes.iter().map(|stripe| place(stripe.offset.0)).collect();
    fs.sync().unwrap();
    Made { devices, meeting, id, bytes, copies }
}

fn made_of(data_profile: BlockGroupFlags, bits: u64) -> Made {
    let options = MkfsOptions { data_profile: Some(data_profile), ..MkfsOptions::default() };
    made(&options, 1, bits)
}

/// Of a file that lies in one piece.
fn logical_start(fs: &Filesystem, id: InodeId) -> LogicalAddr {
    let extents = fs.file_extents(id, DiskOffset(0)).unwrap().map(Result::unwrap);
    let extents: Vec<_> = extents.map(|extent| (extent.offset.0, extent.disk_bytenr)).collect();
    let start = extents[0].1;
    let is_next = |&(offset, at): &(u64, LogicalAddr)| at.0 == start.0 + offset;
    assert!(extents.iter().all(is_next), "not in one piece: {extents:?}");
    start
}

impl Made {
    fn place(&self, copy: usize, sector: usize) -> PhysicalAddr {
        PhysicalAddr(self.copies[copy].0 + (sector * SECTOR + 100) as u64)
    }

    fn damage(&self, copy: usize, sector: usize) {
        self.devices[0].write_at(self.place(copy, sector), b"damage").unwrap();
    }

    fn make_unreadable(&self, copy: usize, sector: usize) {
        self.meeting.unreadable.lock().unwrap().push(self.place(copy, sector));
    }

    fn open(&self, executor: Executor, shares_reads: bool) -> Filesystem {
        open(&self.devices, executor, shares_reads)
    }

    /// All of it at once, of what is on the medium.
    fn read(&self, fs: &Filesystem) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0xEE; LEN];
        let len = fs.open_data(self.id)?.direct_read(FileOffset::ZERO, &mut bytes)?;
        assert_eq!(len, LEN);
        Ok(bytes)
    }

    /// The same by its number, a MiB at a time.
    fn read_by_number(&self, fs: &Filesystem) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0xEE; LEN + 2 * SECTOR];
        let len = fs.read(self.id, DiskOffset(0), &mut bytes)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    fn assert_is_read(&self, fs: &Filesystem) {
        assert!(self.read(fs).unwrap() == self.bytes);
        assert!(self.read_by_number(fs).unwrap() == self.bytes);
    }
}

const BESIDE: Executor = Executor::Threads(2);

#[test]
fn long_reads_are_shared_where_they_may_be() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for bits in [0, flags::NODATASUM] {
        let made = made_of(BlockGroupFlags::default(), bits);
        let meeting = &made.meeting;
        for executor in [BESIDE, Executor::Threads(16)] {
            let fs = made.open(executor, true);
            let most = meeting.most_in(2, || assert!(made.read(&fs).unwrap() == made.bytes));
            assert_eq!(most, 2, "with one beside");
            // Anew: whether the first was in time is known of that one.
            let fs = made.open(executor, true);
            let read = || assert!(made.read_by_number(&fs).unwrap() == made.bytes);
            assert_eq!(meeting.most_in(2, read), 2);
        }
        for (executor, shares) in
            [(BESIDE, false), (Executor::Threads(1), true), (Executor::Inline, true)]
        {
            let fs = made.open(executor, shares);
            let most = meeting.most_in(1, || made.assert_is_read(&fs));
            assert_eq!(most, 1, "{executor:?}");
        }
    }
}

#[test]
fn shared_reads_give_the_bytes_of_every_format() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let profiles = [
        (BlockGroupFlags::RAID0, 2),
        (BlockGroupFlags::RAID10, 4),
        (BlockGroupFlags::RAID1, 2),
        (BlockGroupFlags::default(), 1),
    ];
    for (profile, device_count) in profiles {
        for (sectorsize_bytes, csum) in [
            (4096, CsumType::Crc32c),
            (4096, CsumType::Blake2),
            (65536, CsumType::Crc32c),
            (65536, CsumType::Sha256),
        ] {
            let options = MkfsOptions {
                data_profile: Some(profile),
                sectorsize_bytes,
                nodesize_bytes: 65536,
                csum,
                ..MkfsOptions::default()
            };
            let made = made(&options, device_count, 0);
            made.assert_is_read(&made.open(BESIDE, true));
        }
    }
}

/// A request that holds a bad sector of each copy is put together from both.
#[test]
fn damage_in_different_copies_is_read_around() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let made = made_of(BlockGroupFlags::DUP, 0);
    for (copy, sectors) in [[3, 40, 2000], [5, 39, 2200]].iter().enumerate() {
        sectors.iter().for_each(|sector| made.damage(copy, *sector));
    }
    for shares in [false, true] {
        let fs = made.open(BESIDE, shares);
        made.assert_is_read(&fs);
        // Each by itself at least; whole requests, which are of another length where they are shared, beside.
        let counted: u64 = fs.volume().stats().iter().map(|stats| stats.corruption_errors).sum();
        assert!(counted >= 3, "{counted}");
    }
}

/// Without checksums, too: a request of which each copy had a sector that could not be read failed, and whether they were of one request was a
/// matter of whether it was shared.
#[test]
fn what_cannot_be_read_in_different_copies_is_read_around() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for bits in [0, flags::NODATASUM] {
        let made = made_of(BlockGroupFlags::DUP, bits);
        for (copy, sectors) in [[0, 70, 2000], [1, 100, 2200]].iter().enumerate() {
            sectors.iter().for_each(|sector| made.make_unreadable(copy, *sector));
        }
        for shares in [false, true] {
            made.assert_is_read(&made.open(BESIDE, shares));
        }
    }
}

/// Whichever thread meets one first.
#[test]
fn first_of_several_damaged_sectors_is_told() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let made = made_of(BlockGroupFlags::default(), 0);
    let meeting = &made.meeting;
    [700, 710, 900, 901, 2303].iter().for_each(|sector| made.damage(0, *sector));
    for shares in [false, true] {
        for read in [Made::read, Made::read_by_number] {
            let fs = made.open(BESIDE, shares);
            let start = logical_start(&fs, made.id);
            let mut result = Ok(Vec::new());
            meeting.most_in(2 * usize::from(shares), || {
                meeting.readers.lock().unwrap().slow = Some(made.place(0, 700));
                result = read(&made, &fs);
            });
            let Err(Error::Corrupt(told)) = result else { panic!("read what is damaged") };
            assert_eq!(told.reason, Reason::CsumMismatch);
            assert_eq!(told.block, Some(LogicalAddr(start.0 + 700 * SECTOR as u64)));
        }
        // What lies before it can be read.
        let fs = made.open(BESIDE, shares);
        let mut front = vec![0; 700 * SECTOR];
        assert_eq!(fs.read(made.id, DiskOffset(0), &mut front).unwrap(), front.len());
        assert!(front == made.bytes[..front.len()]);
    }
}

/// Each request of a device that fails takes long: those behind the first were all made before that was told.
#[test]
fn device_that_cannot_be_read_is_not_asked_for_all_that_is_behind() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let made = made_of(BlockGroupFlags::default(), 0);
    (0..LEN / SECTOR).for_each(|sector| made.make_unreadable(0, sector));
    for shares in [false, true] {
        let fs = made.open(BESIDE, shares);
        made.meeting.most_in(0, || assert!(made.read(&fs).is_err()));
        let asked = made.meeting.readers.lock().unwrap().all;
        assert!(asked <= 8, "{asked} long reads, where shared: {shares}");
    }
}
