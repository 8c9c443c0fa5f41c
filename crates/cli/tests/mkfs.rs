//! New filesystems, and what mkfs refuses to overwrite.

mod support;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use support::{Ran, assert_judged, command, ubtrfs_in};
use tempfile::TempDir;
use ubtrfs_testkit::{KernelMount, Oracle, oracle, run};

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn run(&self, words: &[&str]) -> Ran {
        ubtrfs_in(self.path(), words)
    }

    fn assert_clean(&self, name: &str) {
        assert_judged(&self.path().join(name));
    }

    fn superblock(&self, name: &str) -> serde_json::Value {
        self.run(&["inspect", "super", "--all", "--full", "--json", name]).ok().json()
    }
}

#[test]
fn mkfs_makes_a_sparse_file_that_reads_and_checks_clean() {
    let place = Place::new();
    let ran = place.run(&["mkfs", "--size", "1G", "-L", "my label", "disk.img"]).ok();
    assert!(ran.text().contains("my label"));
    let metadata = fs::metadata(place.path().join("disk.img")).unwrap();
    assert_eq!(metadata.len(), 1 << 30);
    assert!(std::os::unix::fs::MetadataExt::blocks(&metadata) * 512 < 16 << 20);
    assert_eq!(place.run(&["ls", "-A", "disk.img"]).ok().text(), "");
    let df = place.run(&["df", "--json", "disk.img"]).ok().json();
    assert_eq!(df["label"], "my label");
    assert_eq!(df["device_size"], 1 << 30);
    place.assert_clean("disk.img");
}

#[test]
fn mkfs_options_show_in_the_superblock() {
    let place = Place::new();
    let uuid = "01234567-89ab-4def-8123-456789abcdef";
    place
        .run(&[
            "mkfs",
            "-q",
            "-b",
            "512M",
            "-U",
            uuid,
            "-n",
            "4k",
            "--csum",
            "xxhash",
            "-O",
            "^block-group-tree,no-holes",
            "-m",
            "single",
            "-d",
            "dup",
            "disk.img",
        ])
        .ok();
    let superblock = &place.superblock("disk.img")[0];
    assert_eq!(superblock["fsid"], uuid);
    assert_eq!(superblock["nodesize"], 4096);
    assert_eq!(superblock["csum_type"], "1 (xxhash)");
    assert!(!superblock["compat_ro_flags"].as_str().unwrap().contains("BLOCK_GROUP_TREE"));
    let chunks = place.run(&["inspect", "chunks", "--json", "disk.img"]).ok().json();
    let profiles: Vec<(&str, &str)> = chunks
        .as_array()
        .unwrap()
        .iter()
        .map(|chunk| (chunk["type"].as_str().unwrap(), chunk["profile"].as_str().unwrap()))
        .collect();
    assert!(profiles.contains(&("Metadata", "single")), "{profiles:?}");
    assert!(!profiles.contains(&("Data", "single")), "{profiles:?}");
    place.assert_clean("disk.img");
}

#[test]
fn mkfs_bad_options_leave_nothing_behind() {
    let place = Place::new();
    let cases: [(&[&str], i32, &str); 9] = [
        (&["x.img"], 4, "--size"),
        (&["--size", "1M", "x.img"], 5, "needed"),
        (&["--size", "1G", "-n", "5000", "x.img"], 2, "node size"),
        (&["--size", "1G", "-n", "128K", "x.img"], 2, "node size"),
        (&["--size", "1G", "--csum", "md5", "x.img"], 2, "md5"),
        (&["--size", "1G", "-O", "magic", "x.img"], 2, "magic"),
        (&["--size", "1G", "-O", "zoned", "x.img"], 6, "zoned"),
        (&["--size", "1G", "-d", "raid5", "x.img"], 6, "RAID5"),
        (&["--size", "1G", "-U", "1234", "x.img"], 2, "hexadecimal"),
    ];
    for (words, code, says) in cases {
        let all: Vec<&str> = ["mkfs"].iter().chain(words).copied().collect();
        place.run(&all).fails(code).says(says);
        assert!(!place.path().join("x.img").exists(), "{words:?}");
    }
    let label = "x".repeat(256);
    place.run(&["mkfs", "--size", "1G", "-L", &label, "x.img"]).fails(2).says("label");
    place.run(&["mkfs", "--size", "1G", "missing/x.img"]).fails(4);
}

#[test]
fn mkfs_refuses_what_holds_something_and_changes_no_byte() {
    let place = Place::new();
    fs::write(place.path().join("notes.txt"), "my notes\n".repeat(1000)).unwrap();
    place.run(&["mkfs", "-q", "--size", "256M", "btrfs.img"]).ok();
    let mut made = vec![("notes.txt", "not empty"), ("btrfs.img", "a btrfs filesystem")];
    let tools: [(&str, &str, &[&str], &str); 5] = [
        ("mkfs.ext4", "ext4.img", &["-q"], "ext4"),
        ("mkfs.xfs", "xfs.img", &["-q"], "XFS"),
        ("mkfs.vfat", "fat.img", &[], "FAT"),
        ("mkswap", "swap.img", &["-q"], "swap"),
        ("mke2fs", "ext2.img", &["-q"], "ext2"),
    ];
    for (tool, name, options, says) in tools {
        let image = place.path().join(name);
        let file = fs::File::create(&image).unwrap();
        file.set_len(512 << 20).unwrap();
        let there = ["/usr/sbin", "/sbin"].iter().any(|at| Path::new(at).join(tool).exists());
        if there {
            run(tool, options.iter().map(OsStr::new).chain([image.as_os_str()]));
            made.push((name, says));
        }
    }
    let mut gpt = vec![0; 4 << 20];
    gpt[512..520].copy_from_slice(b"EFI PART");
    fs::write(place.path().join("gpt.img"), gpt).unwrap();
    made.push(("gpt.img", "partition table"));
    for (name, says) in made {
        let before = fs::read(place.path().join(name)).unwrap();
        for words in [&["mkfs", name][..], &["mkfs", "--size", "1G", name]] {
            let ran = place.run(words).fails(4).says(says).says("--force");
            assert!(ran.says("nothing was changed").stdout.is_empty());
        }
        assert!(fs::read(place.path().join(name)).unwrap() == before, "{name}");
    }
    place.run(&["mkfs", "-q", "-f", "btrfs.img"]).ok();
    place.run(&["mkfs", "-q", "-f", "--size", "300M", "notes.txt"]).ok();
    assert_eq!(place.superblock("notes.txt")[0]["total_bytes"], 300 << 20);
    place.assert_clean("btrfs.img");
    place.assert_clean("notes.txt");
}

#[test]
fn mkfs_size_grows_a_file_and_uses_the_beginning_of_a_longer_one() {
    let place = Place::new();
    let image = place.path().join("disk.img");
    fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    place.run(&["mkfs", "-q", "--size", "256M", "disk.img"]).ok();
    assert_eq!(fs::metadata(&image).unwrap().len(), 256 << 20);
    place.run(&["mkfs", "-q", "-f", "--size", "200M", "disk.img"]).ok();
    assert_eq!(fs::metadata(&image).unwrap().len(), 256 << 20);
    assert_eq!(place.superblock("disk.img")[0]["total_bytes"], 200 << 20);
    place.run(&["ls", "disk.img"]).ok();
    place.assert_clean("disk.img");
}

#[test]
fn mkfs_with_source_date_epoch_gives_the_same_bytes() {
    let place = Place::new();
    let make = |name: &str, epoch: &str, label: &str| {
        let mut mkfs = command();
        mkfs.current_dir(place.path()).env("SOURCE_DATE_EPOCH", epoch);
        mkfs.args(["mkfs", "-q", "--size", "256M", "-L", label, name]);
        Ran::from(mkfs.output().unwrap())
    };
    for (name, epoch, label) in [
        ("a", "1700000000", "l"),
        ("b", "1700000000", "l"),
        ("c", "1700000001", "l"),
        ("d", "1700000000", "m"),
    ] {
        make(name, epoch, label).ok();
    }
    let read = |name: &str| fs::read(place.path().join(name)).unwrap();
    assert!(read("a") == read("b"));
    assert!(read("a") != read("c"));
    let fsid = |name: &str| place.superblock(name)[0]["fsid"].as_str().unwrap().to_owned();
    assert_ne!(fsid("a"), fsid("d"));
    place.assert_clean("a");
    make("e", "yesterday", "l").fails(2).says("SOURCE_DATE_EPOCH");
}

#[test]
fn mkfs_label_of_any_bytes_comes_back() {
    let place = Place::new();
    let label = OsStr::from_bytes(b"caf\xe9");
    let words = ["mkfs", "-q", "--size", "256M", "-L"].map(OsStr::new);
    ubtrfs_in(place.path(), words.into_iter().chain([label, OsStr::new("disk.img")])).ok();
    let df = place.run(&["df", "--json", "disk.img"]).ok().json();
    assert_eq!(df["label_hex"], "636166e9");
    place.assert_clean("disk.img");
}

#[test]
fn mkfs_image_mounts_and_is_refused_while_mounted() {
    if !oracle::require_all(&[Oracle::KernelBtrfs]) {
        return;
    }
    let place = Place::new();
    place.run(&["mkfs", "-q", "--size", "300M", "disk.img"]).ok();
    let image = place.path().join("disk.img");
    let mount = KernelMount::read_write(&image, "");
    fs::write(mount.path().join("file"), "by the kernel\n").unwrap();
    place.run(&["mkfs", "-f", "disk.img"]).fails(4).says("mounted by the kernel");
    mount.unmount();
    assert_eq!(place.run(&["cat", "disk.img", "file"]).ok().text(), "by the kernel\n");
    place.assert_clean("disk.img");
}

/// RAID1C3 and RAID1C4 were offered, and made without the feature bit that says so.
#[test]
fn mkfs_over_several_devices_is_what_the_kernel_mounts() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    for (metadata, data, count) in [
        ("raid1", "raid0", 2),
        ("raid1c3", "raid1c3", 3),
        ("raid1c4", "raid10", 4),
        ("raid1c4", "raid1c4", 4),
    ] {
        println!("{metadata} {data}");
        let place = Place::new();
        let names: Vec<String> = (1..=count).map(|number| format!("{number}.img")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let make = ["mkfs", "-q", "--size", "400M", "-m", metadata, "-d", data];
        place.run(&[&make[..], &names].concat()).ok();
        let others: Vec<&str> = names[1..].iter().flat_map(|name| ["--device", *name]).collect();
        fs::write(place.path().join("file"), vec![b'x'; 5 << 20]).unwrap();
        place.run(&[&["put"][..], &others, &["1.img", "file", "/"]].concat()).ok();
        place.run(&[&["check", "--data"][..], &others, &["1.img"]].concat()).ok();
        let incompat = place.superblock("1.img")[0]["incompat_flags"].as_str().unwrap().to_owned();
        assert_eq!(incompat.contains("RAID1C34"), metadata.starts_with("raid1c"), "{incompat}");
        let images: Vec<_> = names.iter().map(|name| place.path().join(name)).collect();
        let mount = KernelMount::mount(&images, "", false).unwrap();
        assert!(fs::read(mount.path().join("file")).unwrap() == vec![b'x'; 5 << 20]);
        fs::write(mount.path().join("by-kernel"), "theirs\n").unwrap();
        let scrub = ["scrub", "start", "-B", "-r"].map(OsStr::new);
        let told = run("btrfs", scrub.into_iter().chain([mount.path().as_os_str()]));
        assert!(told.contains("no errors found"), "{told}");
        mount.unmount();
        place.run(&[&["check", "--data"][..], &others, &["1.img"]].concat()).ok();
        let read = place.run(&[&["cat"][..], &others, &["1.img", "/by-kernel"]].concat()).ok();
        assert_eq!(read.text(), "theirs\n");
    }
}
