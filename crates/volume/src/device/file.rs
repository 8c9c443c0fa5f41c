//! An image file or a block device, or a window of one.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use smallvec::SmallVec;
use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_rt::{AtomicU64, Mutex, Ordering};

use super::{Device, check_range};
use crate::error::{Error, Op, Result};
use crate::kernel::{self, Purpose};
use crate::{lock, partition};

/// Buffers in one system call, the kernel's limit.
const IOV_COUNT_MAX: usize = 1024;

/// Bytes that are looked through at a time.
const SCAN_BYTES: usize = 1 << 20;

/// What a file is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenMode {
    /// Reading. Other readers may have it open too.
    ReadOnly,
    /// Reading and writing, alone.
    ReadWrite,
    /// As `ReadWrite`, for an image file that must not exist yet.
    CreateNew {
        /// Its length; it takes no space until it is written.
        len_bytes: u64,
    },
}

/// Which part of the file is the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Window {
    /// All of it.
    #[default]
    Whole,
    /// From an offset on.
    Offset {
        /// First byte.
        start_bytes: u64,
        /// Bytes; `None` for what follows in the partition that holds the offset, or to the end of
        /// the file where no partition does.
        len_bytes: Option<u64>,
    },
    /// A partition, by its number in the GPT or MBR: logical ones count from 5.
    Partition(u32),
}

/// An image file or block device.
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    /// Of a block device: keeps the kernel and other programs from holding it.
    claim: Mutex<Option<File>>,
    path: PathBuf,
    start_bytes: u64,
    len_bytes: AtomicU64,
    /// It is all of a file, or was made in a new one: the file can be longer or shorter.
    resizable: bool,
    is_end_known: bool,
    is_block_device: bool,
    read_only: bool,
}

impl FileDevice {
    /// Opens the file at `path` and keeps others out of it while it is open: everybody when it is
    /// open for writing, writers when it is open for reading.
    ///
    /// What the kernel has mounted is refused, through loop devices too. A filesystem that it has
    /// mounted read-only may be read.
    ///
    /// # Errors
    /// `Busy` and `MountedByKernel`; `Partition` when the window is not inside the file or no such
    /// partition exists; `Io` when the file cannot be opened.
    pub fn open(path: impl AsRef<Path>, mode: OpenMode, window: Window) -> Result<Self> {
        let path = path.as_ref();
        let at_open = |op| move |source| io_error(path, op, source);
        let (mut file, claim) = open_file(path, mode)?;
        let metadata = file.metadata().map_err(at_open(Op::Open))?;
        let is_block_device = metadata.file_type().is_block_device();
        if !is_block_device && !metadata.is_file() {
            let what = "neither a file nor a block device";
            return Err(io_error(
                path,
                Op::Open,
                io::Error::new(io::ErrorKind::InvalidInput, what),
            ));
        }
        let read_only = mode == OpenMode::ReadOnly;
        lock::lock(&file, path, !read_only, is_block_device)?;
        if let OpenMode::CreateNew { len_bytes } = mode {
            file.set_len(len_bytes).map_err(at_open(Op::Resize))?;
        }
        let file_len_bytes = file.seek(SeekFrom::End(0)).map_err(at_open(Op::Open))?;
        let mut device = Self {
            file,
            claim: Mutex::new(claim),
            path: path.to_owned(),
            start_bytes: 0,
            len_bytes: AtomicU64::new(file_len_bytes),
            resizable: !is_block_device,
            is_end_known: true,
            is_block_device,
            read_only,
        };
        device.narrow(window, matches!(mode, OpenMode::CreateNew { .. }))?;
        let purpose = if read_only { Purpose::Read } else { Purpose::Write };
        let end_bytes = device.start_bytes + device.len_bytes();
        kernel::check_unused(&device.file, path, device.start_bytes..end_bytes, purpose)?;
        Ok(device)
    }

    /// Makes the window, from the whole file, the device.
    fn narrow(&mut self, window: Window, is_new: bool) -> Result<()> {
        let file_len_bytes = self.len_bytes();
        let (start_bytes, len_bytes) = match window {
            Window::Whole => return Ok(()),
            Window::Offset { start_bytes, len_bytes: Some(len_bytes) } => (start_bytes, len_bytes),
            Window::Offset { start_bytes, len_bytes: None } => {
                let end = self.end_of_partition(start_bytes)?;
                self.is_end_known = is_new || end.is_some();
                (start_bytes, end.unwrap_or(file_len_bytes).saturating_sub(start_bytes))
            }
            Window::Partition(number) => {
                let found = partition::partition(self, number)?;
                (found.start_bytes, found.len_bytes)
            }
        };
        let end = start_bytes.checked_add(len_bytes).filter(|end| *end <= file_len_bytes);
        let Some(end) = end else {
            return Err(Error::Partition {
                device: self.name(),
                what: format!(
                    "{len_bytes} bytes from offset {start_bytes} on go past its end at \
                     {file_len_bytes}"
                ),
            });
        };
        // Of a file that was there before, what is outside the window is not the filesystem's.
        self.resizable &= is_new && end == file_len_bytes;
        self.start_bytes = start_bytes;
        self.len_bytes.store(len_bytes, Ordering::Release);
        Ok(())
    }

    /// Where the partition ends that holds the byte at `start_bytes`. A table that is damaged says
    /// nothing.
    fn end_of_partition(&self, start_bytes: u64) -> Result<Option<u64>> {
        let partitions = match partition::partitions(self) {
            Err(Error::Partition { .. }) => Vec::new(),
            // One that cannot be read does not say that nothing follows.
            found => found?,
        };
        let ends = partitions.iter().filter_map(|partition| {
            let end = partition.start_bytes.checked_add(partition.len_bytes)?;
            (partition.start_bytes..end).contains(&start_bytes).then_some(end)
        });
        Ok(ends.min())
    }

    /// Whether anything in it is not zero. Holes of a sparse file are not read.
    ///
    /// # Errors
    /// The medium's.
    pub fn holds_data(&self) -> io::Result<bool> {
        let end = self.start_bytes + self.len_bytes();
        let mut at = self.start_bytes;
        let mut piece = vec![0; SCAN_BYTES];
        while at < end {
            let data = match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(at)) {
                Ok(data) if data < end => data,
                // Nothing but a hole up to the end.
                Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(false),
                // A device, or a filesystem that knows no holes.
                Err(rustix::io::Errno::INVAL) => at,
                Err(errno) => return Err(errno.into()),
            };
            let len = usize::try_from(end - data).unwrap_or(SCAN_BYTES).min(SCAN_BYTES);
            self.file.read_exact_at(&mut piece[..len], data)?;
            if piece[..len].iter().any(|byte| *byte != 0) {
                return Ok(true);
            }
            at = data + len as u64;
        }
        Ok(false)
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is a block device and no image file.
    pub fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    /// Where the window begins in the file.
    pub fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// The offset in the file of `len` bytes at `at`.
    fn place(&self, at: PhysicalAddr, len: usize) -> io::Result<u64> {
        check_range(at, len, self.len_bytes())?;
        Ok(self.start_bytes + at.0)
    }
}

/// The file, and what keeps others from holding it.
fn open_file(path: &Path, mode: OpenMode) -> Result<(File, Option<File>)> {
    let mut options = OpenOptions::new();
    options.read(true).write(mode != OpenMode::ReadOnly);
    let mut claim = None;
    if matches!(mode, OpenMode::CreateNew { .. }) {
        options.create_new(true);
    } else if let Ok(metadata) = std::fs::metadata(path) {
        // Before it is opened: opening a FIFO waits for whoever writes to it.
        check_kind(path, &metadata)?;
        if mode == OpenMode::ReadWrite && metadata.file_type().is_block_device() {
            claim = Some(claim_device(path)?);
        }
    }
    let file = options.open(path).map_err(|error| io_error(path, Op::Open, error))?;
    Ok((file, claim))
}

/// Nobody else may hold a block device while the file is open.
fn claim_device(path: &Path) -> Result<File> {
    // Only for block devices is O_EXCL defined without O_CREAT.
    let alone = rustix::fs::OFlags::EXCL.bits().cast_signed();
    let error = match OpenOptions::new().read(true).custom_flags(alone).open(path) {
        Ok(file) => return Ok(file),
        Err(error) => error,
    };
    if error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) {
        kernel::check_device_unused(path)?;
        return Err(Error::Busy {
            device: path.display().to_string(),
            holder: "the kernel or another program holds the device".to_owned(),
        });
    }
    Err(io_error(path, Op::Open, error))
}

fn check_kind(path: &Path, metadata: &std::fs::Metadata) -> Result<()> {
    if metadata.is_file() || metadata.file_type().is_block_device() {
        return Ok(());
    }
    let what = match metadata.is_dir() {
        true => "a directory, neither an image file nor a block device",
        false => "neither an image file nor a block device",
    };
    Err(io_error(path, Op::Open, io::Error::new(io::ErrorKind::InvalidInput, what)))
}

fn io_error(path: &Path, op: Op, source: io::Error) -> Error {
    Error::Io { device: path.display().to_string(), op, offset: PhysicalAddr(0), source }
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        // Closing alone would not do: a child process that is being started holds the file, and
        // with it the lock, until it runs its own program.
        let _ = self.file.unlock();
    }
}

impl Device for FileDevice {
    fn name(&self) -> String {
        match self.start_bytes {
            0 => self.path.display().to_string(),
            start => format!("{} (from {start} on)", self.path.display()),
        }
    }

    fn is_shareable(&self) -> bool {
        !self.read_only
    }

    /// A loop device is kept out by no lock on the file. A block device is claimed, or shown by a mount that keeps others out.
    fn check_unused(&self) -> Result<()> {
        if self.is_block_device || self.read_only {
            return Ok(());
        }
        let range = self.start_bytes..self.start_bytes.saturating_add(self.len_bytes());
        kernel::check_unused(&self.file, &self.path, range, Purpose::Write)
    }

    fn yield_claim(&self) {
        *self.claim.lock() = None;
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Acquire)
    }

    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> io::Result<()> {
        let offset = self.place(at, buf.len())?;
        ubtrfs_cpu::read_aligned(buf, offset, |piece, at| self.file.read_exact_at(piece, at))
    }

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> io::Result<()> {
        self.file.write_all_at(buf, self.place(at, buf.len())?)
    }

    fn write_vectored_at(&self, at: PhysicalAddr, bufs: &[&[u8]]) -> io::Result<()> {
        let total = bufs.iter().map(|buf| buf.len()).sum();
        let mut offset = self.place(at, total)?;
        let mut slices: SmallVec<[IoSlice<'_>; 32]> =
            bufs.iter().map(|buf| IoSlice::new(buf)).collect();
        let mut rest = slices.as_mut_slice();
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            let batch = &rest[..rest.len().min(IOV_COUNT_MAX)];
            match rustix::io::pwritev(&self.file, batch, offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    offset += written as u64;
                    IoSlice::advance_slices(&mut rest, written);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        // Grown images need their length on the medium too, which fdatasync includes.
        self.file.sync_data()
    }

    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> io::Result<()> {
        let len = usize::try_from(len_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let offset = self.place(at, len)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, offset, len_bytes) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn resize(&self, len_bytes: u64) -> io::Result<()> {
        if !self.resizable {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "only an image file that is nothing but the filesystem can change its length",
            ));
        }
        let end = self.start_bytes.checked_add(len_bytes).ok_or(io::ErrorKind::InvalidInput)?;
        self.file.set_len(end)?;
        self.len_bytes.store(len_bytes, Ordering::Release);
        Ok(())
    }

    fn is_end_known(&self) -> bool {
        self.is_end_known
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }
}
