use std::fs;

use crate::snapshot::{ContentHash, Entry, Kind, TreeBuilder, hash_content, normal_ranges};
use crate::{
    CheckMode, Compare, Ending, KernelMount, Limits, MkfsBtrfs, Oracle, Prng, TreeSnapshot,
    assert_checks_clean_but_for_extended_refs, btrfs_check, collections, corpus, odd, oracle,
    run_limited,
};

fn hash_of(bytes: &[u8], borders: &[u64]) -> ContentHash {
    let size = u64::try_from(bytes.len()).unwrap();
    let data: Vec<_> = borders.windows(2).map(|pair| pair[0]..pair[1]).collect();
    hash_content(size, &data, |at, buffer| {
        let at = usize::try_from(at).unwrap();
        buffer.copy_from_slice(&bytes[at..at + buffer.len()]);
        Ok::<_, ()>(())
    })
    .unwrap()
}

#[test]
fn content_hash_wherever_holes_are_is_the_same() {
    let mut bytes = vec![0; 100_000];
    Prng::new(1).fill(&mut bytes[20_000..30_000]);
    let whole = hash_of(&bytes, &[0, 100_000]);
    assert_eq!(whole, hash_of(&bytes, &[20_000, 30_000]));
    assert_eq!(whole, hash_of(&bytes, &[0, 20_001, 25_000, 99_000]));
    bytes[29_999] ^= 1;
    assert_ne!(whole, hash_of(&bytes, &[0, 100_000]));
}

#[test]
fn ranges_neighbours_and_ends_are_normal() {
    let normal = normal_ranges([0..10, 10..20, 30..30, 40..60, 70..80], 50);
    assert_eq!(normal, [0..20, 40..50]);
}

#[test]
fn links_of_one_identity_name_the_first() {
    let mut builder = TreeBuilder::new();
    for (path, inode) in [("b", 1), ("a", 1), ("c", 2)] {
        builder.add(path.into(), (0, inode), Entry::new(Kind::File, 0o644, 0, 0));
    }
    let snapshot = builder.finish();
    assert_eq!(snapshot.entries[&b"a"[..]].link_of, None);
    assert_eq!(snapshot.entries[&b"b"[..]].link_of.as_deref(), Some(&b"a"[..]));
    assert_eq!(snapshot.entries[&b"c"[..]].link_of, None);
}

#[test]
fn odd_files_twice_are_equal_and_survive_text() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let left_out = odd::odd_files(one.path(), 7).left_out;
    println!("left out here: {left_out:?}");
    odd::odd_files(two.path(), 7);
    let first = TreeSnapshot::of_directory(one.path());
    let second = TreeSnapshot::of_directory(two.path());
    let compare = Compare { mtime: false, ..Compare::copied() };
    first.assert_same(&second, &compare);
    assert_eq!(TreeSnapshot::from_text(&first.to_text()), first);
    assert!(first.entries.len() > 1700, "{} entries", first.entries.len());
}

#[test]
fn differences_each_kind_are_named() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("a"), "a").unwrap();
    fs::write(directory.path().join("b"), "b").unwrap();
    let before = TreeSnapshot::of_directory(directory.path());
    assert!(before.differences(&before, &Compare::same_filesystem()).is_empty());
    fs::write(directory.path().join("a"), "A").unwrap();
    fs::rename(directory.path().join("b"), directory.path().join("c")).unwrap();
    let after = TreeSnapshot::of_directory(directory.path());
    let text = before.differences(&after, &Compare::copied()).to_string();
    for wanted in ["\"a\": content", "\"b\": File | missing", "\"c\": missing | File"] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}

#[test]
fn kernel_mount_filled_unmounted_checks_clean_and_keeps_all() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    MkfsBtrfs::new().options("-L testkit").make(&image);
    let mounted = KernelMount::read_write(&image, "noatime");
    let left_out = odd::odd_files(mounted.path(), 3).left_out;
    assert_eq!(left_out, Vec::<String>::new(), "btrfs and root can have all of them");
    let before = TreeSnapshot::of_directory(mounted.path());
    mounted.unmount();
    assert_checks_clean_but_for_extended_refs(&image);
    let mounted = KernelMount::read_only(&image, "noatime");
    let after = TreeSnapshot::of_directory(mounted.path());
    before.assert_same(&after, &Compare::same_filesystem());
}

#[test]
fn check_of_damaged_image_is_not_clean() {
    if !oracle::require(Oracle::BtrfsProgs) || !oracle::require(Oracle::MkfsBtrfs) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    MkfsBtrfs::new().options("-m single").make(&image);
    assert!(btrfs_check(&image, CheckMode::Original).is_clean);
    let mut bytes = fs::read(&image).unwrap();
    // The first metadata block group's blocks, all but the superblocks.
    for block in bytes[1 << 20..40 << 20].chunks_exact_mut(4096) {
        block[200] ^= 0xff;
    }
    fs::write(&image, bytes).unwrap();
    assert!(!btrfs_check(&image, CheckMode::Original).is_clean);
}

#[test]
fn kernel_images_all_are_made_with_their_mark() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    for image in corpus::kernel_images() {
        assert!(image.snapshot.entries.len() > 1, "{}", image.name);
        assert!(image.devices.iter().all(|device| device.exists()), "{}", image.name);
    }
    let log = corpus::kernel_image("log").expect("the kernel is here");
    let without = log.snapshot_without_log.expect("this one has a log");
    for name in ["new", "directory/new-inline", "another-name"] {
        assert!(log.snapshot.entries.contains_key(name.as_bytes()), "{name}");
        assert!(!without.entries.contains_key(name.as_bytes()), "{name}");
    }
}

#[test]
fn collections_as_fetched_are_there() {
    if !oracle::require(Oracle::ImageCollections) {
        return;
    }
    let images = collections::images();
    assert!(images.len() > 100, "{} images", images.len());
    assert!(images.iter().all(|image| image.path.exists()));
}

#[test]
fn limits_of_time_and_memory_end_a_program() {
    let run_for = |seconds, script: &str| {
        let limits = Limits { seconds, memory_bytes: 100 << 20 };
        run_limited("sh".as_ref(), ["-c", script], &[], limits).0
    };
    assert_eq!(run_for(1, "sleep 300"), Ending::TimedOut);
    // What ends by itself has time for that, whatever else the machine does.
    let run = |script| run_for(60, script);
    assert_eq!(run("exit 3"), Ending::Exited(3));
    assert_eq!(run("kill -ABRT $$"), Ending::Killed);
    assert_ne!(run("x=$(head -c 200000000 /dev/zero | tr '\\0' a)"), Ending::Exited(0));
}
