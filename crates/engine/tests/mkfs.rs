//! What mkfs makes, judged by `btrfs check`, and by the kernel that mounts it, writes to it and
//! scrubs it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use ubtrfs_engine::{MkfsOptions, OpenOptions, mkfs};
use ubtrfs_ondisk::CsumType;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{
    Compare, KernelMount, Oracle, TreeSnapshot, assert_checks_clean,
    assert_checks_clean_but_for_extended_refs, odd, oracle, run,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

fn make(image: &Path, size_bytes: u64, options: &MkfsOptions, runtime: Runtime) {
    File::create(image).unwrap().set_len(size_bytes).unwrap();
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    mkfs(vec![Arc::new(device) as Arc<dyn Device>], options, &Arc::new(runtime)).unwrap();
}

fn variants() -> Vec<(&'static str, MkfsOptions)> {
    let plain = MkfsOptions::default;
    let mut variants = vec![
        ("defaults", plain()),
        ("label", MkfsOptions { label: b"a label \xc3\xa4".to_vec(), ..plain() }),
        ("explicit holes", MkfsOptions { no_holes: false, block_group_tree: false, ..plain() }),
        ("no block group tree", MkfsOptions { block_group_tree: false, ..plain() }),
        (
            "no free space tree",
            MkfsOptions { free_space_tree: false, block_group_tree: false, ..plain() },
        ),
        (
            "single metadata",
            MkfsOptions { metadata_profile: Some(BlockGroupFlags::default()), ..plain() },
        ),
        ("dup data", MkfsOptions { data_profile: Some(BlockGroupFlags::DUP), ..plain() }),
    ];
    for nodesize_bytes in [4096, 8192, 32_768, 65_536] {
        variants.push(("node size", MkfsOptions { nodesize_bytes, ..plain() }));
    }
    for csum in [CsumType::Xxhash, CsumType::Sha256, CsumType::Blake2] {
        variants.push(("checksum", MkfsOptions { csum, ..plain() }));
    }
    variants
}

#[test]
fn made_filesystems_are_clean_and_the_kernel_fills_them() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("image");
    for (name, options) in variants() {
        println!("{name}: {options:?}");
        make(&image, 1 << 30, &options, Runtime::system());
        assert_checks_clean(&image);
        let mounted = KernelMount::read_write(&image, "noatime");
        odd::odd_files(mounted.path(), 5);
        let before = TreeSnapshot::of_directory(mounted.path());
        run(
            "btrfs",
            ["scrub".as_ref(), "start".as_ref(), "-B".as_ref(), mounted.path().as_os_str()],
        );
        mounted.unmount();
        match options.nodesize_bytes {
            // Whose items hold all names of the odd files.
            32_768.. => assert_checks_clean(&image),
            _ => assert_checks_clean_but_for_extended_refs(&image),
        }
        let mounted = KernelMount::read_only(&image, "");
        before
            .assert_same(&TreeSnapshot::of_directory(mounted.path()), &Compare::same_filesystem());
    }
}

#[test]
fn made_filesystem_of_each_size_is_clean() {
    if !oracle::require(Oracle::BtrfsProgs) {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("image");
    let options = MkfsOptions::default();
    let least = options.device_bytes_min();
    for size_bytes in [least, least + 4096, 100 << 20, (1 << 30) + 12_345, 300 << 30] {
        make(&image, size_bytes, &options, Runtime::system());
        assert_checks_clean(&image);
    }
    for nodesize_bytes in [4096, 16_384, 65_536] {
        let data_profile = Some(BlockGroupFlags::DUP);
        let options = MkfsOptions { nodesize_bytes, data_profile, ..MkfsOptions::default() };
        make(&image, options.device_bytes_min(), &options, Runtime::system());
        assert_checks_clean(&image);
    }
}

#[test]
fn made_twice_from_one_seed_is_the_same() {
    let scratch = tempfile::tempdir().unwrap();
    let image = |name: &str| {
        let image = scratch.path().join(name);
        let runtime = Runtime::reproducible(Time { sec: 1_700_000_000, nsec: 0 }, 7);
        make(&image, 200 << 20, &MkfsOptions::default(), runtime);
        image
    };
    let (one, two) = (image("one"), image("two"));
    run("cmp", [one.as_os_str(), two.as_os_str()]);
    let device = FileDevice::open(&one, OpenMode::ReadOnly, Window::Whole).unwrap();
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(vec![Arc::new(device)], &options).unwrap();
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let fs = ubtrfs_engine::Filesystem::open(volume, options).unwrap();
    assert_eq!(fs.read_dir(fs.top_level(), 0).unwrap().count(), 0);
}
