//! Volumes on images that mkfs.btrfs made: what is read is what the format's own checks accept.

mod common;

use std::path::PathBuf;

use common::{READ_ONLY, judge, mkfs, open_devices};
use ubtrfs_ondisk::{DeviceId, Generation, PhysicalAddr, Reason, verify};
use ubtrfs_volume::{Error, OpenMode, Volume, VolumeOptions};

/// Reads the root of the chunk tree and checks it, as the engine does.
fn read_chunk_root(volume: &Volume) -> Result<ubtrfs_ondisk::block::Block, Error> {
    let superblock = volume.superblock();
    let geometry = volume.geometry();
    let expect = verify::Expect {
        bytenr: ubtrfs_ondisk::LogicalAddr(superblock.chunk_root.get()),
        generation: Some(Generation(superblock.chunk_root_generation.get())),
        level: Some(superblock.chunk_root_level),
        first_key: None,
        owner: None,
    };
    let mut buf = vec![0; geometry.nodesize_bytes];
    volume.read(expect.bytenr, &mut buf, &|bytes| {
        verify::block(bytes.into(), &geometry, &expect).map(drop)
    })?;
    Ok(verify::block(buf.into(), &geometry, &expect).unwrap())
}

fn each_profile(run: impl Fn(&str, Vec<PathBuf>)) {
    let profiles = [
        ("single", 1),
        ("dup", 1),
        ("raid0", 2),
        ("raid1", 2),
        ("raid10", 4),
        ("raid1c3", 3),
        ("raid1c4", 4),
    ];
    for (profile, count) in profiles {
        let dir = tempfile::tempdir().unwrap();
        let Some(images) = mkfs(dir.path(), count, &["-m", profile, "-d", "single"]) else {
            return;
        };
        run(profile, images);
    }
}

#[test]
fn open_of_each_profile_reads_the_chunk_root() {
    each_profile(|profile, images| {
        let devices = open_devices(&images, OpenMode::ReadOnly);
        let volume = Volume::open(devices, &READ_ONLY).unwrap();
        let root = read_chunk_root(&volume).unwrap_or_else(|error| panic!("{profile}: {error}"));
        assert!(!root.is_empty());
        assert_eq!(volume.device_count(), images.len());
        assert!(volume.stats().iter().all(|stats| stats.corruption_errors == 0));
    });
}

#[test]
fn read_with_one_bad_copy_answers_from_another_and_counts_it() {
    each_profile(|profile, images| {
        let volume =
            Volume::open(open_devices(&images, OpenMode::ReadWrite), &VolumeOptions::default())
                .unwrap();
        let at = ubtrfs_ondisk::LogicalAddr(volume.superblock().chunk_root.get());
        let place = volume.runs(at, 16384).unwrap()[0].copies[0];
        let device = volume.device(place.devid).unwrap();
        device.write_at(PhysicalAddr(place.at.0 + 200), b"damage").unwrap();
        let result = read_chunk_root(&volume);
        if volume.mirror_count(at).unwrap() == 1 {
            let Err(Error::NoWholeCopy { corruption, .. }) = result else {
                panic!("{profile}: {result:?}");
            };
            assert_eq!(corruption.reason, Reason::CsumMismatch);
        } else {
            result.unwrap_or_else(|error| panic!("{profile}: {error}"));
        }
        for stats in volume.stats() {
            let expect = u64::from(stats.devid == place.devid);
            assert_eq!(stats.corruption_errors, expect, "{profile}: {stats:?}");
        }
    });
}

#[test]
fn write_superblocks_is_read_back_and_the_judge_is_content() {
    each_profile(|_, images| {
        let devices = open_devices(&images, OpenMode::ReadWrite);
        let volume = Volume::open(devices, &VolumeOptions::default()).unwrap();
        let superblock = volume.superblock();
        volume.write_superblocks(&superblock).unwrap();
        volume.write_superblocks(&superblock).unwrap();
        drop(volume);
        let devices = open_devices(&images, OpenMode::ReadOnly);
        for super_copy in [None, Some(1)] {
            let options = VolumeOptions { super_copy, ..READ_ONLY };
            Volume::open(devices.clone(), &options).unwrap();
        }
        if images.len() == 1 && judge(&["btrfs"]) {
            common::run("btrfs", &["check", "--readonly", images[0].to_str().unwrap()]);
        }
    });
}

#[test]
fn write_superblocks_after_another_wrote_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 1, &[]) else { return };
    let devices = open_devices(&images, OpenMode::ReadWrite);
    let volume = Volume::open(devices.clone(), &VolumeOptions::default()).unwrap();
    let other = Volume::open(devices, &VolumeOptions::default()).unwrap();
    let mut superblock = other.superblock();
    superblock.generation += 1;
    other.write_superblocks(&superblock).unwrap();
    let error = volume.write_superblocks(&volume.superblock()).unwrap_err();
    assert!(matches!(error, Error::SuperblockChanged { .. }), "{error}");
    assert_eq!(other.superblock().generation, superblock.generation);
}

#[test]
fn open_without_a_device_names_it() {
    each_profile(|profile, images| {
        if images.len() == 1 {
            return;
        }
        let devices = open_devices(&images[..images.len() - 1], OpenMode::ReadOnly);
        let error = Volume::open(devices.clone(), &READ_ONLY).unwrap_err();
        assert!(matches!(error, Error::MissingDevice { .. }), "{profile}: {error}");
        let degraded = VolumeOptions { degraded: true, ..READ_ONLY };
        let volume = Volume::open(devices, &degraded).unwrap();
        if profile != "raid0" {
            read_chunk_root(&volume).unwrap_or_else(|error| panic!("{profile}: {error}"));
            let missing = DeviceId(images.len() as u64);
            assert_eq!(volume.missing_devices(), [missing], "{profile}");
        }
    });
}
