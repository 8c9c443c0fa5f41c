//! Images that the kernel wrote, read by the command, against coreutils on the kernel's mount.

mod support;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, Weak};

use support::{Ran, command, ubtrfs, ubtrfs_in};
use tempfile::TempDir;
use ubtrfs_testkit::{
    KernelMount, MkfsBtrfs, Oracle, assert_checks_clean, odd::odd_files, oracle, run,
};

/// Options of `ls` and `du` that are compared.
const LS: [&[&str]; 7] = [&["-R"], &["-A"], &["-lR"], &["-lnAR"], &["-lhR"], &["-liAR"], &["-ld"]];
const DU: [&[&str]; 3] = [&[], &["-s"], &["-h"]];
/// Without quoting, and without what btrfs says otherwise: the device number.
const STAT: &str = "--printf=%s|%b|%o|%F|%i|%h|%04a/%A|%u/%U|%g/%G|%x|%y|%z|%w|%Hr,%Lr\\n";

/// An image with every odd file, subvolumes and snapshots, and what the kernel shows of it.
struct Subject {
    directory: TempDir,
    image: PathBuf,
    ls: Vec<Vec<u8>>,
    du: Vec<Vec<u8>>,
    /// Every path, sorted, and what `stat` says of them.
    paths: Vec<OsString>,
    stat: Vec<u8>,
    /// Regular files, sorted, the huge sparse ones left out, and what `cat` prints of them.
    files: Vec<OsString>,
    cat: Vec<u8>,
    subvolumes: Vec<u8>,
}

impl Subject {
    /// The one that the tests of this file share while they run; `None` where there is no judge.
    fn shared() -> Option<Arc<Self>> {
        static SHARED: Mutex<Weak<Subject>> = Mutex::new(Weak::new());
        if !oracle::require_all(&[Oracle::MkfsBtrfs, Oracle::KernelBtrfs]) {
            return None;
        }
        let mut shared = SHARED.lock().unwrap();
        let subject = shared.upgrade().unwrap_or_else(|| Arc::new(Self::new()));
        *shared = Arc::downgrade(&subject);
        Some(subject)
    }

    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk.img");
        MkfsBtrfs::new().size_bytes(512 << 20).options("-L subject").make(&image);
        let mount = KernelMount::read_write(&image, "compress=zstd");
        let at = |name: &str| mount.path().join(name);
        fs::create_dir(at("odd")).unwrap();
        odd_files(&at("odd"), 7);
        // Deeper than a path may be long: coreutils do not get there by name.
        fs::remove_dir_all(at("odd/deep")).unwrap();
        btrfs(["subvolume", "create"], &[&at("sub")]);
        fs::write(at("sub/inside"), "inside\n").unwrap();
        btrfs(["subvolume", "create"], &[&at("sub/nested")]);
        btrfs(["subvolume", "snapshot", "-r"], &[&at("sub"), &at("snapshot")]);
        symlink("odd/../sub", at("to-sub")).unwrap();
        symlink("/to-sub/inside", at("to-inside")).unwrap();
        symlink("loop", at("loop")).unwrap();
        mount.unmount();

        let mount = KernelMount::read_only(&image, "");
        let root = mount.path();
        let dot = [OsString::from(".")];
        let (paths, files) = (find(root, &[]), find(root, &["-type", "f", "-size", "-65536k"]));
        let subject = Self {
            directory,
            image,
            ls: LS.iter().map(|options| tool(root, "ls", options, &dot)).collect(),
            du: DU.iter().map(|options| tool(root, "du", options, &dot)).collect(),
            stat: tool(root, "stat", &[STAT], &paths),
            paths,
            cat: tool(root, "cat", &["--"], &files),
            files,
            subvolumes: tool(root, "btrfs", &["subvolume", "list", "."], &[]),
        };
        mount.unmount();
        subject
    }

    fn ubtrfs(&self, words: &[&str], paths: &[OsString]) -> Ran {
        let (command, options) = words.split_first().unwrap();
        let mut arguments: Vec<OsString> = vec![command.into()];
        arguments.extend(options.iter().map(Into::into));
        arguments.push(self.image.clone().into());
        arguments.extend(paths.iter().cloned());
        ubtrfs(arguments)
    }

    /// A copy to do damage to.
    fn copy(&self, name: &str) -> PathBuf {
        let copy = self.directory.path().join(name);
        run("cp", [OsStr::new("--sparse=always"), self.image.as_os_str(), copy.as_os_str()]);
        copy
    }
}

fn btrfs<const N: usize>(words: [&str; N], paths: &[&Path]) {
    let words = words.iter().map(OsStr::new);
    run(
        "btrfs",
        ["-q".as_ref()].into_iter().chain(words).chain(paths.iter().map(|p| p.as_os_str())),
    );
}

/// What a tool prints when it runs in the mounted root.
fn tool(root: &Path, name: &str, arguments: &[&str], paths: &[OsString]) -> Vec<u8> {
    let output = std::process::Command::new(name)
        .env("LC_ALL", "C")
        .env("TZ", "UTC0")
        .current_dir(root)
        .args(arguments)
        .args(paths)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}", stderr.lines().next().unwrap_or_default());
    output.stdout
}

/// Every path of the tree that a test of `find` lets through, sorted.
fn find(root: &Path, test: &[&str]) -> Vec<OsString> {
    let mut arguments = vec!["."];
    arguments.extend(test);
    arguments.push("-print0");
    let found = tool(root, "find", &arguments, &[]);
    let names = found.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut paths: Vec<OsString> = names.map(|name| OsString::from_vec(name.to_vec())).collect();
    paths.sort();
    paths
}

#[track_caller]
fn assert_same_text(what: &str, have: &[u8], expect: &[u8]) {
    if have == expect {
        return;
    }
    let lines = |text: &[u8]| text.split(|b| *b == b'\n').map(<[u8]>::to_vec).collect::<Vec<_>>();
    let (have, expect) = (lines(have), lines(expect));
    for (number, (a, b)) in have.iter().zip(&expect).enumerate() {
        assert_eq!(
            String::from_utf8_lossy(a),
            String::from_utf8_lossy(b),
            "{what}: line {}",
            number + 1
        );
    }
    assert_eq!(have.len(), expect.len(), "{what}: lines");
}

#[test]
fn listings_equal_those_of_coreutils() {
    let Some(subject) = Subject::shared() else { return };
    let dot = [OsString::from(".")];
    for (options, expect) in LS.iter().zip(&subject.ls) {
        let words: Vec<&str> = ["ls"].iter().chain(*options).copied().collect();
        let have = subject.ubtrfs(&words, &dot).ok().stdout;
        assert_same_text(&format!("{words:?}"), &have, expect);
    }
    for (options, expect) in DU.iter().zip(&subject.du) {
        // The order of a directory's entries is du's own.
        let words: Vec<&str> = ["du"].iter().chain(*options).copied().collect();
        let have = subject.ubtrfs(&words, &dot).ok().stdout;
        let sorted = |text: &[u8]| {
            let mut lines: Vec<Vec<u8>> = text.split(|b| *b == b'\n').map(<[u8]>::to_vec).collect();
            lines.sort();
            lines.join(&b'\n')
        };
        assert_same_text(&format!("{words:?}"), &sorted(&have), &sorted(expect));
    }
}

#[test]
fn stat_equals_that_of_coreutils() {
    let Some(subject) = Subject::shared() else { return };
    let shown = subject.ubtrfs(&["stat"], &subject.paths).ok().stdout;
    let shown = String::from_utf8_lossy(&shown).into_owned();
    let have: Vec<String> = shown
        .split("\n  Size: ")
        .skip(1)
        .map(|text| in_that_format(&format!("  Size: {text}")))
        .collect();
    let expect = String::from_utf8_lossy(&subject.stat).into_owned();
    let expect: Vec<&str> = expect.lines().collect();
    assert_eq!(have.len(), expect.len());
    for ((path, have), expect) in subject.paths.iter().zip(&have).zip(&expect) {
        // Where a snapshot holds the place of a nested subvolume there is no inode; what times
        // the kernel makes up for it is its own affair.
        if path != "./snapshot/nested" {
            assert_eq!(have, expect, "{path:?}");
        }
    }
}

/// The fields of our text, in the order of the format above.
fn in_that_format(text: &str) -> String {
    let after = |text: &'_ str, label: &str| -> String {
        let start = text.find(label).unwrap_or_else(|| panic!("{label} in {text}")) + label.len();
        text[start..].to_owned()
    };
    let word = |label: &str| after(text, label).split_whitespace().next().unwrap().to_owned();
    let line = |label: &str| after(text, label).lines().next().unwrap().trim().to_owned();
    let owner = |label: &str| {
        let inside = after(text, label);
        let inside = inside[..inside.find(')').unwrap()].to_owned();
        let (number, name) = inside.split_once('/').unwrap();
        format!("{}/{}", number.trim(), name.trim())
    };
    let first = text.lines().next().unwrap();
    let kind = after(first, "IO Block: ");
    let kind = kind.trim_start_matches(|c: char| c.is_ascii_digit()).trim().to_owned();
    let mode = after(text, "Access: (");
    let mode = mode[..mode.find(')').unwrap()].to_owned();
    let times = after(text, ")\nAccess: ");
    let atime = times.lines().next().unwrap().to_owned();
    let device =
        if text.contains("Device type: ") { word("Device type: ") } else { "0,0".to_owned() };
    [
        word("Size: "),
        word("Blocks: "),
        word("IO Block: "),
        kind,
        word("Inode: "),
        word("Links: "),
        mode,
        owner("Uid: ("),
        owner("Gid: ("),
        atime,
        line("Modify: "),
        line("Change: "),
        line("Birth: "),
        device,
    ]
    .join("|")
}

#[test]
fn cat_equals_every_file() {
    let Some(subject) = Subject::shared() else { return };
    let have = subject.ubtrfs(&["cat"], &subject.files).ok().stdout;
    assert!(have == subject.cat, "{} and {} bytes", have.len(), subject.cat.len());
}

#[test]
fn paths_follow_links_and_enter_subvolumes() {
    let Some(subject) = Subject::shared() else { return };
    let one =
        |words: &[&str], path: &[u8]| subject.ubtrfs(words, &[OsStr::from_bytes(path).to_owned()]);
    assert_eq!(one(&["cat"], b"to-inside").ok().text(), "inside\n");
    assert_eq!(one(&["cat"], b"/to-sub/../sub/./inside").ok().text(), "inside\n");
    assert_eq!(one(&["cat"], b"../../sub/inside").ok().text(), "inside\n");
    assert_eq!(one(&["ls"], b"to-sub").ok().text(), "inside\nnested\n");
    assert_eq!(one(&["ls", "-d"], b"to-sub").ok().text(), "to-sub\n");
    assert_eq!(one(&["ls"], b"snapshot").ok().text(), "inside\nnested\n");
    assert_eq!(one(&["ls", "--subvolid", "256"], b"/").ok().text(), "inside\nnested\n");
    one(&["cat"], b"loop").fails(4).says("too many levels of symbolic links");
    one(&["cat"], b"sub").fails(4).says("it is a directory");
    one(&["ls"], b"missing/x").fails(4).says("missing/x: no such file or directory");
    one(&["ls"], b"sub/inside/").fails(4).says("not a directory");
    one(&["ls"], b"no\xffpe").fails(4).says("'no'$'\\377''pe'");
    one(&["ls", "--subvolid", "999"], b"/").fails(4).says("there is no subvolume 999");
    one(&["ls", "--subvolid", "3"], b"/").fails(2);
    // One of two fails: the other is done.
    let paths = ["missing".into(), "sub".into()];
    let ran = subject.ubtrfs(&["ls"], &paths).fails(4);
    assert_eq!(ran.text(), "sub:\ninside\nnested\n");
}

#[test]
fn json_is_valid_everywhere_and_loses_no_name() {
    let Some(subject) = Subject::shared() else { return };
    let root = ["/".into()];
    let listed = subject.ubtrfs(&["ls", "-AR", "--json"], &root).ok().json();
    let mut have: Vec<Vec<u8>> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| match entry.get("path_hex") {
            Some(hex) => unhex(hex.as_str().unwrap()),
            None => entry["path"].as_str().unwrap().as_bytes().to_vec(),
        })
        .collect();
    have.sort();
    let mut expect: Vec<Vec<u8>> =
        subject.paths[1..].iter().map(|path| path.as_bytes()[1..].to_vec()).collect();
    expect.sort();
    assert!(have == expect);

    let tree = subject.ubtrfs(&["tree", "-a", "--json"], &root).ok().json();
    assert_eq!(tree[0]["type"], "directory");
    assert!(tree[0]["contents"].as_array().unwrap().len() >= 6);
    // What fails among what is asked for leaves JSON whole.
    let some = ["missing".into(), "sub".into(), "missing".into(), "snapshot".into()];
    for command in ["ls", "tree", "du", "stat"] {
        let ran = subject.ubtrfs(&[command, "--json"], &some).fails(4);
        assert!(ran.json().as_array().unwrap().len() >= 2, "{command}");
    }
    let stat = subject.ubtrfs(&["stat", "--json"], &["sub/inside".into()]).ok().json();
    assert_eq!(stat[0]["size"], 7);
    assert_eq!(stat[0]["extents"]["inline"], 1);
    assert_eq!(subject.ubtrfs(&["df", "--json"], &[]).ok().json()["label"], "subject");
    assert!(subject.ubtrfs(&["du", "--json"], &root).ok().json()[0]["bytes"].is_u64());
    let subvolumes = subject.ubtrfs(&["subvolume", "list", "--json"], &[]).ok().json();
    let paths: Vec<&str> =
        subvolumes.as_array().unwrap().iter().map(|s| s["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["sub", "sub/nested", "snapshot"]);
    let shown = subject.ubtrfs(&["subvolume", "show", "--json"], &["snapshot".into()]).ok().json();
    assert_eq!(shown["read_only"], true);
    assert_eq!(shown["parent_uuid"], subvolumes[0]["uuid"]);
    let default = subject.ubtrfs(&["subvolume", "get-default", "--json"], &[]).ok().json();
    assert_eq!(default["id"], 5);
    let superblock = subject.ubtrfs(&["inspect", "super", "--full", "--all", "--json"], &[]).ok();
    assert_eq!(superblock.json().as_array().unwrap().len(), 2);
    assert_eq!(superblock.json()[0]["label"], "subject");
    let chunks = subject.ubtrfs(&["inspect", "chunks", "--json"], &[]).ok().json();
    assert!(chunks.as_array().unwrap().len() >= 3);
    let fiemap = subject.ubtrfs(&["inspect", "fiemap", "--json"], &["sub/inside".into()]);
    assert_eq!(fiemap.ok().json()[0]["kind"], "inline");
    let items = subject.ubtrfs(&["inspect", "tree", "--json"], &[]).ok().json();
    assert!(items.as_array().unwrap().len() > 500);
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.bytes().map(|b| u8::try_from((b as char).to_digit(16).unwrap()).unwrap()).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

#[test]
fn subvolume_list_equals_that_of_btrfs() {
    let Some(subject) = Subject::shared() else { return };
    let have = subject.ubtrfs(&["subvolume", "list"], &[]).ok().stdout;
    assert_same_text("subvolume list", &have, &subject.subvolumes);
}

#[test]
fn image_in_use_is_refused_by_name() {
    let Some(subject) = Subject::shared() else { return };
    let image = subject.copy("busy.img");
    let list = || ubtrfs(["ls".as_ref(), image.as_os_str()]);
    // The kernel does not take two filesystems of one uuid at a time.
    run("btrfstune", ["-f".as_ref(), "-u".as_ref(), image.as_os_str()]);
    let mount = KernelMount::read_write(&image, "");
    list().fails(4).says("mounted by the kernel");
    mount.unmount();
    let writer = File::options().write(true).open(&image).unwrap();
    writer.lock().unwrap();
    list().fails(4).says("in use");
    drop(writer);
    list().ok();
}

#[test]
fn damage_exits_3_and_a_copy_of_the_superblock_helps() {
    let Some(subject) = Subject::shared() else { return };
    let cut = subject.copy("cut.img");
    File::options().write(true).open(&cut).unwrap().set_len(30 << 20).unwrap();
    ubtrfs(["ls".as_ref(), cut.as_os_str()]).fails(3).says("cut.img");

    let torn = subject.copy("torn.img");
    let file = File::options().write(true).open(&torn).unwrap();
    file.write_all_at(b"damage", 65536 + 200).unwrap();
    ubtrfs(["ls".as_ref(), torn.as_os_str()]).fails(3).says("superblock").says("--super-copy");
    ubtrfs(["ls", "--super-copy=1"].map(OsStr::new).iter().chain([&torn.as_os_str()])).ok();
    let ran = ubtrfs(["inspect", "super"].map(OsStr::new).iter().chain([&torn.as_os_str()]));
    assert_eq!((ran.code, ran.stderr.as_str()), (1, ""));
    assert!(ran.text().contains("damaged: checksum mismatch"));
}

#[test]
fn damaged_data_is_never_printed_as_sound() {
    let Some(subject) = Subject::shared() else { return };
    let path = "odd/sizes/random-1048577";
    let extents = subject.ubtrfs(&["inspect", "fiemap", "--json"], &[path.into()]).ok().json();
    let at = extents[0]["places"][0]["offset"].as_u64().unwrap();
    let image = subject.copy("bad.img");
    let file = File::options().write(true).read(true).open(&image).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at + 5000).unwrap();
    file.write_all_at(&[!byte[0]], at + 5000).unwrap();
    let ran = ubtrfs(["cat".as_ref(), image.as_os_str(), path.as_ref()]).fails(3);
    assert!(ran.says(path).stdout.len() <= 4096);
}

#[test]
fn reader_that_goes_away_is_no_error() {
    let Some(subject) = Subject::shared() else { return };
    for words in [&["cat", "odd/sizes/random-1048577"][..], &["ls", "-lR", "/"]] {
        let mut child = command()
            .arg(words[0])
            .args(words[1..].iter().filter(|word| word.starts_with('-')))
            .arg(&subject.image)
            .args(words[1..].iter().filter(|word| !word.starts_with('-')))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first = [0; 1];
        child.stdout.take().unwrap().read_exact(&mut first).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{words:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{words:?}");
    }
}

#[test]
fn several_devices_are_opened_together_or_degraded() {
    if !oracle::require_all(&[Oracle::MkfsBtrfs, Oracle::KernelBtrfs]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let images: Vec<PathBuf> = ["a.img", "b.img"].map(|name| directory.path().join(name)).into();
    MkfsBtrfs::new().size_bytes(256 << 20).options("-d raid1 -m raid1").make_on(&images);
    let mount = KernelMount::mount(&images, "", false).unwrap();
    fs::write(mount.path().join("file"), "on both\n".repeat(1000)).unwrap();
    mount.unmount();
    let cat = |words: &[&str]| ubtrfs_in(directory.path(), words);
    let whole = cat(&["cat", "--device", "b.img", "a.img", "file"]).ok();
    assert_eq!(whole.text().len(), 8000);
    cat(&["cat", "b.img", "file"]).fails(4).says("missing").says("--device");
    assert_eq!(cat(&["cat", "--degraded", "b.img", "file"]).ok().text(), whole.text());
    cat(&["cat", "--device", "a.img", "a.img", "file"]).fails(4);
}

#[test]
fn default_subvolume_is_where_paths_begin() {
    if !oracle::require_all(&[Oracle::MkfsBtrfs, Oracle::KernelBtrfs]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.img");
    MkfsBtrfs::new().size_bytes(256 << 20).make(&image);
    let mount = KernelMount::read_write(&image, "");
    btrfs(["subvolume", "create"], &[&mount.path().join("root")]);
    btrfs(["subvolume", "create"], &[&mount.path().join("home")]);
    fs::write(mount.path().join("root/file"), "in root\n").unwrap();
    btrfs(["subvolume", "set-default", "256"], &[mount.path()]);
    mount.unmount();
    let run = |words: &[&str]| ubtrfs_in(directory.path(), words);
    assert_eq!(run(&["ls", "disk.img"]).ok().text(), "file\n");
    assert_eq!(run(&["cat", "disk.img", "../../file"]).ok().text(), "in root\n");
    assert_eq!(run(&["ls", "--subvolid", "5", "disk.img"]).ok().text(), "home\nroot\n");
    let default = run(&["subvolume", "get-default", "disk.img"]).ok();
    assert!(default.text().ends_with("top level 5 path root\n"), "{}", default.text());
    // What is imported lands where a mount shows it.
    fs::create_dir(directory.path().join("more")).unwrap();
    fs::write(directory.path().join("more/new"), "new\n").unwrap();
    run(&["import", "-q", "disk.img", "more", "a/b"]).ok();
    let mount = KernelMount::read_only(&image, "");
    assert_eq!(fs::read_to_string(mount.path().join("a/b/new")).unwrap(), "new\n");
    mount.unmount();
}

#[test]
fn log_is_named_by_readers_and_replayed_by_a_change() {
    if !oracle::require_all(&[Oracle::MkfsBtrfs, Oracle::KernelBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (image, cut) = (directory.path().join("disk.img"), directory.path().join("cut.img"));
    MkfsBtrfs::new().size_bytes(256 << 20).make(&image);
    let mount = KernelMount::read_write(&image, "");
    fs::write(mount.path().join("before"), "").unwrap();
    run("sync", ["-f".as_ref(), mount.path().as_os_str()]);
    let logged = File::create(mount.path().join("logged")).unwrap();
    logged.sync_all().unwrap();
    run("cp", [OsStr::new("--sparse=always"), image.as_os_str(), cut.as_os_str()]);
    drop(logged);
    mount.unmount();
    let listed = ubtrfs_in(directory.path(), ["ls", "cut.img"]);
    assert_eq!((listed.code, listed.text()), (0, "before\n"));
    assert!(listed.stderr.starts_with("ubtrfs: note: cut.img: "), "{}", listed.stderr);
    // What is changed was only in the log.
    ubtrfs_in(directory.path(), ["chmod", "cut.img", "640", "/logged"]).ok();
    let listed = ubtrfs_in(directory.path(), ["ls", "cut.img"]).ok();
    assert_eq!(listed.text(), "before\nlogged\n");
    ubtrfs_in(directory.path(), ["check", "cut.img"]).ok();
    assert_checks_clean(&cut);
    let mount = KernelMount::read_only(&cut, "");
    let mode = mount.path().join("logged").metadata().unwrap().mode();
    assert_eq!(mode & 0o7777, 0o640);
    mount.unmount();
}
