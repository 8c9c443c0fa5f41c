//! One file and what is done to it, the same calls on the engine in process and through system calls.

use std::path::Path;

use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use ubtrfs_engine::{
    Background, BackgroundOptions, CACHE_BYTES_DEFAULT, DataFile, Error as EngineError, Filesystem,
    Method, MkfsOptions, NewInode, OpenOptions, Reservation, mkfs,
};
use ubtrfs_iomap::{
    CacheAblation, CacheOptions, Error as IoError, FiemapSync, FileOffset, FileRange, Reach,
};
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_rt::{Arc, Time};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

use super::{Ablate, Args, Count, IMAGE_BYTES, runtime};
use crate::device::{CountingDevice, Requests};
use crate::error::{Error, Result};

/// The file.
const NAME: &str = "data";
/// Extents that one FIEMAP tells.
const FIEMAP_EXTENTS: usize = 1000;

/// What one FIEMAP tells.
pub(super) struct Told {
    /// Where each extent begins.
    pub(super) starts: Vec<u64>,
    /// Of those, how many have no place yet.
    pub(super) delalloc: u64,
    /// Where the last of them ends, unless it is the last one of the file.
    pub(super) next: Option<u64>,
}

/// A file that is open.
pub(super) trait Data {
    /// Writes all of `bytes` at `at`.
    fn write(&self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Reads up to the end of the file; returns how many bytes.
    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<usize>;

    /// SEEK_DATA; `None` where there is no more.
    fn seek_data(&self, at: u64) -> Result<Option<u64>>;

    /// SEEK_HOLE.
    fn seek_hole(&self, at: u64) -> Result<u64>;

    /// Whether there is FIEMAP.
    fn tells_extents(&self) -> bool {
        true
    }

    /// What one FIEMAP tells from `at` on.
    fn fiemap(&self, at: u64) -> Result<Told>;

    fn truncate(&self, size: u64) -> Result<()>;

    /// fallocate, which extends the file.
    fn allocate(&self, len_bytes: u64) -> Result<()>;

    /// Makes so many bytes from the beginning zero; the space stays the file's.
    fn zero(&self, len_bytes: u64) -> Result<()>;

    /// The same by fallocate's ZERO_RANGE, which makes them unwritten.
    fn zero_range(&self, len_bytes: u64) -> Result<()>;

    /// A store at `at` through a shared map of the file's first `map_bytes`.
    fn store_mapped(&self, map_bytes: usize, at: usize, bytes: &[u8]) -> Result<()>;

    fn fsync(&self) -> Result<()>;

    /// What was counted since the last call.
    fn counts(&mut self) -> Vec<Count>;
}

/// Opens or makes the file, and does `work` on it.
///
/// # Errors
/// If it cannot be opened; as `work`.
pub(super) fn with_file<T>(
    args: &Args,
    is_new: bool,
    work: impl FnOnce(&mut dyn Data) -> Result<T>,
) -> Result<T> {
    if args.system {
        return work(&mut System::open(&args.path, is_new)?);
    }
    let mut engine = Engine::open(args, is_new)?;
    let done = work(&mut engine)?;
    engine.close()?;
    Ok(done)
}

/// Opens or makes a plain file, and does `work` on it.
///
/// # Errors
/// If it cannot be opened; as `work`.
pub(super) fn with_plain_file<T>(
    directory: &Path,
    is_new: bool,
    work: impl FnOnce(&mut dyn Data) -> Result<T>,
) -> Result<T> {
    work(&mut System::open(directory, is_new)?)
}

/// The engine in process.
struct Engine {
    /// As a mount has it.
    background: Background,
    fs: Filesystem,
    file: DataFile,
    device: Arc<CountingDevice>,
    last: Seen,
}

/// What was counted so far.
#[derive(Clone, Copy)]
struct Seen {
    state_searches: u64,
    mappings: u64,
    runs_written: u64,
    bytes_written: u64,
    tree_searches: u64,
    blocks_read: u64,
    blocks_written: u64,
    commits: u64,
    requests: Requests,
}

impl Engine {
    fn open(args: &Args, is_new: bool) -> Result<Self> {
        let mode = match is_new {
            true => OpenMode::CreateNew { len_bytes: IMAGE_BYTES },
            false => OpenMode::ReadWrite,
        };
        let device = CountingDevice::new(FileDevice::open(&args.path, mode, Window::Whole)?);
        let devices = vec![Arc::clone(&device) as Arc<dyn Device>];
        let volume = match is_new {
            true => mkfs(devices, &MkfsOptions::default(), &runtime())?,
            false => Volume::open(devices, &VolumeOptions::default())?,
        };
        let fs = Filesystem::open(volume, open_options(args))?;
        let top = fs.top_level();
        let id = if is_new {
            let new = NewInode::new(0o100_644, Time { sec: 1_600_000_000, nsec: 0 });
            fs.begin(Reservation::create(0))?.create(top, NAME.as_bytes(), &new)?
        } else {
            fs.lookup(top, NAME.as_bytes())?
        };
        let file = fs.open_data(id)?;
        let last = Seen::of(&fs, &file, &device);
        let background = fs
            .run_in_background(BackgroundOptions::default())
            .map_err(Error::io("start the threads of the engine"))?;
        Ok(Self { background, fs, file, device, last })
    }

    fn close(self) -> Result<()> {
        drop(self.file);
        self.background.stop()?;
        Ok(self.fs.sync()?)
    }
}

fn open_options(args: &Args) -> OpenOptions {
    let compression = args.compress.map(|level| Method::new(Compression::Zstd, level));
    OpenOptions { page_cache: page_cache(args), compression, ..args.open_options() }
}

/// How the memory for file data is used; `None` for what the engine gives users.
fn page_cache(args: &Args) -> Option<CacheOptions> {
    let mut ablation = CacheAblation::default();
    let ablate = args.ablate;
    ablation.states.without_hint = matches!(ablate, Some(Ablate::Hint | Ablate::Seek));
    ablation.states.lock_in_tree = matches!(ablate, Some(Ablate::Lock | Ablate::Seek));
    ablation.zero_without_batch = ablate == Some(Ablate::Batch);
    ablation.without_slabs = ablate == Some(Ablate::Slabs);
    let has_huge_pages = args.huge_pages;
    let mut cache = CacheOptions { has_huge_pages, ablation, ..CacheOptions::default() };
    match args.cache_mib {
        None if ablate.is_none() && !has_huge_pages => return None,
        // Half, as the engine chooses where it is told nothing of file data.
        None => cache.cached_bytes_max = CACHE_BYTES_DEFAULT as u64 / 2,
        Some(mib) => {
            // All of it may be dirty, as the kernel has it for a while.
            let bytes = (mib as u64) << 20;
            cache.cached_bytes_max = bytes;
            cache.dirty_bytes_max = bytes;
            cache.dirty_bytes_background = bytes;
            cache.dirty_age_max_ms = u64::MAX;
        }
    }
    Some(cache)
}

impl Seen {
    fn of(fs: &Filesystem, file: &DataFile, device: &CountingDevice) -> Self {
        let counts = file.space().cache().counts();
        Self {
            state_searches: file.state_search_count(),
            mappings: counts.mappings,
            runs_written: counts.runs_written,
            bytes_written: counts.bytes_written,
            tree_searches: fs.tree_searches(),
            blocks_read: fs.blocks_read(),
            blocks_written: fs.blocks_written(),
            commits: fs.superblock().generation.get(),
            requests: device.requests(),
        }
    }
}

fn no_data<T>(result: Result<T, EngineError>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(EngineError::File(IoError::NoData { .. })) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Data for Engine {
    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        super::require(self.file.write(FileOffset::new(at), bytes)? == bytes.len())
    }

    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<usize> {
        Ok(self.file.read(FileOffset::new(at), buffer)?)
    }

    fn seek_data(&self, at: u64) -> Result<Option<u64>> {
        Ok(no_data(self.file.seek_data(FileOffset::new(at)))?.map(FileOffset::bytes))
    }

    fn seek_hole(&self, at: u64) -> Result<u64> {
        Ok(self.file.seek_hole(FileOffset::new(at))?.bytes())
    }

    fn fiemap(&self, at: u64) -> Result<Told> {
        let range = FileRange::from(FileOffset::new(at));
        let extents = self.file.fiemap(range, FIEMAP_EXTENTS, FiemapSync::AsIs)?;
        let next = extents.last().filter(|last| !last.flags.is_last);
        Ok(Told {
            starts: extents.iter().map(|extent| extent.range.start.bytes()).collect(),
            delalloc: extents.iter().filter(|extent| extent.flags.is_delalloc).count() as u64,
            next: next.map(|last| last.range.end.bytes()),
        })
    }

    fn truncate(&self, size: u64) -> Result<()> {
        Ok(self.file.truncate(FileOffset::new(size))?)
    }

    fn allocate(&self, len_bytes: u64) -> Result<()> {
        Ok(self.file.allocate(FileOffset::ZERO, len_bytes, Reach::Extends)?)
    }

    fn zero(&self, len_bytes: u64) -> Result<()> {
        Ok(self.file.zero_range(FileOffset::ZERO, len_bytes)?)
    }

    fn zero_range(&self, len_bytes: u64) -> Result<()> {
        Ok(self.file.allocate_zeroed(FileOffset::ZERO, len_bytes, Reach::Extends)?)
    }

    fn store_mapped(&self, map_bytes: usize, at: usize, bytes: &[u8]) -> Result<()> {
        let map = self.file.map(FileOffset::ZERO, map_bytes as u64)?;
        Ok(map.store(FileOffset::new(at as u64), bytes)?)
    }

    fn fsync(&self) -> Result<()> {
        Ok(self.file.fsync()?)
    }

    fn counts(&mut self) -> Vec<Count> {
        let (now, last) = (Seen::of(&self.fs, &self.file, &self.device), self.last);
        self.last = now;
        [
            ("state searches", now.state_searches - last.state_searches),
            ("mappings", now.mappings - last.mappings),
            ("tree searches", now.tree_searches - last.tree_searches),
            ("tree blocks read", now.blocks_read - last.blocks_read),
            ("tree blocks written", now.blocks_written - last.blocks_written),
            ("runs flushed", now.runs_written - last.runs_written),
            ("pages flushed", (now.bytes_written - last.bytes_written) / 4096),
            ("device reads", now.requests.reads - last.requests.reads),
            ("device writes", now.requests.writes - last.requests.writes),
            ("device flushes", now.requests.flushes - last.requests.flushes),
            ("commits", now.commits - last.commits),
        ]
        .into_iter()
        .map(|(what, count)| Count { what: what.to_owned(), count })
        .collect()
    }
}

/// What the kernel has mounted.
struct System {
    file: OwnedFd,
}

fn failed(what: &'static str) -> impl FnOnce(Errno) -> Error {
    move |errno| Error::io(what)(errno.into())
}

/// `struct fiemap` with room for extents.
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; FIEMAP_EXTENTS],
}

/// `struct fiemap_extent`.
#[derive(Clone, Copy)]
#[repr(C)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

const FS_IOC_FIEMAP: libc::Ioctl = 0xC020_660B_u32 as libc::Ioctl;
const FIEMAP_EXTENT_LAST: u32 = 1;
const FIEMAP_EXTENT_DELALLOC: u32 = 4;
/// As `linux/magic.h` names it.
const FUSE_SUPER_MAGIC: rustix::fs::FsWord = 0x6573_5546;

impl System {
    fn open(mount: &Path, is_new: bool) -> Result<Self> {
        let new = OFlags::CREATE | OFlags::EXCL;
        let flags = OFlags::RDWR | OFlags::CLOEXEC | if is_new { new } else { OFlags::empty() };
        let file = rustix::fs::open(mount.join(NAME), flags, Mode::from_raw_mode(0o644));
        Ok(Self { file: file.map_err(failed("open the file"))? })
    }
}

impl Data for System {
    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let written = rustix::io::pwrite(&self.file, bytes, at).map_err(failed("pwrite"))?;
        super::require(written == bytes.len())
    }

    fn read(&self, at: u64, buffer: &mut [u8]) -> Result<usize> {
        rustix::io::pread(&self.file, buffer, at).map_err(failed("pread"))
    }

    fn seek_data(&self, at: u64) -> Result<Option<u64>> {
        match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
            Ok(found) => Ok(Some(found)),
            Err(Errno::NXIO) => Ok(None),
            Err(errno) => Err(failed("SEEK_DATA")(errno)),
        }
    }

    fn seek_hole(&self, at: u64) -> Result<u64> {
        rustix::fs::seek(&self.file, SeekFrom::Hole(at)).map_err(failed("SEEK_HOLE"))
    }

    /// FUSE hands none on.
    fn tells_extents(&self) -> bool {
        let about = rustix::fs::fstatfs(&self.file);
        about.is_ok_and(|about| about.f_type != FUSE_SUPER_MAGIC)
    }

    fn fiemap(&self, at: u64) -> Result<Told> {
        use std::os::fd::AsRawFd;
        let empty = FiemapExtent {
            logical: 0,
            physical: 0,
            length: 0,
            reserved64: [0; 2],
            flags: 0,
            reserved: [0; 3],
        };
        let mut request = Fiemap {
            start: at,
            length: u64::MAX,
            flags: 0,
            mapped_extents: 0,
            extent_count: FIEMAP_EXTENTS as u32,
            reserved: 0,
            extents: [empty; FIEMAP_EXTENTS],
        };
        // SAFETY: the kernel fills a struct fiemap with as many extents as extent_count says there is room
        // for; `Fiemap` is laid out as that and lives until the call returns.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut request) };
        if result != 0 {
            return Err(Error::io("FIEMAP")(std::io::Error::last_os_error()));
        }
        let extents = &request.extents[..request.mapped_extents as usize];
        let with = |flag: u32| extents.iter().filter(move |extent| extent.flags & flag != 0);
        let next = extents.last().filter(|last| last.flags & FIEMAP_EXTENT_LAST == 0);
        Ok(Told {
            starts: extents.iter().map(|extent| extent.logical).collect(),
            delalloc: with(FIEMAP_EXTENT_DELALLOC).count() as u64,
            next: next.map(|last| last.logical + last.length),
        })
    }

    fn truncate(&self, size: u64) -> Result<()> {
        rustix::fs::ftruncate(&self.file, size).map_err(failed("ftruncate"))
    }

    fn allocate(&self, len_bytes: u64) -> Result<()> {
        let result = rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, len_bytes);
        result.map_err(failed("fallocate"))
    }

    fn zero_range(&self, len_bytes: u64) -> Result<()> {
        let flags = FallocateFlags::ZERO_RANGE;
        let result = rustix::fs::fallocate(&self.file, flags, 0, len_bytes);
        result.map_err(failed("fallocate with ZERO_RANGE"))
    }

    /// Of system calls there is no other.
    fn zero(&self, len_bytes: u64) -> Result<()> {
        self.zero_range(len_bytes)
    }

    fn store_mapped(&self, map_bytes: usize, at: usize, bytes: &[u8]) -> Result<()> {
        super::require(at + bytes.len() <= map_bytes)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place that the kernel chooses; nobody else has it.
        let map = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                map_bytes,
                protection,
                MapFlags::SHARED,
                &self.file,
                0,
            )
        };
        let map = map.map_err(failed("mmap"))?;
        // SAFETY: `at + bytes.len()` lies within the mapping, of which the file's only page begins
        // within the file; source and target do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), map.cast::<u8>().add(at), bytes.len())
        };
        // SAFETY: the mapping was made above, with this length, and is not used any more.
        unsafe { rustix::mm::munmap(map, map_bytes) }.map_err(failed("munmap"))
    }

    fn fsync(&self) -> Result<()> {
        rustix::fs::fsync(&self.file).map_err(failed("fsync"))
    }

    fn counts(&mut self) -> Vec<Count> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn options(words: &str) -> OpenOptions {
        let words = ["job", "seek", "image", "1"].into_iter().chain(words.split_whitespace());
        open_options(&Args::try_parse_from(words).unwrap())
    }

    /// It used to be twice as much memory for file data as users have.
    #[test]
    fn cache_that_is_not_asked_for_is_what_users_get() {
        let users = OpenOptions::default();
        for words in ["", "--compress 1"] {
            let options = options(words);
            assert!(options.page_cache.is_none() && users.page_cache.is_none());
            assert_eq!(options.cache_bytes, users.cache_bytes);
        }
        let bytes_max = |words| options(words).page_cache.unwrap().cached_bytes_max;
        assert_eq!(bytes_max("--ablate hint"), users.cache_bytes as u64 / 2);
        assert_eq!(bytes_max("--cache-mib 1024"), 1 << 30);
        assert!(options("--ablate hint").page_cache.unwrap().ablation.states.without_hint);
    }
}
