//! Edges of commands: where they go when a name ends in a slash, is a link, or is none.

mod support;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;

use support::{Ran, assert_judged, ubtrfs_in, ubtrfs_with_stdin};
use tempfile::TempDir;
use ubtrfs_ondisk::CsumType;
use ubtrfs_testkit::{
    Compare, KernelMount, Oracle, TreeSnapshot, assert_checks_clean, corpus, oracle, run,
};

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        place.run(&["mkfs", "-q", "--size", "300M", "disk.img"]).ok();
        fs::write(place.path("file"), "text\n").unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run<S: AsRef<OsStr>>(&self, words: &[S]) -> Ran {
        ubtrfs_in(self.0.path(), words)
    }

    fn batch(&self, commands: &[u8]) -> Ran {
        let image = self.path("disk.img");
        ubtrfs_with_stdin(commands, ["batch".as_ref(), image.as_os_str()])
    }

    fn assert_clean(&self) {
        assert_judged(&self.path("disk.img"));
    }

    fn list(&self, path: &str) -> String {
        self.run(&["ls", "-A", "disk.img", path]).ok().text().to_owned()
    }
}

/// `put disk.img photo.jpg /photos/` made a file named photos where the directory was missing.
#[test]
fn name_with_a_slash_behind_is_only_a_directory() {
    let place = Place::new();
    place.run(&["mkdir", "disk.img", "/dir"]).ok();
    place.run(&["put", "disk.img", "file", "/f"]).ok();
    let cases: [&[&str]; 8] = [
        &["put", "disk.img", "file", "/photos/"],
        &["cp", "disk.img", "/f", "/photos/"],
        &["reflink", "disk.img", "/f", "/photos/"],
        &["mv", "disk.img", "/f", "/photos/"],
        &["mv", "-T", "disk.img", "/f", "/photos/"],
        &["ln", "disk.img", "/f", "/photos/"],
        &["touch", "disk.img", "/photos/"],
        &["truncate", "-s", "1", "disk.img", "/photos/"],
    ];
    for words in cases {
        place.run(words).fails(4).says("no such directory");
        assert_eq!(place.list("/"), "dir\nf\n", "{words:?}");
    }
    let words = ["put", "disk.img", "-", "/photos/"].map(str::to_owned);
    let words = words.map(|word| match word.as_str() {
        "disk.img" => place.path("disk.img").into_os_string(),
        _ => word.into(),
    });
    ubtrfs_with_stdin(b"text", words).fails(4).says("no such directory");
    place.run(&["mkdir", "disk.img", "/made/"]).ok();
    place.run(&["mv", "disk.img", "/made", "/moved/"]).ok();
    place.run(&["cp", "-r", "disk.img", "/dir", "/copy/"]).ok();
    place.run(&["subvolume", "snapshot", "disk.img", "/", "/snap/"]).ok();
    place.run(&["put", "disk.img", "file", "/moved/"]).ok();
    assert_eq!(place.list("/"), "copy\ndir\nf\nmoved\nsnap\n");
    assert_eq!(place.list("/moved"), "file\n");
    place.assert_clean();
}

#[test]
fn mv_to_one_name_takes_one_source() {
    let place = Place::new();
    place.run(&["mkdir", "disk.img", "/dir"]).ok();
    place.run(&["touch", "disk.img", "/a", "/b", "/dir/a"]).ok();
    for option in ["-T", "--exchange"] {
        place.run(&["mv", option, "disk.img", "/a", "/b", "/dir"]).fails(2).says(option);
    }
    assert_eq!((place.list("/"), place.list("/dir")), ("a\nb\ndir\n".into(), "a\n".into()));
    place.assert_clean();
}

/// A usr-merged tree: /bin is a link.
#[test]
fn links_to_directories_are_listed_and_imported_through() {
    let place = Place::new();
    fs::create_dir_all(place.path("tree/usr/bin")).unwrap();
    fs::write(place.path("tree/usr/bin/tool"), "tool\n").unwrap();
    symlink("usr/bin", place.path("tree/bin")).unwrap();
    symlink("nowhere", place.path("tree/dangling")).unwrap();
    place.run(&["import", "-q", "disk.img", "tree"]).ok();
    assert_eq!(place.list("/bin"), "tool\n");
    assert_eq!(place.run(&["ls", "disk.img", "/dangling"]).ok().text(), "/dangling\n");
    assert_eq!(place.run(&["ls", "-d", "disk.img", "/bin"]).ok().text(), "/bin\n");
    let long = place.run(&["ls", "-l", "disk.img", "/bin"]).ok();
    assert!(long.text().ends_with("/bin -> usr/bin\n"), "{}", long.text());

    fs::create_dir(place.path("more")).unwrap();
    fs::write(place.path("more/other"), "other\n").unwrap();
    place.run(&["import", "-q", "disk.img", "more", "/bin"]).ok();
    place.run(&["import", "-q", "disk.img", "more", "/bin/new/er"]).ok();
    assert_eq!(place.list("/usr/bin"), "new\nother\ntool\n");
    assert_eq!(place.list("/usr/bin/new/er"), "other\n");
    place.run(&["import", "disk.img", "more", "/dangling/x"]).fails(4);
    place.assert_clean();
}

#[test]
fn what_has_no_name_of_its_own_goes_into_a_directory_or_is_refused() {
    let place = Place::new();
    place.run(&["mkdir", "-p", "disk.img", "/a/sub", "/b"]).ok();
    place.run(&["touch", "disk.img", "/a/x", "/a/sub/y"]).ok();
    place.run(&["cp", "-r", "disk.img", "/a/.", "/b"]).ok();
    assert_eq!((place.list("/b"), place.list("/b/sub")), ("sub\nx\n".into(), "y\n".into()));
    place.run(&["cp", "-r", "disk.img", "/a/.", "/a/sub"]).fails(4).says("into itself");
    place.run(&["cp", "-r", "disk.img", "/", "/b"]).fails(4).says("into itself");
    let ran = place.run(&["subvolume", "snapshot", "disk.img", "/", "/b"]);
    ran.fails(4).says("no name of its own");
    assert_eq!(place.list("/b"), "sub\nx\n");
    place.assert_clean();
}

/// The image file was longer although "Nothing was changed".
#[test]
fn batch_that_fails_leaves_the_file_as_long_as_it_was() {
    let place = Place::new();
    fs::write(place.path("lines"), "filesystem resize 400M\nmkdir /a\nrm /missing\n").unwrap();
    let ran = place.run(&["batch", "-f", "lines", "disk.img"]);
    ran.fails(4).says("line 3").says("Nothing was changed");
    assert_eq!(place.path("disk.img").metadata().unwrap().len(), 300 << 20);
    place.assert_clean();
    fs::write(place.path("lines"), "filesystem resize 400M\nmkdir /a\n").unwrap();
    place.run(&["batch", "-f", "lines", "disk.img"]).ok();
    assert_eq!(place.path("disk.img").metadata().unwrap().len(), 400 << 20);
    place.assert_clean();
}

#[test]
fn inspect_tree_that_fails_prints_json_all_the_same() {
    let place = Place::new();
    let ran = place.run(&["inspect", "tree", "--json", "--block", "12345", "disk.img"]);
    assert_ne!(ran.code, 0);
    assert!(ran.json().as_array().unwrap().is_empty());
}

/// `rm -f` took a name whose inode is missing for one that is not there, and said nothing of it.
#[test]
fn rm_force_of_a_name_without_an_inode_tells_the_damage() {
    let place = Place::new();
    place.run(&["mkfs", "-qf", "-m", "single", "--size", "300M", "disk.img"]).ok();
    place.run(&["put", "disk.img", "file", "/victim"]).ok();
    // The location in a directory's entry: a key, then 13 bytes, then the name.
    let location = [&257_u64.to_le_bytes()[..], &[1], &[0; 8]].concat();
    let mut image = fs::read(place.path("disk.img")).unwrap();
    let mut changed = 0;
    for block in image.chunks_exact_mut(16384) {
        let names: Vec<usize> = block
            .windows(6)
            .enumerate()
            .filter(|(_, w)| *w == b"victim")
            .map(|(at, _)| at)
            .collect();
        let entries = names.into_iter().filter(|at| *at > 130).map(|at| at - 30);
        let entries: Vec<usize> =
            entries.filter(|at| block[*at..].starts_with(&location)).collect();
        for at in &entries {
            block[*at..*at + 8].copy_from_slice(&9999_u64.to_le_bytes());
        }
        if !entries.is_empty() {
            let csum = CsumType::Crc32c.compute(&block[32..]);
            block[..32].copy_from_slice(&csum);
            changed += 1;
        }
    }
    assert!(changed > 0);
    fs::write(place.path("disk.img"), image).unwrap();
    place.run(&["rm", "-f", "disk.img", "/victim"]).fails(3).says("what it names is not");
    place.run(&["rm", "-f", "disk.img", "/missing"]).ok();
    assert_eq!(place.list("/"), "victim\n");
}

#[test]
fn archive_of_several_volumes_is_not_supported() {
    let place = Place::new();
    let (archive, directory) = (place.path("a.tar"), place.0.path());
    run(
        "tar",
        [
            "-cf".as_ref(),
            archive.as_os_str(),
            "-C".as_ref(),
            directory.as_os_str(),
            "file".as_ref(),
        ],
    );
    let mut bytes = fs::read(place.path("a.tar")).unwrap();
    bytes[156] = b'M';
    bytes[148..156].fill(b' ');
    let sum: u32 = bytes[..512].iter().map(|byte| u32::from(*byte)).sum();
    bytes[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    fs::write(place.path("a.tar"), bytes).unwrap();
    place.run(&["import", "disk.img", "a.tar", "/a"]).fails(6).says("several volumes");
}

#[test]
fn value_in_base64_is_what_getfattr_and_the_kernel_show() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let place = Place::new();
    place.run(&["put", "disk.img", "file", "/"]).ok();
    place.run(&["setfattr", "-n", "user.a", "-v", "0sAP8Q", "disk.img", "/file"]).ok();
    place.run(&["setfattr", "-n", "user.a", "-v", "0sAP8", "disk.img", "/file"]).fails(2);
    let mount = KernelMount::read_only(&place.path("disk.img"), "");
    let file = mount.path().join("file");
    let words = ["-e", "hex", "-n", "user.a", "--absolute-names"].map(OsStr::new);
    let shown = run("getfattr", words.into_iter().chain([file.as_os_str()]));
    assert!(shown.contains("user.a=0x00ff10"), "{shown}");
    mount.unmount();
}

#[test]
fn sync_replays_the_log_that_the_kernel_left() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let image = corpus::kernel_images()
        .find(|image| image.snapshot_without_log.is_some() && image.devices.len() == 1)
        .expect("one of the kernel's images has a log");
    let place = Place::new();
    let copy = image.copy_to(place.0.path()).remove(0);
    let copy_name = copy.to_str().unwrap();
    let log = || {
        let superblock = place.run(&["inspect", "super", "--json", copy_name]).ok().json();
        superblock[0]["log_root"].clone()
    };
    assert_ne!(log(), 0);
    place.run(&["filesystem", "sync", copy_name]).ok();
    assert_eq!(log(), 0);
    assert_checks_clean(&copy);
    let mount = KernelMount::read_only(&copy, "subvolid=5,noatime");
    let compare = Compare::same_filesystem();
    image.snapshot.assert_same(&TreeSnapshot::of_directory(mount.path()), &compare);
    mount.unmount();
}

#[test]
fn inspect_delayed_refs_shows_the_histogram_of_a_benchmark() {
    let place = Place::new();
    let row = |who: &str, up_to: u64, runs: u64| {
        serde_json::json!({"workload": "fsmark", "who": who, "up_to_ns": up_to, "runs": runs,
            "share_so_far": 0.5})
    };
    let rows = [row("a", 127, 1), row("a", 255, 3), row("b", 127, 7)];
    let report = serde_json::json!({"date": "", "tables": [
        {"name": "fsmark", "rows": [{"who": "a"}]},
        {"name": "delayed_ref_histogram", "rows": rows},
    ]});
    fs::write(place.path("bench.json"), report.to_string()).unwrap();
    let shown = place.run(&["inspect", "delayed-refs", "bench.json"]).ok();
    let lines: Vec<Vec<&str>> =
        shown.text().lines().map(|line| line.split_whitespace().collect()).collect();
    let bar = "#".repeat(40);
    assert!(lines.contains(&vec!["127", "1", "25.00%", &bar[..13]]), "{}", shown.text());
    assert!(lines.contains(&vec!["255", "3", "100.00%", &bar]), "{}", shown.text());
    assert!(shown.text().contains("fsmark, b: 7 runs"), "{}", shown.text());
    let json = place.run(&["inspect", "delayed-refs", "--json", "bench.json"]).ok().json();
    assert_eq!((json.as_array().unwrap().len(), &json[1]["runs"]), (3, &3.into()));
    for text in
        ["", "{}", "[1]", "{\"tables\": [{\"name\": \"delayed_ref_histogram\", \"rows\": 3}]}"]
    {
        fs::write(place.path("bench.json"), text).unwrap();
        place.run(&["inspect", "delayed-refs", "bench.json"]).fails(4).says("bench.json");
    }
    place.run(&["inspect", "delayed-refs", "missing.json"]).fails(4).says("No such file");
}

/// rename(2) leaves both names of one file: who had moved one had two.
#[test]
fn mv_onto_another_name_of_the_same_file_takes_the_first_away() {
    let place = Place::new();
    place.run(&["put", "disk.img", "file", "/a"]).ok();
    place.run(&["ln", "disk.img", "/a", "/b"]).ok();
    place.run(&["mv", "disk.img", "/a", "/b"]).ok();
    assert_eq!(place.list("/"), "b\n");
    place.run(&["mv", "disk.img", "/b", "/b"]);
    assert_eq!(place.run(&["cat", "disk.img", "/b"]).ok().text(), "text\n");
    place.assert_clean();
}

/// The link to a directory that was in its way was replaced by the file.
#[test]
fn cp_of_a_tree_replaces_no_link_to_a_directory_by_a_file() {
    let place = Place::new();
    fs::create_dir(place.path("tree")).unwrap();
    fs::write(place.path("tree/name"), "a file").unwrap();
    place.run(&["import", "disk.img", "tree", "/tree"]).ok();
    place.run(&["mkdir", "-p", "disk.img", "/there", "/kept"]).ok();
    place.run(&["ln", "-s", "disk.img", "../kept", "/there/name"]).ok();
    place.run(&["cp", "-r", "disk.img", "/tree/.", "/there"]).fails(4).says("a directory is there");
    let shown = place.run(&["ls", "-l", "disk.img", "/there"]).ok();
    assert!(shown.text().contains("name -> ../kept"), "{}", shown.text());
}

/// `chown -R disk.img 1000:1000 "$D"`, with D never set, changed the owner of every file there is: an empty path was the root.
#[test]
fn empty_paths_are_refused_and_nothing_is_changed() {
    let place = Place::new();
    place.run(&["mkdir", "disk.img", "/dir"]).ok();
    place.run(&["touch", "disk.img", "/file"]).ok();
    fs::write(place.path("text"), "text\n").unwrap();
    fs::create_dir(place.path("source")).unwrap();
    fs::write(place.path("source/in"), "in\n").unwrap();
    let state = || {
        let list = place.run(&["ls", "-lAR", "disk.img", "/"]).ok().text().to_owned();
        (list, place.run(&["subvolume", "list", "disk.img"]).ok().text().to_owned())
    };
    let before = state();
    for words in [
        &["chown", "-R", "disk.img", "1000:1000", ""][..],
        &["chmod", "-R", "disk.img", "700", ""],
        &["touch", "disk.img", ""],
        &["touch", "-r", "", "disk.img", "/file"],
        &["truncate", "-s", "1", "disk.img", ""],
        &["mkdir", "disk.img", ""],
        &["mkdir", "-p", "disk.img", ""],
        &["mknod", "disk.img", "", "p"],
        &["rm", "-r", "disk.img", ""],
        &["mv", "disk.img", "/file", ""],
        &["mv", "disk.img", "", "/dir"],
        &["cp", "-r", "disk.img", "/file", ""],
        &["cp", "-r", "disk.img", "", "/dir"],
        &["reflink", "disk.img", "/file", ""],
        &["put", "disk.img", "text", ""],
        &["put", "disk.img", "text", "text", ""],
        &["ln", "disk.img", "", "/link"],
        &["ln", "disk.img", "/file", ""],
        &["ln", "-s", "disk.img", "file", ""],
        &["setfattr", "-n", "user.a", "-v", "", "disk.img", ""],
        &["getfattr", "disk.img", ""],
        &["property", "set", "disk.img", "", "ro", "true"],
        &["property", "get", "disk.img", ""],
        &["subvolume", "snapshot", "disk.img", "", "/was"],
        &["subvolume", "snapshot", "disk.img", "/", ""],
        &["subvolume", "create", "disk.img", ""],
        &["subvolume", "delete", "disk.img", ""],
        &["subvolume", "show", "disk.img", ""],
        &["subvolume", "set-default", "disk.img", ""],
        &["import", "disk.img", "source", ""],
        &["export", "disk.img", "", "out"],
        &["get", "disk.img", "", "out"],
        &["ls", "disk.img", ""],
        &["stat", "disk.img", ""],
        &["tree", "disk.img", ""],
        &["du", "disk.img", ""],
        &["cat", "disk.img", ""],
        &["inspect", "fiemap", "disk.img", ""],
    ] {
        let ran = place.run(words);
        assert_eq!(ran.code, 4, "{words:?}: {}", ran.stderr);
        ran.says("disk.img: '': no such file or directory");
        assert_eq!(state(), before, "{words:?}");
    }
    let ran = place.batch(b"touch /new\nchown -R 1000 ''\n");
    ran.fails(4).says("line 2").says("''");
    // Before a device that holds something else would be overwritten.
    fs::write(place.path("other"), "text\n").unwrap();
    place.run(&["import", "--mkfs", "-f", "--size", "128M", "other", "source", ""]).fails(4);
    assert_eq!(fs::read(place.path("other")).unwrap(), b"text\n");
    // As rm does: what is not there need not be removed.
    place.run(&["rm", "-f", "disk.img", ""]).ok();
    assert_eq!(state(), before);
    assert!(!place.path("out").exists());
    place.run(&["mkdir", "-p", "disk.img", "/", "//a//b/", "c/d"]).ok();
    place.run(&["setfattr", "-n", "user.a", "-v", "", "disk.img", "/file"]).ok();
    place.run(&["property", "set", "disk.img", "/dir", "compression", ""]).ok();
    place.run(&["filesystem", "label", "disk.img", ""]).ok();
    place.assert_clean();
}

/// Links below kept their owners, who could be anybody, and a link that was named led `chown -R` out of the tree.
#[test]
fn chown_recursive_changes_links_themselves_as_the_system_does() {
    if !oracle::require_all(&[Oracle::Root]) {
        return;
    }
    const COMMANDS: &[&[&str]] = &[
        &["mkdir", "-p", "/tree/sub", "/other"],
        &["touch", "/tree/file", "/other/file"],
        &["ln", "-s", "file", "/tree/link"],
        &["ln", "-s", "nowhere", "/tree/sub/dangling"],
        &["ln", "-s", "../other", "/tree/out"],
        &["ln", "-s", "other", "/to-other"],
        &["ln", "-s", "other/file", "/to-file"],
        &["chown", "-R", "5:6", "/tree"],
        &["chown", "-R", "7:8", "/to-other", "/to-file"],
        &["chown", "-R", "-h", "9", "/tree/sub"],
        &["chown", ":10", "/tree/link"],
    ];
    let place = Place::new();
    let top = place.path("top");
    fs::create_dir(&top).unwrap();
    for words in COMMANDS {
        let under_top = |word: &&str| match word.strip_prefix('/') {
            Some(path) => top.join(path).into_os_string(),
            None => OsString::from(word),
        };
        run(words[0], words[1..].iter().map(under_top));
        place.run(&[&words[..1], &["disk.img"], &words[1..]].concat()).ok();
    }
    for path in [
        "tree",
        "tree/file",
        "tree/link",
        "tree/out",
        "tree/sub",
        "tree/sub/dangling",
        "other",
        "other/file",
        "to-other",
        "to-file",
    ] {
        let theirs = top.join(path).symlink_metadata().unwrap();
        let ours = place.run(&["stat", "--json", "disk.img", path]).ok().json();
        let owner = (&ours[0]["uid"], &ours[0]["gid"]);
        assert_eq!(owner, (&theirs.uid().into(), &theirs.gid().into()), "{path}");
    }
    place.assert_clean();
}

/// Damage that an export met exited with 4, as where the disk is full; and each refusal told of --force, which does not help there.
#[test]
fn export_that_meets_damage_exits_3_and_only_what_is_there_asks_for_force() {
    let place = Place::new();
    place.run(&["mkfs", "-qf", "-m", "single", "--size", "300M", "disk.img"]).ok();
    place.run(&["ln", "-s", "disk.img", "target-of-it", "/link"]).ok();
    let mut image = fs::read(place.path("disk.img")).unwrap();
    for block in image.chunks_exact_mut(16384) {
        if let Some(at) = block.windows(12).position(|bytes| bytes == b"target-of-it") {
            block[at + 6] = 0;
            let csum = CsumType::Crc32c.compute(&block[32..]);
            block[..32].copy_from_slice(&csum);
        }
    }
    fs::write(place.path("disk.img"), image).unwrap();
    for target in ["out", "out.tar"] {
        let ran = place.run(&["export", "disk.img", "/", target]).fails(3).says("damaged");
        assert!(!ran.stderr.contains("--force"), "{}", ran.stderr);
    }
    place.run(&["export", "disk.img", "/", "."]).fails(4).says("not empty").says("--force");
}

/// `mv` of one of several paths into itself exited with 2, as a command line that means nothing does before anything is changed.
#[test]
fn path_that_does_not_go_exits_4_behind_others_that_went() {
    let place = Place::new();
    place.run(&["mkdir", "disk.img", "/a", "/b", "/a/into"]).ok();
    place.run(&["mv", "disk.img", "/b", "/a", "/a/into"]).fails(4).says("moving");
    assert_eq!(place.list("/a/into"), "b\n");
    place.assert_clean();
}

/// A directory of the name backup.tar.lz4 was made, and the command exited with 0.
#[test]
fn export_into_what_is_named_as_an_archive_of_no_known_kind_is_refused() {
    let place = Place::new();
    place.run(&["put", "disk.img", "file", "/f"]).ok();
    for name in ["backup.tar.lz4", "a.tar.Z", "a.TAR.lzo", "a.zip", "a.tlz", "a.cpio", "./a.taz"] {
        let ran = place.run(&["export", "disk.img", "/", name]).fails(2);
        ran.says(".tar.zst").says("/ behind it");
        assert!(!place.path(name).exists(), "{name}");
    }
    place.run(&["export", "-q", "disk.img", "/", "a.tar.lz4/"]).ok();
    assert_eq!(fs::read(place.path("a.tar.lz4/f")).unwrap(), b"text\n");
    fs::create_dir(place.path("b.zip")).unwrap();
    place.run(&["export", "-q", "disk.img", "/", "b.zip"]).ok();
    place.run(&["export", "-q", "disk.img", "/", "a.zip.d"]).ok();
    // A single file may have any name.
    place.run(&["export", "-q", "disk.img", "/f", "f.zip"]).ok();
    assert_eq!(fs::read(place.path("f.zip")).unwrap(), b"text\n");
    for (name, magic) in [("a.tbz", &b"BZh"[..]), ("a.tar.zstd", &[0x28, 0xb5, 0x2f, 0xfd])] {
        place.run(&["export", "-q", "disk.img", "/", name]).ok();
        assert!(fs::read(place.path(name)).unwrap().starts_with(magic), "{name}");
    }
}
