//! Deleted subvolumes of a mount: who has something of one open keeps it, as with the kernel's btrfs.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::place::{Place, wait_until};
use ubtrfs_testkit::KernelMount;

/// `BTRFS_IOC_SUBVOL_CREATE` and `BTRFS_IOC_SNAP_DESTROY` in the directory ARGV[0], by the name ARGV[1].
const CREATE: u32 = 0x5000_940e;
const DELETE: u32 = 0x5000_940f;

fn subvolume(request: u32, directory: &Path, name: &str) {
    let script = format!(
        "open(D, '<', $ARGV[0]) or die $!; my $b = pack('q a4088', 0, $ARGV[1]); ioctl(D, {request}, $b) or die $!"
    );
    let output = Command::new("perl").args(["-e", &script]).arg(directory).arg(name).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// A program that takes commands from its input; its errors are in its output.
fn program(words: &str, directory: &Path) -> Child {
    Command::new("stdbuf")
        .args(["-oL", "sh", "-c", &format!("exec {words} 2>&1")])
        .current_dir(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What programs find that have a file, a map of it and directories of a subvolume in use, which `delete` deletes meanwhile. It is a
/// snapshot, in which an empty directory stands for another subvolume.
fn found(top: &Path, delete: &dyn Fn()) -> Vec<String> {
    let (origin, sub) = (top.join("origin"), top.join("sub"));
    if !origin.exists() {
        subvolume(CREATE, top, "origin");
        subvolume(CREATE, &origin, "nested");
    }
    let script = "open(D, '<', $ARGV[0]) or die $!; open(S, '<', $ARGV[1]) or die $!; \
        my $b = pack('q a4088', fileno(S), 'sub'); ioctl(D, 0x50009401, $b) or die $!";
    let output = Command::new("perl").args(["-e", script]).arg(top).arg(&origin).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    fs::create_dir(sub.join("inner")).unwrap();
    fs::write(sub.join("inner/file"), "of inner").unwrap();
    let bytes: Vec<u8> =
        (0..8 << 20_u32).map(|at| b'a' + u8::try_from(at >> 12 & 15).unwrap()).collect();
    fs::write(sub.join("file"), bytes).unwrap();
    let mut with_file = program("xfs_io file", &sub);
    let mut in_directory = program("sh", &sub.join("inner"));
    let mut in_root = program("sh", &sub);
    let output = |child: &mut Child| BufReader::new(child.stdout.take().unwrap());
    let (mut file_says, mut directory_says, mut root_says) =
        (output(&mut with_file), output(&mut in_directory), output(&mut in_root));
    let mut tell_file = with_file.stdin.take().unwrap();
    let mut tell_directory = in_directory.stdin.take().unwrap();
    let mut tell_root = in_root.stdin.take().unwrap();
    // All are there when they have said something; the map has a page in memory, and most are not.
    writeln!(tell_file, "fsync\nfadvise -d 0 0\nmmap -rw 0 8m\nmread -v 0 16").unwrap();
    // Who has a file open, that is: what others had of it the kernel forgets.
    writeln!(tell_directory, "exec 3<file 4>>file; cat file; echo").unwrap();
    writeln!(tell_root, "echo").unwrap();
    let mut lines = [const { String::new() }; 3];
    file_says.read_line(&mut lines[0]).unwrap();
    directory_says.read_line(&mut lines[1]).unwrap();
    root_says.read_line(&mut lines[2]).unwrap();

    delete();
    assert!(!sub.exists());
    writeln!(
        tell_file,
        "mread -v 6m 16\nmwrite -S 0x62 6m 4096\nmsync -s 6m 4096\npread -q -v 6m 16\npread -q -v 5m 16\n\
         pwrite -q -S 0x63 0 8192\npwrite -q -S 0x64 8m 4096\nfsync\npread -q -v 8m 16\ntruncate 5000000\n\
         pread -q -v 4999990 100\nfpunch 0 4096\npread -q -v 0 16"
    )
    .unwrap();
    writeln!(
        tell_directory,
        "printf more >&4; cat <&3; echo; ls -a; mkdir made; mv file made/new; ls made; rm made/new; rmdir made; ls; stat -c %s:%h ."
    )
    .unwrap();
    // Names that are not there, and one that stands for a subvolume, the kernel would remember, and the directory with them.
    writeln!(tell_root, "ls nothing; rm -f none; ls -d nested; ls nested; echo; ls").unwrap();
    // Nothing is made in it, nor moved there, nor from there.
    let made_there =
        "ln -s to ../link; ln file ../hard; mkdir ../made; mkfifo ../made; touch ../made";
    let moved_there = "mv file ../moved; mv made ../moved; mv ../none made";
    writeln!(
        tell_directory,
        "echo >file; mkdir made; {made_there}; {moved_there}; stat -c %h file; ls .."
    )
    .unwrap();
    writeln!(tell_root, "ln -s to link; mkdir made; touch made; ls").unwrap();
    drop((tell_file, tell_directory, tell_root));
    for (line, reader) in
        lines.iter_mut().zip([&mut file_says, &mut directory_says, &mut root_says])
    {
        reader.read_to_string(line).unwrap();
    }
    with_file.wait().unwrap();
    in_directory.wait().unwrap();
    in_root.wait().unwrap();
    lines.into()
}

/// They were told ENOENT, and a map of what was not in memory ended its program by SIGBUS.
#[test]
fn deleted_subvolume_stays_for_who_uses_what_is_in_it_as_with_the_kernel() {
    let Some(place) = Place::new(true) else { return };
    let kernel = KernelMount::read_write(&place.image, "");
    let top = kernel.path();
    let expected = found(top, &|| subvolume(DELETE, top, "sub"));
    kernel.unmount();
    for how in ["ioctl", "command"] {
        place.mount(&["-o", "commit=1"]);
        let top = &place.directory;
        // Another one is in use all the time.
        subvolume(CREATE, top, "earlier");
        fs::write(top.join("earlier/file"), "still").unwrap();
        let earlier = fs::File::open(top.join("earlier/file")).unwrap();
        subvolume(DELETE, top, "earlier");
        let found = found(top, &|| match how {
            "ioctl" => subvolume(DELETE, top, "sub"),
            _ => drop(place.done(&["subvolume", "delete"], &[top, Path::new("/sub")])),
        });
        assert_eq!(found, expected, "{how}");
        // Nobody uses it any more: its turn has come.
        let what = format!("it is dropped, after {how}");
        wait_until(&what, || shown_roots(&place.image).matches("ORPHAN_ITEM").count() == 1);
        assert_eq!(std::io::read_to_string(&earlier).unwrap(), "still");
        drop(earlier);
        wait_until(&what, || !shown_roots(&place.image).contains("ORPHAN"));
        place.umount();
        place.assert_clean();
    }
}

/// The tree of roots of the last commit, as `btrfs` shows it.
fn shown_roots(image: &Path) -> String {
    let mut command = Command::new("btrfs");
    let output = command.args(["inspect-internal", "dump-tree", "-t", "root"]).arg(image).output();
    String::from_utf8_lossy(&output.unwrap().stdout).into_owned()
}

/// What is kept for a program goes with the next opener, when the server is gone: Linux, or the engine.
#[test]
fn deleted_subvolume_in_use_goes_after_the_server_is_gone() {
    for opener in ["kernel", "ours"] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", "commit=3600"]);
        let top = &place.directory;
        subvolume(CREATE, top, "sub");
        fs::write(top.join("sub/file"), vec![b'x'; 1 << 20]).unwrap();
        fs::write(top.join("other"), "stays").unwrap();
        fs::File::open(top.join("other")).unwrap().sync_all().unwrap();
        let mut file = fs::File::options().write(true).open(top.join("sub/file")).unwrap();
        place.done(&["subvolume", "delete"], &[top, Path::new("/sub")]);
        file.write_all(&[b'y'; 300_000]).unwrap();
        file.sync_all().unwrap();
        assert!(shown_roots(&place.image).contains("ORPHAN"));
        place.cut_off();
        drop(file);
        place.assert_clean();
        if opener == "kernel" {
            let mount = KernelMount::read_write(&place.image, "");
            let output =
                Command::new("btrfs").args(["subvolume", "sync"]).arg(mount.path()).output();
            assert!(output.unwrap().status.success());
            mount.unmount();
        } else {
            place.mount(&["-o", "commit=1"]);
            wait_until("it is dropped", || !shown_roots(&place.image).contains("ORPHAN"));
            place.umount();
        }
        assert!(!shown_roots(&place.image).contains("ORPHAN"), "{opener}");
        place.assert_clean();
        assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/other")]), "stays");
    }
}
