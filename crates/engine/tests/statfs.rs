//! `statfs` as the kernel has it of the same image.

mod common;

use std::path::PathBuf;

use ubtrfs_ondisk::RootId;
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Oracle, oracle, run};

struct Case {
    mkfs: &'static str,
    device_bytes: &'static [u64],
    fill_bytes: usize,
}

const MIB: u64 = 1 << 20;

#[test]
fn statfs_of_filled_images_of_each_profile_is_the_kernels() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs]) {
        return;
    }
    let case = |mkfs, device_bytes, fill_bytes| Case { mkfs, device_bytes, fill_bytes };
    let cases = [
        case("", &[300 * MIB][..], 0),
        case("", &[1000 * MIB + 12345], 70_000_000),
        case("-m single -d dup", &[600 * MIB], 30_000_000),
        case("--mixed", &[200 * MIB], 20_000_000),
        case("-n 4096 -O ^no-holes -R ^free-space-tree", &[400 * MIB], 5_000_000),
        case("-m raid1 -d raid1", &[400 * MIB, 300 * MIB, 250 * MIB], 5_000_000),
        case("-m raid1 -d raid0", &[400 * MIB, 300 * MIB, 500 * MIB], 5_000_000),
        case("-m raid10 -d raid10", &[400 * MIB, 300 * MIB, 500 * MIB, 350 * MIB], 5_000_000),
        case("-m raid1c3 -d raid1c3", &[400 * MIB, 300 * MIB, 500 * MIB, 350 * MIB], 0),
        case("-m raid1 -d single", &[400 * MIB, 900 * MIB], 5_000_000),
    ];
    for Case { mkfs, device_bytes, fill_bytes } in cases {
        println!("mkfs {mkfs} on {device_bytes:?}, filled with {fill_bytes}");
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let images: Vec<PathBuf> =
            (0..device_bytes.len()).map(|n| dir.path().join(format!("image{n}"))).collect();
        let with_sizes = images.iter().zip(device_bytes);
        for (image, bytes) in with_sizes {
            std::fs::File::create(image).unwrap().set_len(*bytes).unwrap();
        }
        MkfsBtrfs::new().options(mkfs).make_on(&images);
        let mount = KernelMount::mount(&images, "subvolid=5", false).unwrap();
        std::fs::write(mount.path().join("file"), vec![7; fill_bytes]).unwrap();
        for n in 0..fill_bytes / 50_000 {
            std::fs::write(mount.path().join(format!("inline {n}")), [1; 1500]).unwrap();
        }
        run(
            "btrfs",
            ["subvolume".as_ref(), "create".as_ref(), mount.path().join("sub").as_os_str()],
        );
        mount.unmount();

        let mount = KernelMount::mount(&images, "subvolid=5", true).unwrap();
        let fs = common::open(&images);
        for (root, path) in [(RootId::FS_TREE, "."), (RootId(256), "sub")] {
            let format = "%S %b %f %a %l %i";
            let path = mount.path().join(path);
            let said =
                run("stat", ["-f".as_ref(), "-c".as_ref(), format.as_ref(), path.as_os_str()]);
            let ours = fs.statfs(root).unwrap();
            let id = u64::from(ours.fsid[0]) << 32 | u64::from(ours.fsid[1]);
            let ours = format!(
                "{} {} {} {} {} {id:x}",
                ours.block_bytes,
                ours.blocks,
                ours.blocks_free,
                ours.blocks_available,
                ours.name_bytes_max,
            );
            assert_eq!(ours, said.trim(), "ours, kernel");
        }
        mount.unmount();
    }
}

/// Free space of data that metadata has no room for is not available: both kinds filled by the kernel, then some
/// data freed again. The last word on whether metadata is full has the kernel while it is mounted: a fresh mount
/// has not tried to make a chunk yet.
#[test]
fn statfs_of_full_images_is_the_kernels() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs]) {
        return;
    }
    for (mkfs, is_metadata_full) in [("-m single", true), ("-m dup", false)] {
        println!("mkfs {mkfs}, metadata full: {is_metadata_full}");
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = dir.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(300 * MIB).unwrap();
        MkfsBtrfs::new().options(mkfs).make_on(std::slice::from_ref(&image));
        let mount = KernelMount::read_write(&image, "");
        let sync =
            || run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
        let mut count = 0;
        while std::fs::write(mount.path().join(format!("data{count}")), vec![7; 4 << 20]).is_ok() {
            sync();
            count += 1;
        }
        let mut inline = 0;
        // Room is kept for what did not fit and is on its way.
        for _ in 0..2 {
            sync();
        }
        while is_metadata_full
            && std::fs::write(mount.path().join(format!("inline{inline}")), [1; 1900]).is_ok()
        {
            inline += 1;
        }
        assert!(count > 30, "{count} files");
        assert!(!is_metadata_full || inline > 1000, "{inline} small files");
        for data in 0..3 {
            // What was lost with an error may be among them.
            std::fs::remove_file(mount.path().join(format!("data{data}"))).unwrap();
        }
        for _ in 0..3 {
            sync();
        }
        let said = run(
            "stat",
            ["-f".as_ref(), "-c".as_ref(), "%b %f %a".as_ref(), mount.path().as_os_str()],
        );
        mount.unmount();
        let ours = common::open(&[&image]).statfs(RootId::FS_TREE).unwrap();
        let is_none_available = ours.blocks_available == 0;
        let ours = format!("{} {} {}", ours.blocks, ours.blocks_free, ours.blocks_available);
        assert_eq!(ours, said.trim(), "ours, kernel");
        assert_eq!(is_none_available, is_metadata_full);
    }
}
