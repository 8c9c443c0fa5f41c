//! A mount whose image the kernel mounts as well: no lock keeps a loop device out.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::place::{Place, server_of, wait_until};
use rustix::io::Errno;
use ubtrfs_testkit::KernelMount;

fn said(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The kernel mounts the image, writes a file, and unmounts. What is written after that comes when the server looks again: on a fast machine all
/// of it is done in the 50 ms that the server does not, of which nothing is promised.
fn kernel_writes(image: &Path) {
    let mount = KernelMount::read_write(image, "");
    fs::write(mount.path().join("kernel"), "the kernel's\n".repeat(10_000)).unwrap();
    let output = Command::new("sync").arg("-f").arg(mount.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    mount.unmount();
    std::thread::sleep(Duration::from_millis(100));
}

/// What the kernel wrote is whole, nothing else is there, and the image can be mounted and changed again.
#[track_caller]
fn assert_is_the_kernels(place: &Place, names: &[&str]) {
    File::open(&place.image).unwrap().lock_shared().unwrap();
    place.assert_clean();
    assert_eq!(
        place.done(&["cat"], &[&place.image, Path::new("/kernel")]),
        "the kernel's\n".repeat(10_000)
    );
    let listed = place.done(&["ls"], &[&place.image, Path::new("/")]);
    assert_eq!(listed.split_whitespace().collect::<Vec<_>>(), names);
    place.mount(&[]);
    fs::write(place.directory.join("again"), "again").unwrap();
    place.umount();
    place.assert_clean();
    place.done(&["rm"], &[&place.image, Path::new("/again")]);
}

/// A place that is mounted and holds a file on the medium, at which each kind of write is tried.
fn mounted() -> Option<Place> {
    let place = Place::new(true)?;
    place.mount(&["-o", "commit=3600"]);
    let file = File::create(place.directory.join("before")).unwrap();
    let status = Command::new("chattr").arg("+C").arg(place.directory.join("before")).status();
    assert!(status.unwrap().success());
    (&file).write_all(&vec![b'b'; 1 << 20]).unwrap();
    file.sync_all().unwrap();
    place.done(&["filesystem", "sync"], &[&place.directory]);
    Some(place)
}

/// Waits until nobody has written to the image for a while.
fn wait_until_still(image: &Path) {
    let written = || fs::metadata(image).unwrap().modified().unwrap();
    let (mut last, mut since) = (written(), Instant::now());
    while since.elapsed() < Duration::from_millis(500) {
        std::thread::sleep(Duration::from_millis(20));
        if written() != last {
            (last, since) = (written(), Instant::now());
        }
    }
}

/// Who serves looked for a mount of the kernel's only as he wrote, and compared the superblock only before he wrote his own: data and
/// tree blocks went over what the kernel had committed meanwhile. The umount then said that nothing had been written, and the image
/// was lost.
#[test]
fn what_the_kernel_wrote_meanwhile_is_left_when_the_mount_is_unmounted() {
    for len in [600 << 10, 48 << 20] {
        let Some(place) = mounted() else { return };
        let begun = Instant::now();
        fs::write(place.directory.join("a"), vec![b'a'; len]).unwrap();
        // What the server still writes as the kernel mounts is not promised to be safe.
        wait_until_still(&place.image);
        kernel_writes(&place.image);
        let output = place.run(&["umount"], &[&place.directory]);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(4), "{text}");
        assert!(text.contains("something else has written to it"), "{text}");
        assert!(text.contains("what was not committed here is lost"), "{text}");
        // A short file is in memory until it is old. Of a long one the server has written some, and not looked since.
        if len < 1 << 20 && begun.elapsed() < Duration::from_secs(4) {
            assert!(text.contains("nothing was written over that"), "{text}");
        }
        assert_is_the_kernels(&place, &["before", "kernel"]);
    }
}

/// Each way in which what is written comes to the medium: data by fsync, direct writes, in place, by a command, with a commit.
#[test]
fn what_the_kernel_wrote_meanwhile_is_left_whatever_is_written_next() {
    type Write = fn(&Place) -> Result<(), String>;
    let writes: [(&str, Write); 6] = [
        ("fsync", |place| {
            let file = File::options().append(true).open(place.directory.join("a"));
            file.and_then(|file| file.sync_all()).map_err(|error| error.to_string())
        }),
        ("fsync of the directory", |place| {
            let file = File::open(&place.directory);
            file.and_then(|file| file.sync_all()).map_err(|error| error.to_string())
        }),
        ("in place", |place| {
            let file = File::options().write(true).open(place.directory.join("before")).unwrap();
            (&file).write_all(&[b'c'; 256 << 10]).map_err(|error| error.to_string())?;
            file.sync_all().map_err(|error| error.to_string())
        }),
        ("direct", |place| direct(&place.directory.join("direct"))),
        ("direct in place", |place| direct(&place.directory.join("before"))),
        ("snapshot", |place| {
            let paths = [&*place.directory, Path::new("/"), Path::new("/copy")];
            let output = place.run(&["subvolume", "snapshot"], &paths);
            if !output.status.success() {
                return Err(said(&output));
            }
            let output = place.run(&["filesystem", "sync"], &[&place.directory]);
            if output.status.success() { Ok(()) } else { Err(said(&output)) }
        }),
    ];
    for (name, write) in writes {
        let Some(place) = mounted() else { return };
        fs::write(place.directory.join("a"), vec![b'a'; 600 << 10]).unwrap();
        kernel_writes(&place.image);
        let refused = write(&place);
        let Err(text) = refused else { panic!("{name}: written") };
        println!("{name}: {text}");
        // It has stopped: what was committed before is shown, and nothing is taken any more.
        assert_eq!(fs::read(place.directory.join("before")).unwrap().len(), 1 << 20, "{name}");
        let error = fs::write(place.directory.join("later"), "later").unwrap_err();
        let errno = Errno::from_io_error(&error);
        assert!(matches!(errno, Some(Errno::ROFS | Errno::IO)), "{name}: {error}");
        let output = place.run(&["umount"], &[&place.directory]);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(4), "{name}: {text}");
        assert!(text.contains("something else has written to it"), "{name}: {text}");
        assert_is_the_kernels(&place, &["before", "kernel"]);
    }
}

/// Writes past the kernel's memory, to the space that a file has.
fn direct(path: &Path) -> Result<(), String> {
    let output = Command::new("dd")
        .args(["if=/dev/zero", "bs=1M", "count=1", "oflag=direct", "conv=notrunc,fsync"])
        .arg(format!("of={}", path.display()))
        .output()
        .unwrap();
    if output.status.success() { Ok(()) } else { Err(said(&output)) }
}

/// Plain umount(2) waits for no server, and a signal ends one: neither has anybody to tell, and nothing is written.
#[test]
fn what_the_kernel_wrote_meanwhile_is_left_when_the_server_ends_by_itself() {
    for how in ["umount", "term"] {
        let Some(place) = mounted() else { return };
        fs::write(place.directory.join("a"), vec![b'a'; 600 << 10]).unwrap();
        kernel_writes(&place.image);
        match how {
            "umount" => {
                // With no helper: it returns while the server writes.
                let status = Command::new("umount").arg("-i").arg(&place.directory).status();
                assert!(status.unwrap().success());
            }
            _ => place.signal("-TERM"),
        }
        wait_until("the server's end", || server_of(&place.image).is_empty());
        assert_is_the_kernels(&place, &["before", "kernel"]);
    }
}

/// A mount of the kernel's that reads and writes nothing is in nobody's way, once it has ended.
#[test]
fn mount_goes_on_after_the_kernel_has_only_read() {
    let Some(place) = mounted() else { return };
    fs::write(place.directory.join("a"), vec![b'a'; 600 << 10]).unwrap();
    let mount = KernelMount::read_only(&place.image, "rescue=nologreplay");
    assert_eq!(fs::read(mount.path().join("before")).unwrap().len(), 1 << 20);
    mount.unmount();
    fs::write(place.directory.join("b"), "b").unwrap();
    place.umount();
    place.assert_clean();
    assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/a")]).len(), 600 << 10);
    assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/b")]), "b");
}
