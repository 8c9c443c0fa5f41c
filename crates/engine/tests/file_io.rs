//! File I/O of the engine: the suite that every filesystem below `iomap` passes, judged after each
//! random run by our checker, `btrfs check` and a kernel mount.

mod common;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::failing::{DataFaults, FailingDevice, Lasting};
use common::power::{PoweredDevice, Unflushed};
use common::{filefrag, kernel_log};
use ubtrfs_engine::{
    DataFile, Error, Filesystem, InodeId, Method, MkfsOptions, NewInode, OpenOptions, Reservation,
    SetAttributes, mkfs,
};
use ubtrfs_iomap::{CacheOptions, FiemapExtent, FiemapSync, FileOffset, FileRange, Reach};
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::io_suite::{
    self, Count, Done, Expected, Harness, Look, Refusal, count, judged_one_in, replayed_one_in,
};
use ubtrfs_testkit::{KernelMount, Oracle, assert_checks_clean, oracle};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

const IMAGE_BYTES: u64 = 512 << 20;
/// States of all tests that were judged.
static JUDGED: AtomicU64 = AtomicU64::new(0);
/// Crashes of all tests.
static CRASHED: AtomicU64 = AtomicU64::new(0);

/// How files of a run are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Kind {
    /// Flags of each file.
    flags: u64,
    /// Holes have items.
    has_hole_items: bool,
    /// How files with the flag are compressed, unless with zlib.
    method: Option<Method>,
    /// Of a sector, unless it has 4096.
    sector_bytes: Option<u32>,
}

impl Kind {
    fn sector_bytes(self) -> u32 {
        self.sector_bytes.unwrap_or(4096)
    }

    /// The kernel mounts no filesystem whose sectors are larger than its pages.
    fn has_kernel(self) -> bool {
        self.sector_bytes() as usize <= rustix::param::page_size()
    }
}

/// An engine over an image, and its files.
struct EngineHarness {
    kind: Kind,
    _dir: tempfile::TempDir,
    image: PathBuf,
    options: CacheOptions,
    faults: Arc<DataFaults>,
    unflushed: Arc<Unflushed>,
    fs: Option<Filesystem>,
    next_number: AtomicU64,
    /// Crashes so far.
    crashes: u64,
}

/// The engine's open file, as the suite uses it.
struct Open(DataFile);

fn open(
    image: &Path,
    options: &CacheOptions,
    kind: Kind,
    faults: &Arc<DataFaults>,
    unflushed: &Arc<Unflushed>,
) -> Filesystem {
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    // What is written in place is torn within a sector where the device's blocks are smaller; of that nothing is promised.
    let block_bytes = kind.sector_bytes();
    let device = PoweredDevice::with_blocks(device, Arc::clone(unflushed), block_bytes.into());
    let device = FailingDevice::with_blocks(device, Arc::clone(faults), block_bytes as usize);
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    let page_cache = Some(options.clone());
    let compression = kind.method;
    let options = OpenOptions { page_cache, compression, ..OpenOptions::default() };
    Filesystem::open(volume, options).unwrap()
}

impl EngineHarness {
    fn new(options: CacheOptions) -> Self {
        Self::of_kind(options, Kind::default())
    }

    /// Files are compressed.
    fn compressed(options: CacheOptions) -> Self {
        Self::of_kind(options, Kind { flags: flags::COMPRESS, ..Kind::default() })
    }

    fn compressed_by(compression: Compression) -> impl Fn(CacheOptions) -> Self {
        let method = Some(Method::with_default_level(compression));
        move |options| {
            Self::of_kind(options, Kind { flags: flags::COMPRESS, method, ..Kind::default() })
        }
    }

    /// Files are written in place.
    fn in_place(options: CacheOptions) -> Self {
        let flags = flags::NODATACOW | flags::NODATASUM;
        Self::of_kind(options, Kind { flags, ..Kind::default() })
    }

    /// Sectors have so many bytes, as on machines with larger pages.
    fn with_sectors(sector_bytes: u32, flags: u64) -> impl Fn(CacheOptions) -> Self {
        let kind = Kind { sector_bytes: Some(sector_bytes), flags, ..Kind::default() };
        move |options| Self::of_kind(options, kind)
    }

    /// Holes have items, as before the feature NO_HOLES.
    fn with_hole_items(options: CacheOptions) -> Self {
        Self::of_kind(options, Kind { has_hole_items: true, ..Kind::default() })
    }

    fn of_kind(options: CacheOptions, kind: Kind) -> Self {
        // Where a flush costs nothing: what one makes durable is what the device of the test says.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = dir.path().join("image");
        let file = std::fs::File::create(&image).unwrap();
        file.set_len(IMAGE_BYTES).unwrap();
        let device = FileDevice::open(&image, OpenMode::ReadWrite, Window::Whole).unwrap();
        let devices: Vec<Arc<dyn Device>> = vec![Arc::new(device)];
        let mkfs_options = MkfsOptions {
            no_holes: !kind.has_hole_items,
            block_group_tree: !kind.has_hole_items,
            sectorsize_bytes: kind.sector_bytes(),
            nodesize_bytes: kind.sector_bytes().max(MkfsOptions::default().nodesize_bytes),
            ..MkfsOptions::default()
        };
        mkfs(devices, &mkfs_options, &Arc::new(Runtime::system())).unwrap();
        let faults = Arc::<DataFaults>::default();
        let unflushed = Arc::<Unflushed>::default();
        let fs = Some(open(&image, &options, kind, &faults, &unflushed));
        let (next_number, crashes) = (AtomicU64::new(0), 0);
        Self { kind, _dir: dir, image, options, faults, unflushed, fs, next_number, crashes }
    }

    fn fs(&self) -> &Filesystem {
        self.fs.as_ref().unwrap()
    }

    fn open_again(&mut self) {
        let Self { image, options, kind, faults, unflushed, .. } = self;
        self.fs = Some(open(image, options, *kind, faults, unflushed));
    }

    /// An empty file, by its name and number.
    fn make(&self) -> (String, InodeId) {
        let fs = self.fs();
        let name = format!("file {}", self.next_number.fetch_add(1, Ordering::Relaxed));
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        let new = NewInode::new(0o100_644, Time::default());
        let id = handle.create(fs.top_level(), name.as_bytes(), &new).unwrap();
        let flags = Some(self.kind.flags);
        handle.set_attributes(id, &SetAttributes { flags, ..SetAttributes::default() }).unwrap();
        (name, id)
    }
}

impl Drop for EngineHarness {
    fn drop(&mut self) {
        self.fs = None;
        if !std::thread::panicking() {
            check(&self.image);
        }
    }
}

impl Harness for EngineHarness {
    type Inode = InodeId;
    type File = Open;

    const SEEDS: u64 = 6;
    const RACE_ROUNDS: u64 = 2_000;
    const IS_IMAGE: bool = true;

    fn block_bytes(&self) -> u64 {
        self.kind.sector_bytes().into()
    }
    const RACES: u64 = 6;

    fn create(&self) -> InodeId {
        let (_, id) = self.make();
        self.fs().commit().unwrap();
        id
    }

    fn open(&self, id: &InodeId) -> Open {
        Open(self.fs().open_data(*id).unwrap())
    }

    fn refusal(&self, error: &Error) -> Refusal {
        match error {
            Error::File(error) => Refusal::Request(error.clone()),
            Error::NoSpace { .. } => Refusal::NoSpace,
            Error::Volume(_) => Refusal::Io,
            other => Refusal::Other(other.to_string()),
        }
    }

    fn taken_bytes(&self, id: &InodeId) -> u64 {
        let unstored_bytes = self.fs().unstored_bytes(*id);
        (self.fs().inode(*id).unwrap().nbytes + unstored_bytes).next_multiple_of(4096)
    }

    fn reclaim(&self) {
        self.fs().drop_clean_data();
    }

    fn background_pass(&self, now_ms: u64) {
        self.fs().write_back_due(now_ms);
    }

    fn commit(&self) {
        self.fs().commit().unwrap();
    }

    fn sync(&self) -> Done {
        self.fs().sync().unwrap();
        Done::Yes
    }

    /// The same bytes are written to another file, which the file then shares, and which goes.
    fn relocate(&self, id: &InodeId) -> Done {
        let fs = self.fs();
        let file = fs.open_data(*id).unwrap();
        let (name, other_id) = self.make();
        let other = fs.open_data(other_id).unwrap();
        let all = FileRange::from(FileOffset::ZERO);
        for extent in file.fiemap(all, usize::MAX, FiemapSync::WriteBack).unwrap() {
            let end = extent.range.end.min(file.size().round_down(4096));
            let range = FileRange::new(extent.range.start, end);
            if extent.flags.is_unwritten || extent.flags.is_inline || range.is_empty() {
                continue;
            }
            let mut bytes = vec![0; usize::try_from(range.len_bytes()).unwrap()];
            let len = file.read(range.start, &mut bytes).unwrap() / 4096 * 4096;
            other.write(range.start, &bytes[..len]).unwrap();
            let at = |offset: FileOffset| DiskOffset(offset.bytes());
            let same = at(range.start)..DiskOffset(range.start.bytes() + len as u64);
            // Who changes the file meanwhile has made it another.
            match fs.dedupe_range(other_id, same, *id, at(range.start)) {
                Ok(_) | Err(Error::InvalidArgument { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        drop(other);
        fs.unlink(fs.top_level(), name.as_bytes()).unwrap();
        Done::Yes
    }

    fn clone_range(
        &self,
        from: &InodeId,
        range: FileRange,
        to: &InodeId,
        to_start: FileOffset,
    ) -> Done {
        let at = |offset: FileOffset| DiskOffset(offset.bytes());
        let range = at(range.start)..at(range.end);
        self.fs().clone_range(*from, range, *to, at(to_start)).unwrap();
        Done::Yes
    }

    fn reopen(&mut self) {
        self.fs().sync().unwrap();
        self.fs = None;
        check(&self.image);
        self.open_again();
    }

    fn crash(&mut self) -> Done {
        self.fs = None;
        self.crashes += 1;
        let lost = self.unflushed.cut(&self.image, &mut io_suite::random_by_number(self.crashes));
        count(Count::BlocksLost, lost as u64);
        check(&self.image);
        let number = CRASHED.fetch_add(1, Ordering::Relaxed);
        let is_replayed = number % replayed_one_in() == replayed_one_in() / 2;
        if is_replayed && self.kind.has_kernel() && kernel_log::has_judges() {
            kernel_log::compare(&self.image, &format!("crash {number}"));
            count(Count::KernelReplays, 1);
        }
        // As opening leaves it, which closes nothing well.
        self.open_again();
        self.fs = None;
        check(&self.image);
        self.open_again();
        Done::Yes
    }

    fn fail_data_writes(&self, left: Option<u64>) -> Done {
        match left {
            Some(left) => self.faults.fail_after(left, Lasting::UntilTold),
            None => self.faults.fail_no_more(),
        }
        Done::Yes
    }

    fn yield_in_data_writes(&self, yields: bool) {
        self.faults.yield_in_writes(yields);
    }

    fn failures(&self) -> u64 {
        self.faults.failures()
    }

    fn judge(&mut self, files: &[Expected<InodeId>], look: Look) {
        self.fs().sync().unwrap();
        let has_kernel = self.kind.has_kernel();
        let judged = if has_kernel { files } else { &[] };
        let seen = judged.iter().map(|file| Seen::of(self.fs(), file)).collect();
        self.fs = None;
        check(&self.image);
        let number = JUDGED.fetch_add(1, Ordering::Relaxed);
        let is_judged = look == Look::Full || number.is_multiple_of(judged_one_in());
        match has_kernel {
            _ if !is_judged => {}
            true => ask_the_kernel(&self.image, seen),
            false if oracle::require(Oracle::BtrfsProgs) => assert_checks_clean(&self.image),
            false => {}
        }
        self.open_again();
    }
}

/// What the kernel must see of a file.
struct Seen<'a> {
    expected: &'a Expected<InodeId>,
    data_blocks: Vec<u64>,
    extents: Vec<filefrag::Extent>,
}

impl<'a> Seen<'a> {
    fn of(fs: &Filesystem, expected: &'a Expected<InodeId>) -> Self {
        let inode = fs.inode(expected.inode).unwrap();
        assert_eq!(inode.size_bytes, expected.bytes.len() as u64, "{}", inode.id);
        let mut data_blocks = expected.data_blocks.clone();
        // Linux looks for no hole in a file of as many bytes as it is long, unless a flag says that space was
        // preallocated there.
        let is_full = inode.nbytes == inode.size_bytes;
        if is_full && inode.size_bytes > 0 && inode.flags & flags::PREALLOC == 0 {
            data_blocks = (0..inode.size_bytes.div_ceil(4096)).collect();
        }
        let extents = filefrag::by_engine(&fs.open_data(expected.inode).unwrap());
        Self { expected, data_blocks, extents }
    }
}

/// `btrfs check` is content, and the kernel reads the same bytes, finds data where it must be, and extents as the engine does.
fn ask_the_kernel(image: &Path, seen: Vec<Seen<'_>>) {
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(image);
    }
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        return;
    }
    let mount = KernelMount::read_only(image, "");
    let by_number: HashMap<u64, PathBuf> = std::fs::read_dir(mount.path())
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (std::os::unix::fs::DirEntryExt::ino(&entry), entry.path()))
        .collect();
    for Seen { expected, data_blocks, extents } in seen {
        let path = &by_number[&expected.inode.inode.0];
        let have = std::fs::read(path).unwrap();
        assert!(have == expected.bytes, "{} by the kernel", expected.inode);
        let file = std::fs::File::open(path).unwrap();
        assert_eq!(kernel_data_blocks(&file), data_blocks, "{} by the kernel", expected.inode);
        assert_eq!(filefrag::by_kernel(path), extents, "{} by the kernel", expected.inode);
        count(Count::KernelViews, 1);
    }
    mount.unmount();
}

fn kernel_data_blocks(file: &std::fs::File) -> Vec<u64> {
    use rustix::fs::{SeekFrom, seek};
    let mut blocks = Vec::new();
    let mut at = 0;
    while let Ok(start) = seek(file, SeekFrom::Data(at)) {
        let end = seek(file, SeekFrom::Hole(start)).unwrap();
        blocks.extend(start / 4096..end.div_ceil(4096));
        at = end;
    }
    blocks
}

fn check(image: &Path) {
    count(Count::Checks, 1);
    let device = FileDevice::open(image, OpenMode::ReadOnly, Window::Whole).unwrap();
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(vec![Arc::new(device)], &options).unwrap();
    let options = ubtrfs_check::CheckOptions { data: true, ..Default::default() };
    let report = ubtrfs_check::check(&volume, &options).unwrap();
    let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
    assert!(report.is_clean(), "{errors:#?}");
}

impl io_suite::DataFile for Open {
    type Error = Error;

    fn size(&self) -> FileOffset {
        self.0.size()
    }

    fn read(&self, offset: FileOffset, buffer: &mut [u8]) -> Result<usize, Error> {
        self.0.read(offset, buffer)
    }

    fn write(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize, Error> {
        self.0.write(offset, bytes)
    }

    fn append(&self, bytes: &[u8]) -> Result<(FileOffset, usize), Error> {
        self.0.append(bytes)
    }

    fn direct_read(&self, offset: FileOffset, buffer: &mut [u8]) -> Result<usize, Error> {
        self.0.direct_read(offset, buffer)
    }

    fn direct_write(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize, Error> {
        self.0.direct_write(offset, bytes)
    }

    fn truncate(&self, size: FileOffset) -> Result<(), Error> {
        self.0.truncate(size)
    }

    fn zero_range(&self, offset: FileOffset, len_bytes: u64) -> Result<(), Error> {
        self.0.zero_range(offset, len_bytes)
    }

    fn punch_hole(&self, offset: FileOffset, len_bytes: u64) -> Result<(), Error> {
        self.0.punch_hole(offset, len_bytes)
    }

    fn allocate(&self, offset: FileOffset, len: u64, reach: Reach) -> Result<(), Error> {
        self.0.allocate(offset, len, reach)
    }

    fn allocate_zeroed(&self, offset: FileOffset, len: u64, reach: Reach) -> Result<(), Error> {
        self.0.allocate_zeroed(offset, len, reach)
    }

    fn unshare(&self, offset: FileOffset, len_bytes: u64) -> Result<(), Error> {
        self.0.unshare(offset, len_bytes)
    }

    fn seek_data(&self, offset: FileOffset) -> Result<FileOffset, Error> {
        self.0.seek_data(offset)
    }

    fn seek_hole(&self, offset: FileOffset) -> Result<FileOffset, Error> {
        self.0.seek_hole(offset)
    }

    fn fiemap(
        &self,
        range: FileRange,
        extents_max: usize,
        sync: FiemapSync,
    ) -> Result<Vec<FiemapExtent>, Error> {
        self.0.fiemap(range, extents_max, sync)
    }

    fn fsync(&self) -> Result<(), Error> {
        self.0.fsync()
    }

    fn take_error(&self) -> Result<(), Error> {
        self.0.take_error()
    }

    fn flush(&self, range: FileRange) -> Result<(), Error> {
        self.0.space().flush(range)
    }

    fn written_back_bytes(&self) -> u64 {
        self.0.space().cache().counts().bytes_written
    }

    fn cached_bytes(&self) -> u64 {
        self.0.space().cache().cached_bytes()
    }

    fn is_on_its_way(&self, range: FileRange) -> bool {
        io_suite::is_on_its_way(self.0.space().states(), range)
    }

    fn load(&self, range: FileRange, at: FileOffset, buffer: &mut [u8]) -> Result<(), Error> {
        self.0.map(range.start, range.len_bytes())?.load(at, buffer)
    }

    fn store(&self, range: FileRange, at: FileOffset, bytes: &[u8]) -> Result<(), Error> {
        self.0.map(range.start, range.len_bytes())?.store(at, bytes)
    }

    fn fault_for_read(&self, range: FileRange, at: FileOffset) -> Result<(), Error> {
        self.0.map(range.start, range.len_bytes())?.fault_for_read(at)
    }

    fn fault_for_write(&self, range: FileRange, at: FileOffset) -> Result<(), Error> {
        self.0.map(range.start, range.len_bytes())?.fault_for_write(at)
    }

    fn msync(&self, range: FileRange, part: FileRange) -> Result<(), Error> {
        self.0.map(range.start, range.len_bytes())?.msync(part)
    }
}

ubtrfs_testkit::io_suite_tests!(EngineHarness::new);

#[test]
fn random_operations_on_compressed_files_same_as_arrays() {
    io_suite::random_operations_same_as_arrays(EngineHarness::compressed);
    io_suite::random_operations_with_little_memory_same_as_arrays(EngineHarness::compressed);
    io_suite::random_operations_where_clean_folios_go_at_once_same_as_arrays(
        EngineHarness::compressed,
    );
}

/// The tests before have zlib.
#[test]
fn random_operations_on_files_compressed_with_zstd_and_lzo_same_as_arrays() {
    for compression in [Compression::Zstd, Compression::Lzo] {
        let make = EngineHarness::compressed_by(compression);
        io_suite::random_operations_same_as_arrays(&make);
        io_suite::random_operations_where_clean_folios_go_at_once_same_as_arrays(&make);
        io_suite::truncate_against_flush_and_reclaim_leaves_no_stale_bytes(&make);
    }
}

/// What lies behind the end of a file within its last sector, the blocks of a folio, and what is inline or compressed by the sector, are other things here.
#[test]
fn random_operations_where_sectors_are_large_same_as_arrays() {
    for sector_bytes in [16 * 1024, 64 * 1024] {
        for flags in [0, flags::COMPRESS, flags::NODATACOW | flags::NODATASUM] {
            let make = EngineHarness::with_sectors(sector_bytes, flags);
            for seed in io_suite::seeds::<EngineHarness>().step_by(3) {
                let keeps_clean = !seed.is_multiple_of(2);
                let options = CacheOptions { keeps_clean, ..CacheOptions::default() };
                io_suite::random_run(make(options), &io_suite::RandomRun::new(seed, 1000));
            }
        }
    }
}

#[test]
fn random_operations_on_files_written_in_place_same_as_arrays() {
    io_suite::random_operations_same_as_arrays(EngineHarness::in_place);
    io_suite::random_operations_with_little_memory_same_as_arrays(EngineHarness::in_place);
}

#[test]
fn mapped_access_of_threads_to_other_kinds_of_files_is_exact() {
    for make in [EngineHarness::in_place, EngineHarness::compressed, EngineHarness::with_hole_items]
    {
        io_suite::mapped_access_of_threads_beside_truncation_and_holes_is_exact(make);
    }
}

#[test]
fn reads_and_writes_of_other_kinds_of_files_are_atomic_to_each_other() {
    for make in [EngineHarness::in_place, EngineHarness::compressed, EngineHarness::with_hole_items]
    {
        io_suite::reads_and_writes_are_atomic_to_each_other(make);
    }
}

#[test]
fn failing_device_takes_no_more_from_threads_at_other_kinds_of_files_than_is_told() {
    for make in [EngineHarness::in_place, EngineHarness::compressed, EngineHarness::with_hole_items]
    {
        io_suite::failing_device_takes_no_more_from_threads_than_is_told(make);
    }
}

#[test]
fn truncate_of_files_written_in_place_against_flush_leaves_no_stale_bytes() {
    io_suite::truncate_against_flush_and_reclaim_leaves_no_stale_bytes(EngineHarness::in_place);
}

#[test]
fn truncate_of_compressed_files_against_flush_leaves_no_stale_bytes() {
    io_suite::truncate_against_flush_and_reclaim_leaves_no_stale_bytes(EngineHarness::compressed);
}

#[test]
fn truncate_where_holes_have_items_against_flush_leaves_no_stale_bytes() {
    let make = EngineHarness::with_hole_items;
    io_suite::truncate_against_flush_and_reclaim_leaves_no_stale_bytes(make);
}

/// The rest of the sector that inline data has for itself became a hole with an item, at an offset inside of the sector (seed 67
/// of the test below).
#[test]
fn inline_file_where_holes_have_items_has_none_behind_it() {
    let mut harness = EngineHarness::with_hole_items(CacheOptions::default());
    let at = FileOffset::new;
    for is_on_medium in [false, true] {
        for (long, short) in [(0, 1), (0, 356), (5000, 356), (0, 2000), (4096, 2000)] {
            let id = harness.create();
            let file = harness.fs().open_data(id).unwrap();
            file.truncate(at(long)).unwrap();
            if is_on_medium {
                file.fsync().unwrap();
            }
            file.truncate(at(short)).unwrap();
            file.write(at(0), &vec![1; usize::try_from(short).unwrap()]).unwrap();
            file.fsync().unwrap();
            file.truncate(at(0)).unwrap();
            file.write(at(0), &vec![2; usize::try_from(short).unwrap()]).unwrap();
            file.fsync().unwrap();
        }
    }
    harness.judge(&[], Look::Full);
}

#[test]
fn random_operations_where_holes_have_items_same_as_arrays() {
    io_suite::random_operations_same_as_arrays(EngineHarness::with_hole_items);
    io_suite::random_operations_with_little_memory_same_as_arrays(EngineHarness::with_hole_items);
}
