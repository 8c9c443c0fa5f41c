use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};

use tempfile::tempdir;
use ubtrfs_engine::{MkfsOptions, OpenOptions, mkfs};
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_rt::{Arc, Executor, Runtime, Time};
use ubtrfs_testkit::odd::odd_files;
use ubtrfs_testkit::{
    Compare, KernelMount, Oracle, TreeSnapshot, assert_checks_clean,
    assert_checks_clean_but_for_extended_refs, command, oracle,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Window};

use super::*;
use crate::error::{Warning, WarningKind};
use crate::export;
use crate::sink::directory::Existing;

fn filesystem(image: &Path, size_bytes: u64, runtime: Runtime) -> Filesystem {
    File::create(image).unwrap().set_len(size_bytes).unwrap();
    let runtime = Arc::new(runtime);
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let devices: Vec<Arc<dyn Device>> = vec![Arc::new(device)];
    let volume = mkfs(devices, &MkfsOptions::default(), &runtime).unwrap();
    Filesystem::open(volume, OpenOptions { runtime, ..OpenOptions::default() }).unwrap()
}

fn seen_by_kernel(image: &Path) -> TreeSnapshot {
    let mount = KernelMount::read_only(image, "");
    let seen = TreeSnapshot::of_directory(mount.path());
    mount.unmount();
    seen
}

#[test]
fn import_odd_files_equal_in_kernel_and_exported() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::BtrfsProgs, Oracle::Root]) {
        return;
    }
    let (dir, source) = (tempdir().unwrap(), tempdir().unwrap());
    odd_files(source.path(), 9);
    let before = TreeSnapshot::of_directory(source.path());
    let zstd = Method::new(Compression::Zstd, 3);
    for (compression, executor) in
        [(None, Executor::Threads(2)), (Some(zstd), Executor::Threads(2)), (None, Executor::Inline)]
    {
        let image = dir.path().join("image");
        let fs = filesystem(&image, 1 << 30, Runtime { executor, ..Runtime::system() });
        let options = ImportOptions { compression, ..ImportOptions::default() };
        let mut warnings: Vec<Warning> = Vec::new();
        let into = fs.top_level();
        from_path(&fs, into, source.path(), &options, &mut warnings).unwrap();
        assert_eq!(warnings, []);
        let (_, archive) =
            export::to_tar(&fs, into, Vec::new(), Default::default(), &mut warnings).unwrap();
        let again = filesystem(&dir.path().join("again"), 1 << 30, Runtime::system());
        let archive = Box::new(std::io::Cursor::new(archive));
        from_tar(&again, again.top_level(), archive, &options, &mut Vec::new()).unwrap();
        drop((fs, again));
        assert_checks_clean_but_for_extended_refs(&image);
        seen_by_kernel(&image).assert_same(&before, &Compare::copied());
        assert_checks_clean_but_for_extended_refs(&dir.path().join("again"));
        let mut without_socket = before.clone();
        without_socket.entries.remove(&b"special/socket"[..]);
        seen_by_kernel(&dir.path().join("again")).assert_same(&without_socket, &Compare::copied());
    }
}

#[test]
fn import_same_input_same_bytes_whatever_the_threads() {
    let (dir, source) = (tempdir().unwrap(), tempdir().unwrap());
    odd_files(source.path(), 9);
    let image = |name: &str, executor| {
        let image = dir.path().join(name);
        let runtime = Runtime::reproducible(Time { sec: 1_700_000_000, nsec: 0 }, 7);
        let fs = filesystem(&image, 512 << 20, Runtime { executor, ..runtime });
        let options = ImportOptions {
            compression: Some(Method::new(Compression::Zstd, 1)),
            subvolumes: vec![b"names".to_vec()],
            ..ImportOptions::default()
        };
        from_path(&fs, fs.top_level(), source.path(), &options, &mut Vec::new()).unwrap();
        drop(fs);
        fs::read(image).unwrap()
    };
    let first = image("a", Executor::Inline);
    for (name, threads) in [("b", 1), ("c", 4), ("d", 2)] {
        let other = image(name, Executor::Threads(threads));
        let differs = first.iter().zip(&other).position(|(a, b)| a != b);
        assert_eq!(differs, None, "first byte that differs with {threads} threads");
    }
}

#[test]
fn import_subvolumes_and_owner_seen_by_kernel() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::BtrfsProgs, Oracle::Root]) {
        return;
    }
    let (dir, source) = (tempdir().unwrap(), tempdir().unwrap());
    fs::create_dir_all(source.path().join("home/user/deep")).unwrap();
    fs::write(source.path().join("home/user/deep/file"), "x").unwrap();
    let image = dir.path().join("image");
    let fs = filesystem(&image, 256 << 20, Runtime::system());
    let owner = Some(Owner { uid: 7, gid: 8 });
    let options = ImportOptions {
        owner,
        subvolumes: vec![b"home".to_vec(), b"/home/user/deep".to_vec()],
        ..ImportOptions::default()
    };
    let (into, holds_something) = destination(&fs, b"a/b//c/", owner).unwrap();
    assert!(!holds_something);
    assert_eq!((into, false), destination(&fs, b"/a/b/c", owner).unwrap());
    assert!(destination(&fs, b"/a/b", owner).unwrap().1);
    let summary = from_path(&fs, into, source.path(), &options, &mut Vec::new()).unwrap();
    assert_eq!(summary.subvolumes, 2);
    drop(fs);
    assert_checks_clean(&image);
    let tree = seen_by_kernel(&image);
    let entry = &tree.entries[&b"a/b/c/home/user/deep/file"[..]];
    assert_eq!((entry.uid, entry.gid), (7, 8));
    for path in [&b"a/b/c/home"[..], b"a/b/c/home/user/deep"] {
        assert!(tree.entries[path].subvolume > Some(255), "{path:?}");
    }
}

#[test]
fn import_into_what_is_there_merges_and_keeps() {
    let (dir, source) = (tempdir().unwrap(), tempdir().unwrap());
    fs::create_dir(source.path().join("d")).unwrap();
    fs::write(source.path().join("d/one"), "1").unwrap();
    let fs = filesystem(&dir.path().join("image"), 256 << 20, Runtime::system());
    let options = ImportOptions::default();
    let import = || from_path(&fs, fs.top_level(), source.path(), &options, &mut Vec::new());
    import().unwrap();
    fs::remove_file(source.path().join("d/one")).unwrap();
    fs::write(source.path().join("d/two"), "2").unwrap();
    import().unwrap();
    let d = fs.lookup(fs.top_level(), b"d").unwrap();
    assert!(fs.lookup(d, b"one").is_ok() && fs.lookup(d, b"two").is_ok());
    let error = import().unwrap_err().to_string();
    assert!(error.contains("d/two") && error.contains("is there already"), "{error}");
    let target = dir.path().join("out");
    export::to_directory(&fs, d, &target, Existing::Refuse, &mut Vec::new()).unwrap();
    assert_eq!(fs::read(target.join("one")).unwrap(), b"1");
}

#[test]
fn import_no_space_says_so_and_image_stays_whole() {
    let (dir, source) = (tempdir().unwrap(), tempdir().unwrap());
    let image = dir.path().join("image");
    fs::write(source.path().join("small"), "first").unwrap();
    let fs = filesystem(&image, 160 << 20, Runtime::system());
    let options = ImportOptions::default();
    let import =
        |fs: &Filesystem| from_path(fs, fs.top_level(), source.path(), &options, &mut Vec::new());
    import(&fs).unwrap();
    fs::rename(source.path().join("small"), source.path().join("z")).unwrap();
    fs::write(source.path().join("large"), vec![7; 300 << 20]).unwrap();
    let error = import(&fs).unwrap_err();
    assert!(
        matches!(&error, Error::Engine { source: ubtrfs_engine::Error::NoSpace { .. }, .. }),
        "{error}"
    );
    drop(fs);
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
}

#[test]
fn import_tar_stream_of_gnu_tar_equal() {
    if !oracle::require_all(&[Oracle::Tar, Oracle::KernelBtrfs, Oracle::BtrfsProgs, Oracle::Root]) {
        return;
    }
    let (dir, source) = (tempdir().unwrap(), tempdir().unwrap());
    odd_files(source.path(), 4);
    fs::remove_file(source.path().join("special/socket")).unwrap();
    fs::remove_file(source.path().join("sparse/hole-of-one-byte")).unwrap();
    let before = TreeSnapshot::of_directory(source.path());
    let out = command("tar")
        .args(["--format=pax", "--xattrs", "--xattrs-include=*", "--acls", "-S"])
        .args(["--numeric-owner", "-cf", "-", "-C"])
        .arg(source.path())
        .arg(".")
        .output()
        .unwrap();
    let image = dir.path().join("image");
    let fs = filesystem(&image, 512 << 20, Runtime::system());
    let archive = Box::new(std::io::Cursor::new(out.stdout));
    let mut warnings = Vec::new();
    from_tar(&fs, fs.top_level(), archive, &ImportOptions::default(), &mut warnings).unwrap();
    assert_eq!(warnings, []);
    drop(fs);
    assert_checks_clean_but_for_extended_refs(&image);
    seen_by_kernel(&image).assert_same(&before, &Compare::copied());
}

/// GNU tar's `--append` leaves a file's earlier contents in the archive.
#[test]
fn import_tar_path_twice_later_replaces() {
    if !oracle::require_all(&[Oracle::Tar, Oracle::BtrfsProgs]) {
        return;
    }
    let dir = tempdir().unwrap();
    let (archive, image) = (dir.path().join("a.tar"), dir.path().join("image"));
    let append = |name: &str, contents: &[u8]| {
        fs::write(dir.path().join(name), contents).unwrap();
        let mut tar = command("tar");
        let tar = tar.arg("-C").arg(dir.path()).arg("-rf").arg(&archive).arg(name);
        assert!(tar.status().unwrap().success());
    };
    append("inline", b"first");
    append("large", &vec![b'1'; 3 << 20]);
    append("other", &vec![b'o'; 100_000]);
    append("inline", b"second");
    append("large", &vec![b'2'; 1 << 20]);
    let fs = filesystem(&image, 256 << 20, Runtime::system());
    let top = fs.top_level();
    from_path(&fs, top, &archive, &ImportOptions::default(), &mut Vec::new()).unwrap();
    for (name, contents) in [
        (&b"inline"[..], b"second".to_vec()),
        (b"large", vec![b'2'; 1 << 20]),
        (b"other", vec![b'o'; 100_000]),
    ] {
        let mut have = vec![0; contents.len() + 1];
        let id = fs.lookup(top, name).unwrap();
        let len = fs.read(id, ubtrfs_ondisk::FileOffset(0), &mut have).unwrap();
        assert!(have[..len] == contents, "{}", String::from_utf8_lossy(name));
    }
    drop(fs);
    assert_checks_clean(&image);
}

#[test]
fn import_tar_same_name_twice_later_replaces() {
    if !oracle::require_all(&[Oracle::Tar, Oracle::BtrfsProgs]) {
        return;
    }
    let (dir, source) = (tempdir().unwrap(), tempdir().unwrap());
    let archive = dir.path().join("a.tar");
    let tar = |option: &str| {
        let out =
            command("tar").arg(option).arg(&archive).arg("-C").arg(source.path()).arg(".").output();
        assert!(out.unwrap().status.success());
    };
    fs::write(source.path().join("large"), vec![1; 5 << 20]).unwrap();
    fs::write(source.path().join("small"), "first").unwrap();
    fs::write(source.path().join("linked"), vec![3; 100_000]).unwrap();
    fs::hard_link(source.path().join("linked"), source.path().join("other")).unwrap();
    tar("-cf");
    fs::write(source.path().join("large"), "no longer large").unwrap();
    fs::write(source.path().join("small"), vec![2; 3 << 20]).unwrap();
    fs::remove_file(source.path().join("linked")).unwrap();
    std::os::unix::fs::symlink("small", source.path().join("linked")).unwrap();
    tar("-rf");

    let image = dir.path().join("image");
    let filesystem = filesystem(&image, 256 << 20, Runtime::system());
    let (top, options) = (filesystem.top_level(), ImportOptions::default());
    from_path(&filesystem, top, &archive, &options, &mut Vec::new()).unwrap();
    let target = dir.path().join("out");
    export::to_directory(&filesystem, top, &target, Existing::Refuse, &mut Vec::new()).unwrap();
    drop(filesystem);
    assert_checks_clean(&image);
    let before = TreeSnapshot::of_directory(source.path());
    let compare = Compare { mtime: false, ..Compare::copied() };
    TreeSnapshot::of_directory(&target).assert_same(&before, &compare);
}

/// Such an import ended at the first of these names, with the error that the file lies in another subvolume.
#[test]
fn import_hard_links_across_subvolumes_as_copies_that_share_data() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::BtrfsProgs, Oracle::Root]) {
        return;
    }
    let (dir, source) = (tempdir().unwrap(), tempdir().unwrap());
    let at = |path: &str| source.path().join(path);
    fs::create_dir_all(at("z/deep")).unwrap();
    fs::create_dir_all(at("z2")).unwrap();
    let file = File::create(at("data")).unwrap();
    file.write_all_at(&[7; 300_000], 0).unwrap();
    file.write_all_at(b"end", 1_000_000).unwrap();
    fs::write(at("small"), "inline").unwrap();
    symlink("data", at("pointer")).unwrap();
    command("mkfifo").arg(at("pipe")).output().unwrap();
    command("setfattr").args(["-n", "user.kept", "-v", "yes"]).arg(at("data")).output().unwrap();
    command("setcap").arg("cap_net_raw+ep").arg(at("small")).output().unwrap();
    std::os::unix::fs::chown(at("data"), Some(5), Some(6)).unwrap();
    fs::set_permissions(at("data"), fs::Permissions::from_mode(0o6755)).unwrap();
    for (name, others) in [
        ("data", &["z/data", "z/deep/data", "z/other"][..]),
        ("small", &["z/small", "z2/small"]),
        ("pointer", &["z/pointer"]),
        ("pipe", &["z/pipe"]),
    ] {
        for other in others {
            fs::hard_link(at(name), at(other)).unwrap();
        }
    }
    let mut before = TreeSnapshot::of_directory(source.path());
    // Whose names they are is asked below.
    let without_names = |tree: &mut TreeSnapshot| {
        for entry in tree.entries.values_mut() {
            (entry.nlink, entry.link_of) = (None, None);
        }
    };
    without_names(&mut before);
    let archive = dir.path().join("archive.tar");
    let mut tar = command("tar");
    tar.args(["--xattrs", "--xattrs-include=*", "--sort=name", "--sparse", "-cf"]).arg(&archive);
    assert!(tar.arg("-C").arg(source.path()).arg(".").status().unwrap().success());

    for is_tar in [false, true] {
        let image = dir.path().join("image");
        let fs = filesystem(&image, 256 << 20, Runtime::system());
        let options = ImportOptions {
            subvolumes: vec![b"z".to_vec(), b"z2".to_vec()],
            ..ImportOptions::default()
        };
        let mut warnings: Vec<Warning> = Vec::new();
        let (into, from) = (fs.top_level(), if is_tar { &archive } else { source.path() });
        let summary = if is_tar {
            let archive = Box::new(File::open(&archive).unwrap());
            from_tar(&fs, into, archive, &options, &mut warnings).unwrap()
        } else {
            from_path(&fs, into, from, &options, &mut warnings).unwrap()
        };
        drop(fs);
        // tar has the pipe's names as pipes of their own.
        assert_eq!(warnings.len(), if is_tar { 4 } else { 5 }, "{warnings:?}");
        assert!(warnings.iter().all(|warning| warning.what == WarningKind::LinkIsCopy));
        assert_eq!(summary.hard_links, 2, "of the copy in z, two names more");
        assert_checks_clean(&image);
        let mount = KernelMount::read_only(&image, "");
        let mut seen = TreeSnapshot::of_directory(mount.path());
        without_names(&mut seen);
        seen.assert_same(&before, &Compare::copied());
        let inode = |path: &str| fs::metadata(mount.path().join(path)).unwrap();
        assert_eq!(inode("z/data").ino(), inode("z/other").ino());
        assert_eq!((inode("z/data").nlink(), inode("data").nlink()), (3, 1));
        let told = command("filefrag").arg("-v").arg(mount.path().join("z/data")).output().unwrap();
        let told = String::from_utf8(told.stdout).unwrap();
        assert_eq!(told.matches("shared").count(), 2, "{told}");
        mount.unmount();
    }
}
