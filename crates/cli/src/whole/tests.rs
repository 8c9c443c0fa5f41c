//! A file with two names gets other contents, while reads and writes fail, and with a power cut at any write.

use std::path::Path;

use ubtrfs_check::CheckOptions;
use ubtrfs_engine::{Filesystem, MappingKind, MkfsOptions, NewInode, OpenOptions, mkfs};
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_rt::{Arc, Runtime, Time};
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::{
    CrashPlan, Effect, Fault, Image as Medium, Request, SimArray, SimDevice,
};
use ubtrfs_volume::{Device, Volume, VolumeOptions};

use ubtrfs_ondisk::FileOffset;

use super::*;
use crate::edit::OnFailure;
use crate::image::{Image, StartArgs};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 2000;

/// Every `step`th block is data, so that each is an extent; `tail` are the bytes behind them.
fn bytes_of(step: usize, tail: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; (BLOCKS * BLOCK) as usize];
    for (number, block) in bytes.chunks_mut(BLOCK as usize).enumerate().step_by(step) {
        block.fill(u8::try_from(number % 251).unwrap() | 1);
    }
    bytes.extend_from_slice(tail);
    bytes
}

/// It ends with a hole, inside of a sector.
fn sparse() -> Vec<u8> {
    bytes_of(2, &[0; 50_123])
}

/// It ends with data, inside of a sector.
fn source() -> Vec<u8> {
    bytes_of(3, &[9; 700])
}

fn open(array: &SimArray, cache_bytes: usize) -> Filesystem {
    let volume = Volume::open(array.devices(), &VolumeOptions::default()).unwrap();
    let runtime = Arc::new(Runtime::simulated(1));
    let options = OpenOptions { runtime, cache_bytes, ..OpenOptions::default() };
    Filesystem::open(volume, options).unwrap()
}

/// A source, and files of two names each: one of many extents, one whose data is inline; and files
/// that share all that those have. Leaves are small, so that there are many of them.
fn made() -> Medium {
    let device = Arc::new(SimDevice::new(128 << 20));
    let options = MkfsOptions {
        nodesize_bytes: 4096,
        metadata_profile: Some(BlockGroupFlags::default()),
        ..MkfsOptions::default()
    };
    let runtime = Arc::new(Runtime::simulated(1));
    let volume = mkfs(vec![Arc::clone(&device) as Arc<dyn Device>], &options, &runtime).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    let files = [("source", source()), ("sparse", sparse()), ("inline", b"inline".to_vec())];
    let new = NewInode::new(0o100_644, Time { sec: 1_700_000_000, nsec: 0 });
    let ids = files.each_ref().map(|(name, _)| {
        let mut handle = fs.begin(Reservation::create(1)).unwrap();
        let id = handle.create(fs.top_level(), name.as_bytes(), &new).unwrap();
        handle.link(fs.top_level(), format!("{name} 2").as_bytes(), id).unwrap();
        id
    });
    // In turns, so that no read brings many leaves of a file.
    for number in 0..=BLOCKS {
        for ((_, bytes), id) in files.iter().zip(ids) {
            let block = bytes.chunks(BLOCK as usize).nth(number as usize).unwrap_or_default();
            if block.iter().any(|byte| *byte != 0) {
                fs.write(id, FileOffset(number * BLOCK), block).unwrap();
            }
        }
        if number % 30 == 0 {
            fs.commit().unwrap();
        }
    }
    for ((name, bytes), id) in files.iter().zip(ids) {
        fs.truncate(id, bytes.len() as u64).unwrap();
        let mut handle = fs.begin(Reservation::create(1)).unwrap();
        let kept = handle.create(fs.top_level(), format!("{name} kept").as_bytes(), &new).unwrap();
        drop(handle);
        let all = FileOffset(0)..FileOffset(bytes.len() as u64);
        fs.clone_range(id, all, kept, FileOffset(0)).unwrap();
    }
    fs.commit().unwrap();
    drop(fs);
    device.image()
}

/// Gives the file the source's contents, and commits what came of it, as a command does.
fn replace(fs: &Filesystem, name: &str) -> Result<()> {
    let image = Image::new(fs.clone(), Path::new("image"), &StartArgs::default()).unwrap();
    let edit = Edit::new(&image, OnFailure::GoOn);
    let from = image.resolve(b"source")?;
    let all = FileOffset(0)..FileOffset(source().len() as u64);
    let old = image.inode(image.resolve(name.as_bytes())?, name.as_bytes())?;
    contents(&edit, &old, name.as_bytes(), |id| {
        fs.clone_range(from, all, id, FileOffset(0))
            .map_err(|error| image.failure("sharing data", b"source", error))
    })
    .map(|id| assert_eq!(id, old.id))
}

fn read(fs: &Filesystem, name: &str) -> Vec<u8> {
    let id = fs.resolve(fs.top_level(), name.as_bytes()).unwrap();
    let mut bytes = vec![0; usize::try_from(fs.inode(id).unwrap().size_bytes).unwrap()];
    assert_eq!(fs.read(id, FileOffset(0), &mut bytes).unwrap(), bytes.len());
    bytes
}

/// What is there under both names, on a medium in which the checker finds nothing.
fn shown(array: &SimArray, name: &str, what: &str) -> Vec<u8> {
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(array.devices(), &options).unwrap();
    let report = ubtrfs_check::check(&volume, &CheckOptions::default()).unwrap();
    let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
    assert!(report.is_clean(), "{what}: {errors:#?}");
    drop(volume);
    let fs = open(array, 64 << 20);
    let bytes = read(&fs, name);
    assert!(bytes == read(&fs, &format!("{name} 2")), "{what}");
    bytes
}

/// Does not hold all that is read, and holds the one transaction.
const CACHE_BYTES: usize = 850 << 10;
/// Does not hold the transaction either.
const CACHE_BYTES_TOO_FEW: usize = 300 << 10;

/// A file of several names was cut off before its new contents were shared with it. A read that failed in between left it
/// short or empty, and the command committed that.
#[test]
fn contents_of_which_the_nth_request_fails_are_the_old_or_the_new_ones() {
    let medium = made();
    let (read, write) = (Request::Read, Request::Write);
    for (request, cache_bytes) in
        [(read, 64 << 20), (read, CACHE_BYTES), (read, CACHE_BYTES_TOO_FEW), (write, CACHE_BYTES)]
    {
        let mut failures = 0;
        let step = if cache_bytes == CACHE_BYTES_TOO_FEW { 7 } else { 1 };
        for after in (0..).step_by(step) {
            let array = SimArray::of_images(vec![medium.clone()]);
            let fs = open(&array, cache_bytes);
            let effect = Effect::Fail;
            array.plan(Fault { device: None, request, after, effect, stays: false });
            let replaced = replace(&fs, "sparse");
            array.forget_faults();
            let what = format!("{request:?} {after}, {cache_bytes} bytes of cache: {replaced:?}");
            if array.strikes().is_empty() {
                assert_eq!(replaced.is_ok(), cache_bytes != CACHE_BYTES_TOO_FEW, "{what}");
                break;
            }
            failures += usize::from(replaced.is_err());
            // As a command does.
            let committed = fs.commit();
            drop(fs);
            let shown = shown(&array, "sparse", &what);
            let is_old = shown == sparse();
            assert!(is_old || shown == source(), "{what}: {} bytes", shown.len());
            if replaced.is_err() || committed.is_ok() {
                assert_eq!(is_old, replaced.is_err(), "{what}");
            }
        }
        assert!(failures > 5, "{failures} failures of {request:?}");
    }
}

/// What does not fit into one transaction is refused before the file changes.
#[test]
fn contents_that_one_transaction_cannot_hold_leave_the_old_ones() {
    let medium = made();
    for (name, old) in [("sparse", sparse()), ("inline", b"inline".to_vec())] {
        let array = SimArray::of_images(vec![medium.clone()]);
        let fs = open(&array, CACHE_BYTES_TOO_FEW);
        let before = extents(&fs, name);
        let failure = replace(&fs, name).unwrap_err().to_string();
        assert!(failure.contains("must not grow"), "{name}: {failure}");
        assert_eq!(extents(&fs, name), before);
        fs.commit().unwrap();
        drop(fs);
        assert!(shown(&array, name, name) == old, "{name}");
    }
}

/// What fails although it went well with another file is undone: each read that it makes, and what
/// one transaction does not hold.
#[test]
fn contents_that_fail_half_way_are_put_back() {
    let medium = made();
    for (name, old) in [("sparse", sparse()), ("inline", b"inline".to_vec())] {
        for cache_bytes in [64 << 20, CACHE_BYTES_TOO_FEW] {
            let mut failures = 0;
            for after in 0.. {
                let array = SimArray::of_images(vec![medium.clone()]);
                let fs = open(&array, cache_bytes);
                let before = extents(&fs, name);
                let image =
                    Image::new(fs.clone(), Path::new("image"), &StartArgs::default()).unwrap();
                let id = |name: &str| image.resolve(name.as_bytes()).unwrap();
                let (from, kept, to) = (id("source"), id(&format!("{name} kept")), id(name));
                fs.drop_clean_data();
                if cache_bytes != CACHE_BYTES_TOO_FEW {
                    let (request, effect) = (Request::Read, Effect::Fail);
                    array.plan(Fault { device: None, request, after, effect, stays: false });
                }
                let edit = Edit::new(&image, OnFailure::GoOn);
                let replaced = replace_or_put_back(&edit, from, kept, to, name.as_bytes());
                array.forget_faults();
                let what = format!("{name}, read {after}, {cache_bytes} bytes: {replaced:?}");
                if let Err(failure) = &replaced {
                    failures += 1;
                    assert!(!failure.to_string().contains("put back"), "{what}");
                    assert_eq!(extents(&fs, name), before, "{what}");
                }
                fs.commit().unwrap();
                let is_over = array.strikes().is_empty();
                drop((image, fs));
                let shown = shown(&array, name, &what);
                let expected = if replaced.is_err() { &old } else { &source() };
                assert!(shown == *expected, "{what}: {} bytes", shown.len());
                if is_over {
                    break;
                }
            }
            assert!(failures > 0, "{name}, {cache_bytes} bytes");
        }
    }
}

/// Where each of its extents lies, from where to where.
fn extents(fs: &Filesystem, name: &str) -> Vec<(u64, u64, MappingKind, u64)> {
    let id = fs.resolve(fs.top_level(), name.as_bytes()).unwrap();
    let extents = fs.file_extents(id, FileOffset(0)).unwrap().map(std::result::Result::unwrap);
    extents
        .filter(|extent| extent.kind != MappingKind::Hole)
        .map(|extent| (extent.offset.0, extent.len_bytes, extent.kind, extent.disk_bytenr.0))
        .collect()
}

/// A transaction that grew too large was committed between the cut and the new contents.
#[test]
fn contents_are_the_old_or_the_new_ones_after_a_power_cut_at_any_write() {
    let medium = made();
    let mut replaced = 0;
    for cache_bytes in (750 << 10..1100 << 10).step_by(50 << 10) {
        let array = SimArray::of_images(vec![medium.clone()]);
        let fs = open(&array, cache_bytes);
        array.begin();
        if replace(&fs, "sparse").is_err() {
            continue;
        }
        replaced += 1;
        fs.commit().unwrap();
        drop(fs);
        let plan = CrashPlan { prefix_one_in: 3, parts_per_window: 3, mixed_per_window: 1 };
        let (mut olds, mut news) = (0, 0);
        for state in array.recording().states(plan, Prng::of_test(1)) {
            let what =
                format!("{cache_bytes} bytes of cache, {:?} after {}", state.kind, state.cut_after);
            let shown = shown(&SimArray::of_images(state.images), "sparse", &what);
            match shown {
                bytes if bytes == sparse() => olds += 1,
                bytes if bytes == source() => news += 1,
                bytes => panic!("{what}: {} bytes", bytes.len()),
            }
        }
        assert!(olds > 0 && news > 0, "{olds} old, {news} new");
    }
    assert!(replaced > 3, "{replaced} replaced");
}
