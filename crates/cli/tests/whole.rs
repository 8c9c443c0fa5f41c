//! What fails in between leaves what was there: links, copies and files put in place of others.

mod support;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use support::{Ran, assert_judged, ubtrfs_in};
use tempfile::TempDir;
use ubtrfs_testkit::{KernelMount, Oracle, oracle, run};

const JUDGES: [Oracle; 2] = [Oracle::KernelBtrfs, Oracle::BtrfsProgs];

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        place.run(&["mkfs", "-q", "--size", "300M", "disk.img"]).ok();
        place
    }

    fn image(&self) -> PathBuf {
        self.0.path().join("disk.img")
    }

    fn run<S: AsRef<OsStr>>(&self, words: &[S]) -> Ran {
        ubtrfs_in(self.0.path(), words)
    }

    fn put(&self, path: &str, bytes: &[u8]) {
        fs::write(self.0.path().join("bytes"), bytes).unwrap();
        self.run(&["put", "disk.img", "bytes", path]).ok();
    }

    fn cat(&self, path: &str) -> Vec<u8> {
        self.run(&["cat", "disk.img", path]).ok().stdout
    }

    fn list(&self, path: &str) -> String {
        self.run(&["ls", "-A", "disk.img", path]).ok().text().to_owned()
    }

    /// On a mount of the kernel's, which sets flags that we do not set.
    fn chattr(&self, flag: &str, paths: &[&str]) {
        let mount = KernelMount::read_write(&self.image(), "");
        let paths = paths.iter().map(|path| mount.path().join(path).into_os_string());
        run("chattr", [OsStr::new(flag).to_owned()].into_iter().chain(paths));
        mount.unmount();
    }

    fn assert_clean(&self) {
        assert_judged(&self.image());
    }
}

/// `ln -f` removed what had the name before it knew whether the link could be made, and what was
/// done until then was committed: the old file was gone, and nothing in its place.
#[test]
fn ln_force_that_fails_leaves_what_was_there() {
    if !oracle::require_all(&JUDGES) {
        return;
    }
    let place = Place::new();
    place.run(&["subvolume", "create", "disk.img", "/sub"]).ok();
    place.run(&["mkdir", "disk.img", "/dir"]).ok();
    for path in ["/a", "/old", "/sub/old", "/fixed", "/appended"] {
        place.put(path, path.as_bytes());
    }
    place.chattr("+i", &["fixed"]);
    place.chattr("+a", &["appended"]);
    let long = "x".repeat(5000);
    let cases: [(&[&str], i32, &str); 8] = [
        (&["-f", "disk.img", "/a", "/sub/old"], 4, "different subvolumes"),
        (&["-f", "disk.img", "/dir", "/old"], 4, "it is a directory"),
        (&["-f", "disk.img", "/fixed", "/old"], 4, "immutable"),
        (&["-f", "disk.img", "/a", "/fixed"], 4, "immutable"),
        (&["-f", "disk.img", "/a", "/appended"], 4, "appended"),
        (&["-sf", "disk.img", "", "/old"], 2, "leads somewhere"),
        (&["-sf", "disk.img", &long, "/old"], 4, "too long"),
        (&["-sf", "disk.img", "/a", "/fixed"], 4, "immutable"),
    ];
    for (words, code, says) in cases {
        let words: Vec<&str> = ["ln"].iter().chain(words).copied().collect();
        place.run(&words).fails(code).says(says);
        for path in ["/a", "/old", "/sub/old", "/fixed", "/appended"] {
            assert_eq!(place.cat(path), path.as_bytes(), "{words:?}");
        }
        assert_eq!(place.list("/"), "a\nappended\ndir\nfixed\nold\nsub\n", "{words:?}");
        assert_eq!(place.list("/sub"), "old\n", "{words:?}");
    }
    place.run(&["ln", "-f", "disk.img", "/a", "/old"]).ok();
    place.run(&["ln", "-f", "disk.img", "/a", "/old"]).ok();
    place.run(&["ln", "-sf", "disk.img", "a", "/sub/old"]).ok();
    place.run(&["ln", "-sf", "disk.img", "b", "/sub/old"]).ok();
    assert_eq!(place.cat("/old"), b"/a");
    assert_eq!(place.list("/"), "a\nappended\ndir\nfixed\nold\nsub\n");
    assert_eq!(place.list("/sub"), "old\n");
    place.assert_clean();
}

/// `reflink` cut DEST to nothing before it asked whether data can be shared at all; `cp` wrote into
/// what it had cut, or named already, and a source that could not be read left half a copy.
#[test]
fn copy_that_fails_leaves_what_was_there() {
    if !oracle::require_all(&JUDGES) {
        return;
    }
    let place = Place::new();
    place.run(&["mkdir", "disk.img", "/plain", "/bare"]).ok();
    place.chattr("+C", &["bare"]);
    let data: Vec<u8> = (0..8_u32 << 20).map(|at| (at / 4096 % 251) as u8 | 1).collect();
    place.put("/data", &data);
    place.put("/bare/old", b"old");
    place.run(&["ln", "disk.img", "/bare/old", "/bare/old2"]).ok();
    place.put("/bare/single", b"single");
    place.put("/plain/old", b"old");

    // One file has checksums, the other has none.
    for dest in ["/bare/old", "/bare/single"] {
        let ran = place.run(&["reflink", "disk.img", "/data", dest]);
        ran.fails(4).says("checksums").says("ubtrfs cp");
    }
    place.run(&["reflink", "disk.img", "/data", "/bare/new"]).fails(4).says("checksums");
    place.run(&["reflink", "disk.img", "/bare/old", "/plain/old"]).fails(4).says("checksums");
    let check = || {
        assert_eq!(place.cat("/bare/old"), b"old");
        assert_eq!(place.cat("/bare/old2"), b"old");
        assert_eq!(place.cat("/bare/single"), b"single");
        assert_eq!(place.cat("/plain/old"), b"old");
        assert_eq!(place.list("/bare"), "old\nold2\nsingle\n");
        assert_eq!(place.list("/plain"), "old\n");
    };
    check();

    // Into a file without checksums the bytes are copied: damage is met in the middle of them.
    let rows = place.run(&["inspect", "fiemap", "--json", "disk.img", "/data"]).ok().json();
    let at = rows[0]["places"][0]["offset"].as_u64().unwrap();
    let image = File::options().read(true).write(true).open(place.image()).unwrap();
    let mut was = [0; 6];
    image.read_exact_at(&mut was, at + (5 << 20)).unwrap();
    image.write_all_at(b"damage", at + (5 << 20)).unwrap();
    for dest in ["/bare/old", "/bare/single", "/bare/new"] {
        place.run(&["cp", "disk.img", "/data", dest]).fails(3);
        check();
    }
    image.write_all_at(&was, at + (5 << 20)).unwrap();
    drop(image);

    for dest in ["/bare/old", "/bare/single", "/bare/new"] {
        place.run(&["cp", "disk.img", "/data", dest]).ok();
    }
    assert!(place.cat("/bare/old") == data && place.cat("/bare/single") == data);
    assert!(place.cat("/bare/old2") == data, "names of one file stay names of one file");
    place.run(&["reflink", "disk.img", "/data", "/plain/old"]).ok();
    assert!(place.cat("/plain/old") == data);
    assert_eq!(place.list("/bare"), "new\nold\nold2\nsingle\n");
    place.assert_clean();
}

/// `put` gave the new file a second name to take over from the old file with; where that could not
/// go, each try left one more `.ubtrfs-0` with the whole file in it.
#[test]
fn put_over_what_cannot_go_leaves_no_other_name() {
    if !oracle::require_all(&JUDGES) {
        return;
    }
    let place = Place::new();
    place.run(&["mkdir", "disk.img", "/log"]).ok();
    place.put("/fixed", b"fixed");
    place.put("/log/old", b"old");
    place.chattr("+i", &["fixed"]);
    place.chattr("+a", &["log"]);
    fs::write(place.0.path().join("new"), "new").unwrap();
    for _ in 0..2 {
        place.run(&["put", "disk.img", "new", "/fixed"]).fails(4).says("immutable");
        place.run(&["put", "disk.img", "new", "/log/old"]).fails(4).says("appended");
    }
    place.run(&["put", "disk.img", "new", "/log"]).ok();
    assert_eq!(place.list("/"), "fixed\nlog\n");
    assert_eq!(place.list("/log"), "new\nold\n");
    assert_eq!((place.cat("/fixed"), place.cat("/log/old")), (b"fixed".into(), b"old".into()));
    place.assert_clean();
}
