//! Calls of one file beside each other, with the filesystem's part as small as it can be.

use shuttle::thread;
use ubtrfs_rt::{Arc, Mutex, check_orders};

use super::range;
use crate::address_space::{AddressSpace, OpenFile, SeenEnd};
use crate::error::Error;
use crate::mapping::{
    Beyond, FileSystem, Mapping, MappingFlags, MappingKind, MappingSequence, Purpose, ReadPiece,
    RunFailure, WritebackRun,
};
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::{CacheAblation, CacheOptions, PageCache};

const BLOCK: u32 = 4096;
const BLOCKS: usize = 4;
const DEVICE_BYTES: usize = BLOCKS * BLOCK as usize;

/// One file, which lies on a device from its first byte on and is written in place.
struct InPlace {
    device: Mutex<Vec<u8>>,
}

fn within(range: FileRange) -> std::ops::Range<usize> {
    let at = |offset: FileOffset| usize::try_from(offset.bytes()).unwrap().min(DEVICE_BYTES);
    at(range.start)..at(range.end)
}

impl InPlace {
    fn write(&self, sequence: &MappingSequence, run: &WritebackRun<'_>) {
        let mut device = self.device.lock();
        device[within(run.range)].copy_from_slice(&run.buffers.concat());
        sequence.changed();
    }
}

impl FileSystem for InPlace {
    type Inode = MappingSequence;
    type Error = Error;

    fn block_bytes(&self) -> u32 {
        BLOCK
    }

    fn sequence<'a>(&self, sequence: &'a MappingSequence) -> &'a MappingSequence {
        sequence
    }

    fn map(
        &self,
        sequence: &MappingSequence,
        _: FileRange,
        _: Purpose<'_, '_>,
    ) -> Result<Mapping, Error> {
        let _device = self.device.lock();
        Ok(Mapping {
            range: range(0, DEVICE_BYTES as u64),
            kind: MappingKind::Mapped,
            flags: MappingFlags::default(),
            cookie: sequence.cookie(),
            address: None,
            token: 0,
        })
    }

    fn read(&self, _: &MappingSequence, pieces: &mut [ReadPiece<'_>]) -> Result<(), Error> {
        let device = self.device.lock();
        for piece in pieces {
            let mut at = within(FileRange::from(piece.start)).start;
            for buffer in &mut piece.buffers {
                buffer.copy_from_slice(&device[at..at + buffer.len()]);
                at += buffer.len();
            }
        }
        Ok(())
    }

    fn write_back(
        &self,
        sequence: &MappingSequence,
        runs: &[WritebackRun<'_>],
    ) -> Result<(), RunFailure<Error>> {
        runs.iter().for_each(|run| self.write(sequence, run));
        Ok(())
    }

    fn write_direct(
        &self,
        sequence: &MappingSequence,
        run: &WritebackRun<'_>,
    ) -> Result<u64, Error> {
        self.write(sequence, run);
        Ok(run.range.len_bytes())
    }

    fn unreserve(&self, _: &MappingSequence, _: u64) {}

    fn stored_size(&self, _: &MappingSequence) -> Result<Option<FileOffset>, Error> {
        Ok(Some(FileOffset::ZERO))
    }

    fn set_size(&self, _: &MappingSequence, _: FileOffset, _: Beyond) -> Result<(), Error> {
        Ok(())
    }

    fn punch(&self, sequence: &MappingSequence, range: FileRange) -> Result<(), Error> {
        self.device.lock()[within(range)].fill(0);
        sequence.changed();
        Ok(())
    }

    fn allocate(&self, _: &MappingSequence, _: FileRange) -> Result<(), Error> {
        Ok(())
    }

    fn check_space(&self, _: &MappingSequence, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn sync(&self, _: &MappingSequence, _: SeenEnd) -> Result<(), Error> {
        Ok(())
    }
}

const SIZE: usize = 6000;

/// A file of [`SIZE`] bytes, all of them 1, of which memory has nothing.
fn new_file() -> Arc<AddressSpace<InPlace>> {
    let mut device = vec![0; DEVICE_BYTES];
    device[..SIZE].fill(1);
    let fs = InPlace { device: Mutex::new(device) };
    let ablation = CacheAblation { without_slabs: true, ..CacheAblation::default() };
    let cache = PageCache::new(CacheOptions { ablation, ..CacheOptions::default() });
    AddressSpace::new(Arc::new(fs), MappingSequence::new(), FileOffset::new(SIZE as u64), cache)
}

fn contents(file: &OpenFile<InPlace>) -> Vec<u8> {
    let mut bytes = vec![9; DEVICE_BYTES];
    let len = file.read(FileOffset::ZERO, &mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

/// Somebody reads ahead while `change` makes the file longer, from its second block on, by bytes that are 2.
fn read_ahead_beside(change: fn(&Arc<AddressSpace<InPlace>>)) {
    let space = new_file();
    let beside = Arc::clone(&space);
    let changer = thread::spawn(move || change(&beside));
    space.read_ahead_of(range(0, 2 * u64::from(BLOCK))).unwrap();
    changer.join().unwrap();
    let block = BLOCK as usize;
    let expect = [vec![1; block], vec![2; 2 * block]].concat();
    assert!(contents(&space.open()) == expect);
    assert!(space.filesystem.device.lock()[..3 * block] == expect);
}

/// The file's end was moved behind the moment when memory forgot what was there: who read ahead between them found the new bytes on the
/// device, and zeroed those behind the old end. Reads then gave zeros, and a write beside them brought the zeros to the device.
#[test]
fn direct_write_beyond_the_end_is_seen_whatever_is_read_ahead() {
    check_orders(|| {
        read_ahead_beside(|space| {
            let bytes = vec![2; 2 * BLOCK as usize];
            let written = space.open().direct_write(FileOffset::new(u64::from(BLOCK)), &bytes);
            assert_eq!(written, Ok(bytes.len()));
        });
    });
}

/// The same of what a filesystem does by itself.
#[test]
fn clone_beyond_the_end_is_seen_whatever_is_read_ahead() {
    check_orders(|| {
        read_ahead_beside(|space| {
            let block = u64::from(BLOCK);
            let (to, end) = (range(block, 3 * block), FileOffset::new(3 * block));
            let change = || {
                space.filesystem.device.lock()[within(to)].fill(2);
                space.inode.changed();
                Ok(Some(end))
            };
            assert_eq!(space.replace_flushed_range(to, None, end, change), Ok(true));
        });
    });
}
