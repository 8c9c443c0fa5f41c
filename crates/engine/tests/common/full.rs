//! Filesystems that are full, or whose device fails writes of data.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ubtrfs_engine::{
    DataFile, Error, Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, Reservation,
    SetAttributes, mkfs,
};
use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{MkfsBtrfs, Prng};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// What a device does to writes of data.
#[derive(Debug, Default)]
pub struct Faults {
    pub fails: AtomicBool,
    /// So many pass before they do.
    pub passes: AtomicUsize,
    /// They wait as long as it is set.
    pub stalls: AtomicBool,
    /// Whatever the thread writes that writes back in the background waits as long as it is set.
    pub stalls_writeback: AtomicBool,
    /// One does.
    pub is_stalled: AtomicBool,
    /// Where data is.
    data: Mutex<Vec<std::ops::Range<u64>>>,
}

impl Faults {
    /// From now on they are for all groups of data that there are.
    pub fn reach_all(&self, fs: &Filesystem) {
        *self.data.lock().unwrap() = data_groups(fs).collect();
    }

    fn wait_while(&self, stalls: &AtomicBool) {
        while stalls.load(Ordering::Relaxed) {
            self.is_stalled.store(true, Ordering::Relaxed);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

fn data_groups(fs: &Filesystem) -> impl Iterator<Item = std::ops::Range<u64>> {
    let chunks = fs.volume().chunks().to_vec();
    let is_data = |flags: BlockGroupFlags| flags.contains(BlockGroupFlags::DATA);
    chunks.into_iter().filter(move |chunk| is_data(chunk.flags)).map(|chunk| {
        let start = chunk.stripes[0].offset.0;
        start..start + chunk.len_bytes
    })
}

/// A device that fails writes to data, or has them wait, while it is told to.
#[derive(Debug)]
struct Failing {
    inner: FileDevice,
    faults: Arc<Faults>,
}

impl Device for Failing {
    ubtrfs_testkit::device_passes_on!(inner: name, len_bytes, read_at, flush, discard, resize, is_read_only);

    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> std::io::Result<()> {
        if std::thread::current().name() == Some("ubtrfs-writeback") {
            self.faults.wait_while(&self.faults.stalls_writeback);
        }
        if self.faults.data.lock().unwrap().iter().any(|group| group.contains(&at.0)) {
            self.faults.wait_while(&self.faults.stalls);
            let pass = |left: usize| left.checked_sub(1);
            if self.faults.fails.load(Ordering::Relaxed)
                && self
                    .faults
                    .passes
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, pass)
                    .is_err()
            {
                return Err(std::io::Error::other("made to fail"));
            }
        }
        self.inner.write_at(at, buf)
    }
}

pub fn make(image: &Path, len_bytes: u64) {
    std::fs::File::create(image).unwrap().set_len(len_bytes).unwrap();
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let device: Arc<dyn Device> = Arc::new(device);
    mkfs(vec![device], &MkfsOptions::default(), &Arc::new(Runtime::system())).unwrap();
}

pub fn make_mixed(image: &Path, len_bytes: u64) {
    MkfsBtrfs::new().options("--mixed").size_bytes(len_bytes).make(image);
}

pub fn open(image: &Path) -> Filesystem {
    open_with(image, OpenOptions::default())
}

pub fn open_with(image: &Path, options: OpenOptions) -> Filesystem {
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, options).unwrap()
}

/// The filesystem on a device whose writes to its first group of data fail while that is set.
pub fn open_failing(image: &Path) -> (Filesystem, Arc<Faults>) {
    open_failing_with(image, OpenOptions::default())
}

pub fn open_failing_with(image: &Path, options: OpenOptions) -> (Filesystem, Arc<Faults>) {
    let faults = Arc::<Faults>::default();
    *faults.data.lock().unwrap() = data_groups(&open(image)).take(1).collect();
    let inner = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let device = Failing { inner, faults: Arc::clone(&faults) };
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    let fs = Filesystem::open(volume, options).unwrap();
    (fs, faults)
}

pub fn create(fs: &Filesystem, name: &str, bits: u64) -> Result<DataFile, Error> {
    let mut handle = fs.begin(Reservation::create(0))?;
    let new = NewInode::new(0o100_644, Time::default());
    let id = handle.create(fs.top_level(), name.as_bytes(), &new)?;
    let flags = Some(bits);
    handle.set_attributes(id, &SetAttributes { flags, ..SetAttributes::default() })?;
    drop(handle);
    fs.open_data(id)
}

pub fn read(fs: &Filesystem, id: InodeId) -> Vec<u8> {
    let len = usize::try_from(fs.inode(id).unwrap().size_bytes).unwrap();
    let mut bytes = vec![0; len];
    assert_eq!(fs.read(id, ubtrfs_ondisk::FileOffset(0), &mut bytes).unwrap(), len);
    bytes
}

/// Bytes that do not compress.
pub fn noise(random: &mut Prng, len: u64) -> Vec<u8> {
    (0..len.div_ceil(8)).flat_map(|_| random.next_u64().to_le_bytes()).collect()
}

/// Appends to a new file until nothing is free.
pub fn fill(fs: &Filesystem, random: &mut Prng) -> DataFile {
    fill_by(fs, "filler", random)
}

pub fn fill_by(fs: &Filesystem, name: &str, random: &mut Prng) -> DataFile {
    let filler = create(fs, name, 0).unwrap();
    let mut piece_bytes = 4 << 20;
    while piece_bytes >= 4096 {
        match filler.append(&noise(random, piece_bytes)) {
            Ok((_, count)) if count as u64 == piece_bytes => {}
            Ok(_) | Err(Error::NoSpace { .. }) => piece_bytes /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    filler.fsync().unwrap();
    filler
}
