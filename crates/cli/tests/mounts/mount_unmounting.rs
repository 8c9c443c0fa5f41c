//! How a mount ends: whatever its directory and its image are called by then, and whatever has become of the filesystem.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::place::{Memory, Place, assert_image_clean, wait_until};
use ubtrfs_testkit::oracle::{self, Oracle};

fn said(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Each sync told of the commit that had failed, and `umount` went no further, however often it was asked.
#[test]
fn mount_whose_filesystem_has_stopped_is_unmounted_and_that_is_told() {
    for has_socket in [true, false] {
        let Some(mut place) = Place::new(true) else { return };
        let memory = Memory::new(&place, "100M");
        place.image = memory.directory.join("image");
        File::create(&place.image).unwrap().set_len(512 << 20).unwrap();
        place.done(&["mkfs"], &[&place.image]);
        place.mount(&["-o", "commit=3600"]);
        fs::write(place.directory.join("before"), b"before").unwrap();
        place.done(&["filesystem", "sync"], &[&place.directory]);
        memory.fill();
        for number in 0..2000 {
            fs::write(place.directory.join(format!("file {number}")), b"lost").unwrap();
        }
        // What is not written yet is told of, and does not stop it.
        wait_until("stopped", || {
            let output = place.run(&["filesystem", "sync"], &[&place.directory]);
            assert!(!output.status.success());
            said(&output).contains("stopped") || said(&output).contains("aborted")
        });
        memory.free();
        if !has_socket {
            let device = rustix::fs::stat(&place.directory).unwrap().st_dev;
            let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
            fs::remove_file(format!("/run/ubtrfs/{major}:{minor}.control")).unwrap();
        }
        let output = place.run(&["umount"], &[&place.directory]);
        let code = output.status.code().unwrap();
        let said = said(&output);
        assert!((3..6).contains(&code) && said.contains("the filesystem had stopped"), "{said}");
        assert!(!place.is_mounted());
        File::open(&place.image).unwrap().try_lock().expect("the image is still in use");
        assert_image_clean(&place.image);
        assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/before")]), "before");
        drop(memory);
    }
}

/// A place whose directory lies in another, which can be renamed.
fn nested(is_root: bool) -> Option<Place> {
    let mut place = Place::new(is_root)?;
    let parent = place.image.with_file_name("parent");
    fs::create_dir(&parent).unwrap();
    let directory = parent.join("a b");
    fs::rename(&place.directory, &directory).unwrap();
    place.directory = directory;
    Some(place)
}

fn rename_parent(place: &mut Place) {
    let parent = place.directory.parent().unwrap().to_owned();
    let renamed = parent.with_file_name("renamed");
    fs::rename(&parent, &renamed).unwrap();
    place.directory = renamed.join("a b");
}

/// The process that serves looked for its directory by the name that it had when it was mounted: commands that have the kernel write,
/// `umount` among them, failed, and SIGTERM did nothing.
#[test]
fn mount_whose_directory_has_another_name_by_now_is_synced_and_unmounted() {
    for is_root in [true, false] {
        for options in ["commit=3600", "commit=3600,writeback"] {
            let Some(mut place) = nested(is_root) else { return };
            place.mount(&["-o", options]);
            rename_parent(&mut place);
            let write = |name: &str| {
                let path = place.directory.join(name);
                let script = format!("printf written >'{}'", path.display());
                assert!(place.command("sh").args(["-c", &script]).status().unwrap().success());
            };
            write("synced");
            place.done(&["filesystem", "sync"], &[&place.directory]);
            place.done(
                &["subvolume", "snapshot"],
                &[&place.directory, Path::new("/"), Path::new("/copy")],
            );
            // Another directory by the old name is none of the mount's.
            fs::create_dir_all(place.image.with_file_name("parent").join("a b")).unwrap();
            write("unmounted");
            place.umount();
            assert!(!place.is_mounted());
            fs::remove_dir_all(place.image.with_file_name("parent")).unwrap();
            for name in ["/synced", "/copy/synced", "/unmounted"] {
                assert_eq!(place.done(&["cat"], &[&place.image, Path::new(name)]), "written");
            }
            fs::rename(place.directory.parent().unwrap(), place.image.with_file_name("parent"))
                .unwrap();
            place.directory = place.image.with_file_name("parent").join("a b");
            place.mount(&["-o", options]);
            rename_parent(&mut place);
            let mut file = None;
            if is_root {
                let mut open = File::create(place.directory.join("told to end")).unwrap();
                open.write_all(b"written").unwrap();
                file = Some(open);
            }
            place.signal("-TERM");
            wait_until("taken off", || !place.is_mounted());
            drop(file);
            wait_until("ended", || File::open(&place.image).unwrap().try_lock().is_ok());
            if is_root {
                let name = Path::new("/told to end");
                assert_eq!(place.done(&["cat"], &[&place.image, name]), "written");
            }
            place.assert_clean();
        }
    }
}

/// Work that is not over when a mount is taken off its directory.
fn give_work(place: &Place) {
    let name = Path::new("/sub");
    place.done(&["subvolume", "create"], &[&place.directory, name]);
    let script =
        "cd \"$0/sub\" && perl -e 'for (1 .. 500) { open(F, \">\", $_); print F \"x\" x 5000 }'";
    let mut shell = place.command("sh");
    assert!(shell.args(["-c", script]).arg(&place.directory).status().unwrap().success());
    place.done(&["subvolume", "delete"], &[&place.directory, name]);
}

/// What becomes of an image's name while it is mounted.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Name {
    Changes,
    IsTaken,
    IsHidden,
    IsNoText,
}

/// The server was waited for by the lock of what is found by the image's name: not at all where that is another file by now, or nothing. A
/// name that is no text was another one in the table of mounts, and SIGTERM did nothing.
#[test]
fn umount_waits_for_who_serves_whatever_the_image_is_called_by_now() {
    for is_root in [true, false] {
        for name in [Name::Changes, Name::IsTaken, Name::IsHidden, Name::IsNoText] {
            let Some(mut place) = Place::new(is_root) else { return };
            let scratch = place.image.parent().unwrap().to_owned();
            let before = match name {
                Name::IsNoText => scratch.join(OsStr::from_bytes(b"im\xff, a\\g\ne")),
                Name::IsHidden => place.directory.join("image"),
                Name::Changes | Name::IsTaken => place.image.clone(),
            };
            fs::rename(&place.image, &before).unwrap();
            place.image = before.clone();
            let image = File::open(&place.image).unwrap();
            for round in 0..3 {
                place.mount(&["-o", "commit=3600"]);
                give_work(&place);
                let now = scratch.join("another name");
                if matches!(name, Name::Changes | Name::IsTaken) {
                    fs::rename(&before, &now).unwrap();
                }
                if name == Name::IsTaken {
                    fs::write(&before, b"another file").unwrap();
                }
                place.umount();
                assert!(!place.is_mounted());
                image.try_lock().unwrap_or_else(|error| panic!("{name:?}, {round}: {error}"));
                image.unlock().unwrap();
                if matches!(name, Name::Changes | Name::IsTaken) {
                    fs::rename(&now, &before).unwrap();
                }
            }
            if name == Name::IsNoText {
                place.mount(&[]);
                let output = place.run(&["ls"], &[&place.image]);
                assert!(said(&output).contains("It is mounted on"), "{output:?}");
                let server = ubtrfs_volume::lock_holder(&place.image).unwrap().to_string();
                assert!(Command::new("kill").args(["-TERM", &server]).status().unwrap().success());
                wait_until("taken off", || !place.is_mounted());
                wait_until("ended", || image.try_lock().is_ok());
                image.unlock().unwrap();
            }
            place.assert_clean();
        }
    }
}

/// Nothing was unmounted where statx(2) is not there (Linux before 5.8), or is forbidden, nor was it when its server was told to end.
#[test]
fn mount_is_taken_off_where_the_system_does_not_tell_by_statx_what_it_is() {
    if !oracle::require(Oracle::Strace) {
        return;
    }
    let Some(place) = Place::new(true) else { return };
    let without_statx = |error: &str, words: &[&str], paths: &[&Path]| {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-o", "/dev/null", "-e", "trace=statx", "-e"]);
        strace.arg(format!("inject=statx:error={error}"));
        strace.arg(env!("CARGO_BIN_EXE_ubtrfs")).args(words).args(paths);
        strace.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for error in ["ENOSYS", "EPERM", "EACCES"] {
        for words in [&["umount"][..], &["umount", "-l"], &["umount", "-f"]] {
            place.mount(&[]);
            let output = without_statx(error, words, &[&place.directory]);
            let output = output.wait_with_output().unwrap();
            assert!(output.status.success(), "{error}, {words:?}: {}", said(&output));
            assert!(!place.is_mounted(), "{error}, {words:?}");
            wait_until("ended", || File::open(&place.image).unwrap().try_lock().is_ok());
        }
    }
    place.mount(&[]);
    let words = ["mount", "-o", "remount,ro"];
    let remount = without_statx("ENOSYS", &words, &[&place.image, &place.directory]);
    let output = remount.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    place.umount();
    let mut serving = without_statx("ENOSYS", &["mount", "-f"], &[&place.image, &place.directory]);
    wait_until("mounted", || place.is_mounted());
    let server = ubtrfs_volume::lock_holder(&place.image).unwrap().to_string();
    // It says so before it takes requests, and handles signals by then.
    fs::read_dir(&place.directory).unwrap().for_each(drop);
    assert!(Command::new("kill").args(["-TERM", &server]).status().unwrap().success());
    wait_until("taken off", || !place.is_mounted());
    assert!(serving.wait().unwrap().success());
    place.assert_clean();
}

/// Who unmounts locks the image to see that it is free, and whoever wanted it in that moment was refused at once.
#[test]
fn next_opener_waits_for_who_unmounts_and_looks_whether_the_image_is_free() {
    for is_root in [true, false] {
        for words in [["ubtrfs", "umount"], ["umount.fuse", "image"]] {
            let Some(place) = Place::new(is_root) else { return };
            let scratch = place.image.parent().unwrap();
            symlink(&place.image, scratch.join("umount")).unwrap();
            // By another name it is a process that has the image locked as long as is wanted.
            let mut locker = Command::new("flock");
            locker.arg0(words[0]).args([words[1], "cat"]).current_dir(scratch);
            let mut locker = locker.stdin(Stdio::piped()).spawn().unwrap();
            let holder = || ubtrfs_volume::lock_holder(&place.image);
            wait_until("locked", || holder() == Some(locker.id()));
            let mut opener = place.command(env!("CARGO_BIN_EXE_ubtrfs"));
            let mut opener = opener.arg("ls").arg(&place.image).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(opener.try_wait().unwrap(), None, "it waits, {words:?}");
            drop(locker.stdin.take());
            assert!(opener.wait().unwrap().success(), "{words:?}");
            assert!(locker.wait().unwrap().success());
        }
    }
}
