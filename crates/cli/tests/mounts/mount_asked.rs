//! What is asked of `mount` and `umount`, by whom and from where.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::place::{Memory, NOBODY, Place, wait_until};
use rustix::fs::{XattrFlags, getxattr, listxattr, removexattr, setxattr};
use ubtrfs_testkit::oracle::{self, Oracle};
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Prng};

const PROGRAM: &str = env!("CARGO_BIN_EXE_ubtrfs");

fn said(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A script of the one who mounts, with the image as `$1`, the directory as `$2`, the command as `$3`.
#[track_caller]
fn shell(place: &Place, script: &str) -> String {
    let mut command = place.command("sh");
    command.args(["-ec", script, "sh"]).args([&place.image, &place.directory]).arg(PROGRAM);
    let output = command.output().unwrap();
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    said
}

/// Root is not let into another user's mount, and was told that nothing could be made durable.
#[test]
fn mount_that_root_may_not_look_into_is_made_read_only_and_unmounted_by_root() {
    let Some(place) = Place::new(false) else { return };
    for options in ["commit=3600", "commit=3600,writeback"] {
        for words in [&["umount"][..], &["mount", "-o", "remount,ro"]] {
            place.mount(&["-o", options]);
            let bytes = Prng::new(1).bytes(3 << 20);
            fs::write(place.image.with_file_name("bytes"), &bytes).unwrap();
            shell(&place, "cp \"${1%/*}/bytes\" \"$2/file\"");
            // What is taken off is what was found, and nothing that the system does not tell of.
            assert!(
                ubtrfs_fuse::reached(&place.directory).unwrap().is_some_and(|found| found.is_top)
            );
            let mut root = Command::new(PROGRAM);
            root.args(words);
            if words.len() > 1 {
                root.arg(&place.image);
            }
            let output = root.arg(&place.directory).output().unwrap();
            assert!(output.status.success(), "{options}, {words:?}: {}", said(&output));
            if place.is_mounted() {
                place.cut_off();
            }
            let output = place.run(&["cat"], &[&place.image, Path::new("/file")]);
            assert!(output.status.success() && output.stdout == bytes, "{options}, {words:?}");
            place.done(&["rm"], &[&place.image, Path::new("/file")]);
        }
    }
    place.assert_clean();
}

/// Neither was the one who had mounted it where he may not look into its top, nor who serves it.
#[test]
fn mount_of_a_top_that_nobody_may_open_is_synced_and_unmounted() {
    let Some(place) = Place::new(false) else { return };
    for options in ["commit=3600", "commit=3600,writeback"] {
        place.mount(&["-o", options]);
        shell(
            &place,
            "head -c 3000000 /dev/zero | tr '\\0' x >\"$2/file\"; chmod 0 \"$2\"
            ls \"$2\" 2>/dev/null && echo open
            \"$3\" filesystem sync \"$2\"",
        );
        place.cut_off();
        let output = place.run(&["cat"], &[&place.image, Path::new("/file")]);
        assert!(output.stdout == vec![b'x'; 3_000_000], "{options}: {}", said(&output));
        place.done(&["rm"], &[&place.image, Path::new("/file")]);
        place.mount(&["-o", options]);
        place.umount();
        place.done(&["chmod"], &[&place.image, Path::new("755"), Path::new("/")]);
    }
    // Of another user.
    place.done(&["chown"], &[&place.image, Path::new("0:0"), Path::new("/")]);
    place.done(&["chmod"], &[&place.image, Path::new("700"), Path::new("/")]);
    place.mount(&[]);
    place.umount();
    place.assert_clean();
}

/// What the kernel held back finds no space, and who syncs is told, be it by one who may not open the mount's top.
#[test]
fn lost_data_is_told_where_nobody_may_open_the_top() {
    let Some(place) = Place::new(false) else { return };
    File::options().write(true).open(&place.image).unwrap().set_len(128 << 20).unwrap();
    place.done(&["mkfs", "-f"], &[&place.image]);
    place.done(&["chown"], &[&place.image, Path::new(&NOBODY.to_string()), Path::new("/")]);
    place.mount(&["-o", "writeback"]);
    let said = shell(
        &place,
        // More than there is space for, of which only the kernel knows.
        "cd \"$2\"; exec 5>file; head -c 200000000 /dev/urandom >&5 2>/dev/null || true; chmod 0 .
        \"$3\" filesystem sync \"$2\" || echo told
        \"$3\" filesystem sync \"$2\" && echo once",
    );
    assert!(said.contains("No space left") && said.starts_with("told\nonce\n"), "{said}");
    place.umount();
}

/// A signal has all synced at once: what was lost was told to it, and by no one else, and the command that served said that all was well.
#[test]
fn mount_in_the_foreground_that_is_asked_to_end_tells_what_was_lost() {
    let Some(mut place) = Place::new(true) else { return };
    let memory = Memory::with_image(&mut place, "100M");
    let mut command = place.command(PROGRAM);
    command.args(["mount", "-f", "-o", "commit=3600,cache=8M"]);
    command.args([&place.image, &place.directory]).stderr(Stdio::piped());
    let server = command.spawn().unwrap();
    wait_until("mounted", || place.is_mounted());
    memory.lose(&mut File::create(place.directory.join("file")).unwrap());
    place.signal("-TERM");
    let output = server.wait_with_output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("No space left"), "{said}");
    place.assert_clean();
    drop(memory);
}

/// He was told that something could not be made durable, or that the mount is busy.
#[test]
fn mount_of_another_user_is_not_unmounted_and_its_user_is_told() {
    for is_root in [true, false] {
        let Some(place) = Place::new(is_root) else { return };
        place.mount(&[]);
        for words in [&["umount"][..], &["umount", "-l"], &["umount", "-f"]] {
            let mut other = Command::new("setpriv");
            other.args(["--reuid", "1", "--regid", "1", "--clear-groups", PROGRAM]).args(words);
            let output = other.arg(&place.directory).output().unwrap();
            let said = said(&output);
            let user = if is_root { 0 } else { NOBODY };
            assert_eq!(output.status.code(), Some(4), "{said}");
            assert!(said.contains(&format!("user {user} has mounted it")), "{said}");
            assert!(place.is_mounted() && said.lines().count() == 1, "{said}");
        }
        place.umount();
    }
}

/// The directory's kind was handed to the kernel as that of the filesystem's top, and nobody could use or unmount it.
#[test]
fn file_in_the_place_of_a_directory_is_not_mounted_on() {
    for is_root in [true, false] {
        let Some(mut place) = Place::new(is_root) else { return };
        let file = place.image.with_file_name("file");
        fs::write(&file, b"kept").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        place.directory = file.clone();
        for words in [&["mount"][..], &["mount", "-f"], &["mount", "-o", "fakeroot"]] {
            let output = place.run(words, &[&place.image, &file]);
            let said = said(&output);
            assert_eq!(output.status.code(), Some(4), "{words:?}: {said}");
            assert!(said.contains("not a directory") && said.lines().count() == 1, "{said}");
            assert!(!place.is_mounted());
        }
        let nothing = file.with_file_name("nothing");
        let output = place.run(&["mount"], &[&place.image, &nothing]);
        assert!(said(&output).contains("No such file"), "{}", said(&output));
        assert_eq!(fs::read(&file).unwrap(), b"kept");
    }
}

/// It told the one that is mounted.
#[test]
fn default_subvolume_is_that_of_the_filesystem_whatever_is_mounted() {
    let Some(place) = Place::new(true) else { return };
    for name in ["/a", "/b"] {
        place.done(&["subvolume", "create"], &[&place.image, Path::new(name)]);
    }
    for default in ["/", "/b"] {
        place.done(&["subvolume", "set-default"], &[&place.image, Path::new(default)]);
        let asked = |words: &[&str], place_of: &Path| {
            place.done(&[&["subvolume", "get-default"], words].concat(), &[place_of])
        };
        let expected = [asked(&[], &place.image), asked(&["--json"], &place.image)];
        for options in ["rw", "subvol=a", "subvolid=5"] {
            place.mount(&["-o", options]);
            let top = &place.directory;
            assert_eq!([asked(&[], top), asked(&["--json"], top)], expected, "{options}");
            place.umount();
        }
    }
}

/// What becomes of attributes of such names, each a line.
fn fate_of_names(top: &Path) -> String {
    let path = top.join("file");
    fs::write(&path, b"").unwrap();
    let long = |len: usize| format!("user.{}", "a".repeat(len - 5));
    let mut fates = String::new();
    for name in [
        "btrfs.foo",
        "btrfs.",
        "btrfs.compression",
        "btrfs.compression.x",
        "user.",
        "security.",
        "trusted.",
        "user.x",
        "security.x",
        "trusted.x",
        "system.",
        "system.foo",
        "system.posix_acl_access.x",
        "foo",
        "user",
        "foo.bar",
        &long(255),
        &long(256),
    ] {
        let value = b"zlib";
        let mut buffer = [0; 4096];
        let mut fate = |what: &str, done: rustix::io::Result<()>| {
            let done = done.map_or_else(|errno| format!("{errno:?}"), |()| "done".to_owned());
            fates.push_str(&format!("{name}: {what}: {done}\n"));
        };
        fate("set", setxattr(&path, name, value, XattrFlags::empty()));
        fate("get", getxattr(&path, name, &mut buffer).map(drop));
        let len = listxattr(&path, &mut buffer).unwrap();
        let listed = buffer[..len].split(|byte| *byte == 0).any(|one| one == name.as_bytes());
        fate(if listed { "listed" } else { "not listed" }, Ok(()));
        fate("replace", setxattr(&path, name, value, XattrFlags::REPLACE));
        fate("remove", removexattr(&path, name));
        fate("replace what is gone", setxattr(&path, name, value, XattrFlags::REPLACE));
        fate("create", setxattr(&path, name, value, XattrFlags::CREATE));
        fate("create again", setxattr(&path, name, value, XattrFlags::CREATE));
    }
    fates
}

/// Such names were stored, and Linux neither showed nor removed them.
#[test]
fn names_of_attributes_that_linux_refuses_are_refused() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let ours = fate_of_names(&place.directory);
    place.umount();
    place.assert_clean();
    place.done(&["mkfs", "-f"], &[&place.image]);
    let kernel = KernelMount::read_write(&place.image, "");
    let theirs = fate_of_names(kernel.path());
    let differ: Vec<_> = ours.lines().zip(theirs.lines()).filter(|(a, b)| a != b).collect();
    assert!(differ.is_empty(), "ours, the kernel's: {differ:#?}");
}

/// It was refused beside `relatime`.
#[test]
fn reads_note_no_access_to_directories_where_that_is_asked_for() {
    const OLD: i64 = 1_580_608_922;
    for is_root in [true, false] {
        for (options, notes) in [
            ("relatime,nodiratime", [true, false]),
            ("nodiratime,relatime", [true, false]),
            ("nodiratime,diratime,relatime", [true, true]),
            ("noatime,diratime", [false, false]),
            ("nodiratime", [false, false]),
        ] {
            let Some(place) = Place::new(is_root) else { return };
            place.mount(&[]);
            shell(
                &place,
                "cd \"$2\"; mkdir dir; echo file >file; touch -a -d @1580608922 file dir",
            );
            place.umount();
            place.mount(&["-o", options]);
            shell(&place, "cd \"$2\"; cat file; ls dir");
            place.umount();
            let kernel = KernelMount::read_only(&place.image, "noatime");
            let noted = ["file", "dir"]
                .map(|name| fs::metadata(kernel.path().join(name)).unwrap().atime() > OLD);
            kernel.unmount();
            assert_eq!(noted, notes, "{options}");
        }
    }
}

/// fusermount3 knows no such word, and its message says nothing of who can have it.
#[test]
fn restriction_that_root_alone_can_have_is_refused_to_others_in_words_of_ours() {
    let Some(place) = Place::new(false) else { return };
    let output = place.run(&["mount", "-o", "nosymfollow"], &[&place.image, &place.directory]);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.starts_with("ubtrfs: ") && said.contains("root alone"), "{said}");
    assert!(!place.is_mounted());
    place.mount(&["-o", "nosymfollow,symfollow"]);
    place.umount();
}

/// The process in the background kept them open, and with them others' locks and pipes.
#[test]
fn process_that_serves_keeps_nothing_open_of_who_mounted() {
    for is_root in [true, false] {
        let Some(place) = Place::new(is_root) else { return };
        let lock = place.image.with_file_name("lock");
        fs::write(&lock, b"").unwrap();
        fs::set_permissions(&lock, fs::Permissions::from_mode(0o666)).unwrap();
        let said = shell(
            &place,
            "lock=${1%/*}/lock
            exec 8>\"$lock\" 9<\"$lock\" 7>>\"$lock\"
            flock -n 8
            \"$3\" mount \"$1\" \"$2\"
            exec 8>&- 9<&- 7>&-
            flock -n \"$lock\" echo free",
        );
        assert_eq!(said, "free\n");
        let server = place.server();
        let open = fs::read_dir(format!("/proc/{server}/fd")).unwrap();
        let open: Vec<PathBuf> =
            open.filter_map(|one| fs::read_link(one.ok()?.path()).ok()).collect();
        assert!(!open.contains(&lock), "{open:?}");
        place.umount();
        // One that is named is handed on.
        shell(
            &place,
            "exec 8<>\"$1\"
            \"$3\" mount /dev/fd/8 \"$2\"
            echo written >\"$2/file\"
            exec 8>&-
            \"$3\" umount \"$2\"",
        );
        assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]), "written\n");
        place.assert_clean();
    }
}

/// What mount(8) hands over is `-o` alone.
#[test]
fn other_devices_and_partitions_are_named_by_options_too() {
    let Some(place) = Place::new(true) else { return };
    let images = ["first", "second", "third"].map(|name| place.image.with_file_name(name));
    MkfsBtrfs::new().size_bytes(256 << 20).options("-d raid0 -m raid1").make_on(&images);
    let devices: Vec<String> =
        images[1..].iter().map(|image| format!("device={}", image.display())).collect();
    let top = &place.directory;
    let run = |options: &str, image: &Path| {
        let output = place.run(&["mount", "-o", options], &[image, top]);
        (output.status.code(), said(&output))
    };
    let is_mounted = |options: &str, image: &Path| {
        let (code, said) = run(options, image);
        assert_eq!(code, Some(0), "{options}: {said}");
    };
    assert_ne!(run("rw", &images[0]).0, Some(0));
    is_mounted(&devices.join(","), &images[0]);
    fs::write(top.join("file"), Prng::new(1).bytes(3 << 20)).unwrap();
    place.umount();
    let kernel = KernelMount::mount(&images, "ro", true).unwrap();
    assert!(fs::read(kernel.path().join("file")).unwrap() == Prng::new(1).bytes(3 << 20));
    kernel.unmount();

    let disk = place.image.with_file_name("disk");
    File::create(&disk).unwrap().set_len(510 << 20).unwrap();
    let table = "printf 'label: gpt\\n2048,512000\\n514048,512000\\n' | sfdisk -q \"$0\"";
    assert!(Command::new("sh").args(["-c", table]).arg(&disk).status().unwrap().success());
    for number in ["1", "2"] {
        place.done(&["mkfs", "--partition", number], &[&disk]);
        let name = format!("/in {number}");
        place.done(&["mkdir", "--partition", number], &[&disk, Path::new(&name)]);
    }
    let names = || -> Vec<_> {
        fs::read_dir(top).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    };
    for (options, name) in [
        ("partition=1", "in 1"),
        ("ro,partition=2", "in 2"),
        ("offset=1048576", "in 1"),
        ("offset=251M", "in 2"),
    ] {
        is_mounted(options, &disk);
        assert_eq!(names(), [name], "{options}");
        place.umount();
    }
    for bad in
        ["partition=0", "partition=x", "partition", "offset=x", "device", "partition=1,offset=1M"]
    {
        let (code, said) = run(bad, &disk);
        assert_eq!(code, Some(2), "{bad}: {said}");
    }
    // The flag and the word are one thing.
    let output = place.run(&["mount", "--partition", "1", "-o", "offset=1M"], &[&disk, top]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));

    is_mounted("partition=1", &disk);
    let output = place.run(&["ls", "--partition", "2"], &[&disk, Path::new("/")]);
    let told = said(&output);
    assert!(!output.status.success() && told.contains("another partition"), "{told}");
    place.umount();
}

/// The second mount of one image was refused with no word of how else two of its subvolumes are had.
#[test]
fn second_mount_of_an_image_is_refused_with_a_way_to_have_it() {
    let Some(place) = Place::new(true) else { return };
    place.done(&["subvolume", "create"], &[&place.image, Path::new("/sub")]);
    place.mount(&["-o", "subvolid=5"]);
    let second = place.image.with_file_name("second");
    fs::create_dir(&second).unwrap();
    let output = place.run(&["mount", "-o", "subvol=sub"], &[&place.image, &second]);
    let told = said(&output);
    assert!(!output.status.success() && told.contains("mount --bind"), "{told}");
    assert!(told.contains(&place.directory.display().to_string()), "{told}");
    place.umount();
}

/// What the kernel refuses with `-o fakeroot`, of files that are recorded as another's, is done under fakeroot(1) beside it: all but lists.
#[test]
fn programs_that_the_kernel_refuses_run_by_fakeroot() {
    if !oracle::require(Oracle::Fakeroot) {
        return;
    }
    let Some(place) = Place::new(false) else { return };
    let script = "
        mine=$(mktemp -d)
        trap 'rm -r \"$mine\"' EXIT
        cd \"$mine\"
        echo program >program
        chmod 640 program
        \"$3\" mount -o fakeroot \"$1\" \"$2\"
        install -m 755 program \"$2/refused\" 2>/dev/null && echo taken
        fakeroot sh -ec '
            install -m 4755 -o daemon program \"$1/installed\"
            cp -p program \"$1/copied\"
            chown 5:6 \"$1/copied\"
            cp -a \"$1/copied\" \"$1/again\"
            rsync -aA \"$1/again\" \"$1/synced\"
        ' sh \"$2\"
        fakeroot setfacl -m u:daemon:r \"$2/installed\" 2>/dev/null && echo taken
        \"$3\" umount \"$2\"";
    assert_eq!(shell(&place, script), "");
    place.assert_clean();
    let kernel = KernelMount::read_only(&place.image, "");
    let about = |name: &str| {
        let metadata = fs::symlink_metadata(kernel.path().join(name)).unwrap();
        format!("{}:{} {:o}", metadata.uid(), metadata.gid(), metadata.mode() & 0o7777)
    };
    let all = ["installed", "copied", "again", "synced"].map(about);
    assert_eq!(all, ["1:0 4755", "5:6 640", "5:6 640", "5:6 640"]);
}

/// With `-o fakeroot` the kernel refuses what sets access control lists; inside of a user namespace all that `make install` does is done.
#[test]
fn programs_that_set_lists_run_as_root_of_a_user_namespace() {
    let Some(place) = Place::new(false) else { return };
    place.done(&["chown"], &[&place.image, Path::new("0:0"), Path::new("/")]);
    let script = "
        mine=$(mktemp -d)
        trap 'rm -r \"$mine\"' EXIT
        cd \"$mine\"
        mkdir tree
        echo program >tree/program
        chmod 755 tree/program
        ln -s program tree/link
        setfacl -m g:$(id -g):r tree/program
        cat >inside <<'END'
            \"$3\" mount \"$1\" \"$2\"
            cp -a tree \"$2\"
            cp -p tree/program \"$2/copy\"
            cd \"$2\"
            install -d usr/bin
            install -m 4755 -o root -g root \"$OLDPWD/tree/program\" usr/bin/program
            setfacl -d -m g:0:rx usr
            setfacl -m u:0:rw tree/program
            sed -i s/program/edited/ tree/program
            mkdir tar
            tar --acls -c tree | tar --acls -x -p -C tar
            cd /
            \"$3\" umount \"$2\"
END
        unshare -Urm sh -e inside \"$1\" \"$2\" \"$3\"
        \"$3\" mount -o fakeroot \"$1\" \"$2\"
        cp -r tree \"$2/by fakeroot\"
        tar -c tree | tar -x -p -C \"$2/by fakeroot\"
        install -m 755 tree/program \"$2/refused\" 2>/dev/null && echo taken
        setfacl -m u:0:rw \"$2/usr/bin/program\" 2>/dev/null && echo taken
        \"$3\" umount \"$2\"";
    assert_eq!(shell(&place, script), "");
    place.assert_clean();
    let kernel = KernelMount::read_only(&place.image, "");
    let about = |name: &str| {
        let metadata = fs::symlink_metadata(kernel.path().join(name)).unwrap();
        format!("{}:{} {:o}", metadata.uid(), metadata.gid(), metadata.mode() & 0o7777)
    };
    assert_eq!(about("usr/bin/program"), "0:0 4755");
    assert_eq!(about("tree/link"), "0:0 777");
    let lists = |name: &str| {
        let mut command = Command::new("getfacl");
        command.args(["-c", "-n", "-p", "--omit-header"]).arg(kernel.path().join(name));
        String::from_utf8_lossy(&command.output().unwrap().stdout).into_owned()
    };
    for name in ["tree/program", "tar/tree/program"] {
        assert!(lists(name).contains("user:0:rw-\n"), "{name}: {}", lists(name));
    }
    for name in ["tree/program", "copy"] {
        assert!(lists(name).contains("group:0:r--\n"), "{name}: {}", lists(name));
    }
    assert!(lists("usr").contains("default:group:0:r-x\n"), "{}", lists("usr"));
    let edited = fs::read_to_string(kernel.path().join("tree/program")).unwrap();
    assert_eq!(edited, "edited\n");
}
