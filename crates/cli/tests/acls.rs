//! Access control lists set by the command, judged by the kernel, which does the same.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use support::{Ran, assert_judged, ubtrfs_in};
use tempfile::TempDir;
use ubtrfs_testkit::odd::acl_xattr;
use ubtrfs_testkit::{KernelMount, Oracle, oracle};

const JUDGES: [Oracle; 2] = [Oracle::KernelBtrfs, Oracle::BtrfsProgs];
const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";
const NONE: u32 = u32::MAX;
const PATHS: [&str; 4] = ["file", "dir", "dir/below", "plain"];

/// What a step does to which path: sets this value of the attribute, or removes it.
type Step<'a> = (&'a str, &'a str, Option<Vec<u8>>);

fn image_with_files(directory: &TempDir) {
    for words in [
        &["mkfs", "-q", "--size", "300M", "disk.img"][..],
        &["touch", "disk.img", "/file", "/plain"],
        &["mkdir", "disk.img", "/dir"],
        &["mkdir", "disk.img", "/dir/below"],
        &["ln", "-s", "disk.img", "file", "/link"],
    ] {
        ubtrfs_in(directory.path(), words).ok();
    }
}

fn setfattr(directory: &TempDir, words: &[&str]) -> Ran {
    let words = ["setfattr"].iter().chain(words);
    ubtrfs_in(directory.path(), words)
}

fn hexadecimal(value: &[u8]) -> String {
    value.iter().fold("0x".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

/// What the kernel says of a path: its access list, the one for new files in it, its permissions.
type Shown = (&'static str, [Option<Vec<u8>>; 2], u32);

fn shown(root: &Path) -> Vec<Shown> {
    let list = |path: &Path, name: &str| {
        let mut value = vec![0; 1 << 12];
        let len = rustix::fs::getxattr(path, name, &mut value[..]);
        match len {
            Ok(len) => Some(value[..len].to_vec()),
            Err(rustix::io::Errno::NODATA) => None,
            Err(error) => panic!("{name} of {}: {error}", path.display()),
        }
    };
    let of = |name: &'static str| {
        let path = root.join(name);
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        (name, [ACCESS, DEFAULT].map(|which| list(&path, which)), mode)
    };
    PATHS.into_iter().map(of).collect()
}

fn by_us(directory: &TempDir, steps: &[Step<'_>]) {
    for (path, name, value) in steps {
        let path = format!("/{path}");
        match value {
            Some(value) => {
                let value = hexadecimal(value);
                setfattr(directory, &["-n", name, "-v", &value, "disk.img", &path]).ok()
            }
            None => setfattr(directory, &["-x", name, "disk.img", &path]).ok(),
        };
    }
}

fn by_the_kernel(root: &Path, steps: &[Step<'_>]) {
    for (path, name, value) in steps {
        let path = root.join(path);
        match value {
            Some(value) => {
                rustix::fs::setxattr(&path, *name, value, rustix::fs::XattrFlags::empty())
            }
            None => rustix::fs::removexattr(&path, *name),
        }
        .unwrap_or_else(|error| panic!("{name} of {}: {error}", path.display()));
    }
}

#[test]
fn acls_set_and_removed_are_what_the_kernel_makes_of_the_same() {
    if !oracle::require_all(&JUDGES) {
        return;
    }
    let named = acl_xattr(&[
        (1, 6, NONE),
        (2, 7, 77),
        (4, 5, NONE),
        (8, 2, 88),
        (0x10, 3, NONE),
        (0x20, 1, NONE),
    ]);
    // It says no more than permissions can, and becomes them.
    let minimal = acl_xattr(&[(1, 7, NONE), (4, 4, NONE), (0x20, 0, NONE)]);
    let empty = acl_xattr(&[]);
    let steps: &[&[Step<'_>]] = &[
        &[
            ("file", ACCESS, Some(named.clone())),
            ("dir", ACCESS, Some(named.clone())),
            ("dir", DEFAULT, Some(named.clone())),
            ("dir/below", DEFAULT, Some(minimal.clone())),
            ("plain", ACCESS, Some(minimal.clone())),
        ],
        // Lists that are replaced, taken away, or were never there.
        &[
            ("file", ACCESS, None),
            ("dir", ACCESS, Some(minimal)),
            ("dir", DEFAULT, None),
            ("dir/below", DEFAULT, Some(empty.clone())),
            ("dir/below", ACCESS, Some(named)),
            ("plain", ACCESS, None),
            ("plain", DEFAULT, None),
        ],
        &[("dir/below", ACCESS, Some(empty))],
    ];
    let directory = tempfile::tempdir().unwrap();
    image_with_files(&directory);
    let image = directory.path().join("disk.img");
    let twin = directory.path().join("twin.img");
    fs::copy(&image, &twin).unwrap();
    for steps in steps {
        by_us(&directory, steps);
        let mount = KernelMount::read_write(&twin, "");
        by_the_kernel(mount.path(), steps);
        let expected = shown(mount.path());
        mount.unmount();
        let mount = KernelMount::read_only(&image, "");
        assert_eq!(shown(mount.path()), expected);
        mount.unmount();
        assert_judged(&image);
    }
}

#[test]
fn acl_as_getfattr_shows_it_is_taken_back() {
    let directory = tempfile::tempdir().unwrap();
    image_with_files(&directory);
    let list =
        acl_xattr(&[(1, 6, NONE), (2, 7, 77), (4, 5, NONE), (0x10, 7, NONE), (0x20, 1, NONE)]);
    let value = hexadecimal(&list);
    setfattr(&directory, &["-n", ACCESS, "-v", &value, "disk.img", "/file"]).ok();
    let words = ["getfattr", "-d", "-m", "-", "disk.img", "/file"];
    let shown = ubtrfs_in(directory.path(), words).ok();
    assert_eq!(shown.text(), format!("# file: /file\n{ACCESS}={value}\n\n"));
}

#[test]
fn acls_malformed_are_refused_and_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    image_with_files(&directory);
    let generation = || {
        let words = ["inspect", "super", "--json", "disk.img"];
        ubtrfs_in(directory.path(), words).ok().json()[0]["generation"].clone()
    };
    let before = generation();
    let good = hexadecimal(&acl_xattr(&[(1, 6, NONE), (4, 5, NONE), (0x20, 1, NONE)]));
    let unmasked = acl_xattr(&[(1, 6, NONE), (2, 7, 77), (4, 5, NONE), (0x20, 1, NONE)]);
    for (value, says) in [
        ("u:77:rwx", "version"),
        ("0x02", "cut off"),
        ("0x03000000", "version"),
        (&good[..good.len() - 2], "cut off"),
        (&hexadecimal(&unmasked), "no mask"),
        (&hexadecimal(&acl_xattr(&[(1, 6, NONE)])), "owning group"),
        (&hexadecimal(&acl_xattr(&[(1, 9, NONE), (4, 5, NONE), (0x20, 1, NONE)])), "rwx"),
    ] {
        for name in [ACCESS, DEFAULT] {
            let ran = setfattr(&directory, &["-n", name, "-v", value, "disk.img", "/dir"]);
            ran.fails(4).says(says).says("getfattr -e hex").says("/dir");
        }
    }
    let ran = setfattr(&directory, &["-n", DEFAULT, "-v", &good, "disk.img", "/file"]);
    ran.fails(4).says("only a directory");
    let ran = setfattr(&directory, &["-h", "-n", ACCESS, "-v", &good, "disk.img", "/link"]);
    ran.fails(4).says("symbolic link");
    setfattr(&directory, &["-h", "-x", ACCESS, "disk.img", "/link"]).fails(4).says("symbolic link");
    assert_eq!(generation(), before);
}
