//! Requests of `linux/btrfs.h` and `linux/fs.h` through a mount.

#[path = "support/mounted.rs"]
mod mounted;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use mounted::Mounted;
use ubtrfs_testkit::{Compare, KernelMount, MkfsBtrfs};

/// A request of `linux/btrfs.h` at a directory or file, with the struct that `pack` of Perl makes of `words`; what comes back.
fn ioctl(path: &Path, number: u32, pack: &str, words: &str) -> Result<Vec<u8>, String> {
    let script = format!(
        "open(F, '<', $ARGV[0]) or die $!; open(S, '<', $ARGV[1]) or die $!; my $b = pack('{pack}', {words}); \
         ioctl(F, {number}, $b) or die $!; print $b"
    );
    // What S stands for: the subvolume, once it is there.
    let source = [path.join("source"), path.to_owned()].into_iter().find(|path| path.exists());
    let source = source.unwrap();
    let output = Command::new("perl").arg("-e").arg(script).arg(path).arg(source).output().unwrap();
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// The default subvolume of the last commit, as `btrfs` reads it beside the mount.
fn default_in(image: &Path) -> u64 {
    let mut command = Command::new("btrfs");
    command.args(["inspect-internal", "dump-tree", "-t", "root"]).arg(image);
    let output = command.output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    // `location key (256 ROOT_ITEM -1) type DIR`, two lines above the name.
    let lines: Vec<&str> = shown.lines().map(str::trim).collect();
    let name = lines.iter().position(|line| *line == "name: default");
    let before = &lines[..name.unwrap_or_else(|| panic!("{shown}"))];
    let place = before.iter().rev().find_map(|line| line.strip_prefix("location key ("));
    let number = place.and_then(|place| place.split(' ').next()).unwrap();
    if number == "FS_TREE" { 5 } else { number.parse().unwrap() }
}

/// Subvolumes and the label by ioctl, as the kernel's btrfs takes them.
#[test]
fn subvolumes_by_ioctl_are_made_snapshotted_and_deleted() {
    let Some(mut mounted) = Mounted::new() else { return };
    let top = mounted.directory.clone();
    let (server, _) = mounted.server.as_ref().unwrap();
    let table = fs::read("/proc/self/mountinfo").unwrap();
    let table = String::from_utf8_lossy(&table);
    let line = table.lines().find(|line| line.contains(top.to_str().unwrap())).unwrap();
    server.set_device(line.split(' ').nth(2).unwrap());
    let done = |path: &Path, number, pack: &str, words: &str| {
        ioctl(path, number, pack, words).unwrap_or_else(|error| panic!("{number:#x}: {error}"))
    };
    assert!(!top.join("source").exists());
    done(&top, 0x5000_940e, "q a4088", "0, 'source'");
    fs::write(top.join("source/file"), "one").unwrap();
    // Writable, by version 1, and read-only, by version 2.
    let inside = top.join("source");
    assert!(!top.join("writable").exists() && !top.join("fixed").exists());
    done(&top, 0x5000_9401, "q a4088", "fileno(S), 'writable'");
    done(&top, 0x5000_9417, "q Q Q Q4 a4040", "fileno(S), 0, 2, 0, 0, 0, 0, 'fixed'");
    assert_eq!(fs::read(top.join("fixed/file")).unwrap(), b"one");
    fs::write(top.join("writable/file"), "two").unwrap();
    let refused = fs::write(top.join("fixed/file"), "two").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(30));
    assert!(done(&top.join("fixed"), 0x8008_9419, "Q", "0").starts_with(&2_u64.to_ne_bytes()));
    done(&top.join("fixed"), 0x4008_941a, "Q", "0");
    fs::write(top.join("fixed/file"), "three").unwrap();
    // Which subvolume a file is in.
    let said = done(&inside, 0xd000_9412, "Q Q a4080", "0, 256, ''");
    assert_eq!(u64::from_ne_bytes(said[..8].try_into().unwrap()), 256);
    // By version 2, too; flags that are not known here are refused.
    let v2 = "q Q Q Q4 a4040";
    done(&top, 0x5000_9418, v2, "0, 0, 0, 0, 0, 0, 0, 'brief'");
    assert!(top.join("brief").is_dir());
    done(&top, 0x5000_943f, v2, "0, 0, 0, 0, 0, 0, 0, 'brief'");
    assert!(!top.join("brief").exists());
    assert!(ioctl(&top, 0x5000_943f, v2, "0, 0, 8, 0, 0, 0, 0, 'x'").is_err());
    for (number, expected) in [("256", 256), ("0", 5)] {
        done(&top, 0x4008_9413, "Q", number);
        assert_eq!(default_in(&mounted.image), expected, "{number}");
    }
    done(&top, 0x4100_9432, "a256", "'by ioctl'");
    assert!(done(&top, 0x8100_9431, "a256", "''").starts_with(b"by ioctl\0"));
    for (path, number, pack, words, why) in [
        (&top, 0x5000_940e, "q a4088", "0, 'source'", "File exists"),
        (&top, 0x5000_940e, "q a4088", "0, 'a/b'", "Invalid argument"),
        (&top, 0x5000_940e, "q a4088", "0, ''", "Permission denied"),
        (&top, 0x5000_940f, "q a4088", "0, 'nothing'", "No such file"),
        (&top, 0x5000_9401, "q a4088", "77, 'x'", "Bad file descriptor"),
        (&top, 0x5000_9401, "q a4088", "0, 'x'", ""),
        (&top, 0x5000_9417, "q Q Q Q4 a4040", "fileno(S), 0, 1, 0, 0, 0, 0, 'x'", "not supported"),
        (&top, 0x4100_9432, "a256", "'x' x 256", "Invalid argument"),
        (&inside, 0x5000_941f, "a4096", "''", "Inappropriate ioctl"),
    ] {
        let said = ioctl(path, number, pack, words).unwrap_err();
        assert!(said.contains(why), "{number:#x} {words}: {said}");
    }
    // Who has not mounted it may change nothing; what is no request of btrfs is none for him, too.
    for (number, why) in [(0x5000_940e_u32, "not permitted"), (0x5401, "Inappropriate ioctl")] {
        let script = format!(
            "open(F, '<', $ARGV[0]) or die $!; my $b = pack('q a4088', 0, 'x'); ioctl(F, {number}, $b) or die $!"
        );
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "perl", "-e"]);
        let output = command.arg(script).arg(&inside).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(why), "{number:#x}: {said}");
    }
    done(&top, 0x5000_940f, "q a4088", "0, 'writable'");
    // What is in a directory of a subvolume, for who may not search trees.
    fs::create_dir_all(inside.join("deep/er")).unwrap();
    done(&inside.join("deep/er"), 0x5000_940e, "q a4088", "0, 'low'");
    let children = |path: &Path| done(path, 0xd000_943d, "Q a4088", "0, ''");
    let found = children(&inside);
    let word = |at: usize| u64::from_ne_bytes(found[at * 8..][..8].try_into().unwrap());
    let (low, dir) = (word(1), word(2));
    assert_eq!((found[4088], word(0)), (1, low + 1));
    assert_eq!(children(&inside.join("deep/er/low"))[4088], 0);
    let place_of = |path: &Path, dir: u64, child: u64| {
        let said = done(path, 0xd000_943e, "Q Q a4080", &format!("{dir}, {child}, ''"));
        let until_zero = |bytes: &[u8]| bytes.split(|byte| *byte == 0).next().unwrap().to_vec();
        [until_zero(&said[16..272]), until_zero(&said[272..])]
    };
    let from = ["source", "source/deep/er"].map(|name| place_of(&top.join(name), dir, low));
    assert_eq!(from[0], [&b"low"[..], b"deep/er/"]);
    for (words, why) in [
        (format!("257, {low}, ''"), "Invalid argument"),
        (format!("{dir}, 999, ''"), "No such file"),
    ] {
        let said = ioctl(&inside, 0xd000_943e, "Q Q a4080", &words).unwrap_err();
        assert!(said.contains(why), "{words}: {said}");
    }
    let names: BTreeSet<_> =
        fs::read_dir(&top).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["fixed", "source"].map(Into::into).into());
    assert!(!top.join("writable/file").exists());
    // An attribute flag by the form of xfs, which leaves those alone that it does not know.
    let file = inside.join("file");
    done(&file, 0x401c_5820, "L5 x8", "0x40, 0, 0, 0, 0");
    let said = done(&file, 0x801c_581f, "x28", "");
    assert_eq!(u32::from_ne_bytes(said[..4].try_into().unwrap()), 0x40);
    assert!(
        ioctl(&file, 0x401c_5820, "L5 x8", "0, 0, 0, 7, 0").unwrap_err().contains("not supported")
    );
    let info = |path: &Path| done(path, 0x81f8_943c, "a504", "''");
    fs::File::open(&top).unwrap().sync_all().unwrap();
    let ours = ["source/file", "fixed"].map(|name| info(&top.join(name)));
    let ours_of = ["", "source"].map(|name| children(&top.join(name)));
    mounted.judge_by(&Compare { inodes: false, subvolumes: false, ..Compare::same_filesystem() });
    // Who asks of a subvolume is told the same by the kernel.
    let kernel = KernelMount::read_only(&mounted.image, "");
    for (name, ours) in ["source/file", "fixed"].iter().zip(ours) {
        let theirs = info(&kernel.path().join(name));
        assert!(ours == theirs, "{name}: {ours:?}, {theirs:?}");
    }
    let theirs_of = ["", "source"].map(|name| children(&kernel.path().join(name)));
    assert!(ours_of == theirs_of);
    let theirs =
        ["source", "source/deep/er"].map(|name| place_of(&kernel.path().join(name), dir, low));
    assert_eq!(from, theirs);
}

/// `lsattr -v` asks for it with room for an int.
#[test]
fn generation_by_ioctl_same_as_the_kernel_says() {
    const GET_VERSION: u32 = 0x8008_7601;
    let Some(mut mounted) = Mounted::new() else { return };
    let names = ["", "file", "dir", "later"];
    fs::write(mounted.path("file"), "one").unwrap();
    fs::create_dir(mounted.path("dir")).unwrap();
    fs::File::open(&mounted.directory).unwrap().sync_all().unwrap();
    fs::write(mounted.path("later"), "one").unwrap();
    // What is behind the int stays as it is.
    let said_in = |top: &Path| {
        let said = |name| ioctl(&top.join(name), GET_VERSION, "l l", "7, 7").unwrap();
        names.map(|name| said(name)[..8].to_vec())
    };
    let ours = said_in(&mounted.directory);
    assert!(ours[1] == ours[2] && ours[1] != ours[3], "{ours:?}");
    mounted.judge();
    let kernel = KernelMount::read_only(&mounted.image, "");
    assert_eq!(ours, said_in(kernel.path()));
}

/// A mount of the kernel's, of a new filesystem.
fn kernels(directory: &Path) -> KernelMount {
    let image = directory.join("image");
    MkfsBtrfs::new().size_bytes(256 << 20).make(&image);
    KernelMount::read_write(&image, "")
}

fn create_subvolume(dir: &Path, name: &str) {
    ioctl(dir, 0x5000_940e, "q a4088", &format!("0, '{name}'")).unwrap();
}

fn number_of_subvolume(top: &Path) -> u64 {
    let said = ioctl(top, 0xd000_9412, "Q Q a4080", "0, 256, ''").unwrap();
    u64::from_ne_bytes(said[..8].try_into().unwrap())
}

fn names_in(dir: &Path) -> BTreeSet<OsString> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

/// As libbtrfsutil and `btrfs subvolume delete -i` do. It was refused as a flag that is not known.
#[test]
fn subvolumes_are_deleted_by_number_as_the_kernel_deletes_them() {
    const DELETE_V2: u32 = 0x5000_943f;
    const SET_DEFAULT: u32 = 0x4008_9413;
    let Some(mut mounted) = Mounted::new() else { return };
    let directory = tempfile::tempdir().unwrap();
    let kernel = kernels(directory.path());
    let by = |top: &Path| {
        fs::create_dir(top.join("dir")).unwrap();
        for (dir, name) in [
            ("", "one"),
            ("", "two"),
            ("dir", "deep"),
            ("", "default"),
            ("", "holds"),
            ("holds", "low"),
        ] {
            create_subvolume(&top.join(dir), name);
        }
        fs::write(top.join("dir/deep/file"), "gone with it").unwrap();
        let number = |name: &str| number_of_subvolume(&top.join(name));
        let default = number("default");
        ioctl(top, SET_DEFAULT, "Q", &default.to_string()).unwrap();
        let (one, low) = (number("one"), number("holds/low"));
        // Wherever in the filesystem who asks is.
        [
            ("", 16, one),
            ("", 16, one),
            ("two", 16, number("dir/deep")),
            ("", 16, default),
            ("", 16, number("holds")),
            ("dir", 16, low),
            ("", 16, number("holds")),
            ("", 16, 0),
            ("", 16, 5),
            ("", 16, 255),
            ("", 16, 9999),
            ("", 16, u64::MAX),
            ("", 17, number("two")),
        ]
        .map(|(place, flags, number)| {
            let words = format!("0, 0, {flags}, 0, 0, 0, 0, {number}");
            let said = ioctl(&top.join(place), DELETE_V2, "q Q Q Q4 Q x4032", &words);
            let names = [names_in(top), names_in(&top.join("dir"))];
            (place, flags, said.map(drop), names)
        })
    };
    let (ours, theirs) = (by(&mounted.directory), by(kernel.path()));
    for (number, (ours, theirs)) in ours.into_iter().zip(theirs).enumerate() {
        assert_eq!(ours, theirs, "{number} (ours | the kernel's)");
    }
    assert_eq!(names_in(&mounted.directory), ["default", "dir", "two"].map(Into::into).into());
    ioctl(&mounted.directory, SET_DEFAULT, "Q", "0").unwrap();
    mounted.judge_by(&Compare { inodes: false, subvolumes: false, ..Compare::same_filesystem() });
}

/// Root of a container, say, that was given a directory of the mount: he may make subvolumes, and not name the filesystem. In a user namespace
/// of his own he has the right, there, and was taken for who may administer the machine.
#[test]
fn root_without_the_right_to_administer_is_refused_what_the_kernel_refuses_him() {
    let Some(mut mounted) = Mounted::new() else { return };
    let directory = tempfile::tempdir().unwrap();
    let kernel = kernels(directory.path());
    let by = |top: &Path| {
        for name in ["one", "two", "three"] {
            create_subvolume(top, name);
        }
        let one = number_of_subvolume(&top.join("one"));
        let (v1, v2) = ("q a4088", "q Q Q Q4 a4040");
        let mut said = Vec::new();
        for (round, namespace) in
            [&[][..], &["unshare", "--user", "--map-root-user"]].into_iter().enumerate()
        {
            for (number, pack, words) in [
                (0x4100_9432_u32, "a256", "'by nobody'".to_owned()),
                (0x4008_9413, "Q", one.to_string()),
                (0x5000_940f, v1, "0, 'one'".to_owned()),
                (0x5000_943f, v2, "0, 0, 0, 0, 0, 0, 0, 'two'".to_owned()),
                (0x5000_943f, "q Q Q Q4 Q x4032", format!("0, 0, 16, 0, 0, 0, 0, {one}")),
                (0x5000_940e, v1, format!("0, 'made {round}'")),
                (0x5000_9418, v2, format!("0, 0, 0, 0, 0, 0, 0, 'made too {round}'")),
            ] {
                let script = format!(
                    "open(F, '<', $ARGV[0]) or die $!; my $b = pack('{pack}', {words}); ioctl(F, {number}, $b) or die $!"
                );
                let mut command = Command::new("setpriv");
                command.args(["--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]);
                command.args(namespace).args(["perl", "-e", &script]).arg(top);
                let output = command.output().unwrap();
                said.push((number, String::from_utf8_lossy(&output.stderr).into_owned()));
            }
        }
        said
    };
    let (ours, theirs) = (by(&mounted.directory), by(kernel.path()));
    assert_eq!(ours, theirs, "(ours | the kernel's)");
    for ours in ours.chunks(7) {
        assert!(ours[..5].iter().all(|(_, said)| said.contains("not permitted")), "{ours:?}");
        assert!(ours[5..].iter().all(|(_, said)| said.is_empty()), "{ours:?}");
    }
    let made = ["made 0", "made 1", "made too 0", "made too 1"];
    let names = made.into_iter().chain(["one", "three", "two"]).map(Into::into).collect();
    assert_eq!(names_in(&mounted.directory), names);
    mounted.judge_by(&Compare { inodes: false, subvolumes: false, ..Compare::same_filesystem() });
}
