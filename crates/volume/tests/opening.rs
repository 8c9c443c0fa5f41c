//! Opening: devices that do not fit together, superblocks that are damaged, images cut short.

mod common;

use std::path::Path;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use common::{READ_ONLY, judge, mkfs, open_devices};
use proptest::prelude::*;
use ubtrfs_ondisk::csum::CSUM_FIELD_BYTES;
use ubtrfs_ondisk::features::{CompatRo, Incompat};
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::{CsumType, DeviceId, LogicalAddr, PhysicalAddr};
use ubtrfs_volume::{
    Device, Error, FileDevice, MemDevice, OpenMode, Result, Volume, VolumeOptions, Window,
};

const WRITE: VolumeOptions = VolumeOptions { read_only: false, degraded: false, super_copy: None };
const DEGRADED: VolumeOptions = VolumeOptions { degraded: true, ..WRITE };

fn open_one(path: &Path, mode: OpenMode, options: &VolumeOptions) -> Result<Volume> {
    Volume::open(vec![Arc::new(FileDevice::open(path, mode, Window::Whole)?)], options)
}

fn write(path: &Path, at: PhysicalAddr, bytes: &[u8]) {
    let device = FileDevice::open(path, OpenMode::ReadWrite, Window::Whole).unwrap();
    device.write_at(at, bytes).unwrap();
}

/// Changes each copy of the superblock and gives it the right checksum again.
fn edit_superblocks(path: &Path, edit: impl Fn(&mut Superblock)) {
    let device = FileDevice::open(path, OpenMode::ReadWrite, Window::Whole).unwrap();
    for at in SUPERBLOCK_OFFSETS.into_iter().filter(|at| at.0 < device.len_bytes()) {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        device.read_at(at, &mut bytes).unwrap();
        let mut superblock = Superblock::parse(&bytes, at).unwrap();
        edit(&mut superblock);
        superblock.seal(at).unwrap();
        device.write_at(at, zerocopy::IntoBytes::as_bytes(&*superblock)).unwrap();
    }
}

#[test]
fn open_of_no_filesystem_is_not_btrfs() {
    for len_bytes in [0, 1, 65536, 65536 + 4095, 1 << 20, 128 << 20] {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(len_bytes));
        let error = Volume::open(vec![device], &READ_ONLY).unwrap_err();
        assert!(matches!(error, Error::NotBtrfs { .. }), "{error}");
    }
    assert!(Volume::open(Vec::new(), &READ_ONLY).is_err());
}

#[test]
fn open_with_a_damaged_primary_says_which_copy_is_whole_and_opens_from_it() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 1, &[]) else { return };
    for damage in [&[0_u8; 4096][..], &[1; 1]] {
        write(
            &images[0],
            PhysicalAddr(SUPERBLOCK_OFFSETS[0].0 + 4096 - damage.len() as u64),
            damage,
        );
        let error = open_one(&images[0], OpenMode::ReadOnly, &READ_ONLY).unwrap_err();
        assert!(matches!(error, Error::BadSuperblock { copy: 0, .. }), "{error}");
        assert!(error.to_string().contains("--super-copy 1"), "{error}");
        let options = VolumeOptions { super_copy: Some(1), ..WRITE };
        let volume = open_one(&images[0], OpenMode::ReadWrite, &options).unwrap();
        volume.write_superblocks(&volume.superblock()).unwrap();
        drop(volume);
        open_one(&images[0], OpenMode::ReadOnly, &READ_ONLY).unwrap();
    }
    if judge(&["btrfs"]) {
        common::run("btrfs", &["check", "--readonly", images[0].to_str().unwrap()]);
    }
    for copy in [2, 3] {
        let options = VolumeOptions { super_copy: Some(copy), ..READ_ONLY };
        open_one(&images[0], OpenMode::ReadOnly, &options).unwrap_err();
    }
}

#[test]
fn open_of_an_image_cut_short_is_refused_for_writing_and_possible_for_reading() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 1, &[]) else { return };
    std::fs::File::options().write(true).open(&images[0]).unwrap().set_len(256 << 20).unwrap();
    let error = open_one(&images[0], OpenMode::ReadWrite, &WRITE).unwrap_err();
    assert!(matches!(error, Error::TooShort { .. }), "{error}");
    open_one(&images[0], OpenMode::ReadOnly, &READ_ONLY).unwrap();
}

#[test]
fn open_for_writing_of_devices_opened_for_reading_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 1, &[]) else { return };
    let error = open_one(&images[0], OpenMode::ReadOnly, &WRITE).unwrap_err();
    assert!(matches!(error, Error::ReadOnly { .. }), "{error}");
    let volume = open_one(&images[0], OpenMode::ReadWrite, &READ_ONLY).unwrap();
    let error = volume.write_superblocks(&volume.superblock()).unwrap_err();
    assert!(matches!(error, Error::ReadOnly { .. }), "{error}");
}

#[test]
fn open_of_devices_that_do_not_belong_together_is_refused_by_name() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let Some(first) = mkfs(dirs[0].path(), 2, &["-m", "raid1"]) else { return };
    let Some(second) = mkfs(dirs[1].path(), 1, &[]) else { return };
    let devices = open_devices(&[first[0].clone(), second[0].clone()], OpenMode::ReadOnly);
    let error = Volume::open(devices, &READ_ONLY).unwrap_err();
    assert!(matches!(error, Error::OtherFilesystem { .. }), "{error}");
    assert!(error.to_string().contains(second[0].to_str().unwrap()), "{error}");

    let devices = open_devices(&[first[0].clone(), first[0].clone()], OpenMode::ReadOnly);
    let error = Volume::open(devices, &READ_ONLY).unwrap_err();
    assert!(matches!(error, Error::DuplicateDevice { devid: DeviceId(1), .. }), "{error}");
}

#[test]
fn open_names_a_missing_device_that_holds_no_system_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 2, &["-m", "single", "-d", "single"]) else { return };
    let error = open_one(&images[0], OpenMode::ReadOnly, &READ_ONLY).unwrap_err();
    let Error::MissingDevice { devid, device_uuid, .. } = error else { panic!("{error}") };
    assert_eq!(devid, Some(DeviceId(2)));
    let volume = Volume::open(open_devices(&images, OpenMode::ReadOnly), &READ_ONLY).unwrap();
    let item = volume.device_items()[1];
    assert_eq!(device_uuid.map(|uuid| uuid.0), Some(item.uuid));
}

/// A device that missed a single commit was taken for one that a power cut had kept from its last
/// superblock: data without checksums was then read from it as it had been before that commit.
#[test]
fn degraded_writes_go_on_and_the_device_that_missed_them_is_stale() {
    for commits in [1, 2] {
        let dir = tempfile::tempdir().unwrap();
        let Some(images) = mkfs(dir.path(), 2, &["-m", "raid1", "-d", "raid1"]) else { return };
        let volume = open_one(&images[0], OpenMode::ReadWrite, &DEGRADED).unwrap();
        assert_eq!(volume.missing_devices(), [DeviceId(2)]);
        let mut superblock = volume.superblock();
        for _ in 0..commits {
            superblock.generation += 1;
            let chunk = volume.chunks()[0].clone();
            volume.write(ubtrfs_ondisk::LogicalAddr(chunk.end().0 - 4096), &[1; 4096]).unwrap();
            volume.write_superblocks(&superblock).unwrap();
        }
        drop(volume);
        let devices = open_devices(&images, OpenMode::ReadWrite);
        for options in [WRITE, READ_ONLY] {
            let error = Volume::open(devices.clone(), &options).unwrap_err();
            assert!(matches!(error, Error::StaleDevice { .. }), "{error}");
            assert!(error.to_string().contains(images[1].to_str().unwrap()), "{error}");
        }
        let volume = Volume::open(devices, &DEGRADED).unwrap();
        assert_eq!(volume.missing_devices(), [DeviceId(2)]);
        assert_eq!(volume.superblock().generation, superblock.generation);
        let [left_out] = volume.left_out() else { panic!("{:?}", volume.left_out()) };
        assert_eq!(left_out.device, images[1].to_str().unwrap());
        assert_eq!(left_out.newest.0, superblock.generation.get());
    }
}

/// A power cut between the superblocks of two devices must leave a filesystem that opens.
#[test]
fn open_with_one_device_a_primary_behind_takes_the_newer_superblock() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 2, &["-m", "raid0", "-d", "raid0"]) else { return };
    let mut old = [0; SUPERBLOCK_BYTES];
    let device = FileDevice::open(&images[0], OpenMode::ReadOnly, Window::Whole).unwrap();
    device.read_at(SUPERBLOCK_OFFSETS[0], &mut old).unwrap();
    drop(device);
    for image in &images {
        edit_superblocks(image, |superblock| superblock.generation += 1);
    }
    write(&images[0], SUPERBLOCK_OFFSETS[0], &old);
    let volume = Volume::open(open_devices(&images, OpenMode::ReadWrite), &WRITE).unwrap();
    let superblock = volume.superblock();
    assert_eq!(superblock.dev_item.devid.get(), 2);
    volume.write_superblocks(&superblock).unwrap();
    drop(volume);
    let volume = Volume::open(open_devices(&images, OpenMode::ReadOnly), &READ_ONLY).unwrap();
    assert_eq!(volume.superblock().generation, superblock.generation);
}

/// A write: to which device, where, what.
type Write = (usize, PhysicalAddr, Vec<u8>);

/// What becomes of the devices as one of them is flushed: told which, and what was written.
type Flushed = dyn Fn(usize, &MemDevice) -> std::io::Result<()> + Send + Sync;

/// A device that records its writes, so that a cut after any of them can be replayed.
struct Recorder {
    inner: MemDevice,
    index: usize,
    writes: Arc<Mutex<Vec<Write>>>,
    flushed: Option<Arc<Flushed>>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("index", &self.index).finish_non_exhaustive()
    }
}

fn recorders(
    devices: Vec<MemDevice>,
    writes: &Arc<Mutex<Vec<Write>>>,
    flushed: Option<&Arc<Flushed>>,
) -> Vec<Arc<dyn Device>> {
    let recorder = |(index, inner)| {
        let (writes, flushed) = (Arc::clone(writes), flushed.cloned());
        Arc::new(Recorder { inner, index, writes, flushed }) as Arc<dyn Device>
    };
    devices.into_iter().enumerate().map(recorder).collect()
}

impl Device for Recorder {
    fn name(&self) -> String {
        self.inner.name()
    }
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }
    fn read_at(&self, at: PhysicalAddr, buf: &mut [u8]) -> std::io::Result<()> {
        self.inner.read_at(at, buf)
    }
    fn write_at(&self, at: PhysicalAddr, buf: &[u8]) -> std::io::Result<()> {
        self.writes.lock().unwrap().push((self.index, at, buf.to_vec()));
        self.inner.write_at(at, buf)
    }
    fn flush(&self) -> std::io::Result<()> {
        self.flushed.as_ref().map_or(Ok(()), |flushed| flushed(self.index, &self.inner))
    }
    fn discard(&self, at: PhysicalAddr, len_bytes: u64) -> std::io::Result<()> {
        self.inner.discard(at, len_bytes)
    }
    fn resize(&self, len_bytes: u64) -> std::io::Result<()> {
        self.inner.resize(len_bytes)
    }
    fn is_read_only(&self) -> bool {
        false
    }
}

/// The places of three images that opening reads, in memory.
fn heads(images: &[PathBuf]) -> Vec<MemDevice> {
    let content = images.iter().map(|image| {
        let device = FileDevice::open(image, OpenMode::ReadOnly, Window::Whole).unwrap();
        let copy = MemDevice::new(device.len_bytes());
        let mut buf = vec![0; 1 << 20];
        // The superblocks, in the first MiB and the 65th.
        for at in [PhysicalAddr(0), PhysicalAddr(64 << 20)] {
            device.read_at(at, &mut buf).unwrap();
            copy.write_at(at, &buf).unwrap();
        }
        copy
    });
    content.collect()
}

/// What the next superblock writes, after the writes that are there.
fn next_superblock_after(images: &[PathBuf], before: &[Write]) -> (u64, Vec<Write>) {
    let writes = Arc::new(Mutex::new(Vec::new()));
    let devices = heads(images);
    for (index, at, bytes) in before {
        devices[*index].write_at(*at, bytes).unwrap();
    }
    let volume = Volume::open(recorders(devices, &writes, None), &WRITE).unwrap();
    let mut superblock = volume.superblock();
    superblock.generation += 1;
    volume.write_superblocks(&superblock).unwrap();
    let writes = writes.lock().unwrap().clone();
    (superblock.generation.get(), writes)
}

fn generation_after(images: &[PathBuf], writes: &[Write]) -> u64 {
    let devices = heads(images);
    for (index, at, bytes) in writes {
        devices[*index].write_at(*at, bytes).unwrap();
    }
    let devices = devices.into_iter().map(|device| Arc::new(device) as Arc<dyn Device>);
    let volume = Volume::open(devices.collect(), &WRITE).unwrap();
    volume.superblock().generation.get()
}

/// After two cuts, each between the superblocks of the devices, one was two behind, or its copy was of
/// the commit that was cut off: it was refused as stale.
#[test]
fn open_after_two_cuts_at_any_write_of_the_superblocks_finds_the_old_or_the_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 3, &["-m", "raid0", "-d", "raid0"]) else { return };
    let (new, writes) = next_superblock_after(&images, &[]);
    // That of before, on each, and two copies of the new one.
    assert_eq!(writes.len(), 3 + 6);
    let mut newest = new - 1;
    for cut in 0..=writes.len() {
        let found = generation_after(&images, &writes[..cut]);
        assert!(found == newest || found == new, "cut {cut}: {found}");
        newest = found;
        let (next, again) = next_superblock_after(&images, &writes[..cut]);
        assert_eq!(next, found + 1);
        for second in 0..=again.len() {
            let both = [&writes[..cut], &again[..second]].concat();
            let last = generation_after(&images, &both);
            assert!(last == found || last == next, "cuts {cut} and {second}: {last}");
        }
    }
    assert_eq!(newest, new);
}

/// After a cut between the superblocks of the devices the one before the last refers to blocks that the last
/// freed. They were written over while a device had it still.
#[test]
fn first_write_after_a_cut_comes_behind_the_last_superblock_on_all_devices() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 3, &["-m", "raid0", "-d", "raid0"]) else { return };
    let (new, writes) = next_superblock_after(&images, &[]);
    let writes_behind_cut = |cut: usize| {
        let log = Arc::new(Mutex::new(Vec::new()));
        let devices = heads(&images);
        for (index, at, bytes) in &writes[..cut] {
            devices[*index].write_at(*at, bytes).unwrap();
        }
        let volume = Volume::open(recorders(devices, &log, None), &WRITE).unwrap();
        let start = volume.chunks().first().unwrap().start;
        for block in 0..2 {
            volume.write(LogicalAddr(start.0 + block * 4096), &[1; 4096]).unwrap();
        }
        let log = log.lock().unwrap().clone();
        (volume.superblock().generation.get(), log)
    };
    let primary = SUPERBLOCK_OFFSETS[0];
    for cut in 0..=writes.len() {
        let is_new = |(_, at, bytes): &Write| {
            let generation = Superblock::parse(bytes, *at).unwrap().generation.get();
            *at == primary && generation == new
        };
        let expect = if writes[..cut].iter().any(is_new) { new } else { new - 1 };
        let (generation, log) = writes_behind_cut(cut);
        let (first, blocks) = log.split_at(3);
        for (index, (device, at, bytes)) in first.iter().enumerate() {
            assert_eq!((*device, *at), (index, primary), "cut {cut}");
            let superblock = Superblock::parse(bytes, primary).unwrap();
            assert_eq!((superblock.generation.get(), generation), (expect, expect));
            assert_eq!(superblock.dev_item.devid.get(), index as u64 + 1);
        }
        assert_eq!(blocks.len(), 2, "cut {cut}");
        assert!(blocks.iter().all(|(_, _, bytes)| bytes[..] == [1; 4096]));
    }
}

/// A flush that failed on that way was forgotten: the system may have dropped what it was to make durable, and takes the next flush, of which
/// nothing is left, for done.
#[test]
fn last_superblock_is_written_again_where_it_could_not_be_made_durable() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 2, &["-m", "raid0", "-d", "raid0"]) else { return };
    let primary = SUPERBLOCK_OFFSETS[0];
    let (new, writes) = next_superblock_after(&images, &[]);
    let of_new = |(_, at, bytes): &Write| {
        *at == primary && Superblock::parse(bytes, primary).unwrap().generation.get() == new
    };
    let first = writes.iter().position(of_new).unwrap();
    let devices = heads(&images);
    for (index, at, bytes) in &writes[..=first] {
        devices[*index].write_at(*at, bytes).unwrap();
    }
    let behind = 1 - writes[first].0;
    let mut old = [0; SUPERBLOCK_BYTES];
    devices[behind].read_at(primary, &mut old).unwrap();
    let (log, failures) = (Arc::new(Mutex::new(Vec::new())), Mutex::new(1));
    let flushed: Arc<Flushed> = Arc::new(move |index, device: &MemDevice| {
        let mut failures = failures.lock().unwrap();
        if index == behind && *failures > 0 {
            *failures -= 1;
            // Dropped: what is read is the old one, which nobody else has written.
            device.write_at(primary, &old)?;
            return Err(std::io::Error::other("made to fail"));
        }
        Ok(())
    });
    let volume = Volume::open(recorders(devices, &log, Some(&flushed)), &WRITE).unwrap();
    let start = volume.chunks().first().unwrap().start;
    assert!(volume.write(start, &[1; 4096]).is_err());
    volume.write(start, &[1; 4096]).unwrap();
    let log = log.lock().unwrap();
    let places: Vec<_> = log.iter().map(|(device, at, _)| (*device, *at == primary)).collect();
    // Each time all devices are given it. The block is of raid0's first device, or of the other.
    assert_eq!(places[..4], [(0, true), (1, true), (0, true), (1, true)]);
    assert!(log[..4].iter().all(of_new));
    assert_eq!(log.len(), 5);
    assert_eq!(log[4].2, [1; 4096]);
}

/// Whoever wrote the last superblock may have been killed before it was flushed, or its flush may have failed: what is read is what a cache
/// has. Blocks that only the one before it refers to were written over, and one device was never given it again.
#[test]
fn superblock_found_is_durable_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 1, &[]) else { return };
    let primary = SUPERBLOCK_OFFSETS[0];
    for is_asked_for in [false, true] {
        let (log, flushes) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
        let flushed: Arc<Flushed> = Arc::new({
            let (log, flushes) = (Arc::clone(&log), Arc::clone(&flushes));
            move |_, _: &MemDevice| {
                let written: &Mutex<Vec<Write>> = &log;
                flushes.lock().unwrap().push(written.lock().unwrap().len());
                Ok(())
            }
        });
        let volume = Volume::open(recorders(heads(&images), &log, Some(&flushed)), &WRITE).unwrap();
        assert!(log.lock().unwrap().is_empty());
        if is_asked_for {
            volume.make_opened_durable().unwrap();
            volume.make_opened_durable().unwrap();
        } else {
            let start = volume.chunks().first().unwrap().start;
            volume.write(start, &[1; 4096]).unwrap();
        }
        let log = log.lock().unwrap();
        let superblock = Superblock::parse(&log[0].2, primary).unwrap();
        assert_eq!(
            (log[0].1, superblock.generation.get()),
            (primary, volume.superblock().generation.get())
        );
        assert_eq!(*flushes.lock().unwrap(), [1]);
        assert!(log[1..].iter().all(|(_, at, _)| *at != primary));
        assert_eq!(log.len() == 1, is_asked_for);
    }
    // The primary that another copy was opened in place of may be the newer one, or have a log: it stays until something is written.
    for options in [READ_ONLY, VolumeOptions { super_copy: Some(1), ..WRITE }] {
        let log = Arc::new(Mutex::new(Vec::new()));
        let volume = Volume::open(recorders(heads(&images), &log, None), &options).unwrap();
        volume.make_opened_durable().unwrap();
        assert!(log.lock().unwrap().is_empty());
    }
}

/// Linux takes an fsync for done that one of two devices has. The log was found or not by the order in which the devices were given, and without it
/// the superblock went to both.
#[test]
fn log_that_one_device_has_is_found_in_any_order() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 2, &["-m", "raid1", "-d", "raid1"]) else { return };
    edit_superblocks(&images[1], |superblock| {
        superblock.log_root = 30_408_704.into();
    });
    let reversed = [images[1].clone(), images[0].clone()];
    for images in [&images[..], &reversed] {
        let volume = Volume::open(open_devices(images, OpenMode::ReadOnly), &READ_ONLY).unwrap();
        assert_eq!(volume.superblock().log_root.get(), 30_408_704);
    }
}

/// The first commit without a device goes up by two generations, and a device that a cut keeps from it is behind by as many. It was taken for
/// one that had been missing.
#[test]
fn device_that_a_cut_kept_from_a_commit_without_another_is_not_stale() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 3, &["-m", "raid1", "-d", "raid1"]) else { return };
    let primary = SUPERBLOCK_OFFSETS[0];
    let (log, two) =
        (Arc::new(Mutex::new(Vec::new())), || heads(&images).into_iter().take(2).collect());
    let volume = Volume::open(recorders(two(), &log, None), &DEGRADED).unwrap();
    let mut superblock = volume.superblock();
    superblock.generation += 2;
    volume.write_superblocks(&superblock).unwrap();
    let log = log.lock().unwrap();
    let cut_after = |cut: usize| {
        let devices = two();
        for (index, at, bytes) in &log[..cut] {
            devices[*index].write_at(*at, bytes).unwrap();
        }
        let devices = devices.into_iter().map(|device| Arc::new(device) as Arc<dyn Device>);
        Volume::open(devices.collect(), &DEGRADED).unwrap()
    };
    let mut found = Vec::new();
    for cut in 0..=log.len() {
        let volume = cut_after(cut);
        assert_eq!(volume.missing_devices(), [DeviceId(3)], "cut {cut}");
        found.push(volume.superblock().generation.get() == superblock.generation.get());
    }
    let last = log.iter().rposition(|(_, at, _)| *at == primary).unwrap();
    // So there is a cut between the primaries.
    assert!(found[last] && found[last + 1] && !found[last - 1]);
}

/// Two devices each written to without the other came to the same generation, and were taken for one filesystem: what was read was of the one or
/// of the other. So was a device whose copy is of a commit that was cut off, and then made again, otherwise, without it.
#[test]
fn devices_of_two_histories_are_refused_whatever_their_generations() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 2, &["-m", "raid1", "-d", "raid1"]) else { return };
    let device = |index: usize| Arc::new(heads(&images).swap_remove(index));
    let write_alone = |device: &Arc<MemDevice>, root: u64| {
        let alone = vec![Arc::clone(device) as Arc<dyn Device>];
        let volume = Volume::open(alone, &DEGRADED).unwrap();
        let mut superblock = volume.superblock();
        superblock.generation += 2;
        superblock.root += root;
        volume.write_superblocks(&superblock).unwrap();
    };
    let both = || [device(0), device(1)];
    let open = |devices: &[Arc<MemDevice>; 2], options: &VolumeOptions| {
        let devices = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>);
        Volume::open(devices.collect(), options)
    };
    let devices = both();
    write_alone(&devices[0], 0);
    write_alone(&devices[1], 16384);
    for options in [WRITE, READ_ONLY, DEGRADED] {
        let error = open(&devices, &options).unwrap_err();
        assert!(matches!(error, Error::OtherHistory { .. }), "{error}");
    }
    let devices = both();
    let copy = SUPERBLOCK_OFFSETS[1];
    write_alone(&devices[0], 0);
    let mut bytes = [0; SUPERBLOCK_BYTES];
    devices[1].read_at(copy, &mut bytes).unwrap();
    let mut attempt = Superblock::parse(&bytes, copy).unwrap();
    attempt.generation += 2;
    attempt.root += 16384;
    attempt.seal(copy).unwrap();
    devices[1].write_at(copy, zerocopy::IntoBytes::as_bytes(&*attempt)).unwrap();
    let error = open(&devices, &WRITE).unwrap_err();
    assert!(matches!(error, Error::StaleDevice { .. }), "{error}");
}

/// Between the copies and the primaries of several devices all of them are flushed, which may take seconds: what another wrote meanwhile was
/// written over.
#[test]
fn primaries_that_changed_while_the_copies_were_flushed_stay() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 2, &["-m", "raid0", "-d", "raid0"]) else { return };
    let log = Arc::new(Mutex::new(Vec::new()));
    let primary = SUPERBLOCK_OFFSETS[0];
    // Not while the one of before is made durable, which is a change of its own.
    let is_armed = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let armed = Arc::clone(&is_armed);
    let flushed: Arc<Flushed> = Arc::new(move |index, device: &MemDevice| {
        if index == 1 && armed.load(std::sync::atomic::Ordering::SeqCst) {
            let mut bytes = [0; SUPERBLOCK_BYTES];
            device.read_at(primary, &mut bytes)?;
            let mut other = Superblock::parse(&bytes, primary).unwrap();
            other.generation += 7;
            other.seal(primary).unwrap();
            device.write_at(primary, zerocopy::IntoBytes::as_bytes(&*other))?;
        }
        Ok(())
    });
    let volume = Volume::open(recorders(heads(&images), &log, Some(&flushed)), &WRITE).unwrap();
    volume.make_opened_durable().unwrap();
    log.lock().unwrap().clear();
    is_armed.store(true, std::sync::atomic::Ordering::SeqCst);
    let mut superblock = volume.superblock();
    superblock.generation += 1;
    let error = volume.write_superblocks(&superblock).unwrap_err();
    assert!(matches!(error, Error::SuperblockChanged { has_written: true, .. }), "{error:?}");
    assert!(log.lock().unwrap().iter().all(|(_, at, _)| *at != primary));
}

#[test]
fn open_with_features_that_are_not_built_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 1, &[]) else { return };
    let original = std::cell::Cell::new((0, 0));
    edit_superblocks(&images[0], |sb| {
        original.set((sb.incompat_flags.get(), sb.compat_ro_flags.get()));
    });
    let with = |incompat: u64, compat_ro: u64| {
        edit_superblocks(&images[0], |sb| {
            sb.incompat_flags = (original.get().0 | incompat).into();
            sb.compat_ro_flags = (original.get().1 | compat_ro).into();
        });
        let message = |result: Result<Volume>| result.err().map(|error| error.to_string());
        let read = message(open_one(&images[0], OpenMode::ReadOnly, &READ_ONLY));
        let write = message(open_one(&images[0], OpenMode::ReadWrite, &WRITE));
        [read, write]
    };
    for (bit, name) in [
        (Incompat::ZONED, "ZONED"),
        (Incompat::EXTENT_TREE_V2, "EXTENT_TREE_V2"),
        (Incompat::RAID_STRIPE_TREE, "RAID_STRIPE_TREE"),
        (Incompat(1 << 40), "0x10000000000"),
    ] {
        for error in with(bit.0, 0) {
            assert!(error.as_ref().is_some_and(|error| error.contains(name)), "{error:?}");
        }
    }
    let [read, write] = with(0, 1 << 40);
    assert!(read.is_none(), "{read:?}");
    assert!(write.is_some_and(|error| error.contains("0x10000000000")));
    let [read, write] = with(0, CompatRo::FREE_SPACE_TREE.0);
    assert!(read.is_none() && write.is_none());
    edit_superblocks(&images[0], |sb| sb.flags |= ubtrfs_ondisk::superblock::flags::SEEDING);
    let [read, write] = with(0, 0);
    assert!(read.is_none(), "{read:?}");
    assert!(write.is_some_and(|error| error.contains("seed")));
}

/// The first megabytes of a filesystem, as mkfs.btrfs made it.
fn image_head() -> Option<&'static [u8]> {
    static HEAD: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let make = || {
        let dir = tempfile::tempdir().unwrap();
        let images = mkfs(dir.path(), 1, &[])?;
        let file = std::fs::File::open(&images[0]).unwrap();
        let mut head = vec![0; 1 << 20];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut head, 0).unwrap();
        Some(head)
    };
    HEAD.get_or_init(make).as_deref()
}

proptest! {
    #[test]
    fn open_of_a_hostile_superblock_never_panics(
        damage in proptest::collection::vec((CSUM_FIELD_BYTES..SUPERBLOCK_BYTES, any::<u8>()), 1..12),
        chunk_damage in proptest::collection::vec((0x32b..0x32b + 160_usize, any::<u8>()), 0..4),
        degraded in any::<bool>(), read_only in any::<bool>(),
    ) {
        let Some(head) = image_head() else { return Ok(()) };
        let device = MemDevice::new(512 << 20);
        device.write_at(PhysicalAddr(0), head).unwrap();
        let at = SUPERBLOCK_OFFSETS[0];
        let mut bytes = [0; SUPERBLOCK_BYTES];
        device.read_at(at, &mut bytes).unwrap();
        for (offset, byte) in damage.into_iter().chain(chunk_damage) {
            bytes[offset] = byte;
        }
        let csum = CsumType::Crc32c.compute(&bytes[CSUM_FIELD_BYTES..]);
        bytes[..CSUM_FIELD_BYTES].copy_from_slice(&csum);
        device.write_at(at, &bytes).unwrap();
        let options = VolumeOptions { read_only, degraded, super_copy: None };
        if let Ok(volume) = Volume::open(vec![Arc::new(device)], &options) {
            let mut buf = vec![0; 4096];
            for chunk in volume.chunks() {
                let _ = volume.read_mirror(chunk.start, 0, &mut buf);
                let _ = volume.superblock_ranges(chunk.start);
            }
        }
    }
}
