use std::fs;
use std::io::Cursor;

use tempfile::{TempDir, tempdir};
use ubtrfs_testkit::odd::odd_files;
use ubtrfs_testkit::{Compare, Oracle, TreeSnapshot, command, oracle};

use super::*;
use crate::codec::{Compression, Encoder};
use crate::error::Warning;
use crate::model::{Model, seen, to_model};
use crate::pipeline::{PipelineOptions, run};
use crate::progress::Summary;
use crate::sink::Sink;
use crate::sink::tar::TarSink;
use crate::sink::tree::TreeOptions;
use crate::source::walk::{Walk, WalkOptions};

fn source(bytes: &[u8], executor: Executor) -> Result<TarSource> {
    TarSource::new(Box::new(Cursor::new(bytes.to_vec())), 4096, executor)
}

fn read_into(bytes: &[u8], model: Model) -> Result<(Model, Summary, Vec<Warning>)> {
    to_model(source(bytes, Executor::Inline)?, model, TreeOptions::default(), Executor::Inline)
}

fn read(bytes: &[u8]) -> Result<(Model, Summary, Vec<Warning>)> {
    read_into(bytes, Model::new())
}

fn tree(bytes: &[u8]) -> TreeSnapshot {
    read(bytes).unwrap().0.snapshot()
}

fn error(bytes: &[u8]) -> String {
    read(bytes).map(|_| ()).unwrap_err().to_string()
}

fn write(directory: &Path, compression: Compression) -> (Vec<u8>, Vec<Warning>) {
    let executor = Executor::Threads(2);
    let mut sink = TarSink::new(Encoder::new(Vec::new(), compression, executor).unwrap());
    let mut warnings = Vec::new();
    let walk = Walk::new(directory, WalkOptions::default()).unwrap();
    run(walk, &mut sink, &PipelineOptions::new(executor), &mut warnings).unwrap();
    (sink.into_output().finish().unwrap(), warnings)
}

/// Odd files without what no tar archive can hold.
fn odd() -> TempDir {
    let dir = tempdir().unwrap();
    odd_files(dir.path(), 5);
    fs::remove_file(dir.path().join("special/socket")).unwrap();
    dir
}

/// A member as a test wants it, right or wrong.
#[derive(Clone)]
struct Raw {
    name: &'static [u8],
    letter: u8,
    size: &'static str,
    link: &'static [u8],
    content: Vec<u8>,
}

fn raw(name: &'static [u8], letter: u8) -> Raw {
    Raw { name, letter, size: "", link: b"", content: Vec::new() }
}

fn file(name: &'static [u8], content: &[u8]) -> Raw {
    Raw { content: content.to_vec(), ..raw(name, b'0') }
}

fn header_of(member: &Raw) -> Block {
    let mut block = [0; BLOCK_BYTES];
    block[..member.name.len()].copy_from_slice(member.name);
    block[100..107].copy_from_slice(b"0000644");
    block[108..115].copy_from_slice(b"0000012");
    block[116..123].copy_from_slice(b"0000013");
    let size = match member.size {
        "" => format!("{:011o}", member.content.len()),
        size => size.to_string(),
    };
    block[124..124 + size.len()].copy_from_slice(size.as_bytes());
    block[136..147].copy_from_slice(b"00000000144");
    block[156] = member.letter;
    block[157..157 + member.link.len()].copy_from_slice(member.link);
    block[257..265].copy_from_slice(b"ustar\x0000");
    seal(&mut block);
    block
}

fn seal(block: &mut Block) {
    let sum = format!("{:06o}\0 ", checksum(block));
    block[148..156].copy_from_slice(sum.as_bytes());
}

fn archive(members: &[Raw]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for member in members {
        bytes.extend_from_slice(&header_of(member));
        bytes.extend_from_slice(&member.content);
        bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
    }
    bytes.extend_from_slice(&[0; 2 * BLOCK_BYTES]);
    bytes
}

fn pax(records: &[(&str, &str)]) -> Raw {
    let mut content = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let len = (1..).map(|digits| rest + digits).find(|l| l.to_string().len() + rest == *l);
        content.extend_from_slice(format!("{} {key}={value}\n", len.unwrap()).as_bytes());
    }
    Raw { content, ..raw(b"pax", b'x') }
}

/// What followed it was taken for the next header.
#[test]
fn directory_told_by_its_name_may_have_content() {
    let bytes = archive(&[file(b"old/", b"listing"), file(b"old/next", b"content")]);
    let (_, summary, warnings) = read(&bytes).unwrap();
    assert_eq!((summary.files, summary.data_bytes, warnings.len()), (1, 7, 0));
}

#[test]
fn tar_own_archive_of_odd_files_read_back() {
    let dir = odd();
    let before = seen(dir.path());
    for compression in [Compression::None, Compression::Zstd] {
        let (bytes, warnings) = write(dir.path(), compression);
        assert_eq!(warnings, []);
        for executor in [Executor::Inline, Executor::Threads(3)] {
            let source = source(&bytes, executor).unwrap();
            let (model, _, warnings) =
                to_model(source, Model::new(), TreeOptions::default(), executor).unwrap();
            assert_eq!(warnings, []);
            model.snapshot().assert_same(&before, &Compare::copied());
        }
    }
}

#[test]
fn tar_own_archive_unpacked_by_gnu_tar_equal() {
    if !oracle::require_all(&[Oracle::Tar, Oracle::Root]) {
        return;
    }
    let (dir, target) = (odd(), tempdir().unwrap());
    // GNU tar cannot unpack what is deeper than a path may be long.
    fs::remove_dir_all(dir.path().join("deep")).unwrap();
    let (bytes, _) = write(dir.path(), Compression::Gzip);
    let path = target.path().join("x.tar.gz");
    fs::write(&path, bytes).unwrap();
    let unpacked = target.path().join("unpacked");
    fs::create_dir(&unpacked).unwrap();
    let status = command("tar")
        .args(["--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner", "-xpf"])
        .arg(&path)
        .arg("-C")
        .arg(&unpacked)
        .output()
        .unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    seen(&unpacked).assert_same(&seen(dir.path()), &Compare::copied());
}

#[test]
fn tar_archives_of_gnu_tar_read_in_each_format() {
    if !oracle::require_all(&[Oracle::Tar, Oracle::Root]) {
        return;
    }
    let dir = odd();
    // Shorter than a block of the archive: GNU tar does not take it for a hole.
    fs::remove_file(dir.path().join("sparse/hole-of-one-byte")).unwrap();
    let before = seen(dir.path());
    let seconds = Compare { nanoseconds: false, xattrs: false, ..Compare::copied() };
    let plain = Compare { holes: false, ..seconds.clone() };
    let cases: [(&[&str], &Compare); 6] = [
        (&["--format=pax", "--xattrs", "--xattrs-include=*", "--acls", "-S"], &Compare::copied()),
        (
            &["--format=pax", "-S", "--sparse-version=0.0"],
            &Compare { xattrs: false, ..Compare::copied() },
        ),
        (
            &["--format=pax", "-S", "--sparse-version=0.1"],
            &Compare { xattrs: false, ..Compare::copied() },
        ),
        (&["--format=gnu", "-S"], &seconds),
        (&["--format=gnu", "-S", "-z"], &seconds),
        (&["--format=gnu", "--exclude=far", "--exclude=only-hole"], &plain),
    ];
    for (options, compare) in cases {
        let out = command("tar")
            .args(options)
            .args(["--numeric-owner", "--sort=name", "--warning=no-file-ignored", "-cf", "-", "-C"])
            .arg(dir.path())
            .arg(".")
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let mut before = before.clone();
        if options.contains(&"--exclude=far") {
            before
                .entries
                .retain(|path, _| !path.ends_with(b"/far") && !path.ends_with(b"/only-hole"));
        }
        eprintln!("{options:?}");
        let executor = Executor::Threads(2);
        let (model, _, warnings) = to_model(
            source(&out.stdout, executor).unwrap(),
            Model::new(),
            TreeOptions::default(),
            executor,
        )
        .unwrap();
        assert_eq!(warnings, [], "{options:?}");
        model.snapshot().assert_same(&before, compare);
    }
}

#[test]
fn tar_archives_of_libarchive_both_ways() {
    if !oracle::require_all(&[Oracle::Bsdtar, Oracle::Root]) {
        return;
    }
    let (dir, target) = (odd(), tempdir().unwrap());
    // What libarchive's bsdtar cannot do: long paths, and names that no locale can tell.
    for odd in ["deep", "names", "links"] {
        fs::remove_dir_all(dir.path().join(odd)).unwrap();
    }
    fs::remove_file(dir.path().join("symlinks/bytes")).unwrap();
    fs::remove_file(dir.path().join("sparse/hole-of-one-byte")).unwrap();
    // libarchive writes minus one and a half seconds as minus two and a half.
    fs::remove_file(dir.path().join("times/before-epoch")).unwrap();
    let before = seen(dir.path());
    let out = command("bsdtar")
        .args(["--format=pax", "--numeric-owner", "-cf", "-", "-C"])
        .arg(dir.path())
        .arg(".")
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let (model, _, warnings) = read(&out.stdout).unwrap();
    assert_eq!(warnings, []);
    model.snapshot().assert_same(&before, &Compare::copied());

    let path = target.path().join("x.tar");
    fs::write(&path, write(dir.path(), Compression::Zstd).0).unwrap();
    let unpacked = target.path().join("unpacked");
    fs::create_dir(&unpacked).unwrap();
    let out = command("bsdtar")
        .args(["--numeric-owner", "-xpf"])
        .arg(&path)
        .arg("-C")
        .arg(&unpacked)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    // It leaves the directory that it unpacks into as it is.
    seen(&unpacked).assert_same(&before, &Compare { root: false, ..Compare::copied() });
}

#[test]
fn tar_compressed_by_the_usual_programs_read() {
    let plain = archive(&[file(b"a", b"content")]);
    let dir = tempdir().unwrap();
    let path = dir.path().join("a.tar");
    for program in ["gzip", "xz", "zstd", "bzip2"] {
        fs::write(&path, &plain).unwrap();
        let out = command(program).args(["-c"]).arg(&path).output();
        let Ok(out) = out else { continue };
        assert!(tree(&out.stdout).entries.contains_key(&b"a"[..]), "{program}");
    }
}

#[test]
fn tar_implied_parents_made_and_members_any_order() {
    let bytes = archive(&[
        file(b"a/b/c", b"1"),
        raw(b"a/b/", b'5'),
        raw(b"./", b'5'),
        file(b"/abs//x/./y", b"2"),
        raw(b"d/", 0),
    ]);
    let (model, summary, warnings) = read(&bytes).unwrap();
    let tree = model.snapshot();
    let paths: Vec<&[u8]> = tree.entries.keys().map(Vec::as_slice).collect();
    let expected: [&[u8]; 8] = [b"", b"a", b"a/b", b"a/b/c", b"abs", b"abs/x", b"abs/x/y", b"d"];
    assert_eq!(paths, expected);
    let mtime = |path: &[u8]| tree.entries[path].mtime.unwrap().sec;
    assert_eq!((mtime(b"a"), mtime(b"a/b"), mtime(b"")), (0, 100, 100));
    assert_eq!(tree.entries[&b"a"[..]].mode, 0o755);
    assert_eq!(tree.entries[&b"a/b"[..]].mode, 0o644);
    assert_eq!(warnings.len(), 1);
    assert_eq!(summary.files, 2);
}

#[test]
fn tar_same_name_twice_later_replaces() {
    let bytes = archive(&[
        file(b"a", b"first"),
        file(b"a", b"2"),
        file(b"b", b"file"),
        raw(b"b/", b'5'),
        Raw { link: b"a", ..raw(b"c", b'2') },
        file(b"c", b"no longer a link"),
    ]);
    let tree = tree(&bytes);
    assert_eq!(tree.entries[&b"a"[..]].size_bytes, Some(1));
    assert_eq!(tree.entries[&b"c"[..]].size_bytes, Some(16));
    assert_eq!(tree.entries[&b"b"[..]].kind, ubtrfs_testkit::snapshot::Kind::Directory);
}

#[test]
fn tar_what_was_there_before_kept() {
    let (model, ..) = read(&archive(&[file(b"a", b"precious"), raw(b"d/", b'5')])).unwrap();
    let bytes = archive(&[file(b"d/new", b"x"), file(b"a", b"other")]);
    let result = read_into(&bytes, model.settle());
    let error = result.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("is there already"), "{error}");
}

#[test]
fn tar_hard_links_to_earlier_members() {
    let link = |name, target| Raw { link: target, ..raw(name, b'1') };
    let tree = tree(&archive(&[
        file(b"d/a", b"x"),
        link(b"b", b"./d/a"),
        link(b"b", b"d/a"),
        link(b"e/c", b"/d//a"),
    ]));
    assert_eq!(tree.entries[&b"e/c"[..]].link_of.as_deref(), Some(&b"b"[..]));
    assert_eq!(tree.entries[&b"b"[..]].nlink, Some(3));
    assert!(error(&archive(&[link(b"b", b"nowhere/a")])).contains("does not come before"));
    assert!(error(&archive(&[raw(b"d/", b'5'), link(b"b", b"d")])).contains("directory"));
    assert!(error(&archive(&[link(b"b", b"../a")])).contains(".."));
}

#[test]
fn tar_names_that_lead_out_refused() {
    for name in [&b"../x"[..], b"a/../../x", b"a/..", b"/.."] {
        let message = error(&archive(&[file(name, b"x")]));
        assert!(message.contains("\"..\"") && message.contains("at byte 0"), "{message}");
    }
}

#[test]
fn tar_member_below_symlink_refused() {
    let link = |target| Raw { link: target, ..raw(b"l", b'2') };
    for target in [&b"/etc"[..], b".", b"l", b".."] {
        let message = error(&archive(&[link(target), file(b"l/x", b"x")]));
        assert!(message.contains("symbolic link"), "{message}");
        let message = error(&archive(&[link(target), raw(b"l/x/y/", b'5')]));
        assert!(message.contains("symbolic link"), "{message}");
        let hard = Raw { link: b"l/passwd", ..raw(b"h", b'1') };
        let message = error(&archive(&[link(target), hard]));
        assert!(message.contains("symbolic link"), "{message}");
    }
    let message = error(&archive(&[file(b"f", b""), file(b"f/x", b"x")]));
    assert!(message.contains("not a directory"), "{message}");
    let message = error(&archive(&[file(b"d/x", b""), file(b"d", b"x")]));
    assert!(message.contains("is a directory"), "{message}");
}

#[test]
fn tar_cut_anywhere_error_or_warning_with_place() {
    let mut bytes = archive(&[
        pax(&[("path", "long"), ("SCHILY.xattr.user.a", "b")]),
        file(b"short", &[1; 700]),
        file(b"second", &[2; 100]),
    ]);
    bytes.truncate(bytes.len() - 1024);
    for len in 1..bytes.len() {
        match read(&bytes[..len]) {
            Err(Error::Archive { problem: ArchiveProblem::Truncated { .. }, member, .. }) => {
                let known = member.map_or(String::new(), |name| name.to_string());
                assert!(["", "long", "second", "pax"].contains(&known.as_str()), "{known}");
            }
            Ok((_, summary, warnings)) => {
                assert!(len.is_multiple_of(BLOCK_BYTES) && summary.files < 2 || len == bytes.len());
                assert_eq!(warnings[0].what, WarningKind::NoEndMarker);
            }
            Err(other) => panic!("{len}: {other}"),
        }
    }
}

#[test]
fn tar_cut_large_member_named_with_offset() {
    let mut bytes = archive(&[file(b"large", &vec![1; 3 << 20])]);
    bytes.truncate(2 << 20);
    let message = error(&bytes);
    assert!(message.contains("member large at byte 2097152"), "{message}");
}

#[test]
fn tar_damaged_header_named_with_offset() {
    let mut bytes = archive(&[file(b"a", b"x"), file(b"b", b"y")]);
    bytes[1024 + 3] ^= 1;
    let message = error(&bytes);
    assert!(message.contains("at byte 1024") && message.contains("checksum"), "{message}");
}

#[test]
fn tar_not_an_archive_said_so() {
    assert!(error(b"").contains("empty"));
    assert!(error(&[b'x'; 2000]).contains("not a tar archive"));
    assert!(error(b"#!/bin/sh\necho hello\n").contains("ends here"));
}

#[test]
fn tar_wrong_numbers_refused() {
    let sized = |size| Raw { size, ..raw(b"a", b'0') };
    assert!(error(&archive(&[sized("77777777777")])).contains("ends here"));
    assert!(error(&archive(&[sized("1234567890x")])).contains("size"));
    assert!(error(&archive(&[sized("\u{7f}")])).contains("size"));
    let x = |records: &[(&str, &str)]| error(&archive(&[pax(records), file(b"a", b"")]));
    assert!(x(&[("size", "18446744073709551615")]).contains("size"));
    assert!(x(&[("size", "9223372036854775807")]).contains("ends here"));
    assert!(x(&[("size", "-1")]).contains("size"));
    assert!(x(&[("uid", "4294967296")]).contains("owner"));
    assert!(x(&[("mtime", "soon")]).contains("modification time"));
    let large = Raw { size: "77777777777", ..raw(b"a", b'x') };
    assert!(error(&archive(&[large])).contains("over the limit"));
}

/// Each extended header was bounded, their number was not: a small compressed archive could fill the
/// memory, and beyond 4 GiB the batch's buffer panicked.
#[test]
fn tar_extended_headers_of_one_member_bounded_together() {
    let value = "x".repeat(6 << 20);
    let headers = ["user.a", "user.b", "user.c"]
        .map(|name| pax(&[(&format!("SCHILY.xattr.{name}"), value.as_str())]));
    let message = error(&archive(&[&headers[..], &[file(b"a", b"")]].concat()));
    assert!(message.contains("over the limit"), "{message}");
    // What replaces an earlier record takes no more, and the next member begins anew.
    let [first, second, third] = headers;
    let members =
        [first.clone(), first, file(b"a", b""), second, file(b"b", b""), third, file(b"c", b"")];
    assert_eq!(tree(&archive(&members)).entries.len(), 4);
}

#[test]
fn tar_sparse_maps_wrong_refused() {
    let old = |map: &str| {
        let records =
            [("GNU.sparse.numblocks", "2"), ("GNU.sparse.size", "10000"), ("GNU.sparse.map", map)];
        archive(&[pax(&records), file(b"a", &[1; 1000])])
    };
    let entry = &tree(&old("100,500,9000,500")).entries[&b"a"[..]];
    assert_eq!(entry.data, Some(vec![0..4096, 8192..10_000]));
    for map in [
        "0,500,400,500",
        "0,500,9900,500",
        "0,1000,5000",
        "0,18446744073709551615,5,1",
        "9223372036854775807,1",
        "0,100",
        "0,x",
        "5000,500,0,500",
    ] {
        assert!(error(&old(map)).contains("sparse map"), "{map}");
    }
    let new = |map: &str, realsize: &str| {
        let mut content = map.as_bytes().to_vec();
        content.resize(512, 0);
        content.extend_from_slice(&[1; 10]);
        let records = [
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.name", "real/name"),
            ("GNU.sparse.realsize", realsize),
        ];
        archive(&[pax(&records), file(b"a", &content)])
    };
    assert!(tree(&new("1\n20000\n10\n", "30000")).entries.contains_key(&b"real/name"[..]));
    for (map, size) in [
        ("1\n20000\n10\n", "20005"),
        ("99\n20000\n10\n", "30000"),
        ("1\n0\n9\n", "30000"),
        ("x\n", "30000"),
        ("1\n0\n10\n", "18446744073709551615"),
    ] {
        let message = error(&new(map, size));
        assert!(message.contains("sparse") || message.contains("size"), "{map} {message}");
    }
}

#[test]
fn tar_bytes_changed_at_random_never_panics() {
    let dir = tempdir().unwrap();
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("d/file"), vec![1; 5000]).unwrap();
    std::os::unix::fs::symlink("x", dir.path().join("l")).unwrap();
    let sparse = fs::File::create(dir.path().join("sparse")).unwrap();
    sparse.set_len(1 << 20).unwrap();
    let (bytes, _) = write(dir.path(), Compression::None);
    let mut prng = ubtrfs_testkit::Prng::new(11);
    for round in 0..3000 {
        let mut bytes = bytes.clone();
        for _ in 0..=round % 4 {
            let at = prng.index(bytes.len());
            bytes[at] = prng.next_u64().to_le_bytes()[0];
            // Most changes reach further with checksums that are right.
            if round % 2 == 0 {
                let start = at / BLOCK_BYTES * BLOCK_BYTES;
                let block = bytes[start..].first_chunk_mut::<BLOCK_BYTES>().unwrap();
                seal(block);
            }
        }
        let _ = read(&bytes);
    }
}

#[test]
fn tar_sink_long_and_odd_names_round_trip() {
    let dir = tempdir().unwrap();
    let deep = dir.path().join("x".repeat(90)).join("y".repeat(90)).join("z".repeat(90));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("é".repeat(100)), "x").unwrap();
    fs::write(dir.path().join("p".repeat(100)), "x").unwrap();
    let (bytes, _) = write(dir.path(), Compression::None);
    tree(&bytes).assert_same(&seen(dir.path()), &Compare::copied());
    // Twice the same: nothing in it depends on when it was written.
    assert!(write(dir.path(), Compression::None).0 == bytes);
}

/// The header of a further name said 0644, root and 1970. GNU tar does not look, but Python's
/// tarfile and others give the file, which all names share, what the last header says.
#[test]
fn tar_sink_further_names_have_the_metadata_of_the_first() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let file = fs::File::create(path("a")).unwrap();
    fs::hard_link(path("a"), path("b")).unwrap();
    fs::hard_link(path("a"), path("c")).unwrap();
    file.set_permissions(fs::Permissions::from_mode(0o4711)).unwrap();
    if oracle::require(Oracle::Root) {
        std::os::unix::fs::chown(path("a"), Some(1234), Some(3_000_000)).unwrap();
    }
    file.set_permissions(fs::Permissions::from_mode(0o4711)).unwrap();
    file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(981_173_106, 5)).unwrap();
    let (bytes, _) = write(dir.path(), Compression::None);
    let headers: Vec<&[u8]> = bytes
        .chunks(BLOCK_BYTES)
        .filter(|block| block.get(257..262) == Some(&b"ustar"[..]))
        .filter(|block| matches!(block[156], b'0' | b'1'))
        .collect();
    assert_eq!(headers.iter().map(|block| block[156]).collect::<Vec<_>>(), b"011");
    // Mode, owner, group and time; the part of a second is in an extended header of each.
    let about = |block: &[u8]| [&block[100..124], &block[136..148]].concat();
    assert_eq!(about(headers[1]), about(headers[0]));
    assert_eq!(about(headers[2]), about(headers[0]));
}

#[test]
fn tar_sink_socket_skipped_with_warning() {
    let dir = tempdir().unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap();
    let mut sink = TarSink::new(Vec::new());
    let mut warnings = Vec::new();
    let walk = Walk::new(dir.path(), WalkOptions::default()).unwrap();
    let options = PipelineOptions::new(Executor::Inline);
    let summary = run(walk, &mut sink, &options, &mut warnings).unwrap();
    assert_eq!((summary.skipped, warnings.len()), (1, 1));
    let _ = sink.prepare();
}
