//! Images that the kernel made and filled, then changed by the engine, then by the kernel, then by
//! the engine again: each reads what the other wrote, and `btrfs check` finds nothing after each.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ubtrfs_engine::{
    Filesystem, InodeId, Method, NewInode, OpenOptions, PreparedData, Reservation,
};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_testkit::{
    CheckMode, Compare, KernelMount, LoopDevice, MkfsBtrfs, Oracle, Prng, TreeSnapshot,
    btrfs_check, oracle, run,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

struct Variant {
    name: &'static str,
    mkfs: &'static str,
    mount: &'static str,
    device_count: usize,
    /// What is done to the images before the engine opens them.
    prepare: fn(&[PathBuf]),
}

fn variants() -> Vec<Variant> {
    let plain = |name, mkfs| Variant { name, mkfs, mount: "", device_count: 1, prepare: |_| {} };
    vec![
        plain("defaults", ""),
        plain("explicit holes", "-O ^no-holes"),
        plain("long metadata keys", "-O ^skinny-metadata"),
        plain("small nodes", "-n 4096"),
        plain("small nodes, long keys", "-n 4096 -O ^skinny-metadata,^no-holes"),
        plain("large nodes", "-n 65536"),
        plain("xxhash", "--csum xxhash"),
        plain("sha256", "--csum sha256"),
        plain("blake2", "--csum blake2"),
        plain("single metadata", "-m single"),
        plain("dup data", "-d dup"),
        plain("mixed", "--mixed"),
        plain("no space cache", "-R ^free-space-tree"),
        Variant { mount: "space_cache=v1", ..plain("v1 space cache", "-R ^free-space-tree") },
        Variant { device_count: 2, ..plain("raid1", "-m raid1 -d raid1") },
        Variant { device_count: 2, ..plain("raid1 and single", "-m raid1 -d single") },
        Variant { device_count: 2, ..plain("raid0 data", "-m raid1 -d raid0") },
        Variant { device_count: 3, ..plain("raid0", "-m raid0 -d raid0") },
        Variant { device_count: 4, ..plain("raid10", "-m raid10 -d raid10") },
        Variant { device_count: 4, ..plain("raid1c3 and raid1c4", "-m raid1c4 -d raid1c3") },
        Variant {
            prepare: |images| _ = run("btrfstune", ["-m".as_ref(), images[0].as_os_str()]),
            ..plain("metadata uuid", "")
        },
        Variant { prepare: forget_valid, ..plain("free space tree not valid", "") },
        Variant { prepare: enable_quota, ..plain("quota", "") },
    ]
}

fn forget_valid(images: &[PathBuf]) {
    common::forget_valid(&images[0]);
}

fn enable_quota(images: &[PathBuf]) {
    let mount = KernelMount::read_write(&images[0], "");
    run("btrfs", ["quota".as_ref(), "enable".as_ref(), mount.path().as_os_str()]);
    run("btrfs", ["quota".as_ref(), "rescan".as_ref(), "-w".as_ref(), mount.path().as_os_str()]);
    mount.unmount();
}

/// Many small files of which some are deleted, so that free space lies in pieces.
fn fill(directory: &Path, random: &mut Prng, tag: &str) {
    let directory = directory.join(tag);
    fs::create_dir(&directory).unwrap();
    for at in 0..300 {
        let len = if random.chance(1, 4) { random.index(3000) } else { random.index(40_000) };
        fs::write(directory.join(format!("kernel {at}")), random.text(len)).unwrap();
    }
    for at in (0..300).filter(|at| at % 3 != 0) {
        fs::remove_file(directory.join(format!("kernel {at}"))).unwrap();
    }
}

fn devices(images: &[PathBuf]) -> Vec<Arc<dyn Device>> {
    let open = |image: &PathBuf| {
        let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
        Arc::new(device) as Arc<dyn Device>
    };
    images.iter().map(open).collect()
}

fn open(images: &[PathBuf]) -> Filesystem {
    let volume = Volume::open(devices(images), &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, OpenOptions::default()).unwrap()
}

/// Files of all kinds by the engine, in several transactions.
fn change(fs: &Filesystem, random: &mut Prng, tag: &str) {
    let now = fs.runtime().clock.now();
    let create = |dir: InodeId, name: &str, mode: u32| {
        let mut handle = fs.begin(Reservation::create(1)).unwrap();
        let id = handle.create(dir, name.as_bytes(), &NewInode::new(mode, now)).unwrap();
        handle.set_xattr(id, b"user.tag", tag.as_bytes()).unwrap();
        id
    };
    let top = create(fs.top_level(), tag, 0o040_755);
    let mut dirs = vec![top];
    for at in 0..400 {
        let dir = dirs[random.index(dirs.len())];
        if random.chance(1, 12) {
            dirs.push(create(dir, &format!("dir {at}"), 0o040_755));
            continue;
        }
        let id = create(dir, &format!("file {at}"), 0o100_644);
        let method = match random.below(4) {
            0 => Some(Method::new(Compression::Zstd, 3)),
            1 => Some(Method::new(Compression::Lzo, 0)),
            _ => None,
        };
        let options = fs.write_options(method);
        let mut appender = fs.appender(id, 0).unwrap();
        let mut offset = 0;
        for _ in 0..random.below(4) {
            let sectors = 1 + random.index(30);
            let data = PreparedData::new(random.text(sectors * 4096), &options);
            // Sometimes a hole.
            offset += 4096 * random.below(2);
            appender.push(FileOffset(offset), data).unwrap();
            offset += sectors as u64 * 4096;
        }
        appender.finish().unwrap();
        if random.chance(1, 60) {
            fs.commit().unwrap();
        }
    }
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    handle
        .create_subvolume(top, format!("subvolume {tag}").as_bytes(), &NewInode::new(0o755, now))
        .unwrap();
    drop(handle);
    fs.commit().unwrap();
}

fn check(images: &[PathBuf], modes: &[CheckMode], when: &str) {
    let loops: Vec<LoopDevice> = match images {
        [_] => Vec::new(),
        several => several.iter().map(|image| LoopDevice::attach(image, true)).collect(),
    };
    for device in &loops {
        run("btrfs", ["device".as_ref(), "scan".as_ref(), device.path().as_os_str()]);
    }
    let target = loops.first().map_or(images[0].as_path(), LoopDevice::path);
    for mode in modes.iter().copied() {
        let outcome = btrfs_check(target, mode);
        // A v1 cache that our commit made stale is what the kernel expects to find and drop; loop
        // devices of others that it cannot read are no concern of this filesystem.
        let lines = outcome.transcript.lines();
        let expected = ["space cache will be invalidated", "cannot scan /dev/", "is experimental"];
        let complaints: Vec<&str> = lines
            .filter(|line| {
                line.contains("ERROR") || line.contains("WARNING") || line.contains("cache")
            })
            .filter(|line| !expected.iter().any(|words| line.contains(words)))
            .filter(|line| !line.contains("checking"))
            .collect();
        let is_clean = outcome.is_clean
            || outcome.transcript.contains("no error found") && complaints.is_empty();
        assert!(is_clean, "{when}, {mode:?}: {}", outcome.transcript);
    }
}

fn compare(fs: &Filesystem, images: &[PathBuf], mount: &str) {
    let ours = common::snapshot(fs, fs.top_level());
    let options = format!("subvolid=5,{mount}");
    let kernel = KernelMount::mount(images, options.trim_end_matches(','), true).unwrap();
    let theirs = TreeSnapshot::of_directory(kernel.path());
    kernel.unmount();
    theirs.assert_same(&ours, &Compare::same_filesystem());
}

#[test]
fn kernel_and_engine_change_an_image_in_turns() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::MkfsBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let only = std::env::var("UBTRFS_VARIANT").ok();
    for variant in variants() {
        if only.as_ref().is_some_and(|only| only != variant.name) {
            continue;
        }
        println!("{}", variant.name);
        let mut random = Prng::of_test(71);
        let dir = tempfile::tempdir().unwrap();
        let images: Vec<PathBuf> =
            (0..variant.device_count).map(|at| dir.path().join(format!("image{at}"))).collect();
        MkfsBtrfs::new().options(variant.mkfs).size_bytes(301 << 20).make_on(&images);
        let mount = KernelMount::mount(&images, variant.mount, false).unwrap();
        fill(mount.path(), &mut random, "first");
        mount.unmount();
        (variant.prepare)(&images);

        let fs = open(&images);
        change(&fs, &mut random, "one");
        change(&fs, &mut random, "two");
        drop(fs);
        check(&images, &CheckMode::ALL, &format!("{}: after the engine", variant.name));
        compare(&common::open(&images), &images, variant.mount);

        let mount = KernelMount::mount(&images, variant.mount, false).unwrap();
        fill(mount.path(), &mut random, "second");
        fs::remove_dir_all(mount.path().join("one")).unwrap();
        run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
        let scrub = ["scrub".as_ref(), "start".as_ref(), "-B".as_ref(), mount.path().as_os_str()];
        let report = run("btrfs", scrub);
        assert!(report.contains("no errors found"), "{}: {report}", variant.name);
        mount.unmount();
        check(&images, &[CheckMode::Original], &format!("{}: after the kernel", variant.name));

        let fs = open(&images);
        change(&fs, &mut random, "three");
        drop(fs);
        check(&images, &[CheckMode::Lowmem], &format!("{}: after the engine again", variant.name));
        compare(&common::open(&images), &images, variant.mount);
    }
}

/// A seed is for others to be made of: nothing may be written to it.
#[test]
fn seed_is_not_opened_for_writing() {
    if !oracle::require_all(&[Oracle::MkfsBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    MkfsBtrfs::new().make(&image);
    run("btrfstune", ["-S".as_ref(), "1".as_ref(), image.as_os_str()]);
    let error = Volume::open(devices(&[image]), &VolumeOptions::default()).unwrap_err();
    assert!(error.to_string().contains("seed"), "{error}");
}
