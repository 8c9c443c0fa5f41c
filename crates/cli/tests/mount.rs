//! `ubtrfs mount` and `umount`, as root and as somebody else.

#[path = "support/place.rs"]
mod place;

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use place::{NOBODY, Place, assert_image_clean};
use ubtrfs_testkit::{KernelMount, LoopDevice};

#[test]
fn mounted_by_root_and_by_another_user() {
    for is_root in [true, false] {
        let Some(place) = Place::new(is_root) else { return };
        place.mount(&["-o", "compress=zstd,commit=5"]);
        let file = place.directory.join("file");
        let status = place
            .command("dd")
            .args(["if=/dev/zero", "bs=100000", "count=30", "status=none"])
            .arg(format!("of={}", file.display()))
            .status();
        assert!(status.unwrap().success());
        // Root is not let in where another user mounted.
        assert_eq!(fs::metadata(&file).is_ok(), is_root);
        let output = place.run(&["ls"], &[&place.image]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("in use"), "{said}");
        place.umount();
        assert!(!place.is_mounted());
        assert!(place.done(&["ls", "-l"], &[&place.image]).contains("3000000"));
        place.assert_clean();
        place.mount(&["-o", "ro"]);
        let status = place.command("rm").arg(&file).stderr(Stdio::null()).status();
        assert!(!status.unwrap().success());
        // It returned while who served for reading still had the image, which the next one could not open for writing then.
        place.umount();
        for _ in 0..10 {
            place.mount(&["-o", "ro"]);
            place.umount();
            place.mount(&[]);
            place.umount();
        }
        for (words, why) in [
            (vec!["mount", "-o", "write-back"], "no such option"),
            (vec!["mount", "-o", "subvol=none"], "none: no such file"),
            (vec!["mount", "-o", "subvol=file"], "no subvolume"),
            (vec!["umount"], "nothing mounted"),
        ] {
            let paths: Vec<&Path> = match words[0] {
                "mount" => vec![&place.image, &place.directory],
                _ => vec![&place.directory],
            };
            let output = place.run(&words, &paths);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && said.contains(why), "{words:?}: {said}");
            assert!(!place.is_mounted());
        }
    }
}

/// Who is not root makes what root makes, and the image has it so.
#[test]
fn fake_root_records_owners_permissions_and_devices() {
    let Some(place) = Place::new(false) else { return };
    let said =
        place.run(&["mount", "-o", "fakeroot,allow_other"], &[&place.image, &place.directory]);
    assert!(String::from_utf8_lossy(&said.stderr).contains("allow_other"));
    assert!(!place.is_mounted());
    // Of the one who mounted it, so that only being root helps.
    place.done(&["chown"], &[&place.image, Path::new("0"), Path::new("/")]);
    place.mount(&["-o", "fakeroot"]);
    let script = "
        set -e
        cd \"$1\"
        mkdir etc dev
        echo secret > etc/shadow
        chown 0:42 etc/shadow; chmod 640 etc/shadow
        echo program > su; chown 0:0 su; chmod 4755 su
        echo of > user; chown 1000:1001 user; chmod 600 user
        cat user > /dev/null; echo more >> user
        mkdir closed; chmod 0 closed; echo in > closed/file
        mkfifo dev/fifo
        ln -s su link; chown -h 7:8 link
        chgrp 5 dev; chmod g+s dev; echo of group > dev/inherits";
    let status = place.command("sh").args(["-c", script, "sh"]).arg(&place.directory).status();
    assert!(status.unwrap().success());
    let null = ["/dev/null", "c", "1", "3"].map(Path::new);
    place.done(&["mknod", "-m", "666"], &[&[place.directory.as_path()], &null[..]].concat());
    let seen = Command::new("setpriv")
        .args(["--reuid", &NOBODY.to_string(), "--regid", &NOBODY.to_string(), "--clear-groups"])
        .args(["stat", "-c", "%F %t:%T %u:%g %a"])
        .arg(place.directory.join("dev/null"))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&seen.stdout), "character special file 1:3 0:5 666\n");
    // Others are not let in, root neither.
    assert!(fs::metadata(place.directory.join("su")).is_err());
    place.umount();
    place.assert_clean();
    let kernel = KernelMount::read_only(&place.image, "");
    for (name, expected) in [
        ("etc", "directory 0:0 755"),
        ("etc/shadow", "regular file 0:42 640"),
        ("su", "regular file 0:0 4755"),
        ("user", "regular file 1000:1001 600"),
        ("closed", "directory 0:0 0"),
        ("closed/file", "regular file 0:0 644"),
        ("dev/fifo", "fifo 0:0 644"),
        ("dev/null", "character special file 0:5 666"),
        ("dev/inherits", "regular file 0:5 644"),
        ("link", "symbolic link 7:8 777"),
    ] {
        let path = kernel.path().join(name);
        let output = Command::new("stat").args(["-c", "%F %u:%g %a"]).arg(&path).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), expected, "{name}");
    }
}

/// Root of a user namespace is nobody outside of it. What is his there is root's in the image.
#[test]
fn root_of_a_user_namespace_mounts_and_commands_reach_the_mount() {
    let Some(place) = Place::new(false) else { return };
    place.done(&["chown"], &[&place.image, Path::new("0"), Path::new("/")]);
    let script = "
        set -e
        \"$3\" mount \"$1\" \"$2\"
        echo program > \"$2/program\"
        chmod 4755 \"$2/program\"
        setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 \"$2/program\"
        stat -c %u:%g:%a \"$2/program\"
        \"$3\" subvolume snapshot -r \"$2\" / /before
        \"$3\" mknod \"$2\" /null c 1 3
        ls \"$2/before\"
        \"$3\" umount \"$2\"";
    let output = place
        .command("unshare")
        .args(["-Urm", "sh", "-c", script, "sh"])
        .args([&place.image, &place.directory])
        .arg(env!("CARGO_BIN_EXE_ubtrfs"))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0:0:4755\nprogram\n");
    place.assert_clean();
    let kernel = KernelMount::read_only(&place.image, "");
    let output = Command::new("stat")
        .args(["-c", "%n %F %u:%g %a", "program", "null", "before/program"])
        .current_dir(kernel.path())
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "program regular file 0:0 4755\nnull character special file 0:0 644\nbefore/program regular file 0:0 4755\n"
    );
    let output = Command::new("getcap").arg(kernel.path().join("program")).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("cap_net_raw=ep"));
}

/// As a line of `/etc/fstab` is mounted: mount(8) looks for a program of the type's name.
#[test]
fn mount_8_mounts_by_the_type_of_fstab() {
    let Some(place) = Place::new(true) else { return };
    let script = "
        set -e
        mkdir \"$3/over\" \"$3/work\"
        mount -t tmpfs none \"$3/over\"
        mkdir \"$3/over/up\" \"$3/over/work\"
        mount -t overlay -o \"lowerdir=/usr/sbin,upperdir=$3/over/up,workdir=$3/over/work\" none /usr/sbin
        ln -s \"$4\" /usr/sbin/mount.fuse.ubtrfs
        mount -t fuse.ubtrfs -o rw,nofail,x-systemd.automount,nodev,nosuid,noexec,compress=lzo \"$1\" \"$2\"
        echo by fstab > \"$2/file\"
        findmnt -n -o FSTYPE,SOURCE,OPTIONS --mountpoint \"$2\"
        cp /bin/true \"$2/true\"
        if \"$2/true\"; then echo runs; fi
        \"$4\" umount \"$2\"";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script, "sh"])
        .args([&place.image, &place.directory])
        .arg(place.image.parent().unwrap())
        .arg(env!("CARGO_BIN_EXE_ubtrfs"))
        .output()
        .unwrap();
    let (said, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{errors}");
    let line: Vec<&str> = said.split_whitespace().collect();
    assert_eq!(line[0], "fuse.ubtrfs");
    for option in ["nodev", "nosuid", "noexec"] {
        assert!(line.last().unwrap().split(',').any(|shown| shown == option), "{said}");
    }
    assert!(errors.contains("Permission denied") && !said.contains("runs"), "{said}{errors}");
    place.assert_clean();
    assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]), "by fstab\n");
}

#[test]
fn process_that_is_asked_to_end_loses_nothing() {
    for is_root in [true, false] {
        let Some(place) = Place::new(is_root) else { return };
        place.mount(&["-o", "commit=3600"]);
        let mut shell = place.command("sh");
        shell.args(["-c", "printf 'not synced' >\"$0/file\""]).arg(&place.directory);
        assert!(shell.status().unwrap().success());
        place.signal("-TERM");
        // As the next opener: it waits for the lock.
        File::open(&place.image).unwrap().lock_shared().unwrap();
        assert!(!place.is_mounted());
        assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]), "not synced");
        place.assert_clean();
    }
}

/// nohup(1) was undone: a signal that the caller had the command ignore was heeded.
#[test]
fn signal_that_is_ignored_when_it_is_mounted_stays_so() {
    let Some(place) = Place::new(true) else { return };
    let mut shell = Command::new("sh");
    shell.args([
        "-c",
        "trap '' HUP; exec \"$0\" mount \"$1\" \"$2\"",
        env!("CARGO_BIN_EXE_ubtrfs"),
    ]);
    assert!(shell.args([&place.image, &place.directory]).status().unwrap().success());
    let status = fs::read_to_string(format!("/proc/{}/status", place.server())).unwrap();
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    let (hangup, end) = (1, 1 << 14);
    assert_eq!(mask("SigIgn:") & (hangup | end), hangup);
    assert_eq!(mask("SigCgt:") & (hangup | end), end);
    place.signal("-HUP");
    assert_eq!(place.done(&["ls"], &[&place.directory]), "");
    place.signal("-TERM");
    File::open(&place.image).unwrap().lock_shared().unwrap();
    assert!(!place.is_mounted());
}

/// A block device that root mounts is the kernel's to hold: syncfs(2) reaches the engine, umount(8) returns when all is
/// durable, and others are kept out as from any mounted device.
#[test]
fn block_device_is_held_by_the_kernel_and_synced_with_it() {
    let Some(mut place) = Place::new(true) else { return };
    let device = LoopDevice::attach(&place.image, false);
    let image = std::mem::replace(&mut place.image, device.path().to_owned());
    let kind = |place: &Place| {
        let table = fs::read("/proc/self/mountinfo").unwrap();
        let table = String::from_utf8_lossy(&table);
        let source = format!(" {} ", place.image.display());
        let line = table.lines().find(|line| line.contains(&source)).map(str::to_owned);
        line.map(|line| line.contains(" - fuseblk.ubtrfs "))
    };
    for by in ["umount", "ubtrfs", "-TERM"] {
        place.mount(&["-o", "commit=3600"]);
        assert_eq!(kind(&place), Some(true), "{by}");
        fs::write(place.directory.join(by), vec![7; 1 << 20]).unwrap();
        for words in [&["ls"][..], &["mkfs", "-f"], &["check"]] {
            let output = place.run(words, &[&place.image]);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && said.contains("mounted on"), "{words:?}: {said}");
        }
        let output = Command::new("mkfs.btrfs").arg("-f").arg(&place.image).output().unwrap();
        assert!(!output.status.success());
        match by {
            "umount" => {
                let status = Command::new("umount").arg(&place.directory).status().unwrap();
                assert!(status.success());
            }
            "ubtrfs" => place.umount(),
            signal => {
                place.signal(signal);
                File::open(&place.image).unwrap().lock_shared().unwrap();
            }
        }
        // Not a moment later than that.
        let bytes = place.done(&["cat"], &[&image, &Path::new("/").join(by)]);
        assert!(bytes.len() == 1 << 20, "{by}: {} bytes", bytes.len());
        assert_image_clean(&image);
    }
    // What nobody synced as a file is durable by `sync`.
    place.mount(&["-o", "commit=3600"]);
    fs::write(place.directory.join("synced"), vec![8; 1 << 20]).unwrap();
    let status = Command::new("sync").arg("-f").arg(&place.directory).status().unwrap();
    assert!(status.success());
    fs::write(place.directory.join("lost"), vec![9; 1 << 20]).unwrap();
    place.signal("-KILL");
    assert!(Command::new("umount").arg("-l").arg(&place.directory).status().unwrap().success());
    File::open(&place.image).unwrap().lock_shared().unwrap();
    assert!(place.done(&["cat"], &[&image, Path::new("/synced")]).len() == 1 << 20);
    assert!(!place.done(&["ls"], &[&image]).contains("lost"));
    assert_image_clean(&image);
}

/// With `-o writeback` the kernel holds what is written: snapshots by the command have it all the same, of files that are still open,
/// too; and what the kernel would not see is refused.
#[test]
fn kernel_holds_writes_where_it_is_asked_to() {
    for is_root in [true, false] {
        let Some(place) = Place::new(is_root) else { return };
        place.mount(&["-o", "writeback,commit=3600"]);
        let script = "cd \"$1\" && seq 100000 | while read number; do echo $number; done > lines
            test $(stat -c %s lines) = 588895 || exit 3
            truncate -s 1M holes && printf x | dd of=holes bs=1 seek=500000 conv=notrunc status=none
            cp --sparse=always holes copy && cmp holes copy || exit 4
            touch -d '2020-02-02 02:02:02 UTC' lines || exit 5";
        let mut command = place.command("sh");
        let output = command.args(["-c", script, "sh"]).arg(&place.directory).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{:?}: {said}", output.status);
        if is_root {
            assert_snapshot_has_what_an_open_file_has(&place);
        }
        let output = place.run(&["truncate", "-s", "5"], &[&place.directory, Path::new("/lines")]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("writeback"), "{said}");
        place.umount();
        place.assert_clean();
        let mounted = KernelMount::read_only(&place.image, "");
        let lines: String = (1..=100_000).map(|number| format!("{number}\n")).collect();
        assert!(fs::read_to_string(mounted.path().join("lines")).unwrap() == lines);
        let modified = fs::metadata(mounted.path().join("lines")).unwrap().modified().unwrap();
        let since = modified.duration_since(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(since.as_secs(), 1_580_608_922);
    }
}

/// syncfs(2) alone returned before the data was there, now and then.
/// A process that starts would have the file open, and closing it is enough to bring what was written back: so it runs before.
fn assert_snapshot_has_what_an_open_file_has(place: &Place) {
    for number in 0..20 {
        assert_a_snapshot_has_what_an_open_file_has(place, number);
    }
}

fn assert_a_snapshot_has_what_an_open_file_has(place: &Place, number: u32) {
    let mut command = place.command("sh");
    command.args(["-c", "read line && exec \"$0\" subvolume snapshot \"$1\" / /snapshot$2"]);
    command.arg(env!("CARGO_BIN_EXE_ubtrfs")).arg(&place.directory).arg(number.to_string());
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let name = format!("open {number}");
    let mut file = File::create(place.directory.join(&name)).unwrap();
    file.write_all(&[5; 100_000]).unwrap();
    child.stdin.take().unwrap().write_all(b"now\n").unwrap();
    assert!(child.wait().unwrap().success());
    let shown = place.directory.join(format!("snapshot{number}")).join(name);
    assert!(fs::read(shown).unwrap() == [5; 100_000], "snapshot {number}");
    drop(file);
}

/// Commands at the directory go to the process that serves it, and the kernel sees what they did at once, though it was told
/// that nothing changes without it: names that were not there, attributes, what a directory holds.
#[test]
fn commands_reach_a_mount_and_the_kernel_sees_what_they_did() {
    for is_root in [true, false] {
        let Some(place) = Place::new(is_root) else { return };
        place.mount(&[]);
        let dir = &place.directory;
        let shell = |line: &str| {
            let output =
                place.command("sh").args(["-c", line]).current_dir("/").env("D", dir).output();
            let output = output.unwrap();
            assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let at = |words: &[&str], path: &str| place.done(words, &[dir, Path::new(path)]);
        shell(r#"echo one > "$D/file"; mkdir "$D/dir"; touch "$D/dir/x"; sync "$D/file""#);
        // So that the kernel knows: no such names, these attributes, this directory.
        assert_eq!(
            shell(r#"ls "$D"; cat "$D/sub/x" "$D/snap/file" 2>/dev/null; true"#),
            "dir\nfile\n"
        );
        at(&["subvolume", "create"], "/sub");
        assert_eq!(
            shell(r#"ls "$D"; echo two > "$D/sub/x"; cat "$D/sub/x""#),
            "dir\nfile\nsub\ntwo\n"
        );
        place.done(&["subvolume", "snapshot", "-r"], &[dir, Path::new("/"), Path::new("/snap")]);
        // Written but not synced, it is in the snapshot.
        assert_eq!(shell(r#"cat "$D/snap/file" && ! touch "$D/snap/file" 2>/dev/null"#), "one\n");
        place.done(
            &["property", "set"],
            &[dir, Path::new("/snap"), Path::new("ro"), Path::new("false")],
        );
        shell(r#"echo three > "$D/snap/file""#);
        place.done(&["reflink"], &[dir, Path::new("/snap/file"), Path::new("/dir/copy")]);
        assert_eq!(shell(r#"ls "$D/dir"; cat "$D/dir/copy""#), "copy\nx\nthree\n");
        assert_eq!(shell(r#"stat -c %a "$D/file""#), "644\n");
        place.done(&["chmod"], &[dir, Path::new("600"), Path::new("/file")]);
        place.done(&["mkdir"], &[dir, Path::new("/dir/new")]);
        // Who has it open has it still, with other contents.
        let said = shell(&format!(
            r#"exec 3< "$D/dir/copy"; '{}' reflink "$D" /file /dir/copy; cat <&3; cat "$D/dir/copy""#,
            env!("CARGO_BIN_EXE_ubtrfs"),
        ));
        assert_eq!(said, "one\none\n");
        assert_eq!(shell(r#"stat -c %a "$D/file"; ls "$D/dir""#), "600\ncopy\nnew\nx\n");
        at(&["truncate", "--size", "2"], "/dir/copy");
        assert_eq!(shell(r#"cat "$D/dir/copy""#), "on");
        let list = place.done(&["subvolume", "list"], &[dir]);
        assert!(list.contains("path sub\n") && list.contains("path snap\n"), "{list}");
        at(&["subvolume", "delete"], "/snap");
        assert_eq!(shell(r#"ls "$D"; ! cat "$D/snap/file" 2>/dev/null"#), "dir\nfile\nsub\n");
        place.done(&["filesystem", "label"], &[dir, Path::new("mine")]);
        assert_eq!(place.done(&["filesystem", "label"], &[dir]), "mine\n");
        let blocks = || shell(r#"stat -f -c %b "$D""#).trim().parse::<u64>().unwrap();
        let before = blocks();
        place.done(&["filesystem", "resize"], &[dir, Path::new("+100M")]);
        assert_eq!(blocks() - before, (100 << 20) / 4096);
        place.done(&["filesystem", "sync"], &[dir]);
        assert!(place.done(&["filesystem", "usage"], &[dir]).contains("Overall"));
        assert!(place.done(&["inspect", "delayed-refs"], &[dir]).contains(" runs\n"));
        assert!(place.done(&["inspect", "fiemap"], &[dir, Path::new("/file")]).contains("inline"));
        for (words, paths, code, why) in [
            (&["subvolume", "create"][..], &["/file"][..], 4, "exists already"),
            (&["subvolume", "delete"], &["/none"], 4, "no such file"),
            (&["put"], &["/etc/hostname", "/"], 6, "an image that is not mounted"),
            (&["check"], &[], 6, "an image that is not mounted"),
            (&["inspect", "super"], &[], 6, "an image that is not mounted"),
            (&["rm"], &["/file"], 6, "an image that is not mounted"),
            (&["touch", "--discard"], &["/file"], 6, "with -o discard"),
            (&["ls", "--cache", "1M"], &["/"], 2, "when it was mounted"),
        ] {
            let paths: Vec<&Path> =
                std::iter::once(dir.as_path()).chain(paths.iter().map(Path::new)).collect();
            let output = place.run(words, &paths);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
            assert!(said.contains(why), "{words:?}: {said}");
        }
        // The image itself is refused, and where it is mounted told.
        let output = place.run(&["ls"], &[&place.image]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_told = said.contains("It is mounted on ") && said.contains("a b");
        assert!(!output.status.success() && is_told, "{said}");
        place.umount();
        assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/sub/x")]), "two\n");
        place.assert_clean();
        let place_of_sub = ["-o", "subvol=sub"];
        place.mount(&place_of_sub);
        let output =
            place.run(&["subvolume", "delete", "--subvolid", "5"], &[dir, Path::new("/sub")]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("what is mounted"), "{said}");
        assert_eq!(place.done(&["ls"], &[dir, Path::new("/")]), "x\n");
        place.umount();
    }
}

/// DEST was cut to nothing before it was asked whether data can be shared with it, and that was committed.
#[test]
fn reflink_that_fails_leaves_what_the_mount_shows() {
    for is_root in [true, false] {
        let Some(place) = Place::new(is_root) else { return };
        place.mount(&[]);
        let script = r#"cd "$1" && head -c 100000 /dev/urandom > a && touch b && chattr +C b && echo old > b
            exec 3< b
            if "$2" reflink . /a /b; then exit 3; fi
            cat b && cat <&3"#;
        let mut command = place.command("sh");
        command.args(["-c", script, "sh"]).arg(&place.directory);
        let output = command.arg(env!("CARGO_BIN_EXE_ubtrfs")).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && said.contains("checksums"), "{said}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "old\nold\n", "{said}");
        place.umount();
        assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/b")]), "old\n");
        place.assert_clean();
    }
}

/// Commands while programs write: each is done once, and nothing is lost.
#[test]
fn commands_beside_programs_that_write() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let dir = &place.directory;
    std::thread::scope(|scope| {
        for thread in 0..2 {
            scope.spawn(move || {
                for number in 0..300 {
                    let path = dir.join(format!("file {thread} {number}"));
                    fs::write(&path, vec![7; 5000]).unwrap();
                    assert_eq!(fs::read(&path).unwrap().len(), 5000);
                    if number % 3 == 0 {
                        fs::remove_file(&path).unwrap();
                    }
                }
            });
        }
        for number in 0..20 {
            let name = format!("/snap{number}");
            place.done(&["subvolume", "snapshot", "-r"], &[dir, Path::new("/"), Path::new(&name)]);
            assert!(dir.join(&name[1..]).is_dir());
            if number % 2 == 0 {
                place.done(&["subvolume", "delete"], &[dir, Path::new(&name)]);
                assert!(!dir.join(&name[1..]).exists());
            }
        }
    });
    let count = fs::read_dir(dir).unwrap().count();
    assert_eq!(count, 2 * 200 + 10);
    place.umount();
    place.assert_clean();
    let list = place.done(&["ls"], &[&place.image, Path::new("/")]);
    assert_eq!(list.lines().count(), count);
}
