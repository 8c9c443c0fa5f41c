//! Import and export: trees in and out, and what they refuse.

mod support;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::{Ran, assert_judged, ubtrfs_in, ubtrfs_with_stdin};
use tempfile::TempDir;
use ubtrfs_testkit::odd::odd_files;
use ubtrfs_testkit::{
    Compare, KernelMount, Oracle, Prng, TreeSnapshot, assert_checks_clean_but_for_extended_refs,
    oracle, run,
};

struct Place(TempDir);

impl Place {
    /// With a directory `source` that has something of most kinds.
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        let source = place.path("source");
        fs::create_dir_all(source.join("deep/er")).unwrap();
        fs::create_dir(source.join("home")).unwrap();
        fs::write(source.join("home/note"), "a note\n").unwrap();
        fs::write(source.join("text"), "many words ".repeat(30_000)).unwrap();
        fs::write(source.join("deep/er/script"), "#!/bin/sh\n").unwrap();
        let mode = fs::Permissions::from_mode(0o750);
        fs::set_permissions(source.join("deep/er/script"), mode).unwrap();
        symlink("../text", source.join("deep/link")).unwrap();
        fs::hard_link(source.join("text"), source.join("deep/hard")).unwrap();
        let sparse = File::create(source.join("sparse")).unwrap();
        sparse.set_len(10 << 20).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, words: &[&str]) -> Ran {
        ubtrfs_in(self.0.path(), words)
    }

    fn exists(&self, name: &str) -> bool {
        self.path(name).symlink_metadata().is_ok()
    }

    fn assert_clean(&self, image: &str) {
        assert_judged(&self.path(image));
    }
}

#[track_caller]
fn assert_same_files(a: &Path, b: &Path) {
    run("diff", ["-r".as_ref(), "--no-dereference".as_ref(), a.as_os_str(), b.as_os_str()]);
    let mode = |at: &Path| at.join("deep/er/script").metadata().unwrap().mode();
    assert_eq!(mode(a), mode(b));
    let inode = |at: &Path, name: &str| at.join(name).metadata().unwrap().ino();
    assert_eq!(inode(b, "text"), inode(b, "deep/hard"));
    assert!(b.join("sparse").metadata().unwrap().blocks() < 100);
}

#[test]
fn directory_goes_in_and_comes_out_again() {
    let place = Place::new();
    let ran = place.run(&["import", "--mkfs", "disk.img", "source"]).ok();
    assert!(ran.text().starts_with("imported 4 files, 4 directories"), "{}", ran.text());
    place.assert_clean("disk.img");
    place.run(&["export", "disk.img", "/", "out"]).ok();
    assert_same_files(&place.path("source"), &place.path("out"));
    // Once more on the same image, in a directory that is not there yet.
    place.run(&["import", "-q", "disk.img", "source", "/a/b"]).ok();
    place.assert_clean("disk.img");
    place.run(&["export", "-q", "disk.img", "a/b", "again"]).ok();
    assert_same_files(&place.path("source"), &place.path("again"));
}

#[test]
fn every_odd_file_comes_over_by_archive_too() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        return;
    }
    let place = Place(tempfile::tempdir().unwrap());
    fs::create_dir(place.path("odd")).unwrap();
    odd_files(&place.path("odd"), 11);
    let expect = TreeSnapshot::of_directory(&place.path("odd"));
    place.run(&["import", "-q", "--mkfs", "--compress", "zstd", "disk.img", "odd"]).ok();
    // Sockets are not for archives: the answer is no, and says which.
    let ran = place.run(&["export", "-q", "disk.img", "/", "odd.tar.zst"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.lines().all(|line| line.contains("socket")), "{}", ran.stderr);
    place.run(&["import", "-q", "--mkfs", "--compress", "zlib", "second.img", "odd.tar.zst"]).ok();
    for image in ["disk.img", "second.img"] {
        if oracle::require(Oracle::BtrfsProgs) {
            assert_checks_clean_but_for_extended_refs(&place.path(image));
        }
        let mount = KernelMount::read_only(&place.path(image), "");
        let have = TreeSnapshot::of_directory(mount.path());
        if image == "disk.img" {
            have.assert_same(&expect, &Compare::copied());
        } else {
            let text = have.differences(&expect, &Compare::copied());
            assert!(text.lines.iter().all(|line| line.contains("socket")), "{text:?}");
        }
        mount.unmount();
    }
}

#[test]
fn archives_of_every_compression_and_from_standard_input() {
    if !oracle::require(Oracle::Tar) {
        return;
    }
    let place = Place::new();
    place.run(&["import", "-q", "--mkfs", "disk.img", "source"]).ok();
    for ending in ["tar", "tar.gz", "tar.xz", "tar.zst", "tar.bz2"] {
        let (archive, image, out) =
            (format!("a.{ending}"), format!("{ending}.img"), format!("{ending}.out"));
        place.run(&["export", "-q", "disk.img", "/", &archive]).ok();
        if ending != "tar.zst" || Path::new("/usr/bin/zstd").exists() {
            run("tar", ["-tf".as_ref(), place.path(&archive).as_os_str()]);
        }
        place.run(&["import", "-q", "--mkfs", &image, &archive]).ok();
        place.run(&["export", "-q", &image, "/", &out]).ok();
        place.assert_clean(&image);
        assert_same_files(&place.path("source"), &place.path(&out));
    }
    let piped = place.run(&["export", "disk.img", "/", "-"]).ok().stdout;
    assert!(piped == fs::read(place.path("a.tar")).unwrap());
    let image = place.path("stdin.img");
    let words = ["import", "--mkfs"].map(std::ffi::OsStr::new);
    let words = words.into_iter().chain([image.as_os_str(), "-".as_ref()]);
    ubtrfs_with_stdin(&piped, words).ok();
    place.run(&["export", "-q", "stdin.img", "/", "stdin.out"]).ok();
    place.assert_clean("stdin.img");
    assert_same_files(&place.path("source"), &place.path("stdin.out"));
}

#[test]
fn options_of_import_shape_the_image() {
    let place = Place::new();
    place
        .run(&[
            "import",
            "-q",
            "--mkfs",
            "-L",
            "shaped",
            "--csum",
            "sha256",
            "--size",
            "1G",
            "--shrink",
            "--compress",
            "zlib:9",
            "--subvol",
            "home",
            "--subvol",
            "/deep/er",
            "--owner",
            "7:8",
            "disk.img",
            "source",
        ])
        .ok();
    place.assert_clean("disk.img");
    assert!(fs::metadata(place.path("disk.img")).unwrap().len() < 512 << 20);
    let df = place.run(&["df", "--json", "disk.img"]).ok().json();
    assert_eq!(df["label"], "shaped");
    assert_eq!(df["device_size"], fs::metadata(place.path("disk.img")).unwrap().len());
    let subvolumes = place.run(&["subvolume", "list", "disk.img"]).ok();
    assert!(subvolumes.text().contains("path home\n"), "{}", subvolumes.text());
    assert!(subvolumes.text().contains("path deep/er\n"), "{}", subvolumes.text());
    let stat = place.run(&["stat", "--json", "disk.img", "text", "home/note"]).ok().json();
    assert_eq!(stat[0]["extents"]["compression"][0], "zlib");
    assert_eq!((&stat[0]["uid"], &stat[0]["gid"]), (&7.into(), &8.into()));
    assert_eq!(place.run(&["cat", "disk.img", "home/note"]).ok().text(), "a note\n");
}

#[test]
fn bad_imports_leave_nothing_behind() {
    let place = Place::new();
    fs::write(place.path("no.tar"), "this is no archive, whatever its name says\n".repeat(100))
        .unwrap();
    fs::write(place.path("zeros.tar"), vec![0; 1 << 20]).unwrap();
    fs::write(place.path("noise"), (0..=255_u8).cycle().take(200 << 20).collect::<Vec<_>>())
        .unwrap();
    fs::create_dir(place.path("large")).unwrap();
    fs::rename(place.path("noise"), place.path("large/noise")).unwrap();
    let cases: [(&[&str], i32, &str); 9] = [
        (&["--mkfs", "x.img", "missing"], 4, "missing: No such file"),
        (&["--mkfs", "x.img", "no.tar"], 4, "not a tar archive"),
        (&["--mkfs", "x.img", "zeros.tar"], 4, "nothing in it"),
        (&["--mkfs", "--size", "128M", "x.img", "large"], 5, "needed"),
        (&["--mkfs", "--subvol", "nowhere", "x.img", "source"], 4, "import: source/nowhere"),
        (&["--mkfs", "--compress", "zstd:99", "x.img", "source"], 2, "levels"),
        (&["--mkfs", "--compress", "rar", "x.img", "source"], 2, "zlib, lzo and zstd"),
        (&["--mkfs", "--owner", "me", "x.img", "source"], 2, "two numbers"),
        (&["-L", "label", "x.img", "source"], 2, "--mkfs"),
    ];
    for (words, code, says) in cases {
        let all: Vec<&str> = ["import"].iter().chain(words).copied().collect();
        place.run(&all).fails(code).says(says);
        assert!(!place.exists("x.img"), "{words:?}");
    }
    place.run(&["import", "x.img", "source"]).fails(4).says("x.img: No such file");
}

#[test]
fn import_keeps_what_is_there() {
    let place = Place::new();
    place.run(&["import", "-q", "--mkfs", "disk.img", "source"]).ok();
    fs::create_dir(place.path("other")).unwrap();
    fs::write(place.path("other/text"), "replaced?\n").unwrap();
    let before = place.run(&["cat", "disk.img", "text"]).ok().stdout;
    place.run(&["import", "disk.img", "other"]).fails(4).says("text");
    assert!(place.run(&["cat", "disk.img", "text"]).ok().stdout == before);
    place.run(&["import", "--mkfs", "disk.img", "other"]).fails(4).says("--force");
    assert!(place.run(&["cat", "disk.img", "text"]).ok().stdout == before);
    place.run(&["import", "disk.img", "other", "/text/x"]).fails(4);
    place.assert_clean("disk.img");
}

/// An import of a few files gave `/` and each directory on their way the owner, the permissions and the
/// attributes that those of SOURCE had by chance.
#[test]
fn import_keeps_the_metadata_of_directories_that_are_there() {
    let place = Place::new();
    place.run(&["import", "-q", "--mkfs", "disk.img", "source"]).ok();
    place.run(&["chmod", "disk.img", "1711", "/", "/home"]).ok();
    place.run(&["chown", "disk.img", "5:6", "/", "/home"]).ok();
    place.run(&["setfattr", "-n", "user.a", "-v", "ours", "disk.img", "/home"]).ok();
    fs::create_dir_all(place.path("other/home/new")).unwrap();
    let mode = fs::Permissions::from_mode(0o700);
    for name in ["other", "other/home", "other/home/new"] {
        fs::set_permissions(place.path(name), mode.clone()).unwrap();
    }
    let top = place.path("other");
    run("tar", ["-cf", place.path("a.tar").to_str().unwrap(), "-C", top.to_str().unwrap(), "."]);
    let about = |path: &str| {
        let stat = place.run(&["stat", "--json", "disk.img", path]).ok().json();
        (stat[0]["mode"].as_str().unwrap().to_owned(), stat[0]["uid"].clone())
    };
    for (source, made) in [("other", "/other"), ("a.tar", "/tar")] {
        place.run(&["import", "-q", "disk.img", source]).ok();
        assert_eq!(about("/"), ("1711".to_owned(), 5.into()), "{source}");
        assert_eq!(about("/home"), ("1711".to_owned(), 5.into()), "{source}");
        let shown = place.run(&["getfattr", "-d", "disk.img", "/home"]).ok();
        assert!(shown.text().contains("ours"), "{}", shown.text());
        assert_eq!(about("/home/new").0, "0700");
        place.run(&["rm", "-r", "disk.img", "/home/new"]).ok();
        // What the import makes itself has that of SOURCE, and the filesystem's top has it.
        place.run(&["import", "-q", "disk.img", source, made]).ok();
        assert_eq!(about(made).0, "0700");
        place.run(&["import", "-q", "--mkfs", "new.img", source]).ok();
        let stat = place.run(&["stat", "--json", "new.img", "/"]).ok().json();
        assert_eq!(stat[0]["mode"], "0700", "{source}");
        // As if it were made by one command.
        place.run(&["mkfs", "-q", "-f", "new.img"]).ok();
        place.run(&["import", "-q", "new.img", source]).ok();
        let stat = place.run(&["stat", "--json", "new.img", "/"]).ok().json();
        assert_eq!(stat[0]["mode"], "0700", "{source}");
        fs::remove_file(place.path("new.img")).unwrap();
    }
    place.assert_clean("disk.img");
}

#[test]
fn import_of_a_full_image_leaves_it_sound() {
    let place = Place::new();
    place.run(&["import", "-q", "--mkfs", "--size", "128M", "disk.img", "source"]).ok();
    fs::create_dir(place.path("large")).unwrap();
    let noise: Vec<u8> = (0..=250_u8).cycle().take(200 << 20).collect();
    fs::write(place.path("large/noise"), noise).unwrap();
    place.run(&["import", "disk.img", "large", "/large"]).fails(5).says("bytes needed");
    place.assert_clean("disk.img");
    assert_eq!(place.run(&["cat", "disk.img", "home/note"]).ok().text(), "a note\n");
}

#[test]
fn exports_refuse_what_is_there_unless_forced() {
    let place = Place::new();
    place.run(&["import", "-q", "--mkfs", "disk.img", "source"]).ok();
    fs::write(place.path("a.tar"), "mine").unwrap();
    place.run(&["export", "disk.img", "/", "a.tar"]).fails(4).says("exists already");
    assert_eq!(fs::read(place.path("a.tar")).unwrap(), b"mine");
    place.run(&["export", "-qf", "disk.img", "/", "a.tar"]).ok();
    assert!(fs::read(place.path("a.tar")).unwrap().len() > 100_000);
    place.run(&["export", "disk.img", "/", "source"]).fails(4).says("not empty").says("--force");
    place.run(&["export", "disk.img", "/missing", "out"]).fails(4).says("/missing");
    assert!(!place.exists("out"));
    place.run(&["export", "disk.img", "/text", "-"]).fails(4).says("ubtrfs cat disk.img /text");
    place.run(&["export", "disk.img", "/text", "out"]).ok();
    place.run(&["export", "disk.img", "/text", "out"]).fails(4).says("exists already");
    assert_eq!(fs::read(place.path("out")).unwrap(), fs::read(place.path("source/text")).unwrap());
    place.run(&["export", "disk.img", "/", "nowhere/a.tar"]).fails(4).says("nowhere/a.tar");
    let left: Vec<_> =
        fs::read_dir(place.0.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("partial")), "{left:?}");
}

#[test]
fn archive_whose_reader_goes_away_is_a_failure() {
    let place = Place::new();
    place.run(&["import", "-q", "--mkfs", "disk.img", "source"]).ok();
    let script = format!(
        "{} export disk.img / - | head -c 100 >/dev/null; echo ${{PIPESTATUS[0]}}",
        env!("CARGO_BIN_EXE_ubtrfs")
    );
    let output =
        Command::new("bash").arg("-c").arg(script).current_dir(place.0.path()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "4\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("Broken pipe"));
}

/// What compresses and what does not, in many batches, so that threads could matter.
fn many_files(directory: &Path) {
    let mut prng = Prng::new(5);
    for number in 0..400 {
        let len = prng.index(60_000);
        let bytes = if number % 3 == 0 { prng.bytes(len) } else { prng.text(len) };
        fs::write(directory.join(format!("file-{number}")), bytes).unwrap();
    }
}

#[test]
fn import_with_source_date_epoch_gives_the_same_bytes() {
    let place = Place::new();
    many_files(&place.path("source"));
    let make = |image: &str, program: &[&str]| {
        let us = env!("CARGO_BIN_EXE_ubtrfs");
        let words = ["import", "-q", "--mkfs", "--compress", "zstd", image, "source"];
        let words: Vec<&str> = program.iter().chain(&[us]).chain(&words).copied().collect();
        let mut import = Command::new(words[0]);
        import.current_dir(place.0.path()).env("SOURCE_DATE_EPOCH", "1700000000");
        Ran::from(import.args(&words[1..]).output().unwrap()).ok();
        fs::read(place.path(image)).unwrap()
    };
    let first = make("a.img", &[]);
    // Reading the source changes access times; they do not count.
    assert!(make("b.img", &[]) == first);
    place.assert_clean("b.img");
    if Path::new("/usr/bin/taskset").exists() {
        assert!(make("c.img", &["taskset", "-c", "0"]) == first, "on one processor");
    }
}

#[test]
fn partition_of_a_disk_image_is_filled_and_read() {
    let place = Place::new();
    // One partition of 400 MiB, 1 MiB into the disk, in the classic table.
    let mut table = vec![0; 512];
    table[446 + 4] = 0x83;
    table[446 + 8..446 + 12].copy_from_slice(&2048_u32.to_le_bytes());
    table[446 + 12..446 + 16].copy_from_slice(&(400_u32 << 11).to_le_bytes());
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    fs::write(place.path("disk.img"), &table).unwrap();
    let disk = File::options().write(true).open(place.path("disk.img")).unwrap();
    disk.set_len(600 << 20).unwrap();
    place.run(&["mkfs", "disk.img"]).fails(4).says("a partition table (MBR)");
    place.run(&["import", "-q", "--mkfs", "--partition", "1", "disk.img", "source"]).ok();
    place.run(&["ls", "disk.img"]).fails(4).says("--partition");
    place.run(&["ls", "--partition", "2", "disk.img"]).fails(4).says("no partition 2");
    for place_of in [&["--partition", "1"], &["--offset", "1M"]] {
        let words = ["cat", place_of[0], place_of[1], "disk.img", "home/note"];
        assert_eq!(place.run(&words).ok().text(), "a note\n");
    }
    let df = place.run(&["df", "--json", "--partition", "1", "disk.img"]).ok().json();
    assert_eq!(df["device_size"], 400 << 20);
    let words = ["if=disk.img", "of=partition.img", "bs=1M", "skip=1", "count=400", "conv=sparse"];
    let mut dd = Command::new("dd");
    assert!(dd.args(words).current_dir(place.0.path()).output().unwrap().status.success());
    place.assert_clean("partition.img");
    assert_eq!(fs::read(place.path("disk.img")).unwrap()[..512], table);
    // Behind the partition nothing was written.
    assert!(fs::read(place.path("disk.img")).unwrap()[401 << 20..].iter().all(|byte| *byte == 0));
}

#[test]
fn interrupted_import_leaves_nothing_behind() {
    let place = Place::new();
    place.run(&["import", "-q", "--mkfs", "disk.img", "source"]).ok();
    let archive = place.run(&["export", "disk.img", "/", "-"]).ok().stdout;
    let mut child = Command::new(env!("CARGO_BIN_EXE_ubtrfs"))
        .args(["import", "--mkfs", "new.img", "-"])
        .current_dir(place.0.path())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    // Half of the archive; the command waits for the rest.
    let mut pipe = child.stdin.take().unwrap();
    pipe.write_all(&archive[..archive.len() / 2]).unwrap();
    let began = Instant::now();
    while !place.exists("new.img") {
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(10));
    }
    run("kill", ["-INT", &child.id().to_string()]);
    let status = child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(2));
    assert!(!place.exists("new.img"));
    drop(pipe);
}

/// The name was there before the command heard signals, and heard before it knew what to remove: the file stayed.
#[test]
fn command_that_is_interrupted_whenever_its_file_is_there_removes_it() {
    const DELAYS_US: [u64; 6] = [0, 0, 50, 200, 1000, 10_000];
    let place = Place::new();
    for delay_us in [DELAYS_US; 5].concat() {
        let mut child = Command::new(env!("CARGO_BIN_EXE_ubtrfs"))
            .args(["import", "--mkfs", "new.img", "-"])
            .current_dir(place.0.path())
            // It waits for an archive that does not come.
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        // Who waits for a child closes what it reads from, and at the end of an archive it ends by itself.
        let pipe = child.stdin.take();
        let began = Instant::now();
        while !place.exists("new.img") {
            assert!(began.elapsed() < Duration::from_secs(60));
        }
        std::thread::sleep(Duration::from_micros(delay_us));
        let pid = Pid::from_child(&child);
        kill_process(pid, Signal::INT).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(2));
        assert!(!place.exists("new.img"), "after {delay_us} us");
        drop(pipe);
    }
}
