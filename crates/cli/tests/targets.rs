//! What lies outside the filesystem stays as it is: other partitions, other files, the host's.

mod support;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use support::{Ran, assert_judged, command, ubtrfs_in};
use tempfile::TempDir;
use ubtrfs_testkit::{KernelMount, Oracle, oracle, run};

const MIB: u64 = 1 << 20;

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, words: &[&str]) -> Ran {
        ubtrfs_in(self.0.path(), words)
    }

    /// A disk with two partitions, of 200 and 50 MiB, the second full of a pattern.
    fn disk(&self) -> File {
        let path = self.path("disk.img");
        let disk = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        disk.set_len(260 * MIB).unwrap();
        let mut sfdisk = Command::new("sfdisk");
        sfdisk.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").arg("-q").arg(&path);
        let mut child = sfdisk.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let table = "label: gpt\nstart=2048,size=409600\nstart=411648,size=102400\n";
        child.stdin.take().unwrap().write_all(table.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
        for mebibyte in 201..251 {
            disk.write_all_at(&vec![b'2'; 1 << 20], mebibyte * MIB).unwrap();
        }
        disk
    }
}

/// The second partition, the table's backup behind it, and the length.
fn assert_neighbour_whole(disk: &File) {
    assert_eq!(disk.metadata().unwrap().len(), 260 * MIB);
    let mut bytes = vec![0; 50 << 20];
    disk.read_exact_at(&mut bytes, 201 * MIB).unwrap();
    assert!(bytes.iter().all(|byte| *byte == b'2'));
    let mut backup = [0; 8];
    disk.read_exact_at(&mut backup, 260 * MIB - 512).unwrap();
    assert_eq!(&backup, b"EFI PART");
}

/// With --offset, the filesystem's room went to the end of the file: mkfs gave all behind it back to
/// the system, --shrink cut the file off behind the filesystem, and resize grew it over the next
/// partition.
#[test]
fn filesystem_at_an_offset_leaves_the_next_partition_alone() {
    if !oracle::require_all(&[Oracle::BtrfsProgs, Oracle::KernelBtrfs]) {
        return;
    }
    let place = Place::new();
    let disk = place.disk();
    fs::create_dir(place.path("source")).unwrap();
    fs::write(place.path("source/file"), "contents\n").unwrap();
    place.run(&["mkfs", "-q", "--offset", "1M", "disk.img"]).ok();
    assert_neighbour_whole(&disk);
    let total = |disk: &str| {
        let df = place.run(&["df", "--json", "--offset", "1M", disk]).ok().json();
        df["device_size"].as_u64().unwrap()
    };
    assert_eq!(total("disk.img"), 200 * MIB);
    place.run(&["import", "-q", "--shrink", "--offset", "1M", "disk.img", "source"]).ok();
    assert_neighbour_whole(&disk);
    assert!(total("disk.img") < 200 * MIB);
    place.run(&["filesystem", "resize", "--offset", "1M", "disk.img", "max"]).ok();
    assert_neighbour_whole(&disk);
    assert_eq!(total("disk.img"), 200 * MIB);
    let grow = ["filesystem", "resize", "--offset", "1M", "disk.img", "+1M"];
    place.run(&grow).fails(6);
    let words = ["import", "-q", "--mkfs", "-f", "--shrink", "--offset", "1M"];
    place.run(&[&words[..], &["disk.img", "source"]].concat()).ok();
    assert_neighbour_whole(&disk);
    let (partition, mut bytes) = (place.path("partition"), vec![0; 200 << 20]);
    disk.read_exact_at(&mut bytes, MIB).unwrap();
    fs::write(&partition, bytes).unwrap();
    assert_judged(&partition);
    let mount = KernelMount::read_only(&partition, "");
    assert_eq!(fs::read(mount.path().join("file")).unwrap(), b"contents\n");
    mount.unmount();
}

#[test]
fn filesystem_at_an_offset_of_no_partition_is_as_long_as_it_is_told() {
    let place = Place::new();
    let file = File::create(place.path("raw.img")).unwrap();
    file.set_len(300 * MIB).unwrap();
    file.write_all_at(b"behind", 299 * MIB).unwrap();
    place.run(&["mkfs", "-f", "--offset", "1M", "raw.img"]).fails(4).says("--size");
    place.run(&["mkfs", "-q", "-f", "--offset", "1M", "--size", "200M", "raw.img"]).ok();
    let resize = |size| place.run(&["filesystem", "resize", "--offset", "1M", "raw.img", size]);
    resize("max").fails(2).says("give a length");
    resize("210M").ok();
    fs::create_dir(place.path("source")).unwrap();
    place.run(&["import", "-q", "--shrink", "--offset", "1M", "raw.img", "source", "/a"]).ok();
    assert_eq!(fs::read(place.path("raw.img")).unwrap().len() as u64, 300 * MIB);
    let behind = fs::read(place.path("raw.img")).unwrap();
    assert!(behind[299 << 20..].starts_with(b"behind"));

    // A file that is made for it begins with the offset.
    place.run(&["mkfs", "-q", "--offset", "1M", "--size", "200M", "new.img"]).ok();
    assert_eq!(place.path("new.img").metadata().unwrap().len(), 201 * MIB);
    place.run(&["ls", "--offset", "1M", "new.img"]).ok();
    place.run(&["ls", "new.img"]).fails(4);
    place.run(&["mkfs", "--partition", "1", "--size", "200M", "none.img"]).fails(4);
    assert!(!place.path("none.img").exists());
    place.run(&["import", "-q", "--mkfs", "--offset", "1M", "grown.img", "source"]).ok();
    place.run(&["ls", "--offset", "1M", "grown.img"]).ok();
}

/// Only the first 256 KiB were looked at: a filesystem whose beginning was zeroed, which its other
/// superblocks bring back, and files that begin with zeros were taken for empty, and discarded.
#[test]
fn mkfs_refuses_data_wherever_in_a_file_it_lies() {
    let place = Place::new();
    place.run(&["mkfs", "-q", "--size", "256M", "rescued.img"]).ok();
    let image = File::options().write(true).open(place.path("rescued.img")).unwrap();
    image.write_all_at(&vec![0; 1 << 20], 0).unwrap();
    let raw = File::create(place.path("raw.img")).unwrap();
    raw.set_len(256 * MIB).unwrap();
    raw.write_all_at(b"samples", 100 * MIB + 12345).unwrap();
    for (name, says) in [("rescued.img", "a btrfs filesystem"), ("raw.img", "not empty")] {
        let before = fs::read(place.path(name)).unwrap();
        for words in [&["mkfs", name][..], &["import", "--mkfs", name, "."]] {
            place.run(words).fails(4).says(says).says("--force");
        }
        assert!(fs::read(place.path(name)).unwrap() == before, "{name}");
        place.run(&["mkfs", "-q", "-f", name]).ok();
        assert_judged(&place.path(name));
    }
    // Zeros that were written are no data.
    fs::write(place.path("zeros.img"), vec![0; 256 << 20]).unwrap();
    place.run(&["mkfs", "-q", "zeros.img"]).ok();
}

/// The file was readable by all, as the umask has it, until its permissions were set at the end.
#[test]
fn get_of_a_private_file_is_private_from_the_start() {
    let place = Place::new();
    place.run(&["mkfs", "-q", "--size", "256M", "disk.img"]).ok();
    fs::write(place.path("shadow"), vec![b's'; 8 << 20]).unwrap();
    place.run(&["put", "--mode", "600", "disk.img", "shadow", "/"]).ok();
    // Ended in the midst of it, by a limit on the length of files: what it was writing stays.
    let mut limited = Command::new("sh");
    limited.args(["-c", "umask 0; ulimit -c 0; ulimit -f 2048; exec \"$@\"", "sh"]);
    limited.arg(command().get_program()).args(["get", "disk.img", "/shadow", "out"]);
    let status = limited.current_dir(place.0.path()).stderr(Stdio::null()).status().unwrap();
    let partial = fs::read_dir(place.0.path())
        .unwrap()
        .map(|entry| entry.unwrap())
        .find(|entry| entry.file_name().to_string_lossy().starts_with("out.partial-"));
    assert_eq!(status.signal(), Some(25), "{status}");
    assert_eq!(partial.unwrap().metadata().unwrap().mode() & 0o777, 0o600);
    place.run(&["get", "disk.img", "/shadow", "whole"]).ok();
    assert_eq!(place.path("whole").metadata().unwrap().mode() & 0o777, 0o600);
}

/// `get -f disk.img /file /dev/null` put a file in the place of the device.
#[test]
fn get_and_export_replace_files_only() {
    let place = Place::new();
    place.run(&["mkfs", "-q", "--size", "256M", "disk.img"]).ok();
    fs::write(place.path("file"), "contents\n").unwrap();
    place.run(&["put", "disk.img", "file", "/"]).ok();
    run("mkfifo", [place.path("fifo").as_os_str()]);
    run("mkfifo", [place.path("fifo.tar").as_os_str()]);
    std::os::unix::fs::symlink("fifo", place.path("link")).unwrap();
    std::os::unix::fs::symlink("file", place.path("to-file")).unwrap();
    for (command, target) in [("get", "fifo"), ("get", "link"), ("export", "fifo")] {
        let ran = place.run(&[command, "-f", "disk.img", "/file", target]);
        ran.fails(4).says("no regular file");
    }
    place.run(&["export", "-f", "disk.img", "/", "fifo.tar"]).fails(4).says("no regular file");
    for name in ["fifo", "fifo.tar"] {
        assert!(place.path(name).symlink_metadata().unwrap().file_type().is_fifo());
    }
    assert!(place.path("link").symlink_metadata().unwrap().is_symlink());
    place.run(&["get", "-f", "disk.img", "/file", "to-file"]).ok();
    assert_eq!(fs::read(place.path("to-file")).unwrap(), b"contents\n");
    let left: Vec<_> = fs::read_dir(place.0.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains("partial"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

/// A directory came out with all that its files have, a single file without owner, set-id bits,
/// attributes and access control lists, and nothing said so.
#[test]
fn export_of_a_single_file_keeps_what_export_of_a_directory_keeps() {
    if !oracle::require_all(&[Oracle::Root, Oracle::KernelBtrfs]) {
        return;
    }
    let place = Place::new();
    place.run(&["mkfs", "-q", "--size", "256M", "disk.img"]).ok();
    let mount = KernelMount::read_write(&place.path("disk.img"), "");
    let file = mount.path().join("file");
    fs::write(&file, vec![b'x'; 3 << 20]).unwrap();
    std::os::unix::fs::chown(&file, Some(1234), Some(5678)).unwrap();
    run(
        "setfattr",
        ["-n", "user.a", "-v", "value"].map(OsStr::new).into_iter().chain([file.as_ref()]),
    );
    run("setfacl", ["-m", "u:77:r"].map(OsStr::new).into_iter().chain([file.as_ref()]));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o6750)).unwrap();
    let opened = File::options().write(true).open(&file).unwrap();
    opened
        .set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 5))
        .unwrap();
    drop(opened);
    mount.unmount();
    let target = KernelMount::read_write(
        &{
            let path = place.path("target.img");
            place.run(&["mkfs", "-q", "--size", "256M", "target.img"]).ok();
            path
        },
        "",
    );
    let out = target.path().join("one");
    let all = target.path().join("all");
    place.run(&["export", "-q", "disk.img", "/file", out.to_str().unwrap()]).ok();
    place.run(&["export", "-q", "disk.img", "/", all.to_str().unwrap()]).ok();
    let metadata = out.metadata().unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (1234, 5678));
    assert_eq!(metadata.mode() & 0o7777, 0o6750);
    assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (1_000_000_000, 5));
    let attributes = |path: &std::path::Path| {
        let words = ["-d", "-m", "-", "--absolute-names", "-e", "hex"].map(OsStr::new);
        let text = run("getfattr", words.into_iter().chain([path.as_os_str()]));
        text.lines().filter(|line| line.contains('=')).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(attributes(&out).len(), 2, "{:?}", attributes(&out));
    assert_eq!(attributes(&out), attributes(&all.join("file")));
    assert!(fs::read(&out).unwrap() == vec![b'x'; 3 << 20]);
    let again = place.run(&["export", "disk.img", "/file", out.to_str().unwrap()]);
    again.fails(4).says("exists already");
    assert_eq!(fs::read_dir(target.path()).unwrap().count(), 2);
    target.unmount();
}

/// An empty file stayed where there was no space for one so long.
#[test]
fn file_that_cannot_be_made_so_long_is_not_left() {
    let place = Place::new();
    let script = "trap '' XFSZ; ulimit -f 100; exec \"$0\" mkfs --size 1G new.img";
    let output = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_ubtrfs")])
        .current_dir(place.0.path())
        .output()
        .unwrap();
    let ran = Ran::from(output);
    assert!(ran.code != 0, "{}", ran.stderr);
    let code = ran.code;
    ran.fails(code).says("new.img").says("File too large");
    assert!(!place.path("new.img").exists());
}
