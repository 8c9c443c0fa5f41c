//! Volumes on images that mkfs.btrfs made: what is read is what the format's own checks accept.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ubtrfs_ondisk::{DeviceId, Generation, PhysicalAddr, Reason, verify};
use ubtrfs_volume::{Device, Error, FileDevice, OpenMode, Volume, VolumeOptions, Window};

/// Whether `program` is there; where judges are required, its absence fails the test.
fn judge(program: &str) -> bool {
    let found = std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path)
            .chain(["/usr/sbin".into(), "/sbin".into()])
            .any(|dir| dir.join(program).is_file())
    });
    let required = std::env::var_os("UBTRFS_REQUIRE_ORACLES").is_some_and(|value| value == "1");
    assert!(found || !required, "{program} is missing and judges are required");
    if !found {
        eprintln!("SKIPPED: {program} is missing");
    }
    found
}

/// `count` images that mkfs.btrfs made into one filesystem, or `None` without it.
fn mkfs(dir: &Path, count: usize, options: &[&str]) -> Option<Vec<PathBuf>> {
    if !judge("mkfs.btrfs") {
        return None;
    }
    let images: Vec<PathBuf> = (1..=count).map(|n| dir.join(format!("{n}.img"))).collect();
    for image in &images {
        std::fs::File::create(image).unwrap().set_len(512 << 20).unwrap();
    }
    let output = Command::new("mkfs.btrfs")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .args(["-q", "-f"])
        .args(options)
        .args(&images)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(images)
}

fn open_devices(images: &[PathBuf], mode: OpenMode) -> Vec<Arc<dyn Device>> {
    let open = |path| Arc::new(FileDevice::open(path, mode, Window::Whole).unwrap());
    images.iter().map(|path| open(path) as Arc<dyn Device>).collect()
}

const READ_ONLY: VolumeOptions =
    VolumeOptions { read_only: true, degraded: false, super_copy: None };

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
    each_profile(|profile, images| {
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
        if images.len() == 1 && judge("btrfs") {
            let output =
                Command::new("btrfs").arg("check").arg("--readonly").args(&images).output();
            let output = output.unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{profile}: {stderr}");
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
