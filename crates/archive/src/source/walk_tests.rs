use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use tempfile::tempdir;
use ubtrfs_rt::Executor;
use ubtrfs_testkit::Compare;
use ubtrfs_testkit::odd::odd_files;

use super::*;
use crate::batch::PIECE_BYTES_MAX;
use crate::model::{Model, seen, to_model};
use crate::pipeline::{PipelineOptions, run};
use crate::sink::directory::{DirectorySink, Existing};
use crate::sink::tree::{Owner, TreeOptions};

fn walk(path: &Path) -> Walk {
    Walk::new(path, WalkOptions::default()).unwrap()
}

/// Everything that the stream carries, of the model's own hole granularity.
fn loaded<L: crate::batch::Load>(batch: Batch<L>) -> Vec<Step<Vec<u8>>> {
    let (batch, result) = batch.load(&crate::batch::Unprepared);
    result.unwrap();
    batch.steps
}

fn same() -> Compare {
    Compare::copied()
}

#[test]
fn walk_odd_files_all_in_model() {
    let source = tempdir().unwrap();
    odd_files(source.path(), 1);
    let before = seen(source.path());
    for executor in [Executor::Inline, Executor::Threads(1), Executor::Threads(4)] {
        let (model, summary, warnings) =
            to_model(walk(source.path()), Model::new(), TreeOptions::default(), executor).unwrap();
        model.snapshot().assert_same(&before, &same());
        assert_eq!(warnings, []);
        assert!(summary.hard_links > 100 && summary.hole_bytes > 1 << 30);
    }
}

#[test]
fn export_odd_files_equal_directory() {
    let (source, target) = (tempdir().unwrap(), tempdir().unwrap());
    odd_files(source.path(), 2);
    let before = seen(source.path());
    let mut sink = DirectorySink::new(target.path(), Existing::Refuse).unwrap();
    let options = PipelineOptions::new(Executor::Threads(2));
    let mut warnings = Vec::new();
    let summary = run(walk(source.path()), &mut sink, &options, &mut warnings).unwrap();
    seen(target.path()).assert_same(&before, &same());
    assert_eq!(warnings, []);
    assert_eq!(summary.skipped, 0);
}

#[test]
fn export_again_merge_replaces() {
    let (source, target) = (tempdir().unwrap(), tempdir().unwrap());
    odd_files(source.path(), 2);
    let before = seen(source.path());
    let options = PipelineOptions::new(Executor::Inline);
    for existing in [Existing::Refuse, Existing::Merge] {
        let mut sink = DirectorySink::new(target.path(), existing).unwrap();
        run(walk(source.path()), &mut sink, &options, &mut Vec::new()).unwrap();
        seen(target.path()).assert_same(&before, &same());
    }
    let error = DirectorySink::new(target.path(), Existing::Refuse).unwrap_err();
    assert!(error.to_string().contains("not empty"), "{error}");
}

#[test]
fn export_target_has_symlink_not_followed() {
    let dirs = tempdir().unwrap();
    let (source, target, outside) =
        (dirs.path().join("source"), dirs.path().join("target"), dirs.path().join("outside"));
    for dir in [&source, &target, &outside] {
        fs::create_dir(dir).unwrap();
    }
    fs::create_dir(source.join("dir")).unwrap();
    fs::write(source.join("dir/file"), "x").unwrap();
    std::os::unix::fs::symlink(&outside, target.join("dir")).unwrap();
    let mut sink = DirectorySink::new(&target, Existing::Merge).unwrap();
    let options = PipelineOptions::new(Executor::Inline);
    let error = run(walk(&source), &mut sink, &options, &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("dir"), "{error}");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
}

#[test]
fn walk_deeper_than_open_files_and_paths_both_ways() {
    let (source, target) = (tempdir().unwrap(), tempdir().unwrap());
    let name = "d".repeat(200);
    let mut dir = openat(CWD, source.path(), DIRECTORY_FLAGS, Mode::empty()).unwrap();
    const DEPTH: usize = 300;
    for _ in 0..DEPTH {
        rustix::fs::mkdirat(&dir, &*name, Mode::from_raw_mode(0o755)).unwrap();
        let flags = OFlags::CREATE.union(OFlags::WRONLY);
        openat(&dir, "file", flags, Mode::from_raw_mode(0o644)).unwrap();
        dir = openat(&dir, &*name, DIRECTORY_FLAGS, Mode::empty()).unwrap();
    }
    let mut sink = DirectorySink::new(target.path(), Existing::Refuse).unwrap();
    let options = PipelineOptions::new(Executor::Threads(2));
    let summary = run(walk(source.path()), &mut sink, &options, &mut Vec::new()).unwrap();
    assert_eq!((summary.files, summary.directories), (DEPTH as u64, DEPTH as u64 + 1));
    let again =
        to_model(walk(target.path()), Model::new(), TreeOptions::default(), Executor::Inline);
    assert_eq!(again.unwrap().1, summary);
}

#[test]
fn walk_owner_and_subvolumes_as_asked() {
    let source = tempdir().unwrap();
    fs::create_dir_all(source.path().join("a/b/c")).unwrap();
    let options = TreeOptions {
        owner: Some(Owner { uid: 7, gid: 8 }),
        subvolumes: vec![b"/a/b/".to_vec()],
        ..TreeOptions::default()
    };
    let (model, summary, _) =
        to_model(walk(source.path()), Model::new(), options.clone(), Executor::Inline).unwrap();
    assert!(model.snapshot().entries.values().all(|entry| (entry.uid, entry.gid) == (7, 8)));
    assert_eq!((summary.subvolumes, model.subvolumes()), (1, 1));
    for path in ["", "..", "a/../b", "nowhere"] {
        let options = TreeOptions { subvolumes: vec![path.into()], ..options.clone() };
        let result = to_model(walk(source.path()), Model::new(), options, Executor::Inline);
        assert!(matches!(result, Err(Error::Refused { .. })), "{path}");
    }
}

#[test]
fn walk_excluded_file_left_out_with_warning() {
    let source = tempdir().unwrap();
    let image = source.path().join("image");
    fs::write(&image, "x").unwrap();
    fs::write(source.path().join("other"), "x").unwrap();
    let id = FileId::from(&rustix::fs::stat(&image).unwrap());
    let options = WalkOptions { exclude: HashSet::from([id]), ..WalkOptions::default() };
    let walk = Walk::new(source.path(), options).unwrap();
    let (_, summary, warnings) =
        to_model(walk, Model::new(), TreeOptions::default(), Executor::Inline).unwrap();
    assert_eq!((summary.files, summary.skipped), (1, 1));
    assert_eq!(warnings[0].what, WarningKind::IsTheImage);
}

#[test]
fn load_file_that_shrank_or_grew_says_so() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("file");
    let open = || OwnedFd::from(File::open(&path).unwrap());
    let whole = || FileLoad { file: Arc::new(open()), offset: 0, ends_file: true };
    fs::write(&path, "0123456789").unwrap();
    let loaded = whole().load(20).unwrap();
    assert_eq!((loaded.bytes.len(), loaded.grew), (10, false));
    let loaded = whole().load(10).unwrap();
    assert_eq!((loaded.bytes.len(), loaded.grew), (10, false));
    let loaded = whole().load(5).unwrap();
    assert_eq!((loaded.bytes.as_slice(), loaded.grew), (&b"01234"[..], true));
    let piece = FileLoad { file: Arc::new(open()), offset: 8, ends_file: false };
    assert_eq!(piece.load(100).unwrap().bytes, b"89");
}

#[test]
fn walk_large_file_cut_meanwhile_rest_is_zeros() {
    let source = tempdir().unwrap();
    let path = source.path().join("large");
    fs::write(&path, vec![7; 3 * PIECE_BYTES_MAX]).unwrap();
    let mut walk = walk(source.path());
    let mut batch = Batch::default();
    assert!(walk.fill(&mut batch).unwrap());
    File::options().write(true).open(&path).unwrap().set_len(10).unwrap();
    let mut steps = loaded(batch);
    let mut more = true;
    while more {
        let mut batch = Batch::default();
        more = walk.fill(&mut batch).unwrap();
        steps.extend(loaded(batch));
    }
    let bytes: Vec<u8> = steps
        .iter()
        .filter_map(|step| match step {
            Step::Data { data, .. } => Some(data.as_slice()),
            _ => None,
        })
        .collect::<Vec<_>>()
        .concat();
    assert_eq!(bytes.len(), 3 * PIECE_BYTES_MAX);
    assert!(bytes[..10].iter().all(|&b| b == 7) && bytes[10..].iter().all(|&b| b == 0));
    let warned = steps.iter().filter(|step| match step {
        Step::Warning(warning) => matches!(warning.what, WarningKind::Shrank { .. }),
        _ => false,
    });
    assert_eq!(warned.count(), 3);
}

/// Only of what fits a piece it was told.
#[test]
fn walk_large_file_that_grew_meanwhile_warned_of() {
    let source = tempdir().unwrap();
    let path = source.path().join("large");
    fs::write(&path, vec![7; 2 * PIECE_BYTES_MAX + 5]).unwrap();
    let mut walk = walk(source.path());
    let mut grown = Vec::new();
    let mut more = true;
    while more {
        let mut batch = Batch::default();
        more = walk.fill(&mut batch).unwrap();
        if grown.is_empty() {
            let file = File::options().append(true).open(&path).unwrap();
            std::io::Write::write_all(&mut &file, b"more").unwrap();
        }
        grown.extend(loaded(batch));
    }
    let bytes =
        grown.iter().map(|step| if let Step::Data { data, .. } = step { data.len() } else { 0 });
    assert_eq!(bytes.sum::<usize>(), 2 * PIECE_BYTES_MAX + 5);
    let warned = grown.iter().filter(|step| match step {
        Step::Warning(warning) => warning.what == WarningKind::Grew,
        _ => false,
    });
    assert_eq!(warned.count(), 1);
}

#[test]
fn walk_file_that_vanished_warned_of() {
    let source = tempdir().unwrap();
    fs::create_dir(source.path().join("dir")).unwrap();
    for name in ["a", "dir/gone", "z"] {
        fs::write(source.path().join(name), name).unwrap();
    }
    let mut walk = walk(source.path());
    fs::remove_file(source.path().join("z")).unwrap();
    let (_, summary, warnings) = {
        fs::write(source.path().join("new"), "not listed").unwrap();
        to_model(walk_checked(&mut walk), Model::new(), TreeOptions::default(), Executor::Inline)
            .unwrap()
    };
    assert_eq!((summary.files, summary.skipped), (2, 1));
    assert_eq!(warnings[0].what, WarningKind::Vanished);
    assert!(warnings[0].path.0.ends_with(b"/z"));
}

fn walk_checked(walk: &mut Walk) -> &mut Walk {
    walk
}

impl Source for &mut Walk {
    type Load = FileLoad;

    fn fill(&mut self, batch: &mut Batch<FileLoad>) -> Result<bool> {
        Walk::fill(self, batch)
    }
}

#[test]
fn walk_small_sparse_file_keeps_holes_and_content() {
    let source = tempdir().unwrap();
    let file = File::create(source.path().join("sparse")).unwrap();
    file.set_len(300_000).unwrap();
    file.write_all_at(b"middle", 150_000).unwrap();
    let full = File::create(source.path().join("full")).unwrap();
    full.write_all_at(&[1; 100_000], 0).unwrap();
    let before = seen(source.path());
    let (model, summary, _) =
        to_model(walk(source.path()), Model::new(), TreeOptions::default(), Executor::Inline)
            .unwrap();
    model.snapshot().assert_same(&before, &same());
    assert!(summary.hole_bytes >= 250_000);
}

#[test]
fn walk_not_a_directory_clear_error() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, "x").unwrap();
    let error = Walk::new(&path, WalkOptions::default()).unwrap_err();
    assert!(error.to_string().contains("file"), "{error}");
    assert!(Walk::new(&dir.path().join("missing"), WalkOptions::default()).is_err());
}
