//! File I/O of the engine: the suite that every filesystem below `iomap` passes, judged after each
//! random run by our checker, `btrfs check` and a kernel mount.

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ubtrfs_engine::{
    DataFile, Error, Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, Reservation,
    SetAttributes, mkfs,
};
use ubtrfs_iomap::{CacheOptions, FiemapExtent, FiemapSync, FileOffset, FileRange, Reach};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::io_suite::{self, Done, Expected, Harness, Refusal};
use ubtrfs_testkit::{KernelMount, Oracle, assert_checks_clean, oracle};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

const IMAGE_BYTES: u64 = 512 << 20;
/// Of the states that are judged, so many go to `btrfs check` and a kernel mount.
const JUDGED_ONE_IN: u64 = 16;

/// How files of a run are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Kind {
    /// Flags of each file.
    flags: u64,
    /// Holes have items.
    has_hole_items: bool,
}

/// An engine over an image, and its files.
struct EngineHarness {
    kind: Kind,
    _dir: tempfile::TempDir,
    image: PathBuf,
    options: CacheOptions,
    fs: Option<Filesystem>,
    next_number: AtomicU64,
    judged: AtomicU64,
}

/// The engine's open file, as the suite uses it.
struct Open(DataFile);

fn open(image: &PathBuf, options: &CacheOptions) -> Filesystem {
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    let page_cache = Some(options.clone());
    Filesystem::open(volume, OpenOptions { page_cache, ..OpenOptions::default() }).unwrap()
}

impl EngineHarness {
    fn new(options: CacheOptions) -> Self {
        Self::of_kind(options, Kind::default())
    }

    /// Files are compressed.
    fn compressed(options: CacheOptions) -> Self {
        Self::of_kind(options, Kind { flags: flags::COMPRESS, ..Kind::default() })
    }

    /// Files are written in place.
    fn in_place(options: CacheOptions) -> Self {
        let flags = flags::NODATACOW | flags::NODATASUM;
        Self::of_kind(options, Kind { flags, ..Kind::default() })
    }

    /// Holes have items, as before the feature NO_HOLES.
    fn with_hole_items(options: CacheOptions) -> Self {
        Self::of_kind(options, Kind { has_hole_items: true, ..Kind::default() })
    }

    fn of_kind(options: CacheOptions, kind: Kind) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let file = std::fs::File::create(&image).unwrap();
        file.set_len(IMAGE_BYTES).unwrap();
        let device = FileDevice::open(&image, OpenMode::ReadWrite, Window::Whole).unwrap();
        let devices: Vec<Arc<dyn Device>> = vec![Arc::new(device)];
        let mkfs_options = MkfsOptions {
            no_holes: !kind.has_hole_items,
            block_group_tree: !kind.has_hole_items,
            ..MkfsOptions::default()
        };
        mkfs(devices, &mkfs_options, &Arc::new(Runtime::system())).unwrap();
        let fs = Some(open(&image, &options));
        let (next_number, judged) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { kind, _dir: dir, image, options, fs, next_number, judged }
    }

    fn fs(&self) -> &Filesystem {
        self.fs.as_ref().unwrap()
    }
}

impl Harness for EngineHarness {
    type Inode = InodeId;
    type File = Open;

    const SEEDS: u64 = 6;
    const RACE_ROUNDS: u64 = 2_000;

    fn create(&self) -> InodeId {
        let fs = self.fs();
        let name = format!("file {}", self.next_number.fetch_add(1, Ordering::Relaxed));
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        let new = NewInode::new(0o100_644, Time::default());
        let id = handle.create(fs.top_level(), name.as_bytes(), &new).unwrap();
        let flags = Some(self.kind.flags);
        handle.set_attributes(id, &SetAttributes { flags, ..SetAttributes::default() }).unwrap();
        drop(handle);
        fs.commit().unwrap();
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

    fn reclaim(&self) {
        self.fs().drop_clean_data();
    }

    fn background_pass(&self, now_ms: u64) {
        self.fs().write_back_due(now_ms);
    }

    fn commit(&self) {
        self.fs().commit().unwrap();
    }

    fn clone_range(
        &self,
        from: &InodeId,
        range: FileRange,
        to: &InodeId,
        to_start: FileOffset,
    ) -> Done {
        let at = |offset: FileOffset| ubtrfs_ondisk::FileOffset(offset.bytes());
        let range = at(range.start)..at(range.end);
        self.fs().clone_range(*from, range, *to, at(to_start)).unwrap();
        Done::Yes
    }

    fn reopen(&mut self) {
        self.fs().sync().unwrap();
        self.fs = None;
        self.fs = Some(open(&self.image, &self.options));
    }

    fn crash(&mut self) -> Done {
        self.fs = None;
        self.fs = Some(open(&self.image, &self.options));
        Done::Yes
    }

    fn judge(&mut self, files: &[Expected<InodeId>]) {
        self.fs().sync().unwrap();
        self.fs = None;
        check(&self.image);
        if self.judged.fetch_add(1, Ordering::Relaxed).is_multiple_of(JUDGED_ONE_IN) {
            self.ask_the_kernel(files);
        }
        self.fs = Some(open(&self.image, &self.options));
    }
}

impl EngineHarness {
    /// The kernel reads the same bytes, and finds data where it must be.
    fn ask_the_kernel(&self, files: &[Expected<InodeId>]) {
        if oracle::require(Oracle::BtrfsProgs) {
            assert_checks_clean(&self.image);
        }
        if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
            return;
        }
        let mount = KernelMount::read_only(&self.image, "");
        let by_number: std::collections::HashMap<u64, PathBuf> = std::fs::read_dir(mount.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (std::os::unix::fs::DirEntryExt::ino(&entry), entry.path()))
            .collect();
        for expected in files {
            let path = &by_number[&expected.inode.inode.0];
            let have = std::fs::read(path).unwrap();
            assert!(have == expected.bytes, "{} by the kernel", expected.inode);
            let file = std::fs::File::open(path).unwrap();
            let data = kernel_data_blocks(&file);
            assert_eq!(data, expected.data_blocks, "{} by the kernel", expected.inode);
        }
        mount.unmount();
    }
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

fn check(image: &PathBuf) {
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

    fn flush(&self, range: FileRange) {
        self.0.space().flush(range).unwrap();
    }

    fn load(&self, range: FileRange, at: FileOffset, buffer: &mut [u8]) -> Result<(), Error> {
        self.0.map(range.start, range.len_bytes())?.load(at, buffer)
    }

    fn store(&self, range: FileRange, at: FileOffset, bytes: &[u8]) -> Result<(), Error> {
        self.0.map(range.start, range.len_bytes())?.store(at, bytes)
    }
}

ubtrfs_testkit::io_suite_tests!(EngineHarness::new);

#[test]
fn random_operations_on_compressed_files_same_as_arrays() {
    io_suite::random_operations_same_as_arrays(EngineHarness::compressed);
}

#[test]
fn random_operations_on_files_written_in_place_same_as_arrays() {
    io_suite::random_operations_same_as_arrays(EngineHarness::in_place);
    io_suite::random_operations_with_little_memory_same_as_arrays(EngineHarness::in_place);
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
    harness.judge(&[]);
}

#[test]
fn random_operations_where_holes_have_items_same_as_arrays() {
    io_suite::random_operations_same_as_arrays(EngineHarness::with_hole_items);
    io_suite::random_operations_with_little_memory_same_as_arrays(EngineHarness::with_hole_items);
}
