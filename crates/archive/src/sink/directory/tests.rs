use std::os::unix::fs::MetadataExt;

use tempfile::tempdir;
use ubtrfs_rt::Time;

use super::*;

/// A batch whose steps `fill` makes.
fn batch(fill: impl FnOnce(&mut Batch<Vec<u8>>)) -> Batch<Vec<u8>> {
    let mut batch = Batch::default();
    fill(&mut batch);
    batch
}

fn entry(batch: &mut Batch<Vec<u8>>, name: &[u8], metadata: Metadata) -> Entry {
    Entry { place: Place::Name(batch.span(name)), metadata, xattrs: Vec::new() }
}

/// Of who runs the test.
fn metadata(permissions: u32) -> Metadata {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let mtime = Time { sec: 1_000_000_000, nsec: 0 };
    Metadata { permissions, uid, gid, atime: None, mtime }
}

/// A file in pieces, with the first of them.
fn begin(batch: &mut Batch<Vec<u8>>, name: &[u8], size_bytes: u64, data: Vec<u8>) {
    let entry = entry(batch, name, metadata(0o644));
    let content = Content::Pieces { segments: None };
    batch.push(Step::File { entry, size_bytes, content, identity: None }, 0);
    batch.push(Step::Data { offset: 0, len_bytes: data.len(), data }, 0);
}

/// A file was as long as it was to become before its data came: what a full disk or a kill had cut
/// off ended in zeros, and looked whole.
#[test]
fn file_is_as_long_as_what_was_written_and_goes_after_an_error() {
    let dir = tempdir().unwrap();
    let mut warnings = Vec::new();
    let mut report = Report::new(&mut warnings);
    let mut sink = DirectorySink::new(dir.path(), Existing::Refuse).unwrap();
    let first = batch(|batch| {
        let root = entry(batch, b"", metadata(0o755));
        batch.push(Step::Enter(root), 0);
        let hole = entry(batch, b"hole", metadata(0o644));
        let content = Content::Empty;
        batch.push(Step::File { entry: hole, size_bytes: 9000, content, identity: None }, 0);
        begin(batch, b"whole", 10_000, vec![1; 4096]);
        batch.push(Step::End, 0);
        begin(batch, b"cut", 10_000, vec![1; 4096]);
    });
    sink.apply(first, &mut report).unwrap();
    let len_bytes = |name: &str| dir.path().join(name).metadata().unwrap().len();
    assert_eq!((len_bytes("hole"), len_bytes("whole"), len_bytes("cut")), (9000, 10_000, 4096));
    assert_eq!((report.done.data_bytes, report.done.hole_bytes), (8192, 9000 + 20_000 - 8192));
    // As after an error of whatever follows.
    drop(sink);
    assert!(!dir.path().join("cut").exists());
    assert_eq!((len_bytes("hole"), len_bytes("whole")), (9000, 10_000));
    assert_eq!(dir.path().join("whole").metadata().unwrap().mtime(), 1_000_000_000);
}

/// Of a directory with a default access control list new files had it, too: who it names could read what only its owner can in the image.
#[test]
fn what_is_made_takes_over_no_access_control_list() {
    let dir = tempdir().unwrap();
    let rule = "u::rwx,u:77:rwx,g::rwx,m::rwx,o::rwx".split(',').map(|entry| format!("d:{entry}"));
    let rule = rule.collect::<Vec<_>>().join(",");
    ubtrfs_testkit::run("setfacl", ["-m".as_ref(), rule.as_ref(), dir.path().as_os_str()]);
    let target = dir.path().join("target");
    let mut warnings = Vec::new();
    let mut report = Report::new(&mut warnings);
    let mut sink = DirectorySink::new(&target, Existing::Refuse).unwrap();
    // As it is also where the directory was there before, and kept its list.
    let kept = dir.path().join("kept");
    std::fs::create_dir(&kept).unwrap();
    let mut into_kept = DirectorySink::new(&kept, Existing::Refuse).unwrap();
    let tree = || {
        batch(|batch| {
            let root = entry(batch, b"", metadata(0o750));
            batch.push(Step::Enter(root), 0);
            let sub = entry(batch, b"sub", metadata(0o750));
            batch.push(Step::Enter(sub), 0);
            let file = entry(batch, b"file", metadata(0o640));
            let content = Content::Whole(vec![1; 10]);
            batch.push(Step::File { entry: file, size_bytes: 10, content, identity: None }, 0);
            let entry = entry(batch, b"fifo", metadata(0o640));
            batch.push(Step::Special { entry, special: Special::Fifo, identity: None }, 0);
            batch.push(Step::Leave, 0);
            batch.push(Step::Leave, 0);
        })
    };
    sink.apply(tree(), &mut report).unwrap();
    into_kept.apply(tree(), &mut report).unwrap();
    let lists = |path: &Path| {
        let words = ["--absolute-names".as_ref(), "-n".as_ref(), path.as_os_str()];
        let shown = ubtrfs_testkit::run("getfacl", words);
        shown.lines().filter(|line| line.contains("user:77")).count()
    };
    for path in
        [target.clone(), target.join("sub"), target.join("sub/file"), target.join("sub/fifo")]
    {
        assert_eq!(lists(&path), 0, "{path:?}");
    }
    assert_eq!(lists(&kept), 2);
    for path in ["sub", "sub/file", "sub/fifo"] {
        assert_eq!(lists(&kept.join(path)), 0, "{path}");
    }
    assert_eq!(kept.join("sub/file").metadata().unwrap().mode() & 0o7777, 0o640);
    drop((sink, into_kept));
    assert_eq!(warnings, []);
}
