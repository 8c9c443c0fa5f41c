//! A directory with every odd kind of file.
//!
//! What a filesystem or its user's rights do not allow is left out, and named in what is returned.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use ubtrfs_ondisk::hash::name_hash;

use crate::Prng;

/// What was left out, each with the reason.
#[derive(Clone, Debug, Default)]
pub struct OddFiles {
    /// A line each.
    pub left_out: Vec<String>,
}

/// Fills a directory, which must be empty, with every odd kind of file. The same seed gives the
/// same contents.
///
/// # Panics
/// If what every filesystem can do fails.
pub fn odd_files(directory: &Path, seed: u64) -> OddFiles {
    let mut maker = Maker {
        root: directory.to_owned(),
        prng: Prng::new(seed),
        report: OddFiles::default(),
        is_root: rustix::process::geteuid().is_root(),
    };
    maker.sizes();
    maker.sparse();
    maker.names();
    maker.colliding_names();
    maker.hard_links();
    maker.symlinks();
    maker.special();
    maker.modes_and_owners();
    maker.xattrs();
    maker.acls();
    maker.deep();
    maker.wide();
    // Last, as making entries changes the times of their directory.
    maker.times();
    maker.report
}

/// Pairs of names whose directory items have one key, as their hashes are equal.
///
/// # Panics
/// If 400,000 names hold no such pair, which cannot be.
pub fn colliding_names(count: usize) -> Vec<(String, String)> {
    colliding("", count)
}

fn colliding(prefix: &str, count: usize) -> Vec<(String, String)> {
    // Many bits must differ between names: the hash is linear, few bits never collide.
    let mut prng = Prng::new(0xc011_1de5);
    let mut seen = HashMap::new();
    let mut pairs = Vec::new();
    for _ in 0..400_000 {
        let name = format!("{prefix}{:016x}", prng.next_u64());
        if let Some(first) = seen.insert(name_hash(name.as_bytes()), name.clone()) {
            pairs.push((first, name));
            if pairs.len() == count {
                return pairs;
            }
        }
    }
    panic!("only {} pairs", pairs.len());
}

/// An access control list in the form of `system.posix_acl_access`: (tag, permissions, id) each.
pub fn acl_xattr(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    bytes
}

/// A capability in the form of `security.capability`: CAP_NET_BIND_SERVICE, permitted and
/// effective (version 2).
pub fn capability_xattr() -> Vec<u8> {
    let words: [u32; 5] = [0x0200_0001, 1 << 10, 0, 0, 0];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

const ACL_USER_OBJ: u16 = 0x01;
const ACL_USER: u16 = 0x02;
const ACL_GROUP_OBJ: u16 = 0x04;
const ACL_GROUP: u16 = 0x08;
const ACL_MASK: u16 = 0x10;
const ACL_OTHER: u16 = 0x20;
const NO_ID: u32 = u32::MAX;

struct Maker {
    root: PathBuf,
    prng: Prng,
    report: OddFiles,
    is_root: bool,
}

impl Maker {
    fn directory(&self, name: &str) -> PathBuf {
        let path = self.root.join(name);
        fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        path
    }

    fn leave_out(&mut self, what: &str, why: Errno) {
        self.report.left_out.push(format!("{what}: {why}"));
    }

    fn try_to(&mut self, what: &str, outcome: Result<(), Errno>) {
        if let Err(error) = outcome {
            self.leave_out(what, error);
        }
    }

    /// Lengths around every border: inline, sector, compression and extent.
    fn sizes(&mut self) {
        let directory = self.directory("sizes");
        let lengths = [
            0, 1, 2, 100, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 8193, 16_384, 65_535,
            65_536, 131_071, 131_072, 131_073, 1_048_577,
        ];
        for len in lengths {
            write(&directory.join(format!("random-{len}")), &self.prng.bytes(len));
            write(&directory.join(format!("text-{len}")), &self.prng.text(len));
            write(&directory.join(format!("zeros-{len}")), &vec![0; len]);
        }
        // Bytes that change their nature: some extents compress and some do not.
        let mut mixed = Vec::new();
        for part in 0..24 {
            let len = 40_000 + self.prng.index(60_000);
            mixed.extend(if part % 2 == 0 { self.prng.text(len) } else { self.prng.bytes(len) });
        }
        write(&directory.join("mixed"), &mixed);
    }

    fn sparse(&mut self) {
        let directory = self.directory("sparse");
        let block = 65_536;
        let files: [(&str, u64, &[u64]); 7] = [
            ("only-hole", 10 * block, &[]),
            ("hole-of-one-byte", 1, &[]),
            ("hole-first", 4 * block, &[3]),
            ("hole-last", 4 * block, &[0]),
            ("hole-between", 9 * block, &[0, 2, 4, 8]),
            ("unaligned-end", 4 * block + 1234, &[1, 3]),
            ("far", (18 << 30) + 5, &[0, 100, (17 << 30) / 65_536]),
        ];
        for (name, len, blocks) in files {
            let file = create(&directory.join(name));
            file.set_len(len).expect("a sparse file can be that long");
            for number in blocks {
                let data = self.prng.text(65_536);
                file.write_all_at(&data, number * block).expect("a block can be written");
            }
        }
        // Data at each second 4 KiB.
        let file = create(&directory.join("comb"));
        for tooth in 0..200 {
            let data = self.prng.bytes(4096);
            file.write_all_at(&data, tooth * 8192).expect("a tooth can be written");
        }
        file.set_len(200 * 8192).expect("a hole at the end");
    }

    fn names(&mut self) {
        let directory = self.directory("names");
        let long = "n".repeat(255);
        let mut names: Vec<Vec<u8>> = vec![
            long.clone().into_bytes(),
            b"a".to_vec(),
            b" leading and trailing ".to_vec(),
            b"-n".to_vec(),
            b"--help".to_vec(),
            b"...".to_vec(),
            b"..x".to_vec(),
            b"new\nline".to_vec(),
            b"tab\tand\rreturn".to_vec(),
            b"quote'\"`$(x)\\".to_vec(),
            b"star*?[]".to_vec(),
            "snow\u{2603}man \u{1F9C1} \u{e4}".as_bytes().to_vec(),
            "decomposed a\u{308}".as_bytes().to_vec(),
            b"not utf-8 \xff\xfe\x80".to_vec(),
            vec![0xff; 255],
            b"\x01\x02\x7f".to_vec(),
        ];
        // Every byte that a name may hold.
        names.push((1..=255).filter(|byte| *byte != b'/').collect());
        for name in names {
            write(&directory.join(OsStr::from_bytes(&name)), &name);
        }
        fs::create_dir(directory.join(OsStr::from_bytes(b"dir\xff"))).expect("a directory");
        fs::create_dir(directory.join("d".repeat(255))).expect("a directory");
    }

    fn colliding_names(&mut self) {
        let directory = self.directory("collisions");
        for (number, (first, second)) in colliding_names(6).iter().enumerate() {
            write(&directory.join(first), first.as_bytes());
            if number % 2 == 0 {
                write(&directory.join(second), second.as_bytes());
            } else {
                fs::create_dir(directory.join(second)).expect("a directory");
            }
        }
    }

    /// More names in one directory than fit in one item of references, so that extended ones
    /// must be used; and names in several directories.
    fn hard_links(&mut self) {
        let directory = self.directory("links");
        let first = directory.join("first");
        write(&first, &self.prng.text(10_000));
        for number in 0..150 {
            let name = format!("{number:03}-{}", "l".repeat(200));
            if let Err(error) = rustix::fs::link(&first, directory.join(name)) {
                // Without extended references the first item is all there is.
                self.leave_out(&format!("more than {number} names in a directory"), error);
                break;
            }
        }
        for number in 0..5 {
            let below = directory.join(format!("below-{number}"));
            fs::create_dir(&below).expect("a directory");
            fs::hard_link(&first, below.join("first")).expect("another name");
        }
        symlink("first", directory.join("symlink")).expect("a symbolic link");
        // A symbolic link is an inode too, and may have two names.
        let linked = rustix::fs::linkat(
            CWD,
            directory.join("symlink"),
            CWD,
            directory.join("symlink-again"),
            AtFlags::empty(),
        );
        self.try_to("two names of a symbolic link", linked);
    }

    fn symlinks(&mut self) {
        let directory = self.directory("symlinks");
        let long = "t/".repeat(2047);
        let longest = "u".repeat(4095);
        let targets: [(&str, &[u8]); 9] = [
            ("dangling", b"nowhere/at/all"),
            ("absolute", b"/etc/hostname"),
            ("up", b"../../../.."),
            ("itself", b"itself"),
            ("bytes", b"\xff\xfe not utf-8"),
            ("one", b"x"),
            ("long", long.as_bytes()),
            ("directory", b"../sizes"),
            ("longest", longest.as_bytes()),
        ];
        for (name, target) in targets {
            let made = rustix::fs::symlinkat(OsStr::from_bytes(target), CWD, directory.join(name));
            self.try_to(&format!("symlink of {} bytes", target.len()), made);
        }
    }

    fn special(&mut self) {
        let directory = self.directory("special");
        let nodes = [
            ("fifo", FileType::Fifo, 0, 0),
            ("socket", FileType::Socket, 0, 0),
            ("null", FileType::CharacterDevice, 1, 3),
            ("high-numbers", FileType::CharacterDevice, 0xfff, 0xf_ffff),
            ("whiteout", FileType::CharacterDevice, 0, 0),
            ("block", FileType::BlockDevice, 259, 300),
        ];
        for (name, kind, major, minor) in nodes {
            let device = rustix::fs::makedev(major, minor);
            let path = directory.join(name);
            let made = rustix::fs::mknodat(CWD, &path, kind, Mode::from_raw_mode(0o640), device);
            self.try_to(&format!("special file {name}"), made);
        }
    }

    fn modes_and_owners(&mut self) {
        let directory = self.directory("modes");
        for mode in [0o000, 0o400, 0o644, 0o755, 0o777, 0o1755, 0o2755, 0o4755, 0o7777] {
            let path = directory.join(format!("file-{mode:04o}"));
            write(&path, b"x");
            set_mode(&path, mode);
            let path = directory.join(format!("dir-{mode:04o}"));
            fs::create_dir(&path).expect("a directory");
            set_mode(&path, if self.is_root { mode } else { mode | 0o500 });
        }
        for (uid, gid) in [(1, 2), (1000, 1000), (65_534, 65_534), (4_294_967_294, 3_000_000_000)] {
            let path = directory.join(format!("owned-by-{uid}"));
            write(&path, b"y");
            let owned = chown(&path, uid, gid);
            self.try_to(&format!("owner {uid}"), owned);
        }
        let path = directory.join("owned-symlink");
        symlink("x", &path).expect("a symbolic link");
        let owned = chown(&path, 7, 8);
        self.try_to("owner of a symbolic link", owned);
    }

    fn xattrs(&mut self) {
        let directory = self.directory("xattrs");
        let file = directory.join("many");
        write(&file, b"many attributes");
        for number in 0..40 {
            let value = self.prng.bytes(number * 3);
            self.set(&file, &format!("user.number-{number}"), &value);
        }
        let file = directory.join("odd-names");
        write(&file, b"");
        self.set(&file, "user.empty", b"");
        self.set(&file, &format!("user.{}", "x".repeat(250)), b"long name");
        self.set(&file, "user.\u{e4} \u{2603}", b"\0binary\xff");
        self.set(&file, "trusted.overlay.opaque", b"y");
        self.set(&file, "security.anything", b"label\0");
        for (name, len) in [("large", 3000), ("larger", 12_000)] {
            let file = directory.join(name);
            write(&file, b"");
            let value = self.prng.bytes(len);
            self.set(&file, "user.large", &value);
        }
        let file = directory.join("capability");
        write(&file, b"#!/bin/true\n");
        set_mode(&file, 0o755);
        self.set(&file, "security.capability", &capability_xattr());
        let below = directory.join("directory");
        fs::create_dir(&below).expect("a directory");
        self.set(&below, "user.of-a-directory", b"value");
        let link = directory.join("symlink");
        symlink("many", &link).expect("a symbolic link");
        self.set(&link, "trusted.of-a-symlink", b"value");
        // Two attributes whose items have one key.
        let file = directory.join("collisions");
        write(&file, b"");
        for (first, second) in colliding("user.", 3) {
            self.set(&file, &first, b"first");
            self.set(&file, &second, b"second");
        }
    }

    fn set(&mut self, path: &Path, name: &str, value: &[u8]) {
        let set = rustix::fs::lsetxattr(path, name, value, XattrFlags::empty());
        self.try_to(&format!("{} {} bytes", name.escape_debug(), value.len()), set);
    }

    fn acls(&mut self) {
        let directory = self.directory("acls");
        let access = acl_xattr(&[
            (ACL_USER_OBJ, 6, NO_ID),
            (ACL_USER, 4, 1000),
            (ACL_USER, 7, 1001),
            (ACL_GROUP_OBJ, 4, NO_ID),
            (ACL_GROUP, 6, 2000),
            (ACL_MASK, 6, NO_ID),
            (ACL_OTHER, 0, NO_ID),
        ]);
        let file = directory.join("file");
        write(&file, b"guarded");
        self.set(&file, "system.posix_acl_access", &access);
        let below = directory.join("directory");
        fs::create_dir(&below).expect("a directory");
        self.set(&below, "system.posix_acl_access", &access);
        self.set(&below, "system.posix_acl_default", &access);
    }

    /// Deeper than a path may be long.
    fn deep(&mut self) {
        let mut at = open_directory(&self.directory("deep"));
        for level in 0..40 {
            let name = format!("{level:02}-{}", "d".repeat(130));
            rustix::fs::mkdirat(&at, &name, Mode::from_raw_mode(0o755)).expect("a directory");
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            at = rustix::fs::openat(&at, &name, flags, Mode::empty()).expect("the directory");
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&at, "bottom", flags, Mode::from_raw_mode(0o644))
            .expect("a file at the bottom");
        rustix::io::write(&file, b"reached\n").expect("the file can be written");
    }

    /// More entries than a leaf holds.
    fn wide(&mut self) {
        let directory = self.directory("wide");
        for number in 0..1500 {
            let len = self.prng.index(60);
            write(&directory.join(format!("entry-{number}")), &self.prng.bytes(len));
        }
        fs::create_dir(directory.join("empty")).expect("a directory");
    }

    fn times(&mut self) {
        let directory = self.directory("times");
        let times = [
            ("epoch", 0, 0),
            ("one-nanosecond", 0, 1),
            ("before-epoch", -2, 500_000_000),
            ("year-1901", -2_147_483_648, 0),
            ("sub-second", 1_234_567_890, 123_456_789),
            ("last-nanosecond", 1_600_000_000, 999_999_999),
            ("after-2038", 4_294_967_296, 5),
            ("year-2446", 15_032_385_535, 999_999_999),
        ];
        for (name, sec, nsec) in times {
            let path = directory.join(name);
            write(&path, name.as_bytes());
            let set = set_times(&path, sec, nsec);
            self.try_to(&format!("time {sec}.{nsec}"), set);
        }
        let path = directory.join("directory");
        fs::create_dir(&path).expect("a directory");
        let set = set_times(&path, 1_000_000_001, 7);
        self.try_to("times of a directory", set);
        let path = directory.join("symlink");
        symlink("epoch", &path).expect("a symbolic link");
        let set = set_times(&path, 1_000_000_002, 8);
        self.try_to("times of a symbolic link", set);
        let root = self.root.clone();
        let set = set_times(&directory, 1_000_000_003, 9)
            .and_then(|()| set_times(&root, 1_000_000_004, 10));
        self.try_to("times of directories that hold something", set);
    }
}

fn create(path: &Path) -> File {
    File::create(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn write(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

fn open_directory(path: &Path) -> OwnedFd {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).expect("a directory")
}

fn set_mode(path: &Path, mode: u32) {
    rustix::fs::chmod(path, Mode::from_raw_mode(mode)).expect("a mode can be set");
}

fn chown(path: &Path, uid: u32, gid: u32) -> Result<(), Errno> {
    let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    rustix::fs::chownat(CWD, path, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
}

fn set_times(path: &Path, sec: i64, nsec: i64) -> Result<(), Errno> {
    let time = Timespec { tv_sec: sec, tv_nsec: nsec };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)
}
