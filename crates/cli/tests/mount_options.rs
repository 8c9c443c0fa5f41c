//! What options of a mount do, each seen by somebody else: the kernel, another user, another program.

#[path = "support/place.rs"]
mod place;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use place::{NOBODY, Place};
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Prng, assert_checks_clean_whatever_it_holds};

/// The flags of a file's extents, as the kernel tells them.
fn extents(kernel: &KernelMount, name: &str) -> String {
    let output = Command::new("filefrag").arg("-v").arg(kernel.path().join(name)).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn data_is_inline_or_compressed_as_is_asked_for() {
    let zeros = vec![0; 1 << 20];
    // What does not shrink comes first, by which it is judged whether the rest may.
    let mut mixed = Prng::new(3).bytes(1 << 20);
    mixed.extend(&zeros);
    for (options, is_inline, is_encoded, is_mixed_encoded) in [
        ("max_inline=0", false, false, false),
        ("max_inline=2048", true, false, false),
        ("compress=zstd", true, true, false),
        ("compress-force=zstd:3", true, true, true),
        ("busy_poll=0,cache=8M", true, false, false),
    ] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", options]);
        fs::write(place.directory.join("small"), [b's'; 500]).unwrap();
        fs::write(place.directory.join("zeros"), &zeros).unwrap();
        fs::write(place.directory.join("mixed"), &mixed).unwrap();
        place.umount();
        let kernel = KernelMount::read_only(&place.image, "");
        assert_eq!(extents(&kernel, "small").contains("inline"), is_inline, "{options}");
        assert_eq!(extents(&kernel, "zeros").contains("encoded"), is_encoded, "{options}");
        if is_mixed_encoded || !is_encoded {
            let shown = extents(&kernel, "mixed");
            assert_eq!(shown.contains("encoded"), is_mixed_encoded, "{options}: {shown}");
        }
        assert!(fs::read(kernel.path().join("mixed")).unwrap() == mixed);
        kernel.unmount();
        assert_checks_clean_whatever_it_holds(std::slice::from_ref(&place.image));
    }
}

#[test]
fn subvolume_is_mounted_by_its_number() {
    let Some(place) = Place::new(true) else { return };
    place.done(&["subvolume", "create"], &[&place.image, Path::new("/sub")]);
    place.done(&["mkdir"], &[&place.image, Path::new("/sub/inside")]);
    let kernel = KernelMount::read_only(&place.image, "");
    let shown = Command::new("btrfs")
        .args(["inspect-internal", "rootid"])
        .arg(kernel.path().join("sub"))
        .output()
        .unwrap();
    kernel.unmount();
    let number = String::from_utf8_lossy(&shown.stdout).trim().to_owned();
    place.mount(&["-o", &format!("subvolid={number}")]);
    let names: Vec<_> =
        fs::read_dir(&place.directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["inside"]);
    place.umount();
}

/// As long as it lies in the image it takes space there.
#[test]
fn space_that_is_freed_goes_back_to_the_image_where_it_is_asked_for() {
    for (options, goes_back) in [("commit=1,discard", true), ("commit=1", false)] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", options]);
        let path = place.directory.join("file");
        fs::write(&path, Prng::new(1).bytes(30 << 20)).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let taken = || fs::metadata(&place.image).unwrap().blocks() * 512;
        let before = taken();
        assert!(before > 30 << 20);
        fs::remove_file(&path).unwrap();
        place.umount();
        assert_eq!(taken() < 20 << 20, goes_back, "{options}: {before}, then {}", taken());
        assert_checks_clean_whatever_it_holds(std::slice::from_ref(&place.image));
    }
}

/// One of two devices is not there: it can be read and written, and the other one is as the kernel takes it.
#[test]
fn filesystem_that_lacks_a_device_is_mounted_where_that_is_allowed() {
    let Some(mut place) = Place::new(true) else { return };
    let images = ["first", "second"].map(|name| place.image.with_file_name(name));
    MkfsBtrfs::new().size_bytes(256 << 20).options("-d raid1 -m raid1").make_on(&images);
    place.image = images[0].clone();
    let refused = place.run(&["mount"], &[&place.image, &place.directory]);
    assert!(!refused.status.success() && !place.is_mounted());
    place.mount(&["-o", "ro,degraded"]);
    assert_eq!(fs::read_dir(&place.directory).unwrap().count(), 0);
    place.umount();
    place.mount(&["-o", "degraded"]);
    fs::write(place.directory.join("file"), b"by one").unwrap();
    place.umount();
    let kernel = KernelMount::read_only(&place.image, "degraded");
    assert_eq!(fs::read(kernel.path().join("file")).unwrap(), b"by one");
}

/// In a mount namespace of its own, where `fusermount3` is told that users may let others in.
#[test]
fn others_are_let_in_where_it_is_asked_for_and_allowed() {
    let Some(place) = Place::new(false) else { return };
    let configuration = place.image.with_file_name("fuse.conf");
    fs::write(&configuration, "user_allow_other\n").unwrap();
    fs::set_permissions(&configuration, fs::Permissions::from_mode(0o644)).unwrap();
    let script = "set -e
        touch /etc/fuse.conf
        mount --bind \"$1\" /etc/fuse.conf
        setpriv --reuid $2 --regid $2 --clear-groups \"$3\" mount -o allow_other \"$4\" \"$5\"
        setpriv --reuid $2 --regid $2 --clear-groups sh -c 'echo let in >\"$0\"/file; chmod 644 \"$0\"/file' \"$5\"
        setpriv --reuid 1 --regid 1 --clear-groups cat \"$5/file\"
        setpriv --reuid $2 --regid $2 --clear-groups \"$3\" umount \"$5\"";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script, "sh"])
        .arg(&configuration)
        .arg(NOBODY.to_string())
        .arg(env!("CARGO_BIN_EXE_ubtrfs"))
        .args([&place.image, &place.directory])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(said, "let in\n", "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn commands_of_others_are_refused() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let program = env!("CARGO_BIN_EXE_ubtrfs");
    let output = Command::new("setpriv")
        .args(["--reuid", &NOBODY.to_string(), "--regid", &NOBODY.to_string(), "--clear-groups"])
        .args([program, "mkdir"])
        .args([&place.directory, Path::new("/made")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("Who mounted it"), "{said}");
    assert!(!place.directory.join("made").exists());
    place.umount();
}

/// The kernel keeps locks for programs on one machine.
#[test]
fn locks_keep_other_programs_out() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let path = place.directory.join("file");
    let file = File::create(&path).unwrap();
    file.lock().unwrap();
    let other = || Command::new("flock").arg("-n").arg(&path).arg("true").status().unwrap();
    assert!(!other().success());
    file.unlock().unwrap();
    assert!(other().success());
    drop(file);
    place.umount();
}

/// A subvolume and its snapshot have the same numbers inside; programs that tell files by them must not take one's for the other's.
#[test]
fn programs_tell_a_subvolume_from_its_snapshot() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let top = &place.directory;
    place.done(&["subvolume", "create"], &[top, Path::new("/sub")]);
    fs::write(top.join("sub/name"), vec![b'1'; 100_000]).unwrap();
    fs::hard_link(top.join("sub/name"), top.join("sub/link")).unwrap();
    place.done(&["subvolume", "snapshot"], &[top, Path::new("/sub"), Path::new("/snap")]);
    fs::write(top.join("snap/name"), vec![b'2'; 100_000]).unwrap();
    let run = |program: &str, words: &[&str]| {
        let output = Command::new(program).args(words).current_dir(top).output().unwrap();
        assert!(output.status.success(), "{program}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let copied: Vec<PathBuf> =
        ["tar", "cp"].iter().map(|name| place.image.with_file_name(name)).collect();
    for place in &copied {
        fs::create_dir(place).unwrap();
    }
    let [tar, cp] = [&copied[0], &copied[1]].map(|path| path.display().to_string());
    run("sh", &["-c", &format!("tar -c sub snap | tar -x -C '{tar}'")]);
    run("cp", &["-a", "sub", "snap", &cp]);
    for copy in copied {
        for (inside, byte) in [("sub", b'1'), ("snap", b'2')] {
            for name in ["name", "link"] {
                let path = copy.join(inside).join(name);
                assert!(fs::read(&path).unwrap() == vec![byte; 100_000], "{}", path.display());
                assert_eq!(fs::metadata(&path).unwrap().nlink(), 2, "{}", path.display());
            }
        }
    }
    // Each pair of links once.
    let counted: u64 = run("du", &["-sk", "--apparent-size", "sub", "snap"])
        .lines()
        .map(|line| line.split_whitespace().next().unwrap().parse::<u64>().unwrap())
        .sum();
    assert!((190..230).contains(&counted), "{counted}");
    assert_eq!(run("find", &["sub", "snap", "-samefile", "sub/name"]).lines().count(), 2);
    place.umount();
}

/// In the foreground it serves until it is unmounted.
#[test]
fn foreground_process_ends_with_its_mount() {
    let Some(place) = Place::new(true) else { return };
    let mut child = place
        .command(env!("CARGO_BIN_EXE_ubtrfs"))
        .args(["mount", "-f"])
        .args([&place.image, &place.directory])
        .spawn()
        .unwrap();
    for _ in 0..2000 {
        if place.is_mounted() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let mut file = File::create(place.directory.join("file")).unwrap();
    file.write_all(b"written").unwrap();
    drop(file);
    place.umount();
    assert!(child.wait().unwrap().success());
    assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]), "written");
}

/// The kernel asks for 128 KiB at once and no more, unless root says otherwise; it asked of us no more than of any.
#[test]
fn large_files_are_read_by_large_requests_where_root_mounts() {
    let Some(place) = Place::new(true) else { return };
    let bytes = Prng::new(5).bytes(8 << 20);
    place.mount(&[]);
    fs::write(place.directory.join("large"), &bytes).unwrap();
    place.umount();
    let counts = place.image.with_extension("counts");
    let mut mount = place.command(env!("CARGO_BIN_EXE_ubtrfs"));
    mount.env("UBTRFS_REQUEST_COUNTS", &counts).arg("mount");
    mount.args([&place.image, &place.directory]);
    assert!(mount.status().unwrap().success());
    assert!(fs::read(place.directory.join("large")).unwrap() == bytes);
    place.umount();
    let counts = fs::read_to_string(counts).unwrap();
    // By the number of READ.
    let reads = counts.lines().find_map(|line| line.strip_prefix("15 ")).unwrap();
    let reads: u64 = reads.parse().unwrap();
    // By 128 KiB they are 64.
    assert!((1..=32).contains(&reads), "{counts}");
}
