//! Long reads that are shared with a kept thread: the bytes and the errors are those of reads alone.

mod common;

use std::fmt::{Debug, Formatter};
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use common::full::{create, noise};
use ubtrfs_engine::{Error, Filesystem, InodeId, MkfsOptions, OpenOptions, mkfs};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_ondisk::{FileOffset as DiskOffset, LogicalAddr, PhysicalAddr, Reason};
use ubtrfs_rt::{Executor, Runtime};
use ubtrfs_testkit::Prng;
use ubtrfs_volume::{Device, MemDevice, Volume, VolumeOptions};

const SECTOR: usize = 4096;
const MIB: usize = 1 << 20;
/// More than the checksums of which are looked up at once, and no whole requests.
const LEN: usize = 9 * MIB + 5 * SECTOR;
/// Longer than any read that is not one of data.
const LONG: usize = 64 << 10;
/// Long enough for a thread to come on, whatever a machine is at besides.
const PATIENCE: Duration = Duration::from_secs(60);

/// The kept threads are the process's: what another test has of them this one has not.
static ALONE: Mutex<()> = Mutex::new(());

/// A device that knows how many long reads are in it.
struct Meeting {
    inner: MemDevice,
    readers: Mutex<Readers>,
    came: Condvar,
}

#[derive(Default)]
struct Readers {
    now: usize,
    most: usize,
    /// So many wait for each other.
    awaited: usize,
}

impl Meeting {
    fn new(inner: MemDevice) -> Self {
        Self { inner, readers: Mutex::default(), came: Condvar::new() }
    }

    /// How many long reads there were at a time at most in `work`, of which the first wait for one another until there are so many.
    fn most_in(&self, awaited: usize, work: impl FnOnce()) -> usize {
        *self.readers.lock().unwrap() = Readers { awaited, ..Readers::default() };
        work();
        self.readers.lock().unwrap().most
    }
}

impl Debug for Meeting {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meeting").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl Device for Meeting {
    fn name(&self) -> String {
        self.inner.name()
    }
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }
    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        if buf.len() < LONG {
            return self.inner.read_at(at, buf);
        }
        let mut readers = self.readers.lock().unwrap();
        readers.now += 1;
        readers.most = readers.most.max(readers.now);
        self.came.notify_all();
        let is_lone = |readers: &mut Readers| readers.most < readers.awaited;
        let (mut readers, waited) =
            self.came.wait_timeout_while(readers, PATIENCE, is_lone).unwrap();
        if waited.timed_out() {
            readers.awaited = 0;
        }
        drop(readers);
        let result = self.inner.read_at(at, buf);
        self.readers.lock().unwrap().now -= 1;
        result
    }
    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        self.inner.write_at(at, buf)
    }
    fn flush(&self) -> io::Result<()> {
        self.inner.flush()
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

fn open(device: &Arc<Meeting>, executor: Executor, shares_reads: bool) -> Filesystem {
    let device = Arc::clone(device) as Arc<dyn Device>;
    let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
    let runtime = Arc::new(Runtime { executor, ..Runtime::system() });
    Filesystem::open(volume, OpenOptions { runtime, shares_reads, ..OpenOptions::default() })
        .unwrap()
}

/// A file with those bytes in a new filesystem, whose data lies so often on the device, and where each copy of the file's beginning is.
fn made(
    data_profile: BlockGroupFlags,
    bits: u64,
    bytes: &[u8],
) -> (Arc<Meeting>, InodeId, Vec<PhysicalAddr>) {
    let device = Arc::new(Meeting::new(MemDevice::new(512 << 20)));
    let options = MkfsOptions { data_profile: Some(data_profile), ..MkfsOptions::default() };
    let devices = vec![Arc::clone(&device) as Arc<dyn Device>];
    drop(mkfs(devices, &options, &Arc::new(Runtime::system())).unwrap());
    let fs = open(&device, Executor::Inline, false);
    let file = create(&fs, "file", bits).unwrap();
    assert_eq!(file.write(FileOffset::ZERO, bytes).unwrap(), bytes.len());
    file.fsync().unwrap();
    let start = logical_start(&fs, file.id());
    let chunks = fs.volume().chunks().to_vec();
    let chunk = chunks
        .iter()
        .find(|chunk| (chunk.start.0..chunk.start.0 + chunk.len_bytes).contains(&start.0))
        .unwrap();
    let copies = chunk.stripes.iter();
    let copies = copies.map(|stripe| PhysicalAddr(stripe.offset.0 + (start.0 - chunk.start.0)));
    let id = file.id();
    fs.sync().unwrap();
    (device, id, copies.collect())
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

fn damage(device: &Meeting, copy: PhysicalAddr, sector: usize) {
    let at = PhysicalAddr(copy.0 + (sector * SECTOR + 100) as u64);
    device.write_at(at, b"damage").unwrap();
}

fn read(fs: &Filesystem, id: InodeId) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0xEE; LEN + 2 * SECTOR];
    let len = fs.read(id, DiskOffset(0), &mut bytes)?;
    bytes.truncate(len);
    Ok(bytes)
}

fn bytes() -> Vec<u8> {
    noise(&mut Prng::new(3), LEN as u64)
}

#[test]
fn long_reads_are_shared_where_they_may_be() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let bytes = bytes();
    for bits in [0, flags::NODATASUM] {
        let (device, id, _) = made(BlockGroupFlags::default(), bits, &bytes);
        let fs = open(&device, Executor::Threads(2), true);
        let most = device.most_in(2, || assert!(read(&fs, id).unwrap() == bytes));
        assert_eq!(most, 2);
        let file = fs.open_data(id).unwrap();
        let mut buffer = vec![0; MIB];
        let most = device.most_in(2, || {
            for (number, expected) in bytes.chunks(MIB).enumerate() {
                let at = FileOffset::new((number * MIB) as u64);
                let count = file.direct_read(at, &mut buffer).unwrap();
                assert!(buffer[..count] == *expected);
            }
        });
        assert_eq!(most, 2, "by an open file");
        for (executor, shares) in
            [(Executor::Threads(2), false), (Executor::Threads(1), true), (Executor::Inline, true)]
        {
            let fs = open(&device, executor, shares);
            let most = device.most_in(1, || assert!(read(&fs, id).unwrap() == bytes));
            assert_eq!(most, 1, "{executor:?}");
        }
    }
}

/// A request that holds a bad sector of each copy is put together from both.
#[test]
fn damage_in_different_copies_is_read_around_as_by_reads_alone() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let bytes = bytes();
    let (device, id, copies) = made(BlockGroupFlags::DUP, 0, &bytes);
    for (copy, sectors) in copies.iter().zip([[3, 40, 2000], [5, 39, 2200]]) {
        sectors.iter().for_each(|sector| damage(&device, *copy, *sector));
    }
    for shares in [false, true] {
        let fs = open(&device, Executor::Threads(2), shares);
        assert!(read(&fs, id).unwrap() == bytes);
        // Each by itself at least; whole requests, which are of another length where they are shared, beside.
        let counted: u64 = fs.volume().stats().iter().map(|stats| stats.corruption_errors).sum();
        assert!(counted >= 3, "{counted}");
    }
}

/// Whichever thread meets one first.
#[test]
fn first_of_several_damaged_sectors_is_told() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let bytes = bytes();
    let (device, id, copies) = made(BlockGroupFlags::default(), 0, &bytes);
    let bad = [700, 710, 900, 901, 2303];
    bad.iter().for_each(|sector| damage(&device, copies[0], *sector));
    for shares in [false, true] {
        for _ in 0..20 {
            let fs = open(&device, Executor::Threads(2), shares);
            let start = logical_start(&fs, id);
            let Err(Error::Corrupt(told)) = read(&fs, id) else { panic!("read what is damaged") };
            assert_eq!(told.reason, Reason::CsumMismatch);
            assert_eq!(told.block, Some(LogicalAddr(start.0 + 700 * SECTOR as u64)));
            // What lies before it can be read.
            let mut front = vec![0; 700 * SECTOR];
            assert_eq!(fs.read(id, DiskOffset(0), &mut front).unwrap(), front.len());
            assert!(front == bytes[..front.len()]);
        }
    }
}
