//! A device that fails writes of data, wherever chunks are: of what is no superblock and no block of a tree.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_ondisk::superblock::SUPERBLOCK_OFFSETS;
use ubtrfs_volume::{Device, FileDevice};

/// Where the filesystem's uuid is in a superblock, and in each block of a tree.
const FSID: std::ops::Range<usize> = 32..48;

/// Of tests beside each other on few processors somebody else may be next.
const YIELDS: u32 = 8;

/// What a device does to writes of data.
#[derive(Debug)]
pub struct DataFaults {
    /// So many more are done before one fails; `u64::MAX` for never.
    left: AtomicU64,
    /// So many are done between that and the next that fails; `u64::MAX` for all.
    between: AtomicU64,
    /// A write that fails has written its first half.
    tears: AtomicBool,
    writes: AtomicU64,
    failures: AtomicU64,
    /// Who writes data lets others run first.
    yields: AtomicBool,
}

/// How writes fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lasting {
    Once,
    /// After so many more again, and so on, until it is told to.
    Again(u64),
    UntilTold,
}

impl Default for DataFaults {
    fn default() -> Self {
        Self {
            left: AtomicU64::new(u64::MAX),
            between: AtomicU64::new(u64::MAX),
            tears: AtomicBool::new(false),
            writes: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            yields: AtomicBool::new(false),
        }
    }
}

impl DataFaults {
    /// The one after so many more fails. Of every other failure half is written.
    pub fn fail_after(&self, left: u64, lasting: Lasting) {
        let between = match lasting {
            Lasting::Once => u64::MAX,
            Lasting::Again(count) => count,
            Lasting::UntilTold => 0,
        };
        self.between.store(between, Ordering::SeqCst);
        self.left.store(left, Ordering::SeqCst);
    }

    pub fn fail_no_more(&self) {
        self.left.store(u64::MAX, Ordering::SeqCst);
    }

    /// Whether who writes data lets other threads run first.
    pub fn yield_in_writes(&self, yields: bool) {
        self.yields.store(yields, Ordering::SeqCst);
    }

    /// How many were asked for.
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::SeqCst)
    }

    /// How many failed.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::SeqCst)
    }

    /// Whether a write of data fails now.
    fn strikes(&self) -> bool {
        if self.yields.load(Ordering::SeqCst) {
            (0..YIELDS).for_each(|_| std::thread::yield_now());
        }
        self.writes.fetch_add(1, Ordering::SeqCst);
        let between = self.between.load(Ordering::SeqCst);
        let spent = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| match left {
            u64::MAX => None,
            0 => Some(between),
            left => Some(left - 1),
        });
        let fails = spent == Ok(0);
        if fails {
            self.failures.fetch_add(1, Ordering::SeqCst);
            self.tears.fetch_xor(true, Ordering::SeqCst);
        }
        fails
    }
}

/// The device.
#[derive(Debug)]
pub struct FailingDevice<D = FileDevice> {
    inner: D,
    fsid: [u8; 16],
    faults: Arc<DataFaults>,
    /// What a failed write leaves written ends between two blocks of so many.
    block_bytes: usize,
}

impl<D: Device> FailingDevice<D> {
    /// Over one that has a filesystem, of blocks of 4096 bytes.
    pub fn new(inner: D, faults: Arc<DataFaults>) -> Self {
        Self::with_blocks(inner, faults, 4096)
    }

    /// As [`FailingDevice::new`], of blocks of so many bytes.
    pub fn with_blocks(inner: D, faults: Arc<DataFaults>, block_bytes: usize) -> Self {
        let mut fsid = [0; 16];
        let at = PhysicalAddr(SUPERBLOCK_OFFSETS[0].0 + FSID.start as u64);
        inner.read_at(at, &mut fsid).unwrap();
        assert_ne!(fsid, [0; 16]);
        Self { inner, fsid, faults, block_bytes }
    }

    fn is_data(&self, at: PhysicalAddr, buf: &[u8]) -> bool {
        !SUPERBLOCK_OFFSETS.contains(&at) && buf.get(FSID) != Some(&self.fsid[..])
    }
}

impl<D: Device> Device for FailingDevice<D> {
    ubtrfs_testkit::device_passes_on!(inner: name, len_bytes, read_at, flush, discard, resize, is_read_only);

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> std::io::Result<()> {
        self.write_vectored_at(at, &[buf])
    }
    fn write_vectored_at(&self, at: PhysicalAddr, bufs: &[&[u8]]) -> std::io::Result<()> {
        if bufs.first().is_some_and(|buf| self.is_data(at, buf)) && self.faults.strikes() {
            if self.faults.tears.load(Ordering::SeqCst) {
                let bytes = bufs.concat();
                let half = bytes.len() / 2 / self.block_bytes * self.block_bytes;
                self.inner.write_at(at, &bytes[..half])?;
            }
            return Err(std::io::Error::other("made to fail"));
        }
        self.inner.write_vectored_at(at, bufs)
    }
}
