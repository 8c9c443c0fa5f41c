//! Reading whole sectors by their addresses: each that has a checksum is compared with it, every copy tried.
//!
//! A long read is shared with one kept thread: what it takes is the copy out of the system's cache, and the checksums.

use ubtrfs_ondisk::{CsumType, LogicalAddr};
use ubtrfs_rt::{Arc, AtomicUsize, Executor, Mutex, Ordering, PerThread, Shared, with_per_thread};
use ubtrfs_volume::Volume;

use super::csum::{self, CsumLookup, PendingCsums};
use super::read::DecodedCache;
use crate::btree::{Store, Tree};
use crate::error::{Error, Result};

/// Most bytes that one request reads: few enough to be compared while they are in the processor's
/// cache.
const REQUEST_BYTES_MAX: usize = 256 << 10;
/// Shorter reads are over before the thread that shares them is awake.
const SHARED_BYTES_MIN: usize = 256 << 10;
/// What each of those who share a read takes at a time: the shorter, the sooner the last of them is done.
const SHARED_REQUEST_BYTES: usize = 128 << 10;
/// What is lost by waiting for the other is at most this part of the time, as so many reads then go alone for each that the wait was as long
/// as.
const LOST_PART: u64 = 16;
/// Most reads that go alone behind a wait: a device may let one wait for long, once.
const ALONE_COUNT_MAX: usize = 4096;
/// Most bytes of which the checksums are looked up at once.
const PART_BYTES_MAX: usize = 4 << 20;
/// Buffers longer than this are not read together with their neighbours through a buffer here: a request for each
/// costs less than the copy.
const SCATTERED_BYTES_MAX: usize = 32 << 10;

/// What reading needs of a filesystem.
#[derive(Clone, Debug)]
pub(crate) struct DataSource {
    pub(crate) store: Arc<Store>,
    /// `None` where the tree does not exist: then only data without checksums can be read.
    pub(crate) csum_tree: Option<Arc<Tree>>,
    pub(crate) pending_csums: Arc<PendingCsums>,
    pub(crate) decoded: Arc<DecodedCache>,
    /// Who reads and decodes beside the reader.
    pub(crate) executor: Executor,
    /// Where long reads are shared.
    pub(crate) long_reads: Option<Arc<LongReads>>,
}

/// Buffers that outlive one reader, so that reading many small files allocates nothing.
#[derive(Default, Debug)]
pub(super) struct Scratch {
    pub(super) csums: Vec<u8>,
    pub(super) sectors: Vec<u8>,
    pub(super) compressed: Vec<u8>,
}

thread_local! {
    static SCRATCH: PerThread<Scratch> = const { PerThread::new(None) };
}

/// `work` with this thread's buffers.
pub(super) fn with_scratch<R>(work: impl FnOnce(&mut Scratch) -> R) -> R {
    with_per_thread(&SCRATCH, work)
}

/// Reads whole sectors of data by their addresses.
#[derive(Debug)]
pub(crate) struct SectorReader {
    pub(super) source: DataSource,
    /// `None` for data without checksums.
    csums: Option<CsumLookup>,
    csum: CsumType,
    pub(super) sectorsize_bytes: usize,
}

impl SectorReader {
    /// # Errors
    /// `Missing` where data has checksums and the filesystem no tree of them.
    pub(crate) fn new(source: DataSource, has_csums: bool) -> Result<Self> {
        let geometry = *source.store.geometry();
        let sectorsize_bytes = geometry.sectorsize_bytes;
        let csums = match &source.csum_tree {
            Some(tree) if has_csums => {
                let pending = Arc::clone(&source.pending_csums);
                Some(CsumLookup::new(tree, pending, geometry.csum, sectorsize_bytes as u64))
            }
            None if has_csums => return Err(Error::not_found("the tree of checksums")),
            _ => None,
        };
        Ok(Self { source, csums, csum: geometry.csum, sectorsize_bytes })
    }

    /// Reads whole sectors and compares them with their checksums; many of them together with a kept thread.
    ///
    /// # Errors
    /// `Corrupt` where no copy of a sector is whole; the device's. Of several the first.
    pub(crate) fn read(
        &mut self,
        at: LogicalAddr,
        out: &mut [u8],
        csums: &mut Vec<u8>,
    ) -> Result<()> {
        let long_reads = match out.len() < SHARED_BYTES_MIN {
            true => None,
            false => self.source.long_reads.clone(),
        };
        let Some(reads) = long_reads else { return self.read_alone(at, out, csums) };
        let read = LongRead::begin(&reads);
        self.read_parts(at, out, csums, Some(&read).filter(|read| read.is_shared))
    }

    /// As [`SectorReader::read`], alone: for who has something else for a kept thread.
    ///
    /// # Errors
    /// As there.
    pub(super) fn read_alone(
        &mut self,
        at: LogicalAddr,
        out: &mut [u8],
        csums: &mut Vec<u8>,
    ) -> Result<()> {
        self.read_parts(at, out, csums, None)
    }

    fn read_parts(
        &mut self,
        mut at: LogicalAddr,
        out: &mut [u8],
        csums: &mut Vec<u8>,
        shared: Option<&LongRead<'_>>,
    ) -> Result<()> {
        for part in out.chunks_mut(PART_BYTES_MAX) {
            let (known_count, looked_up) =
                self.look_up(at, part.len() / self.sectorsize_bytes, csums);
            // Where some have none, or theirs cannot be read: of what is wrong the first is told.
            let known = &mut part[..known_count * self.sectorsize_bytes];
            let stored = self.csums.is_some().then_some(&csums[..]);
            self.read_requests(at, known, stored, shared)?;
            looked_up?;
            at = LogicalAddr(at.0 + part.len() as u64);
        }
        Ok(())
    }

    /// Fills `csums` for so many sectors from `at` on. Tells how many of them can be read then, and why not all.
    fn look_up(
        &mut self,
        at: LogicalAddr,
        count: usize,
        csums: &mut Vec<u8>,
    ) -> (usize, Result<()>) {
        let Some(lookup) = &mut self.csums else { return (count, Ok(())) };
        let looked_up = lookup.find(at, count as u64, csums);
        (count.min(csums.len() / self.csum.len_bytes()), looked_up)
    }

    fn read_requests(
        &self,
        at: LogicalAddr,
        out: &mut [u8],
        stored: Option<&[u8]>,
        shared: Option<&LongRead<'_>>,
    ) -> Result<()> {
        let shared = shared.filter(|_| out.len() >= SHARED_BYTES_MIN);
        let request_bytes = shared.map_or(REQUEST_BYTES_MAX, |_| SHARED_REQUEST_BYTES);
        let csum_bytes = request_bytes / self.sectorsize_bytes * self.csum.len_bytes();
        let mut requests = out.chunks_mut(request_bytes).enumerate().map(|(number, out)| {
            let at = LogicalAddr(at.0 + (number * request_bytes) as u64);
            let stored = stored.map(|all| all.get(number * csum_bytes..).unwrap_or_default());
            Request { at, out, stored }
        });
        let volume = self.source.store.volume();
        let format = (self.csum, self.sectorsize_bytes);
        let Some(shared) = shared else {
            return requests.try_for_each(|request| request.read(volume, format));
        };
        let failure = Mutex::new(None::<(LogicalAddr, Error)>);
        let is_behind = |at| failure.lock().as_ref().is_some_and(|(first, _)| at > *first);
        let work = |request: Request<'_>| {
            let at = request.at;
            // What lies behind an error is not asked for, as by who reads alone.
            if is_behind(at) {
                return;
            }
            let Err(error) = request.read(volume, format) else { return };
            let mut failure = failure.lock();
            if failure.as_ref().is_none_or(|(first, _)| at < *first) {
                *failure = Some((at, error));
            }
        };
        // With one: it is kept for all of the process, and a device may let it wait.
        shared.reads.note(self.source.executor.compute_each_with_one(requests, work));
        failure.into_inner().map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Fills buffers of whole sectors with what lies together from `at` on.
    ///
    /// # Errors
    /// As [`SectorReader::read`].
    pub(crate) fn read_scattered(
        &mut self,
        at: LogicalAddr,
        buffers: &mut [&mut [u8]],
    ) -> Result<()> {
        with_scratch(|scratch| self.scatter(at, buffers, scratch))
    }

    fn scatter(
        &mut self,
        mut at: LogicalAddr,
        mut buffers: &mut [&mut [u8]],
        scratch: &mut Scratch,
    ) -> Result<()> {
        while !buffers.is_empty() {
            let mut len = 0;
            let mut fits = |buffer: &&mut [u8]| {
                len += buffer.len();
                buffer.len() <= SCATTERED_BYTES_MAX && len <= REQUEST_BYTES_MAX
            };
            let count = buffers.iter().take_while(|buffer| fits(buffer)).count();
            let (together, rest) = buffers.split_at_mut(count.max(1));
            buffers = rest;
            if let [only] = together {
                self.read(at, only, &mut scratch.csums)?;
                at = LogicalAddr(at.0 + only.len() as u64);
                continue;
            }
            let len: usize = together.iter().map(|buffer| buffer.len()).sum();
            scratch.sectors.resize(len.max(scratch.sectors.len()), 0);
            self.read(at, &mut scratch.sectors[..len], &mut scratch.csums)?;
            let mut from = &scratch.sectors[..len];
            for buffer in together {
                let (bytes, behind) = from.split_at(buffer.len());
                buffer.copy_from_slice(bytes);
                from = behind;
            }
            at = LogicalAddr(at.0 + len as u64);
        }
        Ok(())
    }
}

/// The reads of a filesystem that are worth sharing.
#[derive(Debug, Default)]
pub(crate) struct LongReads {
    /// Those that go on.
    count: AtomicUsize,
    /// So many more go alone.
    alone_count: AtomicUsize,
}

impl LongReads {
    /// Who waits for a thread that other programs keep from running, or a device, had better read alone.
    fn note(&self, Shared { worked_ns, slept_ns }: Shared) {
        let count = slept_ns.saturating_mul(LOST_PART) / worked_ns.max(1);
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(ALONE_COUNT_MAX);
        self.alone_count.store(count, Ordering::Relaxed);
    }
}

/// One of them, as long as it goes on.
struct LongRead<'a> {
    reads: &'a LongReads,
    is_shared: bool,
}

impl<'a> LongRead<'a> {
    fn begin(reads: &'a LongReads) -> Self {
        // Others that go on keep the other processors busy.
        let is_only = reads.count.fetch_add(1, Ordering::Relaxed) == 0;
        let left = reads.alone_count.load(Ordering::Relaxed);
        if is_only && left > 0 {
            reads.alone_count.store(left - 1, Ordering::Relaxed);
        }
        Self { reads, is_shared: is_only && left == 0 }
    }
}

impl Drop for LongRead<'_> {
    fn drop(&mut self) {
        self.reads.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whole sectors that are read and compared with one request.
struct Request<'a> {
    at: LogicalAddr,
    out: &'a mut [u8],
    /// Their checksums, and of what follows; `None` for data without.
    stored: Option<&'a [u8]>,
}

impl Request<'_> {
    fn read(self, volume: &Volume, (csum, sectorsize): (CsumType, usize)) -> Result<()> {
        let Self { at, out, stored } = self;
        let judged = |copy: &[u8], stored: Option<&[u8]>, at| match stored {
            Some(stored) => csum::verify(csum, stored, copy, sectorsize, at),
            None => Ok(()),
        };
        let whole = volume.read(at, out, &|copy| judged(copy, stored, at));
        if whole.is_ok() || out.len() == sectorsize {
            return whole.map_err(unread);
        }
        // No copy is whole from end to end, but each sector may be in one of them.
        for (index, sector) in out.chunks_mut(sectorsize).enumerate() {
            let at = LogicalAddr(at.0 + (index * sectorsize) as u64);
            let stored = stored.map(|all| all.get(index * csum.len_bytes()..).unwrap_or_default());
            volume.read(at, sector, &|copy| judged(copy, stored, at)).map_err(unread)?;
        }
        Ok(())
    }
}

/// Data of which every copy is damaged is damage, not a failed device.
#[cold]
fn unread(error: ubtrfs_volume::Error) -> Error {
    match error {
        ubtrfs_volume::Error::NoWholeCopy { corruption, .. } => Error::Corrupt(corruption),
        other => other.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_read_is_shared_when_no_other_goes_on() {
        let reads = LongReads::default();
        let first = LongRead::begin(&reads);
        assert!(first.is_shared);
        let second = LongRead::begin(&reads);
        assert!(!second.is_shared);
        drop(first);
        assert!(!LongRead::begin(&reads).is_shared);
        drop(second);
        assert!(LongRead::begin(&reads).is_shared);
    }

    #[test]
    fn long_reads_go_alone_the_longer_one_waited() {
        let reads = LongReads::default();
        let count_alone = || (0..).take_while(|_| !LongRead::begin(&reads).is_shared).count();
        let note = |worked_ns, slept_ns| reads.note(Shared { worked_ns, slept_ns });
        for (worked_ns, slept_ns, expected) in [
            (100_000, 0, 0),
            (100_000, 50_000, 8),
            (100_000, 4_000_000, 640),
            (100_000, 30_000_000_000, ALONE_COUNT_MAX),
            (0, u64::MAX, ALONE_COUNT_MAX),
        ] {
            note(worked_ns, slept_ns);
            assert_eq!(count_alone(), expected);
            assert_eq!(count_alone(), 0);
        }
    }
}
